"""Held-out trials of a learned score: learn on the calibration rows of a split, decide its test rows.

Knows nothing of what is measured, nor of tables.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from conformal_arbitrage.calibration.learned_fit import LearnedRows, learned_rows
from conformal_arbitrage.calibration.learned_score import Features, refuse_row_count
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.core.arrays import Bools, Floats, Indices
from conformal_arbitrage.core.features import feature_matrix, unseen_groups
from conformal_arbitrage.core.learned import decide_budgets, spendable_losses
from conformal_arbitrage.core.losses import Number
from conformal_arbitrage.core.risk import check_alpha
from conformal_arbitrage.core.trials import Steps, TrialPart
from conformal_arbitrage.scorelog.log import ScoreLog


def learned_calibration(
    log: ScoreLog, steps: Steps, alphas: Sequence[Number], options: CalibrationOptions, bound: Fraction
) -> Callable[[Indices, Indices], Sequence[TrialPart]]:
    """Return how each trial decides its test rows by a score that is learned on its calibration rows."""
    budgets = [check_alpha(alpha, bound) for alpha in alphas]
    rows, features = learned_rows(log, options, bound), options.features or Features()
    draws = options.draws(log)
    u: Floats = np.zeros(len(log)) if draws is None else draws
    alone = log.sizes == 1

    def calibrate(calibration: Indices, test: Indices) -> list[TrialPart]:
        refuse_row_count(len(calibration), log.source)
        spendable = [spendable_losses(alpha, bound, len(calibration)) for alpha in budgets]
        kept = _kept(rows, calibration, test, u, spendable, features.menu_size, with_margin=options.score == "auto")
        return _parts(kept | alone, np.array(spendable) > 0, len(steps.row))

    return calibrate


def _kept(
    rows: LearnedRows,
    calibration: Indices,
    test: Indices,
    u: Floats,
    spendable: Sequence[int],
    menu_size: int | None,
    *,
    with_margin: bool,
) -> Bools:
    """Return which test rows are kept under each budget: budgets x rows, false for all others."""
    chosen = rows.score_rows(calibration[rows.inputs.used[calibration]], u, menu_size)
    index = test[rows.inputs.used[test]]
    queries, features = rows.inputs.feature_rows(index), chosen.features
    decided = decide_budgets(
        chosen.fits(), feature_matrix(features, queries), u[index], rows.inputs.margin[index], budgets=spendable,
        unseen=unseen_groups(features, queries), with_margin=with_margin,
    )  # fmt: skip
    kept = np.zeros((len(spendable), len(rows.loss)), np.bool_)
    for k, (one, most) in enumerate(zip(decided, spendable, strict=True)):
        kept[k, index] = one.kept & (most > 0)
    return kept


def _parts(kept: Bools, possible: Bools, steps: int) -> list[TrialPart]:
    """Return rows that are kept under the same budgets as parts: each is kept before any step, or deferred after all."""
    patterns, member = np.unique(kept, axis=1, return_inverse=True)
    relaxation = np.where(possible, 0.0, np.nan)
    return [
        TrialPart(rows=member == k, relaxation=relaxation, stop=np.where(pattern, 0, steps).astype(np.intp))
        for k, pattern in enumerate(patterns.T)
    ]
