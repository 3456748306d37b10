"""Cascades live: ask cheap models in order, stop at the first answer that the certificate lets stand, else ask the Guardian.

A model that fails is passed over. Every model that was asked has its leg in the decision, in the order of the chain, those
before the Guardian with the role "primary". A Guardian that fails leaves an error, or the safe answer the user configured.

Knows nothing of configuration files or HTTP.
"""

import secrets
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from conformal_arbitrage.calibration.path_certificate import PathCertificate
from conformal_arbitrage.errors import CertificateError, ScorerError, StaleCalibrationError
from conformal_arbitrage.live.binding import UNBOUND
from conformal_arbitrage.live.policy import (
    Answered,
    answered,
    guardian_failure,
    margin_of,
    scored,
    stream_answered,
    top_of,
    with_answer,
    with_leg,
    with_safe_action,
)
from conformal_arbitrage.scorers.answers import answer_text
from conformal_arbitrage.scorers.base import Answerer, Identity, Scorer
from conformal_arbitrage.scorers.request_fields import SETTINGS, overridden, settings_reason
from conformal_arbitrage.types import ChatRequest, Chunk, Decision, Leg, Query, Spent

MARGIN_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeRouter:
    """The calibrated cascade over free text and tool calls.

    Attributes:
        models: the cheap models by name; those of the certificate's chain are asked, in its order.
        guardian: who answers if none of them may.
        certificate: the certificate of the cascade, with its key.
        guardian_name: what the certificate calls the Guardian.
        safe_answer: the answer to give if the Guardian fails; without one that is an error.
        allow, forfeited: as in `ConformalArbitrage`.

    Raises:
        CertificateError: the certificate's chain has a model that is not among `models`.
        StaleCalibrationError: the certificate was made with other models, and that is not allowed.
    """

    models: Mapping[str, Answerer]
    guardian: Answerer
    certificate: PathCertificate
    guardian_name: str = "guardian"
    safe_answer: str | None = None
    allow: Collection[str] = ()
    forfeited: str | None = None
    _no_guarantee: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Check the certificate against the models."""
        reason = check_cascade(self.certificate, self.models, self.guardian, self.guardian_name, self.allow)
        object.__setattr__(self, "_no_guarantee", self.forfeited or reason)

    @property
    def no_guarantee(self) -> str | None:
        """Why no decision has a guarantee, whatever the request; None if nothing stands against one."""
        return self._no_guarantee

    async def decide(self, request: ChatRequest) -> Decision:
        """Decide whose answer is given.

        Raises:
            GuardianError: the Guardian was to answer and could not, and there is no safe answer.
        """
        request = request if request.id else ChatRequest(request.body, id=secrets.token_hex(16))
        decision: Decision | None = None
        async for step in self.steps(request):
            decision = step if isinstance(step, Decision) else decision
        if decision is None:
            raise AssertionError("a chain has at least one model")
        return _complete(decision, "set safe_answer to continue without it")

    async def steps(
        self, request: ChatRequest, pending: Decision | None = None, *, live: bool = False
    ) -> AsyncGenerator[Decision | Chunk]:
        """Yield the decision so far after each model, and the final one if the Guardian must complete it.

        Args:
            request: the chat request, with its id.
            pending: what an earlier attempt came to. No model is asked again: what the later ones of its chain might have
                said is left out, and the Guardian answers.
            live: yield the Guardian's chunks as they arrive, before the final decision.
        """
        if pending is None:
            replies = _Replies()
            for name in self.certificate.chain.models:
                pending = await self._ask_next(request, replies, self.models[name])
                yield pending
                if pending.decided_by == "primary":
                    return
        if pending is None or pending.decided_by == "primary":
            return
        if not live:
            yield with_answer(pending, await answered("guardian", self.guardian, request), self.safe_answer)
            return
        async with aclosing(stream_answered("guardian", self.guardian, request)) as items:
            async for item in items:
                yield with_answer(pending, item, self.safe_answer) if isinstance(item, Answered) else item

    async def _ask_next(self, request: ChatRequest, replies: "_Replies", model: Answerer) -> Decision:
        """Ask one more model; its answer stands, or the decision is pending."""
        leg, answer = await answered("primary", model, request)
        replies.legs.append(leg)
        replies.confidences.append(None if answer is None else confidence_of(answer.confidence))
        replies.texts.append(None if answer is None else _text_or_none(answer.message))
        stands = answer is not None and self.certificate.stops(replies.confidences, replies.texts, id=str(request.id))
        reason = self._no_guarantee or self._other_settings(request)
        standing = answer.message if stands and answer is not None else None
        return _pending(request.id, replies.legs, replies.confidences[-1], standing, reason)

    def _other_settings(self, request: ChatRequest) -> str | None:
        """Return why a request has no guarantee whose settings are not the pinned ones, or not those of the log."""
        if SETTINGS.keys().isdisjoint(request.body):
            return None
        chain = {name: self.models[name].identity for name in self.certificate.chain.models}
        differing = overridden(request.body, {**chain, self.guardian_name: self.guardian.identity})
        return settings_reason(request.body, differing, self.certificate.identities)


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeChooser:
    """The calibrated cascade over menus; attributes and errors are those of `CascadeRouter`, with a safe action."""

    models: Mapping[str, Scorer]
    guardian: Scorer
    certificate: PathCertificate
    guardian_name: str = "guardian"
    safe_action: str | None = None
    allow: Collection[str] = ()
    forfeited: str | None = None
    _no_guarantee: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Check the certificate against the models."""
        reason = check_cascade(self.certificate, self.models, self.guardian, self.guardian_name, self.allow)
        object.__setattr__(self, "_no_guarantee", self.forfeited or reason)

    @property
    def no_guarantee(self) -> str | None:
        """Why no decision has a guarantee, whatever the request; None if nothing stands against one."""
        return self._no_guarantee

    async def decide(self, query: Query) -> Decision:
        """Decide who chooses, and choose.

        Raises:
            GuardianError: the Guardian was to decide and could not, and there is no safe action.
        """
        query = query if query.id else replace(query, id=secrets.token_hex(16))
        pending = await self.ask_primary(query)
        decision = pending if pending.decided_by == "primary" else await self.ask_guardian(query, pending)
        return _complete(decision, "set safe_action to continue without it")

    async def ask_primary(self, query: Query) -> Decision:
        """Return the decision of the first model if its choice stands, or the one that others have to complete."""
        return await self._ask_next(query, [])

    async def ask_guardian(self, query: Query, pending: Decision) -> Decision:
        """Complete a pending decision: ask the rest of the chain, and the Guardian if no choice stands.

        Models that were asked are not asked again, at another attempt neither. There is no answer if the Guardian failed
        and there is no safe action to take.
        """
        legs = [leg for leg in pending.legs if leg.role == "primary"]
        while len(legs) < len(self.certificate.chain.models):
            pending = await self._ask_next(query, legs)
            if pending.decided_by == "primary":
                return pending
            legs = list(pending.legs)
        leg = await scored("guardian", self.guardian, query)
        both = with_leg(pending, leg)
        if leg.scores is None:
            return with_safe_action(both, query, self.safe_action)
        chosen = top_of(leg.scores)
        return replace(both, action=chosen, answer=query.actions[chosen])

    async def _ask_next(self, query: Query, legs: Sequence[Leg]) -> Decision:
        """Ask the next model after those that have a leg; its choice stands, or the decision is pending."""
        leg = await scored("primary", self.models[self.certificate.chain.models[len(legs)]], query)
        chosen = [top_choice(one.scores) for one in (*legs, leg)]
        margins = [margin for margin, _ in chosen]
        choices = [None if top is None else query.actions[top] for _, top in chosen]
        last, reason = chosen[-1][1], self._no_guarantee
        pending = _pending(query.id, [*legs, leg], margins[-1], None, reason)
        if last is None or not self.certificate.stops(margins, choices, id=str(query.id)):
            return replace(pending, action=None, candidates=tuple(range(len(query.actions))))
        return replace(pending, action=last, candidates=(last,), decided_by="primary", answer=query.actions[last])


