"""recommend: split a log, choose a pair, a score and a boundary on one part, certify on the other.

The choice sees the tuning rows only, so the rows of the certificate are as fresh to it as those of a user who fixed
everything in advance. The loss is never chosen: it says what is promised, so whoever makes the promise names it.

Knows nothing of files or terminals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypedDict, Unpack, get_args

import numpy as np

from conformal_arbitrage.calibration.calibrate import calibrate
from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.learned_score import Features
from conformal_arbitrage.calibration.options import CalibrationOptions, resolve_options
from conformal_arbitrage.calibration.planning import rows_needed, split
from conformal_arbitrage.calibration.text_embedding import text_embedding
from conformal_arbitrage.core.bounds import binomial_interval
from conformal_arbitrage.core.choices import row_argmax
from conformal_arbitrage.core.losses import Number, as_fraction
from conformal_arbitrage.core.risk import check_alpha
from conformal_arbitrage.errors import InfeasibleError, OptionError
from conformal_arbitrage.evaluation.costs import CostKeywords, CostOptions, costs_of
from conformal_arbitrage.evaluation.frontier import evaluate
from conformal_arbitrage.evaluation.route_options import PromisedLoss, Recommendation, RouteOption, pair_of
from conformal_arbitrage.scorelog.fitness import refuse_unfit
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.types import MissingGuardian

TUNING_SHARE = 0.3
CONFIDENCE = 0.95
"""Of the interval for the Guardian's share, over all options that were compared."""
_TIMES: tuple[int | None, ...] = (1, 2, 4, None)
"""Multiples of the certificate's rows at which the share is estimated; None for any number of rows."""
_FEWEST_TUNING_ROWS = 10
_LEARNED_HANDICAP = 1.02
"""A learned score is taken if it costs less than the margin by this factor, and one from texts if by its square."""


def recommend(
    logs: ScoreLog | Sequence[ScoreLog],
    alpha: Number,
    *,
    loss: PromisedLoss = "regret",
    share: float = TUNING_SHARE,
    seed: int = 0,
    trials: int = 20,
    key: bytes | None = None,
    loss_bound: Number | None = None,
    missing_guardian: MissingGuardian | None = None,
    text: bool = False,
    costs: CostOptions | None = None,
    **keywords: Unpack[CostKeywords],
) -> Recommendation:
    """Choose how to route on a random part of a log, and certify the choice on the rest.

    Among several logs, the same rows under other pairs of models, the Guardian is the model that is right most often, and
    the Primary that with the lowest expected cost or, without costs, the one whose Guardian is asked least.

    Args:
        logs: the recorded scores; or several logs of the same rows, one for each pair of models to choose from.
        alpha: the risk budget.
        loss: what is promised, which is yours to say: "regret", or "net" with gains counted.
        share: of the rows, to choose on; the certificate does not use them.
        seed: of the split.
        trials: random halves of the tuning rows that each option is tried on.
        key: the secret bytes behind random boundaries (`ProjectSecret.find().boundary_key`); without it they are left out.
        loss_bound: the largest possible loss; by default 1 if all Guardian scores lie in [0, 1].
        missing_guardian: as in `calibrate`.
        text: also try a score that is learned from the texts of the queries; needs the extra `text`.
        costs: what the models cost; or pass the fields of `CostOptions` as keywords. Without either, the logs' cost
            columns are used.
        **keywords: the fields of `costs`, one by one.

    Raises:
        InfeasibleError: the rows left to certify on are too few for alpha.
        OptionError: texts were asked for, and cannot be learned from here.
    """
    if loss not in get_args(PromisedLoss):
        raise OptionError(f"loss must be 'regret' or 'net'; got {loss!r}")
    pairs = [logs] if isinstance(logs, ScoreLog) else list(logs)
    prices = resolve_options(costs, CostOptions, keywords, name="costs")
    _check_pairs(pairs)
    if text:
        _check_texts(pairs, loss)
    parts = {log.columns: split(log, share=share, seed=seed) for log in pairs}
    tuning = {columns: part[0] for columns, part in parts.items()}
    left_out: dict[str, str] = {}
    candidates = _candidates(key, loss_bound, missing_guardian, left_out, text=text)
    trial = _trial(parts, alpha, loss_bound, trials=trials, seed=seed, prices=prices, loss=loss)
    tried = trial.all_options(_of_the_best_guardian(tuning, left_out), candidates, left_out)
    chosen, rule = _cheapest(tried, left_out)
    measured, certified = parts[chosen.primary, chosen.guardian]
    certificate = calibrate(certified, alpha, options=rule)
    return Recommendation(
        source=certified.source, alpha=certificate.alpha, tuning=measured, certified=certified, share=share, seed=seed,
        chosen=chosen, options=tuple(sorted((option for option, _ in tried), key=lambda option: option.deferred)),
        left_out=left_out, certificate=certificate,
        **_use(certificate, measured, prices, compared=len(tuning) * len([one for one in candidates if trial.allows(one)])),
    )  # fmt: skip


def _check_pairs(pairs: Sequence[ScoreLog]) -> None:
    """Refuse logs that do not hold the same rows under different pairs."""
    if not pairs:
        raise OptionError("there is no log to choose from; give one, or one for each pair of models")
    if len({log.columns for log in pairs}) < len(pairs):
        raise OptionError("two logs have the same pair of columns; give one log for each pair of models")
    for log in pairs:
        refuse_unfit(log)
        ids, first = (None if one.id is None else one.id.tolist() for one in (log, pairs[0]))
        if len(log) != len(pairs[0]) or ids != first:
            raise OptionError(f"{log.source}: the logs of several pairs must hold the same rows in the same order")


