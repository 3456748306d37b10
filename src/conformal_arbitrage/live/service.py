"""A certificate in service: watched, guarded, aged, and where policies stand, read from a store."""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import exp
from typing import Any, Literal

import msgspec
import numpy as np

from conformal_arbitrage.calibration.certificate import Certificate, base_share, read_pair, read_quantiles
from conformal_arbitrage.calibration.options import NET, refuse_combination
from conformal_arbitrage.calibration.promises import Net, PerSession
from conformal_arbitrage.core.exact import Floats
from conformal_arbitrage.core.risk import GuardianSees
from conformal_arbitrage.errors import CertificateError, OptionError
from conformal_arbitrage.live.config import Config, PolicyConfig
from conformal_arbitrage.monitoring.limits import Limits
from conformal_arbitrage.monitoring.lines import (
    FRESH_DAYS,
    AlarmLine,
    Lines,
    audits_to_see_doubling,
    blind_decisions,
    certificate_lines,
    freshness,
    ledger_names,
)
from conformal_arbitrage.monitoring.monitor import (
    SEVERITY,
    Cause,
    Guard,
    LedgerRow,
    Monitor,
    Standing,
    guarded_threshold,
)
from conformal_arbitrage.monitoring.outcomes import AuditedDecision, Verdict, decision_loss, served_loss
from conformal_arbitrage.store import integrity, policies
from conformal_arbitrage.store import ledger as stored_ledger
from conformal_arbitrage.store.integrity import Head
from conformal_arbitrage.store.ledger import AuditRow, LedgerKey, LedgerNews, LedgerRows, Settlement
from conformal_arbitrage.store.policies import Notice, PolicyVersion
from conformal_arbitrage.store.record import UNDELIVERED, AlarmBody, DecisionRecord
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import DAY, DecidedBy

# --- The losses of a ledger that are known ---


