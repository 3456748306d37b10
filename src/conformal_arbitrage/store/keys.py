"""API keys, kept as digests, and who is signed in to the console with one."""

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.store.record import decode_names
from conformal_arbitrage.store.session import CHANGED, Job, Session, operation, prepared

Scope = Literal["call", "review", "admin", "metrics"]


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
    scope: Scope
    label: str
    policies: tuple[str, ...] | None
    valid: bool
    created: float
    idle: float


_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEYS = "select id, scope, label, created, revoked, expires, policies from keys "


@prepared("write")
def create(
    *,
    id: str,
    sha256: str,
    scope: Scope,
    label: str,
    expires: float | None = None,
    policies: Sequence[str] | None = None,
) -> Job[None]:
    """Store an API key, as its digest only."""
    if not _DIGEST.fullmatch(sha256):
        raise OptionError("sha256= takes the digest of a key, 64 lower-case hexadecimal digits, never the key")
    names = None if policies is None else msgspec.json.encode(list(policies)).decode()

    def insert(session: Session) -> None:
        session.run(
            "insert into keys (id, sha256, scope, label, created, expires, policies) values (?, ?, ?, ?, ?, ?, ?)",
            *(id, sha256, scope, label, session.now(), expires, names),
        )
        session.run(CHANGED)

    return insert


@operation("read")
def find(session: Session, sha256: str) -> KeyInfo | None:
    """Return the key with this digest, revoked or not."""
    rows = session.rows(_KEYS + "where sha256 = ?", sha256)
    return _key(rows[0]) if rows else None


@operation("read")
def list_all(session: Session) -> list[KeyInfo]:
    """Return all keys, oldest first."""
    return [_key(row) for row in session.rows(_KEYS + "order by created, id")]


def _key(row: Sequence[Any]) -> KeyInfo:
    id, scope, label, created, revoked, expires, policies = row
    return KeyInfo(
        id=id,
        scope=scope,
        label=label,
        created=created,
        revoked=revoked,
        expires=expires,
        policies=None if policies is None else decode_names(policies, f"the policies of key {id}"),
    )


@operation("write")
def revoke(session: Session, id: str) -> bool:
    """Mark a key as revoked, keeping the time of the first revocation; return whether there is such a key."""
    count = session.run("update keys set revoked = coalesce(revoked, ?) where id = ?", session.now(), id)
    session.run(CHANGED)
    return count == 1


# --- Sign-ins ---


@operation("write")
def sign_in(session: Session, sha256: str, key_id: str, *, seconds: float) -> None:
    """Note that someone signed in with a key, for so many seconds; `sha256` is the digest of their cookie."""
    now = session.now()
    session.run("delete from sign_ins where expires <= ?", now)
    session.run(
        "insert into sign_ins (sha256, key_id, created, seen, expires) values (?, ?, ?, ?, ?)",
        *(sha256, key_id, now, now, now + seconds),
    )


@operation("read")
def find_sign_in(session: Session, sha256: str) -> SignIn | None:
    """Return who signed in with a cookie of that digest, unless their time is over."""
    now = session.now()
    rows = session.rows(
        "select k.id, k.scope, k.label, k.policies, k.revoked, k.expires, s.created, s.seen from sign_ins s "
        "join keys k on k.id = s.key_id where s.sha256 = ? and s.expires > ?",
        *(sha256, now),
    )
    for id, scope, label, policies, revoked, expires, created, seen in rows:
        return SignIn(
            key_id=id,
            scope=scope,
            label=label,
            policies=None if policies is None else decode_names(policies, f"the policies of key {id}"),
            valid=revoked is None and (expires is None or expires > now),
            created=created,
            idle=max(0.0, now - seen),
        )
    return None


@operation("write")
def note_sign_in(session: Session, sha256: str) -> None:
    """Note that someone is still there."""
    session.run("update sign_ins set seen = ? where sha256 = ?", session.now(), sha256)


@operation("write")
def sign_out(session: Session, sha256: str) -> None:
    """Remove a sign-in."""
    session.run("delete from sign_ins where sha256 = ?", sha256)
