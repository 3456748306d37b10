"""Watch the ledgers of all policies: settle what became known, follow what any gateway wrote, and raise alarms.

Every gateway on a database watches all of its policies. They see the same rows, so they agree; an alarm is recorded once,
whichever comes first, and the change count tells the others.

Knows nothing of HTTP, or of how decisions are made.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.errors import ArbitrageError, CertificateError, DamagedError
from conformal_arbitrage.gateway.audit_rows import LossFacts, WatchedPolicy, settlement
from conformal_arbitrage.gateway.policy_table import LivePolicy, PolicyTable
from conformal_arbitrage.gateway.upkeep import expired_policy, guarded_policy
from conformal_arbitrage.live.aging import Age, age_of
from conformal_arbitrage.live.drifting import DriftWatch
from conformal_arbitrage.live.guarding import CertificateGuard
from conformal_arbitrage.live.known_losses import KnownLosses
from conformal_arbitrage.live.watching import LedgerWatch, standing_document
from conformal_arbitrage.monitoring.states import Cause, Standing
from conformal_arbitrage.store.base import Store
from conformal_arbitrage.store.ledger_base import LedgerNews, Settlement
from conformal_arbitrage.store.record import AlarmBody, DecisionRecord, FeedbackBody

_log = logging.getLogger("conformal_arbitrage.gateway")
PAUSE = 0.25
SERVED_EVERY = 10.0
"""Seconds between two computations of what was served, which reads a whole ledger where fallbacks are in it."""
_AT_ONCE = 200
_CAUSES: Mapping[str, Cause] = {"losses": "losses", "failing audits": "failing audits"}


class Watcher:
    """Follows the ledgers of the policies in force.

    Args:
        store: where the ledgers are.
        policies: which are in force.
        clock: the time, in seconds since 1970.
        secret: the project's, behind the draws of drift notices; None for no such notices.
    """

    def __init__(
        self,
        store: Store,
        policies: PolicyTable,
        clock: Callable[[], float] = time.time,
        secret: bytes | None = None,
    ) -> None:
        self._secret = secret
        self._store = store
        self._policies = policies
        self._clock = clock
        self._watches: dict[str, LedgerWatch] = {}
        self._facts: dict[tuple[str, int], LossFacts | None] = {}
        self._callers: dict[str, bool] = {}
        self._served_at: dict[str, float] = {}
        self._trouble = ""

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                busy = await self.turn()
                self._trouble = ""
            except ArbitrageError as error:  # what is in the ledger stays, and is looked at again
                busy = False
                if str(error) != self._trouble:
                    _log.error("the ledgers cannot be followed for now: %s", error)
                self._trouble = str(error)
            if not busy:
                await asyncio.sleep(PAUSE)

    async def turn(self) -> bool:
        """Take everything that is new once; return whether there is likely to be more."""
        settled = await self._settle()
        await self._policies.refresh(await self._store.change_count())
        for live in self._policies.all():
            self._put(live, expired_policy(live, self._clock()))
        for live in self._policies.all():
            await self._follow(live)
        return settled

    async def _follow(self, live: LivePolicy) -> None:
        watch = self._watch(live)
        if watch is None:
            return
        await watch.follow()
        if watch.guard is not None:
            self._put(live, guarded_policy(live, watch.guard))
        now = self._clock()
        if live.alarm is None and watch.red(now):
            await self._raise(live, watch.standing(now))
        if now - self._served_at.get(live.name, 0.0) >= SERVED_EVERY:
            self._served_at[live.name] = now
            await watch.refresh_served(now)

    def _put(self, live: LivePolicy, changed: LivePolicy) -> None:
        """Put a policy in force that changed while its version stays."""
        if changed.expired > live.expired:
            _log.warning("%s", changed.forfeited, extra={"policy": live.name})
        if changed is not live:
            self._policies.swap(live, changed)

    def _watch(self, live: LivePolicy) -> LedgerWatch | None:
        """Return what follows a policy's ledger; begins anew with every version, lift and change of models."""
        if live.watched is None:
            self._watches.pop(live.name, None)
            return None
        watch = self._watches.get(live.name)
        if watch is None or watch.key != live.watched.key:
            watch = self._watches[live.name] = self._new_watch(live, live.watched)
        return watch

    def _new_watch(self, live: LivePolicy, watched: WatchedPolicy) -> LedgerWatch:
        certificate, guard, drift = live.certificate, None, None
        if certificate is not None:
            guard = CertificateGuard(certificate) if live.guarded is not None else None
            drift = None if self._secret is None else DriftWatch(self._store, watched.key, certificate, self._secret)
        rate = live.settings.audit_rate
        return LedgerWatch(self._store, watched.key, watched.lines, audit_rate=rate, guard=guard, drift=drift)

    async def _raise(self, live: LivePolicy, standing: Standing) -> None:
        figures, key = standing.figures, live.watched.key if live.watched is not None else None
        line, evidence = figures.lines.red, figures.log_peak[1]
        if key is None or line is None or evidence is None:
            raise AssertionError("red needs a red line")
        alarm = AlarmBody(
            version=key.version,
            lifts=key.lifts,
            identities_sha256=key.identities_sha256,
            group=key.group or None,
            cause=standing.cause or "losses",
            audits=figures.known + figures.pending + figures.missing,
            known=figures.known,
            missing=figures.missing,
            mean=standing.mean,
            line=line,
            log_evidence=evidence,
        )
        if await self._store.raise_alarm(live.name, alarm):
            _log.error(
                "red: %s; the policy serves in safe mode until the alarm is lifted or a certificate is installed",
                "; ".join(standing.reasons),
                extra={"policy": live.name},
            )
        await self._policies.refresh(await self._store.change_count())

    async def _settle(self) -> bool:
        """Write the losses that became known into the ledger; return whether there may be more."""
        names = [live.name for live in self._policies.all()]
        news = await self._store.ledger_news(names, limit=_AT_ONCE)
        settlements: list[Settlement] = []
        for one in news:
            record = await self._record(one.id)
            facts = await self._facts_of(one)
            if record is not None and any(feedback.by for feedback in record.feedback):
                await self._learn_callers(record.feedback)
            settlements.append(settlement(one, record, facts, self._clock(), self._trusts(one.key.policy)))
            await asyncio.sleep(0)  # decisions first
        await self._store.settle_rows(settlements)
        return len(news) == _AT_ONCE

    async def _record(self, id: str) -> DecisionRecord | None:
        """Return a decision; None if it was pruned or is damaged, so that its outcome stays unknown and others do not."""
        try:
            return await self._store.record(id)
        except DamagedError as error:
            _log.error("an audited decision cannot be read, and counts as missing when it is due: %s", error)
            return None

    async def _facts_of(self, news: LedgerNews) -> LossFacts | None:
        """Return what losses under a version depend on."""
        name, version = news.key.policy, news.key.version
        if (name, version) not in self._facts:
            for one in await self._store.policy_history(name):
                self._facts[name, one.version] = _facts(one.certificate)
        return self._facts.get((name, version))

    async def _learn_callers(self, feedback: tuple[FeedbackBody, ...]) -> None:
        """Look up which keys are callers' own."""
        if any(one.by is not None and one.by not in self._callers for one in feedback):
            self._callers |= {key.id: key.scope == "call" for key in await self._store.keys()}

    def _trusts(self, policy: str) -> Callable[[FeedbackBody], bool]:
        """Return what tells whether a label counts: a caller could hide its losses with labels of its own."""
        if self._policies.lets_callers_grade(policy):
            return lambda _: True
        return lambda feedback: feedback.by is None or not self._callers.get(feedback.by, False)

    def standings(self) -> dict[str, tuple[Standing, LedgerWatch]]:
        """Return where every policy with a monitor stands."""
        shown = {live.name: self.standing(live) for live in self._policies.all()}
        return {name: standing for name, standing in shown.items() if standing is not None}

    def standing(self, live: LivePolicy) -> tuple[Standing, LedgerWatch] | None:
        """Return where a policy stands and what follows its ledger; None without a monitor, or before the first look."""
        watch = self._read(live)
        if watch is None:
            return None
        cause = None if live.alarm is None else _CAUSES.get(live.alarm.cause, "losses")
        age = self.age(live)
        return watch.standing(self._clock(), alarmed=cause, stale=None if age is None else age.stale), watch

    def _read(self, live: LivePolicy) -> LedgerWatch | None:
        """Return what follows a policy's ledger, once it has been read."""
        watch = self._watches.get(live.name)
        ours = watch is not None and live.watched is not None and watch.key == live.watched.key
        return watch if ours and watch is not None and watch.read else None

    def ages(self) -> dict[str, Age]:
        """Return how old what is known of every certificate in force is."""
        ages = {live.name: self.age(live) for live in self._policies.all()}
        return {name: age for name, age in ages.items() if age is not None}

    def age(self, live: LivePolicy) -> Age | None:
        """Return how old what is known of a policy's certificate is; None without one, or before the first look."""
        watch, settings = self._read(live), live.settings
        if live.certificate is None or (watch is None and live.watched is not None):
            return None
        return age_of(
            live.certificate,
            KnownLosses() if watch is None else watch.known,
            installed=live.installed,
            now=self._clock(),
            audit_rate=settings.audit_rate,
            max_age=settings.max_age,
        )

    def document(self, live: LivePolicy) -> dict[str, Any]:
        """Return where a policy stands as plain values."""
        shown = self.standing(live)
        stands: dict[str, Any] = {} if shown is None else standing_document(shown[0], shown[1].served)
        alarm = live.alarm
        guard = None if shown is None or shown[1].guard is None else asdict(shown[1].guard.standing())
        drift = None if shown is None or shown[1].drift is None else asdict(shown[1].drift.standing())
        return {
            "policy": live.name,
            "version": live.version,
            "mode": live.mode,
            "guarantee": live.guarantee if live.forfeited is None else "none",
            "reason": live.forfeited,
            "watched": live.watched is not None,
            "unwatched": live.unwatched,
            "lifts": live.lifts,
            "alarm": None if alarm is None else {"cause": alarm.cause, "at": alarm.at, "audits": alarm.audits},
            "guard": guard,
            "drift": drift,
            "age": None if (age := self.age(live)) is None else asdict(age),
            **stands,
        }


def _facts(document: Mapping[str, object]) -> LossFacts | None:
    try:
        return LossFacts.of(Certificate.from_dict(dict(document)))
    except CertificateError:
        return None
