import asyncio
import math
import time

import numpy as np
import pytest

from conformal_arbitrage.store import events, integrity, ledger, outbox, pages, policies
from conformal_arbitrage.store import ledger as stored_ledger
from conformal_arbitrage.store.ledger import LedgerKey, NewRow, Settlement
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.postgres import PostgresStore
from conformal_arbitrage.store.record import (
    AlarmBody,
    AuditBody,
    CompletionBody,
    FeedbackBody,
    LiftBody,
    MenuQuestion,
    new_id,
)
from conformal_arbitrage.store.sqlite import SQLiteStore
from tests.store.facts import decision, later

KEY = LedgerKey(policy="support", version=1, identities_sha256="models")
QUESTION = MenuQuestion(context="Which?", actions=("a", "b"))
DAY = 86400.0
COUNT = 36


def new_row(loss=None, key=KEY, slot=None, drawn=1000.0):
    return NewRow(key=key, drawn=drawn, due=drawn + DAY, loss=loss, slot=slot)


async def draw(store, loss=None, *, key=KEY, slot=None, id=None):
    id = id or new_id()
    row, models = new_row(loss, key, slot), key.identities_sha256
    ask = loss is None
    audit = Audit(id=id, policy=key.policy, question=QUESTION, ask=ask, identities_sha256=models, row=row)
    await store.run(events.commit, [decision(id)], audits=[audit])
    return id


async def settle(store, **known):
    news = await store.run(stored_ledger.news, ["support"])
    await store.run(
        stored_ledger.settle, [Settlement(id=one.id, news=one.news, at=2000.0, **known.get(one.id, {})) for one in news]
    )
    return [one.id for one in news]


def alarm(version=1, lifts=0, **rest):
    facts = {"cause": "losses", "audits": 90, "known": 90, "missing": 0, "line": 0.07, "log_evidence": 4.0}
    return AlarmBody(version=version, lifts=lifts, identities_sha256="models", **{**facts, **rest})


async def test_rows_are_numbered_in_the_order_of_the_draw_and_only_open_ones_are_asked(store):
    first, second, third = await draw(store), await draw(store, 0.0), await draw(store)
    rows = await store.run(stored_ledger.changes, KEY, 0)
    assert [(row.seq, row.id, row.loss, row.known_order) for row in rows] == [
        (1, first, None, None), (2, second, 0.0, 1), (3, third, None, None),
    ]  # fmt: skip
    assert [audit.id for audit in await store.run(outbox.take_audits, limit=9, lease=60)] == [first, third]
    [ledger] = await store.run(stored_ledger.ledgers, "support")
    assert (ledger.key, ledger.rows, ledger.known) == (KEY, 3, 1)
    assert await store.run(stored_ledger.ledgers, "other") == []


async def test_an_audit_a_grade_or_a_stated_end_is_news_and_a_settled_row_keeps_its_first_loss(store):
    one, two, three = await draw(store), await draw(store), await draw(store, 0.0)
    await store.run(events.commit, [later(two, AuditBody(scores=(0.1, 0.9)))])
    await store.run(events.commit, [later(one, FeedbackBody(label=0))])
    await store.run(events.commit, [later(three, CompletionBody(finish="failed"))], news=[three])
    cursor = (await store.run(stored_ledger.changes, KEY, 0))[-1].change
    assert await settle(store, **{two: {"loss": 0.5}, three: {"delivered": False}}) == sorted([one, two, three])
    assert await store.run(stored_ledger.news, ["support"]) == []
    changed = {row.id: row for row in await store.run(stored_ledger.changes, KEY, cursor)}
    assert set(changed) == {two, three}
    assert (changed[two].loss, changed[two].known_order, changed[two].known_at) == (0.5, 2, 2000.0)
    assert (changed[three].loss, changed[three].served, changed[three].delivered) == (0.0, None, False)
    assert (await store.run(stored_ledger.read, KEY)).delivered.tolist() == [True, True, False]
    await store.run(events.commit, [later(two, FeedbackBody(label=1))])
    await settle(store, **{two: {"loss": 1.0}})
    assert (await store.run(stored_ledger.read, KEY)).loss[1] == 0.5


