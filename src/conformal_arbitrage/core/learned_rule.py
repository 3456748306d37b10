"""The learned score for one query at a time: what `decide_learned` decides, laid out for speed.

A live query and the replay of a log both come through here, row by row, so they agree to the bit. Rows with a loss come
first, so that the line is found among the first columns; the fits of all strengths lie side by side, so that the few
features of a query that are not 0 reach all of them in one product.

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
"""The candidate that is no fit; the k-th strength is candidate k."""


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
        across: columns x (strengths x rows): what a feature of the query adds to its product with each row.
        residual: strengths x rows, the loss minus its fit, in ticks.
        loss: of each row, in ticks and shifted.
        free: strengths x rows, 1 minus the leverage.
        losses: how many rows, the first ones, have a loss.
        u: the draw of each row, as plain floats.
        unseen_penalties: of a column that only the query has, by strength.
        by_margin: (-margin, draw) of all rows, in order.
        losses_by_margin: the same of the rows with a loss.
        copies: features of rows with a loss, as bytes -> those rows.
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
    losses: int
    u: Sequence[float]
    unseen_penalties: Floats
    by_margin: Sequence[tuple[float, float]]
    losses_by_margin: Sequence[tuple[float, float]]
    copies: dict[bytes, Indices]

    @property
    def rows(self) -> int:
        """Number of logged rows."""
        return len(self.u)

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
        if self.losses < self.budget:
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
        some, strengths = np.array(values), len(self.weights)
        query = some @ self.rotation.take(places, axis=0)
        predicted = self.weights @ query
        gain = 1 / (1 + (query * query) @ self.shrunk)
        if unseen:
            gain = 1 / (1 + 1 / self.unseen_penalties + (query * query) @ self.shrunk)
        across = (some @ self.across.take(places, axis=0)).reshape(strengths, self.rows)
        scores = self._left_out_scores(across, predicted, gain)
        own = np.rint(predicted * TICKS + SHIFT)
        same = None if unseen else self.copies.get(self._dense(places, some))
        if same is not None:
            scores[:, same] = own[:, None]
        if self.losses < self.budget:
            return [(self.rows + 1, True, (one - SHIFT) / TICKS) for one in own.tolist()]
        return self._counts(scores, own, u)

    def _left_out_scores(self, across: Floats, predicted: Floats, gain: Floats) -> Floats:
        """Return every row's leave-one-out score with the query added at a loss, in ticks."""
        moved = across * ((1 - predicted) * gain * TICKS)[:, None]
        np.subtract(self.residual, moved, out=moved)
        np.multiply(across, across, out=across)
        across *= gain[:, None]
        across += self.free
        moved /= across
        np.subtract(self.loss, moved, out=moved)
        return np.rint(moved, out=moved)

    def _dense(self, places: Sequence[int], values: Floats) -> bytes:
        row = np.zeros(len(self.rotation))
        row[places] = values
        return row.tobytes()

    def _counts(self, scores: Floats, own: Floats, u: float) -> list[tuple[int, bool, float]]:
        """Count rows and query before the (budget + 1)-th loss in the order of (score, draw)."""
        lost = np.concatenate([scores[:, : self.losses], own[:, None]], axis=1)
        lines = np.partition(lost, self.budget, axis=1)[:, self.budget]
        results: list[tuple[int, bool, float]] = []
        for row, line, mine in zip(scores, lines.tolist(), own.tolist(), strict=True):
            below = row < line
            ahead = self.budget - np.count_nonzero(below[: self.losses]) - (mine < line)
            tied: list[int] = np.flatnonzero(row == line).tolist()
            draws = [self.u[place] for place in tied if place < self.losses] + ([u] if mine == line else [])
            drawn = sorted(draws)[int(ahead)]
            kept = bool(mine < line or (mine == line and u < drawn))
            count = np.count_nonzero(below) + sum(self.u[place] < drawn for place in tied) + kept
            results.append((int(count), kept, (mine - SHIFT) / TICKS))
        return results


def learned_rule(fits: RidgeFits, *, budget: int, with_margin: bool) -> LearnedRule:
    """Lay a fitted log out for single queries.

    Args:
        fits: the fitted log.
        budget: of `spendable_losses`, 1 or more.
        with_margin: whether the margin itself is a candidate.
    """
    order = np.concatenate([fits.loss_rows, np.flatnonzero(fits.loss == 0)])
    rotated, loss, u = fits.rotated[order], fits.loss[order], fits.u[order]
    shrunk = 1 / (fits.curvature[:, None] + fits.strengths)
    across = [fits.rotation @ (rotated * one).T for one in shrunk.T]
    by_margin = list(zip((-fits.margin[order]).tolist(), u.tolist(), strict=True))
    losses = len(fits.loss_rows)
    copies: dict[bytes, list[int]] = {}
    for row, content in enumerate(fits.features):
        copies.setdefault(content.tobytes(), []).append(row)
    return LearnedRule(
        budget=budget,
        with_margin=with_margin,
        rotation=fits.rotation,
        shrunk=shrunk,
        weights=fits.weights,
        across=np.concatenate(across, axis=1),
        residual=(loss - fits.fitted[:, order]) * TICKS,
        loss=loss.astype(np.float64) * TICKS + SHIFT,
        free=1 - fits.leverage[:, order],
        losses=losses,
        u=u.tolist(),
        unseen_penalties=fits.strengths * fits.unseen_penalty,
        by_margin=sorted(by_margin),
        losses_by_margin=sorted(by_margin[:losses]),
        copies={content: np.array(rows) for content, rows in copies.items()},
    )
