"""Falls: at which gaps the total loss of a log falls, and by how much, found without ordering more than that takes.

The search for a relaxation needs no more than this, so the Guardian regret is computed here in fewer steps than in
`core/losses.py`, with the same results to the bit: short rows are ordered by a sorting network, long ones in classes of
similar size, and where the Guardian sees everything only the two best scores of a row are looked at.

Knows nothing of budgets, draws or files.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from conformal_arbitrage.core.arrays import Bools, Floats, Indices, Integers, flat_positions
from conformal_arbitrage.core.gaps import (
    LONGEST_NETWORK,
    as_recorded,
    kept_decimals,
    shift,
    sorted_columns,
    tick_gaps,
)
from conformal_arbitrage.core.losses import (
    FINEST_TICK_DIGITS,
    GuardianSees,
    Loss,
    LossStairs,
    Number,
    RegretRule,
    Stairs,
    loss_stairs,
    regret_rule,
)
from conformal_arbitrage.core.rows import Block, ScoreArrays, blocks

_LARGEST_EXACT: Final = 4503.0
"""Ticks of scores up to this size, and their differences, are whole numbers below 2^53: exact as floats."""
_CLASSES_PER_DOUBLING: Final = 4
_SCORES_AT_ONCE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Falls:
    """Every fall of the total loss above gap 0, unsorted.

    Attributes:
        total: the loss of all rows at relaxation 0, in ticks.
        gap: where it falls.
        drop: by how much, in ticks; negative where a net loss makes the total rise.
        row: whose loss falls.
        largest: the largest loss at relaxation 0, and its row.
        in_full_sight: the largest loss with every action in sight, and its row.
        tick_digits: one tick is 10^-tick_digits.
        envelope_excess: mean over rows of how far a user's loss was raised to make it monotone.
        scores: the smallest and largest score that the Guardian regret is measured in; None for other losses.
    """

    total: int
    gap: Floats
    drop: Integers
    row: Indices
    largest: tuple[int, int]
    in_full_sight: tuple[int, int]
    tick_digits: int
    envelope_excess: float = 0.0
    scores: tuple[float, float] | None = None


def loss_falls(
    log: ScoreArrays,
    *,
    guardian_sees: GuardianSees,
    loss: Loss | None = None,
    grades: Floats | None = None,
    missing_loss: Number | None = None,
    full_sight_loss: Number = 0,
    tick_digits: int | None = None,
) -> Falls:
    """Return where the total loss of a log falls; the arguments are those of `loss_stairs`."""
    if loss is not None or grades is not None or guardian_sees not in ("all", "candidates", "all-restricted-loss"):
        stairs = loss_stairs(
            log,
            guardian_sees=guardian_sees,
            loss=loss,
            grades=grades,
            missing_loss=missing_loss,
            full_sight_loss=full_sight_loss,
            tick_digits=tick_digits,
        )
        return _of_stairs(stairs)
    rule = regret_rule(log, guardian_sees=guardian_sees, missing_loss=missing_loss, tick_digits=tick_digits)
    return replace(_joined(_regret_pieces(log, rule), rule.tick_digits), scores=rule.scores)


@dataclass(frozen=True, slots=True)
class _Piece:
    """The falls of some rows: the loss of each at relaxation 0, and in which of them it falls, where and by how much."""

    rows: Block
    at_zero: Integers
    position: Indices
    gap: Floats
    drop: Integers


def _of_stairs(stairs: LossStairs) -> Falls:
    in_full_sight, pieces = (-1, 0), list[_Piece]()
    for stair in stairs.blocks:
        last = stair.levels[-1]
        peak = int(last.argmax())
        if last[peak] > in_full_sight[0]:
            in_full_sight = int(last[peak]), int(stair.block.all_rows()[peak])
        pieces.append(_stair_piece(stair))
    return _joined(iter(pieces), stairs.tick_digits, in_full_sight, stairs.envelope_excess)


def _stair_piece(stair: Stairs) -> _Piece:
    fall = stair.levels[:-1] - stair.levels[1:]
    hit = np.flatnonzero((fall != 0) & (stair.gaps[1:] > 0))
    gap = stair.gaps[1:].ravel()[hit]
    return _Piece(stair.block, stair.at_zero(), hit % len(stair.levels[0]), gap, fall.ravel()[hit])


def _joined(
    pieces: Iterator[_Piece], tick_digits: int, in_full_sight: tuple[int, int] = (0, 0), envelope_excess: float = 0.0
) -> Falls:
    total, largest = 0, (-1, 0)
    gap: list[Floats] = []
    drop: list[Integers] = []
    row: list[Indices] = []
    for piece in pieces:
        total += int(piece.at_zero.sum())
        peak = int(piece.at_zero.argmax())
        largest = max(largest, (int(piece.at_zero[peak]), int(piece.rows.row_numbers(np.array([peak]))[0])), key=_rank)
        gap.append(piece.gap)
        drop.append(piece.drop)
        row.append(piece.rows.row_numbers(piece.position))
    return Falls(
        total=total,
        gap=np.concatenate(gap),
        drop=np.concatenate(drop),
        row=np.concatenate(row),
        largest=largest,
        in_full_sight=in_full_sight,
        tick_digits=tick_digits,
        envelope_excess=envelope_excess,
    )


def _rank(loss: tuple[int, int]) -> tuple[int, int]:
    """Order losses by size, those of earlier rows last."""
    return loss[0], -loss[1]


def _regret_pieces(log: ScoreArrays, rule: RegretRule) -> Iterator[_Piece]:
    """Yield the falls of all rows, in blocks; those with an unknown loss or unusually large scores through their stairs."""
    unknown, sizes = log.unknown_loss, np.diff(log.offsets)
    large = max(-rule.scores[0], rule.scores[1]) > _LARGEST_EXACT
    plain = None if not (large or unknown.any()) else np.zeros(len(sizes), np.bool_) if large else ~unknown
    if plain is None or plain.any():
        for block in _short_blocks(log.offsets, sizes, plain):
            yield (_alone if rule.alone_only else _short)(log, rule, block)
        for block in _long_blocks(log.offsets, sizes, plain, padded=not rule.alone_only):
            yield (_alone_long if rule.alone_only else _long)(log, rule, block)
    if plain is not None:
        for block in blocks(log.offsets, ~plain):
            yield _stair_piece(rule.stairs(log, block, block.per_row(unknown)))


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


def _at(decimals: Integers, rows: Indices) -> Integers:
    return decimals if len(decimals) == 1 else decimals[rows]


def _gaps(ticks: Floats, decimals: Integers, rows: Indices) -> Floats:
    """Return gaps in ticks as numbers, given the rows they belong to."""
    if len(ticks):
        shift(ticks, -_at(decimals, rows))
    return ticks


def _short(log: ScoreArrays, rule: RegretRule, block: Block) -> _Piece:
    """Return the falls of the regret over the candidates, of rows that a network sorts."""
    keys, bits, decimals = _keys(block.of(log.primary), log.score_digits)
    mask = (1 << bits) - 1
    worth = _guardian_ticks(block.of(log.loss_scores))
    top = worth.max(axis=0)
    columns = sorted_columns(keys)
    best = worth.take(columns[0] & mask, mode="clip")  # "clip" does not look at every index twice
    level = _coarse(top - best, rule.tick_digits)
    at_zero, tied = level, True
    where: list[Indices] = []
    ticks: list[Integers] = []
    drops: list[Floats] = []
    for column in columns[1:]:
        np.maximum(best, worth.take(column & mask, mode="clip"), out=best)
        following = _coarse(top - best, rule.tick_digits)
        fall = np.subtract(level, following, out=level if at_zero is not level else None)
        if tied:
            zero = column <= mask
            tied = bool(zero.any())
            if tied:
                at_zero = np.where(zero, following, at_zero)
                fall[zero] = 0.0
        hit = np.flatnonzero(fall > 0)
        where.append(hit)
        ticks.append(column[hit] >> bits)
        drops.append(fall[hit])
        level = following
    position, gap, drop = _concatenated(where, ticks, drops)
    return _Piece(block, at_zero.astype(np.int64), position, _gaps(gap, decimals, position), drop)


def _concatenated(where: list[Indices], ticks: list[Integers], drops: list[Floats]) -> tuple[Indices, Floats, Integers]:
    if not where:
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64)
    return np.concatenate(where), np.concatenate(ticks).astype(np.float64), np.concatenate(drops).astype(np.int64)


def _keys(scores: Floats, digits: int) -> tuple[Integers, int, Integers]:
    """Return one number per action that orders each row by tick, then place, and holds the place; and its bits."""
    ticks, decimals = tick_gaps(scores, digits=digits)
    bits = ticks.size.bit_length()
    keys = ticks.astype(np.int64)
    keys <<= bits
    keys |= np.arange(ticks.size).reshape(ticks.shape)
    return keys, bits, decimals


def _long(log: ScoreArrays, rule: RegretRule, block: Block) -> _Piece:
    """Return the falls of the regret over the candidates, of longer rows of one size, copies of last actions included."""
    shape = (-1, block.size)
    scores = log.primary[block.flat].reshape(shape)
    ticks, decimals = tick_gaps(scores.T, digits=log.score_digits)
    keys = np.ascontiguousarray(ticks.T).astype(np.int64)
    bits = keys.size.bit_length()
    keys <<= bits
    keys |= np.arange(keys.size).reshape(keys.shape)
    keys.sort(axis=1)
    best = _guardian_ticks(log.loss_scores[block.flat]).take(keys & ((1 << bits) - 1))
    np.maximum.accumulate(best, axis=1, out=best)
    level = _coarse(best[:, -1:] - best, rule.tick_digits)
    keys >>= bits
    tied = np.count_nonzero(keys == 0, axis=1)
    at_zero = level[np.arange(len(level)), tied - 1]
    fall = (level[:, :-1] - level[:, 1:]).ravel()
    later = keys[:, 1:].ravel()
    hit = np.flatnonzero((fall > 0) & (later > 0))
    position = hit // (block.size - 1)
    gap = _gaps(later[hit].astype(np.float64), decimals, position)
    return _Piece(block, at_zero.astype(np.int64), position, gap, fall[hit].astype(np.int64))


def _alone(log: ScoreArrays, rule: RegretRule, block: Block) -> _Piece:
    """Return the falls of the regret of the top action alone, of short rows: no order, only the two best scores."""
    scores, worth = as_recorded(block.of(log.primary), log.score_digits), block.of(log.loss_scores)
    if len(scores) == 1:
        nothing = np.zeros(0, np.int64)
        return _Piece(block, np.zeros(int(scores.shape[1]), np.int64), nothing, np.zeros(0), nothing)
    top, second = np.maximum(scores[0], scores[1]), np.minimum(scores[0], scores[1])
    own: Floats = worth[0].copy()
    np.copyto(own, worth[1], where=scores[1] > scores[0])
    for score, value in zip(scores[2:], worth[2:], strict=True):
        np.copyto(own, value, where=score > top)
        np.maximum(second, np.minimum(top, score), out=second)
        np.maximum(top, score, out=top)
    return _single_falls(block, rule, log.score_digits, top, second, scores.min(axis=0), own, worth.max(axis=0))


def _alone_long(log: ScoreArrays, rule: RegretRule, block: Block) -> _Piece:
    """Return the same for longer rows of any size, one after the other."""
    scores = as_recorded(log.primary[block.flat], log.score_digits)
    worth, rows = log.loss_scores[block.flat], block.all_rows()
    sizes = log.offsets[rows + 1] - log.offsets[rows]
    starts = np.cumsum(sizes) - sizes
    top, low = np.maximum.reduceat(scores, starts), np.minimum.reduceat(scores, starts)
    place = np.where(scores == np.repeat(top, sizes), np.arange(len(scores)), len(scores))
    first = np.minimum.reduceat(place, starts)
    rest = scores.copy()
    rest[first] = -np.inf
    second, best = np.maximum.reduceat(rest, starts), np.maximum.reduceat(worth, starts)
    return _single_falls(block, rule, log.score_digits, top, second, low, worth[first], best)


def _single_falls(
    block: Block,
    rule: RegretRule,
    digits: int,
    top: Floats,
    second: Floats,
    low: Floats,
    own: Floats,
    best: Floats,
) -> _Piece:
    """Return one fall per row, at its margin: from the regret of the top action to 0.

    Rounding to ticks is monotone, so the second best score has the second smallest gap, and the best worth the most
    ticks. Where the two best scores are tied, the row is deferred at every relaxation and loses nothing; which of the two
    the top action is does not matter then.

    Args:
        block: the rows.
        rule: how losses are counted.
        digits: of the Primary scores.
        top: the best Primary score of each row.
        second: the second best.
        low: the worst.
        own: what the top action is worth to the Guardian.
        best: the most that any action is worth.
    """
    decimals = kept_decimals(np.maximum(top, -low), digits)
    ticks = top - second
    shift(ticks, decimals)
    np.rint(ticks, out=ticks)
    level = _coarse(_guardian_ticks(best) - _guardian_ticks(own), rule.tick_digits)
    level[ticks == 0] = 0.0
    at_zero = level.astype(np.int64)
    hit = np.flatnonzero(level > 0)
    return _Piece(block, at_zero, hit, _gaps(ticks[hit], decimals, hit), at_zero[hit])
