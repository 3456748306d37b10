"""ScoreParts: a score log in many files, where they are, and the engines that work on them."""

import glob
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Protocol, TypeVar, runtime_checkable
from weakref import finalize

import numpy as np

from conformal_arbitrage.core.exact import Integers, n_rows
from conformal_arbitrage.errors import ArbitrageError, EngineError, OptionError, ScoreLogError
from conformal_arbitrage.scorelog.log import ScoreLog, join_logs, log_digest, sum_of_hashes
from conformal_arbitrage.scorelog.tables import (
    METADATA_KEY,
    ColumnReader,
    TextBytes,
    as_document,
    connect,
    literal,
    open_database,
    quoted,
    refuse_absent_column,
)

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

    import duckdb


# --- Where the files of a log in parts are ---


_ENDING: Final = ".parquet"
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_LOCAL: Final = "file"
_TABLE_FORMATS: Final = {"_delta_log": "Delta", ".hoodie": "Hudi"}
_ICEBERG: Final = ".metadata.json"
_HIDDEN: Final = ("_", ".")
_STAMPS: Final = ("size", "ETag", "etag", "Last-Modified", "LastModified", "last_modified", "updated", "created")
"""What storages say of a file that changes with it, each in its own words."""


def scheme_of(path: str) -> str | None:
    """Return the scheme of a URL; None for a local path."""
    match = _SCHEME.match(path)
    return None if match is None else match[1]


def is_parquet(path: str) -> bool:
    """Return whether a name is that of a Parquet file."""
    return path.lower().endswith(_ENDING)


def is_many(source: str) -> bool:
    """Return whether a name stands for several files: a pattern, a folder or a URL."""
    folder = source.endswith("/") or _is_folder(source)
    return scheme_of(source) is not None or folder or (_is_pattern(source) and not _is_file(source))


def folder_of(source: str) -> str:
    """Return the folder that several files are in or below: of a pattern that before its first sign."""
    return re.split(r"[*?\[]", source)[0].rpartition("/")[0] if _is_pattern(source) else source.rstrip("/")


def escaped(path: str) -> str:
    """Return a path that DuckDB does not take for a pattern."""
    return re.sub(r"([\[*?])", r"[\1]", path)


def open_storage(path: str, threads: int | None = None) -> "duckdb.DuckDBPyConnection":
    """Open a database that can read a path, and others of its scheme."""
    database = open_database(threads)
    if scheme_of(path) is not None:
        database.register_filesystem(_dated(_storage(path)))
    return database


def find_files(*sources: str) -> list[str]:
    """Return the Parquet files that patterns, folders, files or URLs of these stand for, each of them once."""
    paths = sorted({path for source in sources for path in _found(source)})
    return list({_identity(path): path for path in reversed(paths)}.values())[::-1]


class PartsTable(ColumnReader):
    """Many Parquet files opened for reading as one table, column by column, in the order of their names."""

    def __init__(self, source: str, *, name: str = "") -> None:
        """Find and open the files.

        Args:
            name: of the table, for messages, if it is not where they are.

        Raises:
            ScoreLogError: there are none, or they cannot be read as one table.
        """
        files = find_files(source)
        super().__init__(
            name or source,
            hint="are all files complete, with the same columns?",
            connection=partial(open_storage, source),
        )
        names = ", ".join(literal(escaped(path)) for path in files)
        self._run(f"create temp view source as select * from read_parquet([{names}], hive_partitioning=false)")
        self._describe()


def _found(source: str) -> Sequence[str]:
    if scheme_of(source) == _LOCAL:
        source = source.removeprefix(f"{_LOCAL}://")
    paths = _local_files(source) if scheme_of(source) is None else _remote_files(source)
    if paths != [source]:
        paths = _matches(source, paths) if _is_pattern(source) else paths
        _refuse_table_above(source)
    others = [path for path in paths if not is_parquet(path)]
    if not paths or others:
        what = f"{others[0]} is not a Parquet file" if others else "there are no Parquet files"
        raise ScoreLogError(
            f"{source}: {what}; a log in parts has {_ENDING} files only: write each with ScoreLog.write"
        )
    return paths


def _identity(path: str) -> object:
    """Return what two names of one file have in common: links, and other ways to write a path."""
    if scheme_of(path) is not None:
        return path
    try:
        status = os.stat(path)  # noqa: PTH116  (paths are text here)
    except OSError as error:
        _refuse_unlisted(error)
    return status.st_dev, status.st_ino


