from fractions import Fraction

import numpy as np
import pytest

from conformal_arbitrage import InfeasibleError, OptionError, RiskCurve, ScoreLog, ScoreLogError, calibrate, evaluate
from conformal_arbitrage.core.risk import as_fraction

LOG = ScoreLog.from_arrays(
    [[0.9, 0.6, 0.3], [0.5, 0.5, 0.1], [0.7]], [[0.2, 0.5, 1.0], [0.1, 0.3, 0.9], [0.4]], label=[2, 2, 0]
)


def regret(row, sight):
    return max(row.guardian) - max(row.guardian[sight])


@pytest.mark.parametrize("sees", ["candidates", "all", "all-restricted-loss"])
def test_the_guardian_regret_written_by_a_user_gives_the_same_curve(sees, science):
    rows = science.select(range(200))
    own = RiskCurve.from_log(rows, guardian_sees=sees, loss=regret)
    built_in = RiskCurve.from_log(rows, guardian_sees=sees)
    assert np.array_equal(own.breakpoints, built_in.breakpoints)
    assert np.array_equal(own.totals, built_in.totals)
    assert own.envelope_excess == 0


def test_a_user_loss_sees_the_row_and_the_actions_in_sight():
    seen = []

    def loss(row, sight):
        seen.append((row.index, row.label, sight.tolist()))
        return 0.0

    RiskCurve.from_log(LOG, loss=loss, guardian_sees="candidates")
    assert sorted(seen) == [
        (0, 2, [0]), (0, 2, [0, 1]), (0, 2, [0, 1, 2]), (1, 2, [0]), (1, 2, [0, 1]), (1, 2, [0, 1, 2]), (2, 0, [0]),
    ]  # fmt: skip


def test_with_everything_shown_a_user_loss_sees_one_action_or_all():
    seen = []
    RiskCurve.from_log(LOG, guardian_sees="all", loss=lambda row, sight: seen.append((row.index, len(sight))) or 0.0)
    assert sorted(seen) == [(0, 1), (0, 3), (1, 1), (1, 3), (2, 1)]


def test_a_rising_loss_is_raised_to_its_envelope_and_the_excess_reported():
    log = ScoreLog.from_arrays([[0.9, 0.6, 0.3]], [[0, 0, 0]])
    curve = RiskCurve.from_log(
        log, loss=lambda row, sight: {1: 0.2, 2: 0.7, 3: 0.1}[len(sight)], guardian_sees="candidates"
    )
    assert [float(curve.exact_total(k)) for k in range(len(curve.totals))] == [0.7, 0.1]
    assert curve.breakpoints.tolist() == [0.0, 0.6]
    assert curve.envelope_excess == pytest.approx(0.5)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_loss_outside_its_range_names_the_row(value):
    with pytest.raises(ScoreLogError, match=r"row 2: the loss is .* \[0, loss_bound\]"):
        RiskCurve.from_log(LOG, loss=lambda row, sight: value if row.index == 1 else 0.0, guardian_sees="candidates")


def test_a_loss_above_the_bound_is_refused_with_its_row():
    with pytest.raises(ScoreLogError, match=r"row 3: the loss is 1\.5, above the bound 1"):
        calibrate(
            LOG, 0.5, loss=lambda row, sight: 1.5 if row.index == 2 else 0.0, loss_bound=1, guardian_sees="candidates"
        )


def test_a_user_loss_above_its_declared_value_in_full_sight_is_refused_with_its_row():
    with pytest.raises(
        ScoreLogError, match=r"row 2: the loss is 0\.05 with every action in sight, above the declared 0;"
    ):
        calibrate(LOG, 0.1, loss=lambda row, sight: 0.05 * (row.index == 1), loss_bound=1, guardian_sees="candidates")
    declared = calibrate(
        LOG, 0.1, loss=lambda row, sight: 0.05, loss_bound=1, full_sight_loss=0.05, guardian_sees="candidates"
    )
    assert declared.status == "always_defer"


def test_a_user_loss_that_is_zero_with_everything_in_sight_may_always_defer():
    certificate = calibrate(LOG, 0.1, loss=regret, loss_bound=1, guardian_sees="candidates")
    assert certificate.status == "always_defer"
    assert certificate.loss.name == "regret"
    assert "The loss is then 0: so it was declared" in certificate.guarantee


