"""Logs of inspect_ai, files of the Batch API, and what they share."""

import asyncio
import gzip
import json
import math

import pytest

from conformal_arbitrage import OptionError, ScoreLogError
from conformal_arbitrage.importing import read_inspect, read_openai_batch
from tests.importing.files import batch_line, completion, inspect_sample, write_eval, write_lines


def read_logs(*paths, **options):
    return asyncio.run(read_inspect(*paths, **options))


def read_batches(*paths, **options):
    return asyncio.run(read_openai_batch(*paths, **{"grade": "exact"} | options))


@pytest.fixture
def logs(tmp_path):
    def write(primary, guardian, **more):
        small = write_eval(tmp_path / "small.eval", primary, model="m", **more)
        return small, write_eval(tmp_path / "large.eval", guardian, model="big")

    return write


def test_scores_of_an_inspect_log_are_grades_and_logprobs_a_confidence(logs):
    small = [inspect_sample(1, "4", "C", 0.9, 0.4), inspect_sample(2, "5", "I", 0.5), inspect_sample(3, "4?", "P", 1.0)]
    imported = read_logs(*logs(small, [inspect_sample(k, "4", "C") for k in (1, 2, 3)]))
    log = imported.log
    assert log.primary[1::2].tolist() == pytest.approx([math.sqrt(0.36), 0.5, 1.0])
    assert log.outcome("correct").tolist() == [1, 1, 1, 0, 1, 0.5]
    assert log.context.tolist() == ["Q1", "Q2", "Q3"]
    assert log.primary_usage.input_tokens.tolist() == [10, 10, 10]
    assert imported.models == ("m", "big")
    assert imported.notes == ()


def test_an_inspect_log_in_json_is_read_too(tmp_path, logs):
    log = {"status": "success", "eval": {"model": "m", "task": "sums"}, "samples": [inspect_sample(1, "4", "C", 0.9)]}
    (tmp_path / "small.json").write_text(json.dumps(log))
    _, large = logs([], [inspect_sample(1, "4", "C")])
    assert len(read_logs(tmp_path / "small.json", large).log) == 1


def test_epochs_after_the_first_are_agreement_not_rows(logs):
    small = [inspect_sample(1, text, "C", epoch=k + 1) for k, text in enumerate(["4", "4", "5", "4"])]
    imported = read_logs(*logs(small, [inspect_sample(1, "4", "C")]), confidence="agreement")
    assert imported.log.primary.tolist() == [0, 0.75]
    assert list(imported.unused.counts.values()) == [3]


def test_a_score_may_be_the_confidence_and_metadata_the_group(logs):
    scores = {"match": {"value": 1, "answer": "4"}, "sure": {"value": 0.7}}
    small = [inspect_sample(1, "4", "C", scores=scores, metadata={"subject": 0})]
    log = read_logs(*logs(small, [inspect_sample(1, "4", "C", scores=scores)]), confidence="sure", scorer="match",
                    group="metadata.subject").log  # fmt: skip
    assert log.primary.tolist() == [0, 0.7]
    assert log.group.tolist() == ["0"]


def test_long_texts_in_attachments_are_put_back(logs):
    small = inspect_sample(1, "attachment://abc", "C", 0.9, input=[{"role": "user", "content": "attachment://def"}])
    small["attachments"] = {"abc": "a long answer", "def": "a long question"}
    log = read_logs(*logs([small], [inspect_sample(1, "4", "C")])).log
    assert log.extra["primary_answer"].tolist() == ["a long answer"]
    assert log.context.tolist() == ["a long question"]


def test_failed_samples_stay_rows(logs):
    small = [inspect_sample(1, "", None, error={"message": "boom"}, scores=None), inspect_sample(2, "4", "C", 0.9)]
    large = [inspect_sample(1, "4", "C"), inspect_sample(2, "", None, error={"message": "boom"}, scores=None)]
    imported = read_logs(*logs(small, large))
    assert imported.log.no_opinion.tolist() == [True, False]
    assert imported.log.missing.tolist() == [False, True]
    assert len(imported.notes) == 2


