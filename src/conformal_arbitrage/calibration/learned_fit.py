"""Learn a score from a log, with every row used to learn and to calibrate; docs/theory.md has the proof.

Losses other than 0 and the bound are rounded to one of the two by a keyed draw, which keeps their mean: the proof is about
such losses only.

Knows nothing of certificates or what is said about them.
"""

import hashlib
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from conformal_arbitrage.calibration.learned_score import (
    FeatureName,
    Features,
    LearnedScore,
    LearnedTerms,
    ScoreRows,
    pack,
    refuse_row_count,
    used_rows,
)
from conformal_arbitrage.calibration.options import CalibrationOptions
from conformal_arbitrage.calibration.text_embedding import text_embedding
from conformal_arbitrage.core.arrays import Bools, Floats, Integers
from conformal_arbitrage.core.features import VERSION, FeatureRows
from conformal_arbitrage.core.gaps import SINGLE_DIGITS, margins
from conformal_arbitrage.core.learned import STRENGTHS, left_out_kept, spendable_losses
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.fitness import column_texts
from conformal_arbitrage.scorelog.log import ScoreLog


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedFit:
    """A score that was learned from a log.

    Attributes:
        score: the score.
        terms: what the certificate says about it.
        total: loss of the log's rows if each is decided by the others.
    """

    score: LearnedScore
    terms: LearnedTerms
    total: Fraction


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowInputs:
    """All rows of a log as a learner sees them.

    Attributes:
        margin: the lead of each row's top action.
        top: its position.
        share: the loss of keeping it, in units of the bound.
        used: which rows a score is learned from.
        group: of each row, "" if it has none; None without a group feature.
        tokens: the Primary's output tokens; None without that feature.
        menu: rows x actions, of rows that have the declared size; None without one.
        text: rows x columns, the vectors of the rows' texts; None without that feature.
    """

    margin: Floats
    top: Integers
    share: Floats
    used: Bools
    group: list[str] | None
    tokens: Floats | None
    menu: Floats | None
    text: Floats | None = None

    def feature_rows(self, index: Integers) -> FeatureRows:
        """Return what the features of some rows are computed from."""
        return FeatureRows(
            margin=self.margin[index],
            top=self.top[index],
            scores=None if self.menu is None else self.menu[index],
            group=None if self.group is None else [self.group[k] for k in index.tolist()],
            tokens=None if self.tokens is None else self.tokens[index],
            text=None if self.text is None else self.text[index],
        )

    def group_names(self) -> tuple[str, ...]:
        """Return the groups that have a column of their own."""
        return () if self.group is None else tuple(sorted({name for name in self.group if name}))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnedRows:
    """The same with losses of 0 or 1.

    Attributes:
        inputs: the rows.
        loss: of each, in units of the bound, rounded to 0 or 1 by a draw.
        rounded: whose loss was neither before.
    """

    inputs: RowInputs
    loss: Integers
    rounded: Bools

    def score_rows(self, chosen: Integers | Bools, u: Floats, menu_size: int | None) -> ScoreRows:
        """Return some of the rows, all of which must be used ones, with their draws."""
        index = np.arange(len(self.loss))[chosen]
        rows, names = self.inputs.feature_rows(index), self.inputs.group_names()
        return ScoreRows(rows=rows, names=names, menu_size=menu_size, loss=self.loss[index], u=u[index])


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
    )


def _texts(log: ScoreLog) -> Floats:
    """Return the vector of every row's text."""
    if log.context is None:
        raise OptionError(
            f"{log.source}: there is no `context` column, so texts cannot be learned from; add it, or leave text out"
        )
    return text_embedding().vectors(log.context.tolist())


def learned_rows(log: ScoreLog, options: CalibrationOptions, bound: Fraction) -> LearnedRows:
    """Return the rows of a log with losses of 0 or 1."""
    inputs = row_inputs(log, options, bound)
    return LearnedRows(
        inputs=inputs,
        loss=(inputs.share > options.rounding_draws(log)).astype(np.int64),
        rounded=(inputs.share > 0) & (inputs.share < 1) & inputs.used,
    )


def _top_alone(log: ScoreLog, options: CalibrationOptions, bound: Fraction) -> tuple[Integers, Floats, Floats]:
    """Return each row's top action, its margin, and the loss if it stands alone, in units of the bound."""
    stairs = options.stairs(log)
    whole = float(bound * 10**stairs.tick_digits)
    top, margin, share = np.empty(len(log), dtype=np.int64), np.empty(len(log)), np.empty(len(log))
    for stair in stairs.blocks:
        rows = stair.block.rows
        top[rows], margin[rows] = stair.order[0], margins(stair.gaps)
        share[rows] = np.minimum(stair.levels[0] / whole, 1.0)
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
        rows=chosen, packed=packed, digits=log.score_digits, budget=budget, with_margin=with_margin
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
    return LearnedFit(score=score, terms=terms, total=int(chosen.loss[kept_rows].sum()) * bound)


def _names(rows: RowInputs) -> tuple[FeatureName, ...]:
    optional: tuple[tuple[FeatureName, object], ...] = (
        ("menu", rows.menu),
        ("group", rows.group),
        ("tokens", rows.tokens),
        ("text", rows.text),
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
    return missing
