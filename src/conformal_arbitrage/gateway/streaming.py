"""EventStream: a response of server-sent events that keeps its connection alive while nothing is said.

Knows nothing of decisions.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

from starlette.types import Send

from conformal_arbitrage.errors import ArbitrageError
from conformal_arbitrage.gateway.chat_replies import EVENT_STREAM, event_bytes
from conformal_arbitrage.gateway.middleware import failure_of
from conformal_arbitrage.store.base import SavedResponse

PATIENCE = 10.0
_IN_A_ROW = 16
_WAITING = b": waiting for the decision\n\n"


@asynccontextmanager
async def event_stream(send: Send, policy: str, *, patient: bool = False) -> AsyncGenerator["EventStream"]:
    """Send a response as a stream of events.

    The headers wait for the first piece for `PATIENCE` seconds; then, and in every later silence of that length, a comment
    is sent. An error that ends the block after the response has started becomes an error event without [DONE]; before
    that it is raised.

    Args:
        send: where to.
        policy: which policy answers, for the log.
        patient: send no comment before the first piece, so that an error can still have a status of its own.
    """
    events = EventStream(send)
    comments = asyncio.create_task(events.comment(after_start=patient))
    try:
        yield events
    except ArbitrageError as error:
        if not events.started:
            raise
        await events.put(event_bytes(failure_of(error, policy).document))
    finally:
        comments.cancel()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream:
    """One response, sent piece by piece. Sending waits for a slow caller, so nothing piles up.

    Attributes:
        status_code: 200, since an error before the first piece is raised.
        started: whether the headers have been sent.
        headers: those that were sent, or will be.
    """

    status_code = 200

    def __init__(self, send: Send) -> None:
        self.started = False
        self.headers: Mapping[str, str] = EVENT_STREAM
        self._send = send
        self._pieces = 0
        self._turn = asyncio.Lock()
        self._last = asyncio.get_running_loop().time()

    async def put(self, piece: bytes) -> None:
        """Send a piece, and the headers before the first."""
        async with self._turn:
            await self._start()
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            self._last = asyncio.get_running_loop().time()
        self._pieces += 1
        if not self._pieces % _IN_A_ROW:
            await asyncio.sleep(0)  # a model that is faster than its caller must not starve the others

    async def _start(self) -> None:
        if not self.started:
            self.started = True
            headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def replay(self, saved: SavedResponse) -> None:
        """Send a response that was given before."""
        self.headers = {**saved.headers, "x-arbitrage-replayed": "true"}
        for piece in pieces_of(saved):
            await self.put(piece)

    async def comment(self, *, after_start: bool) -> None:
        """Send comments in silences, perhaps only once something was sent, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._last + PATIENCE - clock()) or (PATIENCE if after_start else 0.0))
            if clock() >= self._last + PATIENCE and (self.started or not after_start):
                await self.put(_WAITING)


def pieces_of(saved: SavedResponse) -> list[bytes]:
    """Split a finished stream into its events."""
    return [event + b"\n\n" for event in saved.body.split(b"\n\n") if event]
