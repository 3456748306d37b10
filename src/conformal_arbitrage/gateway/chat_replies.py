"""Decisions in the shapes callers expect: answers of the Decisions API, chat completions and their chunks, errors.

Knows nothing of HTTP beyond headers.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.chat_requests import Choice, Menu, Predicate, Question, Score
from conformal_arbitrage.types import Decision, Leg, Spent

CHUNK = 400
_IN_PARTS = ("role", "content", "tool_calls")


def error_body(message: str, *, code: str, status: int, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal_body(error: RequestError) -> dict[str, Any]:
    """A refused request in OpenAI's shape."""
    return error_body(str(error), code=error.code, status=error.status, param=error.param)


def arbitrage_object(decision: Decision, *, alpha: float | None, full: bool) -> dict[str, Any]:
    """What callers see of a decision: with `full` also what an attacker could use."""
    seen: dict[str, Any] = {
        "id": decision.id,
        "decided_by": decision.decided_by,
        "alpha": alpha,
        "guarantee": "crc" if decision.no_guarantee is None else "none",
        "candidates": list(decision.candidates),
        "legs": [_leg(leg, full=full) for leg in decision.legs],
    }
    if decision.no_guarantee is not None:
        seen["reason"] = decision.no_guarantee
    if full:
        margin = None if decision.margin == float("inf") else decision.margin
        seen |= {"margin": margin, "relaxation": decision.relaxation}
    return seen


def _leg(leg: Leg, *, full: bool) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "role": leg.role,
        "model": leg.served,
        "usage": usage(leg.spent),
        "cost": leg.spent.cost,
        "latency": round(leg.seconds, 4),
        "failed": leg.error is not None,
    }
    return {**seen, "scores": leg.scores} if full else seen


def usage(spent: Spent) -> dict[str, Any]:
    """Tokens in the names of chat completions; unknown ones count 0 there, since the shape has no other way."""
    into, out = spent.input_tokens or 0, spent.output_tokens or 0
    return {"prompt_tokens": into, "completion_tokens": out, "total_tokens": into + out}


def headers(decision: Decision, alpha: float | None) -> dict[str, str]:
    """What stands in the reply's headers."""
    cost = decision.spent.cost
    return {
        "x-arbitrage-decision-id": str(decision.id),
        "x-arbitrage-decided-by": decision.decided_by,
        "x-arbitrage-alpha": "none" if alpha is None else f"{alpha:g}",
        "x-arbitrage-cost": "unknown" if cost is None else f"{cost:.9g}",
    }


def answer(question: Question, decision: Decision, arbitrage: Mapping[str, Any]) -> dict[str, Any]:
    """A decision in the shape of the Decisions API."""
    chosen = decision.action or 0
    shares = probabilities(decision, _size(question))
    found: dict[str, Any] = {"name": question.name, "arbitrage": arbitrage}
    if isinstance(question, Predicate):
        return {"type": "predicate", "probability": shares[0], **found}
    if isinstance(question, Score):
        listed = [
            {"label": v.label, "probability": p, "value": k}
            for k, (v, p) in enumerate(zip(question.levels, shares, strict=True))
        ]
        score = sum(k * p for k, p in enumerate(shares))
        return {"type": "score", "score": score, "confidence": shares[chosen], "probabilities": listed, **found}
    values = [{"value": c.value, "probability": p} for c, p in zip(question.choices, shares, strict=True)]
    choice = question.choices[chosen].value
    return {"type": "choice", "choice": choice, "confidence": shares[chosen], "probabilities": values, **found}


def _size(question: Question) -> int:
    if isinstance(question, Predicate):
        return 2
    return len(question.choices) if isinstance(question, Choice) else len(question.levels)


def probabilities(decision: Decision, size: int) -> list[float]:
    """The shares of whoever decided; all on the chosen action where its scores are no shares or another leads."""
    chosen = decision.action or 0
    leg = next((leg for leg in reversed(decision.legs) if leg.role == decision.decided_by), None)
    scores = None if leg is None else leg.scores
    shown = list(decision.candidates) if scores is not None and len(scores) < size else list(range(size))
    sound = scores is not None and len(shown) == len(scores) and min(scores) >= 0 and sum(scores) > 0
    if scores is None or not sound:
        return [float(k == chosen) for k in range(size)]
    shares = [0.0] * size
    for place, score in zip(shown, scores, strict=True):
        shares[place] = score / sum(scores)
    return shares if max(shares) == shares[chosen] else [float(k == chosen) for k in range(size)]


