"""One Idempotency-Key, one decision; and a retry without a key continues the decision of which nothing was delivered."""

import asyncio
import sqlite3
import threading
import time

import pytest
import requests

from conformal_arbitrage import ScoreLog
from conformal_arbitrage.live.build import database_of
from conformal_arbitrage.store import claims, events, integrity
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.record import new_id, time_of
from tests.gateway.durability import OURS, Gateway, run_sql
from tests.gateway.house import CHAT, DECISION, UNSURE, House, error_of, failing, hanging, says, until, votes
from tests.gateway.test_modes import exported
from tests.store.facts import decide

KEY = {"Idempotency-Key": "order-17"}
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("form", ["menu", "text"])
def test_shadow_with_a_failing_guardian_has_one_row_and_one_primary_call_per_key(house, form):
    primary = votes(*UNSURE) if form == "menu" else says("mine", 0.1)
    gateway = house(form=form, primary=primary, guardian=failing(), policy={"mode": "shadow", "content": "full"})
    ask = gateway.decide if form == "menu" else gateway.chat
    for _ in range(4):
        error_of(ask(headers=KEY), 502, "guardian_failed")
    assert len(gateway.records()) == len(gateway.primary.bodies) == 1
    assert len(ScoreLog.read(exported(gateway, "--score-log"))) == 1


def test_a_key_whose_policy_changed_between_attempts_is_refused_for_good_and_decides_nothing_new(house):
    gateway = house(primary=votes(*UNSURE), guardian=failing())
    error_of(gateway.decide(headers=KEY), 502)
    other = gateway.certificate(alpha=0.1).to_dict()
    assert gateway.put("/v1/arbitrage/policies/support", {"certificate": other}).status_code == 200
    gateway.guardian.reply = votes(0, 1)
    reply = gateway.decide(headers=KEY)
    error_of(reply, 409, "policy_changed")
    assert reply.headers["x-should-retry"] == "false"
    assert len(gateway.records()) == len(gateway.primary.bodies) == 1
    assert gateway.decide(headers={"Idempotency-Key": "order-18"}).status_code == 200


def test_every_409_says_whether_repeating_helps(house, monkeypatch):
    monkeypatch.setattr("conformal_arbitrage.gateway.requests.LONGEST_WAIT", 0.3)
    gateway = house(primary=votes(*UNSURE), guardian=hanging)
    first = threading.Thread(target=lambda: leaving(gateway, KEY, seconds=3))
    first.start()
    until(lambda: gateway.guardian.under_way)
    reply = gateway.decide(headers=KEY)
    error_of(reply, 409, "under_way")
    assert reply.headers["x-should-retry"] == "true"
    first.join()
    reply = gateway.post("/v1/arbitrage/policies/support/rollback", {})
    error_of(reply, 409, "nothing_to_roll_back")
    assert reply.headers["x-should-retry"] == "false"
    grades = {"grades": {"primary": 1, "guardian": 0}}
    path = f"/v1/arbitrage/records/{gateway.records()[0].id}/feedback"
    assert gateway.post(path, grades).status_code == 200
    reply = gateway.post(path, grades)
    error_of(reply, 409, "already_graded")
    assert reply.headers["x-should-retry"] == "false"


def leaving(gateway, headers=None, body=DECISION, seconds=0.5):
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(f"{gateway.url}/v1/decisions", json=body, headers=headers, timeout=seconds)


@pytest.mark.parametrize("form", ["menu", "text"])
def test_a_retry_without_a_key_continues_after_a_restart(house, form):
    primary = votes(*UNSURE) if form == "menu" else says("mine", 0.1)
    gateway = house(form=form, primary=primary, guardian=failing())
    ask = gateway.decide if form == "menu" else gateway.chat
    for _ in range(3):
        error_of(ask(), 502, "guardian_failed")
        gateway.restart()
    gateway.guardian.reply = votes(0, 1) if form == "menu" else says("theirs")
    reply = ask()
    [record] = gateway.records()
    assert (record.id, record.completion.finish) == (reply.headers["x-arbitrage-decision-id"], "stop")
    assert len(gateway.primary.bodies) == 1
    ask()
    assert len(gateway.primary.bodies) == 2, "delivery ends the reuse"


def test_a_retry_without_a_key_continues_at_another_gateway_of_the_database(where, tmp_path, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", OURS.keys[0].decode())
    with House(tmp_path, primary=votes(*UNSURE), guardian=failing(), gateway={"database": where}) as gateway:
        error_of(gateway.decide(), 502)

        async def elsewhere():
            async with Gateway(gateway.path) as other:
                return await asyncio.to_thread(
                    requests.post, f"{other.url}/v1/decisions", json=DECISION, headers=JSON, timeout=30
                )

        gateway.guardian.reply = votes(0, 1)
        reply = asyncio.run(elsewhere())
        assert reply.status_code == 200, reply.text
        [record] = gateway.records()
        assert record.id == reply.headers["x-arbitrage-decision-id"]
        assert len(gateway.primary.bodies) == 1
        assert gateway.with_store(lambda store: integrity.verify(store)) == []


def test_a_live_stream_that_its_caller_left_has_one_reply_after_a_kill_too(house):
    """Killed in the middle of the stream, the key keeps decision and Primary leg, and the Guardian is asked again."""
    gateway = house(form="text", primary=says("mine", 0.1), guardian=hanging)
    with pytest.raises(requests.exceptions.RequestException):
        requests.post(f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": True}, headers=KEY, timeout=0.5)
    until(lambda: gateway.guardian.under_way == 0)
    gateway.restart()
    gateway.guardian.reply = says("theirs")
    replies = [gateway.chat({**CHAT, "stream": True}, headers=KEY) for _ in range(2)]
    assert replies[0].text == replies[1].text
    assert "theirs" in replies[0].text
    assert len(gateway.records()) == len(gateway.primary.bodies) == 1


async def test_undelivered_decisions_are_handed_out_once_oldest_first_and_not_after_ten_minutes(where):
    async with await open_store(where) as store:
        ids = await decide(store, 3)
        assert abs(time_of(ids[0]) - time.time()) < 60
        assert not store.has_undelivered
        await store.run(events.commit, [], undelivered={ids[0]: "a", ids[1]: "a", ids[2]: "b"})
        other = await open_store(where)
        await other.change_count()
        assert other.has_undelivered
        taken = await asyncio.gather(*(one.run(claims.take_undelivered, "a") for one in (store, other, store)))
        assert sorted(filter(None, taken)) == sorted(ids[:2])
        assert await other.run(claims.take_undelivered, "none of these") is None
        run_sql(where, "update undelivered set expires = 1")
        assert await other.run(claims.take_undelivered, "b") is None
        run_sql(where, "update changes set undelivered_until = 1")
        await integrity.sweep(store)
        await other.change_count()
        assert not other.has_undelivered
        assert run_sql(where, "select count(*) from undelivered") == [(0,)]
    await other.close()


def test_a_first_attempt_counts_however_often_it_fails(house):
    gateway = house(primary=votes(*UNSURE), guardian=failing())
    error_of(gateway.decide(), 502)
    with sqlite3.connect(database_of(gateway.config), timeout=60) as connection:
        [(first,)] = connection.execute("select expires from undelivered").fetchall()
    time.sleep(0.1)
    error_of(gateway.decide(), 502)
    with sqlite3.connect(database_of(gateway.config), timeout=60) as connection:
        assert connection.execute("select expires, count(*) from undelivered").fetchall() == [(first, 1)]
    connection.close()
    assert new_id() > gateway.records()[0].id