class KnownLosses:
    """Follows the known losses of one ledger.

    Attributes:
        count: how many there are, in order without a gap.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: dict[int, AuditRow] = {}  # known later than one that was not read yet
        self._times: list[float] = []

    def take_all(self, rows: LedgerRows) -> list[float]:
        """Read a whole ledger for the first time; return its losses in order."""
        known = rows.known_order > 0
        self.count = int(known.sum())
        self._times = np.sort(rows.known_at[known]).tolist()
        return rows.in_known_order().tolist()

    def take(self, rows: Iterable[AuditRow]) -> list[float]:
        """Read rows that are new or have changed; return the losses that come next in order, none of them twice."""
        self._waiting |= {row.known_order: row for row in rows if row.known_order and row.known_order > self.count}
        losses: list[float] = []
        while (row := self._waiting.pop(self.count + 1, None)) is not None:
            self.count += 1
            losses.append(row.loss or 0.0)
            insort(self._times, row.known_at or row.drawn)
        return losses

    def since(self, time: float) -> int:
        """Return how many became known at a time or later."""
        return len(self._times) - bisect_left(self._times, time)

    @property
    def last(self) -> float | None:
        """When the last one became known; None if there is none."""
        return self._times[-1] if self._times else None


# --- Guard a certificate in service ---


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardStanding:
    """Where a guard stands.

    Attributes:
        known: how many losses it rests on.
        base: the share of calibration rows that the certificate defers.
        share: the share that the threshold in force would defer; 1 or more defers everything.
        excess: the sum of (loss - alpha) over the known losses, as shares of the loss bound.
        bound: the most that this sum can be, not counting losses of decisions whose outcome was not known here yet.
    """

    known: int
    base: float
    share: float
    excess: float
    bound: float


class CertificateGuard:
    """Raises a certificate's threshold with every loss, and lowers it again, never below the certificate's.

    Raises:
        CertificateError: it does not have the quantiles of its margins.
        OptionError: there is no proof for such a certificate.
    """

    def __init__(self, certificate: Certificate) -> None:
        refuse_combination("guard", *certificate.kinds)
        if certificate.relaxation is None or certificate.evidence.margin_quantiles is None:
            raise CertificateError(
                "a guard needs the quantiles of the certificate's margins; calibrate again with margins=True (--margins), "
                "or leave guard = true out"
            )
        self._certificate = certificate
        self._certified = (certificate.relaxation, certificate.boundary_u)
        self._quantiles = read_quantiles(certificate.evidence.margin_quantiles)
        base = base_share(self._certified, self._quantiles)
        self._guard = Guard(alpha=certificate.alpha / certificate.loss_bound, base=base)
        self._known = self._level = 0
        self._excess = 0.0

    def take(self, losses: Iterable[float]) -> None:
        """Take further losses, as shares of the loss bound, in the order in which they became known."""
        for loss in losses:
            self._known += 1
            self._level = self._guard.next_level(self._level, loss)
            self._excess += loss - self._guard.alpha

    def standing(self) -> GuardStanding:
        """Return where the guard stands."""
        guard = self._guard
        return GuardStanding(
            known=self._known,
            base=guard.base,
            share=guard.share(self._level),
            excess=self._excess,
            bound=guard.excess_bound(0),
        )

    def in_force(self) -> Certificate:
        """Return the certificate with the threshold that is in force."""
        threshold = guarded_threshold(self._guard.share(self._level), self._certified, self._quantiles)
        if threshold is None:
            return deferring(self._certificate)
        return self._certificate.with_threshold(*threshold)


# --- How old the evidence on a certificate in service is, and what luck its next decisions share ---


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeLimits:
    """What a policy says of the age of its certificate.

    Attributes:
        max_age: days after which it is not to be relied on any more; None for never.
        max_decisions: decisions after which it is not; None for never.
        fresh_days: in how many days enough audits have to become known.
    """

    max_age: float | None = None
    max_decisions: int | None = None
    fresh_days: float = FRESH_DAYS

    def expiry(self, days: float, decisions: int | None = None) -> str | None:
        """Return why a certificate has expired; None if it has not."""
        force = "expired: the certificate has been in force for"
        if self.max_age is not None and days >= self.max_age:
            return f"{force} {days:.0f} days, and max_age is {self.max_age:g}"
        if self.max_decisions is not None and decisions is not None and decisions >= self.max_decisions:
            return f"{force} {decisions:,} decisions, and max_decisions is {self.max_decisions:,}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Age:
    """How old what is known of a certificate is.

    Attributes:
        installed: when it was installed, in seconds since 1970.
        known_lately: audits that became known in the last `fresh_days`.
        needed: how many show a doubled loss with a probability of 90 %; where gains count, it takes no fewer.
        last_known: when the last audit became known, in seconds since 1970; None if none did.
        blind_decisions: how many decisions those audits take; None without audits, and where gains count.
        next_decisions: as many as the certificate has rows: beyond, the range hardly changes.
        range: of their mean loss, as shares of the loss bound, for 95 % of calibrations and traffic; None where its law is
            not known.
        stale: why the evidence is too old, in words; None if it is not.
        expired: why the certificate is no longer to be relied on, as configured; None if it is.
        decisions: how many there were under it; None unless they are counted, for max_decisions.
        fresh_days: in how many days audits have to become known, as configured.
    """

    installed: float
    known_lately: int
    needed: int
    last_known: float | None
    blind_decisions: int | None
    next_decisions: int
    range: Limits | None
    stale: str | None
    expired: str | None
    decisions: int | None = None
    fresh_days: float = FRESH_DAYS


def age_of(
    certificate: Certificate,
    known: KnownLosses,
    *,
    installed: float,
    now: float,
    audit_rate: float,
    limits: AgeLimits | None = None,
    decisions: int | None = None,
) -> Age:
    """Return how old what is known of a certificate is.

    Args:
        known: the known losses of its ledger.
        installed: when it was installed, in seconds since 1970.
        limits: when it is not to be relied on any more.
        decisions: how many there were under it, if they are counted.
    """
    limits = limits or AgeLimits()
    share, days = certificate.alpha / certificate.loss_bound, max(0.0, now - installed) / DAY
    lately = known.since(now - limits.fresh_days * DAY)
    net, window = isinstance(certificate.loss, Net), limits.fresh_days
    last = None if known.last is None else date_of(known.last)
    stale = freshness(lately, share, last_known=last, days=window, signed=net) if days >= window else None
    return Age(
        installed=installed,
        known_lately=lately,
        needed=audits_to_see_doubling(share),
        last_known=known.last,
        blind_decisions=None if net else blind_decisions(share, audit_rate),
        next_decisions=certificate.n,
        range=certificate.next_range(),
        stale=stale,
        expired=limits.expiry(days, decisions),
        decisions=decisions,
        fresh_days=limits.fresh_days,
    )


def date_of(seconds: float) -> str:
    """Return the day of a time, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


