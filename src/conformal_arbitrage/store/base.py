"""The store: what a gateway must not lose, as one protocol that SQLite and PostgreSQL implement.

Knows nothing of HTTP, models or what a certificate means.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from conformal_arbitrage.store.console_base import ConsoleStore
from conformal_arbitrage.store.heads import Head
from conformal_arbitrage.store.ledger_base import LedgerStore, NewRow
from conformal_arbitrage.store.record import AlarmBody, AuditQuestion, DecisionRecord, Event, JSONObject
from conformal_arbitrage.store.review_base import ReviewStore, ReviewWork
from conformal_arbitrage.store.row_base import RowStore
from conformal_arbitrage.store.schema import StoreSchema

Scope = Literal["call", "review", "admin", "metrics"]

WebhookEvent = Literal[
    "alarm.raised",
    "alarm.lifted",
    "certificate.installed",
    "certificate.renewed",
    "certificate.rolled_back",
    "review.waiting",
    "review.decided",
    "review.expired",
]
"""What a webhook can be told of."""
Subscriptions = Mapping[str, Collection[WebhookEvent]]
"""The names of webhooks, and what each is told of."""


class SavedResponse(Struct, frozen=True, kw_only=True):
    """A finished HTTP response, kept under its idempotency key to be sent again."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Claim(Struct, frozen=True):
    """The right to do the work of one idempotency key; `owner` proves it.

    Attributes:
        begun: ids of the decisions that earlier attempts began, by the place of their question in the request.
    """

    key_id: str
    name: str
    owner: str
    begun: Mapping[int, str] = {}


Claimed = Claim | SavedResponse | Literal["other body", "under way"]


class Audit(Struct, frozen=True, kw_only=True):
    """A decision that was drawn for an audit.

    Attributes:
        question: what to ask the Guardian in the background.
        ask: whether to ask it; not if the loss is known without.
        identities_sha256: fingerprint of the identities of the policy's models; only a gateway that has the same ones
            should ask.
        row: the row of the ledger to write with the decision, if it has one.
        attempts: how often it was postponed.
        age: seconds since it was queued; set by the store.
    """

    id: str
    policy: str
    question: AuditQuestion
    ask: bool = True
    identities_sha256: str = ""
    row: NewRow | None = None
    attempts: int = 0
    age: float = 0.0


class AuditBacklog(Struct, frozen=True, kw_only=True):
    """How many audits of a policy wait, and the age of the oldest in seconds."""

    policy: str
    waiting: int
    oldest: float


class Delivery(Struct, frozen=True, kw_only=True):
    """A message to a webhook.

    Attributes:
        id: of the message, the same for all webhooks and all attempts.
        endpoint: the webhook's name.
        event: what it announces.
        body: JSON, as it is sent.
        created: when the event happened.
        attempts: how often sending it was begun.
        done: when it was delivered or given up; None while it waits.
        error: why the last attempt failed; None if it was delivered, or not tried.
        intact: whether it is what was queued, as far as the store's keys can tell.
    """

    id: str
    endpoint: str
    event: str
    body: str
    created: float
    attempts: int = 0
    done: float | None = None
    error: str | None = None
    intact: bool = True


class DeliveryBacklog(Struct, frozen=True, kw_only=True):
    """How many deliveries to a webhook wait, and the age of the oldest in seconds."""

    endpoint: str
    waiting: int
    oldest: float


class Reservation(Struct, frozen=True, kw_only=True):
    """An amount that counts against a limit until it is settled; `part` is the part of the window it belongs to."""

    name: str
    part: int
    amount: int


class Shortage(Struct, frozen=True, kw_only=True):
    """Why an amount could not be reserved.

    Attributes:
        wait: seconds until enough has left the window; None if the amount alone exceeds the limit.
        in_flight: whether it would fit if everything that is reserved now came to cost nothing.
    """

    wait: float | None
    in_flight: bool


class Conversation(Struct, frozen=True):
    """A session of a caller: the model that its first turn chose answers all of its turns.

    Attributes:
        key_id: whose it is.
        policy: the policy's name.
        name: a digest of the caller's name for it.
        id: that of the first turn's decision; the audit coin is tossed for it.
        decided_by: the model it belongs to.
        version: the policy's version when it began.
    """

    key_id: str
    policy: str
    name: str
    id: str
    decided_by: str
    version: int


