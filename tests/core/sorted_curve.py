"""The curve computed the long way, row by row and with every fall sorted: what the search without a sort must equal."""

from fractions import Fraction

import numpy as np

CEILINGS = np.array([float(f"1e{e}") for e in range(-16, 309)])
LARGEST_SINGLE = float(np.finfo(np.float32).max)


def row_gaps(scores, digits):
    """Gaps of one row in ascending order, and the actions in that order."""
    if digits == 6:
        single = np.clip(scores, -LARGEST_SINGLE, LARGEST_SINGLE).astype(np.float32).astype(np.float64)
        scores = np.where(np.abs(scores) <= LARGEST_SINGLE, single, scores)
    top = scores.max()
    exponent = int(np.searchsorted(CEILINGS, max(top, -scores.min()))) - 16
    decimals = min(digits - exponent, 22)
    power = float(f"1e{abs(decimals)}")
    ticks = np.rint((top - scores) * power if decimals >= 0 else (top - scores) / power)
    order = np.argsort(ticks, kind="stable")
    return (ticks / power if decimals >= 0 else ticks * power)[order] + 0.0, order


def tick_digits(log, worst):
    scores = log.loss_scores[~np.isnan(log.loss_scores)]
    spread = Fraction(float(scores.max())) - Fraction(float(scores.min())) if len(scores) else Fraction(0)
    digits = 12
    while len(log) * max(spread, worst) > 9_000_000 * 10 ** (12 - digits):
        digits -= 1
    return digits


def row_levels(log, index, order, sees, worst, digits):
    """The loss of one row in ticks, once its first actions are candidates."""
    size, alone = len(order), sees == "all"
    if log.unknown_loss[index]:
        hidden = min(1, size - 1) if alone else size - 1
        return [-int(-worst * 10**digits // 1)] * hidden + [0] * (size - hidden)
    ticks = [int(v) for v in np.rint(log.loss_scores[log.offsets[index] : log.offsets[index + 1]] * 1e12)]
    best = max(ticks)
    seen = [best if alone and j > 0 else max(ticks[k] for k in order[: j + 1]) for j in range(size)]
    return [-(-(best - one) // 10 ** (12 - digits)) for one in seen]


def every_fall(log, sees, missing_loss=None):
    """(gap, row, fall) of every row, and the total at relaxation 0, in ticks."""
    worst = Fraction(0) if missing_loss is None else Fraction(missing_loss)
    digits = tick_digits(log, worst if log.unknown_loss.any() else Fraction(0))
    falls, total = [], 0
    for index in range(len(log)):
        gap, order = row_gaps(log.primary[log.offsets[index] : log.offsets[index + 1]], log.score_digits)
        levels = row_levels(log, index, order, sees, worst, digits)
        total += levels[0]
        for j in range(1, len(levels)):
            fall = levels[j - 1] - levels[j]
            if fall and gap[j] == 0:
                total -= fall
            elif fall:
                falls.append((float(gap[j]), index, fall))
    return falls, total, digits


def sorted_curve(log, sees, u=None, missing_loss=None):
    """Breakpoints (gap, draw), totals from each on, and the digits of a tick."""
    falls, total, digits = every_fall(log, sees, missing_loss)
    steps = {}
    for gap, row, fall in falls:
        at = (gap, 0.0 if u is None else float(u[row]))
        steps[at] = steps.get(at, 0) + fall
    points, totals = [(0.0, 0.0)], [total]
    for at in sorted(steps):
        points.append(at)
        totals.append(totals[-1] - steps[at])
    return points, totals, digits


def first_within(points, totals, limit):
    """The first breakpoint within a limit, and the total there; None if there is none."""
    return next(((*point, total) for point, total in zip(points, totals, strict=True) if total <= limit), None)
