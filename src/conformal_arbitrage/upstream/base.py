"""Call, Reply, Port: what it takes to ask a model over the wire, and what goes around every call.

An HTTP endpoint, a local model, a function and a person are ports; retry, limit, cache and price wrap a port and are
ports themselves.

Knows nothing of prompts, scores or roles.
"""

import asyncio
import hashlib
import json
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar, cast

from msgspec import Struct, field

from conformal_arbitrage.errors import ArbitrageError, CostLimitError, ScorerError
from conformal_arbitrage.types import Sink, Spent

Result = TypeVar("Result")


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


def fingerprint(document: object) -> str:
    """SHA-256 of a JSON document, whatever the order of its keys."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def spent_of(error: ScorerError) -> Spent:
    """What a failure took."""
    return error.spent if isinstance(error.spent, Spent) else Spent()


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


def is_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a number."""
    return type(value) is float or (isinstance(value, int | float) and not isinstance(value, bool))
