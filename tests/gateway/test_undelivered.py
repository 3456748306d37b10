"""Decisions whose reply was not delivered: recorded all the same, and continued by the next attempt."""

import threading

import pytest
import requests

from conformal_arbitrage import ScoreLog
from tests.gateway.house import CHAT, DECISION, UNSURE, error_of, failing, hanging, says, until, votes
from tests.gateway.test_modes import exported

KEY = {"Idempotency-Key": "order-17"}
FORMS = {
    "menu": ({"primary": votes(*UNSURE)}, votes(0, 1), lambda made, **rest: made.decide(**rest)),
    "text": (
        {"form": "text", "primary": says("mine", 0.1)}, says("theirs"), lambda made, **rest: made.chat(**rest)
    ),
}  # fmt: skip


def leaving(made, headers=None, body=DECISION, seconds=0.5):
    """A caller who does not wait long."""
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(f"{made.url}/v1/decisions", json=body, headers=headers, timeout=seconds)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("headers", [KEY, {}], ids=["key", "no key"])
def test_a_retry_keeps_the_decision_and_the_primary_s_leg_and_asks_the_guardian_again(house, form, headers):
    options, guardian, ask = FORMS[form]
    made = house(**options, guardian=failing())
    for _ in range(3):
        error_of(ask(made, headers=headers), 502, "guardian_failed")
    made.primary.reply = votes(0.9, 0.1) if form == "menu" else says("mine", 0.9)
    made.guardian.reply = guardian
    reply = ask(made, headers=headers)
    assert reply.headers["x-arbitrage-decided-by"] == "guardian"
    assert (len(made.primary.bodies), len(made.guardian.bodies)) == (1, 4)
    [record] = made.records()
    assert record.id == reply.headers["x-arbitrage-decision-id"]
    assert (record.decision.pending, record.completion.finish) == (False, "stop")
    assert [leg.role for leg in record.decision.legs] == ["primary", "guardian"]
    assert made.with_store(lambda store: store.verify()) == []


def test_delivery_ends_the_reuse_of_a_leg(house):
    made = house(primary=votes(*UNSURE), guardian=failing())
    made.decide()
    made.guardian.reply = votes(0, 1)
    ids = [made.decide().headers["x-arbitrage-decision-id"] for _ in range(2)]
    assert len(set(ids)) == 2
    assert len(made.primary.bodies) == 2


def test_a_key_keeps_its_decision_across_a_restart_and_refuses_another_body_meanwhile(house):
    made = house(primary=votes(*UNSURE), guardian=failing())
    error_of(made.decide(headers=KEY), 502)
    made.restart()
    error_of(made.decide({**DECISION, "input": "Another."}, headers=KEY), 422, "idempotency_key_reused")
    made.guardian.reply = votes(0, 1)
    first, again = made.decide(headers=KEY), made.decide(headers=KEY)
    assert first.content == again.content
    assert len(made.primary.bodies) == 1


@pytest.mark.parametrize("headers", [KEY, {}], ids=["key", "no key"])
def test_a_caller_who_leaves_and_comes_back_gets_the_same_decision(house, headers):
    made = house(primary=votes(*UNSURE), guardian=hanging)
    leaving(made, headers)
    [record] = until(lambda: [r for r in made.records() if r.completion])
    assert (record.decided_by, record.decision.pending, record.completion.finish) == ("guardian", True, "cancelled")
    made.guardian.reply = votes(0, 1)
    assert made.decide(headers=headers).headers["x-arbitrage-decision-id"] == record.id
    assert len(made.primary.bodies) == 1


def test_another_version_of_the_policy_decides_anew(house):
    made = house(primary=votes(*UNSURE), guardian=failing())
    made.decide()
    other = made.certificate(alpha=0.1).to_dict()
    assert made.put("/v1/arbitrage/policies/support", {"certificate": other}).status_code == 200
    made.decide()
    assert len(made.primary.bodies) == len(made.records()) == 2


