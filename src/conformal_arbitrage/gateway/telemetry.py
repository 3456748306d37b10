"""OpenTelemetry: spans and measurements of requests and of calls to models, exported by OTLP over HTTP.

Exporters, sampling and the service's name are set by the standard variables (OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and so on). Without `otel = true` nothing here is imported.
"""

import asyncio
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from conformal_arbitrage.gateway.http import DECISION_ID, Exchange
from conformal_arbitrage.models.port import Port
from conformal_arbitrage.models.tracing import Instruments, Traced

_NAME = "conformal_arbitrage"
_AT_THE_END = 5.0  # seconds for what was not exported when the process ends
_DECIDED_BY = "x-arbitrage-decided-by"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_CONTEXT = (b"traceparent", b"tracestate")
_context = TraceContextTextMapPropagator()


class Telemetry:
    """The telemetry of one gateway; exporting happens in threads of its own and never blocks a request."""

    def __init__(self) -> None:
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "conformal-arbitrage"}
        resource = Resource.create(named)
        self._spans = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        self._figures = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._tracer, meter = self._spans.get_tracer(_NAME), self._figures.get_meter(_NAME)
        self._instruments = Instruments(self._tracer, meter)
        self._duration = meter.create_histogram(
            "http.server.request.duration", "s", "Time of a request", explicit_bucket_boundaries_advisory=_SECONDS
        )

    def port(self, port: Port, role: str) -> Port:
        """Return a port whose calls are recorded."""
        return Traced(port, role, self._instruments)

    @contextmanager
    def request(self, scope: Scope, path: str, exchange: Exchange) -> Generator[None]:
        """Record a request of a route while it is served."""
        sent = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _CONTEXT}
        labels = {"http.request.method": scope["method"], "http.route": path, "url.scheme": scope["scheme"]}
        start = time.perf_counter()
        with self._tracer.start_as_current_span(
            f"{scope['method']} {path}", _context.extract(sent), SpanKind.SERVER, labels,
            record_exception=False, set_status_on_exception=True,
        ) as span:  # fmt: skip
            try:
                yield
            finally:
                labels["http.response.status_code"] = _describe(span, exchange)
                self._duration.record(time.perf_counter() - start, labels)

    async def close(self) -> None:
        """Export what is left, for a moment: a collector that does not answer does not hold up the end."""
        ending = threading.Thread(target=self._shut_down, name="telemetry", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, _AT_THE_END)

    def _shut_down(self) -> None:
        self._spans.shutdown()
        self._figures.shutdown()


def _describe(span: Span, exchange: Exchange) -> int:
    """Note what was answered; return its status."""
    reply = exchange.reply
    span.set_attribute("http.response.status_code", reply.status_code)
    named = {
        "arbitrage.policy": exchange.policy,
        "arbitrage.decision_id": reply.headers.get(DECISION_ID),
        "arbitrage.decided_by": reply.headers.get(_DECIDED_BY),
    }
    span.set_attributes({name: value for name, value in named.items() if value})
    if reply.status_code >= 500:
        span.set_attribute("error.type", str(reply.status_code))
        span.set_status(Status(StatusCode.ERROR))
    return reply.status_code
