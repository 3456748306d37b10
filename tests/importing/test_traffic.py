"""Exports of LiteLLM and Langfuse, with calls of several models."""

import asyncio
import csv
import json

import pytest

from conformal_arbitrage import OptionError, ScoreLogError
from conformal_arbitrage.importing import read_langfuse, read_litellm
from tests.importing.files import completion, write_lines


def ask(question):
    return [{"role": "user", "content": question}]


def payload(model, question, text, *probabilities, **more):
    """LiteLLM's standard logging payload, as far as it matters."""
    return {
        "id": "x",
        "call_type": "acompletion",
        "status": "success",
        "model": f"openai/{model}",
        "model_group": model,
        "startTime": 1.0,
        "response_cost": 0.25,
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "messages": ask(question),
        "response": completion(text, *probabilities, model=model),
        "metadata": {"item": question, "sure": 0.6, "team": "a"},
    } | more


def spend(model, question, text, *probabilities, **more):
    """A row of LiteLLM's spend logs, whose documents are texts."""
    return {
        "request_id": "x",
        "call_type": "acompletion",
        "model": model,
        "spend": 0.5,
        "startTime": "2026-11-16T00:00:00",
        "messages": "{}",
        "proxy_server_request": json.dumps({"model": model, "messages": ask(question)}),
        "response": json.dumps(completion(text, *probabilities, model=model)),
    } | more


def litellm(files, **options):
    usual = {"primary": "small", "guardian": "large", "grade": "python:graders:length"}
    return asyncio.run(read_litellm(files, **usual | options))


@pytest.fixture(autouse=True)
def graders(tmp_path, monkeypatch):
    """A grader that finds short answers right."""
    (tmp_path / "graders.py").write_text("def length(request, answer, expected):\n    return len(answer) == 1\n")
    monkeypatch.chdir(tmp_path)


def test_calls_with_the_same_messages_belong_together(tmp_path):
    lines = [payload("small", "2+2?", "4", 0.9), payload("large", "2+2?", "4"), payload("large", "3+3?", "6")]
    lines += [
        payload("small", "3+3?", "66", 0.5),
        payload("tiny", "3+3?", "6"),
        payload("small", "", "", call_type="aembedding"),
    ]
    imported = litellm([write_lines(tmp_path / "log.jsonl", lines)])
    log = imported.log
    assert log.context.tolist() == ["2+2?", "3+3?"]
    assert log.primary[1::2].tolist() == pytest.approx([0.9, 0.5])
    assert log.outcome("correct").tolist() == [1, 1, 1, 0]
    assert log.primary_usage.cost.tolist() == [0.25, 0.25]
    assert imported.unused.counts == {"calls of type aembedding": 1, "calls of other models": 1}


def test_a_folder_of_single_payloads_and_spend_logs_are_read(tmp_path):
    (tmp_path / "day").mkdir()
    for k, one in enumerate([payload("small", "2+2?", "4", 0.9), spend("large", "2+2?", "4")]):
        (tmp_path / "day" / f"{k}.json").write_text(json.dumps(one))
    log = litellm([tmp_path / "day"]).log
    assert len(log) == 1
    assert log.guardian_usage.cost.tolist() == [0.5]


def test_a_field_may_join_calls_and_hold_the_confidence_and_the_group(tmp_path):
    lines = [payload("small", "2+2?", "4"), payload("large", "Answer: 2+2?", "4", metadata={"item": "2+2?"})]
    lines.append(payload("large", "3+3?", "6", metadata={}))
    options = {"join": "metadata.item", "confidence": "metadata.sure", "group": "metadata.team"}
    imported = litellm([write_lines(tmp_path / "log.jsonl", lines)], **options)
    assert imported.log.id.tolist() == ["2+2?"]
    assert imported.log.primary.tolist() == [0, 0.6]
    assert imported.log.group.tolist() == ["a"]
    assert imported.unused.counts == {"calls without the field metadata.item": 1}


def test_the_first_answer_counts_and_a_failure_only_without_a_retry(tmp_path):
    failed = payload("small", "2+2?", "", status="failure", response=None)
    lines = [
        failed,
        payload("small", "2+2?", "4", 0.9, startTime=2.0),
        payload("small", "2+2?", "55", 0.1, startTime=3.0),
    ]
    lines += [payload("large", "2+2?", "4"), payload("small", "3+3?", "", status="failure", response=None)]
    lines += [payload("large", "3+3?", "6")]
    imported = litellm([write_lines(tmp_path / "log.jsonl", lines)])
    assert imported.log.primary.tolist() == [0, pytest.approx(0.9), 0, 0]
    assert imported.log.no_opinion.tolist() == [False, True]
    assert list(imported.unused.counts.values()) == [1]


def test_redacted_calls_are_named(tmp_path):
    hidden = payload("small", "", "", messages=ask("redacted-by-litellm"), response={"text": "redacted-by-litellm"})
    lines = [hidden, payload("small", "2+2?", "4", 0.9), payload("large", "2+2?", "4")]
    imported = litellm([write_lines(tmp_path / "log.jsonl", lines)])
    assert "not kept" in next(iter(imported.unused.counts))


def test_an_unknown_model_is_answered_with_those_there_are(tmp_path):
    path = write_lines(tmp_path / "log.jsonl", [payload("small", "2+2?", "4", 0.9)])
    with pytest.raises(OptionError, match="no call of 'large'; the files have calls of openai/small, small"):
        litellm([path])


