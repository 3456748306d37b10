"""Learn a score from a log: every row used to learn and to calibrate, or any learner on a part of it."""

import hashlib
import importlib
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, Protocol

import numpy as np

from conformal_arbitrage.calibration.learned import (
    FeatureName,
    Features,
    LearnedScore,
    LearnedTerms,
    ScoreRows,
    answer_place,
    answers_of,
    logged_answers,
    pack,
    refuse_row_count,
    text_embedding,
    used_rows,
)
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.planning import split
from conformal_arbitrage.core.exact import SINGLE_DIGITS, Bools, Floats, Integers, margins, row_argmax
from conformal_arbitrage.core.features import (
    STRENGTHS,
    VERSION,
    FeatureRows,
    FeatureSet,
    feature_matrix,
    left_out_kept,
    spendable_losses,
)
from conformal_arbitrage.core.risk import first_outside, within_unit
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.fitness import column_texts, refuse_floor, refuse_unfit
from conformal_arbitrage.scorelog.log import ScoreLog

# --- Learn a score from a log ---


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedFit:
    """A score that was learned from a log.

    Attributes:
        score: the score.
        terms: what the certificate says about it.
        losses: of the log's rows if each is decided by the others, in units of the bound.
    """

    score: LearnedScore
    terms: LearnedTerms
    losses: Integers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowInputs:
    """All rows of a log as a learner sees them.

    Attributes:
        margin: the lead of each row's top action.
        top: its position.
        share: the loss of keeping it, in units of the bound; a gain beyond the bound counts as one of the bound.
        used: which rows a score is learned from.
        group: of each row, "" if it has none; None without a group feature.
        tokens: the Primary's output tokens; None without that feature.
        menu: rows x actions, of rows that have the declared size; None without one.
        text: rows x columns, the vectors of the rows' texts; None without that feature.
        answer: the place of each row's answer, -1 if unknown; None without that feature.
    """

    margin: Floats
    top: Integers
    share: Floats
    used: Bools
    group: list[str] | None
    tokens: Floats | None
    menu: Floats | None
    text: Floats | None = None
    answer: Integers | None = None

    def feature_rows(self, index: Integers) -> FeatureRows:
        """Return what the features of some rows are computed from."""
        return FeatureRows(
            margin=self.margin[index],
            top=self.top[index],
            scores=None if self.menu is None else self.menu[index],
            group=None if self.group is None else [self.group[k] for k in index.tolist()],
            tokens=None if self.tokens is None else self.tokens[index],
            text=None if self.text is None else self.text[index],
            answer=None if self.answer is None else self.answer[index],
        )

    def group_names(self) -> tuple[str, ...]:
        """Return the groups that have a column of their own."""
        return () if self.group is None else tuple(sorted({name for name in self.group if name}))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnedRows:
    """The same with losses of -1, 0 or 1.

    Attributes:
        inputs: the rows.
        loss: of each, in units of the bound, rounded to -1, 0 or 1 by a draw.
        rounded: whose loss was neither before.
        net: whether losses may be negative.
    """

    inputs: RowInputs
    loss: Integers
    rounded: Bools
    net: bool

    def score_rows(self, chosen: Integers | Bools, u: Floats, menu_size: int | None) -> ScoreRows:
        """Return some of the rows, all of which must be used ones, with their draws."""
        index = np.arange(len(self.loss))[chosen]
        rows, names = self.inputs.feature_rows(index), self.inputs.group_names()
        return ScoreRows(rows=rows, names=names, menu_size=menu_size, loss=self.loss[index], u=u[index], net=self.net)


