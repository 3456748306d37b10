"""Counting votes in both databases: what a panel, its leads, skips and deadlines come to, by the loop that gateways run."""

import asyncio

import pytest

from conformal_arbitrage.gateway import review_queue
from conformal_arbitrage.gateway.review_queue import ReviewQueue, VoteCounter, WaitingPlaces
from conformal_arbitrage.live.config import TeamConfig
from conformal_arbitrage.store import claims, events, pages, reviews
from tests.store.facts import decision
from tests.store.test_reviews import asked, item, put, take, vote

MEMBERS, LEADS = ("ann", "bob", "cid"), ("lea",)


class Loop:
    """A store, and what a gateway does to its queue four times a second."""

    def __init__(self, store, sql):
        self.store, self.sql, self.completed = store, sql, []
        self.restart()

    def restart(self, members=MEMBERS, leads=LEADS):
        """Go on as a gateway with these people on the team."""
        queue = ReviewQueue(
            self.store, {"team": TeamConfig(members=members, leads=leads)}, b"secret", WaitingPlaces(10)
        )
        self._counter = VoteCounter(self.store, queue, self._complete)

    async def _complete(self, request):
        self.completed.append(request.name)
        if request.name == "lost":
            await asyncio.Event().wait()

    async def turn(self):
        await self._counter.turn()
        await asyncio.sleep(0)

    async def ask(self, **options):
        """Put an audit into the queue; return the id of its decision."""
        event = decision()
        await self.store.run(events.commit, [event])
        await put(self.store, item(event.id, **options))
        return event.id

    async def cast(self, **choices):
        for name, choice in choices.items():
            await vote(self.store, name, choice)
            await self.turn()

    async def skip(self, name, **options):
        held = await take(self.store, name, **options)
        assert await self.store.run(reviews.skip, held.token, name)
        await self.turn()

    async def audit(self, id):
        return (await self.store.run(pages.record, id)).audit

    def states(self):
        """State and level of every item, and whether its question is gone."""
        rows = self.sql("select state, level, payload is null from reviews order by created, id")
        return [(state, level, bool(gone)) for state, level, gone in rows]


@pytest.fixture
def loop(where, opened, sql):
    return Loop(opened(where), sql)


async def test_a_panel_of_three_ends_with_the_second_vote_that_agrees(loop):
    id = await loop.ask(panel=3)
    await loop.cast(ann=2)
    assert loop.states() == [("open", 0, False)]
    await loop.cast(bob=2)
    assert await take(loop.store, "cid") is None
    assert (await loop.audit(id)).scores == (0.0, 0.0, 1.0)
    assert loop.states() == [("closed", 0, True)]


async def test_a_unanimous_panel_needs_everybody_and_fails_with_the_first_two_that_differ(loop):
    agreed = await loop.ask(panel=3, rule="unanimous")
    await loop.cast(ann=1, bob=1)
    assert loop.states() == [("open", 0, False)]
    await loop.cast(cid=1)
    assert (await loop.audit(agreed)).scores == (0.0, 1.0, 0.0)
    split = await loop.ask(panel=3, rule="unanimous")
    await loop.cast(ann=1, bob=0)
    assert (await loop.audit(split)).error == "missing: no verdict"
    assert loop.states() == [("closed", 0, True), ("failed", 0, True)]


@pytest.mark.parametrize("rule", ["majority", "unanimous"])
async def test_what_a_panel_cannot_decide_a_lead_does(loop, rule):
    id = await loop.ask(panel=3, rule=rule, escalates=True)
    await loop.cast(**dict(zip(MEMBERS, range(3 if rule == "majority" else 2), strict=False)))
    assert loop.states() == [("open", 1, False)]
    assert await take(loop.store, "dan") is None
    held = await take(loop.store, "lea", leads=("team",))
    await loop.store.run(reviews.vote, held.token, "lea", 1)
    await loop.turn()
    audit = await loop.audit(id)
    assert audit.scores == (0.0, 1.0, 0.0)
    assert [vote.level for vote in audit.review.votes][-1] == 1
    assert loop.states() == [("closed", 1, True)]


@pytest.mark.parametrize("escalates", [False, True])
async def test_if_everybody_skips_a_question_goes_to_the_leads_or_has_no_verdict(loop, escalates):
    id = await loop.ask(escalates=escalates)
    for name in MEMBERS:
        assert loop.states() == [("open", 0, False)]
        await loop.skip(name)
    if escalates:
        assert loop.states() == [("open", 1, False)]
        await loop.skip("lea", leads=("team",))
    assert (await loop.audit(id)).error == "missing: nobody could tell"
    assert loop.states() == [("failed", int(escalates), True)]


