"""Grading by people, over HTTP: which answers they are shown, what they may know, and what becomes of their grades."""

import json
import re

import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.live.check import grader_change
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.live.reviewers import grading_terms
from conformal_arbitrage.store import integrity, pages, reviews
from tests.gateway.house import CHAT, error_of, failing, says, until
from tests.gateway.people import LONG, TEAM, GradingHouse, Reviewer, settled
from tests.gateway.test_grade_records import grade
from tests.gateway.test_modes import exported

SHADOW = {"mode": "shadow", "audit_rate": 0.0}


def number(body):
    return re.search(r"\d+", json.dumps(body["messages"][0]))[0]


def mine(path, body, n):
    return says(f"mine {number(body)}", 0.9)()


def theirs(path, body, n):
    return says(f"theirs {number(body)}")()


@pytest.fixture
def graded(house):
    """A gateway in free text with people who grade, and keys: a caller and three reviewers."""

    def start(**options):
        shadow = options.get("policy", {}).get("mode") == "shadow"
        fields = {"primary": mine, "guardian": theirs, "certificate": not shadow, **options}
        one = house(GradingHouse, **fields)
        one.headers = one.keyed("call")
        return one, [one.reviewer(label) for label in one.members]

    return start


def chat(house, k=0, **rest):
    reply = house.chat({**CHAT, "messages": [{"role": "user", "content": f"Request {k}?"}]}, **rest)
    assert reply.status_code == 200, reply.text
    return reply.headers["x-arbitrage-decision-id"]


def by_content(held, **grades):
    """The grades of the answers shown, by the first word of each."""
    return [grades[answer.partition(" ")[0]] for answer in held["answers"]]


def feedback(house):
    return [one for record in house.records() for one in record.feedback]


def monitor(house):
    return house.get("/v1/arbitrage/policies/support/monitor", headers=house.keyed("operate")).json()


def test_an_audited_answer_is_graded_beside_the_guardians_and_the_ledger_has_its_loss(graded):
    house, (ann, *_) = graded(graders={"instructions": "Be strict."})
    id = chat(house, 3)
    held = ann.wait()
    assert set(held) == {"kind", "token", "policy", "instructions", "context", "answers", "lease"}
    assert (held["kind"], held["policy"], held["instructions"]) == ("grade", "support", "Be strict.")
    assert held["context"] == "user: Request 3?"
    assert sorted(held["answers"]) == ["mine 3", "theirs 3"]
    assert monitor(house)["audits"]["pending"] == 1
    assert ann.grade(held, *by_content(held, mine=0.5, theirs=1)).status_code == 200
    until(lambda: monitor(house)["audits"] == {"known": 1, "pending": 0, "missing": 0, "collapsed": 0}, LONG)
    assert monitor(house)["mean_loss"] == 0.5
    [record] = house.records()
    [given] = record.feedback
    assert (record.id, given.by, given.grades.primary, given.grades.guardian) == (id, "review", 0.5, 1.0)
    assert given.grader == dict(grading_terms(house.config, "support").identity)
    assert [(vote.reviewer, tuple(vote.choice)) for vote in given.review.votes] == [("ann", (0.5, 1.0))]
    assert given.review.rule == "median"
    assert house.with_store(lambda store: integrity.verify(store)) == []


def test_rows_of_shadow_mode_are_graded_exported_and_calibrated_on(graded):
    house, (ann, *_) = graded(policy=SHADOW)
    for k in range(6):
        chat(house, k)
    for k in range(6):
        held = ann.wait()
        ann.grade(held, *by_content(held, mine=k % 2, theirs=1))
    until(lambda: len(feedback(house)) == 6, LONG)
    log = ScoreLog.read(exported(house, "--score-log"))
    assert sorted(log.guardian[1::2].tolist()) == [0.0] * 3 + [1.0] * 3
    assert log.identities["grader"]["page"] == "grade 1"
    assert grade(house, "exact")["graded"] == 6  # there is nothing left to do by hand
    certificate = calibrate(log, 0.6)
    assert grader_change(house.config, certificate.identities) is None


def test_who_said_what_is_drawn_and_not_in_the_bytes(graded):
    """The same two texts, said by the one and the other: what a grader gets is the same set of bytes."""

    def shown(primary, guardian):
        house, (ann, *_) = graded(policy=SHADOW, primary=says(primary, 0.9), guardian=says(guardian))
        documents = set()
        while len(documents) < 2:  # the order is drawn by the id, which is new every time
            chat(house)
            held = ann.wait()
            documents.add(json.dumps({**held, "token": ""}))
            assert ann.grade(held, 1, 1).status_code == 200
        return documents

    assert shown("yes", "no") == shown("no", "yes")


