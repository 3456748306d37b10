"""What the gateway counts, for Prometheus; one registry per application, no globals.

Knows nothing of what happens with the figures.
"""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from conformal_arbitrage.types import Decision, Leg

_FAST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SLOW = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters and histograms of one gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._children: dict[tuple[Any, tuple[str, ...]], Any] = {}
        self.requests = self._counter("requests", "Requests by route and status", "route", "status")
        self.decisions = self._counter("decisions", "Decisions by policy and who decided", "policy", "decided_by")
        self.deferred = self._counter("deferred", "Decisions that went to the Guardian", "policy")
        self.cost = self._counter("cost_dollars", "Known cost of calls", "policy", "role")
        self.tokens = self._counter("tokens", "Tokens", "policy", "role", "direction")
        self.upstream_errors = self._counter("upstream_errors", "Legs that failed, by error", "policy", "role", "error")
        self.audits = self._counter("audits_queued", "Audits drawn", "policy")
        self.replays = self._counter("replays", "Requests answered from an earlier one with the same key")
        self.upstream = self._histogram("upstream_seconds", "Time of a leg", _SLOW, "role")
        self.commit = self._histogram("commit_seconds", "Time until a decision was durable", _FAST)
        self.overhead = self._histogram("overhead_seconds", "Time of a request not spent in legs", _FAST)
        self.in_flight = Gauge("arbitrage_in_flight", "Requests under way", registry=self.registry)
        self.resting = Gauge(
            "arbitrage_upstream_resting", "1 while calls are spared", ["upstream"], registry=self.registry
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"arbitrage_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"arbitrage_{name}", text, labels, buckets=buckets, registry=self.registry)

    def child(self, metric: Any, *labels: str) -> Any:
        """A metric with its labels, looked up once: `labels` takes longer than counting."""
        found = self._children.get((metric, labels))
        if found is None:
            found = self._children[metric, labels] = metric.labels(*labels)
        return found

    def decided(self, policy: str, decision: Decision, *, audited: bool) -> None:
        """Count one decision, its legs, and the audit it was drawn for."""
        if audited:
            self.child(self.audits, policy).inc()
        self.child(self.decisions, policy, decision.decided_by).inc()
        if decision.deferred:
            self.child(self.deferred, policy).inc()
        for leg in decision.legs:
            self.leg(policy, leg)

    def leg(self, policy: str, leg: Leg) -> None:
        """Count what one model took, and whether it failed."""
        self.child(self.upstream, leg.role).observe(leg.seconds)
        self.child(self.cost, policy, leg.role).inc(leg.spent.cost or 0.0)
        self.child(self.tokens, policy, leg.role, "input").inc(leg.spent.input_tokens or 0)
        self.child(self.tokens, policy, leg.role, "output").inc(leg.spent.output_tokens or 0)
        if leg.error is not None:
            self.child(self.upstream_errors, policy, leg.role, leg.error.partition(":")[0]).inc()

    def text(self) -> bytes:
        """All figures in Prometheus' own format."""
        return generate_latest(self.registry)
