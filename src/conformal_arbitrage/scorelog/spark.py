"""Spark as an engine: parts as tasks. Only the DataFrame API is used, so Spark Connect works like a classic session.

Workers need NumPy, msgspec, DuckDB and this package (see `ship_package`), and must be able to read the files. Spark
repeats a task whose worker dies.

Knows nothing of what the work is.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportUnknownLambdaType=false
import os
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.parts import ScorePart

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class SparkTasks:
    """Runs each part as a task of a Spark session."""

    session: Any

    def run(self, work: Callable[[ScorePart], _Result], parts: Sequence[ScorePart], /) -> Iterator[_Result]:
        """Yield the results as they come."""
        tasks = [(pickle.dumps((work, part)),) for part in parts]
        frame = self.session.createDataFrame(tasks, "task binary").repartition(len(tasks))
        for row in frame.mapInArrow(_run_tasks, "result binary").toLocalIterator():
            yield pickle.loads(row[0])


def _run_tasks(batches: Iterator[Any]) -> Iterator[Any]:
    """Run the tasks of a partition, on a worker."""
    import pickle

    import pyarrow

    for batch in batches:
        for task in batch.column(0).to_pylist():
            work, part = pickle.loads(task)
            yield pyarrow.RecordBatch.from_pylist([{"result": pickle.dumps(work(part))}])


def spark_tasks(address: str) -> SparkTasks:
    """Open a session at an address: sc://host:port for Spark Connect, otherwise the master of a classic one."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise OptionError(f"engine {address}: needs PySpark; pip install 'conformal-arbitrage[spark]'") from error
    if address.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers of this machine have what this process has
    builder: Any = SparkSession.builder
    return SparkTasks(
        (builder.remote(address) if address.startswith("sc://") else builder.master(address)).getOrCreate()
    )


def ship_package(session: Any) -> None:
    """Send this package to the workers of a session, for clusters where it is not installed."""
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "conformal_arbitrage.zip"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
            for path in sorted(root.rglob("*.py")):
                zipped.write(path, path.relative_to(root.parent))
        session.addArtifacts(str(archive), pyfile=True)
