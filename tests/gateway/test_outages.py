"""Failures are visible: counted by policy, leg and kind, and named by /health/ready."""

import socket
import time

import pytest

from tests.gateway.house import CHAT, DECISION, UNSURE, chunks, error_of, failing, hanging, says, votes

TOO_LONG = {"message": "This model's maximum context length is 8192 tokens.", "code": "context_length_exceeded"}


def test_legs_of_failed_decisions_are_counted_and_so_are_the_failures(house):
    gateway = house(primary=votes(*UNSURE), guardian=failing(400), gateway={"guardian_calls_per_minute": 1})
    error_of(gateway.decide(), 502)
    error_of(gateway.decide({**DECISION, "input": "Another."}), 429)
    figures = gateway.get("/metrics").text
    assert 'upstream_errors_total{error="UpstreamError",policy="support",role="guardian"} 1.0' in figures
    for finish in ("failed", "limited"):
        assert f'arbitrage_decisions_total{{decided_by="{finish}",policy="support"}} 1.0' in figures


def test_a_guardian_that_rests_is_named_and_the_gateway_stays_ready(house):
    gateway = house(primary=votes(*UNSURE), guardian=failing(500))
    assert "problems" not in gateway.get("/health/ready").json()
    for k in range(10):
        gateway.decide({**DECISION, "input": str(k)})
    ready = gateway.get("/health/ready")
    assert ready.status_code == 200
    [problem] = ready.json()["problems"]
    assert (problem["policy"], problem["role"]) == ("support", "guardian")
    assert 'arbitrage_guardian_resting{policy="support"} 1.0' in gateway.get("/metrics").text


def test_a_model_that_is_not_the_pinned_one_is_counted_logged_and_named_until_it_is_back(house, caplog):
    models = {"guardian.pinned": {"served": "m"}}
    gateway = house(primary=votes(*UNSURE), guardian=votes(0, 1, model="m-2"), models=models)
    for k in range(3):
        error_of(gateway.decide({**DECISION, "input": str(k)}), 502)
    [problem] = gateway.get("/health/ready").json()["problems"]
    assert "'m-2' instead of 'm'" in problem["problem"]
    assert 'error="OtherModelError",policy="support",role="guardian"} 3.0' in gateway.get("/metrics").text
    assert len([r for r in caplog.records if r.getMessage().startswith("guardian: ")]) == 1
    gateway.guardian.reply = votes(0, 1)
    assert gateway.decide().status_code == 200
    assert "problems" not in gateway.get("/health/ready").json()


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_guardian_says_of_the_callers_request_is_passed_on(house, status, stream):
    gateway = house(form="text", primary=says("mine", 0.1), guardian=lambda *_: (status, {"error": TOO_LONG}))
    reply = gateway.chat({**CHAT, "stream": stream})
    assert error_of(reply, status, "context_length_exceeded")["message"] == TOO_LONG["message"]
    assert reply.headers["x-should-retry"] == "false"
    assert len(gateway.guardian.bodies) == 1
    assert "8192" not in str(gateway.records()[0].completion)  # whose content is kept as a digest


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_that_only_the_operator_can_mend_is_a_502_that_no_retry_helps(house, status):
    gateway = house(form="text", primary=says("mine", 0.1), guardian=failing(status, "no such key"))
    reply = gateway.chat()
    assert "a retry will not help" in error_of(reply, 502, "guardian_failed")["message"]
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("form", ["menu", "text"])
def test_usage_has_the_tokens_of_every_leg_though_another_broke_off(house, form):
    guardian = votes(0, 1, usage=(400, 100)) if form == "menu" else says("theirs", usage=(400, 100))
    gateway = house(form=form, primary=hanging, guardian=guardian, gateway={"primary_timeout": 0.2})
    usage = (gateway.decide() if form == "menu" else gateway.chat()).json()["usage"]
    assert usage["total_tokens"] == 500


def test_usage_counts_the_answer_of_a_guardian_that_broke_off_before(house):
    answers = says("theirs", usage=(400, 100))

    def second_time(path, body, number):
        return (200, "no object") if number == 1 else answers(path, body, number)

    gateway = house(form="text", primary=says("mine", 0.1, usage=(10, 5)), guardian=second_time)
    gateway.guardian.bodies.clear()
    reply = gateway.chat({**CHAT, "stream": True, "stream_options": {"include_usage": True}})
    assert [document["usage"]["total_tokens"] for document in chunks(reply) if document.get("usage")] == [515]


def test_a_primary_that_hangs_costs_its_timeout_and_one_that_refuses_nothing(house):
    gateway = house(form="text", primary=hanging, guardian=says("theirs"), gateway={"primary_timeout": 0.3})
    start = time.monotonic()
    assert gateway.chat().json()["arbitrage"]["decided_by"] == "guardian"
    assert 0.3 <= time.monotonic() - start < 5
    for refusal in (failing(503), failing(429)):
        gateway.primary.reply = refusal
        gateway.primary.bodies.clear()
        assert gateway.chat().json()["arbitrage"]["decided_by"] == "guardian"
        assert len(gateway.primary.bodies) == 1  # repeating it would begin with a pause


def test_a_primary_that_is_not_there_is_not_waited_for(house):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        gateway = house(form="text", guardian=says("theirs"), models={"primary": {"url": url}})
        [first] = [leg for leg in gateway.chat().json()["arbitrage"]["legs"] if leg["role"] == "primary"]
        assert first["failed"]
        assert gateway.records()[0].decision.legs[0].spent.calls == 1
