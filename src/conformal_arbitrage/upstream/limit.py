"""Limit: bound the calls in flight, and requests and tokens per minute.

Knows nothing of prompts, providers or money.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext

from conformal_arbitrage.types import Chunk, Spent
from conformal_arbitrage.upstream.base import IN_BACKGROUND, Call, Port, Reply, Wrapper


class RateLimit:
    """The most calls in flight, and the most requests and tokens in any minute; several ports may share one.

    Tokens are those that replies reported in the last minute; a new call waits while they are at the limit.

    Args:
        concurrency: calls in flight.
        requests_per_minute: calls begun in any minute.
        tokens_per_minute: tokens reported in any minute.
        live_share: the share of each that calls in the background leave to the others, down to one.
    """

    def __init__(
        self,
        *,
        concurrency: int | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        live_share: float = 0.0,
    ) -> None:
        self._slots = _semaphore(concurrency)
        self._background_slots = _semaphore(_less(concurrency, live_share))
        self._rates = {
            False: (requests_per_minute, tokens_per_minute),
            True: (_less(requests_per_minute, live_share), _less(tokens_per_minute, live_share)),
        }
        self._started: deque[float] = deque()
        self._used: deque[tuple[float, int]] = deque()
        self._turns = {False: asyncio.Lock(), True: asyncio.Lock()}

    @property
    def slots(self) -> AbstractAsyncContextManager[None]:
        """Holds a place among the calls in flight."""
        return self._both_slots() if IN_BACKGROUND.get() else self._slots

    @asynccontextmanager
    async def _both_slots(self) -> AsyncGenerator[None]:
        async with self._background_slots, self._slots:
            yield

    async def start(self) -> None:
        """Wait until the rates allow another request, and count it."""
        background = IN_BACKGROUND.get()
        requests, tokens = self._rates[background]
        if requests is None and tokens is None:
            return
        async with self._turns[background]:  # in order of arrival
            clock = asyncio.get_running_loop().time
            while (wait := self._wait(clock(), requests, tokens)) > 0:
                await asyncio.sleep(wait)
            self._started.append(clock())

    def _wait(self, now: float, requests: int | None, tokens: int | None) -> float:
        while self._started and self._started[0] <= now - 60:
            self._started.popleft()
        while self._used and self._used[0][0] <= now - 60:
            self._used.popleft()
        wait = 0.0
        if requests is not None and len(self._started) >= requests:
            wait = self._started[len(self._started) - requests] + 60 - now
        if tokens is not None and sum(n for _, n in self._used) >= tokens:
            wait = max(wait, self._used[0][0] + 60 - now)
        return wait

    def count_tokens(self, spent: Spent) -> None:
        """Count the tokens of a reply."""
        if self._rates[False][1] is not None:
            tokens = (spent.input_tokens or 0) + (spent.output_tokens or 0)
            self._used.append((asyncio.get_running_loop().time(), tokens))


def _semaphore(places: int | None) -> AbstractAsyncContextManager[None]:
    return nullcontext() if places is None else asyncio.Semaphore(places)


def _less(limit: int | None, share: float) -> int | None:
    """Return what is left of a limit without a share of it, at least one."""
    return None if limit is None else max(1, int(limit * (1 - share)))


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
