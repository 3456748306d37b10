"""Guardian shares on recorded logs beside what their features allow: the margin, a learned score, and a bound.

    python -m benchmarks.bound LOGS [--splits 60] [--rows 400 1000]

LOGS is the folder with the recorded logs and tables. The bound is what one would ask the Guardian who knew the expected net
loss of every query given its features, as far as this log tells: the mean is learned on 80 % of the rows and predicted
on the rest (the better of a ridge and, with scikit-learn, of boosted trees), and the threshold is the best one for the whole
log. No promise is in it, and few rows make it too large; of larger logs, 8,000 random rows are taken.
"""

import argparse
import importlib
import importlib.util
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import duckdb
import numpy as np

from conformal_arbitrage import Features, ScoreLog, evaluate
from conformal_arbitrage.calibration.learning import RidgeLearner, row_inputs
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.promises import MOST_MODELS
from conformal_arbitrage.calibration.tuning import (
    LossName,
    asked_costs,
    chain_rows,
    chosen_losses,
    fit_chain,
    stop_losses,
)
from conformal_arbitrage.core.chains import PRICES
from conformal_arbitrage.core.features import FeatureSet, feature_matrix
from conformal_arbitrage.scorelog.cascade import CascadeLog

LOGS = {
    "mmlu-claude3sonnet-deepseek": 4, "science": None, "judge-pairs-mistral7b-gpt4": None, "sciq-llama8b-gpt4o": None,
    "truthfulqa-gpt35-gpt4turbo": None, "mmlu-llama13b-gpt4": 4,
}  # fmt: skip
"""The number of actions, if it is declared."""
TABLES = {
    "frugalml-rafdb": ("cnn", "microsoft"), "frugalml-expw": ("cnn", "microsoft"), "frugalml-yelp": ("vader", "google"),
    "frugalml-command": ("deepspeech", "microsoft"),
}  # fmt: skip
"""The nearly free local model, and the best service."""
ALPHAS = {True: (0.01, 0.02, 0.05), False: (0.02, 0.05, 0.1)}
FOLDS, SEED, MOST_ROWS = 5, 0, 8000


def read(folder: Path, name: str) -> ScoreLog:
    """Return a recorded log, or a table of services as one in router form."""
    path = folder / f"{name}.parquet"
    if name not in TABLES:
        roles = {"primary": "qwen15b", "guardian": "expert"} if name == "science" else {}
        log = ScoreLog.read(path, **roles)
        return log.select(np.random.default_rng(SEED).permutation(len(log))[:MOST_ROWS])
    local, best = TABLES[name]
    columns = duckdb.sql(
        f"select {local}_confidence as sure, {local}_right as ours, {best}_right as theirs, {local}_answer as answer "
        f"from read_parquet('{path}')"
    ).fetchnumpy()
    sure = np.clip(np.nan_to_num(np.ma.filled(columns["sure"].astype(float), 0.0)), 0.0, 1.0)
    order = np.random.default_rng(SEED).permutation(len(sure))[:MOST_ROWS]
    return ScoreLog.from_router(
        confidence=sure[order],
        primary_grade=columns["ours"].astype(float)[order],
        guardian_grade=columns["theirs"].astype(float)[order],
        id=[f"{name}-{row}" for row in order],
        answer=[str(answer) for answer in columns["answer"][order]],
    )


def learners(penalties: np.ndarray) -> list:
    """Return a ridge and, if scikit-learn is installed, boosted trees."""
    if importlib.util.find_spec("sklearn") is None:
        return [RidgeLearner(penalties=penalties)]
    boosted = importlib.import_module("sklearn.ensemble").HistGradientBoostingRegressor
    return [
        RidgeLearner(penalties=penalties),
        boosted(random_state=0, max_iter=40, learning_rate=0.08, min_samples_leaf=40),
    ]


