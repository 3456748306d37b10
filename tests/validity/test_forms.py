"""The binarized Guardian, the router form and evaluation by splits keep the budget; without B / (n + 1) they fail."""

from fractions import Fraction

import numpy as np
import pytest

from conformal_arbitrage import RiskCurve, ScoreLog, calibrate, evaluate
from conformal_arbitrage.core.risk import LossMeasure
from conformal_arbitrage.core.trials import build_steps, draw_splits, run_trials
from tests.certificates import altered
from tests.validity.simulation import keeps

pytestmark = pytest.mark.proof
N, ALPHA, TIMES = 20, 0.1, 1200


def menu(rng, n):
    """Return menus with labels; the Guardian is right in about four of five queries."""
    primary = rng.random((n, 3))
    label = (0.5 * primary + rng.normal(size=(n, 3))).argmax(axis=1)
    guardian = rng.random((n, 3))
    guardian[np.arange(n), label] += np.where(rng.random(n) < 0.7, 1.0, 0.0)
    return ScoreLog.from_arrays(primary, guardian / 2, label=label).binarized()


def menu_loss(log, candidate):
    n = len(log)
    right = log.guardian.reshape(n, 3).argmax(axis=1) == log.label
    return right & ~candidate.reshape(n, 3)[np.arange(n), log.label]


def router(rng, n):
    """Return two graded answers per row; the Primary's answer is better at higher confidence."""
    confidence = rng.random(n)
    return ScoreLog.from_router(
        confidence=confidence,
        primary_grade=(rng.random(n) < 0.3 + 0.4 * confidence).astype(float),
        guardian_grade=(rng.random(n) < 0.9).astype(float),
    )


def router_loss(log, candidate):
    grades = log.outcome("correct").reshape(-1, 2)
    alone = candidate.reshape(-1, 2).sum(axis=1) == 1
    return np.where(alone, np.maximum(0, grades[:, 0] - grades[:, 1]), 0.0)


def without_the_bound(log):
    curve = RiskCurve.from_log(log, guardian_sees="candidates")
    index = int(np.argmax(curve.totals <= ALPHA * len(log) * 1e12))
    return float(curve.breakpoints[index])


def measure(world, loss, relaxation):
    rng = np.random.default_rng(1)
    means = []
    for _ in range(TIMES):
        log, fresh = world(rng, N), world(rng, 200)
        certificate = calibrate(log, ALPHA, guardian_sees="candidates")
        certificate = certificate if relaxation is None else altered(certificate, relaxation=relaxation(log))
        means.append(loss(fresh, certificate.apply(fresh).candidate).mean())
    return float(np.mean(means)), float(np.std(means, ddof=1) / TIMES**0.5)


@pytest.mark.parametrize(("world", "loss"), [(menu, menu_loss), (router, router_loss)], ids=["binarised", "router"])
def test_each_form_keeps_the_budget(world, loss):
    measured = measure(world, loss, None)
    assert keeps(ALPHA, measured), measured


@pytest.mark.parametrize(("world", "loss"), [(menu, menu_loss), (router, router_loss)], ids=["binarised", "router"])
def test_each_form_is_caught_without_the_bound(world, loss):
    measured = measure(world, loss, without_the_bound)
    assert not keeps(ALPHA, measured), measured


@pytest.mark.parametrize("boundary", ["include", "random"])
@pytest.mark.parametrize("sees", ["candidates", "all"])
def test_splits_of_one_pool_keep_the_budget(science, sees, boundary):
    """Splits of a fixed log are exchangeable, so the mean loss over many of them is within alpha."""
    frontier = evaluate(science, [0.1], calibration_size=40, trials=2000, guardian_sees=sees, boundary=boundary)
    losses = frontier.of("conformal")[0].values("loss")
    assert keeps(0.1, (losses.mean(), losses.std(ddof=1) / 2000**0.5))
    assert losses.mean() >= 0.1 - 2 / 41 - 0.002


@pytest.mark.parametrize(("bound", "kept"), [(Fraction(1), True), (Fraction(1, 10**6) + Fraction("0.1"), False)])
def test_splits_of_one_pool_are_caught_with_too_small_a_bound(science, bound, kept):
    """Use a bound just above alpha in place of a forgotten one: 4.4 losses are allowed instead of 3.5."""
    recorded = LossMeasure(guardian_sees="candidates").losses(science)
    steps = build_steps(science, recorded, guardian_sees="candidates", outcomes={}, leg=None, u=None)
    rng = np.random.default_rng(0)
    splits = draw_splits(len(science), calibration_size=44, test_size=None, trials=2000, rng=rng)
    curve = RiskCurve.from_log(science, guardian_sees="candidates")
    losses = run_trials(steps, curve, splits, ["0.1"], bound=bound).conformal["loss"][:, 0]
    assert bool(keeps(0.1, (losses.mean(), losses.std(ddof=1) / 2000**0.5))) is kept


def test_the_papers_unrestricted_rule_has_the_threshold_of_the_candidates():
    """The tests of that threshold above, planted bugs included, therefore cover this one."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        log = ScoreLog.from_arrays(np.round(rng.random((60, 3)), 1), rng.random((60, 3)))
        restricted, free = (calibrate(log, ALPHA, guardian_sees=s) for s in ("candidates", "all-restricted-loss"))
        assert restricted.relaxation == free.relaxation
        assert restricted.evidence.empirical_risk == free.evidence.empirical_risk
