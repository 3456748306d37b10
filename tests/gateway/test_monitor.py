"""The ledger, states and alarms of a real gateway over scripted models."""

import json
import re
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from click.testing import CliRunner

from conformal_arbitrage import ScoreLog
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import cli
from conformal_arbitrage.errors import CertificateError
from conformal_arbitrage.store import events, integrity, policies
from conformal_arbitrage.store import ledger as stored_ledger
from conformal_arbitrage.store.ledger import LedgerKey
from conformal_arbitrage.store.record import AlarmBody
from tests.certificates import altered
from tests.gateway.house import CHAT, DECISION, MENU, QUESTION, SURE, UNSURE, error_of, failing, says, until, votes

AUDITED = {"audit_rate": 1.0}


def ledger(made, version=1, lifts=0):
    """The rows of the support policy's only ledger of a version, in order."""
    [key] = [
        one.key
        for one in made.with_store(lambda store: store.run(stored_ledger.ledgers, "support"))
        if (one.key.version, one.key.lifts) == (version, lifts)
    ]
    rows = made.with_store(lambda store: store.run(stored_ledger.changes, key, 0))
    return sorted(rows, key=lambda row: row.seq)


def settled(made, count, **options):
    """The ledger once this many losses are known."""
    return until(lambda: (rows := ledger(made, **options)) and sum(r.loss is not None for r in rows) >= count and rows)


def monitor(made):
    return made.get("/v1/arbitrage/policies/support/monitor").json()


def red(made):
    """Let audited losses go on until the alarm, and give the document of the monitor."""
    for _ in range(60):
        made.decide({**DECISION, "questions": [QUESTION] * 20})
        if monitor(made)["mode"] == "safe":
            break
        time.sleep(0.3)
    return until(lambda: (shown := monitor(made))["mode"] == "safe" and shown)


def test_the_coin_writes_a_row_with_the_primary_s_leg_and_an_audit_settles_it(house):
    gateway = house(policy=AUDITED)  # the Guardian likes another action than the sure Primary
    ids = [gateway.decide().json()["answers"][0]["arbitrage"]["id"] for _ in range(3)]
    rows = settled(gateway, 3)
    assert [(row.seq, row.id, row.loss) for row in rows] == [(k + 1, id, 1.0) for k, id in enumerate(ids)]
    assert all(23 < (row.due - row.drawn) / 3600 < 25 for row in rows)
    shown = until(lambda: (doc := monitor(gateway))["audits"]["known"] == 3 and doc)
    assert (shown["state"], shown["watched"], shown["mean_loss"]) == ("blind", True, 1.0)
    assert "too few audits" in " ".join(shown["reasons"])
    assert shown["lines"]["alpha"] == 0.05
    assert shown["lines"]["red"] > 0.05


def test_a_trigger_that_hides_losses_costs_the_guarantee_and_is_found(house):
    gateway = house(policy=AUDITED)
    with closing(sqlite3.connect(gateway.folder / "arbitrage.sqlite", isolation_level=None, timeout=30)) as database:
        database.execute(
            "create trigger hide after update of loss on ledger when new.loss > 0 begin "
            "update ledger set loss = 0.0 where id = new.id; end"
        )
    assert gateway.decide().json()["answers"][0]["arbitrage"]["guarantee"] == "crc"
    shown = until(lambda: (doc := monitor(gateway))["guarantee"] == "none" and doc)
    assert "row 1 of its ledger is not what was written" in shown["reason"]
    assert gateway.decide().json()["answers"][0]["arbitrage"]["guarantee"] == "none"
    faults = gateway.with_store(integrity.verify)
    assert any("of its ledger is not what was written" in fault for fault in faults)


def with_sql(gateway, statement):
    """Run a statement behind the gateway's back."""
    with closing(sqlite3.connect(gateway.folder / "arbitrage.sqlite", isolation_level=None, timeout=30)) as database:
        database.execute(statement)


def verify_output(gateway):
    return CliRunner().invoke(cli, ["records", "verify", "--config", str(gateway.path)]).output


def test_an_audit_that_a_trigger_rewrites_tells_no_loss(house, caplog):
    gateway = house(policy=AUDITED)
    with_sql(
        gateway,
        "create trigger rewrite after insert on events when new.kind = 'audit' begin update events "
        "set body = json_set(body, '$.scores', json('[0.0, 1.0]')) where writer = new.writer and seq = new.seq; end",
    )
    gateway.decide()
    until(lambda: "an audited decision cannot be read" in caplog.text)
    [row] = ledger(gateway)
    assert row.loss is None
    assert "it is not what was written" in verify_output(gateway)


