"""From a checked request to a decision and its record: modes, the audit coin, and how much content is kept.

Knows nothing of HTTP.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from conformal_arbitrage.calibration.draws import draw
from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.policy_table import LivePolicy, MenuPair, TextPair, identities_of_pair
from conformal_arbitrage.live.policy import (
    ConformalArbitrage,
    ConformalRouter,
    answered,
    margin_of,
    scored,
    top_of,
)
from conformal_arbitrage.scorers.answers import answer_text
from conformal_arbitrage.store.base import Audit
from conformal_arbitrage.store.record import (
    AuditQuestion,
    CompletionBody,
    Content,
    DecisionBody,
    Event,
    MenuQuestion,
    TextQuestion,
)
from conformal_arbitrage.types import ChatRequest, Chunk, Decision, Leg, Query
from conformal_arbitrage.upstream.base import together

_PINNED = {
    "temperature": "temperature", "max_tokens": "max_tokens", "max_completion_tokens": "max_tokens",
    "reasoning_effort": "reasoning_effort", "seed": "seed",
}  # fmt: skip
_ALWAYS_PINNED = ("top_p", "frequency_penalty", "presence_penalty", "logit_bias", "service_tier")
_sorted = msgspec.json.Encoder(order="sorted")


class Outcome(Struct, frozen=True, kw_only=True):
    """A decision, the event that records it, and the audit it was drawn for, if any."""

    decision: Decision
    event: Event
    audit: Audit | None


class Decider:
    """Decides under a policy and says what to record.

    Args:
        secret: keys the digests of content and the audit coin.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    async def menu(
        self, policy: LivePolicy, query: Query, caller_id: str, settings: Mapping[str, Any] | None = None
    ) -> Outcome:
        """Choose from a menu.

        Args:
            policy: the policy in force.
            query: the question and its menu.
            caller_id: whose call it is.
            settings: of the chat request the question came in, if it did.

        Raises:
            RequestError: the policy answers in free text, or the request overrides a pinned setting.
        """
        pair = policy.pair
        if not isinstance(pair, MenuPair):
            raise RequestError(
                f"policy {policy.name} answers in free text, not from menus", status=422, code="wrong_form"
            )
        overridden = _overridden(policy, settings or {})
        if isinstance(policy.rule, ConformalArbitrage) and policy.settings.mode == "enforce":
            decision = await policy.rule.decide(query)
        else:
            decision = await _shadow_menu(policy, pair, query)
        question = MenuQuestion(context=query.text, actions=query.actions)
        return self._outcome(policy, decision, caller_id, question, overridden)

    async def text(self, policy: LivePolicy, request: ChatRequest, caller_id: str) -> Outcome:
        """Answer in free text or with tool calls.

        Raises:
            RequestError: the policy chooses from menus, or the request overrides a pinned setting.
        """
        pair, overridden = _text_pair(policy), _overridden(policy, request.body)
        if isinstance(policy.rule, ConformalRouter) and policy.settings.mode == "enforce":
            decision = await policy.rule.decide(request)
        else:
            decision = await _shadow_text(policy, pair, request)
        return self._outcome(policy, decision, caller_id, TextQuestion(request=request.body), overridden)

    async def stream(self, policy: LivePolicy, request: ChatRequest, caller_id: str) -> AsyncGenerator[Outcome | Chunk]:
        """Answer in free text, passing on the Guardian's words as they come.

        Yields:
            The final outcome only, or, if the Guardian streams: the outcome so far, its chunks, the final outcome.
        """
        if not isinstance(policy.rule, ConformalRouter) or policy.settings.mode != "enforce":
            yield await self.text(policy, request, caller_id)
            return
        overridden = _overridden(policy, request.body)
        question = TextQuestion(request=request.body)
        async with aclosing(policy.rule.stream(request)) as steps:
            async for step in steps:
                if isinstance(step, Decision):
                    yield self._outcome(policy, step, caller_id, question, overridden)
                else:
                    yield step

    def completion(self, policy: LivePolicy, outcome: Outcome, finish: str) -> Event:
        """Return the event that says how an answer ended whose decision was recorded when it began."""
        decision = outcome.decision
        content = self._kept(policy, Content(answer=decision.answer))
        leg = replace(decision.legs[-1], reply=None)
        body = CompletionBody(finish=finish, leg=leg, cost=decision.spent.cost, content=content)
        return Event(id=str(decision.id), body=body)

    def _outcome(
        self, policy: LivePolicy, decision: Decision, caller_id: str, question: AuditQuestion, overridden: str | None
    ) -> Outcome:
        """Put a decision together with its event, and with an audit if the coin says so."""
        if overridden is not None and decision.no_guarantee is None:
            decision = replace(decision, no_guarantee=overridden)
        id, legs = str(decision.id), decision.legs
        audited = policy.settings.mode == "enforce" and self._drawn(id, policy.settings.audit_rate)
        body = DecisionBody(
            action=decision.action,
            candidates=decision.candidates,
            margin=None if decision.margin == float("inf") else decision.margin,
            relaxation=decision.relaxation,
            no_guarantee=decision.no_guarantee,
            legs=tuple([leg if leg.reply is None else replace(leg, reply=None) for leg in legs]),
            cost=decision.spent.cost,
            alpha=policy.alpha,
            version=policy.version,
            mode=policy.settings.mode,
            form=policy.pair.form,
            content=self._kept(policy, _content(question, decision)),
            identities_sha256=policy.identities_sha256,
            size=len(question.actions) if isinstance(question, MenuQuestion) else 2,
            overridden=overridden is not None,  # settings the certificate does not cover: other traffic
            audited=audited,
        )
        event = Event(id=id, body=body, policy=policy.name, key_id=caller_id, decided_by=decision.decided_by)
        audit = Audit(id=id, policy=policy.name, question=question) if audited else None
        return Outcome(decision=decision, event=event, audit=audit)

    def _drawn(self, id: str, rate: float) -> bool:
        """Toss the audit coin; it depends on the id and the secret only, so not on any score."""
        return rate > 0 and draw(self._secret, f"audit {id}") < rate

    def _kept(self, policy: LivePolicy, content: Content) -> Content | None:
        if policy.settings.content == "full":
            return content
        if policy.settings.content == "off":
            return None
        return Content(**{name: self._digest(value) for name, value in _given(content)})

    def _digest(self, value: object) -> str:
        return "blake2b-256:" + blake2b(_sorted.encode(value), key=self._secret, digest_size=32).hexdigest()


