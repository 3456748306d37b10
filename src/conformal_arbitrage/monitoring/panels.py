"""Panels: what the votes of several people amount to.

Only the final verdict is a score: vote shares would depend on when voting stopped.

Knows nothing of people, queues or clocks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

PanelRule = Literal["majority", "unanimous"]
PANELS = (1, 3, 5)
"""How many people a panel may have: odd, so that two options cannot tie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteCount:
    """What votes amount to so far.

    Attributes:
        verdict: the option that won; None while, or if, there is none.
        needed: how many votes it takes, those that are in included, until there may be a verdict.
        split: whether no further vote of this panel can lead to one.
    """

    verdict: int | None
    needed: int
    split: bool = False


def count_votes(choices: Sequence[int], *, panel: int, rule: PanelRule) -> VoteCount:
    """Count the votes of a panel; it ends as soon as its verdict is certain, or impossible.

    Args:
        choices: the options voted for, in the order of the votes.
        panel: how many people may vote.
        rule: "majority" takes more than half of the panel for one option, "unanimous" all of it.
    """
    cast = len(choices)
    if rule == "unanimous":
        split = len(set(choices)) > 1
        done = cast >= panel and not split
        return VoteCount(verdict=choices[0] if done else None, needed=panel, split=split)
    majority = panel // 2 + 1
    top, most = Counter(choices).most_common(1)[0] if choices else (None, 0)
    if most >= majority:
        return VoteCount(verdict=top, needed=cast)
    needed = cast + majority - most
    return VoteCount(verdict=None, needed=min(needed, panel), split=needed > panel)


def median_grades(grades: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of a panel's grades of each answer."""
    first, second = np.median(np.array(grades, dtype=np.float64), axis=0).tolist()
    return first, second
