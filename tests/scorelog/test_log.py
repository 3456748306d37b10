import re

import numpy as np
import pytest

from conformal_arbitrage import (
    OptionError,
    ScoreLog,
    ScoreLogError,
    ScoreParts,
    Usage,
    calibrate,
    compare,
    inspect,
    learn,
    recommend,
)
from conformal_arbitrage.scorelog.log import costs_of
from tests.scorelog.logs import sample


def test_a_null_or_nan_primary_score_means_no_opinion():
    log = ScoreLog.from_arrays([[0.1, None], [0.2, 0.3], None, [float("nan"), 1]], [[1, 0]] * 4)
    assert log.no_opinion.tolist() == [True, False, True, True]
    assert log.primary.tolist() == [0, 0, 0.2, 0.3, 0, 0, 0, 0]


def test_a_null_or_nan_guardian_score_makes_the_row_missing():
    log = ScoreLog.from_arrays([[0.1, 0.2]] * 3, [[1, None], None, [0, 1]])
    assert log.missing.tolist() == [True, True, False]
    assert np.isnan(log.guardian[:4]).all()


def test_two_dimensional_arrays_are_not_copied():
    scores = np.random.default_rng(0).random((100, 4))
    log = ScoreLog.from_arrays(scores, scores)
    assert np.shares_memory(log.primary, scores)


def test_negative_zero_and_zero_are_the_same_content():
    assert ScoreLog.from_arrays([[0.0, 1]], [[0, 1]]).sha256() == ScoreLog.from_arrays([[-0.0, 1]], [[0, 1]]).sha256()


def test_the_digest_follows_scores_ids_and_sizes():
    base = {"primary": [[0.1, 0.2], [0.3]], "guardian": [[0, 1], [1]]}
    variants = [
        ScoreLog.from_arrays(**base),
        ScoreLog.from_arrays(**base, id=["a", "b"]),
        ScoreLog.from_arrays(**base, id=["a", "c"]),
        ScoreLog.from_arrays([[0.1], [0.2, 0.3]], [[0], [1, 1]]),
        ScoreLog.from_arrays([[0.1, 0.2], [0.4]], [[0, 1], [1]]),
    ]
    assert len({log.sha256() for log in variants}) == len(variants)


def test_selecting_rows_selects_everything_about_them():
    log = sample()
    some = log.select([2, 0])
    assert some.id.tolist() == ["3", "a"]
    assert some.primary.tolist() == [1 / 3, 0.1 + 0.2, 0.1]
    assert some.actions.tolist() == ["only", "yes", "no"]
    assert some.primary_usage.cost.tolist() == [0.3, 0.1]
    assert some.lists["severity"].tolist() == [0.5, 0, 3]
    assert some.missing.tolist() == [True, False]
    assert log.select(log.label == 0).id.tolist() == ["a", "3"]


def test_a_row_shows_everything_the_log_knows():
    row = sample().row(1)
    assert (row.index, row.id, row.label, row.group, row.actions) == (1, "b", 2, "y", ["1", "2", "it's"])
    assert row.lists["severity"].tolist() == [1, 2, 0]


def test_binarising_keeps_choices_and_changes_the_loss_column():
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 3, [[0.5, 0.5], [0.2, 0.8], [0.7, 0.3]], label=[0, 0, 0]).binarized()
    assert log.loss_scores.tolist() == [1, 0, 0, 0, 1, 0]
    assert log.guardian.tolist() == [0.5, 0.5, 0.2, 0.8, 0.7, 0.3]


def graded(correct):
    scores = [[0.9, 0.1]] * len(correct)
    return ScoreLog.from_arrays(scores, [[0.5, 0.6]] * len(correct), outcomes={"correct": correct})


def test_binarising_leaves_the_loss_unknown_where_the_guardians_answer_is_not_known_to_be_right():
    log = graded([[0, 1], [0, None], [None, 0]]).binarized()
    np.testing.assert_array_equal(log.binary, [0, 1, np.nan, np.nan, 0, 0])
    assert log.unknown_loss.tolist() == [False, True, False]
    assert log.select([1, 2]).unknown_loss.tolist() == [True, False]


def test_binarising_refuses_grades_between_right_and_wrong():
    with pytest.raises(ScoreLogError, match=r"row 2, column 'correct': 0.95 is neither 0 nor 1.*round the grades"):
        graded([[0, 1], [0.95, 0]]).binarized()


def test_binarising_needs_the_right_answers_and_a_menu():
    with pytest.raises(OptionError, match="label"):
        ScoreLog.from_arrays([[0.9, 0.1]], [[0.5, 0.5]]).binarized()
    router = ScoreLog.from_router(confidence=[0.4], primary_grade=[0], guardian_grade=[1])
    with pytest.raises(OptionError, match="already are regret"):
        router.binarized()


@pytest.mark.parametrize(
    ("primary", "guardian", "options", "message"),
    [
        ([], [], {}, "no rows"),
        ([[0.1]], [[0.1], [0.2]], {}, "1 row of Primary scores, 2 of Guardian"),
        ([["a"]], [[0.1]], {}, "row 1, column 'primary'"),
        ([[True]], [[0.1]], {}, "row 1, column 'primary'"),
        ([0.1], [[0.1]], {}, "row 1, column 'primary'"),
        ([[0.1]], [[0.1]], {"id": ["a", "b"]}, "arrays given to from_arrays: column 'id' has 2 rows"),
        ([[0.1]], [[0.1]], {"outcomes": {"s": [[1, 2]]}}, "column 's': 2 entries for 1 actions"),
        ([[0.1]], [[0.1]], {"outcomes": {"s": [[1], [2]]}}, "column 's' has 2 rows"),
        ([[0.1]], [[0.1]], {"actions": [["a", "b"]]}, "column 'actions'"),
    ],
)
def test_arrays_of_different_lengths_are_refused(primary, guardian, options, message):
    with pytest.raises(ScoreLogError, match=message):
        ScoreLog.from_arrays(primary, guardian, **options)


