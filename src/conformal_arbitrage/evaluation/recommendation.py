"""recommend: choose on a part of a log what its proof does not choose on all rows, and certify on the rest."""

import json
import os
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args

import numpy as np
from msgspec import Struct, ValidationError, convert, structs

from conformal_arbitrage.calibration.calibrate import LogSurvey, calibrate, refuse_repeated_ids
from conformal_arbitrage.calibration.certificate import Certificate, group_source_of
from conformal_arbitrage.calibration.learned import Features, ScoreKind, text_embedding
from conformal_arbitrage.calibration.options import CalibrationOptions, resolve_options
from conformal_arbitrage.calibration.planning import TUNING_SHARE, rows_needed, split
from conformal_arbitrage.calibration.promises import CertifiedPart
from conformal_arbitrage.calibration.secret import project_key
from conformal_arbitrage.core.bounds import Interval, binomial_interval
from conformal_arbitrage.core.exact import Bools, n_rows, row_argmax
from conformal_arbitrage.core.features import LARGEST_FIXED_MENU
from conformal_arbitrage.core.risk import Number, as_fraction, check_alpha
from conformal_arbitrage.errors import ConfigError, InfeasibleError, OptionError
from conformal_arbitrage.evaluation.frontier import evaluate
from conformal_arbitrage.evaluation.inspection import (
    FEWEST_TUNING_ROWS,
    PointEstimate,
    mean_estimate,
    point_estimate,
    primary_alone,
    right_gains,
)
from conformal_arbitrage.scorelog.fitness import column_texts, refuse_floor, refuse_unfit
from conformal_arbitrage.scorelog.log import CostKeywords, CostOptions, ScoreLog, costs_of
from conformal_arbitrage.scorelog.parts import ScoreParts, first_rows, scheme_of
from conformal_arbitrage.scorelog.tables import Table, write_text
from conformal_arbitrage.types import Boundary, MissingGuardian

# --- What `recommend` returns ---


