"""Hashes of rows, many at a time: equal for equal rows, on every machine. They show a change, but not a forgery.

Every number counts with its place: the words are mixed (by the last step of SplitMix64, Steele, Lea and Flood 2014), added
up row by row, and the sums mixed again, all modulo 2^64.

Knows nothing of what the rows mean.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.arrays import Integers
from conformal_arbitrage.scorelog.texts import TextBytes

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
        rows += _mixed(_text_sums(ids))
    return _mixed(rows)


def _text_sums(texts: TextBytes) -> Words:
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
