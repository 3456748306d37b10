"""Marked decisions: find the latest that were audited, have no guarantee, or a fallback made, and build their records.

Marks lie in tables of their own, in the order of ids. Who decided does not, so it is looked up for many marks at a time,
and only records that are shown are read; a search that has looked at many marks says where it stopped.

Knows nothing of threads, or of who may see a record.
"""

from collections.abc import Sequence
from typing import Any

from conformal_arbitrage.store import pages
from conformal_arbitrage.store.console_base import Mark, MarkedDecisions
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.ids import id_at
from conformal_arbitrage.store.pages import RecordFilter
from conformal_arbitrage.store.record import DecisionRecord
from conformal_arbitrage.store.schema import REPLACED

_LOOKS = (200, 400, 800)
"""How many marks are looked at together, one time after the other, to find those that someone in particular decided."""
_END = "~"
"""Sorts after every id."""
_Range = tuple[str, tuple[Any, ...]]


def marked(session: Session, mark: Mark, wanted: RecordFilter, limit: int) -> MarkedDecisions:
    """Return the records of marked decisions, by their ids, latest first; those that were pruned are left out."""
    ranges, low = _ranges(session, mark, wanted.policy), "" if wanted.since is None else id_at(wanted.since)
    who = None if mark == wanted.decided_by else wanted.decided_by
    high = min(wanted.before or _END, _END if wanted.until is None else id_at(wanted.until))
    records: list[DecisionRecord] = []
    for size in _sizes(who, limit):
        ids = _ids(session, ranges, low, high, size)
        fitting = _decided(session, ids, who)
        chosen = fitting[: limit - len(records)]
        loaded = sorted(pages.load_records(session, chosen), key=lambda one: one.id, reverse=True) if chosen else []
        records += [one for one in loaded if who in (None, one.decided_by)]
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
    places = ", ".join("?" * len(ids))
    sql, values = f"select id from events where kind = 'decision' and id in ({places}) and decided_by = ?", [*ids, who]
    if who == pages.REPLACING:
        sql, values = f"{sql} union all select id from events where {REPLACED} and id in ({places})", [*values, *ids]
    theirs = {id for (id,) in session.rows(sql, *values)}
    return [id for id in ids if id in theirs]


def _ranges(session: Session, mark: Mark, policy: str | None) -> list[_Range]:
    """Return the tables to search, each with conditions that an index answers."""
    if mark != "audited":
        listed = "unguaranteed where policy = ? and" + (" fallback = 1 and" if mark == "fallback" else "")
        if policy is not None:
            return [(listed, (policy,))]
        names = session.rows("select distinct policy from tallies")
        return [(listed, (name,)) for (name,) in names]
    if policy is None:
        return [("ledger where", ())]
    numbers = session.rows("select number from ledgers where policy = ?", policy)
    return [("ledger where ledger = ? and", (number,)) for (number,) in numbers]
