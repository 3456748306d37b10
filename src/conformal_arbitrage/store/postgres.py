"""PostgresStore: a database that several gateways share; a few threads, each with a connection of its own.

Knows nothing of what is stored.
"""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from conformal_arbitrage.errors import DamagedError, StoreError
from conformal_arbitrage.store.dialect import POSTGRES, Session
from conformal_arbitrage.store.hash_chain import Checkpoint
from conformal_arbitrage.store.migrations import migrate
from conformal_arbitrage.store.seals import Seals
from conformal_arbitrage.store.sql_store import BAD_VALUE, Job, SQLStore, bad_value

_TIMEOUTS = {"connect_timeout": "2", "tcp_user_timeout": "2000", "keepalives_idle": "10"}
"""How long to wait for an unresponsive server; parameters in the URL take precedence."""

_RETRY_PAUSE = 0.5
"""Seconds after a failed connection in which no other is tried."""

_REMEDIES = {
    None: "check that the server is running and that the URL is right",
    "23505": "it already exists; use another id",
    "53100": "free some space on the server's disk",
}

_DAMAGE = frozenset({"XX001", "XX002"})

_T = TypeVar("_T")


class _LostError(StoreError):
    """The connection broke before anything could have been committed."""


class PostgresStore(SQLStore):
    """A store in PostgreSQL.

    Args:
        url: postgresql://USER:PASSWORD@HOST:PORT/DATABASE
        connections: how many operations run at the same time.
        keys: sign what is stored; the first signs, all verify.

    Raises:
        StoreError: psycopg is not installed, or the database cannot be used.
    """

    def __init__(self, url: str, connections: int = 4, keys: Sequence[bytes] = ()) -> None:
        super().__init__(keys)
        self._server = _Server(url, self._seals)
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="store")
        self._local = threading.local()
        self._closed = False
        try:
            self._threads.submit(self._run, partial(migrate, location=self._server.name), "begin").result()
        except StoreError:
            self._threads.shutdown()
            self._server.disconnect()
            raise

    async def close(self) -> None:
        """See `Store.close`."""
        with suppress(StoreError):  # what cannot be signed now is signed at the next start
            await self.seal()
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown)
        self._server.disconnect()

    async def _write(self, job: Job[_T]) -> _T:
        return await self._submit(job, "begin")

    async def _read(self, job: Job[_T]) -> _T:
        return await self._submit(job, None)

    async def _scan(self, job: Job[_T]) -> _T:
        return await self._submit(job, POSTGRES.snapshot)

    async def _submit(self, job: Job[_T], begin: str | None) -> _T:
        if self._closed:
            raise StoreError(f"{self._server.name}: the store is closed; open it again")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, job, begin)

    def _run(self, job: Job[_T], begin: str | None) -> _T:
        """Run a job on this thread's connection, or on a new one if that broke since its last use."""
        writer: _Writer | None = getattr(self._local, "writer", None)
        if writer is not None and writer.open:
            with suppress(_LostError):
                return writer.run(job, begin)
        writer = self._local.writer = self._server.connect()
        return writer.run(job, begin)


class _Writer:
    """One connection with its chain of events, in use until it breaks or a statement fails."""

    def __init__(self, connection: Any, error: type[Exception], name: str, seals: Seals) -> None:
        self._connection = connection
        self._error = error
        self._name = name
        self._session = Session(connection, POSTGRES, seals)
        self._session.start_chain()

    @property
    def open(self) -> bool:
        """Whether it is usable, as far as is known."""
        return not self._connection.closed

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def run(self, job: Job[_T], begin: str | None) -> _T:
        """Run a job, in the transaction that `begin` starts or without one."""
        end, committing = self._session.chain.end, False
        try:
            if begin is None:
                return job(self._session)
            self._session.run(begin)
            outcome = job(self._session)
            committing = True
            self._session.run("commit")
        except (StoreError, *BAD_VALUE) as error:
            self._undo(end)
            raise bad_value(self._name, error) from None
        except self._error as error:
            lost = not self.open and not committing
            self.close()  # and with it the chain, since its end may be unknown
            damaged = getattr(error, "sqlstate", None) in _DAMAGE
            raise (_LostError if lost else DamagedError if damaged else StoreError)(
                _message(self._name, error)
            ) from error
        return outcome

    def _undo(self, end: Checkpoint) -> None:
        self._session.chain.end = end
        with suppress(self._error):  # then the connection is closed and not used again
            self._session.run("rollback")


class _Server:
    """The address of the database, and the connections to it."""

    def __init__(self, url: str, seals: Seals) -> None:
        self._seals = seals
        self._psycopg = _import_psycopg()
        self._parameters = _parameters(self._psycopg, url)
        address = {"host": "localhost", "port": "5432", "dbname": "", **self._parameters}
        self.name = f"{address['host']}:{address['port']}/{address['dbname']}"
        self._lock = threading.Lock()
        self._writers: list[_Writer] = []
        self._unreachable_until = 0.0

    def connect(self) -> _Writer:
        """Open a connection.

        Raises:
            StoreError: the server is unreachable; after about 2 seconds, or at once if the last attempt just failed.
        """
        if time.monotonic() < self._unreachable_until:
            raise StoreError(
                f"{self.name}: the server was unreachable a moment ago; start it, or wait until it is back"
            )
        try:
            connection = self._psycopg.connect(**self._parameters, autocommit=True)
        except self._psycopg.Error as error:
            self._unreachable_until = time.monotonic() + _RETRY_PAUSE
            raise StoreError(_message(self.name, error)) from error
        writer = _Writer(connection, self._psycopg.Error, self.name, self._seals)
        with self._lock:
            self._writers = [*(known for known in self._writers if known.open), writer]
        return writer

    def disconnect(self) -> None:
        """Close all connections."""
        for writer in self._writers:
            writer.close()


def _import_psycopg() -> Any:
    try:
        return import_module("psycopg")
    except ImportError as error:
        raise StoreError("PostgreSQL needs psycopg; run `pip install 'conformal-arbitrage[postgres]'`") from error


def _parameters(psycopg: Any, url: str) -> Mapping[str, Any]:
    """Parse a URL; the error does not repeat it, since it may contain a password."""
    try:
        return {**_TIMEOUTS, **psycopg.conninfo.conninfo_to_dict(url)}
    except psycopg.Error:
        raise StoreError(
            "the URL of the database is malformed; write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, "
            "with %XX for special characters"
        ) from None


def _message(name: str, error: Exception) -> str:
    remedy = _REMEDIES.get(getattr(error, "sqlstate", None), "see the server's log")
    return f"{name}: the store failed ({' '.join(str(error).split())}); {remedy}"
