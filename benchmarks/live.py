"""Speed of a collection beside the openai SDK: calls per second and CPU per call, against a mock endpoint.

The mock answers after 50 ms and runs in a process of its own, on another core where there is one. Both clients send the
same bodies at the same concurrency in the same run. `python -m benchmarks.live`; `--write FILE` keeps the table,
`--profile` shows where a collection's time goes.
"""

import argparse
import asyncio
import cProfile
import gc
import os
import platform
import pstats
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.endpoint import Messages, completion, response, served
from openai import AsyncOpenAI

from conformal_arbitrage.collecting.collect import Collection, replies_path
from conformal_arbitrage.collecting.questions import Menus
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.models import ChatConfig, ChatScorer, Pinned, Settings
from conformal_arbitrage.models.endpoint import Endpoint
from conformal_arbitrage.types import Query

LATENCY = 0.05
OPTIONS = ("Jupiter", "Saturn", "Neptune", "Earth")
Row = tuple[str, str, str, str]


class Mock(Messages):
    """Gives every request the same reply, later."""

    reply = response(completion('{"scores": [0.7, 0.1, 0.1, 0.1]}'))

    def received(self, message: bytes) -> None:
        """One request."""
        asyncio.get_running_loop().call_later(LATENCY, self._answer)

    def _answer(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(self.reply)


@contextmanager
def mock() -> Iterator[str]:
    """A mock endpoint; this process keeps to the other core."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    other = cores[-1] if len(cores) > 1 else None
    with served(Mock, other) as url:
        if other is not None:
            os.sched_setaffinity(0, {cores[0]})
        yield url


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What some calls took."""

    calls: int
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        """Calls per second."""
        return self.calls / self.seconds

    @property
    def cpu_per_call(self) -> float:
        """CPU seconds of this process per call."""
        return self.cpu / self.calls


def measured(work: Callable[[], Awaitable[object]], calls: int) -> Measured:
    async def timed() -> tuple[float, float]:
        gc.collect()
        start, cpu = time.perf_counter(), time.process_time()
        await work()
        return time.perf_counter() - start, time.process_time() - cpu

    seconds, cpu = asyncio.run(timed())
    return Measured(calls=calls, seconds=seconds, cpu=cpu)


def questions(rows: int) -> Menus:
    queries = [Query(f"Which of these planets is the largest? (version {n})", OPTIONS, id=f"q{n}") for n in range(rows)]
    return Menus(queries=queries)


def collection(url: str, rows: int, concurrency: int, output: Path) -> Collection:
    pinned = Pinned()
    primary = ChatConfig(url=url, model="small", price=(1.0, 2.0), pinned=pinned)
    guardian = ChatConfig(url=url, model="large", price=(10.0, 20.0), pinned=pinned)
    return Collection(
        config=Config(primary=primary, guardian=guardian), rows=questions(rows), output=output, concurrency=concurrency
    )


def collect(url: str, rows: int, concurrency: int, folder: Path) -> Measured:
    """The collection, from questions to a score log, every reply stored in SQLite."""
    output = folder / f"{time.monotonic_ns()}.parquet"
    plan = collection(url, rows, concurrency, output)

    async def work() -> None:
        log = await plan.run()
        assert len(log) == rows
        assert not log.missing.any()

    result = measured(work, 2 * rows)
    replies_path(output).unlink()
    return result


def bodies(rows: int) -> list[dict[str, Any]]:
    """What the collection sends."""
    sent: list[dict[str, Any]] = []
    for query in questions(rows).queries:
        for model in ("small", "large"):
            scorer = ChatScorer(port=Endpoint("http://127.0.0.1"), settings=Settings(model=model))
            settings = scorer.settings.body(default_limit=max(50, 12 * len(query.actions) + 2))
            sent.append({**settings, "messages": scorer.prompt.messages(query)})
    return sent


def sdk(url: str, rows: int, concurrency: int) -> Measured:
    """The same bodies through the SDK by as many workers; replies are parsed and dropped, nothing is stored."""
    requests = bodies(rows)

    async def work() -> None:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            waiting = iter(requests)

            async def worker() -> None:
                for body in waiting:
                    reply = await client.chat.completions.create(**body)
                    assert reply.choices[0].message.content

            await asyncio.gather(*(worker() for _ in range(concurrency)))

    return measured(work, len(requests))


def best(runs: list[Measured]) -> Measured:
    """The run that took the least CPU: the least disturbed one."""
    return min(runs, key=lambda run: run.cpu)


def profile(url: str, rows: int, concurrency: int, folder: Path) -> None:
    with cProfile.Profile() as profiler:
        collect(url, rows, concurrency, folder)
    for order in ("tottime", "cumulative"):
        pstats.Stats(profiler).sort_stats(order).print_stats(35)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def table(ours: Measured, theirs: Measured, rows: int, concurrency: int) -> list[Row]:
    ideal = concurrency / LATENCY
    what = f"{rows:,} rows x 2 calls, {concurrency} at once, {LATENCY * 1e3:.0f} ms latency"
    return [
        (f"{what}: share of the ideal rate", _percent(ours.rate / ideal), "at least 85 %", f"{ours.rate:,.0f} calls/s"),
        ("  the openai SDK, same bodies", _percent(theirs.rate / ideal), "", f"{theirs.rate:,.0f} calls/s"),
        (
            "CPU per call: ours, SQLite included / the openai SDK's",
            f"{ours.cpu_per_call / theirs.cpu_per_call:.2f} x",
            "at most 0.5 x",
            f"{ours.cpu_per_call * 1e6:.0f} µs, {theirs.cpu_per_call * 1e6:.0f} µs",
        ),
    ]


HEADER = """\
# Benchmarks of live collection

Measured by `make bench-live` on {cores} cores of {machine} with Python {python}. Both clients run alternately
in the same process against the same mock endpoint. The last column depends on the machine.

| measurement | ratio | target | this machine |
|---|---|---|---|
"""


def main() -> None:
    """Measure, print, and keep the table if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each client, in turn; the best counts")
    parser.add_argument("--profile", action="store_true", help="show where a collection's time goes instead")
    parser.add_argument("--write", help="keep the table in this file")
    options = parser.parse_args()
    sizes = options.rows, options.concurrency
    with mock() as url, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        collect(url, 200, options.concurrency, folder)  # imports and connections aside
        sdk(url, 200, options.concurrency)
        if options.profile:
            profile(url, *sizes, folder)
            return
        pairs = [(collect(url, *sizes, folder), sdk(url, *sizes)) for _ in range(options.repeats)]
    rows = table(best([ours for ours, _ in pairs]), best([theirs for _, theirs in pairs]), *sizes)
    lines = "".join("| " + " | ".join(row) + " |\n" for row in rows)
    print(lines, end="")
    if options.write:
        facts = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        Path(options.write).write_text(HEADER.format(**facts) + lines)


if __name__ == "__main__":
    main()
