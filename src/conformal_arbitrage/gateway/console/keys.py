"""The page of API keys: who has one, make one, revoke one; a new key is shown once, on the reply to its form.

Knows nothing of how keys are checked.
"""

import logging
import time
from dataclasses import replace

from starlette.responses import Response

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.auth import new_key
from conformal_arbitrage.gateway.console.parts import ConsoleParts
from conformal_arbitrage.gateway.console.rendering import redirect
from conformal_arbitrage.gateway.console.visits import Visit
from conformal_arbitrage.store.base import Scope
from conformal_arbitrage.store.ids import new_id
from conformal_arbitrage.types import DAY

_log = logging.getLogger("conformal_arbitrage.gateway")
_SCOPES: dict[Scope, str] = {
    "call": "ask for decisions, and see its own records",
    "review": "review, and see all records",
    "admin": "change policies and keys",
    "metrics": "read /metrics only",
}
_LONGEST_LABEL = 200


class KeysPage:
    """The routes under /console/keys."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts

    async def keys(self, visit: Visit) -> Response:
        """GET /console/keys."""
        return await self._page(visit)

    async def create(self, visit: Visit) -> Response:
        """POST /console/keys: make a key, and show it this once."""
        label, days = visit.form.get("label", "").strip(), visit.form.get("days", "").strip()
        scope: Scope | None = next((one for one in _SCOPES if one == visit.form.get("scope")), None)
        if scope is None or not 0 < len(label) <= _LONGEST_LABEL:
            raise RequestError(
                f"A key needs a scope, and a label of 1 to {_LONGEST_LABEL} characters that says whose it is.",
                status=422,
            )
        policy = visit.form.get("policy", "")
        if policy and policy not in self._parts.config.policies:
            raise RequestError(f"There is no policy {policy:.80}.", status=422)
        first = visit.who.keyless
        if first and scope != "admin":
            raise RequestError(
                "The first key has to have scope admin: from then on this console needs a key, and no other could make one.",
                status=422,
            )
        key, sha256 = new_key()
        id = new_id()
        await self._parts.store.create_key(
            id=id,
            sha256=sha256,
            scope=scope,
            label=label,
            expires=_expiry(days),
            policies=(policy,) if policy else None,
        )
        _log.info("key %s of scope %s was made by %s", id, scope, visit.who.key_id)
        if first:  # who sees this page is not signed in any more
            return self._parts.pages.page("first-key.html", replace(visit, visitor=None), key=key)
        return await self._page(visit, made=key)

    async def revoke(self, visit: Visit) -> Response:
        """POST /console/keys/revoke."""
        id = visit.form.get("id", "")[:200]
        if id == visit.who.key_id:
            raise RequestError("You are signed in with this key; sign in with another one to revoke it.", status=409)
        if not await self._parts.store.revoke_key(id):
            raise RequestError("There is no such key.", status=404)
        _log.info("key %s was revoked by %s", id, visit.who.key_id)
        return redirect("/console/keys")

    async def _page(self, visit: Visit, made: str | None = None) -> Response:
        keys = list(reversed(await self._parts.store.keys()))
        return self._parts.pages.page(
            "keys.html", visit, keys=[(one, self._teams(one.label)) for one in keys], made=made, scopes=_SCOPES,
            names=list(self._parts.config.policies), now=time.time(),
        )  # fmt: skip

    def _teams(self, label: str) -> list[str]:
        """Return the teams that a key's label is on."""
        teams = self._parts.desk.teams.items()
        return [name for name, team in teams if label in (*team.members, *team.leads)]


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
