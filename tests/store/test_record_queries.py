"""Records are found by an index whatever the filter, a page is bounded in bytes, and decisions come first."""

import asyncio
import itertools
import threading

import pytest

from conformal_arbitrage.store import events as stored_events
from conformal_arbitrage.store import keys, pages, policies
from conformal_arbitrage.store.pages import PAGE_BYTES, RecordFilter
from conformal_arbitrage.store.record import CompletionBody, Content, DecisionBody, new_id
from tests.store.facts import BODY, decide, decision, later

ROWS = 6000
FILTERS = {
    "policy": "support",
    "key_id": "k1",
    "decided_by": "guardian",
    "since": 1000.0,
    "until": 5000.0,
    "before": f"{3000:08d}{0:018d}",
}
COMBINATIONS = [names for size in range(7) for names in itertools.combinations(FILTERS, size)]


async def filled(store):
    """Write many decisions, by a few keys, policies and deciders, and spread them over time."""
    events = [
        decision(
            f"{k:08d}{0:018d}",
            policy=("support", "sales")[k // 4 % 2],
            key_id=f"k{k % 3}",
            decided_by=("primary", "guardian", "fallback", "cancelled")[k % 4],
        )
        for k in range(ROWS)
    ]
    for start in range(0, ROWS, 1000):
        await store.run(stored_events.commit, events[start : start + 1000])


class Noted:
    """A session that notes the plan of each statement it runs."""

    def __init__(self, session):
        self._session = session
        self.dialect, self.seals, self.view = session.dialect, session.seals, session.view
        self.plans = []

    def rows(self, sql, *values):
        explain = "explain query plan " if self.dialect.placeholder == "?" else "explain "
        plan = "\n".join(str(row[-1]) for row in self._session.rows(explain + sql, *values))
        self.plans.append((sql, plan))
        return self._session.rows(sql, *values)


@pytest.mark.parametrize("where", ["sqlite", "postgres"], indirect=True)
async def test_every_combination_of_filters_is_a_search_in_an_index(store, sql):
    await filled(store)
    sql("update events set at = cast(substr(id, 1, 8) as int)")
    sql("analyze")
    for names in COMBINATIONS:
        wanted = {name: FILTERS[name] for name in names}

        def explained(session, wanted=wanted):
            noted = Noted(session)
            page = pages.records(noted, RecordFilter(**wanted), limit=20)
            return page, noted.plans

        found, plans = await store.execute("scan", explained)
        assert len(found) == 20, names
        for statement, plan in plans:
            in_order = not names and plan == "SCAN events USING INDEX decisions_by_time"
            assert in_order or "SCAN events" not in plan, (names, statement, plan)
            assert "Seq Scan" not in plan, (names, statement, plan)
            if "limit" in statement:
                assert "TEMP B-TREE" not in plan, (names, statement, plan)
                assert "Sort" not in plan, (names, statement, plan)


async def test_pages_hold_the_same_records_as_a_filter_over_all_of_them(store):
    await filled(store)
    everything = await store.run(pages.records, limit=ROWS)
    assert len(everything) == ROWS
    for names in itertools.chain.from_iterable(
        itertools.combinations(("policy", "key_id", "decided_by"), k) for k in range(4)
    ):
        fields = {name: FILTERS[name] for name in names}
        expected = [r.id for r in everything if all(getattr(r, name) == value for name, value in fields.items())]
        found, before = [], None
        while page := await store.run(pages.records, RecordFilter(**fields, before=before), limit=700):
            found += [record.id for record in page]
            before = page[-1].id
        assert found == expected, names


async def test_a_page_of_large_records_is_short_and_the_pages_together_complete(store):
    large = DecisionBody(content=Content(answer="x" * (PAGE_BYTES // 5)))
    ids = await decide(store, 20, body=large)
    await decide(store, 3)
    found, before, sizes = [], None, []
    while page := await store.run(pages.records, RecordFilter(before=before), limit=1000):
        found += [record.id for record in page]
        before = page[-1].id
        sizes.append(sum(len(record.decision.content.answer) for record in page if record.decision.content))
    assert set(ids) <= set(found)
    assert len(found) == len(set(found)) == 23
    assert max(sizes) <= 1.3 * PAGE_BYTES
    assert len(sizes) >= 4


async def test_a_decision_that_the_safe_action_replaced_is_found_as_a_fallback_and_not_as_the_guardians(store):
    pending = DecisionBody(
        **{f: getattr(BODY, f) for f in ("candidates", "margin", "legs", "mode", "form", "size")}, pending=True
    )
    ids = await decide(store, 3, body=pending, decided_by="guardian")
    for id in ids[:2]:
        await store.run(
            stored_events.commit, [later(id, CompletionBody(finish="stop", action=0, decided_by="fallback"))]
        )
    [plain] = await decide(store, 1, decided_by="fallback")
    for limit in (1, 2, 100):
        found, before = [], None
        while page := await store.run(pages.records, RecordFilter(decided_by="fallback", before=before), limit=limit):
            found += [record.id for record in page]
            before = page[-1].id
        assert found == [plain, ids[1], ids[0]]
    [latest] = await store.run(pages.records, RecordFilter(decided_by="guardian"), limit=1)
    assert latest.id == ids[2]
    assert await store.run(pages.records, RecordFilter(decided_by="fallback", policy="sales")) == []
    every = RecordFilter(decided_by="fallback", policy="support", key_id="k1", since=0.0)
    assert len(await store.run(pages.records, every)) == 3


@pytest.mark.parametrize("where", ["sqlite", "postgres"], indirect=True)
async def test_decisions_are_recorded_while_every_reader_is_busy(store):
    held, reading = threading.Event(), threading.Semaphore(0)

    def slow(session):
        reading.release()
        held.wait(60)

    readers = [asyncio.ensure_future(store.execute("scan", slow)) for _ in range(8)]
    await asyncio.to_thread(reading.acquire)
    try:
        ids = await asyncio.wait_for(decide(store, 5), 30)
        assert await asyncio.wait_for(store.writable(), 30) >= 0
        assert (await asyncio.wait_for(store.run(pages.record, ids[0]), 30)).id == ids[0]
        assert await asyncio.wait_for(store.run(policies.active), 30) == []
        assert await asyncio.wait_for(store.run(keys.list_all), 30) == []
    finally:
        held.set()
    await asyncio.gather(*readers)


async def test_a_page_whose_end_was_removed_goes_on_where_that_was(store):
    ids = await decide(store, 3)
    await asyncio.sleep(0.02)
    assert [record.id for record in await store.run(pages.records, RecordFilter(before=new_id()))] == ids[::-1]
    assert await store.run(pages.records, RecordFilter(before="no id")) == []
