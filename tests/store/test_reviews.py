"""The review queue in both databases: leases, votes, undo, panels, deadlines, and who gets what."""

import asyncio
import os
import threading
from collections import Counter
from contextlib import suppress

import pytest

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store import claims, events, integrity, ledger, outbox, pages, reviews, sqlite
from conformal_arbitrage.store.claims import Claim, SavedResponse
from conformal_arbitrage.store.postgres import PostgresStore
from conformal_arbitrage.store.record import AuditBody, CompletionBody, DecisionBody, Event, new_id
from conformal_arbitrage.store.reviews import _FREE, NewReview, ReviewOutcome, ReviewQuestion, ReviewRequest, ReviewWork
from conformal_arbitrage.store.session import operation
from conformal_arbitrage.store.sqlite import SQLiteStore
from tests.store.facts import decision
from tests.store.test_console import steps

QUESTION = ReviewQuestion(context="Which?", options=("a", "b", "c"), places=(0, 1, 2), size=3)
RACES = int(os.environ.get("LEASE_RACES", "100"))
CLAIMERS = 12


def item(id=None, purpose="audit", **options):
    fields = {"policy": "support", "team": "team", "question": QUESTION, "protocol": "p", "identities_sha256": "i"}
    return NewReview(decision=id or new_id(), purpose=purpose, **{**fields, "undo": 0.0, **options})


PUT = operation("write")(reviews.put_items)


async def put(store, *items):
    for start in range(0, len(items), 200):
        await store.run(PUT, items[start : start + 200])
    return [one.decision for one in items]


def take(store, who="ann", teams=("team",), leads=(), **options):
    return store.run(reviews.take, who, teams=teams, leads=leads, **options)


async def vote(store, who, choice):
    held = await take(store, who)
    assert held is not None
    return held.token, await store.run(reviews.vote, held.token, who, choice)


async def due(store):
    [one] = await store.run(reviews.due)
    return one


async def test_an_item_is_given_once_and_its_holder_gets_it_again(store):
    await put(store, item(due=5.0), item(due=1.0))
    first = await take(store)
    assert first.question == QUESTION
    assert (await take(store)).token == first.token  # another tab
    other = await take(store, "bob")
    assert other.token != first.token
    assert await take(store, "cid") is None
    assert await take(store, "dan", teams=("others",)) is None


async def test_the_item_that_is_due_first_comes_first(store):
    ids = await put(store, *(item(due=float(k)) for k in (3, 1, 2)))
    for id in (ids[1], ids[2], ids[0]):
        await vote(store, "ann", 0)
        [one] = [i for i in await store.run(reviews.due) if i.decision == id]
        await store.run(reviews.end, one, "closed", outcome=ReviewOutcome(state="closed", action=0))


async def test_whoever_is_on_two_teams_takes_what_is_due_first_without_sorting_the_queue(store):
    dues = {"team": (2.0, 3.0, 5.0), "others": (1.0, 4.0)}
    items = [item(due=due, team=team) for team, times in dues.items() for due in times]
    by_id = dict(zip(await put(store, *items), items, strict=True))
    await store.run(reviews.note_reader, items[0].decision, "ann")  # whose team does not come first for that
    order = []
    while (held := await take(store, "ann", teams=("team", "others", "empty"))) is not None:
        assert await store.run(reviews.vote, held.token, "ann", 0) == 0.0
        order += [one.decision for one in await store.run(reviews.due) if one.votes and one.decision not in order]
    assert [by_id[id].due for id in order] == [1.0, 3.0, 4.0, 5.0]
    plan = await store.execute("scan", lambda session: steps(session, f"select r.id {_FREE}", ("team", 0, "ann")))
    assert "open_reviews" in " ".join(plan), plan
    assert not [step for step in plan if "TEMP B-TREE" in step or "Sort" in step], plan


