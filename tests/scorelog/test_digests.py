"""Checksums of scores: of any number of them, in any order, and other ones for other scores."""

import numpy as np
import pytest

from conformal_arbitrage.scorelog.log import AT_ONCE, checksum


@pytest.mark.parametrize("size", [1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE + 5])
def test_a_checksum_adds_up_and_does_not_depend_on_the_order(size):
    rng = np.random.default_rng(size)
    primary, guardian, order = rng.random(size), rng.random(size), rng.permutation(size)
    whole, cut = checksum([primary, guardian]), size // 3
    assert whole == checksum([primary[order], guardian[order]])
    halves = checksum([primary[:cut], guardian[:cut]]) + checksum([primary[cut:], guardian[cut:]])
    assert whole == halves % (1 << 64)


def test_a_checksum_shows_a_change_of_one_bit_and_a_swap_but_no_sign_of_zero():
    rng = np.random.default_rng(0)
    primary, guardian = rng.random(AT_ONCE + 9), rng.random(AT_ONCE + 9)
    primary[3] = 0.0
    whole = checksum([primary, guardian])
    for place in (0, AT_ONCE - 1, AT_ONCE, AT_ONCE + 8):
        changed = primary.copy()
        changed[place] = np.nextafter(changed[place], 2)
        assert checksum([changed, guardian]) != whole
    swapped = primary.copy()
    swapped[[5, AT_ONCE + 1]] = swapped[[AT_ONCE + 1, 5]]
    assert checksum([swapped, guardian]) != whole
    primary[3] = -0.0
    assert checksum([primary, guardian]) == whole
