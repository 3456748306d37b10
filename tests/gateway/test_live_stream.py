import asyncio
import json
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import msgspec
import openai
import pytest
import requests

from conformal_arbitrage.gateway.requests import Attempt
from conformal_arbitrage.live.build import database_of
from conformal_arbitrage.store import integrity, outbox
from conformal_arbitrage.store.record import CompletionBody, Content
from tests.gateway.durability import run_sql
from tests.gateway.house import CHAT, MESSAGES, House, chunks, error_of, failing, says, until
from tests.scripted import Stream, chunk, completion, ending, sse

STREAM = {**CHAT, "stream": True}
WITH_USAGE = {**STREAM, "stream_options": {"include_usage": True}}
WAITING = ": waiting for the decision"
KEY = {"Idempotency-Key": "order-17"}
ERROR = sse({"error": {"message": "Kim ran out of memory"}})
SAFE = {"safe_answer": "Please call us."}
ODD = "a\n\nb\r\ndata: [DONE]\n\n\u2028\u0085\x00é日本"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def proven(monkeypatch):
    """The first step of a request takes the record for writable, so that a test may lock it for the steps after."""
    monkeypatch.setattr("conformal_arbitrage.store.sqlite.PROOF_SECONDS", float("inf"))
    monkeypatch.setattr("conformal_arbitrage.store.sqlite._Writer.may_write", lambda _: True)


@pytest.fixture
def impatient(monkeypatch):
    """Headers wait 0.2 s for the decision, not 10."""
    monkeypatch.setattr("conformal_arbitrage.gateway.chat.SILENCE", 0.2)


async def told(steps, end):
    yield sse(chunk({"role": "assistant", "content": "", "refusal": None}))
    for step in steps:
        if isinstance(step, threading.Event):
            await opened(step)
        elif isinstance(step, bytes):
            yield step
        else:
            yield sse(chunk({"content": step} if isinstance(step, str) else step))
        await asyncio.sleep(0.01)  # a portion of its own
    yield end


async def opened(gate):
    ends = time.monotonic() + 60
    while not gate.is_set() and time.monotonic() < ends:
        await asyncio.sleep(0.01)


def tells(*steps, end=None, cut=False, **rest):
    """An upstream that streams an answer: texts and deltas as chunks, bytes as they are; it waits at a gate."""
    return lambda *_: Stream(told(steps, ending(**rest) if end is None else end), cut=cut)


def live(house, *steps, guardian=None, **options):
    """A gateway whose Primary is never sure and whose Guardian streams."""
    return house(form="text", primary=says("mine", 0.1), guardian=guardian or tells(*steps), **options)


@contextmanager
def streaming(gateway, body=STREAM, **headers):
    """A reply as it comes, and its events one by one."""
    url = f"{gateway.url}/v1/chat/completions"
    with requests.post(url, json=body, headers=headers, stream=True, timeout=60) as reply:
        yield reply, events(reply)


def events(reply):
    rest = b""
    for piece in reply.iter_content(None):
        *whole, rest = (rest + piece).split(b"\n\n")
        yield from (one.decode() for one in whole)


def data(event):
    return json.loads(event.removeprefix("data: "))


def word(event):
    return data(event)["choices"][0]["delta"].get("content") or ""


def until_word(coming, text):
    """Read up to the event that holds a text."""
    return next(event for event in coming if event.startswith("data: {") and text in word(event))


def content(documents):
    return "".join(d["choices"][0]["delta"].get("content") or "" for d in documents if d.get("choices"))


@contextmanager
def locked(gateway):
    """Nobody else can write to the record meanwhile."""
    with closing(sqlite3.connect(database_of(gateway.config), isolation_level=None)) as connection:
        connection.execute("begin immediate")
        yield
        connection.execute("rollback")


def completions(gateway):
    """Every completion event there is, as it was written."""
    rows = run_sql(database_of(gateway.config), "select body from events where kind = 'completion' order by at")
    return [msgspec.json.decode(body, type=CompletionBody) for (body,) in rows]


def claims(gateway):
    """The states of all idempotency keys that are held."""
    return [state for (state,) in run_sql(database_of(gateway.config), "select state from claims")]


def figure(gateway, name):
    """The sum of a figure of the metrics, over all its labels that are named."""
    lines = [line for line in gateway.get("/metrics").text.splitlines() if line.startswith(f"arbitrage_{name}")]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_the_primary_is_asked_without_a_stream_and_the_guardian_gets_the_same_request_with_one(house):
    gateway = live(house, "theirs")
    gateway.chat({**STREAM, "tools": [LOOK], "user": "Kim", "stream_options": {"include_usage": False}})
    [first], [second] = gateway.primary.bodies, gateway.guardian.bodies
    assert "stream" not in first
    assert "stream_options" not in first
    assert second.pop("stream") is True
    assert second.pop("stream_options") == {"include_usage": True}
    assert first.pop("logprobs") is True
    assert first == second
    assert (second["tools"], second["user"], second["messages"]) == ([LOOK], "Kim", MESSAGES)


