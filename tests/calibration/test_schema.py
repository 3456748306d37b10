"""The document of a certificate: signed, and without contradictions."""

import json

import numpy as np
import pytest

from conformal_arbitrage import (
    Certificate,
    CertificateError,
    OptionError,
    ProjectSecret,
    ScoreLog,
    calibrate,
)
from conformal_arbitrage.errors import LaterCertificateError
from tests.certificates import altered, edited

SECRET = ProjectSecret((b"the secret of this project",))
OTHER = ProjectSecret((b"the secret of another one",))


@pytest.fixture(scope="module")
def certificate(science):
    return calibrate(science, 0.05, guardian_sees="all")


def test_a_signed_certificate_loads_with_the_secret_that_signed_it(tmp_path, certificate):
    signed = certificate.sign(SECRET)
    assert (certificate.signed, signed.signed, signed.secret_id) == (False, True, SECRET.id)
    signed.save(tmp_path / "c.json")
    assert Certificate.load(tmp_path / "c.json", secret=SECRET) == signed
    assert Certificate.load(tmp_path / "c.json") == signed
    rotated = ProjectSecret((*OTHER.keys, *SECRET.keys))
    assert Certificate.load(tmp_path / "c.json", secret=rotated) == signed
    with pytest.raises(CertificateError, match="signed with another secret"):
        Certificate.load(tmp_path / "c.json", secret=OTHER)
    (tmp_path / "c.json").write_text(json.dumps(certificate.to_dict()))
    with pytest.raises(CertificateError, match="is unsigned"):
        Certificate.load(tmp_path / "c.json", secret=SECRET)


@pytest.mark.parametrize(
    "change",
    [{"relaxation": 0.1}, {"log_sha256": "0" * 64}, {"created": "2020-01-01T00:00:00+00:00"}, {"secret_id": OTHER.id}],
    ids=str,
)
def test_a_signature_covers_every_field(certificate, change):
    changed = altered(certificate.sign(SECRET), **change)
    with pytest.raises(CertificateError, match="was changed"):
        changed.check_signature(SECRET)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"slack": 0.01}, "slack"),
        ({"empirical_risk": 0.01}, "slack"),
        ({"empirical_risk": -0.01}, "empirical_risk"),
        ({"empirical_risk": 0.08, "slack": 0.05 - (0.08 * 2369 + 1) / 2370}, "slack"),
        ({"n": 100}, "slack"),
        ({"relaxation": None}, "empirical_risk"),
        ({"relaxation": None, "empirical_risk": 0.0, "slack": 0.05 - 1 / 2370}, "slack"),
        ({"bound": 1e-7, "alpha": 1e-8}, "loss_bound"),
        ({"relaxation": 0.1}, "guarantee|slack|grid"),
        ({"grid": 0.1}, "grid"),
        ({"no_opinion_rows": 2370}, "no_opinion_rows"),
        ({"missing_guardian_rows": 1}, "missing_guardian_rows"),
        ({"most_actions": 0}, "fewest_actions"),
        ({"fewest_actions": 9}, "fewest_actions"),
        ({"router": True}, "router"),
        ({"signature": "00"}, "signature"),
        ({"guarantee": "Trust us."}, "guarantee"),
    ],
    ids=str,
)
def test_fields_that_contradict_each_other_are_refused(science, change, named):
    document = edited(calibrate(science, 0.05, boundary="include").to_dict(), change)
    if change == {"relaxation": 0.1}:
        Certificate.from_dict(document)  # nothing else implies it without the log; the signature and `verify` tell
        return
    with pytest.raises(CertificateError, match=f"({named}) .*contradicts the rest"):
        Certificate.from_dict(document)


def test_every_kind_of_certificate_that_calibrate_makes_loads(science):
    def harm(row, sight):
        return 0.0 if len(sight) == len(row.primary) else 0.3

    rows = science.select(range(200))
    for options in (
        {"grid": 0.01},
        {"grid": "0.25", "guardian_sees": "all"},
        {"loss": harm, "loss_bound": 1},
        {"loss": harm, "loss_bound": 1, "full_sight_loss": 0.01},
        {"missing_guardian": "worst_case", "guardian_sees": "all-restricted-loss"},
        {"boundary": "random", "key": b"key"},
    ):
        for alpha in (0.001, 0.01, 0.1, 0.3):
            if alpha >= float(options.get("full_sight_loss", 0)):
                certificate = calibrate(rows, alpha, **options)
                assert Certificate.from_dict(json.loads(json.dumps(certificate.to_dict()))) == certificate
    far = ScoreLog.from_arrays([[5.0, 0.0]] * 50, [[0, 1]] * 50)
    short = calibrate(far, 0.1, grid=0.5)
    assert (short.status, short.evidence.slack > 0) == ("always_defer", True)
    assert Certificate.from_dict(short.to_dict()) == short


@pytest.mark.parametrize(
    "change",
    [
        {"envelope_excess": 0.1},
        {"full_sight_loss": 0.01},
        {"confidence": 0.9},
        {"groups": {}},
        {"of_a_later_release": 1},
    ],
    ids=str,
)
def test_a_field_of_another_kind_of_certificate_is_refused(certificate, change):
    with pytest.raises(LaterCertificateError, match="unknown field"):
        Certificate.from_dict(edited(certificate.to_dict(), change))


