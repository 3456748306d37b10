import asyncio
import json
import socket
import time

import pytest
from click.testing import CliRunner

from conformal_arbitrage.cli import main
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.gateway import application
from conformal_arbitrage.store import keys
from tests.gateway.house import CHAT, DECISION, UNSURE, error_of, failing, says, votes

FEEDBACK = {"grade": 1}


def keyed(house, **options):
    """A gateway with a key of each scope."""
    gateway = house(**options)
    gateway.scopes = {scope: gateway.keyed(scope) for scope in ("call", "review", "admin")}
    return gateway


def test_without_a_key_or_with_a_wrong_one_nothing_is_served(house):
    gateway = keyed(house)
    for headers in (
        {},
        {"Authorization": "Bearer arb-wrong"},
        {"Authorization": "Basic eDp5"},
        {"Authorization": "Bearer"},
    ):
        error_of(gateway.decide(headers=headers), 401, "invalid_api_key")
        error_of(gateway.get("/metrics", headers=headers), 401, "invalid_api_key")
        error_of(gateway.get("/v1/models", headers=headers), 401, "invalid_api_key")
    assert not gateway.primary.bodies


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
    with socket.create_connection(("127.0.0.1", house().port), timeout=60) as line:
        line.sendall("\r\n".join(lines).encode())
        assert line.recv(12) == b"HTTP/1.1 " + status


def test_health_and_the_schema_need_no_key(house):
    gateway = keyed(house)
    for path in ("/health/live", "/health/ready", "/openapi.json"):
        assert gateway.get(path).status_code == 200


def test_a_revoked_key_stops_at_once(house):
    gateway = house()
    secret, name = gateway.key("call")
    headers = {"Authorization": f"Bearer {secret}"}
    assert gateway.decide(headers=headers).status_code == 200
    gateway.with_store(lambda store: store.run(keys.revoke, name))
    error_of(gateway.decide(headers=headers), 401, "invalid_api_key")


def test_the_first_key_makes_keys_required_without_a_restart(house):
    gateway = house()
    assert gateway.decide().status_code == 200
    headers = gateway.keyed("call")
    error_of(gateway.decide(), 401, "invalid_api_key")
    assert gateway.decide(headers=headers).status_code == 200


def test_keys_stay_required_when_every_key_is_revoked(house):
    gateway = house()
    _, name = gateway.key("call")
    gateway.with_store(lambda store: store.run(keys.revoke, name))
    gateway.restart()
    error_of(gateway.decide(), 401, "invalid_api_key")


