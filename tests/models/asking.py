"""Run scorers against a scripted server on loopback, or against a server that never replies."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from conformal_arbitrage.errors import ScorerError
from conformal_arbitrage.models import Endpoint
from conformal_arbitrage.types import Query
from tests.scripted import Upstream

QUERY = Query("Which of these is red?", ("a rose", "the sea", "grass"), id="q1")


def scored(make, reply, query=QUERY):
    """Return the scores of `make(endpoint)` against a server that replies by `reply`, and the server."""

    async def ask():
        async with Upstream(reply) as upstream, Endpoint(upstream.url) as endpoint:
            return await make(endpoint).score(query), upstream

    return asyncio.run(ask())


def refused(make, reply, query=QUERY, *, error=ScorerError):
    """Return the error raised in place of scores, and the server."""

    async def ask():
        async with Upstream(reply) as upstream, Endpoint(upstream.url) as endpoint:
            with pytest.raises(error) as caught:
                await make(endpoint).score(query)
            return caught.value, upstream

    return asyncio.run(ask())


class Silent:
    """A server that never replies and counts connections; the first gets status 400 once `patience` are open."""

    def __init__(self, patience):
        self.patience = patience
        self.came = 0
        self.left = 0
        self.all_came = asyncio.Event()

    async def _handle(self, reader, writer):
        self.came += 1
        first = self.came == 1
        if self.came == abs(self.patience):
            self.all_came.set()
        if first and self.patience > 0:
            await self.all_came.wait()
            writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
        try:
            while await reader.read(4096):
                pass
        except ConnectionError:
            pass
        self.left += 1
        writer.close()

    async def everyone_left(self):
        """Tell whether all clients disconnect within some seconds."""
        for _ in range(500):
            if self.left == self.came:
                return True
            await asyncio.sleep(0.01)
        return False


@asynccontextmanager
async def silent(patience):
    """Run a silent server; with `patience` below 0 it refuses nobody."""
    server = Silent(patience)
    listening = await asyncio.start_server(server._handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    try:
        yield server
    finally:
        listening.close()
