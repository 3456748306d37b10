"""Tool calls that wait for a person: what is held back, what callers get, and what is recorded."""

import json

import pytest
import requests

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.live.config import read_config
from tests.gateway.approving import (
    ARGUMENTS,
    FEWER,
    REQUEST,
    ApprovingHouse,
    arguments_of,
    call,
    calling,
    message_of,
)
from tests.gateway.house import chunks, error_of, says, until
from tests.gateway.people import LONG, settled
from tests.gateway.test_monitor import install_alarm


@pytest.fixture(params=["sqlite", "postgres"])
def where(request, monkeypatch):
    """Where the record is kept: a setting of [gateway]."""
    monkeypatch.setenv("ARBITRAGE_SECRET", "c2VjcmV0" * 6)
    return {} if request.param == "sqlite" else {"database": request.getfixturevalue("server").new_database()}


@pytest.fixture
def crew(house):
    """A gateway with keys: a caller and two people who approve."""

    def start(**options):
        one = house(ApprovingHouse, **options)
        one.headers = one.keyed("call")
        return one, [one.reviewer(label) for label in one.members]

    return start


def test_a_call_is_given_out_once_a_person_approves_it(crew, where):
    house, (ann, _) = crew(gateway=where, policy={"content": "full"})
    waiting = house.ask_for()
    held = ann.wait()
    assert (held["kind"], held["options"]) == ("approve", ["Approve", "Edit", "Reject"])
    assert "Say it." in held["context"]
    [shown] = held["calls"]
    assert (shown["name"], shown["arguments"], shown["held"]) == ("refund_order", ARGUMENTS, True)
    assert not waiting.done
    assert ann.respond(held, "approve").status_code == 200
    message, finish, arbitrage = message_of(waiting.result())
    assert (message["tool_calls"], finish) == ([call()], "tool_calls")
    assert (arbitrage["guarantee"], arbitrage["tool_calls"], arbitrage["decided_by"]) == ("crc", "approved", "primary")
    assert "reason" not in arbitrage
    [record] = house.records()
    review = record.completion.call_review
    assert (review.verdict, review.names, review.no_guarantee) == ("approved", ("refund_order",), None)
    assert [(vote.reviewer, vote.choice) for vote in review.facts.votes] == [("ann", 0)]
    assert (record.decided_by, record.decision.no_guarantee) == ("primary", None)
    assert record.decision.content.answer["tool_calls"] == [call()]
    assert house.with_store(lambda store: store.verify()) == []
    assert len(house.primary.bodies) == 1


def test_a_call_can_be_edited_within_the_schema_of_its_tool(crew, where):
    house, (ann, _) = crew(gateway=where, policy={"content": "full"})
    waiting = house.ask_for()
    held = ann.wait()
    for arguments, words in {
        "{": "not JSON", "[1]": "must be a JSON object", '{"order": "A", "order": "B", "amount": 1}': "is there twice",
        '{"order": "A-17", "amount": NaN}': "NaN is not a number", '{"order": "A-17", "amount": 501}': "at most 500",
        '{"order": 17, "amount": 1}': "of type string", '{"amount": 1}': "must have 'order'",
        '{"order": "A", "amount": 1, "to": "me"}': "may not be given", ARGUMENTS: "nothing was changed",
    }.items():  # fmt: skip
        error = error_of(ann.respond(held, "edit", [arguments]), 422, "bad_arguments")
        assert words in error["message"]
    assert "choose Edit" in error_of(ann.respond(held, "approve", [FEWER]), 422)["message"]
    assert "got 2 texts" in error_of(ann.respond(held, "edit", [FEWER, FEWER]), 422)["message"]
    assert "give the arguments" in error_of(ann.respond(held, "edit"), 422)["message"]
    assert ann.respond(held, "edit", [FEWER]).status_code == 200
    message, finish, arbitrage = message_of(waiting.result())
    assert (arguments_of(message), finish) == ({"order": "A-17", "amount": 90}, "tool_calls")
    assert message["tool_calls"][0]["id"] == "call_1"
    assert (arbitrage["guarantee"], arbitrage["tool_calls"]) == ("none", "edited")
    assert arbitrage["reason"] == "a person edited the call of refund_order"
    [record] = house.records()
    assert record.decision.content.answer["tool_calls"] == [call()]  # what the rule decided
    assert record.decision.no_guarantee is None
    review = record.completion.call_review
    assert (review.verdict, review.no_guarantee) == ("edited", arbitrage["reason"])
    assert review.content.answer["tool_calls"][0]["function"]["arguments"] == FEWER
    assert house.with_store(lambda store: store.verify()) == []