def completion(name: str, decision: Decision, menu: Menu | None, arbitrage: Mapping[str, Any]) -> dict[str, Any]:
    """A decision as an ordinary chat completion."""
    message, finish = said(decision, menu)
    return {
        "id": f"chatcmpl-{decision.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": name,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": usage(decision.spent),
        "arbitrage": arbitrage,
    }


def said(decision: Decision, menu: Menu | None) -> tuple[dict[str, Any], str]:
    """The assistant's message and why it ended."""
    if menu is not None:
        content = str(decision.answer)
        if menu.field is not None:
            content = json.dumps({menu.field: menu.values[decision.action or 0]}, ensure_ascii=False)
        return {"role": "assistant", "content": content, "refusal": None}, "stop"
    message = {"role": "assistant", "content": None, "refusal": None, **_plain(decision.answer)}
    reply: Any = next((leg.reply for leg in reversed(decision.legs) if leg.role == decision.decided_by), None)
    finish = None if reply is None else reply["choices"][0].get("finish_reason")
    return message, finish if isinstance(finish, str) else "tool_calls" if message.get("tool_calls") else "stop"


def _plain(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"content": str(value)}  # pyright: ignore[reportUnknownArgumentType]


class Chunks:
    """The server-sent events of one completion; `arbitrage` stands on the first and the last chunk, [DONE] comes last.

    Args:
        id: the decision's.
        model: the policy's name.
        include_usage: whether a chunk with the tokens comes before the end.
    """

    def __init__(self, id: str, model: str, *, include_usage: bool) -> None:
        told = {"id": f"chatcmpl-{id}", "created": int(time.time()), "model": model}
        self._base = {**told, "object": "chat.completion.chunk"}
        self._include_usage = include_usage

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> bytes:
        one = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        empty = {"usage": None} if self._include_usage else {}
        return event({**self._base, "choices": [one], **empty, **more})

    def first(self, arbitrage: Mapping[str, Any]) -> bytes:
        """The assistant begins."""
        return self._chunk({"role": "assistant", "content": ""}, arbitrage=arbitrage)

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """The assistant goes on."""
        return self._chunk(delta)

    def last(self, finish: str, arbitrage: Mapping[str, Any], tokens: Mapping[str, Any]) -> bytes:
        """The assistant has ended."""
        pieces = [self._chunk({}, finish, arbitrage=arbitrage)]
        if self._include_usage:
            pieces.append(event({**self._base, "choices": [], "usage": tokens, "arbitrage": arbitrage}))
        return b"".join([*pieces, b"data: [DONE]\n\n"])


def streamed(whole: Mapping[str, Any], chunks: Chunks) -> Iterator[bytes]:
    """A finished completion as chunks."""
    choice = whole["choices"][0]
    message = choice["message"]
    yield chunks.first(whole["arbitrage"])
    rest = {name: value for name, value in message.items() if name not in _IN_PARTS and value is not None}
    if rest:
        yield chunks.delta(rest)
    content = message.get("content") or ""
    for start in range(0, len(content), CHUNK):
        yield chunks.delta({"content": content[start : start + CHUNK]})
    calls: Sequence[Any] = message.get("tool_calls") or ()
    for place, call in enumerate(calls):
        yield chunks.delta({"tool_calls": [{"index": place, **call}]})
    yield chunks.last(choice["finish_reason"], whole["arbitrage"], whole["usage"])


def event(document: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def recorded(decision: Decision) -> dict[str, Any]:
    """A decision as the record keeps it; content is added as the policy says."""
    margin = None if decision.margin == float("inf") else decision.margin
    return {
        "action": decision.action,
        "candidates": list(decision.candidates),
        "margin": margin,
        "relaxation": decision.relaxation,
        "no_guarantee": decision.no_guarantee,
        "legs": [recorded_leg(leg) for leg in decision.legs],
        "cost": decision.spent.cost,
    }


def recorded_leg(leg: Leg) -> dict[str, Any]:
    """All of a leg but the reply."""
    return {**asdict(leg), "spent": asdict(leg.spent), "reply": None}