def test_an_answer_of_the_primary_that_stands_is_sent_once_it_is_recorded_and_the_guardian_is_not_asked(
    house, impatient
):
    gateway = house(form="text", primary=says("mine", 0.9), guardian=tells("theirs"))
    with ThreadPoolExecutor(1) as pool, locked(gateway):
        reply = pool.submit(gateway.chat, STREAM)
        time.sleep(0.5)
    assert reply.result().text.startswith(WAITING)
    assert content(chunks(reply.result())) == "mine"
    assert gateway.guardian.bodies == []
    assert completions(gateway) == []


def test_words_are_passed_on_while_the_guardian_is_still_writing(house):
    gates = [threading.Event() for _ in range(3)]
    gateway = live(house, "one ", gates[0], "two ", gates[1], "three ", gates[2], "four")
    with streaming(gateway) as (_, coming):
        for text, gate in zip(["one ", "two ", "three "], gates, strict=True):
            assert word(until_word(coming, text)) == text
            assert gateway.guardian.under_way == 1
            gate.set()
        assert content(data(e) for e in coming if e.startswith("data: {")) == "four"


def test_no_word_leaves_before_the_decision_is_recorded(house, impatient):
    gate = threading.Event()
    gateway = live(house, gate, "one ", "two")
    with streaming(gateway) as (_, coming):
        with locked(gateway):
            gate.set()
            until(lambda: gateway.guardian.bodies and gateway.guardian.under_way == 0)
            assert [next(coming) for _ in range(5)] == [WAITING] * 5
        first = next(event for event in coming if event != WAITING)
        [record] = gateway.records()
        assert data(first)["arbitrage"]["id"] == record.id
        assert content(data(e) for e in coming if e.startswith("data: {")) == "one two"


def test_how_it_ended_is_recorded_before_the_last_chunk_leaves(house, impatient):
    gate = threading.Event()
    gateway = live(house, "one ", gate, "two")
    with streaming(gateway) as (_, coming):
        until_word(coming, "one ")
        assert completions(gateway) == []
        with locked(gateway):
            gate.set()
            until(lambda: gateway.guardian.under_way == 0)
            until_word(coming, "two")
            assert [next(coming) for _ in range(5)] == [WAITING] * 5
        last = next(event for event in coming if event != WAITING)
        assert [one.finish for one in completions(gateway)] == ["stop"]
        assert data(last)["choices"][0]["finish_reason"] == "stop"
        assert list(coming) == ["data: [DONE]"]


def test_a_stream_is_a_beginning_words_an_end_and_done(house):
    reply = live(house, "one ", {"reasoning_content": "since"}, "two", guardian=None).chat(STREAM)
    assert reply.text.endswith("data: [DONE]\n\n")
    documents = chunks(reply)
    deltas = [d["choices"][0]["delta"] for d in documents]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [d for d in deltas[1:] if any(d.values())] == [
        {"content": "one "},
        {"reasoning_content": "since"},
        {"content": "two"},
    ]
    assert all("role" not in delta for delta in deltas[1:])
    assert [d["choices"][0]["finish_reason"] for d in documents] == [None] * (len(documents) - 1) + ["stop"]
    assert {d["object"] for d in documents} == {"chat.completion.chunk"}
    assert {(d["id"], d["model"]) for d in documents} == {(f"chatcmpl-{documents[0]['arbitrage']['id']}", "support")}
    assert all("usage" not in d for d in documents)


def test_the_first_and_the_last_chunk_say_who_decided_and_the_last_what_it_took(house):
    reply = live(house, "one ", "two").chat(STREAM)
    documents = chunks(reply)
    assert [k for k, d in enumerate(documents) if "arbitrage" in d] == [0, len(documents) - 1]
    first, last = documents[0]["arbitrage"], documents[-1]["arbitrage"]
    assert first["id"] == last["id"] == reply.headers["x-arbitrage-decision-id"]
    assert (first["decided_by"], last["decided_by"], last["guarantee"]) == ("guardian", "guardian", "crc")
    assert [leg["role"] for leg in first["legs"]] == ["primary"]
    assert [(leg["role"], leg["usage"]["total_tokens"], leg["model"]) for leg in last["legs"]] == [
        ("primary", 15, "m"),
        ("guardian", 15, "m"),
    ]


