"""Attempts at a request: whether another one may continue what an earlier one began, and what all of them come to.

Knows nothing of HTTP beyond errors.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from conformal_arbitrage.gateway.decider import Outcome
from conformal_arbitrage.gateway.policy_table import LivePolicy
from conformal_arbitrage.store.record import DecisionRecord


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
