"""Breaker: stop calling an endpoint that keeps failing.

Knows nothing of prompts or providers.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager

from conformal_arbitrage.errors import DeadlineError, UpstreamError
from conformal_arbitrage.types import Chunk
from conformal_arbitrage.upstream.base import Call, Port, Reply, Wrapper


class Breaker(Wrapper):
    """Fail calls immediately for a while after consecutive failures.

    Args:
        port: the port to call.
        failures: consecutive failures that open the breaker.
        rest: seconds until one call is let through as a trial.
    """

    def __init__(self, port: Port, *, failures: int = 10, rest: float = 5.0) -> None:
        super().__init__(port)
        self._most = failures
        self._rest = rest
        self._failed = 0
        self._until = 0.0

    @property
    def resting(self) -> bool:
        """Whether calls currently fail immediately."""
        return self._failed >= self._most and asyncio.get_running_loop().time() < self._until

    async def call(self, call: Call) -> Reply:
        """Return the port's reply, unless the breaker is open."""
        with self._counting_failures():
            reply = await self.port.call(call)
        self._failed = 0
        return reply

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Yield the port's stream, unless the breaker is open."""
        with self._counting_failures():
            async with aclosing(self.port.stream(call)) as items:
                async for item in items:
                    if isinstance(item, Reply):
                        self._failed = 0
                    yield item

    @contextmanager
    def _counting_failures(self) -> Generator[None]:
        clock = asyncio.get_running_loop().time
        if self.resting:
            raise UpstreamError(f"{self.origin}: not called for now, after {self._failed} failures in a row")
        self._until = clock() + self._rest  # during a trial, other calls keep failing
        try:
            yield
        except UpstreamError as error:
            if error.retryable or isinstance(error, DeadlineError):  # a refused request says nothing about others
                self._failed += 1
                self._until = clock() + self._rest
            raise
