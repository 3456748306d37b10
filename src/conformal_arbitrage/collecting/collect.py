"""collect: ask every model about every row and write the log; priced, resumable, with a dry run."""

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec import structs

from conformal_arbitrage.collecting.questions import Menus, Requests, read_questions
from conformal_arbitrage.core.exact import Floats
from conformal_arbitrage.errors import ConfigError, CostLimitError, OptionError, ScorerError
from conformal_arbitrage.live.build import Extras, Models
from conformal_arbitrage.live.config import Config, read_config
from conformal_arbitrage.live.graders import Grader
from conformal_arbitrage.live.rule import top_choice, top_of
from conformal_arbitrage.models.chat import answer_text
from conformal_arbitrage.models.completions import SETTINGS, logged_settings, overridden
from conformal_arbitrage.models.port import Answer, Answerer, Identity, Port, Scorer, checked_scores, spent_of, together
from conformal_arbitrage.models.wrappers import Cache, Estimate, Pricing, RateLimit, SpendingLimit, stored_cost
from conformal_arbitrage.scorelog.cascade import CascadeLog, ModelColumns
from conformal_arbitrage.scorelog.log import ScoreLog, Usage
from conformal_arbitrage.scorelog.tables import file_format, strings, writable
from conformal_arbitrage.types import COST_DIGITS, ChatRequest, Leg, Query, Role, Spent

# --- What a collection pays, or would pay ---


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointEstimate:
    """What the calls to one endpoint, in one role, would take."""

    origin: str
    spent: Spent
    role: str


def replies_path(output: str | Path) -> Path:
    """Return the file in which a collection stores its replies."""
    path = Path(output)
    return path.with_name(path.name + ".replies.sqlite")


def resumable(output: str | Path, *, concurrency: int, max_cost: float | None) -> Extras:
    """Return what wraps the models of a collection: stored replies, the calls in flight, the limit on its whole cost.

    Args:
        output: the log's name; replies are stored beside it.
        concurrency: upstream calls in flight at once, over all models.
        max_cost: dollars that the whole collection may cost, including earlier runs.

    Raises:
        OptionError: the cost of earlier runs is unknown, so that a limit cannot count it.
    """
    replies = replies_path(output)
    known, unknown = stored_cost(replies)
    if max_cost is not None and unknown:
        raise OptionError(
            f"{replies}: the cost of {unknown} stored replies is unknown, so --max-cost cannot count them; drop "
            "--max-cost, or collect into another file"
        )
    limit = None if max_cost is None else SpendingLimit(max_cost, spent=known)
    return Extras(gate=RateLimit(concurrency=concurrency), spending_limit=limit, replies=replies)


async def estimated(
    config: Config, work: Callable[[Models], Awaitable[object]], *, replies: Path | None = None
) -> list[EndpointEstimate]:
    """Return what work with models would take, endpoint by endpoint, without sending anything.

    Args:
        config: the models.
        work: asks them.
        replies: where replies are stored, which count nothing.
    """
    estimates: list[Estimate] = []

    def instead(port: Port, pricing: Pricing | None, role: str) -> Port:
        stored = None
        if replies is not None and replies.exists():
            stored = Cache(port, replies, per_query=True, role=role)
            files.callback(stored.close)
        estimates.append(Estimate(port, pricing, stored, role=role))
        return estimates[-1]

    with ExitStack() as files:
        async with Models(config, Extras(instead=instead, keyless=True)) as models:
            await work(models)
    return [EndpointEstimate(origin=one.origin, spent=one.spent, role=one.role) for one in estimates if one.spent.calls]


# --- collect ---


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


# --- collect_cascade ---


