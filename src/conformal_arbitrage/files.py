"""Tables on disk: Parquet, JSON Lines (plain or gzip) and CSV, read into flat arrays and written back.

DuckDB does the parsing; its errors are translated here and nowhere else. In JSON Lines and CSV a list is the JSON text
of its numbers. Next to the columns a table may carry one JSON document: Parquet keeps it in its own metadata, the
other formats in NAME.meta.json.

Knows nothing of what a column means.
"""

import json
import os
import re
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.gaps import Bools, Floats, Integers
from conformal_arbitrage.errors import OutputError, ScoreLogError

if TYPE_CHECKING:
    pass

Strings = NDArray[Any]
"""Text of any length, without a Python object per entry (numpy.dtypes.StringDType)."""

FORMATS = (".parquet", ".jsonl", ".jsonl.gz", ".csv")
_METADATA_KEY = "conformal_arbitrage"
_NUMBER_TYPES = re.compile(r"(TINYINT|SMALLINT|INTEGER|BIGINT|HUGEINT|U\w*INT\w*|FLOAT|DOUBLE|DECIMAL\(.*\))")
_NUMBER = r"([-+0-9.eE]+|null|[-+]?(NaN|nan|Infinity|inf))"
_NUMBER_LIST = rf"\s*\[\s*({_NUMBER}\s*(,\s*{_NUMBER}\s*)*)?\]\s*"
_JSON_CASTS = {
    frozenset({"BIGINT"}): "bigint",
    frozenset({"DOUBLE"}): "double",
    frozenset({"BOOLEAN"}): "boolean",
}


def strings(values: object) -> Strings:
    """Text values as one array; None is the empty string."""
    texts = ["" if v is None else str(v) for v in cast("list[object]", values)]
    return np.array(texts, dtype=np.dtypes.StringDType())


def file_format(path: Path) -> str:
    """The format a file's name stands for."""
    for ending in sorted(FORMATS, key=len, reverse=True):
        if path.name.endswith(ending):
            return ending
    raise ScoreLogError(f"{path}: unknown kind of file; name it {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")


