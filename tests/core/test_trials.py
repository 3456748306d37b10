import numpy as np
import pytest

from conformal_arbitrage import OptionError
from conformal_arbitrage.core.exact import as_row, guardian_choices, sorted_gaps
from conformal_arbitrage.core.trials import LegCost, draw_splits


def split_all(n, **options):
    defaults = {"calibration_size": 4, "test_size": None, "trials": 50, "rng": np.random.default_rng(0)}
    return list(draw_splits(n, **(defaults | options)))


def test_splits_are_fresh_disjoint_and_use_every_row():
    splits = split_all(10)
    assert all(sorted([*c, *t]) == list(range(10)) and len(c) == 4 for c, t in splits)
    assert len({tuple(c) for c, _ in splits}) > 40


def test_a_test_size_leaves_rows_out():
    assert all(len(c) == 4 and len(t) == 3 and not set(c) & set(t) for c, t in split_all(10, test_size=3))


def test_every_row_is_equally_often_in_calibration():
    counts = np.bincount(np.concatenate([c for c, _ in split_all(10, trials=4000)]), minlength=10)
    assert abs(counts / 4000 - 0.4).max() < 0.04


def test_balanced_samples_take_the_same_number_of_each_group_and_the_rest_at_random():
    groups = np.repeat([0, 1, 2], [100, 50, 3])
    for calibration, test in split_all(153, groups=groups, sample_size=31, calibration_size=15):
        counts = np.bincount(groups[np.concatenate([calibration, test])], minlength=3)
        assert counts.sum() == 31
        assert counts[0] >= 10
        assert counts[1] >= 10
        assert counts[2] == 3


@pytest.mark.parametrize(
    "options",
    [{"calibration_size": 10}, {"calibration_size": 0}, {"test_size": 7}, {"calibration_size": 12}, {"test_size": 0}],
)
def test_sizes_that_do_not_fit_are_refused(options):
    with pytest.raises(OptionError, match="calibration size"):
        split_all(10, **options)


def test_a_guardian_takes_its_best_candidate_and_the_lowest_index_among_equals():
    order = sorted_gaps(as_row([0.1, 0.5, 0.9, 0.7]), digits=12)[1]
    guardian = np.array([[0.8], [0.8], [0.2], [0.3]])
    assert order[:, 0].tolist() == [2, 3, 1, 0]
    assert guardian_choices(guardian, order, sees_all=False)[:, 0].tolist() == [2, 3, 1, 0]
    assert guardian_choices(guardian, order, sees_all=True)[:, 0].tolist() == [2, 0, 0, 0]


def test_prompt_tokens_shrink_with_the_options_shown_and_are_floored():
    leg = LegCost(base=np.array([1.0]), rate=0.5, tokens=np.array([101]))
    assert leg.full().tolist() == [51.5]
    assert leg.of(np.array([0]), 2, 4).tolist() == [1 + 0.5 * 75]
    exact = LegCost(base=np.zeros(1), rate=1.0, tokens=np.array([18]))
    assert exact.of(np.array([0]), 2, 3).tolist() == [15]  # 18 (0.5 + 0.5 2/3) is just below 15 in floats
