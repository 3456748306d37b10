"""Bodies as JSON text and back: sorted, compact, and never a number that is not finite.

Knows nothing of databases or of what the bodies mean.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from conformal_arbitrage.errors import DamagedError, StoreError
from conformal_arbitrage.store.record import (
    DECISION_SCHEMA,
    AlarmBody,
    AuditBody,
    AuditQuestion,
    CompletionBody,
    Content,
    DecisionBody,
    EventBody,
    FeedbackBody,
    JSONObject,
    LaterBody,
    LiftBody,
    MenuQuestion,
    NoticeBody,
    TextQuestion,
    document,
)
from conformal_arbitrage.store.review_base import ReviewOutcome, ReviewQuestion
from conformal_arbitrage.types import Leg

_T = TypeVar("_T")

_sorted = msgspec.json.Encoder(order="sorted")
_as_given = msgspec.json.Encoder()
_strict = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False)
_strict_as_given = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def encode(body: EventBody | AuditQuestion, id: str) -> str:
    """Return the JSON text of a body, its keys sorted; those of a question stay in order, since it is sent again as it was.

    Args:
        body: what to store.
        id: the decision's, for the error message.

    Raises:
        StoreError: a number in it is not finite, or a value has no JSON.
    """
    with suppress(UnicodeEncodeError, TypeError, RecursionError):  # json writes lone surrogates and NumPy floats
        if _is_writable(body):
            return (_as_given if isinstance(body, AuditQuestion) else _sorted).encode(body).decode()
    return _encode_strictly(
        document(body), f"the {type(body).__name__} of {id}", as_given=isinstance(body, AuditQuestion)
    )


def encode_json(mapping: JSONObject, name: str) -> str:
    """Return the text of a JSON object.

    Raises:
        StoreError: a number in it is not finite, or a value has no JSON.
    """
    with suppress(UnicodeEncodeError, RecursionError):
        if _is_plain(mapping):
            return _sorted.encode(mapping).decode()
    return _encode_strictly(dict(mapping), name)


def _encode_strictly(values: Mapping[str, object], name: str, *, as_given: bool = False) -> str:
    try:
        return (_strict_as_given if as_given else _strict).encode(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"{name} is not JSON ({error}); use text, finite numbers, lists and objects") from error


def _is_writable(body: EventBody | AuditQuestion) -> bool:
    """Return whether msgspec writes a body faithfully: NaN would become null, bytes and dates would become text."""
    match body:
        case DecisionBody():
            numbers = _are_finite((body.margin, body.relaxation, body.cost, body.alpha))
            return numbers and all(map(_is_finite_leg, body.legs)) and _is_plain_content(body.content)
        case CompletionBody():
            leg = all(map(_is_finite_leg, body.before)) and (body.leg is None or _is_finite_leg(body.leg))
            return leg and _are_finite((body.cost,)) and _is_plain_content(body.content)
        case FeedbackBody():
            grades = () if body.grades is None else body.grades.values
            return _are_finite((body.grade, *grades)) and _is_plain(body.grader)
        case AuditBody():
            return _are_finite((body.cost, *(body.scores or ())))
        case AlarmBody():
            return _are_finite((body.mean, body.line, body.log_evidence))
        case LiftBody():
            return True
        case MenuQuestion():
            return _is_plain(body.context)
        case TextQuestion():
            return _is_plain(body.request)


def _is_finite_leg(leg: Leg) -> bool:
    return isfinite(leg.seconds) and _are_finite((leg.spent.cost, *(leg.scores or ())))


def _are_finite(numbers: Sequence[float | None]) -> bool:
    return all(map(isfinite, filter(None, numbers)))


def _is_plain_content(content: Content | None) -> bool:
    return content is None or all(map(_is_plain, (content.context, content.request, content.answer)))


def _is_plain(value: Any) -> bool:
    """Return whether a value is what a JSON parser returns, with finite numbers."""
    kind: Any = value.__class__
    if kind is str or kind is int or value is None or kind is bool:
        return True
    if kind is float:
        return isfinite(value)
    if kind is dict:
        return set(map(type, value)) <= {str} and all(map(_is_plain, value.values()))
    return (kind is list or kind is tuple) and all(map(_is_plain, value))


class _Version(Struct):
    """The one field of a decision's body that every release can read."""

    schema: int = 1