def bounds(log: ScoreLog, features: Features, alphas: tuple[float, ...]) -> list[float]:
    """Return the least share of the Guardian at each alpha by the best threshold on a cross-fitted mean loss."""
    options = CalibrationOptions(loss="net", loss_bound=1, boundary="random", score="auto", features=features)
    inputs = row_inputs(log, options, Fraction(1))
    columns = FeatureSet(
        menu_size=features.menu_size, groups=inputs.group_names(), tokens=inputs.tokens is not None,
        answers=inputs.answer is not None,
    )  # fmt: skip
    matrix, loss = feature_matrix(columns, inputs.feature_rows(np.arange(len(log)))), inputs.share
    fold = np.random.default_rng(SEED).permutation(len(log)) % FOLDS
    least = [1.0] * len(alphas)
    for learner in learners(columns.penalties()):
        predicted = np.empty(len(log))
        for k in range(FOLDS):
            learner.fit(matrix[fold != k], loss[fold != k])
            predicted[fold == k] = learner.predict(matrix[fold == k])
        order = np.argsort(np.where(inputs.used, predicted, np.inf), kind="stable")
        total = np.cumsum(loss[order]) / len(log)
        for place, alpha in enumerate(alphas):
            kept = np.flatnonzero((total <= alpha) & inputs.used[order])
            least[place] = min(least[place], 1 - (kept[-1] + 1 if len(kept) else 0) / len(log))
    return least


def chain_bounds(log: CascadeLog, alphas: Sequence[float], loss: LossName) -> list[float]:
    """Return the least cost at each alpha, relative to the Guardian's, by the best chain of three and its best policy.

    Each chain is fitted on 80 % of the rows and decides the rest; between two of its policies a coin may choose.
    """
    fold = np.random.default_rng(SEED).permutation(len(log)) % FOLDS
    least = [1.0] * len(alphas)
    for models in combinations(log.models, min(MOST_MODELS, len(log.models))):
        for gains in (False, True)[: 2 if loss == "net" else 1]:
            total = np.zeros((2, len(PRICES) + 1))
            total[1, 0] = log.guardian_cost.sum()
            for k in range(FOLDS):
                chain = fit_chain(log.select(np.flatnonzero(fold != k)), models, loss, None, gains=gains)
                rest = log.select(np.flatnonzero(fold == k))
                rows = chain_rows(rest, models, chain.answers)
                chosen, asked = chain.follow(rows, np.arange(1, len(PRICES) + 1)[:, None])
                losses = stop_losses(rest, rest.columns_of(models), loss, None)
                total[0, 1:] += chosen_losses(losses, chosen).sum(axis=1)
                total[1, 1:] += [asked_costs(rest, models, *each).sum() for each in zip(chosen, asked, strict=True)]
            lost, cost = total[0] / len(log), total[1] / log.guardian_cost.sum()
            least = [min(pair) for pair in zip(least, (_cheapest(lost, cost, a) for a in alphas), strict=True)]
    return least


def _cheapest(lost: np.ndarray, cost: np.ndarray, alpha: float) -> float:
    """Return the least cost of a policy within alpha, or of a coin between one within it and one beyond."""
    within, beyond = np.flatnonzero(lost <= alpha), np.flatnonzero(lost > alpha)
    share = (alpha - lost[within, None]) / (lost[beyond] - lost[within, None])
    mixed = cost[within, None] + share * (cost[beyond] - cost[within, None])
    return float(np.concatenate([cost[within], mixed.ravel()]).min())


def main() -> None:
    """Print a line of shares for every log, size and rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--splits", type=int, default=60)
    parser.add_argument("--rows", type=int, nargs="+", default=[400, 1000])
    chosen = parser.parse_args()
    for name in (*LOGS, *TABLES):
        log, table = read(chosen.logs, name), name in TABLES
        alphas, features = ALPHAS[table], Features(menu_size=LOGS.get(name), answers=table)
        print(f"{name}: net alpha {alphas}", flush=True)
        for n in sorted({min(n, len(log) * 3 // 4) for n in chosen.rows}):
            options = {
                "calibration_size": n,
                "test_size": min(1000, len(log) - n),
                "trials": chosen.splits,
                "loss": "net",
            }
            for rule, further in (("margin", {}), ("auto", {"score": "auto", "features": features})):
                points = evaluate(log, alphas, boundary="random", loss_bound=1, **options, **further).of("conformal")
                shares = " ".join(f"{point.mean('deferred'):.3f}" for point in points)
                losses = " ".join(f"{point.mean('loss'):.4f}" for point in points)
                print(f"  n = {n:4}  {rule:6}  share {shares}  loss {losses}", flush=True)
        print(
            f"  all rows  bound   share {' '.join(f'{share:.3f}' for share in bounds(log, features, alphas))}",
            flush=True,
        )


if __name__ == "__main__":
    main()
