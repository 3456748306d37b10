"""Features of a query for a learned score: fixed transforms of what is known before the Guardian is asked.

Nothing here is estimated from rows, so a row's features are the same whatever log it is in; only then do logged rows and
the query stand on equal terms. Equal inputs give equal features to the bit, in a log and live: the logarithm is that of
the `math` module, one value at a time, and sums go from left to right.

Knows nothing of losses, fits or files.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from conformal_arbitrage.core.arrays import Floats, Integers
from conformal_arbitrage.errors import OptionError

VERSION = 1
"""Of the transforms below; a certificate names it, since other transforms would be another score."""
LARGEST_FIXED_MENU = 8
_POSITIONS = 10
_KNOTS = (0, 1, 2, 3, 5, 8)
_LEVELS = (0.0, 0.1, 0.25, 0.4)
_PAIR_LEVELS = (0.0, 0.15, 0.3)
_LOWEST, _HIGHEST = 1e-3, 1 - 1e-6
_USUAL_TOKENS = math.log(50)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSet:
    """Which features a score is learned from.

    Attributes:
        menu_size: the number of actions of every query, as declared; the probability of each action is then a feature.
            None if menus differ, or in router form.
        groups: the groups that have a column of their own.
        tokens: whether the Primary's output tokens are known when the decision is made.
        text: how many columns the vector of a query's text has; 0 without one.
    """

    menu_size: int | None = None
    groups: tuple[str, ...] = ()
    tokens: bool = False
    text: int = 0

    def __post_init__(self) -> None:
        """Refuse a menu that is too large for a column per pair of actions."""
        if self.menu_size is not None and not 2 <= self.menu_size <= LARGEST_FIXED_MENU:
            raise OptionError(f"menu_size must lie in 2 to {LARGEST_FIXED_MENU}; got {self.menu_size!r}")

    def penalties(self) -> Floats:
        """Return the weight of each column in the penalty: the level and slope of the score are almost free."""
        width = 2 + len(_KNOTS) + 2 * _POSITIONS + self.menu_width + len(self.groups) + 2 * self.tokens + self.text
        weights = np.ones(width)
        weights[:2] = 0.001, 0.1
        return weights

    @property
    def menu_width(self) -> int:
        """How many columns the probabilities of a declared menu take."""
        size = self.menu_size or 0
        return size * len(_LEVELS) + size * (size - 1) * len(_PAIR_LEVELS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureRows:
    """What the features of some rows are computed from.

    Attributes:
        margin: the lead of each row's top action or, in router form, the confidence.
        top: the position of the top action.
        scores: rows x actions, if every row has as many as declared; else None.
        group: the name of each row's group; "" if it has none.
        tokens: the Primary's output tokens, NaN if unknown; None if no row has any.
        text: rows x columns, the vector of each row's text, zeros if it has none; None without that feature.
    """

    margin: Floats
    top: Integers
    scores: Floats | None = None
    group: list[str] | None = None
    tokens: Floats | None = None
    text: Floats | None = None


def feature_matrix(features: FeatureSet, rows: FeatureRows) -> Floats:
    """Return the features of every row: rows x columns, in the order of `FeatureSet.penalties`."""
    z = _mapped(_third_logit, rows.margin)
    parts = [np.ones((len(z), 1)), z[:, None], np.maximum(0.0, 3 * z[:, None] - np.array(_KNOTS)) / 3]
    place = (rows.top[:, None] == np.arange(_POSITIONS)).astype(np.float64)
    parts += [place, place * z[:, None]]
    if features.menu_size is not None:
        parts += _menu(features.menu_size, rows)
    if features.groups:
        parts.append(_one_hot(features.groups, rows))
    if features.tokens:
        parts.append(_length(rows))
    if features.text:
        parts.append(np.zeros((len(z), features.text)) if rows.text is None else rows.text)
    return np.concatenate(parts, axis=1) + 0.0  # -0.0 becomes 0.0


def query_features(
    features: FeatureSet,
    margin: float,
    top: int,
    scores: Sequence[float],
    group: str | None,
    tokens: float | None,
    text: Sequence[float] = (),
) -> tuple[list[int], list[float]]:
    """Return the features of one query: their columns, and their values as in `feature_matrix`, to the bit.

    Columns that are left out are 0.

    Args:
        features: which features there are.
        margin: the lead of the top action.
        top: its position.
        scores: one per action; as many as declared if a menu size is.
        group: the query's group; None if unknown.
        tokens: the Primary's output tokens; None if unknown.
        text: the vector of its text; empty if there is none.
    """
    z = _third_logit(margin)
    bent = [(3 * z - knot) / 3 for knot in _KNOTS if 3 * z > knot]  # the knots rise, so these are the first ones
    places, values, start = list(range(2 + len(bent))), [1.0, z, *bent], 2 + len(_KNOTS)
    if top < _POSITIONS:
        places += (start + top, start + _POSITIONS + top)
        values += (1.0, z)
    start += 2 * _POSITIONS
    if features.menu_size is not None:
        _add_menu(places, values, start, top, scores)
        start += features.menu_width
    if group in features.groups:
        places.append(start + features.groups.index(group))
        values.append(1.0)
    start += len(features.groups)
    if features.tokens and tokens is not None:
        length = math.log1p(tokens) - _USUAL_TOKENS
        places += (start, start + 1)
        values += (length, max(0.0, length - 0.5))
    start += 2 * features.tokens
    for place, value in enumerate(text, start):
        if value:
            places.append(place)
            values.append(value)
    return places, values


def _add_menu(places: list[int], values: list[float], start: int, top: int, scores: Sequence[float]) -> None:
    """Add what `_menu` holds for one query, as far as it is not 0; its columns begin at `start`."""
    total, size = reduce(add, scores), len(scores)  # `sum` compensates, which arrays do not
    if min(scores) < 0 or not total > 0:
        return
    share = [score / total for score in scores]
    for level in _LEVELS:
        for place, one in enumerate(share, start):
            if one > level:
                places.append(place)
                values.append(3 * (one - level))
        start += size
    start += top * (size - 1)
    del share[top]
    for level in _PAIR_LEVELS:
        for place, one in enumerate(share, start):
            if one > level:
                places.append(place)
                values.append(3 * (one - level))
        start += size * (size - 1)


def unseen_groups(features: FeatureSet, rows: FeatureRows) -> Floats:
    """Return 1 for each row whose group has no column of its own, else 0."""
    if not features.groups or rows.group is None:
        return np.zeros(len(rows.margin))
    known = set(features.groups)
    return np.array([float(name != "" and name not in known) for name in rows.group])


def _mapped(function: Callable[[float], float], values: Floats) -> Floats:
    """Apply a function of one number to every value, once per distinct value."""
    distinct, where = np.unique(values, return_inverse=True)
    return np.array([function(value) for value in distinct.tolist()])[where]


def _third_logit(confidence: float) -> float:
    share = min(max(confidence, _LOWEST), _HIGHEST)
    return math.log(share / (1 - share)) / 3


def _menu(size: int, rows: FeatureRows) -> list[Floats]:
    """Return each action's probability, and for the top action that of every other, above some levels."""
    scores = np.zeros((len(rows.margin), size)) if rows.scores is None else rows.scores
    total = np.add.accumulate(scores, axis=1)[:, -1:]
    usable = (scores >= 0).all(axis=1, keepdims=True) & (total > 0)
    share = np.where(usable, scores / np.where(usable, total, 1.0), 0.0)
    single = [3 * np.maximum(0.0, share - level) * usable for level in _LEVELS]
    others = [[b for b in range(size) if b != a] for a in range(size)]
    is_top = rows.top[:, None] == np.arange(size)
    pairs = [
        3 * is_top[:, [a]] * np.maximum(0.0, share[:, others[a]] - level) * usable
        for level in _PAIR_LEVELS
        for a in range(size)
    ]
    return [*single, *pairs]


def _one_hot(groups: tuple[str, ...], rows: FeatureRows) -> Floats:
    place = {name: k for k, name in enumerate(groups)}
    columns = np.zeros((len(rows.margin), len(groups)))
    for row, name in enumerate(rows.group or ()):
        if name in place:
            columns[row, place[name]] = 1.0
    return columns


def _length(rows: FeatureRows) -> Floats:
    if rows.tokens is None:
        return np.zeros((len(rows.margin), 2))
    known = ~np.isnan(rows.tokens)
    length = np.where(known, _mapped(math.log1p, np.where(known, rows.tokens, 0.0)) - _USUAL_TOKENS, 0.0)
    return np.column_stack([length, np.maximum(0.0, length - 0.5)])
