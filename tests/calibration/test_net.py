import numpy as np
import pytest

from conformal_arbitrage import OptionError, ScoreLog, ScoreLogError, calibrate
from conformal_arbitrage.calibration.options import CalibrationOptions

KEY = b"net-loss-tests!!"


def router_log(confidence, primary, guardian, *, prefix="q"):
    ids = [f"{prefix}{i}" for i in range(len(confidence))]
    return ScoreLog.from_router(confidence=confidence, primary_grade=primary, guardian_grade=guardian, id=ids)


def net_certificate(log, alpha):
    return calibrate(log, alpha, loss="net", boundary="random", key=KEY)


def test_unknown_outcomes_are_an_error_unless_counted_as_the_worst_case():
    log = router_log(np.linspace(0, 1, 60), [1.0] * 59 + [None], np.ones(60))
    with pytest.raises(ScoreLogError, match=r"row 60: .*\(1 of 60 rows\)"):
        net_certificate(log, 0.1)
    certificate = calibrate(log, 0.1, loss="net", boundary="random", key=KEY, missing_guardian="worst_case")
    assert (certificate.evidence.missing_guardian_rows, certificate.loss.regret) == (1, pytest.approx(1 / 60))


def test_ungraded_menus_are_refused_by_row():
    correct = np.eye(3)[[0] * 40]
    correct[4, 1] = np.nan
    log = ScoreLog.from_arrays(
        np.tile([0.1, 0.6, 0.3], (40, 1)), np.tile([0.9, 0.1, 0.0], (40, 1)), id=[str(i) for i in range(40)],
        outcomes={"correct": correct},
    )  # fmt: skip
    with pytest.raises(ScoreLogError, match="row 5: the outcome of the Primary's or the Guardian's choice is unknown"):
        net_certificate(log, 0.1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"boundary": "include"}, 'needs boundary="random"'),
        ({"boundary": "random", "guardian_sees": "candidates"}, 'needs guardian_sees="all"'),
        ({"boundary": "random", "cluster": "group", "max_cluster_size": 3}, "net and cluster do not go together"),
        ({"boundary": "random", "full_sight_loss": 0.1}, "full_sight_loss= is for a loss of your own"),
    ],
)
def test_what_has_no_proof_is_refused(options, match):
    with pytest.raises(OptionError, match=match):
        CalibrationOptions(loss="net", **options)


def test_a_loss_of_unknown_name_or_of_a_reserved_one_is_refused():
    with pytest.raises(OptionError, match="loss must be one of None, 'net'; got 'nett'"):
        CalibrationOptions(loss="nett")

    def net(row, sight):
        return 0.0

    with pytest.raises(OptionError, match="your own loss cannot be named net"):
        CalibrationOptions(loss=net, loss_bound=1)


def test_logs_without_outcomes_binarised_or_with_huge_ones_are_refused():
    rng = np.random.default_rng(1)
    scores, ids = rng.random((30, 2)), [str(i) for i in range(30)]
    with pytest.raises(OptionError, match="needs to know which answers were right"):
        net_certificate(ScoreLog.from_arrays(scores, scores, id=ids), 0.1)
    labelled = ScoreLog.from_arrays(scores, scores, id=ids, outcomes={"correct": np.eye(2)[rng.integers(0, 2, 30)]})
    with pytest.raises(OptionError, match="leave binarized"):
        net_certificate(labelled.binarized(), 0.1)
    huge = ScoreLog.from_arrays(scores, scores[:, ::-1], id=ids, outcomes={"correct": 1e8 * scores})
    with pytest.raises(ScoreLogError, match="too much for exact sums"):
        net_certificate(huge, 0.1)


def test_a_menu_of_one_has_no_loss():
    log = ScoreLog.from_arrays(
        [[0.4]] * 20 + [[0.6, 0.4]] * 20, [[0.1]] * 20 + [[1.0, 0.0]] * 20, id=[str(i) for i in range(40)],
        outcomes={"correct": [[0.0]] * 20 + [[1.0, 0.0]] * 20},
    )  # fmt: skip
    certificate = net_certificate(log, 0.1)
    assert (certificate.relaxation, certificate.loss.regret) == (0.0, 0.0)
