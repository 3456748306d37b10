"""The walk along the events: the exact risk at every relaxation, and the first one within a limit."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Final, Protocol, TypeVar

import numpy as np

from conformal_arbitrage.core.exact import Bools, Draw, Floats, Indices, Integers, ScoreArrays
from conformal_arbitrage.core.losses import (
    Events,
    GuardianSees,
    Loss,
    LossMeasure,
    Number,
    as_fraction,
    check_size,
    in_unit,
    within_unit,
)
from conformal_arbitrage.errors import OptionError, ScoreLogError

SMALLEST_BOUND = Fraction(1, 10**6)
"""A smaller loss bound is refused: too little would be left of losses rounded to 10^-12."""
_LARGEST_INT = 2**63 - 1


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
class Crossing:
    """Where a falling total comes within a limit.

    Attributes:
        gap: the first gap at which it does.
        before: the total just below that gap.
        after: the total from that gap on.
        events: how many events there are at that gap, or more.
    """

    gap: float
    before: int
    after: int
    events: int


FindDraw = Callable[[Crossing, int], tuple[float, int]]
"""Given a crossing and its limit, finds the draw up to which rows are deferred there, and the total then."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Events in order, and the total loss at each breakpoint.

    A threshold is where a walk from "every query is deferred" towards 0 stops: before the first row that breaks the budget,
    even if later rows would repair it.

    Attributes:
        breakpoints: positions at which the total changes, ascending; the first is where no event has happened.
        draws: for boundary="random", the draw that goes with each; else None.
        totals: the total from each breakpoint on, in ticks.
        peaks: the largest total at this or any larger breakpoint; equal to `totals` unless losses are negative.
        order: the numbers of the events, in the order of the walk.
        taken: how many events have happened at each breakpoint.
    """

    breakpoints: Floats
    draws: Floats | None
    totals: Integers
    peaks: Integers
    order: Indices
    taken: Indices

    def stops(self, limits: Sequence[int]) -> list[int | None]:
        """Return the first breakpoint from which on the total stays within each limit; None if there is none."""
        return [None if j >= len(self.peaks) else j for j in first_within(self.peaks, limits).tolist()]

    def on(self, grid: Floats) -> "Walk":
        """Return the walk with some positions as its only breakpoints; without draws."""
        at = np.searchsorted(self.breakpoints, grid, side="right") - 1
        return Walk(grid, None, self.totals[at], self.totals[at], self.order, self.taken[at])


def walk_along(events: Events, draws: Floats | None, *, signed: bool, origin: float = 0.0) -> Walk:
    """Put events in order.

    Rows that share position and draw are walked with their losses before their gains, the order that breaks a budget first.

    Args:
        events: the events.
        draws: one for each event; None without.
        signed: whether losses can be negative.
        origin: the position where none has happened.
    """
    order = position_order(events.position, draws)
    if signed and draws is not None:
        order = np.lexsort((events.drop, draws, events.position))
    position, totals = np.empty(len(order) + 1), np.empty(len(order) + 1, dtype=np.int64)
    events.position.take(
        order, out=position[1:], mode="clip"
    )  # unlike the default mode, "clip" writes without a buffer
    events.drop.take(order, out=totals[1:], mode="clip")
    position[0] = origin
    np.negative(totals, out=totals)
    totals[0] = events.total
    np.cumsum(totals, out=totals)
    draw = None if draws is None else np.concatenate([[0.0], draws[order]])
    last = np.ones(len(position), dtype=np.bool_)
    np.not_equal(position[1:], position[:-1], out=last[:-1])
    if draw is not None:
        last[:-1] |= draw[1:] != draw[:-1]
    peaks = np.maximum.accumulate(totals[::-1])[::-1] if signed else totals
    taken = np.flatnonzero(last)
    if len(taken) == len(position):
        return Walk(position, draw, totals, peaks, order, taken)
    return Walk(position[taken], None if draw is None else draw[taken], totals[taken], peaks[taken], order, taken)


def position_order(position: Floats, draws: Floats | None) -> Indices:
    """Return the order of a walk: by position, then by draw."""
    return np.argsort(position) if draws is None else np.lexsort((draws, position))


@dataclass(frozen=True, eq=False)
class RiskCurve:
    """The total loss of n rows as an exact step function of the relaxation.

    `thresholds` and `relaxation` search without sorting; `breakpoints`, `totals` and what follows from them are sorted on
    first use.

    Attributes:
        source: where the log came from, for messages.
        events: where the loss of each row changes.
        draw: gives the draws of rows, for boundary="random"; else None.
        signed: whether losses can be negative.
        unit_scores: whether all Guardian scores lie in [0, 1], so that a bound of 1 needs no statement.
        grid: the only relaxations allowed; None for all.
    """

    source: str
    events: Events
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
            guardian_sees, loss, grades, missing_loss, full_sight_loss: see `LossMeasure`; `grades` need draws.
            u: one draw per row for boundary="random", or what gives the draws of the rows that are asked for.
        """
        measure = LossMeasure(
            guardian_sees=guardian_sees,
            loss=loss,
            grades=grades,
            missing_loss=missing_loss,
            full_sight_loss=full_sight_loss,
        )
        return cls.from_events(log, measure.events(log), grades=grades, u=u)

    @classmethod
    def from_events(
        cls, log: ScoreArrays, events: Events, *, grades: Floats | None = None, u: Floats | Draw | None = None
    ) -> "RiskCurve":
        """Build the curve of a log whose events are known; see `from_log`."""
        unit = (
            in_unit(events.scores)
            if events.scores is not None
            else within_unit(log.loss_scores if grades is None else grades)
        )
        return cls(
            source=log.source,
            events=events,
            draw=u.take if isinstance(u, np.ndarray) else u,
            signed=grades is not None,
            unit_scores=unit,
        )

    @property
    def n(self) -> int:
        """Rows."""
        return self.events.n

    @property
    def tick_digits(self) -> int:
        """One tick is 10^-tick_digits."""
        return self.events.tick_digits

    @property
    def envelope_excess(self) -> float:
        """Mean over rows of how far a user's loss was raised to make it monotone."""
        return self.events.envelope_excess

    @property
    def largest_loss(self) -> tuple[Fraction, int]:
        """The largest loss of any row, and that row's index."""
        return self._loss(self.events.largest)

    @property
    def in_full_sight(self) -> tuple[Fraction, int]:
        """The largest loss of any row with every action in sight, and that row's index."""
        return self._loss(self.events.in_full_sight)

    def _loss(self, ticks: tuple[int, int]) -> tuple[Fraction, int]:
        return Fraction(ticks[0], 10**self.tick_digits), ticks[1]

    @property
    def breakpoints(self) -> Floats:
        """Relaxations at which the total changes, ascending; the first is 0."""
        return self.walk.breakpoints

    @property
    def boundary_u(self) -> Floats | None:
        """For boundary="random", the draw that goes with each breakpoint; else None."""
        return self.walk.draws

    @property
    def totals(self) -> Integers:
        """The total loss from each breakpoint on, in ticks."""
        return self.walk.totals

    @cached_property
    def walk(self) -> Walk:
        """The walk along all events, or along a grid."""
        draws = None if self.draw is None else self.draw(self.events.row)
        walk = walk_along(self.events, draws, signed=self.signed)
        return walk if self.grid is None else walk.on(self.grid)

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
        return self.walk.stops(self.limits(alphas, loss_bound, unseen=unseen))

    def thresholds(self, limits: Sequence[int]) -> list[RiskThreshold | None]:
        """Return the smallest threshold at which the total is within each limit, in ticks; None if none is."""
        if self.signed:
            return [None if stop is None else self._threshold(stop) for stop in self.walk.stops(limits)]
        return find_thresholds(self, limits)

    def _threshold(self, index: int) -> RiskThreshold:
        u = None if self.boundary_u is None else float(self.boundary_u[index])
        return RiskThreshold(float(self.breakpoints[index]), u, self.exact_total(index))

    def crossings(self, limits: Sequence[int]) -> list[Crossing | None]:
        """Return where the total first is within each limit."""
        return crossings_here(self.events.total, self.events.position, self.events.drop, limits)

    @property
    def find_draw(self) -> FindDraw | None:
        """See `EventSearch`."""
        return None if self.draw is None else partial(self._find_draw, self.draw)

    def _find_draw(self, draw: Draw, crossing: Crossing, limit: int) -> tuple[float, int]:
        there = np.flatnonzero(self.events.position == crossing.gap)
        return last_draw(draw(self.events.row[there]), self.events.drop[there], crossing.before, limit)

    def fallen(self, low: float, high: float) -> int:
        """Return by how much the total falls above one gap and up to another."""
        return int(self.events.drop[(self.events.position > low) & (self.events.position <= high)].sum())

    def row_losses(self, relaxation: float, boundary_u: float | None = None) -> Integers:
        """Return the loss of every row at a relaxation, in ticks."""
        return self.events.row_losses(relaxation, boundary_u, self.draw)

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
        relaxations = [np.nan if threshold is None else threshold.relaxation for threshold in thresholds]
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


