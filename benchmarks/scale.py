"""Logs in parts: processor time per row against a plain scan of the same columns, memory, and one answer by all ways.

    make bench-scale                                       ten million rows: threads, processes
    make bench-scale SCALE="--rows 1000000 --engine scan:local[2] --engine table:local[2]"
    make bench-1e7, make bench-1e8                         what docs/scale.md says of these sizes

A way is threads, processes, the address of a Dask scheduler, `table:ADDRESS` (the same files as a table of Spark) or
`scan:ADDRESS` (Spark's own sum over both columns). Ways of Spark are compared with such a sum in their own session, the
second there. Processor time and memory are those of all processes of a way, a Java machine included. Ends with status 1 if
answers differ or memory exceeds its limit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import numpy as np

from conformal_arbitrage import ScoreParts, SparkTable, calibrate
from conformal_arbitrage.scorelog.spark import spark_session

ROWS_PER_FILE = 1 << 20
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def write_log(folder: Path, rows: int) -> None:
    """Write files of a million rows, four actions each, with ids."""
    for number, start in enumerate(range(0, rows, ROWS_PER_FILE)):
        count = min(ROWS_PER_FILE, rows - start)
        rng = np.random.default_rng(number)
        with duckdb.connect(config={"threads": 1}) as connection:
            columns = {f"{name}{k}": rng.random(count) for name in "pg" for k in range(4)}
            connection.register("raw", columns)
            lists = ", ".join(
                f"[{name}0, {name}1, {name}2, {name}3] as {column}"
                for name, column in (("p", '"primary"'), ("g", "guardian"))
            )
            ids = f"'query-' || (row_number() over () + {start}) as id"
            target = folder / f"scores-{number:04d}.parquet"
            connection.execute(f"copy (select {ids}, {lists} from raw) to '{target}' (format parquet)")


def family() -> list[list[str]]:
    """Return what /proc says of this process and of all that descend from it, the fields after the name."""
    known: dict[int, tuple[int, list[str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            known[int(entry.name)] = int(fields[1]), fields
    own = {os.getpid()}
    while more := {pid for pid, (parent, _) in known.items() if parent in own and pid not in own}:
        own |= more
    return [known[pid][1] for pid in own if pid in known]


def processor_seconds() -> float:
    """Return what this process and its descendants used so far, those that ended included."""
    return sum(sum(map(int, fields[11:15])) for fields in family()) / TICKS


@contextmanager
def watched_memory() -> Iterator[list[float]]:
    """Yield a list whose only entry is the most memory, in MB, that all processes took together on the way."""
    peak, over = [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            peak[0] = max(peak[0], sum(int(fields[21]) for fields in family()) * PAGE / 1e6)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def plain_scan(folder: str) -> None:
    with duckdb.connect() as connection:
        connection.execute(
            f"select sum(list_sum(\"primary\")), sum(list_sum(guardian)) from '{folder}/*.parquet'"
        ).fetchall()


def spark_scan(address: str, folder: str) -> None:
    add = "aggregate({}, double(0), (a, b) -> a + b)"
    frame = spark_session(address).read.parquet(folder)
    frame.selectExpr(*(f"sum({add.format(name)})" for name in ("primary", "guardian"))).collect()


def way_of(name: str, folder: str, alpha: str, sees: str) -> Callable[[], object]:
    """Return what a way does, with its session open and warm."""
    what, _, address = name.partition(":") if name.startswith(("scan:", "table:")) else ("", "", name)
    if address == "scan":
        return lambda: plain_scan(folder)
    if address in ("threads", "processes") or address.startswith(("tcp://", "tls://")):
        return lambda: calibrate(ScoreParts.read(folder), alpha, guardian_sees=sees, engine=address)
    session = spark_session(address)
    session.range(8).mapInArrow(lambda batches: batches, "id long").collect()
    if what == "scan":
        return lambda: spark_scan(address, folder)
    return lambda: calibrate(SparkTable(frame=session.read.parquet(folder)), alpha, guardian_sees=sees)


def child(folder: str, way: str, alpha: str, sees: str) -> None:
    """Calibrate in this process, and print what it took."""
    scan = {}
    with watched_memory() as peak:
        run = way_of(way, folder, alpha, sees)
        if "[" in way or "sc://" in way or "spark" in way:
            address = way.removeprefix("scan:").removeprefix("table:")
            spark_scan(address, folder)  # the one that is measured finds a Java machine that has compiled it
            before = processor_seconds()
            spark_scan(address, folder)
            scan = {"scan": processor_seconds() - before}
        start, before = time.perf_counter(), processor_seconds()
        result = run()
        seconds, processor = time.perf_counter() - start, processor_seconds() - before
    answer = {} if result is None else {"relaxation": result.relaxation, "risk": result.evidence.empirical_risk}
    print(json.dumps({"seconds": seconds, "processor": processor, "megabytes": peak[0], **scan, **answer}))


def measured(folder: Path, way: str, alpha: str, sees: str) -> dict[str, float]:
    """Run a way in a process of its own; return what it printed."""
    options = {"--folder": str(folder), "--child": way, "--alpha": alpha, "--sees": sees}
    command = [sys.executable, "-m", "benchmarks.scale", *(word for pair in options.items() for word in pair)]
    ran = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        raise SystemExit(f"{way} ended with status {ran.returncode}")
    return json.loads(ran.stdout.splitlines()[-1])


def show(way: str, rows: int, one: dict[str, float], scan: float) -> None:
    """Print a line of the table."""
    cells = (
        f"{one['seconds']:.1f}",
        f"{1e6 * one['processor'] / rows:.2f}",
        f"{one['processor'] / one.get('scan', scan):.1f} x",
        f"{one['megabytes']:.0f}",
        repr(one.get("relaxation", "")),
    )
    print(f"| {way}, {rows:,} rows | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Write the log, calibrate it in every way, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--alpha", default="0.05")
    parser.add_argument("--sees", default="candidates", choices=["candidates", "all"])
    parser.add_argument("--engine", action="append", help="a way; may be repeated")
    parser.add_argument("--folder", help="where the files are, or are to be")
    parser.add_argument("--megabytes", type=float, default=float("inf"), help="the most memory that a way may take")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return child(given.folder, given.child, given.alpha, given.sees)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(given.folder or scratch)
        if not any(folder.glob("*.parquet")):
            write_log(folder, given.rows)
        rows, answers, scan, most = len(ScoreParts.read(folder)), set[tuple[float, float]](), 0.0, 0.0
        print("| way | s | CPU us/row | / plain scan | MB | relaxation |\n|---|---|---|---|---|---|")
        for way in ("scan", *(given.engine or ("threads", "processes"))):
            one = measured(folder, way, given.alpha, given.sees)
            if way.startswith("scan"):
                scan = one["processor"]
            else:
                answers.add((one["relaxation"], one["risk"]))
                most = max(most, one["megabytes"])
            show(way, rows, one, scan)
    if len(answers) > 1:
        raise SystemExit(f"the ways differ: {answers}")
    if most > given.megabytes:
        raise SystemExit(f"a way took {most:.0f} MB; at most {given.megabytes:.0f} were allowed")
    return None


if __name__ == "__main__":
    main()
