"""Operations on the review queue by gateways: what is due, verdicts, complete requests, and figures.

An item ends once: whoever ends it names the revision that the end was based on. What the audit coin drew and nobody has
decided stays open as an audit, since leaving such rows out would select the others by their difficulty.

Knows nothing of threads, or of how a verdict is reached.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from conformal_arbitrage.monitoring.people import SecondOpinion
from conformal_arbitrage.store.base import Claim, Subscriptions, WebhookEvent
from conformal_arbitrage.store.deliveries import announce
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import decode_outcome, decode_review_question, encode_outcome
from conformal_arbitrage.store.record import ReviewVote
from conformal_arbitrage.store.review_base import (
    CastVote,
    NewReview,
    ReviewEnd,
    ReviewItem,
    ReviewOutcome,
    ReviewRequest,
    ReviewWork,
    TeamBacklog,
)
from conformal_arbitrage.store.reviews import put_items, put_request
from conformal_arbitrage.types import DAY

PRESENT_SECONDS = 120.0
"""Somebody seen within so many seconds is there."""
UNTAKEN_SECONDS = 30.0
_KEPT_SECONDS = 1500.0
"""How long a question outlives its item for those who still hold it; longer than anybody can."""
_ITEM = (
    "id, decision, purpose, policy, team, protocol, identities, payload, panel, rule, escalates, price, level, revision, "
    "drawn, deadline, created"
)


def do_review_work(session: Session, work: ReviewWork, claim: Claim | None, webhooks: Subscriptions) -> None:
    """Put a request's questions into the queue, or close them with the request."""
    back = work.request is not None and not _is_waiting(session, work.request)
    request = None if work.request is None else put_request(session, work.request, work.deadline)
    put_items(session, [one for one in work.items if not _went_on(session, one, request, back=back)], request)
    if work.ended and claim is not None:
        close_request(session, claim.key_id, claim.name, webhooks)


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


def close_request(session: Session, key_id: str, name: str, webhooks: Subscriptions) -> None:
    """Close the items of a request that is complete; those without a verdict have expired."""
    for id, policy, decision, state in _items_of(session, key_id, name):
        if state == "open":
            _end_without_verdict(session, id, "expired")
        elif state == "decided":
            session.run(
                "update reviews set state = 'closed', closed = ?, payload = case when held > 0 then payload end, "
                "revision = revision + 1 where id = ?",
                *(session.now(), id),
            )
        decided = state in ("decided", "closed")
        event: WebhookEvent = "review.decided" if decided else "review.expired"
        status = "decided" if decided else "expired"
        announce(session, webhooks, event, {"id": decision, "policy": policy, "status": status})
    session.run("update review_requests set body = null where key_id = ? and name = ?", key_id, name)


def _items_of(session: Session, key_id: str, name: str) -> Sequence[Any]:
    """Return the items of a request, in an order that is the same for everybody who locks them."""
    return session.rows(
        "select r.id, r.policy, r.decision, r.state from reviews r join review_requests q on r.request = q.id "
        "where q.key_id = ? and q.name = ? order by r.id",
        *(key_id, name),
    )


def _end_without_verdict(session: Session, id: str, state: str) -> None:
    """End an item that nobody has decided; one that the coin drew stays open as an audit, if somebody may still tell."""
    audited = state != "failed" and session.run(
        "update reviews set purpose = 'audit', request = null, deadline = null, revision = revision + 1 "
        "where id = ? and drawn = 1 and state = 'open' and purpose = 'decide' and not exists "
        "(select 1 from reviews a where a.decision = reviews.decision and a.purpose = 'audit')",
        id,
    )
    if not audited:
        session.run(
            "update reviews set state = ?, closed = ?, "
            "payload = case when held > 0 then payload end, "
            "revision = revision + 1 where id = ? and state = 'open'",
            *(state, session.now(), id),
        )
        session.run(  # a second opinion needs a first
            "update reviews set state = ?, closed = ?, payload = null, revision = revision + 1 where purpose = 'overlap' "
            "and state = 'open' and decision = (select decision from reviews where id = ?) "
            "and not exists (select 1 from votes v join reviews r on r.id = v.item where r.decision = reviews.decision "
            "and v.late = 0 and v.withdrawn is null)",
            *(state, session.now(), id),
        )


