"""kill -9 while 32 callers wait: what was acknowledged is there, once, and what was begun is brought to an end."""

import asyncio
import os
import random
from collections import defaultdict

import aiohttp
import pytest

from conformal_arbitrage.store import integrity
from conformal_arbitrage.store.location import open_store
from tests.gateway.durability import (
    LOST,
    OURS,
    Gateway,
    all_records,
    calls_by_name,
    chat_request,
    decision_request,
    decisions_by_name,
    encoded,
    guardian_answered,
    ids_in,
    run_sql,
    write_config,
)

pytestmark = pytest.mark.proof
ROUNDS = int(os.environ.get("KILL_ROUNDS", "5"))
CALLERS = 32
JSON = {"Content-Type": "application/json"}


class Callers:
    """Many callers of one gateway, and all that it acknowledged to them."""

    def __init__(self, gateway, session):
        self.gateway = gateway
        self.session = session
        self.over = False
        self.kills = 0
        self.acknowledged = set()
        self.replies = defaultdict(set)
        self.questions = {}
        self.kills_seen = {}
        self.broken = 0
        self.replayed = 0
        self.refused = []

    async def all(self):
        await asyncio.gather(*(self.one(f"c{k}") for k in range(CALLERS)))

    async def one(self, caller):
        count = 0
        while not self.over:
            count += 1
            name = f"{caller}-{count}"
            questions = random.choice((1, 1, 3))
            path, body = random.choice(
                (decision_request(name, questions), chat_request(name), chat_request(name, stream=True))
            )
            self.questions[name] = len(body.get("questions", [0]))
            keyed = random.random() < 0.85
            twice = 2 if keyed and random.random() < 0.2 else 1
            start = self.kills
            await asyncio.gather(*(self.insist(name if keyed else None, path, body) for _ in range(twice)))
            self.kills_seen[name] = self.kills - start
            if keyed and random.random() < 0.1:
                await self.insist(name, path, body)

    async def insist(self, key, path, body):
        """Send until there is a reply; without a key, once."""
        while True:
            await self.gateway.up.wait()
            try:
                return await self.send(key, path, body)
            except LOST:
                self.broken += 1
                if key is None:
                    return None
                await asyncio.sleep(random.uniform(0, 0.1))

    async def send(self, key, path, body):
        headers = JSON if key is None else {**JSON, "Idempotency-Key": key}
        async with self.session.post(self.gateway.url + path, data=encoded(body), headers=headers) as reply:
            got = b""
            try:
                async for piece in reply.content.iter_any():
                    got += piece
            finally:
                if reply.status == 200:  # what came counts, whether all of it did or not
                    self.acknowledged |= set(ids_in(reply.headers, got))
            if reply.status != 200:
                self.refused.append((reply.status, got))
            elif key is not None:
                self.replies[key].add(ids_in(reply.headers, got))
                self.replayed += reply.headers.get("x-arbitrage-replayed") == "true"


@pytest.fixture(params=["sqlite", "postgres"])
def where(request, tmp_path):
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    return request.getfixturevalue("server").new_database()


async def rounds(gateway, callers):
    """Kill the gateway at moments that no one can foresee, then let everyone finish."""
    working = asyncio.create_task(callers.all())
    for _ in range(ROUNDS):
        await asyncio.sleep(random.choice((random.uniform(0.2, 1.5), random.uniform(6, 8))))  # a dead claim holds 6 s
        callers.kills += 1
        await gateway.kill()
        await gateway.start()
    await asyncio.sleep(1)
    callers.over = True
    await working


async def audits_end(where):
    """Wait until no audit is queued; those the dead had begun come up when their lease is over."""
    for _ in range(600):
        if run_sql(where, "select count(*) from audits") == [(0,)]:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("audits are still queued after a minute")


async def test_a_gateway_that_is_killed_again_and_again_loses_nothing_and_decides_nothing_twice(where, tmp_path):
    calls = tmp_path / "calls"
    gateway = Gateway(write_config(tmp_path, where), CALLS=str(calls))
    timeout = aiohttp.ClientTimeout(total=60)
    async with gateway, aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        callers = Callers(gateway, session)
        await rounds(gateway, callers)
        await audits_end(where)
    async with await open_store(where, keys=OURS.record_keys) as store:
        records, faults = await all_records(store), await integrity.verify(store)
    check(callers, records, calls)
    assert faults == []
    assert run_sql(where, "select version from policies") == [(1,)]  # no restart installed it again


def check(callers, records, calls):
    assert callers.refused == []
    kept = {record.id for record in records}
    assert callers.acknowledged <= kept
    assert {key: found for key, found in callers.replies.items() if len(found) != 1} == {}
    decided, called = decisions_by_name(records), calls_by_name(calls)
    assert {key: decided[key] for key in callers.replies if decided[key] != callers.questions[key]} == {}
    repeats = {key: called[key] / callers.questions[key] for key in callers.replies}
    assert {key: n for key, n in repeats.items() if n > 1 + callers.kills_seen[key]} == {}
    drawn = [record for record in records if record.decision.audited]
    unseen = [record for record in drawn if record.audit is None and not guardian_answered(record)]
    assert [record.id for record in unseen if not record.decision.pending] == []  # the dead had asked its Guardian
    print(
        f"{callers.kills} kills, {len(records)} decisions, {len(callers.acknowledged)} acknowledged, "
        f"{len(callers.replies)} keys, {callers.broken} broken, {callers.replayed} replayed, {len(drawn)} audits, "
        f"{sum(n > 1 for n in repeats.values())} keys asked again after a kill"
    )
    assert callers.replayed > 0
    assert callers.broken > 0
    assert drawn
