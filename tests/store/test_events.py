import asyncio
import json
import sqlite3
import time

import pytest

from conformal_arbitrage.errors import OptionError, StoreError
from conformal_arbitrage.store import Audit, Event, Replay, new_id
from tests.store.facts import decide, decision, later


def test_ids_are_unique_and_grow_even_within_a_millisecond():
    ids = [new_id() for _ in range(20_000)]
    assert ids == sorted(set(ids))
    assert {len(id) for id in ids} == {26}


def test_a_record_joins_all_that_was_told_of_a_decision(store):
    async def story():
        id = new_id()
        started = time.time()
        await store.commit([decision(id, body={"chosen": "refund", "ü": "\ud800\0", "n": 0.1})])
        await store.commit([later("completion", id, tokens=7)])
        await store.commit([later("feedback", id, score=1)])
        await store.commit([later("feedback", id, score=2), later("audit", id, agreed=True)])
        record = await store.record(id)
        assert record.decision == {"chosen": "refund", "ü": "\ud800\0", "n": 0.1}
        assert (record.policy, record.key_id, record.decided_by) == ("support", "k1", "primary")
        assert started <= record.created <= record.completion["at"] <= record.audit["at"] <= time.time()
        assert record.completion["tokens"] == 7
        assert [told["score"] for told in record.feedback] == [1, 2]
        assert record.audit["agreed"] is True
        assert await store.records() == [record]

    asyncio.run(story())


def test_a_decision_may_stand_alone_and_an_unknown_one_is_none(store):
    async def story():
        [id] = await decide(store)
        record = await store.record(id)
        assert (record.completion, record.feedback, record.audit) == (None, (), None)
        assert await store.record("nothing") is None

    asyncio.run(story())


def test_of_two_completions_the_first_counts(store):
    async def story():
        [id] = await decide(store)
        await store.commit([later("completion", id, n=1)])
        await store.commit([later("completion", id, n=2)])
        assert (await store.record(id)).completion["n"] == 1

    asyncio.run(story())


def test_a_commit_may_have_more_events_than_a_statement_takes_values(store):
    async def story():
        await store.commit([decision() for _ in range(7000)])
        assert len(await store.records(limit=10_000)) == 7000
        assert await store.verify() == []

    asyncio.run(story())


def test_records_are_filtered_and_paged_newest_first(store):
    async def story():
        first = await decide(store, 3)
        between = time.time()
        await asyncio.sleep(0.01)
        second = await decide(store, 2, policy="sales", key_id="k2", decided_by="guardian")
        await store.commit([later("feedback", first[1], score=1), later("feedback", first[1], score=2)])
        newest = [*reversed([*first, *second])]

        async def found(**filters):
            return [record.id for record in await store.records(**filters)]

        assert await found() == newest
        assert await found(limit=2) == newest[:2]
        assert await found(limit=2, before=newest[1]) == newest[2:4]
        assert (
            await found(policy="sales") == await found(key_id="k2") == await found(decided_by="guardian") == newest[:2]
        )
        assert await found(policy="sales", key_id="k1") == []
        assert await found(since=between) == newest[:2]
        assert await found(until=between) == newest[2:]

    asyncio.run(story())


def test_concurrent_commits_keep_the_chain_whole(store, sql):
    async def story():
        await asyncio.gather(*(decide(store, 10) for _ in range(40)))
        assert len(await store.records(limit=1000)) == 400
        assert await store.verify() == []

    asyncio.run(story())
    numbers = {}
    for writer, seq in sql("select writer, seq from events order by writer, seq"):
        numbers.setdefault(writer, []).append(seq)
    assert all(found == [*range(1, len(found) + 1)] for found in numbers.values())


def test_the_chain_stays_whole_over_many_openings(where, opened):
    async def story():
        for _ in range(3):
            store = opened(where)
            await decide(store, 3)
            await store.close()
        assert await opened(where).verify() == []

    asyncio.run(story())


