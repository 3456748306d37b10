"""The interval of `assess` covers the long-run loss of a certificate; the usual normal interval does not."""

from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, assess, calibrate
from conformal_arbitrage.calibration.promises import Average
from tests.validity.simulation import World, regret
from tests.validity.test_clusters import LARGEST, draw, log_of

pytestmark = pytest.mark.proof
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


def coverage_by_cluster(*, planted=False):
    """Return how often the interval covers the loss per query over many clusters, and the standard error."""
    rng, times, clusters = np.random.default_rng(5), 1500, 40
    certificate = calibrate(log_of(*draw(rng, 200)), 0.1, cluster="group", max_cluster_size=LARGEST)
    margin, loss, _ = draw(rng, 200_000)
    truth = (loss * (margin > certificate.relaxation)).mean()
    if planted:  # rows as if they were independent
        certificate = replace(certificate, promise=Average(alpha=certificate.alpha))
    intervals = [
        assess(certificate, log_of(*draw(rng, clusters)), confidence=CONFIDENCE).interval for _ in range(times)
    ]
    share = float(np.mean([low <= truth <= high for low, high in intervals]))
    return share, (share * (1 - share) / times) ** 0.5


def test_the_interval_by_clusters_covers_the_long_run_loss_per_query():
    share, error = coverage_by_cluster()
    assert share >= CONFIDENCE - 3 * error, share


def test_an_interval_that_counts_rows_of_clusters_is_caught():
    share, error = coverage_by_cluster(planted=True)
    assert share < CONFIDENCE - 3 * error, share
