import asyncio
import json

import pytest

from conformal_arbitrage.store import integrity, outbox, policies
from conformal_arbitrage.store.outbox import KEPT_SECONDS
from conformal_arbitrage.store.postgres import PostgresStore
from conformal_arbitrage.store.sqlite import SQLiteStore
from tests.store.test_ledger import alarm

WEBHOOKS = {"alerts": ("certificate.installed", "certificate.rolled_back"), "audit": ("certificate.rolled_back",)}
KEYS = (b"k" * 32,)


@pytest.fixture
def told(where):
    """A function that opens stores which know of webhooks; they are closed after the test."""
    stores = []

    def open_one(webhooks=WEBHOOKS, keys=KEYS):
        kind = PostgresStore if where.startswith("postgres") else SQLiteStore
        stores.append(kind(where, keys=keys, webhooks=webhooks))
        return stores[-1]

    yield open_one
    for store in stores:
        asyncio.run(store.close())


async def take(store, endpoint="alerts", limit=10, lease=30.0):
    return await store.run(outbox.take_deliveries, endpoint, limit=limit, lease=lease)


async def test_an_event_is_queued_for_those_who_subscribe_with_one_id(told):
    store = told()
    await store.run(policies.install, "support", {"promise": {"alpha": 0.1}, "relaxation": 0.4}, by="ann")
    await store.run(policies.install, "support", {"promise": {"alpha": 0.2}}, by="bob")
    assert await store.run(policies.rollback, "support", by="ann") is not None
    assert [(d.event, d.attempts) for d in await take(store)] == [
        ("certificate.installed", 1), ("certificate.installed", 1), ("certificate.rolled_back", 1),
    ]  # fmt: skip
    [one] = await take(store, "audit")
    listed = await store.run(outbox.deliveries)
    assert [d.id for d in listed if d.event == "certificate.rolled_back"] == [one.id, one.id]
    document = json.loads(one.body)
    assert document.pop("created_at") == int(one.created)
    assert document == {
        "id": one.id, "object": "event", "type": "certificate.rolled_back",
        "data": {"policy": "support", "version": 3, "origin": 1, "installed_by": "ann", "alpha": 0.1},
    }  # fmt: skip
    assert one.id.startswith("evt_")


async def test_an_alarm_is_announced_once_and_so_is_its_lift(told):
    events = ("alarm.raised", "alarm.lifted")
    first, second = told({"alerts": events}), told({"alerts": events})
    await first.run(policies.install, "support", {}, by="ann")
    raised = await asyncio.gather(
        *(store.run(policies.raise_alarm, "support", alarm(mean=0.2)) for store in (first, second) * 3)
    )
    assert sum(raised) == 1
    assert not await first.run(policies.raise_alarm, "sales", alarm())
    assert await second.run(policies.lift, "support", reason="a test", by="k1") is not None
    assert await second.run(policies.lift, "support", reason="again", by="k1") is None
    raised, lifted = await take(first)
    assert [raised.event, lifted.event] == [*events]
    assert json.loads(raised.body)["data"] == {
        "policy": "support", "version": 1, "lifts": 0, "group": None, "cause": "losses", "audits": 90, "known": 90,
        "missing": 0, "mean": 0.2, "line": 0.07, "log_evidence": 4.0,
    }  # fmt: skip
    assert json.loads(lifted.body)["data"] == {
        "policy": "support", "version": 1, "lifts": 1, "reason": "a test", "by": "k1",
    }  # fmt: skip


async def test_a_renewal_is_not_taken_for_another_certificate(told):
    store = told({"alerts": ("certificate.renewed",)})
    await store.run(policies.install, "support", {"promise": {"alpha": 0.1}}, by="ann")
    await store.run(
        policies.install,
        "support",
        {"promise": {"alpha": 0.1}, "ancestry": {"step": "scheduled", "renewal": 2}},
        by="gateway",
    )
    [one] = await take(store)
    assert json.loads(one.body)["data"] == {
        "policy": "support", "version": 2, "origin": 2, "installed_by": "gateway", "alpha": 0.1, "step": "scheduled",
        "renewal": 2,
    }  # fmt: skip


