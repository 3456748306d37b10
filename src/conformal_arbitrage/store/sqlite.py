"""SQLiteStore: a store in one file; a thread writes, and commits all waiting jobs together.

Short reads run on the event loop over a connection of their own, long ones in two threads, so that decisions come first.
"""

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from conformal_arbitrage.errors import DamagedError, LostClaimError, StoreError
from conformal_arbitrage.store.events import Commit
from conformal_arbitrage.store.integrity import seal
from conformal_arbitrage.store.outbox import Subscriptions
from conformal_arbitrage.store.schema import check_schema, migrate
from conformal_arbitrage.store.session import (
    BAD_VALUE,
    CHANGE_COUNT,
    DOUBT_BYTES,
    PROBE_BYTES,
    PROOF_SECONDS,
    SQLITE,
    Job,
    JobMode,
    Seals,
    Session,
    Store,
    StoreSchema,
    bad_value,
)

_BUSY_TIMEOUT = 2.0
_OPEN_TIMEOUT = 10.0  # several gateways may migrate one after another
_STUCK_SECONDS = 0.5
"""A writer that has waited so long for another process turns requests away at once."""
_MOST_TOGETHER = 64
_GATHER_SECONDS = 0.0005
_CLOSE_SECONDS = 10.0
_READERS = 2
_SCAN_CACHE = 512
"""Kilobytes of pages that a long read keeps: each of its pages is looked at once or twice, and the memory is never given
back."""
_REMEDIES = {
    sqlite3.SQLITE_BUSY: "another process is writing; stop it or try again",
    sqlite3.SQLITE_LOCKED: "another process is writing; stop it or try again",
    sqlite3.SQLITE_FULL: "free some space on the disk",
    sqlite3.SQLITE_IOERR: "check the disk and its free space",
    sqlite3.SQLITE_READONLY: "let this user write to the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "name a file in a folder that exists and is writable",
    sqlite3.SQLITE_PERM: "let this user write to the file and its folder",
    sqlite3.SQLITE_NOTADB: "name a database of this package or a new file",
    sqlite3.SQLITE_CORRUPT: "restore a backup",
    sqlite3.SQLITE_CONSTRAINT: "it already exists; use another id",
}
_DAMAGE = frozenset(
    {
        0,
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_TOOBIG,
    }
)
"""Codes of errors that a damaged file causes; text that is not UTF-8 has none."""

_log = logging.getLogger("conformal_arbitrage.gateway")
_FAILURES = (sqlite3.Error, *BAD_VALUE)

_T = TypeVar("_T")
_Pending = tuple[Job[Any], "asyncio.Future[Any]"]


