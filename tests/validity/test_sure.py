"""A confidence, a dial and groups keep their promises where the truth is known; each planted bug fails the same check.

Margins are uniform, and the chance of a loss at margin s is 0.3 (1 - s), so the risk at relaxation r is 0.15 (1 - r)^2 times
the mean size of a loss.
"""

from fractions import Fraction
from math import log

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.calibration import calibrate as calibrate_module
from conformal_arbitrage.calibration.calibrate import row_order
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.core.bounds import binomial_spendable, shared_bets
from conformal_arbitrage.core.risk import first_within
from tests.validity.test_monitoring import most

KEY = b"the key of these simulations"


def drawn(rng, n, sizes=(1.0,), chance=0.3):
    margin = rng.random(n)
    lost = (rng.random(n) < chance * (1 - margin)) * rng.choice(sizes, n)
    ids = [f"{rng.integers(1 << 62)}" for _ in range(n)]
    return ScoreLog.from_arrays(
        np.stack([margin, np.zeros(n)], axis=1), np.stack([1 - lost, np.ones(n)], axis=1), id=ids
    )


def risk(relaxation, sizes=(1.0,), chance=0.3):
    return 0.0 if relaxation is None else chance / 2 * (1 - relaxation) ** 2 * np.mean(sizes)


def failures(choose, *, runs, n, alpha, sizes=(1.0,), seed=0):
    """Return in how many calibrations the long-run loss lies above alpha."""
    rng = np.random.default_rng(seed)
    return sum(risk(choose(drawn(rng, n, sizes)), sizes) > alpha for _ in range(runs))


def test_a_binomial_certificate_keeps_its_confidence():
    def shipped(log_):
        return calibrate(log_, 0.05, confidence=0.9, zero_one=True).relaxation

    failed = failures(shipped, runs=800, n=400, alpha=0.05)
    assert most(0.05, 800) < failed <= most(0.1, 800)  # it spends what it may


@pytest.mark.parametrize("bug", ["one loss more", "on average"])
def test_a_looser_limit_is_caught(bug):
    def planted(log_):
        if bug == "on average":
            return calibrate(log_, 0.05).relaxation
        curve = CalibrationOptions().curve(log_)
        limit = binomial_spendable(Fraction(1, 20), Fraction(1), curve.n, curve.tick_digits, 0.1)
        return curve.breakpoints[first_within(curve.totals, [limit + 10**curve.tick_digits])[0]]

    assert failures(planted, runs=800, n=400, alpha=0.05) > most(0.1, 800)


SIZES = (0.25, 0.5, 0.75, 1.0)
LINE, DELTA = 0.05, 0.1


@pytest.mark.proof
def test_a_betting_certificate_keeps_its_confidence():
    def shipped(log_):
        return calibrate(log_, LINE, confidence=0.9, key=KEY).relaxation

    for sizes in (SIZES, (1.0,)):
        assert failures(shipped, runs=400, n=300, alpha=LINE, sizes=sizes) <= most(DELTA)


def betting(log_, *, order, wealth):
    """Return the smallest relaxation whose log wealth, by some recipe, is large enough."""
    curve = CalibrationOptions().curve(log_)
    bets = shared_bets(curve.row_losses(0.0)[order] / 1e12, LINE, DELTA)
    for point in curve.breakpoints:
        if wealth(np.log1p(-bets * (curve.row_losses(point)[order] / 1e12 - LINE))) >= log(1 / DELTA):
            return point
    return None


@pytest.mark.proof
def test_rows_sorted_by_their_losses_are_caught():
    def planted(log_):
        order = np.argsort(log_.guardian[1::2] - log_.guardian[::2], kind="stable")
        return betting(log_, order=order, wealth=lambda steps: steps.cumsum().max())

    assert failures(planted, runs=60, n=300, alpha=LINE, sizes=SIZES) > most(DELTA, 60)


@pytest.mark.proof
def test_adding_the_maxima_of_two_halves_is_caught():
    def halves(steps):
        middle = len(steps) // 2
        return steps[:middle].cumsum().max() + steps[middle:].cumsum().max()

    def planted(log_):
        return betting(log_, order=row_order(log_, KEY), wealth=halves)

    assert failures(planted, runs=250, n=300, alpha=LINE, sizes=SIZES) > most(DELTA, 250)


def joint_failures(stops_of, runs, seed=1):
    rng = np.random.default_rng(seed)
    stops = [stops_of(drawn(rng, 400, chance=0.5)) for _ in range(runs)]
    return sum(any(risk(relaxation, chance=0.5) > alpha for alpha, relaxation in dial) for dial in stops)


