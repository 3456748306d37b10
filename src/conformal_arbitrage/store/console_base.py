"""What the console keeps in a store beside the record: who is signed in, counts by the hour, and marked decisions.

Knows nothing of SQL, cookies or pages.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct

from conformal_arbitrage.store.record import DecisionRecord
from conformal_arbitrage.store.row_base import CalibrationRow

if TYPE_CHECKING:
    from conformal_arbitrage.store.base import Scope

Mark = Literal["audited", "no guarantee", "fallback"]
"""What a decision can be looked up by, besides policy, time and who decided."""


class SignIn(Struct, frozen=True, kw_only=True):
    """Someone who signed in to the console with an API key.

    Attributes:
        key_id: of the key.
        scope, label, policies: the key's, as they are now.
        valid: whether the key is still valid: neither revoked nor expired.
        created: when they signed in.
        idle: seconds since they were last noted.
    """

    key_id: str
    scope: "Scope"
    label: str
    policies: tuple[str, ...] | None
    valid: bool
    created: float
    idle: float


class PolicyTally(Struct, frozen=True, kw_only=True):
    """What the decisions of a policy's version came to.

    Attributes:
        decisions: all of them; callers who left before there was a decision are not counted.
        by_primary, by_guardian, by_fallback: who chose.
        no_guarantee: those without a guarantee.
        cost: dollars of the decisions whose cost is known.
        unknown_cost: how many decisions have an unknown cost.
        guardian_calls, guardian_cost: answers of the Guardian to deferrals whose cost is known, and their dollars.
        audit_calls, audit_cost: the same over decisions that the audit coin drew, whoever decided them.
    """

    policy: str
    version: int
    decisions: int = 0
    by_primary: int = 0
    by_guardian: int = 0
    by_fallback: int = 0
    no_guarantee: int = 0
    cost: float = 0.0
    unknown_cost: int = 0
    guardian_calls: int = 0
    guardian_cost: float = 0.0
    audit_calls: int = 0
    audit_cost: float = 0.0


class MarkedDecisions(Struct, frozen=True, kw_only=True):
    """Some of the decisions that have a mark.

    Attributes:
        records: at most as many as were asked for.
        end: the id where the search stopped, so that it can go on from there; None if there is nothing further back.
    """

    records: Sequence[DecisionRecord]
    end: str | None


class ConsoleStore(Protocol):
    """The part of a store that the console alone uses."""

    async def sign_in(self, sha256: str, key_id: str, *, seconds: float) -> None:
        """Note that someone signed in with a key, for so many seconds; `sha256` is the digest of their cookie."""
        ...

    async def find_sign_in(self, sha256: str) -> SignIn | None:
        """Return who signed in with a cookie of that digest, unless their time is over."""
        ...

    async def note_sign_in(self, sha256: str) -> None:
        """Note that they are still there."""
        ...

    async def sign_out(self, sha256: str) -> None:
        """Forget a sign-in."""
        ...

    async def fold_tallies(self) -> int:
        """Count the events that are new since the last time, each once; return how many there were."""
        ...

    async def decisions_under(self, policy: str, version: int) -> int:
        """Return how many decisions of a policy's version `fold_tallies` has counted."""
        ...

    async def tallies(self, *, since: float) -> list[PolicyTally]:
        """Return the counts of every version of every policy, from the hour of a time on."""
        ...

    async def answered_in_time(self, policy: str, wait: float, *, days: float = 1.0) -> tuple[int, int]:
        """Return how many callers' questions people decided within `wait` seconds, of all that ended in the last days."""
        ...

    async def latest_rows(
        self, policy: str, *, identities_sha256: str, limit: int, wanted: Callable[[str], bool]
    ) -> list[CalibrationRow]:
        """Return those of the latest calibration rows of a policy, made by these models, that are wanted by their id.

        Raises:
            StoreError: a row is not what was written.
        """
        ...

    async def open_places(self) -> int:
        """Return how many votes the queue of reviews waits for that nobody is about to give."""
        ...

    async def open_reviews(self, teams: Collection[str]) -> int:
        """Return how many questions these teams have before them."""
        ...

    async def own_votes(self, reviewer: str, *, since: float) -> list[float]:
        """Return for how many seconds a reviewer held each question that they voted on since then."""
        ...

    async def marked_decisions(
        self,
        mark: Mark,
        *,
        policy: str | None = None,
        decided_by: str | None = None,
        since: float | None = None,
        until: float | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> MarkedDecisions:
        """Return marked decisions, those asked last first; times are when they were asked.

        Decisions without a guarantee, and those that a fallback answered, are found once `fold_tallies` has counted them,
        audited ones at once. Of those that an earlier release counted, some may turn out not to be a fallback's.
        """
        ...
