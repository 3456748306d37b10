"""What the gateway takes per request, beside a bare pass-through and LiteLLM's proxy; ratios are what counts.

A gateway has one core; the mock endpoint and the load have the other. Each row is a process of its own, asked in turn in
the same run:

    upstream alone   the load straight to the mock
    bare             Starlette and aiohttp that pass bytes through: no keys, no record, no decision
    ours             a key, a decision by a certificate, a durable record in SQLite; the Primary's answer stands, or the
                     Guardian is asked too
    LiteLLM          its proxy with a master key and no database; `--litellm PYTHON` names an environment that has it

CPU and requests per second come from a mock that answers at once, so that the gateway's core is full; latencies from one
that answers after 50 ms. `python -m benchmarks.gateway`; `--json` prints the figures, `--profile` where our time goes.
"""

import argparse
import asyncio
import json
import os
import platform
import pstats
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from benchmarks.endpoint import served
from benchmarks.http_load import KEY, Mock, Question, load

ROOT = Path(__file__).resolve().parent.parent
CONCURRENCY = 16
LATENCY = 0.05
PROXY = "LiteLLM's proxy"
OPTIONS = ("Jupiter", "Saturn", "Neptune", "Earth")
EASY, HARD = "Which of these planets is the largest?", "Which of these planets is the hardest to see?"
CONFIG = """\
[primary]
kind = "chat"
url = "{url}"
model = "small"
price = [1.0, 2.0]
[primary.pinned]
served = "mock"
[guardian]
kind = "chat"
url = "{url}"
model = "large"
price = [10.0, 20.0]
[guardian.pinned]
served = "mock"
[policies.planets]
certificate = "certificate.json"
"""
LITELLM = """\
model_list:
  - model_name: planets
    litellm_params: {{model: openai/mock, api_base: "{url}", api_key: none}}
general_settings: {{master_key: {key}}}
"""


def bare(url: str, port: int) -> None:
    """The pass-through: what any gateway on these libraries has to do."""
    import aiohttp
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    sessions: list[aiohttp.ClientSession] = []

    async def passed(request: Request) -> Response:
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        body = await request.body()
        headers = {"Content-Type": "application/json"}
        async with sessions[0].post(url + "/chat/completions", data=body, headers=headers) as response:
            return Response(await response.read(), status_code=response.status, media_type="application/json")

    async def alive(_: Request) -> Response:
        return Response()

    app = Starlette(
        routes=[Route("/v1/chat/completions", passed, methods=["POST"]), Route("/health/liveliness", alive)]
    )
    uvicorn.run(
        app, host="127.0.0.1", port=port, access_log=False, log_level="warning", loop="uvloop", http="httptools",
        server_header=False, date_header=False,
    )  # fmt: skip


def chat(question: str, *, menu: bool) -> Question:
    body: dict[str, Any] = {"model": "planets", "messages": [{"role": "user", "content": question}]}
    who = b'"decided_by":"guardian"' if question == HARD else b'"decided_by":"primary"'
    if not menu:
        return Question("/v1/chat/completions", body)
    return Question("/v1/chat/completions", body | {"arbitrage": {"actions": OPTIONS}}, who)


