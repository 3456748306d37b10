"""The review queue: questions that people answer, with leases, votes and verdicts.

An item is open until counted votes give a verdict, or until its deadline. Every change of an item raises its revision, and
what ends it names the revision it was based on: so one transition decides, whoever dies meanwhile. What the audit coin drew
and nobody has decided stays open as an audit, since leaving such rows out would select the others by their difficulty.

How many people hold an item, and how many voted, is counted in the item's own row, which whoever takes it writes: a count
over another table would not be looked at again once the row is locked, and two people would get one place. An item is locked
before its claims, and other items that are locked are skipped, so that no two transactions wait for each other.
"""

import logging
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from conformal_arbitrage.errors import DamagedError, StoreError
from conformal_arbitrage.monitoring.votes import ReviewRule, SecondOpinion, count_votes
from conformal_arbitrage.store import pages
from conformal_arbitrage.store.claims import Claim
from conformal_arbitrage.store.ledger import note_news
from conformal_arbitrage.store.outbox import WebhookEvent, announce
from conformal_arbitrage.store.pages import event_writers
from conformal_arbitrage.store.record import (
    DecisionRecord,
    Event,
    JSONObject,
    ReviewFacts,
    ReviewVote,
    as_given,
    decode,
    document,
    encode,
    encode_strictly,
    erased,
    is_plain,
    new_id,
)
from conformal_arbitrage.store.session import CHUNK, Session, SingleQuery, operation, placeholders, prepared, viewed
from conformal_arbitrage.types import DAY

_log = logging.getLogger("conformal_arbitrage.store")

ReviewPurpose = Literal["decide", "audit", "grade", "overlap", "label"]
ReviewKind = Literal["choose", "grade"]
ReviewState = Literal["open", "decided", "closed", "expired", "failed", "withdrawn"]
ReviewEnd = Literal["decided", "closed", "expired", "failed"]


class ReviewQuestion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What people are shown of a question.

    Attributes:
        context: the question, text or messages.
        options: the actions, or the answers to grade, in the order shown.
        places: the index of each option in the whole menu; of answers to grade, for every way to grade them as shown, its
            place among the pairs of grades.
        size: the number of actions of the whole menu, or of ways to grade the answers.
        instructions: shown above the question; None for those that the policy has when it is shown.
        grader: the identity of those who grade, as they are asked; None if it is a choice.
        primary: the place, as shown, of what the Primary would choose; None if that is not shown.
    """

    context: str | Sequence[JSONObject]
    options: tuple[str, ...]
    places: tuple[int, ...]
    size: int
    instructions: str | None = None
    grader: JSONObject | None = None
    primary: int | None = None

    @property
    def kind(self) -> ReviewKind:
        """Whether people choose an option or grade answers."""
        return "choose" if self.grader is None else "grade"


class NewReview(Struct, frozen=True, kw_only=True):
    """A question to put into the queue. The database's clock decides, so times are seconds from now.

    Attributes:
        decision: the decision's id; of an item of a batch its own.
        purpose: whether a caller waits, or it is an audit, or answers are graded, or it is a second opinion, or an item of a
            batch.
        policy: whose decision; of an item the name of its batch.
        protocol: digest of how people are asked.
        identities_sha256: fingerprint of the identities of the policy's models, or of the batch.
        panel, rule: how votes are counted.
        escalates: whether a lead decides if the panel cannot.
        price: dollars per vote; None if unknown.
        due: when it should be taken; the order of the queue.
        deadline: when it is given up; None for never.
        lease: how long a reviewer holds it without a sign of life.
        undo: how long a vote can be taken back.
        drawn: the audit coin drew the decision.
        menu: a keyed digest of the options, by which equal menus are recognized.
    """

    decision: str
    purpose: ReviewPurpose
    policy: str
    team: str
    question: ReviewQuestion
    protocol: str
    identities_sha256: str
    panel: int = 1
    rule: ReviewRule = "majority"
    escalates: bool = False
    price: float | None = None
    due: float = 0.0
    deadline: float | None = None
    lease: float = 90.0
    undo: float = 5.0
    drawn: bool = False
    menu: str = ""


class ReviewRequest(Struct, frozen=True, kw_only=True):
    """A caller's request that people decide, kept so that any gateway can complete it; `name` is its idempotency key."""

    key_id: str
    name: str
    policy: str
    route: str
    body: bytes


class ReviewWork(Struct, frozen=True, kw_only=True):
    """What a commit does to the queue.

    Attributes:
        items: questions to put into it; one that is there already stays, and is reopened if it was withdrawn.
        deadline: seconds for which its idempotency key must be kept.
        ended: the request under the commit's claim is complete: its items are closed.
    """

    items: Sequence[NewReview] = ()
    request: ReviewRequest | None = None
    deadline: float = 0.0
    ended: bool = False


class HeldReview(Struct, frozen=True, kw_only=True):
    """An item in the hands of a reviewer: what they are shown, and the token to vote with; `lease` is in seconds."""

    token: str
    policy: str
    team: str
    question: ReviewQuestion
    lease: float


