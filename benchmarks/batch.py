"""Draw from and certify ten million items, against one scan of their file.

    python -m benchmarks.batch [--rows 10000000] [--runs 5] [--cores 1]

The table is a Parquet file of id, answer, confidence and truth. A scan is DuckDB reading every column of it in full:
`select sum(hash(id)), sum(hash(answer)), sum(hash(confidence)), sum(hash(truth))`. Scan, draw and certify run in turn, each
in a process of its own on the same cores; imports are done before the clock starts. Every figure is the median of the runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import duckdb

_TABLE = """
copy (
  select 'item-' || (k * 7919) % {rows} as id, 'label ' || hash(k) % 10 as answer, confidence,
         'label ' || (hash(k) % 10 + (hash(k + 2) % 100000 / 1e5 >= confidence)::int) % 10 as truth
  from (select k, round(0.4 + 0.6 * (hash(k + 1) % 100000) / 1e5, 5) as confidence from range({rows}) as keys(k))
) to '{path}' (format parquet)
"""
_CLOCK = """
import json, os, resource, sys, time
def clock():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), used.ru_utime + used.ru_stime
path, *arguments = sys.argv[1:]
"""
_SCAN = """
import duckdb
connection = duckdb.connect(config={"threads": len(os.sched_getaffinity(0))})
sums = ", ".join(f"sum(hash({name}))" for name in ("id", "answer", "confidence", "truth"))
start = clock()
connection.execute(f"select {sums} from read_parquet('{path}')").fetchall()
"""
_COMMAND = """
import duckdb
from conformal_arbitrage.cli import batch, cli
start = clock()
cli(["batch", *arguments, "--json"], standalone_mode=False)
"""
_STOP = """
print(json.dumps([now - before for now, before in zip(clock(), start, strict=True)]), file=sys.stderr)
"""


def timed(work: str, cores: Sequence[int], path: Path, *arguments: str) -> tuple[float, float]:
    """Return the wall and CPU seconds that some work takes in a process of its own, on these cores."""
    environment = {
        **os.environ,
        "XDG_CONFIG_HOME": str(path.parent),
        "ARBITRAGE_SECRET": "a-secret-only-for-benchmarks",
    }
    ran = subprocess.run(
        [sys.executable, "-c", _CLOCK + work + _STOP, str(path), *arguments], env=environment, cwd=path.parent,
        check=True, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip
    wall, cpu = json.loads(ran.stderr.splitlines()[-1])
    return wall, cpu


def main(arguments: Sequence[str] | None = None) -> None:
    """Print how long a scan takes, and how many of them each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the table (%(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="in turn (%(default)s)")
    parser.add_argument("--cores", type=int, default=1, help="for each process (%(default)s)")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))[-options.cores :]
    figures: dict[str, list[tuple[float, float]]] = {"scan": [], "draw": [], "certify": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "items.parquet")
        duckdb.connect().execute(_TABLE.format(rows=options.rows, path=path))
        for run in range(options.runs):
            place = f"batch-{run}"
            drawn = (str(path), "--error", "0.05", "--sample", str(options.rows // 2000), "-o", place)
            figures["scan"].append(timed(_SCAN, cores, path))
            figures["draw"].append(timed(_COMMAND, cores, path, "draw", *drawn))
            figures["certify"].append(timed(_COMMAND, cores, path, "certify", place))
            Path(folder, "conformal-arbitrage", "arbitrage-batches.json").unlink()  # the next draw is a first one, too
            print(f"run {run + 1}:", {name: runs[-1] for name, runs in figures.items()}, file=sys.stderr)
    scan = [statistics.median(column) for column in zip(*figures.pop("scan"), strict=True)]
    print(f"scan: {scan[0]:.2f} s, {scan[1]:.2f} s of CPU ({len(cores)} cores, {options.rows} rows)")
    for name, runs in figures.items():
        wall, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{name}: {wall:.2f} s, {cpu:.2f} s of CPU: {wall / scan[0]:.1f} and {cpu / scan[1]:.1f} times the scan")


if __name__ == "__main__":
    main()
