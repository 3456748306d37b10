"""Paths: cascades of several models under one promise, walked from "always ask the Guardian" to cheaper policies.

Models are asked in order. A row enters stage j at a position of the path of its own, `entries[row, j]`: the policy at
position s answers with the first model whose entry lies before s, and asks the Guardian if there is none. As s grows a
row's loss may rise and fall several times, so the walk stops before the first event that breaks the budget, as for the
net loss. docs/theory.md has the proof, which needs losses of -B, 0 or B; `rounded_losses` makes others so.

Knows nothing of models, costs or how entries are found.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from conformal_arbitrage.core.arrays import Floats, Indices, Integers
from conformal_arbitrage.errors import OptionError

GUARDIAN = -1
"""The answering model of a row that goes to the Guardian."""


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
    position, draw, change = _events(entries, losses, u)
    order = np.lexsort((-change, draw, position))
    broken = np.flatnonzero(np.cumsum(change[order]) > int(spendable // 1))
    if not broken.size:
        return PathStop(float("inf"), 0.0)
    first = order[broken[0]]
    return PathStop(float(position[first]), float(draw[first]))


def _events(entries: Floats, losses: Integers, u: Floats) -> tuple[Floats, Floats, Integers]:
    """Return position, draw and change of loss of every event: a row passing to an earlier model."""
    stages = np.argsort(entries, axis=1, kind="stable")
    records = np.minimum.accumulate(stages, axis=1)
    moved = np.ones(stages.shape, dtype=np.bool_)
    moved[:, 1:] = records[:, 1:] < records[:, :-1]
    level = np.take_along_axis(losses, records, axis=1)
    change = np.diff(level, axis=1, prepend=0)
    position = np.take_along_axis(entries, stages, axis=1)
    finite = moved & np.isfinite(position)
    return position[finite], np.broadcast_to(u[:, None], stages.shape)[finite], change[finite]


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
