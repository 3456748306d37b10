"""Guardrail losses as exact stairs: the loss of each row as its candidate set grows, in whole ticks.

A loss is a function of the actions in sight. Sorted by gap, a row's actions become candidates one after the other;
level j is the loss once the first j + 1 of them are. Losses are whole multiples of a tick (10^-12 unless the sum
would not fit 64 bits), so totals are exact and do not depend on the order of the rows.

Knows nothing of budgets, thresholds or files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.arrays import Bools, Floats, Integers, in_order
from conformal_arbitrage.core.choices import row_argmax
from conformal_arbitrage.core.gaps import sorted_gaps
from conformal_arbitrage.core.rows import Block, ScoreArrays, blocks
from conformal_arbitrage.errors import OptionError, ScoreLogError

GuardianSees = Literal["candidates", "all", "all-restricted-loss"]
Loss = Callable[[Any, NDArray[np.int64]], float]
"""A user's loss: (row, indices of the actions in sight) -> a number in [0, bound]."""

Number = float | int | str | Decimal | Fraction

FINEST_TICK_DIGITS = 12
LARGEST_LOSS = 9e6
LARGEST_GUARDIAN_SCORE = LARGEST_LOSS / 2
"""Beyond this size a score difference may not fit 64 bits at the finest tick."""
_LARGEST_EXPONENT = 30
_NUMERIC: tuple[type[Any], ...] = (int, float, np.integer, np.floating)
_LARGEST_SUM = Fraction(9_000_000)  # times 10^12 ticks, just below 2^63


def as_fraction(value: Number, *, name: str) -> Fraction:
    """Return the decimal that the user wrote: a float stands for the one its repr shows."""
    if isinstance(value, Fraction):
        return value
    try:
        decimal = Decimal(repr(float(value)) if isinstance(value, float) else str(value))
    except InvalidOperation as error:
        raise OptionError(f"{name} must be a finite decimal number; got {value!r}") from error
    if not decimal.is_finite() or (decimal and abs(decimal.adjusted()) > _LARGEST_EXPONENT):
        raise OptionError(f"{name} must be a finite decimal number of ordinary size; got {value!r}")
    return Fraction(decimal)


@dataclass(frozen=True, slots=True)
class Stairs:
    """The loss of a block of rows at every size of its candidate set.

    `gaps`, `order` and `levels` are actions x rows, ascending by gap; `levels[j]` is the loss in ticks once actions
    0 to j of that order are candidates. Among equal gaps only the last level ever occurs.
    """

    block: Block
    gaps: Floats
    order: Integers
    levels: Integers

    def at_zero(self) -> Integers:
        """Return the loss at relaxation 0, with all actions tied at the top as candidates: the largest that ever occurs."""
        loss = self.levels[0].copy()
        for j in range(1, len(self.gaps)):
            tied = self.gaps[j] == 0
            if not tied.any():
                break
            loss[tied] = self.levels[j, tied]
        return loss


@dataclass(frozen=True, slots=True)
class LossStairs:
    """All rows' stairs, built block by block on iteration."""

    blocks: Iterator[Stairs]
    tick_digits: int
    envelope_excess: float


def loss_stairs(
    log: ScoreArrays,
    *,
    guardian_sees: GuardianSees,
    loss: Loss | None = None,
    grades: Floats | None = None,
    missing_loss: Number | None = None,
    full_sight_loss: Number = 0,
    tick_digits: int | None = None,
) -> LossStairs:
    """Return the loss of every row of a log as its candidate set grows.

    Args:
        log: the scores.
        guardian_sees: "candidates" and "all-restricted-loss" measure the loss of the candidates; "all" measures
            that of the top action while it stands alone, and of all actions from then on.
        loss: a user's loss, raised to its monotone envelope; None for the Guardian regret.
        grades: what each action is worth, flat, NaN if unknown: the loss is then the net loss, the grade of the
            Guardian's choice minus that of the top action, negative where the Primary's choice is the better one;
            with guardian_sees="all" only.
        missing_loss: the loss of a row whose loss is unknown (see `ScoreArrays`), unless everything is in sight.
        full_sight_loss: the loss of such a row with everything in sight; 0 for the Guardian regret.
        tick_digits: of the whole log, if these are only some of its rows; by default those that these rows need.

    Raises:
        ScoreLogError: a Guardian score is missing and `missing_loss` is None, or a loss is negative.
    """
    if guardian_sees not in get_args(GuardianSees):
        raise OptionError(f"guardian_sees must be one of {', '.join(get_args(GuardianSees))}; got {guardian_sees!r}")
    if grades is not None:
        return _net_stairs(log, grades, missing_loss)
    if loss is None:
        regret = regret_rule(log, guardian_sees=guardian_sees, missing_loss=missing_loss, tick_digits=tick_digits)
        unknown = log.unknown_loss
        walk = (regret.stairs(log, block, block.per_row(unknown)) for block in blocks(log.offsets))
        return LossStairs(walk, regret.tick_digits, 0.0)
    worst = _missing_loss(log, missing_loss)
    least = as_fraction(full_sight_loss, name="full_sight_loss")
    return _user_stairs(log, loss, alone_only=guardian_sees == "all", worst=worst, least=least, tick_digits=tick_digits)


