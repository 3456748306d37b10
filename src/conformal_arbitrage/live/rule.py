"""The rule: ask the Primary, let its choice stand if it leads far enough, else ask the Guardian; pairs and cascades."""

import random
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from msgspec.structs import replace

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.promises import Learned, Threshold
from conformal_arbitrage.core.exact import LARGEST_SCORE, row_gaps, row_margin
from conformal_arbitrage.errors import (
    GuardianError,
    OptionError,
    ScorerError,
    UpstreamError,
)
from conformal_arbitrage.live.binding import check_cascade, check_identities, check_router_form
from conformal_arbitrage.models.chat import answer_text
from conformal_arbitrage.models.completions import settings_reason
from conformal_arbitrage.models.port import (
    Answer,
    Answerer,
    Identity,
    Scorer,
    Scores,
    check_scores,
    spent_of,
    stream_answer,
)
from conformal_arbitrage.types import ChatRequest, Chunk, Decision, Failure, LearnedUse, Leg, Query, Role, Spent

MARGIN_DIGITS = 12
_NO_SAFE_ACTION = "set safe_action to continue without it"
_NO_SAFE_ANSWER = "set safe_answer to continue without it"
_Question = TypeVar("_Question", contravariant=True)
_Model = TypeVar("_Model", Scorer, Answerer)


class Policy(Protocol[_Question]):
    """Anything that decides."""

    async def decide(self, query: _Question, /) -> Decision:
        """Make one decision; each model is called at most once."""
        ...


@dataclass(slots=True, kw_only=True)
class ConformalArbitrage:
    """The calibrated policy over menus.

    Attributes:
        primary: whose choice stands if it leads by more than the relaxation.
        guardian: who decides otherwise, over the actions that the certificate's guardian_sees allows.
        certificate: the certificate, with its key if it has one.
        safe_action: the text of the action to take if the Guardian fails; without one that is an error.
        allow: names of tolerated differences between the certificate's identities and these models, such as
            "primary.temperature", or "unbound"; every decision then reports that it has no guarantee.
        forfeited: why no decision has a guarantee, whatever the models; None if nothing else stands against one.
        group_source: what names the group of a query, if a learned score needs it; None if that has no name.

    Raises:
        StaleCalibrationError: the certificate was made with other models, and that is not allowed.
    """

    primary: Scorer
    guardian: Scorer
    certificate: Certificate
    safe_action: str | None = None
    allow: Collection[str] = ()
    forfeited: str | None = None
    group_source: str | None = None
    no_guarantee: str | None = field(init=False)
    """Why no decision has a guarantee, whatever the request; None if nothing stands against one."""
    _sizes: range = field(init=False)

    def __post_init__(self) -> None:
        """Check the certificate against the models."""
        source = self.group_source
        reason = check_identities(self.certificate, self.primary, self.guardian, self.allow, group_source=source)
        self.no_guarantee = self.forfeited or reason
        self._sizes = self.certificate.sizes

    async def decide(self, query: Query) -> Decision:
        """Decide who chooses, and choose.

        Raises:
            GuardianError: the Guardian was to decide and could not, and there is no safe action.
        """
        query = _checked_query(query)
        return await _decided(self.steps(query), self._remedy(query))

    async def steps(self, query: Query, pending: Decision | None = None) -> AsyncGenerator[Decision]:
        """Yield the decision once the Primary has chosen and, if the Guardian must complete it, the final one.

        A final decision without an answer is one whose Guardian failed, with no safe action to take.

        Args:
            query: the question, with its id and its whole menu.
            pending: what the Primary's choice led to at an earlier attempt; the Primary is not asked again.
        """
        if pending is None:
            pending = await self._ask_primary(query)
            yield pending
        if pending.answer is None:
            shown = self.menu(query, pending)
            yield with_choice(pending, query, await scored("guardian", self.guardian, shown), self.safe_action, shown)

    def menu(self, query: Query, pending: Decision) -> Query:
        """Return what the Guardian is shown of a query that is deferred."""
        shown = pending.candidates if self.certificate.guardian_sees == "candidates" else query.actions
        return query if len(shown) == len(query.actions) else query.only(pending.candidates)

    async def _ask_primary(self, query: Query) -> Decision:
        """Return the Primary's decision, or the one that the Guardian has to complete."""
        if len(query.actions) == 1:  # nothing to ask
            legs, scores, spent = (), (1.0,), Spent()
        else:
            first = await scored("primary", self.primary, query)
            legs, scores, spent = (first,), first.scores or (None,) * len(query.actions), first.spent
        candidates, margin, relaxation, use, uncovered = sighted(self.certificate, scores, query, spent)
        chosen = candidates[0] if len(candidates) == 1 else None
        return Decision(
            id=query.id,
            action=chosen,
            candidates=tuple(candidates),
            decided_by="guardian" if chosen is None else "primary",
            margin=margin,
            relaxation=relaxation,
            answer=None if chosen is None else query.actions[chosen],
            legs=legs,
            spent=spent,
            no_guarantee=self.no_guarantee or self._outside(len(query.actions)) or uncovered,
            learned=use,
        )

    def _outside(self, size: int) -> str | None:
        return None if size in self._sizes else self.certificate.outside(size)

    def _remedy(self, query: Query) -> str:
        if self.safe_action is None:
            return _NO_SAFE_ACTION
        return f"the safe action {self.safe_action!r} is not one of the actions of query {query.id}"