def row_inputs(log: ScoreLog, options: CalibrationOptions, bound: Fraction) -> RowInputs:
    """Return the rows of a log as a learner sees them.

    Raises:
        OptionError: none of them can be learned from.
    """
    features = options.features or Features()
    top, margin, share = _top_alone(log, options, bound)
    used = used_rows(margin, log.sizes, features.menu_size)
    if not used.any():
        declared = "" if features.menu_size is None else f" of the declared {features.menu_size} actions"
        raise OptionError(f"{log.source}: no row{declared} has a top action that leads, so there is nothing to learn")
    return RowInputs(
        margin=margin,
        top=top,
        share=share,
        used=used,
        group=column_texts(log, "group") if features.groups else None,
        tokens=log.primary_usage.output_tokens if features.tokens else None,
        menu=None if features.menu_size is None else _menus(log, features.menu_size),
        text=_texts(log) if features.text else None,
        answer=_answer_places(log, required=features.answers is True) if features.answers is not False else None,
    )


def _answer_places(log: ScoreLog, *, required: bool) -> Integers | None:
    """Return the place of every row's answer; None if no column names it and it is not required."""
    answers = answers_of(log) if required else logged_answers(log)
    if answers is None and not required:
        return None
    if answers is None:
        raise OptionError(
            f"{log.source}: there is no `answer` column, nor texts of the actions; add the Primary's answers, or leave "
            "answers out"
        )
    places = {answer: answer_place(answer) for answer in set(answers)}
    return np.array([places[answer] for answer in answers], dtype=np.int64)


def _texts(log: ScoreLog) -> Floats:
    """Return the vector of every row's text."""
    if log.context is None:
        raise OptionError(
            f"{log.source}: there is no `context` column, so texts cannot be learned from; add it, or leave text out"
        )
    return text_embedding().vectors(log.context.tolist())


def learned_rows(log: ScoreLog, options: CalibrationOptions, bound: Fraction) -> LearnedRows:
    """Return the rows of a log with losses of -1, 0 or 1."""
    inputs = row_inputs(log, options, bound)
    size = np.abs(inputs.share)
    return LearnedRows(
        inputs=inputs,
        loss=((size > options.rounding_draws(log)) * np.sign(inputs.share)).astype(np.int64),
        rounded=(size > 0) & (size < 1) & inputs.used,
        net=options.loss == "net",
    )


def _top_alone(log: ScoreLog, options: CalibrationOptions, bound: Fraction) -> tuple[Integers, Floats, Floats]:
    """Return each row's top action, its margin, and the loss if it stands alone, in units of the bound."""
    losses = options.losses(log)
    whole = float(bound * 10**losses.tick_digits)
    top, margin, share = np.empty(len(log), dtype=np.int64), np.empty(len(log)), np.empty(len(log))
    for piece in losses.blocks:
        rows = piece.block.rows
        top[rows], margin[rows] = piece.order[0], margins(piece.gaps)
        share[rows] = np.clip(piece.levels[0] / whole, -1.0, 1.0)
    return top, margin, share


def _menus(log: ScoreLog, size: int) -> Floats:
    """Return the scores of rows with `size` actions, zeros for the others."""
    menus, fitting = np.zeros((len(log), size)), log.sizes == size
    menus[fitting] = log.primary[log.offsets[:-1][fitting][:, None] + np.arange(size)]
    return menus.astype(np.float32).astype(np.float64) if log.score_digits == SINGLE_DIGITS else menus


def learn_score(log: ScoreLog, alpha: Fraction, bound: Fraction, options: CalibrationOptions) -> LearnedFit | None:
    """Learn a score from a log; None if the budget does not allow a single loss.

    Raises:
        OptionError: the log has too few rows, or too many.
    """
    n = len(log)
    refuse_row_count(n, log.source)
    budget, u = spendable_losses(alpha, bound, n), options.draws(log)
    if budget < 1 or u is None:
        return None
    rows, features = learned_rows(log, options, bound), options.features or Features()
    chosen, with_margin = rows.score_rows(rows.inputs.used, u, features.menu_size), options.score == "auto"
    packed = pack(chosen)
    score = LearnedScore(
        rows=chosen, packed=packed, digits=log.score_digits, budget=budget, with_margin=with_margin, floor=log.floor or 0.0
    )  # fmt: skip
    kept_rows = left_out_kept(chosen.fits(), budget=spendable_losses(alpha, bound, n - 1), with_margin=with_margin)
    alone = int((log.sizes == 1).sum())
    terms = LearnedTerms(
        features=_names(rows.inputs),
        version=VERSION,
        menu_size=features.menu_size,
        group_source=None if rows.inputs.group is None else features.group_source,
        penalties=STRENGTHS,
        rows=len(chosen.loss),
        columns=len(chosen.features.penalties()),
        rounded_rows=int(rows.rounded.sum()),
        missing=_missing(rows.inputs),
        deferred=(n - alone - int(kept_rows.sum())) / n,
        sha256=hashlib.sha256(packed).hexdigest(),
        text_sha256=None if rows.inputs.text is None else text_embedding().sha256,
    )
    return LearnedFit(score=score, terms=terms, losses=chosen.loss * kept_rows)