def decision(question: str) -> Question:
    choices = [{"value": option} for option in OPTIONS]
    body = {"type": "choice", "instructions": question, "choices": choices}
    return Question(
        "/v1/decisions",
        {"model": "planets", "input": "From the Sun outwards.", "questions": [body]},
        b'"decided_by":"primary"',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one kind of request takes through one gateway; CPU and memory are the gateway process's."""

    name: str
    cpu_ms: float | None = None
    per_second: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    start_seconds: float | None = None
    rss_mb: float | None = None


class Gateway:
    """A running gateway: a process on a core."""

    def __init__(self, command: Sequence[str], port: int, core: int, folder: Path, **variables: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        mine = os.sched_getaffinity(0)
        start = time.perf_counter()
        with (folder / f"{port}.log").open("wb") as log:
            os.sched_setaffinity(0, {core})  # the child inherits it
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **variables}
            )
            os.sched_setaffinity(0, mine)
        self._wait(folder / f"{port}.log")
        self.start_seconds = time.perf_counter() - start

    def _wait(self, log: Path) -> None:
        place = urlsplit(self.url)
        for _ in range(6000):
            if self.process.poll() is not None:
                raise SystemExit(f"a gateway ended at once:\n{log.read_text()[-3000:]}")
            try:
                socket.create_connection((str(place.hostname), place.port or 0), timeout=1).close()
            except OSError:
                time.sleep(0.01)
            else:
                return
        raise SystemExit(f"a gateway does not listen:\n{log.read_text()[-3000:]}")

    def cpu(self) -> float:
        """CPU seconds so far, user and system, all threads."""
        return time.clock_gettime(~self.process.pid << 3 | 2)  # Linux's number for that process's CPU clock

    def rss(self) -> float:
        """Megabytes in memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it and wait."""
        self.process.send_signal(how)
        self.process.wait(timeout=60)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def prepared(folder: Path, url: str, database: str | None = None) -> None:
    """A configuration, a certificate made with its models (the relaxation is 0.3), and a key."""
    from conformal_arbitrage import ProjectSecret, ScoreLog, calibrate
    from conformal_arbitrage.gateway.auth import digest
    from conformal_arbitrage.gateway.gateway import identities_of
    from conformal_arbitrage.live.build import open_record
    from conformal_arbitrage.live.config import read_config
    from conformal_arbitrage.store import keys

    where = "" if database is None else f'[gateway]\ndatabase = "{database}"\n'
    (folder / "arbitrage.toml").write_text(CONFIG.format(url=url) + where)
    config = read_config(folder / "arbitrage.toml")
    rows = [[0.9, 0.1, 0.0]] * 100 + [[0.6, 0.3, 0.1]] * 100
    right = [[1.0, 0.0, 0.0]] * 100 + [[0.0, 1.0, 0.0]] * 100
    log = ScoreLog.from_arrays(
        rows, right, id=[f"r{k}" for k in range(200)], identities=identities_of(config, "planets")
    )
    calibrate(log, 0.05, guardian_sees="all").sign(ProjectSecret.find()).save(folder / "certificate.json")

    async def keyed() -> None:
        async with await open_record(config) as store:
            await store.run(keys.create, id="benchmark", sha256=digest(KEY), scope="call", label="")

    asyncio.run(keyed())


def ours(
    folder: Path,
    url: str,
    core: int,
    *before: str,
    prepare: Callable[[Path], None] | None = None,
    database: str | None = None,
) -> Gateway:
    port = free_port()
    home = folder / f"ours-{port}"
    home.mkdir()
    prepared(home, url, database)
    if prepare is not None:
        prepare(home)
    entry = home / "entry.py"
    entry.write_text("from conformal_arbitrage.cli import main\nmain()\n")
    return Gateway([sys.executable, *before, str(entry), "serve", "--port", str(port)], port, core, home)


def through(folder: Path, url: str, core: int) -> Gateway:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.gateway", "--bare", url, str(port)]
    return Gateway(command, port, core, folder, PYTHONPATH=str(ROOT))


