"""The guard of a real gateway: the threshold follows the ledger, the record says which one decided, the bound holds."""

import copy

import pytest

from conformal_arbitrage.errors import CertificateError, ConfigError
from conformal_arbitrage.live.service import CertificateGuard
from conformal_arbitrage.store import policies
from tests.gateway.house import DECISION, QUESTION, SURE, until, votes
from tests.gateway.test_monitor import ledger, monitor
from tests.store.test_ledger import alarm

GUARDED = {"audit_rate": 1.0, "guard": True}
KEPT = {"margins": True}
BATCH, BATCHES = 5, 40


@pytest.fixture
def quick(monkeypatch):
    """No pauses between looks at the store."""
    monkeypatch.setattr("conformal_arbitrage.gateway.audits.AUDIT_PAUSE", 0.01)
    monkeypatch.setattr("conformal_arbitrage.gateway.watcher.PAUSE", 0.01)


def losing(house, **policy):
    """A gateway whose Primary is sure and always wrong."""
    return house(calibration=KEPT, policy={**GUARDED, **policy}, primary=votes(*SURE), guardian=votes(0, 1))


def decide_many(made, batches=BATCHES):
    """Decide, and wait after each batch until the losses are known and the guard has taken them."""
    for count in range(1, batches + 1):
        assert made.decide({**DECISION, "questions": [QUESTION] * BATCH}).status_code == 200
        until(lambda count=count: (monitor(made)["guard"] or {"known": -1})["known"] >= count * BATCH, 60)


def test_a_primary_that_always_loses_keeps_the_bound_and_raises_no_alarm(house, quick):
    gateway = losing(house)
    decide_many(gateway)
    shown = monitor(gateway)
    rows = ledger(gateway)
    known = [row.loss for row in sorted(rows, key=lambda row: row.known_order)]
    assert len(known) == BATCH * BATCHES
    excess = sum(loss - 0.05 for loss in known)
    assert shown["guard"]["excess"] == pytest.approx(excess)
    assert shown["guard"]["bound"] == pytest.approx((1 - shown["guard"]["base"] + 0.02) / 0.02)
    assert excess <= shown["guard"]["bound"] + BATCH
    assert (shown["mode"], shown["alarm"]) == ("enforce", None)
    assert sum(known) >= BATCH  # the first batch was decided before anything was known
    assert sum(known) < len(known) / 8  # without a guard all of them lose
    assert 'arbitrage_guard_share{policy="support"}' in gateway.get("/metrics").text


