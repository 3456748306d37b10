"""The review queue: questions that people answer, with leases, votes and verdicts, as a protocol.

An item is open until counted votes give a verdict, or until its deadline. Every change of an item raises its revision, and
what ends it names the revision it was based on: so one transition decides, whoever dies meanwhile.

Knows nothing of SQL, of who is on a team, or of how a verdict is reached.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from conformal_arbitrage.monitoring.people import ReviewRule, SecondOpinion
from conformal_arbitrage.store.record import DecisionRecord, Event, JSONObject, ReviewFacts, ReviewVote

ReviewPurpose = Literal["decide", "audit", "grade", "overlap"]
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
        decision: the decision's id.
        purpose: whether a caller waits, or it is an audit, or answers are graded, or it is a second opinion.
        protocol: digest of how people are asked.
        identities_sha256: fingerprint of the identities of the policy's models.
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
        request: the request that waits for them.
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
        team: who decided.
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
        open: items that are open.
        votes_needed: that these still need.
        oldest: age in seconds of the oldest that a caller waits for; None if none does.
        untaken: whether one has been waiting for half a minute without anybody having taken it.
        present: people of the team seen in the last two minutes.
        votes_last_hour: votes.
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


class ReviewStore(Protocol):
    """The part of a store that is the review queue."""

    async def put_reviews(self, items: Sequence[NewReview]) -> None:
        """Put audits into the queue, in place of what waits among the audits under the same id."""
        ...

    async def grading_news(self, policy: str, *, limit: int = 50) -> GradingNews:
        """Return what is new of a policy since its answers were last put into the queue; nothing is noted.

        Args:
            policy: whose news.
            limit: how many decisions, at most.
        """
        ...

    async def put_grading(
        self,
        policy: str,
        news: GradingNews,
        *,
        items: Sequence[NewReview],
        events: Sequence[Event],
        graded: Collection[str],
    ) -> bool:
        """Deal with news: put answers into the queue, record what is known without people, and note how far that was read.

        Args:
            policy: whose news.
            news: from `grading_news`.
            items: answers to grade.
            events: grades that need no person.
            graded: decisions whose answers have grades: what people were to grade of them is withdrawn.

        Returns:
            Whether nobody else had dealt with it; otherwise nothing was written.
        """
        ...

    async def take_review(
        self, reviewer: str, *, teams: Collection[str], leads: Collection[str], lease: float | None = None
    ) -> HeldReview | None:
        """Give a reviewer the item they hold already, or the next that they have not seen; None if there is none.

        Args:
            reviewer: who.
            teams: whose questions they answer.
            leads: of which they decide what a panel could not.
            lease: seconds to hold it; as the item says if None.
        """
        ...

    async def renew_review(self, token: str, reviewer: str) -> bool:
        """Hold an item longer, up to twenty minutes in all; return False if it is no longer theirs."""
        ...

    async def give_back_review(self, token: str, reviewer: str) -> None:
        """Give an item back, for anyone to take."""
        ...

    async def skip_review(self, token: str, reviewer: str) -> bool:
        """Give an item back and never offer it to this person again; return False if it is no longer theirs."""
        ...

    async def held_question(self, token: str, reviewer: str) -> ReviewQuestion | None:
        """Return the question that a token stands for, held or voted on; None if it is not theirs."""
        ...

    async def vote_review(self, token: str, reviewer: str, choice: int, *, active: float | None = None) -> float | None:
        """Vote for an option by its place as shown; the same token twice is one vote.

        Args:
            token: of the claim.
            reviewer: who votes.
            choice: the place of the option.
            active: seconds that they were active.

        Returns:
            Seconds until the vote counts; None if the place was given to someone else.
        """
        ...

    async def undo_review(self, token: str, reviewer: str) -> HeldReview | None:
        """Take back a vote that does not count yet, and hold the item again; None if it counts."""
        ...

    async def due_reviews(self, *, limit: int = 50) -> list[ReviewItem]:
        """Return items whose votes have come to count, which somebody skipped, or whose deadline has passed."""
        ...

    async def end_review(
        self, item: ReviewItem, end: ReviewEnd, *, outcome: ReviewOutcome | None = None, events: Sequence[Event] = ()
    ) -> bool:
        """End an item, with its verdict and what is to be recorded of it, in one transaction.

        One that the coin drew and that ends without a verdict stays open as an audit.

        Returns:
            Whether it was still as it was read; otherwise nothing was written.
        """
        ...

    async def keep_reviewing(self, item: ReviewItem, *, needed: int, level: int) -> bool:
        """Ask for so many votes in all at a level; return whether the item was still as it was read."""
        ...

    async def mark_exhausted(self, team: str, *, members: Collection[str], leads: Collection[str]) -> int:
        """Let open items be looked at again on which nobody of a team is left to vote; return how many there are.

        Who is on a team may change while an item is open, and a second opinion may find that everybody has voted.
        """
        ...

    async def stranded_reviews(self, teams: Collection[str]) -> Mapping[str, int]:
        """Return how many items are open for other teams than these, by team."""
        ...

    async def review_outcomes(self, decisions: Collection[str]) -> Mapping[str, ReviewOutcome]:
        """Return how far callers' questions have come, by decision."""
        ...

    async def decided_requests(self, *, limit: int) -> list[ReviewRequest]:
        """Return requests whose items have all ended, and which nobody is completing."""
        ...

    async def withdraw_request(self, key_id: str, name: str) -> None:
        """Withdraw the open items of a request whose caller left; those that the coin drew stay open as audits."""
        ...

    async def review_request(self, decision: str) -> tuple[ReviewRequest, ReviewOutcome] | None:
        """Return the request that a decision belongs to, complete or not, and how far that decision has come."""
        ...

    async def under_review(self, decisions: Collection[str]) -> frozenset[str]:
        """Return those of some decisions that people have yet to judge."""
        ...

    async def note_reader(self, decision: str, reviewer: str) -> None:
        """Note that somebody read the record of a decision under review; they are not asked about it any more."""
        ...

    async def note_presence(self, reviewer: str) -> None:
        """Note that a reviewer is there."""
        ...

    async def present_reviewers(self, names: Collection[str]) -> frozenset[str]:
        """Return those of some people who have been seen in the last two minutes."""
        ...

    async def team_backlogs(self, teams: Mapping[str, Collection[str]]) -> list[TeamBacklog]:
        """Return the backlog of every team, each given with the names of its people."""
        ...

    async def cast_votes(self, *, days: float = 30.0) -> list[CastVote]:
        """Return the votes and skips of the last days."""
        ...

    async def second_opinions(self, *, days: float = 90.0) -> list[tuple[str, SecondOpinion]]:
        """Return pairs of independent opinions on the same question, each with its team."""
        ...

    async def call_reviewers(self, team: str, policy: str = "", *, every: float = 60.0) -> bool:
        """Tell webhooks that questions wait for a team and nobody is there; return False if that was told lately."""
        ...
