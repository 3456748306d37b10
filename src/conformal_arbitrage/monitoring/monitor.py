"""Monitor: what a ledger of audited decisions says about its certificate, at any moment.

Everything is a function of the ledger and the clock. Rows may arrive in any order, one by one or all at once, and outcomes
may become known in any order: the numbers are the same, to the bit.

Knows nothing of databases, policies or what is done about an alarm.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from conformal_arbitrage.core.arrays import Floats, Integers
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.monitoring.evidence import EvidenceProcess, grown
from conformal_arbitrage.monitoring.limits import NO_LOSS, WHOLE_LOSS, Limits, LossSums
from conformal_arbitrage.monitoring.lines import LOG_AMBER, Lines
from conformal_arbitrage.monitoring.states import Cause, Figures, Standing, judge

_ONE = 10**12
"""A loss of the whole bound, in ticks; of net losses, ticks count from the largest gain on."""
_NOISE = 1e-9
_NOT_A_LOSS = "a loss is a number from {least:g} to 1, or None while it is unknown; got {loss!r}"
_ABSENT, _PENDING, _MISSING = -3, -2, -1
_FEW_VALUES = 4096


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One audited decision.

    Attributes:
        seq: its place in the ledger, from 1: the order in which the coin drew, which nothing later changes.
        due: the time after which an unknown outcome is missing.
        loss: as a share of the loss bound, in [0, 1], or in [-1, 1] if gains count; None while it is unknown.
    """

    seq: int
    due: float
    loss: float | None = None


