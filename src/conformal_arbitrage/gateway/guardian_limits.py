"""What the Guardian may use, over all callers and all gateways of one database: calls in a minute, dollars in an hour.

The largest possible cost of a call is reserved in the store before it is made, so that calls at the same time cannot exceed
the limit together, and replaced by the actual cost afterwards. Calls in the background leave a share to live traffic.

Knows nothing of requests, or of what the Guardian is asked.
"""

import asyncio
import logging
import random
from contextlib import suppress
from math import ceil, floor

from conformal_arbitrage.errors import QuotaError, StoreError
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.store.base import Reservation, Shortage, Store
from conformal_arbitrage.upstream.base import IN_BACKGROUND

_log = logging.getLogger("conformal_arbitrage.gateway")
_UNITS_PER_DOLLAR = 10**12
PATIENCE = 5.0
"""Seconds that a live call waits for others in flight to turn out cheaper than they could have been."""
_POLL = 0.2


class GuardianCalls:
    """The most questions to the Guardian in any minute.

    Args:
        store: what the gateways share.
        limit: questions.
        live_share: the share that audits leave.
    """

    def __init__(self, store: Store, limit: int, *, live_share: float) -> None:
        self._store = store
        self._limits = {False: limit, True: floor(limit * (1 - live_share))}

    async def start(self) -> None:
        """Count one question.

        Raises:
            QuotaError: the quota is used up.
        """
        limit = self._limits[IN_BACKGROUND.get()]
        outcome = await self._store.reserve("guardian_calls", 1, limit=limit, seconds=60.0, settled=True)
        if isinstance(outcome, Shortage):
            wait = 60.0 if outcome.wait is None else outcome.wait
            raise QuotaError("the Guardian's limit on calls is reached", retry_after=wait)


class GuardianSpending:
    """The most dollars for the Guardian in any hour.

    Args:
        store: what the gateways share.
        limit: dollars.
        live_share: the share that audits leave.
    """

    setting = "guardian_cost_per_hour"

    def __init__(self, store: Store, limit: float, *, live_share: float) -> None:
        self._store = store
        units = limit * _UNITS_PER_DOLLAR
        self._limits = {False: round(units), True: floor(units * (1 - live_share))}
        self._turn = asyncio.Lock()
        self._settled = asyncio.Event()
        self._settling: set[asyncio.Task[None]] = set()

    async def reserve(self, worst: float) -> Reservation:
        """Reserve the largest possible cost of a call; a live call waits a while for others to be settled.

        Raises:
            QuotaError: there is not enough left.
        """
        units = ceil(worst * _UNITS_PER_DOLLAR)
        outcome = await self._try(units)
        if isinstance(outcome, Shortage) and outcome.in_flight and not IN_BACKGROUND.get():
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE), self._turn:  # one call at a time asks again
                    while isinstance(outcome := await self._try(units), Shortage) and outcome.in_flight:
                        await self._next_settlement()
        if isinstance(outcome, Reservation):
            return outcome
        raise _refusal(outcome)

    async def _try(self, units: int) -> Reservation | Shortage:
        limit = self._limits[IN_BACKGROUND.get()]
        return await self._store.reserve("guardian_cost", units, limit=limit, seconds=3600.0)

    async def _next_settlement(self) -> None:
        """Wait until a call of this gateway is settled, or for a moment, since another gateway's may be."""
        self._settled.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL * random.uniform(1, 2)):
                await self._settled.wait()

    def settle(self, reservation: Reservation, cost: float | None) -> None:
        """Replace a reservation by the actual cost, or keep it in full if that is unknown."""
        units = reservation.amount if cost is None else ceil(cost * _UNITS_PER_DOLLAR)
        task = asyncio.create_task(self._settle(reservation, units))  # also if this call was cancelled
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, reservation: Reservation, units: int) -> None:
        try:
            await self._store.settle(reservation, units)
        except StoreError as error:
            _log.error("the cost of a Guardian call could not be stored, so its reservation stays: %s", error)
        self._settled.set()

    async def close(self) -> None:
        """Wait until all calls are settled."""
        await asyncio.gather(*self._settling)


def _refusal(shortage: Shortage) -> QuotaError:
    if shortage.wait is None:
        message = "this call could cost more than guardian_cost_per_hour allows in all; raise that, or lower max_tokens"
        return QuotaError(message, retry_after=3600.0)
    return QuotaError(
        "the Guardian's limit on cost is reached", retry_after=1.0 if shortage.in_flight else shortage.wait
    )


def calls_limit(store: Store, config: GatewayConfig) -> GuardianCalls | None:
    """Return the configured limit on calls, if there is one."""
    limit = config.guardian_calls_per_minute
    return None if limit is None else GuardianCalls(store, limit, live_share=config.live_share)


def spending_limit(store: Store, config: GatewayConfig) -> GuardianSpending | None:
    """Return the configured limit on cost, if there is one."""
    limit = config.guardian_cost_per_hour
    return None if limit is None else GuardianSpending(store, limit, live_share=config.live_share)
