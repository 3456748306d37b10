import asyncio
import json
import sqlite3
import time
from contextlib import closing

import pytest

from conformal_arbitrage.errors import OptionError, StoreError
from conformal_arbitrage.store import claims, events, integrity, outbox, pages
from conformal_arbitrage.store.claims import SavedResponse
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import (
    AuditBody,
    CompletionBody,
    Content,
    DecisionBody,
    FeedbackBody,
    MenuQuestion,
    TextQuestion,
    new_id,
)
from tests.store.facts import decide, decision, later

QUESTION = MenuQuestion(context="?", actions=("a", "b"))


def test_ids_are_unique_and_grow_even_within_a_millisecond():
    ids = [new_id() for _ in range(20_000)]
    assert ids == sorted(set(ids))
    assert {len(id) for id in ids} == {26}


async def test_a_record_joins_all_events_of_a_decision(store):
    id = new_id()
    started = time.time()
    body = DecisionBody(action=1, margin=0.1, content=Content(request={"ü": "\ud800\0"}))
    await store.run(events.commit, [decision(id, body)])
    await store.run(events.commit, [later(id, CompletionBody(finish="stop"))])
    await store.run(events.commit, [later(id, FeedbackBody(grade=0.25))])
    await store.run(events.commit, [later(id, FeedbackBody(grade=0.75)), later(id, AuditBody(scores=(0.5, 0.5)))])
    record = await store.run(pages.record, id)
    assert record.decision == body
    assert (record.policy, record.key_id, record.decided_by) == ("support", "k1", "primary")
    assert started <= record.created <= record.completion.at <= record.audit.at <= time.time()
    assert record.completion.finish == "stop"
    assert [feedback.grade for feedback in record.feedback] == [0.25, 0.75]
    assert record.audit.scores == (0.5, 0.5)
    assert await store.run(pages.records) == [record]


async def test_a_decision_without_later_events_and_an_unknown_id(store):
    [id] = await decide(store)
    record = await store.run(pages.record, id)
    assert (record.completion, record.feedback, record.audit) == (None, (), None)
    assert await store.run(pages.record, "nothing") is None


async def test_the_first_of_two_completions_counts(store):
    [id] = await decide(store)
    await store.run(events.commit, [later(id, CompletionBody(finish="stop"))])
    await store.run(events.commit, [later(id, CompletionBody(finish="length"))])
    assert (await store.run(pages.record, id)).completion.finish == "stop"


async def test_a_commit_may_have_more_events_than_fit_into_one_statement(store):
    await store.run(events.commit, [decision() for _ in range(7000)])
    assert len(await store.run(pages.records, limit=10_000)) == 7000
    assert await integrity.verify(store) == []


async def test_records_are_filtered_and_paged_newest_first(store):
    first = await decide(store, 3)
    between = time.time()
    await asyncio.sleep(0.01)
    second = await decide(store, 2, policy="sales", key_id="k2", decided_by="guardian")
    await store.run(events.commit, [later(first[1], FeedbackBody(grade=0.0)), later(first[1], FeedbackBody(grade=1.0))])
    newest = [*reversed([*first, *second])]

    async def ids(limit=100, **filters):
        wanted = pages.RecordFilter(**filters)
        return [record.id for record in await store.run(pages.records, wanted, limit=limit)]

    assert await ids() == newest
    assert await ids(limit=2) == newest[:2]
    assert await ids(limit=2, before=newest[1]) == newest[2:4]
    assert await ids(policy="sales") == await ids(key_id="k2") == await ids(decided_by="guardian") == newest[:2]
    assert await ids(policy="sales", key_id="k1") == []
    assert await ids(since=between) == newest[:2]
    assert await ids(until=between) == newest[2:]


async def test_concurrent_commits_keep_the_chain_whole(store, sql):
    await asyncio.gather(*(decide(store, 10) for _ in range(40)))
    assert len(await store.run(pages.records, limit=1000)) == 400
    assert await integrity.verify(store) == []
    numbers = {}
    for writer, seq in sql("select writer, seq from events order by writer, seq"):
        numbers.setdefault(writer, []).append(seq)
    assert all(own == [*range(1, len(own) + 1)] for own in numbers.values())


async def test_the_chain_stays_whole_over_many_openings(where, opened):
    for _ in range(3):
        store = opened(where)
        await decide(store, 3)
        await store.close()
    assert await integrity.verify(opened(where)) == []


async def test_a_commit_is_all_or_nothing(store):
    [id] = await decide(store)
    other = new_id()
    audit = Audit(id=other, policy="support", question=QUESTION)
    with pytest.raises(StoreError, match="already exists"):
        await store.run(events.commit, [decision(other), decision(id)], audits=[audit])
    assert await store.run(pages.record, other) is None
    assert await store.run(outbox.take_audits, limit=9, lease=1) == []
    await decide(store, 3)
    assert await integrity.verify(store) == []