def test_without_the_guard_the_same_traffic_ends_in_safe_mode(house, quick):
    gateway = losing(house, guard=False)
    for _ in range(BATCHES // 4):
        gateway.decide({**DECISION, "questions": [QUESTION] * 4 * BATCH})
    until(lambda: monitor(gateway)["mode"] == "safe", 60)


def test_the_record_says_which_losses_were_known_and_so_which_threshold_decided(house, quick):
    gateway = losing(house)
    decide_many(gateway, batches=10)
    certificate = gateway.certificate()
    known = [row.loss for row in sorted(ledger(gateway), key=lambda row: row.known_order)]
    records = gateway.records(limit=1000)
    assert {record.decision.guarded for record in records} >= {0, BATCH}
    for record in records:
        guard = CertificateGuard(certificate)
        guard.take(known[: record.decision.guarded])
        in_force = guard.in_force()
        assert record.decision.relaxation == in_force.relaxation
        assert list(record.decision.candidates) == in_force.sight(record.decision.legs[0].scores, id=record.id)[0]


def test_the_threshold_is_the_same_after_a_restart_from_the_first_request_on(house, quick):
    gateway = losing(house)
    decide_many(gateway, batches=3)
    before = monitor(gateway)["guard"]
    assert before["share"] > before["base"]
    gateway.restart()
    reply = gateway.decide().json()["answers"][0]["arbitrage"]
    assert reply["decided_by"] == "guardian"  # the certificate alone would let the Primary's choice stand
    [last] = gateway.records(limit=1)
    assert last.decision.guarded == before["known"]


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_two_gateways_of_one_database_have_the_same_threshold(house, quick, request, database):
    where = "shared.sqlite" if database == "sqlite" else request.getfixturevalue("server").new_database()
    if database == "postgres":
        request.getfixturevalue("monkeypatch").setenv("ARBITRAGE_SECRET", "a-secret-of-both-gateways")
    gateway = house(
        calibration=KEPT, policy=GUARDED, primary=votes(*SURE), guardian=votes(0, 1), gateway={"database": where}
    )
    other = copy.copy(gateway)  # the same configuration, loop and models, on another port
    other.start()
    try:
        for count in range(1, 7):
            asked = gateway if count % 2 else other
            assert asked.decide({**DECISION, "questions": [QUESTION] * BATCH}).status_code == 200
            for one in (gateway, other):
                until(
                    lambda one=one, count=count: (monitor(one)["guard"] or {"known": 0})["known"] == count * BATCH, 60
                )
            assert monitor(gateway)["guard"] == monitor(other)["guard"]
        assert monitor(gateway)["guard"]["share"] > monitor(gateway)["guard"]["base"]
        records = gateway.records(limit=100)
        assert len(records) == 6 * BATCH
        known = [row.loss for row in sorted(ledger(gateway), key=lambda row: row.known_order)]
        for record in records:
            guard = CertificateGuard(gateway.certificate())
            guard.take(known[: record.decision.guarded])
            assert record.decision.relaxation == guard.in_force().relaxation
    finally:
        other.stop()


def test_a_guard_in_free_text_learns_from_grades(house, quick):
    gateway = house(form="text", calibration=KEPT, policy={**GUARDED, "content": "full"})
    ids = [gateway.chat().headers["x-arbitrage-decision-id"] for _ in range(3)]
    until(lambda: all(record.audit for record in gateway.records()), 60)
    for id in ids:
        gateway.post(f"/v1/arbitrage/records/{id}/feedback", {"grades": {"primary": 0.0, "guardian": 1.0}})
    until(lambda: monitor(gateway)["guard"]["known"] == 3, 60)
    assert gateway.chat().json()["arbitrage"]["decided_by"] == "guardian"
    [last] = gateway.records(limit=1)
    assert (last.decision.guarded, last.decision.relaxation) == (3, 0.9)


def test_safe_mode_has_no_guard(house, quick):
    gateway = losing(house)
    decide_many(gateway, batches=1)
    assert gateway.with_store(lambda store: store.run(policies.raise_alarm, "support", alarm()))
    gateway.decide()
    [last] = gateway.records(limit=1)
    assert (last.decision.mode, last.decision.guarded, last.decision.relaxation) == ("safe", None, None)
    assert gateway.post("/v1/arbitrage/policies/support/lift", {"reason": "a test"}).status_code == 200
    gateway.decide()  # under a ledger of its own
    [last] = gateway.records(limit=1)
    assert (last.decision.mode, last.decision.guarded, last.decision.relaxation) == ("enforce", 0, 0.3)


def test_a_guard_is_off_unless_asked_for_and_leaves_no_trace(house, quick):
    gateway = house(calibration=KEPT, policy={"audit_rate": 1.0})
    gateway.decide()
    assert gateway.records()[0].decision.guarded is None
    assert monitor(gateway)["guard"] is None
    assert "arbitrage_guard_share{policy" not in gateway.get("/metrics").text


def test_a_guard_needs_quantiles_and_audits(house):
    with pytest.raises(CertificateError, match="calibrate again with margins=True"):
        house(policy=GUARDED)


@pytest.mark.parametrize("policy", [{"guard": True}, {"guard": True, "audit_rate": 0.5, "mode": "shadow"}])
def test_a_guard_without_audits_is_refused(house, policy):
    with pytest.raises(ConfigError, match="guard = true learns from audits"):
        house(calibration=KEPT, policy=policy)


def test_a_certificate_without_quantiles_cannot_replace_a_guarded_one(house):
    gateway = house(calibration=KEPT, policy=GUARDED)
    gateway.calibration = {}
    reply = gateway.put("/v1/arbitrage/policies/support", {"certificate": gateway.certificate(alpha=0.1).to_dict()})
    assert reply.status_code == 422
    assert "margins" in reply.json()["error"]["message"]
    assert monitor(gateway)["version"] == 1
