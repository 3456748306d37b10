"""OpenTelemetry under its GenAI names."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway import gateway
from tests.gateway.durability import ROOT
from tests.gateway.house import CHAT, DECISION, UNSURE, failing, says, votes
from tests.scripted import Stream, chunk, ending, sse

DEPLOY = ROOT / "deploy"
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "tracestate": "vendor=7"}
SECRET_WORDS = ("A letter.", "Which?", "Say it.", "theirs", "mine")


class Collector:
    """An OTLP collector on loopback that keeps what it gets."""

    def __init__(self):
        self.bodies = {"/v1/traces": [], "/v1/metrics": []}
        bodies = self.bodies

        class Answer(BaseHTTPRequestHandler):
            def do_POST(self):
                bodies[self.path].append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def spans(self):
        messages = [ExportTraceServiceRequest.FromString(body) for body in self.bodies["/v1/traces"]]
        scopes = [scope for message in messages for one in message.resource_spans for scope in one.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def metrics(self):
        messages = [ExportMetricsServiceRequest.FromString(body) for body in self.bodies["/v1/metrics"]]
        scopes = [scope for message in messages for one in message.resource_metrics for scope in one.scope_metrics]
        return {metric.name: metric for scope in scopes for metric in scope.metrics}


def attributes(of):
    kinds = {pair.key: pair.value for pair in of.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in kinds.items()}


@pytest.fixture
def collector(monkeypatch):
    server = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    yield server
    server.close()


def test_a_request_is_one_trace_from_its_caller_to_both_models(house, collector):
    gateway = house(primary=votes(*UNSURE), gateway={"otel": True})
    reply = gateway.decide(headers=CALLER)
    assert reply.status_code == 200
    gateway.stop()
    by_kind = {span.kind: span for span in collector.spans()}
    served, calls = by_kind[2], [span for span in collector.spans() if span.kind == 3]
    assert {span.trace_id.hex() for span in collector.spans()} == {TRACE}
    assert served.parent_span_id.hex() == "b7ad6b7169203331"
    assert served.name == "POST /v1/decisions"
    decision = reply.headers["x-arbitrage-decision-id"]
    assert attributes(served).items() >= {
        "http.request.method": "POST", "http.route": "/v1/decisions", "http.response.status_code": 200,
        "arbitrage.policy": "support", "arbitrage.decided_by": "guardian", "arbitrage.decision_id": decision,
    }.items()  # fmt: skip
    assert [attributes(span)["arbitrage.role"] for span in calls] == ["primary", "guardian"]
    for span, upstream in zip(calls, (gateway.primary, gateway.guardian), strict=True):
        assert span.parent_span_id == served.span_id
        assert upstream.headers[0]["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
        assert upstream.headers[0]["tracestate"] == "vendor=7"
        assert attributes(span).items() >= {
            "gen_ai.operation.name": "decisions", "gen_ai.request.model": "m", "gen_ai.response.model": "m",
            "gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 5, "server.address": "127.0.0.1",
            "server.port": upstream.port, "arbitrage.decision_id": decision,
        }.items()  # fmt: skip


def test_measurements_have_the_names_units_and_labels_of_the_conventions(house, collector):
    gateway = house(form="text", gateway={"otel": True})
    assert gateway.chat().status_code == 200
    gateway.stop()
    metrics = collector.metrics()
    assert set(metrics) == {
        "gen_ai.client.operation.duration", "gen_ai.client.token.usage", "http.server.request.duration",
    }  # fmt: skip
    assert [metrics[name].unit for name in sorted(metrics)] == ["s", "{token}", "s"]
    points = metrics["gen_ai.client.token.usage"].histogram.data_points
    assert {(attributes(point)["gen_ai.token.type"], point.sum) for point in points} == {("input", 10), ("output", 5)}
    assert attributes(points[0]).items() >= {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "127.0.0.1", "gen_ai.request.model": "m",
    }.items()  # fmt: skip


def test_streams_and_errors_are_recorded_without_a_word_of_content(house, collector):
    async def portions():
        yield sse(chunk({"content": "theirs"}))
        yield ending()

    gateway = house(
        form="text", primary=says("mine", 0.1), guardian=lambda *_: Stream(portions()), gateway={"otel": True}
    )
    assert gateway.chat({**CHAT, "stream": True}).status_code == 200
    gateway.guardian.reply = failing(503, "theirs is broken")
    assert gateway.chat({**CHAT, "user": "other"}).status_code == 502
    gateway.stop()
    streamed, failed = [span for span in collector.spans() if attributes(span).get("arbitrage.role") == "guardian"]
    assert attributes(streamed)["gen_ai.request.stream"] is True
    assert attributes(streamed)["gen_ai.response.time_to_first_chunk"] > 0
    assert attributes(streamed)["gen_ai.usage.output_tokens"] == 5
    assert (attributes(failed)["error.type"], failed.status.code) == ("503", 2)
    served = [span for span in collector.spans() if span.kind == 2]
    assert [(attributes(span)["http.response.status_code"], span.status.code) for span in served] == [
        (200, 0),
        (502, 2),
    ]
    everything = b"".join(body for bodies in collector.bodies.values() for body in bodies)
    assert not [word for word in SECRET_WORDS if word.encode() in everything]


def test_a_collector_that_is_gone_costs_requests_nothing_and_holds_up_no_end(house, collector):
    collector.close()
    gateway = house(gateway={"otel": True})
    assert {gateway.decide().status_code for _ in range(20)} == {200}
    gateway.stop()  # within the 30 seconds that the house allows


def test_nothing_of_it_is_loaded_unless_asked_for():
    code = "import sys, conformal_arbitrage.gateway.server; print([m for m in sys.modules if 'opentelemetry' in m])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "[]\n"


def test_a_trace_is_not_passed_on_unless_asked_for(house):
    gateway = house()
    assert gateway.decide(DECISION, headers=CALLER).status_code == 200
    assert "traceparent" not in {name.lower() for name in gateway.primary.headers[0]}


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "conformal_arbitrage.gateway.telemetry", raising=False)
    with pytest.raises(ConfigError, match=r"otel = true needs opentelemetry\S*: run `pip install '\.\[otel\]'`"):
        gateway._telemetry()
