"""Arrow into NumPy: one column of a query's result, through Arrow's C stream interface, without an object per entry.

DuckDB hands its result over as a capsule with an ArrowArrayStream. The structures here are those of Arrow's C data
interface; every buffer is copied before its owner is released.

Knows nothing of SQL, nor of what a column means.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Final, Generic, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.arrays import Bools, Floats, Integers, Scalar
from conformal_arbitrage.scorelog.texts import TextBytes

_NUMBERS, _TEXTS, _LISTS = "g", "U", "+L"
_STREAM: Final = b"arrow_array_stream"


class ArrowError(Exception):
    """A stream broke off, or holds another type than was asked for."""


@runtime_checkable
class ArrowStream(Protocol):
    """Anything with the Arrow PyCapsule interface: polars and pyarrow tables, record batches, relations."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return a capsule with an ArrowArrayStream."""
        ...


class _Schema(ctypes.Structure):
    """ArrowSchema: the type of a column and of what is in it."""


class _Array(ctypes.Structure):
    """ArrowArray: the entries of a column."""


class _Stream(ctypes.Structure):
    """ArrowArrayStream: a table, some rows at a time."""


_Schema._fields_ = [
    ("format", ctypes.c_char_p),
    ("name", ctypes.c_char_p),
    ("metadata", ctypes.c_char_p),
    ("flags", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("children", ctypes.POINTER(ctypes.POINTER(_Schema))),
    ("dictionary", ctypes.POINTER(_Schema)),
    ("release", ctypes.CFUNCTYPE(None, ctypes.POINTER(_Schema))),
    ("private_data", ctypes.c_void_p),
]
_Array._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_Array))),
    ("dictionary", ctypes.POINTER(_Array)),
    ("release", ctypes.CFUNCTYPE(None, ctypes.POINTER(_Array))),
    ("private_data", ctypes.c_void_p),
]
_Stream._fields_ = [
    ("get_schema", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Stream), ctypes.POINTER(_Schema))),
    ("get_next", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Stream), ctypes.POINTER(_Array))),
    ("get_last_error", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.POINTER(_Stream))),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def number_lists(source: ArrowStream, rows: int) -> tuple[Floats, Integers]:
    """Return the only column of a stream, lists of doubles: all numbers (NaN for null), and each length (-1 for null).

    Args:
        source: the stream.
        rows: about how many rows it has, so that memory is claimed once.
    """
    values, sizes = _Growing(np.float64, rows), _Growing(np.int64, rows)
    for column in _chunks(source, [_LISTS, _NUMBERS]):
        values.add(_numbers(*_inside(column)), int(column.length))
        sizes.add(_lengths(column), int(column.length))
    return values.array(), sizes.array()


def text_bytes(source: ArrowStream, rows: int) -> TextBytes:
    """Return the only column of a stream, texts; null is the empty one. See `number_lists`."""
    data, sizes = _Growing(np.uint8, rows), _Growing(np.int64, rows)
    for column in _chunks(source, [_TEXTS]):
        _add_texts(data, sizes, (column, 0, int(column.length)), int(column.length))
    return TextBytes(data.array(), _bounds_of(sizes.array()))


def text_lists(source: ArrowStream, rows: int) -> tuple[TextBytes, Integers]:
    """Return the only column of a stream, lists of texts: all texts, and each length (-1 for null). See `number_lists`."""
    data, sizes, lengths = _Growing(np.uint8, rows), _Growing(np.int64, rows), _Growing(np.int64, rows)
    for column in _chunks(source, [_LISTS, _TEXTS]):
        _add_texts(data, sizes, _inside(column), int(column.length))
        lengths.add(_lengths(column), int(column.length))
    return TextBytes(data.array(), _bounds_of(sizes.array())), lengths.array()


