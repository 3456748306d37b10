"""SQLStore: the store protocol over SQL; subclasses provide connections and transactions.

Knows nothing of SQLite, PostgreSQL or threads.
"""

import re
import time
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, TypeVar

import msgspec

from conformal_arbitrage.errors import DamagedError, OptionError, StoreError
from conformal_arbitrage.store import (
    audits,
    conversations,
    deliveries,
    heads,
    integrity,
    ledger,
    pages,
    pruning,
    review_ends,
    rows,
    spending,
    tallies,
)
from conformal_arbitrage.store import sql as operations
from conformal_arbitrage.store.base import (
    Audit,
    AuditBacklog,
    Claim,
    Claimed,
    Conversation,
    Delivery,
    DeliveryBacklog,
    KeyInfo,
    PolicyVersion,
    Reservation,
    SavedResponse,
    Scope,
    Shortage,
    Subscriptions,
)
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import encode, encode_json
from conformal_arbitrage.store.ledger_base import (
    AuditRow,
    Ledger,
    LedgerKey,
    LedgerNews,
    LedgerRows,
    Notice,
    Settlement,
)
from conformal_arbitrage.store.record import AlarmBody, DecisionRecord, Event, JSONObject, LiftBody
from conformal_arbitrage.store.review_base import ReviewWork
from conformal_arbitrage.store.row_base import CalibrationRow
from conformal_arbitrage.store.schema import StoreSchema
from conformal_arbitrage.store.seals import Seals
from conformal_arbitrage.store.sql_console import SQLConsole
from conformal_arbitrage.store.sql_jobs import Job
from conformal_arbitrage.store.sql_reviews import SQLReviews
from conformal_arbitrage.types import as_object

_T = TypeVar("_T")

BAD_VALUE = (ValueError, TypeError, LookupError, OverflowError)
"""What a job raises for a value that a database cannot store, or a row that is malformed; see `bad_value`."""

PROOF_SECONDS = 0.25
"""How long a commit proves that another would succeed."""

PROBE_BYTES, DOUBT_BYTES = 4000, 256_000
"""How much is written to prove it; more after a failure, since a disk that is nearly full takes a little."""

_SWEEP_EVERY = 60.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


def bad_value(location: object, error: Exception) -> StoreError:
    """Translate one of `BAD_VALUE`; return an error of this package as it is."""
    if isinstance(error, StoreError):
        return error
    return DamagedError(
        f"{location}: a value cannot be stored or read ({error}); check the arguments, and run `arbitrage records verify`"
    )


