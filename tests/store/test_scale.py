"""Pages of decisions cost as many steps of the database over many records as over few: counted, not timed.

SCALE_ROWS sets how many records there are: 40,000 unless given; `make console-checks` takes a million.
"""

import asyncio
import os
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass

import pytest

from conformal_arbitrage.store import events
from conformal_arbitrage.store.ledger import LedgerKey, NewRow
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import MenuQuestion, id_at
from conformal_arbitrage.store.session import Session
from tests.store.facts import decision
from tests.store.test_console import FILTERS, GUARDIAN, PRIMARY, body, commit, page_of

pytestmark = pytest.mark.proof
FEW, MANY = 4000, int(os.environ.get("SCALE_ROWS", "40000"))
RARE = [
    {"policy": "rare"},
    {"policy": "rare", "decided_by": "guardian"},
    {"policy": "rare", "decided_by": "guardian", "since": 1.0, "until": 4e9},
    {"mark": "audited", "policy": "rare"},
    {"mark": "no guarantee", "policy": "rare"},
    {"mark": "audited", "decided_by": "fallback"},
]
FILL = """
insert into events (writer, seq, hash, id, kind, at, body, policy, key_id, decided_by)
with recursive n(k) as (select 1 union all select k + 1 from n where k < :rows)
select 'filled', k, '', :prefix || printf('%016d', k), 'decision', :at + k * 0.001,
(select body from events where decided_by = 'primary' limit 1), 'support', 'k1', iif(k % 3, 'primary', 'guardian') from n"""
FILL_LEDGER = """
insert into ledger (ledger, seq, id, drawn, due, change)
select (select number from ledgers where policy = 'support'), 1000 + seq, id, at, at, seq from events
where writer = 'filled' and seq % 2 = 0"""
STEP = 10


@dataclass
class Filled:
    """A store with many decisions of one policy, made by SQL, after a few of another."""

    store: object
    path: str

    def steps(self, text, *values):
        """How many steps of its machine SQLite takes for a query."""
        count = 0

        def step():
            nonlocal count
            count += STEP

        with closing(sqlite3.connect(self.path)) as connection:
            connection.set_progress_handler(step, STEP)
            connection.execute(text, values).fetchall()
        return count

    def queries(self, wanted, monkeypatch):
        """What the store asks the database for a page."""
        queries, rows = [], Session.rows

        def noted(session, text, *values):
            queries.append((text, *values))
            return rows(session, text, *values)

        with monkeypatch.context() as watching:
            watching.setattr(Session, "rows", noted)
            assert asyncio.run(page_of(self.store, wanted)), wanted
        return [query for query in queries if query[0].startswith(("select", "with"))]


@pytest.fixture
def filled(tmp_path, opened):
    def fill(rows):
        path = str(tmp_path / f"{rows}.db")
        store = opened(path)
        for policy in ("rare", "support"):
            key, legs = LedgerKey(policy=policy, version=1, identities_sha256="i"), (PRIMARY, GUARDIAN)
            for who, facts in (("primary", {"audited": True}), ("guardian", {}), ("fallback", {"no_guarantee": "so"})):
                event = decision(body=body(*legs, **facts), policy=policy, decided_by=who)
                row = NewRow(key=key, drawn=1.0, due=2.0)
                question = MenuQuestion(context="?", actions=("a", "b"))
                commit(store, event, audits=[Audit(id=event.id, policy=policy, question=question, row=row)])
        asyncio.run(events.fold_tallies(store))
        now = time.time() + 60
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("pragma synchronous = off")
            connection.execute(FILL, {"rows": rows, "prefix": id_at(now)[:10], "at": now})
            connection.execute(FILL_LEDGER)
            connection.execute("analyze")
        return Filled(store, path)

    return fill


def test_no_filter_takes_more_steps_where_there_are_many_decisions(filled, monkeypatch):
    few, many = filled(FEW), filled(MANY)
    unknown = "select id from events where kind = 'decision' and body like '%nothing%' order by id desc limit 50"
    assert many.steps(unknown) > 5 * few.steps(unknown)  # what has no index is found
    for wanted in (*FILTERS, *RARE):
        counts = [sum(one.steps(*query) for query in one.queries(wanted, monkeypatch)) for one in (few, many)]
        assert counts[1] < 1.5 * counts[0] + 500, (wanted, counts)
