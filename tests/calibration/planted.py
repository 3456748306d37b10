"""Faults planted where an engine really computes: on its workers.

The log lies on a knife's edge: its budget is met to the tick, so that a total that is a tick too large gives another
threshold. Its gaps share a few buckets, its sums are beyond what floats hold, and its tick is coarser than that of any
half of it.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from conformal_arbitrage import ArbitrageError, ScoreLog, calibrate
from conformal_arbitrage.calibration.calibrate import PartsSurvey
from conformal_arbitrage.core import risk
from conformal_arbitrage.core.risk import Bracket, LossMeasure
from conformal_arbitrage.scorelog.spark import SparkTable

LARGEST, ROWS = 1900, 6249
FAULTS = ("lower end", "own ticks", "float sums", "falling buckets")


def edge_log():
    """A log of two actions, and a budget that it meets to the tick.

    All losses but one are 1 beyond a multiple of 16 ticks: a sum in floats that is large enough loses a tick at each.
    """
    rng = np.random.default_rng(4)
    gap, place = 0.5 + rng.random(ROWS) * 6 / (1 << 16), int(ROWS * 0.6)
    ticks = rng.integers(0, LARGEST * 10**11 // 16, ROWS) * 16 + 1
    later = np.argsort(gap)[place:]
    ticks[later[0]] += -int(ticks[later].sum()) % (ROWS + 1)
    nothing = np.zeros(ROWS)
    log = ScoreLog.from_arrays(
        np.stack([gap, nothing], axis=1), np.stack([nothing, ticks / 1e11], axis=1), id=[f"q{k}" for k in range(ROWS)]
    )
    return log, str((Decimal(int(ticks[later].sum())) / 10**11 + LARGEST) / (ROWS + 1))


def differing(one, other):
    pairs = one.differences(other)
    return {name: pair for name, pair in pairs.items() if name != "identities"}


def differences(log, alpha, source, **keywords):
    """Return what differs from the certificate of the rows in memory; nobody guesses where the threshold is."""
    expected = calibrate(log, alpha, loss_bound=LARGEST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartsSurvey, "_guessed", lambda self, losses: ())
        return differing(expected, calibrate(source, alpha, loss_bound=LARGEST, **keywords))


def is_caught(log, alpha, source, **keywords):
    """Return whether a fault shows: other figures, or an error."""
    try:
        return bool(differences(log, alpha, source, **keywords))
    except (ArbitrageError, AssertionError, IndexError, ValueError):
        return True


def float_sums(place, drop, buckets):
    return np.bincount(place, weights=drop, minlength=buckets).astype(np.int64)


def own_ticks(self, log, events=LossMeasure.events):
    return events(replace(self, tick_digits=None), log)


@contextmanager
def planted(fault):
    """Plant a fault in this process."""
    places = Bracket.places
    with pytest.MonkeyPatch.context() as patch:
        if fault == "lower end":
            patch.setattr(Bracket, "inside", lambda self, gap: (gap > self.low) & (gap <= self.high))
        elif fault == "own ticks":
            patch.setattr(LossMeasure, "events", own_ticks)
        elif fault == "float sums":
            patch.setattr(risk, "bucket_sums", float_sums)
        elif fault == "falling buckets":
            patch.setattr(Bracket, "places", lambda self, gap: places(self, gap) ^ 1)
        yield


@dataclass(frozen=True)
class PlantedWork:
    """Work with a fault, wherever it is done."""

    work: Any
    fault: str

    def __call__(self, part):
        with planted(self.fault):
            return self.work(part)


@dataclass(frozen=True)
class PlantedEngine:
    """An engine whose workers have a fault."""

    engine: Any
    fault: str

    def run(self, work, parts, /):
        return self.engine.run(PlantedWork(work, self.fault), parts)


class PlantedTable(SparkTable):
    """A table of Spark whose workers have a fault."""

    fault = ""

    def run(self, work, parts, /):
        return super().run(PlantedWork(work, self.fault), parts)
