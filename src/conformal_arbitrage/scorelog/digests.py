"""Digests of what a calibration depends on: of a log in memory, and of one in many files, in any order.

A file's digest is that of the digests of its leaves, 65,536 rows each, in order; the digest of many files is that of
theirs, sorted. So parts of files can be digested anywhere, and names and order of the files do not matter. Rows of a table
have no order: theirs is the sum of their hashes, which shows a change, but not a forgery.

Knows nothing of how files are read.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.arrays import Integers
from conformal_arbitrage.scorelog.hashes import row_hashes
from conformal_arbitrage.scorelog.tables import Strings
from conformal_arbitrage.scorelog.texts import TextBytes, framed

LEAF: Final = 1 << 16
FILES: Final = "files:"
"""The digest of a log in several files begins with this."""
ROWS: Final = "rows:"
"""The digest of rows without an order begins with this."""
_ROWS_AT_ONCE: Final = 1 << 13


def rows_digest(digits: int, arrays: Iterable[NDArray[Any] | None], ids: Strings | TextBytes | None) -> str:
    """Return the digest of some rows.

    Args:
        digits: of the Primary scores.
        arrays: offsets and then numbers per action; None where there are none.
        ids: of the rows.
    """
    present = [values for values in arrays if values is not None]
    digest = hashlib.sha256(f"score log 1;digits {digits};rows {len(present[0]) - 1}".encode())
    for values in present:
        digest.update(b";")
        canonical = (values + 0).astype("<f8" if values.dtype.kind == "f" else "<i8", copy=False)  # -0.0 becomes 0.0
        digest.update(canonical.data)
    for piece in framed(ids) if ids is not None else ():
        digest.update(piece)
    return digest.hexdigest()


def leaf_digests(
    digits: int, offsets: Integers, arrays: Sequence[NDArray[Any] | None], ids: Strings | TextBytes | None
) -> tuple[str, ...]:
    """Return the digest of every leaf of some rows that begin with one."""
    return tuple(_leaf_digest(digits, offsets, arrays, ids, start) for start in range(0, len(offsets) - 1, LEAF))


def _leaf_digest(
    digits: int, offsets: Integers, arrays: Sequence[NDArray[Any] | None], ids: Strings | TextBytes | None, start: int
) -> str:
    own = offsets[start : start + LEAF + 1]
    flat = slice(int(own[0]), int(own[-1]))
    parts = [None if values is None else values[flat] for values in arrays]
    return rows_digest(digits, [own - own[0], *parts], None if ids is None else ids[start : start + LEAF])


def files_digest(leaves: Iterable[Sequence[str]]) -> str:
    """Return the digest of a log in several files, given the digests of the leaves of each."""
    files = sorted(hashlib.sha256("".join(own).encode()).hexdigest() for own in leaves)
    return FILES + hashlib.sha256("".join(files).encode()).hexdigest()


def sum_of_hashes(digits: int, offsets: Integers, arrays: Sequence[NDArray[Any] | None], ids: TextBytes | None) -> int:
    """Return the sum of the hashes of some rows, modulo 2^64; the arguments are those of `leaf_digests`."""
    starts = range(0, len(offsets) - 1, _ROWS_AT_ONCE)
    return sum(_hash_sum(digits, offsets, arrays, ids, start) for start in starts) % (1 << 64)


def _hash_sum(
    digits: int, offsets: Integers, arrays: Sequence[NDArray[Any] | None], ids: TextBytes | None, start: int
) -> int:
    """Return the sum over some rows, few enough for the processor's cache."""
    own = offsets[start : start + _ROWS_AT_ONCE + 1]
    flat = slice(int(own[0]), int(own[-1]))
    numbers = [values[flat] for values in arrays if values is not None]
    texts = None if ids is None else ids[start : start + _ROWS_AT_ONCE]
    return int(row_hashes(digits, own - own[0], numbers, texts).sum())


def checksum(arrays: Sequence[NDArray[Any]]) -> int:
    """Return a sum over all actions, modulo 2^64, that depends on every bit of their numbers, but not on their order."""
    starts = range(0, len(arrays[0]), LEAF)
    return sum(_sum_of_bits([values[start : start + LEAF] for values in arrays]) for start in starts) % (1 << 64)


def _sum_of_bits(arrays: Sequence[NDArray[Any]]) -> int:
    """Return the sum over some actions, few enough for the processor's cache."""
    total = np.zeros(len(arrays[0]), np.int64)
    for values in arrays:
        bits = (values + 0.0).view(np.int64)
        total *= bits | 1
        total += bits
    return int(total.sum())


def rows_without_order(rows: int, total: int) -> str:
    """Return the digest of rows without an order, given their number and the sum of their hashes."""
    return ROWS + hashlib.sha256(f"{rows};{total % (1 << 64):x}".encode()).hexdigest()
