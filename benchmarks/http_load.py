"""The mock endpoint and the load of `gateway.py`."""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.endpoint import Messages, completion, response

KEY = "arb-benchmark"


class Mock(Messages):
    """A chat endpoint; its Primary is torn over the hard question, and its Guardian never is."""

    sure = response(completion('{"scores": [0.7, 0.1, 0.1, 0.1]}'))
    torn = response(completion('{"scores": [0.3, 0.3, 0.2, 0.2]}'))

    def __init__(self, latency: float) -> None:
        self._latency = latency

    def received(self, message: bytes) -> None:
        """Answer, now or later."""
        reply = self.torn if b"hardest" in message and b'"small"' in message else self.sure
        if self._latency:
            asyncio.get_running_loop().call_later(self._latency, self._answer, reply)
        else:
            self._answer(reply)

    def _answer(self, reply: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(reply)


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
