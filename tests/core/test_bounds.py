from math import comb

import pytest

from conformal_arbitrage.core.bounds import (
    beta_cdf,
    binomial_cdf,
    binomial_interval,
    binomial_limit,
    bounded_interval,
    hoeffding_bentkus,
    signed_tail,
)


def at_least(k, n, p):
    return sum(comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(k, n + 1))


@pytest.mark.parametrize("n", [1, 7, 60])
def test_the_incomplete_beta_function_is_a_binomial_tail(n):
    for k in range(1, n + 1):
        for p in (0.01, 0.3, 0.5, 0.97):
            assert beta_cdf(p, k, n - k + 1) == pytest.approx(at_least(k, n, p), rel=1e-9)
    assert (beta_cdf(0, 2, 3), beta_cdf(1, 2, 3)) == (0, 1)


def test_the_binomial_interval_has_published_values():
    assert binomial_interval(3, 10, 0.95) == pytest.approx((0.0667, 0.6525), abs=1e-4)
    assert binomial_interval(5, 100, 0.95) == pytest.approx((0.0164, 0.1128), abs=1e-4)
    assert binomial_interval(0, 10, 0.95) == pytest.approx((0, 1 - 0.025**0.1))
    assert binomial_interval(10, 10, 0.95) == pytest.approx((0.025**0.1, 1))
    low, high = binomial_interval(500_000, 10_000_000, 0.95)
    assert (low, high) == pytest.approx((0.049865, 0.050135), abs=1e-6)


@pytest.mark.parametrize("interval", [binomial_interval, lambda k, n, c: bounded_interval(k / n, n, c)])
def test_both_intervals_cover_every_coin(interval):
    for n in (5, 40):
        ends = [interval(k, n, 0.9) for k in range(n + 1)]
        for p in (0.001, 0.02, 0.1, 0.5, 0.93, 0.999):
            covered = sum(comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1) if ends[k][0] <= p <= ends[k][1])
            assert covered >= 0.9 - 1e-12


def test_the_bounded_interval_holds_its_mean_and_shrinks():
    for mean in (0.0, 0.01, 0.5, 1.0):
        widths = []
        for n in (1, 10, 1000):
            low, high = bounded_interval(mean, n, 0.95)
            assert 0 <= low <= mean <= high <= 1
            widths.append(high - low)
        assert widths == sorted(widths, reverse=True)


def test_a_binomial_distribution_sums_its_terms():
    for k in (-1, 0, 3, 7, 8):
        assert binomial_cdf(k, 7, 0.3) == pytest.approx(1 - at_least(k + 1, 7, 0.3), abs=1e-12)


@pytest.mark.parametrize(
    ("n", "p", "delta", "limit"),
    [
        (200, 0.05, 0.1, 5),
        (400, 0.05, 0.1, 14),
        (400, 0.05, 0.01, 10),
        (2000, 0.05, 0.1, 87),
        (2000, 0.1, 0.05, 177),
        (45, 0.05, 0.1, 0),
        (44, 0.05, 0.1, -1),
    ],
)
def test_limits_of_the_binomial_test_have_the_values_of_the_specification(n, p, delta, limit):
    assert binomial_limit(n, p, delta) == limit


def test_the_bound_of_hoeffding_and_bentkus_covers_every_coin():
    for total in (0, 3, 9):
        for p in (0.1, 0.4):
            assert hoeffding_bentkus(total, 20, p) >= 1 - at_least(total + 1, 20, p) - 1e-12
    assert hoeffding_bentkus(10, 20, 0.3) == 1


@pytest.mark.parametrize("n", [5, 20])
@pytest.mark.parametrize(("lost", "gained"), [(0.3, 0.1), (0.5, 0.5), (0.2, 0.0), (1.0, 0.0)])
def test_the_bound_of_signed_losses_covers_every_coin_with_three_sides(n, lost, gained):
    law = {0: 1.0}
    for _ in range(n):
        after = {}
        for total, chance in law.items():
            for step, p in ((1, lost), (-1, gained), (0, 1 - lost - gained)):
                after[total + step] = after.get(total + step, 0.0) + chance * p
        law = after
    for total in range(-n, n + 1):
        reached = sum(chance for value, chance in law.items() if value <= total)
        bound = signed_tail(total, n, lost - gained, absolute=lost + gained)
        assert reached <= bound + 1e-12
        assert bound <= signed_tail(total, n, lost - gained, absolute=1.0) + 1e-12
    assert signed_tail(n, n, 0.1, absolute=0.5) == 1.0
