"""Pages of records: find the decisions that a filter or a mark selects, newest first, and build their records.

A filter selects ranges of an index: one for each value of the columns that it does not name, since there are few policies
and few who decide. So a page costs what it holds, however many records there are. A page of large records ends early.

Marks (audited, without a guarantee, answered by a fallback) lie in tables of their own, in the order of ids. Who decided
does not, so it is looked up for many marks at a time, and only records that are shown are read; a search that has looked at
many marks says where it stopped.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from conformal_arbitrage.errors import DamagedError
from conformal_arbitrage.store.record import (
    AuditBody,
    CompletionBody,
    DecisionRecord,
    FeedbackBody,
    LaterBody,
    completion_of_record,
    decode_decision,
    decode_later,
    id_at,
    time_of,
    with_outcome,
)
from conformal_arbitrage.store.session import (
    LINK,
    Link,
    Session,
    SingleQuery,
    StoredLink,
    placeholders,
    prepared,
    viewed,
)

REPLACED = """kind = 'completion' and body like '%"decided_by":"fallback"%'"""
"""The completions by which a safe action replaced the Guardian's; a partial index holds them."""
PAGE_BYTES = 4 * 2**20
"""How much of stored text a page may hold, beyond its last record."""
_FIRST, _MOST = 8, 64
"""How many records are read at a time: few until they are known to be small, and never so many that other threads wait."""
_TOGETHER = 50
"""How many ranges of an index are searched by one statement."""
_MOST_PLACES = 512
"""How many decisions are found at a time, by their ids."""
REPLACING = "fallback"
"""Who may have decided instead of the one that a decision was recorded with."""
_NOT_REPLACED = f"not exists (select 1 from events r where {REPLACED} and r.id = events.id)"
"""Without this, who asks for the Guardian's decisions would read every one that a safe action replaced."""
_Place = tuple[float, str]


class RecordFilter(Struct, frozen=True, kw_only=True):
    """Which decisions are wanted; None where it does not matter. `since` is included, `until` is not.

    Attributes:
        before: the id at which the previous page ended.
    """

    policy: str | None = None
    key_id: str | None = None
    decided_by: str | None = None
    since: float | None = None
    until: float | None = None
    before: str | None = None


ALL = RecordFilter()


@viewed("read")
def record(session: Session, id: str) -> DecisionRecord | None:
    """Return a decision and everything recorded about it, if the view reaches it."""
    loaded = subject(session, id)
    return None if loaded is None or (session.view.blind and yet_to_judge(session, [loaded])) else loaded


def events_of(session: Session, id: str) -> list[StoredLink]:
    """Return all events of a decision, the decision last."""
    stored = f"select {LINK}, seal from events where id = ? and kind"
    later = session.rows(f"{stored} <> 'decision' order by writer, seq", id)
    return [StoredLink(Link._make(row[:-1]), row[-1]) for row in (*later, *session.rows(f"{stored} = 'decision'", id))]


NOTICES = "kind in ('alarm', 'lift', 'exclusion')"
"""The events that are about a policy; a partial index holds them."""


def intact_notices(session: Session, policy: str | None = None) -> list[Link]:
    """Return the notices about all policies, or about one, that are what was written, oldest first."""
    rows = session.rows(
        f"select {LINK}, seal from events where {NOTICES} and policy = coalesce(?, policy) order by at, writer, seq",
        policy,
    )
    links = (StoredLink(Link._make(row[:-1]), row[-1]) for row in rows)
    return [stored.link for stored in links if session.is_intact(stored)]


@viewed("read")
def intact_record(session: Session, id: str) -> DecisionRecord | None:
    """Return a decision from which losses and calibration rows follow.

    Raises:
        DamagedError: one of its events is not what was written.
    """
    for row in events_of(session, id):
        if not session.is_intact(row):
            raise DamagedError(
                f"decision {id}: its {row.link.kind} is not what was written; run `arbitrage records verify`, and restore "
                "a backup"
            )
    return record(session, id)


@viewed("read")
def subject(session: Session, id: str) -> DecisionRecord | None:
    """Return the decision that feedback is about, judged or not; it is not for showing."""
    if "\0" in id:
        return None  # PostgreSQL has no such text
    return next((record for record, _ in load(session, [id], settled=False)), None)


