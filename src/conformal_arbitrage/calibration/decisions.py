"""Decisions: a threshold applied to every row of a score log.

Knows nothing of how the threshold was found.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import to_builtins

from conformal_arbitrage.calibration.learned_score import LearnedScore
from conformal_arbitrage.calibration.stops import GroupThreshold, group_threshold
from conformal_arbitrage.core.arrays import Bools, Floats, Integers
from conformal_arbitrage.core.choices import guardian_choices
from conformal_arbitrage.core.gaps import is_candidate, margins, numbers_or_none, row_gaps, sorted_gaps
from conformal_arbitrage.core.risk import Draw
from conformal_arbitrage.core.rows import blocks
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.fitness import column_texts
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import Decision, LearnedUse


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
        by_group: the threshold of each row, infinite where it is deferred, if groups have their own; else None.
        learned: how a learned score decided each row; None without one.
    """

    log: ScoreLog
    action: Integers
    deferred: Bools
    margin: Floats
    candidate: Bools
    relaxation: float | None
    by_group: Floats | None = None
    learned: Sequence[LearnedUse | None] | None = None

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
            relaxation=self._relaxation(row),
            learned=None if self.learned is None else self.learned[row],
        )

    def __iter__(self) -> Iterator[Decision]:
        return (self[row] for row in range(len(self)))

    def _relaxation(self, row: int) -> float | None:
        if self.by_group is None:
            return self.relaxation
        return float(self.by_group[row]) if np.isfinite(self.by_group[row]) else None

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
                **({} if decision.learned is None else {"learned": to_builtins(decision.learned)}),
            }


def decide_by_group(
    log: ScoreLog, groups: Mapping[str, GroupThreshold], *, by: str, u: Draw | None, sees_all: bool
) -> Decisions:
    """Apply to every row the threshold of its group; a row of an unknown group, or of none, is deferred."""
    names = column_texts(log, by)
    if names is None:
        raise ScoreLogError(f"{log.source}: there is no column '{by}', which the certificate takes its groups from")
    pairs = [group_threshold(groups, name or None) for name in names]
    relaxation = np.array([np.inf if low is None else low for low, _ in pairs])
    boundary_u = None if u is None else np.array([1.0 if draw is None else draw for _, draw in pairs])
    return decide_rows(log, relaxation=relaxation, boundary_u=boundary_u, u=u, sees_all=sees_all)


def decide_by_score(log: ScoreLog, score: LearnedScore, u: Floats) -> Decisions:
    """Decide every row of a log by a learned score, each as a live query would be."""
    groups, lengths = column_texts(log, "group"), log.primary_usage.output_tokens
    texts = None if log.context is None else log.context.tolist()
    kept, uses = np.zeros(len(log), np.bool_), list[LearnedUse | None]()
    for row in range(len(log)):
        scores = log.primary[log.offsets[row] : log.offsets[row + 1]].tolist()
        tokens = None if lengths is None else float(lengths[row])
        group = None if groups is None else groups[row] or None
        gaps = row_gaps(scores, digits=log.score_digits)
        text = None if texts is None else texts[row]
        kept[row], use = score.decide(scores, gaps, float(u[row]), group, tokens, text)
        uses.append(use)
    decisions = decide_rows(log, relaxation=np.where(kept, 0.0, np.inf), boundary_u=None, u=None, sees_all=True)
    return replace(decisions, by_group=None, learned=uses)


def decide_rows(
    log: ScoreLog,
    *,
    relaxation: float | Floats | None,
    boundary_u: float | Floats | None,
    u: Draw | None,
    sees_all: bool,
) -> Decisions:
    """Apply a threshold, one for all rows or one for each, to every row.

    The decision is the top action if it stands alone, otherwise the Guardian's choice. Draws are asked for where an action
    stands exactly at the threshold.
    """
    n = len(log)
    action, margin = np.empty(n, dtype=np.int64), np.empty(n)
    deferred = np.empty(n, dtype=np.bool_)
    candidate = np.empty(len(log.primary), dtype=np.bool_)
    thresholds = np.broadcast_to(np.inf if relaxation is None else relaxation, n)
    draws_at = None if boundary_u is None else np.broadcast_to(boundary_u, n)
    for block in blocks(log.offsets):
        gap, order = sorted_gaps(block.of(log.primary), digits=log.score_digits)
        at, threshold = None if draws_at is None else block.per_row(draws_at), block.per_row(thresholds)
        draw = np.zeros(gap.shape[1])
        if u is not None and at is not None:
            tied = np.flatnonzero((gap == threshold).any(axis=0))
            draw[tied] = u(block.row_numbers(tied))
        kept = is_candidate(gap, threshold, u=draw, boundary_u=at)
        last = kept.sum(axis=0) - 1
        choices = guardian_choices(block.of(log.guardian), order, sees_all=sees_all)
        chosen = np.take_along_axis(choices, last[None, :], axis=0)[0]
        chosen[(last > 0) & block.per_row(log.missing)] = -1
        action[block.rows], deferred[block.rows], margin[block.rows] = chosen, last > 0, margins(gap)
        by_action = np.empty_like(kept)
        np.put_along_axis(by_action, order, kept, axis=0)
        candidate[block.flat] = by_action.T.ravel()
    return Decisions(
        log=log,
        action=action,
        deferred=deferred,
        margin=margin,
        candidate=candidate,
        relaxation=None if isinstance(relaxation, np.ndarray) else relaxation,
        by_group=relaxation if isinstance(relaxation, np.ndarray) else None,
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
