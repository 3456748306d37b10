"""A history ends where the monitor stands."""

import numpy as np
import pytest

from conformal_arbitrage.monitoring.history import ledger_history
from conformal_arbitrage.monitoring.lines import watch_lines
from conformal_arbitrage.monitoring.monitor import Monitor

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
