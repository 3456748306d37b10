"""Algorithm 1 live: ask the Primary, let its choice stand if it leads far enough, else ask the Guardian.

What happens when a model fails is decided here and nowhere else. A Primary that fails has no opinion, so the Guardian
decides over everything. A Guardian that fails leaves an error, or the safe action the user configured; never the
Primary's choice.

Knows nothing of configuration files or HTTP.
"""

import random
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.core.gaps import row_gaps, row_margin
from conformal_arbitrage.errors import GuardianError, OptionError, ScorerError, StaleCalibrationError
from conformal_arbitrage.scorers.base import Answer, Answerer, Identity, Scorer, checked_scores
from conformal_arbitrage.types import ChatRequest, Decision, Leg, Query, Role, Sink, Spent
from conformal_arbitrage.upstream.base import spent_of

Asked = TypeVar("Asked", contravariant=True)
UNBOUND = "unbound"
_NOT_ASKED = Leg(role="primary", scores=(1.0,), spent=Spent(), seconds=0.0)  # a menu of one needs no opinion


class Policy(Protocol[Asked]):
    """Anything that decides."""

    async def decide(self, query: Asked) -> Decision:
        """One decision; each model is asked at most once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformalArbitrage:
    """The calibrated policy over menus.

    Attributes:
        primary: whose choice stands if it leads by more than the relaxation.
        guardian: who decides otherwise, over what the certificate's guardian_sees says.
        certificate: the certificate, with its key if it has one.
        safe_action: the text of the action to take if the Guardian fails; without one that is an error.
        allow: names of differences between the certificate's identities and these models that are put up with, such as
            "primary.temperature", or "unbound"; every decision then says that it has no guarantee.

    Raises:
        StaleCalibrationError: the certificate was made with other models, and that is not allowed.
    """

    primary: Scorer
    guardian: Scorer
    certificate: Certificate
    safe_action: str | None = None
    allow: Collection[str] = ()
    _no_guarantee: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Bind the certificate to the models."""
        object.__setattr__(self, "_no_guarantee", _bound(self.certificate, self.primary, self.guardian, self.allow))

    async def decide(self, query: Query) -> Decision:
        """Who decides, what, and why.

        Raises:
            GuardianError: the Guardian was to decide and could not, and there is no safe action.
        """
        name = query.id or secrets.token_hex(16)
        query = Query(query.context, _checked_menu(query.actions), id=name)
        first = await scored("primary", self.primary, query) if len(query.actions) > 1 else _NOT_ASKED
        scores = first.scores or (None,) * len(query.actions)
        candidates, margin = self.certificate.sight(scores, id=name)
        made: dict[str, Any] = {
            "id": name,
            "candidates": tuple(candidates),
            "margin": margin,
            "relaxation": self.certificate.relaxation,
            "no_guarantee": self._no_guarantee,
        }
        if len(candidates) == 1:
            chosen = candidates[0]
            legs = () if first is _NOT_ASKED else (first,)
            return Decision(action=chosen, answer=query.actions[chosen], decided_by="primary", legs=legs, **made)
        shown = candidates if self.certificate.guardian_sees == "candidates" else range(len(query.actions))
        second = await scored("guardian", self.guardian, query if len(shown) == len(scores) else query.only(shown))
        legs = (first, second)
        if second.scores is None:
            return self._without_guardian(query, legs, made)
        chosen = shown[top_of(second.scores)]
        return Decision(action=chosen, answer=query.actions[chosen], decided_by="guardian", legs=legs, **made)

    def _without_guardian(self, query: Query, legs: tuple[Leg, Leg], made: Mapping[str, Any]) -> Decision:
        if self.safe_action is None:
            raise GuardianError(f"the Guardian could not decide: {legs[1].error}; set safe_action to go on without it")
        if self.safe_action not in query.actions:
            raise GuardianError(
                f"the Guardian could not decide ({legs[1].error}), and the safe action {self.safe_action!r} is not one of "
                "this query's actions"
            )
        chosen = query.actions.index(self.safe_action)
        gone = made["no_guarantee"] or "the Guardian failed and the safe action was taken in its place"
        rest: dict[str, Any] = {**made, "no_guarantee": gone}
        return Decision(action=chosen, answer=self.safe_action, decided_by="fallback", legs=legs, **rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformalRouter:
    """The calibrated policy over free text and tool calls: actions are (Guardian's answer, Primary's answer).

    Attributes:
        primary: whose answer stands exactly if its confidence is above the relaxation.
        guardian: who answers otherwise.
        certificate: a certificate made from a log in router form.
        safe_answer: what to say if the Guardian fails; without one that is an error.
        allow: as in `ConformalArbitrage`.
    """

    primary: Answerer
    guardian: Answerer
    certificate: Certificate
    safe_answer: str | None = None
    allow: Collection[str] = ()
    _no_guarantee: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Bind the certificate to the models."""
        object.__setattr__(self, "_no_guarantee", _bound(self.certificate, self.primary, self.guardian, self.allow))

    async def decide(self, query: ChatRequest, *, stream: Callable[[Decision], Sink] | None = None) -> Decision:
        """Whose answer, and why.

        Args:
            query: the request.
            stream: given the decision as it stands once the Guardian is to answer, takes its answer's chunks as they
                come; what the Guardian said before it failed, if it fails, has gone there.

        Raises:
            GuardianError: the Guardian was to answer and could not, and there is no safe answer.
        """
        name = query.id or secrets.token_hex(16)
        request = ChatRequest(query.body, id=name)
        first, answer = await answered("primary", self.primary, request)
        sure = 0.0 if answer is None or answer.confidence is None else answer.confidence
        candidates, margin = self.certificate.sight((0.0, sure), id=name)
        made: dict[str, Any] = {
            "id": name,
            "candidates": tuple(candidates),
            "margin": margin,
            "relaxation": self.certificate.relaxation,
        }
        why = self._no_guarantee
        if candidates == [1] and answer is not None:
            said = answer.message
            return Decision(action=1, answer=said, decided_by="primary", legs=(first,), no_guarantee=why, **made)
        if stream is not None:
            so_far = Decision(action=0, decided_by="guardian", legs=(first,), no_guarantee=why, **made)
            request = ChatRequest(query.body, id=name, sink=stream(so_far))
        second, answer = await answered("guardian", self.guardian, request)
        legs = (first, second)
        if answer is not None:
            said = answer.message
            return Decision(action=0, answer=said, decided_by="guardian", legs=legs, no_guarantee=why, **made)
        if self.safe_answer is None:
            raise GuardianError(f"the Guardian could not answer: {second.error}; set safe_answer to go on without it")
        said = {"role": "assistant", "content": self.safe_answer}
        why = why or "the Guardian failed and the safe answer was given in its place"
        return Decision(action=0, answer=said, decided_by="fallback", legs=legs, no_guarantee=why, **made)


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleModel:
    """A baseline: one model decides everything."""

    scorer: Scorer
    role: Role

    async def decide(self, query: Query) -> Decision:
        """The model's top action.

        Raises:
            GuardianError: it could not decide.
        """
        leg = await scored(self.role, self.scorer, query)
        if leg.scores is None:
            raise GuardianError(f"the {self.role} could not decide: {leg.error}")
        chosen = top_of(leg.scores)
        everything = tuple(range(len(query.actions)))
        return Decision(
            id=query.id, action=chosen, answer=query.actions[chosen], candidates=everything, decided_by=self.role,
            margin=margin_of(leg.scores, 12), legs=(leg,), no_guarantee="a single model decides",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRouter:
    """A baseline: a coin decides who is asked, whatever the query."""

    primary: Scorer
    guardian: Scorer
    probability: float
    coin: random.Random = field(default_factory=random.Random)

    async def decide(self, query: Query) -> Decision:
        """The Guardian's choice with the given probability, else the Primary's."""
        heads = self.coin.random() < self.probability
        role: Literal["guardian", "primary"] = "guardian" if heads else "primary"
        return await SingleModel(scorer=self.guardian if heads else self.primary, role=role).decide(query)


async def scored(role: Role, scorer: Scorer, query: Query) -> Leg:
    """Ask a model for scores; a failure is part of the leg."""
    start = time.perf_counter()
    try:
        scores = await checked_scores(scorer, query)
    except ScorerError as error:
        return _failed(role, error, start)
    seconds = time.perf_counter() - start
    return Leg(role=role, scores=scores.values, spent=scores.spent, seconds=seconds, served=scores.served)


async def answered(role: Role, answerer: Answerer, request: ChatRequest) -> tuple[Leg, Answer | None]:
    """Ask a model for an answer; a failure is part of the leg."""
    start = time.perf_counter()
    try:
        answer = await answerer.answer(request)
    except ScorerError as error:
        return _failed(role, error, start), None
    sure = None if answer.confidence is None else (float(answer.confidence),)  # NumPy's numbers are not JSON
    seconds = time.perf_counter() - start
    reply = answer.document or {"choices": [{"message": answer.message}]}
    return Leg(role=role, scores=sure, spent=answer.spent, seconds=seconds, served=answer.served, reply=reply), answer


def _failed(role: Role, error: ScorerError, start: float) -> Leg:
    text = f"{type(error).__name__}: {error}"
    return Leg(role=role, scores=None, spent=spent_of(error), seconds=time.perf_counter() - start, error=text)


def _checked_menu(actions: Collection[str]) -> tuple[str, ...]:
    if not actions:
        raise OptionError("a query needs at least one action")
    return tuple(actions)


def top_of(scores: tuple[float, ...]) -> int:
    """The best action, the first among equals."""
    return int(np.argmax(scores))


def margin_of(scores: Collection[float | None], digits: int) -> float:
    """How far the top action leads: the second smallest gap."""
    return row_margin(row_gaps(tuple(scores), digits=digits))


def _bound(
    certificate: Certificate, primary: Scorer | Answerer, guardian: Scorer | Answerer, allow: Collection[str]
) -> str | None:
    """Why decisions have no guarantee; None if they have one.

    Raises:
        StaleCalibrationError: something differs that is not allowed to.
    """
    different = differences(certificate, primary.identity, guardian.identity)
    if not different:
        return None
    open_names = [name for name in different if name not in allow]
    listed = "; ".join(f"{name}: {different[name]}" for name in open_names)
    if open_names:
        names = ", ".join(repr(name) for name in different)
        raise StaleCalibrationError(
            f"the certificate was not made with these models ({listed}); collect and calibrate again, or go on without a "
            f"guarantee by allowing {names} by name"
        )
    return "allowed by name: " + ", ".join(different)


def differences(certificate: Certificate, primary: Identity, guardian: Identity) -> dict[str, str]:
    """What the models at hand do otherwise than those of the certificate, by dotted name."""
    if certificate.identities == "unbound":
        return {UNBOUND: "its log did not say who made the scores"}
    found: dict[str, str] = {}
    for role, now in (("primary", primary), ("guardian", guardian)):
        then: Mapping[str, Any] = certificate.identities.get(role, {})
        for name in dict.fromkeys([*then, *now]):
            if then.get(name) != now.get(name):
                found[f"{role}.{name}"] = f"{then.get(name)!r:.60} then, {now.get(name)!r:.60} now"
    return found
