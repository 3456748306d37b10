"""Operations on answers that people are to grade: what is new of a policy, and putting it into the review queue.

Every chain of events is read in order, and how far it was read is noted in the transaction that deals with what was read.
What is to be done about a decision follows from its whole record, so neither the order of events nor a crash matters.

Knows nothing of threads, or of which answers need grades.
"""

import logging
from collections.abc import Collection, Iterator, Sequence

from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.store import pages
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.record import DecisionRecord
from conformal_arbitrage.store.review_base import GradingNews, NewReview
from conformal_arbitrage.store.reviews import put_items
from conformal_arbitrage.store.tallies import event_writers

_log = logging.getLogger("conformal_arbitrage.store")
_MOST_EVENTS = 2000
_KINDS = "('decision', 'completion', 'feedback', 'audit')"


def grading_news(session: Session, policy: str, *, limit: int) -> GradingNews:
    """Return the decisions of a policy that recent events are about, and how far events were read."""
    seen, read, ids = _marks(session, policy), dict[str, int](), dict[str, None]()
    left = _MOST_EVENTS
    for writer in event_writers(session):
        events = session.rows(
            f"select seq, case when kind in {_KINDS} then id end from events where writer = ? and seq > ? "
            "order by seq limit ?",
            *(writer, seen.get(writer, 0), left),
        )
        left -= len(events)
        own = _decisions_of(session, policy, [id for _, id in events if id is not None])
        for seq, id in events:
            if len(ids) >= limit:
                break
            read[writer] = int(seq)
            if id in own:
                ids[id] = None
        if left <= 0 or len(ids) >= limit:
            break
    return GradingNews(records=tuple(_records(session, list(ids))), seen=seen, read=read)


def _marks(session: Session, policy: str) -> dict[str, int]:
    rows = session.rows("select writer, seq from grading_marks where policy = ? and writer <> ''", policy)
    return {writer: int(seq) for writer, seq in rows}


def _decisions_of(session: Session, policy: str, ids: Sequence[str]) -> frozenset[str]:
    """Return those of some decisions that are a policy's."""
    if not ids:
        return frozenset()
    rows = session.rows(
        f"select id from events where kind = 'decision' and policy = ? and id in ({', '.join('?' * len(ids))})",
        *(policy, *ids),
    )
    return frozenset(id for (id,) in rows)


def _records(session: Session, ids: Sequence[str]) -> Iterator[DecisionRecord]:
    for id in ids:
        try:
            record = pages.record(session, id)
        except StoreError as error:  # one that is damaged must not stop the others
            _log.error("answers cannot be graded: %s", error, extra={"id": id})
        else:
            if record is not None:
                yield record


def put_grading(
    session: Session, policy: str, news: GradingNews, *, items: Sequence[NewReview], graded: Collection[str]
) -> bool:
    """Put answers into the queue, withdraw what has grades, and note how far news was read, if nobody else has."""
    session.run(
        "insert into grading_marks (policy, writer, seq) values (?, '', 0) on conflict (policy, writer) do update "
        "set seq = excluded.seq",
        policy,
    )  # one gateway at a time
    if _marks(session, policy) != news.seen:
        return False
    for writer, seq in news.read.items():
        session.run(
            "insert into grading_marks (policy, writer, seq) values (?, ?, ?) on conflict (policy, writer) do update "
            "set seq = excluded.seq",
            *(policy, writer, seq),
        )
    put_items(session, items)
    for id in graded:
        _withdraw(session, id)
    return True


def _withdraw(session: Session, decision: str) -> None:
    """Withdraw what people were to grade of a decision, unless they have; and a second opinion, which needs a first."""
    withdrawn = (
        "update reviews set state = 'withdrawn', closed = ?, payload = case when held > 0 then payload end, "
        "revision = revision + 1 where decision = ? and state = 'open' and "
    )
    now = session.now()
    if session.run(f"{withdrawn} purpose = 'grade'", now, decision):
        session.run(f"{withdrawn} purpose = 'overlap'", now, decision)
