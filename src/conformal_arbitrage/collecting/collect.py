"""collect: ask both models about every row and write a score log.

Every reply is stored as it arrives, so an interrupted collection resumes where it stopped. A Primary that failed is
recorded without an opinion, a Guardian that failed as missing. No row is dropped.

Knows nothing of thresholds.
"""

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec import structs

from conformal_arbitrage.collecting.paying import EndpointEstimate, estimated, replies_path, resumable
from conformal_arbitrage.collecting.questions import Menus, Requests, read_questions
from conformal_arbitrage.core.gaps import Floats
from conformal_arbitrage.errors import CostLimitError, OptionError, ScorerError
from conformal_arbitrage.live.build import Models
from conformal_arbitrage.live.config import Config, read_config
from conformal_arbitrage.live.grading import Grader
from conformal_arbitrage.scorelog.columns import Usage
from conformal_arbitrage.scorelog.files import file_format, writable
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.tables import strings
from conformal_arbitrage.scorers.answers import answer_text
from conformal_arbitrage.scorers.base import Answer, Answerer, Identity, Scorer, checked_scores
from conformal_arbitrage.scorers.request_fields import SETTINGS, logged_settings, overridden
from conformal_arbitrage.types import COST_DIGITS, ChatRequest, Leg, Query, Role, Spent
from conformal_arbitrage.upstream.base import spent_of, together

FAILURES_IN_A_ROW = 20
ROLES: tuple[Role, Role] = ("primary", "guardian")
_Question = TypeVar("_Question")


@dataclass(slots=True)
class Progress:
    """How far a collection has come; passed to its callback after every row."""

    total: int
    done: int = 0
    primary_failures: int = 0
    guardian_failures: int = 0
    spent: Spent = Spent()  # noqa: RUF009 - frozen


ProgressCallback = Callable[[Progress], None]


async def collect(
    config: Config | str | Path,
    rows: Menus | Requests | str | Path,
    *,
    output: str | Path,
    grade: str | None = None,
    limit: int | None = None,
    concurrency: int = 16,
    max_cost: float | None = None,
    progress: ProgressCallback | None = None,
) -> ScoreLog:
    """Ask both models about every row and write a score log; run again, it resumes where it stopped.

    Args:
        config: the models, or the path of their arbitrage.toml.
        rows: the questions, or the path of a file that `read_questions` reads without further options.
        output: the score log to write; replies are stored beside it, in OUTPUT.replies.sqlite.
        grade: how answers in free text are graded; needed in text form.
        limit: take only the first rows.
        concurrency: upstream calls in flight at once, over both models.
        max_cost: dollars that the whole collection may cost, including earlier runs.
        progress: called after every row.

    Raises:
        CostLimitError: the next call could exceed max_cost; the replies so far are stored.
    """
    collection = _prepared(config, rows, output, grade, limit, concurrency, max_cost)
    log = await collection.run(progress)
    log.write(output)
    return log


async def estimate(
    config: Config | str | Path,
    rows: Menus | Requests | str | Path,
    *,
    output: str | Path,
    grade: str | None = None,
    limit: int | None = None,
    concurrency: int = 16,
    max_cost: float | None = None,
) -> list["EndpointEstimate"]:
    """Return what `collect` would send and spend with the same arguments, per endpoint; sends and writes nothing."""
    return await _prepared(config, rows, output, grade, limit, concurrency, max_cost).estimate()


def _prepared(
    config: Config | str | Path,
    rows: Menus | Requests | str | Path,
    output: str | Path,
    grade: str | None,
    limit: int | None,
    concurrency: int,
    max_cost: float | None,
) -> "Collection":
    """Read the inputs, and refuse an output that could not be written before any money is spent."""
    file_format(Path(output))
    writable(output)
    models = read_config(config) if isinstance(config, str | Path) else config
    questions = read_questions(rows, models.task.form) if isinstance(rows, str | Path) else rows
    return Collection(
        config=models,
        rows=questions.first(limit),
        output=output,
        grade=grade,
        concurrency=concurrency,
        max_cost=max_cost,
    )