async def test_a_lease_that_ends_frees_the_place_and_a_late_token_is_refused(store):
    await put(store, item())
    held = await take(store, "ann", lease=0.05)
    await asyncio.sleep(0.1)
    other = await take(store, "bob")
    await store.run(reviews.give_back, other.token, "bob")
    assert await take(store, "cid") is not None
    assert not await store.run(reviews.renew, held.token, "ann")
    assert await store.run(reviews.vote, held.token, "ann", 1) is None
    assert not await store.run(reviews.skip, held.token, "ann")


async def test_a_token_votes_after_its_lease_if_nobody_took_the_place(store):
    await put(store, item())
    held = await take(store, "ann", lease=0.05)
    await asyncio.sleep(0.1)
    assert await store.run(reviews.vote, held.token, "ann", 1) == 0.0


async def test_renewing_keeps_an_item(store, sql):
    await put(store, item(lease=600.0))
    held = await take(store, "ann")
    for _ in range(2):
        sql("update review_claims set lease = lease - 1000")  # it has ended, and nobody has taken the place yet
        assert await store.run(reviews.renew, held.token, "ann")
        assert await take(store, "bob") is None
    sql("update review_claims set since = since - 2000")
    assert not await store.run(reviews.renew, held.token, "ann")  # twenty minutes in all
    await store.run(reviews.give_back, held.token, "ann")
    assert await take(store, "bob") is not None


async def test_the_same_token_twice_is_one_vote_and_another_person_cannot_use_it(store, sql):
    await put(store, item(undo=30.0))
    held = await take(store, "ann")
    assert await store.run(reviews.vote, held.token, "bob", 0) is None
    assert await store.run(reviews.vote, held.token, "ann", 2) == 30.0
    assert 0 < await store.run(reviews.vote, held.token, "ann", 1) <= 30.0
    assert [tuple(row) for row in sql("select choice, late from votes")] == [(2, 0)]
    assert [tuple(row) for row in sql("select held, votes from reviews")] == [(0, 1)]


async def test_a_vote_can_be_undone_until_it_counts(store):
    await put(store, item(undo=30.0))
    token, counts = await vote(store, "ann", 2)
    assert counts == 30.0
    assert await store.run(reviews.due) == []
    assert (await store.run(reviews.undo, token, "bob")) is None
    assert (await store.run(reviews.undo, token, "ann")).token == token
    assert await store.run(reviews.undo, token, "ann") is None
    assert await take(store, "bob") is None
    assert await store.run(reviews.vote, token, "ann", 0) == 30.0


async def test_a_vote_that_counts_cannot_be_undone(store):
    await put(store, item())
    token, _ = await vote(store, "ann", 2)
    one = await due(store)
    assert [(v.reviewer, v.choice) for v in one.votes] == [("ann", 2)]
    assert await store.run(reviews.undo, token, "ann") is None


async def test_undoing_gives_the_next_item_back(store):
    await put(store, item(undo=30.0, due=1.0), item(due=2.0))
    token, _ = await vote(store, "ann", 1)
    following = await take(store, "ann")
    assert (await store.run(reviews.undo, token, "ann")).token == token
    assert (await take(store, "ann")).token == token
    assert await store.run(reviews.vote, following.token, "ann", 1) is None


async def test_an_end_that_is_based_on_something_older_changes_nothing(store):
    await put(store, item(panel=3))
    await vote(store, "ann", 1)
    seen = await due(store)
    await vote(store, "bob", 1)
    outcome = ReviewOutcome(state="closed", action=1)
    assert not await store.run(reviews.end, seen, "closed", outcome=outcome)
    assert not await store.run(reviews.keep_open, seen, needed=3, level=0)
    now = await due(store)
    assert [v.choice for v in now.votes] == [1, 1]
    assert await store.run(reviews.end, now, "closed", outcome=outcome)
    assert not await store.run(reviews.end, now, "closed", outcome=outcome)
    assert await store.run(reviews.due) == []


