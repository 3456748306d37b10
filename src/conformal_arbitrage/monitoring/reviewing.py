"""Figures of people who review: how far they agree, how long a question waits, how many people it takes.

Agreement is measured on questions that one more person was shown for this purpose alone. Votes of a panel would not do: a
third vote that is only asked for after two that differ makes agreement look better than it is.

Knows nothing of queues, clocks or databases.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.monitoring.panels import GRADE_PAIRS, GRADE_SCALE

FEWEST_ITEMS = 30
"""With fewer items there is no figure of agreement."""
_RESAMPLES = 2000
MOST_PEOPLE = 10_000
"""People who are busy at once, up to which a plan is made."""
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
        size: the number of options.
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
    usable = [one for one in opinions if one.size > 1]
    if len(usable) < FEWEST_ITEMS:
        return None
    pairs = np.array([[one.first[1], one.second[1]] for one in usable], dtype=np.float64)
    sizes = np.array([one.size for one in usable], dtype=np.float64)
    alike = len({(one.menu, one.size) for one in usable}) == 1
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
    for one in opinions:
        both = list(zip(GRADE_PAIRS[one.first[1]], GRADE_PAIRS[one.second[1]], strict=True))
        units.append(both if one.size > len(GRADE_SCALE) else both[1:])

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
    for one in opinions:
        for person in {one.first[0], one.second[0]} if one.first[0] != one.second[0] else ():
            same[person].append(one.first[1] == one.second[1])
    return {person: (len(equal), sum(equal) / len(equal)) for person, equal in same.items()}


def agreement_by_pair(opinions: Sequence[SecondOpinion]) -> dict[tuple[str, str], tuple[int, float]]:
    """Return, for every two people with enough questions in common, how many those are and Cohen's kappa.

    Questions count if their menu is the one that most have: places in other menus mean something else.
    """
    menus = Counter((one.menu, one.size) for one in opinions if one.size > 1)
    if not menus:
        return {}
    [(menu, _)] = menus.most_common(1)
    common: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for one in opinions:
        if (one.menu, one.size) == menu and one.first[0] != one.second[0]:
            first, second = sorted((one.first, one.second))
            common[first[0], second[0]].append((first[1], second[1]))
    kappas = {pair: (len(choices), cohen_kappa(choices)) for pair, choices in sorted(common.items())}
    return {pair: (count, kappa) for pair, (count, kappa) in kappas.items() if kappa is not None}


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
        for i, one in enumerate(unit):
            for j, other in enumerate(unit):
                if i != j:
                    together[place[one], place[other]] += 1 / (len(unit) - 1)
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


def cohen_kappa(pairs: Sequence[tuple[int, int]]) -> float | None:
    """Return Cohen's kappa of two people on the questions both saw; None with fewer than `FEWEST_ITEMS` of them."""
    if len(pairs) < FEWEST_ITEMS:
        return None
    choices = np.array(pairs)
    options = sorted({option for pair in pairs for option in pair})
    share = float((choices[:, 0] == choices[:, 1]).mean())
    by_chance = sum(float((choices[:, 0] == k).mean() * (choices[:, 1] == k).mean()) for k in options)
    return 1.0 if by_chance == 1 else (share - by_chance) / (1 - by_chance)


def waiting_time(votes_needed: float, median: float | None, present: int) -> float | None:
    """Return how long a new question waits, in seconds; None if nobody is there, or how long a vote takes is unknown.

    Args:
        votes_needed: by all questions that are open.
        median: seconds that a vote takes.
        present: how many people are there.
    """
    return None if present == 0 or median is None else votes_needed * median / present


@dataclass(frozen=True, slots=True, kw_only=True)
class Staffing:
    """What a number of people would do for the time that a question waits.

    Attributes:
        people: at work at the same time.
        busy: the share of their time that they are; 1 or more if they cannot keep up.
        waiting: the share of questions that nobody takes within `wait` seconds.
    """

    people: int
    busy: float
    waiting: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StaffingPlan:
    """How many people a policy takes, under arrivals at random (Poisson) and times to vote that vary likewise.

    Attributes:
        reviews_per_hour: votes that are asked for.
        load: people who are busy on average.
        wait: the seconds of `Staffing.waiting`.
        rows: from the fewest who can keep up, to the first number with whom at most a hundredth of questions waits longer.
    """

    reviews_per_hour: float
    load: float
    wait: float
    rows: tuple[Staffing, ...]


def plan_staffing(
    *,
    calls_per_hour: float,
    guardian_share: float,
    seconds: float,
    audit_rate: float = 0.0,
    votes_per_item: float = 1.0,
    overlap: float = 0.0,
    wait: float = 60.0,
) -> StaffingPlan:
    """Estimate how many people it takes, under the assumptions of `StaffingPlan`.

    Args:
        calls_per_hour: the traffic.
        guardian_share: the share of calls that is deferred.
        seconds: that a vote takes on average.
        audit_rate: the share of the other calls that is audited.
        votes_per_item: on average.
        overlap: the share of questions with a second opinion.
        wait: seconds within which a question should be taken.
    """
    share = guardian_share + audit_rate * (1 - guardian_share)
    reviews = calls_per_hour * share * votes_per_item * (1 + overlap)
    load = reviews * seconds / 3600
    if not (load <= MOST_PEOPLE and seconds > 0 and wait > 0):
        raise OptionError(
            f"{reviews:g} votes an hour of {seconds:g} s each keep {load:g} people busy; a plan is made for up to "
            f"{MOST_PEOPLE:,}: give smaller numbers, all above 0"
        )
    people, rows = int(load) + 1, list[Staffing]()
    blocked = _erlang_b(people, load)
    while not rows or rows[-1].waiting > 0.01:
        waiting = _delayed(blocked, people, load) * exp(-(people - load) * wait / seconds)
        rows.append(Staffing(people=people, busy=load / people, waiting=waiting))
        people += 1
        blocked = load * blocked / (people + load * blocked)
    return StaffingPlan(reviews_per_hour=reviews, load=load, wait=wait, rows=tuple(rows))


def erlang_c(people: int, load: float) -> float:
    """Return the share of questions that find everybody busy: Erlang's C for a load below the number of people."""
    return _delayed(_erlang_b(people, load), people, load)


def _erlang_b(people: int, load: float) -> float:
    """Return the share that would be turned away if nobody waited: Erlang's B, by its recursion."""
    blocked = 1.0
    for k in range(1, people + 1):
        blocked = load * blocked / (k + load * blocked)
    return blocked


def _delayed(blocked: float, people: int, load: float) -> float:
    return blocked / (1 - load / people * (1 - blocked))
