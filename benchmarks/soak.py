"""A long run of the gateway: memory, the record and the rule over many requests, with an upstream that fails at times.

The upstream is a chat endpoint in a process of its own that cuts connections, refuses and talks nonsense in 2 % of the
calls. First the gateway shadows, and half of its export is calibrated and tried on the other half; then it enforces
that certificate. `make soak`, or `python -m benchmarks.soak --requests 200000`.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from benchmarks.endpoint import Messages, completion, response, served
from tests.gateway.durability import (
    ACTIONS,
    LOST,
    OURS,
    Gateway,
    chat_request,
    decision_request,
    guardian_answered,
    named_in,
    numbers,
    run_sql,
)

from conformal_arbitrage import Certificate, ScoreLog, calibrate
from conformal_arbitrage.collecting.records import score_log_of
from conformal_arbitrage.gateway.gateway import identities_of
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.store import integrity, pages
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.record import DecisionRecord
from conformal_arbitrage.store.session import Store

ALPHA = 0.02
FAULTS = 0.02
SAMPLES = 400
_CONFIG = """\
guardian_sees = "all"

[primary]
kind = "chat"
url = "{url}"
model = "primary"
concurrency = 64
attempts = 2

[primary.pinned]
mode = "plain"

[guardian]
kind = "chat"
url = "{url}"
model = "guardian"
concurrency = 64
attempts = 2

[guardian.pinned]
mode = "plain"

[gateway]
database = "{database}"

[policies.support]
{certificate}
mode = "{mode}"
audit_rate = {audit_rate}
content = "full"
"""


class Upstream(Messages):
    """A chat endpoint; some calls it fails."""

    coin = random.Random(7)

    def received(self, message: bytes) -> None:
        """Answer a few milliseconds later."""
        body = json.loads(message.partition(b"\r\n\r\n")[2])
        asyncio.get_running_loop().call_later(self.coin.uniform(0.001, 0.005), self._answer, body)

    def _answer(self, body: dict[str, Any]) -> None:
        if self.transport.is_closing():
            return
        if self.coin.random() >= FAULTS:
            self.transport.write(response(_completion(body)))
            return
        kind = self.coin.choice(("refuse", "limit", "cut", "half", "nonsense", "numbers"))
        if kind == "refuse":
            self.transport.write(response(b'{"error": {"message": "down"}}', b"503 Service Unavailable"))
        elif kind == "limit":
            self.transport.write(response(b'{"error": {"message": "slower"}}', b"429 Too Many Requests"))
        elif kind == "nonsense":
            self.transport.write(response(b"<html>"))
        elif kind == "numbers":
            self.transport.write(response(completion('{"scores": [0.5, "x"]}', body["model"])))
        else:
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{" if kind == "half" else b"")
            self.transport.close()


def scores_of(role: str, name: str) -> list[float]:
    """What a model thinks of a question; the Guardian agrees with the Primary in part."""
    own = numbers(role, name, len(ACTIONS))
    if role == "primary":
        return own
    return [round((a + b) / 2, 6) for a, b in zip(own, scores_of("primary", name), strict=True)]


def _completion(body: dict[str, Any]) -> bytes:
    name = str(named_in(body["messages"][-1]["content"]))
    return completion(json.dumps({"scores": scores_of(body["model"], name)}), body["model"])


@dataclass(slots=True)
class Load:
    """What callers got: decision ids by request, and the gateway's memory on the way."""

    ids: dict[str, str] = field(default_factory=dict[str, str])
    memory: list[int] = field(default_factory=list[int])
    failed: int = 0
    wrong: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    @property
    def drift(self) -> float:
        """Mean memory in the last quarter over that in the second."""
        quarter = len(self.memory) // 4
        return float(np.mean(self.memory[-quarter:]) / np.mean(self.memory[quarter : 2 * quarter]))


