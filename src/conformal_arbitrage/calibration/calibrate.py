"""calibrate: find the smallest relaxation that keeps a risk budget, and certify it; in memory or over parts."""

import hmac
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, Literal, Unpack

import numpy as np

from conformal_arbitrage.calibration.certificate import (
    Certificate,
    decide_rows,
    issue,
    margin_quantiles,
    write_quantiles,
)
from conformal_arbitrage.calibration.learning import LearnedFit, learn_score
from conformal_arbitrage.calibration.options import (
    STOPS,
    CalibrationKeywords,
    CalibrationOptions,
    DialStop,
    GroupThreshold,
    Kind,
    check_keywords,
    is_binarized,
    lower_stop,
    refuse_combination,
    resolve_options,
    threshold_rows,
)
from conformal_arbitrage.calibration.planning import rows_needed
from conformal_arbitrage.calibration.promises import (
    Average,
    ByGroup,
    Cluster,
    Confident,
    Dial,
    Evidence,
    Learned,
    LossTerms,
    Net,
    Own,
    PerSession,
    Promise,
    Regret,
    Rule,
    Threshold,
)
from conformal_arbitrage.calibration.secret import draw
from conformal_arbitrage.calibration.survey import (
    LogSurvey,
    PartsSurvey,
    needs_all_rows,
    refuse_repeated_ids,
)
from conformal_arbitrage.core.bounds import accepts, binomial_spendable, shared_bets
from conformal_arbitrage.core.exact import Floats, Indices
from conformal_arbitrage.core.losses import (
    Number,
    as_fraction,
    net_losses,
)
from conformal_arbitrage.core.walk import (
    RiskThreshold,
    check_alpha,
    check_bound,
    spendable,
)
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.fitness import group_rows, has_sessions, refuse_unfit
from conformal_arbitrage.scorelog.log import FrameColumns, ScoreColumns, ScoreLog, as_score_log
from conformal_arbitrage.scorelog.parts import Engine, PassProgress, ScoreParts, as_engine, silent
from conformal_arbitrage.scorelog.spark import SparkTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A threshold and what it loses on its log; a relaxation of None defers every query."""

    n: int
    relaxation: float | None
    boundary_u: float | None
    total: Fraction


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
    if not isinstance(log, ScoreParts | SparkTable):
        columns: FrameColumns = {}
        if primary is not None:
            columns["primary"] = primary
        if guardian is not None:
            columns["guardian"] = guardian
        log = as_score_log(log, **columns)
    return certify(log, alpha, chosen, engine=engine, progress=progress)


def certify(
    log: ScoreLog | ScoreParts | SparkTable,
    alpha: Number,
    options: CalibrationOptions,
    *,
    engine: Engine | Executor | str | None = None,
    progress: PassProgress = silent,
) -> Certificate:
    """Calibrate under options that already have their key; the step that `verify` repeats.

    Args:
        log: the log, in memory, in parts or in Spark, with the same result.
        alpha: the risk budget.
        options: how to calibrate.
        engine: for a log in parts, where the work is done.
        progress: is told about every pass over a log in parts.
    """
    survey = _survey(log, alpha, options, engine, progress)
    bound, facts = survey.bound, survey.facts()
    thresholds = _thresholds(survey, check_alpha(alpha, bound), options)
    fit, whole = thresholds.fit, survey.whole
    net = None if whole is None else _net_losses(whole, options, fit)
    evidence = Evidence(
        n=survey.n,
        log_sha256=survey.sha256(),
        empirical_risk=float(fit.total / fit.n),
        missing_guardian_rows=facts.unknown,
        spread=None if net is None else float(np.sqrt((net**2).sum()) / survey.n),
        slack=_slack(thresholds, bound, options),
        no_opinion_rows=facts.no_opinion,
        router=facts.router,
        score_digits=facts.score_digits,
        fewest_actions=facts.fewest_actions,
        most_actions=facts.most_actions,
        columns=dict(zip(("primary", "guardian"), log.columns, strict=True)),
        margin_quantiles=None if whole is None else _margin_quantiles(whole, options),
    )
    keyed = options.boundary == "random" or (options.confidence is not None and not options.is_binary(log, bound))
    return issue(
        _rule(options, thresholds),
        _promise(alpha, options, thresholds, whole),
        _loss(options, thresholds, survey, regret=0.0 if net is None else float(np.maximum(net, 0.0).sum() / survey.n)),
        evidence,
        identities=_identities(log, options),
        key=options.key if keyed else None,
        fit=None if thresholds.learned is None else thresholds.learned.score,
    )


def _survey(
    log: ScoreLog | ScoreParts | SparkTable,
    alpha: Number,
    options: CalibrationOptions,
    engine: Engine | Executor | str | None,
    progress: PassProgress,
) -> LogSurvey | PartsSurvey:
    """Look at a log: in memory if it is there, or if the options need all rows at once."""
    refuse_unfit(log)
    if isinstance(log, ScoreLog):
        if engine is not None:
            raise OptionError("engine= is for a log in parts: read it with ScoreParts.read")
        return LogSurvey(log, options)
    if isinstance(log, SparkTable) and engine not in (None, log):
        raise OptionError(f"{log.source}: the work on a table of Spark is done by its session; leave engine= out")
    as_fraction(alpha, name="alpha")  # before passes over many rows
    reason = needs_all_rows(options, log)
    if reason is None:
        place = log if isinstance(log, SparkTable) else as_engine(engine)
        return PartsSurvey(log, options, place, progress, likely_losses(len(log), alpha, options))
    if isinstance(log, SparkTable):
        log.gather(reason)  # which it refuses
    refuse_repeated_ids(log)
    whole = log.gather(reason)
    log.refuse_copies(whole)
    return LogSurvey(whole, options)


def _rule(options: CalibrationOptions, thresholds: "_Thresholds") -> Rule:
    if options.score != "margin":
        return Learned(score=options.score, terms=None if thresholds.learned is None else thresholds.learned.terms)
    grid = None if options.grid is None else _stored(as_fraction(options.grid, name="grid"), options.grid, "grid")
    if options.by is not None and thresholds.groups is not None:
        return ByGroup(
            by=options.by,
            groups=thresholds.groups,
            guardian_sees=options.guardian_sees,
            boundary=options.boundary,
            grid=grid,
            small_groups=options.small_groups,
        )
    return Threshold(
        relaxation=thresholds.fit.relaxation,
        boundary_u=thresholds.fit.boundary_u,
        guardian_sees=options.guardian_sees,
        boundary=options.boundary,
        grid=grid,
    )


def _promise(
    given: Number,
    options: CalibrationOptions,
    thresholds: "_Thresholds",
    whole: ScoreLog | None,
) -> Promise:
    alpha = _stored(thresholds.alpha, given, "alpha")
    if options.confidence is not None:
        level = as_fraction(options.confidence, name="confidence")
        confidence = _stored(level, options.confidence, "confidence")
        if thresholds.dial is not None:
            return Dial(alpha=alpha, confidence=confidence, stops=thresholds.dial)
        return Confident(alpha=alpha, confidence=confidence)
    clusters = None if whole is None else options.clusters(whole)
    if options.cluster is not None and options.max_cluster_size is not None and clusters is not None:
        return Cluster(
            alpha=alpha, cluster=options.cluster, clusters=clusters, max_cluster_size=options.max_cluster_size
        )
    return Average(alpha=alpha) if whole is None or not has_sessions(whole) else PerSession(alpha=alpha)


def _loss(
    options: CalibrationOptions, thresholds: "_Thresholds", survey: LogSurvey | PartsSurvey, *, regret: float
) -> LossTerms:
    stored, missing = _stored(survey.bound, options.loss_bound, "loss_bound"), options.missing_guardian
    binarized = is_binarized(survey.log)
    if options.net:
        return Net(bound=stored, zero_one=options.zero_one, missing_guardian=missing, regret=regret)
    if options.own_loss is None or not isinstance(survey, LogSurvey):
        return Regret(bound=stored, zero_one=options.zero_one, binarized=binarized, missing_guardian=missing)
    curve = survey.curve
    least = thresholds.alpha if thresholds.dial is None else as_fraction(thresholds.dial[0].alpha, name="alpha")
    tick = Fraction(1, 10**curve.tick_digits)
    declared = options.check_full_sight(least, curve.in_full_sight, tick=tick, source=survey.log.source)
    return Own(
        name=options.loss_name,
        bound=stored,
        zero_one=options.zero_one,
        binarized=binarized,
        missing_guardian=missing,
        full_sight_loss=_stored(declared, options.full_sight_loss, "full_sight_loss"),
        envelope_excess=curve.envelope_excess,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Thresholds:
    """The thresholds of a certificate: one, those of a dial with one chosen, or those of groups."""

    alpha: Fraction
    fit: Fit
    dial: tuple[DialStop, ...] | None = None
    groups: dict[str, GroupThreshold] | None = None
    learned: LearnedFit | None = None


def _thresholds(survey: LogSurvey | PartsSurvey, alpha: Fraction, options: CalibrationOptions) -> _Thresholds:
    if isinstance(survey, LogSurvey):
        _refuse_sessions(survey.log, options)
        if options.zero_one:
            refuse_graded(survey.log, options, survey.bound)
        if options.by is not None:
            return _by_group(survey, alpha, options, options.by)
        if options.learned:
            return _learned(survey, alpha, options)
    budgets = _budgets(alpha, survey.bound, options)
    fits = find_fits(survey, budgets, options, options.delta())
    return _dial(budgets, fits, alpha) if options.dial else _Thresholds(alpha=alpha, fit=fits[0])


def _dial(alphas: Sequence[Fraction], fits: Sequence[Fit], alpha: Fraction) -> _Thresholds:
    """Set a dial to the largest stop that does not exceed alpha."""
    dial = tuple(_stop(budget, fit) for budget, fit in zip(alphas, fits, strict=True))
    chosen = dial.index(lower_stop(dial, float(alpha)))
    return _Thresholds(alpha=alphas[chosen], fit=fits[chosen], dial=dial)


def _by_group(survey: LogSurvey, alpha: Fraction, options: CalibrationOptions, by: str) -> _Thresholds:
    """Calibrate each group on its own rows, or on those of all small groups; a query that belongs to none is deferred."""
    log, bound = survey.log, survey.bound
    rows, alone = group_rows(log, by), replace(options, by=None, small_groups="defer", group_source=None)
    delta = options.delta(len(rows))
    fewest = rows_needed(alpha, bound) if options.merges else None
    sources = threshold_rows(list(rows.values()), fewest)

    distinct = {id(source): LogSurvey(log.select(source), alone) for source in sources}
    fit_of = {key: find_fits(part, [alpha], alone, delta)[0] for key, part in distinct.items()}
    fits = {
        name: _of_group(log.select(members), fit_of[id(source)], alone, shared=source is not members)
        for (name, members), source in zip(rows.items(), sources, strict=True)
    }
    total = sum((fit.total for fit in fits.values()), start=Fraction(0))
    groups = {name: _group(fit) for name, fit in fits.items()}
    whole = Fit(n=len(log), relaxation=None, boundary_u=None, total=total)
    return _Thresholds(alpha=alpha, fit=whole, groups=groups)


def _of_group(part: ScoreLog, fit: Fit, options: CalibrationOptions, *, shared: bool) -> Fit:
    """Return a threshold with the rows and the loss of one group, if several share it."""
    if not shared:
        return fit
    total = Fraction(0)
    if fit.relaxation is not None:
        curve = options.curve(part)
        total = Fraction(int(curve.row_losses(fit.relaxation, fit.boundary_u).sum()), 10**curve.tick_digits)
    return replace(fit, n=len(part), total=total)


def _learned(survey: LogSurvey, alpha: Fraction, options: CalibrationOptions) -> _Thresholds:
    """Learn a score; without room for a single loss, every query is deferred."""
    learned = learn_score(survey.log, alpha, survey.bound, options)
    total = Fraction(0) if learned is None else learned.total
    whole = Fit(n=survey.n, relaxation=None, boundary_u=None, total=total)
    return _Thresholds(alpha=alpha, fit=whole, learned=learned)


def _stop(alpha: Fraction, fit: Fit) -> DialStop:
    return DialStop(
        alpha=_stored(alpha, alpha, "alpha"),
        relaxation=fit.relaxation,
        boundary_u=fit.boundary_u,
        empirical_risk=float(fit.total / fit.n),
    )


def _group(fit: Fit) -> GroupThreshold:
    return GroupThreshold(
        n=fit.n, relaxation=fit.relaxation, boundary_u=fit.boundary_u, empirical_risk=float(fit.total / fit.n)
    )


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


_FORMS: Final[dict[bool, tuple[Kind, ...]]] = {True: (), False: ("menus",)}


def _refuse_sessions(log: ScoreLog, options: CalibrationOptions) -> None:
    """Refuse options that have no sentence, and no proof, for a log whose rows are whole sessions."""
    if has_sessions(log):
        refuse_combination("session", *options.kinds, *_FORMS[log.is_router])


def _net_losses(log: ScoreLog, options: CalibrationOptions, fit: Fit) -> Floats | None:
    """Return the loss of every row at a threshold where gains are counted; None for other losses."""
    grades = options.grades(log)
    if grades is None:
        return None
    u = options.drawing(log)
    decisions = decide_rows(log, relaxation=fit.relaxation, boundary_u=fit.boundary_u, u=u, sees_all=True)
    worst = float(as_fraction(1 if options.loss_bound is None else options.loss_bound, name="loss_bound"))
    return np.where(decisions.deferred, 0.0, np.nan_to_num(net_losses(log, grades), nan=worst))


def _stored(value: Fraction, given: object, name: str) -> float:
    """Return a number as the certificate stores it: a float that reads back as the same decimal."""
    number = float(value)
    if Fraction(repr(number)) != value:
        raise OptionError(f"{name} must be a decimal of at most 15 digits; got {given!r}")
    return number


def _identities(
    log: ScoreLog | ScoreParts | SparkTable, options: CalibrationOptions
) -> dict[str, Any] | Literal["unbound"]:
    """Return the identities of a log and, with groups, what names the group of a live query, as log or options say."""
    noted: Mapping[str, Any] = log.identities or {}
    if not all(column in noted for column in log.columns):
        if options.group_source is not None:
            raise OptionError(
                f"{log.source}: group_source= binds groups to requests, and this log names no models to bind"
            )
        return "unbound"
    identities = {role: noted[column] for role, column in zip(("primary", "guardian"), log.columns, strict=True)}
    identities |= {name: noted[name] for name in ("grader", "session", "requests") if name in noted}
    logged: str | None = noted.get("group", {}).get("source") if options.by == "group" else None
    if logged is not None and options.group_source not in (None, logged):
        raise OptionError(
            f"{log.source}: its groups were named by {logged}; got group_source {options.group_source!r}, leave it out"
        )
    source = logged or options.group_source
    return identities if source is None else {**identities, "group": {"source": source}}


# --- One threshold ---


def find_fits(
    survey: LogSurvey | PartsSurvey, alphas: Sequence[Fraction], options: CalibrationOptions, delta: float | None
) -> list[Fit]:
    """Return the smallest relaxation that keeps each budget.

    Args:
        survey: of the log.
        alphas: risk budgets.
        options: how to calibrate.
        delta: the level of the test; None to keep the budgets on average.
    """
    if delta is None or options.is_binary(survey.log, survey.bound) or not isinstance(survey, LogSurvey):
        limits = [_limit(alpha, survey.bound, survey.n, survey.tick_digits, options, delta) for alpha in alphas]
        return [_fit(survey.n, threshold) for threshold in survey.thresholds(limits)]
    return [_betting_fit(survey, alpha, options, delta) for alpha in alphas]


def _fit(n: int, threshold: RiskThreshold | None) -> Fit:
    """Return a threshold that was found on n rows; None defers every query."""
    if threshold is None:
        return Fit(n=n, relaxation=None, boundary_u=None, total=Fraction(0))
    return Fit(n=n, relaxation=threshold.relaxation, boundary_u=threshold.boundary_u, total=threshold.total)


def _limit(
    alpha: Fraction, bound: Fraction, n: int, tick_digits: int, options: CalibrationOptions, delta: float | None
) -> int:
    """Return the largest total that keeps a budget, in ticks, on average or by the binomial test."""
    if delta is None:
        return spendable(alpha, bound, n, tick_digits, unseen=options.unseen)
    return binomial_spendable(alpha, bound, n, tick_digits, delta)


def _budgets(alpha: Fraction, bound: Fraction, options: CalibrationOptions) -> list[Fraction]:
    """Return the risk budgets for which thresholds are sought: alpha, or the stops of a dial."""
    return [Fraction(stop) * bound for stop in STOPS] if options.dial else [alpha]


def likely_losses(n: int, alpha: Number, options: CalibrationOptions) -> list[float]:
    """Return the mean losses that n rows may show, one for each budget, before any row was looked at."""
    bound = check_bound(options.loss_bound, (Fraction(0), 0), tick=Fraction(1), unit_scores=True, source="options")
    budgets, digits, delta = _budgets(check_alpha(alpha, bound), bound, options), 3, options.delta()
    return [_limit(budget, bound, n, digits, options, delta) / (n * 10**digits) for budget in budgets]


def _betting_fit(survey: LogSurvey, alpha: Fraction, options: CalibrationOptions, delta: float) -> Fit:
    """Return the first breakpoint that the betting test accepts, by bisection: it accepts all later ones."""
    curve, order, line = survey.curve, row_order(survey.log, options.key), float(alpha / survey.bound)
    unit = float(survey.bound) * 10.0**curve.tick_digits
    bets = shared_bets(np.minimum(curve.row_losses(0.0, 0.0)[order] / unit, 1.0), line, delta)

    def passes(index: int) -> bool:
        u = None if curve.boundary_u is None else float(curve.boundary_u[index])
        return accepts(curve.row_losses(float(curve.breakpoints[index]), u)[order] / unit, bets, line, delta)

    low, high = -1, len(curve.totals)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    threshold = curve.thresholds([int(curve.totals[high])])[0] if high < len(curve.totals) else None
    return _fit(survey.n, threshold)


def row_order(log: ScoreLog, key: bytes | None) -> Indices:
    """Return the order in which the betting test goes through rows: that of a keyed hash of their ids.

    Whoever chooses the ids cannot choose the order, since the key is secret and the same for all calibrations. Rows
    without ids are numbered.
    """
    if key is None:
        raise OptionError(
            "a confidence for graded losses needs a key, the same for all calibrations of a project: "
            "key=ProjectSecret.find().boundary_key; if every loss is 0 or the bound, declare zero_one=True (--zero-one)"
        )
    shuffling = hmac.digest(key, b"row order v1", "sha256")
    ids = [str(row) for row in range(len(log))] if log.id is None else log.id.tolist()
    return np.argsort(np.array([draw(shuffling, id) for id in ids]), kind="stable")


def refuse_graded(log: ScoreLog, options: CalibrationOptions, bound: Fraction) -> None:
    """Refuse a log with a loss other than 0 and the bound where all are declared to be one of the two.

    Raises:
        ScoreLogError: it has one.
    """
    losses = options.losses(log)
    whole = bound * 10**losses.tick_digits
    for piece in losses.blocks:
        graded = ((piece.levels != 0) & (piece.levels != whole)).any(axis=0)
        if graded.any():
            place = int(graded.argmax())
            loss = max(level for level in piece.levels[:, place].tolist() if level not in (0, whole))
            row = int(piece.block.all_rows()[place]) + 1
            raise ScoreLogError(
                f"{log.source}: row {row}: a loss of {loss / 10**losses.tick_digits:g} is neither 0 nor the bound "
                f"{float(bound):g}, as zero_one declares; leave zero_one (--zero-one) out for graded losses"
            )
