import asyncio
import math

import pytest

from conformal_arbitrage import OptionError, ScoreLogError, calibrate
from conformal_arbitrage.importing import read_lm_eval
from tests.importing.files import generation, sample, write_lines

DATE = "2026-11-16T01-02-03.456789"


@pytest.fixture
def runs(tmp_path):
    """Write the samples of both runs as lm-eval names them; return their folders."""

    def write(primary, guardian, task="colors"):
        for name, samples in (("small", primary), ("large", guardian)):
            write_lines(tmp_path / name / f"samples_{task}_{DATE}.jsonl", samples)
        return tmp_path / "small", tmp_path / "large"

    return write


def read(folders, **options):
    return asyncio.run(read_lm_eval(*folders, **options))


def test_likelihoods_become_probabilities_and_targets_outcomes(runs):
    folders = runs(
        [sample(0, [-1, -2, -3], 0), sample(1, [-5, -1, -1], 2)], [sample(0, [0, -9, -9], 0), sample(1, [-9, -9, 0], 2)]
    )
    imported = read(folders)
    log = imported.log
    total = sum(math.exp(-k) for k in (1, 2, 3))
    assert log.primary[:3] == pytest.approx([math.exp(-k) / total for k in (1, 2, 3)])
    assert log.outcome("correct").tolist() == [1, 0, 0, 0, 0, 1]
    assert log.id.tolist() == ["colors/0", "colors/1"]
    assert log.group.tolist() == ["colors", "colors"]
    assert log.actions.tolist()[:3] == ["red", "green", "blue"]
    assert imported.models == ("small", "large")
    assert imported.to_dict()["unused"] == []


def test_rows_are_joined_by_document_whatever_their_order(runs):
    primary = [sample(k, [-1 - k, -2, -3], 0) for k in range(12)]
    guardian = [sample(k, [-9, -k, -1], 0) for k in reversed(range(12))]
    log = read(runs(primary, guardian)).log
    assert log.id.tolist() == [f"colors/{k}" for k in range(12)]
    at_three = log.guardian[9:12]
    assert at_three[1] / at_three[2] == pytest.approx(math.exp(-3 + 1))


def test_normalized_scores_divide_by_the_characters_of_each_option(runs):
    folders = runs([sample(0, [-3, -5, -8], 0, acc_norm=0.0)], [sample(0, [0, -1, -1], 0, acc_norm=1.0)])
    log = read(folders, length_normalized=True).log
    assert log.primary[0] / log.primary[1] == pytest.approx(math.exp(-3 / 3 + 5 / 5))


def test_the_halves_that_mutual_information_adds_are_left_out(runs):
    def doubled(line):
        extra = {
            f"gen_args_{k + 3}": {"arg_0": "", "arg_1": f" {text}"} for k, text in enumerate(["red", "green", "blue"])
        }
        return line | {
            "arguments": line["arguments"] | extra,
            "filtered_resps": line["filtered_resps"] + [["-7", "False"]] * 3,
        }

    log = read(runs([doubled(sample(0, [-1, -2, -3], 0))], [doubled(sample(0, [0, -2, -3], 0))])).log
    assert log.sizes.tolist() == [3]


@pytest.mark.parametrize(
    ("target", "correct"),
    [("2", [0, 0, 1]), ("[0, 1]", [1, 1, 0]), ("green", [0, 1, 0]), ("purple", [1, 0, 0])],
)
def test_targets_may_be_indices_lists_or_texts_and_else_the_verdict_counts(runs, target, correct):
    right = float(correct[0])
    folders = runs([sample(0, [-1, -2, -3], target, acc=right)], [sample(0, [0, -2, -3], target, acc=right)])
    assert read(folders).log.outcome("correct").tolist() == correct


def test_a_wrong_verdict_without_a_target_settles_two_options_only(runs):
    two = {"options": ("he", "she"), "acc": 0.0}
    log = read(runs([sample(0, [-1, -2], "someone", **two)], [sample(0, [-1, -2], "someone", **two)])).log
    assert log.outcome("correct").tolist() == [0, 1]
    three = [[sample(0, [-1, -2, -3], "someone", acc=0.0)] for _ in range(2)]
    imported = read(runs(*three))
    assert imported.log.outcome("correct")[0] == 0
    assert any("2 options are neither right nor wrong" in note for note in imported.notes)
    unknown = [[sample(0, [-1, -2, -3], "someone", acc=None)] for _ in range(2)]
    assert all(math.isnan(value) for value in read(runs(*unknown)).log.outcome("correct"))