async def test_an_outcome_that_can_no_longer_be_known_is_due_at_once_and_may_still_become_known(store):
    id = await draw(store)
    await store.run(events.commit, [later(id, AuditBody(error="ReplyError"))])
    await settle(store, **{id: {"failed": True}})
    [row] = await store.run(stored_ledger.changes, KEY, 0)
    assert (row.due, row.loss) == (2000.0, None)
    await store.run(events.commit, [later(id, FeedbackBody(label=0))])
    await settle(store, **{id: {"loss": 0.0}})
    [row] = await store.run(stored_ledger.changes, KEY, row.change)
    assert (row.due, row.loss, row.known_order) == (2000.0, 0.0, 1)


async def test_news_that_come_while_a_row_is_being_settled_are_not_lost(store):
    id = await draw(store)
    await store.run(events.commit, [later(id, AuditBody(scores=(0.1, 0.9)))])
    [seen] = await store.run(stored_ledger.news, ["support"])
    await store.run(events.commit, [later(id, FeedbackBody(label=1))])
    await store.run(stored_ledger.settle, [Settlement(id=id, news=seen.news, at=2000.0)])
    [left] = await store.run(stored_ledger.news, ["support"])
    assert left.news == 1


async def test_a_session_counts_once_in_an_hour_and_a_decision_once_at_all(store):
    first = await draw(store, 0.0, slot="caller 1")
    await draw(store, 0.0, slot="caller 1")
    other = await draw(store, 0.0, slot="caller 2")
    plain = [await draw(store, 0.0), await draw(store, 0.0)]
    audit = Audit(id=first, policy="support", question=QUESTION, ask=False, row=new_row(1.0))
    await store.run(events.commit, [], audits=[audit])
    rows = await store.run(stored_ledger.changes, KEY, 0)
    assert [row.id for row in rows] == [first, other, *plain]
    assert [row.seq for row in rows] == [1, 2, 3, 4]
    [ledger] = await store.run(stored_ledger.ledgers)
    assert ledger.collapsed == (await store.run(stored_ledger.read, KEY)).collapsed == 1


async def test_a_commit_that_fails_leaves_no_gap(store):
    from conformal_arbitrage.errors import StoreError

    id = await draw(store)
    with pytest.raises(StoreError):
        await store.run(
            events.commit,
            [decision(id)],
            audits=[Audit(id=new_id(), policy="support", question=QUESTION, ask=False, row=new_row())],
        )
    await draw(store)
    assert [row.seq for row in await store.run(stored_ledger.changes, KEY, 0)] == [1, 2]


async def test_each_version_set_of_models_lift_and_group_has_a_ledger_of_its_own(store):
    keys = [
        KEY,
        LedgerKey(policy="support", version=2, identities_sha256="models"),
        LedgerKey(policy="support", version=1, identities_sha256="others"),
        LedgerKey(policy="support", version=1, lifts=1, identities_sha256="models"),
        LedgerKey(policy="support", version=1, identities_sha256="models", group="law"),
        LedgerKey(policy="triage", version=1, identities_sha256="models"),
    ]
    for key in keys:
        for _ in range(2):
            await draw(store, 0.0, key=key)
    assert {(ledger.key, ledger.rows) for ledger in await store.run(stored_ledger.ledgers)} == {
        (key, 2) for key in keys
    }
    for key in keys:
        assert len(await store.run(stored_ledger.read, key)) == 2


