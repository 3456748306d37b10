"""calibrate: find the smallest relaxation that keeps a risk budget, and certify it.

Knows nothing of live models, evaluation or the command line.
"""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any, Literal, Unpack

import numpy as np

from conformal_arbitrage.calibration.certificate import Certificate, Status
from conformal_arbitrage.calibration.decisions import decide_rows
from conformal_arbitrage.calibration.documents import package_version
from conformal_arbitrage.calibration.groups import threshold_rows
from conformal_arbitrage.calibration.guarantee import guarantee_text
from conformal_arbitrage.calibration.learned_fit import LearnedFit, learn_score
from conformal_arbitrage.calibration.margins import margin_quantiles, write_quantiles
from conformal_arbitrage.calibration.options import (
    REGRET,
    CalibrationKeywords,
    CalibrationOptions,
    check_keywords,
    resolve_options,
)
from conformal_arbitrage.calibration.parts import SurveyedParts, gathering, refuse_repeated_ids
from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.calibration.search import (
    Fit,
    allowed_total,
    find_threshold,
    fit_at,
    likely_losses,
    refuse_graded,
    risk_budgets,
    total_at,
)
from conformal_arbitrage.calibration.stops import DialStop, GroupThreshold, lower_stop
from conformal_arbitrage.core.arrays import Indices
from conformal_arbitrage.core.losses import Number, as_fraction, net_losses
from conformal_arbitrage.core.risk import RiskCurve, check_alpha
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.scorelog.engines import Engine, PassProgress, as_engine, silent
from conformal_arbitrage.scorelog.fitness import SESSION_TURNS, group_rows, has_sessions, refuse_unfit
from conformal_arbitrage.scorelog.log import FrameColumns, ScoreLog, as_score_log
from conformal_arbitrage.scorelog.parts import ScoreParts
from conformal_arbitrage.scorelog.spark_table import SparkTable
from conformal_arbitrage.scorelog.wide import ScoreColumns


def calibrate(
    log: ScoreLog | ScoreParts | SparkTable | object,
    alpha: Number,
    *,
    primary: ScoreColumns | None = None,
    guardian: ScoreColumns | None = None,
    options: CalibrationOptions | None = None,
    engine: Engine | Executor | str | None = None,
    progress: PassProgress = silent,
    **keywords: Unpack[CalibrationKeywords],
) -> Certificate:
    """Find the smallest relaxation that keeps the risk budget: total loss + B <= alpha (n + 1), exactly.

    With clusters of at most M rows it is total loss + M B <= alpha (n + M); with loss="net" it holds for every larger
    relaxation too (first passage). With a confidence, a test at that level takes the place of this rule; see
    `CalibrationOptions`. Pass options as keywords or as one object.

    Args:
        log: the recorded scores, in memory, in parts or in Spark, or a frame (pandas, polars, Arrow).
        alpha: the risk budget, above 0 and below the loss bound. A float means the decimal that its repr shows.
        primary: the frame's column of Primary scores, or one column per action; by default "primary".
        guardian: the same for the Guardian.
        options: how to calibrate; or pass the fields of `CalibrationOptions`, which explains them, as keywords:
            `guardian_sees=`, `boundary=`, `key=`, `loss=`, `loss_bound=`, `missing_guardian=`, `cluster=`,
            `confidence=`, `dial=`, `by=`, `small_groups=`, `margins=`, ...
        engine: for a log in parts, where the work is done; see `as_engine`. By default threads on all cores.
        progress: is told about every pass over a log in parts.
        **keywords: the fields of `options`, one by one.

    Raises:
        InfeasibleError: your own loss can exceed alpha with every action in sight.
        ScoreLogError: the log is marked as selected by its scores, or a loss exceeds what was declared.
    """
    check_keywords("calibrate", keywords, CalibrationKeywords)
    chosen = resolve_options(options, CalibrationOptions, keywords, name="options")
    if isinstance(log, ScoreParts | SparkTable):
        return certify_parts(log, alpha, chosen, engine=engine_of(log, engine), progress=progress)
    if engine is not None:
        raise OptionError("engine= is for a log in parts: read it with ScoreParts.read")
    return certify(_fit_log(log, primary, guardian), alpha, chosen)


