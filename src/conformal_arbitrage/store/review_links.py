"""Operations on links: who is offered one, what it is good for now, and the vote that uses it up.

A link is for one person and one item, ends at a time, and is used once; it dies with its item, and can be revoked. A vote
that is taken back before it counts opens its link again for the next turn, in which forms of earlier turns do nothing. The
table holds a random name for a link, which is worth nothing without the project's secret.

Knows nothing of secrets, addresses or pages.
"""

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from conformal_arbitrage.store.base import Subscriptions
from conformal_arbitrage.store.deliveries import announce
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import decode_review_question
from conformal_arbitrage.store.link_base import LinkState, ReviewLink, SentLink
from conformal_arbitrage.store.review_ends import present_reviewers
from conformal_arbitrage.store.reviews import skip_on, undo, vote_on

_MOST, _MOST_SENT = 50, 500
_LIVE = "l.used is null and l.revoked is null and l.expires > ?"


def offer_links(
    session: Session, team: str, *, members: Collection[str], leads: Collection[str], seconds: float,
    webhooks: Subscriptions,
) -> int:  # fmt: skip
    """Offer people of a team a link to the first item that is due, each one link at a time, while nobody is there."""
    people = {*members, *leads}
    if not people or present_reviewers(session, people):
        return 0
    offered = 0
    for level, names in ((1, leads), (0, members)):
        items = _due(session, team, level) if names else []
        for reviewer in sorted(names) if items else ():
            offered += _offer(session, team, level, reviewer, items, seconds, webhooks)
    return offered


def _due(session: Session, team: str, level: int) -> list[tuple[str, str, str]]:
    """Return the items whose turn has come, in the order in which people would take them: item, decision, policy.

    Whether a caller waits for an item plays no part, or a link would tell that.
    """
    rows = session.rows(
        "select r.id, r.decision, r.policy from reviews r where r.state = 'open' and r.team = ? and r.level = ? "
        "and r.held + r.votes < r.needed and r.due <= ? and r.payload is not null and "
        "(r.purpose <> 'overlap' or not exists (select 1 from reviews m where m.decision = r.decision and "
        "m.purpose <> 'overlap' and m.state = 'open')) order by r.due, r.id limit ?",
        *(team, level, session.now(), _MOST),
    )
    return [(id, decision, policy) for id, decision, policy in rows]


def _offer(
    session: Session, team: str, level: int, reviewer: str, items: list[tuple[str, str, str]], seconds: float,
    webhooks: Subscriptions,
) -> int:  # fmt: skip
    now = session.now()
    live = session.rows(
        "select 1 from review_links l join reviews r on r.id = l.item where l.reviewer = ? and r.state = 'open' and "
        f"r.held + r.votes < r.needed and {_LIVE}",
        *(reviewer, now),
    )
    known = session.rows(
        "select decision from review_seen where reviewer = ? union select r.decision from review_links l "
        "join reviews r on r.id = l.item where l.reviewer = ?",
        *(reviewer, reviewer),
    )
    seen = {decision for (decision,) in known}
    new = [item for item in items if item[1] not in seen][:1]
    for item, _, policy in new if not live else ():
        link, expires = secrets.token_hex(16), int(now + seconds)
        if not session.run(
            "insert into review_links (id, item, reviewer, level, created, expires) values (?, ?, ?, ?, ?, ?) "
            "on conflict (item, reviewer) do nothing",
            *(link, item, reviewer, level, now, expires),
        ):
            continue  # another gateway has offered it
        data = {"team": team, "policy": policy, "reviewer": reviewer, "item": item, "link": link, "expires_at": expires}
        announce(session, webhooks, "review.link", data)
        return 1
    return 0


def find_link(session: Session, id: str) -> ReviewLink | None:
    """Return a link as it is now."""
    rows = session.rows(
        "select l.item, l.reviewer, l.level, l.expires, l.turns, l.used, l.revoked, r.decision, r.policy, r.team, r.state, "
        "r.level, r.needed, r.votes, r.payload from review_links l join reviews r on r.id = l.item where l.id = ?",
        id,
    )
    for item, reviewer, level, expires, turn, used, revoked, decision, policy, team, *now in rows:
        state: LinkState
        if used is not None:
            state = _used_state(session, decision, reviewer)
        elif revoked is not None:
            state = "revoked"
        elif expires <= session.now():
            state = "expired"
        else:
            state = _item_state(session, item, reviewer, level, decision, now)
        alive = state == "used" and revoked is None and expires > session.now()
        return ReviewLink(
            id=id, item=item, reviewer=reviewer, expires=int(expires), state=state, turn=int(turn), policy=policy,
            team=team, undo=alive and _vote_of(session, item, reviewer) is not None,
            question=decode_review_question(now[-1], item) if state == "open" else None,
        )  # fmt: skip
    return None