class ReviewItem(Struct, frozen=True, kw_only=True):
    """An item for which something is due.

    Attributes:
        votes: those that count at this level, with the option's index in the whole menu, or the place of the pair of
            grades, in order.
        earlier: those that counted at the level before.
        withdrawn: how many were undone.
        next_count: seconds until the next vote counts; None if all do.
        seen: everybody who voted, skipped it or read its record.
        overdue: its deadline has passed.
        age: seconds since it was put into the queue.
    """

    id: str
    decision: str
    purpose: ReviewPurpose
    policy: str
    team: str
    protocol: str
    identities_sha256: str
    question: ReviewQuestion | None
    panel: int
    rule: ReviewRule
    escalates: bool
    price: float | None
    level: int
    revision: int
    drawn: bool
    votes: tuple[ReviewVote, ...]
    earlier: tuple[ReviewVote, ...]
    withdrawn: int
    next_count: float | None
    seen: frozenset[str]
    overdue: bool
    age: float


class ReviewOutcome(Struct, frozen=True, kw_only=True):
    """How far a caller's question has come.

    Attributes:
        state: of its item.
        action: index of the verdict in the whole menu; None without one.
        size: the number of actions of the whole menu.
        cost: dollars for all counted votes; None if unknown.
        facts: how they voted.
    """

    state: ReviewState
    action: int | None = None
    size: int = 0
    team: str = ""
    cost: float | None = None
    facts: ReviewFacts | None = None


class TeamBacklog(Struct, frozen=True, kw_only=True):
    """What a team has before it, and what it did.

    Attributes:
        votes_needed: that these still need.
        oldest: age in seconds of the oldest that a caller waits for; None if none does.
        untaken: whether one has been waiting for half a minute without anybody having taken it.
        present: people of the team seen in the last two minutes.
    """

    team: str
    open: int = 0
    votes_needed: int = 0
    oldest: float | None = None
    untaken: bool = False
    present: tuple[str, ...] = ()
    votes_last_hour: int = 0


class GradingNews(Struct, frozen=True, kw_only=True):
    """Decisions of a policy about which something was recorded, that may have answers to grade.

    Attributes:
        records: the decisions, each as a whole.
        seen: for every chain of events, how far it had been read before.
        read: and how far it has been now; passed back, so that each piece of news is dealt with once.
    """

    records: tuple[DecisionRecord, ...] = ()
    seen: Mapping[str, int] = {}
    read: Mapping[str, int] = {}


class CastVote(Struct, frozen=True, kw_only=True):
    """One vote of the last thirty days, for figures; `held` in seconds."""

    reviewer: str
    team: str
    at: float
    held: float
    skipped: bool = False


# --- Reviewers: put, take, renew, give back, skip, vote, undo ---

LONGEST_HOLD = 1200.0
"""Seconds that a reviewer can hold an item in all."""
_MOST = 20
_COLUMNS = (
    "id, decision, purpose, policy, team, request, payload, protocol, identities, menu, panel, rule, escalates, price, "
    "lease, undo, drawn, needed, state, due, deadline, created, question_seal"
)
_SHOWN = "id, policy, team, lease, decision, payload, question_seal"
_ShownRow = tuple[str, str, str, float, str, str | None, str | None]
_LOCKED = "id, state, level, undo, decision, payload, question_seal"
_LockedRow = tuple[str, str, int, float, str, str | None, str | None]


