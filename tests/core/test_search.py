"""The search without a sort, on one machine and over parts, against a curve that sorts everything."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformal_arbitrage import RiskCurve, ScoreLog
from conformal_arbitrage.core import exact, risk
from conformal_arbitrage.core.exact import sorted_columns
from conformal_arbitrage.core.risk import Bracket, Fold, LossMeasure, _coarse, class_sizes, crossings, crossings_here  # pyright: ignore[reportPrivateUsage]
from tests.core.sorted_curve import every_fall, first_within, sorted_curve

SEES = ("candidates", "all", "all-restricted-loss")
KINDS = ("coarse", "unit", "decades", "tiny", "large", "signed", "mostly")


def scores_of(rng, kind, size):
    if kind == "coarse":
        return rng.integers(0, 5, size) / 4
    if kind == "decades":
        return rng.random(size) * 10.0 ** rng.integers(-14, 14)
    if kind == "mostly":  # rows of one decade but for a few, and zeros of either sign
        return rng.choice([-0.0, 0.0, rng.random(), 1.0], size) * (1.0 if rng.random() < 0.95 else 1e-6)
    if kind == "tiny":
        return rng.integers(0, 4, size) * 1e-21
    if kind == "large":
        return np.round(rng.random(size) * 4e6, 3)
    return rng.random(size) if kind == "unit" else np.round(rng.normal(size=size), 3)


def hostile_log(seed):
    """A log of ragged rows with ties, decades, long rows, missing Guardians and Primaries without an opinion."""
    rng = np.random.default_rng(seed)
    longest = int(rng.choice([1, 2, 4, 6, 9, 40]))
    n = int(rng.integers(1, 60 if longest < 40 else 12))
    even = rng.random() < 0.4
    sizes = np.full(n, longest) if even else rng.integers(1, longest + 1, n)
    kinds = rng.choice(KINDS, 2)
    guardian_kind = kinds[1] if kinds[1] in ("coarse", "unit", "large", "signed") else "unit"
    primary = [scores_of(rng, kinds[0], k) for k in sizes]
    guardian = [scores_of(rng, guardian_kind, k) for k in sizes]
    if rng.random() < 0.4:
        guardian = [None if rng.random() < 0.2 else one for one in guardian]
    if rng.random() < 0.2:
        primary = [np.array(one, dtype=np.float32) for one in primary]
    if rng.random() < 0.3:
        primary = [np.full(len(one), np.nan) if rng.random() < 0.2 else one for one in primary]
    return ScoreLog.from_arrays(primary, guardian), rng


def some_limits(rng, totals):
    """Limits at, just below and between totals, and those that everything or nothing keeps."""
    chosen = [totals[int(k)] for k in rng.integers(0, len(totals), 5)]
    return [-1, totals[0], totals[-1], *chosen, *(one - 1 for one in chosen), *(one + 1 for one in chosen)]


seeds = st.integers(0, 2**32 - 1)


def check_curve(seed, sees, drawn):
    """Compare thresholds and curve with those of the full sort."""
    log, rng = hostile_log(seed)
    u = rng.integers(0, 3, len(log)) / 4 if drawn and rng.random() < 0.5 else rng.random(len(log)) if drawn else None
    points, totals, digits = sorted_curve(log, sees, u, missing_loss="0.75")
    curve = RiskCurve.from_log(log, guardian_sees=sees, missing_loss="0.75", u=u)
    limits = some_limits(rng, totals)
    for limit, found in zip(limits, curve.thresholds(limits), strict=True):
        expected = first_within(points, totals, limit)
        if expected is None:
            assert found is None
        else:
            assert found.relaxation == expected[0]
            assert found.boundary_u == (expected[1] if drawn else None)
            assert found.total == Fraction(expected[2], 10**digits)
    assert curve.tick_digits == digits
    assert curve.breakpoints.tolist() == [gap for gap, _ in points]
    assert curve.totals.tolist() == totals
    assert not drawn or curve.boundary_u.tolist() == [draw for _, draw in points]


@given(seeds, st.sampled_from(SEES), st.booleans())
@settings(max_examples=60, deadline=None)
def test_thresholds_and_curve_equal_those_of_a_full_sort(seed, sees, drawn):
    check_curve(seed, sees, drawn)


@pytest.mark.proof
@given(seeds, st.sampled_from(SEES), st.booleans())
@settings(max_examples=500, deadline=None)
def test_thresholds_and_curves_of_many_logs_equal_those_of_a_full_sort(seed, sees, drawn):
    check_curve(seed, sees, drawn)


def parts_of(log, cuts, digits, sees):
    """The events of a log that is cut into parts, each computed by itself, at the tick of the whole."""
    edges = [0, *sorted(cuts), len(log)]
    parts = [log.select(range(a, b)) for a, b in pairwise(edges) if b > a]
    return [LossMeasure(guardian_sees=sees, missing_loss="0.75", tick_digits=digits).events(part) for part in parts]


class Scans:
    """Goes through parts in memory, counting how often."""

    def __init__(self, parts):
        self.parts, self.count = parts, 0

    def __call__(self, work):
        self.count += 1
        return (work(part.position, part.drop) for part in self.parts)


def check_parts(seed, sees, buckets, collected, digits_of=lambda digits, seed: digits):
    """Compare the search over parts with the full sort; return the number of scans."""
    log, rng = hostile_log(seed)
    falls, total, digits = every_fall(log, sees, missing_loss="0.75")
    points, totals, _ = sorted_curve(log, sees, missing_loss="0.75")
    parts = parts_of(log, rng.integers(0, len(log) + 1, 3).tolist(), digits_of(digits, seed), sees)
    assert sum(part.total for part in parts) == total
    scans, limits = Scans(parts), some_limits(rng, totals)
    span = max((gap for gap, *_ in falls), default=0.0) * float(rng.choice([0.5, 1.0, 1.7]))
    steps = crossings(scans, total, limits, span, first=buckets, later=buckets, collected=collected)
    for limit, one in zip(limits, steps, strict=True):
        expected = first_within(points, totals, limit)
        assert (one is None) == (expected is None)
        if one is not None:
            assert (one.gap, one.after) == (expected[0], expected[2])
            assert one.before == (total if one.gap == 0 else totals[points.index((one.gap, 0.0)) - 1])
    return scans.count


def check_scans(seed, sees, buckets, collected):
    limits = 18  # share the buckets
    assert check_parts(seed, sees, buckets, collected) <= 2 + 63 / max(1, np.log2(buckets / limits) - 1)


PARTS = (seeds, st.sampled_from(SEES), st.sampled_from([16, 64, 1024]), st.sampled_from([0, 1, 50]))


@given(*PARTS)
@settings(max_examples=40, deadline=None)
def test_the_search_over_parts_equals_the_full_sort_within_its_number_of_scans(seed, sees, buckets, collected):
    check_scans(seed, sees, buckets, collected)


@pytest.mark.proof
@given(*PARTS)
@settings(max_examples=400, deadline=None)
def test_searches_over_the_parts_of_many_logs_equal_the_full_sort(seed, sees, buckets, collected):
    check_scans(seed, sees, buckets, collected)


def test_the_scans_over_parts_are_few_with_the_usual_buckets():
    assert max(check_parts(seed, "candidates", 1 << 16, 0) for seed in range(30)) <= 4


def fails(check):
    """Whether a check fails on at least one of many logs."""
    for seed in range(200):
        try:
            check(seed)
        except (AssertionError, IndexError, ValueError):
            return True
    return False


def test_a_bracket_without_its_lower_end_is_caught(monkeypatch):
    monkeypatch.setattr(Bracket, "inside", lambda self, gap: (gap > self.low) & (gap <= self.high))
    assert fails(lambda seed: check_parts(seed, "candidates", 16, 0))


def test_ticks_of_each_parts_own_are_caught():
    assert fails(lambda seed: check_parts(seed, "candidates", 64, 1, digits_of=lambda digits, seed: None))


def test_sums_in_floats_are_caught(monkeypatch):
    def floats(place, drop, buckets):
        return np.bincount(place, weights=drop.astype(np.float32), minlength=buckets).astype(np.int64)

    monkeypatch.setattr(risk, "bucket_sums", floats)
    assert fails(lambda seed: check_parts(seed, "candidates", 16, 0))


def test_buckets_that_do_not_rise_with_the_gap_are_caught(monkeypatch):
    places = Bracket.places
    monkeypatch.setattr(Bracket, "places", lambda self, gap: places(self, gap) ^ 1)
    assert fails(lambda seed: check_parts(seed, "candidates", 16, 0))


def test_a_zero_has_no_sign():
    rng = np.random.default_rng(3)
    signed = rng.choice([-0.0, 0.0, -0.5, -1.0], (500, 4))
    guardian = rng.random((500, 4))
    one, other = (
        LossMeasure(guardian_sees="candidates").events(ScoreLog.from_arrays(primary, guardian))
        for primary in (signed, signed + 0.0)
    )
    assert one.total == other.total
    assert one.position.tolist() == other.position.tolist()


def check_other_decade(sees, others=(0, 7_000, 99_999)):
    """A row of another decade than nearly all others falls as it does in a log of its own."""
    rng = np.random.default_rng(2)
    primary, guardian = rng.random((100_000, 4)), rng.random((100_000, 4))
    primary[np.array(others)] *= 1e-3
    events, alone = (
        LossMeasure(guardian_sees=sees, tick_digits=12).events(ScoreLog.from_arrays(primary[rows], guardian[rows]))
        for rows in (slice(None), slice(7_000, 7_001))
    )
    own = events.row == 7_000
    assert sorted(zip(events.position[own], events.drop[own], strict=True)) == sorted(
        zip(alone.position, alone.drop, strict=True)
    )


@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("others", [(0, 7_000, 99_999), range(0, 100_000, 2)], ids=["few", "half"])
def test_one_row_of_another_decade_falls_as_it_does_alone(sees, others):
    check_other_decade(sees, others)


@pytest.mark.parametrize("sees", SEES)
def test_rows_of_another_decade_that_are_forgotten_are_caught(monkeypatch, sees):
    monkeypatch.setattr(exact, "common_decimals", forgetful_decimals)
    with pytest.raises(AssertionError):
        check_other_decade(sees)


def forgetful_decimals(largest, digits, common=exact.common_decimals):
    return common(largest, digits)[0], np.zeros(0, np.int64)


@pytest.mark.parametrize("sees", SEES)
def test_the_total_is_a_sum_of_integers(sees):
    n = 600_000  # the losses of one block sum to more than 2^53 ticks, and the last digit of the sum is odd
    guardian = np.full((n, 2), [0.0, 1.0 - 1e-12])
    guardian[0] = 0.0, 1.0
    events = LossMeasure(guardian_sees=sees, tick_digits=12).events(
        ScoreLog.from_arrays(np.full((n, 2), [1.0, 0.0]), guardian)
    )
    assert events.total == n * (10**12 - 1) + 1


def test_the_largest_tick_leaves_the_last_bits_of_a_key_to_the_place():
    largest = np.array([2e12, 2e12 - 1, 1.0])
    assert not (largest.view(np.int64) & exact.PLACE_BITS).any()
    events = LossMeasure(guardian_sees="candidates").events(
        ScoreLog.from_arrays([[1.0, -1.0, -1.0 + 1e-12]], [[0.0, 1.0, 0.5]])
    )
    assert events.position.tolist() == [2.0 - 1e-12, 2.0]


def test_long_rows_are_not_padded_where_the_guardian_sees_everything():
    # the last action is the top one, of which a copy would be a tie
    log = ScoreLog.from_arrays([[*range(8)], [*range(9)]], [[1.0] + [0.0] * 7, [1.0] + [0.0] * 8])
    assert LossMeasure().events(log).position.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("size", range(1, 7))
def test_networks_sort_every_row_of_zeros_and_ones_and_so_every_row(size):
    rows = np.array([[(k >> j) & 1 for k in range(1 << size)] for j in range(size)])
    assert np.array_equal(np.array(sorted_columns(rows.copy())), np.sort(rows, axis=0))


def test_classes_of_sizes_hold_their_rows_and_little_else():
    sizes = np.arange(7, 5000)
    widths = class_sizes(sizes)
    assert (widths >= sizes).all()
    assert (widths <= sizes * 1.25).all()
    assert len(np.unique(widths)) < 45


def test_coarse_ticks_round_up_in_floats_as_in_integers():
    rng = np.random.default_rng(0)
    for digits in range(5, 12):
        unit = 10 ** (12 - digits)
        whole = rng.integers(0, 2**53 // unit, 2000) * unit
        levels = np.concatenate([whole, whole + 1, np.maximum(whole - 1, 0)])
        integers = -(-levels // unit)
        assert np.array_equal(_coarse(levels.astype(np.float64), digits), integers)


def test_draws_are_asked_for_only_at_the_threshold_gap():
    rng = np.random.default_rng(1)
    log = ScoreLog.from_arrays(rng.integers(0, 101, (2000, 2)) / 100, rng.random((2000, 2)))
    u, rows = rng.random(2000), []

    def draw(asked):
        rows.extend(asked.tolist())
        return u[asked]

    lazy, plain = (RiskCurve.from_log(log, u=one) for one in (draw, u))
    (found,) = lazy.thresholds(lazy.limits(["0.05"]))
    assert 0 < len(rows) < 60
    index = plain.search(["0.05"])[0]
    assert (found.relaxation, found.boundary_u) == (plain.breakpoints[index], plain.boundary_u[index])


def test_nothing_falls_in_a_log_without_losses():
    curve = RiskCurve.from_log(ScoreLog.from_arrays([[0.1]], [[1.0]]))
    assert [one.relaxation for one in curve.thresholds([0, 5])] == [0.0, 0.0]
    assert crossings_here(3, np.zeros(0), np.zeros(0, np.int64), [2, 3])[0] is None
    assert Fold((Bracket(0.0, 1.0, 4),))(np.zeros(0), np.zeros(0, np.int64))[0].place.tolist() == []
