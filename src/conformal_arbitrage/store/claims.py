"""What requests hold: idempotency keys with their replies, sessions of callers, and shares of a limit on spending."""

import secrets
from collections.abc import Mapping
from math import floor
from typing import Literal

from msgspec import Struct

from conformal_arbitrage.errors import LostClaimError, StoreError
from conformal_arbitrage.store.record import decode_json, encode_json, time_of
from conformal_arbitrage.store.session import CHUNK, Session, operation
from conformal_arbitrage.types import DAY

# --- Idempotency keys ---


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
KEEP_SECONDS = 600.0
"""How long a retry without a key may continue a decision, from its first attempt."""
_LONGEST_LEASE = 120.0
"""No lease ends later than that from now: one that does was written before the database's clock was set back."""


@operation("write")
def take(session: Session, key_id: str, name: str, body_sha256: str, *, lease: float) -> Claimed:
    """Claim the right to answer a request, unless it was answered, is being answered, or was another request.

    A claim may be taken over once its lease has expired. Names expire after 24 hours.
    """
    now, owner = session.now(), secrets.token_hex(16)
    taken = session.run(
        "insert into claims (key_id, name, body_sha256, owner, state, lease, expires) "
        "values (?, ?, ?, ?, 'pending', ?, ?) on conflict (key_id, name) do update set owner = excluded.owner, "
        "body_sha256 = excluded.body_sha256, state = 'pending', lease = excluded.lease, expires = excluded.expires "
        "where claims.expires <= ? or (claims.state <> 'finished' and (claims.lease <= ? or claims.lease > ?) "
        "and claims.body_sha256 = excluded.body_sha256)",
        *(key_id, name, body_sha256, owner, now + lease, now + DAY, now, now, now + _LONGEST_LEASE),
    )
    if not taken:
        return _refusal(session, key_id, name, body_sha256)
    return Claim(key_id, name, owner, _begun(session, key_id, name, body_sha256, now))


def _refusal(session: Session, key_id: str, name: str, body_sha256: str) -> Claimed:
    """Return why a claim cannot be taken; the attempt to take it has locked its row."""
    [(body, state)] = session.rows("select body_sha256, state from claims where key_id = ? and name = ?", key_id, name)
    if body != body_sha256:
        return "other body"
    if state != "finished":
        return "under way"
    response = saved_response(session, key_id, name)
    if response is None:
        raise StoreError(f"the response under the idempotency key {name!r} is gone; send the request with a new one")
    return response


def _begun(session: Session, key_id: str, name: str, body_sha256: str, now: float) -> dict[int, str]:
    """Return the decisions that earlier attempts at the same request began, by the question's place."""
    rows = session.rows(
        "select place, id from begun where key_id = ? and name = ? and body_sha256 = ? and expires > ?",
        *(key_id, name, body_sha256, now),
    )
    return {int(place): id for place, id in rows}


@operation("read")
def saved_response(session: Session, key_id: str, name: str) -> SavedResponse | None:
    """Return the response under an idempotency key, if there is one.

    Raises:
        StoreError: it was changed.
    """
    rows = session.rows("select status, headers, body, seal from replays where key_id = ? and name = ?", key_id, name)
    if not rows:
        return None
    [(status, text, content, seal)] = rows
    if not session.seals.accept(seal, "replay", key_id, name, status, text, content):
        raise StoreError(f"the response under the idempotency key {name!r} was changed; run `arbitrage records verify`")
    headers = {name: str(value) for name, value in decode_json(text, "the headers of a response").items()}
    return SavedResponse(status=status, headers=headers, body=content)


@operation("write")
def renew(session: Session, claim: Claim, *, lease: float) -> bool:
    """Extend a claim's lease; return False if the claim was taken over."""
    now = session.now()
    held = session.run(
        "update claims set lease = ?, expires = ? where key_id = ? and name = ? and owner = ? and state <> 'finished'",
        *(now + lease, now + DAY, claim.key_id, claim.name, claim.owner),
    )
    return held == 1


@operation("write")
def release(session: Session, claim: Claim) -> None:
    """Give up an unfinished claim, if the owner still holds it; its name stays bound to its body if a decision was begun."""
    held = "key_id = ? and name = ? and owner = ? and state <> 'finished'"
    values = (claim.key_id, claim.name, claim.owner)
    begun = "exists (select 1 from begun b where b.key_id = claims.key_id and b.name = claims.name and "
    begun += "b.body_sha256 = claims.body_sha256)"
    session.run(f"update claims set lease = 0 where {held} and {begun}", *values)
    session.run(f"delete from claims where {held} and not {begun}", *values)


