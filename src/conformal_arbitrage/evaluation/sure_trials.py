"""Held-out trials of calibrations that are not one search for a total: by betting, and by groups.

Knows nothing of what is measured, nor of tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from conformal_arbitrage.calibration.groups import threshold_rows
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.calibration.search import Fit, find_threshold, refuse_graded
from conformal_arbitrage.core.arrays import Bools, Floats, Indices
from conformal_arbitrage.core.losses import Number
from conformal_arbitrage.core.risk import check_alpha
from conformal_arbitrage.core.trials import Steps, TrialPart
from conformal_arbitrage.evaluation.learned_trials import learned_calibration
from conformal_arbitrage.scorelog.fitness import group_rows
from conformal_arbitrage.scorelog.log import ScoreLog


def trial_calibration(
    log: ScoreLog, steps: Steps, alphas: Sequence[Number], options: CalibrationOptions, bound: Fraction
) -> Callable[[Indices, Indices], Sequence[TrialPart]] | None:
    """Return how each trial finds its thresholds; None if a limit on the total loss, or the usual rule, will do."""
    if options.zero_one:
        refuse_graded(log, options, bound)
    if options.learned:
        return learned_calibration(log, steps, alphas, options, bound)
    if options.by is None and (options.confidence is None or options.is_binary(log, bound)):
        return None
    budgets = [check_alpha(alpha, bound) for alpha in alphas]
    alone, masks = replace(options, by=None, small_groups="defer", group_source=None), _masks(log, options.by)

    def calibrate(rows: Indices, _: Indices) -> list[TrialPart]:
        own = [rows[mask[rows]] for mask in masks]
        delta = options.delta(sum(one.size > 0 for one in own))
        fewest = [rows_needed(alpha, bound) if options.merges else None for alpha in budgets]
        sources = list(zip(*(threshold_rows(own, one) for one in fewest), strict=True))
        return [
            _part(steps, mask, _fits(log, of, budgets, bound, alone, delta) if one.size else [None] * len(budgets))
            for mask, one, of in zip(masks, own, sources, strict=True)
        ]

    return calibrate


def _masks(log: ScoreLog, by: str | None) -> list[Bools]:
    if by is None:
        return [np.ones(len(log), dtype=np.bool_)]
    return [np.isin(np.arange(len(log)), rows) for rows in group_rows(log, by).values()]


def _fits(
    log: ScoreLog,
    sources: Sequence[Indices],
    budgets: Sequence[Fraction],
    bound: Fraction,
    options: CalibrationOptions,
    delta: float | None,
) -> list[Fit]:
    """Calibrate a group on the rows that its threshold comes from at each budget, mostly the same ones."""
    parts = {id(source): log.select(source) for source in sources}
    curves = {key: options.curve(part) for key, part in parts.items()}
    return [
        find_threshold(parts[id(source)], curves[id(source)], alpha, bound, options, delta)
        for source, alpha in zip(sources, budgets, strict=True)
    ]


def _part(steps: Steps, mask: Bools, fits: Sequence[Fit | None]) -> TrialPart:
    """Return what a trial does with the rows of a group; without a threshold they are deferred."""
    relaxations = [np.nan if one is None or one.relaxation is None else one.relaxation for one in fits]
    stops = [_steps_taken(steps, one) for one in fits]
    return TrialPart(rows=mask, relaxation=np.array(relaxations), stop=np.array(stops, dtype=np.intp))


def _steps_taken(steps: Steps, one: Fit | None) -> int:
    """Return how many steps of a log a threshold takes."""
    if one is None or one.relaxation is None:
        return len(steps.row)
    low, high = (int(np.searchsorted(steps.gap, one.relaxation, side=side)) for side in ("left", "right"))
    draws: Floats | None = steps.u
    if draws is None or one.boundary_u is None:
        return high
    return low + int(np.searchsorted(draws[low:high], one.boundary_u, side="right"))
