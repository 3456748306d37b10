"""Generated requests over the gateway's own schema, and traps by hand.

ARBITRAGE_SCHEMA_REQUESTS sets how many requests are generated, 600 unless given.
"""

import http.client
import json
import os
import socket

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from conformal_arbitrage.gateway.api import schema
from conformal_arbitrage.store import integrity
from tests.gateway.house import CHAT, DECISION, MENU, QUESTION, UNSURE, House, error_of, says, votes

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")
load_all_checks()
REQUESTS = int(os.environ.get("ARBITRAGE_SCHEMA_REQUESTS", "600"))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [(method, path) for path, methods in schema()["paths"].items() for method in methods]
WITH_INPUT = [
    (method, path) for method, path in OPERATIONS if method != "get" or "{" in path or path.endswith("records")
]
EACH = -(-REQUESTS // (4 * len(WITH_INPUT)))  # two forms, valid and invalid data


@pytest.fixture(scope="module", params=["menu", "text"])
def running(request, tmp_path_factory):
    """A gateway with a record and an administrator's key."""
    unsure = votes(*UNSURE) if request.param == "menu" else says("mine", 0.4)
    folder = tmp_path_factory.mktemp(request.param)
    with House(folder, form=request.param, primary=unsure) as gateway:
        gateway.headers = gateway.keyed("admin")
        reply = gateway.decide() if request.param == "menu" else gateway.chat()
        id = reply.headers["x-arbitrage-decision-id"]
        gateway.known = {"id": id, "name": "support", "decision": id, "token": "0" * 32}
        gateway.session = requests.Session()
        gateway.schema = schemathesis.openapi.from_dict(gateway.get("/openapi.json").json())
        yield gateway
        gateway.session.close()


@pytest.mark.proof
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_generated_requests_get_no_5xx_and_nothing_outside_the_schema(running, method, path, mode):
    operation = running.schema[path][method]
    takes = (method, path) in WITH_INPUT

    @given(case=operation.as_strategy(mode if takes else GenerationMode.POSITIVE), real=st.booleans())
    @settings(max_examples=EACH if takes else 3, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def run(case, real):
        if real:  # names by chance name nothing
            case.path_parameters = {name: running.known[name] for name in case.path_parameters or {}}
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = "support"
        case.call_and_validate(
            base_url=running.url, headers=running.headers, session=running.session, checks=CHECKS, timeout=30
        )

    run()


# Traps by hand.


def raw(gateway, path, data, *, method="POST", headers=()):
    """Send bytes as they are; the status and the error's document."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    connection.putrequest(method, path, skip_accept_encoding=True)
    for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **dict(headers)}.items():
        connection.putheader(name, value)
    connection.endheaders(data)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, json.loads(body)


def body(**changed):
    return json.dumps({**DECISION, **changed}).encode()


BYTES = {
    "nothing": b"",
    "no object": b"[]",
    "null": b"null",
    "cut off": body()[:-1],
    "two documents": body() * 2,
    "very deep lists": b"[" * 100_000,
    "very deep and closed": b"[" * 100_000 + b"]" * 100_000,
    "very deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "deep in the input": body(input=0).replace(b'"input": 0', b'"input": ' + b"[" * 500 + b"]" * 500),
    "invalid UTF-8": body(input="X").replace(b"X", b"\xff\xfe"),
    "a surrogate as bytes": body(input="X").replace(b"X", b"\xed\xa0\x80"),
    "a lone surrogate": body(input="X").replace(b"X", b"\\ud800"),
    "a byte order mark": b"\xef\xbb\xbf" + body(),
    "UTF-16": body().decode().encode("utf-16"),
    "NaN": body(input=0).replace(b'"input": 0', b'"input": NaN'),
    "a huge number": body(input=0).replace(b'"input": 0', b'"input": 1e999'),
    "a long number": body(input=0).replace(b'"input": 0', b'"input": ' + b"9" * 100_000),
    "a number as name": body(model=2**70),
    "no questions": body(questions={}),
    "a null question": body(questions=[None]),
    "an unknown type": body(questions=[{**QUESTION, "type": "essay"}]),
    "a number as choice": body(questions=[{**QUESTION, "choices": [{"value": 1}, {"value": 2}]}]),
    "10,000 actions": body(questions=[{**QUESTION, "choices": [{"value": str(k)} for k in range(10_000)]}]),
    "duplicates": body(questions=[{**QUESTION, "choices": [{"value": "a"}] * 3}]),
    "a body past the limit": body(input="x" * 1_100_000),
}


@pytest.mark.parametrize("name", BYTES)
def test_traps_in_the_body_are_refused_in_the_usual_shape(trap, name):
    status, document = raw(trap, "/v1/decisions", BYTES[name])
    assert 400 <= status < 500
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert len(document["error"]["message"]) < 500
    assert not trap.primary.bodies


@pytest.fixture(scope="module")
def traps(tmp_path_factory):
    with House(tmp_path_factory.mktemp("traps"), policy={"content": "full"}) as gateway:
        yield gateway


@pytest.fixture
def trap(traps, caplog):
    """A gateway that lives on from trap to trap, and must not have written a traceback."""
    traps.primary.bodies.clear()
    yield traps
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    with House(tmp_path_factory.mktemp("talker"), form="text", policy={"content": "full"}) as gateway:
        yield gateway


ODD_TEXTS = ["\x00", "\u2028", "\U0001f600" * 50, "\ufffe", "‮", '"}]}', "{question}", "%s%n", "a\r\nX-Evil: 1"]


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_texts_are_texts_like_any_other(trap, talker, text):
    choices = [{"value": f"a{text}", "description": text}, {"value": "b"}]
    reply = trap.decide({**DECISION, "input": text, "questions": [{**QUESTION, "choices": choices, "name": text}]})
    assert reply.json()["answers"][0]["choice"] == f"a{text}"
    assert reply.json()["answers"][0]["name"] == text
    id = reply.headers["x-arbitrage-decision-id"]
    assert trap.post(f"/v1/arbitrage/records/{id}/feedback", {"comment": text, "label": text}).status_code == 200
    kept = trap.get(f"/v1/arbitrage/records/{id}").json()
    assert (kept["decision"]["content"]["context"][-1]["content"] == text, kept["feedback"][0]["comment"]) == (
        True,
        text,
    )
    said = {**CHAT, "messages": [{"role": "user", "content": text}]}
    assert talker.chat(said).status_code == 200
    assert talker.primary.bodies[-1]["messages"] == said["messages"]
    assert trap.with_store(lambda store: integrity.verify(store)) == []


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**64), 10**30, 10**300])
def test_integers_past_64_bits_are_kept_or_refused(trap, talker, number):
    id = trap.decide().headers["x-arbitrage-decision-id"]
    reply = trap.post(f"/v1/arbitrage/records/{id}/feedback", {"label": number})
    assert reply.status_code in (200, 400, 422)
    assert trap.get(f"/v1/arbitrage/records/{id}").status_code == 200
    assert talker.chat({**CHAT, "metadata": {"n": number}}).status_code in (200, 400, 422)
    assert talker.chat({**CHAT, "seed": number}).status_code in (400, 422)
    assert talker.get("/v1/arbitrage/records").status_code == 200


QUERIES = [
    "since=nan", "until=NaN", "since=-inf", "limit=nan", "limit=1e9", "limit=-1", "limit=" + "9" * 5000, "since=1e308",
    "until=0x10", "policy[]=a", "%00=1", "since=", "limit=1;drop",
]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query[:12])
def test_traps_in_filters_are_refused(trap, query):
    error_of(trap.get(f"/v1/arbitrage/records?{query}"), 400)


@pytest.mark.parametrize(
    "query", ["policy=%00", "policy=%ff", "before=%ed%a0%80", "decided_by=' or 1=1 --", "policy=" + "x" * 9000]
)
def test_filters_that_match_nothing_find_nothing(trap, query):
    trap.decide()
    reply = trap.get(f"/v1/arbitrage/records?{query}")
    assert (reply.status_code, reply.json()["data"] if "before" not in query else []) == (200, [])


PARTS = [
    "%00",
    "%0d%0aX-Evil:%201",
    "..%2f..%2fetc",
    "%ff%fe",
    "%ed%a0%80",
    "x" * 5000,
    "%2e%2e",
    "'--",
    "%F0%9F%98%80",
    "{id}",
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part[:10])
def test_traps_in_the_path_are_not_found(trap, part):
    for method, path in (
        ("GET", f"/v1/arbitrage/records/{part}"), ("POST", f"/v1/arbitrage/records/{part}/feedback"),
        ("GET", f"/v1/arbitrage/policies/{part}"), ("PUT", f"/v1/arbitrage/policies/{part}"),
        ("POST", f"/v1/arbitrage/policies/{part}/rollback"), ("GET", f"/{part}"),
    ):  # fmt: skip
        data = json.dumps({"grade": 1} if "feedback" in path else {"certificate": {}}).encode()
        reply = trap.ask(method, path, data=b"" if method == "GET" else data)
        assert reply.status_code == 404
        assert "X-Evil" not in reply.headers
        assert set(reply.json()) == {"error"}


@pytest.mark.parametrize(
    "value", [b"a\r\nX-Evil: 1", b"a\nX-Evil: 1", b"a\x00b", b"\xff" * 300, b"", b" ", b"a" * 70_000]
)
def test_headers_cannot_be_smuggled_in_through_an_idempotency_key(trap, value):
    with socket.create_connection(("127.0.0.1", trap.port), timeout=60) as peer:
        data = body()
        head = [b"POST /v1/decisions HTTP/1.1", b"Host: localhost", b"Content-Type: application/json",
                b"Connection: close", b"Content-Length: %d" % len(data), b"Idempotency-Key: " + value]  # fmt: skip
        peer.sendall(b"\r\n".join([*head, b"", data]))
        answer = b""
        while piece := peer.recv(65536):
            answer += piece
    head, _, _ = answer.partition(b"\r\n\r\n")
    assert b"evil" not in head.lower()
    assert int(head.split()[1]) < 500


@pytest.mark.parametrize("sent", [b"\x16\x03\x01", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"])
def test_malformed_http_gets_a_400_in_the_usual_shape(trap, sent):
    with socket.create_connection(("127.0.0.1", trap.port), timeout=60) as peer:
        peer.sendall(sent + b"\n" * 20)
        answer = b""
        while piece := peer.recv(65536):
            answer += piece
    head, _, document = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(document)["error"]["code"] == "invalid_http"


@pytest.mark.proof
def test_field_by_field_any_value_in_a_chat_request_is_served_or_refused(talker, trap):
    odd = [None, True, 0, -1, 2**70, 1.5, "", "x", [], [None], {}, {"a": None}, [[1]], {"type": "json_schema"}]
    names = "model messages n stream stream_options arbitrage response_format tools tool_choice logprobs top_logprobs"
    for name in f"{names} temperature max_tokens stop metadata functions user".split():
        for value in odd:
            for gateway, asked in ((talker, CHAT), (trap, MENU)):
                reply = gateway.chat({**asked, name: value})
                assert reply.status_code < 500, (name, value, reply.text)
    for inner in odd:
        for properties in (inner, {"a": inner}, {"a": {"enum": inner}}, {"a": {"$ref": inner}}):
            schema = {"type": "object", "properties": properties, "$defs": inner}
            for given_schema in (inner, {"schema": inner}, {"schema": schema}):
                reply = trap.chat({**CHAT, "response_format": {"type": "json_schema", "json_schema": given_schema}})
                assert reply.status_code < 500, (given_schema, reply.text)


@pytest.mark.proof
def test_any_value_in_a_decisions_request_is_served_or_refused(trap):
    odd = [
        None,
        True,
        0,
        -1,
        2**70,
        1.5,
        "",
        "x",
        [],
        [None],
        {},
        {"a": None},
        [[1]],
        [{"role": 5}],
        [{"type": "function_call"}],
    ]
    for name in (
        "model",
        "input",
        "questions",
        "prompt_cache_key",
        "prompt_cache_options",
        "safety_identifier",
        "other",
    ):
        for value in odd:
            assert trap.decide({**DECISION, name: value}).status_code < 500, (name, value)
    for name in ("type", "instructions", "choices", "name", "levels"):
        for value in odd:
            assert trap.decide({**DECISION, "questions": [{**QUESTION, name: value}]}).status_code < 500, (name, value)


def test_another_keys_record_looks_like_a_missing_one(tmp_path):
    with House(tmp_path) as gateway:
        owner, stranger = gateway.keyed(), gateway.keyed()
        id = gateway.decide(headers=owner).headers["x-arbitrage-decision-id"]
        for path in (id, id.upper(), f"{id}%00", f"{id}%20", "nothing"):
            error_of(gateway.get(f"/v1/arbitrage/records/{path}", headers=stranger), 404, "record_not_found")
        assert gateway.get(f"/v1/arbitrage/records?before={id}z", headers=stranger).json()["data"] == []
