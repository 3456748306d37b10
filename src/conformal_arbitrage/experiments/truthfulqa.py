"""TruthfulQA, the main table and figure: n = 400, 30 trials, alpha from .25 to .05, grid 0.01, 0/1 Guardian."""

from conformal_arbitrage.experiments.protocol import Experiment, Source, cost_accuracy
from conformal_arbitrage.experiments.report import Report

NAME, TITLE, LABEL = "truthfulqa", "TruthfulQA: cost against accuracy", "tab:truqa_main"


def run(source: Source, seed: int) -> Report:
    """684 questions in the paper, 400 to calibrate and 284 to test, against a coin of the same cost."""
    return cost_accuracy((NAME, TITLE, LABEL), source, seed)


EXPERIMENT = Experiment(name=NAME, title=TITLE, run=run)
