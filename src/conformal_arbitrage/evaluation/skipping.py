"""skip: learn, on a part of a log, which queries to send straight to the Guardian, where that is cheaper.

A deferral pays for both models. Where the Primary's own price is a fair part of the Guardian's, a query that will be
deferred anyway had better not be sent to it. The rule is chosen on the tuning rows alone, so that the rest can be
calibrated as ever.

Knows nothing of files or terminals.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Unpack

import numpy as np

from conformal_arbitrage.calibration.learned_fit import RowInputs, row_inputs
from conformal_arbitrage.calibration.learned_score import Features
from conformal_arbitrage.calibration.learning import RidgeLearner
from conformal_arbitrage.calibration.options import CalibrationOptions, resolve_options
from conformal_arbitrage.calibration.planning import split
from conformal_arbitrage.calibration.skip_rule import SkipRule, with_skips
from conformal_arbitrage.calibration.text_embedding import text_embedding
from conformal_arbitrage.core.arrays import Bools, Floats
from conformal_arbitrage.core.losses import Number, within_unit
from conformal_arbitrage.core.risk import check_alpha
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.evaluation.costs import CostKeywords, CostOptions, Costs, costs_of
from conformal_arbitrage.scorelog.fitness import refuse_unfit
from conformal_arbitrage.scorelog.log import ScoreLog

LEAST_RATIO = 0.2
"""A Primary that costs less than this share of a Guardian call is cheaper to ask than to skip."""
LEAST_SAVING = 0.02
"""Of the cost without a rule; less is within the noise of the tuning rows."""
_FEWEST_ROWS = 50
_STEPS = 20
"""Shares of queries to skip that are tried, about: 0, 1/20, ..., 19/20."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipChoice:
    """A rule, and the rows that it was not learned from.

    Attributes:
        rule: which queries go straight to the Guardian.
        rest: the other rows, as the Primary behind the rule would have left them.
        tuning: the rows that it was learned and chosen on.
        skipped: share of `rest` that goes straight to the Guardian.
        cost_ratio: of asking the Primary to asking the Guardian.
        cost: expected cost of a query, in Guardian calls, on the tuning rows.
        cost_without: the same if the Primary is always asked first.
    """

    rule: SkipRule
    rest: ScoreLog
    tuning: ScoreLog
    skipped: float
    cost_ratio: float
    cost: float
    cost_without: float


def learn_skips(
    log: ScoreLog,
    alpha: Number,
    *,
    share: float = 0.4,
    seed: int = 0,
    groups: bool = True,
    text: bool = False,
    group_source: str | None = None,
    costs: CostOptions | None = None,
    **keywords: Unpack[CostKeywords],
) -> SkipChoice:
    """Learn which queries go straight to the Guardian.

    Args:
        log: the recorded scores, with losses in [0, 1].
        alpha: the risk budget that the rest will be calibrated for.
        share: of the rows, to learn and choose on; no certificate may use them.
        seed: of the random part.
        groups: read the log's `group` column, if it has one.
        text: read the log's `context`; needs the extra `text`.
        group_source: what names the group of a live query.
        costs: what the models cost; or pass the fields of `CostOptions` as keywords. Without either, the log's cost
            columns are used.
        **keywords: the fields of `costs`, one by one.

    Raises:
        OptionError: it would not pay, or there is nothing to tell from; the message says why.
    """
    refuse_unfit(log)
    if not within_unit(log.loss_scores):
        raise OptionError(f"{log.source}: skipping needs losses in [0, 1]; divide the Guardian's scores by their range")
    budget = check_alpha(alpha, Fraction(1))
    tuning, rest = split(log, share=share, seed=seed)
    cost_options = resolve_options(costs, CostOptions, keywords, name="costs")
    prices = _worthwhile(costs_of(tuning, cost_options), log.source)
    if len(tuning) < _FEWEST_ROWS:
        raise OptionError(f"{log.source}: {len(tuning)} rows to learn on are too few; it takes {_FEWEST_ROWS} or more")
    options = CalibrationOptions(
        boundary="random", score="auto", features=Features(groups=groups, tokens=False, text=text),
        missing_guardian="worst_case",
    )  # fmt: skip
    inputs = row_inputs(tuning, options, Fraction(1))
    trial = _Trial(inputs=inputs, costs=prices, budget=float(budget * (len(tuning) + 1) - 1), seed=seed)
    threshold, cost, without = trial.best_threshold(log.source)
    rule = _rule(inputs, threshold, group_source)
    left = with_skips(_priced(rest, cost_options), rule)
    skipped = float((left.no_opinion & ~rest.no_opinion).mean())
    ratio = float(prices.primary.sum() / prices.guardian.full().sum())
    return SkipChoice(
        rule=rule, rest=left, tuning=tuning, skipped=skipped, cost_ratio=ratio, cost=cost, cost_without=without
    )


