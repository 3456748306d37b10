"""Digests of what a calibration depends on, whatever the order of rows."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.exact import Integers
from conformal_arbitrage.scorelog.tables import Strings, TextBytes

# --- Hashes of rows, many at a time ---


Words = NDArray[np.uint64]
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def row_hashes(digits: int, offsets: Integers, arrays: Iterable[NDArray[Any]], ids: TextBytes | None) -> Words:
    """Return the hash of each row.

    Args:
        digits: of the Primary scores.
        offsets: where each row begins, from 0.
        arrays: numbers per action.
        ids: of the rows.
    """
    sizes = np.diff(offsets)
    places = _places(offsets)
    rows = ((digits << 32) + sizes).astype(np.uint64) * _ODD
    for number, values in enumerate(arrays):
        bits = (values + 0.0).view(np.uint64)  # -0.0 becomes 0.0
        rows += _sums(_mixed(bits + (places + np.uint64(number << 32)) * _ODD), offsets)
    if ids is not None:
        rows += _mixed(_text_hashes(ids))
    return _mixed(rows)


def _text_hashes(texts: TextBytes) -> Words:
    """Return a number for each text, whatever the texts beside it: of its words, or else of its bytes."""
    words = texts.words()
    if words is not None:
        return _word_sums(words)
    hashes, usual = _byte_sums(texts), texts.has_words()
    words = texts.some(usual).words() if usual.any() else None
    if words is not None:
        hashes[usual] = _word_sums(words)
    return hashes


def _word_sums(words: Words) -> Words:
    """Return a weighted sum over the words of each text; zeros at its end do not matter."""
    weights = _mixed(np.arange(1, words.shape[1] + 1, dtype=np.uint64) * _ODD) | np.uint64(1)
    sums = np.zeros(len(words), np.uint64)
    for weight, column in zip(weights, words.T, strict=True):
        sums += (column ^ (column >> np.uint64(32))) * weight  # a product carries no high bits down
    return sums


def _byte_sums(texts: TextBytes) -> Words:
    """Return a weighted sum over the bytes of each text."""
    bounds = texts.bounds - texts.bounds[0]
    places = _places(bounds)
    weights = _mixed(np.arange(1, int(places.max(initial=0)) + 2, dtype=np.uint64) * _ODD)
    data = texts.data[texts.bounds[0] : texts.bounds[-1]]
    return _sums((data + np.uint64(1)) * weights[places.astype(np.int64)], bounds)


def _places(bounds: Integers) -> Words:
    """Return the place of each entry in its row."""
    return (np.arange(int(bounds[-1])) - np.repeat(bounds[:-1], np.diff(bounds))).astype(np.uint64)


def _sums(words: Words, bounds: Integers) -> Words:
    """Return the sum of each row's words; rows may be empty."""
    total = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(words, out=total[1:])
    return total[bounds[1:]] - total[bounds[:-1]]


def _mixed(words: Words) -> Words:
    """Mix the bits of each word, in place, so that each of them matters to all."""
    for bits, factor in _STEPS:
        words ^= words >> np.uint64(bits)
        words *= np.uint64(factor)
    return words


# --- Digests of what a calibration depends on ---


AT_ONCE: Final = 1 << 16
"""The checksum of so many actions is made at once."""
_ROWS_AT_ONCE: Final = 1 << 13


def sum_of_hashes(
    digits: int, offsets: Integers, arrays: Sequence[NDArray[Any] | None], ids: Strings | TextBytes | None
) -> int:
    """Return the sum of the hashes of some rows, modulo 2^64.

    Args:
        digits: of the Primary scores.
        offsets: where each row begins.
        arrays: numbers per action; None where there are none.
        ids: of the rows.
    """
    starts = range(0, len(offsets) - 1, _ROWS_AT_ONCE)
    return sum(_hash_sum(digits, offsets, arrays, ids, start) for start in starts) % (1 << 64)


def _hash_sum(
    digits: int, offsets: Integers, arrays: Sequence[NDArray[Any] | None], ids: Strings | TextBytes | None, start: int
) -> int:
    """Return the sum over some rows, few enough for the processor's cache."""
    bounds = offsets[start : start + _ROWS_AT_ONCE + 1]
    flat = slice(int(bounds[0]), int(bounds[-1]))
    numbers = [values[flat] for values in arrays if values is not None]
    texts = None if ids is None else ids[start : start + _ROWS_AT_ONCE]
    packed = texts if texts is None or isinstance(texts, TextBytes) else TextBytes.of(texts)
    return int(row_hashes(digits, bounds - bounds[0], numbers, packed).sum())


def checksum(arrays: Sequence[NDArray[Any]]) -> int:
    """Return a sum over all actions, modulo 2^64, that depends on every bit of their numbers, but not on their order."""
    starts = range(0, len(arrays[0]), AT_ONCE)
    return sum(_sum_of_bits([values[start : start + AT_ONCE] for values in arrays]) for start in starts) % (1 << 64)


def _sum_of_bits(arrays: Sequence[NDArray[Any]]) -> int:
    """Return the sum over some actions, few enough for the processor's cache."""
    total = np.zeros(len(arrays[0]), np.int64)
    for values in arrays:
        bits = (values + 0.0).view(np.int64)
        total *= bits | 1
        total += bits
    return int(total.sum())


def log_digest(rows: int, total: int) -> str:
    """Return the digest of a log, given the number of its rows and the sum of their hashes."""
    return hashlib.sha256(f"{rows};{total % (1 << 64):x}".encode()).hexdigest()
