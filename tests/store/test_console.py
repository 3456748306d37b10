"""Sign-ins, tallies and marked decisions, on both databases."""

import asyncio
import random
import threading
import time

import pytest

from conformal_arbitrage.store import events as stored_events
from conformal_arbitrage.store import integrity, keys, pages
from conformal_arbitrage.store import pages as stored_pages
from conformal_arbitrage.store.ledger import LedgerKey, NewRow
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.pages import MarkedDecisions, RecordFilter
from conformal_arbitrage.store.record import AuditBody, CompletionBody, DecisionBody, MenuQuestion, new_id
from conformal_arbitrage.store.session import SQLITE, Session
from conformal_arbitrage.types import Leg, Spent
from tests.store.facts import decision, later

PRIMARY = Leg(role="primary", scores=(0.1, 0.9), spent=Spent(calls=1, cost=0.01), seconds=0.2)
GUARDIAN = Leg(role="guardian", scores=(1.0, 0.0), spent=Spent(calls=1, cost=0.5), seconds=0.2)


def body(*legs, **facts):
    cost = sum(leg.spent.cost for leg in legs)
    return DecisionBody(
        **{"action": 1, "legs": legs, "cost": cost, "version": 1, "mode": "enforce", "size": 2, **facts}
    )


def tally(store, since=0.0):
    [one] = asyncio.run(store.run(stored_events.tallies, since=since))
    return one


def commit(store, *events, **options):
    asyncio.run(store.run(stored_events.commit, list(events), **options))


async def test_a_sign_in_lasts_its_time_and_ends_with_its_key(store):
    await store.run(keys.create, id="k", sha256="0" * 64, scope="review", label="reviewer-1", policies=["a"])
    await store.run(keys.sign_in, "c" * 64, "k", seconds=60)
    await store.run(keys.sign_in, "d" * 64, "k", seconds=-1)
    signed = await store.run(keys.find_sign_in, "c" * 64)
    assert (signed.key_id, signed.scope, signed.label, signed.policies) == ("k", "review", "reviewer-1", ("a",))
    assert signed.valid
    assert signed.idle < 30
    assert await store.run(keys.find_sign_in, "d" * 64) is None
    assert await store.run(keys.find_sign_in, "e" * 64) is None
    await store.run(keys.note_sign_in, "c" * 64)
    await store.run(keys.revoke, "k")
    assert not (await store.run(keys.find_sign_in, "c" * 64)).valid
    await store.run(keys.sign_out, "c" * 64)
    assert await store.run(keys.find_sign_in, "c" * 64) is None


def test_decisions_are_counted_by_who_made_them_and_what_they_cost(store):
    commit(store, decision(body=body(PRIMARY)))
    commit(store, decision(body=body(PRIMARY, GUARDIAN, audited=True), decided_by="guardian"))
    commit(store, decision(body=body(PRIMARY, cost=None, no_guarantee="it is so"), decided_by="fallback"))
    commit(store, decision(body=DecisionBody(cancelled=True)))
    id = new_id()
    commit(store, decision(id, body=body(PRIMARY, audited=True)))
    commit(store, later(id, AuditBody(scores=(1.0, 0.0), cost=0.3)))
    commit(store, later(id, AuditBody(error="it failed", cost=9.0)))
    assert asyncio.run(stored_events.fold_tallies(store)) == 7
    one = tally(store)
    assert (one.decisions, one.by_primary, one.by_guardian, one.by_fallback) == (4, 2, 1, 1)
    assert (one.no_guarantee, one.unknown_cost) == (1, 1)
    assert one.cost == pytest.approx(0.53)
    assert (one.guardian_calls, one.guardian_cost) == (1, 0.5)
    assert (one.audit_calls, one.audit_cost) == (1, pytest.approx(0.3))
    assert asyncio.run(stored_events.fold_tallies(store)) == 0
    assert tally(store) == one
    assert asyncio.run(store.run(stored_events.tallies, since=time.time() + 7200)) == []