async def send(gateway: Gateway, session: aiohttp.ClientSession, load: Load, name: str) -> None:
    """One request until it is answered; where the Guardian failed it is sent again."""
    number = int(name[1:])
    path, body = chat_request(name, stream=number % 6 == 0) if number % 2 else decision_request(name)
    headers = {"Idempotency-Key": name} if number % 5 else {}
    while True:
        try:
            async with session.post(gateway.url + path, json=body, headers=headers) as reply:
                text = await reply.read()
        except LOST as error:
            load.wrong.append(f"{name}: {error!r}")
            return
        if reply.status == 200:
            load.ids[name] = reply.headers["x-arbitrage-decision-id"]
            return
        if reply.status != 502:
            load.wrong.append(f"{name}: {reply.status} {text[:200]!r}")
            return
        load.failed += 1


async def press(gateway: Gateway, requests: int, concurrency: int) -> Load:
    """Many requests at once, the memory looked at now and then."""
    load, start = Load(), time.perf_counter()
    names = iter(range(requests))
    every = max(1, requests // SAMPLES)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def caller() -> None:
            for number in names:
                await send(gateway, session, load, f"n{number}")
                if number % every == 0:
                    load.memory.append(gateway.memory)

        await asyncio.gather(*(caller() for _ in range(concurrency)))
    load.seconds = time.perf_counter() - start
    return load


async def every_record(store: Store) -> AsyncIterator[DecisionRecord]:
    before: str | None = None
    while page := await store.run(pages.records, pages.RecordFilter(before=before), limit=1000):
        for record in page:
            yield record
        before = page[-1].id


def faults_of(record: DecisionRecord, rule: Certificate) -> list[str]:
    """Where a decision is not the one that the certificate makes of the scores in its record."""
    body = record.decision
    scores = {leg.role: leg.scores for leg in body.legs}
    mine, theirs = scores["primary"], scores.get("guardian")
    name = str(named_in("" if body.content is None else str(body.content.context)))
    sight = rule.candidates(mine or (None,) * len(ACTIONS), id=record.id).tolist()
    top = sight[0] if len(sight) == 1 or theirs is None else int(np.argmax(theirs))
    checks = {
        "candidates": list(body.candidates) == sight,
        "relaxation": body.relaxation == rule.relaxation,
        "who decided": record.decided_by == ("primary" if len(sight) == 1 else "guardian"),
        "action": body.action == top,
        "Primary's scores": mine is None or bool(np.allclose(mine, _normal("primary", name))),
        "guarantee": body.no_guarantee is None,
    }
    return [f"{record.id}: {what} ({body})" for what, holds in checks.items() if not holds]


def _normal(role: str, name: str) -> list[float]:
    result = scores_of(role, name)
    return [score / sum(result) for score in result]


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What a run showed."""

    requests: int
    seconds: float
    guardian_failures: int
    records: int
    lost: int
    extra: int
    audits: int
    audits_open: int
    faults: list[str]
    broken_chains: list[str]
    memory_mb: list[float]
    drift: float


async def soak(config: Path, database: str, requests: int, concurrency: int, rule: Certificate) -> Soaked:
    """Enforce under load, then read the whole record."""
    async with Gateway(config) as gateway:
        load = await press(gateway, requests, concurrency)
        for _ in range(600):  # the last audits
            if run_sql(database, "select count(*) from audits") == [(0,)]:
                break
            await asyncio.sleep(0.2)
    async with await open_store(database, keys=OURS.record_keys) as store:
        faults, kept, audits, waiting = load.wrong, set[str](), 0, 0
        async for record in every_record(store):
            kept.add(record.id)
            faults += faults_of(record, rule)
            audits += record.decision.audited
            waiting += record.decision.audited and record.audit is None and not guardian_answered(record)
        chains = await integrity.verify(store)
    ids = set(load.ids.values())
    quarters = np.array_split(np.array(load.memory) / 2**20, 4)
    return Soaked(
        requests=requests, seconds=round(load.seconds, 1), guardian_failures=load.failed, records=len(kept),
        lost=len(ids - kept) + requests - len(ids), extra=len(kept - ids), audits=audits, audits_open=waiting,
        faults=faults, broken_chains=chains, memory_mb=[round(float(q.mean()), 2) for q in quarters], drift=load.drift,
    )  # fmt: skip


def write_config(folder: Path, url: str, database: str, rule: Certificate | None) -> Path:
    """Shadow without a certificate, else enforce it."""
    if rule is not None:
        rule.sign(OURS).save(folder / "certificate.json")
    named = "" if rule is None else 'certificate = "certificate.json"'
    mode, rate = ("shadow", 0.0) if rule is None else ("enforce", 0.05)
    path = folder / "arbitrage.toml"
    path.write_text(_CONFIG.format(url=url, database=database, certificate=named, mode=mode, audit_rate=rate))
    return path


async def shadow(config: Path, database: str, requests: int, concurrency: int) -> ScoreLog:
    """The export of a gateway that shadows."""
    async with Gateway(config) as gateway:
        load = await press(gateway, requests, concurrency)
    assert not load.wrong, load.wrong[:3]
    async with await open_store(database, keys=OURS.record_keys) as store:
        log = await score_log_of(store, "support", identities=identities_of(read_config(config), "support"))
    lacking = int(log.missing.sum())
    assert (len(log), lacking) == (requests, 0), f"{len(log)} rows, {lacking} without a Guardian"  # a retry continues
    return log


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalibrated:
    """A certificate from half of an export, and its loss on the other half."""

    rule: Certificate
    rows: int
    loss: float
    error: float
    deferred: float

    @property
    def holds(self) -> bool:
        """Whether the loss is within the quota, up to three standard errors."""
        return self.loss <= ALPHA + 3 * self.error


def recalibrated(log: ScoreLog) -> Recalibrated:
    """Calibrate on one half of the rows, drawn at random, and decide what the Guardian scored of the other."""
    order = np.random.default_rng(5).permutation(len(log))
    half = len(log) // 2
    rule = calibrate(
        log.select(order[:half]), ALPHA, guardian_sees="all", missing_guardian="worst_case", key=OURS.boundary_key
    )
    rest = log.select(order[half:])
    rest = rest.select(~rest.missing)
    decisions = rule.apply(rest)
    menus = rest.guardian.reshape(len(rest), len(ACTIONS))
    losses = menus.max(axis=1) - menus[np.arange(len(rest)), decisions.action]
    return Recalibrated(
        rule=rule, rows=half, loss=float(losses.mean()), error=float(losses.std() / np.sqrt(len(losses))),
        deferred=float(decisions.deferred.mean()),
    )  # fmt: skip


async def run(folder: Path, *, requests: int, shadowed: int, concurrency: int) -> tuple[Recalibrated, Soaked]:
    """Shadow, calibrate, enforce."""
    with served(Upstream) as url:
        first = str(folder / "shadow.db")
        found = recalibrated(await shadow(write_config(folder, url, first, None), first, shadowed, concurrency))
        second = str(folder / "enforce.db")
        config = write_config(folder, url, second, found.rule)
        return found, await soak(config, second, requests, concurrency, found.rule)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--shadow", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    arguments = parser.parse_args()
    sizes = {"requests": arguments.requests, "shadowed": arguments.shadow, "concurrency": arguments.concurrency}
    with tempfile.TemporaryDirectory() as folder:
        found, soaked = asyncio.run(run(Path(folder), **sizes))
    print(f"Certificate: relaxation {found.rule.relaxation}, from {found.rows} shadow rows, alpha {ALPHA}")
    print(f"On the rest: loss {found.loss:.4f} +- {found.error:.4f}, {found.deferred:.1%} deferred")
    print(json.dumps(asdict(replace(soaked, faults=soaked.faults[:10])), indent=1))
    good = found.holds and not (soaked.lost or soaked.extra or soaked.audits_open or soaked.faults)
    if not (good and not soaked.broken_chains and abs(soaked.drift - 1) <= 0.1):
        raise SystemExit("The soak failed.")


if __name__ == "__main__":
    main()
