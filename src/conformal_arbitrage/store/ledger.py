"""The ledger: one row for every decision that the audit coin drew, with its loss once that is known; no content.

A ledger belongs to one version of a policy with one set of models, and begins anew when an alarm is lifted. Rows are
numbered in the order of the draw, by the transaction that records the Primary's leg, and stay when records are pruned.

Every change of a ledger first locks the ledger's own row, so that numbers are given in the order of the commits, and a
cursor never passes a change that commits later.

Rows are sealed, and checked whenever they are read: what they say decides whether a policy keeps its guarantee.
"""

import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import Struct

from conformal_arbitrage.core.exact import Bools, Floats, Integers, n_rows
from conformal_arbitrage.errors import DamagedError
from conformal_arbitrage.store import pages
from conformal_arbitrage.store.record import DecisionRecord, decode_decision
from conformal_arbitrage.store.session import Session, SingleQuery, operation, placeholders, prepared


class LedgerKey(Struct, frozen=True, kw_only=True):
    """Which ledger a row belongs to.

    Attributes:
        version: its version: installing a certificate begins a new ledger.
        lifts: how often alarms of this version were lifted: so does lifting one.
        identities_sha256: fingerprint of the identities of the models: so does another model.
        group: of a certificate by groups; empty without groups.
    """

    policy: str
    version: int
    lifts: int = 0
    identities_sha256: str
    group: str = ""


class NewRow(Struct, frozen=True, kw_only=True):
    """A row to write.

    Attributes:
        drawn: when the decision was made, in seconds since 1970.
        due: the time after which an unknown outcome is missing.
        loss: as a share of the loss bound; None if it is not known yet.
        slot: the session and hour of the decision: a second row with the same one is not written. None without a session.
    """

    key: LedgerKey
    drawn: float
    due: float
    loss: float | None = None
    slot: str | None = None


