"""Links to items of the review queue, in both databases: who is offered one, and what becomes of it."""

import asyncio
import json

from conformal_arbitrage.store import PostgresStore, SQLiteStore, new_id
from conformal_arbitrage.store.review_base import NewReview, ReviewQuestion

TEAM = "team"


def opened(where):
    kind = PostgresStore if "://" in where else SQLiteStore
    return kind(where, webhooks={"pager": ("review.link",)})


def item(purpose="decide", **options):
    question = ReviewQuestion(context="Which?", options=("a", "b"), places=(0, 1), size=2)
    given = {"policy": "support", "team": TEAM, "question": question, "protocol": "p", "identities_sha256": "i"}
    return NewReview(decision=new_id(), purpose=purpose, **{**given, "undo": 0.0, **options})


def test_links_follow_the_queue_whatever_the_purpose(where):
    store = opened(where)

    async def offered(**options):
        people = {"members": ("ann", "bob"), "leads": ("lea",), "seconds": 3600.0}
        count = await store.offer_links(TEAM, **{**people, **options})
        return count, [json.loads(one.body)["data"] for one in await store.deliveries(limit=50)]

    async def story():
        audit, later = item("audit", due=-2.0), item("audit", due=-1.0)
        await store.put_reviews([later, audit, item("audit", due=50.0)])
        count, messages = await offered()
        assert count == 2  # leads only get what a panel could not decide
        ids = {one["reviewer"]: (await store.review_link(one["link"])) for one in messages}
        assert {name: (link.state, link.question) for name, link in ids.items()} == {
            "ann": ("open", audit.question), "bob": ("open", audit.question),
        }  # fmt: skip
        assert (await offered())[0] == 0  # one at a time
        assert await store.vote_by_link(ids["ann"].id, 1) == 0.0  # which counts at once
        assert await store.vote_by_link(ids["ann"].id, 0) is None
        assert await store.vote_by_link(ids["bob"].id, 0) is None
        assert (await store.review_link(ids["bob"].id)).state == "taken"
        assert (await offered())[0] == 0  # ann was there a moment ago
        count, messages = await offered(members=("dan",))
        [second] = [one for one in messages if one["reviewer"] == "dan"]
        link = await store.review_link(second["link"])
        assert (count, link.state, link.question) == (1, "open", later.question)
        assert await store.revoke_links("ann") == 0  # hers is used
        assert await store.revoke_links() == 2
        assert (await store.review_link(second["link"])).state == "revoked"
        assert (await offered(members=("cid",), seconds=-1.0))[0] == 1
        [expired] = [one for one in (await offered(members=("cid",)))[1] if one["reviewer"] == "cid"]
        assert (await store.review_link(expired["link"])).state == "expired"
        assert await store.vote_by_link(expired["link"], 0) is None
        await store.close()

    asyncio.run(story())


async def link_for(store, reviewer, *items, **options):
    """Put items into the queue, and return the name of the link that somebody is offered."""
    await store.put_reviews(items)
    terms = {"members": (reviewer,), "leads": (), "seconds": 3600.0, **options}
    assert await store.offer_links(TEAM, **terms) == 1
    messages = [json.loads(one.body)["data"] for one in await store.deliveries(limit=50)]
    return next(one["link"] for one in messages if one["reviewer"] == reviewer)


def test_a_vote_is_taken_back_before_it_counts_and_no_form_acts_twice(where):
    store = opened(where)

    async def story():
        slow = item("audit", due=-1.0, undo=3600.0)
        link = await link_for(store, "ann", slow)
        assert 3500 < await store.vote_by_link(link, 1) <= 3600
        state = await store.review_link(link)
        assert (state.state, state.turn, state.undo, state.question) == ("used", 0, True, None)
        assert not await store.undo_by_link(link, turn=1)
        assert await store.undo_by_link(link, turn=0)
        assert not await store.undo_by_link(link, turn=0)  # the form that took it back, sent again
        assert await store.vote_by_link(link, 1, turn=0) is None  # the form that voted, sent again
        state = await store.review_link(link)
        assert (state.state, state.turn, state.undo, state.question) == ("open", 1, False, slow.question)
        assert await store.take_review("bob", teams=(TEAM,), leads=()) is None  # the item is held for her
        assert await store.vote_by_link(link, 0, turn=1) is not None
        assert not await store.undo_by_link(link, turn=0)
        assert [(one.reviewer, one.skipped) for one in await store.cast_votes()] == [("ann", False)]
        assert await store.revoke_links("ann") == 0  # it is used,
        assert not await store.undo_by_link(link, turn=1)  # but cannot be opened again
        assert not (await store.review_link(link)).undo
        fast = await link_for(store, "cid", item("audit", due=-1.0))
        assert await store.vote_by_link(fast, 1) == 0.0
        assert not (await store.review_link(fast)).undo
        assert not await store.undo_by_link(fast)
        [counted] = [one for one in await store.due_reviews() if one.votes]
        assert [(vote.reviewer, vote.choice) for vote in counted.votes] == [("cid", 1)]
        await store.close()

    asyncio.run(story())


