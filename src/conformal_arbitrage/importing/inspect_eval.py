"""inspect_ai: the logs (.eval or .json) of two models on one task, joined by sample, in router form.

Grades are the scores in the log. The confidence of the Primary's answer comes from its logprobs, from how many epochs agree
with it, or from a score.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.importing.files import (
    Document,
    as_number,
    conversation,
    field_of,
    files_of,
    number_of,
    read_documents,
    read_members,
    reply_confidence,
    reply_text,
    text_of,
)
from conformal_arbitrage.importing.pairing import (
    GradingKeywords,
    GradingStep,
    Imported,
    LoggedAnswer,
    ModelRun,
    Tally,
    import_runs,
)
from conformal_arbitrage.types import as_list, as_object, is_list, is_object

_LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_ATTACHMENT = "attachment://"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalFile:
    """One log: its model, its task, and its samples."""

    path: Path
    model: str
    task: str
    samples: Sequence[Document]


async def read_inspect(
    primary: str | Path,
    guardian: str | Path | None = None,
    *,
    scorer: str | None = None,
    confidence: str = "logprob",
    group: str | None = None,
    **grading: Unpack[GradingKeywords],
) -> Imported:
    """Read the logs of two models on the same task as a score log.

    Args:
        primary: the Primary's log.
        guardian: the Guardian's log; without one, the answers are the items of a batch.
        scorer: the score that grades an answer; needed if there are several.
        confidence: "logprob" (the mean token probability), "agreement" (the share of epochs whose answer is that of the
            first), or the name of a score of the Primary.
        group: the field of a sample that names its group, such as metadata.subject.
        **grading: how answers are graded and paired: the fields of `GradingStep`; a grader takes the
            place of the score, and a table of confidences that of the log's.

    Raises:
        ScoreLogError: a log is damaged, unfinished, or of another task.
    """
    unused = Tally()
    logs = [_read_log(path) for path in (primary, guardian) if path is not None]
    if logs[0].task != logs[-1].task:
        raise ScoreLogError(
            f"the tasks differ: {logs[0].task!r} and {logs[-1].task!r}; evaluate both models on one task"
        )
    ungraded = grading.get("grade") is None
    graded, scorer = ungraded and guardian is not None, scorer if ungraded else None
    runs = [
        ModelRun(model=log.model, answers=_answers(log, scorer, confidence, group, unused, graded=graded))
        for log in logs
    ]
    return await import_runs("inspect", runs, GradingStep(graded=graded, **grading), unused=unused)


def inspect_run(path: str | Path, scorer: str | None) -> ModelRun:
    """Return the scored answers of one log by sample."""
    log = _read_log(path)
    return ModelRun(model=log.model, answers=_answers(log, scorer, "logprob", None, Tally(), graded=True))


def _read_log(path: str | Path) -> EvalFile:
    files = files_of(path, (".eval", ".json"))
    if len(files) != 1:
        raise ScoreLogError(f"{path}: {len(files)} logs; name the one to use")
    file = files[0]
    if file.name.endswith(".json"):
        header = next(document for _, document in read_documents([file]))
        samples = [sample for sample in as_list(header.get("samples")) if is_object(sample)]
    else:
        header = next((member for _, member in read_members(file, start="header")), Document())
        samples = [sample for _, sample in read_members(file, start="samples/")]
    spec = as_object(header.get("eval"))
    if header.get("status") != "success":
        raise ScoreLogError(
            f"{file}: the run is not finished (status {header.get('status')!r}), and the samples that are there may be the "
            "easy ones; finish it with `inspect eval-retry`"
        )
    if not samples:
        raise ScoreLogError(f"{file}: there are no samples; was it written with --no-log-samples?")
    return EvalFile(path=file, model=str(spec.get("model")), task=str(spec.get("task")), samples=samples)


def _answers(
    log: EvalFile, scorer: str | None, confidence: str, group: str | None, unused: Tally, *, graded: bool
) -> dict[str, LoggedAnswer]:
    """Return the answers of the first epoch by sample."""
    epochs: dict[str, dict[int, Document]] = {}
    for sample in log.samples:
        runs, epoch = epochs.setdefault(str(sample.get("id")), {}), int(number_of(sample, "epoch") or 1)
        if epoch in runs:
            raise ScoreLogError(
                f"{log.path}: two samples {sample.get('id')!r:.60} of epoch {epoch}; give them ids of their own"
            )
        runs[epoch] = sample
    answers: dict[str, LoggedAnswer] = {}
    for id, runs in epochs.items():
        first, *others = (_resolved(runs[epoch]) for epoch in sorted(runs))
        for _ in others:
            unused.add("epochs after the first, which repeat a question (they may count as agreement)", id)
        text = reply_text(first.get("output")) if first.get("error") is None else None
        tokens = _usage(first, log.model)
        answers[id] = LoggedAnswer(
            id=id,
            messages=conversation(first.get("input")),
            text=text,
            confidence=_confidence(first, others, confidence, scorer),
            grade=_grade(log.path, first, scorer) if graded else None,
            expected=str(first.get("target", "")),
            group=text_of(first, group),
            input_tokens=tokens[0],
            output_tokens=tokens[1],
            cost=tokens[2],
        )
    return answers


def _grade(path: Path, sample: Document, scorer: str | None) -> float | None:
    """Return the score of an answer as a number from 0 to 1; None if it was not scored."""
    scores = as_object(sample.get("scores"))
    if not scores:
        return None
    if scorer is None and len(scores) > 1:
        raise OptionError(f"{path}: the samples have several scores ({', '.join(scores)}); name one with --scorer")
    name = scorer or next(iter(scores))
    if name not in scores:
        raise OptionError(f"{path}: there is no score {name!r}; it has {', '.join(scores)}")
    value: Any = as_object(scores[name]).get("value")
    number = score_value(value)
    if number is None and value is not None and value == value:  # NaN: not scored
        raise ScoreLogError(
            f"{path}: sample {sample.get('id')!r}: the score {name!r} is {value!r:.40}, and a grade is a number from 0 to "
            "1, C, P, I or N; name another with --scorer, or grade the answers with --grade"
        )
    return number


def score_value(value: object) -> float | None:
    """Return a score as inspect_ai's `value_to_float` reads it; None if it is not a number from 0 to 1."""
    if isinstance(value, str):
        value = _LETTERS.get(value, _WORDS.get(value.lower(), value))
    number = as_number(value)
    return number if number is not None and 0 <= number <= 1 else None


