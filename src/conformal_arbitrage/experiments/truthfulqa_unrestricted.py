"""TruthfulQA with all actions shown on a deferral: the paper's CA*, and ours calibrated on its own loss."""

from conformal_arbitrage.experiments.protocol import Experiment, Source, cost_accuracy
from conformal_arbitrage.experiments.report import Report

NAME, TITLE, LABEL = "truthfulqa-unrestricted", "TruthfulQA: all actions on a deferral", "tab:truqa_appendix_d"
CA_STAR = {"guardian_sees": "all-restricted-loss", "grid": 0.01}


def run(source: Source, seed: int) -> Report:
    """The threshold still comes from the loss of the candidates, as the paper has it; beside it, from its own loss."""
    return cost_accuracy((NAME, TITLE, LABEL), source, seed, rule=CA_STAR, beside={"guardian_sees": "all"})


EXPERIMENT = Experiment(name=NAME, title=TITLE, run=run)
