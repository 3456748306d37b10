from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from conformal_arbitrage import CostOptions, OptionError, ScoreLog, calibrate, inspect, split
from conformal_arbitrage.evaluation.inspection import budget_uses
from conformal_arbitrage.scorelog.log import FROM_ARRAYS


def pair(knows, n=2000, seed=0, **options):
    """A Primary whose margin tells right from wrong (knows=1) or does not (0)."""
    rng = np.random.default_rng(seed)
    wrong = rng.random(n) < 0.3
    margin = np.where(rng.random(n) < knows, np.where(wrong, 0.2, 0.8), 0.5) * rng.random(n)
    primary = np.column_stack([0.5 + margin / 2, 0.5 - margin / 2])
    guardian = np.where(wrong[:, None], [0.0, 1.0], [1.0, 0.0])
    return ScoreLog.from_arrays(primary, guardian, label=wrong.astype(int), id=range(n), **options)


def test_only_an_informative_margin_is_worth_routing():
    knows, guesses = inspect(pair(1)), inspect(pair(0))
    assert knows.worth_routing
    assert knows.auc > 0.8
    assert knows.calls_saved.mean > 0.15
    assert not guesses.worth_routing
    assert guesses.auc_interval[0] < 0.5 < guesses.auc_interval[1]
    assert abs(guesses.calls_saved.mean) < 0.03
    assert "random routing" in guesses.verdict


def test_the_auc_is_the_share_of_pairs_in_the_right_order():
    log = pair(0.5, n=150)
    margin = np.abs(np.diff(log.primary.reshape(-1, 2), axis=1)[:, 0]).round(12)
    wrong = log.label == 1
    pairs = [(a < b) + (a == b) / 2 for a in margin[wrong] for b in margin[~wrong]]
    assert inspect(log).auc == pytest.approx(np.mean(pairs))


def test_a_primary_without_loss_needs_no_guardian():
    inspection = inspect(ScoreLog.from_arrays([[0.9, 0.1]] * 50, [[1.0, 0.0]] * 50))
    assert not inspection.worth_routing
    assert inspection.verdict == "Use the Primary alone: it has no loss here."
    assert inspection.auc is None


def test_a_primary_that_costs_more_than_it_saves_is_not_worth_routing():
    log = pair(1)
    cheap = inspect(log, primary_cost=1, guardian_cost=20)
    expensive = inspect(log, costs=CostOptions(primary_cost=15, guardian_cost=20))
    assert cheap.worth_routing
    assert cheap.cost_per_1000 == {"primary": 1000, "guardian": 20000}
    assert not expensive.worth_routing
    assert "cheaper Primary" in expensive.verdict


def test_coarse_margins_show_the_budget_they_leave_unused():
    log = pair(1)
    coarse = ScoreLog.from_arrays(np.round(log.primary.reshape(-1, 2), 1), log.guardian.reshape(-1, 2))
    fine_use, coarse_use = inspect(log).budgets[2], inspect(coarse).budgets[2]
    assert fine_use.alpha == coarse_use.alpha == 0.05
    assert fine_use.wasted < 0.02
    assert coarse_use.wasted > 0.1
    assert coarse_use.deferred_random < coarse_use.deferred
    assert inspect(coarse).tied_rows == int((np.diff(coarse.primary.reshape(-1, 2)) == 0).sum())


def test_problems_come_with_their_remedy():
    log = ScoreLog.from_arrays([[0.1, None], [0.3, 0.3], [0.9, 0.1]], [[0, 5.0], [1, 2], [None, 0]])
    inspection = inspect(log)
    text = " ".join(inspection.problems)
    assert (inspection.rows, inspection.no_opinion_rows, inspection.missing_guardian_rows) == (3, 1, 1)
    assert inspection.budgets == ()
    for word in ("--loss-bound", "--missing-guardian worst_case", "`id`", "label", "which models made it"):
        assert word in text
    assert "rows are few" in " ".join(inspect(log, loss_bound=5).problems)


def test_a_log_without_any_guardian_score_cannot_be_inspected():
    with pytest.raises(OptionError, match="nothing to inspect"):
        inspect(ScoreLog.from_arrays([[0.1, 0.2]], [None]))


def test_the_bundled_pair_is_worth_routing(science):
    assert inspect(science).worth_routing
    assert inspect(science).auc == pytest.approx(0.808, abs=0.001)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("n", [9, 19, 49, 99, 120])
def test_budgets_are_those_of_the_exact_rule(seed, n):
    rng = np.random.default_rng(seed)
    log = ScoreLog.from_arrays(rng.integers(0, 6, (n, 3)) / 10, rng.integers(0, 3, (n, 3)) / 2, id=range(n))
    for use in budget_uses(log, Fraction(1), n):
        certificate = calibrate(log, use.alpha, boundary="include")
        if certificate.status == "always_defer":
            assert use.deferred is None
            continue
        assert use.deferred == certificate.apply(log).deferred.mean()
        assert use.deferred_random <= use.deferred
        drawn = [calibrate(log, use.alpha, key=bytes([k])).apply(log).deferred.mean() for k in range(6)]
        assert n < 40 or use.deferred_random == pytest.approx(np.mean(drawn), abs=0.12)


