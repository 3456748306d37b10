"""The guard: a threshold that audited losses raise above the certificate's, and never lower below it.

With rho the share of calibration margins that defer, every known audit sets

    rho = max(base, rho + step (x - a)),

base being the certificate's share and x the loss. Since rho >= base and the loss falls with the relaxation, the
certificate's promise stays. And for any sequence whatever, the sum of (x - a) over known audits is at most
(1 - base + step) / step plus the largest number of outcomes that were ever pending at once: from rho = 1 on everything is in
sight, so only decisions made before can lose. A cap on rho would break that as soon as outcomes are late.

Updates are applied in the order in which outcomes became known, which the ledger keeps.
Knows nothing of ledgers, scores or clocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

import numpy as np

from conformal_arbitrage.calibration.certificate import MarginThreshold
from conformal_arbitrage.calibration.options import threshold_rank
from conformal_arbitrage.core.exact import Floats

STEP = 0.02
_ONE = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The guard of one certificate.

    Attributes:
        alpha: the risk budget, as a share of the loss bound.
        base: the share of calibration margins that the certificate defers.
        step: how far one loss moves the share.
    """

    alpha: float
    base: float
    step: float = STEP

    def next_level(self, level: int, loss: float) -> int:
        """Return how far, in ticks of the loss, the share stands above its base after one more known audit."""
        rise = round(min(max(loss, 0.0), 1.0) * _ONE) - floor(self.alpha * _ONE)
        return max(level + rise, 0)

    def share(self, level: int) -> float:
        """Return rho at a level."""
        return self.base + self.step * (level / _ONE)

    def shares(self, losses: Floats) -> Floats:
        """Return rho after each known audit.

        Args:
            losses: as shares of the loss bound, in the order in which they became known.
        """
        rises = np.rint(np.clip(losses, 0.0, 1.0) * _ONE).astype(np.int64) - floor(self.alpha * _ONE)
        level = np.cumsum(rises)  # whole ticks: the same numbers whether computed at once or one by one
        reflected = level - np.minimum(np.minimum.accumulate(level), 0)
        return self.base + self.step * (reflected / _ONE)

    def excess_bound(self, most_pending: int) -> float:
        """Return the most that the sum of (x - a) over known audits can ever be."""
        return (1 - self.base + self.step) / self.step + most_pending


def guarded_threshold(
    rho: float, certified: MarginThreshold, quantiles: Sequence[MarginThreshold | None]
) -> MarginThreshold | None:
    """Return the threshold in force: the certified one or, if larger, the quantile of rho; None for everything in sight."""
    if rho >= 1:
        return None
    quantile = quantiles[ceil(rho * (len(quantiles) - 1))]
    return None if quantile is None else max(quantile, certified, key=lambda threshold: threshold_rank(*threshold))