def put_items(session: Session, items: Sequence[NewReview], request: str | None = None) -> None:
    """Put items into the queue; one that is there stays as it is, and is open again if it was withdrawn.

    A request waits for its questions, not for second opinions on them.
    """
    now = session.now()
    for item in items:
        needed = count_votes((), panel=item.panel, rule=item.rule).needed
        deadline = None if item.deadline is None else now + item.deadline
        payload = encode_review_question(item.question, item.decision)
        row = (
            new_id(), item.decision, item.purpose, item.policy, item.team, request if item.purpose == "decide" else None,
            payload, item.protocol, item.identities_sha256, item.menu,
            item.panel, item.rule, int(item.escalates), item.price, item.lease, item.undo, int(item.drawn), needed, "open",
            now + item.due, deadline, now, session.seals.sign("review", item.decision, payload),
        )  # fmt: skip
        marks = ", ".join("?" * len(row))
        session.run(
            f"insert into reviews ({_COLUMNS}) values ({marks}) on conflict (decision, purpose) do update set "
            "state = 'open', payload = excluded.payload, question_seal = excluded.question_seal, "
            "request = excluded.request, due = excluded.due, closed = null, "
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


@operation("write")
def take(
    session: Session, reviewer: str, *, teams: Collection[str], leads: Collection[str], lease: float | None = None
) -> HeldReview | None:
    """Give a reviewer the item they hold already, or the next that they have not seen; None if there is none.

    Args:
        teams: whose questions they answer.
        leads: of which they decide what a panel could not.
        lease: seconds to hold it; as the item says if None.
    """
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
                return _shown(session, token, row)
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
    return _shown(session, token, row)


def _shown(session: Session, token: str, row: _ShownRow) -> HeldReview | None:
    """Return what a reviewer sees of an item, unless its question is gone."""
    item, policy, team, lease, decision, payload, seal = row
    question = _readable(session, item, decision, payload, seal)
    if question is None:
        return None
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


@operation("write")
def renew(session: Session, token: str, reviewer: str) -> bool:
    """Hold an item longer, up to twenty minutes in all; return False if it is no longer theirs."""
    note_presence(session, reviewer)
    now = session.now()
    renewed = session.run(
        "update review_claims set lease = ? + (select lease from reviews where id = item) "
        "where token = ? and reviewer = ? and since > ?",
        *(now, token, reviewer, now - LONGEST_HOLD),
    )
    return renewed == 1


@operation("write")
def give_back(session: Session, token: str, reviewer: str) -> None:
    """Give an item back, for anyone to take."""
    note_presence(session, reviewer)
    claim = _claim_of(session, token, reviewer)
    if claim is not None:
        _drop(session, token, claim[0])


@operation("write")
def skip(session: Session, token: str, reviewer: str) -> bool:
    """Give an item back and never offer it to this person again; return False if it is no longer theirs."""
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


@operation("read")
def held_question(session: Session, token: str, reviewer: str) -> ReviewQuestion | None:
    """Return the question that a token stands for, held or voted on; None if it is not theirs, or no longer kept."""
    rows = session.rows(
        "select r.id, r.decision, r.payload, r.question_seal from reviews r where r.payload is not null and r.id in "
        "(select item from review_claims where token = ? and reviewer = ? union all "
        "select item from votes where token = ? and reviewer = ?)",
        *(token, reviewer, token, reviewer),
    )
    return _readable(session, *rows[0]) if rows else None


def _question(session: Session, item: str, decision: str, payload: str, seal: str | None) -> ReviewQuestion:
    """Return what people are shown of an item; if it is not what was asked, a vote would count for another option."""
    if not session.seals.accept(seal, "review", decision, payload):
        raise DamagedError(f"the question of the review {item} is not what was asked; run `arbitrage records verify`")
    return decode(payload, ReviewQuestion, f"the review {item}")


def _readable(
    session: Session, item: str, decision: str, payload: str | None, seal: str | None
) -> ReviewQuestion | None:
    """Return what people are shown of an item; None if that is gone or damaged, which must not stop other items."""
    try:
        return None if payload is None else _question(session, item, decision, payload, seal)
    except DamagedError as error:
        _log.error("a review is not shown: %s", error, extra={"id": decision})
        return None


@operation("write")
def vote(session: Session, token: str, reviewer: str, choice: int, *, active: float | None = None) -> float | None:
    """Vote for an option by its place as shown; the same token twice is one vote.

    Args:
        choice: the place of the option.
        active: seconds that they were active.

    Returns:
        Seconds until the vote counts; None if the place was given to someone else.
    """
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


_VOTE = "token, item, reviewer, level, at, choice, held, late, withdrawn"
"""What the seal of a vote covers, in this order."""


def _cast(
    session: Session, token: str, locked: _LockedRow, reviewer: str, level: int, choice: int, *, since: float,
    active: float | None,
) -> float:  # fmt: skip
    """Write a vote on an item, which is locked and in which its voter had a place, and free the place."""
    now = session.now()
    item, state, current, undo, decision, payload, seal = locked
    late = state != "open" or current != level
    place = choice if payload is None else _question(session, item, decision, payload, seal).places[choice]
    row = (token, item, reviewer, level, now, place, max(0.0, now - since), int(late), None)
    session.run(
        f"insert into votes ({_VOTE}, counts, active, seal) "
        "values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict (token) do update set at = excluded.at, "
        "counts = excluded.counts, choice = excluded.choice, held = excluded.held, active = excluded.active, "
        "late = excluded.late, withdrawn = null, seal = excluded.seal",
        *(*row, now + undo, active, session.seals.sign("vote", *row)),
    )
    _note_seen(session, item, reviewer, "voted", now)
    if not late:
        session.run(
            "update reviews set held = held - 1, votes = votes + 1, "
            "ready = case when ready is null or ready > ? then ? else ready end where id = ?",
            *(now + undo, now + undo, item),
        )
    return float(undo)


@operation("write")
def undo(session: Session, token: str, reviewer: str) -> HeldReview | None:
    """Take back a vote that does not count yet, and hold the item again; None if it counts."""
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
        f"s.reviewer = votes.reviewer and s.why = 'voted') returning {_VOTE}",
        *(now, token, now),
    )  # whoever has read the record since then is not asked again
    if not undone:
        return None
    session.run("update votes set seal = ? where token = ?", session.seals.sign("vote", *undone[0]), token)
    other = session.rows("select token, item from review_claims where reviewer = ?", reviewer)
    for held_token, held_item in other:  # one item at a time: the next one, which they may hold already, goes back
        _drop(session, held_token, held_item)
    _, _, _, level, at, _, held, late, _ = undone[0]
    session.run(
        "delete from review_seen where reviewer = ? and why = 'voted' and decision = "
        "(select decision from reviews where id = ?)",
        *(reviewer, item),
    )
    if not late:  # a vote of a level that is over has no place to get back
        session.run("update reviews set held = held + 1, votes = votes - 1 where id = ? and level = ?", item, level)
    _hold(session, item, reviewer, token, at - held, now, None, level)
    return _shown_again(session, item, token)


@operation("write")
def note_presence(session: Session, reviewer: str) -> None:
    """Note that a reviewer is there."""
    session.run(
        "insert into presence (reviewer, seen) values (?, ?) on conflict (reviewer) do update set seen = excluded.seen",
        *(reviewer, session.now()),
    )


@viewed("write")
def note_reader(session: Session, decision: str, reviewer: str) -> None:
    """Note that somebody read the record of a decision under review; an item of it that they hold goes back."""
    if session.view.policies is not None and pages.record(session, decision) is None:
        return
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


# --- Gateways: what is due, verdicts, complete requests ---

