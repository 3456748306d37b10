"""Operations on queued audits: lease those that are due, renew, postpone, and say how many wait.

`lease` is the time from which an audit may be taken: when it was queued, when it was to be retried, or when the lease of
whoever holds it ends. The database's clock decides, so that gateways need not agree on the time.

Knows nothing of what an audit asks, or when it should be given up.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store.base import Audit, AuditBacklog
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import decode_question
from conformal_arbitrage.store.ledger import write_row

_log = logging.getLogger("conformal_arbitrage.store")
_COLUMNS = "(id, policy, payload, identities, queued, lease)"


def queue_audits(session: Session, audits: Sequence[tuple[Audit, str | None]]) -> None:
    """Write the ledger's rows of decisions drawn for an audit, and queue their questions, if any, due at once."""
    for audit, question in audits:
        if audit.row is not None:
            write_row(session, audit.id, audit.row)
        if question is not None:
            now = session.dialect.now
            values = (audit.id, audit.policy, question, audit.identities_sha256)
            session.run(
                f"insert into audits {_COLUMNS} values (?, ?, ?, ?, {now}, {now}) on conflict (id) do nothing", *values
            )


def take_audits(
    session: Session, *, limit: int, lease: float, policies: Mapping[str, str] | None, overdue: float | None
) -> list[Audit]:
    """Lease the audits that have been due the longest."""
    now = session.now()
    conditions, values = ["lease <= ?"], [now]
    if policies is not None:
        own = ["(policy = ? and identities = ?)"] * len(policies)
        late = [] if overdue is None else ["queued <= ?"]
        conditions.append(f"({' or '.join([*own, *late]) or 'false'})")
        values += [*chain.from_iterable(policies.items()), *([] if overdue is None else [now - overdue])]
    rows = session.rows(
        f"select id, policy, payload, identities, attempts, queued from audits where {' and '.join(conditions)} "
        f"order by lease, id limit ?{session.dialect.skip_locked}",
        *(*values, limit),
    )
    renew_audits(session, [row[0] for row in rows], lease=lease)
    return [audit for row in rows if (audit := _audit(row, now)) is not None]


def _audit(row: Sequence[Any], now: float) -> Audit | None:
    """Return an audit, or None if its question is damaged, since that must not stop the others."""
    id, policy, text, identities, attempts, queued = row
    try:
        question = decode_question(text, id)
    except StoreError as error:
        _log.error("an audit is skipped: %s", error, extra={"policy": policy, "id": id})
        return None
    age = max(0.0, now - queued)
    return Audit(id=id, policy=policy, question=question, identities_sha256=identities, attempts=attempts, age=age)


def renew_audits(session: Session, ids: Sequence[str], *, lease: float) -> None:
    """Extend the leases of audits."""
    for id in ids:
        session.run(f"update audits set lease = {session.dialect.now} + ? where id = ?", lease, id)


def postpone_audit(session: Session, id: str, *, seconds: float) -> None:
    """Count an attempt, and let the audit be taken again after some time."""
    session.run(
        f"update audits set attempts = attempts + 1, lease = {session.dialect.now} + ? where id = ?", seconds, id
    )


def audit_backlog(session: Session) -> list[AuditBacklog]:
    """Return how many audits of each policy wait, and how long the oldest has."""
    rows = session.rows("select policy, count(*), min(queued) from audits group by policy order by policy")
    now = session.now()
    return [AuditBacklog(policy=name, waiting=count, oldest=max(0.0, now - queued)) for name, count, queued in rows]
