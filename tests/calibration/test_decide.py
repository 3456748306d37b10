import numpy as np
import pytest

from conformal_arbitrage import CertificateError, OptionError, ScoreLog, calibrate
from tests.certificates import altered


@pytest.fixture(scope="module")
def certificate(science):
    return calibrate(science, 0.05, guardian_sees="all")


def test_a_clear_lead_leaves_the_decision_to_the_primary(certificate):
    decision = certificate.decide([0.9, 0.05, 0.05])
    assert (decision.decided_by, decision.action, decision.candidates) == ("primary", 0, (0,))
    assert not decision.deferred
    assert decision.margin == 0.85
    assert decision.relaxation == certificate.relaxation


def test_a_small_lead_leaves_the_decision_to_the_guardian(certificate):
    decision = certificate.decide([0.5, 0.3, 0.2])
    assert (decision.decided_by, decision.action, decision.candidates) == ("guardian", None, (0, 1, 2))
    assert certificate.decide([0.5, 0.3, 0.2], guardian=[0.1, 0.2, 0.9]).action == 2


def test_the_guardian_is_ignored_where_the_primary_decides(certificate):
    assert certificate.decide([0.9, 0.05, 0.05], guardian=[0, 0, 1]).action == 0


@pytest.mark.parametrize(("sees", "action"), [("candidates", 1), ("all", 2), ("all-restricted-loss", 2)])
def test_the_guardian_chooses_among_the_actions_it_is_shown(certificate, sees, action):
    rule = altered(certificate, relaxation=0.1, guardian_sees=sees)
    assert rule.decide([0.5, 0.45, 0.05], guardian=[0.1, 0.2, 0.9]).action == action


def test_scores_of_hidden_actions_may_be_missing(certificate):
    rule = altered(certificate, relaxation=0.1, guardian_sees="candidates")
    assert rule.decide([0.5, 0.45, 0.05], guardian=[0.1, 0.2, None]).action == 1
    assert rule.decide([0.5, 0.45, 0.05], guardian=[0.1, None, 0.2]).action is None
    assert certificate.decide([0.5, 0.45, 0.05], guardian=[0.1, 0.2, np.nan]).action is None


@pytest.mark.parametrize("guardian", [[1], [1, 2, 3, 4], "abc", [[1, 2, 3]], [1, float("inf"), 2], 0.5])
def test_guardian_scores_must_match_the_menu(certificate, guardian):
    with pytest.raises(OptionError, match="one finite number per action, 3 here"):
        certificate.decide([0.5, 0.3, 0.2], guardian=guardian)


def test_a_single_action_needs_no_guardian(certificate):
    decision = certificate.decide([0.2], id="q")
    assert (decision.decided_by, decision.action, decision.margin, decision.id) == ("primary", 0, float("inf"), "q")


def test_no_opinion_and_always_defer_go_to_the_guardian(certificate):
    assert certificate.decide([None, 0.2, 0.9]).decided_by == "guardian"
    never = calibrate(ScoreLog.from_arrays([[0.9, 0.1]] * 5, [[1, 0]] * 5), 0.1)
    assert never.decide([0.9, 0.1], guardian=[0, 0]).action == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"guardian_sees": "all"},
        {"boundary": "random", "key": b"key"},
        {"guardian_sees": "all-restricted-loss", "grid": 0.01},
    ],
    ids=str,
)
def test_decide_equals_apply_on_every_row(science, options):
    log = science.select(range(400))
    certificate = calibrate(science, 0.05, **options)
    for row, decision in enumerate(certificate.apply(log)):
        one = log.row(row)
        assert certificate.decide(one.primary, guardian=one.guardian, id=one.id) == decision


def test_a_key_must_be_bytes_and_belong_to_the_certificate(certificate, science):
    document = calibrate(science, 0.05, boundary="random", key=b"key").to_dict()
    with pytest.raises(CertificateError, match="takes bytes"):
        type(certificate).from_dict(document, key="text")
    with pytest.raises(CertificateError, match="has no key"):
        type(certificate).from_dict(calibrate(science, 0.05, boundary="include").to_dict(), key=b"k")


@pytest.mark.parametrize("given", [[0.1], 0.9, np.array([0.95]), None])
def test_one_number_for_a_routers_certificate_is_refused_with_what_it_takes(given):
    log = ScoreLog.from_router(confidence=[0.2, 0.9] * 50, primary_grade=[0, 1] * 50, guardian_grade=[1, 1] * 50)
    certificate = calibrate(log, alpha=0.1)
    with pytest.raises(OptionError, match=r"give \[0, confidence\], such as \[0, 0\.9\]; got"):
        certificate.decide(given)
    assert [certificate.decide([0, s]).decided_by for s in (0.1, 0.9, None)] == ["guardian", "primary", "guardian"]
