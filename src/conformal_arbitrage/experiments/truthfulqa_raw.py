"""TruthfulQA with the Guardian's raw scores instead of 0/1 (Guardian scoring ablation)."""

from conformal_arbitrage.experiments.protocol import Experiment, Source, cost_accuracy
from conformal_arbitrage.experiments.report import Report

NAME, TITLE, LABEL = "truthfulqa-raw", "TruthfulQA: raw Guardian scores", "tab:truqa_guardian_scores"


def run(source: Source, seed: int) -> Report:
    """The main protocol on the scores as they are; on a Guardian that already says 0 or 1 nothing changes."""
    return cost_accuracy((NAME, TITLE, LABEL), source, seed, binarize=False)


EXPERIMENT = Experiment(name=NAME, title=TITLE, run=run)
