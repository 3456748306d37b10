"""A Primary that is not asked about some queries: it has no opinion there, so that the Guardian decides.

Whoever collects, asks or serves with it meets an ordinary model whose scores are equal, or whose confidence is 0, where the
rule says so. The certificate is bound to the rule by the identity.

Knows nothing of thresholds or configuration files.
"""

from dataclasses import dataclass

from conformal_arbitrage.calibration.skip_rule import SkipRule
from conformal_arbitrage.scorers.base import Answer, Answerer, Identity, Scorer, Scores
from conformal_arbitrage.types import ChatRequest, Query

NOT_ASKED = "(not asked)"
"""In place of an answer, which is never given: its confidence is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippingScorer:
    """A scorer behind a rule."""

    scorer: Scorer
    rule: SkipRule

    @property
    def identity(self) -> Identity:
        """The model's, and the rule's."""
        return {**self.scorer.identity, **self.rule.identity}

    async def score(self, query: Query) -> Scores:
        """Return the model's scores, or equal ones without asking it."""
        if self.rule.skips(query.group, query.text):
            return Scores(values=(0.0,) * len(query.actions))
        return await self.scorer.score(query)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippingAnswerer:
    """An answerer behind a rule."""

    answerer: Answerer
    rule: SkipRule

    @property
    def identity(self) -> Identity:
        """The model's, and the rule's."""
        return {**self.answerer.identity, **self.rule.identity}

    async def answer(self, request: ChatRequest) -> Answer:
        """Return the model's answer, or one without confidence without asking it."""
        if self.rule.skips(request.group, request.text):
            return Answer(message={"role": "assistant", "content": NOT_ASKED}, confidence=0.0)
        return await self.answerer.answer(request)
