"""ScoreParts: a score log in many Parquet files, on disk or on object storage, of which only a part is in memory at a time.

A part is a range of rows of one file, small enough to send anywhere: whoever loads it reads the file. Faults name file and
row. URLs are opened with fsspec.

Knows nothing of budgets, nor of where the work on a part is done.
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from conformal_arbitrage.core.arrays import Integers
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.digests import LEAF, files_digest, leaf_digests
from conformal_arbitrage.scorelog.joining import join_logs
from conformal_arbitrage.scorelog.locations import (
    escaped,
    find_files,
    is_parquet,
    register_storage,
    scheme_of,
    stamp_of,
)
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.tables import (
    METADATA_KEY,
    ColumnReader,
    as_document,
    connect,
    connect_here,
    literal,
    quoted,
    refuse_absent_column,
)
from conformal_arbitrage.scorelog.texts import TextBytes

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

    def single(self, column: str) -> bool:
        """Return whether a column is in single precision."""
        noted: Any = as_document(self.document, self.path).get("score_digits") or {}
        return self.types.get(column, "").startswith("FLOAT[") or noted.get(column) == 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePart:
    """A range of rows of one file.

    Attributes:
        file: the file.
        start: its first row, counted from 0.
        stop: the row after its last.
        first: the number of this first row in the whole log.
        primary: the column that plays the Primary.
        guardian: the column that plays the Guardian, or None.
        outcomes: list columns to read as outcomes besides `correct`.
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

    def digests(self, log: ScoreLog, ids: TextBytes | None) -> tuple[str, ...]:
        """Return the digests of its leaves, given what `load_apart` returns."""
        return leaf_digests(log.score_digits, log.offsets, (log.primary, log.guardian, log.binary), ids)

    def _complete(self, log: ScoreLog) -> ScoreLog:
        """Return what was read of the part, if these are as many rows as the file had when it was found."""
        if len(log) != self.stop - self.start:
            raise ScoreLogError(
                f"{self.name}: there are {len(log):,} rows: the file has changed since it was found; let nobody write to a "
                "log that is being read, and start again"
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
            connection=connect_here if scheme_of(path) is None else partial(connect, threads=1),
        )
        register_storage(self._connection, path)
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
            rows_per_part: the most rows that are read at a time; rounded up to a multiple of 65,536.

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
            rows_per_part=-(-rows_per_part // LEAF) * LEAF,
        )

    def binarized(self) -> "ScoreParts":
        """Return the log with the paper's 0/1 Guardian as its loss column; see `ScoreLog.binarized`."""
        return replace(self, binary=True)

    def __len__(self) -> int:
        return sum(file.rows for file in self.files)

    def __repr__(self) -> str:
        return f"<ScoreParts {self.source}: {len(self):,} rows in {len(self.files)} files>"

    @property
    def types(self) -> Mapping[str, str]:
        """DuckDB's type of each column of the first file."""
        return self.files[0].types

    @property
    def columns(self) -> tuple[str, str]:
        """The names under which Primary and Guardian stand."""
        return self.primary, self.guardian or "guardian"

    @property
    def identities(self) -> Mapping[str, Any] | None:
        """The scorers that made the scores, by column; None if the files do not say."""
        return as_document(self.files[0].document, self.source).get("identities")

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
        return f"{len(self):,} rows (parts: {done:,}, files: {len(self.files):,})"

    def repeated_id(self) -> str | None:
        """Return an id that more than one row has, in whichever files, and where two of them are; or None."""
        if "id" not in self.types:
            return None
        kinds = {file.path: file.types["id"] for file in self.files}
        return ask_files(list(kinds), lambda listed: listed.repeated_id(kinds))

    def digest(self, digests: Iterable[tuple[ScorePart, Sequence[str]]]) -> str:
        """Return the digest of all files, in whichever order, from those of the leaves of each part."""
        files: dict[str, tuple[PartFile, list[str]]] = {}
        for part, own in sorted(digests, key=lambda pair: pair[0].first):
            files.setdefault(part.file.path, (part.file, []))[1].extend(own)
        return _digest(list(files.values()))

    def digest_of(self, log: ScoreLog) -> str:
        """Return the digest of all files, given their rows in memory."""
        arrays, files, first = (log.primary, log.guardian, log.binary), list[tuple[PartFile, tuple[str, ...]]](), 0
        for file in self.files:
            ids = None if log.id is None else log.id[first : first + file.rows]
            own = log.offsets[first : first + file.rows + 1]
            files.append((file, leaf_digests(log.score_digits, own, arrays, ids)))
            first += file.rows
        return _digest(files)

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
        return join_logs(logs, f"{self.source} (a sample of {rows:,} of {len(self):,} rows)")

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


def _digest(files: Sequence[tuple[PartFile, Sequence[str]]]) -> str:
    """Return the digest of all files, given those of the leaves of each; refuse rows that are there twice."""
    seen: dict[tuple[str, ...], PartFile] = {}
    for file, leaves in files:
        other = seen.setdefault(tuple(leaves), file)
        if other is not file and file.rows >= _SURELY_COPIED:
            raise ScoreLogError(
                f"{file.path} has the same {file.rows:,} rows as {other.path}, and they would count twice; leave the copy "
                "out, or give rows a column `id` if they only look alike"
            )
    return files_digest(leaves for _, leaves in files)


def _selected(part: ScorePart, chosen: Integers) -> ScoreLog | None:
    """Return the rows of a part that are among those chosen, by their number in the log; None if none is."""
    low, high = np.searchsorted(chosen, [part.first, part.first + part.stop - part.start])
    return None if low == high else part.load().select(chosen[low:high] - part.first)


def is_large(source: str) -> bool:
    """Return whether a name is that of one local Parquet file with more rows than are ever put together in memory."""
    if scheme_of(source) is not None or not is_parquet(source) or not Path(source).is_file():
        return False
    try:
        with FileList([source]) as listed:
            return sum(listed.rows_of_files().values()) > GATHERED
    except ScoreLogError:  # whoever reads the file will say what is wrong with it
        return False


class FileList(ColumnReader):
    """All files at once, for questions that DuckDB answers by itself."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Open files that are all of one storage."""
        super().__init__(paths[0], hint="is every file complete and a Parquet file?")
        self._files, self._paths = paths, _listed(paths)
        for scheme in {scheme_of(path): path for path in paths}.values():
            register_storage(self._connection, scheme)

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
        if _identities(file) != _identities(first):
            raise ScoreLogError(
                f"{file.path}: its scores were made by other models than those of {first.path}; calibrate each by itself"
            )


def _identities(file: PartFile) -> object:
    return as_document(file.document, file.path).get("identities")