async def test_a_whole_ledger_is_what_its_changes_say(store):
    ids = [await draw(store, 0.0 if k % 3 == 0 else None) for k in range(20)]
    for id in reversed(ids[::2]):
        await store.run(events.commit, [later(id, AuditBody(scores=(0.1, 0.9)))])
        await settle(store, **{id: {"loss": 0.25}})
    whole = await store.run(stored_ledger.read, KEY)
    rows = sorted(await store.run(stored_ledger.changes, KEY, 0), key=lambda row: row.seq)
    assert len(whole) == len(rows) == 20
    losses = np.array([math.nan if row.loss is None else row.loss for row in rows])
    np.testing.assert_array_equal(whole.loss, losses)
    np.testing.assert_array_equal(whole.due, [row.due for row in rows])
    np.testing.assert_array_equal(whole.known_order, [row.known_order or 0 for row in rows])
    assert whole.change == max(row.change for row in rows)
    in_order = sorted((row for row in rows if row.known_order), key=lambda row: row.known_order)
    np.testing.assert_array_equal(whole.in_known_order(), [row.loss for row in in_order])
    assert sorted(whole.known_order[whole.known_order > 0]) == list(range(1, len(in_order) + 1))
    empty = await store.run(stored_ledger.read, LedgerKey(policy="none", version=1, identities_sha256="models"))
    assert (len(empty), empty.change) == (0, 0)


async def test_the_parts_of_a_ledger_are_the_whole_even_where_a_row_was_removed(store, sql, monkeypatch):
    monkeypatch.setattr(ledger, "_ROWS_AT_ONCE", 3)
    for k in range(20):
        await draw(store, 0.05 * k if k % 3 == 0 else None)
    whole = await store.run(stored_ledger.read, KEY)
    parts = [await store.run(stored_ledger.read, KEY, after=after, limit=7) for after in range(0, 28, 7)]
    assert [len(part) for part in parts] == [7, 7, 6, 0]
    for name in ("drawn", "due", "loss", "served", "delivered", "known_order", "known_at"):
        both = np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name)
        np.testing.assert_array_equal(*both, err_msg=name)
    sql("delete from ledger where seq = 10")
    assert len(await store.run(stored_ledger.read, KEY)) == 19
    assert [len(await store.run(stored_ledger.read, KEY, after=after, limit=7)) for after in range(0, 28, 7)] == [
        7,
        6,
        6,
        0,
    ]


async def test_two_gateways_write_one_ledger_without_gaps_and_a_cursor_misses_nothing(where, opened):
    stores = [opened(where), opened(where)]
    seen, cursor = {}, 0

    async def follow():
        nonlocal cursor
        for row in await stores[1].run(stored_ledger.changes, KEY, cursor):
            seen[row.id], cursor = row, max(cursor, row.change)

    async def write(k):
        id = await draw(stores[k % 2], 0.0 if k % 2 else None)
        await stores[k % 2].run(events.commit, [later(id, AuditBody(scores=(0.1, 0.9)))])
        return id

    async def settle_all(store):
        news = await store.run(stored_ledger.news, ["support"])
        await store.run(stored_ledger.settle, [Settlement(id=n.id, news=n.news, at=2000.0, loss=1.0) for n in news])

    ids = []
    for first in range(0, COUNT, 6):
        ids += await asyncio.gather(*(write(first + k) for k in range(6)))
        await asyncio.gather(*map(settle_all, stores), follow())
    await follow()
    assert sorted(row.seq for row in seen.values()) == list(range(1, COUNT + 1))
    assert set(seen) == set(ids)
    assert sorted(row.known_order for row in seen.values()) == list(range(1, COUNT + 1))
    whole = await stores[1].run(stored_ledger.read, KEY)
    np.testing.assert_array_equal(whole.loss, [row.loss for row in sorted(seen.values(), key=lambda row: row.seq)])


async def test_pruning_and_erasing_leave_the_ledger_alone(store):
    ids = [await draw(store, 0.0) for _ in range(5)]
    await integrity.erase(store, ids[0])
    before = await store.run(stored_ledger.read, KEY)
    assert await integrity.prune(store, before=1e12) == 5
    after = await store.run(stored_ledger.read, KEY)
    np.testing.assert_array_equal(before.loss, after.loss)
    assert before.change == after.change


