"""collect: ask every model about every row and write the log; priced, resumable, with a dry run."""

import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec import structs

from conformal_arbitrage.calibration.options import refuse_combination
from conformal_arbitrage.collecting.questions import Menus, Requests, read_questions
from conformal_arbitrage.core.exact import Floats, n_rows
from conformal_arbitrage.errors import ConfigError, OptionError, ScorerError
from conformal_arbitrage.live.build import Extras, Models
from conformal_arbitrage.live.config import Config, read_config
from conformal_arbitrage.live.graders import Grader
from conformal_arbitrage.live.rule import MARGIN_DIGITS, leg_of, margin_of, top_choice, top_of
from conformal_arbitrage.models.chat import answer_text
from conformal_arbitrage.models.completions import SETTINGS, RequestFields, overridden
from conformal_arbitrage.models.kinds import ROLES
from conformal_arbitrage.models.port import (
    Answer,
    Answerer,
    Identity,
    Port,
    Scorer,
    checked_scores,
    together,
    work_through,
)
from conformal_arbitrage.models.resilience import (
    Cache,
    Estimate,
    Pricing,
    RateLimit,
    SpendingLimit,
    fixed_floor,
    stored_cost,
)
from conformal_arbitrage.scorelog.cascade import CascadeLog, ModelColumns
from conformal_arbitrage.scorelog.log import ScoreLog, Usage, check_floor
from conformal_arbitrage.scorelog.tables import file_format, strings, writable
from conformal_arbitrage.types import COST_DIGITS, ChatRequest, Failure, Leg, Query, Role, Spent

FAILURES_IN_A_ROW = 20
_NAN = float("nan")
_NOT_ASKED = Leg(role="guardian", scores=None, spent=Spent(), seconds=0.0)
"""The Guardian's part in a row whose margin lies below the floor."""
_Question = TypeVar("_Question")


@dataclass(slots=True)
class Progress:
    """How far a collection has come; passed to its callback after every row.

    Attributes:
        failures: by model, the calls that failed.
        not_asked: rows below the floor, about which the Guardian was not asked.
        guardian_cost: dollars of asking the Guardian about the others; None if unknown.
    """

    total: int
    done: int = 0
    failures: dict[str, int] = field(default_factory=dict[str, int])
    spent: Spent = Spent()  # noqa: RUF009 - frozen
    not_asked: int = 0
    guardian_cost: float | None = 0.0

    def add(self, legs: Mapping[str, Leg]) -> None:
        """Count a row."""
        self.done += 1
        *_, last = legs
        self.not_asked += legs[last] is _NOT_ASKED
        for name, leg in legs.items():
            self.failures[name] = self.failures.get(name, 0) + (leg.error is not None)
            self.spent += leg.spent
        cost = legs[last].spent.cost
        self.guardian_cost = None if cost is None or self.guardian_cost is None else self.guardian_cost + cost

    @property
    def saved(self) -> float | None:
        """About what the rows below the floor would have cost, at the mean cost of the others; None if unknown."""
        return mean_saving(self.guardian_cost, self.done - self.not_asked, self.not_asked)


def mean_saving(cost: float | None, rows: int, saved: int) -> float | None:
    """Return what so many rows would have cost, given the cost of some others; None if unknown."""
    return None if cost is None or rows == 0 else round(saved * cost / rows, COST_DIGITS)


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointEstimate:
    """What the calls to one endpoint, in one role, would take."""

    origin: str
    spent: Spent
    role: str


