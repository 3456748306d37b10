"""PostgreSQL that hangs: locked, stopped or behind a pooler. Everything ends in time, and nothing acknowledged is lost."""

import asyncio
import signal

import aiohttp
import psycopg
import pytest

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store import claims, events, integrity, pages
from conformal_arbitrage.store import keys as stored_keys
from conformal_arbitrage.store import postgres as postgres_store
from conformal_arbitrage.store.claims import Claim
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.postgres import PostgresStore
from tests.database_faults import backends, crash, locked, pooled, stopped
from tests.gateway.durability import Gateway, calls_by_name, decision_request, write_config
from tests.store.facts import decide, decision

WRITE = postgres_store._WRITE  # as it is served; the fixture of the server gives it a minute

FOREVER = 60  # seconds after which something counts as hanging


@pytest.fixture
def own_server(start_server, short_path):
    """A server that this test may stop."""
    running = start_server(short_path)
    yield running
    running.cleanup()


def story_with_gateway(folder, url, story):
    """Run a story with a gateway in a process of its own and a session of calls to it."""

    async def told():
        config = write_config(folder, url, audit_rate=0)
        timeout = aiohttp.ClientTimeout(total=FOREVER)
        async with (
            Gateway(config, CALLS=str(folder / "calls")) as gateway,
            aiohttp.ClientSession(timeout=timeout) as one,
        ):
            (folder / "calls").touch()
            await story(gateway, one)

    asyncio.run(told())


async def ask(session, gateway, name):
    """The status and code of a decision."""
    path, body = decision_request(name)
    async with session.post(gateway.url + path, json=body) as reply:
        document = await reply.json()
    return reply.status, document.get("error", {}).get("code")


async def ready(session, gateway):
    async with session.get(gateway.url + "/health/ready") as reply:
        return reply.status


@pytest.mark.parametrize("table", ["changes", "events", "claims"])
def test_while_a_table_is_locked_requests_are_refused_in_time_and_afterwards_served(postgres, tmp_path, table):
    async def story(gateway, session):
        assert await ask(session, gateway, "before") == (200, None)
        path, body = decision_request("during")
        with locked(postgres, table):
            keys = [{"Idempotency-Key": str(k)} for k in range(40)]
            posts = [session.post(gateway.url + path, json=body, headers=key) for key in keys]
            replies = await asyncio.gather(*posts)
        assert {reply.status for reply in replies} == {503}
        await asyncio.sleep(0.6)
        assert await ask(session, gateway, "after") == (200, None)
        assert await ready(session, gateway) == 200

    story_with_gateway(tmp_path, postgres, story)


def test_ready_says_no_before_a_request_that_waits_for_a_locked_table_is_refused(postgres, tmp_path):
    async def story(gateway, session):
        with locked(postgres, "changes"):
            waiting = [asyncio.create_task(ask(session, gateway, f"n{k}")) for k in range(20)]
            await asyncio.sleep(0.1)
            assert await ready(session, gateway) == 503
            assert not any(task.done() for task in waiting)
            assert {await task for task in waiting} == {(503, "record_unavailable")}
        assert calls_by_name(tmp_path / "calls") == {}

    story_with_gateway(tmp_path, postgres, story)


def test_while_the_server_is_stopped_nobody_is_kept_waiting_and_afterwards_all_is_served(own_server, tmp_path):
    async def story(gateway, session):
        assert await ask(session, gateway, "before") == (200, None)
        with stopped(own_server):
            first = [asyncio.create_task(ask(session, gateway, f"n{k}")) for k in range(20)]
            await asyncio.sleep(0.1)
            assert await ready(session, gateway) == 503
            assert not any(task.done() for task in first)
            assert {await task for task in first} == {(503, "record_unavailable")}
            assert await ask(session, gateway, "later") == (503, "record_unavailable")
        await asyncio.sleep(0.6)
        assert await ask(session, gateway, "after") == (200, None)
        assert calls_by_name(tmp_path / "calls") == {"before": 1, "after": 1}

    story_with_gateway(tmp_path, own_server.get_uri(), story)


def test_sigterm_ends_the_gateway_while_the_server_is_stopped(own_server, tmp_path):
    async def story(gateway, session):
        assert await ask(session, gateway, "before") == (200, None)
        with stopped(own_server):
            waiting = [asyncio.create_task(ask(session, gateway, f"n{k}")) for k in range(10)]
            await asyncio.sleep(0.3)
            gateway.process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(gateway.process.wait(), FOREVER) == 0
            await asyncio.gather(*waiting, return_exceptions=True)

    story_with_gateway(tmp_path, own_server.get_uri(), story)


async def test_a_store_can_be_closed_while_the_server_is_stopped(own_server):
    store = PostgresStore(own_server.get_uri())
    await decide(store, 4)
    with stopped(own_server):
        calls = [
            store.run(events.commit, [decision()]),
            store.run(pages.records),
            store.change_count(),
            store.writable(),
        ]
        waiting = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)
        await asyncio.wait_for(store.close(), FOREVER)
        assert all(isinstance(outcome, StoreError) for outcome in await waiting)


