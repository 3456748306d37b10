import json
import re
import subprocess
import sys

import pytest

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.live.graders import SEVERAL
from tests.gateway.house import CHAT, failing, says, section, until
from tests.gateway.test_modes import command, exported
from tests.scripted import Upstream, completion

SHADOW = {"mode": "shadow", "content": "full"}


@pytest.fixture
def shadowed(house):
    """A text policy in shadow mode whose Primary says "mine 3" and whose Guardian says "theirs 3" to request 3."""

    def number(body):
        return re.search(r"\d+", json.dumps(body["messages"][0]))[0]

    def start(count=4, policy=SHADOW, **options):
        gateway = house(
            form="text",
            certificate=policy.get("mode") != "shadow",
            primary=lambda path, body, n: says(f"mine {number(body)}", 0.8)(),
            guardian=options.pop("guardian", lambda path, body, n: says(f"theirs {number(body)}")()),
            policy=policy,
            **options,
        )
        gateway.headers = {"Authorization": f"Bearer {gateway.key('call')[0]}"}
        for k in range(count):
            gateway.chat({**CHAT, "messages": [{"role": "user", "content": f"Request {k}?"}]})
        return gateway

    return start


@pytest.fixture
def judge():
    """Add a judge to a gateway's configuration; yields the upstream."""

    def start(gateway, reply):
        upstream = Upstream(reply)
        gateway.run(gateway._upstreams.enter_async_context(upstream))
        model = {"kind": "chat", "url": upstream.url, "model": "judge", "price": [1.0, 2.0], "attempts": 1}
        gateway.path.write_text(gateway.path.read_text() + section("judge", model) + section("judge.pinned", {}))
        return upstream

    return start


def strict(path, body, number):
    """A judge who prefers the Guardian's answers."""
    return completion(json.dumps({"grade": 1.0 if "theirs" in body["messages"][0]["content"] else 0.25}))


def grade(gateway, how, *more, code=0):
    options = ["--policy", "support", "--grade", how, "--config", gateway.path, "--json"]
    result = command("records", "grade", *options, *more, code=code)
    return json.loads(result.stdout) if code == 0 else result.stderr


def test_an_export_names_the_settings_that_its_requests_had(shadowed):
    gateway = shadowed(count=2, task={"settings": "as requested"})
    message = {"role": "user", "content": "Request 9?"}
    gateway.chat({**CHAT, "messages": [message], "temperature": 0, "max_tokens": 9})
    grade(gateway, "python:tests.gateway.test_grade_records:longer")
    log = ScoreLog.read(exported(gateway, "--score-log"))
    assert log.identities["requests"] == {
        "settings": "as requested",
        "fields": {"max_tokens": [None, 9], "temperature": [None, 0.0]},
    }
    assert calibrate(log, 0.5).identities["requests"] == log.identities["requests"]


def longer(request, answer, expected):
    return float(len(answer) > 6)


def test_a_judge_grades_what_is_stored_and_the_export_can_be_calibrated(shadowed, judge):
    gateway = shadowed(count=30)
    upstream = judge(gateway, strict)
    planned = grade(gateway, "judge", "--dry-run")
    assert (planned["gradable"], planned["models"][0]["spent"]["calls"], upstream.bodies) == (30, 60, [])
    done = grade(gateway, "judge")
    assert (done["newly_graded"], done["failed"], len(upstream.bodies)) == (30, 0, 60)
    assert 0 < done["cost"] < planned["cost"]
    log = ScoreLog.read(exported(gateway, "--score-log"))
    assert log.guardian.tolist() == [1.0, 0.25] * 30
    assert (log.identities["grader"]["kind"], log.identities["grader"]["model"]) == ("judge", "judge")
    assert calibrate(log, 0.3).identities["grader"] == log.identities["grader"]
    [first] = gateway.records()[0].feedback
    assert (first.by, first.grader) == ("records grade", log.identities["grader"])


def test_a_second_run_grades_only_what_has_no_grades(shadowed, judge):
    gateway = shadowed(count=5)
    upstream = judge(gateway, strict)
    assert grade(gateway, "judge", "--limit", 2)["newly_graded"] == 2
    assert grade(gateway, "judge")["newly_graded"] == 3
    again = grade(gateway, "judge")
    assert (again["graded"], again["gradable"], again["newly_graded"], len(upstream.bodies)) == (5, 0, 0, 10)


def test_a_judge_that_fails_in_between_leaves_rows_for_the_next_run(shadowed, judge):
    def moody(path, body, number):
        return (500, {"error": {"message": "later"}}) if number in (2, 3) else strict(path, body, number)

    gateway = shadowed(count=4)
    judge(gateway, moody)
    done = grade(gateway, "judge", "--concurrency", 1)
    assert (done["newly_graded"], done["failed"]) == (2, 2)
    assert "later" in done["first_problem"]
    assert grade(gateway, "judge")["newly_graded"] == 2


def test_a_judge_that_never_works_stops_the_run_with_one_line(shadowed, judge):
    gateway = shadowed(count=25)
    judge(gateway, failing())
    assert "the grader failed on all of the first 20 rows" in grade(gateway, "judge", "--concurrency", 1, code=2)


