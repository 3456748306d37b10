import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli import test_cli
from tests.evaluation.test_simulation import LOG

run = test_cli.run
OPTIONS = ("--alpha", "0.05", "--decisions", "20000", "--confidence", "0.95", "--zero-one", "--seed", "1")


@pytest.fixture
def log(run):
    LOG.write("log.parquet")
    return "log.parquet"


def test_simulate_tells_what_would_have_happened(run, log):
    shown = run("simulate", log, *OPTIONS, "--primary-cost", "0.01", "--guardian-cost", "1", "--plot", "s.png").output
    assert "red after" in shown
    assert "decisions after the change" in shown
    assert "a new certificate from 190 rows since the alarm" in shown
    assert "without monitor, after it" in shown
    assert "Always asking the Guardian would have cost $20,000.00" in shown
    assert Path("s.png").exists()


def test_simulate_prints_one_document(run, log):
    document = json.loads(run("simulate", log, *OPTIONS, "--json").output)
    assert document["delay"] > 0
    assert document["outcomes"]["without"]["all"]["decisions"] == 20000
    assert [moment["kind"] for moment in document["moments"]] == ["change", "red", "renewal"]


def test_quiet_traffic_and_false_alarms_are_told(run, log):
    quiet = run("simulate", log, "--alpha", "0.05", "--decisions", "1000", "--shift", "1").output
    assert "cost" in quiet
    assert "unknown" in quiet
    missed = run("simulate", log, "--alpha", "0.05", "--decisions", "1000", "--shift", "1.1").output
    assert "no alarm until the end" in missed


def test_impossible_scenarios_are_one_line(run, log):
    shown = run("simulate", log, "--alpha", "0.05", "--shift", "999", code=2).stderr
    assert shown.startswith("arbitrage: the loss of this certificate cannot grow 999-fold")


@pytest.mark.parametrize("width", [76, 80, 100])
def test_figures_are_whole_on_a_narrow_terminal(run, log, monkeypatch, width):
    monkeypatch.setattr("conformal_arbitrage.cli.output.console", lambda: Console(width=width, highlight=False))
    shown = run("simulate", log, *OPTIONS, "--primary-cost", "0.01", "--guardian-cost", "1").output
    document = json.loads(
        run("simulate", log, *OPTIONS, "--primary-cost", "0.01", "--guardian-cost", "1", "--json").output
    )
    assert "\u2026" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for span in document["outcomes"]["without"].values():
        assert f"{span['decisions']:,}" in shown
        assert f"{span['loss']:.4f}" in shown
        assert f"${span['cost']:,.2f}" in shown
