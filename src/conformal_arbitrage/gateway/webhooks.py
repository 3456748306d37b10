"""Webhooks: send queued messages in the background, less and less often to a receiver that fails, for three days.

Messages are sent at least once: they wait in the store, any gateway of the database sends them, and one that dies while
sending leaves a lease that ends. Every webhook is served on its own, so that none waits for another.
"""

import asyncio
import logging
import random
from collections.abc import Sequence

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.models.webhook import GONE, TIMEOUT, WebhookAttempt, WebhookEndpoint
from conformal_arbitrage.store import outbox
from conformal_arbitrage.store.outbox import Delivery
from conformal_arbitrage.store.session import Store

_log = logging.getLogger("conformal_arbitrage.gateway")
PAUSE = 1.0
AT_ONCE = 4
LEASE = 2 * TIMEOUT
DELAYS = (5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
"""Seconds until each further attempt, give or take a fifth; after the last one, the message is given up."""
LONGEST_DELAY = 86400.0
"""The most that a receiver can ask to wait."""


class WebhookSender:
    """Sends what is queued for some webhooks.

    Args:
        store: where messages wait.
        webhooks: the receivers.
        metrics: counts attempts.
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
                    group.create_task(self._serve(webhook))
        finally:
            for webhook in self._webhooks:
                await webhook.close()

    async def _serve(self, webhook: WebhookEndpoint) -> None:
        while True:
            try:
                count = await self.send_due(webhook)
            except StoreError:
                count = 0  # the database is unreachable; requests report that, messages wait
            if not count:
                await asyncio.sleep(PAUSE)

    async def send_due(self, webhook: WebhookEndpoint) -> int:
        """Send some of the messages that are due; return how many there were."""
        deliveries = await self._store.run(outbox.take_deliveries, webhook.name, limit=AT_ONCE, lease=LEASE)
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
