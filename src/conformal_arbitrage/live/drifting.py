"""Notice that the Primary's margins have changed: other questions, not a broken promise.

The margins of audited decisions, in the order of the draw, are compared with those of calibration, where the certificate has
all of them, and with all earlier ones. It is a function of the ledger, and never leads to anything but words.

Knows nothing of HTTP, or of what is done about a notice.
"""

from dataclasses import dataclass

import numpy as np

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.draws import draw
from conformal_arbitrage.calibration.margins import QUANTILES, read_quantiles
from conformal_arbitrage.calibration.project_secret import subkey
from conformal_arbitrage.live.watching import as_evidence
from conformal_arbitrage.monitoring.drift import DriftNotice
from conformal_arbitrage.store.base import Store
from conformal_arbitrage.store.ledger_base import LedgerKey

_AT_ONCE = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftStanding:
    """What is known of the margins.

    Attributes:
        decisions: audited ones whose margins were compared.
        evidence: that they have changed; 100 is a notice, which ever comes with probability 0.01 at most if they have not.
        noticed: whether it ever was that much.
        with_calibration: whether they were compared with those of calibration, and not with earlier ones alone.
    """

    decisions: int
    evidence: float
    noticed: bool
    with_calibration: bool


class DriftWatch:
    """Follows the margins of one ledger.

    Args:
        store: where the ledger is.
        key: which one.
        certificate: what is in force; without the quantiles of its margins, or with more than 1,000 rows, margins are
            compared with earlier ones alone.
        secret: the project's; the draws that order equal margins depend on it.
    """

    def __init__(self, store: Store, key: LedgerKey, certificate: Certificate, secret: bytes) -> None:
        margins, cuts = _calibration_margins(certificate)
        self._store = store
        self._key = key
        self._secret = subkey(secret, "drift v1")
        self._notice = DriftNotice(np.array(margins), cuts)
        self._with_calibration = bool(margins)
        self._read = self._compared = 0

    async def follow(self) -> None:
        """Take the margins of rows that are new."""
        while margins := await self._store.ledger_margins(self._key, self._read, limit=_AT_ONCE):
            numbered = list(enumerate(margins, start=self._read + 1))
            drawn = [(margin, self._draw(seq)) for seq, margin in numbered if margin is not None]
            self._notice.observe(drawn)
            self._read += len(margins)
            self._compared += len(drawn)

    def _draw(self, seq: int) -> float:
        key = self._key
        return draw(self._secret, f"{key.policy} {key.version} {key.lifts} {key.identities_sha256} {key.group} {seq}")

    def standing(self) -> DriftStanding:
        """Return what is known of the margins."""
        evidence = self._notice.log_evidence()
        return DriftStanding(
            decisions=self._compared,
            evidence=as_evidence(float(evidence[-1])) if len(evidence) else 1.0,
            noticed=self._notice.noticed(),
            with_calibration=self._with_calibration,
        )


def _calibration_margins(certificate: Certificate) -> tuple[list[float], list[float]]:
    """Return the margins of the calibration rows, if all are known, and the cuts between which margins count as equal."""
    if certificate.margin_quantiles is None:
        return [], np.linspace(0.0, 1.0, QUANTILES).tolist()
    quantiles, n = read_quantiles(certificate.margin_quantiles), certificate.n
    cuts = [one[0] for one in quantiles if one is not None]
    if n > QUANTILES - 1:
        return [], cuts
    ranks = [-(-k * n // (QUANTILES - 1)) for k in range(1, QUANTILES)]  # every row has one, since n is small
    by_rank = dict(zip(ranks, quantiles[1:], strict=True))
    return [one[0] for one in by_rank.values() if one is not None], cuts
