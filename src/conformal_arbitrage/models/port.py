"""Ports and protocols: a call to a model, its reply, and the interfaces of transports, scorers and answerers."""

import asyncio
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

import msgspec
from msgspec import Struct

from conformal_arbitrage.core.exact import LARGEST_SCORE
from conformal_arbitrage.errors import ArbitrageError, CostLimitError, QuotaError, ReplyError, ScorerError
from conformal_arbitrage.types import ChatRequest, Chunk, Query, Spent

# --- Call, Reply, Port ---


Item = TypeVar("Item")
Result = TypeVar("Result")

UNKNOWN = Spent(calls=1, input_tokens=None, output_tokens=None, cost=None)
"""What a call took that was sent and brought no usage."""

IN_BACKGROUND: ContextVar[bool] = ContextVar("in_background", default=False)
"""Whether the current task's calls can wait, as an audit's can: a share of every limit is kept for those that cannot."""


class Call(Struct, frozen=True, kw_only=True):
    """One request to a port.

    Attributes:
        path: the route, such as /chat/completions.
        body: the request, a JSON object.
        id: the query it belongs to.
        sample: distinguishes equal requests of one query.
        output_limit: the most output tokens the reply can have; None if unknown.
        headers: further headers, such as a trace context.
    """

    path: str
    body: Mapping[str, Any]
    id: str | None = None
    sample: int = 0
    output_limit: int | None = None
    headers: Mapping[str, str] | None = None


class Reply(Struct, frozen=True, kw_only=True):
    """A port's reply.

    Attributes:
        document: the reply, a JSON document.
        spent: the calls, tokens and dollars it took.
    """

    document: Any
    spent: Spent = msgspec.field(default_factory=Spent)


class Port(Protocol):
    """Where calls go."""

    @property
    def origin(self) -> str:
        """The address, as an identity names it."""
        ...

    async def call(self, call: Call) -> Reply:
        """Make one call.

        Raises:
            UpstreamError: there is no reply.
        """
        ...

    def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Make one call and yield its chunks as they arrive, then the whole reply.

        A port that cannot stream yields the reply alone. Close the generator to abandon the call: that releases
        connections, slots and reserved money.

        Raises:
            UpstreamError: there is no reply; not retryable once a chunk has been yielded.
        """
        ...


class WholePort(ABC):
    """Base of ports that cannot stream."""

    @abstractmethod
    async def call(self, call: Call) -> Reply:
        """Make one call."""

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Yield the reply alone."""
        yield await self.call(call)


class Wrapper:
    """Base of the wrappers: a port around a port that passes everything through."""

    def __init__(self, port: Port) -> None:
        self.port = port

    @property
    def origin(self) -> str:
        """The wrapped port's address."""
        return self.port.origin

    async def call(self, call: Call) -> Reply:
        """Make the call."""
        return await self.port.call(call)

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Make the call and yield its chunks, then its reply."""
        async with aclosing(self.port.stream(call)) as items:
            async for item in items:
                yield item


def fingerprint(document: object) -> str:
    """Return the SHA-256 of a JSON document; the order of its keys does not matter."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def spent_of(error: ScorerError) -> Spent:
    """Return what a failed call took."""
    return error.spent if isinstance(error.spent, Spent) else Spent()


