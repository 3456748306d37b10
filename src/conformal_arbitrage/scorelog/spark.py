"""Spark: a DataFrame or table as a score log; the work goes to the rows, and only small results come back."""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportUnknownLambdaType=false
import atexit
import hashlib
import os
import pickle
import re
import shutil
import socket
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import numpy as np

from conformal_arbitrage.core.exact import Floats, n_rows
from conformal_arbitrage.errors import ArbitrageError, EngineError, OptionError, ScoreLogError
from conformal_arbitrage.scorelog.log import Lists, RawColumns, ScoreLog, check_columns, checksum, log_digest
from conformal_arbitrage.scorelog.parts import NamedWork, PartFile, ScorePart
from conformal_arbitrage.scorelog.tables import TextBytes, refuse_absent_column, text_bytes

# --- Sessions of Spark, and what they say ---


_Result = TypeVar("_Result")
SPARK: Final = "spark"
"""Stands for the session that Spark's own settings describe."""
_REASON: Final = 300
_CONNECT: Final = "sc://"
_ADDRESSES: Final = (_CONNECT, "local", "spark://", "yarn", "k8s://")
_CONNECT_ADDRESS: Final = re.compile(r"sc://(?:\[([^\]]+)\]|([^:/;\[\]]+))(?::(\d+))?(?:/.*)?")
_CONNECT_PORT: Final = 15002
_ACCEPT_SECONDS: Final = 10.0
"""How long, in seconds, a server may take to accept a connection."""
_RETRIES: Final = 6
"""How often a request is repeated while a server does not answer: for about a minute, not for the ten of PySpark."""
_NOISE: Final = ("PySpark does not yet fully support pandas", r"\[RETRIES_EXCEEDED\]")
"""Warnings that tell users nothing: pandas is not used, and an error follows."""
_REMEDIES: Final = {
    "No module named": "the Python of Spark's workers (PYSPARK_PYTHON there) needs numpy, msgspec and pyarrow",
    "PYTHON_VERSION_MISMATCH": "run this and Spark's workers (PYSPARK_PYTHON there) with the same minor version of Python",
    "SESSION_NOT_FOUND": "the server was started anew; repeat the command",
    "UNAVAILABLE": "the server no longer answers; see that it runs, and repeat the command",
    "RETRIES_EXCEEDED": "the server no longer answers; see that it runs, and repeat the command",
    "TABLE_OR_VIEW_NOT_FOUND": "check its name",
    "FAILED_READ_FILE": "is the file complete, and has it changed since?",
    "Connection refused": "the Java machine of the session has ended; if memory was short, raise spark.driver.memory",
}


def result_of(work: Callable[[ScorePart], object], part: ScorePart) -> Any:
    """Return the result of a work on a part, or what is wrong with its rows, as an Arrow batch of one row.

    A fault of the rows is a result: Spark would do the same part again and again. Anything else that goes wrong is raised,
    so that Spark tries elsewhere, and names the part.
    """
    import pyarrow

    try:
        result = NamedWork(work)(part), None
    except ArbitrageError as fault:
        result = None, fault
    return pyarrow.RecordBatch.from_pydict({"result": pyarrow.array([pickle.dumps(result)], pyarrow.binary())})


def results_of(frame: Any) -> Iterator[Any]:
    """Yield the results in a frame as they come; raise the first fault.

    A classic session computes one partition after the other for an iterator, so its results are first computed all at once,
    and kept on the workers' disks; Spark Connect computes ahead by itself.
    """
    from pyspark import StorageLevel

    classic = "connect" not in type(frame).__module__
    with spark_errors("Spark gave up"):
        try:
            if classic:
                frame = frame.persist(StorageLevel.DISK_ONLY)
                frame.count()
            for row in frame.toLocalIterator():
                result, fault = pickle.loads(row[0])
                if fault is not None:
                    raise fault
                yield result
        finally:
            if classic:
                frame.unpersist()


