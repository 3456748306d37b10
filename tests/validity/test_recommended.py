"""The whole road through `recommend` keeps alpha: split, choice among pairs and boundaries, certificate, fresh queries."""

from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, recommend
from conformal_arbitrage.evaluation import recommendation
from tests.validity.simulation import keeps

pytestmark = pytest.mark.proof
N, ALPHA, TIMES, PRIMARIES, FRESH = 80, 0.1, 150, 5, 400
LARGE, FEWER = 260, 60
"""Rows that are enough to learn a score on a half of the tuning half, and how often that is repeated."""


def draw(rng, n):
    """Return margin, grades of the Primary and of the Guardian for every Primary on every query, and groups of queries.

    All Primaries are equally good, and worse in one of the groups.
    """
    margin, hard = rng.random((PRIMARIES, n)), rng.random(n) < 0.5
    right = (rng.random((PRIMARIES, n)) < 0.3 + 0.6 * margin - 0.2 * hard).astype(float)
    return margin, right, (rng.random(n) < 0.8).astype(float), np.where(hard, "hard", "easy")


def logs_of(rng, n, prefix):
    """Return the same queries under every Primary, in router form."""
    margin, right, guardian, group = draw(rng, n)
    ids = [f"{prefix}{k}" for k in range(n)]
    logs = [
        ScoreLog.from_router(confidence=m, primary_grade=p, guardian_grade=guardian, id=ids, group=group)
        for m, p in zip(margin, right, strict=True)
    ]
    return [replace(log, columns=(f"p{k}", "guardian")) for k, log in enumerate(logs)]


def loss_of(log, kept, loss):
    """Return the mean loss of the answers kept, from the grades alone."""
    guardian, primary = log.lists["correct"].reshape(-1, 2).T
    worse = guardian - primary
    return float((kept * (worse if loss == "net" else np.maximum(worse, 0.0))).mean())


def measure(loss, *, n=N, times=TIMES, trials=2):
    """Return the mean loss with its standard error, how often the interval held the share, and the scores chosen."""
    rng, means, held, scores = np.random.default_rng(11), [], [], set()
    for t in range(times):
        advice = recommend(
            logs_of(rng, n, f"{t}-"), ALPHA, loss=loss, share=0.5, seed=t, trials=trials, key=rng.bytes(16)
        )
        fresh = logs_of(rng, FRESH, f"fresh-{t}-")[int(advice.chosen.primary[1:])]
        kept = ~advice.certificate.apply(fresh).deferred
        means.append(loss_of(fresh, kept, loss))
        scores.add(advice.chosen.score)
        low, high = advice.deferred_interval
        # margins are uniform, so a threshold's share of new queries is the relaxation
        share = 1 - kept.mean() if advice.certificate.relaxation is None else advice.certificate.relaxation
        held.append(low <= share <= high)
    return (float(np.mean(means)), float(np.std(means, ddof=1) / times**0.5)), float(np.mean(held)), scores


@pytest.mark.parametrize("loss", ["regret", "net"])
def test_a_recommended_certificate_keeps_its_budget(loss):
    measured, held, _ = measure(loss)
    assert keeps(ALPHA, measured), measured
    assert held >= 0.95


def test_a_recommended_learned_score_keeps_its_budget():
    measured, held, scores = measure("regret", n=LARGE, times=FEWER)
    assert keeps(ALPHA, measured), measured
    assert held >= 0.95
    assert "auto" in scores


def test_choosing_on_the_rows_of_the_certificate_would_break_it(monkeypatch):
    """The planted bug: the rows to choose on are those of the certificate."""

    def same_part(log, *, share, seed):
        return 2 * (recommendation_split(log, share=share, seed=seed)[1],)

    recommendation_split = recommendation.split
    monkeypatch.setattr(recommendation, "split", same_part)
    measured, _, _ = measure("regret")
    assert not keeps(ALPHA, measured), measured
