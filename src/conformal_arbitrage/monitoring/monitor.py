"""Monitor: what a ledger of audited decisions says about its certificate: states, history, age."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import ceil, floor, inf, sqrt
from typing import Literal

import numpy as np

from conformal_arbitrage.calibration.certificate import MarginThreshold
from conformal_arbitrage.calibration.notebook import html_interval, html_table
from conformal_arbitrage.calibration.options import threshold_rank
from conformal_arbitrage.core.exact import Floats, Integers
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.monitoring.evidence import EvidenceProcess, grown, log_evidence
from conformal_arbitrage.monitoring.limits import NO_LOSS, WHOLE_LOSS, Limits, LossSums, limits_of, loss_logs
from conformal_arbitrage.monitoring.lines import LOG_AMBER, LOG_EARLY, Lines

# --- States ---


State = Literal["blind", "no evidence", "within calibration luck", "kept", "amber", "red"]
Cause = Literal["losses", "failing audits"]
SEVERITY: tuple[State, ...] = ("red", "amber", "blind", "no evidence", "within calibration luck", "kept")
"""The states of several ledgers of one policy, the one that matters most first: the policy is in that of the worst."""
FEWEST_KNOWN = 11
"""Fewer known audits than this over a say nothing."""
LONGEST_SESSION = 30
"""More decisions an hour than this are not taken for a session whose decisions are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a ledger shows at one moment.

    Attributes:
        known: audits with a known loss.
        pending: audits whose outcome is not due yet.
        missing: audits whose outcome is overdue.
        collapsed: draws that are no audits because their session had one in the same hour.
        log_evidence: against alpha and against the red line, now; the second is None without a red line.
        log_peak: the largest it has ever been on this ledger.
        within_alpha: whether the upper limit of the running mean is at most alpha.
        within_red: whether it is at most the red line.
    """

    lines: Lines
    audit_rate: float
    known: int
    pending: int
    missing: int
    log_evidence: tuple[float, float | None]
    log_peak: tuple[float, float | None]
    within_alpha: bool
    within_red: bool
    collapsed: int = 0

    @property
    def draws(self) -> int:
        """How many decisions the coin drew."""
        return self.known + self.pending + self.missing + self.collapsed

    @property
    def crossed(self) -> bool:
        """Whether the evidence is enough for red."""
        return _reaches(self.log_peak[1], self.lines.log_red)

    @property
    def above_alpha(self) -> bool:
        """Whether the evidence is enough for amber."""
        return _reaches(self.log_peak[0], LOG_AMBER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is known about a certificate in production.

    Attributes:
        state: the verdict.
        reasons: why it is red, amber or blind, in words; empty otherwise.
        cause: of evidence above a line: losses, or audits that fail (without them the evidence would not do); else None.
        figures: what the verdict rests on.
        mean: mean loss of the audits with a known loss; None if there is none.
        limits: of the running mean over all audits, each side failing ever with probability 0.025: an unknown loss
            counts 0 in the lower limit (-1 if gains count) and 1 in the upper one.
        known_limits: of the known ones alone; None if an outcome is overdue. Outcomes that take long to become known
            are under-represented in it.
    """

    state: State
    reasons: tuple[str, ...]
    cause: Cause | None
    figures: Figures
    mean: float | None
    limits: Limits
    known_limits: Limits | None

    def _repr_html_(self) -> str:
        figures, lines = self.figures, self.figures.lines
        facts = [("state", self.state), *(("why", reason) for reason in self.reasons)]
        facts += [("audits", f"{figures.known} known, {figures.pending} pending, {figures.missing} missing")]
        facts += [("mean loss", "unknown" if self.mean is None else f"{self.mean:.4g}")]
        marks = [("alpha", lines.alpha), *([] if lines.red is None else [("red", lines.red)])]
        return html_table(facts) + html_interval(
            "limits of the loss of audited decisions", self.limits, self.mean, marks
        )


