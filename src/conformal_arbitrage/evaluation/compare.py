"""compare: peers' decision rules and ours on one log, over many random splits."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from conformal_arbitrage.calibration.notebook import html_paragraph, html_table
from conformal_arbitrage.calibration.options import resolve_options
from conformal_arbitrage.core.bounds import binomial_limit
from conformal_arbitrage.core.exact import Bools, Floats, Indices, n_rows
from conformal_arbitrage.core.features import (
    STRENGTHS,
    FeatureRows,
    FeatureSet,
    decide_learned,
    feature_matrix,
    fit_ridges,
    spendable_losses,
)
from conformal_arbitrage.core.risk import Number, as_fraction, first_outside, net_losses, within_unit
from conformal_arbitrage.core.trials import Split, draw_splits
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.evaluation.inspection import primary_alone
from conformal_arbitrage.scorelog.fitness import refuse_floor, refuse_unfit
from conformal_arbitrage.scorelog.log import CostKeywords, CostOptions, Costs, ScoreLog, costs_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- The rules that `compare` compares ---


DELTA = 0.1
"""The error level of rules that promise with probability 1 - delta."""
_LOGISTIC_PENALTY, _ITERATIONS = 3.0, 25
_GRID = np.arange(101) / 100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RuleRows:
    """Rows as a rule sees them.

    Attributes:
        margin: the lead of the top action; above 0, since ties are deferred by every rule.
        u: one draw per row.
        loss: of keeping the Primary's answer, in units of the bound.
        net: the same with gains counted; None if outcomes are unknown.
        features: rows x columns, for learned scores.
        penalties: the weight of each column.
        n: rows of the sample, those tied at the top included.
    """

    margin: Floats
    u: Floats
    loss: Floats
    net: Floats | None
    features: Floats
    penalties: Floats
    n: int


KeepRule = Callable[[RuleRows, RuleRows, float], Bools]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRule:
    """A rule with what people need to know of it.

    Attributes:
        binary: whether it needs losses of 0 or the bound.
        net: whether it promises the net loss.
        promises_loss: whether it promises a limit on the loss in which gains do not count.
    """

    name: str
    promise: str
    keeps: KeepRule
    binary: bool = False
    net: bool = False
    promises_loss: bool = False


def _before(rows: RuleRows, risk: Floats, count: int, queries: RuleRows, query_risk: Floats) -> Bools:
    """Keep the queries that come before row number `count` in the order of risk; all of them if there is no such row."""
    if count >= len(risk):
        return np.ones(len(query_risk), np.bool_)
    first_out = _by_risk(risk, rows.u)[count]
    line, line_u = risk[first_out], rows.u[first_out]
    return (query_risk < line) | ((query_risk == line) & (queries.u < line_u))


def _by_risk(risk: Floats, u: Floats) -> Indices:
    return np.lexsort((u, risk))


def _spent(rows: RuleRows, risk: Floats | None = None) -> Floats:
    """Return the losses added up in the order of risk; by default that of the margin, the largest first."""
    return np.cumsum(rows.loss[_by_risk(-rows.margin if risk is None else risk, rows.u)])


def _by_margin(count: Callable[[RuleRows, float], int]) -> KeepRule:
    """Return the rule that keeps so many rows as a function says, the largest margins first."""
    return lambda rows, queries, alpha: _before(rows, -rows.margin, count(rows, alpha), queries, -queries.margin)


def _longest(allowed: Bools) -> int:
    """Return how many rows the longest allowed prefix has."""
    return int(np.flatnonzero(allowed)[-1]) + 1 if allowed.any() else 0


def _unbroken(allowed: Bools) -> int:
    """Return how many rows come before the first that is not allowed."""
    return len(allowed) if allowed.all() else int(np.argmin(allowed))


def coin(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Keep at random, as often as the mean loss of the rows allows."""
    mean = rows.loss.sum() / rows.n
    return queries.u < (1.0 if mean <= alpha else alpha / mean)


@_by_margin
def routellm_like(rows: RuleRows, alpha: float) -> int:
    """Keep the longest prefix whose mean loss on the same rows is within alpha."""
    return _longest(_spent(rows) <= alpha * rows.n)


