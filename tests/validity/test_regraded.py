"""The first grades count: callers who grade their own rows again, where the grades hurt them, would break the budget."""

from types import SimpleNamespace

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.store.events import first_graded
from conformal_arbitrage.store.record import FeedbackBody, Grades
from tests.validity.simulation import keeps

pytestmark = pytest.mark.proof
N, ALPHA, TIMES, FRESH = 100, 0.1, 200, 100


def draw(rng, n):
    """Return confidences and grades: the Primary is right more often the surer it is, the Guardian always is."""
    confidence = rng.random(n)
    return confidence, (rng.random(n) < 0.3 + 0.6 * confidence).astype(float)


def graded(right):
    """Return a record whose caller, once its answer was graded wrong, sends better grades after."""
    grades = [Grades(primary=right, guardian=1.0)] + ([] if right else [Grades(primary=1.0, guardian=1.0)])
    return SimpleNamespace(feedback=[FeedbackBody(grades=both) for both in grades])


def first_grades(record):
    return first_graded(record).grades


def last_grades(record):
    """Plant the old rule."""
    return record.feedback[-1].grades


def expected_loss(counted):
    rng, means = np.random.default_rng(4), []
    for _ in range(TIMES):
        confidence, right = draw(rng, N)
        grades = [counted(graded(one)) for one in right]
        log = ScoreLog.from_router(
            confidence=confidence,
            primary_grade=[both.primary for both in grades],
            guardian_grade=[both.guardian for both in grades],
        )
        certificate = calibrate(log, ALPHA)
        confidence, right = draw(rng, FRESH)
        relaxation = np.inf if certificate.relaxation is None else certificate.relaxation
        means.append(((confidence > relaxation) * (1 - right)).mean())
    return float(np.mean(means)), float(np.std(means, ddof=1) / TIMES**0.5)


def test_the_first_grades_keep_the_budget():
    assert keeps(ALPHA, expected_loss(first_grades))


def test_letting_the_last_grade_win_is_caught():
    measured = expected_loss(last_grades)
    assert not keeps(ALPHA, measured), measured
