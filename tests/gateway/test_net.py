"""A net certificate behind the gateway: gains are kept in the ledger, losses turn it red, and unknown labels do neither."""

import pytest
from click.testing import CliRunner

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import cli
from conformal_arbitrage.gateway.gateway import identities_of
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.live.service import verify_record
from conformal_arbitrage.store import events
from conformal_arbitrage.store import ledger as stored_ledger
from tests.gateway.durability import run_sql
from tests.gateway.house import DECISION, QUESTION, UNSURE, House, failing, until, votes
from tests.gateway.test_monitor import AUDITED, ledger, monitor, settled

GAIN, LOSS, NEITHER = 0, 1, 2
"""The right action, where a sure Primary gives 0 and the Guardian would have given 1."""


class NetHouse(House):
    """Certified for the net loss: keeping the unsure rows brings losses, and some gains."""

    def certificate(self, alpha=0.05, identities=None, policy="support"):
        config = read_config(self.path)
        made_by, secret = identities or identities_of(config, policy), ProjectSecret.find()
        if config.form_of(policy) == "menu":
            rows = [[0.9, 0.1, 0.0]] * 300 + [[0.6, 0.3, 0.1]] * 300
            guardian = [[1.0, 0.0, 0.0]] * 300 + [[0.0, 1.0, 0.0]] * 300
            label = [0] * 300 + [LOSS] * 200 + [GAIN] * 50 + [NEITHER] * 50
            log = ScoreLog.from_arrays(rows, guardian, label=label, id=map(str, range(600)), identities=made_by)
        else:
            grades = {"primary_grade": [1.0] * 300 + [0.0] * 300, "guardian_grade": [1.0] * 600}
            made_by = {**made_by, "grader": {"kind": "exact"}}
            sure = [0.9] * 300 + [0.5] * 300
            log = ScoreLog.from_router(confidence=sure, **grades, id=map(str, range(600)), identities=made_by)
        return calibrate(log, alpha, loss="net", boundary="random", key=secret.boundary_key).sign(secret)


def label(made, ids, right):
    for id in ids:
        reply = made.post(f"/v1/arbitrage/records/{id}/feedback", {"label": right})
        assert reply.status_code < 300, reply.text


def decide(made, count):
    reply = made.decide({**DECISION, "questions": [QUESTION] * count})
    return [answer["arbitrage"]["id"] for answer in reply.json()["answers"]]


def test_gains_losses_and_neither_are_kept_once_the_label_is_in(house):
    gateway = house(NetHouse, policy=AUDITED)
    ids = decide(gateway, 3)
    until(lambda: len([record for record in gateway.records() if record.audit]) == 3)
    until(lambda: monitor(gateway).get("audits", {}).get("pending") == 3)
    assert all(row.loss is None and 13 < (row.due - row.drawn) / 86400 < 15 for row in ledger(gateway))
    assert monitor(gateway)["limits"] == [-1.0, 1.0]
    for id, right in zip(ids, (GAIN, LOSS, NEITHER), strict=True):
        label(gateway, [id], right)
    assert {row.id: row.loss for row in settled(gateway, 3)} == dict(zip(ids, (-1.0, 1.0, 0.0), strict=True))
    shown = until(lambda: (doc := monitor(gateway))["audits"]["known"] == 3 and doc)
    assert (shown["watched"], shown["mean_loss"], shown["lines"]["block"]) == (True, 0.0, 5)
    assert 0.05 < shown["lines"]["red"] < 0.3
    assert "not proved" in shown["lines"]["note"]
    assert shown["age"]["blind_decisions"] is None