PRESENT_SECONDS = 120.0
"""Somebody seen within so many seconds is there."""
UNTAKEN_SECONDS = 30.0
_MOST_DUE = 50
_KEPT_SECONDS = 1500.0
"""How long a question outlives its item for those who still hold it; longer than anybody can."""
_ITEM = (
    "id, decision, purpose, policy, team, protocol, identities, payload, panel, rule, escalates, price, level, revision, "
    "drawn, deadline, created, question_seal"
)


def do_review_work(session: Session, work: ReviewWork, claim: Claim | None) -> None:
    """Put a request's questions into the queue, or close them with the request."""
    back = work.request is not None and not _is_waiting(session, work.request)
    request = None if work.request is None else put_request(session, work.request, work.deadline)
    put_items(session, [item for item in work.items if not _went_on(session, item, request, back=back)], request)
    if work.ended and claim is not None:
        close_request(session, claim.key_id, claim.name)


def _is_waiting(session: Session, request: ReviewRequest) -> bool:
    """Return whether a request is in the queue already: its caller has not left, and may have been given up on."""
    sql = "select 1 from review_requests where key_id = ? and name = ? and body is not null"
    return bool(session.rows(sql, request.key_id, request.name))


def _went_on(session: Session, item: NewReview, request: str | None, *, back: bool) -> bool:
    """Return whether a caller's question went on as an audit, so that people are not asked twice.

    What a caller left is theirs again if they come back, with the votes or the verdict it has by then. What was not decided
    by its deadline stays an audit: its request ends without a verdict.
    """
    rows = session.rows(
        "select r.id from reviews r where r.decision = ? and r.purpose = 'audit' and not exists "
        "(select 1 from reviews d where d.decision = r.decision and d.purpose = 'decide')",
        item.decision,
    )
    if item.purpose != "decide" or not rows:
        return False
    if back:
        deadline = None if item.deadline is None else session.now() + item.deadline
        session.run(
            "update reviews set purpose = 'decide', request = ?, due = ?, deadline = ?, revision = revision + 1 "
            "where id = ?",
            *(request, session.now() + item.due, deadline, rows[0][0]),
        )
    return True


def close_request(session: Session, key_id: str, name: str) -> None:
    """Close the items of a request that is complete; those without a verdict have expired."""
    for id, policy, decision, state in _items_of(session, key_id, name):
        if state == "open":
            _end_without_verdict(session, id, "expired")
        elif state == "decided":
            _close(session, "closed", "id = ?", id)
        decided = state in ("decided", "closed")
        event: WebhookEvent = "review.decided" if decided else "review.expired"
        status = "decided" if decided else "expired"
        announce(session, event, {"id": decision, "policy": policy, "status": status})
    session.run("update review_requests set body = null where key_id = ? and name = ?", key_id, name)


def _close(session: Session, state: ReviewState, which: str, *values: Any) -> int:
    """End items; their questions stay for those who still hold them. Return how many there were."""
    return session.run(
        "update reviews set state = ?, closed = ?, payload = case when held > 0 then payload end, "
        f"revision = revision + 1 where {which}",
        *(state, session.now(), *values),
    )


def _items_of(session: Session, key_id: str, name: str) -> Sequence[Any]:
    """Return the items of a request, in an order that is the same for everybody who locks them."""
    return session.rows(
        "select r.id, r.policy, r.decision, r.state from reviews r join review_requests q on r.request = q.id "
        "where q.key_id = ? and q.name = ? order by r.id",
        *(key_id, name),
    )


def _end_without_verdict(session: Session, id: str, state: ReviewState) -> None:
    """End an item that nobody has decided; one that the coin drew stays open as an audit, if somebody may still tell."""
    audited = state != "failed" and session.run(
        "update reviews set purpose = 'audit', request = null, deadline = null, revision = revision + 1 "
        "where id = ? and drawn = 1 and state = 'open' and purpose = 'decide' and not exists "
        "(select 1 from reviews a where a.decision = reviews.decision and a.purpose = 'audit')",
        id,
    )
    if not audited:
        _close(session, state, "id = ? and state = 'open'", id)
        session.run(  # a second opinion needs a first
            "update reviews set state = ?, closed = ?, payload = null, revision = revision + 1 where purpose = 'overlap' "
            "and state = 'open' and decision = (select decision from reviews where id = ?) "
            "and not exists (select 1 from votes v join reviews r on r.id = v.item where r.decision = reviews.decision "
            "and v.late = 0 and v.withdrawn is null)",
            *(state, session.now(), id),
        )


@operation("scan")
def due(session: Session) -> list[ReviewItem]:
    """Return items whose votes have come to count, which somebody skipped, or whose deadline has passed."""
    now = session.now()
    rows = session.rows(
        f"select {_ITEM} from reviews where state = 'open' and ready <= ? union "
        f"select {_ITEM} from reviews where state = 'open' and deadline <= ? limit ?",
        *(now, now, _MOST_DUE),
    )
    return [_due_item(session, row, now) for row in rows]


