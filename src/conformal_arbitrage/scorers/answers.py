"""ChatAnswerer: free text and tool calls from a chat model, with a confidence; for router form.

The request goes out as the application wrote it. The answer is never wrapped in JSON to squeeze a number out of it:
the confidence comes from the same call's token probabilities, or from a second short call about the finished answer.

Knows nothing of grades or thresholds.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from conformal_arbitrage.errors import ReplyError, ScorerError
from conformal_arbitrage.scorers.base import Answer, Identity
from conformal_arbitrage.scorers.chat import (
    PATH,
    Mode,
    Settings,
    TokenField,
    choice_of,
    message_of,
    other_model,
    response_format,
    served_by,
)
from conformal_arbitrage.scorers.logprob import LOWEST
from conformal_arbitrage.scorers.prompts import json_object
from conformal_arbitrage.types import ChatRequest, Sink, Spent, content_text, transcript
from conformal_arbitrage.upstream.base import Call, Port, Reply, fingerprint, is_number, spent_of
from conformal_arbitrage.upstream.sse import delta_of

Confidence = Literal["logprob", "ask"]
_RATING_LIMIT = 50
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
        settings: defaults for what the application's request leaves open; the model's name always applies.
        confidence: "logprob" (the mean token probability of the answer, from the same call), "ask" (a second short
            call that rates the finished answer), or None for a Guardian, which needs none.
        mode: how the second call asks for its number.
    """

    port: Port
    settings: Settings
    confidence: Confidence | None = None
    mode: Mode = "plain"

    @property
    def identity(self) -> Identity:
        """Endpoint, settings and how the confidence is found."""
        found: dict[str, Any] = {"confidence": self.confidence}
        if self.confidence == "ask":
            found |= {"prompt_sha256": fingerprint(_RATE), "mode": self.mode, "parser": "json confidence; 1"}
            found["rating_limit"] = max(_RATING_LIMIT, self.settings.max_tokens or 0)
        return {"kind": "answer", "endpoint": self.port.origin, **self.settings.identity, **found}

    async def answer(self, request: ChatRequest) -> Answer:
        """The model's answer and its confidence.

        Raises:
            ScorerError: there is no answer. A confidence that cannot be had is None instead.
        """
        named = [name for name in get_args(TokenField) if request.body.get(name) is not None]
        asked = request.body[named[0]] if named else self.settings.max_tokens
        body = {**self.settings.body(), **request.body, "model": self.settings.model}
        if named and self.settings.token_field not in request.body:
            body.pop(self.settings.token_field, None)
        body |= {"logprobs": True} if self.confidence == "logprob" else {}
        limit = asked if isinstance(asked, int) else None
        sink = None if request.sink is None else self._served_right(request.sink)
        reply = await self.port.call(Call(path=PATH, body=body, id=request.id, output_limit=limit, sink=sink))
        message = message_of(reply, self.settings, reply.spent, tools=True)
        try:
            answer_text(message)  # what cannot be graded in a log does not stand in a live decision either
        except ReplyError as error:
            error.spent = reply.spent
            raise
        sure, spent = await self._confidence(request, message, reply)
        return Answer(message=message, confidence=sure, spent=spent, document=reply.document, served=served_by(reply))

    def _served_right(self, sink: Sink) -> Sink:
        """The sink behind a check that the pinned model answers, since nothing passed on can be taken back."""

        async def checked(chunk: Mapping[str, Any]) -> None:
            pinned, served = self.settings.served, chunk.get("model")
            says = served or delta_of(chunk)  # what a filter found comes without a model's name, and says nothing
            if pinned is not None and served != pinned and says:
                raise other_model(str(served), pinned, Spent(calls=1, input_tokens=None, output_tokens=None, cost=None))
            await sink(chunk)

        return checked

    async def _confidence(
        self, request: ChatRequest, message: Mapping[str, Any], reply: Reply
    ) -> tuple[float | None, Spent]:
        if self.confidence == "logprob":
            return mean_probability(choice_of(reply, self.settings, reply.spent)), reply.spent
        if self.confidence is None:
            return None, reply.spent
        try:
            sure, spent = await self._rated(request, message)
        except ScorerError as error:
            return None, reply.spent + spent_of(error)
        return sure, reply.spent + spent

    async def _rated(self, request: ChatRequest, message: Mapping[str, Any]) -> tuple[float | None, Spent]:
        asked = _RATE.format(conversation=transcript(request.messages), answer=answer_text(message))
        limit = max(_RATING_LIMIT, self.settings.max_tokens or 0)
        body = self.settings.body() | {self.settings.token_field: limit}
        body |= {"messages": [{"role": "user", "content": asked}], **response_format(self.mode, "rating", _RATING)}
        reply = await self.port.call(Call(path=PATH, body=body, id=request.id, sample=1, output_limit=limit))
        text = content_text(message_of(reply, self.settings, reply.spent)["content"])
        return rating(text, "confidence"), reply.spent


def rating(text: str, name: str) -> float | None:
    """The number in [0, 1] under a name of the JSON object in a text; None if there is none."""
    try:
        value: object = json_object(text).get(name)
    except ValueError:
        return None
    return float(value) if is_number(value) and 0 <= value <= 1 else None


def mean_probability(choice: Mapping[str, Any]) -> float | None:
    """Exp of the mean log-probability of the answer's tokens; None where the endpoint lists none."""
    logprobs: object = choice.get("logprobs")
    content: object = cast("dict[str, Any]", logprobs).get("content") if isinstance(logprobs, dict) else None
    entries = cast("list[object]", content) if isinstance(content, list) else []
    values = [cast("dict[str, Any]", e).get("logprob") if isinstance(e, dict) else None for e in entries]
    known = [max(v, LOWEST) for v in values if is_number(v) and v <= 1e-6]
    if not known or len(known) < len(values):
        return None
    return min(1.0, math.exp(sum(known) / len(known)))


def answer_text(message: Mapping[str, Any]) -> str:
    """An answer as one text: its content, or the whole list of its tool calls, names and canonical arguments."""
    calls: object = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return content_text(message.get("content"))
    return json.dumps([_canonical(call) for call in cast("list[Any]", calls)], sort_keys=True, ensure_ascii=False)


def _canonical(call: Any) -> dict[str, Any]:
    """A tool call without what differs between equal ones: ids, spaces and the order of keys."""
    if not isinstance(call, dict):
        raise ReplyError(f"{call!r:.80} is not a tool call")
    found: object = cast("dict[str, Any]", call).get("function") or cast("dict[str, Any]", call).get("custom")
    function = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    given = function.get("arguments", function.get("input"))
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        arguments = given
    return {"name": function.get("name"), "arguments": arguments}
