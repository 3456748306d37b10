"""Choosing: which action a model takes among those it sees, by its raw scores, lowest index among equals.

Knows nothing of gaps, thresholds or losses.
"""

import numpy as np

from conformal_arbitrage.core.arrays import Floats, Integers, in_order


def guardian_choices(guardian: Floats, order: Integers, *, sees_all: bool) -> Integers:
    """Return the Guardian's action once actions 0 to j of the order are candidates: actions x rows.

    Entry 0 is the top action itself: standing alone, it is not shown to the Guardian.
    """
    score = in_order(guardian, order)
    chosen = order.copy()
    for j in range(1, len(order)):
        better = (score[j] > score[j - 1]) | ((score[j] == score[j - 1]) & (order[j] < chosen[j - 1]))
        chosen[j] = np.where(better, order[j], chosen[j - 1])
        np.maximum(score[j], score[j - 1], out=score[j])
    if sees_all:
        chosen[1:] = chosen[-1]
    return chosen


def row_argmax(values: Floats, offsets: Integers) -> Integers:
    """Return the index within its row of each row's largest value, the lowest among equals; 0 for a row of NaN."""
    sizes = np.diff(offsets)
    top = np.repeat(np.maximum.reduceat(values, offsets[:-1]), sizes)
    place = np.arange(len(values)) - np.repeat(offsets[:-1], sizes)
    return np.minimum.reduceat(np.where((values == top) | np.isnan(top), place, len(values)), offsets[:-1])