def _due_item(session: Session, row: Sequence[Any], now: float) -> ReviewItem:
    id, decision, purpose, policy, team, protocol, identities, payload, panel, rule, escalates, price, level, *rest = (
        row
    )
    revision, drawn, deadline, created, seal = rest
    votes = [
        (reviewer, choice, held, level, counts, withdrawn)
        for counts, _, _, reviewer, level, _, choice, held, _, withdrawn in _intact_votes(session, id)
    ]
    standing = [vote for vote in votes if vote[5] is None]
    here = [vote for vote in standing if vote[3] == level]
    later = [counts - now for *_, counts, _ in here if counts > now]
    seen = session.rows("select reviewer from review_seen where decision = ?", decision)
    return ReviewItem(
        id=id,
        decision=decision,
        purpose=purpose,
        policy=policy,
        team=team,
        protocol=protocol,
        identities_sha256=identities,
        question=_readable(session, id, decision, payload, seal),
        panel=panel,
        rule=rule,
        escalates=bool(escalates),
        price=price,
        level=level,
        revision=revision,
        drawn=bool(drawn),
        votes=tuple(_vote(vote) for vote in here if vote[4] <= now),
        earlier=tuple(_vote(vote) for vote in standing if vote[3] < level),
        withdrawn=sum(withdrawn is not None for *_, withdrawn in votes),
        next_count=min(later, default=None),
        seen=frozenset(reviewer for (reviewer,) in seen),
        overdue=deadline is not None and deadline <= now,
        age=max(0.0, now - created),
    )


def _intact_votes(session: Session, item: str) -> Iterator[Sequence[Any]]:
    """Yield the votes on an item that came in time; one that is not what was cast does not count."""
    rows = session.rows(
        f"select seal, counts, {_VOTE} from votes where item = ? and late = 0 order by counts, token", item
    )
    for seal, *row in rows:
        if session.seals.accept(seal, "vote", *row[1:]):
            yield row
        else:
            _log.error("a vote on the review %s is not what was cast, and does not count", item)


def _vote(row: Sequence[Any]) -> ReviewVote:
    reviewer, choice, held, level, _, _ = row
    return ReviewVote(reviewer=reviewer, choice=choice, held=held, level=level)


@operation("read")
def present(session: Session, names: Collection[str]) -> frozenset[str]:
    """Return those of some people who have been seen in the last two minutes."""
    since = session.now() - PRESENT_SECONDS
    rows = session.rows(
        f"select reviewer from presence where seen > ? and reviewer in ({placeholders(names)})", since, *names
    )
    return frozenset(reviewer for (reviewer,) in rows)


@operation("write")
def end(
    session: Session,
    item: ReviewItem,
    end: ReviewEnd,
    *,
    outcome: ReviewOutcome | None = None,
    events: Sequence[Event] = (),
) -> bool:
    """End an item, with its verdict and what is to be recorded of it.

    One that the coin drew and that ends without a verdict stays open as an audit.

    Returns:
        Whether it was still as it was read; otherwise nothing was written.
    """
    if not _end_as_read(session, item, end, outcome):
        return False
    _record(session, events)
    return True


def _record(session: Session, events: Sequence[Event]) -> None:
    """Append events about decisions, which the ledger is told of."""
    session.append([(event, encode(event.body, event.id)) for event in events])
    note_news(session, [event.id for event in events])


def _end_as_read(session: Session, item: ReviewItem, end: ReviewEnd, outcome: ReviewOutcome | None) -> bool:
    if outcome is None:
        held = session.run(
            "update reviews set ready = null, revision = revision + 1 where id = ? and revision = ? and state = 'open'",
            *(item.id, item.revision),
        )
        if held:
            _end_without_verdict(session, item.id, end)
        return held == 1
    text = encode_outcome(outcome)
    changed = session.run(
        "update reviews set state = ?, closed = ?, outcome = ?, verdict_seal = ?, ready = null, revision = revision + 1, "
        "payload = case when held > 0 then payload end "
        "where id = ? and revision = ? and state = 'open'",
        *(end, session.now(), text, session.seals.sign("verdict", item.decision, text), item.id, item.revision),
    )
    return changed == 1


@operation("write")
def keep_open(session: Session, item: ReviewItem, *, needed: int, level: int) -> bool:
    """Ask for so many votes in all at a level; return whether the item was still as it was read."""
    ready = None if item.next_count is None else session.now() + item.next_count
    fresh = ", held = 0, votes = 0" if level > item.level else ""
    changed = session.run(
        f"update reviews set needed = ?, level = ?, ready = ?, revision = revision + 1{fresh} "
        "where id = ? and revision = ? and state = 'open'",
        *(needed, level, ready, item.id, item.revision),
    )
    return changed == 1


@operation("write")
def mark_exhausted(session: Session, team: str, *, members: Collection[str], leads: Collection[str]) -> int:
    """Let open items be looked at again on which nobody of a team is left to vote; return how many there are.

    Who is on a team may change while an item is open, and a second opinion may find that everybody has voted.
    """
    now = session.now()
    return sum(
        session.run(
            "update reviews set ready = ? where state = 'open' and ready is null and team = ? and level = ? and "
            "(select count(*) from review_seen s where s.decision = reviews.decision and s.reviewer in "
            f"({placeholders(names)})) >= ?",
            *(now, team, level, *names, len(names)),
        )
        for level, names in enumerate((set(members), set(leads)))
    )


@operation("read")
def stranded(session: Session, teams: Collection[str]) -> Mapping[str, int]:
    """Return how many items are open for other teams than these, by team."""
    rows = session.rows("select team, count(*) from reviews where state = 'open' group by team order by team")
    return {team: int(count) for team, count in rows if team not in teams}


