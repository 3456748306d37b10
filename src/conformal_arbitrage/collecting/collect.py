"""collect: ask both models about every row and write a score log.

Every reply is stored as it comes, so a collection that was stopped goes on where it was. A Primary that failed is
recorded without an opinion; a Guardian that failed is recorded as missing. Nothing is dropped.

Knows nothing of thresholds.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec import structs

from conformal_arbitrage.collecting.questions import Menus, Requests
from conformal_arbitrage.core.gaps import Floats
from conformal_arbitrage.errors import CostLimitError, OptionError, ScorerError
from conformal_arbitrage.live.build import Extras, Models
from conformal_arbitrage.live.config import AnyModel, Chat, Config, Human
from conformal_arbitrage.live.grading import Grader, JudgeGrader
from conformal_arbitrage.scorelog.columns import Usage
from conformal_arbitrage.scorelog.files import strings
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorers.answers import answer_text
from conformal_arbitrage.scorers.base import Answer, Answerer, Scorer, checked_scores
from conformal_arbitrage.types import ChatRequest, Query, Spent
from conformal_arbitrage.upstream.base import Port, spent_of, together
from conformal_arbitrage.upstream.pricing import Pricing
from conformal_arbitrage.upstream.wrappers import Cache, Estimate, Gate, Purse, stored_cost

FAILURES_IN_A_ROW = 20
ROLES = ("primary", "guardian")
Outcome = TypeVar("Outcome")
Row = TypeVar("Row")


@dataclass(slots=True)
class Progress:
    """How far a collection is; handed to whoever shows it after every row."""

    total: int
    done: int = 0
    primary_failures: int = 0
    guardian_failures: int = 0
    spent: Spent = Spent()  # noqa: RUF009 - frozen


Told = Callable[[Progress], None]


def replies_path(output: str | Path) -> Path:
    """Where a collection keeps its replies."""
    path = Path(output)
    return path.with_name(path.name + ".replies.sqlite")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What came of asking one model about one row."""

    values: tuple[float, ...] | None
    spent: Spent
    raw: str | None = None
    served: str | None = None
    error: str | None = None


async def collect_menus(
    menus: Menus,
    primary: Scorer,
    guardian: Scorer,
    *,
    concurrency: int,
    told: Told = lambda _: None,
    patient: bool = False,
) -> ScoreLog:
    """Ask both models to score every option of every question.

    Args:
        menus: the questions.
        primary: the Primary.
        guardian: the Guardian.
        concurrency: rows under way at once; the calls they make are bounded by the gate around the ports.
        told: shown the progress after every row.
        patient: go on though a model fails on all of the first rows.
    """

    async def ask(query: Query) -> tuple[_Asked, _Asked]:
        first, second = await together([_scored(primary, query), _scored(guardian, query)])
        return first, second

    rows = await _all_rows(menus.queries, ask, concurrency, told, patient=patient)
    log = ScoreLog.from_arrays(
        _values([first.values for first, _ in rows], menus.queries),
        _values([second.values for _, second in rows], menus.queries),
        id=[query.id for query in menus.queries],
        label=menus.labels,
        group=menus.groups,
        context=[query.text for query in menus.queries],
        actions=[query.actions for query in menus.queries],
        primary_usage=_usage([first for first, _ in rows]),
        guardian_usage=_usage([second for _, second in rows]),
        identities={"primary": dict(primary.identity), "guardian": dict(guardian.identity)},
    )
    return replace(log, extra=_kept(rows))


async def collect_requests(
    requests: Requests,
    primary: Answerer,
    guardian: Answerer,
    grader: Grader,
    *,
    concurrency: int,
    told: Told = lambda _: None,
    patient: bool = False,
) -> ScoreLog:
    """Let both models answer every request and grade the answers; the log is in router form.

    Args:
        requests: the chat requests, and what is expected where known.
        primary: the Primary, with a confidence.
        guardian: the Guardian.
        grader: grades both answers alike.
        concurrency: rows under way at once.
        told: shown the progress after every row.
        patient: go on though a model fails on all of the first rows.
    """
    expected = requests.expected or [None] * len(requests.requests)
    numbered = list(zip(requests.requests, expected, strict=True))

    async def ask(row: tuple[ChatRequest, str | None]) -> tuple[_Asked, _Asked]:
        request, wanted = row
        first, second = await together(
            [_graded(primary, request, grader, wanted), _graded(guardian, request, grader, wanted)]
        )
        return first, second

    rows = await _all_rows(numbered, ask, concurrency, told, patient=patient)
    first = [asked for asked, _ in rows]
    log = ScoreLog.from_router(
        confidence=[_number(asked.values, 0) for asked in first],
        # a Primary that failed has no confidence, so its row defers whatever its grade
        primary_grade=[0.0 if asked.values is None else _number(asked.values, 1) for asked in first],
        guardian_grade=[_number(asked.values, 1) for _, asked in rows],
        id=[request.id for request in requests.requests],
        group=requests.groups,
        context=[_text(request) for request in requests.requests],
        primary_usage=_usage(first),
        guardian_usage=_usage([asked for _, asked in rows]),
        identities={
            "primary": dict(primary.identity), "guardian": dict(guardian.identity), "grader": dict(grader.identity),
        },
    )  # fmt: skip
    kept = _kept(rows)
    answers = {f"{role}_answer": kept.pop(f"{role}_raw") for role in ROLES}
    return replace(log, extra={**answers, **kept})