def _given(content: Content) -> list[tuple[str, object]]:
    values = [(name, getattr(content, name)) for name in content.__struct_fields__]
    return [(name, value) for name, value in values if value is not None]


def _content(question: AuditQuestion, decision: Decision) -> Content:
    if isinstance(question, MenuQuestion):
        return Content(context=question.context, actions=question.actions, answer=decision.answer)
    return Content(request=question.request, primary_answer=_primary_answer(decision), answer=decision.answer)


def _primary_answer(decision: Decision) -> str | None:
    """Return what the Primary said if the Guardian's answer was given: both have to be graded."""
    reply = decision.legs[0].reply
    return None if decision.decided_by == "primary" or reply is None else answer_text(reply["choices"][0]["message"])


def _text_pair(policy: LivePolicy) -> TextPair:
    if not isinstance(policy.pair, TextPair):
        raise RequestError(
            f"policy {policy.name} chooses from menus: give arbitrage.actions, or a response_format whose schema has "
            "exactly one property, an enum of texts",
            status=422,
            code="wrong_form",
        )
    return policy.pair


def _overridden(policy: LivePolicy, settings: Mapping[str, Any]) -> str | None:
    """Return why a request that overrides a pinned setting of either model has no guarantee.

    Raises:
        RequestError: the policy refuses such requests.
    """
    values = {name: settings[name] for name in (*_PINNED, *_ALWAYS_PINNED) if settings.get(name) is not None}
    models = identities_of_pair(policy.pair).values() if values else ()
    changed = [n for n, own in _PINNED.items() if n in values and any(m.get(own) != values[n] for m in models)]
    changed += [name for name in _ALWAYS_PINNED if name in values]
    if not changed:
        return None
    if policy.settings.overrides == "refuse":
        raise RequestError(
            f"{changed[0]} is pinned by the policy {policy.name}; leave it out", status=422, code="pinned_setting",
            param=changed[0],
        )  # fmt: skip
    return f"the request overrides {', '.join(changed)}"


async def _shadow_menu(policy: LivePolicy, pair: MenuPair, query: Query) -> Decision:
    """Ask both models; the Guardian's choice is the answer, and the Primary's scores are recorded."""
    primary, guardian = await together(
        [scored("primary", pair.primary, query), scored("guardian", pair.guardian, query)]
    )
    scores = primary.scores or (None,) * len(query.actions)
    chosen = None if guardian.scores is None else top_of(guardian.scores)
    answer = None if chosen is None else query.actions[chosen]
    return _shadowed(policy, query.id, scores, (primary, guardian), chosen, answer)


async def _shadow_text(policy: LivePolicy, pair: TextPair, request: ChatRequest) -> Decision:
    """Ask both models; the Guardian's answer is given, and the Primary's recorded."""
    (primary, first), (guardian, second) = await together(
        [answered("primary", pair.primary, request), answered("guardian", pair.guardian, request)]
    )
    confidence = 0.0 if first is None or first.confidence is None else first.confidence
    chosen, answer = (None, None) if second is None else (0, second.message)
    return _shadowed(policy, request.id, (0.0, confidence), (primary, guardian), chosen, answer)


def _shadowed(
    policy: LivePolicy,
    id: str | None,
    scores: tuple[float | None, ...],
    legs: tuple[Leg, Leg],
    chosen: int | None,
    answer: str | Mapping[str, Any] | None,
) -> Decision:
    """Return the Guardian's decision beside what the rule makes of the Primary's scores.

    If the Guardian failed, nothing is chosen; the row is recorded nevertheless, since an export must not lack it.
    """
    certificate = policy.certificate
    if certificate is None:
        candidates, margin = list(range(len(scores))), margin_of(scores, 12)
    else:
        candidates, margin = certificate.sight(scores, id=id)
    return Decision(
        id=id,
        action=chosen,
        answer=answer,
        candidates=tuple(candidates),
        decided_by="guardian",
        margin=margin,
        relaxation=None if certificate is None else certificate.relaxation,
        legs=legs,
        spent=legs[0].spent + legs[1].spent,
        no_guarantee="there is no certificate yet; the Guardian decides" if certificate is None else None,
    )
