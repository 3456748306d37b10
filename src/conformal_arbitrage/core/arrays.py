"""Names for the arrays of this package, and helpers that look at one array only.

Knows nothing of scores, rows or losses.
"""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Indices = NDArray[np.intp]
Bools = NDArray[np.bool_]

Scalar = TypeVar("Scalar", bound=np.generic)

_NUMERIC = (int, float, np.integer, np.floating, type(None))


def numbers_or_none(values: object) -> NDArray[Any] | None:
    """Return numbers as an array, with None as NaN; None if anything else is among them."""
    try:
        raw: NDArray[Any] = np.asarray(values)
        if raw.dtype.kind in "iuf":
            return raw
        return raw.astype(np.float64) if raw.dtype.kind == "O" and _all_numeric(raw) else None
    except (TypeError, ValueError, OverflowError):
        return None


def _all_numeric(raw: NDArray[Any]) -> bool:
    return all(isinstance(value, _NUMERIC) and not isinstance(value, bool) for value in raw.ravel().tolist())


def flat_positions(starts: Integers, sizes: Integers) -> Integers:
    """Return the positions in a flat array of rows that start at `starts`, one row after the other."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)


def in_order(values: NDArray[Scalar], order: Integers) -> NDArray[Scalar]:
    """Return a block's values (actions x rows) with each row's actions in the given order."""
    rows = int(order.shape[1])
    return values.take(order * rows + np.arange(rows))
