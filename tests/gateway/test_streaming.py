import asyncio
import json
import time

import openai
import pytest
import requests

from tests.gateway.house import CHAT, MENU, UNSURE, chunks, error_of, failing, hanging, says, until, votes

STREAM = {**CHAT, "stream": True}
WITH_USAGE = {**STREAM, "stream_options": {"include_usage": True}}


@pytest.fixture
def impatient(monkeypatch):
    """Headers wait 0.3 s for the decision, not 10."""
    monkeypatch.setattr("conformal_arbitrage.gateway.chat.SILENCE", 0.3)


def after(seconds, reply):
    async def wait(*asked):
        await asyncio.sleep(seconds)
        return reply(*asked)

    return wait


def content(documents):
    return "".join(d["choices"][0]["delta"].get("content") or "" for d in documents if d["choices"])


def test_a_stream_holds_the_answer_in_chunks_and_ends_with_done(house):
    long = "word " * 500
    gateway = house(form="text", primary=says(long, 0.9))
    reply = gateway.chat(STREAM)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")
    documents = chunks(reply)
    assert content(documents) == long
    assert len(documents) > 4
    assert {d["object"] for d in documents} == {"chat.completion.chunk"}
    assert len({(d["id"], d["model"], d["created"]) for d in documents}) == 1
    assert [d["choices"][0]["finish_reason"] for d in documents] == [None] * (len(documents) - 1) + ["stop"]


def test_headers_come_with_the_decision_if_it_is_there_in_time(house):
    reply = house(form="text", primary=says("mine", 0.1)).chat(STREAM)
    [first, *_, last] = chunks(reply)
    assert reply.headers["x-arbitrage-decided-by"] == "guardian"
    assert reply.headers["x-arbitrage-decision-id"] == first["arbitrage"]["id"] == last["arbitrage"]["id"]
    assert {"x-arbitrage-alpha", "x-arbitrage-cost"} <= set(reply.headers)
    assert content(chunks(reply)) == "theirs"


