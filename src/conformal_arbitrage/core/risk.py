"""RiskCurve: the empirical risk of a score log at every relaxation at once, exactly.

The total loss is a step function of the relaxation that changes only at gaps that occur in the log. All changes, merged
by gap, give it everywhere; finding the relaxation that keeps a budget is one search, which sorts none but the changes near
the answer. Of a loss that is never negative the total only falls. A net loss makes it rise and fall: then the first
passage counts, see `peaks`, and all changes are sorted.

Knows nothing of files, certificates or models.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from conformal_arbitrage.core.arrays import Floats, Indices, Integers
from conformal_arbitrage.core.falls import Falls, loss_falls
from conformal_arbitrage.core.losses import GuardianSees, Loss, Number, as_fraction, check_size, in_unit, within_unit
from conformal_arbitrage.core.rows import ScoreArrays
from conformal_arbitrage.core.search import Crossing, crossings_here
from conformal_arbitrage.errors import OptionError, ScoreLogError

SMALLEST_BOUND = Fraction(1, 10**6)
"""A smaller loss bound is refused: too little would be left of losses rounded to 10^-12."""
_LARGEST_INT = 2**63 - 1


Draw = Callable[[Indices], Floats]
"""Gives the draws of some rows, by their numbers."""


@dataclass(frozen=True, slots=True)
class RiskThreshold:
    """A threshold that keeps a budget.

    Attributes:
        relaxation: the threshold.
        boundary_u: the draw that goes with it, for boundary="random"; else None.
        total: the loss of all rows there.
    """

    relaxation: float
    boundary_u: float | None
    total: Fraction


@dataclass(frozen=True, slots=True)
class _Curve:
    """Breakpoints in order, their draws, the total from each one on, and its peaks."""

    breakpoints: Floats
    boundary_u: Floats | None
    totals: Integers
    peaks: Integers


@dataclass(frozen=True, eq=False)
class RiskCurve:
    """The total loss of n rows as an exact step function of the relaxation.

    `thresholds` and `relaxation` search without sorting; `breakpoints`, `totals` and what follows from them are sorted on
    first use.

    Attributes:
        source: where the log came from, for messages.
        n: rows.
        falls: where the total falls, unsorted.
        draw: gives the draws of rows, for boundary="random"; else None.
        signed: whether losses can be negative.
        unit_scores: whether all Guardian scores lie in [0, 1], so that a bound of 1 needs no statement.
        grid: the only relaxations allowed; None for all.
    """

    source: str
    n: int
    falls: Falls
    draw: Draw | None
    signed: bool
    unit_scores: bool
    grid: Floats | None = None

    @classmethod
    def from_log(
        cls,
        log: ScoreArrays,
        *,
        guardian_sees: GuardianSees = "all",
        loss: Loss | None = None,
        grades: Floats | None = None,
        missing_loss: Number | None = None,
        full_sight_loss: Number = 0,
        u: Floats | Draw | None = None,
    ) -> "RiskCurve":
        """Build the curve of a log.

        Args:
            log: anything with the flat arrays of a ScoreLog.
            guardian_sees: what the loss is measured on, see `loss_stairs`.
            loss: a user's loss; None for the Guardian regret.
            grades: what each action is worth, for the net loss; see `loss_stairs`. It needs draws.
            missing_loss: the loss of a row whose loss is unknown, such as one without a Guardian score.
            full_sight_loss: the loss of such a row with every action in sight.
            u: one draw per row for boundary="random", or what gives the draws of the rows that are asked for.
        """
        falls = loss_falls(
            log,
            guardian_sees=guardian_sees,
            loss=loss,
            grades=grades,
            missing_loss=missing_loss,
            full_sight_loss=full_sight_loss,
        )
        return cls(
            source=log.source,
            n=len(log.offsets) - 1,
            falls=falls,
            draw=u.take if isinstance(u, np.ndarray) else u,
            signed=grades is not None,
            unit_scores=within_unit(log.loss_scores if grades is None else grades)
            if falls.scores is None
            else in_unit(falls.scores),
        )

    @property
    def tick_digits(self) -> int:
        """One tick is 10^-tick_digits."""
        return self.falls.tick_digits

    @property
    def envelope_excess(self) -> float:
        """Mean over rows of how far a user's loss was raised to make it monotone."""
        return self.falls.envelope_excess

    @property
    def largest_loss(self) -> tuple[Fraction, int]:
        """The largest loss of any row, and that row's index."""
        return self._loss(self.falls.largest)

    @property
    def in_full_sight(self) -> tuple[Fraction, int]:
        """The largest loss of any row with every action in sight, and that row's index."""
        return self._loss(self.falls.in_full_sight)

    def _loss(self, ticks: tuple[int, int]) -> tuple[Fraction, int]:
        return Fraction(ticks[0], 10**self.tick_digits), ticks[1]

    @property
    def breakpoints(self) -> Floats:
        """Relaxations at which the total changes, ascending; the first is 0."""
        return self._curve.breakpoints

    @property
    def boundary_u(self) -> Floats | None:
        """For boundary="random", the draw that goes with each breakpoint; else None."""
        return self._curve.boundary_u

    @property
    def totals(self) -> Integers:
        """The total loss from each breakpoint on, in ticks."""
        return self._curve.totals

    @property
    def peaks(self) -> Integers:
        """The largest total at this or any larger breakpoint.

        Walking from "every query is deferred" towards 0, rows are kept one after the other; the walk stops before the
        first row that breaks the budget, even if later rows would repair it. Equal to `totals` unless losses are negative.
        """
        return self._curve.peaks

    @cached_property
    def _curve(self) -> _Curve:
        u = None if self.draw is None else self.draw(self.falls.row)
        whole = _accumulate(self.falls, u, signed=self.signed)
        if self.grid is None:
            return whole
        totals = whole.totals[np.searchsorted(whole.breakpoints, self.grid, side="right") - 1]
        return _Curve(self.grid, None, totals, totals)

    def on_grid(self, step: Number) -> "RiskCurve":
        """Return the same risk with relaxations restricted to 0, step, 2 step, ..., 1: the paper's grids."""
        if self.draw is not None:
            raise OptionError('grid goes with boundary="include" only; drop one of the two')
        return replace(self, grid=grid_points(step))

    def bound(self, loss_bound: Number | None) -> Fraction:
        """Return the loss bound as the user wrote it, checked against the losses of this log."""
        tick = Fraction(1, 10**self.tick_digits)
        return check_bound(loss_bound, self.largest_loss, tick=tick, unit_scores=self.unit_scores, source=self.source)

    def limits(self, alphas: Sequence[Number], loss_bound: Number | None = None, *, unseen: int = 1) -> list[int]:
        """Return the largest total that keeps each budget, in ticks.

        The rule is total + m B <= alpha (n + m), in exact arithmetic, accepted at equality; m is `unseen`, the most rows
        that the next unit may have: 1 where rows are exchangeable, the largest cluster size where clusters are.
        """
        bound = self.bound(loss_bound)
        return [spendable(alpha, bound, self.n, self.tick_digits, unseen=unseen) for alpha in alphas]

    def search(
        self, alphas: Sequence[Number], loss_bound: Number | None = None, *, unseen: int = 1
    ) -> list[int | None]:
        """Return the index of the first breakpoint that keeps each budget; None if none does. See `limits`."""
        limits = self.limits(alphas, loss_bound, unseen=unseen)
        return [None if j >= len(self.peaks) else j for j in first_within(self.peaks, limits)]

    def thresholds(self, limits: Sequence[int]) -> list[RiskThreshold | None]:
        """Return the smallest threshold at which the total is within each limit, in ticks; None if none is."""
        if self.signed or self.grid is not None:
            return [None if j >= len(self.peaks) else self._threshold(j) for j in first_within(self.peaks, limits)]
        steps = crossings_here(self.falls.total, self.falls.gap, self.falls.drop, limits)
        return [None if one is None else self._spent(one, limit) for one, limit in zip(steps, limits, strict=True)]

    def _threshold(self, index: int) -> RiskThreshold:
        u = None if self.boundary_u is None else float(self.boundary_u[index])
        return RiskThreshold(float(self.breakpoints[index]), u, self.exact_total(index))

    def _spent(self, one: Crossing, limit: int) -> RiskThreshold:
        """Return the threshold at a gap; with draws, those of the rows whose loss falls there say how far to go."""
        u, total = None, one.after
        if self.draw is not None and one.gap == 0:
            u = 0.0
        elif self.draw is not None:
            there = np.flatnonzero(self.falls.gap == one.gap)
            u, total = last_draw(self.draw(self.falls.row[there]), self.falls.drop[there], one.before, limit)
        return RiskThreshold(one.gap, u, Fraction(total, 10**self.tick_digits))

    def relaxation(self, alpha: Number | Sequence[Number] | Floats, loss_bound: Number | None = None) -> Floats:
        """Return the smallest relaxation that keeps the budget; NaN if none does.

        Args:
            alpha: one risk budget (the result is then one number) or many.
            loss_bound: the largest possible loss; may be left out if the scores lie in [0, 1].
        """
        if isinstance(alpha, np.ndarray):
            alpha = list(alpha) if alpha.ndim else alpha[()]
        several = isinstance(alpha, Sequence) and not isinstance(alpha, str)
        alphas: list[Number] = list(alpha) if several else [alpha]  # pyright: ignore[reportArgumentType, reportUnknownVariableType, reportAssignmentType]
        thresholds = self.thresholds(self.limits(alphas, loss_bound))
        relaxations = [np.nan if one is None else one.relaxation for one in thresholds]
        return np.array(relaxations) if several else np.float64(relaxations[0])  # pyright: ignore[reportReturnType]

    def exact_total(self, index: int) -> Fraction:
        """Return the total loss from a breakpoint on, as a rational number."""
        return Fraction(int(self.totals[index]), 10**self.tick_digits)

    def total(self, relaxation: float | Floats) -> Floats:
        """Return the total loss at one relaxation or many (all actions at the gap itself included)."""
        where = np.searchsorted(self.breakpoints, relaxation, side="right") - 1
        if np.any(where < 0):
            raise OptionError(f"a relaxation is 0 or more; got {relaxation!r}")
        return self.totals[where] / 10.0**self.tick_digits

    def mean(self, relaxation: float | Floats) -> Floats:
        """Return the empirical risk, total / n."""
        return self.total(relaxation) / self.n


