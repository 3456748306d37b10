"""RenderedScorer and PinnedAnswerer: models that others wrote, with more in their identity than they say of themselves.

Kinds of this package name the rendering themselves. A package that adds a kind need not know of it: its scorer reads the
question from a `Query`, so a certificate from before a change of the rendering must be refused all the same.

Knows nothing of how the model uses the question.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from conformal_arbitrage.scorers.base import Answer, Answerer, Identity, Scorer, Scores, stream_answer
from conformal_arbitrage.scorers.rendering import RENDERING
from conformal_arbitrage.types import ChatRequest, Chunk, Query


@dataclass(frozen=True, slots=True)
class RenderedScorer:
    """A scorer, with the rendering in its identity."""

    scorer: Scorer

    @property
    def identity(self) -> Identity:
        """The scorer's, with the rendering."""
        return {**self.scorer.identity, "rendering": RENDERING}

    async def score(self, query: Query) -> Scores:
        """Return the scorer's numbers."""
        return await self.scorer.score(query)


@dataclass(frozen=True, slots=True)
class PinnedAnswerer:
    """An answerer, with more in its identity: the digest of its class's source, or how requests are passed on."""

    answerer: Answerer
    pinned: Identity

    @property
    def identity(self) -> Identity:
        """The answerer's own, and what is pinned."""
        return {**self.answerer.identity, **self.pinned}

    async def answer(self, request: ChatRequest) -> Answer:
        """Return the answerer's answer."""
        return await self.answerer.answer(request)

    def stream(self, request: ChatRequest) -> AsyncGenerator[Chunk | Answer]:
        """Yield the answerer's chunks, if it streams, then the answer."""
        return stream_answer(self.answerer, request)
