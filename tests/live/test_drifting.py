import asyncio

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.live.drifting import DriftWatch
from conformal_arbitrage.store import LedgerKey
from tests.validity.test_monitoring import most

KEY = LedgerKey(policy="support", version=1, identities_sha256="models")


class Margins:
    """A store with nothing but margins."""

    def __init__(self, margins):
        self.margins = margins

    async def ledger_margins(self, key, after, *, limit):
        return self.margins[after : after + min(limit, 700)]


def certificate(n, rng, *, margins=True):
    top = rng.random(n)
    primary = np.stack([(1 + top) / 2, (1 - top) / 2], axis=1)
    guardian = np.eye(2)[(rng.random(n) < 0.1).astype(int)]
    return calibrate(ScoreLog.from_arrays(primary.tolist(), guardian.tolist()), 0.05, margins=margins)


def standing(certified, margins, secret=b"s" * 32):
    watch = DriftWatch(Margins(margins), KEY, certified, secret)
    asyncio.run(watch.follow())
    return watch.standing()


@pytest.mark.parametrize(("n", "kept"), [(400, True), (1500, True), (400, False)])
def test_margins_as_before_are_rarely_noticed_and_others_are(n, kept):
    rng = np.random.default_rng(n + kept)
    noticed = 0
    for _ in range(30):
        certified = certificate(n, rng, margins=kept)
        shown = standing(certified, [None, *rng.random(1500).tolist()])
        assert (shown.decisions, shown.with_calibration) == (1500, kept and n <= 1000)
        noticed += shown.noticed
    assert noticed <= most(0.01, 30)
    moved = [*rng.random(1000).tolist(), *(0.5 * rng.random(1000)).tolist()]
    assert standing(certified, moved).noticed


def test_nothing_is_known_at_first_and_any_margin_is_counted():
    certified = certificate(100, np.random.default_rng(1))
    assert standing(certified, []) == standing(certified, [None] * 9)
    assert standing(certified, []).evidence == 1.0
    assert standing(certified, [7.0, -1.0] * 50).decisions == 100
