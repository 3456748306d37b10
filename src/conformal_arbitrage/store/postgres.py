"""PostgresStore: a database that several gateways share; connections whose operations end in time."""

import asyncio
import math
import os
import random
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeVar, cast

from msgspec import Struct

from conformal_arbitrage.errors import DamagedError, LostClaimError, StoreError
from conformal_arbitrage.store.events import Commit
from conformal_arbitrage.store.integrity import seal
from conformal_arbitrage.store.outbox import Subscriptions
from conformal_arbitrage.store.schema import MIGRATIONS, check_schema, migrate
from conformal_arbitrage.store.session import (
    BAD_VALUE,
    CHANGE_COUNT,
    DOUBT_BYTES,
    POSTGRES,
    PROBE_BYTES,
    PROOF_SECONDS,
    Checkpoint,
    Job,
    JobMode,
    Seals,
    Session,
    SingleQuery,
    Store,
    StoreSchema,
    bad_value,
    with_placeholders,
)

# --- Connections to PostgreSQL whose operations end in time, whatever the server does ---


_DEFAULTS = {
    "connect_timeout": "2",
    "tcp_user_timeout": "2000",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
}
"""How long to wait for an unresponsive server or network; parameters in the URL take precedence."""

_RETRY_PAUSE = 0.5
"""Seconds after a failed connection in which no other is tried."""

_IDLE_SECONDS = 15.0
_GRACE = 0.5
"""Seconds by which the watchdog waits longer than the server was told to."""

_LOCKED = "55P03"
_REMEDIES = {
    None: "check that the server is running and that the URL is right",
    "23505": "it already exists; use another id",
    "25006": "the database is read-only; make it writable, or name the server that accepts writes",
    "53100": "free some space on the server's disk",
    _LOCKED: "another session holds a lock; find it in pg_stat_activity and end it",
    "57014": "the server is too slow, or another session holds a lock; see pg_stat_activity",
}
_DAMAGE = frozenset({"XX001", "XX002"})
_HARMLESS = ("22", "23", _LOCKED, "57014")
"""States of errors after which a connection is as good as before: bad data, broken constraints, timeouts."""

_T = TypeVar("_T")


class LostError(StoreError):
    """The connection broke before anything could have been committed."""


