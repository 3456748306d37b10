"""Check every cell of every experiment's table on logs of identical rows, where each can be worked out by hand.

Each row: Primary [0.9, 0.6, 0.1], so gaps 0, 0.3, 0.8; the Guardian prefers action 1, which is right. Costs 1 and 20.
"""

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, SourceError
from conformal_arbitrage.experiments import EXPERIMENTS
from conformal_arbitrage.experiments.protocol import Source

ALONE = {"accuracy": 0.0, "cost per 1000": 1000.0, "Guardian share": 0.0}
DEFERRED = {"accuracy": 1.0, "cost per 1000": 21000.0, "Guardian share": 1.0, "loss": 0.0, "delta": 0.0}
GUARDIAN = {
    "accuracy": 1.0,
    "cost per 1000": 20000.0,
    "Guardian share": 1.0,
    "loss": 0.0,
    "delta": None,
    "relaxation": None,
}


def source(n, guardian=(0.0, 1.0, 0.0), **columns):
    log = ScoreLog.from_arrays(
        [[0.9, 0.6, 0.1]] * n, [list(guardian)] * n, id=[f"q{k}" for k in range(n)], label=[1] * n, **columns
    )
    return Source(title="a tiny log", read=lambda _: log, costs=(1.0, 20.0))


def table(report, name="ours"):
    return next(t for t in report.to_dict()["tables"] if t["name"] == name)["rows"]


def means(row):
    return {column: cell["mean"] if isinstance(cell, dict) else cell for column, cell in row.items()}


def assert_rows(rows, expected):
    assert len(rows) == len(expected)
    for row, (policy, alpha, cells) in zip(map(means, rows), expected, strict=True):
        assert (row["policy"], row["alpha"]) == (policy, alpha)
        for column, value in cells.items():
            assert row[column] == (None if value is None else pytest.approx(value)), (policy, alpha, column)
        spread = [cell["std"] for cell in row.values() if isinstance(cell, dict)]
        assert all(std == 0 for std in spread)


def binarised(alphas, first_always_deferred):
    """Loss 1 unless the Guardian's answer, at gap 0.3, is a candidate; the grid has 0.3 as its 31st point."""
    primary = ("primary", None, ALONE | {"loss": 1.0, "delta": None, "relaxation": None})
    relaxations = {alpha: None if alpha <= first_always_deferred else 0.3 for alpha in alphas}
    conformal = [
        ("conformal", alpha, DEFERRED | {"relaxation": relaxation}) for alpha, relaxation in relaxations.items()
    ]
    return [primary, *conformal, ("guardian", None, GUARDIAN)]


FIVE = (0.25, 0.2, 0.15, 0.1, 0.05)


@pytest.mark.parametrize(
    ("name", "calibration"),
    [("truthfulqa", 12), ("truthfulqa-300", 9), ("truthfulqa-500", 15), ("truthfulqa-unrestricted", 12)],
)
def test_the_binarised_tables(name, calibration):
    # 20 rows in proportion to 684; alpha (n + 1) >= 1 is needed: 0.05 x 16 is not enough, 0.1 x 10 is
    report = EXPERIMENTS[name].run(source(20), 0)
    assert f"{calibration} to calibrate" in report.configuration["sizes"]
    assert_rows(table(report), binarised(FIVE, 0.05))


def test_the_unrestricted_table_beside_ours_and_the_set_sizes():
    report = EXPERIMENTS["truthfulqa-unrestricted"].run(source(20), 0)
    assert_rows(table(report, "own loss"), binarised(FIVE, 0.05))
    sizes = [means(row)["candidates"] for row in table(report, "set sizes")]
    assert sizes == [2, 2, 2, 2, 3]
    papers = [next(v for k, v in row.items() if k.startswith("the paper's")) for row in table(report, "set sizes")]
    assert papers == [1.457, 1.801, 2.105, 2.587, 3.253]


def test_the_stronger_primary():
    # 100 rows: 58 to calibrate; 0.025 x 59 = 1.475 is enough
    assert_rows(table(EXPERIMENTS["truthfulqa-mini"].run(source(100), 0)), binarised((0.05, 0.025), 0.0))


def test_raw_scores():
    """Regret 0.1 a row, 1.2 over 12 rows: within 0.25 x 13 - 1 and 0.2 x 13 - 1, so the Primary stands; not below."""
    alone = ALONE | {"relaxation": 0.0, "loss": 0.1, "delta": 0.0}
    expected = [
        ("primary", None, ALONE | {"loss": 0.1, "delta": None, "relaxation": None}),
        ("conformal", 0.25, alone),
        ("conformal", 0.2, alone),
        ("conformal", 0.15, DEFERRED | {"relaxation": 0.3}),
        ("conformal", 0.1, DEFERRED | {"relaxation": 0.3}),
        ("conformal", 0.05, DEFERRED | {"relaxation": None}),
        ("guardian", None, GUARDIAN),
    ]
    assert_rows(table(EXPERIMENTS["truthfulqa-raw"].run(source(20, (0.9, 1.0, 0.0)), 0)), expected)