def test_rows_of_neither_model_are_left_out_and_named(logs):
    failed = {"error": {"message": "boom"}, "scores": None}
    small = [inspect_sample(1, "", None, **failed), inspect_sample(2, "4", "C", 0.9), inspect_sample(3, "4", None)]
    large = [inspect_sample(1, "", None, **failed), inspect_sample(2, "4", "C"), inspect_sample(3, "4", "C")]
    imported = read_logs(*logs(small, large))
    assert imported.log.id.tolist() == ["2"]
    assert imported.unused.to_list()[0]["examples"] == ["1", "3"]


def test_an_unscored_answer_is_a_missing_grade(logs):
    small = [inspect_sample(1, "4", math.nan, 0.9), inspect_sample(2, "4", "C", 0.9)]
    log = read_logs(*logs(small, [inspect_sample(k, "4", "C") for k in (1, 2)])).log
    assert log.missing.tolist() == [True, False]


@pytest.mark.parametrize(
    ("value", "grade"), [("yes", 1), ("False", 0), (True, 1), (0.25, 0.25), ("0.5", 0.5), ("N", 0)]
)
def test_scores_are_read_as_inspect_reads_them(logs, value, grade):
    log = read_logs(*logs([inspect_sample(1, "4", value, 0.9)], [inspect_sample(1, "4", "C")])).log
    assert log.outcome("correct").tolist() == [1, grade]


@pytest.mark.parametrize(
    ("samples", "options", "problem"),
    [
        ([inspect_sample(1, "4", 7, 0.9)], {}, "a grade is a number from 0 to 1"),
        ([inspect_sample(1, "4", {"a": 1}, 0.9)], {}, "name another with --scorer"),
        ([inspect_sample(1, "4", "C", 0.9)], {"scorer": "judge"}, "there is no score 'judge'; it has match"),
        ([inspect_sample(1, "4", 1, scores={"a": {"value": 1}, "b": {"value": 1}})], {}, "several scores"),
        ([inspect_sample(2, "4", "C", 0.9)], {}, "no question was answered by both"),
        ([], {}, "there are no samples"),
        ([inspect_sample(1, "4", "C")], {}, "no answer of the Primary has a confidence"),
        ([inspect_sample(1, "4", "C", 0.9, scores=None)], {}, "has a grade"),
    ],
)
def test_logs_without_grades_or_confidences_say_what_to_do(logs, samples, options, problem):
    with pytest.raises((ScoreLogError, OptionError), match=problem):
        read_logs(*logs(samples, [inspect_sample(1, "4", "C")]), **options)


def test_unfinished_logs_and_other_tasks_are_refused(logs, tmp_path):
    rows = [inspect_sample(1, "4", "C", 0.9)]
    with pytest.raises(ScoreLogError, match="eval-retry"):
        read_logs(*logs(rows, rows, status="cancelled"))
    with pytest.raises(ScoreLogError, match="the tasks differ: 'other' and 'sums'"):
        read_logs(*logs(rows, rows, task="other"))
    with pytest.raises(ScoreLogError, match="2 logs; name the one to use"):
        read_logs(tmp_path, tmp_path)
    (tmp_path / "torn.eval").write_bytes(b"PK\x03\x04torn")
    with pytest.raises(ScoreLogError, match="is the file complete"):
        read_logs(tmp_path / "torn.eval", tmp_path / "large.eval")


def expected(tmp_path, **answers):
    path = tmp_path / "expected.csv"
    path.write_text("id,expected\n" + "".join(f"{id},{text}\n" for id, text in answers.items()))
    return path


def test_batches_are_joined_by_custom_id_and_graded(tmp_path):
    small = write_lines(tmp_path / "small.jsonl", [batch_line("a", "4", 0.9), batch_line("b", "5", 0.6)])
    large = write_lines(
        tmp_path / "large.jsonl", [batch_line("b", "6", model="big"), batch_line("a", "4", model="big")]
    )
    body = {"model": "small", "messages": [{"role": "user", "content": "2+2?"}]}
    asked = write_lines(tmp_path / "in.jsonl", [{"custom_id": "a", "method": "POST", "url": "/v1", "body": body}])
    imported = read_batches(small, large, expected=expected(tmp_path, a=4, b=6), requests=asked)
    assert imported.models == ("small", "big")
    assert imported.log.primary[1::2].tolist() == pytest.approx([0.9, 0.6])
    assert imported.log.outcome("correct").tolist() == [1, 1, 1, 0]
    assert imported.log.context.tolist() == ["2+2?", ""]
    assert imported.log.primary_usage.output_tokens.tolist() == [2, 2]