def has_person(config: Config, grade: str | None = None) -> bool:
    """Tell whether a collection prompts a person at the terminal."""
    return grade == "human" or any(config.section(role).is_person for role in ROLES)


async def collect_menus(
    menus: Menus,
    primary: Scorer,
    guardian: Scorer,
    *,
    concurrency: int,
    progress: ProgressCallback | None = None,
    keep_going: bool = False,
) -> ScoreLog:
    """Ask both models to score every option of every question.

    Args:
        menus: the questions.
        primary: the Primary.
        guardian: the Guardian.
        concurrency: rows in flight at once; a gate around the ports bounds the calls they make.
        progress: called after every row.
        keep_going: continue even if a model fails on all of the first rows.
    """

    async def ask(query: Query) -> list[Leg]:
        return await together([score_leg("primary", primary, query), score_leg("guardian", guardian, query)])

    legs = await _all_legs(menus.queries, ask, concurrency, progress, keep_going=keep_going)
    first, second = legs["primary"], legs["guardian"]
    log = ScoreLog.from_arrays(
        _score_lists(first, menus.queries),
        _score_lists(second, menus.queries),
        id=[query.id for query in menus.queries],
        label=menus.labels,
        group=menus.groups,
        context=[query.text for query in menus.queries],
        actions=[query.actions for query in menus.queries],
        primary_usage=_usage(first),
        guardian_usage=_usage(second),
        identities={"primary": dict(primary.identity), "guardian": dict(guardian.identity)},
    )
    return replace(log, extra=_extra_columns(legs, "raw"))


async def collect_requests(
    requests: Requests,
    primary: Answerer,
    guardian: Answerer,
    grader: Grader,
    *,
    concurrency: int,
    progress: ProgressCallback | None = None,
    keep_going: bool = False,
) -> ScoreLog:
    """Let both models answer every request and grade the answers; the log is in router form.

    Args:
        requests: the chat requests, with the expected answers if known.
        primary: the Primary, with a confidence.
        guardian: the Guardian.
        grader: grades both answers alike.
        concurrency: rows in flight at once.
        progress: called after every row.
        keep_going: continue even if a model fails on all of the first rows.

    Raises:
        OptionError: settings are pinned, and a request has others.
    """
    identities = {"primary": dict(primary.identity), "guardian": dict(guardian.identity)}
    refuse_overrides(requests.requests, identities)
    expected = requests.expected or [None] * len(requests.requests)
    questions = list(zip(requests.requests, expected, strict=True))

    async def ask(question: tuple[ChatRequest, str | None]) -> list[Leg]:
        return await together(
            [answer_leg("primary", primary, grader, *question), answer_leg("guardian", guardian, grader, *question)]
        )

    legs = await _all_legs(questions, ask, concurrency, progress, keep_going=keep_going)
    first, second = legs["primary"], legs["guardian"]
    log = ScoreLog.from_router(
        confidence=[_score_at(leg, 0) for leg in first],
        # a Primary that failed has no confidence, so its row defers whatever its grade
        primary_grade=[0.0 if leg.scores is None else _score_at(leg, 1) for leg in first],
        guardian_grade=[_score_at(leg, 1) for leg in second],
        id=[request.id for request in requests.requests],
        group=requests.groups,
        context=[request.text for request in requests.requests],
        primary_usage=_usage(first),
        guardian_usage=_usage(second),
        identities={
            **identities,
            "grader": dict(grader.identity),
            **logged_settings((request.body for request in requests.requests), identities),
        },
    )
    return replace(log, extra={**_extra_columns(legs, "answer"), **_settings_column(requests.requests)})


def refuse_overrides(requests: Sequence[ChatRequest], identities: Mapping[str, Identity]) -> None:
    """Refuse requests with other settings than the pinned ones, as the gateway does."""
    for request in requests:
        differing = overridden(request.body, identities)
        if differing:
            raise OptionError(f"row {request.id}: {next(iter(differing.values()))}")