def _confidence(first: Document, others: Sequence[Document], how: str, scorer: str | None) -> float | None:
    if how == "logprob":
        return reply_confidence(first.get("output"))
    if how == "agreement":
        texts = [_said(sample, scorer) for sample in (first, *others)]
        return sum(text == texts[0] for text in texts) / len(texts) if others and texts[0] is not None else None
    number = as_number(field_of(first, f"scores.{how}.value", how))
    return None if number is None or number < 0 else number


def _said(sample: Document, scorer: str | None) -> str | None:
    """Return the answer that a scorer extracted, or else the whole completion."""
    scores: Mapping[str, Any] = as_object(sample.get("scores"))
    score = as_object(scores.get(scorer or next(iter(scores), "")))
    answer: object = score.get("answer")
    return str(answer).strip() if answer else reply_text(sample.get("output"))


def _usage(sample: Document, model: str) -> tuple[float | None, float | None, float | None]:
    """Return all input tokens, cached ones included, the output tokens and the cost."""
    usage = as_object(as_object(sample.get("model_usage")).get(model)) or as_object(field_of(sample, "output.usage"))
    names = ("input_tokens", "input_tokens_cache_read", "input_tokens_cache_write")
    parts = [number_of(usage, name) for name in names]
    total = None if parts[0] is None else sum(part or 0.0 for part in parts)
    return total, number_of(usage, "output_tokens"), number_of(usage, "total_cost")


def _resolved(sample: Document) -> Document:
    """Return what is used of a sample, with long texts that stand in its attachments put back."""
    attachments: Mapping[str, Any] = as_object(sample.get("attachments"))
    names = ("input", "output", "scores", "target", "metadata", "error", "id", "model_usage")
    return {name: _with_texts(sample.get(name), attachments) for name in names}


def _with_texts(value: Any, attachments: Mapping[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith(_ATTACHMENT):
        return attachments.get(value.removeprefix(_ATTACHMENT), value)
    if is_object(value):
        return {name: _with_texts(item, attachments) for name, item in value.items()}
    return [_with_texts(item, attachments) for item in value] if is_list(value) else value
