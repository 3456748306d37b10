import json
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from benchmarks.mapie_rule import mapie_rule
from click.testing import CliRunner

from conformal_arbitrage import OptionError, ScoreLog, calibrate, compare
from conformal_arbitrage.calibration.secret import draw
from conformal_arbitrage.cli import cli
from conformal_arbitrage.evaluation import compare as rules
from conformal_arbitrage.evaluation.compare import RULES, RuleRows

MAPIE = Path(__file__).resolve().parents[2] / ".venv-mapie" / "bin" / "python"
OURS = ("ours, margin", "ours, learned score", "ours, net loss")


def router_log(n=1200, *, seed=0, binary=True):
    rng = np.random.default_rng(seed)
    confidence = rng.integers(1, 20, n) / 20
    primary = (rng.random(n) < 0.3 + 0.6 * confidence).astype(float)
    guardian = (rng.random(n) < 0.85).astype(float)
    return ScoreLog.from_router(
        confidence=confidence, primary_grade=primary if binary else primary / 2, guardian_grade=guardian,
        id=[str(i) for i in range(n)], group=["even" if i % 2 else "odd" for i in range(n)],
        context=[f"question {i} about {'stars' if i % 3 else 'stones'}" for i in range(n)],
    )  # fmt: skip


def rows_of(log, *, n=None):
    """Return rows as rules see them, with draws of their own."""
    rng = np.random.default_rng(1)
    margin, loss = log.primary[1::2], 1 - log.guardian[1::2]
    correct = log.outcome("correct").reshape(-1, 2)
    return RuleRows(
        margin=margin, u=rng.random(len(margin)), loss=loss, net=correct[:, 0] - correct[:, 1],
        features=np.column_stack([np.ones(len(margin)), margin]), penalties=np.array([0.001, 0.1]),
        n=len(margin) if n is None else n,
    )  # fmt: skip


@pytest.fixture(scope="module")
def comparison():
    return compare(router_log(), [0.05, 0.1], calibration_size=300, splits=40, seed=3)


def test_every_rule_is_measured_at_every_budget(comparison):
    assert [rule.rule for rule in comparison.rules] == 2 * [rule.name for rule in RULES]
    assert comparison.left_out == {}
    assert comparison.test_size == 900
    assert repr(comparison) == "RuleComparison(source='arrays given to from_router', rules=15, splits=40, n=1200)"


def test_ours_keep_the_budget_and_a_threshold_fitted_to_its_own_rows_does_not_beat_them_honestly(comparison):
    by_name = {rule.rule: rule for rule in comparison.rules if rule.alpha == 0.05}
    assert not any(by_name[name].breaks for name in OURS)
    assert by_name["ours, margin"].loss == pytest.approx(0.05, abs=0.006)
    assert by_name["ours, net loss"].net_loss == pytest.approx(0.05, abs=0.008)
    assert by_name["ours, net loss"].deferred < by_name["ours, margin"].deferred
    assert by_name["ours, margin"].deferred < by_name["conformal gate"].deferred < by_name["random routing"].deferred
    assert by_name["conformal gate"].over <= 0.3
    assert by_name["ours, margin"].loss < by_name["RouteLLM-like"].loss


def test_on_the_bundled_log_no_rule_that_promises_the_loss_and_keeps_it_asks_less_than_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("log.parquet").write_bytes((files("conformal_arbitrage") / "data" / "science.parquet").read_bytes())
    call = ["compare", "log.parquet", "--primary-column", "qwen15b", "--guardian-column", "expert", "--alpha", "0.05"]
    document = CliRunner().invoke(cli, [*call, "--splits", "12", "--json"])
    shares = {
        rule["rule"]: rule["deferred"]
        for rule in json.loads(document.stdout)["rules"]
        if rule["promises_loss"] and not rule["breaks"]
    }
    ours = {name: shares.pop(name) for name in OURS[:2]}
    assert shares.keys() == {
        "conformal gate", "conformal gate, among kept", "CSE", "CSE, among kept", "CRC on a grid of 0.01",
    }  # fmt: skip
    assert min(ours.values()) < min(shares.values())


def test_the_rule_that_asks_least_is_computed_whoever_it_is(comparison):
    least = comparison.least_asking(0.05)
    assert least.rule in OURS[:2]
    assert f"{least.rule!r} asks the Guardian least ({100 * least.deferred:.1f} %)." in " ".join(comparison.notes())
    others = [rule if rule.rule != "CSE" else replace(rule, deferred=0.0) for rule in comparison.rules]
    assert "At alpha 0.05, among the rules that promise the loss and keep it here, 'CSE' asks" in " ".join(
        replace(comparison, rules=tuple(others)).notes()
    )
    broken = replace(comparison, rules=tuple(replace(rule, breaks=True) for rule in comparison.rules))
    assert broken.least_asking(0.05) is None
    assert "asks the Guardian least" not in " ".join(broken.notes())


def test_our_rule_on_the_margin_is_that_of_calibrate():
    log = router_log(300)
    certificate = calibrate(log, 0.1, boundary="random", key=b"0123456789abcdef")
    rows = replace(rows_of(log), u=1 - np.array([draw(certificate.secret(), str(i)) for i in range(300)]))
    kept = rules.ours_margin(rows, rows, 0.1)
    assert (kept == ~certificate.apply(log).deferred).all()


