"""Planning a calibration: how many rows a budget needs, what more rows buy, and which rows to set aside."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log, log1p, sqrt
from typing import TYPE_CHECKING

import numpy as np

from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.promises import CertifiedPart
from conformal_arbitrage.core.exact import n_rows
from conformal_arbitrage.core.risk import Number, as_fraction, check_alpha
from conformal_arbitrage.errors import OptionError

if TYPE_CHECKING:  # a gateway reads no logs
    from conformal_arbitrage.scorelog.log import ScoreLog

COMFORT = 10
"""With this many times the minimum number of rows, the finite sample costs a tenth of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """What n calibration rows mean for a budget.

    Attributes:
        spendable: the largest mean loss the log may show, alpha - (B - alpha) / n; the difference to alpha is the price
            of a finite sample. None if there are too few rows, so that every query is deferred.
        spread: typical distance of the long-run loss of one certificate from alpha: sqrt(alpha (B - alpha) / n).
    """

    n: int
    spendable: float | None
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many rows a budget needs.

    Attributes:
        alpha: the risk budget.
        loss_bound: the largest possible loss.
        fewest_rows: with fewer rows every query is deferred.
        suggested_rows: enough rows for the finite sample to cost a tenth of alpha.
        rows: what several sizes mean.
    """

    alpha: float
    loss_bound: float
    fewest_rows: int
    suggested_rows: int
    rows: tuple[PlanRow, ...]


def rows_needed(alpha: Number, loss_bound: Number = 1) -> int:
    """Return the fewest rows that can keep a budget without always deferring: ceil(B / alpha) - 1."""
    bound = as_fraction(loss_bound, name="loss_bound")
    return -int(-bound // check_alpha(alpha, bound)) - 1


def sure_rows_needed(alpha: Number, loss_bound: Number = 1, *, confidence: Number, dial: bool = False) -> int:
    """Return the fewest rows that can keep a budget with high probability without always deferring.

    Without a single loss among n rows, a risk of alpha still has probability (1 - alpha / B)^n; no test can do with fewer
    rows than make that delta or less. Graded losses may need more.
    """
    share = check_alpha(alpha, as_fraction(loss_bound, name="loss_bound")) / as_fraction(loss_bound, name="loss_bound")
    delta = CalibrationOptions(confidence=confidence, dial=dial).delta() or 0.0
    return ceil(log(delta) / log1p(-float(share)))


def plan(alpha: Number, *, loss_bound: Number = 1, rows: Sequence[int] = ()) -> Plan:
    """Plan a calibration: how many rows a budget needs, and how slack and spread shrink with more of them.

    Args:
        alpha: the risk budget.
        loss_bound: the largest possible loss.
        rows: sizes to report; by default from the minimum to a hundred times as many.
    """
    fewest = rows_needed(alpha, loss_bound)
    budget, bound = as_fraction(alpha, name="alpha"), as_fraction(loss_bound, name="loss_bound")
    suggested = COMFORT * (fewest + 1) - 1
    usual = [fewest, 2 * fewest, 5 * fewest, suggested, 2 * suggested, 5 * suggested, 10 * suggested]
    sizes = dict.fromkeys(rows or usual)
    if any(n < 1 for n in sizes):
        raise OptionError(f"a log has 1 row or more; got {min(sizes)}")
    return Plan(
        alpha=float(budget),
        loss_bound=float(bound),
        fewest_rows=fewest,
        suggested_rows=suggested,
        rows=tuple(_plan_row(n, budget, bound) for n in sizes),
    )


def _plan_row(n: int, alpha: Fraction, bound: Fraction) -> PlanRow:
    spendable = (alpha * (n + 1) - bound) / n
    return PlanRow(
        n=n,
        spendable=None if spendable < 0 else float(spendable),
        spread=sqrt(alpha * (bound - alpha) / n),
    )


TUNING_SHARE = 0.3
"""Of the rows of a log, to choose on."""


def split(log: "ScoreLog", *, share: float = TUNING_SHARE, seed: int = 0) -> "tuple[ScoreLog, ScoreLog]":
    """Split a log at random: choose alpha and options on the first part, calibrate on the second.

    Args:
        log: the recorded scores.
        share: the share of the rows that goes to the first part.
        seed: of the random split.
    """
    if seed < 0:
        raise OptionError(f"seed must be 0 or more; got {seed}")
    cut = round(share * len(log)) if 0 < share < 1 else 0
    if not 0 < cut < len(log):
        raise OptionError(f"a share of {share:g} of {n_rows(len(log))} leaves a part empty; use another share")
    order, lineage = np.random.default_rng(seed).permutation(len(log)), log.lineage()
    return log.select(order[:cut]).taken_from(*lineage), log.select(order[cut:]).taken_from(*lineage)


def certified_rows(log: "ScoreLog", part: CertifiedPart | None) -> "ScoreLog":
    """Return the rows that a certificate was made from, if the log is as long as the one that was split for it."""
    if part is None or len(log) != part.rows:
        return log
    return split(log, share=part.share, seed=part.seed)[1]