def test_the_tokens_of_both_models_come_last_if_asked_for(house):
    gateway = live(house, guardian=tells("theirs", usage=(100, 50)))
    [*rest, last] = chunks(gateway.chat(WITH_USAGE))
    assert last["usage"] == {"prompt_tokens": 110, "completion_tokens": 55, "total_tokens": 165}
    assert (last["choices"], last["arbitrage"]["decided_by"]) == ([], "guardian")
    assert all(d["usage"] is None for d in rest)


def test_the_reason_it_ended_is_the_guardian_s(house):
    gateway = live(house, guardian=tells("theirs", finish="length"))
    assert chunks(gateway.chat(STREAM))[-1]["choices"][0]["finish_reason"] == "length"
    assert completions(gateway)[0].finish == "length"


def test_the_record_has_one_decision_and_one_completion_with_tokens_and_cost(house):
    gateway = live(house, guardian=tells("theirs", usage=(100, 50)))
    gateway.chat(STREAM)
    [record] = gateway.records()
    assert (record.decided_by, record.decision.action, record.decision.candidates) == ("guardian", 0, (0, 1))
    assert [leg.role for leg in record.decision.legs] == ["primary"]
    [ended] = completions(gateway)
    assert (ended.finish, ended.cost) == ("stop", pytest.approx(165e-6))
    assert (ended.leg.role, ended.leg.served, ended.leg.reply) == ("guardian", "m", None)
    spent = ended.leg.spent
    assert (spent.calls, spent.input_tokens, spent.output_tokens) == (1, 100, 50)
    assert gateway.with_store(lambda store: integrity.verify(store)) == []


def test_headers_name_the_decision_if_it_is_there_in_time(house, impatient):
    gate = threading.Event()
    gateway = live(house, "one ", gate, "two")
    with streaming(gateway) as (reply, coming):
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-arbitrage-decision-id"] == data(next(coming))["arbitrage"]["id"]
        assert (reply.headers["x-arbitrage-decided-by"], reply.headers["x-arbitrage-alpha"]) == ("guardian", "0.05")
        assert reply.headers["x-arbitrage-cost"] == "unknown"
        until_word(coming, "one ")
        assert next(coming) == WAITING  # a pause of the Guardian's
        gate.set()
        assert content(data(e) for e in coming if e.startswith("data: {")) == "two"


def test_a_decision_that_is_late_comes_without_headers_after_comments(house, impatient):
    gate = threading.Event()
    gateway = live(house, gate, "theirs")
    with streaming(gateway) as (reply, coming):
        assert [next(coming) for _ in range(3)] == [WAITING] * 3
        assert not [name for name in reply.headers if name.startswith("x-arbitrage")]
        gate.set()
        rest = [event for event in coming if event != WAITING]
    assert rest[-1] == "data: [DONE]"
    assert content(map(data, rest[:-1])) == "theirs"
    assert data(rest[0])["arbitrage"]["id"] == gateway.records()[0].id


def test_words_that_came_before_the_first_visible_one_are_not_lost(house):
    gateway = live(house, {"reasoning_content": "since"}, " ", "\n", "one")
    documents = chunks(gateway.chat(STREAM))
    assert content(documents) == " \none"
    assert "since" in [d["choices"][0]["delta"].get("reasoning_content") for d in documents]


def test_a_long_answer_in_many_chunks_comes_whole(house):
    words = [f"word {k} " for k in range(2000)]
    gateway = live(house, *(sse(*(chunk({"content": w}) for w in words[k : k + 50])) for k in range(0, 2000, 50)))
    documents = chunks(gateway.chat(STREAM))
    assert content(documents) == "".join(words)
    assert len(documents) > 2000


def echo(path, body, number):
    """A Guardian that says what it was asked, letter by letter."""
    return tells(*body["messages"][0]["content"])(path, body, number)


def test_streams_at_the_same_time_do_not_mix(house):
    gateway = live(house, guardian=echo)
    questions = [f"<{k}> " + "abc" * 5 for k in range(20)]
    bodies = [{**STREAM, "messages": [{"role": "user", "content": text}]} for text in questions]
    with ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(gateway.chat, bodies))
    assert [content(chunks(reply)) for reply in replies] == questions
    assert gateway.guardian.most_at_once > 5
    assert {r.id for r in gateway.records()} == {reply.headers["x-arbitrage-decision-id"] for reply in replies}
    assert [one.finish for one in completions(gateway)] == ["stop"] * 20


def test_a_gateway_that_is_told_to_stop_ends_a_live_stream_first(house):
    gate = threading.Event()
    gateway = live(house, "one ", gate, "two")
    with streaming(gateway) as (_, coming), ThreadPoolExecutor(1) as pool:
        until_word(coming, "one ")
        stopping = pool.submit(gateway.stop)
        time.sleep(0.3)
        gate.set()
        rest = list(coming)
        stopping.result()
    assert rest[-1] == "data: [DONE]"
    assert [one.finish for one in completions(gateway)] == ["stop"]


