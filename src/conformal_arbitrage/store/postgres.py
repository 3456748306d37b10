"""PostgresStore: a database that several gateways share; a few threads, each with a connection of its own.

Knows nothing of what is written.
"""

import asyncio
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store.dialect import POSTGRES, Session
from conformal_arbitrage.store.hash_chain import Checkpoint
from conformal_arbitrage.store.migrations import migrate
from conformal_arbitrage.store.shared import UNUSABLE, Job, SQLStore, T, unusable

_LIMITS = {"connect_timeout": "2", "tcp_user_timeout": "2000", "keepalives_idle": "10"}
"""How long a silent server is waited for; the URL may say otherwise."""

_PAUSE = 0.5
"""Seconds after a failed connection in which no other is tried."""

_REMEDIES = {
    None: "check that the server runs and that the URL is right",
    "23505": "it is there already; use another id",
    "53100": "free some space on the server's disk",
}


class _LostError(StoreError):
    """The connection broke before anything could have been committed."""


class PostgresStore(SQLStore):
    """A store in PostgreSQL.

    Args:
        url: postgresql://USER:PASSWORD@HOST:PORT/DATABASE
        connections: how many operations run at the same time.

    Raises:
        StoreError: psycopg is absent, or the database cannot be used.
    """

    def __init__(self, url: str, connections: int = 4) -> None:
        super().__init__()
        self._server = _Server(url)
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="store")
        self._local = threading.local()
        self._closed = False
        try:
            self._threads.submit(self._do, partial(migrate, where=self._server.name), "begin").result()
        except StoreError:
            self._threads.shutdown()
            self._server.hang_up()
            raise

    async def close(self) -> None:
        """Finish what is under way and let go."""
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown)
        self._server.hang_up()

    async def _write(self, job: Job[T]) -> T:
        return await self._hand_over(job, "begin")

    async def _read(self, job: Job[T]) -> T:
        return await self._hand_over(job, None)

    async def _scan(self, job: Job[T]) -> T:
        return await self._hand_over(job, POSTGRES.snapshot)

    async def _hand_over(self, job: Job[T], begin: str | None) -> T:
        if self._closed:
            raise StoreError(f"{self._server.name}: the store is closed; open it again")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._do, job, begin)

    def _do(self, job: Job[T], begin: str | None) -> T:
        """Run a job on this thread's connection; if that broke since it was last used, on a new one."""
        line: _Line | None = getattr(self._local, "line", None)
        if line is not None and line.open:
            with suppress(_LostError):
                return line.run(job, begin)
        line = self._local.line = self._server.connect()
        return line.run(job, begin)


class _Line:
    """One connection: a writer with its chain, until it breaks or a statement fails."""

    def __init__(self, connection: Any, error: type[Exception], name: str) -> None:
        self._connection = connection
        self._error = error
        self._name = name
        self._session = Session(connection, POSTGRES)

    @property
    def open(self) -> bool:
        """Whether it can still be used, as far as is known."""
        return not self._connection.closed

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def run(self, job: Job[T], begin: str | None) -> T:
        """Run a job within a transaction, or without one."""
        end, committing = self._session.chain.end, False
        try:
            if begin is None:
                return job(self._session)
            self._session.run(begin)
            outcome = job(self._session)
            committing = True
            self._session.run("commit")
        except (StoreError, *UNUSABLE) as error:
            self._undo(end)
            raise unusable(self._name, error) from None
        except self._error as error:
            lost = not self.open and not committing
            self.close()  # and with it the writer, since the end of its chain may be unknown
            raise (_LostError if lost else StoreError)(_failure(self._name, error)) from error
        return outcome

    def _undo(self, end: Checkpoint) -> None:
        self._session.chain.end = end
        with suppress(self._error):  # then the line is closed and not used again
            self._session.run("rollback")


class _Server:
    """Where the database is and how to connect to it."""

    def __init__(self, url: str) -> None:
        self._psycopg = _psycopg()
        self._parameters = _parameters(self._psycopg, url)
        said = {"host": "localhost", "port": "5432", "dbname": "", **self._parameters}
        self.name = f"{said['host']}:{said['port']}/{said['dbname']}"
        self._lock = threading.Lock()
        self._lines: list[_Line] = []
        self._away_until = 0.0

    def connect(self) -> _Line:
        """A new line.

        Raises:
            StoreError: the server is away, within about 2 seconds; at once if that was found out just now.
        """
        if time.monotonic() < self._away_until:
            raise StoreError(f"{self.name}: the server was away a moment ago; start it, or wait until it is back")
        try:
            connection = self._psycopg.connect(**self._parameters, autocommit=True)
        except self._psycopg.Error as error:
            self._away_until = time.monotonic() + _PAUSE
            raise StoreError(_failure(self.name, error)) from error
        line = _Line(connection, self._psycopg.Error, self.name)
        with self._lock:
            self._lines = [*(known for known in self._lines if known.open), line]
        return line

    def hang_up(self) -> None:
        """Close all lines."""
        for line in self._lines:
            line.close()


def _psycopg() -> Any:
    try:
        return import_module("psycopg")
    except ImportError as error:
        raise StoreError("PostgreSQL needs psycopg; run `pip install 'conformal-arbitrage[postgres]'`") from error


def _parameters(psycopg: Any, url: str) -> Mapping[str, Any]:
    """What a URL says; an error does not repeat it, since a password is in it."""
    try:
        return {**_LIMITS, **psycopg.conninfo.conninfo_to_dict(url)}
    except psycopg.Error:
        raise StoreError(
            "the URL of the database cannot be read; write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, "
            "with %XX for special characters"
        ) from None


def _failure(name: str, error: Exception) -> str:
    remedy = _REMEDIES.get(getattr(error, "sqlstate", None), "see the server's log")
    return f"{name}: the store failed ({' '.join(str(error).split())}); {remedy}"