async def test_a_claim_is_not_held_up_by_another_gateway_that_stopped_in_the_middle_of_a_transaction(postgres):
    store = PostgresStore(postgres)
    claim = await store.run(claims.take, "k", "n", "b", lease=0.01)
    with psycopg.connect(postgres) as other:
        other.execute("update claims set lease = lease")
        with pytest.raises(StoreError, match="holds a lock"):
            await store.run(claims.take, "k", "n", "b", lease=60)
        other.rollback()
    assert isinstance(claim, Claim)
    assert isinstance(await store.run(claims.take, "k", "n", "b", lease=60), Claim)
    await store.close()


def test_a_role_with_synchronous_commit_off_loses_no_acknowledged_decision_in_a_crash(own_server):
    url = own_server.get_uri()
    own_server.psql("alter role postgres set synchronous_commit = off;")
    own_server.psql("alter system set wal_writer_delay = '10s';")
    own_server.psql("select pg_reload_conf();")

    async def committed():
        store = PostgresStore(url)
        ids = await decide(store, 50)
        crash(own_server)
        await store.close()
        return ids

    async def left():
        async with await open_store(url) as store:
            return {record.id for record in await store.run(pages.records, limit=1000)}, await integrity.verify(store)

    ids = asyncio.run(committed())
    own_server.ensure_postgres_running()
    kept, faults = asyncio.run(left())
    assert set(ids) <= kept
    assert faults == []


def test_a_nul_in_a_path_is_not_found_and_costs_no_connection(postgres, tmp_path):
    async def story(gateway, session):
        assert await ask(session, gateway, "before") == (200, None)
        serving = backends(postgres)
        for _ in range(8):
            for path in ("records/%00", "records/a%00b/feedback", "policies/%00"):
                call = session.post if path.endswith("feedback") else session.get
                async with call(f"{gateway.url}/v1/arbitrage/{path}", json={"grade": 1}) as reply:
                    assert reply.status == 404, await reply.text()
        assert backends(postgres) >= serving

    story_with_gateway(tmp_path, postgres, story)


async def test_a_value_that_postgresql_refuses_costs_no_connection(postgres):
    store = PostgresStore(postgres, connections=1)
    await decide(store)
    serving = backends(postgres)
    with pytest.raises(StoreError, match="NUL"):
        await store.run(events.commit, [decision(policy="a\0b")])
    await store.run(stored_keys.create, id="k", sha256="f" * 64, scope="call", label="")
    with pytest.raises(StoreError, match="already exists"):
        await store.run(stored_keys.create, id="k", sha256="e" * 64, scope="call", label="")
    assert backends(postgres) == serving
    await decide(store, 3)
    assert await integrity.verify(store) == []
    await store.close()


def test_behind_a_pooler_every_operation_works(server, postgres, tmp_path):
    async def work(store, k):
        claim = await store.run(claims.take, "k", f"n{k}", "b", lease=60)
        assert isinstance(claim, Claim)
        await decide(store)
        await store.run(claims.release, claim)
        assert await store.writable() >= 0
        return len(await store.run(pages.records, pages.RecordFilter(policy="support"), limit=3))

    async def story(pool):
        stores = [PostgresStore(pool) for _ in range(3)]
        outcomes = await asyncio.gather(*(work(stores[k % 3], k) for k in range(150)), return_exceptions=True)
        assert [one for one in outcomes if isinstance(one, BaseException)] == []
        assert await integrity.verify(stores[0]) == []
        assert len(await stores[0].run(pages.records, limit=1000)) == 150
        for store in stores:
            await store.close()

    with pooled(server, postgres, tmp_path) as pool:
        asyncio.run(story(pool))


def test_behind_a_pooler_timeouts_and_durability_hold_and_do_not_stay_behind(server, postgres, tmp_path, monkeypatch):
    monkeypatch.setattr(postgres_store, "_WRITE", WRITE)

    async def story(pool):
        store = PostgresStore(pool)
        names = "statement_timeout", "lock_timeout", "synchronous_commit"
        shown = ", ".join(f"current_setting('{name}')" for name in names)
        [inside] = await store.execute("write", lambda session: session.rows(f"select {shown}"))
        assert inside == ("4s", "2s", "on")
        with locked(postgres, "events"), pytest.raises(StoreError, match="holds a lock"):
            await store.run(events.commit, [decision()])
        await decide(store)
        await store.close()
        with psycopg.connect(pool, autocommit=True) as other:
            assert other.execute(f"select {shown}").fetchone() == ("0", "0", "off")

    with psycopg.connect(postgres, autocommit=True) as admin:
        admin.execute(f"alter database {admin.info.dbname} set synchronous_commit = off")
    with pooled(server, postgres, tmp_path) as pool:
        asyncio.run(story(pool))
