import asyncio
import json
import socket

import pytest

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway import application
from tests.gateway.house import CHAT, DECISION, UNSURE, error_of, says, votes

FEEDBACK = {"grade": 1}


def keyed(house, **options):
    """A gateway with a key of each scope."""
    made = house(**options)
    made.scopes = {scope: made.keyed(scope) for scope in ("call", "review", "admin")}
    return made


def test_without_a_key_or_with_a_wrong_one_nothing_is_served(house):
    made = keyed(house)
    for headers in (
        {},
        {"Authorization": "Bearer arb-wrong"},
        {"Authorization": "Basic eDp5"},
        {"Authorization": "Bearer"},
    ):
        error_of(made.decide(headers=headers), 401, "invalid_api_key")
        error_of(made.get("/metrics", headers=headers), 401, "invalid_api_key")
        error_of(made.get("/v1/models", headers=headers), 401, "invalid_api_key")
    assert not made.primary.bodies


ROUTES = [
    ("POST", "/v1/decisions", DECISION, "call"), ("GET", "/v1/models", None, "call"),
    ("GET", "/v1/arbitrage/records", None, "call"), ("GET", "/v1/arbitrage/policies/support", None, "review"),
    ("PUT", "/v1/arbitrage/policies/support", {}, "admin"),
    ("POST", "/v1/arbitrage/policies/support/rollback", {}, "admin"), ("GET", "/metrics", None, "metrics"),
]  # fmt: skip


def test_each_route_wants_its_scope(house):
    made = keyed(house)
    order = ["call", "review", "admin"]
    for method, path, body, needed in ROUTES:
        for scope in order:
            reply = made.ask(method, path, body, headers=made.scopes[scope])
            if order.index(scope) < order.index("review" if needed == "metrics" else needed):
                assert needed in error_of(reply, 403, "insufficient_scope")["message"]
            else:
                assert reply.status_code not in (401, 403)


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ("Host: 127.0.0.1", "Host: evil.example", b"200"),
        ("Host: evil.example", "Host: 127.0.0.1", b"403"),
        ("Content-Type: application/json", "Content-Type: text/plain", b"200"),
        ("Content-Type: text/plain", "Content-Type: application/json", b"415"),
    ],
)
def test_the_first_duplicate_header_wins(house, first, second, status):
    body = json.dumps(DECISION)
    others = [line for line in ("Host: localhost", "Content-Type: application/json") if line[:4] != first[:4]]
    lines = ["POST /v1/decisions HTTP/1.1", *others, f"Content-Length: {len(body)}", first, second, "", body]
    with socket.create_connection(("127.0.0.1", house().port)) as line:
        line.sendall("\r\n".join(lines).encode())
        assert line.recv(12) == b"HTTP/1.1 " + status


def test_health_and_the_schema_need_no_key(house):
    made = keyed(house)
    for path in ("/health/live", "/health/ready", "/openapi.json"):
        assert made.get(path).status_code == 200


def test_a_revoked_key_stops_at_once(house):
    made = house()
    secret, name = made.key("call")
    headers = {"Authorization": f"Bearer {secret}"}
    assert made.decide(headers=headers).status_code == 200
    made.with_store(lambda store: store.revoke_key(name))
    error_of(made.decide(headers=headers), 401, "invalid_api_key")


def test_the_first_key_makes_keys_required_without_a_restart(house):
    made = house()
    assert made.decide().status_code == 200
    headers = made.keyed("call")
    error_of(made.decide(), 401, "invalid_api_key")
    assert made.decide(headers=headers).status_code == 200


def test_keys_stay_required_when_every_key_is_revoked(house):
    made = house()
    _, name = made.key("call")
    made.with_store(lambda store: store.revoke_key(name))
    made.restart()
    error_of(made.decide(), 401, "invalid_api_key")


def test_without_keys_the_gateway_does_not_listen_beyond_this_machine(house):
    made = house()
    made.stop()
    made.sections["gateway"] = {"host": "0.0.0.0"}
    made.configure()

    async def start():
        async with application(made.config):
            pass

    with pytest.raises(ConfigError, match="loopback only"):
        asyncio.run(start())
    made.key("call")
    asyncio.run(start())


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "10.0.0.1:8080", "[2001:db8::1]"])
def test_without_keys_another_host_is_refused(house, host):
    made = house()
    error_of(made.decide(headers={"Host": host}), 403, "wrong_host")
    error_of(made.get("/metrics", headers={"Host": host}), 403, "wrong_host")
    assert not made.primary.bodies


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1", "[::1]", "[::1]:8080"])
def test_without_keys_this_machine_s_names_are_taken(house, host):
    assert house().decide(headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_other_content_types_are_refused_on_every_route_that_changes_something(house, kind):
    made = house()
    for method, path in (
        ("POST", "/v1/decisions"), ("POST", "/v1/chat/completions"), ("PUT", "/v1/arbitrage/policies/support"),
        ("POST", "/v1/arbitrage/policies/support/rollback"), ("POST", "/v1/arbitrage/records/x/feedback"),
    ):  # fmt: skip
        error_of(made.ask(method, path, data=b"{}", headers={"Content-Type": kind}), 415, "content_type")
    assert made.decide(headers={"Content-Type": "application/json; charset=utf-8"}).status_code == 200


def test_another_keys_record_is_not_found(house):
    made = keyed(house)
    id = made.decide(headers=made.scopes["call"]).headers["x-arbitrage-decision-id"]
    stranger = made.keyed("call")
    nothing = made.get("/v1/arbitrage/records/nothing", headers=stranger)
    theirs = made.get(f"/v1/arbitrage/records/{id}", headers=stranger)
    error_of(theirs, 404, "record_not_found")
    assert theirs.text == nothing.text
    error_of(made.post(f"/v1/arbitrage/records/{id}/feedback", FEEDBACK, headers=stranger), 404, "record_not_found")
    assert made.get("/v1/arbitrage/records", headers=stranger).json()["data"] == []
    for scope in ("call", "review", "admin"):
        assert made.get(f"/v1/arbitrage/records/{id}", headers=made.scopes[scope]).json()["id"] == id


def test_the_caller_s_key_and_headers_do_not_reach_the_upstreams(house):
    for options, body, path in (
        ({"primary": votes(*UNSURE)}, DECISION, "/v1/decisions"),
        ({"form": "text", "primary": says("mine", 0.1)}, CHAT, "/v1/chat/completions"),
    ):
        made = house(**options)
        secret, _ = made.key("call")
        headers = {
            "Authorization": f"Bearer {secret}",
            "X-Secret": secret,
            "Cookie": f"a={secret}",
            "OpenAI-Project": secret,
        }
        assert made.post(path, body, headers=headers).status_code == 200
        for upstream in (made.primary, made.guardian):
            assert upstream.headers
            assert secret not in str(upstream.headers) + str(upstream.bodies)
            assert "Authorization" not in upstream.headers[0]


def test_the_record_and_the_log_do_not_hold_the_key(house, caplog):
    caplog.set_level("DEBUG")
    made = house(policy={"content": "full"})
    secret, name = made.key("call")
    made.decide(headers={"Authorization": f"Bearer {secret}"})
    [record] = made.records()
    assert record.key_id == name
    assert secret not in str(record) + caplog.text + str(made.lines)
    line = json.loads(made.lines[-1])
    named = {"level": "info", "route": "POST /v1/decisions", "status": 200, "policy": "support", "id": record.id}
    assert line == {**named, "time": line["time"], "seconds": line["seconds"]}