def decode_decision(text: str, id: str) -> DecisionBody:
    """Read the body of a decision.

    Raises:
        StoreError: a newer release wrote it, or it is damaged.
    """
    version = _decode(text, _Version, f"decision {id}").schema
    if version > DECISION_SCHEMA:
        raise StoreError(
            f"decision {id} has schema {version}, this release reads up to {DECISION_SCHEMA}; upgrade conformal-arbitrage"
        )
    return _decode(text, DecisionBody, f"decision {id}")


_LATER: Mapping[str, type[LaterBody]] = {body.kind: body for body in (CompletionBody, FeedbackBody, AuditBody)}


def decode_later(kind: str, text: str, id: str, at: float) -> LaterBody:
    """Read the body of an event that follows a decision; `at` is when it was recorded.

    Raises:
        StoreError: it is damaged.
    """
    return replace(_decode(text, _LATER[kind], f"the {kind} of {id}"), at=at)


_NOTICES: Mapping[str, type[NoticeBody]] = {body.kind: body for body in (AlarmBody, LiftBody)}


def decode_notice(kind: str, text: str, policy: str, at: float) -> NoticeBody:
    """Read the body of an alarm or a lift; `at` is when it was recorded.

    Raises:
        StoreError: it is damaged.
    """
    return replace(_decode(text, _NOTICES[kind], f"the {kind} of policy {policy}"), at=at)


def decode_question(text: str, id: str) -> AuditQuestion:
    """Read the question of an audit.

    Raises:
        StoreError: it is damaged.
    """
    name = f"the audit of {id}"
    kind = TextQuestion if "request" in decode_json(text, name) else MenuQuestion
    return _decode(text, kind, name)


def encode_review_question(question: ReviewQuestion, id: str) -> str:
    """Return the JSON text of what people are shown of a question.

    Raises:
        StoreError: a value has no JSON.
    """
    with suppress(UnicodeEncodeError, RecursionError):
        if _is_plain(question.context):
            return _as_given.encode(question).decode()
    return _encode_strictly(document(question), f"the question about {id}", as_given=True)


def decode_review_question(text: str, id: str) -> ReviewQuestion:
    """Read what people are shown of a question.

    Raises:
        StoreError: it is damaged.
    """
    return _decode(text, ReviewQuestion, f"the review {id}")


def encode_outcome(outcome: ReviewOutcome) -> str:
    """Return the JSON text of a verdict."""
    return _as_given.encode(outcome).decode()


def decode_outcome(text: str, id: str) -> ReviewOutcome:
    """Read a verdict.

    Raises:
        StoreError: it is damaged.
    """
    return _decode(text, ReviewOutcome, f"the verdict on {id}")


def decode_json(text: str, name: str) -> dict[str, object]:
    """Read a JSON object.

    Raises:
        StoreError: it is damaged.
    """
    return _decode(text, dict[str, object], name)


def decode_names(text: str, name: str) -> tuple[str, ...]:
    """Read a list of names.

    Raises:
        StoreError: it is damaged.
    """
    return _decode(text, tuple[str, ...], name)


def _decode(text: str, kind: type[_T], name: str) -> _T:
    with suppress(msgspec.DecodeError, RecursionError):
        return msgspec.json.decode(text, type=kind)
    try:  # json reads lone surrogates
        return msgspec.convert(json.loads(text), kind)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise DamagedError(f"{name} is damaged in the store ({error}); run `arbitrage records verify`") from error