async def collect(
    config: Config | str | Path,
    rows: Menus | Requests | str | Path,
    *,
    output: str | Path,
    grade: str | None = None,
    limit: int | None = None,
    concurrency: int = 16,
    max_cost: float | None = None,
    floor: float | None = None,
    progress: ProgressCallback | None = None,
) -> ScoreLog:
    """Ask both models about every row and write a score log; run again, it resumes where it stopped.

    Args:
        config: the models, or the path of their arbitrage.toml.
        rows: the questions, or the path of a file that `read_questions` reads without further options.
        output: the score log to write; replies are stored beside it, in OUTPUT.replies.sqlite.
        grade: how answers in free text are graded; needed in text form.
        concurrency: upstream calls in flight at once, over both models.
        max_cost: dollars that the whole collection may cost, including earlier runs.
        floor: a margin, or in text form a confidence, fixed by other rows: the Guardian is not asked about rows below it.

    Raises:
        CostLimitError: the next call could exceed max_cost; the replies so far are stored.
        OptionError: the collection began with another floor.
    """
    collection = Collection.of(
        config, rows, output=output, grade=grade, limit=limit, concurrency=concurrency, max_cost=max_cost, floor=floor
    )
    log = await collection.run(progress)
    log.write(output)
    return log


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """A collection that is ready to run, over a pair or over all models of [cascade].

    Attributes:
        output: the log's name; replies are stored beside it.
        grade: how answers in free text are graded.
        concurrency: upstream calls in flight at once, over all models.
        max_cost: dollars that the whole collection may cost, including earlier runs.
        floor: the margin below which the Guardian of a pair is not asked.
        guardian: a Guardian in place of the configured one of a pair, such as a rule over labels.
    """

    config: Config
    rows: Menus | Requests
    output: str | Path
    grade: str | None = None
    concurrency: int = 16
    max_cost: float | None = None
    floor: float | None = None
    guardian: Scorer | None = None

    @classmethod
    def of(
        cls,
        config: Config | str | Path,
        rows: Menus | Requests | str | Path,
        *,
        output: str | Path,
        limit: int | None = None,
        floor: float | None = None,
        **options: Any,
    ) -> "Collection":
        """Read the inputs, as `collect` takes them, and refuse an output that could not be written."""
        file_format(Path(output))
        writable(output)
        models = read_config(config) if isinstance(config, str | Path) else config
        questions = read_questions(rows, models.task.form) if isinstance(rows, str | Path) else rows
        least = None if floor is None else check_floor(floor, str(output))
        return cls(config=models, rows=questions.first(limit), output=output, floor=least, **options)

    async def run(self, progress: ProgressCallback | None = None) -> ScoreLog:
        """Ask both models about every row and return the score log, which is not written yet."""
        replies = await self._replies(_PAIR, progress)
        log = _menu_log(self.rows, replies) if isinstance(self.rows, Menus) else _router_log(self.rows, replies)
        return replace(log, floor=self.floor)

    async def run_cascade(self, progress: ProgressCallback | None = None) -> CascadeLog:
        """Ask all models of [cascade] about every row and return their log, which is not written yet.

        Raises:
            ConfigError: there is no [cascade], or a model has no price, which the choice of a chain needs.
            CostLimitError: the next call could exceed max_cost; the replies so far are stored.
        """
        self._refuse_floor()
        _require_prices(self.config)
        replies = await self._replies(self.config.cascade_sections, progress)
        if isinstance(self.rows, Menus):
            ids = [query.id for query in self.rows.queries]
            actions = [query.actions for query in self.rows.queries]
            columns = menu_columns(replies.legs, self.rows.labels, actions)
        else:
            ids = [request.id for request in self.rows.requests]
            columns = _text_columns(replies.legs)
        return cascade_log(ids, columns, identities=replies.identities, source=str(self.output))

    async def estimate(self, *, cascade: bool = False) -> list[EndpointEstimate]:
        """Count what the calls would take, per endpoint, without sending any; stored replies count nothing.

        A row whose Primary has not answered yet counts as one that the Guardian is asked about.
        """
        sections = self.config.cascade_sections if cascade else _PAIR
        if cascade:
            self._refuse_floor()
        self._check_begun(keep=False)
        roles = {role: self.config.section(role).for_estimate() for role in ROLES if getattr(self.config, role)}
        named = {name: model.for_estimate() for name, model in self.config.models.items()}
        return await estimated(
            structs.replace(self.config, **roles, models=named),
            lambda models: self._ask(models, sections, dry_run=True),
            replies=replies_path(self.output),
        )

    def _refuse_floor(self) -> None:
        if self.floor is not None:
            refuse_combination("floor", "path")

    def _check_begun(self, *, keep: bool) -> None:
        """Refuse another floor than that with which earlier runs began."""
        path = replies_path(self.output)
        begun = fixed_floor(path, self.floor, keep=keep)
        if begun != self.floor:
            before = "without a floor" if begun is None else f"with the floor {begun:g}"
            raise OptionError(
                f"{path}: this collection began {before}, and a floor chosen after looking at its rows breaks what a "
                "certificate promises; "
                + ("leave --floor out" if begun is None else f"pass --floor {begun!r}")
                + ", or collect other rows into another file"
            )

    async def _replies(self, sections: Mapping[str, str], progress: ProgressCallback | None) -> "Replies":
        self._check_begun(keep=True)
        extras = resumable(self.output, concurrency=self.concurrency, max_cost=self.max_cost)
        async with Models(self.config, extras) as models:
            return await self._ask(models, sections, progress)

    async def _ask(
        self,
        models: Models,
        sections: Mapping[str, str],
        progress: ProgressCallback | None = None,
        *,
        dry_run: bool = False,
    ) -> "Replies":
        """Ask the models of these sections, by name; the last is the Guardian."""
        *_, last = sections
        roles: dict[str, Role] = {name: "guardian" if name == last else "primary" for name in sections}
        if isinstance(self.rows, Menus):
            scorers = {
                name: self.guardian
                if self.guardian is not None and name == last
                else models.scorer(roles[name], section)
                for name, section in sections.items()
            }
            return await ask_menus(self.rows, scorers, self.concurrency, progress, keep_going=dry_run, floor=self.floor)
        if self.grade is None:
            raise OptionError("text form needs --grade, which says how answers are graded")
        answerers = {name: models.answerer(roles[name], section) for name, section in sections.items()}
        grader: Grader = models.grader(self.grade)
        if dry_run and self.grade != "judge":
            grader = NoGrader()  # a dry run has no answers to grade, and only a judge's grades cost anything
        return await ask_requests(
            self.rows, answerers, grader, self.concurrency, progress, keep_going=dry_run, floor=self.floor
        )


