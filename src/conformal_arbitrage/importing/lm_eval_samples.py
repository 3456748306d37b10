"""lm-evaluation-harness: the per-sample files of two runs (`--log_samples`), joined by task and document.

Multiple-choice tasks hold a log-likelihood per option; each model's scores are their softmax, and the log is one of menus.
Tasks that generate text give two answers with grades, in router form.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.importing.files import Document, as_number, files_of, read_documents
from conformal_arbitrage.importing.pairing import (
    GradingKeywords,
    GradingStep,
    Imported,
    LoggedAnswer,
    MenuRow,
    ModelRun,
    Tally,
    import_runs,
    menu_answers,
    menu_log,
)
from conformal_arbitrage.types import as_list, as_object

_NAME = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One document of one run.

    Attributes:
        place: the file and line, for messages.
    """

    task: str
    document: Document
    place: str

    @property
    def id(self) -> str:
        """The task and the number of the document in it."""
        return f"{self.task}/{self.document.get('doc_id')}"

    @property
    def likelihoods(self) -> list[float] | None:
        """The log-likelihood of each option; None if the task generates text."""
        pairs = [as_list(answer) for answer in as_list(self.document.get("filtered_resps"))]
        if not pairs or not all(len(pair) == 2 and str(pair[1]) in ("True", "False") for pair in pairs):
            return None
        return [_likelihood(pair[0]) for pair in pairs][: len(self.arguments)]

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """The context and continuation of each option, without the unconditional ones that mutual information adds."""
        arguments = as_object(self.document.get("arguments"))
        requests = [
            as_object(request) for _, request in sorted(arguments.items(), key=lambda item: _number_in(item[0]))
        ]
        pairs = [(str(request.get("arg_0", "")), str(request.get("arg_1", ""))) for request in requests]
        half = len(pairs) // 2
        if half > 1 and not any(context for context, _ in pairs[half:]) and all(context for context, _ in pairs[:half]):
            return pairs[:half]
        return pairs


async def read_lm_eval(
    primary: str | Path,
    guardian: str | Path | None = None,
    *,
    tasks: Sequence[str] = (),
    metric: str | None = None,
    filter: str | None = None,
    length_normalized: bool = False,
    **grading: Unpack[GradingKeywords],
) -> Imported:
    """Read two runs of lm-evaluation-harness as a score log.

    Args:
        primary: the samples file of the Primary's run, or a folder with several; of several runs of a task, the newest.
        guardian: the same for the Guardian; without one, the answers are the items of a batch.
        tasks: use these tasks only.
        metric: for generated text, the metric that grades an answer; needed if there are several.
        filter: for generated text, lm-eval's filter; needed if there are several.
        length_normalized: divide log-likelihoods by the characters of their option, as acc_norm does.
        **grading: how answers are graded and paired: the fields of `GradingStep`; a grader of generated text
            takes the metric's place, and a table of confidences serves where there are no repeats.

    Raises:
        ScoreLogError: a file is malformed, or the runs are of different documents.
    """
    unused = Tally()
    paths = [path for path in (primary, guardian) if path is not None]
    samples = [_samples(path, tasks, filter, unused) for path in paths]
    names = [_model_name(path) for path in paths]
    menus = {sample.likelihoods is not None for run in samples for sample in run.values()}
    if len(menus) > 1:
        raise ScoreLogError(
            f"{primary}: some tasks have options and others generate text, which need logs of their own; name some with "
            "--task"
        )
    _refuse_other_documents(samples[0], samples[-1])
    step = GradingStep(graded=grading.get("grade") is None and guardian is not None, **grading)
    if menus == {True}:
        rows = [{id: _menu_row(sample, normalized=length_normalized) for id, sample in run.items()} for run in samples]
        if guardian is None:
            first = ModelRun(model=names[0], answers=menu_answers(rows[0]))
            return await import_runs("lm-eval", [first], step, unused=unused)
        log, notes = menu_log(
            *rows, unpaired=step.unpaired, unused=unused, metric="acc_norm" if length_normalized else "acc"
        )
        return Imported(log=log, source="lm-eval", models=tuple(names), unused=unused, notes=notes)
    runs = [
        ModelRun(model=name, answers={id: _answer(sample, metric, graded=step.graded) for id, sample in run.items()})
        for name, run in zip(names, samples, strict=True)
    ]
    return await import_runs("lm-eval", runs, step, unused=unused)


def lm_eval_run(path: str | Path, grade: str | None) -> ModelRun:
    """Return the grades of one run by document.

    Args:
        grade: METRIC or METRIC,FILTER; by default acc where there are options, else as `read_lm_eval` chooses.
    """
    metric, _, filter = (grade or "").partition(",")
    answers: dict[str, LoggedAnswer] = {}
    for sample in _samples(path, (), filter or None, Tally()).values():
        name = metric or ("acc" if sample.likelihoods is not None else None)
        id = f"{sample.id} {str(sample.document.get('doc_hash'))[:8]}"  # which pairs equal documents only
        answers[id] = LoggedAnswer(id=id, grade=_metric(sample, name), group=sample.task)
    return ModelRun(model=_model_name(path), answers=answers)


