from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conformal_arbitrage import OptionError, RiskCurve, ScoreLog, ScoreLogError
from tests import paper

SEES = ("candidates", "all")


@st.composite
def tables(draw, *, max_digits=4, max_actions=5, widths=None):
    """Rows of decimal scores full of ties: whole numbers of 10^-digits."""
    digits = draw(st.integers(1, max_digits))
    sizes = draw(st.lists(st.integers(1, max_actions), min_size=1, max_size=12)) if widths is None else widths
    steps = draw(st.sampled_from([2, 5, 10**digits]))
    unit = Fraction(10**digits // steps if steps < 10**digits else 1, 10**digits)
    rows = [draw(st.lists(st.integers(0, steps), min_size=k, max_size=k)) for k in sizes]
    return [[unit * v for v in row] for row in rows]


def floats(rows):
    return [[float(v) for v in row] for row in rows]


def sizes(rows):
    return [len(row) for row in rows]


@st.composite
def problems(draw):
    """Scores of both models, a bound, and an alpha that is often exactly at a tie."""
    primary = draw(tables())
    bound = draw(st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(3), Fraction(10)]))
    guardian = [[bound * v for v in row] for row in draw(tables(widths=sizes(primary)))]
    sees = draw(st.sampled_from(SEES))
    point = draw(st.sampled_from(sorted({Fraction(0), *(g for row in primary for g in paper.gaps(row))})))
    exact_tie = (paper.total(primary, guardian, point, sees) + bound) / (len(primary) + 1)
    nudge = draw(st.sampled_from([Fraction(0), Fraction(-1, 10**9), Fraction(1, 10**9), Fraction(1, 7)]))
    alpha = exact_tie + nudge
    assume(0 < alpha < bound)
    return primary, guardian, alpha, bound, sees


def same(relaxation, expected):
    return np.isnan(relaxation) if expected is None else relaxation == float(expected)


@given(problems())
def test_the_relaxation_is_the_papers_to_the_bit(problem):
    primary, guardian, alpha, bound, sees = problem
    curve = RiskCurve.from_log(ScoreLog.from_arrays(floats(primary), floats(guardian)), guardian_sees=sees)
    assert same(curve.relaxation(alpha, bound), paper.relaxation(primary, guardian, alpha, bound, sees))


@given(problems(), st.integers(0, 12_000))
def test_the_curve_is_the_papers_total_everywhere(problem, tenthousandths):
    primary, guardian, _, _, sees = problem
    point = Fraction(tenthousandths, 10_000)
    curve = RiskCurve.from_log(ScoreLog.from_arrays(floats(primary), floats(guardian)), guardian_sees=sees)
    assert curve.total(float(point)) == float(paper.total(primary, guardian, point, sees))
    assert curve.mean(float(point)) == pytest.approx(float(paper.total(primary, guardian, point, sees)) / len(primary))


@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_rows_and_actions_does_not_matter(problem, random):
    primary, guardian, alpha, bound, sees = problem
    pairs = [random.sample(list(zip(p, g, strict=True)), len(p)) for p, g in zip(primary, guardian, strict=True)]
    random.shuffle(pairs)
    shuffled = [[[pair[k] for pair in row] for row in pairs] for k in (0, 1)]
    curves = [
        RiskCurve.from_log(ScoreLog.from_arrays(floats(p), floats(g)), guardian_sees=sees)
        for p, g in ((primary, guardian), shuffled)
    ]
    assert np.array_equal(curves[0].breakpoints, curves[1].breakpoints)
    assert np.array_equal(curves[0].totals, curves[1].totals)
    assert same(curves[1].relaxation(alpha, bound), paper.relaxation(primary, guardian, alpha, bound, sees))


@given(problems(), st.sampled_from([0, 1, -7, 1000, 10**6, -(10**6)]), st.integers(0, 13))
def test_offsets_and_scales_of_primary_scores_do_not_matter(problem, offset, shrink):
    primary, guardian, alpha, bound, sees = problem
    assume(offset == 0 or shrink == 0)
    factor = Fraction(1, 10**shrink)
    moved = [[factor * v + offset for v in row] for row in primary]
    curve = RiskCurve.from_log(ScoreLog.from_arrays(floats(moved), floats(guardian)), guardian_sees=sees)
    assert same(curve.relaxation(alpha, bound), paper.relaxation(moved, guardian, alpha, bound, sees))


@given(problems())
def test_single_precision_scores_give_the_same_rule(problem):
    primary, guardian, alpha, bound, sees = problem
    single = [np.array(row, dtype=np.float32) for row in floats(primary)]
    log = ScoreLog.from_arrays(single, floats(guardian))
    assert log.score_digits == 6
    curve = RiskCurve.from_log(log, guardian_sees=sees)
    assert same(curve.relaxation(alpha, bound), paper.relaxation(primary, guardian, alpha, bound, sees))


@given(problems())
def test_own_loss_never_needs_a_larger_relaxation(problem):
    primary, guardian, alpha, bound, _ = problem
    log = ScoreLog.from_arrays(floats(primary), floats(guardian))
    own, restricted = (RiskCurve.from_log(log, guardian_sees=s).relaxation(alpha, bound) for s in ("all", "candidates"))
    assert np.isnan(own) == np.isnan(restricted)
    assert np.isnan(own) or own <= restricted


