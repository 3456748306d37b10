"""Decisions whose reply was not delivered: recorded all the same, and continued by the next attempt."""

import threading

import pytest
import requests

from conformal_arbitrage import ScoreLog
from conformal_arbitrage.store import integrity
from tests.gateway.house import CHAT, DECISION, UNSURE, error_of, failing, hanging, says, until, votes
from tests.gateway.test_modes import exported

KEY = {"Idempotency-Key": "order-17"}
FORMS = {
    "menu": ({"primary": votes(*UNSURE)}, votes(0, 1), lambda gateway, **rest: gateway.decide(**rest)),
    "text": (
        {"form": "text", "primary": says("mine", 0.1)}, says("theirs"), lambda gateway, **rest: gateway.chat(**rest)
    ),
}  # fmt: skip


def leaving(gateway, headers=None, body=DECISION, seconds=0.5):
    """A caller who does not wait long."""
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(f"{gateway.url}/v1/decisions", json=body, headers=headers, timeout=seconds)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("headers", [KEY, {}], ids=["key", "no key"])
def test_a_retry_keeps_the_decision_and_the_primary_s_leg_and_asks_the_guardian_again(house, form, headers):
    options, guardian, ask = FORMS[form]
    gateway = house(**options, guardian=failing())
    for _ in range(3):
        error_of(ask(gateway, headers=headers), 502, "guardian_failed")
    gateway.primary.reply = votes(0.9, 0.1) if form == "menu" else says("mine", 0.9)
    gateway.guardian.reply = guardian
    reply = ask(gateway, headers=headers)
    assert reply.headers["x-arbitrage-decided-by"] == "guardian"
    assert (len(gateway.primary.bodies), len(gateway.guardian.bodies)) == (1, 4)
    [record] = gateway.records()
    assert record.id == reply.headers["x-arbitrage-decision-id"]
    assert (record.decision.pending, record.completion.finish) == (False, "stop")
    assert [leg.role for leg in record.decision.legs] == ["primary", "guardian"]
    assert gateway.with_store(lambda store: integrity.verify(store)) == []


def test_delivery_ends_the_reuse_of_a_leg(house):
    gateway = house(primary=votes(*UNSURE), guardian=failing())
    gateway.decide()
    gateway.guardian.reply = votes(0, 1)
    ids = [gateway.decide().headers["x-arbitrage-decision-id"] for _ in range(2)]
    assert len(set(ids)) == 2
    assert len(gateway.primary.bodies) == 2


def test_a_key_keeps_its_decision_across_a_restart_and_refuses_another_body_meanwhile(house):
    gateway = house(primary=votes(*UNSURE), guardian=failing())
    error_of(gateway.decide(headers=KEY), 502)
    gateway.restart()
    error_of(gateway.decide({**DECISION, "input": "Another."}, headers=KEY), 422, "idempotency_key_reused")
    gateway.guardian.reply = votes(0, 1)
    first, again = gateway.decide(headers=KEY), gateway.decide(headers=KEY)
    assert first.content == again.content
    assert len(gateway.primary.bodies) == 1


@pytest.mark.parametrize("headers", [KEY, {}], ids=["key", "no key"])
def test_a_caller_who_leaves_and_comes_back_gets_the_same_decision(house, headers):
    gateway = house(primary=votes(*UNSURE), guardian=hanging)
    leaving(gateway, headers)
    [record] = until(lambda: [r for r in gateway.records() if r.completion])
    assert (record.decided_by, record.decision.pending, record.completion.finish) == ("guardian", True, "cancelled")
    gateway.guardian.reply = votes(0, 1)
    assert gateway.decide(headers=headers).headers["x-arbitrage-decision-id"] == record.id
    assert len(gateway.primary.bodies) == 1


def test_another_version_of_the_policy_decides_anew(house):
    gateway = house(primary=votes(*UNSURE), guardian=failing())
    gateway.decide()
    other = gateway.certificate(alpha=0.1).to_dict()
    assert gateway.put("/v1/arbitrage/policies/support", {"certificate": other}).status_code == 200
    gateway.decide()
    assert len(gateway.primary.bodies) == len(gateway.records()) == 2


