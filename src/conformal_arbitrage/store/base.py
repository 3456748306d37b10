"""Store: what a gateway must not lose, as one protocol; SQLite and PostgreSQL keep it.

Everything that is told of a decision is an event that is appended and never changed: the decision, its completion,
feedback, an audit. Each writer chains its events by hash, so damage shows.

Knows nothing of HTTP, models or certificates' meaning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct

Scope = Literal["call", "review", "admin"]
EventKind = Literal["decision", "completion", "feedback", "audit"]


class Event(Struct, frozen=True, kw_only=True):
    """One fact about a decision.

    Attributes:
        id: the decision's id, time-ordered.
        kind: which fact.
        body: the fact itself, a JSON object.
        policy: of a decision: whose rule.
        key_id: of a decision: whose call.
        decided_by: of a decision: who chose.
    """

    id: str
    kind: EventKind
    body: Mapping[str, Any]
    policy: str | None = None
    key_id: str | None = None
    decided_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """All that is known of one decision: its own event and what came later.

    Completion, feedback and audit are the bodies of their events, each with its time as `at`; of several completions or
    audits the first counts.
    """

    id: str
    created: float
    policy: str
    key_id: str | None
    decided_by: str
    decision: Mapping[str, Any]
    completion: Mapping[str, Any] | None = None
    feedback: Sequence[Mapping[str, Any]] = ()
    audit: Mapping[str, Any] | None = None


class Replay(Struct, frozen=True, kw_only=True):
    """A finished response to give again."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to do the work of one idempotency key; `owner` proves it."""

    key_id: str
    name: str
    owner: str


Claimed = Claim | Replay | Literal["other body", "under way"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A question the Guardian is still to be asked in the background."""

    id: str
    policy: str
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """One installed certificate of a policy; `origin` is the version that first brought it."""

    name: str
    version: int
    origin: int
    certificate: Mapping[str, Any]
    installed: float
    installed_by: str
    active: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """An API key without its secret."""

    id: str
    scope: Scope
    label: str
    created: float
    revoked: float | None = None


class Store(Protocol):
    """Durable memory. Every method that writes returns once the write is committed."""

    async def close(self) -> None:
        """Finish what is under way and let go."""
        ...

    async def commit(
        self,
        events: Sequence[Event],
        *,
        claim: Claim | None = None,
        replay: Replay | None = None,
        audits: Sequence[Audit] = (),
    ) -> None:
        """Append events in one transaction; with them finish an idempotency claim and queue audits.

        A claim without a replay stays under way (a stream whose decision is made); with one it is finished.

        Raises:
            LostClaimError: someone else took over the claim; nothing was written.
        """
        ...

    async def claim(self, key_id: str, name: str, body_sha256: str, *, lease: float) -> Claimed:
        """Take the right to answer a request, or find out that it was answered, is being, or was another request.

        A claim whose lease ran out may be taken over. Names expire after 24 hours.
        """
        ...

    async def renew(self, claim: Claim, *, lease: float) -> bool:
        """Keep a claim; False if it was taken over."""
        ...

    async def release(self, claim: Claim) -> None:
        """Give a claim up, as after a failure: the next request of that name starts afresh."""
        ...

    async def record(self, id: str) -> DecisionRecord | None:
        """One decision and what is known of it."""
        ...

    async def records(
        self,
        *,
        policy: str | None = None,
        key_id: str | None = None,
        decided_by: str | None = None,
        since: float | None = None,
        until: float | None = None,
        before: str | None = None,
        limit: int = 100,
    ) -> list[DecisionRecord]:
        """Decisions, newest first; `before` is the id where the last page ended."""
        ...

    async def take_audits(self, *, limit: int, lease: float) -> list[Audit]:
        """Audits to do now; one that is not finished within the lease is handed out again."""
        ...

    async def renew_audits(self, ids: Sequence[str], *, lease: float) -> None:
        """Keep audits that are being done."""
        ...

    async def policies(self) -> list[PolicyVersion]:
        """The active version of every policy."""
        ...

    async def policy_history(self, name: str) -> list[PolicyVersion]:
        """All versions of a policy, newest first."""
        ...

    async def install(self, name: str, certificate: Mapping[str, Any], *, by: str) -> PolicyVersion:
        """Make a certificate the active version of a policy."""
        ...

    async def rollback(self, name: str, *, by: str) -> PolicyVersion | None:
        """Make the version before the active one active again, as a new version; None if there is none."""
        ...

    async def change_count(self) -> int:
        """Grows whenever a policy is installed or rolled back, or a key made or revoked, by any gateway."""
        ...

    async def create_key(self, *, id: str, sha256: str, scope: Scope, label: str) -> None:
        """Keep an API key, as its digest only."""
        ...

    async def find_key(self, sha256: str) -> KeyInfo | None:
        """The key with this digest, revoked or not."""
        ...

    async def keys(self) -> list[KeyInfo]:
        """All keys."""
        ...

    async def revoke_key(self, id: str) -> bool:
        """Revoke a key; False if there is none of that id."""
        ...

    async def prune(self, *, before: float) -> int:
        """Remove decisions made before a time, with all their events; a checkpoint per writer keeps chains checkable."""
        ...

    async def verify(self) -> list[str]:
        """What is wrong with the hash chains, in words; empty if they hold."""
        ...