class EventSearch(Protocol):
    """Events whose total only falls, wherever they are: in memory, in files, on other machines."""

    @property
    def tick_digits(self) -> int:
        """One tick is 10^-tick_digits."""
        ...

    @property
    def grid(self) -> Floats | None:
        """The only relaxations allowed; None for all."""
        ...

    @property
    def find_draw(self) -> FindDraw | None:
        """Finds the draw at a crossing; None unless the boundary is random."""
        ...

    def crossings(self, limits: Sequence[int]) -> list[Crossing | None]:
        """Return where the total first is within each limit; None if it never is."""
        ...

    def fallen(self, low: float, high: float) -> int:
        """Return by how much the total falls above one gap and up to another."""
        ...


def find_thresholds(search: EventSearch, limits: Sequence[int]) -> list[RiskThreshold | None]:
    """Return the smallest threshold at which a falling total is within each limit, in ticks; None if none is."""
    crossed = zip(search.crossings(limits), limits, strict=True)
    return [None if crossing is None else _threshold_at(search, crossing, limit) for crossing, limit in crossed]


def _threshold_at(search: EventSearch, crossing: Crossing, limit: int) -> RiskThreshold | None:
    gap, u, total = crossing.gap, None, crossing.after
    if search.grid is not None:
        index = int(np.searchsorted(search.grid, gap))
        if index == len(search.grid):
            return None
        point = float(search.grid[index])
        if point > gap:
            total -= search.fallen(gap, point)
        gap = point
    elif search.find_draw is not None:
        u, total = (0.0, total) if gap == 0 else search.find_draw(crossing, limit)
    return RiskThreshold(gap, u, Fraction(total, 10**search.tick_digits))


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


