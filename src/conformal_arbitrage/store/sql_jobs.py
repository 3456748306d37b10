"""SQLJobs: how the parts of a store over SQL run their operations.

Knows nothing of what the operations do.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from conformal_arbitrage.store.dialect import Session

_T = TypeVar("_T")
Job = Callable[[Session], _T]


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
