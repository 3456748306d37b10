"""Gateways whose clocks disagree: leases and times go by the database's clock."""

import asyncio
import time

import pytest

from conformal_arbitrage.store import claims, events, outbox, pages
from conformal_arbitrage.store.claims import Claim
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import MenuQuestion, new_id
from tests.store.facts import decision

HOUR = 3600.0
BODY = "a" * 64


class Clock:
    """This process's clock, which may be wrong."""

    def __init__(self):
        self.wrong_by = 0.0
        self._true = time.time

    def __call__(self):
        return self._true() + self.wrong_by


@pytest.fixture
def clock(monkeypatch):
    wrong = Clock()
    monkeypatch.setattr(time, "time", wrong)
    return wrong


async def test_a_gateway_an_hour_ahead_does_not_hold_a_key_for_an_hour(store, clock):
    clock.wrong_by = HOUR
    assert isinstance(await store.run(claims.take, "k", "n", BODY, lease=1), Claim)
    clock.wrong_by = 0.0
    assert await store.run(claims.take, "k", "n", BODY, lease=6) == "under way"
    await asyncio.sleep(1.1)
    assert isinstance(await store.run(claims.take, "k", "n", BODY, lease=6), Claim)


async def test_a_gateway_an_hour_ahead_does_not_take_a_key_that_is_held_nor_forget_one_that_is_answered(store, clock):
    held = await store.run(claims.take, "k", "n", BODY, lease=6)
    clock.wrong_by = HOUR
    assert await store.run(claims.take, "k", "n", BODY, lease=6) == "under way"
    assert await store.run(claims.renew, held, lease=6)
    clock.wrong_by = 25 * HOUR
    assert await store.run(claims.take, "k", "n", "b" * 64, lease=6) == "other body"


@pytest.mark.parametrize("wrong_by", [HOUR, -HOUR])
async def test_a_clock_that_is_set_in_between_does_not_block_a_key(store, sql, clock, wrong_by):
    assert isinstance(await store.run(claims.take, "k", "n", BODY, lease=6), Claim)
    sql(f"update claims set lease = lease + {wrong_by}")  # as if the database's clock had been set
    assert isinstance(await store.run(claims.take, "k", "n", BODY, lease=6), Claim)
    assert await store.run(claims.take, "k", "n", BODY, lease=6) == "under way"


async def test_a_gateway_an_hour_ahead_does_not_hold_audits_for_an_hour(store, clock):
    id = new_id()
    audit = Audit(id=id, policy="support", question=MenuQuestion(context="?", actions=("a", "b")))
    await store.run(events.commit, [decision(id)], audits=[audit])
    clock.wrong_by = HOUR
    assert [taken.id for taken in await store.run(outbox.take_audits, limit=9, lease=1)] == [id]
    assert await store.run(outbox.take_audits, limit=9, lease=1) == []
    clock.wrong_by = 0.0
    assert await store.run(outbox.take_audits, limit=9, lease=1) == []
    await asyncio.sleep(1.1)
    assert [taken.id for taken in await store.run(outbox.take_audits, limit=9, lease=6)] == [id]


async def test_records_of_gateways_that_share_a_server_have_the_servers_time(postgres, opened, clock):
    store = opened(postgres)
    clock.wrong_by = HOUR
    ahead = decision()
    await store.run(events.commit, [ahead])
    clock.wrong_by = 0.0
    behind = decision()
    await store.run(events.commit, [behind])
    assert (await store.run(pages.record, ahead.id)).created < (await store.run(pages.record, behind.id)).created