async def test_a_panel_has_so_many_places_and_a_lead_decides_after_it(store):
    await put(store, item(panel=3, escalates=True))
    await vote(store, "ann", 0)
    await vote(store, "bob", 1)
    assert await take(store, "cid") is None  # two are asked first
    assert await store.run(reviews.keep_open, await due(store), needed=3, level=0)
    assert await store.run(reviews.due) == []
    await vote(store, "cid", 2)
    assert await store.run(reviews.keep_open, await due(store), needed=1, level=1)
    assert await take(store, "dan") is None
    held = await take(store, "eve", leads=("team",))
    assert await store.run(reviews.vote, held.token, "eve", 2) == 0.0
    last = await due(store)
    assert [v.reviewer for v in last.votes] == ["eve"]
    assert [v.reviewer for v in last.earlier] == ["ann", "bob", "cid"]


async def test_a_vote_after_the_end_is_late_and_looks_the_same(store, sql):
    await put(store, item(panel=3, rule="unanimous", undo=0.0))
    late = await take(store, "cid")
    await vote(store, "ann", 0)
    await vote(store, "bob", 1)
    one = await due(store)
    assert await store.run(reviews.end, one, "failed")
    assert await store.run(reviews.renew, late.token, "cid")
    assert await store.run(reviews.vote, late.token, "cid", 1) == 0.0
    assert sorted(tuple(row) for row in sql("select reviewer, late from votes")) == [("ann", 0), ("bob", 0), ("cid", 1)]


async def test_whoever_skips_is_not_asked_again_about_the_decision(store):
    [id] = await put(store, item())
    held = await take(store, "ann")
    assert await store.run(reviews.skip, held.token, "ann")
    assert await take(store, "ann") is None
    one = await due(store)
    assert (one.decision, one.votes, one.seen) == (id, (), {"ann"})
    await put(store, item(id, "overlap"))
    assert await take(store, "ann") is None
    assert await take(store, "bob") is not None


async def test_whoever_read_the_record_cannot_vote(store):
    [id] = await put(store, item())
    assert await store.run(pages.under_review, [id, "other"]) == {id}
    held = await take(store, "ann")
    await store.run(reviews.note_reader, id, "ann")
    assert await store.run(reviews.vote, held.token, "ann", 1) is None
    assert await take(store, "ann") is None
    assert await take(store, "bob") is not None
    assert await store.run(pages.under_review, []) == frozenset()


async def asked(store, *, drawn=False, deadline=60.0, key="k", **options):
    """A request with one question for people; its claim and the decision."""
    claim = await store.run(claims.take, "caller", key, "sha", lease=30.0)
    one = item(purpose="decide", drawn=drawn, deadline=deadline, **options)
    request = ReviewRequest(key_id="caller", name=key, policy="support", route="/v1/decisions", body=b"{}")
    work = ReviewWork(items=[one], request=request, deadline=deadline)
    body = DecisionBody(pending=True, size=3, form="menu", mode="enforce")
    event = decision(one.decision, body, decided_by="guardian")
    await store.run(events.commit, [event], claim=claim, begun={0: one.decision}, reviews=work)
    return claim, one.decision


async def asked_again(store, id, *, drawn, key="k"):
    """The same request once more, by its caller or by a gateway that completes it."""
    claim = await store.run(claims.take, "caller", key, "sha", lease=30.0)
    one = item(id, "decide", drawn=drawn, deadline=60.0)
    request = ReviewRequest(key_id="caller", name=key, policy="support", route="/v1/decisions", body=b"{}")
    await store.run(events.commit, [], claim=claim, reviews=ReviewWork(items=[one], request=request, deadline=60.0))