_PAIR = {role: role for role in ROLES}


def _require_prices(config: Config) -> None:
    for section in config.cascade_sections.values():
        model = config.section(section)
        if model.has_endpoint and model.pricing() is None:
            raise ConfigError(
                f"a cascade is chosen by what its models cost, and the price of [{section}] is unknown; set "
                "price = [IN, OUT], dollars per million tokens, or price_per_call"
            )


class NoGrader:
    """A grader for dry runs, which have nothing to grade."""

    identity: Mapping[str, Any] = {"kind": "none"}

    async def grade(self, request: ChatRequest, answer: str, expected: str | None) -> float | None:
        """Return no grade."""


def has_person(config: Config, grade: str | None = None) -> bool:
    """Tell whether a collection prompts a person at the terminal."""
    return grade == "human" or any(config.section(role).is_person for role in ROLES)


def collected_totals(log: ScoreLog) -> dict[str, Any]:
    """Return the number of rows, failures and dollars of a collected log."""
    below = log.below_floor
    figures: dict[str, Any] = {"rows": len(log), "missing_guardian_rows": int((log.missing & ~below).sum())}
    for role, usage in (("primary", log.primary_usage), ("guardian", log.guardian_usage)):
        figures[f"{role}_failures"] = sum(1 for text in log.extra[f"{role}_error"].tolist() if text)
        costs = None if usage.cost is None else usage.cost[~below] if role == "guardian" else usage.cost
        known = costs is not None and not np.isnan(costs).any()
        figures[f"{role}_cost"] = round(float(costs.sum()), COST_DIGITS) if known and costs is not None else None
    if log.floor is not None:
        figures["not_asked_rows"] = int(below.sum())
        asked = len(log) - figures["not_asked_rows"]
        figures["saved"] = mean_saving(figures["guardian_cost"], asked, figures["not_asked_rows"])
    return figures