class _Growing(Generic[Scalar]):
    """An array that is filled piece by piece: claimed as large as the first piece lets expect, and cut at the end."""

    def __init__(self, dtype: type[Scalar], rows: int) -> None:
        self._array: NDArray[Scalar] = np.empty(0, dtype)
        self._rows, self._filled = rows, 0

    def add(self, piece: NDArray[Scalar], rows: int) -> None:
        """Add the entries of some rows."""
        end = self._filled + len(piece)
        if not self._filled:
            self._array = np.empty(max(len(piece) * self._rows // max(rows, 1), end), piece.dtype)
        elif end > len(self._array):
            self._array.resize(end + end // 4, refcheck=False)
        self._array[self._filled : end] = piece
        self._filled = end

    def array(self) -> NDArray[Scalar]:
        """Return all entries."""
        self._array.resize(self._filled, refcheck=False)
        return self._array


def _chunks(source: ArrowStream, formats: Sequence[str]) -> Iterator[Any]:
    """Yield the only column of a stream, some rows at a time; the buffers last until the next are asked for."""
    capsule = source.__arrow_c_stream__()  # owns the stream, and releases it
    stream: Any = _Stream.from_address(_pointer_of(capsule, _STREAM))
    _check_types(stream, formats)
    while (array := _next(stream)) is not None:
        try:
            yield array.children[0].contents
        finally:
            array.release(array)


def _next(stream: Any) -> Any:
    """Return the next rows of a stream; None at its end."""
    array: Any = _Array()
    _succeed(stream, stream.get_next(stream, array))
    return array if array.release else None


def _succeed(stream: Any, code: int) -> None:
    if code:
        raise ArrowError((stream.get_last_error(stream) or b"the stream broke off").decode(errors="replace"))


def _check_types(stream: Any, formats: Sequence[str]) -> None:
    """Refuse a stream of other types: its buffers would be misread."""
    schema: Any = _Schema()
    _succeed(stream, stream.get_schema(stream, schema))
    try:
        column, types = schema, list[str]()
        while column.n_children == 1:
            column = column.children[0].contents
            types.append(column.format.decode())
        if types != list(formats):
            raise ArrowError(f"a column of Arrow type {'/'.join(types)}, not {'/'.join(formats)}")
    finally:
        schema.release(schema)


def _buffer(array: Any, number: int, dtype: type[Scalar], count: int) -> NDArray[Scalar]:
    address: int | None = array.buffers[number]
    if address is None or not count:
        return np.zeros(0, dtype)
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(memoryview((ctypes.c_char * size).from_address(address)), dtype)


def _valid(array: Any, start: int, stop: int) -> Bools | None:
    """Return which entries are not null; None if none is."""
    if array.null_count == 0 or array.buffers[0] is None:
        return None
    bits = _buffer(array, 0, np.uint8, -(-stop // 8))
    return np.unpackbits(bits, bitorder="little", count=stop)[start:].astype(np.bool_)


def _bounds(array: Any, start: int, count: int) -> Integers:
    """Return where entries begin and end in what is inside them."""
    first = int(array.offset) + start
    return _buffer(array, 1, np.int64, first + count + 1)[first:]


def _lengths(array: Any) -> Integers:
    """Return the length of each list, -1 for null; a null list holds nothing in DuckDB's results."""
    count, first = int(array.length), int(array.offset)
    sizes, valid = np.diff(_bounds(array, 0, count)), _valid(array, first, first + count)
    return sizes if valid is None else np.where(valid, sizes, -1)


def _inside(array: Any) -> tuple[Any, int, int]:
    """Return what the lists of a column hold: the entries, the first of them, and how many."""
    bounds = _bounds(array, 0, int(array.length))
    ends = (int(bounds[0]), int(bounds[-1])) if len(bounds) else (0, 0)
    return array.children[0].contents, ends[0], ends[1] - ends[0]


def _numbers(array: Any, start: int, count: int) -> Floats:
    first = int(array.offset) + start
    values, valid = _buffer(array, 1, np.float64, first + count)[first:], _valid(array, first, first + count)
    return values if valid is None else np.where(valid, values, np.nan)


def _add_texts(data: _Growing[np.uint8], sizes: _Growing[np.int64], texts: tuple[Any, int, int], rows: int) -> None:
    """Add texts of some rows, given where they are, from which on, and how many."""
    bounds = _bounds(*texts)
    start, stop = (int(bounds[0]), int(bounds[-1])) if len(bounds) else (0, 0)
    data.add(_buffer(texts[0], 2, np.uint8, stop)[start:], rows)
    sizes.add(np.diff(bounds), rows)


def _bounds_of(sizes: Integers) -> Integers:
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    return bounds
