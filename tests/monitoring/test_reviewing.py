import numpy as np
import pytest

from conformal_arbitrage.monitoring.votes import (
    FEWEST_ITEMS,
    GRADE_PAIRS,
    LEVELS,
    SecondOpinion,
    agreement,
    agreement_by_person,
    count_votes,
    grade_agreement,
    krippendorff,
    quantiles,
    waiting_time,
)

# The reliability data of Krippendorff's own example: four observers, twelve units, some values missing.
OBSERVERS = [
    [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
    [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
]
UNITS = [[value for value in unit if value is not None] for unit in zip(*OBSERVERS, strict=True)]


@pytest.mark.parametrize(("scale", "published"), [("nominal", 0.743), ("ordinal", 0.815), ("interval", 0.849)])
def test_alpha_is_the_published_one(scale, published):
    assert krippendorff(UNITS, scale=scale) == pytest.approx(published, abs=0.0005)


def test_alpha_without_anything_to_disagree_about_is_one():
    assert krippendorff([[1, 1], [1, 1]]) == 1.0
    assert krippendorff([[1], [2]]) == 1.0


def opinions(pairs, size=3, menu="m"):
    return [SecondOpinion(first=("ann", one), second=("bob", other), size=size, menu=menu) for one, other in pairs]


def test_too_few_second_opinions_give_no_figure():
    assert agreement(opinions([(0, 0)] * (FEWEST_ITEMS - 1))) is None
    assert agreement(opinions([(0, 0)] * 40, size=1)) is None


def test_chance_is_taken_off_by_the_size_of_menus_that_differ():
    rng = np.random.default_rng(1)
    by_chance = [
        SecondOpinion(first=("a", int(rng.integers(n))), second=("b", int(rng.integers(n))), size=n, menu=str(k))
        for k, n in enumerate([2, 3, 5] * 300)
    ]
    figure = agreement(by_chance)
    assert figure.items == 900
    assert figure.lower < 0 < figure.upper
    assert abs(figure.corrected) < 0.08 < figure.share


def test_one_menu_gives_alpha_with_a_range_around_it():
    pairs = [(k % 3, k % 3 if k % 5 else (k + 1) % 3) for k in range(150)]
    figure = agreement(opinions(pairs))
    assert figure.share == pytest.approx(0.8)
    assert figure.corrected == pytest.approx(krippendorff(pairs))
    assert figure.lower < figure.corrected < figure.upper
    near = [(k % 3, k % 3 if k % 5 else min(k % 3 + 1, 2)) for k in range(150)]
    levels = agreement(opinions(near, menu=f"{LEVELS}m"))
    assert levels.corrected == pytest.approx(krippendorff(near, scale="ordinal"))
    assert levels.corrected > agreement(opinions(near)).corrected  # a level apart is less than anything else


def test_grades_give_alpha_with_distances_over_both_answers():
    right, half = GRADE_PAIRS.index((1.0, 1.0)), GRADE_PAIRS.index((0.5, 1.0))
    wrong = GRADE_PAIRS.index((0.0, 1.0))

    def figure(other):
        return grade_agreement(opinions([(right, right)] * 20 + [(wrong, wrong)] * 10 + [(right, other)] * 10, size=9))

    near, far = figure(half), figure(wrong)
    assert near.share == far.share == pytest.approx(1 - 10 / 80)
    assert near.lower < near.corrected < near.upper
    assert far.corrected < near.corrected < 1
    units = [[1.0, 1.0]] * 20 + [[0.0, 0.0]] * 10 + [[1.0, 0.5]] * 10 + [[1.0, 1.0]] * 40
    assert near.corrected == pytest.approx(krippendorff(units, scale="interval"))
    assert grade_agreement(opinions([(right, right)] * (FEWEST_ITEMS - 1), size=9)) is None


def test_an_answer_that_was_graded_alone_counts_once():
    """Its partner failed, and has no grade on which people could agree."""
    figure = grade_agreement(opinions([(0, 1)] * 15 + [(2, 2)] * 15, size=3))
    assert figure.share == pytest.approx(0.5)


def test_everybody_is_compared_with_the_others_only():
    pairs = opinions([(0, 0), (0, 1), (2, 2), (1, 1)])
    alone = SecondOpinion(first=("ann", 0), second=("ann", 1), size=3)
    assert agreement_by_person([*pairs, alone]) == {"ann": (4, 0.75), "bob": (4, 0.75)}


def test_votes_of_a_panel_with_an_adaptive_third_vote_overstate_agreement():
    """Why second opinions are asked for: pairs of votes that counted look better than people are."""
    rng = np.random.default_rng(2)
    truth = rng.integers(0, 3, 20_000)
    votes = np.where(rng.random((3, 20_000)) < 0.75, truth, rng.integers(0, 3, (3, 20_000)))
    honest = float(np.mean(votes[0] == votes[1]))
    with_third: list[bool] = []
    for a, b, c in votes.T.tolist():
        verdict = count_votes([a, b, c], panel=3, rule="majority").verdict
        with_third.append(verdict in ((a, b) if a == b else (a, c)) and a == verdict)
    assert np.mean(with_third) > honest + 0.03


def test_nobody_there_means_no_forecast():
    assert waiting_time(6, 20.0, 3) == 40.0
    assert waiting_time(6, 20.0, 0) is None
    assert waiting_time(6, None, 3) is None


def test_quantiles_are_those_of_numpy():
    rng = np.random.default_rng(1)
    for n in (1, 2, 3, 10, 101):
        values = rng.exponential(size=n).tolist()
        shares = (0.0, 0.025, 0.5, 0.9, 0.975, 1.0)
        assert quantiles(values, *shares) == pytest.approx(np.quantile(values, shares).tolist())
