"""Columns of a table that DuckDB holds, read one at a time into flat arrays, and columns put back together as a query.

DuckDB's errors are translated here, for files and frames alike. A list may also be the JSON text of its numbers, as in
JSON Lines and CSV.

Knows nothing of where a table comes from, nor of what a column means.
"""

import re
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.arrays import Bools, Floats, Integers
from conformal_arbitrage.errors import ScoreLogError
from conformal_arbitrage.scorelog.arrow import ArrowError, ArrowStream, number_lists, text_bytes, text_lists
from conformal_arbitrage.scorelog.texts import Strings, TextBytes

if TYPE_CHECKING:
    import duckdb

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
    """What a thread keeps."""

    database: "duckdb.DuckDBPyConnection | None" = None


_THREAD = _Thread()


def connect(threads: int | None = None) -> "duckdb.DuckDBPyConnection":
    """Open a database in memory, which loads no extensions; by default it works on all cores."""
    import duckdb  # 100 ms that `--help` should not pay

    config: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "arrow_large_buffer_size": "true",
    }
    if threads is not None:
        config["threads"] = threads
    return duckdb.connect(config=config)


def keep_database() -> None:
    """Let this thread, until it ends, open one database only: that takes as long as reading 100,000 rows."""
    _THREAD.database = connect(threads=1)


def connect_here() -> "duckdb.DuckDBPyConnection":
    """Return a connection that works in this thread only: to the database that it keeps, or to a new one."""
    return connect(threads=1) if _THREAD.database is None else _THREAD.database.cursor()


class ColumnReader:
    """A table named `source` in a DuckDB connection of its own, read column by column.

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
        self._connection.close()

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
        column, kind = quoted(name), self.types[name]
        nested = kind.endswith("]") or kind.startswith(("STRUCT", "MAP", "UNION"))
        text = f"to_json({column})::varchar" if nested else f"{column}::varchar"
        return self._read(text_bytes, f"select {text} as v from source")

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
        scalars: columns with one value per row.
        lists: flat arrays that share the offsets.
        offsets: where each row's list begins.
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


def refuse_absent_column(name: str, names: Collection[str], source: str) -> None:
    """Refuse a table that lacks a column."""
    if name not in names:
        raise ScoreLogError(
            f"{source}: there is no column '{name}'; it has {', '.join(sorted(names))}; name the columns with primary=, "
            "guardian= (--primary-column, --guardian-column)"
        )


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
