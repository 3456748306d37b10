"""Tuning of cascades: choose a chain of models on one part of a log, and fit its path there."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from conformal_arbitrage.calibration.promises import (
    MOST_MODELS,
    ChainEstimate,
    ChainRows,
    ChainStep,
    ModelChain,
    chain_steps,
)
from conformal_arbitrage.core.chains import (
    GUARDIAN,
    NO_ANSWER,
    PRICES,
    PathStop,
    answer_numbers,
    calibrate_path,
    fit_ridge,
    fit_ridge_logistic,
    linear,
    normal_answer,
    policies_of,
    probability,
    rounded_losses,
    stage_features,
)
from conformal_arbitrage.core.exact import Bools, Floats, Indices, Integers, n_rows
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.cascade import CascadeLog
from conformal_arbitrage.types import MissingGuardian

_Number = TypeVar("_Number", np.int64, np.float64)
LossName = Literal["guardian_regret", "net"]
FEWEST_TUNING_ROWS: Final = 20
_REPEATS: Final = 3
_FEWEST_OF_AN_ANSWER: Final = 10
_MOST_ANSWERS: Final = 32
_SELDOM: Final = 0.5
_RAREST: Final = 1e-6
_NOISE: Final = 1e-6


def tuning_rows(log: CascadeLog, *, share: float, seed: int) -> tuple[Indices, Indices]:
    """Return the rows to tune on and those to calibrate on, drawn by a hash of seed and id, and in its order.

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
    return order[:cut], order[cut:]


def stop_losses(log: CascadeLog, places: Sequence[int], loss: LossName, missing: MissingGuardian | None) -> Floats:
    """Return rows x models: the loss of answering with each model, 1 where it is unknown.

    Raises:
        ScoreLogError: a loss is unknown, and that is not to be counted as the largest.
    """
    unknown = unknown_losses(log, places)
    if unknown.any() and missing is None:
        row, j = (int(k) for k in np.argwhere(unknown)[0])
        if log.unasked[row, places[j]]:
            raise ScoreLogError(
                f"{log.source}: row {row + 1}: {log.models[places[j]]} was not asked (no confidence and no cost). Ask every "
                "model about every row, as `arbitrage collect --path` and shadow mode do; if it was asked and failed, give "
                'the cost, 0 or more; or count such rows as the largest loss: missing_guardian="worst_case" '
                "(--missing-guardian worst_case)"
            )
        absent = np.isnan(log.guardian_grade[row])
        column = f"{log.guardian if absent else log.models[places[j]]}_grade"
        raise ScoreLogError(
            f"{log.source}: row {row + 1}, column '{column}': no grade; grade it, or count such rows as the largest loss: "
            'missing_guardian="worst_case" (--missing-guardian worst_case). A row that is dropped breaks the guarantee'
        )
    difference = log.guardian_grade[:, None] - log.grade[:, places]
    losses = np.where(unknown, 1.0, np.nan_to_num(difference))
    return np.maximum(losses, 0.0) if loss == "guardian_regret" else losses


def unknown_losses(log: CascadeLog, places: Sequence[int]) -> Bools:
    """Return rows x models: whether an answer has no grade, or nobody asked for one. A failed model has no loss."""
    ungraded = np.isnan(log.guardian_grade)[:, None] | np.isnan(log.grade[:, places])
    return log.unasked[:, places] | (ungraded & ~np.isnan(log.confidence[:, places]))


def chain_rows(log: CascadeLog, models: Sequence[str], known: Sequence[str]) -> ChainRows:
    """Return what the models of a chain did, with answers numbered with the known ones first."""
    places = log.columns_of(models)
    confidence = log.confidence[:, places]
    numbers = answer_numbers(log.texts[:, places].ravel().tolist(), known).reshape(confidence.shape)
    return ChainRows(confidence, np.where(np.isnan(confidence), NO_ANSWER, numbers), log.unasked[:, places])


def stop_on(chain: ModelChain, rows: ChainRows, losses: Integers, u: Floats, *, alpha: Fraction) -> PathStop | None:
    """Return where rows stop on the path of a chain that was fitted on other rows; see `calibrate_path`.

    Args:
        losses: rows x models, rounded.
    """
    chosen, _ = chain.follow(rows, np.arange(1, len(PRICES) + 1)[:, None])
    return calibrate_path(chosen_losses(losses, chosen), u, alpha=alpha)


