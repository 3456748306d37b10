"""Sessions, and the operations that stores run in them.

An operation is a function of a session, the body of one short transaction, the same for SQLite and PostgreSQL. Statements
are written once, with `?` for a value and `{integer}` for a column type. Leases and expiry go by the database's clock, so
gateways whose clocks disagree can share one.
"""

import copy
import hashlib
import hmac
import secrets
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, Protocol, Self, TypeVar

import msgspec
from msgspec import Struct

from conformal_arbitrage.errors import DamagedError, StoreError
from conformal_arbitrage.store.record import DecisionRecord, Event

if TYPE_CHECKING:
    from conformal_arbitrage.store.outbox import Subscriptions

# --- Dialects ---


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
        check: the query for what the database finds wrong with its own files; None where there is none.
    """

    placeholder: str
    types: Mapping[str, str]
    skip_locked: str
    migration_lock: str | None
    has_schema: str
    snapshot: str
    now: str
    check: str | None


SQLITE = Dialect(
    placeholder="?",
    types={"text": "text", "integer": "integer", "real": "real", "bytes": "blob"},
    skip_locked="",
    migration_lock=None,
    has_schema="select count(*) from sqlite_master where name = 'schema_version'",
    snapshot="begin",
    now="((julianday('now') - 2440587.5) * 86400.0)",
    check="pragma integrity_check(20)",
)
POSTGRES = Dialect(
    placeholder="%s",
    types={"text": 'text collate "C"', "integer": "bigint", "real": "double precision", "bytes": "bytea"},
    skip_locked=" for update skip locked",
    migration_lock="select pg_advisory_xact_lock(7364027115)",
    has_schema="select to_regclass('schema_version') is not null",
    snapshot="begin isolation level repeatable read read only",
    now="extract(epoch from clock_timestamp())::double precision",
    check=None,
)


# --- Chains and seals ---
#
# A hash covers the previous hash and the event as it is stored, with its writer, number and time. It is keyed if the writer
# had a key, so that no one without it can append or rewrite; the writer's name begins with the key's fingerprint then. A
# seal is a signature over a row, so that whoever can write to the database alone cannot change it unnoticed; it names its
# key by a fingerprint, so that records from before a rotation of the secret can still be checked.

_lenient = msgspec.json.Encoder(enc_hook=str)  # a damaged row may hold anything


class Link(NamedTuple):
    """An event as it is stored; without a body, the tombstone of a pruned one."""

    writer: str
    seq: int
    hash: str
    id: str
    kind: str
    at: float
    body: str | None
    policy: str | None
    key_id: str | None
    decided_by: str | None

    def digest(self, previous: str, key: bytes | None = None) -> str:
        """Return the hash this event must have if it follows that hash."""
        content = _lenient.encode([previous, *self[:2], *self[3:]])
        if key is None:
            return hashlib.sha256(content).hexdigest()
        return hashlib.blake2b(content, key=key, digest_size=32).hexdigest()


class StoredLink(NamedTuple):
    """A link with the seal of whatever replaced the event: a tombstone, or the event without its content."""

    link: Link
    seal: str | None


class Checkpoint(NamedTuple):
    """Where a writer's chain starts: after the last event that was pruned without a tombstone."""

    seq: int = 0
    hash: str = ""


class Chain:
    """The chain of one writer: its random id and its last event.

    Args:
        name: fingerprint of the key.
        key: makes hashes that only its holders can make; None for plain ones.
    """

    def __init__(self, name: str = "", key: bytes | None = None) -> None:
        self.writer = secrets.token_hex(8) if key is None else f"{name}-{secrets.token_hex(8)}"
        self.end = Checkpoint()
        self._key = key

    def append(self, event: Event, body: str, at: float) -> Link:
        """Return the next event; reset `end` if its transaction fails."""
        seq, previous = self.end.seq + 1, self.end.hash
        fields = (event.id, event.body.kind, at, body, event.policy, event.key_id, event.decided_by)
        digest = Link(self.writer, seq, "", *fields).digest(previous, self._key)
        self.end = Checkpoint(seq, digest)
        return Link(self.writer, seq, digest, *fields)


LINK = "writer, seq, hash, id, kind, at, body, policy, key_id, decided_by"
CHUNK = 500
"""How many rows a long operation handles at a time."""


