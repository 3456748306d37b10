"""Operations on ledgers and alarms, each within the transaction of a session.

Every change of a ledger first locks the ledger's own row, so that numbers are given in the order of the commits, and a
cursor never passes a change that commits later. Every alarm and lift locks the row that installations lock.

Knows nothing of threads, of how a transaction begins and ends, or of what a loss means.
"""

import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from conformal_arbitrage.store.base import PolicyVersion
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import decode_json, decode_notice
from conformal_arbitrage.store.ledger_base import (
    AuditRow,
    Ledger,
    LedgerKey,
    LedgerNews,
    LedgerRows,
    NewRow,
    Notice,
    Settlement,
)
from conformal_arbitrage.store.record import AlarmBody, JSONObject, LiftBody, NoticeBody
from conformal_arbitrage.store.sql_jobs import SingleQuery
from conformal_arbitrage.types import as_object

NOTICES = "kind in ('alarm', 'lift')"
"""The events that are about a policy; a partial index holds them."""
_ROWS_AT_ONCE = 500
_KEY = "policy, version, lifts, identities, segment"
_ROW = "seq, id, drawn, due, loss, served, undelivered, known_order, known_at, change"


def write_row(session: Session, id: str, row: NewRow) -> None:
    """Write a row with the next number of its ledger, unless its decision or its slot has one."""
    number = _lock(session, row.key)
    if session.rows("select 1 from ledger where id = ? or (ledger = ? and slot = ?)", id, number, row.slot):
        return
    known = row.loss is not None
    length, losses, change = _grow(session, number, known=int(known))
    order = (losses, row.drawn) if known else (None, None)
    session.run(
        f"insert into ledger ({_ROW}, ledger, slot) values (?, ?, ?, ?, ?, null, 0, ?, ?, ?, ?, ?)",
        *(length, id, row.drawn, row.due, row.loss, *order, change, number, row.slot),
    )


def _grow(session: Session, number: int, *, known: int) -> tuple[int, int, int]:
    """Count a new row of a ledger; return its number of rows, of known losses and of changes."""
    session.run(
        "update ledgers set length = length + 1, known = known + ?, changes = changes + 1 where number = ?",
        *(known, number),
    )
    [(length, losses, changes)] = session.rows("select length, known, changes from ledgers where number = ?", number)
    return int(length), int(losses), int(changes)


def _lock(session: Session, key: LedgerKey) -> int:
    """Return the number of a ledger, which exists from now on, and make others wait until this transaction ends."""
    values = _values(key)
    locked = "update ledgers set length = length where (policy, version, lifts, identities, segment) = (?, ?, ?, ?, ?)"
    if not session.run(locked, *values):
        session.run(
            f"insert into ledgers (number, {_KEY}, length, known, changes) values (?, ?, ?, ?, ?, ?, 0, 0, 0) "
            f"on conflict ({_KEY}) do nothing",
            *(secrets.randbits(62), *values),
        )
        session.run(locked, *values)
    number = _number(session, key)
    if number is None:
        raise AssertionError("the ledger was just made")
    return number


def _number(session: Session, key: LedgerKey) -> int | None:
    rows = session.rows(f"select number from ledgers where ({_KEY}) = (?, ?, ?, ?, ?)", *_values(key))
    return int(rows[0][0]) if rows else None


def _values(key: LedgerKey) -> tuple[object, ...]:
    return key.policy, key.version, key.lifts, key.identities_sha256, key.group


def _key(row: Sequence[Any]) -> LedgerKey:
    policy, version, lifts, identities, group = row
    return LedgerKey(policy=policy, version=version, lifts=lifts, identities_sha256=identities, group=group)


def note_news(session: Session, ids: Iterable[str]) -> None:
    """Note that something was recorded about decisions, if the ledger has them."""
    for id in ids:
        session.run("update ledger set news = news + 1 where id = ?", id)


