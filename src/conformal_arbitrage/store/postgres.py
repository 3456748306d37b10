"""PostgresStore: a database that several gateways share; a few threads, each with a connection of its own.

Reads that may take long have threads and connections of their own, so that decisions never wait for them.

Knows nothing of what is stored.
"""

import asyncio
import os
import random
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from msgspec import Struct

from conformal_arbitrage.errors import LostClaimError, StoreError
from conformal_arbitrage.store.base import Subscriptions
from conformal_arbitrage.store.connections import LockedError, LostError, PostgresServer, TimedConnection, Transaction
from conformal_arbitrage.store.dialect import POSTGRES, Session
from conformal_arbitrage.store.schema import MIGRATIONS, StoreSchema, check_schema, migrate
from conformal_arbitrage.store.sql import CHANGE_COUNT, Commit
from conformal_arbitrage.store.sql_jobs import Job, SingleQuery
from conformal_arbitrage.store.sql_store import DOUBT_BYTES, PROBE_BYTES, PROOF_SECONDS, SQLStore

_WRITE = Transaction(begin="begin", statement=4.0, whole=4.0)
_READ = Transaction(begin="begin read only", statement=4.0, whole=4.0)
_SCAN = Transaction(begin=POSTGRES.snapshot, statement=30.0, whole=30.0, unlimited=True)
_MAINTAIN = Transaction(begin="begin", statement=600.0, lock=600.0, whole=30.0, unlimited=True)
_MIGRATE = Transaction(begin="begin", statement=600.0, lock=1.0, whole=30.0, unlimited=True)
_MIGRATION_SECONDS = 600.0
_CLOSE_SECONDS = 10.0

_COUNT = SingleQuery(CHANGE_COUNT)
_COUNT_IF_WRITABLE = SingleQuery(
    "select count, undelivered_until, current_setting('transaction_read_only') from changes"
)

_T = TypeVar("_T")


