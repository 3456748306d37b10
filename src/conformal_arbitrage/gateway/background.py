"""Jobs in the background: retention and whatever else runs beside requests."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress

from prometheus_client import Counter

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store import events, integrity
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import DAY

# --- Background work of a gateway ---


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
            group.create_task(_repeat(lambda: integrity.seal(self._store), SIGN_EVERY))
            group.create_task(_repeat(lambda: integrity.sweep(self._store), SWEEP_EVERY))
            group.create_task(_repeat(lambda: events.fold_tallies(self._store), COUNT_EVERY))
            group.create_task(_repeat(lambda: events.gather_rows(self._store), GATHER_EVERY))
            if self._retain_days is not None:
                group.create_task(_repeat(self._prune, PRUNE_EVERY))

    async def _prune(self) -> None:
        if self._retain_days is not None:
            removed = await integrity.prune(self._store, before=time.time() - self._retain_days * DAY)
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


# --- Background ---


PAUSE = 5.0
"""Seconds before a job that failed is started again."""


class Background:
    """Runs jobs until it is stopped, and starts one that fails again.

    Args:
        failures: counts failures by job.

    Attributes:
        failed: by job, the error with which it ended last, until it has run for a pause again.
    """

    def __init__(self, failures: Counter) -> None:
        self.failed: dict[str, str] = {}
        self._failures = failures
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, jobs: Mapping[str, Callable[[], Coroutine[object, object, None]]]) -> None:
        """Start jobs, which run until they are cancelled, or return if there is nothing to do."""
        self._tasks += [asyncio.create_task(self._keep_running(name, run)) for name, run in jobs.items()]

    async def stop(self) -> None:
        """Cancel all jobs, and wait for their end."""
        for task in self._tasks:
            await _ended(task)

    async def _keep_running(self, name: str, run: Callable[[], Coroutine[object, object, None]]) -> None:
        while True:
            job = asyncio.create_task(run())
            try:
                await asyncio.wait({job}, timeout=PAUSE)
                if not job.done():
                    self.failed.pop(name, None)
                    await asyncio.wait({job})
            finally:
                if not job.done():
                    await _ended(job)
            error = job.exception()
            if error is None:
                return  # there was nothing to do
            self.failed[name] = f"it failed with {type(error).__name__}; the log has the reason"
            self._failures.labels(name).inc()
            _log.error("the background job %r failed, and starts again in %g s", name, PAUSE, exc_info=error)
            await asyncio.sleep(PAUSE)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
