"""At length: all engines, many rows, and the gateway under kills, hostile replies, fuzzed requests, and callers who leave.

    make nightly                                       all of it
    python -m benchmarks.nightly --scale 0.1 --skip kills

Prints a table of counts and ends with status 1 if anything acknowledged was lost or decided twice, if an answer is not the
certificate's, if a reply is an unexpected 5xx, or if memory grew by more than a tenth.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from benchmarks.endpoint import completion, response, served
from benchmarks.soak import Upstream, every_record, scores_of, write_config
from tests.gateway.durability import LOST, SECRET, Gateway, chat_request, decision_request, ids_in, named_in

from conformal_arbitrage import Certificate, ScoreLog, calibrate
from conformal_arbitrage.gateway.gateway import identities_of
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.record import DecisionRecord

COUNTS = {
    "engines": 50,
    "rows": 100_000_000,
    "kills": 100,
    "alarms": 20_000,
    "hostile": 10_000,
    "fuzz": 20_000,
    "leave": 50_000,
}
CONCURRENCY = 48
SAMPLES = 400
HOSTILE_SHARE = 0.4
_REPLIES = "NIGHTLY_HOSTILE_REPLIES"
"""Names the file that gets a byte for every hostile reply; the endpoint runs in a process of its own."""

_ODD: tuple[Any, ...] = (
    {}, {"choices": []}, {"choices": {}}, {"choices": [None]}, {"choices": [{"message": None}]},
    {"choices": [{"message": {"content": None}}]}, {"choices": [{"message": {"content": ["x"]}}]},
    {"error": {"message": "in a reply with status 200"}}, [], 7, None, "text",
)  # fmt: skip
_WRONG = ("[1]", "[1, 0, 0, 0]", '["1", 0, 0]', "[NaN, 0, 0]", "[-1, 1, 1]", "[1e308, 1e308, 0]", "[" * 5000, "{}", "x")


class Calm(Upstream):
    """A chat endpoint that never fails."""

    def _answer(self, body: dict[str, Any]) -> None:
        if not self.transport.is_closing():
            name = str(named_in(json.dumps(body["messages"])))
            self.transport.write(
                response(completion(json.dumps({"scores": scores_of(body["model"], name)}), body["model"]))
            )


class Hostile(Calm):
    """A chat endpoint that answers much of what it is asked with something else."""

    def _answer(self, body: dict[str, Any]) -> None:
        if self.coin.random() >= HOSTILE_SHARE or self.transport.is_closing():
            super()._answer(body)
            return
        with Path(os.environ[_REPLIES]).open("ab", buffering=0) as replies:
            replies.write(b".")
        kind = self.coin.randrange(9)
        if kind < 2:
            self.transport.write(response(json.dumps(self.coin.choice(_ODD)).encode()))
        elif kind < 5:
            self.transport.write(response(completion('{"scores": ' + self.coin.choice(_WRONG) + "}", body["model"])))
        elif kind == 5:
            status = self.coin.choice((b"500 No", b"503 No", b"400 No", b"301 Away", b"204 Nothing"))
            self.transport.write(response(b"oh no", status))
        elif kind == 6:
            self.transport.write(response(self.coin.randbytes(200)))
        elif kind == 7:
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
            self.transport.close()
        else:
            self.transport.write(self.coin.choice((b"", b"HTTP/1.1 999\r\n\r\n", b"\0" * 99)))
            self.transport.close()


@dataclass(slots=True)
class Tally:
    """What callers saw: decision ids by request, new keys, statuses, and the gateway's memory on the way."""

    ids: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    again: Counter[str] = field(default_factory=Counter[str])
    statuses: Counter[int] = field(default_factory=Counter[int])
    unexpected: list[str] = field(default_factory=list[str])
    memory: list[int] = field(default_factory=list[int])

    def note(self, name: str, status: int, ids: tuple[str, ...], body: bytes) -> None:
        """Note a reply; a failure of the Guardian is expected, any other 5xx is not."""
        self.statuses[status] += 1
        if status == 200:
            self.ids[name].update(ids)
        elif status >= 500 and b"guardian_failed" not in body:
            self.unexpected.append(f"{name}: {status} {body[:200]!r}")

    @property
    def drift(self) -> float:
        """Mean memory in the last quarter over that in the second."""
        quarter = len(self.memory) // 4
        return float(np.mean(self.memory[-quarter:]) / np.mean(self.memory[quarter : 2 * quarter])) if quarter else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One line of the table."""

    attack: str
    count: int
    answered: int
    seconds: float
    lost: int = 0
    doubled: int = 0
    silent: int = 0
    unexpected: int = 0
    memory: float = 1.0
    replies: int = 0
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether what the gateway promises held."""
        enough = self.attack != "fuzz" or self.answered >= 0.3 * self.count
        return enough and not (self.lost or self.doubled or self.silent or self.unexpected) and self.memory <= 1.1