class SQLiteStore(Store):
    """A store in a file, for one machine; several processes may share it.

    Args:
        path: the file; created, for its owner only, if it does not exist.
        keys: sign what is stored; the first signs, all verify.
        webhooks: whom to tell of what.
        migrating: whether to bring the tables to this release; if not, they must be there.

    Raises:
        StoreError: it cannot be used.
    """

    def __init__(
        self,
        path: str | Path,
        keys: Sequence[bytes] = (),
        webhooks: Subscriptions | None = None,
        *,
        migrating: bool = True,
    ) -> None:
        super().__init__(keys, webhooks)
        self._path = Path(path)
        if not migrating and not self._path.exists():
            raise StoreError(f"{path}: there is no database yet; run `arbitrage records migrate` first")
        self._writer = _Writer(self._path, self.seals, webhooks, migrating=migrating)
        self.schema = self._writer.schema
        self._reader = _connect(self._path)
        self._session = Session(self._reader, SQLITE, self.seals)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="store reader")
        self._scanning: set[sqlite3.Connection] = set()
        self._writer.start()

    async def close(self) -> None:
        """See `Store.close`. Reads that take long are interrupted, and a disk that hangs is not waited for."""
        with suppress(StoreError):  # what cannot be signed now is signed at the next start
            await seal(self)
        self._writer.finish()
        for connection in tuple(self._scanning):
            connection.interrupt()
        await asyncio.to_thread(self._writer.join, _CLOSE_SECONDS)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._reader.close()

    async def change_count(self) -> int:
        """See `Store.change_count`. Every request reads it, so this skips the layers between."""
        self._writer.check_open()
        try:
            count, until = self._reader.execute(CHANGE_COUNT).fetchone()
            self.has_undelivered = until > 0
            return int(count)
        except _FAILURES as error:
            raise _translated(self._path, error) from error

    async def writable(self) -> int:
        """See `Store.writable`."""
        writer = self._writer
        writer.check_file()
        if time.monotonic() - writer.proven > PROOF_SECONDS or not writer.may_write():
            await writer.submit(_probe_more if writer.doubted else _probe)
        return await self.change_count()

    async def execute(self, mode: JobMode, job: Job[_T]) -> _T:
        """See `Store.execute`. Short reads run here, on the event loop."""
        if mode in ("write", "maintain"):
            return await self._writer.submit(job)
        self._writer.check_open()
        if mode == "scan":
            self._writer.check_file()
            return await asyncio.get_running_loop().run_in_executor(self._readers, self._on_snapshot, job)
        try:
            return job(self._session)
        except _FAILURES as error:
            raise _translated(self._path, error) from error

    async def scrub(self) -> None:
        """See `Store.scrub`. Removed bytes are overwritten at once; the write-ahead log still has them, and is emptied."""
        await asyncio.get_running_loop().run_in_executor(self._readers, self._empty_log)

    def _empty_log(self) -> None:
        try:
            with closing(_connect(self._path, create=False)) as connection:
                [(busy, *_)] = connection.execute("pragma wal_checkpoint(truncate)").fetchall()
        except _FAILURES as error:
            raise _translated(self._path, error) from error
        if busy:
            _log.warning(
                "%s: somebody reads an earlier state, so removed text is in its -wal file; prune again", self._path
            )

    def _on_snapshot(self, job: Job[_T]) -> _T:
        with closing(_connect(self._path, create=False)) as connection:
            self._scanning.add(connection)
            try:
                self._writer.check_open()
                session = Session(connection, SQLITE, self.seals)
                session.run(f"pragma cache_size = -{_SCAN_CACHE}")
                session.run(SQLITE.snapshot)
                return job(session)
            except _FAILURES as error:
                raise _translated(self._path, error) from error
            finally:
                self._scanning.discard(connection)