_UNLABELLED = ("`correct` of the Guardian's answer is unknown", "fill it in")


def _missing_loss(log: ScoreArrays, missing_loss: Number | None) -> Fraction:
    return _price_of_unknown(log, log.unknown_loss, missing_loss, _UNLABELLED)


def _price_of_unknown(
    log: ScoreArrays, is_unknown: Bools, missing_loss: Number | None, ungraded: tuple[str, str]
) -> Fraction:
    """Return the loss of a row whose loss is unknown; refuse such rows unless the caller states one."""
    unknown = np.flatnonzero(is_unknown)
    if unknown.size == 0:
        return Fraction(0)
    if missing_loss is None:
        first = unknown[0]
        what, remedy = ("no Guardian score", "ask the Guardian again") if log.missing[first] else ungraded
        raise ScoreLogError(
            f"{log.source}: row {first + 1}: {what} ({unknown.size} of {len(log.missing)} rows); {remedy}, or pass "
            'missing_guardian="worst_case" (--missing-guardian worst_case): dropping such rows breaks the guarantee'
        )
    return check_size(as_fraction(missing_loss, name="loss_bound"))


def check_size(loss: Fraction) -> Fraction:
    """Refuse a loss or bound whose sums would not be exact."""
    if loss > LARGEST_LOSS:
        raise OptionError(
            f"a loss or bound of {float(loss):g} is too large for exact sums (limit {LARGEST_LOSS:g}); "
            "divide scores, bound and alpha by one power of ten: the rule stays the same"
        )
    return loss


def finest_tick(n: int, largest: Fraction) -> int:
    """Return the finest tick at which n losses of this size still sum within 64 bits."""
    digits = FINEST_TICK_DIGITS
    while n * largest > _LARGEST_SUM * 10 ** (FINEST_TICK_DIGITS - digits):
        digits -= 1
    return digits


