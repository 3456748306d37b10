"""Conversations: which model a session belongs to, on both databases."""

from conformal_arbitrage.store import claims, integrity
from conformal_arbitrage.store.claims import Conversation
from conformal_arbitrage.store.record import new_id


async def test_a_conversation_is_settled_once_extended_by_its_own_id_and_ends(store):
    one, two = new_id(), new_id()
    first = Conversation("k", "p", "n", one, "primary", 1)
    other = Conversation("k", "p", "n", two, "guardian", 2)
    assert await store.run(claims.find_conversation, "k", "p", "n") is None
    assert await store.run(claims.settle_conversation, first, idle=60.0) == first
    assert await store.run(claims.settle_conversation, other, idle=60.0) == first
    assert await store.run(claims.find_conversation, "k", "p", "n") == first
    assert await store.run(claims.settle_conversation, first, idle=-1.0) == first
    assert await store.run(claims.find_conversation, "k", "p", "n") is None
    assert await store.run(claims.settle_conversation, other, idle=60.0) == other
    assert await store.run(claims.find_conversation, "k2", "p", "n") is None


async def test_conversations_that_are_over_are_removed(store):
    for k in range(3):
        await store.run(claims.settle_conversation, Conversation("k", "p", f"n{k}", new_id(), "primary", 1), idle=-1.0)
    await store.run(claims.settle_conversation, Conversation("k", "p", "new", new_id(), "primary", 1), idle=60.0)
    await integrity.sweep(store)
    assert (await store.execute("scan", lambda session: session.rows("select name from conversations"))) == [("new",)]