@operation("read")
def outcomes(session: Session, decisions: Collection[str]) -> Mapping[str, ReviewOutcome]:
    """Return how far callers' questions have come; one that went on as an audit has expired."""
    if not decisions:
        return {}
    rows = session.rows(
        f"select decision, purpose, state, outcome, verdict_seal from reviews "
        f"where decision in ({placeholders(decisions)}) and "
        "purpose in ('decide', 'audit') order by purpose = 'decide'",
        *decisions,
    )
    expired = ReviewOutcome(state="expired")
    return {
        decision: _outcome(session, decision, *rest) if purpose == "decide" else expired
        for decision, purpose, *rest in rows
    }


def _outcome(session: Session, decision: str, state: str, text: str | None, seal: str | None) -> ReviewOutcome:
    if text is not None and not session.seals.accept(seal, "verdict", decision, text):
        _log.error("the verdict on %s is not what people decided, and does not count", decision, extra={"id": decision})
        return ReviewOutcome(state="failed")
    if text is not None:
        return decode_outcome(text, decision)
    return ReviewOutcome(state=state)  # pyright: ignore[reportArgumentType] - as the state machine wrote it


@operation("read")
def decided_requests(session: Session, *, limit: int) -> list[ReviewRequest]:
    """Return requests whose items have all ended, and which nobody is completing."""
    rows = session.rows(
        "select q.key_id, q.name, q.policy, q.route, q.body from review_requests q where q.body is not null and not exists "
        "(select 1 from reviews r where r.request = q.id and r.state = 'open') and not exists "
        "(select 1 from claims c where c.key_id = q.key_id and c.name = q.name and c.lease > ?) order by q.created limit ?",
        *(session.now(), limit),
    )
    return [ReviewRequest(key_id=k, name=n, policy=p, route=r, body=bytes(body)) for k, n, p, r, body in rows]


@operation("write")
def withdraw_request(session: Session, key_id: str, name: str) -> None:
    """Withdraw the open items of a request whose caller left; those that the coin drew stay open as audits."""
    for id, _, _, state in _items_of(session, key_id, name):
        if state == "open":
            _end_without_verdict(session, id, "withdrawn")
    session.run("update review_requests set body = null where key_id = ? and name = ?", key_id, name)


@viewed("read")
def request_of(session: Session, decision: str) -> tuple[ReviewRequest, ReviewOutcome] | None:
    """Return the request in view that a decision belongs to, complete or not, and how far that decision has come."""
    view = session.view
    rows = session.rows(
        "select q.key_id, q.name, q.policy, q.route, q.body from review_requests q join begun b "
        "on b.key_id = q.key_id and b.name = q.name where b.id = ?",
        decision,
    )
    for key_id, name, policy, route, body in rows:
        if not view.reaches([policy]) or view.key_id not in (None, key_id):
            return None
        request = ReviewRequest(key_id=key_id, name=name, policy=policy, route=route, body=bytes(body or b""))
        return request, outcomes(session, [decision]).get(decision, ReviewOutcome(state="expired"))
    return None


_OF_REVIEWS = ("votes", "review_claims")
"""The tables whose rows belong to an item."""


def erase_reviews(session: Session, decision: str) -> None:
    """Withdraw the items of a decision, and remove their questions, the request they belong to, and who answered how."""
    session.run(
        "update review_requests set body = null where id in (select request from reviews where decision = ?)", decision
    )
    session.run(
        "update reviews set payload = null, revision = revision + 1, "
        "closed = coalesce(closed, ?), state = case when state = 'open' then 'withdrawn' else state end where decision = ?",
        *(session.now(), decision),
    )
    for table in _OF_REVIEWS:
        session.run(f"delete from {table} where item in (select id from reviews where decision = ?)", decision)
    session.run("delete from review_seen where decision = ?", decision)
    rows = session.rows(
        "select id, outcome, verdict_seal from reviews where decision = ? and outcome is not null", decision
    )
    for id, text, seal in rows:
        outcome = decode_outcome(text, decision)
        new = encode_outcome(replace(outcome, facts=None if outcome.facts is None else erased(outcome.facts)))
        if session.seals.fits(seal, "verdict", decision, text):  # or its new seal would vouch for what someone changed
            seal = session.seals.sign("verdict", decision, new)
        session.run("update reviews set outcome = ?, verdict_seal = ? where id = ?", new, seal, id)


@operation("maintain")
def forget_reviews(session: Session, *, before: float) -> int:
    """Remove some of the items that ended before a time and whose decision is no longer kept, with who answered how."""
    rows = session.rows(
        "select id, decision, request from reviews where closed < ? and state not in ('open', 'decided') and not exists "
        "(select 1 from events where events.kind = 'decision' and events.id = reviews.decision) limit ?",
        *(before, CHUNK),
    )
    for id, decision, request in rows:
        for table in _OF_REVIEWS:
            session.run(f"delete from {table} where item = ?", id)
        session.run("delete from reviews where id = ?", id)
        session.run(
            "delete from review_seen where decision = ? and not exists "
            "(select 1 from reviews where reviews.decision = review_seen.decision)",
            decision,
        )
        session.run("delete from review_requests where id = ? and body is null", request)
    session.run(  # somebody may have read the record of a decision that nobody was asked about
        "delete from review_seen where at < ? and not exists "
        "(select 1 from reviews where reviews.decision = review_seen.decision) and not exists "
        "(select 1 from events where events.kind = 'decision' and events.id = review_seen.decision)",
        before,
    )
    session.run("delete from presence where seen < ?", before)
    return len(rows)