# --- What a collection pays, or would pay ---


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
    return [
        EndpointEstimate(origin=estimate.origin, spent=estimate.spent, role=estimate.role)
        for estimate in estimates
        if estimate.spent.calls
    ]


# --- Asking the models ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """What every model replied to every question.

    Attributes:
        legs: by the model's name, the Guardian's last; one per row.
        identities: of the models by name, and of what else decides what a row says.
    """

    legs: dict[str, list[Leg]]
    identities: dict[str, Any]


async def collect_menus(
    menus: Menus, primary: Scorer, guardian: Scorer, *, concurrency: int, progress: ProgressCallback | None = None
) -> ScoreLog:
    """Ask both models to score every option of every question.

    Args:
        concurrency: rows in flight at once; a gate around the ports bounds the calls they make.
    """
    pair = {"primary": primary, "guardian": guardian}
    return _menu_log(menus, await ask_menus(menus, pair, concurrency, progress))


async def collect_requests(
    requests: Requests,
    primary: Answerer,
    guardian: Answerer,
    grader: Grader,
    *,
    concurrency: int,
    progress: ProgressCallback | None = None,
) -> ScoreLog:
    """Let both models answer every request and grade the answers; the log is in router form.

    Args:
        requests: the chat requests, with the expected answers if known.
        primary: the Primary, with a confidence.
        grader: grades both answers alike.
        concurrency: rows in flight at once.

    Raises:
        OptionError: settings are pinned, and a request has others.
    """
    pair = {"primary": primary, "guardian": guardian}
    return _router_log(requests, await ask_requests(requests, pair, grader, concurrency, progress))


async def ask_menus(
    menus: Menus,
    scorers: Mapping[str, Scorer],
    concurrency: int,
    progress: ProgressCallback | None,
    *,
    keep_going: bool = False,
    floor: float | None = None,
) -> Replies:
    """Let every model score every option of every question; the last is the Guardian.

    `keep_going` asks on even if a model fails on all of the first rows. Below the floor of a pair the Guardian is not asked.
    """
    *_, last = scorers

    async def ask(name: str, query: Query) -> Leg:
        return await _score_leg("guardian" if name == last else "primary", scorers[name], query)

    below = _below(floor, dry_run=keep_going)
    legs = await _ask_all(
        list(scorers),
        menus.queries,
        ask,
        None if below is None else lambda leg: below(leg.scores),
        concurrency,
        progress,
        keep_going=keep_going,
    )
    return Replies(legs=legs, identities={name: dict(scorer.identity) for name, scorer in scorers.items()})


async def ask_requests(
    requests: Requests,
    answerers: Mapping[str, Answerer],
    grader: Grader,
    concurrency: int,
    progress: ProgressCallback | None,
    *,
    keep_going: bool = False,
    floor: float | None = None,
) -> Replies:
    """Let every model answer every request, and grade the answers; the last is the Guardian.

    Below the floor of a pair neither answer is needed by a certificate: the Guardian is not asked, and nothing is graded.
    """
    *_, last = answerers
    models = {name: dict(answerer.identity) for name, answerer in answerers.items()}
    _refuse_overrides(requests.requests, models)
    expected = requests.expected or [None] * len(requests.requests)

    async def ask(name: str, question: tuple[ChatRequest, str | None]) -> Leg:
        if name == last:
            return await _answer_leg("guardian", answerers[name], grader, *question)
        return await _answer_leg("primary", answerers[name], grader, *question, below=below)

    below = _below(floor, dry_run=keep_going)
    questions = list(zip(requests.requests, expected, strict=True))
    legs = await _ask_all(
        list(answerers),
        questions,
        ask,
        None if below is None else lambda leg: below(_router_scores(leg.scores)),
        concurrency,
        progress,
        keep_going=keep_going,
    )
    fields = RequestFields()
    for request in requests.requests:
        fields.add(request.body)
    return Replies(legs=legs, identities={**models, "grader": dict(grader.identity), **fields.document(models)})


def _refuse_overrides(requests: Sequence[ChatRequest], identities: Mapping[str, Identity]) -> None:
    """Refuse requests with other settings than the pinned ones, as the gateway does."""
    for request in requests:
        differing = overridden(request.body, identities)
        if differing:
            raise OptionError(f"row {request.id}: {next(iter(differing.values()))}")


async def _ask_all(
    names: Sequence[str],
    questions: Sequence[_Question],
    ask: Callable[[str, _Question], Coroutine[Any, Any, Leg]],
    below: Callable[[Leg], bool] | None,
    concurrency: int,
    progress: ProgressCallback | None,
    *,
    keep_going: bool,
) -> dict[str, list[Leg]]:
    """Ask every model about every question, several questions at once, and return the legs by model.

    With `below`, which tells it from the Primary's leg, the Guardian of a pair is not asked about every row.
    """
    so_far = Progress(total=len(questions))
    rows: dict[int, dict[str, Leg]] = {}

    async def ask_row(row: int) -> None:
        legs = await together([ask(name, questions[row]) for name in (names if below is None else names[:1])])
        if below is not None:
            legs.append(_NOT_ASKED if below(legs[0]) else await ask(names[1], questions[row]))
        rows[row] = dict(zip(names, legs, strict=True))
        so_far.add(rows[row])
        if not keep_going:
            _refuse_hopeless(so_far, rows[row])
        if progress is not None:
            progress(so_far)

    await work_through(range(len(questions)), ask_row, at_once=concurrency)
    return {name: [rows[row][name] for row in range(len(questions))] for name in names}


def _refuse_hopeless(progress: Progress, legs: Mapping[str, Leg]) -> None:
    """Stop if a model failed on every one of the first rows."""
    *_, last = legs
    for name, leg in legs.items():
        rows = progress.done - (progress.not_asked if name == last else 0)
        if leg.error is not None and progress.failures[name] == rows == FAILURES_IN_A_ROW:
            model = f"the {name.capitalize()}" if name in ROLES else name
            raise ScorerError(
                f"{model} failed on all of the first {n_rows(rows)} ({leg.error}); fix that first: `arbitrage check`"
            )


async def _score_leg(role: Role, scorer: Scorer, query: Query) -> Leg:
    """Return a model's scores as a leg whose `reply` is the raw text."""
    start = time.perf_counter()
    try:
        scores = await checked_scores(scorer, query)
    except ScorerError as error:
        return structs.replace(leg_of(role, error, start), reply=error.raw)
    seconds = time.perf_counter() - start
    return Leg(
        role=role, scores=scores.values, spent=scores.spent, seconds=seconds, served=scores.served, reply=scores.raw
    )


