"""A mock chat endpoint and a load for `gateway.py`: as little HTTP as will do, so that only the gateway's core is full."""

import asyncio
import json
import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

KEY = "arb-benchmark"
SURE, TORN = "[0.7, 0.1, 0.1, 0.1]", "[0.3, 0.3, 0.2, 0.2]"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Messages(asyncio.Protocol):
    """As little HTTP as will do for either side: a message is complete at its length."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by name
        self._data = bytearray()

    def data_received(self, data: bytes) -> None:
        """Hand on every message that is complete."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            found = _LENGTH.search(self._data, 0, end + 2)
            whole = end + 4 + (int(found[1]) if found else 0)
            if len(self._data) < whole:
                return
            message = bytes(self._data[:whole])
            del self._data[:whole]
            self.received(message)

    def received(self, message: bytes) -> None:
        """One message."""
        raise NotImplementedError


class Mock(Messages):
    """A chat endpoint; its Primary is torn over the hard question, and its Guardian never is."""

    def __init__(self, latency: float) -> None:
        self._latency = latency

    def received(self, message: bytes) -> None:
        """Answer, now or later."""
        torn = b"hardest" in message and b'"small"' in message
        if self._latency:
            asyncio.get_running_loop().call_later(self._latency, self._answer, torn)
        else:
            self._answer(torn)

    def _answer(self, torn: bool) -> None:
        if not self.transport.is_closing():
            self.transport.write(_REPLIES[torn])


def _reply(scores: str) -> bytes:
    document = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "mock",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": f'{{"scores": {scores}}}'},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 200, "completion_tokens": 20, "total_tokens": 220},
    }
    body = json.dumps(document).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


_REPLIES = (_reply(SURE), _reply(TORN))


def mock(latency: float, core: int, ready: Connection) -> None:
    """Run the mock until its parent ends it; its port goes through the pipe."""
    os.sched_setaffinity(0, {core})

    async def forever() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Mock(latency), "127.0.0.1", 0, backlog=1024)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(forever())


@contextmanager
def upstream(latency: float, core: int) -> Iterator[str]:
    """A mock endpoint in a child process."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=mock, args=(latency, core, there), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}/v1"
    finally:
        process.terminate()
        process.join()


@dataclass(frozen=True, slots=True)
class Question:
    """What the load sends: a path, a body, and what every answer must hold."""

    path: str
    body: dict[str, Any]
    expected: bytes = b'"choices"'

    def message(self, url: str) -> bytes:
        """The request as bytes."""
        data = json.dumps(self.body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


class Caller(Messages):
    """One connection that asks again as soon as it has an answer."""

    def __init__(self, message: bytes, expected: bytes, left: list[int], took: list[float]) -> None:
        self._message = message
        self._expected = expected
        self._left = left
        self._took = took
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ask(self) -> None:
        """The next request, if there is one left."""
        if not self._left[0]:
            self.transport.close()
            self.done.set_result(None)
            return
        self._left[0] -= 1
        self._start = time.perf_counter()
        self.transport.write(self._message)

    def received(self, message: bytes) -> None:
        """An answer."""
        self._took.append(time.perf_counter() - self._start)
        if not message.startswith(b"HTTP/1.1 200") or self._expected not in message:
            self.done.set_exception(AssertionError(message[:2000]))
            return
        self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """A server that hangs up early is an error."""
        if not self.done.done():
            self.done.set_exception(AssertionError(f"the connection was lost: {exc}"))


async def load(url: str, question: Question, count: int, concurrency: int) -> list[float]:
    """Ask so often, so many at once; seconds of each."""
    left, took = [count], list[float]()
    message, place = question.message(url), urlsplit(url)
    connect = asyncio.get_running_loop().create_connection
    pairs = [
        await connect(lambda: Caller(message, question.expected, left, took), place.hostname, place.port)
        for _ in range(concurrency)
    ]
    for _, caller in pairs:
        caller.ask()
    await asyncio.gather(*(caller.done for _, caller in pairs))
    return sorted(took)
