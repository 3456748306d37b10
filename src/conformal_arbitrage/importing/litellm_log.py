"""LiteLLM: what its loggers write (the standard logging payload) and its spend logs, joined by question, in router form."""

from collections.abc import Iterator, Sequence
from pathlib import Path

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
    tokens_of,
)
from conformal_arbitrage.importing.pairing import (
    GradingStep,
    Imported,
    LoggedAnswer,
    ModelCall,
    Tally,
    Unpaired,
    joined,
)

_CHAT = ("completion", "acompletion", "responses", "aresponses")
_REDACTED = "redacted-by-litellm"


async def read_litellm(
    files: Sequence[str | Path],
    *,
    primary: str,
    guardian: str | None = None,
    grade: str | None = None,
    join: str | None = None,
    confidence: str = "logprob",
    group: str | None = None,
    expected: str | Path | None = None,
    confidences: str | Path | None = None,
    config: str | Path = "arbitrage.toml",
    max_cost: float | None = None,
    unpaired: Unpaired = "refuse",
) -> Imported:
    """Read LiteLLM's logs of both models as a score log.

    Args:
        files: files or folders: payloads as its S3, GCS or generic loggers write them, or rows of its spend logs.
        primary: the Primary's model, model group or model id.
        guardian: the Guardian's; without one, the answers are the items of a batch.
        grade: how the answers are graded: exact, regex, json-equal, python:MODULE:FUNCTION, judge or human.
        join: the field that both calls about a question share, such as trace_id or metadata.question; without it, calls
            with the same messages belong together.
        confidence: "logprob", or the field of the Primary's call that holds a confidence.
        group: the field that names the group of a question, such as metadata.user_api_key_team_alias.
        expected: a table with `id` and `expected`, for graders that compare.
        confidences: a table with `id` and `confidence`.
        config: the configuration with the judge.
        max_cost: dollars that the judge may cost.
        unpaired: "drop" states that questions of one model only are missing for reasons other than the answers.
    """
    unused = Tally()
    step = GradingStep(grade=grade, expected=expected, confidences=confidences, config=config, max_cost=max_cost)
    calls = _calls(files, unused, join=join, confidence=confidence, group=group)
    return await joined(
        "litellm", calls, [name for name in (primary, guardian) if name is not None], step, unused, unpaired
    )


def _calls(
    files: Sequence[str | Path], unused: Tally, *, join: str | None, confidence: str, group: str | None
) -> Iterator[ModelCall]:
    for place, document in read_documents(files):
        kind = str(document.get("call_type"))
        messages = conversation(_asked(document))
        if kind not in _CHAT:
            unused.add(f"calls of type {kind}", place)
        elif not messages:
            unused.add("calls whose messages were not kept (redacted, or not stored in spend logs)", place)
        elif join is not None and field_of(document, join) is None:
            unused.add(f"calls without the field {join}", place)
        else:
            names = [document.get(name) for name in ("model_group", "model", "model_id")]
            yield ModelCall(
                models=tuple(str(name) for name in names if name),
                key=None if join is None else str(field_of(document, join)),
                at=f"{number_of(document, 'startTime') or 0:020.6f} {document.get('startTime')}",
                answer=_answer(document, confidence, group),
            )


def _asked(document: Document) -> object:
    """Return the messages; spend logs keep them in the request that the proxy received."""
    names = ("messages", "proxy_server_request.body", "proxy_server_request")
    for name in names:
        value: object = field_of(document, name)
        if value and _REDACTED not in str(value):
            return value
    return None


def _answer(document: Document, confidence: str, group: str | None) -> LoggedAnswer:
    reply: object = document.get("response")
    failed = document.get("status") == "failure" or _REDACTED in str(reply)[:200]
    tokens = tokens_of(reply)
    sure = reply_confidence(reply) if confidence == "logprob" else as_number(field_of(document, confidence))
    return LoggedAnswer(
        id="",
        messages=conversation(_asked(document)),
        text=None if failed else reply_text(reply),
        confidence=sure,
        group=text_of(document, group),
        cost=number_of(document, "response_cost", "spend"),
        input_tokens=number_of(document, "prompt_tokens") or tokens[0],
        output_tokens=number_of(document, "completion_tokens") or tokens[1],
    )
