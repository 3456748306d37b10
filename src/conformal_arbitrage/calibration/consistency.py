"""Consistency: which fields of a certificate contradict each other, as far as that shows without its log.

Knows nothing of files, signatures or how certificates are made.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from conformal_arbitrage.calibration.guarantee import TERMS, guarantee_text
from conformal_arbitrage.calibration.options import NET, REGRET
from conformal_arbitrage.core.losses import as_fraction
from conformal_arbitrage.core.risk import SMALLEST_BOUND
from conformal_arbitrage.errors import CertificateError

if TYPE_CHECKING:
    from conformal_arbitrage.calibration.certificate import Certificate


def refuse_contradictions(certificate: "Certificate", source: str) -> None:
    """Reject a certificate whose fields contradict each other.

    Args:
        certificate: the certificate.
        source: where it came from, for the message.
    """
    _refuse(certificate, _impossible(certificate), source)
    if certificate.schema > 1:
        _refuse(certificate, _contradictions(certificate), source)


def least_loss(certificate: "Certificate") -> float:
    """Return the smallest loss that a decision can have."""
    return -certificate.loss_bound if certificate.loss == NET else 0.0


def _impossible(certificate: "Certificate") -> dict[str, bool]:
    """Return which fields no certificate of any schema can have together."""
    return {
        "relaxation": (certificate.relaxation is None) != (certificate.status == "always_defer")
        or (certificate.relaxation is not None and not 0 <= certificate.relaxation < float("inf")),
        "alpha": not 0 < certificate.alpha < certificate.loss_bound < float("inf"),
        "full_sight_loss": not 0 <= certificate.full_sight_loss <= certificate.alpha
        or (certificate.full_sight_loss != 0 and certificate.loss in (REGRET, NET)),
        "boundary_u": (certificate.boundary_u is not None)
        != (certificate.boundary == "random" and certificate.status == "ok")
        or not 0 <= (certificate.boundary_u or 0.0) < 1,
        "n": certificate.n < 1,
        "max_cluster_size": len(
            {v is None for v in (certificate.cluster, certificate.clusters, certificate.max_cluster_size)}
        )
        > 1
        or not (1 if certificate.max_cluster_size is None else certificate.max_cluster_size) >= 1,
        "columns": set(certificate.columns) != {"primary", "guardian"},
        "identities": certificate.identities != "unbound" and not _are_identities(certificate.identities),
        "key_sha256": (certificate.key_sha256 is not None) != (certificate.boundary == "random"),
    }


def _refuse(certificate: "Certificate", wrong: Mapping[str, bool], source: str) -> None:
    for name, bad in wrong.items():
        if bad:
            value = getattr(certificate, name)
            raise CertificateError(f"{source}: {name} {value!r:.80} contradicts the rest; calibrate again")


def _contradictions(certificate: "Certificate") -> dict[str, bool]:
    """Return which fields are not what the others imply, as far as that shows without the log."""
    total, unseen = certificate.empirical_risk * certificate.n, certificate.max_cluster_size or 1
    slack = certificate.alpha - (total + unseen * certificate.loss_bound) / (certificate.n + unseen)
    # otherwise deferring may be needed with budget left
    sure = certificate.grid is None and certificate.full_sight_loss == 0
    fewest, most, deferring = certificate.fewest_actions, certificate.most_actions, certificate.status == "always_defer"
    return {
        "loss_bound": certificate.loss_bound < SMALLEST_BOUND,
        "empirical_risk": not least_loss(certificate) <= certificate.empirical_risk <= certificate.loss_bound
        or (deferring and total != 0),
        "slack": abs(slack - certificate.slack) > 1e-12 * max(1.0, certificate.loss_bound)
        or (sure and certificate.slack >= 0 if deferring else certificate.slack < 0),
        "grid": certificate.grid is not None and not _is_on_grid(certificate),
        "envelope_excess": certificate.envelope_excess < 0
        or (certificate.envelope_excess > 0 and certificate.loss in (REGRET, NET)),
        "regret": (certificate.regret is None) != (certificate.loss != NET)
        or (certificate.regret is not None and certificate.regret < certificate.empirical_risk - 1e-12),
        "spread": (certificate.spread is None) != (certificate.loss != NET)
        or not 0 <= (certificate.spread or 0.0) <= certificate.loss_bound,
        "no_opinion_rows": not 0 <= certificate.no_opinion_rows <= certificate.n,
        "missing_guardian_rows": not 0
        <= certificate.missing_guardian_rows
        <= (certificate.n if certificate.missing_guardian else 0),
        "fewest_actions": fewest is None or most is None or not 1 <= fewest <= most,
        "router": certificate.router and (fewest, most) != (2, 2),
        "signature": (certificate.signature is None) != (certificate.secret_id is None),
        "guarantee": certificate.guarantee != guarantee_text(**{name: getattr(certificate, name) for name in TERMS}),
    }


def _is_on_grid(certificate: "Certificate") -> bool:
    if certificate.grid is None or certificate.relaxation is None:
        return True
    step = as_fraction(certificate.grid, name="grid")
    return step > 0 and certificate.relaxation == float(round(certificate.relaxation / step) * step) <= 1


def _are_identities(identities: Mapping[str, Any]) -> bool:
    return {"primary", "guardian"} <= set(identities) and all(isinstance(one, dict) for one in identities.values())
