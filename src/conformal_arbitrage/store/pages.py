"""Pages of records: find the decisions that a filter selects, newest first, and build their records.

A filter selects ranges of an index: one for each value of the columns that it does not name, since there are few policies
and few who decide. So a page costs what it holds, however many records there are. A page of large records ends early.

Knows nothing of threads, or of who may see a record.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from msgspec import Struct

from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import decode_decision, decode_later
from conformal_arbitrage.store.ids import time_of
from conformal_arbitrage.store.record import (
    AuditBody,
    CompletionBody,
    DecisionRecord,
    FeedbackBody,
    LaterBody,
    completion_of_record,
    with_outcome,
)
from conformal_arbitrage.store.schema import REPLACED

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


def record(session: Session, id: str) -> DecisionRecord | None:
    """Return a decision with its later events."""
    return next((record for record, _ in _load(session, [id])), None)


def load_records(session: Session, ids: Sequence[str]) -> list[DecisionRecord]:
    """Return the records of decisions that are there, at most a few dozen."""
    return [record for record, _ in _load(session, ids)]


def page(session: Session, wanted: RecordFilter, limit: int) -> list[DecisionRecord]:
    """Return decisions, newest first: at most `limit`, fewer if they are large, none at the end."""
    page: list[DecisionRecord] = []
    ranges = list(_ranges(session, wanted))
    end = None if wanted.before is None else _end(session, wanted.before)
    count, size = _FIRST, 0
    while len(page) < limit and (size < PAGE_BYTES or not page):
        places = _places(session, wanted, ranges, end, min(limit - len(page), _MOST_PLACES))
        if not places:
            break
        while places and size < PAGE_BYTES:
            batch, places = places[:count], places[count:]
            for record, length in _load(session, [id for _, id in batch]):
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
    columns = {"policy": wanted.policy, "decided_by": wanted.decided_by}
    if wanted.key_id is not None:
        columns = {"key_id": wanted.key_id, **columns}
    ranges: list[dict[str, str]] = [{}]
    if any(value is not None for value in columns.values()):
        for column, value in columns.items():
            ranges = [
                {**one, column: each}
                for one in ranges
                for each in (_values(session, column, one) if value is None else [value])
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


def _places(
    session: Session, wanted: RecordFilter, ranges: Sequence[Mapping[str, str]], end: _Place | None, count: int
) -> list[_Place]:
    """Return the time and id of the next decisions."""
    bounds: dict[str, Sequence[Any]] = {}
    if wanted.since is not None:
        bounds["at >= ?"] = (wanted.since,)
    if wanted.until is not None:
        bounds["at < ?"] = (wanted.until,)
    if end is not None:
        bounds["(at, id) < (?, ?)"] = end
    values = [value for group in bounds.values() for value in group]
    others = [_NOT_REPLACED] if wanted.decided_by == "guardian" else []
    places: set[_Place] = set()
    for first in range(0, len(ranges), _TOGETHER):
        parts = ranges[first : first + _TOGETHER]
        where = (
            " and ".join(["kind = 'decision'", *(f"{name} = ?" for name in one), *bounds, *others]) for one in parts
        )
        sql = " union all ".join(
            f"select at, id from (select at, id from events where {each} order by at desc, id desc limit ?) part"
            for each in where
        )
        rows = session.rows(sql, *(value for one in parts for value in (*one.values(), *values, count)))
        places.update((at, id) for at, id in rows)
    if wanted.decided_by == REPLACING:
        places |= _replaced(session, wanted, bounds, values, count)
    return sorted(places, reverse=True)[:count]


def _replaced(
    session: Session, wanted: RecordFilter, bounds: Iterable[str], values: Sequence[Any], count: int
) -> set[_Place]:
    """Return the decisions recorded as the Guardian's that a safe action replaced later."""
    named = {"policy": wanted.policy, "key_id": wanted.key_id}
    conditions = {f"d.{name} = ?": value for name, value in named.items() if value is not None}
    where = " and ".join(["d.kind = 'decision'", *conditions, *(_of_decision(bound) for bound in bounds)])
    sql = (
        f"select d.at, d.id from (select distinct id from events where {REPLACED}) r join events d on d.id = r.id "
        f"where {where} order by d.at desc, d.id desc limit ?"
    )
    return {(at, id) for at, id in session.rows(sql, *conditions.values(), *values, count)}


def _of_decision(bound: str) -> str:
    return bound.replace("at", "d.at").replace("id)", "d.id)")


def _load(session: Session, ids: Sequence[str]) -> Iterator[tuple[DecisionRecord, int]]:
    """Yield the records of decisions, newest first, each with the length of its text."""
    marks = ", ".join("?" * len(ids))
    rows = session.rows(
        "select d.id, d.at, d.policy, d.key_id, d.decided_by, d.body, e.kind, e.at, e.body from events d "
        f"left join events e on e.id = d.id and e.kind <> 'decision' where d.kind = 'decision' and d.id in ({marks}) "
        "order by d.at desc, d.id desc, e.at, e.writer, e.seq",
        *ids,
    )
    for decision, group in groupby(rows, lambda row: row[:6]):
        later = [row[6:] for row in group if row[6] is not None]
        yield _decision(decision, later), len(decision[5]) + sum(len(row[2]) for row in later)


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
