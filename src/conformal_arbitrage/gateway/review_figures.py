"""Figures of teams of reviewers: what is before them, how long they take, and how far they agree.

Knows nothing of HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields

from msgspec.structs import replace

from conformal_arbitrage.gateway.reviewing import Desk
from conformal_arbitrage.monitoring.reviewing import (
    GRADES,
    Agreement,
    agreement,
    agreement_by_person,
    grade_agreement,
    quantiles,
    waiting_time,
)
from conformal_arbitrage.store.base import Store
from conformal_arbitrage.store.review_base import CastVote, TeamBacklog


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewerFigures:
    """What one person did in thirty days.

    Attributes:
        reviewer: who.
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
        reviewers: everybody who voted or skipped.
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


async def team_figures(store: Store, desk: Desk, *, blind: bool) -> list[TeamFigures]:
    """Return the figures of every team; `blind` leaves out whether callers wait, which would tell audits from the rest."""
    backlogs = await store.team_backlogs(desk.people())
    if blind:
        backlogs = [replace(backlog, oldest=None, untaken=False) for backlog in backlogs]
    cast, pairs = await store.cast_votes(), await store.second_opinions()
    figures: list[TeamFigures] = []
    for backlog in backlogs:
        own = [vote for vote in cast if vote.team == backlog.team]
        opinions = [opinion for team, opinion in pairs if team == backlog.team]
        alike = agreement_by_person(opinions)
        people = [
            _person(name, [vote for vote in own if vote.reviewer == name], alike.get(name))
            for name in sorted({vote.reviewer for vote in own})
        ]
        everyone = _person("", own, None)
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
                reviewers=tuple(people),
            )
        )
    return figures


def own_figures(team: TeamFigures, name: str) -> TeamFigures:
    """Return the figures of a team without those of a person's colleagues."""
    return replace_fields(team, reviewers=tuple(one for one in team.reviewers if one.reviewer == name))


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
