import math
from string import ascii_uppercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformal_arbitrage.errors import ReplyError
from conformal_arbitrage.models import Endpoint, LogprobScorer, Settings
from conformal_arbitrage.models.choices import letter_shares
from conformal_arbitrage.types import Query, Spent
from tests.models.asking import QUERY, refused, scored
from tests.scripted import completion


def scorer(**settings):
    return lambda port: LogprobScorer(port=port, settings=Settings(**{"model": "m", **settings}))


def first_token(probabilities, **rest):
    listed = [{"token": token, "logprob": math.log(p), "bytes": None} for token, p in probabilities.items()]
    best = listed[0]["token"]
    return completion(best, logprobs={"content": [{**listed[0], "top_logprobs": listed}], "refusal": None}, **rest)


def heard(probabilities, query=QUERY):
    return scored(scorer(), lambda *_: first_token(probabilities), query)[0].values


def test_letters_are_scored_by_their_share_of_the_first_token():
    result, _ = scored(scorer(), lambda *_: first_token({"A": 0.5, "B": 0.2, "C": 0.1, "The": 0.2}, model="m-1"))
    assert result.values == pytest.approx((0.625, 0.25, 0.125))
    assert result.served == "m-1"
    assert result.spent == Spent(calls=1, input_tokens=10, output_tokens=5, cost=None)
    assert "'The'" in result.raw


def test_the_request_asks_for_one_token_and_the_likeliest_twenty():
    _, upstream = scored(scorer(), lambda *_: first_token({"A": 1.0}))
    (body,) = upstream.bodies
    text = body.pop("messages")[0]["content"]
    assert body == {"model": "m", "temperature": 0.1, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
    assert text.startswith("Which of these is red?\n\nA. a rose\nB. the sea\nC. grass\n\n")
    assert "letter" in text


def test_settings_are_sent_with_the_request():
    settings = {"temperature": None, "max_tokens": 400, "reasoning_effort": "none", "seed": 3}
    _, upstream = scored(scorer(**settings, token_field="max_completion_tokens"), lambda *_: first_token({"A": 1.0}))
    (body,) = upstream.bodies
    assert "temperature" not in body
    assert "max_tokens" not in body
    assert (body["max_completion_tokens"], body["reasoning_effort"], body["seed"]) == (400, "none", 3)


def test_spellings_of_a_letter_count_together():
    shares = heard({"A": 0.2, " A": 0.1, "(A)": 0.1, "a": 0.1, "B.": 0.2, "(B": 0.1, "C)": 0.1, "Apple": 0.1})
    assert shares == pytest.approx((0.5 / 0.9, 0.3 / 0.9, 0.1 / 0.9))


def test_a_missing_letter_gets_at_most_the_probability_that_listed_tokens_leave():
    assert heard({"A": 0.6, "B": 0.3}) == pytest.approx((0.6, 0.3, 0.1))
    assert heard({"A": 0.6, "B": 0.4}) == pytest.approx((0.6, 0.4, 0.0))


def test_a_missing_letter_gets_at_most_the_probability_of_the_last_listed_token():
    assert heard({"A": 0.5, "The": 0.2, "B": 0.05}) == pytest.approx((0.5 / 0.6, 0.05 / 0.6, 0.05 / 0.6))
    assert heard({"A": 0.5, "B": 0.2, "The": 0.05}) == pytest.approx((0.5 / 0.75, 0.2 / 0.75, 0.05 / 0.75))


def test_listed_probabilities_that_sum_to_a_little_over_one_leave_nothing():
    assert letter_shares([("A", 0.75), ("B", 0.2500001)], 3)[2] == 0.0


@st.composite
def truncated(draw):
    """A full distribution over letters and other tokens, and its k likeliest."""
    count = draw(st.integers(2, 6))
    others = [f"word{k}" for k in range(draw(st.integers(0, 25)))]
    tokens = [*ascii_uppercase[:count], *others]
    weights = draw(st.lists(st.integers(1, 1000), min_size=len(tokens), max_size=len(tokens)))
    full = [(token, weight / sum(weights)) for token, weight in zip(tokens, weights, strict=True)]
    listed = sorted(full, key=lambda entry: -entry[1])[: draw(st.integers(1, 20))]
    return dict(full), listed, count


def margin(shares):
    first, second = sorted(shares, reverse=True)[:2]
    return first - second


@given(truncated())
def test_the_margin_is_never_larger_than_with_the_whole_distribution(case):
    full, listed, count = case
    shares = letter_shares(listed, count)
    letters = [full[letter] for letter in ascii_uppercase[:count]]
    if shares is None:
        assert not {token for token, _ in listed} & set(ascii_uppercase[:count])
        return
    truth = [p / sum(letters) for p in letters]
    assert abs(sum(shares) - 1) < 1e-9
    assert margin(shares) <= margin(truth) + 1e-9
    assert shares[truth.index(max(truth))] == max(shares)


@given(truncated())
def test_where_every_letter_is_listed_the_shares_are_exact(case):
    full, _, count = case
    letters = [full[letter] for letter in ascii_uppercase[:count]]
    assert letter_shares(list(full.items()), count) == pytest.approx([p / sum(letters) for p in letters])


def test_no_letter_among_the_likeliest_tokens_is_an_error():
    error, _ = refused(scorer(), lambda *_: first_token({"The": 0.9, "D": 0.1}), error=ReplyError)
    assert "no letter" in str(error)
    assert "'The'" in error.raw
    assert error.spent.calls == 1


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {},
        [],
        {"content": None},
        {"content": []},
        {"content": [None]},
        {"content": [{"token": "A", "logprob": 0.0}]},
    ],
)
def test_an_endpoint_without_logprobs_is_an_error(logprobs):
    error, _ = refused(scorer(), lambda *_: completion("A", logprobs=logprobs), error=ReplyError)
    assert "lists no logprobs" in str(error)
    assert error.spent.calls == 1