@dataclass(slots=True, kw_only=True)
class ConformalRouter:
    """The calibrated policy over free text and tool calls: actions are (Guardian's answer, Primary's answer).

    Attributes:
        primary: whose answer stands exactly if its confidence is above the relaxation.
        guardian: who answers otherwise.
        certificate: a certificate made from a log in router form.
        safe_answer: the answer to give if the Guardian fails; without one that is an error.
        allow, forfeited, group_source: as in `ConformalArbitrage`.
        session_idle: seconds after which a session ends, if the certificate is for sessions: whoever calls `decide` then
            has to keep the decision of the first turn for all others. None if it is for single queries.

    Raises:
        CertificateError: the certificate was made from menus, whose relaxation is not a threshold on a confidence, or
            for sessions while this is for queries, or the other way round.
        StaleCalibrationError: as in `ConformalArbitrage`.
    """

    primary: Answerer
    guardian: Answerer
    certificate: Certificate
    safe_answer: str | None = None
    allow: Collection[str] = ()
    forfeited: str | None = None
    session_idle: float | None = None
    group_source: str | None = None
    no_guarantee: str | None = field(init=False)
    """As in `ConformalArbitrage`."""
    _identities: Mapping[str, Identity] = field(init=False)

    def __post_init__(self) -> None:
        """Check the certificate's form and unit, and the certificate against the models."""
        check_router_form(self.certificate, by_session=self.session_idle is not None)
        reason = check_identities(
            self.certificate, self.primary, self.guardian, self.allow,
            session_idle=self.session_idle, group_source=self.group_source,
        )  # fmt: skip
        self.no_guarantee = self.forfeited or reason
        self._identities = {"primary": self.primary.identity, "guardian": self.guardian.identity}

    async def decide(self, request: ChatRequest) -> Decision:
        """Decide whose answer is given.

        Raises:
            GuardianError: the Guardian was to answer and could not, and there is no safe answer.
        """
        return await _decided(self.steps(_identified(request)), _NO_SAFE_ANSWER)

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Decision | Chunk]:
        """Decide whose answer is given, and yield the Guardian's as it arrives.

        If the Primary's answer stands, or the safe answer is given, yields the final decision alone. Otherwise yields
        the pending decision (by the Guardian, without an answer, with the Primary's leg only), the Guardian's chunks,
        and the final decision. A Guardian that fails after its first chunk leads to the safe answer all the same: the
        caller sees the error in its leg.

        Raises:
            GuardianError: the Guardian failed, perhaps after some chunks, and there is no safe answer.
        """
        held: Decision | None = None
        async with aclosing(self.steps(_identified(request), live=True)) as steps:
            async for step in steps:
                if isinstance(step, Decision) and step.answer is None:
                    if step.legs[-1].role == "guardian":
                        raise guardian_failure(step.legs[-1], _NO_SAFE_ANSWER)
                    held = step  # until the Guardian's first word
                    continue
                if held is not None and not (isinstance(step, Decision) and step.decided_by == "fallback"):
                    yield held
                held = None
                yield step

    async def steps(
        self, request: ChatRequest, pending: Decision | None = None, *, live: bool = False
    ) -> AsyncGenerator[Decision | Chunk]:
        """Yield the decision once the Primary has answered and, if the Guardian must complete it, the final one.

        A final decision without an answer is one whose Guardian failed, with no safe answer to give.

        Args:
            pending: what the Primary's answer led to at an earlier attempt; the Primary is not asked again.
            live: yield the Guardian's chunks as they arrive, before the final decision.
        """
        if pending is None:
            pending = await self._ask_primary(request)
            yield pending
        if pending.answer is not None:
            return
        async with aclosing(_guardian_steps(self.guardian, request, pending, self.safe_answer, live=live)) as steps:
            async for step in steps:
                yield step

    async def _ask_primary(self, request: ChatRequest) -> Decision:
        """Return the Primary's decision, or the one that the Guardian has to complete."""
        first, answer = await answered("primary", self.primary, request)
        confidence = 0.0 if answer is None or answer.confidence is None else answer.confidence
        candidates, margin, relaxation, use, uncovered = sighted(
            self.certificate, (0.0, confidence), request, first.spent, answer
        )
        standing = answer.message if candidates == [1] and answer is not None else None
        return Decision(
            id=request.id,
            action=0 if standing is None else 1,
            candidates=tuple(candidates),
            decided_by="guardian" if standing is None else "primary",
            margin=margin,
            relaxation=relaxation,
            answer=standing,
            legs=(first,),
            spent=first.spent,
            no_guarantee=self.no_guarantee or self.other_settings(request) or uncovered,
            learned=use,
        )

    def other_settings(self, request: ChatRequest) -> str | None:
        """Return why a request has no guarantee whose settings are not the pinned ones, or not those of the log."""
        return settings_reason(request.body, self._identities, self.certificate.identities)


