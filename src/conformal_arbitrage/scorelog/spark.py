"""Spark as an engine: parts as tasks. Only the DataFrame API is used, so Spark Connect works like a classic session.

Workers need NumPy, msgspec and DuckDB, and must be able to read the files; the package itself is sent to them, so that they
compute what this release computes. Spark repeats a task whose worker dies.

Knows nothing of what the work is.
"""

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
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from conformal_arbitrage.errors import ArbitrageError, EngineError, OptionError
from conformal_arbitrage.scorelog.engines import NamedWork
from conformal_arbitrage.scorelog.parts import ScorePart

_Result = TypeVar("_Result")
SPARK: Final = "spark"
"""Stands for the session that Spark's own settings describe."""
_REASON: Final = 300
_CONNECT: Final = "sc://"
_ADDRESSES: Final = (_CONNECT, "local", "spark://", "yarn", "k8s://")
_CONNECT_ADDRESS: Final = re.compile(r"sc://(?:\[([^\]]+)\]|([^:/;\[\]]+))(?::(\d+))?(?:/.*)?")
_CONNECT_PORT: Final = 15002
_PATIENCE: Final = 10.0
"""How long, in seconds, a server may take to accept a connection."""
_RETRIES: Final = 6
"""How often a request is repeated while a server does not answer: for about a minute, not for the ten of PySpark."""
_NOISE: Final = ("PySpark does not yet fully support pandas", r"\[RETRIES_EXCEEDED\]")
"""Warnings that tell users nothing: pandas is not used, and an error follows."""
_REMEDIES: Final = {
    "No module named": "the Python of Spark's workers (PYSPARK_PYTHON there) needs numpy, msgspec, duckdb and pyarrow",
    "PYTHON_VERSION_MISMATCH": "run this and Spark's workers (PYSPARK_PYTHON there) with the same minor version of Python",
    "SESSION_NOT_FOUND": "the server was started anew; repeat the command",
    "UNAVAILABLE": "the server no longer answers; see that it runs, and repeat the command",
    "RETRIES_EXCEEDED": "the server no longer answers; see that it runs, and repeat the command",
    "TABLE_OR_VIEW_NOT_FOUND": "check its name",
    "FAILED_READ_FILE": "is the file complete, and has it changed since?",
    "Connection refused": "the Java machine of the session has ended; if memory was short, raise spark.driver.memory",
}


@dataclass(frozen=True, slots=True)
class SparkTasks:
    """Runs each part as a task of a Spark session."""

    session: Any

    def run(self, work: Callable[[ScorePart], _Result], parts: Sequence[ScorePart], /) -> Iterator[_Result]:
        """Yield the results as they come."""
        tasks = packed((work, list(parts)))

        def run(batches: Iterator[Any]) -> Iterator[Any]:
            return run_tasks(tasks, batches)

        yield from results_of(self.session.range(0, len(parts), 1, len(parts)).mapInArrow(run, "result binary"))


def run_tasks(tasks: bytes, batches: Iterator[Any]) -> Iterator[Any]:
    """Do the work on the parts whose numbers are in a partition, on a worker."""
    work, parts = unpacked(tasks)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield result_of(work, parts[number])


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
    """Translate the errors of Spark, and of a Java machine or a server that is lost, into one that says what to do.

    Args:
        what: what failed, for the message.
    """
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


def packed(value: object) -> bytes:
    """Return a value as few bytes: the parts of a log have most in common."""
    return zlib.compress(pickle.dumps(value), 1)


def unpacked(data: bytes) -> Any:
    """Return the value that bytes stand for."""
    return pickle.loads(zlib.decompress(data))


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
        socket.create_connection((host, port), _PATIENCE).close()
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