def _samples(path: str | Path, tasks: Sequence[str], filter: str | None, unused: Tally) -> dict[str, Sample]:
    """Return the samples of a run by id."""
    samples: dict[str, Sample] = {}
    for task, file in _newest(path, tasks, unused):
        filters = dict.fromkeys(str(sample.document.get("filter", "none")) for sample in _read(task, file))
        if filter is None and len(filters) > 1:
            raise OptionError(
                f"{file}: the answers went through several filters ({', '.join(filters)}); name one: --filter, or in "
                "`arbitrage swap` --grade METRIC,FILTER"
            )
        for sample in _read(task, file):
            if filter is not None and sample.document.get("filter", "none") != filter:
                unused.add(f"samples of another filter than {filter}", sample.id)
            elif sample.id in samples:
                raise ScoreLogError(f"{sample.place}: {sample.id} stands there twice; give the file of one run")
            else:
                samples[sample.id] = sample
    if not samples:
        raise ScoreLogError(f"{path}: there are no samples; run lm-eval with --log_samples and --output_path")
    return samples


def _newest(path: str | Path, tasks: Sequence[str], unused: Tally) -> Iterator[tuple[str, Path]]:
    """Yield the newest file of each task."""
    newest: dict[str, Path] = {}
    for file in files_of(path, (".jsonl",), name="samples_"):  # sorted, and the dates in their names are too
        match = _NAME.fullmatch(file.name)
        task = match["task"] if match else file.stem
        if tasks and task not in tasks:
            unused.add("files of other tasks", str(file))
            continue
        if task in newest:
            unused.add("files of earlier runs", str(newest[task]))
        newest[task] = file
    yield from newest.items()


def _read(task: str, file: Path) -> Iterator[Sample]:
    for place, document in read_documents([file]):
        if "doc_id" not in document or "filtered_resps" not in document:
            raise ScoreLogError(f"{place}: no doc_id and filtered_resps here; is this a samples file of lm-eval?")
        yield Sample(task=task, document=document, place=place)


def _refuse_other_documents(ours: Mapping[str, Sample], theirs: Mapping[str, Sample]) -> None:
    for id in ours.keys() & theirs.keys():
        hashes = {str(run[id].document.get("doc_hash")) for run in (ours, theirs)}
        if len(hashes) > 1:
            raise ScoreLogError(
                f"{ours[id].place}: {id} is another document in {theirs[id].place} (doc_hash); run both on the same data"
            )


def _menu_row(sample: Sample, *, normalized: bool) -> MenuRow:
    options = [continuation.lstrip(" ") for _, continuation in sample.arguments]
    if len(set(options)) < len(options):  # tasks that put the options into the context
        options = [context for context, _ in sample.arguments]
    values = sample.likelihoods or []
    if len(values) != len(options):
        raise ScoreLogError(
            f"{sample.place}: {len(values)} log-likelihoods for {len(options)} options; is the file complete?"
        )
    scores = [value / max(len(text), 1) for value, text in zip(values, options, strict=True)] if normalized else values
    right = as_number(sample.document.get("acc_norm" if normalized else "acc"))
    context = sample.arguments[0][0] if sample.arguments else ""
    target = str(sample.document.get("target", ""))
    return MenuRow(
        id=sample.id, group=sample.task, context=context, options=options, likelihoods=scores, target=target, right=right,
        place=sample.place,
    )  # fmt: skip


def _answer(sample: Sample, metric: str | None, *, graded: bool) -> LoggedAnswer:
    first = next(iter(as_list(sample.document.get("filtered_resps"))), None)
    tries = as_list(first) or as_list(next(iter(as_list(sample.document.get("resps"))), None))
    text = str(tries[0] if as_list(first) else first)
    sure = sum(str(answer) == str(tries[0]) for answer in tries) / len(tries) if len(tries) > 1 else None
    return LoggedAnswer(
        id=sample.id,
        messages=[{"role": "user", "content": sample.arguments[0][0] if sample.arguments else ""}],
        text=text,
        confidence=sure,
        grade=_metric(sample, metric) if graded else None,
        expected=str(sample.document.get("target", "")),
        group=sample.task,
    )


def _metric(sample: Sample, name: str | None) -> float | None:
    """Return the value of the metric that grades the answer."""
    known = [str(metric) for metric in as_list(sample.document.get("metrics"))]
    values = {metric: as_number(sample.document.get(metric)) for metric in known}
    usable = {metric: value for metric, value in values.items() if value is not None and 0 <= value <= 1}
    wanted = name or (
        "exact_match" if "exact_match" in usable else next(iter(usable), None) if len(usable) == 1 else None
    )
    if wanted not in values:
        raise OptionError(
            f"{sample.place}: which metric grades the answer? It has {', '.join(values) or 'none'}; name one from 0 to 1 "
            "with --metric, or grade the answers with --grade"
        )
    value = values[wanted]
    if value is not None and not 0 <= value <= 1:
        raise ScoreLogError(f"{sample.place}: {wanted} is {value:g}, and a grade is from 0 to 1; name another --metric")
    return value


def _model_name(path: str | Path) -> str:
    """Return the model's name: that of the folder lm-eval wrote to."""
    place = Path(path)
    return place.name if place.is_dir() else place.parent.name or place.name


def _likelihood(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _number_in(name: str) -> int:
    return int("".join(filter(str.isdecimal, name)) or 0)
