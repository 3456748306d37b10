"""A learned score keeps the budget on the path that a user takes, and a rule that does not count the query is caught."""

from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate

N, TEST, ALPHA, RUNS = 50, 100, 0.1, 200
KEY = b"k" * 32


def world(rng, run, *, graded):
    """Return rows of two groups, one of which loses far more, with coarse confidences that say little."""
    n = N + TEST
    hard = rng.random(n) < 0.4
    confidence = np.round(np.where(hard, rng.random(n), rng.random(n) ** 0.7), 1) + 0.05
    lost = np.where(rng.random(n) < np.where(hard, 0.55, 0.12), rng.random(n) if graded else 1.0, 0.0)
    return ScoreLog.from_router(
        confidence=confidence,
        primary_grade=1 - lost,
        guardian_grade=np.ones(n),
        id=[f"{run}-{k}" for k in range(n)],
        group=np.where(hard, "hard", "easy"),
    ), lost


def losses(*, graded, planted=False):
    """Return the mean loss on new rows of one certificate after another."""
    rng, means = np.random.default_rng(1), []
    for run in range(RUNS):
        log, lost = world(rng, run, graded=graded)
        certificate = calibrate(log.select(range(N)), ALPHA, boundary="random", key=KEY, score="auto")
        if planted:
            lenient = replace(certificate.fit, budget=certificate.fit.budget + 1)
            certificate = replace(certificate, fit=lenient)
        kept = ~certificate.apply(log.select(range(N, N + TEST))).deferred
        means.append((lost[N:] * kept).mean())
    return np.array(means)


@pytest.mark.parametrize("graded", [False, True])
def test_a_learned_score_keeps_the_budget(graded):
    means = losses(graded=graded)
    assert means.mean() <= ALPHA + 3 * means.std() / RUNS**0.5
    assert means.mean() > 0.8 * ALPHA, "and spends it"


def test_a_query_that_is_not_counted_as_a_loss_breaks_the_budget():
    means = losses(graded=False, planted=True)
    assert means.mean() > ALPHA + 3 * means.std() / RUNS**0.5