class AuditRow(Struct, frozen=True, kw_only=True):
    """A row as it is stored.

    Attributes:
        seq: its number in the ledger, from 1.
        drawn, due, loss: as in `NewRow`; an outcome that can no longer be known is due at the time that became clear.
        served: the loss of the answer that the caller got where that is another: 1 after a fallback of which nothing more
            is known; None where it is the loss, or where nothing was delivered.
        delivered: whether the caller got an answer; losses reach from -1 if gains count, so no loss can say it.
        known_order: the number of losses known by then, this one included; None while it is unknown.
        known_at: when it became known.
        change: grows with every change of any row of the ledger: the cursor of `ledger_changes`.
    """

    seq: int
    id: str
    drawn: float
    due: float
    loss: float | None
    served: float | None
    known_order: int | None
    known_at: float | None
    change: int
    delivered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRows:
    """A whole ledger as arrays, in the order of seq.

    Attributes:
        drawn, due: of every row.
        loss: NaN while it is unknown.
        served: NaN where it is the loss; see `AuditRow`.
        delivered: whether the caller got an answer.
        known_order: 0 while the loss is unknown.
        known_at: NaN while it is unknown.
        change: the cursor from which `ledger_changes` goes on.
        collapsed: how many draws have no row because their session had one.
    """

    drawn: Floats
    due: Floats
    loss: Floats
    served: Floats
    delivered: Bools
    known_order: Integers
    known_at: Floats
    change: int
    collapsed: int = 0

    @classmethod
    def of(cls, rows: Sequence[Sequence[float | int | None]], change: int) -> "LedgerRows":
        """Build the arrays from (drawn, due, loss, served, undelivered, known_order, known_at) of every row."""
        return cls.of_columns(np.ascontiguousarray(np.array(rows, dtype=np.float64).reshape(-1, 7).T), change)

    @classmethod
    def of_columns(cls, columns: Floats, change: int, collapsed: int = 0) -> "LedgerRows":
        """Build the arrays from the same seven values, each of all rows, with NaN for what is unknown."""
        drawn, due, loss, served, undelivered, order, known_at = columns
        return cls(
            drawn=drawn, due=due, loss=loss, served=served, delivered=undelivered == 0, known_at=known_at, change=change,
            known_order=np.nan_to_num(order).astype(np.int64), collapsed=collapsed,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def served_otherwise(self) -> Bools:
        """Which decisions delivered another answer than the rule's own, or none."""
        return ~np.isnan(self.served) | ~self.delivered

    def first(self, count: int) -> "LedgerRows":
        """Return the first rows; how many draws had none by then is not known."""
        columns = ("drawn", "due", "loss", "served", "delivered", "known_order", "known_at")
        return replace(self, **{name: getattr(self, name)[:count] for name in columns}, collapsed=0)

    def in_known_order(self) -> Floats:
        """Return the known losses in the order in which they became known."""
        known = self.known_order > 0
        return self.loss[known][np.argsort(self.known_order[known], kind="stable")]


class Ledger(Struct, frozen=True, kw_only=True):
    """A ledger that exists.

    Attributes:
        rows, known: how many rows it has, and how many losses are known.
        change: its newest.
        collapsed: as in `LedgerRows`.
    """

    key: LedgerKey
    rows: int
    known: int
    change: int
    collapsed: int


class LedgerNews(Struct, frozen=True, kw_only=True):
    """A row about whose decision something was recorded since the row was last settled.

    Attributes:
        news: how many things; passed back in `Settlement`, so that nothing recorded meanwhile is overlooked.
    """

    id: str
    key: LedgerKey
    news: int


class Settlement(Struct, frozen=True, kw_only=True):
    """What is known of a row now.

    Attributes:
        at: the time, in seconds since 1970.
        loss: as a share of the loss bound; None while unknown. The first that is recorded stays.
        served, delivered: as in `AuditRow`.
        failed: the outcome can no longer become known: it is missing from now on, not only when it is due.
    """

    id: str
    news: int
    at: float
    loss: float | None = None
    served: float | None = None
    delivered: bool = True
    failed: bool = False


_ROWS_AT_ONCE = 500
_KEY = "policy, version, lifts, identities, segment"
_ROW = "seq, id, drawn, due, loss, served, undelivered, known_order, known_at, change"
_SEALED = f"{_ROW}, slot, seal"


def write_row(session: Session, id: str, row: NewRow) -> None:
    """Write a row with the next number of its ledger, unless its decision has one; or its slot, which is counted."""
    number = _lock(session, row.key)
    rows = session.rows("select id from ledger where id = ? or (ledger = ? and slot = ?)", id, number, row.slot)
    if rows:
        if (id,) not in {tuple(earlier) for earlier in rows}:
            session.run("update ledgers set collapsed = collapsed + 1 where number = ?", number)
        return
    loss = None if row.loss is None else float(row.loss)
    length, losses, change = _grow(session, number, known=int(loss is not None))
    order = (None, None) if loss is None else (losses, float(row.drawn))
    values = (length, id, float(row.drawn), float(row.due), loss, None, 0, *order, change, row.slot)
    session.run(
        f"insert into ledger (ledger, {_SEALED}) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        *(number, *values, _seal(session, _values(row.key), values)),
    )


def _seal(session: Session, key: Sequence[object], values: Sequence[object]) -> str | None:
    """Return the seal of a row, which belongs to its ledger: the same values mean nothing in another."""
    return session.seals.sign("ledger row", *key, *values)


def _is_intact(session: Session, key: Sequence[object], row: Sequence[Any]) -> bool:
    """Return whether a row is what was written; it has the columns of `_SEALED`."""
    return session.seals.accept(row[-1], "ledger row", *key, *row[:-1])


def _intact(session: Session, key: LedgerKey, rows: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Yield rows without their slot and seal."""
    values = _values(key)
    for row in rows:
        if not _is_intact(session, values, row):
            raise DamagedError(
                f"policy {key.policy}, version {key.version}: row {row[0]} of its ledger is not what was written; run "
                "`arbitrage records verify`, and restore a backup"
            )
        yield row[:-2]


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


@operation("read")
def news(session: Session, policies: Collection[str], *, limit: int = 500) -> list[LedgerNews]:
    """Return rows of policies whose decisions have news: an audit, feedback, or how their attempt ended."""
    rows = session.rows(
        f"select l.id, l.news, {_KEY} from ledger l join ledgers on number = l.ledger where l.news > 0 "
        f"and policy in ({placeholders(policies)}) order by l.id limit ?",
        *(*policies, limit),
    )
    return [LedgerNews(id=id, news=news, key=_key(key)) for id, news, *key in rows]


@operation("write")
def settle(session: Session, settlements: Sequence[Settlement]) -> None:
    """Write what is known of rows, ledger by ledger in a fixed order, so that two gateways never wait for each other."""
    by_id = {settlement.id: settlement for settlement in settlements}
    rows = session.rows(f"select distinct ledger from ledger where id in ({placeholders(by_id)})", *by_id)
    for number in sorted(int(number) for (number,) in rows):
        session.run("update ledgers set length = length where number = ?", number)  # others wait from here on
        [(known, changes)] = session.rows("select known, changes from ledgers where number = ?", number)
        [key] = session.rows(f"select {_KEY} from ledgers where number = ?", number)
        count = _Counts(int(known), int(changes))
        rows = session.rows(
            f"select {_SEALED} from ledger where ledger = ? and id in ({placeholders(by_id)}) order by seq",
            number,
            *by_id,
        )
        for row in rows:
            _settle_row(session, key, by_id[row[1]], row, count)
        session.run("update ledgers set known = ?, changes = ? where number = ?", count.known, count.changes, number)


@dataclass(slots=True)
class _Counts:
    """How many losses of a ledger are known, and how many changes it has seen."""

    known: int
    changes: int


def _settle_row(session: Session, key: Sequence[Any], new: Settlement, row: Sequence[Any], count: _Counts) -> None:
    """Write what is known of one row, after counting the change if there is one."""
    seq, id, drawn, *before, change, slot, seal = row
    due, loss, _, _, order, known_at = before
    after = [due, loss, None if new.served is None else float(new.served), int(not new.delivered), order, known_at]
    if loss is None and new.loss is not None:
        count.known += 1
        after[1], after[4:] = float(new.loss), [count.known, float(new.at)]
    elif loss is None and new.failed:
        after[0] = min(due, float(new.at))
    if after != before:
        count.changes += 1
        change = count.changes
        if _is_intact(session, key, row):  # or its new seal would vouch for what someone changed
            seal = _seal(session, key, (seq, id, drawn, *after, change, slot))
    session.run(
        "update ledger set due = ?, loss = ?, served = ?, undelivered = ?, known_order = ?, known_at = ?, change = ?, "
        "seal = ?, news = case when news > ? then news - ? else 0 end where id = ?",
        *(*after, change, seal, new.news, new.news, new.id),
    )


@prepared("read")
def ledgers(policy: str | None = None) -> SingleQuery[list[Ledger]]:
    """Return all ledgers, or those of a policy; oldest version first."""
    return SingleQuery(
        f"select {_KEY}, length, known, changes, collapsed from ledgers where policy = coalesce(?, policy) "
        "order by policy, version, lifts, identities, segment",
        (policy,),
        _ledgers_of,
    )


def _ledgers_of(rows: Iterable[Sequence[Any]]) -> list[Ledger]:
    return [
        Ledger(key=_key(key), rows=length, known=known, change=changes, collapsed=collapsed)
        for *key, length, known, changes, collapsed in rows
    ]


@operation("scan")
def read(session: Session, key: LedgerKey, *, after: int = 0, limit: int | None = None) -> LedgerRows:
    """Return a ledger, or so many of its rows after one of that number; the transaction must be a snapshot.

    Raises:
        DamagedError: a row is not what was written, or rows were removed.
    """
    rows = session.rows(
        f"select number, length, changes, collapsed from ledgers where ({_KEY}) = (?, ?, ?, ?, ?)", *_values(key)
    )
    if not rows:
        return LedgerRows.of([], 0)
    number, length, changes, collapsed = map(int, rows[0])
    stop = length if limit is None else min(length, after + limit)
    columns, count = np.empty((7, max(stop - after, 0))), 0
    for low in range(after, stop, _ROWS_AT_ONCE):  # since rows take ten times the room as objects
        stored = session.rows(
            f"select {_SEALED} from ledger where ledger = ? and seq > ? and seq <= ? order by seq",
            *(number, low, min(low + _ROWS_AT_ONCE, stop)),
        )
        part = [row[2:9] for row in _intact(session, key, stored)]
        columns[:, count : count + len(part)] = np.array(part, dtype=np.float64).reshape(-1, 7).T
        count += len(part)
    if session.seals and count < stop - after:
        raise DamagedError(
            f"policy {key.policy}, version {key.version}: "
            f"{n_rows(stop - after - count, 'of its ledger was', 'of its ledger were')} removed; restore a backup"
        )
    return LedgerRows.of_columns(columns[:, :count], changes, collapsed)


@operation("scan")
def missing_by_key(session: Session, key: LedgerKey, now: float) -> list[tuple[str, int]]:
    """Return the API keys whose audits have no outcome though it is due, each with how many, those with the most first."""
    return [
        (key_id, int(count))
        for key_id, count in session.rows(
            "select e.key_id, count(*) as missing from ledger l join events e on e.id = l.id and e.kind = 'decision' "
            "where l.ledger = ? and l.loss is null and l.due <= ? group by e.key_id order by missing desc, e.key_id limit 5",
            *(_number(session, key) or 0, now),
        )
    ]


@operation("read")
def changes(session: Session, key: LedgerKey, after: int, *, limit: int = 5000) -> list[AuditRow]:
    """Return the rows that are new or have changed since a cursor, those of the oldest changes first.

    Raises:
        DamagedError: one of them is not what was written.
    """
    rows = session.rows(
        f"select {_SEALED} from ledger where ledger = ? and change > ? order by change limit ?",
        *(_number(session, key) or 0, after, limit),
    )
    return [
        AuditRow(
            seq=seq, id=id, drawn=drawn, due=due, loss=loss, served=served, known_order=order, known_at=known_at,
            change=change, delivered=not undelivered,
        )
        for seq, id, drawn, due, loss, served, undelivered, order, known_at, change in _intact(session, key, rows)
    ]  # fmt: skip


# --- Verification ---


Losses = Callable[[LedgerKey, DecisionRecord], Sequence[float | None]]
"""What the loss of a listed decision can be by its record; the first is without what may not count, None while unknown."""


def ledger_faults(session: Session, losses: Losses | None = None) -> list[str]:
    """Return what was changed in the ledgers, or does not follow from the decisions of the chains.

    Args:
        session: a connection; the transaction must be a snapshot.
        losses: computes losses again; without it, only their seals vouch for them.
    """
    if not session.seals:
        return []
    rows = session.rows(f"select number, {_KEY}, length, known, changes, collapsed from ledgers order by {_KEY}")
    numbers = session.rows("select distinct ledger from ledger")
    faults = [f"ledger {number}: it was removed, and rows are left" for (number,) in numbers if number not in {
        row[0] for row in rows}]  # fmt: skip
    for number, *row in rows:
        key, counts = tuple(row[:5]), tuple(row[5:8])
        faults += _faults_of(session, number, key, counts)
        if losses is not None:
            faults += _loss_faults(session, number, _key(key), losses)
    return [*faults, *_unlisted_decisions(session, {tuple(row[1:6]): int(row[-1]) for row in rows})]


def _loss_faults(session: Session, number: int, key: LedgerKey, losses: Losses) -> Iterator[str]:
    """Yield the rows of a ledger whose loss is not what their record says; of pruned ones only the seal vouches."""
    for rows in session.chunks("seq, id, loss, news", "ledger where ledger = ?", "seq", number):
        for seq, id, loss, news in rows:
            try:
                record = pages.intact_record(session, id)
            except DamagedError:
                continue  # the check of the chains names it
            now, *others = [None] if record is None else losses(key, record)
            if now is not None and loss not in (now, *others) and (loss is not None or not news):
                shown = "none" if loss is None else f"{loss:g}"
                yield (
                    f"policy {key.policy}, version {key.version}: the loss in row {seq} of its ledger is {shown}, and by "
                    f"the record of the decision it is {now:g}"
                )


def _faults_of(session: Session, number: int, key: tuple[Any, ...], counts: tuple[int, int, int]) -> Iterator[str]:
    name = f"policy {key[0]}, version {key[1]}"
    length = known = changes = 0
    for rows in session.chunks(_SEALED, "ledger where ledger = ?", "seq", number):
        for row in rows:
            seq, loss, change = int(row[0]), row[4], int(row[9])
            length, known, changes = length + 1, known + (loss is not None), max(changes, change)
            if seq != length:
                yield f"{name}: rows {length} to {seq - 1} of its ledger were removed"
                length = seq
            if not _is_intact(session, key, row):
                yield f"{name}: row {seq} of its ledger is not what was written"
    if (length, known, changes) != counts:
        yield f"{name}: its ledger has {n_rows(length)}, {known} losses and {changes} changes, and {counts} were counted"


def _unlisted_decisions(session: Session, collapsed: Mapping[tuple[Any, ...], int]) -> Iterator[str]:
    """Yield the decisions that say that a ledger lists them, and that have no row.

    Args:
        collapsed: how many may have none, because another of their session has one, by ledger.
    """
    unlisted: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    for rows in session.chunks("writer, seq, id, policy, body", "events where kind = 'decision'", "writer, seq"):
        bodies = [
            (id, policy, decode_decision(text, id)) for *_, id, policy, text in rows if text and '"ledger":' in text
        ]
        drawn = {
            id: (policy, body.version, body.ledger[0], body.identities_sha256, body.ledger[1])
            for id, policy, body in bodies
            if body.ledger is not None
        }
        ids = [*drawn, ""]  # never none, for which there is no statement
        listed = {id for (id,) in session.rows(f"select id from ledger where id in ({placeholders(ids)})", *ids)}
        for id in drawn.keys() - listed:
            unlisted[drawn[id]].append(id)
    for key, ids in unlisted.items():
        name, count = f"policy {key[0]}, version {key[1]}", collapsed.get(key, 0)
        if key not in collapsed:
            yield f"{name}: its ledger was removed, and {len(ids)} decisions of the record were drawn for it"
        elif len(ids) > count > 0:
            yield f"{name}: {len(ids) - count} more draws have no row in its ledger than sessions explain"
        elif len(ids) > count:
            yield from (
                f"{name}: decision {id} was drawn for an audit, and its row of the ledger was removed"
                for id in sorted(ids)
            )