async def test_a_request_is_complete_once_its_reply_is_kept(store, sql):
    claim, id = await asked(store)
    assert await store.run(reviews.decided_requests, limit=20) == []
    await vote(store, "ann", 1)
    await store.run(
        reviews.end, await due(store), "decided", outcome=ReviewOutcome(state="decided", action=1, team="team")
    )
    assert (await store.run(reviews.outcomes, [id]))[id].action == 1
    assert await store.run(reviews.decided_requests, limit=20) == []  # its caller is still being served
    await store.run(claims.release, claim)
    [request] = await store.run(reviews.decided_requests, limit=20)
    assert (request.name, request.body) == ("k", b"{}")
    again = await store.run(claims.take, "caller", "k", "sha", lease=30.0)
    assert again.begun == {0: id}
    reply = SavedResponse(status=200, headers={}, body=b"done")
    done = Event(id=id, body=CompletionBody(finish="stop", action=1))
    await store.run(events.commit, [done], claim=again, response=reply, reviews=ReviewWork(ended=True))
    assert await store.run(reviews.decided_requests, limit=20) == []
    request, outcome = await store.run(reviews.request_of, id)
    assert (request.body, outcome.state) == (b"", "decided")
    assert (await store.run(claims.saved_response, "caller", "k")).body == b"done"
    assert await store.run(claims.saved_response, "caller", "none") is None
    assert await store.run(reviews.request_of, "none") is None
    assert [tuple(row) for row in sql("select state, payload from reviews")] == [("closed", None)]


@pytest.mark.parametrize("drawn", [False, True])
async def test_what_was_drawn_goes_on_as_an_audit_when_its_caller_gets_something_else(store, sql, drawn):
    claim, id = await asked(store, drawn=drawn)
    reply = SavedResponse(status=200, headers={}, body=b"safe")
    await store.run(events.commit, [], claim=claim, response=reply, reviews=ReviewWork(ended=True))
    assert (await store.run(reviews.outcomes, [id]))[id].state == "expired"
    assert (await take(store) is not None) == drawn
    await put(store, item(id))  # the auditor's own attempt makes no second item
    rows = [tuple(row) for row in sql("select purpose, state, payload is null from reviews order by created")]
    assert rows[0] == (("audit", "open", False) if drawn else ("decide", "expired", True))
    assert len(rows) == (1 if drawn else 2)


@pytest.mark.parametrize("drawn", [False, True])
def test_a_caller_who_left_withdraws_the_question_and_may_come_back(store, sql, drawn):
    async def story():
        claim, id = await asked(store, drawn=drawn)
        await store.run(reviews.withdraw_request, "caller", "k")
        assert (await take(store, "zoe") is not None) == drawn
        await store.run(claims.release, claim)
        return id

    id = asyncio.run(story())
    assert [row[0] for row in sql("select state from reviews")] == ["open" if drawn else "withdrawn"]

    async def back():
        await asked_again(store, id, drawn=drawn)
        held = await take(store, "zoe")
        await store.run(reviews.vote, held.token, "zoe", 1)
        verdict = ReviewOutcome(state="decided", action=1, team="team")
        await store.run(reviews.end, await due(store), "decided", outcome=verdict)
        return (await store.run(reviews.outcomes, [id]))[id].action

    assert asyncio.run(back()) == 1
    assert [tuple(row) for row in sql("select purpose, state from reviews")] == [("decide", "decided")]


@pytest.mark.parametrize("verdict", [False, True])
async def test_a_drawn_question_is_not_asked_twice_after_its_deadline_or_its_verdict_as_an_audit(store, sql, verdict):
    claim, id = await asked(store, drawn=True, deadline=0.0)
    if verdict:  # which people gave after the caller had left for a while
        await store.run(reviews.withdraw_request, "caller", "k")
        await vote(store, "ann", 2)
        await store.run(reviews.end, await due(store), "closed", outcome=ReviewOutcome(state="closed", action=2))
    else:
        await store.run(reviews.end, await due(store), "expired")
    await store.run(claims.release, claim)
    await asked_again(store, id, drawn=True)  # as whoever completes the request does
    outcome = (await store.run(reviews.outcomes, [id]))[id]
    assert (outcome.state, outcome.action) == (("closed", 2) if verdict else ("expired", None))
    rows = [tuple(row) for row in sql("select purpose, state from reviews")]
    assert rows == [("decide", "closed") if verdict else ("audit", "open")]


