"""API keys, kept as digests, and who is signed in to the console with one."""

import logging
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from conformal_arbitrage.errors import OptionError, StoreError
from conformal_arbitrage.store.integrity import KEY, SIGN_IN, enrol, is_intact_key, read_roster
from conformal_arbitrage.store.record import decode
from conformal_arbitrage.store.session import CHANGED, Job, Session, operation, viewed, viewed_job

Scope = Literal["call", "review", "operate", "admin"]


class KeyInfo(Struct, frozen=True, kw_only=True):
    """An API key without its secret.

    Attributes:
        expires: when it stops being valid; None for never.
        policies: the only policies it is good for; None for all.
        intact: whether it is what was created, as far as the store's keys can tell.
    """

    id: str
    scope: Scope
    label: str
    created: float
    revoked: float | None = None
    expires: float | None = None
    policies: tuple[str, ...] | None = None
    intact: bool = True


class SignIn(Struct, frozen=True, kw_only=True):
    """Someone who signed in to the console with an API key.

    Attributes:
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
_KEYS = f"select {KEY}, seal from keys "
_log = logging.getLogger("conformal_arbitrage.store")


@viewed_job("write")
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
        if not session.view.reaches(policies):
            reach = ", ".join(sorted(session.view.policies or ()))
            raise StoreError(
                f"a key for {names or 'all policies'} would reach beyond {reach}; name policies among these"
            )
        ends = None if expires is None else float(expires)
        row = (id, sha256, scope, label, session.now(), None, ends, names)
        seal = session.seals.sign("key", *row)
        session.run(f"insert into keys ({KEY}, seal) values (?, ?, ?, ?, ?, ?, ?, ?, ?)", *row, seal)
        enrol(session, keys={id: seal or ""})
        session.run(CHANGED)

    return insert


@operation("read")
def find(session: Session, sha256: str) -> KeyInfo | None:
    """Return the key with this digest, revoked or not; one that is not what was created does not work."""
    rows = session.rows(_KEYS + "where sha256 = ?", sha256)
    key = next(iter(_keys(session, rows)), None)
    return key if key is not None and _works(key) else None


def _works(key: KeyInfo) -> bool:
    if not key.intact:
        _log.error(
            "key %r was inserted or changed in the database, and is refused; run `arbitrage records verify`", key.id
        )
    return key.intact


@operation("read")
def exist(session: Session) -> bool:
    """Return whether a key was ever created: one that someone deleted counts, since calls without one are admin's."""
    roster, _ = read_roster(session)
    return bool(session.rows("select 1 from keys limit 1")) or (roster is not None and bool(roster.keys))


@viewed("read")
def list_all(session: Session) -> list[KeyInfo]:
    """Return all keys that reach nothing beyond the view, oldest first."""
    keys = _keys(session, session.rows(_KEYS + "order by created, id"))
    return [key for key in keys if session.view.reaches(key.policies)]


def _keys(session: Session, rows: Sequence[Sequence[Any]]) -> list[KeyInfo]:
    roster, valid = read_roster(session) if rows and session.seals else (None, False)
    return [_key(row, intact=is_intact_key(session, row, roster if valid else None)) for row in rows]


def _key(row: Sequence[Any], *, intact: bool) -> KeyInfo:
    id, _, scope, label, created, revoked, expires, policies, _ = row
    return KeyInfo(
        id=id,
        scope=scope,
        label=label,
        created=created,
        revoked=revoked,
        expires=expires,
        policies=None if policies is None else decode(policies, tuple[str, ...], f"the policies of key {id}"),
        intact=intact,
    )


@viewed("write")
def revoke(session: Session, id: str) -> bool:
    """Mark a key as revoked, keeping the time of the first revocation; return whether there is such a key in the view."""
    session.run("update changes set count = count")  # as for the roster
    if id not in {key.id for key in list_all(session)}:
        return False
    [row] = session.rows(_KEYS + "where id = ?", id)
    roster, _ = read_roster(session)
    revoked = session.now() if row[5] is None else row[5]
    seal = row[-1]
    if is_intact_key(session, row, roster):  # revoking must not vouch for what someone changed
        seal = session.seals.sign("key", *row[:5], revoked, *row[6:-1])
        enrol(session, keys={id: seal or ""})
    session.run("update keys set revoked = ?, seal = ? where id = ?", revoked, seal, id)
    session.run(CHANGED)
    return True


# --- Sign-ins ---


@operation("write")
def sign_in(session: Session, sha256: str, key_id: str, *, seconds: float) -> None:
    """Note that someone signed in with a key, for so many seconds; `sha256` is the digest of their cookie."""
    now = session.now()
    session.run("delete from sign_ins where expires <= ?", now)
    row = (sha256, key_id, now, now + seconds)
    session.run(
        f"insert into sign_ins ({SIGN_IN}, seen, seal) values (?, ?, ?, ?, ?, ?)",
        *(*row, now, session.seals.sign("sign-in", *row)),
    )


@operation("read")
def find_sign_in(session: Session, sha256: str) -> SignIn | None:
    """Return who signed in with a cookie of that digest, unless their time is over."""
    now = session.now()
    for *row, seen, seal in session.rows(f"select {SIGN_IN}, seen, seal from sign_ins where sha256 = ?", sha256):
        _, key_id, created, expires = row
        if not session.seals.accept(seal, "sign-in", *row):
            _log.error("a sign-in with key %r was inserted or changed in the database, and is refused", key_id)
            return None
        key = next(iter(_keys(session, session.rows(_KEYS + "where id = ?", key_id))), None)
        if key is None or expires <= now:
            return None
        return SignIn(
            key_id=key_id,
            scope=key.scope,
            label=key.label,
            policies=key.policies,
            valid=_works(key) and key.revoked is None and (key.expires is None or key.expires > now),
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
