"""How a ledger came to stand where it stands: mean, limits and evidence along its audits.

Knows nothing of clocks or how a history is drawn.
"""

from dataclasses import dataclass

import numpy as np

from conformal_arbitrage.core.arrays import Floats, Integers
from conformal_arbitrage.monitoring.evidence import log_evidence
from conformal_arbitrage.monitoring.limits import NO_LOSS, limits_of, loss_logs
from conformal_arbitrage.monitoring.lines import Lines

_POINTS = 240
_SLAB = 1 << 10
"""Rows at a time: each has a logarithm for every bet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerHistory:
    """What a ledger showed after some of its audits; all arrays have one entry for each of these.

    Attributes:
        lines: what it is watched against.
        audits: how many there were.
        mean: of the known losses; NaN before the first.
        lower: the lower limit, with every unknown loss at its smallest.
        upper: the upper limit, with every unknown loss at its largest.
        evidence: log E against the red line, or against alpha if there is none; pending outcomes at their smallest.
    """

    lines: Lines
    audits: Integers
    mean: Floats
    lower: Floats
    upper: Floats
    evidence: Floats


class LedgerCourse:
    """Mean and limits along a ledger, taken part by part, so that no part needs to be kept.

    Args:
        lines: what it is watched against.
        rows: how many rows there will be.
        points: at most this many, evenly spaced; the last one is the last row.

    Attributes:
        audits: after how many rows there is a point.
    """

    def __init__(self, lines: Lines, rows: int, *, points: int = _POINTS) -> None:
        spaced = np.linspace(1, rows, min(points, rows)).round().astype(np.int64)
        self.audits: Integers = spaced[np.diff(spaced, prepend=0) > 0]
        self._lines = lines
        self._rows = 0
        self._known, self._sum = 0, 0.0
        self._best, self._worst = (np.zeros(len(NO_LOSS.logs), dtype=np.int64) for _ in range(2))
        self._means: list[Floats] = []
        self._bests: list[Integers] = []
        self._worsts: list[Integers] = []

    def take(self, losses: Floats) -> Integers:
        """Take the losses of the next rows, NaN while unknown; return at which of them there is a point."""
        if not len(losses):
            return np.zeros(0, dtype=np.int64)
        return np.concatenate([low + self._take(losses[low : low + _SLAB]) for low in range(0, len(losses), _SLAB)])

    def _take(self, losses: Floats) -> Integers:
        first, last = np.searchsorted(self.audits, [self._rows, self._rows + len(losses)], side="right")
        places = self.audits[first:last] - self._rows - 1
        shares, known = _shares(self._lines, losses), ~np.isnan(losses)
        best, worst = np.where(known, shares, 0.0), np.where(known, shares, 1.0)
        counts, sums = self._known + np.cumsum(known), np.cumsum(np.concatenate([[self._sum], best]))[1:]
        with np.errstate(invalid="ignore"):
            self._means.append(sums[places] / counts[places])
        for logs, ends, total in (
            (loss_logs(best), self._bests, self._best), (loss_logs(worst), self._worsts, self._worst)
        ):  # fmt: skip
            running = np.cumsum(logs, axis=0, out=logs)
            ends.append(running[places] + total)
            total += running[-1]
        self._known, self._sum, self._rows = int(counts[-1]), float(sums[-1]), self._rows + len(losses)
        return places

    def figures(self) -> tuple[Integers, Floats, Floats, Floats]:
        """Return the points that were reached: after how many audits, the mean, and the lower and upper limit."""
        audits = self.audits[: np.searchsorted(self.audits, self._rows, side="right")]
        if not len(audits):
            return audits, np.zeros(0), np.zeros(0), np.zeros(0)
        mean = np.concatenate(self._means)
        lower = limits_of(np.concatenate(self._bests), audits)[0]
        upper = limits_of(np.concatenate(self._worsts), audits)[1]
        if self._lines.signed:
            mean, lower, upper = 2 * mean - 1, 2 * lower - 1, 2 * upper - 1
        return audits, mean, lower, upper


def ledger_history(
    lines: Lines, losses: Floats, missing: Floats | None = None, *, points: int = _POINTS
) -> LedgerHistory:
    """Return the history of a ledger, as its outcomes are known now.

    Args:
        lines: what it is watched against.
        losses: one per row in order of seq, as shares of the loss bound; NaN while unknown.
        missing: which unknown losses are overdue, as 0 and 1; these count whole in the evidence.
        points: at most this many, evenly spaced; the last one is the last row.
    """
    course = LedgerCourse(lines, len(losses), points=points)
    course.take(losses)
    audits, mean, lower, upper = course.figures()
    known = ~np.isnan(losses)
    counted = np.where(known, _shares(lines, losses), 0.0 if missing is None else missing)
    return LedgerHistory(
        lines=lines, audits=audits, mean=mean, lower=lower, upper=upper, evidence=_evidence(lines, counted, audits)
    )


def _shares(lines: Lines, losses: Floats) -> Floats:
    return np.clip((losses + 1) / 2 if lines.signed else losses, 0.0, 1.0)


def _evidence(lines: Lines, shares: Floats, audits: Integers) -> Floats:
    """Return the log evidence after the whole blocks so far."""
    whole = len(shares) // lines.block
    if not whole:
        return np.zeros(len(audits))
    means = shares[: whole * lines.block].reshape(whole, lines.block).mean(axis=1)
    logs = np.concatenate([[0.0], log_evidence(means, lines.levels[-1])])
    return logs[audits // lines.block]
