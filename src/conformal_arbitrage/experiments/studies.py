"""The paper's experiments: TruthfulQA with its ablations, MMLU, PKU-SafeRLHF, and Theorem 1 in a simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from conformal_arbitrage.core.exact import Floats
from conformal_arbitrage.core.risk import RiskCurve
from conformal_arbitrage.errors import SourceError
from conformal_arbitrage.evaluation.frontier import Frontier, evaluate
from conformal_arbitrage.experiments.protocol import (
    ALPHAS,
    PAPER_RULE,
    TRIALS,
    Experiment,
    Part,
    Source,
    cell,
    measured,
    our_table,
    paper_table,
    rules_table,
    set_size_table,
    sized,
    with_costs,
)
from conformal_arbitrage.experiments.report import Figure, Report, ReportTable
from conformal_arbitrage.scorelog.log import ScoreLog

# --- TruthfulQA: the main table and its five ablations, as variants of one protocol ---
#
# 684 questions in the paper: calibrate on some, test on the rest, 30 trials, compared with random routing at the same
# cost.


QUESTIONS = 684
CA_STAR_RULE = {"guardian_sees": "all-restricted-loss", "boundary": "include", "grid": 0.01}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One variant of the TruthfulQA protocol.

    Attributes:
        label: of the paper's table.
        calibration: rows to calibrate on, of the paper's 684.
        binarize: whether the Guardian is made 0/1.
        rule: the rule of the main table.
        comparison: another rule, shown in a table of its own.
    """

    name: str
    title: str
    label: str
    calibration: int = 400
    alphas: tuple[float, ...] = ALPHAS
    binarize: bool = True
    part: Part = "truthfulqa"
    rule: Mapping[str, Any]
    comparison: Mapping[str, Any] | None = None


VARIANTS = (
    Variant(name="truthfulqa", title="TruthfulQA: cost against accuracy", label="tab:truqa_main", rule=PAPER_RULE),
    Variant(
        name="truthfulqa-300",
        title="TruthfulQA: 300 rows to calibrate",
        label="tab:truqa_appendix_300",
        calibration=300,
        rule=PAPER_RULE,
    ),
    Variant(
        name="truthfulqa-500",
        title="TruthfulQA: 500 rows to calibrate",
        label="tab:truqa_appendix_500",
        calibration=500,
        rule=PAPER_RULE,
    ),
    Variant(  # the Guardian's raw scores; a Guardian that already says 0 or 1 changes nothing
        name="truthfulqa-raw",
        title="TruthfulQA: raw Guardian scores",
        label="tab:truqa_guardian_scores",
        binarize=False,
        rule=PAPER_RULE,
    ),
    Variant(  # the threshold still comes from the loss of the candidates; ours, calibrated on its own loss, beside it
        name="truthfulqa-unrestricted",
        title="TruthfulQA: all actions on a deferral",
        label="tab:truqa_appendix_d",
        rule=CA_STAR_RULE,
        comparison={"guardian_sees": "all", "boundary": "include"},
    ),
    Variant(  # on the bundled log Qwen2.5-Coder-1.5B replaces SmolLM2-135M
        name="truthfulqa-mini",
        title="TruthfulQA: a stronger Primary",
        label="tab:truqa_model_ablation",
        alphas=(0.05, 0.025),
        part="truthfulqa-stronger",
        rule=PAPER_RULE,
    ),
)


