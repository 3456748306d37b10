"""calibrate: find the smallest relaxation that keeps a risk budget, and certify it; in memory or part by part."""

import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from math import inf, nextafter, sqrt
from typing import Any, Final, Literal, TypeVar, Unpack

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
from conformal_arbitrage.calibration.secret import draw, drawing
from conformal_arbitrage.core.bounds import accepts, binomial_spendable, shared_bets
from conformal_arbitrage.core.exact import Bools, Floats, Indices, Integers, n_rows
from conformal_arbitrage.core.risk import (
    Bracket,
    Buckets,
    BucketSums,
    Collect,
    Crossing,
    Events,
    FindDraw,
    Fold,
    LossMeasure,
    Number,
    RiskCurve,
    RiskThreshold,
    Scanned,
    as_fraction,
    check_alpha,
    check_bound,
    check_guardian_scores,
    crossings,
    crossings_here,
    find_thresholds,
    finest_tick,
    first_outside,
    grid_points,
    in_unit,
    last_draw,
    net_losses,
    spendable,
)
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.fitness import SESSION_TURNS, group_rows, has_sessions, refuse_unfit
from conformal_arbitrage.scorelog.log import FrameColumns, ScoreColumns, ScoreLog, as_score_log, checksum
from conformal_arbitrage.scorelog.parts import Engine, PassProgress, ScorePart, ScoreParts, as_engine, silent
from conformal_arbitrage.scorelog.spark import SparkTable
from conformal_arbitrage.scorelog.tables import Keys, surely_distinct


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
    return certify(log, alpha, chosen.settled(log), engine=engine, progress=progress)


def certify(
    log: ScoreLog | ScoreParts | SparkTable,
    alpha: Number,
    options: CalibrationOptions,
    *,
    engine: Engine | Executor | str | None = None,
    progress: PassProgress = silent,
) -> Certificate:
    """Calibrate under options that are settled; the step that `verify` repeats."""
    survey = _survey(log, alpha, options, engine, progress)
    bound, facts = survey.bound, survey.facts()
    thresholds = _thresholds(survey, check_alpha(alpha, bound), options)
    fit, whole = thresholds.fit, survey.whole
    net = None if whole is None else _net_losses(whole, options, thresholds)
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
        floor=None if whole is None else whole.floor,
        not_asked_rows=0 if whole is None or whole.floor is None else int(whole.below_floor.sum()),
        draws=drawn_by(whole) if whole is not None and options.boundary == "random" else "id",
    )
    return issue(
        _rule(options, thresholds),
        _promise(alpha, options, thresholds, survey),
        _loss(options, thresholds, survey, regret=0.0 if net is None else float(np.maximum(net, 0.0).sum() / survey.n)),
        evidence,
        identities=_identities(log, options),
        key=options.key,
        fit=None if thresholds.learned is None else thresholds.learned.score,
    )


def drawn_by(log: ScoreLog) -> Literal["id", "text", "scores"]:
    """Return what the draws of a log's rows are keyed by."""
    return "id" if log.id is not None else "scores" if log.context is None else "text"


def _survey(
    log: ScoreLog | ScoreParts | SparkTable,
    alpha: Number,
    options: CalibrationOptions,
    engine: Engine | Executor | str | None,
    progress: PassProgress,
) -> "LogSurvey | PartsSurvey":
    """Look at a log: in memory if it is there, or if the options need all rows at once."""
    refuse_unfit(log.source, log.extra if isinstance(log, ScoreLog) else log.types)
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
    boundary = options.boundary or "include"
    if options.by is not None and thresholds.groups is not None:
        return ByGroup(
            by=options.by,
            groups=thresholds.groups,
            guardian_sees=options.guardian_sees,
            boundary=boundary,
            grid=grid,
            small_groups=options.small_groups,
        )
    return Threshold(
        relaxation=thresholds.fit.relaxation,
        boundary_u=thresholds.fit.boundary_u,
        guardian_sees=options.guardian_sees,
        boundary=boundary,
        grid=grid,
    )


