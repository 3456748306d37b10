"""Answers that people grade, in both databases: found in the record once, put into the queue once, graded or withdrawn."""

import asyncio
import logging

from msgspec.structs import replace

from conformal_arbitrage.monitoring.votes import GRADE_PAIRS
from conformal_arbitrage.store import events as stored_events
from conformal_arbitrage.store import integrity, pages, reviews
from conformal_arbitrage.store.record import AuditBody, DecisionBody, Event, FeedbackBody, Grades, new_id
from conformal_arbitrage.store.reviews import NewReview, ReviewOutcome, ReviewQuestion
from tests.store.test_reviews import due, take

POLICY = "support"
GRADER = {"kind": "human", "page": "grade 1"}
PAIR = ReviewQuestion(
    context="user: How?", options=("theirs", "mine"), places=(0, 3, 6, 1, 4, 7, 2, 5, 8), size=9, instructions="",
    grader=GRADER,
)  # fmt: skip


def decision(id=None, policy=POLICY):
    return Event(id=id or new_id(), policy=policy, decided_by="primary", body=DecisionBody(form="text", size=2))


def pair(id, **options):
    fields = {
        "team": "team",
        "protocol": "p",
        "identities_sha256": "i",
        "question": PAIR,
        "rule": "median",
        "undo": 0.0,
    }
    return NewReview(decision=id, policy=POLICY, **{"purpose": "grade", **fields, **options})


async def put(store, *items, news=None, events=(), graded=()):
    news = news or await store.run(reviews.grading_news, POLICY)
    return await store.run(reviews.put_grading, POLICY, news, items=items, events=events, graded=graded)


def ids(news):
    return [record.id for record in news.records]


async def test_news_are_the_decisions_of_a_policy_and_come_once(store):
    first, second, other = decision(), decision(), decision(policy="menus")
    await store.run(stored_events.commit, [first, other])
    news = await store.run(reviews.grading_news, POLICY)
    assert ids(news) == [first.id]
    assert ids(await store.run(reviews.grading_news, POLICY)) == [first.id]  # until they were dealt with
    assert await put(store, pair(first.id), news=news)
    assert (await store.run(reviews.grading_news, POLICY)).read == {}
    await store.run(stored_events.commit, [second])
    await store.run(stored_events.commit, [Event(id=first.id, body=AuditBody(answer="theirs"))])
    news = await store.run(reviews.grading_news, POLICY)
    assert set(ids(news)) == {first.id, second.id}
    assert next(record for record in news.records if record.id == first.id).audit.answer == "theirs"


async def test_news_come_in_parts_and_none_is_left_out(store):
    events = [decision() for _ in range(7)]
    for event in events:
        await store.run(stored_events.commit, [event])
    seen = []
    while (news := await store.run(reviews.grading_news, POLICY, limit=3)).read:
        seen += ids(news)
        assert await put(store, news=news)
    assert sorted(seen) == sorted(event.id for event in events)


async def test_of_two_gateways_with_the_same_news_one_deals_with_it(where, opened, sql):
    here, there = opened(where), opened(where)
    event = decision()
    await here.run(stored_events.commit, [event])
    news = [await here.run(reviews.grading_news, POLICY), await there.run(reviews.grading_news, POLICY)]
    known = [Event(id=event.id, body=FeedbackBody(grades=Grades(1.0, 1.0), by="identical"))]
    dealt = await asyncio.gather(
        *(put(one, news=each, events=known) for one, each in zip((here, there), news, strict=True))
    )
    assert sorted(dealt) == [False, True]
    [record] = (await here.run(reviews.grading_news, POLICY)).records
    assert [one.by for one in record.feedback] == ["identical"]
    assert await integrity.verify(here) == []


async def test_grades_are_stored_by_whose_answer_it_is_not_by_what_was_shown_first(store):
    id = new_id()
    await put(store, pair(id))
    held = await take(store)
    assert (held.question, held.question.kind) == (PAIR, "grade")
    shown = GRADE_PAIRS.index((1.0, 0.5))  # the answer shown first, the Guardian's, is right
    assert await store.run(reviews.vote, held.token, "ann", shown) == 0.0
    item = await due(store)
    assert GRADE_PAIRS[item.votes[0].choice] == (0.5, 1.0)
    assert (item.purpose, item.rule, item.question.grader) == ("grade", "median", GRADER)


async def test_answers_are_kept_as_they_are(store):
    odd = replace(PAIR, options=("a\0b \ud800", "\u202e{{ x }}"))
    await put(store, pair(new_id(), question=odd))
    assert (await take(store)).question == odd


async def test_a_decision_that_gets_grades_otherwise_is_withdrawn_and_a_late_grader_is_not_told(store, sql):
    id, other = new_id(), new_id()
    await put(store, pair(id), pair(id, purpose="overlap"), pair(other, due=5.0))
    held = await take(store)
    assert await put(store, graded=[id])
    assert await store.run(reviews.vote, held.token, "ann", 0) == 0.0
    assert await store.run(pages.under_review, [id, other]) == {other}
    states = {(row[0], row[1]) for row in sql("select purpose, state from reviews")}
    assert states == {("grade", "withdrawn"), ("overlap", "withdrawn"), ("grade", "open")}
    assert [tuple(row) for row in sql("select late from votes")] == [(1,)]


async def test_a_second_opinion_outlives_the_grades_it_is_compared_with(store, sql):
    id = new_id()
    await put(store, pair(id), pair(id, purpose="overlap"))
    held = await take(store)
    await store.run(reviews.vote, held.token, "ann", 8)
    body = FeedbackBody(grades=Grades(1.0, 1.0), by="review")
    outcome = ReviewOutcome(state="closed", action=8, size=9)
    assert await store.run(reviews.end, await due(store), "closed", outcome=outcome, events=[Event(id=id, body=body)])
    assert await put(store, graded=[id])
    second = await take(store, "bob")
    await store.run(reviews.vote, second.token, "bob", 7)
    assert await store.run(reviews.end, await due(store), "closed", outcome=outcome)
    [(_, opinion)] = await store.run(reviews.second_opinions)
    assert (opinion.first, opinion.second, opinion.size) == (("ann", 8), ("bob", 5), 9)
    assert {row[0] for row in sql("select payload from reviews")} == {None}


async def test_a_damaged_decision_does_not_keep_the_others_from_being_graded(store, sql, caplog):
    bad, good = decision(), decision()
    await store.run(stored_events.commit, [bad])
    await store.run(stored_events.commit, [good])
    sql(f"update events set body = '{{}}x' where id = '{bad.id}'")
    with caplog.at_level(logging.ERROR):
        assert ids(await store.run(reviews.grading_news, POLICY)) == [good.id]
    assert "cannot be graded" in caplog.text
