"""Tables in and out: files and frames, read by DuckDB into flat arrays without an object per entry."""

import csv
import ctypes
import json
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.exact import Bools, Floats, Integers, Scalar, digits_of, flat_positions, numbers_or_none
from conformal_arbitrage.errors import OptionError, OutputError, ScoreLogError

if TYPE_CHECKING:
    import duckdb


# --- Columns of text ---


Strings = NDArray[Any]
"""Text of any length, without a Python object per entry (numpy.dtypes.StringDType)."""
Keys = NDArray[np.uint64]
"""Numbers that stand for texts: equal ones for equal texts."""

_AT_ONCE: Final = 1 << 16
_WORD: Final = 8
_LONGEST: Final = 256
_FIRST_BYTES: Final = np.array([(1 << (8 * count)) - 1 for count in range(_WORD + 1)], dtype="<u8")


@dataclass(frozen=True, slots=True)
class TextBytes:
    """Texts in UTF-8, one after the other.

    Attributes:
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
        for start, block in self.blocks():
            array[start : start + len(block)] = block._few(block.words())
        return array

    def ids(self) -> tuple[Strings, bool]:
        """Return the texts as one array, and whether they are surely distinct and none is empty; see `hash_keys`."""
        array, keys = np.empty(len(self), np.dtypes.StringDType()), np.zeros(len(self), np.uint64)
        for start, block in self.blocks():
            words = block.words()
            array[start : start + len(block)] = block._few(words)
            if words is not None:
                keys[start : start + len(block)] = _keys(words)
        return array, surely_distinct(keys)

    def hash_keys(self) -> Iterator[Keys]:
        """Yield a key for each text, some at a time.

        Equal texts have equal keys, and the empty one has key 0. That two others share a key has a chance of about
        n^2 / 2^65; they are not surely distinct then. Texts without words have key 0, which says nothing.
        """
        for _, block in self.blocks():
            words = block.words()
            yield np.zeros(len(block), np.uint64) if words is None else _keys(words)

    def each(self) -> list[bytes]:
        """Return the bytes of each text by itself."""
        raw, bounds = self._own().tobytes(), (self.bounds - self.bounds[0]).tolist()
        return [raw[start:stop] for start, stop in pairwise(bounds)]

    @classmethod
    def of(cls, texts: Strings) -> "TextBytes":
        """Return the bytes of some texts."""
        rows = _ascii_rows(texts) if len(texts) else None
        if rows is not None:
            sizes = np.strings.str_len(texts)
            return cls(rows[np.arange(rows.shape[1]) < sizes[:, None]], np.concatenate([[0], np.cumsum(sizes)]))
        each = [text.encode() for text in texts.tolist()]
        return cls(np.frombuffer(b"".join(each), np.uint8), np.cumsum([0, *map(len, each)]))

    def some(self, chosen: Bools) -> "TextBytes":
        """Return some of the texts."""
        sizes = np.diff(self.bounds)[chosen]
        return TextBytes(self.data[flat_positions(self.bounds[:-1][chosen], sizes)], np.cumsum([0, *sizes.tolist()]))

    def has_words(self) -> Bools:
        """Return which texts can be laid out in words; see `words`."""
        zeros = np.concatenate([[0], np.cumsum(self.data == 0)])[self.bounds]
        return (np.diff(self.bounds) <= _LONGEST) & (np.diff(zeros) == 0)

    def has_empty(self) -> bool:
        """Return whether any text is empty."""
        return bool((self.bounds[1:] == self.bounds[:-1]).any())

    def _own(self) -> NDArray[np.uint8]:
        return self.data[self.bounds[0] : self.bounds[-1]]

    def blocks(self) -> Iterator[tuple[int, "TextBytes"]]:
        """Yield texts that fit the processor's cache, and the number of the first."""
        return ((start, self[start : start + _AT_ONCE]) for start in range(0, len(self), _AT_ONCE))

    def words(self) -> NDArray[np.uint64] | None:
        """Return the bytes of each text, filled up with zeros to whole words; None if one is long or has a zero in it."""
        left, data = np.diff(self.bounds), self._own()
        longest = int(left.max())
        if longest > _LONGEST or not data.all():
            return None
        at = _words_at(np.concatenate([data, np.zeros(_WORD, np.uint8)]), "<u8")
        words = np.empty((len(self), max(-(-longest // _WORD), 1)), "<u8")
        place = self.bounds[:-1] - self.bounds[0]
        for k in range(words.shape[1]):
            words[:, k] = at[place] & _FIRST_BYTES[np.minimum(left, _WORD)]
            left, place = np.maximum(left - _WORD, 0), np.minimum(place + _WORD, len(data))
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


@cache
def _odd_numbers() -> NDArray[np.uint64]:
    draws = np.random.default_rng(0).integers(1 << 63, size=_LONGEST // _WORD, dtype=np.uint64)
    return draws | np.uint64(1)


def _keys(words: NDArray[np.uint64]) -> Keys:
    """Return one number per row, for which words of zeros at its end do not matter."""
    odd = _odd_numbers()
    keys = _folded(words[:, 0]) * odd[0]
    for k in range(1, words.shape[1]):
        keys += _folded(words[:, k]) * odd[k]
    return keys


def _folded(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return other words, different ones for different words, in which the last bytes of a word, its high bits, matter more.

    A multiplication carries low bits up, never high bits down: two texts that differ in the last bytes of words only, as
    with two counters side by side, would often share a key.
    """
    return words ^ (words >> np.uint64(32))


def all_distinct(keys: Keys) -> bool:
    """Return whether no two keys are equal."""
    ordered = np.sort(keys)
    return not (ordered[1:] == ordered[:-1]).any()


def surely_distinct(keys: Keys) -> bool:
    """Return whether all texts with these keys are surely distinct, and none is empty; see `TextBytes.hash_keys`."""
    return bool(keys.all()) and all_distinct(keys)


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


# --- Arrow into NumPy ---


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


def _text_pieces(source: ArrowStream) -> Iterator[TextBytes]:
    """Yield the only column of a stream, texts, some rows at a time; each lasts until the next is asked for."""
    for column in _chunks(source, [_TEXTS]):
        bounds = _bounds(column, 0, int(column.length))
        yield TextBytes(_buffer(column, 2, np.uint8, int(bounds[-1])), bounds)


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


# --- Columns of a table that DuckDB holds ---


_Result = TypeVar("_Result")
Column = tuple[str, NDArray[Any]]

METADATA_KEY = "conformal_arbitrage"
"""Under this key a table carries its JSON document."""

_NUMBER_TYPES = re.compile(r"(TINYINT|SMALLINT|INTEGER|BIGINT|HUGEINT|U\w*INT\w*|FLOAT|DOUBLE|DECIMAL\(.*\))")
_NUMBER_LISTS = re.compile(rf'({_NUMBER_TYPES.pattern}|"NULL")\[\d*\]|"NULL"')
_SINGLE_LISTS = re.compile(r"FLOAT\[\d*\]")
_RAISED = re.compile(r"^(?:\w+\.)*\w+Error: .*", re.MULTILINE)
_NUMBER = r"([-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|null|[-+]?(NaN|nan|Infinity|inf))"
_NUMBER_LIST = rf"\s*\[\s*({_NUMBER}\s*(,\s*{_NUMBER}\s*)*)?\]\s*"


class _Thread(threading.local):
    """The databases that a thread keeps, by process and number of threads."""

    def __init__(self) -> None:
        self.databases: dict[tuple[int, int | None], duckdb.DuckDBPyConnection] = {}


_THREAD = _Thread()
_MANY_ROWS = 50_000


def open_database(threads: int | None = None) -> "duckdb.DuckDBPyConnection":
    """Open a database in memory, which loads no extensions; by default it works on all cores."""
    import duckdb  # 100 ms that `--help` should not pay

    config: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "arrow_large_buffer_size": "true",
        "enable_external_file_cache": "false",  # a file may change between two reads
    }
    if threads is not None:
        config["threads"] = threads
    return duckdb.connect(config=config)


def connect(threads: int | None = None) -> "duckdb.DuckDBPyConnection":
    """Return a connection to the database that this thread keeps: opening one takes as long as reading 100,000 rows.

    What it creates has to be temporary, and other connections do not see it.
    """
    kept = _THREAD.databases
    key = os.getpid(), threads  # a database does not survive a fork
    if key not in kept:
        kept[key] = open_database(threads)
    return kept[key].cursor()


def disconnect(connection: "duckdb.DuckDBPyConnection", rows: int) -> None:
    """Close a connection; after many rows also the database, which would keep the memory they took."""
    connection.close()
    if rows > _MANY_ROWS:
        _THREAD.databases.pop((os.getpid(), None), None)


class ColumnReader:
    """A temporary table named `source` in a DuckDB connection of its own, read column by column.

    Subclasses load that table and then call `_describe`.

    Attributes:
        source: where the table comes from, for messages.
        types: DuckDB's type of each column.
        rows: how many rows there are.
        metadata: the JSON document that the table carries.
        first_row: the number of rows before these, for messages.
    """

    def __init__(
        self, source: str, *, hint: str, connection: "Callable[[], duckdb.DuckDBPyConnection] | None" = None
    ) -> None:
        import duckdb

        self.source = source
        self.types: dict[str, str] = {}
        self.rows = 0
        self.metadata: Mapping[str, Any] = {}
        self.first_row = 0
        self._hint = hint
        self._connection: duckdb.DuckDBPyConnection = (connection or connect)()
        self._error = duckdb.Error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the table."""
        disconnect(self._connection, self.rows)

    @property
    def single(self) -> frozenset[str]:
        """The list columns in single precision."""
        return frozenset(name for name, kind in self.types.items() if _SINGLE_LISTS.fullmatch(kind))

    def numbers(self, name: str) -> tuple[Floats, Integers]:
        """Return a list column: all numbers in one flat array, and each row's length (-1 for null)."""
        kind = self.types[name]
        if kind in ("VARCHAR", "VARCHAR[]"):
            self._check_number_lists(name)
        elif not _NUMBER_LISTS.fullmatch(kind):
            raise ScoreLogError(f"{self.source}: column '{name}' is {kind}; it must hold a list of numbers in each row")
        return self._read(number_lists, f"select {quoted(name)}::double[] as v from source")

    def numbers_if_any(self, name: str) -> tuple[Floats, Integers] | None:
        """Return a list column as `numbers` does, or None if it holds anything else."""
        try:
            return self.numbers(name)
        except ScoreLogError:
            return None

    def texts(self, name: str) -> Strings:
        """Return a column as text, one entry per row; lists and structures become JSON."""
        return self.text_bytes(name).strings()

    def ids(self, name: str) -> tuple[Strings, bool]:
        """Return a column as text, and whether all entries are surely distinct and none is empty."""
        return self.text_bytes(name).ids()

    def text_bytes(self, name: str) -> TextBytes:
        """Return a column as text in UTF-8, which `texts` and `ids` make arrays of."""
        return self._read(text_bytes, f"select {self._as_text(name)} as v from source")

    def _as_text(self, name: str) -> str:
        """Return a column as SQL that makes text of it."""
        column, kind = quoted(name), self.types[name]
        nested = kind.endswith("]") or kind.startswith(("STRUCT", "MAP", "UNION"))
        return f"to_json({column})::varchar" if nested else f"{column}::varchar"

    def map_texts(self, names: Sequence[str], work: Callable[[slice, TextBytes], None]) -> None:
        """Call a function with some rows, and with columns as one text for each of these, until it was given all rows."""
        cells = [f"coalesce({self._as_text(name)}, '')" for name in names]
        text = cells[0] if len(cells) == 1 else f"concat_ws(chr(31), {', '.join(cells)})"

        def read(stream: ArrowStream, _: int) -> None:
            start = 0
            for piece in _text_pieces(stream):
                for _, texts in piece.blocks():
                    work(slice(start, start := start + len(texts)), texts)

        self._read(read, f"select {text} as v from source")

    def distinct_texts(self, name: str, most: int) -> list[str]:
        """Return the different entries of a column as text, sorted, without null; one more than `most` if there are more."""
        text = self._as_text(name)
        values = self._query(f"select distinct {text} as v from source where {text} is not null limit {most + 1}")["v"]
        return sorted(map(str, values.tolist()))

    def some_rows(self, rows: Integers, names: Sequence[str]) -> list[list[str | None]]:
        """Return the cells of some rows as text, in the order of `rows`, which are counted from 0."""
        picked = np.zeros(self.rows, np.bool_)
        picked[rows] = True
        cells = ", ".join(f"{self._as_text(name)}::varchar as c{k}" for k, name in enumerate(names))
        with self._beside({"picked": picked}):
            columns = self._query(f"select {cells} from beside positional join source where picked")
        texts = [[None if cell is None else str(cell) for cell in column.tolist()] for column in columns.values()]
        return [[column[place] for column in texts] for place in np.argsort(np.argsort(rows))]

    def copy_rows(
        self,
        target: str | Path,
        picked: Bools,
        names: Sequence[str],
        further: Mapping[str, str],
        beside: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Write some rows to a CSV file, numbered from 1, whole or not at all; memory does not grow with them.

        Args:
            further: columns that are not in the table, as SQL over those that are and those beside it.
            beside: arrays with one value per row of the table.
        """
        numbered = {"row": np.arange(1, self.rows + 1, dtype=np.uint32), "picked": picked, **(beside or {})}
        cells = [f"source.{quoted(name)}" for name in names] + [
            f"{sql} as {quoted(name)}" for name, sql in further.items()
        ]
        select = ", ".join(["beside.row as row", *cells])
        with self._beside(numbered), replacing(Path(target)) as draft:
            rows = f"select {select} from beside positional join source where beside.picked"
            self._run(f"copy ({rows}) to {literal(str(draft))} (format csv, header)")

    @contextmanager
    def _beside(self, columns: dict[str, NDArray[Any]]) -> Generator[None]:
        """Put columns, one value per row, beside the table."""
        self._connection.register("beside", columns)
        try:
            yield
        finally:
            self._connection.unregister("beside")

    def text_lists(self, name: str) -> tuple[Strings, Integers]:
        """Return a column of lists of text: flat, and each row's length (-1 for null)."""
        column, kind = quoted(name), self.types[name]
        if kind == "VARCHAR":
            column = f"from_json({column}, '[\"VARCHAR\"]')"
        elif not re.fullmatch(r"VARCHAR\[\d*\]", kind):
            raise ScoreLogError(f"{self.source}: column '{name}' is {kind}; it must hold a list of texts in each row")
        flat, sizes = self._read(text_lists, f"select {column}::varchar[] as v from source")
        return flat.strings(), sizes

    def scalars(self, name: str, *, truths: bool = False) -> Floats:
        """Return a column of single numbers; null is NaN. With `truths`, true and false count as 1 and 0."""
        column, kind = quoted(name), self.types[name]
        if kind == "VARCHAR":
            bad = self._query(
                f"select {column} is not null and {_number(column, truths=truths)} is null as bad from source"
            )["bad"]
            self._refuse(name, bad, "is not a number")
            column = _number(column, truths=truths)
        elif not ((truths and kind == "BOOLEAN") or kind == '"NULL"' or _NUMBER_TYPES.fullmatch(kind)):
            raise ScoreLogError(f"{self.source}: column '{name}' is {kind}; it must hold one number in each row")
        return _filled(self._query(f"select {column}::double as v from source")["v"])

    def anything(self, name: str) -> NDArray[Any]:
        """Return a column as it is, one entry per row.

        Floats keep their type (null is NaN), and so do integers and truth values without a null; all else is text.
        """
        kind = self.types[name]
        if kind in ("FLOAT", "DOUBLE"):
            return self.scalars(name).astype(np.float32 if kind == "FLOAT" else np.float64)
        if kind == "BOOLEAN" or _NUMBER_TYPES.fullmatch(kind):
            values = self._query(f"select {quoted(name)} as v from source")["v"]
            if not np.ma.is_masked(values):
                return np.asarray(values)
        return self.texts(name)

    def others(
        self, names: Sequence[str], sizes: Integers
    ) -> tuple[dict[str, tuple[Floats, Integers]], dict[str, NDArray[Any]]]:
        """Return columns without a role: number lists that line up with the actions, and all else one value per row."""
        lists: dict[str, tuple[Floats, Integers]] = {}
        extra: dict[str, NDArray[Any]] = {}
        for name in names:
            numbers = self.numbers_if_any(name)
            if numbers is not None and ((numbers[1] == sizes) | (numbers[1] < 0)).all() and (numbers[1] > 0).any():
                lists[name] = numbers
            else:
                extra[name] = self.anything(name)
        return lists, extra

    def select(self, columns: Mapping[str, str]) -> None:
        """Let the table have these columns only, each given as SQL over those that it has."""
        [kind] = self._query("select table_type as t from information_schema.tables where table_name = 'source'")["t"]
        self._run(f"alter {'view' if kind == 'VIEW' else 'table'} source rename to selected_from")
        cells = ", ".join(f"{sql} as {quoted(name)}" for name, sql in columns.items())
        self._run(f"create temp view source as select {cells} from selected_from")
        self._describe()

    def _describe(self) -> None:
        """Learn the columns and the number of rows; a table without rows is refused."""
        described = self._query("describe source")
        self.types = dict(zip(described["column_name"].tolist(), described["column_type"].tolist(), strict=True))
        self.rows = int(self._query("select count(*) as n from source")["n"][0])
        if self.rows == 0:
            raise ScoreLogError(f"{self.source}: there are no rows; give it at least one")

    def _refuse_same(self, names: Sequence[str]) -> None:
        same = first_repeated(names)
        if same is not None:
            raise ScoreLogError(f"{self.source}: two columns are called '{same}' (case aside); rename one")

    def _check_number_lists(self, name: str) -> None:
        """Refuse the first row whose text, or list of texts, is not a list of numbers."""
        nested = self.types[name] != "VARCHAR"
        text = f"to_json({quoted(name)})::varchar" if nested else quoted(name)
        good = f"regexp_full_match({text}, {literal(_NUMBER_LIST)}) and try_cast({text} as double[]) is not null"
        bad = self._query(f"select {text} is not null and not ({good}) as bad from source")["bad"]
        self._refuse(name, bad, "is not a list of numbers such as [0.7, 0.3]")

    def _refuse(self, name: str, bad: Bools, problem: str) -> None:
        if bad.any():
            row = int(bad.argmax())
            text = self._query(f"select {quoted(name)}::varchar as v from source limit 1 offset {row}")["v"][0]
            raise ScoreLogError(
                f"{self.source}: row {self.first_row + row + 1}, column '{name}': {text!r:.80} {problem}; correct that row"
            )

    def _run(self, sql: str) -> None:
        self._translating(lambda: self._connection.execute(sql))

    def _query(self, sql: str) -> dict[str, NDArray[Any]]:
        return self._translating(lambda: self._connection.execute(sql).fetchnumpy())  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType, reportReturnType]

    def _read(self, reader: Callable[[ArrowStream, int], _Result], sql: str) -> _Result:
        """Return what an Arrow reader makes of a query."""
        return self._translating(lambda: reader(self._connection.sql(sql), self.rows))

    def _translating(self, work: Callable[[], _Result]) -> _Result:
        try:
            with interruptible():
                return work()
        except (self._error, ArrowError) as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> ScoreLogError:
        raised = _RAISED.findall(str(error))  # by a file system of fsspec, whose traceback is the text
        text = raised[-1] if raised else str(error)
        reason = " ".join(text.split("Possible fixes")[0].split("LINE 1")[0].split())
        return ScoreLogError(f"{self.source}: cannot be read ({reason}); {self._hint}")


@contextmanager
def interruptible() -> Generator[None]:
    """Let Ctrl-C in a query of DuckDB be what it is elsewhere."""
    try:
        yield
    except RuntimeError as error:
        if "interrupted" not in str(error).lower():
            raise
        raise KeyboardInterrupt from error


def strings(values: Sequence[object]) -> Strings:
    """Return text values as one array; None is the empty string."""
    plain = all(type(value) is str for value in values)
    texts = values if plain else ["" if value is None else str(value) for value in values]
    return np.array(texts, dtype=np.dtypes.StringDType())


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumns:
    """A table to be written or handed over.

    Attributes:
        lists: flat arrays that share the offsets.
        metadata: the JSON document that goes with the table; none if empty.
    """

    scalars: Sequence[Column]
    lists: Sequence[Column]
    offsets: Integers
    metadata: Mapping[str, Any]

    def first_repeated(self) -> str | None:
        """Return the first name that repeats an earlier one, case aside."""
        return first_repeated([name for name, _ in (*self.scalars, *self.lists)])


def select_rows(connection: "duckdb.DuckDBPyConnection", table: TableColumns, *, json_lists: bool = False) -> str:
    """Register columns with DuckDB, and return the query that puts them together; NaN and empty text become null."""
    sizes = np.diff(table.offsets)
    row = np.arange(len(sizes))
    flat: dict[str, NDArray[Any]] = {"row": np.repeat(row, sizes), "place": np.arange(table.offsets[-1])}
    flat |= {f"l{k}": without_string_dtype(values) for k, (_, values) in enumerate(table.lists)}
    per_row: dict[str, NDArray[Any]] = {"row": row} | {
        f"s{k}": without_string_dtype(v) for k, (_, v) in enumerate(table.scalars)
    }
    connection.register("flat", flat)
    connection.register("per_row", per_row)
    gathered = ", ".join(f"list(l{k} order by place) as l{k}" for k in range(len(table.lists)))
    show = "to_json({})" if json_lists else "{}"
    columns = [f"s{k} as {quoted(name)}" for k, (name, _) in enumerate(table.scalars)]
    columns += [f"{show.format(f'l{k}')} as {quoted(name)}" for k, (name, _) in enumerate(table.lists)]
    joined = f" join (select row, {gathered} from flat group by row) using (row)" if table.lists else ""
    return f"select {', '.join(columns)} from per_row{joined} order by row"


def as_document(text: str | bytes, source: str) -> Mapping[str, Any]:
    """Return the JSON document that a table carries."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except ValueError as error:
        raise ScoreLogError(f"{source}: its metadata is not a JSON object ({error}); write the log again") from error


def first_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that repeats an earlier one, case aside (DuckDB does not tell them apart)."""
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            return name
        seen.add(name.lower())
    return None


NAME_ROLES: Final = "; name the columns with primary=, guardian= (--primary-column, --guardian-column)"


def refuse_absent_column(name: str, names: Collection[str], source: object, *, remedy: str = NAME_ROLES) -> None:
    """Refuse a table that lacks a column."""
    if name not in names:
        raise ScoreLogError(f"{source}: there is no column '{name}'; it has {', '.join(sorted(names))}{remedy}")


def quoted(name: str) -> str:
    """Return a column's name as SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text as SQL."""
    return "'" + text.replace("'", "''") + "'"


def without_string_dtype(values: NDArray[Any]) -> NDArray[Any]:
    """Return text as Python strings, empty text as None; anything else as it is, contiguous."""
    if not isinstance(values.dtype, np.dtypes.StringDType):
        return np.ascontiguousarray(values)
    return np.array([text or None for text in values.tolist()], dtype=object)


def _filled(values: NDArray[Any]) -> Floats:
    plain = values.filled(np.nan) if isinstance(values, np.ma.MaskedArray) else values
    return np.asarray(plain, dtype=np.float64)


def _number(column: str, *, truths: bool) -> str:
    """Text as a number; with `truths`, true is 1 and false is 0."""
    number = f"try_cast({column} as double)"
    return f"coalesce({number}, try_cast({column} as boolean)::double)" if truths else number


# --- Score logs on disk ---


FORMATS = (".parquet", ".jsonl", ".jsonl.gz", ".csv")
_JSON_CASTS = {
    frozenset({"BIGINT"}): "bigint",
    frozenset({"UBIGINT"}): "ubigint",
    frozenset({"BIGINT", "UBIGINT"}): "bigint",
    frozenset({"DOUBLE"}): "double",
    frozenset({"BOOLEAN"}): "boolean",
}


def file_format(path: Path) -> str:
    """Return the format that a file's name stands for."""
    for ending in sorted(FORMATS, key=len, reverse=True):
        if path.name.endswith(ending):
            return ending
    if str(path).startswith("table:"):
        raise ScoreLogError(f"{path}: only calibrate and verify take a table; for this, export it as Parquet files")
    raise ScoreLogError(f"{path}: unknown kind of file; name it {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")


class Table(ColumnReader):
    """A file opened for reading, column by column."""

    def __init__(self, path: str | Path) -> None:
        """Open a file.

        Raises:
            ScoreLogError: the file is absent, empty, damaged or of an unknown kind.
        """
        self.path = Path(path)
        form = file_format(self.path)
        if not _is_file(self.path):
            raise ScoreLogError(f"{self.path}: there is no such file, or it may not be read")
        if not _is_text(str(self.path)):
            raise ScoreLogError(f"{str(self.path)!r}: the name is not valid text; rename the file")
        super().__init__(str(self.path), hint="is the file complete and of the kind its name says?")
        self._open(form)
        self._describe()
        self.metadata = as_document(self._metadata(form), self.source)

    def _open(self, form: str) -> None:
        name = literal(_no_glob(str(self.path)))
        if form == ".parquet":
            self._run(f"create temp view source as select * from read_parquet({name}, hive_partitioning=false)")
        elif form == ".csv":
            self._open_csv(name)
        else:
            self._open_json(name)

    def _open_csv(self, name: str) -> None:
        """Comma, double quote, a header, nothing guessed: a guessed dialect can lose rows without a word."""
        try:
            with self.path.open(newline="", encoding="utf-8-sig", errors="replace") as stream:
                header = next(csv.reader(stream), list[str]())
        except (OSError, csv.Error) as error:
            raise self._translated(error) from error
        if len(header) == 1 and (mark := next((separator for separator in ";\t|" if separator in header[0]), None)):
            raise ScoreLogError(
                f"{self.path}: its columns are separated by {mark!r}; save it with commas between columns, and points in "
                "numbers"
            )
        header = [column or f"column{k}" for k, column in enumerate(header)]
        if not header:
            raise ScoreLogError(f"{self.path}: there are no rows; give it a header and at least one row")
        self._refuse_same(header)
        columns = ", ".join(f"{literal(column)}: 'varchar'" for column in header)
        self._run(
            f"create temp table source as select * from read_csv({name}, auto_detect=false, columns={{{columns}}}, "
            "header=true, delim=',', quote='\"', escape='\"', parallel=false, hive_partitioning=false)"
        )

    def _open_json(self, name: str) -> None:
        self._run(f"create temp table raw as select json from read_ndjson_objects({name})")
        bad = self._query("select json_type(json) <> 'OBJECT' as bad from raw")["bad"]
        if bad.any():
            raise ScoreLogError(f"{self.path}: row {int(bad.argmax()) + 1} is not a JSON object; write one per line")
        names: list[str] = self._query("select distinct unnest(json_keys(json)) as k from raw")["k"].tolist()
        keys = sorted(key for key in names if key)
        self._refuse_same(keys)
        kinds = [
            f"string_agg(distinct json_type(json, {literal(_pointer(k))}), ' ') as k{i}" for i, k in enumerate(keys)
        ]
        types = self._query(f"select {', '.join(kinds)} from raw") if keys else {}
        columns = [
            f"(json ->> {literal(_pointer(k))})::{_json_type(k, str(types[f'k{i}'].tolist()[0]))} as {quoted(k)}"
            for i, k in enumerate(keys)
        ]
        self._run(f"create temp table source as select {', '.join(columns) or 'json'} from raw")

    def _metadata(self, form: str) -> str | bytes:
        """Return the text of the JSON document that goes with the table."""
        if form == ".parquet":
            name = literal(_no_glob(str(self.path)))
            source = f"parquet_kv_metadata({name}) where decode(key) = {literal(METADATA_KEY)}"
            entries: list[str] = self._query(f"select decode(value) as v from {source}")["v"].tolist()
            return entries[0] if entries else "{}"
        sidecar = _sidecar(self.path)
        if not _is_file(sidecar):
            return "{}"
        try:
            return sidecar.read_bytes()
        except OSError as error:
            raise self._translated(error) from error


def parquet_rows(path: str) -> int | None:
    """Return the number of rows of a Parquet file, from its footer; None for another file, or one that cannot be read."""
    import duckdb

    if not path.lower().endswith(".parquet"):
        return None
    query = f"select num_rows from parquet_file_metadata({literal(_no_glob(path))})"
    try:
        with connect() as connection:
            return int(connection.execute(query).fetchall()[0][0])
    except duckdb.Error:  # whoever reads the file will say what is wrong with it
        return None


def write_table(path: str | Path, table: TableColumns) -> None:
    """Write a table, whole or not at all; the ending of the name says the format, NaN becomes null."""
    import duckdb  # 100 ms that `--help` should not pay

    target = Path(path)
    form = file_format(target)
    same = table.first_repeated()
    if same is not None:
        raise OutputError(f"{target}: two columns are called '{same}' (case aside); rename one")
    connection = connect()
    with replacing(target) as draft:
        try:
            rows = select_rows(connection, table, json_lists=form == ".csv")
            connection.execute(f"copy ({rows}) to {literal(str(draft))} ({_copy_options(form, table.metadata)})")
        except duckdb.Error as error:
            raise OutputError(f"{target}: cannot be written ({str(error).splitlines()[0]})") from error
        finally:
            disconnect(connection, len(table.offsets))
    if form != ".parquet":
        _sidecar(target).unlink(missing_ok=True)
        if table.metadata:
            write_text(_sidecar(target), json.dumps(table.metadata, indent=2, sort_keys=True) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes, *, private: bool = False) -> None:
    """Write a file, whole or not at all; a private one is readable by its owner only."""
    with replacing(Path(path)) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)


def new_folder(folder: str | Path) -> Path:
    """Return a folder to write to, made if it is not there."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{place}: cannot be created ({error.strerror}); use another folder") from error
    return place


def writable(target: str | Path) -> Path:
    """Return where a name leads, links followed; refuse it if that cannot be a file."""
    try:
        real = Path(os.path.realpath(target))
        occupied = real.exists() and not real.is_file()
    except (OSError, ValueError) as error:  # a ValueError is a zero byte in the name
        raise OutputError(f"{str(target)!r}: cannot be written ({error}); give another name") from error
    if not Path(target).name or occupied:
        raise OutputError(f"{str(target)!r}: cannot be written (not the name of a file); give another name")
    return real


@contextmanager
def replacing(target: Path) -> Generator[Path]:
    """Yield a draft beside the target; it replaces the target if the block succeeds, and is deleted otherwise."""
    real = writable(target)
    draft = real.with_name(f".{secrets.token_hex(4)}.{real.name}")
    try:
        yield draft
        draft.replace(real)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written ({error.strerror or error})") from error
    finally:
        with suppress(OSError):
            draft.unlink()


def _copy_options(form: str, metadata: Mapping[str, Any]) -> str:
    if form == ".parquet":
        document = literal(json.dumps(metadata, sort_keys=True))
        return "format parquet" + (f", kv_metadata {{{METADATA_KEY}: {document}}}" if metadata else "")
    if form == ".csv":
        return "format csv, header"
    return "format json, compression " + ("gzip" if form.endswith(".gz") else "none")


def _json_type(key: str, seen: str) -> str:
    """Numbers and truth values keep their type; all else, any mixture, and ids are read as text."""
    kinds = frozenset(t for t in seen.split() if t not in ("None", "NULL"))
    if key == "id":
        return "varchar"
    mixed = "DOUBLE" in kinds and kinds <= frozenset({"BIGINT", "UBIGINT", "DOUBLE"})
    return "double" if mixed else _JSON_CASTS.get(kinds, "varchar")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".meta.json")


def _no_glob(path: str) -> str:
    return re.sub(r"([\[*?])", r"[\1]", path)


def _pointer(key: str) -> str:
    return "/" + key.replace("~", "~0").replace("/", "~1")


# --- Frames ---


class FrameTable(ColumnReader):
    """A frame loaded for reading, column by column."""

    def __init__(self, frame: object) -> None:
        """Load a frame.

        Raises:
            ScoreLogError: it is not a frame, is empty, or has a column that DuckDB cannot read.
        """
        table = _normalized(frame)
        super().__init__("frame", hint="cast that column to a usual type, or drop it")
        self._refuse_same(_column_names(table))
        self._cells = _object_columns(table)
        self._lists = {name: flat for name, cells in self._cells.items() if (flat := _number_lists(cells)) is not None}
        texts = {name: None if name in self._lists else _as_texts(cells) for name, cells in self._cells.items()}
        self._load(table.assign(**texts) if texts else table)
        self._describe()
        self.types |= {name: "FLOAT[]" if _is_single(self._cells[name]) else "DOUBLE[]" for name in self._lists}
        self.metadata = as_document(_carried_document(table), self.source)

    def numbers(self, name: str) -> tuple[Floats, Integers]:
        """Return a list column; lists that pandas holds as Python objects never went to DuckDB."""
        return self._lists[name] if name in self._lists else super().numbers(name)

    def texts(self, name: str) -> Strings:
        """Return a column as text; see `numbers`."""
        return strings(_as_texts(self._cells[name]).tolist()) if name in self._lists else super().texts(name)

    def ids(self, name: str) -> tuple[Strings, bool]:
        """Return a column as text, and whether all entries are surely distinct; see `numbers`."""
        return (self.texts(name), False) if name in self._lists else super().ids(name)

    def _load(self, frame: Any) -> None:
        try:
            source = frame if _is_from("pandas", frame) else _Capsules(frame.__arrow_c_stream__)
            self._connection.register("frame", source)
            self._connection.execute("create temp table source as select * from frame")  # which may be read only once
            self._connection.unregister("frame")
        except self._error as error:
            raise self._translated(error) from error


@dataclass(frozen=True, slots=True)
class _Capsules:
    """Nothing but the PyCapsule interface, for libraries that know a frame, or table, by no more."""

    stream: Callable[[object], object]

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.stream(requested_schema)


def _is_from(library: str, frame: object) -> bool:
    """Return whether this is a library's DataFrame; a library that is not loaded has made none."""
    module = sys.modules.get(library)
    return module is not None and isinstance(frame, module.DataFrame)


def _normalized(frame: Any) -> Any:
    """Return a frame whose columns have names, and types with values."""
    if _is_from("pandas", frame):
        flat = frame.reset_index() if any(name is not None for name in frame.index.names) else frame
        return flat.set_axis([str(name) for name in flat.columns], axis=1)
    if _is_from("polars", frame):
        polars = sys.modules["polars"]
        return frame.cast({polars.Null: polars.String, polars.List(polars.Null): polars.List(polars.Float64)})
    if not isinstance(frame, ArrowStream):
        raise ScoreLogError(
            f"frame: a {type(frame).__name__} is not a pandas, polars or Arrow table (no __arrow_c_stream__); collect a "
            "lazy frame first, read files with ScoreLog.read"
        )
    return frame


def _column_names(frame: Any) -> list[str]:
    """Return the names of the columns, as far as the frame tells them."""
    names = getattr(frame, "column_names", None)
    return [str(name) for name in (getattr(frame, "columns", ()) if names is None else names)]


def _object_columns(frame: Any) -> dict[str, list[object]]:
    """Return the cells of the pandas columns that hold Python objects."""
    if not _is_from("pandas", frame):
        return {}
    return {name: frame[name].tolist() for name in frame.columns if frame[name].dtype == object}


def _number_lists(cells: Sequence[Any]) -> tuple[Floats, Integers] | None:
    """Return lists of numbers as flat values and row lengths (-1 for None); None for cells of any other kind."""
    rows = [cell.tolist() if isinstance(cell, np.ndarray) else cell for cell in cells]
    kinds = set(map(type, rows)) - {NoneType}
    if not kinds or not kinds <= {list, tuple}:
        return None
    flat = list(chain.from_iterable(row for row in rows if row is not None))
    if not set(map(type, flat)) <= {float, int, NoneType}:
        return None
    values = numbers_or_none(flat)
    sizes = np.array([-1 if row is None else len(row) for row in rows], dtype=np.int64)
    return None if values is None else (values.astype(np.float64), sizes)


def _as_texts(cells: Sequence[object]) -> NDArray[Any]:
    return np.array([_cell_text(cell) for cell in cells], dtype=object)


def _cell_text(cell: Any) -> str | None:
    """Return a Python object as a CSV file would hold it: lists and dictionaries as JSON, None and NaN as null."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, list | tuple | dict | np.ndarray):
        return json.dumps(cell, default=_plain_value, ensure_ascii=False, separators=(",", ":"))
    return None if cell is None or cell is sys.modules["pandas"].NA or cell != cell else str(cell)


def _plain_value(value: Any) -> object:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _is_single(cells: Sequence[Any]) -> bool:
    """Return whether all lists of a column are arrays of single precision."""
    types = {getattr(cell, "dtype", None) for cell in cells if cell is not None}
    return all(dtype is not None and digits_of(dtype) == 6 for dtype in types)


def _carried_document(frame: object) -> str | bytes:
    """Return the JSON document a frame carries: in the attributes of pandas, or in an Arrow schema."""
    attributes: dict[str, Any] = getattr(frame, "attrs", None) or {}
    metadata: dict[bytes, bytes] = getattr(getattr(frame, "schema", None), "metadata", None) or {}
    return attributes.get(METADATA_KEY) or metadata.get(METADATA_KEY.encode()) or "{}"


def arrow_stream(table: TableColumns, requested_schema: object = None) -> object:
    """Return a capsule with an ArrowArrayStream of the table; it has no metadata, which DuckDB does not set."""
    _check_names(table)
    connection = open_database()
    return connection.sql(select_rows(connection, table)).__arrow_c_stream__(requested_schema)


def arrow_table(table: TableColumns) -> Any:
    """Return a `pyarrow.Table` with the metadata in its schema."""
    pyarrow = _library("pyarrow", "to_arrow()")
    copied = pyarrow.table(_Capsules(lambda schema: arrow_stream(table, schema)))
    return copied.replace_schema_metadata({METADATA_KEY: _document(table)} if table.metadata else None)


def pandas_frame(table: TableColumns) -> Any:
    """Return a `pandas.DataFrame` with arrays in the cells of list columns and the metadata in its attributes."""
    pandas = _library("pandas", "to_pandas()")
    _check_names(table)
    columns = {name: without_string_dtype(values) for name, values in table.scalars}
    columns |= {name: _cells(without_string_dtype(values), table.offsets) for name, values in table.lists}
    frame = pandas.DataFrame(columns)
    if table.metadata:
        frame.attrs[METADATA_KEY] = _document(table)
    return frame


def _library(name: str, purpose: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise OptionError(f"{purpose} needs {name}: pip install {name}") from error


def _check_names(table: TableColumns) -> None:
    same = table.first_repeated()
    if same is not None:
        raise OutputError(f"frame: two columns are called '{same}' (case aside); rename one")


def _document(table: TableColumns) -> str:
    return json.dumps(table.metadata, sort_keys=True)


def _cells(values: NDArray[Any], offsets: Integers) -> NDArray[Any]:
    """Return one array per row."""
    cells = np.empty(len(offsets) - 1, dtype=object)
    for row, cell in enumerate(np.split(values, offsets[1:-1])):
        cells[row] = cell
    return cells
