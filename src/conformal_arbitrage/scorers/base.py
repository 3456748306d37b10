"""The two ports of live models, each with one method.

A *scorer* turns a query into one number per action. It holds the prompt and the parser and does no I/O of its own: for
that it has a *port*, where time and money are spent. An HTTP endpoint, a local model, a function and a person are
ports; retry, limit, cache and price wrap a port and are ports themselves.

Knows nothing of roles: a scorer that fails raises, and whoever asked it decides what a failure means.
"""

import asyncio
import hashlib
import json
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar, cast

from msgspec import Struct, field

from conformal_arbitrage.core.gaps import LARGEST_SCORE
from conformal_arbitrage.errors import ArbitrageError, CostLimitError, ReplyError, ScorerError
from conformal_arbitrage.types import ChatRequest, Query, Sink, Spent

Result = TypeVar("Result")

Identity = Mapping[str, Any]
"""All that the scores depend on, as a JSON object of texts, numbers, truth values and nulls."""


class Call(Struct, frozen=True, kw_only=True):
    """One request to a port.

    Attributes:
        path: what is asked of the port, such as /chat/completions.
        body: the request, a JSON object.
        id: the query it belongs to.
        sample: tells equal requests of one query apart.
        output_limit: the most output tokens the reply can have; None if unknown.
        sink: takes the chunks of the reply as they come, where the port can stream; the reply is whole all the same.
    """

    path: str
    body: Mapping[str, Any]
    id: str | None = None
    sample: int = 0
    output_limit: int | None = None
    sink: Sink | None = None


class Reply(Struct, frozen=True, kw_only=True):
    """What a port answered.

    Attributes:
        document: the reply, a JSON document.
        spent: what it took.
    """

    document: Any
    spent: Spent = field(default_factory=Spent)


class Port(Protocol):
    """Where calls go."""

    @property
    def origin(self) -> str:
        """Where the port leads, as an identity names it."""
        ...

    async def call(self, call: Call) -> Reply:
        """Make one call.

        Raises:
            UpstreamError: there is no reply.
        """
        ...


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


def fingerprint(document: object) -> str:
    """SHA-256 of a JSON document, whatever the order of its keys."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def spent_of(error: ScorerError) -> Spent:
    """What a failure took."""
    return error.spent if isinstance(error.spent, Spent) else Spent()


async def checked_scores(scorer: Scorer, query: Query) -> Scores:
    """A scorer's numbers, one per action and finite, whoever wrote the scorer.

    Raises:
        ScorerError: there are none, or not as many as there are actions.
    """
    scores = await scorer.score(query)
    wide = {"lowest": -LARGEST_SCORE, "highest": LARGEST_SCORE}
    values = check_values(scores.values, len(query.actions), spent=scores.spent, raw=scores.raw, **wide)
    return Scores(values=values, spent=scores.spent, raw=scores.raw, served=scores.served)


async def together(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run calls at once; if one fails the others are cancelled and its error is raised.

    A call that is refused for want of money cancels nothing: the others are paid for, and end first.
    """
    if len(calls) == 1:
        return [await calls[0]]
    refused: list[CostLimitError] = []

    async def ended(call: Coroutine[Any, Any, Result]) -> Result | None:
        try:
            return await call
        except CostLimitError as error:
            refused.append(error)
            return None

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ended(call)) for call in calls]
    except* ArbitrageError as errors:
        raise _first(errors) from errors
    if refused:
        raise refused[0]
    return cast("list[Result]", [task.result() for task in tasks])


def _first(errors: BaseExceptionGroup[ArbitrageError]) -> ArbitrageError:
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


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


def is_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a number."""
    return type(value) is float or (isinstance(value, int | float) and not isinstance(value, bool))
