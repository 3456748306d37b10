"""Session: one connection as the operations see it, and all that tells SQLite and PostgreSQL apart in SQL.

Statements are written once, with `?` for a value and `{integer}` for a type.

Knows nothing of threads, of transactions' limits or of what the statements mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from conformal_arbitrage.store.hash_chain import Chain


class Cursor(Protocol):
    """What a statement gave."""

    @property
    def rowcount(self) -> int:
        """How many rows it changed."""
        ...

    def fetchall(self) -> Sequence[Any]:
        """All its rows."""
        ...


class Connection(Protocol):
    """A connection of sqlite3 or psycopg; neither begins transactions by itself here."""

    def execute(self, sql: str, parameters: Sequence[Any], /) -> Cursor:
        """Run one statement."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Where the two databases differ.

    Attributes:
        placeholder: what stands for a value.
        types: the column types; text sorts by bytes.
        skip_locked: ends a select that takes rows which no other transaction holds.
        alone: waits until no one else migrates; None where writing transactions exclude each other anyway.
        snapshot: begins a transaction whose reads all see one moment.
    """

    placeholder: str
    types: Mapping[str, str]
    skip_locked: str
    alone: str | None
    snapshot: str


SQLITE = Dialect(
    placeholder="?",
    types={"text": "text", "integer": "integer", "real": "real", "bytes": "blob"},
    skip_locked="",
    alone=None,
    snapshot="begin",
)
POSTGRES = Dialect(
    placeholder="%s",
    types={"text": 'text collate "C"', "integer": "bigint", "real": "double precision", "bytes": "bytea"},
    skip_locked=" for update skip locked",
    alone="select pg_advisory_xact_lock(7364027115)",
    snapshot="begin isolation level repeatable read read only",
)


class Session:
    """A connection, its dialect and, where it writes, its chain of events."""

    def __init__(self, connection: Connection, dialect: Dialect) -> None:
        self.dialect = dialect
        self.chain = Chain()
        self._connection = connection

    def run(self, sql: str, *values: Any) -> int:
        """Run a statement; how many rows it changed."""
        return self._execute(sql, values).rowcount

    def rows(self, sql: str, *values: Any) -> Sequence[Any]:
        """Run a query; all its rows."""
        return self._execute(sql, values).fetchall()

    def define(self, sql: str) -> None:
        """Run a statement that names column types."""
        self.run(sql.format_map(self.dialect.types))

    def _execute(self, sql: str, values: Sequence[Any]) -> Cursor:
        return self._connection.execute(_rewritten(sql, self.dialect.placeholder), values)


@lru_cache(maxsize=256)
def _rewritten(sql: str, placeholder: str) -> str:
    return sql.replace("?", placeholder)
