"""Tallies: count the record by policy, version and hour, in the background, each event once.

Every chain of events is read in order, and how far it was read is noted in the transaction that counts. What an event adds
is the difference it makes to its decision, as far as that was counted: so it matters neither how often this is interrupted
nor which of several chains is read first.

Knows nothing of pages, or of when counting is due.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import astuple

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store.console_base import PolicyTally
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import decode_decision, decode_later
from conformal_arbitrage.store.heads import CHUNK
from conformal_arbitrage.store.ids import id_at
from conformal_arbitrage.store.record import (
    AuditBody,
    CompletionBody,
    DecisionBody,
    completion_of_record,
    with_outcome,
)

_log = logging.getLogger("conformal_arbitrage.store")
_HOUR = 3600
_COUNTS = PolicyTally.__struct_fields__[2:]
_MONEY = ("cost", "guardian_cost", "audit_cost")
_ADDED = ", ".join(f"{name} = tallies.{name} + excluded.{name}" for name in _COUNTS)
COMPLETED = "select id from events where kind = 'completion' and kind <> 'decision' and id in"
COMPLETIONS = (
    "select writer, seq, at, body from events where id = ? and kind = 'completion' and kind <> 'decision' "
    "and body is not null"
)
"""That the kind is not a decision is said for the index, which holds all other events by their id."""

_Place = tuple[str, int, int]
"""Policy, version and hour."""


def fold(session: Session) -> int:
    """Count some of the events that are new; return how many were read."""
    if not _has_new(session):
        return 0  # without writing anything
    session.run("update tally_marks set seq = seq where writer = ''")  # one gateway at a time
    marks = {writer: int(seq) for writer, seq in session.rows("select writer, seq from tally_marks")}
    sums: defaultdict[_Place, list[float]] = defaultdict(lambda: [0.0] * len(_COUNTS))
    count = 0
    for writer in event_writers(session):
        events = session.rows(
            "select seq, kind, id, at, body, policy, decided_by from events where writer = ? and seq > ? "
            "order by seq limit ?",
            *(writer, marks.get(writer, 0), CHUNK - count),
        )
        ended = _with_completions(session, [event[2] for event in events if event[1] == "decision"])
        for seq, *event in events:
            _count(session, sums, marks, event, ended)
            marks[writer] = int(seq)
        if events:
            session.run(
                "insert into tally_marks (writer, seq) values (?, ?) on conflict (writer) do update set seq = excluded.seq",
                *(writer, marks[writer]),
            )
        count += len(events)
        if count >= CHUNK:
            break
    _add(session, sums)
    return count


def _has_new(session: Session) -> bool:
    """Tell whether there are events that were not counted."""
    marks = {writer: int(seq) for writer, seq in session.rows("select writer, seq from tally_marks")}
    for writer in event_writers(session):
        if session.rows("select 1 from events where writer = ? and seq > ? limit 1", writer, marks.get(writer, 0)):
            return True
    return False


def event_writers(session: Session) -> Iterator[str]:
    """Yield the writers of events, each of a chain of its own."""
    writer: str | None = ""
    while writer is not None:
        [(writer,)] = session.rows("select min(writer) from events where writer > ?", writer)
        if writer is not None:
            yield writer


def _with_completions(session: Session, ids: Sequence[str]) -> frozenset[str]:
    """Return which of some decisions have a completion, in one query."""
    if not ids:
        return frozenset()
    rows = session.rows(f"{COMPLETED} ({', '.join('?' * len(ids))})", *ids)
    return frozenset(id for (id,) in rows)


def _count(
    session: Session,
    sums: dict[_Place, list[float]],
    marks: dict[str, int],
    event: Sequence[Any],
    ended: frozenset[str],
) -> None:
    """Count one event; one that is damaged must not stop the others."""
    kind, id, at, body, policy, decided_by = event
    try:
        if kind == "decision" and body is not None:
            decision = decode_decision(body, id)
            if not decision.cancelled:
                place = (policy, decision.version or 0, int(at // _HOUR))
                completions = _completions(session, marks, id) if id in ended else []
                _take(session, sums, id, place, [(1, counts_of(decision, decided_by, completions))])
        elif kind in ("completion", "audit") and body is not None:
            _count_later(session, sums, marks, id, decode_later(kind, body, id, at))
    except StoreError as error:
        _log.error("a decision is not counted: %s", error, extra={"id": id})


def _count_later(
    session: Session, sums: dict[_Place, list[float]], marks: dict[str, int], id: str, later: object
) -> None:
    """Count how a decision ended, or its audit; what comes before its decision is counted with that."""
    rows = session.rows(
        "select writer, seq, at, body, policy, decided_by from events where kind = 'decision' and id = ?", id
    )
    for writer, seq, at, body, policy, decided_by in rows:
        decision = decode_decision(body, id)
        place = (policy, decision.version or 0, int(at // _HOUR))
        if isinstance(later, AuditBody) and later.error is None and later.cost is not None:
            audit = PolicyTally(policy="", version=0, audit_calls=1, audit_cost=later.cost)
            _take(session, sums, id, place, [(1, audit)])
        if isinstance(later, CompletionBody) and int(seq) <= marks.get(writer, 0):
            before = _completions(session, marks, id)
            changed = [(-1, counts_of(decision, decided_by, before))]
            changed.append((1, counts_of(decision, decided_by, _in_order([*before, later]))))
            _take(session, sums, id, place, changed)


def _completions(session: Session, marks: dict[str, int], id: str) -> list[CompletionBody]:
    """Return the completions of a decision that were counted already."""
    rows = session.rows(COMPLETIONS, id)
    counted = sorted((at, body) for writer, seq, at, body in rows if int(seq) <= marks.get(writer, 0))
    bodies = (decode_later("completion", body, id, at) for at, body in counted)
    return [body for body in bodies if isinstance(body, CompletionBody)]


def _in_order(completions: Iterable[CompletionBody]) -> list[CompletionBody]:
    return sorted(completions, key=lambda one: one.at or 0.0)


def counts_of(decision: DecisionBody, decided_by: str, completions: Sequence[CompletionBody]) -> PolicyTally:
    """Return what a decision with these completions adds to the counts of its policy's version."""
    completion = completion_of_record(completions)
    whole = with_outcome(decision, completion)
    chose = decided_by if completion is None else completion.decided_by or decided_by
    costs = [leg.spent.cost for leg in whole.legs if leg.role == "guardian" and leg.error is None]
    known = [cost for cost in costs if cost is not None]
    drawn = known if whole.audited else []
    return PolicyTally(
        policy="",
        version=0,
        decisions=1,
        by_primary=int(chose == "primary"),
        by_guardian=int(chose == "guardian"),
        by_fallback=int(chose == "fallback"),
        no_guarantee=int(whole.no_guarantee is not None),
        cost=whole.cost or 0.0,
        unknown_cost=int(whole.cost is None),
        guardian_calls=len(known),
        guardian_cost=sum(known),
        audit_calls=len(drawn),
        audit_cost=sum(drawn),
    )


