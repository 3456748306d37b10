"""Two gateways on one PostgreSQL: one key is one decision, and a policy changed at one is in force at both."""

import asyncio
import json
import os

import aiohttp
import pytest

from conformal_arbitrage.store import integrity
from conformal_arbitrage.store.location import open_store
from tests.gateway.durability import (
    OURS,
    Gateway,
    all_records,
    calls_by_name,
    certificate,
    chat_request,
    decision_request,
    decisions_by_name,
    encoded,
    write_config,
)

pytestmark = pytest.mark.proof
KEYS = int(os.environ.get("REPLICA_KEYS", "500"))
AT_ONCE = 32


@pytest.fixture
def where(request):
    return request.getfixturevalue("server").new_database()


async def ask(session, url, path, body, key=None):
    """Status, headers and document of a reply."""
    headers = {"Content-Type": "application/json", **({} if key is None else {"Idempotency-Key": key})}
    async with session.post(url + path, data=encoded(body), headers=headers) as reply:
        return reply.status, reply.headers, await reply.read()


async def each(count, work):
    """Do a numbered work, a few at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(k):
        async with places:
            return await work(k)

    return await asyncio.gather(*(one(k) for k in range(count)))


async def test_a_key_sent_to_two_gateways_at_once_is_one_decision_and_one_reply(where, tmp_path):
    config, calls = write_config(tmp_path, where, audit_rate=0), tmp_path / "calls"
    async with (
        Gateway(config, CALLS=str(calls)) as one,
        Gateway(config, CALLS=str(calls)) as other,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        async def both(k):
            request = (decision_request, chat_request)[k % 2](f"n{k}")
            return await asyncio.gather(*(ask(session, g.url, *request, key=f"n{k}") for g in (one, other)))

        replies = await each(KEYS, both)
        again = await ask(session, other.url, *decision_request("n0"), key="n0")
    assert [pair for pair in replies if [status for status, _, _ in pair] != [200, 200]] == []
    assert [pair for pair in replies if pair[0][2] != pair[1][2]] == []
    replayed = [sum("x-arbitrage-replayed" in headers for _, headers, _ in pair) for pair in replies]
    assert replayed == [1] * KEYS
    assert again[2] == replies[0][0][2]
    async with await open_store(where, keys=OURS.record_keys) as store:
        records, faults = await all_records(store), await integrity.verify(store)
    names = {f"n{k}": 1 for k in range(KEYS)}
    assert decisions_by_name(records) == names
    assert calls_by_name(calls) == names
    assert faults == []


async def test_the_claims_of_a_killed_gateway_are_taken_over_by_the_other(where, tmp_path):
    config = write_config(tmp_path, where, audit_rate=0)
    async with (
        Gateway(config) as one,
        Gateway(config) as other,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        names = [f"n{k}" for k in range(64)]
        first = [asyncio.create_task(ask(session, one.url, *decision_request(n), key=n)) for n in names]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        await one.kill()
        done = await asyncio.gather(*first, return_exceptions=True)
        replies = await asyncio.gather(*(ask(session, other.url, *decision_request(n), key=n) for n in names))
    assert {status for status, _, _ in replies} == {200}
    pairs = [(old, new) for old, new in zip(done, replies, strict=True) if not isinstance(old, Exception)]
    assert len(pairs) < len(names)
    assert [pair for pair in pairs if pair[0][2] != pair[1][2]] == []
    async with await open_store(where, keys=OURS.record_keys) as store:
        records = await all_records(store)
    assert decisions_by_name(records) == dict.fromkeys(names, 1)


def relaxation_in(body):
    """The relaxation by which a decision was made, from a reply that shows all."""
    return json.loads(body)["answers"][0]["arbitrage"]["relaxation"]


async def test_a_policy_that_is_changed_at_one_gateway_is_in_force_at_both_from_the_next_request_on(where, tmp_path):
    config = write_config(tmp_path, where, alpha=0.1)
    changes = [certificate(alpha) for alpha in (0.3, 0.02, 0.1, 0.2)]
    assert len({change.relaxation for change in changes}) == 4
    async with (
        Gateway(config) as one,
        Gateway(config) as other,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        stop = asyncio.Event()

        async def load(k):
            while not stop.is_set():
                await ask(session, (one, other)[k % 2].url, *decision_request(f"load{k}"))

        loading = [asyncio.create_task(load(k)) for k in range(16)]
        for change in changes * 3:
            url = f"{one.url}/v1/arbitrage/policies/support"
            async with session.put(url, json={"certificate": change.to_dict()}) as reply:
                assert reply.status == 200, await reply.text()
            seen = await asyncio.gather(
                *(ask(session, g.url, *decision_request(f"n{k}")) for g in (one, other) for k in range(8))
            )
            assert {relaxation_in(body) for _, _, body in seen} == {change.relaxation}
        stop.set()
        await asyncio.gather(*loading)
