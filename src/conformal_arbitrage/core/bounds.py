"""Confidence bounds and tests that hold at every number of rows: intervals, binomial, hypergeometric, betting."""

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from math import ceil, comb, e, exp, inf, lgamma, log, log1p, pi, sqrt

import numpy as np

from conformal_arbitrage.core.exact import Floats
from conformal_arbitrage.core.risk import Number, as_fraction
from conformal_arbitrage.errors import OptionError

Interval = tuple[float, float]
_BISECTIONS = 100
_TINY, _CONVERGED = 1e-300, 1e-14
_SURE = 1 - 1e-8
"""A tail counts as small enough only by more than its rounding error."""


def binomial_interval(successes: int, n: int, confidence: float) -> Interval:
    """Return the interval of Clopper and Pearson (1934) for the probability behind `successes` of n independent draws.

    Its ends are the probabilities at which a binomial tail as far out as the observed one has (1 - confidence) / 2;
    these are quantiles of beta distributions. It covers with at least the stated confidence.
    """
    tail = (1 - confidence) / 2
    low, high = 0.0, 1.0
    if successes > 0:  # P(at least k successes) = I_p(k, n - k + 1) rises with p
        low = _last(lambda p: beta_cdf(p, successes, n - successes + 1) <= tail, 0.0, 1.0)
    if successes < n:  # P(at most k successes) = 1 - I_p(k + 1, n - k) falls with p
        high = 1 - _last(lambda q: beta_cdf(q, n - successes, successes + 1) <= tail, 0.0, 1.0)
    return low, high


def bounded_interval(mean: float, n: int, confidence: float, *, share: float = 1.0) -> Interval:
    """Return the Chernoff-Hoeffding interval for the mean of n independent numbers in [0, 1], whatever their law.

    For X in [0, 1] with mean m, e^(tX) <= 1 - X + X e^t by convexity, so E e^(tX) is at most that of a coin with
    probability m, and P(the sample mean is x or beyond) <= exp(-n KL(x, m)) on either side (Hoeffding 1963, Theorem 1).
    The interval holds every m with n KL(x, m) <= log(2 / (1 - confidence)).

    For n independent clusters, of at most M numbers each, it bounds m = E(total) / E(size). If m is the truth, then
    (total + m (M - size)) / M lies in [0, 1] and has mean m, so the same inequality holds for it; its sample mean is
    x(m) = (1 - share) m + share x. KL(x(m), m) is convex in m, since KL is convex in the pair and x(m) is linear, and 0
    at m = x: the values of m that are not ruled out form an interval.

    Args:
        mean: the mean x of all numbers.
        n: how many numbers, or clusters of numbers, are independent of each other.
        share: the mean size of a cluster over the largest possible one.
    """
    limit = log(2 / (1 - confidence)) / n

    def possible(m: float) -> bool:
        return _divergence((1 - share) * m + share * mean, m) <= limit

    low = mean - _last(lambda d: possible(mean - d), 0.0, mean)
    high = mean + _last(lambda d: possible(mean + d), 0.0, 1 - mean)
    return max(low, 0.0), min(high, 1.0)


def binomial_cdf(successes: int, n: int, p: float) -> float:
    """Return the probability of at most `successes` in n independent draws: 1 - I_p(k + 1, n - k)."""
    if successes < 0:
        return 0.0
    return 1.0 if successes >= n else beta_cdf(1 - p, n - successes, successes + 1)


@lru_cache(maxsize=1024)
def binomial_spendable(alpha: Fraction, bound: Fraction, n: int, tick_digits: int, delta: float) -> int:
    """Return the largest total loss, in ticks, at which n losses of 0 or the bound pass the binomial test; -1 if none."""
    losses = binomial_limit(n, float(alpha / bound), delta)
    return -1 if losses < 0 else int(losses * bound * 10**tick_digits)


def binomial_limit(n: int, p: float, delta: float) -> int:
    """Return the largest k with P(Bin(n, p) <= k) <= delta; -1 if there is none.

    At most k losses in n rows reject, at level delta, that a loss has probability p or more.
    """
    low, high = -1, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if binomial_cdf(middle, n, p) <= delta * _SURE else (low, middle)
    return low


