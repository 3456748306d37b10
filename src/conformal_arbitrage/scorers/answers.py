"""ChatAnswerer: free text and tool calls from a chat model, with a confidence, for router form.

The request is sent as the application wrote it. The answer is never wrapped in JSON to obtain a number: the confidence
comes from the token probabilities of the same call, or from a second, short call about the finished answer.

Knows nothing of grades or thresholds.
"""

import json
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from msgspec import Struct, ValidationError, convert

from conformal_arbitrage.errors import ReplyError, ScorerError
from conformal_arbitrage.scorers.base import Answer, Identity
from conformal_arbitrage.scorers.completions import (
    PATH,
    Mode,
    Settings,
    TokenField,
    completion_of,
    message_of,
    other_model,
    response_format,
)
from conformal_arbitrage.scorers.logprob import LOWEST
from conformal_arbitrage.scorers.prompts import json_object
from conformal_arbitrage.scorers.rendering import RENDERING, VERBATIM
from conformal_arbitrage.scorers.request_fields import RequestSettings, requested_identity
from conformal_arbitrage.types import JSON, ChatRequest, Chunk, Spent, as_object, content_text, transcript
from conformal_arbitrage.upstream.base import Call, Port, Reply, fingerprint, is_number, spent_of
from conformal_arbitrage.upstream.sse import delta_of

