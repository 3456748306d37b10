"""Exact scores: ticks, gaps and choices, of a row or of rows in blocks. The one place where Primary scores are compared."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.errors import ScoreLogError

# --- Names for the arrays of this package, and helpers that look at one array only ---


Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Indices = NDArray[np.intp]
Bools = NDArray[np.bool_]

Draw = Callable[[Indices], Floats]
"""Gives the draws of some rows, by their numbers."""

Scalar = TypeVar("Scalar", bound=np.generic)

_NUMERIC = (int, float, np.integer, np.floating, type(None))


def numbers_or_none(values: object) -> NDArray[Any] | None:
    """Return numbers as an array, with None as NaN; None if anything else is among them."""
    try:
        raw: NDArray[Any] = np.asarray(values)
        if raw.dtype.kind in "iuf":
            return raw
        return raw.astype(np.float64) if raw.dtype.kind == "O" and _all_numeric(raw) else None
    except (TypeError, ValueError, OverflowError):
        return None


def _all_numeric(raw: NDArray[Any]) -> bool:
    return all(isinstance(value, _NUMERIC) and not isinstance(value, bool) for value in raw.ravel().tolist())


def flat_positions(starts: Integers, sizes: Integers) -> Integers:
    """Return the positions in a flat array of rows that start at `starts`, one row after the other."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)


def in_order(values: NDArray[Scalar], order: Integers) -> NDArray[Scalar]:
    """Return a block's values (actions x rows) with each row's actions in the given order."""
    rows = int(order.shape[1])
    return values.take(order * rows + np.arange(rows))


# --- Score gaps ---


LARGEST_SCORE: Final = 1e300
"""Larger scores are refused: their differences could overflow."""

_LARGEST_SINGLE: Final = float(np.finfo(np.float32).max)
_LAST_EXACT_POWER: Final = 22  # 10^22 is the largest power of ten that a float64 holds exactly
_FEW_DECADES: Final = 4
_NEARLY_ALL: Final = 8  # an eighth of the rows may be left to a second round
_FEW_ROWS: Final = 1 << 11  # up to here another round costs more than decimals of their own
_NO_ROWS: Final = np.zeros(0, np.int64)
_NETWORKS: Final[dict[int, tuple[tuple[int, int], ...]]] = {
    1: (),
    2: ((0, 1),),
    3: ((0, 2), (0, 1), (1, 2)),
    4: ((0, 2), (1, 3), (0, 1), (2, 3), (1, 2)),
    5: ((0, 3), (1, 4), (0, 2), (1, 3), (0, 1), (2, 4), (1, 2), (3, 4), (2, 3)),
    6: ((0, 5), (1, 3), (2, 4), (1, 2), (3, 4), (0, 3), (2, 5), (0, 1), (2, 3), (4, 5), (1, 2), (3, 4)),
}
"""Comparators that sort rows of a few actions; on these sizes they are three times as fast as np.sort."""
LONGEST_NETWORK: Final = 6
_LONGEST_PLAIN: Final = 32  # up to here plain floats beat arrays, tenfold at four actions
_LOWEST_EXPONENT: Final = -16  # below it every row uses the last exact power anyway
_CEILINGS: Final = np.array([float(f"1e{e}") for e in range(_LOWEST_EXPONENT, 309)])
_POWERS: Final = np.array([float(f"1e{d}") for d in range(309)])
_PLAIN_CEILINGS: Final[list[float]] = _CEILINGS.tolist()
_PLAIN_POWERS: Final[list[float]] = _POWERS.tolist()


_SINGLE_TYPES: Final = frozenset({"float32", "float16", "bfloat16"})
SINGLE_DIGITS: Final = 6
"""Significant decimals of a score in single precision."""


def is_single(scores: Any) -> bool:
    """Return whether scores are visibly of single precision: an array or tensor of such a type, or a list of its numbers."""
    if type(scores) in (tuple, list):
        return any(type(score) is not float and _has_single_type(score) for score in scores)
    return _has_single_type(scores)


def _has_single_type(value: Any) -> bool:
    return str(getattr(value, "dtype", "")).rpartition(".")[2] in _SINGLE_TYPES