async def _answer_leg(
    role: Role,
    answerer: Answerer,
    grader: Grader,
    request: ChatRequest,
    expected: str | None,
    *,
    below: "_Below | None" = None,
) -> Leg:
    """Return a model's answer as a leg whose scores are confidence and grade, NaN where there is none.

    An answer whose confidence lies below a floor is not graded.
    """
    start = time.perf_counter()
    try:
        answer: Answer = await answerer.answer(request)
        text = answer_text(answer.message)
    except ScorerError as error:
        return structs.replace(leg_of(role, error, start), reply=error.raw)
    seconds = time.perf_counter() - start
    grade, problem = None, None
    needed = below is None or not below((0.0, _or_nan(answer.confidence)))
    try:
        grade = await grader.grade(request, text, expected) if needed else None
    except ScorerError as error:
        problem = Failure("no grade", f"{type(error).__name__}: {error}")
    scores = (_or_nan(answer.confidence), _or_nan(grade))
    return Leg(
        role=role, scores=scores, spent=answer.spent, seconds=seconds, served=answer.served, error=problem, reply=text
    )


_Below = Callable[[Sequence[float] | None], bool]


def _below(floor: float | None, *, dry_run: bool) -> _Below | None:
    """Return what tells whether a row of Primary scores lies below the floor, as the log has it; None without a floor.

    What a Primary would say is not known in a dry run, and its margin is then 0: such a row counts as one to ask about.
    """
    if floor is None:
        return None

    def below(scores: Sequence[float] | None) -> bool:
        margin = 0.0 if scores is None or np.isnan(scores).any() else margin_of(tuple(scores), MARGIN_DIGITS)
        return margin < floor and not (dry_run and margin == 0)

    return below