class Monitor:
    """Watches one ledger: one policy version with one set of models (and one group).

    Attributes:
        lines: what the ledger is watched against.
        audit_rate: the share of decisions that the coin draws now; only whether it is 0 matters.
    """

    def __init__(self, lines: Lines, *, audit_rate: float = 1.0) -> None:
        self.lines = lines
        self.audit_rate = audit_rate
        self._process = EvidenceProcess(lines.levels)
        self._cells = np.full(0, _ABSENT, dtype=np.int64)  # ticks of a known loss, or why there are none
        self._totals = np.zeros(0, dtype=np.int64)  # of each block, pending as 0 and missing as 1, in ticks
        self._due: list[tuple[float, int]] = []
        self._now = -inf
        self._rows = self._contiguous = self._pending = self._missing = self._loss = 0
        self._changed = 0  # the first block whose total the evidence does not know
        self._sums = LossSums()
        self._sums_of = {0: NO_LOSS, _ONE: WHOLE_LOSS}

    @classmethod
    def from_ledger(
        cls, lines: Lines, losses: Floats, due: Floats | None = None, *, audit_rate: float = 1.0
    ) -> "Monitor":
        """Recompute everything from a whole ledger.

        Args:
            lines: what it is watched against.
            losses: one per row in order of seq, as shares of the loss bound; NaN while unknown.
            due: when each outcome is due; needed if one is unknown.
            audit_rate: as in the constructor.
        """
        monitor = cls(lines, audit_rate=audit_rate)
        monitor._load(losses, np.full(len(losses), -inf) if due is None else due)
        return monitor

    def observe(self, rows: Iterable[LedgerRow]) -> None:
        """Take rows that are new, or whose outcome has become known; to see a row again changes nothing."""
        for row in rows:
            if row.seq < 1:
                raise OptionError(f"a ledger's rows are numbered from 1; got {row.seq}")
            self._reserve(row.seq)
            place = row.seq - 1
            if self._cells[place] == _ABSENT:
                self._rows += 1
                self._pending += 1
                self._cells[place] = _PENDING
            if row.loss is None and self._cells[place] == _PENDING:  # it may be due earlier than it was
                heappush(self._due, (row.due, place))
            if row.loss is not None:
                self._settle(place, _ticks(row.loss, self.lines))

    def red(self, now: float) -> bool:
        """Tell whether the evidence calls for safe mode; cheap enough to ask after every audit."""
        self._catch_up(now)
        return self.lines.red is not None and bool(self._process.peak()[1] >= self.lines.log_red)

    def standing(
        self, now: float, *, alarmed: Cause | None = None, guardian_fails: bool = False, stale: str | None = None
    ) -> Standing:
        """Return what is known at a time.

        Args:
            now: the clock, in the unit of the due dates; one that goes back is taken to stand still.
            alarmed: the cause of an alarm that was raised on this ledger: it stands, whatever late outcomes say.
            guardian_fails: the figure "as served" is above alpha; see `served_loss`.
            stale: why the evidence is old, in words; see `freshness`.
        """
        self._catch_up(now)
        figures = self._figures()
        cause = alarmed or self._cause(figures)
        state, reasons = judge(
            figures, cause=cause, alarmed=alarmed is not None, guardian_fails=guardian_fails, stale=stale
        )
        return Standing(
            state=state,
            reasons=reasons,
            cause=cause,
            figures=figures,
            mean=self.lines.as_loss(self._loss / _ONE / figures.known) if figures.known else None,
            limits=self._as_losses((self._padded(NO_LOSS).limits()[0], self._padded(WHOLE_LOSS).limits()[1])),
            known_limits=None if figures.missing else self._as_losses(self._sums.limits()),
        )

    def _as_losses(self, limits: Limits) -> Limits:
        return self.lines.as_loss(limits[0]), self.lines.as_loss(limits[1])

    def _load(self, losses: Floats, due: Floats) -> None:
        known = ~np.isnan(losses)
        self._reserve(len(losses))
        outside = losses[known][(losses[known] < self.lines.least - _NOISE) | (losses[known] > 1 + _NOISE)]
        if outside.size:
            raise OptionError(_NOT_A_LOSS.format(least=self.lines.least, loss=outside[0]))
        shares = (losses + 1) / 2 if self.lines.signed else losses
        ticks = np.rint(np.clip(shares, 0.0, 1.0) * _ONE)
        self._cells[: len(losses)] = np.where(known, ticks, _PENDING).astype(np.int64)
        self._rows, self._pending = len(losses), int((~known).sum())
        self._due = list(zip(due[~known].tolist(), np.flatnonzero(~known).tolist(), strict=True))
        heapify(self._due)
        self._totals = _block_totals(np.maximum(self._cells, 0), self.lines.block)
        self._loss = int(self._totals.sum())
        self._sums = LossSums.of(self._cells[: len(losses)][known] / _ONE)
        self._contiguous = len(losses)

    def _settle(self, place: int, ticks: int) -> None:
        """Set the outcome of a row: its loss, or that it is missing."""
        before = int(self._cells[place])
        if before == ticks:
            return
        self._cells[place] = ticks
        self._pending -= before == _PENDING
        self._missing += (ticks == _MISSING) - (before == _MISSING)
        self._add_known(ticks, 1)
        self._add_known(before, -1)
        rise = _counted(ticks) - _counted(before)
        if rise:
            block = place // self.lines.block
            self._totals[block] += rise
            self._changed = min(self._changed, block)

    def _add_known(self, ticks: int, count: int) -> None:
        """Add a known loss to the sums, or take it out again."""
        if ticks < 0:
            return
        self._loss += count * ticks
        self._sums = self._sums.plus(self._log_sums(ticks), count)

    def _log_sums(self, ticks: int) -> LossSums:
        sums = self._sums_of.get(ticks)
        if sums is None:
            sums = LossSums.of(np.array([ticks / _ONE]))
            if len(self._sums_of) < _FEW_VALUES:
                self._sums_of[ticks] = sums
        return sums

    def _catch_up(self, now: float) -> None:
        """Mark overdue outcomes as missing, and bring the evidence up to the last whole block."""
        self._now = max(self._now, now)
        while self._due and self._due[0][0] <= self._now:
            _, place = heappop(self._due)
            if self._cells[place] == _PENDING:
                self._settle(place, _MISSING)
        while self._contiguous < self._rows and self._cells[self._contiguous] != _ABSENT:
            self._contiguous += 1
        whole = self._contiguous // self.lines.block
        if min(self._changed, self._process.blocks) < whole:
            first = self._process.resume(min(self._changed, self._process.blocks))
            self._process.update(first, self._totals[first:whole] / (self.lines.block * _ONE))
        self._changed = whole

    def _figures(self) -> Figures:
        last, peak, red = self._process.last().tolist(), self._process.peak().tolist(), self.lines.red
        worst = self._padded(WHOLE_LOSS)
        return Figures(
            lines=self.lines,
            audit_rate=self.audit_rate,
            known=self._rows - self._pending - self._missing,
            pending=self._pending,
            missing=self._missing,
            log_evidence=(last[0], None if red is None else last[1]),
            log_peak=(peak[0], None if red is None else peak[1]),
            within_alpha=worst.below(self.lines.levels[0]),
            within_red=red is not None and worst.below(self.lines.levels[1]),
        )

    def _padded(self, unknown: LossSums) -> LossSums:
        """Return the sums over all rows, with this for each unknown loss."""
        return self._sums.plus(unknown, self._pending + self._missing)

    def _cause(self, figures: Figures) -> Cause | None:
        """Return why the evidence is above a line: losses, if it still were with every missing outcome at its best."""
        if not (figures.crossed or figures.above_alpha):
            return None
        if not figures.missing:
            return "losses"
        means = _block_totals(np.maximum(self._cells, 0), self.lines.block) / (self.lines.block * _ONE)
        process = EvidenceProcess(self.lines.levels)
        process.update(0, means[: self._process.blocks])
        line, enough = (1, self.lines.log_red) if figures.crossed else (0, LOG_AMBER)
        return "losses" if process.peak()[line] >= enough else "failing audits"

    def _reserve(self, rows: int) -> None:
        """Make room for this many rows, doubling it so that growth costs little in the long run."""
        if rows > len(self._cells):
            blocks = -(-max(rows, 2 * len(self._cells)) // self.lines.block)
            known = len(self._cells)
            self._cells, self._totals = grown(self._cells, blocks * self.lines.block), grown(self._totals, blocks)
            self._cells[known:] = _ABSENT


def _ticks(loss: float, lines: Lines) -> int:
    """Return a loss in ticks; one that rounding has put outside its range is clipped, any other outside is refused."""
    if not lines.least - _NOISE <= loss <= 1 + _NOISE:
        raise OptionError(_NOT_A_LOSS.format(least=lines.least, loss=loss))
    return round(min(max(lines.as_share(loss), 0.0), 1.0) * _ONE)


def _counted(cell: int) -> int:
    """Return what an outcome counts in the evidence: pending as the smallest loss, missing as the largest."""
    return _ONE if cell == _MISSING else max(cell, 0)


def _block_totals(ticks: Integers, block: int) -> Integers:
    """Return the total of each block; the rows fill whole blocks."""
    return ticks.reshape(-1, block).sum(axis=1)
