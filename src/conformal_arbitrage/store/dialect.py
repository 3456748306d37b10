"""Session: one connection as the operations see it, with the differences between SQLite and PostgreSQL in SQL.

Statements are written once, with `?` for a value and `{integer}` for a column type.

Knows nothing of threads, of where transactions begin and end, or of what the statements mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from conformal_arbitrage.store.hash_chain import Chain
from conformal_arbitrage.store.seals import Seals


class Cursor(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int:
        """How many rows it changed."""
        ...

    def fetchall(self) -> Sequence[Any]:
        """Return all its rows."""
        ...


class Connection(Protocol):
    """A connection of sqlite3 or psycopg, in a mode in which it begins no transactions by itself."""

    def execute(self, sql: str, parameters: Sequence[Any], /) -> Cursor:
        """Run one statement."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The differences between the two databases.

    Attributes:
        placeholder: the mark for a value.
        types: the column types; text sorts by bytes.
        skip_locked: the clause that makes a select lock its rows and skip those that other transactions hold.
        migration_lock: waits until no one else migrates; None where writing transactions exclude each other anyway.
        has_schema: the query for whether a database has been migrated before.
        snapshot: begins a transaction whose reads all see the same state.
        now: the database's time as an expression, in seconds since 1970.
    """

    placeholder: str
    types: Mapping[str, str]
    skip_locked: str
    migration_lock: str | None
    has_schema: str
    snapshot: str
    now: str


SQLITE = Dialect(
    placeholder="?",
    types={"text": "text", "integer": "integer", "real": "real", "bytes": "blob"},
    skip_locked="",
    migration_lock=None,
    has_schema="select count(*) from sqlite_master where name = 'schema_version'",
    snapshot="begin",
    now="((julianday('now') - 2440587.5) * 86400.0)",
)
POSTGRES = Dialect(
    placeholder="%s",
    types={"text": 'text collate "C"', "integer": "bigint", "real": "double precision", "bytes": "bytea"},
    skip_locked=" for update skip locked",
    migration_lock="select pg_advisory_xact_lock(7364027115)",
    has_schema="select to_regclass('schema_version') is not null",
    snapshot="begin isolation level repeatable read read only",
    now="extract(epoch from clock_timestamp())::double precision",
)


class Session:
    """A connection, its dialect, the keys that sign what is stored and, if it writes, its chain of events.

    Attributes:
        began: the database's time at the start of the transaction, where starting one tells it.
    """

    def __init__(self, connection: Connection, dialect: Dialect, seals: Seals) -> None:
        self.dialect = dialect
        self.seals = seals
        self.chain = Chain()
        self.began: float | None = None
        self._connection = connection

    def start_chain(self) -> None:
        """Begin to write a chain of its own."""
        self.chain = self.seals.chain()

    def run(self, sql: str, *values: Any) -> int:
        """Run a statement; return how many rows it changed."""
        return self._execute(sql, values).rowcount

    def rows(self, sql: str, *values: Any) -> Sequence[Any]:
        """Run a query; return all its rows."""
        return self._execute(sql, values).fetchall()

    def now(self) -> float:
        """Return the database's time, in seconds since 1970; all gateways that share a database go by it."""
        return self.began or float(self.rows(f"select {self.dialect.now}")[0][0])

    def define(self, *statements: str) -> None:
        """Run statements that name column types."""
        for sql in statements:
            self.run(sql.format_map(self.dialect.types))

    def _execute(self, sql: str, values: Sequence[Any]) -> Cursor:
        return self._connection.execute(with_placeholders(sql, self.dialect.placeholder), values)


@lru_cache(maxsize=256)
def with_placeholders(sql: str, placeholder: str) -> str:
    """Return a statement with a database's own placeholders in place of question marks."""
    if placeholder != "?":
        sql = sql.replace("%", "%%").replace("?", placeholder)
    return sql