# --- Watch a certificate in service ---


_LARGEST_LOG = 690.0
"""Evidence beyond this is shown as e to that power, which is still a number."""


def deferring(certificate: Certificate) -> Certificate:
    """Return a certificate's rule with every action in sight: what safe mode serves."""
    return certificate.with_threshold(None, None)


def voided(version: PolicyVersion | None) -> str | None:
    """Return why a version's promise is void: an alarm, or a choice among certificates; None if it is not."""
    if version is None:
        return None
    if not version.earlier_intact:
        return "an earlier version is not what was installed, and could speak against this one: restore a backup"
    if version.alarmed is not None and version.lifts:
        return "an alarm was lifted without a new certificate"
    if version.alarmed is not None and version.alarm is None:
        number = version.alarmed.version
        return f"the certificate's rows are older than the alarm of version {number}: calibrate on rows since then"
    if version.preferred_to is not None:
        return (
            f"the certificate defers less than version {version.preferred_to}, which the schedule produced, and choosing "
            "the cheaper of two keeps the lucky one: the next scheduled renewal has a guarantee again"
        )
    return None


def lines_of(certificate: Certificate, alarm_line: AlarmLine = "luck") -> dict[str, Lines]:
    """Return what the ledgers of a certificate in service are watched against, by their name: "" if it has no groups.

    Raises:
        OptionError: there is nothing to watch, or nothing that can be.
    """
    if isinstance(certificate.promise, PerSession):
        refuse_combination("monitor", "session")
    if certificate.groups is None:
        return {"": certificate_lines(certificate, alarm_line=alarm_line)}
    members = {ledger: name for name, ledger in ledger_names(certificate).items()}
    if not members:
        raise OptionError("every query of every group is deferred, so the loss is 0: there is nothing to watch")
    return {
        ledger: certificate_lines(certificate, group=name, alarm_line=alarm_line) for ledger, name in members.items()
    }


def false_red_of_policy(certificate: Certificate, lines: Mapping[str, Lines]) -> float | None:
    """Return the most that the probability of safe mode, ever, can be if traffic is exchangeable and no audit is missing.

    The evidence of each ledger has its own share, and so has the luck of each calibration, unless one confidence covers all
    groups together. None if there is no such bound, or no red at all.
    """
    shares = [line.false_red for line in lines.values() if line.red is not None]
    known = [share for share in shares if share is not None]
    if not shares or len(known) < len(shares):
        return None
    together = 0.0 if certificate.confidence is None else (len(known) - 1) * (1 - certificate.confidence)
    return min(1.0, sum(known) - together)


def watchable(certificate: Certificate, alarm_line: AlarmLine = "luck") -> tuple[dict[str, Lines] | None, str | None]:
    """Return the lines of a certificate in service by ledger, or why it has no monitor.

    Raises:
        OptionError: red is to stand at alpha, for a certificate for which it has no proof.
    """
    if alarm_line == "alpha":
        for kind in certificate.kinds:
            if kind != "merged groups":
                refuse_combination("red line", kind)
    try:
        return lines_of(certificate, alarm_line), None
    except OptionError as error:
        return None, str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFigure:
    """The loss of delivered answers, fallbacks among them; what was not delivered is left out.

    Attributes:
        answers: how many audited decisions delivered one.
        mean: mean of the known losses; None if there is none.
        limits: of the running mean, as in `Standing`.
        above_alpha: whether the evidence is enough for amber; never for red, since safe mode would ask the Guardian more.
    """

    answers: int
    mean: float | None
    limits: tuple[float, float]
    above_alpha: bool