async def test_an_event_that_did_not_happen_is_not_announced(told):
    store = told()
    assert await store.run(policies.rollback, "support", by="ann") is None
    assert await store.run(outbox.deliveries) == []


async def test_without_webhooks_nothing_is_queued(told):
    store = told(webhooks=None)
    await store.run(policies.install, "support", {}, by="ann")
    assert await store.run(outbox.deliveries) == []
    assert await store.run(outbox.delivery_backlog) == []


async def test_of_two_senders_only_one_takes_a_message(told):
    first, second = told(), told()
    for _ in range(20):
        await first.run(policies.install, "support", {}, by="ann")
    takes = await asyncio.gather(*(take(store, limit=3) for store in (first, second) * 5))
    ids = [delivery.id for taken in takes for delivery in taken]
    assert len(ids) == len(set(ids))
    while rest := await take(second):
        ids += [delivery.id for delivery in rest]
    assert len(ids) == len(set(ids)) == 20


async def test_a_message_whose_sender_died_is_handed_out_again(told):
    store = told()
    await store.run(policies.install, "support", {}, by="ann")
    [first] = await take(store, lease=0.0)
    [again] = await take(store, lease=30.0)
    assert (again.id, again.body, again.attempts) == (first.id, first.body, 2)
    assert await take(store) == []


async def test_a_message_is_postponed_finished_or_given_up(told):
    store = told()
    for _ in range(3):
        await store.run(policies.install, "support", {}, by="ann")
    one, two, three = await take(store)
    await store.run(outbox.finish_delivery, one)
    await store.run(outbox.postpone_delivery, two, seconds=0.0, error="status 500")
    await store.run(outbox.finish_delivery, three, error="status 400")
    [again] = await take(store)
    assert (again.id, again.error, again.attempts) == (two.id, "status 500", 2)
    assert [(b.name, b.waiting) for b in await store.run(outbox.delivery_backlog)] == [("alerts", 1)]
    assert [(d.error, d.done is None) for d in await store.run(outbox.deliveries)] == [
        ("status 400", False), ("status 500", True), (None, False),
    ]  # fmt: skip
    await store.run(outbox.finish_delivery, two)
    await store.run(outbox.postpone_delivery, two, seconds=0.0, error="late")  # by a sender whose lease had ended
    assert await take(store) == []
    assert await store.run(outbox.delivery_backlog) == []


async def test_all_that_waits_for_a_webhook_can_be_given_up(told):
    store = told()
    for _ in range(3):
        await store.run(policies.install, "support", {}, by="ann")
    await store.run(policies.rollback, "support", by="ann")
    assert await store.run(outbox.abandon_deliveries, "alerts", error="status 410") == 4
    assert await take(store) == []
    assert len(await take(store, "audit")) == 1


async def test_a_changed_message_is_known(told, sql):
    store = told()
    await store.run(policies.install, "support", {}, by="ann")
    assert (await store.run(outbox.deliveries))[0].intact
    sql("update deliveries set body = '{}'")
    assert not (await store.run(outbox.deliveries))[0].intact
    assert not (await take(store))[0].intact


async def test_a_clock_that_was_set_back_delays_no_message_for_long(told, sql):
    store = told()
    await store.run(policies.install, "support", {}, by="ann")
    sql("update deliveries set due = due + 1000000")
    assert len(await take(store)) == 1


async def test_old_messages_are_removed_whether_delivered_or_not(told, sql):
    store = told()
    for _ in range(3):
        await store.run(policies.install, "support", {}, by="ann")
    await store.run(outbox.finish_delivery, (await take(store, limit=1))[0])
    some = "attempts = 1 or id = (select max(id) from deliveries)"
    sql(f"update deliveries set created = created - {KEPT_SECONDS + 60} where {some}")
    await integrity.sweep(store)
    assert len(await store.run(outbox.deliveries)) == 1