@pytest.mark.parametrize(
    ("primary", "options"),
    [
        (5, {}),
        ("ab", {}),
        ([[1], [1, "x"]], {}),
        ([[10**400]], {}),
        ([[0.1]], {"label": ["B"]}),
        ([[0.1]], {"label": [[0]]}),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(primary, options):
    with pytest.raises(ScoreLogError):
        ScoreLog.from_arrays(primary, [[0.1]], **options)


def test_masked_scores_are_missing_scores():
    masked = np.ma.array([[0.1, 0.2], [0.3, 0.4]], mask=[[False, True], [False, False]])
    assert ScoreLog.from_arrays(masked, [[1, 0]] * 2).no_opinion.tolist() == [True, False]


def test_guardian_scores_below_a_tick_count_as_zero():
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 40, [[1.0, 1e-35]] * 40)
    assert calibrate(log, 0.1).relaxation == 0


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda log: calibrate(log, 0.5), r"Guardian scores leave \[0, 1\]"),
        (lambda log: recommend(log, 0.5, key=b"k" * 32), r"Guardian scores leave \[0, 1\]"),
        (lambda log: compare(log, [0.5], calibration_size=100), r"compare needs losses in \[0, 1\]"),
        (learn, r"learning needs losses in \[0, 1\]"),
    ],
)
def test_scores_that_leave_the_unit_interval_are_refused_with_the_first_row(use, message):
    scores = np.tile([1.0, 0.5], (200, 1))
    scores[[147, 160], 1] = 5, -1
    log = ScoreLog.from_arrays(np.tile([0.9, 0.1], (200, 1)), scores, id=range(200))
    with pytest.raises(OptionError, match=f"^arrays given to from_arrays: row 148: {message}"):
        use(log)


def test_scores_too_large_for_exact_sums_are_refused_with_the_first_row(tmp_path):
    scores = np.tile([1.0, 0.5], (200, 1))
    scores[147:150, 1] = -1e7, 1e8, 1e7
    log = ScoreLog.from_arrays(np.tile([0.9, 0.1], (200, 1)), scores, id=range(200))
    with pytest.raises(ScoreLogError, match="row 148: Guardian scores from -1e\\+07 to 1e\\+08 are too large"):
        calibrate(log, 0.5)
    log.write(tmp_path / "one.parquet")
    parts = ScoreParts.read(tmp_path / "one.parquet", rows_per_part=100)
    with pytest.raises(ScoreLogError, match=r"one.parquet: row 148: Guardian scores"):
        calibrate(parts, 0.5)


def test_parts_whose_scores_leave_the_unit_interval_are_refused_with_file_and_row(tmp_path):
    scores = np.tile([1.0, 0.5], (200, 1))
    scores[147, 1] = 5
    ScoreLog.from_arrays(np.tile([0.9, 0.1], (200, 1)), scores, id=range(200)).write(tmp_path / "one.parquet")
    parts = ScoreParts.read(tmp_path / "one.parquet", rows_per_part=100)
    with pytest.raises(OptionError, match=r"one.parquet: row 148: Guardian scores leave"):
        calibrate(parts, 0.5)


def test_a_single_row_is_a_row_in_words():
    log = ScoreLog.from_arrays([[0.9, 0.1]], [[1, 0]])
    certificate = calibrate(log, 0.5)
    words = f"{log!r} {certificate.facts()} {certificate.guarantee} {inspect(log).facts()} {inspect(log).problems}"
    assert "1 row" in words
    assert not re.search(r"\b1 rows", words)


def test_usage_of_another_length_is_refused():
    with pytest.raises(OptionError, match="primary_cost has 2 rows, the scores 1"):
        ScoreLog.from_arrays([[0.1, 0.2]], [[1, 0]], primary_usage=Usage(cost=[1, 2]))


def test_an_unknown_outcome_is_refused_with_the_known_ones():
    log = ScoreLog.from_arrays([[0.1, 0.2]], [[1, 0]], label=[0], outcomes={"severity": [[0, 3]]})
    with pytest.raises(OptionError, match="no outcome 'cost'; it has: correct, severity"):
        log.outcome("cost")


def test_an_array_of_lists_is_read_row_by_row():
    rows = np.empty(2, dtype=object)
    rows[:] = [[0.1, 0.2], [0.3]]
    assert ScoreLog.from_arrays(rows, [[1, 0], [1]]).sizes.tolist() == [2, 1]


def test_an_unknown_cost_or_token_count_is_kept_as_unknown(tmp_path):
    """A call that timed out has a cost that nobody knows; the rows that were paid for are kept all the same."""
    usage = Usage(cost=np.array([1.0, np.nan]), input_tokens=np.array([10.0, np.nan]))
    log = ScoreLog.from_arrays([[0.9, 0.1]] * 2, [[1.0, 0.0]] * 2, primary_usage=usage)
    log.write(tmp_path / "log.parquet")
    again = ScoreLog.read(tmp_path / "log.parquet")
    assert np.array_equal(again.primary_usage.cost, usage.cost, equal_nan=True)
    assert costs_of(again) is None
    for bad in (-1.0, np.inf):
        with pytest.raises(ScoreLogError, match="must be a number, 0 or more"):
            ScoreLog.from_arrays([[0.9, 0.1]], [[1.0, 0.0]], primary_usage=Usage(cost=np.array([bad])))
