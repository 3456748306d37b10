"""Operations on conversations: which model a session belongs to, until it has been idle for long enough.

The database's clock decides when one is over, so that gateways need not agree on the time.

Knows nothing of how a model was chosen.
"""

from conformal_arbitrage.store.base import Conversation
from conformal_arbitrage.store.dialect import Session

_COLUMNS = "key_id, policy, name, id, decided_by, version"
_SOME = 500


def find_conversation(session: Session, key_id: str, policy: str, name: str) -> Conversation | None:
    """Return the conversation of that name, unless it is over."""
    rows = session.rows(
        f"select {_COLUMNS} from conversations where key_id = ? and policy = ? and name = ? "
        f"and expires > {session.dialect.now}",
        *(key_id, policy, name),
    )
    return Conversation(*rows[0]) if rows else None


def settle_conversation(session: Session, conversation: Conversation, *, idle: float) -> Conversation:
    """Begin a conversation or, if it is the one in force, extend it; return the one in force."""
    now = session.dialect.now
    session.run(
        f"insert into conversations ({_COLUMNS}, expires) values (?, ?, ?, ?, ?, ?, {now} + ?) "
        "on conflict (key_id, policy, name) do update set id = excluded.id, decided_by = excluded.decided_by, "
        "version = excluded.version, expires = excluded.expires "
        f"where conversations.expires <= {now} or conversations.id = excluded.id",
        *(conversation.key_id, conversation.policy, conversation.name),
        *(conversation.id, conversation.decided_by, conversation.version, idle),
    )
    rows = session.rows(
        f"select {_COLUMNS} from conversations where key_id = ? and policy = ? and name = ?",
        *(conversation.key_id, conversation.policy, conversation.name),
    )
    return Conversation(*rows[0])


def sweep_conversations(session: Session) -> bool:
    """Delete some of the conversations that are over; return whether there may be more."""
    now, some = session.dialect.now, f"limit ?{session.dialect.skip_locked}"
    removed = session.run(
        f"delete from conversations where id in (select id from conversations where expires <= {now} {some})", _SOME
    )
    return removed == _SOME
