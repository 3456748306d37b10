"""Audits under attack: the Guardian is down, a policy is gone, live traffic needs the same limits.

Whatever happens, a drawn decision keeps its row: with the Guardian's scores if it could be asked before the deadline, else
as missing.
"""

import asyncio
import re
import threading
import time

import pytest

from conformal_arbitrage import ScoreLog
from conformal_arbitrage.store import events
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import MenuQuestion, new_id
from tests.gateway.house import DECISION, SURE, UNSURE, failing, until, votes
from tests.gateway.test_modes import exported

AUDITOR = "conformal_arbitrage.gateway.audits"
QUESTION = MenuQuestion(context="?", actions=("a", "b"))


@pytest.fixture
def hasty(monkeypatch):
    """Retries within fractions of a second."""
    monkeypatch.setattr(f"{AUDITOR}.FIRST_DELAY", 0.1)
    monkeypatch.setattr(f"{AUDITOR}.LONGEST_DELAY", 0.5)
    monkeypatch.setattr(f"{AUDITOR}.LONGEST_REST", 0.2)
    monkeypatch.setattr(f"{AUDITOR}.AUDIT_PAUSE", 0.05)


def plain_or_unsure(path, body, number):
    return votes(*(UNSURE if "unsure" in str(body["input"]) else SURE))(path, body, number)


def decide(gateway, count, text="plain"):
    return [gateway.decide({**DECISION, "input": f"{text} {k}"}).status_code for k in range(count)]


def figure(gateway, name, policy="support", **labels):
    """A figure of /metrics."""
    listed = ",".join(f'{key}="{value}"' for key, value in sorted({"policy": policy, **labels}.items()))
    match = re.search(rf"^arbitrage_{name}{{{listed}}} (\S+)$", gateway.get("/metrics").text, re.M)
    return None if match is None else float(match[1])


@pytest.mark.parametrize("outage", ["refuses", "is away"])
def test_an_outage_of_the_guardian_burns_no_audit(house, hasty, outage):
    gateway = house(policy={"audit_rate": 0.5}, models={"guardian": {"deadline": 2.0}})
    answers, gateway.guardian.reply = gateway.guardian.reply, failing(503 if outage == "refuses" else 502)
    if outage == "is away":
        gateway.run(gateway.guardian._runner.cleanup())  # connections are refused, so the breaker opens at once
    assert decide(gateway, 60) == [200] * 60
    drawn = {record.id for record in gateway.records() if record.decision.audited}
    assert 10 < len(drawn) < 50
    time.sleep(2.5)  # the breaker opens after ten failures, and fails all others in no time
    assert [record.audit for record in gateway.records()] == [None] * 60
    assert figure(gateway, "audits_waiting") == len(drawn)
    assert figure(gateway, "oldest_audit_seconds") >= 2
    assert figure(gateway, "audit_attempts_total", outcome="postponed") > 0
    if outage == "is away":
        return
    gateway.guardian.reply = answers
    audited = until(
        lambda: (done := [r for r in gateway.records() if r.audit]) and len(done) == len(drawn) and done, 30
    )
    assert {record.id for record in audited} == drawn  # the coin did not depend on what came after
    assert {record.audit.scores for record in audited} == {(0.0, 1.0, 0.0)}
    assert until(lambda: figure(gateway, "audits_waiting") == 0.0)


def test_an_audit_past_its_deadline_is_missing_and_stays_in_the_export(house, hasty):
    gateway = house(policy={"audit_rate": 1.0}, guardian=failing(503), gateway={"audit_deadline": 1.0})
    assert decide(gateway, 5) == [200] * 5
    audited = until(lambda: len(done := [r for r in gateway.records() if r.audit]) == 5 and done)
    assert all(record.audit.scores is None for record in audited)
    assert all(record.audit.error.startswith("missing: no answer in ") for record in audited)
    assert figure(gateway, "audit_attempts_total", outcome="missing") == 5
    gateway.guardian.reply = votes(0, 1)
    gateway.restart()  # with a closed breaker
    decide(gateway, 1)
    until(lambda: len([r for r in gateway.records() if r.audit]) == 6)
    log = ScoreLog.read(exported(gateway, "--score-log"))
    assert sorted(log.missing.tolist()) == [False, True, True, True, True, True]
    assert set(log.id.tolist()) == {record.id for record in gateway.records()}


