"""inspect: what a score log contains, and whether its pair of models is worth routing.

Describes the log as it is, under the rule in which a deferral shows the Guardian every action; guarantees nothing about
new queries. Knows nothing of terminals.
"""

from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from shlex import quote
from typing import Any, Unpack

import numpy as np

from conformal_arbitrage.calibration.calibrate import RowCounts
from conformal_arbitrage.calibration.learned import FEWEST_ROWS
from conformal_arbitrage.calibration.learning import learned_rows
from conformal_arbitrage.calibration.notebook import html_bars, html_paragraph, html_table
from conformal_arbitrage.calibration.options import CalibrationOptions, resolve_options
from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.core.exact import Floats, Integers, is_candidate, margins, row_argmax
from conformal_arbitrage.core.learned import left_out_kept, spendable_losses
from conformal_arbitrage.core.losses import Number, log_losses, net_losses, within_unit
from conformal_arbitrage.core.walk import RiskCurve
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.evaluation.costs import CostKeywords, CostOptions, Costs, costs_of
from conformal_arbitrage.scorelog.fitness import refuse_unfit, repeats
from conformal_arbitrage.scorelog.log import ScoreLog

SHARES = tuple(Fraction(text) for text in ("0.01", "0.02", "0.05", "0.1", "0.2"))
"""Budgets to report, as shares of the loss bound."""
USUAL_SHARE = Fraction("0.05")
_MOST_LEARNED = 20_000
"""Rows of a log for which a learned score is described as well."""
LEAST_SAVING = 0.05
"""A pair that saves fewer Guardian calls than this, compared with random routing, is not worth routing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetUse:
    """What one budget buys on this log.

    Attributes:
        alpha: the risk budget.
        deferred: share of queries sent to the Guardian with boundary="include"; None if all are.
        deferred_random: the same with boundary="random".
        wasted: share of the budget that boundary="include" leaves unused.
        deferred_net: share sent to the Guardian with loss="net"; None if all are, or if outcomes are unknown.
        deferred_learned: the same with score="auto", each row decided by the others; None if all are, or if this log has
            too few rows, or too many, to learn from.
    """

    alpha: float
    deferred: float | None
    deferred_random: float | None
    wasted: float | None
    deferred_net: float | None = None
    deferred_learned: float | None = None


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
        worth_routing: whether that is enough.
        verdict: the reason, in words.
        budgets: what several budgets buy.
        cost_per_1000: dollars of each model alone, if costs are known.
        problems: what to fix, in words.
        repeated_contexts: rows whose context stood in an earlier row.
        repeated_rows: rows that equal an earlier one in everything but the id.
        next_steps: what to run next, in words.
        sampled_rows: of a log in parts, how many rows were drawn for all but the number of rows, of actions and of missing
            scores, which are those of the whole log; None if all rows were looked at.
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
    calls_saved: float | None
    worth_routing: bool
    verdict: str
    budgets: tuple[BudgetUse, ...]
    cost_per_1000: dict[str, float] | None
    problems: tuple[str, ...]
    repeated_contexts: int
    repeated_rows: int
    next_steps: tuple[str, ...] = ()
    sampled_rows: int | None = None

    def with_counts(self, counts: RowCounts) -> "Inspection":
        """Return the inspection of a sample with what was counted in all rows."""
        return replace(
            self,
            source=counts.source,
            rows=counts.rows,
            fewest_actions=counts.fewest_actions,
            most_actions=counts.most_actions,
            no_opinion_rows=counts.no_opinion,
            missing_guardian_rows=counts.unknown,
            next_steps=tuple(step.replace(quote(self.source), quote(counts.source)) for step in self.next_steps),
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
            ("missing scores", f"Primary in {self.no_opinion_rows} rows, Guardian in {self.missing_guardian_rows}"),
            ("Primary's margin", f"{self.distinct_margins} distinct values, tied at the top in {self.tied_rows} rows"),
            ("Primary alone", f"mean loss {self.primary_loss:.4f} per query"),
        ]
        if self.auc is not None and self.auc_interval is not None:
            low, high = self.auc_interval
            facts.append(("margin predicts regret", f"AUC {self.auc:.3f} (95 % CI about {low:.3f} to {high:.3f})"))
        return facts

    def budget_table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of what several budgets buy, for people."""
        header = ["alpha", "sent to the Guardian", "with boundary random", "unused budget"]
        rows = [
            [f"{b.alpha:g}", _share(b.deferred), _share(b.deferred_random), _share(b.wasted, all_deferred="-")]
            for b in self.budgets
        ]
        further = {
            "with score auto": [b.deferred_learned for b in self.budgets],
            "with loss net": [b.deferred_net for b in self.budgets],
        }
        for title, shares in further.items():
            if any(share is not None for share in shares):
                header = [*header, title]
                rows = [[*row, _share(share)] for row, share in zip(rows, shares, strict=True)]
        return header, rows

    def __repr__(self) -> str:
        saved = "None" if self.calls_saved is None else f"{self.calls_saved:.3f}"
        return (
            f"Inspection(source={self.source!r}, rows={self.rows}, worth_routing={self.worth_routing}, "
            f"calls_saved={saved}, problems={len(self.problems)})"
        )

    def _repr_html_(self) -> str:
        header, rows = self.budget_table()
        shares = [(f"alpha {b.alpha:g}", 1.0 if b.deferred is None else b.deferred) for b in self.budgets]
        bars = [(name, share, f"{100 * share:.1f} %") for name, share in shares]
        budgets = html_table(rows, header=header) + html_bars("sent to the Guardian", bars) if rows else ""
        notes = "".join(html_paragraph(f"Note: {problem}") for problem in self.problems)
        steps = "".join(html_paragraph(step) for step in self.next_steps)
        return html_table(self.facts()) + budgets + html_paragraph(self.verdict) + notes + steps


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _share(value: float | None, *, all_deferred: str = "all") -> str:
    return all_deferred if value is None else f"{100 * value:.1f} %"


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
        costs: what the models cost; or pass the fields of `CostOptions` as keywords (`primary_cost=`, ...). Without
            either, the log's cost columns are used.
        **keywords: the fields of `costs`, one by one.
    """
    refuse_unfit(log)
    repeated = repeats(log)
    prices = costs_of(log, resolve_options(costs, CostOptions, keywords, name="costs"))
    answered = log.select(~log.unknown_loss)
    if len(answered) == 0:
        raise OptionError(f"{log.source}: no row has a Guardian score with a known loss; nothing to inspect")
    top, margin, regret = primary_alone(answered)
    curve = RiskCurve.from_log(answered, guardian_sees="all")
    bound = curve.bound(loss_bound) if loss_bound is not None or curve.unit_scores else None
    auc, interval = _auc(margin, regret, float(regret.max() if bound is None else bound))
    saved = _calls_saved(margin, regret)
    worth, verdict = _verdict(saved, auc, prices)
    return Inspection(
        source=log.source,
        rows=len(log),
        fewest_actions=int(log.sizes.min()),
        most_actions=int(log.sizes.max()),
        router_form=log.is_router,
        outcomes=_outcomes(answered, top),
        no_opinion_rows=int(log.no_opinion.sum()),
        missing_guardian_rows=int(log.unknown_loss.sum()),
        tied_rows=int((margin == 0).sum()),
        distinct_margins=len(np.unique(margin)),
        primary_loss=float(regret.mean()),
        auc=auc,
        auc_interval=interval,
        calls_saved=saved,
        worth_routing=worth,
        verdict=verdict,
        budgets=() if bound is None else _budgets(answered, curve, margin, bound),
        cost_per_1000=None if prices is None else prices.per_1000,
        problems=(*_problems(log, bound), *repeated.problems()),
        repeated_contexts=repeated.contexts,
        repeated_rows=repeated.rows,
        next_steps=_next_steps(log, worth, _at_usual_budget(curve, margin, bound)),
    )


def primary_alone(log: ScoreLog) -> tuple[Integers, Floats, Floats]:
    """Return each row's top action, its margin, and the loss if it stands alone."""
    losses = log_losses(log, guardian_sees="all")
    top, margin, regret = np.empty(len(log), dtype=np.int64), np.empty(len(log)), np.empty(len(log))
    for piece in losses.blocks:
        rows = piece.block.rows
        top[rows], margin[rows] = piece.order[0], margins(piece.gaps)
        regret[rows] = piece.levels[0] / 10.0**losses.tick_digits
    if log.is_router:  # the Primary's answer is the second action, with or without a confidence
        top[:], regret[:] = 1, np.round(log.loss_scores[::2] - log.loss_scores[1::2], 12)
    return top, margin, regret