async def test_a_deadline_ends_a_question(store):
    claim, id = await asked(store, deadline=0.05)
    await store.run(claims.release, claim)
    await asyncio.sleep(0.1)
    one = await due(store)
    assert one.overdue
    assert await store.run(reviews.end, one, "expired")
    assert (await store.run(reviews.outcomes, [id]))[id].state == "expired"
    assert len(await store.run(reviews.decided_requests, limit=20)) == 1


def test_what_was_begun_outlives_a_long_deadline(store, sql):
    asyncio.run(asked(store, deadline=20 * 86400.0))
    [(days,)] = sql("select (expires - (select created from reviews)) / 86400 from begun")
    assert days == pytest.approx(21, abs=0.01)


async def test_an_erased_or_pruned_decision_leaves_no_question(store, sql):
    _, id = await asked(store)
    assert await integrity.prune(store, before=4e9) == 0  # people have yet to judge it
    assert await integrity.erase(store, id)
    assert await take(store) is None
    assert [tuple(row) for row in sql("select payload, state from reviews")] == [(None, "withdrawn")]
    assert [tuple(row) for row in sql("select body from review_requests")] == [(None,)]


def test_a_question_that_somebody_still_holds_is_swept_later(store, sql):
    async def story():
        claim, _ = await asked(store)
        await take(store)
        reply = SavedResponse(status=200, headers={}, body=b"safe")
        await store.run(events.commit, [], claim=claim, response=reply, reviews=ReviewWork(ended=True))
        await integrity.sweep(store)

    asyncio.run(story())
    assert sql("select payload is null from reviews")[0][0] in (False, 0)
    sql("update reviews set closed = closed - 2000")
    asyncio.run(integrity.sweep(store))
    assert sql("select payload is null from reviews")[0][0] in (True, 1)


async def test_figures_come_from_votes_skips_and_second_opinions(store):
    [id, other] = await put(store, item(), item(purpose="decide"))
    await put(store, item(id, "overlap", menu="m"))
    await put(store, item("lonely", team="night"))
    ends = {"ann": 0, "bob": 1, "cid": 1}
    for who, choice in ends.items():
        held = await take(store, who)
        await store.run(reviews.vote, held.token, who, choice)
        for one in await store.run(reviews.due):
            await store.run(reviews.end, one, "closed", outcome=ReviewOutcome(state="closed", action=1, size=3))
    [(team, opinion)] = await store.run(reviews.second_opinions)
    assert (team, opinion.size, opinion.menu) == ("team", 3, "m")
    assert opinion.first[0] != opinion.second[0]
    day, night = await store.run(reviews.backlogs, {"team": ("ann", "bob", "zoe"), "night": ("zoe",)})
    assert (day.open, day.votes_last_hour, day.present) == (0, 3, ("ann", "bob"))
    assert (night.open, night.votes_needed, night.oldest, night.present) == (1, 1, None, ())
    assert {vote.reviewer for vote in await store.run(reviews.cast_votes)} == set(ends)
    assert await store.run(reviews.present, ["ann", "zoe"]) == {"ann"}
    assert other


async def test_a_second_opinion_waits_until_the_panel_needs_nobody(store):
    [id] = await put(store, item(panel=3))
    await put(store, item(id, "overlap"))
    for who, choice in (("ann", 0), ("bob", 1)):
        await vote(store, who, choice)
    assert await take(store, "cid") is None
    await store.run(reviews.keep_open, await due(store), needed=3, level=0)
    await vote(store, "cid", 1)
    assert await take(store, "dan") is None
    await store.run(reviews.end, await due(store), "closed", outcome=ReviewOutcome(state="closed", action=1))
    assert await take(store, "ann") is None
    assert await take(store, "dan") is not None


