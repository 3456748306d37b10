"""A certificate's age in a running gateway: evidence that grows old, and a day after which it promises nothing."""

import time

import pytest

from conformal_arbitrage.errors import ConfigError
from tests.gateway.house import DECISION, MENU, QUESTION, until
from tests.gateway.test_monitor import monitor

DAY = 86400.0


def ahead(days):
    """A clock that many days ahead."""
    return lambda: time.time() + days * DAY


def test_evidence_is_fresh_at_first_and_stale_a_month_later(house):
    gateway = house(policy={"audit_rate": 0.05})
    shown = until(lambda: (document := monitor(gateway)).get("state") and document, 60)
    assert shown["state"] == "blind"
    assert shown["age"]["stale"] is shown["age"]["expired"] is None
    assert (shown["age"]["needed"], shown["age"]["blind_decisions"], shown["age"]["known_lately"]) == (540, 10_800, 0)
    assert 'arbitrage_certificate_stale{policy="support"} 0.0' in gateway.get("/metrics").text
    gateway.clock = ahead(31)
    shown = monitor(gateway)
    assert shown["state"] == "amber"
    assert [
        reason for reason in shown["reasons"] if reason.startswith("stale: not looked at yet; 0 audits became known")
    ]
    metrics = gateway.get("/metrics").text
    assert 'arbitrage_certificate_stale{policy="support"} 1.0' in metrics
    assert 'arbitrage_certificate_installed_seconds{policy="support"}' in metrics
    assert gateway.decide().json()["answers"][0]["arbitrage"]["guarantee"] == "crc"  # a notice, no more


@pytest.mark.parametrize("at_expiry", ["none", "shadow"])
def test_at_expiry_the_promise_ends_until_another_certificate_is_installed(house, at_expiry):
    gateway = house(policy={"max_age": 90, "at_expiry": at_expiry})
    assert gateway.decide().json()["answers"][0]["arbitrage"]["guarantee"] == "crc"
    gateway.clock = ahead(91)
    shown = until(lambda: (document := monitor(gateway))["reason"] and document, 60)
    assert shown["reason"] == "expired: the certificate has been in force for 91 days, and max_age is 90"
    assert (shown["guarantee"], shown["mode"]) == ("none", "shadow" if at_expiry == "shadow" else "enforce")
    reply = gateway.decide().json()["answers"][0]["arbitrage"]
    if at_expiry == "shadow":
        assert reply["decided_by"] == "guardian"
    else:
        assert (reply["decided_by"], reply["guarantee"]) == ("primary", "none")
        assert gateway.records(limit=1)[0].decision.no_guarantee == shown["reason"]
    gateway.clock = time.time
    gateway.put("/v1/arbitrage/policies/support", {"certificate": gateway.certificate(alpha=0.1).to_dict()})
    again = gateway.decide().json()["answers"][0]["arbitrage"]
    assert (again["decided_by"], again["guarantee"]) == ("primary", "crc")


def test_a_bad_age_is_refused(house):
    with pytest.raises(ConfigError, match="max_age must be above 0 days"):
        house(policy={"max_age": 0})


@pytest.mark.parametrize("at_expiry", ["none", "shadow"])
def test_so_many_decisions_end_the_promise_and_a_restart_does_not_count_anew(house, at_expiry, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.gateway.jobs.COUNT_EVERY", 0.1)
    gateway = house(policy={"max_decisions": 6, "at_expiry": at_expiry})
    gateway.decide({**DECISION, "questions": [QUESTION] * 3})
    until(lambda: monitor(gateway)["age"]["decisions"] == 3, 60)
    gateway.restart()
    gateway.chat(MENU)
    shown = until(lambda: (document := monitor(gateway))["age"]["decisions"] == 4 and document, 60)
    assert (shown["guarantee"], shown["age"]["expired"]) == ("crc", None)
    gateway.decide({**DECISION, "questions": [QUESTION] * 2})
    shown = until(lambda: (document := monitor(gateway))["reason"] and document, 60)
    assert shown["reason"] == "expired: the certificate has been in force for 6 decisions, and max_decisions is 6"
    reply = gateway.decide().json()["answers"][0]["arbitrage"]
    assert reply["decided_by"] == ("guardian" if at_expiry == "shadow" else "primary")
    assert shown["guarantee"] == "none"
    gateway.restart()  # expired from the first request on
    assert monitor(gateway)["guarantee"] == "none"
    gateway.put("/v1/arbitrage/policies/support", {"certificate": gateway.certificate(alpha=0.1).to_dict()})
    again = gateway.decide().json()["answers"][0]["arbitrage"]
    assert (again["decided_by"], again["guarantee"]) == ("primary", "crc")


def test_how_many_days_are_fresh_is_configured(house):
    gateway = house(policy={"audit_rate": 0.05, "fresh_days": 7})
    until(lambda: monitor(gateway).get("state") == "blind", 60)
    gateway.clock = ahead(8)
    shown = until(lambda: (document := monitor(gateway))["state"] == "amber" and document, 60)
    assert any("in the last 7 days" in reason for reason in shown["reasons"])


@pytest.mark.parametrize(("setting", "words"), [("max_decisions", "1 or more"), ("fresh_days", "above 0 days")])
def test_bad_limits_are_refused(house, setting, words):
    with pytest.raises(ConfigError, match=f"{setting} must be {words}"):
        house(policy={setting: 0})