def litellm(python: str, folder: Path, url: str, core: int) -> Gateway:
    port = free_port()
    config = folder / f"litellm-{port}.yaml"
    config.write_text(LITELLM.format(url=url, key=KEY))
    program = str(Path(python).absolute().parent / "litellm")
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    return Gateway(command, port, core, folder, PYTHONPATH="", LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_LOG="ERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One row of the table: a way to answer a question, so many requests a run."""

    name: str
    gateway: str | None
    question: Question
    share: float = 1.0


KINDS = (
    Kind(name="upstream alone", gateway=None, question=chat(EASY, menu=False)),
    Kind(name="bare pass-through", gateway="bare", question=chat(EASY, menu=False)),
    Kind(name="ours, chat, Primary only", gateway="ours", question=chat(EASY, menu=True)),
    Kind(name="ours, decisions, Primary only", gateway="ours", question=decision(EASY)),
    Kind(name="ours, chat, with the Guardian", gateway="ours", question=chat(HARD, menu=True)),
    Kind(name=PROXY, gateway="litellm", question=chat(EASY, menu=False), share=0.1),
)


class Bench:
    """All gateways over one mock, side by side."""

    def __init__(self, options: argparse.Namespace, folder: Path, url: str, core: int) -> None:
        self._options = options
        self._url = url
        self.gateways = {"bare": through(folder, url, core), "ours": ours(folder, url, core)}
        if options.litellm:
            self.gateways["litellm"] = litellm(options.litellm, folder, url, core)
        self.kinds = [kind for kind in KINDS if kind.gateway is None or kind.gateway in self.gateways]

    def _load(self, kind: Kind, count: int) -> list[float]:
        url = self._url if kind.gateway is None else self.gateways[kind.gateway].url
        return uvloop.run(load(url, kind.question, max(count, self._options.concurrency), self._options.concurrency))

    def run(self, kind: Kind, requests: int) -> Figures:
        """One run of one kind."""
        gateway = None if kind.gateway is None else self.gateways[kind.gateway]
        count = int(requests * kind.share)
        cpu, start = gateway.cpu() if gateway else 0.0, time.perf_counter()
        took = self._load(kind, count)
        seconds = time.perf_counter() - start
        return Figures(
            name=kind.name,
            cpu_ms=(gateway.cpu() - cpu) * 1e3 / count if gateway else None,
            per_second=count / seconds,
            p50_ms=took[len(took) // 2] * 1e3,
            p99_ms=took[len(took) * 99 // 100] * 1e3,
            start_seconds=gateway.start_seconds if gateway else None,
            rss_mb=gateway.rss() if gateway else None,
        )

    def runs(self, requests: int) -> list[list[Figures]]:
        """Several runs of all kinds, in turn; by kind."""
        for kind in self.kinds:
            self._load(kind, int(400 * kind.share))  # connections and caches aside
        repeats = [[self.run(kind, requests) for kind in self.kinds] for _ in range(self._options.repeats)]
        return [list(runs) for runs in zip(*repeats, strict=True)]

    def stop(self) -> None:
        """End all."""
        for gateway in self.gateways.values():
            gateway.stop()


def measure(options: argparse.Namespace, folder: Path, core: int, other: int) -> list[Figures]:
    """CPU, rate and memory at a full core; latencies and start-up beside a mock that takes its time."""
    results: dict[float, list[list[Figures]]] = {}
    for latency in (0.0, LATENCY):
        with served(partial(Mock, latency), other) as url, ExitStack() as stack:
            bench = Bench(options, folder, url, core)
            stack.callback(bench.stop)
            results[latency] = bench.runs(options.requests if not latency else options.requests // 4)
    full = [min(runs, key=lambda run: run.cpu_ms or 0.0) for runs in results[0.0]]
    calm = [min(runs, key=lambda run: run.p50_ms or 0.0) for runs in results[LATENCY]]
    rates = [max(run.per_second or 0.0 for run in runs) for runs in results[0.0]]
    tails = [min(run.p99_ms or 0.0 for run in runs) for runs in results[LATENCY]]
    alone = calm[0].p50_ms or 0.0
    return [
        Figures(
            name=busy.name,
            cpu_ms=busy.cpu_ms,
            per_second=rate,
            p50_ms=(quiet.p50_ms or 0.0) - (alone if busy.cpu_ms is not None else 0.0),
            p99_ms=tail - (tails[0] if busy.cpu_ms is not None else 0.0),
            start_seconds=None if busy.start_seconds is None else min(busy.start_seconds, quiet.start_seconds or 0.0),
            rss_mb=busy.rss_mb,
        )
        for busy, quiet, rate, tail in zip(full, calm, rates, tails, strict=True)
    ]


def table(rows: Sequence[Figures]) -> list[str]:
    """The figures, and the ratios to the bare pass-through."""
    least = next(row.cpu_ms for row in rows if row.name.startswith("bare")) or 1.0
    head = ("", "CPU ms", "/ bare", "requests/s", "p50 ms", "p99 ms", "start s", "MB")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        sign = "+" if row.cpu_ms is not None else ""
        cells = (
            row.name, _shown(row.cpu_ms, ".3f"), _shown(row.cpu_ms and row.cpu_ms / least, ".1f", " x"),
            _shown(row.per_second, ",.0f"), _shown(row.p50_ms, f"{sign}.1f"), _shown(row.p99_ms, f"{sign}.1f"),
            _shown(row.start_seconds, ".2f"), _shown(row.rss_mb, ".0f"),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _shown(value: float | None, how: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{how}}{unit}"


def targets(rows: Sequence[Figures]) -> list[str]:
    """Return the targets beside what was measured."""
    named = {row.name: row for row in rows}
    one, least = named["ours, chat, Primary only"], named["bare pass-through"]
    cpu = one.cpu_ms or 0.0
    measured = [
        ("CPU of a one-leg request", f"{cpu:.2f} ms", "at most 0.42 ms"),
        ("  relative to the bare pass-through", f"{cpu / (least.cpu_ms or 1.0):.1f} x", "at most 2.8 x"),
        ("start-up", f"{one.start_seconds or 0.0:.2f} s", "below 1.5 s"),
        ("memory", f"{one.rss_mb or 0.0:.0f} MB", "below 120 MB"),
    ]
    if PROXY in named:
        theirs = named[PROXY].cpu_ms or 0.0
        measured.insert(2, ("  LiteLLM's proxy / ours", f"{theirs / cpu:.1f} x", "at least 17 x"))
    return ["| measurement | this machine | target |", "|---|---|---|"] + [
        "| " + " | ".join(row) + " |" for row in measured
    ]


def profile(options: argparse.Namespace, folder: Path, core: int, other: int) -> None:
    """Where a one-leg request's time goes on the event loop."""
    with served(partial(Mock, 0.0), other) as url:
        kept = folder / "profile"
        gateway = ours(folder, url, core, "-m", "cProfile", "-o", str(kept))
        body = chat(EASY, menu=True)
        uvloop.run(load(gateway.url, body, options.requests, options.concurrency))
        gateway.stop(signal.SIGINT)
    for order in ("tottime", "cumulative"):
        pstats.Stats(str(kept)).sort_stats(order).print_stats(60)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000, help="in one run; LiteLLM gets a tenth")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn; the best counts")
    parser.add_argument("--litellm", metavar="PYTHON", help="a Python that has litellm[proxy]; left out without it")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--profile", action="store_true", help="show where a request's time goes instead")
    parser.add_argument("--bare", nargs=2, metavar=("URL", "PORT"), help="be the pass-through")
    options = parser.parse_args()
    if options.bare:
        bare(options.bare[0], int(options.bare[1]))
        return
    core, other = sorted(os.sched_getaffinity(0))[0], sorted(os.sched_getaffinity(0))[-1]
    if core == other:
        raise SystemExit("two cores are needed: one for the gateway, one for the load")
    os.sched_setaffinity(0, {other})
    with tempfile.TemporaryDirectory() as name:
        if options.profile:
            profile(options, Path(name), core, other)
            return
        rows = measure(options, Path(name), core, other)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{options.concurrency} at once, Python {platform.python_version()}\n")
    print("\n".join([*table(rows), "", *targets(rows)]))


if __name__ == "__main__":
    main()
