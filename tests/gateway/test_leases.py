"""Claims, commits and policies while the database is slow or briefly unreachable."""

import asyncio
from hashlib import sha256
from types import SimpleNamespace

import pytest

from conformal_arbitrage.errors import LostClaimError, RequestError, StoreError
from conformal_arbitrage.gateway import requests
from conformal_arbitrage.gateway.decider import Outcome
from conformal_arbitrage.gateway.metrics import Metrics
from conformal_arbitrage.gateway.policies import PolicyTable, pairs_of
from conformal_arbitrage.gateway.requests import Idempotency, ParsedRequest, Replied
from conformal_arbitrage.gateway.review_queue import WaitingPlaces
from conformal_arbitrage.live.build import Models
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.store import claims, events, policies
from conformal_arbitrage.store import events as stored_events
from conformal_arbitrage.store.claims import Claim, SavedResponse
from conformal_arbitrage.store.record import CompletionBody
from conformal_arbitrage.store.sqlite import SQLiteStore
from tests.gateway.durability import OURS, all_records, certificate, write_config
from tests.store.facts import decision, later

REPLY = SavedResponse(status=200, headers={}, body=b"{}")


REQUEST = ParsedRequest(
    route="", content=b"{}", caller_id="k", key="n", policy=SimpleNamespace(name="support"), questions=(), render=None
)


def leaving(until_gone):
    """A connection whose caller disconnects when something has happened."""

    async def receive():
        await until_gone()
        return {"type": "http.disconnect"}

    return receive


async def stays():
    await asyncio.sleep(60)


async def answer(store, work, until_gone=stays):
    """Answer a request under an idempotency key, as a route does; the reply."""

    async def attempted(attempt):
        await work(attempt)
        return Replied(REPLY)

    return await Idempotency(store, Metrics(), WaitingPlaces(10)).reply(REQUEST, attempted, leaving(until_gone))


@pytest.fixture
def store(tmp_path):
    opened = SQLiteStore(tmp_path / "store.db")
    yield opened
    asyncio.run(opened.close())


def slowed(run):
    """A store's `run` whose commits take their time, and the event that one has begun."""
    begun = asyncio.Event()

    async def slow(operation, *arguments, **options):
        if operation is events.commit:
            begun.set()
            await asyncio.sleep(0.2)
        return await run(operation, *arguments, **options)

    return slow, begun


async def test_a_claim_survives_a_failed_renewal(store, monkeypatch):
    monkeypatch.setattr(requests, "LEASE", 0.6)
    run, failures = store.run, [StoreError("unreachable")]

    async def renewing(operation, *arguments, **options):
        if operation is claims.renew and failures:
            raise failures.pop()
        return await run(operation, *arguments, **options)

    monkeypatch.setattr(store, "run", renewing)
    works = []

    async def work(attempt):
        works.append(attempt)
        await asyncio.sleep(1.2)
        await attempt.commit([], reply=Replied(REPLY))

    replies = await asyncio.gather(*(answer(store, work) for _ in range(3)))
    assert failures == []
    assert len(works) == 1
    assert sorted(reply.replayed for reply in replies) == [False, True, True]
    assert [reply.response for reply in replies] == [REPLY] * 3


async def test_a_refresh_that_comes_back_late_does_not_undo_a_newer_policy(tmp_path, store, monkeypatch):
    config = read_config(write_config(tmp_path, str(tmp_path / "store.db")))
    reached, slow = asyncio.Event(), asyncio.Event()
    run = store.run
    async with Models(config) as models:
        table = PolicyTable(config, store, pairs_of(models), OURS)
        await table.load()
        await store.run(policies.install, "support", certificate(0.2).to_dict(), by="test")

        async def late(operation, *arguments, **options):
            result = await run(operation, *arguments, **options)
            if operation is policies.active:
                monkeypatch.setattr(store, "run", run)
                reached.set()
                await slow.wait()
            return result

        monkeypatch.setattr(store, "run", late)
        first = asyncio.create_task(table.refresh(await store.change_count()))
        await asyncio.wait_for(reached.wait(), 30)
        newest = certificate(0.3)
        await table.install("support", newest.to_dict(), by="test", dry_run=False)
        slow.set()
        await first
        live = table.named("support")
    assert live.version == 3
    assert live.certificate.relaxation == newest.relaxation


