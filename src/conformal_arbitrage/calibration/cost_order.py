"""Cost order: what the Guardian will cost, told from what the Primary's call took, before the Guardian is asked.

To save most dollars for a given loss, keep the answers with the least loss per dollar that a deferral would cost. The
prediction is fitted on rows that are not calibrated, so the order is fixed for those that are, and their certificate is an
ordinary one. Where Guardian costs hardly differ, such an order only adds noise, so it is refused.

Knows nothing of learners or certificates.
"""

from dataclasses import dataclass

import numpy as np

from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.log import ScoreLog

LEAST_VARIATION = 0.4
"""The coefficient of variation of the predicted cost from which the order is offered."""
_LOWEST = 0.1
"""Of the mean: no predicted cost is lower, so that no loss per dollar explodes."""
_LEAST_RISK = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostPredictor:
    """A linear prediction of the Guardian's cost, relative to its mean, from the Primary's token counts.

    Attributes:
        weights: of 1, of the input tokens and of the output tokens.
        variation: coefficient of variation of the predictions on the rows that it was fitted to.
    """

    weights: Floats
    variation: float

    def relative(self, log: ScoreLog) -> Floats:
        """Return the predicted cost of every row in units of the mean; 1 where token counts are unknown."""
        predicted = _tokens(log) @ self.weights
        return np.maximum(_LOWEST, np.where(np.isnan(predicted), 1.0, predicted))

    def per_dollar(self, risk: Floats, log: ScoreLog) -> Floats:
        """Return the predicted loss per predicted dollar."""
        return np.maximum(risk, _LEAST_RISK) / self.relative(log)


def cost_predictor(log: ScoreLog) -> CostPredictor:
    """Fit the Guardian's cost to the rows of a log.

    Raises:
        OptionError: costs or token counts are not known, or costs differ too little for an order by them to pay.
    """
    cost = log.guardian_usage.cost
    known = np.zeros(len(log), np.bool_) if cost is None else ~np.isnan(cost + _tokens(log).sum(axis=1))
    if cost is None or known.sum() < _tokens(log).shape[1] or not cost[known].mean() > 0:
        raise OptionError(
            f"{log.source}: an order by cost needs the Guardian's cost of each row ({log.columns[1]}_cost, or "
            f"--guardian-price with token counts) and the Primary's tokens ({log.columns[0]}_input_tokens, "
            f"{log.columns[0]}_output_tokens)"
        )
    relative = cost[known] / cost[known].mean()
    weights = (np.linalg.pinv(_tokens(log)[known]) @ relative).astype(np.float64)
    fitted = CostPredictor(weights=weights, variation=0.0).relative(log)
    variation = float(fitted.std() / fitted.mean())
    if variation <= LEAST_VARIATION:
        raise OptionError(
            f"{log.source}: an order by cost would not pay: what can be told of the Guardian's cost in advance has a "
            f"coefficient of variation of {variation:.2f} on the rows to learn on, and it takes more than "
            f"{LEAST_VARIATION:g}; order by risk"
        )
    return CostPredictor(weights=weights, variation=variation)


def _tokens(log: ScoreLog) -> Floats:
    """Return 1, the Primary's input tokens and its output tokens, NaN where unknown."""
    unknown, usage = np.full(len(log), np.nan), log.primary_usage
    counts = (unknown if column is None else column for column in (usage.input_tokens, usage.output_tokens))
    return np.column_stack([np.ones(len(log)), *counts])
