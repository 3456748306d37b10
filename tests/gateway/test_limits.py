import json
import sqlite3
import threading
import time
from contextlib import closing

import pytest

from conformal_arbitrage.models.resilience import Window
from tests.gateway.house import CHAT, DECISION, MENU, QUESTION, UNSURE, error_of, hanging, says, until, votes


def choices(*values):
    return {**DECISION, "questions": [{**QUESTION, "choices": [{"value": value} for value in values]}]}


def deep(levels):
    return b'{"model":"support","input":' + b"[" * levels + b"]" * levels + b"}"


def test_a_body_past_the_limit_is_413_whether_its_length_is_told_or_not(house):
    gateway = house(gateway={"max_body": 2000})
    large = json.dumps({**DECISION, "input": "x" * 3000}).encode()
    error_of(gateway.decide(None, data=large), 413, "body_too_large")
    error_of(gateway.decide(None, data=iter([large[:1500], large[1500:]])), 413, "body_too_large")
    error_of(gateway.put("/v1/arbitrage/policies/support", data=large), 413, "body_too_large")
    assert not gateway.primary.bodies


def test_numbers_of_questions_and_actions_their_length_and_depth_have_limits(house):
    gateway = house(gateway={"max_questions": 2, "max_actions": 4, "max_action_length": 10, "max_depth": 12})
    error_of(gateway.decide({**DECISION, "questions": [QUESTION] * 3}), 422, "too_many_questions")
    error_of(gateway.decide({**DECISION, "questions": []}), 422, "no_questions")
    error_of(gateway.decide(choices(*"abcde")), 422, "number_of_actions")
    error_of(gateway.decide(choices("a")), 422, "number_of_actions")
    error_of(gateway.decide(choices("a", "b" * 11)), 422, "long_action")
    error_of(gateway.chat({**CHAT, "arbitrage": {"actions": list("abcde")}}), 422, "number_of_actions")
    error_of(gateway.decide(None, data=deep(13)), 422, "too_deep")
    assert not gateway.primary.bodies
    assert gateway.decide(choices(*"abcd")).status_code == 200


def test_depth_that_is_just_allowed_is_allowed(house):
    gateway = house(form="text", gateway={"max_depth": 12})
    nested = {"a": 1}
    for _ in range(9):
        nested = {"a": nested}
    assert gateway.chat({**CHAT, "metadata": nested}).status_code == 200


@pytest.mark.parametrize(
    "values", [("a", "a"), ("", "a"), (True, "true"), (False, False)], ids=["twice", "empty", "alike", "same"]
)
def test_actions_that_a_model_could_not_tell_apart_are_refused(house, values):
    error_of(house().decide(choices(*values)), 422, "duplicate_actions")


def test_each_key_has_a_rate_of_its_own(house):
    gateway = house(gateway={"requests_per_minute": 3})
    one, other = gateway.keyed(), gateway.keyed()
    for _ in range(3):
        assert gateway.decide(headers=one).status_code == 200
    reply = gateway.decide(headers=one)
    error_of(reply, 429, "rate_limit_exceeded")
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert gateway.decide(headers=other).status_code == 200
    assert len(gateway.primary.bodies) == 4


def test_requests_in_flight_have_a_limit(house):
    gateway = house(primary=hanging, gateway={"max_in_flight": 1})
    waiting = threading.Thread(target=lambda: gateway.decide(), daemon=True)
    waiting.start()
    until(lambda: gateway.primary.bodies)
    reply = gateway.decide()
    error_of(reply, 429, "rate_limit_exceeded")
    assert int(reply.headers["retry-after"]) >= 1
    gateway.stop()
    waiting.join()


def test_guardian_calls_have_a_limit_over_all_callers(house):
    gateway = house(primary=votes(*UNSURE), gateway={"guardian_calls_per_minute": 2})
    one, other = gateway.keyed(), gateway.keyed()
    assert gateway.decide(headers=one).status_code == 200
    assert gateway.decide(headers=other).status_code == 200
    reply = gateway.decide(headers=one)
    error_of(reply, 429, "rate_limit_exceeded")
    assert 1 <= int(reply.headers["retry-after"]) <= 61  # the second in which the first call was made has to pass
    assert len(gateway.guardian.bodies) == 2
    gateway.primary.reply = votes(0.9, 0.1)
    error_of(gateway.decide(headers=one), 429)  # the Primary is not asked again until it is sure
    plain = {**DECISION, "input": "Another letter."}
    assert gateway.decide(plain, headers=one).status_code == 200  # whatever needs no Guardian goes on


