"""Work on one part of a log: small values that are sent to where the part is read, and what they bring back.

Knows nothing of engines, nor of how results are merged.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Final

import numpy as np

from conformal_arbitrage.calibration.draws import drawing
from conformal_arbitrage.calibration.near_falls import OwnRanges, SampledFalls
from conformal_arbitrage.core.arrays import Floats, Integers
from conformal_arbitrage.core.falls import Falls, loss_falls
from conformal_arbitrage.core.losses import GuardianSees, Number, check_guardian_scores, score_range
from conformal_arbitrage.core.search import Bracket, Buckets, Collect, Fold, Scanned
from conformal_arbitrage.scorelog.digests import checksum
from conformal_arbitrage.scorelog.id_keys import PiledKeys, piled_keys
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.parts import ScorePart

USUAL_SPAN: Final = 2.0
"""With gaps up to this the first pass need not be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How the loss of a part's rows is measured: with the tick of the whole log."""

    guardian_sees: GuardianSees
    missing_loss: Number | None
    tick_digits: int

    def tolerant(self) -> "Measure":
        """Return what measures rows without a Guardian score as well, before they are refused."""
        return self if self.missing_loss is not None else replace(self, missing_loss=1)

    def falls(self, log: ScoreLog) -> Falls:
        """Return where the loss of some rows falls."""
        return loss_falls(
            log, guardian_sees=self.guardian_sees, missing_loss=self.missing_loss, tick_digits=self.tick_digits
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """What the first pass learns about a part."""

    part: ScorePart
    rows: int
    fewest_actions: int
    most_actions: int
    no_opinion: int
    unknown: int
    first_unknown: int | None
    router: bool
    scores: tuple[float, float]
    span: float
    score_digits: int
    leaves: tuple[str, ...]
    checksum: int
    total: int
    largest: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What the first pass brings back from a part; `keys` of its ids if they were wanted."""

    facts: PartFacts
    buckets: Buckets
    near: Scanned
    ranges: tuple[Bracket, ...]
    keys: PiledKeys


@dataclass(frozen=True, slots=True)
class Survey:
    """The work of the first pass."""

    measure: Measure
    bracket: Bracket
    near: tuple[Bracket, ...] | OwnRanges
    keys: bool

    def __call__(self, part: ScorePart) -> Surveyed:
        """Look at every row of a part."""
        log, ids = part.load_apart()
        scores, unknown, sizes = score_range(log.loss_scores), log.unknown_loss, log.sizes
        check_guardian_scores(scores, part.name)
        falls = self.measure.tolerant().falls(log)
        (buckets,) = Fold((self.bracket,))(falls.gap, falls.drop)
        facts = PartFacts(
            part=part,
            rows=len(log),
            fewest_actions=int(sizes.min()),
            most_actions=int(sizes.max()),
            no_opinion=int(log.no_opinion.sum()),
            unknown=int(unknown.sum()),
            first_unknown=int(unknown.argmax()) if unknown.any() else None,
            router=log.is_router,
            scores=scores if not unknown.all() else (inf, -inf),
            span=_span(log),
            score_digits=log.score_digits,
            leaves=part.digests(log, ids),
            checksum=_checksum(log),
            total=falls.total,
            largest=falls.largest,
        )
        ranges = self.near(len(log), falls, buckets) if isinstance(self.near, OwnRanges) else self.near
        near = Collect(ranges)(falls.gap, falls.drop)
        return Surveyed(facts, buckets, near, ranges, piled_keys(ids) if self.keys and ids is not None else [])


@dataclass(frozen=True, slots=True)
class Sampling:
    """The work before the first pass, on a few rows."""

    measure: Measure

    def __call__(self, part: ScorePart) -> SampledFalls:
        """Return the falls of some rows, in whichever row."""
        log = part.load([], ids=False)
        check_guardian_scores(score_range(log.loss_scores), part.name)
        return SampledFalls(len(log), replace(self.measure.tolerant().falls(log), row=np.zeros(0, np.int64)))


def _checksum(log: ScoreLog) -> int:
    """Return a number that shows whether rows are still those of an earlier pass."""
    return checksum([log.primary, log.guardian, *([] if log.binary is None else [log.binary])])


def _span(log: ScoreLog) -> float:
    """Return the largest gap of some rows; if all Primary scores together span little, that, which is as good."""
    together = float(log.primary.max() - log.primary.min())
    if together <= USUAL_SPAN:
        return together
    starts = log.offsets[:-1]
    return float((np.maximum.reduceat(log.primary, starts) - np.minimum.reduceat(log.primary, starts)).max())


@dataclass(frozen=True, slots=True)
class FallScan:
    """The work of a later pass: something with the falls of a part. Its checksum comes with the result."""

    measure: Measure
    work: Callable[[Floats, Integers], object]

    def __call__(self, part: ScorePart) -> tuple[int, object]:
        """Return the checksum of the rows, and the result of the work."""
        log = part.load([], ids=False)
        falls = self.measure.falls(log)
        return _checksum(log), self.work(falls.gap, falls.drop)


@dataclass(frozen=True, slots=True)
class DrawScan:
    """The work of a pass over draws: something with the draws of the rows whose loss falls at one gap, and these falls.

    The part and the digests of its leaves, in which ids count, come with the result.
    """

    measure: Measure
    key: bytes
    gap: float
    work: Callable[[Floats, Integers], object]

    def __call__(self, part: ScorePart) -> tuple[ScorePart, tuple[str, ...], object]:
        """Return the part, the digests of its leaves, and the result of the work."""
        log, ids = part.load_apart()
        log = log if ids is None else replace(log, id=ids.strings())
        falls = self.measure.falls(log)
        there = np.flatnonzero(falls.gap == self.gap)
        return part, part.digests(log, ids), self.work(drawing(self.key, log)(falls.row[there]), falls.drop[there])


@dataclass(frozen=True, slots=True)
class Keep:
    """Work that keeps what it is given."""

    def __call__(self, gap: Floats, drop: Integers) -> tuple[Floats, Integers]:
        """Return it."""
        return gap, drop