def chosen_losses(losses: NDArray[_Number], chosen: Integers) -> NDArray[_Number]:
    """Return the loss of each row under the model that answers it: policies x rows, 0 with the Guardian.

    Args:
        losses: rows x models.
        chosen: policies x rows, places of models or GUARDIAN.
    """
    rows = np.arange(len(losses))
    return np.where(chosen == GUARDIAN, losses.dtype.type(0), losses[rows, chosen])


def asked_costs(log: CascadeLog, models: Sequence[str], chosen: Integers, asked: Bools) -> Floats:
    """Return dollars per row of all models asked, with the Guardian where it answers.

    Args:
        chosen: per row, as for `chosen_losses`.
        asked: rows x models.
    """
    places = log.columns_of(models)
    known = np.where(log.unasked, log.mean_costs, log.cost)[:, places]
    dollars = np.where(asked, known, 0.0).sum(axis=1)
    return dollars + np.where(chosen == GUARDIAN, log.guardian_cost, 0.0)


def fit_chain(
    log: CascadeLog, models: Sequence[str], loss: LossName, missing: MissingGuardian | None, *, gains: bool = False
) -> ModelChain:
    """Fit predicted losses, and from the last answer back what each earlier step may expect, to the rows of a tuning part.

    Args:
        gains: whether to count what the Guardian is expected to do worse. That takes more rows to predict than the regret.
    """
    if not 1 <= len(models) <= MOST_MODELS:
        raise OptionError(f"a chain has at most {MOST_MODELS} models before the Guardian; got {', '.join(models)}")
    known = _usual_answers(log, models)
    confidence, answers, _ = chain_rows(log, models, known)
    losses, signs = stop_losses(log, log.columns_of(models), loss, missing), (1, -1) if gains else (1,)
    targets = [np.maximum(sign * losses, 0.0) for sign in signs]
    known = known if any(_foretold(confidence, answers, each, len(known)) for each in targets) else ()
    guardian = float(log.guardian_cost.mean()) or 1.0
    costs = log.mean_costs[log.columns_of(models)] / guardian
    prices = np.array(PRICES)
    steps: list[ChainStep] = []
    least: dict[tuple[int, ...], Floats] = {}
    for asked in reversed(chain_steps(len(models))):
        features, penalties = stage_features(confidence, answers, asked, len(known))
        expected, fits = np.full(len(log), np.inf), list[Floats]()
        if asked:
            able = ~np.isnan(confidence[:, asked[-1]])
            fits = [fit_ridge_logistic(features[able], each[able, asked[-1]], penalties) for each in targets]
            predicted = [probability(features[able], fit) for fit in fits]
            expected[able] = predicted[0] - sum(predicted[1:])
        later = range(asked[-1] + 1 if asked else 0, len(models))
        ahead = [fit_ridge(features, costs[j] + least[*asked, j], penalties).T for j in later]
        least[asked] = np.minimum.reduce(
            [np.minimum(expected[:, None] / prices, 1.0), *(linear(features, fit[:, None]).T for fit in ahead)]
        )
        steps.append(ChainStep(asked=asked, losses=_rows(fits), ahead=tuple(_rows(fit) for fit in ahead)))
    return ModelChain(models=tuple(models), answers=known, steps=tuple(reversed(steps)))


def _foretold(confidence: Floats, answers: Integers, losses: Floats, known: int) -> bool:
    """Tell whether answers foretell losses: by fits to one half of the rows, the other is likelier with them than without.

    Where they do not, such as letters of options, features for them would only take rows to learn.
    """
    even, likelier = np.arange(len(losses)) % 2 == 0, 0.0
    for j, lost in enumerate(losses.T if known else ()):
        for part in (even, ~even):
            able = ~np.isnan(confidence[:, j])
            fitted_on, rest = able & part, able & ~part
            for count, sign in ((known, 1), (0, -1)):
                features, penalties = stage_features(confidence, answers, (j,), count)
                fit = fit_ridge_logistic(features[fitted_on], lost[fitted_on], penalties)
                expected = np.clip(probability(features[rest], fit), _RAREST, 1 - _RAREST)
                chances = lost[rest] * np.log(expected) + (1 - lost[rest]) * np.log(1 - expected)
                likelier += sign * float(chances.sum())
    return likelier > _NOISE