async def test_pruning_spares_what_a_grade_can_still_settle(store):
    late, awaited = await draw(store), new_id()
    row = NewRow(key=KEY, drawn=1000.0, due=time.time() + DAY, loss=None, slot=None)
    audit = Audit(id=awaited, policy="support", question=QUESTION, ask=True, identities_sha256="models", row=row)
    await store.run(events.commit, [decision(awaited)], audits=[audit])
    await store.run(events.commit, [later(id, AuditBody(scores=(0.1, 0.9))) for id in (late, awaited)])
    assert await integrity.prune(store, before=1e12) == 1
    assert await store.run(pages.record, late) is None
    assert await store.run(pages.record, awaited) is not None


async def test_an_alarm_is_one_event_whoever_raises_it_and_every_gateway_hears_of_it(where, opened):
    stores = [opened(where), opened(where)]
    await stores[0].run(policies.install, "support", {"a": 1}, by="test")
    count = await stores[1].change_count()
    raised = await asyncio.gather(*(stores[k % 2].run(policies.raise_alarm, "support", alarm()) for k in range(8)))
    assert sorted(raised) == [False] * 7 + [True]
    assert await stores[1].change_count() > count
    [version] = await stores[1].run(policies.active)
    assert version.alarm is not None
    assert version.alarm.cause == "losses"
    [notice] = await stores[1].run(policies.notices, "support")
    assert isinstance(notice.body, AlarmBody)
    assert await integrity.verify(stores[0]) == []


async def test_a_lift_takes_the_alarm_away_and_begins_a_new_count_but_the_certificate_stays_marked(store):
    await store.run(policies.install, "support", {"a": 1}, by="test")
    assert await store.run(policies.lift, "support", reason="none", by="me") is None
    assert await store.run(policies.raise_alarm, "support", alarm())
    lifted = await store.run(policies.lift, "support", reason="a bad deployment, now undone", by="me")
    assert isinstance(lifted, LiftBody)
    [version] = await store.run(policies.active)
    assert (version.alarm, version.lifts) == (None, 1)
    assert version.alarmed is not None
    assert not await store.run(policies.raise_alarm, "support", alarm())  # about the ledger before the lift
    assert await store.run(policies.raise_alarm, "support", alarm(lifts=1))
    [version] = await store.run(policies.active)
    assert version.alarm is not None
    assert version.alarm.lifts == 1
    kinds = [notice.body.kind for notice in await store.run(policies.notices)]
    assert kinds == ["alarm", "lift", "alarm"]


async def test_installing_another_certificate_lifts_the_alarm_and_the_same_one_stays_marked(store):
    await store.run(policies.install, "support", {"a": 1}, by="test")
    assert await store.run(policies.raise_alarm, "support", alarm())
    await store.run(policies.install, "support", {"a": 2}, by="test")
    [version] = await store.run(policies.active)
    assert (version.version, version.alarm, version.alarmed, version.lifts) == (2, None, None, 0)
    assert not await store.run(policies.raise_alarm, "support", alarm(version=1))  # no longer in force
    await store.run(policies.rollback, "support", by="test")
    [version] = await store.run(policies.active)
    assert (version.version, version.alarm) == (3, None)
    assert version.alarmed is not None
    assert version.alarmed.version == 1
    again = await store.run(policies.install, "support", {"a": 1}, by="test")
    assert again.version == 4
    [version] = await store.run(policies.active)
    assert version.alarmed is not None


