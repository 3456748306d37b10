from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformal_arbitrage import ScoreLogError
from conformal_arbitrage.core import exact as module
from conformal_arbitrage.core.exact import (
    LARGEST_SCORE,
    as_row,
    gaps,
    is_candidate,
    margins,
    row_candidates,
    row_margin,
    row_sight,
    sorted_gaps,
)


def row_gaps(scores, digits=12):
    return gaps(as_row(scores), digits=digits)[:, 0].tolist()


def _nasty():
    """Decimals, their neighbours among the floats, powers of ten, zeros of both signs, subnormals and the largest."""
    decimals = st.builds(lambda k, e: float(f"{k}e{e}"), st.integers(-(10**4), 10**4), st.integers(-330, 296))
    near = st.builds(lambda x, up: float(np.nextafter(x, np.inf if up else -np.inf)), decimals, st.booleans())
    shares = st.builds(lambda a, b: a / b, st.integers(0, 100), st.integers(100, 300))
    halves = st.builds(lambda k, d: (k + 0.5) / 10.0**d, st.integers(-99, 99), st.integers(0, 14))
    fixed = st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 1e-16, 1e22, LARGEST_SCORE, -LARGEST_SCORE])
    one = st.one_of(decimals, near, shares, halves, fixed, st.floats(-LARGEST_SCORE, LARGEST_SCORE))
    return one.filter(lambda x: abs(x) <= LARGEST_SCORE)


def bits(values):
    return np.array(values, dtype=np.float64).view(np.int64).tolist()


def test_equal_decimals_have_equal_gaps():
    distinct = {row_gaps([top / 100, (top - 10) / 100])[1] for top in range(10, 101)}
    assert distinct == {0.1}
    assert len({top / 100 - (top - 10) / 100 for top in range(10, 101)}) > 1  # what plain floats would give


def test_all_gaps_of_two_decimal_scores_are_the_101_decimals():
    distinct = {gap for a in range(101) for b in range(101) for gap in row_gaps([a / 100, b / 100])}
    assert distinct == {k / 100 for k in range(101)}


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=8), st.integers(-6, 13))
def test_a_gap_is_the_decimal_difference_at_any_scale(values, exponent):
    unit = Fraction(10) ** -(9 + exponent)
    rounded = row_gaps([float(v * unit) for v in values])
    assert rounded == [float((max(values) - v) * unit) for v in values]


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=8), st.sampled_from([6, 12]))
def test_a_gap_is_within_half_a_tick_of_the_difference(values, digits):
    rounded = row_gaps(values, digits)
    largest = max(abs(v) for v in values)
    for gap, value in zip(rounded, values, strict=True):
        assert gap >= 0
        assert abs(gap - (max(values) - value)) <= max(10.0 ** (1 - digits) * largest, 1e-22)
    assert 0.0 in rounded


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), min_size=1, max_size=40),
    st.sampled_from([6, 12]),
)
def test_one_row_alone_and_the_same_row_in_a_block_agree_to_the_bit(rows, digits):
    block = np.array(rows).T
    together = gaps(np.ascontiguousarray(block), digits=digits)
    for k, row in enumerate(rows):
        assert row_gaps(row, digits) == together[:, k].tolist()


@given(st.lists(st.tuples(_nasty(), _nasty()), min_size=1, max_size=20), st.sampled_from([6, 12]))
def test_rows_of_very_different_scales_keep_their_gaps_in_one_block(rows, digits):
    block = np.ascontiguousarray(np.array([*rows, (1e15, 3e15), (0.25, 0.125)]).T)
    together = gaps(block, digits=digits)
    for k, row in enumerate(rows):
        assert bits(module.row_gaps(row, digits=digits)) == bits(together[:, k])


@given(st.integers(1, 12), st.integers(0, 3), st.randoms(use_true_random=False))
def test_sorting_keeps_gaps_and_puts_the_lowest_index_first_among_equals(size, digits, random):
    block = np.array([[random.randint(0, 10**digits) / 10**digits for _ in range(50)] for _ in range(size)])
    ascending, order = sorted_gaps(block, digits=12)
    expected = np.argsort(gaps(block, digits=12), axis=0, kind="stable")
    assert np.array_equal(order, expected)
    assert np.array_equal(ascending, np.take_along_axis(gaps(block, digits=12), expected, axis=0))


def test_zeros_and_scores_too_small_to_tell_apart_are_ties():
    assert row_gaps([0.0, 0.0, 0.0]) == [0.0, 0.0, 0.0]
    assert row_gaps([1e-30, 3e-30]) == [0.0, 0.0]