def test_a_rejected_call_is_an_answer_that_says_so(crew, where):
    house, (ann, _) = crew(gateway=where)
    waiting = house.ask_for()
    ann.answer("reject")
    message, finish, arbitrage = message_of(waiting.result())
    assert message["content"] == "A person rejected the call of refund_order: it has not been made."
    assert ("tool_calls" in message, finish, arbitrage["tool_calls"]) == (False, "stop", "rejected")
    assert (arbitrage["guarantee"], arbitrage["reason"]) == ("none", "a person rejected the call of refund_order")
    [record] = house.records()
    assert record.completion.call_review.verdict == "rejected"
    assert record.completion.call_review.content.answer.startswith("blake2b-256:")
    assert "A-17" not in house.path.read_text()
    [tally] = until(lambda: house.with_store(tallied), LONG)
    assert (tally.decisions, tally.by_primary, tally.no_guarantee) == (1, 1, 1)


async def tallied(store):
    await store.fold_tallies()
    return await store.tallies(since=0.0)


def test_late_callers_come_back_with_their_key_and_no_model_is_asked_again(crew, where):
    house, (ann, _) = crew(gateway=where, review={"wait": 1.0}, primary=calling(sure=0.1))
    late = house.ask_for(key="k").result()
    error_of(late, 409, "review_pending")
    assert (late.headers["x-should-retry"], late.headers["location"]) == (
        "true", f"/v1/arbitrage/reviews/{late.headers['x-arbitrage-decision-id']}",
    )  # fmt: skip
    assert house.get(late.headers["location"]).json()["status"] == "waiting"
    error_of(house.ask_for({**REQUEST, "user": "other"}, key="k").result(), 422, "idempotency_key_reused")
    house.restart()
    ann.answer("edit", ['{"order": "B", "amount": 2}'])
    done = until(lambda: house.get(f"{late.headers['location']}?wait=5").json()["reply"], LONG)
    assert done["arbitrage"]["tool_calls"] == "edited"
    reply = house.ask_for(key="k").result()
    message, _, arbitrage = message_of(reply)
    assert arguments_of(message) == {"order": "B", "amount": 2}
    assert [leg["role"] for leg in arbitrage["legs"]] == ["primary", "guardian"]
    assert (len(house.primary.bodies), len(house.guardian.bodies)) == (1, 1)
    assert reply.json() == done
    [record] = house.records()
    assert (record.decided_by, record.decision.pending, len(record.decision.legs)) == ("guardian", False, 2)
    assert house.with_store(lambda store: store.held_answer(record.id)) is None  # nothing of it is left in the queue


def test_without_a_key_the_same_body_joins(crew):
    house, (ann, _) = crew(review={"wait": 1.0})
    late = house.ask_for().result()
    assert "Idempotency-Key: review:" in error_of(late, 409, "review_pending")["message"]
    ann.answer("approve")
    location = late.headers["location"]
    until(lambda: house.get(location).json()["status"] == "decided", LONG)
    key = f"review:{late.headers['x-arbitrage-decision-id']}"
    message, _, _ = message_of(house.ask_for(key=key).result())
    assert message["tool_calls"] == [call()]
    assert len(house.primary.bodies) == 1


