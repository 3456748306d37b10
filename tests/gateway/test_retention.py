"""Decisions are removed in time, and the content of one record on demand; what remains verifies."""

import json
import time

import pytest
from click.testing import CliRunner

from conformal_arbitrage.cli import main
from conformal_arbitrage.live.build import database_of
from conformal_arbitrage.store import integrity, pages
from tests.gateway.durability import run_sql
from tests.gateway.house import CHAT, DECISION, UNSURE, error_of, failing, hanging, says, until, votes
from tests.gateway.test_keys import arbitrage

KEY = {"Idempotency-Key": "order-17"}


def test_decisions_are_removed_after_retain_days_except_those_with_an_open_audit(home, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.gateway.jobs.PRUNE_EVERY", 0.2)
    gateway = home(gateway={"retain_days": 2e-5}, guardian=hanging, policy={"audit_rate": 1.0, "content": "full"})
    kept = gateway.decide().headers["x-arbitrage-decision-id"]
    where = database_of(gateway.config)
    time.sleep(2.5)
    assert [record.id for record in gateway.records()] == [kept], "its audit needs the question"
    gateway.guardian.reply = votes(0, 1)
    run_sql(where, "update audits set lease = 0")
    run_sql(where, "delete from audits")
    run_sql(where, "delete from ledger")  # until its outcome is due, what settles it may still come
    run_sql(where, "update ledgers set length = 0, known = 0, changes = 0")
    until(lambda: gateway.records() == [])
    assert run_sql(where, "select count(*) from events where body is not null") == [(0,)]
    until(lambda: gateway.with_store(lambda store: integrity.verify(store)) == [])


@pytest.mark.parametrize("form", ["menu", "text"])
def test_the_content_of_one_record_is_erased_and_everything_still_verifies(home, form):
    primary = votes(*UNSURE) if form == "menu" else says("mine about SECRET-WORD", 0.1)
    guardian = failing(403, "bad SECRET-WORD")
    gateway = home(form=form, primary=primary, guardian=guardian, policy={"content": "full"})
    if form == "menu":
        ask, body = gateway.decide, {**DECISION, "input": "SECRET-WORD"}
    else:
        ask, body = gateway.chat, {**CHAT, "messages": [{"role": "user", "content": "SECRET-WORD"}]}
    error_of(ask(body, headers=KEY), 502)
    gateway.guardian.reply = votes(0, 1) if form == "menu" else says("SECRET-WORD indeed")
    id = ask(body, headers=KEY).headers["x-arbitrage-decision-id"]
    assert (
        gateway.post(f"/v1/arbitrage/records/{id}/feedback", {"grade": 1, "comment": "SECRET-WORD"}).status_code == 200
    )
    other = ask({**body, "user": "another"} if form == "text" else {**body, "input": "x"}).headers
    before = gateway.with_store(lambda store: store.run(integrity.head))
    where = database_of(gateway.config)
    assert "SECRET-WORD" in everything(where)
    assert json.loads(arbitrage(gateway, "records", "erase", id, "--json")) == {"erased": id}
    if form == "menu":
        assert "SECRET-WORD" not in everything(where)
    [record] = [record for record in gateway.records() if record.id == id]
    assert record.decision.content is None
    assert record.decision.legs[0].scores is not None
    assert record.feedback[0].comment is None
    error_of(ask(body, headers=KEY), 410, "erased")
    assert (
        gateway.with_store(lambda store: store.run(pages.record, other["x-arbitrage-decision-id"])).decision.content
        is not None
    )
    assert gateway.with_store(lambda store: integrity.verify(store, before)) == []
    assert (
        "there is no decision"
        in CliRunner().invoke(main, ["records", "erase", "x", "--config", str(gateway.path)]).output
    )


def everything(where):
    """All that the database holds, as text."""
    tables = ("events", "replays", "audits", "claims", "begun", "undelivered")
    return str([[bytes(v) if isinstance(v, memoryview) else v for v in row] for t in tables
                for row in run_sql(where, f"select * from {t}")])  # fmt: skip