class LedgerWatch:
    """Follows one ledger.

    Args:
        guard: takes the losses as they become known, if the policy has a guard.

    Attributes:
        known: the losses that are known, in the order in which they became known.
        monitor: what the ledger says; empty until `follow`.
        served: the figure of delivered answers where it is another than the rule's own; None where it is the same.
    """

    def __init__(
        self, key: LedgerKey, lines: Lines, *, audit_rate: float, guard: CertificateGuard | None = None
    ) -> None:
        self.key = key
        self.guard = guard
        self.known = KnownLosses()
        self.lines = lines
        self.monitor = Monitor(lines, audit_rate=audit_rate)
        self.served: ServedFigure | None = None
        self._cursor: int | None = None
        self._differing: set[int] = set()
        self._served_at = -1

    @property
    def read(self) -> bool:
        """Whether the ledger was read: before that, `monitor` says nothing."""
        return self._cursor is not None

    def is_behind(self, change: int) -> bool:
        """Tell whether there is anything to take, given the number of the ledger's newest change."""
        return self._cursor is None or change > self._cursor

    async def follow(self, store: Store) -> bool:
        """Take what is new in the ledger; return whether there was anything."""
        if self._cursor is None:
            self.take_all(await store.run(stored_ledger.read, self.key))
            return True
        rows = await store.run(stored_ledger.changes, self.key, self._cursor)
        for row in rows:
            same = row.served is None and row.delivered
            (self._differing.discard if same else self._differing.add)(row.seq)
        if rows:
            self.monitor.observe(LedgerRow(row.seq, row.due, row.loss) for row in rows)
            self._tell_guard(self.known.take(rows))
            self._cursor = rows[-1].change
        return bool(rows)

    def take_all(self, rows: LedgerRows) -> None:
        """Take the whole ledger for the first time."""
        self.monitor = Monitor.from_ledger(self.lines, rows.loss, rows.due, audit_rate=self.monitor.audit_rate)
        self.monitor.collapsed = rows.collapsed
        self._differing = set((np.flatnonzero(rows.served_otherwise) + 1).tolist())
        self._cursor = rows.change
        self._tell_guard(self.known.take_all(rows))

    def _tell_guard(self, losses: list[float]) -> None:
        if self.guard is not None:
            self.guard.take(losses)

    async def refresh_served(self, store: Store, now: float) -> None:
        """Bring the figure of delivered answers up to date; it takes the whole ledger where the two figures differ."""
        if self._served_at == self._cursor:
            return
        self._served_at = -1 if self._cursor is None else self._cursor
        figure = None
        if self._differing:
            rows = await store.run(stored_ledger.read, self.key)
            figure = await asyncio.to_thread(served_figure, rows, self.lines, now)
        self.served = figure

    def red(self, now: float) -> bool:
        """Tell whether the evidence calls for safe mode."""
        return self.monitor.red(now)

    def standing(self, now: float, *, alarmed: Cause | None = None, stale: str | None = None) -> Standing:
        """Return what is known at a time; see `Monitor.standing`."""
        failing = self.served is not None and self.served.above_alpha
        return self.monitor.standing(now, alarmed=alarmed, guardian_fails=failing, stale=stale)


def served_figure(rows: LedgerRows, lines: Lines, now: float) -> ServedFigure:
    """Return the loss of the answers that callers got."""
    delivered = rows.delivered
    losses: Floats = np.where(np.isnan(rows.served), rows.loss, rows.served)[delivered]
    monitor = Monitor.from_ledger(lines, losses, rows.due[delivered])
    standing = monitor.standing(now)
    return ServedFigure(
        answers=int(delivered.sum()),
        mean=standing.mean,
        limits=standing.limits,
        above_alpha=standing.figures.above_alpha,
    )