def _fit_log(data: object, primary: ScoreColumns | None, guardian: ScoreColumns | None) -> ScoreLog:
    """Return a score log as it is, or read one from a frame; refuse rows that were selected by their scores."""
    columns: FrameColumns = {}
    if primary is not None:
        columns["primary"] = primary
    if guardian is not None:
        columns["guardian"] = guardian
    log = as_score_log(data, **columns)
    refuse_unfit(log)
    return log


def certify(log: ScoreLog, alpha: Number, options: CalibrationOptions) -> Certificate:
    """Calibrate under options that already have their key; the step that `verify` repeats."""
    curve = options.curve(log)
    bound = curve.bound(options.loss_bound)
    thresholds = _thresholds(log, curve, check_alpha(alpha, bound), bound, options)
    tick = Fraction(1, 10**curve.tick_digits)
    least = thresholds.alpha if thresholds.dial is None else as_fraction(thresholds.dial[0].alpha, name="alpha")
    declared = options.check_full_sight(least, curve.in_full_sight, tick=tick, source=log.source)
    terms = {
        **_log_terms(log, options),
        **_net_terms(log, options, thresholds.fit.relaxation, thresholds.fit.boundary_u),
        "full_sight_loss": _stored(declared, options.full_sight_loss, "full_sight_loss"),
    }
    further = {
        "envelope_excess": curve.envelope_excess,
        "missing_guardian_rows": int(options.unknown_loss(log).sum()),
        "margin_quantiles": _margin_quantiles(log, options),
        **_provenance(log, options),
    }
    return _issue(alpha, options, thresholds, bound, terms, further, binary=options.is_binary(log, bound))


def engine_of(log: ScoreParts | SparkTable, engine: Engine | Executor | str | None) -> Engine:
    """Return where the work on a log is done; that on a table of Spark is done where its rows are."""
    if isinstance(log, ScoreParts):
        return as_engine(engine)
    if engine not in (None, log):
        raise OptionError(f"{log.source}: the work on a table of Spark is done by its session; leave engine= out")
    return log


def certify_parts(
    log: ScoreParts | SparkTable,
    alpha: Number,
    options: CalibrationOptions,
    *,
    engine: Engine,
    progress: PassProgress = silent,
) -> Certificate:
    """Calibrate a log in parts, with the result that `certify` has on all its rows, digest apart.

    Args:
        log: the log.
        alpha: the risk budget.
        options: how to calibrate, with their key.
        engine: where the work is done.
        progress: is told about every pass.
    """
    as_fraction(alpha, name="alpha")  # before passes over many rows
    reason = gathering(options, log)
    if reason is not None:
        if isinstance(log, SparkTable):
            log.gather(reason)  # which it refuses
        refuse_repeated_ids(log)
        whole = log.gather(reason)
        refuse_unfit(whole)
        return replace(certify(whole, alpha, options), log_sha256=log.digest_of(whole))
    surveyed = SurveyedParts(log, options, engine, progress, likely_losses(len(log), alpha, options))
    columns = {"primary": log.primary, "guardian": log.guardian or "guardian"}
    identities = _identities(log.identities, (columns["primary"], columns["guardian"]))
    bound, n, digits = surveyed.bound, surveyed.n, surveyed.tick_digits
    budget = check_alpha(alpha, bound)
    budgets = risk_budgets(budget, bound, options)
    limits = [allowed_total(one, bound, n, digits, options) for one in budgets]
    fits = [fit_at(n, one) for one in surveyed.thresholds(limits)]
    thresholds = _Thresholds(alpha=budget, fit=fits[0], status=_status(fits[0]))
    if options.dial:
        thresholds = _dial(budgets, fits, budget)
    terms = {
        "n": n,
        "binarized": log.binary,
        "router": surveyed.router,
        "score_digits": surveyed.score_digits,
        "clusters": None,
        "unit": None,
        "full_sight_loss": 0.0,
    }
    further = {
        "envelope_excess": 0.0,
        "missing_guardian_rows": surveyed.unknown,
        "margin_quantiles": None,
        "no_opinion_rows": surveyed.no_opinion,
        "fewest_actions": surveyed.fewest_actions,
        "most_actions": surveyed.most_actions,
        "columns": columns,
        "identities": identities,
        "log_sha256": surveyed.sha256(),
    }
    return _issue(alpha, options, thresholds, bound, terms, further, binary=log.binary and bound == 1)