def test_the_margin_is_the_second_smallest_gap_and_infinite_for_one_action():
    assert margins(sorted_gaps(as_row([0.2, 0.9, 0.6]), digits=12)[0]).tolist() == [0.3]
    assert margins(sorted_gaps(as_row([0.2]), digits=12)[0]).tolist() == [np.inf]


def test_a_row_with_an_unknown_score_has_no_opinion():
    assert row_gaps([0.1, None, 0.9]) == [0.0, 0.0, 0.0]
    assert row_gaps([0.1, float("nan")]) == [0.0, 0.0]


@pytest.mark.parametrize("scores", [[], [[0.1]], ["0.5"], [True, False], [0.1, float("inf")], [1e301], "ab", None, {}])
def test_anything_but_a_list_of_finite_numbers_is_refused(scores):
    with pytest.raises(ScoreLogError, match="Primary scores"):
        as_row(scores)


def test_at_the_boundary_the_draw_decides_except_at_gap_zero():
    gap = np.array([0.0, 0.1, 0.2, 0.3])
    assert is_candidate(gap, 0.2).tolist() == [True, True, True, False]
    assert is_candidate(gap, 0.2, u=0.4, boundary_u=0.5).tolist() == [True, True, True, False]
    assert is_candidate(gap, 0.2, u=0.6, boundary_u=0.5).tolist() == [True, True, False, False]
    assert is_candidate(gap, 0.0, u=0.9, boundary_u=0.0).tolist() == [True, False, False, False]
    assert is_candidate(gap, None).all()


SHORT_AND_LONG = st.one_of(
    st.lists(_nasty(), min_size=1, max_size=40),
    st.lists(st.integers(0, 1000).map(lambda k: k / 1000), min_size=1, max_size=6),
    st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3]), min_size=1, max_size=40),
)
BOUNDARIES = [(0.0, None), (0.4, 0.5), (0.5, 0.5), (0.6, 0.5)]


def check_one_query(scores, digits, place):
    """Plain floats and arrays give one query the same gaps, margin and candidates, to the bit."""
    plain = module.row_gaps(scores, digits=digits)
    block = gaps(as_row(scores), digits=digits)
    assert bits(plain) == bits(block[:, 0])
    assert bits(module.row_gaps(tuple(scores), digits=digits)) == bits(plain)
    ascending = sorted_gaps(as_row(scores), digits=digits)[0]
    assert bits([row_margin(plain)]) == bits(margins(ascending))
    assert bits(sorted(plain)) == bits(ascending[:, 0])
    for relaxation in (None, 0.0, plain[place % len(plain)]):
        for u, boundary in BOUNDARIES:
            kept = np.flatnonzero(is_candidate(block[:, 0], relaxation, u=u, boundary_u=boundary)).tolist()
            assert row_candidates(plain, relaxation, u=u, boundary_u=boundary) == kept
            candidates, margin = row_sight(scores, relaxation, digits=digits, u=u, boundary_u=boundary)
            assert candidates == kept
            assert bits([margin]) == bits(margins(ascending))


@settings(max_examples=150)
@given(SHORT_AND_LONG, st.sampled_from([6, 12]), st.integers(0, 39))
def test_plain_floats_and_arrays_give_one_query_the_same_to_the_bit(scores, digits, place):
    check_one_query(scores, digits, place)


@pytest.mark.proof
@settings(max_examples=2000)
@given(SHORT_AND_LONG, st.sampled_from([6, 12]), st.integers(0, 39))
def test_plain_floats_and_arrays_give_many_queries_the_same_to_the_bit(scores, digits, place):
    check_one_query(scores, digits, place)


@pytest.mark.parametrize(
    "scores",
    [(None, 0.5), (float("nan"), 0.5), (1, 0), [1, 0.5], np.array([0.9, 0.7]), np.float32([0.5, 0.25]), (0.1,) * 40],
)
def test_rows_that_are_not_short_lists_of_floats_take_the_array_path(scores):
    assert module.row_gaps(scores, digits=12) == row_gaps(scores)


@pytest.mark.parametrize("scores", [(), (float("inf"), 0.0), (2e300, 0.0), ("0.5", 0.1), 0.5, None])
def test_bad_rows_are_refused_without_arrays_too(scores):
    with pytest.raises(ScoreLogError):
        module.row_gaps(scores, digits=12)
