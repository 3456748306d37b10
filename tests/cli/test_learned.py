"""calibrate --score auto, what reads such a certificate, and certificate show."""

import json
from pathlib import Path

import pytest

from tests.calibration import test_text_embedding as texts
from tests.calibration.test_learned import world
from tests.certificates import said
from tests.cli import test_cli

run = test_cli.run


@pytest.fixture
def log(run, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", "a-long-random-text-for-these-tests")
    world(n=300).write("learned.parquet")
    world(n=200, seed=1).write("new.parquet")
    return "learned.parquet"


def test_a_learned_score_is_calibrated_verified_applied_and_assessed(run, log):
    arguments = ["calibrate", log, "--alpha", "0.1", "--score", "auto", "--menu-size", "3"]
    shown = run(*arguments, "-o", "certificate.json").stdout
    assert "a draw says which" in shown, "the boundary that it needs"
    assert "each decided by the others" in shown
    assert "its arrays: certificate.npz" in shown
    assert Path("certificate.npz").exists()
    assert "nothing differs" in run("verify", "certificate.json", log).stdout
    assert "go to the Guardian" in run("apply", "certificate.json", "new.parquet", "-o", "decisions.jsonl").stdout
    uses = [json.loads(line).get("learned") for line in Path("decisions.jsonl").read_text().splitlines()]
    assert {use["candidate"] for use in uses if use} - {"margin"}
    assert "realised loss" in run("assess", "certificate.json", "new.parquet").stdout
    other = run("verify", "certificate.json", "new.parquet", code=1).stderr
    assert "learned differs" in other


def test_a_certificate_is_shown(run, log):
    run("calibrate", log, "--alpha", "0.1", "--score", "learned", "--without", "tokens", "-o", "certificate.json")
    shown = run("certificate", "show", "certificate.json", "--full").stdout
    assert "none: a learned score decides" in shown
    assert "every row is scored by the fit to all" in shown
    document = json.loads(run("certificate", "show", "certificate.json", "--json").stdout)
    assert said(document, "terms")["features"] == ["margin", "position", "group"]
    Path("certificate.npz").write_bytes(b"other")
    refused = run("certificate", "show", "certificate.json", code=2).stderr
    assert "certificate.npz: is not the file that the certificate was made with" in refused


def test_evaluate_runs_trials_of_a_learned_score(run, log):
    sweep = ["--calibration-size", "150", "--trials", "2", "--score", "auto", "--json"]
    document = json.loads(run("evaluate", log, "--alpha", "0.1", *sweep).stdout)
    conformal = next(point for point in document["points"] if point["policy"] == "conformal")
    assert conformal["boundary"] == "random"
    assert conformal["relaxation"] is None


def test_options_of_a_learned_score_need_one(run, log):
    refused = run("calibrate", log, "--alpha", "0.1", "--menu-size", "3", code=2).stderr
    assert (
        "--menu-size, --group-source, --without, --text and --answers are for a learned score; give --score auto"
        in refused
    )
    net = run("calibrate", log, "--alpha", "0.1", "--score", "auto", "--loss", "net", code=2).stderr
    assert "needs to know which answers were right" in net


def test_learn_writes_the_other_rows_scored(run, log):
    shown = run("learn", log, "--share", "0.4", "-o", "scored.parquet").stdout
    assert "180 rows in router form; 120 were learned from" in shown
    assert "Guardian is asked" in run("calibrate", "scored.parquet", "--alpha", "0.1").stdout
    lines = [
        "class Mine:",
        "    def fit(self, x, y):",
        "        pass",
        "    def predict(self, x):",
        "        return x[:, 1]",
    ]
    Path("own_learner.py").write_text("\n".join(lines))
    document = json.loads(run("learn", log, "--learner", "own_learner:Mine", "-o", "mine.parquet", "--json").stdout)
    assert document == {"learned": 120, "scored": 180}
    assert "would overwrite the input" in run("learn", log, "-o", log, code=2).stderr
    assert "cannot be loaded" in run("learn", log, "--learner", "mine:Other", "-o", "x.parquet", code=2).stderr


def test_texts_are_learned_from_if_asked(run, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", "a-long-random-text-for-these-tests")
    texts.world(200).write("log.parquet")
    run("calibrate", "log.parquet", "--alpha", "0.1", "--score", "auto", "--text", "-o", "certificate.json")
    assert "nothing differs" in run("verify", "certificate.json", "log.parquet").stdout
    run("learn", "log.parquet", "--text", "-o", "scored.parquet")