def test_a_decision_that_ends_later_is_counted_as_it_ended_whatever_the_order(store, opened, where):
    other = opened(where)
    stores = [store, other]
    ids = [new_id() for _ in range(12)]
    rng = random.Random(1)
    for k, id in enumerate(ids):
        commit(stores[k % 2], decision(id, body=body(PRIMARY, action=None, pending=True), decided_by="guardian"))
        if rng.random() < 0.5:
            asyncio.run(stored_events.fold_tallies(store))
        commit(stores[(k + 1) % 2], later(id, CompletionBody(finish="failed", leg=GUARDIAN, cost=0.2)))
        if rng.random() < 0.5:
            asyncio.run(stored_events.fold_tallies(other))
        whole = CompletionBody(
            finish="stop", leg=GUARDIAN, action=0, cost=0.51, decided_by="fallback", no_guarantee="so"
        )
        commit(stores[k // 2 % 2], later(id, whole))
    asyncio.run(stored_events.fold_tallies(store))
    one = tally(store)
    assert (one.decisions, one.by_guardian, one.by_fallback, one.no_guarantee) == (12, 0, 12, 12)
    assert one.cost == pytest.approx(12 * 0.51)
    assert one.unknown_cost == 0
    for mark in ("no guarantee", "fallback"):
        marked = asyncio.run(page_of(store, {"mark": mark, "policy": "support"})).records
        assert [record.id for record in marked] == sorted(ids, reverse=True)


def test_what_a_safe_action_answered_is_listed_at_once_or_after_the_guardian_failed(store, sql):
    replacing = CompletionBody(finish="stop", leg=GUARDIAN, action=0, decided_by="fallback", no_guarantee="so")
    alone, replaced, other = (new_id() for _ in range(3))
    commit(store, decision(alone, body=body(PRIMARY, no_guarantee="so"), decided_by="fallback"))
    commit(store, decision(replaced, body=body(PRIMARY, no_guarantee="so"), decided_by="guardian"))
    commit(store, decision(other, body=body(PRIMARY, no_guarantee="so")))
    asyncio.run(stored_events.fold_tallies(store))
    assert listed(store, "fallback") == [alone]
    commit(store, later(replaced, replacing))
    asyncio.run(stored_events.fold_tallies(store))
    assert listed(store, "fallback") == listed(store, "fallback", policy="support") == [replaced, alone]
    assert listed(store, "fallback", policy="other") == []
    assert listed(store, "no guarantee") == [other, replaced, alone]
    assert sql("select count(*) from unguaranteed where fallback = 1") == [(2,)]
    by = {who: asyncio.run(page_of(store, {"decided_by": who})) for who in ("guardian", "fallback", "primary")}
    assert {who: [record.id for record in records] for who, records in by.items()} == {
        "guardian": [], "fallback": [replaced, alone], "primary": [other],
    }  # fmt: skip


def listed(store, mark, **options):
    return [record.id for record in asyncio.run(page_of(store, {"mark": mark, **options})).records]


def test_pruned_decisions_leave_the_list_and_stay_counted(store, sql):
    commit(store, decision(body=body(PRIMARY, no_guarantee="so")))
    asyncio.run(stored_events.fold_tallies(store))
    asyncio.run(integrity.prune(store, before=time.time() - 3600))
    assert len(asyncio.run(store.run(stored_pages.marked_decisions, "no guarantee")).records) == 1
    asyncio.run(integrity.prune(store, before=time.time() + 3600))
    assert sql("select count(*) from unguaranteed") == [(0,)]
    assert tally(store).no_guarantee == 1


def test_several_gateways_count_each_event_once(store, opened, where):
    other = opened(where)
    for k in range(40):
        commit(store if k % 2 else other, decision(body=body(PRIMARY)))

    async def together():
        return await asyncio.gather(*(stored_events.fold_tallies(one) for one in (store, other) * 3))

    assert sum(asyncio.run(together())) == 40
    assert tally(store).decisions == 40


def test_marked_decisions_come_in_pages(store):
    key = LedgerKey(policy="support", version=1, identities_sha256="i")
    question = MenuQuestion(context="?", actions=("a", "b"))
    ids = [new_id() for _ in range(7)]
    for id in ids:
        row = NewRow(key=key, drawn=1.0, due=2.0)
        commit(store, decision(id, body=body(PRIMARY, audited=True)),
               audits=[Audit(id=id, policy="support", question=question, row=row)])  # fmt: skip
    commit(store, decision(body=body(PRIMARY)))

    async def pages(**options):
        found, before = [], None
        while batch := (
            await store.run(stored_pages.marked_decisions, "audited", RecordFilter(before=before, **options), limit=3)
        ).records:
            found += [record.id for record in batch]
            before = batch[-1].id
        return found

    expected = sorted(ids, reverse=True)
    assert asyncio.run(pages()) == expected
    assert asyncio.run(pages(policy="support")) == expected
    assert asyncio.run(pages(policy="other")) == []
    assert asyncio.run(pages(since=time.time() + 60)) == []
    assert asyncio.run(pages(until=time.time() + 60)) == expected
    assert asyncio.run(store.run(stored_pages.marked_decisions, "no guarantee")) == MarkedDecisions(
        records=[], end=None
    )


@pytest.mark.parametrize("sql_text", [
    "select id from ledger where ledger = 1 and id > 'a' and id < 'b' order by id desc limit 50",
    "select id from ledger where id > 'a' and id < 'b' order by id desc limit 50",
    "select id from unguaranteed where policy = 'x' and id > 'a' and id < 'b' order by id desc limit 50",
    "select policy from tallies where hour >= 1",
    f"{stored_events.COMPLETED} ('a', 'b')",
    stored_events.COMPLETIONS.replace("?", "'a'"),
    "select key_id from sign_ins where sha256 = 'x'",
    "select count(*) from reviews where state = 'open' and team in ('a', 'b')",
    "select held from votes where at >= 1 and reviewer = 'x' and withdrawn is null",
])  # fmt: skip
def test_what_the_console_asks_is_answered_by_an_index(tmp_path, opened, sql_text):
    import sqlite3
    from contextlib import closing

    opened(str(tmp_path / "plan.db"))
    with closing(sqlite3.connect(tmp_path / "plan.db")) as connection:
        steps = [row[3] for row in connection.execute(f"explain query plan {sql_text}")]
    assert steps
    assert not any(step.startswith("SCAN") or "TEMP B-TREE" in step for step in steps), steps


FILTERS = [
    {},
    {"policy": "support"},
    {"decided_by": "primary"},
    {"decided_by": "guardian"},
    {"decided_by": "fallback"},
    {"since": 1.0, "until": 4e9},
    {"policy": "support", "decided_by": "guardian", "since": 1.0, "until": 4e9},
    {"mark": "audited"},
    {"mark": "audited", "policy": "support", "since": 1.0, "until": 4e9},
    {"mark": "audited", "decided_by": "primary"},
    {"mark": "audited", "decided_by": "guardian", "policy": "support", "since": 1.0, "until": 4e9},
    {"mark": "no guarantee", "decided_by": "fallback"},
    {"mark": "no guarantee"},
    {"mark": "no guarantee", "policy": "support", "since": 1.0, "until": 4e9},
    {"mark": "fallback"},
    {"mark": "fallback", "decided_by": "fallback"},
    {"mark": "fallback", "policy": "support", "since": 1.0, "until": 4e9},
]


def page_of(store, wanted, **limit):
    """A page of what a filter selects: of marked decisions if it names a mark."""
    fields = dict(wanted)
    mark = [fields.pop("mark")] if "mark" in fields else []
    operation = stored_pages.marked_decisions if mark else stored_pages.records
    return store.run(operation, *mark, RecordFilter(**fields), **limit)


SMALL = ("tallies", "ledgers", "SCAN r", "Subquery Scan on r", "SCAN step", "SCAN part")
"""Tables with a row for each hour, or each version of a policy, and decisions that a fallback took over after the Guardian
failed, which have an index of their own; values found one by one, and decisions of one range: reading all of these is no
harm."""


def steps(session, text, values):
    """How a database would answer a query, if it had a reason to use an index."""
    if session.dialect is SQLITE:
        return [row[3] for row in session.rows(f"explain query plan {text}", *values)]
    for way in ("seqscan", "bitmapscan", "sort"):
        session.run(f"set local enable_{way} = off")
    return [row[0].strip() for row in session.rows(f"explain (costs off) {text}", *values)]


def test_every_filter_of_the_decisions_page_is_answered_by_an_index(store, monkeypatch):
    """By the plan, not by the clock: no page reads more than it shows, however many decisions there are."""
    key = LedgerKey(policy="support", version=1, identities_sha256="i")
    question = MenuQuestion(context="?", actions=("a", "b"))
    ids = sorted(new_id() for _ in range(4))
    for id, who in zip(ids, ("primary", "guardian", "fallback", "primary"), strict=True):
        facts = {"audited": True} if who == "primary" else {"no_guarantee": "it is so"}
        audit = Audit(id=id, policy="support", question=question, row=NewRow(key=key, drawn=1.0, due=2.0))
        commit(store, decision(id, body=body(PRIMARY, **facts), decided_by=who), audits=[audit])
    asyncio.run(stored_events.fold_tallies(store))
    asked, rows, own = [], Session.rows, threading.local()

    def noted(session, text, *values):
        if vars(own):  # which stores of other tests that are still closing do not count among
            asked.append((text, values))
        return rows(session, text, *values)

    def marked(execute):
        def run(mode, job):
            def inside(session):
                own.inside = True
                try:
                    return job(session)
                finally:
                    del own.inside

            return execute(mode, inside)

        return run

    monkeypatch.setattr(Session, "rows", noted)
    monkeypatch.setattr(store, "execute", marked(store.execute))
    for wanted in (one | more for one in FILTERS for more in ({}, {"before": ids[-1]})):
        page = asyncio.run(page_of(store, wanted))
        assert getattr(page, "records", page) or "before" in wanted, wanted
    monkeypatch.undo()
    queries = {text: values for text, values in asked if text.startswith(("select", "with"))}
    hidden = stored_pages.under_review.job(ids)
    queries[hidden.sql] = hidden.values
    assert len(queries) >= 8

    def explain(session):
        return {text: steps(session, text, values) for text, values in queries.items()}

    for text, plan in asyncio.run(store.execute("scan", explain)).items():
        whole = [
            one
            for one in plan
            if one.startswith(("SCAN", "Seq Scan", "->  Seq Scan")) and "USING" not in one and not one.endswith(SMALL)
        ]
        sorts = [one for one in plan if "TEMP B-TREE FOR ORDER BY" in one or one.startswith(("Sort", "->  Sort"))]
        assert not whole, (text, plan)
        assert not sorts or " limit " not in text or "(select distinct id" in text, (
            text,
            plan,
        )  # a page that was found may be sorted


def audited(store, deciders):
    """Decisions that were all audited, by these in turn; return their ids, latest first, with who decided."""
    key = LedgerKey(policy="support", version=1, identities_sha256="i")
    question = MenuQuestion(context="?", actions=("a", "b"))
    ids = sorted(new_id() for _ in deciders)
    events = [decision(id, body=body(PRIMARY), decided_by=who) for id, who in zip(ids, deciders, strict=True)]
    row = NewRow(key=key, drawn=1.0, due=2.0)
    commit(store, *events, audits=[Audit(id=id, policy="support", question=question, row=row) for id in ids])
    return list(zip(ids, deciders, strict=True))[::-1]


def test_a_page_of_marked_decisions_reads_no_record_that_it_does_not_show(store, monkeypatch):
    """However few of the marked decisions someone in particular made."""
    ids = audited(store, ["guardian" if k % 5 == 0 else "primary" for k in range(150)])
    statements, loaded, rows = [], [], Session.rows

    def noted(session, text, *values):
        if "from ledgers" in text:  # the first; a transaction that the server has ended is tried again
            statements.clear()
            loaded.clear()
        batch = rows(session, text, *values)
        statements.append(text)
        loaded.extend(batch if "d.body" in text else [])
        return batch

    monkeypatch.setattr(Session, "rows", noted)
    page = asyncio.run(
        store.run(
            stored_pages.marked_decisions,
            "audited",
            RecordFilter(policy="support", decided_by="guardian"),
            limit=25,
        )
    )
    assert [one.id for one in page.records] == [id for id, who in ids if who == "guardian"][:25]
    assert len(loaded) == 25
    assert len(statements) <= 5, statements


def test_no_filter_takes_many_more_statements_than_another(store, monkeypatch):
    """Each is a way to the server and back: with all of them on PostgreSQL, one filter once took four times another."""
    audited(store, [("primary", "guardian", "fallback")[k % 3] for k in range(180)])
    asyncio.run(stored_events.fold_tallies(store))
    statements, rows = [], Session.rows

    def noted(session, text, *values):
        statements.append(text)
        return rows(session, text, *values)

    monkeypatch.setattr(Session, "rows", noted)
    for wanted in FILTERS:
        statements.clear()
        asyncio.run(page_of(store, wanted, limit=51))
        assert len(statements) <= 10, (wanted, statements)


def test_a_search_among_marks_says_where_it_stopped_and_goes_on_from_there(store, monkeypatch):
    monkeypatch.setattr(pages, "_LOOKS", (3, 5))
    ids = audited(store, ["guardian" if k in (3, 4, 29) else "fallback" if k == 10 else "primary" for k in range(30)])
    # a decision that was recorded as the Guardian's, and that a safe action replaced
    commit(store, later(ids[25][0], CompletionBody(finish="stop", decided_by="fallback")))
    who = dict(ids) | {ids[25][0]: "fallback"}

    def every(decided_by, limit):
        found, before, looks = [], None, 0
        while looks == 0 or before is not None:
            page = asyncio.run(
                store.run(
                    stored_pages.marked_decisions,
                    "audited",
                    RecordFilter(decided_by=decided_by, before=before),
                    limit=limit,
                )
            )
            assert len(page.records) <= limit
            found += [one.id for one in page.records]
            before, looks = page.end, looks + 1
        return found, looks

    for decided_by in ("primary", "guardian", "fallback"):
        for limit in (1, 2, 50):
            found, looks = every(decided_by, limit)
            assert found == [id for id, _ in ids if who[id] == decided_by], (decided_by, limit)
            assert looks >= 3, "nothing had to go on"
