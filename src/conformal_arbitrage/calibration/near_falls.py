"""Near falls: those that the first pass over a log in parts keeps, because the thresholds are likely to lie among them.

The thresholds of a few rows here and there say about where those of the log will be; the parts of a table of Spark, of which
no rows can be had without reading all, guess by themselves. If they are there, no second pass is needed; if not, there is
one: a wrong guess costs time, and changes nothing.

Knows nothing of engines, nor of how a part is read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Final

import numpy as np

from conformal_arbitrage.core.arrays import Floats, Integers
from conformal_arbitrage.core.falls import Falls
from conformal_arbitrage.core.search import Bracket, Buckets, Collect, Crossing, Scanned, crossings_here
from conformal_arbitrage.scorelog.parts import ScorePart

FEW_ROWS: Final = 1 << 16
"""All falls of a log of so many rows are kept."""
_SAMPLES: Final = 8
_LEAST, _MOST = 1 << 10, 1 << 16
_ROWS_PER_SAMPLED: Final = 64
_KEPT: Final = 1 << 22
"""At most about so many falls are kept."""


@dataclass(frozen=True, slots=True)
class SampledFalls:
    """Rows of a sample, and their falls."""

    rows: int
    falls: Falls

    def crossing(self, loss: float) -> Crossing | None:
        """Return where the mean loss of these rows comes within a limit."""
        limit = int(loss * self.rows * 10**self.falls.tick_digits)
        return crossings_here(self.falls.total, self.falls.gap, self.falls.drop, [limit])[0]


def sampled_parts(parts: Sequence[ScorePart]) -> list[ScorePart]:
    """Return a few rows of some parts, evenly spread over the log."""
    rows = sum(part.stop - part.start for part in parts)
    each = min(max(rows // (_ROWS_PER_SAMPLED * _SAMPLES), _LEAST), _MOST)
    chosen = [parts[len(parts) * k // _SAMPLES] for k in range(_SAMPLES)]
    return [_shortened(part, chosen[:k].count(part), each) for k, part in enumerate(chosen)]


def _shortened(part: ScorePart, before: int, rows: int) -> ScorePart:
    """Return so many rows of a part, after those that were taken before."""
    start = min(part.start + before * rows, part.stop - 1)
    return replace(part, start=start, stop=min(start + rows, part.stop))


def likely_ranges(samples: Sequence[SampledFalls], losses: Iterable[float], rows: int) -> tuple[Bracket, ...]:
    """Return ranges of gaps in which the thresholds of a log are likely to lie.

    Args:
        samples: rows of the log.
        losses: limits on the mean loss, one for each threshold.
        rows: of the log.
    """
    ranges = tuple(one for loss in losses if (one := _range(samples, loss)) is not None)
    inside = sum(len(Collect(ranges)(one.falls.gap, one.falls.drop)[0]) for one in samples)
    kept = inside * rows / max(sum(one.rows for one in samples), 1)
    return ranges if kept <= _KEPT else ()


def _range(samples: Sequence[SampledFalls], loss: float) -> Bracket | None:
    """Return twice the range of the samples' own thresholds; None if not all have one above 0.

    The log's is near their mean: outside their range once in 128 logs, outside twice the range hardly ever.
    """
    crossings = [one.crossing(loss) for one in samples]
    gaps = [one.gap for one in crossings if one is not None]
    if len(gaps) < len(crossings) or max(gaps, default=0.0) == 0:
        return None
    low, high = min(gaps), max(gaps)
    return Bracket(max(low - (high - low) / 2, 0.0), high + (high - low) / 2, 2)


EVERYTHING: Final = (Bracket(0.0, inf, 2),)


@dataclass(frozen=True, slots=True)
class OwnRanges:
    """The ranges in which the rows of a part expect the thresholds of the log, by themselves.

    Attributes:
        losses: limits on the mean loss, one for each threshold.
        rows: of the log.
    """

    losses: tuple[float, ...]
    rows: int

    def __call__(self, rows: int, falls: Falls, buckets: Buckets) -> tuple[Bracket, ...]:
        """Return the ranges, given the rows of the part, its falls and their buckets; none if too many falls lie there."""
        limits = [loss * rows * 10**falls.tick_digits for loss in self.losses]
        places = [_places(limit, falls, buckets) for limit in limits if 0 <= limit < falls.total and len(buckets.drop)]
        kept = sum(int(buckets.falls[first : last + 1].sum()) for first, last in places)
        if kept * self.rows > _KEPT * rows:
            return ()
        return tuple(Bracket(float(buckets.smallest[a]), float(buckets.largest[b]), 2) for a, b in places)


def _places(limit: float, falls: Falls, buckets: Buckets) -> tuple[int, int]:
    """Return the first and the last bucket in which the total of some rows may be when that of the log is at its limit.

    The sum of losses has a variance of at most the largest loss times its mean; eight standard deviations are allowed for.
    """
    after = falls.total - np.cumsum(buckets.drop)
    slack = 8 * sqrt(falls.largest[0] * max(limit, falls.largest[0]))
    first, last = np.searchsorted(-after, [-limit - slack, -limit + slack]).tolist()
    return min(first, len(after) - 1), min(last, len(after) - 1)


class NearFalls:
    """The falls that were kept, of every part.

    Attributes:
        ranges: of their gaps, or what finds them for each part.
    """

    def __init__(self, ranges: tuple[Bracket, ...] | OwnRanges) -> None:
        """Keep nothing yet."""
        self.ranges = ranges
        self._kept: list[Scanned] = []
        self._known: list[tuple[Bracket, ...]] = [] if isinstance(ranges, OwnRanges) else [ranges]

    def add(self, gap: Floats, drop: Integers, ranges: tuple[Bracket, ...] = ()) -> None:
        """Keep the falls of a part, and the ranges of their gaps if it found them itself."""
        self._kept.append((gap, drop))
        if isinstance(self.ranges, OwnRanges):
            self._known.append(ranges)

    def answer(self, work: object) -> Scanned | None:
        """Return what a work that collects falls makes of those of all parts; None if it needs others as well."""
        if not isinstance(work, Collect) or not all(map(self._holds, work.brackets)):
            return None
        gap, drop = (np.concatenate(column) for column in zip(*self._kept, strict=True))
        return work(gap, drop)

    def _holds(self, bracket: Bracket) -> bool:
        """Return whether all falls of a range were kept, of every part."""
        return all(any(one.low <= bracket.low and bracket.high <= one.high for one in own) for own in self._known)