def automix_like(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Choose among confidence levels of 0.1 the one with the most rows kept whose mean loss is within alpha."""
    for level in np.arange(11) / 10:
        if rows.loss[rows.margin > level].sum() <= alpha * rows.n:
            return queries.margin > level
    return np.zeros(len(queries.margin), np.bool_)


def frugalgpt_like(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Learn the probability of a loss, and choose the threshold on the rows it was learned from."""
    weights = _logistic(rows.features, rows.penalties, rows.loss)
    risk = rows.features @ weights
    count = _longest(_spent(rows, risk) <= alpha * rows.n)
    return _before(rows, risk, count, queries, queries.features @ weights)


def frugalgpt_split(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Do the same with the threshold chosen on the other half of the rows."""
    half = np.arange(len(rows.loss)) < len(rows.loss) // 2
    weights = _logistic(rows.features[half], rows.penalties, rows.loss[half])
    rest = some_rows(rows, ~half, n=rows.n - rows.n // 2)
    risk = rest.features @ weights
    count = _longest(_spent(rest, risk) <= alpha * rest.n)
    return _before(rest, risk, count, queries, queries.features @ weights)


def some_rows(rows: RuleRows, chosen: Bools | Indices, *, n: int) -> RuleRows:
    """Return some of the rows, as those of a sample of n."""
    return RuleRows(
        margin=rows.margin[chosen],
        u=rows.u[chosen],
        loss=rows.loss[chosen],
        net=None if rows.net is None else rows.net[chosen],
        features=rows.features[chosen],
        penalties=rows.penalties,
        n=n,
    )


def _logistic(features: Floats, penalties: Floats, loss: Floats) -> Floats:
    """Fit a penalised logistic regression by Newton's steps."""
    penalty = np.diag(_LOGISTIC_PENALTY * penalties)
    weights = np.zeros(features.shape[1])
    for _ in range(_ITERATIONS):
        chance = 1 / (1 + np.exp(-np.clip(features @ weights, -30, 30)))
        slope = features.T @ (chance - loss) + penalty @ weights
        curvature = (features * (chance * (1 - chance))[:, None]).T @ features + penalty
        step = np.linalg.solve(curvature, slope)
        weights = weights - step
        if np.abs(step).max() < 1e-8:
            break
    return weights


def ucci_like(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Fit the loss as a monotone function of the margin, and keep whole blocks while their mean loss is within alpha."""
    margins, where = np.unique(rows.margin, return_inverse=True)
    size, loss = np.bincount(where)[::-1].astype(float), np.bincount(where, rows.loss)[::-1]
    blocks: list[list[float]] = []  # losses, rows, smallest margin; the largest margins come first
    for lost, count, margin in zip(loss.tolist(), size.tolist(), margins[::-1].tolist(), strict=True):
        blocks.append([lost, count, margin])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] >= blocks[-1][0] * blocks[-2][1]:
            last = blocks.pop()
            blocks[-1] = [blocks[-1][0] + last[0], blocks[-1][1] + last[1], last[2]]
    spent, least = 0.0, np.inf
    for lost, _, margin in blocks:
        spent += lost
        if spent > alpha * rows.n:
            break
        least = margin
    return queries.margin >= least


@cache
def _limit(n: int, alpha: float) -> int:
    return binomial_limit(n, alpha, DELTA)


def _limits(n: int, alpha: float) -> Floats:
    """Return, for 1 to n rows, the most losses that reject a rate of alpha or more."""
    return np.array([_limit(k, alpha) for k in range(1, n + 1)], dtype=np.float64)


@_by_margin
def gate_marginal(rows: RuleRows, alpha: float) -> int:
    """Keep the longest prefix whose Clopper-Pearson bound on the mean loss over all rows is within alpha."""
    return _longest(_spent(rows) <= _limit(rows.n, alpha))


@_by_margin
def gate_among_kept(rows: RuleRows, alpha: float) -> int:
    """Do the same with the bound on the mean loss among the rows kept."""
    return _longest(_spent(rows) <= _limits(len(rows.loss), alpha))


def _fixed_sequence(rows: RuleRows, passes: Bools, first: int) -> int:
    """Return the rows kept by tests in a fixed sequence of sizes, up to the first that fails."""
    sizes = np.arange(first, len(passes) + 1, max(10, rows.n // 50))
    tested = passes[sizes - 1]
    done = _unbroken(tested)
    return int(sizes[done - 1]) if done else 0


def cse_among_kept(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Test the rate among kept rows in a fixed sequence of thresholds, from the smallest set that can pass."""
    limits = _limits(len(rows.loss), alpha)
    if not (limits >= 0).any():  # also where no row has a top action that leads
        return np.zeros(len(queries.margin), np.bool_)
    passes = _spent(rows) <= limits
    count = _fixed_sequence(rows, passes, int(np.argmax(limits >= 0)) + 1)
    return _before(rows, -rows.margin, count, queries, -queries.margin)


@_by_margin
def cse_marginal(rows: RuleRows, alpha: float) -> int:
    """Test the mean loss over all rows in the same sequence."""
    return _fixed_sequence(rows, _spent(rows) <= _limit(rows.n, alpha), 1)


@_by_margin
def c3po_like(rows: RuleRows, alpha: float) -> int:
    """Bound the Guardian's share by a conformal quantile, at the share that our rule has on the rows."""
    ours = _unbroken(_spent(rows) <= alpha * (rows.n + 1) - 1)
    return int(np.ceil((rows.n + 1) * ours / rows.n))


def crc_on_a_grid(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Run conformal risk control over relaxations 0, 0.01, ..., 1: the paper's rule, and MAPIE's."""
    totals = np.array([rows.loss[rows.margin > point].sum() for point in _GRID])
    within = totals + 1 <= alpha * (rows.n + 1) + 1e-9
    if not within.any():
        return np.zeros(len(queries.margin), np.bool_)
    return queries.margin > _GRID[np.argmax(within)]


def ours_margin(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Run exact conformal risk control on the margin, ties told apart by draws."""
    count = _unbroken(_spent(rows) + 1 <= alpha * (rows.n + 1) + 1e-9)
    return _kept_if_affordable(rows, queries, alpha, count)


def ours_net(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Do the same with gains counted, up to the first passage."""
    net = rows.loss if rows.net is None else rows.net
    spent = np.cumsum(net[_by_risk(-rows.margin, rows.u)])
    return _kept_if_affordable(rows, queries, alpha, _unbroken(spent + 1 <= alpha * (rows.n + 1) + 1e-9))


def _kept_if_affordable(rows: RuleRows, queries: RuleRows, alpha: float, count: int) -> Bools:
    if alpha * (rows.n + 1) < 1:
        return np.zeros(len(queries.margin), np.bool_)
    return _before(rows, -rows.margin, count, queries, -queries.margin)


def ours_auto(rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
    """Score by the leave-one-out ridge or the margin, whichever keeps more rows."""
    loss = rows.loss.astype(np.int64)
    fits = fit_ridges(rows.features, rows.penalties, loss, rows.u, rows.margin, strengths=STRENGTHS)
    budget = spendable_losses(Fraction(repr(alpha)), Fraction(1), rows.n)
    return decide_learned(fits, queries.features, queries.u, queries.margin, budget=budget).kept


_SAME = "nothing: the threshold is fitted to the rows it is judged on"
_EXPECTED = "expected loss at most alpha"
_MARGINAL = f"loss at most alpha with probability {1 - DELTA:g}"
_AMONG = f"loss among kept queries at most alpha with probability {1 - DELTA:g}"

RULES = (
    NamedRule(name="random routing", promise="nothing: the mean loss is estimated", keeps=coin),
    NamedRule(name="RouteLLM-like", promise=_SAME, keeps=routellm_like),
    NamedRule(name="AutoMix-like", promise=_SAME, keeps=automix_like),
    NamedRule(name="FrugalGPT-like, same rows", promise=_SAME, keeps=frugalgpt_like),
    NamedRule(name="FrugalGPT-like, split", promise="nothing: no margin for the sample", keeps=frugalgpt_split),
    NamedRule(name="UCCI-like", promise=_SAME, keeps=ucci_like),
    NamedRule(name="conformal gate", promise=_MARGINAL, keeps=gate_marginal, binary=True, promises_loss=True),
    NamedRule(
        name="conformal gate, among kept", promise=_AMONG, keeps=gate_among_kept, binary=True, promises_loss=True
    ),
    NamedRule(name="CSE", promise=_MARGINAL, keeps=cse_marginal, binary=True, promises_loss=True),
    NamedRule(name="CSE, among kept", promise=_AMONG, keeps=cse_among_kept, binary=True, promises_loss=True),
    NamedRule(name="C3PO-like", promise="share of the Guardian, not the loss", keeps=c3po_like),
    NamedRule(name="CRC on a grid of 0.01", promise=_EXPECTED, keeps=crc_on_a_grid, promises_loss=True),
    NamedRule(name="ours, margin", promise=_EXPECTED, keeps=ours_margin, promises_loss=True),
    NamedRule(name="ours, learned score", promise=_EXPECTED, keeps=ours_auto, binary=True, promises_loss=True),
    NamedRule(name="ours, net loss", promise="expected net loss at most alpha", keeps=ours_net, net=True),
)


# --- compare ---


USUAL_TEST_SIZE = 2000
"""Test rows of a split at most, unless told otherwise: more change the means little and cost time."""
_SURE = 3
"""A mean loss above alpha by more standard errors than this is marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRule:
    """One rule at one budget, over all splits.

    Attributes:
        promise: what it promises.
        loss: mean loss of the test rows; gains do not count.
        net_loss: the same with gains counted; None if outcomes are unknown.
        standard_error: of the mean over splits of the loss that the rule is about.
        over: share of the splits in which that loss lies above alpha.
        deferred: share of queries sent to the Guardian.
        cost_per_1000: dollars per 1000 queries, if costs are known.
        breaks: whether that loss lies above alpha by more than three standard errors.
        promises_loss: whether it promises a limit on the loss in which gains do not count.
    """

    rule: str
    promise: str
    alpha: float
    loss: float
    net_loss: float | None
    standard_error: float
    over: float
    deferred: float
    cost_per_1000: float | None
    breaks: bool
    promises_loss: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleComparison:
    """Rules on one log.

    Attributes:
        source: the log.
        n: its rows.
        splits: random splits.
        calibration_size: rows to calibrate on in each.
        test_size: rows to test on in each.
        seed: of the splits.
        rules: every rule at every budget.
        left_out: rules that do not fit this log, with the reason.
    """

    source: str
    n: int
    splits: int
    calibration_size: int
    test_size: int
    seed: int
    rules: tuple[ComparedRule, ...]
    left_out: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as a JSON document."""
        return asdict(self)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows for people; an asterisk marks a broken budget."""
        header = ["rule", "alpha", "loss", "splits over alpha", "net loss", "sent to the Guardian"]
        priced = any(rule.cost_per_1000 is not None for rule in self.rules)
        rows = [_cells(rule, priced=priced) for rule in self.rules]
        return [*header, "$ per 1000"] if priced else header, rows

    def plot(self, ax: "Axes | str | Path | None" = None, *, alpha: float | None = None) -> "Axes":
        """Draw how often each rule asks the Guardian, with its loss; needs matplotlib.

        Args:
            ax: as for `Frontier.plot`.
            alpha: which budget to draw; by default the first.
        """
        from conformal_arbitrage.evaluation.show import draw_comparison, plotted

        return plotted(ax, lambda axes: draw_comparison(axes, self, self.rules[0].alpha if alpha is None else alpha))

    def __repr__(self) -> str:
        names = len({rule.rule for rule in self.rules})
        return f"RuleComparison(source={self.source!r}, rules={names}, splits={self.splits}, n={self.n})"

    def _repr_html_(self) -> str:
        header, rows = self.table()
        return html_table(rows, header=header) + "".join(html_paragraph(line) for line in self.notes())

    def notes(self) -> list[str]:
        """Return what the figures mean, and what each rule promises, line by line."""
        broken = any(rule.breaks for rule in self.rules)
        return [
            *(["*: the mean loss is above alpha by more than three standard errors."] if broken else []),
            "Splits over alpha: the share of splits whose test rows lose more than alpha on average. For a rule that limits "
            "the expected loss that may be about half of them; for one that limits it with probability 0.9, about a tenth.",
            *self._least_asking_lines(),
            *self.promises(),
            *(f"{name}: left out, {reason}." for name, reason in self.left_out.items()),
        ]

    def least_asking(self, alpha: float) -> ComparedRule | None:
        """Return the rule that asks the Guardian least among those that promise the loss and keep it here.

        Args:
            alpha: which budget.

        Returns:
            None if no rule does both. Rules that promise the net loss, or nothing, are not considered.
        """
        keeping = [rule for rule in self.rules if rule.alpha == alpha and rule.promises_loss and not rule.breaks]
        return min(keeping, key=lambda rule: rule.deferred, default=None)

    def _least_asking_lines(self) -> list[str]:
        least = [self.least_asking(alpha) for alpha in dict.fromkeys(rule.alpha for rule in self.rules)]
        return [
            f"At alpha {rule.alpha:g}, among the rules that promise the loss and keep it here, {rule.rule!r} asks the "
            f"Guardian least ({100 * rule.deferred:.1f} %)."
            for rule in least
            if rule is not None
        ]

    def promises(self) -> list[str]:
        """Return what each rule promises, line by line."""
        return [f"{name}: promises {promise}." for name, promise in {r.rule: r.promise for r in self.rules}.items()]


def _cells(rule: ComparedRule, *, priced: bool) -> list[str]:
    cells = [
        rule.rule,
        f"{rule.alpha:g}",
        f"{rule.loss:.4f}{'*' if rule.breaks else ''}",
        f"{rule.over:.2f}",
        "-" if rule.net_loss is None else f"{rule.net_loss:.4f}",
        f"{100 * rule.deferred:.1f} %",
    ]
    if priced:
        cells.append("-" if rule.cost_per_1000 is None else f"{rule.cost_per_1000:.4g}")
    return cells


def compare(
    log: ScoreLog,
    alphas: Sequence[Number],
    *,
    calibration_size: int = 400,
    test_size: int | None = None,
    splits: int = 200,
    seed: int = 0,
    menu_size: int | None = None,
    rules: Sequence[NamedRule] = RULES,
    progress: "Callable[[str], None] | None" = None,
    costs: CostOptions | None = None,
    **keywords: Unpack[CostKeywords],
) -> RuleComparison:
    """Compare decision rules on one log: how often each asks the Guardian, and whether it keeps the budget.

    Args:
        log: the recorded scores.
        alphas: the risk budgets.
        calibration_size: rows that a rule learns or calibrates on, in each split.
        test_size: other rows to judge it on; by default all of them, 2000 at most.
        splits: number of random splits.
        seed: of the splits.
        menu_size: the number of actions of every query, if it is always the same; learned scores then use the
            probability of each action.
        rules: those to compare; by default all that need only the log.
        progress: called with a line now and then.
        costs: what the models cost; or pass the fields of `CostOptions` as keywords.
        **keywords: the fields of `costs`, one by one.
    """
    prices = costs_of(log, resolve_options(costs, CostOptions, keywords, name="costs"))
    budgets = [float(as_fraction(alpha, name="alpha")) for alpha in alphas]
    if not budgets or not all(0 < alpha < 1 for alpha in budgets):
        raise OptionError(f"every alpha must lie above 0 and below 1; got {list(alphas)!r}")
    if splits < 1:
        raise OptionError(f"splits must be 1 or more; got {splits}")
    _refuse_incomparable(log, calibration_size)
    rng, rows = np.random.default_rng(seed), _rows(log, menu_size)
    size = min(len(log) - calibration_size, USUAL_TEST_SIZE) if test_size is None else test_size
    parts = draw_splits(len(log), calibration_size=calibration_size, test_size=size, trials=splits, rng=rng)
    rules, left_out = _applicable(rows, rules)
    figures = _all_splits(rows, rules, budgets, parts, prices, rng, progress)
    return RuleComparison(
        source=log.source, n=len(log), splits=splits, calibration_size=calibration_size, test_size=size, seed=seed,
        rules=tuple(
            _summary(rule, alpha, figures[i, k], rows.net is not None, prices)
            for k, alpha in enumerate(budgets)
            for i, rule in enumerate(rules)
        ),
        left_out=left_out,
    )  # fmt: skip


def _refuse_incomparable(log: ScoreLog, calibration_size: int) -> None:
    refuse_unfit(log.source, log.extra)
    refuse_floor(log)
    if log.unknown_loss.any():
        raise OptionError(f"{log.source}: {n_rows(int(log.unknown_loss.sum()))} without a loss; compare complete rows")
    if calibration_size >= len(log):
        raise OptionError(
            f"{log.source}: {n_rows(calibration_size, 'to calibrate on leaves', 'to calibrate on leave')} none of its "
            f"{len(log)} to test on; give a smaller calibration size (--calibration-size), or a log with more rows"
        )


def _all_splits(
    rows: RuleRows,
    rules: Sequence[NamedRule],
    budgets: Sequence[float],
    splits: Sequence[Split],
    prices: Costs | None,
    rng: np.random.Generator,
    progress: "Callable[[str], None] | None",
) -> Floats:
    """Return the figures of all splits, each with draws of its own: rules x budgets x splits x 4."""
    seeds = rng.integers(2**63, size=len(splits))

    def one(t: int) -> Floats:
        drawn = replace(rows, u=np.random.default_rng(seeds[t]).random(len(rows.margin)))
        return _one_split(drawn, rules, budgets, *splits[t], prices)

    figures = np.empty((len(rules), len(budgets), len(splits), 4))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the work is in NumPy, which lets other threads run
        for t, measured in enumerate(pool.map(one, range(len(splits)))):
            figures[:, :, t] = measured
            if progress is not None and (t + 1) % max(1, len(splits) // 10) == 0:
                progress(f"{t + 1} of {len(splits)} splits")
    return figures


def _rows(log: ScoreLog, menu_size: int | None) -> RuleRows:
    """Return all rows of a log as rules see them, those tied at the top with no loss: every rule defers them."""
    top, margin, loss = primary_alone(log)
    if not within_unit(log.loss_scores):
        where = first_outside(log.loss_scores, log.offsets, log.source)
        raise OptionError(f"{where}: compare needs losses in [0, 1]; divide the Guardian's scores by their range")
    grades = log.outcome("correct") if "correct" in log.outcome_names else None
    net = None if grades is None or not within_unit(grades) else net_losses(log, grades)
    if net is not None and np.isnan(net).any():
        net = None
    features = FeatureSet(menu_size=menu_size, groups=_groups(log))
    if menu_size is not None and (log.sizes != menu_size).any():
        raise OptionError(f"{log.source}: menu_size={menu_size}, but some rows have other sizes; leave it out")
    described = FeatureRows(
        margin=margin,
        top=top,
        scores=None if menu_size is None else log.primary.reshape(-1, menu_size),
        group=None if log.group is None else [str(name) for name in log.group],
    )
    return RuleRows(
        margin=margin,
        u=np.zeros(len(log)),
        loss=np.where(margin > 0, loss, 0.0),
        net=None if net is None else np.where(margin > 0, net, 0.0),
        features=feature_matrix(features, described),
        penalties=features.penalties(),
        n=len(log),
    )


def _groups(log: ScoreLog) -> tuple[str, ...]:
    return () if log.group is None else tuple(sorted({str(name) for name in log.group}))


def _applicable(rows: RuleRows, rules: Sequence[NamedRule]) -> tuple[list[NamedRule], dict[str, str]]:
    """Return the rules that fit these rows, and why the others do not."""
    binary = bool(((rows.loss == 0) | (rows.loss == 1)).all())
    chosen: list[NamedRule] = []
    left_out: dict[str, str] = {}
    for rule in rules:
        if rule.binary and not binary:
            left_out[rule.name] = "it needs losses of 0 or 1 (binarize the log)"
        elif rule.net and rows.net is None:
            left_out[rule.name] = "it needs to know which answers were right"
        else:
            chosen.append(rule)
    return chosen, left_out


def _one_split(
    rows: RuleRows,
    rules: Sequence[NamedRule],
    budgets: Sequence[float],
    calibration: Indices,
    test: Indices,
    prices: Costs | None,
) -> Floats:
    """Return loss, net loss, Guardian share and cost of every rule at every budget."""
    fixed = some_rows(rows, calibration[rows.margin[calibration] > 0], n=len(calibration))
    open_rows = test[rows.margin[test] > 0]
    queries = some_rows(rows, open_rows, n=len(test))
    unpriced = np.zeros(len(rows.margin))
    primary, guardian = (unpriced, unpriced) if prices is None else (prices.primary, prices.guardian.full())
    figures = np.empty((len(rules), len(budgets), 4))
    for i, rule in enumerate(rules):
        for k, alpha in enumerate(budgets):
            kept = open_rows[rule.keeps(fixed, queries, alpha)]
            net = 0.0 if rows.net is None else rows.net[kept].sum()
            spent = primary[test].sum() + guardian[test].sum() - guardian[kept].sum()
            figures[i, k] = rows.loss[kept].sum(), net, len(test) - len(kept), spent
    return figures / len(test)


def _summary(rule: NamedRule, alpha: float, figures: Floats, has_net: bool, prices: Costs | None) -> ComparedRule:
    loss, net, deferred, cost = figures.T
    about = net if rule.net else loss
    error = float(about.std(ddof=1) / len(about) ** 0.5) if len(about) > 1 else 0.0
    return ComparedRule(
        rule=rule.name,
        promise=rule.promise,
        alpha=alpha,
        loss=float(loss.mean()),
        net_loss=float(net.mean()) if has_net else None,
        standard_error=error,
        over=float((about > alpha).mean()),
        deferred=float(deferred.mean()),
        cost_per_1000=None if prices is None else 1000 * float(cost.mean()),
        breaks=bool(about.mean() > alpha + _SURE * error),
        promises_loss=rule.promises_loss,
    )
