"""The net loss keeps its budget because the walk stops at the first row that breaks it, whatever gains come later."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformal_arbitrage import ScoreLog, assess, calibrate, evaluate, verify
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.core.risk import RiskCurve
from tests.calibration.test_net import KEY, net_certificate, router_log
from tests.certificates import altered
from tests.validity.simulation import keeps


def last_passage(log, alpha):
    """Plant the plain rule: the smallest relaxation whose own total keeps the budget."""
    options = CalibrationOptions(loss="net", boundary="random", key=KEY)
    curve = options.curve(log)
    spent = Fraction(str(alpha)) * (curve.n + 1) - 1
    within = [k for k in range(len(curve.totals)) if curve.exact_total(k) <= spent]
    certificate = net_certificate(log, alpha)
    if not within:
        return certificate
    threshold = {"relaxation": float(curve.breakpoints[within[0]]), "boundary_u": float(curve.boundary_u[within[0]])}
    return altered(certificate, **threshold)


def left_out_sum(certify, confidence, primary, guardian, alpha):
    """Return the sum over rows of their loss under the certificate made from all other rows."""
    log, total = router_log(confidence, primary, guardian), 0.0
    for j in range(len(confidence)):
        others = np.flatnonzero(np.arange(len(confidence)) != j)
        decision = certify(log.select(others), alpha).apply(log.select(np.array([j])))
        total += 0.0 if decision.deferred[0] else guardian[j] - primary[j]
    return total


GRADES = st.sampled_from([(0, 0), (0, 1), (1, 0), (0.5, 0), (0, 0.5)])
ROWS = st.lists(st.tuples(st.sampled_from([0.0, 0.2, 0.5, 0.7, 0.9]), GRADES), min_size=6, max_size=16)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, alpha=st.sampled_from([0.1, 0.2, 0.3]))
def test_on_every_set_of_rows_the_left_out_losses_sum_to_at_most_the_budget(rows, alpha):
    confidence = np.array([one for one, _ in rows])
    primary, guardian = np.array([grades for _, grades in rows], dtype=float).T
    assert left_out_sum(net_certificate, confidence, primary, guardian, alpha) <= alpha * len(rows) + 1e-9


def expected_loss(certify, *, times=500, n=50, alpha=0.1, fresh=100):
    """Return the mean net loss in a world where half of the rows lose 1 and three in ten gain 1, whatever the score."""
    rng, means = np.random.default_rng(5), []
    for k in range(times):
        net = rng.choice([1.0, -1.0, 0.0], p=[0.5, 0.3, 0.2], size=n + fresh)
        log = router_log(rng.random(n + fresh), (net < 0).astype(float), (net > 0).astype(float), prefix=f"{k}-")
        decided = certify(log.select(np.arange(n)), alpha).apply(log.select(np.arange(n, n + fresh)))
        means.append(float(np.where(decided.deferred, 0.0, net[n:]).mean()))
    return float(np.mean(means)), float(np.std(means, ddof=1) / times**0.5)


def test_first_passage_keeps_the_budget():
    measured = expected_loss(net_certificate)
    assert keeps(0.1, measured), measured
    assert measured[0] > 0.07, "the budget must be used for this test to mean anything"


def test_last_passage_is_caught():
    measured = expected_loss(last_passage)
    assert not keeps(0.1, measured), measured


def test_losses_that_are_never_negative_give_the_threshold_of_the_regret():
    rng = np.random.default_rng(2)
    for n in (30, 200):
        primary = rng.integers(0, 2, n).astype(float)
        log = router_log(rng.integers(0, 6, n) / 5, primary, np.ones(n))
        net, regret = net_certificate(log, 0.1), calibrate(log, 0.1, boundary="random", key=KEY)
        assert (net.rule, net.evidence.slack) == (regret.rule, regret.evidence.slack)
        assert net.loss.regret == pytest.approx(net.evidence.empirical_risk)


def test_the_order_of_rows_does_not_matter():
    rng = np.random.default_rng(3)
    log = router_log(rng.integers(0, 6, 80) / 5, rng.integers(0, 3, 80) / 2, rng.integers(0, 3, 80) / 2)
    shuffled = log.select(rng.permutation(80))
    first, second = net_certificate(log, 0.1), net_certificate(shuffled, 0.1)
    assert (first.rule, first.loss) == (second.rule, second.loss)


def test_rows_that_share_a_draw_are_walked_with_their_losses_first():
    log = ScoreLog.from_router(
        confidence=[0.9, 0.5, 0.5, 0.4, 0.3], primary_grade=[1, 1, 0, 1, 1], guardian_grade=[1, 0, 1, 1, 1],
    )  # fmt: skip
    curve = RiskCurve.from_log(log, grades=log.outcome("correct"), u=np.full(5, 0.25))
    assert list(curve.breakpoints) == [0.0, 0.5]
    assert [int(total) for total in curve.totals] == [0, 0], "the loss and the gain at 0.5 cancel"
    assert [int(peak) / 10**12 for peak in curve.walk.peaks] == [1.0, 0.0]


@pytest.mark.proof
def test_evaluation_keeps_the_budget_and_asks_less_than_the_regret():
    rng = np.random.default_rng(4)
    confidence = rng.random(1500)
    primary = (rng.random(1500) < 0.4 + 0.5 * confidence).astype(float)
    guardian = (rng.random(1500) < 0.8).astype(float)
    log = router_log(confidence, primary, guardian)
    net, regret = (
        evaluate(log, [0.05], calibration_size=300, trials=100, boundary="random", loss=loss).of("conformal")[0]
        for loss in ("net", None)
    )
    assert abs(net.mean("loss") - 0.05) < 0.01
    assert net.mean("deferred") < 0.8 * regret.mean("deferred")


def test_a_certificate_of_the_net_loss_says_so_verifies_and_can_be_assessed(tmp_path):
    rng = np.random.default_rng(6)
    log = router_log(rng.random(400), rng.integers(0, 2, 400).astype(float), rng.integers(0, 2, 400).astype(float))
    certificate = net_certificate(log, 0.05)
    assert "at most 0.05 below that of the Guardian's choice, gains counted" in certificate.guarantee
    assert (
        f"With gains not counted, the mean loss on this log is {certificate.loss.regret:.4g}" in certificate.guarantee
    )
    assert "with gains not counted" in dict(certificate.facts())["on this log"]
    certificate.save(tmp_path / "certificate.json")
    loaded = type(certificate).load(tmp_path / "certificate.json", key=KEY)
    assert verify(loaded, log).ok
    low, high = assess(loaded, router_log(rng.random(300), np.ones(300), np.zeros(300), prefix="new")).interval
    assert -1 <= low < high < 0, "gains give a negative loss"
