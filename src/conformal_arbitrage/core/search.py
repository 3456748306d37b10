"""Search: the first gap at which a falling total is within a limit, without sorting, and over any number of parts.

The total after all falls up to a gap is a sum of integers, so it does not matter in which order, or where, they are
added. A scan sorts falls into buckets by a function that never decreases with the gap: the total after bucket j is that at
the largest gap in it, exactly, and rounding inside the function moves only the borders. The first bucket within the limit
holds the answer. The next scan splits the range from its smallest to its largest gap, in steps of equal size in the bits
of the float: each such scan resolves 12 bits or more of at most 63, so there are at most 8 scans, and three are usual.
Once few enough falls are left, they are collected and sorted.

Knows nothing of rows, draws or files, nor of losses that make a total rise.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np

from conformal_arbitrage.core.arrays import Bools, Floats, Indices, Integers

_FIRST_BUCKETS: Final = 1 << 16
_LATER_BUCKETS: Final = 1 << 18
_COLLECTED: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a falling total comes within a limit.

    Attributes:
        gap: the first gap at which it does.
        before: the total just below that gap.
        after: the total from that gap on.
        falls: how many falls there are at that gap, or more.
    """

    gap: float
    before: int
    after: int
    falls: int


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
    """What falls into the buckets of a bracket; only buckets with falls are listed.

    Attributes:
        place: the bucket's number, ascending.
        drop: the sum of its falls.
        smallest: the smallest gap in it.
        largest: the largest gap in it.
        falls: how many.
    """

    place: Indices
    drop: Integers
    smallest: Floats
    largest: Floats
    falls: Integers


Scanned = tuple[Floats, Integers]
"""Gaps, and the falls there."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Fold:
    """What a scan does with the falls of a part: put them into the buckets of brackets."""

    brackets: tuple[Bracket, ...]

    def __call__(self, gap: Floats, drop: Integers) -> tuple[Buckets, ...]:
        """Return the buckets of each bracket."""
        return tuple(_folded(one, gap, drop) for one in self.brackets)


@dataclass(frozen=True, slots=True)
class Collect:
    """What the last scan does with the falls of a part: add up those of equal gap, within some brackets."""

    brackets: tuple[Bracket, ...]

    def __call__(self, gap: Floats, drop: Integers) -> Scanned:
        """Return the distinct gaps in the brackets, ascending, and the sum of the falls at each."""
        wanted = np.zeros(len(gap), np.bool_)
        for one in self.brackets:
            wanted |= one.inside(gap)
        return _by_gap(gap[wanted], drop[wanted])


class Scan(Protocol):
    """Goes through the falls of every part."""

    def __call__(self, work: Callable[[Floats, Integers], _Result], /) -> Iterable[_Result]:
        """Do a work on the falls of every part, and yield the results in any order."""
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
        scan: does a work on the falls of every part.
        total: before any fall.
        limits: on the total.
        span: about the largest gap; what is beyond it is found too.
        first: the number of buckets of the first scan.
        later: the number of all buckets of a later one.
        collected: how many falls may be collected.
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
        if sum({(task.low, task.high): task.falls for task in waiting}.values()) <= collected:
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
        self.falls = 0
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
        self.base, self.falls = before, int(buckets.falls[j])
        if self.low == self.high:
            self.settle(Crossing(self.low, before, int(after[j]), self.falls))

    def finish(self, gap: Floats, drop: Integers) -> None:
        """Find the answer among all distinct gaps of the range."""
        start, stop = int(np.searchsorted(gap, self.low)), int(np.searchsorted(gap, self.high, side="right"))
        after = self.base - np.cumsum(drop[start:stop])
        j = int(np.searchsorted(-after, -self.limit))
        before = int(after[j] + drop[start + j])
        self.settle(Crossing(float(gap[start + j]), before, int(after[j]), self.falls))


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
    """Return the sum of the falls in each bucket, in integers: floats would not hold it."""
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
        self._drop, self._falls = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._smallest, self._largest = np.full(size, np.inf), np.full(size, -np.inf)

    def add(self, part: Buckets) -> None:
        """Add the buckets of a part."""
        at = part.place
        self._drop[at] += part.drop
        self._falls[at] += part.falls
        self._smallest[at] = np.minimum(self._smallest[at], part.smallest)
        self._largest[at] = np.maximum(self._largest[at], part.largest)

    def buckets(self) -> Buckets:
        """Return the sums."""
        hit = np.flatnonzero(self._falls)
        return Buckets(hit, self._drop[hit], self._smallest[hit], self._largest[hit], self._falls[hit])


def _by_gap(gap: Floats, drop: Integers) -> Scanned:
    """Add up falls at the same gap; the gaps ascend."""
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
    """Return the same as `crossings` for falls that are all here: only those in buckets that matter are sorted.

    Args:
        total: before any fall.
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
