"""Guard a certificate in service: the threshold that the known losses of its ledger put in force.

It is a function of the certificate and of these losses in the order in which they became known, so every process that
follows the ledger has the same, and a record that says how many losses were known says which threshold decided.

Knows nothing of stores, HTTP or how decisions are made.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.combinations import Kind, refuse_combination
from conformal_arbitrage.calibration.margins import base_share, read_quantiles
from conformal_arbitrage.calibration.options import NET
from conformal_arbitrage.errors import CertificateError
from conformal_arbitrage.monitoring.guard import Guard, guarded_threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardStanding:
    """Where a guard stands.

    Attributes:
        known: how many losses it rests on.
        base: the share of calibration rows that the certificate defers.
        share: the share that the threshold in force would defer; 1 or more defers everything.
        excess: the sum of (loss - alpha) over the known losses, as shares of the loss bound.
        bound: the most that this sum can be, not counting losses of decisions whose outcome was not known here yet.
    """

    known: int
    base: float
    share: float
    excess: float
    bound: float


def kinds_of(certificate: Certificate) -> list[Kind]:
    """Return what kind of certificate this is, in the words of `refuse_combination`."""
    kinds: dict[Kind, bool] = {
        "net": certificate.loss == NET,
        "learned": certificate.learned is not None,
        "cluster": certificate.cluster is not None,
        "groups": certificate.groups is not None,
        "session": certificate.unit == "session",
    }
    return [kind for kind, holds in kinds.items() if holds]


class CertificateGuard:
    """Raises a certificate's threshold with every loss, and lowers it again, never below the certificate's.

    Args:
        certificate: what is guarded.

    Raises:
        CertificateError: it does not have the quantiles of its margins.
        OptionError: there is no proof for such a certificate.
    """

    def __init__(self, certificate: Certificate) -> None:
        refuse_combination("guard", *kinds_of(certificate))
        if certificate.relaxation is None or certificate.margin_quantiles is None:
            raise CertificateError(
                "a guard needs the quantiles of the certificate's margins; calibrate again with margins=True (--margins), "
                "or leave guard = true out"
            )
        self._certificate = certificate
        self._certified = (certificate.relaxation, certificate.boundary_u)
        self._quantiles = read_quantiles(certificate.margin_quantiles)
        base = base_share(self._certified, self._quantiles)
        self._guard = Guard(alpha=certificate.alpha / certificate.loss_bound, base=base)
        self._known = self._level = 0
        self._excess = 0.0

    def take(self, losses: Iterable[float]) -> None:
        """Take further losses, as shares of the loss bound, in the order in which they became known."""
        for loss in losses:
            self._known += 1
            self._level = self._guard.next_level(self._level, loss)
            self._excess += loss - self._guard.alpha

    def standing(self) -> GuardStanding:
        """Return where the guard stands."""
        guard = self._guard
        return GuardStanding(
            known=self._known,
            base=guard.base,
            share=guard.share(self._level),
            excess=self._excess,
            bound=guard.excess_bound(0),
        )

    def in_force(self) -> Certificate:
        """Return the certificate with the threshold that is in force."""
        threshold = guarded_threshold(self._guard.share(self._level), self._certified, self._quantiles)
        if threshold is None:
            return replace(self._certificate, status="always_defer", relaxation=None, boundary_u=None)
        return replace(self._certificate, relaxation=threshold[0], boundary_u=threshold[1])
