"""TruthfulQA with n = 300 (calibration-size ablation), 30 trials, alpha from .25 to .05, grid 0.01, 0/1 Guardian."""

from conformal_arbitrage.experiments.protocol import Experiment, Source, cost_accuracy
from conformal_arbitrage.experiments.report import Report

NAME, TITLE, LABEL = "truthfulqa-300", "TruthfulQA: 300 rows to calibrate", "tab:truqa_appendix_300"


def run(source: Source, seed: int) -> Report:
    """The main protocol with 300 instead of 400 of the 684 questions to calibrate."""
    return cost_accuracy((NAME, TITLE, LABEL), source, seed, calibration=300)


EXPERIMENT = Experiment(name=NAME, title=TITLE, run=run)
