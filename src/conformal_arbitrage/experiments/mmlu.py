"""MMLU, the appendix table and figure: 1,000 questions per trial, balanced by subject, then split 500/500."""

from typing import Any

import numpy as np

from conformal_arbitrage.errors import SourceError
from conformal_arbitrage.evaluation.frontier import evaluate
from conformal_arbitrage.experiments.protocol import (
    ALPHAS,
    PAPER_RULE,
    TRIALS,
    Experiment,
    Source,
    measured,
    our_table,
    paper_table,
    rules_table,
    with_costs,
)
from conformal_arbitrage.experiments.report import Figure, Report

NAME, TITLE, LABEL = "mmlu", "MMLU: cost against accuracy over many subjects", "tab:mmlu_restricted"
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
    return Report(
        name=NAME,
        title=TITLE,
        source=source.title,
        configuration={"trials": TRIALS, "sizes": sizes, "loss": loss, "prices": prices, "grid": 0.01},
        data_sha256=log.sha256(),
        seed=seed,
        tables=(
            our_table(frontier, "Here: the paper's rule on a grid of 0.01"),
            paper_table(LABEL),
            rules_table(log, ALPHAS, **sweep),
        ),
        figure=Figure(frontier=frontier, x="cost", y="correct"),
        facts={"frontier": frontier},
    )


EXPERIMENT = Experiment(name=NAME, title=TITLE, run=run_mmlu)
