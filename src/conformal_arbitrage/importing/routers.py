"""LiteLLM and the vLLM Semantic Router: their logs, joined by question, in router form, and certificates as their settings.

LiteLLM's logs are what its loggers write (the standard logging payload) and its spend logs; vLLM's are replay records.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from sys import float_info
from typing import Any, Unpack

import numpy as np

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.promises import Threshold
from conformal_arbitrage.errors import CertificateError, ScoreLogError
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
    unfolded,
)
from conformal_arbitrage.importing.pairing import (
    GradingKeywords,
    GradingStep,
    Imported,
    LoggedAnswer,
    ModelCall,
    Tally,
    joined,
)
from conformal_arbitrage.types import as_object

_CHAT = ("completion", "acompletion", "responses", "aresponses")
_REDACTED = "redacted-by-litellm"


async def read_litellm(
    files: Sequence[str | Path],
    *,
    primary: str,
    guardian: str | None = None,
    join: str | None = None,
    confidence: str = "logprob",
    group: str | None = None,
    **grading: Unpack[GradingKeywords],
) -> Imported:
    """Read LiteLLM's logs of both models as a score log.

    Args:
        files: files or folders: payloads as its S3, GCS or generic loggers write them, or rows of its spend logs.
        primary: the Primary's model, model group or model id.
        guardian: the Guardian's; without one, the answers are the items of a batch.
        join: the field that both calls about a question share, such as trace_id or metadata.question; without it, calls
            with the same messages belong together.
        confidence: "logprob"; or "forecast", 1 minus the difference of the capable and the efficient model's forecasts
            (classifier type llm_v2), whichever call has them; or the field of the Primary's call that holds a confidence.
        group: the field that names the group of a question, such as metadata.user_api_key_team_alias.
        **grading: how answers are graded and paired: the fields of `GradingStep`.
    """
    unused, step = Tally(), GradingStep(**grading)
    calls = _calls(files, unused, join=join, confidence=confidence, group=group)
    if confidence != "forecast":
        return await joined("litellm", calls, primary, guardian, step, unused)
    imported = await joined("litellm", _by_question(calls), primary, guardian, step, unused)
    return _from_forecasts(imported, {"kind": LITELLM, **_only_version(files)})


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
    if confidence == "forecast":
        sure = _forecast(document)
    else:
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


def _forecast(document: Document) -> float | None:
    """Return 1 - (p_capable - p_efficient), of the probabilities that LiteLLM compares; None without a forecast."""
    decision: Document = as_object(field_of(document, "metadata.routing_decision"))
    capable, efficient = (
        number_of(decision, f"classifier_calibrated_{model}_p_solve", f"classifier_{model}_p_solve")
        for model in ("capable", "efficient")
    )
    return None if capable is None or efficient is None else _SPAN[LITELLM] - (capable - efficient)


def _only_version(files: Sequence[str | Path]) -> dict[str, Any]:
    """Return what made the forecasts of these files.

    Raises:
        ScoreLogError: there are none, or several classifiers, prompts or calibrations made them.
    """
    names = ("classifier_model", "classifier_prompt_version", "classifier_calibration_version")
    decisions = [as_object(field_of(document, "metadata.routing_decision")) for _, document in read_documents(files)]
    versions = {tuple(made.get(name) for name in names) for made in decisions if "classifier_capable_p_solve" in made}
    if len(versions) != 1:
        raise ScoreLogError(
            f"the files have forecasts of {len(versions)} classifiers ({', '.join(map(str, sorted(versions, key=str)))}), "
            "and a setting is for one: route with classifier_type llm_v2, and import calls of one classifier, prompt and "
            "calibration"
        )
    return dict(zip(("classifier", "prompt", "calibration"), versions.pop(), strict=True))


# --- The vLLM Semantic Router ---


async def read_vllm_sr(
    files: Sequence[str | Path],
    *,
    primary: str,
    guardian: str,
    signal: str,
    join: str | None = None,
    group: str | None = None,
    **grading: Unpack[GradingKeywords],
) -> Imported:
    """Read replay records of the vLLM Semantic Router, with answers of both models, as a score log.

    The confidence is 2 minus the margin of a complexity signal, rounded up to single precision. The router keeps its
    threshold in that precision, so the margin lies above it exactly if the rounded one does.

    Args:
        files: files or folders of records, as its replay API gives them.
        primary: the model for easy questions, as records name it (`selected_model`).
        guardian: the model for hard ones.
        signal: the name of the complexity signal.
        join, group, **grading: as in `read_litellm`.
    """
    unused, margin = Tally(), f"complexity:{signal}:margin"
    calls: list[ModelCall] = []
    for place, record in read_documents(files):
        body, reply = unfolded(record.get("request_body")), unfolded(record.get("response_body"))
        messages = conversation(body)
        values: Mapping[str, Any] = as_object(record.get("signal_values"))
        if not messages or record.get("request_body_truncated"):
            unused.add("records whose request was not kept in full", place)
        elif join is not None and field_of(record, join) is None:
            unused.add(f"records without the field {join}", place)
        else:
            failed = int(record.get("response_status") or 200) >= 400 or record.get("response_body_truncated")
            tokens = tokens_of(reply)
            answer = LoggedAnswer(
                id="",
                messages=messages,
                text=None if failed else reply_text(reply),
                confidence=_single_up(as_number(values.get(margin))),
                group=text_of(record, group),
                cost=number_of(record, "actual_cost"),
                input_tokens=tokens[0],
                output_tokens=tokens[1],
            )
            key = None if join is None else str(field_of(record, join))
            models = (str(record.get("selected_model")),)
            calls.append(ModelCall(models=models, key=key, at=str(record.get("timestamp")), answer=answer))
    imported = await joined("vllm-sr", _by_question(calls), primary, guardian, GradingStep(**grading), unused)
    return _from_forecasts(imported, {"kind": VLLM_SR, "signal": signal})


def _single_up(margin: float | None) -> float | None:
    """Return 2 minus the smallest number of single precision that is not below a margin."""
    if margin is None or not -_SPAN[VLLM_SR] <= margin <= _SPAN[VLLM_SR]:
        return None
    single = np.float32(margin)
    return _SPAN[VLLM_SR] - float(single if single >= margin else np.nextafter(single, np.float32(np.inf)))


# --- Forecasts as confidences, and certificates as settings ---


LITELLM, VLLM_SR = "litellm forecast", "vllm-sr signal"
_SPAN = {LITELLM: 1.0, VLLM_SR: 2.0}
"""The confidence is this minus what the router compares with its threshold, which lies within as much of 0."""


def _by_question(calls: Iterable[ModelCall]) -> list[ModelCall]:
    """Return the calls with the first forecast of their question: it came with the routed call, whichever model that was."""
    ordered = sorted(calls, key=lambda call: call.at)
    first: dict[str, float] = {}
    for call in ordered:
        if call.answer.confidence is not None:
            first.setdefault(call.question, call.answer.confidence)
    return [replace(call, answer=replace(call.answer, confidence=first.get(call.question))) for call in ordered]


def _from_forecasts(imported: Imported, router: Mapping[str, Any]) -> Imported:
    """Return a log whose certificate says which router's forecasts it rests on."""
    named = zip(imported.log.columns, imported.models, strict=False)
    identities = {role: {**router, "model": model} for role, model in named}
    return replace(imported, log=replace(imported.log, identities=identities))