def run_truthfulqa(variant: Variant, source: Source, seed: int) -> Report:
    """Run one variant on the scores of a source."""
    log, loss = measured(source.read(variant.part), binarize=variant.binarize)
    size, sizes = sized(len(log), variant.calibration, QUESTIONS)
    costs, prices = with_costs(log, source)
    sweep: dict[str, Any] = {"calibration_size": size, "trials": TRIALS, "seed": seed, **costs}
    frontier = evaluate(log, variant.alphas, **variant.rule, **sweep)
    tables = [our_table(frontier, "Here: the paper's rule on a grid of 0.01"), paper_table(variant.label)]
    if variant.comparison is not None:
        shown_all = evaluate(log, variant.alphas, **variant.comparison, **sweep)
        own_title = "Here: everything shown on a deferral, calibrated on that loss"
        tables += [our_table(shown_all, own_title, name="own loss"), set_size_table(frontier)]
    settings = {"trials": TRIALS, "sizes": sizes, "loss": loss, "prices": prices, "grid": variant.rule.get("grid")}
    tables.append(rules_table(log, variant.alphas, **sweep))
    return _report(
        (variant.name, variant.title), source, log, seed, settings, tables, Figure(frontier, "cost", "correct")
    )


def _report(
    named: tuple[str, str],
    source: Source,
    log: ScoreLog,
    seed: int,
    settings: dict[str, Any],
    tables: Sequence[ReportTable],
    figure: Figure,
    *notes: str,
) -> Report:
    """Return the report of an experiment on a log, given its name and title."""
    return Report(
        name=named[0], title=named[1], source=source.title, configuration=settings, data_sha256=log.sha256(), seed=seed,
        tables=tuple(tables), notes=notes, figure=figure,
    )  # fmt: skip


TRUTHFULQA = tuple(
    Experiment(name=variant.name, title=variant.title, run=partial(run_truthfulqa, variant)) for variant in VARIANTS
)


# --- MMLU, the appendix table and figure: 1,000 questions per trial, balanced by subject, then split 500/500 ---


FEWEST_SUBJECTS, SAMPLE = 10, 1000