def test_entries_that_are_not_log_probabilities_are_ignored():
    listed = [{"token": "A", "logprob": -0.7}, {"token": "B", "logprob": 2.0}, {"token": 3, "logprob": -1}, None, "C"]
    listed.append({"token": "B", "logprob": "-1"})
    listed.append({"token": "B", "logprob": -1.4})
    reply = completion("A", logprobs={"content": [{"top_logprobs": listed}]})
    result, _ = scored(scorer(), lambda *_: reply, Query("q", ("x", "y")))
    a, b = math.exp(-0.7), math.exp(-1.4)
    assert result.values == pytest.approx((a / (a + b), b / (a + b)))


def test_letters_go_up_to_z():
    actions = tuple(f"option {k}" for k in range(26))
    assert heard({"Z": 1.0}, Query("q", actions))[25] == 1.0
    error, upstream = refused(
        scorer(), lambda *_: first_token({"A": 1.0}), Query("q", (*actions, "more")), error=ReplyError
    )
    assert "27 options" in str(error)
    assert upstream.bodies == []


def test_the_served_model_is_pinned():
    error, _ = refused(scorer(served="m-1"), lambda *_: first_token({"A": 1.0}, model="m-2"), error=ReplyError)
    assert "'m-2'" in str(error)


def test_whatever_the_scores_depend_on_changes_the_identity():
    port, other = Endpoint("http://127.0.0.1:1/v1"), Endpoint("http://127.0.0.1:2/v1")
    ways = [{}, {"model": "x"}, {"served": "x"}, {"temperature": 0.0}, {"max_tokens": 9}, {"seed": 1}]
    ways.append({"reasoning_effort": "low"})
    identities = [scorer(**way)(port).identity for way in ways] + [scorer()(other).identity]
    assert len({repr(identity) for identity in identities}) == len(identities)
    assert (identities[0]["kind"], identities[0]["max_tokens"]) == ("logprob", 1)
