"""Releases that share a database: what an earlier one may work with, and what it must leave alone."""

import asyncio
import re

import pytest

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store import integrity, pages, schema
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.postgres import PostgresStore
from conformal_arbitrage.store.schema import ADDITIVE, MIGRATIONS
from tests.store.facts import decide


def next_step(session):
    """A migration of the next release."""
    session.define("create table notes (id {text} primary key, body {text})")
    session.define("alter table claims add column note {text}")


def as_release(patch, steps, additive=ADDITIVE):
    """Be the release that knows these migrations."""
    for module in ("schema", "postgres"):
        patch.setattr(f"conformal_arbitrage.store.{module}.MIGRATIONS", steps)
    patch.setattr(schema, "ADDITIVE", additive)


def opened_by_next_release(where, monkeypatch, additive):
    async def story():
        async with await open_store(where) as store:
            await decide(store, 2)
            schema = store.schema
        return schema

    with monkeypatch.context() as patch:
        as_release(patch, (*MIGRATIONS, next_step), additive)
        return asyncio.run(story())


def test_a_release_works_with_the_tables_of_the_next_one_if_these_were_only_added(where, monkeypatch):
    asyncio.run(written(where, 1))
    schema = opened_by_next_release(where, monkeypatch, ADDITIVE | {next_step})
    assert (schema.before, schema.version) == (len(MIGRATIONS), len(MIGRATIONS) + 1)
    assert schema.readable_by <= len(MIGRATIONS)
    assert asyncio.run(written(where, 1)) == 4
    assert asyncio.run(written(where, 1, migrating=False)) == 5


async def written(where, count, **options):
    """Record decisions; return how many there are then, after a check of the chains."""
    async with await open_store(where, **options) as store:
        await decide(store, count)
        total = len(await store.run(pages.records))
        assert await integrity.verify(store) == []
    return total


def test_a_release_refuses_tables_that_were_changed_since_and_says_what_to_do(where, monkeypatch):
    schema = opened_by_next_release(where, monkeypatch, ADDITIVE)
    newest = len(MIGRATIONS)
    assert schema.readable_by == newest + 1
    for migrating in (True, False):
        with pytest.raises(
            StoreError,
            match=f"schema version {newest + 1}, which takes a release that knows {newest + 1}, and this release knows "
            f"{newest}; upgrade conformal-arbitrage",
        ):
            asyncio.run(open_store(where, migrating=migrating))


def test_a_later_release_migrates_a_database_with_its_data_and_says_since_when_it_is_readable(where, sql, monkeypatch):
    asyncio.run(written(where, 1))
    assert sql("select version, readable_by from schema_version") == [(1, 1)]
    as_release(monkeypatch, (*MIGRATIONS, next_step), ADDITIVE | {next_step})
    with pytest.raises(StoreError, match="schema version 1, and this release needs 2; run `arbitrage records migrate`"):
        asyncio.run(open_store(where, migrating=False))
    assert asyncio.run(written(where, 1)) == 2
    assert sql("select version, readable_by from schema_version") == [(2, 1)]
    assert sql("select count(*) from notes") == [(0,)]


def test_without_migrating_an_empty_database_is_refused(where):
    with pytest.raises(StoreError, match="arbitrage records migrate"):
        asyncio.run(open_store(where, migrating=False))


def step_on_events(session):
    """A migration that takes a lock on what every decision writes."""
    session.define("alter table events add column note {text}")


async def test_a_migration_that_waits_for_a_backup_does_not_keep_decisions_waiting(postgres, monkeypatch):
    psycopg = pytest.importorskip("psycopg")
    waiting = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    async with await open_store(postgres) as store:
        with psycopg.connect(postgres) as backup, psycopg.connect(postgres, autocommit=True) as other:
            backup.execute("lock table events in access share mode")  # as pg_dump has on every table
            as_release(monkeypatch, (*MIGRATIONS, step_on_events))
            migrating = asyncio.create_task(asyncio.to_thread(PostgresStore, postgres))
            while not other.execute(waiting).fetchall():
                assert not migrating.done()
                await asyncio.sleep(0.01)
            await decide(store)
            backup.rollback()
            later = await migrating
        await decide(store)
        schema, total = later.schema, len(await store.run(pages.records))
        await later.close()
    assert (schema.version, total) == (len(MIGRATIONS) + 1, 2)


class Recorded:
    """A session that only notes what it is told to do."""

    def __init__(self):
        self.statements = []

    def define(self, *statements):
        self.statements.extend(statements)

    run = define


def test_additive_migrations_only_add():
    assert set(MIGRATIONS) >= ADDITIVE
    assert {migration: not_additive(migration) for migration in (next_step, *ADDITIVE) if not_additive(migration)} == {}


def not_additive(migration):
    """The statements of a migration that an earlier release might stumble over."""
    session, added, columns = Recorded(), set(), set()
    migration(session)
    wrong = []
    for statement in session.statements:
        table = re.match(r"create table (\w+) ", statement)
        added |= {table[1]} if table else set()
        column = re.match(r"alter table (\w+) add column (\w+) (.*)", statement)
        columns |= {column.group(1, 2)} if column else set()
        plain = re.match(r"create index \w+ on ", statement)
        filled = re.match(r"insert into (\w+) ", statement)
        own = re.match(r"update (\w+) set (\w+) = [^,]* where ", statement)
        harmless = column is not None and ("not null" not in column[3] or "default" in column[3])
        new = (filled and filled[1] in added) or (own and own.group(1, 2) in columns)
        if not (table or plain or harmless or new):
            wrong.append(statement)
    return wrong


@pytest.mark.parametrize(
    "statement",
    [
        "drop table audits",
        "create unique index one_name on keys (label)",
        "alter table keys add column note {text} not null",
        "update audits set lease = 0",
        "alter table keys drop column label",
        "insert into keys (id) values ('x')",
    ],
)
def test_what_is_not_additive_is_found(statement):
    assert not_additive(lambda session: session.define(statement)) == [statement]
