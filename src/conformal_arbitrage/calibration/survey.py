"""The survey of a log: what its rows say about themselves, and the search for thresholds; in memory, or part by part."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from math import inf, nextafter, sqrt
from typing import Final, TypeVar

import numpy as np

from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.secret import drawing
from conformal_arbitrage.core.exact import Bools, Floats, Integers
from conformal_arbitrage.core.losses import (
    Events,
    GuardianSees,
    Number,
    as_fraction,
    check_guardian_scores,
    finest_tick,
    in_unit,
    loss_events,
    score_range,
)
from conformal_arbitrage.core.walk import (
    Bracket,
    Buckets,
    BucketSums,
    Collect,
    Crossing,
    FindDraw,
    Fold,
    RiskCurve,
    RiskThreshold,
    Scanned,
    check_bound,
    crossings,
    crossings_here,
    find_thresholds,
    grid_points,
    last_draw,
)
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.digest import checksum
from conformal_arbitrage.scorelog.fitness import SESSION_TURNS
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.parts import Engine, PassProgress, ScorePart, ScoreParts
from conformal_arbitrage.scorelog.spark import SparkTable
from conformal_arbitrage.scorelog.tables import Keys, surely_distinct


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """What is counted in the rows of a log, or of a part of one; the loss of `unknown` rows is not known."""

    rows: int
    fewest_actions: int
    most_actions: int
    no_opinion: int
    unknown: int
    router: bool
    score_digits: int

    @classmethod
    def of(cls, log: ScoreLog, unknown: Bools) -> "RowFacts":
        """Count in some rows."""
        sizes = log.sizes
        return cls(
            rows=len(log),
            fewest_actions=int(sizes.min()),
            most_actions=int(sizes.max()),
            no_opinion=int(log.no_opinion.sum()),
            unknown=int(unknown.sum()),
            router=log.is_router,
            score_digits=log.score_digits,
        )

    @classmethod
    def sum(cls, several: Sequence["RowFacts"]) -> "RowFacts":
        """Return the facts of several parts together."""
        return cls(
            rows=sum(facts.rows for facts in several),
            fewest_actions=min(facts.fewest_actions for facts in several),
            most_actions=max(facts.most_actions for facts in several),
            no_opinion=sum(facts.no_opinion for facts in several),
            unknown=sum(facts.unknown for facts in several),
            router=all(facts.router for facts in several),
            score_digits=several[0].score_digits,
        )


@dataclass(frozen=True)
class LogSurvey:
    """A log in memory: one part, whose events are all here."""

    log: ScoreLog
    options: CalibrationOptions

    @property
    def n(self) -> int:
        """Rows."""
        return len(self.log)

    @property
    def whole(self) -> ScoreLog:
        """All rows."""
        return self.log

    @cached_property
    def curve(self) -> RiskCurve:
        """The risk of the log, under the options."""
        return self.options.curve(self.log)

    @cached_property
    def bound(self) -> Fraction:
        """The loss bound, checked against every row."""
        return self.curve.bound(self.options.loss_bound)

    @property
    def tick_digits(self) -> int:
        """One tick is 10^-tick_digits."""
        return self.curve.tick_digits

    def facts(self) -> RowFacts:
        """Return what is counted in the rows."""
        return RowFacts.of(self.log, self.options.unknown_loss(self.log))

    def sha256(self) -> str:
        """Return the digest of all rows, in whichever order."""
        return self.log.sha256()

    def thresholds(self, limits: Sequence[int]) -> list[RiskThreshold | None]:
        """Return the smallest threshold at which the total is within each limit, in ticks; None if none is."""
        return self.curve.thresholds(limits)


def needs_all_rows(options: CalibrationOptions, log: ScoreParts | SparkTable) -> str | None:
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
        'boundary="random" without ids': options.boundary == "random" and not has_ids(log),
    }
    return next((reason for reason, needed in needs.items() if needed), None)


def has_ids(log: ScoreParts | SparkTable) -> bool:
    """Return whether a log in parts has ids."""
    return (log.id if isinstance(log, SparkTable) else "id") in log.types


def digest_parts(log: ScoreParts | SparkTable, engine: Engine) -> str:
    """Return the digest of all rows of a log, in whichever order."""
    return log.digest(engine.run(_hash_part, log.parts()))


def _hash_part(part: ScorePart) -> tuple[ScorePart, int]:
    return part, part.hash_sum(*part.load_apart())


def count_rows(log: ScoreParts, engine: Engine) -> RowFacts:
    """Count in all rows of a log."""
    return RowFacts.sum(list(engine.run(_count_part, log.parts())))


def _count_part(part: ScorePart) -> RowFacts:
    log = part.load([], ids=False)
    return RowFacts.of(log, log.unknown_loss)


def refuse_repeated_ids(log: ScoreParts | SparkTable) -> None:
    """Refuse a log in which two rows have the same id, wherever they are."""
    same = log.repeated_id()
    if same is not None:
        raise ScoreLogError(f"{log.source}: {same}; make ids unique over all rows")


# --- The survey of a log in parts ---


_Result = TypeVar("_Result")
_FIRST: Final = 1 << 16
_DRAWN_AT_ONCE: Final = 1 << 20
_KEYS_AT_ONCE: Final = 1 << 27
"""The keys of so many ids are compared in memory, which takes 1 GB; DuckDB compares more, on disk."""


class PartsSurvey:
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
        if log.guardian is None:
            raise OptionError(f"{log.source}: a calibration needs the Guardian's scores; name their column: guardian=")
        self.log, self.n, self._options = log, len(log), options
        self._engine, self._progress, self._passes = engine, progress, 0
        self._parts, stamps = log.parts(), log.stamps()
        bracket = Bracket(0.0, 1.0, _FIRST, even=True)
        missing = None if options.missing_guardian is None else (options.loss_bound or 1)
        guess = finest_tick(self.n, Fraction(1))
        self.measure = Measure(guardian_sees=options.guardian_sees, missing_loss=missing, tick_digits=guess)
        self._near = NearEvents(self._guessed(losses))
        few = self.n <= _KEYS_AT_ONCE
        if not few:
            refuse_repeated_ids(log)
        self._survey(bracket, keys=few)
        self._refuse_unknown()
        low, high = check_guardian_scores(self.scores, log.source)
        worst = (
            as_fraction(missing, name="loss_bound") if missing is not None and self._counted.unknown else Fraction(0)
        )
        digits = finest_tick(self.n, max(Fraction(high) - Fraction(low), worst))
        if digits != guess or self.span > USUAL_SPAN:
            before, self.measure = self.sha256(), replace(self.measure, tick_digits=digits)
            self._near = NearEvents(self._near.ranges)
            self._survey(Bracket(0.0, max(self.span, 1e-300), _FIRST, even=True), keys=False)
            self._refuse_changed(self.sha256() != before)
        self._refuse_changed(log.stamps() != stamps)
        self.tick_digits, self.bound = digits, self._bound(digits)

    def _guessed(self, losses: Sequence[float]) -> "tuple[Bracket, ...] | OwnRanges":
        """Return the gaps near which events are kept: all of them in a small log."""
        if self.n <= FEW_ROWS:
            return EVERYTHING
        if isinstance(self.log, SparkTable):
            return OwnRanges(tuple(losses), self.n)
        samples = list(self._engine.run(Sampling(self.measure), sampled_parts(self._parts)))
        return likely_ranges(samples, losses, self.n)

    def _survey(self, bracket: Bracket, *, keys: bool) -> None:
        sums, facts, ids = BucketSums(bracket.buckets), list[PartFacts](), list[Keys]()
        for part in self._each(Survey(self.measure, bracket, self._near.ranges, keys)):
            sums.add(part.buckets)  # at once: those of all parts would not fit
            self._near.add(*part.near, part.ranges)
            facts.append(part.facts)
            ids.append(part.keys)
        _refuse_same_keys(ids, self.log)
        facts.sort(key=lambda part: part.part.first)
        self._facts, self._bracket, self._buckets = facts, bracket, sums.buckets()
        low, high = min(part.scores[0] for part in facts), max(part.scores[1] for part in facts)
        self.scores = (low, high) if low <= high else (0.0, 0.0)
        self._counted = RowFacts.sum([part.rows for part in facts])
        self.span = max(part.span for part in facts)
        self.total = sum(part.total for part in facts)

    @property
    def whole(self) -> None:
        """No rows: they are never all in memory."""
        return

    def facts(self) -> RowFacts:
        """Return what is counted in the rows."""
        return self._counted

    def _each(self, work: Callable[[ScorePart], _Result]) -> Iterator[_Result]:
        """Do a work on every part, and say so."""
        self._passes += 1
        done = 0
        for result in self._engine.run(work, self._parts):
            done += 1
            yield result
        self._progress(f"pass {self._passes}: {self.log.in_words(done)}")

    def _refuse_unknown(self) -> None:
        first = next((part for part in self._facts if part.first_unknown is not None), None)
        if first is not None and self.measure.missing_loss is None:
            row = first.part.start + (first.first_unknown or 0) + 1
            raise ScoreLogError(
                f"{first.part.file.path}: row {row}: no Guardian score, or `correct` of its answer is unknown "
                f"({self._counted.unknown:,} of {self.n:,} rows); ask the Guardian again, or pass "
                'missing_guardian="worst_case" (--missing-guardian worst_case): dropping such rows breaks the guarantee'
            )

    def _bound(self, tick_digits: int) -> Fraction:
        unit, worst = 10**tick_digits, max(self._facts, key=lambda facts: facts.largest[0])
        return check_bound(
            self._options.loss_bound,
            (Fraction(worst.largest[0], unit), worst.part.start + worst.largest[1]),
            tick=Fraction(1, unit),
            unit_scores=in_unit(self.scores),
            source=worst.part.file.path,
        )

    def sha256(self) -> str:
        """Return the digest of all rows, in whichever order."""
        return self.log.digest((facts.part, facts.hashes) for facts in self._facts)

    def thresholds(self, limits: Sequence[int]) -> list[RiskThreshold | None]:
        """Return the smallest threshold at which the total is within each limit, in ticks; None if none is."""
        return find_thresholds(self, limits)

    @property
    def grid(self) -> Floats | None:
        """The only relaxations allowed; None for all."""
        return None if self._options.grid is None else grid_points(self._options.grid)

    def crossings(self, limits: Sequence[int]) -> list[Crossing | None]:
        """Return where the total first is within each limit."""
        return crossings(self._scan_events, self.total, limits, self._bracket.high, first=_FIRST)

    def fallen(self, low: float, high: float) -> int:
        """Return by how much the total falls above one gap and up to another."""
        between = Fold((Bracket(nextafter(low, inf), high, 2),))
        return sum(int(buckets.drop.sum()) for (buckets,) in self._scan_events(between))

    @property
    def find_draw(self) -> FindDraw | None:
        """Finds the draw at a crossing; None unless the boundary is random."""
        return None if self._options.boundary != "random" else partial(self._find_draw, self._options.drawing_key())

    def _find_draw(self, key: bytes, crossing: Crossing, limit: int) -> tuple[float, int]:
        def scan(work: Callable[[Floats, Integers], _Result], /) -> Iterator[_Result]:
            return self._scan_draws(key, crossing.gap, work)

        if crossing.events > _DRAWN_AT_ONCE:
            (drawn,) = crossings(scan, crossing.before, [limit], 1.0)
            if drawn is None:
                raise AssertionError
            return drawn.gap, drawn.after
        u, drop = (np.concatenate(column) for column in zip(*scan(Keep()), strict=True))
        return last_draw(u, drop, crossing.before, limit)

    def _scan_events(self, work: Callable[[Floats, Integers], _Result], /) -> Iterable[_Result]:
        """Do a work on all events; what the first pass has done already is not done again."""
        if work == Fold((self._bracket,)):
            return [(self._buckets,)]  # pyright: ignore[reportReturnType]
        kept = self._near.answer(work)
        if kept is not None:
            return [kept]  # pyright: ignore[reportReturnType]
        return self._scan_again(work)

    def _scan_again(self, work: Callable[[Floats, Integers], _Result]) -> Iterator[_Result]:
        total = 0
        for rows, result in self._each(EventScan(self.measure, work)):
            total += rows
            yield result  # pyright: ignore[reportReturnType]
        self._refuse_changed(total != sum(part.checksum for part in self._facts))

    def _scan_draws(self, key: bytes, gap: float, work: Callable[[Floats, Integers], _Result]) -> Iterator[_Result]:
        """Do a work on the draws and events of the rows whose loss falls at a gap."""
        sums: list[tuple[ScorePart, int]] = []
        for part, hashes, result in self._each(DrawScan(self.measure, key, gap, work)):
            sums.append((part, hashes))
            yield result  # pyright: ignore[reportReturnType]
        self._refuse_changed(self.log.digest(sums) != self.sha256())

    def _refuse_changed(self, changed: bool) -> None:
        if changed:
            raise ScoreLogError(
                f"{self.log.source}: its rows changed between two passes; let nobody write to a log that is being read, or "
                "calibrate a copy"
            )


def _refuse_same_keys(ids: Sequence[Keys], log: ScoreParts | SparkTable) -> None:
    """Refuse repeated ids; where keys do not tell them apart for sure, the ids themselves are compared."""
    keys = np.concatenate(ids)
    if len(keys) and not surely_distinct(keys):
        refuse_repeated_ids(log)


# --- Work on one part of a log ---


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

    def events(self, log: ScoreLog) -> Events:
        """Return where the loss of some rows falls."""
        return loss_events(
            log, guardian_sees=self.guardian_sees, missing_loss=self.missing_loss, tick_digits=self.tick_digits
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """What the first pass learns about a part."""

    part: ScorePart
    rows: RowFacts
    first_unknown: int | None
    scores: tuple[float, float]
    span: float
    hashes: int
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
    keys: Keys


@dataclass(frozen=True, slots=True)
class Survey:
    """The work of the first pass."""

    measure: Measure
    bracket: Bracket
    near: "tuple[Bracket, ...] | OwnRanges"
    keys: bool

    def __call__(self, part: ScorePart) -> Surveyed:
        """Look at every row of a part."""
        log, ids = part.load_apart()
        scores, unknown = score_range(log.loss_scores), log.unknown_loss
        check_guardian_scores(scores, part.name)
        events = self.measure.tolerant().events(log)
        (buckets,) = Fold((self.bracket,))(events.position, events.drop)
        facts = PartFacts(
            part=part,
            rows=RowFacts.of(log, unknown),
            first_unknown=int(unknown.argmax()) if unknown.any() else None,
            scores=scores if not unknown.all() else (inf, -inf),
            span=_span(log),
            hashes=part.hash_sum(log, ids),
            checksum=_checksum(log),
            total=events.total,
            largest=events.largest,
        )
        ranges = self.near(len(log), events, buckets) if isinstance(self.near, OwnRanges) else self.near
        near = Collect(ranges)(events.position, events.drop)
        keys = [] if ids is None or not self.keys else list(ids.hash_keys())
        return Surveyed(facts, buckets, near, ranges, np.concatenate([np.zeros(0, np.uint64), *keys]))


@dataclass(frozen=True, slots=True)
class Sampling:
    """The work before the first pass, on a few rows."""

    measure: Measure

    def __call__(self, part: ScorePart) -> "SampledEvents":
        """Return the events of some rows, in whichever row."""
        log = part.load([], ids=False)
        check_guardian_scores(score_range(log.loss_scores), part.name)
        return SampledEvents(len(log), replace(self.measure.tolerant().events(log), row=np.zeros(0, np.int64)))


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
class EventScan:
    """The work of a later pass: something with the events of a part. Its checksum comes with the result."""

    measure: Measure
    work: Callable[[Floats, Integers], object]

    def __call__(self, part: ScorePart) -> tuple[int, object]:
        """Return the checksum of the rows, and the result of the work."""
        log = part.load([], ids=False)
        events = self.measure.events(log)
        return _checksum(log), self.work(events.position, events.drop)


@dataclass(frozen=True, slots=True)
class DrawScan:
    """The work of a pass over draws: something with the draws of the rows whose loss falls at one gap, and these events.

    The part and the sum of its rows' hashes, in which ids count, come with the result.
    """

    measure: Measure
    key: bytes
    gap: float
    work: Callable[[Floats, Integers], object]

    def __call__(self, part: ScorePart) -> tuple[ScorePart, int, object]:
        """Return the part, the sum of its rows' hashes, and the result of the work."""
        log, ids = part.load_apart()
        log = log if ids is None else replace(log, id=ids.strings())
        events = self.measure.events(log)
        there = np.flatnonzero(events.position == self.gap)
        return part, part.hash_sum(log, ids), self.work(drawing(self.key, log)(events.row[there]), events.drop[there])


