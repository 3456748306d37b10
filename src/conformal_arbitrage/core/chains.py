"""Cascades: predicted losses of stopping, what a price of loss makes of them, and the walk along a list of policies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np

from conformal_arbitrage.core.exact import Floats, Integers
from conformal_arbitrage.core.risk import Events, walk_along
from conformal_arbitrage.errors import OptionError

# --- Paths ---


GUARDIAN: Final = -1
"""The answering model of a row that goes to the Guardian."""
NO_ANSWER: Final = -1
"""Stands among numbered answers where a model gave none."""


def normal_answer(text: str) -> str:
    """Return an answer as it is compared with others: white space and case do not count."""
    return " ".join(text.split()).casefold()


def answer_numbers(texts: Iterable[str | None], known: Sequence[str] = ()) -> Integers:
    """Number answers, the same for equal ones: the known ones by their place, others from there on, NO_ANSWER for none."""
    numbers = {answer: place for place, answer in enumerate(known)}
    found = [numbers.setdefault(normal_answer(text), len(numbers)) if text else NO_ANSWER for text in texts]
    return np.array(found, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PathStop:
    """Where a walk stopped: events before (position, u), in lexicographic order, are taken."""

    position: int
    u: float


def policies_of(stop: PathStop | None, u: Floats) -> Integers:
    """Return the place on the path of the policy that decides rows with these draws; 0 asks the Guardian alone."""
    return np.zeros(len(u), dtype=np.int64) if stop is None else np.where(u < stop.u, stop.position, stop.position - 1)


def calibrate_path(losses: Integers, u: Floats, *, alpha: Fraction) -> PathStop | None:
    """Return where to stop on a path of policies, or None if every query goes to the Guardian.

    Args:
        losses: policies x rows, in units of the bound: -1, 0 or 1. Before the first policy every loss is 0.
        u: one draw per row.
        alpha: the risk budget, in the same units.
    """
    if losses.shape[1:] != u.shape:
        raise OptionError(f"losses have the shape {losses.shape}, with {len(u)} draws")
    if not np.isin(losses, (-1, 0, 1)).all():
        raise OptionError("a path needs losses of -1, 0 or 1 in units of the bound; round others by a draw")
    spendable = alpha * (len(u) + 1) - 1
    if spendable < 0:
        return None
    events = path_events(losses)
    walk = walk_along(events, -u[events.row], signed=True, origin=-np.inf)
    (stop,) = walk.stops([int(spendable // 1)])
    if stop is None or walk.draws is None:
        return None
    if not stop:
        return PathStop(len(losses), 1.0)
    return PathStop(-int(walk.breakpoints[stop]), 0.0 - float(walk.draws[stop]))


def path_events(losses: Integers) -> Events:
    """Return the events of a path, as those of a pair: where the loss of a row changes from one policy to the next.

    A path is walked from its far end, the last policy, so positions (and draws, which are the caller's) change their sign.

    Args:
        losses: as for `calibrate_path`.
    """
    change = np.diff(losses, axis=0, prepend=0)
    place, row = np.nonzero(change)
    drop = change[place, row]
    return Events(
        n=losses.shape[1], total=int(drop.sum()), position=-1.0 - place.astype(np.float64), drop=drop, row=row
    )


def rounded_losses(losses: Floats, v: Floats) -> Integers:
    """Round losses in [-1, 1] to -1, 0 or 1 by one draw per row, so that their expectation stays.

    Args:
        losses: rows x models, in units of the bound.
        v: one draw per row, other than the one that orders the path.
    """
    if not (np.abs(losses) <= 1).all():
        raise OptionError(f"losses must lie in [-1, 1] in units of the bound; got {np.abs(losses).max():g}")
    return (losses > v[:, None]).astype(np.int64) - (-losses > v[:, None]).astype(np.int64)


# --- What is predicted when some models have answered ---


_LOWEST, _HIGHEST, _SCALE = 1e-6, 1 - 1e-6, 3.0
_DIGITS: Final = 9
_FEW_DIGITS: Final = 6
_FREE: Final = 1e-3
_WEIGHTS: Final = {"confidence": 0.1, "answer": 5.0, "slope": 20.0, "agreement": 1.0}
"""Penalties: what one answer says is believed after some dozen rows, how its confidence counts after more."""
_STEPS: Final = 50


def confidence_logits(confidence: Floats) -> Floats:
    """Return confidences in [0, 1] on a scale without ends; 0 where there is none.

    Rounded, so that one row alone and the same row among others give the same bits.
    """
    clipped = np.clip(confidence, _LOWEST, _HIGHEST)
    z = np.round(np.log(clipped / (1 - clipped)) / _SCALE, _DIGITS)
    return np.where(np.isnan(z), 0.0, z)


def stage_features(confidence: Floats, answers: Integers, asked: Sequence[int], known: int) -> tuple[Floats, Floats]:
    """Return what is known when some models have answered, as rows of features, and the penalty of each feature.

    An intercept; the confidence and the answer of every model asked so far, and their product; and for each two of them
    whether they gave the same answer, alone and times either confidence.

    Args:
        confidence: rows x models, in [0, 1]; NaN where a model gave none.
        answers: rows x models, as `answer_numbers` returns them.
        asked: the places of the models that have answered, in order.
        known: how many answers have features of their own.
    """
    z = confidence_logits(confidence)
    columns, penalties = [np.ones(len(z))], [_FREE]
    for place, j in enumerate(asked):
        said = [(answers[:, j] == answer).astype(np.float64) for answer in range(known)]
        columns += [z[:, j], *said, *(each * z[:, j] for each in said)]
        penalties += [_WEIGHTS["confidence"], *[_WEIGHTS["answer"]] * known, *[_WEIGHTS["slope"]] * known]
        for i in asked[:place]:
            same = ((answers[:, i] == answers[:, j]) & (answers[:, j] >= 0)).astype(np.float64)
            columns += [same, same * z[:, i], same * z[:, j]]
            penalties += [_WEIGHTS["agreement"]] * 3
    return np.column_stack(columns), np.array(penalties)


def feature_count(asked: int, known: int) -> int:
    """Return how many features there are when so many models have answered."""
    return 1 + asked * (1 + 2 * known) + 3 * (asked * (asked - 1) // 2)


def fit_ridge(features: Floats, targets: Floats, penalties: Floats) -> Floats:
    """Return the coefficients of a ridge regression: columns of the features x columns of the targets."""
    fit = np.linalg.solve(features.T @ features + np.diag(penalties), features.T @ targets)
    return np.round(fit, _FEW_DIGITS).astype(np.float64)


def fit_ridge_logistic(features: Floats, targets: Floats, penalties: Floats, steps: int = _STEPS) -> Floats:
    """Return the coefficients of a ridge logistic regression, by Newton's method.

    Args:
        targets: in [0, 1]; fractions are allowed.
        penalties: on the square of each coefficient.
        steps: after which to stop, converged or not.
    """
    coefficients = np.zeros(features.shape[1])
    for _ in range(steps):
        fitted = _sigmoid(features @ coefficients)
        slope = features.T @ (fitted - targets) + penalties * coefficients
        curvature = (features.T * (fitted * (1 - fitted))) @ features + np.diag(penalties)
        step = np.linalg.solve(curvature, slope)
        coefficients -= step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-10:
            break
    return np.round(coefficients, _DIGITS)


def linear(features: Floats, coefficients: Floats) -> Floats:
    """Return the linear prediction for each row, column by column and rounded: the same bits for one row alone.

    Args:
        features: rows x columns.
        coefficients: ... x columns, or ... x rows x columns.
    """
    total = np.zeros(np.broadcast_shapes(coefficients.shape[:-1], (len(features),)))
    for k, column in enumerate(features.T):
        total = total + column * coefficients[..., k]
    return np.round(total, _DIGITS)


def probability(features: Floats, coefficients: Floats) -> Floats:
    """Return the logistic prediction for each row, rounded likewise."""
    return np.round(_sigmoid(linear(features, coefficients)), _DIGITS)


def _sigmoid(values: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(values, -35.0, 35.0)))


# --- Policies ---


PRICES: Final = tuple(float(f"{price:.4g}") for price in (*np.geomspace(1e-3, 1.5, 44), 3.0, 10.0, 100.0))
"""What asking the Guardian once costs, in units of the largest loss: one price for each policy of a path."""


def next_actions(loss: Floats, ahead: Sequence[Floats]) -> Integers:
    """Return what costs least: 0 to ask the Guardian, 1 to give the last answer, 2 and on to ask one of the later models.

    Args:
        loss: that is expected of the last answer, in Guardian calls, per policy and row; inf if it cannot be given.
        ahead: what is expected of asking each later model and going on from there, dollars and loss in Guardian calls.
    """
    return np.stack(np.broadcast_arrays(1.0, loss, *ahead)).argmin(axis=0)
