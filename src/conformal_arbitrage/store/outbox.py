"""What waits to be done in the background: audits to ask the Guardian, and messages to webhooks.

`lease` is the time from which an audit may be taken, `due` that of a delivery: when it was queued, when it is to be retried,
or when the lease of whoever holds it ends. The database's clock decides, so that gateways need not agree on the time.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from conformal_arbitrage.errors import DamagedError, StoreError
from conformal_arbitrage.store.ledger import NewRow, write_row
from conformal_arbitrage.store.record import AuditQuestion, decode_question, encode_json, new_id
from conformal_arbitrage.store.session import CHUNK, Session, operation, viewed
from conformal_arbitrage.types import DAY

if TYPE_CHECKING:
    from conformal_arbitrage.store.reviews import NewReview

# --- Audits ---


class Audit(Struct, frozen=True, kw_only=True):
    """A decision that was drawn for an audit.

    Attributes:
        question: what to ask the Guardian in the background.
        ask: whether to ask it; not if the loss is known without.
        identities_sha256: fingerprint of the identities of the policy's models; only a gateway that has the same ones
            should ask.
        row: the row of the ledger to write with the decision, if it has one.
        items: for people, what goes into their queue instead; at once, since when it came would tell it from a question.
        attempts: how often it was postponed.
        age: seconds since it was queued; set by the store.
    """

    id: str
    policy: str
    question: AuditQuestion
    ask: bool = True
    identities_sha256: str = ""
    row: NewRow | None = None
    items: "Sequence[NewReview]" = ()
    attempts: int = 0
    age: float = 0.0


class OutboxBacklog(Struct, frozen=True, kw_only=True):
    """How many audits of a policy, or messages to a webhook, wait, and the age of the oldest in seconds."""

    name: str
    waiting: int
    oldest: float


def _backlogs(session: Session, sql: str) -> list[OutboxBacklog]:
    """Return the backlogs of a query for name, number and time."""
    now = session.now()
    return [
        OutboxBacklog(name=name, waiting=count, oldest=max(0.0, now - first))
        for name, count, first in session.rows(sql)
    ]


_log = logging.getLogger("conformal_arbitrage.store")
AUDIT = "id, policy, payload, identities"


def queue_audits(session: Session, audits: Sequence[tuple[Audit, str | None]]) -> None:
    """Write the ledger's rows of decisions drawn for an audit, and queue their questions, if any, due at once."""
    for audit, question in audits:
        if audit.row is not None:
            write_row(session, audit.id, audit.row)
        if question is not None:
            now = session.dialect.now
            values = (audit.id, audit.policy, question, audit.identities_sha256)
            session.run(
                f"insert into audits ({AUDIT}, queued, lease, seal) values (?, ?, ?, ?, {now}, {now}, ?) "
                "on conflict (id) do nothing",
                *(*values, session.seals.sign("audit", *values)),
            )


@operation("write")
def take_audits(
    session: Session,
    *,
    limit: int,
    lease: float,
    policies: Mapping[str, str] | None = None,
    overdue: float | None = None,
) -> list[Audit]:
    """Lease audits that are due, longest first; one that is not finished within its lease is handed out again.

    Args:
        limit: the most to lease.
        lease: seconds.
        policies: whose audits, each with the fingerprint of its models' identities; of all if None.
        overdue: seconds after which an audit is handed out whatever its policy and its models.
    """
    now = session.now()
    conditions, values = ["lease <= ?"], [now]
    if policies is not None:
        each = ["(policy = ? and identities = ?)"] * len(policies)
        late = [] if overdue is None else ["queued <= ?"]
        conditions.append(f"({' or '.join([*each, *late]) or 'false'})")
        values += [*chain.from_iterable(policies.items()), *([] if overdue is None else [now - overdue])]
    rows = session.rows(
        f"select {AUDIT}, seal, attempts, queued from audits where {' and '.join(conditions)} "
        f"order by lease, id limit ?{session.dialect.skip_locked}",
        *(*values, limit),
    )
    renew_audits(session, [row[0] for row in rows], lease=lease)
    return [audit for row in rows if (audit := _audit(session, row, now)) is not None]


def _audit(session: Session, row: Sequence[Any], now: float) -> Audit | None:
    """Return an audit, or None if its question is damaged or was changed, since that must not stop the others."""
    id, policy, text, identities, seal, attempts, queued = row
    try:
        if not session.seals.accept(seal, "audit", *row[:4]):
            raise DamagedError(f"the audit of {id} is not what was queued; run `arbitrage records verify`")
        question = decode_question(text, id)
    except StoreError as error:
        _log.error("an audit is skipped: %s", error, extra={"policy": policy, "id": id})
        return None
    age = max(0.0, now - queued)
    return Audit(id=id, policy=policy, question=question, identities_sha256=identities, attempts=attempts, age=age)


@operation("write")
def renew_audits(session: Session, ids: Sequence[str], *, lease: float) -> None:
    """Extend the leases of audits."""
    for id in ids:
        session.run(f"update audits set lease = {session.dialect.now} + ? where id = ?", lease, id)


@operation("write")
def postpone_audit(session: Session, id: str, *, seconds: float) -> None:
    """Count an attempt at an audit that failed, and hand it out again after some seconds."""
    session.run(
        f"update audits set attempts = attempts + 1, lease = {session.dialect.now} + ? where id = ?", seconds, id
    )


