"""Small frozen value types that the layers share; those of live decisions are structs, made ten times as fast."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from conformal_arbitrage.core.gaps import Floats

Boundary = Literal["include", "random"]
MissingGuardian = Literal["worst_case"]
DecidedBy = Literal["primary", "guardian", "fallback"]
Role = Literal["primary", "guardian"]
Messages = Sequence[Mapping[str, Any]]
Sink = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Takes the chunks of a streamed chat completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a score log, as a user's loss sees it. What the log does not hold is None."""

    index: int
    primary: Floats
    guardian: Floats
    id: str | None = None
    label: int | None = None
    group: str | None = None
    context: str | None = None
    actions: list[str] | None = None
    lists: Mapping[str, Floats]
    extra: Mapping[str, Any]


class Query(Struct, frozen=True):
    """One question with its menu.

    Attributes:
        context: the question, or chat messages.
        actions: the texts to choose from.
        id: fixed before any score is known, kept across retries; made by the policy if None.
        places: where these actions stood in the whole menu, if only some of it is shown.
    """

    context: str | Messages
    actions: tuple[str, ...]
    id: str | None = None
    places: tuple[int, ...] | None = None

    def only(self, places: Sequence[int]) -> "Query":
        """The same question with a part of its menu."""
        return replace(self, actions=tuple(self.actions[k] for k in places), places=tuple(places))

    @property
    def text(self) -> str:
        """The context as one text."""
        return self.context if isinstance(self.context, str) else transcript(self.context)


class ChatRequest(Struct, frozen=True):
    """A chat request as the application wrote it: `messages`, and `tools`, `response_format` and the like where given.

    With a `sink` the answer may be streamed: its chunks go there as they come.
    """

    body: Mapping[str, Any]
    id: str | None = None
    sink: Sink | None = None

    @property
    def messages(self) -> Messages:
        """The conversation so far."""
        return self.body["messages"]


class Spent(Struct, frozen=True, kw_only=True):
    """What calls took. None is unknown, and stays unknown in a sum; it is never counted as nothing."""

    calls: int = 0
    input_tokens: int | None = 0
    output_tokens: int | None = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    cost: float | None = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(
            calls=self.calls + other.calls,
            input_tokens=_sum(self.input_tokens, other.input_tokens),
            output_tokens=_sum(self.output_tokens, other.output_tokens),
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            cost=_sum(self.cost, other.cost),
        )


Number = TypeVar("Number", int, float)


def _sum(one: Number | None, other: Number | None) -> Number | None:
    return None if one is None or other is None else one + other


class Leg(Struct, frozen=True, kw_only=True):
    """One model's part in a live decision.

    Attributes:
        role: which part it played.
        scores: what it thought of the actions it was shown; None if it failed, or answered in free text.
        spent: calls, tokens and dollars, retries and confidence calls included.
        seconds: how long it took.
        served: the model that answered, as the endpoint names it.
        error: what went wrong, if anything.
        reply: the chat completion, if it answered in free text.
    """

    role: Role
    scores: tuple[float, ...] | None
    spent: Spent
    seconds: float
    served: str | None = None
    error: str | None = None
    reply: Any = None


class Decision(Struct, frozen=True, kw_only=True):
    """What the rule does with one query.

    Attributes:
        action: index of the chosen action; None if the Guardian was to choose and its scores are missing.
        candidates: indices of the actions in sight of the rule.
        decided_by: who chose; "fallback" is the safe action that a live policy takes if the Guardian fails.
        margin: how far the Primary's top action leads; infinite if there is no other.
        relaxation: how far it has to lead to stand alone; None if nothing does, or no rule was at work.
        answer: the chosen action's text, or in router form the whole assistant message; live decisions only.
        legs: whom a live decision asked, in order.
        no_guarantee: why a live decision is under no guarantee; None if it is under one.
    """

    id: str | None
    action: int | None
    candidates: tuple[int, ...]
    decided_by: DecidedBy
    margin: float
    relaxation: float | None = None
    answer: str | Mapping[str, Any] | None = None
    legs: tuple[Leg, ...] = ()
    no_guarantee: str | None = None

    @property
    def deferred(self) -> bool:
        """Whether the Guardian was asked."""
        return self.decided_by != "primary"

    @property
    def spent(self) -> Spent:
        """What the decision took in all."""
        return self.legs[0].spent if len(self.legs) == 1 else sum((leg.spent for leg in self.legs), start=Spent())


def transcript(messages: Messages) -> str:
    """A conversation as one text, for a prompt or a person to read."""
    return "\n\n".join(f"{m.get('role', 'user')}: {content_text(m.get('content'))}" for m in messages)


def content_text(content: Any) -> str:
    """The text of a message's content: as it is, or of its text parts; other parts are named."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = [cast("dict[str, Any]", p) for p in cast("list[object]", content) if isinstance(p, dict)]
    return "\n".join(str(p.get("text", f"[{p.get('type')}]")) for p in parts)
