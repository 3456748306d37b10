"""Consistency: which fields of a certificate contradict each other, as far as that shows without its log.

Knows nothing of files, signatures or how certificates are made.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from conformal_arbitrage.calibration.ancestry import Ancestry, chain_words
from conformal_arbitrage.calibration.guarantee import TERMS, guarantee_text
from conformal_arbitrage.calibration.learned_score import FEWEST_ROWS, LearnedTerms
from conformal_arbitrage.calibration.margins import are_quantiles
from conformal_arbitrage.calibration.options import NET, REGRET
from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.calibration.stops import STOPS, DialStop, GroupThreshold, threshold_rank
from conformal_arbitrage.core.losses import as_fraction
from conformal_arbitrage.core.risk import SMALLEST_BOUND
from conformal_arbitrage.errors import CertificateError

if TYPE_CHECKING:
    from conformal_arbitrage.calibration.certificate import Certificate

_MOST_RENEWALS = 60
"""More doublings than any store has rows for."""
_FAR_FUTURE = 2.0**37
"""Seconds since 1970 that no clock will show; a later time could not be written as a date."""


def refuse_contradictions(certificate: "Certificate", source: str) -> None:
    """Reject a certificate whose fields contradict each other.

    Args:
        certificate: the certificate.
        source: where it came from, for the message.
    """
    _refuse(certificate, _impossible(certificate), source)
    if certificate.schema > 1:
        _refuse(certificate, _contradictions(certificate), source)


def worded(certificate: "Certificate") -> str:
    """Return the guarantee in the words that the fields of a certificate imply."""
    text = guarantee_text(**{name: getattr(certificate, name) for name in TERMS})
    if certificate.ancestry is None:
        return text
    terms = {name: getattr(certificate, name) for name in ("alpha", "confidence", "relaxation", "by")}
    return chain_words(text, certificate.ancestry, **terms)


def least_loss(certificate: "Certificate") -> float:
    """Return the smallest loss that a decision can have."""
    return -certificate.loss_bound if certificate.loss == NET else 0.0


def _impossible(certificate: "Certificate") -> dict[str, bool]:
    """Return which fields no certificate of any schema can have together."""
    return {
        "status": (certificate.status == "by_group") != (certificate.groups is not None)
        or (certificate.status == "learned") != (certificate.learned is not None),
        "relaxation": (certificate.relaxation is None) != (certificate.status != "ok")
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
        "ancestry": certificate.ancestry is not None and not _fits_chain(certificate, certificate.ancestry),
        "key_sha256": (certificate.key_sha256 is not None) != _is_keyed(certificate),
    }


def _refuse(certificate: "Certificate", wrong: Mapping[str, bool], source: str) -> None:
    for name, bad in wrong.items():
        if bad:
            value = getattr(certificate, name)
            raise CertificateError(f"{source}: {name} {value!r:.80} contradicts the rest; calibrate again")


def _contradictions(certificate: "Certificate") -> dict[str, bool]:
    """Return which fields are not what the others imply, as far as that shows without the log."""
    total, slack = certificate.empirical_risk * certificate.n, _expected_slack(certificate)
    average = certificate.confidence is None and certificate.groups is None and certificate.learned is None
    # otherwise deferring may be needed with budget left
    sure = average and certificate.grid is None and certificate.full_sight_loss == 0
    fewest, most, deferring = certificate.fewest_actions, certificate.most_actions, certificate.status == "always_defer"
    return {
        "loss_bound": certificate.loss_bound < SMALLEST_BOUND,
        "empirical_risk": not least_loss(certificate) <= certificate.empirical_risk <= certificate.loss_bound
        or (deferring and total != 0),
        "slack": abs(slack - certificate.slack) > 1e-12 * max(1.0, certificate.loss_bound)
        or (sure and certificate.slack >= 0 if deferring else average and certificate.slack < 0),
        **_wrong_parts(certificate),
        "score": certificate.score is not None and not _may_be_learned(certificate),
        "learned": certificate.learned is not None and not _are_terms(certificate, certificate.learned),
        "grid": certificate.grid is not None and not _is_on_grid(certificate),
        "envelope_excess": certificate.envelope_excess < 0
        or (certificate.envelope_excess > 0 and certificate.loss in (REGRET, NET)),
        "regret": (certificate.regret is None) != (certificate.loss != NET)
        or (certificate.regret is not None and certificate.regret < certificate.empirical_risk - 1e-12),
        "spread": (certificate.spread is None) != (certificate.loss != NET)
        or not 0 <= (certificate.spread or 0.0) <= certificate.loss_bound,
        "unit": certificate.unit is not None
        and (not certificate.router or certificate.loss != REGRET or certificate.cluster is not None),
        "no_opinion_rows": not 0 <= certificate.no_opinion_rows <= certificate.n,
        "missing_guardian_rows": not 0
        <= certificate.missing_guardian_rows
        <= (certificate.n if certificate.missing_guardian else 0),
        "fewest_actions": fewest is None or most is None or not 1 <= fewest <= most,
        "router": certificate.router and (fewest, most) != (2, 2),
        "signature": (certificate.signature is None) != (certificate.secret_id is None),
        "guarantee": certificate.guarantee != worded(certificate),
    }


def _expected_slack(certificate: "Certificate") -> float:
    if certificate.confidence is not None or certificate.groups is not None or certificate.learned is not None:
        return certificate.alpha - certificate.empirical_risk
    total, unseen = certificate.empirical_risk * certificate.n, certificate.max_cluster_size or 1
    return certificate.alpha - (total + unseen * certificate.loss_bound) / (certificate.n + unseen)


def _may_be_learned(certificate: "Certificate") -> bool:
    """Tell whether the other fields are those of a learned score."""
    plain = certificate.loss == REGRET and certificate.unit is None and certificate.confidence is None
    rule = certificate.guardian_sees == "all" and certificate.boundary == "random"
    return plain and rule and certificate.cluster is None and certificate.groups is None and certificate.status != "ok"


def _are_terms(certificate: "Certificate", terms: LearnedTerms) -> bool:
    """Tell whether what a certificate says about its learned score can be true."""
    return (
        certificate.score is not None
        and certificate.n >= FEWEST_ROWS
        and terms.features[:2] == ("margin", "position")
        and len(set(terms.features)) == len(terms.features)
        and ("menu" in terms.features) == (terms.menu_size is not None)
        and set(terms.missing) == set(terms.features) & {"group", "tokens", "text"}
        and ("text" in terms.features) == (terms.text_sha256 is not None)
        and all(0 <= count <= certificate.n for count in terms.missing.values())
        and 0 <= terms.rounded_rows <= terms.rows <= certificate.n
        and terms.rows >= 1
        and 0 <= terms.deferred <= 1
        and certificate.empirical_risk <= certificate.alpha
    )


def _is_keyed(certificate: "Certificate") -> bool:
    """Tell whether a key is behind the draws, or behind the order of the rows of the betting test."""
    binary = certificate.zero_one or (
        certificate.binarized and certificate.loss_bound == 1 and certificate.loss == REGRET
    )
    return certificate.boundary == "random" or (certificate.confidence is not None and not binary)


def _wrong_parts(certificate: "Certificate") -> dict[str, bool]:
    """Return which of confidence, dial, groups and quantiles are not what the other fields imply."""
    confidence, dial, groups = certificate.confidence, certificate.dial, certificate.groups
    return {
        "confidence": confidence is not None and (not 0 < confidence < 1 or certificate.cluster is not None),
        "dial": dial is not None and (confidence is None or not _is_dial(certificate, dial)),
        "by": (certificate.by is None) != (groups is None),
        "groups": groups is not None and (certificate.cluster is not None or not _are_groups(certificate, groups)),
        "margin_quantiles": certificate.margin_quantiles is not None
        and not are_quantiles(certificate.margin_quantiles, drawn=certificate.boundary == "random"),
        "small_groups": certificate.small_groups is not None
        and (groups is None or confidence is not None or not _share_threshold(certificate, groups)),
    }


def _is_dial(certificate: "Certificate", dial: Sequence[DialStop]) -> bool:
    """Tell whether stops are the declared ones, ever smaller thresholds, and the chosen one is among them."""
    bound = as_fraction(certificate.loss_bound, name="loss_bound")
    ranks = [threshold_rank(stop.relaxation, stop.boundary_u) for stop in dial]
    chosen = (certificate.alpha, certificate.relaxation, certificate.boundary_u, certificate.empirical_risk)
    return (
        [stop.alpha for stop in dial] == [float(Fraction(stop) * bound) for stop in STOPS]
        and ranks == sorted(ranks, reverse=True)
        and chosen in [(stop.alpha, stop.relaxation, stop.boundary_u, stop.empirical_risk) for stop in dial]
    )


def _are_groups(certificate: "Certificate", groups: Mapping[str, GroupThreshold]) -> bool:
    """Tell whether groups have rows, thresholds and losses that make up the whole."""
    losses = sum(group.n * group.empirical_risk for group in groups.values())
    return (
        sum(group.n for group in groups.values()) == certificate.n
        and abs(losses / certificate.n - certificate.empirical_risk) <= 1e-12 * max(1.0, certificate.loss_bound)
        and all(_is_group(certificate, group) for group in groups.values())
    )


def _share_threshold(certificate: "Certificate", groups: Mapping[str, GroupThreshold]) -> bool:
    """Tell whether all small groups have the same threshold."""
    fewest = rows_needed(certificate.alpha, certificate.loss_bound)
    return len({(group.relaxation, group.boundary_u) for group in groups.values() if group.n < fewest}) <= 1


def _is_group(certificate: "Certificate", group: GroupThreshold) -> bool:
    drawn = certificate.boundary == "random" and group.relaxation is not None
    relaxation, u = group.relaxation or 0.0, group.boundary_u or 0.0
    return group.n >= 1 and 0 <= relaxation < float("inf") and (group.boundary_u is not None) == drawn and 0 <= u < 1


def _fits_chain(certificate: "Certificate", ancestry: Ancestry) -> bool:
    """Tell whether a certificate has the rows of its place in the chain and, if it was tightened, a larger relaxation."""
    calibrated, counted = ancestry.calibrated, ancestry.step in ("scheduled", "after red")
    own = threshold_rank(certificate.relaxation, certificate.boundary_u)
    rows = 0 if ancestry.renewal < 1 else ancestry.first * 2 ** (ancestry.renewal - 1) + ancestry.collected
    return (
        0 <= ancestry.renewal <= _MOST_RENEWALS
        and ancestry.first >= 1
        and 0 <= ancestry.collected <= certificate.n
        and 0 <= ancestry.since < _FAR_FUTURE
        and (calibrated is not None) == (ancestry.step == "tightened")
        and (calibrated is None or own > threshold_rank(calibrated.relaxation, calibrated.boundary_u))
        and (not counted or certificate.n == rows or (certificate.groups is not None and certificate.n < rows))
    )


def _is_on_grid(certificate: "Certificate") -> bool:
    if certificate.grid is None or certificate.relaxation is None:
        return True
    step = as_fraction(certificate.grid, name="grid")
    return step > 0 and certificate.relaxation == float(round(certificate.relaxation / step) * step) <= 1


def _are_identities(identities: Mapping[str, Any]) -> bool:
    return {"primary", "guardian"} <= set(identities) and all(isinstance(one, dict) for one in identities.values())