def test_a_reply_that_cannot_be_used_is_final_and_a_refused_request_too(house, hasty):
    gateway = house(policy={"audit_rate": 1.0}, guardian=lambda *_: {"model": "m", "answers": "none"})
    decide(gateway, 1)
    [record] = until(lambda: [r for r in gateway.records() if r.audit])
    assert record.audit.error.startswith("ReplyError")
    gateway.guardian.reply = failing(400, "too long for this model")
    decide(gateway, 1)
    until(lambda: len([r for r in gateway.records() if r.audit]) == 2)
    assert len(gateway.guardian.bodies) == 2


def test_audits_of_a_removed_policy_wait_without_work_and_end_as_missing(house, hasty, monkeypatch):
    monkeypatch.setattr(f"{AUDITOR}.LEASE", 0.05)
    batches = []

    def watched(run_once):
        async def run(self):
            count = await run_once(self)
            batches.append(count)
            return count

        return run

    from conformal_arbitrage.gateway.audits import Auditor

    monkeypatch.setattr(Auditor, "run_once", watched(Auditor.run_once))
    gateway = house(policy={"audit_rate": 1.0}, gateway={"audit_deadline": 2.0})
    gone = [Audit(id=new_id(), policy="gone", question=QUESTION) for _ in range(40)]
    gateway.with_store(lambda store: store.run(events.commit, [], audits=gone))
    batches.clear()
    time.sleep(1)
    assert sum(batches) == 0
    assert figure(gateway, "audits_waiting", policy="gone") == 40
    until(lambda: figure(gateway, "audits_waiting", policy="gone") is None)
    until(lambda: sum(batches) == 40)  # a batch is counted once it has ended
    assert figure(gateway, "audit_attempts_total", policy="gone", outcome="missing") == 40


def test_audits_leave_a_share_of_the_call_limit_to_live_traffic(house, hasty):
    gateway = house(
        primary=plain_or_unsure, policy={"audit_rate": 1.0},
        gateway={"guardian_calls_per_minute": 20, "live_share": 0.5},
    )  # fmt: skip
    assert decide(gateway, 30) == [200] * 30
    until(lambda: len(gateway.guardian.bodies) == 10)
    time.sleep(1)
    assert len(gateway.guardian.bodies) == 10  # and no more: the other half is for live traffic
    assert decide(gateway, 10, "unsure") == [200] * 10
    assert decide(gateway, 1, "unsure") == [429]
    assert len(gateway.guardian.bodies) == 20


def test_audits_leave_a_share_of_the_cost_limit_to_live_traffic(house, hasty):
    gateway = house(
        primary=plain_or_unsure, guardian=votes(0, 1, usage=(0, 0)), policy={"audit_rate": 1.0},
        models={"guardian": {"price": [0.0, 0.0], "price_per_call": 0.01}},
        gateway={"guardian_cost_per_hour": 0.2, "live_share": 0.5},
    )  # fmt: skip
    assert decide(gateway, 30) == [200] * 30
    until(lambda: len(gateway.guardian.bodies) == 10)
    time.sleep(1)
    assert len(gateway.guardian.bodies) == 10
    assert decide(gateway, 10, "unsure") == [200] * 10
    assert decide(gateway, 1, "unsure") == [429]


def test_audits_leave_slots_to_live_traffic(house, hasty):
    released = threading.Event()

    async def slow_audits(path, body, number):
        while "plain" in str(body["input"]) and not released.is_set():
            await asyncio.sleep(0.02)
        return votes(0, 1)(path, body, number)

    gateway = house(
        primary=plain_or_unsure, guardian=slow_audits, policy={"audit_rate": 1.0},
        models={"guardian": {"concurrency": 4}},
    )  # fmt: skip
    assert decide(gateway, 10) == [200] * 10
    until(lambda: gateway.guardian.under_way == 2)
    time.sleep(0.5)
    assert gateway.guardian.under_way == 2  # of four
    assert decide(gateway, 3, "unsure") == [200] * 3
    released.set()