def settle_claim(session: Session, claim: Claim, response: SavedResponse | None, now: float) -> None:
    """Mark a claim as decided, or as finished with a response, if the owner still holds it."""
    held = session.run(
        "update claims set state = ?, expires = ? where key_id = ? and name = ? and owner = ? and state <> 'finished'",
        *("decided" if response is None else "finished", now + DAY, claim.key_id, claim.name, claim.owner),
    )
    if not held:
        raise LostClaimError(f"the idempotency key {claim.name!r} is no longer held by this request; send it again")
    if response is not None:
        headers = encode_json(response.headers, "the headers of a response")
        row = (claim.key_id, claim.name, response.status, headers, response.body)
        session.run(
            "insert into replays (key_id, name, status, headers, body, expires, seal) values (?, ?, ?, ?, ?, ?, ?) "
            "on conflict (key_id, name) do update set status = excluded.status, headers = excluded.headers, "
            "body = excluded.body, expires = excluded.expires, seal = excluded.seal",
            *(*row, now + DAY, session.seals.sign("replay", *row)),
        )


def note_begun(session: Session, claim: Claim, begun: Mapping[int, str]) -> None:
    """Note the decisions that were begun under a claim, for another attempt to continue."""
    for place, id in begun.items():
        session.run(
            "insert into begun (key_id, name, place, body_sha256, id, expires) "
            "select key_id, name, ?, body_sha256, ?, expires from claims where key_id = ? and name = ? "
            "on conflict (key_id, name, place) do update set body_sha256 = excluded.body_sha256, id = excluded.id, "
            "expires = case when begun.expires > excluded.expires then begun.expires else excluded.expires end",
            *(place, id, claim.key_id, claim.name),
        )


@operation("write")
def take_undelivered(session: Session, digest: str) -> str | None:
    """Hand out a decision about a question of which nothing was delivered, once, within ten minutes of its id."""
    rows = session.rows(
        "select id from undelivered where digest = ? and expires > ? order by expires limit 1"
        f"{session.dialect.skip_locked}",
        *(digest, session.now()),
    )
    for (id,) in rows:
        session.run("delete from undelivered where id = ?", id)
        return str(id)
    return None


def keep_undelivered(session: Session, digests: Mapping[str, str]) -> None:
    """Keep decisions for a retry without a key, for ten minutes from their first attempt, when their ids were made."""
    now = session.now() if digests else 0.0
    for id, digest in digests.items():
        session.run(
            "insert into undelivered (id, digest, expires) values (?, ?, ?) "
            "on conflict (id) do update set digest = excluded.digest, expires = excluded.expires",
            *(id, digest, time_of(id) + KEEP_SECONDS),
        )
    if digests:  # seldom, since every gateway waits for this row
        until = now + 2 * KEEP_SECONDS
        session.run("update changes set undelivered_until = ? where undelivered_until < ?", until, now + KEEP_SECONDS)


@operation("write")
def sweep_claims(session: Session) -> bool:
    """Delete some of the expired claims and responses; return whether there may be more."""
    now = session.now()
    counts = [
        session.run(
            f"delete from {table} where (key_id, name) in "
            f"(select key_id, name from {table} where expires <= ? limit ?{session.dialect.skip_locked})",
            *(now, CHUNK),
        )
        for table in ("claims", "replays", "begun")
    ]
    session.run("delete from undelivered where expires <= ?", now)
    session.run("update changes set undelivered_until = 0 where undelivered_until > 0 and undelivered_until <= ?", now)
    return CHUNK in counts


# --- Conversations: which model a caller's session belongs to, until it has been idle for long enough ---


class Conversation(Struct, frozen=True):
    """A session of a caller: the model that its first turn chose answers all of its turns.

    Attributes:
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


_CONVERSATION = "key_id, policy, name, id, decided_by, version"


@operation("read")
def find_conversation(session: Session, key_id: str, policy: str, name: str) -> Conversation | None:
    """Return a caller's conversation of that name, unless it is over."""
    rows = session.rows(
        f"select {_CONVERSATION} from conversations where key_id = ? and policy = ? and name = ? "
        f"and expires > {session.dialect.now}",
        *(key_id, policy, name),
    )
    return Conversation(*rows[0]) if rows else None


