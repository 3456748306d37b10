"""Every option keeps E[loss] <= alpha; each broken variant fails the same check."""

import numpy as np
import pytest

from conformal_arbitrage import RiskCurve, ScoreLog, calibrate
from conformal_arbitrage.core.exact import gaps
from tests.validity.simulation import World, expected_loss, keeps, log_of, product, spends

SMOOTH = World()
COARSE = World(decimals=1)
SURE = World(one_hot=True)
SEVERE = World(scale=3.0)
FAILING = World(failing=0.9)
N, ALPHA, TIMES = 20, 0.1, 1200


def proofs(*values):
    return [pytest.param(value, marks=pytest.mark.proof) for value in values]


@pytest.mark.parametrize("boundary", ["random", *proofs("include")])
@pytest.mark.parametrize("sees", ["all", *proofs("candidates", "all-restricted-loss")])
@pytest.mark.parametrize("world", [COARSE, *proofs(SMOOTH, SURE)], ids=["coarse", "smooth", "one-hot"])
def test_the_budget_is_kept_by_every_rule(world, sees, boundary):
    rule = product(ALPHA, guardian_sees=sees, boundary=boundary)
    measured = expected_loss(world, rule, N, TIMES, sees_all=sees != "candidates")
    assert keeps(ALPHA, measured), measured


@pytest.mark.proof
@pytest.mark.parametrize("n", [20, 200])
@pytest.mark.parametrize("sees", ["candidates", "all"])
def test_continuous_scores_spend_the_budget_up_to_two_bounds_in_n(n, sees):
    measured = expected_loss(SMOOTH, product(ALPHA, guardian_sees=sees), n, TIMES, sees_all=sees == "all")
    assert keeps(ALPHA, measured), measured
    assert spends(ALPHA, measured, n, 1.0), measured


@pytest.mark.proof
@pytest.mark.parametrize("sees", ["candidates", "all"])
def test_a_random_boundary_spends_the_budget_even_on_coarse_scores(sees):
    rule = product(ALPHA, guardian_sees=sees, boundary="random")
    measured = expected_loss(COARSE, rule, 60, TIMES, sees_all=sees == "all")
    assert keeps(ALPHA, measured), measured
    assert spends(ALPHA, measured, 60, 1.0), measured


@pytest.mark.proof
@pytest.mark.parametrize("boundary", ["include", "random"])
def test_the_budget_is_kept_under_another_bound(boundary):
    measured = expected_loss(SEVERE, product(0.4, loss_bound=3, boundary=boundary), N, TIMES)
    assert keeps(0.4, measured), measured


@pytest.mark.proof
def test_the_papers_grid_keeps_the_budget():
    measured = expected_loss(SMOOTH, product(ALPHA, grid=0.1), N, TIMES)
    assert keeps(ALPHA, measured), measured


@pytest.mark.proof
def test_single_precision_scores_keep_the_budget():
    def rule(rng, primary, guardian, fails, fresh):
        certificate = calibrate(
            ScoreLog.from_arrays(primary.astype(np.float32), guardian), ALPHA, guardian_sees="candidates"
        )
        return certificate.apply(
            ScoreLog.from_arrays(fresh.astype(np.float32), np.zeros(fresh.shape))
        ).candidate.reshape(fresh.shape)

    measured = expected_loss(COARSE, rule, N, TIMES)
    assert keeps(ALPHA, measured), measured


@pytest.mark.proof
@pytest.mark.parametrize("sees", ["candidates", "all"])
def test_worst_case_counting_keeps_the_budget_when_the_guardian_fails_on_hard_queries(sees):
    rule = product(ALPHA, missing_guardian="worst_case", guardian_sees=sees)
    measured = expected_loss(FAILING, rule, 40, TIMES, sees_all=sees == "all")
    assert keeps(ALPHA, measured), measured


PATCHY, OFTEN = World(actions=12), 0.2


def patchy(row, sight):
    """Return a loss that is not monotone: 1 or 0 at random for each number of actions in sight, and 0 for all."""
    return float(len(sight) < 12 and row.lists["noise"][len(sight) - 1] < OFTEN)


def patchy_loss(choose, alpha, n, repetitions=400):
    """Return the same as `expected_loss`, for the loss above."""
    rng = np.random.default_rng(5)
    means = []
    for _ in range(repetitions):
        primary, guardian, _ = PATCHY.draw(rng, n)
        log = ScoreLog.from_arrays(primary, guardian, outcomes={"noise": rng.random(primary.shape)})
        fresh, noise = PATCHY.draw(rng, 200)[0], rng.random((200, 12))
        size = (gaps(np.ascontiguousarray(fresh.T), digits=12) <= choose(log, alpha)).sum(axis=0)
        means.append(((size < 12) & (noise[np.arange(200), size - 1] < OFTEN)).mean())
    return float(np.mean(means)), float(np.std(means, ddof=1) / repetitions**0.5)


@pytest.mark.proof
def test_a_users_own_loss_keeps_its_budget_on_the_envelope():
    measured = patchy_loss(
        lambda log, alpha: calibrate(log, alpha, loss=patchy, loss_bound=1, guardian_sees="candidates").relaxation,
        0.16,
        10,
    )
    assert keeps(0.16, measured), measured


@pytest.mark.proof
def test_a_users_own_loss_keeps_its_budget_where_a_deferral_shows_everything():
    """Check the shipped rule; the loss is that of the top action alone, or of all actions."""
    rng = np.random.default_rng(7)
    means = []
    for _ in range(400):
        primary, guardian, _ = PATCHY.draw(rng, 30)
        log = ScoreLog.from_arrays(primary, guardian, outcomes={"noise": rng.random(primary.shape)})
        certificate = calibrate(log, 0.1, loss=patchy, loss_bound=1, guardian_sees="all")
        fresh, noise = PATCHY.draw(rng, 200)[0], rng.random((200, 12))
        alone = ~certificate.apply(ScoreLog.from_arrays(fresh)).deferred
        means.append((alone & (noise[:, 0] < OFTEN)).mean())
    measured = float(np.mean(means)), float(np.std(means, ddof=1) / 20)
    assert keeps(0.1, measured), measured
    assert spends(0.1, measured, 30, 1.0), measured


