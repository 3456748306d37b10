"""Operations on deliveries: messages to webhooks, queued in the transaction of the event that they announce.

`due` is the time from which a delivery may be taken: when it was queued, when it is to be retried, or when the lease of
whoever is sending it ends. The database's clock decides. Each delivery is sealed, since it is signed for its receiver later:
whoever can write to the database alone cannot send messages.

Knows nothing of HTTP, secrets, or how often a delivery is tried.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from conformal_arbitrage.store.base import Delivery, DeliveryBacklog, PolicyVersion, Subscriptions, WebhookEvent
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import encode_json
from conformal_arbitrage.store.heads import CHUNK
from conformal_arbitrage.store.ids import new_id
from conformal_arbitrage.store.record import AlarmBody, NoticeBody
from conformal_arbitrage.types import DAY, as_object

KEPT_SECONDS = 30 * DAY
"""How long a delivery stays listed; none is tried for so long."""
_LONGEST_WAIT = 2 * DAY
"""No delivery is due later than that from now: one that is was postponed before the database's clock was set back."""
_COLUMNS = "id, endpoint, type, body, created"
_OWN = "id = ? and endpoint = ? and done is null"


def announce(session: Session, subscriptions: Subscriptions, event: WebhookEvent, data: Mapping[str, object]) -> None:
    """Queue a message about an event for every endpoint that subscribes to it, due at once."""
    endpoints = [endpoint for endpoint, events in subscriptions.items() if event in events]
    if not endpoints:
        return
    id, now = f"evt_{new_id()}", session.now()
    document = {"id": id, "object": "event", "type": event, "created_at": int(now), "data": data}
    body = encode_json(document, f"the message about {event}")
    for endpoint in endpoints:
        row = (id, endpoint, event, body, now)
        session.run(
            f"insert into deliveries ({_COLUMNS}, due, seal) values (?, ?, ?, ?, ?, ?, ?)",
            *(*row, now, session.seals.sign("delivery", *row)),
        )


def announce_installation(session: Session, subscriptions: Subscriptions, version: PolicyVersion) -> None:
    """Queue messages about a certificate that was installed, in place of another or as its renewal."""
    chain = as_object(version.certificate.get("ancestry"))
    if chain:
        data = {**_version_facts(version), "step": chain.get("step"), "renewal": chain.get("renewal")}
        announce(session, subscriptions, "certificate.renewed", data)
    else:
        announce(session, subscriptions, "certificate.installed", _version_facts(version))


def announce_rollback(session: Session, subscriptions: Subscriptions, version: PolicyVersion) -> None:
    """Queue messages about an earlier certificate that is active again."""
    announce(session, subscriptions, "certificate.rolled_back", _version_facts(version))


def _version_facts(version: PolicyVersion) -> dict[str, object]:
    return {
        "policy": version.name,
        "version": version.version,
        "origin": version.origin,
        "installed_by": version.installed_by,
        "alpha": version.certificate.get("alpha"),
    }


def announce_notice(session: Session, subscriptions: Subscriptions, policy: str, body: NoticeBody) -> None:
    """Queue messages about an alarm or its lift."""
    event: WebhookEvent = "alarm.raised" if isinstance(body, AlarmBody) else "alarm.lifted"
    facts = {name: value for name, value in asdict(body).items() if name not in ("at", "identities_sha256")}
    announce(session, subscriptions, event, {"policy": policy, **facts})


def take_deliveries(session: Session, endpoint: str, *, limit: int, lease: float) -> list[Delivery]:
    """Lease the deliveries to an endpoint that have been due the longest, and count the attempt."""
    now = session.now()
    rows = session.rows(
        f"select {_COLUMNS}, attempts, done, error, seal from deliveries where endpoint = ? and done is null "
        f"and (due <= ? or due > ?) order by due, id limit ?{session.dialect.skip_locked}",
        *(endpoint, now, now + _LONGEST_WAIT, limit),
    )
    for row in rows:
        session.run(f"update deliveries set attempts = attempts + 1, due = ? where {_OWN}", now + lease, *row[:2])
    return [_delivery(session, row, begun=1) for row in rows]


def postpone_delivery(session: Session, delivery: Delivery, *, seconds: float, error: str) -> None:
    """Let a delivery be taken again after some time."""
    values = (session.now() + seconds, error, delivery.id, delivery.endpoint)
    session.run(f"update deliveries set due = ?, error = ? where {_OWN}", *values)


def finish_delivery(session: Session, delivery: Delivery, *, error: str | None) -> None:
    """Mark a delivery as done: delivered, or given up with an error."""
    session.run(
        f"update deliveries set done = ?, error = ? where {_OWN}",
        *(session.now(), error, delivery.id, delivery.endpoint),
    )


def abandon_deliveries(session: Session, endpoint: str, *, error: str) -> int:
    """Give up everything that waits for an endpoint; return how many deliveries that were."""
    return session.run(
        "update deliveries set done = ?, error = ? where endpoint = ? and done is null", session.now(), error, endpoint
    )


def deliveries(session: Session, *, limit: int) -> list[Delivery]:
    """Return the newest deliveries, done or not."""
    rows = session.rows(
        f"select {_COLUMNS}, attempts, done, error, seal from deliveries order by created desc, id desc, endpoint limit ?",
        limit,
    )
    return [_delivery(session, row) for row in rows]


def delivery_backlog(session: Session) -> list[DeliveryBacklog]:
    """Return how many deliveries wait for each endpoint, and how long the oldest has."""
    now = session.now()
    rows = session.rows(
        "select endpoint, count(*), min(created) from deliveries where done is null group by endpoint order by endpoint"
    )
    return [DeliveryBacklog(endpoint=name, waiting=count, oldest=max(0.0, now - first)) for name, count, first in rows]


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
        intact=not session.seals or session.seals.fits(seal, "delivery", *written),
    )
