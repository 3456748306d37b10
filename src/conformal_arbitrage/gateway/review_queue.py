"""People as Guardian: where callers wait, how votes become verdicts, and the figures of teams."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from msgspec.structs import replace

from conformal_arbitrage.calibration.secret import draw, subkey
from conformal_arbitrage.errors import ArbitrageError, DeadlineError, RequestError, StoreError, UpstreamError
from conformal_arbitrage.gateway.audience import Caller
from conformal_arbitrage.gateway.auth import ANONYMOUS
from conformal_arbitrage.live.config import TeamConfig
from conformal_arbitrage.live.reviewers import ReviewTerms
from conformal_arbitrage.models.port import Identity, Scores, fingerprint
from conformal_arbitrage.monitoring.votes import (
    GRADE_PAIRS,
    GRADE_SCALE,
    GRADES,
    LEVELS,
    Agreement,
    agreement,
    agreement_by_person,
    count_votes,
    grade_agreement,
    quantiles,
    waiting_time,
)
from conformal_arbitrage.store import reviews
from conformal_arbitrage.store.record import AuditBody, Event, FeedbackBody, Grades, ReviewFacts, ReviewVote
from conformal_arbitrage.store.reviews import (
    CastVote,
    HeldReview,
    NewReview,
    ReviewItem,
    ReviewKind,
    ReviewOutcome,
    ReviewPurpose,
    ReviewQuestion,
    ReviewRequest,
    TeamBacklog,
)
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import DAY, Query, Spent

# --- What a reviewer's vote means ---


BY_PEOPLE = "review"
"""Who made grades, as the record says, if people did through the queue."""
Vote = int | tuple[float, ...]
"""The place of an option as shown, or the grades of all answers in the order shown."""


def place_of_vote(question: ReviewQuestion | None, vote: Vote) -> int:
    """Return the place of a vote as shown: of an option, or of the grades among all that could be given.

    Args:
        question: what is voted on; None if it is not kept any more, or not theirs.
        vote: the place of an option, or the grades of the answers in the order shown.

    Raises:
        RequestError: the question has no such option, or takes the other kind of vote.
    """
    if isinstance(vote, int):
        if question is None or (question.kind != "grade" and 0 <= vote < len(question.options)):
            return vote
        allowed = f"from 0 to {len(question.options) - 1}, the place of an option"
        allowed = "left out here: give grades, one for each answer" if question.kind == "grade" else allowed
        raise RequestError(f"choice must be {allowed}; got {vote}", status=422, code="no_such_option", param="choice")
    fits = question is None or (question.kind == "grade" and len(vote) == len(question.options))
    if not fits or not set(vote) <= set(GRADE_SCALE):
        rule = "one of 0, 0.5 and 1 for each answer in the order shown, where answers are graded"
        raise RequestError(f"grades must be {rule}; got {list(vote)}", status=422, code="no_such_grade", param="grades")
    levels = [GRADE_SCALE.index(grade) for grade in vote]
    return sum(level * len(GRADE_SCALE) ** place for place, level in enumerate(reversed(levels)))


def outcome_of(item: ReviewItem, verdict: int) -> ReviewOutcome:
    """Return what became of an item with a verdict."""
    return ReviewOutcome(
        state="decided" if item.purpose == "decide" else "closed",
        action=verdict,
        size=0 if item.question is None else item.question.size,
        team=item.team,
        cost=None if item.price is None else item.price * len(item.votes),
        facts=_facts(item),
    )


def verdict_events(item: ReviewItem, outcome: ReviewOutcome) -> list[Event]:
    """Return what to record of a verdict: the scores of an audit, or grades.

    The decision of a caller's question is recorded with the reply.
    """
    if outcome.action is None or item.purpose not in ("audit", "grade"):
        return []
    if item.purpose == "grade":
        grader = None if item.question is None else item.question.grader
        primary, guardian = GRADE_PAIRS[outcome.action]
        grades = Grades(primary, guardian)
        return [
            Event(id=item.decision, body=FeedbackBody(grades=grades, by=BY_PEOPLE, grader=grader, review=outcome.facts))
        ]
    body = AuditBody(
        scores=tuple(float(k == outcome.action) for k in range(outcome.size)),
        cost=outcome.cost,
        served=item.team,
        identities_sha256=item.identities_sha256,
        review=outcome.facts,
    )
    return [Event(id=item.decision, body=body)]


def failure_events(item: ReviewItem) -> list[Event]:
    """Return what to record of an item on which nobody can decide: it will never have an outcome, and stays."""
    facts = _facts(item)
    if item.purpose == "grade":  # which counts as the worst once it is due
        return [Event(id=item.decision, body=FeedbackBody(comment="nobody could tell", by=BY_PEOPLE, review=facts))]
    if item.purpose == "audit" or (item.purpose == "decide" and item.drawn):
        reason = "missing: nobody could tell" if not item.votes else "missing: no verdict"
        return [
            Event(
                id=item.decision, body=AuditBody(error=reason, identities_sha256=item.identities_sha256, review=facts)
            )
        ]
    return []


def _facts(item: ReviewItem) -> ReviewFacts:
    return ReviewFacts(
        item=item.id,
        protocol=item.protocol,
        rule=item.rule,
        level=item.level,
        votes=tuple(_recorded_vote(item, vote) for vote in (*item.earlier, *item.votes)),
        withdrawn=item.withdrawn,
    )


def _recorded_vote(item: ReviewItem, vote: ReviewVote) -> ReviewVote:
    """Return a vote as the record has it: for an option of the menu, or with the grades that it gave."""
    if item.rule != "median" or not isinstance(vote.choice, int):
        return vote
    return replace(vote, choice=GRADE_PAIRS[vote.choice])


# --- People as the Guardian ---


_log = logging.getLogger("conformal_arbitrage.gateway")
PENDING, EXPIRED = "review_pending", "review_expired"
TICK = 0.25
"""Seconds between two looks at the queue."""
_CALL_EVERY = 5.0
_RECHECK_EVERY = 300.0
"""Seconds between two looks for items on which nobody is left to vote, since who is on a team may change."""
_AT_ONCE = 20
"""Requests that are completed at once, beside those that could not be and are tried again."""
_NEXT_ATTEMPT = 30.0
"""Seconds before a request is completed again that could not be, as while its policy is out of service."""
QUIET_DUE, _SECOND_OPINION_ENDS = DAY, 14 * DAY
"""Seconds until what nobody waits for comes before other questions, and until a second opinion is given up."""
_OPEN = ReviewOutcome(state="open")
HAS_PLACE = ContextVar("HAS_PLACE", default=True)
"""Whether the request being decided has a place to wait for people."""


@dataclass(frozen=True, slots=True)
class Reviewer:
    """A reviewer: of which teams they are a member, and of which a lead."""

    name: str
    teams: tuple[str, ...]
    leads: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """All that a reviewer is given of a question: nothing tells a caller's question from an audit or a second opinion.

    Attributes:
        kind: whether to choose an option, or to grade answers.
        token: to vote with.
        options: what to choose from, or the answers to grade, in the order to show.
        lease: seconds that it is theirs without a sign of life.
        primary_choice: the place of what the Primary would choose, where people are shown it; the same in an audit.
    """

    kind: ReviewKind = "choose"
    token: str
    policy: str
    instructions: str
    context: str
    options: tuple[str, ...]
    lease: float
    primary_choice: int | None = None


class WaitingPlaces:
    """The places of requests that are held until something happens: so many for each key, so that others find room."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[str] = Counter()

    @contextmanager
    def held(self, caller_id: str) -> Generator[bool]:
        """Hold a place as long as the block runs; yield whether there was one: else the request must not wait."""
        if self._taken[caller_id] >= self._most:
            yield False
            return
        self._taken[caller_id] += 1
        try:
            yield True
        finally:
            self._taken[caller_id] -= 1
            if not self._taken[caller_id]:
                del self._taken[caller_id]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A caller who waits for a decision."""

    decision: str
    outcome: asyncio.Future[ReviewOutcome]


class ReviewQueue:
    """The queue of questions for people: callers wait on it, and reviewers take from it.

    Args:
        secret: the project's; decides which questions get a second opinion, and when audits are due.
        places: of callers who wait.
    """

    def __init__(self, store: Store, teams: Mapping[str, TeamConfig], secret: bytes, places: WaitingPlaces) -> None:
        self.teams = teams
        self.places = places
        self.wake = asyncio.Event()
        self.instructions: dict[str, str] = {}
        self._store = store
        self._key = subkey(secret, "review v1")
        self._waiting: set[_Waiter] = set()
        self._closed = False

    def serve(self, policy: str, terms: ReviewTerms) -> "ReviewScorer":
        """Return the people behind a policy as its Guardian."""
        self.instructions[policy] = terms.instructions
        return ReviewScorer(terms, self)

    def items(
        self,
        terms: ReviewTerms,
        purpose: ReviewPurpose,
        query: Query,
        *,
        size: int,
        policy: str,
        identities: str,
        drawn: bool,
        primary: Sequence[float | None] | None,
    ) -> list[NewReview]:
        """Return the items to put into the queue about a question: one, or a second opinion beside it.

        Args:
            terms: how people are asked.
            purpose: of the question.
            query: what they are asked, perhaps with a part of its menu.
            size: the number of actions of the whole menu.
            identities: fingerprint of the identities of its models.
            drawn: the audit coin drew it.
            primary: the Primary's scores, which people may be shown the first choice of.
        """
        settings, id = terms.settings, str(query.id)
        due = settings.wait / 2
        if purpose == "audit":
            due += draw(self._key, f"due {id}") * settings.audit_spread
        item = NewReview(
            decision=id,
            purpose=purpose,
            policy=policy,
            team=terms.name,
            question=terms.question(query, size, primary),
            protocol=terms.protocol,
            identities_sha256=identities,
            panel=terms.panel,
            rule=terms.rule,
            escalates=bool(terms.team.leads),
            price=terms.price,
            due=due,
            deadline=settings.deadline if purpose == "decide" else None,
            lease=settings.lease,
            undo=settings.undo,
            drawn=drawn,
            menu=(LEVELS if query.ordered else "") + fingerprint([self._key.hex(), query.actions]),
        )
        return with_second_opinion(item, asked=draw(self._key, f"second opinion {id}") < terms.overlap)

    async def outcome(self, decision: str, *, wait: float) -> ReviewOutcome:
        """Wait for people to decide; return how far they have come in the end."""
        outcome = (await self._store.run(reviews.outcomes, [decision])).get(decision, _OPEN)
        if outcome.state != "open" or wait <= 0 or self._closed:
            return outcome
        waiter = _Waiter(decision, asyncio.get_running_loop().create_future())
        self._waiting.add(waiter)
        try:
            return await asyncio.wait_for(waiter.outcome, wait)
        except TimeoutError:
            return (await self._store.run(reviews.outcomes, [decision])).get(decision, _OPEN)
        finally:
            self._waiting.discard(waiter)

    async def look(self) -> None:
        """Tell callers who wait here how far their questions have come."""
        if not self._waiting:
            return
        outcomes = await self._store.run(reviews.outcomes, {waiter.decision for waiter in self._waiting})
        for waiter in tuple(self._waiting):
            outcome = outcomes.get(waiter.decision, _OPEN)
            if outcome.state != "open" and not waiter.outcome.done():
                waiter.outcome.set_result(outcome)

    def close(self) -> None:
        """Let nobody wait any more: whoever does is told how far people have come, as at the end of a wait."""
        self._closed = True
        for waiter in self._waiting:
            if not waiter.outcome.done():
                waiter.outcome.set_result(_OPEN)

    async def someone_is_there(self, team: str) -> bool:
        """Return whether anybody of a team has been seen lately."""
        return bool(await self._store.run(reviews.present, self._people(team)))

    def _people(self, team: str) -> tuple[str, ...]:
        config = self.teams[team]
        return (*config.members, *config.leads, ANONYMOUS)

    def people(self) -> dict[str, tuple[str, ...]]:
        """Return the names of everybody on each team."""
        return {team: self._people(team) for team in self.teams}

    def reviewer(self, caller: Caller) -> Reviewer:
        """Return who calls as a reviewer; before there are keys, everybody on this machine is on every team.

        Raises:
            RequestError: the key is bound to policies, or its label is on no team.
        """
        if caller.id == ANONYMOUS:
            return Reviewer(ANONYMOUS, tuple(self.teams), tuple(self.teams))
        caller.check_unbound("reviewing")
        name = caller.name
        member = tuple(team_name for team_name, team in self.teams.items() if name in team.members)
        lead = tuple(team_name for team_name, team in self.teams.items() if name in team.leads)
        if not member and not lead:
            raise RequestError(
                f"the label {name!r:.80} of this key is on no team; add it to members or leads of [teams.NAME]",
                status=403, code="not_on_a_team",
            )  # fmt: skip
        return Reviewer(name, member, lead)

    async def take(self, reviewer: Reviewer) -> Assignment | None:
        """Give a reviewer the question they hold already, or the next; None if there is none."""
        held = await self._store.run(reviews.take, reviewer.name, teams=reviewer.teams, leads=reviewer.leads)
        return None if held is None else self._assignment(held)

    def _assignment(self, held: HeldReview) -> Assignment:
        given = held.question.instructions
        return Assignment(
            kind=held.question.kind,
            token=held.token,
            policy=held.policy,
            instructions=self.instructions.get(held.policy, "") if given is None else given,
            context=str(held.question.context),
            options=held.question.options,
            lease=held.lease,
            primary_choice=held.question.primary,
        )

    async def renew(self, reviewer: Reviewer, token: str) -> bool:
        """Hold a question longer; return False if it is no longer theirs."""
        return await self._store.run(reviews.renew, token, reviewer.name)

    async def give_back(self, reviewer: Reviewer, token: str) -> None:
        """Give a question back."""
        await self._store.run(reviews.give_back, token, reviewer.name)

    async def skip(self, reviewer: Reviewer, token: str) -> bool:
        """Leave a question to someone else; return False if it is no longer theirs."""
        skipped = await self._store.run(reviews.skip, token, reviewer.name)
        self.wake.set()
        return skipped

    async def vote(self, reviewer: Reviewer, token: str, vote: Vote, active: float | None = None) -> float | None:
        """Vote for an option by its place as shown, or give every answer a grade, in the order shown.

        Args:
            vote: the option's place, or the grades.
            active: seconds that they were active.

        Returns:
            Seconds until the vote counts; None if the place was given to someone else.
        """
        question = await self._store.run(reviews.held_question, token, reviewer.name)
        place = place_of_vote(question, vote)
        counts = await self._store.run(reviews.vote, token, reviewer.name, place, active=active)
        if counts is not None:
            asyncio.get_running_loop().call_later(counts, self.wake.set)
        return counts

    async def undo(self, reviewer: Reviewer, token: str) -> Assignment | None:
        """Take a vote back and show its question again; None if the vote counts already."""
        held = await self._store.run(reviews.undo, token, reviewer.name)
        return None if held is None else self._assignment(held)

    async def pause(self) -> None:
        """Wait until the next look at the queue is due."""
        try:
            await asyncio.wait_for(self.wake.wait(), TICK)
        except TimeoutError:
            return
        self.wake.clear()


def with_second_opinion(item: NewReview, *, asked: bool) -> list[NewReview]:
    """Return an item and, if it is asked for, a second opinion on it by one more person."""
    second = replace(
        item, purpose="overlap", panel=1, escalates=False, drawn=False, due=QUIET_DUE, deadline=_SECOND_OPINION_ENDS
    )
    return [item, second] if asked else [item]


class StillDecidingError(RequestError):
    """People have not decided yet, and have time left."""


class ReviewScorer:
    """People as a Guardian: scores the option of their verdict 1, the others 0.

    Vote shares would be no scores: with votes that stop once the verdict is certain, they depend on when that was.

    Args:
        terms: how they are asked.
        queue: where to wait for them; None if only the identity is wanted.
    """

    def __init__(self, terms: ReviewTerms, queue: ReviewQueue | None) -> None:
        self.terms = terms
        self._queue = queue

    @property
    def identity(self) -> Identity:
        """Who answers, and how they are asked."""
        return self.terms.identity

    async def score(self, query: Query) -> Scores:
        """Wait for the verdict on a question that has been put into the queue.

        Raises:
            DeadlineError: nobody decided in time.
            UpstreamError: nobody could tell.
            StillDecidingError: nobody has decided yet, and the caller is to come back.
        """
        if self._queue is None:
            raise UpstreamError(f"the team {self.terms.name!r} answers through a gateway only; start `arbitrage serve`")
        settings, id = self.terms.settings, str(query.id)
        late = settings.late == "fallback"
        has_place = HAS_PLACE.get()
        wait = 0.0 if late and not await self._queue.someone_is_there(self.terms.name) else settings.wait
        outcome = await self._queue.outcome(id, wait=wait if has_place else 0.0)
        if outcome.action is not None:
            return _scores(outcome, query)
        if outcome.state == "open" and (not late or not has_place):
            raise StillDecidingError("people are still deciding; send the same request again", status=409, code=PENDING)
        if outcome.state == "failed":
            raise UpstreamError(f"nobody on the team {self.terms.name!r} could tell")
        raise DeadlineError(f"nobody on the team {self.terms.name!r} decided in time")


def _scores(outcome: ReviewOutcome, query: Query) -> Scores:
    places = query.places or range(len(query.actions))
    values = tuple(float(place == outcome.action) for place in places)
    votes = 0 if outcome.facts is None else len(outcome.facts.votes)
    spent = Spent(calls=votes, cost=outcome.cost)
    return Scores(values=values, spent=spent, served=outcome.team)


class VoteCounter:
    """Counts votes, and completes requests whose callers are gone; every gateway has one, and any may do any of it."""

    def __init__(self, store: Store, queue: ReviewQueue, complete: Callable[[ReviewRequest], Awaitable[None]]) -> None:
        self._store = store
        self._queue = queue
        self._complete = complete
        self._completing: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._called = 0.0
        self._rechecked = -_RECHECK_EVERY

    async def run(self) -> None:
        """Look at the queue four times a second until cancelled; return if there are no teams."""
        if not self._queue.teams:
            return
        try:
            while True:
                try:
                    await self.turn()
                except StoreError:
                    await asyncio.sleep(TICK)  # the database is unreachable; requests report that, votes wait
                await self._queue.pause()
        finally:
            for task in self._completing.values():
                task.cancel()
            await asyncio.gather(*self._completing.values(), return_exceptions=True)

    async def turn(self) -> None:
        """Count the votes that have come to count, tell callers, and complete what nobody waits for."""
        if time.monotonic() - self._rechecked > _RECHECK_EVERY:
            await self._recheck_teams()
            self._rechecked = time.monotonic()
        for item in await self._store.run(reviews.due):
            await self._settle(item)
        await self._queue.look()
        for request in await self._store.run(reviews.decided_requests, limit=_AT_ONCE + len(self._completing)):
            key = request.key_id, request.name
            if key not in self._completing:
                task = self._completing[key] = asyncio.create_task(self._finish(request))
                task.add_done_callback(lambda _, key=key: self._completing.pop(key, None))
        if time.monotonic() - self._called > _CALL_EVERY:
            self._called = time.monotonic()
            await self._call_someone()

    async def _recheck_teams(self) -> None:
        """Look for items that nobody can answer, since who is on a team may have changed while they were open."""
        for name, team in self._queue.teams.items():
            await self._store.run(reviews.mark_exhausted, name, members=team.members, leads=team.leads)
        for name, count in (await self._store.run(reviews.stranded, self._queue.teams)).items():
            _log.warning(
                "%d open questions are for the team %r, which is not configured here; add [teams.%s] for people to answer",
                *(count, name, name),
            )

    async def _finish(self, request: ReviewRequest) -> None:
        try:
            await self._complete(request)
        except ArbitrageError as error:
            _log.warning(
                "a request that people decided is not complete yet: %s", error, extra={"policy": request.policy}
            )
            await asyncio.sleep(_NEXT_ATTEMPT)

    async def _call_someone(self) -> None:
        """Tell webhooks of questions that callers wait for while nobody is there."""
        for backlog in await self._store.run(reviews.backlogs, self._queue.people()):
            if backlog.untaken and not backlog.present:
                await self._store.run(reviews.call, backlog.team)

    async def _settle(self, item: ReviewItem) -> None:
        """Bring an item as far as its counted votes allow."""
        choices = [vote.choice for vote in item.votes if isinstance(vote.choice, int)]
        tally = count_votes(choices, panel=1 if item.level else item.panel, rule=item.rule)
        if tally.verdict is not None:
            await self._decide(item, tally.verdict)
        elif item.overdue and item.next_count is None:  # a vote that was cast in time is waited for
            await self._store.run(reviews.end, item, "expired")
        elif tally.split or (item.next_count is None and self._left(item, item.level) == set()):
            if item.escalates and item.level == 0 and self._left(item, 1) != set():
                await self._store.run(reviews.keep_open, item, needed=1, level=1)
            else:
                await self._fail(item)
        else:
            await self._store.run(reviews.keep_open, item, needed=tally.needed, level=item.level)

    def _left(self, item: ReviewItem, level: int) -> set[str] | None:
        """Return who could still vote at a level: who has neither voted nor skipped it; None if the team is unknown here."""
        team = self._queue.teams.get(item.team)
        return None if team is None else set(team.leads if level else team.members) - item.seen

    async def _decide(self, item: ReviewItem, verdict: int) -> None:
        outcome = outcome_of(item, verdict)
        end = "decided" if item.purpose == "decide" else "closed"
        await self._store.run(reviews.end, item, end, outcome=outcome, events=verdict_events(item, outcome))

    async def _fail(self, item: ReviewItem) -> None:
        """End an item on which nobody can decide; the row of an audit stays, without a score."""
        await self._store.run(reviews.end, item, "failed", events=failure_events(item))


# --- Figures of teams of reviewers ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewerFigures:
    """What one person did in thirty days.

    Attributes:
        votes, skips: how many.
        median, p90: seconds that a question was before them until they voted; None without votes.
        opinions: questions on which someone else gave an opinion too, for that purpose.
        agreement: of these, the share on which they chose the same; None if there were none.
    """

    reviewer: str
    votes: int
    skips: int
    median: float | None
    p90: float | None
    opinions: int
    agreement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamFigures:
    """What a team has before it, and what it did in thirty days.

    Attributes:
        backlog: what is open, and who is there.
        forecast: seconds that a new question waits; None if that cannot be said.
        votes, skips, median, p90: as in `ReviewerFigures`.
        agreement: on questions with a second opinion; None if there are too few.
        grade_agreement: likewise on answers that two people graded.
    """

    backlog: TeamBacklog
    forecast: float | None
    votes: int
    skips: int
    median: float | None
    p90: float | None
    agreement: Agreement | None
    grade_agreement: Agreement | None
    reviewers: tuple[ReviewerFigures, ...]


async def team_figures(store: Store, queue: ReviewQueue, caller: Caller) -> list[TeamFigures]:
    """Return the figures of every team.

    Reviewers see their own teams, nothing of colleagues, and not whether callers wait: that would tell audits from the rest.
    """
    caller.check_unbound("what a team does")
    people, blind = queue.people(), not caller.opens("admin")
    visible = {team: names for team, names in people.items() if not blind or caller.name in names}
    backlogs = await store.run(reviews.backlogs, visible)
    if blind:
        backlogs = [replace(backlog, oldest=None, untaken=False) for backlog in backlogs]
    cast, pairs = await store.run(reviews.cast_votes), await store.run(reviews.second_opinions)
    figures: list[TeamFigures] = []
    for backlog in backlogs:
        votes = [vote for vote in cast if vote.team == backlog.team]
        opinions = [opinion for team, opinion in pairs if team == backlog.team]
        alike = agreement_by_person(opinions)
        shown = [
            _person(name, [vote for vote in votes if vote.reviewer == name], alike.get(name))
            for name in sorted({vote.reviewer for vote in votes})
            if not blind or name == caller.name
        ]
        everyone = _person("", votes, None)
        figures.append(
            TeamFigures(
                backlog=backlog,
                forecast=waiting_time(backlog.votes_needed, everyone.median, len(backlog.present)),
                votes=everyone.votes,
                skips=everyone.skips,
                median=everyone.median,
                p90=everyone.p90,
                agreement=agreement([opinion for opinion in opinions if opinion.menu != GRADES]),
                grade_agreement=grade_agreement([opinion for opinion in opinions if opinion.menu == GRADES]),
                reviewers=tuple(shown),
            )
        )
    return figures


def _person(name: str, cast: Sequence[CastVote], alike: tuple[int, float] | None) -> ReviewerFigures:
    held = [vote.held for vote in cast if not vote.skipped]
    median, p90 = quantiles(held, 0.5, 0.9) if held else (None, None)
    return ReviewerFigures(
        reviewer=name,
        votes=len(held),
        skips=len(cast) - len(held),
        median=median,
        p90=p90,
        opinions=0 if alike is None else alike[0],
        agreement=None if alike is None else alike[1],
    )
