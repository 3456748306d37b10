"""The paper's rule and ours on real recorded logs: how far each lies above random routing at the same cost.

    python benchmarks/real_logs.py FOLDER --figure docs/paper.png

FOLDER holds the logs named below (recorded by others; not part of this project). Costs are 1 and 20 a query, 30 trials,
half of the rows to calibrate.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from conformal_arbitrage import ScoreLog, evaluate
from conformal_arbitrage.experiments.protocol import RULES

LOGS = {
    "truthfulqa-gpt35-gpt4turbo": "TruthfulQA: gpt-3.5-turbo to gpt-4-turbo",
    "sciq-llama8b-gpt4o": "SciQ: Llama-3.1-8B to gpt-4o",
    "mmlu-claude3sonnet-deepseek": "MMLU: claude-3-sonnet to deepseek-chat",
    "mmlu-llama13b-gpt4": "MMLU: LLaMA-13B to GPT-4",
}
ALPHAS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25)
STYLES = {
    "the paper's rule": ("#767676", "s", "--"),
    "own loss": ("#0072B2", "o", "-"),
    "own loss, random boundary": ("#D55E00", "^", "-"),
}


def measured(path: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Alpha, delta and Guardian share by rule, at the budgets the Primary alone does not meet."""
    log = ScoreLog.read(path)
    log = log if log.is_router else log.binarized()
    results = {}
    for rule in STYLES:
        options = {"calibration_size": len(log) // 2, "primary_cost": 1, "guardian_cost": 20, **RULES[rule]}
        frontier = evaluate(log, ALPHAS, **options)
        alone = frontier.of("primary")[0].mean("loss")
        points = [p for p in frontier.of("conformal") if p.alpha < alone]
        results[rule] = [(p.alpha, p.mean("delta"), p.mean("deferred")) for p in points]
    return results


def main() -> None:
    """Print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True).ravel()
    print("| log | alpha | " + " | ".join(f"delta, {rule} (sent to the Guardian)" for rule in STYLES) + " |")
    print("|---|---|" + "---|" * len(STYLES))
    for panel, (name, title) in zip(axes, LOGS.items(), strict=True):
        result = measured(options.folder / f"{name}.parquet")
        for rule, (colour, marker, line) in STYLES.items():
            alphas, deltas, _ = zip(*result[rule], strict=True)
            panel.plot(alphas, deltas, color=colour, marker=marker, ls=line, ms=5, label=rule)
        for cells in zip(*result.values(), strict=True):
            print(
                f"| {title} | {cells[0][0]:g} | "
                + " | ".join(f"{d:+.3f} ({100 * g:.0f} %)" for _, d, g in cells)
                + " |"
            )
        panel.axhline(0, color="black", lw=0.8)
        panel.set_title(title, fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    figure.supxlabel("risk budget alpha")
    figure.supylabel("accuracy above random routing at the same cost")
    if options.figure:
        figure.savefig(options.figure, dpi=130)


if __name__ == "__main__":
    main()
