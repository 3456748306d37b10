import numpy as np
import pytest

from conformal_arbitrage.calibration.certificate import margin_quantiles
from conformal_arbitrage.monitoring.monitor import Guard, guarded_threshold

GUARD = Guard(alpha=0.05, base=0.4)


def test_the_share_follows_its_recursion_and_never_falls_below_the_base():
    losses = (np.random.default_rng(0).random(2000) < 0.08).astype(float)
    rho, expected = GUARD.base, []
    for loss in losses:
        rho = max(GUARD.base, rho + GUARD.step * (loss - GUARD.alpha))
        expected.append(rho)
    shares = GUARD.shares(losses)
    assert shares == pytest.approx(expected, abs=1e-9)
    assert shares.min() >= GUARD.base
    level, one_by_one = 0, []
    for loss in losses:
        level = GUARD.next_level(level, loss)
        one_by_one.append(GUARD.share(level))
    assert np.array_equal(shares, one_by_one)
    assert np.array_equal(shares[:700], GUARD.shares(losses[:700]))
    assert GUARD.excess_bound(3) == pytest.approx(0.62 / 0.02 + 3)


def test_quantiles_defer_at_least_their_share():
    rng = np.random.default_rng(1)
    margins, u = rng.integers(0, 20, 333) / 20, rng.random(333)
    for draws in (None, u):
        for k, threshold in enumerate(margin_quantiles(margins, draws)):
            below = margins < threshold[0]
            at = (margins == threshold[0]) & (True if draws is None else u <= threshold[1])
            assert (below | at).mean() >= k / 1000 - 1e-12


def test_the_larger_threshold_is_in_force():
    quantiles = margin_quantiles(np.arange(1, 1001) / 1000, np.linspace(0, 0.999, 1000))
    assert guarded_threshold(0.4, (0.4, 0.9), quantiles) == (0.4, 0.9)
    assert guarded_threshold(0.5, (0.4, 0.9), quantiles)[0] == 0.5
    assert guarded_threshold(0.5, (0.4, None), margin_quantiles(np.arange(1, 1001) / 1000)) == (0.5, None)
    assert guarded_threshold(1.0, (0.4, 0.9), quantiles) is None


def test_a_menu_of_one_action_has_no_finite_margin():
    quantiles = margin_quantiles(np.array([0.1, np.inf, np.inf, np.inf]))
    assert quantiles[250] == (0.1, None)
    assert quantiles[251] is None
    assert guarded_threshold(0.6, (0.1, None), quantiles) is None