def test_a_primary_that_fails_has_no_say_and_the_guardian_streams(house):
    gateway = house(form="text", primary=failing(500), guardian=tells("theirs"))
    assert content(chunks(gateway.chat(STREAM))) == "theirs"
    [record] = gateway.records()
    assert record.decision.legs[0].error
    assert record.completion.finish == "stop"


def test_a_guardian_that_does_not_stream_is_read_as_a_whole(house):
    gateway = live(house, guardian=says("theirs"))
    reply = gateway.chat(STREAM)
    assert gateway.guardian.bodies[0]["stream"] is True
    assert content(chunks(reply)) == "theirs"
    assert reply.headers["x-arbitrage-cost"] == "3e-05"
    [record] = gateway.records()
    assert [leg.role for leg in record.decision.legs] == ["primary", "guardian"]
    assert completions(gateway) == []


def test_in_shadow_mode_nothing_is_live(house):
    gateway = house(form="text", guardian=says("theirs"), policy={"mode": "shadow"})
    assert content(chunks(gateway.chat(STREAM))) == "theirs"
    assert "stream" not in gateway.guardian.bodies[0]


PINNED = {"guardian": {"attempts": 3}, "guardian.pinned": {"served": "m"}}


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """One gateway for many failures, without a safe answer."""
    folder = tmp_path_factory.mktemp("strict")
    with House(folder, form="text", primary=says("mine", 0.1), models=PINNED) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def lenient(tmp_path_factory):
    """One gateway for many failures, with a safe answer."""
    folder = tmp_path_factory.mktemp("lenient")
    with House(folder, form="text", primary=says("mine", 0.1), models=PINNED, task=SAFE) as gateway:
        yield gateway


BEFORE = {
    "another model": tells(sse(chunk({"content": "Kim"}, model="m-2"))),
    "a refusal": failing(403, "Kim"),
    "an error": tells(ERROR),
    "no word": tells(),
    "blank words": tells(" ", "\n\t"),
    "only thoughts": tells({"reasoning_content": "since"}),
    "no end": tells(end=b""),
    "cut off": tells(end=b"", cut=True),
    "declined": tells({"refusal": "I will not"}),
    "parts for a text": tells({"content": [{"type": "text", "text": "x"}]}),
    "no list of calls": tells({"tool_calls": {"index": 0}}),
}


def unheard(gateway, guardian):
    """What comes of a Guardian that must not be heard, and the records it leaves; it is asked once."""
    before = len(gateway.records())
    gateway.guardian.bodies.clear()
    gateway.guardian.reply = guardian
    reply = gateway.chat({**STREAM, "user": str(before)})
    assert len(gateway.guardian.bodies) == 1
    assert "Kim" not in reply.text
    records = gateway.records()
    return reply, records[: len(records) - before]


@pytest.mark.parametrize("guardian", BEFORE.values(), ids=BEFORE)
def test_a_guardian_that_fails_before_its_first_word_is_an_ordinary_failure(strict, guardian):
    reply, [record] = unheard(strict, guardian)
    error_of(reply, 502, "guardian_failed")
    assert (record.decision.pending, record.decision.action, record.completion.finish) == (True, None, "failed")


@pytest.mark.parametrize("guardian", BEFORE.values(), ids=BEFORE)
def test_if_the_guardian_fails_before_its_first_word_the_safe_answer_is_an_ordinary_reply(lenient, guardian):
    reply, [record] = unheard(lenient, guardian)
    assert reply.headers["x-arbitrage-decided-by"] == "fallback"
    assert reply.headers["x-arbitrage-decision-id"] == record.id
    assert content(chunks(reply)) == "Please call us."
    assert reply.text.endswith("data: [DONE]\n\n")
    assert (record.decided_by, record.completion) == ("fallback", None)
    assert record.decision.legs[1].error


def test_a_late_failure_before_the_first_word_is_an_error_event(house, impatient):
    gate = threading.Event()
    gateway = live(house, gate, ERROR)
    with streaming(gateway) as (reply, coming):
        assert next(coming) == WAITING
        gate.set()
        [error] = [event for event in coming if event != WAITING]
    assert reply.status_code == 200
    assert data(error)["error"]["code"] == "guardian_failed"
    [record] = gateway.records()
    assert (record.decision.pending, record.completion.finish) == (True, "failed")


AFTER = {
    "an error": tells("one ", ERROR),
    "an error beside choices": tells("one ", sse({**chunk({}, finish="error"), "error": {"message": "Kim"}})),
    "no end": tells("one ", end=b""),
    "cut off": tells("one ", end=b"", cut=True),
    "no JSON": tells("one ", sse("{Kim")),
    "another model": tells("one ", sse(chunk({"content": "two"}, model="m-2"))),
}