def _promise(
    given: Number,
    options: CalibrationOptions,
    thresholds: "_Thresholds",
    survey: "LogSurvey | PartsSurvey",
) -> Promise:
    alpha = _stored(thresholds.alpha, given, "alpha")
    if options.confidence is not None:
        level = as_fraction(options.confidence, name="confidence")
        confidence = _stored(level, options.confidence, "confidence")
        if thresholds.dial is not None:
            return Dial(alpha=alpha, confidence=confidence, stops=thresholds.dial)
        return Confident(alpha=alpha, confidence=confidence)
    clusters = None if survey.whole is None or options.cluster is None else options.clusters(survey.whole)
    if options.cluster is not None and options.max_cluster_size is not None and clusters is not None:
        return Cluster(
            alpha=alpha, cluster=options.cluster, clusters=clusters, max_cluster_size=options.max_cluster_size
        )
    return PerSession(alpha=alpha) if survey.sessions else Average(alpha=alpha)


def _loss(
    options: CalibrationOptions, thresholds: "_Thresholds", survey: "LogSurvey | PartsSurvey", *, regret: float
) -> LossTerms:
    stored, missing = _stored(survey.bound, options.loss_bound, "loss_bound"), options.missing_guardian
    binarized = is_binarized(survey.log)
    if options.loss is None:
        return Regret(bound=stored, zero_one=options.zero_one, binarized=binarized, missing_guardian=missing)
    if options.net:
        return Net(bound=stored, zero_one=options.zero_one, missing_guardian=missing, regret=regret)
    if not isinstance(survey, LogSurvey):
        raise AssertionError  # `needs_all_rows` had them gathered
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


def _thresholds(survey: "LogSurvey | PartsSurvey", alpha: Fraction, options: CalibrationOptions) -> _Thresholds:
    if isinstance(survey, LogSurvey):
        _refuse_sessions(survey, options)
        _refuse_floor(survey.log, options)
        if options.zero_one:
            refuse_graded(survey.log, options, survey.bound)
        if options.by is not None:
            return _by_group(survey, alpha, options, options.by)
        if options.score != "margin":
            return _learned(survey, alpha, options)
    budgets = _budgets(alpha, survey.bound, options)
    fits = find_fits(survey, budgets, options, options.delta())
    return _dial(budgets, fits, alpha) if options.dial else _Thresholds(alpha=alpha, fit=fits[0])


def _dial(alphas: Sequence[Fraction], fits: Sequence[Fit], alpha: Fraction) -> _Thresholds:
    """Set a dial to the largest stop that does not exceed alpha."""
    dial = tuple(_stop(budget, fit) for budget, fit in zip(alphas, fits, strict=True))
    chosen = dial.index(lower_stop(dial, float(alpha)))
    return _Thresholds(alpha=alphas[chosen], fit=fits[chosen], dial=dial)


def _by_group(survey: "LogSurvey", alpha: Fraction, options: CalibrationOptions, by: str) -> _Thresholds:
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


def _learned(survey: "LogSurvey", alpha: Fraction, options: CalibrationOptions) -> _Thresholds:
    """Learn a score; without room for a single loss, every query is deferred."""
    learned = learn_score(survey.log, alpha, survey.bound, options)
    total = Fraction(0) if learned is None else int(learned.losses.sum()) * survey.bound
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


def _refuse_sessions(survey: "LogSurvey", options: CalibrationOptions) -> None:
    """Refuse options that have no sentence, and no proof, for a log whose rows are whole sessions."""
    if survey.sessions:
        refuse_combination("session", *options.kinds, *_FORMS[survey.log.is_router])


def _refuse_floor(log: ScoreLog, options: CalibrationOptions) -> None:
    """Refuse options under which a row that is deferred can lose, for a log in which such rows were not asked about."""
    if log.floor is not None:
        refuse_combination("floor", *options.kinds)
        if options.grid is not None:
            raise OptionError(
                f"{log.source}: was collected with a floor, which is not on a grid; leave grid= (--grid) out"
            )


def _net_losses(log: ScoreLog, options: CalibrationOptions, thresholds: _Thresholds) -> Floats | None:
    """Return the losses of a log where gains are counted, without some that are 0; None for other losses."""
    grades, fit = options.grades(log), thresholds.fit
    if grades is None:
        return None
    worst = float(as_fraction(1 if options.loss_bound is None else options.loss_bound, name="loss_bound"))
    if thresholds.learned is not None:
        return thresholds.learned.losses.astype(np.float64) * worst
    u = options.drawing(log)
    decisions = decide_rows(log, relaxation=fit.relaxation, boundary_u=fit.boundary_u, u=u, sees_all=True)
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
    survey: "LogSurvey | PartsSurvey", alphas: Sequence[Fraction], options: CalibrationOptions, delta: float | None
) -> list[Fit]:
    """Return the smallest relaxation that keeps each budget.

    Args:
        delta: the level of the test; None to keep the budgets on average.
    """
    if delta is None or options.is_binary(survey.log, survey.bound) or not isinstance(survey, LogSurvey):
        limits = [_limit(alpha, survey.bound, survey.n, survey.tick_digits, options, delta) for alpha in alphas]
        fits = [_fit(survey.n, threshold) for threshold in survey.thresholds(limits)]
    else:
        fits = [_betting_fit(survey, alpha, options, delta) for alpha in alphas]
    return [_from_floor(survey, fit) for fit in fits] if isinstance(survey, LogSurvey) else fits