class _Writer(threading.Thread):
    """The thread that writes.

    One commit makes a whole batch durable. A batch that only appends is one statement, because each return from the
    database makes this thread wait for the interpreter, and the event loop wait for this thread. Other jobs have a
    savepoint each, so that one may fail without the others. What is committed to a file that its name no longer leads to
    fails: a restart would not find it.

    Attributes:
        proven: when something was last committed, on the monotonic clock.
        doubted: whether the last commit failed.
    """

    schema: StoreSchema

    def __init__(self, path: Path, seals: Seals, webhooks: Subscriptions | None, *, migrating: bool) -> None:
        super().__init__(name=f"store {path}", daemon=True)
        self.proven = 0.0
        self.doubted = False
        self._path = path
        self._files = (path, path.with_name(f"{path.name}-wal"))
        self._queue: SimpleQueue[_Pending | None] = SimpleQueue()
        self._connection = _connect(path, create=migrating)
        self._session = Session(self._connection, SQLITE, seals, webhooks)
        self._session.start_chain()
        self._finished = False
        self._last_batch = 0
        self._turn = threading.Lock()  # of whoever uses the connection: this thread, or the event loop for a moment
        self._waits: tuple[float, sqlite3.Error] | None = None  # since when, and for whose lock
        self._prepare(migrate if migrating else check_schema)

    def submit(self, job: Job[_T]) -> "asyncio.Future[_T]":
        """Queue a job; the future is done once the job is committed."""
        self.check_open()
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._queue.put((job, future))
        return future

    def check_open(self) -> None:
        """Refuse work after `finish`."""
        if self._finished or not self.is_alive():
            raise StoreError(f"{self._path}: the store is closed; open it again")

    def check_file(self) -> None:
        """Refuse to go on if the database is no longer where it was."""
        if _identity(self._files[0]) != self._identities[0]:
            raise self._moved()

    def may_write(self) -> bool:
        """Return whether this process has the database's write lock, or could have it now; called on the event loop.

        Raises:
            StoreError: it has been waiting for the lock, or the database cannot be written.
        """
        waits = self._waits
        if waits is not None and time.monotonic() - waits[0] > _STUCK_SECONDS:
            raise _translated(self._path, waits[1])
        if not self._turn.acquire(blocking=False):
            return waits is None  # a batch is being written
        try:
            self._connection.execute("begin immediate")
            self._connection.execute("rollback")
        except sqlite3.Error as error:
            if _is_locked(error):
                return False
            raise _translated(self._path, error) from error
        finally:
            self._turn.release()
        return True

    def _moved(self) -> StoreError:
        return StoreError(
            f"{self._path}: the file was moved, deleted or replaced while it was in use; put it back, or start the gateway "
            "again with the file that is there"
        )

    def finish(self) -> None:
        """Accept no more jobs, and stop when the queued ones are done."""
        self._finished = True
        self._queue.put(None)

    def run(self) -> None:
        """Commit batch after batch until `finish`."""
        with closing(self._connection):
            while batch := self._next_batch():
                outcomes, futures = self._guarded([job for job, _ in batch]), [future for _, future in batch]
                with suppress(RuntimeError):  # the loop is closed, so no one waits any more
                    futures[0].get_loop().call_soon_threadsafe(_resolve, futures, outcomes)

    def _guarded(self, jobs: Sequence[Job[Any]]) -> list[Any]:
        """Run jobs; after a bug in one, return an error for each."""
        try:
            return self._outcomes(jobs)
        except Exception:  # noqa: BLE001 - a bug must not end the thread, or all who have a job queued wait forever
            _log.exception("a job of the store raised an unexpected exception; its batch was rolled back")
            with self._turn:
                self._start_over()
            text = f"{self._path}: the store failed, and the log says how; nothing of this was recorded"
            return [StoreError(text) for _ in jobs]

    def _next_batch(self) -> list[_Pending]:
        """Wait for a job; return it with all others that are queued by then, or an empty list at the end.

        While jobs arrive several at a time, wait briefly for more: the time of a commit hardly depends on its size.
        """
        batch: list[_Pending] = []
        pending = self._queue.get()
        if self._last_batch > 1:
            time.sleep(_GATHER_SECONDS)
        with suppress(Empty):
            while pending is not None:
                batch.append(pending)
                pending = self._queue.get_nowait()
            self._queue.put(None)
        self._last_batch = len(batch)
        return batch

    def _commit_together(self, jobs: Sequence[Job[Any]]) -> list[Any]:
        """Run jobs in one transaction; return their results, an error for each that failed, once all is on disk."""
        with self._turn:
            try:
                return self._unlocked(jobs)
            except sqlite3.Error as error:
                self._start_over()
                return [_translated(self._path, error) for _ in jobs]

    def _unlocked(self, jobs: Sequence[Job[Any]]) -> list[Any]:
        """Run jobs once no other process writes.

        Raises:
            sqlite3.Error: the whole transaction is lost.
        """
        end = self._session.chain.end
        try:
            return self._transact(jobs)
        except sqlite3.OperationalError as error:
            if not _is_locked(error):
                raise
            self._waits = time.monotonic(), error
        self._session.chain.end = end  # nothing was written: the lock comes before the first write
        try:
            self._wait_for_others(_BUSY_TIMEOUT)
            return self._transact(jobs)
        finally:
            self._waits = None
            self._wait_for_others(0)

    def _transact(self, jobs: Sequence[Job[Any]]) -> list[Any]:
        if self._append_together(jobs):
            return [None] * len(jobs)
        self._session.run("begin immediate")
        outcomes = [self._run_in_savepoint(job) for job in jobs]
        self._session.run("commit")
        return outcomes

    def _outcomes(self, jobs: Sequence[Job[Any]]) -> list[Any]:
        """Run jobs in one transaction; note whether commits reach the file that a restart would open."""
        outcomes = self._commit_together(jobs)
        if tuple(map(_identity, self._files)) != self._identities:
            outcomes = [self._moved() for _ in jobs]
        failed = any(
            isinstance(outcome, StoreError) and not isinstance(outcome, LostClaimError) for outcome in outcomes
        )
        if failed or any(job in _PROBES or (isinstance(job, Commit) and job.events) for job in jobs):
            self.doubted, self.proven = failed, 0.0 if failed else time.monotonic()
        return outcomes

    def _append_together(self, jobs: Sequence[Job[Any]]) -> bool:
        """Run jobs that only append, if there are few, in one statement; return False if that is impossible or failed.

        Raises:
            sqlite3.OperationalError: the file is locked or the disk fails, whatever the jobs are.
        """
        commits = [job for job in jobs if isinstance(job, Commit) and job.only_appends]
        events = [event for job in commits for event in job.events]
        if len(commits) < len(jobs) or len(events) > _MOST_TOGETHER:
            return False
        try:
            self._session.append(events)
        except sqlite3.OperationalError:
            raise
        except _FAILURES:  # running each job on its own shows which one is at fault
            self._start_over()
            return False
        return True

    def _run_in_savepoint(self, job: Job[Any]) -> Any:
        """Run a job; if it fails, undo it and return the error.

        Raises:
            sqlite3.Error: the whole transaction is lost, as after a full disk.
        """
        end = self._session.chain.end
        self._session.run("savepoint job")
        try:
            outcome = job(self._session)
        except (StoreError, *_FAILURES) as error:
            self._session.run("rollback to job")
            self._session.chain.end = end
            outcome = _translated(self._path, error)
        self._session.run("release job")
        return outcome

    def _start_over(self) -> None:
        """Undo a batch and begin a new chain, since a failed commit may still have reached the disk."""
        with suppress(sqlite3.Error):
            self._connection.rollback()
        self._session.start_chain()

    def _prepare(self, migrated: Callable[[Session, str], StoreSchema]) -> None:
        try:
            self._wait_for_others(_OPEN_TIMEOUT)
            [(mode,)] = self._session.rows("pragma journal_mode = wal")
            if mode != "wal":
                raise StoreError(f"{self._path}: write-ahead logging does not work there; name a file on a local disk")
            self._session.run("begin immediate")
            self.schema = migrated(self._session, str(self._path))
            _probe(self._session)
            self._session.run("commit")
            self._wait_for_others(0)  # so that it is known whether this thread waits
            self._identities = tuple(map(_identity, self._files))
        except (StoreError, *_FAILURES) as error:
            self._connection.close()
            raise _translated(self._path, error) from error

    def _wait_for_others(self, seconds: float) -> None:
        self._connection.execute(f"pragma busy_timeout = {seconds * 1000:.0f}")


