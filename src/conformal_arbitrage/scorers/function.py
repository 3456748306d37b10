"""FunctionScorer: any callable, sync or async, under a name the user gives it: rules, classifiers, reward models.

Knows nothing of what the function does; a sync one runs in a thread.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from conformal_arbitrage.core.gaps import LARGEST_SCORE
from conformal_arbitrage.errors import ScorerError, UpstreamError
from conformal_arbitrage.scorers.base import Identity, Scores, check_values
from conformal_arbitrage.types import Query, Spent
from conformal_arbitrage.upstream.base import Call, Port, Reply

ScoreFunction = Callable[[Query], Sequence[float] | Awaitable[Sequence[float]]]


@dataclass(frozen=True, slots=True)
class FunctionPort:
    """A function as a port: a query as JSON in, its numbers out."""

    function: ScoreFunction
    name: str
    failures: tuple[type[Exception], ...] = (Exception,)

    @property
    def origin(self) -> str:
        """The function's name."""
        return f"function:{self.name}"

    async def call(self, call: Call) -> Reply:
        """Run the function."""
        query = query_from(call)
        try:
            if inspect.iscoroutinefunction(self.function):
                found = await self.function(query)
            else:
                found = await asyncio.to_thread(self._run, query)
                found = await found if inspect.isawaitable(found) else found
        except ScorerError:
            raise
        except self.failures as error:
            reason = f"{type(error).__name__}: {error}"
            raise UpstreamError(f"{self.name} failed ({reason:.200})", spent=Spent(calls=1, cost=None)) from error
        return Reply(document={"values": _plain(found)}, spent=Spent(calls=1, cost=None))

    def _run(self, query: Query) -> Any:
        try:
            return self.function(query)
        except StopIteration as error:  # no future can hold it: the caller would wait for ever
            raise RuntimeError("StopIteration") from error


class FunctionScorer:
    """Scores from a function of the query.

    Args:
        function: takes a `Query`, returns one number per action; may be async.
        name: what it is called in identities; give a new one when the function changes.
        failures: the exceptions that mean it cannot answer this query.
        through: wraps the call, such as `lambda port: Retry(port, deadline=2)`.
    """

    def __init__(
        self,
        function: ScoreFunction,
        *,
        name: str,
        failures: tuple[type[Exception], ...] = (Exception,),
        through: Callable[[Port], Port] = lambda port: port,
    ) -> None:
        self._name = name
        self._port = through(FunctionPort(function, name, failures))

    @property
    def identity(self) -> Identity:
        """The name."""
        return {"kind": "function", "name": self._name}

    async def score(self, query: Query) -> Scores:
        """The function's numbers, checked."""
        reply = await self._port.call(call_for(query))
        found = reply.document["values"]
        wide = {"lowest": -LARGEST_SCORE, "highest": LARGEST_SCORE}
        values = check_values(found, len(query.actions), spent=reply.spent, raw=repr(found), **wide)
        return Scores(values=values, spent=reply.spent, raw=repr(found))


def call_for(query: Query) -> Call:
    """A query as a call to a port in this process."""
    context = query.context if isinstance(query.context, str) else [dict(m) for m in query.context]
    body = {"context": context, "actions": list(query.actions), "places": query.places}
    return Call(path="/score", body=body, id=query.id, output_limit=0)


def query_from(call: Call) -> Query:
    """The query behind such a call."""
    places = call.body["places"]
    shown = None if places is None else tuple(places)
    return Query(call.body["context"], tuple(call.body["actions"]), id=call.id, places=shown)


def _plain(found: Any) -> Any:
    """Numbers as JSON: arrays become lists; what is neither is left for the check to name."""
    listed: object = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(listed, list | tuple):
        return repr(listed)
    return [v.item() if isinstance(v, np.generic) else v for v in cast("list[object]", listed)]