def test_numbers_as_options_are_told_from_indices_by_the_verdicts(runs):
    digits = ("1", "2", "3")
    rows = [sample(k, [-1, -2, -3], "1", options=digits, acc=1.0) for k in range(3)]
    assert read(runs(rows, rows)).log.outcome("correct").tolist() == [1, 0, 0] * 3
    rows = [sample(k, [-2, -1, -3], "1", options=digits, acc=1.0) for k in range(3)]
    assert read(runs(rows, rows)).log.outcome("correct").tolist() == [0, 1, 0] * 3


def test_verdicts_that_differ_from_the_scores_are_named(runs):
    rows = [sample(0, [-1, -1, -3], 1, acc=1.0), sample(1, [-1, -2, -3], 0)]
    assert any("1 verdicts (acc) on the Primary differ" in note for note in read(runs(rows, rows)).notes)


def test_options_in_the_context_are_the_actions(runs):
    line = sample(0, [-1, -2], 0, options=("same", "same"))
    line["arguments"] = {f"gen_args_{k}": {"arg_0": f"ctx{k}", "arg_1": " same"} for k in range(2)}
    assert read(runs([line], [line])).log.actions.tolist() == ["ctx0", "ctx1"]


def test_unknown_and_impossible_likelihoods_have_no_opinion_or_no_guardian(runs):
    infinite = float("-inf")
    primary = [
        sample(0, [-1, math.nan, -3], 0),
        sample(1, [infinite, infinite, infinite], 0),
        sample(2, [-1, infinite, -2], 0),
    ]
    guardian = [sample(0, [-1, -2, -3], 0), sample(1, [-1, None, -3], 0) | {"filtered_resps": [["None", "False"]] * 3}]
    guardian.append(sample(2, [-1, -2, -3], 0))
    primary.append(sample(3, [-1, -2, -3], 0))
    guardian.append(sample(3, [math.nan, -2, -3], 0))
    imported = read(runs(primary, guardian))
    log = imported.log
    assert log.id.tolist() == ["colors/0", "colors/2", "colors/3"]
    assert log.no_opinion.tolist() == [True, False, False]
    assert log.missing.tolist() == [False, False, True]
    assert log.primary[4] == 0
    assert list(imported.unused.counts) == [
        "questions with scores of neither model (they would be deferred, and have no loss)"
    ]


def test_documents_of_one_run_only_are_refused_or_named(runs):
    folders = runs([sample(k, [-1, -2, -3], 0) for k in range(5)], [sample(k, [0, -2, -3], 0) for k in range(3)])
    with pytest.raises(ScoreLogError, match="2 questions were only answered by the Primary and 0 only by the Guardian"):
        read(folders)
    imported = read(folders, unpaired="drop")
    assert len(imported.log) == 3
    assert imported.to_dict()["unused"] == [
        {"reason": "questions that only the Primary was asked", "count": 2, "examples": ["colors/3", "colors/4"]}
    ]


def test_of_several_runs_the_newest_counts_and_the_others_are_named(runs, tmp_path):
    folders = runs([sample(0, [-1, -2, -3], 0)], [sample(0, [0, -2, -3], 0)])
    write_lines(tmp_path / "small" / "samples_colors_2026-01-01T00-00-00.000000.jsonl", [sample(0, [-9, -2, -3], 0)])
    imported = read(folders)
    assert imported.log.primary[0] > 0.5
    assert [one["reason"] for one in imported.unused.to_list()] == ["files of earlier runs"]