def test_a_caller_who_leaves_withdraws_the_call_and_may_ask_again(crew):
    house, (ann, _) = crew()
    sent = {"data": json.dumps(REQUEST), "headers": {**house.headers, "Content-Type": "application/json"}}
    with pytest.raises(requests.Timeout):
        requests.post(f"{house.url}/v1/chat/completions", **sent, timeout=1.0)
    until(lambda: not house.with_store(lambda store: store.open_places()), LONG)
    assert ann.claim() is None
    again = house.ask_for()
    ann.answer("approve")
    assert message_of(again.result())[0]["tool_calls"] == [call()]
    assert len(house.primary.bodies) == 1  # the decision that was made stands
    assert len(house.records()) == 1


def test_nobody_in_time_is_an_answer_without_the_call(crew):
    house, _ = crew(review={"wait": 1.0, "deadline": 1.0})
    message, _, arbitrage = until(lambda: answered(house, "k"), LONG)
    assert message["content"] == "Nobody approved the call of refund_order in time: it has not been made."
    assert (arbitrage["guarantee"], arbitrage["tool_calls"]) == ("none", "expired")
    assert "tool_calls" not in message


def answered(house, key, body=REQUEST):
    reply = house.ask_for(body, key=key).result()
    return None if reply.status_code == 409 else message_of(reply)


def test_with_fallback_nobody_present_ends_it_at_once(crew):
    house, _ = crew(review={"late": "fallback", "wait": 40.0})
    message, _, arbitrage = message_of(house.ask_for().result())
    assert ("tool_calls" in message, arbitrage["tool_calls"]) == (False, "expired")


def test_if_nobody_can_tell_a_lead_decides_and_without_one_nothing_is_called(crew):
    house, (ann, bob) = crew(leads=("lea",))
    lea = house.reviewer("lea")
    waiting = house.ask_for()
    for one in (ann, bob):
        assert one.post(f"{one.wait()['token']}/skip").status_code == 204
    lea.answer("approve")
    assert message_of(waiting.result())[2]["tool_calls"] == "approved"
    [record] = house.records()
    assert record.completion.call_review.facts.level == 1
    alone, (one, other) = crew()
    waiting = alone.ask_for()
    for person in (one, other):
        assert person.post(f"{person.wait()['token']}/skip").status_code == 204
    assert message_of(waiting.result())[2]["tool_calls"] == "failed"


def test_other_calls_and_plain_answers_do_not_wait(house):
    gate = house(ApprovingHouse, primary=calling(call("look_up", "{}")))
    assert message_of(gate.chat(REQUEST))[0]["tool_calls"] == [call("look_up", "{}")]
    assert "tool_calls" not in gate.chat(REQUEST).json()["arbitrage"]
    gate.primary.reply = says("It rains.", 0.9)
    assert message_of(gate.chat(REQUEST))[0]["content"] == "It rains."
    assert message_of(gate.chat())[0]["content"] == "It rains."
    assert gate.with_store(lambda store: store.open_places()) == 0


def test_calls_of_one_answer_stand_or_fall_together(crew):
    both = (call("look_up", '{"a":1}', "call_0"), call())
    house, (ann, _) = crew(primary=calling(*both, content="I will refund it."))
    waiting = house.ask_for()
    held = ann.wait()
    assert [(one["name"], one["held"]) for one in held["calls"]] == [("look_up", False), ("refund_order", True)]
    assert "I will refund it." in held["context"]
    assert ann.respond(held, "edit", [FEWER]).status_code == 200
    message, *_ = message_of(waiting.result())
    assert [one["function"]["arguments"] for one in message["tool_calls"]] == ['{"a":1}', FEWER]
    waiting = house.ask_for()
    ann.answer("reject")
    assert "tool_calls" not in message_of(waiting.result())[0]


