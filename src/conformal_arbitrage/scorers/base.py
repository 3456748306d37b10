"""Scorer and Answerer: the two protocols of live models, each with one method.

A *scorer* turns a query into one number per action. It holds the prompt and the parser and does no I/O of its own: for
that it has a port, where time and money are spent.

Knows nothing of roles: a scorer that fails raises, and whoever asked it decides what a failure means.
"""

from collections.abc import Mapping
from typing import Any, Protocol, cast

from msgspec import Struct, field

from conformal_arbitrage.core.gaps import LARGEST_SCORE
from conformal_arbitrage.errors import ReplyError
from conformal_arbitrage.types import ChatRequest, Query, Spent
from conformal_arbitrage.upstream.base import is_number

Identity = Mapping[str, Any]
"""All that the scores depend on, as a JSON object of texts, numbers, truth values and nulls."""


class Scores(Struct, frozen=True, kw_only=True):
    """One number per action of a query, in its order; the larger the better."""

    values: tuple[float, ...]
    spent: Spent = field(default_factory=Spent)
    raw: str | None = None
    served: str | None = None


class Scorer(Protocol):
    """Anything that can score the actions of a query: a model, a rule, a person."""

    @property
    def identity(self) -> Identity:
        """All that the scores depend on; a certificate is bound to it."""
        ...

    async def score(self, query: Query) -> Scores:
        """One number per action.

        Raises:
            ScorerError: there are no scores.
        """
        ...


class Answer(Struct, frozen=True, kw_only=True):
    """A finished answer to a chat request.

    Attributes:
        message: the assistant's message, tool calls included.
        confidence: how sure the model is, 0 or more; None if it gave none, which counts as 0.
        document: the whole completion as the endpoint sent it.
    """

    message: Mapping[str, Any]
    confidence: float | None = None
    spent: Spent = field(default_factory=Spent)
    document: Any = None
    served: str | None = None


class Answerer(Protocol):
    """Anything that answers chat requests in free text or with tool calls."""

    @property
    def identity(self) -> Identity:
        """All that answers and confidences depend on."""
        ...

    async def answer(self, request: ChatRequest) -> Answer:
        """A finished answer.

        Raises:
            ScorerError: there is none.
        """
        ...


async def checked_scores(scorer: Scorer, query: Query) -> Scores:
    """A scorer's numbers, one per action and finite, whoever wrote the scorer.

    Raises:
        ScorerError: there are none, or not as many as there are actions.
    """
    scores = await scorer.score(query)
    wide = {"lowest": -LARGEST_SCORE, "highest": LARGEST_SCORE}
    values = check_values(scores.values, len(query.actions), spent=scores.spent, raw=scores.raw, **wide)
    return Scores(values=values, spent=scores.spent, raw=scores.raw, served=scores.served)


def check_values(
    values: object, count: int, *, spent: Spent, raw: str | None, lowest: float = 0.0, highest: float = 1.0
) -> tuple[float, ...]:
    """Numbers within bounds, one per action, or a ReplyError."""
    listed = cast("list[object]", values) if isinstance(values, list | tuple) else None
    if listed is None:
        problem = "the scores are not a list"
    elif len(listed) != count:
        problem = f"{len(listed)} scores for {count} options"
    else:
        bad = [v for v in listed if not is_number(v) or not lowest <= v <= highest]
        problem = f"the score {bad[0]!r:.40} is not a number from {lowest:g} to {highest:g}" if bad else None
    if problem is not None:
        raise ReplyError(f"{problem}; the reply was {raw!r:.200}", spent=spent, raw=raw)
    return tuple(float(v) for v in cast("list[float]", listed))