def _connect(path: Path, *, create: bool = True) -> sqlite3.Connection:
    """Open a connection that begins no transactions by itself and whose commits survive a power failure."""
    uri = f"{path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
    try:
        if create:
            with suppress(OSError):  # for its owner only, from the start; its journals take the same mode
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        connection = sqlite3.connect(
            uri, uri=True, timeout=_BUSY_TIMEOUT, isolation_level=None, check_same_thread=False
        )
        connection.execute("pragma synchronous = full")
        connection.execute("pragma secure_delete = on")
    except _FAILURES as error:
        raise _translated(path, error) from error
    return connection


def _is_locked(error: sqlite3.Error) -> bool:
    """Return whether another process holds the lock that a transaction needs."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return which file a name leads to, if any."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _probe(session: Session, size: int = PROBE_BYTES) -> None:
    """Write so many bytes."""
    session.run("insert or replace into probes (id, body) values ('', ?)", bytes(size))


def _probe_more(session: Session) -> None:
    """Write more, after a failure."""
    _probe(session, DOUBT_BYTES)


_PROBES = (_probe, _probe_more)


def _resolve(futures: Sequence["asyncio.Future[Any]"], outcomes: Sequence[Any]) -> None:
    for future, outcome in zip(futures, outcomes, strict=True):
        if future.done():  # cancelled in the meantime
            continue
        if isinstance(outcome, StoreError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _translated(path: Path, error: Exception) -> StoreError:
    if not isinstance(error, sqlite3.Error):
        return bad_value(path, error)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    remedy = _REMEDIES.get(code, "check the disk, or restore a backup")
    return (DamagedError if code in _DAMAGE else StoreError)(f"{path}: the store failed ({error}); {remedy}")
