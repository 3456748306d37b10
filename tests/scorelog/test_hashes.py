"""Hashes of rows without an order: what they depend on, and what they do not."""

import numpy as np
import pytest

from conformal_arbitrage.scorelog.log import sum_of_hashes
from conformal_arbitrage.scorelog.tables import TextBytes

SIZES = np.array([1, 4, 2, 3, 4])
IDS = ["", "a", "b\0c", "day 1", "é" * 300]


def texts(ids):
    data = [one.encode() for one in ids]
    return TextBytes(np.frombuffer(b"".join(data), np.uint8), np.cumsum([0, *map(len, data)]))


def some_rows():
    rng = np.random.default_rng(4)
    return [(rng.random(size), rng.random(size), id) for size, id in zip(SIZES, IDS, strict=True)]


def hashed(rows, digits=12):
    offsets = np.cumsum([0, *(len(primary) for primary, _, _ in rows)])
    primary, guardian = (np.concatenate([row[k] for row in rows]) for k in (0, 1))
    return sum_of_hashes(digits, offsets, (primary, guardian, None), texts(id for *_, id in rows))


def test_neither_the_order_of_rows_nor_how_they_are_cut_matters():
    rows = some_rows() * 5_000  # more than are hashed at once
    whole = hashed(rows)
    assert hashed(rows[::-1]) == whole
    assert (hashed(rows[:7]) + hashed(rows[7:9_000]) + hashed(rows[9_000:])) % (1 << 64) == whole


def test_a_zero_has_no_sign():
    assert hashed([(np.array([-0.0]), np.array([0.0]), "a")]) == hashed([(np.array([0.0]), np.array([-0.0]), "a")])


def moved(rows):
    rows[1] = (np.roll(rows[1][0], 1), *rows[1][1:])


def exchanged(rows):
    rows[1] = (rows[1][1], rows[1][0], rows[1][2])


def nudged(rows):
    rows[4][1][3] = np.nextafter(rows[4][1][3], 1)


def renamed(rows):
    rows[3] = (*rows[3][:2], "day 2")


def ids_swapped(rows):
    (one, first, a), (other, second, b) = rows[1], rows[4]
    rows[1], rows[4] = (one, first, b), (other, second, a)


def guardians_swapped(rows):
    (one, first, a), (other, second, b) = rows[1], rows[4]
    rows[1], rows[4] = (one, second, a), (other, first, b)


def anagram(rows):
    rows[3] = (*rows[3][:2], "ady 1")


def zero_added(rows):
    rows[3] = (*rows[3][:2], "day 1\0")


def row_cut(rows):
    primary, guardian, id = rows[1]
    rows[1:2] = [(primary[:2], guardian[:2], id), (primary[2:], guardian[2:], "")]


@pytest.mark.parametrize(
    "change",
    [moved, exchanged, nudged, renamed, ids_swapped, guardians_swapped, anagram, zero_added, row_cut, list.pop],
)
def test_every_change_of_a_row_shows(change):
    rows = some_rows()
    before = hashed(rows)
    change(rows)
    assert hashed(rows) != before


def test_the_digits_of_scores_and_a_row_that_is_there_twice_show():
    rows = some_rows()
    assert len({hashed(rows), hashed(rows, digits=6), hashed([*rows, rows[0]])}) == 3


def test_a_million_rows_that_differ_little_have_different_hashes():
    from conformal_arbitrage.scorelog.log import row_hashes

    n = 1_000_000
    counter = np.arange(2.0 * n)  # low bits of floats are zeros, and the two numbers of a row follow each other
    hashes = row_hashes(12, np.arange(0, 2 * n + 1, 2), [counter], None)
    assert len(np.unique(hashes)) == n