@contextmanager
def spark_errors(what: str) -> Generator[None]:
    """Translate the errors of Spark, and of a Java machine or a server that is lost, into one that says what to do."""
    from pyspark.errors import PySparkException

    try:
        from py4j.protocol import Py4JError  # the thin client of Spark Connect has none
    except ImportError:
        Py4JError = PySparkException  # noqa: N806
    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:
        remedies = [remedy for sign, remedy in _REMEDIES.items() if sign in str(error)]
        raise EngineError(f"{what} ({_reason(error)}); {[*remedies, 'its log says more'][0]}") from error


def _reason(error: Exception) -> str:
    """Return the lines of an error that tell most: Java's exception, the last of a traceback, or the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    notes = [line for line in lines if line.startswith("in ") and ", rows " in line]
    causes = [line for line in lines if "Error: " in line and not line.startswith("at ")]
    thrown = [line.partition("Exception: ")[2] for line in lines if line.startswith(":") and "Exception: " in line]
    return "; ".join(dict.fromkeys([*(thrown[:1] or causes[-1:] or lines[:1]), *notes[-1:]]))[:_REASON]


def is_spark(address: str) -> bool:
    """Return whether an engine's name is that of Spark."""
    return address == SPARK or address.startswith(_ADDRESSES)


def spark_session(address: str) -> Any:
    """Open a session, with this package on its workers.

    Args:
        address: sc://host:port for Spark Connect; the master of a classic session; or "spark" for what Spark's own settings
            say (SPARK_REMOTE, spark-submit, spark-defaults.conf).

    Raises:
        OptionError: PySpark or Java is not installed.
        EngineError: there is no session to be had.
    """
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise OptionError(f"engine {address}: needs PySpark; pip install 'conformal-arbitrage[spark]'") from error
    for message in _NOISE:
        warnings.filterwarnings("ignore", message)
    if address.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers of this machine have what this process has
    builder: Any = SparkSession.builder
    if address.startswith(_CONNECT):
        _check_reachable(address)
        builder = builder.remote(address)
    elif address != SPARK:
        builder = builder.master(address)
    try:
        session = builder.getOrCreate()
        if address.startswith(_CONNECT):
            _shorten_retries(session)
        if not address.startswith("local"):
            ship_package(session)
    except (PySparkException, RuntimeError, OSError) as error:
        raise EngineError(
            f"engine {address}: there is no session ({_reason(error)}); check the address, and Java"
        ) from error
    return session


def _check_reachable(address: str) -> None:
    """Refuse the address of a server that does not answer, for which PySpark would wait ten minutes."""
    match = _CONNECT_ADDRESS.fullmatch(address)
    if match is None:
        raise OptionError(f"engine {address}: is no address of Spark Connect; write sc://host:{_CONNECT_PORT}")
    host, port = match[1] or match[2], int(match[3] or _CONNECT_PORT)
    try:
        socket.create_connection((host, port), _ACCEPT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"engine {address}: nothing answers at {host}, port {port} ({error}); check the address, and start the server "
            "with Spark's sbin/start-connect-server.sh"
        ) from error


def _shorten_retries(session: Any) -> None:
    from pyspark.sql.connect.client.retries import DefaultPolicy

    session.client.set_retry_policies([DefaultPolicy(max_retries=_RETRIES)])


def ship_package(session: Any) -> None:
    """Send this package to the workers of a session, where it goes before one that is installed."""
    session.addArtifacts(str(_archive()), pyfile=True)


@cache
def _archive() -> Path:
    """Return the package as an archive that lasts as long as this process: workers that start later fetch it, too.

    The name tells the content, since a session takes no other content under a known name.
    """
    root = Path(__file__).parent.parent
    sources = {str(path.relative_to(root.parent)): path.read_bytes() for path in sorted(root.rglob("*.py"))}
    digest = hashlib.sha256(repr(sources).encode()).hexdigest()[:16]
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    archive = folder / f"conformal_arbitrage-{digest}.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, source in sources.items():
            zipped.writestr(zipfile.ZipInfo(name), source, zipfile.ZIP_DEFLATED)
    return archive


# --- A table or frame of Spark as a score log ---


