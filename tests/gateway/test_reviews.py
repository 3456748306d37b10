"""People as Guardian, over HTTP: what reviewers are given, what callers get, and what is recorded."""

import json

import pytest

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.store import integrity, pages, reviews
from tests.gateway.house import DECISION, UNSURE, error_of, until, votes
from tests.gateway.people import TEAM, Later, PeopleHouse, Reviewer

UNSURE_PRIMARY = votes(*UNSURE)


@pytest.fixture
def people(house):
    """Start a gateway with people, whose Primary is unsure unless told otherwise."""

    def start(**options):
        return house(PeopleHouse, **{"primary": UNSURE_PRIMARY, **options})

    return start


@pytest.fixture
def crew(people):
    """A gateway with keys: a caller and three reviewers."""

    def start(**options):
        one = people(**options)
        one.headers = one.keyed("call")
        return one, [one.reviewer(label) for label in one.members]

    return start


def asked(house, body=DECISION, key=None, **rest):
    """A decision that is being waited for."""
    headers = {} if key is None else {"Idempotency-Key": key}
    return Later(lambda: house.decide(body, headers={**house.headers, **headers}, **rest))


def test_a_caller_gets_what_people_decide(crew):
    house, (ann, *_) = crew(human={"price_per_call": 0.25, "instructions": "Be kind."})
    call = asked(house)
    held = ann.decide(1)
    assert {name: held[name] for name in ("kind", "policy", "instructions", "options")} == {
        "kind": "choose", "policy": "support", "instructions": "Be kind.", "options": ["a", "b", "c"],
    }  # fmt: skip
    assert "A letter." in held["context"]
    reply = call.result()
    assert reply.status_code == 200, reply.text
    [answer] = reply.json()["answers"]
    assert (answer["choice"], answer["confidence"]) == ("b", 1.0)
    guardian = answer["arbitrage"]["legs"][1]
    assert (guardian["model"], guardian["cost"], guardian["failed"]) == (TEAM, 0.25, False)
    assert answer["arbitrage"]["decided_by"] == "guardian"
    assert answer["arbitrage"]["guarantee"] == "crc"
    [record] = house.records()
    assert record.decision.action == 1
    assert record.decision.legs[1].scores == (0.0, 1.0, 0.0)
    [vote] = record.completion.review.votes
    assert (vote.reviewer, vote.choice, record.completion.review.rule) == ("ann", 1, "majority")
    assert house.with_store(lambda store: integrity.verify(store)) == []


def test_the_primary_alone_asks_nobody(people):
    house = people(primary=votes(0.9, 0.1))
    assert house.decide().json()["answers"][0]["arbitrage"]["decided_by"] == "primary"
    assert Reviewer(house, {}).claim() is None


def test_a_panel_of_three_ends_with_the_second_vote_that_agrees(crew):
    house, (ann, bob, cid) = crew(human={"panel": 3})
    call = asked(house)
    ann.decide(2)
    assert not call.done
    bob.decide(2)
    assert call.result().json()["answers"][0]["choice"] == "c"
    assert cid.claim() is None
    [record] = house.records()
    assert [vote.reviewer for vote in record.completion.review.votes] == ["ann", "bob"]


def test_a_split_panel_goes_to_a_lead(crew):
    house, (ann, bob) = crew(human={"panel": 3, "rule": "unanimous"}, members=("ann", "bob"), leads=("lea",))
    lea = house.reviewer("lea")
    call = asked(house)
    ann.decide(0)
    assert lea.claim() is None
    bob.decide(1)
    lea.decide(1)
    assert call.result().json()["answers"][0]["choice"] == "b"
    review = house.records()[0].completion.review
    assert [(vote.reviewer, vote.level) for vote in review.votes] == [("ann", 0), ("bob", 0), ("lea", 1)]
    assert review.level == 1


def test_if_nobody_can_tell_the_decision_has_no_action(crew):
    house, reviewers = crew()
    call = asked(house, key="k")
    for one in reviewers:
        held = one.wait()
        assert one.post(f"{held['token']}/skip").status_code == 204
    error_of(call.result(), 504, "review_expired")
    [record] = house.records()
    assert (record.decision.action, record.completion.finish) == (None, "failed")
    again = asked(house, key="k").result()
    assert error_of(again, 504, "review_expired")
    assert again.headers["x-arbitrage-replayed"] == "true"
    assert again.headers["x-should-retry"] == "false"


