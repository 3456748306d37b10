from dataclasses import FrozenInstanceError, replace

import pytest

from conformal_arbitrage import InfeasibleError, OptionError, ScoreLog, ScoreLogError, Verification, calibrate, verify
from tests.certificates import altered


def test_a_verification_is_true_if_nothing_differs(science):
    certificate = calibrate(science, 0.05)
    verification = verify(certificate, science)
    assert verification
    assert verification.ok
    assert verification.differences == {}
    assert repr(verification) == "Verification(ok)"


def test_a_verification_shows_stored_and_recomputed_values(science):
    certificate = altered(calibrate(science, 0.05, guardian_sees="candidates"), relaxation=0.3, n=7)
    verification = verify(certificate, science)
    assert not verification
    assert not verification.ok
    assert verification.differences == {"relaxation": (0.3, 0.468512), "n": (7, 2369)}
    assert repr(verification) == "Verification(differs in relaxation, n)"


def test_a_verification_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Verification(differences={}).differences = {"n": (1, 2)}


def test_a_loss_of_your_own_is_needed_exactly_if_the_certificate_names_one(science):
    with pytest.raises(OptionError, match="guardian_regret"):
        verify(calibrate(science, 0.05), science, loss=lambda row, sight: 0.0)


def test_a_loss_that_deferring_does_not_avoid_is_infeasible():
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 30, [[1, 0]] * 30)
    with pytest.raises(InfeasibleError, match=r"can be 0\.5 with every action in sight.*an alpha of 0\.5 or more"):
        calibrate(log, 0.2, loss=lambda row, sight: 0.5, loss_bound=1, full_sight_loss=0.5)


def test_a_declared_loss_in_full_sight_is_stored_stated_and_verified():
    def harm(row, sight):
        return 0.18

    log = ScoreLog.from_arrays([[0.9, 0.1]] * 30, [[1, 0]] * 30)
    certificate = calibrate(log, 0.2, loss=harm, loss_bound=1, full_sight_loss="0.18")
    assert (certificate.status, certificate.loss.in_full_sight) == ("always_defer", 0.18)
    assert "The loss is then at most 0.18: so it was declared" in certificate.guarantee
    assert verify(certificate, log, loss=harm)


def test_a_log_of_selected_rows_is_rejected(science):
    marked = replace(science, extra={**science.extra, "unfit_for_calibration": science.missing})
    with pytest.raises(ScoreLogError, match="breaks exchangeability"):
        calibrate(marked, 0.05)


def test_the_grader_is_part_of_the_identities():
    names = {"primary": {"model": "a"}, "guardian": {"model": "b"}, "grader": {"kind": "exact"}}
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 40, [[1.0, 0.0]] * 40, identities=names)
    assert calibrate(log, 0.1).identities == names
