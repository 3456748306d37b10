"""collect_cascade: ask every model of a cascade about every row and write the log that `calibrate --path` reads.

All models are asked about all rows, whether or not a cascade would get to them: which chain is worth asking is chosen from
this log. Replies are stored as they arrive, so that an interrupted collection resumes.

Knows nothing of chains or thresholds.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from conformal_arbitrage.collecting.collect import (
    FAILURES_IN_A_ROW,
    NoGrader,
    answer_leg,
    refuse_overrides,
    score_leg,
)
from conformal_arbitrage.collecting.paying import EndpointEstimate, estimated, replies_path, resumable
from conformal_arbitrage.collecting.questions import Menus, Requests
from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.errors import ConfigError, CostLimitError, OptionError, ScorerError
from conformal_arbitrage.live.build import Models
from conformal_arbitrage.live.cascade import top_choice
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.live.grading import Grader
from conformal_arbitrage.live.policy import top_of
from conformal_arbitrage.scorelog.cascade import CascadeLog, ModelColumns
from conformal_arbitrage.scorers.request_fields import logged_settings
from conformal_arbitrage.types import Leg, Role
from conformal_arbitrage.upstream.base import together

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
                _refuse_hopeless(names, rows)
            if progress is not None:
                progress(len(rows), total)

    waiting = iter(range(total))
    await together([work(waiting) for _ in range(min(concurrency, total))])
    if refused:
        raise refused[0]
    return {name: [rows[row][place] for row in range(total)] for place, name in enumerate(names)}


def _refuse_hopeless(names: Sequence[str], rows: Mapping[int, Sequence[Leg]]) -> None:
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