def test_a_primary_without_any_opinion_always_defers():
    inspection = inspect(ScoreLog.from_arrays([None] * 100, [[1.0, 0.0], [0.0, 1.0]] * 50))
    assert [(use.deferred, use.deferred_random, use.wasted) for use in inspection.budgets[1:]] == [(1.0, 1.0, 0.0)] * 4
    assert inspection.calls_saved.mean == 0
    assert not inspection.worth_routing


def test_free_models_and_unknown_outcomes_are_supported():
    log = pair(1, n=100)
    assert not inspect(log, primary_cost=0, guardian_cost=0).worth_routing
    unknown = ScoreLog.from_arrays([[0.9, 0.1]] * 30, [[1, 0]] * 30, outcomes={"correct": [[None, None]] * 30})
    assert inspect(unknown).outcomes == {"correct": {"primary": None, "guardian": None}}


def test_the_net_loss_is_described_where_outcomes_tell_it():
    rng = np.random.default_rng(3)
    log = ScoreLog.from_router(
        confidence=rng.random(800), primary_grade=rng.integers(0, 2, 800), guardian_grade=rng.integers(0, 2, 800)
    )
    inspection = inspect(log)
    assert inspection.budgets[2].deferred_net < inspection.budgets[2].deferred
    header, rows = inspection.budget_table()
    assert header[-2:] == ["with --loss net", "floor for more rows"]
    assert len(rows[0]) == len(header)
    ungraded = ScoreLog.from_arrays([[0.9, 0.1], [0.4, 0.6]] * 30, [[1.0, 0.0], [1.0, 0.0]] * 30)
    assert inspect(ungraded).budgets[2].deferred_net is None


def noise(seed, n, primary, guardian):
    """A pair whose confidence says nothing, with these shares of right answers."""
    rng = np.random.default_rng(seed)
    right = [(rng.random(n) < share).astype(float) for share in (primary, guardian)]
    return ScoreLog.from_router(confidence=rng.random(n), primary_grade=right[0], guardian_grade=right[1], id=range(n))


def test_a_guardian_that_is_worse_is_not_to_be_asked():
    inspection = inspect(noise(0, 1000, 0.85, 0.61))
    assert not inspection.worth_routing
    assert inspection.verdict.startswith(
        "Use the Primary alone: it is right more often than the Guardian by 20.7 points"
    )
    assert inspection.guardian_gain.interval[1] < 0
    assert inspection.next_steps == ()


def test_a_guardian_that_is_not_shown_to_be_better_is_not_worth_its_calls():
    assert "do not show that the Guardian is better" in inspect(noise(3, 100, 0.80, 0.82)).verdict


@pytest.mark.proof
@pytest.mark.parametrize(("primary", "guardian"), [(0.85, 0.61), (0.61, 0.85), (0.8, 0.95), (0.5, 1.0)])
@pytest.mark.parametrize("n", [100, 400, 2000])
def test_noise_is_called_worth_routing_in_at_most_one_case_of_twenty(n, primary, guardian):
    assert sum(inspect(noise(seed, n, primary, guardian)).worth_routing for seed in range(1000)) <= 50


def test_budgets_come_from_the_rows_that_recommend_chooses_on():
    log = pair(1)
    inspection, (choosing, certified) = inspect(log), split(log)
    assert inspection.budget_rows == len(choosing) == 600
    assert inspection.budgets == budget_uses(choosing, Fraction(1), len(certified))
    changed = replace(log, guardian=np.where(np.repeat(np.isin(log.id, certified.id), 2), 0.5, log.guardian))
    assert inspect(changed).budgets == inspection.budgets, "no other row has a say"
    assert inspection.budgets[2].deferred == pytest.approx(
        calibrate(certified, 0.05).apply(choosing).deferred.mean(), abs=0.1
    )


def test_in_router_form_rows_without_a_confidence_count_as_the_primarys_answer():
    log = ScoreLog.from_router(
        confidence=[None] * 30 + [0.9] * 70, primary_grade=[0.0] * 30 + [1.0] * 70, guardian_grade=np.ones(100)
    )
    inspection = inspect(log)
    assert inspection.outcomes["correct"] == {"primary": 0.7, "guardian": 1.0}
    assert inspection.primary_loss == pytest.approx(0.3)


def test_the_next_step_of_a_log_in_memory_is_a_call(science):
    in_memory = replace(science, source=FROM_ARRAYS)
    assert (
        inspect(in_memory).next_steps[0].startswith("Next: recommend(log, A, share=0.3), with the alpha that you need")
    )
