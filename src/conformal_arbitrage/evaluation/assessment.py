"""assess: the realised loss of a certificate on new rows. swap: whether a new model alone may replace the old one.

Their intervals hold at every number of rows; those of swap at all of them together. Knows nothing of terminals.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any, Literal, Unpack

import numpy as np
from numpy.typing import ArrayLike

from conformal_arbitrage.calibration.certificate import Certificate, Decisions
from conformal_arbitrage.calibration.notebook import html_paragraph, html_table
from conformal_arbitrage.calibration.options import NET, REGRET, CalibrationOptions, resolve_options
from conformal_arbitrage.calibration.promises import Cluster, PerSession
from conformal_arbitrage.core.bounds import Interval, binomial_interval, bounded_interval
from conformal_arbitrage.core.exact import Bools, Floats, Integers, n_rows, numbers_or_none, row_argmax
from conformal_arbitrage.core.risk import Loss, Number, as_fraction, top_actions, within_unit
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.monitoring.limits import NO_LOSS, WHOLE_LOSS, LossSums
from conformal_arbitrage.scorelog.fitness import cluster_sizes, group_rows, has_sessions, refuse_unfit
from conformal_arbitrage.scorelog.log import CostKeywords, CostOptions, ScoreLog, costs_of

Method = Literal["clopper-pearson", "chernoff-hoeffding", "chernoff-hoeffding by cluster"]

_USED = "No verdict: these are the rows that the certificate was made from; assess rows that it has not seen."
_OWN_ROWS = (
    "this is the log that the certificate was made from, so the loss is that which the threshold was fitted to, and the "
    "interval does not hold; use new rows"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAssessment:
    """What a certificate by groups did on the rows of one group; see `Assessment`."""

    rows: int
    loss: float
    interval: Interval
    deferred: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What a certificate's rule did on a log.

    Attributes:
        source: the log.
        rows: number of queries.
        alpha: the risk budget of the certificate.
        loss: mean loss of the decisions.
        interval: a confidence interval for the long-run loss of this certificate, if the rows are independent draws of
            the traffic.
        confidence: of the interval; each end alone holds with probability (1 + confidence) / 2.
        method: "clopper-pearson" if every loss is 0 or the bound, otherwise "chernoff-hoeffding", for clusters by cluster.
        deferred: share of the queries that go to the Guardian.
        cost_per_1000: dollars per 1000 queries, if costs are known.
        clusters: number of clusters, if the certificate is for clusters; they, not the rows, are then the independent
            draws, and the interval is for the loss per query over many new clusters.
        missing_guardian_rows: rows whose loss is unknown; counted as the bound unless everything was in sight.
        verdict: whether the interval lies within the budget, in words; withheld on the certificate's own log.
        problems: why these figures may say nothing about the traffic, in words.
        groups: the same for each group of a certificate by groups; else empty.
    """

    source: str
    rows: int
    alpha: float
    loss: float
    interval: Interval
    confidence: float
    method: Method
    deferred: float
    cost_per_1000: float | None
    missing_guardian_rows: int
    clusters: int | None = None
    verdict: str
    problems: tuple[str, ...]
    groups: Mapping[str, GroupAssessment] = field(default_factory=dict[str, GroupAssessment])

    def to_dict(self) -> dict[str, Any]:
        """Return the assessment as a JSON document."""
        return asdict(self)

    def facts(self) -> list[tuple[str, str]]:
        """Return the findings as name and value pairs, for people."""
        low, high = self.interval
        name = self.method.replace("clopper-pearson", "Clopper-Pearson").replace("chernoff-hoeff", "Chernoff-Hoeff")
        facts = [
            ("rows", f"{self.rows}" if self.clusters is None else f"{self.rows} in {self.clusters} clusters"),
            ("realised loss", f"{self.loss:.4f}, risk budget {self.alpha:g}"),
            (f"{100 * self.confidence:g} % interval", f"{low:.4f} to {high:.4f} ({name})"),
            ("sent to the Guardian", f"{100 * self.deferred:.1f} %"),
        ]
        if self.cost_per_1000 is not None:
            facts.append(("dollars per 1000", f"{self.cost_per_1000:.4g}"))
        for name, group in self.groups.items():
            low, high = group.interval
            where = f"{low:.4f} to {high:.4f}, {100 * group.deferred:.1f} % deferred, {n_rows(group.rows)}"
            facts.append((f"group {name}", f"{group.loss:.4f}, interval {where}"))
        if self.missing_guardian_rows:
            facts.append(("unknown loss", f"{n_rows(self.missing_guardian_rows)}, counted as the worst case"))
        return facts

    def __repr__(self) -> str:
        low, high = self.interval
        return f"Assessment(rows={self.rows}, loss={self.loss:.4f}, interval=({low:.4f}, {high:.4f}), alpha={self.alpha:g})"

    def _repr_html_(self) -> str:
        notes = "".join(html_paragraph(f"Note: {problem}") for problem in self.problems)
        return html_table(self.facts()) + html_paragraph(self.verdict) + notes