_ROWS: Final = 1 << 19
_NUMBERS: Final = re.compile(r"array<(double|float|tinyint|smallint|int|bigint)>")
_IDS: Final = ("string", "tinyint", "smallint", "int", "bigint")
_PARTITION: Final = 1 << 40
"""More rows than a partition has: numbers that order the batches of all partitions."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableBatch(ScorePart):
    """Some rows of a partition, on a worker; without them when it is sent back."""

    rows: Any = None
    seen: list[int] = field(default_factory=list[int])

    def __reduce__(self) -> tuple[Callable[[], "TableBatch"], tuple[()]]:
        kept = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("rows", "seen")}
        return partial(TableBatch, **kept), ()

    def load(self, columns: Sequence[str] | None = None, *, ids: bool = True) -> ScoreLog:
        """Return the rows; `columns` other than those a calibration reads are not there."""
        log = check_columns(_raw_columns(self, ids=ids))
        self.seen.append(checksum((log.primary, log.guardian)))
        return log.binarized() if self.binary else log

    def load_apart(self) -> tuple[ScoreLog, TextBytes | None]:
        """Return the scores, and the ids as bytes."""
        ids = _text_bytes(self.rows.column("id")) if "id" in self.rows.column_names else None
        return self.load([], ids=ids is not None and ids.has_empty()), ids


def _raw_columns(part: TableBatch, *, ids: bool) -> RawColumns:
    names: list[str] = part.rows.column_names
    guardian = part.guardian or "guardian"
    texts, distinct = _text_bytes(part.rows.column("id")).ids() if ids and "id" in names else (None, False)
    return RawColumns(
        source=part.file.path,
        columns=(part.primary, guardian),
        primary=_numbers(part.rows.column("primary")),
        guardian=_numbers(part.rows.column("guardian")),
        single=frozenset(name for name in (part.primary, guardian) if part.file.single(name)),
        lists={"correct": _numbers(part.rows.column("correct"))} if "correct" in names else {},
        outcomes=("correct",) if "correct" in names else (),
        id=texts,
        distinct=distinct,
        label=_floats(part.rows.column("label")) if "label" in names else None,
        first_row=part.start,
    )


def _numbers(column: Any) -> Lists:
    """Return a list column of Arrow: flat values, null as NaN, and each row's length, -1 for null."""
    compute: Any = import_module("pyarrow.compute")  # whose functions are made when it is loaded
    lengths = compute.fill_null(compute.list_value_length(column), -1)
    return _floats(compute.list_flatten(column)), np.asarray(lengths.to_numpy(), dtype=np.int64)


def _text_bytes(column: Any) -> TextBytes:
    """Return texts, or numbers as such."""
    import pyarrow

    return text_bytes(pyarrow.table({"id": column.cast(pyarrow.large_string())}), len(column))


def _floats(column: Any) -> Floats:
    return np.asarray(column.to_numpy(), dtype=np.float64)


def run_batches(task: bytes, batches: Iterable[Any]) -> Iterator[Any]:
    """Do the work on the rows of a partition, on a worker."""
    work, template = pickle.loads(task)
    return (result_of(_Counted(work), part) for part in _parts_of(template, batches))


