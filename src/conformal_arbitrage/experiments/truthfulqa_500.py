"""TruthfulQA with n = 500 (calibration-size ablation), 30 trials, alpha from .25 to .05, grid 0.01, 0/1 Guardian."""

from conformal_arbitrage.experiments.protocol import Experiment, Source, cost_accuracy
from conformal_arbitrage.experiments.report import Report

NAME, TITLE, LABEL = "truthfulqa-500", "TruthfulQA: 500 rows to calibrate", "tab:truqa_appendix_500"


def run(source: Source, seed: int) -> Report:
    """The main protocol with 500 instead of 400 of the 684 questions to calibrate."""
    return cost_accuracy((NAME, TITLE, LABEL), source, seed, calibration=500)


EXPERIMENT = Experiment(name=NAME, title=TITLE, run=run)