def assess(
    certificate: Certificate,
    log: ScoreLog,
    *,
    confidence: float = 0.95,
    loss: Loss | None = None,
    costs: CostOptions | None = None,
    **keywords: Unpack[CostKeywords],
) -> Assessment:
    """Measure the realised loss of a certificate on rows that it was not made from.

    Rows whose loss is unknown (no Guardian score) count as the loss bound unless everything was in sight. The interval
    is that of Clopper and Pearson where every loss is 0 or the bound, otherwise that of Chernoff and Hoeffding, which
    holds for any losses in [0, bound] and, where gains count, in [-bound, bound]. Were some losses graded after all and
    none of them in this log, an upper end by the former would still be valid: it bounds the probability of any loss.
    A certificate for clusters is assessed by clusters: the interval counts them, not their rows.

    Args:
        certificate: the rule, with its key if it has one.
        log: the new rows; binarized here if the certificate says so.
        confidence: of the interval, above 0 and below 1.
        loss: your own loss, if the certificate names one; measured on its monotone envelope.
        costs: what the models cost; or pass the fields of `CostOptions` as keywords. Without either, the log's cost
            columns are used.
        **keywords: the fields of `costs`, one by one.

    Raises:
        ScoreLogError: the log is marked as selected by its scores, or a loss exceeds the certificate's bound.
    """
    if not 0 < confidence < 1:
        raise OptionError(f"confidence must lie above 0 and below 1; got {confidence!r}")
    if (loss is None) != (certificate.loss.name in (REGRET, NET)):
        raise OptionError(f"the loss of this certificate is '{certificate.loss.name}'; pass that function as loss=")
    _refuse_other_rows(certificate, log)
    scores = log.binarized() if certificate.loss.binarized and log.binary is None else log
    decisions = certificate.apply(scores)
    options = _measure(certificate, loss)
    losses = _losses(certificate, decisions, options)
    unknown = options.unknown_loss(scores) & ~(scores.below_floor & decisions.deferred)
    prices = costs_of(scores, resolve_options(costs, CostOptions, keywords, name="costs"))
    sizes = _cluster_sizes(certificate, scores)
    if sizes is None:
        interval, method = _interval(losses, certificate.loss_bound, confidence, signed=certificate.loss.name == NET)
    else:
        interval, method = _interval_by_cluster(certificate, losses, sizes, confidence)
    return Assessment(
        source=log.source,
        rows=len(log),
        alpha=certificate.alpha,
        loss=float(losses.mean()),
        interval=interval,
        confidence=confidence,
        method=method,
        deferred=float(decisions.deferred.mean()),
        cost_per_1000=None if prices is None else decisions.cost_per_1000(prices, certificate.guardian_sees),
        missing_guardian_rows=int(unknown.sum()),
        clusters=None if sizes is None else len(sizes),
        verdict=_USED if _is_its_own_log(certificate, scores) else _verdict(certificate.alpha, interval, confidence),
        problems=tuple(_problems(certificate, scores, unknown)),
        groups={} if certificate.by is None else _by_group(certificate.by, decisions, losses, certificate, confidence),
    )


def _refuse_other_rows(certificate: Certificate, log: ScoreLog) -> None:
    """Refuse rows that were selected by their scores, or are another unit than the certificate's."""
    refuse_unfit(log.source, log.extra)
    if has_sessions(log) != isinstance(certificate.promise, PerSession):
        raise OptionError(
            "a certificate for sessions is assessed on rows of sessions, and any other on rows of queries"
        )


