"""SQLReviews: the review queue over SQL, as a part of a store; subclasses provide transactions.

Knows nothing of SQLite, PostgreSQL or threads.
"""

from collections.abc import Collection, Mapping, Sequence

from conformal_arbitrage.monitoring.people import SecondOpinion
from conformal_arbitrage.store import grading, review_ends, reviews
from conformal_arbitrage.store.base import Subscriptions
from conformal_arbitrage.store.dialect import Session
from conformal_arbitrage.store.encoding import decode_review_question, encode
from conformal_arbitrage.store.ledger import note_news
from conformal_arbitrage.store.record import Event
from conformal_arbitrage.store.review_base import (
    CastVote,
    GradingNews,
    HeldReview,
    NewReview,
    ReviewEnd,
    ReviewItem,
    ReviewOutcome,
    ReviewQuestion,
    ReviewRequest,
    TeamBacklog,
)
from conformal_arbitrage.store.sql import append
from conformal_arbitrage.store.sql_jobs import SQLJobs


class SQLReviews(SQLJobs):
    """The operations of the review queue as jobs on a session.

    Args:
        webhooks: whom to tell of what.
    """

    def __init__(self, webhooks: Subscriptions | None) -> None:
        self._webhooks: Subscriptions = webhooks or {}

    async def put_reviews(self, items: Sequence[NewReview]) -> None:
        """See `ReviewStore.put_reviews`."""
        await self._write(lambda session: reviews.put_audits(session, items))

    async def grading_news(self, policy: str, *, limit: int = 50) -> GradingNews:
        """See `ReviewStore.grading_news`."""
        return await self._scan(lambda session: grading.grading_news(session, policy, limit=limit))

    async def put_grading(
        self,
        policy: str,
        news: GradingNews,
        *,
        items: Sequence[NewReview],
        events: Sequence[Event],
        graded: Collection[str],
    ) -> bool:
        """See `ReviewStore.put_grading`."""
        texts = [(event, encode(event.body, event.id)) for event in events]

        def put(session: Session) -> bool:
            if not grading.put_grading(session, policy, news, items=items, graded=graded):
                return False
            append(session, texts)
            note_news(session, [event.id for event in events])
            return True

        return await self._write(put)

    async def take_review(
        self, reviewer: str, *, teams: Collection[str], leads: Collection[str], lease: float | None = None
    ) -> HeldReview | None:
        """See `ReviewStore.take_review`."""
        return await self._write(lambda session: reviews.take(session, reviewer, teams=teams, leads=leads, lease=lease))

    async def renew_review(self, token: str, reviewer: str) -> bool:
        """See `ReviewStore.renew_review`."""
        return await self._write(lambda session: reviews.renew_hold(session, token, reviewer))

    async def give_back_review(self, token: str, reviewer: str) -> None:
        """See `ReviewStore.give_back_review`."""
        await self._write(lambda session: reviews.give_back(session, token, reviewer))

    async def skip_review(self, token: str, reviewer: str) -> bool:
        """See `ReviewStore.skip_review`."""
        return await self._write(lambda session: reviews.skip(session, token, reviewer))

    async def held_question(self, token: str, reviewer: str) -> ReviewQuestion | None:
        """See `ReviewStore.held_question`."""
        rows = await self._read(reviews.held_question(token, reviewer))
        return decode_review_question(rows[0][1], rows[0][0]) if rows else None

    async def vote_review(self, token: str, reviewer: str, choice: int, *, active: float | None = None) -> float | None:
        """See `ReviewStore.vote_review`."""
        return await self._write(lambda session: reviews.vote(session, token, reviewer, choice, active=active))

    async def undo_review(self, token: str, reviewer: str) -> HeldReview | None:
        """See `ReviewStore.undo_review`."""
        return await self._write(lambda session: reviews.undo(session, token, reviewer))

    async def due_reviews(self, *, limit: int = 50) -> list[ReviewItem]:
        """See `ReviewStore.due_reviews`."""
        return await self._scan(lambda session: review_ends.due_reviews(session, limit=limit))

    async def end_review(
        self, item: ReviewItem, end: ReviewEnd, *, outcome: ReviewOutcome | None = None, events: Sequence[Event] = ()
    ) -> bool:
        """See `ReviewStore.end_review`."""
        texts = [(event, encode(event.body, event.id)) for event in events]

        def end_item(session: Session) -> bool:
            if not review_ends.end_review(session, item, end, outcome):
                return False
            append(session, texts)
            note_news(session, [event.id for event in events])
            return True

        return await self._write(end_item)

    async def keep_reviewing(self, item: ReviewItem, *, needed: int, level: int) -> bool:
        """See `ReviewStore.keep_reviewing`."""
        return await self._write(lambda session: review_ends.keep_reviewing(session, item, needed=needed, level=level))

    async def mark_exhausted(self, team: str, *, members: Collection[str], leads: Collection[str]) -> int:
        """See `ReviewStore.mark_exhausted`."""
        return await self._write(lambda session: review_ends.mark_exhausted(session, team, members, leads))

    async def stranded_reviews(self, teams: Collection[str]) -> Mapping[str, int]:
        """See `ReviewStore.stranded_reviews`."""
        return await self._read(lambda session: review_ends.stranded_reviews(session, teams))

    async def review_outcomes(self, decisions: Collection[str]) -> Mapping[str, ReviewOutcome]:
        """See `ReviewStore.review_outcomes`."""
        return await self._read(lambda session: review_ends.review_outcomes(session, decisions))

    async def decided_requests(self, *, limit: int) -> list[ReviewRequest]:
        """See `ReviewStore.decided_requests`."""
        return await self._read(lambda session: review_ends.decided_requests(session, limit=limit))

    async def withdraw_request(self, key_id: str, name: str) -> None:
        """See `ReviewStore.withdraw_request`."""
        await self._write(lambda session: review_ends.withdraw_request(session, key_id, name))

    async def review_request(self, decision: str) -> tuple[ReviewRequest, ReviewOutcome] | None:
        """See `ReviewStore.review_request`."""
        return await self._read(lambda session: review_ends.review_request(session, decision))

    async def under_review(self, decisions: Collection[str]) -> frozenset[str]:
        """See `ReviewStore.under_review`."""
        rows = await self._read(reviews.under_review(decisions)) if decisions else ()
        return frozenset(decision for (decision,) in rows)

    async def note_reader(self, decision: str, reviewer: str) -> None:
        """See `ReviewStore.note_reader`."""
        await self._write(lambda session: reviews.note_reader(session, decision, reviewer))

    async def note_presence(self, reviewer: str) -> None:
        """See `ReviewStore.note_presence`."""
        await self._write(lambda session: reviews.note_presence(session, reviewer))

    async def present_reviewers(self, names: Collection[str]) -> frozenset[str]:
        """See `ReviewStore.present_reviewers`."""
        return await self._read(lambda session: review_ends.present_reviewers(session, names))

    async def team_backlogs(self, teams: Mapping[str, Collection[str]]) -> list[TeamBacklog]:
        """See `ReviewStore.team_backlogs`."""
        return await self._scan(lambda session: review_ends.team_backlogs(session, teams))

    async def cast_votes(self, *, days: float = 30.0) -> list[CastVote]:
        """See `ReviewStore.cast_votes`."""
        return await self._scan(lambda session: review_ends.cast_votes(session, days=days))

    async def second_opinions(self, *, days: float = 90.0) -> list[tuple[str, SecondOpinion]]:
        """See `ReviewStore.second_opinions`."""
        return await self._scan(lambda session: review_ends.second_opinions(session, days=days))

    async def call_reviewers(self, team: str, policy: str = "", *, every: float = 60.0) -> bool:
        """See `ReviewStore.call_reviewers`."""
        return await self._write(
            lambda session: review_ends.call_reviewers(session, team, policy, every=every, webhooks=self._webhooks)
        )
