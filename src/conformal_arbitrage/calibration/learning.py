"""learn: any learner on a part of a log, and a log in router form for the rest, scored by what it learned.

The rows that are learned from do not appear in the scored log. So whatever the learner does, its score is a fixed function
for the rows that are calibrated, and their certificate is an ordinary one in router form.

Knows nothing of certificates or the command line.
"""

import importlib
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Protocol

import numpy as np

from conformal_arbitrage.calibration.learned_fit import row_inputs
from conformal_arbitrage.calibration.learned_score import Features
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.planning import split
from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.core.choices import row_argmax
from conformal_arbitrage.core.features import FeatureSet, feature_matrix
from conformal_arbitrage.core.losses import within_unit
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.fitness import refuse_unfit
from conformal_arbitrage.scorelog.log import ScoreLog

LearnerName = Literal["ridge", "hist-gradient-boosting"]
_RIDGE_STRENGTH = 5.0


class Learner(Protocol):
    """Anything with the two methods of scikit-learn; a classifier's `predict_proba` is used if it has one."""

    def fit(self, features: Any, loss: Any, /) -> object:
        """Learn the loss from features, rows x columns."""
        ...

    def predict(self, features: Any, /) -> Any:
        """Return a number per row; a larger one is more at risk."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRouter:
    """What `learn` returns.

    Attributes:
        scored: the other rows, in router form: the confidence is what the learner makes of them.
        learned_rows: how many rows were learned from.
        learner: the fitted learner.
        features: what it was given.
        options: how losses were measured.
    """

    scored: ScoreLog
    learned_rows: int
    learner: Learner
    features: FeatureSet
    options: CalibrationOptions

    def confidence(self, log: ScoreLog) -> Floats:
        """Return the confidence of every row of a log: 0 where no action leads, which always defers."""
        return _confidence(self.learner, self.features, log, self.options)


def learn(
    log: ScoreLog,
    *,
    share: float = 0.4,
    seed: int = 0,
    learner: LearnerName | Learner = "ridge",
    features: Features | None = None,
) -> LearnedRouter:
    """Learn a score on a random part of a log, and score the rest.

    Args:
        log: the recorded scores, with losses in [0, 1].
        share: the share of the rows to learn from.
        seed: of the random part.
        learner: "ridge", "hist-gradient-boosting" (needs scikit-learn, the extra `learn`), or a learner of your own.
        features: what to learn from besides the margin and the position of the top action.
    """
    refuse_unfit(log)
    if not within_unit(log.loss_scores):
        raise OptionError(f"{log.source}: learning needs losses in [0, 1]; divide the Guardian's scores by their range")
    first, rest = split(log, share=share, seed=seed)
    options = CalibrationOptions(
        boundary="random", score="auto", features=features or Features(), missing_guardian="worst_case"
    )
    inputs = row_inputs(first, options, Fraction(1))
    index = np.flatnonzero(inputs.used & ~first.unknown_loss)
    columns = FeatureSet(
        menu_size=None if options.features is None else options.features.menu_size,
        groups=inputs.group_names(),
        tokens=inputs.tokens is not None,
        text=0 if inputs.text is None else inputs.text.shape[1],
    )
    loss = inputs.share[index]
    fitted = _named(learner, columns, binary=bool(np.isin(loss, (0, 1)).all()))
    fitted.fit(feature_matrix(columns, inputs.feature_rows(index)), loss)
    return LearnedRouter(
        scored=_scored(rest, _confidence(fitted, columns, rest, options)),
        learned_rows=len(first),
        learner=fitted,
        features=columns,
        options=options,
    )


def _confidence(learner: Learner, columns: FeatureSet, log: ScoreLog, options: CalibrationOptions) -> Floats:
    """Return exp(-risk), which falls as the risk rises and never reaches 0; 0 for rows that are always deferred."""
    inputs = row_inputs(log, options, Fraction(1))
    index = np.flatnonzero(inputs.used)
    risk = _risk(learner, feature_matrix(columns, inputs.feature_rows(index)))
    confidence = np.zeros(len(inputs.margin))
    confidence[index] = np.exp(-risk)
    return confidence


def _risk(learner: Any, features: Floats) -> Floats:
    if hasattr(learner, "predict_proba"):
        return np.asarray(learner.predict_proba(features), dtype=np.float64)[:, -1]
    risk = np.asarray(learner.predict(features), dtype=np.float64).reshape(-1)
    if len(risk) != len(features) or not np.isfinite(risk).all():
        raise OptionError("predict() of your learner must return one finite number per row, larger for more risk")
    return risk


def _scored(rest: ScoreLog, confidence: Floats) -> ScoreLog:
    """Return rows in router form: both grades are `correct` of a binarized log, else 1 and 1 - regret."""
    top = row_argmax(rest.primary, rest.offsets)
    chosen = row_argmax(np.nan_to_num(rest.guardian), rest.offsets)
    if rest.binary is not None or rest.is_router:
        grades = rest.outcome("correct")
    else:
        grades = rest.guardian + 1 - np.repeat(np.maximum.reduceat(rest.guardian, rest.offsets[:-1]), rest.sizes)
    start, unknown = rest.offsets[:-1], rest.unknown_loss
    return ScoreLog.from_router(
        confidence=confidence,
        primary_grade=np.where(unknown, np.nan, grades[start + top]),
        guardian_grade=np.where(unknown, np.nan, grades[start + chosen]),
        id=rest.id,
        group=rest.group,
        context=rest.context,
        primary_usage=rest.primary_usage,
        guardian_usage=rest.guardian_usage,
    )


def _named(learner: LearnerName | Learner, columns: FeatureSet, *, binary: bool) -> Learner:
    if learner == "ridge":
        return RidgeLearner(penalties=columns.penalties())
    if learner == "hist-gradient-boosting":
        return _boosting(binary=binary)
    if isinstance(learner, str) or not (hasattr(learner, "fit") and hasattr(learner, "predict")):
        raise OptionError(
            f"learner must be 'ridge', 'hist-gradient-boosting' or have fit(features, loss) and predict(features); got "
            f"{learner!r:.60}"
        )
    return learner


def _boosting(*, binary: bool) -> Learner:
    try:
        ensemble = importlib.import_module("sklearn.ensemble")
    except ImportError as error:
        raise OptionError(
            "hist-gradient-boosting needs scikit-learn; run `pip install 'conformal-arbitrage[learn]'`"
        ) from error
    name = "HistGradientBoostingClassifier" if binary else "HistGradientBoostingRegressor"
    return getattr(ensemble, name)(random_state=0)


class RidgeLearner:
    """A ridge regression of the loss, with the penalty that the learned score of a certificate uses.

    Args:
        penalties: the weight of each column in the penalty.
        strength: of the penalty.
    """

    def __init__(self, penalties: Floats, strength: float = _RIDGE_STRENGTH) -> None:
        self._penalty = strength * np.diag(penalties)
        self.weights: Floats = np.zeros(len(penalties))

    def fit(self, features: Floats, loss: Floats, /) -> None:
        """Fit the loss."""
        solved = np.linalg.solve(features.T @ features + self._penalty, features.T @ loss)
        self.weights = solved.astype(np.float64)

    def predict(self, features: Floats, /) -> Floats:
        """Return the predicted loss."""
        return features @ self.weights