def _cluster_sizes(certificate: Certificate, log: ScoreLog) -> Integers | None:
    """Return the number of rows of each cluster; None if the certificate is for single rows.

    Raises:
        ScoreLogError: a cluster is larger than the certificate allows.
    """
    promise = certificate.promise
    if not isinstance(promise, Cluster):
        return None
    sizes = cluster_sizes(log, promise.cluster)
    if sizes.max() > promise.max_cluster_size:
        raise ScoreLogError(
            f"{log.source}: a cluster of column '{promise.cluster}' has {sizes.max()} rows, more than the "
            f"{promise.max_cluster_size} that the certificate allows, so its guarantee is void; calibrate again"
        )
    return sizes


def _interval_by_cluster(
    certificate: Certificate, losses: Floats, sizes: Integers, confidence: float
) -> tuple[Interval, Method]:
    largest = certificate.promise.max_cluster_size if isinstance(certificate.promise, Cluster) else 1
    bound, share = certificate.loss_bound, float(sizes.mean()) / largest
    low, high = bounded_interval(min(float(losses.mean()) / bound, 1.0), len(sizes), confidence, share=share)
    return (bound * low, bound * high), "chernoff-hoeffding by cluster"


def _by_group(
    by: str, decisions: Decisions, losses: Floats, certificate: Certificate, confidence: float
) -> dict[str, GroupAssessment]:
    groups: dict[str, GroupAssessment] = {}
    for name, rows in group_rows(decisions.log, by).items():
        group_losses = losses[rows]
        interval, _ = _interval(group_losses, certificate.loss_bound, confidence, signed=False)
        deferred = float(decisions.deferred[rows].mean())
        groups[name] = GroupAssessment(
            rows=len(rows), loss=float(group_losses.mean()), interval=interval, deferred=deferred
        )
    return groups


def _measure(certificate: Certificate, loss: Loss | None) -> CalibrationOptions:
    """Return how losses are measured: by what a deferral really shows."""
    return CalibrationOptions(
        guardian_sees="candidates" if certificate.guardian_sees == "candidates" else "all",
        loss_bound=certificate.loss_bound,
        loss=NET if certificate.loss.name == NET else loss,
        missing_guardian="worst_case",
    )


def _losses(certificate: Certificate, decisions: Decisions, options: CalibrationOptions) -> Floats:
    """Return the loss of every decision."""
    log = replace(decisions.log, score_digits=certificate.evidence.score_digits)
    recorded, last = options.losses(log), decisions.candidate_counts() - 1
    losses = np.empty(len(log))
    for piece in recorded.blocks:
        level = np.take_along_axis(piece.levels, piece.block.per_row(last)[None, :], axis=0)[0]
        losses[piece.block.rows] = level / 10.0**recorded.tick_digits
    worst = int(losses.argmax())
    if losses[worst] > certificate.loss_bound + 10.0**-recorded.tick_digits:
        raise ScoreLogError(
            f"{log.source}: row {worst + 1}: a loss of {losses[worst]:g} exceeds the certificate's bound "
            f"{certificate.loss_bound:g}, so its guarantee is void; calibrate again with a larger bound"
        )
    return losses


def _interval(losses: Floats, bound: float, confidence: float, *, signed: bool) -> tuple[Interval, Method]:
    if signed:
        low, high = bounded_interval((float(losses.mean()) / bound + 1) / 2, len(losses), confidence)
        return (bound * (2 * low - 1), bound * (2 * high - 1)), "chernoff-hoeffding"
    whole = losses == bound
    if (whole | (losses == 0)).all():
        low, high = binomial_interval(int(whole.sum()), len(losses), confidence)
        return (bound * low, bound * high), "clopper-pearson"
    low, high = bounded_interval(min(float(losses.mean()) / bound, 1.0), len(losses), confidence)
    return (bound * low, bound * high), "chernoff-hoeffding"


def without_verdict(assessment: Assessment) -> Assessment:
    """Return an assessment whose rows turn out to be those that the certificate was made from: without a verdict."""
    return replace(assessment, verdict=_USED, problems=(_OWN_ROWS, *assessment.problems))


