"""Operations on the review queue by reviewers: put, take, renew, give back, skip, vote, undo.

How many people hold an item, and how many voted, is counted in the item's own row, which whoever takes it writes: a count
over another table would not be looked at again once the row is locked, and two people would get one place. An item is locked
before its claims, and other items that are locked are skipped, so that no two transactions wait for each other.

Knows nothing of threads, teams' members, or how a verdict is reached.
"""

import secrets
from collections.abc import Collection, Sequence

from conformal_arbitrage.monitoring.people import count_votes
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import decode_review_question, encode_review_question
from conformal_arbitrage.store.ids import new_id
from conformal_arbitrage.store.review_base import HeldReview, NewReview, ReviewRequest
from conformal_arbitrage.store.sql_jobs import SingleQuery
from conformal_arbitrage.types import DAY

LONGEST_HOLD = 1200.0
"""Seconds that a reviewer can hold an item in all."""
_MOST = 20
_COLUMNS = (
    "id, decision, purpose, policy, team, request, payload, protocol, identities, menu, panel, rule, escalates, price, "
    "lease, undo, drawn, needed, state, due, deadline, created"
)
_SHOWN = "id, policy, team, payload, lease"
_ShownRow = tuple[str, str, str, str | None, float]
_LOCKED = "id, state, level, undo, payload"
_LockedRow = tuple[str, str, int, float, str | None]


def put_items(session: Session, items: Sequence[NewReview], request: str | None = None) -> None:
    """Put items into the queue; one that is there stays as it is, and is open again if it was withdrawn.

    A request waits for its questions, not for second opinions on them.
    """
    now = session.now()
    for item in items:
        needed = count_votes((), panel=item.panel, rule=item.rule).needed
        deadline = None if item.deadline is None else now + item.deadline
        row = (
            new_id(), item.decision, item.purpose, item.policy, item.team, request if item.purpose == "decide" else None,
            encode_review_question(item.question, item.decision), item.protocol, item.identities_sha256, item.menu,
            item.panel, item.rule, int(item.escalates), item.price, item.lease, item.undo, int(item.drawn), needed, "open",
            now + item.due, deadline, now,
        )  # fmt: skip
        marks = ", ".join("?" * len(row))
        session.run(
            f"insert into reviews ({_COLUMNS}) values ({marks}) on conflict (decision, purpose) do update set "
            "state = 'open', payload = excluded.payload, request = excluded.request, due = excluded.due, closed = null, "
            "deadline = excluded.deadline, revision = reviews.revision + 1 where reviews.state = 'withdrawn'",
            *row,
        )


def put_request(session: Session, request: ReviewRequest, deadline: float) -> str:
    """Note a request that waits for people, and keep what was begun under its key until a day after the deadline."""
    now = session.now()
    expires = now + deadline + DAY
    session.run(
        "insert into review_requests (id, key_id, name, policy, route, body, created, expires) "
        "values (?, ?, ?, ?, ?, ?, ?, ?) on conflict (key_id, name) do update set body = excluded.body, "
        "expires = excluded.expires",
        *(new_id(), request.key_id, request.name, request.policy, request.route, request.body, now, expires),
    )
    session.run(
        "update begun set expires = ? where key_id = ? and name = ? and expires < ?",
        *(expires, request.key_id, request.name, expires),
    )
    [(id,)] = session.rows("select id from review_requests where key_id = ? and name = ?", request.key_id, request.name)
    return str(id)


def put_audits(session: Session, items: Sequence[NewReview]) -> None:
    """Put audits into the queue in place of those that wait for a model."""
    put_items(session, items)
    for item in items:
        session.run("delete from audits where id = ?", item.decision)


def take(
    session: Session, reviewer: str, *, teams: Collection[str], leads: Collection[str], lease: float | None
) -> HeldReview | None:
    """Give a reviewer the item they hold, or else the next one for them, those for leads first."""
    note_presence(session, reviewer)  # which also makes a person's own requests wait for each other
    now = session.now()
    end_leases(session, now)
    held = _held_by(session, reviewer, now, lease)
    if held is not None:
        return held
    for level, names in ((1, leads), (0, teams)):
        for team in _by_first_due(session, reviewer, names, level):
            row = _next(session, reviewer, team, level, now)
            if row is not None:
                token = secrets.token_hex(16)
                _hold(session, row[0], reviewer, token, now, now, lease)
                return _shown(token, row)
    return None