def test_a_run_stops_before_its_cost_limit_and_keeps_the_rows_it_graded(shadowed, judge):
    def dear(path, body, number):
        return strict(path, body, number) | {"usage": completion("", usage=(400, 50))["usage"]}

    gateway = shadowed(count=6)
    upstream = judge(gateway, dear)
    assert "run again with a higher --max-cost" in grade(
        gateway, "judge", "--max-cost", "0.0016", "--concurrency", 1, code=2
    )
    paid = len(upstream.bodies)
    assert 0 < paid < 12
    done = grade(gateway, "judge")
    assert done["graded"] + done["newly_graded"] == 6
    assert done["graded"] > 0


def test_equal_answers_are_graded_once(shadowed, judge):
    gateway = shadowed(count=3, guardian=lambda path, body, n: says(f"mine {n}")())
    upstream = judge(gateway, strict)
    grade(gateway, "judge")
    assert len(upstream.bodies) == 3


def label(gateway, headers, text):
    for record in gateway.records():
        gateway.post(f"/v1/arbitrage/records/{record.id}/feedback", {"label": text}, headers=headers)


def test_comparisons_take_the_labels_of_those_who_may_grade(shadowed):
    gateway = shadowed(count=1)
    assert grade(gateway, "exact")["no_label"] == 1
    label(gateway, gateway.headers, "mine 0")  # a caller who would like the Primary to be right
    assert grade(gateway, "exact")["no_label"] == 1
    label(gateway, gateway.keyed("review"), "theirs 0")
    assert grade(gateway, "exact")["newly_graded"] == 1
    assert ScoreLog.read(exported(gateway, "--score-log")).guardian.tolist() == [1.0, 0.0]


def test_callers_who_may_grade_may_label(shadowed):
    gateway = shadowed(count=1, policy={**SHADOW, "callers_grade": True})
    label(gateway, gateway.headers, "theirs 0")
    assert grade(gateway, "exact")["newly_graded"] == 1


def test_a_function_grades_and_its_source_is_on_record(shadowed):
    gateway = shadowed(count=2)
    (gateway.folder / "rubric.py").write_text("def polite(request, answer, expected):\n    return 0.5\n")
    assert grade(gateway, "python:rubric:polite")["newly_graded"] == 2
    [grader] = {json.dumps(dict(record.feedback[0].grader)) for record in gateway.records()}
    assert json.loads(grader)["name"] == "rubric:polite"
    assert len(json.loads(grader)["source_sha256"]) == 64


def test_rows_of_several_graders_say_so(shadowed, judge):
    gateway = shadowed(count=2)
    judge(gateway, strict)
    grade(gateway, "judge", "--limit", 1)
    gateway.post(
        f"/v1/arbitrage/records/{gateway.records()[0].id}/feedback",
        {"grades": {"primary": 0.0, "guardian": 1.0}},
        headers=gateway.keyed("review"),
    )
    grader = ScoreLog.read(exported(gateway, "--score-log")).identities["grader"]
    assert grader["kind"] == SEVERAL
    assert {one["kind"] for one in grader["graders"]} == {"judge", "feedback"}


def test_what_was_not_kept_or_not_answered_is_counted(shadowed, judge):
    hashed = shadowed(count=2, policy={"mode": "shadow"})
    judge(hashed, strict)
    assert grade(hashed, "judge")["no_content"] == 2
    silent = shadowed(count=2, guardian=failing())
    judge(silent, strict)
    assert grade(silent, "judge")["no_guardian"] == 2


def test_audited_answers_of_the_primary_are_graded_beside_the_audits(shadowed, judge):
    gateway = shadowed(count=3, policy={"audit_rate": 1.0, "content": "full"})
    judge(gateway, strict)
    until(lambda: all(record.audit is not None for record in gateway.records()))
    assert grade(gateway, "judge")["newly_graded"] == 3
    assert ScoreLog.read(exported(gateway, "--score-log")).guardian.tolist() == [1.0, 0.25] * 3


def test_a_primary_that_failed_costs_no_grade(house, judge):
    gateway = house(form="text", certificate=False, primary=failing(), policy=SHADOW)
    gateway.chat()
    upstream = judge(gateway, strict)
    assert grade(gateway, "judge")["newly_graded"] == 1
    assert len(upstream.bodies) == 1
    log = ScoreLog.read(exported(gateway, "--score-log"))
    assert calibrate(log, 0.5, missing_guardian="worst_case").evidence.no_opinion_rows == 1


def test_menus_need_no_grades(house):
    gateway = house(certificate=False, policy={"mode": "shadow"})
    gateway.decide()
    assert "chooses from menus, whose rows need no grades" in grade(gateway, "exact", code=2)


def test_a_person_grades_without_seeing_which_model_answered(shadowed):
    gateway = shadowed(count=30)  # which model is shown first depends on ids, and must differ somewhere
    command_line = [sys.executable, "-m", "conformal_arbitrage", "records", "grade", "--policy", "support", "--grade",
                    "human", "--config", str(gateway.path)]  # fmt: skip
    done = subprocess.run(command_line, input="y\nn\n" * 30, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Graded: 30 rows" in done.stdout
    first = {record.feedback[0].grades.primary for record in gateway.records()}
    assert first == {0.0, 1.0}  # y came first, and either model did