def digits_of(dtype: np.dtype[np.generic]) -> int:
    """Return how many significant decimals of a score count: 12, or 6 for single precision."""
    return SINGLE_DIGITS if dtype in (np.dtype(np.float32), np.dtype(np.float16)) else 12


def kept_decimals(largest: Floats, digits: int) -> Integers:
    """Return the decimals kept in each row: d = min(digits - e, 22), e the smallest integer with largest <= 10^e.

    One number if all rows agree, else one per row.

    Args:
        largest: the largest absolute score of each row.
        digits: 12, or 6 if the scores were single precision.
    """
    low, high = np.searchsorted(_CEILINGS, np.array([largest.min(), largest.max()])).tolist()
    if low == high:
        above_low = np.zeros(1, dtype=np.int64)
    elif high - low <= _FEW_DECADES:  # a few comparisons cost less than a search
        above_low = np.zeros(len(largest), dtype=np.int64)
        for ceiling in _PLAIN_CEILINGS[low:high]:
            above_low += largest > ceiling
    else:
        above_low = np.searchsorted(_CEILINGS[low:high], largest)
    return np.minimum(digits - (low + above_low + _LOWEST_EXPONENT), _LAST_EXACT_POWER)


def common_decimals(largest: Floats, digits: int) -> tuple[Integers, Indices]:
    """Return the decimals kept in nearly all rows, one number for them, and the rows of other decades.

    Where no decade has nearly all rows, or where there are few: the decimals of each, and no other rows.
    """
    if len(largest) <= _FEW_ROWS:
        return kept_decimals(largest, digits), _NO_ROWS
    high = float(largest.max())
    others = np.flatnonzero(largest <= _CEILINGS[max(int(np.searchsorted(_CEILINGS, high)) - 1, 0)])
    if len(others) * _NEARLY_ALL > len(largest):
        return kept_decimals(largest, digits), _NO_ROWS
    return kept_decimals(np.array([high]), digits), others


def shift(values: Floats, decimals: Integers) -> None:
    """Multiply in place by 10^decimals, using exact powers only."""
    if decimals.min() >= 0:
        values *= _POWERS[decimals]
    elif decimals.max() <= 0:
        values /= _POWERS[-decimals]
    else:
        values *= _POWERS[np.maximum(decimals, 0)]
        values /= _POWERS[np.maximum(-decimals, 0)]


def as_recorded(scores: Floats, digits: int) -> Floats:
    """Return scores as they are compared: with 6 digits first rounded to single precision, as those of the log were.

    A score computed in double precision then has the gap that it would have had in the log.
    """
    if digits != SINGLE_DIGITS:
        return scores
    single = np.clip(scores, -_LARGEST_SINGLE, _LARGEST_SINGLE).astype(np.float32)
    return np.where(np.abs(scores) <= _LARGEST_SINGLE, single.astype(np.float64), scores)


def tick_gaps(scores: Floats, *, digits: int) -> tuple[Floats, Integers]:
    """Return the gaps of a block as whole multiples of 10^-decimals, and the decimals.

    Args:
        scores: actions x rows, finite.
    """
    scores = as_recorded(scores, digits)
    top = scores.max(axis=0)
    decimals = kept_decimals(np.maximum(top, -scores.min(axis=0)), digits)
    ticks = top - scores
    shift(ticks, decimals)
    np.rint(ticks, out=ticks)
    return ticks, decimals


def gaps(scores: Floats, *, digits: int) -> Floats:
    """Return the gap of every action of a block of rows: rint((top - s) 10^d) / 10^d.

    Args:
        scores: actions x rows, finite.
    """
    ticks, decimals = tick_gaps(scores, digits=digits)
    ticks += 0.0  # -0.0 - 0.0 is -0.0; a gap of zero has no sign
    shift(ticks, -decimals)
    return ticks


def sorted_gaps(scores: Floats, *, digits: int) -> tuple[Floats, Integers]:
    """Return each row's gaps in ascending order, and the actions in that order (lowest index first among equals).

    Tick and action share one 64-bit key (a tick is below 2^41), so one plain sort orders both.
    """
    ticks, decimals = tick_gaps(scores, digits=digits)
    size = len(scores)
    bits = size.bit_length()
    keys = ticks.astype(np.int64)
    keys <<= bits
    keys |= np.arange(size)[:, None]
    order = np.empty_like(keys)
    for j, column in enumerate(sorted_columns(keys)):
        np.bitwise_and(column, (1 << bits) - 1, out=order[j])
        ticks[j] = column >> bits
    shift(ticks, -decimals)
    return ticks, order


