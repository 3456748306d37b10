"""SQLiteStore: one file; a thread writes, and commits together whatever waits for it.

Short reads run on the event loop, over a connection of their own; long ones in the thread pool.

Knows nothing of what is written.
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store.dialect import SQLITE, Session
from conformal_arbitrage.store.hash_chain import Chain
from conformal_arbitrage.store.migrations import migrate
from conformal_arbitrage.store.shared import UNUSABLE, Job, SQLStore, T, unusable
from conformal_arbitrage.store.sql import Commit, append

_PATIENCE = 2.0
_TOGETHER = 64
_MOMENT = 0.0005
_REMEDIES = {
    sqlite3.SQLITE_BUSY: "another process is writing; stop it or try again",
    sqlite3.SQLITE_LOCKED: "another process is writing; stop it or try again",
    sqlite3.SQLITE_FULL: "free some space on the disk",
    sqlite3.SQLITE_IOERR: "check the disk and the space left on it",
    sqlite3.SQLITE_READONLY: "let this user write to the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "name a file in a folder that exists and may be written",
    sqlite3.SQLITE_PERM: "let this user write to the file and its folder",
    sqlite3.SQLITE_NOTADB: "name a database of this package or a new file",
    sqlite3.SQLITE_CORRUPT: "restore a copy",
    sqlite3.SQLITE_CONSTRAINT: "it is there already; use another id",
}
_FAILURES = (sqlite3.Error, *UNUSABLE)

_Waiting = tuple[Job[Any], "asyncio.Future[Any]"]


class SQLiteStore(SQLStore):
    """A store in a file, for one machine; several processes may share it.

    Args:
        path: the file; made if absent.

    Raises:
        StoreError: it cannot be used.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._path = Path(path)
        self._writer = _Writer(self._path)
        self._reader = _open(self._path)
        self._session = Session(self._reader, SQLITE)
        self._writer.start()

    async def close(self) -> None:
        """Finish what is under way and let go."""
        self._writer.finish()
        await asyncio.to_thread(self._writer.join)
        self._reader.close()

    async def _write(self, job: Job[T]) -> T:
        return await self._writer.submit(job)

    async def _read(self, job: Job[T]) -> T:
        self._writer.check_open()
        try:
            return job(self._session)
        except _FAILURES as error:
            raise _translated(self._path, error) from error

    async def _scan(self, job: Job[T]) -> T:
        self._writer.check_open()
        return await asyncio.to_thread(self._on_snapshot, job)

    def _on_snapshot(self, job: Job[T]) -> T:
        with closing(_open(self._path)) as connection:
            try:
                session = Session(connection, SQLITE)
                session.run(SQLITE.snapshot)
                return job(session)
            except _FAILURES as error:
                raise _translated(self._path, error) from error


class _Writer(threading.Thread):
    """The thread that writes.

    One commit makes all of a batch durable. Decisions alone are one statement: whenever this thread comes back from the
    database it waits for the interpreter, and the event loop for it. Other jobs have a savepoint each, so that one may
    fail without the others.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(name=f"store {path}", daemon=True)
        self._path = path
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._connection = _open(path)
        self._session = Session(self._connection, SQLITE)
        self._finished = False
        self._crowd = 0
        self._prepare()

    def submit(self, job: Job[T]) -> "asyncio.Future[T]":
        """Queue a job; the future is done once it is committed."""
        self.check_open()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put((job, future))
        return future

    def check_open(self) -> None:
        """Refuse work after `finish`."""
        if self._finished or not self.is_alive():
            raise StoreError(f"{self._path}: the store is closed; open it again")

    def finish(self) -> None:
        """Take no more jobs; end when those queued are done."""
        self._finished = True
        self._queue.put(None)

    def run(self) -> None:
        """Commit batch after batch until told to finish."""
        with closing(self._connection):
            while batch := self._take():
                outcomes = self._together([job for job, _ in batch])
                futures = [future for _, future in batch]
                with suppress(RuntimeError):  # the loop is gone, and with it whoever asked
                    futures[0].get_loop().call_soon_threadsafe(_resolve, futures, outcomes)

    def _take(self) -> list[_Waiting]:
        """Wait for a job; it and all others that are there by now, none at the end.

        If jobs come several at a time, a moment is left for more to join: what a commit takes hardly depends on how many.
        """
        batch: list[_Waiting] = []
        waiting = self._queue.get()
        if self._crowd > 1:
            time.sleep(_MOMENT)
        with suppress(Empty):
            while waiting is not None:
                batch.append(waiting)
                waiting = self._queue.get_nowait()
            self._queue.put(None)
        self._crowd = len(batch)
        return batch

    def _together(self, jobs: Sequence[Job[Any]]) -> list[Any]:
        """What each job gave, an error where it failed, once all is on disk."""
        try:
            if self._appended(jobs):
                return [None] * len(jobs)
            self._session.run("begin immediate")
            outcomes = [self._alone(job) for job in jobs]
            self._session.run("commit")
        except sqlite3.Error as error:
            self._start_afresh()
            return [_translated(self._path, error) for _ in jobs]
        return outcomes

    def _appended(self, jobs: Sequence[Job[Any]]) -> bool:
        """Do jobs that only append, and few, in one statement; False if they are others, or one is at fault.

        Raises:
            sqlite3.OperationalError: the file is locked or the disk fails, whatever the jobs are.
        """
        commits = [job for job in jobs if isinstance(job, Commit) and job.only_appends]
        events = [event for job in commits for event in job.events]
        if len(commits) < len(jobs) or len(events) > _TOGETHER:
            return False
        try:
            append(self._session, events)
        except sqlite3.OperationalError:
            raise
        except _FAILURES:  # which job is at fault shows when each is on its own
            self._start_afresh()
            return False
        return True

    def _alone(self, job: Job[Any]) -> Any:
        """What a job gave; if it fails, an error, and nothing of it stays.

        Raises:
            sqlite3.Error: the whole transaction is gone, as after a full disk.
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

    def _start_afresh(self) -> None:
        """Undo a batch; a new chain begins, since a commit that failed may yet have reached the disk."""
        with suppress(sqlite3.Error):
            self._connection.rollback()
        self._session.chain = Chain()

    def _prepare(self) -> None:
        try:
            [(mode,)] = self._session.rows("pragma journal_mode = wal")
            if mode != "wal":
                raise StoreError(f"{self._path}: write-ahead logging does not work there; name a file on a local disk")
            self._session.run("begin immediate")
            migrate(self._session, str(self._path))
            self._session.run("commit")
        except (StoreError, sqlite3.Error) as error:
            self._connection.close()
            raise _translated(self._path, error) from error


def _open(path: Path) -> sqlite3.Connection:
    """A connection that begins no transactions by itself and whose commits survive a power failure."""
    try:
        connection = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
        connection.execute("pragma synchronous = full")
    except sqlite3.Error as error:
        raise _translated(path, error) from error
    return connection


def _resolve(futures: Sequence["asyncio.Future[Any]"], outcomes: Sequence[Any]) -> None:
    for future, outcome in zip(futures, outcomes, strict=True):
        if future.done():  # cancelled meanwhile
            continue
        if isinstance(outcome, StoreError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _translated(path: Path, error: Exception) -> StoreError:
    if not isinstance(error, sqlite3.Error):
        return unusable(path, error)
    remedy = _REMEDIES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "check the disk, or restore a copy")
    return StoreError(f"{path}: the store failed ({error}); {remedy}")