def judge(
    figures: Figures,
    *,
    cause: Cause | None = None,
    alarmed: bool = False,
    guardian_fails: bool = False,
    stale: str | None = None,
) -> tuple[State, tuple[str, ...]]:
    """Return the state that figures imply, and why.

    Args:
        figures: what the ledger shows.
        cause: why evidence is above a line, if it is.
        alarmed: an alarm was raised on this ledger: it stands, whatever late outcomes say.
        guardian_fails: the figure "as served" is above alpha.
        stale: why the evidence is old, in words.
    """
    if alarmed or figures.crossed:
        return "red", (_red_reason(cause),)
    amber = _amber_reasons(figures, cause, guardian_fails, stale)
    if amber:
        return "amber", amber
    blind = _blind_reasons(figures)
    if blind:
        return "blind", blind
    if figures.within_alpha:
        return "kept", ()
    return ("within calibration luck" if figures.within_red else "no evidence"), ()


def _red_reason(cause: Cause | None) -> str:
    if cause == "failing audits":
        return "audits fail: counted as losses, they put the loss above the red line"
    return "the loss is above the red line"


def _amber_reasons(figures: Figures, cause: Cause | None, guardian_fails: bool, stale: str | None) -> tuple[str, ...]:
    audits = figures.draws - figures.collapsed
    allowed = figures.lines.alpha / 2
    failing = cause == "failing audits"
    reasons = {
        "audits fail: counted as losses, they put the long-run loss above alpha": figures.above_alpha and failing,
        "the long-run loss of this certificate is above alpha": figures.above_alpha and not failing,
        "the loss may be above the red line": _reaches(figures.log_evidence[1], LOG_EARLY),
        f"more than {100 * allowed:.3g} % of the audits have no outcome": figures.missing > allowed * audits,
        "the Guardian fails: the loss of delivered answers is above alpha": guardian_fails,
        f"{figures.collapsed} of {figures.draws} draws fell into sessions that had an audit within the hour, more than "
        f"sessions of {LONGEST_SESSION} decisions an hour explain: their losses are not seen": is_collapsing(
            audits, figures.draws, figures.audit_rate
        ),
    }
    return (*(text for text, holds in reasons.items() if holds), *([] if stale is None else [stale]))


def _blind_reasons(figures: Figures) -> tuple[str, ...]:
    needed = ceil(FEWEST_KNOWN / figures.lines.alpha)
    others = f"; {figures.collapsed} more draws fell into sessions that had an audit" if figures.collapsed else ""
    unknown = figures.pending + figures.missing
    reasons = {
        "no decision is audited: the audit rate is 0": figures.audit_rate <= 0,
        f"too few audits: {figures.known} of the {needed} needed are known{others}": figures.known < needed,
        "more than half of the audits have no outcome yet": unknown > figures.known,
    }
    return tuple(text for text, holds in reasons.items() if holds)


def is_collapsing(audits: int, draws: int, rate: float) -> bool:
    """Tell whether more draws share an audit than sessions of at most `LONGEST_SESSION` decisions an hour explain.

    The coin draws r m of the m decisions of a session and hour, and one is audited with probability 1 - (1 - r)^m. The
    ratio of the two grows with m, so whatever the mix of sessions of at most M, E[draws] <= c E[audits] with
    c = r M / (1 - (1 - r)^M). What chance adds is allowed for by four standard deviations at sessions of M.

    Args:
        audits: rows of the ledger.
        draws: the same, and those without a row of their own.
        rate: of the coin.
    """
    if draws <= audits or rate <= 0:
        return False
    drawn, none = rate * LONGEST_SESSION, (1 - rate) ** LONGEST_SESSION
    per_audit = drawn / (1 - none)
    variance = drawn * (1 - rate) + per_audit**2 * none * (1 - none) - 2 * per_audit * drawn * none
    return draws - per_audit * audits > 4 * sqrt(max(variance, 0.0) * draws / drawn)


def _reaches(log_evidence: float | None, enough: float) -> bool:
    return log_evidence is not None and log_evidence >= enough


# --- How a ledger came to stand where it stands ---


