import asyncio
import os
import random
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from importlib.util import find_spec

import pytest

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store import events, integrity, keys, pages, sqlite
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.postgres import PostgresStore
from conformal_arbitrage.store.record import Content, DecisionBody, new_id
from conformal_arbitrage.store.schema import MIGRATIONS
from conformal_arbitrage.store.sqlite import SQLiteStore
from tests.store.facts import decide, decision


@pytest.mark.parametrize("scheme", ["mysql", "postgresql+asyncpg", "sqlite", "POSTGRESQL"])
def test_a_url_of_another_scheme_is_no_file_and_its_password_is_not_shown(tmp_path, monkeypatch, scheme):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="is another scheme; give postgresql://") as refused:
        asyncio.run(open_store(f"{scheme}://u:secret-word@h/arbitrage"))
    assert scheme in str(refused.value)
    assert "secret-word" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("start", ["postgresql:/", "postgresql:", "mysql:", ""])
def test_a_url_without_its_slashes_is_no_file_either(tmp_path, start):
    with pytest.raises(StoreError, match="looks like a mistyped URL") as refused:
        asyncio.run(open_store(tmp_path / f"{start}u:secret-word@h"))
    assert "secret-word" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("round", range(5))
async def test_a_killed_process_loses_no_commit_that_returned(where, opened, round):
    command = [sys.executable, "-m", "tests.store.committer", where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        ids = [child.stdout.readline().strip()]
        time.sleep(random.Random(round).uniform(0.01, 0.4))
        os.kill(child.pid, signal.SIGKILL)
        ids += child.stdout.read().split()
    store = opened(where)
    assert len(ids[0]) == 26
    for id in ids:
        if len(id) == 26:  # the last line may be truncated
            assert (await store.run(pages.record, id)).completion.finish == "stop"
    assert await integrity.verify(store) == []
    await decide(store, 3)
    assert await integrity.verify(store) == []


def test_a_newer_schema_is_refused(store, where, sql, opened):
    newest = len(MIGRATIONS)
    assert sql("select version from schema_version") == [(newest,)]
    sql("update schema_version set version = 99, readable_by = 98")
    with pytest.raises(
        StoreError, match=f"takes a release that knows 98, and this release knows {newest}; upgrade conformal-arbitrage"
    ):
        opened(where)


async def test_many_gateways_can_open_a_new_database_at_once(where):
    stores = await asyncio.gather(*(open_store(where) for _ in range(6)))
    await asyncio.gather(*(decide(store) for store in stores))
    assert len(await stores[0].run(pages.records)) == 6
    for store in stores:
        await store.close()


async def test_a_closed_store_refuses_calls_and_can_be_closed_twice(store):
    pending = [asyncio.ensure_future(store.run(events.commit, [decision()])) for _ in range(20)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*pending)
    for call in (store.run(events.commit, []), store.change_count(), store.run(pages.records)):
        with pytest.raises(StoreError, match="closed"):
            await call
    await store.close()


def test_a_file_that_cannot_be_a_database_is_refused(tmp_path):
    (tmp_path / "text").write_text("not a database, but long enough to look at" * 9)
    for name, remedy in (
        ("text", "name a database"),
        ("absent/s.db", "a folder that exists"),
        (".", "a folder that exists"),
    ):
        with pytest.raises(StoreError, match=remedy) as caught:
            SQLiteStore(tmp_path / name)
        assert str(tmp_path) in str(caught.value)


async def test_a_locked_file_fails_commits_until_it_is_unlocked(tmp_path, opened):
    path = str(tmp_path / "s.db")
    store = opened(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin immediate")
        outcomes = await asyncio.gather(
            *(store.run(events.commit, [decision()]) for _ in range(5)), return_exceptions=True
        )
        assert all("another process is writing" in str(outcome) for outcome in outcomes)
        assert await store.run(pages.records) == []
        other.execute("rollback")
    await decide(store, 3)
    assert await integrity.verify(store) == []


def test_a_locked_file_delays_a_commit_only_once(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(sqlite, "_BUSY_TIMEOUT", 2.0)
    path = str(tmp_path / "s.db")
    store = opened(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin immediate")
        started = time.monotonic()
        with pytest.raises(StoreError, match="another process is writing"):
            asyncio.run(store.run(events.commit, [decision()]))
        assert 1.9 < time.monotonic() - started < 3.9


async def test_a_full_disk_fails_whole_commits_until_there_is_space(tmp_path, opened):
    store = opened(str(tmp_path / "s.db"))
    kept = await decide(store, 3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(file.stat().st_size for file in tmp_path.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100_000, limits[1]))
    try:
        commits = [
            store.run(events.commit, [decision(new_id(), body=DecisionBody(content=Content(answer="y" * 50_000)))])
            for _ in range(8)
        ]
        outcomes = await asyncio.gather(*commits, return_exceptions=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(outcomes[-1], StoreError)
    assert "s.db: the store failed" in str(outcomes[-1])
    kept += await decide(store, 3)
    ids = [record.id for record in await store.run(pages.records)]
    assert set(kept) <= set(ids)
    assert len(ids) == len(kept) + outcomes.count(None)
    assert await integrity.verify(store) == []


def test_postgresql_without_psycopg_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"\.\[postgres\]"):
        asyncio.run(open_store("postgresql://localhost/x"))


@pytest.mark.skipif(find_spec("psycopg") is None, reason="psycopg is not installed: pip install '.[postgres]'")
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:hunter2@127.0.0.1:1/db",
        "postgres://ann@127.0.0.1:1/db?password=hunter2",
        "postgresql://ann:hunter2%zz@127.0.0.1:1/db",
        "postgresql://ann:hunter2@127.0.0.1:1/db?hunter2=hunter2",
    ],
)
def test_no_error_repeats_a_password(url):
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        asyncio.run(open_store(url))
    error = caught.value
    while error is not None:
        assert "hunter2" not in str(error)
        error = error.__cause__
    assert time.monotonic() - started < 30


async def test_a_lost_connection_is_replaced_silently(postgres, opened, server):
    store = opened(postgres)
    await decide(store, 8)
    name = postgres.split("/")[3].split("?")[0]
    server.psql(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}';")
    await decide(store, 8)
    assert len(await store.run(pages.records)) == 16
    assert await integrity.verify(store) == []


@pytest.mark.parametrize("silent", [False, True])
def test_while_the_server_is_unreachable_calls_fail_quickly(start_server, short_path, silent):
    server = start_server(short_path)

    async def story():
        store = PostgresStore(server.get_uri())
        kept = await decide(store, 8)
        place = server.get_postmaster_info().socket_path
        server.stop()
        with closing(socket.socket(socket.AF_UNIX)) as listener:
            if silent:  # it accepts connections and never replies
                listener.bind(str(place))
                listener.listen(64)
            started = time.monotonic()
            outcomes = await asyncio.gather(
                *(store.run(events.commit, [decision()]) for _ in range(50)), return_exceptions=True
            )
        assert all(isinstance(outcome, StoreError) for outcome in outcomes)
        assert time.monotonic() - started < 30  # of 50 calls that could each wait two seconds
        place.unlink(missing_ok=True)
        server.ensure_postgres_running()
        await asyncio.sleep(0.6)
        kept += await decide(store, 8)
        assert [record.id for record in await store.run(pages.records)] == kept[::-1]
        assert await integrity.verify(store) == []
        await store.close()

    try:
        asyncio.run(story())
    finally:
        server.cleanup()


def test_a_database_without_a_table_raises_a_store_error(store, sql):
    sql("drop table changes")
    sql("drop table keys")
    for call in (store.change_count(), store.run(keys.find, "f" * 64), store.run(keys.list_all)):
        with pytest.raises(StoreError, match="the store failed"):
            asyncio.run(call)


async def test_a_fault_of_ours_in_one_job_leaves_nobody_waiting(tmp_path, opened):
    store = opened(str(tmp_path / "store.db"))

    def faulty(session):
        raise ZeroDivisionError

    with pytest.raises(StoreError, match="the store failed, and the log says how"):
        await asyncio.wait_for(store.execute("write", faulty), 10)
    assert list(await asyncio.wait_for(store.execute("write", lambda session: session.rows("select 1")), 10)) == [(1,)]


async def test_what_a_faulty_job_wrote_is_not_committed_with_the_next_one(store):
    def faulty(session):
        session.run("insert into probes (id, body) values ('half', ?)", b"")
        raise ZeroDivisionError

    for _ in range(8):  # on every connection of a pool
        with pytest.raises((StoreError, ZeroDivisionError)):
            await asyncio.wait_for(store.execute("write", faulty), 30)
    await asyncio.gather(*(store.execute("write", lambda session: session.rows("select 1")) for _ in range(16)))
    assert (
        list(await store.execute("read", lambda session: session.rows("select id from probes where id = 'half'"))) == []
    )


async def test_a_writer_that_has_been_waiting_for_a_lock_turns_requests_away_at_once(tmp_path, monkeypatch, opened):
    monkeypatch.setattr(sqlite, "_BUSY_TIMEOUT", 30.0)
    monkeypatch.setattr(sqlite, "_STUCK_SECONDS", 0.0)
    store = opened(str(tmp_path / "s.db"))
    [before] = await decide(store)
    with closing(sqlite3.connect(tmp_path / "s.db", isolation_level=None)) as other:
        other.execute("begin immediate")
        first = asyncio.ensure_future(store.writable())
        while store._writer._waits is None:
            await asyncio.sleep(0.001)
        with pytest.raises(StoreError, match="another process is writing"):
            await store.writable()
        assert not first.done()
        other.execute("rollback")
    await first  # which goes on once the lock is gone
    [after] = await decide(store)
    assert [record.id for record in await store.run(pages.records)] == [after, before]
    assert await integrity.verify(store) == []
    assert await store.execute("read", lambda session: session.rows("select distinct writer from events")) == [
        (store._writer._session.chain.writer,)
    ]