class Seals:
    """Signs rows and checks them; starts the chains of one process and knows how far each is signed.

    Args:
        keys: the first signs, all verify. Without keys nothing is signed, and nothing that was can be checked.

    Attributes:
        signed: number of the last event under a signed head, by writer, for the chains of this process.
    """

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = {_fingerprint(key): key for key in keys}
        self._chains: dict[str, weakref.ref[Chain]] = {}
        self.signed: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Return whether there are keys."""
        return bool(self._keys)

    def chain(self) -> Chain:
        """Start a chain, keyed if there are keys."""
        name, key = next(iter(self._keys.items()), ("", None))
        chain = Chain(name, key)
        if key is not None:
            self._chains[chain.writer] = weakref.ref(chain)
            self.signed[chain.writer] = 0
        return chain

    def note_signed(self, writer: str, seq: int, *, complete: bool) -> None:
        """Note how far a chain of this process is signed; forget one that has ended and is signed to its end."""
        self.signed[writer] = seq
        if complete and self._chains[writer]() is None:
            del self._chains[writer], self.signed[writer]

    def key_of(self, writer: str) -> bytes | None:
        """Return the key behind a writer's hashes.

        Raises:
            KeyError: it is keyed with a secret that is not among these.
        """
        name, dash, _ = writer.partition("-")
        return self._keys[name] if dash else None

    def sign(self, kind: str, *values: object) -> str | None:
        """Return a seal over values; None without keys."""
        for name, key in self._keys.items():
            return f"{name}:{_signature(key, kind, values)}"
        return None

    def fits(self, seal: object, kind: str, *values: object) -> bool:
        """Return whether a seal was made with one of the keys over exactly these values."""
        name, _, signature = str(seal).partition(":")
        key = self._keys.get(name)
        return key is not None and hmac.compare_digest(_signature(key, kind, values).encode(), signature.encode())

    def accept(self, seal: object, kind: str, *values: object) -> bool:
        """Return whether these values are what was sealed, as far as can be told: without keys, nothing can."""
        return not self or self.fits(seal, kind, *values)


def _fingerprint(key: bytes) -> str:
    return hmac.digest(key, b"fingerprint v1", "sha256").hex()[:8]


def _signature(key: bytes, kind: str, values: Sequence[object]) -> str:
    return hmac.digest(key, _lenient.encode([kind, *values]), "sha256").hex()


# --- Sessions ---


class View(Struct, frozen=True, kw_only=True):
    """What a session reaches of the store.

    Attributes:
        policies: whose rows; None for all.
        key_id: whose decisions, as a caller; None for all.
        awaits: tells whether people have yet to judge a decision, beyond what is in the queue; None if nothing is withheld.
        blind: leaves out every decision that people have yet to judge, or may be asked about again.
    """

    policies: frozenset[str] | None = None
    key_id: str | None = None
    awaits: "Callable[[DecisionRecord], bool] | None" = None
    blind: bool = False

    def reaches(self, policies: Collection[str] | None) -> bool:
        """Return whether it reaches all of what is about these policies; None is about all policies."""
        return self.policies is None or (policies is not None and self.policies.issuperset(policies))


EVERYTHING = View()


class Session:
    """A connection, its dialect, the keys that sign what is stored and, if it writes, its chain of events.

    Attributes:
        webhooks: whom to tell of what; messages are queued in the transaction of the event that they announce.
        began: the database's time at the start of the transaction, where starting one tells it.
        view: what an operation may reach for whoever asks.
    """

    def __init__(
        self, connection: Connection, dialect: Dialect, seals: Seals, webhooks: "Subscriptions | None" = None
    ) -> None:
        self.dialect = dialect
        self.seals = seals
        self.webhooks: Subscriptions = webhooks or {}
        self.chain = Chain()
        self.began: float | None = None
        self.view = EVERYTHING
        self._connection = connection

    def within(self, view: View) -> "Session":
        """Return this session with a view; both write the same chain."""
        limited = copy.copy(self)
        limited.view = view
        return limited

    def start_chain(self) -> None:
        """Begin to write a chain of its own."""
        self.chain = self.seals.chain()

    def is_intact(self, row: StoredLink) -> bool:
        """Return whether an event is what was written, or what replaced it under a seal."""
        link = row.link
        if row.seal is not None:
            return self.seals.fits(row.seal, "event", *link)
        try:
            key = self.seals.key_of(link.writer)
        except KeyError:
            return False
        if link.body is None or (key is None and self.seals):
            return False
        for table in ("events", "checkpoints"):
            rows = self.rows(f"select hash from {table} where writer = ? and seq = ?", link.writer, link.seq - 1)
            if rows:
                return link.hash == link.digest(rows[0][0], key)
        return link.seq == 1 and link.hash == link.digest("", key)

    def run(self, sql: str, *values: Any) -> int:
        """Run a statement; return how many rows it changed."""
        return self._execute(sql, values).rowcount

    def rows(self, sql: str, *values: Any) -> Sequence[Any]:
        """Run a query; return all its rows."""
        return self._execute(sql, values).fetchall()

    def chunks(self, columns: str, source: str, key: str, *values: Any) -> Iterator[Sequence[Any]]:
        """Yield the rows of a source, in the order of its key, `CHUNK` at a time.

        Args:
            columns: what to select; the columns of the key come first.
            source: a table, perhaps with a condition on values.
            key: the columns of a unique key.
        """
        size, after, last = key.count(",") + 1, "", ()
        joined = "and" if " where " in source else "where"
        while rows := self.rows(
            f"select {columns} from {source} {after} order by {key} limit ?", *values, *last, CHUNK
        ):
            yield rows
            after, last = f"{joined} ({key}) > ({placeholders(rows[-1][:size])})", rows[-1][:size]

    def changed(self, kind: str, columns: str, source: str, key: str) -> Iterator[Sequence[Any]]:
        """Yield the rows that are not what was written: their seal does not fit these columns."""
        for rows in self.chunks(f"{columns}, seal", source, key):
            yield from (row for row in rows if not self.seals.accept(row[-1], kind, *row[:-1]))

    def now(self) -> float:
        """Return the database's time, in seconds since 1970; all gateways that share a database go by it."""
        return self.began or float(self.rows(f"select {self.dialect.now}")[0][0])

    def append(self, events: Sequence[tuple[Event, str]]) -> None:
        """Append events, each with the text of its body, to the chain.

        Up to `CHUNK` go into one statement, since the number of values in a statement is limited.
        """
        now = self.began or time.time()
        for start in range(0, len(events), CHUNK):
            links = [self.chain.append(event, body, now) for event, body in events[start : start + CHUNK]]
            rows = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"] * len(links))
            self.run(f"insert into events ({LINK}) values {rows}", *chain.from_iterable(links))

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


