"""The learned score for one query at a time: what `decide_learned` decides, laid out for speed.

A live query and the replay of a log both come through here, row by row, so they agree to the bit. Rows with the same
features and the same loss have the same score whatever the query, so they are kept as one class with many draws. Classes
with a loss come first, so that the line is found among the first columns; the fits of all strengths lie side by side, so
that the few features of a query that are not 0 reach all of them in one product.

Knows nothing of features, certificates or files.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from conformal_arbitrage.core.arrays import Floats, Indices
from conformal_arbitrage.core.learned import SHIFT, TICKS, RidgeFits

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
        residual: strengths x classes, the loss minus its fit, in ticks.
        loss: of each class, in ticks and shifted.
        free: strengths x classes, 1 minus the leverage.
        sizes: rows of each class.
        draws: the draws of each class, in order.
        lossy: how many classes, the first ones, have a loss.
        losses: the class of each row with a loss.
        rows: number of logged rows.
        unseen_penalties: of a column that only the query has, by strength.
        by_margin: (-margin, draw) of all rows, in order.
        losses_by_margin: the same of the rows with a loss.
        copies: features of a class with a loss, as bytes -> that class.
    """

    budget: int
    with_margin: bool
    rotation: Floats
    shrunk: Floats
    weights: Floats
    across: Floats
    residual: Floats
    loss: Floats
    free: Floats
    sizes: Floats
    draws: Sequence[Sequence[float]]
    lossy: int
    losses: Indices
    rows: int
    unseen_penalties: Floats
    by_margin: Sequence[tuple[float, float]]
    losses_by_margin: Sequence[tuple[float, float]]
    copies: dict[bytes, int]

    def decide(
        self, places: Sequence[int], values: Sequence[float], u: float, margin: float, *, unseen: bool = False
    ) -> LearnedDecision:
        """Decide one query by the candidate that keeps most rows, the first one among equals.

        Args:
            places: columns of its features that are not 0.
            values: those features.
            u: its draw.
            margin: its margin, above 0.
            unseen: whether it has a column of its own, such as a new group.
        """
        best = self._by_margin(u, margin) if self.with_margin else None
        for number, (count, kept, score) in enumerate(self._by_fits(places, values, u, unseen=unseen), start=1):
            if best is None or count > best.kept_rows:
                best = LearnedDecision(kept=kept, candidate=number, kept_rows=count, score=score)
        assert best is not None
        return best

    def _by_margin(self, u: float, margin: float) -> LearnedDecision:
        """Count the rows before the line in the order of the margin; the query counts as a loss."""
        if len(self.losses) < self.budget:
            return LearnedDecision(kept=True, candidate=MARGIN, kept_rows=self.rows + 1, score=-margin)
        own, lost = (-margin, u), self.losses_by_margin
        before = bisect_left(lost, own)
        line = own if before == self.budget else lost[self.budget - (before < self.budget)]
        kept = own < line
        count = bisect_left(self.by_margin, line) + kept
        return LearnedDecision(kept=kept, candidate=MARGIN, kept_rows=count, score=-margin)

    def _by_fits(
        self, places: Sequence[int], values: Sequence[float], u: float, *, unseen: bool
    ) -> list[tuple[int, bool, float]]:
        """Return, for every strength, how many rows are kept, whether the query is, and its score."""
        some, columns = np.array(values), np.array(places, dtype=np.intp)
        query = some @ self.rotation.take(columns, axis=0)
        predicted = self.weights @ query
        gain = 1 / (1 + (query * query) @ self.shrunk)
        if unseen:
            gain = 1 / (1 + 1 / self.unseen_penalties + (query * query) @ self.shrunk)
        across = (some @ self.across.take(columns, axis=0)).reshape(self.free.shape)
        scores = self._left_out_scores(across, predicted, gain)
        own = np.rint(predicted * TICKS + SHIFT)
        same = None if unseen else self.copies.get(self._dense(columns, some))
        if same is not None:
            scores[:, same] = own
        if len(self.losses) < self.budget:
            return [(self.rows + 1, True, (one - SHIFT) / TICKS) for one in own.tolist()]
        return self._counts(scores, own, u)

    def _left_out_scores(self, across: Floats, predicted: Floats, gain: Floats) -> Floats:
        """Return every class's leave-one-out score with the query added at a loss, in ticks."""
        moved = across * ((1 - predicted) * gain * TICKS)[:, None]
        np.subtract(self.residual, moved, out=moved)
        np.multiply(across, across, out=across)
        across *= gain[:, None]
        across += self.free
        moved /= across
        np.subtract(self.loss, moved, out=moved)
        return np.rint(moved, out=moved)

    def _dense(self, columns: Indices, values: Floats) -> bytes:
        row = np.zeros(len(self.rotation))
        row[columns] = values
        return row.tobytes()

    def _counts(self, scores: Floats, own: Floats, u: float) -> list[tuple[int, bool, float]]:
        """Count rows and query before the (budget + 1)-th loss in the order of (score, draw)."""
        lossy, repeated = self.lossy, len(self.losses) > self.lossy
        of_rows = scores.take(self.losses, axis=1) if repeated else scores[:, :lossy]
        lost = np.concatenate([of_rows, own[:, None]], axis=1)
        lost.partition(self.budget, axis=1)
        lines = lost[:, self.budget : self.budget + 1]
        below = (scores < lines).astype(np.float64)
        before, lost_before = below @ self.sizes, below[:, :lossy] @ self.sizes[:lossy]
        tied: list[list[int]] = [[] for _ in own]
        places: list[int] = np.flatnonzero(scores == lines).tolist()
        for place in places:
            tied[place // len(self.sizes)].append(place % len(self.sizes))
        columns = (lines[:, 0].tolist(), own.tolist(), before.tolist(), lost_before.tolist(), tied)
        return [self._count(*column, u) for column in zip(*columns, strict=True)]

    def _count(
        self, line: float, own: float, before: float, lost_before: float, tied: Sequence[int], u: float
    ) -> tuple[int, bool, float]:
        """Count rows and query before the line of one strength, where draws tell apart what is tied with it."""
        if own != line and len(tied) == 1 and len(self.draws[tied[0]]) == 1:  # nearly always: one row is on the line
            return int(before) + (own < line), own < line, (own - SHIFT) / TICKS
        draws = [u] if own == line else []
        for place in tied:
            draws += self.draws[place] if place < self.lossy else ()
        drawn = sorted(draws)[self.budget - int(lost_before) - (own < line)]
        kept = own < line or (own == line and u < drawn)
        count = int(before) + sum(bisect_left(self.draws[place], drawn) for place in tied) + kept
        return count, kept, (own - SHIFT) / TICKS


def learned_rule(fits: RidgeFits, features: Floats, *, budget: int, with_margin: bool) -> LearnedRule:
    """Lay a fitted log out for single queries.

    Args:
        fits: the fitted log.
        features: of its rows.
        budget: of `spendable_losses`, 1 or more.
        with_margin: whether the margin itself is a candidate.
    """
    classes: dict[tuple[bool, bytes], list[int]] = {}
    order: list[int] = [*fits.loss_rows.tolist(), *np.flatnonzero(fits.loss == 0).tolist()]
    for row in order:
        classes.setdefault((bool(fits.loss[row]), features[row].tobytes()), []).append(row)
    first, sizes = (np.array([choose(rows) for rows in classes.values()], dtype=np.intp) for choose in (min, len))
    lossy = sum(lost for lost, _ in classes)
    shrunk = 1 / (fits.curvature[:, None] + fits.strengths)
    across = [fits.rotation @ (fits.rotated[first] * one).T for one in shrunk.T]
    by_margin: list[tuple[float, float]] = list(zip((-fits.margin).tolist(), fits.u.tolist(), strict=True))
    return LearnedRule(
        budget=budget,
        with_margin=with_margin,
        rotation=fits.rotation,
        shrunk=shrunk,
        weights=fits.weights,
        across=np.concatenate(across, axis=1),
        residual=(fits.loss - fits.fitted)[:, first] * TICKS,
        loss=fits.loss[first].astype(np.float64) * TICKS + SHIFT,
        free=1 - fits.leverage[:, first],
        sizes=sizes.astype(np.float64),
        draws=[sorted(fits.u[rows].tolist()) for rows in classes.values()],
        lossy=lossy,
        losses=np.repeat(np.arange(lossy), sizes[:lossy]),
        rows=len(fits.loss),
        unseen_penalties=fits.strengths * fits.unseen_penalty,
        by_margin=sorted(by_margin),
        losses_by_margin=sorted(by_margin[row] for row in order[: len(fits.loss_rows)]),
        copies={content: place for place, (lost, content) in enumerate(classes) if lost},
    )