def test_answers_that_are_the_same_are_not_shown_and_lose_nothing(graded):
    house, (ann, *_) = graded(primary=says("same", 0.9), guardian=says("same"))
    chat(house)
    until(lambda: monitor(house)["audits"]["known"] == 1, LONG)
    assert monitor(house)["mean_loss"] == 0.0
    [given] = feedback(house)
    assert (given.by, given.grades.primary, given.grades.guardian) == ("identical", 1.0, 1.0)
    assert ann.claim() is None


def test_where_the_primary_failed_the_other_answer_is_graded_alone(graded):
    house, (ann, *_) = graded(policy=SHADOW, primary=failing())
    chat(house, 5)
    held = ann.wait()
    assert held["answers"] == ["theirs 5"]
    error_of(ann.grade(held, 1, 1), 422, "no_such_grade")
    assert ann.grade(held, 0.5).status_code == 200
    [given] = until(lambda: feedback(house), LONG)
    assert (given.grades.primary, given.grades.guardian) == (0.0, 0.5)


def test_a_panel_gives_the_median_of_each_answer(graded):
    house, people = graded(graders={"panel": 3})
    chat(house)
    for one, (primary, guardian) in zip(people, [(0, 1), (1, 0.5), (0.5, 1)], strict=True):
        held = one.wait()
        assert not feedback(house)
        one.grade(held, *by_content(held, mine=primary, theirs=guardian))
    [given] = until(lambda: feedback(house), LONG)
    assert (given.grades.primary, given.grades.guardian) == (0.5, 1.0)
    assert len(given.review.votes) == 3


def test_what_nobody_can_grade_goes_to_a_lead_or_stays_without_grades(graded):
    house, (ann,) = graded(members=("ann",), leads=("lea",))
    lea = house.reviewer("lea")
    first = chat(house, 1)
    for one in (ann, lea):
        held = one.wait()
        assert one.post(f"{held['token']}/skip").status_code == 204
    [given] = until(lambda: feedback(house), LONG)
    assert (given.grades, given.comment, given.review.level) == (None, "nobody could tell", 1)
    assert monitor(house)["audits"]["pending"] == 1  # which counts as the worst once it is due
    chat(house, 2)
    held = ann.wait()
    ann.post(f"{held['token']}/skip")
    held = lea.wait()
    lea.grade(held, 1, 1)
    until(lambda: len(feedback(house)) == 2, LONG)
    done = next(one for record in house.records() if record.id != first for one in record.feedback)
    assert [(vote.reviewer, vote.level) for vote in done.review.votes] == [("lea", 1)]


def test_grades_are_checked_and_can_be_taken_back(graded):
    house, (ann, bob, _) = graded(review={"undo": 30.0})
    chat(house)
    held = ann.wait()
    error_of(ann.vote(held, 0), 422, "no_such_option")
    for grades in ([1], [1, 0.7], [1, 1, 1], [], [1, 2]):
        error_of(ann.grade(held, *grades), 422, "no_such_grade")
    error_of(ann.post(f"{held['token']}/vote", {}), 422)
    error_of(ann.post(f"{held['token']}/vote", {"choice": 0, "grades": [1, 1]}), 422)
    error_of(ann.post(f"{held['token']}/vote", {"grades": "right"}), 400)
    error_of(bob.grade(held, 1, 1), 409, "item_gone")
    assert ann.grade(held, 0, 0).json()["counts_in"] == 30.0
    assert ann.post(f"{held['token']}/undo").json() == held
    assert ann.post(f"{held['token']}/return").status_code == 204
    assert bob.claim()["answers"] == held["answers"]  # everybody sees the same order
    assert not feedback(house)


def test_grades_that_come_otherwise_take_the_pair_out_of_the_queue(graded):
    house, (ann, *_) = graded(policy=SHADOW)
    id = chat(house)
    held = ann.wait()
    grades = {"grades": {"primary": 0.0, "guardian": 1.0}}
    reply = house.post(f"/v1/arbitrage/records/{id}/feedback", grades, headers=house.keyed("review"))
    assert reply.status_code == 200
    until(lambda: house.with_store(lambda store: store.run(reviews.open_places)) == 0 and not _open(house, id), LONG)
    assert ann.grade(held, 1, 1).status_code == 200  # late, which they are not told
    settled()
    assert len(feedback(house)) == 1
    chat(house, 1)
    assert ann.wait()["context"] == "user: Request 1?"


