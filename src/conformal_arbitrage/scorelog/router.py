"""Any table of router scores and outcomes as a score log in router form."""

from pathlib import Path

from conformal_arbitrage.core.gaps import LARGEST_SCORE, Floats
from conformal_arbitrage.errors import ScoreLogError
from conformal_arbitrage.scorelog.columns import Usage, grades
from conformal_arbitrage.scorelog.files import Table
from conformal_arbitrage.scorelog.log import ScoreLog


def read_router_table(path: str | Path, *, confidence: str, primary_grade: str, guardian_grade: str) -> ScoreLog:
    """Read a table with a confidence and two grades per row; see `ScoreLog.from_router`.

    Args:
        path: .parquet, .jsonl, .jsonl.gz or .csv.
        confidence: the column with the router's score.
        primary_grade: the column with the grade of the Primary's answer.
        guardian_grade: the column with the grade of the Guardian's answer.
    """
    with Table(path) as table:
        for name in (confidence, primary_grade, guardian_grade):
            if name not in table.types:
                raise ScoreLogError(f"{path}: there is no column '{name}'; it has {', '.join(sorted(table.types))}")
        graded = {name: _graded(table, name, high=1) for name in (primary_grade, guardian_grade)}
        texts = {name: table.texts(name).tolist() for name in ("id", "group", "context") if name in table.types}
        usage = {
            role: Usage(cost=table.scalars(f"{role}_cost") if f"{role}_cost" in table.types else None)
            for role in ("primary", "guardian")
        }
        return ScoreLog.from_router(
            confidence=_graded(table, confidence, high=LARGEST_SCORE),
            primary_grade=graded[primary_grade],
            guardian_grade=graded[guardian_grade],
            primary_usage=usage["primary"],
            guardian_usage=usage["guardian"],
            **texts,
        )


def _graded(table: Table, name: str, *, high: float) -> Floats:
    """A column of grades, refused with the file and the name it has there."""
    try:
        return grades(table.scalars(name, truths=True), name, high=high)
    except ScoreLogError as error:
        text = str(error)
        raise ScoreLogError(text if text.startswith(str(table.path)) else f"{table.path}: {text}") from error
