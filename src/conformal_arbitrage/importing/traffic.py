"""Calls of several models in one export, joined by what was asked.

Which calls are of the Primary and which of the Guardian is told by their model. Two calls belong together if a field says
so, or else if their conversations are the same.

Knows nothing of the tool that exported them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.importing.grading import GradingStep, import_runs
from conformal_arbitrage.importing.pairing import Imported, LoggedAnswer, ModelRun, Tally, Unpaired
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
    return await import_runs(source, runs, step, unused=unused, unpaired=unpaired)


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