def test_one_failed_question_loses_none_of_the_others_and_a_retry_keeps_them(house):
    def primary(path, body, number):
        return votes(*(UNSURE if "unsure" in str(body) else (0.9, 0.1)))(path, body, number)

    gateway = house(primary=primary, guardian=failing(), policy={"audit_rate": 1.0})
    [plain] = DECISION["questions"]
    body = {**DECISION, "questions": [plain, {**plain, "instructions": "unsure?"}, plain]}
    error_of(gateway.decide(body, headers=KEY), 502, "guardian_failed")
    assert sorted(r.decided_by for r in gateway.records()) == ["guardian", "primary", "primary"]
    calls = len(gateway.primary.bodies)
    gateway.guardian.reply = votes(0, 1)
    answers = gateway.decide(body, headers=KEY).json()["answers"]
    assert [answer["arbitrage"]["decided_by"] for answer in answers] == ["primary", "guardian", "primary"]
    assert {answer["arbitrage"]["id"] for answer in answers} == {r.id for r in gateway.records()}
    assert (len(gateway.primary.bodies), calls) == (3, 3)


@pytest.mark.parametrize("mode", [{"mode": "shadow"}, {"audit_rate": 1.0}], ids=["shadow", "audited"])
def test_limits_errors_and_callers_who_leave_are_rows_of_the_export(house, mode):
    gateway = house(primary=votes(*UNSURE), policy=mode, gateway={"guardian_calls_per_minute": 3})
    gateway.guardian.reply = failing(400)
    error_of(gateway.decide({**DECISION, "input": "1"}), 502)
    gateway.guardian.reply = hanging
    leaving(gateway, body={**DECISION, "input": "2"})
    until(lambda: len(gateway.records()) == 2)
    gateway.guardian.reply = votes(0, 1)
    for k in range(6):
        gateway.decide({**DECISION, "input": f"limited {k}"})
    log = ScoreLog.read(exported(gateway, "--score-log"))
    assert len(log) == len(gateway.primary.bodies) == 8
    assert log.missing.sum() >= 5
    assert not log.no_opinion.any()
    assert gateway.with_store(lambda store: integrity.verify(store)) == []


def test_a_drawn_decision_whose_guardian_failed_is_audited_later(house):
    gateway = house(primary=votes(*UNSURE), guardian=failing(), policy={"audit_rate": 1.0})
    replies = iter([failing(), *[votes(0, 1)] * 9])
    gateway.guardian.reply = lambda *asked: next(replies)(*asked)
    error_of(gateway.decide(), 502)
    [record] = until(lambda: [r for r in gateway.records() if r.audit])
    assert record.decision.audited
    log = ScoreLog.read(exported(gateway, "--score-log"))
    assert log.guardian.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("policy", "headers", "count"), [({"audit_rate": 1.0}, {}, 1), ({}, KEY, 1), ({}, {}, 0)],
    ids=["drawn", "keyed", "plain"],
)  # fmt: skip
def test_a_drawn_or_keyed_decision_is_on_disk_while_the_guardian_is_being_asked(house, policy, headers, count):
    gateway = house(primary=votes(*UNSURE), guardian=hanging, policy=policy)
    asking = threading.Thread(target=leaving, args=(gateway, headers), kwargs={"seconds": 2})
    asking.start()
    until(lambda: gateway.guardian.under_way)
    records = gateway.records()
    assert asking.is_alive()
    assert [(r.decision.pending, r.completion, r.decision.audited) for r in records] == [
        (True, None, bool(policy))
    ] * count
    asking.join(60)
    assert not asking.is_alive()


def test_a_text_that_was_chatted_about_in_vain_keeps_its_primary_s_answer_in_the_record(house):
    gateway = house(form="text", primary=says("mine", 0.1), guardian=failing(), policy={"content": "full"})
    gateway.chat(CHAT, headers=KEY)
    gateway.guardian.reply = says("theirs")
    gateway.chat(CHAT, headers=KEY)
    [record] = gateway.records()
    assert (record.decision.content.primary_answer, record.decision.content.answer["content"]) == ("mine", "theirs")
