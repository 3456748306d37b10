"""The losses of a ledger that are known, in the order in which they became known, whichever way they are read.

Knows nothing of stores, or of what the losses mean.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np

from conformal_arbitrage.store.ledger_base import AuditRow, LedgerRows


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
