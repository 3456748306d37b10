"""compare: peers' decision rules and ours on one log, over many random splits.

Every rule gets the same calibration rows, the same test rows and the same draws. Knows nothing of terminals.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from conformal_arbitrage.calibration.notebook import html_paragraph, html_table
from conformal_arbitrage.calibration.options import resolve_options
from conformal_arbitrage.core.arrays import Floats, Indices
from conformal_arbitrage.core.features import FeatureRows, FeatureSet, feature_matrix
from conformal_arbitrage.core.losses import Number, as_fraction, net_losses, within_unit
from conformal_arbitrage.core.trials import Split, draw_splits
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.evaluation.costs import CostKeywords, CostOptions, Costs, costs_of
from conformal_arbitrage.evaluation.inspection import primary_alone
from conformal_arbitrage.evaluation.rules import RULES, NamedRule, RuleRows, some_rows
from conformal_arbitrage.scorelog.fitness import refuse_unfit
from conformal_arbitrage.scorelog.log import ScoreLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

USUAL_TEST_SIZE = 2000
"""Test rows of a split at most, unless told otherwise: more change the means little and cost time."""
_SURE = 3
"""A mean loss above alpha by more standard errors than this is marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRule:
    """One rule at one budget, over all splits.

    Attributes:
        rule: its name.
        promise: what it promises.
        alpha: the risk budget.
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

    def plot(self, ax: "Axes | None" = None, *, alpha: float | None = None) -> "Axes":
        """Draw the loss of each rule against its Guardian share; needs matplotlib.

        Args:
            ax: the axes to draw on; a new figure if None.
            alpha: which budget to draw; by default the first.
        """
        from conformal_arbitrage.evaluation.figures import draw_comparison, new_axes

        return draw_comparison(new_axes() if ax is None else ax, self, self.rules[0].alpha if alpha is None else alpha)

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
    refuse_unfit(log)
    prices = costs_of(log, resolve_options(costs, CostOptions, keywords, name="costs"))
    budgets = [float(as_fraction(alpha, name="alpha")) for alpha in alphas]
    if not budgets or not all(0 < alpha < 1 for alpha in budgets):
        raise OptionError(f"every alpha must lie above 0 and below 1; got {list(alphas)!r}")
    if log.unknown_loss.any():
        raise OptionError(f"{log.source}: {int(log.unknown_loss.sum())} rows have no known loss; compare complete rows")
    if splits < 1:
        raise OptionError(f"splits must be 1 or more; got {splits}")
    rng = np.random.default_rng(seed)
    rest = len(log) - calibration_size
    if rest < 1:
        raise OptionError(
            f"{log.source}: {calibration_size} rows to calibrate on leave none of its {len(log)} to test on; give a smaller "
            "calibration size (--calibration-size), or a log with more rows"
        )
    rows = _rows(log, menu_size)
    size = min(rest, USUAL_TEST_SIZE) if test_size is None else test_size
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
        raise OptionError(f"{log.source}: compare needs losses in [0, 1]; divide the Guardian's scores by their range")
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