@pytest.mark.parametrize("which", ["strict", "lenient"])
@pytest.mark.parametrize("guardian", AFTER.values(), ids=AFTER)
def test_a_guardian_that_fails_after_its_first_word_leaves_an_error_and_no_end(request, which, guardian):
    reply, [record] = unheard(request.getfixturevalue(which), guardian)
    assert reply.status_code == 200
    [*before, last] = chunks(reply)
    assert last["error"]["code"] == "guardian_failed"
    assert content(before) == "one "
    assert not any(word in reply.text for word in ("[DONE]", "call us", "two"))
    assert [one["choices"][0]["finish_reason"] for one in before] == [None] * len(before)
    assert (record.decided_by, record.completion) == (
        "guardian",
        CompletionBody(finish="failed", at=record.completion.at),
    )


def test_the_official_client_raises_where_a_stream_breaks(house):
    gateway = live(house, "one ", ERROR)
    with gateway.client() as client:
        coming = iter(client.chat.completions.create(**STREAM))
        assert next(c for c in coming if c.choices[0].delta.content).choices[0].delta.content == "one "
        with pytest.raises(openai.APIError, match="Guardian"):
            list(coming)


def test_a_guardian_that_halts_in_the_middle_fails_at_its_timeout(house):
    gate = threading.Event()
    gateway = live(house, "one ", gate, models={"guardian": {"timeout": 0.5, "attempts": 3}})
    assert chunks(gateway.chat(STREAM))[-1]["error"]["code"] == "guardian_failed"
    until(lambda: gateway.guardian.under_way == 0)
    assert len(gateway.guardian.bodies) == 1
    assert completions(gateway) == [CompletionBody(finish="failed")]


def test_a_failure_before_the_first_chunk_is_retried(house):
    replies = [failing(500), lambda *_: Stream(once(ERROR)), tells("theirs")]
    gateway = live(house, guardian=lambda *asked: replies[asked[2]](*asked), models={"guardian": {"attempts": 3}})
    assert content(chunks(gateway.chat(STREAM))) == "theirs"
    assert len(gateway.guardian.bodies) == 3
    assert completions(gateway)[0].leg.spent.calls == 3


async def once(portion):
    yield portion


def test_the_pinned_model_is_heard(strict):
    strict.guardian.reply = tells("theirs")
    assert content(chunks(strict.chat(STREAM))) == "theirs"


def let_go(gateway):
    """Wait until the Guardian is left alone, and a moment longer for what must not be written."""
    until(lambda: gateway.guardian.under_way == 0)
    time.sleep(0.3)


def test_a_caller_who_leaves_before_the_first_word_leaves_a_pending_decision_that_was_cancelled(house, impatient):
    gateway = live(house, {"reasoning_content": "since"}, threading.Event(), "theirs")
    with streaming(gateway) as (_, coming):
        assert next(coming) == WAITING
        until(lambda: gateway.guardian.under_way == 1)
    let_go(gateway)
    [record] = gateway.records()
    assert (record.decided_by, record.decision.pending, record.completion.finish) == ("guardian", True, "cancelled")
    assert [leg.role for leg in record.decision.legs] == ["primary"]


def test_a_caller_who_leaves_in_the_middle_leaves_the_decision_and_a_cancelled_completion(house):
    gateway = live(house, "one ", threading.Event(), "two")
    with streaming(gateway) as (_, coming):
        until_word(coming, "one ")
    let_go(gateway)
    [record] = gateway.records()
    assert (record.decided_by, completions(gateway)) == ("guardian", [CompletionBody(finish="cancelled")])
    assert gateway.with_store(lambda store: integrity.verify(store)) == []


def test_a_caller_who_leaves_while_the_decision_is_being_recorded_leaves_it_and_a_cancelled_completion(
    house, impatient
):
    gate = threading.Event()
    gateway = live(house, gate, "one ", threading.Event(), "two")
    with locked(gateway):
        with streaming(gateway) as (_, coming):
            assert next(coming) == WAITING
            gate.set()
            time.sleep(0.2)
        time.sleep(0.2)
        assert gateway.guardian.under_way == 1
    let_go(gateway)
    [record] = gateway.records()
    assert (record.decided_by, completions(gateway)) == ("guardian", [CompletionBody(finish="cancelled")])


def test_a_caller_who_leaves_while_the_end_is_being_recorded_was_answered(house):
    gate = threading.Event()
    gateway = live(house, "one ", gate, "two")
    with streaming(gateway, **KEY) as (reply, coming):
        until_word(coming, "one ")
        with locked(gateway):
            gate.set()
            until_word(coming, "two")
            until(lambda: gateway.guardian.under_way == 0)
            reply.close()
            time.sleep(0.3)
    [record] = until(lambda: [r for r in gateway.records() if r.completion])
    assert record.completion.finish == "stop"
    assert gateway.chat(STREAM, headers=KEY).headers["x-arbitrage-replayed"] == "true"