def test_usage_comes_last_and_only_if_asked_for(house):
    gateway = house(form="text")
    assert all("usage" not in d for d in chunks(gateway.chat(STREAM)))
    [*rest, last] = chunks(gateway.chat(WITH_USAGE))
    assert last["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    assert last["choices"] == []
    assert all(d["usage"] is None for d in rest)
    assert last["arbitrage"]["decided_by"] == "primary"


def test_a_menu_is_streamed_too(house):
    gateway = house(primary=votes(*UNSURE))
    assert content(chunks(gateway.chat({**MENU, "stream": True}))) == "b"


def test_what_a_message_holds_besides_text_and_tools_is_streamed_too(house):
    def reply(*_):
        found = says("mine", 0.9)()
        found["choices"][0]["message"] |= {"reasoning_content": "since", "annotations": [{"type": "url_citation"}]}
        return found

    deltas = [d["choices"][0]["delta"] for d in chunks(house(form="text", primary=reply).chat(STREAM))]
    assert {"reasoning_content": "since", "annotations": [{"type": "url_citation"}]} in deltas


def test_nothing_of_the_primary_leaves_before_the_decision(house, impatient):
    gateway = house(form="text", primary=says("mine", 0.1), guardian=after(1.5, says("theirs")))
    start = time.monotonic()
    with requests.post(f"{gateway.url}/v1/chat/completions", json=STREAM, stream=True, timeout=60) as reply:
        pieces = [(time.monotonic() - start, piece) for piece in reply.iter_content(None)]
    early = b"".join(piece for at, piece in pieces if at < 1.4)
    assert set(early.split(b"\n\n")) <= {b": waiting for the decision", b""}
    whole = b"".join(piece for _, piece in pieces)
    assert whole.startswith(b": waiting for the decision\n\n")
    assert b"mine" not in whole
    assert b"theirs" in whole
    assert len(gateway.primary.bodies) == 1


def test_headers_wait_for_the_decision_but_not_for_ever(house, impatient):
    gateway = house(form="text", primary=after(1.0, says("mine", 0.9)))
    reply = gateway.chat(WITH_USAGE)
    assert "x-arbitrage-decision-id" not in reply.headers
    assert reply.text.startswith(": waiting for the decision\n\n")
    assert reply.text.count(": waiting") >= 2
    assert reply.text.endswith("data: [DONE]\n\n")
    [first, *_, last] = chunks(reply)
    assert first["arbitrage"] == last["arbitrage"]
    assert {"id", "decided_by", "alpha", "guarantee", "legs"} <= set(first["arbitrage"])
    assert gateway.records()[0].id == first["arbitrage"]["id"]


def test_the_official_client_reads_a_late_stream(house, impatient):
    gateway = house(form="text", primary=after(0.8, says("mine", 0.9)))
    with gateway.client() as client:
        stream = client.chat.completions.create(**STREAM)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "mine"


def test_an_early_failure_is_an_ordinary_error(house):
    gateway = house(form="text", primary=says("mine", 0.1), guardian=failing(403))
    error_of(gateway.chat(STREAM), 502, "guardian_failed")


def test_a_late_failure_is_an_error_event_without_done(house, impatient):
    gateway = house(form="text", primary=says("mine", 0.1), guardian=after(0.8, failing(403, "Kim")))
    reply = gateway.chat(STREAM)
    assert reply.status_code == 200
    [document] = chunks(reply)
    assert document["error"]["code"] == "guardian_failed"
    assert "[DONE]" not in reply.text
    assert "Kim" not in reply.text
    with gateway.client() as client, pytest.raises(openai.APIError, match="Guardian"):
        list(client.chat.completions.create(**STREAM))


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_leaves_before_the_decision_is_recorded_and_the_models_are_let_go(house, stream):
    gateway = house(form="text", primary=hanging)
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": stream}, timeout=0.5)
    [record] = until(gateway.records)
    assert (record.decided_by, record.decision.cancelled) == ("cancelled", True)
    until(lambda: gateway.primary.under_way == 0)


def test_a_caller_who_leaves_a_waiting_stream_is_recorded_once(house, impatient):
    gateway = house(form="text", primary=hanging)
    with requests.post(f"{gateway.url}/v1/chat/completions", json=STREAM, stream=True, timeout=60) as reply:
        assert next(reply.iter_content(None)).startswith(b": waiting")
    [record] = until(gateway.records)
    assert record.decided_by == "cancelled"
    until(lambda: gateway.primary.under_way == 0)
    time.sleep(0.5)
    assert len(gateway.records()) == 1


def test_a_caller_who_leaves_in_the_middle_of_the_answer_is_recorded(house):
    gateway = house(form="text", primary=says("x" * 6_000_000, 0.9))
    with requests.post(f"{gateway.url}/v1/chat/completions", json=STREAM, stream=True, timeout=60) as reply:
        assert next(reply.iter_content(1000))
    record = until(lambda: [r for r in gateway.records() if r.completion is not None])[0]
    assert record.completion.finish == "cancelled"
    assert record.decided_by == "primary"


def test_a_stream_that_waits_counts_as_under_way(house, impatient):
    gateway = house(form="text", primary=after(2, says("mine", 0.9)), gateway={"max_in_flight": 1})
    with requests.post(f"{gateway.url}/v1/chat/completions", json=STREAM, stream=True, timeout=60) as reply:
        pieces = reply.iter_content(None)
        assert next(pieces).startswith(b": waiting")
        error_of(gateway.chat(STREAM), 429, "rate_limit_exceeded")
    until(lambda: gateway.chat(CHAT).status_code == 200)


def test_every_event_is_one_line_of_json_whatever_the_answer_holds(house):
    odd = "a\n\nb\r\ndata: [DONE]\n\n\u2028\u0085\x00"
    gateway = house(form="text", primary=says(odd, 0.9))
    reply = gateway.chat(STREAM)
    reply.encoding = "utf-8"
    events = reply.content.decode().split("\n\n")[:-1]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert "".join(json.loads(e[6:])["choices"][0]["delta"].get("content") or "" for e in events[:-1]) == odd