def rule_for(config: Path) -> Certificate:
    """Return a certificate of the two models of a configuration."""
    names = [f"calibration{k}" for k in range(2000)]
    columns = ([scores_of(role, name) for name in names] for role in ("primary", "guardian"))
    log = ScoreLog.from_arrays(*columns, id=names, identities=identities_of(read_config(config), "support"))
    return calibrate(log, 0.02, guardian_sees="all")


async def post(
    gateway: Gateway, session: aiohttp.ClientSession, tally: Tally, name: str, path: str, data: bytes, headers: Any
) -> int:
    """Send one request to its end; return the status."""
    given = {"Content-Type": "application/json", **headers}
    async with session.post(gateway.url + path, data=data, headers=given) as reply:
        body = await reply.read()
    tally.note(name, reply.status, ids_in(reply.headers, body), body)
    return reply.status


def request_of(number: int, name: str) -> tuple[str, bytes]:
    """Return one of the valid requests."""
    path, body = chat_request(name, stream=number % 6 == 0) if number % 2 else decision_request(name)
    return path, json.dumps(body).encode()


async def ask_until_answered(gateway: Gateway, session: aiohttp.ClientSession, tally: Tally, number: int) -> None:
    """Send a request again while the Guardian fails, with a new key if an alarm changed the policy in between."""
    name = key = f"n{number}"
    path, data = request_of(number, name)
    while (status := await post(gateway, session, tally, name, path, data, {"Idempotency-Key": key})) in (409, 502):
        if status == 409:
            key = f"{key}-again"
            tally.again[name] += 1
        await asyncio.sleep(0.05)


async def leave_and_return(gateway: Gateway, session: aiohttp.ClientSession, tally: Tally, number: int) -> None:
    """Leave in the middle, once or several times, and then wait for the answer under the same key."""
    coin, name = random.Random(number), f"n{number}"
    path, data = request_of(number, name)
    headers = {"Idempotency-Key": name}
    for _ in range(coin.choice((0, 1, 1, 3))):
        with_patience = post(gateway, session, tally, name, path, data, headers)
        try:
            await asyncio.wait_for(with_patience, coin.choice((0.001, 0.004, 0.008, 0.02)))
        except (TimeoutError, *LOST):
            continue
    while await post(gateway, session, tally, name, path, data, headers) in (409, 502):
        await asyncio.sleep(0.05)


async def fuzz(gateway: Gateway, session: aiohttp.ClientSession, tally: Tally, number: int) -> None:
    """Send a request that is odd, broken, or neither."""
    coin, name = random.Random(number), f"n{number}"
    path, body = chat_request(name, stream=coin.random() < 0.2) if number % 2 else decision_request(name)
    headers: dict[str, str] = {}
    if coin.random() < 0.3:
        headers["Idempotency-Key"] = "".join(map(chr, coin.choices(range(32, 127), k=coin.randrange(1, 300))))
    if coin.random() < 0.55:
        body = _mutated(body, coin)
    data = json.dumps(body).encode()
    if coin.random() < 0.1:
        start = coin.randrange(len(data))
        data = data[:start] + coin.randbytes(coin.randrange(40)) + data[start + coin.randrange(40) :]
    if coin.random() < 0.05:
        headers["Content-Type"] = coin.choice(("text/plain", "application/json; charset=x", ""))
    await post(gateway, session, tally, name, path, data, headers)


