"""Flat arrays with offsets, walked as rectangular blocks.

Rows of one size form actions x rows blocks that fit the processor's cache, so no copy of all scores is ever made.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.exact import Bools, Floats, Indices, Integers, Scalar

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
        offsets: where each row starts.
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
            own = rows[start : start + step]
            flat = offsets[own][:, None] + np.arange(size)
            yield Block(rows=own, flat=flat.ravel(), size=size)


def _even_blocks(n: int, size: int, scores: int) -> Iterator[Block]:
    step = max(1, scores // size)
    for start in range(0, n, step):
        stop = min(start + step, n)
        yield Block(rows=slice(start, stop), flat=slice(start * size, stop * size), size=size)
