"""Background work of a gateway: sign how far the record has come, count it, and remove what has expired.

Knows nothing of requests or models.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store.base import Store
from conformal_arbitrage.types import DAY

_log = logging.getLogger("conformal_arbitrage.gateway")
SIGN_EVERY = 1.0
SWEEP_EVERY = 60.0
PRUNE_EVERY = 3600.0
COUNT_EVERY = 5.0
GATHER_EVERY = 60.0


class Housekeeper:
    """Keeps a store in order, in the background.

    Args:
        store: what is kept in order.
        retain_days: after how many days decisions are removed; None keeps them.
    """

    def __init__(self, store: Store, retain_days: float | None) -> None:
        self._store = store
        self._retain_days = retain_days

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(_repeat(self._store.seal, SIGN_EVERY))
            group.create_task(_repeat(self._store.sweep, SWEEP_EVERY))
            group.create_task(_repeat(self._store.fold_tallies, COUNT_EVERY))
            group.create_task(_repeat(self._store.gather_rows, GATHER_EVERY))
            if self._retain_days is not None:
                group.create_task(_repeat(self._prune, PRUNE_EVERY))

    async def _prune(self) -> None:
        if self._retain_days is not None:
            removed = await self._store.prune(before=time.time() - self._retain_days * DAY)
            if removed:
                _log.info("removed %d decisions older than %g days (retain_days)", removed, self._retain_days)


async def _repeat(work: Callable[[], Awaitable[object]], seconds: float) -> None:
    """Work again and again; if the store is unreachable, requests report that, and this waits."""
    while True:
        try:
            await work()
        except StoreError as error:
            _log.warning("the record could not be kept in order for now: %s", error)
        await asyncio.sleep(seconds)
