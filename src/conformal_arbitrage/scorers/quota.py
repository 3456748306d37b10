"""Quota: how often the Guardian may be asked.

Knows nothing of HTTP, configuration files, money or callers.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from conformal_arbitrage.scorers.base import Answer, Answerer, Identity, Scorer, Scores, stream_answer
from conformal_arbitrage.types import ChatRequest, Chunk, Query


class Quota(Protocol):
    """Anything that limits how often a model is asked."""

    async def start(self) -> None:
        """Count one question.

        Raises:
            QuotaError: the quota is used up.
        """
        ...


@dataclass(frozen=True, slots=True)
class QuotaScorer:
    """A Guardian over menus, within a quota."""

    scorer: Scorer
    quota: Quota

    @property
    def identity(self) -> Identity:
        """The scorer's identity."""
        return self.scorer.identity

    async def score(self, query: Query) -> Scores:
        """Return the scorer's numbers, if the quota allows."""
        await self.quota.start()
        return await self.scorer.score(query)


@dataclass(frozen=True, slots=True)
class QuotaAnswerer:
    """A Guardian in free text, within a quota."""

    answerer: Answerer
    quota: Quota

    @property
    def identity(self) -> Identity:
        """The answerer's identity."""
        return self.answerer.identity

    async def answer(self, request: ChatRequest) -> Answer:
        """Return the answerer's answer, if the quota allows."""
        await self.quota.start()
        return await self.answerer.answer(request)

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Chunk | Answer]:
        """Yield the answerer's stream, if the quota allows."""
        await self.quota.start()
        async with aclosing(stream_answer(self.answerer, request)) as items:
            async for item in items:
                yield item
