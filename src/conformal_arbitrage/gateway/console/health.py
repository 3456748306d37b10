"""The health page: store, background jobs, upstreams, backlogs; it answers while the store is away.

Knows nothing of decisions.
"""

import time
from importlib.metadata import version
from typing import Any

from starlette.responses import Response

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.gateway.console.parts import ConsoleParts
from conformal_arbitrage.gateway.console.visits import Visit
from conformal_arbitrage.store.migrations import MIGRATIONS


class HealthPage:
    """GET /console/health."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts
        self._started = time.time()

    async def health(self, visit: Visit) -> Response:
        """Show how the gateway is."""
        store = self._parts.store
        begun = time.perf_counter()
        await store.writable()
        took = time.perf_counter() - begun
        return self._page(
            visit,
            error=None,
            took=took,
            audits=await store.audit_backlog(),
            webhooks=await store.delivery_backlog() if self._parts.config.gateway.webhooks else None,
        )

    def without_store(self, visit: Visit, error: StoreError) -> Response:
        """Show what is known without the store; what it said itself is for those who are signed in."""
        message = (
            str(error) if visit.visitor is not None else "The store does not answer; the gateway's log has the reason."
        )
        return self._page(visit, error=message, took=None, audits=[], webhooks=None)

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
