"""Replies that contradict themselves: an answer beside an error, content that is no text. None stands, none is a 500."""

import pytest

from tests.gateway.house import CHAT, DECISION, chunks, error_of, says, votes
from tests.scripted import Stream, chunk, completion, ending, sse

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]}
ERRORS = [{"message": "overloaded"}, {"code": 500}, "overloaded", ["x"], 1, True]
SURE = {"content": [{"token": "t", "logprob": -0.01}]}


def with_error(document, error, place="document"):
    if place == "document":
        return {**document, "error": error}
    [choice] = document["choices"]
    return {**document, "choices": [{**choice, "error": error}]}


@pytest.mark.parametrize("place", ["document", "choice"])
@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_a_primary_s_answer_beside_an_error_does_not_stand(house, error, place):
    gateway = house(form="text", primary=lambda *_: with_error(says("mine", 0.9)(), error, place))
    reply = gateway.chat().json()
    assert reply["arbitrage"]["decided_by"] == "guardian"
    assert reply["arbitrage"]["legs"][0]["failed"]
    assert reply["choices"][0]["message"]["content"] == "theirs"


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_nor_do_its_scores_on_a_menu(house, error):
    gateway = house(primary=lambda *asked: {**votes(0.9, 0.1)(*asked), "error": error})
    [answer] = gateway.decide(DECISION).json()["answers"]
    assert (answer["choice"], answer["arbitrage"]["decided_by"]) == ("b", "guardian")


@pytest.mark.parametrize("stream", [False, True])
def test_a_guardian_s_answer_beside_an_error_is_a_failure(house, stream):
    gateway = house(
        form="text", primary=says("mine", 0.1), guardian=lambda *_: with_error(says("theirs")(), {"message": "no"})
    )
    error_of(gateway.chat({**CHAT, "stream": stream}), 502, "guardian_failed")


@pytest.mark.parametrize("error", [None, False, {}, "", []], ids=str)
def test_a_field_that_reports_no_error_is_none(house, error):
    gateway = house(form="text", primary=lambda *_: {**says("mine", 0.9)(), "error": error})
    assert gateway.chat().json()["arbitrage"]["decided_by"] == "primary"


def test_an_answer_that_ended_in_an_error_does_not_stand(house):
    gateway = house(form="text", primary=says("mine", 0.9, finish="error"))
    assert gateway.chat().json()["arbitrage"]["decided_by"] == "guardian"


ODD = [["x"], [{"type": "text", "text": "x"}], {"a": 1}, {}, [], 5, 1.5, True, False, [None]]


@pytest.mark.parametrize("calls", [[CALL], None], ids=["calls", "none"])
@pytest.mark.parametrize("content", ODD, ids=str)
def test_content_that_is_no_text_is_a_failure_of_the_model_and_never_a_500(house, content, calls):
    odd = completion(content, tool_calls=calls, finish="tool_calls", logprobs=SURE)
    gateway = house(form="text", primary=lambda *_: odd)
    for stream in (False, True):
        reply = gateway.chat({**CHAT, **TOOLS, "stream": stream})
        assert reply.headers["x-arbitrage-decided-by"] == "guardian"
    gateway.guardian.reply = gateway.primary.reply
    for stream in (False, True):
        error_of(gateway.chat({**CHAT, **TOOLS, "stream": stream}), 502, "guardian_failed")


def test_tool_calls_beside_text_stream_whole(house):
    gateway = house(form="text", primary=says("Let me look.", 0.9, tool_calls=[CALL], finish="tool_calls"))
    documents = chunks(gateway.chat({**CHAT, **TOOLS, "stream": True}))
    deltas = [document["choices"][0]["delta"] for document in documents]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me look."
    assert [delta["tool_calls"][0]["id"] for delta in deltas if "tool_calls" in delta] == ["c1"]


@pytest.mark.parametrize("content", ODD, ids=str)
def test_a_guardian_that_streams_such_content_ends_in_an_error_event(house, content):
    def streamed(*_):
        async def portions():
            yield sse(chunk({"role": "assistant", "tool_calls": [{"index": 0, **CALL}], "content": content}))
            yield ending(finish="tool_calls")

        return Stream(portions())

    gateway = house(form="text", primary=says("mine", 0.1), guardian=streamed)
    reply = gateway.chat({**CHAT, **TOOLS, "stream": True})
    assert reply.status_code in (200, 502)
    if reply.status_code == 200:
        assert "[DONE]" not in reply.text
        assert chunks(reply)[-1]["error"]["code"] == "guardian_failed"