async def test_webhooks_are_told_in_the_deciding_transaction_and_not_too_often(where):
    kind = PostgresStore if where.startswith("postgres") else SQLiteStore
    store = kind(where, webhooks={"pager": ("review.waiting", "review.decided", "review.expired")})

    async def story():
        claim, id = await asked(store)
        await vote(store, "ann", 1)
        await store.run(reviews.end, await due(store), "decided", outcome=ReviewOutcome(state="decided", action=1))
        reply = SavedResponse(status=200, headers={}, body=b"done")
        lost = Claim("caller", "k", "someone else")
        with pytest.raises(Exception, match="no longer held"):
            await store.run(events.commit, [], claim=lost, response=reply, reviews=ReviewWork(ended=True))
        assert await store.run(outbox.take_deliveries, "pager", limit=9, lease=30.0) == []
        await store.run(events.commit, [], claim=claim, response=reply, reviews=ReviewWork(ended=True))
        [told] = await store.run(outbox.take_deliveries, "pager", limit=9, lease=30.0)
        assert told.event == "review.decided"
        assert f'"id":"{id}"' in told.body
        assert "done" not in told.body
        assert [await store.run(reviews.call, "team") for _ in range(3)] == [True, False, False]
        assert await store.run(reviews.call, "team", every=0.0)

    try:
        await story()
    finally:
        await store.close()


async def review_all(store):
    """Twelve people at once, until nothing is left; then end what they decided."""

    async def work(who):
        while (held := await take(store, who)) is not None:
            await store.run(reviews.vote, held.token, who, 1)

    await asyncio.gather(*(work(f"r{k}") for k in range(CLAIMERS)))
    ended = 0
    while items := await store.run(reviews.due):
        for one in items:
            event = Event(id=one.decision, body=AuditBody(scores=(0.0, 1.0, 0.0)))
            outcome = ReviewOutcome(state="closed", action=1)
            ended += await store.run(reviews.end, one, "closed", outcome=outcome, events=[event])
    return ended


def test_a_thousand_reviews_verify_and_one_changed_verdict_is_found(where, store, sql):
    count = min(RACES, 1000) if where.startswith("postgres") else 1000

    async def story():
        await put(store, *(item() for _ in range(count)))
        assert await review_all(store) == count
        assert await integrity.verify(store) == []

    asyncio.run(story())
    assert sql("select count(*) from votes") == sql("select count(*) from events where kind = 'audit'") == [(count,)]
    middle = f"(select id from events where kind = 'audit' order by id limit 1 offset {count // 2})"
    sql(f"update events set body = replace(body, '0.0,1.0,0.0', '1.0,0.0,0.0') where id = {middle}")
    assert len(asyncio.run(integrity.verify(store))) == 1


