"""How people answer as the Guardian of a policy: whose team, how they vote, and the identity that a certificate is bound to.

Knows nothing of queues, databases or HTTP.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

from conformal_arbitrage.live.config import Config
from conformal_arbitrage.live.review_config import ReviewConfig, TeamConfig
from conformal_arbitrage.monitoring.panels import PanelRule
from conformal_arbitrage.scorers.base import Identity
from conformal_arbitrage.scorers.human import HumanConfig
from conformal_arbitrage.scorers.order import content_order
from conformal_arbitrage.store.review_base import ReviewQuestion
from conformal_arbitrage.types import Query
from conformal_arbitrage.upstream.base import fingerprint

REVIEW_PAGE = "review 1"
"""What a reviewer is shown; raised whenever that is something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewTerms:
    """How people are asked.

    Attributes:
        name: the team's.
        team: who is on it.
        panel, rule: how votes are counted.
        instructions: shown above every question.
        overlap: the share of questions with a second opinion.
        price: dollars per counted vote; None if unknown.
        settings: how long callers and reviewers wait.
        shuffled: whether each question's options are shown in an order of its own.
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

    @property
    def identity(self) -> Identity:
        """Who answers, and how they are asked; who is on the team, waits, leases and prices are no part of it."""
        escalation: Literal["leads", "none"] = "leads" if self.team.leads else "none"
        return {
            "kind": "human",
            "name": self.name,
            "page": REVIEW_PAGE,
            "option_order": "shuffled by content" if self.shuffled else "as given",
            "primary_choice": "hidden",
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

    def question(self, query: Query, size: int) -> ReviewQuestion:
        """Return what people are shown: of a deferral, an audit and a second opinion the same.

        Args:
            query: the question, perhaps with a part of its menu.
            size: the number of actions of the whole menu.
        """
        places = query.places or tuple(range(len(query.actions)))
        order = content_order(query) if self.shuffled else list(range(len(query.actions)))
        return ReviewQuestion(
            context=query.text,
            options=tuple(query.actions[k] for k in order),
            places=tuple(places[k] for k in order),
            size=size,
        )


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
    )