def _used_state(session: Session, decision: str, reviewer: str) -> LinkState:
    """Return what a person did with their link."""
    rows = session.rows("select why from review_seen where decision = ? and reviewer = ?", decision, reviewer)
    return "skipped" if [why for (why,) in rows] == ["skipped"] else "used"


def _vote_of(session: Session, item: str, reviewer: str) -> str | None:
    """Return the token of somebody's vote on an item, if it does not count yet."""
    rows = session.rows(
        "select token from votes where item = ? and reviewer = ? and withdrawn is null and counts > ?",
        *(item, reviewer, session.now()),
    )
    return str(rows[0][0]) if rows else None


def _item_state(session: Session, item: str, reviewer: str, level: int, decision: str, now: list[Any]) -> LinkState:
    """Return whether an item can be voted on by a person who may hold it; a lease that has ended holds no place."""
    state, current, needed, votes, payload = now
    seen = session.rows("select 1 from review_seen where decision = ? and reviewer = ?", decision, reviewer)
    if state != "open" or current != level or payload is None or seen:
        return "closed"
    others = session.rows(
        "select count(*) from review_claims where item = ? and level = ? and lease > ? and reviewer <> ?",
        *(item, level, session.now(), reviewer),
    )
    return "open" if votes + others[0][0] < needed else "taken"


def vote_by_link(session: Session, id: str, turn: int, choice: int, *, edit: str | None) -> float | None:
    """Vote by a link and use it up; if the item has no place for the vote, the link stays as it is."""
    for item, reviewer, level in _use(session, id, turn):
        counts = vote_on(session, item, reviewer, level, choice, edit=edit)
        if counts is not None:
            return counts
        _reopen(session, id)
    return None


def skip_by_link(session: Session, id: str, turn: int) -> bool:
    """Note that a link's person cannot tell, and use the link up; if the item has no place for them, it stays as it is."""
    for item, reviewer, level in _use(session, id, turn):
        if skip_on(session, item, reviewer, level):
            return True
        _reopen(session, id)
    return False


def _use(session: Session, id: str, turn: int) -> Sequence[Any]:
    """Use a link up; return its item, person and level, if it could be used."""
    now = session.now()
    return session.rows(
        "update review_links set used = ? where id = ? and turns = ? and used is null and revoked is null and expires > ? "
        "returning item, reviewer, level",
        *(now, id, turn, now),
    )


def _reopen(session: Session, id: str) -> None:
    session.run("update review_links set used = null where id = ?", id)


def undo_by_link(session: Session, id: str, turn: int) -> bool:
    """Take back the vote of a link before it counts, and open the link for the next turn."""
    rows = session.rows(
        "update review_links set turns = turns + 1 where id = ? and turns = ? and used is not null and revoked is null "
        "and expires > ? returning item, reviewer",
        *(id, turn, session.now()),
    )
    for item, reviewer in rows:
        token = _vote_of(session, item, reviewer)
        if token is not None and undo(session, token, reviewer) is not None:
            _reopen(session, id)
            return True
        session.run("update review_links set turns = turns - 1 where id = ?", id)
    return False


def sent_links(session: Session) -> list[SentLink]:
    """Return the links that could still be used; nothing in them tells why people are asked."""
    rows = session.rows(
        "select l.id, l.reviewer, r.team, r.policy, l.created, l.expires from review_links l "
        f"join reviews r on r.id = l.item where {_LIVE} and r.state = 'open' order by l.expires, l.id limit ?",
        *(session.now(), _MOST_SENT),
    )
    return [
        SentLink(id=id, reviewer=reviewer, team=team, policy=policy, created=created, expires=expires)
        for id, reviewer, team, policy, created, expires in rows
    ]


def revoke_links(session: Session, only: Mapping[str, str | None], policies: Collection[str] | None) -> int:
    """Revoke links that could still be used, and those whose vote could be taken back, which would open them again."""
    now = session.now()
    columns = {"reviewer": "l.reviewer", "id": "l.id", "team": "r.team"}
    limits = [(f"{columns[name]} = ?", [value]) for name, value in only.items() if value is not None]
    if policies is not None:
        limits.append((f"r.policy in ({', '.join('?' * len(policies))})" if policies else "1 = 0", [*policies]))
    rows = session.rows(
        "update review_links set revoked = ? where id in (select l.id from review_links l join reviews r on r.id = l.item "
        f"where l.revoked is null and l.expires > ?{''.join(f' and {limit}' for limit, _ in limits)}) returning used",
        *(now, now, *(value for _, values in limits for value in values)),
    )
    return sum(used is None for (used,) in rows)
