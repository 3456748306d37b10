"""Scorer, Answerer: the protocols of live models.

A *scorer* turns a query into one number per action. An *answerer* writes a chat reply. Both hold the prompt and the
parser and do no I/O of their own: they have a port for that, where time and money are spent.

Knows nothing of roles: a model that fails raises, and the caller decides what a failure means.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from msgspec import Struct, field

from conformal_arbitrage.core.gaps import LARGEST_SCORE
from conformal_arbitrage.errors import ReplyError
from conformal_arbitrage.types import ChatRequest, Chunk, Query, Spent

Identity = Mapping[str, Any]
"""Everything the scores depend on, as a JSON object of strings, numbers, booleans and nulls."""


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
        """Everything the scores depend on; a certificate is bound to it."""
        ...

    async def score(self, query: Query) -> Scores:
        """Return one number per action.

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
        """Everything answers and confidences depend on."""
        ...

    async def answer(self, request: ChatRequest) -> Answer:
        """Return a finished answer.

        Raises:
            ScorerError: there is none.
        """
        ...


class StreamingAnswerer(Answerer, Protocol):
    """An answerer that can also stream."""

    def stream(self, request: ChatRequest) -> AsyncGenerator[Chunk | Answer]:
        """Yield chunks as they arrive, then the finished answer.

        Raises:
            ScorerError: there is no answer, or it broke off.
        """
        ...


def stream_answer(answerer: Answerer, request: ChatRequest) -> AsyncGenerator[Chunk | Answer]:
    """Stream an answer; an answerer that cannot stream yields its answer alone."""
    return answerer.stream(request) if _can_stream(answerer) else _whole_answer(answerer, request)


def _can_stream(answerer: Answerer) -> TypeGuard[StreamingAnswerer]:
    return hasattr(answerer, "stream")


async def _whole_answer(answerer: Answerer, request: ChatRequest) -> AsyncGenerator[Chunk | Answer]:
    yield await answerer.answer(request)


async def checked_scores(scorer: Scorer, query: Query) -> Scores:
    """Return a scorer's numbers after checking that they are finite and one per action, whoever wrote the scorer.

    Raises:
        ScorerError: there are none, or not as many as there are actions.
    """
    return check_scores(await scorer.score(query), len(query.actions))


def check_scores(scores: Scores, count: int) -> Scores:
    """Return scores after checking that they are finite and one per action.

    Raises:
        ReplyError: they are not.
    """
    bounds = {"lowest": -LARGEST_SCORE, "highest": LARGEST_SCORE}
    values = check_values(scores.values, count, spent=scores.spent, raw=scores.raw, **bounds)
    return Scores(values=values, spent=scores.spent, raw=scores.raw, served=scores.served)


def check_values(
    values: object, count: int, *, spent: Spent, raw: str | None, lowest: float = 0.0, highest: float = 1.0
) -> tuple[float, ...]:
    """Return the numbers, one per action, if all are within bounds.

    Raises:
        ReplyError: they are not.
    """
    if not _is_sequence(values):
        problem = "the scores are not a list"
    elif len(values) != count:
        problem = f"{len(values)} scores for {count} options"
    else:
        numbers = [float(value) for value in values if _is_number_within(value, lowest, highest)]
        if len(numbers) == count:
            return tuple(numbers)
        bad = next(value for value in values if not _is_number_within(value, lowest, highest))
        problem = f"the score {bad!r:.40} is not a number from {lowest:g} to {highest:g}"
    raise ReplyError(f"{problem}; the reply was {raw!r:.200}", spent=spent, raw=raw)


def _is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)


def _is_number_within(value: object, lowest: float, highest: float) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and lowest <= value <= highest
