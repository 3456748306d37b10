"""Calibration rows: which decisions leave one, what is in it, and that they outlive records, crashes and other gateways."""

import asyncio
import time

import pytest
from msgspec.structs import replace

from conformal_arbitrage.errors import DamagedError
from conformal_arbitrage.store import events as stored_events
from conformal_arbitrage.store import integrity, pages, policies
from conformal_arbitrage.store.events import CalibrationRow
from conformal_arbitrage.store.postgres import PostgresStore
from conformal_arbitrage.store.record import AuditBody, CompletionBody, FeedbackBody, Grades, id_at, new_id, time_of
from conformal_arbitrage.store.sqlite import SQLiteStore
from conformal_arbitrage.types import Leg, Spent
from tests.store.facts import BODY, LEG, decision, later

MODELS = "m" * 64
KEYS = [b"k" * 32]


def body(**changed):
    return replace(BODY, **{"identities_sha256": MODELS, "mode": "shadow", **changed})


def guardian(*scores):
    return Leg(role="guardian", scores=scores, spent=Spent(calls=1), seconds=0.1, served="g")


async def rows_of(store, policy="support", **options):
    await stored_events.gather_rows(store)
    return await store.run(
        stored_events.calibration_rows, policy, identities_sha256=MODELS, **{"since": 0.0, **options}
    )


def run(work):
    return asyncio.run(work)


def test_rows_are_those_chosen_independently_of_their_scores(store):
    async def fill():
        fit = [body(), body(mode="enforce", audited=True), body(mode="safe")]
        unfit = [body(mode="enforce"), body(overridden=True), body(mode="enforce", audited=True, overridden=True)]
        ids = []
        for one in [*fit, *unfit, body(identities_sha256="o" * 64)]:
            ids.append(new_id())
            await store.run(stored_events.commit, [decision(ids[-1], body=one)])
        await store.run(stored_events.commit, [decision(body=body(), policy="other")])
        return ids[: len(fit)], await rows_of(store)

    ids, rows = run(fill())
    assert [row.id for row in rows] == ids
    assert rows[0] == CalibrationRow(id=ids[0], size=2, primary=LEG.scores)


def test_what_becomes_known_later_is_filled_in_and_only_the_first_counts(store):
    async def fill():
        audited, graded, waiting = new_id(), new_id(), new_id()
        text = body(
            form="text", legs=(Leg(role="primary", scores=(0.7,), spent=Spent(calls=1), seconds=0.1, served="m"),)
        )
        await store.run(stored_events.commit, [decision(audited, body=body(mode="enforce", audited=True))])
        await store.run(stored_events.commit, [decision(graded, body=text)])
        await store.run(stored_events.commit, [decision(waiting, body=body(pending=True), decided_by="guardian")])
        before = await rows_of(store)
        await store.run(
            stored_events.commit,
            [later(audited, AuditBody(scores=(0.2, 0.8))), later(audited, AuditBody(scores=(0.9, 0.1)))],
        )
        await store.run(stored_events.commit, [later(graded, FeedbackBody(grades=Grades(primary=0.25, guardian=0.5)))])
        await store.run(
            stored_events.commit,
            [later(graded, FeedbackBody(grades=Grades(primary=1.0, guardian=0.5), label=1, reason="x"))],
        )
        await store.run(
            stored_events.commit, [later(waiting, CompletionBody(finish="stop", leg=guardian(0.4, 0.6), action=1))]
        )
        return before, await rows_of(store)

    before, after = run(fill())
    assert [row.guardian for row in before] == [None, None, None]
    assert [row.guardian for row in after] == [(0.2, 0.8), None, (0.4, 0.6)]
    assert (after[1].primary, after[1].grades, after[1].label) == ((0.7,), Grades(primary=0.25, guardian=0.5), 1)


def test_a_callers_own_label_does_not_count(store):
    async def fill():
        id = new_id()
        await store.run(stored_events.commit, [decision(id, body=body())])
        await store.run(stored_events.commit, [later(id, FeedbackBody(label=0, by="mine", from_caller=True))])
        before = await rows_of(store)
        await store.run(stored_events.commit, [later(id, FeedbackBody(label=1, by="theirs"))])
        return before[0].label, (await rows_of(store))[0].label

    assert run(fill()) == (None, 1)


def test_an_audit_by_other_models_says_nothing_of_a_row(store):
    async def fill():
        ids = [new_id(), new_id()]
        for id, models in zip(ids, (MODELS, "o" * 64), strict=True):
            await store.run(stored_events.commit, [decision(id, body=body(mode="enforce", audited=True))])
            await store.run(stored_events.commit, [later(id, AuditBody(scores=(0.2, 0.8), identities_sha256=models))])
        return await rows_of(store)

    assert [row.guardian for row in run(fill())] == [(0.2, 0.8), None]


def test_rows_outlive_the_records_they_come_from(store):
    async def fill():
        id = new_id()
        await store.run(stored_events.commit, [decision(id, body=body(mode="enforce", audited=True))])
        await store.run(stored_events.commit, [later(id, AuditBody(scores=(0.2, 0.8)))])
        assert await integrity.prune(store, before=time.time() + 60) == 1  # never gathered before
        pruned = await store.run(pages.records, pages.RecordFilter(policy="support"))
        return pruned, await rows_of(store), await rows_of(store)

    pruned, rows, again = run(fill())
    assert pruned == []
    assert [row.guardian for row in rows] == [(0.2, 0.8)]
    assert again == rows