def test_a_certificate_that_is_replaced_for_a_moment_makes_no_loss_smaller(house):
    gateway = house(policy=AUDITED)
    gateway.calibration = {"loss_bound": 100}
    other = json.dumps(gateway.certificate().to_dict()).replace("'", "''")
    with_sql(gateway, "create table kept as select * from policies")
    with_sql(gateway, f"update policies set certificate = '{other}'")
    gateway.decide()
    until(lambda: [one for one in gateway.records() if one.audit])
    until(lambda: gateway.with_store(lambda store: store.run(stored_ledger.news, ["support"])) == [])
    with_sql(gateway, "update policies set certificate = (select certificate from kept)")
    with_sql(gateway, "drop table kept")
    assert ledger(gateway)[0].loss is None


def test_a_forged_audit_tells_no_loss_and_enters_no_calibration_row(house, caplog):
    gateway = house(policy=AUDITED, guardian=failing(503))
    gateway.decide()
    [row] = until(lambda: ledger(gateway))
    forged = """'{"scores":[0.0,1.0]}'"""
    insert = "insert into events (writer, seq, hash, id, kind, at, body) values"
    with_sql(gateway, f"{insert} ('0f', 1, 'x', '{row.id}', 'audit', 1.0, {forged})")
    with_sql(gateway, "update ledger set news = news + 1")
    until(lambda: "an audited decision cannot be read" in caplog.text)
    assert ledger(gateway)[0].loss is None
    gateway.with_store(events.gather_rows)
    models = gateway.records()[0].decision.identities_sha256
    rows = gateway.with_store(
        lambda store: store.run(events.calibration_rows, "support", identities_sha256=models, since=0.0)
    )
    assert [kept.guardian for kept in rows] in ([], [None])
    assert "writer 0f: no secret vouches for its events" in verify_output(gateway)


def test_losses_that_never_reach_the_ledger_are_found(house):
    gateway = house(policy=AUDITED)
    with_sql(
        gateway,
        "create trigger hush after update of news on ledger when new.news > 0 begin "
        "update ledger set news = 0 where id = new.id; end",
    )
    gateway.decide()
    until(lambda: [record for record in gateway.records() if record.audit is not None])
    assert "the loss in row 1 of its ledger is none, and by the record of the decision it is 1" in verify_output(
        gateway
    )


def test_a_deleted_alarm_is_found(house):
    gateway = house(policy=AUDITED)
    red(gateway)
    with closing(sqlite3.connect(gateway.folder / "arbitrage.sqlite", isolation_level=None, timeout=30)) as database:
        database.execute("delete from events where kind = 'alarm'")
    assert any(
        "events were removed" in fault or "were removed" in fault for fault in gateway.with_store(integrity.verify)
    )


def test_a_deferral_with_everything_in_sight_has_no_loss_and_costs_no_audit(house):
    gateway = house(policy=AUDITED, primary=votes(*UNSURE))
    gateway.decide()
    [row] = settled(gateway, 1)
    assert (row.loss, row.served) == (0.0, None)
    time.sleep(1.0)
    assert len(gateway.guardian.bodies) == 1  # its own answer
    log = ScoreLog.read(exported(gateway))
    assert not log.missing.any()


