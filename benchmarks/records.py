"""What a reader of records costs decisions: one-leg requests beside 300,000 stored records and a reader of them.

    python -m benchmarks.records [--rows 300000] [--requests 3000]

Two gateways over one mock, in turn: one with an empty record, one with many stored and a key that pages through those of a
rare filter all the time. The best of several runs counts; the ratio of the two is what matters.
"""

import argparse
import asyncio
import json
import os
import tempfile
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path

import uvloop
from benchmarks.endpoint import served
from benchmarks.gateway import EASY, KEY, Gateway, Mock, chat, load, ours
from tests.store.facts import decision

from conformal_arbitrage.live.build import database_of
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.store import events as stored_events
from conformal_arbitrage.store.location import open_store

TARGET = 1.3
_BATCH = 1000


async def fill(home: Path, rows: int) -> None:
    """Store many decisions of the benchmark's key, one in a thousand by a fallback."""
    async with await open_store(database_of(read_config(home / "arbitrage.toml"))) as store:
        for start in range(0, rows, _BATCH):
            events = [
                decision(policy="planets", key_id="benchmark", decided_by="fallback" if k % 1000 == 0 else "primary")
                for k in range(start, min(start + _BATCH, rows))
            ]
            await store.run(stored_events.commit, events)


class Reader(threading.Thread):
    """Pages through the records of a rare filter, again and again, a few pages a second."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = f"{url}/v1/arbitrage/records?decided_by=fallback&limit=100"
        self.over = threading.Event()
        self.pages = 0

    def run(self) -> None:
        """Read until it is over."""
        before = ""
        while not self.over.wait(0.05):
            request = urllib.request.Request(self._url + before, headers={"Authorization": f"Bearer {KEY}"})
            with urllib.request.urlopen(request, timeout=60) as reply:
                last = json.load(reply)["next"]
            before = f"&before={last}" if last else ""
            self.pages += 1


def measured(gateway: Gateway, requests: int, concurrency: int) -> tuple[float, float, float]:
    """Return CPU milliseconds per request, requests per second and the median latency in milliseconds."""
    cpu, start = gateway.cpu(), time.perf_counter()
    took = uvloop.run(load(gateway.url, chat(EASY, menu=True), requests, concurrency))
    seconds = time.perf_counter() - start
    return (gateway.cpu() - cpu) * 1e3 / requests, requests / seconds, took[len(took) // 2] * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    core, other = sorted(os.sched_getaffinity(0))[0], sorted(os.sched_getaffinity(0))[-1]
    os.sched_setaffinity(0, {other})
    runs: dict[str, list[tuple[float, float, float]]] = {"alone": [], "beside a reader": []}
    with tempfile.TemporaryDirectory() as name, served(partial(Mock, 0.0), other) as url:
        empty, full = ours(Path(name), url, core), ours(Path(name), url, core)
        asyncio.run(fill(Path(name) / f"ours-{full.url.rpartition(':')[2]}", options.rows))
        pages = 0
        for _ in range(options.repeats):
            runs["alone"].append(measured(empty, options.requests, options.concurrency))
            reader = Reader(full.url)
            reader.start()
            runs["beside a reader"].append(measured(full, options.requests, options.concurrency))
            reader.over.set()
            reader.join()
            pages += reader.pages
        empty.stop()
        full.stop()
    best = {
        label: (min(cpu for cpu, _, _ in each), max(rate for _, rate, _ in each), min(p50 for _, _, p50 in each))
        for label, each in runs.items()
    }
    (cpu, rate, p50), (cpu_beside, rate_beside, p50_beside) = best["alone"], best["beside a reader"]
    ratios = {"cpu": cpu_beside / cpu, "rate": rate / rate_beside, "p50": p50_beside / p50}
    if options.json:
        print(json.dumps({"best": best, "ratios": ratios, "rows": options.rows, "pages": pages}, indent=1))
        return
    print(
        f"{options.rows:,} stored records, {pages} pages read\n\n| | CPU ms | requests/s | p50 ms |\n|---|---|---|---|"
    )
    for label, figures in best.items():
        print(f"| {label} | " + " | ".join(f"{value:.3f}" for value in figures) + " |")
    print("| ratio (at most 1.3) | " + " | ".join(f"{value:.2f}" for value in ratios.values()) + " |")


if __name__ == "__main__":
    main()
