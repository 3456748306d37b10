"""What keeps the audited loss of free text true, where the truth is known; each broken twin fails the same check.

Grades go the way of a grader's: a question with the answers in some order, a vote as shown, the place it is stored at, and
the loss that the ledger counts.
"""

from functools import cache

import numpy as np
import pytest

from conformal_arbitrage.calibration.secret import draw
from conformal_arbitrage.gateway.review_queue import place_of_vote
from conformal_arbitrage.live.config import ReviewConfig, TeamConfig
from conformal_arbitrage.live.reviewers import GradingTerms
from conformal_arbitrage.monitoring.outcomes import AuditedDecision, Verdict, decision_loss
from conformal_arbitrage.monitoring.votes import GRADE_PAIRS, count_grades
from tests.validity.test_reviews import unbiased

pytestmark = pytest.mark.proof
N, KEY = 6000, b"k" * 32
TERMS = GradingTerms(
    name="team", team=TeamConfig(members=("ann",)), panel=1, instructions="", overlap=0.0, settings=ReviewConfig()
)
AUDITED = AuditedDecision(decided_by="primary", form="text")
NET = AuditedDecision(decided_by="primary", form="text", net=True)
counted = cache(count_grades)


def drawn(number):
    return draw(KEY, f"order {number}") < 0.5


def primary_first(number):
    return False


def answers(rng):
    """How good both answers of every decision are: the Primary's is worse now and then, and better now and then."""
    quality = rng.choice(3, size=(N, 2), p=(0.1, 0.1, 0.8)) / 2
    return [(float(primary), float(guardian)) for primary, guardian in quality]


def losses(pairs, grader, swapped, decision=AUDITED):
    """The losses that audits show, as the ledger counts them; a grader sees two texts, and perhaps more than that."""
    shown = []
    for number, (primary, guardian) in enumerate(pairs):
        question = TERMS.question("user: ?", f"a {primary}", f"b {guardian}", swapped=swapped(number))
        qualities = [float(text.split()[1]) for text in question.options]
        vote = place_of_vote(question, tuple(grader(qualities, question)))
        grades = GRADE_PAIRS[question.places[vote]]
        shown.append(decision_loss(decision, Verdict(grades=grades)))
    return np.array(shown)


def honest(qualities, question):
    return qualities


def knowing(rng):
    """A grader who knows whose answer is whose, and takes three in ten of the Primary's for right."""

    def grade(qualities, question):
        lenient = rng.random() < 0.3
        return [1.0 if lenient and text[0] == "a" else q for text, q in zip(question.options, qualities, strict=True)]

    return grade


def hasty(rng):
    """A grader who takes three in ten of the answers that are shown first for right, whosever they are."""

    def grade(qualities, question):
        return [1.0 if rng.random() < 0.3 else qualities[0], *qualities[1:]]

    return grade


def truth(pairs):
    return float(np.mean([max(0.0, guardian - primary) for primary, guardian in pairs]))


@pytest.mark.parametrize("swapped", [drawn, primary_first])
def test_grades_come_back_to_the_answer_they_were_given_to(swapped):
    pairs = answers(np.random.default_rng(1))
    assert losses(pairs, honest, swapped).mean() == pytest.approx(truth(pairs))


def test_a_grader_who_knows_whose_answer_is_whose_is_caught():
    """Blind graders cannot lean, since what they get is the same bytes whoever said which."""
    rng = np.random.default_rng(2)
    pairs = answers(rng)
    assert unbiased(losses(pairs, honest, drawn), truth(pairs))
    leaning = losses(pairs, knowing(rng), drawn)
    assert not unbiased(leaning, truth(pairs))
    assert leaning.mean() == pytest.approx(0.7 * truth(pairs), rel=0.1)


def test_a_drawn_order_lets_haste_favour_neither_model_and_a_fixed_one_is_caught():
    """Two models that are equally good: who tires of the second answer favours what is shown first."""
    rng = np.random.default_rng(3)
    pairs = answers(rng)
    assert unbiased(losses(pairs, hasty(rng), drawn, NET), 0.0)
    fixed = losses(pairs, hasty(rng), primary_first, NET)
    assert not unbiased(fixed, 0.0)
    assert fixed.mean() < 0


def test_stopping_a_panel_early_does_not_change_its_losses_and_taking_the_first_grader_is_caught():
    """Of three graders one is careless in three of ten pairs, in favour of the Primary; which one is by chance."""
    rng = np.random.default_rng(4)
    pairs = answers(rng)
    whole, early, first = [], [], []
    for primary, guardian in pairs:
        votes = [GRADE_PAIRS.index((primary, guardian))] * 3
        if rng.random() < 0.9:
            votes[int(rng.integers(3))] = GRADE_PAIRS.index((1.0, guardian))
        counts = (counted(tuple(votes[:k]), panel=3) for k in range(1, 4))
        early.append(GRADE_PAIRS[next(count.verdict for count in counts if count.verdict is not None)])
        whole.append(GRADE_PAIRS[counted(tuple(votes), panel=3).verdict])
        first.append(GRADE_PAIRS[votes[0]])
    assert early == whole == pairs
    by_first = np.array([decision_loss(AUDITED, Verdict(grades=grades)) for grades in first])
    assert not unbiased(by_first, truth(pairs))
