"""Frames: tables in memory, read from pandas, polars and Arrow, and handed over to them.

A frame comes in through the Arrow PyCapsule interface (`__arrow_c_stream__`), which every Arrow library speaks and
DuckDB reads without pyarrow. Only pandas needs pyarrow for that interface, so its frames go to DuckDB as they are;
Python objects in their cells become flat arrays (lists of numbers) or JSON text, as in a CSV file. Frames thus pass the
same column readers, rules and messages as files, and no package is added: narwhals would be one, and would still leave
list columns to each library's own types.

Knows nothing of what a column means.
"""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from types import ModuleType, NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.arrays import Floats, Integers, numbers_or_none
from conformal_arbitrage.core.gaps import digits_of
from conformal_arbitrage.errors import OptionError, OutputError, ScoreLogError
from conformal_arbitrage.scorelog.arrow import ArrowStream
from conformal_arbitrage.scorelog.tables import (
    METADATA_KEY,
    ColumnReader,
    Strings,
    TableColumns,
    as_document,
    select_rows,
    strings,
    without_string_dtype,
)


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

    def _load(self, frame: object) -> None:
        try:
            self._connection.register("frame", frame if _is_from("pandas", frame) else _Stream(frame))
            self._connection.execute("create table source as select * from frame")  # some streams are read only once
            self._connection.unregister("frame")
        except self._error as error:
            raise self._translated(error) from error


class _Stream:
    """A frame as DuckDB reads it without pyarrow: nothing but the PyCapsule interface."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._frame.__arrow_c_stream__(requested_schema)


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
    import duckdb  # 100 ms that `--help` should not pay

    _check_names(table)
    connection = duckdb.connect()
    return connection.sql(select_rows(connection, table)).__arrow_c_stream__(requested_schema)


def arrow_table(table: TableColumns) -> Any:
    """Return a `pyarrow.Table` with the metadata in its schema."""
    pyarrow = _library("pyarrow", "to_arrow()")
    copied = pyarrow.table(_Columns(table))
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


class _Columns:
    """Columns with the PyCapsule interface."""

    def __init__(self, table: TableColumns) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return arrow_stream(self._table, requested_schema)


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
