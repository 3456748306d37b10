"""A loss of one's own: its bound and its value in full sight are declared, and rounding cannot hide it."""

import numpy as np
import pytest

from conformal_arbitrage import InfeasibleError, OptionError, RiskCurve, ScoreLog, ScoreLogError, calibrate
from tests.validity.simulation import keeps

FRESH = 200


def harm(row, sight):
    """Return the least harm among the actions in sight."""
    return float(min(row.lists["harm"][sight]))


def world(rng, n, *, worst=1.0, rate=0.5, unavoidable=0.0):
    """Return two actions per row; the top one does harm in some rows, the other in few, whatever the scores say."""
    primary = np.stack([0.5 + rng.random(n) / 2, 0.5 * rng.random(n)], axis=1)
    low = np.where(rng.random(n) < unavoidable, worst, 0.0)
    high = np.where(rng.random(n) < rate, worst, low)
    return ScoreLog.from_arrays(primary, np.zeros((n, 2)), outcomes={"harm": np.stack([high, low], axis=1)})


def true_loss(log, relaxation):
    """Return the harm of what is in sight; None defers everything."""
    primary, harms = log.primary.reshape(-1, 2), log.lists["harm"].reshape(-1, 2)
    deferred = np.full(len(log), True) if relaxation is None else primary[:, 0] - primary[:, 1] <= relaxation
    return np.where(deferred, harms.min(axis=1), harms[:, 0]).mean()


def measured(choose, draw, repetitions=1500):
    """Return mean and standard error of the loss over the calibrations that issue a certificate."""
    rng = np.random.default_rng(3)
    means = []
    for _ in range(repetitions):
        log, fresh = draw(rng), draw(rng, FRESH)
        try:
            relaxation = choose(log)
        except (InfeasibleError, ScoreLogError):
            continue
        means.append(true_loss(fresh, relaxation))
    return float(np.mean(means)), float(np.std(means, ddof=1) / len(means) ** 0.5)


RARE = 0.01


def rare(rng, n=20):
    """Return rows whose harm is 50, seldom; the Guardian's scores lie in [0, 1] all the same."""
    return world(rng, n, worst=50.0, rate=RARE)


def test_a_stated_bound_keeps_the_budget_where_large_losses_are_rare():
    """Cover hole 4: the bound is required, since the Guardian's scores say nothing about a loss of one's own."""
    with pytest.raises(OptionError, match="needs loss_bound="):
        calibrate(rare(np.random.default_rng(0)), 0.1, loss=harm)

    def chosen(log):
        return calibrate(log, 0.1, loss=harm, loss_bound=50).relaxation

    assert keeps(0.1, measured(chosen, rare))
    result = measured(chosen, lambda rng, n=1000: rare(rng, n), repetitions=150)
    assert keeps(0.1, result), result
    assert result[0] > 0.01


def test_a_bound_taken_from_the_guardians_scores_is_caught():
    def old(log):
        curve = RiskCurve.from_log(log, loss=harm)
        index = int(np.argmax(curve.totals + 10**12 <= 0.1 * (len(log) + 1) * 1e12))
        return float(curve.breakpoints[index])

    result = measured(old, rare)
    assert not keeps(0.1, result), result
    assert result[0] > 0.3


def lucky(rng, n=100):
    """Return rows in which one in six does harm whatever is in sight."""
    return world(rng, n, rate=0.0, unavoidable=1 / 6)


def test_an_undeclared_loss_in_full_sight_gets_no_certificate():
    """Cover hole 7: a budget that deferring cannot keep is refused, not certified on logs that happen to show no harm."""
    rng = np.random.default_rng(1)
    with pytest.raises(InfeasibleError, match="not even deferring"):
        calibrate(lucky(rng), 0.01, loss=harm, loss_bound=1, full_sight_loss=1)
    with pytest.raises(ScoreLogError, match="above the declared 0"):
        calibrate(lucky(rng), 0.01, loss=harm, loss_bound=1)


def small(rng, n=20):
    """Return rows in which every action does a little harm, at most as declared."""
    log = world(rng, n)
    harms = np.maximum(log.lists["harm"], 0.05 * np.repeat(rng.random(n), 2))
    return ScoreLog.from_arrays(log.primary.reshape(-1, 2), np.zeros((n, 2)), outcomes={"harm": harms.reshape(-1, 2)})


@pytest.mark.proof
@pytest.mark.parametrize("n", [8, 40])
def test_a_declared_loss_in_full_sight_keeps_the_budget(n):
    """Cover hole 7: with at most 0.05 in full sight, alpha 0.1 is kept even where every query is deferred."""

    def draw(rng, rows=n):
        return small(rng, rows)

    result = measured(lambda log: calibrate(log, 0.1, loss=harm, loss_bound=1, full_sight_loss=0.05).relaxation, draw)
    assert keeps(0.1, result), result


@pytest.mark.proof
def test_certificates_on_lucky_logs_only_are_caught():
    """Plant the old rule: any log whose total is within the budget gets a certificate, the others an error."""

    def old(log):
        curve = RiskCurve.from_log(log, loss=harm)
        if curve.totals[-1] + 10**12 > 0.06 * (len(log) + 1) * 1e12:
            raise InfeasibleError("no relaxation keeps the budget")
        return float(curve.breakpoints[-1])

    result = measured(old, lambda rng, n=20: lucky(rng, n))
    assert not keeps(0.06, result), result


def test_a_bound_below_the_resolution_of_losses_is_refused():
    """Cover hole 8: losses of 1e-13 round to 0, so that a budget of 4e-14 would be certified with a loss of 1e-13."""
    guardian = np.array([[0.0, 2e-13], [1e-13, 0.0]] * 50)
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 100, guardian)
    with pytest.raises(OptionError, match="1e-06 or more"):
        calibrate(log, "4e-14", loss_bound="1e-12")
    at_top = RiskCurve.from_log(log)
    assert at_top.totals[0] == 0, "the planted bug: the loss of the Primary alone vanishes"
    assert (guardian.max(axis=1) - guardian[:, 0]).mean() == pytest.approx(1e-13)


@pytest.mark.proof
def test_the_smallest_bound_still_keeps_its_budget():
    scale = 1e-6

    def draw(rng, n=20):
        return world(rng, n, worst=scale)

    result = measured(lambda log: calibrate(log, "1e-7", loss=harm, loss_bound="1e-6").relaxation, draw)
    assert keeps(1e-7, result), result