def _calls_saved(margin: Floats, regret: Floats) -> float | None:
    """Return the share of Guardian calls saved by the margin over random routing at the same loss.

    The mean over all budgets that the margin can reach. Rows tied at the top are always deferred. None if the Primary
    alone has no loss.
    """
    if regret.sum() == 0:
        return None
    values, where = np.unique(margin, return_inverse=True)
    deferred = np.cumsum(np.bincount(where)) / len(margin)
    random = np.cumsum(np.bincount(where, regret)) / regret.sum()
    if values[0] > 0:
        deferred, random = np.concatenate([[0.0], deferred]), np.concatenate([[0.0], random])
    if random[-1] == random[0]:
        return float(random[-1] - deferred[0])
    return float(np.trapezoid(random - deferred, random) / (random[-1] - random[0]))


def _budgets(log: ScoreLog, curve: RiskCurve, margin: Floats, bound: Fraction) -> tuple[BudgetUse, ...]:
    """Return what each budget buys, the net loss included where outcomes tell it."""
    learned = _learned_shares(log, margin, bound)
    uses = [
        replace(_use(curve, margin, share * bound, bound), deferred_learned=deferred)
        for share, deferred in zip(SHARES, learned, strict=True)
    ]
    if "correct" not in log.outcome_names or log.binary is not None:
        return tuple(uses)
    grades = log.outcome("correct")
    if np.isnan(net_losses(log, grades)).any() or not within_unit(grades) or bound != 1:
        return tuple(uses)
    u = np.random.default_rng(0).random(len(log))  # any draws do for a description
    net = RiskCurve.from_log(log, grades=grades, u=u)
    breakpoints = net.search([use.alpha for use in uses], bound)
    return tuple(
        replace(use, deferred_net=None if k is None else _deferred(net, k, margin, u))
        for use, k in zip(uses, breakpoints, strict=True)
    )


