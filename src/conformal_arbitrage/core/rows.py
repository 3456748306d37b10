"""Flat arrays with offsets, walked as rectangular blocks.

Rows of one size form actions x rows blocks small enough for the processor's cache, so that no whole-log copy of the
scores is ever made.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.gaps import Bools, Floats, Integers

T = TypeVar("T", bound=np.generic)

_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 13, 1 << 16


class ScoreArrays(Protocol):
    """What the mathematics needs of a score log. Actions of row i are offsets[i] to offsets[i+1]."""

    @property
    def primary(self) -> Floats:
        """Primary scores, flat and finite (a row without an opinion is all zeros)."""
        ...

    @property
    def guardian(self) -> Floats:
        """Guardian scores, flat; NaN throughout a row whose Guardian did not answer."""
        ...

    @property
    def loss_scores(self) -> Floats:
        """What the Guardian regret is measured in: the Guardian scores, or their binarised form."""
        ...

    @property
    def offsets(self) -> Integers:
        """Where each row starts; one more entry than rows."""
        ...

    @property
    def missing(self) -> Bools:
        """Rows whose Guardian did not answer."""
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
        """One row as an object, for a user's own loss."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of one size, and where their scores lie in the flat arrays."""

    rows: slice | NDArray[np.intp]
    flat: slice | NDArray[np.intp]
    size: int

    def of(self, values: NDArray[T]) -> NDArray[T]:
        """These rows of a flat array, as actions x rows."""
        return np.ascontiguousarray(values[self.flat].reshape(-1, self.size).T)

    def per_row(self, values: NDArray[T]) -> NDArray[T]:
        """These rows of an array with one entry per row."""
        return values[self.rows]

    def all_rows(self) -> NDArray[np.intp]:
        """The log's row numbers of this block."""
        return np.arange(int(self.rows.start), int(self.rows.stop)) if isinstance(self.rows, slice) else self.rows

    def row_numbers(self, positions: NDArray[np.intp]) -> NDArray[np.intp]:
        """The log's row numbers of some positions within this block."""
        return self.rows.start + positions if isinstance(self.rows, slice) else self.rows[positions]


def blocks(offsets: Integers) -> Iterator[Block]:
    """Every row once, in blocks of rows of one size; in file order where all sizes are equal.

    A block has a thirty-second of all scores, within limits: fewer steps for a large log, and for a small one little
    fresh memory, which costs more to touch first than to compute in.
    """
    sizes = np.diff(offsets)
    scores = min(max(int(offsets[-1]) // 32, _SMALLEST_BLOCK), _LARGEST_BLOCK)
    if sizes.min() == sizes.max():
        yield from _even_blocks(len(sizes), int(sizes[0]), scores)
        return
    by_size = np.argsort(sizes, kind="stable")
    cuts = np.flatnonzero(np.diff(sizes[by_size])) + 1
    for rows in np.split(by_size, cuts):
        size = int(sizes[rows[0]])
        step = max(1, scores // size)
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            flat = offsets[some][:, None] + np.arange(size)
            yield Block(rows=some, flat=flat.ravel(), size=size)


def _even_blocks(n: int, size: int, scores: int) -> Iterator[Block]:
    step = max(1, scores // size)
    for start in range(0, n, step):
        stop = min(start + step, n)
        yield Block(rows=slice(start, stop), flat=slice(start * size, stop * size), size=size)


def flat_positions(starts: Integers, sizes: Integers) -> Integers:
    """Positions in a flat array of rows that start at `starts`, one row after the other."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)


def row_argmax(values: Floats, offsets: Integers) -> Integers:
    """Index within its row of each row's largest value, the lowest among equals; 0 for a row of NaN."""
    sizes = np.diff(offsets)
    top = np.repeat(np.maximum.reduceat(values, offsets[:-1]), sizes)
    place = np.arange(len(values)) - np.repeat(offsets[:-1], sizes)
    return np.minimum.reduceat(np.where((values == top) | np.isnan(top), place, len(values)), offsets[:-1])
