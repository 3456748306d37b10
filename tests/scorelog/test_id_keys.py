"""Keys of ids: equal ids are never taken for distinct ones, and usual ids are not taken for equal ones."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformal_arbitrage.scorelog.tables import TextBytes, surely_distinct


def as_bytes(ids):
    encoded = [id.encode() for id in ids]
    bounds = np.cumsum([0, *map(len, encoded)])
    return TextBytes(np.frombuffer(b"".join(encoded), np.uint8), bounds)


def in_parts(ids, cuts=()):
    edges = [0, *cuts, len(ids)]
    return np.concatenate([keys for a, b in pairwise(edges) if b > a for keys in as_bytes(ids[a:b]).hash_keys()])


USUAL = {
    "numbers": [str(k) for k in range(1, 20_001)],
    "names and numbers": [f"query-{k}" for k in range(20_000)],
    "two counters": [f"t{k % 100:07d}c{k // 100:07d}" for k in range(20_000)],
    "counters that end words": [f"{k % 150:08d}{k // 150:08d}" for k in range(20_000)],
    "times": [f"2026-01-{k % 28 + 1:02d}T{k // 28:09d}Z" for k in range(20_000)],
    "hexadecimal": [f"{k * 0x9E3779B97F4A7C15 % 2**128:032x}" for k in range(20_000)],
}


@pytest.mark.parametrize("ids", USUAL.values(), ids=USUAL)
def test_usual_ids_are_surely_distinct_until_one_is_repeated(ids):
    assert surely_distinct(in_parts(ids, [7000, 7001]))
    for place in (0, 6999, 19_998):
        assert not surely_distinct(in_parts([*ids, ids[place]], [7000]))


@given(st.lists(st.text(max_size=20), min_size=1, max_size=60), st.integers(0, 60))
@settings(max_examples=150, deadline=None)
def test_equal_or_empty_ids_are_never_surely_distinct(ids, cut):
    if surely_distinct(in_parts(ids, [min(cut, len(ids))])):
        assert len(set(ids)) == len(ids)
        assert "" not in ids


def test_long_ids_and_those_with_a_zero_byte_say_nothing():
    assert not surely_distinct(in_parts(["a" * 300, "b"]))
    assert not surely_distinct(in_parts(["a\0", "a"]))
