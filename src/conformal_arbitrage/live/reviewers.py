"""How people answer as the Guardian of a policy, or grade answers: whose team, how they vote, and their identity.

A certificate is bound to that identity.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from conformal_arbitrage.live.config import Config, ReviewConfig, TeamConfig
from conformal_arbitrage.models.others import HumanConfig
from conformal_arbitrage.models.port import Identity, fingerprint
from conformal_arbitrage.models.rendering import content_order
from conformal_arbitrage.monitoring.votes import GRADE_PAIRS, GRADE_SCALE, PanelRule
from conformal_arbitrage.store.reviews import ReviewQuestion
from conformal_arbitrage.types import Query

REVIEW_PAGE = "review 1"
"""What a reviewer is shown; raised whenever that is something else."""
GRADE_PAGE = "grade 1"
"""What a grader is shown; raised likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewTerms:
    """How people are asked.

    Attributes:
        name: the team's.
        panel, rule: how votes are counted.
        instructions: shown above every question.
        overlap: the share of questions with a second opinion.
        price: dollars per counted vote; None if unknown.
        settings: how long callers and reviewers wait.
        shuffled: whether each question's options are shown in an order of its own.
        shows_primary: whether people see what the Primary would choose, in deferrals, audits and second opinions alike.
    """

    name: str
    team: TeamConfig
    panel: int
    rule: PanelRule
    instructions: str
    overlap: float
    price: float | None
    settings: ReviewConfig
    shuffled: bool
    shows_primary: bool = False

    @property
    def identity(self) -> Identity:
        """Who answers, and how they are asked; not who is on the team, waits, leases or prices."""
        escalation: Literal["leads", "none"] = "leads" if self.team.leads else "none"
        return {
            "kind": "human",
            "name": self.name,
            "page": REVIEW_PAGE,
            "option_order": "shuffled by content" if self.shuffled else "as given",
            "primary_choice": "shown" if self.shows_primary else "hidden",
            "panel": self.panel,
            "rule": self.rule,
            "escalation": escalation,
            "instructions_sha256": hashlib.sha256(self.instructions.encode()).hexdigest(),
            "skip": "someone else",
        }

    @property
    def protocol(self) -> str:
        """A digest of the identity, which every vote's record carries."""
        return fingerprint(self.identity)

    def question(self, query: Query, size: int, primary: Sequence[float | None] | None) -> ReviewQuestion:
        """Return what people are shown: of a deferral, an audit and a second opinion the same.

        Args:
            query: the question, perhaps with a part of its menu.
            size: the number of actions of the whole menu.
            primary: the Primary's scores over the whole menu; None if it had none.
        """
        places = query.places or tuple(range(len(query.actions)))
        order = content_order(query) if self.shuffled else list(range(len(query.actions)))
        shown = tuple(places[k] for k in order)
        first = _first_choice(primary) if self.shows_primary else None
        return ReviewQuestion(
            context=query.text,
            options=tuple(query.actions[k] for k in order),
            places=shown,
            size=size,
            primary=shown.index(first) if first in shown else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingTerms:
    """How people grade the answers of a policy.

    Attributes:
        name: the team's.
        panel: how many grade each pair.
        instructions: shown above every pair.
        overlap: the share of pairs with a second opinion.
        settings: how long a pair is held, and a vote can be taken back.
    """

    name: str
    team: TeamConfig
    panel: int
    instructions: str
    overlap: float
    settings: ReviewConfig

    @property
    def identity(self) -> Identity:
        """All that the grades depend on; not who is on the team."""
        return {
            "kind": "human",
            "name": self.name,
            "page": GRADE_PAGE,
            "scale": list(GRADE_SCALE),
            "order": "drawn",
            "identical": "not shown",
            "panel": self.panel,
            "rule": "median",
            "escalation": "leads" if self.team.leads else "none",
            "instructions_sha256": hashlib.sha256(self.instructions.encode()).hexdigest(),
            "skip": "someone else",
        }

    def question(self, context: str, primary: str | None, guardian: str, *, swapped: bool) -> ReviewQuestion:
        """Return what a grader is shown of two answers; nothing in it tells whose is whose.

        Args:
            context: the conversation.
            primary: the Primary's answer; None if it failed, so that the other is graded alone.
            guardian: the Guardian's answer.
            swapped: whether the Guardian's is shown first, as a draw says.
        """
        shown = list(range(len(GRADE_SCALE))) if primary is None else _places(swapped=swapped)
        answers = [guardian] if primary is None else [guardian, primary] if swapped else [primary, guardian]
        return ReviewQuestion(
            context=context,
            options=tuple(answers),
            places=tuple(shown),
            size=len(shown),
            instructions=self.instructions,
            grader=self.identity,
        )


def _places(*, swapped: bool) -> list[int]:
    """Return the place of every pair of grades as shown among those of the Primary and the Guardian."""
    return [GRADE_PAIRS.index((second, first) if swapped else (first, second)) for first, second in GRADE_PAIRS]


def grading_terms(config: Config, policy: str) -> GradingTerms | None:
    """Return how people grade the answers of a policy; None if they do not, through the review queue."""
    settings = config.policies[policy]
    if settings.grading != "review":
        return None
    name = settings.graders.team or next(iter(config.teams))
    return GradingTerms(
        name=name,
        team=config.teams[name],
        panel=settings.graders.panel,
        instructions=settings.graders.instructions,
        overlap=settings.graders.overlap,
        settings=settings.review,
    )


def _first_choice(scores: Sequence[float | None] | None) -> int | None:
    """Return the place of the highest score, the first among equals; None without scores."""
    known = [] if scores is None else [(-score, place) for place, score in enumerate(scores) if score is not None]
    return min(known)[1] if known else None


def review_terms(config: Config, policy: str) -> ReviewTerms | None:
    """Return how people are asked as the Guardian of a policy; None if its Guardian is a model, or sits at the terminal."""
    model = config.section(config.section_of(policy, "guardian"))
    team = config.teams.get(model.name) if isinstance(model, HumanConfig) else None
    if not isinstance(model, HumanConfig) or team is None:
        return None
    return ReviewTerms(
        name=model.name,
        team=team,
        panel=model.panel,
        rule=model.rule,
        instructions=model.instructions,
        overlap=model.overlap,
        price=model.price_per_call,
        settings=config.policies[policy].review,
        shuffled=config.task.shuffle_options,
        shows_primary=model.primary_choice == "shown",
    )
