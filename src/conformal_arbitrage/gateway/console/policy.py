"""The page of a policy: what is promised, how it does, and every act that changes what is in force.

Each act says what it does to the promise, asks again, and is logged with the key's id.

Knows nothing of how a certificate is checked or made.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.collecting.renewal import Outlook
from conformal_arbitrage.errors import ArbitrageError, CertificateError, OptionError, RequestError, StoreError
from conformal_arbitrage.gateway.console.frontier import Frontiers
from conformal_arbitrage.gateway.console.overview import DAYS, OverviewPage, summed
from conformal_arbitrage.gateway.console.parts import ConsoleParts
from conformal_arbitrage.gateway.console.rendering import redirect
from conformal_arbitrage.gateway.console.visits import Visit
from conformal_arbitrage.gateway.policy_table import LivePolicy, identities_of_pair
from conformal_arbitrage.live.watching import voided
from conformal_arbitrage.store.base import PolicyVersion
from conformal_arbitrage.store.record import JSONObject
from conformal_arbitrage.types import DAY

_log = logging.getLogger("conformal_arbitrage.gateway")
_LONGEST_REASON = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownVersion:
    """A version of a policy as the page shows it; `certificate` is None if the stored document cannot be read."""

    version: PolicyVersion
    certificate: Certificate | None


class PolicyPage:
    """The routes under /console/policies/{name}."""

    def __init__(self, parts: ConsoleParts, overview: OverviewPage) -> None:
        self._parts = parts
        self._overview = overview
        self._frontiers = Frontiers(parts)

    async def policy(self, visit: Visit) -> Response:
        """GET: everything about a policy."""
        return await self._page(visit, self._parts.policy(visit))

    async def _page(self, visit: Visit, live: LivePolicy, **more: Any) -> Response:
        parts, now = self._parts, self._parts.clock()
        since = await parts.changes(visit)
        tallies = summed(await parts.store.tallies(since=now - DAYS * DAY))
        history = [_shown(version) for version in await parts.store.policy_history(live.name)]
        earlier = _earlier(history)
        void = None if earlier is None else voided(await parts.store.prospect(live.name, earlier.version.certificate))
        card = await self._overview.card(live, tallies)
        values: dict[str, Any] = {
            "live": live, "certificate": live.certificate, "days": DAYS, "history": history, "earlier": earlier,
            "void": void, "card": card, "ahead": await self._ahead(live), "identities": _identities(live),
            "install": None, "refused": None, "looked": await self._frontiers.shown(live, card.tally, visit.query),
        }  # fmt: skip
        return parts.pages.page("policy.html", visit, since=since, **{**values, **more})

    async def _ahead(self, live: LivePolicy) -> Outlook | str:
        """Return where the policy stands in its schedule of renewals, or why it has none."""
        if live.certificate is None:
            return "there is no certificate of a single pair of models to renew"
        try:
            return await self._parts.renewer.ahead(live.name)
        except StoreError:
            raise
        except ArbitrageError as error:
            return str(error)

    async def check(self, visit: Visit) -> Response:
        """POST .../check: say what installing a certificate would change; nothing is installed."""
        live = self._parts.policy(visit)
        text = visit.form.get("certificate", "")
        try:
            new = await self._checked(live.name, text)
        except RequestError as error:
            return await self._page(visit, live, refused=str(error))
        forfeited = await self._parts.policies.forfeits(live.name, new.to_dict())
        install = {"text": text, "certificate": new, "changes": _changes(live, new), "forfeited": forfeited}
        return await self._page(visit, live, install=install)

    async def _checked(self, name: str, text: str) -> Certificate:
        """Return a certificate that could be installed now.

        Raises:
            RequestError: it is not one, or it cannot be used with this policy's models; the reason is in it.
        """
        document = _document(text)
        await self._parts.policies.install(name, document, by="", dry_run=True)
        try:
            return Certificate.from_dict(dict(document))
        except CertificateError as error:
            raise RequestError(str(error), status=422) from error

    async def install(self, visit: Visit) -> Response:
        """POST .../install: put a certificate in force."""
        name = self._name(visit)
        version = await self._parts.policies.install(
            name, _document(visit.form.get("certificate", "")), by=visit.who.key_id, dry_run=False
        )
        return self._done(visit, name, "installed", version)

    async def roll_back(self, visit: Visit) -> Response:
        """POST .../rollback: go back to the version before."""
        name = self._name(visit)
        return self._done(visit, name, "rolled back", await self._parts.policies.rollback(name, by=visit.who.key_id))

    async def lift(self, visit: Visit) -> Response:
        """POST .../lift: end safe mode without a new certificate."""
        name, reason = self._name(visit), visit.form.get("reason", "").strip()
        if not 0 < len(reason) <= _LONGEST_REASON:
            raise RequestError(f"Say why, in 1 to {_LONGEST_REASON} characters: the record keeps it.", status=422)
        if await self._parts.store.lift(name, reason=reason, by=visit.who.key_id) is None:
            raise RequestError(f"Policy {name} has no alarm that stands.", status=409)
        await self._parts.policies.refresh(await self._parts.store.change_count())
        return self._done(visit, name, "lifted", None)

    async def renew(self, visit: Visit) -> Response:
        """POST .../renew: calibrate on the rows that the schedule names, and install whatever comes out."""
        name = self._name(visit)
        version = await self._parts.renewer.renew_now(name, by=visit.who.key_id)
        if version is None:
            raise RequestError(
                "No renewal is due, or a version was installed or an alarm raised meanwhile.", status=409
            )
        return self._done(visit, name, "renewed", version)

    async def choose(self, visit: Visit) -> Response:
        """POST .../choose: set a dial to another of its stops."""
        name = self._name(visit)
        try:
            version = await self._parts.renewer.choose(name, float(visit.form.get("alpha", "")), by=visit.who.key_id)
        except (ValueError, CertificateError, OptionError) as error:
            raise RequestError(f"The dial cannot be set to that: {error}", status=422) from error
        return self._done(visit, name, "chose a stop of the dial for", version)

    def _name(self, visit: Visit) -> str:
        """Return the policy that a form is about; one that is out of service may be repaired."""
        name = visit.named("name")
        visit.who.check_policy(name)
        if name not in self._parts.config.policies:
            raise RequestError(f"There is no policy {name:.80}.", status=404)
        return name

    def _done(self, visit: Visit, name: str, what: str, version: PolicyVersion | None) -> Response:
        number = "" if version is None else f", version {version.version}"
        _log.info("%s %s policy %s%s", visit.who.key_id, what, name, number, extra={"policy": name})
        return redirect(f"/console/policies/{name}")


def _shown(version: PolicyVersion) -> ShownVersion:
    try:
        return ShownVersion(version=version, certificate=Certificate.from_dict(dict(version.certificate)))
    except CertificateError:
        return ShownVersion(version=version, certificate=None)


def _earlier(history: list[ShownVersion]) -> ShownVersion | None:
    """Return the version that rolling back would reactivate."""
    if not history:
        return None
    wanted = history[0].version.origin - 1
    return next((one for one in history if one.version.version == wanted), None)


def _document(text: str) -> JSONObject:
    try:
        document: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"That is not a certificate: it is not JSON ({error}).", status=422) from error
    if not isinstance(document, Mapping):
        raise RequestError("That is not a certificate: it is not a JSON object.", status=422)
    return document  # pyright: ignore[reportUnknownVariableType]


def _changes(live: LivePolicy, new: Certificate) -> list[tuple[str, str, str]]:
    """Return what a certificate would change: name, now, then."""
    old = live.certificate
    facts = {} if old is None else dict(old.facts())
    then = dict(new.facts())
    names = dict.fromkeys([*facts, *then])
    return [(name, facts.get(name, "–"), then.get(name, "–")) for name in names if facts.get(name) != then.get(name)]


def _identities(live: LivePolicy) -> dict[str, list[tuple[str, str]]]:
    """Return what is known of each model, as a table."""
    return {
        role: [(name, str(value)) for name, value in sorted(identity.items()) if value is not None]
        for role, identity in identities_of_pair(live.pair).items()
    }