_POINTS = 240
_SLAB = 1 << 10
"""Rows at a time: each has a logarithm for every bet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerHistory:
    """What a ledger showed after some of its audits; all arrays have one entry for each of these.

    Attributes:
        audits: how many there were.
        mean: of the known losses; NaN before the first.
        lower: the lower limit, with every unknown loss at its smallest.
        upper: the upper limit, with every unknown loss at its largest.
        evidence: log E against the red line, or against alpha if there is none; pending outcomes at their smallest.
    """

    lines: Lines
    audits: Integers
    mean: Floats
    lower: Floats
    upper: Floats
    evidence: Floats


class LedgerCourse:
    """Mean and limits along a ledger, taken part by part, so that no part needs to be kept.

    Args:
        rows: how many rows there will be.
        points: at most this many, evenly spaced; the last one is the last row.

    Attributes:
        audits: after how many rows there is a point.
    """

    def __init__(self, lines: Lines, rows: int, *, points: int = _POINTS) -> None:
        spaced = np.linspace(1, rows, min(points, rows)).round().astype(np.int64)
        self.audits: Integers = spaced[np.diff(spaced, prepend=0) > 0]
        self._lines = lines
        self._rows = 0
        self._known, self._sum = 0, 0.0
        self._best, self._worst = (np.zeros(len(NO_LOSS.logs), dtype=np.int64) for _ in range(2))
        self._means: list[Floats] = []
        self._bests: list[Integers] = []
        self._worsts: list[Integers] = []

    def take(self, losses: Floats) -> Integers:
        """Take the losses of the next rows, NaN while unknown; return at which of them there is a point."""
        if not len(losses):
            return np.zeros(0, dtype=np.int64)
        return np.concatenate([low + self._take(losses[low : low + _SLAB]) for low in range(0, len(losses), _SLAB)])

    def _take(self, losses: Floats) -> Integers:
        first, last = np.searchsorted(self.audits, [self._rows, self._rows + len(losses)], side="right")
        places = self.audits[first:last] - self._rows - 1
        shares, known = _shares(self._lines, losses), ~np.isnan(losses)
        best, worst = np.where(known, shares, 0.0), np.where(known, shares, 1.0)
        counts, sums = self._known + np.cumsum(known), np.cumsum(np.concatenate([[self._sum], best]))[1:]
        with np.errstate(invalid="ignore"):
            self._means.append(sums[places] / counts[places])
        for logs, ends, total in (
            (loss_logs(best), self._bests, self._best), (loss_logs(worst), self._worsts, self._worst)
        ):  # fmt: skip
            running = np.cumsum(logs, axis=0, out=logs)
            ends.append(running[places] + total)
            total += running[-1]
        self._known, self._sum, self._rows = int(counts[-1]), float(sums[-1]), self._rows + len(losses)
        return places

    def figures(self) -> tuple[Integers, Floats, Floats, Floats]:
        """Return the points that were reached: after how many audits, the mean, and the lower and upper limit."""
        audits = self.audits[: np.searchsorted(self.audits, self._rows, side="right")]
        if not len(audits):
            return audits, np.zeros(0), np.zeros(0), np.zeros(0)
        mean = np.concatenate(self._means)
        lower = limits_of(np.concatenate(self._bests), audits)[0]
        upper = limits_of(np.concatenate(self._worsts), audits)[1]
        if self._lines.signed:
            mean, lower, upper = 2 * mean - 1, 2 * lower - 1, 2 * upper - 1
        return audits, mean, lower, upper


def ledger_history(
    lines: Lines, losses: Floats, missing: Floats | None = None, *, points: int = _POINTS
) -> LedgerHistory:
    """Return the history of a ledger, as its outcomes are known now.

    Args:
        losses: one per row in order of seq, as shares of the loss bound; NaN while unknown.
        missing: which unknown losses are overdue, as 0 and 1; these count whole in the evidence.
        points: at most this many, evenly spaced; the last one is the last row.
    """
    course = LedgerCourse(lines, len(losses), points=points)
    course.take(losses)
    audits, mean, lower, upper = course.figures()
    known = ~np.isnan(losses)
    counted = np.where(known, _shares(lines, losses), 0.0 if missing is None else missing)
    return LedgerHistory(
        lines=lines, audits=audits, mean=mean, lower=lower, upper=upper, evidence=_evidence(lines, counted, audits)
    )


def _shares(lines: Lines, losses: Floats) -> Floats:
    return np.clip((losses + 1) / 2 if lines.signed else losses, 0.0, 1.0)


def _evidence(lines: Lines, shares: Floats, audits: Integers) -> Floats:
    """Return the log evidence after the whole blocks so far."""
    whole = len(shares) // lines.block
    if not whole:
        return np.zeros(len(audits))
    means = shares[: whole * lines.block].reshape(whole, lines.block).mean(axis=1)
    logs = np.concatenate([[0.0], log_evidence(means, lines.levels[-1])])
    return logs[audits // lines.block]


# --- Monitor ---


_ONE = 10**12
"""A loss of the whole bound, in ticks; of net losses, ticks count from the largest gain on."""
_NOISE = 1e-9
_NOT_A_LOSS = "a loss is a number from {least:g} to 1, or None while it is unknown; got {loss!r}"
_ABSENT, _PENDING, _MISSING = -3, -2, -1
_FEW_VALUES = 4096


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One audited decision.

    Attributes:
        seq: its place in the ledger, from 1: the order in which the coin drew, which nothing later changes.
        due: the time after which an unknown outcome is missing.
        loss: as a share of the loss bound, in [0, 1], or in [-1, 1] if gains count; None while it is unknown.
    """

    seq: int
    due: float
    loss: float | None = None