def _issue(
    alpha: Number,
    options: CalibrationOptions,
    thresholds: "_Thresholds",
    bound: Fraction,
    log_terms: Mapping[str, Any],
    further: Mapping[str, Any],
    *,
    binary: bool,
) -> Certificate:
    """Put thresholds and what is known about their log into a certificate."""
    terms: dict[str, Any] = {
        "status": thresholds.status,
        "alpha": _stored(thresholds.alpha, alpha, "alpha"),
        "loss": options.loss_name,
        "loss_bound": _stored(bound, options.loss_bound, "loss_bound"),
        "guardian_sees": options.guardian_sees,
        "boundary": options.boundary,
        "relaxation": thresholds.fit.relaxation,
        "missing_guardian": options.missing_guardian,
        "max_cluster_size": options.max_cluster_size,
        **log_terms,
        **_sure_terms(thresholds, options),
        "score": options.score if options.learned else None,
        "learned": None if thresholds.learned is None else thresholds.learned.terms,
    }
    keyed = options.boundary == "random" or (options.confidence is not None and not binary)
    key = options.key if keyed else None
    return Certificate(
        **terms,
        **further,
        boundary_u=thresholds.fit.boundary_u,
        key_sha256=None if key is None else hashlib.sha256(key).hexdigest(),
        grid=None if options.grid is None else _stored(as_fraction(options.grid, name="grid"), options.grid, "grid"),
        empirical_risk=float(thresholds.fit.total / thresholds.fit.n),
        slack=_slack(thresholds, bound, options),
        cluster=options.cluster,
        version=package_version(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        guarantee=guarantee_text(**terms),
        key=key,
        fit=None if thresholds.learned is None else thresholds.learned.score,
    )


def _log_terms(log: ScoreLog, options: CalibrationOptions) -> dict[str, Any]:
    return {
        "n": len(log),
        "binarized": log.binary is not None,
        "router": log.is_router,
        "score_digits": log.score_digits,
        "clusters": options.clusters(log),
        "unit": _unit(log, options),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Thresholds:
    """The thresholds of a certificate: one, those of a dial with one chosen, or those of groups."""

    alpha: Fraction
    fit: Fit
    status: Status
    dial: tuple[DialStop, ...] | None = None
    groups: dict[str, GroupThreshold] | None = None
    learned: LearnedFit | None = None


def _thresholds(
    log: ScoreLog, curve: RiskCurve, alpha: Fraction, bound: Fraction, options: CalibrationOptions
) -> _Thresholds:
    if options.zero_one:
        refuse_graded(log, options, bound)
    if options.by is not None:
        return _by_group(log, alpha, bound, options, options.by)
    if options.learned:
        return _learned(log, alpha, bound, options)
    if not options.dial:
        one = find_threshold(log, curve, alpha, bound, options, options.delta())
        return _Thresholds(alpha=alpha, fit=one, status=_status(one))
    alphas = risk_budgets(alpha, bound, options)
    return _dial(alphas, [find_threshold(log, curve, one, bound, options, options.delta()) for one in alphas], alpha)


def _dial(alphas: Sequence[Fraction], fits: Sequence[Fit], alpha: Fraction) -> _Thresholds:
    """Set a dial to the largest stop that does not exceed alpha."""
    dial = tuple(_stop(budget, one) for budget, one in zip(alphas, fits, strict=True))
    chosen = dial.index(lower_stop(dial, float(alpha)))
    return _Thresholds(alpha=alphas[chosen], fit=fits[chosen], status=_status(fits[chosen]), dial=dial)


def _by_group(log: ScoreLog, alpha: Fraction, bound: Fraction, options: CalibrationOptions, by: str) -> _Thresholds:
    """Calibrate each group on its own rows, or on those of all small groups; a query that belongs to none is deferred."""
    rows, alone = group_rows(log, by), replace(options, by=None, small_groups="defer", group_source=None)
    delta = options.delta(len(rows))
    fewest = rows_needed(alpha, bound) if options.merges else None
    sources = threshold_rows(list(rows.values()), fewest)

    def fitted(some: Indices) -> Fit:
        part = log.select(some)
        return find_threshold(part, alone.curve(part), alpha, bound, alone, delta)

    distinct = {id(source): source for source in sources}
    fit_of = {key: fitted(source) for key, source in distinct.items()}
    fits = {
        name: _of_group(log.select(own), fit_of[id(source)], alone, shared=source is not own)
        for (name, own), source in zip(rows.items(), sources, strict=True)
    }
    total = sum((one.total for one in fits.values()), start=Fraction(0))
    groups = {name: _group(one) for name, one in fits.items()}
    whole = Fit(n=len(log), relaxation=None, boundary_u=None, total=total)
    return _Thresholds(alpha=alpha, fit=whole, status="by_group", groups=groups)


def _of_group(part: ScoreLog, one: Fit, options: CalibrationOptions, *, shared: bool) -> Fit:
    """Return a threshold with the rows and the loss of one group, if several share it."""
    return replace(one, n=len(part), total=total_at(part, one, options)) if shared else one


def _learned(log: ScoreLog, alpha: Fraction, bound: Fraction, options: CalibrationOptions) -> _Thresholds:
    """Learn a score; without room for a single loss, every query is deferred."""
    learned = learn_score(log, alpha, bound, options)
    if learned is None:
        none = Fit(n=len(log), relaxation=None, boundary_u=None, total=Fraction(0))
        return _Thresholds(alpha=alpha, fit=none, status="always_defer")
    whole = Fit(n=len(log), relaxation=None, boundary_u=None, total=learned.total)
    return _Thresholds(alpha=alpha, fit=whole, status="learned", learned=learned)


def _status(one: Fit) -> Literal["ok", "always_defer"]:
    return "always_defer" if one.relaxation is None else "ok"


def _stop(alpha: Fraction, one: Fit) -> DialStop:
    return DialStop(
        alpha=_stored(alpha, alpha, "alpha"),
        relaxation=one.relaxation,
        boundary_u=one.boundary_u,
        empirical_risk=float(one.total / one.n),
    )


def _group(one: Fit) -> GroupThreshold:
    return GroupThreshold(
        n=one.n, relaxation=one.relaxation, boundary_u=one.boundary_u, empirical_risk=float(one.total / one.n)
    )


def _sure_terms(thresholds: _Thresholds, options: CalibrationOptions) -> dict[str, Any]:
    """Return what only a certificate with a confidence, a dial, groups or declared losses says."""
    confidence = options.confidence
    sure = None if confidence is None else _stored(as_fraction(confidence, name="confidence"), confidence, "confidence")
    return {
        "confidence": sure,
        "zero_one": options.zero_one or None,
        "dial": thresholds.dial,
        "by": options.by,
        "groups": thresholds.groups,
        "small_groups": "merge" if options.merges else None,
    }


def _margin_quantiles(log: ScoreLog, options: CalibrationOptions) -> str | None:
    """Return the quantiles of the margins as the certificate keeps them, if it is to."""
    if not options.margins:
        return None
    everything = decide_rows(log, relaxation=None, boundary_u=None, u=None, sees_all=True)
    return write_quantiles(margin_quantiles(everything.margin, options.draws(log)))


def _slack(thresholds: _Thresholds, bound: Fraction, options: CalibrationOptions) -> float:
    """Return the unspent part of the budget, after the next unit's rows at the bound where the promise is an average."""
    total, n, unseen = thresholds.fit.total, thresholds.fit.n, options.unseen
    if options.confidence is not None or options.by is not None or thresholds.learned is not None:
        return float(thresholds.alpha) - float(total / n)
    return float(thresholds.alpha - (total + unseen * bound) / (n + unseen))


def _unit(log: ScoreLog, options: CalibrationOptions) -> Literal["session"] | None:
    """Return what a row is: a session, or None for a single query.

    Raises:
        OptionError: the options have no sentence, and no proof, for sessions.
    """
    if not has_sessions(log):
        return None
    others = (options.cluster, options.confidence, options.by, options.dial or None, options.learned or None)
    if not log.is_router or options.loss_name != REGRET or any(one is not None for one in others):
        raise OptionError(
            f"{log.source}: its rows are sessions (column '{SESSION_TURNS}'), which are certified in router form with the "
            "Guardian regret only; leave loss=, cluster=, confidence=, dial=, by= and score= out"
        )
    return "session"


def _net_terms(
    log: ScoreLog, options: CalibrationOptions, relaxation: float | None, boundary_u: float | None
) -> dict[str, float]:
    """Return what a certificate that counts gains says besides: the regret, and how far one certificate scatters."""
    grades = options.grades(log)
    if grades is None:
        return {}
    decisions = decide_rows(log, relaxation=relaxation, boundary_u=boundary_u, u=options.drawing(log), sees_all=True)
    worst = float(as_fraction(1 if options.loss_bound is None else options.loss_bound, name="loss_bound"))
    losses = np.where(decisions.deferred, 0.0, np.nan_to_num(net_losses(log, grades), nan=worst))
    return {
        "regret": float(np.maximum(losses, 0.0).sum() / len(log)),
        "spread": float(np.sqrt((losses**2).sum()) / len(log)),
    }


def _provenance(log: ScoreLog, options: CalibrationOptions) -> dict[str, Any]:
    return {
        "no_opinion_rows": int(log.no_opinion.sum()),
        "fewest_actions": int(log.sizes.min()),
        "most_actions": int(log.sizes.max()),
        "columns": dict(zip(("primary", "guardian"), log.columns, strict=True)),
        "identities": _bound_identities(log, options),
        "log_sha256": log.sha256(),
    }


def _stored(value: Fraction, given: object, name: str) -> float:
    """Return a number as the certificate stores it: a float that reads back as the same decimal."""
    number = float(value)
    if Fraction(repr(number)) != value:
        raise OptionError(f"{name} must be a decimal of at most 15 digits; got {given!r}")
    return number


def _identities(noted: Mapping[str, Any] | None, columns: tuple[str, str]) -> dict[str, Any] | Literal["unbound"]:
    known: Mapping[str, Any] = noted or {}
    if not all(column in known for column in columns):
        return "unbound"
    identities = {role: known[column] for role, column in zip(("primary", "guardian"), columns, strict=True)}
    return identities | {name: known[name] for name in ("grader", "session", "requests") if name in known}


def _bound_identities(log: ScoreLog, options: CalibrationOptions) -> dict[str, Any] | Literal["unbound"]:
    """Return the identities of a log and, with groups, what names the group of a live query, as log or options say."""
    identities = _identities(log.identities, log.columns)
    if identities == "unbound":
        if options.group_source is not None:
            raise OptionError(
                f"{log.source}: group_source= binds groups to requests, and this log names no models to bind"
            )
        return identities
    noted: Mapping[str, Any] = log.identities or {}
    logged: str | None = noted.get("group", {}).get("source") if options.by == "group" else None
    if logged is not None and options.group_source not in (None, logged):
        raise OptionError(
            f"{log.source}: its groups were named by {logged}; got group_source {options.group_source!r}, leave it out"
        )
    source = logged or options.group_source
    return identities if source is None else {**identities, "group": {"source": source}}
