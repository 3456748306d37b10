"""Removing what is old, and erasing what someone asked to have erased, with the chains intact.

A removed event leaves a tombstone with writer, number and hash; an erased one stays without its content. Both are sealed, so
that no one else can remove or change an event this way.

Knows nothing of threads, or of how a transaction begins and ends.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import decode_decision, decode_later, encode
from conformal_arbitrage.store.hash_chain import Checkpoint, Link, StoredLink
from conformal_arbitrage.store.heads import CHUNK, LINK, vouches
from conformal_arbitrage.store.record import (
    AuditBody,
    CompletionBody,
    EventBody,
    FeedbackBody,
)
from conformal_arbitrage.store.review_ends import erase_reviews
from conformal_arbitrage.store.rows import keep
from conformal_arbitrage.types import DAY, Leg

_BEYOND = 2**62  # above the number of any event
_ERASED = "erased"
GONE = 410
"""The status of a stored response that was erased."""


def prune(session: Session, *, before: float, now: float) -> int:
    """Turn the events of some old decisions into tombstones; return how many decisions.

    A decision whose audit is open stays until the audit is closed, since it needs the question; one whose loss a grade or
    a label can still tell stays until that is due. One that is fit for calibration leaves its row.
    """
    rows = session.rows(
        "select id from events where kind = 'decision' and at < ? "
        "and not exists (select 1 from audits where audits.id = events.id) "
        "and not exists (select 1 from reviews where reviews.decision = events.id and reviews.state in ('open', 'decided')) "
        "and not exists (select 1 from ledger where ledger.id = events.id and ledger.loss is null and ledger.due > ?) "
        f"order by at limit ?{session.dialect.skip_locked}",
        *(before, now, CHUNK),
    )
    for (id,) in rows:
        keep(session, id)
        for link, _ in _events(session, id):
            _replace(session, link, Link(*link[:3], *[None] * 7))  # pyright: ignore[reportArgumentType]
    return len(rows)


def prune_replays(session: Session, *, before: float) -> None:
    """Remove the responses, and the claims behind them, that were stored before a time."""
    for table in ("replays", "begun"):
        session.run(f"delete from {table} where expires < ?", before + DAY)
    session.run("delete from claims where expires < ? and state = 'finished'", before + DAY)


def _events(session: Session, id: str) -> list[StoredLink]:
    """Return all events of a decision, the decision last: a process that dies meanwhile is run again."""
    rows = session.rows(f"select {LINK}, seal from events where id = ? order by kind = 'decision', writer, seq", id)
    return [StoredLink(Link._make(row[:-1]), row[-1]) for row in rows]


def _replace(session: Session, link: Link, new: Link) -> None:
    """Put another row in the place of an event; it is sealed only if the event was what had been written."""
    seal = session.seals.sign("event", *new) if _is_intact(session, link) else None
    session.run(
        "update events set id = ?, kind = ?, at = ?, body = ?, policy = ?, key_id = ?, decided_by = ?, seal = ? "
        "where writer = ? and seq = ?",
        *(*new[3:], seal, link.writer, link.seq),
    )


def _is_intact(session: Session, link: Link) -> bool:
    """Return whether an event is what was written: removing it must not remove the trace of a change."""
    [(seal,)] = session.rows("select seal from events where writer = ? and seq = ?", *link[:2])
    if seal is not None:
        return vouches(session)(StoredLink(link, seal))
    try:
        key = session.seals.key_of(link.writer)
    except KeyError:
        return False
    for table in ("events", "checkpoints"):
        rows = session.rows(f"select hash from {table} where writer = ? and seq = ?", link.writer, link.seq - 1)
        if rows:
            return link.hash == link.digest(rows[0][0], key)
    return link.seq == 1 and link.hash == link.digest("", key)


def compact(session: Session) -> None:
    """Replace the tombstones at the start of each chain by a checkpoint, as far as they are sealed."""
    for (writer,) in session.rows("select distinct writer from events where body is null"):
        end = _sealed_end(session, writer)
        if end.seq:
            session.run(
                "insert into checkpoints (writer, seq, hash, seal) values (?, ?, ?, ?) on conflict (writer) do update "
                "set seq = excluded.seq, hash = excluded.hash, seal = excluded.seal where excluded.seq > checkpoints.seq",
                *(writer, *end, session.seals.sign("checkpoint", writer, *end)),
            )
            session.run("delete from events where writer = ? and seq <= ?", writer, end.seq)


def _sealed_end(session: Session, writer: str) -> Checkpoint:
    """Return the last of the tombstones that follow a chain's start without a gap or a missing seal."""
    start = session.rows("select seq, hash, seal from checkpoints where writer = ?", writer)
    due = 1
    if start:
        seq, hash, seal = start[0]
        if session.seals and not session.seals.fits(seal, "checkpoint", writer, seq, hash):
            return Checkpoint()
        due = int(seq) + 1
    end = Checkpoint()
    while rows := session.rows(
        f"select {LINK}, seal from events where writer = ? and body is null and seq >= ? and seq < coalesce("
        "(select min(seq) from events where writer = ? and body is not null), ?) order by seq limit ?",
        *(writer, due, writer, _BEYOND, CHUNK),
    ):
        for row in rows:
            link = Link._make(row[:-1])
            if link.seq != due or (session.seals and not vouches(session)(StoredLink(link, row[-1]))):
                return end
            end, due = Checkpoint(link.seq, link.hash), due + 1
    return end


def erase(session: Session, id: str) -> bool:
    """Erase question, answers, comments and error texts of a decision; return False if there is none.

    Scores, costs and times stay, so the decision still counts in an export.
    """
    rows = _events(session, id)
    if not any(row.link.kind == "decision" for row in rows):
        return False
    for link, _ in rows:
        body = _without_content(link)
        _replace(session, link, link._replace(body=encode(body, id)))
    session.run("delete from audits where id = ?", id)
    session.run("delete from undelivered where id = ?", id)
    erase_reviews(session, id)
    _erase_replays(session, id.encode())
    return True


def _without_content(link: Link) -> EventBody:
    text = str(link.body)
    if link.kind == "decision":
        body = decode_decision(text, link.id)
        return replace(body, content=None, legs=tuple(_without_error(leg) for leg in body.legs))
    later = replace(decode_later(link.kind, text, link.id, link.at), at=None)
    match later:
        case CompletionBody():
            leg = None if later.leg is None else _without_error(later.leg)
            before = tuple(_without_error(one) for one in later.before)
            return replace(later, content=None, leg=leg, before=before)
        case FeedbackBody():
            return replace(later, comment=None, reason=None if later.reason is None else _ERASED)
        case AuditBody():
            return replace(later, answer=None, error=None if later.error is None else _ERASED)


def _without_error(leg: Leg) -> Leg:
    return leg if leg.error is None else replace(leg, error=_ERASED)


def _erase_replays(session: Session, id: bytes) -> None:
    """Replace the stored responses that name a decision by one that says so."""
    last: Sequence[Any] = ("", "")
    while rows := session.rows(
        "select key_id, name, body from replays where (key_id, name) > (?, ?) order by key_id, name limit ?",
        *last,
        CHUNK,
    ):
        for key_id, name, body in rows:
            if id in body:
                row = (key_id, name, GONE, "{}", b"")
                session.run(
                    "update replays set status = ?, headers = ?, body = ?, seal = ? where key_id = ? and name = ?",
                    *(*row[2:], session.seals.sign("replay", *row), key_id, name),
                )
        last = rows[-1][:2]