def grid_points(step: Number) -> Floats:
    """Return the decimals 0, step, 2 step, ..., up to 1."""
    size = as_fraction(step, name="grid")
    if not Fraction(1, 10**6) <= size <= 1:
        raise OptionError(f"grid must be a step from 0.000001 to 1; got {step!r}")
    return np.array([float(i * size) for i in range(int(1 / size) + 1)])


def check_bound(
    loss_bound: Number | None, largest_loss: tuple[Fraction, int], *, tick: Fraction, unit_scores: bool, source: str
) -> Fraction:
    """Return the loss bound as the user wrote it.

    It must not lie below the largest loss by a tick or more (losses are rounded to ticks). It may be left out, and is
    then 1, only if all Guardian scores lie in [0, 1].
    """
    if loss_bound is None and not unit_scores:
        raise OptionError(
            f"{source}: Guardian scores leave [0, 1], so the largest possible loss is not 1; "
            "state it from what the scores mean: loss_bound= (--loss-bound)"
        )
    bound = check_size(as_fraction(1 if loss_bound is None else loss_bound, name="loss_bound"))
    if bound < SMALLEST_BOUND:
        raise OptionError(
            f"loss_bound must be {float(SMALLEST_BOUND):g} or more, since losses are rounded to 1e-12; got {loss_bound!r}; "
            "multiply scores, bound and alpha by one power of ten: the rule stays the same"
        )
    largest, row = largest_loss
    if largest >= bound + tick:
        raise ScoreLogError(
            f"{source}: row {row + 1}: the loss is {float(largest):.12g}, above the bound {float(bound):.12g}; "
            "give the bound that the scores' meaning implies: loss_bound= (--loss-bound)"
        )
    return bound


