"""Which lines the ledger of a certificate is watched against, or why it has none.

Knows nothing of ledgers or policies.
"""

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.combinations import refusal, refuse_combination
from conformal_arbitrage.calibration.groups import shared_size
from conformal_arbitrage.calibration.options import NET, REGRET
from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.monitoring.lines import AlarmLine, Lines, block_size, watch_lines

SHARED = "small groups"
"""The ledger of groups that share a threshold, unless a group has that name."""


def certificate_lines(
    certificate: Certificate, *, group: str | None = None, alarm_line: AlarmLine = "luck", policies: int = 1
) -> Lines:
    """Return the lines for a certificate, or for one of its groups.

    Args:
        certificate: what is in force.
        group: whose ledger it is, of a certificate by groups; small groups that share a threshold share a ledger.
        alarm_line: "alpha" puts red at alpha whatever the certificate promises.
        policies: how many policies one statement about false reds is to cover.

    Raises:
        OptionError: there is nothing to watch, or nothing that can be.
    """
    if certificate.loss not in (REGRET, NET):
        refuse_combination("monitor", "own loss")
    n = certificate.n if certificate.groups is None else _rows(certificate, group)
    if certificate.status == "always_defer":
        raise OptionError("every query is deferred, so the loss is 0 by definition: there is nothing to watch")
    unclear = refusal("red line", "cluster") if certificate.cluster is not None else None
    unclear = refusal("red line", "learned") if certificate.learned is not None else unclear
    if group is not None and alarm_line == "luck" and ledger_names(certificate).get(group) != group:
        unclear = refusal("red line", "merged groups")
    if unclear is not None:
        share = certificate.alpha / certificate.loss_bound
        return Lines(alpha=share, red=None, block=block_size(share), false_red=None, note=f"there is no red: {unclear}")
    return watch_lines(
        certificate.alpha,
        loss_bound=certificate.loss_bound,
        n=n,
        binary=bool(certificate.zero_one) or (certificate.binarized and certificate.loss_bound == 1),
        confidence=certificate.confidence,
        alarm_line=alarm_line,
        policies=policies,
        absolute=_absolute(certificate),
    )


def ledger_names(certificate: Certificate) -> dict[str, str]:
    """Return the ledger of each group whose queries are not all deferred; small groups share one, as they do a threshold."""
    groups = certificate.groups or {}
    fewest = 0 if certificate.small_groups is None else rows_needed(certificate.alpha, certificate.loss_bound)
    shared = SHARED
    while shared in groups:
        shared += "'"
    thresholds = {name: one for name, one in groups.items() if one.relaxation is not None}
    return {name: shared if one.n < fewest else name for name, one in thresholds.items()}


def _rows(certificate: Certificate, group: str | None) -> int:
    """Return from how many rows the threshold of a group comes."""
    groups = certificate.groups or {}
    if group is None or group not in groups:
        raise OptionError(f"a certificate by groups has one ledger for each: {', '.join(groups)}; got {group!r}")
    if groups[group].relaxation is None:
        raise OptionError(f"every query of {group!r} is deferred: there is nothing to watch")
    fewest = rows_needed(certificate.alpha, certificate.loss_bound)
    if certificate.small_groups is not None and groups[group].n < fewest:
        return shared_size({name: one.n for name, one in groups.items()}, fewest)
    return groups[group].n


def _absolute(certificate: Certificate) -> float | None:
    """Return the mean absolute loss of a net certificate's rows, as a share of the bound."""
    if certificate.loss != NET:
        return None
    if certificate.regret is None:
        raise OptionError("this net certificate does not say its regret, on which the red line rests: calibrate again")
    return min((2 * certificate.regret - certificate.empirical_risk) / certificate.loss_bound, 1.0)