@prepared("read")
def under_review(decisions: Sequence[str]) -> SingleQuery[frozenset[str]]:
    """Return those of some decisions that are in the queue, or were and whose caller may come back."""
    return SingleQuery(
        f"select decision from reviews where decision in ({placeholders(decisions)}) and "
        "(state = 'open' or (state = 'withdrawn' and purpose = 'decide'))",
        tuple(decisions),
        lambda rows: frozenset(decision for (decision,) in rows),
    )


@viewed("read")
def yet_to_judge(session: Session, records: Sequence[DecisionRecord]) -> frozenset[str]:
    """Return the ids of those decisions that people have yet to judge, or may be asked about again."""
    view = session.view
    if view.awaits is None:
        return frozenset()
    return under_review(session, [record.id for record in records]).union(
        record.id for record in records if view.awaits(record)
    )


@viewed("scan")
def records(session: Session, wanted: RecordFilter = ALL, *, limit: int = 100) -> list[DecisionRecord]:
    """Return decisions, the last recorded first; a page of large ones is shorter than `limit`, only the end is empty."""
    wanted = replace(wanted, key_id=session.view.key_id or wanted.key_id)
    page: list[DecisionRecord] = []
    ranges = list(_ranges(session, wanted))
    end = None if wanted.before is None else _end(session, wanted.before)
    count, size = _FIRST, 0
    settled = session.view.blind or wanted.decided_by is not None
    while len(page) < limit and (size < PAGE_BYTES or not page):
        places = _places(session, wanted, ranges, end, min(limit - len(page), _MOST_PLACES))
        if not places:
            break
        while places and size < PAGE_BYTES:
            batch, places = places[:count], places[count:]
            for record, length in load(session, [id for _, id in batch], settled=settled):
                if wanted.decided_by in (None, record.decided_by):
                    page.append(record)
                    size += length
                    if size >= PAGE_BYTES:
                        break
            end, count = batch[-1], _MOST if size < PAGE_BYTES // _FIRST else min(2 * count, _MOST)
    return page


def _end(session: Session, before: str) -> _Place:
    """Return where the previous page ended; a decision that was pruned since is placed by its id."""
    for (at,) in session.rows("select at from events where kind = 'decision' and id = ?", before):
        return float(at), before
    with suppress(ValueError):
        return time_of(before), before
    return 0.0, ""


def _ranges(session: Session, wanted: RecordFilter) -> Iterator[Mapping[str, str]]:
    """Yield the ranges of an index in which all wanted decisions are, by the values of its first columns."""
    named = None if wanted.policy is None else [wanted.policy]
    reached = session.view.policies
    policies = named if reached is None else sorted(reached.intersection(named or reached))
    columns = {"policy": policies, "decided_by": None if wanted.decided_by is None else [wanted.decided_by]}
    if wanted.key_id is not None:
        columns = {"key_id": [wanted.key_id], **columns}
    ranges: list[dict[str, str]] = [{}]
    if any(value is not None for value in columns.values()):
        for column, values in columns.items():
            ranges = [
                {**fixed, column: each}
                for fixed in ranges
                for each in (_values(session, column, fixed) if values is None else values)
            ]
    yield from ranges


def _values(session: Session, column: str, fixed: Mapping[str, str]) -> Sequence[str]:
    """Return the values of an index's column after those that are fixed, each by one search."""
    conditions = " and ".join(["kind = 'decision'", *(f"{name} = ?" for name in fixed), f"{column} >"])
    rows = session.rows(
        f"with recursive step (value) as (select min({column}) from events where {conditions} '' union all "
        f"select (select min({column}) from events where {conditions} step.value) from step where value is not null) "
        "select value from step where value is not null",
        *(*fixed.values(), *fixed.values()),
    )
    return [value for (value,) in rows]


def _bounds(wanted: RecordFilter, end: _Place | None, table: str = "") -> dict[str, Sequence[Any]]:
    """Return conditions on time and place, with their values; `table` comes before the names of columns."""
    bounds: dict[str, Sequence[Any]] = {}
    if wanted.since is not None:
        bounds[f"{table}at >= ?"] = (wanted.since,)
    if wanted.until is not None:
        bounds[f"{table}at < ?"] = (wanted.until,)
    if end is not None:
        bounds[f"({table}at, {table}id) < (?, ?)"] = end
    return bounds


