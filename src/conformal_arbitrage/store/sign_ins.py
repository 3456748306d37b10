"""Operations on sign-ins to the console; a cookie is kept as its digest only.

Knows nothing of cookies, or of who may sign in.
"""

from conformal_arbitrage.store.console_base import SignIn
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import decode_names


def sign_in(session: Session, sha256: str, key_id: str, *, seconds: float) -> None:
    """Add a sign-in; those whose time is over are removed."""
    now = session.now()
    session.run("delete from sign_ins where expires <= ?", now)
    session.run(
        "insert into sign_ins (sha256, key_id, created, seen, expires) values (?, ?, ?, ?, ?)",
        *(sha256, key_id, now, now, now + seconds),
    )


def find_sign_in(session: Session, sha256: str) -> SignIn | None:
    """Return a sign-in whose time is not over, with its key as it is now."""
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


def note_sign_in(session: Session, sha256: str) -> None:
    """Note that someone is still there."""
    session.run("update sign_ins set seen = ? where sha256 = ?", session.now(), sha256)


def sign_out(session: Session, sha256: str) -> None:
    """Remove a sign-in."""
    session.run("delete from sign_ins where sha256 = ?", sha256)
