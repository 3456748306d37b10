from fractions import Fraction

import numpy as np
import pytest

from conformal_arbitrage import OptionError
from conformal_arbitrage.core.chains import GUARDIAN, PathStop, calibrate_path, path_choice, rounded_losses


def world(rng, n, models, values):
    entries = rng.integers(1, 6, (n, models)).astype(float)
    entries[rng.random((n, models)) < 0.2] = np.inf
    return entries, rng.choice(values, (n, models)), rng.random(n)


def left_out_sum(entries, losses, u, alpha, stop_of):
    """Return the sum over rows of their loss where the walk over all other rows stops."""
    total = 0
    for j in range(len(u)):
        others = np.arange(len(u)) != j
        stop = stop_of(entries[others], losses[others], u[others], alpha)
        model = path_choice(entries[[j]], u[[j]], stop)[0]
        total += 0 if model == GUARDIAN else int(losses[j, model])
    return total


def exact(entries, losses, u, alpha):
    return calibrate_path(entries, losses, u, alpha=alpha)


def last_passage(entries, losses, u, alpha):
    """Plant the cheapest position whose own sum keeps the budget."""
    limit, best = alpha * (len(u) + 1) - 1, None
    keys = sorted({(float(e), float(d)) for row, d in zip(entries, u, strict=True) for e in row if np.isfinite(e)})
    for key in [*keys, (np.inf, 0.0)]:
        stop = PathStop(*key)
        chosen = path_choice(entries, u, stop)
        if sum(int(losses[i, m]) for i, m in enumerate(chosen) if m != GUARDIAN) <= limit:
            best = stop
    return best


def without_bound(entries, losses, u, alpha):
    """Plant a budget that leaves no room for the query."""
    return calibrate_path(entries, losses, u, alpha=alpha + Fraction(1, len(u) + 1))


@pytest.mark.parametrize("values", [(0, 1), (-1, 0, 1)])
@pytest.mark.parametrize("models", [1, 2, 3])
@pytest.mark.parametrize("logs", [40, pytest.param(400, marks=pytest.mark.proof)])
def test_on_every_set_of_rows_the_left_out_losses_sum_to_at_most_the_budget(values, models, logs):
    rng = np.random.default_rng(models)
    for _ in range(logs):
        n, alpha = int(rng.integers(5, 22)), Fraction(int(rng.integers(1, 5)), 10)
        assert left_out_sum(*world(rng, n, models, values), alpha, exact) <= alpha * n


@pytest.mark.parametrize("broken", [last_passage, without_bound])
def test_broken_walks_violate_the_inequality(broken):
    rng, violations = np.random.default_rng(4), 0
    for _ in range(150):
        rows = world(rng, 18, 2, (-1, 0, 1))
        violations += left_out_sum(*rows, Fraction(1, 5), broken) > Fraction(18, 5)
        if violations > 5:
            return
    pytest.fail(f"only {violations} violations")


def test_losses_below_minus_the_bound_are_refused_since_they_break_the_proof():
    with pytest.raises(OptionError, match="losses of -1, 0 or 1"):
        calibrate_path(np.ones((3, 1)), np.array([[-2], [0], [1]]), np.zeros(3), alpha=Fraction(1, 2))
    for entry in (-np.inf, np.nan):
        with pytest.raises(OptionError, match="got NaN or -inf"):
            calibrate_path(np.full((3, 1), entry), np.zeros((3, 1), dtype=int), np.zeros(3), alpha=Fraction(1, 2))
    with pytest.raises(OptionError, match="shapes"):
        calibrate_path(np.ones((3, 1)), np.zeros((3, 2), dtype=int), np.zeros(3), alpha=Fraction(1, 2))


def test_one_model_and_no_gains_is_conformal_risk_control():
    rng = np.random.default_rng(5)
    entries, losses, u = world(rng, 60, 1, (0, 1))
    stop = calibrate_path(entries, losses, u, alpha=Fraction(1, 5))
    kept = path_choice(entries, u, stop) == 0
    assert losses[kept].sum() <= Fraction(61, 5) - 1
    keys = zip(entries[:, 0].tolist(), u.tolist(), losses[:, 0].tolist(), strict=True)
    following = sorted(key for key in keys if key[:2] >= (stop.position, stop.u))
    assert losses[kept].sum() + following[0][2] > Fraction(61, 5) - 1


def test_a_budget_below_one_loss_asks_the_guardian_always_and_no_loss_never():
    entries, u = np.array([[1.0, 2.0], [np.inf, 1.0], [np.inf, np.inf]]), np.array([0.1, 0.2, 0.3])
    assert calibrate_path(entries, np.zeros((3, 2), dtype=int), u, alpha=Fraction(1, 10)) is None
    assert path_choice(entries, u, None).tolist() == [GUARDIAN] * 3
    free = calibrate_path(entries, np.zeros((3, 2), dtype=int), u, alpha=Fraction(1, 2))
    assert free == PathStop(float("inf"), 0.0)
    assert path_choice(entries, u, free).tolist() == [0, 1, GUARDIAN]


def test_rounding_by_a_draw_keeps_the_expectation():
    rng = np.random.default_rng(6)
    losses = np.tile([[0.3, -0.6]], (40_000, 1))
    rounded = rounded_losses(losses, rng.random(40_000))
    assert set(np.unique(rounded)) == {-1, 0, 1}
    assert rounded.mean(axis=0) == pytest.approx([0.3, -0.6], abs=0.01)
    with pytest.raises(OptionError, match=r"must lie in \[-1, 1\]"):
        rounded_losses(np.array([[1.5]]), np.zeros(1))
    with pytest.raises(OptionError, match=r"must lie in \[-1, 1\]"):
        rounded_losses(np.array([[np.nan]]), np.zeros(1))
