"""Learned scores: features, the leave-one-out ridge over a log, and the same rule for one query."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from operator import add
from typing import NamedTuple

import numpy as np

from conformal_arbitrage.core.exact import Bools, Floats, Indices, Integers
from conformal_arbitrage.errors import OptionError

# --- Features of a query for a learned score ---


VERSION = 1
"""Of the transforms below; a certificate names it, since other transforms would be another score."""
LARGEST_FIXED_MENU = 8
_POSITIONS = 10
_KNOTS = (0, 1, 2, 3, 5, 8)
_LEVELS = (0.0, 0.1, 0.25, 0.4)
_PAIR_LEVELS = (0.0, 0.15, 0.3)
_LOWEST, _HIGHEST = 1e-3, 1 - 1e-6
_USUAL_TOKENS = math.log(50)
ANSWERS = 64
"""Places that answers are hashed to: fixed beforehand, so that no log says which answers have a column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSet:
    """Which features a score is learned from.

    Attributes:
        menu_size: the number of actions of every query, as declared; the probability of each action is then a feature.
            None if menus differ, or in router form.
        groups: the groups that have a column of their own.
        tokens: whether the Primary's output tokens are known when the decision is made.
        answers: whether the Primary's answer is known.
        text: how many columns the vector of a query's text has; 0 without one.
    """

    menu_size: int | None = None
    groups: tuple[str, ...] = ()
    tokens: bool = False
    answers: bool = False
    text: int = 0

    def __post_init__(self) -> None:
        """Refuse a menu that is too large for a column per pair of actions."""
        if self.menu_size is not None and not 2 <= self.menu_size <= LARGEST_FIXED_MENU:
            raise OptionError(f"menu_size must lie in 2 to {LARGEST_FIXED_MENU}; got {self.menu_size!r}")

    def penalties(self) -> Floats:
        """Return the weight of each column in the penalty: the level and slope of the score are almost free."""
        width = 2 + len(_KNOTS) + 2 * _POSITIONS + self.menu_width + len(self.groups) + 2 * self.tokens + self.text
        width += 2 * ANSWERS * self.answers
        weights = np.ones(width)
        weights[:2] = 0.001, 0.1
        return weights

    def widths(self) -> list[int]:
        """Return how many columns, the first ones, are tried: without answers and texts, with answers, with both."""
        width = len(self.penalties())
        return sorted({width - self.text - 2 * ANSWERS * self.answers, width - self.text, width})

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
        answer: the place of each row's answer, below `ANSWERS`, -1 if it is unknown; None without that feature.
    """

    margin: Floats
    top: Integers
    scores: Floats | None = None
    group: list[str] | None = None
    tokens: Floats | None = None
    text: Floats | None = None
    answer: Integers | None = None


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
    if features.answers:
        said = np.full(len(z), -1) if rows.answer is None else rows.answer
        place = (said[:, None] == np.arange(ANSWERS)).astype(np.float64)
        parts += [place, place * z[:, None]]
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
    answer: int = -1,
) -> tuple[list[int], list[float]]:
    """Return the features of one query: their columns, and their values as in `feature_matrix`, to the bit.

    Columns rise, and those that are left out are 0.

    Args:
        features: which features there are.
        margin: the lead of the top action.
        top: its position.
        scores: one per action; as many as declared if a menu size is.
        group: the query's group; None if unknown.
        tokens: the Primary's output tokens; None if unknown.
        text: the vector of its text; empty if there is none.
        answer: the place of its answer; -1 if unknown.
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
    if features.answers and answer >= 0:
        places += (start + answer, start + ANSWERS + answer)
        values += (1.0, z)
    start += 2 * ANSWERS * features.answers
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
        for place, part in enumerate(share, start):
            if part > level:
                places.append(place)
                values.append(3 * (part - level))
        start += size
    start += top * (size - 1)
    del share[top]
    for level in _PAIR_LEVELS:
        for place, part in enumerate(share, start):
            if part > level:
                places.append(place)
                values.append(3 * (part - level))
        start += size * (size - 1)


def unseen_groups(features: FeatureSet, rows: FeatureRows) -> Floats:
    """Return 1 for each row whose group has no column of its own, else 0."""
    if rows.group is None:
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


# --- Learned scores ---