def _take(
    session: Session,
    sums: dict[_Place, list[float]],
    id: str,
    place: _Place,
    changes: Sequence[tuple[int, PolicyTally]],
) -> None:
    """Add counts, or take them back, and list a decision that turned out to have no guarantee."""
    for sign, tally in changes:
        values = astuple(tally)[2:]
        sums[place] = [old + sign * value for old, value in zip(sums[place], values, strict=True)]
    if changes[-1][1].no_guarantee:
        session.run(
            "insert into unguaranteed (policy, id, fallback) values (?, ?, ?) on conflict (policy, id) do update "
            "set fallback = excluded.fallback",
            *(place[0], id, changes[-1][1].by_fallback),
        )


def _add(session: Session, sums: dict[_Place, list[float]]) -> None:
    columns = ", ".join(("policy", "version", "hour", *_COUNTS))
    marks = ", ".join("?" * (3 + len(_COUNTS)))
    for place, values in sums.items():
        session.run(
            f"insert into tallies ({columns}) values ({marks}) on conflict (policy, version, hour) do update set {_ADDED}",
            *(*place, *values),
        )


def tallies(session: Session, *, since: float) -> list[PolicyTally]:
    """Return the sums of every version, from the hour of a time on."""
    sums = ", ".join(f"sum({name})" for name in _COUNTS)
    rows = session.rows(
        f"select policy, version, {sums} from tallies where hour >= ? group by policy, version order by policy, version",
        int(since // _HOUR),
    )
    return [_tally(row) for row in rows]


def decisions_under(session: Session, policy: str, version: int) -> int:
    """Return how many decisions of a version were counted."""
    condition = "policy = ? and version = ?"
    [(count,)] = session.rows(f"select sum(decisions) from tallies where {condition}", policy, version)
    return int(count or 0)


def _tally(row: Sequence[Any]) -> PolicyTally:
    policy, version, *values = row
    named = dict(zip(_COUNTS, values, strict=True))
    counts: dict[str, Any] = {name: float(value) if name in _MONEY else round(value) for name, value in named.items()}
    return PolicyTally(policy=policy, version=int(version), **counts)


def forget_pruned(session: Session, *, before: float) -> None:
    """Drop decisions from the list of those without a guarantee that are no longer in the record; counts stay."""
    session.run(
        "delete from unguaranteed where id < ? and not exists "
        "(select 1 from events where events.kind = 'decision' and events.id = unguaranteed.id)",
        id_at(before),
    )