_NAN = float("nan")
RowsDone = Callable[[int, int], None]
"""Called after every row with the rows done and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeCollection:
    """A collection over all models of [cascade] that is ready to run.

    Attributes:
        config: the models.
        rows: the questions.
        output: the log's name; replies are stored beside it.
        grade: how answers in free text are graded.
        concurrency: upstream calls in flight at once, over all models.
        max_cost: dollars that the whole collection may cost, including earlier runs.
    """

    config: Config
    rows: Menus | Requests
    output: str | Path
    grade: str | None = None
    concurrency: int = 16
    max_cost: float | None = None

    async def run(self, progress: RowsDone | None = None) -> CascadeLog:
        """Ask about every row and return the log, which is not written yet.

        Raises:
            ConfigError: there is no [cascade], or a model has no price, which the choice of a chain needs.
            CostLimitError: the next call could exceed max_cost; the replies so far are stored.
        """
        _require_prices(self.config)
        extras = resumable(self.output, concurrency=self.concurrency, max_cost=self.max_cost)
        async with Models(self.config, extras) as models:
            return await self._collected(models, progress)

    async def estimate(self) -> list[EndpointEstimate]:
        """Count what the calls would take, without sending any; stored replies count nothing."""
        quick = {name: model.for_estimate() for name, model in self.config.models.items()}
        return await estimated(
            structs.replace(self.config, models=quick),
            lambda models: self._asked(models, None, dry_run=True),
            replies=replies_path(self.output),
        )

    async def _collected(self, models: Models, progress: RowsDone | None) -> CascadeLog:
        legs, identities = await self._asked(models, progress, dry_run=False)
        *cheap, guardian = legs
        graded = _menu_grades(self.rows, legs) if isinstance(self.rows, Menus) else _text_grades(legs)
        ids = [one.id for one in (self.rows.queries if isinstance(self.rows, Menus) else self.rows.requests)]
        return CascadeLog.from_columns(
            id=ids,
            models={
                name: ModelColumns(
                    confidence=graded[name].confidence,
                    grade=graded[name].grade,
                    cost=_costs(legs[name]),
                    answer=graded[name].answer,
                )
                for name in cheap
            },
            guardian_grade=graded[guardian].grade,
            guardian_cost=_costs(legs[guardian]),
            guardian=guardian,
            identities=identities,
            source=str(self.output),
        )

    async def _asked(
        self, models: Models, progress: RowsDone | None, *, dry_run: bool
    ) -> tuple[dict[str, list[Leg]], dict[str, Any]]:
        """Return the legs of every model by name, the Guardian's last, and the identities."""
        if isinstance(self.rows, Menus):
            scorers, last, guardian = models.cascade_scorers()
            everyone = {**scorers, last: guardian}
            identities: dict[str, Any] = {name: dict(one.identity) for name, one in everyone.items()}
            menus = self.rows

            async def ask(row: int) -> list[Leg]:
                query = menus.queries[row]
                return await together([score_leg(_role(name, last), one, query) for name, one in everyone.items()])

            return await _all_rows(
                list(everyone), len(menus.queries), ask, self.concurrency, progress, dry_run
            ), identities
        return await self._asked_text(models, self.rows, progress, dry_run=dry_run)

    async def _asked_text(
        self, models: Models, requests: Requests, progress: RowsDone | None, *, dry_run: bool
    ) -> tuple[dict[str, list[Leg]], dict[str, Any]]:
        if self.grade is None:
            raise OptionError("text form needs --grade, which says how answers are graded")
        answerers, last, guardian = models.cascade_answerers()
        everyone = {**answerers, last: guardian}
        identities: dict[str, Any] = {name: dict(one.identity) for name, one in everyone.items()}
        refuse_overrides(requests.requests, identities)
        grader: Grader = models.grader(self.grade)
        if dry_run and self.grade != "judge":
            grader = NoGrader()
        expected = requests.expected or [None] * len(requests.requests)

        async def ask(row: int) -> list[Leg]:
            question = (requests.requests[row], expected[row])
            return await together(
                [answer_leg(_role(name, last), one, grader, *question) for name, one in everyone.items()]
            )

        legs = await _all_rows(list(everyone), len(requests.requests), ask, self.concurrency, progress, dry_run)
        logged = logged_settings((request.body for request in requests.requests), identities)
        return legs, {**identities, "grader": dict(grader.identity), **logged}