def stamp_of(path: str) -> object:
    """Return what is another once a file has other bytes: its size and time, or what its storage says of it."""
    if scheme_of(path) is not None:
        storage = _storage(path)
        with _listing(path):
            storage.invalidate_cache()
            facts = storage.info(path)
        return [str(facts.get(name)) for name in _STAMPS]
    try:
        status = os.stat(path)  # noqa: PTH116  (paths are text here)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _is_folder(path: str) -> bool:
    return os.path.isdir(path)  # noqa: PTH112  (a name that cannot exist is no error)


def _is_file(path: str) -> bool:
    return os.path.isfile(path)  # noqa: PTH113


def _is_pattern(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _local_files(source: str) -> list[str]:
    if _is_folder(source):
        return _members(source, (path for path in _walk(source) if _is_file(path)))
    if _is_file(source):
        return [source]
    return [path for path in glob.glob(source, recursive=True) if _is_file(path)]  # noqa: PTH207


def _walk(folder: str) -> Iterator[str]:
    """Yield all files below a folder; linked folders too, but none twice."""
    seen = {_identity(folder)}
    for place, folders, files in os.walk(folder, onerror=_refuse_unlisted, followlinks=True):
        inside = {name: _identity(os.path.join(place, name)) for name in folders}  # noqa: PTH118
        folders[:] = [name for name, identity in inside.items() if identity not in seen]
        seen.update(inside.values())
        yield from (os.path.join(place, name) for name in files)  # noqa: PTH118


def _refuse_unlisted(error: OSError) -> NoReturn:
    raise ScoreLogError(f"{error.filename}: cannot be read ({error.strerror}); its rows belong to the log") from error


def _members(folder: str, paths: Iterable[str]) -> list[str]:
    """Return the Parquet files of a folder, without names that begin with _ or a dot: engines keep unfinished work there."""
    members: list[str] = []
    for path in paths:
        names = path.removeprefix(folder).strip("/").split("/")
        format = _table_format(names)
        if format is not None:
            _refuse_table(folder, format)
        if is_parquet(path) and not any(name.startswith(_HIDDEN) for name in names):
            members.append(path)
    return members


def _refuse_table(folder: str, format: str) -> NoReturn:
    raise ScoreLogError(
        f"{folder}: this is a table of {format}, whose folder may also hold rows that were replaced or deleted; "
        "calibrate it with Spark (table:NAME), or write its rows into a folder of their own"
    )


def _refuse_table_above(source: str) -> None:
    """Refuse files in the folder of a table, or in one below it, where a pattern or a folder does not show its account."""
    folder = folder_of(source)
    for mark, format in {**_TABLE_FORMATS, f"metadata/*{_ICEBERG}": "Iceberg"}.items():
        if _is_marked(folder, mark):
            _refuse_table(folder, format)


def _is_marked(folder: str, mark: str) -> bool:
    """Return whether something is in a folder; of a local one also in those above it."""
    if scheme_of(folder) is None:
        here = Path(folder).absolute()
        return any(next(place.glob(mark), None) for place in (here, *here.parents))
    with _listing(folder):
        return bool(_storage(folder).glob(f"{folder}/{mark}"))


def _matches(pattern: str, paths: Sequence[str]) -> list[str]:
    """Return the files that a pattern means: names that begin with _ or a dot only if it says so."""
    said = [part for part in pattern.split("/") if part.startswith(_HIDDEN)]

    def is_meant(path: str) -> bool:
        hidden = [name for name in path.split("/") if name.startswith(_HIDDEN) and name not in (".", "..")]
        return all(any(fnmatchcase(name, part) for part in said) for name in hidden)

    return [path for path in paths if is_meant(path)]


def _table_format(names: Sequence[str]) -> str | None:
    """Return which format of tables keeps its own account of its files under such a path; None if none does."""
    if "metadata" in names and names[-1].endswith(_ICEBERG):
        return "Iceberg"
    return next((format for name, format in _TABLE_FORMATS.items() if name in names), None)


def _remote_files(source: str) -> list[str]:
    storage = _storage(source)
    with _listing(source):
        paths = storage.glob(source) if _is_pattern(source) else storage.find(source)
    named = [str(storage.unstrip_protocol(path)) for path in paths]
    return named if _is_pattern(source) else _members(source, named)


@contextmanager
def _listing(source: str) -> Generator[None]:
    """Translate the errors of a storage that cannot be listed."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise ScoreLogError(f"{source}: cannot be listed ({error}); check the address and your credentials") from error


def _dated(storage: Any) -> Any:
    """Return a file system that says when a file was modified, which DuckDB asks for: never, if it does not know (HTTP)."""
    import fsspec  # pyright: ignore[reportMissingTypeStubs, reportMissingImports]

    if type(storage).modified is fsspec.AbstractFileSystem.modified:  # pyright: ignore[reportUnknownMemberType]
        storage.modified = _never
    return storage


def _never(_: str) -> datetime:
    return datetime.fromtimestamp(0, UTC)


def _storage(url: str) -> Any:
    """Return fsspec's file system for a URL."""
    try:
        import fsspec  # pyright: ignore[reportMissingTypeStubs, reportMissingImports]

        return fsspec.filesystem(scheme_of(url))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    except (ImportError, ValueError) as error:
        raise ScoreLogError(
            f"{url}: needs fsspec and a file system for {scheme_of(url)}:// ({error}); pip install "
            "'conformal-arbitrage[lake]' and s3fs, gcsfs or adlfs"
        ) from error


# --- ScoreParts ---


_Answer = TypeVar("_Answer")
ROWS_PER_PART: Final = 1 << 20
GATHERED: Final = 10_000_000
"""The most rows that are ever put together in memory."""
_FILE: Final = "conformal_arbitrage_file"
_MEMORY_FOR_IDS: Final = "2GB"
_SURELY_COPIED: Final = 100
"""Files of so many equal rows are copies, unless ids tell otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """A file: its path or URL, its rows, its columns, and the JSON document it carries."""

    path: str
    rows: int
    types: Mapping[str, str]
    document: str

    def noted(self, name: str) -> Mapping[str, Any] | None:
        """Return an entry of its document; each has one value per column."""
        return as_document(self.document, self.path).get(name)

    def single(self, column: str) -> bool:
        """Return whether a column is in single precision."""
        digits = self.noted("score_digits") or {}
        return self.types.get(column, "").startswith("FLOAT[") or digits.get(column) == 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePart:
    """A range of rows of one file.

    Attributes:
        start: its first row, counted from 0.
        first: the number of this first row in the whole log.
        binary: whether the loss is measured on the paper's 0/1 Guardian.
    """

    file: PartFile
    start: int
    stop: int
    first: int
    primary: str
    guardian: str | None
    outcomes: tuple[str, ...]
    binary: bool

    @property
    def name(self) -> str:
        """The file and the rows, for messages."""
        return f"{self.file.path}, rows {self.start + 1} to {self.stop}"

    def load(self, columns: Sequence[str] | None = None, *, ids: bool = True) -> ScoreLog:
        """Read the rows.

        Args:
            columns: further columns to read beside the scores and ids; None for all.
            ids: whether to read the ids, which take longer than the scores.
        """
        names = None if columns is None else [name for name in self._names(columns, ids=ids) if name in self.file.types]
        with PartTable(self, names) as table:
            log = self._complete(ScoreLog.from_table(table, self.primary, self.guardian, self.outcomes))
        return log.binarized() if self.binary else log

    def load_apart(self) -> tuple[ScoreLog, TextBytes | None]:
        """Read the scores, and the ids as bytes, which is all that a digest needs; that they are distinct is not checked."""
        with PartTable(self, [name for name in self._names([], ids=True) if name in self.file.types]) as table:
            ids = table.ids_apart()
            log = self._complete(ScoreLog.from_table(table, self.primary, self.guardian, self.outcomes))
        if ids is not None and ids.has_empty():
            return self.load([]), ids  # names the row, in an error
        return log.binarized() if self.binary else log, ids

    def hash_sum(self, log: ScoreLog, ids: TextBytes | None) -> int:
        """Return the sum of the hashes of its rows, given what `load_apart` returns."""
        return sum_of_hashes(log.score_digits, log.offsets, (log.primary, log.guardian, log.binary), ids)

    def _complete(self, log: ScoreLog) -> ScoreLog:
        """Return what was read of the part, if these are as many rows as the file had when it was found."""
        if len(log) != self.stop - self.start:
            raise ScoreLogError(
                f"{self.name}: there {'is' if len(log) == 1 else 'are'} {n_rows(f'{len(log):,}')}: the file has "
                "changed since it was found; let nobody write to a log that is being read, and start again"
            )
        return log

    def _names(self, columns: Sequence[str], *, ids: bool) -> list[str]:
        scores = [
            self.primary,
            *([] if self.guardian is None else [self.guardian]),
            *(["id"] if ids else []),
            *self.outcomes,
        ]
        return list(dict.fromkeys([*scores, *(["label", "correct"] if self.binary else []), *columns]))


class PartTable(ColumnReader):
    """Some rows of a Parquet file, opened for reading."""

    def __init__(self, part: ScorePart, columns: Sequence[str] | None) -> None:
        """Open the rows of a part; by default with all columns."""
        path = part.file.path
        super().__init__(
            path,
            hint="is the file complete, and has it changed since?",
            connection=partial(connect if scheme_of(path) is None else partial(open_storage, path), threads=1),
        )
        names = part.file.types if columns is None else columns
        source = f"read_parquet({literal(escaped(path))}, hive_partitioning=false, file_row_number=true)"
        ends = [f"file_row_number >= {part.start}"] if part.start else []
        if part.stop != part.file.rows:  # the last part reads on, so that appended rows show
            ends.append(f"file_row_number < {part.stop}")
        rows = f" where {' and '.join(ends)}" if ends else ""
        self._run(f"create temp view source as select {', '.join(map(quoted, names))} from {source}{rows}")
        self.types = {name: kind for name, kind in part.file.types.items() if columns is None or name in columns}
        self.rows, self.first_row = part.stop - part.start, part.start
        self.metadata = as_document(part.file.document, path)

    def ids_apart(self) -> TextBytes | None:
        """Return the ids as bytes, and forget that the table has any."""
        if "id" not in self.types:
            return None
        ids = self.text_bytes("id")
        del self.types["id"]
        return ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ScoreParts:
    """A score log in many Parquet files.

    `calibrate`, `verify` and `assess` take one in the place of a `ScoreLog`, with the same results, in bounded memory.

    Attributes:
        source: what was asked for, for messages.
        files: the files.
        primary: the column that plays the Primary.
        guardian: the column that plays the Guardian, or None.
        outcomes: list columns to read as outcomes besides `correct`.
        rows_per_part: the most rows that are read at a time.
        binary: whether the loss is measured on the paper's 0/1 Guardian; see `binarized`.
    """

    source: str
    files: tuple[PartFile, ...]
    primary: str = "primary"
    guardian: str | None = "guardian"
    outcomes: tuple[str, ...] = ()
    rows_per_part: int = ROWS_PER_PART
    binary: bool = False

    @classmethod
    def read(
        cls,
        source: str | Path | Sequence[str | Path],
        *,
        primary: str = "primary",
        guardian: str | None = "guardian",
        outcomes: Sequence[str] = (),
        rows_per_part: int = ROWS_PER_PART,
    ) -> "ScoreParts":
        """Find the files of a log and read what they say about themselves, not their rows.

        Args:
            source: a pattern such as "scores/*.parquet", a folder, a file, a URL of any of these (s3://, gs://, az://, ...;
                extra `lake` and the file system's own package), or a list of them.
            primary: the column that plays the Primary.
            guardian: the column that plays the Guardian; None if there is none.
            outcomes: list columns to read as outcomes besides `correct`.
            rows_per_part: the most rows that are read at a time.

        Raises:
            ScoreLogError: there are no files, or they differ in their columns, their precision or the models that made them.
        """
        several = [source] if isinstance(source, str | Path) else list(source)
        paths = find_files(*map(str, several))
        name = str(several[0]) if len(several) == 1 else f"{several[0]} and {len(several) - 1} more"
        files = _describe_files(paths)
        _refuse_unlike(files, [primary, *([] if guardian is None else [guardian]), *outcomes])
        if rows_per_part < 1:
            raise OptionError(f"rows_per_part must be 1 or more; got {rows_per_part!r}")
        return cls(
            source=name,
            files=tuple(files),
            primary=primary,
            guardian=guardian,
            outcomes=tuple(outcomes),
            rows_per_part=rows_per_part,
        )

    def binarized(self) -> "ScoreParts":
        """Return the log with the paper's 0/1 Guardian as its loss column; see `ScoreLog.binarized`."""
        return replace(self, binary=True)

    def __len__(self) -> int:
        return sum(file.rows for file in self.files)

    def __repr__(self) -> str:
        return f"<ScoreParts {self.source}: {n_rows(f'{len(self):,}')} in {len(self.files)} files>"

    @property
    def types(self) -> Mapping[str, str]:
        """DuckDB's type of each column of the first file."""
        return self.files[0].types

    @property
    def columns(self) -> tuple[str, str]:
        """The names under which Primary and Guardian stand."""
        return self.primary, self.guardian or "guardian"

    @property
    def has_ids(self) -> bool:
        """Whether rows have ids."""
        return "id" in self.types

    @property
    def identities(self) -> Mapping[str, Any] | None:
        """The scorers that made the scores, by column; None if the files do not say."""
        return self.files[0].noted("identities")

    @property
    def floor(self) -> float | None:
        """The margin below which the Guardian was not asked; None if the files do not say."""
        return (self.files[0].noted("floor") or {}).get(self.primary)

    def parts(self) -> list[ScorePart]:
        """Return all parts, in order."""
        parts: list[ScorePart] = []
        first = 0
        for file in self.files:
            for start in range(0, file.rows, self.rows_per_part):
                stop = min(start + self.rows_per_part, file.rows)
                parts.append(
                    ScorePart(
                        file=file,
                        start=start,
                        stop=stop,
                        first=first + start,
                        primary=self.primary,
                        guardian=self.guardian,
                        outcomes=self.outcomes,
                        binary=self.binary,
                    )
                )
            first += file.rows
        return parts

    def stamps(self) -> list[object]:
        """Return what is another once a file has other bytes, for each."""
        return [stamp_of(file.path) for file in self.files]

    def in_words(self, done: int) -> str:
        """Return how many rows and parts were worked on."""
        return f"{n_rows(f'{len(self):,}')} (parts: {done:,}, files: {len(self.files):,})"

    def repeated_id(self) -> str | None:
        """Return an id that more than one row has, in whichever files, and where two of them are; or None."""
        if "id" not in self.types:
            return None
        kinds = {file.path: file.types["id"] for file in self.files}
        return ask_files(list(kinds), lambda listed: listed.repeated_id(kinds))

    def digest(self, sums: Iterable[tuple[ScorePart, int]]) -> str:
        """Return the digest of all rows, in whichever files and order, from the sums of each part's hashes.

        Raises:
            ScoreLogError: a file is a copy of another.
        """
        of_files = dict.fromkeys((file.path for file in self.files), 0)
        for part, sum_of_part in sums:
            of_files[part.file.path] += sum_of_part
        return self._digest(of_files.values())

    def refuse_copies(self, log: ScoreLog) -> None:
        """Refuse files that are copies of each other, given all rows in memory."""
        arrays, of_files, first = (log.primary, log.guardian, log.binary), list[int](), 0
        for file in self.files:
            rows = slice(first, first + file.rows)
            ids = None if log.id is None else log.id[rows]
            of_files.append(sum_of_hashes(log.score_digits, log.offsets[rows.start : rows.stop + 1], arrays, ids))
            first = rows.stop
        self._digest(of_files)

    def _digest(self, of_files: Iterable[int]) -> str:
        seen, total = dict[tuple[int, int], PartFile](), 0
        for file, sum_of_file in zip(self.files, of_files, strict=True):
            total += sum_of_file
            other = seen.setdefault((file.rows, sum_of_file % (1 << 64)), file)
            if other is not file and file.rows >= _SURELY_COPIED:
                raise ScoreLogError(
                    f"{file.path} has the same {file.rows:,} rows as {other.path}, and they would count twice; leave the "
                    "copy out, or give rows a column `id` if they only look alike"
                )
        return log_digest(len(self), total)

    def sample(self, rows: int, *, seed: int = 0) -> ScoreLog:
        """Return a uniform sample of the rows, drawn without replacement, in order; all of them if there are no more.

        Args:
            rows: how many, at most 10 million.
            seed: of the draw.
        """
        if not 1 <= rows <= GATHERED:
            raise OptionError(f"a sample has 1 to {GATHERED:,} rows; got {rows!r}")
        if rows >= len(self):
            return self.gather("")
        chosen = np.sort(np.random.default_rng(seed).choice(len(self), rows, replace=False, shuffle=False))
        logs = [log for part in self.parts() if (log := _selected(part, chosen)) is not None]
        return join_logs(logs, f"{self.source} (a sample of {rows:,} of {n_rows(f'{len(self):,}')})")

    def gather(self, reason: str) -> ScoreLog:
        """Return all rows in memory.

        Args:
            reason: why they are needed at once, for the message.

        Raises:
            OptionError: there are more than 10 million.
        """
        if len(self) > GATHERED:
            raise OptionError(
                f"{self.source}: {reason} needs all rows in memory at once, at most {GATHERED:,}; there are {len(self):,}; "
                "leave that option out, or calibrate on a uniform sample: ScoreParts.sample"
            )
        return join_logs([part.load() for part in self.parts()], self.source)


def _selected(part: ScorePart, chosen: Integers) -> ScoreLog | None:
    """Return the rows of a part that are among those chosen, by their number in the log; None if none is."""
    low, high = np.searchsorted(chosen, [part.first, part.first + part.stop - part.start])
    return None if low == high else part.load().select(chosen[low:high] - part.first)


class FileList(ColumnReader):
    """All files at once, for questions that DuckDB answers by itself."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Open files that are all of one storage."""
        super().__init__(
            paths[0], hint="is every file complete and a Parquet file?", connection=partial(open_storage, paths[0])
        )
        self._files, self._paths = paths, _listed(paths)

    def rows_of_files(self) -> dict[str, int]:
        """Return the number of rows of each file, from the footers."""
        rows = self._query(f"select file_name as f, num_rows as n from parquet_file_metadata({self._paths})")
        return dict(zip(rows["f"].tolist(), [int(n) for n in rows["n"].tolist()], strict=True))

    def documents(self) -> dict[str, str]:
        """Return the JSON document of each file that carries one."""
        where = f"where decode(key) = {literal(METADATA_KEY)}"
        rows = self._query(f"select file_name as f, decode(value) as v from parquet_kv_metadata({self._paths}) {where}")
        return dict(zip(rows["f"].tolist(), rows["v"].tolist(), strict=True))

    def types_of(self, path: str) -> dict[str, str]:
        """Return DuckDB's type of each column of a file."""
        source = f"read_parquet({literal(escaped(path))}, hive_partitioning=false)"
        columns = self._query(f"describe select * from {source}")
        return dict(zip(columns["column_name"].tolist(), columns["column_type"].tolist(), strict=True))

    def repeated_id(self, kinds: Mapping[str, str]) -> str | None:
        """Return an id that occurs twice, with two of the files and rows it is in, or None.

        DuckDB counts distinct hashes, on disk beyond some memory; ids are compared only if hashes repeat.

        Args:
            kinds: the type of the ids of each file, since files of several types cannot be scanned as one.
        """
        self._run(f"set memory_limit = '{_MEMORY_FOR_IDS}'")
        self._run(f"set temp_directory = {literal(tempfile.gettempdir() + '/conformal_arbitrage')}")
        alike = [
            [path for path in self._files if kinds[path] == kind] for kind in {kinds[path] for path in self._files}
        ]
        ids = f"({' union all '.join(map(_ids_of, alike))})"
        counts = self._query(f"select count(id) as n, count(distinct hash(id)) filter (id is not null) as d from {ids}")
        if int(counts["n"][0]) == int(counts["d"][0]):
            return None
        twice = f"select id from {ids} where id is not null group by 1 having count(*) > 1 order by 1 limit 1"
        rows = self._query(f"select id, file, row from {ids} join ({twice}) using (id) order by file, row limit 2")
        places = [f"{file}, row {row}" for file, row in zip(rows["file"].tolist(), rows["row"].tolist(), strict=True)]
        return f"{rows['id'][0]!r} is the id of more than one row ({' and '.join(places)})" if places else None


def _listed(paths: Sequence[str]) -> str:
    return f"[{', '.join(literal(escaped(path)) for path in paths)}]"


def _ids_of(paths: Sequence[str]) -> str:
    """Return the query for the ids of some files, with file and row."""
    return (
        f'select "id"::varchar as id, {_FILE} as file, file_row_number + 1 as row from read_parquet({_listed(paths)}, '
        f"hive_partitioning=false, filename={literal(_FILE)}, file_row_number=true)"
    )


def ask_files(paths: Sequence[str], question: Callable[[FileList], _Answer]) -> _Answer:
    """Ask all files at once; if that fails, one after the other, so that the error names the file."""
    try:
        with FileList(paths) as listed:
            return question(listed)
    except ScoreLogError:
        for path in paths if len(paths) > 1 else ():
            ask_files([path], question)
        raise


def _describe_files(paths: Sequence[str]) -> list[PartFile]:
    rows, documents = ask_files(paths, lambda listed: (listed.rows_of_files(), listed.documents()))
    with FileList(paths) as listed:
        files = [
            PartFile(path=path, rows=rows[path], types=listed.types_of(path), document=documents.get(path, "{}"))
            for path in paths
        ]
    empty = [file for file in files if file.rows == 0]
    filled = [file for file in files if file.rows > 0]
    if not filled:
        raise ScoreLogError(f"{empty[0].path}: there are no rows; give it at least one")
    return filled


def first_rows(source: str) -> PartTable:
    """Open the first rows of a log, whichever of its columns play a role."""
    (file,) = _describe_files(find_files(source)[:1])
    part = ScorePart(
        file=file,
        start=0,
        stop=min(file.rows, ROWS_PER_PART),
        first=0,
        primary="",
        guardian=None,
        outcomes=(),
        binary=False,
    )
    return PartTable(part, None)


def _refuse_unlike(files: Sequence[PartFile], columns: Sequence[str]) -> None:
    """Refuse files that cannot be parts of one log."""
    first = files[0]
    for file in files:
        for column in columns:
            refuse_absent_column(column, file.types, file.path)
            if file.single(column) != first.single(column):
                raise ScoreLogError(
                    f"{file.path}: column '{column}' has another precision than in {first.path}; write both alike"
                )
        if set(file.types) != set(first.types):
            other = sorted(set(file.types) ^ set(first.types))[0]
            raise ScoreLogError(f"{file.path}: only it or {first.path} has a column '{other}'; give all files the same")
        if file.noted("identities") != first.noted("identities"):
            raise ScoreLogError(
                f"{file.path}: its scores were made by other models than those of {first.path}; calibrate each by itself"
            )
        if (file.noted("floor") or {}) != (first.noted("floor") or {}):
            raise ScoreLogError(
                f"{file.path}: was collected with another floor than {first.path}; collect both with one, fixed beforehand"
            )


# --- Engines ---


_Result = TypeVar("_Result")
PassProgress = Callable[[str], None]
"""Is told, in words, what was done."""
_RESTARTS: Final = 3
_AT_ONCE: Final = 64


def silent(_: str) -> None:
    """Say nothing about progress."""


@runtime_checkable
class Engine(Protocol):
    """Runs work on parts."""

    def run(self, work: Callable[[ScorePart], _Result], parts: Sequence[ScorePart], /) -> Iterator[_Result]:
        """Yield the result of every part, in any order; raise what the work raises."""
        ...


@dataclass(frozen=True, slots=True)
class Threads:
    """Runs work on threads of this process; DuckDB and NumPy use all cores in them."""

    jobs: int

    def run(self, work: Callable[[ScorePart], _Result], parts: Sequence[ScorePart], /) -> Iterator[_Result]:
        """Yield the results as they come."""
        with ThreadPoolExecutor(self.jobs) as pool:
            yield from completed(pool, NamedWork(work), parts, 2 * self.jobs)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Processes:
    """Runs work in processes of this machine; the parts of one that dies are done again by others.

    The processes are started with the first work, and end with this object.
    """

    jobs: int
    _pool: "ProcessPoolExecutor | None" = field(default=None, init=False, repr=False)

    def run(self, work: Callable[[ScorePart], _Result], parts: Sequence[ScorePart], /) -> Iterator[_Result]:
        """Yield the results as they come."""
        from concurrent.futures.process import BrokenProcessPool

        left = dict(enumerate(parts))
        for attempt in range(_RESTARTS + 1):
            try:
                work_left = completed(self._started(), _Numbered(NamedWork(work)), list(left.items()), 2 * self.jobs)
                for number, result in work_left:
                    del left[number]
                    yield result
            except BrokenProcessPool as error:
                self._pool = None
                if attempt == _RESTARTS:
                    raise EngineError(
                        f"processes died {attempt + 1} times; {_first_of(left)} is the first part that is not done; if "
                        "memory was short, take fewer --jobs, or smaller parts (rows_per_part=); in a script, call it under "
                        'if __name__ == "__main__":'
                    ) from error
            if not left:
                return

    def _started(self) -> "ProcessPoolExecutor":
        """Return the processes, started anew if one of them died."""
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.jobs, mp_context=context)
            finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        return self._pool


def _first_of(left: Mapping[int, ScorePart]) -> str:
    return left[min(left)].name


@dataclass(frozen=True, slots=True)
class NamedWork(Generic[_Result]):
    """Work whose unforeseen errors name the part; what is wrong with rows names file and row already."""

    work: Callable[[ScorePart], _Result]

    def __call__(self, part: ScorePart) -> _Result:
        """Do the work."""
        try:
            return self.work(part)
        except ArbitrageError:
            raise
        except Exception as error:  # whatever it is goes on, with the name of the part
            error.add_note(f"in {part.name}")
            raise


@dataclass(frozen=True, slots=True)
class _Numbered(Generic[_Result]):
    """Work that keeps the number of its part, so that it is known which parts are done."""

    work: Callable[[ScorePart], _Result]

    def __call__(self, item: tuple[int, ScorePart]) -> tuple[int, _Result]:
        number, part = item
        return number, self.work(part)


@dataclass(frozen=True, slots=True)
class ExecutorPool:
    """Runs work on an executor of the caller's."""

    executor: Executor

    def run(self, work: Callable[[ScorePart], _Result], parts: Sequence[ScorePart], /) -> Iterator[_Result]:
        """Yield the results as they come."""
        yield from completed(self.executor, NamedWork(work), parts, _AT_ONCE)


@dataclass(frozen=True, slots=True)
class DaskWorkers:
    """Runs work on the workers of a Dask scheduler, which does the parts of one that dies again.

    Attributes:
        client: a `distributed.Client`.
    """

    client: Any

    def run(self, work: Callable[[ScorePart], _Result], parts: Sequence[ScorePart], /) -> Iterator[_Result]:
        """Yield the results as they come."""
        from distributed import KilledWorker  # pyright: ignore

        try:
            yield from completed(self.client.get_executor(), NamedWork(work), parts, _AT_ONCE)
        except KilledWorker as error:  # pyright: ignore
            raise EngineError(f"Dask gave up: {error}") from error


_Item = TypeVar("_Item")


def completed(
    pool: Executor, work: Callable[[_Item], _Result], items: Iterable[_Item], at_once: int
) -> Iterator[_Result]:
    """Yield the results of an executor as they come, with so many items submitted at a time: no list of all is kept."""
    left = iter(items)
    running: set[Future[_Result]] = {pool.submit(work, item) for item in islice(left, at_once)}
    try:
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
            running |= {pool.submit(work, item) for item in islice(left, len(done))}
    finally:
        for future in running:
            future.cancel()


def as_engine(engine: "Engine | Executor | str | None", jobs: int | None = None) -> Engine:
    """Return an engine.

    Args:
        engine: an engine; an executor; "threads" (the default), "processes", or the address of a Dask scheduler
            (tcp://...).
        jobs: how many threads or processes; by default one for every core.
    """
    if isinstance(engine, Executor):
        return ExecutorPool(engine)
    if engine is not None and not isinstance(engine, str):
        return engine
    count = jobs or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else jobs or os.cpu_count() or 1
    if engine in (None, "threads"):
        return Threads(count)
    if engine == "processes":
        return Processes(count)
    return _remote(str(engine))


def _remote(address: str) -> Engine:
    if address.startswith(("tcp://", "tls://")):
        return _dask(address)
    from conformal_arbitrage.scorelog.spark import is_spark

    if is_spark(address):
        raise OptionError(
            f"engine {address}: Spark works on its own tables, and these files are one to it: name them "
            "table:parquet.`FOLDER` (in Python SparkTable), or take threads, processes or Dask"
        )
    raise OptionError(
        f"engine must be threads, processes or the address of a Dask scheduler (tcp://...); got {address!r}"
    )


def _dask(address: str) -> DaskWorkers:
    try:
        from distributed import Client  # pyright: ignore
    except ImportError as error:
        raise OptionError(f"engine {address}: needs Dask; pip install 'conformal-arbitrage[dask]'") from error
    try:
        return DaskWorkers(Client(address))  # pyright: ignore
    except (OSError, ValueError) as error:
        raise EngineError(f"engine {address}: there is no scheduler ({error}); check the address") from error
