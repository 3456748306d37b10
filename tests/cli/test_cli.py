import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from conformal_arbitrage import Certificate, ScoreLog
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import cli, demo, output
from conformal_arbitrage.evaluation.looks import looks_path
from tests.certificates import said
from tests.conftest import BUNDLED

PAIR = ["--primary-column", "qwen15b", "--guardian-column", "expert"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in an empty folder; the bundled log lies there as log.parquet."""
    monkeypatch.chdir(tmp_path)
    Path("log.parquet").write_bytes(BUNDLED.read_bytes())

    def invoke(*arguments, code=0):
        result = CliRunner().invoke(cli, [str(a) for a in arguments])
        assert result.exit_code == code, (result.exit_code, result.output, result.stderr, result.exception)
        return result

    return invoke


def files():
    return sorted(p.name for p in Path.cwd().iterdir())


def test_calibrate_verify_and_apply_work_together(run):
    shown = run("calibrate", "log.parquet", "--alpha", "0.05", *PAIR, "-o", "certificate.json").stdout
    assert "0.457141" in shown
    assert "is at most 0.05" in shown
    assert "Guardian is asked  in 46.9 % of the queries on this log" in shown
    assert "nothing differs" in run("verify", "certificate.json", "log.parquet").stdout
    assert "go to the Guardian" in run("apply", "certificate.json", "log.parquet", "-o", "decisions.jsonl").stdout
    lines = [json.loads(line) for line in Path("decisions.jsonl").read_text().splitlines()]
    assert len(lines) == 2369
    assert lines[0] == {
        "row": 1, "id": "arc-easy/MCAS_1998_4_22", "action": 3, "decided_by": "guardian",
        "candidates": [0, 1, 2, 3], "margin": 0.005496,
    }  # fmt: skip


def test_a_budget_may_be_a_percentage(run):
    shown = run("calibrate", "log.parquet", "--alpha", "5%", *PAIR, "--json").stdout
    assert json.loads(shown)["promise"]["alpha"] == 0.05
    assert "'five%' is not a percentage" in run("calibrate", "log.parquet", "--alpha", "five%", *PAIR, code=2).stderr
    assert "At least 199 rows" in run("plan", "--alpha", "0.5 %").stdout


def test_a_router_log_keeps_an_id_column_of_any_name(run):
    Path("runs.csv").write_text("ticket,score,small_ok,big_ok\nT-1,0.5,0,1\nT-2,0.9,1,1\n")
    grades = ["--confidence", "score", "--primary-grade", "small_ok", "--guardian-grade", "big_ok"]
    run("router-log", "runs.csv", *grades, "--id", "ticket", "-o", "r.parquet")
    assert ScoreLog.read("r.parquet").id.tolist() == ["T-1", "T-2"]
    problem = run("router-log", "runs.csv", *grades, "--id", "case", "-o", "r.parquet", code=2).stderr
    assert "there is no column 'case'" in problem


def test_the_document_of_a_calibration_has_the_share_of_the_guardian_and_is_a_certificate(run):
    arguments = ["calibrate", "log.parquet", "--alpha", "0.05", *PAIR, "--json"]
    document = json.loads(run(*arguments).stdout)
    assert document["on_this_log"] == {
        "deferred": pytest.approx(0.4694, abs=1e-4), "cost_per_1000": None, "guardian_cost_per_1000": None,
    }  # fmt: skip
    Path("certificate.json").write_text(json.dumps(document))
    assert "nothing differs" in run("verify", "certificate.json", "log.parquet").stdout
    del document["on_this_log"]
    assert Certificate.load("certificate.json").to_dict() == Certificate.from_dict(document).to_dict()


def test_plan_takes_alpha_from_the_configuration(run):
    arguments = ["plan", "--audit-rate", "0.05", "--decisions-per-day", "10000", "--json"]
    assert "give --alpha" in run(*arguments, code=2).stderr
    run("init")
    Path("arbitrage.toml").write_text(re.sub(r"(?m)^alpha = .*$", "alpha = 0.07", Path("arbitrage.toml").read_text()))
    configured = run(*arguments).stdout
    assert configured == run(*arguments, "--alpha", "0.07").stdout
    assert configured != run(*arguments, "--alpha", "0.05").stdout


@pytest.mark.parametrize("width", [80, 100, 120, 170])
def test_the_frontier_keeps_whole_figures_at_any_width(run, monkeypatch, width):
    monkeypatch.setattr(output, "console", lambda: Console(width=width, highlight=False))
    sweep = [
        "--alpha",
        "0.05",
        "--calibration-size",
        "400",
        "--trials",
        "3",
        "--primary-cost",
        "1",
        "--guardian-cost",
        "20",
    ]
    shown = run("evaluate", "log.parquet", *PAIR, *sweep).stdout
    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
    assert (shown.count("±") > 1) == ("±: standard error" in shown) == (width == 170)
    assert ("Columns that do not fit this terminal: relaxation" in shown) == (width < 120)
    [row] = [line for line in shown.splitlines() if line.strip().startswith("conformal, alpha 0.05")]
    figures = json.loads(run("evaluate", "log.parquet", *PAIR, *sweep, "--json").stdout)
    conformal = next(p for p in figures["points"] if p["policy"] == "conformal")
    assert any(f"{conformal['loss']['mean']:.{digits}f}" in row for digits in (3, 4))  # one more beside a spread


def test_the_net_loss_takes_the_random_boundary_that_it_needs(run, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", "a-secret-of-some-length")
    net = ["--loss", "net", "--primary-column", "smollm2", "--guardian-column", "qwen15b"]
    shown = run("calibrate", "log.parquet", "--alpha", "0.05", *net, "-o", "certificate.json").stdout
    assert "a draw says which actions exactly at the threshold" in shown
    assert "losses in [-1, 1]" in shown
    assert "nothing differs" in run("verify", "certificate.json", "log.parquet").stdout
    refused = run("calibrate", "log.parquet", "--alpha", "0.05", *net, "--boundary", "include", code=2)
    assert 'needs boundary="random"' in refused.stderr
    sweep = ["--calibration-size", "500", "--trials", "2", "--json"]
    document = json.loads(run("evaluate", "log.parquet", "--alpha", "0.05", *net, *sweep).stdout)
    assert [point["boundary"] for point in document["points"]][-1] == "random"


def test_without_an_output_nothing_is_written(run):
    run("calibrate", "log.parquet", "--alpha", "0.05", *PAIR)
    assert files() == ["log.parquet"]
    run("evaluate", "log.parquet", "--alpha", "0.05", "--calibration-size", "500", "--trials", "2", *PAIR)
    assert files() == ["log.parquet"]


def test_calibrating_on_rows_that_were_looked_at_says_so(run):
    run("split", "log.parquet", "explore.parquet", "certify.parquet", *PAIR)
    run("inspect", "explore.parquet", *PAIR)
    clean = run("calibrate", "certify.parquet", "--alpha", "0.05", *PAIR, "--json")
    assert (clean.stderr, json.loads(clean.stdout).get("looked_at")) == ("", None)
    seen = run("calibrate", "explore.parquet", "--alpha", "0.05", *PAIR, "-o", "c.json")
    assert (
        "was looked at 2 times before (inspect, calibrate), and this is calibration 2 of it: alpha and" in seen.stderr
    )
    assert "must have been fixed before" in Certificate.load("c.json").looked_at
    fixed = run("calibrate", "explore.parquet", "--alpha", "0.05", *PAIR, "--fixed-before", "-o", "c.json")
    assert fixed.stderr == ""
    assert "the user states that alpha and options had been fixed before" in Certificate.load("c.json").looked_at
    assert "nothing differs" in run("verify", "c.json", "explore.parquet").stdout


def test_another_calibration_of_the_same_rows_says_that_they_were_looked_at(run, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", "a-secret-of-some-length")

    def looked_at(*options):
        return json.loads(run("calibrate", "log.parquet", *PAIR, *options, "--json").stdout).get("looked_at")

    assert looked_at("--alpha", "0.05") is None
    assert looked_at("--alpha", "0.05") is None  # the same again chooses nothing
    assert "looked at 2 times before (calibrate), and this is calibration 2 of it" in looked_at("--alpha", "0.1")
    included = ("--alpha", "0.05", "--boundary", "include")
    assert "looked at 3 times before (calibrate), and this is calibration 3 of it" in looked_at(*included)
    looks_path().unlink()
    dial = ("--confidence", "0.9", "--dial")
    assert looked_at("--alpha", "0.05", *dial) is None
    assert looked_at("--alpha", "0.1", *dial) is None  # that may be chosen after looking


def test_drawing_again_until_the_certificate_pleases_is_counted(run, monkeypatch):
    """Another secret, folder, split, or seed of a learner or a chain: each is another calibration of the same rows."""

    def looked_at(log, *options):
        shown = json.loads(run("calibrate", log, "--alpha", "0.05", *options, "--json").stdout)
        return shown.get("looked_at") or shown["evidence"].get("looked_at")

    def drawn(secret):
        monkeypatch.setenv("ARBITRAGE_SECRET", secret)
        return looked_at("log.parquet", *PAIR, "--boundary", "random")

    assert drawn("a-secret-of-some-length") is None
    assert "this is calibration 2 of it" in drawn("another-secret-of-some-length")
    monkeypatch.delenv("ARBITRAGE_SECRET")
    ProjectSecret.create("another-folder")
    monkeypatch.chdir("another-folder")
    (Path.cwd() / "log.parquet").symlink_to(Path.cwd().parent / "log.parquet")
    assert "this is calibration 3 of it" in looked_at("log.parquet", *PAIR, "--boundary", "random")
    looks_path().unlink()
    for seed in range(3):
        run("learn", "log.parquet", *PAIR, "--seed", str(seed), "-o", "scored.parquet")
        run("split", "log.parquet", "explore.parquet", "certify.parquet", *PAIR, "--seed", str(seed + 10))
        noted = looked_at("scored.parquet"), looked_at("certify.parquet", *PAIR)
        counts = [1 if note is None else int(note.split("this is calibration ")[1].split()[0]) for note in noted]
        assert counts == [2 * seed + 1, 2 * seed + 2]


def test_another_recommendation_on_the_same_rows_says_that_they_were_looked_at(run, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", "a-secret-of-some-length")

    def looked_at(alpha):
        told = run("recommend", "log.parquet", *PAIR, "--alpha", alpha, "--trials", "2", "-o", "plan.toml", "--force")
        return told.stderr, Certificate.load("certificate.json").looked_at

    assert looked_at("0.05") == ("", None)
    assert looked_at("0.05") == ("", None)
    told, noted = looked_at("0.1")
    assert "was looked at 2 times before (recommend)" in told
    assert "must have been fixed before" in noted


def test_a_recommendation_that_is_refused_says_where_to_write_and_is_no_look(run, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", "a-secret-of-some-length")
    call = ("recommend", "log.parquet", *PAIR, "--trials", "2", "--alpha")
    run(*call, "0.05", "--share", "0.3", "-o", "plan.toml")
    monkeypatch.setattr("conformal_arbitrage.evaluation.recommendation.recommend", None)  # nothing is computed
    for name in ("plan.toml", "other.toml"):
        refused = run(*call, "0.1", "-o", name, code=2)
        assert "name another folder in -o, or overwrite it with --force" in refused.stderr
    assert not Path("other.toml").exists()
    seen = run("calibrate", "log.parquet", *PAIR, "--alpha", "0.05").stderr
    assert "was looked at once before (recommend), and this is calibration 2 of it" in seen


def test_two_tables_with_the_same_ids_are_two_logs(run):
    ids, rng = [str(k) for k in range(200)], np.random.default_rng(3)
    for name in ("mine.parquet", "yours.parquet"):
        ScoreLog.from_arrays(rng.random((200, 2)), rng.random((200, 2)).round(), id=ids).write(name)
    run("evaluate", "mine.parquet", "--alpha", "0.2", "--calibration-size", "100", "--trials", "2")
    assert json.loads(run("calibrate", "yours.parquet", "--alpha", "0.2", "--json").stdout).get("looked_at") is None
    assert "looked at once before (evaluate)" in run("calibrate", "mine.parquet", "--alpha", "0.2").stderr


def test_what_a_log_was_taken_from_is_known_from_its_file(run):
    run("evaluate", "log.parquet", "--alpha", "0.05", "--calibration-size", "500", "--trials", "2", *PAIR)
    run("split", "log.parquet", "explore.jsonl", "certify.parquet", *PAIR)
    for part, said_of_it in (
        ("explore.jsonl", "once before (evaluate)"),
        ("certify.parquet", "2 times before (evaluate, ca"),
    ):
        assert f"looked at {said_of_it}" in run("calibrate", part, "--alpha", "0.05", *PAIR).stderr


def test_looks_never_stop_a_command(run, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("ARBITRAGE_SECRET", "a-secret-of-some-length")
    looks_path().mkdir(parents=True)
    assert "this look was not noted" in run("inspect", "log.parquet", *PAIR).stderr
    assert "cannot be read" in run("calibrate", "log.parquet", "--alpha", "0.05", *PAIR).stderr


def test_calibrate_prints_one_json_document_with_the_documented_keys(run):
    document = json.loads(run("calibrate", "log.parquet", "--alpha", "0.05", *PAIR, "--json").stdout)
    assert said(document, "relaxation") == 0.457141
    assert {"rule", "promise", "loss", "evidence", "provenance", "guarantee"} <= set(document)
    assert {"relaxation", "boundary_u", "guardian_sees", "boundary"} <= set(document["rule"])
    assert {"n", "empirical_risk", "slack", "log_sha256"} <= set(document["evidence"])
    assert {"alpha"} <= set(document["promise"])
    assert {"bound"} <= set(document["loss"])


def test_always_defer_warns_with_the_rows_needed_and_succeeds(run):
    result = run("calibrate", "log.parquet", "--alpha", "0.0001", *PAIR, "--json")
    assert said(json.loads(result.stdout), "relaxation") is None
    assert "at least 9999 rows" in result.stderr
    assert result.stderr.count("\n") == 1


RANDOM = ["calibrate", "log.parquet", "--alpha", "0.05", *PAIR, "--boundary", "random"]


def test_a_random_boundary_draws_with_the_one_secret_that_every_command_finds(run, monkeypatch):
    run(*RANDOM, "-o", "c.json")
    run("verify", "c.json", "log.parquet")
    run("apply", "c.json", "log.parquet", "-o", "d.jsonl")
    first = Certificate.load("c.json")
    again = json.loads(run(*RANDOM, "--json").stdout)
    assert (said(again, "boundary_u"), said(again, "key_sha256")) == (first.boundary_u, first.provenance.key_sha256)
    secret = ProjectSecret.find().keys[0].decode()
    monkeypatch.setenv("ARBITRAGE_SECRET", "another secret".replace(" ", "-") * 2)
    assert "signed with another secret" in run("verify", "c.json", "log.parquet", code=2).stderr
    rotated = f"{'another-secret' * 2}, {secret}"
    monkeypatch.setenv("ARBITRAGE_SECRET", rotated)
    run("verify", "c.json", "log.parquet")


def test_every_certificate_is_signed_though_nobody_made_a_secret(run, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "new-user"))
    Path("runs").mkdir()
    run("calibrate", "log.parquet", "--alpha", "0.05", *PAIR, "-o", "runs/c.json")
    assert Certificate.load("runs/c.json").signed
    run("verify", "runs/c.json", "log.parquet")
    [said_once] = caplog.messages
    assert "new-user/conformal-arbitrage/arbitrage.secret" in said_once
    monkeypatch.chdir("runs")
    run("verify", "c.json", "../log.parquet")


def test_init_writes_no_secret(run):
    before = files()
    run("init")
    assert set(files()) == {*before, "arbitrage.toml"}


def test_apply_warns_of_menus_outside_the_range_of_the_log(run):
    Path("two.jsonl").write_text('{"primary": [0.9, 0.1], "guardian": [1, 0]}\n' * 40)
    run("calibrate", "two.jsonl", "--alpha", "0.1", "-o", "c.json")
    Path("wide.jsonl").write_text('{"primary": [0.9, 0.1]}\n{"primary": [0.9, 0.1, 0]}\n')
    warning = (
        "rows without a guarantee: 1; in the first, the query has 3 actions; those of the certificate's log have 2"
    )
    assert warning in run("apply", "c.json", "wide.jsonl").stderr


def test_verify_exits_1_and_names_the_differences(run):
    run("calibrate", "log.parquet", "--alpha", "0.05", "--boundary", "include", *PAIR, "-o", "c.json")
    document = json.loads(Path("c.json").read_text())
    document["rule"]["relaxation"] = 0.3
    Path("c.json").write_text(json.dumps(document))
    assert "was changed" in run("verify", "c.json", "log.parquet", code=2).stderr
    Certificate.load("c.json").sign(ProjectSecret.find()).save("c.json")  # by whoever has the secret
    result = run("verify", "c.json", "log.parquet", code=1)
    assert "relaxation differs: 0.3 in c.json, 0.457141 recomputed" in result.stderr
    differences = json.loads(run("verify", "c.json", "log.parquet", "--json", code=1).stdout)
    assert differences["differences"]["relaxation"] == {"certificate": 0.3, "recomputed": 0.457141}


def test_the_certificate_records_binarize_bound_and_worst_case(run):
    arguments = ["calibrate", "log.parquet", "--alpha", "0.1", "--primary-column", "smollm2"]
    arguments += ["--guardian-column", "qwen15b", "--binarize", "--guardian-sees", "all", "--loss-bound", "1"]
    run(*arguments, "--missing-guardian", "worst_case", "-o", "c.json")
    certificate = Certificate.load("c.json")
    assert (certificate.relaxation, certificate.loss.binarized, certificate.guardian_sees) == (0.635774, True, "all")
    run("verify", "c.json", "log.parquet")


def test_assess_measures_a_certificate_on_other_rows(run):
    run("split", "log.parquet", "old.parquet", "new.parquet", "--share", "0.5", *PAIR)
    run("calibrate", "old.parquet", "--alpha", "0.05", *PAIR, "-o", "c.json")
    costs = ["--primary-cost", "0.1", "--guardian-cost", "2"]
    shown = run("assess", "c.json", "new.parquet", "--confidence", "0.9", *costs)
    assert "90 % interval" in shown.stdout
    assert shown.stderr == ""
    document = json.loads(run("assess", "c.json", "new.parquet", *costs, "--json").stdout)
    assert document["interval"][0] < document["loss"] < document["interval"][1]
    assert document["method"] == "clopper-pearson"
    own = run("assess", "c.json", "old.parquet")
    assert "made from" in own.stderr
    assert "No verdict" in own.stdout
    assert "Within the budget" not in own.stdout


def test_inspect_distinguishes_a_good_pair_from_a_poor_one(run):
    good = json.loads(run("inspect", "log.parquet", *PAIR, "--json").stdout)
    assert good["worth_routing"] is True
    assert good["outcomes"]["correct"] == {"primary": pytest.approx(0.7303, abs=1e-4), "guardian": 1.0}
    poor = run("inspect", "log.parquet", "--primary-column", "smollm2", "--guardian-column", "qwen15b").stdout
    assert "Not worth routing" in poor


EVALUATE = ["evaluate", "log.parquet", *PAIR, "--alpha", "0.05", "--alpha", "0.1", "--calibration-size", "400",
            "--trials", "4", "--primary-cost", "1", "--guardian-cost", "20"]  # fmt: skip


def test_evaluate_prints_a_table_or_one_document(run):
    assert "conformal, alpha 0.05" in run(*EVALUATE).stdout
    document = json.loads(run(*EVALUATE, "--json", "--probability", "0.5").stdout)
    assert [p["policy"] for p in document["points"]] == [
        "primary", "guardian", "random", "conformal", "conformal", "cost_matched", "cost_matched",
    ]  # fmt: skip
    assert document["points"][3]["delta"]["mean"] > 0.05
    assert "trials" not in document["points"][3]["delta"]
    assert len(json.loads(run(*EVALUATE, "--json", "--per-trial").stdout)["points"][2]["delta"]["trials"]) == 4


def test_evaluate_prints_csv_markdown_and_latex(run):
    csv = run(*EVALUATE, "--csv").stdout.splitlines()
    assert csv[0].startswith("policy,alpha,probability,guardian_sees,boundary,always_defer,loss_mean,loss_std")
    assert len(csv) == 1 + 2 + 2 + 2
    assert run(*EVALUATE, "--markdown").stdout.startswith("| policy | correct | loss |")
    latex = run(*EVALUATE, "--latex").stdout
    assert r"\toprule" in latex
    assert r"\$ / 1000" in latex


def test_evaluate_saves_a_figure(run):
    run(*EVALUATE, "--plot", "f.png", "--x", "loss")
    assert Path("f.png").read_bytes().startswith(b"\x89PNG")
    run(*EVALUATE, "--plot", "f.svg")
    assert "<svg" in Path("f.svg").read_text()


def test_evaluate_balances_by_group(run):
    shown = run(*EVALUATE, "--balance-by", "group", "--sample-size", "600", "--json").stdout
    assert json.loads(shown)["test_size"] == 200


def test_plan_shows_how_many_rows_a_budget_needs(run):
    assert "At least 149 rows" in run("plan", "--alpha", "0.02", "--loss-bound", "3").stdout
    document = json.loads(run("plan", "--alpha", "0.02", "--json").stdout)
    assert document["fewest_rows"] == 49
    assert document["rows"][0] == {"n": 49, "spendable": 0.0, "spread": pytest.approx(0.02)}


def test_router_log_turns_any_table_into_a_score_log(run):
    rng = np.random.default_rng(0)
    rows = [f"q{k},{rng.random():.3f},{rng.integers(2)},{rng.integers(2)},0.1" for k in range(60)]
    Path("runs.csv").write_text("id,score,small_ok,big_ok,primary_cost\n" + "\n".join(rows) + "\n")
    run("router-log", "runs.csv", "--confidence", "score", "--primary-grade", "small_ok", "--guardian-grade", "big_ok",
        "-o", "router.parquet")  # fmt: skip
    log = ScoreLog.read("router.parquet")
    assert log.is_router
    assert log.id[59] == "q59"
    assert log.primary_usage.cost.tolist() == [0.1] * 60
    run("init")
    shown = run("calibrate", "router.parquet", "--alpha", "0.2", "--boundary", "random").stdout
    assert "The Primary's answer is given where its confidence is above" in shown
    assert "no column 'nope'" in run(
        "router-log", "runs.csv", "--confidence", "nope", "--primary-grade", "small_ok", "--guardian-grade", "big_ok",
        "-o", "x.parquet", code=2,
    ).stderr  # fmt: skip


def test_the_demo_runs_and_writes_its_files(run):
    shown = run("demo", "--out", "tour").stdout
    assert "Worth routing" in shown
    assert "Not worth routing" in shown
    assert "assumed" in shown.lower()
    assert "300 questions that were not used for calibration" in shown
    for word in ("grows 3-fold, at the same margins", "red after", "a new certificate from 1000 rows since the alarm"):
        assert word in shown
    written = {
        "arbitrage.toml", "certificate.json", "frontier.png", "gateway.json", "science.parquet", "scores.csv",
        "simulation.png",
    }  # fmt: skip
    assert written <= {p.name for p in Path("tour").iterdir()}
    assert "the risk budget is 0.05" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 170
    run("verify", "tour/certificate.json", "tour/science.parquet")
    run("keys", "create", "--config", "tour/arbitrage.toml")  # the tour has a record of its own, which asks for no key
    document = json.loads(run("demo", "--out", "tour", "--json").stdout)
    assert 0.4 < document["deferred"] < 0.6
    assert document["poor"]["worth_routing"] is False
    served = document["served"]
    assert served["loss"] < 0.1
    assert served["deferred"] < 0.6 * served["questions"]
    assert served["cost"] == pytest.approx(0.5 * served["deferred"] + 0.0002 * served["questions"])


def test_without_the_extra_the_demo_says_that_its_last_step_was_skipped(run, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    monkeypatch.setattr(demo, "TRIALS", 20)
    shown = " ".join(run("demo", "--out", "tour").stdout.split())
    assert "Skipped: the gateway needs its extra, which is not installed; run `pip install '.[gateway]'`" in shown


BAD = [
    (
        ["compare", "log.parquet", "--alpha", "0.1", *PAIR, "--calibration-size", "3000"],
        "3000 rows to calibrate on leave none of its 2369 to test on",
    ),
    (["calibrate", "none.parquet", "--alpha", "0.1"], "none.parquet: there is no such file"),
    (["calibrate", "log.parquet", "--alpha", "0.1"], "there is no column 'primary'"),
    (["calibrate", "log.parquet"], "give --alpha"),
    (["calibrate", "log.parquet", "--alpha", "0", *PAIR], "alpha must lie above 0"),
    (["calibrate", "log.parquet", "--alpha", "1", *PAIR], "alpha must lie above 0 and below the loss bound 1"),
    (["calibrate", "log.parquet", "--alpha", "x", *PAIR], "alpha must be a finite decimal"),
    (["calibrate", "log.parquet", "--alpha", "nan", *PAIR], "alpha must be a finite decimal"),
    (["calibrate", "log.parquet", "--alpha", "0.1", *PAIR, "--boundary", "sometimes"], "'sometimes' is not one of"),
    (["calibrate", "log.parquet", "--alpha", "0.1", *PAIR, "-o", "no/such/folder/c.json"], "cannot be written"),
    (["calibrate", "log.parquet", "--alpha", "0.1", *PAIR, "--outcome", "label"], "column 'label' is BIGINT"),
    (["evaluate", "log.parquet", "--alpha", "0.1", *PAIR, "--calibration-size", "2369"], "calibration size of 2369"),
    (
        ["evaluate", "log.parquet", "--alpha", "0.1", *PAIR, "--calibration-size", "9", "--plot", "f.png"],
        "give --primary-cost",
    ),
    (
        [
            "evaluate",
            "log.parquet",
            "--alpha",
            "0.1",
            *PAIR,
            "--calibration-size",
            "9",
            "--plot",
            "f.pgf",
            "--x",
            "loss",
        ],
        "f.pgf",
    ),
    (["verify", "none.json", "log.parquet"], "none.json: cannot be read"),
    (["apply", "log.parquet", "log.parquet"], "log.parquet: is not JSON"),
    (["plan", "--alpha", "2"], "alpha must lie"),
    (["plan", "--alpha", "1e-99999999"], "alpha must be a finite decimal number of ordinary size"),
    (["plan", "--alpha", "0.1", "--loss-bound", "1e400"], "loss_bound must be a finite decimal"),
    (["calibrate", "log.parquet", "--alpha", "0.1", *PAIR, "--loss-bound", "1e18"], "too large for exact sums"),
    (["calibrate", "log.parquet", "--alpha", "0.1", *PAIR, "-o", ""], "not the name of a file"),
    (["calibrate", "log.parquet", "--alpha", "0.1", *PAIR, "-o", "."], "not the name of a file"),
    (["calibrate", "log.parquet", "--alpha", "0.1", *PAIR, "-o", "log.parquet/c.json"], "cannot be written"),
    (["calibrate", "log.parquet", "--alpha", "0.1", *PAIR, "-o", "/"], "not the name of a file"),
    (["evaluate", "log.parquet", "--alpha", "0.1", *PAIR, "--calibration-size", "9", "--seed", "-1"], "seed must be 0"),
    (
        ["evaluate", "log.parquet", "--alpha", "0.1", *PAIR, "--calibration-size", "9", "--delta-of", "typo"],
        "no outcome 'typo'",
    ),
    (["inspect", "log.parquet", *PAIR, "--loss-bound", "-3"], "loss_bound must be 1e-06 or more"),
    (["inspect", "log.parquet", *PAIR, "--loss-bound", "0.5"], "above the bound 0.5"),
    (["inspect", "log.txt"], "unknown kind of file"),
    (["nonsense"], "No such command"),
    (["split", "log.parquet", "a.parquet", "b.txt", *PAIR], "unknown kind of file"),
    (["split", "log.parquet", "a.parquet", "a.parquet", *PAIR], "would overwrite the input"),
    (["split", "log.parquet", "a.parquet", "b.parquet", "--share", "nan", *PAIR], "leaves a part empty"),
    (["calibrate", "log.parquet", "--alpha", "0.1", *PAIR, "-o", "log.parquet"], "would overwrite the input"),
    (["reproduce", "theory", "--seed", "-1"], "seed must be 0 or more"),
    (["reproduce", "truthfulqa", "--primary-column", "qwen15b"], "need --log"),
    (["reproduce", "pku"], "--log FILE"),
    (["inspect", "x" * 300 + ".csv"], "no such file"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a)[:60] for a, _ in BAD])
def test_a_user_error_is_one_line_with_exit_code_2_and_writes_nothing(run, arguments, message):
    before = files()
    result = run(*arguments, code=2)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("arbitrage: ")
    assert result.stdout == ""
    assert files() == before


def test_an_error_names_the_file_and_row(run):
    rows = [{"primary": [0.1, 0.2], "guardian": [0, 1]}, {"primary": [0.1, 0.2], "guardian": [0, None]}]
    Path("bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stderr = run("calibrate", "bad.jsonl", "--alpha", "0.5", "-o", "c.json", code=2).stderr
    assert "row 2: no Guardian score" in stderr
    assert "--missing-guardian worst_case" in stderr
    assert "bad.jsonl" in stderr
    assert not Path("c.json").exists()


def test_scores_outside_the_unit_interval_need_a_bound(run):
    Path("s.jsonl").write_text('{"primary": [0.1, 0.2], "guardian": [0, -3]}\n' * 40)
    assert "--loss-bound" in run("calibrate", "s.jsonl", "--alpha", "0.5", code=2).stderr
    run("calibrate", "s.jsonl", "--alpha", "0.5", "--loss-bound", "3")


def test_apply_works_without_guardian_scores(run):
    run("calibrate", "log.parquet", "--alpha", "0.05", *PAIR, "-o", "c.json")
    Path("new.jsonl").write_text('{"id": "a", "qwen15b": [0.9, 0.1]}\n{"id": "b", "qwen15b": [0.5, 0.4]}\n')
    assert "ask it about the candidates" in run("apply", "c.json", "new.jsonl", "-o", "d.jsonl").stdout
    decisions = [json.loads(line) for line in Path("d.jsonl").read_text().splitlines()]
    assert [(d["action"], d["decided_by"]) for d in decisions] == [(0, "primary"), (None, "guardian")]
    assert json.loads(run("apply", "c.json", "new.jsonl", "--json").stdout)["undecided"] == 1


def test_apply_warns_if_a_bound_certificate_meets_other_models(run):
    row = '{"id": "%d", "primary": [0.9, 0.1], "guardian": [1, 0]}\n'
    Path("a.jsonl").write_text("".join(row % k for k in range(40)))
    Path("a.jsonl.meta.json").write_text('{"identities": {"primary": {"model": "x"}, "guardian": {"model": "y"}}}')
    run("calibrate", "a.jsonl", "--alpha", "0.1", "-o", "c.json")
    assert run("apply", "c.json", "a.jsonl").stderr == ""
    Path("a.jsonl.meta.json").write_text('{"identities": {"primary": {"model": "z"}, "guardian": {"model": "y"}}}')
    assert "guarantee may not hold" in run("apply", "c.json", "a.jsonl").stderr


def test_a_misspelled_guardian_column_is_rejected(run):
    run("calibrate", "log.parquet", "--alpha", "0.05", *PAIR, "-o", "c.json")
    assert "no column 'exprt'" in run("apply", "c.json", "log.parquet", "--guardian-column", "exprt", code=2).stderr


def test_only_the_identities_of_used_columns_are_compared(run):
    Path("a.jsonl").write_text('{"a": [0.9, 0.1], "b": [1, 0], "c": [0, 1]}\n' * 40)
    Path("a.jsonl.meta.json").write_text('{"identities": {"a": {"m": 1}, "b": {"m": 2}, "c": {"m": 3}}}')
    run("calibrate", "a.jsonl", "--alpha", "0.1", "--primary-column", "a", "--guardian-column", "b", "-o", "c.json")
    assert run("apply", "c.json", "a.jsonl").stderr == ""
    Path("new.jsonl").write_text('{"a": [0.9, 0.1]}\n')
    Path("new.jsonl.meta.json").write_text('{"identities": {"a": {"m": 1}}}')
    assert run("apply", "c.json", "new.jsonl").stderr == ""


def test_verify_fails_on_a_log_that_cannot_be_the_original(run):
    run("calibrate", "log.parquet", "--alpha", "0.05", *PAIR, "-o", "c.json")
    Path("other.jsonl").write_text('{"qwen15b": [0.9, 0.1], "expert": [1, null]}\n')
    assert "cannot have been made from" in run("verify", "c.json", "other.jsonl", code=1).stderr


def test_split_writes_two_disjoint_parts(run):
    run("split", "log.parquet", "explore.parquet", "certify.jsonl", "--share", "0.25", *PAIR)
    parts = [ScoreLog.read(name, primary="qwen15b", guardian="expert") for name in ("explore.parquet", "certify.jsonl")]
    assert [len(part) for part in parts] == [592, 1777]
    assert not set(parts[0].id.tolist()) & set(parts[1].id.tolist())
    assert (
        "leaves a part empty" in run("split", "log.parquet", "a.csv", "b.csv", "--share", "1.5", *PAIR, code=2).stderr
    )


def test_a_router_table_may_have_boolean_grades(run):
    Path("runs.csv").write_text("score,small,big\n0.5,True,False\n0.2,false,true\n")
    columns = ["--confidence", "score", "--primary-grade", "small", "--guardian-grade", "big"]
    run("router-log", "runs.csv", *columns, "-o", "r.jsonl")
    assert ScoreLog.read("r.jsonl").outcome("correct").tolist() == [0, 1, 1, 0]


def test_plan_reports_on_a_given_number_of_rows(run):
    document = json.loads(run("plan", "--alpha", "0.05", "--rows", "700", "--json").stdout)
    assert [row["n"] for row in document["rows"]] == [700]
    assert "all deferred" in run("plan", "--alpha", "0.02", "--rows", "5").stdout
    assert "1 row or more" in run("plan", "--alpha", "0.05", "--rows", "0", code=2).stderr


def test_writing_through_a_link_keeps_the_link(run):
    Path("real.json").write_text("old")
    Path("link.json").symlink_to("real.json")
    run("calibrate", "log.parquet", "--alpha", "0.1", *PAIR, "-o", "link.json", "--force")
    assert Path("link.json").is_symlink()
    assert Certificate.load("real.json").alpha == 0.1


def test_a_damaged_certificate_never_causes_a_traceback(run):
    run("calibrate", "log.parquet", "--alpha", "0.1", *PAIR, "-o", "c.json")
    good = Path("c.json").read_text()
    for bad in (good.replace('"alpha": 0.1', '"alpha": NaN'), "[" * 100_000, good.replace('"primary": "qwen15b",', "")):
        Path("bad.json").write_text(bad)
        run("verify", "bad.json", "log.parquet", "--json", code=2)


def test_without_arguments_the_help_is_shown(run):
    assert "Usage:" in run().stdout


def test_a_certificate_is_shown_in_plain_words_and_with_full_in_all_of_them(run):
    drawn = ["--alpha", "0.05", "--boundary", "random", *PAIR, "-o", "certificate.json"]
    for plain in (run("calibrate", "log.parquet", *drawn), run("certificate", "show", "certificate.json")):
        assert [line.split(":")[0] for line in plain.stdout.splitlines() if ": " in line and line[0] in "PCN"] == [
            "Promise", "Conditions", "Not promised"
        ]  # fmt: skip
        for jargon in ("draws up to", "unused budget", "luck", "crc", "unbound", "exchangeable"):
            assert jargon not in plain.stdout
    shown = run("certificate", "show", "certificate.json", "--full").stdout
    for words in ("draws up to", "unused budget", "share this certificate's luck", "exchangeable"):
        assert words in shown


@pytest.mark.parametrize(
    ("name", "usual"),
    [("calibrate", {"--alpha", "--output", "--json"}), ("evaluate", {"--alpha", "--calibration-size"})],
)
def test_many_options_are_grouped_and_the_usual_ones_come_first(run, name, usual):
    text = run(name, "--help").stdout
    first, *others = text[text.index("Usual options:") :].split("\n\n")
    titles = [section.splitlines()[0] for section in others]
    assert len(titles) >= 5
    assert titles[-1] != "Usual options:"
    assert all(option in first for option in usual)
    command = cli.get_command(click.Context(cli), name)
    shown = {option for line in text.splitlines() for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", line)}
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert shown == {option.opts[-1] for option in options} | {"--help"}


def test_an_invalid_router_table_is_reported_with_its_own_column_names(run):
    Path("runs.csv").write_text("score,small,big\n0.5,2,1\n")
    columns = ["--confidence", "score", "--primary-grade", "small", "--guardian-grade", "big", "-o", "x.parquet"]
    assert (
        "runs.csv: row 1, column 'small': 2 must be in [0, 1]" in run("router-log", "runs.csv", *columns, code=2).stderr
    )
    Path("runs.jsonl").write_text('{"score": 0.5, "small": true, "big": false}\n')
    run("router-log", "runs.jsonl", *columns)


def test_every_command_has_help_with_an_example(run):
    for name in cli.list_commands(click.Context(cli)):
        lines = run(name, "--help").stdout.splitlines()
        assert any(line.strip().startswith(f"arbitrage {name}") for line in lines), name
        assert not any("\\b" in line for line in lines), name


def test_the_installed_command_runs_and_shows_no_traceback(tmp_path):
    command = Path(sys.executable).parent / "arbitrage"
    environment = os.environ | {"COLUMNS": "80"}
    good = subprocess.run([command, "--version"], capture_output=True, text=True, env=environment, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    bad = subprocess.run([command, "inspect", "x.csv"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "arbitrage: x.csv: there is no such file, or it may not be read\n"


def test_other_models_of_the_same_rows_are_other_calibrations_of_them(run, tmp_path):
    """Who takes the cheapest of several pairs, confidences or chains has chosen on certified rows; order counts nothing."""

    def count(log, *options):
        shown = json.loads(run("calibrate", log, "--alpha", "0.1", *options, "--json").stdout)
        note = shown.get("looked_at") or shown["evidence"].get("looked_at")
        return 1 if note is None else int(note.split("this is calibration ")[1].split()[0])

    pairs = [("--primary-column", name, "--guardian-column", "expert") for name in ("qwen15b", "qwen05b", "smollm2")]
    assert [count("log.parquet", *pair) for pair in pairs] == [1, 2, 3]
    rng, n = np.random.default_rng(0), 200
    grades = {"primary_grade": rng.integers(0, 2, n), "guardian_grade": np.ones(n), "id": [f"r{k}" for k in range(n)]}
    for k in (1, 2):
        ScoreLog.from_router(confidence=rng.random(n), **grades).write(f"routed{k}.parquet")
        assert count(f"routed{k}.parquet") == k
    rows = [
        {"id": f"c{k}"}
        | {f"{name}_confidence": rng.random() for name in "ab"}
        | {f"{name}_grade": float(rng.random() < 0.8) for name in "abg"}
        | {f"{name}_answer": "yes" for name in "ab"}
        | {f"{name}_cost": cost for name, cost in zip("abg", (1, 2, 9), strict=True)}
        for k in range(n)
    ]
    chain = ("--path", "--guardian-column", "g")
    calls = [(1, rows, ()), (1, rows[::-1], ()), (2, rows, ("--models", "b")), (3, rows, ("--chain", "a"))]
    for expected, kept, options in calls:
        Path("chain.jsonl").write_text("\n".join(map(json.dumps, kept)))
        assert count("chain.jsonl", *chain, *options) == expected