class Table:
    """A file opened for reading, column by column."""

    def __init__(self, path: str | Path) -> None:
        """Open a file.

        Raises:
            ScoreLogError: the file is absent, empty, damaged or of an unknown kind.
        """
        import duckdb  # 100 ms that `--help` should not pay

        self.path = Path(path)
        form = file_format(self.path)
        if not self.path.is_file():
            raise ScoreLogError(f"{self.path}: there is no such file")
        config: dict[str, str | bool | int | float | list[str]] = {
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
        self._connection: duckdb.DuckDBPyConnection = duckdb.connect(config=config)
        self._error = duckdb.Error
        self._open(form)
        described = self._query("describe source")
        self.types: dict[str, str] = dict(
            zip(described["column_name"].tolist(), described["column_type"].tolist(), strict=True)
        )
        self.rows = int(self._query("select count(*) as n from source")["n"][0])
        if self.rows == 0:
            raise ScoreLogError(f"{self.path}: the file has no rows; give it at least one")
        self.metadata = self._metadata(form)

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def __enter__(self) -> "Table":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def numbers(self, name: str) -> tuple[Floats, Integers, bool]:
        """A list column: all numbers in one flat array, each row's length (-1 for null), single precision or not."""
        kind = self.types[name]
        column = _quoted(name)
        if kind == "VARCHAR":
            self._check_texts(name)
            column = f"cast({column} as double[])"
        elif not (kind.endswith("[]") and _NUMBER_TYPES.fullmatch(kind[:-2])):
            raise ScoreLogError(f"{self.path}: column '{name}' is {kind}; it must hold a list of numbers in each row")
        source = f"(select cast({column} as double[]) as v from source)"
        lengths = self._query(f"select coalesce(len(v), -1) as n from {source}")["n"]
        values = self._query(f"select unnest(v) as v from {source}")["v"]
        return _filled(values), np.asarray(lengths, dtype=np.int64), kind == "FLOAT[]"

    def texts(self, name: str) -> Strings:
        """A column as text, one entry per row; lists and structures become JSON."""
        column, kind = _quoted(name), self.types[name]
        simple = kind in ("VARCHAR", "UUID", "BOOLEAN") or _NUMBER_TYPES.fullmatch(kind)
        text = f"cast({column} as varchar)" if simple else f"cast(to_json({column}) as varchar)"
        return strings(self._query(f"select {text} as v from source")["v"].tolist())

    def text_lists(self, name: str) -> tuple[Strings, Integers]:
        """A column of lists of text: flat, and each row's length (-1 for null)."""
        column, kind = _quoted(name), self.types[name]
        if kind == "VARCHAR":
            column = f"from_json({column}, '[\"VARCHAR\"]')"
        elif kind != "VARCHAR[]":
            raise ScoreLogError(f"{self.path}: column '{name}' is {kind}; it must hold a list of texts in each row")
        lengths = self._query(f"select coalesce(len({column}), -1) as n from source")["n"]
        values = self._query(f"select unnest({column}) as v from source")["v"]
        return strings(values.tolist()), np.asarray(lengths, dtype=np.int64)

    def scalars(self, name: str) -> Floats:
        """A column of single numbers; null is NaN."""
        column, kind = _quoted(name), self.types[name]
        if kind == "VARCHAR":
            bad = self._query(
                f"select {column} is not null and try_cast({column} as double) is null as bad from source"
            )["bad"]
            self._refuse(name, bad, "is not a number")
        elif not _NUMBER_TYPES.fullmatch(kind):
            raise ScoreLogError(f"{self.path}: column '{name}' is {kind}; it must hold one number in each row")
        return _filled(self._query(f"select cast({column} as double) as v from source")["v"])

    def numbers_if_any(self, name: str) -> tuple[Floats, Integers] | None:
        """A list column as by `numbers`, or None if it is something else."""
        try:
            return self.numbers(name)[:2]
        except ScoreLogError:
            return None

    def is_number(self, name: str) -> bool:
        """Whether a column has a numeric type of its own (text that looks like numbers does not count)."""
        return _NUMBER_TYPES.fullmatch(self.types[name]) is not None

    def _open(self, form: str) -> None:
        name = _literal(_no_glob(str(self.path)))
        if form == ".parquet":
            self._run(f"create view source as select * from read_parquet({name})")
        elif form == ".csv":
            self._run(f"create table source as select * from read_csv({name}, all_varchar=true, header=true)")
        else:
            self._open_json(name)

    def _open_json(self, name: str) -> None:
        self._run(f"create table raw as select json from read_ndjson_objects({name})")
        bad = self._query("select json_type(json) <> 'OBJECT' as bad from raw")["bad"]
        if bad.any():
            raise ScoreLogError(f"{self.path}: row {int(bad.argmax()) + 1} is not a JSON object; write one per line")
        keys = sorted(self._query("select distinct unnest(json_keys(json)) as k from raw")["k"].tolist())
        columns = [f"cast(json ->> {_literal(_pointer(k))} as {self._json_type(k)}) as {_quoted(k)}" for k in keys]
        self._run(f"create table source as select {', '.join(columns) or 'json'} from raw")

    def _json_type(self, key: str) -> str:
        """Numbers and truth values keep their type; all else, and any mixture, is read as text."""
        seen = self._query(f"select distinct json_type(json, {_literal(_pointer(key))}) as t from raw")["t"].tolist()
        kinds = frozenset("BIGINT" if t == "UBIGINT" else t for t in seen if t not in (None, "NULL"))
        return "double" if kinds == frozenset({"BIGINT", "DOUBLE"}) else _JSON_CASTS.get(kinds, "varchar")

    def _check_texts(self, name: str) -> None:
        column = _quoted(name)
        good = f"regexp_full_match({column}, {_literal(_NUMBER_LIST)}) and try_cast({column} as double[]) is not null"
        bad = self._query(f"select {column} is not null and not ({good}) as bad from source")["bad"]
        self._refuse(name, bad, "is not a list of numbers")

    def _refuse(self, name: str, bad: Bools, problem: str) -> None:
        if bad.any():
            row = int(bad.argmax())
            text = self._query(f"select cast({_quoted(name)} as varchar) as v from source limit 1 offset {row}")["v"][0]
            raise ScoreLogError(
                f"{self.path}: row {row + 1}, column '{name}': {text!r:.80} {problem}; correct that row"
            )

    def _metadata(self, form: str) -> dict[str, Any]:
        sidecar = _sidecar(self.path)
        if form == ".parquet":
            name = _literal(_no_glob(str(self.path)))
            source = f"parquet_kv_metadata({name}) where decode(key) = {_literal(_METADATA_KEY)}"
            found = self._query(f"select decode(value) as v from {source}")["v"].tolist()
            text = found[0] if found else "{}"
        elif sidecar.is_file():
            text = sidecar.read_bytes()
        else:
            return {}
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ScoreLogError(f"{self.path}: its metadata is not JSON ({error}); write the log again") from error
        return cast("dict[str, Any]", document) if isinstance(document, dict) else {}

    def _run(self, sql: str) -> None:
        try:
            self._connection.execute(sql)
        except self._error as error:
            raise self._translated(error) from error

    def _query(self, sql: str) -> dict[str, NDArray[Any]]:
        try:
            return cast("dict[str, NDArray[Any]]", self._connection.execute(sql).fetchnumpy())  # pyright: ignore[reportUnknownMemberType]
        except self._error as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> ScoreLogError:
        reason = str(error).strip().splitlines()[0]
        return ScoreLogError(
            f"{self.path}: cannot be read ({reason}); is the file complete and of the kind its name says?"
        )


def write_table(
    path: str | Path,
    *,
    scalars: Mapping[str, NDArray[Any]],
    lists: Mapping[str, NDArray[Any]],
    offsets: Integers,
    metadata: Mapping[str, Any],
) -> None:
    """Write a table, whole or not at all; NaN becomes null.

    Args:
        path: where to; the name says the format.
        scalars: one value per row.
        lists: flat arrays that share the offsets.
        offsets: where each row's list begins.
        metadata: the JSON document that goes with the table; none if empty.
    """
    import duckdb  # as above

    target = Path(path)
    form = file_format(target)
    sizes = np.diff(offsets)
    row = np.arange(len(sizes))
    flat: dict[str, NDArray[Any]] = {"row": np.repeat(row, sizes), "place": np.arange(offsets[-1])}
    flat |= {f"l{k}": _plain(values) for k, values in enumerate(lists.values())}
    per_row: dict[str, NDArray[Any]] = {"row": row} | {f"s{k}": _plain(v) for k, v in enumerate(scalars.values())}
    gathered = ", ".join(f"list(l{k} order by place) as l{k}" for k in range(len(lists)))
    show = "to_json({})" if form == ".csv" else "{}"
    columns = [f"s{k} as {_quoted(name)}" for k, name in enumerate(scalars)]
    columns += [f"{show.format(f'l{k}')} as {_quoted(name)}" for k, name in enumerate(lists)]
    listed = f"(select row, {gathered} from flat group by row)"
    query = f"select {', '.join(columns)} from per_row join {listed} using (row) order by row"
    connection = duckdb.connect()
    with replacing(target) as draft:
        try:
            connection.register("flat", flat)
            connection.register("per_row", per_row)
            connection.execute(f"copy ({query}) to {_literal(str(draft))} ({_copy_options(form, metadata)})")
        except duckdb.Error as error:
            raise OutputError(f"{target}: cannot be written ({str(error).splitlines()[0]})") from error
        finally:
            connection.close()
    if metadata and form != ".parquet":
        write_text(_sidecar(target), json.dumps(metadata, indent=2, sort_keys=True) + "\n")


def write_text(path: str | Path, text: str, *, private: bool = False) -> None:
    """Write a text file, whole or not at all; a private one is readable by its owner only."""
    write_bytes(path, text.encode(), private=private)


def write_bytes(path: str | Path, data: bytes, *, private: bool = False) -> None:
    """Write a file, whole or not at all; a private one is readable by its owner only."""
    with replacing(Path(path)) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)


