"""Small frozen value types that the layers share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from conformal_arbitrage.core.gaps import Floats

Boundary = Literal["include", "random"]
MissingGuardian = Literal["worst_case"]
DecidedBy = Literal["primary", "guardian"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the rule does with one query.

    Attributes:
        action: index of the chosen action; None if the Guardian was to choose and its scores are missing.
        candidates: indices of the actions in sight of the rule.
        decided_by: who chose.
        margin: how far the Primary's top action leads; infinite if there is no other.
    """

    id: str | None
    action: int | None
    candidates: tuple[int, ...]
    decided_by: DecidedBy
    margin: float

    @property
    def deferred(self) -> bool:
        """Whether the Guardian was asked."""
        return self.decided_by == "guardian"
