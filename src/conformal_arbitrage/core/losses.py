"""Losses as events: where the loss of each row, and of a whole log, falls as the relaxation grows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Final, Literal, get_args

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
        low, high = check_guardian_scores(score_range(worth), log.source)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Regret:
    """A log, and how its Guardian scores become losses in ticks.

    Attributes:
        log: the log.
        worth: the scores that the regret is measured in.
        unknown: rows whose loss is unknown.
        alone_only: whether only the top action alone can lose, as the Guardian sees everything from then on.
        worst: the loss of a row whose loss is unknown.
        tick_digits: one tick is 10^-tick_digits.
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
    for block, _, order in sorted_blocks(log):
        top[block.rows] = order[0]
    starts = log.offsets[:-1]
    net = grades[starts + row_argmax(log.guardian, log.offsets)] - grades[starts + top]
    return np.where(log.missing, np.nan, net)


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
        n: rows.
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
        rows: which.
        at_zero: the loss of each at relaxation 0.
        steps: in which of them it falls, at which gap and by how much; in several steps.
    """

    rows: Block
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
    return _Piece(piece.block, piece.at_zero(), [(hit % len(piece.levels[0]), gap, fall.ravel()[hit])])


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
        peak, rows = int(at_zero.argmax()), piece.rows.all_rows()
        largest = max(largest, (int(at_zero[peak]), int(rows[peak])), key=_rank)
        for position, at, fall in piece.steps:
            start, stop = stop, stop + len(at)
            if stop > int(columns.shape[1]):
                columns = np.concatenate([columns, np.empty((3, 2 * stop), np.int64)], axis=1)
            columns[0, start:stop] = at.view(np.int64)
            columns[1, start:stop] = fall
            columns[2, start:stop] = rows[position]
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
        for own in _runs(rows, np.cumsum(sizes[rows]), _SCORES_AT_ONCE * 4):
            yield Block(rows=own, flat=flat_positions(offsets[own], sizes[own]), size=0)
        return
    widths = class_sizes(sizes[rows])
    widest: list[int] = np.unique(widths).tolist()
    for width in widest:
        members = rows[widths == width]
        step = max(1, _SCORES_AT_ONCE // width)
        for start in range(0, len(members), step):
            own = members[start : start + step]
            place: Integers = np.minimum(np.arange(width), sizes[own][:, None] - 1)
            yield Block(rows=own, flat=(offsets[own][:, None] + place).ravel(), size=width)


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
    return _Piece(block, at_zero, steps), others


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
    return _Piece(block, at_zero, [(position, gap, fall[hit])])


def _alone(regret: _Regret, block: Block) -> tuple[_Piece, Indices]:
    """Return the events of the regret of the top action alone, of short rows, and the rows left out.

    Rounding to ticks is monotone, so the second best score has the second smallest gap, and the best worth the most
    ticks. Where the two best scores are tied, the row is deferred at every relaxation and loses nothing; which of the two
    the top action is does not matter then.
    """
    lead = leads(block, regret.log.primary, regret.worth, regret.log.score_digits)
    return _single_events(block, regret, lead), lead.others


def _alone_long(regret: _Regret, block: Block) -> _Piece:
    """Return the same for longer rows of any size, one after the other."""
    return _single_events(block, regret, long_leads(block, regret.log, regret.worth))


def _single_events(block: Block, regret: _Regret, lead: Leads) -> _Piece:
    """Return one event per row, at its margin: from the regret of the top action to 0."""
    level = _coarse(_guardian_ticks(lead.best) - _guardian_ticks(lead.worth), regret.tick_digits)
    level[lead.ticks == 0] = 0.0
    level[lead.others] = 0.0
    hit = np.flatnonzero(level > 0)
    return _Piece(block, level, [(hit, lead.gaps(hit), level[hit])])