class SQLStore(SQLConsole, SQLReviews):
    """A store whose operations are jobs on a session.

    Args:
        keys: sign what is stored; the first signs, all verify.
        webhooks: whom to tell of what.

    Attributes:
        has_undelivered, schema: see `Store`.
    """

    schema: StoreSchema

    def __init__(self, keys: Sequence[bytes], webhooks: Subscriptions | None) -> None:
        self.has_undelivered = False
        super().__init__(webhooks)
        self._seals = Seals(keys)
        self._swept = self._swept_conversations = time.monotonic()

    @abstractmethod
    async def close(self) -> None:
        """See `Store.close`."""

    @abstractmethod
    async def change_count(self) -> int:
        """See `Store.change_count`."""

    @abstractmethod
    async def writable(self) -> int:
        """See `Store.writable`."""

    async def commit(
        self,
        events: Sequence[Event],
        *,
        claim: Claim | None = None,
        response: SavedResponse | None = None,
        audits: Sequence[Audit] = (),
        begun: Mapping[int, str] | None = None,
        undelivered: Mapping[str, str] | None = None,
        news: Sequence[str] = (),
        reviews: ReviewWork | None = None,
    ) -> None:
        """See `Store.commit`."""
        if (response is not None or begun) and claim is None:
            raise OptionError("response= and begun= belong to a claim; pass claim= too")
        texts = [(event, encode(event.body, event.id)) for event in events]
        questions = [(audit, encode(audit.question, audit.id) if audit.ask else None) for audit in audits]
        webhooks = self._webhooks
        await self._write(
            operations.Commit(
                texts, claim, response, questions, begun or {}, undelivered or {}, news, reviews, webhooks
            )
        )
        self.has_undelivered = self.has_undelivered or bool(undelivered)

    async def claim(self, key_id: str, name: str, body_sha256: str, *, lease: float) -> Claimed:
        """See `Store.claim`. Once a minute expired claims are removed first, so that no error follows a granted claim."""
        if time.monotonic() - self._swept >= _SWEEP_EVERY:
            await self.sweep()
        return await self._write(lambda session: operations.claim(session, key_id, name, body_sha256, lease=lease))

    async def sweep(self) -> None:
        """See `Store.sweep`."""
        self._swept = time.monotonic()
        while await self._write(operations.sweep):
            pass
        while await self._write(deliveries.sweep_deliveries):
            pass
        await self._write(review_ends.sweep_reviews)

    async def renew(self, claim: Claim, *, lease: float) -> bool:
        """See `Store.renew`."""
        return await self._write(lambda session: operations.renew(session, claim, lease=lease))

    async def release(self, claim: Claim) -> None:
        """See `Store.release`."""
        await self._write(lambda session: operations.release(session, claim))

    async def saved_response(self, key_id: str, name: str) -> SavedResponse | None:
        """See `Store.saved_response`."""
        return await self._read(lambda session: operations.saved_response(session, key_id, name))

    async def take_undelivered(self, digest: str) -> str | None:
        """See `Store.take_undelivered`."""
        return await self._write(lambda session: operations.take_undelivered(session, digest))

    async def conversation(self, key_id: str, policy: str, name: str) -> Conversation | None:
        """See `Store.conversation`."""
        return await self._read(lambda session: conversations.find_conversation(session, key_id, policy, name))

    async def settle_conversation(self, conversation: Conversation, *, idle: float) -> Conversation:
        """See `Store.settle_conversation`. Once a minute, those that are over are removed first."""
        if time.monotonic() - self._swept_conversations >= _SWEEP_EVERY:
            self._swept_conversations = time.monotonic()
            while await self._write(conversations.sweep_conversations):
                pass
        return await self._write(lambda session: conversations.settle_conversation(session, conversation, idle=idle))

    async def record(self, id: str) -> DecisionRecord | None:
        """See `Store.record`."""
        if "\0" in id:
            return None  # PostgreSQL has no such text
        return await self._read(lambda session: pages.record(session, id))

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
        """See `Store.records`."""
        wanted = pages.RecordFilter(
            policy=policy, key_id=key_id, decided_by=decided_by, since=since, until=until, before=before
        )
        return await self._scan(lambda session: pages.page(session, wanted, limit))

    async def take_audits(
        self, *, limit: int, lease: float, policies: Mapping[str, str] | None = None, overdue: float | None = None
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

    async def take_deliveries(self, endpoint: str, *, limit: int, lease: float) -> list[Delivery]:
        """See `Store.take_deliveries`."""
        return await self._write(
            lambda session: deliveries.take_deliveries(session, endpoint, limit=limit, lease=lease)
        )

    async def postpone_delivery(self, delivery: Delivery, *, seconds: float, error: str) -> None:
        """See `Store.postpone_delivery`."""
        options: dict[str, Any] = {"seconds": seconds, "error": error}
        await self._write(lambda session: deliveries.postpone_delivery(session, delivery, **options))

    async def finish_delivery(self, delivery: Delivery, *, error: str | None = None) -> None:
        """See `Store.finish_delivery`."""
        await self._write(lambda session: deliveries.finish_delivery(session, delivery, error=error))

    async def abandon_deliveries(self, endpoint: str, *, error: str) -> int:
        """See `Store.abandon_deliveries`."""
        return await self._write(lambda session: deliveries.abandon_deliveries(session, endpoint, error=error))

    async def deliveries(self, *, limit: int = 100) -> list[Delivery]:
        """See `Store.deliveries`."""
        return await self._scan(lambda session: deliveries.deliveries(session, limit=limit))

    async def delivery_backlog(self) -> list[DeliveryBacklog]:
        """See `Store.delivery_backlog`."""
        return await self._scan(deliveries.delivery_backlog)

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
        return await self._read(operations.policies)

    async def policy_history(self, name: str) -> list[PolicyVersion]:
        """See `Store.policy_history`."""
        return await self._scan(lambda session: operations.policy_history(session, name))

    async def install(
        self, name: str, certificate: JSONObject, *, by: str, after: int | None = None
    ) -> PolicyVersion | None:
        """See `Store.install`."""
        text = encode_json(certificate, f"the certificate of {name}")

        def install(session: Session) -> PolicyVersion | None:
            version = operations.install(session, name, text, by=by, after=after)
            if version is not None:
                deliveries.announce_installation(session, self._webhooks, version)
            return version

        return await self._write(install)

    async def succeed(self, name: str, certificate: JSONObject, *, by: str, after: int) -> PolicyVersion | None:
        """See `Store.succeed`."""
        text = encode_json(certificate, f"the certificate of {name}")
        since = float(as_object(certificate.get("ancestry")).get("since", inf))

        def succeed(session: Session) -> PolicyVersion | None:
            version = operations.succeed(session, name, text, by=by, after=after, since=since)
            if version is not None:
                deliveries.announce_installation(session, self._webhooks, version)
            return version

        return await self._write(succeed)

    async def prospect(self, name: str, certificate: JSONObject) -> PolicyVersion:
        """See `Store.prospect`."""
        return await self._scan(lambda session: operations.prospect(session, name, certificate))

    async def rollback(self, name: str, *, by: str) -> PolicyVersion | None:
        """See `Store.rollback`."""

        def rollback(session: Session) -> PolicyVersion | None:
            version = operations.rollback(session, name, by=by)
            if version is not None:
                deliveries.announce_rollback(session, self._webhooks, version)
            return version

        return await self._write(rollback)

    async def ledgers(self, policy: str | None = None) -> list[Ledger]:
        """See `LedgerStore.ledgers`."""
        return ledger.ledgers_of(await self._read(ledger.find_ledgers(policy)))

    async def ledger(self, key: LedgerKey, *, after: int = 0, limit: int | None = None) -> LedgerRows:
        """See `LedgerStore.ledger`."""
        return await self._scan(lambda session: ledger.ledger(session, key, after, limit))

    async def ledger_changes(self, key: LedgerKey, after: int, *, limit: int = 5000) -> list[AuditRow]:
        """See `LedgerStore.ledger_changes`."""
        return await self._read(lambda session: ledger.ledger_changes(session, key, after, limit))

    async def ledger_news(self, policies: Collection[str], *, limit: int = 500) -> list[LedgerNews]:
        """See `LedgerStore.ledger_news`."""
        return await self._read(lambda session: ledger.ledger_news(session, policies, limit))

    async def settle_rows(self, settlements: Sequence[Settlement]) -> None:
        """See `LedgerStore.settle_rows`."""
        if settlements:
            await self._write(lambda session: ledger.settle_rows(session, settlements))

    async def raise_alarm(self, policy: str, alarm: AlarmBody) -> bool:
        """See `LedgerStore.raise_alarm`."""

        def raise_alarm(session: Session) -> bool:
            raised = operations.raise_alarm(session, policy, alarm)
            if raised:
                deliveries.announce_notice(session, self._webhooks, policy, alarm)
            return raised

        return await self._write(raise_alarm)

    async def lift(self, policy: str, *, reason: str, by: str, version: int | None = None) -> LiftBody | None:
        """See `LedgerStore.lift`."""

        def lift(session: Session) -> LiftBody | None:
            lifted = operations.lift(session, policy, reason=reason, by=by, version=version)
            if lifted is not None:
                deliveries.announce_notice(session, self._webhooks, policy, lifted)
            return lifted

        return await self._write(lift)

    async def notices(self, policy: str | None = None) -> list[Notice]:
        """See `LedgerStore.notices`."""
        return await self._scan(lambda session: ledger.notices(session, policy))

    async def gather_rows(self) -> int:
        """See `RowStore.gather_rows`. Runs many short transactions, so that other writers are not delayed."""
        total = 0
        while count := await self._maintain(rows.gather):
            total += count
        return total

    async def count_rows(self, policy: str, *, identities_sha256: str, since: float, until: float | None = None) -> int:
        """See `RowStore.count_rows`."""
        options: dict[str, Any] = {"identities_sha256": identities_sha256, "since": since, "until": until}
        return await self._scan(lambda session: rows.count(session, policy, **options))

    async def calibration_rows(
        self, policy: str, *, identities_sha256: str, since: float, limit: int | None = None
    ) -> list[CalibrationRow]:
        """See `RowStore.calibration_rows`."""
        options: dict[str, Any] = {"identities_sha256": identities_sha256, "since": since, "limit": limit}
        return await self._scan(lambda session: rows.live_rows(session, policy, **options))

    async def import_rows(self, policy: str, log_sha256: str, collected: Sequence[CalibrationRow]) -> None:
        """See `RowStore.import_rows`."""
        await self._maintain(lambda session: rows.import_rows(session, policy, log_sha256, collected))

    async def count_imported(self, policy: str, log_sha256: str) -> int:
        """See `RowStore.count_imported`."""
        return await self._scan(lambda session: rows.count_imported(session, policy, log_sha256))

    async def imported_rows(self, policy: str, log_sha256: str) -> list[CalibrationRow]:
        """See `RowStore.imported_rows`."""
        return await self._scan(lambda session: rows.imported_rows(session, policy, log_sha256))

    async def configured(self, policy: str) -> str | None:
        """See `Store.configured`."""
        return await self._read(lambda session: operations.configured(session, policy))

    async def note_configured(self, policy: str, sha256: str) -> None:
        """See `Store.note_configured`."""
        await self._write(lambda session: operations.note_configured(session, policy, sha256))

    async def create_key(
        self,
        *,
        id: str,
        sha256: str,
        scope: Scope,
        label: str,
        expires: float | None = None,
        policies: Sequence[str] | None = None,
    ) -> None:
        """See `Store.create_key`."""
        if not _DIGEST.fullmatch(sha256):
            raise OptionError("sha256= takes the digest of a key, 64 lower-case hexadecimal digits, never the key")
        names = None if policies is None else msgspec.json.encode(list(policies)).decode()
        key = partial(operations.create_key, id=id, sha256=sha256, scope=scope, label=label)
        await self._write(partial(key, expires=expires, policies=names))

    async def find_key(self, sha256: str) -> KeyInfo | None:
        """See `Store.find_key`."""
        return await self._read(lambda session: operations.find_key(session, sha256))

    async def keys(self) -> list[KeyInfo]:
        """See `Store.keys`."""
        return await self._read(operations.keys)

    async def revoke_key(self, id: str) -> bool:
        """See `Store.revoke_key`."""
        return await self._write(lambda session: operations.revoke_key(session, id))

    async def prune(self, *, before: float) -> int:
        """See `Store.prune`. Runs many short transactions, so that other writers are not delayed.

        A tombstone with writer, number and hash replaces each event; tombstones at the start of a chain become one
        checkpoint.
        """
        total, now = 0, time.time()
        while count := await self._maintain(lambda session: pruning.prune(session, before=before, now=now)):
            total += count
        await self._maintain(pruning.compact)
        await self._maintain(lambda session: pruning.prune_replays(session, before=before))
        await self._maintain(lambda session: tallies.forget_pruned(session, before=before))
        await self.sweep()
        return total

    async def erase(self, id: str) -> bool:
        """See `Store.erase`."""
        return await self._write(lambda session: pruning.erase(session, id))

    async def seal(self, *, everything: bool = False) -> None:
        """See `Store.seal`."""
        if self._seals and (everything or self._seals.signed):
            await self._write(heads.sign_all_heads if everything else heads.sign_own_heads)

    async def head(self) -> heads.Head:
        """See `Store.head`."""
        return await self._scan(heads.head)

    async def verify(self, copy: heads.Head | None = None) -> list[str]:
        """See `Store.verify`.

        Without keys it finds a changed event, a changed hash, events removed from the middle, and swapped events. With
        keys it also finds what an unsigned chain cannot show: a missing end, a missing writer, a tombstone that no one
        signed, changed responses and certificates. That everything was taken back to an earlier state shows only against
        a copy of a head.
        """
        checks: Sequence[Job[list[str]]] = (
            self._damage,
            lambda session: integrity.chain_faults(session, copy),
            lambda session: integrity.policy_faults(session, copy),
            integrity.replay_faults,
            rows.row_faults,
        )
        faults: list[str] = []
        for check in checks:
            try:
                faults += await self._scan(check)
            except DamagedError as error:  # what stops one check must not hide what the others find
                faults.append(str(error))
        return list(dict.fromkeys(faults))

    def _damage(self, session: Session) -> list[str]:
        """Return what the database itself finds wrong with its files."""
        return []
