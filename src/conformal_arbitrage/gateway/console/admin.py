"""Keys and health."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from conformal_arbitrage.calibration.certificate import package_version
from conformal_arbitrage.errors import RequestError, StoreError
from conformal_arbitrage.gateway.api import LONGEST_REASON
from conformal_arbitrage.gateway.audience import Views
from conformal_arbitrage.gateway.auth import new_key
from conformal_arbitrage.gateway.console.render import Pages, Visit, redirect
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.models.webhook import WebhookAttempt
from conformal_arbitrage.store import keys as stored_keys
from conformal_arbitrage.store import outbox, reviews
from conformal_arbitrage.store import policies as stored_policies
from conformal_arbitrage.store.keys import Scope
from conformal_arbitrage.store.outbox import OutboxBacklog
from conformal_arbitrage.store.record import new_id
from conformal_arbitrage.store.schema import MIGRATIONS
from conformal_arbitrage.types import DAY

if TYPE_CHECKING:
    from conformal_arbitrage.gateway.gateway import Gateway

# --- The page of API keys ---


_log = logging.getLogger("conformal_arbitrage.gateway")
_SCOPES: dict[Scope, str] = {
    "call": "ask for decisions, and see its own records",
    "review": "review, and see the records that people have judged or need not",
    "operate": "see figures, and no record",
    "admin": "see everything, and change policies and keys",
}
_LONGEST_LABEL = 200


class KeysPage:
    """The routes under /console/keys."""

    def __init__(self, pages: Pages, views: Views, config: Config) -> None:
        self._pages = pages
        self._views = views
        self._config = config

    async def keys(self, visit: Visit) -> Response:
        """GET /console/keys."""
        return await self._page(visit)

    async def create(self, visit: Visit) -> Response:
        """POST /console/keys: make a key, and show it this once."""
        label, days = visit.form.get("label", "").strip(), visit.form.get("days", "").strip()
        scope: Scope | None = next((known for known in _SCOPES if known == visit.form.get("scope")), None)
        if scope is None or not 0 < len(label) <= _LONGEST_LABEL:
            raise RequestError(
                f"A key needs a scope, and a label of 1 to {_LONGEST_LABEL} characters that says whose it is.",
                status=422,
            )
        policy = visit.form.get("policy", "")
        caller = visit.who.caller
        if policy or caller.policies is not None:
            caller.check_policy(policy)
        if policy and policy not in self._config.policies:
            raise RequestError(f"There is no policy {policy:.80}.", status=422)
        first = visit.who.keyless
        if first and scope != "admin":
            raise RequestError(
                "The first key has to have scope admin: from then on this console needs a key, and no other could make one.",
                status=422,
            )
        key, sha256 = new_key()
        id = new_id()
        await self._views.of(caller).run(
            stored_keys.create,
            id=id,
            sha256=sha256,
            scope=scope,
            label=label,
            expires=_expiry(days),
            policies=(policy,) if policy else None,
        )
        _log.info("key %s of scope %s was made by %s", id, scope, visit.who.key_id)
        if first:  # who sees this page is not signed in any more
            return self._pages.page("first-key.html", replace(visit, visitor=None), key=key)
        return await self._page(visit, created=key)

    async def revoke(self, visit: Visit) -> Response:
        """POST /console/keys/revoke."""
        id = visit.form.get("id", "")[:200]
        if id == visit.who.key_id:
            raise RequestError("You are signed in with this key; sign in with another one to revoke it.", status=409)
        if not await self._views.of(visit.who.caller).run(stored_keys.revoke, id):
            raise RequestError("There is no such key.", status=404)
        _log.info("key %s was revoked by %s", id, visit.who.key_id)
        return redirect("/console/keys")

    async def exclude(self, visit: Visit) -> Response:
        """POST /console/keys/exclude: exclude a key from the promise of a policy, or end that."""
        id, policy, reason = (visit.form.get(name, "").strip() for name in ("id", "policy", "reason"))
        caller, ends = visit.who.caller, visit.form.get("end") == "yes"
        caller.check_policy(policy)
        if policy not in self._config.policies:
            raise RequestError(f"There is no policy {policy:.80}.", status=422)
        if not 0 < len(reason) <= LONGEST_REASON:
            raise RequestError(f"Say why, in 1 to {LONGEST_REASON} characters; the record keeps it.", status=422)
        views = self._views.of(caller)
        if id not in {key.id for key in await views.run(stored_keys.list_all)}:
            raise RequestError("There is no such key.", status=404)
        await views.run(stored_policies.exclude, policy, id, reason=reason, by=visit.who.key_id, ends=ends)
        return redirect("/console/keys")

    async def _page(self, visit: Visit, created: str | None = None) -> Response:
        caller = visit.who.caller
        keys = list(reversed(await self._views.of(caller).run(stored_keys.list_all)))
        names = [name for name in self._config.policies if caller.sees(name)]
        exclusions = await self._views.of(caller).run(stored_policies.exclusions, names)
        excluded = {key.id: [name for name in names if key.id in exclusions[name].keys] for key in keys}
        return self._pages.page(
            "keys.html", visit, keys=[(key, self._teams(key.label)) for key in keys], made=created, scopes=_SCOPES,
            names=names, bound=caller.policies is not None, excluded=excluded, now=time.time(),
        )  # fmt: skip

    def _teams(self, label: str) -> list[str]:
        """Return the teams that a key's label is on."""
        return [name for name, team in self._config.teams.items() if label in (*team.members, *team.leads)]


