"""What a reviewer's vote means, and what is recorded once people have decided, graded, or could not tell.

Knows nothing of queues, databases or HTTP.
"""

from msgspec.structs import replace

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.monitoring.panels import GRADE_PAIRS, GRADE_SCALE
from conformal_arbitrage.store.record import AuditBody, Event, FeedbackBody, Grades, ReviewFacts, ReviewVote
from conformal_arbitrage.store.review_base import ReviewItem, ReviewOutcome, ReviewQuestion

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