# --- The search without a sort ---


_FIRST_BUCKETS: Final = 1 << 16
_LATER_BUCKETS: Final = 1 << 18
_COLLECTED: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Bracket:
    """A range of gaps, both ends included, cut into buckets.

    Attributes:
        low: the smallest gap.
        high: the largest gap.
        buckets: how many, a power of two.
        even: whether buckets have the same width, and gaps beyond the range belong to the last of them; otherwise they
            have the same number of floats.
    """

    low: float
    high: float
    buckets: int
    even: bool = False

    def inside(self, gap: Floats) -> Bools:
        """Return which gaps lie in the range."""
        return (gap >= self.low) & (gap <= self.high)

    def places(self, gap: Floats) -> Indices:
        """Return the bucket of each gap of the range; never decreasing with the gap."""
        if self.even:
            return np.minimum(gap / self.high * (self.buckets - 1), self.buckets - 1).astype(np.int64)
        first, last = np.array([self.low, self.high]).view(np.int64).tolist()
        bits = max(0, (last - first).bit_length() - (self.buckets.bit_length() - 1))
        return (gap.view(np.int64) - first) >> bits


@dataclass(frozen=True, slots=True)
class Buckets:
    """What falls into the buckets of a bracket; only buckets with events are listed.

    Attributes:
        place: the bucket's number, ascending.
        drop: the sum of its events.
        smallest: the smallest gap in it.
        largest: the largest gap in it.
        events: how many.
    """

    place: Indices
    drop: Integers
    smallest: Floats
    largest: Floats
    events: Integers


