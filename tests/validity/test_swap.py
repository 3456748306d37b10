"""A wrong "switch" or "keep" is as rare as stated, however often one looks; what people do instead is caught.

The true loss stands at alpha, where both verdicts are wrong as soon as they come. Every run looks at the questions again and
again while they arrive.
"""

import numpy as np
import pytest

from conformal_arbitrage import swap
from conformal_arbitrage.core.bounds import binomial_cdf, binomial_limit
from tests.validity.test_monitoring import most

LOOKS = (25, 50, 75, 100, 150, 200, 300, 400, 600, 800, 1200)
LEVEL = 0.1
WORLDS = {
    "0/1 regret": ("regret", 0.05, ((1, 0), 0.05), ((0, 1), 0.1)),
    "0/1 net": ("net", 0.05, ((1, 0), 0.1), ((0, 1), 0.05)),
    "graded net": ("net", 0.02, ((1, 0.2), 0.1), ((0.3, 0.9), 0.1)),
    "not worse": ("net", 0.0, ((1, 0), 0.03), ((0, 1), 0.03)),
}
SCALE = "1 to 5"
WORLDS_AND_SCALE = {**WORLDS, SCALE: ("regret", 0.02, ((5, 1), 0.005), ((4, 5), 0.1))}


def drawn(rng, world, n=LOOKS[-1]):
    """Grades of both models whose expected loss is the world's alpha."""
    *_, (first, p), (second, q) = WORLDS_AND_SCALE[world]
    u = rng.random(n)[:, None]
    both = np.where(u < p, np.array(first), np.where(u < p + q, np.array(second), 1.0))
    return both[:, 0], both[:, 1]


def shipped(old, new, loss, alpha):
    return swap(old, new, alpha=alpha, confidence=1 - LEVEL, loss=loss).verdict


def on_its_scale(old, new, loss, alpha):
    return swap(old, new, alpha=alpha, confidence=1 - LEVEL, loss=loss, loss_bound=4).verdict


def as_far_as_seen(old, new, loss, alpha):
    """Plant the largest difference in sight in the place of what the scale allows."""
    seen = max(1.0, float(np.abs(old - new).max()))
    return swap(old, new, alpha=alpha, confidence=1 - LEVEL, loss=loss, loss_bound=seen).verdict


def fixed_size(old, new, loss, alpha):
    """Plant the exact test for a number of rows that was fixed beforehand, asked at every look."""
    worse, n = int((old > new).sum()), len(old)
    if worse <= binomial_limit(n, alpha, LEVEL):
        return "switch"
    return "keep" if 1 - binomial_cdf(worse - 1, n, alpha) <= LEVEL else "not yet"


def half_unknown(old, new, loss, alpha):
    """Plant leaving out ungraded rows, where bad answers of the new model are graded half as often."""
    graded = (new >= old) | (np.arange(len(old)) % 2 == 0)
    return shipped(old[graded], new[graded], loss, alpha)


def verdicts(world, judge, *, runs, seed=0):
    """Return in how many runs each wrong verdict ever came."""
    rng, (loss, alpha, *_) = np.random.default_rng(seed), WORLDS_AND_SCALE[world]
    counts = {"switch": 0, "keep": 0}
    for _ in range(runs):
        old, new = drawn(rng, world)
        seen = {judge(old[:n], new[:n], loss, alpha) for n in LOOKS}
        for verdict in counts:
            counts[verdict] += verdict in seen
    return counts


def test_wrong_verdicts_are_as_rare_as_stated_in_a_small_run():
    assert max(verdicts("0/1 regret", shipped, runs=60).values()) <= most(LEVEL, 60)


def test_peeking_at_a_test_for_a_fixed_number_of_rows_is_caught_in_a_small_run():
    assert max(verdicts("0/1 regret", fixed_size, runs=60).values()) > most(LEVEL, 60)


@pytest.mark.proof
@pytest.mark.parametrize(("world", "judge"), [*((world, shipped) for world in WORLDS), (SCALE, on_its_scale)])
def test_wrong_verdicts_are_as_rare_as_stated(world, judge):
    counts = verdicts(world, judge, runs=2000, seed=1)
    assert max(counts.values()) <= LEVEL * 2000, counts


@pytest.mark.proof
@pytest.mark.parametrize(
    ("world", "planted"), [("0/1 regret", fixed_size), ("0/1 regret", half_unknown), (SCALE, as_far_as_seen)]
)
def test_what_people_do_instead_is_caught(world, planted):
    assert max(verdicts(world, planted, runs=2000, seed=1).values()) > 1.2 * LEVEL * 2000