CascadeRule = CascadeRouter | CascadeChooser


@dataclass(slots=True)
class _Replies:
    """What the models of a chain have said so far."""

    legs: list[Leg] = field(default_factory=list[Leg])
    confidences: list[float | None] = field(default_factory=list[float | None])
    texts: list[str | None] = field(default_factory=list[str | None])


def confidence_of(confidence: float | None) -> float | None:
    """Return a confidence as cascades count it, at most 1; None if the model gave none."""
    return None if confidence is None else min(1.0, float(confidence))


def top_choice(scores: Collection[float] | None) -> tuple[float | None, int | None]:
    """Return how far the top action leads, at most by 1, and which it is; None and None without scores or with a tie."""
    if scores is None:
        return None, None
    margin = min(1.0, margin_of(scores, MARGIN_DIGITS))
    return (None, None) if margin == 0 else (margin, top_of(tuple(scores)))


def _text_or_none(message: Mapping[str, Any]) -> str | None:
    try:
        return answer_text(message)
    except ScorerError:
        return None


def _pending(
    id: str | None,
    legs: list[Leg],
    confidence: float | None,
    standing: Mapping[str, Any] | None,
    no_guarantee: str | None,
) -> Decision:
    """Return a decision in router form after the chain's part: its last answer stands, or the Guardian completes it."""
    return Decision(
        id=id,
        action=0 if standing is None else 1,
        candidates=(0, 1) if standing is None else (1,),
        decided_by="guardian" if standing is None else "primary",
        margin=confidence or 0.0,
        answer=standing,
        legs=tuple(legs),
        spent=sum((leg.spent for leg in legs), start=Spent()),
        no_guarantee=no_guarantee,
    )