def test_a_live_stream_counts_as_under_way_until_it_ends(house):
    gate = threading.Event()
    gateway = live(house, "one ", gate, "two", gateway={"max_in_flight": 1})
    with streaming(gateway) as (_, coming):
        until_word(coming, "one ")
        error_of(gateway.chat(STREAM), 429, "rate_limit_exceeded")
        gate.set()
        list(coming)
    until(lambda: gateway.chat(STREAM).status_code == 200)


def test_a_stream_under_a_key_is_replayed_byte_for_byte(house):
    gateway = live(house, "one ", {"reasoning_content": "since"}, ODD)
    first, again = gateway.chat(WITH_USAGE, headers=KEY), gateway.chat(WITH_USAGE, headers=KEY)
    gateway.restart()
    later = gateway.chat(WITH_USAGE, headers=KEY)
    assert first.content == again.content == later.content
    first.encoding = "utf-8"
    assert content(chunks(first)) == "one " + ODD
    assert "x-arbitrage-replayed" not in first.headers
    assert again.headers["x-arbitrage-replayed"] == later.headers["x-arbitrage-replayed"] == "true"
    assert again.headers["x-arbitrage-decision-id"] == first.headers["x-arbitrage-decision-id"]
    assert (len(gateway.primary.bodies), len(gateway.guardian.bodies), len(gateway.records())) == (1, 1, 1)
    assert len(completions(gateway)) == 1


def test_a_late_stream_is_replayed_without_its_comments(house, impatient):
    gate = threading.Event()
    gateway = live(house, gate, "theirs")
    with streaming(gateway, **KEY) as (_, coming):
        assert next(coming) == WAITING
        gate.set()
        first = [event for event in coming if event != WAITING]
    again = gateway.chat(STREAM, headers=KEY)
    assert [event for event in again.text.split("\n\n") if event] == first
    assert again.headers["x-arbitrage-decision-id"] == gateway.records()[0].id


def test_a_duplicate_in_the_middle_of_a_stream_waits_for_its_end_and_gets_the_same_bytes(house):
    gate = threading.Event()
    gateway = live(house, "one ", gate, "two")
    with streaming(gateway, **KEY) as (_, coming), ThreadPoolExecutor(3) as pool:
        first = [until_word(coming, "one ")]
        others = [pool.submit(gateway.chat, STREAM, headers=KEY) for _ in range(3)]
        time.sleep(0.3)
        assert not any(other.done() for other in others)
        gate.set()
        first += list(coming)
        replies = [other.result() for other in others]
    assert len({reply.content for reply in replies}) == 1
    assert replies[0].text.endswith("\n\n".join([*first, ""]))
    assert all(reply.headers["x-arbitrage-replayed"] == "true" for reply in replies)
    assert (len(gateway.guardian.bodies), len(gateway.records())) == (1, 1)


def test_a_stream_that_failed_is_not_kept_under_its_key(house):
    gateway = live(house, "one ", ERROR)
    assert "error" in chunks(gateway.chat(STREAM, headers=KEY))[-1]
    gateway.guardian.reply = tells("theirs")
    reply = gateway.chat(STREAM, headers=KEY)
    assert "x-arbitrage-replayed" not in reply.headers
    assert content(chunks(reply)) == "theirs"
    assert [one.finish for one in completions(gateway)] == ["failed", "stop"]
    [record] = gateway.records()
    assert (record.id, record.completion.finish) == (reply.headers["x-arbitrage-decision-id"], "stop")
    assert len(gateway.primary.bodies) == 1


def test_a_caller_with_a_key_who_leaves_in_the_middle_finds_the_whole_answer_later(house):
    gate = threading.Event()
    gateway = live(house, "one ", gate, "two")
    with streaming(gateway, **KEY) as (_, coming):
        until_word(coming, "one ")
        assert claims(gateway) == ["decided"]
    time.sleep(0.3)
    assert gateway.guardian.under_way == 1
    gate.set()
    gateway.guardian.reply = tells("another")
    replies = [gateway.chat(STREAM, headers=KEY) for _ in range(2)]
    assert [content(chunks(reply)) for reply in replies] == ["one two"] * 2
    assert [one.finish for one in completions(gateway)] == ["stop"]
    assert [record.id for record in gateway.records()] == [replies[0].headers["x-arbitrage-decision-id"]]
    assert (len(gateway.primary.bodies), len(gateway.guardian.bodies)) == (1, 1)
    error_of(gateway.chat({**STREAM, "user": "another"}, headers=KEY), 422, "idempotency_key_reused")


