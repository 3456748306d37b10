"""The health page: store, background jobs, upstreams, backlogs; it answers while the store is away.

Knows nothing of decisions.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

from starlette.responses import Response

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.gateway.console.parts import ConsoleParts
from conformal_arbitrage.gateway.console.visits import Visit, Visitor
from conformal_arbitrage.store.base import DeliveryBacklog
from conformal_arbitrage.store.review_base import TeamBacklog
from conformal_arbitrage.store.schema import MIGRATIONS
from conformal_arbitrage.upstream.webhook import WebhookAttempt

_log = logging.getLogger("conformal_arbitrage.gateway")


class HealthPage:
    """GET /console/health."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts
        self._started = time.time()

    async def health(self, visit: Visit) -> Response:
        """Show how the gateway is."""
        return await self._full(visit)

    async def test_webhook(self, visit: Visit) -> Response:
        """POST /console/webhooks/{name}/test: send a webhook a test message, and show what came back."""
        name = visit.named("name")
        attempt = await self._parts.webhooks.attempt(name)
        _log.info("%s tested webhook %s: %s", visit.who.key_id, name, attempt.problem or "accepted")
        return await self._full(visit, name, attempt)

    async def _full(self, visit: Visit, tested: str = "", attempt: WebhookAttempt | None = None) -> Response:
        store, webhooks = self._parts.store, self._parts.config.gateway.webhooks
        begun = time.perf_counter()
        await store.writable()
        took = time.perf_counter() - begun
        return self._page(
            visit,
            error=None,
            took=took,
            audits=await store.audit_backlog(),
            teams=await self._teams(visit.who),
            webhooks=_lines(webhooks, await store.delivery_backlog()) if webhooks else [],
            tested=tested,
            attempt=attempt,
        )

    async def _teams(self, visitor: Visitor) -> list[TeamBacklog]:
        """Return the teams with something before them; reviewers see their own."""
        people = self._parts.desk.people()
        own = {team: names for team, names in people.items() if visitor.is_admin or visitor.name in names}
        return [one for one in await self._parts.store.team_backlogs(own) if one.open]

    def without_store(self, visit: Visit, error: StoreError) -> Response:
        """Show what is known without the store; what it said itself is for those who are signed in."""
        message = (
            str(error) if visit.visitor is not None else "The store does not answer; the gateway's log has the reason."
        )
        return self._page(visit, error=message, took=None, audits=[], teams=[], webhooks=[], tested="", attempt=None)

    def _page(self, visit: Visit, *, error: str | None, **values: Any) -> Response:
        parts = self._parts
        known = visit.visitor is not None
        resting = sorted({breaker.origin for breaker in parts.breakers if breaker.resting}) if known else []
        problems = dict(parts.background.failed) if known else {}
        return parts.pages.page(
            "health.html", visit, status=200 if error is None else 503, error=error, known=known,
            upstreams=sorted({breaker.origin for breaker in parts.breakers}) if known else [],
            resting=resting, problems=problems, schema=len(MIGRATIONS), version=version("conformal-arbitrage"),
            started=self._started, database=_kind(parts.config.gateway.database), **values,
        )  # fmt: skip


def _kind(database: str) -> str:
    return "PostgreSQL" if "://" in database else "SQLite"


def _lines(names: Iterable[str], backlogs: Sequence[DeliveryBacklog]) -> list[tuple[str, DeliveryBacklog | None]]:
    """Return every webhook with what waits for it."""
    waiting = {one.endpoint: one for one in backlogs}
    return [(name, waiting.get(name)) for name in names]