def standing_document(standing: Standing, served: ServedFigure | None) -> dict[str, Any]:
    """Return a standing as plain values; losses are shares of the loss bound."""
    figures, lines = standing.figures, standing.figures.lines
    return {
        "state": standing.state,
        "reasons": list(standing.reasons),
        "cause": standing.cause,
        "audit_rate": figures.audit_rate,
        "audits": {
            "known": figures.known, "pending": figures.pending, "missing": figures.missing, "collapsed": figures.collapsed,
        },
        "mean_loss": standing.mean,
        "limits": list(standing.limits),
        "known_limits": None if standing.known_limits is None else list(standing.known_limits),
        "lines": {
            "alpha": lines.alpha, "red": lines.red, "block": lines.block, "false_red": lines.false_red, "note": lines.note,
        },
        "evidence": _evidence(figures.log_evidence),
        "largest_evidence": _evidence(figures.log_peak),
        "as_served": None if served is None else asdict(served),
    }  # fmt: skip


def worst_of(standings: Mapping[str, Standing]) -> dict[str, Any]:
    """Return the state of a policy with several ledgers, which is that of the worst, and why, as plain values."""
    worst = min((standing.state for standing in standings.values()), key=SEVERITY.index)
    those = {name: standing for name, standing in standings.items() if standing.state == worst}
    causes = {standing.cause for standing in those.values()}
    return {
        "state": worst,
        "reasons": [f"{name}: {reason}" for name, standing in those.items() for reason in standing.reasons],
        "cause": "losses"
        if "losses" in causes
        else min((cause for cause in causes if cause is not None), default=None),
    }


def alarm_document(alarm: AlarmBody) -> dict[str, Any]:
    """Return an alarm as plain values."""
    return {"cause": alarm.cause, "at": alarm.at, "audits": alarm.audits, "group": alarm.group}


def _evidence(logs: tuple[float, float | None]) -> Mapping[str, float | None]:
    alpha, red = logs
    return {"alpha": as_evidence(alpha), "red": None if red is None else as_evidence(red)}


def as_evidence(log: float) -> float:
    """Return evidence from its natural logarithm, as a finite number."""
    return exp(min(log, _LARGEST_LOG))


