from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import OptionError, ScoreLog, ScoreLogError, assess, calibrate, evaluate, inspect
from tests.certificates import altered

RNG = np.random.default_rng(5)
PRIMARY, GUARDIAN = np.round(RNG.random((400, 3)), 2), np.eye(3)[RNG.integers(0, 3, 400)]
OLD = ScoreLog.from_arrays(PRIMARY[:200], GUARDIAN[:200])
NEW = ScoreLog.from_arrays(PRIMARY[200:], GUARDIAN[200:])


def losses_by_hand(certificate, log):
    decisions = certificate.apply(log)
    guardian = log.guardian.reshape(-1, 3)
    kept = decisions.candidate.reshape(-1, 3)
    if certificate.guardian_sees != "candidates":
        kept = kept | decisions.deferred[:, None]
    return guardian.max(axis=1) - np.where(kept, guardian, -1).max(axis=1)


@pytest.mark.parametrize("sees", ["all", "candidates", "all-restricted-loss"])
def test_the_loss_is_that_of_the_decisions_made(sees):
    certificate = calibrate(OLD, 0.1, guardian_sees=sees)
    assessment = assess(certificate, NEW)
    assert assessment.loss == pytest.approx(losses_by_hand(certificate, NEW).mean())
    assert assessment.deferred == certificate.apply(NEW).deferred.mean()
    assert (assessment.method, assessment.problems, assessment.rows) == ("clopper-pearson", (), 200)


def test_graded_losses_and_another_bound_get_the_interval_for_any_loss():
    old, new = (ScoreLog.from_arrays(log.primary.reshape(-1, 3), 3 * RNG.random((200, 3))) for log in (OLD, NEW))
    assessment = assess(calibrate(old, 0.5, loss_bound=3), new)
    assert assessment.method == "chernoff-hoeffding"
    assert 0 <= assessment.interval[0] < assessment.loss < assessment.interval[1] <= 3


def test_scores_of_another_scale_than_the_bound_is_for_are_pointed_out():
    wide = ScoreLog.from_arrays(PRIMARY[200:], 4 + GUARDIAN[200:])
    assert "scores of this log leave [0, 1]" in assess(calibrate(OLD, 0.1), wide).problems[0]
    assert assess(calibrate(OLD, 0.1, loss_bound=4), wide).problems == ()


def test_a_random_boundary_and_a_binarized_certificate_are_assessed_as_deployed():
    rows = {"id": [f"q{k}" for k in range(200)], "label": np.zeros(200)}
    log = ScoreLog.from_arrays(PRIMARY[:200], RNG.random((200, 3)), **rows)
    certificate = calibrate(log.binarized(), 0.1, boundary="random", key=b"key")
    assessment = assess(certificate, log)
    assert assessment.loss == pytest.approx(certificate.evidence.empirical_risk)
    assert "made from" in assessment.problems[0]
    assert assessment.verdict.startswith("No verdict")


def test_rows_without_a_guardian_count_as_the_bound_unless_they_defer():
    certificate = calibrate(OLD, 0.1)
    guardian = GUARDIAN[200:].copy()
    guardian[:20] = np.nan
    log = ScoreLog.from_arrays(PRIMARY[200:], guardian)
    alone = ~certificate.apply(log).deferred[:20]
    known = losses_by_hand(certificate, NEW)[20:].sum()
    assessment = assess(certificate, log)
    assert assessment.loss == pytest.approx((known + alone.sum()) / 200)
    assert assessment.missing_guardian_rows == 20
    assert "20 rows have an unknown loss" in assessment.problems[0]
    assert ("unknown loss", "20 rows, counted as the worst case") in assessment.facts()


def test_costs_are_those_of_both_legs():
    certificate = calibrate(OLD, 0.1)
    assessment = assess(certificate, NEW, primary_cost=1, guardian_cost=20)
    assert assessment.cost_per_1000 == pytest.approx(1000 * (1 + 20 * assessment.deferred))
    assert ("dollars per 1000", f"{assessment.cost_per_1000:.4g}") in assessment.facts()
    assert assess(certificate, NEW).cost_per_1000 is None


def test_an_own_loss_is_passed_again():
    def half(row, sight):
        return 0.5 * float(len(sight) == 1)

    certificate = calibrate(OLD, 0.1, loss=half, loss_bound=1)
    assessment = assess(certificate, NEW, loss=half)
    assert assessment.loss == pytest.approx(0.5 * (1 - assessment.deferred))
    with pytest.raises(OptionError, match="'half'; pass that function as loss="):
        assess(certificate, NEW)


def test_verdicts_say_which_side_of_the_budget_the_interval_is_on():
    certificate = calibrate(OLD, 0.1)
    within = assess(altered(certificate, alpha=0.5), NEW)
    above = assess(altered(certificate, alpha=0.001), NEW)
    assert within.verdict.startswith("Within the budget")
    assert above.verdict.startswith("Above the budget")
    assert assess(certificate, NEW).verdict.startswith("Not decided by these rows")
    assert "interval" in repr(within)
    assert "<table" in within._repr_html_()


def test_other_models_and_losses_beyond_the_bound_are_named():
    named = {"primary": {"model": "a"}, "guardian": {"model": "b"}}
    certificate = calibrate(replace(OLD, identities=named), 0.1)
    assert assess(certificate, NEW).problems == ("the log was not made by the models this certificate was made with",)
    assert assess(certificate, replace(NEW, identities=named)).problems == ()
    with pytest.raises(ScoreLogError, match="exceeds the certificate's bound 1"):
        assess(certificate, ScoreLog.from_arrays(PRIMARY[200:], 5 * GUARDIAN[200:]))
    with pytest.raises(OptionError, match="confidence must lie"):
        assess(certificate, NEW, confidence=1.0)


def test_a_log_chosen_by_its_scores_is_not_looked_at():
    unfit = replace(NEW, extra={"unfit_for_calibration": np.array(["no"] * 200)})
    for call in (
        lambda: assess(calibrate(OLD, 0.1), unfit),
        lambda: inspect(unfit),
        lambda: evaluate(unfit, [0.1], calibration_size=50),
    ):
        with pytest.raises(ScoreLogError, match="selected by their scores"):
            call()


def grouped(log, size):
    return replace(log, group=np.array([f"c{k // size}" for k in range(len(log))], dtype=object))


def test_a_certificate_by_clusters_is_assessed_by_clusters():
    certificate = calibrate(grouped(OLD, 2), 0.2, cluster="group", max_cluster_size=2)
    done = assess(certificate, grouped(NEW, 2))
    single = assess(calibrate(OLD, 0.2), NEW)
    assert (done.clusters, done.method) == (len(NEW) // 2, "chernoff-hoeffding by cluster")
    assert done.interval[0] < single.interval[0]
    assert done.interval[1] > single.interval[1]
    assert f"{len(NEW)} in {done.clusters} clusters" in dict(done.facts()).values()
    with pytest.raises(ScoreLogError, match="has 4 rows, more than the 2 that the certificate allows"):
        assess(certificate, grouped(NEW, 4))
    with pytest.raises(ScoreLogError, match="no column 'group'"):
        assess(certificate, NEW)
