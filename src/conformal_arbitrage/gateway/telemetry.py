"""OpenTelemetry: spans and measurements of requests and of calls to models, exported by OTLP over HTTP.

Calls have the names of its GenAI conventions. Their spans hold models, tokens, times and errors, never a word of a question
or an answer. Each attempt is a span of its own, and the endpoint is sent its W3C trace context.

Exporters, sampling and the service's name are set by the standard variables (OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and so on). Without `otel = true` nothing here is imported.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from msgspec.structs import replace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from conformal_arbitrage.errors import UpstreamError
from conformal_arbitrage.gateway.http import DECISION_ID, Exchange
from conformal_arbitrage.models.port import Call, Port, Reply, Wrapper
from conformal_arbitrage.types import JSON, Chunk, as_object

_NAME = "conformal_arbitrage"
_AT_THE_END = 5.0  # seconds for what was not exported when the process ends
_DECIDED_BY = "x-arbitrage-decided-by"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_CONTEXT = (b"traceparent", b"tracestate")
_context = TraceContextTextMapPropagator()


# --- Requests ---


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


# --- Calls to models ---


_OPERATIONS = {"/chat/completions": "chat", "/completions": "text_completion", "/embeddings": "embeddings"}
_PROVIDERS = {
    "api.openai.com": "openai", "api.anthropic.com": "anthropic", "api.mistral.ai": "mistral_ai", "api.groq.com": "groq",
    "api.deepseek.com": "deepseek", "api.cohere.com": "cohere", "api.x.ai": "x_ai", "api.perplexity.ai": "perplexity",
    "generativelanguage.googleapis.com": "gcp.gemini",
}  # fmt: skip
_REQUESTED = {"max_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "temperature": "temperature",
              "top_p": "top_p", "seed": "seed"}  # fmt: skip
_CALL_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = tuple(4**power for power in range(14))


class Instruments:
    """What records calls: spans, their durations and their tokens."""

    def __init__(self, tracer: Tracer, meter: Meter) -> None:
        self.tracer = tracer
        self.duration = meter.create_histogram(
            "gen_ai.client.operation.duration", "s", "Time of a call to a model",
            explicit_bucket_boundaries_advisory=_CALL_SECONDS,
        )  # fmt: skip
        self.tokens = meter.create_histogram(
            "gen_ai.client.token.usage", "{token}", "Tokens of a call to a model",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )  # fmt: skip


class Traced(Wrapper):
    """Records every call.

    Args:
        role: who is asked: primary, guardian.
        instruments: what records them.
    """

    def __init__(self, port: Port, role: str, instruments: Instruments) -> None:
        super().__init__(port)
        self._role = role
        self._instruments = instruments
        place = urlsplit(port.origin)
        host = place.hostname or port.origin
        self._place: dict[str, Any] = {"gen_ai.provider.name": _PROVIDERS.get(host, host), "server.address": host}
        port_number = place.port or {"http": 80, "https": 443}.get(place.scheme)
        if port_number is not None:
            self._place["server.port"] = port_number

    async def call(self, call: Call) -> Reply:
        """Make the call in a span."""
        with self._operation(call) as operation:
            reply = await self.port.call(operation.call)
            operation.ends(reply)
            return reply

    async def stream(self, call: Call) -> AsyncGenerator[Chunk | Reply]:
        """Make the call in a span and yield its chunks, then its reply."""
        with self._operation(call, streamed=True) as operation:
            async with aclosing(self.port.stream(operation.call)) as items:
                async for item in items:
                    operation.chunk()
                    if isinstance(item, Reply):
                        operation.ends(item)
                    yield item

    def _operation(self, call: Call, *, streamed: bool = False) -> "_Operation":
        name = _OPERATIONS.get(call.path, call.path.strip("/").replace("/", "."))
        labels = {"gen_ai.operation.name": name, "gen_ai.request.model": str(call.body.get("model", "")), **self._place}
        span = self._instruments.tracer.start_span(
            f"{name} {labels['gen_ai.request.model']}", kind=SpanKind.CLIENT,
            attributes={**labels, **_requested(call.body), "arbitrage.role": self._role, **_id(call, streamed=streamed)},
        )  # fmt: skip
        return _Operation(call, span, {**labels, "arbitrage.role": self._role}, self._instruments)


class _Operation:
    """A call in progress; the end of the `with` block ends its span."""

    def __init__(self, call: Call, span: Span, labels: Mapping[str, Any], instruments: Instruments) -> None:
        headers: dict[str, str] = {}
        _context.inject(headers, set_span_in_context(span))
        self.call = replace(call, headers=headers)
        self._span = span
        self._labels = dict(labels)
        self._instruments = instruments
        self._start = time.perf_counter()
        self._chunks = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, GeneratorExit):  # a caller that stops reading is no failure
            self._fail(error)
        self._instruments.duration.record(time.perf_counter() - self._start, self._labels)
        self._span.end()

    def chunk(self) -> None:
        """Note when the first chunk came."""
        self._chunks += 1
        if self._chunks == 1:
            seconds = time.perf_counter() - self._start
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)

    def ends(self, reply: Reply) -> None:
        """Note what the reply says of itself."""
        document = as_object(reply.document)
        served: JSON = document.get("model")
        if isinstance(served, str):
            self._span.set_attribute("gen_ai.response.model", served)
            self._labels["gen_ai.response.model"] = served
        id: JSON = document.get("id")
        if isinstance(id, str):
            self._span.set_attribute("gen_ai.response.id", id)
        if reasons := _finish_reasons(document):
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        for kind, count in (("input", reply.spent.input_tokens), ("output", reply.spent.output_tokens)):
            if count is not None:
                self._span.set_attribute(f"gen_ai.usage.{kind}_tokens", count)
                self._instruments.tokens.record(count, {**self._labels, "gen_ai.token.type": kind})

    def _fail(self, error: BaseException) -> None:
        """Note the kind of an error, not its text, which may quote an answer."""
        kind = type(error).__name__
        if isinstance(error, UpstreamError) and error.status is not None:
            kind = str(error.status)
        self._labels["error.type"] = kind
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR))


def _requested(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a request that conventions name."""
    return {
        f"gen_ai.request.{_REQUESTED[name]}": value
        for name, value in body.items()
        if name in _REQUESTED and isinstance(value, int | float)
    }


def _id(call: Call, *, streamed: bool) -> dict[str, Any]:
    stream = {"gen_ai.request.stream": True} if streamed else {}
    return stream if call.id is None else {**stream, "arbitrage.decision_id": call.id}


def _finish_reasons(document: Mapping[str, Any]) -> list[str]:
    choices: JSON = document.get("choices")
    reasons: list[JSON] = [
        as_object(choice).get("finish_reason") for choice in (choices if isinstance(choices, list) else [])
    ]
    return [reason for reason in reasons if isinstance(reason, str)]
