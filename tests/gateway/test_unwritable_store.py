"""A store that cannot be written: full, read-only, or moved away. No model is paid, ready says no, and reading goes on."""

import os
import pwd
import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest

from conformal_arbitrage.store import integrity
from conformal_arbitrage.store.session import PROOF_SECONDS
from tests.database_faults import fill, small_volume
from tests.gateway.house import DECISION, MENU, error_of

TWICE = 2


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", "the-secret-of-these-tests")


@contextmanager
def refused(gateway):
    """Check that a gateway refuses what it could not record, before it asks a model, and says so at ready."""
    time.sleep(1.1 * PROOF_SECONDS)  # a commit before that is proof that the next succeeds
    paid = len(gateway.primary.bodies)
    for k in range(TWICE):
        error_of(gateway.decide({**DECISION, "input": f"refused {k}"}), 503, "record_unavailable")
        error_of(gateway.chat({**MENU, "user": f"refused {k}"}), 503, "record_unavailable")
        response = {"model": "support", "input": f"refused {k}", "arbitrage": {"actions": ["a", "b", "c"]}}
        error_of(gateway.post("/v1/responses", response), 503, "record_unavailable")
        error_of(gateway.get("/health/ready"), 503, "record_unavailable")
    assert len(gateway.primary.bodies) == paid
    yield


def serves(gateway, text):
    """Check that a gateway answers and is ready."""
    reply = gateway.decide({**DECISION, "input": text})
    assert reply.status_code == 200, reply.text
    assert gateway.get("/health/ready").status_code == 200
    return reply.headers["x-arbitrage-decision-id"]


def recorded(gateway):
    return [record["id"] for record in gateway.get("/v1/arbitrage/records").json()["data"]]


def refuses_while_full(gateway, volume):
    """Check that a gateway refuses while the volume of its database is full, can be read, and goes on afterwards."""
    before = serves(gateway, "before")
    ballast = fill(volume)
    with refused(gateway):
        assert recorded(gateway) == [before]
    ballast.unlink()
    serves(gateway, "after")
    assert gateway.with_store(lambda store: integrity.verify(store)) == []
    gateway.stop()


def file_of(gateway):
    [path] = gateway.folder.glob("*.sqlite")
    return path


def test_a_database_file_that_is_moved_is_noticed_and_served_again_once_it_is_back(house):
    gateway = house()
    before = serves(gateway, "before")
    path = file_of(gateway)
    path.rename(path.with_suffix(".moved"))
    with refused(gateway):
        assert not path.exists(), "a reader created an empty database"
    path.with_suffix(".moved").rename(path)
    after = serves(gateway, "after")
    assert {record.id for record in gateway.records()} >= {before, after}


def test_a_database_file_that_is_deleted_is_noticed(house):
    gateway = house()
    serves(gateway, "before")
    file_of(gateway).unlink()
    with refused(gateway):
        error_of(gateway.get("/v1/arbitrage/records"), 503)


def test_a_database_file_that_is_replaced_is_noticed(house):
    gateway = house()
    serves(gateway, "before")
    path = file_of(gateway)
    shutil.copy(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)
    with refused(gateway):
        pass


def test_a_journal_that_is_deleted_is_noticed(house):
    gateway = house()
    serves(gateway, "before")
    file_of(gateway).with_name(file_of(gateway).name + "-wal").unlink()
    with refused(gateway):
        pass


def test_a_decision_that_reaches_a_file_that_is_moved_meanwhile_is_not_acknowledged(house):
    gateway = house()
    serves(gateway, "before")
    path, reply = file_of(gateway), gateway.primary.reply

    def moving(*call):
        path.rename(path.with_suffix(".moved"))
        return reply(*call)

    gateway.primary.reply = moving
    error_of(gateway.decide(), 503, "record_unavailable")


def test_while_the_disk_is_full_no_model_is_paid(house, tmp_path):
    with small_volume(tmp_path / "volume", 2**22) as volume:
        refuses_while_full(house(gateway={"database": str(volume / "store.db")}), volume)


def test_while_postgresql_is_read_only_no_model_is_paid_and_records_can_be_read(house, start_server, short_path):
    server = start_server(short_path)
    try:
        gateway = house(gateway={"database": server.get_uri()})
        before = serves(gateway, "before")
        server.psql("alter system set default_transaction_read_only = on;")
        server.psql("select pg_reload_conf();")
        with refused(gateway):
            assert recorded(gateway) == [before]
        (Path(server.pgdata) / "postgresql.auto.conf").write_text("")
        server.psql("select pg_reload_conf();")
        time.sleep(0.5)
        serves(gateway, "after")
        gateway.stop()
    finally:
        server.cleanup()


@pytest.fixture
def full_database(start_server, short_path):
    """A function that fills the volume of a PostgreSQL database, and the database's URL."""
    server = start_server(short_path)
    short_path.chmod(0o755)
    with small_volume(short_path / "volume", 3 * 2**23) as volume:
        space = volume / "space"
        space.mkdir()
        if server.system_user is not None:
            user = pwd.getpwnam(server.system_user)
            os.chown(space, user.pw_uid, user.pw_gid)
        with psycopg.connect(server.get_uri(), autocommit=True) as admin:
            admin.execute(f"create tablespace small location '{space}'")
            admin.execute("create database small tablespace small")
        yield volume, server.get_uri(database="small")
        server.cleanup()


def test_while_the_disk_of_postgresql_is_full_no_model_is_paid(house, full_database):
    volume, url = full_database
    refuses_while_full(house(gateway={"database": url}), volume)


@contextmanager
def locked(gateway):
    """Another process writes for as long as this lasts."""
    with closing(sqlite3.connect(file_of(gateway), isolation_level=None)) as connection:
        connection.execute("begin immediate")
        yield
        connection.execute("rollback")


def test_while_another_process_has_the_database_locked_no_model_is_paid_however_fresh_the_last_commit(house):
    gateway = house()
    serves(gateway, "before")
    paid = len(gateway.primary.bodies)
    with ThreadPoolExecutor(4) as pool:
        before = serves(gateway, "a moment before")
        with locked(gateway):
            first = [pool.submit(gateway.decide, {**DECISION, "input": f"locked {k}"}) for k in range(3)]
            for reply in first:
                error_of(reply.result(), 503, "record_unavailable")
            assert len(gateway.primary.bodies) == paid + 1
    after = serves(gateway, "after")
    assert recorded(gateway)[:2] == [after, before]
    assert gateway.with_store(lambda store: integrity.verify(store)) == []


def test_a_lock_held_for_a_moment_delays_a_request_and_refuses_none(house):
    gateway = house()
    serves(gateway, "before")
    with ThreadPoolExecutor(1) as pool:
        with locked(gateway):
            waiting = pool.submit(gateway.decide, {**DECISION, "input": "meanwhile"})
            time.sleep(0.1)
        assert waiting.result().status_code == 200