def test_a_run_of_losses_is_red_and_gains_are_not(house):
    gateway = house(NetHouse, policy=AUDITED)
    label(gateway, decide(gateway, 20), GAIN)
    shown = until(lambda: (doc := monitor(gateway)).get("audits", {}).get("known") == 20 and doc)
    assert (shown["mean_loss"], shown["mode"]) == (-1.0, "enforce")
    assert 'arbitrage_loss_mean{policy="support"} -1.0' in gateway.get("/metrics").text
    for _ in range(20):
        if (ids := decide(gateway, 20)) and monitor(gateway)["mode"] == "safe":
            break
        label(gateway, ids, LOSS)
        settled(gateway, 20)
    shown = until(lambda: (doc := monitor(gateway))["mode"] == "safe" and doc)
    assert (shown["state"], shown["cause"]) == ("red", "losses")
    [answer] = gateway.decide().json()["answers"]
    assert (answer["choice"], answer["arbitrage"]["decided_by"]) == ("b", "guardian")
    gateway.restart()
    until(lambda: gateway.with_store(lambda store: store.run(stored_ledger.news, ["support"])) == [])
    losses = [row.loss for row in ledger(gateway) if row.loss is not None]
    assert losses.count(-1.0) == 20
    after = until(lambda: (doc := monitor(gateway)).get("audits", {}).get("known") == len(losses) and doc)
    assert (after["state"], after["mean_loss"]) == ("red", pytest.approx(sum(losses) / len(losses)))
    result = CliRunner().invoke(cli, ["monitor", "support", "--config", str(gateway.path)])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "that safe mode lowers a net loss is not proved" in words
    assert "depends on how many gains hide it" in words


def test_labels_that_are_not_in_raise_no_alarm_before_they_are_due_and_count_as_losses_after(house):
    gateway = house(NetHouse, policy=AUDITED)
    for _ in range(6):
        decide(gateway, 20)
    shown = until(lambda: (doc := monitor(gateway)).get("audits", {}).get("pending") == 120 and doc)
    assert (shown["mode"], shown["mean_loss"]) == ("enforce", None)
    assert shown["evidence"]["red"] < 1
    gateway.clock = lambda real=gateway.clock: real() + 15 * 86400
    shown = until(lambda: (doc := monitor(gateway))["mode"] == "safe" and doc)
    assert shown["cause"] == "failing audits"


def test_labels_of_callers_make_no_gains(house):
    gateway = house(NetHouse, policy=AUDITED)
    gateway.headers = gateway.keyed("call")
    ids = decide(gateway, 2)
    until(lambda: len([record for record in gateway.records() if record.audit]) == 2)
    label(gateway, ids, GAIN)
    until(
        lambda: gateway.with_store(lambda store: store.run(stored_ledger.news, ["support"])) == []
    )  # both were looked at
    assert [row.loss for row in ledger(gateway)] == [None, None]


@pytest.mark.parametrize("hidden", ["delete from keys", "update keys set scope = 'review'"])
def test_nor_do_they_where_the_row_of_the_key_is_gone_or_changed_for_a_moment(house, hidden):
    gateway = house(NetHouse, policy=AUDITED)
    gateway.headers = gateway.keyed("call")
    ids = decide(gateway, 2)
    until(lambda: len([record for record in gateway.records() if record.audit]) == 2)
    path = str(gateway.folder / "arbitrage.sqlite")
    run_sql(path, "create table kept as select * from keys")
    run_sql(path, hidden)
    label(gateway, ids, GAIN)
    until(lambda: gateway.with_store(lambda store: store.run(stored_ledger.news, ["support"])) == [])
    gateway.with_store(events.gather_rows)
    for statement in ("delete from keys", "insert into keys select * from kept", "drop table kept"):
        run_sql(path, statement)
    assert [row.loss for row in ledger(gateway)] == [None, None]
    kept = run_sql(path, "select body from calibration_rows")
    assert ["label" in body for (body,) in kept] == [False, False]
    assert gateway.with_store(verify_record) == []


@pytest.mark.parametrize(("grades", "loss"), [((1.0, 0.25), -0.75), ((0.0, 1.0), 1.0)])
def test_grades_settle_free_text_either_way(house, grades, loss):
    gateway = house(NetHouse, form="text", policy={**AUDITED, "content": "full"})
    id = gateway.chat().headers["x-arbitrage-decision-id"]
    until(lambda: [record for record in gateway.records() if record.audit])
    body = {"grades": dict(zip(("primary", "guardian"), grades, strict=True))}
    gateway.post(f"/v1/arbitrage/records/{id}/feedback", body)
    assert [row.loss for row in settled(gateway, 1)] == [loss]


def test_a_deferral_that_delivers_nothing_has_no_loss_and_no_gain(house):
    gateway = house(NetHouse, policy=AUDITED, primary=votes(*UNSURE), guardian=failing())
    gateway.decide()
    [row] = until(lambda: [row for row in ledger(gateway) if not row.delivered])
    assert (row.loss, row.served) == (0.0, None)