def _from_floor(survey: "LogSurvey", fit: Fit) -> Fit:
    """Return a threshold that is at least the floor of the log, between 0 and which no row loses anything."""
    floor = survey.log.floor
    if floor is None or fit.relaxation is None or fit.relaxation >= floor:
        return fit
    total = survey.curve.row_losses(floor, fit.boundary_u).sum()
    return replace(fit, relaxation=floor, total=Fraction(int(total), 10**survey.tick_digits))


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
    bound = check_bound(options.loss_bound, (Fraction(0), 0), tick=Fraction(1), outside=None, source="options")
    budgets, digits, delta = _budgets(check_alpha(alpha, bound), bound, options), 3, options.delta()
    return [_limit(budget, bound, n, digits, options, delta) / (n * 10**digits) for budget in budgets]


def _betting_fit(survey: "LogSurvey", alpha: Fraction, options: CalibrationOptions, delta: float) -> Fit:
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

    Whoever chooses the ids cannot choose the order, since the key is secret and the same for all calibrations.

    Raises:
        OptionError: there is no key, or there are no ids: rows in an order of the user's could be put in another until
            the certificate pleases.
    """
    if key is None:
        raise OptionError(
            "a confidence for graded losses needs a key, the same for all calibrations of a project: "
            "key=ProjectSecret.find().boundary_key; if every loss is 0 or the bound, declare zero_one=True (--zero-one)"
        )
    if log.id is None:
        raise OptionError(
            f"{log.source}: a confidence for graded losses needs ids, which fix the order of its test; give each row the id "
            "of its question (column id), or declare zero_one=True (--zero-one) if every loss is 0 or the bound"
        )
    shuffling = hmac.digest(key, b"row order v1", "sha256")
    return np.argsort(np.array([draw(shuffling, id) for id in log.id.tolist()]), kind="stable")


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


# --- The survey of a log, in memory ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """What is counted in the rows of a log, or of a part of one; the loss of `unknown` rows is not known."""

    rows: int
    fewest_actions: int
    most_actions: int
    no_opinion: int
    unknown: int
    router: bool
    score_digits: int

    @classmethod
    def of(cls, log: ScoreLog, unknown: Bools) -> "RowFacts":
        """Count in some rows."""
        sizes = log.sizes
        return cls(
            rows=len(sizes),
            fewest_actions=int(sizes.min()),
            most_actions=int(sizes.max()),
            no_opinion=int(log.no_opinion.sum()),
            unknown=int(unknown.sum()),
            router=log.is_router,
            score_digits=log.score_digits,
        )

    @classmethod
    def sum(cls, several: Sequence["RowFacts"]) -> "RowFacts":
        """Return the facts of several parts together."""
        return cls(
            rows=sum(facts.rows for facts in several),
            fewest_actions=min(facts.fewest_actions for facts in several),
            most_actions=max(facts.most_actions for facts in several),
            no_opinion=sum(facts.no_opinion for facts in several),
            unknown=sum(facts.unknown for facts in several),
            router=all(facts.router for facts in several),
            score_digits=several[0].score_digits,
        )


@dataclass(frozen=True)
class LogSurvey:
    """A log in memory: one part, whose events are all here."""

    recorded: ScoreLog
    options: CalibrationOptions

    @cached_property
    def log(self) -> ScoreLog:
        """The rows as they count: those below a floor are deferred at every relaxation."""
        return self.recorded if self.recorded.floor is None else self.recorded.above_floor()

    @cached_property
    def n(self) -> int:
        """Rows."""
        return len(self.log)

    @property
    def whole(self) -> ScoreLog:
        """All rows."""
        return self.log

    @cached_property
    def sessions(self) -> bool:
        """Whether each row is a session."""
        return has_sessions(self.log)

    @cached_property
    def curve(self) -> RiskCurve:
        """The risk of the log, under the options."""
        return self.options.curve(self.log)

    @cached_property
    def bound(self) -> Fraction:
        """The loss bound, checked against every row."""
        return self.curve.bound(self.options.loss_bound)

    @property
    def tick_digits(self) -> int:
        """One tick is 10^-tick_digits."""
        return self.curve.tick_digits

    def facts(self) -> RowFacts:
        """Return what is counted in the rows."""
        return RowFacts.of(self.log, self.options.unknown_loss(self.log))

    def sha256(self) -> str:
        """Return the digest of all rows, in whichever order."""
        return self.recorded.sha256()

    def thresholds(self, limits: Sequence[int]) -> list[RiskThreshold | None]:
        """Return the smallest threshold at which the total is within each limit, in ticks; None if none is."""
        return self.curve.thresholds(limits)


def needs_all_rows(options: CalibrationOptions, log: ScoreParts | SparkTable) -> str | None:
    """Return what of the options needs all rows at once, as a user knows it; None if nothing does."""
    needs = {
        'loss="net" (--loss net), whose budget is kept up to the first passage,': options.net,
        "a loss of your own": options.own_loss is not None,
        f'score="{options.score}"': options.learned,
        "by= (--by)": options.by is not None,
        "cluster= (--cluster)": options.cluster is not None,
        "margins= (--margins)": options.margins,
        "a confidence for graded losses": options.confidence is not None and not (log.binary or options.zero_one),
        "zero_one=True (--zero-one)": options.zero_one,
        "a log of sessions": SESSION_TURNS in log.types,
        "a log with a floor": isinstance(log, ScoreParts) and log.floor is not None,
        'boundary="random" without ids': options.boundary == "random" and not log.has_ids,
    }
    return next((reason for reason, needed in needs.items() if needed), None)


def digest_parts(log: ScoreParts | SparkTable, engine: Engine) -> str:
    """Return the digest of all rows of a log, in whichever order."""
    return log.digest(engine.run(_hash_part, log.parts()))


def _hash_part(part: ScorePart) -> tuple[ScorePart, int]:
    return part, part.hash_sum(*part.load_apart())


def count_rows(log: ScoreParts, engine: Engine) -> RowFacts:
    """Count in all rows of a log."""
    return RowFacts.sum(list(engine.run(_count_part, log.parts())))


def _count_part(part: ScorePart) -> RowFacts:
    log = part.load([], ids=False)
    return RowFacts.of(log, log.unknown_loss)


def refuse_repeated_ids(log: ScoreParts | SparkTable) -> None:
    """Refuse a log in which two rows have the same id, wherever they are."""
    same = log.repeated_id()
    if same is not None:
        raise ScoreLogError(f"{log.source}: {same}; make ids unique over all rows")


# --- The survey of a log in parts ---


_Result = TypeVar("_Result")
_FIRST: Final = 1 << 16
_DRAWN_AT_ONCE: Final = 1 << 20
_KEYS_AT_ONCE: Final = 1 << 27
"""The keys of so many ids are compared in memory, which takes 1 GB; DuckDB compares more, on disk."""


class PartsSurvey:
    """A log in parts, looked at once: its figures, and the search for thresholds.

    Attributes:
        bound: the loss bound, checked against every row.
        sessions: that no row is a session: those are put together in memory.
    """

    sessions = False

    def __init__(
        self,
        log: ScoreParts | SparkTable,
        options: CalibrationOptions,
        engine: Engine,
        progress: PassProgress,
        losses: Sequence[float] = (),
    ) -> None:
        """Go through all parts, once or, if the scores are of unusual size, twice.

        Args:
            losses: mean losses at which thresholds will be sought, about.
        """
        if log.guardian is None:
            raise OptionError(f"{log.source}: a calibration needs the Guardian's scores; name their column: guardian=")
        self.log, self.n, self._options = log, len(log), options
        self._engine, self._progress, self._passes = engine, progress, 0
        self._parts, stamps = log.parts(), log.stamps()
        bracket = Bracket(0.0, 1.0, _FIRST, even=True)
        missing = None if options.missing_guardian is None else (options.loss_bound or 1)
        guess = finest_tick(self.n, Fraction(1))
        self.measure = LossMeasure(guardian_sees=options.guardian_sees, missing_loss=missing, tick_digits=guess)
        self._near = NearEvents(self._guessed(losses))
        few = self.n <= _KEYS_AT_ONCE
        if not few:
            refuse_repeated_ids(log)
        self._survey(bracket, keys=few)
        self._refuse_unknown()
        low, high = self.scores
        worst = (
            as_fraction(missing, name="loss_bound") if missing is not None and self._counted.unknown else Fraction(0)
        )
        digits = finest_tick(self.n, max(Fraction(high) - Fraction(low), worst))
        if digits != guess or self.span > USUAL_SPAN:
            before, self.measure = self.sha256(), replace(self.measure, tick_digits=digits)
            self._near = NearEvents(self._near.ranges)
            self._survey(Bracket(0.0, max(self.span, 1e-300), _FIRST, even=True), keys=False)
            self._refuse_changed(self.sha256() != before)
        self._refuse_changed(log.stamps() != stamps)
        self.tick_digits, self.bound = digits, self._bound(digits)

    def _guessed(self, losses: Sequence[float]) -> "tuple[Bracket, ...] | OwnRanges":
        """Return the gaps near which events are kept: all of them in a small log."""
        if self.n <= FEW_ROWS:
            return EVERYTHING
        if isinstance(self.log, SparkTable):
            return OwnRanges(tuple(losses), self.n)
        samples = list(self._engine.run(Sampling(self.measure), sampled_parts(self._parts)))
        return likely_ranges(samples, losses, self.n)

    def _survey(self, bracket: Bracket, *, keys: bool) -> None:
        sums, facts, ids = BucketSums(bracket.buckets), list[PartFacts](), list[Keys]()
        for part in self._each(Survey(self.measure, bracket, self._near.ranges, keys)):
            sums.add(part.buckets)  # at once: those of all parts would not fit
            self._near.add(*part.near, part.ranges)
            facts.append(part.facts)
            ids.append(part.keys)
        _refuse_same_keys(ids, self.log)
        facts.sort(key=lambda part: part.part.first)
        self._facts, self._bracket, self._buckets = facts, bracket, sums.buckets()
        low, high = min(part.scores[0] for part in facts), max(part.scores[1] for part in facts)
        self.scores = (low, high) if low <= high else (0.0, 0.0)
        self._counted = RowFacts.sum([part.rows for part in facts])
        self.span = max(part.span for part in facts)
        self.total = sum(part.total for part in facts)

    @property
    def whole(self) -> None:
        """No rows: they are never all in memory."""
        return

    def facts(self) -> RowFacts:
        """Return what is counted in the rows."""
        return self._counted

    def _each(self, work: Callable[[ScorePart], _Result]) -> Iterator[_Result]:
        """Do a work on every part, and say so."""
        self._passes += 1
        done = 0
        for result in self._engine.run(work, self._parts):
            done += 1
            yield result
        self._progress(f"pass {self._passes}: {self.log.in_words(done)}")

    def _refuse_unknown(self) -> None:
        first = next((part for part in self._facts if part.first_unknown is not None), None)
        if first is not None and self.measure.missing_loss is None:
            row = first.part.start + (first.first_unknown or 0) + 1
            raise ScoreLogError(
                f"{first.part.file.path}: row {row}: no Guardian score, or `correct` of its answer is unknown "
                f"({self._counted.unknown:,} of {n_rows(f'{self.n:,}')}); ask the Guardian again, or pass "
                'missing_guardian="worst_case" (--missing-guardian worst_case): dropping such rows breaks the guarantee'
            )

    def _bound(self, tick_digits: int) -> Fraction:
        unit, worst = 10**tick_digits, max(self._facts, key=lambda facts: facts.largest[0])
        return check_bound(
            self._options.loss_bound,
            (Fraction(worst.largest[0], unit), worst.part.start + worst.largest[1]),
            tick=Fraction(1, unit),
            outside=next((facts.outside for facts in self._facts if facts.outside is not None), None),
            source=worst.part.file.path,
        )

    def sha256(self) -> str:
        """Return the digest of all rows, in whichever order."""
        return self.log.digest((facts.part, facts.hashes) for facts in self._facts)

    def thresholds(self, limits: Sequence[int]) -> list[RiskThreshold | None]:
        """Return the smallest threshold at which the total is within each limit, in ticks; None if none is."""
        return find_thresholds(self, limits)

    @property
    def grid(self) -> Floats | None:
        """The only relaxations allowed; None for all."""
        return None if self._options.grid is None else grid_points(self._options.grid)

    def crossings(self, limits: Sequence[int]) -> list[Crossing | None]:
        """Return where the total first is within each limit."""
        return crossings(self._scan_events, self.total, limits, self._bracket.high, first=_FIRST)

    def fallen(self, low: float, high: float) -> int:
        """Return by how much the total falls above one gap and up to another."""
        between = Fold((Bracket(nextafter(low, inf), high, 2),))
        return sum(int(buckets.drop.sum()) for (buckets,) in self._scan_events(between))

    @property
    def find_draw(self) -> FindDraw | None:
        """Finds the draw at a crossing; None unless the boundary is random."""
        return None if self._options.boundary != "random" else partial(self._find_draw, self._options.drawing_key())

    def _find_draw(self, key: bytes, crossing: Crossing, limit: int) -> tuple[float, int]:
        def scan(work: Callable[[Floats, Integers], _Result], /) -> Iterator[_Result]:
            return self._scan_draws(key, crossing.gap, work)

        if crossing.events > _DRAWN_AT_ONCE:
            (drawn,) = crossings(scan, crossing.before, [limit], 1.0)
            if drawn is None:
                raise AssertionError
            return drawn.gap, drawn.after
        u, drop = (np.concatenate(column) for column in zip(*scan(Keep()), strict=True))
        return last_draw(u, drop, crossing.before, limit)

    def _scan_events(self, work: Callable[[Floats, Integers], _Result], /) -> Iterable[_Result]:
        """Do a work on all events; what the first pass has done already is not done again."""
        if work == Fold((self._bracket,)):
            return [(self._buckets,)]  # pyright: ignore[reportReturnType]
        kept = self._near.answer(work)
        if kept is not None:
            return [kept]  # pyright: ignore[reportReturnType]
        return self._scan_again(work)

    def _scan_again(self, work: Callable[[Floats, Integers], _Result]) -> Iterator[_Result]:
        total = 0
        for rows, result in self._each(EventScan(self.measure, work)):
            total += rows
            yield result  # pyright: ignore[reportReturnType]
        self._refuse_changed(total != sum(part.checksum for part in self._facts))

    def _scan_draws(self, key: bytes, gap: float, work: Callable[[Floats, Integers], _Result]) -> Iterator[_Result]:
        """Do a work on the draws and events of the rows whose loss falls at a gap."""
        sums: list[tuple[ScorePart, int]] = []
        for part, hashes, result in self._each(DrawScan(self.measure, key, gap, work)):
            sums.append((part, hashes))
            yield result  # pyright: ignore[reportReturnType]
        self._refuse_changed(self.log.digest(sums) != self.sha256())

    def _refuse_changed(self, changed: bool) -> None:
        if changed:
            raise ScoreLogError(
                f"{self.log.source}: its rows changed between two passes; let nobody write to a log that is being read, or "
                "calibrate a copy"
            )


def _refuse_same_keys(ids: Sequence[Keys], log: ScoreParts | SparkTable) -> None:
    """Refuse repeated ids; where keys do not tell them apart for sure, the ids themselves are compared."""
    keys = np.concatenate(ids)
    if len(keys) and not surely_distinct(keys):
        refuse_repeated_ids(log)


# --- Work on one part of a log ---


USUAL_SPAN: Final = 2.0
"""With gaps up to this the first pass need not be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """What the first pass learns about a part."""

    part: ScorePart
    rows: RowFacts
    first_unknown: int | None
    scores: tuple[float, float]
    outside: str | None
    span: float
    hashes: int
    checksum: int
    total: int
    largest: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What the first pass brings back from a part; `keys` of its ids if they were wanted."""

    facts: PartFacts
    buckets: Buckets
    near: Scanned
    ranges: tuple[Bracket, ...]
    keys: Keys


@dataclass(frozen=True, slots=True)
class Survey:
    """The work of the first pass."""

    measure: LossMeasure
    bracket: Bracket
    near: "tuple[Bracket, ...] | OwnRanges"
    keys: bool

    def __call__(self, part: ScorePart) -> Surveyed:
        """Look at every row of a part."""
        log, ids = part.load_apart()
        unknown, path = log.unknown_loss, part.file.path
        scores = check_guardian_scores(log.loss_scores, log.offsets, path, start=part.start)
        events = self.measure.tolerant().events(log)
        (buckets,) = Fold((self.bracket,))(events.position, events.drop)
        facts = PartFacts(
            part=part,
            rows=RowFacts.of(log, unknown),
            first_unknown=int(unknown.argmax()) if unknown.any() else None,
            scores=scores if not unknown.all() else (inf, -inf),
            outside=None if in_unit(scores) else first_outside(log.loss_scores, log.offsets, path, start=part.start),
            span=_span(log),
            hashes=part.hash_sum(log, ids),
            checksum=_checksum(log),
            total=events.total,
            largest=events.largest,
        )
        ranges = self.near(len(log), events, buckets) if isinstance(self.near, OwnRanges) else self.near
        near = Collect(ranges)(events.position, events.drop)
        keys = [] if ids is None or not self.keys else list(ids.hash_keys())
        return Surveyed(facts, buckets, near, ranges, np.concatenate([np.zeros(0, np.uint64), *keys]))


@dataclass(frozen=True, slots=True)
class Sampling:
    """The work before the first pass, on a few rows."""

    measure: LossMeasure

    def __call__(self, part: ScorePart) -> "SampledEvents":
        """Return the events of some rows, in whichever row."""
        log = part.load([], ids=False)
        check_guardian_scores(log.loss_scores, log.offsets, part.file.path, start=part.start)
        return SampledEvents(len(log), replace(self.measure.tolerant().events(log), row=np.zeros(0, np.int64)))


def _checksum(log: ScoreLog) -> int:
    """Return a number that shows whether rows are still those of an earlier pass."""
    return checksum([log.primary, log.guardian, *([] if log.binary is None else [log.binary])])


def _span(log: ScoreLog) -> float:
    """Return the largest gap of some rows; if all Primary scores together span little, that, which is as good."""
    together = float(log.primary.max() - log.primary.min())
    if together <= USUAL_SPAN:
        return together
    starts = log.offsets[:-1]
    return float((np.maximum.reduceat(log.primary, starts) - np.minimum.reduceat(log.primary, starts)).max())


@dataclass(frozen=True, slots=True)
class EventScan:
    """The work of a later pass: something with the events of a part. Its checksum comes with the result."""

    measure: LossMeasure
    work: Callable[[Floats, Integers], object]

    def __call__(self, part: ScorePart) -> tuple[int, object]:
        """Return the checksum of the rows, and the result of the work."""
        log = part.load([], ids=False)
        events = self.measure.events(log)
        return _checksum(log), self.work(events.position, events.drop)


@dataclass(frozen=True, slots=True)
class DrawScan:
    """The work of a pass over draws: something with the draws of the rows whose loss falls at one gap, and these events.

    The part and the sum of its rows' hashes, in which ids count, come with the result.
    """

    measure: LossMeasure
    key: bytes
    gap: float
    work: Callable[[Floats, Integers], object]

    def __call__(self, part: ScorePart) -> tuple[ScorePart, int, object]:
        """Return the part, the sum of its rows' hashes, and the result of the work."""
        log, ids = part.load_apart()
        log = log if ids is None else replace(log, id=ids.strings())
        events = self.measure.events(log)
        there = np.flatnonzero(events.position == self.gap)
        return part, part.hash_sum(log, ids), self.work(drawing(self.key, log)(events.row[there]), events.drop[there])


