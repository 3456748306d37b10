"""Learned scores: the leave-one-out ridge, with every row used to learn and to calibrate.

Each query is decided as if it had been in the log with a loss: every row, the query included, is scored by the fit to
all other rows, rows are ordered by that score, and the query is kept if it comes before the budget is spent. Treating all
rows alike is what makes this valid; docs/theory.md has the proof. Nothing is fitted again: the leave-one-out scores with
the query added have a closed form, and one eigendecomposition serves every strength of the penalty.

Losses are 0 or 1 here (in units of the bound). Knows nothing of features, certificates or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from conformal_arbitrage.core.arrays import Bools, Floats, Indices, Integers

STRENGTHS = (1.0, 5.0, 30.0, 300.0)
"""Of the penalty, in the order of preference among equals; the margin comes before all of them."""
TICKS, SHIFT = 1e9, 0.3819660112501051
"""Scores are compared as whole ticks, whose edges are shifted off simple fractions; see `_rounded`."""
_QUERIES_AT_ONCE = 300_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RidgeFits:
    """The fits of all strengths to the rows of a log.

    Attributes:
        rotation: columns x columns; takes a row of features to the axes of `rotated`.
        curvature: the eigenvalue of each axis.
        rotated: rows x axes, the logged rows in these axes.
        loss: 0 or 1 of each row.
        u: the draw of each row.
        margin: of each row; the first candidate score, kept from the largest down.
        strengths: of the penalty.
        fitted: strengths x rows, the fit at each row.
        leverage: strengths x rows, how far each row's fit follows its own loss.
        weights: strengths x axes, the coefficients.
        unseen_penalty: the penalty weight of a column that only the query has, such as that of a new group.
        features: the logged rows' features, of the rows with a loss only, to recognise copies of them.
    """

    rotation: Floats
    curvature: Floats
    rotated: Floats
    loss: Integers
    u: Floats
    margin: Floats
    strengths: Floats
    fitted: Floats
    leverage: Floats
    weights: Floats
    features: Floats
    unseen_penalty: float = 1.0

    @property
    def loss_rows(self) -> Indices:
        """The rows with a loss."""
        return np.flatnonzero(self.loss)


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
    features: Floats, penalties: Floats, loss: Integers, u: Floats, margin: Floats, *, strengths: tuple[float, ...]
) -> RidgeFits:
    """Fit a log: A = X'X + lambda diag(penalties), for every strength lambda.

    Args:
        features: rows x columns.
        penalties: the weight of each column.
        loss: 0 or 1 per row.
        u: one draw per row.
        margin: of each row, above 0: rows tied at the top are always deferred, and are left out.
        strengths: the lambdas.
    """
    scale = 1 / np.sqrt(penalties)
    scaled = features * scale
    curvature, axes = np.linalg.eigh(scaled.T @ scaled)
    curvature = np.maximum(curvature, 0.0)
    rotation = scale[:, None] * axes
    rotated = features @ rotation
    shrunk = 1 / (curvature + np.array(strengths)[:, None])
    weights = shrunk * (rotated.T @ loss)
    return RidgeFits(
        rotation=rotation,
        curvature=curvature,
        rotated=rotated,
        loss=loss,
        u=u,
        margin=margin,
        strengths=np.array(strengths),
        fitted=weights @ rotated.T,
        leverage=shrunk @ (rotated**2).T,
        weights=weights,
        features=features[loss > 0],
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


def decide_budgets(
    fits: RidgeFits,
    features: Floats,
    u: Floats,
    margin: Floats,
    *,
    budgets: Sequence[int],
    unseen: Floats | None = None,
    with_margin: bool = True,
) -> list[LearnedDecisions]:
    """Decide queries as `decide_learned` does under several budgets, which share their scores.

    Queries that are alike but for their draws share them too.
    """
    own = np.zeros(len(u)) if unseen is None else unseen
    described = np.ascontiguousarray(np.column_stack([features, margin, own]))
    as_bytes = described.view(np.dtype((np.void, described.dtype.itemsize * described.shape[1])))[:, 0]
    _, first, kind = np.unique(as_bytes, return_index=True, return_inverse=True)
    order = np.argsort(kind, kind="stable")
    step = max(1, _QUERIES_AT_ONCE // max(1, len(fits.loss)))
    parts: list[list[LearnedDecisions]] = []
    for a in range(0, len(first), step):
        some = first[a : a + step]
        queries = order[slice(*np.searchsorted(kind[order], [a, a + len(some)]))]
        kinds = _Kinds(features=features[some], margin=margin[some], unseen=own[some], member=kind[queries] - a)
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
        member: the kind of each query, ascending.
    """

    features: Floats
    margin: Floats
    unseen: Floats
    member: Indices


def _joined(parts: Sequence[LearnedDecisions], order: Indices) -> LearnedDecisions:
    return LearnedDecisions(
        kept=np.concatenate([np.zeros(0, np.bool_), *(part.kept for part in parts)])[order],
        candidate=np.concatenate([np.zeros(0, np.int64), *(part.candidate for part in parts)])[order],
        count=np.concatenate([np.zeros(0, np.int64), *(part.count for part in parts)])[order],
        score=np.concatenate([np.zeros(0), *(part.score for part in parts)])[order],
    )


