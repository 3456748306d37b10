"""What honest callers feel of connections that idle, never finish a request or never read: the ratio of their p99.

Two gateways on one core, asked in turn by 16 callers; the other core has the models and all callers. One of the gateways
is besieged, and its timeouts are long enough for the siege to last:

    1,000 connections that send nothing
    1,000 connections that send half a request: one half of them in its headers, the other in its body
      200 connections that ask for an endless stream and do not read it

`python -m benchmarks.connections`; `--json` prints the figures.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import re
import socket
import statistics
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import benchmarks.gateway as bench
import uvloop
from benchmarks.endpoint import completion, response, served
from benchmarks.http_load import KEY, Mock, load
from tests.scripted import chunk, sse

from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.store import keys

IDLE, HALF, UNREAD = 1000, 1000, 200
_HELD = """
[gateway]
header_timeout = 3600
body_timeout = 3600
idle_timeout = 3600
write_timeout = 3600
"""
_TEXT = """
[policies.essays]
form = "text"
certificate = "essays.json"
"""
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
_WORDS = sse(chunk({"content": "word " * 20}, model="mock")) * 20
_OPTIONS = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]


class Endless(Mock):
    """A chat endpoint that answers questions as usual; of an essay its Primary is unsure, and its Guardian's has no end."""

    unsure = response(
        completion("I do not know.").replace(
            b'"finish_reason"',
            b'"logprobs": {"content": [{"token": "I", "logprob": %.3f}]}, "finish_reason"' % math.log(0.1),
        )
    )
    writing = False

    def received(self, message: bytes) -> None:
        """Answer."""
        if b"essay" not in message:
            super().received(message)
        elif b'"large"' in message:
            self.transport.write(_HEAD)
            self.writing = True
            self._write()
        else:
            self.transport.write(self.unsure)

    def _write(self) -> None:
        if self.writing and not self.transport.is_closing():
            self.transport.write(_WORDS)
            asyncio.get_running_loop().call_soon(self._write)

    def pause_writing(self) -> None:
        """Wait for the gateway to read."""
        self.writing = False

    def resume_writing(self) -> None:
        """Go on."""
        self.writing = True
        self._write()


@dataclass(frozen=True, slots=True, kw_only=True)
class Siege:
    """One comparison; milliseconds, medians over the runs."""

    mock_latency_ms: float
    p50_ms: float
    p99_ms: float
    besieged_p50_ms: float
    besieged_p99_ms: float
    ratio: float
    connections: int
    rss_mb: float
    besieged_rss_mb: float


def essays(home: Path) -> None:
    """Add a policy in free text, whose Primary is never sure enough, and a key that sees the metrics."""
    from conformal_arbitrage import ScoreLog, calibrate
    from conformal_arbitrage.gateway.auth import digest
    from conformal_arbitrage.gateway.gateway import identities_of
    from conformal_arbitrage.live.build import database_of
    from conformal_arbitrage.live.config import read_config
    from conformal_arbitrage.store.location import open_store

    path = home / "arbitrage.toml"
    sure = path.read_text().replace('model = "small"', 'model = "small"\nconfidence = "logprob"')
    path.write_text(sure + _HELD + _TEXT)
    config = read_config(path)
    grades = {"primary_grade": [1.0] * 100 + [0.0] * 100, "guardian_grade": [1.0] * 200}
    made_by = {**identities_of(config, "essays"), "grader": {"kind": "exact"}}
    log = ScoreLog.from_router(confidence=[0.9] * 100 + [0.5] * 100, **grades, identities=made_by)
    calibrate(log, 0.05, guardian_sees="all").sign(ProjectSecret.find()).save(home / "essays.json")

    async def keyed() -> None:
        async with await open_store(database_of(config)) as store:
            await store.run(keys.create, id="observer", sha256=digest(KEY + "-review"), scope="review", label="")

    asyncio.run(keyed())