Scanned = tuple[Floats, Integers]
"""Gaps, and the events there."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Fold:
    """What a scan does with the events of a part: put them into the buckets of brackets."""

    brackets: tuple[Bracket, ...]

    def __call__(self, gap: Floats, drop: Integers) -> tuple[Buckets, ...]:
        """Return the buckets of each bracket."""
        return tuple(_folded(one, gap, drop) for one in self.brackets)


@dataclass(frozen=True, slots=True)
class Collect:
    """What the last scan does with the events of a part: add up those of equal gap, within some brackets."""

    brackets: tuple[Bracket, ...]

    def __call__(self, gap: Floats, drop: Integers) -> Scanned:
        """Return the distinct gaps in the brackets, ascending, and the sum of the events at each."""
        wanted = np.zeros(len(gap), np.bool_)
        for one in self.brackets:
            wanted |= one.inside(gap)
        return _by_gap(gap[wanted], drop[wanted])


class Scan(Protocol):
    """Goes through the events of every part."""

    def __call__(self, work: Callable[[Floats, Integers], _Result], /) -> Iterable[_Result]:
        """Do a work on the events of every part, and yield the results in any order."""
        ...


def crossings(
    scan: Scan,
    total: int,
    limits: Sequence[int],
    span: float,
    *,
    first: int = _FIRST_BUCKETS,
    later: int = _LATER_BUCKETS,
    collected: int = _COLLECTED,
) -> list[Crossing | None]:
    """Return where a falling total first is within each limit; None if it never is.

    Args:
        scan: does a work on the events of every part.
        total: before any event.
        limits: on the total.
        span: about the largest gap; what is beyond it is found too.
        first: the number of buckets of the first scan.
        later: the number of all buckets of a later one.
        collected: how many events may be collected.
    """
    tasks: list[_Task] = [_Task(limit, total) for limit in limits]
    for task in tasks:
        if total <= task.limit:
            task.settle(Crossing(0.0, total, total, 0))
    brackets: tuple[Bracket, ...] = (Bracket(0.0, span if span > 0 else 1.0, first, even=True),)
    waiting: list[_Task] = [task for task in tasks if not task.settled]
    for task in waiting:
        task.bracket = brackets[0]
    while waiting:
        merged = _merged(brackets, scan(Fold(brackets)))
        for task in waiting:
            task.narrow(merged[brackets.index(task.bracket)])
        waiting = [task for task in waiting if not task.settled]
        ranges: dict[tuple[float, float], None] = dict.fromkeys((task.low, task.high) for task in waiting)
        if sum({(task.low, task.high): task.events for task in waiting}.values()) <= collected:
            break
        each = 1 << (max(later // len(ranges), 2).bit_length() - 1)
        brackets = tuple(Bracket(low, high, each) for low, high in ranges)
        for task in waiting:
            task.bracket = Bracket(task.low, task.high, each)
    if waiting:
        ends = tuple(Bracket(low, high, 2) for low, high in dict.fromkeys((task.low, task.high) for task in waiting))
        gap, drop = _all_by_gap(scan(Collect(ends)))
        for task in waiting:
            task.finish(gap, drop)
    return [task.answer for task in tasks]


class _Task:
    """The search for one limit, from scan to scan."""

    def __init__(self, limit: int, total: int) -> None:
        self.limit, self.base = limit, total
        self.bracket = Bracket(0.0, 1.0, 2)
        self.low = self.high = 0.0
        self.events = 0
        self.settled = False
        self.answer: Crossing | None = None

    def settle(self, answer: Crossing | None) -> None:
        self.settled, self.answer = True, answer

    def narrow(self, buckets: Buckets) -> None:
        """Take the first bucket within the limit as the next range, or as the answer if it holds a single gap."""
        after = self.base - np.cumsum(buckets.drop)
        j = int(np.searchsorted(-after, -self.limit))
        if j == len(after):
            self.settle(None)
            return
        before = int(after[j] + buckets.drop[j])
        self.low, self.high = float(buckets.smallest[j]), float(buckets.largest[j])
        self.base, self.events = before, int(buckets.events[j])
        if self.low == self.high:
            self.settle(Crossing(self.low, before, int(after[j]), self.events))

    def finish(self, gap: Floats, drop: Integers) -> None:
        """Find the answer among all distinct gaps of the range."""
        start, stop = int(np.searchsorted(gap, self.low)), int(np.searchsorted(gap, self.high, side="right"))
        after = self.base - np.cumsum(drop[start:stop])
        j = int(np.searchsorted(-after, -self.limit))
        before = int(after[j] + drop[start + j])
        self.settle(Crossing(float(gap[start + j]), before, int(after[j]), self.events))


def _folded(bracket: Bracket, gap: Floats, drop: Integers) -> Buckets:
    if not bracket.even:
        inside = bracket.inside(gap)
        gap, drop = gap[inside], drop[inside]
    place = bracket.places(gap)
    counts = np.bincount(place, minlength=bracket.buckets)
    sums = bucket_sums(place, drop, bracket.buckets)
    smallest, largest = np.full(bracket.buckets, np.inf), np.full(bracket.buckets, -np.inf)
    np.minimum.at(smallest, place, gap)
    np.maximum.at(largest, place, gap)
    hit = np.flatnonzero(counts)
    return Buckets(hit, sums[hit], smallest[hit], largest[hit], counts[hit])


def bucket_sums(place: Indices, drop: Integers, buckets: int) -> Integers:
    """Return the sum of the events in each bucket, in integers: floats would not hold it."""
    sums = np.zeros(buckets, np.int64)
    np.add.at(sums, place, drop)
    return sums


def _merged(brackets: Sequence[Bracket], results: Iterable[tuple[Buckets, ...]]) -> list[Buckets]:
    """Add up the buckets of all parts, as they come."""
    sums = [BucketSums(one.buckets) for one in brackets]
    for result in results:
        for one, buckets in zip(sums, result, strict=True):
            one.add(buckets)
    return [one.buckets() for one in sums]


class BucketSums:
    """The running sums of a bracket's buckets over parts."""

    def __init__(self, size: int) -> None:
        """Begin with empty buckets."""
        self._drop, self._events = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._smallest, self._largest = np.full(size, np.inf), np.full(size, -np.inf)

    def add(self, part: Buckets) -> None:
        """Add the buckets of a part."""
        at = part.place
        self._drop[at] += part.drop
        self._events[at] += part.events
        self._smallest[at] = np.minimum(self._smallest[at], part.smallest)
        self._largest[at] = np.maximum(self._largest[at], part.largest)

    def buckets(self) -> Buckets:
        """Return the sums."""
        hit = np.flatnonzero(self._events)
        return Buckets(hit, self._drop[hit], self._smallest[hit], self._largest[hit], self._events[hit])