def test_the_table_and_the_notes_say_what_is_promised(comparison):
    header, rows = comparison.table()
    assert len(header) == 6
    assert all(len(row) == 6 for row in rows)
    notes = " ".join(comparison.notes())
    assert "RouteLLM-like: promises nothing: the threshold is fitted to the rows it is judged on." in notes
    assert "ours, margin: promises expected loss at most alpha." in notes
    assert "<table" in comparison._repr_html_()
    priced = compare(router_log(), [0.1], splits=3, calibration_size=300, primary_cost=1, guardian_cost=20)
    assert priced.table()[0][-1] == "$ per 1000"
    for rule in priced.rules:
        first = 1000 * (1 - rule.deferred) if "before asking" in rule.rule else 1000
        assert rule.cost_per_1000 == pytest.approx(first + 20_000 * rule.deferred), rule.rule


def test_the_figure_draws_one_budget(comparison):
    axes = comparison.plot(alpha=0.1)
    assert len(axes.patches) == len(RULES)
    with pytest.raises(OptionError, match=r"no budget 0\.2 in this comparison; it has 0\.05, 0\.1"):
        comparison.plot(alpha=0.2)


def test_rules_that_do_not_fit_the_log_are_left_out_with_the_reason():
    graded = compare(router_log(binary=False), [0.1], splits=2, calibration_size=300)
    assert "ours, learned score" in graded.left_out
    assert "left out, it needs losses of 0 or 1" in " ".join(graded.notes())
    rng = np.random.default_rng(0)
    ungraded = ScoreLog.from_arrays(rng.random((600, 3)), np.eye(3)[rng.integers(0, 3, 600)])
    lines = compare(ungraded, [0.2], splits=2, menu_size=3, progress=[].append).left_out
    assert lines == {
        "ours, net loss": "it needs to know which answers were right",
    }


def test_what_cannot_be_compared_is_refused():
    rng = np.random.default_rng(0)
    scores = rng.random((600, 3))
    with pytest.raises(OptionError, match="menu_size=4, but some rows have other sizes"):
        compare(ScoreLog.from_arrays(scores, scores), [0.1], menu_size=4, splits=2)
    with pytest.raises(OptionError, match=r"needs losses in \[0, 1\]"):
        compare(ScoreLog.from_arrays(scores, 5 * scores), [0.1], splits=2)
    with pytest.raises(OptionError, match="every alpha must lie above 0 and below 1"):
        compare(router_log(), [1.5], splits=2)
    missing = ScoreLog.from_arrays(scores, np.where(np.arange(600)[:, None] < 3, np.nan, scores))
    with pytest.raises(OptionError, match="3 rows without a loss"):
        compare(missing, [0.1], splits=2)


def test_unknown_outcomes_leave_the_net_loss_out():
    log = router_log()
    primary = log.outcome("correct").reshape(-1, 2).copy()
    primary[5, 0] = np.nan
    some = ScoreLog.from_arrays(log.primary.reshape(-1, 2), log.guardian.reshape(-1, 2), outcomes={"correct": primary})
    assert "ours, net loss" in compare(some, [0.1], splits=2).left_out


def test_rules_keep_nothing_that_they_cannot_afford_and_everything_that_costs_nothing():
    few = rows_of(router_log(8))
    for keeps in (rules.ours_margin, rules.ours_net, rules.crc_on_a_grid, rules.cse_among_kept):
        assert not keeps(few, few, 0.05).any(), keeps
    free = replace(rows_of(router_log(300)), loss=np.zeros(300), net=None)
    for rule in RULES:
        if "C3PO" not in rule.name and "AutoMix" not in rule.name:
            assert rule.keeps(free, free, 0.05).mean() > 0.9, rule.name
    costly = replace(free, loss=np.ones(300), margin=np.full(300, 0.99))
    assert not rules.automix_like(replace(costly, margin=np.full(300, 2.0)), costly, 0.05).any()
    assert not rules.ucci_like(costly, costly, 0.05).any()


def test_the_command_prints_a_table_json_and_a_figure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    router_log().write("log.parquet")
    call = ["compare", "log.parquet", "--alpha", "0.1", "--splits", "4", "--calibration-size", "300"]
    shown = CliRunner().invoke(cli, [*call, "--plot", "compare.png"])
    assert shown.exit_code == 0, shown.output
    assert "ours, net loss" in shown.output
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    document = CliRunner().invoke(cli, [*call, "--json"])
    assert '"rule": "ours, margin"' in document.stdout


@pytest.mark.skipif(not MAPIE.exists(), reason="MAPIE has an environment of its own: make .venv-mapie/.installed")
def test_mapie_and_our_grid_agree():
    with mapie_rule(str(MAPIE)) as rule:
        sizes = {"calibration_size": 300, "test_size": 200}
        comparison = compare(router_log(), [0.1], splits=3, rules=(*RULES, rule), **sizes)
    by_name = {rule.rule: rule for rule in comparison.rules}
    theirs, ours = by_name["CRC on a grid of 0.01, MAPIE"], by_name["CRC on a grid of 0.01"]
    assert theirs.deferred == pytest.approx(ours.deferred, abs=0.01)


def test_a_python_without_mapie_is_refused_with_the_remedy(tmp_path):
    with (
        pytest.raises(OptionError, match=r"MAPIE cannot be used there .*No module named 'mapie'.*venv-mapie"),
        mapie_rule(sys.executable),
    ):
        pass
    with pytest.raises(OptionError, match="cannot be run"), mapie_rule(str(tmp_path / "python")):
        pass