@given(problems(), st.sampled_from(["0.01", "0.25", "0.3", 0.0025]))
def test_a_grid_takes_its_first_point_within_the_budget(problem, step):
    primary, guardian, alpha, bound, sees = problem
    exact_step = Fraction(str(step))
    points = [i * exact_step for i in range(int(1 / exact_step) + 1)]
    kept = [x for x in points if paper.total(primary, guardian, x, sees) + bound <= alpha * (len(primary) + 1)]
    curve = RiskCurve.from_log(ScoreLog.from_arrays(floats(primary), floats(guardian)), guardian_sees=sees)
    assert same(curve.on_grid(step).relaxation(alpha, bound), min(kept, default=None))


def test_many_alphas_are_answered_at_once():
    log = ScoreLog.from_arrays([[0.9, 0.5], [0.6, 0.4], [0.7, 0.1]], [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    curve = RiskCurve.from_log(log, guardian_sees="candidates")
    assert curve.breakpoints.tolist() == [0.0, 0.2, 0.4]
    assert curve.totals.tolist() == [2 * 10**12, 10**12, 0]
    assert curve.relaxation(np.array(0.25)) == curve.relaxation(0.25) == 0.4
    assert curve.relaxation(np.array([0.25], dtype=np.float32)).tolist() == [0.4]
    relaxations = curve.relaxation([0.24, 0.25, "0.5", 0.75])
    assert np.isnan(relaxations[0])
    assert relaxations[1:].tolist() == [0.4, 0.2, 0.0]


def test_equality_is_accepted_although_floats_would_reject_it():
    # ten losses of 0.1 sum to 0.9999999999999999 in floats, and 0.1 (10 + 1) is 1.1
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 9, [[0.3, 0.4]] * 9)
    curve = RiskCurve.from_log(log, guardian_sees="candidates")
    assert curve.exact_total(0) == Fraction(9, 10)
    assert curve.relaxation("0.19", 1) == 0.0
    assert curve.relaxation("0.189999999999", 1) == 0.8


def test_ticks_grow_and_losses_are_rounded_up_if_sums_would_overflow():
    rng = np.random.default_rng(0)
    guardian = np.round(rng.random((50, 3)) * 4e6, 12)
    log = ScoreLog.from_arrays(rng.random((50, 3)), guardian)
    curve = RiskCurve.from_log(log, guardian_sees="candidates")
    assert curve.tick_digits == 10
    top, choice = guardian.max(axis=1), guardian[np.arange(50), log.primary.reshape(50, 3).argmax(axis=1)]
    exact_loss = sum(Fraction(float(a)) - Fraction(float(b)) for a, b in zip(top, choice, strict=True))
    assert 0 <= curve.exact_total(0) - exact_loss <= Fraction(51, 10**10)


def test_guardian_scores_too_large_for_exact_sums_are_refused_with_a_remedy():
    with pytest.raises(ScoreLogError, match="divide them"):
        RiskCurve.from_log(ScoreLog.from_arrays([[0.1, 0.2]], [[0.0, 1e9]]), guardian_sees="candidates")


def test_a_bound_is_never_silently_one():
    log = ScoreLog.from_arrays([[0.1, 0.2]] * 50, [[0.0, -3.0]] * 50)
    with pytest.raises(OptionError, match="loss_bound"):
        RiskCurve.from_log(log, guardian_sees="candidates").relaxation(0.5)
    assert RiskCurve.from_log(log, guardian_sees="candidates").relaxation(0.5, 3) == 0.1


def test_a_loss_above_the_bound_names_its_row():
    log = ScoreLog.from_arrays([[0.1, 0.2]] * 3, [[0.0, 0.0], [2.5, 0.0], [0.0, 0.0]])
    with pytest.raises(ScoreLogError, match=r"row 2: the loss is 2\.5"):
        RiskCurve.from_log(log, guardian_sees="candidates").relaxation(0.5, 2)


@pytest.mark.parametrize("alpha", [0, -0.1, 1, 1.5, float("nan"), float("inf"), "x", None, True])
def test_an_alpha_outside_its_range_is_refused(alpha):
    curve = RiskCurve.from_log(ScoreLog.from_arrays([[0.1, 0.2]], [[0.0, 1.0]]), guardian_sees="candidates")
    with pytest.raises(OptionError, match="alpha"):
        curve.relaxation(alpha)


@pytest.mark.parametrize("step", [0, -1, 1.5, "x", 1e-9])
def test_a_grid_step_outside_its_range_is_refused(step):
    curve = RiskCurve.from_log(ScoreLog.from_arrays([[0.1, 0.2]], [[0.0, 1.0]]), guardian_sees="candidates")
    with pytest.raises(OptionError, match="grid"):
        curve.on_grid(step)


def test_a_grid_does_not_go_with_draws():
    log = ScoreLog.from_arrays([[0.1, 0.2]], [[0.0, 1.0]])
    with pytest.raises(OptionError, match="drop one of the two"):
        RiskCurve.from_log(log, u=np.array([0.5]), guardian_sees="candidates").on_grid(0.1)


def test_a_negative_relaxation_has_no_total():
    curve = RiskCurve.from_log(ScoreLog.from_arrays([[0.1, 0.2]], [[0.0, 1.0]]), guardian_sees="candidates")
    with pytest.raises(OptionError, match="0 or more"):
        curve.total(-0.1)


def test_any_object_with_the_arrays_is_accepted():
    class Arrays:
        primary = np.array([0.9, 0.1])
        guardian = loss_scores = np.array([0.0, 1.0])
        offsets = np.array([0, 2])
        missing = unknown_loss = np.array([False])
        score_digits = 12
        source = "mine"

        def row(self, index):
            raise AssertionError(index)

    assert RiskCurve.from_log(Arrays(), guardian_sees="candidates").breakpoints.tolist() == [0.0, 0.8]
