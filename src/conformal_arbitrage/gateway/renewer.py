"""Renewals by the gateway itself, loaded by the first that a policy or a person asks for."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.collecting.renewal import (
    Outlook,
    RenewablePolicy,
    Successor,
    import_log,
    install_successor,
    outlook,
    renewable,
    successor,
    tighter,
)
from conformal_arbitrage.errors import ArbitrageError, CertificateError
from conformal_arbitrage.gateway.policies import LivePolicy, PolicyTable, identities_of_pair
from conformal_arbitrage.gateway.watcher import Watcher
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.store.policies import PolicyVersion
from conformal_arbitrage.store.session import Store

_log = logging.getLogger("conformal_arbitrage.gateway")
RENEW_EVERY = 60.0
"""Seconds between two looks at the schedule; the time of a renewal must not depend on losses."""


class Renewer:
    """Renews certificates by itself: those of the schedule, and tighter ones while a policy is amber.

    Several gateways may find the same renewal due; the first to install it wins, and the others see that it is done.
    After an alarm a person has to renew the certificate, since that ends safe mode.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        policies: PolicyTable,
        secret: ProjectSecret,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._store = store
        self._policies = policies
        self._secret = secret
        self._clock = clock

    async def import_logs(self) -> None:
        """Keep the rows of the logs that the configuration names.

        Raises:
            ConfigError: one is not the log of a certificate of its policy.
        """
        for name, settings in self._config.policies.items():
            if settings.log is not None:
                problem = await import_log(self._store, self._target(name), Path(self._config.folder) / settings.log)
                if problem is not None:
                    _log.warning("%s", problem, extra={"policy": name})

    async def run(self, watcher: Watcher) -> None:
        """Renew what is due, until cancelled."""
        while True:
            await self.run_once(watcher)
            await asyncio.sleep(RENEW_EVERY)

    async def run_once(self, watcher: Watcher) -> None:
        """Renew what is due now; a policy that cannot be renewed is no reason not to renew the others."""
        behind = self._policies.behind()
        for live in self._policies.all():
            if live.name in behind:
                continue  # its models are being replaced
            try:
                if live.settings.renew == "scheduled" and live.certificate is not None:
                    await self._renew(live.name)
                if live.settings.tighten and _loses(watcher, live):
                    await self._tighten(live.name)
            except ArbitrageError as error:
                _log.warning("the certificate was not renewed: %s", error, extra={"policy": live.name})

    async def ahead(self, name: str) -> Outlook:
        """Return where a policy stands in its schedule.

        Raises:
            ArbitrageError: its certificate cannot be renewed.
        """
        return await outlook(self._store, self._target(name), now=self._clock())

    async def renew_now(self, name: str, *, by: str) -> PolicyVersion | None:
        """Renew a policy whose renewal is due, after an alarm too; return None if nothing was installed."""
        ahead = await self.ahead(name)
        return (
            await self._install(ahead, await successor(self._store, self._target(name), ahead), by=by)
            if ahead.due
            else None
        )

    async def choose(self, name: str, alpha: float, *, by: str) -> PolicyVersion | None:
        """Set the dial of a policy's certificate to another stop; return None if it stands there.

        Raises:
            CertificateError: it has no dial.
            OptionError: alpha lies below the lowest stop.
        """
        certificate = self._policies.named(name).certificate
        if certificate is None:
            raise CertificateError(f"policy {name} has no certificate of a single pair of models")
        chosen = certificate.choose(alpha)
        if chosen.alpha == certificate.alpha:
            return None
        return await self._policies.install(name, chosen.sign(self._secret).to_dict(), by=by, dry_run=False)

    async def _renew(self, name: str) -> None:
        target = self._target(name)
        ahead = await outlook(self._store, target, now=self._clock())
        if ahead.due and not ahead.chain.alarmed:
            await self._install(ahead, await successor(self._store, target, ahead), by="schedule")

    async def _tighten(self, name: str) -> None:
        target = self._target(name)
        ahead = await outlook(self._store, target, now=self._clock())
        larger = await tighter(self._store, target, ahead, now=self._clock())
        if larger is not None:
            await self._install(ahead, larger, by="tightening")

    async def _install(self, ahead: Outlook, next: Successor, *, by: str) -> PolicyVersion | None:
        self._policies.bind(ahead.policy, next.document())  # or every gateway would take it out of service
        version = await install_successor(self._store, ahead, next, by=by)
        if version is not None:
            message = "version %d is installed by %s, with relaxation %s"
            _log.info(message, version.version, by, next.certificate.relaxation, extra={"policy": ahead.policy})
        return version

    def _target(self, name: str) -> RenewablePolicy:
        identities = identities_of_pair(self._policies.named(name).pair, self._config.policies[name].group)
        return renewable(self._config, name, identities, self._secret)


def _loses(watcher: Watcher, live: LivePolicy) -> bool:
    """Tell whether a policy is amber because of its losses."""
    return any(
        (standing.state, standing.cause) == ("amber", "losses") for standing, _ in watcher.standings_of(live).values()
    )