def hoeffding_bentkus(total: float, n: int, p: float) -> float:
    """Return a bound on P(the sum of n independent losses in [0, 1] with mean p or more is at most `total`).

    The smaller of Hoeffding's exp(-n KL(total / n, p)) and Bentkus' e P(Bin(n, p) <= ceil(total)).
    """
    mean = total / n
    if mean >= p:
        return 1.0
    return min(exp(-n * _divergence(mean, p)), e * binomial_cdf(ceil(total), n, p), 1.0)


def signed_tail(total: float, n: int, p: float, *, absolute: float) -> float:
    """Return a bound on P(the sum of n independent losses in [-1, 1] with mean p or more is at most `total`).

    For a loss l with E|l| = v, e^(-t l) <= 1 - |l| + |l| e^(-t sign(l)) by convexity, so E e^(-t l) is at most
    1 - v + (v + p) / 2 e^(-t) + (v - p) / 2 e^t, that of a coin with three sides. Chernoff's bound is the least of
    e^(t total) times its n-th power over t >= 0; it grows with v.

    Args:
        p: their mean, above 0 and at most `absolute`.
        absolute: an upper bound v on the mean of their absolute values.
    """
    if total >= n * p:
        return 1.0
    gains, losses = (absolute - p) / 2, (absolute + p) / 2
    lean, balance = total * (1 - absolute), 4 * (n + total) * gains * (n - total) * losses
    steep = lean + sqrt(lean**2 + max(balance, 0.0))
    if steep <= 0:  # the least is the limit for large t: no gains, or nothing but gains
        return (1 - absolute) ** n if gains == 0 and total >= 0 else gains**n
    y = 2 * (n - total) * losses / steep  # e^t at the least, where the derivative is 0: a quadratic equation
    return min(exp(total * log(y) + n * log(1 - absolute + losses / y + gains * y)), 1.0)


def largest_plausible(tail: Callable[[float], float], start: float, delta: float, *, stop: float = 1.0) -> float:
    """Return the p at which a tail that falls in p from `start` to `stop` reaches delta; `stop` if it never does."""
    return _last(lambda p: tail(p) > delta, start, stop)


def _divergence(x: float, m: float) -> float:
    """Return KL(x, m) between two coins; infinite where m rules x out."""
    if (x > 0 and m <= 0) or (x < 1 and m >= 1):
        return inf
    return (x * log(x / m) if x > 0 else 0.0) + ((1 - x) * log((1 - x) / (1 - m)) if x < 1 else 0.0)


def _last(holds: Callable[[float], bool], start: float, stop: float) -> float:
    """Return where a condition that holds from `start` on ceases to hold, by bisection; `stop` if it never does."""
    if holds(stop):
        return stop
    for _ in range(_BISECTIONS):
        middle = (start + stop) / 2
        start, stop = (middle, stop) if holds(middle) else (start, middle)
    return start


def beta_cdf(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b) for a, b >= 1, by its continued fraction."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges on the other side
        return 1 - beta_cdf(1 - x, b, a)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a
    return front * _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """Evaluate the continued fraction of the incomplete beta function with Lentz's method."""
    c, d = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value, factor, m = d, 2.0, 0
    while abs(factor - 1) > _CONVERGED:  # after about sqrt(a + b) terms on this side of the mean
        m, factor = m + 1, 1.0
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / _nonzero(1 + term * d), _nonzero(1 + term / c)
            factor *= c * d
        value *= factor
    return value


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


# --- A sample without replacement ---


_EXACT_ITEMS = 10_000
"""Up to so many items a tail that rounding leaves undecided is compared in integers."""
_UNDECIDED = 1e-9
_TERMS_AT_ONCE = 1 << 14


