"""Tuning of cascades: choose a chain of models on one part of a log, and fit its path there."""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Final, Literal

import numpy as np

from conformal_arbitrage.calibration.promises import ChainEstimate, ModelChain
from conformal_arbitrage.core.chains import (
    LEVELS,
    calibrate_path,
    fit_ridge_logistic,
    path_choice,
    path_corners,
    predicted_losses,
    rounded_losses,
    stage_features,
)
from conformal_arbitrage.core.exact import Floats, Indices, n_rows
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.cascade import CascadeLog
from conformal_arbitrage.types import MissingGuardian

LossName = Literal["guardian_regret", "net"]
FEWEST_TUNING_ROWS: Final = 20
_REPEATS: Final = 3
_BEST_PAIRS: Final = 3


def tuning_rows(log: CascadeLog, *, share: float, seed: int) -> tuple[Indices, Indices]:
    """Return the rows to tune on and those to calibrate on, drawn by a hash of seed and id.

    Raises:
        OptionError: the share leaves too few rows to tune on, or none to calibrate on.
    """
    if seed < 0:
        raise OptionError(f"seed must be 0 or more; got {seed}")
    cut = round(share * len(log)) if 0 < share < 1 else 0
    if not FEWEST_TUNING_ROWS <= cut < len(log):
        raise OptionError(
            f"{log.source}: a tuning share of {share:g} of {n_rows(len(log))} is {n_rows(cut)}; tuning a chain takes at "
            f"least {FEWEST_TUNING_ROWS}, and rows must be left to calibrate on: collect more, or use another share"
        )
    ranks = [hashlib.sha256(f"tuning {seed};{name}".encode()).digest() for name in log.id.tolist()]
    order = np.array(sorted(range(len(log)), key=ranks.__getitem__), dtype=np.intp)
    return order[:cut], np.sort(order[cut:])


def stop_losses(log: CascadeLog, places: Sequence[int], loss: LossName, missing: MissingGuardian | None) -> Floats:
    """Return rows x models: the loss of answering with each model, 1 where it is unknown.

    Raises:
        ScoreLogError: a loss is unknown, and that is not to be counted as the largest.
    """
    difference = log.guardian_grade[:, None] - log.grade[:, places]
    unknown = np.isnan(difference) & ~np.isnan(log.confidence[:, places])
    if unknown.any() and missing is None:
        row, j = (int(k) for k in np.argwhere(unknown)[0])
        absent = np.isnan(log.guardian_grade[row])
        column = f"{log.guardian if absent else log.models[places[j]]}_grade"
        raise ScoreLogError(
            f"{log.source}: row {row + 1}, column '{column}': no grade; grade it, or count such rows as the largest loss: "
            'missing_guardian="worst_case" (--missing-guardian worst_case). A row that is dropped breaks the guarantee'
        )
    losses = np.where(np.isnan(difference), unknown.astype(np.float64), difference)
    return np.maximum(losses, 0.0) if loss == "guardian_regret" else losses


def asked_costs(log: CascadeLog, places: Sequence[int]) -> Floats:
    """Return rows x (models + 1): dollars of all models asked until one answers; the last column is the Guardian's."""
    return np.cumsum(np.column_stack([log.cost[:, places], log.guardian_cost]), axis=1)


def fit_chain(log: CascadeLog, models: Sequence[str], loss: LossName, missing: MissingGuardian | None) -> ModelChain:
    """Fit predicted losses and a path to the rows of a tuning part.

    What is predicted is the regret, for the net loss too: where the Guardian would have done better. Predicting the net
    loss itself costs more on every log that was tried.
    """
    if len(models) == 1:
        return ModelChain(models=tuple(models))
    if len(models) not in LEVELS:
        raise OptionError(f"a chain has at most {max(LEVELS)} models before the Guardian; got {', '.join(models)}")
    places = log.columns_of(models)
    confidence, answers = log.confidence[:, places], log.answer[:, places]
    losses = stop_losses(log, places, loss, missing)
    coefficients: list[Floats] = []
    risks = np.full(confidence.shape, np.nan)
    for stage in range(len(models)):
        features, able = stage_features(confidence, answers, stage), ~np.isnan(confidence[:, stage])
        coefficients.append(fit_ridge_logistic(features[able], np.maximum(losses[able, stage], 0.0)))
        risks[able, stage] = predicted_losses(features[able], coefficients[-1])
    corners = path_corners(risks, losses, asked_costs(log, places), LEVELS[len(models)])
    return ModelChain(
        models=tuple(models),
        coefficients=tuple(tuple(column.tolist()) for column in coefficients),
        corners=tuple(tuple(corner.tolist()) for corner in corners),
    )