def _is_its_own_log(certificate: Certificate, log: ScoreLog) -> bool:
    return log.sha256() == certificate.evidence.log_sha256


def _verdict(alpha: float, interval: Interval, confidence: float) -> str:
    low, high = interval
    sure = f"with {100 * (1 + confidence) / 2:g} % confidence"
    if high <= alpha:
        return f"Within the budget: the long-run loss of this certificate is at most {high:.4g}, {sure}."
    if low > alpha:
        return f"Above the budget: the long-run loss of this certificate is at least {low:.4g}, {sure}."
    return f"Not decided by these rows: the interval holds the risk budget {alpha:g}; assess more rows."


def _problems(certificate: Certificate, log: ScoreLog, unknown: Bools) -> list[str]:
    problems: list[str] = []
    if _is_its_own_log(certificate, log):
        problems.append(_OWN_ROWS)
    if isinstance(certificate.identities, dict) and _other_models(certificate.identities, log):
        problems.append("the log was not made by the models this certificate was made with")
    if certificate.loss_bound == 1 and certificate.loss.name in (REGRET, NET):
        worth = log.outcome("correct") if certificate.loss.name == NET else log.loss_scores
        if not within_unit(worth):
            problems.append(
                "scores of this log leave [0, 1]: the interval holds only if no loss can exceed the certificate's bound 1"
            )
    if unknown.any():
        problems.append(
            f"{n_rows(int(unknown.sum()), 'has', 'have')} an unknown loss, counted as {certificate.loss_bound:g} unless "
            "everything was in sight; ask the Guardian again for a sharper figure"
        )
    return problems


def _other_models(identities: dict[str, Any], log: ScoreLog) -> bool:
    known = log.identities or {}
    pairs = zip(("primary", "guardian"), log.columns, strict=True)
    return any(known.get(column) != identities.get(role) for role, column in pairs)


# --- Is the new model good enough? ---


SwapVerdict = Literal["switch", "keep", "not yet"]
SwapLoss = Literal["net", "regret"]
_MOST_ROWS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Whether a new model may replace an old one: the loss of always taking the new one's answer.

    Attributes:
        source: where the grades come from.
        rows: number of questions.
        ungraded: questions without a grade of one of the models; counted as the worst case for either verdict.
        alpha: the most that the replacement may lose.
        loss: "net" is the old model's grade minus the new one's, gains counted; "regret" is that or 0.
        loss_bound: the largest possible loss.
        grades: mean grade of the old and the new model, over the graded questions.
        worse: graded questions in which the new model is worse.
        better: graded questions in which it is better.
        mean: mean loss of the graded questions.
        interval: of the loss; each end alone holds with probability `confidence`, at every number of rows at once.
        confidence: of either verdict.
        verdict: "switch" if the loss is at most alpha, "keep" if it is more, "not yet" if these rows do not tell.
        more_rows: how many more rows like these would decide; None after a verdict, or if none would.
    """

    source: str
    rows: int
    ungraded: int
    alpha: float
    loss: SwapLoss
    loss_bound: float
    grades: tuple[float, float]
    worse: int
    better: int
    mean: float
    interval: Interval
    confidence: float
    verdict: SwapVerdict
    more_rows: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as a JSON document, with the sentences."""
        return {**asdict(self), "answer": self.answer, "promise": self.promise}

    @property
    def answer(self) -> str:
        """The verdict in words."""
        low, high = self.interval
        what = "the new model loses"
        if self.verdict == "switch":
            return f"Switch: {what} at most {high:.4g}, within alpha {self.alpha:g}."
        if self.verdict == "keep":
            return f"Keep the old model: {what} at least {low:.4g}, more than alpha {self.alpha:g}."
        if self.more_rows is None:
            more = "More rows like these would not: the loss is too near alpha, or too few of them are graded."
        else:
            more = f"About {self.more_rows} more rows like these would decide."
        return f"Not yet: {what} between {low:.4g} and {high:.4g}, and alpha is {self.alpha:g}. {more}"

    @property
    def promise(self) -> str:
        """What the confidence means."""
        wrong = 100 * (1 - self.confidence)
        return (
            f'If the questions are independent draws of your traffic, a wrong "switch" has a probability of at most '
            f'{wrong:.4g} %, and so has a wrong "keep", whenever and however often you look, and whatever alpha. Each '
            "further model that you try has that probability of its own."
        )

    def facts(self) -> list[tuple[str, str]]:
        """Return the findings as name and value pairs, for people."""
        low, high = self.interval
        counted = f"{self.rows}, {self.ungraded} of them ungraded: the worst case for either verdict"
        old, new = self.grades
        gains = "counted" if self.loss == "net" else "not counted"
        return [
            ("questions", counted if self.ungraded else f"{self.rows}"),
            ("mean grade", f"old {old:.4f}, new {new:.4f}"),
            ("new model", f"worse on {self.worse}, better on {self.better}"),
            ("loss", f"{self.mean:.4f} (gains {gains}), alpha {self.alpha:g}"),
            ("limits", f"{low:.4f} to {high:.4f}, each with {100 * self.confidence:g} % confidence at every number of rows"),
        ]  # fmt: skip

    def __repr__(self) -> str:
        low, high = self.interval
        return (
            f"Swap(verdict={self.verdict!r}, rows={self.rows}, interval=({low:.4f}, {high:.4f}), alpha={self.alpha:g})"
        )

    def _repr_html_(self) -> str:
        return html_table(self.facts()) + html_paragraph(self.answer) + html_paragraph(self.promise)


