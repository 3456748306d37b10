"""Choosing among ten Primaries on the rows one certifies breaks the quota, and leaves a trace; other rows keep it."""

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.evaluation.looks import looks_at, note_look
from tests.validity.simulation import keeps

pytestmark = pytest.mark.proof
N, ALPHA, TIMES, PRIMARIES, FRESH = 40, 0.1, 500, 10, 400


def draw(rng, n):
    """Return margin and loss of every Primary on every query: all equally good."""
    margin = rng.random((PRIMARIES, n))
    return margin, (rng.random((PRIMARIES, n)) < 0.8 * (1 - margin)).astype(float)


def log_of(margin, loss, prefix):
    """Return the log of one Primary; ids name the queries."""
    guardian = np.column_stack([np.ones(len(loss)), 1 - loss])
    ids = [f"{prefix}{k}" for k in range(len(loss))]
    return ScoreLog.from_arrays(np.column_stack([np.zeros(len(margin)), margin]), guardian, id=ids)


def fewest_deferred(logs):
    """Return which Primary asks the Guardian least often at this budget."""
    return int(np.argmin([calibrate(log, ALPHA).apply(log).deferred.mean() for log in logs]))


def measure(path, *, same_rows):
    """Return the loss of the chosen Primary under its certificate, and whether the rows were recognised as looked at."""
    rng, means, seen = np.random.default_rng(8), [], set()
    for t in range(TIMES):
        margin, loss = draw(rng, 2 * N)
        logs = [log_of(m, one, f"{t}-") for m, one in zip(margin, loss, strict=True)]
        explore = [log.select(np.arange(N)) for log in logs]
        best = fewest_deferred(explore)
        certify = explore[best] if same_rows else logs[best].select(np.arange(N, 2 * N))
        if t == 0:
            for log in explore:
                note_look(log.lineage(), "evaluate", path=path)
            seen.add(looks_at(certify.lineage(), path=path).commands["evaluate"])
        margin, loss = (values[best] for values in draw(rng, FRESH))
        alone = ~calibrate(certify, ALPHA).apply(log_of(margin, loss, "f")).deferred
        means.append((alone * loss).mean())
    return (float(np.mean(means)), float(np.std(means, ddof=1) / TIMES**0.5)), seen


@pytest.mark.parametrize("same_rows", [False, True])
def test_choosing_on_the_certified_rows_breaks_the_quota_and_is_recognised(same_rows, tmp_path):
    measured, seen = measure(tmp_path / "looks.json", same_rows=same_rows)
    assert keeps(ALPHA, measured) is not same_rows, measured
    assert seen == {1 if same_rows else 0}
