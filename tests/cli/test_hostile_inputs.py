"""Logs and options at the edge of what there is: every command ends with a document or one line, never with a traceback."""

import json

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog
from tests.cli import test_cli

run = test_cli.run


def write_log(path, *, n=120, tied=False):
    rng = np.random.default_rng(0)
    primary = np.full((n, 3), 1 / 3) if tied else rng.dirichlet(np.ones(3), n)
    right = rng.integers(3, size=n)
    ScoreLog.from_arrays(
        primary,
        np.eye(3)[right],
        id=[f"q{k}" for k in range(n)],
        group=["ab"[k % 2] for k in range(n)],
        context=[f"question {k} of {k % 7}" for k in range(n)],
    ).write(path)
    return path


@pytest.mark.parametrize("options", [("--dial", "--confidence", "0.9"), ("--by", "group")], ids=["dial", "groups"])
def test_differences_between_several_thresholds_are_told_as_json(run, monkeypatch, options):
    monkeypatch.setenv("ARBITRAGE_SECRET", "a-long-random-text-for-these-tests")
    run("calibrate", write_log("one.parquet"), "--alpha", "0.2", *options, "-o", "c.json")
    told = run("verify", "c.json", write_log("other.parquet", n=110), "--json", code=1)
    differences = json.loads(told.stdout)["differences"]
    field = "stops" if "--dial" in options else "groups"
    assert differences[field]["certificate"] != differences[field]["recomputed"]


@pytest.mark.parametrize(("tied", "size"), [(True, 40), (False, 1), (False, 2)])
def test_rules_are_compared_where_nothing_can_be_told_apart(run, tied, size):
    log = write_log("log.parquet", tied=tied)
    told = run("compare", log, "--alpha", "0.1", "--splits", "2", "--calibration-size", size, "--json")
    deferred = {rule["rule"]: rule["deferred"] for rule in json.loads(told.stdout)["rules"]}
    assert all(share == 1 for share in deferred.values()) or not tied


@pytest.mark.parametrize(("option", "value"), [("--decisions-per-day", "inf"), ("--guardian-cost", "nan")])
def test_a_plan_for_impossible_traffic_or_prices_is_refused(run, option, value):
    traffic = {"--decisions-per-day": "1000", "--guardian-cost": "1", option: value}
    refused = run("plan", "--alpha", "0.05", "--audit-rate", "0.05", *sum(traffic.items(), ()), "--json", code=2)
    assert option[2:].replace("-", "_") in refused.stderr


@pytest.mark.parametrize("options", [("--splits", "0"), ("--seed", "-1")])
def test_a_comparison_without_splits_is_refused(run, options):
    refused = run("compare", write_log("log.parquet"), "--alpha", "0.1", "--calibration-size", "20", *options, code=2)
    assert options[0][2:] in refused.stderr
