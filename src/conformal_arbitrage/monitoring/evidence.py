"""Evidence that the loss lies above a line, valid at every moment: a mixture of fixed bets over blocks and starts.

A block's mean X multiplies the wealth of bet eta at line c by (1 + eta X) / (1 + eta c), whose expectation is at most 1
while the expected loss, given everything earlier, is at most c. A new set of bets starts every ten blocks with weight
1 / (s (s + 1)); the weight of later starts stays in cash. The sum E is a non-negative supermartingale from 1, so P(E ever
reaches 1 / delta) <= delta (Ville). Bets are fixed, so E is monotone in every loss: a pending outcome counted as 0 gives a
lower bound of E.

Logarithms are rounded down to multiples of 2^-40 and added as integers. That lowers E by nothing that matters, and makes
every number independent of the order in which outcomes arrive, to the bit.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.core.exact import Floats, Integers, Scalar
from conformal_arbitrage.errors import OptionError

BETS: Floats = np.exp2(np.arange(-3, 9, dtype=np.float64))
"""The fixed bets eta, with equal weights."""
START_EVERY = 10
"""Blocks between two starts."""
_EPOCH = 1000 * START_EVERY
"""Sums of logarithms begin anew after this many blocks, so that they stay small."""
_UNIT = 2.0**40


def floor_log(values: Floats) -> Integers:
    """Return log(1 + value), rounded down to a multiple of 2^-40, in that unit."""
    return np.floor(np.log1p(values) * _UNIT).astype(np.int64)


def unit_log(sums: Integers | Floats) -> Floats:
    """Return sums of `floor_log` as natural logarithms."""
    return sums / _UNIT


class EvidenceProcess:
    """The evidence E against one or more lines after every block, updated from any block on.

    Attributes:
        blocks: how many blocks are in.
    """

    def __init__(self, lines: Sequence[float] | Floats) -> None:
        """Begin with E = 1 for every line.

        Args:
            lines: losses above 0 and below 1, as shares of the loss bound.
        """
        levels = np.asarray(lines, dtype=np.float64)
        if not ((levels > 0) & (levels < 1)).all():
            raise OptionError(f"a line lies above 0 and below the loss bound; got {list(lines)} of it")
        self.blocks = 0
        self._toll = np.ceil(np.log1p(levels[:, None] * BETS) * _UNIT).astype(np.int64)
        self._sums = np.zeros(
            (0, *self._toll.shape), dtype=np.int64
        )  # after each start's blocks, since the epoch began
        self._weight = np.zeros((0, *self._toll.shape))  # log weight of all starts so far, over the epoch's sums
        self._log = np.zeros((0, len(levels)))
        self._peak = np.zeros((0, len(levels)))

    @staticmethod
    def resume(block: int) -> int:
        """Return from which block on `update` needs the means if that of `block` is new: the last start before it."""
        return block - block % START_EVERY

    def update(self, first: int, means: Floats) -> None:
        """Replace the block means from `first` on.

        Args:
            first: a multiple of ten, at most the number of blocks so far; see `resume`.
            means: one mean per block, or one per block and line.
        """
        stop = first + len(means)
        self._reserve(stop)
        while first < stop:
            end = min(first - first % _EPOCH + _EPOCH, stop)
            self._advance(first, means[: end - first])
            first, means = end, means[end - first :]
        self.blocks = stop

    def log_evidence(self) -> Floats:
        """Return log E after every block, one column per line."""
        return self._log[: self.blocks]

    def last(self) -> Floats:
        """Return log E of every line now."""
        return self._log[self.blocks - 1] if self.blocks else np.zeros(len(self._toll))

    def peak(self) -> Floats:
        """Return the largest log E of every line so far; alarms are about this."""
        return self._peak[self.blocks - 1] if self.blocks else np.zeros(len(self._toll))

    def _advance(self, first: int, means: Floats) -> None:
        """Compute blocks that lie in one epoch."""
        count = len(means)
        starts = np.arange(first // START_EVERY, -(-(first + count) // START_EVERY))
        before, carried = self._before(first)
        sums = floor_log(means.reshape(count, -1, 1) * BETS) - self._toll
        np.cumsum(sums, axis=0, out=sums)
        sums += before
        weight = np.empty((len(starts) + 1, *before.shape))
        weight[0], weight[1] = carried, -unit_log(before)
        np.negative(unit_log(sums[START_EVERY - 1 : count - 1 : START_EVERY]), out=weight[2:])
        weight[1:] -= np.log(len(BETS) * (starts + 1.0) * (starts + 2.0))[:, None, None]
        np.logaddexp.accumulate(weight, axis=0, out=weight)
        self._weight[starts] = weight[1:]
        self._sums[starts] = sums[np.minimum((starts + 1) * START_EVERY - first, count) - 1]
        latest = np.arange(count) // START_EVERY
        wealth = _log_sum(unit_log(sums) + weight[1 + latest])
        here = slice(first, first + count)
        self._log[here] = np.logaddexp(wealth, -np.log(starts[latest] + 2.0)[:, None])
        highest = np.maximum.accumulate(self._log[here], axis=0)
        self._peak[here] = np.maximum(highest, self._peak[first - 1] if first else 0.0)

    def _before(self, first: int) -> tuple[Integers, Floats]:
        """Return the epoch's sums before a start, and the log weight of earlier starts over them."""
        start = first // START_EVERY
        if start == 0:
            return np.zeros_like(self._toll), np.full(self._toll.shape, -np.inf)
        if first % _EPOCH:
            return self._sums[start - 1], self._weight[start - 1]
        return np.zeros_like(self._toll), self._weight[start - 1] + unit_log(self._sums[start - 1])

    def _reserve(self, blocks: int) -> None:
        """Make room for this many blocks, doubling it so that growth costs little in the long run."""
        if blocks > len(self._log):
            room = max(blocks, 2 * len(self._log), 8 * START_EVERY)
            starts = -(-room // START_EVERY)
            self._sums, self._weight = grown(self._sums, starts), grown(self._weight, starts)
            self._log, self._peak = grown(self._log, room), grown(self._peak, room)


def log_evidence(means: Floats, line: float) -> Floats:
    """Return log E after every block.

    Args:
        means: the block means, blocks first; further axes are independent processes, such as runs of a simulation.
        line: the loss that the evidence speaks against.
    """
    process = EvidenceProcess(np.full(int(np.prod(means.shape[1:])), line))
    process.update(0, means.reshape(len(means), -1))
    return process.log_evidence().reshape(means.shape)


def _log_sum(terms: Floats) -> Floats:
    """Return log(sum(exp(terms))) over the last axis."""
    top = terms.max(axis=-1)
    return top + np.log(np.exp(terms - top[..., None]).sum(axis=-1))


def grown(values: NDArray[Scalar], rows: int) -> NDArray[Scalar]:
    """Return an array with more rows, the known ones first."""
    larger = np.zeros((rows, *values.shape[1:]), dtype=values.dtype)
    larger[: len(values)] = values
    return larger
