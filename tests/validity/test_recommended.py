"""The whole road through `recommend` keeps alpha: split, choice among pairs and boundaries, certificate, fresh queries."""

from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, recommend
from conformal_arbitrage.evaluation import recommendation
from tests.validity.simulation import keeps

N, ALPHA, TIMES, PRIMARIES, FRESH = 80, 0.1, 250, 5, 400


def draw(rng, n):
    """Return margin, grades of the Primary and of the Guardian for every Primary on every query: all equally good."""
    margin = rng.random((PRIMARIES, n))
    right = (rng.random((PRIMARIES, n)) < 0.2 + 0.6 * margin).astype(float)
    return margin, right, (rng.random(n) < 0.8).astype(float)


def logs_of(rng, n, prefix):
    """Return the same queries under every Primary, in router form."""
    margin, right, guardian = draw(rng, n)
    ids = [f"{prefix}{k}" for k in range(n)]
    logs = [
        ScoreLog.from_router(confidence=m, primary_grade=p, guardian_grade=guardian, id=ids)
        for m, p in zip(margin, right, strict=True)
    ]
    return [replace(log, columns=(f"p{k}", "guardian")) for k, log in enumerate(logs)]


def loss_of(log, kept, loss):
    """Return the mean loss of the answers kept, from the grades alone."""
    guardian, primary = log.lists["correct"].reshape(-1, 2).T
    worse = guardian - primary
    return float((kept * (worse if loss == "net" else np.maximum(worse, 0.0))).mean())


def measure(loss):
    """Return the mean loss with its standard error, and how often the interval held the share of new queries.

    Margins are uniform, so the certificate's share of new queries is its relaxation.
    """
    rng, means, held = np.random.default_rng(11), [], []
    for t in range(TIMES):
        made = recommend(logs_of(rng, N, f"{t}-"), ALPHA, loss=loss, share=0.5, seed=t, trials=2, key=rng.bytes(16))
        fresh = logs_of(rng, FRESH, f"fresh-{t}-")[int(made.chosen.primary[1:])]
        means.append(loss_of(fresh, ~made.certificate.apply(fresh).deferred, loss))
        low, high = made.deferred_interval
        held.append(low <= made.certificate.relaxation <= high)
    return (float(np.mean(means)), float(np.std(means, ddof=1) / TIMES**0.5)), float(np.mean(held))


@pytest.mark.parametrize("loss", ["regret", "net"])
def test_a_recommended_certificate_keeps_its_budget(loss):
    measured, held = measure(loss)
    assert keeps(ALPHA, measured), measured
    assert held >= 0.95


def test_choosing_on_the_rows_of_the_certificate_would_break_it(monkeypatch):
    """The planted bug: the rows to choose on are those of the certificate."""

    def same_part(log, *, share, seed):
        return 2 * (recommendation_split(log, share=share, seed=seed)[1],)

    recommendation_split = recommendation.split
    monkeypatch.setattr(recommendation, "split", same_part)
    measured, _ = measure("regret")
    assert not keeps(ALPHA, measured), measured