async def test_a_failing_commit_does_not_fail_others_in_its_batch(store):
    [taken] = await decide(store)
    ids = [new_id() for _ in range(50)]
    commits = [store.run(events.commit, [decision(taken if k % 7 == 0 else id)]) for k, id in enumerate(ids)]
    outcomes = await asyncio.gather(*commits, return_exceptions=True)
    assert [isinstance(outcome, StoreError) for outcome in outcomes] == [k % 7 == 0 for k in range(50)]
    assert {r.id for r in await store.run(pages.records)} == {taken} | {id for k, id in enumerate(ids) if k % 7}
    assert await integrity.verify(store) == []


async def test_a_text_that_is_not_valid_unicode_is_refused_in_a_column(store):
    with pytest.raises(StoreError):
        await store.run(events.commit, [decision(policy="\ud800")])
    with pytest.raises(StoreError):
        await store.run(claims.take, "k1", "\udcff", "0" * 64, lease=1)
    await decide(store)
    assert await integrity.verify(store) == []


def test_a_response_needs_a_claim(store):
    with pytest.raises(OptionError, match="claim="):
        asyncio.run(store.run(events.commit, [], response=SavedResponse(status=200, headers={}, body=b"")))


async def test_a_cancelled_commit_leaves_the_store_usable(store):
    task = asyncio.ensure_future(store.run(events.commit, [decision()]))
    await asyncio.sleep(0)
    task.cancel()
    await decide(store)
    assert await integrity.verify(store) == []


async def test_audits_are_handed_out_once_per_lease_and_end_with_their_event(store):
    ids = [new_id() for _ in range(3)]
    for id in ids:
        await store.run(
            events.commit,
            [decision(id)],
            audits=[Audit(id=id, policy="support", question=TextQuestion(request={"n": id}))],
        )
    first = await store.run(outbox.take_audits, limit=2, lease=0.2)
    second = await store.run(outbox.take_audits, limit=2, lease=60)
    assert [audit.id for audit in [*first, *second]] == ids
    assert first[0].question == TextQuestion(request={"n": ids[0]})
    assert await store.run(outbox.take_audits, limit=2, lease=60) == []
    await store.run(outbox.renew_audits, [ids[0], "gone"], lease=60)
    await asyncio.sleep(0.25)
    [over] = await store.run(outbox.take_audits, limit=2, lease=0.2)
    assert over.id == ids[1]
    await store.run(events.commit, [later(ids[0], AuditBody(error="it failed"))])
    await asyncio.sleep(0.25)
    assert [audit.id for audit in await store.run(outbox.take_audits, limit=9, lease=60)] == [ids[1]]


async def test_gateways_never_share_an_audit(where, opened):
    stores = [opened(where), opened(where)]
    ids = [new_id() for _ in range(60)]
    for id in ids:
        await stores[0].run(events.commit, [decision(id)], audits=[Audit(id=id, policy="support", question=QUESTION)])
    taken = await asyncio.gather(*(stores[k % 2].run(outbox.take_audits, limit=5, lease=60) for k in range(24)))
    got = [audit.id for audits in taken for audit in audits]
    assert len(got) == len(set(got))
    rest = await stores[0].run(outbox.take_audits, limit=60, lease=60)
    assert sorted([*got, *(audit.id for audit in rest)]) == ids


def test_bodies_in_the_table_are_sorted_compact_json(tmp_path, opened):
    store = opened(str(tmp_path / "s.db"))
    asyncio.run(
        store.run(events.commit, [decision("a", DecisionBody(size=3, candidates=(0, 2), content=Content(answer="é")))])
    )
    with closing(sqlite3.connect(tmp_path / "s.db")) as connection:
        [(body,)] = connection.execute("select body from events")
    assert body == '{"candidates":[0,2],"content":{"answer":"é"},"size":3}'
    assert body == json.dumps(json.loads(body), separators=(",", ":"), ensure_ascii=False)


async def test_a_postponed_audit_is_handed_out_again_later_and_counted(store, sql):
    ids = [new_id() for _ in range(3)]
    await store.run(events.commit, [], audits=[Audit(id=id, policy="support", question=QUESTION) for id in ids])
    await store.run(events.commit, [], audits=[Audit(id="other", policy="gone", question=QUESTION)])
    first = await store.run(outbox.take_audits, limit=9, lease=60, policies={"support": ""})
    assert [(audit.id, audit.attempts) for audit in first] == [(id, 0) for id in ids]
    await store.run(outbox.postpone_audit, ids[1], seconds=0.3)
    assert await store.run(outbox.take_audits, limit=9, lease=60, policies={"support": ""}) == []
    await asyncio.sleep(0.35)
    [again] = await store.run(outbox.take_audits, limit=9, lease=60, policies={"support": ""})
    assert (again.id, again.attempts) == (ids[1], 1)
    assert 0.3 < again.age < 30
    backlogs = {one.name: one for one in await store.run(outbox.audit_backlog)}
    assert {name: one.waiting for name, one in backlogs.items()} == {"gone": 1, "support": 3}
    assert backlogs["gone"].oldest > 0.3
    [orphan] = await store.run(outbox.take_audits, limit=9, lease=60, policies={}, overdue=0.2)
    assert orphan.id == "other"
    assert await store.run(outbox.take_audits, limit=9, lease=60, policies={}, overdue=3600) == []