@operation("write")
def sweep_reviews(session: Session) -> None:
    """Remove the questions of items that ended a while ago, and requests whose time is over, complete or not."""
    now = session.now()
    session.run("update reviews set payload = null where closed < ? and payload is not null", now - _KEPT_SECONDS)
    session.run("delete from review_requests where expires <= ?", now)


@operation("scan")
def backlogs(session: Session, teams: Mapping[str, Collection[str]]) -> list[TeamBacklog]:
    """Return the backlog of every team, each given with the names of its people."""
    now = session.now()
    waiting = "case when purpose = 'decide' then created end"
    open_items = session.rows(
        f"select team, count(*), sum(needed - votes), min({waiting}), min(case when taken is null then {waiting} end) "
        "from reviews where state = 'open' group by team"
    )
    items = {team: rest for team, *rest in open_items}
    seen = session.rows("select reviewer from presence where seen > ?", now - PRESENT_SECONDS)
    there = {reviewer for (reviewer,) in seen}
    cast = session.rows(
        "select r.team, count(*) from votes v join reviews r on r.id = v.item where v.at > ? and v.withdrawn is null "
        "group by r.team",
        now - 3600,
    )
    votes = {team: int(count) for team, count in cast}
    return [
        _backlog(team, items.get(team), now, tuple(sorted(there & set(people))), votes.get(team, 0))
        for team, people in teams.items()
    ]


def _backlog(team: str, items: Sequence[Any] | None, now: float, present: tuple[str, ...], votes: int) -> TeamBacklog:
    count, needed, oldest, untaken = items or (0, 0, None, None)
    return TeamBacklog(
        team=team,
        open=int(count),
        votes_needed=int(needed),
        oldest=None if oldest is None else max(0.0, now - oldest),
        untaken=untaken is not None and now - untaken > UNTAKEN_SECONDS,
        present=present,
        votes_last_hour=votes,
    )


@operation("scan")
def cast_votes(session: Session, *, days: float = 30.0) -> list[CastVote]:
    """Return votes that were not withdrawn, and skips, oldest first."""
    since = session.now() - days * DAY
    votes = session.rows(
        "select v.reviewer, r.team, v.at, v.held from votes v join reviews r on r.id = v.item "
        "where v.at > ? and v.withdrawn is null order by v.at",
        since,
    )
    skips = session.rows("select reviewer, team, at from review_seen where at > ? and why = 'skipped'", since)
    cast = [CastVote(reviewer=who, team=team, at=at, held=held) for who, team, at, held in votes]
    return [*cast, *(CastVote(reviewer=who, team=team, at=at, held=0.0, skipped=True) for who, team, at in skips)]


@operation("scan")
def second_opinions(session: Session) -> list[tuple[str, SecondOpinion]]:
    """Return the first counted vote on every question of the last ninety days with a second opinion, beside that one."""
    rows = session.rows(
        "select o.team, o.menu, o.panel, o.decision, v.reviewer, v.choice, o.outcome from reviews o "
        "join votes v on v.item = o.id and v.withdrawn is null and v.late = 0 "
        "where o.purpose = 'overlap' and o.state = 'closed' and o.closed > ?",
        session.now() - 90 * DAY,
    )
    opinions: list[tuple[str, SecondOpinion]] = []
    for team, menu, _, decision, second, other, text in rows:
        first = session.rows(
            "select v.reviewer, v.choice from votes v join reviews r on r.id = v.item where r.decision = ? and "
            "r.purpose <> 'overlap' and v.withdrawn is null and v.late = 0 and v.level = 0 "
            "order by v.at, v.token limit 1",
            decision,
        )
        size = decode_outcome(text, decision).size if text is not None else 0
        for reviewer, choice in first:
            opinion = SecondOpinion(first=(reviewer, choice), second=(second, other), size=size, menu=menu)
            opinions.append((team, opinion))
    return opinions


@operation("write")
def call(session: Session, team: str, *, every: float = 60.0) -> bool:
    """Tell webhooks that questions wait for a team and nobody is there; return False if that was told lately."""
    now = session.now()
    called = session.run(
        "insert into review_calls (team, called) values (?, ?) on conflict (team) do update set called = excluded.called "
        "where review_calls.called <= ?",
        *(team, now, now - every),
    )
    if called:
        announce(session, "review.waiting", {"team": team, "policy": "", "status": "waiting"})
    return called == 1


# --- Figures ---


@prepared("read")
def open_places() -> SingleQuery[int]:
    """Return how many votes the queue of reviews waits for that nobody is about to give."""
    return SingleQuery("select coalesce(sum(needed - held - votes), 0) from reviews where state = 'open'", (), _number)


@prepared("scan")
def count_open(teams: Collection[str]) -> SingleQuery[int]:
    """Return how many questions these teams have before them."""
    return SingleQuery(
        f"select count(*) from reviews where state = 'open' and team in ({placeholders(teams)})", tuple(teams), _number
    )


def _number(rows: Sequence[Any]) -> int:
    [(number,)] = rows
    return int(number)


@prepared("scan")
def own_votes(reviewer: str, *, since: float) -> SingleQuery[list[float]]:
    """Return for how many seconds a reviewer held each question that they voted on since then."""
    return SingleQuery(
        "select held from votes where at >= ? and reviewer = ? and withdrawn is null",
        (since, reviewer),
        lambda rows: [held for (held,) in rows],
    )


