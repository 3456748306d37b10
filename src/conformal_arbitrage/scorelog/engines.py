"""Engines: where the work on the parts of a log is done.

Work is a small value that can be pickled, called on a part; its result is small, and results are merged as they come. So
an engine is anything that runs functions on values: threads, processes, Dask's executor, or Spark.

Knows nothing of what the work is.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, runtime_checkable
from weakref import finalize

from conformal_arbitrage.errors import ArbitrageError, EngineError, OptionError
from conformal_arbitrage.scorelog.parts import ScorePart
from conformal_arbitrage.scorelog.tables import keep_database

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

_Result = TypeVar("_Result")
PassProgress = Callable[[str], None]
"""Is told, in words, what was done."""
_RESTARTS: Final = 3
_AT_ONCE: Final = 64


def silent(_: str) -> None:
    """Say nothing about progress."""


@runtime_checkable
class Engine(Protocol):
    """Runs work on parts."""

    def run(self, work: Callable[[ScorePart], _Result], parts: Sequence[ScorePart], /) -> Iterator[_Result]:
        """Yield the result of every part, in any order; raise what the work raises."""
        ...


@dataclass(frozen=True, slots=True)
class Threads:
    """Runs work on threads of this process; DuckDB and NumPy use all cores in them."""

    jobs: int

    def run(self, work: Callable[[ScorePart], _Result], parts: Sequence[ScorePart], /) -> Iterator[_Result]:
        """Yield the results as they come."""
        with ThreadPoolExecutor(self.jobs, initializer=keep_database) as pool:
            yield from completed(pool, NamedWork(work), parts, 2 * self.jobs)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Processes:
    """Runs work in processes of this machine; the parts of one that dies are done again by others.

    The processes are started with the first work, and end with this object.
    """

    jobs: int
    _pool: "ProcessPoolExecutor | None" = field(default=None, init=False, repr=False)

    def run(self, work: Callable[[ScorePart], _Result], parts: Sequence[ScorePart], /) -> Iterator[_Result]:
        """Yield the results as they come."""
        from concurrent.futures.process import BrokenProcessPool

        left = dict(enumerate(parts))
        for attempt in range(_RESTARTS + 1):
            try:
                work_left = completed(self._started(), _Numbered(NamedWork(work)), list(left.items()), 2 * self.jobs)
                for number, result in work_left:
                    del left[number]
                    yield result
            except BrokenProcessPool as error:
                self._pool = None
                if attempt == _RESTARTS:
                    raise EngineError(
                        f"processes died {attempt + 1} times; {_first_of(left)} is the first part that is not done; if "
                        "memory was short, take fewer --jobs, or smaller parts (rows_per_part=); in a script, call it under "
                        'if __name__ == "__main__":'
                    ) from error
            if not left:
                return

    def _started(self) -> "ProcessPoolExecutor":
        """Return the processes, started anew if one of them died."""
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.jobs, mp_context=context, initializer=keep_database)
            finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        return self._pool


def _first_of(left: Mapping[int, ScorePart]) -> str:
    return left[min(left)].name


@dataclass(frozen=True, slots=True)
class NamedWork(Generic[_Result]):
    """Work whose unforeseen errors name the part; what is wrong with rows names file and row already."""

    work: Callable[[ScorePart], _Result]

    def __call__(self, part: ScorePart) -> _Result:
        """Do the work."""
        try:
            return self.work(part)
        except ArbitrageError:
            raise
        except Exception as error:  # whatever it is goes on, with the name of the part
            error.add_note(f"in {part.name}")
            raise


@dataclass(frozen=True, slots=True)
class _Numbered(Generic[_Result]):
    """Work that keeps the number of its part, so that it is known which parts are done."""

    work: Callable[[ScorePart], _Result]

    def __call__(self, item: tuple[int, ScorePart]) -> tuple[int, _Result]:
        number, part = item
        return number, self.work(part)


@dataclass(frozen=True, slots=True)
class ExecutorPool:
    """Runs work on an executor of the caller's."""

    executor: Executor

    def run(self, work: Callable[[ScorePart], _Result], parts: Sequence[ScorePart], /) -> Iterator[_Result]:
        """Yield the results as they come."""
        yield from completed(self.executor, NamedWork(work), parts, _AT_ONCE)


@dataclass(frozen=True, slots=True)
class DaskWorkers:
    """Runs work on the workers of a Dask scheduler, which does the parts of one that dies again.

    Attributes:
        client: a `distributed.Client`.
    """

    client: Any

    def run(self, work: Callable[[ScorePart], _Result], parts: Sequence[ScorePart], /) -> Iterator[_Result]:
        """Yield the results as they come."""
        from distributed import KilledWorker  # pyright: ignore

        try:
            yield from completed(self.client.get_executor(), NamedWork(work), parts, _AT_ONCE)
        except KilledWorker as error:  # pyright: ignore
            raise EngineError(f"Dask gave up: {error}") from error


_Item = TypeVar("_Item")


def completed(
    pool: Executor, work: Callable[[_Item], _Result], items: Iterable[_Item], at_once: int
) -> Iterator[_Result]:
    """Yield the results of an executor as they come, with so many items submitted at a time: no list of all is kept."""
    left = iter(items)
    running: set[Future[_Result]] = {pool.submit(work, item) for item in islice(left, at_once)}
    try:
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
            running |= {pool.submit(work, item) for item in islice(left, len(done))}
    finally:
        for future in running:
            future.cancel()


def as_engine(engine: "Engine | Executor | str | None", jobs: int | None = None) -> Engine:
    """Return an engine.

    Args:
        engine: an engine; an executor; "threads" (the default), "processes", or the address of a Dask scheduler
            (tcp://...) or of Spark (sc://... for Spark Connect, local[N] or spark://... for a classic session, "spark" for
            the one that Spark's own settings describe).
        jobs: how many threads or processes; by default one for every core.
    """
    if isinstance(engine, Executor):
        return ExecutorPool(engine)
    if engine is not None and not isinstance(engine, str):
        return engine
    count = jobs or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else jobs or os.cpu_count() or 1
    if engine in (None, "threads"):
        return Threads(count)
    if engine == "processes":
        return Processes(count)
    return _remote(str(engine))


def _remote(address: str) -> Engine:
    if address.startswith(("tcp://", "tls://")):
        return _dask(address)
    from conformal_arbitrage.scorelog.spark import SparkTasks, is_spark, spark_session

    if is_spark(address):
        return SparkTasks(spark_session(address))
    raise OptionError(
        "engine must be threads, processes, spark, or an address of Dask (tcp://) or Spark (sc://, spark://, local[N]), and "
        f"a database is for table:NAME; got {address!r}"
    )


def _dask(address: str) -> DaskWorkers:
    try:
        from distributed import Client  # pyright: ignore
    except ImportError as error:
        raise OptionError(f"engine {address}: needs Dask; pip install 'conformal-arbitrage[dask]'") from error
    try:
        return DaskWorkers(Client(address))  # pyright: ignore
    except (OSError, ValueError) as error:
        raise EngineError(f"engine {address}: there is no scheduler ({error}); check the address") from error
