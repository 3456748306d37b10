"""The margins of the calibration rows, as 1,001 quantiles that a certificate keeps for the guard.

A quantile is a threshold: a margin and, for a random boundary, a draw. The certificate holds them as one text, since a list
would make the file unreadable.

Knows nothing of what the guard does with them.
"""

from collections.abc import Sequence
from math import ceil, inf

import numpy as np

from conformal_arbitrage.calibration.stops import threshold_rank
from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.errors import CertificateError

QUANTILES = 1001
Threshold = tuple[float, float | None]
"""A relaxation and, for a random boundary, the largest draw that keeps an action exactly at it."""
_NOTHING = "-"


def margin_quantiles(margins: Floats, u: Floats | None = None) -> list[Threshold | None]:
    """Return the thresholds that defer 0, 0.1 %, ..., 100 % of the calibration rows or just more.

    Args:
        margins: one per row; infinite for a menu of one action, which is never deferred.
        u: one draw per row for a random boundary.

    Returns:
        For each share the smallest threshold that defers it; None where nothing finite does.
    """
    order = np.argsort(margins, kind="stable") if u is None else np.lexsort((u, margins))
    ranks = [max(ceil(k * len(margins) / (QUANTILES - 1)), 1) - 1 for k in range(QUANTILES)]
    return [_threshold(margins, u, int(order[rank])) for rank in ranks]


def write_quantiles(quantiles: Sequence[Threshold | None]) -> str:
    """Return quantiles as a text: MARGIN or MARGIN/DRAW for each, "-" where there is none."""
    return " ".join(map(_text, quantiles))


def read_quantiles(text: str) -> list[Threshold | None]:
    """Return the quantiles in a text.

    Raises:
        CertificateError: there are not 1,001, one is malformed, or they do not ascend.
    """
    try:
        quantiles = [_parsed(part) for part in text.split(" ")]
    except ValueError as error:
        raise CertificateError(f"margin_quantiles: {error}; calibrate again") from error
    ranks = [threshold_rank(*(one or (None, None))) for one in quantiles]
    if len(quantiles) != QUANTILES or ranks != sorted(ranks):
        raise CertificateError(f"margin_quantiles must be {QUANTILES} ascending thresholds; calibrate again")
    return quantiles


def are_quantiles(text: str, *, drawn: bool) -> bool:
    """Tell whether a text holds quantiles, all of them with draws or none."""
    try:
        quantiles = read_quantiles(text)
    except CertificateError:
        return False
    return all((one[1] is not None) == drawn for one in quantiles if one is not None)


def base_share(certified: Threshold, quantiles: Sequence[Threshold | None]) -> float:
    """Return the largest stored share whose quantile does not exceed the certified threshold; 0 if none does."""
    below = sum(one is not None and threshold_rank(*one) <= threshold_rank(*certified) for one in quantiles)
    return max(below - 1, 0) / (QUANTILES - 1)


def _threshold(margins: Floats, u: Floats | None, row: int) -> Threshold | None:
    if np.isinf(margins[row]):
        return None
    return float(margins[row]), None if u is None else float(u[row])


def _text(threshold: Threshold | None) -> str:
    if threshold is None:
        return _NOTHING
    margin, draw = threshold
    return repr(margin) if draw is None else f"{margin!r}/{draw!r}"


def _parsed(part: str) -> Threshold | None:
    if part == _NOTHING:
        return None
    margin, slash, draw = part.partition("/")
    threshold = float(margin), float(draw) if slash else None
    if not 0 <= threshold[0] < inf or not 0 <= threshold_rank(*threshold)[1] <= 1:
        raise ValueError(f"{part!r:.40} is not a margin of 0 or more with a draw from 0 to 1")
    return threshold
