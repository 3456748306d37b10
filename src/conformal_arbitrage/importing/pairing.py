"""Pairing: imported answers and menus of two models become one log; what is refused; the grading step."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from conformal_arbitrage.core.exact import Floats, n_rows
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.live.build import Extras, Models
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.live.graders import COMPARISONS, Comparison, FunctionGrader, Grader
from conformal_arbitrage.models.kinds import load_object
from conformal_arbitrage.models.port import fingerprint, work_through
from conformal_arbitrage.models.resilience import SpendingLimit
from conformal_arbitrage.scorelog.log import ScoreLog, Usage
from conformal_arbitrage.scorelog.tables import Table, strings
from conformal_arbitrage.types import ChatRequest, Messages, as_list, transcript

# --- Pair two models' answers to the same questions, and turn the pairs into a score log in router form ---


Unpaired = Literal["refuse", "drop"]
NEITHER = "questions with scores of neither model (they would be deferred, and have no loss)"
_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAnswer:
    """One model's answer to one question, as far as a file tells it.

    Attributes:
        id: the question, the same for both models.
        text: the answer; None if the model failed.
        confidence: that the answer is right, 0 or more; None if the file has none.
        grade: of the answer, in [0, 1]; None if it has none yet.
        group: subject, tenant, language.
        input_tokens: of the question.
        output_tokens: of the answer.
    """

    id: str
    messages: Messages = ()
    text: str | None = None
    confidence: float | None = None
    grade: float | None = None
    expected: str | None = None
    group: str | None = None
    cost: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Tally:
    """What could not be used, counted by reason, with the first few of each."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    examples: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def add(self, reason: str, example: str) -> None:
        """Count one thing that could not be used."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        first = self.examples.setdefault(reason, [])
        if len(first) < _EXAMPLES:
            first.append(example)

    def to_list(self) -> list[dict[str, Any]]:
        """Return the reasons with their counts and examples."""
        return [{"reason": r, "count": n, "examples": self.examples[r]} for r, n in self.counts.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A score log made from another tool's files, and what of them was not used.

    Attributes:
        models: the names of the Primary and the Guardian in the files; of the Primary alone if nobody is asked else.
        unused: what could not be used, by reason.
        notes: what the reader should know before calibrating.
    """

    log: ScoreLog
    source: str
    models: tuple[str, ...]
    unused: Tally = field(default_factory=Tally)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {
            "format": self.source,
            "primary": self.models[0],
            "guardian": self.models[1] if len(self.models) > 1 else None,
            "rows": len(self.log),
            "no_opinion_rows": int(self.log.no_opinion.sum()),
            "missing_guardian_rows": int(self.log.missing.sum()),
            "unused": self.unused.to_list(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRun:
    """One model's answers by question."""

    model: str
    answers: Mapping[str, LoggedAnswer]


Pair = tuple[LoggedAnswer, LoggedAnswer]
_ROLES = ("Primary", "Guardian")


def paired(
    primary: ModelRun, guardian: ModelRun, *, unpaired: Unpaired, unused: Tally, roles: tuple[str, str] = _ROLES
) -> list[Pair]:
    """Return the answers to every question that both models were asked, in the Primary's order; `roles` name them.

    Raises:
        ScoreLogError: no question has both, or some have only one and `unpaired` is "refuse".
    """
    pairs = [(answer, guardian.answers[id]) for id, answer in primary.answers.items() if id in guardian.answers]
    if not pairs:
        raise ScoreLogError(
            f"no question was answered by both models: {len(primary.answers)} by {primary.model!r}, "
            f"{len(guardian.answers)} by {guardian.model!r}; give two runs over the same questions, or name what they share"
        )
    single = refuse_unpaired(primary.answers, guardian.answers, unpaired=unpaired, roles=roles)
    for id, name in single:
        unused.add(f"questions that only the {name} was asked", id)
    return pairs


def refuse_unpaired(
    primary: Iterable[str], guardian: Iterable[str], *, unpaired: Unpaired, roles: tuple[str, str] = _ROLES
) -> list[tuple[str, str]]:
    """Return the questions that only one model was asked, with that model's role.

    Raises:
        ScoreLogError: there are some, and nobody said that they may go.
    """
    ours, theirs = dict.fromkeys(primary), dict.fromkeys(guardian)
    single = [(id, roles[0]) for id in ours if id not in theirs] + [(id, roles[1]) for id in theirs if id not in ours]
    if single and unpaired == "refuse":
        counts = [sum(name == role for _, name in single) for role in roles]
        raise ScoreLogError(
            f"{counts[0]} questions were only answered by the {roles[0]} and {counts[1]} only by the {roles[1]}, such as "
            f"{single[0][0]!r:.60}; run both on the same questions. If which ones are missing has nothing to do with the "
            "answers (a smaller limit, another sample), state that with --unpaired drop"
        )
    return single


def router_log(graded: Sequence[Pair], unused: Tally) -> ScoreLog:
    """Return graded pairs as a log in router form.

    Rows in which both models failed are left out: they are deferred at every threshold, so they have no loss, and without
    them the threshold can only be higher.

    Raises:
        ScoreLogError: no answer has a grade, or no answer of the Primary has a confidence.
    """
    pairs = [pair for pair in graded if not _of_neither(*pair)]
    for p, g in graded:
        if _of_neither(p, g):
            unused.add(NEITHER, p.id)
    ours, theirs = [p for p, _ in pairs], [g for _, g in pairs]
    if all(p.grade is None for p in ours) or all(g.grade is None for g in theirs):
        raise ScoreLogError(
            "no answer of one of the models has a grade; grade them with --grade, or name the score that the files hold"
        )
    return _in_router_form(pairs)


def answers_log(answers: Sequence[LoggedAnswer]) -> ScoreLog:
    """Return one model's answers in router form, without scores of a Guardian: the items of a batch.

    Raises:
        ScoreLogError: no answer has a confidence.
    """
    log = _in_router_form([(answer, LoggedAnswer(id=answer.id)) for answer in answers])
    known = strings([answer.expected for answer in answers])
    return replace(log, extra={**log.extra, "expected": known}) if known.any() else log


def _in_router_form(pairs: Sequence[Pair]) -> ScoreLog:
    """Return answers as a log, missing grades as missing Guardian scores."""
    ours, theirs = [p for p, _ in pairs], [g for _, g in pairs]
    if all(p.confidence is None for p in ours):
        raise ScoreLogError(
            "no answer of the Primary has a confidence, so none could stand alone; ask it with logprobs, name the "
            "field that holds a confidence with --confidence, or bring a table of them with --confidences FILE"
        )
    log = ScoreLog.from_router(
        confidence=_numbers(p.confidence if p.text is not None else None for p in ours),
        # a Primary that failed has no confidence, so its row defers whatever its grade
        primary_grade=_numbers(0.0 if p.text is None else p.grade for p in ours),
        guardian_grade=_numbers(None if g.text is None else g.grade for g in theirs),
        id=[p.id for p in ours],
        group=None if all(p.group is None for p in ours) else [p.group or "" for p in ours],
        context=[question_text(p.messages or g.messages) for p, g in pairs],
        primary_usage=_usage(ours),
        guardian_usage=_usage(theirs),
    )
    texts = {"primary_answer": strings([p.text for p in ours]), "guardian_answer": strings([g.text for g in theirs])}
    return replace(log, extra={name: values for name, values in texts.items() if values.any()})


def _of_neither(primary: LoggedAnswer, guardian: LoggedAnswer) -> bool:
    """Tell whether a row has neither a confidence nor a regret."""
    graded = guardian.text is not None and guardian.grade is not None
    judged = primary.text is None or primary.grade is not None
    return (primary.text is None or primary.confidence is None) and not (graded and judged)


def question_text(messages: Messages) -> str:
    """Return a conversation as text: that of a single message as it is."""
    if len(messages) == 1 and isinstance(messages[0].get("content"), str):
        return str(messages[0]["content"])
    return transcript(messages)


def counted(log: ScoreLog) -> tuple[str, ...]:
    """Return what rows without scores mean for calibration."""
    notes: list[str] = []
    if silent := int(log.no_opinion.sum()):
        notes.append(
            f"{n_rows(silent, 'has', 'have')} no confidence of the Primary (it failed, or the file has none): deferred"
        )
    if missing := int(log.missing.sum()):
        notes.append(
            f"{n_rows(missing, 'has', 'have')} no grade of an answer: ask or grade again, or calibrate with "
            "--missing-guardian worst_case"
        )
    return tuple(notes)


def _usage(answers: Sequence[LoggedAnswer]) -> Usage:
    """Return cost and tokens, where the files have them."""
    columns = {
        "cost": [answer.cost for answer in answers],
        "input_tokens": [answer.input_tokens for answer in answers],
        "output_tokens": [answer.output_tokens for answer in answers],
    }
    return Usage(**{name: None if all(v is None for v in vs) else _numbers(vs) for name, vs in columns.items()})


def _numbers(values: Iterable[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


# --- The grading step ---


GRADING_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingStep:
    """How answers without grades get them.

    Attributes:
        grade: the grader; None if the export holds grades, or there is one model only.
        graded: the export holds grades.
        expected: a table with `id` and `expected`.
        confidences: a table with `id` and `confidence`.
        config: the configuration with the judge.
        max_cost: dollars that the judge may cost.
        unpaired: "drop" states that questions of one model only are missing for reasons other than the answers.
    """

    grade: str | None = None
    graded: bool = False
    expected: str | Path | None = None
    confidences: str | Path | None = None
    config: str | Path = "arbitrage.toml"
    max_cost: float | None = None
    unpaired: Unpaired = "refuse"


class GradingKeywords(TypedDict, total=False):
    """The fields of `GradingStep` that importers take as single keywords."""

    grade: str | None
    expected: str | Path | None
    confidences: str | Path | None
    config: str | Path
    max_cost: float | None
    unpaired: Unpaired


async def import_runs(source: str, runs: Sequence[ModelRun], step: GradingStep, *, unused: Tally) -> Imported:
    """Return the answers of two models, Primary first, as a score log in router form; of one model, without Guardian."""
    if len(runs) == 1:
        [run] = runs
        alone = [(answer, answer) for answer in run.answers.values()]
        answers = [answer for answer, _ in with_columns(alone, step)]
        return Imported(log=answers_log(answers), source=source, models=(run.model,), unused=unused)
    if step.grade is None and not step.graded:
        raise OptionError("name how the answers of both models are graded (--grade)")
    pairs = with_columns(paired(*runs, unpaired=step.unpaired, unused=unused), step)
    log = router_log(await graded(pairs, step), unused)
    models = runs[0].model, runs[1].model
    return Imported(log=log, source=source, models=models, unused=unused, notes=counted(log))


async def graded(pairs: Sequence[Pair], step: GradingStep) -> list[Pair]:
    """Return the pairs with the grades of a grader, which does not see which model answered.

    It is exact, regex, json-equal, python:MODULE:FUNCTION, judge or human; without one they keep the grades that they have.
    """
    how = step.grade
    if how is None:
        return list(pairs)
    if how in COMPARISONS:
        return await _all_graded(pairs, Comparison(how))
    if how.startswith("python:"):
        return await _all_graded(pairs, FunctionGrader(function=load_object(how, Path.cwd()), name=how[7:]))
    extras = Extras() if step.max_cost is None else Extras(spending_limit=SpendingLimit(step.max_cost))
    async with Models(read_config(step.config), extras) as models:
        return await _all_graded(pairs, models.grader(how))


async def _all_graded(pairs: Sequence[Pair], grader: Grader) -> list[Pair]:
    rows: dict[int, Pair] = {}

    async def grade(row: int) -> None:
        first, second = pairs[row]
        rows[row] = (await _graded(first, second, grader), await _graded(second, first, grader))

    await work_through(range(len(pairs)), grade, at_once=GRADING_AT_ONCE)
    return [rows[row] for row in range(len(pairs))]


async def _graded(answer: LoggedAnswer, other: LoggedAnswer, grader: Grader) -> LoggedAnswer:
    """Return an answer with its grade; what was asked and expected may stand in the other model's record only."""
    if answer.text is None:
        return answer
    request = ChatRequest({"messages": list(answer.messages or other.messages)}, id=answer.id)
    expected = answer.expected if answer.expected is not None else other.expected
    return replace(answer, grade=await grader.grade(request, answer.text, expected))


def with_columns(pairs: Sequence[Pair], step: GradingStep) -> list[Pair]:
    """Return the pairs with right answers, and confidences of the Primary, from tables that name the questions."""
    right: Mapping[str, str] = {} if step.expected is None else _column(step.expected, ("expected", "answer"))
    sure: Mapping[str, str] = {} if step.confidences is None else _column(step.confidences, ("confidence",))
    for name, column in ((step.expected, right), (step.confidences, sure)):
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
        name = next((column for column in names if column in table.types), None)
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


# --- Calls of several models in one export, joined by what was asked ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One call.

    Attributes:
        models: the names under which its model may be asked for.
        key: what joins it to the other model's call; None if its conversation does.
        at: when it was made, to order calls by.
        answer: what was asked and answered; its id is set when calls are joined.
    """

    models: tuple[str, ...]
    key: str | None
    at: str
    answer: LoggedAnswer

    @property
    def question(self) -> str:
        """What joins it to other calls about its question."""
        return self.key or fingerprint([dict(message) for message in self.answer.messages])[:16]


async def joined(
    source: str,
    calls: Iterable[ModelCall],
    primary: str,
    guardian: str | None,
    step: GradingStep,
    unused: Tally,
) -> Imported:
    """Return the calls of two models, or of one, as a score log."""
    every = sorted(calls, key=lambda call: call.at)
    models = [name for name in (primary, guardian) if name is not None]
    runs = [ModelRun(model=name, answers=_answers(every, name, unused)) for name in models]
    for call in every:
        if not set(call.models) & set(models):
            unused.add("calls of other models", call.models[0])
    return await import_runs(source, runs, step, unused=unused)


def _answers(calls: Iterable[ModelCall], model: str, unused: Tally) -> dict[str, LoggedAnswer]:
    """Return a model's first answer to each question; a failure only where no retry succeeded."""
    answers: dict[str, LoggedAnswer] = {}
    names: dict[str, None] = {}
    for call in calls:
        names |= dict.fromkeys(call.models)
        if model not in call.models:
            continue
        id = call.question
        earlier = answers.get(id)
        if earlier is None or (earlier.text is None and call.answer.text is not None):
            answers[id] = replace(call.answer, id=id)
        else:
            unused.add("later answers to a question that was asked again", id)
    if not answers:
        raise OptionError(f"no call of {model!r}; the files have calls of {', '.join(sorted(names)) or 'no model'}")
    return answers


# --- Two models' log-likelihoods of the same options as a score log of menus ---


Numbers = list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MenuRow:
    """One model's view of one question.

    Attributes:
        group: its task.
        likelihoods: of the options, in logarithms; NaN if unknown.
        target: the right option as the tool names it: an index, a list of them, or a text.
        right: the tool's own verdict on this model's top option, 1 or 0; None if it has none.
        place: where it was read, for messages.
    """

    id: str
    group: str
    context: str
    options: Sequence[str]
    likelihoods: Numbers
    target: str
    right: float | None
    place: str

    @property
    def top(self) -> int:
        """The option that the model prefers, the first of equals."""
        return int(np.argmax(self.likelihoods))

    def correct(self, *, texts: bool) -> Numbers:
        """Return 1 for right options, 0 for wrong ones, NaN where the file does not say; see `_reads_texts`."""
        places = _places(self.target, self.options, texts=texts)
        if places is not None:
            return [float(k in places) for k in range(len(self.options))]
        known = [math.nan] * len(self.options)
        if self.right is None:
            return known
        if self.right == 1:
            known = [0.0] * len(self.options)
        elif len(self.options) == 2:
            known = [1.0, 1.0]
        known[self.top] = self.right
        return known


def menu_log(
    primary: Mapping[str, MenuRow], guardian: Mapping[str, MenuRow], *, unpaired: Unpaired, unused: Tally, metric: str
) -> tuple[ScoreLog, tuple[str, ...]]:
    """Return the rows that both models have as a log, and what the reader should know.

    Raises:
        ScoreLogError: no question is common to both, the options differ, or some questions have one model only.
    """
    shared = [id for id in primary if id in guardian]
    if not shared:
        raise ScoreLogError("no question was asked of both models; give two runs over the same tasks")
    for id, name in refuse_unpaired(primary, guardian, unpaired=unpaired):
        unused.add(f"questions that only the {name} was asked", id)
    scored: list[str] = []
    for id in shared:
        if softmax(primary[id].likelihoods) or softmax(guardian[id].likelihoods):
            scored.append(id)
        else:
            unused.add(NEITHER, id)
    ours, theirs = [primary[id] for id in scored], [guardian[id] for id in scored]
    for p, g in zip(ours, theirs, strict=True):
        if len(p.options) != len(g.options):
            raise ScoreLogError(
                f"{p.place}: {len(p.options)} options, {len(g.options)} in {g.place}; run the same task"
            )
    texts = _reads_texts(ours + theirs)
    correct = [[row.correct(texts=texts) for row in rows] for rows in (ours, theirs)]
    log = ScoreLog.from_arrays(
        [softmax(row.likelihoods) for row in ours],
        [softmax(row.likelihoods) for row in theirs],
        id=scored,
        group=[row.group for row in ours],
        context=[row.context for row in ours],
        actions=[list(row.options) for row in ours],
        outcomes={"correct": [_either(p, g) for p, g in zip(*correct, strict=True)]},
    )
    differing = [
        f"{count} verdicts ({metric}) on the {name} differ from these scores, such as ties"
        for name, rows in (("Primary", ours), ("Guardian", theirs))
        if (count := _differences(rows, texts=texts))
    ]
    return log, (*differing, *_advice(log))


def menu_answers(rows: Mapping[str, MenuRow]) -> dict[str, LoggedAnswer]:
    """Return what one model chose from each menu, how probable it found that, and the right option where it is known."""
    texts = _reads_texts([*rows.values()])
    answers: dict[str, LoggedAnswer] = {}
    for id, row in rows.items():
        shares, right = softmax(row.likelihoods), row.correct(texts=texts)
        answers[id] = LoggedAnswer(
            id=id,
            messages=({"role": "user", "content": row.context},),
            text=None if shares is None else row.options[row.top],
            confidence=None if shares is None else max(shares),
            expected=row.options[right.index(1.0)] if 1.0 in right else None,
            group=row.group,
        )
    return answers


def softmax(likelihoods: Sequence[float]) -> Numbers | None:
    """Return the softmax of log-likelihoods; None if one is unknown, or none is possible."""
    top = max(likelihoods)
    if any(math.isnan(value) for value in likelihoods) or math.isinf(top):
        return None
    weights = [math.exp(value - top) for value in likelihoods]
    return [weight / math.fsum(weights) for weight in weights]


def _places(target: str, options: Sequence[str], *, texts: bool) -> set[int] | None:
    """Return the indices of the right options; None if the target does not name options."""
    indices = _indices(target, len(options))
    named = {options.index(target)} if target in options else None
    return (named or indices) if texts else (indices or named)


def _indices(target: str, count: int) -> set[int] | None:
    """Return the indices that a target such as "2" or "[0, 2]" names; None if it is something else."""
    try:
        value: object = json.loads(target)
    except (ValueError, RecursionError):
        return None
    places = as_list(value) or [value]
    numbers = {place for place in places if isinstance(place, int) and 0 <= place < count}
    return numbers if numbers and len(numbers) == len(places) else None


def _reads_texts(rows: Sequence[MenuRow]) -> bool:
    """Tell whether targets such as "2" are options rather than indices: as fits the tool's own verdicts better."""
    return _differences(rows, texts=True) < _differences(rows, texts=False)


def _either(ours: Numbers, theirs: Numbers) -> Numbers:
    """Return what one or the other run says."""
    return [theirs[k] if math.isnan(value) else value for k, value in enumerate(ours)]


def _differences(rows: Sequence[MenuRow], *, texts: bool) -> int:
    """Count the tool's own verdicts that differ from these scores and targets."""
    verdicts = [(row.correct(texts=texts)[row.top], row.right) for row in rows if row.right is not None]
    return sum(ours != theirs for ours, theirs in verdicts if not math.isnan(ours))


def _advice(log: ScoreLog) -> tuple[str, ...]:
    correct = log.outcome("correct")
    notes = [
        "the loss is in the Guardian's probabilities; calibrate with --binarize for the share of questions that it gets "
        "right and the decision does not"
    ]
    if unknown := int(np.isnan(correct).sum()):
        notes.append(f"{unknown} options are neither right nor wrong by the file, so --binarize may not use their rows")
    return tuple(notes)