def sorted_columns(keys: Integers) -> Sequence[Integers]:
    """Return the keys of each row (actions x rows) in ascending order; the block itself is used as scratch memory."""
    size = len(keys)
    if size > LONGEST_NETWORK:
        return np.ascontiguousarray(np.sort(np.ascontiguousarray(keys.T), axis=1).T)  # pyright: ignore[reportReturnType]
    columns, spare = list(keys), np.empty_like(keys[0])
    for lower, upper in _NETWORKS[size]:
        np.minimum(columns[lower], columns[upper], out=spare)
        np.maximum(columns[lower], columns[upper], out=columns[upper])
        columns[lower], spare = spare, columns[lower]
    return columns


def margins(ascending: Floats) -> Floats:
    """Return how far the top action leads: the second smallest gap, infinite if there is one action only."""
    if len(ascending) > 1:
        return ascending[1]
    alone = np.empty(ascending.shape[1], dtype=np.float64)
    alone.fill(np.inf)
    return alone


def is_candidate(
    gap: Floats, relaxation: float | Floats | None, *, u: Floats | float = 0.0, boundary_u: float | Floats | None = None
) -> Bools:
    """Return which actions are candidates at a relaxation.

    Args:
        relaxation: one for all rows or one for each; None, or infinity for a row, keeps every action (always_defer).
        u: the rows' draws, broadcast against `gap`; used with `boundary_u` only.
        boundary_u: with it, an action at gap > 0 is kept iff (gap, u) <= (relaxation, boundary_u) in
            lexicographic order; an action at gap 0 always is.
    """
    if relaxation is None:
        return np.ones(gap.shape, dtype=np.bool_)
    return _within(gap, relaxation, u, boundary_u)


def _within(gap: Any, relaxation: float | Floats, u: Any, boundary_u: float | Floats | None) -> Any:
    """Return `is_candidate` at a finite relaxation, of arrays or of single numbers."""
    if boundary_u is None:
        return gap <= relaxation
    return (gap < relaxation) | (gap == 0) | ((gap == relaxation) & (u <= boundary_u))


def row_gaps(scores: object, *, digits: int) -> list[float]:
    """Return the `gaps` of one query, to the bit; short lists of plain floats do without arrays.

    Args:
        scores: one number per action; checked as by `as_row`.
    """
    if digits == SINGLE_DIGITS or not _is_plain(scores):
        return gaps(as_row(scores), digits=digits)[:, 0].tolist()
    top = max(scores)
    exponent = bisect_left(_PLAIN_CEILINGS, max(top, -min(scores))) + _LOWEST_EXPONENT
    decimals = min(digits - exponent, _LAST_EXACT_POWER)
    if decimals >= 0:
        power = _PLAIN_POWERS[decimals]
        return [round((top - score) * power) / power for score in scores]
    power = _PLAIN_POWERS[-decimals]
    return [round((top - score) / power) * power for score in scores]


def _is_plain(scores: Any) -> TypeGuard[Sequence[float]]:
    """Return whether a row is short and holds floats that `as_row` accepts as they are."""
    return (
        type(scores) in (tuple, list)
        and 0 < len(scores) <= _LONGEST_PLAIN
        and all(type(score) is float and -LARGEST_SCORE <= score <= LARGEST_SCORE for score in scores)
    )


def row_candidates(
    gap: Sequence[float], relaxation: float | None, *, u: float = 0.0, boundary_u: float | None = None
) -> list[int]:
    """Return the candidates of one query; see `is_candidate`."""
    if relaxation is None:
        return list(range(len(gap)))
    return [action for action, value in enumerate(gap) if _within(value, relaxation, u, boundary_u)]


def row_margin(gap: Sequence[float]) -> float:
    """Return how far the top action of one query leads; see `margins`."""
    return sorted(gap)[1] if len(gap) > 1 else float("inf")


