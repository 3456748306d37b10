"""Ways around the rules of the review queue that are closed, in both databases."""

import asyncio

import pytest

from conformal_arbitrage.store import reviews
from tests.store.test_reviews import due, item, put, take, vote


async def test_undoing_after_the_escalation_does_not_make_a_member_a_lead(store, sql):
    await put(store, item(panel=3, rule="unanimous", escalates=True, undo=30.0))
    for who, choice in (("ann", 0), ("bob", 1)):
        await vote(store, who, choice)
    sql("update votes set counts = counts - 60")
    sql("update reviews set ready = ready - 60")
    token, _ = await vote(store, "cid", 2)
    assert await store.run(reviews.keep_open, await due(store), needed=1, level=1)
    assert await store.run(reviews.undo, token, "cid") is not None
    assert [tuple(row) for row in sql("select held, votes, level from reviews")] == [(0, 0, 1)]
    assert await store.run(reviews.vote, token, "cid", 2) == 30.0  # late, which they are not told
    lead = await take(store, "eve", leads=("team",))
    assert await store.run(reviews.vote, lead.token, "eve", 1) == 30.0
    rows = sql("select reviewer, level, late from votes order by reviewer")
    assert [tuple(row) for row in rows] == [("ann", 0, 0), ("bob", 0, 0), ("cid", 0, 1), ("eve", 1, 0)]
    assert [tuple(row) for row in sql("select held, votes from reviews")] == [(0, 1)]


async def test_whoever_read_the_record_after_voting_cannot_take_the_vote_back(store):
    [id] = await put(store, item(undo=30.0))
    token, _ = await vote(store, "ann", 2)
    await store.run(reviews.note_reader, id, "ann")
    assert await store.run(reviews.undo, token, "ann") is None
    assert await take(store, "ann") is None


async def test_an_item_is_looked_at_once_somebody_has_read_its_record(store):
    """The reader may have been the last one who could tell."""
    [id] = await put(store, item())
    await store.run(reviews.note_reader, id, "ann")
    assert (await due(store)).seen == {"ann"}


async def test_a_vote_that_came_to_count_while_its_undo_waited_for_the_database_stays(postgres, opened):
    psycopg = pytest.importorskip("psycopg")
    store = opened(postgres)
    await put(store, item(undo=1.0))
    held = await take(store)
    assert await store.run(reviews.vote, held.token, "ann", 1) == 1.0
    async with await psycopg.AsyncConnection.connect(postgres) as other:
        await other.execute("select 1 from presence for update")
        undoing = asyncio.create_task(store.run(reviews.undo, held.token, "ann"))
        await asyncio.sleep(1.1)
        assert not undoing.done()
    assert await undoing is None
    assert [vote.choice for vote in (await due(store)).votes] == [1]
