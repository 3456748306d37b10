import asyncio

import pytest

from conformal_arbitrage.errors import LostClaimError
from conformal_arbitrage.store import claims as stored_claims
from conformal_arbitrage.store import events, integrity, outbox, pages
from conformal_arbitrage.store.claims import Claim, SavedResponse
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import CompletionBody, MenuQuestion, new_id
from tests.store.facts import decide, decision, later

QUESTION = MenuQuestion(context="?", actions=("a", "b"))
BODY, OTHER = "a" * 64, "b" * 64
ANSWER = SavedResponse(status=200, headers={"Content-Type": "application/json"}, body=b"\x00{}\xff")


async def test_a_claim_is_granted_once_and_then_under_way(store):
    assert isinstance(await store.run(stored_claims.take, "k1", "n", BODY, lease=60), Claim)
    assert await store.run(stored_claims.take, "k1", "n", BODY, lease=60) == "under way"
    assert await store.run(stored_claims.take, "k1", "n", OTHER, lease=60) == "other body"
    assert isinstance(await store.run(stored_claims.take, "k2", "n", OTHER, lease=60), Claim)


async def test_a_finished_claim_returns_the_saved_response(store):
    claim = await store.run(stored_claims.take, "k1", "n", BODY, lease=0.05)
    await store.run(events.commit, [decision()], claim=claim, response=ANSWER)
    await asyncio.sleep(0.1)
    assert await store.run(stored_claims.take, "k1", "n", BODY, lease=60) == ANSWER
    assert await store.run(stored_claims.take, "k1", "n", OTHER, lease=60) == "other body"
    assert not await store.run(stored_claims.renew, claim, lease=60)
    await store.run(stored_claims.release, claim)
    assert await store.run(stored_claims.take, "k1", "n", BODY, lease=60) == ANSWER


async def test_a_decided_claim_stays_under_way_until_it_is_finished(store, sql):
    claim = await store.run(stored_claims.take, "k1", "n", BODY, lease=60)
    id = new_id()
    await store.run(events.commit, [decision(id)], claim=claim)
    assert await store.run(stored_claims.take, "k1", "n", BODY, lease=60) == "under way"
    assert sql("select state from claims") == [("decided",)]
    await store.run(events.commit, [later(id, CompletionBody(finish="stop"))], claim=claim, response=ANSWER)
    assert await store.run(stored_claims.take, "k1", "n", BODY, lease=60) == ANSWER


@pytest.mark.parametrize("decided", [False, True])
async def test_a_claim_can_be_taken_over_after_its_lease_and_its_old_owner_cannot_write(store, decided):
    old = await store.run(stored_claims.take, "k1", "n", BODY, lease=0.05)
    ids = await decide(store)
    if decided:
        ids.append(new_id())
        await store.run(events.commit, [decision(ids[-1])], claim=old)
    await asyncio.sleep(0.1)
    assert await store.run(stored_claims.take, "k1", "n", OTHER, lease=60) == "other body"
    new = await store.run(stored_claims.take, "k1", "n", BODY, lease=60)
    assert isinstance(new, Claim)
    assert new.owner != old.owner
    late = new_id()
    audit = Audit(id=late, policy="support", question=QUESTION)
    for response in (None, ANSWER):
        with pytest.raises(LostClaimError):
            await store.run(events.commit, [decision(late)], claim=old, response=response, audits=[audit])
    assert await store.run(pages.record, late) is None
    assert await store.run(outbox.take_audits, limit=9, lease=1) == []
    assert not await store.run(stored_claims.renew, old, lease=60)
    await store.run(stored_claims.release, old)
    assert await store.run(stored_claims.take, "k1", "n", BODY, lease=60) == "under way"
    await store.run(events.commit, [decision()], claim=new, response=ANSWER)
    assert await integrity.verify(store) == []


async def test_a_renewed_claim_is_kept(store):
    claim = await store.run(stored_claims.take, "k1", "n", BODY, lease=0.1)
    assert await store.run(stored_claims.renew, claim, lease=60)
    await asyncio.sleep(0.15)
    assert await store.run(stored_claims.take, "k1", "n", BODY, lease=60) == "under way"


async def test_a_released_claim_is_free_for_any_body(store):
    claim = await store.run(stored_claims.take, "k1", "n", BODY, lease=60)
    await store.run(stored_claims.release, claim)
    with pytest.raises(LostClaimError):
        await store.run(events.commit, [decision()], claim=claim)
    assert isinstance(await store.run(stored_claims.take, "k1", "n", OTHER, lease=60), Claim)


async def test_a_name_expires_after_a_day_and_its_rows_are_deleted(store, sql):
    for name in ("n", "m"):
        claim = await store.run(stored_claims.take, "k1", name, BODY, lease=60)
        await store.run(events.commit, [decision()], claim=claim, response=ANSWER)
    sql("update claims set expires = expires - 86400.5")
    sql("update replays set expires = expires - 86400.5")
    await integrity.sweep(store)
    again = await store.run(stored_claims.take, "k1", "n", OTHER, lease=60)
    assert isinstance(again, Claim)
    assert sql("select name, state from claims") == [("n", "pending")]
    assert sql("select name from replays") == []


async def test_two_gateways_that_race_for_a_claim_have_one_owner(where, opened):
    stores = [opened(where), opened(where)]
    for k in range(200):
        races = [store.run(stored_claims.take, "k1", f"n{k}", BODY, lease=60) for store in (*stores, *stores)]
        claims = await asyncio.gather(*races)
        assert sorted(isinstance(claimed, Claim) for claimed in claims) == [False, False, False, True]
        assert [claimed for claimed in claims if not isinstance(claimed, Claim)] == ["under way"] * 3


async def test_two_gateways_that_race_to_take_over_a_claim_have_one_owner(where, opened):
    stores = [opened(where), opened(where)]
    for k in range(50):
        old = await stores[0].run(stored_claims.take, "k1", f"n{k}", BODY, lease=-1)
        *claims, _ = await asyncio.gather(
            *(store.run(stored_claims.take, "k1", f"n{k}", BODY, lease=60) for store in stores),
            stores[0].run(events.commit, [decision()], claim=old),
            return_exceptions=True,
        )
        assert sorted(isinstance(claimed, Claim) for claimed in claims) == [False, True]
