import asyncio
import socket
import time
from typing import ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from conformal_arbitrage import Certificate, ConfigError, Query, ScoreLog
from conformal_arbitrage.cli import cli
from conformal_arbitrage.gateway.decider import Decider
from conformal_arbitrage.gateway.policies import LivePolicy, MenuPair
from conformal_arbitrage.live.config import PolicyConfig
from conformal_arbitrage.store import events, outbox
from conformal_arbitrage.store.outbox import Audit
from conformal_arbitrage.store.record import MenuQuestion, TextQuestion
from tests.gateway.house import (
    DECISION,
    QUESTION,
    SURE,
    UNSURE,
    error_of,
    failing,
    hanging,
    says,
    until,
    votes,
)


def command(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def exported(gateway, *how, code=0):
    """The record as a score log, written by the command line."""
    out = gateway.folder / "exported.parquet"
    result = command(
        "records", "export", "--policy", "support", *how, "-o", out, "--config", gateway.path, "--json", code=code
    )
    return out if code == 0 else result


def truth(path, body, number):
    """A Guardian that agrees with the Primary where that is sure."""
    return votes(*((0, 1) if "unsure" in str(body["input"]) else (1, 0)))(path, body, number)


def by_letter(path, body, number):
    """A Primary that is sure of plain letters only."""
    return votes(*(UNSURE if "unsure" in str(body["input"]) else SURE))(path, body, number)


def shadowing(house, **options):
    return house(
        certificate=False,
        primary=by_letter,
        guardian=truth,
        policy={"mode": "shadow", **options.pop("policy", {})},
        **options,
    )


def letters(gateway, count=60):
    for k in range(count):
        reply = gateway.decide({**DECISION, "input": "unsure" if k % 3 == 0 else "plain"})
        assert reply.status_code == 200


def test_in_shadow_mode_both_are_asked_and_the_guardian_s_choice_is_given(house):
    gateway = house(policy={"mode": "shadow"})
    [answer] = gateway.decide().json()["answers"]
    assert (answer["choice"], answer["arbitrage"]["decided_by"]) == ("b", "guardian")
    assert (len(gateway.primary.bodies), len(gateway.guardian.bodies)) == (1, 1)
    [record] = gateway.records()
    assert record.decision.mode == "shadow"
    assert record.decision.candidates == (0,)  # what the rule would have made of it
    assert [leg.scores for leg in record.decision.legs] == [(0.9, 0.1, 0.0), (0.0, 1.0, 0.0)]


def test_shadow_mode_does_without_a_certificate_and_promises_nothing(house):
    gateway = shadowing(house)
    reply = gateway.decide()
    assert reply.headers["x-arbitrage-alpha"] == "none"
    [answer] = reply.json()["answers"]
    assert (answer["arbitrage"]["guarantee"], answer["arbitrage"]["alpha"]) == ("none", None)
    assert "no certificate" in answer["arbitrage"]["reason"]


def test_in_shadow_mode_a_primary_that_fails_is_recorded_and_a_guardian_that_fails_is_an_error(house):
    gateway = house(policy={"mode": "shadow"}, primary=failing())
    assert gateway.decide().json()["answers"][0]["choice"] == "b"
    gateway.guardian.reply = failing(400)
    error_of(gateway.decide(), 502, "guardian_failed")
    gateway.guardian.reply = votes(0, 1)
    log = ScoreLog.read(exported(gateway, "--score-log"))
    assert log.missing.tolist() == [False, True]


def test_in_shadow_mode_too_the_safe_action_is_given_if_the_guardian_fails(house, caplog):
    gateway = house(policy={"mode": "shadow"}, guardian=failing(), task={"safe_action": "c"})
    [answer] = gateway.decide().json()["answers"]
    assert (answer["choice"], answer["arbitrage"]["decided_by"]) == ("c", "fallback")
    assert answer["arbitrage"]["guarantee"] == "none"
    [record] = gateway.records()
    assert (record.decided_by, record.decision.action, record.decision.legs[1].scores) == ("fallback", 2, None)
    refused = gateway.decide({**DECISION, "questions": [{**QUESTION, "choices": [{"value": "x"}, {"value": "y"}]}]})
    error_of(refused, 502, "guardian_failed")
    assert "the safe action 'c' is not one of the actions" in caplog.text


def test_in_shadow_mode_too_the_safe_answer_is_given_if_the_guardian_fails(house):
    gateway = house(form="text", policy={"mode": "shadow"}, guardian=failing(), task={"safe_answer": "Please call us."})
    reply = gateway.chat().json()
    assert reply["choices"][0]["message"]["content"] == "Please call us."
    assert (reply["arbitrage"]["decided_by"], reply["arbitrage"]["guarantee"]) == ("fallback", "none")


def test_free_text_is_shadowed_too(house):
    gateway = house(form="text", policy={"mode": "shadow", "content": "full"})
    assert gateway.chat().json()["choices"][0]["message"]["content"] == "theirs"
    [record] = gateway.records()
    assert record.decision.content.primary_answer == "mine"
    assert record.decision.content.answer["content"] == "theirs"


def test_a_shadow_export_calibrates_and_the_certificate_serves(house):
    gateway = shadowing(house)
    letters(gateway)
    out = exported(gateway, "--score-log")
    log = ScoreLog.read(out)
    assert len(log) == 60
    assert not log.missing.any()
    rule = gateway.folder / "fresh.json"
    command("calibrate", out, "--alpha", "0.1", "--boundary", "include", "-o", rule)
    assert Certificate.load(rule).identities["primary"]["kind"] == "decisions"
    gateway.sections["policies.support"] = {"certificate": "fresh.json"}
    gateway.certified = False
    gateway.stop()
    gateway.configure()
    gateway.start()
    for text, decided_by in (("plain", "primary"), ("unsure", "guardian")):
        [answer] = gateway.decide({**DECISION, "input": text}).json()["answers"]
        assert (answer["arbitrage"]["decided_by"], answer["arbitrage"]["guarantee"]) == (decided_by, "crc")


def test_free_text_recalibrates_from_grades_that_came_as_feedback(house):
    gateway = house(form="text", policy={"mode": "shadow"})
    for k in range(60):
        gateway.primary.reply = says("mine", 0.9 if k % 3 else 0.4)
        id = gateway.chat().headers["x-arbitrage-decision-id"]
        grades = {"primary": 1.0 if k % 3 else 0.0, "guardian": 1.0}
        assert gateway.post(f"/v1/arbitrage/records/{id}/feedback", {"grades": grades}).status_code == 200
    gateway.primary.reply = failing()
    gateway.chat()
    out = exported(gateway, "--score-log")
    rule = gateway.folder / "fresh.json"
    command(
        "calibrate", out, "--alpha", "0.2", "--guardian-sees", "all", "--missing-guardian", "worst_case", "-o", rule
    )
    assert Certificate.load(rule).n == 61


def test_only_shadow_and_audited_rows_are_exported_for_calibration(house):
    gateway = house(primary=by_letter, guardian=truth)
    letters(gateway, 6)
    assert "no rows fit" in str(exported(gateway, "--score-log", code=2).stderr)
    gateway.sections["policies.support"] = {"audit_rate": 1.0}
    gateway.stop()
    gateway.configure()
    gateway.start()
    letters(gateway, 6)
    until(lambda: all(r.audit or r.decided_by == "guardian" for r in gateway.records(limit=6)))
    log = ScoreLog.read(exported(gateway, "--score-log"))
    assert set(log.id.tolist()) == {record.id for record in gateway.records(limit=6)}


def test_an_export_of_everything_is_marked_and_calibrate_refuses_it(house):
    gateway = house(primary=by_letter, guardian=truth)
    letters(gateway, 30)
    out = exported(gateway, "--all")
    assert "unfit_for_calibration" in ScoreLog.read(out).extra
    refused = command("calibrate", out, "--alpha", "0.1", "-o", gateway.folder / "no.json", code=2)
    assert "by their scores" in str(refused.stderr)


def test_exporting_both_ways_or_neither_is_a_mistake(house):
    gateway = house()
    gateway.decide()
    exported(gateway, code=2)
    exported(gateway, "--all", "--score-log", code=2)


def test_an_audit_asks_the_guardian_about_everything_in_the_background(house):
    gateway = house(policy={"audit_rate": 1.0})
    reply = gateway.decide()
    assert reply.json()["answers"][0]["arbitrage"]["decided_by"] == "primary"
    [record] = until(lambda: [r for r in gateway.records() if r.audit])
    assert record.decision.audited
    assert record.audit.scores == (0.0, 1.0, 0.0)
    assert len(gateway.guardian.bodies) == 1
    log = ScoreLog.read(exported(gateway, "--score-log"))
    assert log.guardian.tolist() == [0.0, 1.0, 0.0]


def test_the_audit_coin_keeps_its_rate_whatever_the_scores(house):
    gateway = house(primary=by_letter, guardian=truth, policy={"audit_rate": 0.3})
    questions = DECISION["questions"] * 30
    for _ in range(10):
        for text in ("plain", "unsure"):
            gateway.decide({**DECISION, "input": text, "questions": questions})
    records = gateway.records(limit=1000)
    assert len(records) == 600
    for by in ("primary", "guardian"):
        share = np.mean([r.decision.audited for r in records if r.decided_by == by])
        assert 0.15 < share < 0.45  # six standard deviations: ids and secret are fresh in every run


def test_audits_are_done_after_a_restart(house, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.gateway.audits.LEASE", 1.0)
    gateway = house(policy={"audit_rate": 1.0}, guardian=hanging)
    gateway.decide()
    until(lambda: gateway.guardian.bodies)
    gateway.stop()
    assert gateway.records()[0].audit is None
    gateway.guardian.reply = votes(0, 1)
    gateway.start()
    [record] = until(lambda: [r for r in gateway.records() if r.audit])
    assert record.audit.scores == (0.0, 1.0, 0.0)


def test_an_audit_is_kept_while_the_guardian_takes_its_time(house, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.gateway.audits.LEASE", 0.6)

    async def slow(*asked):
        await asyncio.sleep(2)
        return votes(0, 1)(*asked)

    gateway = house(policy={"audit_rate": 1.0}, guardian=slow)
    gateway.decide()
    until(lambda: gateway.guardian.bodies)
    for _ in range(10):
        time.sleep(0.15)
        assert gateway.with_store(lambda store: store.run(outbox.take_audits, limit=9, lease=60)) == []
    [record] = until(lambda: [r for r in gateway.records() if r.audit])
    assert (record.audit.scores, len(gateway.guardian.bodies)) == ((0.0, 1.0, 0.0), 1)


def test_audits_that_do_not_fit_the_policy_any_more_stop_no_others(house):
    gateway = house(policy={"audit_rate": 1.0})
    odd = [
        Audit(id="0a", policy="support", question=TextQuestion(request={})),
        Audit(id="0b", policy="gone", question=MenuQuestion(context="", actions=("a", "b"))),
        Audit(id="0c", policy="support", question=MenuQuestion(context="", actions=())),
    ]
    gateway.with_store(lambda store: store.run(events.commit, [], audits=odd))
    time.sleep(1)
    gateway.decide()
    until(lambda: [r for r in gateway.records() if r.audit])


def test_an_audit_in_free_text_keeps_no_more_content_than_the_policy_says(house):
    for content in ("full", "hashed", "off"):
        gateway = house(form="text", policy={"audit_rate": 1.0, "content": content, "callers_grade": True})
        gateway.chat()
        [record] = until(lambda gateway=gateway: [r for r in gateway.records() if r.audit])
        assert record.audit.answer == ("theirs" if content == "full" else None)


def test_a_guardian_that_hangs_in_an_audit_holds_up_nobody(house):
    gateway = house(policy={"audit_rate": 1.0}, guardian=hanging)
    start = time.monotonic()
    for _ in range(20):
        assert gateway.decide().status_code == 200
    assert time.monotonic() - start < 10


def test_a_caller_who_leaves_while_sending_is_not_a_failure(house, caplog):
    gateway = house()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as peer:
        head = "POST /v1/decisions HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Content-Length: 99"
        peer.sendall("\r\n".join([*head, "", "{"]).encode())
        time.sleep(0.2)
    time.sleep(0.3)
    assert gateway.decide().status_code == 200
    own = [r for r in caplog.records if not r.name.startswith("opentelemetry")]  # its thread outlives its own tests
    assert not [r for r in own if r.levelname == "ERROR" or r.exc_info]


def test_a_shadow_row_whose_guardian_failed_stays_in_the_export_as_missing(house):
    def guardian(path, body, number):
        return (500, {}) if "unsure" in str(body["input"]) else truth(path, body, number)

    gateway = house(certificate=False, primary=by_letter, guardian=guardian, policy={"mode": "shadow"})
    replies = [gateway.decide({**DECISION, "input": text}).status_code for text in ("plain", "unsure", "plain")]
    assert replies == [200, 502, 200]
    log = ScoreLog.read(exported(gateway, "--score-log"))
    assert log.missing.tolist() == [False, True, False]
    assert not log.no_opinion.any()


class Hanging:
    """A model that never answers and says how its call ended."""

    identity: ClassVar = {}

    def __init__(self):
        self.ended = None

    async def score(self, query):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise


async def test_in_shadow_mode_a_choice_abandoned_during_the_primary_s_call_ends_that_to_the_guardian():
    guardian = Hanging()
    policy = LivePolicy(
        name="p", version=0, settings=PolicyConfig(mode="shadow"), certificate=None, rule=None, alpha=None, mode="shadow",
        pair=MenuPair(primary=Hanging(), guardian=guardian), identities_sha256="",
    )  # fmt: skip
    beginning = asyncio.ensure_future(
        anext(Decider(bytes(32)).begin(policy, Query("q", ("a", "b"), id="1"), "caller").steps)
    )
    await asyncio.sleep(0.05)
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    assert guardian.ended  # the end of the event loop would cancel it, too == "cancelled"


def test_audits_that_nobody_can_grade_are_refused_and_never_become_losses(house):
    hashed = {"audit_rate": 1.0, "content": "hashed"}
    with pytest.raises(ConfigError, match=r'audits cannot be graded.* set content = "full"'):
        house(form="text", policy=hashed)
    gateway = house(form="text", policy={**hashed, "mode": "shadow"})
    shadowed = gateway.config.policies["support"]
    assert shadowed.ungradable("text")
    for graded in ({"content": "full"}, {"callers_grade": True}, {"audit_rate": 0.0}):
        assert replace(shadowed, **graded).ungradable("text") is None
    assert shadowed.ungradable("menu") is None
