"""arbitrage swap on files: two tables, one table, runs of lm-eval and inspect, a score log."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli import test_cli
from tests.importing.files import generation, inspect_sample, sample, write_eval, write_lines

run = test_cli.run
RNG = np.random.default_rng(6)
OLD = RNG.random(400) < 0.8
NEW = np.where(RNG.random(400) < 0.04, ~OLD, OLD)
MEAN = float(OLD.mean() - NEW.mean())


def table(name, grades, *, ids=None, column="grade"):
    ids = range(len(grades)) if ids is None else ids
    lines = [f"q{id},{grade}\n" for id, grade in zip(ids, grades, strict=True)]
    Path(name).write_text(f"id,{column}\n" + "".join(lines))


def judged(run, *arguments, code):
    return json.loads(run("swap", *arguments, "--json", code=code).stdout)


def test_one_file_that_is_no_score_log_is_told_what_else_to_give(run):
    table("old.csv", OLD.astype(int), column="gpt4")
    refused = run("swap", "old.csv", "--alpha", "5%", code=2).stderr
    assert "old.csv is no score log (columns id, gpt4): give a second file, OLD NEW, or name" in refused
    refused = run("recommend", "old.csv", "--alpha", "5%", code=2).stderr
    assert "`arbitrage quickstart old.csv` prints the command that makes one" in refused


def test_two_tables_are_joined_by_id_and_the_exit_code_is_the_verdict(run):
    table("old.csv", OLD.astype(int), column="correct")
    table("new.csv", NEW[::-1].astype(int), ids=range(399, -1, -1))
    for alpha, verdict, code in (("10%", "switch", 0), ("-5%", "keep", 1), (f"{MEAN:.4f}", "not yet", 3)):
        result = judged(run, "old.csv", "new.csv", "--alpha", alpha, code=code)
        assert result["verdict"] == verdict
        assert result["mean"] == pytest.approx(MEAN)
        assert (result["rows"], result["more_rows"] is None) == (400, True)
    shown = " ".join(run("swap", "old.csv", "new.csv", "--alpha", "4%", code=3).stdout.split())
    assert "more rows like these would decide" in shown
    assert 'a wrong "switch" has a probability of at most 5 %, and so has a wrong "keep"' in shown


def test_questions_of_one_model_only_are_refused_unless_stated_to_be_missing_by_chance(run):
    table("old.csv", OLD.astype(int))
    table("new.csv", NEW[:300].astype(int))
    refused = run("swap", "old.csv", "new.csv", "--alpha", "0.1", code=2).stderr
    assert "0 questions were only answered by the new model and 100 only by the old model" in refused
    assert judged(run, "old.csv", "new.csv", "--alpha", "0.2", "--unpaired", "drop", code=0)["rows"] == 300


def test_one_table_and_a_score_log_give_the_same_verdict(run):
    lines = [f"q{k},{int(old)},{int(new)},{k / 400}\n" for k, (old, new) in enumerate(zip(OLD, NEW, strict=True))]
    Path("both.csv").write_text("id,large_ok,small_ok,confidence\n" + "".join(lines))
    grades = ("--primary-grade", "small_ok", "--guardian-grade", "large_ok")
    run("router-log", "both.csv", "--confidence", "confidence", *grades, "-o", "router.parquet")
    one = judged(run, "both.csv", "--old", "large_ok", "--new", "small_ok", "--alpha", "0.1", code=0)
    assert judged(run, "router.parquet", "--alpha", "0.1", code=0) == {**one, "source": "router.parquet"}
    with_regret = judged(run, "router.parquet", "--alpha", "0.1", "--loss", "regret", code=0)
    assert with_regret["mean"] == pytest.approx((OLD & ~NEW).mean())


def test_a_log_of_menus_is_judged_by_its_labels_or_by_the_guardian_s_scores(run):
    pair = ("--primary-column", "qwen15b", "--guardian-column", "expert", "--alpha", "0.05")
    assert judged(run, "log.parquet", *pair, code=1)["loss"] == "net"
    assert judged(run, "log.parquet", *pair, "--loss", "regret", code=1)["loss"] == "regret"


def test_runs_of_lm_eval_are_read_by_their_metrics(run, tmp_path):
    for name, grades in (("large", OLD), ("small", NEW)):
        lines = [sample(k, [-1, -2, -3], 0 if right else 1) for k, right in enumerate(grades)]
        write_lines(tmp_path / name / "samples_colors_2026-11-16T01-02-03.456789.jsonl", lines)
        texts = [
            generation(k, ["4"], {"exact_match": float(right)}, filter=filter)
            for k, right in enumerate(grades)
            for filter in ("strict", "loose")
        ]
        write_lines(tmp_path / f"{name}-text" / "samples_sums_2026-11-16T01-02-03.456789.jsonl", texts)
    one = judged(run, "large", "small", "--alpha", "0.1", code=0)
    assert (one["rows"], one["mean"]) == (400, pytest.approx(MEAN))
    assert "--grade METRIC,FILTER" in run("swap", "large-text", "small-text", "--alpha", "0.1", code=2).stderr
    text = judged(run, "large-text", "small-text", "--grade", "exact_match,strict", "--alpha", "0.1", code=0)
    assert text["mean"] == pytest.approx(MEAN)


def test_logs_of_inspect_are_read_by_their_score(run):
    for name, grades in (("large.eval", OLD), ("small.eval", NEW)):
        write_eval(name, [inspect_sample(k, "4", "C" if right else "I") for k, right in enumerate(grades)])
    result = judged(run, "large.eval", "small.eval", "--alpha", "0.1", code=0)
    assert (result["rows"], result["mean"]) == (400, pytest.approx(MEAN))


def test_grades_beyond_0_and_1_need_the_largest_loss_that_their_scale_allows(run):
    for name, grades in (("old.csv", OLD), ("new.csv", NEW)):
        table(name, 4 + grades.astype(int))
    refused = run("swap", "old.csv", "new.csv", "--alpha", "0.4", code=2).stderr
    assert "grades leave [0, 1], such as" in refused
    assert judged(run, "old.csv", "new.csv", "--alpha", "0.4", "--loss-bound", "4", code=0)["loss_bound"] == 4


@pytest.mark.parametrize("column", ["id", "ID"])
def test_one_table_may_have_each_question_once(run, column):
    Path("both.csv").write_text(f"{column},old,new\n" + "".join(f"q{k % 60},1,1\n" for k in range(720)))
    refused = run("swap", "both.csv", "--old", "old", "--new", "new", "--alpha", "2%", code=2).stderr
    assert f"in column '{column}', 660 rows have the id of an earlier row; keep one row of each question" in refused


def test_a_column_that_is_not_there_is_named_with_those_that_are(run):
    table("old.csv", [1, 0], column="correct")
    Path("upper.csv").write_text("ID,correct\nq0,1\n")
    Path("plain.csv").write_text("id,a,b\nq0,1,1\n")

    def refused(*arguments):
        return run("swap", *arguments, "--alpha", "2%", code=2).stderr

    assert "no column nope (columns id, a, b); name one with --new" in refused(
        "plain.csv", "--old", "a", "--new", "nope"
    )
    for grade in ((), ("--grade", "correct")):
        told = refused("upper.csv", "old.csv", *grade)
        assert "no column id, which pairs the answers (columns ID, correct); call the column" in told
        assert "--grade" not in told
    assert "it is not clear which column has the grades (columns id, a, b); name" in refused("plain.csv", "plain.csv")
    told = refused("plain.csv", "plain.csv", "--grade", "c")
    assert "no column c (columns id, a, b); name the grades with --grade" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give two files, OLD NEW"),
        (("a.csv", "b.csv", "c.csv"), "give two files, OLD NEW"),
        (("both.csv", "--old", "a"), "give two files, OLD NEW"),
        (("log.parquet", "--policy", "support"), "give two files, OLD NEW"),
        (("plain.csv", "plain.csv"), "no column id, which pairs the answers (columns a, b)"),
        (("twice.csv", "twice.csv"), "have the id of an earlier row"),
        (("log.parquet", "--alpha", "2"), "alpha must lie above -1 and below the largest loss 1"),
    ],
)
def test_what_is_unclear_is_refused_in_one_line(run, arguments, message):
    Path("plain.csv").write_text("a,b\n1,1\n")
    table("twice.csv", [1, 0, 1], ids=[1, 1, 1])
    pair = ("--primary-column", "qwen15b", "--guardian-column", "expert") if "log.parquet" in arguments else ()
    alpha = () if "--alpha" in arguments else ("--alpha", "0.1")
    assert message in run("swap", *arguments, *pair, *alpha, code=2).stderr
