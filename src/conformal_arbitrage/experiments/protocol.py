"""What the experiments share: where scores come from, the paper's protocol, and its rule beside ours.

Everything here goes through the public API: ScoreLog and evaluate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conformal_arbitrage.errors import SourceError
from conformal_arbitrage.evaluation.frontier import Frontier, FrontierPoint, evaluate
from conformal_arbitrage.experiments.paper import SET_SIZES, TABLES
from conformal_arbitrage.experiments.report import Cell, Figure, Report, Table
from conformal_arbitrage.scorelog.log import ScoreLog

Part = Literal["truthfulqa", "truthfulqa-stronger", "mmlu", "pku"]
TRIALS = 30
ALPHAS = (0.25, 0.20, 0.15, 0.10, 0.05)
PAPER_RULE: Mapping[str, Any] = {"guardian_sees": "candidates", "boundary": "include", "grid": 0.01}
ASSUMED_COSTS = (1.0, 20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where an experiment's scores come from.

    Attributes:
        title: the first line of its report.
        read: the scores on one of the paper's datasets, or what stands in for it; "truthfulqa-stronger" has the second,
            stronger Primary.
        bundled: whether it is the log that comes with the package.
        costs: dollars for asking Primary and Guardian, if stated.
        spent: what getting the scores cost, in words; None for recorded ones.
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
    """The paper's calibration size where the log is as large as the paper's, else in proportion; and how to say so."""
    if n >= total:
        return calibration, f"{calibration} rows to calibrate, the other {n - calibration} to test"
    scaled = max(1, round(n * calibration / total))
    return (
        scaled,
        f"scaled to {n} rows: {scaled} to calibrate (the paper: {calibration} of {total}), {n - scaled} to test",
    )


def with_costs(log: ScoreLog, source: Source) -> tuple[dict[str, float], str]:
    """Options for `evaluate`: costs as stated, else the log's own, else assumed; and how to say so."""
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
    """The log with the paper's 0/1 Guardian where it has labels; a router's scores already are regret."""
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
    """Mean and standard deviation of one figure."""
    summary = point.summary(name)
    mean = summary.get("mean")
    return None if mean is None else (mean, summary.get("std"))


_COLUMNS = ("policy", "alpha", "accuracy", "cost per 1000", "relaxation", "delta", "Guardian share", "loss")
_DECIMALS = (0, 3, 3, 3, 3, 3, 3, 3)
_FIGURES = ("correct", "cost_per_1000", "relaxation", "delta", "deferred", "loss")


def our_table(frontier: Frontier, title: str, *, name: str = "ours", y: str = "correct") -> Table:
    """A frontier in the shape of the paper's tables."""
    figures = (y, *_FIGURES[1:])
    shown = [*frontier.of("primary"), *frontier.of("conformal"), *frontier.of("guardian")]
    rows = tuple((p.policy, p.alpha, *(cell(p, figure) for figure in figures)) for p in shown)
    return Table(name=name, title=title, columns=_COLUMNS, rows=rows, decimals=_DECIMALS)


def paper_table(label: str) -> Table:
    """The paper's own table."""
    columns = (*_COLUMNS[:-1],) if label != "tab:pku_main" else (*_COLUMNS[:3], "severity loss", *_COLUMNS[4:-1])
    return Table(
        name=label,
        title=f"The paper's {label}",
        columns=columns,
        rows=tuple(tuple(row) for row in TABLES[label]),
        decimals=_DECIMALS[:-1],
        note="Its own models, prices and data: compare shapes, not levels; its spread is not one over test splits.",
    )


def set_size_table(frontier: Frontier) -> Table:
    """Candidates by alpha, ours and the paper's."""
    points = frontier.of("conformal")
    rows = tuple((p.alpha, cell(p, "relaxation"), cell(p, "candidates"), SET_SIZES[p.alpha or 0]) for p in points)
    columns = ("alpha", "relaxation", "candidates", "the paper's candidates (tab:truqa_unrestricted_cal)")
    return Table(name="set sizes", title="Size of the candidate set", columns=columns, rows=rows, decimals=(2, 3, 3, 3))


RULES: Mapping[str, Mapping[str, Any]] = {
    "the paper's rule": PAPER_RULE,
    "exact": {},
    "own loss": {"guardian_sees": "all"},
    "own loss, random boundary": {"guardian_sees": "all", "boundary": "random"},
}


def rules_table(
    log: ScoreLog, alphas: Sequence[float], paper_rule: Mapping[str, Any] = PAPER_RULE, **sweep: Any
) -> Table:
    """The paper's rule beside ours, on the same splits."""
    rows: list[tuple[Cell, ...]] = []
    y = str(sweep.get("delta_of", "correct"))
    for name, rule in RULES.items():
        if rule.get("boundary") == "random" and log.id is None:
            continue
        found = evaluate(log, alphas, **(dict(paper_rule) if rule is PAPER_RULE else dict(rule)), **sweep)
        figures = ("deferred", "cost_per_1000", "delta", y, "loss")
        rows += [(name, p.alpha, *(cell(p, figure) for figure in figures)) for p in found.of("conformal")]
    columns = ("rule", "alpha", "Guardian share", "cost per 1000", "delta", "accuracy", "loss")
    return Table(
        name="rules",
        title="The paper's rule beside ours, on the same splits",
        columns=columns,
        rows=tuple(rows),
        decimals=(0, 3, 3, 3, 3, 3, 3),
        note="exact: no grid. own loss: a deferral shows everything and is calibrated so. random boundary: spends the whole "
        "budget on coarse scores.",
    )


def cost_accuracy(
    experiment: tuple[str, str, str],
    source: Source,
    seed: int,
    *,
    calibration: int = 400,
    alphas: Sequence[float] = ALPHAS,
    binarize: bool = True,
    part: Part = "truthfulqa",
    rule: Mapping[str, Any] = PAPER_RULE,
    beside: Mapping[str, Any] | None = None,
) -> Report:
    """The TruthfulQA protocol: calibrate on some rows, test on the rest, 30 times, beside a coin of the same cost.

    Args:
        experiment: name, title and the label of the paper's table.
        source: the scores.
        seed: of the splits.
        calibration: rows to calibrate on, of the paper's 684.
        alphas: the risk budgets.
        binarize: whether the Guardian is made 0/1.
        part: whose scores.
        rule: the rule of the main table.
        beside: a further rule shown in a table of its own.
    """
    name, title, label = experiment
    log, loss = measured(source.read(part), binarize=binarize)
    size, sizes = sized(len(log), calibration, 684)
    costs, said = with_costs(log, source)
    sweep: dict[str, Any] = {"calibration_size": size, "trials": TRIALS, "seed": seed, **costs}
    frontier = evaluate(log, alphas, **rule, **sweep)
    tables = [our_table(frontier, "Here: the paper's rule on a grid of 0.01"), paper_table(label)]
    if beside is not None:
        own = evaluate(log, alphas, **beside, **sweep)
        own_title = "Here: everything shown on a deferral, calibrated on that loss"
        tables += [our_table(own, own_title, name="own loss"), set_size_table(frontier)]
    return Report(
        name=name,
        title=title,
        source=source.title,
        configuration={"trials": TRIALS, "sizes": sizes, "loss": loss, "prices": said, "grid": rule.get("grid")},
        data_sha256=log.sha256(),
        seed=seed,
        tables=(*tables, rules_table(log, alphas, **sweep)),
        figure=Figure(frontier=frontier, x="cost", y="correct"),
        facts={"frontier": frontier},
    )
