"""Simulation: a score log replayed as production traffic, with a Primary that becomes worse at a chosen moment."""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, Unpack

import numpy as np

from conformal_arbitrage.calibration.calibrate import certify
from conformal_arbitrage.calibration.certificate import Certificate, Decisions
from conformal_arbitrage.calibration.notebook import html_bars, html_paragraph, html_table
from conformal_arbitrage.calibration.options import (
    CalibrationKeywords,
    CalibrationOptions,
    check_keywords,
    refuse_combination,
)
from conformal_arbitrage.calibration.planning import COMFORT, rows_needed
from conformal_arbitrage.core.exact import Bools, Floats, Indices, n_rows
from conformal_arbitrage.core.risk import Number
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.monitoring.lines import AlarmLine, Lines, certificate_lines
from conformal_arbitrage.monitoring.monitor import LedgerHistory, LedgerRow, Monitor, ledger_history
from conformal_arbitrage.monitoring.outcomes import AuditedDecision, Verdict, decision_loss
from conformal_arbitrage.scorelog.fitness import refuse_floor, refuse_unfit
from conformal_arbitrage.scorelog.log import CostOptions, Costs, ScoreLog, costs_of
from conformal_arbitrage.scorelog.tables import strings

# --- What a simulation shows to people ---


HEADER = ["", "decisions", "loss", "excess losses", "Guardian share", "audit calls", "cost"]
CAVEAT = (
    "One run with one seed. The traffic is drawn from rows that were not used for calibration: their own mean "
    "differs from alpha by chance, as a certificate's does."
)
_PARTS = {"before": "before the change", "after": "after it", "all": "in all"}


def simulation_facts(simulation: "Simulation") -> list[tuple[str, str]]:
    """Return the certificate and what happened, as name and value pairs."""
    certificate, lines = simulation.certificate, simulation.lines
    red = "cannot fire" if lines.red is None else f"stands at {lines.red * certificate.loss_bound:.4g}"
    promise = (
        "on average over calibrations"
        if certificate.confidence is None
        else f"with confidence {certificate.confidence:g}"
    )
    first = ("certificate", f"alpha {certificate.alpha:g} from {n_rows(certificate.n)}, {promise}; red {red}")
    happened = [(f"at decision {moment.at:,}", _words(moment, simulation)) for moment in simulation.moments]
    quiet = happened and not any(moment.kind == "red" for moment in simulation.moments)
    return [first, *happened, *([(happened[-1][0], "no alarm until the end")] if quiet else [])]


def simulation_rows(simulation: "Simulation") -> list[list[str]]:
    """Return the rows of the table under `HEADER`."""
    return [
        [f"{way} monitor, {_PARTS[part]}", *_figures(span)]
        for way, parts in simulation.outcomes.items()
        for part, span in parts.items()
    ]


def simulation_html(simulation: "Simulation") -> str:
    """Return facts, table and a figure for notebooks."""
    alpha = simulation.certificate.alpha
    losses = [(f"{way} monitor", parts["after"].loss) for way, parts in simulation.outcomes.items()]
    longest = max((alpha, *(loss for _, loss in losses))) or 1.0
    bars = [(name, loss / longest, f"{loss:.4f}") for name, loss in (*losses, ("alpha", alpha))]
    return (
        html_table(simulation_facts(simulation))
        + html_table(simulation_rows(simulation), header=HEADER)
        + html_bars("loss after the change", bars)
        + html_paragraph(CAVEAT)
    )


def _words(moment: "Moment", simulation: "Simulation") -> str:
    start = simulation.scenario.changes_at
    if moment.kind == "change":
        return f"the Primary's loss grows {simulation.scenario.shift:g}-fold, at the same margins"
    if moment.kind == "red":
        late = "a false alarm" if moment.at <= start else f"{moment.at - start:,} decisions after the change"
        return f"red after {moment.audits:,} audits, {late}: every query is deferred from now on"
    return f"a new certificate from {moment.text}"