def estimate_chains(
    log: CascadeLog,
    *,
    alpha: Fraction,
    loss: LossName,
    missing: MissingGuardian | None,
    n: int,
    seed: int,
) -> tuple[ChainEstimate, ...]:
    """Estimate what pairs and longer chains cost at a budget, by cross-fitting on a tuning part; the cheapest first.

    Candidates are every model that is cheaper than the Guardian, and chains of two that end with one of the best of
    these. Each is fitted on one half and calibrated on the other, with the room for the next query's loss scaled to the
    rows that the certificate will have.

    Args:
        log: the tuning part.
        alpha: the risk budget.
        loss: what is bounded.
        missing: how unknown losses count.
        n: the rows that the certificate will be calibrated on.
        seed: of the halves and of the draws.
    """
    means = dict(zip(log.models, log.cost.mean(axis=0).tolist(), strict=True))
    cheaper = [name for name in log.models if means[name] < log.guardian_cost.mean()]
    if not cheaper:
        raise ScoreLogError(
            f"{log.source}: no model is cheaper than the Guardian {log.guardian}; check the cost columns, or name another "
            "Guardian"
        )

    def estimated(models: tuple[str, ...]) -> ChainEstimate:
        cost = _estimated_cost(log, models, alpha, loss, missing, n=n, seed=seed)
        return ChainEstimate(models=models, cost=cost)

    pairs = sorted((estimated((name,)) for name in cheaper), key=lambda estimate: estimate.cost)
    best = {pair.models[0] for pair in pairs[:_BEST_PAIRS]}
    chains = [estimated((a, b)) for b in cheaper if b in best for a in cheaper if means[a] < means[b]]
    return tuple(sorted((*pairs, *chains), key=lambda estimate: estimate.cost))


def _estimated_cost(
    log: CascadeLog,
    models: tuple[str, ...],
    alpha: Fraction,
    loss: LossName,
    missing: MissingGuardian | None,
    *,
    n: int,
    seed: int,
) -> float:
    """Return the mean cost of a chain over halves of the tuning part, relative to the Guardian's."""
    rng, total, rows = np.random.default_rng(seed), 0.0, 0
    for _ in range(_REPEATS):
        order = rng.permutation(len(log))
        halves = order[: len(log) // 2], order[len(log) // 2 :]
        for fitted_on, rest in (halves, halves[::-1]):
            chain, held_out = fit_chain(log.select(fitted_on), models, loss, missing), log.select(rest)
            total += _cost_on(held_out, chain, alpha, loss, missing, n=n, rng=rng)
            rows += len(rest)
    return total / rows / float(log.guardian_cost.mean())


def _cost_on(
    log: CascadeLog,
    chain: ModelChain,
    alpha: Fraction,
    loss: LossName,
    missing: MissingGuardian | None,
    *,
    n: int,
    rng: np.random.Generator,
) -> float:
    """Return the total cost of a chain on rows that it was not fitted on, calibrated on these."""
    places, size = log.columns_of(chain.models), len(log)
    u, v = rng.random(size), rng.random(size)
    entries = chain.entries(log.confidence[:, places], log.answer[:, places])
    room = Fraction(size, n)
    losses = rounded_losses(stop_losses(log, places, loss, missing), v)
    stop = calibrate_path(entries, losses, u, alpha=alpha + (1 - room) / (size + 1))
    return float(asked_costs(log, places)[np.arange(size), path_choice(entries, u, stop)].sum())