@dataclass(frozen=True, slots=True)
class Keep:
    """Work that keeps what it is given."""

    def __call__(self, gap: Floats, drop: Integers) -> tuple[Floats, Integers]:
        """Return it."""
        return gap, drop


# --- Events near the thresholds, kept in the first pass ---


FEW_ROWS: Final = 1 << 16
"""All events of a log of so many rows are kept."""
_SAMPLES: Final = 8
_LEAST, _MOST = 1 << 10, 1 << 16
_ROWS_PER_SAMPLED: Final = 64
_KEPT: Final = 1 << 22
"""At most about so many events are kept."""


@dataclass(frozen=True, slots=True)
class SampledEvents:
    """Rows of a sample, and their events."""

    rows: int
    events: Events

    def crossing(self, loss: float) -> Crossing | None:
        """Return where the mean loss of these rows comes within a limit."""
        limit = int(loss * self.rows * 10**self.events.tick_digits)
        return crossings_here(self.events.total, self.events.position, self.events.drop, [limit])[0]


def sampled_parts(parts: Sequence[ScorePart]) -> list[ScorePart]:
    """Return a few rows of some parts, evenly spread over the log."""
    rows = sum(part.stop - part.start for part in parts)
    each = min(max(rows // (_ROWS_PER_SAMPLED * _SAMPLES), _LEAST), _MOST)
    chosen = [parts[len(parts) * k // _SAMPLES] for k in range(_SAMPLES)]
    return [_shortened(part, chosen[:k].count(part), each) for k, part in enumerate(chosen)]


def _shortened(part: ScorePart, before: int, rows: int) -> ScorePart:
    """Return so many rows of a part, after those that were taken before."""
    start = min(part.start + before * rows, part.stop - 1)
    return replace(part, start=start, stop=min(start + rows, part.stop))


def likely_ranges(samples: Sequence[SampledEvents], losses: Iterable[float], rows: int) -> tuple[Bracket, ...]:
    """Return ranges of gaps in which the thresholds of a log are likely to lie.

    Args:
        samples: rows of the log.
        losses: limits on the mean loss, one for each threshold.
        rows: of the log.
    """
    ranges = tuple(one for loss in losses if (one := _range(samples, loss)) is not None)
    inside = sum(len(Collect(ranges)(one.events.position, one.events.drop)[0]) for one in samples)
    kept = inside * rows / max(sum(one.rows for one in samples), 1)
    return ranges if kept <= _KEPT else ()


def _range(samples: Sequence[SampledEvents], loss: float) -> Bracket | None:
    """Return twice the range of the samples' own thresholds; None if not all have one above 0.

    The log's is near their mean: outside their range once in 128 logs, outside twice the range hardly ever.
    """
    crossings = [one.crossing(loss) for one in samples]
    gaps = [one.gap for one in crossings if one is not None]
    if len(gaps) < len(crossings) or max(gaps, default=0.0) == 0:
        return None
    low, high = min(gaps), max(gaps)
    return Bracket(max(low - (high - low) / 2, 0.0), high + (high - low) / 2, 2)


EVERYTHING: Final = (Bracket(0.0, inf, 2),)


@dataclass(frozen=True, slots=True)
class OwnRanges:
    """The ranges in which the rows of a part expect the thresholds of the log, by themselves.

    Attributes:
        losses: limits on the mean loss, one for each threshold.
        rows: of the log.
    """

    losses: tuple[float, ...]
    rows: int

    def __call__(self, rows: int, events: Events, buckets: Buckets) -> tuple[Bracket, ...]:
        """Return the ranges, given the rows of the part, its events and their buckets; none if too many events lie there."""
        limits = [loss * rows * 10**events.tick_digits for loss in self.losses]
        places = [
            _places(limit, events, buckets) for limit in limits if 0 <= limit < events.total and len(buckets.drop)
        ]
        kept = sum(int(buckets.events[first : last + 1].sum()) for first, last in places)
        if kept * self.rows > _KEPT * rows:
            return ()
        return tuple(Bracket(float(buckets.smallest[a]), float(buckets.largest[b]), 2) for a, b in places)


def _places(limit: float, events: Events, buckets: Buckets) -> tuple[int, int]:
    """Return the first and the last bucket in which the total of some rows may be when that of the log is at its limit.

    The sum of losses has a variance of at most the largest loss times its mean; eight standard deviations are allowed for.
    """
    after = events.total - np.cumsum(buckets.drop)
    slack = 8 * sqrt(events.largest[0] * max(limit, events.largest[0]))
    first, last = np.searchsorted(-after, [-limit - slack, -limit + slack]).tolist()
    return min(first, len(after) - 1), min(last, len(after) - 1)


class NearEvents:
    """The events that were kept, of every part.

    Attributes:
        ranges: of their gaps, or what finds them for each part.
    """

    def __init__(self, ranges: tuple[Bracket, ...] | OwnRanges) -> None:
        """Keep nothing yet."""
        self.ranges = ranges
        self._kept: list[Scanned] = []
        self._known: list[tuple[Bracket, ...]] = [] if isinstance(ranges, OwnRanges) else [ranges]

    def add(self, gap: Floats, drop: Integers, ranges: tuple[Bracket, ...] = ()) -> None:
        """Keep the events of a part, and the ranges of their gaps if it found them itself."""
        self._kept.append((gap, drop))
        if isinstance(self.ranges, OwnRanges):
            self._known.append(ranges)

    def answer(self, work: object) -> Scanned | None:
        """Return what a work that collects events makes of those of all parts; None if it needs others as well."""
        if not isinstance(work, Collect) or not all(map(self._holds, work.brackets)):
            return None
        gap, drop = (np.concatenate(column) for column in zip(*self._kept, strict=True))
        return work(gap, drop)

    def _holds(self, bracket: Bracket) -> bool:
        """Return whether all events of a range were kept, of every part."""
        return all(any(one.low <= bracket.low and bracket.high <= one.high for one in own) for own in self._known)