@dataclass(frozen=True, slots=True)
class Keep:
    """Work that keeps what it is given."""

    def __call__(self, gap: Floats, drop: Integers) -> tuple[Floats, Integers]:
        """Return it."""
        return gap, drop


# --- Events near the thresholds, kept in the first pass ---


FEW_ROWS: Final = 1 << 16
"""All events of a log of so many rows are kept."""
_SAMPLES: Final = 8
_LEAST, _MOST = 1 << 10, 1 << 16
_ROWS_PER_SAMPLED: Final = 64
_KEPT: Final = 1 << 22
"""At most about so many events are kept."""


@dataclass(frozen=True, slots=True)
class SampledEvents:
    """Rows of a sample, and their events."""

    rows: int
    events: Events

    def crossing(self, loss: float) -> Crossing | None:
        """Return where the mean loss of these rows comes within a limit."""
        limit = int(loss * self.rows * 10**self.events.tick_digits)
        return crossings_here(self.events.total, self.events.position, self.events.drop, [limit])[0]


def sampled_parts(parts: Sequence[ScorePart]) -> list[ScorePart]:
    """Return a few rows of some parts, evenly spread over the log."""
    rows = sum(part.stop - part.start for part in parts)
    each = min(max(rows // (_ROWS_PER_SAMPLED * _SAMPLES), _LEAST), _MOST)
    chosen = [parts[len(parts) * k // _SAMPLES] for k in range(_SAMPLES)]
    return [_shortened(part, chosen[:k].count(part), each) for k, part in enumerate(chosen)]


def _shortened(part: ScorePart, before: int, rows: int) -> ScorePart:
    """Return so many rows of a part, after those that were taken before."""
    start = min(part.start + before * rows, part.stop - 1)
    return replace(part, start=start, stop=min(start + rows, part.stop))


def likely_ranges(samples: Sequence[SampledEvents], losses: Iterable[float], rows: int) -> tuple[Bracket, ...]:
    """Return ranges of gaps in which the thresholds of a log are likely to lie.

    Args:
        losses: limits on the mean loss, one for each threshold.
    """
    ranges = tuple(near for loss in losses if (near := _range(samples, loss)) is not None)
    inside = sum(len(Collect(ranges)(sample.events.position, sample.events.drop)[0]) for sample in samples)
    kept = inside * rows / max(sum(sample.rows for sample in samples), 1)
    return ranges if kept <= _KEPT else ()


def _range(samples: Sequence[SampledEvents], loss: float) -> Bracket | None:
    """Return twice the range of the samples' own thresholds; None if not all have one above 0.

    The log's is near their mean: outside their range once in 128 logs, outside twice the range hardly ever.
    """
    crossings = [sample.crossing(loss) for sample in samples]
    gaps = [crossing.gap for crossing in crossings if crossing is not None]
    if len(gaps) < len(crossings) or max(gaps, default=0.0) == 0:
        return None
    low, high = min(gaps), max(gaps)
    return Bracket(max(low - (high - low) / 2, 0.0), high + (high - low) / 2, 2)


EVERYTHING: Final = (Bracket(0.0, inf, 2),)


@dataclass(frozen=True, slots=True)
class OwnRanges:
    """The ranges in which the rows of a part expect the thresholds of the log, by themselves.

    Attributes:
        losses: limits on the mean loss, one for each threshold.
        rows: of the log.
    """

    losses: tuple[float, ...]
    rows: int

    def __call__(self, rows: int, events: Events, buckets: Buckets) -> tuple[Bracket, ...]:
        """Return the ranges, given the rows of the part, its events and their buckets; none if too many events lie there."""
        limits = [loss * rows * 10**events.tick_digits for loss in self.losses]
        places = [
            _places(limit, events, buckets) for limit in limits if 0 <= limit < events.total and len(buckets.drop)
        ]
        kept = sum(int(buckets.events[first : last + 1].sum()) for first, last in places)
        if kept * self.rows > _KEPT * rows:
            return ()
        return tuple(Bracket(float(buckets.smallest[a]), float(buckets.largest[b]), 2) for a, b in places)


def _places(limit: float, events: Events, buckets: Buckets) -> tuple[int, int]:
    """Return the first and the last bucket in which the total of some rows may be when that of the log is at its limit.

    The sum of losses has a variance of at most the largest loss times its mean; eight standard deviations are allowed for.
    """
    after = events.total - np.cumsum(buckets.drop)
    slack = 8 * sqrt(events.largest[0] * max(limit, events.largest[0]))
    first, last = np.searchsorted(-after, [-limit - slack, -limit + slack]).tolist()
    return min(first, len(after) - 1), min(last, len(after) - 1)


class NearEvents:
    """The events that were kept, of every part.

    Attributes:
        ranges: of their gaps, or what finds them for each part.
    """

    def __init__(self, ranges: tuple[Bracket, ...] | OwnRanges) -> None:
        """Keep nothing yet."""
        self.ranges = ranges
        self._kept: list[Scanned] = []
        self._known: list[tuple[Bracket, ...]] = [] if isinstance(ranges, OwnRanges) else [ranges]

    def add(self, gap: Floats, drop: Integers, ranges: tuple[Bracket, ...] = ()) -> None:
        """Keep the events of a part, and the ranges of their gaps if it found them itself."""
        self._kept.append((gap, drop))
        if isinstance(self.ranges, OwnRanges):
            self._known.append(ranges)

    def answer(self, work: object) -> Scanned | None:
        """Return what a work that collects events makes of those of all parts; None if it needs others as well."""
        if not isinstance(work, Collect) or not all(map(self._holds, work.brackets)):
            return None
        gap, drop = (np.concatenate(column) for column in zip(*self._kept, strict=True))
        return work(gap, drop)

    def _holds(self, bracket: Bracket) -> bool:
        """Return whether all events of a range were kept, of every part."""
        return all(
            any(kept.low <= bracket.low and bracket.high <= kept.high for kept in ranges) for ranges in self._known
        )
