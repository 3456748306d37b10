"""Later turns of a session: the model that its first turn chose answers, whatever its confidence now.

A Primary that fails has no answer to give, so the Guardian answers that turn. In a session that was drawn for an audit the
Primary is asked in every turn, since both answers have to be graded.

Knows nothing of records or HTTP.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from conformal_arbitrage.live.policy import ConformalRouter, answered
from conformal_arbitrage.store.base import Conversation
from conformal_arbitrage.types import ChatRequest, Chunk, Decision, Spent


async def held_turn(
    rule: ConformalRouter,
    request: ChatRequest,
    conversation: Conversation,
    pending: Decision | None,
    *,
    audited: bool,
    live: bool,
    no_guarantee: str | None,
) -> AsyncGenerator[Decision | Chunk]:
    """Yield the decision of a later turn as `ConformalRouter.steps` does.

    Args:
        rule: the policy's rule, which knows both models.
        request: the chat request, with its id.
        conversation: the session.
        pending: what an earlier attempt at this turn came to.
        audited: whether the session was drawn for an audit.
        live: yield the Guardian's chunks as they arrive.
        no_guarantee: why the session has no guarantee.
    """
    if pending is None:
        pending = await _begun(rule, request, conversation, audited=audited, no_guarantee=no_guarantee)
        yield pending
    async with aclosing(rule.steps(request, pending, live=live)) as steps:
        async for step in steps:
            yield step


async def _begun(
    rule: ConformalRouter, request: ChatRequest, conversation: Conversation, *, audited: bool, no_guarantee: str | None
) -> Decision:
    """Return the Primary's decision, or the one that the Guardian has to complete."""
    keeps = conversation.decided_by == "primary"
    leg, answer = await answered("primary", rule.primary, request) if keeps or audited else (None, None)
    stands = answer.message if keeps and answer is not None else None
    return Decision(
        id=request.id,
        action=0 if stands is None else 1,
        candidates=(1,) if keeps else (0,),
        decided_by="guardian" if stands is None else "primary",
        margin=float("inf"),
        relaxation=rule.certificate.relaxation,
        answer=stands,
        legs=() if leg is None else (leg,),
        spent=Spent() if leg is None else leg.spent,
        no_guarantee=no_guarantee,
    )
