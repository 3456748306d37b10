"""Watch the ledgers of all policies: settle what became known, follow what any gateway wrote, and raise alarms.

Every gateway on a database watches all of its policies. They see the same rows, so they agree; an alarm is recorded once,
whichever comes first, and the change count tells the others.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from conformal_arbitrage.errors import ArbitrageError, DamagedError
from conformal_arbitrage.gateway.policies import (
    LivePolicy,
    PolicyTable,
    age_limits,
    distrusted_policy,
    expired_policy,
    guarded_policy,
)
from conformal_arbitrage.live.service import (
    Age,
    CertificateGuard,
    KnownLosses,
    LedgerWatch,
    LossFacts,
    age_of,
    alarm_document,
    cause_of,
    false_red_of_policy,
    settlement,
    standing_document,
    worst_of,
)
from conformal_arbitrage.monitoring.monitor import SEVERITY, Standing
from conformal_arbitrage.store import events, ledger, pages
from conformal_arbitrage.store import policies as stored_policies
from conformal_arbitrage.store.ledger import LedgerKey, LedgerNews, Settlement
from conformal_arbitrage.store.record import AlarmBody, DecisionRecord
from conformal_arbitrage.store.session import Store

_log = logging.getLogger("conformal_arbitrage.gateway")
PAUSE = 0.25
SERVED_EVERY = 10.0
"""Seconds between two computations of what was served, which reads a whole ledger where fallbacks are in it."""
_AT_ONCE = 200


class Watcher:
    """Follows the ledgers of the policies in force."""

    def __init__(
        self,
        store: Store,
        policies: PolicyTable,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._policies = policies
        self._clock = clock
        self._watches: dict[str, dict[str, LedgerWatch]] = {}  # by policy, then by ledger: "" without groups
        self._facts: dict[tuple[str, int], LossFacts | None] = {}
        self._served_at: dict[str, float] = {}
        self._missing: dict[LedgerKey, tuple[int, str]] = {}  # how many there are, and whose most of them are, in words
        self._trouble = ""
        self._totals: dict[str, int] = {}

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
            self._put(live, expired_policy(live, self._clock(), await self._decisions(live)))
        for live in self._policies.all():
            try:
                await self._follow(live)
            except DamagedError as error:  # evidence that someone may have written says nothing
                self._put(live, distrusted_policy(live, str(error)))
        return settled

    async def _decisions(self, live: LivePolicy) -> int | None:
        """Return how many decisions all gateways made under a version, as far as they are counted, if that matters."""
        if live.settings.max_decisions is None:
            return None
        total = self._totals[live.name] = await self._store.run(events.decisions_under, live.name, live.version)
        return total

    async def _follow(self, live: LivePolicy) -> None:
        watches = list(self._watch(live).values())
        for watch in await self._behind(live, watches):
            await watch.follow(self._store)
            if watch.guard is not None:
                self._put(live, guarded_policy(live, watch.guard))
        now = self._clock()
        red = next((watch for watch in watches if watch.red(now)), None)
        if live.alarm is None and red is not None:
            await self._raise(live, red)
        if now - self._served_at.get(live.name, 0.0) >= SERVED_EVERY:
            self._served_at[live.name] = now
            for watch in watches:
                await watch.refresh_served(self._store, now)
                await self._refresh_missing(watch, now)

    async def _refresh_missing(self, watch: LedgerWatch, now: float) -> None:
        """Find out whose audits are missing, if any are: that may be the questions of one caller."""
        missing = watch.monitor.standing(now).figures.missing
        if not missing:
            self._missing.pop(watch.key, None)
        elif self._missing.get(watch.key, (0, ""))[0] != missing:
            keys = await self._store.run(ledger.missing_by_key, watch.key, now)
            self._missing[watch.key] = (missing, _most_missing(keys, missing))

    def _named(self, standing: Standing, watch: LedgerWatch) -> Standing:
        """Return a standing that names the few API keys that most of the missing audits are of, where that is a reason."""
        _, reason = self._missing.get(watch.key, (0, ""))
        if not standing.reasons or not reason:
            return standing
        return replace(standing, reasons=(*standing.reasons, reason))

    async def _behind(self, live: LivePolicy, watches: Sequence[LedgerWatch]) -> list[LedgerWatch]:
        """Return the ledgers that may have news: of many, one query tells which."""
        if len(watches) <= 1 and live.settings.session is None:
            return list(watches)
        newest = dict.fromkeys((watch.key for watch in watches), 0)
        for stored in await self._store.run(ledger.ledgers, live.name):
            newest[stored.key] = stored.change
            for watch in watches:
                if watch.key == stored.key:
                    watch.monitor.collapsed = stored.collapsed
        return [watch for watch in watches if watch.is_behind(newest[watch.key])]

    def _put(self, live: LivePolicy, changed: LivePolicy) -> None:
        """Put a policy in force that changed while its version stays."""
        if changed.forfeited is not None and live.forfeited is None:
            _log.warning("%s; there is no guarantee", changed.forfeited, extra={"policy": live.name})
        if changed is not live:
            self._policies.swap(live, changed)

    def _watch(self, live: LivePolicy) -> dict[str, LedgerWatch]:
        """Return what follows a policy's ledgers; begins anew with every version, lift and change of models."""
        keys = [] if live.watched is None else live.watched.keys()
        watches = self._watches.get(live.name, {})
        if [watch.key for watch in watches.values()] != keys:
            watches = self._watches[live.name] = {key.group: self._new_watch(live, key) for key in keys}
        return watches

    def _new_watch(self, live: LivePolicy, key: LedgerKey) -> LedgerWatch:
        certificate, watched, guard = live.certificate, live.watched, None
        if watched is None:
            raise AssertionError("a ledger belongs to a policy that is watched")
        if certificate is not None and live.guarded is not None:
            guard = CertificateGuard(certificate)
        rate, lines = live.settings.audit_rate, watched.lines[key.group]
        return LedgerWatch(key, lines, audit_rate=rate, guard=guard)

    async def _raise(self, live: LivePolicy, watch: LedgerWatch) -> None:
        """Record an alarm, of whichever group: the whole policy goes into safe mode."""
        await self._refresh_missing(watch, self._clock())
        standing, key = self._named(watch.standing(self._clock()), watch), watch.key
        figures = standing.figures
        line, evidence = figures.lines.red, figures.log_peak[1]
        if line is None or evidence is None:
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
        if await self._store.run(stored_policies.raise_alarm, live.name, alarm):
            _log.error(
                "red%s: %s; the policy serves in safe mode until the alarm is lifted or a certificate is installed",
                f", group {key.group!r:.80}" if key.group else "",
                "; ".join(standing.reasons),
                extra={"policy": live.name},
            )
        await self._policies.refresh(await self._store.change_count())

    async def _settle(self) -> bool:
        """Write the losses that became known into the ledger; return whether there may be more."""
        names = [live.name for live in self._policies.all()]
        news = await self._store.run(ledger.news, names, limit=_AT_ONCE)
        settlements: list[Settlement] = []
        for row in news:
            record = await self._record(row.id)
            facts = await self._facts_of(row)
            callers_label = self._policies.lets_callers_grade(row.key.policy)
            settlements.append(settlement(row, record, facts, self._clock(), callers_label=callers_label))
            await asyncio.sleep(0)  # decisions first
        await self._store.run(ledger.settle, settlements)
        return len(news) == _AT_ONCE

    async def _record(self, id: str) -> DecisionRecord | None:
        """Return a decision; None if it was pruned or is damaged, so that its outcome stays unknown and others do not."""
        try:
            return await self._store.run(pages.intact_record, id)
        except DamagedError as error:
            _log.error("an audited decision cannot be read, and counts as missing when it is due: %s", error)
            return None

    async def _facts_of(self, news: LedgerNews) -> LossFacts | None:
        """Return what losses under a version depend on."""
        name, version = news.key.policy, news.key.version
        if (name, version) not in self._facts:
            for installed in await self._store.run(stored_policies.history, name):
                if installed.intact:
                    self._facts[name, installed.version] = LossFacts.read(installed.certificate)
        return self._facts.get((name, version))

    def standings(self) -> dict[str, dict[str, tuple[Standing, LedgerWatch]]]:
        """Return where every policy with a monitor stands, as `standings_of` does."""
        shown = {live.name: self.standings_of(live) for live in self._policies.all()}
        return {name: standings for name, standings in shown.items() if standings}

    def standings_of(self, live: LivePolicy) -> dict[str, tuple[Standing, LedgerWatch]]:
        """Return where each ledger of a policy stands and what follows it; empty without a monitor, or before a look.

        Of a policy without groups there is one, with an empty name.
        """
        standings: dict[str, tuple[Standing, LedgerWatch]] = {}
        for name, watch in self._read(live).items():
            age = self._age(live, watch)
            stale = None if age is None else age.stale
            standing = watch.standing(self._clock(), alarmed=cause_of(live.alarm, name), stale=stale)
            standings[name] = self._named(standing, watch), watch
        return standings

    def standing(self, live: LivePolicy) -> tuple[Standing, LedgerWatch] | None:
        """Return where a policy stands, of groups the worst, and what follows that ledger; None if there is nothing yet."""
        standings = self.standings_of(live).values()
        return min(standings, key=lambda pair: SEVERITY.index(pair[0].state), default=None)

    def _read(self, live: LivePolicy) -> dict[str, LedgerWatch]:
        """Return what follows a policy's ledgers, once all of them have been read."""
        watches = self._watches.get(live.name, {})
        keys = [] if live.watched is None else live.watched.keys()
        ours = [watch.key for watch in watches.values()] == keys and all(watch.read for watch in watches.values())
        return watches if ours else {}

    def ages(self) -> dict[str, Age]:
        """Return how old what is known of every certificate in force is."""
        ages = {live.name: self.age(live) for live in self._policies.all()}
        return {name: age for name, age in ages.items() if age is not None}

    def age(self, live: LivePolicy) -> Age | None:
        """Return how old what is known of a policy's certificate is; None without one, or before the first look.

        Of several groups, it is that of the one with the fewest audits of late.
        """
        watches: list[LedgerWatch | None] = list(self._read(live).values())
        if not watches and live.watched is None:
            watches = [None]
        ages = [age for watch in watches if (age := self._age(live, watch)) is not None]
        return min(ages, key=lambda age: age.known_lately, default=None)

    def _age(self, live: LivePolicy, watch: LedgerWatch | None) -> Age | None:
        """Return the age of a certificate by the audits of one ledger."""
        settings = live.settings
        if live.certificate is None:
            return None
        return age_of(
            live.certificate,
            KnownLosses() if watch is None else watch.known,
            installed=live.installed,
            now=self._clock(),
            audit_rate=settings.audit_rate,
            limits=age_limits(settings),
            decisions=self._totals.get(live.name),
        )

    def document(self, live: LivePolicy) -> dict[str, Any]:
        """Return where a policy stands as plain values; of one by groups, the worst state, and all of each group."""
        standings, alarm = self.standings_of(live), live.alarm
        watch = standings[""][1] if "" in standings else None
        guard = None if watch is None or watch.guard is None else asdict(watch.guard.standing())
        return {
            "policy": live.name,
            "version": live.version,
            "mode": live.mode,
            "guarantee": live.guarantee if live.forfeited is None else "none",
            "reason": live.forfeited,
            "watched": live.watched is not None,
            "unwatched": live.unwatched,
            "lifts": live.lifts,
            "alarm": None if alarm is None else alarm_document(alarm),
            "guard": guard,
            "age": None if (age := self.age(live)) is None else asdict(age),
            **self._stands(live, standings),
        }

    def _stands(self, live: LivePolicy, standings: Mapping[str, tuple[Standing, LedgerWatch]]) -> dict[str, Any]:
        """Return the state and what it rests on: of the only ledger, or of all groups."""
        if "" in standings:
            return standing_document(standings[""][0], standings[""][1].served)
        certificate, watched = live.certificate, live.watched
        if certificate is None or watched is None or watched.ledgers is None or not standings:
            return {}
        members = {
            name: [group for group, ledger_name in watched.ledgers.items() if ledger_name == name] for name in standings
        }
        groups = [
            {
                "group": name,
                "members": members[name],
                **standing_document(standing, watch.served),
                "age": None if (age := self._age(live, watch)) is None else asdict(age),
            }
            for name, (standing, watch) in standings.items()
        ]
        return {
            **worst_of({name: standing for name, (standing, _) in standings.items()}),
            "false_red": false_red_of_policy(certificate, watched.lines),
            "groups": groups,
            "deferred_groups": [name for name in certificate.groups or {} if name not in watched.ledgers],
        }


def _most_missing(keys: Sequence[tuple[str, int]], missing: int) -> str:
    """Return in words which API keys more than half of the missing audits are of; empty if those given are not enough."""
    covered, named = 0, list[str]()
    for key, count in keys:
        if 2 * covered <= missing:
            covered += count
            named.append(f"{key} ({count})")
    if 2 * covered <= missing:
        return ""
    whose = f"key {keys[0][0]}" if len(named) == 1 else f"keys {', '.join(named)}"
    return f"{covered} of {missing} audits without an outcome are of the API {whose}"
