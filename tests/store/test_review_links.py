"""Links to items of the review queue, in both databases: who is offered one, and what becomes of it."""

import asyncio
import json

from conformal_arbitrage.store import PostgresStore, SQLiteStore, new_id
from conformal_arbitrage.store.review_base import NewReview, ReviewQuestion

TEAM = "team"


def item(purpose="decide", **options):
    question = ReviewQuestion(context="Which?", options=("a", "b"), places=(0, 1), size=2)
    given = {"policy": "support", "team": TEAM, "question": question, "protocol": "p", "identities_sha256": "i"}
    return NewReview(decision=new_id(), purpose=purpose, undo=0.0, **{**given, **options})


def test_links_follow_the_queue_whatever_the_purpose(where):
    kind = PostgresStore if "://" in where else SQLiteStore
    store = kind(where, webhooks={"pager": ("review.link",)})

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
        assert await store.vote_by_link(ids["ann"].id, 1)
        assert not await store.vote_by_link(ids["ann"].id, 0)
        assert not await store.vote_by_link(ids["bob"].id, 0)
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
        assert not await store.vote_by_link(expired["link"], 0)
        await store.close()

    asyncio.run(story())