@operation("scan")
def answered_in_time(session: Session, policy: str, wait: float) -> tuple[int, int]:
    """Return how many callers' questions people decided within `wait` seconds, of all that ended in the last day."""
    [(answered, ended)] = session.rows(
        "select coalesce(sum(case when outcome is not null and closed - created <= ? then 1 else 0 end), 0), count(*) "
        "from reviews where closed > ? and policy = ? and purpose = 'decide'",
        *(wait, session.now() - DAY, policy),
    )
    return int(answered), int(ended)


# --- Answers to grade ---
#
# Every chain of events is read in order, and how far it was read is noted in the transaction that deals with what was read.
# What is to be done about a decision follows from its whole record, so neither the order of events nor a crash matters.

_MOST_EVENTS = 2000
_KINDS = "('decision', 'completion', 'feedback', 'audit')"


@operation("scan")
def grading_news(session: Session, policy: str, *, limit: int = 50) -> GradingNews:
    """Return what is new of a policy since its answers were last put into the queue; nothing is noted."""
    seen, read, ids = _marks(session, policy), dict[str, int](), dict[str, None]()
    left = _MOST_EVENTS
    for writer in event_writers(session):
        events = session.rows(
            f"select seq, case when kind in {_KINDS} then id end from events where writer = ? and seq > ? "
            "order by seq limit ?",
            *(writer, seen.get(writer, 0), left),
        )
        left -= len(events)
        decisions = _decisions_of(session, policy, [id for _, id in events if id is not None])
        for seq, id in events:
            if len(ids) >= limit:
                break
            read[writer] = int(seq)
            if id in decisions:
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
        f"select id from events where kind = 'decision' and policy = ? and id in ({placeholders(ids)})",
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


@operation("write")
def put_grading(
    session: Session,
    policy: str,
    news: GradingNews,
    *,
    items: Sequence[NewReview],
    events: Sequence[Event],
    graded: Collection[str],
) -> bool:
    """Deal with news: put answers into the queue, record what is known without people, and note how far that was read.

    Args:
        events: grades that need no person.
        graded: decisions whose answers have grades: what people were to grade of them is withdrawn.

    Returns:
        Whether nobody else had dealt with it; otherwise nothing was written.
    """
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
        _withdraw(session, id, "grade")
    _record(session, events)
    return True


def _withdraw(session: Session, decision: str, purpose: ReviewPurpose) -> None:
    """Withdraw what people were asked for a purpose, unless they decided; and a second opinion, which needs a first."""
    which = "decision = ? and state = 'open' and purpose = ?"
    if _close(session, "withdrawn", which, decision, purpose):
        _close(session, "withdrawn", which, decision, "overlap")


# --- Items of batches ---


@operation("write")
def put_labelling(session: Session, items: Sequence[NewReview], withdrawn: Sequence[str] = ()) -> None:
    """Put items of a batch into the queue, and withdraw those, by id, that nobody needs a label of any more."""
    put_items(session, items)
    for id in withdrawn:
        _withdraw(session, id, "label")


@operation("scan")
def labelling(session: Session, batch: str) -> Mapping[str, ReviewOutcome]:
    """Return how far people have come with the items of a batch, by id, given the batch's fingerprint."""
    rows = session.rows(
        "select decision, state, outcome, verdict_seal from reviews where purpose = 'label' and identities = ?", batch
    )
    return {decision: _outcome(session, decision, *rest) for decision, *rest in rows}


# --- Verification ---


def review_faults(session: Session) -> list[str]:
    """Return which questions, votes and verdicts were changed."""
    if not session.seals:
        return []
    faults: list[str] = []
    for id, decision, payload, outcome, *seals in session.rows(
        "select id, decision, payload, outcome, question_seal, verdict_seal from reviews order by id"
    ):
        for kind, text, seal in zip(("review", "verdict"), (payload, outcome), seals, strict=True):
            missing = text is None and (
                kind == "review" or seal is None
            )  # a question is removed in time, a verdict never
            if not missing and not session.seals.fits(seal, kind, decision, text):
                faults.append(f"the {kind} {id} on decision {decision} is not what was written")
    for seal, *row in session.rows(f"select seal, {_VOTE} from votes order by item, token"):
        if not session.seals.fits(seal, "vote", *row):
            faults.append(f"a vote on the review {row[1]!r:.80} is not what was cast")
    strangers = session.rows("select distinct item from votes where item not in (select id from reviews) order by item")
    faults += [
        f"votes on the review {item!r:.80} belong to another database, or it was removed" for (item,) in strangers
    ]
    return faults


# --- Questions and verdicts as text ---


def encode_review_question(question: ReviewQuestion, id: str) -> str:
    """Return the JSON text of what people are shown of a question."""
    with suppress(UnicodeEncodeError, RecursionError):
        if is_plain(question.context):
            return as_given.encode(question).decode()
    return encode_strictly(document(question), f"the question about {id}", as_given=True)


def encode_outcome(outcome: ReviewOutcome) -> str:
    """Return the JSON text of a verdict."""
    return as_given.encode(outcome).decode()


def decode_outcome(text: str, id: str) -> ReviewOutcome:
    """Read a verdict."""
    return decode(text, ReviewOutcome, f"the verdict on {id}")
