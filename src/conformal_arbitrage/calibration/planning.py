"""plan: how many rows a budget needs, and what more rows buy."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import sqrt

from conformal_arbitrage.calibration.certificate import rows_needed
from conformal_arbitrage.core.losses import Number, exact
from conformal_arbitrage.errors import OptionError

COMFORT = 10
"""With this many times the fewest rows, being finite costs a tenth of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """What n calibration rows mean for a budget.

    Attributes:
        n: rows.
        spendable: the largest mean loss the log may show, alpha - (B - alpha) / n; what is missing to alpha is the
            price of finitely many rows. None if there are too few: every query is deferred then.
        spread: how far the long-run loss of one certificate typically lies from alpha: sqrt(alpha (B - alpha) / n).
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
        fewest_rows: below this every query is deferred.
        suggested_rows: enough for the price of finitely many rows to be a tenth of alpha.
        rows: what several sizes mean.
    """

    alpha: float
    loss_bound: float
    fewest_rows: int
    suggested_rows: int
    rows: tuple[PlanRow, ...]


def plan(alpha: Number, *, loss_bound: Number = 1, rows: Sequence[int] = ()) -> Plan:
    """How many calibration rows a budget needs, and how slack and spread shrink with more.

    Args:
        alpha: the risk budget.
        loss_bound: the largest possible loss.
        rows: numbers of rows to look at; by default from the fewest to a hundred times as many.
    """
    fewest = rows_needed(alpha, loss_bound)
    budget, bound = exact(alpha, name="alpha"), exact(loss_bound, name="loss_bound")
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
        rows=tuple(_row(n, budget, bound) for n in sizes),
    )


def _row(n: int, alpha: Fraction, bound: Fraction) -> PlanRow:
    spendable = (alpha * (n + 1) - bound) / n
    return PlanRow(
        n=n,
        spendable=None if spendable < 0 else float(spendable),
        spread=sqrt(alpha * (bound - alpha) / n),
    )