PromisedLoss = Literal["regret", "net"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOption:
    """One way to route, with what the tuning rows say of it.

    Attributes:
        primary: the Primary's column.
        guardian: the Guardian's column.
        loss: what is promised: "regret", or "net" with gains counted.
        score: what queries are ordered by: their "margin", or "auto", a score learned from the rows of the certificate or
            the margin, whichever keeps more of them.
        features: what such a score is learned from.
        boundary: "include" or "random".
        deferred: expected share of queries sent to the Guardian with as many rows as the certificate has.
        spread: standard deviation of that share over random halves of the rows it was tried on.
        deferred_with: the share with 2 and 4 times as many rows and, under "any", with any number of them.
        cost_per_1000: expected dollars per 1000 queries; None if costs are unknown.
        eligible: whether it could be chosen: it promises the loss that was asked for.
    """

    primary: str
    guardian: str
    loss: PromisedLoss
    score: ScoreKind
    boundary: Boundary
    deferred: float
    spread: float
    deferred_with: dict[str, float]
    cost_per_1000: float | None
    eligible: bool
    features: Features | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteComparison:
    """What a certificate does on rows that it has not seen, against simpler choices.

    Attributes:
        measure: what is compared: "correct", the share of right answers, or else "loss", the loss avoided.
        over_primary: gain over the Primary alone; None if only the loss against the Guardian is known.
        over_guardian: gain over the Guardian alone.
        over_random: gain over random routing at the same cost or, without costs, with as many Guardian calls.
        worth_routing: whether these rows show a gain over the Primary alone and over random routing.
        verdict: the same in words.
    """

    measure: Literal["correct", "loss"]
    over_primary: PointEstimate | None
    over_guardian: PointEstimate | None
    over_random: PointEstimate
    worth_routing: bool
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recommendation:
    """What to run, and the certificate that runs it.

    Attributes:
        source: the log.
        alpha: the risk budget.
        tuning: the rows that the choice was made on; None if the proof makes it on all rows.
        certified: the other rows, which the certificate was made from.
        share: of the rows that were used for tuning.
        seed: of the split.
        chosen: the option that the certificate is for.
        options: all options, the cheapest first.
        left_out: options that do not apply, with the reason.
        deferred: share of the tuning rows that the certificate sends to the Guardian. Without tuning rows, each tenth of
            the rows is decided by a certificate of the others, of the same rule and allowing as much loss per row.
        deferred_interval: a 95 % confidence interval for its share of new queries, if rows are independent draws. The
            certificate has not seen the tuning rows; that an option was chosen on them is allowed for. Without them it
            is approximate.
        cost_per_1000: dollars per 1000 queries on the same rows; None if costs are unknown.
        cost_error: its standard error.
        guardian_cost_per_1000: dollars per 1000 queries of the Guardian alone.
        comparison: with the models alone and with random routing, on the same rows.
        certificate: the certificate.
    """

    source: str
    alpha: float
    tuning: ScoreLog | None
    certified: ScoreLog
    share: float
    seed: int
    chosen: RouteOption
    options: tuple[RouteOption, ...]
    left_out: dict[str, str]
    deferred: float
    deferred_interval: Interval
    cost_per_1000: float | None
    cost_error: float | None
    guardian_cost_per_1000: float | None
    comparison: RouteComparison
    certificate: Certificate

    def to_dict(self) -> dict[str, Any]:
        """Return the recommendation as a JSON document."""
        objects = ("chosen", "options", "certificate", "tuning", "certified", "comparison")
        figures = {name: getattr(self, name) for name in self.__slots__ if name not in objects}
        return figures | {
            "comparison": asdict(self.comparison),
            "tuning_rows": 0 if self.tuning is None else len(self.tuning),
            "certified_rows": len(self.certified),
            "chosen": asdict(self.chosen),
            "options": [asdict(option) for option in self.options],
            "more_rows": self.more_rows(),
            "certificate": self.certificate.to_dict(),
        }

    def facts(self) -> list[tuple[str, str]]:
        """Return the choice and what it costs as name and value pairs, for people."""
        chosen, (low, high) = self.chosen, self.deferred_interval
        facts = [
            ("run", f"{chosen.primary} as the Primary, {chosen.guardian} as the Guardian"),
            ("loss", f"{chosen.loss}, at most {self.alpha:g} on average"),
            ("score", _describe_score(chosen, self.certificate)),
            ("boundary", chosen.boundary),
            ("rows", self._rows()),
            (
                "asks the Guardian",
                f"about {100 * self.deferred:.1f} % of the queries (95 % interval {100 * low:.1f} to {100 * high:.1f} %), "
                f"measured on {self._measured_on()}",
            ),
        ]
        if self.cost_per_1000 is not None and self.guardian_cost_per_1000 is not None:
            cost = f"${self.cost_per_1000:.4g} per 1000 queries (standard error {self.cost_error or 0.0:.2g})"
            facts.append(("costs", f"{cost}; the Guardian alone ${self.guardian_cost_per_1000:.4g}"))
        return facts

    def _rows(self) -> str:
        if self.tuning is None:
            return f"all {len(self.certified)} are certified: what there is to choose, its proof chooses on all of them"
        return (
            f"{len(self.tuning)} to choose on, drawn at random (share {self.share:g}, seed {self.seed}); the other "
            f"{len(self.certified)} are certified"
        )

    def _measured_on(self) -> str:
        if self.tuning is None:
            return f"each tenth of the {len(self.certified)} rows by a certificate of the others"
        return f"the {len(self.tuning)} rows to choose on, which the certificate has not seen"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of all options, with the Guardian calls that each would take beyond the chosen one."""
        header = ["option", "loss", "score", "boundary", "Guardian calls"]
        rows = [_cells(option, self.chosen) for option in self.options]
        if len({pair_of(option) for option in self.options}) == 1:  # a single pair of models is not repeated
            header, rows = ["", *header[1:]], [[row[0][:1], *row[1:]] for row in rows]
        costs = [option.cost_per_1000 for option in self.options]
        if any(cost is not None for cost in costs):
            header.append("$ per 1000")
            rows = [[*row, "-" if cost is None else f"{cost:.4g}"] for row, cost in zip(rows, costs, strict=True)]
        return header, rows

    def more_rows(self) -> str:
        """Return what more rows to certify on would buy, in words."""
        here, twice = self.chosen.deferred, self.chosen.deferred_with["2"]
        limit = self.chosen.deferred_with["any"]
        learning = " A learned score also gets better with rows." if self.chosen.score != "margin" else ""
        if here - limit < 0.01:
            return (
                "More rows would hardly help: even with any number of them the share falls by "
                f"{_points(here - limit)}.{learning}"
            )
        return (
            f"More rows would help: twice as many lower the share by about {_points(here - twice)}, any number of them by "
            f"about {_points(here - limit)}.{learning}"
        )

    def why_this_loss(self) -> str:
        """Return what the other loss would cost, and why it is not chosen here."""
        other = next((o for o in self.options if not o.eligible and pair_of(o) == pair_of(self.chosen)), None)
        if other is None:
            return "The loss says what is promised, so it is never chosen for you: --loss regret or --loss net."
        fewer = self.chosen.deferred - other.deferred
        more_or_fewer = f"about {100 * abs(fewer):.1f} points {'fewer' if fewer > 0 else 'more'} of the queries"
        calls = more_or_fewer if round(100 * fewer, 1) else "about as often"
        saves = f"--loss {other.loss} would ask the Guardian {calls}"
        meaning = (
            "it lets answers that beat the Guardian's make up for worse ones"
            if other.loss == "net"
            else "it gives no credit for answers that beat the Guardian's"
        )
        return f"{saves}, but promises something else ({meaning}), so it is yours to choose."

    def policy_section(self, certificate: str) -> str:
        """Return the section of arbitrage.toml that serves the certificate of this file."""
        lines = ["[policies.main]", f"certificate = {_toml(certificate)}"]
        if self.certificate.identities == "unbound":
            lines.append('allow = ["unbound"]  # this log does not name its models, so answers carry no guarantee')
        source = group_source_of(self.certificate)
        lines += [] if source is None else [f"group = {_toml(source)}"]
        form = "text" if self.certificate.evidence.router else "menu"
        return "\n".join([*lines, f'form = "{form}"', ""])

    def __repr__(self) -> str:
        chosen = self.chosen
        return (
            f"Recommendation(primary={chosen.primary!r}, guardian={chosen.guardian!r}, loss={chosen.loss!r}, "
            f"score={chosen.score!r}, boundary={chosen.boundary!r}, deferred={self.deferred:.3f}, alpha={self.alpha:g})"
        )


def _cells(option: RouteOption, chosen: RouteOption) -> list[str]:
    more = round(100 * (option.deferred - chosen.deferred), 1)
    calls = "chosen" if option is chosen else f"{more:+.1f} points" if more else "as many"
    score = f"{option.score}, texts" if _reads_texts(option.features) else option.score
    pair = f"{'> ' if option is chosen else '  '}{option.primary} -> {option.guardian}"
    return [pair, option.loss, score, option.boundary, calls]


def _describe_score(option: RouteOption, certificate: Certificate) -> str:
    """Return what queries are ordered by, and what a live query has to carry for it."""
    if certificate.learned is None:
        return option.score
    return f"{option.score}, learned from {', '.join(certificate.learned.features)}"


def _points(share: float) -> str:
    return f"{100 * max(share, 0.0):.1f} points"


def pair_of(option: RouteOption) -> tuple[str, str]:
    """Return the columns of an option's models."""
    return option.primary, option.guardian


# --- recommend ---


CONFIDENCE = 0.95
"""Of the interval for the Guardian's share, over all options that were compared."""
_TIMES: tuple[int | None, ...] = (1, 2, 4, None)
"""Multiples of the certificate's rows at which the share is estimated; None for any number of rows."""
_LEARNED_HANDICAP = 1.02
"""For the net loss a learned score is taken if it costs less than the margin by this factor: it brings a file along."""
_DECIMALS = 9
"""Of a budget that stands for alpha with fewer rows."""
FOLDS = 10
"""Parts of the rows, each decided by a certificate of the others."""
_MOST_TRIED = 4000
"""Rows whose halves options are tried on, at most."""


def recommend(
    logs: ScoreLog | Sequence[ScoreLog],
    alpha: Number,
    *,
    loss: PromisedLoss = "regret",
    score: Literal["auto", "margin"] = "auto",
    share: float | None = None,
    seed: int = 0,
    trials: int = 20,
    key: bytes | None = None,
    loss_bound: Number | None = None,
    missing_guardian: MissingGuardian | None = None,
    text: bool = False,
    costs: CostOptions | None = None,
    **keywords: Unpack[CostKeywords],
) -> Recommendation:
    """Choose how to route, and certify the choice on rows that it was not made on.

    The score is chosen by the certificate's proof, on all rows; a pair of models, or whether a learned score pays under the
    net loss, on a random part: the Guardian that is right most often, and the Primary that costs or asks it least.

    Args:
        logs: the recorded scores; or several logs of the same rows, one for each pair of models to choose from.
        alpha: the risk budget. If it was chosen on the rows of a share and a seed, name these.
        loss: what is promised, which is yours to say: "regret", or "net" with gains counted.
        score: "auto" to learn a score where the log can tell more than a confidence, or "margin".
        share: of the rows, to choose on; the certificate does not use them. By default 0.3, or 0 if nothing is chosen.
        seed: of the split.
        trials: random halves of these rows that each option is tried on.
        key: the secret bytes behind the draws; by default those of the project's secret.
        loss_bound, missing_guardian: as in `calibrate`.
        text: also learn from the texts of the queries; needs the extra `text`.
        costs, **keywords: what the models cost, by default by the logs' columns, as an object or by its fields.

    Raises:
        InfeasibleError: the rows left to certify on are too few for alpha.
        OptionError: texts were asked for, and cannot be learned from here.
    """
    pairs = [logs] if isinstance(logs, ScoreLog) else list(logs)
    prices = resolve_options(costs, CostOptions, keywords, name="costs")
    _check_pairs(pairs, loss, text=text)
    common: dict[str, Any] = {"loss_bound": loss_bound, "missing_guardian": missing_guardian}
    if len(pairs) == 1 and loss == "regret":  # before the split, so that an error names a row of this log
        LogSurvey(pairs[0], CalibrationOptions(**common)).bound  # noqa: B018
    learns = score == "auto" and _can_learn(pairs[0], text=text)
    share = _share(share, pairs, choices=learns and loss == "net")
    parts = {log.columns: split(log, share=share, seed=seed) if share else (_tried_on(log, seed), log) for log in pairs}
    left_out: dict[str, str] = {}
    common["key"] = key or project_key()
    trial = _trial(parts, alpha, loss_bound, trials=trials, seed=seed, prices=prices, loss=loss, common=common)
    tried = trial.all_options(parts, left_out, split=share > 0, learns=learns, text=text)
    options = tuple(sorted((option for option, _ in tried), key=lambda option: option.deferred))
    chosen, rule = _chosen(tried, left_out)
    measured, certified = parts[pair_of(chosen)]
    certificate, deferred = _certified(measured, certified, alpha, rule, share=share, seed=seed)
    measured, compared = measured if share else certified, len(parts) * (1 + (learns and loss == "net"))
    return Recommendation(
        source=certified.source, alpha=certificate.alpha, tuning=measured if share else None, certified=certified,
        share=share, seed=seed, chosen=chosen, options=options, left_out=left_out, certificate=certificate,
        comparison=_comparison(deferred, measured, prices), **_use(deferred, measured, prices, compared=compared),
    )  # fmt: skip


def _certified(
    tuning: ScoreLog, certified: ScoreLog, alpha: Number, rule: CalibrationOptions, *, share: float, seed: int
) -> tuple[Certificate, Bools]:
    """Return the certificate, and which rows go to the Guardian: those to choose on or, without them, all rows."""
    certificate = calibrate(certified, alpha, options=rule)
    if not share:
        return certificate, _left_out_decisions(certified, alpha, rule, seed)
    part = CertifiedPart(rows=len(tuning) + len(certified), share=share, seed=seed)
    return certificate.of_part(part), certificate.apply(tuning).deferred


def _can_learn(log: ScoreLog, *, text: bool) -> bool:
    """Tell from the columns of a log whether a score can see more than the confidence of a single answer.

    What is settled from the rows has to be settled with the query among them; columns are fixed before there are rows.
    """
    known = log.group is not None or log.primary_usage.output_tokens is not None or _names_answers(log)
    return text or known or not log.is_router


def _names_answers(log: ScoreLog) -> bool:
    return any(column_texts(log, name) is not None for name in ("answer", "primary_answer"))


def _features(log: ScoreLog, *, text: bool) -> Features:
    """Return what a score is learned from: all that the log has.

    The menu is declared if all rows have as many actions. Where the certified rows themselves say so, this is proved for
    losses of 0 or more: if a query alone differs it is deferred, and it alone has a rule with a menu.
    """
    sizes: list[int] = np.unique(log.sizes).tolist()
    menu = sizes[0] if len(sizes) == 1 and 2 <= sizes[0] <= LARGEST_FIXED_MENU and not log.is_router else None
    return Features(menu_size=menu, text=text, answers=_names_answers(log) or None)


def _share(share: float | None, pairs: Sequence[ScoreLog], *, choices: bool) -> float:
    """Return the share of the rows to choose on: none if there is nothing that has to be chosen on other rows."""
    choices = choices or len(pairs) > 1
    if share is None:
        return TUNING_SHARE if choices else 0.0
    if share == 0 and choices:
        raise OptionError(
            "a share of 0 leaves no rows to choose on, and there is a pair of models, or a score for the net loss, to "
            "choose: leave share (--share) out, or name one pair and score='margin' (--score margin)"
        )
    return share


def _tried_on(log: ScoreLog, seed: int) -> ScoreLog:
    """Return the rows whose halves options are tried on if all are certified: a random part of many."""
    return log if len(log) <= _MOST_TRIED else split(log, share=_MOST_TRIED / len(log), seed=seed)[0]


def _left_out_decisions(log: ScoreLog, alpha: Number, rule: CalibrationOptions, seed: int) -> Bools:
    """Return which rows go to the Guardian if each part of them is decided by a certificate of the others.

    n rows at alpha allow a loss of (alpha (n + 1) - B) / n per row, and m rows allow the same at another alpha.
    """
    n, fold = len(log), np.random.default_rng(seed).permutation(len(log)) % FOLDS
    bound = as_fraction(1 if rule.loss_bound is None else rule.loss_bound, name="loss_bound")
    per_row, deferred = (as_fraction(alpha, name="alpha") * (n + 1) - bound) / n, np.ones(n, np.bool_)
    for k in range(FOLDS):
        others, rows = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        same = round((len(others) * per_row + bound) / (len(others) + 1), _DECIMALS)
        deferred[rows] = calibrate(log.select(others), same, options=rule).apply(log.select(rows)).deferred
    return deferred


def _check_pairs(pairs: Sequence[ScoreLog], loss: PromisedLoss, *, text: bool) -> None:
    """Refuse logs that do not hold the same rows under different pairs, or no texts where these are asked for."""
    if loss not in get_args(PromisedLoss):
        raise OptionError(f"loss must be 'regret' or 'net'; got {loss!r}")
    if not pairs:
        raise OptionError("there is no log to choose from; give one, or one for each pair of models")
    for log in pairs:
        refuse_floor(log)
    if len({log.columns for log in pairs}) < len(pairs):
        raise OptionError("two logs have the same pair of columns; give one log for each pair of models")
    for log in pairs:
        refuse_unfit(log.source, log.extra)
        ids, first = (None if table.id is None else table.id.tolist() for table in (log, pairs[0]))
        if len(log) != len(pairs[0]) or ids != first:
            raise OptionError(f"{log.source}: the logs of several pairs must hold the same rows in the same order")
    if text:
        _check_texts(pairs)


def _check_texts(pairs: Sequence[ScoreLog]) -> None:
    """Refuse to learn from texts where there are none."""
    for log in pairs:
        if log.context is None:
            raise OptionError(
                f"{log.source}: there is no `context` column, so texts cannot be learned from; add it, or leave text out"
            )
    text_embedding()


def _check_rows(alpha: Number, bound: Fraction, tuning: int, n: int, source: str) -> Fraction:
    """Return alpha; refuse parts too small to choose or to certify on."""
    budget, needed = check_alpha(alpha, bound), rows_needed(alpha, bound)
    if n < needed or tuning < FEWEST_TUNING_ROWS:
        raise InfeasibleError(
            f"{source}: {n_rows(tuning)} to choose on and {n} to certify on are too few for alpha {float(budget):g}: it "
            f"takes {FEWEST_TUNING_ROWS} and {needed} or more; collect more rows, or fix the options yourself and run "
            "`arbitrage calibrate` on all of them"
        )
    return budget


@dataclass(frozen=True, slots=True)
class _Between:
    """Two budgets of the halves, and how far the one that is meant lies between them.

    n rows at alpha allow a loss of (alpha (n + 1) - B) / n per row, which m rows allow in total m times. With losses of 0
    or B, m rows can only show whole multiples of B: a share is estimated at both multiples, and interpolated.
    """

    low: Fraction
    high: Fraction
    weight: float

    def mean(self, figures: Mapping[Fraction, float | None]) -> float | None:
        """Interpolate a figure that is known at both budgets."""
        low, high = figures[self.low], figures[self.high]
        return None if low is None or high is None else (1 - self.weight) * low + self.weight * high


def _budgets(alpha: Fraction, bound: Fraction, m: int, n: int) -> dict[str, _Between]:
    """Return the budgets of m rows that stand for alpha with 1, 2, 4 times n rows, and with any number of them."""
    budgets: dict[str, _Between] = {}
    for times in _TIMES:
        per_row = alpha if times is None else (alpha * (times * n + 1) - bound) / (times * n)
        losses = m * per_row / bound
        whole = int(losses)
        ends = [(k + 1) * bound / (m + 1) for k in (whole, min(whole + 1, m - 1))]
        budgets["any" if times is None else str(times)] = _Between(ends[0], ends[1], float(losses - whole))
    return budgets


def _of_the_best_guardian(
    tuning: Mapping[tuple[str, str], ScoreLog], left_out: dict[str, str]
) -> dict[tuple[str, str], ScoreLog]:
    """Return the pairs whose Guardian is right most often; the promise is measured against it."""
    guardians = list(dict.fromkeys(guardian for _, guardian in tuning))
    if len(guardians) == 1:
        return dict(tuning)
    right = {guardian: _accuracy(log) for (_, guardian), log in tuning.items()}
    best = max(guardians, key=lambda name: right[name])
    others = [name for name in guardians if name != best]
    left_out[f"{', '.join(others)} as the Guardian"] = (
        f"{best} is right more often ({', '.join(f'{right[name]:.3f}' for name in others)} and {right[best]:.3f}); name "
        "another with --guardian-column to have it all the same"
    )
    return {pair: log for pair, log in tuning.items() if pair[1] == best}


def _accuracy(log: ScoreLog) -> float:
    """Return how often the Guardian's own choice is right."""
    if "correct" not in log.outcome_names:
        raise OptionError(
            f"{log.source}: which model is to be the Guardian? Without a `label` or `correct` column that cannot be told; "
            "name it with --guardian-column"
        )
    correct = log.outcome("correct")[log.offsets[:-1] + row_argmax(log.guardian, log.offsets)]
    return float(np.nan_to_num(correct).mean())


class _TrialKeywords(TypedDict):
    trials: int
    seed: int
    prices: CostOptions
    loss: PromisedLoss
    common: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """How options are tried on the tuning rows; `common` is what all of them share."""

    budgets: Mapping[str, _Between]
    trials: int
    seed: int
    prices: CostOptions
    loss: PromisedLoss
    common: Mapping[str, Any]

    def all_options(
        self,
        parts: Mapping[tuple[str, str], tuple[ScoreLog, ScoreLog]],
        left_out: dict[str, str],
        *,
        split: bool,
        learns: bool,
        text: bool,
    ) -> list[tuple[RouteOption, CalibrationOptions]]:
        """Try every pair by its margin, and the rule with a learned score for the pair that does best.

        Without a split there is one pair, and one rule: the margin is tried only if no score can be learned.
        """
        tried: list[tuple[RouteOption, CalibrationOptions]] = []
        logs = _of_the_best_guardian({columns: part[0] for columns, part in parts.items()}, left_out)
        if split:
            for log in logs.values():
                tried += self.options(log, self.rule(), left_out) + self.options(log, self.rule(other=True), left_out)
        best = logs[pair_of(_cheapest(tried, left_out)[0])] if split else next(iter(logs.values()))
        if learns:
            rule = replace(self.rule(), score="auto", features=_features(best, text=text))
            tried += self.options(best, rule, left_out)
        return tried or self.options(best, self.rule(), left_out)

    def rule(self, *, other: bool = False) -> CalibrationOptions:
        """Return the rule by the margin that promises the loss that was asked for, or the other one."""
        return CalibrationOptions(**self.common, loss="net" if (self.loss == "net") != other else None)

    def options(
        self, log: ScoreLog, rule: CalibrationOptions, left_out: dict[str, str]
    ) -> list[tuple[RouteOption, CalibrationOptions]]:
        """Try a rule on the tuning rows of one pair; note why it does not apply."""
        loss: PromisedLoss = "net" if rule.net else "regret"
        try:
            return [(self._tried(log, loss, rule), rule)]
        except OptionError as error:
            score = f"{rule.score} with texts" if _reads_texts(rule.features) else rule.score
            reason = str(error).removeprefix(f"{log.source}: ")
            left_out[f"{log.columns[0]} -> {log.columns[1]}, {loss}, {score}"] = (
                f"on halves of the {len(log)} rows that options are tried on, {reason}"
            )
            return []

    def _tried(self, log: ScoreLog, loss: PromisedLoss, rule: CalibrationOptions) -> RouteOption:
        alphas = sorted({end for between in self.budgets.values() for end in (between.low, between.high)})
        half, prices = len(log) // 2, self.prices
        frontier = evaluate(
            log, alphas, calibration_size=half, trials=self.trials, seed=self.seed, options=rule, costs=prices
        )
        points = dict(zip(alphas, frontier.of("conformal"), strict=True))
        deferred = {alpha: point.mean("deferred") for alpha, point in points.items()}
        cost = {alpha: point.mean("cost_per_1000") for alpha, point in points.items()}
        shares = {times: between.mean(deferred) or 0.0 for times, between in self.budgets.items()}
        here = self.budgets["1"]
        return RouteOption(
            primary=log.columns[0],
            guardian=log.columns[1],
            loss=loss,
            score=rule.score,
            boundary=points[here.low].boundary or "include",
            deferred=shares.pop("1"),
            spread=points[here.low].summary("deferred").get("std") or 0.0,
            deferred_with=shares,
            cost_per_1000=here.mean(cost),
            eligible=loss == self.loss,
            features=rule.features,
        )


def _trial(
    parts: Mapping[tuple[str, str], tuple[ScoreLog, ScoreLog]],
    alpha: Number,
    loss_bound: Number | None,
    **settings: Unpack[_TrialKeywords],
) -> _Trial:
    """Return how to try options on the tuning part, for a certificate from the other."""
    tuning, certified = next(iter(parts.values()))
    bound = as_fraction(1 if loss_bound is None else loss_bound, name="loss_bound")
    budget = _check_rows(alpha, bound, len(tuning), len(certified), tuning.source)
    return _Trial(budgets=_budgets(budget, bound, len(tuning) // 2, len(certified)), **settings)


def _cheapest(
    tried: Sequence[tuple[RouteOption, CalibrationOptions]], left_out: Mapping[str, str]
) -> tuple[RouteOption, CalibrationOptions]:
    """Return the option with the lowest cost or, if some have none, the lowest share; the first among equals.

    A learned score brings a file and perhaps features of the request along, so it has to save something.
    """
    eligible = [pair for pair in tried if pair[0].eligible]
    if not eligible:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise OptionError(f"no option applies: {reasons}")
    costs = [option.cost_per_1000 for option, _ in eligible]
    figures = [option.deferred for option, _ in eligible]
    if all(cost is not None for cost in costs):
        figures = [cost or 0.0 for cost in costs]
    handicaps = [_LEARNED_HANDICAP if rule.learned else 1.0 for _, rule in eligible]
    return eligible[int(np.argmin(np.multiply(figures, handicaps)))]


def _chosen(
    tried: Sequence[tuple[RouteOption, CalibrationOptions]], left_out: Mapping[str, str]
) -> tuple[RouteOption, CalibrationOptions]:
    """Return the option to certify: under the regret a learned score that can be learned, whose proof tries the margin."""
    learned = [(option, rule) for option, rule in tried if rule.learned and not rule.net]
    return learned[0] if learned else _cheapest(tried, left_out)


def _reads_texts(features: Features | None) -> bool:
    return features is not None and features.text


def _use(deferred: Bools, log: ScoreLog, prices: CostOptions, *, compared: int) -> dict[str, Any]:
    """Return how often the Guardian is asked about rows that the certificate has not seen, and what that costs.

    Each of the compared options would have had a certificate of its own from rows other than these; intervals at level
    0.05 / compared hold for all of those together, and so for the one that was chosen.
    """
    interval = binomial_interval(int(deferred.sum()), len(log), 1 - (1 - CONFIDENCE) / compared)
    use: dict[str, Any] = {"deferred": float(deferred.mean()), "deferred_interval": interval}
    money = costs_of(log, prices)
    if money is None:
        return use | {"cost_per_1000": None, "cost_error": None, "guardian_cost_per_1000": None}
    guardian = money.guardian.full()
    cost = 1000 * (money.primary + np.where(deferred, guardian, 0.0))
    return use | {
        "cost_per_1000": float(cost.mean()),
        "cost_error": float(cost.std(ddof=1) / len(cost) ** 0.5),
        "guardian_cost_per_1000": 1000 * float(guardian.mean()),
    }


def _comparison(deferred: Bools, log: ScoreLog, prices: CostOptions) -> RouteComparison:
    """Compare decisions with the models alone and with random routing, on rows that the certificate has not seen."""
    rows, deferred = log.select(~log.unknown_loss), deferred[~log.unknown_loss]
    top, _, regret = primary_alone(rows)
    gains = right_gains(rows, top)
    known, values = gains is not None, regret if gains is None else gains
    n, calls, money = len(rows), int(deferred.sum()), costs_of(rows, prices)
    share, deferred_share = calls / n, calls / n
    if money is not None:
        primary, guardian = float(money.primary.mean()), float(money.guardian.full().mean())
        share = min(share * guardian / (guardian - primary), 1.0) if guardian > primary else 1.0
    kept = np.where(deferred, values, 0.0)
    spread = float(values.var(ddof=1)) if n > 1 else 0.0
    error = (
        spread * (deferred_share * (1 - deferred_share) + (share - deferred_share) ** 2) / n
    ) ** 0.5  # of as many calls about any rows
    over_random = point_estimate(float(kept.mean() - share * values.mean()), error)
    over_primary = mean_estimate(kept) if known else None
    worth, verdict = _verdict(over_primary, over_random, calls, n)
    return RouteComparison(
        measure="correct" if known else "loss",
        over_primary=over_primary,
        over_guardian=mean_estimate(kept - values) if known else None,
        over_random=over_random,
        worth_routing=worth,
        verdict=verdict,
    )


def _verdict(over_primary: PointEstimate | None, over_random: PointEstimate, calls: int, n: int) -> tuple[bool, str]:
    """Return whether these rows show that the certificate is worth its calls, and why."""
    if calls == n:
        return False, f"Not worth routing at this budget: all of {n} unseen rows go to the Guardian."
    if calls == 0:
        return False, f"Use the Primary alone: it keeps this budget without the Guardian on {n} unseen rows."
    if over_primary is not None and not over_primary.positive:
        what = "Use the Primary alone" if over_primary.mean <= 0 else "Not worth routing"
        than = f"the share of right answers changes by {over_primary.points()} against the Primary alone"
        return False, f"{what}: on {n} unseen rows, {than}; more Guardian calls do not make this pair better."
    what = "the loss falls" if over_primary is None else "the share of right answers rises"
    than = f"on {n} unseen rows, {what} by {over_random.points()} against random routing at the same cost"
    if not over_random.positive:
        return (
            False,
            f"Not worth routing: {than}, which may be chance; the confidence says too little, or rows are few.",
        )
    alone = "" if over_primary is None else f", and by {over_primary.points()} against the Primary alone"
    return True, f"Worth routing: {than}{alone}."


# --- Route plans ---


_NOT_SCORES = ("correct", "label", "actions")


class PlanResult(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a recommendation led to, for comparison with a repetition of it; without a relaxation or a score, all defer."""

    primary: str
    guardian: str
    loss: PromisedLoss
    score: ScoreKind = "margin"
    menu_size: int | None = None
    answers: bool = False
    text: bool = False
    boundary: str
    relaxation: float | None = None
    boundary_u: float | None = None
    score_sha256: str | None = None
    tuning_rows: int
    certified_rows: int
    certified_sha256: str


class RoutePlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a recommendation depends on besides the rows and the project's secret.

    Attributes:
        log: the score log, relative to the folder of the plan.
        alpha: the risk budget, as written.
        primary_columns: the Primaries to choose from; if empty, the column `primary` or, without one, every column of
            scores.
        guardian_columns: the same for the Guardian.
        share: of the rows, to choose on; None until it is settled.
        text: also learn from texts.
        sample: of a log in parts, how many rows to draw and look at; None for one file, which is read whole.
        result: what came of it.
    """

    log: str
    alpha: str
    loss: PromisedLoss = "regret"
    score: Literal["auto", "margin"] = "auto"
    share: float | None = None
    seed: int = 0
    trials: int = 20
    primary_columns: tuple[str, ...] = ()
    guardian_columns: tuple[str, ...] = ()
    outcomes: tuple[str, ...] = ()
    binarize: bool = False
    text: bool = False
    loss_bound: str | None = None
    missing_guardian: MissingGuardian | None = None
    primary_cost: float | None = None
    guardian_cost: float | None = None
    primary_price: tuple[float, float] | None = None
    guardian_price: tuple[float, float] | None = None
    sample: int | None = None
    result: PlanResult | None = None

    def source(self, folder: Path) -> str:
        """Return the log, given the folder of the plan: a path, a pattern or a URL."""
        return self.log if scheme_of(self.log) is not None else str(folder / self.log)

    def logs(self, folder: Path) -> list[ScoreLog]:
        """Read the log once for every pair of columns to choose from; of one in parts the same sample each time."""
        path = self.source(folder)
        primaries, guardians = self._columns(path)
        pairs = [(p, g) for p, g in product(primaries, guardians) if p != g]
        if not pairs:
            raise OptionError(
                f"{path}: there is no pair of score columns; name them with --primary-column and --guardian-column, or, if "
                f"this is no score log, `arbitrage quickstart {path}` prints the command that makes one"
            )
        logs = [self._read(path, *pair) for pair in pairs]
        return [log.binarized() for log in logs] if self.binarize else logs

    def _read(self, path: str, primary: str, guardian: str) -> ScoreLog:
        if self.sample is None:
            return ScoreLog.read(path, primary=primary, guardian=guardian, outcomes=self.outcomes)
        log = ScoreParts.read(path, primary=primary, guardian=guardian, outcomes=self.outcomes)
        refuse_repeated_ids(log)
        return log.sample(self.sample)

    def _columns(self, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the columns that may play each role."""
        primaries, guardians = self.primary_columns, self.guardian_columns
        with Table(path) if self.sample is None else first_rows(path) as table:
            primaries = primaries or (("primary",) if "primary" in table.types else ())
            guardians = guardians or (("guardian",) if "guardian" in table.types else ())
            if not primaries or not guardians:
                skipped = {*_NOT_SCORES, *self.outcomes}
                lists = {name: table.numbers_if_any(name) for name in table.types if name not in skipped}
                scores = tuple(name for name, values in lists.items() if values is not None and (values[1] > 0).any())
                primaries = primaries or tuple(name for name in scores if name not in guardians)
                guardians = guardians or tuple(name for name in scores if name not in self.primary_columns)
        return primaries, guardians

    def recommend(self, logs: list[ScoreLog], key: bytes | None) -> Recommendation:
        """Choose and certify as the plan says."""
        recommendation = recommend(
            logs,
            self.alpha,
            loss=self.loss,
            score=self.score,
            share=TUNING_SHARE if self.share is None and self.sample is not None else self.share,
            seed=self.seed,
            trials=self.trials,
            key=key,
            loss_bound=self.loss_bound,
            missing_guardian=self.missing_guardian,
            text=self.text,
            costs=CostOptions(
                primary_cost=self.primary_cost,
                guardian_cost=self.guardian_cost,
                primary_price=self.primary_price,
                guardian_price=self.guardian_price,
            ),
        )
        part = recommendation.certificate.provenance.part
        if self.sample is None or part is None:
            return recommendation
        certificate = recommendation.certificate.of_part(structs.replace(part, sample=self.sample))
        return replace(recommendation, certificate=certificate)

    def with_result(self, recommendation: Recommendation) -> "RoutePlan":
        """Return the plan with what came of it."""
        chosen, certificate = recommendation.chosen, recommendation.certificate
        features = chosen.features or Features()
        result = PlanResult(
            primary=chosen.primary,
            guardian=chosen.guardian,
            loss=chosen.loss,
            score=chosen.score,
            menu_size=features.menu_size,
            answers=bool(features.answers),
            text=features.text,
            boundary=chosen.boundary,
            relaxation=certificate.relaxation,
            boundary_u=certificate.boundary_u,
            score_sha256=None if certificate.learned is None else certificate.learned.sha256,
            tuning_rows=0 if recommendation.tuning is None else len(recommendation.tuning),
            certified_rows=len(recommendation.certified),
            certified_sha256=certificate.evidence.log_sha256,
        )
        return structs.replace(self, share=recommendation.share, result=result)

    def differences(self, repeated: "RoutePlan") -> list[str]:
        """Return in which fields a repetition came to another result; nothing if the plan has none."""
        if self.result is None or repeated.result is None:
            return []
        then, now = structs.asdict(self.result), structs.asdict(repeated.result)
        return [f"{name} was {then[name]!r} and is now {now[name]!r}" for name in then if then[name] != now[name]]

    def commands(self, folder: Path, certificate: str) -> list[str]:
        """Return the commands that come to the same certificate by hand."""
        if self.result is None:
            return []
        result, log = self.result, self.source(folder)
        log = log if scheme_of(log) is not None else os.path.relpath(log)
        columns = ["--primary-column", result.primary, "--guardian-column", result.guardian]
        rule = ["--boundary", result.boundary, "--loss", result.loss, "--score", result.score]
        rule += [] if result.menu_size is None else ["--menu-size", str(result.menu_size)]
        rule += [*["--answers"] * result.answers, *["--text"] * result.text]
        further = [] if self.loss_bound is None else ["--loss-bound", self.loss_bound]
        further += ["--binarize"] if self.binarize else []
        further += [] if self.missing_guardian is None else ["--missing-guardian", self.missing_guardian]
        split = [
            "split",
            log,
            "tuning.parquet",
            "certify.parquet",
            "--share",
            f"{self.share:g}",
            "--seed",
            str(self.seed),
            *([] if self.sample is None else ["--sample", str(self.sample)]),
        ]
        rows = ["calibrate", "certify.parquet" if self.share else log, "--alpha", self.alpha]
        calibrate = [*rows, *rule, *further, *columns, "-o", certificate]
        if not self.share:
            return [shlex.join(["arbitrage", *calibrate])]
        return [shlex.join(["arbitrage", *command]) for command in ([*split, *columns], calibrate)]

    def write(self, path: str | Path) -> None:
        """Write the plan as TOML."""
        document = {name: value for name, value in structs.asdict(self).items() if value not in (None, ())}
        result = document.pop("result", None)
        lines = [f"# Written by `arbitrage recommend`; `arbitrage recommend --from {Path(path).name}` repeats it.\n"]
        lines += [f"{name} = {_toml(value)}\n" for name, value in document.items()]
        if isinstance(result, PlanResult):
            figures = {name: value for name, value in structs.asdict(result).items() if value is not None}
            lines += ["\n[result]\n", *(f"{name} = {_toml(value)}\n" for name, value in figures.items())]
        write_text(path, "".join(lines))


def read_route_plan(path: str | Path) -> RoutePlan:
    """Read a plan.

    Raises:
        ConfigError: the file is absent, or not a plan.
    """
    if not Path(path).exists():
        raise ConfigError(
            f"{path}: there is no such file; write it with `arbitrage recommend LOG --alpha A -o {path}`, or name another"
        )
    try:
        return convert(tomllib.loads(Path(path).read_text(encoding="utf-8")), RoutePlan)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(
            f"{path}: not a plan of `arbitrage recommend` ({error}); write one with `arbitrage recommend LOG -o {path}`"
        ) from error


def _toml(value: Any) -> str:
    """Return a value as TOML, which takes JSON for texts, numbers, truth values and lists of them."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
