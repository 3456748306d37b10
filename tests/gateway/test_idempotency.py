import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gateway.house import CHAT, DECISION, UNSURE, error_of, failing, says, until, votes

KEY = {"Idempotency-Key": "order-17"}


def slow(reply, seconds=0.5):
    async def wait(*asked):
        await asyncio.sleep(seconds)
        return reply(*asked)

    return wait


def test_a_request_sent_again_gets_the_same_bytes_and_makes_no_second_decision(house):
    gateway = house(primary=votes(*UNSURE))
    first, again = gateway.decide(headers=KEY), gateway.decide(headers=KEY)
    assert first.content == again.content
    for name in ("x-arbitrage-decision-id", "x-arbitrage-decided-by", "x-arbitrage-alpha", "x-arbitrage-cost"):
        assert first.headers[name] == again.headers[name]
    assert (first.headers.get("x-arbitrage-replayed"), again.headers["x-arbitrage-replayed"]) == (None, "true")
    assert (len(gateway.primary.bodies), len(gateway.guardian.bodies), len(gateway.records())) == (1, 1, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_duplicates_at_the_same_time_get_one_decision_and_the_same_bytes(house, stream):
    gateway = house(form="text", primary=slow(says("mine", 0.9)))
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: gateway.chat({**CHAT, "stream": stream}, headers=KEY), range(8)))
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.content for reply in replies}) == 1
    assert (len(gateway.primary.bodies), len(gateway.records())) == (1, 1)


def test_another_body_under_the_same_key_is_refused_for_good(house):
    gateway = house()
    gateway.decide(headers=KEY)
    reply = gateway.decide({**DECISION, "input": "Another letter."}, headers=KEY)
    error_of(reply, 422, "idempotency_key_reused")
    assert reply.headers["x-should-retry"] == "false"
    assert len(gateway.primary.bodies) == 1


def test_a_failure_is_not_stored_so_that_the_next_try_may_succeed(house):
    gateway = house(primary=votes(*UNSURE), guardian=failing(400))
    error_of(gateway.decide(headers=KEY), 502, "guardian_failed")
    gateway.guardian.reply = votes(0, 1)
    assert gateway.decide(headers=KEY).status_code == 200
    assert gateway.decide(headers=KEY).headers["x-arbitrage-replayed"] == "true"


def test_the_same_key_of_another_caller_is_another_key(house):
    gateway = house()
    one, other = gateway.keyed(), gateway.keyed()
    first = gateway.decide(headers={**KEY, **one})
    second = gateway.decide({**DECISION, "input": "Another letter."}, headers={**KEY, **other})
    assert first.headers["x-arbitrage-decision-id"] != second.headers["x-arbitrage-decision-id"]
    assert gateway.decide(headers={**KEY, **one}).content == first.content


def test_streams_are_replayed_byte_for_byte(house):
    gateway = house(form="text")
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    first, again = gateway.chat(body, headers=KEY), gateway.chat(body, headers=KEY)
    assert first.content == again.content
    assert again.headers["content-type"].startswith("text/event-stream")
    assert again.headers["x-arbitrage-replayed"] == "true"
    assert len(gateway.primary.bodies) == 1


def test_replies_are_replayed_after_a_restart(house):
    gateway = house()
    first = gateway.decide(headers=KEY)
    gateway.restart()
    assert gateway.decide(headers=KEY).content == first.content
    assert len(gateway.primary.bodies) == 1


def test_a_caller_who_goes_away_frees_the_key(house):
    import requests

    gateway = house(primary=slow(votes(0.9, 0.1), 30))
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(f"{gateway.url}/v1/decisions", json=DECISION, headers=KEY, timeout=0.3)
    until(lambda: [r.decided_by for r in gateway.records()] == ["cancelled"])
    gateway.primary.reply = votes(0.9, 0.1)
    assert gateway.decide(headers=KEY).status_code == 200


@pytest.mark.parametrize("name", ["x" * 256, "tab\there", "\x85", "a\xa0b"])
def test_keys_that_are_too_long_or_hold_control_characters_are_refused(house, name):
    gateway = house()
    error_of(gateway.decide(headers={"Idempotency-Key": name.encode("latin-1")}), 400, "bad_idempotency_key")
    assert not gateway.primary.bodies


def test_without_a_key_every_request_is_a_decision(house):
    gateway = house()
    assert gateway.decide().headers["x-arbitrage-decision-id"] != gateway.decide().headers["x-arbitrage-decision-id"]
    assert len(gateway.records()) == 2
