"""Where policies stand, read from a store: the ledgers of the versions in force and of earlier ones, with their alarms.

Everything is recomputed from the ledgers, so what is shown here is what a gateway shows.
Knows nothing of HTTP, terminals or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.errors import CertificateError, OptionError
from conformal_arbitrage.evaluation.monitor_figures import DrawnLedger, DrawnMoment
from conformal_arbitrage.live.config import Config, PolicyConfig
from conformal_arbitrage.live.watching import (
    ServedFigure,
    alarm_document,
    lines_of,
    served_figure,
    standing_document,
    voided,
)
from conformal_arbitrage.monitoring.age import blind_decisions, freshness
from conformal_arbitrage.monitoring.history import ledger_history
from conformal_arbitrage.monitoring.lines import Lines
from conformal_arbitrage.monitoring.monitor import Monitor
from conformal_arbitrage.monitoring.states import Cause, Standing
from conformal_arbitrage.store.base import PolicyVersion, Store
from conformal_arbitrage.store.ledger_base import LedgerKey, LedgerRows, Notice
from conformal_arbitrage.store.record import AlarmBody
from conformal_arbitrage.types import DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedLedger:
    """A ledger, the certificate it belongs to, and what it is watched against.

    Attributes:
        key: which ledger.
        version: the policy's version.
        certificate: what was in force; None if the stored document cannot be read.
        lines: what it is watched against; None without a monitor.
        unwatched: why there is none.
        rows: the ledger itself.
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
        audit_rate: as configured.
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
    versions = await store.policies()
    if policy is not None and policy not in {version.name for version in versions}:
        known = ", ".join(version.name for version in versions) or "none yet"
        raise OptionError(f"there is no policy {policy!r} in this database; there are {known}")
    standings: list[PolicyStanding] = []
    for version in versions:
        if policy is None or version.name == policy:
            settings = config.policies.get(version.name, PolicyConfig())
            ledgers = await _ledgers(store, version, settings)
            current = [one for one in ledgers if one.key.lifts == version.lifts]
            standings += [stand(one, settings, now) for one in [*current, *_empty(version, settings, current)]]
    return standings


async def read_history(store: Store, config: Config, policy: str) -> PolicyHistory:
    """Return all that is known about a policy.

    Raises:
        OptionError: there is no policy of that name.
    """
    versions = tuple(reversed(await store.policy_history(policy)))
    if not versions:
        raise OptionError(f"there is no policy {policy!r} in this database; `arbitrage monitor` lists them")
    settings = config.policies.get(policy, PolicyConfig())
    ledgers = [one for version in versions for one in await _ledgers(store, version, settings)]
    return PolicyHistory(
        name=policy, versions=versions, ledgers=tuple(ledgers), notices=tuple(await store.notices(policy))
    )


def stand(ledger: WatchedLedger, settings: PolicyConfig, now: float) -> PolicyStanding:
    """Return where a ledger stands at a time."""
    alarm, standing, served, blind = ledger.alarm(now), None, None, None
    if ledger.lines is not None:
        rows = ledger.rows
        monitor = Monitor.from_ledger(ledger.lines, rows.loss, rows.due, audit_rate=settings.audit_rate)
        served = served_figure(rows, ledger.lines, now) if rows.served_otherwise.any() else None
        failing = served is not None and served.above_alpha
        own = alarm if alarm is not None and (alarm.group or "") in ("", ledger.key.group) else None
        stale = _stale(ledger, now, settings.fresh_days)
        standing = monitor.standing(now, alarmed=_cause(own), guardian_fails=failing, stale=stale)
        blind = None if ledger.lines.signed else blind_decisions(ledger.lines.alpha, settings.audit_rate)
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


def _stale(ledger: WatchedLedger, now: float, days: float) -> str | None:
    """Return why the evidence is old; a ledger that began within so many days is new, not old."""
    if ledger.lines is None or now - ledger.version.installed < days * DAY:
        return None
    lately = int((ledger.rows.known_at >= now - days * DAY).sum())
    last = ledger.last_audit
    last_known = None if last is None else date_of(last)
    return freshness(lately, ledger.lines.alpha, last_known=last_known, days=days, signed=ledger.lines.signed)


