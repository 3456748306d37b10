from dataclasses import replace

import numpy as np
import pytest

from conformal_arbitrage import ScoreLog, ScoreLogError, inspect
from conformal_arbitrage.scorelog.fitness import cluster_sizes, content_digests, repeats

RNG = np.random.default_rng(0)
FINE = ScoreLog.from_arrays(RNG.random((20, 3)), RNG.random((20, 3)), label=np.zeros(20))


def test_rows_entered_twice_are_counted_whatever_their_ids():
    twice = FINE.select([*range(20), 3, 3, 7])
    assert (repeats(twice).rows, repeats(twice).contexts) == (3, 0)
    assert repeats(FINE).rows == 0
    assert "3 rows equal an earlier row" in inspect(twice).problems[-1]
    assert inspect(twice).repeated_rows == 3


def test_repeated_contexts_are_counted():
    log = replace(FINE, context=np.array(["same", *(f"q{k}" for k in range(18)), "same"], dtype=object))
    assert (repeats(log).rows, repeats(log).contexts) == (0, 1)
    assert "1 row repeats the context" in repeats(log).problems()[0]


def test_coarse_scores_without_contexts_coincide_without_being_repeats():
    log = ScoreLog.from_arrays([[0.9, 0.1], [0.8, 0.2]] * 10, [[1, 0], [0, 1]] * 10)
    assert repeats(log).problems() == []


def test_digests_tell_order_models_and_labels_apart():
    logs = [
        ScoreLog.from_arrays([[0.1, 0.2]], [[0.3, 0.4]], label=[0]),
        ScoreLog.from_arrays([[0.1, 0.2]], [[0.3, 0.4]], label=[1]),
        ScoreLog.from_arrays([[0.2, 0.1]], [[0.4, 0.3]], label=[0]),
        ScoreLog.from_arrays([[0.3, 0.4]], [[0.1, 0.2]], label=[0]),
    ]
    assert len({int(content_digests(log)[0]) for log in logs}) == 4
    assert content_digests(ScoreLog.from_arrays([[-0.0, 1]], [[0, 1]])) == content_digests(
        ScoreLog.from_arrays([[0.0, 1]], [[0, 1]])
    )


def test_clusters_come_from_any_column_and_every_row_needs_one():
    log = replace(FINE, extra={"talk": np.array(["a"] * 5 + ["b"] * 15, dtype=object)})
    assert cluster_sizes(log, "talk").tolist() == [5, 15]
    with pytest.raises(ScoreLogError, match="there is no column 'group' to cluster by"):
        cluster_sizes(log, "group")
    with pytest.raises(ScoreLogError, match="row 2, column 'talk': no cluster"):
        cluster_sizes(replace(log, extra={"talk": np.array(["a", None] * 10, dtype=object)}), "talk")


def test_a_few_equal_rows_of_coarse_scores_are_no_repeats_either():
    sure = [*(k / 1000 for k in range(0, 600, 2)), 0.1, 0.2]
    coarse = ScoreLog.from_router(confidence=sure, primary_grade=[1.0] * 302, guardian_grade=[1.0] * 302)
    assert repeats(coarse).problems() == []
    fine = ScoreLog.from_router(
        confidence=[value + 0.00037 for value in sure], primary_grade=[1.0] * 302, guardian_grade=[1.0] * 302
    )
    assert repeats(fine).rows == 2


def routed(rng, n, confidence, rounded):
    grade = rng.random(n) < confidence
    return ScoreLog.from_router(
        confidence=rounded(confidence), primary_grade=grade.astype(float), guardian_grade=np.ones(n)
    )


def four_digits(confidence):
    return confidence.round(4)


def log_probabilities_of_four_digits(confidence):
    return np.exp(np.log(confidence).round(4))


@pytest.mark.parametrize("rounded", [four_digits, log_probabilities_of_four_digits])
@pytest.mark.parametrize("shape", [(1, 1), (5, 2), (2, 2)])
def test_a_coincidence_of_four_digits_is_no_repeat_and_copies_are(shape, rounded):
    warned = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        log = routed(rng, 1000, rng.beta(*shape, 1000), rounded)
        warned += bool(repeats(log).problems())
        copied = log.select(np.concatenate([np.arange(900), np.arange(300)]))
        assert repeats(copied).rows >= 300
    assert warned <= 1
