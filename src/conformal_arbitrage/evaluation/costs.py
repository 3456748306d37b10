"""Costs: what a query costs at each model, from a constant, a token price or the log's own columns."""

from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from conformal_arbitrage.calibration.certificate import Decisions
from conformal_arbitrage.core.exact import Floats
from conformal_arbitrage.core.losses import GuardianSees
from conformal_arbitrage.core.trials import LegCost
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.log import ScoreLog, Usage
from conformal_arbitrage.types import n_rows

TokenPrice = tuple[float, float]
"""Dollars per million input tokens and per million output tokens."""


class CostKeywords(TypedDict, total=False):
    """The fields of `CostOptions` as single keywords; None counts as not given."""

    primary_cost: float | None
    guardian_cost: float | None
    primary_price: TokenPrice | None
    guardian_price: TokenPrice | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """What each model costs; a model without a cost or price takes the log's cost column, if it has one.

    Attributes:
        primary_cost: dollars per query of the Primary.
        guardian_cost: dollars per query of the Guardian.
        primary_price: dollars per million input and output tokens of the Primary, for recorded token counts.
        guardian_price: the same for the Guardian.
    """

    primary_cost: float | None = None
    guardian_cost: float | None = None
    primary_price: TokenPrice | None = None
    guardian_price: TokenPrice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Dollars per row: of the Primary, and of the Guardian by the number of actions it is shown."""

    primary: Floats
    guardian: LegCost

    @property
    def per_1000(self) -> dict[str, float]:
        """Dollars per 1000 queries of each model alone."""
        return {"primary": 1000 * float(self.primary.mean()), "guardian": 1000 * float(self.guardian.full().mean())}


def costs_of(log: ScoreLog, options: CostOptions | None = None) -> Costs | None:
    """Return the costs of a log's queries, or None unless they are known for both models.

    Args:
        log: the recorded scores.
        options: constants or token prices; without them the log's cost columns are used.
    """
    prices = options or CostOptions()
    primary = _leg(log, log.primary_usage, log.columns[0], prices.primary_cost, prices.primary_price)
    guardian = _leg(log, log.guardian_usage, log.columns[1], prices.guardian_cost, prices.guardian_price)
    if primary is None or guardian is None:
        if prices != CostOptions():
            raise OptionError("the cost of one model is missing; give both, by constant, price or column")
        return None
    return Costs(primary=primary.full(), guardian=guardian)


def routed_cost_per_1000(costs: Costs, decisions: Decisions, guardian_sees: GuardianSees) -> float:
    """Return dollars per 1000 queries under these decisions: a deferral pays for both models."""
    sizes = decisions.log.sizes
    shown = decisions.candidate_counts() if guardian_sees == "candidates" else sizes
    rows = np.flatnonzero(decisions.deferred)
    leg = costs.guardian.of(rows, shown[rows], sizes[rows])
    return 1000 * float(costs.primary.sum() + leg.sum()) / len(decisions)


def _leg(log: ScoreLog, usage: Usage, name: str, cost: float | None, price: TokenPrice | None) -> LegCost | None:
    if cost is not None and price is not None:
        raise OptionError(f"{name}: give a cost or a price per token, not both")
    if cost is not None:
        return LegCost(base=np.full(len(log), _dollars(cost, name)))
    if price is None:
        known = usage.cost is not None and not np.isnan(usage.cost).any()  # one unknown cost makes the mean unknown
        return LegCost(base=usage.cost) if known and usage.cost is not None else None
    if usage.input_tokens is None or usage.output_tokens is None:
        raise OptionError(f"{log.source}: a price needs the columns {name}_input_tokens and {name}_output_tokens")
    unknown = int(np.isnan(usage.input_tokens + usage.output_tokens).sum())
    if unknown:
        raise OptionError(
            f"{log.source}: {n_rows(unknown, 'lacks', 'lack')} the token counts of {name}; give a cost instead"
        )
    per_input, per_output = (_dollars(value, name) / 1e6 for value in price)
    tokens = usage.input_tokens.astype(np.int64)
    return LegCost(base=per_output * usage.output_tokens, rate=per_input, tokens=tokens)


def _dollars(value: float, name: str) -> float:
    if not 0 <= value < float("inf"):
        raise OptionError(f"{name}: a cost must be 0 or more; got {value!r}")
    return value
