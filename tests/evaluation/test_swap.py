import json
from math import nan

import numpy as np
import pytest

from conformal_arbitrage import OptionError, ScoreLog, ScoreLogError, model_grades, swap


def grades(both, worse, better, neither=0):
    """Grades of an old and a new model: right together, only the old one, only the new one, none."""
    old = [1.0] * both + [1.0] * worse + [0.0] * better + [0.0] * neither
    new = [1.0] * both + [0.0] * worse + [1.0] * better + [0.0] * neither
    return old, new


@pytest.mark.parametrize(
    ("counts", "verdict"), [((970, 15, 15), "switch"), ((800, 150, 50), "keep"), ((90, 6, 4), "not yet")]
)
def test_there_are_three_verdicts(counts, verdict):
    result = swap(*grades(*counts), alpha=0.05)
    low, high = result.interval
    assert result.verdict == verdict
    assert (high <= 0.05, low > 0.05) == (verdict == "switch", verdict == "keep")
    assert result.mean == pytest.approx((counts[1] - counts[2]) / sum(counts))
    assert (result.worse, result.better, result.rows) == (counts[1], counts[2], sum(counts))
    assert low < result.mean < high
    assert json.loads(json.dumps(result.to_dict()))["verdict"] == verdict
    assert result.answer in result._repr_html_()


def test_gains_count_only_with_the_net_loss():
    old, new = grades(800, 80, 120)
    assert swap(old, new, alpha=0.02).verdict == "switch"
    assert swap(old, new, alpha=0.02, loss="regret").verdict == "keep"
    assert swap(old, new, alpha=0.02, loss="regret").mean == pytest.approx(0.08)


def test_so_many_more_rows_as_it_says_decide_and_one_row_less_does_not():
    old, new = grades(45, 2, 3)
    more = swap(old, new, alpha=0.05).more_rows
    assert more is not None
    times = -(-more // 50) + 1
    assert swap(old * times, new * times, alpha=0.05).verdict == "switch"
    assert swap(old * (times - 2), new * (times - 2), alpha=0.05).verdict == "not yet"


def test_no_number_of_rows_decides_where_the_loss_is_alpha_or_grades_are_missing():
    result = swap(*grades(95, 5, 0), alpha=0.05)
    assert (result.verdict, result.more_rows) == ("not yet", None)
    old, new = grades(900, 20, 20)
    assert swap(old + [1.0] * 100, new + [nan] * 100, alpha=0.05).more_rows is None


def test_an_ungraded_row_is_the_worst_case_for_either_verdict():
    old, new = grades(960, 20, 20)
    assert swap(old, new, alpha=0.03).verdict == "switch"
    with_unknown = swap(old + [1.0] * 30, new + [None] * 30, alpha=0.03)
    assert (with_unknown.verdict, with_unknown.ungraded, with_unknown.rows) == ("not yet", 30, 1030)
    assert with_unknown.mean == swap(old, new, alpha=0.03).mean
    old, new = grades(800, 120, 20)
    assert swap(old, new, alpha=0.05).verdict == "keep"
    assert swap(old + [nan] * 60, new + [1.0] * 60, alpha=0.05).verdict == "not yet"


def test_neither_the_order_of_rows_nor_the_scale_of_grades_changes_anything():
    rng = np.random.default_rng(3)
    old = rng.integers(0, 11, 500)
    new = np.clip(old + rng.integers(-2, 3, 500), 0, 10)
    one, ten = swap(old / 10, new / 10, alpha=0.05), swap(old, new, alpha=0.5, loss_bound=10)
    order = rng.permutation(500)
    again = swap(old[order] / 10, new[order] / 10, alpha=0.05)
    assert (again.verdict, again.interval) == (one.verdict, one.interval)
    assert ten.verdict == one.verdict
    assert ten.interval == pytest.approx([10 * end for end in one.interval])


def test_with_gains_counted_alpha_may_ask_for_an_improvement():
    assert swap(*grades(800, 20, 120), alpha=-0.03).verdict == "switch"
    assert swap(*grades(900, 50, 50), alpha=-0.05).verdict == "keep"


@pytest.mark.parametrize(
    ("old", "new", "options", "message"),
    [
        ([1], [1], {"alpha": 1}, "alpha must lie above -1 and below the largest loss 1"),
        ([1], [1], {"alpha": -0.1, "loss": "regret"}, "alpha must lie above 0"),
        ([1], [1], {"alpha": 0.1, "confidence": 1}, "confidence must lie above 0 and below 1"),
        ([1, 0], [1], {"alpha": 0.1}, "2 grades of the old model and 1 of the new"),
        ([5], [1], {"alpha": 0.1, "loss_bound": 3}, "two grades differ by 4, more than the bound 3"),
        ([None], [1], {"alpha": 0.1}, "no question has grades of both"),
        (["yes"], [1], {"alpha": 0.1}, "the grades of the old model must be a flat list of numbers"),
    ],
)
def test_what_cannot_be_judged_is_refused(old, new, options, message):
    with pytest.raises((OptionError, ScoreLogError), match=message):
        swap(old, new, **options)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([4, 5] * 500, [5, 4] * 500),  # of a scale from 1 to 5, which can lose 4
        ([1] * 1000, [1.5, *[1] * 999]),
        ([1] * 1000, [-0.5, *[1] * 999]),
        ([1] * 1000 + [5], [1] * 1000 + [None]),
    ],
)
def test_the_largest_loss_is_what_grades_mean_and_not_what_is_in_sight(old, new):
    with pytest.raises(OptionError, match=r"grades leave \[0, 1\], such as .*state it from what the grades mean"):
        swap(old, new, alpha=0.05)
    stated = swap(old, new, alpha=0.05, loss_bound=6)
    scaled = swap(*([None if g is None else (g + 1) / 6 for g in grades] for grades in (old, new)), alpha=0.05 / 6)
    assert stated.interval == pytest.approx([6 * end for end in scaled.interval])
    assert stated.verdict == scaled.verdict


def test_a_score_log_grades_its_guardian_and_its_primary_alone():
    router = ScoreLog.from_router(
        confidence=[0.9, nan, 0.2, 0], primary_grade=[1, 0.5, 0, 1], guardian_grade=[1, 1, nan, 0]
    )
    for loss in ("net", "regret"):
        old, new = model_grades(router, loss)
        assert old.tolist()[:2] + old.tolist()[3:] == [1, 1, 0]
        assert new.tolist()[:2] + new.tolist()[3:] == [1, 0.5, 1]
        assert np.isnan(old[2])
    menus = ScoreLog.from_arrays(
        [[0.7, 0.3], [0.2, 0.8], [nan, nan]], [[0.1, 0.9], [0.3, 0.6], [0, 1]], label=[0, 1, 1]
    )
    old, new = model_grades(menus, "net")
    assert (old.tolist(), new.tolist()[:2]) == ([0, 1, 1], [1, 1])
    assert np.isnan(new[2])
    old, new = model_grades(menus, "regret")
    assert (old.tolist(), new.tolist()[:2]) == ([0.9, 0.6, 1], [0.1, 0.6])
