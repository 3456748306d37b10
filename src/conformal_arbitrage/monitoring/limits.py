"""Limits of the running mean loss that hold at every number of audits at once, whatever the loss does over time.

For a fixed bet eta the product of (1 + eta x_i) / (1 + eta r_i), with r_i the expected loss of audit i given the past, is a
martingale from 1, and sum log(1 + eta r_i) <= n log(1 + eta r) for the running mean r of the r_i, since the logarithm is
concave. So is any mixture over bets whose weights depend on neither r nor n. What it takes are n and one sum per bet, which
add up across batches, gateways and orders. Limits are never intersected over time: the running mean moves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from conformal_arbitrage.core.exact import Bools, Floats, Integers
from conformal_arbitrage.monitoring.evidence import floor_log, unit_log

Limits = tuple[float, float]
SIDE = 0.025
"""The probability that either limit ever fails."""
RISING: Floats = np.exp2(np.arange(-6, 8, dtype=np.float64))
"""Bets of the lower limit."""
FALLING: Floats = -RISING / (1 + RISING)
"""Bets of the upper limit."""
_BETS = np.concatenate([RISING, FALLING])
_BISECTIONS = 60
_SLAB = 1 << 16
_KEPT = 2048


@dataclass(frozen=True, slots=True)
class LossSums:
    """What limits need to know of some losses.

    Attributes:
        count: how many losses.
        logs: sum of log(1 + eta x) for every bet, in units of 2^-40: whole numbers, so that no order matters.
    """

    count: int = 0
    logs: tuple[int, ...] = (0,) * len(_BETS)

    @classmethod
    def of(cls, losses: Floats) -> "LossSums":
        """Return the sums of losses in [0, 1]."""
        slabs = [_slab_sums(losses[low : low + _SLAB]) for low in range(0, len(losses), _SLAB)]
        return cls(len(losses), tuple(sum(column) for column in zip(cls().logs, *slabs, strict=True)))

    def plus(self, other: "LossSums", times: int = 1) -> "LossSums":
        """Return these sums with others added this many times; a negative number takes them out."""
        if not any(other.logs):
            return LossSums(self.count + times * other.count, self.logs)
        logs = tuple(mine + times * theirs for mine, theirs in zip(self.logs, other.logs, strict=True))
        return LossSums(self.count + times * other.count, logs)

    def limits(self, side: float = SIDE) -> Limits:
        """Return the limits of the running mean; each fails, ever, with probability at most `side`."""
        return _limits(self, side)

    def below(self, line: float, side: float = SIDE) -> bool:
        """Tell whether the upper limit is at most a line, without computing it."""
        return self._excludes(line, self.logs[len(RISING) :], FALLING, side)

    def above(self, line: float, side: float = SIDE) -> bool:
        """Tell whether the lower limit is at least a line, without computing it."""
        return self._excludes(line, self.logs[: len(RISING)], RISING, side)

    def _excludes(self, line: float, logs: tuple[int, ...], bets: Floats, side: float) -> bool:
        wealth = _log_mean(unit_log(np.array(logs, dtype=np.float64)), bets, np.array(self.count), np.array(line))
        return bool(wealth >= -np.log(side))


@lru_cache(maxsize=_KEPT)
def _limits(sums: LossSums, side: float) -> Limits:
    """Return the limits of some sums; many ledgers have the same, and most are asked for again before they change."""
    lower, upper = limits_of(np.array(sums.logs, dtype=np.float64), np.array(sums.count), side)
    return float(lower), float(upper)


def limits_of(logs: Floats | Integers, count: Floats | Integers, side: float = SIDE) -> tuple[Floats, Floats]:
    """Return lower and upper limits for many sets of sums at once; the bets lie on the last axis."""
    rising, falling = unit_log(logs[..., : len(RISING)]), unit_log(logs[..., len(RISING) :])
    enough = -np.log(side)
    zero, ones = np.zeros(np.shape(count)), np.ones(np.shape(count))
    lower = _crossing(lambda mean: _log_mean(rising, RISING, count, mean) >= enough, zero, ones)
    upper = _crossing(lambda mean: _log_mean(falling, FALLING, count, mean) >= enough, ones, zero)
    return lower, upper


def loss_logs(losses: Floats) -> Integers:
    """Return log(1 + eta x) of every loss and bet, for cumulative sums; the bets lie on the last axis."""
    return floor_log(losses[..., None] * _BETS)


def _crossing(excluded: Callable[[Floats], Bools], start: Floats, stop: Floats) -> Floats:
    """Return the last mean, walking from `start`, that is excluded; `start` itself if none is."""
    none = ~excluded(start)
    outer, inner = start, stop
    for _ in range(_BISECTIONS):
        middle = (outer + inner) / 2
        beyond = excluded(middle)
        outer, inner = np.where(beyond, middle, outer), np.where(beyond, inner, middle)
    return np.where(none, start, outer)


def _log_mean(logs: Floats, bets: Floats, count: Floats | Integers, mean: Floats) -> Floats:
    """Return the log of the mean wealth over the bets if the running mean were `mean`."""
    terms = logs - np.asarray(count)[..., None] * np.log1p(mean[..., None] * bets)
    top = terms.max(axis=-1)
    return top + np.log(np.exp(terms - top[..., None]).mean(axis=-1))


def _slab_sums(losses: Floats) -> list[int]:
    """Return the sum over at most 2^16 losses for every bet; 64 bits hold it."""
    values, counts = np.unique(losses, return_counts=True)
    return (loss_logs(values) * counts[:, None]).sum(axis=0).tolist()


WHOLE_LOSS, NO_LOSS = LossSums.of(np.ones(1)), LossSums.of(np.zeros(1))
