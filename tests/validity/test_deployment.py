"""From calibration to the served answer: re-runs, precision and menu sizes leave no path to a false promise."""

import asyncio

import numpy as np
import pytest

from conformal_arbitrage import (
    ConformalArbitrage,
    ProjectSecret,
    Query,
    ScoreLog,
    calibrate,
)
from conformal_arbitrage.core.exact import row_sight
from conformal_arbitrage.models import FunctionScorer
from tests.validity.simulation import keeps

pytestmark = pytest.mark.proof
ALPHA, N, FRESH = 0.05, 60, 400


def coarse(rng, n):
    """Return two actions whose gap is the same in most rows, so that the draws decide; and what the top one loses."""
    primary = np.stack([np.full(n, 0.9), np.where(rng.random(n) < 0.9, 0.4, 0.1)], axis=1)
    lost = (rng.random(n) < 0.2).astype(float)
    return primary, np.stack([1 - lost, np.ones(n)], axis=1), lost


def best_of(runs, keys, repetitions=400):
    """Return the loss of the certificate that defers least, among several runs on one log, each with its key."""
    rng = np.random.default_rng(11)
    means = []
    for repetition in range(repetitions):
        primary, guardian, _ = coarse(rng, N)
        log = ScoreLog.from_arrays(primary, guardian, id=[f"{repetition}-{k}" for k in range(N)])
        fresh, _, lost = coarse(rng, FRESH)
        new = ScoreLog.from_arrays(fresh, id=[f"{repetition}-new-{k}" for k in range(FRESH)])
        certificates = [
            calibrate(log, ALPHA, boundary="random", key=keys(rng), guardian_sees="all") for _ in range(runs)
        ]
        chosen = min(certificates, key=lambda one: (one.relaxation, one.boundary_u or 0.0))
        means.append((lost * ~chosen.apply(new).deferred).mean())
    return float(np.mean(means)), float(np.std(means, ddof=1) / repetitions**0.5)


@pytest.mark.parametrize("runs", [5, 25])
def test_running_again_with_the_projects_secret_draws_nothing_new(runs):
    """Cover hole 5: the draws depend on the secret and the id, so the best of many runs is the only one there is."""
    secret = ProjectSecret((b"the secret of this project",))
    measured = best_of(runs, lambda rng: secret.boundary_key, repetitions=150)
    assert keeps(ALPHA, measured), measured


@pytest.mark.parametrize("runs", [5, 25])
def test_a_new_key_for_every_run_is_caught(runs):
    measured = best_of(runs, lambda rng: rng.bytes(32), repetitions=150)
    assert not keeps(ALPHA, measured), measured


def heavy(rng, n):
    """Return rows of which nine in ten share the gap 0.6 - 0.2, which is 0.40000002 in single precision."""
    primary = np.stack([np.full(n, 0.6), np.where(rng.random(n) < 0.9, 0.2, 0.05)], axis=1)
    lost = (rng.random(n) < 0.22).astype(float)
    return primary, np.stack([1 - lost, np.ones(n)], axis=1), lost


def deployed(decide, repetitions=150):
    rng = np.random.default_rng(4)
    means = []
    for _ in range(repetitions):
        primary, guardian, _ = heavy(rng, 200)
        certificate = calibrate(ScoreLog.from_arrays(primary, guardian), ALPHA, guardian_sees="all")
        assert certificate.relaxation in (0.4, 0.55)
        fresh, _, lost = heavy(rng, FRESH)
        deferred = np.array([decide(certificate, row) for row in fresh])
        means.append((lost * ~deferred).mean())
    return float(np.mean(means)), float(np.std(means, ddof=1) / repetitions**0.5)


def test_scores_of_another_precision_are_refused_where_one_gap_is_common():
    """Cover hole 6: in double precision the budget is kept, and single precision is not let in anywhere."""
    measured = deployed(lambda certificate, row: certificate.decide(row).deferred)
    assert keeps(ALPHA, measured), measured
    primary, guardian, _ = heavy(np.random.default_rng(0), 200)
    certificate = calibrate(ScoreLog.from_arrays(primary, guardian), ALPHA, guardian_sees="all")
    single = primary.astype(np.float32)
    for use in (
        lambda: certificate.candidates(single[0]),
        lambda: certificate.decide(list(single[0])),
        lambda: certificate.apply(ScoreLog.from_arrays(single)),
        lambda: asyncio.run(FunctionScorer(lambda query: single[0], name="f").score(Query("", ("a", "b")))),
    ):
        with pytest.raises(match="single precision"):
            use()


def test_single_precision_under_a_double_precision_certificate_is_caught():
    def old(certificate, row):
        scores = row.astype(np.float32).astype(np.float64).tolist()
        return len(row_sight(scores, certificate.relaxation, digits=12)[0]) > 1

    measured = deployed(old)
    assert not keeps(ALPHA, measured), measured


def menus(rng, size, n):
    """Return menus in which the Primary leads clearly and is wrong more often the longer the menu is."""
    second = 0.5 * rng.random((n, 1))
    rest = np.repeat(0.9 * second, size - 2, axis=1)
    primary = np.concatenate([0.5 + rng.random((n, 1)) / 2, second, rest], axis=1)
    right = np.where(rng.random(n) < 1 / (1 + 0.05 * size), 0, rng.integers(1, size, n))
    return primary, np.eye(size)[right]


def replayed(shown, place, role):
    async def recorded(query):
        return shown[query.text][place].tolist()

    return FunctionScorer(recorded, name=role)


def claimed_loss(*, old, repetitions=40):
    """Return the loss of decisions with a guarantee, on menus of 2 and of 200 actions, calibrated on menus of 2."""
    rng = np.random.default_rng(9)
    means = []
    for _ in range(repetitions):
        shown = {}
        scorers = {role: replayed(shown, place, role) for place, role in enumerate(("primary", "guardian"))}
        identities = {role: dict(scorer.identity) for role, scorer in scorers.items()}
        log = ScoreLog.from_arrays(*menus(rng, 2, 200), identities=identities)
        certificate = calibrate(log, ALPHA, guardian_sees="all")
        policy = ConformalArbitrage(**scorers, certificate=certificate)
        for size in (2, 200):
            shown |= {f"{size} {k}": row for k, row in enumerate(zip(*menus(rng, size, 40), strict=True))}
        decisions = asyncio.run(decided(policy, shown))
        losses = [1 - shown[name][1][d.action] for name, d in decisions.items() if old or d.no_guarantee is None]
        means.append(np.mean(losses))
    return float(np.mean(means)), float(np.std(means, ddof=1) / repetitions**0.5)


async def decided(policy, shown):
    menu = {name: tuple(map(str, range(len(rows[0])))) for name, rows in shown.items()}
    return {name: await policy.decide(Query(name, actions, id=name)) for name, actions in menu.items()}


def test_a_menu_outside_the_range_of_the_log_claims_nothing():
    """Cover hole 11: an answer from 200 actions says that it has no guarantee, and the others keep the budget."""
    measured = claimed_loss(old=False)
    assert keeps(ALPHA, measured), measured


def test_a_claim_on_menus_of_any_size_is_caught():
    measured = claimed_loss(old=True)
    assert not keeps(ALPHA, measured), measured
