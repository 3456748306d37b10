"""A certificate whose threshold was edited would break the budget; it is refused, whatever else was made to fit."""

import json

import numpy as np
import pytest

from conformal_arbitrage import Certificate, CertificateError, ProjectSecret, ScoreLog, calibrate
from tests.validity.simulation import keeps

N, ALPHA, TIMES, FRESH = 80, 0.1, 300, 100


def draw(rng, n):
    """Return a Primary that is right more often the further it leads, and a Guardian that is always right."""
    margin = rng.random(n)
    wrong = rng.random(n) < 0.6 * (1 - margin)
    return np.column_stack([0.5 + margin / 2, 0.5 - margin / 2]), np.where(wrong[:, None], [0.0, 1.0], [1.0, 0.0])


def edited(certificate):
    """Return the document of a certificate whose threshold was set to 0, so that the Primary always decides."""
    document = certificate.to_dict()
    document["rule"]["relaxation"] = 0.0
    return document


def expected_loss(threshold):
    """Return the mean loss over logs and queries of the rule at a threshold made from each certificate."""
    rng, means = np.random.default_rng(1), []
    for _ in range(TIMES):
        certificate = calibrate(ScoreLog.from_arrays(*draw(rng, N)), ALPHA)
        primary, guardian = draw(rng, FRESH)
        kept = primary[:, 0] - primary[:, 1] > threshold(certificate)
        means.append((kept * guardian[:, 1]).mean())
    return float(np.mean(means)), float(np.std(means, ddof=1) / TIMES**0.5)


def test_the_certificate_as_it_was_made_keeps_the_budget():
    assert keeps(ALPHA, expected_loss(lambda certificate: certificate.relaxation))


def test_an_edited_threshold_would_break_it_and_is_refused():
    measured = expected_loss(lambda certificate: edited(certificate)["rule"]["relaxation"])
    assert not keeps(ALPHA, measured), measured
    certificate = calibrate(ScoreLog.from_arrays(*draw(np.random.default_rng(2), N)), ALPHA)
    risk = 0.02
    fitting, document = {"empirical_risk": risk, "slack": ALPHA - (risk * N + 1) / (N + 1)}, edited(certificate)
    with pytest.raises(CertificateError, match="contradicts the rest"):
        Certificate.from_dict(document | {"evidence": document["evidence"] | {"slack": 0.05}})
    made_to_fit = Certificate.from_dict(document | {"evidence": document["evidence"] | fitting})
    assert not made_to_fit.signed, "a gateway takes it only if its policy allows unsigned ones"


def test_an_edited_certificate_with_fields_that_fit_has_the_wrong_signature(tmp_path, monkeypatch):
    monkeypatch.setenv("ARBITRAGE_SECRET", "a-secret-of-some-length")
    secret = ProjectSecret.find()
    certificate = calibrate(ScoreLog.from_arrays(*draw(np.random.default_rng(2), N)), ALPHA).sign(secret)
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(edited(certificate)))
    with pytest.raises(CertificateError, match="the signature is not that of this project's secret"):
        Certificate.load(path, secret=secret)
