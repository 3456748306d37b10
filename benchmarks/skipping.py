"""Routing before asking on a recorded log: what a query costs with a skip rule from its groups, and without.

    python -m benchmarks.skipping LOGS

LOGS is the folder with mmlu-claude3sonnet-deepseek.parquet. Costs are in Guardian calls; 4,000 rows to learn on, 4,000 to
calibrate on, and the others to measure on.
"""

import argparse
from pathlib import Path

import numpy as np

from conformal_arbitrage import OptionError, ScoreLog, calibrate
from conformal_arbitrage.evaluation.skipping import learn_skips

KEY, ROWS = b"the same for every benchmark here", 4000


def cost(log: ScoreLog, alpha: float, primary: float) -> float:
    """Return what a query costs under a certificate from the first rows, on the others."""
    certificate = calibrate(log.select(np.arange(ROWS)), alpha, boundary="random", key=KEY)
    rest = log.select(np.arange(ROWS, len(log)))
    skipped = rest.no_opinion.mean()
    return float(primary * (1 - skipped) + certificate.apply(rest).deferred.mean())


def main() -> None:
    """Print one line per price and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path)
    log = ScoreLog.read(parser.parse_args().logs / "mmlu-claude3sonnet-deepseek.parquet").binarized()
    log = log.select(np.random.default_rng(1).permutation(len(log)))
    for primary in (0.05, 0.25, 0.5):
        for alpha in (0.02, 0.05, 0.1):
            case = f"Primary {primary:4}, alpha {alpha:4}:"
            try:
                choice = learn_skips(log, alpha, primary_cost=primary, guardian_cost=1.0, share=ROWS / len(log))
            except OptionError as error:
                print(case, f"refused, {error}", flush=True)
                continue
            places = {name: k for k, name in enumerate(log.id.tolist())}
            rows = log.select([places[name] for name in choice.rest.id.tolist()])
            with_rule, without = (cost(one, alpha, primary) for one in (choice.rest, rows))
            print(case, f"{without:.3f} asked first, {with_rule:.3f} with {choice.skipped:.0%} skipped", flush=True)


if __name__ == "__main__":
    main()
