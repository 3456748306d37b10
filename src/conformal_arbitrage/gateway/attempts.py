"""Attempts at a request: whether another one may continue what an earlier one began, and what all of them come to.

Knows nothing of HTTP beyond errors.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from conformal_arbitrage.gateway.audit_rows import still_unanswered
from conformal_arbitrage.gateway.decider import Decider, Outcome
from conformal_arbitrage.gateway.idempotency import Turn
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.policy_table import LivePolicy
from conformal_arbitrage.gateway.review_turns import ReviewTurns
from conformal_arbitrage.store.base import Audit
from conformal_arbitrage.store.record import CompletionBody, DecisionRecord, Event


async def all_settled(calls: Sequence[Coroutine[Any, Any, Outcome]]) -> list[Outcome]:
    """Run calls concurrently, all to their end, then raise the first error: what the others decided is not lost."""
    if len(calls) == 1:
        return [await calls[0]]
    outcomes: list[Outcome] = []
    errors: list[BaseException] = []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            errors.append(result)
        else:
            outcomes.append(result)
    if errors:
        raise errors[0]
    return outcomes


def is_continuable(record: DecisionRecord, policy: LivePolicy) -> bool:
    """Return whether another attempt may continue a decision: same version and mode, and its answer can be rebuilt.

    People may take longer than a version lasts. What they are asked about is continued under any, then without a guarantee.
    """
    body = record.decision
    same = body.version == policy.version and body.mode == policy.mode
    same = (same or policy.pair.review is not None) and body.form == policy.pair.form
    return same and (body.pending or (body.form == "menu" and body.action is not None))


async def end_undelivered(
    turn: Turn, policy: LivePolicy, finish: str, decider: Decider, metrics: Metrics, reviews: ReviewTurns
) -> None:
    """Record how far each decision of a turn came, and keep those of which nothing was sent for another attempt."""
    if turn.opened is not None:
        await turn.end_early(finish)
        return
    if finish == "cancelled":
        await reviews.withdraw(turn)
    metrics.undelivered(policy.name, turn.outcomes.values(), finish)
    events: list[Event] = []
    audits: list[Audit] = []
    news = [outcome.event.id for outcome in turn.outcomes.values() if outcome.audit is not None]
    for outcome in turn.outcomes.values():
        audit = None if turn.reviewed else still_unanswered(outcome.audit, outcome.decision)
        if outcome.event.id in turn.recorded:
            events += [] if finish == "waiting" else [decider.completion(policy, outcome, finish)]
        else:
            events += [outcome.event, Event(id=outcome.event.id, body=CompletionBody(finish=finish))]
            audit = audit or outcome.audit
        audits += [] if audit is None else [audit]
    begun = {place: outcome.event.id for place, outcome in turn.outcomes.items()}
    digests = {id: decider.digest(turn.questions[place]) for place, id in begun.items()}
    await turn.end_undelivered(events, audits, begun, digests, news)