@dataclass(slots=True, kw_only=True)
class _Cascade(Generic[_Model]):
    """What cascades over text and over menus share.

    Attributes:
        models: the cheap models by name; those of the certificate's chain are asked, in its order.
        guardian: who decides if none of them may.
        certificate: the certificate of the cascade, with its key.
        guardian_name: what the certificate calls the Guardian.
        fallback: the answer to give, or the text of the action to take, if the Guardian fails; without one that is an error.
        allow, forfeited: as in `ConformalArbitrage`.

    Raises:
        CertificateError: the certificate's chain has a model that is not among `models`.
        StaleCalibrationError: the certificate was made with other models, and that is not allowed.
    """

    models: Mapping[str, _Model]
    guardian: _Model
    certificate: Certificate
    guardian_name: str = "guardian"
    fallback: str | None = None
    allow: Collection[str] = ()
    forfeited: str | None = None
    no_guarantee: str | None = field(init=False)
    """As in `ConformalArbitrage`."""

    def __post_init__(self) -> None:
        """Check the certificate against the models."""
        reason = check_cascade(self.certificate, self.models, self.guardian, self.guardian_name, self.allow)
        self.no_guarantee = self.forfeited or reason


@dataclass(slots=True, kw_only=True)
class CascadeRouter(_Cascade[Answerer]):
    """The calibrated cascade over free text and tool calls."""

    async def decide(self, request: ChatRequest) -> Decision:
        """Decide whose answer is given."""
        return await _decided(self.steps(_identified(request)), _NO_SAFE_ANSWER)

    async def steps(
        self, request: ChatRequest, pending: Decision | None = None, *, live: bool = False
    ) -> AsyncGenerator[Decision | Chunk]:
        """Yield the decision so far after each model, and the final one if the Guardian must complete it.

        Args:
            pending: what an earlier attempt came to. No model is asked again: what the later ones of its chain might have
                said is left out, and the Guardian answers.
            live: yield the Guardian's chunks as they arrive, before the final decision.
        """
        if pending is None:
            pending, (_, following) = self._pending(request, (), None), self._after(request, ())
            while pending.answer is None and following in self.models:
                leg, answer = await answered("primary", self.models[following], request)
                legs = (*pending.legs, leg)
                asked, following = self._after(request, legs)
                pending = self._pending(request, legs, answer if following == asked[-1] else None)
                yield pending
            if not pending.legs:
                yield pending
        if pending.answer is not None:
            return
        async with aclosing(_guardian_steps(self.guardian, request, pending, self.fallback, live=live)) as steps:
            async for step in steps:
                yield step

    def _after(self, request: ChatRequest, legs: Sequence[Leg]) -> tuple[list[str], str]:
        return self.certificate.next_model(*chain_replies(legs), id=str(request.id))

    def _pending(self, request: ChatRequest, legs: Sequence[Leg], answer: Answer | None) -> Decision:
        """Return the decision so far: an answer stands, or the decision is pending."""
        reason = self.no_guarantee or self._other_settings(request)
        return _pending(request.id, legs, chain_replies(legs)[0], None if answer is None else answer.message, reason)

    def _other_settings(self, request: ChatRequest) -> str | None:
        """Return why a request has no guarantee whose settings are not the pinned ones, or not those of the log."""
        chain = {name: self.models[name].identity for name in self.certificate.path.chain.models}
        identities = {**chain, self.guardian_name: self.guardian.identity}
        return settings_reason(request.body, identities, self.certificate.identities)


