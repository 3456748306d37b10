"""Score logs on disk: Parquet, JSON Lines (plain or gzip) and CSV, and files that are written whole or not at all.

DuckDB does the parsing. In JSON Lines and CSV a list is the JSON text of its numbers. Next to the columns a table may
carry one JSON document: Parquet keeps it in its own metadata, the other formats in NAME.meta.json.

Knows nothing of what a column means.
"""

import csv
import json
import os
import re
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from conformal_arbitrage.errors import OutputError, ScoreLogError
from conformal_arbitrage.scorelog.tables import (
    METADATA_KEY,
    ColumnReader,
    TableColumns,
    as_document,
    literal,
    quoted,
    select_rows,
)

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
        if len(header) == 1 and (mark := next((one for one in ";\t|" if one in header[0]), None)):
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
            f"create table source as select * from read_csv({name}, auto_detect=false, columns={{{columns}}}, header=true, "
            "delim=',', quote='\"', escape='\"', parallel=false, hive_partitioning=false)"
        )

    def _open_json(self, name: str) -> None:
        self._run(f"create table raw as select json from read_ndjson_objects({name})")
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
        self._run(f"create table source as select {', '.join(columns) or 'json'} from raw")

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


def write_table(path: str | Path, table: TableColumns) -> None:
    """Write a table, whole or not at all; the ending of the name says the format, NaN becomes null."""
    import duckdb  # 100 ms that `--help` should not pay

    target = Path(path)
    form = file_format(target)
    same = table.first_repeated()
    if same is not None:
        raise OutputError(f"{target}: two columns are called '{same}' (case aside); rename one")
    connection = duckdb.connect()
    with replacing(target) as draft:
        try:
            rows = select_rows(connection, table, json_lists=form == ".csv")
            connection.execute(f"copy ({rows}) to {literal(str(draft))} ({_copy_options(form, table.metadata)})")
        except duckdb.Error as error:
            raise OutputError(f"{target}: cannot be written ({str(error).splitlines()[0]})") from error
        finally:
            connection.close()
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
