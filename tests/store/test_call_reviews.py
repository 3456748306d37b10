"""Items about tool calls, beside others about the same decision, in both databases."""

import asyncio

from conformal_arbitrage.store import new_id
from conformal_arbitrage.store.review_base import NewReview, ProposedCall, ReviewOutcome, ReviewQuestion

CALL = ProposedCall(name="refund", arguments="{}", held=True, place=0)
QUESTION = ReviewQuestion(context="Which?", options=("a", "b", "c"), places=(0, 1, 2), size=3)
ABOUT_CALL = ReviewQuestion(
    context="Which?", options=("Approve", "Edit", "Reject"), places=(0, 1, 2), size=3, calls=(CALL,), answer={"x": 1}
)


def item(decision, purpose, **options):
    given = {"policy": "support", "team": "team", "question": QUESTION, "protocol": "p", "identities_sha256": "i"}
    return NewReview(decision=decision, purpose=purpose, **{**given, "undo": 0.0, **options})


async def vote(store, who, choice, **options):
    held = await store.take_review(who, teams=("team",), leads=())
    assert await store.vote_review(held.token, who, choice, **options) is not None
    return held


async def end(store, purpose, state):
    [one] = [each for each in await store.due_reviews() if each.purpose == purpose]
    verdict = one.votes[-1].choice if one.votes else None
    outcome = None if verdict is None else ReviewOutcome(state=state, action=verdict, size=3)
    assert await store.end_review(one, state, outcome=outcome)


def test_a_verdict_on_calls_is_no_opinion_on_the_question(store):
    async def story():
        id = new_id()
        about = item(id, "call", question=ABOUT_CALL, due=0.0)
        await store.put_reviews([about, item(id, "audit", due=1.0), item(id, "overlap", due=2.0)])
        await vote(store, "ann", 2)
        await end(store, "call", "decided")
        assert (await store.review_outcomes([id]))[id].action == 2
        await vote(store, "bob", 1)
        await end(store, "audit", "closed")
        assert await store.take_review("ann", teams=("team",), leads=()) is None  # she knows the answer
        await vote(store, "cid", 1)
        await end(store, "overlap", "closed")
        [(_, opinion)] = await store.second_opinions()
        assert (opinion.first, opinion.second) == (("bob", 1), ("cid", 1))

    asyncio.run(story())


def test_calls_that_nobody_approves_end_no_other_item(store):
    async def story():
        id = new_id()
        about = item(id, "call", question=ABOUT_CALL, deadline=-1.0)
        await store.put_reviews([about, item(id, "audit"), item(id, "overlap")])
        await end(store, "call", "expired")
        assert (await store.held_answer(id)).outcome.state == "expired"
        assert await store.open_places() == 2

    asyncio.run(story())


def test_an_edit_is_kept_with_its_vote_until_it_is_undone(store):
    async def story():
        id = new_id()
        await store.put_reviews([item(id, "call", question=ABOUT_CALL, undo=60.0)])
        held = await vote(store, "ann", 1, edit='{"0": "{}"}')
        assert (await store.held_answer(id)).edit == '{"0": "{}"}'
        assert (await store.undo_review(held.token, "ann")).question == ABOUT_CALL
        assert (await store.held_answer(id)).edit is None
        assert await store.vote_review(held.token, "ann", 0) is not None
        found = await store.held_answer(id)
        assert (found.edit, found.outcome.state, found.question) == (None, "open", ABOUT_CALL)

    asyncio.run(story())