def _learned_shares(log: ScoreLog, margin: Floats, bound: Fraction) -> list[float | None]:
    """Return the share that score="auto" sends to the Guardian at each budget, if each row is decided by the others."""
    if not FEWEST_ROWS <= len(log) <= _MOST_LEARNED or not ((log.sizes > 1) & (margin > 0)).any():
        return [None] * len(SHARES)
    options = CalibrationOptions(
        boundary="random", score="auto", loss_bound=bound, key=b"any draws do for a description"
    )
    named = replace(log, id=np.arange(len(log)).astype(np.str_)) if log.id is None else log
    rows, alone = learned_rows(named, options, bound), int((log.sizes == 1).sum())
    fits = rows.score_rows(rows.inputs.used, np.random.default_rng(0).random(len(log)), None).fits()
    spendable = [spendable_losses(share * bound, bound, len(log) - 1) for share in SHARES]
    return [
        None if budget < 1 else 1 - (alone + int(left_out_kept(fits, budget=budget, with_margin=True).sum())) / len(log)
        for budget in spendable
    ]


def _deferred(curve: RiskCurve, index: int, margin: Floats, u: Floats) -> float:
    """Return the share of rows within the threshold at a breakpoint."""
    boundary_u = None if curve.boundary_u is None else float(curve.boundary_u[index])
    return float(is_candidate(margin, float(curve.breakpoints[index]), u=u, boundary_u=boundary_u).mean())


