"""Decisions in the shapes callers expect: the Decisions API's answers, chat completions, and their chunks.

Knows nothing of HTTP beyond headers.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from conformal_arbitrage.gateway.chat_requests import Choice, Menu, Predicate, Question, Score
from conformal_arbitrage.gateway.decider import Outcome
from conformal_arbitrage.gateway.policy_table import LivePolicy
from conformal_arbitrage.store.base import SavedResponse
from conformal_arbitrage.types import Chunk, Decision, Leg, Spent

_PIECE = 400
_STREAMED_APART = ("role", "content", "tool_calls")
EVENT_STREAM = {"content-type": "text/event-stream"}


def decisions_reply(policy: LivePolicy, questions: Sequence[Question], outcomes: Sequence[Outcome]) -> SavedResponse:
    """Return the reply to a request to /v1/decisions."""
    answers = [
        _answer(question, outcome.decision, arbitrage_object(policy, outcome))
        for question, outcome in zip(questions, outcomes, strict=True)
    ]
    spent = sum((outcome.decision.spent for outcome in outcomes), start=Spent())
    body = {"model": policy.name, "answers": answers, "usage": input_output_usage(spent)}
    headers = reply_headers(policy, outcomes[0]) if len(outcomes) == 1 else {}
    return json_reply(body, headers)


class LiveEvents(Protocol):
    """Renders an answer while it is being written."""

    def first(self, outcome: Outcome, deltas: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the events that open the answer, and those for what has been said already."""
        ...

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """Return the events that continue the answer."""
        ...

    def last(self, outcome: Outcome) -> tuple[str, bytes]:
        """Return the finish reason, and the events that end the answer."""
        ...


class ReplyShape(Protocol):
    """How one API shows a decision."""

    def whole(self, policy: LivePolicy, outcome: Outcome, menu: Menu | None) -> SavedResponse:
        """Return the reply to a request that does not stream."""
        ...

    def streamed(self, policy: LivePolicy, outcome: Outcome, menu: Menu | None) -> SavedResponse:
        """Return the whole reply to a request that streams, for a decision that is made already."""
        ...

    def live(self, policy: LivePolicy, outcome: Outcome) -> LiveEvents:
        """Return what renders an answer while it is being written."""
        ...


class ChatShape(Struct, frozen=True):
    """Replies to a chat request."""

    include_usage: bool

    def whole(self, policy: LivePolicy, outcome: Outcome, menu: Menu | None) -> SavedResponse:
        """See `ReplyShape`."""
        return json_reply(completion(policy, outcome, menu), reply_headers(policy, outcome))

    def streamed(self, policy: LivePolicy, outcome: Outcome, menu: Menu | None) -> SavedResponse:
        """See `ReplyShape`."""
        chunks = Chunks(policy, outcome, include_usage=self.include_usage, menu=menu)
        message, _ = message_of_decision(outcome.decision, menu)
        body = chunks.first(outcome, deltas_of(message)) + chunks.last(outcome)[1]
        return SavedResponse(status=200, headers={**reply_headers(policy, outcome), **EVENT_STREAM}, body=body)

    def live(self, policy: LivePolicy, outcome: Outcome) -> LiveEvents:
        """See `ReplyShape`."""
        return Chunks(policy, outcome, include_usage=self.include_usage)


def json_reply(document: Mapping[str, Any], headers: Mapping[str, str]) -> SavedResponse:
    """Return a reply that is one JSON document."""
    body = msgspec.json.encode(document)
    return SavedResponse(status=200, headers={**headers, "content-type": "application/json"}, body=body)