@pytest.mark.parametrize("drawn", [False, True])
async def test_a_question_ends_at_its_deadline_and_goes_on_as_an_audit_if_it_was_drawn(loop, drawn):
    claim, id = await asked(loop.store, drawn=drawn)
    await loop.store.run(claims.release, claim)
    await loop.turn()
    assert loop.states() == [("open", 0, False)]
    loop.sql("update reviews set deadline = 0")
    await loop.turn()
    assert loop.completed == ["k"]
    if drawn:
        await loop.cast(ann=1)
        assert (await loop.audit(id)).scores == (0.0, 1.0, 0.0)
    assert loop.states() == [("closed" if drawn else "expired", 0, True)]


@pytest.mark.parametrize("drawn", [False, True])
def test_a_withdrawn_question_has_a_verdict_only_if_it_was_drawn(loop, drawn):
    async def story():
        _, id = await asked(loop.store, drawn=drawn)
        await loop.store.run(reviews.withdraw_request, "caller", "k")
        if not drawn:
            assert await take(loop.store, "ann") is None
            return
        await loop.cast(ann=2)
        assert (await loop.audit(id)).scores == (0.0, 0.0, 1.0)

    asyncio.run(story())
    assert loop.completed == []
    assert loop.states() == [("closed" if drawn else "withdrawn", 0, True)]


async def test_a_late_vote_is_kept_and_changes_nothing(loop):
    id = await loop.ask(panel=3)
    late = await take(loop.store, "cid")
    await loop.cast(ann=2)
    loop.sql("update reviews set needed = 3")  # a third place, as after a lease that ended
    await loop.cast(bob=2)
    assert await loop.store.run(reviews.vote, late.token, "cid", 0) == 0.0
    await loop.turn()
    audit = await loop.audit(id)
    assert (audit.scores, len(audit.review.votes)) == ((0.0, 0.0, 1.0), 2)
    assert sorted(tuple(row) for row in loop.sql("select reviewer, late from votes")) == [
        ("ann", 0), ("bob", 0), ("cid", 1),
    ]  # fmt: skip


async def test_a_panel_that_lost_the_member_it_waits_for_ends(loop):
    id = await loop.ask(panel=3)
    await loop.cast(ann=0, bob=1)
    await take(loop.store, "cid")  # who holds it, and leaves
    loop.restart(members=("ann", "bob"))
    await loop.turn()
    assert (await loop.audit(id)).error == "missing: no verdict"
    assert loop.states() == [("failed", 0, False)]  # its question outlives it while somebody holds it


async def test_a_lead_who_voted_on_the_panel_does_not_decide_what_it_could_not(loop):
    loop.restart(members=(*MEMBERS, *LEADS))
    id = await loop.ask(panel=3, rule="unanimous", escalates=True)
    await loop.cast(ann=0, lea=1)
    assert (await loop.audit(id)).error == "missing: no verdict"
    assert loop.states() == [("failed", 0, True)]


async def test_what_waits_for_a_lead_who_has_left_ends(loop):
    id = await loop.ask(panel=3, rule="unanimous", escalates=True)
    await loop.cast(ann=0, bob=1)
    assert loop.states() == [("open", 1, False)]
    loop.restart(leads=())
    await loop.turn()
    assert (await loop.audit(id)).error == "missing: nobody could tell"
    assert loop.states() == [("failed", 1, True)]


async def test_a_second_opinion_that_nobody_is_left_to_give_is_not_waited_for(loop):
    loop.restart(members=("ann", "bob"))
    id = await loop.ask(panel=3)
    await put(loop.store, item(id, purpose="overlap"))
    await loop.cast(ann=1, bob=1)
    assert loop.states() == [("closed", 0, True), ("open", 0, False)]
    loop.restart(members=("ann", "bob"))
    await loop.turn()
    assert (await loop.audit(id)).scores == (0.0, 1.0, 0.0)
    assert loop.states() == [("closed", 0, True), ("failed", 0, True)]


async def test_questions_of_a_team_that_is_gone_are_reported(loop, caplog):
    for team in ("team", "old team", "old team"):
        await loop.ask(team=team)
    await loop.turn()
    await loop.turn()
    [said] = [record.getMessage() for record in caplog.records if "not configured" in record.getMessage()]
    assert "2 open questions are for the team 'old team'" in said


async def test_a_vote_cast_before_the_deadline_counts_though_it_could_still_be_taken_back(loop):
    _, id = await asked(loop.store, undo=30.0)
    await vote(loop.store, "ann", 1)
    loop.sql("update reviews set deadline = 0")
    await loop.turn()
    assert loop.states() == [("open", 0, False)]
    loop.sql("update votes set counts = counts - 60")
    await loop.turn()
    assert (await loop.store.run(reviews.outcomes, [id]))[id].action == 1


async def test_requests_that_cannot_be_completed_do_not_keep_others_waiting(loop, monkeypatch):
    monkeypatch.setattr(review_queue, "_AT_ONCE", 1)
    for key in ("lost", "good"):  # the oldest first
        claim, _ = await asked(loop.store, key=key)
        await loop.store.run(claims.release, claim)
    loop.sql("update reviews set deadline = 0")
    for _ in range(3):
        await loop.turn()
    assert set(loop.completed) == {"lost", "good"}