def test_a_vote_can_be_undone_in_time(crew):
    house, (ann, *_) = crew(review={"undo": 6.0})
    call = asked(house)
    held = ann.wait()
    assert 0 < ann.vote(held, 0).json()["counts_in"] <= 6.0
    again = ann.post(f"{held['token']}/undo")
    assert again.json() == held
    assert ann.vote(held, 2).status_code == 200
    assert call.result().json()["answers"][0]["choice"] == "c"
    assert error_of(ann.post(f"{held['token']}/undo"), 409, "vote_counts")
    [record] = house.records()
    assert [vote.choice for vote in record.completion.review.votes] == [2]


def test_votes_are_checked(crew):
    house, (ann, bob, _) = crew()
    call = asked(house)
    held = ann.wait()
    assert "from 0 to 2" in error_of(ann.vote(held, 3), 422, "no_such_option")["message"]
    error_of(ann.post(f"{held['token']}/vote", {"choice": 0, "active": -1}), 422)
    error_of(ann.post(f"{held['token']}/vote", {"choice": "b"}), 400)
    error_of(bob.vote(held, 1), 409, "item_gone")
    error_of(bob.post(f"{held['token']}/renew"), 409, "lease_lost")
    error_of(bob.post(f"{held['token']}/skip"), 409, "lease_lost")
    error_of(bob.post("nothing%00/vote", {"choice": 0}), 409, "item_gone")
    assert ann.post(f"{held['token']}/renew").status_code == 204
    assert ann.post(f"{held['token']}/return").status_code == 204
    bob.decide(0)
    assert call.result().status_code == 200


def test_only_people_on_a_team_review(crew):
    house, _ = crew()
    error_of(house.reviewer("eve").post("claim"), 403, "not_on_a_team")
    error_of(Reviewer(house, house.headers).post("claim"), 403, "insufficient_scope")
    assert house.reviewer("ann", "admin").claim() is None


def test_a_pending_review_is_a_409_that_says_how_to_come_back(crew):
    house, (ann, *_) = crew(review={"wait": 1.0})
    keyed = asked(house, key="mine").result()
    assert "same Idempotency-Key" in error_of(keyed, 409, "review_pending")["message"]
    assert keyed.headers["x-should-retry"] == "true"
    assert 1 <= int(keyed.headers["retry-after"]) <= 30
    location = keyed.headers["location"]
    assert location == f"/v1/arbitrage/reviews/{keyed.headers['x-arbitrage-decision-id']}"
    assert house.get(location).json() == {"id": location.rpartition("/")[2], "status": "waiting", "reply": None}
    ann.decide(2)
    polled = house.get(location, params={"wait": 30}).json()
    assert (polled["status"], polled["reply"]["answers"][0]["choice"]) == ("decided", "c")
    again = asked(house, key="mine").result()
    assert again.json() == polled["reply"]
    assert asked(house, key="mine").result().content == again.content
    other = asked(house, {**DECISION, "input": "Another."}, key="mine").result()
    error_of(other, 422, "idempotency_key_reused")
    stranger = house.keyed("call")
    error_of(house.get(location, headers=stranger), 404, "review_not_found")
    error_of(house.get("/v1/arbitrage/reviews/none"), 404, "review_not_found")
    error_of(house.get(location, params={"wait": "x"}), 400)
    error_of(house.get(location, params={"wait": "600"}), 400)


def test_without_a_key_the_reply_names_one(crew):
    house, (ann, *_) = crew(review={"wait": 1.0})
    first = asked(house).result()
    id = first.headers["x-arbitrage-decision-id"]
    assert f"Idempotency-Key: review:{id}" in error_of(first, 409, "review_pending")["message"]
    assert first.headers["x-should-retry"] == "false"
    again = asked(house).result()  # the same body without a key finds the same review
    assert again.headers["x-arbitrage-decision-id"] == id
    ann.decide(0)
    joined = until(lambda: (one := asked(house, key=f"review:{id}").result()).status_code == 200 and one)
    assert joined.json()["answers"][0]["arbitrage"]["id"] == id
    assert len(house.records()) == 1