def _names(rows: RowInputs) -> tuple[FeatureName, ...]:
    optional: tuple[tuple[FeatureName, object], ...] = (
        ("menu", rows.menu),
        ("group", rows.group),
        ("tokens", rows.tokens),
        ("text", rows.text),
        ("answer", rows.answer),
    )
    return ("margin", "position", *(name for name, values in optional if values is not None))


def _missing(rows: RowInputs) -> dict[str, int]:
    """Return how many rows lack a feature, by its name."""
    missing: dict[str, int] = {}
    if rows.group is not None:
        missing["group"] = rows.group.count("")
    if rows.tokens is not None:
        missing["tokens"] = int(np.isnan(rows.tokens).sum())
    if rows.text is not None:
        missing["text"] = int((~rows.text.any(axis=1)).sum())
    if rows.answer is not None:
        missing["answer"] = int((rows.answer < 0).sum())
    return missing


# --- learn ---


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
    loss: Literal["net"] | None = None,
) -> LearnedRouter:
    """Learn a score on a random part of a log, and score the rest.

    Args:
        log: the recorded scores, with losses in [0, 1].
        share: the share of the rows to learn from.
        seed: of the random part.
        learner: "ridge", "hist-gradient-boosting" (needs scikit-learn, the extra `learn`), or a learner of your own.
        features: what to learn from besides the margin and the position of the top action.
        loss: "net" to learn where the Primary is better, too, and to score rows for a net certificate.
    """
    refuse_unfit(log.source, log.extra)
    refuse_floor(log)
    if not within_unit(log.loss_scores):
        where = first_outside(log.loss_scores, log.offsets, log.source)
        raise OptionError(f"{where}: learning needs losses in [0, 1]; divide the Guardian's scores by their range")
    first, rest = split(log, share=share, seed=seed)
    options = CalibrationOptions(
        boundary="random", score="auto", features=features or Features(), missing_guardian="worst_case"
    )
    measured = replace(options, loss=loss)
    inputs = row_inputs(first, measured, Fraction(1))
    index = np.flatnonzero(inputs.used & ~measured.unknown_loss(first))
    columns = FeatureSet(
        menu_size=None if options.features is None else options.features.menu_size,
        groups=inputs.group_names(),
        tokens=inputs.tokens is not None,
        text=0 if inputs.text is None else inputs.text.shape[1],
        answers=inputs.answer is not None,
    )
    lost = inputs.share[index]
    fitted = _named(learner, columns, binary=bool(np.isin(lost, (0, 1)).all()))
    fitted.fit(feature_matrix(columns, inputs.feature_rows(index)), lost)
    return LearnedRouter(
        scored=_scored(rest, _confidence(fitted, columns, rest, options), net=loss == "net").taken_from(*log.lineage()),
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


def _scored(rest: ScoreLog, confidence: Floats, *, net: bool) -> ScoreLog:
    """Return rows in router form: grades are `correct` for the net loss or of a binarized log, else 1 and 1 - regret."""
    top = row_argmax(rest.primary, rest.offsets)
    chosen = row_argmax(np.nan_to_num(rest.guardian), rest.offsets)
    if net or rest.binary is not None or rest.is_router:
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