def _by_gap(gap: Floats, drop: Integers) -> Scanned:
    """Add up events at the same gap; the gaps ascend."""
    order = np.argsort(gap)
    gap, drop = gap[order], drop[order]
    if not len(gap):
        return gap, drop
    starts = np.flatnonzero(np.concatenate([[True], gap[1:] != gap[:-1]]))
    return gap[starts], np.add.reduceat(drop, starts)


def _all_by_gap(results: Iterable[Scanned]) -> Scanned:
    pairs = list(results)
    return _by_gap(np.concatenate([gap for gap, _ in pairs]), np.concatenate([drop for _, drop in pairs]))


def crossings_here(total: int, gap: Floats, drop: Integers, limits: Sequence[int]) -> list[Crossing | None]:
    """Return the same as `crossings` for events that are all here: only those in buckets that matter are sorted.

    Args:
        total: before any event.
        gap: where the total falls, unsorted.
        drop: by how much.
        limits: on the total.
    """
    if not len(gap) or all(total <= limit for limit in limits):
        return [Crossing(0.0, total, total, 0) if total <= limit else None for limit in limits]
    buckets = min(_FIRST_BUCKETS, 1 << len(gap).bit_length())
    bracket = Bracket(0.0, float(gap.max()), buckets, even=True)
    place = bracket.places(gap)
    after = total - np.cumsum(bucket_sums(place, drop, buckets))
    wanted = np.zeros(buckets + 1, np.bool_)
    wanted[np.searchsorted(-after, -np.array(limits, np.int64))] = True
    hit = np.flatnonzero(wanted[place])
    gaps, drops = _by_gap(gap[hit], drop[hit])
    there = bracket.places(gaps)
    fallen = np.cumsum(drops)
    starts = np.searchsorted(there, there)  # the first gap in the same bucket
    earlier = fallen[starts] - drops[starts]  # what fell in other buckets that were looked at
    ends = np.where(there > 0, after[there - 1], total) - (fallen - earlier)
    return [_crossing(total, limit, gaps, drops, ends) for limit in limits]


def _crossing(total: int, limit: int, gaps: Floats, drops: Integers, ends: Integers) -> Crossing | None:
    if total <= limit:
        return Crossing(0.0, total, total, 0)
    j = int(np.searchsorted(-ends, -limit))
    if j == len(ends):
        return None
    return Crossing(float(gaps[j]), int(ends[j] + drops[j]), int(ends[j]), len(gaps))
