import asyncio
import threading
import time

import pytest

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store import events as stored_events
from conformal_arbitrage.store import integrity, outbox, pages
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import AuditBody, FeedbackBody, MenuQuestion, new_id
from tests.store.facts import decide, decision, later

SWAP = (
    "update events set seq = 100 where seq = 4",
    "update events set seq = 4 where seq = 5",
    "update events set seq = 5 where seq = 100",
)


@pytest.fixture
def chained(where, opened):
    """A store with seven events, written by one writer in one transaction."""
    store = opened(where)
    asyncio.run(store.run(stored_events.commit, [decision() for _ in range(7)]))
    return store


@pytest.mark.parametrize(
    ("damage", "events", "fault"),
    [
        (["update events set body = '{}' where seq = 4"], [4], "it is not what was written"),
        (["update events set policy = 'x' where seq = 1"], [1], "it is not what was written"),
        (["update events set at = at + 1 where seq = 7"], [7], "it is not what was written"),
        (["update events set hash = 'x' where seq = 4"], [4], "its hash was changed"),
        (["delete from events where seq = 4"], [5], "event 4 should come here; events were removed"),
        (["delete from events where seq < 4"], [4], "event 1 should come here; events were removed"),
        (SWAP, [4], "it and event 5 were swapped"),
    ],
)
def test_damage_is_named(chained, sql, damage, events, fault):
    assert asyncio.run(integrity.verify(chained)) == []
    for statement in damage:
        sql(statement)
    faults = asyncio.run(integrity.verify(chained))
    assert len(faults) == len(events)
    for message, seq in zip(faults, events, strict=True):
        assert f", event {seq} (" in message
        assert fault in message


def test_every_damage_is_reported(chained, sql):
    sql("update events set body = '{}' where seq in (2, 3, 6)")
    sql("delete from events where seq = 4")
    assert len(asyncio.run(integrity.verify(chained))) == 4


def test_a_malformed_row_raises_a_store_error(chained, sql):
    sql("update events set body = '{' where seq = 4")
    with pytest.raises(StoreError, match="verify"):
        asyncio.run(chained.run(pages.records))
    assert len(asyncio.run(integrity.verify(chained))) == 1


async def test_pruning_removes_old_decisions_entirely_and_the_chain_still_holds(store, sql):
    old = await decide(store, 20)
    await store.run(
        stored_events.commit,
        [],
        audits=[Audit(id=old[0], policy="support", question=MenuQuestion(context="?", actions=("a", "b")))],
    )
    await asyncio.sleep(0.01)
    cut = time.time()
    young = await decide(store, 5)
    for id in (old[3], young[0], old[4]):
        await store.run(stored_events.commit, [later(id, FeedbackBody(comment="secret"))])
    assert await integrity.prune(store, before=cut) == 19, "an open audit keeps its question"
    await store.run(stored_events.commit, [later(old[0], AuditBody(error="too late"))])
    assert await integrity.prune(store, before=cut) == 1
    assert [record.id for record in await store.run(pages.records)] == young[::-1]
    assert await store.run(pages.record, old[3]) is None
    assert len((await store.run(pages.record, young[0])).feedback) == 1
    assert await store.run(outbox.take_audits, limit=9, lease=1) == []
    assert await integrity.verify(store) == []
    await decide(store, 10)
    assert await integrity.verify(store) == []
    assert not any(
        id in old or "secret" in (body or "") for id, body in sql("select id, body from events where kind is null")
    )
    [(tombstones,)] = sql("select count(*) from events where body is null")
    assert tombstones <= 2 + 4, "tombstones at the start of a chain are compacted"


async def test_pruning_again_moves_the_checkpoint_on(store, sql):
    for _ in range(3):
        await decide(store, 12)
        await asyncio.sleep(0.005)
        assert await integrity.prune(store, before=time.time()) == 12
        assert await integrity.verify(store) == []
    await decide(store, 3)
    assert await integrity.verify(store) == []
    assert sql("select count(*) from events where body is null") == [(0,)]
    assert 1 <= sql("select count(*) from checkpoints")[0][0] <= 4


async def test_pruning_handles_more_than_one_chunk(tmp_path, opened):
    store = opened(str(tmp_path / "s.db"))
    await store.run(stored_events.commit, [decision(new_id()) for _ in range(1234)])
    await asyncio.sleep(0.005)
    assert await integrity.prune(store, before=time.time()) == 1234
    assert await integrity.verify(store) == []


@pytest.mark.parametrize(
    "damage",
    [
        "update checkpoints set hash = 'x'",
        "delete from checkpoints",
        "update events set hash = 'x' where body is null",
        "delete from events where body is null",
    ],
)
async def test_damage_to_checkpoints_and_tombstones_is_found(chained, sql, damage):
    records = (await chained.run(pages.records))[::-1]
    sql(f"update events set at = 0 where id in ('{records[0].id}', '{records[1].id}', '{records[3].id}')")
    await integrity.prune(chained, before=1)
    assert await integrity.verify(chained) == []
    sql(damage)
    assert len(await integrity.verify(chained)) == 1


async def test_commits_continue_while_others_prune_and_verify(store):
    async def tidy():
        for _ in range(5):
            await integrity.prune(store, before=time.time())
            assert await integrity.verify(store) == []

    await asyncio.gather(tidy(), tidy(), *(decide(store, 20) for _ in range(8)))
    assert await integrity.verify(store) == []


async def test_verification_reads_a_snapshot_even_while_everything_is_pruned(store):
    begun, pruned = threading.Event(), threading.Event()

    def slowly(session):
        before = session.rows("select seq from events")
        begun.set()
        assert pruned.wait(60)
        return integrity.chain_faults(session), before == session.rows("select seq from events")

    await store.run(stored_events.commit, [decision() for _ in range(700)])
    check = asyncio.ensure_future(store.execute("scan", slowly))
    await asyncio.to_thread(begun.wait)
    assert await integrity.prune(store, before=time.time() + 1) == 700
    pruned.set()
    assert await check == ([], True)


async def test_gateways_that_sign_at_the_same_time_do_not_wait_for_each_other(postgres):
    keys = [b"a key of this test, of 32 bytes."]
    stores = [await open_store(postgres, keys=keys, connections=6) for _ in range(3)]
    for _ in range(8):
        await asyncio.gather(*(store.run(stored_events.commit, [decision()]) for store in stores * 12))
        await asyncio.gather(*(integrity.seal(store, everything=k % 2 == 0) for k, store in enumerate(stores * 4)))
    faults = await integrity.verify(stores[0])
    for store in stores:
        await store.close()
    assert faults == []
