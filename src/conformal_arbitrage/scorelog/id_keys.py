"""Whether the ids of a log in parts are distinct: a key of 64 bits for each, in piles by their first bits.

Equal ids have equal keys. A pile fits the processor's cache, and what falls into different piles differs.

Knows nothing of where ids come from.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np

from conformal_arbitrage.core.arrays import Integers
from conformal_arbitrage.scorelog.texts import Keys, TextBytes, all_distinct

_BITS: Final = 8
_PILES: Final = 1 << _BITS
PiledKeys = list[tuple[Keys, Integers]]
"""Keys in the order of their piles, and where each pile begins and the last one ends; some ids at a time."""


def piled_keys(ids: TextBytes) -> PiledKeys:
    """Return the keys of some ids, in piles."""
    return [_piled(keys) for keys in ids.hash_keys()]


def _piled(keys: Keys) -> tuple[Keys, Integers]:
    pile = (keys >> np.uint64(64 - _BITS)).astype(np.uint8)
    ends = np.zeros(_PILES + 1, np.int64)
    np.cumsum(np.bincount(pile, minlength=_PILES), out=ends[1:])
    return keys[np.argsort(pile, kind="stable")], ends


def surely_distinct(blocks: Iterable[PiledKeys]) -> bool:
    """Return whether all ids are surely distinct, and none is empty; see `TextBytes.hash_keys`."""
    every = [block for own in blocks for block in own]
    return all(_distinct_in(every, pile) for pile in range(_PILES))


def _distinct_in(blocks: PiledKeys, pile: int) -> bool:
    keys = np.concatenate([keys[ends[pile] : ends[pile + 1]] for keys, ends in blocks])
    return not len(keys) or (bool(keys.all()) and all_distinct(keys << np.uint64(_BITS)))