def swap(
    old: ArrayLike,
    new: ArrayLike,
    *,
    alpha: Number,
    confidence: Number = 0.95,
    loss: SwapLoss = "net",
    loss_bound: Number | None = None,
    source: str = "the grades",
) -> Swap:
    """Say whether replacing one model by another loses at most alpha, from grades of both on the same questions.

    The limits are those of the monitor: they hold at every number of rows at once. Look as often as you like.
    An ungraded question counts as the largest loss for "switch", and as the smallest for "keep".

    Args:
        old: a grade per question; NaN or None where there is none.
        new: the same for the model that is to replace it.
        alpha: the most that the replacement may lose, per question on average; with gains counted it may be 0 or less.
        confidence: of either verdict.
        loss: "net" counts gains: the difference of the mean grades; "regret" does not.
        loss_bound: the largest possible difference of two grades, from what they mean; needed if grades leave [0, 1].
        source: where the grades come from, for messages.

    Raises:
        ScoreLogError: there are no grades, or two differ by more than the bound.
    """
    bound = float(as_fraction(1 if loss_bound is None else loss_bound, name="loss_bound"))
    least = -1.0 if loss == "net" else 0.0
    risk, sure = float(as_fraction(alpha, name="alpha")), as_fraction(confidence, name="confidence")
    if not 0 < sure < 1:
        raise OptionError(f"confidence must lie above 0 and below 1; got {confidence!r}")
    if loss not in ("net", "regret") or not 0 < bound < inf or not least * bound < risk < bound:
        raise OptionError(
            f"alpha must lie above {least * bound:g} and below the largest loss {bound:g}, with loss 'net' or 'regret'; "
            f"got {risk:g} with {loss!r}"
        )
    ours, theirs = _paired_columns(old, new, None if loss_bound is None else bound, source)
    known = ~np.isnan(ours - theirs)
    differences = (ours - theirs)[known]
    losses = (differences if loss == "net" else np.maximum(differences, 0.0)) / bound
    sums = LossSums.of(np.clip((losses - least) / (1 - least), 0.0, 1.0))
    unknown, side, line = int((~known).sum()), float(1 - sure), (risk / bound - least) / (1 - least)
    best, worst = sums.plus(NO_LOSS, unknown), sums.plus(WHOLE_LOSS, unknown)
    low, high = (bound * (least + (1 - least) * at) for at in (best.limits(side)[0], worst.limits(side)[1]))
    return Swap(
        source=source,
        rows=len(known),
        ungraded=unknown,
        alpha=risk,
        loss=loss,
        loss_bound=bound,
        grades=(float(ours[known].mean()), float(theirs[known].mean())),
        worse=int((differences > 0).sum()),
        better=int((differences < 0).sum()),
        mean=bound * float(losses.mean()),
        interval=(low, high),
        confidence=float(sure),
        verdict=_swap_verdict(best, worst, line, side),
        more_rows=_more_rows(best, worst, line, side),
    )


