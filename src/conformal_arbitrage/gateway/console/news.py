"""News: tell open pages to look again, over server-sent events.

An event carries no data, only what has changed: `policies`, `figures` or `queue`. Its id says how far things had come, and
so does every page, so that nothing between the making of a page and the opening of its stream is lost.

Knows nothing of pages, or of what has changed.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.gateway.middleware import ENDLESS
from conformal_arbitrage.store.base import Store

KINDS = ("policies", "figures", "queue")
MOST_STREAMS, MOST_OF_ONE = 100, 20
"""Streams at a time, and those of one key."""
LOOK_EVERY = 0.25
_PING_EVERY = 15.0


class News:
    """Counts changes, and follows them while someone listens.

    Args:
        store: where things change.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listeners = Counter[str]()
        self._following: asyncio.Task[None] | None = None
        self._counts: tuple[int, ...] = ()
        self._changed = asyncio.Event()

    async def counts(self) -> tuple[int, ...]:
        """Return how far policies, figures and queue have come."""
        ledgers = await self._store.ledgers()
        queue = await self._store.open_places()
        return await self._store.change_count(), sum(one.change for one in ledgers), queue

    async def since(self, *, blind: bool) -> str:
        """Return how far things have come, for a page; `blind` leaves out figures, which change when an audit is drawn."""
        return _id(await self.counts(), blind=blind)

    async def stream(self, key: str, since: str, *, blind: bool) -> Response:
        """Return a stream of what changes from a point on, for a key; without content if too many are open."""
        if self._listeners[key] >= MOST_OF_ONE or self._listeners.total() >= MOST_STREAMS:
            return Response(status_code=204)
        return _EventStream(self, key, _read(since) or await self.counts(), blind=blind)

    @asynccontextmanager
    async def listening(self, key: str) -> AsyncGenerator[None]:
        """Follow the store while at least one listens."""
        self._listeners[key] += 1
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            self._listeners -= Counter((key,))  # which drops what is zero
            if not self._listeners:
                self._following.cancel()
                with suppress(asyncio.CancelledError):
                    await self._following
                self._following = None

    async def _follow(self) -> None:
        while True:
            with suppress(StoreError):  # pages say so themselves
                counts = await self.counts()
                if counts != self._counts:
                    self._counts = counts
                    self._changed.set()
                    self._changed = asyncio.Event()
            await asyncio.sleep(LOOK_EVERY)

    async def later_than(self, seen: tuple[int, ...]) -> tuple[int, ...]:
        """Wait until things have come further; return how far."""
        while self._counts in ((), seen):
            await self._changed.wait()
        return self._counts


class _EventStream(Response):
    """A response that ends when its reader leaves, or when the server stops."""

    def __init__(self, news: News, key: str, seen: tuple[int, ...], *, blind: bool) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._news = news
        self._key = key
        self._seen = seen
        self._blind = blind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events."""
        scope[ENDLESS] = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        gone = asyncio.create_task(_gone(receive))
        try:
            async with self._news.listening(self._key):
                text = ": listening\n\n"
                while not gone.done():
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                    text = await self._next(gone)
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone
        await send({"type": "http.response.body", "body": b""})

    async def _next(self, gone: asyncio.Task[None]) -> str:
        """Return the next events; a comment if nothing happens for long."""
        later = asyncio.create_task(self._changed())
        try:
            await asyncio.wait({gone, later}, timeout=_PING_EVERY, return_when=asyncio.FIRST_COMPLETED)
            if not later.done():
                return ": nothing new\n\n"
            id = _id(self._seen, blind=self._blind)
            return "".join(f"event: {kind}\nid: {id}\ndata:\n\n" for kind in later.result())
        finally:
            later.cancel()
            with suppress(asyncio.CancelledError):
                await later

    async def _changed(self) -> list[str]:
        """Wait for a change that the reader is told of; return of what."""
        while True:
            before, self._seen = self._seen, await self._news.later_than(self._seen)
            changed = [kind for kind, old, new in zip(KINDS, before, self._seen, strict=True) if old != new]
            if self._blind:
                changed = [kind for kind in changed if kind != "figures"]
            if changed:
                return changed


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _id(counts: tuple[int, ...], *, blind: bool) -> str:
    policies, figures, queue = counts
    return f"{policies}-{0 if blind else figures}-{queue}"


def _read(text: str) -> tuple[int, ...] | None:
    parts = text.split("-")
    are_counts = len(parts) == len(KINDS) and all(part.isdecimal() and len(part) < 20 for part in parts)
    return tuple(map(int, parts)) if are_counts else None
