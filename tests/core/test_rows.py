import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from conformal_arbitrage.core.exact import blocks, flat_positions, row_argmax


@given(st.lists(st.integers(1, 7), min_size=1, max_size=60))
def test_blocks_hold_every_row_once(sizes):
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    values = np.arange(offsets[-1])
    seen = {}
    for block in blocks(offsets):
        for row, column in zip(block.all_rows(), block.of(values).T, strict=True):
            seen[int(row)] = column.tolist()
    assert seen == {k: list(range(offsets[k], offsets[k + 1])) for k in range(len(sizes))}


def test_many_rows_are_walked_in_several_blocks():
    offsets = np.arange(0, 4 * 40_000 + 1, 4)
    assert sum(len(block.all_rows()) for block in blocks(offsets)) == 40_000
    assert len(list(blocks(offsets))) > 1


def test_flat_positions_follow_the_given_order():
    assert flat_positions(np.array([5, 0]), np.array([2, 3])).tolist() == [5, 6, 0, 1, 2]
    assert flat_positions(np.array([], dtype=int), np.array([], dtype=int)).tolist() == []


def test_the_largest_of_a_row_is_the_lowest_index_among_equals():
    values = np.array([1.0, 3.0, 3.0, 2.0, np.nan, np.nan])
    assert row_argmax(values, np.array([0, 3, 4, 6])).tolist() == [1, 0, 0]