Confidence = Literal["logprob", "ask"]
_RATING_LIMIT = 50
_TOKEN_FIELDS: tuple[str, ...] = get_args(TokenField)
_RATE = """Below are a conversation and an assistant's answer to it. How sure are you that the answer is right and does \
what was asked?

# Conversation
{conversation}

# Answer
{answer}

Reply with ONE JSON object and nothing else: {{"confidence": c}}, c from 0 (surely wrong) to 1 (surely right)."""
_RATING = {
    "type": "object",
    "properties": {"confidence": {"type": "number"}},
    "required": ["confidence"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswerer:
    """Answers from a chat model.

    Attributes:
        port: the endpoint.
        settings: defaults for fields that the application's request omits; the model's name always applies.
        confidence: "logprob" (the mean token probability of the answer, from the same call), "ask" (a second, short
            call that rates the finished answer), or None for a Guardian, which needs none.
        mode: the output mode of the second call.
        request_settings: whether requests keep their own temperature, limits and the like, which is then part of the
            identity; if they are pinned, whoever sends a request refuses one that differs.
    """

    port: Port
    settings: Settings
    confidence: Confidence | None = None
    mode: Mode = "plain"
    request_settings: RequestSettings = "pinned"
    _defaults: Mapping[str, Any] = field(init=False, repr=False, compare=False)
    _identity: Identity = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepare the fields that go into every request, and the identity, which requests with settings look at."""
        object.__setattr__(self, "_defaults", self.settings.body())
        object.__setattr__(self, "_identity", self._identified())

    @property
    def identity(self) -> Identity:
        """Endpoint, settings and the source of the confidence."""
        return self._identity

    def _identified(self) -> Identity:
        rating: dict[str, Any] = {"rendering": VERBATIM, "confidence": self.confidence}
        if self.confidence == "ask":
            rating |= {
                "rendering": RENDERING,
                "prompt_sha256": fingerprint(_RATE),
                "mode": self.mode,
                "parser": "json confidence; 1",
            }
            rating["rating_limit"] = max(_RATING_LIMIT, self.settings.max_tokens or 0)
        own = requested_identity(self.request_settings)
        return {"kind": "answer", "endpoint": self.port.origin, **self.settings.identity, **rating, **own}

    async def answer(self, request: ChatRequest) -> Answer:
        """Return the model's answer and its confidence.

        Raises:
            ScorerError: there is no answer. A confidence that cannot be obtained is None instead.
        """
        return await self._finished(request, await self.port.call(self._call(request)))

    async def sample(self, request: ChatRequest, number: int) -> Answer:
        """Return one of several answers to the same request, each drawn on its own.

        Raises:
            ScorerError: there is no answer.
        """
        return await self._finished(request, await self.port.call(self._call(request, number)))

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Chunk | Answer]:
        """Yield the chunks of the model's answer, then the answer with its confidence.

        Raises:
            ScorerError: there is no answer, or it broke off.
        """
        async with aclosing(self.port.stream(self._call(request))) as items:
            async for item in items:
                if isinstance(item, Reply):
                    break
                self._check_served(item)
                yield item
            else:
                raise AssertionError("unreachable: a stream ends with its reply")
        yield await self._finished(request, item)  # by now its slot is free for the call that rates the answer

    def _call(self, request: ChatRequest, sample: int = 0) -> Call:
        incoming = request.body
        limits = [incoming[name] for name in _TOKEN_FIELDS if incoming.get(name) is not None]
        limit = limits[0] if limits else self.settings.max_tokens
        fields = {
            name: incoming[name] for name in sorted(incoming) if name not in _TOKEN_FIELDS
        }  # equal requests, equal bytes
        body = {**self._defaults, **fields, "model": self.settings.model}
        if limits:
            body[self.settings.token_field] = limit  # under the name that the endpoint takes
        if self.confidence == "logprob":
            body["logprobs"] = True
        seed: object = body.get("seed")
        if sample and is_number(seed):
            body["seed"] = seed + sample  # with one seed, all samples would be the same
        output_limit = limit if isinstance(limit, int) else None
        return Call(path=PATH, body=body, id=request.id, sample=sample, output_limit=output_limit)

    async def _finished(self, request: ChatRequest, reply: Reply) -> Answer:
        choice, message, served = completion_of(reply, self.settings, reply.spent, tools=True)
        if message.get("tool_calls"):
            _check_gradable(message, reply.spent)
        spent = reply.spent
        sure = mean_probability(choice) if self.confidence == "logprob" else None
        if self.confidence == "ask":
            sure, rated = await self._rating(request, message)
            spent += rated
        return Answer(message=message, confidence=sure, spent=spent, document=reply.document, served=served)

    def _check_served(self, chunk: Chunk) -> None:
        """Refuse a chunk of another model than the pinned one: once passed on, it cannot be taken back."""
        pinned, served = self.settings.served, chunk.get("model")
        if pinned is None or served == pinned:
            return
        if served or delta_of(chunk):  # content filters add chunks with neither a model nor a delta
            raise other_model(str(served), pinned, Spent(calls=1, input_tokens=None, output_tokens=None, cost=None))

    async def _rating(self, request: ChatRequest, message: Mapping[str, Any]) -> tuple[float | None, Spent]:
        """Ask the model to rate its answer; without a usable reply the rating is None."""
        prompt = _RATE.format(conversation=transcript(request.messages), answer=answer_text(message))
        limit = max(_RATING_LIMIT, self.settings.max_tokens or 0)
        body = self.settings.body() | {self.settings.token_field: limit}
        body |= {"messages": [{"role": "user", "content": prompt}], **response_format(self.mode, "rating", _RATING)}
        try:
            reply = await self.port.call(Call(path=PATH, body=body, id=request.id, sample=1, output_limit=limit))
            text = content_text(message_of(reply, self.settings, reply.spent)["content"])
        except ScorerError as error:
            return None, spent_of(error)
        return rating(text, "confidence"), reply.spent


def rating(text: str, name: str) -> float | None:
    """Return the number in [0, 1] under this name of the JSON object in a text; None if there is none."""
    try:
        value: object = json_object(text).get(name)
    except ValueError:
        return None
    return float(value) if is_number(value) and 0 <= value <= 1 else None


class _Token(Struct):
    logprob: float


class _Logprobs(Struct):
    content: list[_Token]


def mean_probability(choice: Mapping[str, Any]) -> float | None:
    """Return exp of the mean log-probability of the answer's tokens; None if any is missing or impossible."""
    try:
        tokens = convert(choice.get("logprobs"), _Logprobs).content
    except ValidationError:
        return None
    if not tokens or any(token.logprob > 1e-6 for token in tokens):
        return None
    return min(1.0, math.exp(sum(max(token.logprob, LOWEST) for token in tokens) / len(tokens)))


def answer_text(message: Mapping[str, Any]) -> str:
    """Return an answer as plain text: its content, or all its tool calls with names and canonical arguments.

    Raises:
        ReplyError: a tool call is malformed.
    """
    calls: JSON = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        content: JSON = message.get("content")
        return content if isinstance(content, str) else content_text(content)
    return json.dumps([_canonical(call) for call in calls], sort_keys=True, ensure_ascii=False)


def _check_gradable(message: Mapping[str, Any], spent: Spent) -> None:
    """Refuse tool calls that could not be graded in a log: they must not stand in a live decision either."""
    try:
        answer_text(message)
    except ReplyError as error:
        error.spent = spent
        raise


def _canonical(call: JSON) -> dict[str, Any]:
    """Return a tool call without the differences between equal ones: ids, whitespace and the order of keys."""
    if not isinstance(call, dict):
        raise ReplyError(f"{call!r:.80} is not a tool call")
    function = as_object(call.get("function") or call.get("custom"))
    arguments = function.get("arguments", function.get("input"))
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # free-form input stays as it is
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}