@lru_cache(maxsize=1024)
def hypergeometric_limit(items: int, allowed: int, sample: int, delta: Fraction) -> int:
    """Return the largest k with P(Hyper(items, allowed + k + 1 bad, sample drawn) <= k) <= delta; -1 if there is none.

    The probability rises with k, since one more bad item adds at most one to the count. Where the items that are not
    drawn are at most `allowed`, every k will do, and it is `sample`.

    Args:
        allowed: how many bad ones may remain undrawn.
        sample: how many are drawn, all subsets alike.
    """
    if items - sample <= allowed:
        return sample
    low, high = -1, sample
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if _is_tail_within(middle, items, allowed + middle + 1, sample, delta) else (low, middle)
        )
    return low


def _is_tail_within(k: int, items: int, bad: int, sample: int, delta: Fraction) -> bool:
    """Tell whether P(Hyper(items, bad, sample) <= k) <= delta; where rounding leaves it open and items are many: no."""
    tail, level = hypergeometric_cdf(k, items, bad, sample), float(delta)
    if abs(tail - level) > _UNDECIDED * level:
        return tail < level
    if items > _EXACT_ITEMS:
        return False
    ways = sum(comb(bad, j) * comb(items - bad, sample - j) for j in range(max(0, sample - items + bad), k + 1))
    return ways * delta.denominator <= delta.numerator * comb(items, sample)


def hypergeometric_cdf(k: int, items: int, bad: int, sample: int) -> float:
    """Return the probability that a sample without replacement holds at most k of the bad items.

    The largest term comes from Stirling's errors, which are small where logarithms of factorials are large (Loader 2000);
    each term below it is the one above times a ratio.
    """
    least, most = max(0, sample - (items - bad)), min(bad, sample)
    if k < least:
        return 0.0
    if k >= most:
        return 1.0
    if k > (sample + 1) * (bad + 1) // (items + 2):  # above the mode: the other tail, in which terms fall as well
        return 1 - hypergeometric_cdf(sample - k - 1, items, items - bad, sample)
    total = term = 1.0
    for top in range(k, least, -_TERMS_AT_ONCE):
        j = np.arange(top, max(top - _TERMS_AT_ONCE, least), -1, dtype=np.float64)
        terms = term * np.cumprod(j / (bad - j + 1) * ((items - bad - sample + j) / (sample - j + 1)))
        total, term = total + float(terms.sum()), float(terms[-1])
        if term < _CONVERGED * total / items:
            break
    return exp(_log_hypergeometric(k, items, bad, sample)) * total


def _log_hypergeometric(k: int, items: int, bad: int, sample: int) -> float:
    p = sample / items
    return _log_binomial(k, bad, p) + _log_binomial(sample - k, items - bad, p) - _log_binomial(sample, items, p)


def _log_binomial(k: int, n: int, p: float) -> float:
    """Return log P(Bin(n, p) = k), with an error that does not grow with n."""
    if p == 1 or k in (0, n):  # where Stirling's formula has no place
        return 0.0 if n == 0 or p == 1 else (n * log1p(-p) if k == 0 else n * log(p))
    errors = _stirling_error(n) - _stirling_error(k) - _stirling_error(n - k)
    deviance = _deviance(k, n * p) + _deviance(n - k, n * (1 - p))
    return errors - deviance - 0.5 * log(2 * pi * k * ((n - k) / n))


def _stirling_error(n: int) -> float:
    """Return log n! minus Stirling's formula for it."""
    if n < 16:
        return lgamma(n + 1) - (n + 0.5) * log(n) + n - 0.5 * log(2 * pi)
    square = n * n
    return (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / square) / square) / square) / n


def _deviance(x: float, mean: float) -> float:
    """Return x log(x / mean) + mean - x without loss of digits where the two are close."""
    if abs(x - mean) >= 0.1 * (x + mean):
        return x * log(x / mean) + mean - x
    ratio = (x - mean) / (x + mean)
    total, power, odd = (x - mean) * ratio, 2 * x * ratio**3, 3
    while total != total + power / odd:
        total, power, odd = total + power / odd, power * ratio**2, odd + 2
    return total


# --- A test that a mean loss lies below a line, for graded losses ---