async def test_an_alarm_speaks_against_certificates_whose_rows_are_older_and_no_others(store):
    past, future = "2020-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00"

    def document(log, created, *, models="small", since=None):
        ancestry = None if since is None else {"since": since}
        made = {"created": created, "identities": {"primary": models}}
        return {"evidence": {"log_sha256": log}, "provenance": made, "ancestry": ancestry}

    await store.run(policies.install, "support", document("first", past), by="test")
    await store.run(policies.install, "support", document("second", past), by="test")
    assert await store.run(policies.raise_alarm, "support", alarm(version=2))
    before, red = sorted(await store.run(policies.history, "support"), key=lambda one: one.version)
    assert before.alarmed is None  # it was in force before, and its own promise stands
    assert red.alarmed is not None
    for certificate, against in (
        (document("second", future), True),
        (document("third", past), True),
        (document("third", past, models="large"), False),
        (document("third", past, since=9e12), False),
        (document("third", past, since=1.0), True),
        (document("third", future), False),
    ):
        version = await store.run(policies.install, "support", certificate, by="test")
        assert (version.alarmed is not None) == against, certificate
        [stored] = await store.run(policies.active)
        assert stored == version
    back = await store.run(policies.rollback, "support", by="test")
    assert back.alarmed is not None
    assert back.alarmed.version == 2


async def test_alarms_and_lifts_survive_pruning_and_their_removal_shows(where, sql):
    keys = [b"k" * 32]  # an alarm may be the last event of its chain, whose removal only a signed head shows
    store = PostgresStore(where, keys=keys) if where.startswith("postgres") else SQLiteStore(where, keys=keys)
    await store.run(policies.install, "support", {"a": 1}, by="test")
    await draw(store)
    await store.run(policies.raise_alarm, "support", alarm())
    await store.run(policies.lift, "support", reason="undone", by="me")
    await draw(store)
    await integrity.prune(store, before=1e12)
    assert [notice.body.kind for notice in await store.run(policies.notices)] == ["alarm", "lift"]
    await integrity.seal(store, everything=True)
    assert await integrity.verify(store) == []
    sql("delete from events where kind = 'alarm'")
    assert await integrity.verify(store) != []
    await store.close()


async def test_audits_are_handed_out_to_gateways_with_the_same_models_only(store):
    mine, other = (
        await draw(store),
        await draw(store, key=LedgerKey(policy="support", version=1, identities_sha256="new")),
    )
    taken = await store.run(outbox.take_audits, limit=9, lease=60, policies={"support": "models"})
    assert {audit.id: audit.identities_sha256 for audit in taken} == {mine: "models"}
    assert await store.run(outbox.take_audits, limit=9, lease=60, policies={"triage": "new"}) == []
    [late] = await store.run(outbox.take_audits, limit=9, lease=60, policies={"support": "models"}, overdue=0.0)
    assert late.id == other


async def test_gains_are_kept_and_a_gain_as_served_is_not_taken_for_no_delivery(store):
    gain, lost, gone = await draw(store), await draw(store), await draw(store)
    for id in (gain, lost, gone):
        await store.run(events.commit, [later(id, FeedbackBody(label=0))])
    await settle(store, **{gain: {"loss": -1.0}, lost: {"loss": 0.0, "served": -1.0}, gone: {"delivered": False}})
    rows = await store.run(stored_ledger.changes, KEY, 0)
    assert sorted((row.seq, row.loss, row.served, row.delivered) for row in rows) == [
        (1, -1.0, None, True), (2, 0.0, -1.0, True), (3, None, None, False),
    ]  # fmt: skip
    whole = await store.run(stored_ledger.read, KEY)
    assert whole.delivered.tolist() == [True, True, False]
    assert whole.served_otherwise.tolist() == [False, True, True]
    cursor = max(row.change for row in rows)
    await store.run(events.commit, [later(gone, FeedbackBody(label=0))])
    await settle(store, **{gone: {"loss": 0.5}})  # it was delivered after all, by another attempt
    [row] = await store.run(stored_ledger.changes, KEY, cursor)
    assert (row.loss, row.served, row.delivered) == (0.5, None, True)