async def together(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run calls concurrently; if one fails, cancel the others and raise its error.

    A call refused by a spending limit cancels nothing: the others are paid for, so they finish first.
    """
    if len(calls) == 1:
        return [await calls[0]]
    refused: list[CostLimitError | QuotaError] = []
    results: dict[int, Result] = {}

    async def run(place: int, call: Coroutine[Any, Any, Result]) -> None:
        try:
            results[place] = await call
        except (CostLimitError, QuotaError) as error:
            refused.append(error)

    try:
        async with asyncio.TaskGroup() as group:
            for place, call in enumerate(calls):
                group.create_task(run(place, call))
    except* ArbitrageError as errors:
        raise _first(errors) from errors
    if refused:
        raise refused[0]
    return [results[place] for place in range(len(calls))]


async def work_through(items: Sequence[Item], work: Callable[[Item], Awaitable[None]], *, at_once: int) -> None:
    """Work on every item, several at once; after an error begin no other.

    Raises:
        CostLimitError: the money ran out; what was in flight was finished first.
    """
    waiting = iter(items)
    out_of_money = False

    async def worker() -> None:
        nonlocal out_of_money
        for item in waiting:
            if out_of_money:
                return
            try:
                await work(item)
            except CostLimitError:
                out_of_money = True
                raise

    await together([worker() for _ in range(min(at_once, len(items)))])


async def until(ends: float, step: Awaitable[Result]) -> Result:
    """Wait for one step of a stream; a timeout must not span a yield, or it would cancel the consumer instead."""
    async with asyncio.timeout_at(ends):
        return await step


def _first(errors: BaseExceptionGroup[ArbitrageError]) -> ArbitrageError:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a JSON value is a number."""
    return type(value) is float or (isinstance(value, int | float) and not isinstance(value, bool))


# --- Scorer, Answerer ---


Identity = Mapping[str, Any]
"""Everything the scores depend on, as a JSON object of strings, numbers, booleans and nulls."""


class Scores(Struct, frozen=True, kw_only=True):
    """One number per action of a query, in its order; the larger the better."""

    values: tuple[float, ...]
    spent: Spent = msgspec.field(default_factory=Spent)
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
    spent: Spent = msgspec.field(default_factory=Spent)
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


class Quota(Protocol):
    """Anything that limits how often a model is asked."""

    async def start(self) -> None:
        """Count one question."""
        ...


_Model = TypeVar("_Model", Scorer, Answerer)


@dataclass(frozen=True, slots=True)
class WrappedModel(Generic[_Model]):
    """A scorer or an answerer with more in its identity, or within a quota.

    Attributes:
        pinned: what its identity says besides: how questions are shown, or the digest of its source.
        quota: limits how often it is asked; None for as often as anybody likes.
    """

    model: _Model
    pinned: Identity = field(default_factory=dict[str, Any])
    quota: Quota | None = None

    @property
    def identity(self) -> Identity:
        """The model's own, and what is pinned."""
        return {**self.model.identity, **self.pinned}

    async def score(self: "WrappedModel[Scorer]", query: Query) -> Scores:
        """Return the model's numbers, if the quota allows."""
        await self._admit()
        return await self.model.score(query)

    async def answer(self: "WrappedModel[Answerer]", request: ChatRequest) -> Answer:
        """Return the model's answer, if the quota allows."""
        await self._admit()
        return await self.model.answer(request)

    async def stream(self: "WrappedModel[Answerer]", request: ChatRequest) -> AsyncGenerator[Chunk | Answer]:
        """Yield the model's chunks, if it streams, then the answer, if the quota allows."""
        await self._admit()
        async with aclosing(stream_answer(self.model, request)) as items:
            async for item in items:
                yield item

    async def _admit(self) -> None:
        if self.quota is not None:
            await self.quota.start()


async def checked_scores(scorer: Scorer, query: Query) -> Scores:
    """Return a scorer's numbers after checking that they are finite and one per action, whoever wrote the scorer.

    Raises:
        ScorerError: there are none, or not as many as there are actions.
    """
    return check_scores(await scorer.score(query), len(query.actions))


def check_scores(scores: Scores, count: int) -> Scores:
    """Return scores after checking that they are finite and one per action."""
    bounds = {"lowest": -LARGEST_SCORE, "highest": LARGEST_SCORE}
    values = check_values(scores.values, count, spent=scores.spent, raw=scores.raw, **bounds)
    return Scores(values=values, spent=scores.spent, raw=scores.raw, served=scores.served)


def check_values(
    values: object, count: int, *, spent: Spent, raw: str | None, lowest: float = 0.0, highest: float = 1.0
) -> tuple[float, ...]:
    """Return the numbers, one per action, if all are within bounds."""
    if not is_sequence(values):
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


def is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    """Tell whether a value is a list or a tuple."""
    return isinstance(value, list | tuple)


def _is_number_within(value: object, lowest: float, highest: float) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and lowest <= value <= highest
