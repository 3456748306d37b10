"""OpenAI batch files: the output files of two batches over the same requests, joined by `custom_id`, in router form."""

from pathlib import Path
from typing import Unpack

from conformal_arbitrage.errors import ScoreLogError
from conformal_arbitrage.importing.files import (
    Document,
    conversation,
    field_of,
    read_documents,
    reply_confidence,
    reply_text,
    tokens_of,
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
from conformal_arbitrage.types import Messages


async def read_openai_batch(
    primary: str | Path,
    guardian: str | Path | None = None,
    *,
    requests: str | Path | None = None,
    **grading: Unpack[GradingKeywords],
) -> Imported:
    """Read the outputs of two batches as a score log.

    Args:
        primary: the Primary's output file, or a folder with its output and error files.
        guardian: the same for the Guardian; without one, the answers are the items of a batch.
        requests: the input file of either batch, for the questions.
        **grading: how answers are graded and paired: the fields of `GradingStep`; ids are custom_ids, and
            without confidences the logprobs of the Primary's replies are used.
    """
    unused = Tally()
    questions = {} if requests is None else _questions(requests)
    runs = [_run(path, questions) for path in (primary, guardian) if path is not None]
    return await import_runs("openai-batch", runs, GradingStep(**grading), unused=unused)


def _questions(path: str | Path) -> dict[str, Messages]:
    return {_custom_id(place, line): conversation(line.get("body")) for place, line in read_documents([path])}


def _run(path: str | Path, questions: dict[str, Messages]) -> ModelRun:
    """Return the answers of one batch; a request with an error has no text."""
    answers: dict[str, LoggedAnswer] = {}
    models: dict[str, None] = {}
    for place, line in read_documents([path]):
        id = _custom_id(place, line)
        if "response" not in line and "error" not in line:
            raise ScoreLogError(f"{place}: no response here; give the output file of the batch, not its input")
        if id in answers:
            raise ScoreLogError(f"{place}: custom_id {id!r:.60} stands there twice; give the files of one batch")
        failed = line.get("error") is not None or field_of(line, "response.status_code") not in (None, 200)
        body = None if failed else field_of(line, "response.body")
        models |= {} if body is None else {str(field_of(body, "model")): None}
        tokens = tokens_of(body)
        answers[id] = LoggedAnswer(
            id=id,
            messages=questions.get(id, ()),
            text=None if body is None else reply_text(body),
            confidence=reply_confidence(body),
            input_tokens=tokens[0],
            output_tokens=tokens[1],
        )
    if len(models) > 1:
        raise ScoreLogError(f"{path}: answers of several models ({', '.join(models)}); give the files of one batch")
    return ModelRun(model=next(iter(models), str(path)), answers=answers)


def _custom_id(place: str, line: Document) -> str:
    if "custom_id" not in line:
        raise ScoreLogError(f"{place}: no custom_id here; is this a file of the Batch API?")
    return str(line["custom_id"])