def _router_scores(scores: Sequence[float] | None) -> tuple[float, float] | None:
    """Return the Primary scores that a confidence and a grade have in router form."""
    return None if scores is None else (0.0, scores[0])


# --- From replies to the log of a pair ---


def _menu_log(menus: Menus, replies: Replies) -> ScoreLog:
    primary, guardian = replies.legs["primary"], replies.legs["guardian"]
    log = ScoreLog.from_arrays(
        _score_lists(primary, menus.queries),
        _score_lists(guardian, menus.queries),
        id=[query.id for query in menus.queries],
        label=menus.labels,
        group=menus.groups,
        context=[query.text for query in menus.queries],
        actions=[query.actions for query in menus.queries],
        primary_usage=_usage(primary),
        guardian_usage=_usage(guardian),
        identities=replies.identities,
    )
    return replace(log, extra=_extra_columns(replies.legs, "raw"))


def _router_log(requests: Requests, replies: Replies) -> ScoreLog:
    primary, guardian = replies.legs["primary"], replies.legs["guardian"]
    log = ScoreLog.from_router(
        confidence=[_score_at(leg, 0) for leg in primary],
        # a Primary that failed has no confidence, so its row defers whatever its grade
        primary_grade=[0.0 if leg.scores is None else _score_at(leg, 1) for leg in primary],
        guardian_grade=[_score_at(leg, 1) for leg in guardian],
        id=[request.id for request in requests.requests],
        group=requests.groups,
        context=[request.text for request in requests.requests],
        primary_usage=_usage(primary),
        guardian_usage=_usage(guardian),
        identities=replies.identities,
    )
    return replace(log, extra={**_extra_columns(replies.legs, "answer"), **_settings_column(requests.requests)})


def _settings_column(requests: Sequence[ChatRequest]) -> dict[str, Any]:
    """Return the settings of each request as JSON, if any request has some."""
    rows = [
        {name: request.body[name] for name in sorted(request.body.keys() & SETTINGS.keys())} for request in requests
    ]
    return {"settings": strings([json.dumps(settings) if settings else None for settings in rows])} if any(rows) else {}


def _score_lists(legs: Sequence[Leg], queries: Sequence[Query]) -> list[list[float]]:
    return [
        [_NAN] * len(query.actions) if leg.scores is None else list(leg.scores)
        for leg, query in zip(legs, queries, strict=True)
    ]


def _score_at(leg: Leg, place: int) -> float:
    return _NAN if leg.scores is None else leg.scores[place]


def _or_nan(value: float | None) -> float:
    return _NAN if value is None else value


