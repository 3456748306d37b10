"""Links to questions: signed for one item, one person and one time, and offered by webhooks.

What is stored, of a link or of a message that carries one, is a random name; the link itself is made from it with a key of
the project's secret when a message is sent. So neither the database nor a log has anything to vote with.

Knows nothing of pages, or of when a link is used.
"""

import base64
import binascii
import hmac
import time

import msgspec

from conformal_arbitrage.calibration.project_secret import subkey
from conformal_arbitrage.gateway.reviewing import Desk
from conformal_arbitrage.store.base import Delivery, Store
from conformal_arbitrage.store.link_base import ReviewLink

LINK_SECONDS = 3600.0
"""How long a link is good for."""
LINK_PATH = "/console/links"
_ID_BYTES, _TAG_BYTES = 16, 32


class ReviewLinks:
    """Makes and reads links.

    Args:
        secret: the project's.
        public_url: where people reach the console; None if no link is ever sent.
    """

    def __init__(self, secret: bytes, public_url: str | None) -> None:
        self._key = subkey(secret, "review link v1")
        self._root = f"{public_url or ''}{LINK_PATH}"

    def token(self, id: str, item: str, reviewer: str, expires: int) -> str:
        """Return what a link ends with: its name, and a signature over that, the item, the person and the time."""
        tag = hmac.digest(self._key, msgspec.json.encode([id, item, reviewer, expires]), "sha256")
        return base64.urlsafe_b64encode(bytes.fromhex(id) + tag).decode()

    async def opened(self, store: Store, token: str) -> ReviewLink | None:
        """Return the link of a token; None if nobody here signed it, or it was for another item, person or time."""
        try:
            content = base64.b64decode(token, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        if len(content) != _ID_BYTES + _TAG_BYTES:
            return None
        link = await store.review_link(content[:_ID_BYTES].hex())
        if link is None:
            return None
        expected = self.token(link.id, link.item, link.reviewer, link.expires)
        return link if hmac.compare_digest(expected.encode(), token.encode()) else None

    def message(self, delivery: Delivery) -> bytes:
        """Return the body of a message as it is sent: one that offers a link gets its address."""
        if delivery.event != "review.link":
            return delivery.body.encode()
        document = msgspec.json.decode(delivery.body, type=dict[str, object])
        data = msgspec.convert(document["data"], dict[str, str | int])
        id, item = str(data.pop("link")), str(data.pop("item"))
        token = self.token(id, item, str(data["reviewer"]), int(data["expires_at"]))
        return msgspec.json.encode({**document, "data": {**data, "url": f"{self._root}/{token}"}})


async def people_with_keys(store: Store, desk: Desk, team: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the members and leads of a team who have a valid key, by which they are known."""
    one, known = desk.teams[team], await _known(store)
    return tuple(name for name in one.members if name in known), tuple(name for name in one.leads if name in known)


async def may_vote(store: Store, desk: Desk, link: ReviewLink) -> bool:
    """Return whether a link's person still has a valid key, and is still on the team."""
    team = desk.teams.get(link.team)
    return team is not None and link.reviewer in (*team.members, *team.leads) and link.reviewer in await _known(store)


async def _known(store: Store) -> frozenset[str]:
    """Return the labels of keys that are good for reviewing today."""
    now = time.time()
    return frozenset(
        key.label
        for key in await store.keys()
        if key.scope in ("review", "admin")
        and key.revoked is None
        and key.policies is None
        and (key.expires is None or key.expires > now)
    )


async def offer_to_teams(store: Store, desk: Desk) -> None:
    """Offer links to the people of every team of which nobody is there."""
    for team in desk.teams:
        members, leads = await people_with_keys(store, desk, team)
        await store.offer_links(team, members=members, leads=leads, seconds=LINK_SECONDS)