_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1e400, 10**40, "", "\0", "\ud800", "x" * 5000, [], {}, [[]], [None], {"a": {}}, "support", 0.5,
)  # fmt: skip


def _mutated(value: Any, coin: random.Random) -> Any:
    """Return a document with one part replaced, removed or repeated."""
    if isinstance(value, dict) and value and coin.random() < 0.85:
        members: dict[str, Any] = {**value}
        name = coin.choice(list(members))
        kind = coin.randrange(8)
        if kind == 0:
            del members[name]
        elif kind == 1:
            members[coin.choice(("seed", "user", "n", "tools", "temperature", "zz"))] = coin.choice(_VALUES)
        else:
            members[name] = _mutated(members[name], coin)
        return members
    if isinstance(value, list) and value and coin.random() < 0.7:
        items: list[Any] = [*value]
        place = coin.randrange(len(items))
        return [*items[:place], _mutated(items[place], coin), *items[place:]]
    return coin.choice(_VALUES)


async def press(gateway: Gateway, count: int, work: Any) -> Tally:
    """Do a numbered work many times, some at once, the memory looked at now and then."""
    tally, numbers, every = Tally(), iter(range(count)), max(1, count // SAMPLES)
    timeout = aiohttp.ClientTimeout(total=180)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def caller() -> None:
            for number in numbers:
                try:
                    await work(gateway, session, tally, number)
                except LOST as error:
                    tally.unexpected.append(f"n{number}: {error!r}")
                if number % every == 0:
                    tally.memory.append(gateway.memory)

        await asyncio.gather(*(caller() for _ in range(CONCURRENCY)))
    return tally


def is_silent(record: DecisionRecord, rule: Certificate) -> bool:
    """Return whether the Primary's choice stands although the certificate does not let it."""
    if record.decided_by != "primary":
        return False
    scores = next((leg.scores for leg in record.decision.legs if leg.role == "primary"), None)
    if scores is None:
        return True
    return list(rule.candidates(scores, id=record.id).tolist()) != [record.decision.action]


async def attack(name: str, count: int, upstream: type[Calm], work: Any, folder: Path) -> Outcome:
    """Run one attack against a new gateway, then read its whole record."""
    folder.mkdir()
    database, start = str(folder / "store.db"), time.perf_counter()
    with served(upstream) as url:
        rule = rule_for(write_config(folder, url, database, None))
        async with Gateway(write_config(folder, url, database, rule)) as gateway:
            tally = await press(gateway, count, work)
    store = await open_store(database)
    kept, by_name, silent = set[str](), Counter[str](), 0
    try:
        async for record in every_record(store):
            kept.add(record.id)
            silent += is_silent(record, rule)
            if record.decision.content is not None:
                by_name[str(named_in(str(record.decision.content.context)))] += record.decided_by != "cancelled"
    finally:
        await store.close()
    given = {id for ids in tally.ids.values() for id in ids}
    doubled = lost = 0
    if name != "fuzz":
        doubled = sum(by_name[each] > 1 + tally.again[each] or len(ids) > 1 for each, ids in tally.ids.items())
        lost = count - len(tally.ids)
    lost += len(given - kept)
    return Outcome(
        attack=name, count=count, answered=len(tally.ids), seconds=time.perf_counter() - start, lost=lost, doubled=doubled,
        silent=silent, unexpected=len(tally.unexpected), memory=tally.drift, notes=tuple(tally.unexpected[:3]),
    )  # fmt: skip


def ran(attack: str, count: int, arguments: list[str], **settings: str) -> Outcome:
    """Run a module with its own counts, which ends with another status than 0 if something did not hold."""
    start = time.perf_counter()
    one = subprocess.run(
        [sys.executable, "-m", *arguments], env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    return Outcome(attack=attack, count=count, answered=count, seconds=time.perf_counter() - start,
                   lost=int(one.returncode != 0), notes=((one.stdout + one.stderr)[-1500:],))  # fmt: skip


PYTEST = ["pytest", "-q", "-m", "not live", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]


def in_processes(counts: dict[str, int]) -> list[Outcome]:
    """Run what is a module or a test of its own.

    Engines: every one against the rows in memory, on random logs and on recorded ones if there are. Rows: so many are
    calibrated by two ways within 4 GB. Kills: of gateways over both databases, while callers wait. Alarms: the Primary
    degrades under gateways over both databases, and false reds of others are counted.
    """
    outcomes: list[Outcome] = []
    if (count := counts.get("engines")) is not None:
        tests = [f"tests/calibration/test_{name}.py" for name in ("engines", "planted", "connect")]
        outcomes.append(ran("engines", count, [*PYTEST, *tests], ENGINE_ROUNDS=str(count)))
    if (count := counts.get("rows")) is not None:
        ways = ["--engine", "threads", "--engine", "processes", "--megabytes", "4096"]
        outcomes.append(ran("rows", count, ["benchmarks.scale", "--rows", str(count), *ways]))
    if (count := counts.get("kills")) is not None:
        outcomes.append(ran("kills", count, [*PYTEST, "tests/gateway/test_kill.py"], KILL_ROUNDS=str(count // 2)))
    if (count := counts.get("alarms")) is not None:
        quiet = ["--quiet-runs", str(count // 400)]
        outcomes.append(ran("alarms", count, ["benchmarks.alarms", "--decisions", str(count), *quiet]))
    return outcomes


async def hostile(count: int, folder: Path) -> Outcome:
    """Send requests until so many replies were hostile."""
    replies = folder.with_suffix(".replies")
    replies.touch()
    os.environ[_REPLIES] = str(replies)
    outcome = await attack("hostile", int(count / HOSTILE_SHARE), Hostile, ask_until_answered, folder)
    short = max(0, count - replies.stat().st_size)
    return replace(
        outcome, replies=replies.stat().st_size, notes=(*outcome.notes, *([f"{short} replies short"] * bool(short)))
    )


def run(counts: dict[str, int], folder: Path) -> list[Outcome]:
    """Run the attacks, one after the other."""
    outcomes = in_processes(counts)
    if "hostile" in counts:
        outcomes.append(asyncio.run(hostile(counts["hostile"], folder / "hostile")))
    if "fuzz" in counts:
        outcomes.append(asyncio.run(attack("fuzz", counts["fuzz"], Calm, fuzz, folder / "fuzz")))
    if "leave" in counts:
        outcomes.append(asyncio.run(attack("leave", counts["leave"], Calm, leave_and_return, folder / "leave")))
    return outcomes


def table(outcomes: list[Outcome]) -> list[str]:
    """Return the outcomes as a table."""
    head = ("attack", "requests", "answered", "lost", "doubled", "silent", "unexpected 5xx", "memory", "seconds")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for one in outcomes:
        cells = (one.attack, one.count, one.answered, one.lost, one.doubled, one.silent, one.unexpected,
                 f"{one.memory:.3f}", f"{one.seconds:.0f}")  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def main() -> None:
    """Attack, print, and say whether everything held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of the counts")
    parser.add_argument("--skip", action="append", default=[], choices=sorted(COUNTS), help="leave an attack out")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.parse_args()
    counts = {name: max(1, int(count * options.scale)) for name, count in COUNTS.items() if name not in options.skip}
    os.environ["ARBITRAGE_SECRET"] = SECRET
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(counts, Path(folder))
    if options.json:
        print(json.dumps([asdict(one) for one in outcomes], indent=1))
    else:
        print("\n".join([*table(outcomes), *(f"{one.replies} hostile replies" for one in outcomes if one.replies)]))
    broken = [one for one in outcomes if not one.holds]
    for one in broken:
        print(one.attack, *one.notes, sep="\n  ", file=sys.stderr)
    if broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