DISGUISED = (
    {"tool_calls": [call("Refund_Order")]}, {"tool_calls": [call("functions.refund_order")]},
    {"tool_calls": [call("refund\u200b_order")]}, {"tool_calls": [{"id": "c", "type": "function", "function": {}}]},
    {"content": "x", "tool_calls": {"function": {"name": "refund_order"}}},
    {"content": "x", "function_call": {"name": "refund_order", "arguments": "{}"}},
    {"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "refund_by_text", "input": "all of it"}}]},
)  # fmt: skip


def test_a_call_in_disguise_waits_too(crew):
    house, (ann, _) = crew()
    for place, made in enumerate(DISGUISED):
        house.primary.reply = lambda *_, made=made: odd(made)
        waiting = house.ask_for({**REQUEST, "messages": [{"role": "user", "content": f"Number {place}."}]})
        ann.answer("reject")
        message, *_ = message_of(waiting.result())
        assert message.keys() <= {"role", "content", "refusal"}


def odd(message):
    """A reply whose message is not as it should be."""
    document = says("x", 0.9)()
    document["choices"][0]["message"] = {"role": "assistant", "content": None, **message}
    return document


def test_a_stream_sends_nothing_before_the_verdict(crew):
    house, (ann, _) = crew(review={"wait": 1.0}, guardian=calling(), primary=calling(sure=0.1))
    streamed = {**REQUEST, "stream": True}
    late = house.ask_for(streamed, key="k").result()
    assert "refund" not in late.text
    error_of(late, 409, "review_pending")
    ann.answer("edit", [FEWER])
    reply = until(lambda: given(house.ask_for(streamed, key="k").result()), LONG)
    calls = [one for chunk in chunks(reply) for one in chunk["choices"][0]["delta"].get("tool_calls") or ()]
    assert [one["function"]["arguments"] for one in calls] == [FEWER]
    assert chunks(reply)[-1]["arbitrage"]["guarantee"] == "none"
    house.primary.reply = says("It rains.", 0.9)
    words = chunks(house.chat({**streamed, "messages": [{"role": "user", "content": "And now?"}]}))
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in words) == "It rains."


def given(reply):
    return reply if reply.status_code == 200 else None


