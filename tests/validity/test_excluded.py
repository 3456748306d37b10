"""What a certificate promises once keys are excluded after looking: over all traffic, where the excluded count nothing."""

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate

ALPHA, RUNS, ROWS, FRESH = 0.1, 300, 300, 3000


def traffic(rng, rows):
    """Return key, confidence and loss of the Primary's answer: the second key asks what the Primary gets wrong."""
    key, confidence = rng.integers(0, 2, rows), rng.random(rows)
    return key, confidence, (rng.random(rows) < np.where(key == 1, 1 - confidence, 0.02)).astype(float)


def relaxation_of(confidence, loss):
    log = ScoreLog.from_router(confidence=confidence, primary_grade=1 - loss, guardian_grade=np.ones(len(loss)))
    relaxation = calibrate(log, ALPHA).relaxation
    return np.inf if relaxation is None else relaxation


@pytest.fixture(scope="module")
def losses():
    """Mean losses over runs in each of which the key with the smaller loss in the log is excluded."""
    rng, means = np.random.default_rng(28), []
    for _ in range(RUNS):
        key, confidence, loss = traffic(rng, ROWS)
        excluded = int(loss[key == 1].mean() < loss[key == 0].mean())
        kept = key != excluded
        served = [relaxation_of(confidence, loss), relaxation_of(confidence[~kept], loss[~kept])]
        key, confidence, loss = traffic(rng, FRESH)
        covered = key != excluded
        alone = [np.where(confidence > each, loss, 0.0) for each in served]
        means.append([(alone[0] * covered).mean(), alone[0][covered].mean(), (alone[1] * covered).mean()])
    return np.array(means)


def exceeds(means):
    return means.mean() - 3 * means.std() / np.sqrt(RUNS) > ALPHA


def test_the_promise_over_all_traffic_holds_whichever_key_is_excluded_after_looking(losses):
    assert not exceeds(losses[:, 0])


def test_a_promise_for_the_other_keys_alone_and_one_from_rows_chosen_by_looking_are_caught(losses):
    """The planted bugs: the mean over the covered decisions only, and a calibration on the rows of the harmless key."""
    assert exceeds(losses[:, 1])
    assert losses[:, 1].mean() <= ALPHA / 0.5 + 0.01  # the bound that the documentation gives
    assert exceeds(losses[:, 2])