def placeholders(values: Collection[object]) -> str:
    """Return the placeholders of a list of values for `in (...)`; of none, a null, which nothing equals."""
    return ", ".join("?" * len(values)) or "null"


# --- Operations ---

_T = TypeVar("_T")
_P = ParamSpec("_P")
Job = Callable[[Session], _T]
RowsReader = Callable[[Sequence[Any]], _T]
JobMode = Literal["write", "read", "scan", "maintain"]
"""How an operation runs: write commits, and so does maintain, which may take long and appends nothing; read takes
microseconds; scan may take long, and sees one snapshot."""


@dataclass(frozen=True, slots=True)
class Operation(Generic[_P, _T]):
    """What can be done with a store: `await store.run(operation, ...)`, or `operation(session, ...)` within another.

    Attributes:
        job: takes the arguments; returns the body of the transaction.
    """

    mode: JobMode
    job: Callable[_P, Job[_T]]

    def __call__(self, session: Session, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run within a transaction."""
        return self.job(*args, **kwargs)(session)


def operation(mode: JobMode) -> Callable[[Callable[Concatenate[Session, _P], _T]], Operation[_P, _T]]:
    """Make an operation of a function that is the body of a transaction."""

    def decorate(function: Callable[Concatenate[Session, _P], _T]) -> Operation[_P, _T]:
        def job(*args: _P.args, **kwargs: _P.kwargs) -> Job[_T]:
            return lambda session: function(session, *args, **kwargs)

        return Operation(mode, wraps(function)(job))

    return decorate


class ViewedOperation(Operation[_P, _T]):
    """An operation that reaches no more than the view of its session; `StoreView` runs no others."""

    def within(self, view: View, *args: _P.args, **kwargs: _P.kwargs) -> Job[_T]:
        """Return the body of a transaction whose session has a view."""
        job = self.job(*args, **kwargs)
        return lambda session: job(session.within(view))


def viewed(mode: JobMode) -> Callable[[Callable[Concatenate[Session, _P], _T]], ViewedOperation[_P, _T]]:
    """Make an operation of a function that heeds `session.view`."""

    def decorate(function: Callable[Concatenate[Session, _P], _T]) -> ViewedOperation[_P, _T]:
        return ViewedOperation(mode, operation(mode)(function).job)

    return decorate


def prepared(mode: JobMode) -> Callable[[Callable[_P, Job[_T]]], Operation[_P, _T]]:
    """Make an operation of a function that returns the body of a transaction, and itself runs before it begins."""
    return lambda function: Operation(mode, function)


def viewed_job(mode: JobMode) -> Callable[[Callable[_P, Job[_T]]], ViewedOperation[_P, _T]]:
    """Make an operation of a function that runs before its transaction, and returns a body that heeds `session.view`."""
    return lambda function: ViewedOperation(mode, function)


class SingleQuery(Struct, Generic[_T], frozen=True):
    """A job that is one query; a server may get it in one message, with the beginning and the end of its transaction.

    Attributes:
        read: makes the result of the rows.
    """

    sql: str
    values: tuple[str | float | None, ...]
    read: RowsReader[_T]

    def __call__(self, session: Session) -> _T:
        """Run within a transaction."""
        return self.read(session.rows(self.sql, *self.values))


# --- Stores ---


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSchema:
    """Which tables a database has.

    Attributes:
        version: how many migrations were made.
        readable_by: how many of them a release has to know.
        before: how many had been made when it was opened.
    """

    version: int
    readable_by: int
    before: int


CHANGE_COUNT = "select count, undelivered_until from changes"
CHANGED = "update changes set count = count + 1"
BAD_VALUE = (ValueError, TypeError, LookupError, OverflowError)
"""What a job raises for a value that a database cannot store, or a row that is malformed; see `bad_value`."""
PROOF_SECONDS = 0.25
"""How long a commit proves that another would succeed."""
PROBE_BYTES, DOUBT_BYTES = 4000, 256_000
"""How much is written to prove it; more after a failure, since a disk that is nearly full takes a little."""


def bad_value(location: object, error: Exception) -> StoreError:
    """Translate one of `BAD_VALUE`; return an error of this package as it is."""
    if isinstance(error, StoreError):
        return error
    return DamagedError(
        f"{location}: a value cannot be stored or read ({error}); check the arguments, and run `arbitrage records verify`"
    )


class Store(ABC):
    """What a gateway must not lose. Every operation that writes returns once the write is committed.

    Args:
        keys: sign what is stored; the first signs, all verify.
        webhooks: whom to tell of what.

    Attributes:
        has_undelivered: whether there may be decisions for `claims.take_undelivered`: as of the last `change_count`, and
            set by whoever commits one.
    """

    schema: StoreSchema

    def __init__(self, keys: Sequence[bytes], webhooks: "Subscriptions | None") -> None:
        self.seals = Seals(keys)
        self.has_undelivered = False
        self._webhooks = webhooks

    async def run(self, operation: Operation[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run an operation in a transaction of its own.

        Raises:
            StoreError: it failed, and nothing was written.
        """
        return await self.execute(operation.mode, operation.job(*args, **kwargs))

    async def run_all(self, operation: Operation[_P, Any], *args: _P.args, **kwargs: _P.kwargs) -> int:
        """Run an operation that does a part of something, in short transactions, until nothing is left; return the sum."""
        total = 0
        while count := await self.run(operation, *args, **kwargs):
            total += count
        return total

    @abstractmethod
    async def execute(self, mode: JobMode, job: Job[_T]) -> _T:
        """Run a job in a transaction of its own; return once it is committed."""

    @abstractmethod
    async def change_count(self) -> int:
        """Return a number that grows whenever any gateway changes a policy or a key.

        It installs or rolls back a policy, raises or lifts an alarm, or creates or revokes a key.
        """

    @abstractmethod
    async def writable(self) -> int:
        """Return the change count, once it is clear that a commit would succeed: the first step before models are paid.

        A commit a moment ago is proof enough; otherwise something is written.

        Raises:
            StoreError: a commit would fail: the disk is full, the database is read-only, or its file was moved or
                replaced.
        """

    @abstractmethod
    async def scrub(self) -> None:
        """Leave no byte of what was removed in the database's files; in PostgreSQL, that is the operator's to do."""

    @abstractmethod
    async def close(self) -> None:
        """Finish pending operations and release the connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class StoreView:
    """A store as somebody reaches it: every operation runs in a session that has their view."""

    def __init__(self, store: Store, view: View) -> None:
        self._store = store
        self._view = view

    async def run(self, operation: ViewedOperation[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run an operation in a transaction of its own."""
        return await self._store.execute(operation.mode, operation.within(self._view, *args, **kwargs))
