"""A notice that the Primary's margins have changed: other questions, not a broken promise.

Each drawn decision gets a conformal p-value of its margin against a bag that holds the calibration margins and every earlier
live one. While traffic is exchangeable the p-values are uniform and independent, so four processes of evidence at line 1/2,
on p, 1 - p, |2p - 1| and 1 - |2p - 1|, with a quarter of the weight each, stay low. The bag must grow: against the
calibration margins alone p-values are not uniform given these, and false notices are nearly certain.

It says little about the loss. A Primary that becomes wrong at the same margins is invisible here, and on real logs a notice
came about as often with the promise kept as with it broken; so it never leads to safe mode.

Knows nothing of ledgers, coins or clocks.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import log

import numpy as np

from conformal_arbitrage.core.arrays import Floats, Integers
from conformal_arbitrage.monitoring.evidence import EvidenceProcess

BLOCK = 10
NOTICE_EVIDENCE = 100.0
_CUTS = 1001
_VIEWS = 4


class DriftBag:
    """The margins seen so far, counted at and between 1,001 quantiles of the calibration margins.

    Cells between quantiles count as ties. For continuous margins that keeps p-values exactly uniform: a new margin falls
    between two order statistics with a probability in proportion to the margins there plus one.
    """

    def __init__(self, margins: Floats, cuts: Sequence[float] | None = None) -> None:
        """Begin with the calibration margins, or with none if there are cuts fixed before any live margin is seen."""
        ordered = np.sort(margins)
        self._cuts: list[float] = sorted(set(_quantiles_of(ordered) if cuts is None else cuts))
        cells = np.array([self._cell(margin) for margin in ordered.tolist()], dtype=np.int64)
        self._counts: Integers = np.bincount(cells, minlength=2 * len(self._cuts) + 1)
        self.size = len(ordered)

    def p_value(self, margin: float, draw: float) -> float:
        """Return (#larger + v (#equal + 1)) / (N + 1) with the draw v, and put the margin into the bag."""
        cell = self._cell(margin)
        larger, equal = int(self._counts[cell + 1 :].sum()), int(self._counts[cell])
        p = (larger + draw * (equal + 1)) / (self.size + 1)
        self._counts[cell] += 1
        self.size += 1
        return p

    def _cell(self, margin: float) -> int:
        """Return 2 k + 1 for a margin equal to cut k, and 2 k for one just below it."""
        place = bisect_left(self._cuts, margin)
        return 2 * place + (place < len(self._cuts) and self._cuts[place] == margin)


def _quantiles_of(ordered: Floats) -> list[float]:
    ranks = np.unique(np.ceil(np.linspace(0, 1, _CUTS) * len(ordered)).astype(np.int64).clip(1)) - 1
    return ordered[ranks].tolist()


class DriftNotice:
    """Watches the margins of drawn decisions, in order of seq."""

    def __init__(self, margins: Floats, cuts: Sequence[float] | None = None) -> None:
        """Begin with the calibration margins; see `DriftBag`."""
        self._bag = DriftBag(margins, cuts)
        self._p: list[float] = []
        self._process = EvidenceProcess([0.5] * _VIEWS)

    def observe(self, drawn: Iterable[tuple[float, float]]) -> None:
        """Take drawn decisions.

        Args:
            drawn: the margin of each, and its own draw in [0, 1), from a keyed hash of its id.
        """
        self._p += [self._bag.p_value(margin, draw) for margin, draw in drawn]
        whole = len(self._p) // BLOCK
        first = self._process.resume(self._process.blocks)
        if whole > self._process.blocks:
            p = np.array(self._p[first * BLOCK : whole * BLOCK])
            views = np.stack([p, 1 - p, abs(2 * p - 1), 1 - abs(2 * p - 1)], axis=1)
            self._process.update(first, views.reshape(-1, BLOCK, _VIEWS).mean(axis=1))

    def log_evidence(self) -> Floats:
        """Return the log evidence after every block."""
        return np.logaddexp.reduce(self._process.log_evidence(), axis=1) - log(_VIEWS)

    def noticed(self) -> bool:
        """Tell whether the margins have changed, at level 0.01."""
        evidence = self.log_evidence()
        return bool(len(evidence) and evidence.max() >= log(NOTICE_EVIDENCE))
