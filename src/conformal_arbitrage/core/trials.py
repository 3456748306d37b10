"""Held-out evaluation: calibrate on one part of a log and measure on the other, over many splits at once.

All quantities of a row (its loss, whether it defers, the outcome of its chosen action, the cost of the Guardian) are
step functions of the relaxation. Their steps are sorted by gap once; each split then only adds up those of its rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from conformal_arbitrage.core.exact import (
    Bools,
    Floats,
    Indices,
    Integers,
    ScoreArrays,
    guardian_choices,
    in_order,
    n_rows,
)
from conformal_arbitrage.core.risk import (
    BlockLosses,
    GuardianSees,
    LogLosses,
    Number,
    RiskCurve,
    first_within,
    position_order,
    spendable,
)
from conformal_arbitrage.errors import OptionError

Name = str | tuple[str, str]
Split = tuple[Indices, Indices]
"""Calibration rows and test rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegCost:
    """The cost of asking the Guardian about m of a row's K actions: base + rate floor(tokens (0.5 + 0.5 m / K))."""

    base: Floats
    rate: float = 0.0
    tokens: Integers | None = None

    def full(self) -> Floats:
        """Return the cost of showing everything."""
        return self.base if self.tokens is None else self.base + self.rate * self.tokens

    def of(self, rows: Indices, shown: int | Integers, size: int | Integers) -> Floats:
        """Return the cost of showing `shown` of `size` actions of some rows."""
        if self.tokens is None:
            return self.base[rows]
        return self.base[rows] + self.rate * (self.tokens[rows] * (size + shown) // (2 * size))


def draw_splits(
    n: int,
    *,
    calibration_size: int,
    test_size: int | None,
    trials: int,
    rng: np.random.Generator,
    groups: Integers | None = None,
    sample_size: int | None = None,
) -> list[Split]:
    """Draw random splits; with groups, each from a fresh sample balanced over them.

    Balancing takes floor(sample_size / groups) rows of every group (all of a smaller one) and fills the rest at
    random from the rows left over.
    """
    pool = n if sample_size is None else sample_size
    used = pool if test_size is None else calibration_size + test_size
    if not 0 < calibration_size < used <= pool <= n:
        raise OptionError(
            f"a calibration size of {calibration_size} with {'the rest' if test_size is None else test_size} for the "
            f"test does not fit {pool} of {n_rows(n)}; give a calibration size below the number of rows"
        )
    places = [_split(pool, calibration_size, used - calibration_size, rng) for _ in range(trials)]
    if groups is None:
        return places
    samples = [balanced(groups, pool, rng) for _ in range(trials)]
    return [(rows[left], rows[right]) for rows, (left, right) in zip(samples, places, strict=True)]


def _split(n: int, calibration_size: int, test_size: int, rng: np.random.Generator) -> Split:
    calibration = rng.choice(n, calibration_size, replace=False, shuffle=False)
    left = np.ones(n, dtype=np.bool_)
    left[calibration] = False
    rest = np.flatnonzero(left)
    test = rest if test_size == len(rest) else rng.choice(rest, test_size, replace=False, shuffle=False)
    return calibration, test


def balanced(groups: Integers, size: int, rng: np.random.Generator) -> Indices:
    """Return a sample of rows: floor(size / groups) of every group, all of a smaller one, and the remainder at random."""
    shuffled = rng.permutation(len(groups))
    by_group = shuffled[np.argsort(groups[shuffled], kind="stable")]
    counts = np.bincount(groups)
    starts = np.cumsum(counts) - counts
    place = np.arange(len(groups)) - np.repeat(starts, counts)
    chosen = place < size // np.count_nonzero(counts)
    rest = rng.permutation(by_group[~chosen])
    taken = by_group[chosen]
    return np.concatenate([taken, rest[: size - len(taken)]])


@dataclass(frozen=True, slots=True)
class Steps:
    """Every row's quantities as steps, in the order in which actions become candidates.

    `start` (quantities x rows) is before any step, when the top action stands alone; step k adds `change[:, k]` to row
    `row[k]`. The loss is in ticks, so that sums come out even.
    """

    names: tuple[Name, ...]
    start: Floats
    row: Indices
    gap: Floats
    u: Floats | None
    change: Floats

    def taken(self, relaxation: Floats, boundary_u: Floats | None = None) -> Indices:
        """Return how many steps are taken at each relaxation; a draw goes with it for a random boundary."""
        if self.u is None or boundary_u is None:
            return np.searchsorted(self.gap, relaxation, side="right")
        # complex numbers are ordered by their real part, then by the imaginary one
        return np.searchsorted(self.gap + 1j * self.u, relaxation + 1j * boundary_u, side="right")


def build_steps(
    log: ScoreArrays,
    losses: LogLosses,
    *,
    guardian_sees: GuardianSees,
    outcomes: Mapping[str, Floats],
    leg: LegCost | None,
    u: Floats | None,
) -> Steps:
    """Lay out all quantities of a log as steps, sorted once.

    Quantities: "loss", "deferred", "leg" (the cost of the Guardian), and for each outcome ("worth", name) and, where it
    is not known for every action or the Guardian is missing in some row, ("known", name).
    """
    n = len(log.offsets) - 1
    starts: list[tuple[Indices, Floats]] = []
    parts: list[tuple[Floats, Indices, Floats]] = []
    names = ()
    unknown = {name: bool(log.missing.any() or np.isnan(worth).any()) for name, worth in outcomes.items()}
    for piece in losses.blocks:
        rows = piece.block.all_rows()
        quantities = _quantities(log, piece, rows, guardian_sees, outcomes, leg, unknown)
        names, values = tuple(quantities), np.array(list(quantities.values()))
        starts.append((rows, values[:, 0]))
        change = np.diff(values, axis=1).reshape(len(names), -1)
        parts.append((piece.gaps[1:].ravel(), np.tile(rows, len(piece.gaps) - 1), change))
    start = np.empty((len(names), n))
    for rows, values in starts:
        start[:, rows] = values
    gap, row, change = (np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))
    draws = None if u is None else np.where(gap > 0, u[row], 0.0)  # at gap 0 actions are candidates whatever the draw
    order = position_order(gap, draws)
    return Steps(
        names=names,
        start=start,
        row=row[order],
        gap=gap[order],
        u=None if draws is None else draws[order],
        change=change.take(order, axis=1),
    )


