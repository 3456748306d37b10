"""calibrate --path, and verify, apply and certificate show for the certificates of cascades."""

import json
from pathlib import Path

import duckdb
import numpy as np
import pytest

from tests.cascades import world
from tests.cli import test_cli

run = test_cli.run


@pytest.fixture
def log(run, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", "a-long-random-text-for-these-tests")
    world(np.random.default_rng(0), 500).write("cascade.parquet")
    return "cascade.parquet"


def test_a_cascade_is_calibrated_shown_verified_and_applied(run, log):
    shown = run("calibrate", log, "--path", "--alpha", "0.1", "-o", "c.json").stdout
    assert "a longer chain pays" in " ".join(shown.split())
    assert "Written: c.json" in shown
    assert "holds" in run("verify", "c.json", log).stdout
    assert "one promise for the whole cascade" in " ".join(
        run("certificate", "show", "c.json", "--full").stdout.split()
    )
    assert json.loads(run("certificate", "show", "c.json", "--json").stdout)["rule"]["type"] == "path"
    applied = json.loads(run("apply", "c.json", log, "--json", "-o", "d.jsonl").stdout)
    assert applied["rows"] == sum(applied["answered_by"].values()) == 500
    assert "answered by" in run("apply", "c.json", log, "-o", "d.jsonl").stdout
    answered = {json.loads(line)["answered_by"] for line in Path("d.jsonl").read_text().splitlines()}
    assert answered <= {"small", "middle", "large", "guardian"}


def test_rows_are_decided_without_grades_and_without_the_guardian(run, log):
    run("calibrate", log, "--path", "--alpha", "0.1", "-o", "c.json")
    kept = "columns('id|(small|middle|large)_(confidence|cost|answer)')"
    duckdb.sql(f"select {kept} from 'cascade.parquet'").write_parquet("new.parquet")
    whole, fewer = (json.loads(run("apply", "c.json", name, "--json").stdout) for name in (log, "new.parquet"))
    assert fewer["answered_by"] == whole["answered_by"]
    assert fewer["cost"] == pytest.approx(whole["cost"])
    assert "no column 'guardian_grade'" in run("calibrate", "new.parquet", "--path", "--alpha", "0.1", code=2).stderr


def test_rows_that_would_ask_a_model_that_nobody_asked_are_counted(run, log):
    run("calibrate", log, "--path", "--alpha", "0.1", "-o", "c.json")
    fields = ("confidence", "cost", "grade", "answer")
    never = ", ".join(f"null as {name}_{field}" for name in ("small", "middle", "large") for field in fields)
    duckdb.sql(f"select * replace ({never}) from 'cascade.parquet'").write_parquet("never.parquet")
    assert "would ask a model that nobody asked there" in run("apply", "c.json", "never.parquet").stderr
    assert "nobody asked" not in run("apply", "c.json", log).stderr


def test_a_model_whose_confidence_is_called_otherwise_is_not_left_out_silently(run, log):
    duckdb.sql("select * rename (small_confidence as small_sure) from 'cascade.parquet'").write_parquet("odd.parquet")
    said = run("calibrate", "odd.parquet", "--path", "--alpha", "0.1", code=2).stderr
    assert "there is no column 'small_confidence', which model 'small' needs" in said
    assert "leave the model out with --models" in said


def test_what_differs_is_named_in_a_line(run, log):
    run("calibrate", log, "--path", "--alpha", "0.1", "-o", "c.json")
    duckdb.sql("select * replace (1 - small_confidence as small_confidence) from 'cascade.parquet'").write_parquet(
        "x.parquet"
    )
    lines = run("verify", "c.json", "x.parquet", code=1).stderr.splitlines()
    assert any("chain differs" in line and line.endswith("recomputed") for line in lines)
    assert max(map(len, lines)) < 700


def test_the_certificate_of_another_cascade_is_overwritten_by_force_only(run, log):
    run("calibrate", log, "--path", "--alpha", "0.1", "-o", "c.json")
    other = ("calibrate", log, "--path", "--alpha", "0.05", "-o", "c.json")
    assert "overwrite it with --force" in run(*other, code=2).stderr
    run(*other, "--force")
    assert json.loads(Path("c.json").read_text())["promise"]["alpha"] == 0.05


def test_chain_models_loss_and_split_can_be_chosen(run, log):
    document = json.loads(
        run("calibrate", log, "--path", "--alpha", "0.1", "--loss", "net", "--chain", "small, middle", "--seed", "4",
            "--tuning-share", "0.5", "--json").stdout
    )  # fmt: skip
    assert document["rule"]["chain"]["models"] == ["small", "middle"]
    assert document["loss"]["type"] == "net"
    assert tuple(document["rule"]["tuning"][name] for name in ("seed", "rows", "fixed")) == (4, 250, True)
    fewer = json.loads(run("calibrate", log, "--path", "--alpha", "0.1", "--models", "small,large", "--json").stdout)
    assert {name for one in fewer["rule"]["tuning"]["estimates"] for name in one["models"]} == {"small", "large"}
    assert "Written" not in run("calibrate", log, "--path", "--alpha", "0.1", "--chain", "small").stdout


def test_held_out_trials_show_cost_and_loss(run, log):
    arguments = ("evaluate", log, "--path", "--alpha", "0.1", "--calibration-size", "300", "--trials", "3")
    shown = run(*arguments, "--chain", "small,middle").stdout
    assert "small > middle (3)" in shown
    assert "3 trials" in shown
    document = json.loads(run(*arguments, "--loss", "net", "--models", "small,large", "--json").stdout)
    assert (document["trials"], document["calibration_size"], document["test_size"]) == (3, 300, 200)
    assert sum(document["points"][0]["chains"].values()) == 3
    assert "not with --csv" in run(*arguments, "--csv", code=2).stderr
    assert "--plot" not in run(*arguments, "--chain", "small").stdout
    assert "--figure has no meaning" in run(*arguments, "--plot", "f.png", code=2).stderr
    looked = json.loads(run("calibrate", log, "--path", "--alpha", "0.1", "--chain", "small", "--json").stdout)
    assert "evaluate" in looked["looked_at"]


def test_the_log_of_a_cascade_is_recognised_by_other_commands(run, log):
    assert "read it with calibrate --path" in run("inspect", log, code=2).stderr
    assert "calibrate --path" not in run("inspect", "log.parquet", code=2).stderr


def test_another_log_does_not_verify(run, log):
    run("calibrate", log, "--path", "--alpha", "0.1", "--chain", "small", "-o", "c.json")
    world(np.random.default_rng(1), 500).write("other.parquet")
    assert "log_sha256 differs" in run("verify", "c.json", "other.parquet", code=1).stderr
    world(np.random.default_rng(1), 500, skills={"small": 0.5}).write("less.parquet")
    assert "cannot have been made from less.parquet" in run("verify", "c.json", "less.parquet", code=1).stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--path", "--confidence", "0.9"], "confidence and path do not go together"),
        (["--path", "--dial"], "dial and path do not go together"),
        (["--path", "--by", "group"], "groups and path do not go together"),
        (["--path", "--binarize"], "--binarize has no meaning for a cascade"),
        (["--path", "--boundary", "include"], "--boundary has no meaning for a cascade"),
        (["--chain", "small"], "--chain describes a cascade; add --path"),
        (["--path", "--guardian-column", "best"], "there is no column 'best_grade'"),
        (["--path", "--models", "tiny"], "no column 'tiny_confidence'"),
    ],
)
def test_options_without_meaning_or_proof_are_refused(run, log, options, message):
    assert message in run("calibrate", log, "--alpha", "0.1", *options, code=2).stderr


def test_too_few_rows_are_told_how_many_it_takes(run, log):
    world(np.random.default_rng(0), 60).write("few.parquet")
    few = run("calibrate", "few.parquet", "--path", "--alpha", "0.02", "--chain", "small", "-o", "c.json")
    assert "at least 49 rows are needed besides" in few.stderr


def test_other_certificates_can_be_shown_too(run, log):
    run("calibrate", "log.parquet", "--alpha", "0.1", *test_cli.PAIR, "-o", "plain.json")
    assert "at most 0.1" in run("certificate", "show", "plain.json").stdout