def check_full_sight(
    full_sight_loss: Number, in_full_sight: tuple[Fraction, int], *, tick: Fraction, source: str
) -> Fraction:
    """Return the declared loss with every action in sight; refuse a log in which a row exceeds it by a tick or more."""
    declared = as_fraction(full_sight_loss, name="full_sight_loss")
    largest, row = in_full_sight
    if largest >= declared + tick:
        raise ScoreLogError(
            f"{source}: row {row + 1}: the loss is {float(largest):.12g} with every action in sight, above the declared "
            f"{float(declared):.12g}; declare the largest it can be, from what the loss means: full_sight_loss="
        )
    return declared


def check_alpha(alpha: Number, bound: Fraction) -> Fraction:
    """Return a risk budget as the user wrote it: above 0 and below the bound."""
    value = as_fraction(alpha, name="alpha")
    if not 0 < value < bound:
        raise OptionError(f"alpha must lie above 0 and below the loss bound {float(bound):g}; got {alpha!r}")
    return value


def spendable(alpha: Number, bound: Fraction, n: int, tick_digits: int, *, unseen: int = 1) -> int:
    """Return the largest total loss, in ticks, that n rows may show: floor((alpha (n + m) - m B) / tick), m unseen."""
    limit = (check_alpha(alpha, bound) * (n + unseen) - unseen * bound) * 10**tick_digits // 1
    return int(max(min(limit, _LARGEST_INT), -1))


