"""Compare this checkout with an older one, in turn: calibration, logs in parts, start-up and pages of the console.

    python -m benchmarks.turns OLD_CHECKOUT [--what calibration] [--what parts] [--what start] [--what console] [--runs 5]

OLD_CHECKOUT is a work tree of this repository; `in_turn` compares the CPU of requests. Every figure comes from a process
with PYTHONPATH=CHECKOUT/src, so that both run on this interpreter, and only through public names, the command line and HTTP.
Old and new take turns, so that whatever else the machine does falls on both alike; the median over the runs counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import duckdb
import requests
from benchmarks.bits_gateway import Caller, decision, mock
from benchmarks.gateway import ROOT, Gateway, free_port, through

Figures = dict[str, float]
_SECRET = "a-secret-only-for-benchmarks"
_HEAD = """\
import json, statistics, sys, time
import numpy as np
import conformal_arbitrage as ca
assert ca.__file__.startswith(sys.argv[1]), ca.__file__
def median(call, repeats):
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)
def log(n):
    rng = np.random.default_rng(n)
    return ca.ScoreLog.from_arrays(rng.random((n, 4)).round(6), rng.random((n, 4)).round(6), id=[f"q{k}" for k in range(n)])
"""
_CALIBRATION = """\
small, large = log(20), log(int(sys.argv[2]))
key = b"a key of thirty-two bytes or so."
print(json.dumps({
    "20 rows": median(lambda: ca.calibrate(small, "0.2", boundary="include"), 300),
    "20 rows, random boundary": median(lambda: ca.calibrate(small, "0.2", boundary="random", key=key), 300),
    "20 rows, confidence": median(lambda: ca.calibrate(small, "0.5", confidence="0.9", boundary="include", key=key), 150),
    f"{len(large):,} rows": median(lambda: ca.calibrate(large, "0.05", boundary="include"), 3),
    f"{len(large):,} rows, candidates": median(lambda: ca.calibrate(large, "0.05", guardian_sees="candidates"), 3),
}))
"""
_PARTS = """\
parts = ca.ScoreParts.read(sys.argv[2])
print(json.dumps({
    f"{len(parts):,} rows in parts": median(lambda: ca.calibrate(parts, "0.05"), 1),
    f"{len(parts):,} rows in parts, candidates": median(
        lambda: ca.calibrate(parts, "0.05", guardian_sees="candidates"), 1
    ),
}))
"""
_PREPARE = """\
import json, os, sys
from pathlib import Path
from benchmarks.bits_gateway import create_keys, prepare
prepare(Path.cwd(), sys.argv[1])
print(json.dumps(create_keys()))
"""


def environment(checkout: Path) -> dict[str, str]:
    """Return variables with which the package is that of a checkout, and the benchmarks are these."""
    path = os.pathsep.join([str(checkout / "src"), str(ROOT)])
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**variables, "PYTHONPATH": path, "ARBITRAGE_SECRET": _SECRET}  # an installed package has bytecode


def figures_of(checkout: Path, script: str, *arguments: object) -> Figures:
    """Run a script in a process with the package of a checkout; return the figures that it prints."""
    line = [sys.executable, "-c", _HEAD + script, str(checkout), *map(str, arguments)]
    ran = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True, env=environment(checkout))
    return json.loads(ran.stdout)


def write_parts(folder: Path, rows: int, files: int) -> None:
    """Write a log of four actions in several files."""
    lists = ", ".join(f"[{', '.join(['random()'] * 4)}] as {column}" for column in ('"primary"', "guardian"))
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("select setseed(0.5)")
        for part in range(files):
            first, last = part * rows // files, (part + 1) * rows // files
            connection.execute(
                f"copy (select 'query-' || k as id, {lists} from range({first}, {last}) as t(k)) "
                f"to '{folder}/{part}.parquet' (format parquet)"
            )


def homes(checkouts: list[Path], folder: Path, url: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """Prepare a folder for the gateway of each checkout: configuration, certificates, keys."""
    for place, checkout in enumerate(checkouts):
        home = folder / f"home-{place}"
        home.mkdir()
        line = [sys.executable, "-c", _PREPARE, url]
        ran = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True, cwd=home, env=environment(checkout))
        config = home / "arbitrage.toml"
        config.write_text(
            config.read_text().replace("wait = 50.0", "wait = 1.0").replace("audit_rate = 1.0", "audit_rate = 0.05")
        )
        yield home, json.loads(ran.stdout.splitlines()[-1])


def serve(checkout: Path, home: Path, core: int) -> Gateway:
    """Start the gateway of a checkout on a core."""
    port = free_port()
    line = [sys.executable, "-m", "conformal_arbitrage", "serve", "--port", str(port)]
    return Gateway(line, port, core, home, **environment(checkout))


def in_processes(script: str, *arguments: object) -> Callable[[list[Path], int], Iterator[list[Figures]]]:
    """Return what runs a script for each checkout in turn."""

    def turns(checkouts: list[Path], runs: int) -> Iterator[list[Figures]]:
        for _ in range(runs):
            yield [figures_of(checkout, script, *arguments) for checkout in checkouts]

    return turns


def start(checkouts: list[Path], runs: int, core: int) -> Iterator[list[Figures]]:
    """Start gateways in turn, the bare pass-through last: seconds until they listen, CPU and memory."""
    with tempfile.TemporaryDirectory() as name, mock() as url:
        folder = Path(name)
        prepared = [home for home, _ in homes(checkouts, folder, url)]
        for _ in range(runs):
            row: list[Figures] = []
            for place in range(len(checkouts) + 1):
                bare = place == len(checkouts)
                gateway = through(folder, url, core) if bare else serve(checkouts[place], prepared[place], core)
                took = {"start, ms": gateway.start_seconds * 1e3, "start, CPU ms": gateway.cpu() * 1e3}
                row.append({**took, "memory, MB": gateway.rss()})
                gateway.stop()
            yield row


def fill(gateway: Gateway, keys: dict[str, str], rows: int) -> dict[str, str]:
    """Send decisions, and questions for the team; return the pages to measure."""

    def send(number: int, model: str = "planets") -> None:
        headers = {"authorization": f"Bearer {keys['call']}"}
        reply = requests.post(f"{gateway.url}/v1/decisions", json=decision(number, model), headers=headers, timeout=60)
        if reply.status_code not in (200, 409):  # a conflict: people have not decided yet
            reply.raise_for_status()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(send, range(rows)))
        list(pool.map(send, range(40), ["desk"] * 40))
    records = Caller(gateway.url, keys["admin"]).ask("GET", "/v1/arbitrage/records?policy=planets&limit=1")
    id = records.json()["data"][0]["id"]
    return {
        "overview": "/console", "policy": "/console/policies/planets", "decisions": "/console/decisions",
        "decisions, Guardian's": "/console/decisions?who=guardian", "one decision": f"/console/decisions/{id}",
        "review": "/console/review",
    }  # fmt: skip


def console(checkouts: list[Path], runs: int, core: int, rows: int) -> Iterator[list[Figures]]:
    """Ask for pages of both consoles by turns: CPU of the gateway per page."""
    repeats = 20
    with tempfile.TemporaryDirectory() as name, mock() as url, ExitStack() as stack:
        prepared = list(homes(checkouts, Path(name), url))
        sides: list[tuple[Gateway, Caller, dict[str, str]]] = []
        for checkout, (home, keys) in zip(checkouts, prepared, strict=True):
            gateway = serve(checkout, home, core)
            stack.callback(gateway.stop)
            pages = fill(gateway, keys, rows)
            sides.append((gateway, Caller(gateway.url).sign_in(keys["review"]), pages))
        for number in range(runs + 1):
            row: list[Figures] = [{} for _ in sides]
            for page in sides[0][2]:
                for (gateway, visitor, pages), figures in zip(sides, row, strict=True):
                    before = gateway.cpu()
                    for _ in range(repeats):
                        visitor.page(pages[page]).raise_for_status()
                    figures[f"{page}, CPU ms"] = (gateway.cpu() - before) * 1e3 / repeats
            if number:  # the first round fills caches
                yield row


def show(rows: list[list[Figures]]) -> list[str]:
    """Return medians and ratios as a Markdown table; a third column is the bare pass-through."""
    median, bare = statistics.median, len(rows[0]) > 2
    head = ("", "old", "new", "new / old", *(("bare",) if bare else ()))
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in rows[0][0]:
        columns = [[side[name] for side in row] for row in rows]
        ratio = median(column[1] / column[0] for column in columns)
        values = [f"{median(column[place] for column in columns):.2f}" for place in range(len(rows[0]))]
        lines.append("| " + " | ".join([name, *values[:2], f"{ratio:.3f}", *values[2:]]) + " |")
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("calibration", "parts", "start", "console")
    parser.add_argument("old", type=Path, metavar="OLD_CHECKOUT", help="a work tree with the code to compare with")
    parser.add_argument("--what", action="append", choices=kinds, help="may be repeated; by default everything")
    parser.add_argument("--runs", type=int, default=5, help="of each checkout, in turn; the median counts")
    parser.add_argument("--large", type=int, default=1_000_000, help="rows of the large calibration")
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the log in eight parts")
    parser.add_argument("--decisions", type=int, default=1000, help="in the record behind the console")
    options = parser.parse_args()
    old = options.old.resolve()
    if not (old / "src" / "conformal_arbitrage").exists():
        parser.error(f"{options.old} is no work tree of this repository")
    checkouts, core = [old, ROOT], min(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        measures: dict[str, Callable[[], Any]] = {
            "calibration": lambda: in_processes(_CALIBRATION, options.large)(checkouts, options.runs),
            "parts": lambda: in_processes(_PARTS, folder)(checkouts, options.runs),
            "start": lambda: start(checkouts, options.runs, core),
            "console": lambda: console(checkouts, options.runs, core, options.decisions),
        }
        for what in options.what or kinds:
            if what == "parts":
                write_parts(Path(folder), options.rows, 8)
            print(f"\n{what}\n", *show(list(measures[what]())), sep="\n", flush=True)


if __name__ == "__main__":
    main()