def test_replies_of_the_responses_api_are_read(tmp_path):
    part = {"type": "output_text", "text": "4", "logprobs": [{"token": "4", "logprob": math.log(0.5)}]}
    body = {
        "model": "small",
        "output": [{"type": "message", "content": [part]}],
        "usage": {"input_tokens": 1, "output_tokens": 2},
    }
    call = {"type": "function_call", "name": "add", "arguments": '{"b": 2, "a": 2}'}
    large = {"model": "big", "output": [call]}
    files = [
        write_lines(tmp_path / f"{k}.jsonl", [{"custom_id": "a", "response": {"status_code": 200, "body": one}}])
        for k, one in enumerate((body, large))
    ]
    log = read_batches(*files, grade="regex", expected=expected(tmp_path, a="4")).log
    assert log.primary.tolist() == [0, pytest.approx(0.5)]
    assert log.extra["guardian_answer"].tolist() == ['[{"arguments": {"a": 2, "b": 2}, "name": "add"}]']


def test_failed_requests_of_a_batch_stay_rows(tmp_path):
    folder = tmp_path / "small"
    write_lines(folder / "output.jsonl", [batch_line("a", "4", 0.9)])
    failed = {"custom_id": "b", "response": {"status_code": 429, "body": {}}, "error": None}
    write_lines(folder / "errors.jsonl", [failed, {"custom_id": "c", "response": None, "error": {"code": "expired"}}])
    large = write_lines(tmp_path / "large.jsonl", [batch_line(k, "4", model="big") for k in "abc"])
    log = read_batches(folder, large, expected=expected(tmp_path, a=4, b=4, c=4)).log
    assert dict(zip(log.id.tolist(), log.no_opinion.tolist(), strict=True)) == {"b": True, "c": True, "a": False}
    assert not log.missing.any()


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([{"id": 1}], "no custom_id here"),
        ([{"custom_id": "a", "body": {}}], "give the output file of the batch"),
        ([batch_line("a", "4"), batch_line("a", "4")], "stands there twice"),
        ([batch_line("a", "4"), batch_line("b", "4", model="other")], "answers of several models"),
        ([[1]], "is not a JSON object"),
        ([], "the file is empty"),
    ],
)
def test_files_that_are_no_batches_are_refused(tmp_path, lines, problem):
    path = write_lines(tmp_path / "small.jsonl", lines)
    with pytest.raises(ScoreLogError, match=problem):
        read_batches(path, path)


