"""Logs in parts: processor time per row against DuckDB's own scan of the same columns, memory, and one answer by all ways.

Run by `make bench-scale`; `SCALE="--rows 100000000"` is the large one, which takes 6 GB of disk, and
`SCALE="--rows 1000000 --engine local[2]"` runs on Spark.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import duckdb
import numpy as np

from conformal_arbitrage import ScoreParts, ScoreTable, calibrate

ROWS_PER_FILE = 1 << 20


def write_log(folder: Path, rows: int) -> None:
    """Write files of a million rows, four actions each, with ids."""
    for number, start in enumerate(range(0, rows, ROWS_PER_FILE)):
        count = min(ROWS_PER_FILE, rows - start)
        rng = np.random.default_rng(number)
        with duckdb.connect() as connection:
            columns = {f"{name}{k}": rng.random(count) for name in "pg" for k in range(4)}
            connection.register("raw", columns)
            lists = ", ".join(
                f"[{name}0, {name}1, {name}2, {name}3] as {column}"
                for name, column in (("p", '"primary"'), ("g", "guardian"))
            )
            ids = f"'query-' || (row_number() over () + {start}) as id"
            target = folder / f"scores-{number:04d}.parquet"
            connection.execute(f"copy (select {ids}, {lists} from raw) to '{target}' (format parquet)")


def spent(function: object) -> tuple[object, float, float]:
    """Return a result with its seconds and its processor seconds, children included."""

    def used() -> float:
        return sum(
            getattr(resource.getrusage(who), name)
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
            for name in ("ru_utime", "ru_stime")
        )

    start, before = time.perf_counter(), used()
    result = function()  # pyright: ignore[reportCallIssue]
    return result, time.perf_counter() - start, used() - before


def plain_scan(folder: str) -> None:
    with duckdb.connect() as connection:
        connection.execute(
            f"select sum(list_sum(\"primary\")), sum(list_sum(guardian)) from '{folder}/*.parquet'"
        ).fetchall()


def by_sql(folder: str, alpha: str, sees: str) -> object:
    """The same by DuckDB's SQL, on a view of the files."""
    path = Path(folder) / "view.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(f"create or replace view scores as select * from '{folder}/*.parquet'")
    return calibrate(ScoreTable(address=str(path), table="scores"), alpha, guardian_sees=sees)


def child(folder: str, engine: str, alpha: str, sees: str) -> None:
    """Calibrate in this process, and print what it took."""
    run = (
        (lambda: by_sql(folder, alpha, sees))
        if engine == "sql"
        else (lambda: calibrate(ScoreParts.read(folder), alpha, guardian_sees=sees, engine=engine))
    )
    if engine == "scan":
        run = lambda: plain_scan(folder)  # noqa: E731
    result, seconds, processor = spent(run)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {} if result is None else {"relaxation": result.relaxation, "risk": result.empirical_risk}
    print(json.dumps({"seconds": seconds, "processor": processor, "megabytes": peak, **found}))


def main() -> None:
    """Write the log, calibrate it in every way, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--alpha", default="0.05")
    parser.add_argument("--sees", default="candidates", choices=["candidates", "all"])
    parser.add_argument("--engine", action="append", help="threads, processes, sql or an address; may be repeated")
    parser.add_argument("--folder", help="where the files are, or are to be")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return child(given.folder, given.child, given.alpha, given.sees)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(given.folder or scratch)
        if not any(folder.glob("*.parquet")):
            write_log(folder, given.rows)
        rows, answers, scan = len(ScoreParts.read(folder)), set[tuple[float, float]](), 0.0
        print("| way | s | CPU us/row | / plain scan | MB | relaxation |\n|---|---|---|---|---|---|")
        for engine in ("scan", *(given.engine or ("threads", "processes", "sql"))):
            command = [
                sys.executable,
                "-m",
                "benchmarks.scale",
                "--folder",
                str(folder),
                "--child",
                engine,
                "--alpha",
                given.alpha,
                "--sees",
                given.sees,
            ]
            one = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            )
            scan = one["processor"] if engine == "scan" else scan
            answers |= {(one["relaxation"], one["risk"])} if "relaxation" in one else set()
            cells = (
                f"{one['seconds']:.1f}",
                f"{1e6 * one['processor'] / rows:.2f}",
                f"{one['processor'] / scan:.1f} x",
                f"{one['megabytes']:.0f}",
                repr(one.get("relaxation", "")),
            )
            print(f"| {engine}, {rows:,} rows | {' | '.join(cells)} |", flush=True)
        if len(answers) > 1:
            raise SystemExit(f"the ways differ: {answers}")
    return None


if __name__ == "__main__":
    main()