def _settings_column(requests: Sequence[ChatRequest]) -> dict[str, Any]:
    """Return the settings of each request as JSON, if any request has some."""
    settings = [{name: r.body[name] for name in sorted(r.body.keys() & SETTINGS.keys())} for r in requests]
    return {"settings": strings([json.dumps(one) if one else None for one in settings])} if any(settings) else {}


async def _all_legs(
    questions: Sequence[_Question],
    ask: Callable[[_Question], Awaitable[list[Leg]]],
    concurrency: int,
    progress: ProgressCallback | None,
    *,
    keep_going: bool,
) -> dict[Role, list[Leg]]:
    """Ask about every question, several at once; if money runs out, calls in flight are finished and stored first."""
    so_far = Progress(total=len(questions))
    rows: dict[int, list[Leg]] = {}
    refused: list[CostLimitError] = []

    async def work(waiting: Iterator[int]) -> None:
        for row in waiting:
            try:
                legs = await ask(questions[row])
            except CostLimitError as error:
                refused.append(error)
            else:
                rows[row] = legs
            if refused:
                return
            _count(so_far, rows[row])
            if not keep_going:
                _refuse_hopeless(so_far, rows[row])
            if progress is not None:
                progress(so_far)

    waiting = iter(range(len(questions)))
    await together([work(waiting) for _ in range(min(concurrency, len(questions)))])
    if refused:
        raise refused[0]
    return {role: [rows[row][place] for row in range(len(questions))] for place, role in enumerate(ROLES)}


def _count(progress: Progress, legs: Sequence[Leg]) -> None:
    primary, guardian = legs
    progress.done += 1
    progress.primary_failures += primary.error is not None
    progress.guardian_failures += guardian.error is not None
    progress.spent += primary.spent + guardian.spent


def _refuse_hopeless(progress: Progress, legs: Sequence[Leg]) -> None:
    """Stop if a model failed on every one of the first rows."""
    for name, failures, leg in (
        ("Primary", progress.primary_failures, legs[0]),
        ("Guardian", progress.guardian_failures, legs[1]),
    ):
        if failures == progress.done == FAILURES_IN_A_ROW:
            raise ScorerError(
                f"the {name} failed on all of the first {failures} rows ({leg.error}); fix that first: `arbitrage check`"
            )


async def score_leg(role: Role, scorer: Scorer, query: Query) -> Leg:
    """Return a model's scores as a leg whose `reply` is the raw text."""
    start = time.perf_counter()
    try:
        scores = await checked_scores(scorer, query)
    except ScorerError as error:
        return _failed(role, error, start)
    seconds = time.perf_counter() - start
    return Leg(
        role=role, scores=scores.values, spent=scores.spent, seconds=seconds, served=scores.served, reply=scores.raw
    )


async def answer_leg(role: Role, answerer: Answerer, grader: Grader, request: ChatRequest, expected: str | None) -> Leg:
    """Return a model's answer as a leg whose scores are confidence and grade, NaN where there is none."""
    start = time.perf_counter()
    try:
        answer: Answer = await answerer.answer(request)
        text = answer_text(answer.message)
    except ScorerError as error:
        return _failed(role, error, start)
    seconds = time.perf_counter() - start
    grade, problem = None, None
    try:
        grade = await grader.grade(request, text, expected)
    except ScorerError as error:
        problem = f"no grade: {type(error).__name__}: {error}"
    scores = (_or_nan(answer.confidence), _or_nan(grade))
    return Leg(
        role=role, scores=scores, spent=answer.spent, seconds=seconds, served=answer.served, error=problem, reply=text
    )


def _failed(role: Role, error: ScorerError, start: float) -> Leg:
    text = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    return Leg(role=role, scores=None, spent=spent_of(error), seconds=seconds, error=text, reply=error.raw)


def _score_lists(legs: Sequence[Leg], queries: Sequence[Query]) -> list[list[float]]:
    return [
        [float("nan")] * len(query.actions) if leg.scores is None else list(leg.scores)
        for leg, query in zip(legs, queries, strict=True)
    ]


