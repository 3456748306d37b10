"""calibrate --confidence, --dial and --by, and certificate choose."""

import json
from pathlib import Path

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog
from tests.certificates import said
from tests.cli import test_cli

run = test_cli.run

SECRET = "a-long-random-text-for-these-tests"


@pytest.fixture
def log(run):
    rng = np.random.default_rng(0)
    margin = rng.random(700)
    lost = rng.random(700) < 0.3 * (1 - margin)
    ScoreLog.from_arrays(
        np.stack([margin, np.zeros(700)], axis=1),
        np.stack([~lost, np.ones(700)], axis=1).astype(float),
        id=[f"q{k}" for k in range(700)],
        group=rng.choice(["a", "b"], 700),
    ).write("sure.parquet")
    return "sure.parquet"


def test_a_confidence_is_calibrated_with_and_without_draws(run, log):
    arguments = ("calibrate", log, "--alpha", "0.05", "--confidence", "0.95")
    run(*arguments, "--zero-one", "-o", "c.json")
    shown = run(*arguments, "-o", "graded.json").stdout
    assert "with probability 0.95 the long-run loss" in shown
    for name in ("c.json", "graded.json"):
        assert "holds" in run("verify", name, log).stdout
    run("apply", "graded.json", log)
    few = ScoreLog.read(log).select(range(30))
    few.write("few.parquet")
    deferring = run("calibrate", "few.parquet", "--alpha", "0.05", "--confidence", "0.95", "--zero-one")
    assert "at least 59 rows" in deferring.stderr


def test_a_dial_is_set_in_place_and_signed_again(run, log, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    options = ("--alpha", "0.05", "--confidence", "0.9", "--zero-one", "--dial")
    run("calibrate", log, *options, "-o", "dial.json")
    choosing = run("certificate", "choose", "dial.json", "--alpha", "0.12")
    assert "0.12 is not a stop of this dial (" in choosing.stderr
    assert choosing.stderr.endswith("; set to 0.1\n")
    shown = choosing.stdout
    assert "set to 0.1" in shown
    assert "Written: dial.json" in shown
    document = json.loads(Path("dial.json").read_text())
    assert (said(document, "alpha"), document["signature"] is not None) == (0.1, True)
    assert "holds" in run("verify", "dial.json", log).stdout
    chosen = json.loads(run("certificate", "choose", "dial.json", "--alpha", "0.2", "-o", "x.json", "--json").stdout)
    assert said(chosen, "alpha") == 0.2
    assert said(json.loads(Path("dial.json").read_text()), "alpha") == 0.1
    assert "lowest stop" in run("certificate", "choose", "dial.json", "--alpha", "0.001", code=2).stderr
    monkeypatch.delenv("ARBITRAGE_SECRET")
    assert "signed with another secret" in run("certificate", "choose", "dial.json", "--alpha", "0.05", code=2).stderr


def test_groups_are_calibrated_applied_and_assessed(run, log):
    shown = run("calibrate", log, "--alpha", "0.05", "--by", "group", "-o", "groups.json").stdout
    assert "group a" in shown
    assert "unknown groups are deferred" in shown
    assert json.loads(run("apply", "groups.json", log, "--json").stdout)["deferred"] < 700
    assert set(json.loads(run("assess", "groups.json", log, "--json").stdout)["groups"]) == {"a", "b"}
    assert "holds" in run("verify", "groups.json", log).stdout


def test_evaluate_takes_a_confidence(run, log):
    arguments = ("evaluate", log, "--alpha", "0.05", "--calibration-size", "400", "--trials", "3", "--json")
    average, sure = (json.loads(run(*arguments, *more).stdout) for more in ((), ("--confidence", "0.95", "--zero-one")))
    deferred = [
        next(point["deferred"]["mean"] for point in document["points"] if point["policy"] == "conformal")
        for document in (average, sure)
    ]
    assert deferred[0] < deferred[1]


def test_plan_says_how_soon_audits_see_a_broken_budget(run):
    arguments = ("plan", "--alpha", "0.05", "--audit-rate", "0.05", "--decisions-per-day", "10000")
    shown = run(*arguments, "--guardian-cost", "0.002").stdout
    assert "500 audits a day take up to 500 calls of the Guardian, $1;" in shown
    assert "5,200" in shown
    document = json.loads(run(*arguments, "--primary-share", "0.5", "--json").stdout)
    assert document["audits"]["guardian_calls_per_day"] == 250
    assert document["audits"]["delays"][2]["decisions"] == 5200
    assert "audits" not in json.loads(run("plan", "--alpha", "0.05", "--json").stdout)
    assert "belong together" in run("plan", "--alpha", "0.05", "--audit-rate", "0.05", code=2).stderr
    assert "audit_rate must lie" in run(*arguments[:-3], "2", *arguments[-2:], code=2).stderr