def _refuse_outside(grades: Floats, source: str) -> None:
    """Refuse grades that leave [0, 1]: the largest one can lose is a matter of their scale, not of those in sight."""
    outside = grades[(grades < 0) | (grades > 1)]
    if outside.size:
        raise OptionError(
            f"{source}: grades leave [0, 1], such as {outside[0]:g}, so the largest possible loss is not 1; state it from "
            "what the grades mean, such as 4 for a scale from 1 to 5: loss_bound= (--loss-bound); or rescale them"
        )


def _paired_columns(old: ArrayLike, new: ArrayLike, stated: float | None, source: str) -> tuple[Floats, Floats]:
    """Return the grades of both models; refuse other numbers of questions, and grades or differences beyond the bound."""
    ours, theirs = (_grade_column(column, name, source) for column, name in ((old, "old"), (new, "new")))
    if stated is None:
        _refuse_outside(np.concatenate((ours, theirs)), source)
    if len(ours) != len(theirs):
        raise ScoreLogError(
            f"{source}: {len(ours)} grades of the old model and {len(theirs)} of the new; give both of each question"
        )
    distances = np.abs(ours - theirs)
    if np.isnan(distances).all():
        raise ScoreLogError(f"{source}: no question has grades of both models; grade their answers first")
    largest, bound = float(np.nanmax(distances)), stated or 1.0
    if largest > bound * (1 + 1e-9):
        raise ScoreLogError(
            f"{source}: two grades differ by {largest:g}, more than the bound {bound:g}; state the largest possible "
            "difference, from what the grades mean: loss_bound= (--loss-bound)"
        )
    return ours, theirs


def _grade_column(values: ArrayLike, name: str, source: str) -> Floats:
    raw = np.asarray(values)
    column = raw.astype(np.float64) if raw.dtype.kind == "b" else numbers_or_none(values)
    if column is None or column.ndim != 1 or np.isinf(column).any():
        raise ScoreLogError(
            f"{source}: the grades of the {name} model must be a flat list of numbers; got {values!r:.80}"
        )
    return column.astype(np.float64)


def _swap_verdict(best: LossSums, worst: LossSums, line: float, side: float) -> SwapVerdict:
    """Return which side of a line the loss lies on, with unknown losses at their smallest and at their largest."""
    return "switch" if worst.below(line, side) else "keep" if best.above(line, side) else "not yet"


def _more_rows(best: LossSums, worst: LossSums, line: float, side: float) -> int | None:
    """Return how many more rows, in the proportions of those so far, give a verdict; None if none do, or there is one.

    The log of each bet's wealth grows in proportion to the rows, so the mean wealth is convex in them and 1 at none: a
    verdict, once reached, stays.
    """
    rows = best.count

    def decides(total: int) -> bool:
        low, high = (LossSums(total, tuple(log * total // rows for log in sums.logs)) for sums in (best, worst))
        return _swap_verdict(low, high, line, side) != "not yet"

    few, many = rows, rows
    while not decides(many):
        few, many = many, 2 * many
        if many > _MOST_ROWS:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if decides(middle) else (middle, many)
    return many - rows or None


def model_grades(log: ScoreLog, loss: SwapLoss) -> tuple[Floats, Floats]:
    """Return a grade per row of what the Guardian alone, the old model, and the Primary alone, the new one, would choose.

    It is the outcome `correct` of their choices; on menus without gains counted, as in a calibration, the Guardian's scores.
    Where the Primary has no opinion on a menu, it has no grade.

    Raises:
        ScoreLogError: gains count, and the log has no outcome `correct`.
    """
    graded = loss == "net" or (log.is_router and "correct" in log.outcome_names)
    worth = log.outcome("correct") if graded else log.loss_scores
    if log.is_router:  # the second answer is the Primary's, with or without a confidence
        return worth[::2], worth[1::2]
    starts = log.offsets[:-1]
    old, new = worth[starts + row_argmax(log.guardian, log.offsets)], worth[starts + top_actions(log)]
    return np.where(log.missing, np.nan, old), np.where(log.no_opinion, np.nan, new)
