"""Shadow mode: all models are asked, the Guardian's answer is given, and what the others said is recorded.

If the Guardian fails, the safe action or answer is given, as in any other mode.

Knows nothing of records or of how a caller is answered.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from msgspec.structs import replace

from conformal_arbitrage.gateway.cascades import all_answered, all_scored
from conformal_arbitrage.gateway.policy_table import LivePolicy, MenuPair, TextPair
from conformal_arbitrage.live.policy import (
    answered,
    margin_of,
    scored,
    sighted,
    top_of,
    with_answer,
    with_leg,
    with_safe_action,
)
from conformal_arbitrage.types import ChatRequest, Decision, Leg, Query, Spent

_Reply = TypeVar("_Reply")


async def shadow_menu(policy: LivePolicy, pair: MenuPair, query: Query) -> tuple[Decision, asyncio.Task[Leg]]:
    """Ask both models; the Guardian's choice will be the answer, and the Primary's scores are recorded."""
    asking = asyncio.create_task(scored("guardian", pair.guardian, query))
    async with AsyncExitStack() as on_failure:
        on_failure.push_async_callback(cancelled, asking)
        everyone = pair.models or {"primary": pair.primary}
        first, *further = await all_scored(everyone, query)
        on_failure.pop_all()
    return _shadowed(policy, query, first.scores or (None,) * len(query.actions), first, *further), asking


async def shadow_text(
    policy: LivePolicy, pair: TextPair, request: ChatRequest, pending: Decision | None
) -> AsyncGenerator[Decision]:
    """Ask both models; the Guardian's answer is given, and the Primary's recorded."""
    async with _asking(answered("guardian", pair.guardian, request)) as asking:
        if pending is None:
            (first, answer), *others = await all_answered(pair.models or {"primary": pair.primary}, request)
            confidence = 0.0 if answer is None or answer.confidence is None else answer.confidence
            pending = _shadowed(policy, request, (0.0, confidence), first, *(leg for leg, _ in others))
            yield pending
        decision = with_answer(pending, await asking, pair.fallback)
        yield decision if decision.answer is None else replace(decision, action=0)


@asynccontextmanager
async def _asking(call: Coroutine[Any, Any, _Reply]) -> AsyncGenerator["asyncio.Task[_Reply]"]:
    """Run a call beside the block; one that is not awaited to its end is cancelled."""
    task = asyncio.create_task(call)
    try:
        yield task
    finally:
        await cancelled(task)


async def cancelled(task: "asyncio.Task[Any]") -> None:
    """Cancel a call, and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def concluded(pair: MenuPair, query: Query, pending: Decision, leg: Leg) -> Decision:
    """Return a shadow decision with the Guardian's leg; if that failed, with the safe action, or with none."""
    both = with_leg(pending, leg)
    if leg.scores is None:
        return with_safe_action(both, query, pair.fallback)
    chosen = top_of(leg.scores)
    return replace(both, action=chosen, answer=query.actions[chosen])


def _shadowed(
    policy: LivePolicy, question: Query | ChatRequest, scores: tuple[float | None, ...], *legs: Leg
) -> Decision:
    """Return the Guardian's decision, pending, beside what the rule makes of the Primary's scores."""
    certificate = policy.certificate
    if certificate is None:
        candidates, margin, relaxation, use = list(range(len(scores))), margin_of(scores, 12), None, None
    else:
        candidates, margin, relaxation, use, _ = sighted(certificate, scores, question, legs[0].spent)
    return Decision(
        id=question.id,
        action=None,
        candidates=tuple(candidates),
        decided_by="guardian",
        margin=margin,
        relaxation=relaxation,
        legs=legs,
        spent=sum((leg.spent for leg in legs), start=Spent()),
        no_guarantee="there is no certificate yet; the Guardian decides" if policy.alpha is None else None,
        learned=use,
    )
