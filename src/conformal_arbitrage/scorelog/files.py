"""Tables on disk: Parquet, JSON Lines (plain or gzip) and CSV, read into flat arrays and written back.

DuckDB does the parsing; its errors are translated here and nowhere else. In JSON Lines and CSV a list is the JSON text
of its numbers. Next to the columns a table may carry one JSON document: Parquet keeps it in its own metadata, the
other formats in NAME.meta.json.

Knows nothing of what a column means.
"""

import csv
import json
import os
import re
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.gaps import Bools, Floats, Integers
from conformal_arbitrage.errors import OutputError, ScoreLogError

Strings = NDArray[Any]
"""Text of any length, without a Python object per entry (numpy.dtypes.StringDType)."""

Column = tuple[str, NDArray[Any]]

FORMATS = (".parquet", ".jsonl", ".jsonl.gz", ".csv")
_METADATA_KEY = "conformal_arbitrage"
_NUMBER_TYPES = re.compile(r"(TINYINT|SMALLINT|INTEGER|BIGINT|HUGEINT|U\w*INT\w*|FLOAT|DOUBLE|DECIMAL\(.*\))")
_NUMBER = r"([-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|null|[-+]?(NaN|nan|Infinity|inf))"
_NUMBER_LIST = rf"\s*\[\s*({_NUMBER}\s*(,\s*{_NUMBER}\s*)*)?\]\s*"
_JSON_CASTS = {
    frozenset({"BIGINT"}): "bigint",
    frozenset({"UBIGINT"}): "ubigint",
    frozenset({"BIGINT", "UBIGINT"}): "bigint",
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
        if not _is_file(self.path):
            raise ScoreLogError(f"{self.path}: there is no such file, or it may not be read")
        if not _is_text(str(self.path)):
            raise ScoreLogError(f"{str(self.path)!r}: the name is not valid text; rename the file")
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

    @property
    def single(self) -> frozenset[str]:
        """The list columns in single precision."""
        return frozenset(name for name, kind in self.types.items() if kind == "FLOAT[]")

    def numbers(self, name: str) -> tuple[Floats, Integers]:
        """A list column: all numbers in one flat array, and each row's length (-1 for null)."""
        kind = self.types[name]
        column = _quoted(name)
        if kind == "VARCHAR":
            self._check_texts(name)
        elif not (kind.endswith("[]") and _NUMBER_TYPES.fullmatch(kind[:-2])):
            raise ScoreLogError(f"{self.path}: column '{name}' is {kind}; it must hold a list of numbers in each row")
        source = f"(select cast({column} as double[]) as v from source)"
        lengths = self._query(f"select coalesce(len(v), -1) as n from {source}")["n"]
        values = self._query(f"select unnest(v) as v from {source}")["v"]
        return _filled(values), np.asarray(lengths, dtype=np.int64)

    def texts(self, name: str) -> Strings:
        """A column as text, one entry per row; lists and structures become JSON."""
        column, kind = _quoted(name), self.types[name]
        nested = kind.endswith("]") or kind.startswith(("STRUCT", "MAP", "UNION"))
        text = f"cast(to_json({column}) as varchar)" if nested else f"cast({column} as varchar)"
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

    def scalars(self, name: str, *, truths: bool = False) -> Floats:
        """A column of single numbers; null is NaN. With `truths`, true and false count as 1 and 0."""
        column, kind = _quoted(name), self.types[name]
        if kind == "VARCHAR":
            bad = self._query(
                f"select {column} is not null and {_number(column, truths=truths)} is null as bad from source"
            )["bad"]
            self._refuse(name, bad, "is not a number")
            column = _number(column, truths=truths)
        elif not ((truths and kind == "BOOLEAN") or _NUMBER_TYPES.fullmatch(kind)):
            raise ScoreLogError(f"{self.path}: column '{name}' is {kind}; it must hold one number in each row")
        return _filled(self._query(f"select cast({column} as double) as v from source")["v"])

    def numbers_if_any(self, name: str) -> tuple[Floats, Integers] | None:
        """A list column as by `numbers`, or None if it is something else."""
        try:
            return self.numbers(name)
        except ScoreLogError:
            return None

    def anything(self, name: str) -> NDArray[Any]:
        """A column as it is, one entry per row: numbers and truth values where none is null, else text."""
        if self.types[name] == "BOOLEAN" or _NUMBER_TYPES.fullmatch(self.types[name]):
            values = self._query(f"select {_quoted(name)} as v from source")["v"]
            if not np.ma.is_masked(values):
                return np.asarray(values)
        return self.texts(name)

    def _open(self, form: str) -> None:
        name = _literal(_no_glob(str(self.path)))
        if form == ".parquet":
            self._run(f"create view source as select * from read_parquet({name}, hive_partitioning=false)")
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
        header = [column or f"column{k}" for k, column in enumerate(header)]
        if not header:
            raise ScoreLogError(f"{self.path}: the file has no rows; give it a header and at least one row")
        self._refuse_same(header)
        columns = ", ".join(f"{_literal(column)}: 'varchar'" for column in header)
        self._run(
            f"create table source as select * from read_csv({name}, auto_detect=false, columns={{{columns}}}, header=true, "
            "delim=',', quote='\"', escape='\"', parallel=false, hive_partitioning=false)"
        )

    def _refuse_same(self, names: Sequence[str]) -> None:
        same = _first_repeated(names)
        if same is not None:
            raise ScoreLogError(f"{self.path}: two columns are called '{same}' (case aside); rename one")

    def _open_json(self, name: str) -> None:
        self._run(f"create table raw as select json from read_ndjson_objects({name})")
        bad = self._query("select json_type(json) <> 'OBJECT' as bad from raw")["bad"]
        if bad.any():
            raise ScoreLogError(f"{self.path}: row {int(bad.argmax()) + 1} is not a JSON object; write one per line")
        found = self._query("select distinct unnest(json_keys(json)) as k from raw")["k"].tolist()
        keys = sorted(key for key in found if key)
        self._refuse_same(keys)
        kinds = [
            f"string_agg(distinct json_type(json, {_literal(_pointer(k))}), ' ') as k{i}" for i, k in enumerate(keys)
        ]
        seen = self._query(f"select {', '.join(kinds)} from raw") if keys else {}
        columns = [
            f"cast(json ->> {_literal(_pointer(k))} as {_json_type(k, str(seen[f'k{i}'].tolist()[0]))}) as {_quoted(k)}"
            for i, k in enumerate(keys)
        ]
        self._run(f"create table source as select {', '.join(columns) or 'json'} from raw")

    def _check_texts(self, name: str) -> None:
        column = _quoted(name)
        good = f"regexp_full_match({column}, {_literal(_NUMBER_LIST)}) and try_cast({column} as double[]) is not null"
        bad = self._query(f"select {column} is not null and not ({good}) as bad from source")["bad"]
        self._refuse(name, bad, "is not a list of numbers such as [0.7, 0.3]")

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
        elif _is_file(sidecar):
            text = self._read(sidecar)
        else:
            return {}
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ScoreLogError(f"{self.path}: its metadata is not JSON ({error}); write the log again") from error
        if not isinstance(document, dict):
            raise ScoreLogError(f"{self.path}: its metadata is not a JSON object; write the log again")
        return cast("dict[str, Any]", document)

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise self._translated(error) from error

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
        reason = " ".join(str(error).split("Possible fixes")[0].split("LINE 1")[0].split())
        return ScoreLogError(
            f"{self.path}: cannot be read ({reason}); is the file complete and of the kind its name says?"
        )


def write_table(
    path: str | Path,
    *,
    scalars: Sequence[Column],
    lists: Sequence[Column],
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
    same = _first_repeated([name for name, _ in (*scalars, *lists)])
    if same is not None:
        raise OutputError(f"{target}: two columns are called '{same}' (case aside); rename one")
    sizes = np.diff(offsets)
    row = np.arange(len(sizes))
    flat: dict[str, NDArray[Any]] = {"row": np.repeat(row, sizes), "place": np.arange(offsets[-1])}
    flat |= {f"l{k}": _plain(values) for k, (_, values) in enumerate(lists)}
    per_row: dict[str, NDArray[Any]] = {"row": row} | {f"s{k}": _plain(v) for k, (_, v) in enumerate(scalars)}
    gathered = ", ".join(f"list(l{k} order by place) as l{k}" for k in range(len(lists)))
    show = "to_json({})" if form == ".csv" else "{}"
    columns = [f"s{k} as {_quoted(name)}" for k, (name, _) in enumerate(scalars)]
    columns += [f"{show.format(f'l{k}')} as {_quoted(name)}" for k, (name, _) in enumerate(lists)]
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
    if form != ".parquet":
        _sidecar(target).unlink(missing_ok=True)
        if metadata:
            write_text(_sidecar(target), json.dumps(metadata, indent=2, sort_keys=True) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes, *, private: bool = False) -> None:
    """Write a file, whole or not at all; a private one is readable by its owner only."""
    with replacing(Path(path)) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)


def writable(target: str | Path) -> Path:
    """Where a name leads, links followed; refused if that cannot be a file."""
    real = Path(os.path.realpath(target))
    try:
        taken = real.exists() and not real.is_file()
    except OSError as error:
        raise OutputError(f"{target}: cannot be written ({error.strerror})") from error
    if not Path(target).name or taken:
        raise OutputError(f"{str(target)!r}: cannot be written (not the name of a file); give another name")
    return real


@contextmanager
def replacing(target: Path) -> Generator[Path]:
    """A draft beside the target that takes its place if the block ends well, and is gone otherwise."""
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
        document = _literal(json.dumps(metadata, sort_keys=True))
        return "format parquet" + (f", kv_metadata {{{_METADATA_KEY}: {document}}}" if metadata else "")
    if form == ".csv":
        return "format csv, header"
    return "format json, compression " + ("gzip" if form.endswith(".gz") else "none")


def _plain(values: NDArray[Any]) -> NDArray[Any]:
    """An array DuckDB can read: text as Python strings, empty text as null."""
    if not isinstance(values.dtype, np.dtypes.StringDType):
        return np.ascontiguousarray(values)
    return np.array([text or None for text in values.tolist()], dtype=object)


def _filled(values: NDArray[Any]) -> Floats:
    plain = values.filled(np.nan) if isinstance(values, np.ma.MaskedArray) else values
    return np.asarray(plain, dtype=np.float64)


def _json_type(key: str, seen: str) -> str:
    """Numbers and truth values keep their type; all else, any mixture, and ids are read as text."""
    kinds = frozenset(t for t in seen.split() if t not in ("None", "NULL"))
    if key == "id":
        return "varchar"
    mixed = "DOUBLE" in kinds and kinds <= frozenset({"BIGINT", "UBIGINT", "DOUBLE"})
    return "double" if mixed else _JSON_CASTS.get(kinds, "varchar")


def _first_repeated(names: Sequence[str]) -> str | None:
    """The first name that stands twice, case aside (DuckDB does not tell them apart)."""
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            return name
        seen.add(name.lower())
    return None


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


def _number(column: str, *, truths: bool) -> str:
    """Text as a number, where asked for with true as 1 and false as 0."""
    number = f"try_cast({column} as double)"
    return f"coalesce({number}, cast(try_cast({column} as boolean) as double))" if truths else number


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _no_glob(path: str) -> str:
    return re.sub(r"([\[*?])", r"[\1]", path)


def _pointer(key: str) -> str:
    return "/" + key.replace("~", "~0").replace("/", "~1")
