"""Breaker: stop calling an endpoint that keeps failing.

Knows nothing of prompts or providers.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

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

    def open(self) -> None:
        """Let calls fail immediately for a while, whatever came before."""
        self._failed = self._most
        self._until = asyncio.get_running_loop().time() + self._rest

    async def call(self, call: Call) -> Reply:
        """Return the port's reply, unless the breaker is open."""
        self._begin()
        try:
            reply = await self.port.call(call)
        except UpstreamError as error:
            self._count(error)
            raise
        self._failed = 0
        return reply

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Yield the port's stream, unless the breaker is open."""
        self._begin()
        try:
            async with aclosing(self.port.stream(call)) as items:
                async for item in items:
                    if isinstance(item, Reply):
                        self._failed = 0
                    yield item
        except UpstreamError as error:
            self._count(error)
            raise

    def _begin(self) -> None:
        if self._failed < self._most:
            return
        if self.resting:
            raise UpstreamError(f"{self.origin}: not called for now, after {self._failed} failures in a row")
        self._rest_again()  # during a trial, other calls keep failing

    def _count(self, error: UpstreamError) -> None:
        if error.retryable or isinstance(error, DeadlineError):  # a refused request says nothing about others
            self._failed += 1
            self._rest_again()

    def _rest_again(self) -> None:
        self._until = asyncio.get_running_loop().time() + self._rest
