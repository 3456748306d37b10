"""Requests and replies held against the types of the openai SDK, so that neither side of a test is invented."""

import math
from collections.abc import Iterable, Mapping

import pytest
from openai import AsyncOpenAI
from openai.types import Decision
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.decision_create_params import DecisionCreateParams
from pydantic import TypeAdapter, ValidationError

from conformal_arbitrage.errors import CutOffError, RefusalError
from conformal_arbitrage.models import (
    ChatAnswerer,
    ChatScorer,
    DecisionsScorer,
    Endpoint,
    LogprobScorer,
    SamplingScorer,
    Settings,
)
from conformal_arbitrage.types import ChatRequest, Query
from tests.models.asking import QUERY, refused, scored
from tests.scripted import Upstream, completion, scores

DECISION = TypeAdapter(DecisionCreateParams)
CHAT = TypeAdapter(CompletionCreateParamsNonStreaming)

USAGE = {
    "input_tokens": 80,
    "input_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 0},
    "output_tokens": 4,
    "output_tokens_details": {"reasoning_tokens": 1},
    "total_tokens": 84,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Book a table",
            "parameters": {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]},
        },
    }
]
CALLS = [{"id": "call_1", "type": "function", "function": {"name": "book", "arguments": '{"day": 1}'}}]


def plain(value):
    """A validated value as JSON; lazily checked lists are checked here."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [plain(inner) for inner in value]
    return value


def assert_typed(adapter, body):
    """The SDK's type takes every field of a request, and drops none as unknown."""
    assert plain(adapter.validate_python(body)) == body


def as_sent(model, document):
    """A reply that the SDK's model takes without a field to spare, as JSON."""
    parsed = model.model_validate(document)
    assert_no_extras(parsed)
    return parsed.model_dump(mode="json", exclude_unset=True)


def assert_no_extras(parsed):
    assert not parsed.model_extra
    for name in type(parsed).model_fields:
        value = getattr(parsed, name)
        for inner in value if isinstance(value, list) else [value]:
            if hasattr(inner, "model_extra"):
                assert_no_extras(inner)


def decision(*answers):
    return as_sent(Decision, {"model": "gpt-6-luna", "answers": list(answers), "usage": USAGE})


def choice(probabilities):
    listed = [{"value": value, "probability": p} for value, p in probabilities.items()]
    best = max(probabilities, key=probabilities.get)
    return {"type": "choice", "name": None, "choice": best, "confidence": 0.7, "probabilities": listed}


def chat(document):
    return as_sent(ChatCompletion, document)


def decisions(port):
    return DecisionsScorer(port=port, model="gpt-6-luna")


TALK = Query(
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Which is red?"},
        {"role": "assistant", "content": "Let me see."},
    ],
    QUERY.actions,
)