def _quantities(
    log: ScoreArrays,
    piece: BlockLosses,
    rows: Indices,
    guardian_sees: GuardianSees,
    outcomes: Mapping[str, Floats],
    leg: LegCost | None,
    unknown: Mapping[str, bool],
) -> dict[Name, Floats]:
    """Return every quantity, actions x rows, once actions 0 to j are candidates."""
    sees_all = guardian_sees != "candidates"
    size, count = len(piece.gaps), len(rows)
    deferred = np.broadcast_to(np.arange(size)[:, None] > 0, (size, count))
    values: dict[Name, Floats] = {"loss": piece.levels.astype(np.float64), "deferred": deferred.astype(np.float64)}
    if leg is not None:
        shown = [0, *(size if sees_all else m for m in range(2, size + 1))]
        values["leg"] = np.array([leg.of(rows, m, size) if m else np.zeros(count) for m in shown])
    choice = guardian_choices(piece.block.of(log.guardian), piece.order, sees_all=sees_all)
    undecided = deferred & piece.block.per_row(log.missing)
    for name, outcome in outcomes.items():
        worth = in_order(piece.block.of(outcome), choice)
        if unknown[name]:
            known = ~(undecided | np.isnan(worth))
            values["known", name] = known.astype(np.float64)
            worth = np.where(known, worth, 0.0)
        values["worth", name] = worth
    return values


@dataclass(frozen=True, slots=True)
class TrialPart:
    """The thresholds of one calibration for a part of the rows: all, or a group.

    `relaxation` and `stop` have one entry per alpha: the threshold (NaN if every query is deferred), and how many steps of
    the log it takes.
    """

    rows: Bools
    relaxation: Floats
    stop: Indices


@dataclass(frozen=True, slots=True)
class TrialResults:
    """Means over the test rows, per trial.

    `conformal[name]` is trials x alphas; `primary[name]` and `guardian[name]` have one entry per trial: the top
    action alone, and everything in sight. `relaxation` is NaN if none kept the budget.
    """

    relaxation: Floats
    conformal: dict[Name, Floats]
    primary: dict[Name, Floats]
    guardian: dict[Name, Floats]
    fixed: dict[str, Floats]