def test_a_refresh_that_comes_back_late_does_not_undo_that_a_newer_version_is_unusable(tmp_path, store, monkeypatch):
    config = read_config(write_config(tmp_path, str(tmp_path / "store.db")))
    reached, slow = asyncio.Event(), asyncio.Event()
    run = store.run

    async def late(operation, *arguments, **options):
        result = await run(operation, *arguments, **options)
        if operation is policies.active:
            monkeypatch.setattr(store, "run", run)
            reached.set()
            await slow.wait()
        return result

    async def story():
        async with Models(config) as models:
            table = PolicyTable(config, store, pairs_of(models), OURS)
            await table.load()
            usable = certificate(0.2).to_dict()
            await store.run(policies.install, "support", usable, by="test")
            monkeypatch.setattr(store, "run", late)
            first = asyncio.create_task(table.refresh(await store.change_count()))
            await asyncio.wait_for(reached.wait(), 30)
            await store.run(
                policies.install, "support", {**usable, "guarantee": "another sentence"}, by="another gateway"
            )
            await table.refresh(await store.change_count())
            slow.set()
            await first
            table.named("support")

    with pytest.raises(RequestError, match="out of service"):
        asyncio.run(story())


async def test_a_caller_who_leaves_while_the_decision_is_being_committed_leaves_one_decision(store, monkeypatch):
    slow, begun = slowed(store.run)
    monkeypatch.setattr(store, "run", slow)
    event = decision()

    async def work(attempt):
        await attempt.commit([event], reply=Replied(REPLY))

    left = await answer(store, work, begun.wait)
    again = await answer(store, work)
    records = await all_records(store)
    assert left.response == again.response == REPLY
    assert again.replayed
    assert [record.id for record in records] == [event.id]


@pytest.mark.parametrize("moment", range(8))
async def test_a_caller_who_leaves_while_the_key_is_being_claimed_does_not_hold_it(store, moment):
    async def gone():
        for _ in range(moment):
            await asyncio.sleep(0)

    async def work(attempt):
        await asyncio.sleep(60)

    with pytest.raises(RequestError, match="disconnected"):
        await answer(store, work, gone)
    assert isinstance((await store.run(claims.take, "k", "n", "any body", lease=1)), Claim)


async def test_a_caller_who_leaves_while_a_commit_finds_the_claim_lost_is_not_served_again(store, monkeypatch):
    slow, begun = slowed(store.run)
    works = []

    async def work(attempt):
        works.append(attempt)
        await store.run(claims.release, attempt.claim)
        monkeypatch.setattr(store, "run", slow)
        await attempt.commit([decision()], reply=Replied(REPLY))

    with pytest.raises(RequestError, match="disconnected"):
        await answer(store, work, begun.wait)
    records = await all_records(store)
    assert len(works) == 1
    assert [record.decided_by for record in records] == ["cancelled"]


async def test_a_request_that_is_stopped_during_a_commit_is_not_taken_for_one_whose_caller_left(store, monkeypatch):
    slow, begun = slowed(store.run)

    async def work(attempt):
        await attempt.commit([decision()], reply=Replied(REPLY))

    monkeypatch.setattr(store, "run", slow)
    answering = asyncio.create_task(answer(store, work, begun.wait))
    await begun.wait()
    await asyncio.sleep(0.05)
    answering.cancel()
    await asyncio.wait({answering})
    stopped, records = answering.cancelled(), await all_records(store)
    assert stopped
    assert records == []


def test_an_answer_that_was_opened_is_not_started_over_when_its_claim_is_lost(store):
    works = []

    async def work(attempt):
        works.append(attempt)
        event = decision()
        attempt.note(0, Outcome(decision=None, event=event, audit=None, awaits_guardian=True), recorded=False)
        await attempt.open(event, None)
        await store.run(claims.release, attempt.claim)
        await attempt.commit([later(event.id, CompletionBody(finish="stop"))], reply=Replied(REPLY))

    with pytest.raises(LostClaimError):
        asyncio.run(asyncio.wait_for(answer(store, work), 2))
    assert len(works) == 1


def test_a_claim_that_another_gateway_took_over_ends_with_its_response(store):
    other = SavedResponse(status=200, headers={"x": "other"}, body=b"{}")

    async def work(attempt):
        await store.run(claims.release, attempt.claim)
        claim = await store.run(claims.take, "k", "n", sha256(b"{}").hexdigest(), lease=6)
        await store.run(stored_events.commit, [decision()], claim=claim, response=other)
        await attempt.commit([decision()], reply=Replied(REPLY))

    reply = asyncio.run(answer(store, work))
    assert (reply.response, reply.replayed) == (other, True)


def test_a_claim_that_another_gateway_took_over_and_gave_up_asks_the_caller_to_retry(store):
    async def work(attempt):
        await store.run(claims.release, attempt.claim)
        await attempt.commit([decision()], reply=Replied(REPLY))

    with pytest.raises(RequestError, match="in progress") as caught:
        asyncio.run(answer(store, work))
    assert (caught.value.status, caught.value.headers["x-should-retry"]) == (409, "true")
    assert isinstance(asyncio.run(store.run(claims.take, "k", "n", "any body", lease=1)), Claim)
