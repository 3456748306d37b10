"""Watch a certificate in service: what its ledger is watched against, and a monitor that follows the ledger in a store.

Everything is a function of the ledger and the clock: two processes that follow the same ledger agree, and so does one that
begins again.

Knows nothing of HTTP, or of what is done about an alarm.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import exp
from typing import TYPE_CHECKING, Any

import numpy as np

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.combinations import refusal, refuse_combination
from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.live.known_losses import KnownLosses
from conformal_arbitrage.monitoring.certified import certificate_lines, ledger_names
from conformal_arbitrage.monitoring.lines import AlarmLine, Lines
from conformal_arbitrage.monitoring.monitor import LedgerRow, Monitor
from conformal_arbitrage.monitoring.states import SEVERITY, Cause, Standing
from conformal_arbitrage.store.base import PolicyVersion, Store
from conformal_arbitrage.store.ledger_base import LedgerKey, LedgerRows
from conformal_arbitrage.store.record import AlarmBody

if TYPE_CHECKING:
    from conformal_arbitrage.live.guarding import CertificateGuard

_LARGEST_LOG = 690.0
"""Evidence beyond this is shown as e to that power, which is still a number."""


def deferring(certificate: Certificate) -> Certificate:
    """Return a certificate's rule with every action in sight: what safe mode serves."""
    single = replace(certificate, by=None, groups=None, small_groups=None, learned=None, fit=None)
    return replace(single, status="always_defer", relaxation=None, boundary_u=None)


def voided(version: PolicyVersion | None) -> str | None:
    """Return why a version's promise is void: an alarm was lifted, or its rows are older than one; None if it is not."""
    if version is None or version.alarmed is None:
        return None
    if version.lifts:
        return "an alarm was lifted without a new certificate"
    if version.alarm is None:
        number = version.alarmed.version
        return f"the certificate's rows are older than the alarm of version {number}: calibrate on rows since then"
    return None


def lines_of(certificate: Certificate, alarm_line: AlarmLine = "luck") -> dict[str, Lines]:
    """Return what the ledgers of a certificate in service are watched against, by their name: "" if it has no groups.

    Raises:
        OptionError: there is nothing to watch, or nothing that can be.
    """
    if certificate.unit == "session":
        refuse_combination("monitor", "session")
    if certificate.groups is None:
        return {"": _lines(certificate, alarm_line)}
    members = {ledger: name for name, ledger in ledger_names(certificate).items()}
    if not members:
        raise OptionError("every query of every group is deferred, so the loss is 0: there is nothing to watch")
    return {
        ledger: certificate_lines(certificate, group=name, alarm_line=alarm_line) for ledger, name in members.items()
    }


def _lines(certificate: Certificate, alarm_line: AlarmLine) -> Lines:
    lines = certificate_lines(certificate, alarm_line=alarm_line)
    unproved = refusal("red line", "learned") if certificate.learned is not None else None
    return lines if unproved is None else replace(lines, red=None, false_red=None, note=f"there is no red: {unproved}")


def false_red_of_policy(certificate: Certificate, lines: Mapping[str, Lines]) -> float | None:
    """Return the most that the probability of safe mode, ever, can be if traffic is exchangeable and no audit is missing.

    The evidence of each ledger has its own share, and so has the luck of each calibration, unless one confidence covers all
    groups together. None if there is no such bound, or no red at all.
    """
    shares = [one.false_red for one in lines.values() if one.red is not None]
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
        if certificate.cluster is not None:
            refuse_combination("red line", "cluster")
        if certificate.learned is not None:
            refuse_combination("red line", "learned")
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
        store: where the ledger is.
        key: which one.
        lines: what it is watched against.
        audit_rate: the share of decisions that the coin draws now.
        guard: takes the losses as they become known, if the policy has a guard.

    Attributes:
        known: the losses that are known, in the order in which they became known.
        monitor: what the ledger says; empty until `follow`.
        served: the figure of delivered answers where it is another than the rule's own; None where it is the same.
    """

    def __init__(
        self, store: Store, key: LedgerKey, lines: Lines, *, audit_rate: float,
        guard: "CertificateGuard | None" = None,
    ) -> None:  # fmt: skip
        self.key = key
        self.guard = guard
        self.known = KnownLosses()
        self.lines = lines
        self.monitor = Monitor(lines, audit_rate=audit_rate)
        self.served: ServedFigure | None = None
        self._store = store
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

    async def follow(self) -> bool:
        """Take what is new in the ledger; return whether there was anything."""
        if self._cursor is None:
            ledger = await self._store.ledger(self.key)
            self._take_all(ledger)
            return True
        rows = await self._store.ledger_changes(self.key, self._cursor)
        for row in rows:
            same = row.served is None and row.delivered
            (self._differing.discard if same else self._differing.add)(row.seq)
        if rows:
            self.monitor.observe(LedgerRow(row.seq, row.due, row.loss) for row in rows)
            self._tell_guard(self.known.take(rows))
            self._cursor = rows[-1].change
        return bool(rows)

    def _take_all(self, rows: LedgerRows) -> None:
        self.monitor = Monitor.from_ledger(self.lines, rows.loss, rows.due, audit_rate=self.monitor.audit_rate)
        self._differing = set((np.flatnonzero(rows.served_otherwise) + 1).tolist())
        self._cursor = rows.change
        self._tell_guard(self.known.take_all(rows))

    def _tell_guard(self, losses: list[float]) -> None:
        if self.guard is not None:
            self.guard.take(losses)

    async def refresh_served(self, now: float) -> None:
        """Bring the figure of delivered answers up to date; it takes the whole ledger where the two figures differ."""
        if self._served_at == self._cursor:
            return
        self._served_at = -1 if self._cursor is None else self._cursor
        figure = None
        if self._differing:
            rows = await self._store.ledger(self.key)
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
        "audits": {"known": figures.known, "pending": figures.pending, "missing": figures.missing},
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
    worst = min((one.state for one in standings.values()), key=SEVERITY.index)
    those = {name: one for name, one in standings.items() if one.state == worst}
    causes = {one.cause for one in those.values()}
    return {
        "state": worst,
        "reasons": [f"{name}: {reason}" for name, one in those.items() for reason in one.reasons],
        "cause": "losses" if "losses" in causes else min((one for one in causes if one is not None), default=None),
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
