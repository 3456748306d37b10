"""Kind `function`: any callable, sync or async, under a name the user gives it: rules, classifiers, reward models.

Knows nothing of what the function does; a sync one runs in a thread.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from conformal_arbitrage.core.gaps import LARGEST_SCORE, is_single
from conformal_arbitrage.errors import ConfigError, OptionError, UpstreamError
from conformal_arbitrage.scorers.base import Answerer, Identity, Scores, check_values
from conformal_arbitrage.scorers.kinds import BuildContext, ModelConfig
from conformal_arbitrage.scorers.rendered import PinnedAnswerer
from conformal_arbitrage.scorers.rendering import RENDERING
from conformal_arbitrage.scorers.request_fields import requested_identity
from conformal_arbitrage.scorers.user_code import UserCode, describe, source_identity
from conformal_arbitrage.types import Query, Spent
from conformal_arbitrage.upstream.base import Call, Port, Reply, WholePort

ScoreFunction = Callable[[Query], Sequence[float] | Awaitable[Sequence[float]]]


class FunctionConfig(ModelConfig, frozen=True, kw_only=True, tag="function"):
    """A callable: `function = "MODULE:NAME"`, identified by `name`."""

    function: str
    name: str

    answers_text: ClassVar[bool] = True
    untested: ClassVar[str | None] = "A function: loaded, not called."

    @property
    def label(self) -> str:
        """The name."""
        return self.name

    @property
    def alias(self) -> tuple[str, str] | None:
        """The name and the function behind it."""
        return self.name, self.function

    def build(self, context: BuildContext) -> "FunctionScorer":
        """Build the scorer."""
        return FunctionScorer(context.load(self.function), name=self.name, through=context.wrap)

    def build_answerer(self, context: BuildContext) -> Answerer:
        """Return the object, which must be an answerer, pinned by its source."""
        answerer = context.load(self.function)
        if not hasattr(answerer, "answer") or not hasattr(answerer, "identity"):
            raise ConfigError(
                f"[{context.section}] {self.function}: in text form it must be an object with `answer` and `identity`"
            )
        pinned = {**source_identity(answerer), **requested_identity(context.request_settings)}
        return PinnedAnswerer(answerer, pinned)


@dataclass(frozen=True, slots=True)
class FunctionPort(WholePort):
    """A function as a port: a query as JSON in, its numbers out."""

    function: ScoreFunction
    name: str
    source: str | None = None

    @property
    def origin(self) -> str:
        """The function's name and the start of its digest: stored replies of an earlier version are not its own."""
        return f"function:{self.name}" + (f"#{self.source[:8]}" if self.source else "")

    async def call(self, call: Call) -> Reply:
        """Run the function."""
        query = query_from(call)
        with UserCode(self._failure):
            values = await self._values(query)
        if is_single(values):
            raise OptionError(
                f"{self.name} returned scores in single precision, while scores are recorded and compared in double "
                "precision; compute and return float64"
            )
        return Reply(document={"values": _as_json(values)}, spent=Spent(calls=1, cost=None))

    async def _values(self, query: Query) -> object:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(query)
        result = await asyncio.to_thread(self._run, query)
        return await result if inspect.isawaitable(result) else result

    def _run(self, query: Query) -> Any:
        with UserCode(self._failure):  # in the thread, since no future can carry a StopIteration out of it
            return self.function(query)

    def _failure(self, error: Exception) -> UpstreamError:
        return UpstreamError(f"{self.name} failed ({describe(error)})", spent=Spent(calls=1, cost=None))


class FunctionScorer:
    """Scores options by a function of the query. A function that raises has failed on that query.

    Args:
        function: takes a `Query`, returns one number per action; may be async.
        name: identifies the function, with its source if that is available; give it a new one when something changes
            that the function calls.
        through: wraps the call, such as `lambda port: Retry(port, deadline=2)`.
    """

    def __init__(
        self, function: ScoreFunction, *, name: str, through: Callable[[Port], Port] = lambda port: port
    ) -> None:
        self._name = name
        self._source = source_identity(function)
        self._port = through(FunctionPort(function, name, self._source.get("source_sha256")))

    @property
    def identity(self) -> Identity:
        """The name, the digest of the source, and the form of the question it gets."""
        return {"kind": "function", "name": self._name, **self._source, "rendering": RENDERING}

    async def score(self, query: Query) -> Scores:
        """Return the function's numbers, checked."""
        reply = await self._port.call(call_for(query))
        numbers = reply.document["values"]
        wide = {"lowest": -LARGEST_SCORE, "highest": LARGEST_SCORE}
        values = check_values(numbers, len(query.actions), spent=reply.spent, raw=repr(numbers), **wide)
        return Scores(values=values, spent=reply.spent, raw=repr(numbers))


def call_for(query: Query) -> Call:
    """Return the call that carries a query to a port in this process."""
    context = query.context if isinstance(query.context, str) else [dict(m) for m in query.context]
    body = {"context": context, "actions": list(query.actions), "places": query.places}
    return Call(path="/score", body=body, id=query.id, output_limit=0)


def query_from(call: Call) -> Query:
    """Return the query that such a call carries."""
    places = call.body["places"]
    shown = None if places is None else tuple(places)
    return Query(call.body["context"], tuple(call.body["actions"]), id=call.id, places=shown)


def _as_json(values: Any) -> object:
    """Return arrays as lists of plain numbers; anything but a list as its repr, for the check to report."""
    listed: object = values.tolist() if hasattr(values, "tolist") else values
    if not _is_list(listed):
        return repr(listed)
    return [_as_number(value) for value in listed]


def _as_number(value: Any) -> Any:
    """Return a NumPy scalar as a plain number."""
    return value.item() if hasattr(value, "item") else value


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)