@dataclass(slots=True, kw_only=True)
class CascadeChooser(_Cascade[Scorer]):
    """The calibrated cascade over menus."""

    async def decide(self, query: Query) -> Decision:
        """Decide who chooses, and choose."""
        return await _decided(self.steps(_checked_query(query)), _NO_SAFE_ACTION)

    async def steps(self, query: Query, pending: Decision | None = None) -> AsyncGenerator[Decision]:
        """Yield the decision so far after each model, and the final one if the Guardian must complete it.

        Args:
            query: the question, with its id.
            pending: what an earlier attempt came to; it goes on with the first model of the chain that has not answered.
        """
        legs = () if pending is None else tuple(leg for leg in pending.legs if leg.role == "primary")
        step, following = self._after(query, legs)
        new = pending is None or pending.answer is None is not step.answer
        while step.answer is None and following in self.models:
            legs, new = (*legs, await scored("primary", self.models[following], query)), True
            step, following = self._after(query, legs)
            if step.answer is None and following in self.models:
                yield step
        if new:
            yield step
        if step.answer is None:
            yield with_choice(step, query, await scored("guardian", self.guardian, query), self.fallback)

    def _after(self, query: Query, legs: Sequence[Leg]) -> tuple[Decision, str]:
        """Return the decision so far, in which the last choice stands or is pending, and whom to ask next."""
        margins, choices = chain_replies(legs, query.actions)
        asked, following = self.certificate.next_model(margins, choices, id=str(query.id))
        pending = _pending(query.id, legs, margins, None, self.no_guarantee)
        choice = choices[-1] if legs else None
        if choice is None or following != asked[-1]:
            return replace(pending, action=None, candidates=tuple(range(len(query.actions)))), following
        last = top_of(legs[-1].scores or ())
        return replace(pending, action=last, candidates=(last,), decided_by="primary", answer=choice), following


