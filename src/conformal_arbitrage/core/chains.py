"""Cascades: predicted losses of stopping at each model, a path of thresholds on them, and the walk along it."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np

from conformal_arbitrage.core.exact import Bools, Floats, Indices, Integers
from conformal_arbitrage.core.risk import Events, walk_along
from conformal_arbitrage.errors import OptionError

# --- Paths ---


GUARDIAN = -1
"""The answering model of a row that goes to the Guardian."""
NO_ANSWER = -1
"""Stands among numbered answers where a model gave none."""


def normal_answer(text: str) -> str:
    """Return an answer as it is compared with others: white space and case do not count."""
    return " ".join(text.split()).casefold()


@dataclass(frozen=True, slots=True)
class PathStop:
    """Where a walk stopped: events before (position, u), in lexicographic order, are taken."""

    position: float
    u: float


def calibrate_path(
    entries: Floats, losses: Integers, u: Floats, *, alpha: Fraction, bound: Fraction = Fraction(1)
) -> PathStop | None:
    """Return where to stop on the path, or None if every query goes to the Guardian.

    Args:
        entries: rows x models, the position at which each row may stop at each model; inf if never.
        losses: rows x models, of answering with that model, in units of the bound: -1, 0 or 1.
        u: one draw per row.
        alpha: the risk budget.
        bound: the largest loss.
    """
    if entries.shape != losses.shape or len(u) != len(entries):
        raise OptionError(f"entries and losses have shapes {entries.shape} and {losses.shape}, with {len(u)} draws")
    if np.isnan(entries).any() or (entries == -np.inf).any():
        raise OptionError("an entry is a position on the path, or inf for never; got NaN or -inf")
    if not np.isin(losses, (-1, 0, 1)).all():
        raise OptionError("a path needs losses of -1, 0 or 1 in units of the bound; round others by a draw")
    spendable = alpha * (len(entries) + 1) / bound - 1
    if spendable < 0:
        return None
    events = path_events(entries, losses)
    walk = walk_along(events, -u[events.row], signed=True, origin=-np.inf)
    (stop,) = walk.stops([int(spendable // 1)])
    if stop is None or walk.draws is None:
        return None
    return PathStop(0.0 - float(walk.breakpoints[stop]), 0.0 - float(walk.draws[stop]))  # "0.0 -" makes no -0.0


def path_events(entries: Floats, losses: Integers) -> Events:
    """Return the events of a path, as those of a pair: where a row passes on to a later model, and at last to the Guardian.

    A path is walked from its far end, where every row has stopped as early as it ever does, so positions (and draws, which
    are the caller's) change their sign.

    Args:
        entries: as for `calibrate_path`.
        losses: as for `calibrate_path`.
    """
    stages = np.argsort(entries, axis=1, kind="stable")
    records = np.minimum.accumulate(stages, axis=1)
    moved = np.ones(stages.shape, dtype=np.bool_)
    moved[:, 1:] = records[:, 1:] < records[:, :-1]
    level = np.take_along_axis(losses, records, axis=1)
    change = np.diff(level, axis=1, prepend=0)
    position = np.take_along_axis(entries, stages, axis=1)
    finite = moved & np.isfinite(position)
    drop, row = change[finite], np.nonzero(finite)[0]
    return Events(n=len(entries), total=int(drop.sum()), position=-position[finite], drop=drop, row=row)


def path_choice(entries: Floats, u: Floats, stop: PathStop | None) -> Indices:
    """Return the model that answers each row: the first whose entry lies before the stop, else GUARDIAN."""
    if stop is None:
        return np.full(len(entries), GUARDIAN)
    draws = np.broadcast_to(u[:, None], entries.shape)
    open_stage = (entries < stop.position) | ((entries == stop.position) & (draws < stop.u))
    open_stage &= np.isfinite(entries)
    return np.where(open_stage.any(axis=1), open_stage.argmax(axis=1), GUARDIAN)


def rounded_losses(losses: Floats, v: Floats) -> Integers:
    """Round losses in [-1, 1] to -1, 0 or 1 by one draw per row, so that their expectation stays.

    Args:
        losses: rows x models, in units of the bound.
        v: one draw per row, other than the one that orders the path.
    """
    if not (np.abs(losses) <= 1).all():
        raise OptionError(f"losses must lie in [-1, 1] in units of the bound; got {np.abs(losses).max():g}")
    return (losses > v[:, None]).astype(np.int64) - (-losses > v[:, None]).astype(np.int64)


# --- Chains ---


_LOWEST, _HIGHEST, _SCALE = 1e-3, 1 - 1e-6, 3.0
_DIGITS: Final = 9
_FREE: Final = 1e-3
_STEPS: Final = 50
LEVELS: Final = {1: 200, 2: 24, 3: 12}
"""Thresholds tried at each stage, by the number of stages."""


def confidence_logits(confidence: Floats) -> Floats:
    """Return confidences in [0, 1] on a scale without ends; 0 where there is none.

    Rounded, so that one row alone and the same row among others give the same bits.
    """
    clipped = np.clip(confidence, _LOWEST, _HIGHEST)
    z = np.round(np.log(clipped / (1 - clipped)) / _SCALE, _DIGITS)
    return np.where(np.isnan(z), 0.0, z)


def stage_features(confidence: Floats, answers: Integers, stage: int) -> Floats:
    """Return what is known when the model of a stage has answered, as rows of features.

    An intercept, the confidence of every model asked so far and, for each earlier one, whether it gave the same answer,
    alone and times its confidence.

    Args:
        confidence: rows x models, in [0, 1]; NaN where a model gave none.
        answers: rows x models; equal numbers in a row are equal answers, and -1 is none.
        stage: index of the model that has answered last.
    """
    z = confidence_logits(confidence[:, : stage + 1])
    same = ((answers[:, :stage] == answers[:, [stage]]) & (answers[:, [stage]] >= 0)).astype(np.float64)
    return np.column_stack([np.ones(len(z)), z, same, same * z[:, :stage]])


def fit_ridge_logistic(features: Floats, targets: Floats, penalty: float = 1.0, steps: int = _STEPS) -> Floats:
    """Return the coefficients of a ridge logistic regression, by Newton's method; the intercept is all but free.

    Args:
        features: rows x columns, the first of ones.
        targets: in [0, 1]; fractions are allowed.
        penalty: on the squares of the other coefficients.
        steps: after which to stop, converged or not.
    """
    weights = np.full(features.shape[1], penalty)
    weights[0] = _FREE
    coefficients = np.zeros(features.shape[1])
    for _ in range(steps):
        fitted = _sigmoid(features @ coefficients)
        slope = features.T @ (fitted - targets) + weights * coefficients
        curvature = (features.T * (fitted * (1 - fitted))) @ features + np.diag(weights)
        step = np.linalg.solve(curvature, slope)
        coefficients -= step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-10:
            break
    return np.round(coefficients, _DIGITS)


def predicted_losses(features: Floats, coefficients: Floats) -> Floats:
    """Return the prediction for each row, column by column and rounded: the same bits for one row alone."""
    total = np.zeros(len(features))
    for column, coefficient in zip(features.T, coefficients.tolist(), strict=True):
        total = total + column * coefficient
    return np.round(_sigmoid(total), _DIGITS)


def _sigmoid(values: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(values, -35.0, 35.0)))


def path_corners(risks: Floats, losses: Floats, costs: Floats, levels: int) -> Floats:
    """Return the corners of a path: threshold vectors from "never stop" to ever cheaper policies, each above the last.

    Thresholds are tried on a grid of quantiles. Of these the policies are kept that no other one beats in both mean loss
    and cost, from the smallest loss up, and each stage's thresholds are raised to their running maximum.

    Args:
        risks: rows x stages, the predicted loss of stopping there, in [0, 1]; NaN if that is not possible.
        losses: rows x stages, the loss of stopping there, relative to the Guardian's.
        costs: rows x (stages + 1), of all models asked until then; the last column includes the Guardian.
        levels: thresholds tried at each stage.

    Returns:
        corners x stages; a row stops at the first stage whose prediction lies below the threshold.
    """
    grids = [_grid(column, levels) for column in risks.T]
    loss, cost = _grid_means([_below(risks[:, j], grid) for j, grid in enumerate(grids)], losses, costs)
    order = np.lexsort((cost, loss))
    best = np.minimum.accumulate(cost[order])
    falls = np.concatenate([[True], best[1:] < best[:-1]])
    cheaper = order[falls & (cost[order] < cost[0])]  # the first of all policies never stops
    mesh = np.stack(np.meshgrid(*grids, indexing="ij"), axis=-1).reshape(-1, len(grids))
    corners = np.maximum.accumulate(np.vstack([np.zeros(len(grids)), mesh[cheaper]]), axis=0)
    raised = (np.diff(corners, axis=0) > 0).any(axis=1)
    return corners[np.concatenate([[True], raised])]


def _grid(risks: Floats, levels: int) -> Floats:
    """Return 0, which no prediction lies below, some quantiles, and 1, which all do."""
    known = risks[~np.isnan(risks)]
    inner = np.quantile(known, np.linspace(0, 1, levels + 1)[1:-1], method="lower") if known.size else np.zeros(0)
    return np.unique(np.concatenate([[0.0], np.round(inner, _DIGITS), [1.0]]))


def _below(risks: Floats, grid: Floats) -> Bools:
    """Return thresholds x rows: whether the row stops; NaN never does."""
    return (risks <= grid[:, None]) & (grid[:, None] > 0)


def _grid_means(stops: list[Bools], losses: Floats, costs: Floats) -> tuple[Floats, Floats]:
    """Return mean loss and mean cost of every combination of the stages' thresholds, the last stage's varying fastest."""
    n = len(losses)
    going = np.ones((1, n))
    loss, cost = np.zeros(1), np.zeros(1)
    for j, stop in enumerate(stops):
        stopping = going[:, None, :] * stop[None, :, :]
        loss = (loss[:, None] + stopping @ losses[:, j] / n).ravel()
        cost = (cost[:, None] + stopping @ costs[:, j] / n).ravel()
        going = (going[:, None, :] * ~stop[None, :, :]).reshape(-1, n)
    return loss, cost + going @ costs[:, -1] / n


def path_entries(risks: Floats, corners: Floats) -> Floats:
    """Return where on the path each row may first stop at each stage; inf if nowhere.

    Between two corners thresholds rise linearly, so a position is the number of a corner and a fraction.

    Args:
        risks: rows x stages, as in `path_corners`.
        corners: as `path_corners` returns them.
    """
    return np.column_stack([_entry(risks[:, j], corners[:, j]) for j in range(corners.shape[1])])


def _entry(risks: Floats, thresholds: Floats) -> Floats:
    above = np.searchsorted(thresholds, risks, side="left")  # NaN comes after everything
    reached = (above < len(thresholds)) & ~np.isnan(risks)
    upper = np.where(reached, above, 1).clip(min=1)
    low, high = thresholds[upper - 1], thresholds[np.minimum(upper, len(thresholds) - 1)]
    inside = (risks - low) / np.where(high > low, high - low, 1.0)
    return np.where(reached, np.where(above == 0, 0.0, upper - 1 + inside), np.inf)
