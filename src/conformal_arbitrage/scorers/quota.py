"""GuardianQuota: how often, and at what cost, the Guardian may be called.

Knows nothing of HTTP, configuration files or callers.
"""

import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from conformal_arbitrage.errors import QuotaError
from conformal_arbitrage.scorers.base import Answer, Answerer, Identity, Scorer, Scores, stream_answer
from conformal_arbitrage.types import ChatRequest, Chunk, Query, Spent


class Window:
    """A sliding window: at most `limit` units within any `seconds`."""

    def __init__(self, limit: float, seconds: float) -> None:
        self.limit = limit
        self.seconds = seconds
        self._taken: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until there is room; 0 if there is."""
        while self._taken and self._taken[0][0] <= now - self.seconds:
            self._sum -= self._taken.popleft()[1]
        return 0.0 if not self._taken or self._sum < self.limit else self._taken[0][0] + self.seconds - now

    def take(self, now: float, units: float) -> None:
        """Use some units."""
        self._taken.append((now, units))
        self._sum += units


class GuardianQuota:
    """The most calls per minute and dollars per hour for the Guardian, over all callers; None is unlimited."""

    def __init__(self, *, calls_per_minute: int | None = None, cost_per_hour: float | None = None) -> None:
        self._calls = None if calls_per_minute is None else Window(calls_per_minute, 60.0)
        self._cost = None if cost_per_hour is None else Window(cost_per_hour, 3600.0)

    def start(self) -> None:
        """Count one call.

        Raises:
            QuotaError: the quota is used up.
        """
        now = time.monotonic()
        for window, unit in ((self._calls, "calls"), (self._cost, "cost")):
            if window is not None and (wait := window.wait(now)) > 0:
                raise QuotaError(f"the Guardian's limit on {unit} is reached", retry_after=wait)
        if self._calls is not None:
            self._calls.take(now, 1)

    def pay(self, spent: Spent) -> None:
        """Count the cost of a call."""
        if self._cost is not None and spent.cost:
            self._cost.take(time.monotonic(), spent.cost)


@dataclass(frozen=True, slots=True)
class QuotaScorer:
    """A Guardian over menus, within a quota."""

    scorer: Scorer
    quota: GuardianQuota

    @property
    def identity(self) -> Identity:
        """The scorer's identity."""
        return self.scorer.identity

    async def score(self, query: Query) -> Scores:
        """Return the scorer's numbers, if the quota allows."""
        self.quota.start()
        scores = await self.scorer.score(query)
        self.quota.pay(scores.spent)
        return scores


@dataclass(frozen=True, slots=True)
class QuotaAnswerer:
    """A Guardian in free text, within a quota."""

    answerer: Answerer
    quota: GuardianQuota

    @property
    def identity(self) -> Identity:
        """The answerer's identity."""
        return self.answerer.identity

    async def answer(self, request: ChatRequest) -> Answer:
        """Return the answerer's answer, if the quota allows."""
        self.quota.start()
        answer = await self.answerer.answer(request)
        self.quota.pay(answer.spent)
        return answer

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Chunk | Answer]:
        """Yield the answerer's stream, if the quota allows."""
        self.quota.start()
        async with aclosing(stream_answer(self.answerer, request)) as items:
            async for item in items:
                if isinstance(item, Answer):
                    self.quota.pay(item.spent)
                yield item