# --- Where policies stand, read from a store ---


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedLedger:
    """A ledger, the certificate it belongs to, and what it is watched against.

    Attributes:
        certificate: what was in force; None if the stored document cannot be read.
        lines: what it is watched against; None without a monitor.
        unwatched: why there is none.
    """

    key: LedgerKey
    version: PolicyVersion
    certificate: Certificate | None
    lines: Lines | None
    unwatched: str | None
    rows: LedgerRows

    def alarm(self, now: float) -> AlarmBody | None:
        """Return the alarm that stands at a time, if this ledger is in force: of whichever group, it is the policy's."""
        alarm = self.version.alarm if self.version.lifts == self.key.lifts else None
        return None if alarm is None or (alarm.at or 0.0) > now else alarm

    @property
    def last_audit(self) -> float | None:
        """When the last loss became known."""
        known = self.rows.known_at[~np.isnan(self.rows.known_at)]
        return float(known.max()) if known.size else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStanding:
    """Where a policy stands.

    Attributes:
        ledger: what it is read from.
        alarm: the alarm that stands, if any.
        mode: "safe" after an alarm, else as configured.
        allowed: differences between certificate and models that are tolerated without a guarantee, as configured.
        standing: state, reasons, limits and evidence; None without a monitor.
        served: the figure of delivered answers where it differs from the rule's own.
        blind_decisions: how many decisions it takes to see a doubled loss in nine of ten cases; None without audits,
            and where gains count: it then depends on how many decisions they outweigh.
    """

    ledger: WatchedLedger
    alarm: AlarmBody | None
    mode: str
    allowed: tuple[str, ...]
    audit_rate: float
    standing: Standing | None
    served: ServedFigure | None
    blind_decisions: int | None

    @property
    def state(self) -> str:
        """The state in one word or two."""
        return "not watched" if self.standing is None else self.standing.state

    @property
    def void(self) -> str | None:
        """Why the certificate promises nothing, whatever the state; None if nothing in the store speaks against it."""
        return voided(self.ledger.version)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON document; losses are shares of the loss bound."""
        ledger, alarm = self.ledger, self.alarm
        return {
            "policy": ledger.key.policy,
            "version": ledger.key.version,
            "group": ledger.key.group or None,
            "identities_sha256": ledger.key.identities_sha256 or None,
            "installed": ledger.version.installed,
            "mode": self.mode,
            "loss_bound": None if ledger.certificate is None else ledger.certificate.loss_bound,
            "watched": self.standing is not None,
            "unwatched": ledger.unwatched,
            "state": self.state,
            "lifts": ledger.key.lifts,
            "void": self.void,
            "allowed": list(self.allowed),
            "alarm": None if alarm is None else alarm_document(alarm),
            "last_audit": ledger.last_audit,
            "blind_decisions": self.blind_decisions,
            **({} if self.standing is None else standing_document(self.standing, self.served)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHistory:
    """Everything a store knows about a policy: all versions, their ledgers, alarms and lifts, oldest first."""

    name: str
    versions: tuple[PolicyVersion, ...]
    ledgers: tuple[WatchedLedger, ...]
    notices: tuple[Notice, ...]


async def read_standings(
    store: Store, config: Config, *, policy: str | None = None, now: float
) -> list[PolicyStanding]:
    """Return where the policies of a store stand; of a policy whose models changed, one for each set of models.

    Raises:
        OptionError: there is no policy of that name.
    """
    versions = await store.run(policies.active)
    if policy is not None and policy not in {version.name for version in versions}:
        known = ", ".join(version.name for version in versions) or "none yet"
        raise OptionError(f"there is no policy {policy!r} in this database; there are {known}")
    standings: list[PolicyStanding] = []
    for version in versions:
        if policy is None or version.name == policy:
            settings = config.policies.get(version.name, PolicyConfig())
            ledgers = await _ledgers(store, version, settings)
            current = [ledger for ledger in ledgers if ledger.key.lifts == version.lifts]
            standings += [stand(ledger, settings, now) for ledger in [*current, *_empty(version, settings, current)]]
    return standings


async def read_history(store: Store, config: Config, policy: str) -> PolicyHistory:
    """Return all that is known about a policy.

    Raises:
        OptionError: there is no policy of that name.
    """
    versions = tuple(reversed(await store.run(policies.history, policy)))
    if not versions:
        raise OptionError(f"there is no policy {policy!r} in this database; `arbitrage monitor` lists them")
    settings = config.policies.get(policy, PolicyConfig())
    ledgers = [ledger for version in versions for ledger in await _ledgers(store, version, settings)]
    return PolicyHistory(
        name=policy, versions=versions, ledgers=tuple(ledgers), notices=tuple(await store.run(policies.notices, policy))
    )


def stand(ledger: WatchedLedger, settings: PolicyConfig, now: float) -> PolicyStanding:
    """Return where a ledger stands at a time."""
    alarm, standing, served, blind = ledger.alarm(now), None, None, None
    if ledger.certificate is not None and ledger.lines is not None:
        rows, rate = ledger.rows, settings.audit_rate
        watch = LedgerWatch(ledger.key, ledger.lines, audit_rate=rate)
        watch.take_all(rows)
        served = watch.served = served_figure(rows, ledger.lines, now) if rows.served_otherwise.any() else None
        limits, installed = AgeLimits(fresh_days=settings.fresh_days), ledger.version.installed
        age = age_of(ledger.certificate, watch.known, installed=installed, now=now, audit_rate=rate, limits=limits)
        standing = watch.standing(now, alarmed=cause_of(alarm, ledger.key.group), stale=age.stale)
        blind = age.blind_decisions
    return PolicyStanding(
        ledger=ledger,
        alarm=alarm,
        mode=settings.mode if alarm is None else "safe",
        allowed=settings.allow,
        audit_rate=settings.audit_rate,
        standing=standing,
        served=served,
        blind_decisions=blind,
    )


def cause_of(alarm: AlarmBody | None, group: str) -> Cause | None:
    """Return why a ledger is in alarm; None if no alarm stands, or that of another group."""
    if alarm is None or (alarm.group or "") not in ("", group):
        return None
    return "failing audits" if alarm.cause == "failing audits" else "losses"


async def _ledgers(store: Store, version: PolicyVersion, settings: PolicyConfig) -> list[WatchedLedger]:
    """Return the ledgers of a version, those with the newest rows last."""
    keys = [
        ledger.key
        for ledger in await store.run(stored_ledger.ledgers, version.name)
        if ledger.key.version == version.version
    ]
    ledgers = [_watched(key, version, settings, await store.run(stored_ledger.read, key)) for key in keys]
    return sorted(ledgers, key=lambda ledger: float(ledger.rows.drawn.max(initial=0.0)))


def _empty(version: PolicyVersion, settings: PolicyConfig, ledgers: Sequence[WatchedLedger]) -> list[WatchedLedger]:
    """Return the ledgers of a version that have no rows yet: its only one, or those of groups."""
    _, lines, _ = _certified(version, settings)
    begun = {ledger.key.group for ledger in ledgers}
    names = [name for name in lines if name not in begun] if lines else [] if ledgers else [""]
    key = LedgerKey(policy=version.name, version=version.version, lifts=version.lifts, identities_sha256="")
    return [
        _watched(msgspec.structs.replace(key, group=name), version, settings, LedgerRows.of([], 0)) for name in names
    ]


def _watched(key: LedgerKey, version: PolicyVersion, settings: PolicyConfig, rows: LedgerRows) -> WatchedLedger:
    certificate, lines, unwatched = _certified(version, settings)
    ledger_lines = lines.get(key.group)
    return WatchedLedger(
        key=key, version=version, certificate=certificate, lines=ledger_lines, unwatched=unwatched, rows=rows
    )


def _certified(
    version: PolicyVersion, settings: PolicyConfig
) -> tuple[Certificate | None, dict[str, Lines], str | None]:
    """Return the certificate of a version, what each of its ledgers is watched against, and why there is no such thing."""
    certificate = None
    try:
        certificate = read_pair(version.certificate)
        ungradable = settings.ungradable("text" if certificate.evidence.router else "menu")
        if ungradable is not None:
            return certificate, {}, ungradable
        return certificate, lines_of(certificate, settings.alarm_line), None
    except (CertificateError, OptionError) as error:
        return certificate, {}, str(error)


# --- The loss of a decision, by its record ---


DECIDERS: Mapping[str, DecidedBy] = {"primary": "primary", "fallback": "fallback"}
"""Who decided, as the record names them; anybody else is the Guardian."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """What the loss of a decision depends on beside the decision.

    Attributes:
        guardian_sees: what a deferral shows the Guardian.
        binarized: whether the loss is that of the 0/1 Guardian.
        loss_bound: the largest possible loss.
        net: whether it counts gains.
    """

    guardian_sees: GuardianSees
    binarized: bool
    loss_bound: float
    net: bool = False

    @classmethod
    def of(cls, certificate: Certificate) -> "LossFacts":
        """Return those of a certificate."""
        return cls(
            guardian_sees=certificate.guardian_sees,
            binarized=certificate.loss.binarized,
            loss_bound=certificate.loss_bound,
            net=certificate.loss.name == NET,
        )

    def audited(
        self,
        *,
        decided_by: DecidedBy,
        form: Literal["menu", "text"],
        size: int,
        candidates: tuple[int, ...],
        action: int | None,
    ) -> AuditedDecision:
        """Return a decision as its loss takes it."""
        return AuditedDecision(
            decided_by=decided_by, form=form, size=size, candidates=candidates, action=action,
            guardian_sees=self.guardian_sees, binarized=self.binarized, net=self.net,
        )  # fmt: skip

    @classmethod
    def read(cls, document: Mapping[str, object]) -> "LossFacts | None":
        """Return those of a stored certificate; None if it cannot be read."""
        try:
            return cls.of(read_pair(document))
        except CertificateError:
            return None


async def verify_record(store: Store, copy: Head | None = None) -> list[str]:
    """Return everything that is not as it was written, and every loss of a ledger that the record does not bear out."""
    names = {stored.key.policy for stored in await store.run(stored_ledger.ledgers)}
    versions = [version for name in sorted(names) for version in await store.run(policies.history, name)]
    facts = {(version.name, version.version): LossFacts.read(version.certificate) for version in versions}

    def losses(key: LedgerKey, record: DecisionRecord) -> list[float | None]:
        """Return the loss without labels of callers, and with them, which count where a policy says so."""
        known, row = facts.get((key.policy, key.version)), LedgerNews(id=record.id, key=key, news=0)
        return [settlement(row, record, known, 0.0, callers_label=counts).loss for counts in (False, True)]

    return await integrity.verify(store, copy, losses)


def settlement(
    news: LedgerNews, record: DecisionRecord | None, facts: LossFacts | None, now: float, *, callers_label: bool
) -> Settlement:
    """Return what is known of a row.

    Args:
        news: the row.
        record: the decision's; None if it was pruned.
        facts: of the certificate it was made under; None if that cannot be read.
        callers_label: whether labels of callers count.
    """
    if record is None or facts is None:
        return Settlement(id=news.id, news=news.news, at=now)
    body, verdict = record.decision, _verdict(record, callers_label)
    audited = facts.audited(
        decided_by=DECIDERS.get(record.decided_by, "guardian"), form=body.form or "menu", size=body.size,
        candidates=body.candidates, action=body.action,
    )  # fmt: skip
    loss = decision_loss(audited, verdict, loss_bound=facts.loss_bound)
    return Settlement(
        id=news.id,
        news=news.news,
        at=now,
        loss=loss,
        served=_served(record, audited, verdict, facts),
        delivered=_is_delivered(record),
        failed=loss is None and _audit_failed(record),
    )


def _served(record: DecisionRecord, audited: AuditedDecision, verdict: Verdict, facts: LossFacts) -> float | None:
    """Return the loss of what the caller got, where that is not the rule's own."""
    if audited.decided_by != "fallback" or not _is_delivered(record):
        return None
    return served_loss(audited, verdict, loss_bound=facts.loss_bound)