def test_late_callers_get_the_safe_action_if_that_is_the_policy(crew):
    house, (ann, *_) = crew(review={"wait": 8.0, "late": "fallback"}, task={"safe_action": "c"})
    at_once = asked(house).result()  # nobody is there
    [answer] = at_once.json()["answers"]
    assert (answer["choice"], answer["arbitrage"]["decided_by"]) == ("c", "fallback")
    assert answer["arbitrage"]["guarantee"] == "none"
    assert ann.claim() is None
    call = asked(house)
    held = ann.wait()
    assert call.result().json()["answers"][0]["arbitrage"]["decided_by"] == "fallback"
    assert ann.vote(held, 1).json() == {"counts_in": 0.0}  # late: nothing tells her
    for record in house.records():
        assert (record.completion.decided_by, record.decision.action) == ("fallback", 2)
        assert record.decision.legs[1].scores is None  # a row without a score of the Guardian, whatever was given
        assert record.decision.no_guarantee


def test_a_deadline_without_a_safe_action_is_an_error_that_is_kept(crew):
    house, _ = crew(review={"wait": 1.0, "deadline": 8.0})
    first = asked(house, key="k").result()
    location = first.headers["location"]
    done = until(lambda: (found := house.get(location).json())["status"] != "waiting" and found)
    assert (done["status"], done["reply"]["error"]["code"]) == ("expired", "review_expired")
    error_of(asked(house, key="k").result(), 504, "review_expired")


@pytest.mark.parametrize("review", [{"late": "fallback"}, {"deadline": 1.0}], ids=["nobody there", "deadline"])
def test_in_shadow_mode_too_late_callers_get_the_safe_action_where_the_menu_has_it(crew, review):
    house, _ = crew(review=review, task={"safe_action": "c"}, policy={"mode": "shadow"})
    [answer] = asked(house, key="k").result().json()["answers"]
    assert (answer["choice"], answer["arbitrage"]["decided_by"]) == ("c", "fallback")
    assert answer["arbitrage"]["guarantee"] == "none"
    [record] = house.records()
    assert (record.completion.decided_by, record.decision.action) == ("fallback", 2)
    assert record.decision.legs[1].scores is None  # a row without a score of the Guardian, whatever was given
    other = [{**DECISION["questions"][0], "choices": [{"value": "x"}, {"value": "y"}]}]
    refused = error_of(asked(house, {**DECISION, "questions": other}).result(), 504, "review_expired")
    assert "the safe action 'c' is not one of the actions" in refused["message"]


def test_of_three_questions_one_goes_to_people(crew):
    def reply(path, body, number):
        sure = "sure" in json.dumps(body)
        return votes(*((0.9, 0.1) if sure else UNSURE))(path, body, number)

    house, (ann, *_) = crew(primary=reply, review={"wait": 1.0})
    question = DECISION["questions"][0]
    body = {**DECISION, "questions": [{**question, "instructions": text} for text in ("sure 1", "doubt", "sure 2")]}
    first = asked(house, body, key="k").result()
    error_of(first, 409, "review_pending")
    assert len(house.primary.bodies) == 3
    held = ann.decide(2)
    assert "doubt" in held["context"]
    location = first.headers["location"]
    polled = house.get(location, params={"wait": 30}).json()
    assert [one["choice"] for one in polled["reply"]["answers"]] == ["a", "c", "a"]
    assert asked(house, body, key="k").result().json() == polled["reply"]
    assert len(house.primary.bodies) == 3
    assert len(house.records()) == 3


def test_a_restart_loses_nothing(crew):
    house, (ann, *_) = crew(review={"wait": 1.0})
    location = asked(house, key="k").result().headers["location"]
    held = ann.wait()
    house.restart()
    assert ann.vote(held, 1).status_code == 200
    house.restart()
    polled = house.get(location, params={"wait": 30}).json()
    assert polled["reply"]["answers"][0]["choice"] == "b"


def test_a_caller_who_leaves_without_a_key_takes_the_question_along(crew):
    house, (ann, *_) = crew()
    call = asked(house, DECISION)
    held = ann.wait()
    ann.post(f"{held['token']}/return")
    assert not call.done
    import socket

    # a second caller, who hangs up
    body = json.dumps({**DECISION, "input": "Leaving."}).encode()
    head = f"POST /v1/decisions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {house.headers['Authorization']}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", house.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: house.with_store(lambda store: store.run(reviews.backlogs, {TEAM: ()}))[0].open == 2)
    until(lambda: house.with_store(lambda store: store.run(reviews.backlogs, {TEAM: ()}))[0].open == 1)
    ann.decide(0)
    assert call.result().status_code == 200


