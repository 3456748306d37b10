"""SQLJobs: how the parts of a store over SQL run their operations.

Knows nothing of what the operations do.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from conformal_arbitrage.store.dialect import Session

_T = TypeVar("_T")
Job = Callable[[Session], _T]


class SingleQuery(Struct, frozen=True):
    """A job that is one query; a server may get it in one message, with the beginning and the end of its transaction."""

    sql: str
    values: tuple[str | float | None, ...] = ()

    def __call__(self, session: Session) -> Sequence[Any]:
        """Return its rows."""
        return session.rows(self.sql, *self.values)


class SQLJobs(ABC):
    """Runs jobs, each in a transaction of its own."""

    @abstractmethod
    async def _write(self, job: Job[_T]) -> _T:
        """Run a job in a transaction of its own; return once it is committed."""

    @abstractmethod
    async def _maintain(self, job: Job[_T]) -> _T:
        """Run a job that may take long in a transaction of its own; it appends nothing."""

    @abstractmethod
    async def _read(self, job: Job[_T]) -> _T:
        """Run a query that takes microseconds."""

    @abstractmethod
    async def _scan(self, job: Job[_T]) -> _T:
        """Run queries that may take long, all on one snapshot."""
