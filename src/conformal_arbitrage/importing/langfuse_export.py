"""Langfuse: exported observations and scores, joined by question, in router form.

The files are those of its API (`data`), its blob storage export or its user interface; fields are named in camel case or
with underscores. Grades and confidences may be scores of Langfuse.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.importing.files import (
    Document,
    as_number,
    conversation,
    field_of,
    number_of,
    read_documents,
    reply_confidence,
    reply_text,
    text_of,
)
from conformal_arbitrage.importing.inspect_eval import score_value
from conformal_arbitrage.importing.pairing import (
    GradingKeywords,
    GradingStep,
    Imported,
    LoggedAnswer,
    ModelCall,
    Tally,
    joined,
)

ScoresOf = Mapping[tuple[str, str], float | None]
"""Values by the id of an observation or trace, and the score's name."""


async def read_langfuse(
    files: Sequence[str | Path],
    *,
    primary: str,
    guardian: str | None = None,
    score: str | None = None,
    join: str | None = None,
    confidence: str = "logprob",
    group: str | None = None,
    **grading: Unpack[GradingKeywords],
) -> Imported:
    """Read observations that Langfuse exported, with its scores, as a score log.

    Args:
        files: files or folders with observations and scores.
        primary: the Primary's model, as the observations name it.
        guardian: the Guardian's; without one, the answers are the items of a batch.
        score: the score that grades an answer, in [0, 1]; or else give a grader, `grade=`.
        join: the field that both observations of a question share, such as traceId or metadata.item; without it,
            observations with the same input belong together.
        confidence: a score of the Primary's observation or a field such as metadata.confidence; "logprob" if the output
            is a whole completion with logprobs.
        group: the field that names the group of a question, such as metadata.tenant.
        **grading: how answers are graded and paired: the fields of `GradingStep`.
    """
    if guardian is not None and (score is None) == (grading.get("grade") is None):
        raise OptionError("name either the score that grades the answers, or a grader (--score or --grade)")
    unused = Tally()
    documents = [(place, _camel(document)) for place, document in read_documents(files)]
    scores = _scores(documents)
    if score is not None and not any(name == score for _, name in scores):
        known = ", ".join(sorted({name for _, name in scores})) or "none"
        raise OptionError(f"there is no score {score!r}; the files have {known}")
    step = GradingStep(graded=score is not None, **grading)
    calls = _calls(documents, scores, unused, join=join, score=score, confidence=confidence, group=group)
    return await joined("langfuse", calls, primary, guardian, step, unused)


def _camel(document: Document) -> Document:
    """Return a document with its fields in camel case."""
    return {re.sub(r"_([a-z])", lambda match: match[1].upper(), name): value for name, value in document.items()}


def _is_score(document: Document) -> bool:
    return "type" not in document and "name" in document and ("value" in document or "stringValue" in document)


def _scores(documents: Sequence[tuple[str, Document]]) -> ScoresOf:
    """Return all scores by what they are attached to."""
    scores: dict[tuple[str, str], float | None] = {}
    for _, document in documents:
        if _is_score(document):
            subject = field_of(document, "subject.id", "observationId", "traceId")
            scores[str(subject), str(document["name"])] = score_value(field_of(document, "value", "stringValue"))
    return scores


def _calls(
    documents: Sequence[tuple[str, Document]],
    scores: ScoresOf,
    unused: Tally,
    *,
    join: str | None,
    score: str | None,
    confidence: str,
    group: str | None,
) -> Iterator[ModelCall]:
    for place, document in documents:
        if _is_score(document):
            continue
        model = field_of(document, "model", "providedModelName")
        messages = conversation(document.get("input"))
        if model is None:
            unused.add(f"observations without a model ({document.get('type', 'no type')})", place)
        elif not messages:
            unused.add("observations without an input", place)
        elif join is not None and field_of(document, join) is None:
            unused.add(f"observations without the field {join}", place)
        else:
            grades = _of(scores, document, score) if score is not None else None
            key = None if join is None else str(field_of(document, join))
            answer = _answer(document, grades, _sure(scores, document, confidence), group)
            yield ModelCall(models=(str(model),), key=key, at=str(document.get("startTime")), answer=answer)


def _of(scores: ScoresOf, observation: Document, name: str) -> float | None:
    """Return a score of an observation, or else of its trace."""
    value = scores.get((str(observation.get("id")), name))
    return scores.get((str(observation.get("traceId")), name)) if value is None else value


def _sure(scores: ScoresOf, observation: Document, how: str) -> float | None:
    if how == "logprob":
        return reply_confidence(observation.get("output"))
    value = _of(scores, observation, how)
    return value if value is not None else as_number(field_of(observation, how))


def _answer(document: Document, grade: float | None, confidence: float | None, group: str | None) -> LoggedAnswer:
    output: Any = document.get("output")
    return LoggedAnswer(
        id="",
        messages=conversation(document.get("input")),
        text=None if document.get("level") == "ERROR" else reply_text(output),
        confidence=confidence,
        grade=grade,
        group=text_of(document, group),
        cost=number_of(document, "totalCost", "costDetails.total", "calculatedTotalCost"),
        input_tokens=number_of(document, "usageDetails.input", "inputUsage", "usage.input", "promptTokens"),
        output_tokens=number_of(document, "usageDetails.output", "outputUsage", "usage.output", "completionTokens"),
    )