STRENGTHS = (1.0, 5.0, 30.0, 300.0)
"""Of the penalty, in the order of preference among equals; the margin comes before all of them."""
TICKS, SHIFT = 1e9, 0.3819660112501051
"""Scores are compared as whole ticks, whose edges are shifted off simple fractions; see `rounded`."""
_QUERIES_AT_ONCE = 300_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RidgeFits:
    """The fits of all strengths to the rows of a log.

    Attributes:
        rotation: columns x columns; takes a row of features to the axes of `rotated`.
        curvature: the eigenvalue of each axis.
        rotated: rows x axes, the logged rows in these axes.
        loss: -1, 0 or 1 of each row.
        size: of the loss, 0 or 1; scores are learned from it, since a query's sign cannot be imputed.
        u: the draw of each row.
        margin: of each row; the first candidate score, kept from the largest down.
        strengths: of the penalty.
        fitted: strengths x rows, the fit at each row.
        leverage: strengths x rows, how far each row's fit follows its own loss.
        weights: strengths x axes, the coefficients.
        unseen_penalty: the penalty weight of a column that only the query has, such as that of a new group.
        features: the logged rows' features, of the rows with a loss or gain only, to recognise copies of them.
        answer: the place of each row's answer, by which gains are counted as rows are passed; None without a net loss, or if
            it is unknown. That no logged row has a gain must not matter: the query may be the one that has.
    """

    rotation: Floats
    curvature: Floats
    rotated: Floats
    loss: Integers
    size: Integers
    u: Floats
    margin: Floats
    strengths: Floats
    fitted: Floats
    leverage: Floats
    weights: Floats
    features: Floats
    unseen_penalty: float = 1.0
    answer: Integers | None = None

    @property
    def loss_rows(self) -> Indices:
        """The rows with a loss, or a gain."""
        return np.flatnonzero(self.loss)

    @property
    def gains(self) -> bool:
        """Whether some loss is negative."""
        return bool((self.loss < 0).any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnedDecisions:
    """What was decided, one entry per query.

    Attributes:
        kept: whether the Primary's answer stands.
        candidate: which score decided: 0 the margin, k the k-th strength.
        count: how many rows that score keeps, the query included.
        score: the query's own score by it; a larger one is more at risk.
    """

    kept: Bools
    candidate: Integers
    count: Integers
    score: Floats


def fit_ridges(
    features: Floats,
    penalties: Floats,
    loss: Integers,
    u: Floats,
    margin: Floats,
    *,
    strengths: tuple[float, ...],
    answer: Integers | None = None,
) -> RidgeFits:
    """Fit a log: A = X'X + lambda diag(penalties), for every strength lambda.

    Args:
        features: rows x columns.
        penalties: the weight of each column.
        loss: -1, 0 or 1 per row.
        u: one draw per row.
        margin: of each row, above 0: rows tied at the top are always deferred, and are left out.
        strengths: the lambdas.
        answer: the place of each row's answer; None if it is unknown.
    """
    scale = 1 / np.sqrt(penalties)
    scaled = features * scale
    curvature, axes = np.linalg.eigh(scaled.T @ scaled)
    curvature = np.maximum(curvature, 0.0)
    rotation = scale[:, None] * axes
    rotated = features @ rotation
    shrunk = 1 / (curvature + np.array(strengths)[:, None])
    size = np.abs(loss)
    weights = shrunk * (rotated.T @ size)
    return RidgeFits(
        rotation=rotation,
        curvature=curvature,
        rotated=rotated,
        loss=loss,
        size=size,
        u=u,
        margin=margin,
        strengths=np.array(strengths),
        fitted=weights @ rotated.T,
        leverage=shrunk @ (rotated**2).T,
        weights=weights,
        features=features[size > 0],
        answer=answer,
    )


def spendable_losses(alpha: Fraction, bound: Fraction, n: int) -> int:
    """Return how many losses of the bound n rows and a query may have: floor(alpha (n + 1) / B)."""
    return int(alpha * (n + 1) / bound // 1)


def decide_learned(
    fits: RidgeFits,
    features: Floats,
    u: Floats,
    margin: Floats,
    *,
    budget: int,
    unseen: Floats | None = None,
    with_margin: bool = True,
) -> LearnedDecisions:
    """Decide queries: each by the candidate score that keeps most rows, the first one among equals.

    Args:
        fits: the fitted log.
        features: queries x columns.
        u: one draw per query.
        margin: of each query; one tied at the top (margin 0) is deferred.
        budget: of `spendable_losses`.
        unseen: 1 for a query with a column of its own, such as a new group, else 0.
        with_margin: whether the margin itself is a candidate, as for automatic choice.
    """
    return decide_budgets(fits, features, u, margin, budgets=[budget], unseen=unseen, with_margin=with_margin)[0]


def decide_variants(
    variants: Sequence[RidgeFits],
    features: Floats,
    u: Floats,
    margin: Floats,
    *,
    budgets: Sequence[int],
    unseen: Floats | None = None,
    answer: Integers | None = None,
    with_margin: bool = True,
) -> list[LearnedDecisions]:
    """Decide queries as `decide_budgets` does, by the best candidate of several fits.

    Candidates are numbered through: first the margin, then the strengths of the first fit, then those of the next.

    Args:
        variants: the log fitted to fewer and to more features; each has the first columns, as many as it was fitted to.
        features, u, margin, budgets, unseen, answer, with_margin: as in `decide_budgets`.
    """
    best: list[LearnedDecisions] = []
    for place, fits in enumerate(variants):
        decided = decide_budgets(
            fits, features[:, : len(fits.rotation)], u, margin, budgets=budgets, unseen=unseen,
            answer=answer, with_margin=with_margin and place == 0,
        )  # fmt: skip
        numbered = [
            replace(decisions, candidate=decisions.candidate + place * len(fits.strengths)) for decisions in decided
        ]
        best = [_best_of(*pair) for pair in zip(best, numbered, strict=True)] if best else numbered
    return best


def _best_of(first: LearnedDecisions, second: LearnedDecisions) -> LearnedDecisions:
    """Return, for each query, the decision whose candidate keeps more rows; the first one among equals."""
    better = second.count > first.count
    return LearnedDecisions(
        kept=np.where(better, second.kept, first.kept),
        candidate=np.where(better, second.candidate, first.candidate),
        count=np.where(better, second.count, first.count),
        score=np.where(better, second.score, first.score),
    )


def decide_budgets(
    fits: RidgeFits,
    features: Floats,
    u: Floats,
    margin: Floats,
    *,
    budgets: Sequence[int],
    unseen: Floats | None = None,
    answer: Integers | None = None,
    with_margin: bool = True,
) -> list[LearnedDecisions]:
    """Decide queries as `decide_learned` does under several budgets, which share their scores.

    Queries that are alike but for their draws share them too. `answer` holds the places of their answers.
    """
    new_groups = np.zeros(len(u)) if unseen is None else unseen
    said = np.full(len(u), -1) if answer is None else answer
    described = np.ascontiguousarray(np.column_stack([features, margin, new_groups, said]))
    as_bytes = described.view(np.dtype((np.void, described.dtype.itemsize * described.shape[1])))[:, 0]
    _, first, kind = np.unique(as_bytes, return_index=True, return_inverse=True)
    order = np.argsort(kind, kind="stable")
    step = max(1, _QUERIES_AT_ONCE // max(1, len(fits.loss)))
    parts: list[list[LearnedDecisions]] = []
    for a in range(0, len(first), step):
        some = first[a : a + step]
        queries = order[slice(*np.searchsorted(kind[order], [a, a + len(some)]))]
        kinds = _Kinds(
            features=features[some], margin=margin[some], unseen=new_groups[some], answer=said[some],
            member=kind[queries] - a,
        )  # fmt: skip
        parts.append(_decide_block(fits, kinds, u[queries], budgets, with_margin=with_margin))
    back = np.argsort(order, kind="stable")
    return [_joined([part[k] for part in parts], back) for k in range(len(budgets))]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kinds:
    """Queries that differ in more than their draws.

    Attributes:
        features: kinds x columns.
        margin: of each.
        unseen: 1 for one with a column of its own, else 0.
        answer: the place of its answer.
        member: the kind of each query, ascending.
    """

    features: Floats
    margin: Floats
    unseen: Floats
    answer: Integers
    member: Indices


def _joined(parts: Sequence[LearnedDecisions], order: Indices) -> LearnedDecisions:
    return LearnedDecisions(
        kept=np.concatenate([np.zeros(0, np.bool_), *(part.kept for part in parts)])[order],
        candidate=np.concatenate([np.zeros(0, np.int64), *(part.candidate for part in parts)])[order],
        count=np.concatenate([np.zeros(0, np.int64), *(part.count for part in parts)])[order],
        score=np.concatenate([np.zeros(0), *(part.score for part in parts)])[order],
    )


def left_out_kept(variants: Sequence[RidgeFits], *, budget: int, with_margin: bool) -> Bools:
    """Return which logged rows are kept if each is decided by the others: the rule applied to the log itself.

    Args:
        variants: the log fitted to fewer and to more features.
        budget: how many losses its rows may have.
        with_margin: as in `decide_learned`.
    """
    fits, scores = variants[0], [-variants[0].margin] if with_margin else []
    for each in variants:
        scores += [rounded(residuals) for residuals in each.size - (each.size - each.fitted) / (1 - each.leverage)]
    best, most, chosen, by_margin = np.zeros(len(fits.size), np.bool_), 0, 0, 0 if with_margin else -1
    for number, score in enumerate(scores):
        lost = fits.loss_rows[np.lexsort((fits.u[fits.loss_rows], score[fits.loss_rows]))]
        kept = np.ones(len(score), np.bool_)
        if budget < len(lost):
            line, line_u = score[lost[budget]], fits.u[lost[budget]]
            kept = (score < line) | ((score == line) & (fits.u < line_u))
        if kept.sum() > most:
            best, chosen, most = kept, number, int(kept.sum())
    if fits.answer is not None and chosen != by_margin:
        return passed_by_signs(scores[chosen], fits.u, fits.loss, fits.answer, budget)
    if not fits.gains:
        return best
    order = np.lexsort((-fits.loss, fits.u, scores[chosen]))
    passed = np.empty(len(order), np.bool_)
    passed[order] = _highest_sums(fits.loss[order])[:-1] < budget
    return passed


def _highest_sums(losses: Integers) -> Integers:
    """Return the highest sum so far, the empty one included, before each loss and after the last."""
    return np.maximum.accumulate(
        np.concatenate([np.zeros_like(losses[..., :1]), np.cumsum(losses, axis=-1)], axis=-1), axis=-1
    )


_LEAST_SCORE = 0.01
"""Of a row whose score is weighed by the share of gains: a ridge may predict less than nothing."""
_USUAL_SHARE, _USUAL_WEIGHT, _SHARED_WEIGHT = 0.2, 10.0, 3.0
"""The share of gains before any sign is known; how many rows it counts as, and how many the share of all answers does."""
_MOST_EVIDENCE = 30.0


def passed_by_signs(
    scores: Floats, u: Floats, loss: Integers, answer: Integers, budget: int, *, query: int = -1
) -> Bools:
    """Return which rows are passed before the sum of losses, with one more, exceeds the budget, if signs weigh the scores.

    Next is always the row whose score times (1 - 2 share) is least, where share is that of gains among the rows passed so
    far that have its answer. So a row's own sign does not matter until it is passed. Rows that tie in all of this, such as
    copies with one draw, are passed together. A share is drawn towards that of all answers, and equals it as far as answers
    have foretold the signs no better.

    Args:
        scores: the expected size of each row's loss.
        u: the draw of each.
        loss: -1, 0 or 1 of each; that of the query does not matter.
        answer: the place of each row's answer.
        budget: how many losses there may be.
        query: a row at which to stop; -1 for none.
    """
    order = np.lexsort((u, scores, answer))
    rows: list[int] = order.tolist()
    size: list[float] = np.maximum(scores, _LEAST_SCORE)[order].tolist()
    draws, signs = u[order].tolist(), loss[order].tolist()
    starts = [0, *(np.flatnonzero(np.diff(answer[order])) + 1).tolist()]
    waiting = [[first, end - 1, 0, 0] for first, end in zip(starts, [*starts[1:], len(rows)], strict=True)]
    passed, total, gained, known, evidence = np.zeros(len(rows), np.bool_), 0, 0, 0, 0.0
    while waiting and total < budget:
        pooled = (gained + _USUAL_WEIGHT * _USUAL_SHARE) / (known + _USUAL_WEIGHT)
        trust = 1 / (1 + math.exp(-evidence))
        best, at, chosen = math.inf, 0, waiting[0]
        for some in waiting:
            first, last, gains, seen = some
            kept = 1 - 2 * (pooled + trust * (gains - seen * pooled) / (seen + _SHARED_WEIGHT))
            place = first if kept >= 0 else last
            risk = size[place] * kept
            if risk < best or (risk == best and draws[place] < draws[at]):
                best, at, chosen = risk, place, some
        first, last, gains, seen = chosen
        end, step = (last + 1, 1) if at == first else (first - 1, -1)
        stop = at + step
        while stop != end and size[stop] == size[at] and draws[stop] == draws[at]:
            stop += step
        chosen[0 if step > 0 else 1] = stop
        if stop == end:
            waiting.remove(chosen)
        together = range(at, stop, step)
        lost = sum(signs[k] > 0 for k in together if rows[k] != query)
        for k in together:
            passed[rows[k]] = total + lost - (signs[k] > 0 and rows[k] != query) < budget
            if rows[k] == query:
                return passed
        if total + lost >= budget:
            break
        won = sum(signs[k] < 0 for k in together)
        share = (gains + _SHARED_WEIGHT * pooled) / (seen + _SHARED_WEIGHT)
        evidence += won * math.log(share / pooled) + lost * math.log((1 - share) / (1 - pooled))
        evidence = min(max(evidence, -_MOST_EVIDENCE), _MOST_EVIDENCE)
        chosen[2] += won
        chosen[3] += won + lost
        total, gained, known = total + lost - won, gained + won, known + won + lost
    return passed


def _passes_by_signs(
    scores: Floats, u: Floats, loss: Integers, answer: Integers, query: tuple[float, float, int], budget: int
) -> bool:
    """Tell whether a query, of a score, a draw and an answer, is among `passed_by_signs`."""
    score, drawn, said = query
    columns = (np.append(scores, score), np.append(u, drawn), np.append(loss, 1), np.append(answer, said))
    return bool(passed_by_signs(*columns, budget, query=len(scores))[-1])


def _decide_block(
    fits: RidgeFits, kinds: _Kinds, u: Floats, budgets: Sequence[int], *, with_margin: bool
) -> list[LearnedDecisions]:
    copies = _copies(fits, np.where(kinds.unseen[:, None] > 0, np.nan, kinds.features))
    n, member = len(u), kinds.member
    best = [
        LearnedDecisions(kept=np.zeros(n, np.bool_), candidate=np.full(n, -1), count=np.full(n, -1), score=np.zeros(n))
        for _ in budgets
    ]
    for number in range(0 if with_margin else 1, len(fits.strengths) + 1):
        if number == 0:
            rows, query_scores = _by_margin(fits, kinds.margin)
        else:
            rows, query_scores = _left_out_scores(fits, number - 1, kinds.features, kinds.unseen, copies)
        for k, budget in enumerate(budgets):
            counted, stands = _count(rows, query_scores, fits, u, budget, member)
            if fits.answer is not None and number != MARGIN:
                lossy, said = fits.loss_rows, fits.answer
                for query in np.flatnonzero(counted > best[k].count).tolist():
                    kind = member[query]
                    asked = (float(query_scores[kind]), float(u[query]), int(kinds.answer[kind]))
                    stands[query] = _passes_by_signs(
                        rows[kind, lossy], fits.u[lossy], fits.loss[lossy], said[lossy], asked, budget
                    )
            elif fits.gains:
                stands = _passes(rows, query_scores, fits, u, budget, member)
            candidate = LearnedDecisions(
                kept=stands, candidate=np.full(n, number), count=counted, score=query_scores[member]
            )
            best[k] = _best_of(best[k], candidate)
    return [replace(decisions, kept=decisions.kept & (kinds.margin > 0)[member]) for decisions in best]


def _by_margin(fits: RidgeFits, margin: Floats) -> tuple[Floats, Floats]:
    """Return the margin as a score: the larger it is, the smaller the risk."""
    return np.broadcast_to(-fits.margin, (len(margin), len(fits.margin))), -margin


def _left_out_scores(
    fits: RidgeFits, k: int, features: Floats, unseen: Floats | None, copies: list[tuple[int, Indices]]
) -> tuple[Floats, Floats]:
    """Return every row's leave-one-out score with each query added at a loss, queries x rows, and the queries' own.

    A row with a loss that equals the query in all features has the query's score by symmetry; it is given exactly that,
    since float noise would order the two by something else than their draws.
    """
    query = features @ fits.rotation
    shrunk = query / (fits.curvature + fits.strengths[k])
    across = shrunk @ fits.rotated.T
    norms = np.einsum("qa,qa->q", shrunk, query)
    unrounded = query @ fits.weights[k]
    weight = 1.0 if unseen is None else _query_weight(unseen, float(fits.strengths[k]) * fits.unseen_penalty)
    gain = 1 / (1 / weight + norms)
    moved = across * ((unrounded - 1) * gain)[:, None]
    moved += fits.size - fits.fitted[k]
    across *= across
    across *= gain[:, None]
    across += 1 - fits.leverage[k]
    moved /= across
    scores, predicted = rounded(np.subtract(fits.size, moved, out=moved)), rounded(unrounded)
    for place, rows in copies:
        scores[place, rows] = predicted[place]
    return scores, predicted


def rounded(values: Floats) -> Floats:
    """Round scores to nine decimals, so that scores equal by symmetry tie whatever the noise of the last digits.

    The edges between two roundings lie at places that no such score has: shares such as 1 / 1024 lie exactly between two
    decimals.
    """
    ticks = values * TICKS
    ticks += SHIFT
    np.rint(ticks, out=ticks)
    ticks -= SHIFT
    ticks /= TICKS
    return ticks


def _query_weight(unseen: Floats, penalty: float) -> Floats:
    """Return the weight that stands for a column of the query's own with this penalty: q / (1 + q)."""
    return np.where(unseen > 0, penalty / (1 + penalty), 1.0)


def _copies(fits: RidgeFits, features: Floats) -> list[tuple[int, Indices]]:
    """Return, for each query with such rows, those with a loss whose features are the query's to the bit.

    A query with a column of its own has no copies; its features come as NaN.
    """
    rows: dict[bytes, list[int]] = {}
    for row, content in zip(fits.loss_rows.tolist(), fits.features, strict=True):
        rows.setdefault(content.tobytes(), []).append(row)
    matches = ((place, rows.get(content.tobytes())) for place, content in enumerate(features))
    return [(place, np.array(same)) for place, same in matches if same is not None]


def _passes(scores: Floats, query_scores: Floats, fits: RidgeFits, u: Floats, budget: int, member: Indices) -> Bools:
    """Return which queries come before the sum of losses, with one more, first exceeds the budget."""
    rows = fits.loss_rows[np.lexsort((-fits.loss[fits.loss_rows], fits.u[fits.loss_rows]))]
    values = scores[:, rows]
    highest = _highest_sums(fits.loss[rows][np.argsort(values, axis=1, kind="stable")])
    place = np.count_nonzero(values < query_scores[:, None], axis=1)[member]
    tied = values == query_scores[:, None]
    for k in np.flatnonzero(tied.any(axis=1)).tolist():
        queries = slice(*np.searchsorted(member, [k, k + 1]))
        place[queries] += np.searchsorted(fits.u[rows[tied[k]]], u[queries], side="right")
    return highest[member, place] < budget


def _count(
    scores: Floats, query_scores: Floats, fits: RidgeFits, u: Floats, budget: int, member: Indices
) -> tuple[Integers, Bools]:
    """Return how many rows come before the budget is spent, the query among them, and whether it is one of them.

    Gains count as losses, and so does the query. The line is the (budget + 1)-th loss in the order of (score, draw).
    Only where several are tied at the line do draws matter.

    Args:
        scores: kinds of queries x rows.
        own: of each kind of query.
        fits: the fitted log.
        u: one draw per query.
        budget: how many losses may come before the line.
        member: the kind of each query, ascending.
    """
    lossy = fits.loss_rows
    values = np.concatenate([scores[:, lossy], query_scores[:, None]], axis=1)
    if values.shape[1] <= budget:
        return np.full(len(u), scores.shape[1] + 1), np.ones(len(u), np.bool_)
    line = np.partition(values, budget, axis=1)[:, [budget]]
    place = budget - np.count_nonzero(values < line, axis=1)
    tied, below, tied_itself = scores == line, np.count_nonzero(scores < line, axis=1), query_scores == line[:, 0]
    stands = (query_scores < line[:, 0])[member]
    count = below[member] + stands
    for k in np.flatnonzero(np.count_nonzero(tied, axis=1) + tied_itself > 1).tolist():
        queries = slice(*np.searchsorted(member, [k, k + 1]))
        rows = np.flatnonzero(tied[k])
        lost = np.sort(fits.u[rows[fits.size[rows] > 0]])
        ends = np.concatenate([[-np.inf], lost, [np.inf]])[place[k] : place[k] + 2]
        drawn = np.clip(u[queries], *ends) if tied_itself[k] else ends[1]
        stands[queries] |= tied_itself[k] & (u[queries] < drawn)
        count[queries] = below[k] + np.searchsorted(np.sort(fits.u[rows]), drawn) + stands[queries]
    return count, stands


# --- The learned score for one query at a time ---


MARGIN = 0
"""The candidate without a fit; the k-th strength is candidate k."""


class LearnedDecision(NamedTuple):
    """What was decided about one query.

    Attributes:
        kept: whether the Primary's answer stands.
        candidate: which score decided: 0 the margin, k the k-th strength.
        kept_rows: how many rows that score keeps, the query included.
        score: the query's own score by it; a larger one is more at risk.
    """

    kept: bool
    candidate: int
    kept_rows: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnedRule:
    """A fitted log, ready to decide queries.

    Attributes:
        budget: how many losses the rows and the query may have.
        with_margin: whether the margin itself is a candidate.
        rotation: columns x axes, as in `RidgeFits`.
        shrunk: axes x strengths, 1 / (curvature + strength).
        weights: strengths x axes, the coefficients.
        across: columns x (strengths x classes): what a feature of the query adds to its product with each class.
        residual: strengths x classes, the size of the loss minus its fit, in ticks.
        size: of each class's loss, in ticks and shifted.
        free: strengths x classes, 1 minus the leverage.
        sizes: rows of each class.
        draws: the draws of each class, in order.
        lossy: how many classes, the first ones, have a loss or gain.
        losses: the class of each row with a loss or gain, in the order of the classes.
        walked: the same in the order of the draws, losses first among equals; `loss` and `u` are of these rows.
        loss: -1 or 1.
        u: the draw.
        answer: the place of the answer; None if it is unknown.
        highest: the highest sum of the first losses in the order of the margin, from none of them to all.
        rows: number of logged rows.
        unseen_penalties: of a column that only the query has, by strength.
        by_margin: (-margin, draw) of all rows, in order.
        losses_by_margin: the same of the rows with a loss or gain.
        gains: whether some loss is negative.
        copies: features of a class with a loss or gain, as bytes -> that class.
    """

    budget: int
    with_margin: bool
    rotation: Floats
    shrunk: Floats
    weights: Floats
    across: Floats
    residual: Floats
    size: Floats
    free: Floats
    sizes: Floats
    draws: Sequence[Sequence[float]]
    lossy: int
    losses: Indices
    walked: Indices
    loss: Integers
    u: Floats
    answer: Integers | None
    highest: Sequence[int]
    gains: bool
    rows: int
    unseen_penalties: Floats
    by_margin: Sequence[tuple[float, float]]
    losses_by_margin: Sequence[tuple[float, float]]
    copies: dict[bytes, int]

    def decide(
        self,
        places: Sequence[int],
        values: Sequence[float],
        u: float,
        margin: float,
        *,
        unseen: bool = False,
        answer: int = -1,
        to_beat: int = -1,
    ) -> LearnedDecision | None:
        """Decide one query by the candidate that keeps most rows, the first one among equals.

        Args:
            places: columns of its features that are not 0.
            values: those features.
            u: its draw.
            margin: its margin, above 0.
            unseen: whether it has a column of its own, such as a new group.
            answer: the place of its answer; -1 if unknown.
            to_beat: how many rows another rule keeps; None is returned if none keeps more.
        """
        best = self._by_margin(u, margin) if self.with_margin else None
        to_beat = to_beat if best is None else best.kept_rows
        scores, query_scores = self._scores(places, values, unseen=unseen)
        for number, (count, kept, score) in enumerate(self._counts(scores, query_scores, u), start=1):
            if count > to_beat:
                best, to_beat = LearnedDecision(kept=kept, candidate=number, kept_rows=count, score=score), count
        if best is None or len(self.losses) < self.budget or not (self.gains or self.answer is not None):
            return best
        if best.candidate == MARGIN:
            before = bisect_right(self.losses_by_margin, (-margin, u))
            return best._replace(kept=self.highest[before] < self.budget)
        walked, query_score = scores[best.candidate - 1].take(self.walked), float(query_scores[best.candidate - 1])
        if self.answer is None:
            return best._replace(kept=self._passes(walked, query_score, u))
        asked = ((query_score - SHIFT) / TICKS, u, answer)
        kept = _passes_by_signs((walked - SHIFT) / TICKS, self.u, self.loss, self.answer, asked, self.budget)
        return best._replace(kept=kept)

    def _passes(self, scores: Floats, query_score: float, u: float) -> bool:
        """Tell whether the query comes before the sum of losses, with one more, first exceeds the budget."""
        before = np.flatnonzero((scores < query_score) | ((scores == query_score) & (self.u <= u)))
        order = before[np.argsort(scores[before], kind="stable")]
        return int(np.cumsum(self.loss[order]).max(initial=0)) < self.budget

    def _by_margin(self, u: float, margin: float) -> LearnedDecision:
        """Count the rows before the line in the order of the margin; the query counts as a loss."""
        if len(self.losses) < self.budget:
            return LearnedDecision(kept=True, candidate=MARGIN, kept_rows=self.rows + 1, score=-margin)
        query_place, lost = (-margin, u), self.losses_by_margin
        before = bisect_left(lost, query_place)
        line = query_place if before == self.budget else lost[self.budget - (before < self.budget)]
        kept = query_place < line
        count = bisect_left(self.by_margin, line) + kept
        return LearnedDecision(kept=kept, candidate=MARGIN, kept_rows=count, score=-margin)

    def _scores(self, places: Sequence[int], values: Sequence[float], *, unseen: bool) -> tuple[Floats, Floats]:
        """Return the score of every class by every strength, and the query's, in ticks."""
        some, columns = np.array(values), np.array(places, dtype=np.intp)
        query = some @ self.rotation.take(columns, axis=0)
        predicted = self.weights @ query
        gain = 1 / (1 + (query * query) @ self.shrunk)
        if unseen:
            gain = 1 / (1 + 1 / self.unseen_penalties + (query * query) @ self.shrunk)
        across = (some @ self.across.take(columns, axis=0)).reshape(self.free.shape)
        scores = self._left_out_scores(across, predicted, gain)
        query_scores = np.rint(predicted * TICKS + SHIFT)
        same = None if unseen else self.copies.get(self._dense(columns, some))
        if same is not None:
            scores[:, same] = query_scores
        return scores, query_scores

    def _left_out_scores(self, across: Floats, predicted: Floats, gain: Floats) -> Floats:
        """Return every class's leave-one-out score with the query added at a loss, in ticks."""
        moved = across * ((1 - predicted) * gain * TICKS)[:, None]
        np.subtract(self.residual, moved, out=moved)
        np.multiply(across, across, out=across)
        across *= gain[:, None]
        across += self.free
        moved /= across
        np.subtract(self.size, moved, out=moved)
        return np.rint(moved, out=moved)

    def _dense(self, columns: Indices, values: Floats) -> bytes:
        row = np.zeros(len(self.rotation))
        row[columns] = values
        return row.tobytes()

    def _counts(self, scores: Floats, query_scores: Floats, u: float) -> list[tuple[int, bool, float]]:
        """Return, for every strength, how many rows and query come before the (budget + 1)-th loss, and its score."""
        if len(self.losses) < self.budget:
            return [(self.rows + 1, True, (score - SHIFT) / TICKS) for score in query_scores.tolist()]
        lossy, repeated = self.lossy, len(self.losses) > self.lossy
        of_rows = scores.take(self.losses, axis=1) if repeated else scores[:, :lossy]
        lost = np.concatenate([of_rows, query_scores[:, None]], axis=1)
        lost.partition(self.budget, axis=1)
        lines = lost[:, self.budget : self.budget + 1]
        below = (scores < lines).astype(np.float64)
        before, lost_before = below @ self.sizes, below[:, :lossy] @ self.sizes[:lossy]
        tied: list[list[int]] = [[] for _ in query_scores]
        places: list[int] = np.flatnonzero(scores == lines).tolist()
        for place in places:
            tied[place // len(self.sizes)].append(place % len(self.sizes))
        columns = (lines[:, 0].tolist(), query_scores.tolist(), before.tolist(), lost_before.tolist(), tied)
        return [self._count(*column, u) for column in zip(*columns, strict=True)]

    def _count(
        self, line: float, query_score: float, before: float, lost_before: float, tied: Sequence[int], u: float
    ) -> tuple[int, bool, float]:
        """Count rows and query before the line of one strength, where draws tell apart what is tied with it."""
        if (
            query_score != line and len(tied) == 1 and len(self.draws[tied[0]]) == 1
        ):  # nearly always: one row is on the line
            return int(before) + (query_score < line), query_score < line, (query_score - SHIFT) / TICKS
        draws = [u] if query_score == line else []
        for place in tied:
            draws += self.draws[place] if place < self.lossy else ()
        drawn = sorted(draws)[self.budget - int(lost_before) - (query_score < line)]
        kept = query_score < line or (query_score == line and u < drawn)
        count = int(before) + sum(bisect_left(self.draws[place], drawn) for place in tied) + kept
        return count, kept, (query_score - SHIFT) / TICKS


def learned_rule(fits: RidgeFits, features: Floats, *, budget: int, with_margin: bool) -> LearnedRule:
    """Lay a fitted log out for single queries.

    Args:
        fits: the fitted log.
        features: of its rows.
        budget: of `spendable_losses`, 1 or more.
        with_margin: whether the margin itself is a candidate.
    """
    classes: dict[tuple[bool, bytes], list[int]] = {}
    by_draw = fits.loss_rows[np.lexsort((-fits.loss[fits.loss_rows], fits.u[fits.loss_rows]))]
    order: list[int] = [*fits.loss_rows.tolist(), *np.flatnonzero(fits.loss == 0).tolist()]
    for row in order:
        classes.setdefault((bool(fits.size[row]), features[row].tobytes()), []).append(row)
    first, sizes = (np.array([choose(rows) for rows in classes.values()], dtype=np.intp) for choose in (min, len))
    lossy = sum(lost for lost, _ in classes)
    shrunk = 1 / (fits.curvature[:, None] + fits.strengths)
    across = [fits.rotation @ (fits.rotated[first] * weights).T for weights in shrunk.T]
    class_of = np.empty(len(fits.loss), dtype=np.intp)
    for place, rows in enumerate(classes.values()):
        class_of[rows] = place
    by_score = by_draw[np.argsort(-fits.margin[by_draw], kind="stable")]
    by_margin: list[tuple[float, float]] = list(zip((-fits.margin).tolist(), fits.u.tolist(), strict=True))
    return LearnedRule(
        budget=budget,
        with_margin=with_margin,
        rotation=fits.rotation,
        shrunk=shrunk,
        weights=fits.weights,
        across=np.concatenate(across, axis=1),
        residual=(fits.size - fits.fitted)[:, first] * TICKS,
        size=fits.size[first].astype(np.float64) * TICKS + SHIFT,
        free=1 - fits.leverage[:, first],
        sizes=sizes.astype(np.float64),
        draws=[sorted(fits.u[rows].tolist()) for rows in classes.values()],
        lossy=lossy,
        losses=np.repeat(np.arange(lossy), sizes[:lossy]),
        walked=class_of[by_draw],
        loss=fits.loss[by_draw],
        u=fits.u[by_draw],
        answer=None if fits.answer is None else fits.answer[by_draw],
        highest=_highest_sums(fits.loss[by_score]).tolist(),
        gains=fits.gains,
        rows=len(fits.loss),
        unseen_penalties=fits.strengths * fits.unseen_penalty,
        by_margin=sorted(by_margin),
        losses_by_margin=sorted(by_margin[row] for row in order[: len(fits.loss_rows)]),
        copies={content: place for place, (lost, content) in enumerate(classes) if lost},
    )