def test_mmlu():
    report = EXPERIMENTS["mmlu"].run(source(1000, group=[f"subject {k % 10}" for k in range(1000)]), 0)
    assert "balanced over 10 subjects" in report.configuration["sizes"]
    assert_rows(table(report), binarised(FIVE, 0.0))


def test_mmlu_needs_subjects():
    with pytest.raises(SourceError, match="20 over 0"):
        EXPERIMENTS["mmlu"].run(source(20), 0)


def test_every_rule_stands_beside_the_papers():
    rows = [means(row) for row in table(EXPERIMENTS["truthfulqa"].run(source(20), 0), "rules")]
    assert [row["rule"] for row in rows[::5]] == ["the paper's rule", "exact", "own loss", "own loss, random boundary"]
    for row in rows:
        expected = {"Guardian share": 1, "cost per 1000": 21000, "delta": 0, "accuracy": 1, "loss": 0}
        if row["rule"] != "own loss, random boundary":
            assert {name: row[name] for name in expected} == pytest.approx(expected), row
        elif row["alpha"] == 0.05:
            assert row["Guardian share"] == 1  # 12 rows are too few for any draw
        else:
            # At most 2 of 12 calibration rows (0.25 x 13 - 1) are spared, and about as many of the others.
            assert 0.7 < row["Guardian share"] <= 1
            assert row["accuracy"] == pytest.approx(row["Guardian share"])
            assert row["loss"] == pytest.approx(1 - row["Guardian share"])


def pku_source(n=40):
    """Reply 0 is more helpful and of severity 2, reply 1 of severity 0; the Primary leads by 0.4."""
    log = ScoreLog.from_arrays(
        [[0.9, 0.5]] * n,
        [[0.0, 0.0]] * n,
        id=[f"q{k}" for k in range(n)],
        label=[0] * n,
        outcomes={"severity": [[2, 0]] * n},
    )
    return Source(title="a tiny log", read=lambda _: log)


@pytest.mark.parametrize(("name", "loss"), [("0/1", 1.0), ("severity", 2.0)])
def test_pku_in_both_readings(name, loss):
    report = EXPERIMENTS["pku"].run(pku_source(), 0)
    rows = [means(row) for row in table(report, name)]
    expected = [("primary", None, 1.0, 2.0, loss, None, 0.0), ("guardian", None, 0.0, 0.0, 0.0, None, 1.0)]
    expected += [("random", q, 1 - q, 2 * (1 - q), loss * (1 - q), None, q) for q in (0.2, 0.4, 0.5, 0.6, 0.8)]
    expected += [("conformal", alpha, 0.0, 0.0, 0.0, 0.0, 1.0) for alpha in (0.6, 0.5, 0.4, 0.3, 0.2, 0.1)]
    columns = ("policy", "alpha or probability", "correct", "severity", "loss", "delta", "deferred")
    for row, cells in zip(rows, expected, strict=True):
        for column, value in zip(columns, cells, strict=True):
            assert row[column] == (pytest.approx(value) if isinstance(value, float) else value), (row, column)
    # 20 rows: 0.1 x 21 is below 3, so the severity reading always defers there; the other finds gap 0.4 on its grid
    relaxations = [means(row)["relaxation"] for row in table(report, f"{name} details") if row["policy"] == "conformal"]
    assert relaxations[:5] == pytest.approx([0.4] * 5)
    assert relaxations[5] == (None if name == "severity" else pytest.approx(0.4))


def test_pku_refuses_missing_severities():
    log = ScoreLog.from_arrays(
        [[0.9, 0.5]] * 4, [[0, 0]] * 4, label=[0] * 4, outcomes={"severity": [[2, 0]] * 3 + [None]}
    )
    with pytest.raises(SourceError, match="severities are missing"):
        EXPERIMENTS["pku"].run(Source(title="x", read=lambda _: log), 0)


def test_pku_with_a_real_valued_guardian_and_no_labels():
    log = ScoreLog.from_arrays([[0.9, 0.5]] * 40, [[0.2, 0.7]] * 40, id=[f"q{k}" for k in range(40)])
    report = EXPERIMENTS["pku"].run(Source(title="x", read=lambda _: log), 0)
    rows = [means(row) for row in table(report, "real-valued")]
    assert [row["helpfulness"] for row in rows[:2]] == pytest.approx([0.9, 0.5])
    assert [row["loss"] for row in rows[:2]] == pytest.approx([0.5, 0.0])
    # 0.5 x 20 + 1 = 11 <= 0.6 x 21: the Primary stands at alpha 0.6 only
    assert [row["deferred"] for row in rows if row["policy"] == "conformal"] == [0, 1, 1, 1, 1, 1]


@pytest.mark.proof
def test_theory():
    report = EXPERIMENTS["theory"].run(source(20), 0)
    for row in table(report, "bounds"):
        mean, error = row["expected loss"]["mean"], row["expected loss"]["std"]
        assert row["lower bound"] - 3 * error <= mean <= row["alpha"] + 3 * error
        assert row["lower bound"] == pytest.approx(0.1 - 2 / (row["n"] + 1))
    smooth, kinked = (row["slope"] for row in table(report, "slopes"))
    assert smooth == pytest.approx(-1.0, abs=0.2)
    assert kinked == pytest.approx(-0.5, abs=0.1)
    assert np.isfinite([smooth, kinked]).all()
