import numpy as np
import pytest

from conformal_arbitrage.monitoring.panels import GRADE_PAIRS, count_votes
from conformal_arbitrage.monitoring.reviewing import (
    FEWEST_ITEMS,
    LEVELS,
    SecondOpinion,
    agreement,
    agreement_by_pair,
    agreement_by_person,
    cohen_kappa,
    erlang_c,
    grade_agreement,
    krippendorff,
    plan_staffing,
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


def test_kappa_is_the_textbook_one():
    pairs = [(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15
    assert cohen_kappa(pairs) == pytest.approx(0.4)
    assert cohen_kappa(pairs[:29]) is None
    assert cohen_kappa([(1, 1)] * FEWEST_ITEMS) == 1.0


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


def test_erlang_c_is_the_closed_form_for_one_and_two_people():
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    load = 1.2
    assert erlang_c(2, load) == pytest.approx(load**2 / (2 + load))


def test_a_plan_names_the_people_it_takes():
    plan = plan_staffing(calls_per_hour=600, guardian_share=0.49, seconds=38, wait=60)
    assert plan.reviews_per_hour == pytest.approx(294)
    by_people = {row.people: row.waiting for row in plan.rows}
    assert list(by_people) == [4, 5, 6]
    assert by_people[4] == pytest.approx(0.13, abs=0.01)
    assert by_people[5] == pytest.approx(0.013, abs=0.002)
    assert all(row.busy < 1 for row in plan.rows)


def test_audits_panels_and_second_opinions_are_work_too():
    plan = plan_staffing(
        calls_per_hour=100, guardian_share=0.2, audit_rate=0.05, votes_per_item=2, overlap=0.1, seconds=30
    )
    assert plan.reviews_per_hour == pytest.approx(100 * 0.24 * 2 * 1.1)


def test_the_plan_is_what_a_simulated_queue_does():
    """Poisson arrivals, exponential times: the share that waits longer than the plan's seconds."""
    rng = np.random.default_rng(3)
    seconds, people, calls = 38.0, 4, 200_000
    arrivals = np.cumsum(rng.exponential(3600 / 294, calls))
    service = rng.exponential(seconds, calls)
    free, waits = [0.0] * people, np.empty(calls)
    for k in range(calls):
        soonest = min(range(people), key=free.__getitem__)
        start = max(arrivals[k], free[soonest])
        waits[k], free[soonest] = start - arrivals[k], start + service[k]
    plan = plan_staffing(calls_per_hour=294, guardian_share=1.0, seconds=seconds, wait=60)
    assert float(np.mean(waits > 60)) == pytest.approx(plan.rows[0].waiting, abs=0.015)


def test_two_people_are_compared_on_the_menu_that_most_questions_have():
    def opinion(first, second, menu="m", size=3):
        return SecondOpinion(first=first, second=second, size=size, menu=menu)

    alike = [opinion(("ann", k % 3), ("bob", k % 3)) for k in range(30)]
    swapped = [opinion(("bob", k % 3), ("ann", k % 3)) for k in range(10)]
    elsewhere = [opinion(("ann", 0), ("bob", 1), menu="other") for _ in range(20)]
    few = [opinion(("ann", 0), ("cid", 0)) for _ in range(29)]
    alone = [opinion(("ann", 0), ("ann", 1)) for _ in range(5)]
    assert agreement_by_pair([*alike, *swapped, *elsewhere, *few, *alone]) == {("ann", "bob"): (40, 1.0)}
    assert agreement_by_pair([]) == {}
    assert agreement_by_pair([opinion(("ann", 0), ("bob", 0), size=1)]) == {}


def test_quantiles_are_those_of_numpy():
    rng = np.random.default_rng(1)
    for n in (1, 2, 3, 10, 101):
        values = rng.exponential(size=n).tolist()
        shares = (0.0, 0.025, 0.5, 0.9, 0.975, 1.0)
        assert quantiles(values, *shares) == pytest.approx(np.quantile(values, shares).tolist())