@pytest.mark.parametrize(
    ("primary", "guardian", "problem"),
    [
        ([sample(0, [-1, -2, -3], 0)], [sample(0, [-1, -2, -3], 0, doc_hash="other")], "another document"),
        ([sample(0, [-1, -2, -3], 0)], [sample(0, [-1, -2], 0, options=("a", "b"))], "3 options, 2 in"),
        ([sample(0, [-1, -2, -3], 0)] * 2, [sample(0, [-1, -2, -3], 0)], "stands there twice"),
        ([sample(0, [-1, -2, -3], 0)], [sample(1, [-1, -2, -3], 0)], "no question was asked of both"),
        ([sample(0, [-1, -2], 0)], [sample(0, [-1, -2, -3], 0)], "2 log-likelihoods for 3 options"),
        ([sample(0, [-1, -2, -3], 0)], [generation(0, ["4"], {"exact_match": 1.0})], "name some with --task"),
        ([{"question": "x"}], [{"question": "x"}], "is this a samples file of lm-eval"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(runs, primary, guardian, problem):
    with pytest.raises(ScoreLogError, match=problem):
        read(runs(primary, guardian))


def test_a_folder_without_samples_says_how_to_write_them(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ScoreLogError, match="--log_samples"):
        read((tmp_path / "empty", tmp_path / "empty"))


def test_tasks_can_be_chosen(runs):
    runs([generation(0, ["4"], {"exact_match": 1.0})], [generation(0, ["4"], {"exact_match": 1.0})], task="sums")
    folders = runs([sample(0, [-1, -2, -3], 0)], [sample(0, [0, -2, -3], 0)])
    imported = read(folders, tasks=["colors"])
    assert imported.log.id.tolist() == ["colors/0"]
    assert imported.unused.counts == {"files of other tasks": 2}


def test_repeated_generations_give_a_confidence_and_the_metric_a_grade(runs):
    small = [
        generation(0, ["4", "4", "5", "4"], {"exact_match": 1.0}),
        generation(1, ["7", "8", "9", "6"], {"exact_match": 0.0}),
    ]
    large = [generation(k, ["4"], {"exact_match": 1.0}) for k in range(2)]
    log = read(runs(small, large)).log
    assert log.is_router
    assert log.primary.tolist() == [0, 0.75, 0, 0.25]
    assert log.guardian.tolist() == [1, 1, 1, 0]
    assert log.extra["primary_answer"].tolist() == ["4", "7"]
    assert calibrate(log, 0.5).relaxation == 0.25


def test_answers_that_a_filter_extracted_are_compared(runs):
    small = [generation(0, ["It is 4.", "4!", "5"], {"exact_match": 1.0}, filtered=["4", "4", "5"])]
    log = read(runs(small, [generation(0, ["4"], {"exact_match": 1.0})])).log
    assert log.primary[1] == pytest.approx(2 / 3)


def test_generations_without_repeats_need_confidences(runs, tmp_path):
    folders = runs([generation(0, ["4"], {"exact_match": 1.0})], [generation(0, ["4"], {"exact_match": 1.0})])
    with pytest.raises(ScoreLogError, match="--confidences FILE"):
        read(folders)
    table = tmp_path / "sure.csv"
    table.write_text("id,confidence\ncolors/0,0.8\n")
    assert read(folders, confidences=table).log.primary.tolist() == [0, 0.8]
    table.write_text("id,confidence\nother,0.8\n")
    with pytest.raises(ScoreLogError, match="none of its ids is one of the questions"):
        read(folders, confidences=table)
    table.write_text("id,sure\ncolors/0,0.8\n")
    with pytest.raises(ScoreLogError, match="needs the columns id and confidence"):
        read(folders, confidences=table)
    table.write_text("id,confidence\ncolors/0,high\n")
    with pytest.raises(OptionError, match="is not a number"):
        read(folders, confidences=table)


def test_a_grader_may_take_the_place_of_the_metric(runs):
    small = [generation(0, ["4 ", "4 "], {"bleu": 30.0})]
    log = read(runs(small, [generation(0, ["5"], {"bleu": 40.0})]), grade="exact").log
    assert log.outcome("correct").tolist() == [0, 1]


@pytest.mark.parametrize(
    ("metrics", "options", "problem"),
    [
        ({"bleu": 30.0, "ter": 0.1, "chrf": 0.2}, {}, "which metric grades the answer"),
        ({"bleu": 30.0}, {"metric": "bleu"}, "bleu is 30, and a grade is from 0 to 1"),
        ({"exact_match": 1.0}, {"metric": "f1"}, "which metric"),
    ],
)
def test_metrics_that_are_no_grades_are_refused(runs, metrics, options, problem):
    rows = [generation(0, ["4", "4"], metrics)]
    with pytest.raises((OptionError, ScoreLogError), match=problem):
        read(runs(rows, rows), **options)


def test_filters_must_be_told_apart(runs):
    rows = [generation(0, ["4", "4"], {"exact_match": 1.0}, filter=name) for name in ("strict", "flexible")]
    with pytest.raises(OptionError, match="several filters"):
        read(runs(rows, rows))
    imported = read(runs(rows, rows), filter="strict")
    assert imported.unused.counts == {"samples of another filter than strict": 2}