class Monitor:
    """Watches one ledger: one policy version with one set of models (and one group).

    Attributes:
        collapsed: draws that are no audits because their session had one in the same hour.
    """

    def __init__(self, lines: Lines, *, audit_rate: float = 1.0) -> None:
        self.lines = lines
        self.audit_rate = audit_rate
        self.collapsed = 0
        self._process = EvidenceProcess(lines.levels)
        self._cells = np.full(0, _ABSENT, dtype=np.int64)  # ticks of a known loss, or why there are none
        self._totals = np.zeros(0, dtype=np.int64)  # of each block, pending as 0 and missing as 1, in ticks
        self._due: list[tuple[float, int]] = []
        self._now = -inf
        self._rows = self._contiguous = self._pending = self._missing = self._loss = 0
        self._changed = 0  # the first block whose total the evidence does not know
        self._sums = LossSums()
        self._sums_of = {0: NO_LOSS, _ONE: WHOLE_LOSS}

    @classmethod
    def from_ledger(
        cls, lines: Lines, losses: Floats, due: Floats | None = None, *, audit_rate: float = 1.0
    ) -> "Monitor":
        """Recompute everything from a whole ledger.

        Args:
            losses: one per row in order of seq, as shares of the loss bound; NaN while unknown.
            due: when each outcome is due; needed if one is unknown.
        """
        monitor = cls(lines, audit_rate=audit_rate)
        monitor._load(losses, np.full(len(losses), -inf) if due is None else due)
        return monitor

    def observe(self, rows: Iterable[LedgerRow]) -> None:
        """Take rows that are new, or whose outcome has become known; to see a row again changes nothing."""
        for row in rows:
            if row.seq < 1:
                raise OptionError(f"a ledger's rows are numbered from 1; got {row.seq}")
            self._reserve(row.seq)
            place = row.seq - 1
            if self._cells[place] == _ABSENT:
                self._rows += 1
                self._pending += 1
                self._cells[place] = _PENDING
            if row.loss is None and self._cells[place] == _PENDING:  # it may be due earlier than it was
                heappush(self._due, (row.due, place))
            if row.loss is not None:
                self._settle(place, _ticks(row.loss, self.lines))

    def red(self, now: float) -> bool:
        """Tell whether the evidence calls for safe mode; cheap enough to ask after every audit."""
        self._catch_up(now)
        return self.lines.red is not None and bool(self._process.peak()[1] >= self.lines.log_red)

    def standing(
        self, now: float, *, alarmed: Cause | None = None, guardian_fails: bool = False, stale: str | None = None
    ) -> Standing:
        """Return what is known at a time.

        Args:
            now: the clock, in the unit of the due dates; one that goes back is taken to stand still.
            alarmed: the cause of an alarm that was raised on this ledger: it stands, whatever late outcomes say.
            guardian_fails: the figure "as served" is above alpha; see `served_loss`.
            stale: why the evidence is old, in words; see `freshness`.
        """
        self._catch_up(now)
        figures = self._figures()
        cause = alarmed or self._cause(figures)
        state, reasons = judge(
            figures, cause=cause, alarmed=alarmed is not None, guardian_fails=guardian_fails, stale=stale
        )
        return Standing(
            state=state,
            reasons=reasons,
            cause=cause,
            figures=figures,
            mean=self.lines.as_loss(self._loss / _ONE / figures.known) if figures.known else None,
            limits=self._as_losses((self._padded(NO_LOSS).limits()[0], self._padded(WHOLE_LOSS).limits()[1])),
            known_limits=None if figures.missing else self._as_losses(self._sums.limits()),
        )

    def _as_losses(self, limits: Limits) -> Limits:
        return self.lines.as_loss(limits[0]), self.lines.as_loss(limits[1])

    def _load(self, losses: Floats, due: Floats) -> None:
        known = ~np.isnan(losses)
        self._reserve(len(losses))
        outside = losses[known][(losses[known] < self.lines.least - _NOISE) | (losses[known] > 1 + _NOISE)]
        if outside.size:
            raise OptionError(_NOT_A_LOSS.format(least=self.lines.least, loss=outside[0]))
        shares = (losses + 1) / 2 if self.lines.signed else losses
        ticks = np.rint(np.clip(shares, 0.0, 1.0) * _ONE)
        self._cells[: len(losses)] = np.where(known, ticks, _PENDING).astype(np.int64)
        self._rows, self._pending = len(losses), int((~known).sum())
        self._due = list(zip(due[~known].tolist(), np.flatnonzero(~known).tolist(), strict=True))
        heapify(self._due)
        self._totals = _block_totals(np.maximum(self._cells, 0), self.lines.block)
        self._loss = int(self._totals.sum())
        self._sums = LossSums.of(self._cells[: len(losses)][known] / _ONE)
        self._contiguous = len(losses)

    def _settle(self, place: int, ticks: int) -> None:
        """Set the outcome of a row: its loss, or that it is missing."""
        before = int(self._cells[place])
        if before == ticks:
            return
        self._cells[place] = ticks
        self._pending -= before == _PENDING
        self._missing += (ticks == _MISSING) - (before == _MISSING)
        self._add_known(ticks, 1)
        self._add_known(before, -1)
        rise = _counted(ticks) - _counted(before)
        if rise:
            block = place // self.lines.block
            self._totals[block] += rise
            self._changed = min(self._changed, block)

    def _add_known(self, ticks: int, count: int) -> None:
        """Add a known loss to the sums, or take it out again."""
        if ticks < 0:
            return
        self._loss += count * ticks
        self._sums = self._sums.plus(self._log_sums(ticks), count)

    def _log_sums(self, ticks: int) -> LossSums:
        sums = self._sums_of.get(ticks)
        if sums is None:
            sums = LossSums.of(np.array([ticks / _ONE]))
            if len(self._sums_of) < _FEW_VALUES:
                self._sums_of[ticks] = sums
        return sums

    def _catch_up(self, now: float) -> None:
        """Mark overdue outcomes as missing, and bring the evidence up to the last whole block."""
        self._now = max(self._now, now)
        while self._due and self._due[0][0] <= self._now:
            _, place = heappop(self._due)
            if self._cells[place] == _PENDING:
                self._settle(place, _MISSING)
        while self._contiguous < self._rows and self._cells[self._contiguous] != _ABSENT:
            self._contiguous += 1
        whole = self._contiguous // self.lines.block
        if min(self._changed, self._process.blocks) < whole:
            first = self._process.resume(min(self._changed, self._process.blocks))
            self._process.update(first, self._totals[first:whole] / (self.lines.block * _ONE))
        self._changed = whole

    def _figures(self) -> Figures:
        last, peak, red = self._process.last().tolist(), self._process.peak().tolist(), self.lines.red
        worst = self._padded(WHOLE_LOSS)
        return Figures(
            lines=self.lines,
            audit_rate=self.audit_rate,
            known=self._rows - self._pending - self._missing,
            pending=self._pending,
            missing=self._missing,
            collapsed=self.collapsed,
            log_evidence=(last[0], None if red is None else last[1]),
            log_peak=(peak[0], None if red is None else peak[1]),
            within_alpha=worst.below(self.lines.levels[0]),
            within_red=red is not None and worst.below(self.lines.levels[1]),
        )

    def _padded(self, unknown: LossSums) -> LossSums:
        """Return the sums over all rows, with this for each unknown loss."""
        return self._sums.plus(unknown, self._pending + self._missing)

    def _cause(self, figures: Figures) -> Cause | None:
        """Return why the evidence is above a line: losses, if it still were with every missing outcome at its best."""
        if not (figures.crossed or figures.above_alpha):
            return None
        if not figures.missing:
            return "losses"
        means = _block_totals(np.maximum(self._cells, 0), self.lines.block) / (self.lines.block * _ONE)
        process = EvidenceProcess(self.lines.levels)
        process.update(0, means[: self._process.blocks])
        line, enough = (1, self.lines.log_red) if figures.crossed else (0, LOG_AMBER)
        return "losses" if process.peak()[line] >= enough else "failing audits"

    def _reserve(self, rows: int) -> None:
        """Make room for this many rows, doubling it so that growth costs little in the long run."""
        if rows > len(self._cells):
            blocks = -(-max(rows, 2 * len(self._cells)) // self.lines.block)
            known = len(self._cells)
            self._cells, self._totals = grown(self._cells, blocks * self.lines.block), grown(self._totals, blocks)
            self._cells[known:] = _ABSENT


def _ticks(loss: float, lines: Lines) -> int:
    """Return a loss in ticks; one that rounding has put outside its range is clipped, any other outside is refused."""
    if not lines.least - _NOISE <= loss <= 1 + _NOISE:
        raise OptionError(_NOT_A_LOSS.format(least=lines.least, loss=loss))
    return round(min(max(lines.as_share(loss), 0.0), 1.0) * _ONE)


def _counted(cell: int) -> int:
    """Return what an outcome counts in the evidence: pending as the smallest loss, missing as the largest."""
    return _ONE if cell == _MISSING else max(cell, 0)


def _block_totals(ticks: Integers, block: int) -> Integers:
    """Return the total of each block; the rows fill whole blocks."""
    return ticks.reshape(-1, block).sum(axis=1)


# --- Guard ---


STEP = 0.02
"""How far one loss moves the guarded share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The guard of one certificate: a threshold that audited losses raise above the certificate's, and never lower below it.

    With rho the share of calibration margins that defer, every known audit sets

        rho = max(base, rho + step (x - a)),

    base being the certificate's share and x the loss. Since rho >= base and the loss falls with the relaxation, the
    certificate's promise stays. And for any sequence whatever, the sum of (x - a) over known audits is at most
    (1 - base + step) / step plus the largest number of outcomes that were ever pending at once: from rho = 1 on everything
    is in sight, so only decisions made before can lose. A cap on rho would break that as soon as outcomes are late.

    Updates are applied in the order in which outcomes became known, which the ledger keeps.

    Attributes:
        alpha: the risk budget, as a share of the loss bound.
        base: the share of calibration margins that the certificate defers.
        step: how far one loss moves the share.
    """

    alpha: float
    base: float
    step: float = STEP

    def next_level(self, level: int, loss: float) -> int:
        """Return how far, in ticks of the loss, the share stands above its base after one more known audit."""
        rise = round(min(max(loss, 0.0), 1.0) * _ONE) - floor(self.alpha * _ONE)
        return max(level + rise, 0)

    def share(self, level: int) -> float:
        """Return rho at a level."""
        return self.base + self.step * (level / _ONE)

    def shares(self, losses: Floats) -> Floats:
        """Return rho after each known audit.

        Args:
            losses: as shares of the loss bound, in the order in which they became known.
        """
        rises = np.rint(np.clip(losses, 0.0, 1.0) * _ONE).astype(np.int64) - floor(self.alpha * _ONE)
        level = np.cumsum(rises)  # whole ticks: the same numbers whether computed at once or one by one
        reflected = level - np.minimum(np.minimum.accumulate(level), 0)
        return self.base + self.step * (reflected / _ONE)

    def excess_bound(self, most_pending: int) -> float:
        """Return the most that the sum of (x - a) over known audits can ever be."""
        return (1 - self.base + self.step) / self.step + most_pending


def guarded_threshold(
    rho: float, certified: MarginThreshold, quantiles: Sequence[MarginThreshold | None]
) -> MarginThreshold | None:
    """Return the threshold in force: the certified one or, if larger, the quantile of rho; None for everything in sight."""
    if rho >= 1:
        return None
    quantile = quantiles[ceil(rho * (len(quantiles) - 1))]
    return None if quantile is None else max(quantile, certified, key=lambda threshold: threshold_rank(*threshold))