def _held_by(session: Session, reviewer: str, now: float, lease: float | None) -> HeldReview | None:
    """Return the item that a reviewer holds, for as long again; one that has ended is put aside."""
    rows = session.rows(
        "select c.token, c.item, c.since, r.state, c.level = r.level from review_claims c join reviews r on r.id = c.item "
        "where c.reviewer = ?",
        reviewer,
    )
    for token, item, since, state, same_level in rows:
        if state != "open" or not same_level or now > since + LONGEST_HOLD:
            _drop(session, token, item)
            return None
        session.run(
            "update review_claims set lease = ? + coalesce(?, (select lease from reviews where id = ?)) where token = ?",
            *(now, lease, item, token),
        )
        return _shown_again(session, item, token)
    return None


_FREE = (
    "from reviews r where r.state = 'open' and r.team = ? and r.level = ? and r.held + r.votes < r.needed and not exists "
    "(select 1 from review_seen s where s.decision = r.decision and s.reviewer = ?) and "
    "(r.purpose <> 'overlap' or not exists (select 1 from reviews m where m.decision = r.decision and "
    "m.purpose <> 'overlap' and m.state = 'open')) order by r.due, r.id limit 1"
)
"""The first item of a team that has a place free for a reviewer, by an index that has them in this order.

A second opinion is asked for once the question itself has ended: its panel may need everybody who is left.
"""


def _by_first_due(session: Session, reviewer: str, teams: Collection[str], level: int) -> list[str]:
    """Return those of a reviewer's teams that have something for them, the one whose item is due first at the top."""
    if len(teams) == 1:
        return [*teams]
    first = [(session.rows(f"select r.due, r.id {_FREE}", team, level, reviewer), team) for team in teams]
    return [team for _, team in sorted((tuple(rows[0]), team) for rows, team in first if rows)]


def _next(session: Session, reviewer: str, team: str, level: int, now: float) -> _ShownRow | None:
    """Take a place of the first item of a team that has one free for a reviewer; return what they see of it."""
    rows = session.rows(
        "update reviews set held = held + 1, revision = revision + 1, taken = coalesce(taken, ?) where id = "
        f"(select r.id {_FREE}{session.dialect.skip_locked}) returning {_SHOWN}",
        *(now, team, level, reviewer),
    )
    return rows[0] if rows else None


def _hold(
    session: Session, item: str, reviewer: str, token: str, since: float, now: float, lease: float | None,
    level: int | None = None,
) -> None:  # fmt: skip
    """Note who holds an item, whose place they have."""
    session.run(
        "insert into review_claims (token, item, reviewer, level, since, lease) "
        "select ?, id, ?, coalesce(?, level), ?, ? + coalesce(?, lease) from reviews where id = ?",
        *(token, reviewer, level, since, now, lease, item),
    )


def _shown_again(session: Session, item: str, token: str) -> HeldReview | None:
    [row] = session.rows(f"select {_SHOWN} from reviews where id = ?", item)
    return _shown(token, row)


def _shown(token: str, row: _ShownRow) -> HeldReview | None:
    """Return what a reviewer sees of an item, unless its question is gone."""
    item, policy, team, payload, lease = row
    if payload is None:
        return None
    question = decode_review_question(payload, item)
    return HeldReview(token=token, policy=policy, team=team, question=question, lease=lease)


def end_leases(session: Session, now: float) -> None:
    """Free the places of reviewers who have given no sign of life for the length of their lease."""
    rows = session.rows("select token, item from review_claims where lease <= ? order by lease limit ?", now, _MOST)
    for token, item in rows:
        if session.rows(f"select id from reviews where id = ?{session.dialect.skip_locked}", item):
            _drop(session, token, item, ended=now)


