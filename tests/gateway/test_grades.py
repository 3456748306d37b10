import pytest

from conformal_arbitrage import ScoreLog
from tests.gateway.house import error_of
from tests.gateway.test_modes import exported

GRADES = {"grades": {"primary": 0.0, "guardian": 1.0}}
KINDER = {"grades": {"primary": 1.0, "guardian": 1.0}}


def answered(house, **policy):
    """A decision of a caller, and how to send feedback on it."""
    gateway = house(form="text", policy={"mode": "shadow", **policy})
    gateway.caller, gateway.reviewer = gateway.keyed("call"), gateway.keyed("review")
    id = gateway.chat(headers=gateway.caller).headers["x-arbitrage-decision-id"]
    return gateway, lambda feedback, headers: gateway.post(
        f"/v1/arbitrage/records/{id}/feedback", feedback, headers=headers
    )


def test_a_caller_may_not_grade_what_recalibrates_its_own_policy(house):
    gateway, send = answered(house)
    error_of(send(GRADES, gateway.caller), 403, "insufficient_scope")
    for harmless in ({"grade": 1.0}, {"comment": "thanks"}, {"label": "b"}):
        assert send(harmless, gateway.caller).status_code == 200
    assert send(GRADES, gateway.reviewer).status_code == 200


def test_a_policy_may_let_callers_grade(house):
    gateway, send = answered(house, callers_grade=True)
    assert send(GRADES, gateway.caller).status_code == 200


@pytest.mark.parametrize("bug", [False, True])
def test_the_first_grades_count_and_others_need_a_reason(house, bug, monkeypatch):
    gateway, send = answered(house)
    assert send(GRADES, gateway.reviewer).status_code == 200
    error_of(send(KINDER, gateway.reviewer), 409, "already_graded")
    assert send({**KINDER, "reason": "misread"}, gateway.reviewer).status_code == 200
    [record] = gateway.records()
    assert [(one.grades.primary, one.reason) for one in record.feedback] == [(0.0, None), (1.0, "misread")]
    if bug:  # planted: the last grades count
        monkeypatch.setattr("conformal_arbitrage.store.events.first_graded", lambda one: one.feedback[-1])
    log = ScoreLog.read(exported(gateway, "--score-log"))
    assert (log.guardian.tolist() == [1.0, 0.0]) is not bug