def _role(name: str, guardian: str) -> Role:
    return "guardian" if name == guardian else "primary"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graded:
    confidence: list[float]
    grade: list[float]
    answer: list[str | None]


def _menu_grades(menus: Menus, legs: Mapping[str, Sequence[Leg]]) -> dict[str, _Graded]:
    """Return what each model chose and how good that is: by the label or, without labels, by the Guardian's scores."""
    *_, guardian = legs
    graded: dict[str, _Graded] = {}
    for name, own in legs.items():
        confidence: list[float] = []
        grade: list[float] = []
        answer: list[str | None] = []
        for row, (query, leg) in enumerate(zip(menus.queries, own, strict=True)):
            margin, top = top_choice(leg.scores)
            if name == guardian:
                top = None if leg.scores is None else top_of(leg.scores)
            confidence.append(_NAN if margin is None else margin)
            answer.append(None if top is None else query.actions[top])
            grade.append(_NAN if top is None else _menu_grade(menus, row, legs[guardian][row], top))
        graded[name] = _Graded(confidence=confidence, grade=grade, answer=answer)
    return graded


def _menu_grade(menus: Menus, row: int, guardian: Leg, chosen: int) -> float:
    if menus.labels is not None:
        return float(menus.labels[row] == chosen)
    return _NAN if guardian.scores is None else float(guardian.scores[chosen])


def _text_grades(legs: Mapping[str, Sequence[Leg]]) -> dict[str, _Graded]:
    return {
        name: _Graded(
            confidence=[_NAN if leg.scores is None else min(leg.scores[0], 1.0) for leg in own],
            grade=[_NAN if leg.scores is None else leg.scores[1] for leg in own],
            answer=[leg.reply if isinstance(leg.reply, str) and leg.scores is not None else None for leg in own],
        )
        for name, own in legs.items()
    }


def _costs(legs: Sequence[Leg]) -> Floats:
    """Return what each row cost; a call whose cost is unknown counts as the mean of the others, or 0."""
    costs = np.array([_NAN if leg.spent.cost is None else leg.spent.cost for leg in legs], dtype=np.float64)
    known = costs[~np.isnan(costs)]
    return np.where(np.isnan(costs), known.mean() if known.size else 0.0, costs)


async def _all_rows(
    names: Sequence[str],
    total: int,
    ask: Callable[[int], Awaitable[list[Leg]]],
    concurrency: int,
    progress: RowsDone | None,
    keep_going: bool,
) -> dict[str, list[Leg]]:
    """Ask about every row, several at once; if money runs out, calls in flight are finished and stored first."""
    rows: dict[int, list[Leg]] = {}
    refused: list[CostLimitError] = []

    async def work(waiting: Iterator[int]) -> None:
        for row in waiting:
            try:
                rows[row] = await ask(row)
            except CostLimitError as error:
                refused.append(error)
            if refused:
                return
            if not keep_going and len(rows) == FAILURES_IN_A_ROW:
                _refuse_hopeless_chain(names, rows)
            if progress is not None:
                progress(len(rows), total)

    waiting = iter(range(total))
    await together([work(waiting) for _ in range(min(concurrency, total))])
    if refused:
        raise refused[0]
    return {name: [rows[row][place] for row in range(total)] for place, name in enumerate(names)}


def _refuse_hopeless_chain(names: Sequence[str], rows: Mapping[int, Sequence[Leg]]) -> None:
    """Stop if a model failed on every one of the first rows."""
    for place, name in enumerate(names):
        errors = [legs[place].error for legs in rows.values()]
        if all(error is not None for error in errors):
            raise ScorerError(
                f"{name} failed on all of the first {len(errors)} rows ({errors[-1]}); fix that first: `arbitrage check`"
            )


def _require_prices(config: Config) -> None:
    for section in config.cascade_sections.values():
        model = config.section(section)
        if model.has_endpoint and model.pricing() is None:
            raise ConfigError(
                f"a cascade is chosen by what its models cost, and the price of [{section}] is unknown; set "
                "price = [IN, OUT], dollars per million tokens, or price_per_call"
            )