def due_reviews(session: Session, *, limit: int) -> list[ReviewItem]:
    """Return items for which something is due."""
    now = session.now()
    rows = session.rows(
        f"select {_ITEM} from reviews where state = 'open' and ready <= ? union "
        f"select {_ITEM} from reviews where state = 'open' and deadline <= ? limit ?",
        *(now, now, limit),
    )
    return [_item(session, row, now) for row in rows]


def _item(session: Session, row: Sequence[Any], now: float) -> ReviewItem:
    id, decision, purpose, policy, team, protocol, identities, payload, panel, rule, escalates, price, level, *rest = (
        row
    )
    revision, drawn, deadline, created = rest
    votes = session.rows(
        "select reviewer, choice, held, level, counts, withdrawn from votes where item = ? and late = 0 "
        "order by counts, token",
        id,
    )
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
        question=None if payload is None else decode_review_question(payload, id),
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


def _vote(row: Sequence[Any]) -> ReviewVote:
    reviewer, choice, held, level, _, _ = row
    return ReviewVote(reviewer=reviewer, choice=choice, held=held, level=level)


def present_reviewers(session: Session, names: Collection[str]) -> frozenset[str]:
    """Return those of some people who have been seen lately."""
    marks, since = ", ".join("?" * len(names)), session.now() - PRESENT_SECONDS
    rows = session.rows(f"select reviewer from presence where seen > ? and reviewer in ({marks})", since, *names)
    return frozenset(reviewer for (reviewer,) in rows)


def end_review(session: Session, item: ReviewItem, end: ReviewEnd, outcome: ReviewOutcome | None) -> bool:
    """End an item as it was read; return False if it has changed since."""
    if outcome is None:
        held = session.run(
            "update reviews set ready = null, revision = revision + 1 where id = ? and revision = ? and state = 'open'",
            *(item.id, item.revision),
        )
        if held:
            _end_without_verdict(session, item.id, end)
        return held == 1
    changed = session.run(
        "update reviews set state = ?, closed = ?, outcome = ?, ready = null, revision = revision + 1, "
        "payload = case when held > 0 then payload end "
        "where id = ? and revision = ? and state = 'open'",
        *(end, session.now(), encode_outcome(outcome), item.id, item.revision),
    )
    return changed == 1


def keep_reviewing(session: Session, item: ReviewItem, *, needed: int, level: int) -> bool:
    """Ask for further votes; those of an earlier level do not count at the next."""
    ready = None if item.next_count is None else session.now() + item.next_count
    fresh = ", held = 0, votes = 0" if level > item.level else ""
    changed = session.run(
        f"update reviews set needed = ?, level = ?, ready = ?, revision = revision + 1{fresh} "
        "where id = ? and revision = ? and state = 'open'",
        *(needed, level, ready, item.id, item.revision),
    )
    return changed == 1


def mark_exhausted(session: Session, team: str, members: Collection[str], leads: Collection[str]) -> int:
    """Mark open items for a look whose level has nobody left who has not seen them."""
    now = session.now()
    return sum(
        session.run(
            "update reviews set ready = ? where state = 'open' and ready is null and team = ? and level = ? and "
            "(select count(*) from review_seen s where s.decision = reviews.decision and s.reviewer in "
            f"({', '.join('?' * len(names)) or 'null'})) >= ?",
            *(now, team, level, *names, len(names)),
        )
        for level, names in enumerate((set(members), set(leads)))
    )


def stranded_reviews(session: Session, teams: Collection[str]) -> dict[str, int]:
    """Return how many items are open for other teams than these."""
    rows = session.rows("select team, count(*) from reviews where state = 'open' group by team order by team")
    return {team: int(count) for team, count in rows if team not in teams}


def review_outcomes(session: Session, decisions: Collection[str]) -> dict[str, ReviewOutcome]:
    """Return how far callers' questions have come; one that went on as an audit has expired."""
    if not decisions:
        return {}
    marks = ", ".join("?" * len(decisions))
    rows = session.rows(
        f"select decision, purpose, state, outcome from reviews where decision in ({marks}) and "
        "purpose in ('decide', 'audit') order by purpose = 'decide'",
        *decisions,
    )
    return {decision: _outcome(decision, *rest) for decision, *rest in rows}


