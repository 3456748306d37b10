import pytest

from conformal_arbitrage.monitoring.outcomes import (
    AuditedDecision,
    Verdict,
    decision_loss,
    due_days,
    is_counted,
    served_loss,
    session_slot,
)

SCORES = Verdict(scores=(0.1, 0.9, 0.5))


def menu(decided_by, **fields):
    return AuditedDecision(**{"size": 3, "candidates": (0, 2), "action": 0} | fields, decided_by=decided_by)


@pytest.mark.parametrize(
    "decision",
    [
        menu("guardian"),
        menu("guardian", guardian_sees="all-restricted-loss"),
        menu("guardian", guardian_sees="candidates", candidates=(0, 1, 2)),
        menu("guardian", form="text"),
        menu("guardian", binarized=True),
        menu("fallback"),
        menu("primary", size=1, candidates=(0,)),
    ],
)
def test_a_loss_that_is_0_by_definition_needs_no_audit_and_no_second_asking_changes_it(decision):
    assert decision_loss(decision) == 0
    assert decision_loss(decision, SCORES) == 0


def test_the_primarys_loss_is_known_with_the_audit():
    decision = menu("primary", candidates=(0,))
    assert decision_loss(decision) is None
    assert decision_loss(decision, SCORES) == pytest.approx(0.8, abs=1e-12)
    assert decision_loss(decision, Verdict(scores=(-3.0, 0.0, -1.0)), loss_bound=3) == 1
    assert decision_loss(menu("primary", action=1), SCORES) == 0


def test_a_deferral_that_showed_candidates_loses_what_they_lack():
    decision = menu("guardian", guardian_sees="candidates")
    assert decision_loss(decision) is None
    assert decision_loss(decision, SCORES) == pytest.approx(0.4, abs=1e-12)


@pytest.mark.parametrize("scores", [None, (0.1, None, 0.5), (0.1, float("nan"), 0.5), (0.1, 0.9)])
def test_an_audit_without_every_score_settles_nothing(scores):
    assert decision_loss(menu("primary"), Verdict(scores=scores)) is None


def test_free_text_needs_both_grades():
    decision = AuditedDecision(decided_by="primary", form="text")
    assert decision_loss(decision) is None
    assert decision_loss(decision, Verdict(grades=(0.25, 1.0))) == 0.75
    assert decision_loss(decision, Verdict(grades=(1.0, 0.25))) == 0


@pytest.mark.parametrize(
    ("verdict", "loss"),
    [
        (Verdict(), None),
        (SCORES, None),
        (Verdict(label=1), None),
        (Verdict(label=0), 0.0),
        (Verdict(scores=(0.9, 0.1, 0.2)), 0.0),
        (Verdict(scores=(0.1, 0.9, 0.5), label=1), 1.0),
        (Verdict(scores=(0.1, 0.9, 0.5), label=2), 0.0),
    ],
)
def test_a_binarized_loss_needs_what_settles_it(verdict, loss):
    assert decision_loss(menu("primary", candidates=(0,), binarized=True), verdict) == loss


def test_what_was_served_counts_apart():
    assert served_loss(menu("fallback")) == 1
    assert served_loss(menu("fallback"), SCORES) == pytest.approx(0.8, abs=1e-12)
    assert served_loss(menu("fallback"), Verdict(scores=(0.1,))) == 1
    assert served_loss(menu("fallback", form="text"), Verdict(grades=(0.0, 0.5))) == 1
    assert served_loss(menu("fallback", size=1)) == 0
    assert served_loss(menu("primary")) is None
    assert served_loss(menu("primary"), SCORES) == pytest.approx(0.8, abs=1e-12)


def test_a_fallback_without_an_action_counts_whole():
    assert served_loss(menu("fallback", action=None), SCORES) == 1


def test_people_have_longer_than_models():
    assert due_days(menu("primary")) == 1
    for decision in (menu("primary", form="text"), menu("primary", binarized=True)):
        assert due_days(decision) == 14
    assert due_days(menu("primary"), human_guardian=True) == 14


def test_only_drawn_decisions_of_the_enforced_rule_count():
    facts = {"drawn": True, "primary_leg": True, "mode": "enforce", "overridden": False}
    assert is_counted(**facts)
    for name, value in (("drawn", False), ("primary_leg", False), ("mode", "shadow"), ("overridden", True)):
        assert not is_counted(**facts | {name: value})


def test_a_session_counts_once_per_hour():
    assert session_slot("s", 10.0) == session_slot("s", 3599.0) != session_slot("s", 3600.0)
    assert session_slot("s", 10.0) != session_slot("t", 10.0)


@pytest.mark.parametrize(
    ("verdict", "loss"),
    [
        (Verdict(), None),
        (SCORES, None),
        (Verdict(label=1), None),
        (Verdict(scores=(0.9, 0.1, 0.5)), 0.0),
        (Verdict(scores=SCORES.scores, label=1), 1.0),
        (Verdict(scores=SCORES.scores, label=0), -1.0),
        (Verdict(scores=SCORES.scores, label=2), 0.0),
    ],
)
def test_a_net_loss_counts_gains_and_needs_the_right_answer(verdict, loss):
    decision = menu("primary", net=True)
    assert decision_loss(decision, verdict) == loss
    assert decision_loss(menu("guardian", net=True), verdict) == 0.0
    assert due_days(decision) == 14.0
    assert decision_loss(menu("primary", net=True, action=None), SCORES) is None


def test_a_net_loss_in_free_text_is_the_difference_of_the_grades():
    decision = AuditedDecision(decided_by="primary", form="text", net=True)
    assert decision_loss(decision, Verdict(grades=(0.9, 0.5))) == pytest.approx(-0.4)
    assert decision_loss(decision, Verdict(grades=(0.25, 0.5))) == 0.25
    assert decision_loss(decision, Verdict(grades=(1.0, 0.0)), loss_bound=0.5) == -1.0, "a gain beyond the bound"


def test_a_fallback_is_no_loss_of_the_rule_whatever_the_guardian_was_shown():
    shown = menu("fallback", guardian_sees="candidates", candidates=(0,), action=2)
    assert decision_loss(shown) == decision_loss(shown, SCORES) == 0