def test_questions_of_one_model_are_refused(tmp_path):
    lines = [payload("small", "2+2?", "4", 0.9), payload("large", "2+2?", "4"), payload("large", "3+3?", "4")]
    path = write_lines(tmp_path / "log.jsonl", lines)
    with pytest.raises(ScoreLogError, match="--unpaired drop"):
        litellm([path])
    assert len(litellm([path], unpaired="drop").log) == 1


def observation(id, model, question, text, **more):
    """An observation as Langfuse's API returns it."""
    return {
        "id": id,
        "traceId": f"t{id}",
        "type": "GENERATION",
        "startTime": "2026-11-16T00:00:00Z",
        "model": model,
        "input": ask(question),
        "output": {"role": "assistant", "content": text},
        "metadata": {"confidence": 0.8, "tenant": "x"},
        "usageDetails": {"input": 10, "output": 2},
        "costDetails": {"total": 0.125},
        "level": "DEFAULT",
    } | more


def score(observation_id, value, name="quality"):
    return {
        "id": "s",
        "name": name,
        "value": value,
        "dataType": "NUMERIC",
        "subject": {"kind": "observation", "id": observation_id},
    }


def langfuse(files, **options):
    usual = {"primary": "small", "guardian": "large", "confidence": "metadata.confidence"}
    return asyncio.run(read_langfuse(files, **usual | options))


def test_scores_of_langfuse_grade_the_observations(tmp_path):
    (tmp_path / "observations.json").write_text(
        json.dumps(
            {"data": [observation("a", "small", "2+2?", "5"), observation("b", "large", "2+2?", "4")], "meta": {}}
        )
    )
    write_lines(tmp_path / "scores.jsonl", [score("a", 0.25), score("b", 1)])
    imported = langfuse(
        [tmp_path / "observations.json", tmp_path / "scores.jsonl"], score="quality", group="metadata.tenant"
    )
    log = imported.log
    assert log.outcome("correct").tolist() == [1, 0.25]
    assert log.primary.tolist() == [0, 0.8]
    assert log.group.tolist() == ["x"]
    assert log.primary_usage.cost.tolist() == [0.125]
    assert log.primary_usage.input_tokens.tolist() == [10]


def test_scores_may_hang_on_the_trace_and_be_the_confidence(tmp_path):
    rows = [
        observation("a", "small", "2+2?", "5"),
        observation("b", "large", "2+2?", "4"),
        {"id": "span", "type": "SPAN", "input": "x"},
    ]
    rows += [
        {"name": "quality", "stringValue": "yes", "traceId": "ta"},
        {"name": "quality", "value": 1, "traceId": "tb"},
    ]
    rows += [{"name": "sure", "value": 0.4, "observationId": "a"}, observation("c", "small", "", "5", input=None)]
    imported = langfuse([write_lines(tmp_path / "all.jsonl", rows)], score="quality", confidence="sure")
    assert imported.log.primary.tolist() == [0, 0.4]
    assert imported.log.outcome("correct").tolist() == [1, 1]
    assert imported.unused.counts == {"observations without a model (SPAN)": 1, "observations without an input": 1}


def test_a_csv_export_with_underscores_is_read_and_graded(tmp_path):
    path = tmp_path / "export.csv"
    with path.open("w", newline="") as stream:
        names = [
            "id",
            "trace_id",
            "type",
            "start_time",
            "provided_model_name",
            "input",
            "output",
            "metadata",
            "total_cost",
        ]
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        for k, model in enumerate(("small", "large")):
            writer.writerow(
                {"id": k, "trace_id": "t", "type": "GENERATION", "start_time": "2026", "provided_model_name": model,
                 "input": json.dumps({"messages": ask("2+2?")}), "output": "4", "metadata": '{"confidence": 0.5}',
                 "total_cost": "0.5"}
            )  # fmt: skip
    log = langfuse([path], grade="python:graders:length", join="traceId").log
    assert log.id.tolist() == ["t"]
    assert log.primary.tolist() == [0, 0.5]
    assert log.guardian_usage.cost.tolist() == [0.5]


def test_a_failed_generation_stays_a_row(tmp_path):
    rows = [observation("a", "small", "2+2?", "", level="ERROR"), observation("b", "large", "2+2?", "4")]
    rows += [observation("c", "small", "3+3?", "6"), observation("d", "large", "3+3?", "6")]
    log = langfuse([write_lines(tmp_path / "all.jsonl", rows)], grade="python:graders:length").log
    assert log.no_opinion.tolist() == [True, False]


def test_an_output_with_logprobs_has_a_confidence(tmp_path):
    rows = [observation("a", "small", "2+2?", "", output=completion("4", 0.9)), observation("b", "large", "2+2?", "4")]
    path = write_lines(tmp_path / "all.jsonl", rows)
    log = langfuse([path], grade="python:graders:length", confidence="logprob").log
    assert log.primary.tolist() == [0, pytest.approx(0.9)]


def test_what_grades_must_be_named_and_exist(tmp_path):
    path = write_lines(tmp_path / "all.jsonl", [observation("a", "small", "2+2?", "5"), score("a", 1)])
    with pytest.raises(OptionError, match="either the score that grades"):
        langfuse([path])
    with pytest.raises(OptionError, match="there is no score 'help'; the files have quality"):
        langfuse([path], score="help")
    rows = [observation("a", "small", "2+2?", "5"), observation("b", "large", "2?", "5")]
    path = write_lines(tmp_path / "all.jsonl", rows)
    with pytest.raises(OptionError, match="no call of 'small'"):
        langfuse([path], grade="exact", join="metadata.item")