def arbitrage_object(policy: LivePolicy, outcome: Outcome, menu: Menu | None = None) -> dict[str, Any]:
    """Return what callers see of a decision; under expose = "full" also what an attacker could use."""
    decision, full = outcome.decision, policy.settings.expose == "full"
    shown: dict[str, Any] = {
        "id": decision.id,
        "decided_by": decision.decided_by,
        "alpha": policy.alpha,
        "guarantee": policy.guarantee if decision.no_guarantee is None else "none",
        "candidates": list(decision.candidates),
        "legs": [_leg(leg, full=full) for leg in decision.legs],
    }
    if decision.no_guarantee is not None:
        shown["reason"] = decision.no_guarantee
    if outcome.session is not None:
        shown |= {"session": outcome.session, "held": outcome.held is not None}
    if menu is not None and menu.ignored:
        shown["ignored"] = menu.ignored
    if full:
        margin = None if decision.margin == float("inf") else decision.margin
        shown |= {"margin": margin, "relaxation": decision.relaxation}
    return shown


def _leg(leg: Leg, *, full: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "role": leg.role,
        "model": leg.served,
        "usage": _usage(leg.spent),
        "cost": leg.spent.cost,
        "latency": round(leg.seconds, 4),
        "failed": leg.error is not None,
    }
    return {**shown, "scores": leg.scores} if full else shown


def _usage(spent: Spent) -> dict[str, int]:
    """Return tokens under chat completions' names; unknown counts are 0, since the shape has no other way."""
    into, out = spent.input_tokens or 0, spent.output_tokens or 0
    return {"prompt_tokens": into, "completion_tokens": out, "total_tokens": into + out}