def send_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the rows of a partition as results, on a worker."""
    import pyarrow

    for rows in _joined(batches):
        sent = pickle.dumps((rows, None))
        yield pyarrow.RecordBatch.from_pydict({"result": pyarrow.array([sent], pyarrow.binary())})


def _parts_of(template: TableBatch, batches: Iterable[Any]) -> Iterator[TableBatch]:
    from pyspark import TaskContext

    context = TaskContext.get()
    number = 0 if context is None else context.partitionId()
    file = replace(template.file, path=f"{template.file.path}, partition {number}")
    start = 0
    for rows in _joined(batches):
        stop = start + rows.num_rows
        yield replace(template, file=file, start=start, stop=stop, first=_PARTITION * number + start, rows=rows)
        start = stop


@dataclass(frozen=True, slots=True)
class _Counted:
    """Work that also returns how many rows there were, and their checksum."""

    work: Callable[[ScorePart], object]

    def __call__(self, part: ScorePart) -> tuple[int, int, object]:
        result = self.work(part)
        return part.stop - part.start, part.seen[-1] if isinstance(part, TableBatch) else 0, result


def _joined(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield Arrow tables of about half a million rows."""
    import pyarrow

    waiting: list[Any] = []
    for batch in batches:
        waiting.append(batch)
        if sum(batch.num_rows for batch in waiting) >= _ROWS:
            yield pyarrow.Table.from_batches(waiting).combine_chunks()
            waiting = []
    if sum(batch.num_rows for batch in waiting):
        yield pyarrow.Table.from_batches(waiting).combine_chunks()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SparkTable:
    """A score log that is a table or any other frame of Spark, and the engine that works on it.

    `calibrate` and `verify` take one in the place of a `ScoreLog`, with the same results.

    Attributes:
        frame: the frame; computed anew in every pass, so its rows must be the same each time.
        name: for messages.
        primary: the column of the Primary's scores, an array of double or float.
        guardian: the column of the Guardian's scores.
        id: the column of unique ids, if there is one; boundary="random" needs it.
        binary: whether the loss is measured on the paper's 0/1 Guardian; see `binarized`.
    """

    frame: Any
    name: str = "frame"
    primary: str = "primary"
    guardian: str | None = "guardian"
    id: str = "id"
    binary: bool = False
    _seen: dict[str, int] = field(default_factory=dict[str, int])
    _copies: list["tempfile.TemporaryDirectory[str]"] = field(default_factory=list["tempfile.TemporaryDirectory[str]"])

    @classmethod
    def open(cls, address: str, table: str, *, primary: str = "primary", guardian: str = "guardian") -> "SparkTable":
        """Find a table of a session's catalog.

        Args:
            address: of the session; see `spark_session`.
            table: its name, with catalog and schema if need be.
            primary: the column of the Primary's scores.
            guardian: the column of the Guardian's scores.

        Raises:
            EngineError: there is no session, or no such table.
        """
        session = spark_session(address)
        with spark_errors(f"table {table}: cannot be opened"):
            frame = session.table(table)
            frame.schema  # noqa: B018 - Connect looks for the table only now
        return cls(frame=frame, name=f"table {table}", primary=primary, guardian=guardian)

    def copied(self) -> str:
        """Return a folder of Parquet files with all rows and columns, copied once, which lasts as long as this table."""
        if not self._copies:
            folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            parquet: Any = import_module("pyarrow.parquet")
            for number, rows in enumerate(results_of(self.frame.mapInArrow(send_batches, "result binary"))):
                parquet.write_table(rows, f"{folder.name}/rows-{number:06}.parquet")
            self._copies.append(folder)
        return self._copies[0].name

    def binarized(self) -> "SparkTable":
        """Return the log with the paper's 0/1 Guardian as its loss column; see `ScoreLog.binarized`."""
        return replace(self, binary=True)

    def __len__(self) -> int:
        """Count the rows, once."""
        if "rows" not in self._seen:
            self._check_types()
            ((self._seen["rows"],),) = self._query("count(*)")
        if self._seen["rows"] == 0:
            raise ScoreLogError(f"{self.source}: there are no rows; give it at least one")
        return self._seen["rows"]

    def __repr__(self) -> str:
        return f"<SparkTable {self.name}>"

    @property
    def source(self) -> str:
        """The table, for messages."""
        return self.name

    @property
    def types(self) -> Mapping[str, str]:
        """Spark's type of each column."""
        return dict(self.frame.dtypes)

    @property
    def columns(self) -> tuple[str, str]:
        """The names under which Primary and Guardian stand."""
        return self.primary, self.guardian or "guardian"

    @property
    def has_ids(self) -> bool:
        """Whether rows have ids."""
        return self.id in self.types

    @property
    def identities(self) -> None:
        """The scorers that made the scores: a table does not say."""
        return

    def parts(self) -> list[ScorePart]:
        """Return no parts: the rows are where they are."""
        return []

    def stamps(self) -> list[object]:
        """Return nothing: Spark says itself when the files of a table have changed."""
        return []

    def in_words(self, done: int) -> str:
        """Return how many rows and batches were worked on."""
        return f"{n_rows(f'{len(self):,}')} in {done} batches of {self.source}"

    def repeated_id(self) -> str | None:
        """Return an id that occurs twice, in words, or None."""
        if self.id not in self.types:
            return None
        id = f"cast({_quoted(self.id)} as string)"
        ((rows, distinct),) = self._query("count(*)", f"count(distinct {id})")
        if rows == distinct:
            return None
        counted = self.frame.selectExpr(f"{id} as id").groupBy("id").count().where("count > 1 or id is null")
        with spark_errors(f"{self.source}: cannot be read"):
            return f"{counted.orderBy('id').limit(1).collect()[0][0]!r} is the id of more than one row"

    def digest(self, sums: Iterable[tuple[ScorePart, int]]) -> str:
        """Return the digest of all rows, in whichever order, from the sums of each batch's hashes."""
        return log_digest(len(self), sum(part_sum for _, part_sum in sums))

    def gather(self, reason: str) -> NoReturn:
        """Refuse to put all rows together in memory."""
        raise OptionError(
            f"{self.source}: {reason} needs all rows in memory at once; write the table as Parquet files and read them with "
            "ScoreParts, or leave that option out"
        )

    def run(self, work: Callable[[ScorePart], _Result], parts: Sequence[ScorePart], /) -> Iterator[_Result]:
        """Yield the results of all batches as they come.

        Raises:
            EngineError: the rows are not those of an earlier pass.
        """
        task = pickle.dumps((work, self._template()))

        def run(batches: Iterator[Any]) -> Iterator[Any]:
            return run_batches(task, batches)

        rows = total = 0
        for count, sum_of_scores, result in results_of(self._selected().mapInArrow(run, "result binary")):
            rows, total = rows + count, (total + sum_of_scores) % (1 << 64)
            yield result
        if (rows, total) != (len(self), self._seen.setdefault("checksum", total)):
            raise EngineError(
                f"{self.source}: its rows changed between two passes ({len(self):,}, then {rows:,}); calibrate a frame that "
                "is the same each time it is computed: a snapshot of the table, or one that was written"
            )

    def _selected(self) -> Any:
        """Return the frame of the columns that workers read."""
        return self.frame.selectExpr(*(f"{_quoted(name)} as {alias}" for alias, name in self._named().items()))

    def _template(self) -> TableBatch:
        singles = {name: "FLOAT[]" for name, kind in self.types.items() if kind == "array<float>"}
        file = PartFile(path=self.source, rows=len(self), types=singles, document="{}")
        return TableBatch(
            file=file, start=0, stop=0, first=0, primary=self.primary, guardian=self.guardian, outcomes=(),
            binary=self.binary,
        )  # fmt: skip

    def _named(self) -> dict[str, str]:
        """Return the columns that workers read, by the name they have there."""
        named = {"primary": self.primary, "guardian": self.guardian or "", "id": self.id}
        named |= {"label": "label", "correct": "correct"} if self.binary else {}
        return {alias: name for alias, name in named.items() if name in self.types}

    def _query(self, *columns: str) -> list[tuple[int, ...]]:
        with spark_errors(f"{self.source}: cannot be read"):
            return [tuple(row) for row in self.frame.selectExpr(*columns).collect()]

    def _check_types(self) -> None:
        """Refuse columns that are not there, or hold something else than numbers."""
        for name in (self.primary, *([] if self.guardian is None else [self.guardian])):
            refuse_absent_column(name, self.types, self.source)
            if not _NUMBERS.fullmatch(self.types[name]):
                raise ScoreLogError(
                    f"{self.source}: column '{name}' is {self.types[name]}; it must be array<double> or array<float>"
                )
        if self.types.get(self.id, "string") not in _IDS:
            raise ScoreLogError(
                f"{self.source}: column '{self.id}' is {self.types[self.id]}; ids are text or whole numbers"
            )


def _quoted(name: str) -> str:
    """Return a column's name as Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"
