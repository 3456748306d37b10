from itertools import product

import pytest

from conformal_arbitrage.monitoring.votes import GRADE_PAIRS, PANELS, count_grades, count_votes, median_grades


def majority(choices, panel=3):
    return count_votes(choices, panel=panel, rule="majority")


def test_one_person_decides_alone():
    assert majority([], panel=1).needed == 1
    assert majority([4], panel=1).verdict == 4


def test_a_majority_ends_as_soon_as_it_is_certain():
    assert [majority([1] * k).verdict for k in range(4)] == [None, None, 1, 1]
    assert [majority([1] * k).needed for k in range(3)] == [2, 2, 2]
    assert majority([1, 0]).needed == 3
    assert majority([1, 0, 0]).verdict == 0


def test_a_panel_is_split_once_no_vote_can_help():
    assert majority([0, 1, 2]).split
    assert not majority([0, 1]).split
    assert majority([0, 1, 2, 3], panel=5).split  # one vote is left, and two are the most that any option can have


def test_all_must_agree_under_the_other_rule():
    def unanimous(choices):
        return count_votes(choices, panel=3, rule="unanimous")

    assert [unanimous([2] * k).verdict for k in range(4)] == [None, None, None, 2]
    assert unanimous([2, 1]).split
    assert unanimous([]).needed == 3


@pytest.mark.parametrize("panel", PANELS)
def test_stopping_early_never_changes_the_verdict(panel):
    for choices in product(range(3), repeat=panel):
        whole = majority(choices, panel)
        for k in range(panel):
            part = majority(choices[:k], panel)
            assert part.verdict in (None, whole.verdict)
            assert not (part.split and whole.verdict is not None)
            assert k < part.needed <= panel or part.verdict is not None or part.split


def test_grades_are_medians():
    assert median_grades([(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)]) == (0.5, 0.5)


def place(primary, guardian):
    return GRADE_PAIRS.index((primary, guardian))


def test_one_grader_decides_alone_and_two_of_three_who_agree_are_enough():
    assert count_grades([], panel=1).needed == 1
    assert count_grades([place(0.5, 1.0)], panel=1).verdict == place(0.5, 1.0)
    agreed = [place(0.5, 1.0)] * 2
    assert count_votes(agreed, panel=3, rule="median").verdict == place(0.5, 1.0)
    assert count_grades(agreed[:1], panel=3).needed == 2
    split = count_grades([place(0.5, 1.0), place(0.5, 0.0)], panel=3)
    assert (split.verdict, split.needed, split.split) == (None, 3, False)


@pytest.mark.parametrize("panel", PANELS[:2])
def test_the_verdict_of_graders_is_the_median_of_each_answer_however_early_it_ends(panel):
    for choices in product(range(len(GRADE_PAIRS)), repeat=panel):
        whole = count_grades(choices, panel=panel)
        assert GRADE_PAIRS[whole.verdict] == median_grades([GRADE_PAIRS[choice] for choice in choices])
        for k in range(panel):
            part = count_grades(choices[:k], panel=panel)
            assert part.verdict in (None, whole.verdict)
            assert part.verdict is not None or k < part.needed <= panel
