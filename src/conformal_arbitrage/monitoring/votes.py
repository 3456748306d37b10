"""People who review: what their votes amount to, how far they agree, how long a question waits."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# --- Panels ---


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


# --- Figures of people who review ---


FEWEST_ITEMS = 30
"""With fewer items there is no figure of agreement."""
_RESAMPLES = 2000
_SEED = 20_240_229
GRADES = "grades"
"""The menu of those who grade answers: `GRADE_PAIRS`."""
LEVELS = "levels "
"""Begins the name of a menu whose options are the levels of a score, in order."""
Scale = Literal["nominal", "ordinal", "interval"]
Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondOpinion:
    """What two people chose from the same menu, each without knowing of the other.

    Attributes:
        first: who voted first, and for which option.
        second: who was asked for a second opinion, and what they chose.
        menu: a name for the menu; equal for equal options, `GRADES` for grades, and with `LEVELS` first for a score.
    """

    first: tuple[str, int]
    second: tuple[str, int]
    size: int
    menu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far people agree.

    Attributes:
        items: on how many questions that is measured.
        share: of these, on how many they chose the same; of grades, how many answers got the same.
        corrected: that share beyond chance: Krippendorff's alpha if all menus are the same, by ranks if these are levels,
            else the mean of (a - 1/n) / (1 - 1/n) over questions with n options.
        lower, upper: a 95 % range of the corrected share, by resampling questions.
    """

    items: int
    share: float
    corrected: float
    lower: float
    upper: float


def agreement(opinions: Sequence[SecondOpinion]) -> Agreement | None:
    """Return how far second opinions agree with the first; None with fewer than `FEWEST_ITEMS` menus of two or more."""
    usable = [opinion for opinion in opinions if opinion.size > 1]
    if len(usable) < FEWEST_ITEMS:
        return None
    pairs = np.array([[opinion.first[1], opinion.second[1]] for opinion in usable], dtype=np.float64)
    sizes = np.array([opinion.size for opinion in usable], dtype=np.float64)
    alike = len({(opinion.menu, opinion.size) for opinion in usable}) == 1
    scale: Scale = "ordinal" if usable[0].menu.startswith(LEVELS) else "nominal"

    def corrected(rows: NDArray[np.intp]) -> float:
        if alike:
            return krippendorff([row.tolist() for row in pairs[rows]], scale=scale)
        same = (pairs[rows, 0] == pairs[rows, 1]).astype(np.float64)
        return float(((same - 1 / sizes[rows]) / (1 - 1 / sizes[rows])).mean())

    share = float((pairs[:, 0] == pairs[:, 1]).mean())
    return _measured(len(usable), share, corrected, _RESAMPLES // (8 if alike else 1))


def grade_agreement(opinions: Sequence[SecondOpinion]) -> Agreement | None:
    """Return how far second opinions on grades agree with the first; None with fewer than `FEWEST_ITEMS`.

    The share is that of answers with the same grade, and beyond chance it is Krippendorff's alpha with squared distances.

    Args:
        opinions: choices among `GRADE_PAIRS`; where their number is that of the grades, the Guardian's answer was graded
            alone.
    """
    if len(opinions) < FEWEST_ITEMS:
        return None
    units: list[list[tuple[float, float]]] = []
    for opinion in opinions:
        both = list(zip(GRADE_PAIRS[opinion.first[1]], GRADE_PAIRS[opinion.second[1]], strict=True))
        units.append(both if opinion.size > len(GRADE_SCALE) else both[1:])

    def corrected(rows: NDArray[np.intp]) -> float:
        return krippendorff([unit for row in rows for unit in units[int(row)]], scale="interval")

    share = float(np.mean([first == second for unit in units for first, second in unit]))
    return _measured(len(opinions), share, corrected, _RESAMPLES // 8)


def _measured(items: int, share: float, corrected: Callable[[NDArray[np.intp]], float], resamples: int) -> Agreement:
    """Return a figure of agreement with its range, by resampling questions."""
    rng = np.random.default_rng(_SEED)
    resampled = [corrected(rng.integers(0, items, items)) for _ in range(resamples)]
    lower, upper = quantiles(resampled, 0.025, 0.975)
    return Agreement(items=items, share=share, corrected=corrected(np.arange(items)), lower=lower, upper=upper)


def quantiles(values: Sequence[float], *shares: float) -> list[float]:
    """Return the values below which these shares lie, interpolated as by np.quantile, which loads a megabyte of modules."""
    return np.interp(np.array(shares) * (len(values) - 1), np.arange(len(values)), np.sort(values)).tolist()


def agreement_by_person(opinions: Sequence[SecondOpinion]) -> dict[str, tuple[int, float]]:
    """Return, for everybody, on how many questions someone else gave an opinion too, and how often it was the same."""
    same: dict[str, list[bool]] = defaultdict(list)
    for opinion in opinions:
        for person in {opinion.first[0], opinion.second[0]} if opinion.first[0] != opinion.second[0] else ():
            same[person].append(opinion.first[1] == opinion.second[1])
    return {person: (len(equal), sum(equal) / len(equal)) for person, equal in same.items()}


def krippendorff(units: Sequence[Sequence[float]], *, scale: Scale = "nominal") -> float:
    """Return Krippendorff's alpha, 1 - observed over expected disagreement; 1 if there is nothing to disagree about.

    Args:
        units: for each question the values that were given to it; those with fewer than two do not count.
        scale: how far two values differ: not at all or fully, by ranks, or by the square of their distance.
    """
    paired = [unit for unit in units if len(unit) > 1]
    values = sorted({value for unit in paired for value in unit})
    place = {value: k for k, value in enumerate(values)}
    together = np.zeros((len(values), len(values)))
    for unit in paired:
        for i, value in enumerate(unit):
            for j, other in enumerate(unit):
                if i != j:
                    together[place[value], place[other]] += 1 / (len(unit) - 1)
    totals = together.sum(axis=1)
    distances = _DISTANCES[scale](np.array(values, dtype=np.float64), totals)
    expected = float(np.sum(np.outer(totals, totals) * distances)) / max(float(totals.sum()) - 1, 1.0)
    return 1.0 if expected == 0 else 1 - float(np.sum(together * distances)) / expected


def _nominal(values: Matrix, totals: Matrix) -> Matrix:
    return (values[:, None] != values[None, :]).astype(np.float64)


def _ordinal(values: Matrix, totals: Matrix) -> Matrix:
    ranks = np.cumsum(totals) - totals / 2
    return (ranks[:, None] - ranks[None, :]) ** 2


def _interval(values: Matrix, totals: Matrix) -> Matrix:
    return (values[:, None] - values[None, :]) ** 2


_DISTANCES: Mapping[Scale, Callable[[Matrix, Matrix], Matrix]] = {
    "nominal": _nominal,
    "ordinal": _ordinal,
    "interval": _interval,
}


def waiting_time(votes_needed: float, median: float | None, present: int) -> float | None:
    """Return how long a new question waits, in seconds; None if nobody is there, or how long a vote takes is unknown.

    Args:
        votes_needed: by all questions that are open.
        median: seconds that a vote takes.
        present: how many people are there.
    """
    return None if present == 0 or median is None else votes_needed * median / present
