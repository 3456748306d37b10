"""Columns of text: bytes into arrays without a Python object per text, whether all are distinct, and how they are digested.

Short texts are laid out in rows of whole words, which NumPy works through; long ones become Python strings.

Knows nothing of what the texts mean.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.arrays import Integers

Strings = NDArray[Any]
"""Text of any length, without a Python object per entry (numpy.dtypes.StringDType)."""

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
        sizes: how many each text has.
    """

    data: NDArray[np.uint8]
    sizes: Integers

    def strings(self) -> Strings:
        """Return the texts as one array."""
        array = np.empty(len(self.sizes), np.dtypes.StringDType())
        for start, block in self._blocks():
            array[start : start + len(block.sizes)] = block._few(block._words())
        return array

    def ids(self) -> tuple[Strings, bool]:
        """Return the texts as one array, and whether they are surely distinct and none is empty.

        Equal texts have equal keys, and the empty one has key 0. That two others share a key has a chance of about
        n^2 / 2^65; "surely" is not said then.
        """
        array, keys = np.empty(len(self.sizes), np.dtypes.StringDType()), np.zeros(len(self.sizes), np.uint64)
        for start, block in self._blocks():
            words = block._words()
            array[start : start + len(block.sizes)] = block._few(words)
            if words is not None:
                keys[start : start + len(block.sizes)] = _keys(words)
        return array, bool(keys.all()) and _all_distinct(keys)

    def _blocks(self) -> Iterator[tuple[int, "TextBytes"]]:
        """Yield texts that fit the processor's cache, and the number of the first."""
        ends = np.cumsum(self.sizes)
        for start in range(0, len(self.sizes), _AT_ONCE):
            own = self.sizes[start : start + _AT_ONCE]
            yield start, TextBytes(self.data[ends[start] - own[0] : ends[start + len(own) - 1]], own)

    def _words(self) -> NDArray[np.uint64] | None:
        """Return the bytes of each text, filled up with zeros to whole words; None if one is long or has a zero in it."""
        longest = int(self.sizes.max())
        if longest > _LONGEST or not self.data.all():
            return None
        data = np.concatenate([self.data, np.zeros(_WORD, np.uint8)])
        at: NDArray[np.uint64] = np.ndarray(
            len(self.data) + 1, "<u8", data, strides=(1,)
        )  # the word that begins at each byte
        words = np.empty((len(self.sizes), max(-(-longest // _WORD), 1)), "<u8")
        left, place = self.sizes, np.cumsum(self.sizes) - self.sizes
        for k in range(words.shape[1]):
            words[:, k] = at[place] & _FIRST_BYTES[np.minimum(left, _WORD)]
            left, place = np.maximum(left - _WORD, 0), np.minimum(place + _WORD, len(self.data))
        return words

    def _few(self, words: NDArray[np.uint64] | None) -> NDArray[Any] | list[str]:
        """Return the texts, given their words, if they were laid out."""
        if words is not None:
            return words.view(f"S{_WORD * words.shape[1]}").ravel()
        raw, ends = self.data.tobytes(), np.cumsum(self.sizes).tolist()
        return [raw[end - size : end].decode() for end, size in zip(ends, self.sizes.tolist(), strict=True)]


def _keys(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return one number per row, for which words of zeros at its end do not matter."""
    keys = words[:, 0] * _ODD[0]
    for k in range(1, words.shape[1]):
        keys += words[:, k] * _ODD[k]
    return keys


def _all_distinct(keys: NDArray[np.uint64]) -> bool:
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


def framed(texts: Strings) -> Iterator[bytes]:
    """Yield texts in UTF-8, one after the other, each after its length in four bytes; some at a time."""
    for start in range(0, len(texts), _AT_ONCE):
        own = texts[start : start + _AT_ONCE]
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