def _places(
    session: Session, wanted: RecordFilter, ranges: Sequence[Mapping[str, str]], end: _Place | None, count: int
) -> list[_Place]:
    """Return the time and id of the next decisions."""
    bounds = _bounds(wanted, end)
    values = list(chain.from_iterable(bounds.values()))
    others = [_NOT_REPLACED] if wanted.decided_by == "guardian" else []
    places: set[_Place] = set()
    for first in range(0, len(ranges), _TOGETHER):
        parts = ranges[first : first + _TOGETHER]
        where = (
            " and ".join(["kind = 'decision'", *(f"{name} = ?" for name in part), *bounds, *others]) for part in parts
        )
        sql = " union all ".join(
            f"select at, id from (select at, id from events where {conditions} order by at desc, id desc limit ?) part"
            for conditions in where
        )
        rows = session.rows(sql, *(value for part in parts for value in (*part.values(), *values, count)))
        places.update((at, id) for at, id in rows)
    if wanted.decided_by == REPLACING:
        places |= _replaced(session, wanted, end, count)
    return sorted(places, reverse=True)[:count]


def _replaced(session: Session, wanted: RecordFilter, end: _Place | None, count: int) -> set[_Place]:
    """Return the decisions recorded as the Guardian's that a safe action replaced later."""
    named = {"d.policy = ?": wanted.policy, "d.key_id = ?": wanted.key_id}
    conditions = {name: (value,) for name, value in named.items() if value is not None}
    conditions |= _bounds(wanted, end, "d.")
    where = " and ".join(["d.kind = 'decision'", *conditions])
    sql = (
        f"select d.at, d.id from (select distinct id from events where {REPLACED}) r join events d on d.id = r.id "
        f"where {where} order by d.at desc, d.id desc limit ?"
    )
    rows = session.rows(sql, *chain.from_iterable(conditions.values()), count)
    return {(at, id) for at, id in rows}


def load(session: Session, ids: Sequence[str], *, settled: bool) -> Iterator[tuple[DecisionRecord, int]]:
    """Yield the records that the view reaches of decisions, newest first, each with the length of its text.

    With `settled`, those that people have yet to judge are left out, unless nothing is withheld from this view.
    """
    view = session.view
    rows = session.rows(
        "select d.id, d.at, d.policy, d.key_id, d.decided_by, d.body, e.kind, e.at, e.body from events d "
        "left join events e on e.id = d.id and e.kind <> 'decision' "
        f"where d.kind = 'decision' and d.id in ({placeholders(ids)}) "
        "order by d.at desc, d.id desc, e.at, e.writer, e.seq",
        *ids,
    )
    loaded: list[tuple[DecisionRecord, int]] = []
    for decision, group in groupby(rows, lambda row: row[:6]):
        later = [row[6:] for row in group if row[6] is not None]
        if view.reaches([decision[2]]) and view.key_id in (None, decision[3]):
            loaded.append((_decision(decision, later), len(decision[5]) + sum(len(row[2]) for row in later)))
    withheld = yet_to_judge(session, [record for record, _ in loaded]) if settled else frozenset[str]()
    yield from ((record, length) for record, length in loaded if record.id not in withheld)


def _decision(row: Sequence[Any], later: Iterable[Sequence[Any]]) -> DecisionRecord:
    """Build a record."""
    id, created, policy, key_id, decided_by, body = row
    bodies: list[LaterBody] = [decode_later(kind, text, id, at) for kind, at, text in later]
    completion = completion_of_record([body for body in bodies if isinstance(body, CompletionBody)])
    return DecisionRecord(
        id=id,
        created=created,
        policy=policy,
        key_id=key_id,
        decided_by=decided_by if completion is None else completion.decided_by or decided_by,
        decision=with_outcome(decode_decision(body, id), completion),
        completion=completion,
        feedback=tuple(body for body in bodies if isinstance(body, FeedbackBody)),
        audit=next((body for body in bodies if isinstance(body, AuditBody)), None),
    )


def event_writers(session: Session) -> Iterator[str]:
    """Yield the writers of events, each of a chain of its own."""
    writer: str | None = ""
    while writer is not None:
        [(writer,)] = session.rows("select min(writer) from events where writer > ?", writer)
        if writer is not None:
            yield writer


# --- Marked decisions ---

