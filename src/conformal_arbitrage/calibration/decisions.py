"""Decisions: a threshold applied to every row of a score log.

Knows nothing of how the threshold was found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformal_arbitrage.core.arrays import Bools, Floats, Integers
from conformal_arbitrage.core.choices import guardian_choices
from conformal_arbitrage.core.gaps import is_candidate, margins, numbers_or_none, sorted_gaps
from conformal_arbitrage.core.rows import blocks
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import Decision


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decisions:
    """One decision per row, as arrays; indexing or iterating gives `Decision` objects.

    Attributes:
        log: the log whose rows were decided.
        action: index of the chosen action; -1 if the Guardian decides and its scores are missing.
        deferred: whether the Guardian decides.
        margin: how far the Primary's top action leads.
        candidate: for every action of every row, flat: whether it is a candidate.
        relaxation: the threshold; None if every row is deferred.
    """

    log: ScoreLog
    action: Integers
    deferred: Bools
    margin: Floats
    candidate: Bools
    relaxation: float | None

    def __len__(self) -> int:
        return len(self.action)

    def __getitem__(self, row: int) -> Decision:
        start, stop = self.log.offsets[row], self.log.offsets[row + 1]
        action = int(self.action[row])
        return Decision(
            id=None if self.log.id is None else str(self.log.id[row]),
            action=None if action < 0 else action,
            candidates=tuple(np.flatnonzero(self.candidate[start:stop]).tolist()),
            decided_by="guardian" if self.deferred[row] else "primary",
            margin=float(self.margin[row]),
            relaxation=self.relaxation,
        )

    def __iter__(self) -> Iterator[Decision]:
        return (self[row] for row in range(len(self)))

    def candidate_counts(self) -> Integers:
        """Return the number of candidates of every row."""
        return np.add.reduceat(self.candidate.astype(np.int64), self.log.offsets[:-1])

    def to_dicts(self) -> Iterator[dict[str, Any]]:
        """Yield every decision as a JSON document; an infinite margin (a single action) becomes null."""
        for row, decision in enumerate(self):
            texts = self.log.row(row).actions if self.log.actions is not None else None
            yield {
                "row": row + 1,
                "id": decision.id,
                "action": decision.action,
                **({} if texts is None else {"answer": None if decision.action is None else texts[decision.action]}),
                "decided_by": decision.decided_by,
                "candidates": list(decision.candidates),
                "margin": None if np.isinf(decision.margin) else decision.margin,
            }


def decide_rows(
    log: ScoreLog, *, relaxation: float | None, boundary_u: float | None, u: Floats | None, sees_all: bool
) -> Decisions:
    """Apply a threshold to every row: the top action if it stands alone, otherwise the Guardian's choice."""
    n = len(log)
    action, margin = np.empty(n, dtype=np.int64), np.empty(n)
    deferred = np.empty(n, dtype=np.bool_)
    candidate = np.empty(len(log.primary), dtype=np.bool_)
    draw = np.zeros(n) if u is None else u
    for block in blocks(log.offsets):
        gap, order = sorted_gaps(block.of(log.primary), digits=log.score_digits)
        kept = is_candidate(gap, relaxation, u=block.per_row(draw), boundary_u=boundary_u)
        last = kept.sum(axis=0) - 1
        choices = guardian_choices(block.of(log.guardian), order, sees_all=sees_all)
        chosen = np.take_along_axis(choices, last[None, :], axis=0)[0]
        chosen[(last > 0) & block.per_row(log.missing)] = -1
        action[block.rows], deferred[block.rows], margin[block.rows] = chosen, last > 0, margins(gap)
        by_action = np.empty_like(kept)
        np.put_along_axis(by_action, order, kept, axis=0)
        candidate[block.flat] = by_action.T.ravel()
    return Decisions(
        log=log, action=action, deferred=deferred, margin=margin, candidate=candidate, relaxation=relaxation
    )


def guardian_choice(scores: object, shown: Sequence[int], *, size: int) -> int | None:
    """Return the action the Guardian scores highest among those shown, the first one among equals.

    Args:
        scores: one number per action of the whole menu; only those of the actions shown are read.
        shown: indices of the actions shown, ascending.
        size: number of actions in the menu.

    Returns:
        None if the score of an action shown is None or NaN.
    """
    numbers = numbers_or_none(scores)
    if numbers is None or numbers.shape != (size,) or np.isinf(numbers[list(shown)]).any():
        raise OptionError(f"guardian= takes one finite number per action, {size} here; got {scores!r:.80}")
    values = numbers[list(shown)]
    return None if np.isnan(values).any() else shown[int(values.argmax())]
