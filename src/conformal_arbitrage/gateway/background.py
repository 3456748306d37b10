"""Background: keep the gateway's background jobs running, and say so where one has failed.

A job that ended unseen would be worse than one that fails: nobody would watch the loss, and the last state would stand.

Knows nothing of what the jobs do.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress

from prometheus_client import Counter

_log = logging.getLogger("conformal_arbitrage.gateway")
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
