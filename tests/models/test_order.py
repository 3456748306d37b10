import asyncio
import itertools

from hypothesis import given
from hypothesis import strategies as st

from conformal_arbitrage import ScoreLog
from conformal_arbitrage.models import FunctionScorer, ReplayScorer, Shuffled
from conformal_arbitrage.types import Query, Spent


def shown_and_scored(query):
    """The query as the inner scorer saw it, and the outer scores; an option's score is the number it ends with."""
    seen = []

    def function(given):
        seen.append(given)
        return [float(action.split()[-1]) for action in given.actions]

    scores = asyncio.run(Shuffled(FunctionScorer(function, name="last number")).score(query))
    return seen[0], scores


def menu(count, question="Which?", **rest):
    return Query(question, tuple(f"option {k}" for k in range(count)), **rest)


@given(st.integers(1, 12), st.integers(0, 10**6))
def test_the_scores_come_back_in_the_querys_own_order(count, salt):
    shown, scores = shown_and_scored(menu(count, f"Which, {salt}?"))
    assert scores.values == tuple(float(k) for k in range(count))
    assert sorted(shown.actions) == sorted(menu(count).actions)


def test_usage_and_raw_reply_are_passed_through():
    _, scores = shown_and_scored(menu(3))
    assert scores.spent == Spent(calls=1, cost=None)
    assert scores.raw is not None


def test_the_same_query_is_shown_in_the_same_order_whatever_its_id():
    first, _ = shown_and_scored(menu(8, id="a"))
    again, _ = shown_and_scored(menu(8, id="b"))
    assert first.actions == again.actions
    assert (first.id, again.id) == ("a", "b")


def test_every_order_occurs_about_equally_often():
    orders = [shown_and_scored(menu(3, f"Which, {k}?"))[0].actions for k in range(600)]
    counts = [orders.count(order) for order in itertools.permutations(menu(3).actions)]
    assert sum(counts) == 600
    assert all(60 < count < 140 for count in counts)


def test_other_options_are_shown_in_another_order():
    orders = {shown_and_scored(Query("Which?", (f"{k} 0", "x 1", "y 2")))[0].places for k in range(60)}
    assert len(orders) == 6


def test_places_tell_where_the_shown_options_stood():
    shown, _ = shown_and_scored(menu(8))
    assert [menu(8).actions[place] for place in shown.places] == list(shown.actions)
    part = menu(8).only([6, 1, 4])
    shown, scores = shown_and_scored(part)
    assert [menu(8).actions[place] for place in shown.places] == list(shown.actions)
    assert scores.values == (6.0, 1.0, 4.0)


def test_recorded_scores_survive_shuffling():
    log = ScoreLog.from_arrays([[0.1, 0.2, 0.3, 0.4]], [[0.4, 0.3, 0.2, 0.1]], id=["a"])
    scorer = Shuffled(ReplayScorer.of_log(log, "primary"))
    assert asyncio.run(scorer.score(menu(4, id="a"))).values == (0.1, 0.2, 0.3, 0.4)
    assert asyncio.run(scorer.score(menu(4, id="a").only([3, 1]))).values == (0.4, 0.2)


def test_shuffling_changes_the_identity_and_keeps_the_rest_of_it():
    plain = FunctionScorer(lambda query: [0.0], name="rule")
    assert Shuffled(plain).identity != plain.identity
    assert plain.identity.items() <= Shuffled(plain).identity.items()
    assert "shuffled" in Shuffled(plain).identity["option_order"]
