"""Search: the smallest relaxation of a log that passes a test, on average or with high probability.

Without a confidence the rule is conformal risk control, total + B <= alpha (n + 1). With one, it is a test at level delta
that the risk lies above alpha: the exact binomial one where every loss is 0 or the bound, otherwise the betting one. Both
are monotone in the losses: if the risk of the smallest relaxation that passes lies above alpha, then the losses just below
the true threshold, whose mean is alpha or more, pass as well. That one test has level delta, so nothing is to be corrected
for having tried many.

Knows nothing of certificates or what is said about them.
"""

import hmac
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from conformal_arbitrage.calibration.draws import draw
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.stops import STOPS
from conformal_arbitrage.core.arrays import Indices
from conformal_arbitrage.core.betting import RowLosses, accepts, shared_bets
from conformal_arbitrage.core.bounds import binomial_limit
from conformal_arbitrage.core.losses import Number
from conformal_arbitrage.core.risk import RiskCurve, RiskThreshold, check_alpha, check_bound, spendable
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.log import ScoreLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A threshold and what it loses on its log; a relaxation of None defers every query."""

    n: int
    relaxation: float | None
    boundary_u: float | None
    total: Fraction


def find_threshold(
    log: ScoreLog, curve: RiskCurve, alpha: Fraction, bound: Fraction, options: CalibrationOptions, delta: float | None
) -> Fit:
    """Return the smallest relaxation that keeps a budget.

    Args:
        log: the rows.
        curve: their risk, under the same options.
        alpha: the risk budget.
        bound: the loss bound.
        options: how to calibrate.
        delta: the level of the test; None to keep the budget on average.
    """
    if delta is None:
        limit = curve.limits([alpha], bound, unseen=options.unseen)[0]
    elif options.is_binary(log, bound):
        limit = binomial_spendable(alpha, bound, curve.n, curve.tick_digits, delta)
    else:
        limit = _betting_limit(log, curve, alpha, bound, options, delta)
    return fit_at(curve.n, None if limit is None else curve.thresholds([limit])[0])


def fit_at(n: int, threshold: RiskThreshold | None) -> Fit:
    """Return a threshold that was found on n rows; None defers every query."""
    if threshold is None:
        return Fit(n=n, relaxation=None, boundary_u=None, total=Fraction(0))
    return Fit(n=n, relaxation=threshold.relaxation, boundary_u=threshold.boundary_u, total=threshold.total)


def total_at(log: ScoreLog, one: Fit, options: CalibrationOptions) -> Fraction:
    """Return the total loss of a log at a threshold that was found on other rows; 0 if everything is deferred."""
    if one.relaxation is None:
        return Fraction(0)
    stairs = options.stairs(log)
    losses = RowLosses(stairs, len(log), options.draws(log)).at(one.relaxation, one.boundary_u)
    return Fraction(int(losses.sum()), 10**stairs.tick_digits)


def risk_budgets(alpha: Fraction, bound: Fraction, options: CalibrationOptions) -> list[Fraction]:
    """Return the risk budgets for which thresholds are sought: alpha, or the stops of a dial."""
    return [Fraction(stop) * bound for stop in STOPS] if options.dial else [alpha]


def allowed_total(alpha: Fraction, bound: Fraction, n: int, tick_digits: int, options: CalibrationOptions) -> int:
    """Return the largest total that keeps a budget, in ticks, on average or by the binomial test."""
    delta = options.delta()
    if delta is None:
        return spendable(alpha, bound, n, tick_digits, unseen=options.unseen)
    return binomial_spendable(alpha, bound, n, tick_digits, delta)


def likely_losses(n: int, alpha: Number, options: CalibrationOptions) -> list[float]:
    """Return the mean losses that n rows may show, one for each budget, before any row was looked at."""
    bound = check_bound(options.loss_bound, (Fraction(0), 0), tick=Fraction(1), unit_scores=True, source="options")
    budgets, digits = risk_budgets(check_alpha(alpha, bound), bound, options), 3
    return [allowed_total(one, bound, n, digits, options) / (n * 10**digits) for one in budgets]


def binomial_spendable(alpha: Fraction, bound: Fraction, n: int, tick_digits: int, delta: float) -> int:
    """Return the largest total loss, in ticks, at which n losses of 0 or the bound pass the binomial test; -1 if none."""
    losses = binomial_limit(n, float(alpha / bound), delta)
    return -1 if losses < 0 else int(losses * bound * 10**tick_digits)


def _betting_limit(
    log: ScoreLog, curve: RiskCurve, alpha: Fraction, bound: Fraction, options: CalibrationOptions, delta: float
) -> int | None:
    """Return the total at the first breakpoint that the betting test accepts, by bisection: it accepts all later ones."""
    order, line = row_order(log, options.key), float(alpha / bound)
    rows = RowLosses(options.stairs(log), len(log), options.draws(log))
    unit = float(bound) * 10.0**curve.tick_digits
    bets = shared_bets(np.minimum(rows.at(0.0, 0.0)[order] / unit, 1.0), line, delta)

    def passes(index: int) -> bool:
        u = None if curve.boundary_u is None else float(curve.boundary_u[index])
        return accepts(rows.at(float(curve.breakpoints[index]), u)[order] / unit, bets, line, delta)

    low, high = -1, len(curve.totals)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return int(curve.totals[high]) if high < len(curve.totals) else None


def row_order(log: ScoreLog, key: bytes | None) -> Indices:
    """Return the order in which the betting test goes through rows: that of a keyed hash of their ids.

    Whoever chooses the ids cannot choose the order, since the key is secret and the same for all calibrations. Rows
    without ids are numbered.
    """
    if key is None:
        raise OptionError(
            "a confidence for graded losses needs a key, the same for all calibrations of a project: "
            "key=ProjectSecret.find().boundary_key; if every loss is 0 or the bound, declare zero_one=True (--zero-one)"
        )
    shuffling = hmac.digest(key, b"row order v1", "sha256")
    ids = [str(row) for row in range(len(log))] if log.id is None else log.id.tolist()
    return np.argsort(np.array([draw(shuffling, id) for id in ids]), kind="stable")


def refuse_graded(log: ScoreLog, options: CalibrationOptions, bound: Fraction) -> None:
    """Refuse a log with a loss other than 0 and the bound where all are declared to be one of the two.

    Raises:
        ScoreLogError: it has one.
    """
    stairs = options.stairs(log)
    whole = bound * 10**stairs.tick_digits
    for stair in stairs.blocks:
        graded = ((stair.levels != 0) & (stair.levels != whole)).any(axis=0)
        if graded.any():
            place = int(graded.argmax())
            loss = max(level for level in stair.levels[:, place].tolist() if level not in (0, whole))
            row = int(stair.block.all_rows()[place]) + 1
            raise ScoreLogError(
                f"{log.source}: row {row}: a loss of {loss / 10**stairs.tick_digits:g} is neither 0 nor the bound "
                f"{float(bound):g}, as zero_one declares; leave zero_one (--zero-one) out for graded losses"
            )