def _is_delivered(record: DecisionRecord) -> bool:
    """Return whether the caller got the answer that was decided, as far as is known."""
    end = record.completion
    return end is None or end.finish not in UNDELIVERED


def _same_models(record: DecisionRecord) -> bool:
    """Return whether the audit, if there is one, was answered by the models of the decision."""
    return record.audit is None or record.audit.identities_sha256 == record.decision.identities_sha256


def _audit_failed(record: DecisionRecord) -> bool:
    """Return whether there was an audit that will never tell the loss."""
    return record.audit is not None and (record.audit.error is not None or not _same_models(record))


def _verdict(record: DecisionRecord, callers_label: bool) -> Verdict:
    if not _same_models(record):
        return Verdict()
    audit = record.audit
    return Verdict(
        scores=None if audit is None else audit.scores,
        label=_label(record, callers_label),
        grades=_grades(record),
    )


def _grades(record: DecisionRecord) -> tuple[float, float] | None:
    """Return the first grades of both answers, once there is a Guardian's answer that they can be about."""
    if record.decided_by == "primary" and (record.audit is None or record.audit.error is not None):
        return None
    both = next((given.grades for given in record.feedback if given.grades is not None), None)
    return None if both is None else (both.primary, both.guardian)


def _label(record: DecisionRecord, callers_label: bool) -> int | None:
    """Return the index of the right action, as the first label that counts says."""
    label = next(record.labels(callers=callers_label), None)
    content = record.decision.content
    if isinstance(label, str):
        actions = None if content is None else content.actions
        return actions.index(label) if isinstance(actions, tuple) and label in actions else None
    return label if label is not None and 0 <= label < record.decision.size else None
