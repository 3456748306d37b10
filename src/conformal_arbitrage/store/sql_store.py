"""SQLStore: the store protocol over SQL; subclasses provide connections and transactions.

Knows nothing of SQLite, PostgreSQL or threads.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from conformal_arbitrage.errors import OptionError, StoreError
from conformal_arbitrage.store import audits, spending
from conformal_arbitrage.store import sql as operations
from conformal_arbitrage.store.base import (
    Audit,
    AuditBacklog,
    Claim,
    Claimed,
    KeyInfo,
    PolicyVersion,
    Reservation,
    SavedResponse,
    Scope,
    Shortage,
)
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import encode, encode_json
from conformal_arbitrage.store.record import DecisionRecord, Event, JSONObject

_T = TypeVar("_T")
Job = Callable[[Session], _T]

BAD_VALUE = (ValueError, TypeError, LookupError, OverflowError)
"""What a job raises for a value that a database cannot store, or a row that is malformed; see `bad_value`."""

_SWEEP_EVERY = 60.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


def bad_value(location: object, error: Exception) -> StoreError:
    """Translate one of `BAD_VALUE`; return an error of this package as it is."""
    if isinstance(error, StoreError):
        return error
    return StoreError(
        f"{location}: a value cannot be stored or read ({error}); check the arguments, and run `arbitrage records verify`"
    )


class SQLStore(ABC):
    """A store whose operations are jobs on a session."""

    def __init__(self) -> None:
        self._swept = time.monotonic()

    @abstractmethod
    async def close(self) -> None:
        """See `Store.close`."""

    @abstractmethod
    async def _write(self, job: Job[_T]) -> _T:
        """Run a job in a transaction of its own; return once it is committed."""

    @abstractmethod
    async def _read(self, job: Job[_T]) -> _T:
        """Run a query that takes microseconds."""

    @abstractmethod
    async def _scan(self, job: Job[_T]) -> _T:
        """Run queries that may take long, all on one snapshot."""

    async def commit(
        self,
        events: Sequence[Event],
        *,
        claim: Claim | None = None,
        response: SavedResponse | None = None,
        audits: Sequence[Audit] = (),
        begun: Mapping[int, str] | None = None,
    ) -> None:
        """See `Store.commit`."""
        if (response is not None or begun) and claim is None:
            raise OptionError("response= and begun= belong to a claim; pass claim= too")
        texts = [(event, encode(event.body, event.id)) for event in events]
        questions = [(audit, encode(audit.question, audit.id)) for audit in audits]
        await self._write(operations.Commit(texts, claim, response, questions, begun or {}))

    async def claim(self, key_id: str, name: str, body_sha256: str, *, lease: float) -> Claimed:
        """See `Store.claim`. Once a minute expired claims are removed first, so that no error follows a granted claim."""
        if time.monotonic() - self._swept >= _SWEEP_EVERY:
            self._swept = time.monotonic()
            while await self._write(operations.sweep):
                pass
        return await self._write(lambda session: operations.claim(session, key_id, name, body_sha256, lease=lease))

    async def renew(self, claim: Claim, *, lease: float) -> bool:
        """See `Store.renew`."""
        return await self._write(lambda session: operations.renew(session, claim, lease=lease))

    async def release(self, claim: Claim) -> None:
        """See `Store.release`."""
        await self._write(lambda session: operations.release(session, claim))

    async def record(self, id: str) -> DecisionRecord | None:
        """See `Store.record`."""
        return await self._read(lambda session: operations.record(session, id))

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
        return await self._scan(lambda session: operations.records(session, conditions=conditions, limit=limit))

    async def take_audits(
        self, *, limit: int, lease: float, policies: Collection[str] | None = None, overdue: float | None = None
    ) -> list[Audit]:
        """See `Store.take_audits`."""
        options: dict[str, Any] = {"limit": limit, "lease": lease, "policies": policies, "overdue": overdue}
        return await self._write(lambda session: audits.take_audits(session, **options))

    async def renew_audits(self, ids: Sequence[str], *, lease: float) -> None:
        """See `Store.renew_audits`."""
        await self._write(lambda session: audits.renew_audits(session, ids, lease=lease))

    async def postpone_audit(self, id: str, *, seconds: float) -> None:
        """See `Store.postpone_audit`."""
        await self._write(lambda session: audits.postpone_audit(session, id, seconds=seconds))

    async def audit_backlog(self) -> list[AuditBacklog]:
        """See `Store.audit_backlog`."""
        return await self._scan(audits.audit_backlog)

    async def reserve(
        self, name: str, amount: int, *, limit: int, seconds: float, settled: bool = False
    ) -> Reservation | Shortage:
        """See `Store.reserve`."""
        options: dict[str, Any] = {"limit": limit, "seconds": seconds, "settled": settled}
        return await self._write(lambda session: spending.reserve(session, name, amount, **options))

    async def settle(self, reservation: Reservation, spent: int) -> None:
        """See `Store.settle`."""
        await self._write(lambda session: spending.settle(session, reservation, spent))

    async def policies(self) -> list[PolicyVersion]:
        """See `Store.policies`."""
        return await self._scan(operations.policies)

    async def policy_history(self, name: str) -> list[PolicyVersion]:
        """See `Store.policy_history`."""
        return await self._scan(lambda session: operations.policy_history(session, name))

    async def install(self, name: str, certificate: JSONObject, *, by: str) -> PolicyVersion:
        """See `Store.install`."""
        text = encode_json(certificate, f"the certificate of {name}")
        return await self._write(lambda session: operations.install(session, name, text, by=by))

    async def rollback(self, name: str, *, by: str) -> PolicyVersion | None:
        """See `Store.rollback`."""
        return await self._write(lambda session: operations.rollback(session, name, by=by))

    async def change_count(self) -> int:
        """See `Store.change_count`."""
        return await self._read(operations.change_count)

    async def create_key(self, *, id: str, sha256: str, scope: Scope, label: str) -> None:
        """See `Store.create_key`."""
        if not _DIGEST.fullmatch(sha256):
            raise OptionError("sha256= takes the digest of a key, 64 lower-case hexadecimal digits, never the key")
        await self._write(partial(operations.create_key, id=id, sha256=sha256, scope=scope, label=label))

    async def find_key(self, sha256: str) -> KeyInfo | None:
        """See `Store.find_key`."""
        return await self._read(lambda session: operations.find_key(session, sha256))

    async def keys(self) -> list[KeyInfo]:
        """See `Store.keys`."""
        return await self._scan(operations.keys)

    async def revoke_key(self, id: str) -> bool:
        """See `Store.revoke_key`."""
        return await self._write(lambda session: operations.revoke_key(session, id))

    async def prune(self, *, before: float) -> int:
        """See `Store.prune`. Runs many short transactions, so that other writers are not delayed.

        A tombstone with writer, number and hash replaces each event; tombstones at the start of a chain become one
        checkpoint.
        """
        total = 0
        while count := await self._write(lambda session: operations.prune(session, before=before)):
            total += count
        await self._write(operations.compact)
        return total

    async def verify(self) -> list[str]:
        """See `Store.verify`.

        Finds a changed event, a changed hash, events removed from the middle, and swapped events. Cannot detect that
        the last events of a writer are missing, or all of them, or that a tombstone replaced an event: against that,
        keep copies elsewhere.
        """
        return await self._scan(operations.chain_faults)
