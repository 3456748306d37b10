"""inspect: what a score log contains, and whether its pair of models is worth routing.

Describes the log as it is, under the rule in which a deferral shows the Guardian every action; guarantees nothing about
new queries. Knows nothing of terminals.
"""

from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from shlex import quote
from typing import Any, Unpack

import numpy as np

from conformal_arbitrage.calibration.calibrate import RowFacts
from conformal_arbitrage.calibration.notebook import html_bars, html_paragraph, html_table
from conformal_arbitrage.calibration.options import resolve_options
from conformal_arbitrage.calibration.planning import TUNING_SHARE, rows_needed, split
from conformal_arbitrage.core.bounds import Interval
from conformal_arbitrage.core.exact import Floats, Integers, is_candidate, margins, n_rows, row_argmax
from conformal_arbitrage.core.risk import LossMeasure, Number, RiskCurve, net_losses, within_unit
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.fitness import refuse_unfit, repeats
from conformal_arbitrage.scorelog.log import (
    FROM_ARRAYS,
    FROM_ROUTER,
    CostKeywords,
    CostOptions,
    Costs,
    ScoreLog,
    costs_of,
)
from conformal_arbitrage.types import Boundary

SHARES = tuple(Fraction(text) for text in ("0.01", "0.02", "0.05", "0.1", "0.2"))
"""Budgets to report, as shares of the loss bound."""
FEWEST_TUNING_ROWS = 10
"""Rows that budgets are described on, and options chosen on, at the least."""
LEAST_SAVING = 0.05
"""A pair that saves fewer Guardian calls than this, compared with random routing, is not worth routing."""
_Z = 1.96
"""Half a 95 % interval, in standard errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointEstimate:
    """A mean, with an approximate 95 % interval."""

    mean: float
    interval: Interval

    def points(self) -> str:
        """Return the estimate in points, for people."""
        low, high = self.interval
        return f"{100 * self.mean:.1f} points (95 % interval {100 * low:.1f} to {100 * high:.1f})"

    @property
    def positive(self) -> bool:
        """Whether the whole interval lies above 0."""
        return self.interval[0] > 0


def point_estimate(mean: float, error: float) -> PointEstimate:
    """Return an estimate from a mean and its standard error."""
    return PointEstimate(mean=mean, interval=(mean - _Z * error, mean + _Z * error))


def mean_estimate(values: Floats) -> PointEstimate:
    """Return the mean of independent values as an estimate; a single one has no error."""
    return point_estimate(
        float(values.mean()), float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetUse:
    """What one budget buys on this log.

    Attributes:
        deferred: share of queries sent to the Guardian with boundary="include"; None if all are.
        deferred_random: the same with boundary="random".
        wasted: share of the budget that boundary="include" leaves unused.
        deferred_net: share sent to the Guardian with loss="net"; None if all are, or if outcomes are unknown.
        floor: a margin that the threshold of a certificate from other rows hardly comes below, to collect those with; None
            if there is none. The regret must be the loss: the threshold of the net loss is lower.
        below_floor: share of rows with a smaller margin.
    """

    alpha: float
    deferred: float | None
    deferred_random: float | None
    wasted: float | None
    deferred_net: float | None = None
    floor: float | None = None
    below_floor: float = 0.0

    def share(self, boundary: Boundary) -> float | None:
        """Return the share of queries sent to the Guardian with a boundary; None if all are."""
        return self.deferred_random if boundary == "random" else self.deferred


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a log contains.

    Attributes:
        source: the file.
        rows: number of queries.
        fewest_actions: of any query.
        most_actions: of any query.
        router_form: whether the rows are two answers and a confidence rather than menus.
        outcomes: mean of every outcome over the choices of each model alone.
        no_opinion_rows: rows without usable Primary scores; they defer.
        missing_guardian_rows: rows without usable Guardian scores.
        tied_rows: rows whose top actions are tied; they defer.
        distinct_margins: number of different margins.
        primary_loss: mean loss of the Primary alone.
        auc: how well a small margin predicts regret; 0.5 is chance, 1 is perfect.
        auc_interval: its 95 % confidence interval, approximate.
        calls_saved: share of Guardian calls saved compared with random routing at the same loss, mean over all budgets.
        guardian_gain: how much more often the Guardian is right than the Primary; None if that is unknown.
        worth_routing: whether these rows show that routing is better than random, and better than the Primary alone.
        verdict: the reason, in words.
        boundary: the boundary that a calibration of this log takes by default.
        budgets: what several budgets buy, on the rows that `recommend` sets aside for choosing.
        budget_rows: how many these are.
        cost_per_1000: dollars of each model alone, if costs are known.
        problems: what to fix, in words.
        repeated_contexts: rows whose context stood in an earlier row.
        repeated_rows: rows that equal an earlier one in everything but the id.
        next_steps: what to run next, in words.
        sampled_rows: of a log in parts, how many rows were drawn for all but the number of rows, of actions and of missing
            scores, which are those of the whole log; None if all rows were looked at.
        floor: the margin below which the Guardian was not asked; None if it always was.
        not_asked_rows: rows with a smaller margin, of which means, losses and AUC say nothing.
    """

    source: str
    rows: int
    fewest_actions: int
    most_actions: int
    router_form: bool
    outcomes: dict[str, dict[str, float | None]]
    no_opinion_rows: int
    missing_guardian_rows: int
    tied_rows: int
    distinct_margins: int
    primary_loss: float
    auc: float | None
    auc_interval: tuple[float, float] | None
    calls_saved: PointEstimate | None
    guardian_gain: PointEstimate | None
    worth_routing: bool
    verdict: str
    boundary: Boundary
    budgets: tuple[BudgetUse, ...]
    budget_rows: int
    cost_per_1000: dict[str, float] | None
    problems: tuple[str, ...]
    repeated_contexts: int
    repeated_rows: int
    next_steps: tuple[str, ...] = ()
    sampled_rows: int | None = None
    floor: float | None = None
    not_asked_rows: int = 0

    def with_counts(self, counts: RowFacts, source: str) -> "Inspection":
        """Return the inspection of a sample with what was counted in all rows of its source."""
        return replace(
            self,
            source=source,
            rows=counts.rows,
            fewest_actions=counts.fewest_actions,
            most_actions=counts.most_actions,
            no_opinion_rows=counts.no_opinion,
            missing_guardian_rows=counts.unknown if self.floor is None else self.missing_guardian_rows,
            next_steps=tuple(step.replace(quote(self.source), quote(source)) for step in self.next_steps),
            sampled_rows=self.rows if self.rows < counts.rows else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the inspection as a JSON document."""
        return asdict(self)

    def facts(self) -> list[tuple[str, str]]:
        """Return the findings as name and value pairs, for people."""
        most = "" if self.fewest_actions == self.most_actions else f" to {self.most_actions}"
        form = ", router form" if self.router_form else ""
        facts = [("rows", f"{self.rows}, {self.fewest_actions}{most} actions each{form}")]
        if self.sampled_rows is not None:
            facts.append(
                ("looked at", f"{self.sampled_rows} of them, drawn uniformly; actions and missing scores in all")
            )
        facts += [
            (name, f"Primary {_figure(means['primary'])}, Guardian {_figure(means['guardian'])}")
            for name, means in self.outcomes.items()
        ]
        if self.cost_per_1000 is not None:
            cost = self.cost_per_1000
            facts.append(("dollars per 1000", f"Primary {cost['primary']:.4g}, Guardian {cost['guardian']:.4g}"))
        facts += [
            (
                "missing scores",
                f"Primary in {n_rows(self.no_opinion_rows)}, Guardian in {self.missing_guardian_rows}",
            ),
            (
                "Primary's margin",
                f"distinct values: {self.distinct_margins}; tied at the top in {n_rows(self.tied_rows)}",
            ),
            ("Primary alone", f"mean loss {self.primary_loss:.4f} per query"),
        ]
        if self.floor is not None:
            rows = n_rows(self.not_asked_rows)
            facts.append(
                ("not asked", f"the Guardian in {rows} below the floor {self.floor:g}; the rest is about the others")
            )
        if self.auc is not None and self.auc_interval is not None:
            low, high = self.auc_interval
            facts.append(("margin predicts regret", f"AUC {self.auc:.3f} (95 % CI about {low:.3f} to {high:.3f})"))
        return facts

    def budget_table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of what several budgets buy, for people."""
        other = "include" if self.boundary == "random" else "random"
        header = ["risk budget", "asks the Guardian", f"with --boundary {other}"]
        rows = [
            [f"{use.alpha:g}", *(_share(use.share(kind)) for kind in (self.boundary, other))] for use in self.budgets
        ]
        if any(use.deferred_net is not None for use in self.budgets):
            header.append("with --loss net")
            rows = [[*row, _share(use.deferred_net)] for row, use in zip(rows, self.budgets, strict=True)]
        if any(use.floor is not None for use in self.budgets):
            header.append("floor for more rows")
            rows = [[*row, _floor(use)] for row, use in zip(rows, self.budgets, strict=True)]
        return header, rows

    def __repr__(self) -> str:
        saved = "None" if self.calls_saved is None else f"{self.calls_saved.mean:.3f}"
        return (
            f"Inspection(source={self.source!r}, rows={self.rows}, worth_routing={self.worth_routing}, "
            f"calls_saved={saved}, problems={len(self.problems)})"
        )

    def _repr_html_(self) -> str:
        header, rows = self.budget_table()
        shares = [(use.alpha, 1.0 if use.deferred is None else use.share(self.boundary) or 0.0) for use in self.budgets]
        bars = [(f"alpha {alpha:g}", share, f"{100 * share:.1f} %") for alpha, share in shares]
        budgets = html_table(rows, header=header) + html_bars("sent to the Guardian", bars) if rows else ""
        notes = "".join(html_paragraph(f"Note: {problem}") for problem in self.problems)
        steps = "".join(html_paragraph(step) for step in self.next_steps)
        return html_table(self.facts()) + budgets + html_paragraph(self.verdict) + notes + steps


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _floor(use: BudgetUse) -> str:
    return "none" if use.floor is None else f"{use.floor:.12g} (saves {100 * use.below_floor:.0f} %)"


def _share(value: float | None) -> str:
    return "about all" if value is None else f"about {100 * value:.1f} %"


def inspect(
    log: ScoreLog,
    *,
    loss_bound: Number | None = None,
    costs: CostOptions | None = None,
    **keywords: Unpack[CostKeywords],
) -> Inspection:
    """Describe a log and judge its pair of models.

    Args:
        log: the recorded scores.
        loss_bound: the largest possible loss; by default 1 if all Guardian scores lie in [0, 1].
        costs: what the models cost; or the fields of `CostOptions` as keywords; by default the log's cost columns.
        **keywords: the fields of `costs`, one by one.
    """
    refuse_unfit(log.source, log.extra)
    repeated = repeats(log)
    prices = costs_of(log, resolve_options(costs, CostOptions, keywords, name="costs"))
    below = log.below_floor
    answered = log.select(~log.unknown_loss & ~below)
    if len(answered) == 0:
        raise OptionError(f"{log.source}: no row has a Guardian score with a known loss; nothing to inspect")
    top, margin, regret = primary_alone(answered)
    curve = RiskCurve.from_log(answered, guardian_sees="all")
    bound = curve.bound(loss_bound) if loss_bound is not None or curve.outside is None else None
    auc, interval = _auc(margin, regret, float(regret.max() if bound is None else bound))
    saved, gains = _calls_saved(margin, regret), right_gains(answered, top)
    worth, verdict = _verdict(saved, None if gains is None else (gains, margin), prices)
    if log.floor is not None:
        worth, verdict = False, _NOT_JUDGED.format(floor=f"{log.floor:g}")
    choosing = rows_to_choose_on(log.above_floor())
    uses = () if bound is None else budget_uses(choosing, bound, len(log) - len(choosing) or len(log))
    return Inspection(
        source=log.source,
        rows=len(log),
        fewest_actions=int(log.sizes.min()),
        most_actions=int(log.sizes.max()),
        router_form=log.is_router,
        outcomes=_outcomes(answered, top),
        no_opinion_rows=int(log.no_opinion.sum()),
        missing_guardian_rows=int((log.unknown_loss & ~below).sum()),
        tied_rows=int((margin == 0).sum()),
        distinct_margins=len(np.unique(margin)),
        primary_loss=float(regret.mean()),
        auc=auc,
        auc_interval=interval,
        calls_saved=saved,
        guardian_gain=None if gains is None else mean_estimate(gains),
        worth_routing=worth,
        verdict=verdict,
        boundary="random" if log.has_ids else "include",
        budgets=uses,
        budget_rows=len(choosing),
        cost_per_1000=None if prices is None else prices.per_1000,
        problems=(*_problems(log, bound), *repeated.problems()),
        repeated_contexts=repeated.contexts,
        repeated_rows=repeated.rows,
        next_steps=_next_steps(log) if worth else (),
        floor=log.floor,
        not_asked_rows=int(below.sum()),
    )


_NOT_JUDGED = (
    "Whether routing is worth it was for the pilot to say: this log knows nothing of the loss below its floor, {floor}. "
    "Next: calibrate it, with the alpha and the options that were fixed before."
)


def primary_alone(log: ScoreLog) -> tuple[Integers, Floats, Floats]:
    """Return each row's top action, its margin, and the loss if it stands alone."""
    losses = LossMeasure().losses(log)
    top, margin, regret = np.empty(len(log), dtype=np.int64), np.empty(len(log)), np.empty(len(log))
    for piece in losses.blocks:
        rows = piece.block.rows
        top[rows], margin[rows] = piece.order[0], margins(piece.gaps)
        regret[rows] = piece.levels[0] / 10.0**losses.tick_digits
    if log.is_router:  # the Primary's answer is the second action, with or without a confidence
        top[:], regret[:] = 1, np.round(log.loss_scores[::2] - log.loss_scores[1::2], 12)
    return top, margin, regret


def _calls_saved(margin: Floats, regret: Floats) -> PointEstimate | None:
    """Return the share of Guardian calls saved by the margin over random routing at the same loss.

    The mean over all budgets that the margin can reach. Rows tied at the top are always deferred. None if the Primary
    alone has no loss. The error is that of a margin which says nothing: of all orders of the same losses.
    """
    if regret.sum() == 0:
        return None
    n, part = len(margin), regret / regret.sum()
    values, where = np.unique(margin, return_inverse=True)
    deferred, random = np.cumsum(np.bincount(where)) / n, np.cumsum(np.bincount(where, regret)) / regret.sum()
    tied = float(deferred[0]) if values[0] == 0 else 0.0
    if values[0] > 0:
        deferred, random = np.concatenate([[0.0], deferred]), np.concatenate([[0.0], random])
    spread = float(((part - 1 / n) ** 2).sum()) / max(n - 1, 1)
    if random[-1] - random[0] < 1e-12:  # every loss is tied at the top
        return point_estimate(float(random[-1] - deferred[0]), (spread * n * tied * (1 - tied)) ** 0.5)
    area = float(np.trapezoid(random - deferred, random) / (random[-1] - random[0]))
    ranks = (deferred[1:] + deferred[:-1]) / 2  # middle ranks of the rows that are not tied at the top
    counts = np.diff(deferred) * n
    mean = float(counts @ ranks / counts.sum())
    variance = spread * (n * tied * (1 - tied) / 4 + float(counts @ (ranks - mean) ** 2) / (1 - tied) ** 2)
    return point_estimate(area, variance**0.5)


def right_gains(log: ScoreLog, primary: Integers) -> Floats | None:
    """Return how much better the Guardian's choice is than the Primary's, by `correct`; None where that is unknown."""
    if "correct" not in log.outcome_names:
        return None
    correct, starts = log.outcome("correct"), log.offsets[:-1]
    gains = correct[starts + row_argmax(log.guardian, log.offsets)] - correct[starts + primary]
    return None if np.isnan(gains).any() else gains


def rows_to_choose_on(log: ScoreLog) -> ScoreLog:
    """Return the rows that `recommend` sets aside by default, so that describing budgets spoils no others."""
    rows = log
    if round(TUNING_SHARE * len(log)) >= FEWEST_TUNING_ROWS:
        rows = split(log, share=TUNING_SHARE)[0]
    known = rows.select(~rows.unknown_loss)
    return known if len(known) else log.select(~log.unknown_loss)


def budget_uses(log: ScoreLog, bound: Fraction, n: int) -> tuple[BudgetUse, ...]:
    """Return what each budget buys with a certificate from n rows, the net loss included where outcomes tell it.

    n rows at alpha allow a loss of (alpha (n + 1) - B) / n per row; the rows of this log, at another alpha, allow the same.
    """
    _, margin, _ = primary_alone(log)
    curve, m = RiskCurve.from_log(log, guardian_sees="all"), len(log)
    alphas = [share * bound for share in SHARES]
    same = [(m * (alpha * (n + 1) - bound) / n + bound) / (m + 1) for alpha in alphas]
    uses = [
        replace(_use(curve, margin, here, bound), alpha=float(alpha)) for here, alpha in zip(same, alphas, strict=True)
    ]
    if log.floor is None:
        uses = [_with_floor(use, curve, margin, bound) for use in uses]
    if "correct" not in log.outcome_names or log.binary is not None:
        return tuple(uses)
    grades = log.outcome("correct")
    if np.isnan(net_losses(log, grades)).any() or not within_unit(grades) or bound != 1:
        return tuple(uses)
    u = np.random.default_rng(0).random(m)  # any draws do for a description
    net = RiskCurve.from_log(log, grades=grades, u=u)
    return tuple(
        replace(use, deferred_net=None if k is None else _deferred(net, k, margin, u))
        for use, k in zip(uses, net.search(same, bound), strict=True)
    )


def _with_floor(use: BudgetUse, curve: RiskCurve, margin: Floats, bound: Fraction) -> BudgetUse:
    """Add a floor: the threshold at a budget that is larger by two standard errors of the mean loss of these rows."""
    alpha = use.alpha + 2 * (use.alpha * (float(bound) - use.alpha) / curve.n) ** 0.5
    threshold = curve.thresholds([int(alpha * curve.n * 10**curve.tick_digits)])[0]
    if threshold is None or threshold.relaxation == 0:
        return use
    return replace(use, floor=threshold.relaxation, below_floor=float((margin < threshold.relaxation).mean()))


def _deferred(curve: RiskCurve, index: int, margin: Floats, u: Floats) -> float:
    """Return the share of rows within the threshold at a breakpoint."""
    boundary_u = None if curve.boundary_u is None else float(curve.boundary_u[index])
    return float(is_candidate(margin, float(curve.breakpoints[index]), u=u, boundary_u=boundary_u).mean())


def _use(curve: RiskCurve, margin: Floats, alpha: Fraction, bound: Fraction) -> BudgetUse:
    """Apply the exact rule at one budget, and in expectation the one that is random at the threshold margin."""
    index = curve.search([alpha], bound)[0] if alpha > 0 else None
    if index is None:
        return BudgetUse(alpha=float(alpha), deferred=None, deferred_random=None, wasted=None)
    relaxation = curve.breakpoints[index]
    deferred = float((margin <= relaxation).mean())
    left = alpha * (curve.n + 1) - bound - curve.exact_total(index)
    spare = 0.0
    if index > 0:
        here = curve.exact_total(index - 1) - curve.exact_total(index)
        spare = float(left / here) * float((margin == relaxation).mean())
    wasted = float(left / ((curve.n + 1) * alpha)) if index > 0 else 0.0
    return BudgetUse(alpha=float(alpha), deferred=deferred, deferred_random=deferred - spare, wasted=wasted)


def _next_steps(log: ScoreLog) -> tuple[str, ...]:
    """Return what to run next."""
    options = f" --primary-column {quote(log.columns[0])} --guardian-column {quote(log.columns[1])}"
    columns = "" if log.columns == ("primary", "guardian") else options
    in_memory = log.source in (FROM_ARRAYS, FROM_ROUTER, "frame")
    call = (
        f"recommend(log, A, share={TUNING_SHARE:g})"
        if in_memory
        else f"arbitrage recommend {quote(log.source)}{columns} --alpha A --share {TUNING_SHARE:g} -o route.toml"
    )
    return (
        f"Next: {call}, with the alpha that you need, not the one that looks best here; it certifies rows that the budgets "
        "above do not show. If alpha is fixed already, leave the share out, and all rows are certified.",
    )


def _auc(margin: Floats, regret: Floats, bound: float) -> tuple[float | None, tuple[float, float] | None]:
    """Return the area under the ROC curve of "small margin" for regret, and its interval after Hanley and McNeil.

    A row with regret r counts as r/B of a hit and 1 - r/B of a miss.
    """
    part = regret / bound if bound > 0 else regret
    hits, misses = float(part.sum()), float((1 - part).sum())
    if hits == 0 or misses == 0:
        return None, None
    _, where = np.unique(margin, return_inverse=True)
    hit, miss = np.bincount(where, part), np.bincount(where, 1 - part)
    above = misses - np.cumsum(miss)
    area = float((hit * (above + miss / 2)).sum() / (hits * misses))
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + max(hits - 1, 0) * (q1 - area**2) + max(misses - 1, 0) * (q2 - area**2)
    half = 1.96 * float(np.sqrt(max(variance, 0.0) / (hits * misses)))
    return area, (max(0.0, area - half), min(1.0, area + half))


def _verdict(
    saved: PointEstimate | None, gained: tuple[Floats, Floats] | None, costs: Costs | None
) -> tuple[bool, str]:
    """Return whether routing is worth it, compared with the Primary alone and with random routing, and why.

    Args:
        saved: Guardian calls saved over random routing at the same loss; None if the Primary alone has no loss.
        gained: how much better the Guardian's choice is, and the margin, row by row; None if that is unknown.
    """
    if saved is None:
        return False, "Use the Primary alone: it has no loss here."
    better = None
    if gained is not None:
        gains, margin = gained
        better = mean_estimate(gains)
        unsure = mean_estimate(np.where(margin <= np.median(margin), gains, 0.0))
        if not better.positive and not unsure.positive:
            return False, _no_gain(better)
    needed = LEAST_SAVING if costs is None else max(LEAST_SAVING, _cost_ratio(costs) / 2)
    if saved.mean < LEAST_SAVING or not saved.positive:
        chance = "" if saved.mean < LEAST_SAVING else ", which may be chance: more rows would tell"
        return False, (
            f"Not worth routing: at the same loss the margin saves {saved.points()} of Guardian calls over random routing"
            f"{chance}. Look for a Primary whose confidence tells right from wrong."
        )
    if saved.mean < needed:
        return False, (
            f"Not worth routing: the margin saves {saved.points()} of Guardian calls over random routing, but a deferral "
            f"also pays for the Primary, and that costs more ({100 * needed:.0f} points). Look for a cheaper Primary."
        )
    than = "" if better is None else f" The Guardian is right more often than the Primary by {better.points()}."
    return True, (
        f"Worth routing: at the same loss the margin saves {saved.points()} of Guardian calls over random routing, on "
        f"average over all budgets.{than}"
    )


def _no_gain(better: PointEstimate) -> str:
    """Return the verdict on a Guardian that is not shown to be better than the Primary."""
    if better.mean <= 0:
        worse = PointEstimate(mean=-better.mean, interval=(-better.interval[1], -better.interval[0]))
        return (
            f"Use the Primary alone: it is right more often than the Guardian by {worse.points()}, and no less often where "
            "it is unsure. A limit on the loss against this Guardian would only send queries to the worse model."
        )
    return (
        f"Not worth routing: these rows do not show that the Guardian is better than the Primary; it is right more often by "
        f"{better.points()}. Collect more rows, or look for a better Guardian."
    )


def _outcomes(log: ScoreLog, primary: Integers) -> dict[str, dict[str, float | None]]:
    """Return the mean outcome of each model's own choice over the rows where it is known."""
    choices = {"primary": primary, "guardian": row_argmax(log.guardian, log.offsets)}
    return {
        name: {who: _known_mean(log.outcome(name)[log.offsets[:-1] + action]) for who, action in choices.items()}
        for name in log.outcome_names
    }


def _known_mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _cost_ratio(costs: Costs) -> float:
    """Return the Primary's cost relative to the Guardian's; infinite if the Guardian is free."""
    guardian = float(costs.guardian.full().mean())
    return float(costs.primary.mean()) / guardian if guardian > 0 else float("inf")


def _problems(log: ScoreLog, bound: Fraction | None) -> list[str]:
    problems: list[str] = []
    if log.id is None:
        problems.append("no `id` column: learned scores, joins and resuming need one (router-log --id names it)")
    missing = log.unknown_loss & ~log.below_floor
    if missing.any():
        what = "a Guardian score" if log.binary is None else "a Guardian score or its `correct`"
        problems.append(
            f"{n_rows(int(missing.sum()))} without {what}, not part of these figures: collect them again, or "
            "calibrate with --missing-guardian worst_case, which defers more often"
        )
    if bound is None:
        problems.append("Guardian scores leave [0, 1]: state the largest possible loss with --loss-bound")
    elif bound > Fraction("0.05") and len(log) < rows_needed(0.05, bound):
        problems.append(f"{n_rows(len(log), 'is', 'are')} few: alpha 0.05 needs at least {rows_needed(0.05, bound)}")
    if not log.outcome_names and not log.is_router:
        problems.append("no `label` or `correct` column: accuracy cannot be shown")
    if log.identities is None:
        problems.append(
            "the log does not say which models made it: a gateway serves its certificates without a guarantee"
        )
    return problems