def test_the_responses_api_waits_too(crew):
    house, (ann, _) = crew()
    tools = [{"type": "function", **tool["function"]} for tool in REQUEST["tools"]]
    waiting = house.ask_for({"model": "support", "input": "Say it.", "tools": tools}, path="/v1/responses")
    ann.answer("edit", [FEWER])
    [item] = waiting.result().json()["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "refund_order", FEWER)
    waiting = house.ask_for({"model": "support", "input": "Again.", "tools": tools}, path="/v1/responses")
    ann.answer("reject")
    [item] = waiting.result().json()["output"]
    assert "rejected the call of refund_order" in item["content"][0]["text"]


def test_a_verdict_changes_neither_the_ledger_nor_the_rows(crew):
    house, (ann, _) = crew(policy={"audit_rate": 1.0, "content": "full"})
    for choice in ("approve", "reject", "edit"):
        waiting = house.ask_for()
        ann.answer(choice, [FEWER] if choice == "edit" else None)
        message_of(waiting.result())
    records = until(lambda: audited(house), LONG)
    assert len({json.dumps(record.decision.content.answer) for record in records}) == 1
    assert {(record.decided_by, record.decision.action, record.decision.no_guarantee) for record in records} == {
        ("primary", 1, None)
    }
    for record in records:  # the Guardian was audited on the question; the grades are of the answers that were decided
        grades = {"primary": 0.0, "guardian": 1.0}
        headers = house.keyed("review")
        assert house.post(f"/v1/arbitrage/records/{record.id}/feedback", {"grades": grades}, headers=headers).ok
    losses, delivered = until(lambda: known(house, 3), LONG)
    assert (losses, delivered) == ([1.0, 1.0, 1.0], [True, False, False])


def audited(house):
    records = house.records()
    return records if len(records) == 3 and all(record.audit for record in records) else None


def known(house, count):
    async def read(store):
        [ledger] = await store.ledgers()
        rows = await store.ledger(ledger.key)
        return rows.loss.tolist(), rows.delivered.tolist(), ledger.known

    losses, delivered, known_losses = house.with_store(read)
    return (losses, delivered) if known_losses == count else None


def test_a_verdict_says_nothing_of_who_decided(crew):
    house, (ann, _) = crew()
    seen = []
    for sure in (0.9, 0.1):
        house.primary.reply = house.guardian.reply = calling(sure=sure)
        waiting = house.ask_for()
        held = ann.answer("approve")
        seen.append({name: value for name, value in held.items() if name != "token"})
        assert message_of(waiting.result())[2]["decided_by"] == ("primary" if sure > 0.5 else "guardian")
    assert seen[0] == seen[1]


@pytest.mark.parametrize("change", ["another version", "safe mode"])
def test_another_version_or_an_alarm_while_people_decide_leaves_no_guarantee(crew, change):
    house, (ann, _) = crew(review={"wait": 1.0})
    error_of(house.ask_for(key="k").result(), 409, "review_pending")
    if change == "safe mode":
        install_alarm(house)
    else:
        other = {"certificate": house.certificate(alpha=0.1).to_dict()}
        assert house.put("/v1/arbitrage/policies/support", other, headers=house.keyed("admin")).ok
    ann.answer("approve")
    message, _, arbitrage = until(lambda: answered(house, "k"), LONG)
    assert (message["tool_calls"], arbitrage["guarantee"]) == ([call()], "none")
    assert change in arbitrage["reason"]
    [record] = house.records()
    assert change in record.completion.call_review.no_guarantee


def test_erased_answers_are_gone_from_the_queue(crew):
    house, (ann, _) = crew(review={"wait": 1.0})
    late = house.ask_for(key="k").result()
    id = late.headers["x-arbitrage-decision-id"]
    held = ann.wait()
    house.with_store(lambda store: store.erase(id))
    assert ann.respond(held, "edit", [FEWER]).status_code in (200, 409)
    settled()
    assert house.with_store(lambda store: store.held_answer(id)) is None
    assert house.ask_for(key="k").result().status_code in (409, 410)


@pytest.mark.parametrize(
    ("review", "options", "words"),
    [
        ({}, {"form": "menu", "primary": None, "guardian": None}, "policy support chooses from menus"),
        ({"tool_calls": [""]}, {}, "names of tools"),
        ({"tool_calls": ["refund_*\n"]}, {}, "names of tools"),
        ({"team": "nobody"}, {}, "there is no team 'nobody'"),
        ({"tool_calls": [], "team": "support team"}, {}, "set tool_calls too"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(tmp_path, review, options, words):
    house = ApprovingHouse(tmp_path, review=review, certificate=False, policy={"mode": "shadow"}, **options)
    house.primary.url = house.guardian.url = "http://127.0.0.1:9/v1"
    house.path = tmp_path / "arbitrage.toml"
    house._write({})
    with pytest.raises(ConfigError, match=words):
        read_config(house.path)
    house._loop.close()


def test_without_a_team_nobody_could_approve(tmp_path):
    house = ApprovingHouse(tmp_path, certificate=False, policy={"mode": "shadow"})
    house.primary.url = house.guardian.url = "http://127.0.0.1:9/v1"
    house.path = tmp_path / "arbitrage.toml"
    house._write({})
    text = house.path.read_text()
    house.path.write_text(text[: text.index("[teams")] + text[text.index("[policies.support.review]") :])
    with pytest.raises(ConfigError, match=r"line \d+: .*need people who approve them"):
        read_config(house.path)
    house._loop.close()


def test_a_session_waits_too_and_goes_on_afterwards(crew):
    house, (ann, _) = crew(certificate=False, policy={"mode": "shadow", "sticky": "session"}, review={"wait": 1.0})
    first = {**REQUEST, "arbitrage": {"session": "s"}}
    error_of(house.ask_for(first, key="k").result(), 409, "review_pending")
    ann.answer("reject")
    message, _, arbitrage = until(lambda: answered(house, "k", first), LONG)
    assert "rejected the call" in message["content"]
    house.primary.reply = house.guardian.reply = says("It rains.", 0.9)
    after = message_of(house.chat({**first, "messages": [*REQUEST["messages"], {"role": "user", "content": "Why?"}]}))
    assert after[0]["content"] == "It rains."
    assert after[2]["session"] == arbitrage["session"]