@operation("write")
def settle_conversation(session: Session, conversation: Conversation, *, idle: float) -> Conversation:
    """Begin a conversation or, if it is in force, extend it to `idle` seconds from now; return the one in force."""
    now = session.dialect.now
    session.run(
        f"insert into conversations ({_CONVERSATION}, expires) values (?, ?, ?, ?, ?, ?, {now} + ?) "
        "on conflict (key_id, policy, name) do update set id = excluded.id, decided_by = excluded.decided_by, "
        "version = excluded.version, expires = excluded.expires "
        f"where conversations.expires <= {now} or conversations.id = excluded.id",
        *(conversation.key_id, conversation.policy, conversation.name),
        *(conversation.id, conversation.decided_by, conversation.version, idle),
    )
    rows = session.rows(
        f"select {_CONVERSATION} from conversations where key_id = ? and policy = ? and name = ?",
        *(conversation.key_id, conversation.policy, conversation.name),
    )
    return Conversation(*rows[0])


@operation("write")
def sweep_conversations(session: Session) -> bool:
    """Delete some of the conversations that are over; return whether there may be more."""
    now, some = session.dialect.now, f"limit ?{session.dialect.skip_locked}"
    removed = session.run(
        f"delete from conversations where id in (select id from conversations where expires <= {now} {some})", CHUNK
    )
    return removed == CHUNK


# --- Spending: what all gateways of one database have used of a limit within a sliding window ---
#
# The window is kept in sixty parts. A part counts until all of it has left the window, so no window ever exceeds the limit.
# Amounts are whole numbers, which sum exactly. What is reserved and never settled, as after a crash, counts in full.


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


_PARTS = 60
_LOCK = -1  # the part whose row every reservation under a name locks first


@operation("write")
def reserve(
    session: Session, name: str, amount: int, *, limit: int, seconds: float, settled: bool = False
) -> Reservation | Shortage:
    """Reserve an amount of a limit that all gateways share.

    Args:
        amount: in whole units.
        limit: the most units, reserved or spent, within any window.
        settled: the amount is known to be spent, and there will be no `settle`.
    """
    now, width = _lock_spending(session, name), seconds / _PARTS
    oldest, current = floor((now - seconds) / width), floor(now / width)
    session.run("delete from spending where name = ? and part <> ? and part < ?", name, _LOCK, oldest)
    rows = session.rows(
        "select part, reserved, spent from spending where name = ? and part >= ? order by part", name, oldest
    )
    used = sum(reserved + spent for _, reserved, spent in rows)
    if used + amount > limit:
        in_flight = sum(spent for _, _, spent in rows) + amount <= limit
        wait = _wait([(part, reserved + spent) for part, reserved, spent in rows], used + amount - limit)
        return Shortage(wait=None if wait is None else (wait + 1) * width + seconds - now, in_flight=in_flight)
    session.run(
        "insert into spending (name, part, reserved, spent) values (?, ?, ?, ?) on conflict (name, part) do update "
        "set reserved = spending.reserved + excluded.reserved, spent = spending.spent + excluded.spent",
        *(name, current, 0 if settled else amount, amount if settled else 0),
    )
    return Reservation(name=name, part=current, amount=amount)


@operation("write")
def settle(session: Session, reservation: Reservation, spent: int) -> None:
    """Replace a reservation by what was spent, in the part of the window it was made in."""
    session.run(
        "update spending set reserved = reserved - ?, spent = spent + ? where name = ? and part = ?",
        *(reservation.amount, spent, reservation.name, reservation.part),
    )


def _lock_spending(session: Session, name: str) -> float:
    """Wait for other reservations under the same name to commit; return the time after that."""
    session.run(
        "insert into spending (name, part, reserved, spent) values (?, ?, 0, 0) "
        "on conflict (name, part) do update set reserved = 0",
        *(name, _LOCK),
    )
    [(now,)] = session.rows(f"select {session.dialect.now}")  # not when the transaction began: it may have waited
    return float(now)


def _wait(parts: list[tuple[int, int]], excess: int) -> int | None:
    """Return the part that has to leave the window for the excess to be gone; None if no part suffices."""
    for part, used in parts:
        excess -= used
        if excess <= 0:
            return part
    return None