def test_a_link_that_ends_takes_no_vote_back(where):
    store = opened(where)

    async def story():
        link = await link_for(store, "ann", item("audit", due=-1.0, undo=3600.0))
        assert await store.vote_by_link(link, 1) is not None
        await store._write(lambda session: session.run("update review_links set expires = 1"))
        assert not (await store.review_link(link)).undo
        assert not await store.undo_by_link(link)
        assert len(await store.cast_votes()) == 1
        await store.close()

    asyncio.run(story())


def test_a_link_can_leave_the_question_to_someone_else(where):
    store = opened(where)

    async def story():
        one = item("audit", due=-1.0, undo=3600.0)
        link = await link_for(store, "ann", one)
        held = await store.take_review("bob", teams=(TEAM,), leads=())
        assert not await store.skip_by_link(link)  # somebody else has it
        assert (await store.review_link(link)).state == "taken"
        await store.give_back_review(held.token, "bob")
        assert await store.skip_by_link(link)
        state = await store.review_link(link)
        assert (state.state, state.undo) == ("skipped", False)
        assert not await store.skip_by_link(link)
        assert not await store.undo_by_link(link)
        assert await store.vote_by_link(link, 0) is None
        assert await store.take_review("ann", teams=(TEAM,), leads=()) is None  # never again
        [due] = await store.due_reviews()  # whether someone is left who could tell is looked at
        assert (due.decision, due.seen) == (one.decision, {"ann"})
        assert (await store.take_review("bob", teams=(TEAM,), leads=())).question == one.question
        assert [(cast.reviewer, cast.skipped) for cast in await store.cast_votes()] == [("ann", True)]
        await store.close()

    asyncio.run(story())


def test_of_many_forms_sent_at_once_one_acts(where):
    store = opened(where)

    async def story():
        link = await link_for(store, "ann", item("audit", due=-1.0, undo=3600.0, panel=3))
        votes = await asyncio.gather(*(store.vote_by_link(link, k % 2) for k in range(8)), store.skip_by_link(link))
        assert sum(one not in (None, False) for one in votes) == 1
        undone = await asyncio.gather(*(store.undo_by_link(link) for _ in range(8)))
        assert sum(undone) == (votes[-1] is False)
        turn = (await store.review_link(link)).turn
        again = await asyncio.gather(*(store.vote_by_link(link, k % 2, turn=turn) for k in range(8)))
        assert sum(one is not None for one in again) == (votes[-1] is False)
        assert len(await store.cast_votes()) == 1
        assert await store.verify() == []
        await store.close()

    asyncio.run(story())


def test_links_that_are_out_are_listed_and_revoked_one_by_one(where):
    store = opened(where)

    async def story():
        first, second = item("audit", due=-2.0), item(due=-1.0, team="other team", policy="refunds")
        link = await link_for(store, "ann", first, second)
        assert await store.offer_links("other team", members=("bob",), leads=(), seconds=7200.0) == 1
        sent = await store.sent_links()
        assert [(one.reviewer, one.team, one.policy) for one in sent] == [
            ("ann", TEAM, "support"), ("bob", "other team", "refunds"),
        ]  # fmt: skip
        assert sent[0].id == link
        assert sent[0].created < sent[0].expires < sent[1].expires
        assert not {first.decision, second.decision} & set(str(sent).split("'"))
        assert await store.revoke_links(id=link, policies=["refunds"]) == await store.revoke_links(policies=[]) == 0
        assert await store.revoke_links(id=link, team=TEAM) == 1
        assert [one.reviewer for one in await store.sent_links()] == ["bob"]
        assert await store.vote_by_link(link, 0) is None
        await store.close()

    asyncio.run(story())