def ledger_news(session: Session, policies: Collection[str], limit: int) -> list[LedgerNews]:
    """Return rows with news, the oldest decisions first."""
    places = ", ".join("?" * len(policies)) or "null"
    rows = session.rows(
        f"select l.id, l.news, {_KEY} from ledger l join ledgers on number = l.ledger where l.news > 0 "
        f"and policy in ({places}) order by l.id limit ?",
        *(*policies, limit),
    )
    return [LedgerNews(id=id, news=news, key=_key(key)) for id, news, *key in rows]


def settle_rows(session: Session, settlements: Sequence[Settlement]) -> None:
    """Write what is known of rows, ledger by ledger in a fixed order, so that two gateways never wait for each other."""
    by_id = {one.id: one for one in settlements}
    places = ", ".join("?" * len(by_id))
    rows = session.rows(f"select distinct ledger from ledger where id in ({places})", *by_id)
    for number in sorted(int(number) for (number,) in rows):
        session.run("update ledgers set length = length where number = ?", number)  # others wait from here on
        [(known, changes)] = session.rows("select known, changes from ledgers where number = ?", number)
        count = _Counts(int(known), int(changes))
        columns = "id, due, loss, served, undelivered, known_order, known_at, change"
        own = session.rows(
            f"select {columns} from ledger where ledger = ? and id in ({places}) order by seq", number, *by_id
        )
        for id, *before in own:
            _settle(session, by_id[id], before, count)
        session.run("update ledgers set known = ?, changes = ? where number = ?", count.known, count.changes, number)


@dataclass(slots=True)
class _Counts:
    """How many losses of a ledger are known, and how many changes it has seen."""

    known: int
    changes: int


def _settle(session: Session, new: Settlement, before: Sequence[Any], count: _Counts) -> None:
    """Write what is known of one row, after counting the change if there is one."""
    due, loss, served, undelivered, order, known_at, change = before
    after = [due, loss, new.served, int(not new.delivered), order, known_at]
    if loss is None and new.loss is not None:
        count.known += 1
        after = [due, new.loss, new.served, int(not new.delivered), count.known, new.at]
    elif loss is None and new.failed:
        after[0] = min(due, new.at)
    if after != [due, loss, served, undelivered, order, known_at]:
        count.changes += 1
        change = count.changes
    session.run(
        "update ledger set due = ?, loss = ?, served = ?, undelivered = ?, known_order = ?, known_at = ?, change = ?, "
        "news = case when news > ? then news - ? else 0 end where id = ?",
        *(*after, change, new.news, new.news, new.id),
    )


def find_ledgers(policy: str | None) -> SingleQuery:
    """Return what finds the ledgers there are."""
    return SingleQuery(
        f"select {_KEY}, length, known, changes from ledgers where policy = coalesce(?, policy) "
        "order by policy, version, lifts, identities, segment",
        (policy,),
    )


def ledgers_of(rows: Iterable[Sequence[Any]]) -> list[Ledger]:
    """Return the ledgers in rows of such a query."""
    return [Ledger(key=_key(key), rows=length, known=known, change=changes) for *key, length, known, changes in rows]


def ledger(session: Session, key: LedgerKey, after: int = 0, limit: int | None = None) -> LedgerRows:
    """Return a ledger, or so many of its rows after one of that number; the transaction must be a snapshot."""
    rows = session.rows(f"select number, length, changes from ledgers where ({_KEY}) = (?, ?, ?, ?, ?)", *_values(key))
    if not rows:
        return LedgerRows.of([], 0)
    number, length, changes = map(int, rows[0])
    stop = length if limit is None else min(length, after + limit)
    columns, count = np.empty((7, max(stop - after, 0))), 0
    for low in range(after, stop, _ROWS_AT_ONCE):  # since rows take ten times the room as objects
        part = session.rows(
            "select drawn, due, loss, served, undelivered, known_order, known_at from ledger "
            "where ledger = ? and seq > ? and seq <= ? order by seq",
            *(number, low, min(low + _ROWS_AT_ONCE, stop)),
        )
        columns[:, count : count + len(part)] = np.array(part, dtype=np.float64).reshape(-1, 7).T
        count += len(part)
    return LedgerRows.of_columns(columns[:, :count], changes)