def _lock(session: Session, item: str) -> None:
    """Lock an item before its claims are touched."""
    session.run("update reviews set revision = revision + 1 where id = ?", item)


def _drop(session: Session, token: str, item: str, *, ended: float | None = None) -> bool:
    """Remove a claim and free its place; with `ended`, only if its lease had ended by then."""
    _lock(session, item)
    rows = session.rows(
        "delete from review_claims where token = ? and lease <= coalesce(?, lease) returning level", token, ended
    )
    for (level,) in rows:
        session.run("update reviews set held = held - 1 where id = ? and level = ? and state = 'open'", item, level)
    return bool(rows)


def _claim_of(session: Session, token: str, reviewer: str) -> tuple[str, float] | None:
    """Return the item that a token stands for, and since when it is held."""
    rows = session.rows("select item, since from review_claims where token = ? and reviewer = ?", token, reviewer)
    return (rows[0][0], rows[0][1]) if rows else None


def renew_hold(session: Session, token: str, reviewer: str) -> bool:
    """Extend a lease, up to the longest time that an item can be held."""
    note_presence(session, reviewer)
    now = session.now()
    renewed = session.run(
        "update review_claims set lease = ? + (select lease from reviews where id = item) "
        "where token = ? and reviewer = ? and since > ?",
        *(now, token, reviewer, now - LONGEST_HOLD),
    )
    return renewed == 1


def give_back(session: Session, token: str, reviewer: str) -> None:
    """Free the place."""
    note_presence(session, reviewer)
    claim = _claim_of(session, token, reviewer)
    if claim is not None:
        _drop(session, token, claim[0])


def skip(session: Session, token: str, reviewer: str) -> bool:
    """Free the place, and note that the person cannot tell; whether someone else can is looked at soon."""
    note_presence(session, reviewer)
    claim = _claim_of(session, token, reviewer)
    if claim is None or not _drop(session, token, claim[0]):
        return False
    _note_skipped(session, claim[0], reviewer)
    return True


def _note_skipped(session: Session, item: str, reviewer: str) -> None:
    now = session.now()
    _note_seen(session, item, reviewer, "skipped", now)
    session.run("update reviews set ready = ? where id = ? and state = 'open'", now, item)


def _note_seen(session: Session, item: str, reviewer: str, why: str, now: float) -> None:
    session.run(
        "insert into review_seen (decision, reviewer, why, team, at) select decision, ?, ?, team, ? from reviews "
        "where id = ? on conflict (decision, reviewer) do nothing",
        *(reviewer, why, now, item),
    )


def held_question(token: str, reviewer: str) -> SingleQuery:
    """Return what finds the item and the question of a claim or of a vote, if it is still kept."""
    return SingleQuery(
        "select r.id, r.payload from reviews r where r.payload is not null and r.id in "
        "(select item from review_claims where token = ? and reviewer = ? union all "
        "select item from votes where token = ? and reviewer = ?)",
        (token, reviewer, token, reviewer),
    )


def vote(session: Session, token: str, reviewer: str, choice: int, *, active: float | None) -> float | None:
    """Cast a vote; after the item has ended it is recorded as late, which the reviewer is not told."""
    note_presence(session, reviewer)
    now = session.now()
    rows = session.rows(
        "select counts, null, null from votes where token = ? and reviewer = ? and withdrawn is null union all "
        "select null, item, since from review_claims where token = ? and reviewer = ?",
        *(token, reviewer, token, reviewer),
    )
    for counts, item, since in sorted(rows, key=lambda row: row[0] is None):  # a vote before a claim
        if counts is not None:
            return max(0.0, counts - now)
        [locked] = session.rows(f"update reviews set revision = revision + 1 where id = ? returning {_LOCKED}", item)
        for (level,) in session.rows("delete from review_claims where token = ? returning level", token):
            return _cast(session, token, locked, reviewer, level, choice, since=since, active=active)
    return None


