"""Keys that expire, are bound to policies or read metrics only; retention; erasing one record."""

import json
import time

import pytest
from click.testing import CliRunner

from conformal_arbitrage.cli import main
from conformal_arbitrage.live.database import database_of
from conformal_arbitrage.store import integrity, pages
from tests.gateway.durability import SECRET, run_sql
from tests.gateway.house import CHAT, DECISION, UNSURE, House, error_of, failing, hanging, says, until, votes

KEY = {"Idempotency-Key": "order-17"}


@pytest.fixture
def home(where, tmp_path, monkeypatch):
    """A function that starts a gateway on either database."""
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    houses = []

    def start(gateway=None, **options):
        houses.append(House(tmp_path, gateway={"database": where, **(gateway or {})}, **options))
        return houses[-1].__enter__()

    yield start
    for one in houses:
        one.__exit__()


def arbitrage(gateway, *command, code=0):
    result = CliRunner().invoke(main, [*command, "--config", str(gateway.path)])
    assert result.exit_code == code, result.output
    return result.stdout


def key(gateway, *options):
    created = json.loads(arbitrage(gateway, "keys", "create", "--json", *options))
    return created, {"Authorization": f"Bearer {created['key']}"}


def test_a_key_for_metrics_scrapes_and_does_nothing_else(home):
    gateway = home()
    _, scraper = key(gateway, "--scope", "metrics")
    assert gateway.get("/metrics", headers=scraper).status_code == 200
    for path in ("/v1/arbitrage/records", "/v1/models", "/v1/arbitrage/policies/support"):
        error_of(gateway.get(path, headers=scraper), 403, "insufficient_scope")
    error_of(gateway.decide(headers=scraper), 403, "insufficient_scope")
    _, caller = key(gateway)
    error_of(gateway.get("/metrics", headers=caller), 403, "insufficient_scope")
    assert gateway.get("/metrics", headers=key(gateway, "--scope", "review")[1]).status_code == 200


def test_a_key_expires(home):
    gateway = home()
    created, headers = key(gateway, "--expires", "1")
    assert created["expires"] > time.time() + 86000
    assert gateway.decide(headers=headers).status_code == 200
    run_sql(database_of(gateway.config), f"update keys set expires = {time.time()} where id = '{created['id']}'")
    run_sql(database_of(gateway.config), "update changes set count = count + 1")
    error_of(gateway.decide(headers=headers), 401, "expired_api_key")
    [listed] = json.loads(arbitrage(gateway, "keys", "list", "--json"))
    assert listed["expires"] < time.time()
    arbitrage(gateway, "keys", "create", "--expires", "-1", code=2)


def test_a_key_bound_to_policies_calls_and_sees_no_other(home):
    gateway = home(**{"policies.support": {}, "policies.sales": {}, "policies.other": {}})
    _, admin = key(gateway, "--scope", "admin")
    _, caller = key(gateway, "--policy", "sales")
    _, reviewer = key(gateway, "--policy", "sales", "--scope", "review")
    _, two = key(gateway, "--policy", "sales", "--policy", "other", "--scope", "review")
    error_of(gateway.decide(headers=caller), 403, "insufficient_scope")
    error_of(
        gateway.chat({**CHAT, "arbitrage": {"actions": ["a", "b", "c"]}}, headers=caller), 403, "insufficient_scope"
    )
    own = gateway.decide({**DECISION, "model": "sales"}, headers=caller).headers["x-arbitrage-decision-id"]
    elsewhere = gateway.decide(headers=admin).headers["x-arbitrage-decision-id"]
    for headers in (reviewer, two):
        assert gateway.get(f"/v1/arbitrage/records/{own}", headers=headers).status_code == 200
        error_of(gateway.get(f"/v1/arbitrage/records/{elsewhere}", headers=headers), 404)
        error_of(gateway.get("/v1/arbitrage/records?policy=support", headers=headers), 403)
        error_of(gateway.get("/v1/arbitrage/policies/support", headers=headers), 403)
        feedback = gateway.post(f"/v1/arbitrage/records/{elsewhere}/feedback", {"grade": 1}, headers=headers)
        error_of(feedback, 404)
    listed = gateway.get("/v1/arbitrage/records", headers=reviewer).json()["data"]
    assert [record["id"] for record in listed] == [own]
    error_of(gateway.get("/v1/arbitrage/records", headers=two), 400)
    assert [p["id"] for p in gateway.get("/v1/models", headers=caller).json()["data"]] == ["sales"]
    assert len(gateway.get("/v1/models", headers=admin).json()["data"]) == 3
    assert "sales, other" in arbitrage(gateway, "keys", "list")
    arbitrage(gateway, "keys", "create", "--policy", "absent", code=2)


def test_decisions_are_removed_after_retain_days_except_those_with_an_open_audit(home, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.gateway.background.PRUNE_EVERY", 0.2)
    gateway = home(gateway={"retain_days": 2e-5}, guardian=hanging, policy={"audit_rate": 1.0, "content": "full"})
    kept = gateway.decide().headers["x-arbitrage-decision-id"]
    where = database_of(gateway.config)
    time.sleep(2.5)
    assert [record.id for record in gateway.records()] == [kept], "its audit needs the question"
    gateway.guardian.reply = votes(0, 1)
    run_sql(where, "update audits set lease = 0")
    run_sql(where, "delete from audits")
    run_sql(where, "update ledger set due = 0")  # until then, what settles its loss may still come
    until(lambda: gateway.records() == [])
    assert run_sql(where, "select count(*) from events where body is not null") == [(0,)]
    until(lambda: gateway.with_store(lambda store: integrity.verify(store)) == [])


@pytest.mark.parametrize("form", ["menu", "text"])
def test_the_content_of_one_record_is_erased_and_everything_still_verifies(home, form):
    primary = votes(*UNSURE) if form == "menu" else says("mine about SECRET-WORD", 0.1)
    guardian = failing(400, "bad SECRET-WORD")
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