@pytest.mark.parametrize("sees", ["candidates", "all"])
def test_missing_guardian_rows_cost_the_bound_until_everything_is_in_sight(sees):
    log = ScoreLog.from_arrays([[0.9, 0.6, 0.3], [0.5, 0.1, 0.1], [0.7]], [[np.nan] * 3, None, [None]])
    with pytest.raises(ScoreLogError, match="worst_case"):
        RiskCurve.from_log(log, guardian_sees=sees)
    curve = RiskCurve.from_log(log, guardian_sees=sees, missing_loss="0.7")
    assert curve.exact_total(0) == Fraction(14, 10)
    assert curve.breakpoints.tolist() == ([0.0, 0.4, 0.6] if sees == "candidates" else [0.0, 0.3, 0.4])
    assert curve.totals[-1] == 0


def test_missing_guardian_rows_cost_a_user_loss_the_bound_and_in_full_sight_what_was_declared():
    log = ScoreLog.from_arrays([[0.9, 0.6]], [[np.nan] * 2])
    curve = RiskCurve.from_log(log, loss=regret, missing_loss=1, full_sight_loss="0.25", guardian_sees="candidates")
    assert curve.breakpoints.tolist() == [0.0, 0.3]
    assert curve.totals.tolist() == [10**12, 10**12 // 4]


@pytest.mark.parametrize(
    ("value", "decimal"),
    [
        (0.1, "1/10"),
        (np.float64(0.1), "1/10"),
        (np.float32(0.1), "1/10"),
        ("0.30", "3/10"),
        (1, "1"),
        (1e-7, "1/10000000"),
    ],
)
def test_a_number_stands_for_the_decimal_its_user_wrote(value, decimal):
    assert as_fraction(value, name="alpha") == Fraction(decimal)


@pytest.mark.parametrize("value", ["", "a", "1/0", float("nan"), None, [0.1]])
def test_anything_but_a_number_is_refused_by_name(value):
    with pytest.raises(OptionError, match="alpha"):
        as_fraction(value, name="alpha")


def test_losses_too_large_for_exact_sums_are_refused():
    with pytest.raises(OptionError, match="too large for exact sums"):
        calibrate(LOG, 5e6, loss=lambda row, sight: 1e7, loss_bound=2e7, guardian_sees="candidates")


def test_a_user_loss_needs_a_name_of_its_own():
    def guardian_regret(row, sight):
        return 0.0

    with pytest.raises(OptionError, match="rename the function"):
        calibrate(LOG, 0.5, loss=guardian_regret, loss_bound=1, guardian_sees="candidates")


@pytest.mark.parametrize("best", [1, 50])
def test_a_user_loss_states_its_bound_whatever_the_scores(best):
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 9, [[best, 0]] * 9)
    with pytest.raises(OptionError, match="your own loss needs loss_bound="):
        calibrate(log, 0.5, loss=lambda row, sight: 0.0)
    assert calibrate(log, 0.5, loss=lambda row, sight: 0.0, loss_bound=1, guardian_sees="candidates").status == "ok"


def test_a_grid_too_short_for_the_gaps_always_defers():
    far = ScoreLog.from_arrays([[5.0, 0.0]] * 50, [[0, 1]] * 50)
    assert calibrate(far, 0.1, loss=regret, loss_bound=1, grid=0.5, guardian_sees="candidates").status == "always_defer"


def test_evaluation_refuses_a_loss_that_calibration_refuses():
    with pytest.raises(InfeasibleError, match=r"not even deferring every query keeps alpha 0\.2"):
        evaluate(LOG, [0.4, 0.2], loss=lambda row, sight: 0.3, loss_bound=1, full_sight_loss=0.3, calibration_size=2)
    with pytest.raises(ScoreLogError, match="above the declared 0"):
        evaluate(LOG, [0.2], loss=lambda row, sight: 0.05, loss_bound=1, calibration_size=2)


def test_a_bound_of_many_digits_is_not_passed_by_rounding():
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 20, [[0, 1]] * 19 + [None])
    assert (
        calibrate(
            log, 0.5, loss_bound="1.3333333333333", missing_guardian="worst_case", guardian_sees="candidates"
        ).status
        == "ok"
    )


def test_a_loss_that_a_tie_always_avoids_does_not_pass_the_bound():
    log = ScoreLog.from_arrays([[0.5, 0.5]] * 20, [[0, 3]] * 20)
    assert calibrate(log, 0.5, loss_bound=1, guardian_sees="candidates").relaxation == 0
    assert evaluate(log, [0.5], loss_bound=1, calibration_size=10, trials=1).of("conformal")[0].mean("loss") == 0


def test_a_misspelt_option_is_refused_by_the_curve_too():
    with pytest.raises(OptionError, match="guardian_sees"):
        RiskCurve.from_log(LOG, guardian_sees="ALL")
