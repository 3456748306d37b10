"""What cascades cost on the shared log of nine models, with the automatic choice and without; run by `make bench-cascades`.

The log is not part of the repository: the tests' README says where it lies.
"""

import argparse
from pathlib import Path

from benchmarks.bound import chain_bounds
from tests.cascades import nine_models

from conformal_arbitrage.evaluation.frontier import evaluate_cascade

ALPHAS = ("0.02", "0.05", "0.1")
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
FEW = ("llama3.1-8b", "gpt-4o-mini", "llama3.1-70b")
SETS = {"medmcqa": "llama3.1-405b", "triviaqa": "gpt-4o", "truthfulqa": "gpt-4o"}
CHAINS = (None, ("gpt-4o-mini",), ("llama3.1-8b",), ("gpt-4o-mini", "llama3.1-70b"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=60)
    parser.add_argument("--data", type=Path, default=SHARED)
    parser.add_argument("--all-models", action="store_true", help="choose among eight models instead of three")
    parser.add_argument("--without", nargs="*", metavar="MODEL", help="choose among all models but these")
    parser.add_argument("--bound", action="store_true", help="print what the best policy of the best chain would cost")
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    options = parser.parse_args()
    for name in options.sets:
        log = nine_models(options.data, name, SETS[name], None if options.all_models or options.without else FEW)
        if options.without:
            some = [model for model in log.models if model not in options.without]
            log = nine_models(options.data, name, SETS[name], some)
        for loss in (None, "net"):
            if options.bound:
                bounds = chain_bounds(log, [float(alpha) for alpha in ALPHAS], loss or "guardian_regret")
                print(f"{name}, {loss or 'regret'}, bound: {' '.join(f'{bound:.3f}' for bound in bounds)}", flush=True)
            for chain in CHAINS if loss is None and not options.without else (None,):
                evaluation = evaluate_cascade(
                    log, ALPHAS, calibration_size=6 * len(log) // 10, trials=options.splits, loss=loss, chain=chain
                )
                title = f"{name}, {loss or 'regret'}, {'auto' if chain is None else ' > '.join(chain)}"
                for point in evaluation.points:
                    print(
                        f"{title:42} alpha {point.alpha:<5g} cost {point.cost:.3f} +- {point.cost_error:.3f}  loss "
                        f"{point.loss:.4f} +- {point.loss_error:.4f}  over {point.over:.2f}  "
                        f"{list(point.chains.items())[:2]}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
