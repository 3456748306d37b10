"""Applying a certificate to a log in parts: counts of what it decides, and a file of decisions for every part.

Knows nothing of how the certificate was made, nor of losses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.decisions import Decisions
from conformal_arbitrage.core.arrays import Integers
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.engines import Engine
from conformal_arbitrage.scorelog.files import write_table
from conformal_arbitrage.scorelog.parts import ScorePart, ScoreParts
from conformal_arbitrage.scorelog.spark_table import SparkTable
from conformal_arbitrage.scorelog.tables import Column, TableColumns, strings

_PARTS: Final = "part-*.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionCounts:
    """How many rows were decided, and how.

    Attributes:
        rows: all rows.
        deferred: rows that go to the Guardian.
        candidates: candidates of all rows together.
        undecided: rows that go to the Guardian and have no score of it.
        outside: rows that the guarantee does not cover.
        reason: why, of the first of them.
    """

    rows: int = 0
    deferred: int = 0
    candidates: int = 0
    undecided: int = 0
    outside: int = 0
    reason: str | None = None

    def __add__(self, other: "DecisionCounts") -> "DecisionCounts":
        """Return the counts of both."""
        return DecisionCounts(
            rows=self.rows + other.rows,
            deferred=self.deferred + other.deferred,
            candidates=self.candidates + other.candidates,
            undecided=self.undecided + other.undecided,
            outside=self.outside + other.outside,
            reason=self.reason or other.reason,
        )


@dataclass(frozen=True, slots=True)
class Decide:
    """The work of deciding the rows of a part; with a folder, they are written to a file of their own there."""

    certificate: Certificate
    folder: str | None
    numbers: tuple[int, ...]

    def __call__(self, part: ScorePart) -> DecisionCounts:
        """Decide every row."""
        by = [] if self.certificate.by is None else [self.certificate.by]
        log = part.load([*by, *(["actions"] if self.folder is not None else [])])
        decisions = self.certificate.apply(log)
        if self.folder is not None:
            number = int(np.searchsorted(self.numbers, part.first))
            write_table(Path(self.folder) / _part_name(number), decisions_table(decisions, part.start))
        return count_decisions(self.certificate, decisions)


def count_decisions(certificate: Certificate, decisions: Decisions) -> DecisionCounts:
    """Return how many rows were decided, and how."""
    sizes, counts = np.unique(decisions.log.sizes, return_counts=True)
    reasons = {size: certificate.outside(size) for size in sizes.tolist()}
    outside = {size: reason for size, reason in reasons.items() if reason is not None}
    return DecisionCounts(
        rows=len(decisions),
        deferred=int(decisions.deferred.sum()),
        candidates=int(decisions.candidate.sum()),
        undecided=int((decisions.action < 0).sum()),
        outside=sum(int(count) for size, count in zip(sizes.tolist(), counts.tolist(), strict=True) if size in outside),
        reason=next(iter(outside.values()), None),
    )


def decisions_table(decisions: Decisions, first_row: int = 0) -> TableColumns:
    """Return decisions as a table: row, id, action, answer, decided_by, candidates, margin.

    The row is counted from 1 in its file; an action of -1 waits for the Guardian, and a single action has no margin.
    """
    log, flat = decisions.log, np.flatnonzero(decisions.candidate)
    scalars: list[Column] = [("row", np.arange(first_row + 1, first_row + len(decisions) + 1))]
    if log.id is not None:
        scalars.append(("id", log.id))
    scalars.append(("action", decisions.action))
    if log.actions is not None:
        chosen = log.actions[log.offsets[:-1] + np.maximum(decisions.action, 0)].tolist()
        texts = [None if a < 0 else text for a, text in zip(decisions.action.tolist(), chosen, strict=True)]
        scalars.append(("answer", strings(texts)))
    scalars.append(("decided_by", strings(np.where(decisions.deferred, "guardian", "primary").tolist())))
    scalars.append(("margin", np.where(np.isinf(decisions.margin), np.nan, decisions.margin)))
    places: Integers = flat - np.repeat(log.offsets[:-1], decisions.candidate_counts())
    offsets = np.concatenate([[0], np.cumsum(decisions.candidate_counts())])
    return TableColumns(scalars=scalars, lists=[("candidates", places)], offsets=offsets, metadata={})


def decide_parts(
    certificate: Certificate, log: ScoreParts | SparkTable, engine: Engine, folder: str | Path | None = None
) -> DecisionCounts:
    """Decide every row of a log in parts.

    Args:
        certificate: the rule, with its key if it has one.
        log: the log.
        engine: where the work is done.
        folder: where to write one file of decisions per part (part-00000.parquet, ...), in the order of the parts.
    """
    parts = log.parts()
    if folder is not None:
        _refuse_mixture(Path(folder), log, len(parts))
        Path(folder).mkdir(parents=True, exist_ok=True)
    work = Decide(certificate, None if folder is None else str(folder), tuple(part.first for part in parts))
    return _summed(list(engine.run(work, parts)))


def _refuse_mixture(folder: Path, log: ScoreParts | SparkTable, parts: int) -> None:
    """Refuse a folder in which decisions would lie among the files of the log, or beside those of a longer one.

    Raises:
        OptionError: it is such a folder.
    """
    files = log.files if isinstance(log, ScoreParts) else ()
    if folder.resolve() in {Path(file.path).resolve().parent for file in files}:
        raise OptionError(f"{folder}: the files of the log are there; write decisions into a folder of their own")
    written = {_part_name(number) for number in range(parts)}
    others = sorted(path.name for path in folder.glob(_PARTS) if path.name not in written)
    if others:
        raise OptionError(f"{folder}: holds {others[0]} of another log; empty the folder, or name another one")


def _part_name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def _summed(counts: Sequence[DecisionCounts]) -> DecisionCounts:
    return sum(counts, start=DecisionCounts())
