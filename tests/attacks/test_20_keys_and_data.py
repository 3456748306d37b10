"""20. Keys that expire, are bound to policies or read metrics only; retention; erasing one record."""

import json
import time

import pytest
from click.testing import CliRunner

from conformal_arbitrage.cli import main
from conformal_arbitrage.live.database import database_of
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


def arbitrage(made, *command, code=0):
    result = CliRunner().invoke(main, [*command, "--config", str(made.path)])
    assert result.exit_code == code, result.output
    return result.stdout


def key(made, *options):
    created = json.loads(arbitrage(made, "keys", "create", "--json", *options))
    return created, {"Authorization": f"Bearer {created['key']}"}


def test_a_key_for_metrics_scrapes_and_does_nothing_else(home):
    made = home()
    _, scraper = key(made, "--scope", "metrics")
    assert made.get("/metrics", headers=scraper).status_code == 200
    for path in ("/v1/arbitrage/records", "/v1/models", "/v1/arbitrage/policies/support"):
        error_of(made.get(path, headers=scraper), 403, "insufficient_scope")
    error_of(made.decide(headers=scraper), 403, "insufficient_scope")
    _, caller = key(made)
    error_of(made.get("/metrics", headers=caller), 403, "insufficient_scope")
    assert made.get("/metrics", headers=key(made, "--scope", "review")[1]).status_code == 200


def test_a_key_expires(home):
    made = home()
    created, headers = key(made, "--expires", "1")
    assert created["expires"] > time.time() + 86000
    assert made.decide(headers=headers).status_code == 200
    run_sql(database_of(made.config), f"update keys set expires = {time.time()} where id = '{created['id']}'")
    run_sql(database_of(made.config), "update changes set count = count + 1")
    error_of(made.decide(headers=headers), 401, "expired_api_key")
    [listed] = json.loads(arbitrage(made, "keys", "list", "--json"))
    assert listed["expires"] < time.time()
    arbitrage(made, "keys", "create", "--expires", "-1", code=2)


def test_a_key_bound_to_policies_calls_and_sees_no_other(home):
    made = home(**{"policies.support": {}, "policies.sales": {}, "policies.other": {}})
    _, admin = key(made, "--scope", "admin")
    _, caller = key(made, "--policy", "sales")
    _, reviewer = key(made, "--policy", "sales", "--scope", "review")
    _, two = key(made, "--policy", "sales", "--policy", "other", "--scope", "review")
    error_of(made.decide(headers=caller), 403, "insufficient_scope")
    error_of(made.chat({**CHAT, "arbitrage": {"actions": ["a", "b", "c"]}}, headers=caller), 403, "insufficient_scope")
    own = made.decide({**DECISION, "model": "sales"}, headers=caller).headers["x-arbitrage-decision-id"]
    elsewhere = made.decide(headers=admin).headers["x-arbitrage-decision-id"]
    for headers in (reviewer, two):
        assert made.get(f"/v1/arbitrage/records/{own}", headers=headers).status_code == 200
        error_of(made.get(f"/v1/arbitrage/records/{elsewhere}", headers=headers), 404)
        error_of(made.get("/v1/arbitrage/records?policy=support", headers=headers), 403)
        error_of(made.get("/v1/arbitrage/policies/support", headers=headers), 403)
        feedback = made.post(f"/v1/arbitrage/records/{elsewhere}/feedback", {"grade": 1}, headers=headers)
        error_of(feedback, 404)
    listed = made.get("/v1/arbitrage/records", headers=reviewer).json()["data"]
    assert [record["id"] for record in listed] == [own]
    error_of(made.get("/v1/arbitrage/records", headers=two), 400)
    assert [p["id"] for p in made.get("/v1/models", headers=caller).json()["data"]] == ["sales"]
    assert len(made.get("/v1/models", headers=admin).json()["data"]) == 3
    assert "sales, other" in arbitrage(made, "keys", "list")
    arbitrage(made, "keys", "create", "--policy", "absent", code=2)


def test_decisions_are_removed_after_retain_days_except_those_with_an_open_audit(home, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.gateway.housekeeping.PRUNE_EVERY", 0.2)
    made = home(gateway={"retain_days": 2e-5}, guardian=hanging, policy={"audit_rate": 1.0, "content": "full"})
    kept = made.decide().headers["x-arbitrage-decision-id"]
    where = database_of(made.config)
    time.sleep(2.5)
    assert [record.id for record in made.records()] == [kept], "its audit needs the question"
    made.guardian.reply = votes(0, 1)
    run_sql(where, "update audits set lease = 0")
    run_sql(where, "delete from audits")
    until(lambda: made.records() == [])
    assert run_sql(where, "select count(*) from events where body is not null") == [(0,)]
    until(lambda: made.with_store(lambda store: store.verify()) == [])


@pytest.mark.parametrize("form", ["menu", "text"])
def test_the_content_of_one_record_is_erased_and_everything_still_verifies(home, form):
    primary = votes(*UNSURE) if form == "menu" else says("mine about SECRET-WORD", 0.1)
    guardian = failing(400, "bad SECRET-WORD")
    made = home(form=form, primary=primary, guardian=guardian, policy={"content": "full"})
    if form == "menu":
        ask, body = made.decide, {**DECISION, "input": "SECRET-WORD"}
    else:
        ask, body = made.chat, {**CHAT, "messages": [{"role": "user", "content": "SECRET-WORD"}]}
    error_of(ask(body, headers=KEY), 502)
    made.guardian.reply = votes(0, 1) if form == "menu" else says("SECRET-WORD indeed")
    id = ask(body, headers=KEY).headers["x-arbitrage-decision-id"]
    assert made.post(f"/v1/arbitrage/records/{id}/feedback", {"grade": 1, "comment": "SECRET-WORD"}).status_code == 200
    other = ask({**body, "user": "another"} if form == "text" else {**body, "input": "x"}).headers
    before = made.with_store(lambda store: store.head())
    where = database_of(made.config)
    assert "SECRET-WORD" in everything(where)
    assert json.loads(arbitrage(made, "records", "erase", id, "--json")) == {"erased": id}
    if form == "menu":
        assert "SECRET-WORD" not in everything(where)
    [record] = [record for record in made.records() if record.id == id]
    assert record.decision.content is None
    assert record.decision.legs[0].scores is not None
    assert record.feedback[0].comment is None
    error_of(ask(body, headers=KEY), 410, "erased")
    assert made.with_store(lambda store: store.record(other["x-arbitrage-decision-id"])).decision.content is not None
    assert made.with_store(lambda store: store.verify(before)) == []
    assert (
        "there is no decision" in CliRunner().invoke(main, ["records", "erase", "x", "--config", str(made.path)]).output
    )


def everything(where):
    """All that the database holds, as text."""
    tables = ("events", "replays", "audits", "claims", "begun", "undelivered")
    return str([[bytes(v) if isinstance(v, memoryview) else v for v in row] for t in tables
                for row in run_sql(where, f"select * from {t}")])  # fmt: skip