async def _all_rows(
    rows: Sequence[Row],
    ask: Callable[[Row], Awaitable[tuple[_Asked, _Asked]]],
    concurrency: int,
    told: Told,
    *,
    patient: bool,
) -> list[tuple[_Asked, _Asked]]:
    """Ask about every row, some at once; if money runs out, what is under way is finished and stored first."""
    progress = Progress(total=len(rows))
    found: list[tuple[_Asked, _Asked] | None] = [None] * len(rows)
    refused: list[CostLimitError] = []

    async def work(waiting: Iterator[int]) -> None:
        for row in waiting:
            try:
                found[row] = await ask(rows[row])
            except CostLimitError as error:
                refused.append(error)
            if refused:
                return
            _count(progress, found[row])
            if not patient:
                _refuse_hopeless(progress, found[row])
            told(progress)

    waiting = iter(range(len(rows)))
    await together([work(waiting) for _ in range(min(concurrency, len(rows)))])
    if refused:
        raise refused[0]
    assert None not in found, "a row was not asked about"
    return [pair for pair in found if pair is not None]


def _count(progress: Progress, pair: tuple[_Asked, _Asked] | None) -> None:
    if pair is None:
        return
    progress.done += 1
    progress.primary_failures += pair[0].error is not None
    progress.guardian_failures += pair[1].error is not None
    progress.spent += pair[0].spent + pair[1].spent


def _refuse_hopeless(progress: Progress, pair: tuple[_Asked, _Asked] | None) -> None:
    """Stop if a model failed on every one of the first rows."""
    if pair is None:
        return
    for name, failures, asked in (
        ("Primary", progress.primary_failures, pair[0]),
        ("Guardian", progress.guardian_failures, pair[1]),
    ):
        if failures == progress.done == FAILURES_IN_A_ROW:
            raise ScorerError(
                f"the {name} failed on all of the first {failures} rows ({asked.error}); mend that first: `arbitrage check`"
            )


async def _scored(scorer: Scorer, query: Query) -> _Asked:
    try:
        scores = await checked_scores(scorer, query)
    except ScorerError as error:
        return _failed(error)
    return _Asked(values=scores.values, spent=scores.spent, raw=scores.raw, served=scores.served)


async def _graded(answerer: Answerer, request: ChatRequest, grader: Grader, expected: str | None) -> _Asked:
    """An answer as (confidence, grade), NaN where there is none."""
    try:
        answer: Answer = await answerer.answer(request)
        text = answer_text(answer.message)
    except ScorerError as error:
        return _failed(error)
    grade, problem = None, None
    try:
        grade = await grader.grade(request, text, expected)
    except ScorerError as error:
        problem = f"no grade: {type(error).__name__}: {error}"
    values = (_or_nan(answer.confidence), _or_nan(grade))
    return _Asked(values=values, spent=answer.spent, raw=text, served=answer.served, error=problem)


def _failed(error: ScorerError) -> _Asked:
    return _Asked(values=None, spent=spent_of(error), raw=error.raw, error=f"{type(error).__name__}: {error}")


def _values(found: Sequence[tuple[float, ...] | None], queries: Sequence[Query]) -> list[list[float]]:
    return [
        [float("nan")] * len(query.actions) if values is None else list(values)
        for values, query in zip(found, queries, strict=True)
    ]


def _number(values: tuple[float, ...] | None, place: int) -> float:
    return float("nan") if values is None else values[place]


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _usage(asked: Sequence[_Asked]) -> Usage:
    """Costs and tokens per row; a column of which nothing is known is left out."""

    def column(values: Sequence[float | None]) -> Floats | None:
        numbers = np.array([_or_nan(v) for v in values], dtype=np.float64)
        return None if np.isnan(numbers).all() else numbers

    return Usage(
        cost=column([a.spent.cost for a in asked]),
        input_tokens=column([a.spent.input_tokens for a in asked]),
        output_tokens=column([a.spent.output_tokens for a in asked]),
    )


