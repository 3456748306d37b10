"""What all experiments share: the paper's figures, sources of scores, its protocol, and its rule next to ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from conformal_arbitrage.errors import SourceError
from conformal_arbitrage.evaluation.frontier import Frontier, FrontierPoint, evaluate
from conformal_arbitrage.experiments.report import Cell, Report, ReportTable
from conformal_arbitrage.scorelog.log import ScoreLog

# --- The paper's own figures as data, by the labels of its tables ---


class PaperRow(NamedTuple):
    """One line of a table of the paper; None stands for a dash."""

    policy: str
    alpha: float | None
    accuracy: float
    cost: float
    relaxation: float | None = None
    delta: float | None = None
    guardian_share: float = 0.0


def _table(
    primary: tuple[float, float], guardian: tuple[float, float], *rows: tuple[float, ...]
) -> tuple[PaperRow, ...]:
    conformal = (PaperRow("conformal", *row[:6]) for row in rows)
    return (PaperRow("primary", None, *primary), *conformal, PaperRow("guardian", None, *guardian, None, None, 1.0))


TABLES: dict[str, tuple[PaperRow, ...]] = {
    "tab:truqa_main": _table(
        (0.559, 0.032),
        (0.833, 0.620),
        (0.25, 0.621, 0.188, 0.277, -0.011, 0.277),
        (0.20, 0.672, 0.234, 0.403, +0.019, 0.343),
        (0.15, 0.714, 0.302, 0.529, +0.029, 0.449),
        (0.10, 0.766, 0.407, 0.706, +0.031, 0.621),
        (0.05, 0.806, 0.521, 0.867, +0.016, 0.789),
    ),
    "tab:truqa_appendix_300": _table(
        (0.557, 0.032),
        (0.833, 0.615),
        (0.25, 0.619, 0.184, 0.280, -0.008, 0.273),
        (0.20, 0.667, 0.236, 0.405, +0.016, 0.350),
        (0.15, 0.710, 0.304, 0.542, +0.027, 0.456),
        (0.10, 0.757, 0.394, 0.700, +0.028, 0.603),
        (0.05, 0.801, 0.513, 0.861, +0.018, 0.783),
    ),
    "tab:truqa_appendix_500": _table(
        (0.554, 0.032),
        (0.833, 0.615),
        (0.25, 0.625, 0.184, 0.301, -0.005, 0.273),
        (0.20, 0.672, 0.233, 0.414, +0.020, 0.346),
        (0.15, 0.715, 0.301, 0.563, +0.031, 0.451),
        (0.10, 0.765, 0.402, 0.712, +0.032, 0.620),
        (0.05, 0.806, 0.524, 0.881, +0.019, 0.801),
    ),
    "tab:truqa_guardian_scores": _table(
        (0.556, 0.032),
        (0.831, 0.615),
        (0.25, 0.598, 0.163, 0.203, -0.021, 0.240),
        (0.20, 0.661, 0.222, 0.394, +0.014, 0.328),
        (0.15, 0.714, 0.304, 0.558, +0.029, 0.456),
        (0.10, 0.771, 0.414, 0.741, +0.032, 0.631),
        (0.05, 0.813, 0.554, 0.917, +0.013, 0.848),
    ),
    "tab:truqa_appendix_d": _table(
        (0.559, 0.032),
        (0.833, 0.620),
        (0.25, 0.687, 0.206, 0.277, +0.046, 0.277),
        (0.20, 0.713, 0.247, 0.403, +0.052, 0.343),
        (0.15, 0.741, 0.313, 0.529, +0.050, 0.449),
        (0.10, 0.785, 0.421, 0.706, +0.043, 0.621),
        (0.05, 0.812, 0.525, 0.867, +0.020, 0.789),
    ),
    "tab:truqa_model_ablation": _table(
        (0.7738, 0.126),
        (0.8328, 0.615),
        (0.050, 0.8156, 0.265, 0.452, +0.021, 0.239),
        (0.025, 0.8345, 0.375, 0.669, +0.026, 0.412),
    ),
    "tab:mmlu_restricted": _table(
        (0.591, 0.035),
        (0.828, 0.676),
        (0.25, 0.618, 0.111, 0.126, -0.005, 0.130),
        (0.20, 0.663, 0.194, 0.423, +0.011, 0.245),
        (0.15, 0.706, 0.317, 0.651, +0.008, 0.429),
        (0.10, 0.753, 0.416, 0.771, +0.018, 0.558),
        (0.05, 0.802, 0.624, 0.924, -0.005, 0.869),
    ),
    "tab:pku_main": _table(
        (0.519, 0.676),
        (0.156, 0.000),
        (0.60, 0.475, 0.571, 0.206, +0.012, 0.190),
        (0.50, 0.443, 0.482, 0.354, +0.028, 0.356),
        (0.40, 0.393, 0.379, 0.495, +0.033, 0.518),
        (0.30, 0.325, 0.245, 0.619, +0.037, 0.717),
        (0.20, 0.270, 0.161, 0.681, +0.028, 0.822),
        (0.10, 0.214, 0.080, 0.777, +0.015, 0.918),
    ),
}

SET_SIZES = {0.25: 1.457, 0.20: 1.801, 0.15: 2.105, 0.10: 2.587, 0.05: 3.253}
"""tab:truqa_unrestricted_cal: mean number of candidates by alpha."""


def row_at(label: str, alpha: float) -> PaperRow:
    """Return the line of a table at one alpha."""
    return next(row for row in TABLES[label] if row.alpha == alpha)


# --- The part that all experiments share ---


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
    "exact": {"guardian_sees": "candidates", "boundary": "include"},
    "own loss": {"guardian_sees": "all", "boundary": "include"},
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
