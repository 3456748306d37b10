"""Operations on links: who is offered one, what it is good for now, and the vote that uses it up.

A link is for one person and one item, ends at a time, and is used once; it dies with its item, and can be revoked. The table
holds a random name for it, which is worth nothing without the project's secret.

Knows nothing of secrets, addresses or pages.
"""

import secrets
from collections.abc import Collection
from typing import Any

from conformal_arbitrage.store.base import Subscriptions
from conformal_arbitrage.store.deliveries import announce
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import decode_review_question
from conformal_arbitrage.store.review_base import LinkState, ReviewLink
from conformal_arbitrage.store.review_ends import present_reviewers
from conformal_arbitrage.store.reviews import vote_on

KINDS = ("choose", "approve")
"""What can be answered on the page of a link."""
_MOST = 50
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
        "select r.id, r.decision, r.policy, r.payload from reviews r where r.state = 'open' and r.team = ? and r.level = ? "
        "and r.held + r.votes < r.needed and r.due <= ? and r.payload is not null and "
        "(r.purpose <> 'overlap' or not exists (select 1 from reviews m where m.decision = r.decision and "
        "m.purpose <> 'overlap' and m.state = 'open')) order by r.due, r.id limit ?",
        *(team, level, session.now(), _MOST),
    )
    return [
        (id, decision, policy)
        for id, decision, policy, payload in rows
        if decode_review_question(payload, id).kind in KINDS
    ]


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
        "select l.item, l.reviewer, l.level, l.expires, l.used, l.revoked, r.decision, r.policy, r.team, r.state, r.level, "
        "r.needed, r.votes, r.payload from review_links l join reviews r on r.id = l.item where l.id = ?",
        id,
    )
    for item, reviewer, level, expires, used, revoked, decision, policy, team, *now in rows:
        state: LinkState = "used" if used is not None else "revoked" if revoked is not None else "open"
        if state == "open" and expires <= session.now():
            state = "expired"
        if state == "open":
            state = _item_state(session, item, reviewer, level, decision, now)
        question = decode_review_question(now[-1], item) if state == "open" else None
        return ReviewLink(
            id=id, item=item, reviewer=reviewer, expires=int(expires), state=state, policy=policy, team=team,
            question=question,
        )  # fmt: skip
    return None


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


def vote_by_link(session: Session, id: str, choice: int, *, edit: str | None) -> bool:
    """Vote by a link and use it up; if the item has no place for the vote, the link stays as it is."""
    now = session.now()
    rows = session.rows(
        "update review_links set used = ? where id = ? and used is null and revoked is null and expires > ? "
        "returning item, reviewer, level",
        *(now, id, now),
    )
    for item, reviewer, level in rows:
        if vote_on(session, item, reviewer, level, choice, edit=edit) is not None:
            return True
        session.run("update review_links set used = null where id = ?", id)
    return False


def revoke_links(session: Session, reviewer: str | None) -> int:
    """Revoke links that could still be used."""
    now = session.now()
    return session.run(
        "update review_links set revoked = ? where used is null and revoked is null and expires > ? "
        "and reviewer = coalesce(?, reviewer)",
        *(now, now, reviewer),
    )