class LockedError(StoreError):
    """Another session held a lock for longer than this one may wait; nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """How a transaction begins, and how long it may take.

    Attributes:
        begin: the statement that begins it.
        statement: seconds for one statement.
        lock: seconds of it to wait for a lock.
        whole: seconds for all of it, the wait for a connection included; the wait alone counts if it is unlimited.
        unlimited: whether it may take as long as it needs, as long as each statement ends in time.
    """

    begin: str
    statement: float
    whole: float
    lock: float = 2.0
    unlimited: bool = False

    @property
    def prelude(self) -> str:
        """The first message of the transaction, which returns the database's time.

        A role or a database may have synchronous_commit off, and what was acknowledged would be lost in a crash.
        """
        return (
            f"{self.begin}; select set_config('statement_timeout', '{self.statement * 1000:.0f}', true), "
            f"set_config('lock_timeout', '{self.lock * 1000:.0f}', true), "
            f"set_config('idle_in_transaction_session_timeout', '{_IDLE_SECONDS * 1000:.0f}', true), "
            "set_config('synchronous_commit', case current_setting('synchronous_commit') when 'off' then 'on' "
            "else current_setting('synchronous_commit') end, true), extract(epoch from clock_timestamp())::float8"
        )


class TimedConnection:
    """One connection with its chain of events, in use until it breaks or a statement fails badly."""

    def __init__(self, connection: Any, psycopg: Any, name: str, seals: Seals, webhooks: Subscriptions | None) -> None:
        self._connection = connection
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))  # stays ours if the driver closes its own
        self._psycopg = psycopg
        self._name = name
        self._session = Session(self, POSTGRES, seals, webhooks)
        self._session.start_chain()
        self._due = self._until = math.inf
        self._statement = 0.0
        self.was_cut = False

    @property
    def open(self) -> bool:
        """Whether it is usable, as far as is known."""
        return not self._connection.closed

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
        self._socket.close()

    def cut_if_late(self, now: float) -> None:
        """Cut the connection if a statement has not ended in time; the thread that waits for it gets an error."""
        if now > self._until:
            self.cut()

    def cut(self) -> None:
        """Cut the connection."""
        self.was_cut = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def execute(self, sql: str, parameters: Sequence[Any] | None = ()) -> Any:
        """Run one statement, in time; without parameters it is sent as it is, and may be several."""
        self._until = min(self._due, time.monotonic() + self._statement) + _GRACE
        try:
            return self._connection.execute(sql, parameters)
        finally:
            self._until = math.inf

    def run(self, job: Job[_T], kind: Transaction, due: float) -> _T:
        """Run a job in a transaction of its own, until `due`.

        Raises:
            LostError: nothing was committed, and another connection may do better.
            StoreError: it failed, or did not end in time.
        """
        self._due, self._statement = (math.inf if kind.unlimited else due), kind.statement
        end, committing = self._session.chain.end, False
        try:
            if isinstance(job, SingleQuery):
                return self._whole(cast("SingleQuery[_T]", job), kind)
            self._begin(self.execute(kind.prelude))
            outcome = job(self._session)
            committing = True
            self.execute("commit")
        except (StoreError, *BAD_VALUE) as error:
            self._undo(end)
            raise bad_value(self._name, error) from None
        except self._psycopg.Error as error:
            raise self._after(error, end, committing=committing) from error
        finally:
            self._close_unfinished()
        return outcome

    def _close_unfinished(self) -> None:
        """Close a connection whose transaction is still open after a bug in a job: the next one would commit it."""
        if self.open and self._connection.info.transaction_status != self._psycopg.pq.TransactionStatus.IDLE:
            self.close()

    def _begin(self, cursor: Any) -> None:
        cursor.nextset()
        self._session.began = cursor.fetchone()[-1]

    def _whole(self, query: SingleQuery[_T], kind: Transaction) -> _T:
        """Run a transaction of one query in one message, with its values as literals."""
        sql = with_placeholders(query.sql, POSTGRES.placeholder)
        text = self._psycopg.ClientCursor(self._connection).mogrify(sql, query.values)
        cursor = self.execute(f"{kind.prelude}; {text}; commit", None)
        self._begin(cursor)
        cursor.nextset()
        return query.read(cursor.fetchall())

    def _after(self, error: Exception, end: Checkpoint, *, committing: bool) -> StoreError:
        """Return what a failure means; the connection stays in use if it is as good as before."""
        state = getattr(error, "sqlstate", None)
        bad_data = state is None and isinstance(error, self._psycopg.DataError)
        if self.open and not committing and (bad_data or (state or "").startswith(_HARMLESS)):
            self._undo(end)
            return (LockedError if state == _LOCKED else StoreError)(message(self._name, error))
        lost = not self.open and not committing and not self.was_cut
        self.close()  # and with it the chain, since its end may be unknown
        if self.was_cut:
            return StoreError(
                f"{self._name}: the server did not answer in time; check that it is running and not locked"
            )
        return (LostError if lost else DamagedError if state in _DAMAGE else StoreError)(message(self._name, error))

    def _undo(self, end: Checkpoint) -> None:
        self._session.chain.end = end
        try:
            self.execute("rollback")
        except self._psycopg.Error:
            self.close()


class PostgresServer:
    """The address of the database, and the connections to it.

    Args:
        url: postgresql://USER:PASSWORD@HOST:PORT/DATABASE
        webhooks: whom to tell of what.

    Raises:
        StoreError: psycopg is not installed, or the URL is malformed.
    """

    def __init__(self, url: str, seals: Seals, webhooks: Subscriptions | None) -> None:
        self._seals = seals
        self._webhooks = webhooks
        self._psycopg = _import_psycopg()
        self._parameters = _parameters(self._psycopg, url)
        address = {"host": "localhost", "port": "5432", "dbname": "", **self._parameters}
        self.name = f"{address['host']}:{address['port']}/{address['dbname']}"
        self._lock = threading.Lock()
        self._connections: list[TimedConnection] = []
        self._unreachable_until = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name=f"watchdog {self.name}", daemon=True).start()

    def connect(self) -> TimedConnection:
        """Open a connection; nothing is prepared in it, since a pooler may give each transaction another server process.

        Raises:
            StoreError: the server is unreachable; after about 2 seconds, or at once if the last attempt just failed.
        """
        if time.monotonic() < self._unreachable_until:
            raise StoreError(
                f"{self.name}: the server was unreachable a moment ago; start it, or wait until it is back"
            )
        try:
            connection = self._psycopg.connect(**self._parameters, autocommit=True, prepare_threshold=None)
        except self._psycopg.Error as error:
            self.rest()
            raise StoreError(message(self.name, error)) from error
        timed = TimedConnection(connection, self._psycopg, self.name, self._seals, self._webhooks)
        with self._lock:
            self._connections = [*(known for known in self._connections if known.open), timed]
        return timed

    def rest(self) -> None:
        """Let the next connections fail at once, so that what is queued does not wait in turn."""
        self._unreachable_until = time.monotonic() + _RETRY_PAUSE

    def disconnect(self) -> None:
        """Close all connections."""
        self._closed.set()
        for connection in self._connections:
            connection.close()

    def cut(self) -> None:
        """Cut all connections, so that whoever waits for one gets an error."""
        for connection in self._connections:
            connection.cut()

    def _watch(self) -> None:
        while not self._closed.wait(0.2):
            for connection in self._connections:
                connection.cut_if_late(time.monotonic())


def _import_psycopg() -> Any:
    try:
        return import_module("psycopg")
    except ImportError as error:
        raise StoreError("PostgreSQL needs psycopg; run `pip install '.[postgres]'` in a clone") from error


def _parameters(psycopg: Any, url: str) -> Mapping[str, Any]:
    """Parse a URL; the error does not repeat it, since it may contain a password.

    A password with an unquoted / or @ would be read as a host or a database, and printed as such.
    """
    try:
        if re.search("[/@]", url.partition("://")[2].partition("?")[0].rpartition("@")[0]):
            raise psycopg.ProgrammingError
        return {**_DEFAULTS, **psycopg.conninfo.conninfo_to_dict(url)}
    except psycopg.Error:
        raise StoreError(
            "the URL of the database is malformed; write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, "
            "with %XX for special characters"
        ) from None


def message(name: str, error: Exception) -> str:
    """Return what went wrong at a server, and what to do."""
    remedy = _REMEDIES.get(getattr(error, "sqlstate", None), "see the server's log")
    return f"{name}: the store failed ({' '.join(str(error).split())}); {remedy}"


# --- PostgresStore ---


_WRITE = Transaction(begin="begin", statement=4.0, whole=4.0)
_READ = Transaction(begin="begin read only", statement=4.0, whole=4.0)
_SCAN = Transaction(begin=POSTGRES.snapshot, statement=30.0, whole=30.0, unlimited=True)
_MAINTAIN = Transaction(begin="begin", statement=600.0, lock=600.0, whole=30.0, unlimited=True)
_MIGRATE = Transaction(begin="begin", statement=600.0, lock=1.0, whole=30.0, unlimited=True)
_MIGRATION_SECONDS = 600.0
_CLOSE_SECONDS = 10.0

_COUNT = SingleQuery(CHANGE_COUNT, (), lambda rows: rows[0])
_COUNT_IF_WRITABLE = SingleQuery(
    "select count, undelivered_until, current_setting('transaction_read_only') from changes", (), lambda rows: rows[0]
)


class PostgresStore(Store):
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
        self._server = PostgresServer(url, self.seals, webhooks)
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
            await seal(self)
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
        count, until = await self._submit(self._threads, _COUNT, _READ)
        self.has_undelivered = until > 0
        return int(count)

    async def writable(self) -> int:
        """See `Store.writable`."""
        count, until, read_only = await self._submit(self._threads, _COUNT_IF_WRITABLE, _WRITE)
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
            self._probing = asyncio.create_task(self.execute("write", _Probe(size)))
        await asyncio.shield(self._probing)

    async def execute(self, mode: JobMode, job: Job[_T]) -> _T:
        """See `Store.execute`."""
        if mode == "write":
            return await self._write(job)
        if mode == "read":
            return await self._submit(self._threads, job, _READ)
        return await self._submit(self._readers, job, _SCAN if mode == "scan" else _MAINTAIN)

    async def scrub(self) -> None:
        """See `Store.scrub`: files, logs and archives belong to the server."""

    async def _write(self, job: Job[_T]) -> _T:
        """Run a job, and note whether it proves that commits succeed."""
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
