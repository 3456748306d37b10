"""Jobs in the background: keep the record in order, send webhooks, renew certificates."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial

from prometheus_client import Counter

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.models.webhook import GONE, TIMEOUT, WebhookAttempt, WebhookEndpoint
from conformal_arbitrage.store import events, integrity, outbox
from conformal_arbitrage.store.outbox import Delivery
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import DAY

_log = logging.getLogger("conformal_arbitrage.gateway")
RESTART_AFTER = 5.0
"""Seconds before a job that failed is started again."""
SIGN_EVERY = 1.0
SWEEP_EVERY = 60.0
PRUNE_EVERY = 3600.0
COUNT_EVERY = 5.0
GATHER_EVERY = 60.0
WEBHOOKS_EVERY = 1.0
WEBHOOKS_AT_ONCE = 4
WEBHOOK_LEASE = 2 * TIMEOUT
DELAYS = (5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
"""Seconds until each further attempt, give or take a fifth; after the last one, the message is given up."""
LONGEST_DELAY = 86400.0
"""The most that a receiver can ask to wait."""


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
            await _cancel(task)

    async def _keep_running(self, name: str, run: Callable[[], Coroutine[object, object, None]]) -> None:
        while True:
            job = asyncio.create_task(run())
            try:
                await asyncio.wait({job}, timeout=RESTART_AFTER)
                if not job.done():
                    self.failed.pop(name, None)
                    await asyncio.wait({job})
            finally:
                if not job.done():
                    await _cancel(job)
            error = job.exception()
            if error is None:
                return  # there was nothing to do
            self.failed[name] = f"it failed with {type(error).__name__}; the log has the reason"
            self._failures.labels(name).inc()
            _log.error("the background job %r failed, and starts again in %g s", name, RESTART_AFTER, exc_info=error)
            await asyncio.sleep(RESTART_AFTER)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


class Housekeeper:
    """Keeps a store in order, in the background.

    Args:
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


async def keep_up(work: Callable[[], Awaitable[object]], pause: float, *, said: str = "") -> None:
    """Work on what waits, again at once while there was some, else after a pause; without the store it waits.

    Args:
        work: tells whether there was anything.
        said: what to log if the store is unreachable; nothing where requests report that.
    """
    while True:
        busy = None
        try:
            busy = await work()
        except StoreError as error:
            if said:
                _log.warning("%s: %s", said, error)
        if not busy:
            await asyncio.sleep(pause)


async def _repeat(work: Callable[[], Awaitable[object]], seconds: float) -> None:
    """Work again and again; if the store is unreachable, requests report that, and this waits."""
    while True:
        try:
            await work()
        except StoreError as error:
            _log.warning("the record could not be kept in order for now: %s", error)
        await asyncio.sleep(seconds)


class WebhookSender:
    """Sends what is queued for some webhooks, less and less often to a receiver that fails, for three days.

    Messages are sent at least once: they wait in the store, any gateway of the database sends them, and one that dies
    while sending leaves a lease that ends. Every webhook is served on its own, so that none waits for another.
    """

    def __init__(self, store: Store, webhooks: Sequence[WebhookEndpoint], metrics: Metrics) -> None:
        self._store = store
        self._webhooks = webhooks
        self._metrics = metrics

    async def run(self) -> None:
        """Send until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for webhook in self._webhooks:
                    group.create_task(keep_up(partial(self.send_due, webhook), WEBHOOKS_EVERY))
        finally:
            for webhook in self._webhooks:
                await webhook.close()

    async def send_due(self, webhook: WebhookEndpoint) -> int:
        """Send some of the messages that are due; return how many there were."""
        deliveries = await self._store.run(
            outbox.take_deliveries, webhook.name, limit=WEBHOOKS_AT_ONCE, lease=WEBHOOK_LEASE
        )
        outcomes = await asyncio.gather(
            *(self._attempt(webhook, delivery) for delivery in deliveries), return_exceptions=True
        )
        attempts = [_as_attempt(outcome, delivery) for outcome, delivery in zip(outcomes, deliveries, strict=True)]
        for delivery, attempt in sorted(zip(deliveries, attempts, strict=True), key=lambda pair: bool(pair[1].problem)):
            await self._settle(delivery, attempt)
        return len(deliveries)

    async def _attempt(self, webhook: WebhookEndpoint, delivery: Delivery) -> WebhookAttempt:
        if not delivery.intact:
            return WebhookAttempt(problem="it was changed in the store")
        return await webhook.send(delivery.id, delivery.body.encode())

    async def _settle(self, delivery: Delivery, attempt: WebhookAttempt) -> None:
        """Note how an attempt ended."""
        name, problem = delivery.endpoint, attempt.problem
        if problem is None:
            await self._store.run(outbox.finish_delivery, delivery)
            self._metrics.webhook(name, "delivered")
        elif attempt.status == GONE:
            count = await self._store.run(outbox.abandon_deliveries, name, error=problem)
            self._metrics.webhook(name, "given_up", count)
            _log.error(
                "webhook %s wants no more messages (status 410); %d are given up", name, count, extra=_named(delivery)
            )
        elif not delivery.intact or delivery.attempts > len(DELAYS):
            await self._store.run(outbox.finish_delivery, delivery, error=problem)
            self._metrics.webhook(name, "given_up")
            _log.error("a message to webhook %s is given up: %s", name, problem, extra=_named(delivery))
        else:
            delay = DELAYS[delivery.attempts - 1] * random.uniform(0.8, 1.2)
            wait = min(LONGEST_DELAY, max(delay, attempt.retry_after or 0.0))
            await self._store.run(outbox.postpone_delivery, delivery, seconds=wait, error=problem)
            self._metrics.webhook(name, "postponed")
            _log.warning(
                "a message to webhook %s is sent again in %.0f s: %s", name, wait, problem, extra=_named(delivery)
            )


def _as_attempt(outcome: WebhookAttempt | BaseException, delivery: Delivery) -> WebhookAttempt:
    """Return how an attempt ended; a bug counts as a failure, and must not stop other messages."""
    if isinstance(outcome, WebhookAttempt):
        return outcome
    _log.error("a message to webhook %s failed", delivery.endpoint, exc_info=outcome, extra=_named(delivery))
    return WebhookAttempt(problem=f"sending it failed ({type(outcome).__name__})")


def _named(delivery: Delivery) -> dict[str, str]:
    return {"id": delivery.id}
