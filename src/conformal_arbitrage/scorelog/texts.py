"""Columns of text: bytes into arrays without a Python object per text, whether all are distinct, and how they are digested.

Short texts are laid out in rows of whole words, which NumPy works through; long ones become Python strings.

Knows nothing of what the texts mean.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.arrays import Integers

Strings = NDArray[Any]
"""Text of any length, without a Python object per entry (numpy.dtypes.StringDType)."""
Keys = NDArray[np.uint64]
"""Numbers that stand for texts: equal ones for equal texts."""

_AT_ONCE: Final = 1 << 16
_WORD: Final = 8
_LONGEST: Final = 256
_ODD: Final = np.random.default_rng(0).integers(1 << 63, size=_LONGEST // _WORD, dtype=np.uint64) | np.uint64(1)
_FIRST_BYTES: Final = np.array([(1 << (8 * count)) - 1 for count in range(_WORD + 1)], dtype="<u8")


@dataclass(frozen=True, slots=True)
class TextBytes:
    """Texts in UTF-8, one after the other.

    Attributes:
        data: all bytes.
        bounds: where each text begins, and where the last one ends.
    """

    data: NDArray[np.uint8]
    bounds: Integers

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, rows: slice) -> "TextBytes":
        start, stop, _ = rows.indices(len(self))
        return TextBytes(self.data, self.bounds[start : stop + 1])

    def strings(self) -> Strings:
        """Return the texts as one array."""
        array = np.empty(len(self), np.dtypes.StringDType())
        for start, block in self._blocks():
            array[start : start + len(block)] = block._few(block._words())
        return array

    def ids(self) -> tuple[Strings, bool]:
        """Return the texts as one array, and whether they are surely distinct and none is empty; see `hash_keys`."""
        array, keys = np.empty(len(self), np.dtypes.StringDType()), np.zeros(len(self), np.uint64)
        for start, block in self._blocks():
            words = block._words()
            array[start : start + len(block)] = block._few(words)
            if words is not None:
                keys[start : start + len(block)] = _keys(words)
        return array, bool(keys.all()) and all_distinct(keys)

    def hash_keys(self) -> Iterator[Keys]:
        """Yield a key for each text, some at a time.

        Equal texts have equal keys, and the empty one has key 0. That two others share a key has a chance of about
        n^2 / 2^65; they are not surely distinct then. Texts without words have key 0, which says nothing.
        """
        for _, block in self._blocks():
            words = block._words()
            yield np.zeros(len(block), np.uint64) if words is None else _keys(words)

    def each(self) -> list[bytes]:
        """Return the bytes of each text by itself."""
        raw, bounds = self._own().tobytes(), (self.bounds - self.bounds[0]).tolist()
        return [raw[start:stop] for start, stop in pairwise(bounds)]

    def has_empty(self) -> bool:
        """Return whether any text is empty."""
        return bool((self.bounds[1:] == self.bounds[:-1]).any())

    def framed(self) -> bytes:
        """Return the texts, each after its length in four bytes."""
        sizes = np.diff(self.bounds)
        starts = self.bounds[:-1] - self.bounds[0] + 4 * np.arange(len(self))
        whole = np.empty(len(self._own()) + 4 * len(self), np.uint8)
        is_text = np.ones(len(whole), np.bool_)
        _words_at(whole, "<u4")[starts] = sizes
        _words_at(is_text, "<u4")[starts] = 0
        whole[is_text] = self._own()
        return whole.tobytes()

    def _own(self) -> NDArray[np.uint8]:
        return self.data[self.bounds[0] : self.bounds[-1]]

    def _blocks(self) -> Iterator[tuple[int, "TextBytes"]]:
        """Yield texts that fit the processor's cache, and the number of the first."""
        return ((start, self[start : start + _AT_ONCE]) for start in range(0, len(self), _AT_ONCE))

    def _words(self) -> NDArray[np.uint64] | None:
        """Return the bytes of each text, filled up with zeros to whole words; None if one is long or has a zero in it."""
        left, own = np.diff(self.bounds), self._own()
        longest = int(left.max())
        if longest > _LONGEST or not own.all():
            return None
        at = _words_at(np.concatenate([own, np.zeros(_WORD, np.uint8)]), "<u8")
        words = np.empty((len(self), max(-(-longest // _WORD), 1)), "<u8")
        place = self.bounds[:-1] - self.bounds[0]
        for k in range(words.shape[1]):
            words[:, k] = at[place] & _FIRST_BYTES[np.minimum(left, _WORD)]
            left, place = np.maximum(left - _WORD, 0), np.minimum(place + _WORD, len(own))
        return words

    def _few(self, words: NDArray[np.uint64] | None) -> NDArray[Any] | list[str]:
        """Return the texts, given their words, if they were laid out."""
        if words is not None:
            return words.view(f"S{_WORD * words.shape[1]}").ravel()
        return [text.decode() for text in self.each()]


def _words_at(data: NDArray[Any], kind: str) -> NDArray[Any]:
    """Return the word that begins at each byte, as a view in which they overlap."""
    width = np.dtype(kind).itemsize
    return np.ndarray(max(len(data) - width + 1, 0), kind, data, strides=(1,))


def _keys(words: NDArray[np.uint64]) -> Keys:
    """Return one number per row, for which words of zeros at its end do not matter."""
    keys = _folded(words[:, 0]) * _ODD[0]
    for k in range(1, words.shape[1]):
        keys += _folded(words[:, k]) * _ODD[k]
    return keys


def _folded(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return other words, different ones for different words, in which the last bytes of a word, its high bits, matter more.

    A multiplication carries low bits up, never high bits down: two texts that differ in the last bytes of words only, as
    with two counters side by side, would often share a key.
    """
    return words ^ (words >> np.uint64(32))


def all_distinct(keys: Keys) -> bool:
    """Return whether no two keys are equal.

    Each key is put into the place that its first bits name. Of those that share a place one stays; the others are compared
    with it, and sorted to be compared with each other.
    """
    row = np.arange(len(keys), dtype=np.uint32 if len(keys) < 1 << 32 else np.uint64)
    bits = (2 * len(keys)).bit_length()
    place = (keys >> np.uint64(64 - bits)).astype(np.int64)
    table = np.empty(1 << bits, row.dtype)
    table[place] = row
    stayed = table[place]
    others = np.flatnonzero(stayed != row)
    ordered = np.sort(keys[others])
    return not ((keys[stayed[others]] == keys[others]).any() or (ordered[1:] == ordered[:-1]).any())


def framed(texts: Strings | TextBytes) -> Iterator[bytes]:
    """Yield texts in UTF-8, one after the other, each after its length in four bytes; some at a time."""
    for start in range(0, len(texts), _AT_ONCE):
        own = texts[start : start + _AT_ONCE]
        if isinstance(own, TextBytes):
            yield own.framed()
        else:
            rows = _ascii_rows(own)
            yield _framed_strings(own.tolist()) if rows is None else _framed_rows(rows)


def _ascii_rows(texts: Strings) -> NDArray[np.uint8] | None:
    """Return the bytes of each text, filled up with zeros; None if they would not be the text's."""
    longest = int(np.strings.str_len(texts).max())
    if longest > _LONGEST:
        return None
    try:
        packed = texts.astype(f"S{max(longest, 1)}")
    except UnicodeEncodeError:
        return None
    same = packed.astype(texts.dtype) == texts  # a text that ends with zero bytes has lost them
    return packed.view(np.uint8).reshape(len(texts), -1) if same.all() else None


def _framed_rows(rows: NDArray[np.uint8]) -> bytes:
    sizes = np.strings.str_len(rows.view(f"S{rows.shape[1]}").ravel()).astype("<u4")
    whole = np.concatenate([sizes.view(np.uint8).reshape(-1, 4), rows], axis=1)
    ends = sizes.astype(np.uint16)[:, None] + np.uint16(4)
    return whole[np.arange(whole.shape[1], dtype=np.uint16) < ends].tobytes()


def _framed_strings(texts: Sequence[str]) -> bytes:
    encoded = [text.encode() for text in texts]
    return b"".join(piece for one in encoded for piece in (len(one).to_bytes(4, "little"), one))