@pytest.mark.parametrize("part", ["rule", "promise", "loss"])
def test_a_kind_of_a_later_release_is_told_apart_from_a_damaged_file(certificate, part):
    document = certificate.to_dict()
    with pytest.raises(LaterCertificateError, match="Invalid value 'bundle'"):
        Certificate.from_dict(document | {part: document[part] | {"type": "bundle"}})
    with pytest.raises(LaterCertificateError, match="schema version 2 is not the one"):
        Certificate.from_dict(document | {"schema": 2})


def test_a_menu_outside_the_range_of_the_log_has_no_guarantee(certificate, science):
    assert certificate.sizes == range(science.sizes.min(), science.sizes.max() + 1)
    assert certificate.outside(int(science.sizes.min())) is None
    assert "the query has 200 actions; those of the certificate's log have" in certificate.outside(200)
    assert "the query has 1 action; those" in certificate.outside(1)


def test_router_form_speaks_of_two_answers_and_a_confidence():
    log = ScoreLog.from_router(confidence=[0.9, 0.5] * 50, primary_grade=[1.0, 0.0] * 50, guardian_grade=[1.0] * 100)
    for options in ({}, {"guardian_sees": "all"}):
        certificate = calibrate(log, 0.05, **options)
        assert "the Primary's is given where its confidence is above 0.5" in certificate.guarantee
        for word in ("candidate", "menu", "best score", "action"):
            assert word not in certificate.guarantee, word
    assert "answered by the Guardian" in calibrate(log, 0.001).guarantee
    own = calibrate(log, 0.05, loss=lambda row, sight: float(len(sight) < 2), loss_bound=1)
    assert "With both answers in sight" in own.guarantee


def test_the_summary_is_the_rule_and_three_lines(certificate, science):
    assert "stands where it leads by more than 0.457141, else the Guardian sees every action" in certificate.summary
    _, promise, conditions, left_open = certificate.summary.splitlines()
    assert promise == "Promise: the expected loss of the next decision is at most 0.05."
    assert conditions.startswith("Conditions: traffic, models and settings stay as in these 2369 rows")
    assert "half of all calibrations it is above, typically by less than 0.0045" in left_open
    for jargon in ("crc", "unbound", "luck", "slack", "draws"):
        assert jargon not in certificate.summary
    assert "sees the candidates" in calibrate(science, 0.05, guardian_sees="candidates").summary
    assert "Every query goes to the Guardian" in calibrate(science, 0.0001).summary
    log = ScoreLog.from_router(confidence=[0.9, 0.5] * 50, primary_grade=[1.0, 0.0] * 50, guardian_grade=[1.0] * 100)
    assert "its confidence is above 0.5" in calibrate(log, 0.05).summary


def test_the_guarantee_says_what_happens_without_the_guardian(certificate):
    assert "A deferred query whose Guardian cannot be had counts as if the Guardian had chosen" in certificate.guarantee
    assert "not over those that got an answer" in certificate.guarantee


@pytest.mark.parametrize(
    "scores",
    [
        np.array([0.9, 0.1], dtype=np.float32),
        np.array([0.9, 0.1], dtype=np.float16),
        [np.float32(0.9), 0.1],
        (0.9, np.float32(0.1)),
    ],
    ids=repr,
)
def test_single_precision_scores_are_refused_under_a_double_precision_certificate(certificate, scores):
    for use in (certificate.candidates, certificate.decide):
        with pytest.raises(OptionError, match=r"single precision.*compute them in float64"):
            use(scores)


def test_a_log_in_single_precision_is_refused_under_a_double_precision_certificate(certificate):
    single = ScoreLog.from_arrays(np.array([[0.9, 0.1, 0.0]], dtype=np.float32), [[1, 0, 0]])
    with pytest.raises(OptionError, match="single precision"):
        certificate.apply(single)


def test_double_precision_scores_are_rounded_like_the_log_of_a_single_precision_certificate():
    """Every decision equals that on the scores as the log would have recorded them."""
    rng = np.random.default_rng(0)
    scores = np.round(rng.random((400, 3)), 2) / 10
    certificate = calibrate(ScoreLog.from_arrays(scores.astype(np.float32), rng.random((400, 3))), 0.2)
    assert certificate.evidence.score_digits == 6
    for row in scores:
        expected = certificate.decide(row.astype(np.float32))
        assert (
            certificate.decide(row)
            == certificate.decide(row.tolist())
            == certificate.decide(tuple(row.tolist()))
            == expected
        )
    double, single = (certificate.apply(ScoreLog.from_arrays(s)) for s in (scores, scores.astype(np.float32)))
    assert np.array_equal(double.candidate, single.candidate)


def test_numbers_that_are_none_are_refused(tmp_path, certificate):
    text = json.dumps(certificate.to_dict() | {"slack": float("nan")})
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(CertificateError, match="NaN is not a number"):
        Certificate.load(tmp_path / "c.json")