class PolicyVersion(Struct, frozen=True, kw_only=True):
    """An installed certificate of a policy.

    Attributes:
        origin: the version that first installed this certificate.
        intact: whether it is what was installed, as far as the store's keys can tell.
        lifts: how often alarms of this version were lifted.
        alarm: the alarm that stands, if any: the policy serves in safe mode.
        alarmed: the last alarm that speaks against this certificate: raised on this version; or, before it was installed,
            on the same certificate, on another from the same log, or on one of the same models after this one was made.
    """

    name: str
    version: int
    origin: int
    certificate: JSONObject
    installed: float
    installed_by: str
    active: bool
    intact: bool = True
    lifts: int = 0
    alarm: AlarmBody | None = None
    alarmed: AlarmBody | None = None


class KeyInfo(Struct, frozen=True, kw_only=True):
    """An API key without its secret.

    Attributes:
        expires: when it stops being valid; None for never.
        policies: the only policies it is good for; None for all.
    """

    id: str
    scope: Scope
    label: str
    created: float
    revoked: float | None = None
    expires: float | None = None
    policies: tuple[str, ...] | None = None


class Store(LedgerStore, RowStore, ConsoleStore, ReviewStore, Protocol):
    """Durable storage. Every method that writes returns once the write is committed.

    Attributes:
        has_undelivered: whether there may be decisions for `take_undelivered`, as of the last `change_count`.
        schema: which tables the database has.
    """

    has_undelivered: bool
    schema: StoreSchema

    async def close(self) -> None:
        """Finish pending operations and release the connections."""
        ...

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
        """Append events in one transaction, which also settles an idempotency claim, queues audits and writes the ledger.

        Args:
            events: the facts to append.
            claim: the idempotency claim of the request. Without a response it stays under way, as for a stream whose
                decision is made.
            response: finishes the claim.
            audits: decisions drawn for an audit: their questions to queue, and their rows of the ledger to write.
            begun: ids of decisions begun under the claim, by the place of their question, for another attempt.
            undelivered: digest of the question by the id of a decision of which nothing was delivered, for a retry
                without a key.
            news: ids of decisions whose rows of the ledger the events concern; those of audits and feedback always do.
            reviews: what to put into the review queue, or that the claim's request needs it no more.

        Raises:
            LostClaimError: someone else took over the claim; nothing was written.
        """
        ...

    async def claim(self, key_id: str, name: str, body_sha256: str, *, lease: float) -> Claimed:
        """Claim the right to answer a request, unless it was answered, is being answered, or was another request.

        A claim may be taken over once its lease has expired. Names expire after 24 hours.
        """
        ...

    async def renew(self, claim: Claim, *, lease: float) -> bool:
        """Extend a claim's lease; return False if the claim was taken over."""
        ...

    async def release(self, claim: Claim) -> None:
        """Give up a claim, as after a failure. If decisions were begun under it, only the same request may take it again."""
        ...

    async def saved_response(self, key_id: str, name: str) -> SavedResponse | None:
        """Return the response that is kept under an idempotency key; None if there is none."""
        ...

    async def take_undelivered(self, digest: str) -> str | None:
        """Hand out a decision about a question of which nothing was delivered, once, within ten minutes of its id."""
        ...

    async def conversation(self, key_id: str, policy: str, name: str) -> Conversation | None:
        """Return a caller's conversation of that name, unless it is over."""
        ...

    async def settle_conversation(self, conversation: Conversation, *, idle: float) -> Conversation:
        """Begin a conversation or, if it is in force, extend it to `idle` seconds from now; return the one in force."""
        ...

    async def record(self, id: str) -> DecisionRecord | None:
        """Return a decision and everything recorded about it."""
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
        """Return decisions, the last recorded first; `before` is the id at which the previous page ended.

        `since` is included, `until` is not. A page of large records is shorter than `limit`; only the end is empty.
        """
        ...

    async def take_audits(
        self, *, limit: int, lease: float, policies: Mapping[str, str] | None = None, overdue: float | None = None
    ) -> list[Audit]:
        """Lease audits that are due, longest first; one that is not finished within its lease is handed out again.

        Args:
            limit: the most to lease.
            lease: seconds.
            policies: whose audits, each with the fingerprint of its models' identities; of all if None.
            overdue: seconds after which an audit is handed out whatever its policy and its models.
        """
        ...

    async def renew_audits(self, ids: Sequence[str], *, lease: float) -> None:
        """Extend the leases of audits."""
        ...

    async def postpone_audit(self, id: str, *, seconds: float) -> None:
        """Count an attempt at an audit that failed, and hand it out again after some seconds."""
        ...

    async def audit_backlog(self) -> list[AuditBacklog]:
        """Return the backlog of every policy that has one."""
        ...

    async def take_deliveries(self, endpoint: str, *, limit: int, lease: float) -> list[Delivery]:
        """Lease messages to a webhook that are due; one that is neither finished nor postponed is handed out again.

        Messages are queued in the transaction of the event that they announce, for the webhooks that the store was
        opened with.
        """
        ...

    async def postpone_delivery(self, delivery: Delivery, *, seconds: float, error: str) -> None:
        """Hand a delivery out again after some seconds, with the reason why it failed."""
        ...

    async def finish_delivery(self, delivery: Delivery, *, error: str | None = None) -> None:
        """Note that a message was delivered or, with an error, given up."""
        ...

    async def abandon_deliveries(self, endpoint: str, *, error: str) -> int:
        """Give up everything that waits for a webhook; return how many messages that were."""
        ...

    async def deliveries(self, *, limit: int = 100) -> list[Delivery]:
        """Return the newest messages to webhooks, of the last thirty days."""
        ...

    async def delivery_backlog(self) -> list[DeliveryBacklog]:
        """Return the backlog of every webhook that has one."""
        ...

    async def reserve(
        self, name: str, amount: int, *, limit: int, seconds: float, settled: bool = False
    ) -> Reservation | Shortage:
        """Reserve an amount of a limit that all gateways share.

        Args:
            name: of the limit.
            amount: in whole units.
            limit: the most units, reserved or spent, within any window.
            seconds: the length of the window.
            settled: the amount is known to be spent, and there will be no `settle`.
        """
        ...

    async def settle(self, reservation: Reservation, spent: int) -> None:
        """Replace a reservation by what was spent, in the part of the window it was made in."""
        ...

    async def policies(self) -> list[PolicyVersion]:
        """Return the active version of every policy."""
        ...

    async def policy_history(self, name: str) -> list[PolicyVersion]:
        """Return all versions of a policy, newest first."""
        ...

    async def install(
        self, name: str, certificate: JSONObject, *, by: str, after: int | None = None
    ) -> PolicyVersion | None:
        """Make a certificate the active version of a policy; return None if another one was since version `after`."""
        ...

    async def succeed(self, name: str, certificate: JSONObject, *, by: str, after: int) -> PolicyVersion | None:
        """Make a certificate the active version if version `after` still is; otherwise change nothing, return None.

        Nor is a renewal installed that takes rows from before an alarm: only a person ends safe mode.
        """
        ...

    async def prospect(self, name: str, certificate: JSONObject) -> PolicyVersion:
        """Return the version that a certificate would be if it were installed now, with the alarm that speaks against it."""
        ...

    async def rollback(self, name: str, *, by: str) -> PolicyVersion | None:
        """Reactivate the version before the active one, as a new version; return None if there is none."""
        ...

    async def configured(self, policy: str) -> str | None:
        """Return the digest of a policy's certificate file at the last start; None if there was none."""
        ...

    async def note_configured(self, policy: str, sha256: str) -> None:
        """Note the digest of a policy's certificate file."""
        ...

    async def change_count(self) -> int:
        """Return a number that grows whenever any gateway changes a policy or a key.

        It installs or rolls back a policy, raises or lifts an alarm, or creates or revokes a key.
        """
        ...

    async def writable(self) -> int:
        """Return the change count, once it is clear that a commit would succeed: the first step before models are paid.

        A commit a moment ago is proof enough; otherwise something is written.

        Raises:
            StoreError: a commit would fail: the disk is full, the database is read-only, or its file was moved or
                replaced.
        """
        ...

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
        """Store an API key, as its digest only."""
        ...

    async def find_key(self, sha256: str) -> KeyInfo | None:
        """Return the key with this digest, revoked or not."""
        ...

    async def keys(self) -> list[KeyInfo]:
        """Return all keys."""
        ...

    async def revoke_key(self, id: str) -> bool:
        """Revoke a key; return False if there is none with that id."""
        ...

    async def prune(self, *, before: float) -> int:
        """Remove decisions older than a time, with all their events, and stored responses of that age.

        A checkpoint per writer keeps the chains verifiable. Decisions with an open audit stay until it is closed, and those
        whose audited loss is not known until it is due.
        """
        ...

    async def erase(self, id: str) -> bool:
        """Erase all content of a decision, and stored responses with it; return False if there is no such decision."""
        ...

    async def sweep(self) -> None:
        """Remove what has expired: idempotency keys and their responses, and decisions that retries may continue."""
        ...

    async def seal(self, *, everything: bool = False) -> None:
        """Sign how far the chains of this process have come; with `everything`, all chains, as at the start."""
        ...

    async def head(self) -> Head:
        """Return the present state of all chains and policies, signed, for safe keeping elsewhere."""
        ...

    async def verify(self, copy: Head | None = None) -> list[str]:
        """Return everything that is not as it was written, in words; an empty list if nothing is.

        Args:
            copy: a head that was kept elsewhere, to compare with.
        """
        ...