def test_gathering_in_any_order_and_by_several_processes_gives_the_same_rows(where, opened):
    one, other = opened(where), opened(where)

    async def fill():
        ids = [new_id() for _ in range(30)]
        for k, id in enumerate(ids):
            await (one, other)[k % 2].run(stored_events.commit, [decision(id, body=body())])
            if k % 3 == 0:
                await asyncio.gather(stored_events.gather_rows(one), stored_events.gather_rows(other))
            await (other, one)[k % 2].run(stored_events.commit, [later(id, AuditBody(scores=(0.1, k / 100)))])
        await asyncio.gather(stored_events.gather_rows(one), stored_events.gather_rows(other))
        assert await stored_events.gather_rows(one) == 0
        return ids, await rows_of(one), await rows_of(other)

    ids, rows, same = run(fill())
    assert rows == same
    assert [(row.id, row.guardian) for row in rows] == [(id, (0.1, k / 100)) for k, id in enumerate(ids)]


def test_more_events_than_one_transaction_takes_are_all_gathered(store):
    async def fill():
        events = [decision(body=body()) for _ in range(1203)]
        await store.run(stored_events.commit, events)
        assert await stored_events.gather_rows(store) == 1203
        return events, await rows_of(store)

    events, rows = run(fill())
    assert [row.id for row in rows] == [event.id for event in events]


def test_rows_are_counted_by_the_time_their_query_arrived(store):
    async def fill():
        ids = [new_id() for _ in range(3)]
        cut = time_of(ids[-1]) + 0.05
        await asyncio.sleep(0.12)
        ids += [new_id() for _ in range(2)]
        await store.run(stored_events.commit, [decision(id, body=body()) for id in ids])
        await stored_events.gather_rows(store)
        counts = [
            await store.run(stored_events.count_rows, "support", identities_sha256=MODELS, since=since, until=until)
            for since, until in ((0.0, None), (0.0, cut), (cut, None), (cut, cut))
        ]
        return ids, counts, await rows_of(store, since=cut), await rows_of(store, limit=2)

    ids, counts, late, first = run(fill())
    assert counts == [5, 3, 2, 0]
    assert [row.id for row in late] == ids[3:]
    assert [row.id for row in first] == ids[:2]


def test_an_id_of_a_time_sorts_between_the_ids_before_and_after():
    id = new_id()
    assert id_at(time_of(id) - 0.002) < id <= id_at(time_of(id))
    assert id_at(0.0) < id


def test_the_rows_of_a_log_are_kept_in_its_order_and_imported_once(store):
    collected = [CalibrationRow(id=str(9 - k), size=2, primary=(0.5, None), guardian=(0.0, 1.0)) for k in range(5)]

    async def fill():
        assert await store.run(stored_events.imported_rows, "support", "a" * 64) == []
        await store.run(stored_events.import_rows, "support", "a" * 64, collected)
        await store.run(stored_events.import_rows, "support", "a" * 64, collected)
        live = await rows_of(store)
        return await store.run(stored_events.imported_rows, "support", "a" * 64), live

    assert run(fill()) == (collected, [])


def test_a_damaged_decision_stops_neither_gathering_nor_pruning(store, sql, caplog):
    async def fill():
        ids = [new_id() for _ in range(3)]
        await store.run(stored_events.commit, [decision(id, body=body()) for id in ids])
        sql(f"update events set body = 'x' where id = '{ids[1]}'")
        rows = await rows_of(store)
        await store.run(stored_events.commit, [later(ids[0], AuditBody(scores=(0.2, 0.8)))])
        sql(f"update events set body = 'x' where id = '{ids[0]}' and kind = 'decision'")
        assert await integrity.prune(store, before=time.time() + 60) == 3
        return ids, rows, await rows_of(store)

    ids, rows, after = run(fill())
    assert [row.id for row in rows] == [row.id for row in after] == [ids[0], ids[2]]
    assert f"the decision {ids[1]}" in caplog.text or ids[1] in caplog.text


def test_a_version_follows_only_the_one_it_was_made_for(store):
    async def fill():
        first = await store.run(policies.install, "support", {"a": 1}, by="x")
        both = await asyncio.gather(
            store.run(policies.succeed, "support", {"a": 2}, by="y", after=first.version),
            store.run(policies.succeed, "support", {"a": 3}, by="z", after=first.version),
        )
        return both, await store.run(policies.history, "support")

    both, history = run(fill())
    assert sorted(version is None for version in both) == [False, True]
    assert [version.version for version in history] == [2, 1]


def test_a_row_that_was_changed_is_not_used_and_is_reported(where, sql):
    store = PostgresStore(where, keys=KEYS) if where.startswith("postgres") else SQLiteStore(where, keys=KEYS)

    async def fill():
        try:
            await store.run(stored_events.commit, [decision(body=body()), decision(body=body())])
            await store.run(
                stored_events.import_rows, "support", "a" * 64, [CalibrationRow(id="1", size=2, guardian=(0.0, 0.8))]
            )
            id = (await rows_of(store))[0].id
            await store.run(stored_events.commit, [later(id, AuditBody(scores=(0.2, 0.8)))])
            await stored_events.gather_rows(store)
            await integrity.seal(store, everything=True)
            assert await integrity.verify(store) == []
            sql("update calibration_rows set body = replace(body, '0.8', '0.7')")
            with pytest.raises(DamagedError, match="is not what was written"):
                await rows_of(store)
            with pytest.raises(DamagedError, match="is not what was written"):
                await store.run(stored_events.imported_rows, "support", "a" * 64)
            return id, await integrity.verify(store)
        finally:
            await store.close()

    id, faults = run(fill())
    assert f"policy support: the calibration row '{id}' was changed" in faults
    assert f"policy support: the calibration row of decision {id} is not what its record says" in faults
    assert len(faults) == 3