@pytest.mark.parametrize("form", ["menu", "text"])
def test_the_guardian_s_spend_has_a_limit(house, form):
    unsure = votes(*UNSURE) if form == "menu" else says("mine", 0.1)
    guardian = votes(0, 1, usage=(400, 100)) if form == "menu" else says("theirs", usage=(400, 100))  # 500e-6 a call
    short = {"guardian": {"max_tokens": 100}} if form == "text" else {}
    limit = {"guardian_cost_per_hour": 1010e-6}
    gateway = house(form=form, primary=unsure, guardian=guardian, gateway=limit, models=short)
    body = MENU if form == "menu" else CHAT
    assert [gateway.chat(body).status_code for _ in range(3)] == [200, 200, 429]
    assert int(gateway.chat(body).headers["retry-after"]) > 60


def test_a_window_slides():
    window = Window(10.0)
    assert window.wait(0.0, 2) == 0
    window.take(0.0, 1)
    assert window.wait(1.0, 2) == 0
    window.take(4.0, 1)
    assert window.wait(5.0, 2) == 5.0
    assert window.wait(10.0, 2) == 0
    window.take(10.0, 1)
    assert window.wait(11.0, 2) == 3.0


def test_a_database_that_is_gone_is_503_before_any_model_is_asked(house):
    gateway = house()
    assert gateway.decide().status_code == 200
    with closing(sqlite3.connect(gateway.folder / "arbitrage.sqlite")) as database:
        database.execute("alter table changes rename to gone")
        database.commit()
        for refused in (gateway.decide(), gateway.chat(MENU), gateway.chat({**MENU, "stream": True})):
            assert "sqlite" not in error_of(refused, 503, "record_unavailable")["message"]
        error_of(gateway.get("/health/ready"), 503, "record_unavailable")
        assert gateway.get("/health/live").status_code == 200
        assert len(gateway.primary.bodies) == 1
        database.execute("alter table gone rename to changes")
        database.commit()
    assert gateway.decide().status_code == 200


def test_a_decision_that_cannot_be_recorded_does_not_leave(house):
    gateway = house()
    with closing(sqlite3.connect(gateway.folder / "arbitrage.sqlite", isolation_level=None)) as database:
        database.execute("begin immediate")  # another process holds the database: commits wait, then fail
        start = time.monotonic()
        error_of(gateway.decide(), 503, "record_unavailable")
        assert time.monotonic() - start < 20
        database.execute("rollback")
    assert gateway.decide().status_code == 200
    assert len(gateway.records()) == 1


def test_a_key_has_so_much_room_for_feedback_on_a_record_which_stays_whole_and_small(house):
    gateway = house()
    caller, other, admin = gateway.key("call"), gateway.key("review"), gateway.keyed("admin")
    caller, other = ({"Authorization": f"Bearer {secret}"} for secret, _ in (caller, other))
    ids = [gateway.decide(headers=caller).headers["x-arbitrage-decision-id"] for _ in range(2)]

    def say(id, feedback, headers=caller):
        return gateway.post(f"/v1/arbitrage/records/{id}/feedback", feedback, headers=headers)

    for _ in range(3):
        error_of(say(ids[0], {"comment": "x" * 900_000}), 409, "feedback_full")
    large = [say(ids[0], {"comment": "x" * 20_000}).status_code for _ in range(5)]
    assert large == [200] * 3 + [409] * 2
    many = [say(ids[1], {"label": number}).status_code for number in range(60)]
    assert many == [200] * 50 + [409] * 10
    assert all(say(id, {"grades": {"primary": 0, "guardian": 1}}, other).status_code == 200 for id in ids)
    shown = [gateway.get(f"/v1/arbitrage/records/{id}", headers=admin) for id in ids]
    assert [len(reply.json()["feedback"]) for reply in shown] == [4, 51]
    assert max(len(reply.content) for reply in shown) < 100_000
    page = gateway.get("/v1/arbitrage/records", headers=admin)
    assert [len(record["feedback"]) for record in page.json()["data"]] == [51, 4]


def test_feedback_sent_at_once_stays_within_its_room(house):
    gateway = house()
    id = gateway.decide().headers["x-arbitrage-decision-id"]
    calls = [
        threading.Thread(target=gateway.post, args=(f"/v1/arbitrage/records/{id}/feedback", {"label": n}))
        for n in range(70)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert len(gateway.get(f"/v1/arbitrage/records/{id}").json()["feedback"]) == 50
