"""Calls of several models in one export, joined by what was asked.

Which calls are of the Primary and which of the Guardian is told by their model. Two calls belong together if a field says
so, or else if their conversations are the same.

Knows nothing of the tool that exported them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.importing.grading import graded, with_columns
from conformal_arbitrage.importing.pairing import (
    Imported,
    LoggedAnswer,
    ModelRun,
    Tally,
    Unpaired,
    counted,
    paired,
    router_log,
)
from conformal_arbitrage.upstream.base import fingerprint


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


async def joined(
    source: str,
    calls: Iterable[ModelCall],
    models: tuple[str, str],
    step: GradingStep,
    unused: Tally,
    unpaired: Unpaired,
) -> Imported:
    """Return the calls of two models as a score log."""
    every = sorted(calls, key=lambda call: call.at)
    runs = [ModelRun(model=name, answers=_answers(every, name, unused)) for name in models]
    for call in every:
        if not set(call.models) & set(models):
            unused.add("calls of other models", call.models[0])
    pairs = paired(*runs, unpaired=unpaired, unused=unused)
    pairs = with_columns(pairs, expected=step.expected, confidences=step.confidences)
    log = router_log(await graded(pairs, step.grade, config=step.config, max_cost=step.max_cost), unused)
    return Imported(log=log, source=source, models=models, unused=unused, notes=counted(log))


def _answers(calls: Iterable[ModelCall], model: str, unused: Tally) -> dict[str, LoggedAnswer]:
    """Return a model's first answer to each question; a failure only where no retry succeeded."""
    answers: dict[str, LoggedAnswer] = {}
    names: dict[str, None] = {}
    for call in calls:
        names |= dict.fromkeys(call.models)
        if model not in call.models:
            continue
        id = call.key or fingerprint([dict(message) for message in call.answer.messages])[:16]
        earlier = answers.get(id)
        if earlier is None or (earlier.text is None and call.answer.text is not None):
            answers[id] = replace(call.answer, id=id)
        else:
            unused.add("later answers to a question that was asked again", id)
    if not answers:
        raise OptionError(f"no call of {model!r}; the files have calls of {', '.join(sorted(names)) or 'no model'}")
    return answers
