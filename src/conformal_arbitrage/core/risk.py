"""From losses to events, where the loss of a row falls as the relaxation grows, and the walk along them to a threshold."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, Final, Literal, Protocol, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.exact import (
    LONGEST_NETWORK,
    PLACE_BITS,
    Block,
    Bools,
    Draw,
    Floats,
    Indices,
    Integers,
    Leads,
    ScoreArrays,
    blocks,
    flat_positions,
    gaps_of,
    in_order,
    leads,
    long_leads,
    n_rows,
    order_keys,
    row_argmax,
    sorted_blocks,
    sorted_columns,
    tick_gaps,
)
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
class BlockLosses:
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
class LogLosses:
    """The losses of all rows, block by block: a user's are a list, others are made on iteration."""

    blocks: Iterable[BlockLosses]
    tick_digits: int
    envelope_excess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMeasure:
    """How losses are measured.

    Attributes:
        guardian_sees: "candidates" and "all-restricted-loss" measure the loss of the candidates; "all" measures
            that of the top action while it stands alone, and of all actions from then on.
        loss: a user's loss, raised to its monotone envelope; None for the Guardian regret.
        grades: what each action is worth, flat, NaN if unknown: the loss is then the net loss, the grade of the
            Guardian's choice minus that of the top action, negative where the Primary's choice is the better one;
            with guardian_sees="all" only.
        missing_loss: the loss of a row whose loss is unknown (see `ScoreArrays`), unless everything is in sight.
        full_sight_loss: the loss of such a row with everything in sight; 0 for the Guardian regret.
        tick_digits: of the whole log, if these are only some of its rows; by default those that these rows need.
    """

    guardian_sees: GuardianSees = "all"
    loss: Loss | None = None
    grades: Floats | None = None
    missing_loss: Number | None = None
    full_sight_loss: Number = 0
    tick_digits: int | None = None

    def __post_init__(self) -> None:
        """Reject an unknown sight."""
        known = get_args(GuardianSees)
        if self.guardian_sees not in known:
            raise OptionError(f"guardian_sees must be one of {', '.join(known)}; got {self.guardian_sees!r}")

    def tolerant(self) -> "LossMeasure":
        """Return what measures rows without a Guardian score as well, before they are refused."""
        return self if self.missing_loss is not None else replace(self, missing_loss=1)

    def losses(self, log: ScoreArrays) -> LogLosses:
        """Return the loss of every row of a log as its candidate set grows.

        Raises:
            ScoreLogError: a Guardian score is missing and `missing_loss` is None, or a loss is negative.
        """
        if self.grades is not None:
            return _net_losses(log, self.grades, self.missing_loss)
        if self.loss is None:
            regret = self._regret(log)
            return LogLosses((regret.losses(*block) for block in sorted_blocks(log)), regret.tick_digits, 0.0)
        return _user_losses(log, self.loss, self)

    def events(self, log: ScoreArrays) -> "Events":
        """Return the events of a log; see `losses`."""
        n = len(log.offsets) - 1
        if self.loss is not None or self.grades is not None:
            return events_of(self.losses(log), n)
        regret = self._regret(log)
        usual = n if regret.alone_only else max(n, len(log.primary) // 3)
        return replace(_joined(_regret_pieces(regret), n, usual, regret.tick_digits), scores=regret.scores)

    def _regret(self, log: ScoreArrays) -> "_Regret":
        """Return how the Guardian regret of a log is counted; refuse scores that are missing or too large."""
        worth, unknown = log.loss_scores, log.unknown_loss
        worst = _price_of_unknown(log, unknown, self.missing_loss, _UNLABELLED)
        low, high = check_guardian_scores(worth, log.offsets, log.source)
        digits = finest_tick(len(log.offsets) - 1, max(Fraction(high) - Fraction(low), worst))
        return _Regret(
            log=log,
            worth=worth,
            unknown=unknown,
            alone_only=self.guardian_sees == "all",
            worst=worst,
            tick_digits=digits if self.tick_digits is None else self.tick_digits,
            scores=(low, high),
        )


_UNLABELLED = ("`correct` of the Guardian's answer is unknown", "fill it in")


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
            f"{log.source}: row {first + 1}: {what} ({unknown.size} of {n_rows(len(log.missing))}); {remedy}, or pass "
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


def first_outside(
    scores: Floats, offsets: Integers, source: str, *, low: float = 0.0, high: float = 1.0, start: int = 0
) -> str:
    """Return where the first of the scores that leave an interval stands: the source and the row."""
    row = int(np.searchsorted(offsets, ((scores < low) | (scores > high)).argmax(), side="right"))
    return f"{source}: row {start + row}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Regret:
    """A log, and how its Guardian scores become losses in ticks.

    Attributes:
        worth: the scores that the regret is measured in.
        unknown: rows whose loss is unknown.
        alone_only: whether only the top action alone can lose, as the Guardian sees everything from then on.
        worst: the loss of a row whose loss is unknown.
        scores: the smallest and largest score of the log.
    """

    log: ScoreArrays
    worth: Floats
    unknown: Bools
    alone_only: bool
    worst: Fraction
    tick_digits: int
    scores: tuple[float, float]

    def losses(self, block: Block, gap: Floats, order: Integers) -> BlockLosses:
        """Return the loss of a block of rows as their candidate sets grow."""
        levels = _regret_levels(block.of(self.worth), order, alone_only=self.alone_only)
        levels = coarsened(levels, self.tick_digits)
        unknown = block.per_row(self.unknown)
        _fill_missing(levels, unknown, self.worst, self.tick_digits, alone_only=self.alone_only)
        return BlockLosses(block, gap, order, levels)


def check_guardian_scores(scores: Floats, offsets: Integers, source: str, *, start: int = 0) -> tuple[float, float]:
    """Return the smallest and largest Guardian score; refuse those whose sums would not be exact."""
    low, high = score_range(scores)
    limit = LARGEST_GUARDIAN_SCORE
    if max(abs(low), abs(high)) > limit:
        where = first_outside(scores, offsets, source, low=-limit, high=limit, start=start)
        raise ScoreLogError(
            f"{where}: Guardian scores from {low:g} to {high:g} are too large (limit {limit:g}); "
            "divide them, the bound and alpha by one power of ten: the rule stays the same"
        )
    return low, high


def net_losses(log: ScoreArrays, grades: Floats) -> Floats:
    """Return the net loss of keeping each row's top action; NaN where a grade or the Guardian is missing.

    It is the grade of the Guardian's choice over all actions minus that of the Primary's.
    """
    starts = log.offsets[:-1]
    net = grades[starts + row_argmax(log.guardian, log.offsets)] - grades[starts + top_actions(log)]
    return np.where(log.missing, np.nan, net)


def top_actions(log: ScoreArrays) -> Integers:
    """Return the Primary's choice in each row, the lowest index among equal scores."""
    top = np.empty(len(log.offsets) - 1, dtype=np.int64)
    for block, _, order in sorted_blocks(log):
        top[block.rows] = order[0]
    return top


_UNGRADED = ("the outcome of the Primary's or the Guardian's choice is unknown", "fill it in")


def _net_losses(log: ScoreArrays, grades: Floats, missing_loss: Number | None) -> LogLosses:
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

    def walk() -> Iterator[BlockLosses]:
        for block, gap, order in sorted_blocks(log):
            levels = np.zeros(gap.shape, dtype=np.int64)
            if len(gap) > 1:
                levels[0] = block.per_row(ticks)
            yield BlockLosses(block, gap, order, levels)

    return LogLosses(walk(), digits, 0.0)


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


def _user_losses(log: ScoreArrays, loss: Loss, measure: LossMeasure) -> LogLosses:
    """Return a user's loss on its monotone envelope: the largest loss at this or any larger relaxation."""
    n, unknown, alone_only = len(log.offsets) - 1, log.unknown_loss, measure.guardian_sees == "all"
    worst = _price_of_unknown(log, unknown, measure.missing_loss, _UNLABELLED)
    least = as_fraction(measure.full_sight_loss, name="full_sight_loss")
    raw = [(*block, _user_levels(log, *block, loss, unknown, alone_only=alone_only)) for block in sorted_blocks(log)]
    largest = check_size(Fraction(max(float(levels.max()) for *_, levels in raw)))
    digits = finest_tick(n, max(largest, worst)) if measure.tick_digits is None else measure.tick_digits
    lifted = 0.0
    lifted_blocks: list[BlockLosses] = []
    for block, gap, order, levels in raw:
        envelope = np.maximum.accumulate(levels[::-1])[::-1]
        lifted += float((envelope - levels).max(axis=0).sum())
        ticks = coarsened(guardian_ticks(envelope), digits)
        _fill_missing(ticks, block.per_row(unknown), worst, digits, alone_only=alone_only, least=least)
        lifted_blocks.append(BlockLosses(block, gap, order, ticks))
    return LogLosses(lifted_blocks, digits, lifted / n)


def _user_levels(
    log: ScoreArrays, block: Block, gap: Floats, order: Integers, loss: Loss, unknown: Bools, *, alone_only: bool
) -> Floats:
    levels = np.zeros(gap.shape)
    for k, index in enumerate(block.all_rows().tolist()):
        if not unknown[index]:
            levels[:, k] = _user_row(log, index, gap[:, k], order[:, k], loss, alone_only=alone_only)
    return levels


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


# --- Events ---


_LARGEST_EXACT: Final = 4503.0
"""Ticks of scores up to this size, and their differences, are whole numbers below 2^53: exact as floats."""
_CLASSES_PER_DOUBLING: Final = 4
_SCORES_AT_ONCE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Events:
    """Every change of a row's loss as the relaxation grows from 0, unsorted; those of a path, see `path_events`.

    Attributes:
        total: the loss of all rows at relaxation 0, in ticks.
        position: where a loss changes: the gap, above 0, of an action that becomes a candidate.
        drop: by how much it falls, in ticks; negative where a net loss rises.
        row: whose loss.
        largest: the largest loss at relaxation 0, and its row.
        in_full_sight: the largest loss with every action in sight, and its row.
        tick_digits: one tick is 10^-tick_digits.
        remaining: what is left of each row's loss after all events; None if nothing is.
        envelope_excess: mean over rows of how far a user's loss was raised to make it monotone.
        scores: the smallest and largest score that the Guardian regret is measured in; None for other losses.
    """

    n: int
    total: int
    position: Floats
    drop: Integers
    row: Indices
    largest: tuple[int, int] = (0, 0)
    in_full_sight: tuple[int, int] = (0, 0)
    tick_digits: int = 0
    remaining: Integers | None = None
    envelope_excess: float = 0.0
    scores: tuple[float, float] | None = None

    def row_losses(self, relaxation: float, boundary_u: float | None = None, draw: Draw | None = None) -> Integers:
        """Return the loss of every row at a relaxation, in ticks; draws tell apart the rows that change right there."""
        later = self.position > relaxation
        if draw is not None and boundary_u is not None:
            there = np.flatnonzero(self.position == relaxation)
            later[there] = draw(self.row[there]) > boundary_u
        losses = np.zeros(self.n, np.int64) if self.remaining is None else self.remaining.copy()
        np.add.at(losses, self.row[later], self.drop[later])
        return losses


@dataclass(frozen=True, slots=True)
class _Piece:
    """The events of some rows.

    Attributes:
        at_zero: the loss of each at relaxation 0.
        steps: in which of them it falls, at which gap and by how much; in several steps.
    """

    rows: Indices
    at_zero: Integers | Floats
    steps: Sequence[tuple[Indices, Floats, Integers | Floats]]


def events_of(losses: LogLosses, n: int) -> Events:
    """Return the events of n rows, given their losses."""
    in_full_sight, pieces, remaining = (-1, 0), list[_Piece](), np.zeros(n, np.int64)
    for piece in losses.blocks:
        last = piece.levels[-1]
        remaining[piece.block.rows] = last
        peak = int(last.argmax())
        if last[peak] > in_full_sight[0]:
            in_full_sight = int(last[peak]), int(piece.block.all_rows()[peak])
        pieces.append(_block_piece(piece))
    count = sum(len(gap) for piece in pieces for _, gap, _ in piece.steps)
    return replace(
        _joined(iter(pieces), n, count, losses.tick_digits),
        in_full_sight=in_full_sight,
        remaining=remaining,
        envelope_excess=losses.envelope_excess,
    )


def _block_piece(piece: BlockLosses) -> _Piece:
    fall = piece.levels[:-1] - piece.levels[1:]
    hit = np.flatnonzero((fall != 0) & (piece.gaps[1:] > 0))
    gap = piece.gaps[1:].ravel()[hit]
    return _Piece(piece.block.all_rows(), piece.at_zero(), [(hit % len(piece.levels[0]), gap, fall.ravel()[hit])])


def _joined(pieces: Iterator[_Piece], n: int, usual: int, tick_digits: int) -> Events:
    """Gather the pieces of n rows, which have about so many events.

    They are copied at once into memory for all of them: keeping the pieces would take fresh memory for each, which costs
    more than computing them. What is not written to is never touched.
    """
    total, largest, stop = 0, (-1, 0), 0
    columns = np.empty((3, usual), np.int64)
    for piece in pieces:
        at_zero = piece.at_zero.astype(np.int64, copy=False)  # each is exact as a float, their sum may not be
        total += int(at_zero.sum())
        peak = int(at_zero.argmax())
        largest = max(largest, (int(at_zero[peak]), int(piece.rows[peak])), key=_rank)
        for position, at, fall in piece.steps:
            start, stop = stop, stop + len(at)
            if stop > int(columns.shape[1]):
                columns = np.concatenate([columns, np.empty((3, 2 * stop), np.int64)], axis=1)
            columns[0, start:stop] = at.view(np.int64)
            columns[1, start:stop] = fall
            columns[2, start:stop] = piece.rows[position]
    return Events(
        n=n,
        total=total,
        position=columns[0, :stop].view(np.float64),
        drop=columns[1, :stop],
        row=columns[2, :stop],
        largest=largest,
        tick_digits=tick_digits,
    )


def _rank(loss: tuple[int, int]) -> tuple[int, int]:
    """Order losses by size, those of earlier rows last."""
    return loss[0], -loss[1]


def _regret_pieces(regret: _Regret) -> Iterator[_Piece]:
    """Yield the events of all rows, in blocks; those with an unknown loss or unusually large scores through their losses."""
    log, unknown = regret.log, regret.unknown
    sizes = np.diff(log.offsets)
    large = max(-regret.scores[0], regret.scores[1]) > _LARGEST_EXACT
    plain = None if not (large or unknown.any()) else np.zeros(len(sizes), np.bool_) if large else ~unknown
    if plain is None or plain.any():
        yield from _short_pieces(regret, sizes, plain)
        for block in _long_blocks(log.offsets, sizes, plain, padded=not regret.alone_only):
            yield (_alone_long if regret.alone_only else _long)(regret, block)
    if plain is not None:
        for block in sorted_blocks(log, ~plain):
            yield _block_piece(regret.losses(*block))


def _short_pieces(regret: _Regret, sizes: Integers, some: Bools | None) -> Iterator[_Piece]:
    """Yield the events of short rows; rows of other decades than nearly all of their block are left to the next round."""
    left = [np.zeros(0, np.int64)]
    while left:
        left = list[Indices]()
        for block in _short_blocks(regret.log.offsets, sizes, some):
            piece, others = (_alone if regret.alone_only else _short)(regret, block)
            yield piece
            if len(others):
                left.append(block.row_numbers(others))
        some = np.zeros(len(sizes), np.bool_)
        for rows in left:
            some[rows] = True


def _short_blocks(offsets: Integers, sizes: Integers, some: Bools | None) -> Iterator[Block]:
    """Yield blocks of rows of one size each, of those sizes that a network sorts."""
    longest = int(sizes.max())
    if longest <= LONGEST_NETWORK:
        return blocks(offsets, some)
    short = sizes <= LONGEST_NETWORK
    return blocks(offsets, short if some is None else short & some)


def _long_blocks(offsets: Integers, sizes: Integers, some: Bools | None, *, padded: bool) -> Iterator[Block]:
    """Yield blocks of long rows.

    Rows of similar size share a block: `padded`, the shorter ones are filled up with copies of their last action, which
    has the same gap and the same worth and so changes no loss. Without it the rows follow each other, of any size.
    """
    chosen = sizes > LONGEST_NETWORK if some is None else (sizes > LONGEST_NETWORK) & some
    if not chosen.any():
        return
    rows = np.flatnonzero(chosen)
    if not padded:
        for part in _runs(rows, np.cumsum(sizes[rows]), _SCORES_AT_ONCE * 4):
            yield Block(rows=part, flat=flat_positions(offsets[part], sizes[part]), size=0)
        return
    widths = class_sizes(sizes[rows])
    widest: list[int] = np.unique(widths).tolist()
    for width in widest:
        members = rows[widths == width]
        step = max(1, _SCORES_AT_ONCE // width)
        for start in range(0, len(members), step):
            part = members[start : start + step]
            place: Integers = np.minimum(np.arange(width), sizes[part][:, None] - 1)
            yield Block(rows=part, flat=(offsets[part][:, None] + place).ravel(), size=width)


def _runs(rows: Indices, ends: Integers, scores: int) -> Iterator[Indices]:
    """Cut rows into runs of about so many scores each, given the running sum of their sizes."""
    cuts = np.flatnonzero(np.diff(ends // scores)) + 1
    yield from np.split(rows, cuts)


def class_sizes(sizes: Integers) -> Integers:
    """Return the size of each row's class: four to a doubling, so that at most a quarter of a block is padding."""
    step = np.maximum(np.left_shift(1, np.frexp(sizes - 1.0)[1] - 1) // _CLASSES_PER_DOUBLING, 1)
    return -(-sizes // step) * step


def _guardian_ticks(scores: Floats) -> Floats:
    """Return Guardian scores in finest ticks, as whole floats."""
    ticks = scores * 1e12
    return np.rint(ticks, out=ticks)


def _coarse(levels: Floats, tick_digits: int) -> Floats:
    """Convert finest ticks to ticks, rounded up, as `coarsened` does with integers.

    A level is below 2^53 =: N. If it is not a multiple of c, then level / c lies 1 / c or more above the whole number below,
    and rounding moves it by less than N / c 2^-53 = 1 / c: what is above a whole number stays above it.
    """
    if tick_digits == FINEST_TICK_DIGITS:
        return levels
    levels /= 10.0 ** (FINEST_TICK_DIGITS - tick_digits)
    return np.ceil(levels, out=levels)


def _short(regret: _Regret, block: Block) -> tuple[_Piece, Indices]:
    """Return the events of the regret over the candidates, of rows that a network sorts, and the rows left out."""
    keys, decimals, others = order_keys(block.of(regret.log.primary), regret.log.score_digits)
    worth = _guardian_ticks(block.of(regret.worth))
    losses = _coarse(np.subtract(worth.max(axis=0), worth, out=worth), regret.tick_digits)
    losses[:, others] = 0.0
    columns, places = sorted_columns(keys), np.arange(int(keys.shape[1]))
    level = at_zero = losses.take(_flat_places(columns[0], places), mode="clip")
    tied, steps = True, list[tuple[Indices, Floats, Floats]]()
    for column in columns[1:]:
        following = losses.take(_flat_places(column, places), mode="clip")
        np.minimum(level, following, out=following)
        fall = level - following
        if tied:
            zero = column <= PLACE_BITS
            tied = bool(zero.any())
            if tied:
                at_zero = np.where(zero, following, at_zero)
                fall[zero] = 0.0
        hit = np.flatnonzero(fall > 0)
        steps.append((hit, gaps_of((column[hit] & ~PLACE_BITS).view(np.float64), decimals, hit), fall[hit]))
        level = following
    return _Piece(block.all_rows(), at_zero, steps), others


def _flat_places(column: Integers, places: Indices) -> Indices:
    """Return where the actions of some keys, one per row, lie in a block of actions x rows; `take` need not check it."""
    flat = column & PLACE_BITS
    flat *= len(places)
    flat += places
    return flat


def _long(regret: _Regret, block: Block) -> _Piece:
    """Return the events of the regret over the candidates, of longer rows of one size, copies of last actions included."""
    shape = (-1, block.size)
    scores = regret.log.primary[block.flat].reshape(shape)
    ticks, decimals = tick_gaps(scores.T, digits=regret.log.score_digits)
    keys = np.ascontiguousarray(ticks.T).astype(np.int64)
    bits = keys.size.bit_length()
    keys <<= bits
    keys |= np.arange(keys.size).reshape(keys.shape)
    keys.sort(axis=1)
    best = _guardian_ticks(regret.worth[block.flat]).take(keys & ((1 << bits) - 1))
    np.maximum.accumulate(best, axis=1, out=best)
    level = _coarse(best[:, -1:] - best, regret.tick_digits)
    keys >>= bits
    tied = np.count_nonzero(keys == 0, axis=1)
    at_zero = level[np.arange(len(level)), tied - 1]
    fall = (level[:, :-1] - level[:, 1:]).ravel()
    later = keys[:, 1:].ravel()
    hit = np.flatnonzero((fall > 0) & (later > 0))
    position = hit // (block.size - 1)
    gap = gaps_of(later[hit].astype(np.float64), decimals, position)
    return _Piece(block.all_rows(), at_zero, [(position, gap, fall[hit])])


def _alone(regret: _Regret, block: Block) -> tuple[_Piece, Indices]:
    """Return the events of the regret of the top action alone, of short rows, and the rows left out.

    Rounding to ticks is monotone, so the second best score has the second smallest gap, and the best worth the most
    ticks. Where the two best scores are tied, the row is deferred at every relaxation and loses nothing; which of the two
    the top action is does not matter then.
    """
    lead = leads(block, regret.log.primary, regret.worth, regret.log.score_digits)
    return _single_events(regret, lead), lead.others


def _alone_long(regret: _Regret, block: Block) -> _Piece:
    """Return the same for longer rows of any size, one after the other."""
    return _single_events(regret, long_leads(block, regret.log, regret.worth))


def _single_events(regret: _Regret, lead: Leads) -> _Piece:
    """Return one event per row, at its margin: from the regret of the top action to 0."""
    level = _coarse(_guardian_ticks(lead.best) - _guardian_ticks(lead.worth), regret.tick_digits)
    level[lead.ticks == 0] = 0.0
    level[lead.others] = 0.0
    hit = np.flatnonzero(level > 0)
    return _Piece(lead.rows, level, [(hit, lead.gaps(hit), level[hit])])


# --- The walk along the events: the exact risk at every relaxation, and the first one within a limit ---

SMALLEST_BOUND = Fraction(1, 10**6)
"""A smaller loss bound is refused: too little would be left of losses rounded to 10^-12."""
_LARGEST_INT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RiskThreshold:
    """A threshold that keeps a budget.

    Attributes:
        boundary_u: the draw that goes with it, for boundary="random"; else None.
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
        outside: where the first Guardian score beyond [0, 1] stands; None if a bound of 1 needs no statement.
        grid: the only relaxations allowed; None for all.
    """

    source: str
    events: Events
    draw: Draw | None
    signed: bool
    outside: str | None
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
        outside = None
        if events.scores is None or not in_unit(events.scores):
            scores = log.loss_scores if grades is None else grades
            outside = None if within_unit(scores) else first_outside(scores, log.offsets, log.source)
        return cls(
            source=log.source,
            events=events,
            draw=u.take if isinstance(u, np.ndarray) else u,
            signed=grades is not None,
            outside=outside,
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
        return check_bound(loss_bound, self.largest_loss, tick=tick, outside=self.outside, source=self.source)

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
    loss_bound: Number | None, largest_loss: tuple[Fraction, int], *, tick: Fraction, outside: str | None, source: str
) -> Fraction:
    """Return the loss bound as the user wrote it.

    It must not lie below the largest loss by a tick or more (losses are rounded to ticks). It may be left out, and is
    then 1, only if no Guardian score lies outside [0, 1]; `outside` says where the first one does.
    """
    if loss_bound is None and outside is not None:
        raise OptionError(
            f"{outside}: Guardian scores leave [0, 1], so the largest possible loss is not 1; "
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
        return tuple(_folded(bracket, gap, drop) for bracket in self.brackets)


@dataclass(frozen=True, slots=True)
class Collect:
    """What the last scan does with the events of a part: add up those of equal gap, within some brackets."""

    brackets: tuple[Bracket, ...]

    def __call__(self, gap: Floats, drop: Integers) -> Scanned:
        """Return the distinct gaps in the brackets, ascending, and the sum of the events at each."""
        wanted = np.zeros(len(gap), np.bool_)
        for bracket in self.brackets:
            wanted |= bracket.inside(gap)
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
    sums = [BucketSums(bracket.buckets) for bracket in brackets]
    for result in results:
        for total, buckets in zip(sums, result, strict=True):
            total.add(buckets)
    return [total.buckets() for total in sums]


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
        gap: where the total falls, unsorted.
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