def _outcome(decision: str, purpose: str, state: str, text: str | None) -> ReviewOutcome:
    if purpose != "decide":
        return ReviewOutcome(state="expired")
    if text is not None:
        return decode_outcome(text, decision)
    return ReviewOutcome(state=state)  # pyright: ignore[reportArgumentType] - as the state machine wrote it


def decided_requests(session: Session, *, limit: int) -> list[ReviewRequest]:
    """Return requests that wait for nothing but to be completed."""
    rows = session.rows(
        "select q.key_id, q.name, q.policy, q.route, q.body from review_requests q where q.body is not null and not exists "
        "(select 1 from reviews r where r.request = q.id and r.state = 'open') and not exists "
        "(select 1 from claims c where c.key_id = q.key_id and c.name = q.name and c.lease > ?) order by q.created limit ?",
        *(session.now(), limit),
    )
    return [ReviewRequest(key_id=k, name=n, policy=p, route=r, body=bytes(body)) for k, n, p, r, body in rows]


def withdraw_request(session: Session, key_id: str, name: str) -> None:
    """Withdraw the open items of a request whose caller has left for good."""
    for id, _, _, state in _items_of(session, key_id, name):
        if state == "open":
            _end_without_verdict(session, id, "withdrawn")
    session.run("update review_requests set body = null where key_id = ? and name = ?", key_id, name)


def review_request(session: Session, decision: str) -> tuple[ReviewRequest, ReviewOutcome] | None:
    """Return the request that a decision was made for; its body is empty once it is complete."""
    rows = session.rows(
        "select q.key_id, q.name, q.policy, q.route, q.body from review_requests q join begun b "
        "on b.key_id = q.key_id and b.name = q.name where b.id = ?",
        decision,
    )
    for key_id, name, policy, route, body in rows:
        request = ReviewRequest(key_id=key_id, name=name, policy=policy, route=route, body=bytes(body or b""))
        return request, review_outcomes(session, [decision]).get(decision, ReviewOutcome(state="expired"))
    return None


def erase_reviews(session: Session, decision: str) -> None:
    """Withdraw the items of a decision, and remove their questions and the request they belong to."""
    session.run(
        "update review_requests set body = null where id in (select request from reviews where decision = ?)", decision
    )
    session.run(
        "update reviews set payload = null, revision = revision + 1, "
        "state = case when state = 'open' then 'withdrawn' else state end where decision = ?",
        decision,
    )


def sweep_reviews(session: Session) -> None:
    """Remove the questions of items that ended a while ago, and requests whose time is over, complete or not."""
    now = session.now()
    session.run("update reviews set payload = null where closed < ? and payload is not null", now - _KEPT_SECONDS)
    session.run("delete from review_requests where expires <= ?", now)


def team_backlogs(session: Session, teams: Mapping[str, Collection[str]]) -> list[TeamBacklog]:
    """Return the backlog of every team."""
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


def cast_votes(session: Session, *, days: float) -> list[CastVote]:
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


def second_opinions(session: Session, *, days: float) -> list[tuple[str, SecondOpinion]]:
    """Return the first counted vote on every question with a second opinion, beside that one."""
    rows = session.rows(
        "select o.team, o.menu, o.panel, o.decision, v.reviewer, v.choice, o.outcome from reviews o "
        "join votes v on v.item = o.id and v.withdrawn is null and v.late = 0 "
        "where o.purpose = 'overlap' and o.state = 'closed' and o.closed > ?",
        session.now() - days * DAY,
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


def call_reviewers(session: Session, team: str, policy: str, *, every: float, webhooks: Subscriptions) -> bool:
    """Queue messages that questions wait for a team, unless that was done a moment ago."""
    now = session.now()
    called = session.run(
        "insert into review_calls (team, called) values (?, ?) on conflict (team) do update set called = excluded.called "
        "where review_calls.called <= ?",
        *(team, now, now - every),
    )
    if called:
        announce(session, webhooks, "review.waiting", {"team": team, "policy": policy, "status": "waiting"})
    return called == 1
