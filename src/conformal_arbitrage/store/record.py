"""The decision record: what is stored about a decision, as typed bodies.

Everything known about a decision is an event that is appended and never changed: the decision itself, its completion,
feedback, an audit. An event's kind follows from the type of its body.

Knows nothing of databases, HTTP or how decisions are made.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from conformal_arbitrage.types import LearnedUse, Leg

DECISION_SCHEMA = 1
"""The newest schema of `DecisionBody` that this release can read."""

JSONObject = Mapping[str, object]
"""A JSON object that a caller wrote."""

EventKind = Literal["decision", "completion", "feedback", "audit", "alarm", "lift"]


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

    context: str | Sequence[JSONObject] | None = None
    actions: tuple[str, ...] | str | None = None
    request: JSONObject | str | None = None
    primary_answer: str | None = None
    answer: JSONObject | str | None = None
    chain_answers: tuple[str, ...] | str | None = None


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
        version: the policy's version.
        mode: whether the rule was enforced; in "safe" mode the Guardian decided after an alarm, and the candidates are
            those the rule would have had.
        form: menu or free text.
        content: question and answer, if the policy keeps them.
        identities_sha256: fingerprint of the models' identities.
        size: the number of actions.
        overridden: the request changed a pinned setting.
        audited: the decision was drawn for an audit.
        pending: recorded when the Primary had answered and the Guardian had not; a completion with an action, if there
            is one, tells what it chose.
        session: id of the session's first decision, under a policy that decides by session.
        held: decided by the session's first turn, not by this one.
        guarded: how many known losses of the ledger the threshold rested on, under a policy with a guard.
        cancelled: the caller left before there was a decision; all other fields have their defaults.
        learned: how a learned score decided.
        group: what the request named where the policy takes groups from, whatever the certificate has; None if nothing.
    """

    kind: ClassVar[EventKind] = "decision"

    schema: int = 1
    action: int | None = None
    candidates: tuple[int, ...] = ()
    margin: float | None = None
    relaxation: float | None = None
    no_guarantee: str | None = None
    legs: tuple[Leg, ...] = ()
    cost: float | None = None
    alpha: float | None = None
    version: int | None = None
    mode: Literal["enforce", "shadow", "safe"] | None = None
    form: Literal["menu", "text"] | None = None
    content: Content | None = None
    identities_sha256: str | None = None
    size: int = 0
    overridden: bool = False
    audited: bool = False
    pending: bool = False
    session: str | None = None
    held: bool = False
    guarded: int | None = None
    cancelled: bool = False
    learned: LearnedUse | None = None
    group: str | None = None


