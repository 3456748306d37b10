"""The draws behind boundary="random": one number in [0, 1) per query, from a secret key and the query's id.

Knows nothing of thresholds or certificates.
"""

import hmac
from functools import lru_cache

import numpy as np

from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.core.risk import Draw
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.log import ScoreLog


def draw(key: bytes, id: str) -> float:
    """Return the draw of one query: the first 53 bits of HMAC-SHA256(key, id), scaled to [0, 1)."""
    keyed = _keyed(key).copy()
    keyed.update(id.encode())
    digest = keyed.digest()
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


@lru_cache(maxsize=64)
def _keyed(key: bytes) -> hmac.HMAC:
    """Return the keyed hash before any text: setting it up takes longer than hashing an id."""
    return hmac.new(key, digestmod="sha256")


def draws(key: bytes, log: ScoreLog) -> Floats:
    """Return one draw per row of a log, which must have ids."""
    return drawing(key, log)(np.arange(len(log)))


def drawing(key: bytes, log: ScoreLog) -> Draw:
    """Return what gives the draws of some rows of a log, which must have ids; a draw is dear."""
    ids = log.id
    if ids is None:
        raise OptionError(
            f'{log.source}: boundary="random" needs an `id` column, unique and fixed before the scores are known; '
            "row numbers will not do"
        )
    return lambda rows: np.array([draw(key, id) for id in ids[rows].tolist()], dtype=np.float64)