def row_sight(
    scores: object, relaxation: float | None, *, digits: int, u: float = 0.0, boundary_u: float | None = None
) -> tuple[list[int], float]:
    """Return the candidates of one query, and its margin.

    This is the whole rule for a single live row, equal to `gaps`, `is_candidate` and `margins` to the bit.

    Args:
        scores: one number per action; checked as by `as_row`.
        relaxation: None keeps every action (always_defer).
        u: the query's draw; used with `boundary_u` only.
        boundary_u: as in `is_candidate`.
    """
    gap = row_gaps(scores, digits=digits)
    return row_candidates(gap, relaxation, u=u, boundary_u=boundary_u), row_margin(gap)


def as_row(scores: object) -> Floats:
    """Return one query's scores as a checked block of one row; NaN or None anywhere means no opinion: all equal."""
    row = numbers_or_none(scores)
    if row is None or row.ndim != 1 or row.size == 0:
        raise ScoreLogError(f"Primary scores must be a flat list of numbers, one per action; got {scores!r:.80}")
    row = row.astype(np.float64)
    if np.isnan(row).any():
        return np.zeros((row.size, 1))
    if (np.abs(row) > LARGEST_SCORE).any():
        raise ScoreLogError(f"Primary scores must be finite, at most {LARGEST_SCORE:g} in size; got {scores!r}")
    return row[:, None]


# --- Choosing ---


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


# --- Rows in blocks ---
#
# Rows of one size form actions x rows blocks that fit the processor's cache, so no copy of all scores is ever made.

_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 13, 1 << 16


class ScoreArrays(Protocol):
    """The part of a score log that the mathematics needs. Actions of row i are offsets[i] to offsets[i+1]."""

    @property
    def primary(self) -> Floats:
        """Primary scores, flat and finite (a row without an opinion is all zeros)."""
        ...

    @property
    def guardian(self) -> Floats:
        """Guardian scores, flat; NaN throughout a row without an answer of the Guardian."""
        ...

    @property
    def loss_scores(self) -> Floats:
        """The scores that the Guardian regret is measured in: the Guardian's, or their binarised form."""
        ...

    @property
    def offsets(self) -> Integers:
        """Where each row starts; one more entry than rows."""
        ...

    @property
    def missing(self) -> Bools:
        """Rows without an answer of the Guardian."""
        ...

    @property
    def unknown_loss(self) -> Bools:
        """Rows whose loss is unknown: those without an answer, and binarised ones without a known right answer."""
        ...

    @property
    def score_digits(self) -> int:
        """Significant decimals of a Primary score: 12 or 6."""
        ...

    @property
    def source(self) -> str:
        """Where the scores came from, for messages."""
        ...

    def row(self, index: int, /) -> object:
        """Return one row as an object, for a user's own loss."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of one size, and where their scores lie in the flat arrays."""

    rows: slice | Indices
    flat: slice | Indices
    size: int

    def of(self, values: NDArray[Scalar]) -> NDArray[Scalar]:
        """Return these rows of a flat array, as actions x rows."""
        return np.ascontiguousarray(values[self.flat].reshape(-1, self.size).T)

    def per_row(self, values: NDArray[Scalar]) -> NDArray[Scalar]:
        """Return these rows of an array with one entry per row."""
        return values[self.rows]

    def all_rows(self) -> Indices:
        """Return the log's row numbers of this block."""
        return np.arange(int(self.rows.start), int(self.rows.stop)) if isinstance(self.rows, slice) else self.rows

    def row_numbers(self, positions: Indices) -> Indices:
        """Return the log's row numbers of some positions within this block."""
        return self.rows.start + positions if isinstance(self.rows, slice) else self.rows[positions]