def _kept(rows: Sequence[tuple[_Asked, _Asked]]) -> dict[str, Any]:
    """Raw replies, served models and errors, as columns of the log."""
    kept: dict[str, Any] = {}
    for place, role in enumerate(ROLES):
        for name in ("raw", "served", "error"):
            kept[f"{role}_{name}"] = strings([getattr(pair[place], name) for pair in rows])
    return kept


def _text(request: ChatRequest) -> str:
    return Query(list[Mapping[str, Any]](request.messages), ()).text


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """What the calls to one endpoint would take."""

    origin: str
    spent: Spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """A collection as `arbitrage collect` runs it.

    Attributes:
        config: the models.
        rows: what to ask.
        output: the score log's name; replies are stored beside it.
        grade: how answers in free text are graded.
        concurrency: upstream calls at once, over both models.
        max_cost: dollars that the whole collection may cost, earlier runs of it included.
        guardian: a Guardian in place of the configured one, such as a rule over labels.
    """

    config: Config
    rows: Menus | Requests
    output: str | Path
    grade: str | None = None
    concurrency: int = 16
    max_cost: float | None = None
    guardian: Scorer | None = None

    @property
    def has_person(self) -> bool:
        """Whether a person will be asked at the terminal."""
        return self.grade == "human" or any(isinstance(m, Human) for m in (self.config.primary, self.config.guardian))

    async def run(self, told: Told | None = None) -> ScoreLog:
        """Ask about every row.

        Raises:
            CostLimitError: the next call could exceed max_cost; what was answered is stored.
        """
        replies = replies_path(self.output)
        known, unknown = stored_cost(replies)
        if self.max_cost is not None and unknown:
            raise OptionError(
                f"{replies}: what {unknown} stored replies cost is not known, so --max-cost cannot count them; leave it "
                "out, or collect into another file"
            )
        purse = None if self.max_cost is None else Purse(self.max_cost, spent=known)
        extras = Extras(gate=Gate(concurrency=self.concurrency), purse=purse, replies=replies)
        async with Models(self.config, extras) as models:
            return await self._collect(models, told or (lambda _: None))

    async def estimate(self) -> list[Estimated]:
        """Count what the calls would take, without sending any; replies that are stored count nothing."""
        counted: list[Estimate] = []
        replies = replies_path(self.output)

        def instead(port: Port, pricing: Pricing | None, role: str) -> Port:
            stored = Cache(port, replies, per_query=True, role=role) if replies.exists() else None
            if stored is not None:
                files.callback(stored.close)
            counted.append(Estimate(port, pricing, stored))
            return counted[-1]

        quiet = structs.replace(self.config, **{role: _asked_once(getattr(self.config, role)) for role in ROLES})
        with ExitStack() as files:
            async with Models(quiet, Extras(instead=instead)) as models:
                await self._collect(models, lambda _: None, patient=True)
        return [Estimated(origin=one.origin, spent=one.spent) for one in counted if one.spent.calls]

    async def _collect(self, models: Models, told: Told, *, patient: bool = False) -> ScoreLog:
        spread: dict[str, Any] = {"concurrency": self.concurrency, "told": told, "patient": patient}
        if isinstance(self.rows, Menus):
            primary = models.scorer("primary")  # first, as estimates are listed in this order
            return await collect_menus(self.rows, primary, self.guardian or models.scorer("guardian"), **spread)
        if self.grade is None:
            raise OptionError("text form needs --grade, which says how answers are graded")
        pair = models.answerer("primary"), models.answerer("guardian")
        grader: Grader = models.grader(self.grade)
        if patient and not isinstance(grader, JudgeGrader):
            grader = _Ungraded()  # an estimate has no answers to grade; only a judge's grades cost something
        return await collect_requests(self.rows, *pair, grader, **spread)


class _Ungraded:
    """Stands in for a grader where there is nothing to grade."""

    identity: Mapping[str, Any] = {"kind": "none"}

    async def grade(self, request: ChatRequest, answer: str, expected: str | None) -> float | None:
        """No grade."""


def _asked_once(model: AnyModel) -> AnyModel:
    """The model without asking again after an unreadable reply, as every reply of an estimate is one."""
    return structs.replace(model, reask=False) if isinstance(model, Chat) else model


def summary(log: ScoreLog) -> dict[str, Any]:
    """What came of a collection, in figures."""
    found: dict[str, Any] = {"rows": len(log), "missing_guardian_rows": int(log.missing.sum())}
    for role, usage in (("primary", log.primary_usage), ("guardian", log.guardian_usage)):
        found[f"{role}_failures"] = sum(1 for text in log.extra[f"{role}_error"].tolist() if text)
        known = usage.cost is not None and not np.isnan(usage.cost).any()
        found[f"{role}_cost"] = float(usage.cost.sum()) if known and usage.cost is not None else None
    return found
