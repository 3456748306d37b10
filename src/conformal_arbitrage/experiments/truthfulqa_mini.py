"""TruthfulQA with a stronger Primary and the same Guardian (model-choice ablation), alpha .05 and .025."""

from conformal_arbitrage.experiments.protocol import Experiment, Source, cost_accuracy
from conformal_arbitrage.experiments.report import Report

NAME, TITLE, LABEL = "truthfulqa-mini", "TruthfulQA: a stronger Primary", "tab:truqa_model_ablation"


def run(source: Source, seed: int) -> Report:
    """On the bundled log Qwen2.5-Coder-1.5B takes the place of SmolLM2-135M."""
    return cost_accuracy((NAME, TITLE, LABEL), source, seed, alphas=(0.05, 0.025), part="truthfulqa-stronger")


EXPERIMENT = Experiment(name=NAME, title=TITLE, run=run)