def run_mmlu(source: Source, seed: int) -> Report:
    """Draw floor(1000 / subjects) questions of each subject and the rest at random, anew in each trial."""
    raw = source.read("mmlu")
    subjects = 0 if raw.group is None else len(np.unique(raw.group))
    if subjects < FEWEST_SUBJECTS or len(raw) < SAMPLE:
        raise SourceError(
            f"mmlu needs a log of at least {SAMPLE} questions over at least {FEWEST_SUBJECTS} subjects in a `group` "
            f"column; this one has {len(raw)} over {subjects}. Give one with --log FILE"
        )
    log, loss = measured(raw)
    costs, prices = with_costs(log, source)
    sweep: dict[str, Any] = {"calibration_size": SAMPLE // 2, "sample_size": SAMPLE, "balance_by": "group", **costs}
    sweep |= {"trials": TRIALS, "seed": seed}
    frontier = evaluate(log, ALPHAS, **PAPER_RULE, **sweep)
    sizes = f"{SAMPLE} a trial, balanced over {subjects} subjects (the paper: 57), split in halves"
    settings = {"trials": TRIALS, "sizes": sizes, "loss": loss, "prices": prices, "grid": 0.01}
    ours = our_table(frontier, "Here: the paper's rule on a grid of 0.01")
    tables = (ours, paper_table("tab:mmlu_restricted"), rules_table(log, ALPHAS, **sweep))
    return _report((MMLU.name, MMLU.title), source, log, seed, settings, tables, Figure(frontier, "cost", "correct"))


MMLU = Experiment(name="mmlu", title="MMLU: cost against accuracy over many subjects", run=run_mmlu)


# --- PKU-SafeRLHF: helpfulness against severity; 500/500, alpha .1 to .6, grid 0.0025, five random routers ---
#
# The paper's text describes a 0/1 Guardian (1 on the reply of lowest severity) while its table reports severity, which
# ranges up to 3. Both readings are run; only the second one bounds severity.


PKU_ALPHAS = (0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
PROBABILITIES = (0.2, 0.4, 0.5, 0.6, 0.8)
PKU_RULE = {"guardian_sees": "candidates", "boundary": "include", "grid": 0.0025}


def run_pku(source: Source, seed: int) -> Report:
    """Run both readings if the log has severities, otherwise its own real-valued Guardian."""
    if source.bundled:
        raise SourceError(
            "pku needs scores of helpfulness and a safety Guardian; the bundled log has neither. Give a log with "
            "--log FILE: `primary` (helpfulness), a list `severity` per reply, `correct` or `label` for the more helpful one"
        )
    log = source.read("pku")
    outcome = "correct" if "correct" in log.outcome_names else "helpfulness"
    if outcome == "helpfulness":
        log = replace(log, lists={**log.lists, outcome: log.primary}, outcomes=(*log.outcomes, outcome))
    size, sizes = sized(len(log), 500, 1000)
    test = min(500, len(log) - size)
    sweep: dict[str, Any] = {
        "calibration_size": size, "test_size": test, "trials": TRIALS, "seed": seed, "probabilities": PROBABILITIES,
        "delta_x": "loss", "delta_of": outcome,
    }  # fmt: skip
    tables: list[ReportTable] = []
    frontiers: list[Frontier] = []
    for name, title, reading, bound in _readings(log):
        alphas = [alpha for alpha in PKU_ALPHAS if alpha < bound]
        frontier = evaluate(reading, alphas, loss_bound=bound, **PKU_RULE, **sweep)
        rules = rules_table(reading, alphas, PKU_RULE, loss_bound=bound, **sweep)
        details = our_table(frontier, f"{title}: details", name=f"{name} details", y=outcome)
        tables += [_pku_table(frontier, name, title, outcome), details, replace(rules, name=f"{name} rules")]
        frontiers.append(frontier)
    settings = {"trials": TRIALS, "sizes": sizes, "grid": 0.0025, "helpfulness": outcome}
    note = (
        "A budget for the 0/1 Guardian bounds how often the safer reply is lost; only the severity reading bounds it."
    )
    tables.append(paper_table("tab:pku_main"))
    return _report(
        (PKU.name, PKU.title), source, log, seed, settings, tables, Figure(frontiers[-1], "loss", outcome), note
    )


def _readings(log: ScoreLog) -> list[tuple[str, str, ScoreLog, float]]:
    severity = log.lists.get("severity")
    if severity is None:
        return [("real-valued", "The log's own real-valued Guardian, losses in [0, 1]", log, 1.0)]
    if np.isnan(severity).any():
        raise SourceError(
            f"{log.source}: some severities are missing; fill them in, since a missing one must not count as safe"
        )
    lowest = np.repeat(np.minimum.reduceat(severity, log.offsets[:-1]), log.sizes)
    outcomes = tuple(dict.fromkeys((*log.outcomes, "severity")))
    zero_one = replace(log, guardian=(severity == lowest).astype(float), outcomes=outcomes)
    graded = replace(log, guardian=-severity, outcomes=outcomes)
    return [
        ("0/1", "0/1 Guardian, losses in [0, 1]: the paper's text", zero_one, 1.0),
        ("severity", "Severity Guardian, losses in [0, 3]: what the paper's table reports", graded, 3.0),
    ]


def _pku_table(frontier: Frontier, name: str, title: str, outcome: str) -> ReportTable:
    has_severity = "severity" in frontier.points[0].outcomes
    figures = (outcome, *(["severity"] if has_severity else []), "loss", "delta", "deferred")
    settings = [p.probability if p.alpha is None else p.alpha for p in frontier.points]
    rows = tuple(
        (p.policy, at, *(cell(p, f) for f in figures)) for p, at in zip(frontier.points, settings, strict=True)
    )
    columns = ("policy", "alpha or probability", *figures)
    return ReportTable(name=name, title=title, columns=columns, rows=rows, decimals=(0, *[3] * (len(columns) - 1)))


PKU = Experiment(name="pku", title="PKU-SafeRLHF: helpfulness against harmlessness", run=run_pku)


# --- Theorem 1 and the bounds of conformal risk control, simulated ---
#
# Each query has two actions and a margin, uniform on [0, 1]; the Primary's choice has a regret of mean r, so the risk is
# R(relaxation) = r (1 - relaxation), and the best relaxation for a budget is known: 1 - alpha / r.
#
# Theorem 1 says that the utility lost by calibrating on n rows is of order 1/n. Its proof applies a bound on an
# expectation to single samples. With a utility that is smooth at the best relaxation the order is 1/n; with one that has
# a kink there it is n^(-1/2).


REGRET, ALPHA = 0.4, 0.1
SIZES = (400, 800, 1600, 3200, 6400)
REPETITIONS = 1500
Moments = tuple[float, float]
"""Mean and standard error."""


def run_theory(source: Source, seed: int) -> Report:
    """Simulate the expected loss against its two bounds, and the utility gap against n with fitted slopes."""
    del source  # a simulation needs no scores
    rng = np.random.default_rng(seed)
    rows = [_at_size(rng, n) for n in SIZES]
    slopes = (_slope([row[4][0] for row in rows]), _slope([row[5][0] for row in rows]))
    bounds = ReportTable(
        name="bounds",
        title="Loss and utility gap by number of rows",
        columns=("n", "expected loss", "lower bound", "alpha", "utility gap, smooth", "utility gap, kinked"),
        rows=tuple(rows),
        decimals=(0, 5, 5, 5, 5, 5),
        note="± is the standard error of the mean.",
    )
    fitted = ReportTable(
        name="slopes",
        title="Order of the utility gap: slope of log gap on log n",
        columns=("utility", "slope", "theory"),
        rows=(("smooth", slopes[0], -1.0), ("kinked", slopes[1], -0.5)),
        decimals=(0, 2, 1),
    )
    return Report(
        name=THEORY.name,
        title=THEORY.title,
        source="a simulation with a known truth; no recorded scores",
        configuration={"repetitions": REPETITIONS, "alpha": ALPHA, "mean regret": REGRET},
        data_sha256=None,
        seed=seed,
        tables=(bounds, fitted),
        notes=(
            "The paper's Theorem 1 claims 1/n for both. It holds for the smooth utility; with a kink at the best relaxation "
            "the order is n^(-1/2), because an average of deviations of both signs is not an average of losses.",
        ),
        facts={"rows": rows, "slopes": slopes},
    )


def _at_size(rng: np.random.Generator, n: int) -> tuple[int, Moments, float, float, Moments, Moments]:
    """Return one line of the table: mean and standard error over many calibrations on n rows."""
    best = 1 - ALPHA / REGRET
    relaxation, at_best = np.transpose([_calibrated(rng, n, best) for _ in range(REPETITIONS)])
    # A control variate: the risk at the best relaxation has mean exactly alpha, so subtracting its noise keeps all means.
    smooth = relaxation - (at_best - ALPHA) / REGRET
    kinked = np.maximum(relaxation - best, 0.0)
    return n, _moments(REGRET * (1 - smooth)), ALPHA - 2 / (n + 1), ALPHA, _moments(smooth - best), _moments(kinked)


def _calibrated(rng: np.random.Generator, n: int, best: float) -> tuple[float, float]:
    """Return the relaxation calibrated on n fresh rows, and their empirical risk at the best one."""
    margin = rng.random(n)
    regret = 2 * REGRET * rng.random(n)
    log = ScoreLog.from_arrays(np.column_stack([margin, np.zeros(n)]), np.column_stack([1 - regret, np.ones(n)]))
    curve = RiskCurve.from_log(log, guardian_sees="candidates")
    relaxation = float(curve.relaxation(ALPHA))
    return (1.0 if np.isnan(relaxation) else relaxation), float(curve.mean(best))


def _moments(values: Floats) -> Moments:
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)


def _slope(gaps: list[float]) -> float:
    return float(np.polyfit(np.log(SIZES), np.log(gaps), 1)[0])


THEORY = Experiment(
    name="theory", title="Theorem 1 and the bounds of conformal risk control, simulated", run=run_theory
)
