"""Promises: no page, report or reply offers one that decisions do not have, after red or where something is allowed."""

import html
import json
import re
import time

import numpy as np
import pytest
from click.testing import CliRunner

from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import cli
from conformal_arbitrage.collecting.renewal import install_successor, outlook, renewable, successor
from conformal_arbitrage.gateway.gateway import identities_of
from conformal_arbitrage.monitoring import limits
from conformal_arbitrage.monitoring.limits import LossSums
from conformal_arbitrage.store.session import Session
from tests.certificates import altered
from tests.console.filled import Visit
from tests.gateway.durability import SECRET
from tests.gateway.house import House
from tests.gateway.test_monitor import install_alarm
from tests.gateway.test_renewer import DAY, N, ask, gathered, history, house


@pytest.fixture
def served(where, tmp_path, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    with house(tmp_path, gateway={"database": where}) as started:
        ask(started, N)
        gathered(started, N)
        yield started


def test_a_renewal_that_races_with_the_alarm_neither_ends_safe_mode_nor_promises_anything(served):
    target = renewable(served.config, "support", identities_of(served.config, "support"), ProjectSecret.find())

    async def begin(store):
        ahead = await outlook(store, target, now=time.time() + 1.1 * DAY)
        assert (ahead.due, ahead.step) == (True, "scheduled")
        return ahead

    ahead = served.with_store(begin)
    install_alarm(served)
    time.sleep(1.1)  # a certificate's time of creation is in whole seconds: this one is made after the alarm
    next = served.with_store(lambda store: successor(store, target, ahead))
    assert served.with_store(lambda store: install_successor(store, ahead, next, by="schedule")) is None
    assert [version.version for version in history(served)] == [1]
    ask(served, 1)
    record = served.records(policy="support", limit=1)[0]
    assert (record.decision.mode, record.decided_by) == ("safe", "guardian")

    path = "/v1/arbitrage/policies/support"  # by hand it can be installed, and says that it promises nothing
    assert served.put(path, {"certificate": next.certificate.to_dict()}).status_code == 200
    [newest, _] = history(served)
    assert newest.alarmed is not None
    ask(served, 1)
    record = served.records(policy="support", limit=1)[0]
    assert "older than the alarm of version 1" in record.decision.no_guarantee


def words(reply):
    assert reply.status_code == 200, reply.text[:500]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", reply.text)).split())


OLDER = "the certificate's rows are older than the alarm of version"
PAGE = "/console/policies/support"


def test_the_console_offers_no_promise_that_decisions_after_the_alarm_do_not_have(tmp_path):
    dial = {"dial": True, "zero_one": True, "confidence": 0.9}
    with House(tmp_path, calibration=dial) as gate:
        visit = Visit(gate)
        page = visit.open(PAGE)
        other = json.dumps(gate.certificate(alpha=0.1).to_dict())
        assert "replaces the promise by this one" in words(visit.send_form(f"{PAGE}/check", page, certificate=other))
        assert "the promise holds at the stop that is chosen" in words(page)
        assert visit.send_form(f"{PAGE}/install", page, certificate=other).status_code == 200
        assert "The promise becomes that of the earlier certificate again" in words(visit.open(PAGE))

        install_alarm(gate, version=2)
        shown = words(visit.open(PAGE))
        assert "the Guardian decides everything. What it promised was:" in shown
        assert "No stop has a guarantee after the alarm , and choosing another ends safe mode" in shown
        assert f"its decisions have no guarantee : {OLDER} 2" in shown  # of the version to roll back to
        checked = words(visit.send_form(f"{PAGE}/check", page, certificate=other))
        assert f"ends the alarm and leaves decisions without a guarantee : {OLDER} 2" in checked
        for text in (shown, checked):
            assert "the promise holds at" not in text
            assert "replaces the promise" not in text
            assert "The promise becomes" not in text
        dry = gate.put("/v1/arbitrage/policies/support", {"certificate": json.loads(other), "dry_run": True}).json()
        assert dry["no_guarantee"].startswith(OLDER)

        for path, fields in (("choose", {"alpha": "0.2"}), ("install", {"certificate": other}), ("rollback", {})):
            after = words(visit.send_form(f"{PAGE}/{path}", page, **fields))
            assert f"Decisions have no guarantee: {OLDER} 2" in after
            assert f"Nothing is promised now: {OLDER} 2" in after
            assert f"No stop has a guarantee : {OLDER} 2" in after
            [answer] = gate.decide().json()["answers"]
            assert (answer["arbitrage"]["guarantee"], answer["arbitrage"]["decided_by"]) == ("none", "primary")


def test_the_responses_api_is_in_safe_mode_after_the_alarm(tmp_path):
    with House(tmp_path, form="text", policy={"content": "full"}) as gate:
        body = {"model": "support", "input": "Say it."}
        assert gate.post("/v1/responses", body).json()["output"][0]["content"][0]["text"] == "mine"
        install_alarm(gate)
        document = gate.post("/v1/responses", body).json()
        assert document["output"][0]["content"][0]["text"] == "theirs"
        assert document["arbitrage"]["decided_by"] == "guardian"
        stream = gate.post("/v1/responses", {**body, "stream": True}).text
        assert ("theirs" in stream, "mine" in stream) == (True, False)
        assert {record.decision.mode for record in gate.records()[:2]} == {"safe"}


@pytest.mark.parametrize("hours", [-48, 0, 48])
def test_a_clock_that_is_set_after_the_alarm_gives_no_promise_back(tmp_path, monkeypatch, hours):
    with House(tmp_path) as gate:
        path, first = "/v1/arbitrage/policies/support", gate.certificate(alpha=0.06).to_dict()
        assert gate.put(path, {"certificate": first}).status_code == 200
        install_alarm(gate, version=2)
        true = Session.now
        monkeypatch.setattr(Session, "now", lambda session: true(session) + hours * 3600)  # the database's clock
        for act in (lambda: gate.post(f"{path}/rollback", {}), lambda: gate.put(path, {"certificate": first})):
            assert act().status_code == 200
            [answer] = gate.decide().json()["answers"]
            assert answer["arbitrage"]["guarantee"] == "none", answer
            assert answer["arbitrage"]["reason"].startswith(OLDER)


class LooseHouse(House):
    """Its certificate was made with another Guardian, or does not say with which, and the policy allows that by name."""

    def certificate(self, *args, **options):
        signed = super().certificate(*args, **options)
        other = {**signed.identities, "guardian": {**signed.identities["guardian"], "model": "another"}}
        identities = "unbound" if "unbound" in self.sections["policies.support"]["allow"] else other
        return altered(signed, identities=identities, secret_id=None, signature=None).sign(ProjectSecret.find())


@pytest.mark.parametrize("name", ["guardian.model", "unbound"])
def test_what_is_allowed_by_name_is_promised_nowhere(tmp_path, name):
    reason = f"allowed by name: {name}"
    with LooseHouse(tmp_path, policy={"allow": [name], "audit_rate": 1.0}) as gate:
        for _ in range(3):
            [answer] = gate.decide().json()["answers"]
            assert (answer["arbitrage"]["guarantee"], answer["arbitrage"]["reason"]) == ("none", reason)
        visit = Visit(gate)
        assert f"Decisions have no guarantee: {reason}" in words(visit.open("/console"))
        assert f"Nothing is promised now: {reason}" in words(visit.open(PAGE))
        shown = gate.get("/v1/arbitrage/policies/support/monitor").json()
        assert (shown["guarantee"], shown["reason"]) == ("none", reason)
        path, month = tmp_path / "report.html", time.strftime("%Y-%m", time.gmtime())
        command = ["report", "support", "--month", month, "-o", str(path), "--config", str(gate.path)]
        result = CliRunner().invoke(cli, command)
        assert result.exit_code == 0, result.output
        assert f"Decisions without a guarantee: 3 (100\u00a0%). Why: {reason} (3)." in path.read_text()


def test_many_groups_have_their_limits_computed_once(monkeypatch):
    """A thousand groups with the same few audits took seconds of every page and every scrape of the metrics."""
    computed = []
    plain = limits.limits_of
    monkeypatch.setattr(limits, "limits_of", lambda *sums: computed.append(sums) or plain(*sums))
    losses = np.array([0.0, 0.25, 1.0, 0.125])  # no other test has these
    results = {LossSums.of(losses[np.random.default_rng(k).permutation(4)]).limits() for k in range(100)}
    assert (len(results), len(computed)) == (1, 1)