def run_trials(
    steps: Steps,
    curve: RiskCurve,
    splits: Sequence[Split],
    alphas: Sequence[Number],
    *,
    bound: Fraction,
    limits: Sequence[int] | None = None,
    calibrate: Callable[[Indices, Indices], Sequence[TrialPart]] | None = None,
    fixed: Mapping[str, Floats] | None = None,
) -> TrialResults:
    """Calibrate each split's first part for every alpha, and average all quantities over its second.

    Args:
        curve: the log's risk, under the options of the trials.
        limits: the largest total loss for each alpha, in ticks; by default that of conformal risk control.
        calibrate: another way to find the thresholds from calibration rows, such as one for each group, for test rows.
        fixed: further per-row columns to average over the test rows, such as the cost of the Primary.
    """
    stations = _stations(steps, curve)
    if limits is None:
        limits = [spendable(alpha, bound, len(splits[0][0]), curve.tick_digits) for alpha in alphas]
    relaxation = np.full((len(splits), len(alphas)), np.nan)
    means = np.empty((len(steps.names) + 1, len(splits), len(alphas) + 2))
    names = tuple(fixed or {})
    columns = np.array([(fixed or {})[name] for name in names]).reshape(len(names), curve.n)
    averages, weight = np.empty((len(names), len(splits))), np.empty(len(steps.row))
    for t, (calibration, test) in enumerate(splits):
        parts = (
            [_part(stations, calibration, limits, len(steps.row))]
            if calibrate is None
            else calibrate(calibration, test)
        )
        relaxation[t] = np.fmax.reduce([part.relaxation for part in parts])
        member = _membership(curve.n, test).astype(np.float64)
        means[:, t] = 0.0
        for part in parts:
            counted = member * part.rows
            counted.take(steps.row, out=weight, mode="clip")  # into the same memory each time: fresh memory costs more
            stops = np.concatenate([[0], part.stop, [len(steps.row)]])
            means[:, t] += _sums(steps, counted, weight, stops).T / len(test)
        averages[:, t] = _weighted(columns, member) / len(test)
    named = dict(zip((*steps.names, "candidates"), means, strict=True))
    named["loss"] /= 10.0**curve.tick_digits
    return TrialResults(
        relaxation,
        conformal={name: mean[:, 1:-1] for name, mean in named.items()},
        primary={name: mean[:, 0] for name, mean in named.items()},
        guardian={name: mean[:, -1] for name, mean in named.items()},
        fixed=dict(zip(names, averages, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class _Stations:
    """The breakpoints of a log's walk, for totals over some of its rows.

    Attributes:
        relaxation: of each breakpoint.
        stop: how many steps it takes.
        taken: how many events.
        drop: of each event, in the order of the walk.
        row: of each event.
        remaining: what is left of each row's loss after all events.
        signed: whether a budget is kept up to the first passage only.
    """

    relaxation: Floats
    stop: Indices
    taken: Indices
    drop: Integers
    row: Indices
    remaining: Integers
    signed: bool


def _stations(steps: Steps, curve: RiskCurve) -> _Stations:
    walk, events = curve.walk, curve.events
    return _Stations(
        relaxation=walk.breakpoints,
        stop=steps.taken(walk.breakpoints, walk.draws),
        taken=walk.taken,
        drop=events.drop[walk.order],
        row=events.row[walk.order],
        remaining=np.zeros(curve.n, np.int64) if events.remaining is None else events.remaining,
        signed=curve.signed,
    )


def _part(stations: _Stations, calibration: Indices, limits: Sequence[int], everything: int) -> TrialPart:
    """Return the thresholds that keep limits on the total loss of calibration rows; `everything` is the number of steps."""
    member = _membership(len(stations.remaining), calibration)
    fallen = np.concatenate([[0], np.cumsum(stations.drop * member.take(stations.row))])
    totals = stations.remaining[calibration].sum() + fallen[-1] - fallen[stations.taken]
    first = first_within(np.maximum.accumulate(totals[::-1])[::-1] if stations.signed else totals, limits)
    return TrialPart(
        rows=np.ones(len(member), dtype=np.bool_),
        relaxation=np.append(stations.relaxation, np.nan)[first],
        stop=np.append(stations.stop, everything)[first],
    )


def _sums(steps: Steps, member: Floats, weight: Floats, stops: Indices) -> Floats:
    """Return the sum of every quantity, and of the candidates, after each number of steps: stops x quantities.

    Only rows marked 1 in `member` count, and so only the steps marked 1 in `weight`.
    """
    sums = np.empty((len(stops), len(steps.names) + 1))
    running, candidates, last = _weighted(steps.start, member), member.sum(), 0
    for k in np.argsort(stops, kind="stable").tolist():
        stop = int(stops[k])
        running = running + _weighted(steps.change[:, last:stop], weight[last:stop])
        candidates += weight[last:stop].sum()  # every step adds one candidate
        sums[k, :-1], sums[k, -1], last = running, candidates, stop
    return sums


def _weighted(values: Floats, weight: Floats) -> Floats:
    """Sum over rows by weight; einsum, since the threads of BLAS stall each other on a busy machine."""
    return np.einsum("qr,r->q", values, weight)


def _membership(n: int, rows: Indices) -> Bools:
    member = np.zeros(n, dtype=np.bool_)
    member[rows] = True
    return member
