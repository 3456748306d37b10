"""What the gateway counts, for Prometheus; one registry per application, no globals."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

from conformal_arbitrage.gateway.audience import Caller
from conformal_arbitrage.gateway.decider import Outcome
from conformal_arbitrage.live.service import Age, LedgerWatch, ServedFigure, as_evidence
from conformal_arbitrage.monitoring.monitor import SEVERITY, Standing
from conformal_arbitrage.store.outbox import OutboxBacklog
from conformal_arbitrage.store.reviews import TeamBacklog
from conformal_arbitrage.types import Leg, Role

if TYPE_CHECKING:
    from conformal_arbitrage.gateway.policies import LivePolicy


_log = logging.getLogger("conformal_arbitrage.gateway")
_FAST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SLOW = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LossGauges:
    """What is shown of a ledger, by the labels that name it; losses are shares of the loss bound."""

    evidence: Gauge
    line: Gauge
    mean: Gauge
    lower: Gauge
    upper: Gauge
    served: Gauge
    rows: Gauge

    def clear(self) -> None:
        """Forget all ledgers."""
        for gauge in (self.evidence, self.line, self.mean, self.lower, self.upper, self.served, self.rows):
            gauge.clear()

    def stand(self, labels: tuple[str, ...], standing: Standing, served: ServedFigure | None) -> None:
        """Set where a ledger stands."""
        figures = standing.figures
        lines = (figures.lines.alpha, figures.lines.red)
        for name, line, log in zip(("alpha", "red"), lines, figures.log_evidence, strict=True):
            if line is not None and log is not None:
                self.line.labels(*labels, name).set(line)
                self.evidence.labels(*labels, name).set(as_evidence(log))
        for name in ("known", "pending", "missing", "collapsed"):
            self.rows.labels(*labels, name).set(getattr(figures, name))
        self.lower.labels(*labels).set(standing.limits[0])
        self.upper.labels(*labels).set(standing.limits[1])
        mean = standing.mean if served is None else served.mean
        for gauge, value in ((self.mean, standing.mean), (self.served, mean)):
            if value is not None:
                gauge.labels(*labels).set(value)


class Metrics:
    """Counters and histograms of one gateway.

    Attributes:
        other_models: by policy and role, what an endpoint said that answers as another model than the pinned one; until
            the pinned one answers again.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._children: dict[tuple[Any, tuple[str, ...]], Any] = {}
        self._legs: dict[tuple[str, Role], tuple[Callable[[float], None], ...]] = {}
        self.requests = self._counter("requests", "Requests by route and status", "route", "status")
        self.decisions = self._counter("decisions", "Decisions by policy and who decided", "policy", "decided_by")
        self.deferred = self._counter("deferred", "Decisions that went to the Guardian", "policy")
        self.cost = self._counter("cost_dollars", "Known cost of calls", "policy", "role")
        self.tokens = self._counter("tokens", "Tokens", "policy", "role", "direction")
        self.upstream_errors = self._counter("upstream_errors", "Legs that failed, by error", "policy", "role", "error")
        self.audits = self._counter("audits_queued", "Decisions drawn for an audit", "policy")
        self.audit_attempts = self._counter(
            "audit_attempts", "Attempts at audits by how they ended", "policy", "outcome"
        )
        self.webhooks = self._counter(
            "webhook_attempts", "Attempts at messages to webhooks by how they ended", "webhook", "outcome"
        )
        self.webhooks_waiting = self._gauge(
            "webhooks_waiting", "Messages to a webhook that are not delivered", "webhook"
        )
        self.oldest_webhook = self._gauge("oldest_webhook_seconds", "Age of the oldest such message", "webhook")
        self.replays = self._counter("replays", "Requests answered with the saved response of their idempotency key")
        self.upstream = self._histogram("upstream_seconds", "Time of a leg", _SLOW, "role")
        self.commit = self._histogram("commit_seconds", "Time until a decision was durable", _FAST)
        self.overhead = self._histogram("overhead_seconds", "Time of a request not spent in legs", _FAST)
        self.lines_dropped = self._counter(
            "log_lines_dropped", "Lines of the log that were lost because nobody reads it"
        )
        self.background_failures = self._counter("background_failures", "Failures of background work", "work")
        self.connections = self._gauge("connections", "Open connections")
        self.connections_closed = self._counter(
            "connections_closed", "Connections that were refused, or closed on a caller, by reason", "reason"
        )
        self.in_flight = self._gauge("in_flight", "Requests in flight")
        self.other_models: dict[tuple[str, Role], str] = {}
        self.guardian_resting = self._gauge("guardian_resting", "1 while the Guardian is not called", "policy")
        self.audits_waiting = self._gauge("audits_waiting", "Audits that are not done yet", "policy")
        self.oldest_audit = self._gauge("oldest_audit_seconds", "Age of the oldest waiting audit", "policy")
        self.resting = self._gauge("upstream_resting", "1 while the circuit breaker is open", "upstream")

        self.version = self._gauge("policy_version", "The version of a policy in force at this gateway", "policy")
        self.newest = self._gauge("policy_newest_version", "Its newest version; above that if for others", "policy")
        self.reviews_open = self._gauge("reviews_open", "Questions that wait for people", "team")
        self.reviewers_present = self._gauge("reviewers_present", "People of a team seen in two minutes", "team")
        self.review_votes = self._gauge("review_votes_last_hour", "Votes of a team in the last hour", "team")
        self.oldest_review = self._gauge("oldest_review_seconds", "Age of the oldest question of a caller", "team")
        self._watch_losses()

    def review_backlogs(self, backlogs: Iterable[TeamBacklog]) -> None:
        """Set what teams of people have before them; nobody is named."""
        for backlog in backlogs:
            self.reviews_open.labels(backlog.team).set(backlog.open)
            self.reviewers_present.labels(backlog.team).set(len(backlog.present))
            self.review_votes.labels(backlog.team).set(backlog.votes_last_hour)
            self.oldest_review.labels(backlog.team).set(backlog.oldest or 0.0)

    def _watch_losses(self) -> None:
        """Set up the figures of monitors: losses are shares of the loss bound."""
        self.safe_mode = self._gauge("safe_mode", "1 while an alarm stands and the Guardian decides", "policy")
        self.state = self._gauge(
            "state", "1 for the state a policy's monitor is in, of groups the worst", "policy", "state"
        )
        self._ledgers = {grouped: self._loss_gauges(grouped=grouped) for grouped in (False, True)}
        self.group_state = self._gauge("group_state", "1 for the state of a group's ledger", "policy", "group", "state")
        self.installed = self._gauge("certificate_installed_seconds", "When it was, in seconds since 1970", "policy")
        self.known_lately = self._gauge("audits_known_lately", "Audits known in the last 30 days", "policy")
        self.stale = self._gauge("certificate_stale", "1 if these are too few to show a doubled loss", "policy")
        self.guard_share = self._gauge("guard_share", "Share of calibration rows that the guard would defer", "policy")

    def _loss_gauges(self, *, grouped: bool) -> "_LossGauges":
        """Return the gauges of ledgers: of policies, or with the name of a group."""
        prefix, labels = ("group_", ("policy", "group")) if grouped else ("", ("policy",))

        def gauge(name: str, text: str, *more: str) -> Gauge:
            return self._gauge(f"{prefix}{name}", text, *labels, *more)

        return _LossGauges(
            evidence=gauge("evidence", "Evidence that the loss is above a line", "line"),
            line=gauge("loss_line", "The lines that the loss is watched against", "line"),
            mean=gauge("loss_mean", "Mean loss of the audits whose loss is known"),
            lower=gauge("loss_lower", "Lower 97.5 % limit of the running mean loss"),
            upper=gauge("loss_upper", "Upper 97.5 % limit of the running mean loss"),
            served=gauge("served_loss_mean", "Mean loss of delivered answers, fallbacks included"),
            rows=gauge("audits", "Audited decisions by what is known of their loss", "state"),
        )

    def standings(self, standings: Mapping[str, Mapping[str, tuple[Standing, LedgerWatch]]]) -> None:
        """Set where every policy stands, and each of its groups if it has any."""
        for gauge in (self.state, self.group_state, self.guard_share):
            gauge.clear()
        for gauges in self._ledgers.values():
            gauges.clear()
        for policy, ledgers in standings.items():
            states = {standing.state for standing, _ in ledgers.values()}
            worst = min(states, key=SEVERITY.index)
            for state in SEVERITY:
                self.state.labels(policy, state).set(state == worst)
            for group, (standing, watch) in ledgers.items():
                self._stand(policy, group, standing, watch)

    def _stand(self, policy: str, group: str, standing: Standing, watch: LedgerWatch) -> None:
        if group:
            for state in SEVERITY:
                self.group_state.labels(policy, group, state).set(state == standing.state)
        self._ledgers[bool(group)].stand((policy, group) if group else (policy,), standing, watch.served)
        if watch.guard is not None:
            self.guard_share.labels(policy).set(watch.guard.standing().share)

    def versions(self, policies: Iterable["LivePolicy"], behind: Mapping[str, int]) -> None:
        """Set which versions are in force, and which are the newest."""
        for gauge in (self.version, self.newest):
            gauge.clear()
        for policy in policies:
            self.version.labels(policy.name).set(policy.version)
            self.newest.labels(policy.name).set(behind.get(policy.name, policy.version))

    def ages(self, ages: Mapping[str, Age]) -> None:
        """Set how old the certificates are, and the evidence on them."""
        for gauge in (self.installed, self.known_lately, self.stale):
            gauge.clear()
        for policy, age in ages.items():
            self.installed.labels(policy).set(age.installed)
            self.known_lately.labels(policy).set(age.known_lately)
            self.stale.labels(policy).set(age.stale is not None)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"arbitrage_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"arbitrage_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"arbitrage_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _child(self, metric: Any, *labels: str) -> Any:
        """Return a metric with its labels, looked up once: `labels` takes longer than counting."""
        child = self._children.get((metric, labels))
        if child is None:
            child = self._children[metric, labels] = metric.labels(*labels)
        return child

    def request(self, route: str, status: int) -> None:
        """Count a request that was answered."""
        self._child(self.requests, route, str(status)).inc()

    def decided(self, policy: str, outcomes: Sequence[Outcome], seconds: float | None = None) -> None:
        """Count recorded decisions, their legs, and the audits they were drawn for.

        Args:
            outcomes: of one request.
            seconds: how long it took; what was not spent in legs is overhead.
        """
        for outcome in outcomes:
            decision = outcome.decision
            if outcome.audit is not None:
                self._child(self.audits, policy).inc()
            self._child(self.decisions, policy, decision.decided_by).inc()
            if decision.decided_by != "primary":
                self._child(self.deferred, policy).inc()
            for leg in decision.legs[outcome.known_legs :]:
                self.leg(policy, leg)
        if seconds is not None:
            longest = max(sum(leg.seconds for leg in outcome.decision.legs) for outcome in outcomes)
            self.overhead.observe(max(0.0, seconds - longest))

    def undelivered(self, policy: str, outcomes: Iterable[Outcome], finish: str) -> None:
        """Count decisions of which nothing was delivered, under how their attempt ended, and their legs."""
        for outcome in outcomes:
            self._child(self.decisions, policy, finish).inc()
            for leg in outcome.decision.legs[outcome.known_legs :]:
                self.leg(policy, leg)

    def leg(self, policy: str, leg: Leg) -> None:
        """Count one model's time, tokens and cost, and whether it failed."""
        counts = self._legs.get((policy, leg.role))
        if counts is None:
            counts = self._legs[policy, leg.role] = self._leg_counts(policy, leg.role)
        observe, add_cost, add_input, add_output = counts
        spent = leg.spent
        observe(leg.seconds)
        add_cost(spent.cost or 0.0)
        add_input(spent.input_tokens or 0)
        add_output(spent.output_tokens or 0)
        failure = leg.error
        if failure is None:
            if self.other_models:
                self.other_models.pop((policy, leg.role), None)
            return
        self._child(self.upstream_errors, policy, leg.role, failure.kind).inc()
        if failure.kind == "OtherModelError" and self.other_models.get((policy, leg.role)) != failure.message:
            self.other_models[policy, leg.role] = failure.message
            _log.error("%s: %s", leg.role, failure.message, extra={"policy": policy})

    def _leg_counts(self, policy: str, role: Role) -> tuple[Callable[[float], None], ...]:
        """Return what counts the seconds, cost and tokens of a model; every decision asks for it."""
        tokens = [self.tokens.labels(policy, role, direction).inc for direction in ("input", "output")]
        return self.upstream.labels(role).observe, self.cost.labels(policy, role).inc, *tokens

    def audited(self, policy: str, outcome: str) -> None:
        """Count an attempt at an audit."""
        self._child(self.audit_attempts, policy, outcome).inc()

    def webhook(self, name: str, outcome: str, count: int = 1) -> None:
        """Count attempts at messages to a webhook."""
        self._child(self.webhooks, name, outcome).inc(count)

    def webhook_backlog(self, webhooks: Iterable[str], backlogs: Iterable[OutboxBacklog]) -> None:
        """Set how many messages wait, for these webhooks and for those that were removed."""
        _set_backlog(self.webhooks_waiting, self.oldest_webhook, webhooks, backlogs)

    def backlog(self, policies: Iterable[str], backlogs: Iterable[OutboxBacklog]) -> None:
        """Set how many audits wait, of these policies and of those that were removed."""
        _set_backlog(self.audits_waiting, self.oldest_audit, policies, backlogs)

    def text(self, caller: Caller) -> bytes:
        """Return the metrics that a caller may see in Prometheus' text format."""
        return generate_latest(self.registry if caller.policies is None else _Bound(self.registry, caller))


def _set_backlog(waiting: Gauge, oldest: Gauge, names: Iterable[str], backlogs: Iterable[OutboxBacklog]) -> None:
    for gauge in (waiting, oldest):
        gauge.clear()
        for name in names:
            gauge.labels(name).set(0)
    for backlog in backlogs:
        waiting.labels(backlog.name).set(backlog.waiting)
        oldest.labels(backlog.name).set(backlog.oldest)


class _Bound(Collector):
    """What a registry has of the policies that a caller's key is bound to: no figure that counts others as well."""

    def __init__(self, registry: CollectorRegistry, caller: Caller) -> None:
        self._registry = registry
        self._caller = caller

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with the label of such a policy."""
        for metric in self._registry.collect():
            policies = [(sample, sample.labels.get("policy")) for sample in metric.samples]
            metric.samples = [sample for sample, policy in policies if policy is not None and self._caller.sees(policy)]
            if metric.samples:
                yield metric
