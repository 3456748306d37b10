"""Cache: keep replies in a SQLite file, so that nothing is paid for twice.

Knows nothing of prompts or providers.
"""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from conformal_arbitrage.errors import OutputError
from conformal_arbitrage.types import COST_DIGITS, Chunk, Spent
from conformal_arbitrage.upstream.base import Call, Port, Reply, Wrapper, fingerprint


class Cache(Wrapper):
    """Store replies in a SQLite file, committed as they arrive, and answer repeated calls from it.

    Args:
        port: the port to call for replies that are not stored.
        path: the file, created if absent.
        role: whose replies these are; a model that plays two roles is called for each.
        per_query: keep each query's own replies, at their original cost, as a collection does; otherwise equal
            requests share a reply, and a stored one costs nothing.
    """

    def __init__(self, port: Port, path: str | Path, *, per_query: bool = False, role: str = "") -> None:
        super().__init__(port)
        self._per_query = per_query
        self._role = role
        self._connection = _open(Path(path))
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    async def call(self, call: Call) -> Reply:
        """Return the stored reply, or the port's, which is stored first."""
        key = self._key(call)
        async with self._locks.setdefault(key, asyncio.Lock()):  # wait for an equal call in flight
            reply = self._find(key)
            if reply is None:
                reply = await self.port.call(call)
                self._keep(key, reply)
            return reply

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Yield the stored reply alone, or the port's stream, whose reply is stored first."""
        key = self._key(call)
        async with self._locks.setdefault(key, asyncio.Lock()):
            if (reply := self._find(key)) is not None:
                yield reply
                return
            async with aclosing(self.port.stream(call)) as items:
                async for item in items:
                    if isinstance(item, Reply):
                        self._keep(key, item)
                    yield item

    def find(self, call: Call) -> Reply | None:
        """Return the stored reply, if there is one."""
        return self._find(self._key(call))

    def _find(self, key: str) -> Reply | None:
        row = self._connection.execute("select reply from replies where key = ?", (key,)).fetchone()
        if row is None:
            return None
        stored = msgspec.json.decode(row[0], type=_Stored)
        return Reply(document=stored.document, spent=stored.spent if self._per_query else Spent())

    def _keep(self, key: str, reply: Reply) -> None:
        text = msgspec.json.encode(_Stored(document=reply.document, spent=reply.spent))
        try:
            self._connection.execute("insert or ignore into replies values (?, ?, ?)", (key, reply.spent.cost, text))
            self._connection.commit()
        except sqlite3.Error as error:
            raise OutputError(f"replies can no longer be stored ({error}); is the disk full?") from error

    def _key(self, call: Call) -> str:
        query = call.id if self._per_query else None
        return fingerprint([self._role, self.origin, call.path, call.body, call.sample, query])


class _Stored(msgspec.Struct):
    document: object
    spent: Spent


def _open(path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(path, timeout=30)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        connection.execute("create table if not exists replies (key text primary key, cost real, reply blob not null)")
        connection.commit()
    except sqlite3.Error as error:
        raise OutputError(f"{path}: replies cannot be stored there ({error}); choose another file") from error
    return connection


def stored_cost(path: str | Path) -> tuple[float, int]:
    """Return the known cost of the replies in a file, and the number of replies whose cost is unknown."""
    if not Path(path).exists():
        return 0.0, 0
    with closing(_open(Path(path))) as connection:
        known, unknown = connection.execute("select total(cost), count(*) - count(cost) from replies").fetchone()
    return round(known, COST_DIGITS), unknown