def test_without_keys_the_gateway_does_not_listen_beyond_this_machine(house):
    gateway = house()
    gateway.stop()
    gateway.sections["gateway"] = {"host": "0.0.0.0"}
    gateway.configure()

    async def start():
        async with application(gateway.config):
            pass

    with pytest.raises(ConfigError, match=r"listens on 0[.]0[.]0[.]0, and there is no API key.*arbitrage keys create"):
        asyncio.run(start())
    gateway.key("call")
    asyncio.run(start())


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "10.0.0.1:8080", "[2001:db8::1]"])
def test_without_keys_another_host_is_refused(house, host):
    gateway = house()
    error_of(gateway.decide(headers={"Host": host}), 403, "wrong_host")
    error_of(gateway.get("/metrics", headers={"Host": host}), 403, "wrong_host")
    assert not gateway.primary.bodies


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1", "[::1]", "[::1]:8080"])
def test_without_keys_this_machine_s_names_are_taken(house, host):
    assert house().decide(headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_other_content_types_are_refused_on_every_route_that_changes_something(house, kind):
    gateway = house()
    for method, path in (
        ("POST", "/v1/decisions"), ("POST", "/v1/chat/completions"), ("PUT", "/v1/arbitrage/policies/support"),
        ("POST", "/v1/arbitrage/policies/support/rollback"), ("POST", "/v1/arbitrage/records/x/feedback"),
    ):  # fmt: skip
        error_of(gateway.ask(method, path, data=b"{}", headers={"Content-Type": kind}), 415, "content_type")
    assert gateway.decide(headers={"Content-Type": "application/json; charset=utf-8"}).status_code == 200


def test_another_keys_record_is_not_found(house):
    gateway = keyed(house)
    id = gateway.decide(headers=gateway.scopes["call"]).headers["x-arbitrage-decision-id"]
    stranger = gateway.keyed("call")
    nothing = gateway.get("/v1/arbitrage/records/nothing", headers=stranger)
    theirs = gateway.get(f"/v1/arbitrage/records/{id}", headers=stranger)
    error_of(theirs, 404, "record_not_found")
    assert theirs.text == nothing.text
    error_of(gateway.post(f"/v1/arbitrage/records/{id}/feedback", FEEDBACK, headers=stranger), 404, "record_not_found")
    assert gateway.get("/v1/arbitrage/records", headers=stranger).json()["data"] == []
    for scope in ("call", "review", "admin"):
        assert gateway.get(f"/v1/arbitrage/records/{id}", headers=gateway.scopes[scope]).json()["id"] == id


def test_the_caller_s_key_and_headers_do_not_reach_the_upstreams(house):
    for options, body, path in (
        ({"primary": votes(*UNSURE)}, DECISION, "/v1/decisions"),
        ({"form": "text", "primary": says("mine", 0.1)}, CHAT, "/v1/chat/completions"),
    ):
        gateway = house(**options)
        secret, _ = gateway.key("call")
        headers = {
            "Authorization": f"Bearer {secret}",
            "X-Secret": secret,
            "Cookie": f"a={secret}",
            "OpenAI-Project": secret,
        }
        assert gateway.post(path, body, headers=headers).status_code == 200
        for upstream in (gateway.primary, gateway.guardian):
            assert upstream.headers
            assert secret not in str(upstream.headers) + str(upstream.bodies)
            assert "Authorization" not in upstream.headers[0]


def test_the_record_and_the_log_do_not_hold_the_key(house, caplog):
    caplog.set_level("DEBUG")
    gateway = house(policy={"content": "full"})
    secret, name = gateway.key("call")
    gateway.decide(headers={"Authorization": f"Bearer {secret}"})
    [record] = gateway.records()
    assert record.key_id == name
    assert secret not in str(record) + caplog.text + str(gateway.lines)
    line = json.loads(gateway.lines[-1])
    named = {"level": "info", "route": "POST /v1/decisions", "status": 200, "policy": "support", "id": record.id}
    assert line == {**named, "time": line["time"], "seconds": line["seconds"]}


def arbitrage(gateway, *command, code=0):
    result = CliRunner().invoke(main, [*command, "--config", str(gateway.path)])
    assert result.exit_code == code, result.output
    return result.stdout


def key(gateway, *options):
    created = json.loads(arbitrage(gateway, "keys", "create", "--json", *options))
    return created, {"Authorization": f"Bearer {created['key']}"}


@pytest.mark.parametrize("form", ["menu", "text"])
def test_the_log_does_not_hold_what_an_endpoint_says_of_a_question(house, caplog, form):
    unsure = votes(*UNSURE) if form == "menu" else says("mine", 0.1)
    gateway = house(form=form, primary=unsure, guardian=failing(400, "A letter. is too long"))
    assert (gateway.decide if form == "menu" else gateway.chat)().status_code in (400, 502)
    assert "could not be reached, or refused the call (UpstreamError: status 400)" in caplog.text
    assert "is too long" not in caplog.text


def test_a_key_for_operators_reads_figures_and_does_nothing_else(home):
    gateway = home()
    _, scraper = key(gateway, "--scope", "operate")
    for path in ("/metrics", "/v1/arbitrage/policies/support"):
        assert gateway.get(path, headers=scraper).status_code == 200
    for path in ("/v1/arbitrage/records", "/v1/models"):
        error_of(gateway.get(path, headers=scraper), 403, "insufficient_scope")
    error_of(gateway.decide(headers=scraper), 403, "insufficient_scope")
    _, caller = key(gateway)
    error_of(gateway.get("/metrics", headers=caller), 403, "insufficient_scope")
    error_of(gateway.get("/metrics", headers=key(gateway, "--scope", "review")[1]), 403, "insufficient_scope")


def test_a_key_expires(home):
    gateway = home()
    created, headers = key(gateway, "--expires", "1")
    assert created["expires"] > time.time() + 86000
    assert gateway.decide(headers=headers).status_code == 200
    [listed] = json.loads(arbitrage(gateway, "keys", "list", "--json"))
    assert listed["expires"] == created["expires"]
    _, headers = key(gateway, "--expires", "1e-9")
    error_of(gateway.decide(headers=headers), 401, "expired_api_key")
    arbitrage(gateway, "keys", "create", "--expires", "-1", code=2)


def test_a_key_bound_to_policies_calls_and_sees_no_other(home):
    gateway = home(**{"policies.support": {}, "policies.sales": {}, "policies.other": {}})
    _, admin = key(gateway, "--scope", "admin")
    _, caller = key(gateway, "--policy", "sales")
    _, reviewer = key(gateway, "--policy", "sales", "--scope", "review")
    _, two = key(gateway, "--policy", "sales", "--policy", "other", "--scope", "review")
    error_of(gateway.decide(headers=caller), 403, "insufficient_scope")
    error_of(
        gateway.chat({**CHAT, "arbitrage": {"actions": ["a", "b", "c"]}}, headers=caller), 403, "insufficient_scope"
    )
    own = gateway.decide({**DECISION, "model": "sales"}, headers=caller).headers["x-arbitrage-decision-id"]
    elsewhere = gateway.decide(headers=admin).headers["x-arbitrage-decision-id"]
    for headers in (reviewer, two):
        assert gateway.get(f"/v1/arbitrage/records/{own}", headers=headers).status_code == 200
        error_of(gateway.get(f"/v1/arbitrage/records/{elsewhere}", headers=headers), 404)
        error_of(gateway.get("/v1/arbitrage/records?policy=support", headers=headers), 403)
        error_of(gateway.get("/v1/arbitrage/policies/support", headers=headers), 403)
        feedback = gateway.post(f"/v1/arbitrage/records/{elsewhere}/feedback", {"grade": 1}, headers=headers)
        error_of(feedback, 404)
        listed = gateway.get("/v1/arbitrage/records", headers=headers).json()["data"]
        assert [record["id"] for record in listed] == [own]
    assert [p["id"] for p in gateway.get("/v1/models", headers=caller).json()["data"]] == ["sales"]
    assert len(gateway.get("/v1/models", headers=admin).json()["data"]) == 3
    assert "sales, other" in arbitrage(gateway, "keys", "list")
    arbitrage(gateway, "keys", "create", "--policy", "absent", code=2)
