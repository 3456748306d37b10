"""A history ends where the monitor stands."""

import numpy as np
import pytest

from conformal_arbitrage.monitoring.lines import watch_lines
from conformal_arbitrage.monitoring.monitor import LedgerCourse, Monitor, ledger_history

LINES = watch_lines(0.05, n=2000, binary=True)
NET = watch_lines(0.05, n=2000, absolute=0.2)


@pytest.mark.parametrize("lines", [LINES, NET], ids=["losses", "net"])
@pytest.mark.parametrize("n", [1, 9, 1000, 70_000])
def test_a_history_ends_where_the_monitor_stands(lines, n):
    rng = np.random.default_rng(n)
    losses = rng.choice([lines.least, 0.0, 1.0], n, p=[0.05, 0.85, 0.1])
    losses[rng.random(n) < 0.05] = np.nan
    overdue = rng.random(n) < 0.5
    history = ledger_history(lines, losses, (np.isnan(losses) & overdue).astype(float), points=50)
    standing = Monitor.from_ledger(lines, losses, np.where(overdue, 0.0, 1e9)).standing(1.0)
    assert history.audits[-1] == n
    assert len(history.audits) == min(n, 50)
    assert (history.lower[-1], history.upper[-1]) == pytest.approx(standing.limits)
    assert history.evidence[-1] == pytest.approx(standing.figures.log_evidence[1], abs=1e-6)
    if standing.mean is not None:
        assert history.mean[-1] == pytest.approx(standing.mean)


def test_an_empty_ledger_has_an_empty_history():
    history = ledger_history(LINES, np.zeros(0))
    assert len(history.audits) == len(history.mean) == len(history.upper) == len(history.evidence) == 0


@pytest.mark.parametrize("lines", [LINES, NET], ids=["losses", "net"])
def test_a_ledger_taken_in_parts_has_the_same_course_to_the_bit(lines):
    rng = np.random.default_rng(3)
    losses = rng.choice([lines.least, 0.0, 0.1, 0.7, 1.0], 5000)
    losses[rng.random(5000) < 0.1] = np.nan
    whole = ledger_history(lines, losses, points=77)
    for cuts in ([1], [10, 10, 2048], [777, 1024, 1025, 4999]):
        course, places, first = LedgerCourse(lines, 5000, points=77), [], 0
        for part in np.split(losses, cuts):
            places += (first + course.take(part)).tolist()
            first += len(part)
        np.testing.assert_array_equal(np.array(places) + 1, whole.audits)
        for mine, expected in zip(course.figures(), (whole.audits, whole.mean, whole.lower, whole.upper), strict=True):
            np.testing.assert_array_equal(mine, expected)


def test_a_ledger_shorter_than_announced_has_the_points_that_it_reached():
    course = LedgerCourse(LINES, 100, points=10)
    course.take(np.zeros(60))
    audits, mean, lower, upper = course.figures()
    assert audits[-1] <= 60 < course.audits[len(audits)]
    assert len(mean) == len(lower) == len(upper) == len(audits)
