"""Retry: repeat a call after transient errors, within one deadline.

Knows nothing of prompts or providers.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from conformal_arbitrage.errors import DeadlineError, UpstreamError
from conformal_arbitrage.types import Chunk, Spent
from conformal_arbitrage.upstream.base import Call, Port, Reply, Wrapper, spent_of

_LONGEST_PAUSE = 30.0
_UNKNOWN = Spent(calls=1, input_tokens=None, output_tokens=None, cost=None)
_Result = TypeVar("_Result")


class Retry(Wrapper):
    """Repeat calls after transient errors, within one deadline for all attempts together.

    A stream is retried only until its first chunk has been passed on. A pool's other endpoints are tried without a pause.

    Args:
        port: the port to call.
        attempts: the most attempts.
        deadline: seconds for all attempts and the pauses between them.
        pause: seconds before the second attempt; doubles from then on, each drawn from the upper half.
    """

    def __init__(self, port: Port, *, attempts: int = 5, deadline: float = 120.0, pause: float = 0.5) -> None:
        super().__init__(port)
        self._attempts = attempts
        self._deadline = deadline
        self._first_pause = pause

    async def call(self, call: Call) -> Reply:
        """Return the first reply; its `spent` includes failed attempts."""
        ends = asyncio.get_running_loop().time() + self._deadline
        spent, attempt = Spent(), 0
        try:
            async with asyncio.timeout_at(ends):
                while True:
                    attempt += 1
                    try:
                        reply = await self.port.call(call)
                        return reply if attempt == 1 else _with(reply, spent)
                    except UpstreamError as error:
                        spent = error.spent = spent + spent_of(error)
                        if (pause := self._pause_after(error, attempt, ends)) is None:
                            raise
                    await asyncio.sleep(pause)
        except TimeoutError as error:
            raise self._late(spent) from error

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Yield the first stream that begins; the reply's `spent` includes failed attempts."""
        ends = asyncio.get_running_loop().time() + self._deadline
        spent, attempt, begun = Spent(), 0, False
        while True:
            attempt += 1
            try:
                async with aclosing(self.port.stream(call)) as items:
                    while (item := await _until(ends, anext(items, None))) is not None:
                        begun = True
                        yield _with(item, spent) if attempt > 1 and isinstance(item, Reply) else item
            except TimeoutError as error:
                raise self._late(spent) from error
            except UpstreamError as error:
                spent = error.spent = spent + spent_of(error)
                if begun or (pause := self._pause_after(error, attempt, ends)) is None:
                    raise
            else:
                return
            await asyncio.sleep(pause)

    def _pause_after(self, error: UpstreamError, attempt: int, ends: float) -> float | None:
        """Return the seconds to wait before the next attempt, or None if there is none."""
        pause = 0.0 if attempt <= error.elsewhere else self._pause(attempt, error)
        late = asyncio.get_running_loop().time() + pause >= ends
        return None if not error.retryable or attempt >= self._attempts or late else pause

    def _pause(self, attempt: int, error: UpstreamError) -> float:
        backoff = min(_LONGEST_PAUSE, self._first_pause * 2 ** min(attempt - 1, 16))
        return max(error.retry_after or 0.0, backoff * random.uniform(0.5, 1.0))

    def _late(self, spent: Spent) -> DeadlineError:
        return DeadlineError(f"{self.origin}: no reply within {self._deadline:g} s", spent=spent + _UNKNOWN)


def _with(reply: Reply, spent: Spent) -> Reply:
    return Reply(document=reply.document, spent=spent + reply.spent)


async def _until(ends: float, step: Awaitable[_Result]) -> _Result:
    """Wait for one step of a stream; a timeout must not span a yield, or it would cancel the consumer instead."""
    async with asyncio.timeout_at(ends):
        return await step