def test_these_checks_would_notice_a_wrong_request():
    good = {
        "model": "m",
        "input": "x",
        "questions": [{"type": "choice", "instructions": "i", "choices": [{"value": "a"}]}],
    }
    assert_typed(DECISION, good)
    with pytest.raises(AssertionError):
        assert_typed(DECISION, {**good, "question": "x"})
    with pytest.raises(ValidationError):
        assert_typed(DECISION, {**good, "questions": [{**good["questions"][0], "choices": [{"valu": "a"}]}]})
    with pytest.raises(ValidationError):
        assert_typed(DECISION, {"model": "m", "input": "x"})
    with pytest.raises(ValidationError):
        assert_typed(CHAT, {"model": "m", "messages": [{"role": "nobody", "content": "x"}]})
    with pytest.raises(AssertionError):
        assert_typed(CHAT, {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_output": 5})
    with pytest.raises(ValidationError):
        decision({"type": "choice", "choice": "a"})


@pytest.mark.parametrize("query", [QUERY, TALK], ids=["text", "messages"])
def test_a_decisions_request_is_what_the_sdk_would_send(query):
    reply = decision(choice({"a rose": 0.7, "the sea": 0.2, "grass": 0.1}))
    result, upstream = scored(decisions, lambda *_: reply, query)
    assert_typed(DECISION, upstream.bodies[0])
    assert result.values == (0.7, 0.2, 0.1)
    assert (result.spent.input_tokens, result.spent.cached_tokens, result.spent.output_tokens) == (80, 64, 4)
    assert (result.spent.reasoning_tokens, result.served) == (1, "gpt-6-luna")


def test_a_decisions_refusal_is_understood():
    refused(decisions, lambda *_: decision({"type": "refusal", "name": None}), error=RefusalError)


@pytest.mark.parametrize("query", [QUERY, TALK], ids=["text", "messages"])
async def test_the_sdks_own_client_sends_and_reads_the_same_decision(query):
    paths = []

    def reply(path, body, number):
        paths.append(path)
        return decision(choice({"a rose": 0.7, "the sea": 0.2, "grass": 0.1}))

    async with Upstream(reply) as upstream:
        async with Endpoint(upstream.url) as endpoint:
            ours = await decisions(endpoint).score(query)
        async with AsyncOpenAI(base_url=upstream.url, api_key="k", max_retries=0) as client:
            theirs = await client.decisions.create(**upstream.bodies[0])
    sent, sent_by_sdk = upstream.bodies
    assert sent == sent_by_sdk
    assert paths == ["/decisions"] * 2
    assert_no_extras(theirs)
    assert [entry.probability for entry in theirs.answers[0].probabilities] == list(ours.values)
    assert theirs.usage.input_tokens == ours.spent.input_tokens


LISTED = [
    {"token": token, "logprob": math.log(p), "bytes": list(token.encode())} for token, p in (("A", 0.6), ("B", 0.3))
]
TOKENS = {"content": [{**LISTED[0], "top_logprobs": LISTED}], "refusal": None}
EVERYTHING = {"temperature": 0.5, "max_tokens": 400, "reasoning_effort": "low", "seed": 3}


@pytest.mark.parametrize("token_field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("mode", ["plain", "json_object", "json_schema"])
def test_an_elicited_score_uses_the_sdks_shapes(mode, token_field):
    settings = Settings(model="m", token_field=token_field, **EVERYTHING)
    result, upstream = scored(
        lambda port: ChatScorer(port=port, settings=settings, mode=mode), lambda *_: chat(scores(0.5, 0.25, 0.25))
    )
    assert_typed(CHAT, upstream.bodies[0])
    assert result.values == (0.5, 0.25, 0.25)


def test_letter_probabilities_use_the_sdks_shapes():
    result, upstream = scored(
        lambda port: LogprobScorer(port=port, settings=Settings(model="m", **EVERYTHING)),
        lambda *_: chat(completion("A", logprobs=TOKENS)),
    )
    assert_typed(CHAT, upstream.bodies[0])
    assert result.values == pytest.approx((0.6, 0.3, 0.1))


def test_samples_use_the_sdks_shapes():
    result, upstream = scored(
        lambda port: SamplingScorer(port=port, settings=Settings(model="m", **EVERYTHING), samples=2),
        lambda *_: chat(completion("A")),
    )
    for body in upstream.bodies:
        assert_typed(CHAT, body)
    assert result.values == (1, 0, 0)


def test_a_reply_cut_off_in_the_sdks_shape_is_understood():
    document = chat(completion("", finish="length", reasoning=5))
    error, _ = refused(
        lambda port: ChatScorer(port=port, settings=Settings(model="m")), lambda *_: document, error=CutOffError
    )
    assert error.spent.reasoning_tokens == 5


def test_a_refusal_in_the_sdks_shape_is_understood():
    document = completion(None)
    document["choices"][0]["message"]["refusal"] = "no"
    refused(
        lambda port: ChatScorer(port=port, settings=Settings(model="m")), lambda *_: chat(document), error=RefusalError
    )


CONVERSATION = {
    "messages": [
        {"role": "user", "content": "Book a table"},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "call_1", "content": "full"},
        {"role": "user", "content": [{"type": "text", "text": "Then tomorrow"}]},
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True},
    },
}


@pytest.mark.parametrize("mode", ["plain", "json_object", "json_schema"])
@pytest.mark.parametrize("confidence", [None, "logprob", "ask"])
async def test_tools_travel_both_ways_in_the_sdks_shapes(confidence, mode):
    called = chat(completion(None, tool_calls=CALLS, finish="tool_calls", logprobs=TOKENS))
    rated = chat(completion('{"confidence": 0.8}'))
    assert_typed(CHAT, {"model": "m", **CONVERSATION})
    replies = (called, rated)
    async with Upstream(lambda *sent: replies[sent[2]]) as upstream, Endpoint(upstream.url) as endpoint:
        settings = Settings(model="m", **EVERYTHING)
        answerer = ChatAnswerer(port=endpoint, settings=settings, confidence=confidence, mode=mode)
        reply = await answerer.answer(ChatRequest(CONVERSATION))
    for body in upstream.bodies:
        assert_typed(CHAT, body)
    assert len(upstream.bodies) == (2 if confidence == "ask" else 1)
    assert reply.confidence == {None: None, "ask": 0.8, "logprob": pytest.approx(0.6)}[confidence]
    answer = ChatCompletion.model_validate(reply.document)
    assert answer.choices[0].message.tool_calls[0].function.name == "book"
    assert reply.message["tool_calls"] == CALLS


async def test_the_sdks_own_client_sends_and_reads_the_same_completion():
    paths = []

    def reply(path, body, number):
        paths.append(path)
        return chat(completion(None, tool_calls=CALLS, finish="tool_calls", logprobs=TOKENS, reasoning=2))

    async with Upstream(reply) as upstream:
        async with Endpoint(upstream.url) as endpoint:
            answerer = ChatAnswerer(port=endpoint, settings=Settings(model="m", **EVERYTHING), confidence="logprob")
            ours = await answerer.answer(ChatRequest(CONVERSATION))
        async with AsyncOpenAI(base_url=upstream.url, api_key="k", max_retries=0) as client:
            theirs = await client.chat.completions.create(**upstream.bodies[0])
    sent, sent_by_sdk = upstream.bodies
    assert sent == sent_by_sdk
    assert paths == ["/chat/completions"] * 2
    assert_no_extras(theirs)
    assert theirs.to_dict() == ours.document
    assert theirs.usage.completion_tokens_details.reasoning_tokens == ours.spent.reasoning_tokens == 2


async def test_both_clients_carry_the_key_in_the_same_header():
    async with Upstream(lambda *_: chat(scores(1, 0, 0))) as upstream:
        async with Endpoint(upstream.url, key="secret-1") as endpoint:
            await ChatScorer(port=endpoint, settings=Settings(model="m")).score(QUERY)
        async with AsyncOpenAI(base_url=upstream.url, api_key="secret-1", max_retries=0) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    ours, theirs = upstream.headers
    assert ours["Authorization"] == theirs["Authorization"] == "Bearer secret-1"