def _rows(fits: Iterable[Floats]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(fit.tolist()) for fit in fits)


def _usual_answers(log: CascadeLog, models: Sequence[str]) -> tuple[str, ...]:
    """Return the answers that some model has given often, the most frequent first."""
    counts: Counter[str] = Counter()
    for place in log.columns_of(models):
        given = log.texts[~np.isnan(log.confidence[:, place]), place].tolist()
        counts |= Counter(normal_answer(text) for text in given if text)
    usual = sorted((-count, text) for text, count in counts.items() if count >= _FEWEST_OF_AN_ANSWER)
    return tuple(text for _, text in usual[:_MOST_ANSWERS])


def estimate_chains(
    log: CascadeLog,
    *,
    alpha: Fraction,
    loss: LossName,
    missing: MissingGuardian | None,
    n: int,
    seed: int,
    models: Sequence[str] | None = None,
) -> tuple[ChainEstimate, ...]:
    """Estimate what chains cost at a budget, by cross-fitting on a tuning part; the one to take first.

    Candidates are every model that is cheaper than the Guardian and was asked about most rows, then the best of these
    with every other one, and so on: policies leave out what does not pay, so more models cost little. For the net loss
    the last is also tried with predicted gains counted. Each is fitted on one half and calibrated on the other, with
    the room for the next query's loss scaled to the rows that the certificate will have.

    Args:
        log: the tuning part.
        alpha: the risk budget.
        loss: what is bounded.
        missing: how unknown losses count.
        n: the rows that the certificate will be calibrated on.
        seed: of the halves and of the draws.
        models: the only chain to consider; by default all.
    """

    def estimated(models: tuple[str, ...], *, gains: bool = False) -> ChainEstimate:
        cost = _estimated_cost(log, models, alpha, loss, missing, gains=gains, n=n, seed=seed)
        return ChainEstimate(models=models, cost=cost, gains=gains)

    estimates: list[ChainEstimate] = []
    if models is not None:
        estimates.append(estimated(tuple(models)))
    else:
        usable = (log.mean_costs < log.guardian_cost.mean()) & (log.unasked.mean(axis=0) < _SELDOM)
        cheaper = [log.models[place] for place in np.flatnonzero(usable).tolist()]
        if not cheaper:
            raise ScoreLogError(
                f"{log.source}: no model is cheaper than the Guardian {log.guardian} and asked about most rows; check the "
                "cost columns, or name another Guardian"
            )
        chain: tuple[str, ...] = ()
        for _ in range(min(len(cheaper), MOST_MODELS)):
            sets = [{*chain, name} for name in cheaper if name not in chain]
            more = [estimated(tuple(name for name in cheaper if name in one)) for one in sets]
            estimates += more
            chain = min(more, key=lambda estimate: estimate.cost).models
        estimates.sort(key=lambda estimate: (-len(estimate.models), estimate.cost))
    if loss == "net":
        counted = estimated(estimates[0].models, gains=True)
        if counted.cost < estimates[0].cost:
            estimates[0] = counted
    return tuple(estimates)


def _estimated_cost(
    log: CascadeLog,
    models: tuple[str, ...],
    alpha: Fraction,
    loss: LossName,
    missing: MissingGuardian | None,
    *,
    gains: bool,
    n: int,
    seed: int,
) -> float:
    """Return the mean cost of a chain over halves of the tuning part, relative to the Guardian's."""
    rng, total, rows = np.random.default_rng(seed), 0.0, 0
    for _ in range(_REPEATS):
        order = rng.permutation(len(log))
        halves = order[: len(log) // 2], order[len(log) // 2 :]
        for fitted_on, rest in (halves, halves[::-1]):
            chain = fit_chain(log.select(fitted_on), models, loss, missing, gains=gains)
            total += _cost_on(log.select(rest), chain, alpha, loss, missing, n=n, rng=rng)
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
    size, rows = len(log), chain_rows(log, chain.models, chain.answers)
    u, v = rng.random(size), rng.random(size)
    losses = rounded_losses(stop_losses(log, log.columns_of(chain.models), loss, missing), v)
    room = Fraction(size, n)
    stop = stop_on(chain, rows, losses, u, alpha=alpha + (1 - room) / (size + 1))
    chosen, asked = chain.follow(rows, policies_of(stop, u)[None])
    return float(asked_costs(log, chain.models, chosen[0], asked[0]).sum())
