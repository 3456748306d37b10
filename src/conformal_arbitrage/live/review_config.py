"""The sections of arbitrage.toml about people who answer as a Guardian, or grade answers.

These are [teams.NAME], [policies.NAME.review] and [policies.NAME.graders].

Knows nothing of how a file is read, or of the queue.
"""

from typing import Literal

from msgspec import Struct


class TeamConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """People who answer through the review queue: as a Guardian of the same name, or by grading answers.

    Attributes:
        members: labels of their API keys.
        leads: labels of those who decide what a panel cannot; without any, such a question has no verdict.
    """

    members: tuple[str, ...]
    leads: tuple[str, ...] = ()


class ReviewConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How callers of a policy, and people who answer as its Guardian, wait for each other.

    Times are in seconds.

    Attributes:
        wait: how long a request is held.
        late: what a caller gets then: that people are still deciding ("pending"), or the safe action ("fallback").
        deadline: when a question is given up; audits are not.
        lease: how long a reviewer holds a question without a sign of life.
        undo: how long a vote can be taken back, before it counts.
        audit_spread: over which time audits are mixed among the questions of callers.
    """

    wait: float = 50.0
    late: Literal["pending", "fallback"] = "pending"
    deadline: float = 86400.0
    lease: float = 90.0
    undo: float = 5.0
    audit_spread: float = 3600.0


class GradersConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who grades both answers of a policy in free text, and how.

    Attributes:
        team: a section [teams.NAME]; unless set, the only one.
        panel: how many people grade each pair of answers: 1, 3 or 5; the median of their grades counts.
        instructions: shown above every pair.
        overlap: the share of pairs that one more person is shown, to measure how far people agree.
    """

    team: str | None = None
    panel: int = 1
    instructions: str = ""
    overlap: float = 0.0
