"""Limit: bound the calls in flight, and requests and tokens per minute.

Knows nothing of prompts, providers or money.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext

from conformal_arbitrage.types import Chunk, Spent
from conformal_arbitrage.upstream.base import Call, Port, Reply, Wrapper


class RateLimit:
    """The most calls in flight, and the most requests and tokens in any minute; several ports may share one.

    Tokens are those that replies reported in the last minute; a new call waits while they are at the limit.
    """

    def __init__(
        self,
        *,
        concurrency: int | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> None:
        self.slots = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        self._requests = requests_per_minute
        self._tokens = tokens_per_minute
        self._started: deque[float] = deque()
        self._used: deque[tuple[float, int]] = deque()
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Wait until the rates allow another request, and count it."""
        if self._requests is None and self._tokens is None:
            return
        async with self._turn:  # in order of arrival
            clock = asyncio.get_running_loop().time
            while (wait := self._wait(clock())) > 0:
                await asyncio.sleep(wait)
            self._started.append(clock())

    def _wait(self, now: float) -> float:
        while self._started and self._started[0] <= now - 60:
            self._started.popleft()
        while self._used and self._used[0][0] <= now - 60:
            self._used.popleft()
        wait = 0.0
        if self._requests is not None and len(self._started) >= self._requests:
            wait = self._started[0] + 60 - now
        if self._tokens is not None and sum(n for _, n in self._used) >= self._tokens:
            wait = max(wait, self._used[0][0] + 60 - now)
        return wait

    def count_tokens(self, spent: Spent) -> None:
        """Count the tokens of a reply."""
        if self._tokens is not None:
            tokens = (spent.input_tokens or 0) + (spent.output_tokens or 0)
            self._used.append((asyncio.get_running_loop().time(), tokens))


class Limit(Wrapper):
    """Wait for a rate limit before each call."""

    def __init__(self, port: Port, rate_limit: RateLimit) -> None:
        super().__init__(port)
        self._rate_limit = rate_limit

    async def call(self, call: Call) -> Reply:
        """Return the port's reply, once the limit allows the call."""
        async with self._rate_limit.slots:
            await self._rate_limit.start()
            reply = await self.port.call(call)
        self._rate_limit.count_tokens(reply.spent)
        return reply

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Yield the port's stream, once the limit allows the call; the slot is held until it ends."""
        async with self._rate_limit.slots:
            await self._rate_limit.start()
            async with aclosing(self.port.stream(call)) as items:
                async for item in items:
                    if isinstance(item, Reply):
                        self._rate_limit.count_tokens(item.spent)
                    yield item