CascadeRule = CascadeRouter | CascadeChooser


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleModel:
    """A baseline: one model decides everything."""

    scorer: Scorer
    role: Role

    async def decide(self, query: Query) -> Decision:
        """Take the model's top action.

        Raises:
            GuardianError: the model could not decide.
        """
        leg = await scored(self.role, self.scorer, query)
        if leg.scores is None:
            raise guardian_failure(leg)
        chosen = top_of(leg.scores)
        return Decision(
            id=query.id,
            action=chosen,
            candidates=tuple(range(len(query.actions))),
            decided_by=self.role,
            margin=margin_of(leg.scores, 12),
            answer=query.actions[chosen],
            legs=(leg,),
            spent=leg.spent,
            no_guarantee="a single model decides",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRouter:
    """A baseline: send a random share of queries to the Guardian, and the rest to the Primary.

    Attributes:
        probability: the share that goes to the Guardian.
    """

    primary: Scorer
    guardian: Scorer
    probability: float
    rng: random.Random = field(default_factory=random.Random)

    async def decide(self, query: Query) -> Decision:
        """Take the Guardian's choice with the given probability, else the Primary's."""
        deferred = self.rng.random() < self.probability
        role: Literal["guardian", "primary"] = "guardian" if deferred else "primary"
        return await SingleModel(scorer=self.guardian if deferred else self.primary, role=role).decide(query)


class Answered(NamedTuple):
    """A model's part in a decision over free text, and its answer; None if it failed."""

    leg: Leg
    answer: Answer | None


async def scored(role: Role, scorer: Scorer, query: Query) -> Leg:
    """Ask a model for scores; a failure is part of the leg."""
    start = time.perf_counter()
    try:
        scores = await scorer.score(query)
        if not _are_finite(scores.values, len(query.actions)):  # from a scorer of the user's own
            scores = check_scores(scores, len(query.actions))
    except ScorerError as error:
        return leg_of(role, error, start)
    return leg_of(role, scores, start)


async def answered(role: Role, answerer: Answerer, request: ChatRequest) -> Answered:
    """Ask a model for an answer; a failure is part of the leg."""
    start = time.perf_counter()
    try:
        answer = await answerer.answer(request)
    except ScorerError as error:
        return Answered(leg_of(role, error, start), None)
    return Answered(leg_of(role, answer, start), answer)


async def stream_answered(role: Role, answerer: Answerer, request: ChatRequest) -> AsyncGenerator[Chunk | Answered]:
    """Ask a model for an answer and yield its chunks; a failure, perhaps after some chunks, is part of the leg."""
    start = time.perf_counter()
    try:
        async with aclosing(stream_answer(answerer, request)) as items:
            async for item in items:
                yield Answered(leg_of(role, item, start), item) if isinstance(item, Answer) else item
    except ScorerError as error:
        yield Answered(leg_of(role, error, start), None)


async def _guardian_steps(
    guardian: Answerer, request: ChatRequest, pending: Decision, safe_answer: str | None, *, live: bool
) -> AsyncGenerator[Decision | Chunk]:
    """Yield the final decision of a request in free text, after the Guardian's chunks if they are passed on live."""
    if not live:
        yield with_answer(pending, await answered("guardian", guardian, request), safe_answer)
        return
    async with aclosing(stream_answered("guardian", guardian, request)) as items:
        async for item in items:
            yield with_answer(pending, item, safe_answer) if isinstance(item, Answered) else item


async def _decided(steps: AsyncGenerator[Decision] | AsyncGenerator[Decision | Chunk], remedy: str) -> Decision:
    """Return the last decision of a rule's steps."""
    decision: Decision | None = None
    async for step in steps:
        decision = step if isinstance(step, Decision) else decision
    if decision is None:
        raise AssertionError("a rule asks at least one model")
    if decision.answer is None:
        raise guardian_failure(decision.legs[-1], remedy)
    return decision


def leg_of(role: Role, outcome: Scores | Answer | ScorerError, start: float) -> Leg:
    """Return a model's part in a decision from its reply or its failure, and from when it was asked."""
    seconds = time.perf_counter() - start
    if isinstance(outcome, ScorerError):
        failure = Failure(type(outcome).__name__, str(outcome))
        if isinstance(outcome, UpstreamError):
            failure = replace(failure, status=outcome.status, said=outcome.said, code=outcome.code)
        return Leg(role=role, scores=None, spent=spent_of(outcome), seconds=seconds, error=failure)
    reply = None
    if isinstance(outcome, Scores):
        scores = outcome.values
    else:
        scores = None if outcome.confidence is None else (float(outcome.confidence),)  # NumPy's numbers are not JSON
        reply = outcome.document or {"choices": [{"message": outcome.message}]}
    return Leg(role=role, scores=scores, spent=outcome.spent, seconds=seconds, served=outcome.served, reply=reply)


def with_leg(pending: Decision, leg: Leg) -> Decision:
    """Return a pending decision with one more leg."""
    return replace(pending, legs=(*pending.legs, leg), spent=pending.spent + leg.spent)


def with_answer(pending: Decision, guardian: Answered, safe_answer: str | None) -> Decision:
    """Complete a pending decision with the Guardian's answer; if it failed, with the safe answer, or with none."""
    both = with_leg(pending, guardian.leg)
    if guardian.answer is not None:
        return replace(both, answer=guardian.answer.message)
    if safe_answer is None:
        return both
    message = {"role": "assistant", "content": safe_answer}
    reason = both.no_guarantee or "the Guardian failed and the safe answer was given in its place"
    return replace(both, answer=message, decided_by="fallback", no_guarantee=reason)


def with_choice(
    pending: Decision, query: Query, guardian: Leg, safe_action: str | None, shown: Query | None = None
) -> Decision:
    """Complete a pending decision with the Guardian's choice; if it failed, with the safe action, or with none.

    Args:
        query: the question with its whole menu.
        safe_action: the text of the action to take if it failed.
        shown: the question as the Guardian was shown it, if that was only a part of the menu.
    """
    both = with_leg(pending, guardian)
    if guardian.scores is None:
        return _with_safe_action(both, query, safe_action)
    top = top_of(guardian.scores)
    chosen = top if shown is None or shown.places is None else shown.places[top]
    return replace(both, action=chosen, answer=query.actions[chosen])


def _with_safe_action(decision: Decision, query: Query, safe_action: str | None) -> Decision:
    """Return a decision whose Guardian failed with the safe action, or as it is if there is none."""
    if safe_action is None or safe_action not in query.actions:
        return decision
    chosen = query.actions.index(safe_action)
    reason = decision.no_guarantee or "the Guardian failed and the safe action was taken in its place"
    return replace(decision, action=chosen, answer=safe_action, decided_by="fallback", no_guarantee=reason)


def _are_finite(scores: tuple[float, ...], count: int) -> bool:
    """Tell whether scores need no further check: a tuple of `count` floats in range."""
    if type(scores) is not tuple or len(scores) != count:
        return False
    return all(type(score) is float and -LARGEST_SCORE <= score <= LARGEST_SCORE for score in scores)


_FAILURES = {
    "DeadlineError": ("timed out", True),
    "UpstreamError": ("could not be reached, or refused the call", True),
    "ReplyError": ("sent a reply that cannot be used", True),
    "OtherModelError": ("answered as another model than the pinned one", False),
    "CutOffError": ("ran out of tokens before it answered", False),
    "RefusalError": ("declined to answer", False),
    "NotRecordedError": ("replays recorded rows and has none with this id and these actions", False),
}


_REQUEST_REFUSED = frozenset({400, 413, 422})
"""Statuses that speak of the request itself: it will be refused again, and only its sender can change it."""
_PERMANENT = frozenset({*_REQUEST_REFUSED, 401, 403, 404, 405})


def guardian_failure(leg: Leg, remedy: str | None = None, *, passed_on: bool = False) -> GuardianError:
    """Return the error for a decision that could not be made because a model failed.

    Args:
        remedy: what else could be done.
        passed_on: whether the model got the caller's own request, so that what it says about that is for the caller.
    """
    failure = leg.error or Failure("")
    reason, retryable = _FAILURES.get(failure.kind, ("failed", True))
    ending = "" if remedy is None else f"; {remedy}"
    message, logged = (
        f"the {leg.role.capitalize()} {reason} ({shown}){ending}" for shown in (leg.error, replace(failure, message=""))
    )
    if passed_on and failure.status in _REQUEST_REFUSED and failure.said:
        return GuardianError(
            message, reason=reason, logged=logged, retryable=False, status=failure.status, said=failure.said,
            code=failure.code,
        )  # fmt: skip
    retryable = retryable and failure.status not in _PERMANENT
    return GuardianError(message, reason=reason, logged=logged, retryable=retryable)


def _identified(request: ChatRequest) -> ChatRequest:
    return request if request.id else replace(request, id=secrets.token_hex(16))


def _checked_query(query: Query) -> Query:
    """Return a query with an id and a whole menu."""
    if not query.actions:
        raise OptionError("a query needs at least one action")
    if query.id and query.places is None:
        return query
    return replace(query, actions=tuple(query.actions), id=query.id or secrets.token_hex(16), places=None)


class Sighted(NamedTuple):
    """What the rule makes of the Primary's scores.

    `relaxation` is the one that was applied: of a certificate by groups, that of the query's group; None if it is deferred.
    `use` says how a learned score decided, and `uncovered` why it has no guarantee for this query; None without one.
    """

    candidates: list[int]
    margin: float
    relaxation: float | None
    use: LearnedUse | None = None
    uncovered: str | None = None


def sighted(
    certificate: Certificate,
    scores: Collection[float | None],
    question: Query | ChatRequest,
    spent: Spent,
    answer: Answer | None = None,
) -> Sighted:
    """Apply a certificate's rule to the Primary's scores; of one by groups, the threshold of the question's group.

    A learned score takes the Primary's output tokens from what its call took; a reply from a cache took none, so that
    its tokens are unknown. The answer to free text is passed; to a menu it is the top action.
    """
    id, group, rule = question.id, question.group, certificate.rule
    actions = question.actions if isinstance(question, Query) else None
    if not isinstance(rule, Learned) or rule.terms is None:
        relaxation = rule.relaxation if isinstance(rule, Threshold) else certificate.threshold(group)[0]
        text = question.text if certificate.evidence.draws == "text" else None
        candidates, margin, _ = certificate.sight(scores, id=id, group=group, text=text, actions=actions)
        return Sighted(candidates, margin, relaxation)
    tokens = spent.output_tokens if spent.calls else None
    text = question.text if "text" in rule.terms.features else None
    candidates, margin, use = certificate.sight(
        scores, id=id, group=group, tokens=tokens, text=text, actions=actions, answer=said_text(answer)
    )
    return Sighted(candidates, margin, None, use, certificate.uncovered_features(use))


def top_of(scores: tuple[float, ...]) -> int:
    """Return the best action, the first among equals."""
    return int(np.argmax(scores))


def margin_of(scores: Collection[float | None], digits: int) -> float:
    """Return how far the top action leads: the second smallest gap."""
    return row_margin(row_gaps(tuple(scores), digits=digits))


def top_choice(scores: Collection[float] | None) -> tuple[float | None, int | None]:
    """Return how far the top action leads, at most by 1, and which it is; None and None without scores or with a tie."""
    if scores is None:
        return None, None
    margin = min(1.0, margin_of(scores, MARGIN_DIGITS))
    return (None, None) if margin == 0 else (margin, top_of(tuple(scores)))


def chain_replies(
    legs: Sequence[Leg], actions: Sequence[str] | None = None
) -> tuple[list[float | None], list[str | None]]:
    """Return how sure the models of a cascade are, at most 1, and what they said; None where one failed or said nothing."""
    if actions is not None:
        chosen = [top_choice(leg.scores) for leg in legs]
        return [margin for margin, _ in chosen], [None if top is None else actions[top] for _, top in chosen]
    texts = [None if leg.reply is None else _text_or_none(leg.reply["choices"][0]["message"]) for leg in legs]
    return [None if leg.scores is None else min(1.0, leg.scores[0]) for leg in legs], texts


def said_text(answer: Answer | None) -> str | None:
    """Return the text of an answer; None if there is no answer, or it has none."""
    return None if answer is None else _text_or_none(answer.message)


def _text_or_none(message: Mapping[str, Any]) -> str | None:
    try:
        return answer_text(message)
    except ScorerError:
        return None


def _pending(
    id: str | None,
    legs: Sequence[Leg],
    confidences: Sequence[float | None],
    standing: Mapping[str, Any] | None,
    no_guarantee: str | None,
) -> Decision:
    """Return a decision in router form after the chain's part: its last answer stands, or the Guardian completes it."""
    return Decision(
        id=id,
        action=0 if standing is None else 1,
        candidates=(0, 1) if standing is None else (1,),
        decided_by="guardian" if standing is None else "primary",
        margin=(confidences[-1] if confidences else None) or 0.0,
        answer=standing,
        legs=tuple(legs),
        spent=sum((leg.spent for leg in legs), start=Spent()),
        no_guarantee=no_guarantee,
    )