def test_files_are_read_in_every_shape_that_tools_write(tmp_path):
    lines = [batch_line("a", "4", 0.9), batch_line("b", "4", 0.9)]
    (tmp_path / "list.json").write_text(json.dumps(lines, indent=2))
    (tmp_path / "api.json").write_text(json.dumps({"data": lines, "meta": {}}))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    answers = expected(tmp_path, a=4, b=4)
    for name in ("list.json", "api.json", "packed.jsonl.gz"):
        assert len(read_batches(tmp_path / name, tmp_path / "api.json", expected=answers).log) == 2
    (tmp_path / "torn.jsonl").write_text('{"custom_id": "a"}\n{"custom')
    for name, problem in (
        ("torn.jsonl", "line 2 is not JSON"),
        ("none.jsonl", "there is no such file"),
        ("a.txt", "unknown"),
    ):
        (tmp_path / "a.txt").write_text("")
        with pytest.raises(ScoreLogError, match=problem):
            read_batches(tmp_path / name, tmp_path / "api.json")
    (tmp_path / "torn.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ScoreLogError, match="cannot be read"):
        read_batches(tmp_path / "torn.jsonl.gz", tmp_path / "api.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ScoreLogError, match="there are no files named"):
        read_batches(tmp_path / "empty", tmp_path / "api.json")


def test_a_python_grader_and_a_judge_can_grade(tmp_path, monkeypatch):
    (tmp_path / "my_grader.py").write_text("def half(request, answer, expected):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    path = write_lines(tmp_path / "small.jsonl", [batch_line("a", "4", 0.9)])
    log = read_batches(path, path, grade="python:my_grader:half").log
    assert log.outcome("correct").tolist() == [0.5, 0.5]
    from conformal_arbitrage import ConfigError

    with pytest.raises(ConfigError, match=r"arbitrage\.toml"):
        read_batches(path, path, grade="judge")
    with pytest.raises(OptionError, match="needs the expected answers"):
        read_batches(path, path)


def test_malformed_replies_count_as_failures(tmp_path):
    broken = completion("4", 0.9)
    broken["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": ["what?"]}
    line = {"custom_id": "a", "response": {"status_code": 200, "body": broken}}
    small = write_lines(tmp_path / "s.jsonl", [line, batch_line("b", "4", 0.8)])
    large = write_lines(tmp_path / "l.jsonl", [batch_line(k, "4") for k in "ab"])
    assert read_batches(small, large, expected=expected(tmp_path, a=4, b=4)).log.no_opinion.tolist() == [True, False]


def zstandard_member(name, text):
    """A ZIP archive with one member that is compressed with Zstandard, which Python before 3.14 cannot write."""
    import struct
    import zlib

    data = text.encode()
    packed = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", len(data)) + struct.pack("<I", len(data) << 3 | 1)[:3] + data
    fixed = struct.pack("<5H3L2H", 63, 0, 93, 0, 0, zlib.crc32(data), len(packed), len(data), len(name), 0)
    local = b"PK\x03\x04" + fixed + name.encode()
    central = b"PK\x01\x02" + struct.pack("<H", 63) + fixed + struct.pack("<3H2L", 0, 0, 0, 0, 0) + name.encode()
    end = b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, 1, 1, len(central), len(local) + len(packed), 0)
    return local + packed + central + end


def test_members_in_zstandard_are_read_and_damaged_ones_refused(tmp_path):
    from conformal_arbitrage.importing.files import read_members

    path = tmp_path / "log.eval"
    path.write_bytes(
        zstandard_member("samples/1.json", json.dumps({"id": 1, "value": math.nan, "text": "é\n"}, indent=2))
    )
    [(name, document)] = read_members(path, start="samples/")
    assert name == "samples/1.json"
    assert document["id"] == 1
    assert document["text"] == "é\n"
    assert math.isnan(document["value"])
    path.write_bytes(path.read_bytes().replace(b"\x28\xb5\x2f\xfd", b"\x00\x00\x00\x00"))
    with pytest.raises(ScoreLogError, match="cannot be read"):
        list(read_members(path, start="samples/"))


def test_hostile_files_are_refused_on_one_line(tmp_path, logs):
    rows = [inspect_sample(1, "4", "C", 0.9), inspect_sample("1", "4", "C", 0.9)]
    log = {"status": "success", "eval": {"model": "m", "task": "sums"}, "samples": rows}
    (tmp_path / "twice.json").write_text(json.dumps(log))
    _, large = logs([], [inspect_sample(1, "4", "C")])
    with pytest.raises(ScoreLogError, match="two samples '1' of epoch 1"):
        read_logs(tmp_path / "twice.json", large)
    (tmp_path / "cells.csv").write_text("custom_id,response\na," + "x" * 200_000 + "\n")
    with pytest.raises(ScoreLogError, match="export it as JSON Lines instead"):
        read_batches(tmp_path / "cells.csv", tmp_path / "cells.csv")
    whole = gzip.compress(b"x" * 1000)
    (tmp_path / "torn.jsonl.gz").write_bytes(whole[:15] + b"\xff" * 8 + whole[23:])
    with pytest.raises(ScoreLogError, match="cannot be read"):
        read_batches(tmp_path / "torn.jsonl.gz", tmp_path / "torn.jsonl.gz")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    with pytest.raises(ScoreLogError, match="is not JSON"):
        read_batches(tmp_path / "deep.jsonl", tmp_path / "deep.jsonl")
    usage = {"prompt_tokens": 10**400, "completion_tokens": 1}
    line = batch_line("a", "4", 0.9)
    line["response"]["body"]["usage"] = usage
    path = write_lines(tmp_path / "s.jsonl", [line])
    log = read_batches(path, path, expected=expected(tmp_path, a=4)).log
    assert log.primary_usage.input_tokens is None


def test_giant_members_of_an_archive_are_not_read(tmp_path, monkeypatch):
    from conformal_arbitrage.importing import files as archives

    monkeypatch.setattr(archives, "_LARGEST_MEMBER", 10)
    path = write_eval(tmp_path / "log.eval", [inspect_sample(1, "4", "C")])
    with pytest.raises(ScoreLogError, match="more than 10 are not read"):
        list(archives.read_members(path, start="samples/"))