def _check_texts(pairs: Sequence[ScoreLog], loss: PromisedLoss) -> None:
    """Refuse to learn from texts where there are none, or nothing is learned."""
    if loss == "net":
        raise OptionError(
            "text=True (--text) needs the loss 'regret': no score is learned for the net loss; leave it out"
        )
    for log in pairs:
        if log.context is None:
            raise OptionError(
                f"{log.source}: there is no `context` column, so texts cannot be learned from; add it, or leave text out"
            )
    text_embedding()


def _check_rows(alpha: Number, bound: Fraction, tuning: int, n: int, source: str) -> Fraction:
    """Return alpha; refuse parts too small to choose or to certify on."""
    budget, needed = check_alpha(alpha, bound), rows_needed(alpha, bound)
    if n < needed or tuning < _FEWEST_TUNING_ROWS:
        raise InfeasibleError(
            f"{source}: {tuning} rows to choose on and {n} to certify on are too few for alpha {float(budget):g}: it takes "
            f"{_FEWEST_TUNING_ROWS} and {needed} or more; collect more rows, or fix the options yourself and run `arbitrage "
            "calibrate` on all of them"
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


def _candidates(
    key: bytes | None,
    loss_bound: Number | None,
    missing_guardian: MissingGuardian | None,
    left_out: dict[str, str],
    *,
    text: bool,
) -> list[CalibrationOptions]:
    """Return every combination that can be tried and has a proof, the simplest first; note why others cannot."""
    common: dict[str, Any] = {"loss_bound": loss_bound, "missing_guardian": missing_guardian}
    included = CalibrationOptions(**common)
    if key is None:
        left_out["boundary random, score auto, loss net"] = (
            "they draw with the project's secret, and there is none here: run `arbitrage init`"
        )
        return [included]
    drawn: Mapping[str, Any] = common | {"boundary": "random", "key": key}
    further: list[Mapping[str, Any]] = [{}, {"score": "auto"}, {"loss": "net"}]
    further += [{"score": "auto", "features": Features(text=True)}] if text else []
    return [included, *(CalibrationOptions(**drawn, **one) for one in further)]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """How options are tried on the tuning rows."""

    budgets: Mapping[str, _Between]
    trials: int
    seed: int
    prices: CostOptions
    loss: PromisedLoss

    def allows(self, rule: CalibrationOptions) -> bool:
        """Tell whether a rule promises the loss that was asked for."""
        return rule.net == (self.loss == "net")

    def all_options(
        self,
        logs: Mapping[tuple[str, str], ScoreLog],
        candidates: Sequence[CalibrationOptions],
        left_out: dict[str, str],
    ) -> list[tuple[RouteOption, CalibrationOptions]]:
        """Try every pair by its margin, then a learned score for the pair that does best."""
        by_margin = [rule for rule in candidates if not rule.learned]
        tried = [one for log in logs.values() for one in self.options(log, by_margin, left_out)]
        learned = [rule for rule in candidates if rule.learned and self.allows(rule)]
        if not learned:
            return tried
        best = _cheapest(tried, left_out)[0]
        return tried + self.options(logs[pair_of(best)], learned, left_out)

    def options(
        self,
        log: ScoreLog,
        candidates: Sequence[CalibrationOptions],
        left_out: dict[str, str],
    ) -> list[tuple[RouteOption, CalibrationOptions]]:
        """Try every candidate on the tuning rows of one pair; note why some do not apply."""
        options: list[tuple[RouteOption, CalibrationOptions]] = []
        for rule in candidates:
            loss: PromisedLoss = "net" if rule.net else "regret"
            try:
                options.append((self._tried(log, loss, rule), rule))
            except OptionError as error:
                score = f"{rule.score} with texts" if _reads_texts(rule) else rule.score
                left_out[f"{log.columns[0]} -> {log.columns[1]}, {loss}, {score}, {rule.boundary}"] = str(error)
        return options

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
            boundary=rule.boundary,
            deferred=shares.pop("1"),
            spread=points[here.low].summary("deferred").get("std") or 0.0,
            deferred_with=shares,
            cost_per_1000=here.mean(cost),
            eligible=self.allows(rule),
            text=_reads_texts(rule),
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

    A learned score brings a file and perhaps features of the request along, so it has to save something; texts bring a
    package along as well.
    """
    eligible = [pair for pair in tried if pair[0].eligible]
    if not eligible:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise OptionError(f"no option applies: {reasons}")
    costs = [option.cost_per_1000 for option, _ in eligible]
    figures = [option.deferred for option, _ in eligible]
    if all(cost is not None for cost in costs):
        figures = [cost or 0.0 for cost in costs]
    handicaps = [_LEARNED_HANDICAP ** (rule.learned + _reads_texts(rule)) for _, rule in eligible]
    return eligible[int(np.argmin(np.multiply(figures, handicaps)))]


def _reads_texts(rule: CalibrationOptions) -> bool:
    return rule.features is not None and rule.features.text


def _use(certificate: Certificate, log: ScoreLog, prices: CostOptions, *, compared: int) -> dict[str, Any]:
    """Return how often the certificate asks the Guardian on rows that it has not seen, and what that costs.

    Each of the compared options would have had a certificate of its own from rows other than these; intervals at level
    0.05 / compared hold for all of those together, and so for the one that was chosen.
    """
    deferred = certificate.apply(log).deferred
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
