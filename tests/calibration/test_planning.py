import numpy as np
import pytest

from conformal_arbitrage import OptionError, plan, split


def test_plan_reports_from_the_fewest_rows_to_a_hundred_times_as_many():
    sizes = plan(0.02)
    assert (sizes.fewest_rows, sizes.suggested_rows) == (49, 499)
    assert [row.n for row in sizes.rows] == [49, 98, 245, 499, 998, 2495, 4990]
    assert sizes.rows[0].spendable == 0
    assert plan(0.02, rows=[10]).rows[0].spendable is None
    with pytest.raises(OptionError, match="1 row or more"):
        plan(0.02, rows=[0])


def test_split_gives_two_disjoint_parts_and_follows_its_seed(science):
    explore, certify = split(science, share=0.25)
    assert (len(explore), len(certify)) == (592, 1777)
    assert set(explore.id.tolist()).isdisjoint(certify.id.tolist())
    assert np.array_equal(split(science, share=0.25)[0].id, explore.id)
    assert not np.array_equal(split(science, share=0.25, seed=1)[0].id, explore.id)


@pytest.mark.parametrize("share", [0, 1, -0.5, 1e-9, float("nan")])
def test_split_rejects_a_share_that_leaves_a_part_empty(science, share):
    with pytest.raises(OptionError, match="leaves a part empty"):
        split(science, share=share)


def test_split_rejects_a_negative_seed(science):
    with pytest.raises(OptionError, match="seed must be 0 or more"):
        split(science, seed=-1)
