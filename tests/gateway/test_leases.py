"""Claims, commits and policies while the database is slow or away for a moment."""

import asyncio

import pytest

from conformal_arbitrage.errors import LostClaimError, RequestError, StoreError
from conformal_arbitrage.gateway import idempotency as answering
from conformal_arbitrage.gateway.idempotency import Answering, Asked
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.policy_table import PolicyTable
from conformal_arbitrage.gateway.server import pairs_of
from conformal_arbitrage.live.build import Models
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.store import Claim, Replay, SQLiteStore, shared
from tests.gateway.durability import all_records, certificate, write_config
from tests.store.facts import decision, later

ASKED = Asked(caller="k", policy="support", body=b"{}", name="n")
REPLY = Replay(status=200, headers={}, body=b"{}")


@pytest.fixture
def store(tmp_path):
    made = SQLiteStore(tmp_path / "store.db")
    yield made
    asyncio.run(made.close())


def slowed(commit):
    """A commit that takes its time, and the event that it has begun."""
    begun = asyncio.Event()

    async def slow(events, **rest):
        begun.set()
        await asyncio.sleep(0.2)
        await commit(events, **rest)

    return slow, begun


def test_a_claim_is_kept_though_the_database_was_away_when_it_was_to_be_renewed(store, monkeypatch):
    monkeypatch.setattr(answering, "LEASE", 0.6)
    renew, failures = store.renew, [StoreError("away")]

    async def renewing(claim, *, lease):
        if failures:
            raise failures.pop()
        return await renew(claim, lease=lease)

    monkeypatch.setattr(store, "renew", renewing)
    answers, works = Answering(store, Metrics()), []

    async def work(turn):
        works.append(turn)
        await asyncio.sleep(1.2)
        await turn.commit([], reply=REPLY)
        return REPLY

    async def story():
        return await asyncio.gather(*(answers.answer(ASKED, work, asyncio.sleep(60)) for _ in range(3)))

    found = asyncio.run(story())
    assert failures == []
    assert len(works) == 1
    assert sorted(one.again for one in found) == [False, True, True]


def test_a_refresh_that_comes_back_late_does_not_undo_a_newer_policy(tmp_path, store, monkeypatch):
    config = read_config(write_config(tmp_path, str(tmp_path / "store.db")))
    slow = asyncio.Event()
    policies = store.policies

    async def story():
        async with Models(config) as models:
            table = PolicyTable(config, store, pairs_of(models))
            await table.load()
            await store.install("support", certificate(0.2).to_dict(), by="test")

            async def late():
                found = await policies()
                monkeypatch.setattr(store, "policies", policies)
                await slow.wait()
                return found

            monkeypatch.setattr(store, "policies", late)
            first = asyncio.create_task(table.refresh(await store.change_count()))
            await asyncio.sleep(0.1)
            newest = certificate(0.3)
            await table.install("support", newest.to_dict(), by="test", dry_run=False)
            slow.set()
            await first
            return table.named("support"), newest

    live, newest = asyncio.run(story())
    assert live.version == 3
    assert live.certificate.relaxation == newest.relaxation


def test_a_refresh_that_comes_back_late_does_not_undo_that_a_newer_version_is_unusable(tmp_path, store, monkeypatch):
    config = read_config(write_config(tmp_path, str(tmp_path / "store.db")))
    slow = asyncio.Event()
    policies = store.policies

    async def late():
        found = await policies()
        monkeypatch.setattr(store, "policies", policies)
        await slow.wait()
        return found

    async def story():
        async with Models(config) as models:
            table = PolicyTable(config, store, pairs_of(models))
            await table.load()
            usable = certificate(0.2).to_dict()
            await store.install("support", usable, by="test")
            monkeypatch.setattr(store, "policies", late)
            first = asyncio.create_task(table.refresh(await store.change_count()))
            await asyncio.sleep(0.1)
            await store.install("support", {**usable, "guarantee": "another sentence"}, by="another gateway")
            await table.refresh(await store.change_count())
            slow.set()
            await first
            table.named("support")

    with pytest.raises(RequestError, match="out of service"):
        asyncio.run(story())


def test_a_caller_who_leaves_while_the_decision_is_being_committed_leaves_one_decision(store, monkeypatch):
    slow, begun = slowed(store.commit)
    monkeypatch.setattr(store, "commit", slow)
    answers = Answering(store, Metrics())
    event = decision()

    async def work(turn):
        await turn.commit([event], reply=REPLY)
        return REPLY

    async def story():
        left = await answers.answer(ASKED, work, begun.wait())
        again = await answers.answer(ASKED, work, asyncio.sleep(60))
        return left, again, await all_records(store)

    left, again, records = asyncio.run(story())
    assert left.reply == again.reply == REPLY
    assert again.again
    assert [record.id for record in records] == [event.id]


@pytest.mark.parametrize("moment", range(8))
def test_a_caller_who_leaves_while_the_key_is_being_claimed_does_not_hold_it(store, moment):
    answers = Answering(store, Metrics())

    async def gone():
        for _ in range(moment):
            await asyncio.sleep(0)

    async def work(turn):
        await asyncio.sleep(60)

    async def story():
        assert await answers.answer(ASKED, work, gone()) is None
        return await store.claim("k", "n", "any body", lease=1)

    assert isinstance(asyncio.run(story()), Claim)


def test_a_claim_is_not_taken_where_what_has_expired_cannot_be_removed(store, monkeypatch):
    def failing(session):
        raise StoreError("away")

    store._swept = float("-inf")
    monkeypatch.setattr(shared.work, "sweep", failing)
    with pytest.raises(StoreError):
        asyncio.run(store.claim("k", "n", "b", lease=6))
    assert isinstance(asyncio.run(store.claim("k", "n", "b", lease=6)), Claim)


def test_a_caller_who_leaves_while_a_commit_finds_the_claim_lost_is_not_worked_for_again(store, monkeypatch):
    slow, begun = slowed(store.commit)
    works = []

    async def work(turn):
        works.append(turn)
        await store.release(turn.claim)
        monkeypatch.setattr(store, "commit", slow)
        await turn.commit([decision()], reply=REPLY)
        return REPLY

    async def story():
        left = await Answering(store, Metrics()).answer(ASKED, work, begun.wait())
        return left, await all_records(store)

    left, records = asyncio.run(story())
    assert left is None
    assert len(works) == 1
    assert [record.decided_by for record in records] == ["cancelled"]


def test_a_request_that_is_stopped_during_a_commit_is_not_taken_for_one_whose_caller_left(store, monkeypatch):
    slow, begun = slowed(store.commit)

    async def work(turn):
        await turn.commit([decision()], reply=REPLY)
        return REPLY

    async def story():
        monkeypatch.setattr(store, "commit", slow)
        answering = asyncio.create_task(Answering(store, Metrics()).answer(ASKED, work, begun.wait()))
        await begun.wait()
        await asyncio.sleep(0.05)
        answering.cancel()
        await asyncio.wait({answering})
        return answering.cancelled(), await all_records(store)

    stopped, records = asyncio.run(story())
    assert stopped
    assert records == []


def test_an_answer_that_was_begun_is_not_begun_again_when_its_claim_is_lost(store):
    works = []

    async def work(turn):
        works.append(turn)
        event = decision()
        await turn.commit([event])
        turn.begun = event.id
        await store.release(turn.claim)
        await turn.commit([later("completion", event.id)], reply=REPLY)
        return REPLY

    with pytest.raises(LostClaimError):
        asyncio.run(asyncio.wait_for(Answering(store, Metrics()).answer(ASKED, work, asyncio.sleep(60)), 2))
    assert len(works) == 1