def _figures(span: "SpanFigures") -> list[str]:
    return [
        f"{span.decisions:,}",
        f"{span.loss:.4f}",
        f"{span.excess:,.0f}",
        f"{100 * span.guardian_share:.1f} %",
        f"{span.audit_calls:,}",
        "unknown" if span.cost is None else f"${span.cost:,.2f}",
    ]


# --- Simulation ---


_FEWEST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated.

    Attributes:
        shift: the factor by which the Primary's loss grows; 1 for no change.
        shift_at: when, as a share of the decisions.
        audit_rate: the share of decisions that the coin draws.
        calibration_rows: rows to calibrate on; by default half of the log.
        renewal_rows: rows after an alarm that make a new certificate; by default ten times what alpha needs, 0 for none.
        alarm_line: as in `certificate_lines`.
    """

    decisions: int = 100_000
    shift: float = 3.0
    shift_at: float = 0.5
    audit_rate: float = 0.05
    calibration_rows: int | None = None
    renewal_rows: int | None = None
    alarm_line: AlarmLine = "luck"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        if self.decisions < _FEWEST:
            raise OptionError(f"decisions must be {_FEWEST} or more; got {self.decisions}")
        if not 1 <= self.shift < inf:
            raise OptionError(f"shift must be 1 or more, the factor by which the loss grows; got {self.shift:g}")
        if not 0 <= self.shift_at < 1:
            raise OptionError(f"shift_at must lie in [0, 1), a share of the decisions; got {self.shift_at:g}")
        if not 0 < self.audit_rate <= 1:
            raise OptionError(f"audit_rate must lie above 0 and be at most 1; got {self.audit_rate:g}")
        if self.seed < 0:
            raise OptionError(f"seed must be 0 or more; got {self.seed}")

    @property
    def changes_at(self) -> int:
        """The decision from which on the Primary is worse."""
        return round(self.shift_at * self.decisions)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanFigures:
    """What happened to a run of decisions.

    Attributes:
        guardian_share: the share that the Guardian decided.
        excess: the total loss above alpha times the decisions; 0 if it is not above.
        audit_calls: calls of the Guardian for audits alone.
        cost: dollars, audits included; None if costs are unknown.
    """

    decisions: int
    loss: float
    guardian_share: float
    excess: float
    audit_calls: int
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened at a decision.

    Attributes:
        kind: the Primary became worse, an alarm was raised, or a new certificate was installed.
        at: the number of decisions before it.
        audits: of an alarm, the audits on its ledger.
    """

    kind: Literal["change", "red", "renewal"]
    at: int
    audits: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The ledger of one certificate: the decisions that were audited, and its history."""

    certificate: Certificate
    drawn: Indices
    history: LedgerHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The decisions of one way of running the policy, in order; losses are shares of the bound.

    `watched` has the ledgers, and is empty without a monitor.
    """

    losses: Floats
    deferred: Bools
    watched: tuple[Watched, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What would have happened, with the monitor and without it, on the same traffic.

    Attributes:
        lines: what its ledger was watched against.
        outcomes: "with" and "without" the monitor -> "before" the change, "after" it, and "all".
        always: dollars of always asking the Guardian; None if costs are unknown.
        courses: the decisions behind it, for a figure.
    """

    scenario: Scenario
    certificate: Certificate
    lines: Lines
    moments: tuple[Moment, ...]
    outcomes: dict[str, dict[str, SpanFigures]]
    always: float | None
    courses: dict[str, Course] = field(repr=False)

    @property
    def delay(self) -> int | None:
        """Decisions from the change to the first alarm after it; None if there was none."""
        start = self.scenario.changes_at
        return next((moment.at - start for moment in self.moments if moment.kind == "red" and moment.at > start), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the results as a JSON document."""
        from dataclasses import asdict

        return {
            "scenario": asdict(self.scenario),
            "alpha": self.certificate.alpha,
            "calibration_rows": self.certificate.n,
            "confidence": self.certificate.confidence,
            "lines": asdict(self.lines),
            "moments": [asdict(moment) for moment in self.moments],
            "delay": self.delay,
            "outcomes": {
                way: {part: asdict(span) for part, span in parts.items()} for way, parts in self.outcomes.items()
            },
            "always_guardian_cost": self.always,
        }

    def _repr_html_(self) -> str:

        return simulation_html(self)


def simulate(
    log: ScoreLog,
    alpha: Number,
    *,
    scenario: Scenario | None = None,
    costs: CostOptions | None = None,
    **keywords: Unpack[CalibrationKeywords],
) -> Simulation:
    """Replay a log as traffic through a certificate, with a monitor and without one.

    Args:
        log: the recorded scores; every Guardian score must be known.
        alpha: the risk budget.
        scenario: what to simulate.
        costs: of the models; without them the log's cost columns are used.
        **keywords: how to calibrate, as for `calibrate`; by groups, by clusters, with gains or with a loss of one's own
            is not simulated.
    """
    check_keywords("simulate", keywords, CalibrationKeywords)
    chosen, plan = CalibrationOptions(**{k: v for k, v in keywords.items() if v is not None}), scenario or Scenario()  # pyright: ignore[reportArgumentType]
    _refuse(log, chosen)
    rng = np.random.default_rng(plan.seed)
    order = rng.permutation(len(log))
    n = len(log) // 2 if plan.calibration_rows is None else plan.calibration_rows
    if not 0 < n < len(log):
        leave = n_rows(n, "to calibrate on leaves", "to calibrate on leave")
        raise OptionError(f"{leave} no traffic of {len(log)}; give fewer, with calibration_rows=")
    options = chosen.settled(log, lambda: rng.bytes(32))
    certificate = certify(log.select(np.sort(order[:n])), alpha, options)
    lines = certificate_lines(certificate, alarm_line=plan.alarm_line)
    traffic = _Traffic.draw(log.select(np.sort(order[n:])), certificate, plan, rng)
    without = traffic.course(certificate)
    watched, moments = traffic.watch(certificate, alpha, options)
    dollars = costs_of(traffic.population, costs)
    courses = {"with": watched, "without": without}
    return Simulation(
        scenario=plan,
        certificate=certificate,
        lines=lines,
        moments=moments,
        outcomes={way: traffic.outcomes(course, dollars) for way, course in courses.items()},
        always=None if dollars is None else float(dollars.guardian.full()[traffic.rows].sum()),
        courses=courses,
    )


def _refuse(log: ScoreLog, options: CalibrationOptions) -> None:
    refuse_unfit(log.source, log.extra)
    refuse_floor(log)
    if log.missing.any():
        raise OptionError(
            f"{log.source}: {n_rows(int(log.missing.sum()), 'has', 'have')} no Guardian score, so that the loss is unknown; "
            "ask the Guardian again, or leave these rows out of a simulation"
        )
    refuse_combination("simulation", *options.kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    """The decisions to come: rows of a population whose second half has a worse Primary, and what the coin draws."""

    population: ScoreLog
    rows: Indices
    drawn: Bools
    plan: Scenario
    alpha: float
    bound: float
    known: dict[tuple[int, tuple[int, ...]], float] = field(default_factory=dict[tuple[int, tuple[int, ...]], float])

    @classmethod
    def draw(cls, pool: ScoreLog, certificate: Certificate, plan: Scenario, rng: np.random.Generator) -> "_Traffic":
        """Draw the traffic; over the whole pool, the loss of the worse Primary is larger by exactly the factor asked for."""
        size, both = len(pool), _with_worse(pool)
        everything = cls(
            population=both,
            rows=np.arange(2 * size),
            drawn=np.ones(2 * size, dtype=np.bool_),
            plan=plan,
            alpha=certificate.alpha,
            bound=certificate.loss_bound,
        )
        losses = everything.course(certificate).losses
        share = _worse_share(float(losses[:size].mean()), float(losses[size:].mean()), plan.shift)
        rows = rng.integers(0, size, plan.decisions)
        worse = rng.random(plan.decisions) < share
        worse[: plan.changes_at] = False
        return replace(everything, rows=rows + size * worse, drawn=rng.random(plan.decisions) < plan.audit_rate)

    def log(self, first: int, stop: int | None = None) -> ScoreLog:
        """Return some decisions as a score log, each with an id of its own."""
        rows = self.rows[first:stop]
        ids = strings([f"decision {first + k}" for k in range(len(rows))])
        return replace(self.population.select(rows), id=ids)

    def course(self, certificate: Certificate, first: int = 0) -> Course:
        """Return what a certificate does with all decisions from one on."""
        decisions = certificate.apply(self.log(first))
        return Course(losses=self._losses(certificate, decisions, first), deferred=decisions.deferred)

    def watch(
        self, certificate: Certificate, alpha: Number, options: CalibrationOptions
    ) -> tuple[Course, tuple[Moment, ...]]:
        """Return what happens under the monitor: safe mode from red on, then a certificate from the rows since."""
        losses, deferred = np.zeros(len(self.rows)), np.ones(len(self.rows), dtype=np.bool_)
        moments = [Moment(kind="change", at=self.plan.changes_at)] if self.plan.shift > 1 else []
        needed = COMFORT * rows_needed(alpha, certificate.loss_bound)
        wanted = needed if self.plan.renewal_rows is None else self.plan.renewal_rows
        watched: list[Watched] = []
        first = 0
        while True:
            course = self.course(certificate, first)
            red, ledger = self._ledger(certificate, course, first)
            watched.append(ledger)
            stop = len(self.rows) if red is None else red.at
            losses[first:stop] = course.losses[: stop - first]
            deferred[first:stop] = course.deferred[: stop - first]
            if red is None:
                break
            moments.append(red)
            first = red.at + wanted
            if not wanted or first >= len(self.rows):
                break
            certificate = certify(self.log(red.at, first), alpha, options)
            moments.append(Moment(kind="renewal", at=first, text=f"{n_rows(wanted)} since the alarm"))
            if certificate.status == "always_defer":
                break
        moments.sort(key=lambda moment: moment.at)
        return Course(losses=losses, deferred=deferred, watched=tuple(watched)), tuple(moments)

    def outcomes(self, course: Course, costs: Costs | None) -> dict[str, SpanFigures]:
        """Return what happened before the change, after it, and in all."""
        middle, end = self.plan.changes_at, len(self.rows)
        spans = {"before": (0, middle), "after": (middle, end), "all": (0, end)}
        return {name: self._outcome(course, costs, low, high) for name, (low, high) in spans.items() if low < high}

    def _outcome(self, course: Course, costs: Costs | None, low: int, high: int) -> SpanFigures:
        part, rows = slice(low, high), self.rows[low:high]
        losses, deferred = course.losses[part], course.deferred[part]
        audited = self.drawn[part] & ~deferred if course.watched else np.zeros(high - low, dtype=np.bool_)
        cost = None
        if costs is not None:
            guardian = costs.guardian.full()[rows]
            cost = float(costs.primary[rows].sum() + guardian[deferred].sum() + guardian[audited].sum())
        return SpanFigures(
            decisions=high - low,
            loss=float(losses.mean()) * self.bound,
            guardian_share=float(deferred.mean()),
            excess=max(float(losses.sum()) * self.bound - self.alpha * (high - low), 0.0),
            audit_calls=int(audited.sum()),
            cost=cost,
        )

    def _losses(self, certificate: Certificate, decisions: Decisions, first: int) -> Floats:
        """Return the loss of every decision, as the gateway would compute it from an audit."""
        sees_all = certificate.guardian_sees != "candidates"
        losses = np.zeros(len(decisions))
        counted = np.flatnonzero(~decisions.deferred) if sees_all else np.arange(len(decisions))
        for place in counted.tolist():
            row = int(self.rows[first + place])
            deferred = bool(decisions.deferred[place])
            sight = decisions[place].candidates if deferred else (int(decisions.action[place]),)
            if (row, sight) not in self.known:
                self.known[row, sight] = self._loss(certificate, row, sight, deferred=deferred)
            losses[place] = self.known[row, sight]
        return losses

    def _loss(self, certificate: Certificate, row: int, sight: tuple[int, ...], *, deferred: bool) -> float:
        log, query = self.population, self.population.row(row)
        decision = AuditedDecision(
            decided_by="guardian" if deferred else "primary",
            guardian_sees=certificate.guardian_sees,
            size=int(log.sizes[row]),
            candidates=sight,
            action=None if deferred else sight[0],
            binarized=certificate.loss.binarized,
        )
        label = None if log.label is None else int(log.label[row])
        verdict = Verdict(scores=query.guardian.tolist(), label=label)
        loss = decision_loss(decision, verdict, loss_bound=certificate.loss_bound)
        if loss is None:
            raise OptionError(
                f"{log.source}: the loss of a row is unknown: its right answer is; give labels to all rows"
            )
        return loss

    def _ledger(self, certificate: Certificate, course: Course, first: int) -> tuple[Moment | None, Watched]:
        """Return the alarm on a certificate's ledger, if there is one, and the ledger until then."""
        lines = certificate_lines(certificate, alarm_line=self.plan.alarm_line)
        monitor, drawn = Monitor(lines, audit_rate=self.plan.audit_rate), np.flatnonzero(self.drawn[first:])
        losses, red = course.losses[drawn], None
        for low in range(0, len(drawn) - lines.block + 1, lines.block):
            audits = low + lines.block
            monitor.observe(
                LedgerRow(seq, inf, loss) for seq, loss in enumerate(losses[low:audits].tolist(), start=low + 1)
            )
            at = first + int(drawn[audits - 1]) + 1
            if monitor.red(float(at)):
                red = Moment(kind="red", at=at, audits=audits, text=monitor.standing(float(at)).reasons[0])
                drawn, losses = drawn[:audits], losses[:audits]
                break
        return red, Watched(certificate=certificate, drawn=drawn + first, history=ledger_history(lines, losses))


def _with_worse(pool: ScoreLog) -> ScoreLog:
    """Return a pool twice, the second time with a Primary that is as sure and wrong."""
    size, flat = len(pool), len(pool.primary)
    both = pool.select(np.concatenate([np.arange(size), np.arange(size)]))
    primary, guardian = both.primary.copy(), both.guardian.copy()
    for row in range(size):
        span = slice(int(pool.offsets[row]) + flat, int(pool.offsets[row + 1]) + flat)
        if pool.is_router:
            guardian[span] = [1.0, 0.0]
            continue
        scores = primary[span]
        top, worst = int(scores.argmax()), int(guardian[span].argmin())
        scores[top], scores[worst] = scores[worst], scores[top]
    return replace(both, primary=primary, guardian=guardian)


def _worse_share(usual: float, worse: float, factor: float) -> float:
    """Return in which share of the decisions the Primary must be worse for the loss to grow by a factor."""
    if factor == 1:
        return 0.0
    if usual <= 0 or worse < factor * usual:
        most = 1.0 if usual <= 0 else worse / usual
        raise OptionError(
            f"the loss of this certificate cannot grow {factor:g}-fold: with every choice of the Primary at its worst it "
            f"grows {most:.3g}-fold; use a smaller shift, or a larger alpha"
        )
    return (factor - 1) * usual / (worse - usual)