def besiege(url: str) -> list[socket.socket]:
    """Open all the connections, each 200 from an address of their own."""
    host, _, port = url.removeprefix("http://").partition(":")
    essay = {"model": "essays", "stream": True, "messages": [{"role": "user", "content": "Write an essay."}]}
    unread = bench.Question("/v1/chat/completions", essay).message(url)
    half_a_body = unread.replace(b"Content-Length: ", b"Content-Length: 9")
    sent = [b""] * IDLE + [unread[:60]] * (HALF // 2) + [half_a_body] * (HALF - HALF // 2) + [unread] * UNREAD
    peers: list[socket.socket] = []
    for number, data in enumerate(sent):
        peer = socket.socket()
        for option in _OPTIONS:
            peer.setsockopt(*option)
        peer.bind((f"127.0.1.{1 + number // 200}", 0))
        peer.connect((host, int(port)))
        peer.sendall(data)
        peers.append(peer)
    return peers


def figure(url: str, name: str) -> int:
    """One figure of /metrics."""
    request = urllib.request.Request(url + "/metrics", headers={"Authorization": f"Bearer {KEY}-review"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        match = re.search(rf"^{name} (\S+)$", reply.read().decode(), re.MULTILINE)
    return 0 if match is None else int(float(match[1]))


def quantiles(url: str, options: argparse.Namespace) -> tuple[float, float]:
    """The median and p99 of one run, in milliseconds."""
    took = uvloop.run(load(url, bench.chat(bench.EASY, menu=True), options.requests, options.concurrency))
    return took[len(took) // 2] * 1e3, took[len(took) * 99 // 100] * 1e3


def measure(latency: float, options: argparse.Namespace, folder: Path, core: int, other: int) -> Siege:
    """Ask both gateways in turn."""
    with served(partial(Endless, latency), other) as url, ExitStack() as stack:
        quiet, besieged = (bench.ours(folder, url, core, prepare=essays) for _ in range(2))
        stack.callback(quiet.stop)
        stack.callback(besieged.stop)
        for gateway in (quiet, besieged):
            quantiles(gateway.url, options)
        for peer in besiege(besieged.url):
            stack.callback(peer.close)
        while figure(besieged.url, "arbitrage_in_flight") < UNREAD + 1:  # and this request
            pass
        runs = [[quantiles(gateway.url, options) for gateway in (quiet, besieged)] for _ in range(options.repeats)]
        held = figure(besieged.url, "arbitrage_connections")
        (p50, p99), (their_p50, their_p99) = (
            [statistics.median(values) for values in zip(*side, strict=True)] for side in zip(*runs, strict=True)
        )
        return Siege(
            mock_latency_ms=latency * 1e3, p50_ms=p50, p99_ms=p99, besieged_p50_ms=their_p50, besieged_p99_ms=their_p99,
            ratio=their_p99 / p99, connections=held, rss_mb=quiet.rss(), besieged_rss_mb=besieged.rss(),
        )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000, help="in one run")
    parser.add_argument("--concurrency", type=int, default=bench.CONCURRENCY)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, in turn; the median counts")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    core, other = sorted(os.sched_getaffinity(0))[0], sorted(os.sched_getaffinity(0))[-1]
    os.sched_setaffinity(0, {other})
    with tempfile.TemporaryDirectory() as name:
        sieges = [measure(latency, options, Path(name), core, other) for latency in (0.0, bench.LATENCY)]
    if options.json:
        print(json.dumps([asdict(siege) for siege in sieges], indent=2))
    else:
        print(f"{options.concurrency} callers, Python {platform.python_version()}\n")
        print(
            "| models answer | p50 ms | p99 ms | besieged p50 | besieged p99 | p99 ratio | connections | MB | besieged |"
        )
        print("|---" * 9 + "|")
        for one in sieges:
            when = f"after {one.mock_latency_ms:.0f} ms" if one.mock_latency_ms else "at once"
            print(
                f"| {when} | {one.p50_ms:.1f} | {one.p99_ms:.1f} | {one.besieged_p50_ms:.1f} | {one.besieged_p99_ms:.1f} "
                f"| {one.ratio:.2f} x | {one.connections} | {one.rss_mb:.0f} | {one.besieged_rss_mb:.0f} |"
            )
    if any(one.ratio > 2 or one.connections < IDLE + HALF + UNREAD for one in sieges):
        raise SystemExit("The siege is felt: the ratio is to be at most 2, with every connection held.")


if __name__ == "__main__":
    main()