def test_all_stops_of_a_dial_hold_together_and_pointwise_bounds_are_caught():
    def shipped(log_):
        dial = calibrate(log_, 0.05, confidence=0.9, zero_one=True, dial=True).dial
        return [(stop.alpha, stop.relaxation) for stop in dial]

    def pointwise(log_):
        stops = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2)
        return [(a, calibrate(log_, a, confidence=0.9, zero_one=True).relaxation) for a in stops]

    assert joint_failures(shipped, 300) <= most(0.1, 300)
    assert joint_failures(pointwise, 150) > most(0.1, 150)


CHANCES = {"easy": 0.1, "usual": 0.3, "hard": 0.9}


def grouped(rng, n):
    """Return a log of three groups whose losses differ by a factor of nine."""
    logs = {name: drawn(rng, n // 3, chance=chance) for name, chance in CHANCES.items()}
    primary = np.concatenate([one.primary.reshape(-1, 2) for one in logs.values()])
    guardian = np.concatenate([one.guardian.reshape(-1, 2) for one in logs.values()])
    return ScoreLog.from_arrays(primary, guardian, group=[name for name in logs for _ in range(n // 3)])


def worst_group(choose, runs=300):
    """Return the largest expected loss of a group, and its standard error."""
    rng = np.random.default_rng(2)
    losses = {name: [] for name in CHANCES}
    for _ in range(runs):
        thresholds = choose(grouped(rng, 600))
        for name, chance in CHANCES.items():
            losses[name].append(risk(thresholds[name], chance=chance))
    return max((float(np.mean(of)), float(np.std(of) / runs**0.5)) for of in losses.values())


def test_every_group_keeps_its_budget_and_a_pooled_threshold_is_caught():
    def shipped(log_):
        return {name: group.relaxation for name, group in calibrate(log_, 0.05, by="group").groups.items()}

    def pooled(log_):
        return dict.fromkeys(CHANCES, calibrate(log_, 0.05).relaxation)

    def shrunk(log_):
        own, all_ = shipped(log_), calibrate(log_, 0.05).relaxation
        return {name: (2 * value + all_) / 3 for name, value in own.items()}

    mean, error = worst_group(shipped)
    assert mean <= 0.05 + 3 * error
    for planted in (pooled, shrunk):
        mean, error = worst_group(planted)
        assert mean > 0.05 + 3 * error


@pytest.mark.proof
def test_all_groups_keep_their_confidence_together():
    rng, failed = np.random.default_rng(3), 0
    for _ in range(200):
        groups = calibrate(grouped(rng, 600), 0.05, by="group", confidence=0.9, zero_one=True).groups
        failed += any(risk(groups[name].relaxation, chance=chance) > 0.05 for name, chance in CHANCES.items())
    assert failed <= most(0.1, 200)


@pytest.mark.proof
def test_a_query_of_several_groups_loses_no_more_than_in_each():
    rng = np.random.default_rng(4)
    certificate = calibrate(grouped(rng, 600), 0.05, by="group")
    own = [group.relaxation for group in certificate.groups.values()]
    assert certificate.threshold(tuple(CHANCES))[0] == max(own)


def small_groups_loss(runs):
    """Return the mean loss of queries of small groups, and its standard error.

    A bag of four hard groups of three rows and six easy ones of two; any row may be the query, and the others calibrate.
    """
    rng = np.random.default_rng(6)
    names = np.array([f"hard{k // 3}" for k in range(12)] + [f"easy{k // 2}" for k in range(12)])
    guardian = np.repeat([[0.0, 1.0], [1.0, 0.0]], 12, axis=0)
    losses = []
    for query in rng.integers(0, 24, runs).tolist():
        primary = np.stack([rng.random(24), np.zeros(24)], axis=1)
        rest = np.arange(24) != query
        log_ = ScoreLog.from_arrays(primary[rest], guardian[rest], group=names[rest].tolist())
        certificate = calibrate(log_, 0.3, by="group", small_groups="merge")
        alone = certificate.decide(primary[query], group=str(names[query])).decided_by == "primary"
        losses.append(float(alone and query < 12))
    return float(np.mean(losses)), float(np.std(losses) / runs**0.5)


@pytest.mark.proof
def test_small_groups_keep_the_budget_together_and_uncounted_queries_are_caught(monkeypatch):
    """With alpha 0.3 a group needs three rows; a hard group has three if the query is one of them."""
    mean, error = small_groups_loss(400)
    assert 0.2 < mean <= 0.3 + 3 * error

    def uncounted(rows, fewest):
        shared = np.concatenate([own for own in rows if len(own) < fewest])
        return [shared if len(own) < fewest else own for own in rows]

    monkeypatch.setattr(calibrate_module, "threshold_rows", uncounted)
    mean, error = small_groups_loss(150)
    assert mean > 0.3 + 3 * error
