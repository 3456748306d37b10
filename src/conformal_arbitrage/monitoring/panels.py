"""Panels: what the votes of several people amount to.

Only the final verdict is a score: vote shares would depend on when voting stopped. A pair of grades is one vote, for one of
the nine pairs that there are.

Knows nothing of people, queues or clocks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

PanelRule = Literal["majority", "unanimous"]
ReviewRule = PanelRule | Literal["median"]
"""How votes are counted: those for an option of a menu by the panel's rule, those for grades by their median."""
PANELS = (1, 3, 5)
"""How many people a panel may have: odd, so that two options cannot tie."""
GRADE_SCALE = (0.0, 0.5, 1.0)
"""The grades that people give an answer: wrong, half right, right."""
GRADE_PAIRS = tuple(product(GRADE_SCALE, GRADE_SCALE))
"""The grades of the Primary's and the Guardian's answer that one vote can be for."""


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


def count_votes(choices: Sequence[int], *, panel: int, rule: ReviewRule) -> VoteCount:
    """Count the votes of a panel; it ends as soon as its verdict is certain, or impossible.

    Args:
        choices: the options voted for, in the order of the votes.
        panel: how many people may vote.
        rule: "majority" takes more than half of the panel for one option, "unanimous" all of it; "median" takes the
            options for places in `GRADE_PAIRS`, as `count_grades` does.
    """
    if rule == "median":
        return count_grades(choices, panel=panel)
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


def count_grades(choices: Sequence[int], *, panel: int) -> VoteCount:
    """Count the votes of a panel for pairs of grades: the verdict is the median of each answer's grades.

    It ends as soon as no further vote can change either median, so that the verdict is that of the whole panel.

    Args:
        choices: the places in `GRADE_PAIRS` voted for, in the order of the votes.
        panel: how many people may vote.
    """
    grades = [GRADE_PAIRS[choice] for choice in choices]
    certain = _certain_medians(grades, panel)
    if certain is not None:
        return VoteCount(verdict=GRADE_PAIRS.index(certain), needed=len(grades))
    further = (
        count
        for count in range(1, panel - len(grades) + 1)
        if any(_certain_medians([*grades, *[pair] * count], panel) is not None for pair in GRADE_PAIRS)
    )
    return VoteCount(verdict=None, needed=len(grades) + next(further))


def _certain_medians(grades: Sequence[tuple[float, float]], panel: int) -> tuple[float, float] | None:
    """Return the medians of a whole panel if they are the same whatever those grade who have not yet."""
    absent = panel - len(grades)
    lowest, highest = ([*grades, *[(end, end)] * absent] for end in (GRADE_SCALE[0], GRADE_SCALE[-1]))
    medians = median_grades(lowest)
    return medians if medians == median_grades(highest) else None


def median_grades(grades: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of a panel's grades of each answer."""
    columns = (sorted(column) for column in zip(*grades, strict=True))
    first, second = ((column[(len(column) - 1) // 2] + column[len(column) // 2]) / 2 for column in columns)
    return first, second