def ledger_changes(session: Session, key: LedgerKey, after: int, limit: int) -> list[AuditRow]:
    """Return rows that changed after a cursor."""
    rows = session.rows(
        f"select {_ROW} from ledger where ledger = ? and change > ? order by change limit ?",
        *(_number(session, key) or 0, after, limit),
    )
    return [
        AuditRow(
            seq=seq, id=id, drawn=drawn, due=due, loss=loss, served=served, known_order=order, known_at=known_at,
            change=change, delivered=not undelivered,
        )
        for seq, id, drawn, due, loss, served, undelivered, order, known_at, change in rows
    ]  # fmt: skip


def notices(session: Session, policy: str | None = None) -> list[Notice]:
    """Return alarms and lifts, oldest first."""
    rows = session.rows(
        f"select id, policy, kind, body, at from events where {NOTICES} and policy = coalesce(?, policy) "
        "order by at, writer, seq",
        policy,
    )
    return [Notice(id=id, policy=name, body=decode_notice(kind, text, name, at)) for id, name, kind, text, at in rows]


class Notices:
    """What alarms and lifts say about the versions of policies."""

    def __init__(self, notices: Iterable[Notice]) -> None:
        self._by_policy: dict[str, list[NoticeBody]] = {}
        for notice in notices:
            self._by_policy.setdefault(notice.policy, []).append(notice.body)

    def lifts(self, policy: str, version: int) -> int:
        """Return how often alarms of a version were lifted."""
        own = (body.lifts for body in self._of(policy) if isinstance(body, LiftBody) and body.version == version)
        return max(own, default=0)

    def standing(self, policy: str, version: int) -> AlarmBody | None:
        """Return the alarm of a version that was not lifted."""
        lifts = self.lifts(policy, version)
        own = (alarm for alarm in self.alarms(policy) if (alarm.version, alarm.lifts) == (version, lifts))
        return next(own, None)

    def alarms(self, policy: str) -> list[AlarmBody]:
        """Return the alarms that were ever raised on a policy, oldest first."""
        return [body for body in self._of(policy) if isinstance(body, AlarmBody)]

    def _of(self, policy: str) -> Sequence[NoticeBody]:
        return self._by_policy.get(policy, ())


def notice_id(policy: str, body: NoticeBody) -> str:
    """Return the name of an alarm or a lift in the record; there is at most one event with it."""
    return f"{body.kind} {body.lifts} of version {body.version} of {policy}"


def alarm_against(session: Session, raised: Notices, version: PolicyVersion) -> AlarmBody | None:
    """Return the last alarm that speaks against a version: raised on it, or on another before it was installed.

    The rows of a certificate are older than an alarm on the same certificate or on another from the same log, and than one
    with the same models after it was made: they do not show what the alarm was about. Which came first is told by the
    numbers of versions where possible, since clocks are set now and then: no alarm is raised on a version once there is
    a later one for the same models.
    """
    alarms = raised.alarms(version.name)
    if not alarms:
        return None
    rows = session.rows("select version, certificate from policies where name = ?", version.name)
    alarmed = {alarm.version for alarm in alarms}
    documents = {int(number): decode_json(text, version.name) for number, text in rows if number in alarmed}
    against = [
        alarm
        for alarm in alarms
        if alarm.version == version.version
        or (alarm.version < version.version and _is_older(version, documents.get(alarm.version, {}), alarm))
    ]
    return against[-1] if against else None


def _is_older(version: PolicyVersion, alarmed: JSONObject, alarm: AlarmBody) -> bool:
    """Tell whether a version's rows are older than an alarm on another certificate, as far as the two documents say."""
    at, certificate = alarm.at or 0.0, version.certificate
    log = certificate.get("log_sha256")
    if certificate == alarmed or (log is not None and log == alarmed.get("log_sha256")):
        return True
    if certificate.get("identities") != alarmed.get("identities"):
        return False
    if version.origin <= alarm.version:  # it was first installed before
        return True
    since, created = as_object(certificate.get("ancestry")).get("since"), certificate.get("created")
    if since is not None:  # the first row of a renewal; it may be made after the alarm, from rows before it
        return float(since) < at
    return isinstance(created, str) and created <= datetime.fromtimestamp(at, UTC).isoformat()