def _cast(
    session: Session, token: str, locked: _LockedRow, reviewer: str, level: int, choice: int, *, since: float,
    active: float | None,
) -> float:  # fmt: skip
    """Write a vote on an item, which is locked and in which its voter had a place, and free the place."""
    now = session.now()
    item, state, current, undo, payload = locked
    late = state != "open" or current != level
    place = choice if payload is None else decode_review_question(payload, item).places[choice]
    session.run(
        "insert into votes (token, item, reviewer, level, at, counts, choice, held, active, late) "
        "values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict (token) do update set at = excluded.at, "
        "counts = excluded.counts, choice = excluded.choice, held = excluded.held, active = excluded.active, "
        "late = excluded.late, withdrawn = null",
        *(token, item, reviewer, level, now, now + undo, place, max(0.0, now - since), active, int(late)),
    )
    _note_seen(session, item, reviewer, "voted", now)
    if not late:
        session.run(
            "update reviews set held = held - 1, votes = votes + 1, "
            "ready = case when ready is null or ready > ? then ? else ready end where id = ?",
            *(now + undo, now + undo, item),
        )
    return float(undo)


def undo(session: Session, token: str, reviewer: str) -> HeldReview | None:
    """Withdraw a vote that does not count yet; its item is held again by the same person."""
    note_presence(session, reviewer)
    rows = session.rows("select item from votes where token = ? and reviewer = ?", token, reviewer)
    if not rows:
        return None
    item = rows[0][0]
    _lock(session, item)
    [(now,)] = session.rows(
        f"select {session.dialect.now}"
    )  # not when the transaction began: its vote may count by now
    undone = session.rows(
        "update votes set withdrawn = ? where token = ? and withdrawn is null and counts > ? and exists "
        "(select 1 from review_seen s join reviews r on r.decision = s.decision where r.id = votes.item and "
        "s.reviewer = votes.reviewer and s.why = 'voted') returning level, late, at, held",
        *(now, token, now),
    )  # whoever has read the record since then is not asked again
    if not undone:
        return None
    other = session.rows("select token, item from review_claims where reviewer = ?", reviewer)
    for held_token, held_item in other:  # one item at a time: the next one, which they may hold already, goes back
        _drop(session, held_token, held_item)
    level, late, at, held = undone[0]
    session.run(
        "delete from review_seen where reviewer = ? and why = 'voted' and decision = "
        "(select decision from reviews where id = ?)",
        *(reviewer, item),
    )
    if not late:  # a vote of a level that is over has no place to get back
        session.run("update reviews set held = held + 1, votes = votes - 1 where id = ? and level = ?", item, level)
    _hold(session, item, reviewer, token, at - held, now, None, level)
    return _shown_again(session, item, token)


def note_presence(session: Session, reviewer: str) -> None:
    """Note that a reviewer is there."""
    session.run(
        "insert into presence (reviewer, seen) values (?, ?) on conflict (reviewer) do update set seen = excluded.seen",
        *(reviewer, session.now()),
    )


def note_reader(session: Session, decision: str, reviewer: str) -> None:
    """Note that somebody read the record of a decision under review; an item of it that they hold goes back."""
    now = session.now()
    rows = session.rows(
        "select c.token, c.item from review_claims c join reviews r on r.id = c.item "
        "where c.reviewer = ? and r.decision = ?",
        *(reviewer, decision),
    )
    for token, item in rows:
        _drop(session, token, item)
    session.run(
        "insert into review_seen (decision, reviewer, why, team, at) values (?, ?, 'read the record', '', ?) "
        "on conflict (decision, reviewer) do update set why = excluded.why where review_seen.why = 'voted'",
        *(decision, reviewer, now),
    )
    session.run(  # perhaps nobody is left who could tell
        "update reviews set ready = ? where decision = ? and state = 'open' and (ready is null or ready > ?)",
        *(now, decision, now),
    )


def under_review(decisions: Collection[str]) -> SingleQuery:
    """Return what finds the decisions with an open item, among at least one."""
    marks = ", ".join("?" * len(decisions))
    return SingleQuery(f"select decision from reviews where state = 'open' and decision in ({marks})", tuple(decisions))
