"""The review page: one question at a time, by forms; scripts only add keys and renew the lease.

What a reviewer sees is a function of the question alone: nothing here knows why it was asked, for whom, or since when.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from starlette.responses import Response

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.console.render import Pages, Visit, Visitor, changes, sentence
from conformal_arbitrage.gateway.policies import PolicyTable
from conformal_arbitrage.gateway.review_queue import Assignment, Reviewer, ReviewQueue, Vote, team_figures
from conformal_arbitrage.store import reviews
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import DAY

_LONGEST_TOKEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewerDay:
    """What a reviewer did since midnight, in UTC: votes, and the median of the seconds they took."""

    done: int
    median: float | None


class ReviewPage:
    """The routes under /console/review, and /console/team."""

    def __init__(self, pages: Pages, store: Store, queue: ReviewQueue, policies: PolicyTable) -> None:
        self._pages = pages
        self._store = store
        self._queue = queue
        self._policies = policies

    async def review(self, visit: Visit) -> Response:
        """GET /console/review: a way in; taking a question is a form, since it changes who holds it."""
        try:
            reviewer = self._reviewer(visit.who)
        except RequestError as error:
            return await self._page(visit, None, state="none", why=sentence(str(error)))
        return await self._page(visit, reviewer, state="ready")

    async def act(self, visit: Visit) -> Response:
        """POST /console/review: vote, skip, undo, pause or begin; the reply is the next question."""
        reviewer, token = self._reviewer(visit.who), visit.form.get("token", "")[:_LONGEST_TOKEN]
        act = visit.form.get("act", "next")
        if act == "undo":
            item = await self._queue.undo(reviewer, token)
            said = "Taken back." if item is not None else "That answer counts already."
            return await self._page(visit, reviewer, item=item or await self._queue.take(reviewer), said=said)
        if act == "pause":
            await self._queue.give_back(reviewer, token)
            return await self._page(visit, reviewer, state="paused")
        said, undo = "", ""
        if act == "vote":
            said, undo = await self._vote(visit, reviewer, token)
        elif act == "skip":
            said = "Left to someone else." if await self._queue.skip(reviewer, token) else _GONE
        item = await self._queue.take(reviewer)
        return await self._page(visit, reviewer, item=item, state="empty", said=said, undo=undo)

    async def _vote(self, visit: Visit, reviewer: Reviewer, token: str) -> tuple[str, str]:
        """Vote; return what to say, and the token to take the vote back with."""
        active = _active(visit.form.get("active", ""))
        counts = await self._queue.vote(reviewer, token, vote_of(visit.form), active)
        if counts is None:
            return _GONE, ""
        return "Recorded.", token if counts > 0 else ""

    async def renew(self, visit: Visit) -> Response:
        """POST /console/review/renew: the question is being worked on."""
        reviewer = self._reviewer(visit.who)
        held = await self._queue.renew(reviewer, visit.form.get("token", "")[:_LONGEST_TOKEN])
        return Response(status_code=204 if held else 409)

    async def give_back(self, visit: Visit) -> Response:
        """POST /console/review/return: the page was left."""
        await self._queue.give_back(self._reviewer(visit.who), visit.form.get("token", "")[:_LONGEST_TOKEN])
        return Response(status_code=204)

    async def team(self, visit: Visit) -> Response:
        """GET /console/team: what every team has before it, and how it does."""
        teams = await team_figures(self._store, self._queue, visit.who.caller)
        since = await changes(self._store, visit)
        answers: dict[str, tuple[int, int]] = {}
        if visit.who.is_admin:  # a question that is counted there was a caller's
            answers = {team.backlog.team: await self._answered_in_time(team.backlog.team) for team in teams}
        return self._pages.page("team.html", visit, since=since, teams=teams, answers=answers)

    async def _answered_in_time(self, team: str) -> tuple[int, int]:
        """Return how many callers' questions of the last day a team decided within `wait`, and how many there were."""
        answered = ended = 0
        for live in self._policies.all():
            terms = live.pair.review
            if terms is not None and terms.name == team:
                in_time, total = await self._store.run(reviews.answered_in_time, live.name, terms.settings.wait)
                answered, ended = answered + in_time, ended + total
        return answered, ended

    def _reviewer(self, visitor: Visitor) -> Reviewer:
        return self._queue.reviewer(visitor.caller)

    async def _page(
        self, visit: Visit, reviewer: Reviewer | None, *, item: Assignment | None = None, state: str = "empty",
        said: str = "", undo: str = "", why: str = "",
    ) -> Response:  # fmt: skip
        values: dict[str, Any] = {"item": item, "state": state, "said": said, "undo": undo, "why": why}
        since = await changes(self._store, visit)
        waiting, day = 0, ReviewerDay(done=0, median=None)
        if reviewer is not None:
            waiting = await self._store.run(reviews.count_open, {*reviewer.teams, *reviewer.leads})
            day = await self._day(reviewer.name)
        return self._pages.page("review.html", visit, since=since, waiting=waiting, day=day, **values)

    async def _day(self, reviewer: str) -> ReviewerDay:
        now = time.time()
        held = await self._store.run(reviews.own_votes, reviewer, since=now - now % DAY)
        return ReviewerDay(done=len(held), median=median(held) if held else None)


_GONE = "That question was given to someone else meanwhile."


def vote_of(form: Mapping[str, str]) -> Vote:
    """Return what someone chose, or their grades in the order shown."""
    try:
        grades = tuple(float(form[name]) for name in ("grade-1", "grade-2") if name in form)
        return grades or int(form.get("choice", ""))
    except ValueError as error:
        raise RequestError("Choose one of the options first, or grade each answer.", status=422) from error


def _active(text: str) -> float | None:
    """Return the seconds that someone was active, as the page counted them; nothing rests on it."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) and 0 <= value < DAY else None