_BOLDEST = 0.999
_MARGIN = 1e-9
"""Wealth must exceed its limit by more than rounding errors."""


def shared_bets(first: Floats, line: float, delta: float) -> Floats:
    """Return the bet on every row, from the losses of earlier rows at relaxation 0.

    nu_i = min(0.999 / (1 - a), sqrt(2 log(1 / delta) / (n v_i))), where v_i = max(a c_i - a^2, a^2 / 20) guesses the
    variance at the threshold, with c_i the ratio of the sums of x^2 and of x over earlier rows, each plus 1/2.

    Args:
        first: the losses at relaxation 0, in order.
        line: a, above 0 and below 1.
    """
    squares = np.cumsum(first**2) - first**2
    sums = np.cumsum(first) - first
    ratio = (0.5 + squares) / (0.5 + sums)
    variance = np.maximum(line * ratio - line**2, line**2 / 20)
    return np.minimum(_BOLDEST / (1 - line), np.sqrt(2 * log(1 / delta) / (len(first) * variance)))


def accepts(losses: Floats, bets: Floats, line: float, delta: float) -> bool:
    """Tell whether losses, in order, show that their mean lies below the line, at level delta."""
    wealth = np.cumsum(np.log1p(-bets * (np.minimum(losses, 1.0) - line)))
    return bool(wealth.max(initial=0.0) >= log(1 / delta) + _MARGIN)


def accepts_sample(losses: Floats, items: int, allowed: float, delta: float, bets: Floats) -> bool:
    """Tell whether the losses of a sample, in the order of its draw, show that those of all items add up to at most a sum.

    If they add up to more, the mean of those not drawn yet is above mu_t = max(0, (allowed - losses so far) / items left),
    so that the wealth, a product of 1 + bet (mu_t - loss), reaches 1 / delta with a probability of at most delta. With
    bets of at most 1 no factor is negative, and the wealth falls as any loss rises: larger sets of items have less of it.

    Args:
        losses: of the items drawn without replacement, in [0, 1].
        items: how many there are.
        allowed: the sum.
        delta: how often a larger sum may be accepted.
        bets: from 0 to 1, each from earlier losses alone.
    """
    left = items - np.arange(len(losses))
    line = np.maximum(allowed - (np.cumsum(losses) - losses), 0.0) / left
    wealth = np.cumsum(np.log1p(np.minimum(bets, _BOLDEST) * (line - losses)))
    return bool(wealth.max(initial=0.0) >= log(1 / delta) + _MARGIN)


# --- The luck of the decisions to come ---


_MOST_DECISIONS = 1_000_000
"""Beyond this the range no longer changes."""


@lru_cache(maxsize=1 << 10)
def next_range(n: int, share: Number, decisions: int) -> Interval | None:
    """Return the range of the mean loss over the next N decisions, as shares of the loss bound; None if all are deferred.

    It holds for 95 % of calibrations and traffic if they are exchangeable, losses are 0 or the bound, and the budget is
    spent: scores without ties, or a random boundary, and a Primary that needs the Guardian. Where it is not spent, the mean
    may lie below. For graded losses there is no such law: watch the limits of the running mean.

    Args:
        n: rows of the certificate.
        share: its risk budget as a share of the loss bound.
        decisions: N.
    """
    if decisions < 1:
        raise OptionError(f"decisions must be 1 or more; got {decisions}")
    losses = int(as_fraction(share, name="alpha") * (n + 1) // 1)
    if losses < 1:
        return None
    total = min(decisions, _MOST_DECISIONS)
    reached = np.cumsum(_beta_binomial(total, losses, n + 1 - losses))
    tail = (1 - 0.95) / 2
    low, high = np.searchsorted(reached, [tail, 1 - tail])
    return float(low / total), float(high / total)


def _beta_binomial(total: int, a: float, b: float) -> Floats:
    """Return the probability of 0 to `total` losses."""
    k = np.arange(total)
    steps = np.log(total - k) + np.log(a + k) - np.log(k + 1) - np.log(b + total - k - 1)
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    weights = np.exp(logs - logs.max())
    return weights / weights.sum()
