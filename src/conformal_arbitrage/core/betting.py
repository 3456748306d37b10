"""A test that a mean loss lies below a line, for graded losses: one gambler, the same bets for every relaxation.

For independent losses x_i in [0, 1] with mean a or more, wealth prod (1 - nu_i (x_i - a)) is a supermartingale from 1 if
nu_i depends on earlier rows only, so P(it ever reaches 1 / delta) <= delta (Ville). The bets come from earlier rows' losses
at relaxation 0 and are shared by all relaxations. So acceptance is monotone in the losses: if a relaxation is accepted, all
larger ones are, and the one test just below the true threshold decides whether the smallest accepted one fails.

The order of the rows must not depend on their losses. Knows nothing of ids, keys or certificates.
"""

from math import log

import numpy as np

from conformal_arbitrage.core.arrays import Floats, Indices, Integers
from conformal_arbitrage.core.losses import LossStairs
from conformal_arbitrage.core.risk import gap_order

_BOLDEST = 0.999
_MARGIN = 1e-9
"""Wealth must exceed its limit by more than rounding errors."""


def shared_bets(first: Floats, line: float, delta: float) -> Floats:
    """Return the bet on every row, from the losses of earlier rows at relaxation 0.

    nu_i = min(0.999 / (1 - a), sqrt(2 log(1 / delta) / (n v_i))), where v_i = max(a c_i - a^2, a^2 / 20) guesses the
    variance at the threshold, with c_i the ratio of the sums of x^2 and of x over earlier rows, each plus 1/2.

    Args:
        first: the losses at relaxation 0, in order.
        line: a, above 0 and below 1.
        delta: the level of the test.
    """
    squares = np.cumsum(first**2) - first**2
    sums = np.cumsum(first) - first
    ratio = (0.5 + squares) / (0.5 + sums)
    variance = np.maximum(line * ratio - line**2, line**2 / 20)
    return np.minimum(_BOLDEST / (1 - line), np.sqrt(2 * log(1 / delta) / (len(first) * variance)))


def accepts(losses: Floats, bets: Floats, line: float, delta: float) -> bool:
    """Tell whether losses, in order, show that their mean lies below the line, at level delta."""
    wealth = np.cumsum(np.log1p(-bets * (np.minimum(losses, 1.0) - line)))
    return bool(wealth.max(initial=0.0) >= log(1 / delta) + _MARGIN)


class RowLosses:
    """The loss of every row at any relaxation, in ticks."""

    def __init__(self, stairs: LossStairs, n: int, u: Floats | None = None) -> None:
        """Collect the drops of n rows' losses, with one draw per row for a random boundary."""
        self._start = np.zeros(n, dtype=np.int64)
        rows: list[Indices] = []
        gaps: list[Floats] = []
        drops: list[Integers] = []
        for stair in stairs.blocks:
            own = stair.block.all_rows()
            self._start[own] = stair.levels[0]
            falls = stair.levels[:-1] - stair.levels[1:]
            hit = np.flatnonzero(falls)
            rows.append(own[hit % len(own)])
            gaps.append(stair.gaps[1:].ravel()[hit])
            drops.append(falls.ravel()[hit])
        row, gap = np.concatenate(rows), np.concatenate(gaps)
        order, self._draw = gap_order(gap, None if u is None else u[row])
        self._row, self._gap, self._drop = row[order], gap[order], np.concatenate(drops)[order]

    def at(self, relaxation: float, boundary_u: float | None = None) -> Integers:
        """Return the loss of every row at a relaxation."""
        losses, taken = self._start.copy(), self._taken(relaxation, boundary_u)
        np.subtract.at(losses, self._row[:taken], self._drop[:taken])
        return losses

    def _taken(self, relaxation: float, boundary_u: float | None) -> int:
        """Return how many drops a relaxation has taken."""
        if self._draw is None or boundary_u is None:
            return int(np.searchsorted(self._gap, relaxation, side="right"))
        low, high = (int(np.searchsorted(self._gap, relaxation, side=side)) for side in ("left", "right"))
        return low + int(np.searchsorted(self._draw[low:high], boundary_u, side="right"))