@dataclass(frozen=True, slots=True)
class RouterSetting:
    """A certificate as the setting of another router.

    Attributes:
        router: "litellm forecast" or "vllm-sr signal".
        value: `max_quality_gap`, or the threshold of the complexity signal.
        document: the setting where it stands in the router's configuration.
    """

    router: str
    value: float
    document: Mapping[str, Any]


def router_setting(certificate: Certificate) -> RouterSetting:
    """Return the setting with which a router decides exactly as a certificate says, at every value that it can compare.

    LiteLLM keeps the efficient model if p_capable - p_efficient <= max_quality_gap + 2^-52, in double precision. The vLLM
    Semantic Router calls a question hard if its margin lies above the threshold, which has single precision.

    Raises:
        CertificateError: it was not made from a router's forecasts, or its rule is no threshold of that router.
    """
    identities = certificate.identities if isinstance(certificate.identities, dict) else {}
    source: Mapping[str, Any] = identities.get("primary", {})
    router = source.get("kind")
    if router not in _SPAN:
        raise CertificateError(
            "this certificate was not made from forecasts of LiteLLM or the vLLM Semantic Router, so neither has a knob for "
            "it; see `arbitrage import litellm --confidence forecast` and `arbitrage import vllm-sr`"
        )
    if not isinstance(certificate.rule, Threshold) or certificate.rule.boundary != "include":
        raise CertificateError(
            "a router's setting is one threshold without draws; calibrate with --boundary include, and without --by, "
            "--score or --path"
        )
    span, steps = _SPAN[router], np.float32 if router == VLLM_SR else np.float64
    last = _last_cheap(certificate, span, steps)
    value = last if router == VLLM_SR or last is None else min(last - float_info.epsilon, 1.0)
    if value is None or (router == LITELLM and value < 0):
        raise CertificateError(
            "this certificate asks the Guardian more often than any setting of the router; use the capable model for all"
        )
    if router == VLLM_SR:
        document = {"routing": {"signals": {"complexity": [{"name": source["signal"], "threshold": value}]}}}
    else:
        document = {"complexity_router_config": {"llm_v2_config": {"max_quality_gap": value}}}
    return RouterSetting(router, value, document)


def _last_cheap(certificate: Certificate, span: float, steps: type[np.floating[Any]]) -> float | None:
    """Return the largest number of a precision at which the Primary's answer stands; None if there is none.

    The confidence falls as the number grows, and rounding keeps the order, so that bisection finds it.
    """

    def is_cheap(difference: float) -> bool:
        return not certificate.decide([0.0, span - difference]).deferred

    if not is_cheap(-span):
        return None
    cheap, dear = steps(-span), steps(span)
    if is_cheap(float(dear)):
        return span
    while (middle := (cheap + dear) / steps(2)) not in (cheap, dear):
        cheap, dear = (middle, dear) if is_cheap(float(middle)) else (cheap, middle)
    return float(f"{cheap!s}") if steps is np.float32 else float(cheap)
