"""A mock chat endpoint in a process of its own, in as little HTTP as will do: it takes nothing from what is measured."""

import asyncio
import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import cast

import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Messages(asyncio.Protocol):
    """HTTP for either side: a message is complete at its length."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by name
        self._data = bytearray()

    def data_received(self, data: bytes) -> None:
        """Hand on every message that is complete."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            match = _LENGTH.search(self._data, 0, end + 2)
            whole = end + 4 + (int(match[1]) if match else 0)
            if len(self._data) < whole:
                return
            message = bytes(self._data[:whole])
            del self._data[:whole]
            self.received(message)

    def received(self, message: bytes) -> None:
        """One message."""
        raise NotImplementedError


def completion(content: str, model: str = "mock") -> bytes:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 200, "completion_tokens": 20, "total_tokens": 220}
    told = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model}
    return json.dumps({**told, "choices": [choice], "usage": usage}).encode()


def response(body: bytes, status: bytes = b"200 OK") -> bytes:
    """A body as a whole HTTP response."""
    head = b"HTTP/1.1 " + status + b"\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


def _serve(endpoint: Callable[[], Messages], core: int | None, ready: Connection) -> None:
    """Run until the parent ends this process; the port goes through the pipe."""
    if core is not None:
        os.sched_setaffinity(0, {core})

    async def forever() -> None:
        server = await asyncio.get_running_loop().create_server(endpoint, "127.0.0.1", 0, backlog=1024)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(forever())


@contextmanager
def served(endpoint: Callable[[], Messages], core: int | None = None) -> Iterator[str]:
    """The address of an endpoint that runs in a child process, on one core if one is named."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(endpoint, core, there), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}/v1"
    finally:
        process.terminate()
        process.join()
