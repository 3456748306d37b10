"""From a checked request to a recorded decision: modes, audits, and what the record keeps.

Knows nothing of HTTP.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from conformal_arbitrage.calibration.options import draw
from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.chat_replies import recorded, recorded_leg, said
from conformal_arbitrage.gateway.policy_table import LivePolicy
from conformal_arbitrage.live.policy import ConformalArbitrage, ConformalRouter, answered, margin_of, scored, top_of
from conformal_arbitrage.scorers.answers import answer_text
from conformal_arbitrage.store.base import Audit, Event
from conformal_arbitrage.types import ChatRequest, Decision, Leg, Query, Sink
from conformal_arbitrage.upstream.base import together

_PINNED = {
    "temperature": "temperature", "max_tokens": "max_tokens", "max_completion_tokens": "max_tokens",
    "reasoning_effort": "reasoning_effort", "seed": "seed",
}  # fmt: skip
_sorted = msgspec.json.Encoder(order="sorted")
_ALWAYS_PINNED = ("top_p", "frequency_penalty", "presence_penalty", "logit_bias", "service_tier")


class Made(Struct, frozen=True, kw_only=True):
    """A decision with its event, and the audit it was drawn for."""

    decision: Decision
    event: Event
    audit: Audit | None


class Decider:
    """Decides and says what is to be recorded.

    Args:
        secret: keys the digests of content and the audit coin.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    async def menu(self, policy: LivePolicy, query: Query, caller: str, body: Mapping[str, Any] | None = None) -> Made:
        """A choice from a menu; of a chat request, with its body."""
        if policy.pair.form != "menu":
            raise RequestError(
                f"policy {policy.name} answers in free text, not from menus", status=422, code="wrong_form"
            )
        why = self._overrides(policy, body or {})
        if isinstance(policy.rule, ConformalArbitrage) and policy.settings.mode == "enforce":
            decision = await policy.rule.decide(query)
        else:
            decision = await self._shadow_menu(policy, query)
        if why is not None:
            decision = replace(decision, no_guarantee=decision.no_guarantee or why)
        asked: dict[str, Any] = {"context": query.text, "actions": list(query.actions)}
        return self._made(policy, decision, caller, {**asked, "answer": decision.answer}, asked, why)

    async def text(
        self, policy: LivePolicy, request: ChatRequest, caller: str, live: Callable[[Made], Sink] | None = None
    ) -> Made:
        """An answer in free text or tool calls.

        Args:
            policy: whose rule.
            request: what was asked.
            caller: whose call.
            live: given the decision once the Guardian is to answer, takes its chunks as they come.
        """
        if policy.pair.form != "text":
            raise RequestError(
                f"policy {policy.name} chooses from menus: give arbitrage.actions, or a response_format whose schema has "
                "exactly one property, an enum of texts",
                status=422,
                code="wrong_form",
            )
        why = self._overrides(policy, request.body)
        asked: dict[str, Any] = {"request": dict(request.body)}

        def made(decision: Decision) -> Made:
            if why is not None:
                decision = replace(decision, no_guarantee=decision.no_guarantee or why)
            answers = {"primary_answer": _first_answer(decision), "answer": decision.answer}
            content = asked | {name: text for name, text in answers.items() if text is not None}
            return self._made(policy, decision, caller, content, asked, why)

        if isinstance(policy.rule, ConformalRouter) and policy.settings.mode == "enforce":
            begin: Callable[[Decision], Sink] | None = None if live is None else (lambda so_far: live(made(so_far)))
            return made(await policy.rule.decide(request, stream=begin))
        return made(await self._shadow_text(policy, request))

    def completion(self, policy: LivePolicy, decision: Decision) -> Event:
        """How an answer ended whose decision was recorded when it began."""
        leg = decision.legs[-1]
        finish = said(decision, None)[1]
        body: dict[str, Any] = {"finish": finish, "leg": recorded_leg(leg), "cost": decision.spent.cost}
        return Event(
            id=str(decision.id),
            kind="completion",
            body={**body, "content": self._kept(policy, {"answer": decision.answer})},
        )

    async def _shadow_menu(self, policy: LivePolicy, query: Query) -> Decision:
        """Both are asked; the Guardian's choice is the answer, and the Primary is recorded."""
        pair = policy.pair
        first, second = await together(
            [scored("primary", pair.primary, query), scored("guardian", pair.guardian, query)]
        )
        scores = first.scores or (None,) * len(query.actions)
        chosen = None if second.scores is None else top_of(second.scores)
        said = None if chosen is None else query.actions[chosen]
        return _shadowed(policy, query.id, scores, (first, second), chosen, said)

    async def _shadow_text(self, policy: LivePolicy, request: ChatRequest) -> Decision:
        """Both answer; the Guardian's answer is given, and the Primary's recorded."""
        pair = policy.pair
        (first, mine), (second, theirs) = await together(
            [answered("primary", pair.primary, request), answered("guardian", pair.guardian, request)]
        )
        sure = 0.0 if mine is None or mine.confidence is None else mine.confidence
        chosen, said = (None, None) if theirs is None else (0, theirs.message)
        return _shadowed(policy, request.id, (0.0, sure), (first, second), chosen, said)

    def _overrides(self, policy: LivePolicy, body: Mapping[str, Any]) -> str | None:
        """Why a request that overrides a pinned setting of either model has no guarantee.

        Raises:
            RequestError: such requests are refused.
        """
        given = {name: body[name] for name in (*_PINNED, *_ALWAYS_PINNED) if body.get(name) is not None}
        models = policy.pair.identities.values() if given else ()
        changed = [n for n, own in _PINNED.items() if n in given and any(m.get(own) != given[n] for m in models)]
        changed += [name for name in _ALWAYS_PINNED if name in given]
        if not changed:
            return None
        if policy.settings.overrides == "refuse":
            raise RequestError(
                f"{changed[0]} is pinned by the policy {policy.name}; leave it out", status=422, code="pinned_setting",
                param=changed[0],
            )  # fmt: skip
        return f"the request overrides {', '.join(changed)}"

    def _made(
        self,
        policy: LivePolicy,
        decision: Decision,
        caller: str,
        content: Mapping[str, Any],
        asked: Mapping[str, Any],
        overridden: str | None,
    ) -> Made:
        """The event of a decision, and its audit if the coin says so."""
        id = str(decision.id)
        body = recorded(decision)
        body |= {"alpha": policy.alpha, "version": policy.version, "mode": policy.settings.mode}
        body |= {"form": policy.pair.form, "content": self._kept(policy, content)}
        body |= {"identities_sha256": policy.identities_sha256, "size": len(asked.get("actions", ())) or 2}
        if overridden is not None:
            body["overridden"] = True  # other settings than the certificate's: other traffic
        audit = None
        if policy.settings.mode == "enforce" and self._drawn(id, policy.settings.audit_rate):
            body["audited"] = True
            audit = Audit(id=id, policy=policy.name, payload=asked)
        event = Event(
            id=id, kind="decision", body=body, policy=policy.name, key_id=caller, decided_by=decision.decided_by
        )
        return Made(decision=decision, event=event, audit=audit)

    def _drawn(self, id: str, rate: float) -> bool:
        """A coin that depends on the id and the secret only, so not on any score."""
        return rate > 0 and draw(self._secret, f"audit {id}") < rate

    def _kept(self, policy: LivePolicy, content: Mapping[str, Any]) -> dict[str, Any] | None:
        if policy.settings.content == "off":
            return None
        if policy.settings.content == "full":
            return dict(content)
        return {name: self._digest(value) for name, value in content.items()}

    def _digest(self, value: Any) -> str:
        return "blake2b-256:" + blake2b(_sorted.encode(value), key=self._secret, digest_size=32).hexdigest()


def _first_answer(decision: Decision) -> str | None:
    """What the Primary said where the Guardian's answer was given: both have to be graded."""
    reply = decision.legs[0].reply
    return None if decision.decided_by == "primary" or reply is None else answer_text(reply["choices"][0]["message"])


def _shadowed(
    policy: LivePolicy,
    id: str | None,
    scores: tuple[float | None, ...],
    legs: tuple[Leg, Leg],
    chosen: int | None,
    said: str | Mapping[str, Any] | None,
) -> Decision:
    """What the Guardian decided, beside what the rule would have made of the Primary's scores.

    If it failed, nothing is chosen; the row is recorded all the same, since an export must not lack it.
    """
    rule = policy.certificate
    if rule is None:
        candidates, margin = list(range(len(scores))), margin_of(scores, 12)
    else:
        candidates, margin = rule.sight(scores, id=id)
    return Decision(
        id=id,
        action=chosen,
        answer=said,
        candidates=tuple(candidates),
        decided_by="guardian",
        margin=margin,
        relaxation=None if rule is None else rule.relaxation,
        legs=legs,
        no_guarantee="there is no certificate yet; the Guardian decides" if rule is None else None,
    )
