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
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
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
_ADDRESSES: Final = ("sc://", "local", "spark://", "yarn", "k8s://")
_REASON: Final = 300


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
    from pyspark.errors import PySparkException

    classic = "connect" not in type(frame).__module__
    try:
        if classic:
            frame = frame.persist(StorageLevel.DISK_ONLY)
            frame.count()
        for row in frame.toLocalIterator():
            result, fault = pickle.loads(row[0])
            if fault is not None:
                raise fault
            yield result
    except PySparkException as error:
        raise EngineError(f"Spark gave up ({_reason(error)}); its log says more") from error
    finally:
        if classic:
            frame.unpersist()


def _reason(error: Exception) -> str:
    """Return the lines of an error that tell most: the last of a traceback, or the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    notes = [line for line in lines if line.startswith("in ") and ", rows " in line]
    told = [line for line in lines if "Error: " in line and not line.startswith("at ")]
    return "; ".join(dict.fromkeys([*(told[-1:] or lines[:1]), *notes[-1:]]))[:_REASON]


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
    if address.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers of this machine have what this process has
    builder: Any = SparkSession.builder
    if address != SPARK:
        builder = builder.remote(address) if address.startswith("sc://") else builder.master(address)
    try:
        session = builder.getOrCreate()
        if not address.startswith("local"):
            ship_package(session)
    except (PySparkException, RuntimeError, OSError) as error:
        raise EngineError(
            f"engine {address}: there is no session ({_reason(error)}); check the address, and Java"
        ) from error
    return session


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
