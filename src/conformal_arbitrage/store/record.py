"""The decision record: what is stored about a decision, as typed bodies, their ids, and their JSON text.

Everything known about a decision is an event that is appended and never changed: the decision itself, its completion,
feedback, an audit. An event's kind follows from the type of its body. Ids are 26 characters that sort by time, like a ULID.
Bodies are stored as JSON: sorted, compact, and never a number that is not finite.

Every field says what becomes of it when a decision is erased: it is content, personal, or kept.
"""

import json
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Struct, structs
from msgspec.structs import asdict, replace

from conformal_arbitrage.errors import DamagedError, StoreError
from conformal_arbitrage.types import ContentField, KeptField, LearnedUse, Leg, NotedField, PersonalField, field_marks

_StructT = TypeVar("_StructT", bound=Struct)
DECISION_SCHEMA = 1
"""The newest schema of `DecisionBody` that this release can read."""
JSONObject = Mapping[str, object]
"""A JSON object that a caller wrote."""
EventKind = Literal["decision", "completion", "feedback", "audit", "alarm", "lift", "exclusion"]


class Content(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was asked and answered, as much of it as the policy keeps: in full, or a keyed digest in place of each value.

    Attributes:
        context: the question, text or messages, where there is a menu.
        actions: the menu.
        request: the chat request, in free text.
        primary_answer: the Primary's text where the Guardian's answer was given.
        answer: the chosen action's text, or the whole assistant message.
        chain_answers: what each model said that a cascade asked before the Guardian, if there were several.
    """

    context: ContentField[str | Sequence[JSONObject] | None] = None
    actions: ContentField[tuple[str, ...] | str | None] = None
    request: ContentField[JSONObject | str | None] = None
    primary_answer: ContentField[str | None] = None
    answer: ContentField[JSONObject | str | None] = None
    chain_answers: ContentField[tuple[str, ...] | str | None] = None


class DecisionBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision.

    Attributes:
        schema: which version of this struct wrote it. The default stays 1 in all releases, since version 1 does not
            write it: a release that changes the meaning of a field writes 2.
        action: index of the chosen action; None if there is none.
        candidates: indices of the actions the rule could not exclude.
        margin: how far the Primary's top action leads; None if there is no other action.
        relaxation: how far it must lead to stand alone.
        no_guarantee: why the decision is not covered by a guarantee; None if it is.
        legs: the models that were called, in order, without their replies.
        cost: dollars; None if unknown.
        alpha: the risk budget of the certificate in force.
        mode: whether the rule was enforced; in "safe" mode the Guardian decided after an alarm, and the candidates are
            those the rule would have had.
        content: question and answer, if the policy keeps them.
        identities_sha256: fingerprint of the models' identities.
        overridden: the request changed a pinned setting, or its key is excluded.
        audited: the decision was drawn for an audit.
        pending: recorded when the Primary had answered and the Guardian had not; a completion with an action, if there
            is one, tells what it chose.
        session: id of the session's first decision, under a policy that decides by session.
        named: keyed digest of the session that the request named, under any other policy.
        ledger: where the ledger of the version lists it: by how many lifts of alarms, and by the name of its group; None if
            nowhere.
        held: decided by the session's first turn, not by this one.
        guarded: how many known losses of the ledger the threshold rested on, under a policy with a guard.
        cancelled: the caller left before there was a decision; all other fields have their defaults.
        learned: how a learned score decided.
        group: what the request named where the policy takes groups from, whatever the certificate has; None if nothing.
    """

    kind: ClassVar[EventKind] = "decision"

    schema: KeptField[int] = 1
    action: KeptField[int | None] = None
    candidates: KeptField[tuple[int, ...]] = ()
    margin: KeptField[float | None] = None
    relaxation: KeptField[float | None] = None
    no_guarantee: KeptField[str | None] = None
    legs: KeptField[tuple[Leg, ...]] = ()
    cost: KeptField[float | None] = None
    alpha: KeptField[float | None] = None
    version: KeptField[int | None] = None
    mode: KeptField[Literal["enforce", "shadow", "safe"] | None] = None
    form: KeptField[Literal["menu", "text"] | None] = None
    content: ContentField[Content | None] = None
    identities_sha256: KeptField[str | None] = None
    size: KeptField[int] = 0
    overridden: KeptField[bool] = False
    audited: KeptField[bool] = False
    pending: KeptField[bool] = False
    session: KeptField[str | None] = None
    named: KeptField[str | None] = None
    ledger: KeptField[tuple[int, str] | None] = None
    held: KeptField[bool] = False
    guarded: KeptField[int | None] = None
    cancelled: KeptField[bool] = False
    learned: KeptField[LearnedUse | None] = None
    group: KeptField[str | None] = None


class ReviewVote(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One person's vote on a question.

    Attributes:
        choice: index of the action in the whole menu; of two answers, the grades of the Primary's and the Guardian's.
        held: seconds that they had the question before them.
        level: 1 if they voted as a lead, after a panel without a verdict.
    """

    reviewer: PersonalField[str]
    choice: KeptField[int | tuple[float, float]]
    held: KeptField[float]
    level: KeptField[int] = 0


class ReviewFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How people came to a verdict.

    Attributes:
        item: id in the review queue.
        protocol: digest of how they were asked, which is part of the Guardian's identity.
        rule: how votes were counted.
        level: 1 if a lead decided.
        votes: those that counted.
        withdrawn: how many were undone in time.
    """

    item: KeptField[str]
    protocol: KeptField[str]
    rule: KeptField[str]
    votes: KeptField[tuple[ReviewVote, ...]] = ()
    level: KeptField[int] = 0
    withdrawn: KeptField[int] = 0


class CompletionBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an attempt to answer ended whose decision was recorded earlier.

    Attributes:
        finish: the finish reason; "cancelled" if the caller left, "failed" if a model did, "limited" if the Guardian's
            quota was used up, "waiting" if the caller was told that people are still deciding. After these nothing, or
            not everything, was delivered.
        leg: the model that answered or failed, without its reply.
        before: all that a cascade asked before that one, without their replies; empty if the decision has it all.
        action: index of the chosen action; None if there is none.
        decided_by: who chose, if it was not who the decision says.
        no_guarantee: why the outcome is not covered by a guarantee, if the decision does not say it.
        cost: dollars for the whole decision; None if unknown.
        content: the answer, if the policy keeps it.
        review: how people chose, if they did.
        at: when it was recorded; set by the store.
    """

    kind: ClassVar[EventKind] = "completion"

    finish: KeptField[str]
    leg: KeptField[Leg | None] = None
    before: KeptField[tuple[Leg, ...]] = ()
    action: KeptField[int | None] = None
    decided_by: KeptField[str | None] = None
    no_guarantee: KeptField[str | None] = None
    cost: KeptField[float | None] = None
    content: ContentField[Content | None] = None
    review: KeptField[ReviewFacts | None] = None
    at: KeptField[float | None] = None


class Grades(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Grades of both answers, in [0, 1]; `chain` are those of every model that a cascade asked before the Guardian."""

    primary: KeptField[float]
    guardian: KeptField[float]
    chain: KeptField[tuple[float, ...]] = ()

    @property
    def values(self) -> tuple[float, ...]:
        """All of them."""
        return (self.primary, self.guardian, *self.chain)


class FeedbackBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became known about a decision later.

    Attributes:
        grade: of the answer that was given, in [0, 1].
        grades: of both answers; the first that are recorded count, later ones are kept beside them.
        reason: why grades were sent once more.
        by: the key that sent it.
        from_caller: with a key of scope call: a caller could hide losses with labels of its own.
        grader: the identity of what made the grades, if a grader of this package did.
        review: how people came to the grades, if they were asked through the review queue; without grades, why there are
            none.
        at: when it was recorded; set by the store.
    """

    kind: ClassVar[EventKind] = "feedback"

    grade: KeptField[float | None] = None
    grades: KeptField[Grades | None] = None
    reason: NotedField[str | None] = None
    label: ContentField[int | str | None] = None
    comment: ContentField[str | None] = None
    by: KeptField[str | None] = None
    from_caller: KeptField[bool] = False
    grader: KeptField[JSONObject | None] = None
    review: KeptField[ReviewFacts | None] = None
    at: KeptField[float | None] = None


class AuditBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The Guardian's view of a decision that was drawn for an audit.

    Attributes:
        scores: over the whole menu; None if it failed or answered in free text.
        cost: dollars; None if unknown.
        served: the model that answered, as the endpoint names it.
        answer: its text, if the policy keeps content in full.
        identities_sha256: fingerprint of the identities of the models that the policy had when it answered.
        review: how people chose, if they did.
        at: when it was recorded; set by the store.
    """

    kind: ClassVar[EventKind] = "audit"

    scores: KeptField[tuple[float, ...] | None] = None
    error: NotedField[str | None] = None
    cost: KeptField[float | None] = None
    served: KeptField[str | None] = None
    answer: ContentField[str | None] = None
    identities_sha256: KeptField[str | None] = None
    review: KeptField[ReviewFacts | None] = None
    at: KeptField[float | None] = None


class AlarmBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The loss of a policy's version is above its red line; it stands until it is lifted, and is never taken back.

    Attributes:
        lifts: how often alarms of this version had been lifted before.
        identities_sha256: fingerprint of the models' identities whose ledger showed it.
        group: whose ledger it was, of a certificate by groups.
        cause: "losses", or "failing audits" if the evidence would not do without the audits that have no outcome.
        audits: rows of the ledger.
        known: those whose loss was known.
        missing: those whose outcome was overdue.
        mean: mean loss of the known ones, as a share of the loss bound.
        line: the red line, likewise.
        log_evidence: the largest natural logarithm of the evidence against the line.
        at: when it was recorded; set by the store.
    """

    kind: ClassVar[EventKind] = "alarm"

    version: KeptField[int]
    lifts: KeptField[int]
    identities_sha256: KeptField[str]
    cause: KeptField[str]
    audits: KeptField[int]
    known: KeptField[int]
    missing: KeptField[int]
    line: KeptField[float]
    log_evidence: KeptField[float]
    mean: KeptField[float | None] = None
    group: KeptField[str | None] = None
    at: KeptField[float | None] = None


class LiftBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Someone lifted an alarm without a new certificate, which voids the promise of the one in force.

    Attributes:
        lifts: how often alarms of this version have been lifted, this time included.
        reason: why, in their words.
        by: the key they used, or "command line".
        at: when it was recorded; set by the store.
    """

    kind: ClassVar[EventKind] = "lift"

    version: KeptField[int]
    lifts: KeptField[int]
    reason: KeptField[str]
    by: KeptField[str]
    at: KeptField[float | None] = None


class ExclusionBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Someone excluded an API key from the promise of a policy, or ended that.

    Attributes:
        key: its id.
        number: how many exclusions of the policy, and ends of one, there have been, this one included.
        ends: whether the promise covers the key again.
        reason: why, in their words.
        by: the key they used, or "command line".
        at: when it was recorded; set by the store.
    """

    kind: ClassVar[EventKind] = "exclusion"

    key: KeptField[str]
    number: KeptField[int]
    reason: KeptField[str]
    by: KeptField[str]
    ends: KeptField[bool] = False
    at: KeptField[float | None] = None


LaterBody = CompletionBody | FeedbackBody | AuditBody
NoticeBody = AlarmBody | LiftBody | ExclusionBody
EventBody = DecisionBody | LaterBody | NoticeBody


class Event(Struct, frozen=True, kw_only=True):
    """One fact about a decision, or about a policy: a notice, which is an alarm, its lift, or the exclusion of a key.

    Attributes:
        id: the decision's id, time-ordered; of a notice, its name.
        body: the fact itself.
        policy: of a decision: whose rule; of a notice: the policy.
        key_id: of a decision: whose call.
        decided_by: of a decision: who chose.
    """

    id: KeptField[str]
    body: KeptField[EventBody]
    policy: KeptField[str | None] = None
    key_id: KeptField[str | None] = None
    decided_by: KeptField[str | None] = None


class DecisionRecord(Struct, frozen=True, kw_only=True):
    """A decision and everything recorded about it later.

    Only one completion counts, the first that delivered an answer, else the first; and only the first audit. A decision
    that was recorded as pending includes what that completion says.
    """

    id: KeptField[str]
    created: KeptField[float]
    policy: KeptField[str]
    key_id: KeptField[str | None]
    decided_by: KeptField[str]
    decision: KeptField[DecisionBody]
    completion: KeptField[CompletionBody | None] = None
    feedback: KeptField[tuple[FeedbackBody, ...]] = ()
    audit: KeptField[AuditBody | None] = None

    def labels(self, *, callers: bool) -> Iterator[int | str]:
        """Yield the labels that were given, the first first; those that callers sent only if these count."""
        given = (feedback for feedback in self.feedback if callers or not feedback.from_caller)
        return (feedback.label for feedback in given if feedback.label is not None)


UNDELIVERED = frozenset({"cancelled", "failed", "limited", "waiting"})
"""How an attempt finishes that delivered nothing, or not everything."""


def completion_of_record(completions: Sequence[CompletionBody]) -> CompletionBody | None:
    """Return the completion that counts: the first that delivered an answer, else the first with one, else the first."""
    by_rank = sorted(completions, key=lambda completion: (completion.finish in UNDELIVERED, completion.action is None))
    return by_rank[0] if by_rank else None


def with_outcome(decision: DecisionBody, completion: CompletionBody | None) -> DecisionBody:
    """Return a pending decision together with its outcome; any other as it is."""
    if not decision.pending or completion is None or completion.leg is None:
        return decision
    before = completion.before or tuple(leg for leg in decision.legs if leg.role == "primary")
    legs = (*before, completion.leg)
    content = decision.content
    if content is not None and completion.content is not None:
        content = replace(content, answer=completion.content.answer)
    return replace(
        decision,
        action=completion.action,
        legs=legs,
        cost=completion.cost,
        content=content,
        no_guarantee=completion.no_guarantee or decision.no_guarantee,
        pending=completion.action is None,
    )


class MenuQuestion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A question with its menu, for an audit to ask again: the context is text or messages, as the query had it.

    `ordered` is that of `Query`.
    """

    context: ContentField[str | Sequence[JSONObject]]
    actions: ContentField[tuple[str, ...]]
    ordered: KeptField[bool] = False


class TextQuestion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chat request, for an audit to send again."""

    request: ContentField[JSONObject]


AuditQuestion = MenuQuestion | TextQuestion


Fields = Mapping[type[Struct], Collection[str]]
"""Names of fields, by the struct that has them."""


def document(struct: Struct, *, shown: Fields | None = None) -> dict[str, object]:
    """Return a struct as plain values, with its fields and those of the structs in it.

    Args:
        shown: the fields to show, in every struct; None for all.
    """
    names = struct.__struct_fields__ if shown is None else shown.get(type(struct), ())
    return {name: _plain_value(value, shown) for name, value in asdict(struct).items() if name in names}


def _plain_value(value: Any, shown: Fields | None) -> object:
    if isinstance(value, Struct):
        return document(value, shown=shown)
    return [_plain_value(item, shown) for item in value] if value.__class__ is tuple else value


ERASED = "erased"
"""What stands in the place of a name, or of words whose presence says something."""


def erased(struct: _StructT) -> _StructT:
    """Return a struct without what its fields mark as content or personal; numbers in the place of words stay."""
    marks = field_marks(type(struct))
    return replace(struct, **{name: _erased_value(struct, name, mark) for name, mark in marks.items()})


def _erased_value(struct: Struct, name: str, marks: Collection[str]) -> object:
    value: Any = getattr(struct, name)
    if "kept" in marks:
        parts = value if value.__class__ is tuple else (value,)
        new = tuple(erased(part) if isinstance(part, Struct) else part for part in parts)
        return new if parts is value else new[0]
    if value is None or isinstance(value, int | float):
        return value
    if "noted" in marks or "personal" in marks:
        return ERASED
    return next(field.default for field in structs.fields(struct) if field.name == name)


# --- Ids ---

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_RANDOM_BITS = 80
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]  # ten bits at a time
_SHIFTS = range(120, -1, -10)


class _Ids:
    """A source of ids, each above the previous one even if the clock stands still or goes back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> str:
        random = int.from_bytes(os.urandom(_RANDOM_BITS // 8))
        candidate = (time.time_ns() // 1_000_000 << _RANDOM_BITS) | random
        with self._lock:
            value = self._last = max(candidate, self._last + 1)
        return "".join([_PAIRS[value >> shift & 1023] for shift in _SHIFTS])


_ids = _Ids()


def new_id() -> str:
    """Return a new id: 48 bits of milliseconds, then 80 random bits; ids of one process only grow."""
    return _ids.next()


def time_of(id: str) -> float:
    """Return when an id was made, in seconds since the epoch."""
    value = 0
    for character in id:
        value = value << 5 | _ALPHABET.index(character)
    return (value >> _RANDOM_BITS) / 1000


def id_at(seconds: float) -> str:
    """Return what sorts after every id made before a time, and before every id made after it, to the millisecond."""
    value = (max(0, int(seconds * 1000)) + 1 << _RANDOM_BITS) - 1
    return "".join([_PAIRS[value >> shift & 1023] for shift in _SHIFTS])


# --- JSON ---

_T = TypeVar("_T")
_sorted = msgspec.json.Encoder(order="sorted")
as_given = msgspec.json.Encoder()
_strict = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False)
_strict_as_given = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def encode(body: EventBody | AuditQuestion, id: str) -> str:
    """Return the JSON text of a body, its keys sorted; those of a question stay in order, since it is sent again as it was.

    Args:
        id: the decision's, for the error message.

    Raises:
        StoreError: a number in it is not finite, or a value has no JSON.
    """
    with suppress(UnicodeEncodeError, TypeError, RecursionError):  # json writes lone surrogates and NumPy floats
        if _is_writable(body):
            return (as_given if isinstance(body, AuditQuestion) else _sorted).encode(body).decode()
    return encode_strictly(
        document(body), f"the {type(body).__name__} of {id}", as_given=isinstance(body, AuditQuestion)
    )


def encode_json(mapping: JSONObject, name: str) -> str:
    """Return the text of a JSON object."""
    with suppress(UnicodeEncodeError, RecursionError):
        if is_plain(mapping):
            return _sorted.encode(mapping).decode()
    return encode_strictly(dict(mapping), name)


def encode_strictly(values: Mapping[str, object], name: str, *, as_given: bool = False) -> str:
    """Return the text of a JSON object with Python's own encoder, which also writes lone surrogates and NumPy floats.

    Raises:
        StoreError: a number in it is not finite, or a value has no JSON.
    """
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
            return _are_finite((body.grade, *grades)) and is_plain(body.grader)
        case AuditBody():
            return _are_finite((body.cost, *(body.scores or ())))
        case AlarmBody():
            return _are_finite((body.mean, body.line, body.log_evidence))
        case LiftBody() | ExclusionBody():
            return True
        case MenuQuestion():
            return is_plain(body.context)
        case TextQuestion():
            return is_plain(body.request)


def _is_finite_leg(leg: Leg) -> bool:
    return isfinite(leg.seconds) and _are_finite((leg.spent.cost, *(leg.scores or ())))


def _are_finite(numbers: Sequence[float | None]) -> bool:
    return all(map(isfinite, filter(None, numbers)))


def _is_plain_content(content: Content | None) -> bool:
    return content is None or all(map(is_plain, (content.context, content.request, content.answer)))


def is_plain(value: Any) -> bool:
    """Return whether a value is what a JSON parser returns, with finite numbers."""
    kind: Any = value.__class__
    if kind is str or kind is int or value is None or kind is bool:
        return True
    if kind is float:
        return isfinite(value)
    if kind is dict:
        return set(map(type, value)) <= {str} and all(map(is_plain, value.values()))
    return (kind is list or kind is tuple) and all(map(is_plain, value))


class _Version(Struct):
    """The one field of a decision's body that every release can read."""

    schema: int = 1


def decode_decision(text: str, id: str) -> DecisionBody:
    """Read the body of a decision.

    Raises:
        StoreError: a newer release wrote it, or it is damaged.
    """
    version = decode(text, _Version, f"decision {id}").schema
    if version > DECISION_SCHEMA:
        raise StoreError(
            f"decision {id} has schema {version}, this release reads up to {DECISION_SCHEMA}; upgrade conformal-arbitrage"
        )
    return decode(text, DecisionBody, f"decision {id}")


_LATER: Mapping[str, type[LaterBody]] = {body.kind: body for body in (CompletionBody, FeedbackBody, AuditBody)}


def decode_later(kind: str, text: str, id: str, at: float) -> LaterBody:
    """Read the body of an event that follows a decision; `at` is when it was recorded."""
    return replace(decode(text, _LATER[kind], f"the {kind} of {id}"), at=at)


_NOTICES: Mapping[str, type[NoticeBody]] = {body.kind: body for body in (AlarmBody, LiftBody, ExclusionBody)}


def decode_notice(kind: str, text: str, policy: str, at: float) -> NoticeBody:
    """Read the body of a notice; `at` is when it was recorded."""
    return replace(decode(text, _NOTICES[kind], f"the {kind} of policy {policy}"), at=at)


def decode_question(text: str, id: str) -> AuditQuestion:
    """Read the question of an audit."""
    name = f"the audit of {id}"
    kind = TextQuestion if "request" in decode_json(text, name) else MenuQuestion
    return decode(text, kind, name)


def decode_json(text: str, name: str) -> dict[str, object]:
    """Read a JSON object."""
    return decode(text, dict[str, object], name)


def decode(text: str, kind: type[_T], name: str) -> _T:
    """Read a value of some type from its JSON text.

    Raises:
        DamagedError: it is no such value; the message has its name.
    """
    with suppress(msgspec.DecodeError, RecursionError):
        return msgspec.json.decode(text, type=kind)
    try:  # json reads lone surrogates
        return msgspec.convert(json.loads(text), kind)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise DamagedError(f"{name} is damaged in the store ({error}); run `arbitrage records verify`") from error