def _cause(alarm: AlarmBody | None) -> Cause | None:
    if alarm is None:
        return None
    return "failing audits" if alarm.cause == "failing audits" else "losses"


async def _ledgers(store: Store, version: PolicyVersion, settings: PolicyConfig) -> list[WatchedLedger]:
    """Return the ledgers of a version, those with the newest rows last."""
    keys = [one.key for one in await store.ledgers(version.name) if one.key.version == version.version]
    ledgers = [_watched(key, version, settings, await store.ledger(key)) for key in keys]
    return sorted(ledgers, key=lambda one: float(one.rows.drawn.max(initial=0.0)))


def _empty(version: PolicyVersion, settings: PolicyConfig, ledgers: Sequence[WatchedLedger]) -> list[WatchedLedger]:
    """Return the ledgers of a version that have no rows yet: its only one, or those of groups."""
    _, lines, _ = _certified(version, settings)
    begun = {one.key.group for one in ledgers}
    names = [name for name in lines if name not in begun] if lines else [] if ledgers else [""]
    key = LedgerKey(policy=version.name, version=version.version, lifts=version.lifts, identities_sha256="")
    return [_watched(replace(key, group=name), version, settings, LedgerRows.of([], 0)) for name in names]


def _watched(key: LedgerKey, version: PolicyVersion, settings: PolicyConfig, rows: LedgerRows) -> WatchedLedger:
    certificate, lines, unwatched = _certified(version, settings)
    own = lines.get(key.group)
    return WatchedLedger(key=key, version=version, certificate=certificate, lines=own, unwatched=unwatched, rows=rows)


def _certified(
    version: PolicyVersion, settings: PolicyConfig
) -> tuple[Certificate | None, dict[str, Lines], str | None]:
    """Return the certificate of a version, what each of its ledgers is watched against, and why there is no such thing."""
    certificate = None
    try:
        certificate = Certificate.from_dict(dict(version.certificate))
        return certificate, lines_of(certificate, settings.alarm_line), None
    except (CertificateError, OptionError) as error:
        return certificate, {}, str(error)


def date_of(seconds: float) -> str:
    """Return the day of a time, in UTC."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def drawn_ledgers(history: PolicyHistory, now: float, *, group: str = "") -> list[DrawnLedger]:
    """Return the ledgers of a policy, or of one of its groups, to draw, by days since 1970; empty ones are left out."""
    drawn: list[DrawnLedger] = []
    starts = sorted(one.x for one in drawn_moments(history) if one.kind != "red")
    for ledger in history.ledgers:
        if ledger.lines is None or not len(ledger.rows) or ledger.key.group != group:
            continue
        past = ledger.rows.due <= now
        unknown = np.isnan(ledger.rows.loss)
        points = ledger_history(ledger.lines, ledger.rows.loss, (unknown & past).astype(np.float64))
        days = ledger.rows.drawn / DAY
        ended = min([one for one in starts if one > days[-1]], default=now / DAY)
        bound = 1.0 if ledger.certificate is None else ledger.certificate.loss_bound
        drawn.append(
            DrawnLedger(x=days[points.audits - 1], start=float(days[0]), stop=ended, history=points, bound=bound)
        )
    return drawn


def drawn_moments(history: PolicyHistory) -> list[DrawnMoment]:
    """Return installations, alarms and lifts of a policy to mark, in order."""
    moments = [
        DrawnMoment(kind="installed", x=version.installed / DAY, text=f"version {version.version}")
        for version in history.versions
    ]
    for notice in history.notices:
        kind = "red" if isinstance(notice.body, AlarmBody) else "lifted"
        text = f"red: {notice.body.cause}" if isinstance(notice.body, AlarmBody) else "lifted"
        moments.append(DrawnMoment(kind=kind, x=(notice.body.at or 0.0) / DAY, text=text))
    return sorted(moments, key=lambda moment: moment.x)
