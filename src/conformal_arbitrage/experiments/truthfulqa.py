"""TruthfulQA: the main table and its five ablations, as one table of variants of a single protocol.

684 questions in the paper: calibrate on some, test on the rest, 30 trials, compared with random routing at the same cost.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from conformal_arbitrage.evaluation.frontier import evaluate
from conformal_arbitrage.experiments.protocol import (
    ALPHAS,
    PAPER_RULE,
    TRIALS,
    Experiment,
    Part,
    Source,
    measured,
    our_table,
    paper_table,
    rules_table,
    set_size_table,
    sized,
    with_costs,
)
from conformal_arbitrage.experiments.report import Figure, Report

QUESTIONS = 684
CA_STAR_RULE = {"guardian_sees": "all-restricted-loss", "grid": 0.01}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One variant of the TruthfulQA protocol.

    Attributes:
        name: the experiment's name.
        title: of the report.
        label: of the paper's table.
        calibration: rows to calibrate on, of the paper's 684.
        alphas: the risk budgets.
        binarize: whether the Guardian is made 0/1.
        part: whose scores.
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
        comparison={"guardian_sees": "all"},
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
        own = evaluate(log, variant.alphas, **variant.comparison, **sweep)
        own_title = "Here: everything shown on a deferral, calibrated on that loss"
        tables += [our_table(own, own_title, name="own loss"), set_size_table(frontier)]
    settings = {"trials": TRIALS, "sizes": sizes, "loss": loss, "prices": prices, "grid": variant.rule.get("grid")}
    return Report(
        name=variant.name,
        title=variant.title,
        source=source.title,
        configuration=settings,
        data_sha256=log.sha256(),
        seed=seed,
        tables=(*tables, rules_table(log, variant.alphas, **sweep)),
        figure=Figure(frontier=frontier, x="cost", y="correct"),
        facts={"frontier": frontier},
    )


TRUTHFULQA = tuple(
    Experiment(name=variant.name, title=variant.title, run=partial(run_truthfulqa, variant)) for variant in VARIANTS
)