def _score_at(leg: Leg, place: int) -> float:
    return float("nan") if leg.scores is None else leg.scores[place]


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _usage(legs: Sequence[Leg]) -> Usage:
    """Return costs and tokens per row, without columns of which nothing is known."""

    def column(values: Sequence[float | None]) -> Floats | None:
        numbers = np.array([_or_nan(v) for v in values], dtype=np.float64)
        return None if np.isnan(numbers).all() else numbers

    return Usage(
        cost=column([leg.spent.cost for leg in legs]),
        input_tokens=column([leg.spent.input_tokens for leg in legs]),
        output_tokens=column([leg.spent.output_tokens for leg in legs]),
    )


def _extra_columns(legs: Mapping[Role, Sequence[Leg]], reply: str) -> dict[str, Any]:
    """Return replies, served models and errors as columns of the log."""
    columns: dict[str, Any] = {}
    for role, own in legs.items():
        columns[f"{role}_{reply}"] = strings([leg.reply for leg in own])
        columns[f"{role}_served"] = strings([leg.served for leg in own])
        columns[f"{role}_error"] = strings([leg.error for leg in own])
    return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """A collection that is ready to run.

    Attributes:
        config: the models.
        rows: the questions.
        output: the score log's name; replies are stored beside it.
        grade: how answers in free text are graded.
        concurrency: upstream calls in flight at once, over both models.
        max_cost: dollars that the whole collection may cost, including earlier runs.
        guardian: a Guardian in place of the configured one, such as a rule over labels.
    """

    config: Config
    rows: Menus | Requests
    output: str | Path
    grade: str | None = None
    concurrency: int = 16
    max_cost: float | None = None
    guardian: Scorer | None = None

    async def run(self, progress: ProgressCallback | None = None) -> ScoreLog:
        """Ask about every row and return the score log, which is not written yet.

        Raises:
            CostLimitError: the next call could exceed max_cost; the replies so far are stored.
        """
        extras = resumable(self.output, concurrency=self.concurrency, max_cost=self.max_cost)
        async with Models(self.config, extras) as models:
            return await self._collect(models, progress)

    async def estimate(self) -> list[EndpointEstimate]:
        """Count what the calls would take, without sending any; stored replies count nothing."""
        quick = {role: self.config.section(role).for_estimate() for role in ROLES}
        return await estimated(
            structs.replace(self.config, **quick),
            lambda models: self._collect(models, None, dry_run=True),
            replies=replies_path(self.output),
        )

    async def _collect(self, models: Models, progress: ProgressCallback | None, *, dry_run: bool = False) -> ScoreLog:
        options: dict[str, Any] = {"concurrency": self.concurrency, "progress": progress, "keep_going": dry_run}
        if isinstance(self.rows, Menus):
            primary = models.scorer("primary")  # first, as estimates are listed in this order
            return await collect_menus(self.rows, primary, self.guardian or models.scorer("guardian"), **options)
        if self.grade is None:
            raise OptionError("text form needs --grade, which says how answers are graded")
        pair = models.answerer("primary"), models.answerer("guardian")
        grader: Grader = models.grader(self.grade)
        if dry_run and self.grade != "judge":
            grader = NoGrader()  # a dry run has no answers to grade, and only a judge's grades cost anything
        return await collect_requests(self.rows, *pair, grader, **options)


class NoGrader:
    """A grader for dry runs, which have nothing to grade."""

    identity: Mapping[str, Any] = {"kind": "none"}

    async def grade(self, request: ChatRequest, answer: str, expected: str | None) -> float | None:
        """Return no grade."""


def summary(log: ScoreLog) -> dict[str, Any]:
    """Return the number of rows, failures and dollars of a collected log."""
    figures: dict[str, Any] = {"rows": len(log), "missing_guardian_rows": int(log.missing.sum())}
    for role, usage in (("primary", log.primary_usage), ("guardian", log.guardian_usage)):
        figures[f"{role}_failures"] = sum(1 for text in log.extra[f"{role}_error"].tolist() if text)
        known = usage.cost is not None and not np.isnan(usage.cost).any()
        figures[f"{role}_cost"] = (
            round(float(usage.cost.sum()), COST_DIGITS) if known and usage.cost is not None else None
        )
    return figures
