"""One certificate's long-run loss: how often it lies above alpha, and by how much, as certificates say."""

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate

pytestmark = pytest.mark.proof
ALPHA, ROWS, TIMES = 0.1, 400, 2000


def long_run_losses(boost=0.0):
    """Return the exact long-run loss of many certificates: the loss is 1 with probability 1 - margin, margins uniform."""
    rng, losses = np.random.default_rng(6), []
    for _ in range(TIMES):
        margin = rng.random(ROWS)
        lost = rng.random(ROWS) >= margin
        primary = np.column_stack([margin, np.zeros(ROWS)])
        log = ScoreLog.from_arrays(primary, np.column_stack([~lost, lost]).astype(float))
        threshold = calibrate(log, ALPHA + boost).relaxation
        losses.append((1 - threshold) ** 2 / 2)
    return np.array(losses)


def shares(losses):
    """Return the share of certificates above alpha, and of those above it by more than one standard deviation."""
    spread = (ALPHA * (1 - ALPHA) / ROWS) ** 0.5
    return (losses > ALPHA).mean(), (losses > ALPHA + spread).mean()


def test_about_half_of_all_certificates_lie_above_alpha_and_one_in_six_by_more_than_a_standard_deviation():
    above, far = shares(long_run_losses())
    error = 3 * (0.25 / TIMES) ** 0.5
    assert above <= 0.5 + error, above
    assert far <= 1 / 6 + error, far
    assert above > 0.35  # and it is not rare: the certificate has to say so


def test_a_budget_that_is_overspent_is_caught():
    assert shares(long_run_losses(boost=0.01))[0] > 0.5 + 3 * (0.25 / TIMES) ** 0.5