Mark = Literal["audited", "no guarantee", "fallback"]
"""What a decision can be looked up by, besides policy, time and who decided."""


class MarkedDecisions(Struct, frozen=True, kw_only=True):
    """Some of the decisions that have a mark.

    Attributes:
        records: at most as many as were asked for.
        end: the id where the search stopped, so that it can go on from there; None if there is nothing further back.
    """

    records: Sequence[DecisionRecord]
    end: str | None


LAST_ID = "~"
"""Sorts after every id."""
_LOOKS = (200, 400, 800)
"""How many marks are looked at together, one time after the other, to find those that someone in particular decided."""
_Range = tuple[str, tuple[Any, ...]]


@viewed("scan")
def marked_decisions(session: Session, mark: Mark, wanted: RecordFilter = ALL, *, limit: int = 50) -> MarkedDecisions:
    """Return marked decisions, those asked last first, whoever's key it was; times are when they were asked.

    Pruned ones are left out. Decisions without a guarantee, and those that a fallback answered, are found once
    `fold_tallies` has counted them, audited ones at once. A blind view has no marks: even where a search stopped would tell.
    """
    if session.view.blind:
        return MarkedDecisions(records=(), end=None)
    ranges, low = _marked_ranges(session, mark, wanted.policy), "" if wanted.since is None else id_at(wanted.since)
    who = None if mark == wanted.decided_by else wanted.decided_by
    high = min(wanted.before or LAST_ID, LAST_ID if wanted.until is None else id_at(wanted.until))
    records: list[DecisionRecord] = []
    for size in _sizes(who, limit):
        ids = _ids(session, ranges, low, high, size)
        fitting = _decided(session, ids, who)
        chosen = fitting[: limit - len(records)]
        loaded = [record for record, _ in load(session, chosen, settled=True)] if chosen else []
        loaded.sort(key=lambda record: record.id, reverse=True)
        records += [record for record in loaded if who in (None, record.decided_by)]
        if len(chosen) == len(fitting) and len(ids) < size:
            return MarkedDecisions(records=records, end=None)
        high = ids[-1] if len(chosen) == len(fitting) else chosen[-1]
        if len(records) == limit:
            break
    return MarkedDecisions(records=records, end=high)


def _sizes(who: str | None, limit: int) -> Sequence[int]:
    """Return how many marks to look at, one time after the other."""
    return [limit] * len(_LOOKS) if who is None else _LOOKS


def _ids(session: Session, ranges: Sequence[_Range], low: str, high: str, limit: int) -> list[str]:
    """Return the latest marked ids between two ids."""
    ids = [
        id
        for where, values in ranges
        for (id,) in session.rows(
            f"select id from {where} id > ? and id < ? order by id desc limit ?", *values, low, high, limit
        )
    ]
    return sorted(ids, reverse=True)[:limit]


def _decided(session: Session, ids: Sequence[str], who: str | None) -> Sequence[str]:
    """Return which decisions someone in particular made, in the same order; the record of each has the last word."""
    if who is None or not ids:
        return ids
    sql, values = (
        f"select id from events where kind = 'decision' and id in ({placeholders(ids)}) and decided_by = ?",
        [*ids, who],
    )
    if who == REPLACING:
        sql, values = (
            f"{sql} union all select id from events where {REPLACED} and id in ({placeholders(ids)})",
            [*values, *ids],
        )
    theirs = {id for (id,) in session.rows(sql, *values)}
    return [id for id in ids if id in theirs]


def _marked_ranges(session: Session, mark: Mark, policy: str | None) -> list[_Range]:
    """Return the tables to search, each with conditions that an index answers."""
    reached = session.view.policies
    policies = None if policy is None else [policy]
    if reached is not None:
        policies = sorted(reached.intersection(policies or reached))
    if mark != "audited":
        listed = "unguaranteed where policy = ? and" + (" fallback = 1 and" if mark == "fallback" else "")
        if policies is None:
            policies = [name for (name,) in session.rows("select distinct policy from tallies")]
        return [(listed, (name,)) for name in policies]
    if policies is None:
        return [("ledger where", ())]
    numbers = session.rows(f"select number from ledgers where policy in ({placeholders(policies)})", *policies)
    return [("ledger where ledger = ? and", (number,)) for (number,) in numbers]