def race(where, take_one, items, claimers=CLAIMERS):
    """Claimers in threads of their own, each with a store, until nothing is left: who got what."""
    got: list[tuple[str, str]] = []
    faults: list[BaseException] = []
    barrier = threading.Barrier(claimers)

    def claimer(number):
        async def run():
            store = (
                PostgresStore(where, connections=1, readers=1) if where.startswith("postgres") else SQLiteStore(where)
            )
            try:
                await asyncio.to_thread(barrier.wait)
                empty = 0
                while empty < 3:
                    held = await take_one(store, f"r{number}")
                    empty = 0 if held else empty + 1
                    if held:
                        got.append((held.token, f"r{number}"))
                        await store.run(reviews.vote, held.token, f"r{number}", 0)
            finally:
                await store.close()

        try:
            asyncio.run(run())
        except BaseException as error:
            faults.append(error)
            raise

    threads = [threading.Thread(target=claimer, args=(k,)) for k in range(claimers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert len(got) >= items
    return got


@pytest.mark.parametrize("claimers", [2, CLAIMERS])
def test_claimers_never_share_a_place(where, opened, sql, claimers, monkeypatch):
    monkeypatch.setattr(sqlite, "_BUSY_TIMEOUT", 60.0)  # twelve writers in turn, however busy the machine
    store = opened(where)
    count = RACES if where.startswith("postgres") and claimers == CLAIMERS else min(RACES, 60)
    asyncio.run(put(store, *(item(lease=600.0) for _ in range(count))))
    race(where, lambda store, who: take(store, who), count, claimers)
    votes = Counter(row[0] for row in sql("select item from votes"))
    assert set(votes.values()) == {1}
    assert len(votes) == count
    assert sql("select count(*) from reviews where held <> 0 or votes <> 1") == [(0,)]


def counting_take(session, reviewer):
    """How not to do it: the places are counted in another table, so that locking the item proves nothing."""
    import secrets

    from conformal_arbitrage.store import reviews

    rows = session.rows(
        "select id from reviews r where r.state = 'open' and "
        "(select count(*) from review_claims c where c.item = r.id) + "
        "(select count(*) from votes v where v.item = r.id) < r.needed "
        f"order by r.due, r.id limit 1{session.dialect.skip_locked}"
    )
    if not rows:
        return None
    now, token = session.now(), secrets.token_hex(16)
    reviews._hold(session, rows[0][0], reviewer, token, now, now, None)
    return reviews._shown_again(session, rows[0][0], token)


def test_counting_places_in_another_table_fails_the_same_test(postgres, opened):
    """The broken twin: the race above must be able to catch it."""
    store = opened(postgres)
    asyncio.run(put(store, *(item(lease=600.0) for _ in range(RACES))))

    async def take_one(store, who):
        return await store.execute("write", lambda session: counting_take(session, who))

    race(postgres, take_one, RACES)

    async def doubles():
        return await store.execute(
            "scan", lambda session: session.rows("select item from votes group by item having count(*) > 1")
        )

    assert asyncio.run(doubles())


async def test_names_are_values_whatever_they_hold(store):
    """Some queries are sent with their values in the text."""
    odd = ["it's", "a\\' or 1 = 1 --", "'; delete from reviews; --", "100 %s %(x)s %% ? {}", "$1 \\", "naïve 𝛼\n"]
    await put(store, *(item(name) for name in odd), item("plain"))
    for name in odd:
        assert await store.run(pages.under_review, [name, "other"]) == {name}
        assert await store.run(ledger.ledgers, name) == []
        held = await take(store, name)
        assert await store.run(reviews.held_question, held.token, name) == QUESTION
        assert await store.run(reviews.held_question, held.token, "other") is None
        assert await store.run(reviews.held_question, name, name) is None
    for name in ("a\0b", "\ud800"):  # which a database may have no text for
        with suppress(StoreError):
            assert await store.run(pages.under_review, [name]) == frozenset()
    assert await store.run(pages.under_review, [*odd, "plain"]) == {*odd, "plain"}


async def test_items_of_a_batch_are_put_once_withdrawn_and_put_again(store):
    items = [item(f"batch-{k}", "label", identities_sha256="batch", due=float(k)) for k in range(3)]
    other = item("other-0", "label", identities_sha256="other", due=9.0)
    for _ in range(2):
        await store.run(reviews.put_labelling, [*items, other])
    await vote(store, "ann", 2)
    done = await due(store)
    assert done.decision == "batch-0"
    verdict = ReviewOutcome(state="closed", action=2, size=3)
    assert await store.run(reviews.end, done, "closed", outcome=verdict)
    await store.run(reviews.put_labelling, [], withdrawn=["batch-0", "batch-1", "other-1"])
    known = await store.run(reviews.labelling, "batch")
    assert {id: outcome.state for id, outcome in known.items()} == {
        "batch-0": "closed", "batch-1": "withdrawn", "batch-2": "open"
    }  # fmt: skip
    assert known["batch-0"] == verdict
    await store.run(reviews.put_labelling, items)
    again = await store.run(reviews.labelling, "batch")
    assert (again["batch-0"], again["batch-1"].state) == (verdict, "open")
    assert await integrity.verify(store) == []