def _complete(decision: Decision, remedy: str) -> Decision:
    if decision.answer is None:
        raise guardian_failure(decision.legs[-1], remedy)
    return decision


def check_cascade(
    certificate: PathCertificate,
    models: Mapping[str, Scorer] | Mapping[str, Answerer],
    guardian: Scorer | Answerer,
    guardian_name: str,
    allow: Collection[str],
) -> str | None:
    """Return why decisions have no guarantee; None if they have one.

    Raises:
        CertificateError: a model of the chain is missing, or the Guardian has another name.
        StaleCalibrationError: the models differ in a way that is not allowed.
    """
    certificate.secret()
    absent = [name for name in certificate.chain.models if name not in models]
    if absent or certificate.guardian != guardian_name:
        expected = f"{', '.join(certificate.chain.models)} and the Guardian {certificate.guardian}"
        raise CertificateError(
            f"the certificate's cascade asks {expected}; this one has {', '.join(models) or 'none'} and the Guardian "
            f"{guardian_name}; correct [cascade] models, or calibrate again"
        )
    chain = {name: models[name].identity for name in certificate.chain.models}
    different = cascade_differences(certificate, {**chain, guardian_name: guardian.identity})
    refused = {name: how for name, how in different.items() if name not in allow}
    if refused:
        listed = "; ".join(f"{name}: {how}" for name, how in refused.items())
        raise StaleCalibrationError(
            f"the certificate was made with other models ({listed}); collect and calibrate again, or continue without a "
            f"guarantee by allowing {', '.join(map(repr, different))} by name"
        )
    return "allowed by name: " + ", ".join(different) if different else None


def cascade_differences(certificate: PathCertificate, now: Mapping[str, Identity]) -> dict[str, str]:
    """Return how models differ from those of a cascade's certificate, by dotted name."""
    if certificate.identities == "unbound":
        return {UNBOUND: "its log does not name the scorers"}
    different: dict[str, str] = {}
    for name, identity in now.items():
        then: Mapping[str, Any] = certificate.identities.get(name, {})
        for part in dict.fromkeys([*then, *identity]):
            if then.get(part) != identity.get(part):
                different[f"{name}.{part}"] = f"{then.get(part)!r:.60} then, {identity.get(part)!r:.60} now"
    return different