@viewed("scan")
def audit_backlog(session: Session) -> list[OutboxBacklog]:
    """Return how many audits of each policy that the view reaches wait, and how long the oldest has."""
    audits = _backlogs(session, "select policy, count(*), min(queued) from audits group by policy order by policy")
    return [backlog for backlog in audits if session.view.reaches([backlog.name])]


# --- Deliveries: messages to webhooks, queued in the transaction of the event that they announce ---
#
# Each delivery is sealed, since it is signed for its receiver later: whoever can write to the database alone cannot send
# messages.


class Delivery(Struct, frozen=True, kw_only=True):
    """A message to a webhook.

    Attributes:
        id: of the message, the same for all webhooks and all attempts.
        body: JSON, as it is sent.
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


KEPT_SECONDS = 30 * DAY
"""How long a delivery stays listed; none is tried for so long."""
_LONGEST_WAIT = 2 * DAY
"""No delivery is due later than that from now: one that is was postponed before the database's clock was set back."""
_DELIVERY = "id, endpoint, type, body, created"
_OWN = "id = ? and endpoint = ? and done is null"


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


def announce(session: Session, event: WebhookEvent, data: Mapping[str, object]) -> None:
    """Queue a message about an event for every endpoint that subscribes to it, due at once."""
    endpoints = [endpoint for endpoint, events in session.webhooks.items() if event in events]
    if not endpoints:
        return
    id, now = f"evt_{new_id()}", session.now()
    document = {"id": id, "object": "event", "type": event, "created_at": int(now), "data": data}
    body = encode_json(document, f"the message about {event}")
    for endpoint in endpoints:
        row = (id, endpoint, event, body, now)
        session.run(
            f"insert into deliveries ({_DELIVERY}, due, seal) values (?, ?, ?, ?, ?, ?, ?)",
            *(*row, now, session.seals.sign("delivery", *row)),
        )


@operation("write")
def take_deliveries(session: Session, endpoint: str, *, limit: int, lease: float) -> list[Delivery]:
    """Lease messages to a webhook that are due; one that is neither finished nor postponed is handed out again.

    Messages are queued in the transaction of the event that they announce, for the webhooks that the store was
    opened with.
    """
    now = session.now()
    rows = session.rows(
        f"select {_DELIVERY}, attempts, done, error, seal from deliveries where endpoint = ? and done is null "
        f"and (due <= ? or due > ?) order by due, id limit ?{session.dialect.skip_locked}",
        *(endpoint, now, now + _LONGEST_WAIT, limit),
    )
    for row in rows:
        session.run(f"update deliveries set attempts = attempts + 1, due = ? where {_OWN}", now + lease, *row[:2])
    return [_delivery(session, row, begun=1) for row in rows]


@operation("write")
def postpone_delivery(session: Session, delivery: Delivery, *, seconds: float, error: str) -> None:
    """Hand a delivery out again after some seconds, with the reason why it failed."""
    values = (session.now() + seconds, error, delivery.id, delivery.endpoint)
    session.run(f"update deliveries set due = ?, error = ? where {_OWN}", *values)


@operation("write")
def finish_delivery(session: Session, delivery: Delivery, *, error: str | None = None) -> None:
    """Mark a delivery as done: delivered, or given up with an error."""
    session.run(
        f"update deliveries set done = ?, error = ? where {_OWN}",
        *(session.now(), error, delivery.id, delivery.endpoint),
    )


@operation("write")
def abandon_deliveries(session: Session, endpoint: str, *, error: str) -> int:
    """Give up everything that waits for an endpoint; return how many deliveries that were."""
    return session.run(
        "update deliveries set done = ?, error = ? where endpoint = ? and done is null", session.now(), error, endpoint
    )


@operation("scan")
def deliveries(session: Session, *, limit: int = 100) -> list[Delivery]:
    """Return the newest messages to webhooks, of the last thirty days."""
    rows = session.rows(
        f"select {_DELIVERY}, attempts, done, error, seal from deliveries order by created desc, id desc, endpoint limit ?",
        limit,
    )
    return [_delivery(session, row) for row in rows]


@operation("scan")
def delivery_backlog(session: Session) -> list[OutboxBacklog]:
    """Return how many deliveries wait for each endpoint, and how long the oldest has."""
    return _backlogs(
        session,
        "select endpoint, count(*), min(created) from deliveries where done is null group by endpoint order by endpoint",
    )


@operation("write")
def sweep_deliveries(session: Session) -> bool:
    """Delete some of the oldest deliveries, done or left over by removed webhooks; return whether there may be more."""
    count = session.run(
        "delete from deliveries where (id, endpoint) in "
        f"(select id, endpoint from deliveries where created < ? limit ?{session.dialect.skip_locked})",
        *(session.now() - KEPT_SECONDS, CHUNK),
    )
    return count == CHUNK


def _delivery(session: Session, row: Sequence[Any], *, begun: int = 0) -> Delivery:
    *written, attempts, done, error, seal = row
    id, endpoint, event, body, created = written
    return Delivery(
        id=id,
        endpoint=endpoint,
        event=event,
        body=body,
        created=created,
        attempts=attempts + begun,
        done=done,
        error=error,
        intact=session.seals.accept(seal, "delivery", *written),
    )
