"""The parts of a certificate that holds several thresholds: the stops of a dial, and groups.

Knows nothing of how thresholds are found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from conformal_arbitrage.errors import OptionError

STOPS = ("0.01", "0.015", "0.02", "0.03", "0.04", "0.05", "0.07", "0.1", "0.15", "0.2")
"""The stops of a dial, as shares of the loss bound: fixed here, so that nobody chooses them by looking."""
Membership = str | Sequence[str] | None
"""The group or groups that a query belongs to; the operator says so, not the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialStop:
    """One stop of a dial.

    Attributes:
        alpha: the risk budget there.
        relaxation: the threshold that keeps it; None if every query is deferred.
        boundary_u: as in the certificate.
        empirical_risk: total loss / n at the relaxation.
    """

    alpha: float
    relaxation: float | None
    boundary_u: float | None
    empirical_risk: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupThreshold:
    """The threshold of one group.

    Attributes:
        n: rows of the group.
        relaxation: the threshold that keeps the budget for this group; None if all of its queries are deferred.
        boundary_u: as in the certificate.
        empirical_risk: total loss / n at the relaxation, over the group's rows.
    """

    n: int
    relaxation: float | None
    boundary_u: float | None
    empirical_risk: float


def lower_stop(dial: Sequence[DialStop], alpha: float) -> DialStop:
    """Return the largest stop that does not exceed alpha.

    Raises:
        OptionError: every stop does.
    """
    within = [stop for stop in dial if stop.alpha <= alpha]
    if not within:
        raise OptionError(f"the lowest stop of the dial is {dial[0].alpha:g}; got alpha {alpha:g}, choose a larger one")
    return within[-1]


def group_threshold(groups: Mapping[str, GroupThreshold], membership: Membership) -> tuple[float | None, float | None]:
    """Return relaxation and boundary draw for a query: the largest of its groups'; (None, None) defers it.

    A query without a group, or of one that the log does not have, is deferred.
    """
    names = [membership] if isinstance(membership, str) else list(membership or ())
    known = [groups.get(name) for name in names]
    pairs = [(group.relaxation, group.boundary_u) for group in known if group is not None]
    if not names or len(pairs) < len(names) or any(relaxation is None for relaxation, _ in pairs):
        return None, None
    return max(pairs, key=lambda pair: threshold_rank(*pair))


def threshold_rank(relaxation: float | None, boundary_u: float | None) -> tuple[float, float]:
    """Return what orders thresholds by how much they defer."""
    return inf if relaxation is None else relaxation, 1.0 if boundary_u is None else boundary_u