def _usage(legs: Sequence[Leg]) -> Usage:
    """Return costs and tokens per row, without columns of which nothing is known."""

    def column(values: Sequence[float | None]) -> Floats | None:
        numbers = np.array([_or_nan(value) for value in values], dtype=np.float64)
        return None if np.isnan(numbers).all() else numbers

    unknown = Spent(cost=None, input_tokens=None, output_tokens=None)  # asking would have cost something
    spent = [unknown if leg is _NOT_ASKED else leg.spent for leg in legs]
    return Usage(
        cost=column([each.cost for each in spent]),
        input_tokens=column([each.input_tokens for each in spent]),
        output_tokens=column([each.output_tokens for each in spent]),
    )


def _extra_columns(legs: Mapping[str, Sequence[Leg]], reply: str) -> dict[str, Any]:
    """Return replies, served models and errors as columns of the log."""
    columns: dict[str, Any] = {}
    for name, rows in legs.items():
        columns[f"{name}_{reply}"] = strings([leg.reply for leg in rows])
        columns[f"{name}_served"] = strings([leg.served for leg in rows])
        columns[f"{name}_error"] = strings([None if leg.error is None else str(leg.error) for leg in rows])
    return columns


# --- From replies, or recorded decisions, to the log of a cascade ---


def cascade_log(
    ids: Sequence[object],
    columns: Mapping[str, ModelColumns],
    *,
    identities: Mapping[str, Any] | None,
    source: str,
) -> CascadeLog:
    """Return the log of a cascade from what its models did, by name, the Guardian last."""
    *cheap, guardian = columns
    return CascadeLog.from_columns(
        id=ids,
        models={name: columns[name] for name in cheap},
        guardian_grade=columns[guardian].grade,
        guardian_cost=columns[guardian].cost,
        guardian=guardian,
        identities=identities,
        source=source,
    )


def menu_columns(
    legs: Mapping[str, Sequence[Leg | None]],
    labels: Sequence[int] | None,
    actions: Sequence[Sequence[str]] | None = None,
) -> dict[str, ModelColumns]:
    """Return what each model chose, and how good that is.

    Args:
        legs: by model, the Guardian's last.
        labels: the right actions, which grade a choice; without them the Guardian's scores do.
        actions: the texts of each row's actions; without them an answer is the action's number.
    """
    *_, guardian = legs
    columns: dict[str, ModelColumns] = {}
    for name, rows in legs.items():
        confidence: list[float] = []
        grade: list[float] = []
        answer: list[str | None] = []
        for row, leg in enumerate(rows):
            scores = None if leg is None else leg.scores
            margin, top = top_choice(scores)
            if name == guardian:  # its best action counts even if it leads by nothing
                top = None if scores is None else top_of(scores)
            confidence.append(_or_nan(margin))
            answer.append(None if top is None else str(top) if actions is None else actions[row][top])
            label = None if labels is None else labels[row]
            grade.append(_NAN if top is None else _menu_grade(top, label, legs[guardian][row]))
        columns[name] = ModelColumns(confidence=confidence, grade=grade, cost=call_costs(rows), answer=answer)
    return columns


def _menu_grade(chosen: int, label: int | None, guardian: Leg | None) -> float:
    if label is not None:
        return float(label == chosen)
    return _NAN if guardian is None or guardian.scores is None else float(guardian.scores[chosen])


def _text_columns(legs: Mapping[str, Sequence[Leg]]) -> dict[str, ModelColumns]:
    return {
        name: ModelColumns(
            confidence=[min(_score_at(leg, 0), 1.0) for leg in rows],
            grade=[_score_at(leg, 1) for leg in rows],
            cost=call_costs(rows),
            answer=[leg.reply if isinstance(leg.reply, str) and leg.scores is not None else None for leg in rows],
        )
        for name, rows in legs.items()
    }


def call_costs(legs: Sequence[Leg | None]) -> Floats:
    """Return what each call cost; one whose cost is unknown counts as the mean of the others, or 0."""
    costs = np.array([_NAN if leg is None else _or_nan(leg.spent.cost) for leg in legs], dtype=np.float64)
    known = costs[~np.isnan(costs)]
    return np.where(np.isnan(costs), known.mean() if known.size else 0.0, costs)
