"""assess: the realised loss of a certificate on new rows, with an interval that holds at every number of rows.

Describes one certificate on one log; changes neither. Knows nothing of terminals.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Unpack

import numpy as np

from conformal_arbitrage.calibration.certificate import Certificate, Decisions
from conformal_arbitrage.calibration.notebook import html_paragraph, html_table
from conformal_arbitrage.calibration.options import NET, REGRET, CalibrationOptions, resolve_options
from conformal_arbitrage.calibration.promises import Cluster, PerSession
from conformal_arbitrage.core.bounds import Interval, binomial_interval, bounded_interval
from conformal_arbitrage.core.exact import Bools, Floats, Integers, n_rows
from conformal_arbitrage.core.risk import Loss
from conformal_arbitrage.errors import OptionError, ScoreLogError
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
    """What a certificate by groups did on the rows of one group.

    Attributes:
        rows: number of queries.
        loss: mean loss of the decisions.
        interval: as in `Assessment`, for this group alone.
        deferred: share of the queries that go to the Guardian.
    """

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
        boundary="random" if certificate.loss.name == NET else "include",
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
