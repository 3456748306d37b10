"""Over many decisions under one certificate the mean loss lies in the stated range; a range without its luck is caught."""

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.core.bounds import next_range
from tests.validity.test_monitoring import most

pytestmark = pytest.mark.proof
RUNS, ROWS, ALPHA = 400, 300, 0.1


def world(rng, n):
    """Margins without ties, and whether the Primary is wrong, the more often the smaller its margin is."""
    margin = rng.random(n)
    return margin, rng.random(n) < 0.5 * (1 - margin)


def certified(rng):
    """The relaxation of a calibration on fresh rows, whose losses are 0 or 1."""
    margin, wrong = world(rng, ROWS)
    primary = np.stack([(1 + margin) / 2, (1 - margin) / 2], axis=1)
    guardian = np.stack([~wrong, wrong], axis=1).astype(float)
    log = ScoreLog.from_arrays(primary.tolist(), guardian.tolist())
    return calibrate(log, ALPHA, zero_one=True).relaxation


def test_the_range_of_many_decisions_under_one_certificate_holds():
    rng = np.random.default_rng(11)
    low, high = next_range(ROWS, ALPHA, ROWS)
    deviation = 1.96 * np.sqrt(ALPHA * (1 - ALPHA) / ROWS)  # as if every certificate had a long-run loss of alpha
    outside = naive = 0
    for _ in range(RUNS):
        relaxation = certified(rng)
        margin, wrong = world(rng, ROWS)
        mean = (wrong & (margin > relaxation)).mean()
        outside += not low <= mean <= high
        naive += abs(mean - ALPHA) > deviation
    assert outside <= most(0.05, RUNS)
    assert naive > most(0.05, RUNS)