def blocks(offsets: Integers, some: Bools | None = None) -> Iterator[Block]:
    """Yield every row once, in blocks of rows of one size; in file order if all sizes are equal.

    A block has a thirty-second of all scores, within limits: a large log takes few steps, and a small one touches little
    fresh memory, which costs more than computing in it.

    Args:
        some: which rows; by default all.
    """
    sizes = np.diff(offsets)
    scores = min(max(int(offsets[-1]) // 32, _SMALLEST_BLOCK), _LARGEST_BLOCK)
    if some is None and sizes.min() == sizes.max():
        yield from _even_blocks(len(sizes), int(sizes[0]), scores)
        return
    chosen = np.arange(len(sizes)) if some is None else np.flatnonzero(some)
    if not len(chosen):
        return
    by_size = chosen[np.argsort(sizes[chosen], kind="stable")]
    cuts = np.flatnonzero(np.diff(sizes[by_size])) + 1
    for rows in np.split(by_size, cuts):
        size = int(sizes[rows[0]])
        step = max(1, scores // size)
        for start in range(0, len(rows), step):
            members = rows[start : start + step]
            flat = offsets[members][:, None] + np.arange(size)
            yield Block(rows=members, flat=flat.ravel(), size=size)


def _even_blocks(n: int, size: int, scores: int) -> Iterator[Block]:
    step = max(1, scores // size)
    for start in range(0, n, step):
        stop = min(start + step, n)
        yield Block(rows=slice(start, stop), flat=slice(start * size, stop * size), size=size)


def sorted_blocks(log: ScoreArrays, some: Bools | None = None) -> Iterator[tuple[Block, Floats, Integers]]:
    """Yield rows in blocks, each with its gaps in ascending order and the actions in that order; see `sorted_gaps`."""
    for block in blocks(log.offsets, some):
        yield block, *sorted_gaps(block.of(log.primary), digits=log.score_digits)


@dataclass(frozen=True, slots=True)
class RowChoices:
    """How rows are decided.

    Attributes:
        action: of each row; -1 if the Guardian decides and its scores are missing.
        margin: how far the Primary's top action leads.
        candidate: for every action of every row, flat: whether it is a candidate.
    """

    action: Integers
    deferred: Bools
    margin: Floats
    candidate: Bools


def choose_rows(
    log: ScoreArrays,
    relaxation: float | Floats | None,
    boundary_u: float | Floats | None,
    u: Draw | None,
    *,
    sees_all: bool,
) -> RowChoices:
    """Decide every row: by the top action if it stands alone, otherwise by the Guardian's choice.

    Args:
        relaxation: the threshold, one for all rows or one for each.
        boundary_u: the draw that goes with it, likewise; see `is_candidate`.
        u: gives the draws of rows in which an action stands exactly at the threshold.
        sees_all: whether a deferral shows the Guardian every action.
    """
    n = len(log.offsets) - 1
    thresholds = np.broadcast_to(np.inf if relaxation is None else relaxation, n)
    draws_at = None if boundary_u is None else np.broadcast_to(boundary_u, n)
    action, margin, deferred = np.empty(n, dtype=np.int64), np.empty(n), np.empty(n, dtype=np.bool_)
    candidate = np.empty(len(log.primary), dtype=np.bool_)
    for block, gap, order in sorted_blocks(log):
        at, threshold = None if draws_at is None else block.per_row(draws_at), block.per_row(thresholds)
        draw = np.zeros(gap.shape[1])
        if u is not None and at is not None:
            tied = np.flatnonzero((gap == threshold).any(axis=0))
            if tied.size:
                draw[tied] = u(block.row_numbers(tied))
        kept = is_candidate(gap, threshold, u=draw, boundary_u=at)
        last = kept.sum(axis=0) - 1
        choices = guardian_choices(block.of(log.guardian), order, sees_all=sees_all)
        chosen = np.take_along_axis(choices, last[None, :], axis=0)[0]
        chosen[(last > 0) & block.per_row(log.missing)] = -1
        action[block.rows], deferred[block.rows], margin[block.rows] = chosen, last > 0, margins(gap)
        by_action = np.empty_like(kept)
        np.put_along_axis(by_action, order, kept, axis=0)
        candidate[block.flat] = by_action.T.ravel()
    return RowChoices(action, deferred, margin, candidate)


# --- The Primary's lead, and keys that order actions, for many rows at once ---


PLACE_BITS: Final = 7
"""The last bits of a key: the action's place in its row."""


def gaps_of(ticks: Floats, decimals: Integers, rows: Indices) -> Floats:
    """Return gaps in ticks as numbers, in place, given the rows they belong to."""
    if len(ticks):
        shift(ticks, -(decimals if len(decimals) == 1 else decimals[rows]))
    return ticks


def order_keys(scores: Floats, digits: int) -> tuple[Integers, Integers, Indices]:
    """Return one number per action that orders each row by tick, then place; the decimals; and rows of other decades.

    It is the tick as a float, read as an integer: that keeps the order, and since a tick is below 2^41, the last twelve
    bits are free for the place.
    """
    scores = as_recorded(scores, digits)
    top = scores.max(axis=0)
    decimals, others = common_decimals(np.maximum(top, -scores.min(axis=0)), digits)
    ticks = top - scores  # a -0.0 among them comes before the zeros, with which it is tied
    shift(ticks, decimals)
    keys = np.rint(ticks, out=ticks).view(np.int64)
    keys |= np.arange(len(keys))[:, None]
    return keys, decimals, others


@dataclass(frozen=True, slots=True)
class Leads:
    """How far the top actions of some rows lead.

    Attributes:
        ticks: the best score minus the second best, in whole ticks.
        decimals: those kept of the scores.
        worth: what the top action is worth to the Guardian.
        best: the most that any action is worth.
        others: rows of other decades than nearly all, whose lead is left to another round.
    """

    rows: Indices
    ticks: Floats
    decimals: Integers
    worth: Floats
    best: Floats
    others: Indices

    def gaps(self, rows: Indices) -> Floats:
        """Return the margins of some rows."""
        return gaps_of(self.ticks[rows], self.decimals, rows)


def leads(block: Block, primary: Floats, worth: Floats, digits: int) -> Leads:
    """Return the leads of a block of rows of one size: no order is needed, only the two best scores."""
    scores, worths = as_recorded(block.of(primary), digits), block.of(worth)
    if len(scores) == 1:
        return Leads(block.all_rows(), np.zeros(len(worths[0])), np.zeros(1, np.int64), worths[0], worths[0], _NO_ROWS)
    top, second = np.maximum(scores[0], scores[1]), np.minimum(scores[0], scores[1])
    of_top = _either(scores[1] > scores[0], worths[1], worths[0])
    for score, value in zip(scores[2:], worths[2:], strict=True):
        of_top = _either(score > top, value, of_top)
        np.maximum(second, np.minimum(top, score), out=second)
        np.maximum(top, score, out=top)
    decimals, others = common_decimals(np.maximum(top, -scores.min(axis=0)), digits)
    return Leads(block.all_rows(), _whole_ticks(top - second, decimals), decimals, of_top, worths.max(axis=0), others)


def _either(first: Bools, value: Floats, other: Floats) -> Floats:
    """Return `value` where `first` holds, else `other`; half the time of copying under a mask."""
    return np.where(first, value, other)


def long_leads(block: Block, log: ScoreArrays, worth: Floats) -> Leads:
    """Return the leads of longer rows of any size, which follow each other."""
    scores, worths, rows = as_recorded(log.primary[block.flat], log.score_digits), worth[block.flat], block.all_rows()
    sizes = log.offsets[rows + 1] - log.offsets[rows]
    starts = np.cumsum(sizes) - sizes
    top, low = np.maximum.reduceat(scores, starts), np.minimum.reduceat(scores, starts)
    place = np.where(scores == np.repeat(top, sizes), np.arange(len(scores)), len(scores))
    first = np.minimum.reduceat(place, starts)
    rest = scores.copy()
    rest[first] = -np.inf
    second, best = np.maximum.reduceat(rest, starts), np.maximum.reduceat(worths, starts)
    decimals = kept_decimals(np.maximum(top, -low), log.score_digits)
    return Leads(rows, _whole_ticks(top - second, decimals), decimals, worths[first], best, _NO_ROWS)


def _whole_ticks(scores: Floats, decimals: Integers) -> Floats:
    """Return differences of scores as whole ticks, in place."""
    shift(scores, decimals)
    return np.rint(scores, out=scores)


def n_rows(number: int | str, verb: str = "", plural: str = "") -> str:
    """Return a number of rows, or its text, in words, with a verb for one and for several: "1 row", "3 rows have"."""
    return f"1 row {verb}".rstrip() if str(number) == "1" else f"{number} rows {plural}".rstrip()