def test_a_new_version_does_not_strand_those_who_wait(crew):
    house, (ann, *_) = crew(review={"wait": 1.0})
    location = asked(house, key="k").result().headers["location"]
    admin = house.keyed("admin")
    certificate = house.certificate(0.2).to_dict()
    done = house.put("/v1/arbitrage/policies/support", {"certificate": certificate}, headers=admin)
    assert done.status_code == 200, done.text
    ann.decide(1)
    [answer] = house.get(location, params={"wait": 30}).json()["reply"]["answers"]
    assert (answer["choice"], answer["arbitrage"]["guarantee"]) == ("b", "none")
    assert "another version" in answer["arbitrage"]["reason"]


def test_audits_become_questions_that_look_the_same(crew):
    house, (ann, bob, _) = crew(
        primary=lambda path, body, number: votes(*((0.9, 0.1) if "sure" in json.dumps(body) else UNSURE))(
            path, body, number
        ),
        policy={"audit_rate": 1.0},
        review={"audit_spread": 0.0},
        human={"overlap": 1.0},
    )
    body = {**DECISION, "input": "Are you sure?"}
    assert house.decide(body).json()["answers"][0]["arbitrage"]["decided_by"] == "primary"
    audit = ann.wait()
    assert bob.claim() is None  # a second opinion comes after the first
    ann.vote(audit, 1)
    second = bob.wait()
    call = asked(house, {**DECISION, "input": "Are you really?"})
    deferral = ann.wait()
    assert call.done is False
    assert ann.vote(deferral, 2).status_code == 200
    assert call.result().status_code == 200
    hidden = [
        {**one, "token": "", "context": one["context"].replace("really", "sure")} for one in (audit, second, deferral)
    ]
    assert json.dumps(hidden[0]) == json.dumps(hidden[1]) == json.dumps(hidden[2])
    records = {record.decided_by: record for record in house.records()}
    audited = until(lambda: house.with_store(lambda store: store.run(pages.record, records["primary"].id)).audit)
    assert audited.scores == (0.0, 1.0, 0.0)
    assert audited.review.votes[0].reviewer == "ann"
    assert audited.served == TEAM
    assert bob.vote(second, 0).status_code == 200


def test_a_record_under_review_is_hidden_from_reviewers(crew):
    house, (ann, bob, _) = crew(policy={"audit_rate": 1.0, "expose": "full", "content": "full"}, review={"wait": 1.0})
    location = asked(house, key="k").result().headers["location"]
    id = location.rpartition("/")[2]
    held = ann.wait()
    error_of(house.get(f"/v1/arbitrage/records/{id}", headers=bob.headers), 404, "record_not_found")
    assert house.get("/v1/arbitrage/records", headers=bob.headers).json() == {
        "object": "list",
        "data": [],
        "next": None,
    }
    admin = house.reviewer("cid", "admin")
    [listed] = house.get("/v1/arbitrage/records", headers=admin.headers).json()["data"]
    assert listed["withheld"] == "under review"
    assert set(listed) == {"id", "created", "policy", "key_id", "decision", "withheld"}
    assert not {"action", "candidates", "margin", "legs", "audited", "pending"} & set(listed["decision"])
    seen = house.get(f"/v1/arbitrage/records/{id}", headers=admin.headers).json()
    assert seen["decision"]["candidates"] == [0, 1]
    assert admin.claim() is None  # whoever looked is not asked
    ann.vote(held, 1)
    house.get(location, params={"wait": 30})
    assert house.get(f"/v1/arbitrage/records/{id}", headers=bob.headers).json()["decided_by"] == "guardian"


def test_figures_of_a_team(crew):
    house, (ann, bob, _) = crew()
    for choice in (0, 1):
        call = asked(house, {**DECISION, "input": str(choice)})
        assert ann.post(f"{ann.wait()['token']}/return").status_code == 204
        ann.decide(choice)
        call.result()
    [team] = house.get("/v1/arbitrage/reviews", headers=ann.headers).json()["data"]
    assert (team["votes"], team["skips"], team["agreement"]) == (2, 0, None)
    assert [(person["reviewer"], person["votes"]) for person in team["reviewers"]] == [("ann", 2)]
    assert team["backlog"]["present"] == ["ann"]
    [of_colleague] = house.get("/v1/arbitrage/reviews", headers=bob.headers).json()["data"]
    assert of_colleague == {**team, "reviewers": []}
    error_of(house.get("/v1/arbitrage/reviews"), 403)
    figures = house.get("/metrics", headers=house.keyed("operate")).text
    assert f'arbitrage_reviewers_present{{team="{TEAM}"}} 1.0' in figures
    assert f'arbitrage_review_votes_last_hour{{team="{TEAM}"}} 2.0' in figures
    assert "ann" not in figures


