"""SQLStore: the protocol over SQL; what it leaves open is how a job gets a connection and a transaction.

Knows nothing of SQLite, PostgreSQL or threads.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from conformal_arbitrage.errors import OptionError, StoreError
from conformal_arbitrage.store import sql as work
from conformal_arbitrage.store.base import (
    Audit,
    Claim,
    Claimed,
    DecisionRecord,
    Event,
    KeyInfo,
    PolicyVersion,
    Replay,
    Scope,
)
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.hash_chain import canonical

T = TypeVar("T")
Job = Callable[[Session], T]

UNUSABLE = (ValueError, TypeError, LookupError, OverflowError)
"""What a job raises for a value that no database can hold or a row that cannot be read; see `unusable`."""

_SWEEP_EVERY = 60.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


def unusable(where: object, error: Exception) -> StoreError:
    """Such an error in this package's words; one of its own stays as it is."""
    if isinstance(error, StoreError):
        return error
    return StoreError(f"{where}: a value cannot be kept or read ({error}); check what was given, and `verify`")


class SQLStore(ABC):
    """A store whose operations are jobs on a session."""

    def __init__(self) -> None:
        self._swept = time.monotonic()

    @abstractmethod
    async def close(self) -> None:
        """Finish what is under way and let go."""

    @abstractmethod
    async def _write(self, job: Job[T]) -> T:
        """Run a job in a transaction of its own; returns once it is committed."""

    @abstractmethod
    async def _read(self, job: Job[T]) -> T:
        """Run a query that takes microseconds."""

    @abstractmethod
    async def _scan(self, job: Job[T]) -> T:
        """Run queries that may take long, all on one snapshot."""

    async def commit(
        self,
        events: Sequence[Event],
        *,
        claim: Claim | None = None,
        replay: Replay | None = None,
        audits: Sequence[Audit] = (),
    ) -> None:
        """See `Store.commit`."""
        if replay is not None and claim is None:
            raise OptionError("replay= belongs to a claim; pass claim= too")
        texts = [(event, canonical(event.body, f"the {event.kind} of {event.id}")) for event in events]
        queued = [(audit, canonical(audit.payload, f"the audit of {audit.id}")) for audit in audits]
        await self._write(work.Commit(events=texts, claim=claim, replay=replay, audits=queued))

    async def claim(self, key_id: str, name: str, body_sha256: str, *, lease: float) -> Claimed:
        """See `Store.claim`; now and then removes what has expired, first, since a claim that is taken is returned."""
        if time.monotonic() - self._swept >= _SWEEP_EVERY:
            self._swept = time.monotonic()
            while await self._write(work.sweep):
                pass
        return await self._write(lambda session: work.claim(session, key_id, name, body_sha256, lease=lease))

    async def renew(self, claim: Claim, *, lease: float) -> bool:
        """See `Store.renew`."""
        return await self._write(lambda session: work.renew(session, claim, lease=lease))

    async def release(self, claim: Claim) -> None:
        """See `Store.release`."""
        await self._write(lambda session: work.release(session, claim))

    async def record(self, id: str) -> DecisionRecord | None:
        """See `Store.record`."""
        return await self._read(lambda session: work.record(session, id))

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
        """See `Store.records`; `since` is included, `until` is not."""
        conditions = {
            "policy = ?": policy,
            "key_id = ?": key_id,
            "decided_by = ?": decided_by,
            "at >= ?": since,
            "at < ?": until,
            "id < ?": before,
        }
        return await self._scan(lambda session: work.records(session, conditions=conditions, limit=limit))

    async def take_audits(self, *, limit: int, lease: float) -> list[Audit]:
        """See `Store.take_audits`."""
        return await self._write(lambda session: work.take_audits(session, limit=limit, lease=lease))

    async def renew_audits(self, ids: Sequence[str], *, lease: float) -> None:
        """See `Store.renew_audits`."""
        await self._write(lambda session: work.renew_audits(session, ids, lease=lease))

    async def policies(self) -> list[PolicyVersion]:
        """See `Store.policies`."""
        return await self._scan(work.policies)

    async def policy_history(self, name: str) -> list[PolicyVersion]:
        """See `Store.policy_history`."""
        return await self._scan(lambda session: work.policy_history(session, name))

    async def install(self, name: str, certificate: Mapping[str, Any], *, by: str) -> PolicyVersion:
        """See `Store.install`."""
        text = canonical(certificate, f"the certificate of {name}")
        return await self._write(lambda session: work.install(session, name, text, by=by))

    async def rollback(self, name: str, *, by: str) -> PolicyVersion | None:
        """See `Store.rollback`."""
        return await self._write(lambda session: work.rollback(session, name, by=by))

    async def change_count(self) -> int:
        """See `Store.change_count`."""
        return await self._read(work.change_count)

    async def create_key(self, *, id: str, sha256: str, scope: Scope, label: str) -> None:
        """See `Store.create_key`."""
        if not _DIGEST.fullmatch(sha256):
            raise OptionError("sha256= takes the digest of a key, 64 digits of lower-case hexadecimal; never the key")
        await self._write(partial(work.create_key, id=id, sha256=sha256, scope=scope, label=label))

    async def find_key(self, sha256: str) -> KeyInfo | None:
        """See `Store.find_key`."""
        return await self._read(lambda session: work.find_key(session, sha256))

    async def keys(self) -> list[KeyInfo]:
        """See `Store.keys`."""
        return await self._scan(work.keys)

    async def revoke_key(self, id: str) -> bool:
        """See `Store.revoke_key`."""
        return await self._write(lambda session: work.revoke_key(session, id))

    async def prune(self, *, before: float) -> int:
        """See `Store.prune`; in many short transactions, so that others are not held up.

        What is left of an event is its writer, number and hash; where a chain begins with such remains, one checkpoint.
        """
        total = 0
        while count := await self._write(lambda session: work.prune(session, before=before)):
            total += count
        await self._write(work.compact)
        return total

    async def verify(self) -> list[str]:
        """See `Store.verify`.

        Finds a changed event, a changed hash, events removed from the middle and swapped ones. Cannot see that the
        last events of a writer are gone, or all of them, or that an event was replaced by the remains of a pruned one;
        whoever fears that keeps copies elsewhere.
        """
        return await self._scan(work.verify)