def _expiry(days: str) -> float | None:
    """Return when a key stops being valid."""
    if not days:
        return None
    try:
        value = float(days)
    except ValueError as error:
        raise RequestError("Days are a number.", status=422) from error
    if not 0 < value <= 36500:
        raise RequestError("A key is valid for more than 0 and at most 36,500 days.", status=422)
    return time.time() + value * DAY


# --- The health page ---


class HealthPage:
    """GET /console/health."""

    def __init__(self, gateway: "Gateway", pages: Pages) -> None:
        self._pages = pages
        self._store = gateway.store
        self._config = gateway.config
        self._queue = gateway.queue
        self._webhooks = gateway.webhook_tests
        self._background = gateway.background
        self._breakers = gateway.breakers
        self._started = time.time()

    async def health(self, visit: Visit) -> Response:
        """Show how the gateway is."""
        visit.who.caller.check_unbound("the health of the gateway")
        return await self._full(visit)

    async def test_webhook(self, visit: Visit) -> Response:
        """POST /console/webhooks/{name}/test: send a webhook a test message, and show what came back."""
        visit.who.caller.check_unbound("a test of a webhook")
        name = visit.named("name")
        attempt = await self._webhooks.attempt(name)
        _log.info("%s tested webhook %s: %s", visit.who.key_id, name, attempt.problem or "accepted")
        return await self._full(visit, name, attempt)

    async def _full(self, visit: Visit, tested: str = "", attempt: WebhookAttempt | None = None) -> Response:
        store, webhooks = self._store, self._config.gateway.webhooks
        begun = time.perf_counter()
        await store.writable()
        took = time.perf_counter() - begun
        return self._page(
            visit,
            error=None,
            took=took,
            audits=await store.run(outbox.audit_backlog),
            teams=[backlog for backlog in await store.run(reviews.backlogs, self._queue.people()) if backlog.open],
            webhooks=_lines(webhooks, await store.run(outbox.delivery_backlog)) if webhooks else [],
            tested=tested,
            attempt=attempt,
        )

    def without_store(self, visit: Visit, error: StoreError) -> Response:
        """Show what is known without the store; what it said itself is for those who are signed in."""
        message = (
            str(error) if visit.visitor is not None else "The store does not answer; the gateway's log has the reason."
        )
        return self._page(visit, error=message, took=None, audits=[], teams=[], webhooks=[], tested="", attempt=None)

    def _page(self, visit: Visit, *, error: str | None, **values: Any) -> Response:
        known = visit.visitor is not None
        resting = sorted({breaker.origin for breaker in self._breakers if breaker.resting}) if known else []
        problems = dict(self._background.failed) if known else {}
        return self._pages.page(
            "health.html", visit, status=200 if error is None else 503, error=error, known=known,
            upstreams=sorted({breaker.origin for breaker in self._breakers}) if known else [],
            resting=resting, problems=problems, schema=len(MIGRATIONS), version=package_version(),
            started=self._started, database=_kind(self._config.gateway.database), **values,
        )  # fmt: skip


def _kind(database: str) -> str:
    return "PostgreSQL" if "://" in database else "SQLite"


def _lines(names: Iterable[str], backlogs: Sequence[OutboxBacklog]) -> list[tuple[str, OutboxBacklog | None]]:
    """Return every webhook with what waits for it."""
    waiting = {backlog.name: backlog for backlog in backlogs}
    return [(name, waiting.get(name)) for name in names]