def exported(made):
    out = made.folder / "log.parquet"
    arguments = ["records", "export", "--policy", "support", "--score-log", "-o", str(out), "--config", str(made.path)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output + str(result.exception)
    return out


def test_a_deferral_that_delivers_nothing_still_counts_without_a_loss(house):
    gateway = house(policy=AUDITED, primary=votes(*UNSURE), guardian=failing())
    error_of(gateway.decide(), 502)
    [row] = until(lambda: [row for row in ledger(gateway) if not row.delivered])
    assert (row.loss, row.served) == (0.0, None)


def test_a_fallback_is_no_loss_of_the_rule_and_a_whole_one_as_served(house):
    gateway = house(policy=AUDITED, primary=votes(*UNSURE), guardian=failing(), task={"safe_action": "c"})
    [answer] = gateway.decide().json()["answers"]
    assert answer["arbitrage"]["decided_by"] == "fallback"
    [row] = until(lambda: [row for row in ledger(gateway) if row.served is not None])
    assert (row.loss, row.served) == (0.0, 1.0)


def test_a_guardian_that_keeps_failing_is_amber_as_served_and_never_red(house, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.gateway.watcher.SERVED_EVERY", 0.1)
    gateway = house(policy=AUDITED, primary=votes(*UNSURE), guardian=failing(), task={"safe_action": "c"})
    for _ in range(5):
        gateway.decide({**DECISION, "questions": [QUESTION] * 20})
    shown = until(lambda: (doc := monitor(gateway)).get("as_served") and doc["as_served"]["mean"] == 1.0 and doc, 30)
    assert shown["as_served"]["above_alpha"]
    assert (shown["state"], shown["mode"], shown["mean_loss"]) == ("amber", "enforce", 0.0)
    assert "the Guardian fails" in " ".join(shown["reasons"])
    assert 'arbitrage_served_loss_mean{policy="support"} 1.0' in gateway.get("/metrics").text


def test_requests_that_name_a_session_count_once_an_hour(house):
    gateway = house(policy={**AUDITED, "session": "arbitrage.session"})
    for name in ("one", "one", "two"):
        gateway.chat({**MENU, "arbitrage": {**MENU["arbitrage"], "session": name}})
    for _ in range(2):
        gateway.chat({**MENU, "user": "somebody"})
    gateway.chat(MENU)
    assert len(settled(gateway, 5)) == 5
    assert len(gateway.records()) == 6
    assert until(lambda: monitor(gateway)["audits"]["collapsed"]) == 1


def wrong_answers_of_one_user(house, **policy):
    gateway = house(policy={**AUDITED, **policy})
    for _ in range(70):  # the hour may end meanwhile
        gateway.chat({**MENU, "user": "everybody", "arbitrage": {**MENU["arbitrage"], "session": "always"}})
    return gateway


def test_a_constant_user_or_session_cannot_merge_audits(house):
    gateway = wrong_answers_of_one_user(house)
    assert until(lambda: monitor(gateway)["state"] == "red", 60)
    assert monitor(gateway)["audits"]["collapsed"] == 0


@pytest.mark.parametrize("session", ["user", "arbitrage.session"])
def test_draws_that_fall_into_one_session_turn_a_policy_amber_which_says_why(house, session):
    gateway = wrong_answers_of_one_user(house, session=session)
    shown = until(
        lambda: (doc := monitor(gateway)).get("state") == "amber" and doc["audits"]["collapsed"] >= 68 and doc
    )
    assert "draws fell into sessions that had an audit within the hour" in " ".join(shown["reasons"])
    assert "collapsed" in gateway.get("/metrics").text


def test_grades_settle_free_text_once_the_guardian_has_answered(house):
    gateway = house(form="text", policy={**AUDITED, "content": "full"})
    id = gateway.chat().headers["x-arbitrage-decision-id"]
    until(lambda: [r for r in gateway.records() if r.audit])
    [row] = ledger(gateway)
    assert row.loss is None
    assert 13 < (row.due - row.drawn) / 86400 < 15
    gateway.post(f"/v1/arbitrage/records/{id}/feedback", {"grades": {"primary": 0.25, "guardian": 1.0}})
    [row] = settled(gateway, 1)
    assert row.loss == 0.75
    gateway.post(
        f"/v1/arbitrage/records/{id}/feedback",
        {"grades": {"primary": 1.0, "guardian": 1.0}, "reason": "seen again"},
    )
    time.sleep(1.0)
    assert ledger(gateway)[0].loss == 0.75


def test_deferred_text_has_no_loss_at_once(house):
    gateway = house(form="text", policy={**AUDITED, "content": "full"}, primary=says("mine", 0.1))
    gateway.chat()
    [row] = settled(gateway, 1)
    assert (row.loss, len(gateway.guardian.bodies)) == (0.0, 1)


def test_an_audit_that_fails_for_good_is_missing_from_then_on(house):
    gateway = house(policy=AUDITED, guardian=failing(400))
    gateway.decide()
    shown = until(lambda: (doc := monitor(gateway)).get("audits", {}).get("missing") == 1 and doc)
    assert shown["state"] == "amber"
    assert "have no outcome" in " ".join(shown["reasons"])


def test_losses_raise_one_alarm_and_every_answer_after_it_is_the_guardian_s(house):
    gateway = house(policy=AUDITED)
    shown = red(gateway)
    assert (shown["state"], shown["cause"]) == ("red", "losses")
    assert shown["alarm"]["cause"] == "losses"
    reply = gateway.decide()
    [answer] = reply.json()["answers"]
    assert (answer["choice"], answer["arbitrage"]["decided_by"]) == ("b", "guardian")
    assert answer["arbitrage"]["guarantee"] == "crc"  # with everything in sight the loss is 0 by definition
    record = gateway.records()[0]
    assert (record.decision.mode, record.decision.candidates, record.decision.relaxation) == ("safe", (0,), None)
    assert not record.decision.audited
    [notice] = gateway.with_store(lambda store: store.run(policies.notices, "support"))
    assert isinstance(notice.body, AlarmBody)
    metrics = gateway.get("/metrics").text
    assert 'arbitrage_safe_mode{policy="support"} 1.0' in metrics
    assert 'arbitrage_state{policy="support",state="red"} 1.0' in metrics
    assert 'arbitrage_evidence{line="red",policy="support"}' in metrics
    gateway.restart()  # it stands
    assert gateway.decide().json()["answers"][0]["arbitrage"]["decided_by"] == "guardian"
    assert gateway.with_store(lambda store: integrity.verify(store)) == []


def test_another_attempt_at_a_request_from_before_red_is_not_answered_by_the_primary(house):
    """Nothing of it was delivered: the Primary was sure of one question, and the Guardian failed on the other."""
    hard = {**QUESTION, "choices": [{"value": "d"}, {"value": "e"}, {"value": "f"}]}
    of_any = votes(*SURE)

    def primary(path, body, number):
        doubtful = body["questions"][0]["choices"][0]["value"] == "d"
        return (votes(*UNSURE) if doubtful else of_any)(path, body, number)

    gateway = house(policy=AUDITED, primary=primary)
    both, key = {**DECISION, "questions": [QUESTION, hard]}, {"Idempotency-Key": "order-17"}
    guardian, gateway.guardian.reply = gateway.guardian.reply, failing()
    error_of(gateway.decide(both, headers=key), 502)
    error_of(gateway.decide(both), 502)
    gateway.guardian.reply = guardian
    red(gateway)
    refused = gateway.decide(both, headers=key)
    assert refused.status_code == 409, refused.text
    answers = gateway.decide(both).json()["answers"]
    assert [answer["arbitrage"]["decided_by"] for answer in answers] == ["guardian", "guardian"]


def test_rows_of_safe_mode_are_fit_for_calibration(house):
    gateway = house(policy=AUDITED)
    red(gateway)
    for _ in range(3):
        gateway.decide()
    log = ScoreLog.read(exported(gateway))
    modes = log.extra["mode"].tolist()
    assert modes[-3:] == ["safe"] * 3
    assert not log.missing[-3:].any()


def test_lifting_needs_a_reason_voids_the_promise_and_begins_a_new_ledger(house):
    gateway = house(policy=AUDITED)
    red(gateway)
    path = "/v1/arbitrage/policies/support/lift"
    error_of(gateway.post(path, {"reason": "  "}), 422)
    error_of(gateway.post(path, {}), 400)
    lifted = gateway.post(path, {"reason": "the prompt was taken back"})
    assert lifted.status_code == 200, lifted.text
    error_of(gateway.post(path, {"reason": "again"}), 409, "no_alarm")
    [answer] = gateway.decide().json()["answers"]
    assert answer["arbitrage"]["decided_by"] == "primary"
    assert answer["arbitrage"]["guarantee"] == "none"
    assert "lifted without a new certificate" in answer["arbitrage"]["reason"]
    rows = settled(gateway, 1, lifts=1)
    assert [row.seq for row in rows] == [1]
    assert monitor(gateway)["lifts"] == 1
    shown = red(gateway)  # the new ledger has an alarm of its own
    assert shown["alarm"] is not None
    kinds = [notice.body.kind for notice in gateway.with_store(lambda store: store.run(policies.notices))]
    assert kinds == ["alarm", "lift", "alarm"]


def test_a_key_that_may_only_call_cannot_lift_or_look(house):
    gateway = house(policy=AUDITED)
    call, admin = gateway.keyed("call"), gateway.keyed("admin")
    error_of(gateway.post("/v1/arbitrage/policies/support/lift", {"reason": "x"}, headers=call), 403)
    error_of(gateway.get("/v1/arbitrage/policies/support/monitor", headers=call), 403)
    assert gateway.get("/v1/arbitrage/policies/support/monitor", headers=admin).status_code == 200
    error_of(gateway.get("/v1/arbitrage/policies/other/monitor", headers=admin), 404)


def test_the_command_line_lifts_and_the_gateway_follows(house):
    gateway = house(policy=AUDITED)

    def lift(*options):
        return CliRunner().invoke(cli, ["policies", "lift", "support", *options, "--config", str(gateway.path)])

    assert lift("--reason", "none yet").exit_code == 2
    assert lift().exit_code == 2
    red(gateway)
    done = lift("--reason", "it was a test", "--json")
    assert done.exit_code == 0, done.output
    assert gateway.decide().json()["answers"][0]["arbitrage"]["decided_by"] == "primary"


def of_other_rows(gateway, *, seconds):
    """Return a certificate from other rows than the house's, made so many seconds from now."""
    created = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="seconds")
    certificate = altered(gateway.certificate(), log_sha256="5" * 64, created=created)
    return certificate.sign(ProjectSecret.find())


def test_a_certificate_of_rows_since_the_alarm_ends_safe_mode_and_older_rows_promise_nothing(house):
    gateway = house(policy=AUDITED)
    red(gateway)
    path = "/v1/arbitrage/policies/support"

    def installed(certificate):
        assert gateway.put(path, {"certificate": certificate.to_dict()}).status_code == 200
        [answer] = gateway.decide().json()["answers"]
        return answer["arbitrage"]["decided_by"], answer["arbitrage"]["guarantee"], answer["arbitrage"].get("reason")

    older = "the certificate's rows are older than the alarm of version 1: calibrate on rows since then"
    assert installed(gateway.certificate(alpha=0.06)) == ("primary", "none", older)  # the same log at another budget
    assert installed(of_other_rows(gateway, seconds=-60)) == ("primary", "none", older)
    assert installed(of_other_rows(gateway, seconds=2))[:2] == ("primary", "crc")
    assert [row.seq for row in settled(gateway, 1, version=4)] == [1]
    gateway.post(f"{path}/rollback", {})
    [answer] = gateway.decide().json()["answers"]
    assert (answer["arbitrage"]["guarantee"], answer["arbitrage"]["reason"]) == ("none", older)


def test_free_text_and_streams_are_deferred_in_safe_mode_too(house):
    gateway = house(form="text", policy={**AUDITED, "content": "full"})
    install_alarm(gateway)
    assert gateway.chat().json()["choices"][0]["message"]["content"] == "theirs"
    with gateway.client() as client:
        pieces = client.chat.completions.create(**CHAT, stream=True)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == "theirs"
    modes = {record.decision.mode for record in gateway.records()}
    assert modes == {"safe"}
    assert gateway.records()[0].decision.content.primary_answer == "mine"


def install_alarm(made, version=1):
    """Record an alarm as another gateway would."""
    body = AlarmBody(
        version=version, lifts=0, identities_sha256="other", cause="losses", audits=90, known=90, missing=0, line=0.07,
        log_evidence=4.0,
    )  # fmt: skip
    assert made.with_store(lambda store: store.run(policies.raise_alarm, "support", body))


def test_an_alarm_of_another_gateway_is_in_force_from_the_next_request(house):
    gateway = house()
    assert gateway.decide().json()["answers"][0]["arbitrage"]["decided_by"] == "primary"
    install_alarm(gateway)
    assert gateway.decide().json()["answers"][0]["arbitrage"]["decided_by"] == "guardian"


def test_failing_audits_are_told_apart_from_losses(house):
    gateway = house(policy=AUDITED, guardian=failing(400))
    shown = red(gateway)
    assert shown["cause"] == "failing audits"
    assert "audits fail" in " ".join(shown["reasons"])


def picky(path, body, number):
    """A Guardian that refuses some questions."""
    reply = failing(400) if "refuse me" in str(body) else votes(*SURE)
    return reply(path, body, number)


def exclude(gateway, id, *options, policy="support"):
    """Exclude a key by the command line, beside the gateway that serves on."""
    named = ["keys", "exclude", id, "--policy", policy, "--reason", "hostile", "--config", str(gateway.path)]
    return CliRunner().invoke(cli, [*named, *options]).output


def test_a_key_whose_audits_fail_is_named_and_can_be_excluded_which_ends_no_alarm(house):
    gateway = house(policy=AUDITED, guardian=picky)
    keys = {name: gateway.key("call") for name in ("honest", "hostile")}
    by = {name: {"Authorization": f"Bearer {secret}"} for name, (secret, _) in keys.items()}
    gateway.headers = gateway.keyed("admin")
    hostile = keys["hostile"][1]
    for number in range(120):
        refused = number % 4 == 0
        body = {**DECISION, "input": f"refuse me {number}" if refused else f"a letter {number}"}
        gateway.decide(body, headers=by["hostile" if refused else "honest"])
    until(lambda: monitor(gateway)["mode"] == "safe", 60)
    shown = until(lambda: f"key {hostile}" in str((doc := monitor(gateway))["reasons"]) and doc, 60)
    assert (shown["state"], shown["cause"]) == ("red", "failing audits")

    before = len(ledger(gateway))
    exclude(gateway, hostile)
    assert monitor(gateway)["mode"] == "safe"  # nobody is blessed by it
    assert gateway.post("/v1/arbitrage/policies/support/lift", {"reason": "excluded"}).status_code == 200
    for name in ("honest", "honest", "hostile", "hostile"):
        assert gateway.decide(headers=by[name]).json()["answers"][0]["arbitrage"]["guarantee"] == "none"
    assert len(settled(gateway, 2, lifts=1)) == 2  # of the honest
    assert len(ledger(gateway)) == before
    newest = {record.key_id: record.decision for record in reversed(gateway.records(limit=4))}
    assert (newest[hostile].overridden, newest[hostile].audited) == (True, False)
    assert CliRunner().invoke(cli, ["records", "verify", "--config", str(gateway.path)]).exit_code == 0


def test_questions_that_one_caller_spreads_over_several_keys_are_named_too(house, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.gateway.watcher.SERVED_EVERY", 0.1)
    gateway = house(policy=AUDITED, guardian=picky)
    keys = [gateway.key("call") for _ in range(3)]
    gateway.headers = gateway.keyed("admin")
    for number in range(12):
        sent = {"Authorization": f"Bearer {keys[number % 3][0]}"}
        gateway.decide({**DECISION, "input": f"refuse me {number}"}, headers=sent)
    named = until(lambda: re.search(r"12 audits .* of the API keys (.*)", "\n".join(monitor(gateway)["reasons"])), 60)
    assert len({id for _, id in keys if f"{id} (4)" in named[1]}) == 2


@pytest.mark.parametrize("form", ["menu", "text"])
def test_an_excluded_key_has_no_guarantee_and_others_keep_theirs(house, form):
    gateway = house(form=form, policy={**AUDITED, "content": "full"})
    (excluded, id), other = gateway.key("call"), gateway.keyed("call")
    ask = gateway.decide if form == "menu" else gateway.chat
    assert "excluded" not in ask(headers={"Authorization": f"Bearer {excluded}"}).text
    assert exclude(gateway, id) == f"The key is excluded: {id}, policy support\n"
    assert exclude(gateway, id) == f"The key is excluded, as before: {id}, policy support\n"
    theirs = ask(headers={"Authorization": f"Bearer {excluded}"})
    assert "its API key is excluded from the promise of policy support" in theirs.text
    assert ask(headers=other).status_code == 200
    decisions = {record.key_id == id: record.decision for record in gateway.records(limit=2)}
    assert decisions[False].no_guarantee is None
    assert [events.is_fit(decisions[name]) for name in (True, False)] == [False, True]
    assert len(ledger(gateway)) == 2
    assert exclude(gateway, id, "--end") == f"The key is no longer excluded: {id}, policy support\n"
    assert "excluded" not in ask(headers={"Authorization": f"Bearer {excluded}"}).text
    notices = gateway.with_store(lambda store: store.run(policies.notices, "support"))
    assert [(n.body.key, n.body.by, n.body.reason, n.body.ends) for n in notices] == [
        (id, "command line", "hostile", False),
        (id, "command line", "hostile", True),
    ]


def test_a_key_or_a_policy_that_there_is_not_cannot_be_excluded(house):
    gateway = house()
    assert "there is no key 'nobody'" in exclude(gateway, "nobody")
    assert "there is no policy 'absent'" in exclude(gateway, gateway.key("call")[1], policy="absent")


@pytest.mark.parametrize("kind", ["alarm", "exclusion"])
@pytest.mark.parametrize(
    "attack", ["delete from events", "update events set kind = 'lift'", "update events set at = 1.0"]
)
def test_a_removed_alarm_or_exclusion_does_not_put_its_policy_back_in_service(house, kind, attack):
    gateway = house(policy=AUDITED)
    if kind == "alarm":
        red(gateway)
    else:
        exclude(gateway, gateway.key("call")[1])
    with_sql(gateway, f"{attack} where kind = '{kind}'")
    assert "policy support: 0 of its alarms, lifts and exclusions are what was written" in verify_output(gateway)
    gateway.stop()
    with pytest.raises(CertificateError, match="is not what was installed last"):
        gateway.start()
    gateway._serving = None  # it never started


def test_a_changed_guardian_makes_waiting_audits_missing_and_begins_a_ledger_of_its_own(house):
    gateway = house(policy={**AUDITED, "allow": ["guardian.model"]}, guardian=failing(503))
    gateway.decide()
    until(lambda: gateway.guardian.bodies)
    gateway.stop()
    gateway.models["guardian"] = {"model": "another"}
    gateway.sections["gateway"] = {"audit_deadline": 0.5}
    gateway.certified = False
    gateway._write({"certificate": "rule.json"})
    from conformal_arbitrage.live.config import read_config

    gateway.config = read_config(gateway.path)
    gateway.guardian.reply = votes(0, 1, model="another")
    calls = len(gateway.guardian.bodies)
    gateway.start()
    [record] = until(lambda: [r for r in gateway.records() if r.audit])
    assert record.audit.scores is None
    assert len(gateway.guardian.bodies) == calls  # the new Guardian was not asked about the old one's decision
    rows = until(lambda: (rows := ledger_of(gateway, record)) and rows[0].due < time.time() + 60 and rows)
    assert rows[0].loss is None
    gateway.decide()
    ledgers = until(
        lambda: len(found := gateway.with_store(lambda store: store.run(stored_ledger.ledgers))) == 2 and found
    )
    assert len({one.key.identities_sha256 for one in ledgers}) == 2


def ledger_of(made, record):
    key = LedgerKey(policy="support", version=1, identities_sha256=record.decision.identities_sha256)
    return made.with_store(lambda store: store.run(stored_ledger.changes, key, 0))


def test_an_answer_of_other_models_is_no_outcome(house):
    from conformal_arbitrage.store.record import AuditBody, Event

    gateway = house(policy=AUDITED, guardian=failing(503))
    id = gateway.decide().json()["answers"][0]["arbitrage"]["id"]
    body = AuditBody(scores=(1.0, 0.0, 0.0), identities_sha256="others")
    gateway.with_store(lambda store: store.run(events.commit, [Event(id=id, body=body)]))
    [row] = until(lambda: [row for row in ledger(gateway) if row.due < time.time() + 60])
    assert row.loss is None


@pytest.mark.parametrize("form", ["menu", "text"])
def test_a_policy_that_always_defers_says_that_it_has_no_monitor(house, form):
    gateway = house(form=form, policy={**AUDITED, "content": "full"})
    scarce = gateway.certificate(alpha=0.001)
    assert scarce.status == "always_defer"
    gateway.put("/v1/arbitrage/policies/support", {"certificate": scarce.to_dict()})
    gateway.chat(MENU if form == "menu" else CHAT)
    shown = monitor(gateway)
    assert not shown["watched"]
    assert "nothing to watch" in shown["unwatched"]
    assert gateway.with_store(lambda store: store.run(stored_ledger.ledgers, "support")) == []


def test_pruning_changes_nothing(house):
    gateway = house(policy=AUDITED)
    for _ in range(5):
        gateway.decide()
    settled(gateway, 5)
    before = until(lambda: (doc := monitor(gateway))["audits"]["known"] == 5 and doc)
    gateway.with_store(lambda store: integrity.prune(store, before=time.time() + 60))
    assert gateway.records() == []
    gateway.restart()
    assert until(lambda: (doc := monitor(gateway)).get("audits") and doc) == before


def test_red_stands_at_alpha_if_the_policy_says_so(house):
    gateway = house(policy={**AUDITED, "alarm_line": "alpha"})
    gateway.decide()
    shown = until(lambda: (doc := monitor(gateway)).get("lines") and doc)
    assert shown["lines"]["red"] == shown["lines"]["alpha"] == 0.05
    assert shown["lines"]["false_red"] is None
    assert "no bound on false reds" in shown["lines"]["note"]


def test_a_high_probability_certificate_says_so_in_answers(house):
    from conformal_arbitrage import calibrate
    from conformal_arbitrage.gateway.gateway import identities_of

    gateway = house(policy=AUDITED)
    rows = [[0.9, 0.1, 0.0]] * 300 + [[0.6, 0.3, 0.1]] * 100
    right = [[1.0, 0.0, 0.0]] * 300 + [[0.0, 1.0, 0.0]] * 100
    log = ScoreLog.from_arrays(
        rows, right, id=[f"r{k}" for k in range(400)], identities=identities_of(gateway.config, "support")
    )
    sure = calibrate(log, 0.05, guardian_sees="all", confidence=0.95, zero_one=True).sign(ProjectSecret.find())
    assert gateway.put("/v1/arbitrage/policies/support", {"certificate": sure.to_dict()}).status_code == 200
    [answer] = gateway.decide().json()["answers"]
    assert answer["arbitrage"]["guarantee"] == "high_probability"
    shown = until(lambda: (doc := monitor(gateway)).get("lines") and doc)
    assert shown["lines"]["red"] == 0.05


def test_labels_of_callers_do_not_hide_losses(house):
    gateway = house(policy=AUDITED)
    gateway.headers = gateway.keyed("call")
    id = gateway.decide().json()["answers"][0]["arbitrage"]["id"]
    gateway.post(f"/v1/arbitrage/records/{id}/feedback", {"label": 0})
    assert settled(gateway, 1)[0].loss == 1.0


def test_the_state_is_the_same_after_kill_and_recomputed_from_the_ledger(house):
    gateway = house(policy=AUDITED)
    for _ in range(4):
        gateway.decide({**DECISION, "questions": [QUESTION] * 5})
    settled(gateway, 20)
    before = until(lambda: (doc := monitor(gateway)).get("audits", {}).get("known") == 20 and doc)
    gateway.restart()
    after = until(lambda: (doc := monitor(gateway)).get("audits") and doc)
    assert after == before
    rows = ledger(gateway)
    assert np.isfinite([row.loss for row in rows]).all()


def test_a_damaged_record_keeps_no_other_loss_from_being_known(house):
    import sqlite3
    from contextlib import closing

    gateway = house(policy=AUDITED, guardian=failing(503))
    first = gateway.decide().json()["answers"][0]["arbitrage"]["id"]
    with closing(sqlite3.connect(gateway.folder / "arbitrage.sqlite", timeout=30)) as connection:
        connection.execute("update events set body = '{' where id = ? and kind = 'decision'", (first,))
        connection.execute("update ledger set news = 1 where id = ?", (first,))
        connection.commit()
    gateway.guardian.reply = votes(0, 1)
    second = gateway.decide().json()["answers"][0]["arbitrage"]["id"]
    rows = until(lambda: [row for row in ledger(gateway) if row.id == second and row.loss == 1.0], 30)
    assert rows
    assert monitor(gateway)["mode"] == "enforce"


def test_outcomes_in_any_order_give_the_same_evidence(house):
    """Grades that come last first, and in two lives of the gateway, give what a fresh look at the ledger gives."""
    gateway = house(form="text", policy={**AUDITED, "content": "full"})
    ids = [gateway.chat().headers["x-arbitrage-decision-id"] for _ in range(24)]
    until(lambda: len([r for r in gateway.records() if r.audit]) == 24, 30)
    for k, id in enumerate(reversed(ids)):
        if k == 12:
            gateway.restart()
        grades = {"primary": 0.0 if k % 2 else 1.0, "guardian": 1.0}
        assert gateway.post(f"/v1/arbitrage/records/{id}/feedback", {"grades": grades}).status_code == 200
    settled(gateway, 24)
    shown = until(lambda: (doc := monitor(gateway)).get("audits", {}).get("known") == 24 and doc, 30)
    assert sorted(row.known_order for row in ledger(gateway)) == list(range(1, 25))
    gateway.restart()
    again = until(lambda: (doc := monitor(gateway)).get("audits", {}).get("known") == 24 and doc, 30)
    assert again == shown


def test_the_clock_makes_overdue_outcomes_missing_and_a_late_one_replaces_them(house, monkeypatch):
    from conformal_arbitrage.gateway import watcher

    hours = [0.0]
    gateway = house(policy=AUDITED, guardian=failing(503))
    real = watcher.Watcher.turn

    async def later(self):
        self._clock = lambda: time.time() + 3600 * hours[0]
        return await real(self)

    monkeypatch.setattr(watcher.Watcher, "turn", later)
    gateway.decide()
    until(lambda: monitor(gateway).get("audits", {}).get("pending") == 1, 30)
    hours[0] = 25.0
    until(lambda: monitor(gateway).get("audits", {}).get("missing") == 1, 30)
    gateway.guardian.reply = votes(0, 1)
    shown = until(lambda: (doc := monitor(gateway))["audits"]["known"] == 1 and doc, 60)
    assert (shown["audits"]["missing"], shown["mean_loss"]) == (0, 1.0)


def test_draws_of_one_session_verify_and_removed_rows_among_them_do_not(house):
    gateway = house(policy={**AUDITED, "session": "user"})
    for _ in range(3):
        gateway.chat({**MENU, "user": "somebody"})
    assert until(lambda: monitor(gateway)["audits"]["collapsed"]) == 2
    assert gateway.with_store(integrity.verify) == []
    gateway.stop()
    with closing(sqlite3.connect(gateway.folder / "arbitrage.sqlite")) as database:
        database.execute("update ledgers set collapsed = 0")
        database.commit()
    assert "was drawn for an audit" in " ".join(gateway.with_store(integrity.verify))
