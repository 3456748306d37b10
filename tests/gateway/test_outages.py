"""Failures are visible: counted by policy, leg and kind, and named by /health/ready."""

from tests.gateway.house import DECISION, UNSURE, error_of, failing, votes


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
