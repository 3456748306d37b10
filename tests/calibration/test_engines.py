"""Engines that are not of this process: Spark and Dask, real ones, and what runs on the workers of a Spark table."""

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformal_arbitrage import (
    EngineError,
    OptionError,
    ScoreLog,
    ScoreLogError,
    ScoreParts,
    SparkTable,
    calibrate,
    verify,
)
from conformal_arbitrage.scorelog.parts import Processes, as_engine
from conformal_arbitrage.scorelog.spark import spark_errors
from tests.calibration.planted import differing
from tests.calibration.test_parts import KEY, OPTIONS, some_log, told, write_parts
from tests.conftest import SHARED

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = int(os.environ.get("ENGINE_ROUNDS", "0"))


def checks(script, folder, *options):
    """Run a script that compares; return what it reports by name."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", script, str(folder), *options]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env={**os.environ, "PYTHONPATH": path}
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"check"')]
    return {line["check"]: line["differences"] for line in lines}


REFUSALS = {
    "partition": "ScoreLogError: table lake.scores, partition 0: row ",
    "id": "ScoreLogError: frame: 'q30' is the id of more than one row",
    "type": "ScoreLogError: frame: column 'id' is string; it must be array<double>",
    "column": "ScoreLogError: frame: there is no column 'qwen'",
    "rows": "ScoreLogError: frame: there are no rows",
    "table": "EngineError: table nothing: cannot be opened ([TABLE_OR_VIEW_NOT_FOUND]",
    "moving": "EngineError: frame: its rows changed between two passes",
    "unforeseen": "EngineError: Spark gave up (TypeError: object of type 'TableBatch' has no len(); in frame, partition 0, ",
}


@pytest.mark.proof
@pytest.mark.skipif(
    find_spec("pyspark") is None or find_spec("grpc") is None,
    reason="pyspark[connect] is not installed: pip install '.[spark]'",
)
@pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java for Spark: apt install default-jre-headless")
def test_spark_gives_the_certificate_of_the_rows_in_memory(tmp_path):
    options = ["--rounds", str(ROUNDS), *(["--logs", str(SHARED)] if ROUNDS and SHARED.exists() else [])]
    reported = checks("tests.calibration.on_spark", tmp_path, *options)
    refused = reported.pop("refusals")
    assert len(reported) >= 7 + ROUNDS
    assert not {name: differences for name, differences in reported.items() if differences}
    for what, message in REFUSALS.items():
        assert refused[what].startswith(message), (what, refused)


@pytest.mark.proof
@pytest.mark.skipif(find_spec("distributed") is None, reason="distributed is not installed: pip install '.[dask]'")
def test_dask_gives_the_certificate_of_the_rows_in_memory(tmp_path):
    reported = checks("tests.calibration.on_dask", tmp_path, *(["--faults"] if ROUNDS else []))
    assert reported["nowhere"].startswith("EngineError: engine tcp://127.0.0.1:9: there is no scheduler")
    assert reported["unforeseen"].startswith("TypeError")
    assert "parquet, rows 1 to 200" in reported["unforeseen"]
    assert not reported["equal"]
    assert not reported["a worker is killed"]
    assert not reported.get("planted")
    assert not reported.get("spoiled")


class ArrowFrame:
    """As much of a Spark frame as a table needs, over Arrow in this process: what workers run is real."""

    def __init__(self, table, *, partitions=3, batch=17):
        self.table, self.partitions, self.batch = table, partitions, batch

    @property
    def dtypes(self):
        lists = {one.name: one.type.value_type for one in self.table.schema if hasattr(one.type, "value_type")}
        return [(name, f"array<{lists[name]}>" if name in lists else "string") for name in self.table.column_names]

    def selectExpr(self, *columns):  # noqa: N802
        chosen = ", ".join(column.replace("`", '"') for column in columns)
        with duckdb.connect() as connection:
            connection.register("frame", self.table)
            selected = connection.sql(f"select {chosen} from frame").to_arrow_table()
        return ArrowFrame(selected, partitions=self.partitions, batch=self.batch)

    def collect(self):
        return [tuple(row.values()) for row in self.table.to_pylist()]

    def mapInArrow(self, run, _):  # noqa: N802
        edges = np.linspace(0, self.table.num_rows, self.partitions + 1).astype(int)
        slices = [self.table.slice(a, b - a) for a, b in pairwise(edges.tolist())]
        self.results = [
            (value,)
            for one in slices
            for batch in run(iter(one.to_batches(max_chunksize=self.batch)))
            for value in batch.column(0).to_pylist()
        ]
        return self

    def persist(self, _):
        return self

    def unpersist(self):
        return self

    def count(self):
        return len(self.results)

    def toLocalIterator(self):  # noqa: N802
        return iter(self.results)


needs_pyspark = pytest.mark.skipif(
    find_spec("pyspark") is None, reason="pyspark is not installed: pip install '.[spark]'"
)


def frame_of(log, **keywords):
    return ArrowFrame(log.to_arrow(), **keywords)


@pytest.mark.proof
@needs_pyspark
@given(seed=st.integers(0, 2**32 - 1), keywords=st.sampled_from([*OPTIONS, {"confidence": "0.9"}]))
@settings(max_examples=15, deadline=None)
def test_what_workers_do_with_a_table_gives_the_certificate_of_its_rows(seed, keywords):
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(["unit", "coarse", "single"]))
    log = some_log(int(rng.integers(1, 150)), seed, kind=kind, missing=0.1)
    table = SparkTable(frame=frame_of(log, partitions=int(rng.integers(1, 5)), batch=int(rng.integers(1, 60))))
    if "confidence" in keywords:
        log, table = log.binarized(), table.binarized()
    keywords = {**keywords, "missing_guardian": "worst_case"}
    alpha = str(rng.choice(["0.9", "0.5", "0.2", "0.05"]))
    expected, certificate = calibrate(log, alpha, **keywords), calibrate(table, alpha, **keywords)
    assert not differing(expected, certificate)
    assert certificate.evidence.log_sha256 == expected.evidence.log_sha256
    assert verify(certificate, table)


@needs_pyspark
def test_the_digest_of_a_table_depends_on_its_rows_and_not_on_their_order():
    log = some_log(200, missing=0.1)
    keywords = {"missing_guardian": "worst_case"}
    certificate = calibrate(SparkTable(frame=frame_of(log)), "0.3", **keywords)
    backwards = log.select(range(199, -1, -1))
    assert verify(certificate, SparkTable(frame=frame_of(backwards, partitions=5)))
    renamed = replace(log, id=np.array(["other", *log.id.tolist()[1:]], dtype=log.id.dtype))
    assert set(verify(certificate, SparkTable(frame=frame_of(renamed))).differences) == {"log_sha256"}
    swapped = log.primary.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert "log_sha256" in verify(certificate, SparkTable(frame=frame_of(replace(log, primary=swapped)))).differences


@needs_pyspark
@pytest.mark.parametrize("kind", ["unit", "single"])
def test_what_spark_certified_threads_verify_and_the_other_way_round(tmp_path, kind):
    log = replace(some_log(300, kind=kind, missing=0.1), identities=None)  # a table does not name its models
    keywords = {"missing_guardian": "worst_case"}
    files = ScoreParts.read(write_parts(log, tmp_path / "p", [100, 130]), rows_per_part=64)
    table = SparkTable(frame=frame_of(log.select(range(299, -1, -1)), partitions=4))
    by_spark, by_threads = (calibrate(source, "0.3", **keywords) for source in (table, files))
    assert by_spark.evidence.log_sha256 == by_threads.evidence.log_sha256
    assert verify(by_spark, files, engine="threads")
    assert verify(by_threads, table)
    other = ScoreParts.read(write_parts(some_log(300, 1, kind=kind, missing=0.1), tmp_path / "other", [100]))
    assert "log_sha256" in verify(by_spark, other).differences


@needs_pyspark
def test_the_batches_of_a_table_are_joined_up_to_a_size(monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.scorelog.spark._ROWS", 50)
    log, lines = some_log(200), []
    table = SparkTable(frame=frame_of(log, partitions=2, batch=20))
    assert not differing(calibrate(log, "0.2"), calibrate(table, "0.2", progress=lines.append))
    assert lines[0] == "pass 1: 200 rows in 4 batches of frame"


@pytest.fixture
def large(monkeypatch):
    """A log that counts as large, whose gaps share some dozens of buckets."""
    monkeypatch.setattr("conformal_arbitrage.calibration.calibrate.FEW_ROWS", 1000)
    monkeypatch.setattr("conformal_arbitrage.scorelog.spark._ROWS", 2000)
    rng = np.random.default_rng(0)
    return ScoreLog.from_arrays(rng.random((20_000, 3)) / 1000, rng.random((20_000, 3)))


def passes(log, table, alpha):
    """Calibrate a table; return the number of passes."""
    lines = []
    assert not differing(calibrate(log, alpha), calibrate(table, alpha, progress=lines.append))
    return len(lines)


@needs_pyspark
@pytest.mark.parametrize("alpha", ["0.01", "0.1", "0.2"])
def test_the_batches_of_a_table_know_about_where_its_threshold_is(large, monkeypatch, alpha):
    table = SparkTable(frame=frame_of(large, partitions=4, batch=512))
    assert passes(large, table, alpha) == 1
    monkeypatch.setattr("conformal_arbitrage.calibration.calibrate._KEPT", 10)
    assert passes(large, table, alpha) == 2


@needs_pyspark
def test_a_table_whose_batches_differ_needs_a_second_pass(large):
    by_margin = np.argsort(np.diff(np.sort(large.primary.reshape(-1, 3)))[:, -1])
    assert passes(large, SparkTable(frame=frame_of(large.select(by_margin), partitions=4, batch=512)), "0.1") == 2


@needs_pyspark
def test_a_row_of_a_table_without_an_id_is_named():
    log = some_log(200)
    ids = np.array([*log.id.tolist()[:-1], ""], dtype=log.id.dtype)
    with pytest.raises(ScoreLogError, match="frame, partition 0: row 67, column 'id'"):
        calibrate(SparkTable(frame=frame_of(replace(log, id=ids))), "0.2")


@needs_pyspark
def test_a_table_whose_rows_change_between_passes_is_refused():
    table = SparkTable(frame=frame_of(some_log(200, kind="coarse")))

    def swap_scores(_):
        table.frame.table = some_log(200, seed=1, kind="coarse").to_arrow()

    with pytest.raises(EngineError, match=r"rows changed between two passes \(200, then 200\)"):
        calibrate(table, "0.1", boundary="random", key=KEY, progress=swap_scores)


@needs_pyspark
def test_a_table_takes_no_other_engine_and_gathers_nothing():
    table = SparkTable(frame=frame_of(some_log(50)))
    assert repr(table) == "<SparkTable frame>"
    with pytest.raises(OptionError, match="done by its session"):
        calibrate(table, "0.2", engine="threads")
    with pytest.raises(OptionError, match=r"by= \(--by\) needs all rows in memory"):
        calibrate(table, "0.2", by="group")
    with pytest.raises(OptionError, match="needs the Guardian's scores"):
        calibrate(SparkTable(frame=table.frame, guardian=None), "0.2")


class Deadly:
    """Work that no process survives."""

    def __call__(self, part):
        os._exit(9)


@pytest.mark.proof
def test_processes_that_die_again_and_again_are_given_up_with_the_part_named(tmp_path, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.scorelog.parts._RESTARTS", 1)
    parts = ScoreParts.read(write_parts(some_log(60), tmp_path / "p", [30])).parts()
    with pytest.raises(EngineError, match=r"died 2 times; .*scores-00\.parquet, rows 1 to 30 is the first part"):
        list(Processes(2).run(Deadly(), parts))


def process_of(part):
    return os.getpid()


def test_processes_last_from_pass_to_pass_and_end_with_the_engine(tmp_path):
    parts = ScoreParts.read(write_parts(some_log(60), tmp_path / "p", [30])).parts()
    engine = Processes(1)
    (worker,) = {*engine.run(process_of, parts), *engine.run(process_of, parts)}
    assert worker in {child.pid for child in multiprocessing.active_children()}
    del engine
    for _ in range(600):
        if worker not in {child.pid for child in multiprocessing.active_children()}:
            return
        time.sleep(0.1)
    pytest.fail("the process is still there")


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_an_unforeseen_error_names_the_part(tmp_path, engine):
    folder = write_parts(some_log(90), tmp_path / "p", [30, 60])
    assert "in " in (message := told(lambda: list(as_engine(engine).run(len, ScoreParts.read(folder).parts()))))
    assert "parquet, rows 1 to 30" in message


@needs_pyspark
@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "sc://127.0.0.1:{port}",
            r"nothing answers at 127\.0\.0\.1, port \d+ \(.*\); check the address, and start the server",
        ),
        ("sc://[::1]:{port}/;user_id=a", "nothing answers at ::1, port"),
        ("sc://", "is no address of Spark Connect; write sc://host:15002"),
        ("sc://localhost:many", "is no address of Spark Connect"),
        ("sc://localhost:99999999", "nothing answers at localhost, port 99999999"),
    ],
)
def test_a_server_that_is_not_there_is_named_at_once(address, message):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises((EngineError, OptionError), match=message):
        SparkTable.open(address.format(port=port), "scores")


@needs_pyspark
@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("Traceback\nModuleNotFoundError: No module named 'duckdb'\n", r"No module named .*\); the Python of"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker", r"with the same minor version of Python$"),
        ("[INVALID_HANDLE.SESSION_NOT_FOUND] gone", r"started anew; repeat the command$"),
        ("", r"^Spark gave up \(PySparkException\); its log says more$"),
    ],
)  # fmt: skip
def test_errors_of_spark_say_what_to_do(said, message):
    from pyspark.errors import PySparkException

    with pytest.raises(EngineError, match=message), spark_errors("Spark gave up"):
        raise PySparkException(said)


def test_engines_that_are_not_installed_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(OptionError, match=r"conformal-arbitrage\[dask\]"):
        as_engine("tcp://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "pyspark.errors", None)
    for address in ("sc://127.0.0.1:9", "spark", "local[2]"):
        with pytest.raises(OptionError, match=r"conformal-arbitrage\[spark\]"):
            SparkTable.open(address, "scores")


@pytest.mark.parametrize("address", ["sc://127.0.0.1:9", "spark", "local[2]"])
def test_spark_takes_files_as_a_table_only(address):
    with pytest.raises(OptionError, match="Spark works on its own tables"):
        as_engine(address)