class PostgresStore(SQLStore):
    """A store in PostgreSQL.

    Args:
        url: postgresql://USER:PASSWORD@HOST:PORT/DATABASE
        connections: how many operations run at the same time.
        readers: how many long reads run at the same time, beside them.
        keys: sign what is stored; the first signs, all verify.
        webhooks: whom to tell of what.
        migrating: whether to bring the tables to this release; if not, they must be there.

    Raises:
        StoreError: psycopg is not installed, or the database cannot be used.
    """

    def __init__(
        self,
        url: str,
        connections: int = 4,
        readers: int = 2,
        keys: Sequence[bytes] = (),
        webhooks: Subscriptions | None = None,
        *,
        migrating: bool = True,
    ) -> None:
        super().__init__(keys, webhooks)
        self._server = PostgresServer(url, self._seals)
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="store")
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="store reader")
        self._local = threading.local()
        self._closed = False
        self._proven = 0.0
        self._doubted = False
        self._probing: asyncio.Task[None] | None = None
        try:
            place = self._server.name
            if migrating and not self._at_once(_is_current, _WRITE):
                self.schema = self._migrated(place)
            else:
                self.schema = self._at_once(partial(check_schema, location=place), _WRITE)
        except StoreError:
            self._shut_down()
            raise

    def _migrated(self, place: str) -> StoreSchema:
        """Bring the tables to this release, at the first attempt that gets every lock within a second.

        Who waits for a lock holds up all who come after: behind a backup, gateways could not write until it has ended.
        """
        due = time.monotonic() + _MIGRATION_SECONDS
        while True:
            try:
                return self._at_once(partial(migrate, location=place), _MIGRATE)
            except LockedError:
                if time.monotonic() > due:
                    raise
                time.sleep(random.uniform(0.5, 1.5))  # in which those who waited go on

    def _at_once(self, job: Job[_T], kind: Transaction) -> _T:
        return self._threads.submit(self._run, job, kind, time.monotonic() + kind.whole).result()

    async def close(self) -> None:
        """See `Store.close`. Pending operations end in time; reads that take longer are cut off."""
        with suppress(StoreError):  # what cannot be signed now is signed at the next start
            await self.seal()
        self._closed = True
        cutting = threading.Timer(_CLOSE_SECONDS, self._server.cut)
        cutting.start()
        try:
            await asyncio.to_thread(self._shut_down)
        finally:
            cutting.cancel()

    def _shut_down(self) -> None:
        self._threads.shutdown()
        self._readers.shutdown()
        self._server.disconnect()

    async def change_count(self) -> int:
        """See `Store.change_count`. Every request reads it, so this is one message to the server."""
        [(count, until)] = await self._submit(self._threads, _COUNT, _READ)
        self.has_undelivered = until > 0
        return int(count)

    async def writable(self) -> int:
        """See `Store.writable`."""
        [(count, until, read_only)] = await self._submit(self._threads, _COUNT_IF_WRITABLE, _WRITE)
        self.has_undelivered = until > 0
        if read_only == "on":
            raise StoreError(
                f"{self._server.name}: the database is read-only; make it writable, or name the server that accepts writes"
            )
        if time.monotonic() - self._proven > PROOF_SECONDS:
            await self._probe_once()
        return int(count)

    async def _probe_once(self) -> None:
        """Write something, unless another request is doing so: then wait for that."""
        if self._probing is None or self._probing.done():
            size = DOUBT_BYTES if self._doubted else PROBE_BYTES
            self._probing = asyncio.create_task(self._write(_Probe(size)))
        await asyncio.shield(self._probing)

    async def _write(self, job: Job[_T]) -> _T:
        try:
            outcome = await self._submit(self._threads, job, _WRITE)
        except LostClaimError:
            raise
        except StoreError:
            self._proven, self._doubted = 0.0, True
            raise
        if isinstance(job, _Probe) or (isinstance(job, Commit) and job.events):
            self._proven, self._doubted = time.monotonic(), False
        return outcome

    async def _maintain(self, job: Job[_T]) -> _T:
        return await self._submit(self._readers, job, _MAINTAIN)

    async def _read(self, job: Job[_T]) -> _T:
        return await self._submit(self._threads, job, _READ)

    async def _scan(self, job: Job[_T]) -> _T:
        return await self._submit(self._readers, job, _SCAN)

    async def _submit(self, threads: ThreadPoolExecutor, job: Job[_T], kind: Transaction) -> _T:
        """Run a job in one of these threads; it ends in time, since those before it do."""
        if self._closed:
            raise StoreError(f"{self._server.name}: the store is closed; open it again")
        due = time.monotonic() + kind.whole
        return await asyncio.get_running_loop().run_in_executor(threads, self._run, job, kind, due)

    def _run(self, job: Job[_T], kind: Transaction, due: float) -> _T:
        """Run a job on this thread's connection, or on a new one if that broke since its last use."""
        if time.monotonic() > due:
            raise StoreError(f"{self._server.name}: the server is too slow for what it is asked; try again later")
        connection: TimedConnection | None = getattr(self._local, "connection", None)
        if connection is not None and connection.open:
            with suppress(LostError):
                return self._run_on(connection, job, kind, due)
        connection = self._local.connection = self._server.connect()
        return self._run_on(connection, job, kind, due)

    def _run_on(self, connection: TimedConnection, job: Job[_T], kind: Transaction, due: float) -> _T:
        try:
            return connection.run(job, kind, due)
        finally:
            if connection.was_cut:
                self._server.rest()


class _Probe(Struct, frozen=True):
    """Lock what a commit locks, write so many bytes, which cannot be compressed, and remove them again."""

    size: int

    def __call__(self, session: Session) -> None:
        """Run within the transaction of a session."""
        session.run("lock table events, claims, audits in row exclusive mode")
        id = secrets.token_hex(8)
        session.run("insert into probes (id, body) values (?, ?)", id, os.urandom(self.size))
        session.run("delete from probes where id = ?", id)


def _is_current(session: Session) -> bool:
    """Return whether a database has the tables of this release, without waiting for whoever migrates it."""
    [(exists,)] = session.rows(session.dialect.has_schema)
    return exists and session.rows("select version from schema_version") == [(len(MIGRATIONS),)]