def test_a_stream_whose_key_was_taken_over_ends_in_an_error_and_holds_one_answer(house, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.gateway.requests.LEASE", 0.3)
    gate = threading.Event()
    gateway = live(house, "one ", gate, "two")
    with streaming(gateway, **KEY) as (_, coming):
        first = until_word(coming, "one ")
        run_sql(database_of(gateway.config), "update claims set owner = 'another gateway'")
        gate.set()
        rest = [event for event in coming if event != WAITING]
    documents = list(map(data, [first, *rest]))
    assert content(documents) == "one two"
    assert documents[-1]["error"]["code"] == "record_unavailable"
    assert len(gateway.guardian.bodies) == 1
    assert completions(gateway) == [CompletionBody(finish="failed")]


def test_a_decision_that_cannot_be_recorded_is_refused_and_no_word_leaves(house, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.store.sqlite._BUSY_TIMEOUT", 0.2)
    gateway = live(house, "theirs", task=SAFE, models={"guardian": {"attempts": 3}})
    with locked(gateway):
        reply = gateway.chat(STREAM)
    error_of(reply, 503, "record_unavailable")
    assert (len(gateway.guardian.bodies), gateway.records()) == (1, [])


def test_an_end_that_cannot_be_recorded_is_an_error_and_no_end(house, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.store.sqlite._BUSY_TIMEOUT", 0.2)
    gate = threading.Event()
    gateway = live(house, "one ", gate, "two")
    with streaming(gateway) as (_, coming):
        until_word(coming, "one ")
        with locked(gateway):
            gate.set()
            rest = list(coming)
    assert data(rest[-1])["error"]["code"] == "record_unavailable"
    assert not [event for event in rest if "[DONE]" in event or '"finish_reason":"stop"' in event]


@pytest.mark.parametrize("task", [{}, SAFE], ids=["", "with a safe answer"])
def test_a_guardian_whose_time_is_up_while_its_decision_is_being_recorded_has_failed_after_it(house, task):
    gateway = live(house, "one ", threading.Event(), task=task, models={"guardian": {"timeout": 0.5}})
    with ThreadPoolExecutor(1) as pool, locked(gateway):
        reply = pool.submit(gateway.chat, STREAM)
        until(lambda: gateway.guardian.bodies)
        time.sleep(0.8)
    [*before, last] = chunks(reply.result())
    assert (content(before), last["error"]["code"]) == ("one ", "guardian_failed")
    [record] = until(lambda: [r for r in gateway.records() if r.completion])
    assert (record.decided_by, completions(gateway)) == ("guardian", [CompletionBody(finish="failed")])


CALLS = [
    {"id": f"call-{k}", "type": "function", "function": {"name": "look", "arguments": f'{{"k": "{k}é"}}'}}
    for k in (1, 2)
]


def fragments():
    """Two calls at once, their arguments in parts and in turns."""
    for place, call in enumerate(CALLS):
        yield {"tool_calls": [{"index": place, **call, "function": {"name": "look", "arguments": ""}}]}
    for start in range(0, 10, 3):
        for place, call in enumerate(CALLS):
            part = call["function"]["arguments"][start : start + 3]
            yield {"tool_calls": [{"index": place, "function": {"arguments": part}}]}


def test_tool_calls_in_fragments_reach_the_official_client_whole(house):
    gateway = live(house, guardian=tells(*fragments(), finish="tool_calls"), policy={"content": "full"})
    with gateway.client() as client, client.chat.completions.stream(**CHAT, tools=[LOOK]) as stream:
        choice = stream.get_final_completion().choices[0]
    calls = [(call.id, call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [(call["id"], "function", *call["function"].values()) for call in CALLS]
    assert choice.finish_reason == "tool_calls"
    assert completions(gateway)[0].content.answer == completion("", tool_calls=CALLS)["choices"][0]["message"]
    assert completions(gateway)[0].finish == "tool_calls"


def test_a_tool_call_is_a_first_word(house):
    gate = threading.Event()
    begin = {"tool_calls": [{"index": 0, **CALLS[0]}]}
    gateway = live(house, guardian=tells(begin, gate, finish="tool_calls"))
    with streaming(gateway) as (_, coming):
        found = next(event for event in coming if "tool_calls" in event)
        assert data(found)["choices"][0]["delta"] == begin
        assert (gateway.guardian.under_way, len(gateway.records())) == (1, 1)
        gate.set()
        list(coming)


def test_the_official_client_hears_words_while_the_guardian_is_still_writing(house):
    gates = [threading.Event() for _ in range(2)]
    gateway = live(house, "one ", gates[0], "two ", gates[1], "three")
    with gateway.client() as client:
        stream = client.chat.completions.create(**WITH_USAGE)
        words = (c.choices[0].delta.content for c in stream if c.choices and c.choices[0].delta.content)
        for text, gate in zip(["one ", "two "], gates, strict=True):
            assert next(words) == text
            assert gateway.guardian.under_way == 1
            gate.set()
        assert list(words) == ["three"]


async def test_the_official_async_client_hears_words_while_the_guardian_is_still_writing(house):
    gates = [threading.Event() for _ in range(2)]
    gateway = live(house, "one ", gates[0], "two ", gates[1], "three")
    heard, waiting = [], iter(gates)
    async with gateway.async_client() as client:
        async for piece in await client.chat.completions.create(**STREAM):
            if piece.choices[0].delta.content:
                heard.append((piece.choices[0].delta.content, gateway.guardian.under_way))
                next(waiting, threading.Event()).set()
    first, second, (last, _) = heard
    assert (first, second, last) == (("one ", 1), ("two ", 1), "three")


def test_the_record_keeps_of_both_answers_what_the_policy_says(house):
    kept = {}
    for policy in ("full", "hashed", "off"):
        gateway = live(house, "one ", "two", policy={"content": policy})
        gateway.chat(STREAM)
        [record] = gateway.records()
        kept[policy] = record.decision.content, record.completion.content
    asked, answered = kept["full"]
    assert (asked.primary_answer, asked.request["messages"], asked.answer) == ("mine", MESSAGES, None)
    assert answered == Content(answer={"role": "assistant", "content": "one two"})
    asked, answered = kept["hashed"]
    digests = [asked.request, asked.primary_answer, answered.answer]
    assert all(digest.startswith("blake2b-256:") for digest in digests)
    assert asked == Content(request=asked.request, primary_answer=asked.primary_answer)
    assert answered == Content(answer=answered.answer)
    assert kept["off"] == (None, None)


def test_a_live_decision_and_both_its_legs_are_counted_once(house):
    gateway = live(house, guardian=tells("theirs", usage=(100, 50)))
    gateway.chat(STREAM)
    assert figure(gateway, "decisions_total") == figure(gateway, 'decisions_total{decided_by="guardian"') == 1
    assert figure(gateway, "deferred_total") == 1
    for role, tokens, cost in (("primary", (10, 5), 15e-6), ("guardian", (100, 50), 150e-6)):
        assert figure(gateway, f'upstream_seconds_count{{role="{role}"}}') == 1
        assert figure(gateway, f'tokens_total{{direction="input",policy="support",role="{role}"}}') == tokens[0]
        assert figure(gateway, f'tokens_total{{direction="output",policy="support",role="{role}"}}') == tokens[1]
        assert figure(gateway, f'cost_dollars_total{{policy="support",role="{role}"}}') == pytest.approx(cost)


def test_a_live_decision_that_the_coin_draws_is_counted_and_needs_no_second_answer(house):
    gateway = live(house, "theirs", policy={"audit_rate": 1.0, "content": "full"})
    gateway.chat(STREAM)
    assert figure(gateway, "audits_queued_total") == 1
    [record] = gateway.records()
    assert record.decision.audited
    assert [leg.role for leg in record.decision.legs if leg.error is None] == ["primary", "guardian"]
    assert gateway.with_store(lambda store: store.run(outbox.audit_backlog)) == []
    assert len(gateway.guardian.bodies) == 1


def test_a_failure_in_the_middle_is_counted_once(house):
    gateway = live(house, "one ", ERROR, task=SAFE)
    gateway.chat(STREAM)
    assert figure(gateway, "decisions_total") == figure(gateway, 'decisions_total{decided_by="guardian"') == 1
    assert figure(gateway, 'upstream_errors_total{error="UpstreamError",policy="support",role="guardian"}') == 1


def test_a_key_of_scope_call_sees_its_live_record(house):
    gateway = live(house, "theirs")
    own = gateway.keyed()
    id = gateway.chat(STREAM, headers=own).headers["x-arbitrage-decision-id"]
    seen = gateway.get(f"/v1/arbitrage/records/{id}", headers=own).json()
    assert seen["completion"]["finish"] == "stop"
    assert seen["completion"]["leg"]["spent"]["input_tokens"] == 10
    assert gateway.get(f"/v1/arbitrage/records/{id}", headers=gateway.keyed()).status_code == 404


@pytest.mark.parametrize(("headers", "kept"), [({}, False), (KEY, True)], ids=["without a key", "under a key"])
def test_a_stream_keeps_what_it_sent_only_if_it_may_be_sent_again(house, monkeypatch, headers, kept):
    replies = []
    commit = Attempt.commit

    async def watched(self, events, *, reply=None, **rest):
        replies.append(reply)
        await commit(self, events, reply=reply, **rest)

    monkeypatch.setattr(Attempt, "commit", watched)
    gateway = live(house, "one ", "two")
    assert content(chunks(gateway.chat(STREAM, headers=headers))) == "one two"
    assert (b"one " in replies[-1].response.body) is kept