def _open(house, id):
    return house.with_store(lambda store: store.run(pages.under_review, [id]))


def test_rows_from_before_people_graded_are_put_to_them_once(graded):
    house, (ann, *_) = graded(policy={**SHADOW, "grading": "by hand"})
    ids = [chat(house, k) for k in range(3)]
    settled()
    assert ann.claim() is None
    house.stop()
    house.path.write_text(house.path.read_text().replace("by hand", "review"))
    house.config = read_config(house.path)
    for _ in range(2):
        house.start()
        until(lambda: house.with_store(lambda store: store.run(pages.under_review, ids)) == set(ids), LONG)
        assert house.with_store(lambda store: store.run(reviews.open_places)) == 3
        house.stop()
    house.start()


def test_a_record_says_nothing_of_who_said_what_until_it_has_grades(graded):
    house, (ann, bob, _) = graded(guardian=failing())  # so that it waits for its audit, and is in no queue yet
    id = chat(house)
    assert house.with_store(lambda store: store.run(pages.under_review, [id])) == frozenset()
    path = f"/v1/arbitrage/records/{id}"

    def listed(**filters):
        return house.get("/v1/arbitrage/records", headers=ann.headers, params=filters).json()["data"]

    error_of(house.get(path, headers=ann.headers), 404, "record_not_found")
    assert [listed(**wanted) for wanted in ({}, {"decided_by": "primary"}, {"decided_by": "guardian"})] == [[]] * 3
    admin = house.reviewer("bob", "admin")
    assert "mine" in house.get(path, headers=admin.headers).text
    house.guardian.reply = theirs
    held = ann.wait()
    assert listed() == []
    assert bob.claim() is None  # whoever has read the record is not asked to grade it
    ann.grade(held, 1, 1)
    until(lambda: feedback(house), LONG)
    assert "mine" in json.dumps(listed())


def test_a_deferral_that_was_drawn_is_graded_too_as_a_row_for_calibration(graded):
    house, (ann, *_) = graded(primary=lambda path, body, n: says(f"mine {number(body)}", 0.2)())
    chat(house)
    assert house.records()[0].decided_by == "guardian"
    held = ann.wait()
    assert sorted(held["answers"]) == ["mine 0", "theirs 0"]


def test_who_is_on_no_team_of_graders_is_not_asked(graded):
    house, _ = graded(members=("ann",))
    chat(house)
    error_of(house.reviewer("eve").post("claim"), 403, "not_on_a_team")
    error_of(Reviewer(house, house.headers).post("claim"), 403, "insufficient_scope")


@pytest.mark.parametrize(
    ("policy", "graders", "message"),
    [
        ({"content": "hashed"}, {}, 'content = "full"'),
        ({"grading": "by hand"}, {"panel": 3}, 'grading = "review"'),
        ({"form": "menu", "content": "full"}, {}, "free text"),
        ({}, {"team": "nobody"}, f"of {TEAM}; got 'nobody'"),
        ({}, {"panel": 2}, "1, 3 or 5; got 2"),
        ({}, {"overlap": 1.5}, "from 0 to 1; got 1.5"),
    ],
)
def test_a_policy_that_cannot_be_graded_so_is_refused_with_its_line(tmp_path, policy, graders, message):
    house = GradingHouse(tmp_path, policy={"mode": "shadow", **policy}, graders=graders, certificate=False)
    house.path = tmp_path / "arbitrage.toml"
    house.primary.url = house.guardian.url = "http://127.0.0.1:9/v1"
    try:
        house._write({})
        with pytest.raises(ConfigError, match=r"line \d+: \[policies\.support") as raised:
            read_config(house.path)
        assert message in str(raised.value)
    finally:
        house._loop.close()


def test_a_certificate_says_when_its_graders_are_asked_otherwise_today(graded):
    house, _ = graded(policy=SHADOW)
    identity = dict(grading_terms(house.config, "support").identity)
    text = house.path.read_text()
    assert grader_change(house.config, {"grader": identity}) is None
    house.path.write_text(text + "\n[policies.support.graders]\npanel = 3\n")
    assert "panel" in grader_change(read_config(house.path), {"grader": identity})
    house.path.write_text(text.replace('"review"', '"by hand"'))
    assert "no policy has grading" in grader_change(read_config(house.path), {"grader": identity})