def test_a_commit_is_all_or_nothing(store):
    async def story():
        [id] = await decide(store)
        other = new_id()
        audit = Audit(id=other, policy="support", payload={})
        with pytest.raises(StoreError, match="there already"):
            await store.commit([decision(other), decision(id)], audits=[audit])
        assert await store.record(other) is None
        assert await store.take_audits(limit=9, lease=1) == []
        await decide(store, 3)
        assert await store.verify() == []

    asyncio.run(story())


def test_one_failing_commit_does_not_fail_its_neighbours(store):
    async def story():
        [taken] = await decide(store)
        ids = [new_id() for _ in range(50)]
        commits = [store.commit([decision(taken if k % 7 == 0 else id)]) for k, id in enumerate(ids)]
        outcomes = await asyncio.gather(*commits, return_exceptions=True)
        assert [isinstance(outcome, StoreError) for outcome in outcomes] == [k % 7 == 0 for k in range(50)]
        assert {r.id for r in await store.records()} == {taken} | {id for k, id in enumerate(ids) if k % 7}
        assert await store.verify() == []

    asyncio.run(story())


@pytest.mark.parametrize("body", [{"x": float("nan")}, {"x": {1, 2}}, {"x": b""}])
def test_a_body_that_is_not_json_is_refused(store, body):
    with pytest.raises(StoreError, match="is not JSON"):
        asyncio.run(store.commit([decision(body=body)]))


def test_a_text_that_no_database_can_hold_is_refused(store):
    async def story():
        with pytest.raises(StoreError):
            await store.commit([decision(policy="\ud800")])
        with pytest.raises(StoreError):
            await store.claim("k1", "\udcff", "0" * 64, lease=1)
        await decide(store)
        assert await store.verify() == []

    asyncio.run(story())


def test_a_replay_needs_a_claim(store):
    with pytest.raises(OptionError, match="claim="):
        asyncio.run(store.commit([], replay=Replay(status=200, headers={}, body=b"")))


def test_a_cancelled_commit_harms_no_one(store):
    async def story():
        task = asyncio.ensure_future(store.commit([decision()]))
        await asyncio.sleep(0)
        task.cancel()
        await decide(store)
        assert await store.verify() == []

    asyncio.run(story())


def test_audits_are_handed_out_once_per_lease_and_end_with_their_event(store):
    async def story():
        ids = [new_id() for _ in range(3)]
        for id in ids:
            await store.commit([decision(id)], audits=[Audit(id=id, policy="support", payload={"n": id})])
        first = await store.take_audits(limit=2, lease=0.2)
        second = await store.take_audits(limit=2, lease=60)
        assert [audit.id for audit in [*first, *second]] == ids
        assert first[0].payload == {"n": ids[0]}
        assert await store.take_audits(limit=2, lease=60) == []
        await store.renew_audits([ids[0], "gone"], lease=60)
        await asyncio.sleep(0.25)
        [over] = await store.take_audits(limit=2, lease=0.2)
        assert over.id == ids[1]
        await store.commit([later("audit", ids[0], agreed=True)])
        await asyncio.sleep(0.25)
        assert [audit.id for audit in await store.take_audits(limit=9, lease=60)] == [ids[1]]

    asyncio.run(story())


def test_gateways_never_share_an_audit(where, opened):
    async def story():
        stores = [opened(where), opened(where)]
        ids = [new_id() for _ in range(60)]
        for id in ids:
            await stores[0].commit([decision(id)], audits=[Audit(id=id, policy="support", payload={})])
        taken = await asyncio.gather(*(stores[k % 2].take_audits(limit=5, lease=60) for k in range(24)))
        got = [audit.id for audits in taken for audit in audits]
        assert len(got) == len(set(got))
        rest = await stores[0].take_audits(limit=60, lease=60)
        assert sorted([*got, *(audit.id for audit in rest)]) == ids

    asyncio.run(story())


def test_events_are_what_any_json_reader_finds_in_the_table(tmp_path, opened):
    store = opened(str(tmp_path / "s.db"))
    asyncio.run(store.commit([Event(id="a", kind="decision", body={"b": 1, "a": [2]}, policy="p", decided_by="x")]))
    [(body,)] = sqlite3.connect(tmp_path / "s.db").execute("select body from events")
    assert body == '{"a":[2],"b":1}' == json.dumps(json.loads(body), separators=(",", ":"))
