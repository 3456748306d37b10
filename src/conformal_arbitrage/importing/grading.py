"""The grading step: grades for imported answers that have none, and values from tables that the user brings.

Knows nothing of any tool's files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.importing.pairing import (
    Imported,
    LoggedAnswer,
    ModelRun,
    Pair,
    Tally,
    Unpaired,
    counted,
    paired,
    router_log,
)
from conformal_arbitrage.live.build import Extras, Models
from conformal_arbitrage.live.config import Config, read_config
from conformal_arbitrage.live.grading import COMPARISONS, Comparison, FunctionGrader, Grader
from conformal_arbitrage.scorelog.files import Table
from conformal_arbitrage.scorers.user_code import load_object
from conformal_arbitrage.types import ChatRequest
from conformal_arbitrage.upstream.base import together
from conformal_arbitrage.upstream.budget import SpendingLimit

GRADING_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingStep:
    """How answers without grades get them.

    Attributes:
        grade: the grader; None if the export holds grades.
        expected: a table with `id` and `expected`.
        confidences: a table with `id` and `confidence`.
        config: the configuration with the judge.
        max_cost: dollars that the judge may cost.
    """

    grade: str | None = None
    expected: str | Path | None = None
    confidences: str | Path | None = None
    config: str | Path = "arbitrage.toml"
    max_cost: float | None = None


async def import_runs(
    source: str, runs: Sequence[ModelRun], step: GradingStep, *, unused: Tally, unpaired: Unpaired
) -> Imported:
    """Return the answers of two models, Primary first, as a score log in router form."""
    pairs = paired(*runs, unpaired=unpaired, unused=unused)
    pairs = with_columns(pairs, expected=step.expected, confidences=step.confidences)
    log = router_log(await graded(pairs, step.grade, config=step.config, max_cost=step.max_cost), unused)
    models = runs[0].model, runs[1].model
    return Imported(log=log, source=source, models=models, unused=unused, notes=counted(log))


async def graded(
    pairs: Sequence[Pair], how: str | None, *, config: str | Path = "arbitrage.toml", max_cost: float | None = None
) -> list[Pair]:
    """Return the pairs with the grades of a grader, which does not see which model answered.

    Args:
        pairs: the answers.
        how: exact, regex, json-equal, python:MODULE:FUNCTION, judge or human; None keeps the grades that they have.
        config: the configuration with the judge.
        max_cost: dollars that the judge may cost.
    """
    if how is None:
        return list(pairs)
    if how in COMPARISONS:
        return await _all_graded(pairs, Comparison(how))
    if how.startswith("python:"):
        return await _all_graded(pairs, FunctionGrader(function=load_object(how, Path.cwd()), name=how[7:]))
    settings: Config = read_config(config)
    extras = Extras() if max_cost is None else Extras(spending_limit=SpendingLimit(max_cost))
    async with Models(settings, extras) as models:
        return await _all_graded(pairs, models.grader(how))


async def _all_graded(pairs: Sequence[Pair], grader: Grader) -> list[Pair]:
    rows: dict[int, Pair] = {}

    async def work(waiting: Iterator[int]) -> None:
        for row in waiting:
            first, second = pairs[row]
            rows[row] = (await _graded(first, second, grader), await _graded(second, first, grader))

    waiting = iter(range(len(pairs)))
    await together([work(waiting) for _ in range(min(GRADING_AT_ONCE, len(pairs)))])
    return [rows[row] for row in range(len(pairs))]


async def _graded(answer: LoggedAnswer, other: LoggedAnswer, grader: Grader) -> LoggedAnswer:
    """Return an answer with its grade; what was asked and expected may stand in the other model's record only."""
    if answer.text is None:
        return answer
    request = ChatRequest({"messages": list(answer.messages or other.messages)}, id=answer.id)
    expected = answer.expected if answer.expected is not None else other.expected
    return replace(answer, grade=await grader.grade(request, answer.text, expected))


def with_columns(pairs: Sequence[Pair], *, expected: str | Path | None, confidences: str | Path | None) -> list[Pair]:
    """Return the pairs with right answers, and confidences of the Primary, from tables that name the questions.

    Args:
        pairs: the answers.
        expected: a table with `id` and `expected` (or `answer`).
        confidences: a table with `id` and `confidence`.
    """
    right: Mapping[str, str] = {} if expected is None else _column(expected, ("expected", "answer"))
    sure: Mapping[str, str] = {} if confidences is None else _column(confidences, ("confidence",))
    for name, column in ((expected, right), (confidences, sure)):
        if name is not None and not any(p.id in column for p, _ in pairs):
            raise ScoreLogError(
                f"{name}: none of its ids is one of the questions, which are named like {pairs[0][0].id!r:.60}"
            )
    return [
        (
            replace(p, expected=right.get(p.id, p.expected), confidence=_confidence(sure, p)),
            replace(g, expected=right.get(g.id, g.expected)),
        )
        for p, g in pairs
    ]


def _column(path: str | Path, names: Sequence[str]) -> Mapping[str, str]:
    """Return a column of a table by id."""
    with Table(path) as table:
        name = next((one for one in names if one in table.types), None)
        if name is None or "id" not in table.types:
            raise ScoreLogError(
                f"{path}: needs the columns id and {' or '.join(names)}; it has {', '.join(sorted(table.types))}"
            )
        return dict(zip(table.texts("id").tolist(), table.texts(name).tolist(), strict=True))


def _confidence(sure: Mapping[str, str], answer: LoggedAnswer) -> float | None:
    text = sure.get(answer.id)
    try:
        return answer.confidence if not text else float(text)
    except ValueError as error:
        raise OptionError(
            f"the confidence {text!r:.40} of {answer.id!r:.60} is not a number; correct that row"
        ) from error
