"""How a ledger came to stand where it stands: mean, limits and evidence along its audits.

Knows nothing of clocks or how a history is drawn.
"""

from dataclasses import dataclass

import numpy as np

from conformal_arbitrage.core.arrays import Floats, Integers
from conformal_arbitrage.monitoring.evidence import log_evidence
from conformal_arbitrage.monitoring.limits import limits_of, loss_logs
from conformal_arbitrage.monitoring.lines import Lines

_POINTS = 240
_SLAB = 1 << 15


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
    n = len(losses)
    audits = np.unique(np.linspace(1, n, min(points, n)).round().astype(np.int64)) if n else np.zeros(0, dtype=np.int64)
    shares = np.clip((losses + 1) / 2 if lines.signed else losses, 0.0, 1.0)
    known = ~np.isnan(losses)
    best, worst = np.where(known, shares, 0.0), np.where(known, shares, 1.0)
    counts = np.cumsum(known)[audits - 1] if n else audits
    with np.errstate(invalid="ignore"):
        mean = np.cumsum(best)[audits - 1] / counts if n else np.zeros(0)
    lower = limits_of(_sums_at(best, audits), audits)[0]
    upper = limits_of(_sums_at(worst, audits), audits)[1]
    if lines.signed:
        mean, lower, upper = 2 * mean - 1, 2 * lower - 1, 2 * upper - 1
    counted = best if missing is None else np.maximum(best, np.where(known, 0.0, missing))
    return LedgerHistory(
        lines=lines, audits=audits, mean=mean, lower=lower, upper=upper, evidence=_evidence(lines, counted, audits)
    )


def _sums_at(shares: Floats, audits: Integers) -> Integers:
    """Return the sums behind the limits after each of some numbers of audits, a slab at a time."""
    sums: list[Integers] = []
    total, first = np.zeros(loss_logs(np.zeros(1)).shape[1], dtype=np.int64), 0
    for low in range(0, len(shares), _SLAB):
        running = np.cumsum(loss_logs(shares[low : low + _SLAB]), axis=0) + total
        last = int(np.searchsorted(audits, low + len(running), side="right"))
        sums.append(running[audits[first:last] - low - 1])
        total, first = running[-1], last
    return np.concatenate(sums) if sums else np.zeros((0, len(total)), dtype=np.int64)


def _evidence(lines: Lines, shares: Floats, audits: Integers) -> Floats:
    """Return the log evidence after the whole blocks so far."""
    whole = len(shares) // lines.block
    if not whole:
        return np.zeros(len(audits))
    means = shares[: whole * lines.block].reshape(whole, lines.block).mean(axis=1)
    logs = np.concatenate([[0.0], log_evidence(means, lines.levels[-1])])
    return logs[audits // lines.block]
