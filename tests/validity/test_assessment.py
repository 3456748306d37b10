"""The interval of `assess` covers the long-run loss of a certificate; the usual normal interval does not."""

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, assess, calibrate
from tests.validity.simulation import World, regret

TIMES, ROWS, CONFIDENCE = 2000, 60, 0.9
WORLDS = {"0/1": World(one_hot=True), "graded": World()}


def normal(losses):
    """Plant the textbook interval: mean plus or minus 1.645 standard errors."""
    half = 1.645 * losses.std(ddof=1) / len(losses) ** 0.5
    return losses.mean() - half, losses.mean() + half


def coverage(name, *, planted=False):
    """Return how often the interval of one certificate covers its long-run loss, and the standard error."""
    world, rng = WORLDS[name], np.random.default_rng(2)
    primary, guardian, _ = world.draw(rng, 400)
    certificate = calibrate(ScoreLog.from_arrays(primary, guardian), 0.02)

    def losses(primary, guardian):
        kept = certificate.apply(ScoreLog.from_arrays(primary)).candidate.reshape(primary.shape)
        return regret(guardian, kept, sees_all=True)

    truth = losses(*world.draw(rng, 400_000)[:2]).mean()
    hits = 0
    for _ in range(TIMES):
        primary, guardian, _ = world.draw(rng, ROWS)
        if planted:
            low, high = normal(losses(primary, guardian))
        else:
            low, high = assess(certificate, ScoreLog.from_arrays(primary, guardian), confidence=CONFIDENCE).interval
        hits += low <= truth <= high
    share = hits / TIMES
    return share, (share * (1 - share) / TIMES) ** 0.5


@pytest.mark.parametrize("name", WORLDS)
def test_the_interval_covers_the_long_run_loss(name):
    share, error = coverage(name)
    assert share >= CONFIDENCE - 3 * error, share


@pytest.mark.parametrize("name", WORLDS)
def test_the_normal_interval_is_caught(name):
    share, error = coverage(name, planted=True)
    assert share < CONFIDENCE - 3 * error, share