def first_within(totals: Integers, limits: Sequence[int]) -> Indices:
    """Return the first index at which falling totals (or their peaks) are within each limit; their number if none is."""
    return len(totals) - np.searchsorted(totals[::-1], np.array(limits, dtype=np.int64), side="right")


def last_draw(u: Floats, drop: Integers, before: int, limit: int) -> tuple[float, int]:
    """Return the smallest draw up to which rows must be deferred at the threshold gap, and the total then.

    Args:
        u: the draws of the rows whose loss falls at that gap.
        drop: by how much.
        before: the total before any of them falls.
        limit: the largest total allowed, which is reached once all of them have fallen.
    """
    order = np.argsort(u)
    draws = u[order]
    after: Integers = before - np.cumsum(drop[order])
    j = int(np.searchsorted(-after, -limit))
    j = int(np.count_nonzero(draws <= draws[j])) - 1  # rows that share a draw are deferred together
    return float(draws[j]), int(after[j])


def _accumulate(falls: Falls, u: Floats | None, *, signed: bool) -> _Curve:
    """Return the whole curve; its first breakpoint is relaxation 0.

    Rows that share gap and draw are walked with their losses before their gains, the order that breaks a budget first.
    """
    order, draw = gap_order(falls.gap, u)
    if signed and u is not None:
        order = np.lexsort((falls.drop, u, falls.gap))
    gap, totals = np.zeros(len(order) + 1), np.empty(len(order) + 1, dtype=np.int64)
    falls.gap.take(order, out=gap[1:], mode="clip")  # unlike the default mode, "clip" writes without a buffer
    falls.drop.take(order, out=totals[1:], mode="clip")
    np.negative(totals, out=totals)
    totals[0] = falls.total
    np.cumsum(totals, out=totals)
    draws = None if draw is None else np.concatenate([[0.0], draw])
    last = np.ones(len(gap), dtype=np.bool_)
    np.not_equal(gap[1:], gap[:-1], out=last[:-1])
    if draws is not None:
        last[:-1] |= draws[1:] != draws[:-1]
    peaks = np.maximum.accumulate(totals[::-1])[::-1] if signed else totals
    if last.all():
        return _Curve(gap, draws, totals, peaks)
    return _Curve(gap[last], None if draws is None else draws[last], totals[last], peaks[last])


def gap_order(gap: Floats, u: Floats | None) -> tuple[Indices, Floats | None]:
    """Return the order in which actions become candidates, by gap and then by draw, and the draws in that order.

    At gap 0 actions are candidates whatever the draw, so all draws there count as 0.
    """
    if u is None:
        return np.argsort(gap), None
    draw = np.where(gap > 0, u, 0.0)
    order = np.lexsort((draw, gap))
    return order, draw[order]