def coarsened(levels: Integers, tick_digits: int) -> Integers:
    """Convert finest ticks to ticks, rounded up: never less than the loss."""
    return levels if tick_digits == FINEST_TICK_DIGITS else -(-levels // 10 ** (FINEST_TICK_DIGITS - tick_digits))


def score_range(scores: Floats) -> tuple[float, float]:
    """Smallest and largest score, rows without an answer left aside."""
    low, high = float(scores.min()), float(scores.max())
    if np.isnan(low):
        low, high = float(np.fmin.reduce(scores)), float(np.fmax.reduce(scores))
    return (0.0, 0.0) if np.isnan(low) else (low, high)


def within_unit(scores: Floats) -> bool:
    """Return whether all scores lie in [0, 1], so that no regret exceeds 1."""
    return in_unit(score_range(scores))


def in_unit(scores: tuple[float, float]) -> bool:
    """Return whether the smallest and the largest score lie in [0, 1]."""
    return scores[0] >= 0 and scores[1] <= 1


@dataclass(frozen=True, slots=True)
class RegretRule:
    """How Guardian scores become losses in ticks.

    Attributes:
        alone_only: whether only the top action alone can lose, as the Guardian sees everything from then on.
        worst: the loss of a row whose loss is unknown.
        tick_digits: one tick is 10^-tick_digits.
        scores: the smallest and largest score of the log.
    """

    alone_only: bool
    worst: Fraction
    tick_digits: int
    scores: tuple[float, float]

    def stairs(self, log: ScoreArrays, block: Block, unknown: Bools) -> Stairs:
        """Return the loss of a block of rows as their candidate sets grow; that of some of them is unknown."""
        gap, order = sorted_gaps(block.of(log.primary), digits=log.score_digits)
        levels = _regret_levels(block.of(log.loss_scores), order, alone_only=self.alone_only)
        levels = coarsened(levels, self.tick_digits)
        _fill_missing(levels, unknown, self.worst, self.tick_digits, alone_only=self.alone_only)
        return Stairs(block, gap, order, levels)


def regret_rule(
    log: ScoreArrays, *, guardian_sees: GuardianSees, missing_loss: Number | None, tick_digits: int | None = None
) -> RegretRule:
    """Return how the Guardian regret of a log is counted; refuse scores that are missing or too large.

    Args:
        log: the scores.
        guardian_sees: see `loss_stairs`.
        missing_loss: see `loss_stairs`.
        tick_digits: see `loss_stairs`.
    """
    worst = _missing_loss(log, missing_loss)
    low, high = check_guardian_scores(score_range(log.loss_scores), log.source)
    digits = finest_tick(len(log.offsets) - 1, max(Fraction(high) - Fraction(low), worst))
    return RegretRule(
        alone_only=guardian_sees == "all",
        worst=worst,
        tick_digits=digits if tick_digits is None else tick_digits,
        scores=(low, high),
    )


def check_guardian_scores(scores: tuple[float, float], source: str) -> tuple[float, float]:
    """Return the smallest and largest Guardian score; refuse those whose sums would not be exact."""
    low, high = scores
    if max(abs(low), abs(high)) > LARGEST_GUARDIAN_SCORE:
        raise ScoreLogError(
            f"{source}: Guardian scores from {low:g} to {high:g} are too large (limit {LARGEST_GUARDIAN_SCORE:g}); "
            "divide them, the bound and alpha by one power of ten: the rule stays the same"
        )
    return scores


def net_losses(log: ScoreArrays, grades: Floats) -> Floats:
    """Return the net loss of keeping each row's top action; NaN where a grade or the Guardian is missing.

    It is the grade of the Guardian's choice over all actions minus that of the Primary's.
    """
    top = np.empty(len(log.offsets) - 1, dtype=np.int64)
    for block in blocks(log.offsets):
        top[block.rows] = sorted_gaps(block.of(log.primary), digits=log.score_digits)[1][0]
    starts = log.offsets[:-1]
    net = grades[starts + row_argmax(log.guardian, log.offsets)] - grades[starts + top]
    return np.where(log.missing, np.nan, net)


_UNGRADED = ("the outcome of the Primary's or the Guardian's choice is unknown", "fill it in")


def _net_stairs(log: ScoreArrays, grades: Floats, missing_loss: Number | None) -> LossStairs:
    """Return the net loss while the top action stands alone, and 0 from the next action on."""
    net = net_losses(log, grades)
    unknown = np.isnan(net)
    worst = _price_of_unknown(log, unknown, missing_loss, _UNGRADED)
    largest = Fraction(float(np.abs(net[~unknown]).max(initial=0.0)))
    if largest > LARGEST_LOSS:
        raise ScoreLogError(
            f"{log.source}: outcomes differ by {float(largest):g}, too much for exact sums (limit {LARGEST_LOSS:g}); "
            "divide them, the bound and alpha by one power of ten: the rule stays the same"
        )
    digits = finest_tick(len(net), max(largest, worst))
    ticks = coarsened(guardian_ticks(net), digits)
    ticks[unknown] = _rounded_up(worst, digits)

    def walk() -> Iterator[Stairs]:
        for block in blocks(log.offsets):
            gap, order = sorted_gaps(block.of(log.primary), digits=log.score_digits)
            levels = np.zeros(gap.shape, dtype=np.int64)
            if len(gap) > 1:
                levels[0] = block.per_row(ticks)
            yield Stairs(block, gap, order, levels)

    return LossStairs(walk(), digits, 0.0)


def guardian_ticks(scores: Floats) -> Integers:
    """Return scores rounded to the nearest finest tick; a missing score counts as 0."""
    ticks = scores * 1e12
    np.rint(ticks, out=ticks)
    if np.isnan(ticks).any():
        ticks = np.nan_to_num(ticks, nan=0.0)
    return ticks.astype(np.int64)


def _regret_levels(scores: Floats, order: Integers, *, alone_only: bool) -> Integers:
    """Return the Guardian regret, max over all actions minus max over those in sight, in finest ticks."""
    best = in_order(guardian_ticks(scores), order)
    if alone_only:
        levels = np.zeros_like(best)
        np.subtract(best.max(axis=0), best[0], out=levels[0])
        return levels
    for j in range(1, len(best)):
        np.maximum(best[j], best[j - 1], out=best[j])
    return np.subtract(best[-1].copy(), best, out=best)


def _fill_missing(
    levels: Integers,
    missing: Bools,
    worst: Fraction,
    tick_digits: int,
    *,
    alone_only: bool,
    least: Fraction = Fraction(0),
) -> None:
    """Charge rows without a Guardian score the worst loss, in place, until everything is in sight."""
    if missing.any():
        hidden = min(1, len(levels) - 1) if alone_only else len(levels) - 1
        levels[:, missing] = _rounded_up(least, tick_digits)
        levels[:hidden, missing] = _rounded_up(worst, tick_digits)


def _rounded_up(loss: Fraction, tick_digits: int) -> int:
    return -int(-loss * 10**tick_digits // 1)


def _user_stairs(
    log: ScoreArrays, loss: Loss, *, alone_only: bool, worst: Fraction, least: Fraction, tick_digits: int | None
) -> LossStairs:
    """Return a user's loss on its monotone envelope: the largest loss at this or any larger relaxation."""
    raw = [(block, *_user_levels(log, block, loss, alone_only=alone_only)) for block in blocks(log.offsets)]
    n, unknown = len(log.offsets) - 1, log.unknown_loss
    largest = check_size(Fraction(max(float(levels.max()) for *_, levels in raw)))
    digits = finest_tick(n, max(largest, worst)) if tick_digits is None else tick_digits
    lifted = 0.0
    stairs: list[Stairs] = []
    for block, gap, order, levels in raw:
        envelope = np.maximum.accumulate(levels[::-1])[::-1]
        lifted += float((envelope - levels).max(axis=0).sum())
        ticks = coarsened(guardian_ticks(envelope), digits)
        _fill_missing(ticks, block.per_row(unknown), worst, digits, alone_only=alone_only, least=least)
        stairs.append(Stairs(block, gap, order, ticks))
    return LossStairs(iter(stairs), digits, lifted / n)


def _user_levels(log: ScoreArrays, block: Block, loss: Loss, *, alone_only: bool) -> tuple[Floats, Integers, Floats]:
    gap, order = sorted_gaps(block.of(log.primary), digits=log.score_digits)
    levels, unknown = np.zeros(gap.shape), log.unknown_loss
    for k, index in enumerate(block.all_rows().tolist()):
        if not unknown[index]:
            levels[:, k] = _user_row(log, index, gap[:, k], order[:, k], loss, alone_only=alone_only)
    return gap, order, levels


def _as_number(value: Any) -> float:
    """Return a user's loss as a float; NaN, which is refused with its row, if it is not a number."""
    return float(value) if isinstance(value, _NUMERIC) else float("nan")


def _user_row(
    log: ScoreArrays, index: int, gap: Floats, order: Integers, loss: Loss, *, alone_only: bool
) -> list[float]:
    """Return the user's loss of the top action alone and at each distinct gap; equal gaps share the last one's."""
    size, row = len(gap), log.row(index)
    values: list[float] = [0.0] * size
    for j in range(size - 1, -1, -1):
        tied = 0 < j < size - 1 and gap[j] == gap[j + 1]
        if tied or (alone_only and 0 < j < size - 1):
            values[j] = values[j + 1]
            continue
        sight = order if alone_only and j > 0 else order[: j + 1]
        values[j] = _as_number(loss(row, np.sort(sight)))
        if not 0 <= values[j] < np.inf:
            raise ScoreLogError(
                f"{log.source}: row {index + 1}: the loss is {values[j]!r}; it must lie in [0, loss_bound]"
            )
    return values
