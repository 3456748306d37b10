"""Call, Reply, Port: a request to a model over the wire, its reply, and the interface every transport implements.

An HTTP endpoint, a local model, a function and a person are ports. Retries, limits, caching and pricing are wrappers:
ports around a port, one concern each. They are meant to be stacked in this order:

    Cache(Limit(Breaker(Retry(Capped(Priced(port))))))

A stored reply is not requested again, a slot is held for a call and its retries, and every attempt is priced and has
to fit the spending limit.

Knows nothing of prompts, scores or roles.
"""

import asyncio
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, Protocol, TypeGuard, TypeVar

from msgspec import Struct, field

from conformal_arbitrage.errors import ArbitrageError, CostLimitError, QuotaError, ScorerError
from conformal_arbitrage.types import Chunk, Spent

Result = TypeVar("Result")

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
    spent: Spent = field(default_factory=Spent)


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


def _first(errors: BaseExceptionGroup[ArbitrageError]) -> ArbitrageError:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a JSON value is a number."""
    return type(value) is float or (isinstance(value, int | float) and not isinstance(value, bool))
