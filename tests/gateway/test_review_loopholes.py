"""Ways around the rules of reviewing that are closed: what reviewers can find out, and what second opinions hold up."""

import json

import pytest

from conformal_arbitrage.monitoring.votes import LEVELS
from conformal_arbitrage.store import reviews
from tests.gateway.house import DECISION, UNSURE, error_of, hanging, until, votes
from tests.gateway.people import LONG, Later, PeopleHouse, settled

SURE = (0.9, 0.1)


def mixed(path, body, number):
    """A Primary that is sure of what says so."""
    return votes(*(SURE if "sure" in json.dumps(body) else UNSURE))(path, body, number)


@pytest.fixture
def crew(house):
    """A gateway with keys: a caller and reviewers."""

    def start(**options):
        one = house(PeopleHouse, **{"primary": mixed, "members": ("ann", "bob"), **options})
        one.headers = one.keyed("call")
        return one, [one.reviewer(label) for label in one.members]

    return start


def asked(house, body=DECISION, **headers):
    return Later(lambda: house.decide(body, headers={**house.headers, **headers}))


def test_a_second_opinion_is_asked_for_after_a_deferral_and_cannot_look_at_the_first(crew):
    house, (ann, bob) = crew(policy={"content": "full"}, human={"overlap": 1.0})
    call = asked(house)
    ann.decide(1)
    reply = call.result()
    assert reply.status_code == 200
    held = bob.wait()
    id = reply.json()["answers"][0]["arbitrage"]["id"]
    error_of(house.get(f"/v1/arbitrage/records/{id}", headers=bob.headers), 404, "record_not_found")
    error_of(house.get(f"/v1/arbitrage/reviews/{id}", headers=bob.headers), 404, "review_not_found")
    assert house.get(f"/v1/arbitrage/reviews/{id}").json()["status"] == "decided"
    assert bob.vote(held, 0).status_code == 200
    [(_, opinion)] = until(lambda: house.with_store(lambda store: store.run(reviews.second_opinions)), LONG)
    assert (opinion.first, opinion.second) == (("ann", 1), ("bob", 0))


@pytest.mark.parametrize("audited", [False, True])
def test_second_opinions_on_a_score_know_that_its_levels_are_ordered(crew, audited):
    house, (ann, bob) = crew(human={"overlap": 1.0}, policy={"audit_rate": 1.0}, review={"audit_spread": 0.0})
    levels = [{"label": name} for name in ("poor", "fair", "good")]
    text = "I am sure." if audited else "A letter."
    body = {**DECISION, "input": text, "questions": [{"type": "score", "levels": levels}]}
    call = asked(house, body)
    ann.decide(2)
    assert call.result().status_code == 200
    assert bob.vote(bob.wait(), 1).status_code == 200
    [(_, opinion)] = until(lambda: house.with_store(lambda store: store.run(reviews.second_opinions)), LONG)
    assert (opinion.first, opinion.second) == (("ann", 2), ("bob", 1))
    assert opinion.menu.startswith(LEVELS)


def test_a_caller_who_is_gone_does_not_wait_for_a_second_opinion(crew):
    house, (ann, _) = crew(human={"overlap": 1.0}, review={"wait": 1.0})
    location = asked(house, **{"Idempotency-Key": "k"}).result().headers["location"]
    ann.decide(1)
    until(lambda: house.get(location).json()["status"] == "decided", LONG)


def test_callers_who_wait_do_not_keep_reviewers_out(crew):
    house, (ann, _) = crew(gateway={"max_in_flight": 1})
    call = asked(house)
    until(lambda: house.with_store(lambda store: store.run(reviews.open_places)), LONG)
    ann.decide(1)
    assert call.result().status_code == 200


def letter(name):
    return {**DECISION, "input": f"Letter {name}."}


def open_places(house):
    return house.with_store(lambda store: store.run(reviews.open_places))


def test_one_key_cannot_take_all_places_where_callers_wait_for_people(crew):
    house, (ann, _) = crew(gateway={"max_in_flight": 8})
    calls = [asked(house, letter(number)) for number in range(2)]
    until(lambda: open_places(house) == 2, LONG)
    told = asked(house, letter("more"), **{"Idempotency-Key": "k"}).result()
    error_of(told, 409, "review_pending")
    assert told.headers["x-should-retry"] == "true"
    assert open_places(house) == 3  # it is decided all the same
    location = told.headers["location"]
    assert house.get(f"{location}?wait=50").json()["status"] == "waiting"  # at once
    other = Later(lambda: house.decide(letter("other"), headers=house.keyed("call")))
    until(lambda: open_places(house) == 4, LONG)
    for _ in range(4):
        ann.decide(1)
    assert [call.result().status_code for call in (*calls, other)] == [200] * 3
    assert until(lambda: house.get(location).json()["status"] == "decided", LONG)
    assert asked(house, letter("more"), **{"Idempotency-Key": "k"}).result().status_code == 200


def test_a_key_without_places_is_told_to_come_back_also_where_late_answers_fall_back(crew):
    review = {"wait": 50.0, "late": "fallback"}
    house, (ann, _) = crew(gateway={"max_waiting_per_key": 1}, review=review, task={"safe_action": "c"})
    ann.claim()  # somebody is there
    call = asked(house)
    until(lambda: open_places(house) == 1, LONG)
    error_of(asked(house, letter("more")).result(), 409, "review_pending")
    ann.decide(1)
    assert (call.result().status_code, "fallback" in call.result().text) == (200, False)


def test_callers_of_one_idempotency_key_cannot_take_all_places(house):
    gateway = house(primary=hanging, gateway={"max_waiting_per_key": 2})
    gateway.headers = gateway.keyed("call")
    calls = [Later(lambda: gateway.decide(headers={"Idempotency-Key": "k"})) for _ in range(4)]
    refused = until(lambda: [call for call in calls if call.done], LONG)
    error_of(refused[0].result(), 409, "under_way")
    settled()
    assert sum(call.done for call in calls) == 1
    gateway.stop()
    for call in calls:
        call.result()


def test_operators_are_served_while_callers_take_all_places(crew):
    house, (ann, _) = crew(gateway={"max_in_flight": 2, "max_waiting_per_key": 2})
    calls = [asked(house, letter(number)) for number in range(2)]
    until(lambda: open_places(house) == 2, LONG)
    error_of(asked(house, letter("more")).result(), 429, "rate_limit_exceeded")
    admin, policy = house.keyed("admin"), "/v1/arbitrage/policies/support"
    assert house.get("/metrics", headers=house.keyed("operate")).status_code == 200
    assert house.get("/health/ready").status_code == 200
    assert house.get(f"{policy}/monitor", headers=admin).status_code == 200
    error_of(house.post(f"{policy}/lift", {"reason": "a test"}, headers=admin), 409, "no_alarm")
    assert house.post(f"{policy}/rollback", {}, headers=admin).status_code != 429
    for _ in range(2):
        ann.decide(1)
    assert [call.result().status_code for call in calls] == [200, 200]
