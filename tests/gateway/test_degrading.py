"""A Primary that gets worse under a real gateway: red in time, safe mode at once, the same after kill -9."""

import asyncio

import aiohttp
import numpy as np
import pytest

from conformal_arbitrage.monitoring.lines import watch_lines
from conformal_arbitrage.monitoring.monitor import Monitor
from conformal_arbitrage.store import integrity, ledger, policies
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.record import time_of
from tests.gateway import degrading
from tests.gateway.durability import OURS, Gateway, all_records

AT_ONCE, TOGETHER, CHANGE, DECISIONS = 16, 200, 1000, 2000


@pytest.fixture(params=["sqlite", "postgres"])
def where(request, tmp_path):
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    return request.getfixturevalue("server").new_database()


async def run(url, decisions):
    """Ask in order, a few at a time, and wait for the audits now and again; return who decided, and the end."""
    decided, shown = [], {}
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number):
        async with places:
            return await degrading.ask(session, url, number, 1)

    async with aiohttp.ClientSession() as session:
        for first in range(0, decisions, TOGETHER):
            was_safe = shown.get("mode") == "safe"
            for [by] in await asyncio.gather(*map(one, range(first, first + TOGETHER))):
                decided.append(by)
            if was_safe:
                break  # one round in safe mode is enough
            shown = await degrading.settled(session, url, len(decided))
        return decided, await degrading.monitor(session, url)


async def ledger_of(where):
    async with await open_store(where, keys=OURS.record_keys) as store:
        [one] = await store.run(ledger.ledgers, "support")
        rows = await store.run(ledger.changes, one.key, 0)
        return (
            sorted(rows, key=lambda row: row.seq),
            await all_records(store),
            await store.run(policies.notices),
            await integrity.verify(store),
        )


async def test_a_primary_three_times_as_bad_is_red_in_time_and_decides_nothing_afterwards(where, tmp_path):
    config = degrading.write_config(tmp_path, where, audit_rate=1.0)
    async with Gateway(config, **degrading.environment(CHANGE)) as gateway:
        decided, shown = await run(gateway.url, DECISIONS)
    assert (shown["mode"], shown["cause"]) == ("safe", "losses")
    rows, records, notices, faults = await ledger_of(where)
    assert faults == []
    [alarm] = notices
    losses = [row.loss or 0.0 for row in rows]  # audits under way when the gateway stopped count as no loss
    crossed = degrading.crossing(losses, shown["lines"])
    assert 0 < crossed - CHANGE <= degrading.longest_delay(shown["lines"], CHANGE)
    assert crossed <= alarm.body.audits <= crossed + TOGETHER  # what was asked at the same time
    assert set(decided[-TOGETHER:]) == {"guardian"}
    late = [record for record in records if time_of(record.id) > alarm.body.at + 1]
    assert {record.decision.mode for record in late} <= {"safe"}  # requests under way excepted
    assert len(rows) == sum(record.decision.mode == "enforce" for record in records)


@pytest.mark.proof
async def test_without_a_change_two_thousand_decisions_raise_no_alarm(tmp_path):
    where = str(tmp_path / "store.db")
    config = degrading.write_config(tmp_path, where, audit_rate=1.0)
    async with Gateway(config, **degrading.environment(2**40)) as gateway:
        decided, shown = await run(gateway.url, DECISIONS)
    assert shown["mode"] == "enforce"
    assert shown["audits"] == {"known": DECISIONS, "pending": 0, "missing": 0, "collapsed": 0}
    assert "primary" in decided[-AT_ONCE:]
    expected = np.mean([world[1] and world[2] for world in map(degrading.world, range(DECISIONS))])
    assert shown["mean_loss"] == pytest.approx(expected)


async def test_kill_and_a_second_gateway_change_nothing(where, tmp_path):
    config = degrading.write_config(tmp_path, where, audit_rate=1.0)
    async with Gateway(config, **degrading.environment(2**40)) as gateway, aiohttp.ClientSession() as session:
        await degrading.ask(session, gateway.url, 0, AT_ONCE)
        asking = asyncio.create_task(degrading.ask(session, gateway.url, AT_ONCE, AT_ONCE))
        await asyncio.sleep(0.05)
        await gateway.kill()
        await asyncio.gather(asking, return_exceptions=True)
        await gateway.start()
        await degrading.ask(session, gateway.url, 2 * AT_ONCE, AT_ONCE)
        count = len((await ledger_of(where))[0])
        shown = await degrading.settled(session, gateway.url, count)
        async with Gateway(config, **degrading.environment(2**40)) as other:
            assert await degrading.settled(session, other.url, count) == shown
            await degrading.ask(session, other.url, 3 * AT_ONCE, AT_ONCE)
            both = [await degrading.settled(session, one.url, count + AT_ONCE) for one in (gateway, other)]
            assert both[0] == both[1]
    rows, records, _, faults = await ledger_of(where)
    assert faults == []
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    assert {row.id for row in rows} == {record.id for record in records if record.decision.audited}
    assert both[0]["audits"]["known"] == len(rows)
    lines = watch_lines(degrading.ALPHA, n=2000)
    again = Monitor.from_ledger(lines, np.array([row.loss for row in rows])).standing(0.0)
    assert both[0]["limits"] == list(again.limits)
    assert both[0]["mean_loss"] == again.mean