class ReviewVote(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One person's vote on a question.

    Attributes:
        reviewer: who voted.
        choice: index of the action in the whole menu; of two answers, the grades of the Primary's and the Guardian's.
        held: seconds that they had the question before them.
        level: 1 if they voted as a lead, after a panel without a verdict.
        late: it came after the question had been decided otherwise, and changed nothing.
    """

    reviewer: str
    choice: int | tuple[float, float]
    held: float
    level: int = 0
    late: bool = False


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

    item: str
    protocol: str
    rule: str
    votes: tuple[ReviewVote, ...] = ()
    level: int = 0
    withdrawn: int = 0


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

    finish: str
    leg: Leg | None = None
    before: tuple[Leg, ...] = ()
    action: int | None = None
    decided_by: str | None = None
    no_guarantee: str | None = None
    cost: float | None = None
    content: Content | None = None
    review: ReviewFacts | None = None
    at: float | None = None


class Grades(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Grades of both answers, in [0, 1]; `chain` are those of every model that a cascade asked before the Guardian."""

    primary: float
    guardian: float
    chain: tuple[float, ...] = ()

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
        label: the right action.
        comment: anything else.
        by: the key that sent it.
        grader: the identity of what made the grades, if a grader of this package did.
        review: how people came to the grades, if they were asked through the review queue; without grades, why there are
            none.
        at: when it was recorded; set by the store.
    """

    kind: ClassVar[EventKind] = "feedback"

    grade: float | None = None
    grades: Grades | None = None
    reason: str | None = None
    label: int | str | None = None
    comment: str | None = None
    by: str | None = None
    grader: JSONObject | None = None
    review: ReviewFacts | None = None
    at: float | None = None


class AuditBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The Guardian's view of a decision that was drawn for an audit.

    Attributes:
        scores: over the whole menu; None if it failed or answered in free text.
        error: what went wrong, if anything.
        cost: dollars; None if unknown.
        served: the model that answered, as the endpoint names it.
        answer: its text, if the policy keeps content in full.
        identities_sha256: fingerprint of the identities of the models that the policy had when it answered.
        review: how people chose, if they did.
        at: when it was recorded; set by the store.
    """

    kind: ClassVar[EventKind] = "audit"

    scores: tuple[float, ...] | None = None
    error: str | None = None
    cost: float | None = None
    served: str | None = None
    answer: str | None = None
    identities_sha256: str | None = None
    review: ReviewFacts | None = None
    at: float | None = None


class AlarmBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The loss of a policy's version is above its red line; it stands until it is lifted, and is never taken back.

    Attributes:
        version: the policy's.
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

    version: int
    lifts: int
    identities_sha256: str
    cause: str
    audits: int
    known: int
    missing: int
    line: float
    log_evidence: float
    mean: float | None = None
    group: str | None = None
    at: float | None = None


class LiftBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Someone lifted an alarm without a new certificate, which voids the promise of the one in force.

    Attributes:
        version: the policy's.
        lifts: how often alarms of this version have been lifted, this time included.
        reason: why, in their words.
        by: the key they used, or "command line".
        at: when it was recorded; set by the store.
    """

    kind: ClassVar[EventKind] = "lift"

    version: int
    lifts: int
    reason: str
    by: str
    at: float | None = None


LaterBody = CompletionBody | FeedbackBody | AuditBody
NoticeBody = AlarmBody | LiftBody
EventBody = DecisionBody | LaterBody | NoticeBody


class Event(Struct, frozen=True, kw_only=True):
    """One fact about a decision, or about a policy: an alarm or its lift.

    Attributes:
        id: the decision's id, time-ordered; of an alarm or a lift, its name.
        body: the fact itself.
        policy: of a decision: whose rule; of an alarm or a lift: the policy.
        key_id: of a decision: whose call.
        decided_by: of a decision: who chose.
    """

    id: str
    body: EventBody
    policy: str | None = None
    key_id: str | None = None
    decided_by: str | None = None


class DecisionRecord(Struct, frozen=True, kw_only=True):
    """A decision and everything recorded about it later.

    Only one completion counts, the first that delivered an answer, else the first; and only the first audit. A decision
    that was recorded as pending includes what that completion says.
    """

    id: str
    created: float
    policy: str
    key_id: str | None
    decided_by: str
    decision: DecisionBody
    completion: CompletionBody | None = None
    feedback: tuple[FeedbackBody, ...] = ()
    audit: AuditBody | None = None


UNDELIVERED = frozenset({"cancelled", "failed", "limited", "waiting"})
"""How an attempt finishes that delivered nothing, or not everything."""


def completion_of_record(completions: Sequence[CompletionBody]) -> CompletionBody | None:
    """Return the completion that counts: the first that delivered an answer, else the first with one, else the first."""
    by_rank = sorted(completions, key=lambda one: (one.finish in UNDELIVERED, one.action is None))
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

    context: str | Sequence[JSONObject]
    actions: tuple[str, ...]
    ordered: bool = False


class TextQuestion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chat request, for an audit to send again."""

    request: JSONObject


AuditQuestion = MenuQuestion | TextQuestion


def document(struct: Struct, *, without: Mapping[type[Struct], frozenset[str]] | None = None) -> dict[str, object]:
    """Return a struct as plain values, with all of its fields and those of the structs in it.

    Args:
        struct: a record, or a part of one.
        without: names of fields to leave out, by the struct that has them.
    """
    hidden: frozenset[str] = frozenset() if without is None else without.get(type(struct), frozenset())
    return {name: _plain_value(value, without) for name, value in asdict(struct).items() if name not in hidden}


def _plain_value(value: Any, without: Mapping[type[Struct], frozenset[str]] | None) -> object:
    if isinstance(value, Struct):
        return document(value, without=without)
    return [_plain_value(one, without) for one in value] if value.__class__ is tuple else value
