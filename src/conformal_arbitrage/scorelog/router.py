"""Router form: two answers and a confidence, as a score log with a menu of two.

Free text, tool calls and any router's own score fit this form. The actions are (guardian answer, primary answer), the
Primary scores [0, s] with a confidence s >= 0, the Guardian scores [1, 1 - regret] with
regret = max(0, Guardian's grade - Primary's grade). The Primary's answer stands alone exactly when s > relaxation.

Knows nothing of how answers are graded.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from conformal_arbitrage.core.arrays import Floats, numbers_or_none
from conformal_arbitrage.core.gaps import LARGEST_SCORE
from conformal_arbitrage.core.rows import ScoreArrays
from conformal_arbitrage.errors import ScoreLogError
from conformal_arbitrage.scorelog.columns import RawColumns, Usage, array_columns
from conformal_arbitrage.scorelog.files import Table

ROUTER_ACTIONS = ("guardian answer", "primary answer")


def router_columns(
    *,
    confidence: ArrayLike,
    primary_grade: ArrayLike,
    guardian_grade: ArrayLike,
    id: Iterable[object] | None = None,
    group: Iterable[object] | None = None,
    context: Iterable[object] | None = None,
    primary_usage: Usage | None = None,
    guardian_usage: Usage | None = None,
    identities: Mapping[str, Any] | None = None,
) -> RawColumns:
    """Return confidences and grades as the columns of a score log; see `ScoreLog.from_router`."""
    s = grades(confidence, "confidence", high=LARGEST_SCORE)
    p = grades(primary_grade, "primary_grade", high=1)
    g = grades(guardian_grade, "guardian_grade", high=1)
    if not len(s) == len(p) == len(g):
        raise ScoreLogError(
            f"confidence and grades have {len(s)}, {len(p)} and {len(g)} rows; give one of each per row"
        )
    regret = np.maximum(0.0, g - p)
    best = np.where(np.isnan(regret), np.nan, 1.0)
    return array_columns(
        np.column_stack([np.zeros(len(s)), s]),
        np.column_stack([best, 1.0 - regret]),
        id=id,
        group=group,
        context=context,
        actions=[ROUTER_ACTIONS] * len(s),
        outcomes={"correct": np.column_stack([g, p])},
        primary_usage=primary_usage,
        guardian_usage=guardian_usage,
        identities=identities,
    )


def is_router_form(log: ScoreArrays) -> bool:
    """Return whether every row has two actions, Primary scores [0, s] and Guardian scores [1, ...]."""
    if log.offsets[-1] != 2 * len(log.missing) or not (np.diff(log.offsets) == 2).all():
        return False
    first = log.guardian[::2]
    return bool((log.primary[::2] == 0).all() and (log.primary >= 0).all() and (first[~log.missing] == 1).all())


def grades(values: ArrayLike, name: str, *, high: float) -> Floats:
    """Return a column of numbers from 0 to `high`; NaN or None is allowed and means that there is none."""
    raw = np.asarray(values)
    column = raw if raw.dtype.kind == "b" else numbers_or_none(values)
    if column is None or column.ndim != 1:
        raise ScoreLogError(f"column '{name}' must be a flat list of numbers; got {values!r:.80}")
    column = column.astype(np.float64)
    bad = (column < 0) | (column > high)
    if bad.any():
        row = int(bad.argmax())
        top = "0 or more and finite" if high > 1 else "in [0, 1]"
        raise ScoreLogError(f"row {row + 1}, column '{name}': {column[row]:g} must be {top}; rescale the column")
    return column


def read_router_columns(path: str | Path, *, confidence: str, primary_grade: str, guardian_grade: str) -> RawColumns:
    """Read a table with a confidence and two grades per row; see `ScoreLog.read_router`."""
    with Table(path) as table:
        for name in (confidence, primary_grade, guardian_grade):
            if name not in table.types:
                raise ScoreLogError(f"{path}: there is no column '{name}'; it has {', '.join(sorted(table.types))}")
        graded = {name: _read_grades(table, name, high=1) for name in (primary_grade, guardian_grade)}
        texts = {name: table.texts(name).tolist() for name in ("id", "group", "context") if name in table.types}
        return router_columns(
            confidence=_read_grades(table, confidence, high=LARGEST_SCORE),
            primary_grade=graded[primary_grade],
            guardian_grade=graded[guardian_grade],
            primary_usage=_read_cost(table, "primary"),
            guardian_usage=_read_cost(table, "guardian"),
            **texts,
        )


def _read_cost(table: Table, role: str) -> Usage:
    name = f"{role}_cost"
    return Usage(cost=table.scalars(name) if name in table.types else None)


def _read_grades(table: Table, name: str, *, high: float) -> Floats:
    """Read a column of grades; an error names the file and the column as it is called there."""
    try:
        return grades(table.scalars(name, truths=True), name, high=high)
    except ScoreLogError as error:
        text = str(error)
        raise ScoreLogError(text if text.startswith(table.source) else f"{table.source}: {text}") from error