def left_out_kept(fits: RidgeFits, *, budget: int, with_margin: bool) -> Bools:
    """Return which logged rows are kept if each is decided by the others: the rule applied to the log itself.

    Args:
        fits: the fitted log.
        budget: how many losses its rows may have.
        with_margin: as in `decide_learned`.
    """
    scores = [-fits.margin] if with_margin else []
    scores += [_rounded(one) for one in fits.loss - (fits.loss - fits.fitted) / (1 - fits.leverage)]
    best = np.zeros(len(fits.loss), np.bool_)
    for score in scores:
        lost = fits.loss_rows[np.lexsort((fits.u[fits.loss_rows], score[fits.loss_rows]))]
        kept = np.ones(len(score), np.bool_)
        if budget < len(lost):
            line, line_u = score[lost[budget]], fits.u[lost[budget]]
            kept = (score < line) | ((score == line) & (fits.u < line_u))
        best = kept if kept.sum() > best.sum() else best
    return best


def _decide_block(
    fits: RidgeFits, kinds: _Kinds, u: Floats, budgets: Sequence[int], *, with_margin: bool
) -> list[LearnedDecisions]:
    copies = _copies(fits, np.where(kinds.unseen[:, None] > 0, np.nan, kinds.features))
    n, member = len(u), kinds.member
    best = [
        LearnedDecisions(
            kept=np.zeros(n, np.bool_), candidate=np.zeros(n, np.int64), count=np.full(n, -1), score=np.zeros(n)
        )
        for _ in budgets
    ]
    for number in range(0 if with_margin else 1, len(fits.strengths) + 1):
        if number == 0:
            rows, own = _by_margin(fits, kinds.margin)
        else:
            rows, own = _left_out_scores(fits, number - 1, kinds.features, kinds.unseen, copies)
        best = [
            _better(one, number, own[member], *_count(rows, own, fits, u, budget, member))
            for one, budget in zip(best, budgets, strict=True)
        ]
    return [replace(one, kept=one.kept & (kinds.margin > 0)[member]) for one in best]


def _better(best: LearnedDecisions, number: int, own: Floats, counted: Integers, stands: Bools) -> LearnedDecisions:
    """Return the decisions of a candidate where it keeps more rows than the best so far."""
    better = counted > best.count
    return LearnedDecisions(
        kept=np.where(better, stands, best.kept),
        candidate=np.where(better, number, best.candidate),
        count=np.where(better, counted, best.count),
        score=np.where(better, own, best.score),
    )


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
    own = np.einsum("qa,qa->q", shrunk, query)
    unrounded = query @ fits.weights[k]
    weight = 1.0 if unseen is None else _query_weight(unseen, float(fits.strengths[k]) * fits.unseen_penalty)
    gain = 1 / (1 / weight + own)
    moved = across * ((unrounded - 1) * gain)[:, None]
    moved += fits.loss - fits.fitted[k]
    across *= across
    across *= gain[:, None]
    across += 1 - fits.leverage[k]
    moved /= across
    scores, predicted = _rounded(np.subtract(fits.loss, moved, out=moved)), _rounded(unrounded)
    for place, rows in copies:
        scores[place, rows] = predicted[place]
    return scores, predicted


def _rounded(values: Floats) -> Floats:
    """Round scores to nine decimals, so that scores equal by symmetry tie whatever the noise of the last digits.

    The edges between two roundings lie at places that no such score has: shares such as 1 / 1024 lie exactly between two
    decimals.
    """
    rounded = values * TICKS
    rounded += SHIFT
    np.rint(rounded, out=rounded)
    rounded -= SHIFT
    rounded /= TICKS
    return rounded


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


def _count(
    scores: Floats, own: Floats, fits: RidgeFits, u: Floats, budget: int, member: Indices
) -> tuple[Integers, Bools]:
    """Return how many rows come before the budget is spent, the query among them, and whether it is one of them.

    The query counts as a loss. The line is the (budget + 1)-th loss in the order of (score, draw). Only where several are
    tied at the line do draws matter.

    Args:
        scores: kinds of queries x rows.
        own: of each kind of query.
        fits: the fitted log.
        u: one draw per query.
        budget: how many losses may come before the line.
        member: the kind of each query, ascending.
    """
    lossy = fits.loss_rows
    values = np.concatenate([scores[:, lossy], own[:, None]], axis=1)
    if values.shape[1] <= budget:
        return np.full(len(u), scores.shape[1] + 1), np.ones(len(u), np.bool_)
    line = np.partition(values, budget, axis=1)[:, [budget]]
    place = budget - np.count_nonzero(values < line, axis=1)
    tied, below, tied_itself = scores == line, np.count_nonzero(scores < line, axis=1), own == line[:, 0]
    stands = (own < line[:, 0])[member]
    count = below[member] + stands
    for k in np.flatnonzero(np.count_nonzero(tied, axis=1) + tied_itself > 1).tolist():
        queries = slice(*np.searchsorted(member, [k, k + 1]))
        rows = np.flatnonzero(tied[k])
        lost = np.sort(fits.u[rows[fits.loss[rows] > 0]])
        ends = np.concatenate([[-np.inf], lost, [np.inf]])[place[k] : place[k] + 2]
        drawn = np.clip(u[queries], *ends) if tied_itself[k] else ends[1]
        stands[queries] |= tied_itself[k] & (u[queries] < drawn)
        count[queries] = below[k] + np.searchsorted(np.sort(fits.u[rows]), drawn) + stands[queries]
    return count, stands
