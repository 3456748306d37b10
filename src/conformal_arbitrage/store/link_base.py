"""Links by which people vote without signing in, as a protocol.

A link is for one person and one item of the review queue, ends at a time, and is used once.

Knows nothing of SQL, of how a link is signed, or of pages.
"""

from collections.abc import Collection
from typing import Literal, Protocol

from msgspec import Struct

from conformal_arbitrage.store.review_base import ReviewQuestion

LinkState = Literal["open", "used", "skipped", "revoked", "expired", "closed", "taken"]


class ReviewLink(Struct, frozen=True, kw_only=True):
    """A link by which one person can vote on one item, once.

    Attributes:
        id: a random name.
        item: what it is about.
        reviewer: whose it is.
        expires: when it ends, in seconds since 1970.
        state: whether it can be used now; "used" once they have voted with it, "skipped" once they said that they cannot
            tell, "closed" if its item has ended or is not for them any more, "taken" if everybody who is needed has it.
        turn: how often a vote was taken back; a form of an earlier turn does nothing.
        undo: the vote that was given with it does not count yet.
        policy, team: of the item.
        question: what they are shown; None if it cannot be used.
    """

    id: str
    item: str
    reviewer: str
    expires: int
    state: LinkState
    turn: int = 0
    undo: bool = False
    policy: str = ""
    team: str = ""
    question: ReviewQuestion | None = None


class SentLink(Struct, frozen=True, kw_only=True):
    """A link that could still be used, without what it is about; times are in seconds since 1970."""

    id: str
    reviewer: str
    team: str
    policy: str
    created: float
    expires: float


class LinkStore(Protocol):
    """The part of a store that is links to items of the review queue."""

    async def offer_links(self, team: str, *, members: Collection[str], leads: Collection[str], seconds: float) -> int:
        """Tell webhooks of links for people of a team, if items are due and nobody is there; return how many.

        Everybody has one link at a time. Which item it is for depends on the order of the queue alone.

        Args:
            team: whose items.
            members: who may vote on them.
            leads: who decides what a panel could not.
            seconds: how long a link is good for.
        """
        ...

    async def review_link(self, id: str) -> ReviewLink | None:
        """Return a link as it is now, without changing anything; None if there is none of that name."""
        ...

    async def vote_by_link(self, id: str, choice: int, *, turn: int = 0, edit: str | None = None) -> float | None:
        """Vote by a link, which is used up by that; return the seconds until the vote counts, None if it cannot be used."""
        ...

    async def skip_by_link(self, id: str, *, turn: int = 0) -> bool:
        """Leave the item of a link to someone else, which uses the link up; return False if it cannot be used."""
        ...

    async def undo_by_link(self, id: str, *, turn: int = 0) -> bool:
        """Take back the vote of a link, which can be used again; return False if the vote counts, or there is none."""
        ...

    async def sent_links(self) -> list[SentLink]:
        """Return the links that could still be used, those that end first at the top."""
        ...

    async def revoke_links(
        self,
        reviewer: str | None = None,
        *,
        id: str | None = None,
        team: str | None = None,
        policies: Collection[str] | None = None,
    ) -> int:
        """Revoke links, those whose vote can still be taken back too; return how many could still be used.

        Args:
            reviewer: of this person only.
            id: this one only.
            team: to questions of this team only.
            policies: and of these policies only.
        """
        ...