def test_shadow_mode_asks_people_about_everything(crew):
    house, (ann, *_) = crew(primary=votes(0.9, 0.1), policy={"mode": "shadow"}, certificate=False)
    call = asked(house)
    ann.decide(2)
    assert call.result().json()["answers"][0]["choice"] == "c"
    [record] = house.records()
    assert [leg.role for leg in record.decision.legs] == ["primary", "guardian"]
    assert record.decision.legs[1].scores == (0.0, 0.0, 1.0)


BAD = {
    "members is empty": ("", "members = []"),
    "wait must be from 1 to 55": ("[policies.support.review]\nwait = 60", 'members = ["ann"]'),
    "safe_action": ('[policies.support.review]\nlate = "fallback"', 'members = ["ann"]'),
    "did you mean 'undo'": ("[policies.support.review]\nundoo = 1", 'members = ["ann"]'),
    "did you mean 'members'": ("", 'member = ["ann"]'),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_section_is_refused_with_its_line(tmp_path, message):
    review, team = BAD[message]
    path = tmp_path / "arbitrage.toml"
    path.write_text(
        f"""[primary]\nkind = "decisions"\nurl = "http://127.0.0.1:1"\nmodel = "m"\n[guardian]\nkind = "human"\n"""
        f"""name = "team"\n[teams.team]\n{team}\n[policies.support]\nmode = "shadow"\n{review}\n"""
    )
    with pytest.raises(ConfigError, match=message) as refused:
        read_config(path)
    assert "line " in str(refused.value)


@pytest.mark.parametrize(("key", "value"), [("panel", 2), ("overlap", 1.5)])
def test_a_panel_that_can_tie_is_refused(tmp_path, key, value):
    path = tmp_path / "arbitrage.toml"
    path.write_text(
        f"""[primary]\nkind = "decisions"\nurl = "http://127.0.0.1:1"\nmodel = "m"\n[guardian]\nkind = "human"\n"""
        f"""name = "team"\n{key} = {value}\n"""
    )
    with pytest.raises(ConfigError, match=f"{key}"):
        read_config(path)


HOSTILE = "<script>alert(1)</script> {{ 7*7 }} \u202e \u0000 \ufffe ' or 1=1; --"


def test_hostile_text_reaches_reviewers_as_text(crew):
    house, (ann, *_) = crew()
    choices = [{"value": "a"}, {"value": f"b {HOSTILE}"}, {"value": "c"}]
    body = {**DECISION, "input": HOSTILE, "questions": [{**DECISION["questions"][0], "choices": choices}]}
    call = asked(house, body)
    reply = until(lambda: call.done or ((one := ann.post("claim")).status_code != 204 and one))
    assert reply is not True, call.result().text
    assert reply.status_code == 200, reply.text
    held = reply.json()
    assert "<script>alert(1)</script> {{ 7*7 }}" in held["context"]
    assert held["options"][1].startswith("b <script>")
    assert ann.vote(held, 1).status_code == 200
    assert call.result().status_code == 200


def test_two_gateways_share_a_queue(crew, house):
    """Votes at one gateway complete requests at the other, on one database."""
    first, (ann, *_) = crew(review={"wait": 1.0})
    second = house(
        PeopleHouse, primary=UNSURE_PRIMARY, review={"wait": 1.0}, certificate=False, policy={"mode": "shadow"}
    )
    second.stop()
    second.config = first.config
    second.start()
    location = asked(first, key="k").result().headers["location"]
    there = Reviewer(second, ann.headers, "ann")
    there.decide(2)
    reply = second.get(location, headers=first.headers, params={"wait": 30}).json()["reply"]
    assert reply["answers"][0]["choice"] == "c"
    again = second.decide(DECISION, headers={**first.headers, "Idempotency-Key": "k"})
    assert again.json() == reply == asked(first, key="k").result().json()
    assert len(first.records()) == 1