def _use(curve: RiskCurve, margin: Floats, alpha: Fraction, bound: Fraction) -> BudgetUse:
    """Apply the exact rule at one budget, and in expectation the one that is random at the threshold margin."""
    index = curve.search([alpha], bound)[0]
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


def _at_usual_budget(curve: RiskCurve, margin: Floats, bound: Fraction | None) -> tuple[float, float] | None:
    """Return the share sent to the Guardian at the usual budget with these rows and with any number; None if all are.

    Any number of rows allow a mean loss of alpha, as n rows do at (alpha n + B) / (n + 1).
    """
    if bound is None:
        return None
    alpha = USUAL_SHARE * bound
    here = _use(curve, margin, alpha, bound).deferred_random
    limit = _use(curve, margin, (alpha * curve.n + bound) / (curve.n + 1), bound).deferred_random
    return None if here is None or limit is None else (here, limit)


def _next_steps(log: ScoreLog, worth: bool, shares: tuple[float, float] | None) -> tuple[str, ...]:
    """Return what to run next, and what more rows would buy."""
    options = f" --primary-column {quote(log.columns[0])} --guardian-column {quote(log.columns[1])}"
    columns = "" if log.columns == ("primary", "guardian") else options
    steps: list[str] = []
    if worth:
        in_memory = log.source in ("arrays", "frame")
        call = (
            "recommend(log, A)"
            if in_memory
            else f"arbitrage recommend {quote(log.source)}{columns} --alpha A -o route.toml"
        )
        steps.append(
            f"Next: {call}, with the alpha that you need, not the one that looks best here; it chooses options on one part "
            "of the rows and certifies on the rest."
        )
    if worth and shares is not None:
        here, limit = shares
        steps.append(
            f"At alpha {float(USUAL_SHARE):g} of the loss bound, the Guardian is asked about {100 * here:.1f} % of these "
            f"queries; any number of further rows would bring that to {100 * limit:.1f} %."
        )
    return tuple(steps)


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


def _verdict(saved: float | None, auc: float | None, costs: Costs | None) -> tuple[bool, str]:
    if saved is None:
        return False, "Not worth routing: the Primary alone has no loss here, so use it for every query."
    needed = LEAST_SAVING if costs is None else max(LEAST_SAVING, _cost_ratio(costs) / 2)
    detail = "" if auc is None else f" (AUC of the margin for regret {auc:.2f}; chance is 0.50)"
    if saved < LEAST_SAVING:
        gain = f"saves only {100 * saved:.0f} points of" if saved >= 0.005 else "saves no"
        return False, (
            f"Not worth routing: at the same loss the margin {gain} Guardian calls over random routing{detail}. Look for "
            "a Primary whose confidence tells right from wrong."
        )
    if saved < needed:
        return False, (
            f"Not worth routing: the margin saves {100 * saved:.0f} points of Guardian calls over random routing, but a "
            f"deferral also pays for the Primary, and that costs more ({100 * needed:.0f} points). Look for a cheaper "
            "Primary."
        )
    return True, (
        f"Worth routing: at the same loss the margin saves {100 * saved:.0f} points of Guardian calls over random "
        f"routing, on average over all budgets{detail}."
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
        problems.append('no `id` column: boundary="random", joins and resuming need one')
    if log.unknown_loss.any():
        what = "have no Guardian score" if log.binary is None else "lack a Guardian score or its `correct`"
        problems.append(
            f"{log.unknown_loss.sum()} rows {what} and are not part of these figures: collect them again, or "
            "calibrate with --missing-guardian worst_case, which defers more often"
        )
    if bound is None:
        problems.append("Guardian scores leave [0, 1]: state the largest possible loss with --loss-bound")
    elif bound > Fraction("0.05") and len(log) < rows_needed(0.05, bound):
        problems.append(f"{len(log)} rows are few: alpha 0.05 needs at least {rows_needed(0.05, bound)}")
    if not log.outcome_names and not log.is_router:
        problems.append("no `label` or `correct` column: accuracy cannot be shown")
    if log.identities is None:
        problems.append("no scorer identities: certificates from this log will be unbound")
    return problems