@pytest.mark.parametrize("sees", ["candidates", "all"])
def test_too_few_rows_always_defer_without_loss(sees):
    measured = expected_loss(SMOOTH, product(ALPHA, guardian_sees=sees), 8, 50, sees_all=sees == "all")
    assert measured == (0.0, 0.0)


# Planted bugs: the checks above must fail for each of them.


def by_relaxation(choose):
    """Return a rule that correctly deploys the relaxation that `choose` returns."""

    def rule(rng, primary, guardian, fails, fresh):
        relaxation = choose(log_of(primary, guardian))
        return relaxation >= gaps(np.ascontiguousarray(fresh.T), digits=12).T

    return rule


def test_dropping_the_bound_over_n_is_caught():
    def too_small(log):
        curve = RiskCurve.from_log(log, guardian_sees="candidates")
        return curve.breakpoints[np.argmax(curve.totals <= ALPHA * len(log) * 1e12)]

    measured = expected_loss(SMOOTH, by_relaxation(too_small), N, TIMES)
    assert not keeps(ALPHA, measured), measured


@pytest.mark.proof
def test_rounding_down_to_the_grid_is_caught():
    def rounded_down(log):
        return np.floor(calibrate(log, ALPHA, guardian_sees="candidates").relaxation * 10) / 10

    measured = expected_loss(SMOOTH, by_relaxation(rounded_down), 100, 600)
    assert not keeps(ALPHA, measured), measured


@pytest.mark.proof
def test_comparing_raw_floats_at_deployment_is_caught():
    """`p >= top - relaxation` misses members exactly at the gap; alpha is just above the risk at gap 0.3."""
    world, alpha, n = World(decimals=1, one_hot=True, actions=2), 0.184, 20_000

    def deployed(compare):
        def rule(rng, primary, guardian, fails, fresh):
            return compare(calibrate(ScoreLog.from_arrays(primary, guardian), alpha, guardian_sees="candidates"), fresh)

        return rule

    def shipped(certificate, fresh):
        return certificate.apply(ScoreLog.from_arrays(fresh, np.zeros(fresh.shape))).candidate.reshape(fresh.shape)

    def raw(certificate, fresh):
        return fresh >= fresh.max(axis=1, keepdims=True) - certificate.relaxation

    assert keeps(alpha, expected_loss(world, deployed(shipped), n, 300))
    measured = expected_loss(world, deployed(raw), n, 300)
    assert not keeps(alpha, measured), measured


@pytest.mark.proof
@pytest.mark.parametrize("treatment", ["uniform", "dropped"])
def test_treating_guardian_failures_as_uniform_or_dropping_them_is_caught(treatment):
    def rule(rng, primary, guardian, fails, fresh):
        if treatment == "dropped":
            primary, guardian = primary[~fails], guardian[~fails]
        else:
            guardian = np.where(fails[:, None], 0.5, guardian)
        relaxation = calibrate(log_of(primary, guardian), ALPHA, guardian_sees="candidates").relaxation
        return relaxation >= gaps(np.ascontiguousarray(fresh.T), digits=12).T

    measured = expected_loss(FAILING, rule, 40, TIMES)
    assert not keeps(ALPHA, measured), measured


@pytest.mark.proof
def test_draws_from_row_numbers_are_caught():
    """Draws that rise with arrival put every later query beyond the calibrated draw."""

    def rule(rng, primary, guardian, fails, fresh):
        total = len(primary) + len(fresh)
        log = log_of(primary, guardian)
        curve = RiskCurve.from_log(log, u=np.arange(len(primary)) / total, guardian_sees="candidates")
        index = curve.search([ALPHA])[0]
        gap = gaps(np.ascontiguousarray(fresh.T), digits=12).T
        late = (np.arange(len(fresh)) + len(primary))[:, None] / total
        at = (gap == curve.breakpoints[index]) & (late <= curve.boundary_u[index])
        return (gap < curve.breakpoints[index]) | at | (gap == 0)

    measured = expected_loss(COARSE, rule, 60, TIMES)
    assert not keeps(ALPHA, measured), measured


@pytest.mark.proof
def test_calibrating_one_loss_and_deploying_another_is_caught():
    """A threshold calibrated for showing all actions does not keep the budget if only candidates are shown."""

    def own_loss(log):
        return calibrate(log, ALPHA, guardian_sees="all").relaxation

    measured = expected_loss(SMOOTH, by_relaxation(own_loss), 100, 600)
    assert not keeps(ALPHA, measured), measured


@pytest.mark.proof
def test_using_a_loss_that_rises_without_its_envelope_is_caught():
    """Plant the first relaxation at which the empirical risk happens to fall below the budget."""

    def first_dip(log, alpha):
        gap = gaps(np.ascontiguousarray(log.primary.reshape(-1, 12).T), digits=12)
        noise = log.lists["noise"].reshape(-1, 12)
        for point in np.unique(gap):
            size = (gap <= point).sum(axis=0)
            losses = (size < 12) & (noise[np.arange(len(log)), size - 1] < OFTEN)
            if losses.sum() + 1 <= alpha * (len(log) + 1):
                return point
        return np.inf

    measured = patchy_loss(first_dip, 0.16, 10)
    assert not keeps(0.16, measured), measured