def test_one_failed_question_loses_none_of_the_others_and_a_retry_keeps_them(house):
    def primary(path, body, number):
        return votes(*(UNSURE if "unsure" in str(body) else (0.9, 0.1)))(path, body, number)

    made = house(primary=primary, guardian=failing(), policy={"audit_rate": 1.0})
    [plain] = DECISION["questions"]
    body = {**DECISION, "questions": [plain, {**plain, "instructions": "unsure?"}, plain]}
    error_of(made.decide(body, headers=KEY), 502, "guardian_failed")
    assert sorted(r.decided_by for r in made.records()) == ["guardian", "primary", "primary"]
    asked = len(made.primary.bodies)
    made.guardian.reply = votes(0, 1)
    answers = made.decide(body, headers=KEY).json()["answers"]
    assert [answer["arbitrage"]["decided_by"] for answer in answers] == ["primary", "guardian", "primary"]
    assert {answer["arbitrage"]["id"] for answer in answers} == {r.id for r in made.records()}
    assert (len(made.primary.bodies), asked) == (3, 3)


@pytest.mark.parametrize("mode", [{"mode": "shadow"}, {"audit_rate": 1.0}], ids=["shadow", "audited"])
def test_limits_errors_and_callers_who_leave_are_rows_of_the_export(house, mode):
    made = house(primary=votes(*UNSURE), policy=mode, gateway={"guardian_calls_per_minute": 3})
    made.guardian.reply = failing(400)
    error_of(made.decide({**DECISION, "input": "1"}), 502)
    made.guardian.reply = hanging
    leaving(made, body={**DECISION, "input": "2"})
    until(lambda: len(made.records()) == 2)
    made.guardian.reply = votes(0, 1)
    for k in range(6):
        made.decide({**DECISION, "input": f"limited {k}"})
    log = ScoreLog.read(exported(made, "--score-log"))
    assert len(log) == len(made.primary.bodies) == 8
    assert log.missing.sum() >= 5
    assert not log.no_opinion.any()
    assert made.with_store(lambda store: store.verify()) == []


def test_a_drawn_decision_whose_guardian_failed_is_audited_later(house):
    made = house(primary=votes(*UNSURE), guardian=failing(), policy={"audit_rate": 1.0})
    replies = iter([failing(), *[votes(0, 1)] * 9])
    made.guardian.reply = lambda *asked: next(replies)(*asked)
    error_of(made.decide(), 502)
    [record] = until(lambda: [r for r in made.records() if r.audit])
    assert record.decision.audited
    log = ScoreLog.read(exported(made, "--score-log"))
    assert log.guardian.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("policy", "headers", "count"), [({"audit_rate": 1.0}, {}, 1), ({}, KEY, 1), ({}, {}, 0)],
    ids=["drawn", "keyed", "plain"],
)  # fmt: skip
def test_a_drawn_or_keyed_decision_is_on_disk_while_the_guardian_is_being_asked(house, policy, headers, count):
    made = house(primary=votes(*UNSURE), guardian=hanging, policy=policy)
    asking = threading.Thread(target=leaving, args=(made, headers), kwargs={"seconds": 2})
    asking.start()
    until(lambda: made.guardian.under_way)
    records = made.records()
    assert asking.is_alive()
    assert [(r.decision.pending, r.completion, r.decision.audited) for r in records] == [
        (True, None, bool(policy))
    ] * count
    asking.join()


def test_a_text_that_was_chatted_about_in_vain_keeps_its_primary_s_answer_in_the_record(house):
    made = house(form="text", primary=says("mine", 0.1), guardian=failing(), policy={"content": "full"})
    made.chat(CHAT, headers=KEY)
    made.guardian.reply = says("theirs")
    made.chat(CHAT, headers=KEY)
    [record] = made.records()
    assert (record.decision.content.primary_answer, record.decision.content.answer["content"]) == ("mine", "theirs")