def input_output_usage(spent: Spent) -> dict[str, Any]:
    """Return tokens under the names of the Decisions and Responses APIs."""
    into, out = spent.input_tokens or 0, spent.output_tokens or 0
    return {
        "input_tokens": into,
        "input_tokens_details": {"cached_tokens": spent.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": out,
        "output_tokens_details": {"reasoning_tokens": spent.reasoning_tokens},
        "total_tokens": into + out,
    }


def reply_headers(policy: LivePolicy, outcome: Outcome) -> dict[str, str]:
    """Return the reply's own headers."""
    cost = outcome.decision.spent.cost
    return {
        "x-arbitrage-decision-id": str(outcome.decision.id),
        "x-arbitrage-decided-by": outcome.decision.decided_by,
        "x-arbitrage-alpha": "none" if policy.alpha is None else f"{policy.alpha:g}",
        "x-arbitrage-cost": "unknown" if cost is None else f"{cost:.9g}",
    }


def _answer(question: Question, decision: Decision, arbitrage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decision in the shape of the Decisions API."""
    chosen = decision.action or 0
    shares = probabilities(decision, _size(question))
    common: dict[str, Any] = {"name": question.name, "arbitrage": arbitrage}
    if isinstance(question, Predicate):
        return {"type": "predicate", "probability": shares[0], **common}
    if isinstance(question, Score):
        levels = [
            {"label": level.label, "probability": share, "value": value}
            for value, (level, share) in enumerate(zip(question.levels, shares, strict=True))
        ]
        score = sum(value * share for value, share in enumerate(shares))
        return {"type": "score", "score": score, "confidence": shares[chosen], "probabilities": levels, **common}
    values = [{"value": c.value, "probability": p} for c, p in zip(question.choices, shares, strict=True)]
    choice = question.choices[chosen].value
    return {"type": "choice", "choice": choice, "confidence": shares[chosen], "probabilities": values, **common}


def _size(question: Question) -> int:
    if isinstance(question, Predicate):
        return 2
    return len(question.choices) if isinstance(question, Choice) else len(question.levels)


def probabilities(decision: Decision, size: int) -> list[float]:
    """Return the normalised scores of whoever decided.

    All weight is on the chosen action if there are no usable scores, or if another action leads in them.
    """
    chosen = decision.action or 0
    leg = next((leg for leg in reversed(decision.legs) if leg.role == decision.decided_by), None)
    scores = None if leg is None else leg.scores
    shown = list(decision.candidates) if scores is not None and len(scores) < size else list(range(size))
    usable = scores is not None and len(shown) == len(scores) and min(scores) >= 0 and sum(scores) > 0
    if scores is None or not usable:
        return [float(k == chosen) for k in range(size)]
    shares = [0.0] * size
    for place, score in zip(shown, scores, strict=True):
        shares[place] = score / sum(scores)
    return shares if max(shares) == shares[chosen] else [float(k == chosen) for k in range(size)]


def completion(policy: LivePolicy, outcome: Outcome, menu: Menu | None) -> dict[str, Any]:
    """Return a decision as an ordinary chat completion."""
    decision = outcome.decision
    message, finish = message_of_decision(decision, menu)
    return {
        "id": f"chatcmpl-{decision.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": policy.name,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": _usage(outcome.decision.spent),
        "arbitrage": arbitrage_object(policy, outcome, menu),
    }


def message_of_decision(decision: Decision, menu: Menu | None) -> tuple[dict[str, Any], str]:
    """Return the assistant's message and its finish reason."""
    if menu is not None:
        content = str(decision.answer)
        if menu.field is not None:
            content = json.dumps(menu.document(decision.action or 0), ensure_ascii=False)
        if menu.tool is not None:
            function = {"name": menu.tool, "arguments": content}
            calls = [{"id": f"call_{decision.id}", "type": "function", "function": function}]
            return {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}, "tool_calls"
        return {"role": "assistant", "content": content, "refusal": None}, "stop"
    answer = decision.answer if isinstance(decision.answer, Mapping) else {"content": str(decision.answer)}
    message = {"role": "assistant", "content": None, "refusal": None, **answer}
    reply: Any = next((leg.reply for leg in reversed(decision.legs) if leg.role == decision.decided_by), None)
    finish = None if reply is None else reply["choices"][0].get("finish_reason")
    return message, finish if isinstance(finish, str) else "tool_calls" if message.get("tool_calls") else "stop"


class Chunks:
    """The server-sent events of one completion; the first and the last chunk carry `arbitrage`, [DONE] comes last.

    Args:
        policy: the policy that decided.
        outcome: the decision.
        include_usage: whether a chunk with the token counts comes before the end.
        menu: what was chosen from, if anything.
    """

    def __init__(self, policy: LivePolicy, outcome: Outcome, *, include_usage: bool, menu: Menu | None = None) -> None:
        self._policy = policy
        self._menu = menu
        self._include_usage = include_usage
        self._base = {
            "id": f"chatcmpl-{outcome.decision.id}",
            "created": int(time.time()),
            "model": policy.name,
            "object": "chat.completion.chunk",
        }

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        no_usage = {"usage": None} if self._include_usage else {}
        return event_bytes({**self._base, "choices": [choice], **no_usage, **more})

    def first(self, outcome: Outcome, deltas: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the chunk that opens the answer, and those for what has been said already."""
        arbitrage = arbitrage_object(self._policy, outcome, self._menu)
        opening = self._chunk({"role": "assistant", "content": ""}, arbitrage=arbitrage)
        return b"".join([opening, *[self._chunk(delta) for delta in deltas if delta]])

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """Return a chunk that continues the answer."""
        return self._chunk(delta)

    def last(self, outcome: Outcome) -> tuple[str, bytes]:
        """Return the finish reason, and the chunks that end the answer."""
        finish = message_of_decision(outcome.decision, self._menu)[1]
        arbitrage = arbitrage_object(self._policy, outcome, self._menu)
        pieces = [self._chunk({}, finish, arbitrage=arbitrage)]
        if self._include_usage:
            usage = _usage(outcome.decision.spent)
            pieces.append(event_bytes({**self._base, "choices": [], "usage": usage, "arbitrage": arbitrage}))
        return finish, b"".join([*pieces, b"data: [DONE]\n\n"])


def deltas_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a finished message as what its chunks would have added."""
    rest = {name: value for name, value in message.items() if name not in _STREAMED_APART and value is not None}
    content = message.get("content") or ""
    texts = [{"content": content[start : start + _PIECE]} for start in range(0, len(content), _PIECE)]
    calls: Sequence[Chunk] = message.get("tool_calls") or ()
    return [rest, *texts, *[{"tool_calls": [{"index": place, **call}]} for place, call in enumerate(calls)]]


def event_bytes(document: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
