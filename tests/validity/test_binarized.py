"""A right answer that is unknown counts as the worst case: taken for wrong, as it once was, the budget breaks."""

from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, ScoreLogError, calibrate
from tests.validity.simulation import keeps

pytestmark = pytest.mark.proof
N, ALPHA, TIMES, FRESH = 60, 0.1, 800, 200


def draw(rng, n):
    """Return scores of both models, and whether each action is right: the Guardian's top one is in four of five."""
    primary, guardian = rng.random((n, 3)), rng.random((n, 3))
    label = (0.5 * primary + rng.normal(size=(n, 3))).argmax(axis=1)
    guardian[np.arange(n), label] += rng.random(n) < 0.7
    return primary, guardian / 2, np.eye(3)[label]


def unlabelled(rng, correct):
    """Leave three rows in ten without a known right answer."""
    return np.where(rng.random((len(correct), 1)) < 0.3, np.nan, correct)


def graded(rng, correct):
    """Give a right answer 0.95 instead of 1, as a judge does that is never quite content."""
    return 0.95 * correct


def taken_for_wrong(log):
    """Plant the old rule: whatever is not exactly 1 is wrong, and a wrong Guardian has nothing to lose."""
    top = log.guardian.reshape(-1, 3).argmax(axis=1) + log.offsets[:-1]
    binary = np.zeros(len(log.guardian))
    binary[top] = log.outcome("correct")[top] == 1
    return replace(log, binary=binary)


def expected_loss(known, binarize, sees, **options):
    """Return the mean of "the Guardian is right and its answer not in sight" over logs and queries, and its error."""
    rng, means = np.random.default_rng(11), []
    for _ in range(TIMES):
        primary, guardian, correct = draw(rng, N)
        log = ScoreLog.from_arrays(primary, guardian, outcomes={"correct": known(rng, correct)})
        certificate = calibrate(binarize(log), ALPHA, guardian_sees=sees, **options)
        primary, guardian, correct = draw(rng, FRESH)
        kept = certificate.apply(ScoreLog.from_arrays(primary)).candidate.reshape(primary.shape)
        if sees == "all":
            kept = kept | (kept.sum(axis=1, keepdims=True) > 1)
        top = np.arange(FRESH), guardian.argmax(axis=1)
        means.append((correct[top] * ~kept[top]).mean())
    return float(np.mean(means)), float(np.std(means, ddof=1) / TIMES**0.5)


@pytest.mark.parametrize("sees", ["candidates", "all"])
def test_unknown_right_answers_in_the_worst_case_keep_the_budget(sees):
    measured = expected_loss(unlabelled, ScoreLog.binarized, sees, missing_guardian="worst_case")
    assert keeps(ALPHA, measured), measured


@pytest.mark.parametrize("sees", ["candidates", "all"])
@pytest.mark.parametrize(("known", "least"), [(unlabelled, 0.13), (graded, 0.35)])
def test_taking_an_unknown_or_partial_answer_for_wrong_is_caught(known, least, sees):
    measured = expected_loss(known, taken_for_wrong, sees)
    assert not keeps(ALPHA, measured), measured
    assert measured[0] > least


def test_unknown_answers_are_an_error_unless_the_worst_case_is_asked_for():
    primary, guardian, correct = draw(np.random.default_rng(0), N)
    correct[7] = np.nan
    log = ScoreLog.from_arrays(primary, guardian, outcomes={"correct": correct}).binarized()
    with pytest.raises(ScoreLogError, match=r"row 8: `correct` of the Guardian's answer is unknown \(1 of 60 rows\)"):
        calibrate(log, ALPHA)
    certificate = calibrate(log, ALPHA, missing_guardian="worst_case")
    assert certificate.evidence.missing_guardian_rows == 1
    assert "unknown whether its top answer is right" in certificate.guarantee
