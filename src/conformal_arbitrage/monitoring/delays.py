"""Planning audits: how soon a loss above the line is seen, and what looking costs.

The delays are measured (docs/benchmarks-monitoring.md), in audits over a, and nearly the same for every a.
Knows nothing of certificates or ledgers.
"""

from dataclasses import dataclass
from math import ceil, inf

from conformal_arbitrage.core.losses import Number, as_fraction
from conformal_arbitrage.core.risk import check_alpha
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.monitoring.age import audits_to_see_doubling

MEDIAN_DELAYS = {1.25: 150.0, 1.5: 43.0, 2.0: 13.0, 5.0: 2.5}
"""True loss over the line -> audits times a until red, in half of all cases; twice as many in nine of ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayRow:
    """How soon a loss of `ratio` times the line is seen.

    Attributes:
        ratio: the true loss over the line.
        audits: audits until red, in half of all cases.
        decisions: decisions until then.
        days: days until then; twice as many in nine of ten cases.
        excess: losses above the line until then, in units of the loss bound.
    """

    ratio: float
    audits: int
    decisions: int
    days: float
    excess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPlan:
    """What an audit rate buys and costs.

    Attributes:
        audit_rate: the share of decisions that are audited.
        decisions_per_day: the traffic.
        audits_per_day: audited decisions.
        guardian_calls_per_day: calls of the Guardian for audits alone, if the Primary decides this share.
        primary_share: the share of decisions that the Primary decides; those deferred need no call.
        cost_per_day: dollars of these calls; None if a call's price is unknown.
        fresh_after_days: days after which enough audits are known for a doubled loss to show in nine of ten cases.
        delays: how soon a loss above the line is seen.
    """

    audit_rate: float
    decisions_per_day: float
    audits_per_day: float
    guardian_calls_per_day: float
    primary_share: float
    cost_per_day: float | None
    fresh_after_days: float
    delays: tuple[DelayRow, ...]


def plan_audits(
    alpha: Number,
    *,
    loss_bound: Number = 1,
    audit_rate: float,
    decisions_per_day: float,
    primary_share: float = 1.0,
    guardian_cost: float | None = None,
) -> AuditPlan:
    """Plan audits: how soon a loss above the line is seen, and what they cost.

    The line is alpha for a high-probability certificate; for any other red stands higher, by what calibration luck explains.

    Args:
        alpha: the risk budget.
        loss_bound: the largest possible loss.
        audit_rate: the share of decisions to audit, above 0.
        decisions_per_day: the traffic.
        primary_share: the share of decisions that the Primary decides.
        guardian_cost: dollars per call of the Guardian.
    """
    if not 0 < audit_rate <= 1:
        raise OptionError(f"audit_rate must lie above 0 and be at most 1; got {audit_rate:g}")
    if not 0 < decisions_per_day < inf:
        raise OptionError(f"decisions_per_day must be a number above 0; got {decisions_per_day:g}")
    if guardian_cost is not None and not 0 <= guardian_cost < inf:
        raise OptionError(f"guardian_cost must be 0 dollars or more; got {guardian_cost:g}")
    if not 0 <= primary_share <= 1:
        raise OptionError(f"primary_share must lie in [0, 1]; got {primary_share:g}")
    bound = as_fraction(loss_bound, name="loss_bound")
    share = float(check_alpha(alpha, bound) / bound)
    audits = audit_rate * decisions_per_day
    calls = audits * primary_share
    return AuditPlan(
        audit_rate=audit_rate,
        decisions_per_day=decisions_per_day,
        audits_per_day=audits,
        guardian_calls_per_day=calls,
        primary_share=primary_share,
        cost_per_day=None if guardian_cost is None else calls * guardian_cost,
        fresh_after_days=audits_to_see_doubling(share) / audits,
        delays=tuple(
            _delay(ratio, unit, share, audit_rate, decisions_per_day) for ratio, unit in MEDIAN_DELAYS.items()
        ),
    )


def _delay(ratio: float, unit: float, share: float, audit_rate: float, per_day: float) -> DelayRow:
    audits = unit / share
    decisions = audits / audit_rate
    return DelayRow(
        ratio=ratio,
        audits=ceil(audits),
        decisions=ceil(decisions),
        days=decisions / per_day,
        excess=(ratio - 1) * share * decisions,
    )
