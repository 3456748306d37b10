from fractions import Fraction

import numpy as np
import pytest

from conformal_arbitrage import OptionError
from conformal_arbitrage.core.chains import PathStop, calibrate_path, policies_of, rounded_losses


def world(rng, n, policies, values):
    return rng.choice(values, (policies, n)), rng.random(n)


def losses_at(stop, losses, u):
    """Return the loss of every row under the policy that decides it."""
    return np.vstack([np.zeros(len(u), np.int64), losses])[policies_of(stop, u), np.arange(len(u))]


def left_out_sum(losses, u, alpha, stop_of):
    """Return the sum over rows of their loss where the walk over all other rows stops."""
    total = 0
    for j in range(len(u)):
        others = np.arange(len(u)) != j
        stop = stop_of(losses[:, others], u[others], alpha)
        total += int(losses_at(stop, losses[:, [j]], u[[j]])[0])
    return total


def exact(losses, u, alpha):
    return calibrate_path(losses, u, alpha=alpha)


def last_passage(losses, u, alpha):
    """Plant the furthest position whose own sum keeps the budget."""
    limit, best = alpha * (len(u) + 1) - 1, None
    draws = [*sorted(u.tolist()), 1.0]
    for stop in [PathStop(place, draw) for place in range(1, len(losses) + 1) for draw in draws]:
        if losses_at(stop, losses, u).sum() <= limit:
            best = stop
    return best


def without_bound(losses, u, alpha):
    """Plant a budget that leaves no room for the query."""
    return calibrate_path(losses, u, alpha=alpha + Fraction(1, len(u) + 1))


@pytest.mark.parametrize("values", [(0, 1), (-1, 0, 1)])
@pytest.mark.parametrize("policies", [1, 2, 3])
@pytest.mark.parametrize("logs", [40, pytest.param(400, marks=pytest.mark.proof)])
def test_on_every_set_of_rows_the_left_out_losses_sum_to_at_most_the_budget(values, policies, logs):
    rng = np.random.default_rng(policies)
    for _ in range(logs):
        n, alpha = int(rng.integers(5, 22)), Fraction(int(rng.integers(1, 5)), 10)
        assert left_out_sum(*world(rng, n, policies, values), alpha, exact) <= alpha * n


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
        calibrate_path(np.array([[-2, 0, 1]]), np.zeros(3), alpha=Fraction(1, 2))
    with pytest.raises(OptionError, match="losses have the shape"):
        calibrate_path(np.zeros((3, 2), dtype=int), np.zeros(3), alpha=Fraction(1, 2))


def test_one_policy_and_no_gains_is_conformal_risk_control():
    losses, u = world(np.random.default_rng(5), 60, 1, (0, 1))
    stop = calibrate_path(losses, u, alpha=Fraction(1, 5))
    kept = policies_of(stop, u) == 1
    assert stop.position == 1
    assert losses[0, kept].sum() <= Fraction(61, 5) - 1
    following = np.flatnonzero(~kept)[np.argmin(u[~kept])]
    assert losses[0, kept].sum() + losses[0, following] > Fraction(61, 5) - 1


def test_a_budget_below_one_loss_asks_the_guardian_always_and_no_loss_never():
    losses, u = np.zeros((2, 3), dtype=int), np.array([0.1, 0.2, 0.3])
    assert calibrate_path(losses, u, alpha=Fraction(1, 10)) is None
    assert policies_of(None, u).tolist() == [0, 0, 0]
    free = calibrate_path(losses, u, alpha=Fraction(1, 2))
    assert free == PathStop(2, 1.0)
    assert policies_of(free, u).tolist() == [2, 2, 2]


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
