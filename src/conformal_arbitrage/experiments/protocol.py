"""The part that all experiments share: sources of scores, the paper's protocol, and its rule next to ours.

Uses the public API only: ScoreLog and evaluate. Knows nothing of single experiments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conformal_arbitrage.errors import SourceError
from conformal_arbitrage.evaluation.frontier import Frontier, FrontierPoint, evaluate
from conformal_arbitrage.experiments.paper import SET_SIZES, TABLES
from conformal_arbitrage.experiments.report import Cell, Report, ReportTable
from conformal_arbitrage.scorelog.log import ScoreLog

Part = Literal["truthfulqa", "truthfulqa-stronger", "mmlu", "pku"]
TRIALS = 30
ALPHAS = (0.25, 0.20, 0.15, 0.10, 0.05)
PAPER_RULE: Mapping[str, Any] = {"guardian_sees": "candidates", "boundary": "include", "grid": 0.01}
ASSUMED_COSTS = (1.0, 20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where an experiment gets its scores.

    Attributes:
        title: the first line of its report.
        read: returns the scores on one of the paper's datasets, or on its substitute; "truthfulqa-stronger" has the
            second, stronger Primary.
        bundled: whether it is the log that ships with the package.
        costs: dollars per query of Primary and Guardian, if stated.
        spent: returns the money spent on the scores, in words; None for recorded ones.
    """

    title: str
    read: Callable[[Part], ScoreLog]
    bundled: bool = False
    costs: tuple[float, float] | None = None
    spent: Callable[[], str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One experiment of the paper."""

    name: str
    title: str
    run: Callable[[Source, int], Report]


def sized(n: int, calibration: int, total: int) -> tuple[int, str]:
    """Return the paper's calibration size, scaled down for a log smaller than the paper's, and a description."""
    if n >= total:
        return calibration, f"{calibration} rows to calibrate, the other {n - calibration} to test"
    scaled = max(1, round(n * calibration / total))
    return (
        scaled,
        f"scaled to {n} rows: {scaled} to calibrate (the paper: {calibration} of {total}), {n - scaled} to test",
    )


def with_costs(log: ScoreLog, source: Source) -> tuple[dict[str, float], str]:
    """Return cost options for `evaluate` (as stated, else the log's own, else assumed), and a description."""
    if source.costs is not None:
        primary, guardian = source.costs
        return {
            "primary_cost": primary,
            "guardian_cost": guardian,
        }, f"{primary:g} and {guardian:g} dollars a query, as stated"
    if log.primary_usage.cost is not None and log.guardian_usage.cost is not None:
        return {}, "as recorded in the log"
    primary, guardian = ASSUMED_COSTS
    return {"primary_cost": primary, "guardian_cost": guardian}, f"assumed, {primary:g} and {guardian:g} a query"


def measured(log: ScoreLog, *, binarize: bool = True) -> tuple[ScoreLog, str]:
    """Return the log with the paper's 0/1 Guardian, unless it is in router form, and a description."""
    if "correct" not in log.outcome_names:
        raise SourceError(
            f"{log.source}: accuracy needs the right answers; give a log with a `label` or `correct` column"
        )
    if log.is_router:
        return log, "router form: scores already are regret, not binarised"
    if not binarize:
        return log, "raw Guardian scores"
    return log.binarized(), "Guardian binarised: 1 on its top answer if that is right"


def cell(point: FrontierPoint, name: str) -> Cell:
    """Return mean and standard deviation of one figure."""
    summary = point.summary(name)
    mean = summary.get("mean")
    return None if mean is None else (mean, summary.get("std"))


_COLUMNS = ("policy", "alpha", "accuracy", "cost per 1000", "relaxation", "delta", "Guardian share", "loss")
_DECIMALS = (0, 3, 3, 3, 3, 3, 3, 3)
_FIGURES = ("correct", "cost_per_1000", "relaxation", "delta", "deferred", "loss")


def our_table(frontier: Frontier, title: str, *, name: str = "ours", y: str = "correct") -> ReportTable:
    """Return a frontier in the layout of the paper's tables."""
    figures = (y, *_FIGURES[1:])
    shown = [*frontier.of("primary"), *frontier.of("conformal"), *frontier.of("guardian")]
    rows = tuple((p.policy, p.alpha, *(cell(p, figure) for figure in figures)) for p in shown)
    return ReportTable(name=name, title=title, columns=_COLUMNS, rows=rows, decimals=_DECIMALS)


def paper_table(label: str) -> ReportTable:
    """Return the paper's own table."""
    columns = (*_COLUMNS[:-1],) if label != "tab:pku_main" else (*_COLUMNS[:3], "severity loss", *_COLUMNS[4:-1])
    return ReportTable(
        name=label,
        title=f"The paper's {label}",
        columns=columns,
        rows=tuple(tuple(row) for row in TABLES[label]),
        decimals=_DECIMALS[:-1],
        note="The paper's own models, prices and data: compare shapes, not levels; its spread is not over test splits.",
    )


def set_size_table(frontier: Frontier) -> ReportTable:
    """Return the number of candidates by alpha, ours and the paper's."""
    points = frontier.of("conformal")
    rows = tuple((p.alpha, cell(p, "relaxation"), cell(p, "candidates"), SET_SIZES[p.alpha or 0]) for p in points)
    columns = ("alpha", "relaxation", "candidates", "the paper's candidates (tab:truqa_unrestricted_cal)")
    title = "Size of the candidate set"
    return ReportTable(name="set sizes", title=title, columns=columns, rows=rows, decimals=(2, 3, 3, 3))


RULES: Mapping[str, Mapping[str, Any]] = {
    "the paper's rule": PAPER_RULE,
    "exact": {"guardian_sees": "candidates"},
    "own loss": {"guardian_sees": "all"},
    "own loss, random boundary": {"guardian_sees": "all", "boundary": "random"},
}


def rules_table(
    log: ScoreLog, alphas: Sequence[float], paper_rule: Mapping[str, Any] = PAPER_RULE, **sweep: Any
) -> ReportTable:
    """Compare the paper's rule with ours on the same splits."""
    rows: list[tuple[Cell, ...]] = []
    y = str(sweep.get("delta_of", "correct"))
    for name, rule in RULES.items():
        if rule.get("boundary") == "random" and log.id is None:
            continue
        frontier = evaluate(log, alphas, **(dict(paper_rule) if rule is PAPER_RULE else dict(rule)), **sweep)
        figures = ("deferred", "cost_per_1000", "delta", y, "loss")
        rows += [(name, p.alpha, *(cell(p, figure) for figure in figures)) for p in frontier.of("conformal")]
    columns = ("rule", "alpha", "Guardian share", "cost per 1000", "delta", "accuracy", "loss")
    return ReportTable(
        name="rules",
        title="The paper's rule beside ours, on the same splits",
        columns=columns,
        rows=tuple(rows),
        decimals=(0, 3, 3, 3, 3, 3, 3),
        note="exact: no grid. own loss: a deferral shows every action, and the loss is calibrated accordingly. random "
        "boundary: spends the whole budget on coarse scores.",
    )