def _worthwhile(prices: Costs | None, source: str) -> Costs:
    """Return the costs; refuse a Primary that is too cheap to be worth skipping, or too dear to be worth asking."""
    if prices is None:
        raise OptionError(
            f"{source}: whether skipping pays depends on what both models cost; give --primary-cost and --guardian-cost"
        )
    guardian = float(prices.guardian.full().mean())
    ratio = float(prices.primary.mean()) / guardian if guardian > 0 else np.inf
    if not LEAST_RATIO <= ratio < 1:
        why = "always ask it" if ratio < LEAST_RATIO else "always ask the Guardian"
        raise OptionError(
            f"{source}: skipping pays if the Primary costs at least {LEAST_RATIO:g} of a Guardian call, and less than one; "
            f"here it costs {ratio:.3g}: {why}"
        )
    return prices


def _priced(log: ScoreLog, options: CostOptions) -> ScoreLog:
    """Return a log with the dollars of each row as columns, so that a row without a call can cost nothing."""
    prices = costs_of(log, options)
    if prices is None:
        return log
    primary, guardian = replace(log.primary_usage, cost=prices.primary), log.guardian_usage
    return replace(log, primary_usage=primary, guardian_usage=replace(guardian, cost=prices.guardian.full()))


def _columns(inputs: RowInputs) -> Floats:
    """Return what is known of each row before any model is asked: a constant, its group, its text."""
    names, group = inputs.group_names(), inputs.group or [""] * len(inputs.margin)
    if not names and inputs.text is None:
        raise OptionError(
            "nothing is known of a query before the Primary is asked: the log needs a `group` column, or texts in `context` "
            "(--text)"
        )
    known = np.array([[float(one == name) for name in names] for one in group]).reshape(len(group), len(names))
    return np.column_stack([np.ones(len(group)), known, *([] if inputs.text is None else [inputs.text])])


def _fitted(columns: Floats, loss: Floats) -> Floats:
    """Return the weights of a ridge regression of the loss; the level is almost free."""
    penalties = np.ones(columns.shape[1])
    penalties[0] = 0.001
    learner = RidgeLearner(penalties)
    learner.fit(columns, loss)
    return learner.weights


def _crossfitted(inputs: RowInputs, seed: int) -> Floats:
    """Return each row's predicted loss by a fit to the other half of the rows."""
    columns = _columns(inputs)
    half = np.random.default_rng(seed).permutation(len(columns)) % 2 == 0
    risk = np.empty(len(columns))
    for one in (half, ~half):
        risk[one] = columns[one] @ _fitted(columns[~one], inputs.share[~one])
    return risk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trial:
    """What a rule costs on the tuning rows, with the gate behind it at the budget."""

    inputs: RowInputs
    costs: Costs
    budget: float
    seed: int

    def best_threshold(self, source: str) -> tuple[float, float, float]:
        """Return the predicted loss from which to skip, what a query then costs, and what it costs without a rule.

        Raises:
            OptionError: no threshold saves enough.
        """
        risk, columns = _crossfitted(self.inputs, self.seed), _columns(self.inputs)
        thresholds = [np.inf, *_cuts(columns @ _fitted(columns, self.inputs.share))]
        figures = [self.cost(risk >= threshold) for threshold in thresholds]
        best, without = int(np.argmin(figures)), figures[0]
        if best == 0 or figures[best] > (1 - LEAST_SAVING) * without:
            raise OptionError(
                f"{source}: skipping the Primary would not pay: a query costs {without:.3f} Guardian calls if it is asked "
                f"first, and {min(figures[1:], default=without):.3f} with the best rule from {_read(self.inputs)}; always "
                "ask it"
            )
        return float(thresholds[best]), figures[best], without

    def cost(self, skip: Bools) -> float:
        """Return the cost of a query in Guardian calls: what is asked first, and what is deferred."""
        margin, loss = self.inputs.margin, self.inputs.share
        order = np.lexsort((np.random.default_rng(self.seed).random(len(margin)), -margin))
        order = order[(self.inputs.used & ~skip)[order]]
        deferred = np.ones(len(margin), np.bool_)
        deferred[order[: np.searchsorted(np.cumsum(loss[order]), self.budget, side="right")]] = False
        if self.budget < 0:
            deferred[:] = True
        guardian = self.costs.guardian.full()
        return float((self.costs.primary[~skip].sum() + guardian[deferred].sum()) / guardian.sum())


def _cuts(risk: Floats) -> list[float]:
    """Return thresholds between different predictions, so that those of one group are never parted."""
    values = np.unique(risk)
    cuts: Floats = np.quantile(risk, [k / _STEPS for k in range(1, _STEPS)])
    places: list[int] = np.unique(np.searchsorted(values, cuts)).tolist()
    return [float(values[place - 1] + values[place]) / 2 for place in places if 0 < place < len(values)]


def _rule(inputs: RowInputs, threshold: float, group_source: str | None) -> SkipRule:
    """Fit all tuning rows."""
    names = inputs.group_names()
    weights: list[float] = _fitted(_columns(inputs), inputs.share).tolist()
    return SkipRule(
        threshold=threshold,
        level=weights[0],
        groups=dict(zip(names, weights[1:], strict=False)),
        group_source=group_source if names else None,
        text=tuple(weights[1 + len(names) :]),
        text_sha256=None if inputs.text is None else text_embedding().sha256,
    )


def _read(inputs: RowInputs) -> str:
    parts = ["groups"] if inputs.group_names() else []
    return " and ".join([*parts, *([] if inputs.text is None else ["texts"])])