@contextmanager
def replacing(target: Path) -> Generator[Path]:
    """A draft beside the target that takes its place if the block ends well, and is gone otherwise."""
    draft = target.with_name(f".{secrets.token_hex(4)}.{target.name}")
    try:
        yield draft
        draft.replace(target)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written ({error.strerror or error})") from error
    finally:
        draft.unlink(missing_ok=True)


def _copy_options(form: str, metadata: Mapping[str, Any]) -> str:
    if form == ".parquet":
        document = _literal(json.dumps(metadata, sort_keys=True))
        return "format parquet" + (f", kv_metadata {{{_METADATA_KEY}: {document}}}" if metadata else "")
    if form == ".csv":
        return "format csv, header"
    return "format json, compression " + ("gzip" if form.endswith(".gz") else "none")


def _plain(values: NDArray[Any]) -> NDArray[Any]:
    """An array DuckDB can read: text as Python strings."""
    return values.astype(object) if isinstance(values.dtype, np.dtypes.StringDType) else np.ascontiguousarray(values)


def _filled(values: NDArray[Any]) -> Floats:
    plain = values.filled(np.nan) if isinstance(values, np.ma.MaskedArray) else values
    return np.asarray(plain, dtype=np.float64)


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".meta.json")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _no_glob(path: str) -> str:
    return re.sub(r"([\[*?])", r"[\1]", path)


def _pointer(key: str) -> str:
    return "/" + key.replace("~", "~0").replace("/", "~1")
