"""Calibrating a log in parts: work on one part at a time, merged into the figures that the whole log would give, to the bit.

The first pass looks at every row once: it checks it, counts, digests it, and puts the falls of its loss into buckets. A
tick and a range of gaps are assumed for that, and the pass is repeated if they turn out otherwise. The falls near the
thresholds are kept on the way if it was guessed where these are, see `near_falls.py`, and collected by a second pass
otherwise, see `core/search.py`. What cannot be computed from parts needs all rows at once: `gathering` says what that is,
and `ScoreParts.gather` up to which size.

Knows nothing of certificates.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf, nextafter
from typing import Final, TypeVar

import numpy as np

from conformal_arbitrage.calibration.near_falls import (
    EVERYTHING,
    FEW_ROWS,
    NearFalls,
    OwnRanges,
    likely_ranges,
    sampled_parts,
)
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.part_work import (
    USUAL_SPAN,
    DrawScan,
    FallScan,
    Keep,
    Measure,
    PartFacts,
    Sampling,
    Survey,
)
from conformal_arbitrage.core.arrays import Floats, Integers
from conformal_arbitrage.core.losses import (
    as_fraction,
    check_guardian_scores,
    finest_tick,
)
from conformal_arbitrage.core.risk import RiskThreshold, check_bound, grid_points, last_draw
from conformal_arbitrage.core.search import Bracket, BucketSums, Crossing, Fold, crossings
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.engines import Engine, PassProgress
from conformal_arbitrage.scorelog.fitness import SESSION_TURNS, UNFIT
from conformal_arbitrage.scorelog.id_keys import PiledKeys, surely_distinct
from conformal_arbitrage.scorelog.parts import ScorePart, ScoreParts
from conformal_arbitrage.scorelog.spark_table import SparkTable

_Result = TypeVar("_Result")
_FIRST: Final = 1 << 16
_DRAWN_AT_ONCE: Final = 1 << 20
_KEYS_AT_ONCE: Final = 1 << 27
"""The keys of so many ids are compared in memory, which takes 1 GB; DuckDB compares more, on disk."""


def gathering(options: CalibrationOptions, log: ScoreParts | SparkTable) -> str | None:
    """Return what of the options needs all rows at once, as a user knows it; None if nothing does."""
    needs = {
        'loss="net" (--loss net), whose budget is kept up to the first passage,': options.net,
        "a loss of your own": options.own_loss is not None,
        f'score="{options.score}"': options.learned,
        "by= (--by)": options.by is not None,
        "cluster= (--cluster)": options.cluster is not None,
        "margins= (--margins)": options.margins,
        "a confidence for graded losses": options.confidence is not None and not (log.binary or options.zero_one),
        "zero_one=True (--zero-one)": options.zero_one,
        "a log of sessions": SESSION_TURNS in log.types,
    }
    return next((reason for reason, needed in needs.items() if needed), None)


class FallSearch(ABC):
    """The search for thresholds where falls are scanned: in parts, or in a database.

    Attributes:
        total: the loss of all rows at relaxation 0, in ticks.
        tick_digits: one tick is 10^-tick_digits.
    """

    total: int
    tick_digits: int

    def __init__(self, options: CalibrationOptions, *, total: int, span: float) -> None:
        """Keep what the search needs.

        Args:
            options: how to calibrate.
            total: the loss of all rows at relaxation 0, in ticks.
            span: about the largest gap.
        """
        self._options, self.total, self._span = options, total, span

    @abstractmethod
    def scan_falls(self, work: Callable[[Floats, Integers], _Result], /) -> Iterable[_Result]:
        """Do a work on the falls of all rows."""
        ...

    @abstractmethod
    def scan_draws(
        self, key: bytes, gap: float
    ) -> Callable[[Callable[[Floats, Integers], _Result]], Iterable[_Result]]:
        """Return what does a work on the draws and falls of the rows whose loss falls at a gap."""
        ...

    def thresholds(self, limits: Sequence[int]) -> list[RiskThreshold | None]:
        """Return the smallest threshold at which the total is within each limit, in ticks; None if none is."""
        steps = crossings(self.scan_falls, self.total, limits, self._span, first=_FIRST)
        if self._options.grid is not None:
            return [None if one is None else self._on_grid(one) for one in steps]
        return [None if one is None else self._threshold(one, limit) for one, limit in zip(steps, limits, strict=True)]

    def _threshold(self, one: Crossing, limit: int) -> RiskThreshold:
        unit = 10**self.tick_digits
        if self._options.boundary != "random":
            return RiskThreshold(one.gap, None, Fraction(one.after, unit))
        if one.gap == 0:
            return RiskThreshold(0.0, 0.0, Fraction(one.after, unit))
        key = self._options.drawing_key()
        if one.falls > _DRAWN_AT_ONCE:
            (drawn,) = crossings(self.scan_draws(key, one.gap), one.before, [limit], 1.0)
            if drawn is None:
                raise AssertionError
            return RiskThreshold(one.gap, drawn.gap, Fraction(drawn.after, unit))
        pairs = list(self.scan_draws(key, one.gap)(Keep()))
        u, drop = (np.concatenate(column) for column in zip(*pairs, strict=True))
        draw, total = last_draw(u, drop, one.before, limit)
        return RiskThreshold(one.gap, draw, Fraction(total, unit))

    def _on_grid(self, one: Crossing) -> RiskThreshold | None:
        """Return the first point of the grid that is not below a gap, and the total there."""
        points = grid_points(self._options.grid or 1)
        index = int(np.searchsorted(points, one.gap))
        if index == len(points):
            return None
        point, total = float(points[index]), one.after
        if point > one.gap:
            between = Fold((Bracket(nextafter(one.gap, inf), point, 2),))
            total -= sum(int(buckets.drop.sum()) for (buckets,) in self.scan_falls(between))
        return RiskThreshold(point, None, Fraction(total, 10**self.tick_digits))


class SurveyedParts(FallSearch):
    """A log in parts, looked at once: its figures, and the search for thresholds.

    Attributes:
        log: the log.
        n: rows.
        bound: the loss bound, checked against every row.
        measure: how losses are measured.
    """

    def __init__(
        self,
        log: ScoreParts | SparkTable,
        options: CalibrationOptions,
        engine: Engine,
        progress: PassProgress,
        losses: Sequence[float] = (),
    ) -> None:
        """Go through all parts, once or, if the scores are of unusual size, twice.

        Args:
            log: the log.
            options: how to calibrate.
            engine: where the work is done.
            progress: is told about every pass.
            losses: mean losses at which thresholds will be sought, about.
        """
        _refuse_unfit(log)
        self.log, self.n, self._options = log, len(log), options
        self._engine, self._progress, self._passes = engine, progress, 0
        self._parts, stamps = log.parts(), log.stamps()
        bracket = Bracket(0.0, 1.0, _FIRST, even=True)
        missing = None if options.missing_guardian is None else (options.loss_bound or 1)
        guess = finest_tick(self.n, Fraction(1))
        self.measure = Measure(guardian_sees=options.guardian_sees, missing_loss=missing, tick_digits=guess)
        self._near = NearFalls(self._guessed(losses))
        few = self.n <= _KEYS_AT_ONCE
        if not few:
            refuse_repeated_ids(log)
        self._survey(bracket, keys=few)
        self._refuse_unknown()
        low, high = check_guardian_scores(self.scores, log.source)
        worst = as_fraction(missing, name="loss_bound") if missing is not None and self.unknown else Fraction(0)
        digits = finest_tick(self.n, max(Fraction(high) - Fraction(low), worst))
        if digits != guess or self.span > USUAL_SPAN:
            before, self.measure = self.sha256(), replace(self.measure, tick_digits=digits)
            self._near = NearFalls(self._near.ranges)
            self._survey(Bracket(0.0, max(self.span, 1e-300), _FIRST, even=True), keys=False)
            self._refuse_changed(self.sha256() != before)
        self._refuse_changed(log.stamps() != stamps)
        self.tick_digits = digits
        super().__init__(options, total=self.total, span=self._bracket.high)
        self.bound = self._bound()

    def _guessed(self, losses: Sequence[float]) -> tuple[Bracket, ...] | OwnRanges:
        """Return the gaps near which falls are kept: all of them in a small log."""
        if self.n <= FEW_ROWS:
            return EVERYTHING
        if isinstance(self.log, SparkTable):
            return OwnRanges(tuple(losses), self.n)
        samples = list(self._engine.run(Sampling(self.measure), sampled_parts(self._parts)))
        return likely_ranges(samples, losses, self.n)

    def _survey(self, bracket: Bracket, *, keys: bool) -> None:
        sums, facts, piles = BucketSums(bracket.buckets), list[PartFacts](), list[PiledKeys]()
        for one in self._each(Survey(self.measure, bracket, self._near.ranges, keys)):
            sums.add(one.buckets)  # at once: those of all parts would not fit
            self._near.add(*one.near, one.ranges)
            facts.append(one.facts)
            piles.append(one.keys)
        if any(piles) and not surely_distinct(piles):
            refuse_repeated_ids(self.log)
        facts.sort(key=lambda one: one.part.first)
        self._facts, self._bracket, self._buckets = facts, bracket, sums.buckets()
        low, high = min(one.scores[0] for one in facts), max(one.scores[1] for one in facts)
        self.scores = (low, high) if low <= high else (0.0, 0.0)
        self.unknown = sum(one.unknown for one in facts)
        self.no_opinion = sum(one.no_opinion for one in facts)
        self.span = max(one.span for one in facts)
        self.total = sum(one.total for one in facts)
        self.fewest_actions = min(one.fewest_actions for one in facts)
        self.most_actions = max(one.most_actions for one in facts)
        self.router = all(one.router for one in facts)
        self.score_digits = facts[0].score_digits

    def _each(self, work: Callable[[ScorePart], _Result]) -> Iterator[_Result]:
        """Do a work on every part, and say so."""
        self._passes += 1
        done = 0
        for result in self._engine.run(work, self._parts):
            done += 1
            yield result
        self._progress(f"pass {self._passes}: {self.log.in_words(done)}")

    def _refuse_unknown(self) -> None:
        first = next((one for one in self._facts if one.first_unknown is not None), None)
        if first is not None and self.measure.missing_loss is None:
            raise ScoreLogError(
                f"{first.part.file.path}: row {first.part.start + (first.first_unknown or 0) + 1}: no Guardian score, or "
                f"`correct` of its answer is unknown ({self.unknown:,} of {self.n:,} rows); ask the Guardian again, or pass "
                'missing_guardian="worst_case" (--missing-guardian worst_case): dropping such rows breaks the guarantee'
            )

    def _bound(self) -> Fraction:
        unit, worst = 10**self.tick_digits, max(self._facts, key=lambda one: one.largest[0])
        return check_bound(
            self._options.loss_bound,
            (Fraction(worst.largest[0], unit), worst.part.start + worst.largest[1]),
            tick=Fraction(1, unit),
            unit_scores=self.scores[0] >= 0 and self.scores[1] <= 1,
            source=worst.part.file.path,
        )

    def sha256(self) -> str:
        """Return the digest of all rows, in whichever order of the files."""
        return self.log.digest((one.part, one.leaves) for one in self._facts)

    def scan_falls(self, work: Callable[[Floats, Integers], _Result], /) -> Iterable[_Result]:
        """Do a work on all falls; what the first pass has done already is not done again."""
        if work == Fold((self._bracket,)):
            return [(self._buckets,)]  # pyright: ignore[reportReturnType]
        kept = self._near.answer(work)
        if kept is not None:
            return [kept]  # pyright: ignore[reportReturnType]
        return self._scan_again(work)

    def _scan_again(self, work: Callable[[Floats, Integers], _Result]) -> Iterator[_Result]:
        total = 0
        for one, result in self._each(FallScan(self.measure, work)):
            total += one
            yield result  # pyright: ignore[reportReturnType]
        self._refuse_changed(total != sum(one.checksum for one in self._facts))

    def scan_draws(
        self, key: bytes, gap: float
    ) -> Callable[[Callable[[Floats, Integers], _Result]], Iterable[_Result]]:
        """Return what does a work on the draws and falls of the rows whose loss falls at a gap."""

        def scanned(work: Callable[[Floats, Integers], _Result]) -> Iterator[_Result]:
            leaves: list[tuple[ScorePart, tuple[str, ...]]] = []
            for part, own, result in self._each(DrawScan(self.measure, key, gap, work)):
                leaves.append((part, own))
                yield result  # pyright: ignore[reportReturnType]
            self._refuse_changed(self.log.digest(leaves) != self.sha256())

        return scanned

    def _refuse_changed(self, changed: bool) -> None:
        if changed:
            raise ScoreLogError(
                f"{self.log.source}: its rows changed between two passes; let nobody write to a log that is being read, or "
                "calibrate a copy"
            )


def digest_leaves(part: ScorePart) -> tuple[ScorePart, tuple[str, ...]]:
    """Return a part with the digests of its leaves."""
    return part, part.digests(*part.load_apart())


def digest_parts(log: ScoreParts | SparkTable, engine: Engine) -> str:
    """Return the digest of all rows of a log, in whichever order of its files."""
    return log.digest(engine.run(digest_leaves, log.parts()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """What is counted in every row of a log in parts; the loss of `unknown` rows is not known."""

    source: str
    rows: int
    fewest_actions: int
    most_actions: int
    no_opinion: int
    unknown: int


def count_part(part: ScorePart) -> RowCounts:
    """Count in the rows of a part."""
    log = part.load([], ids=False)
    return RowCounts(
        source=part.name,
        rows=len(log),
        fewest_actions=int(log.sizes.min()),
        most_actions=int(log.sizes.max()),
        no_opinion=int(log.no_opinion.sum()),
        unknown=int(log.unknown_loss.sum()),
    )


def count_rows(log: ScoreParts, engine: Engine) -> RowCounts:
    """Count in all rows of a log."""
    counts = list(engine.run(count_part, log.parts()))
    return RowCounts(
        source=log.source,
        rows=sum(one.rows for one in counts),
        fewest_actions=min(one.fewest_actions for one in counts),
        most_actions=max(one.most_actions for one in counts),
        no_opinion=sum(one.no_opinion for one in counts),
        unknown=sum(one.unknown for one in counts),
    )


def refuse_repeated_ids(log: ScoreParts | SparkTable) -> None:
    """Refuse a log in which two rows have the same id, wherever they are."""
    same = log.repeated_id()
    if same is not None:
        raise ScoreLogError(f"{log.source}: {same}; make ids unique over all rows")


def _refuse_unfit(log: ScoreParts | SparkTable) -> None:
    refuse_unfit_columns(log.types, log.source)
    if log.guardian is None:
        raise OptionError(f"{log.source}: a calibration needs the Guardian's scores; name their column: guardian=")


def refuse_unfit_columns(names: Collection[str], source: str) -> None:
    """Refuse a log that says in its columns that its rows were selected by their scores."""
    if UNFIT in names:
        raise ScoreLogError(
            f"{source}: contains rows selected by their scores, which breaks exchangeability; export shadow and "
            "audited rows only (arbitrage records export --score-log)"
        )
