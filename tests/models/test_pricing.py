import math

import pytest

from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.models.resilience import Price, dollars, list_price
from conformal_arbitrage.types import Spent

OPENAI = "https://api.openai.com/v1"
MILLION = Spent(calls=1, input_tokens=10**6, output_tokens=10**6)


def test_a_known_model_has_its_providers_list_price():
    price = list_price("gpt-4o-mini", OPENAI)
    assert price.cost(Spent(calls=1, input_tokens=10**6, output_tokens=0)) == pytest.approx(0.15)
    assert price.cost(Spent(calls=1, input_tokens=0, output_tokens=10**6)) == pytest.approx(0.60)
    assert price.cost(MILLION) == pytest.approx(0.75)
    assert price.cost(Spent()) == 0


def test_the_list_price_is_linear_in_tokens():
    price = list_price("gpt-4o-mini", OPENAI)
    once = Spent(calls=1, input_tokens=1234, output_tokens=56)
    assert price.cost(once + once) == pytest.approx(2 * price.cost(once))


def test_tokens_read_from_the_cache_are_cheaper():
    price = list_price("gpt-4o-mini", OPENAI)
    fresh = Spent(calls=1, input_tokens=10**6, output_tokens=0)
    cached = Spent(calls=1, input_tokens=10**6, output_tokens=0, cached_tokens=10**6)
    half = Spent(calls=1, input_tokens=10**6, output_tokens=0, cached_tokens=5 * 10**5)
    assert price.cost(cached) == pytest.approx(0.075)
    assert price.cost(cached) < price.cost(half) < price.cost(fresh)


def test_cached_tokens_are_at_most_the_input_tokens():
    price = list_price("gpt-4o-mini", OPENAI)
    odd = Spent(calls=1, input_tokens=100, output_tokens=0, cached_tokens=10**6)
    all_cached = Spent(calls=1, input_tokens=100, output_tokens=0, cached_tokens=100)
    assert price.cost(odd) == price.cost(all_cached)


@pytest.mark.parametrize(
    ("model", "url"),
    [
        ("no-such-model", OPENAI),
        ("gpt-4o-mini", "http://127.0.0.1:11434/v1"),
        ("gpt-4o-mini", "https://llm.example.org/v1"),
    ],
)
def test_a_model_without_a_list_price_has_none(model, url):
    assert list_price(model, url) is None


@pytest.mark.parametrize("unknown", ["input_tokens", "output_tokens"])
def test_an_unknown_number_of_tokens_has_an_unknown_cost_and_never_zero(unknown):
    spent = Spent(**{"calls": 1, "input_tokens": 5, "output_tokens": 5, unknown: None})
    assert list_price("gpt-4o-mini", OPENAI).cost(spent) is None
    assert Price(input=1, output=2).cost(spent) is None


def test_a_custom_price_is_per_million_tokens_and_per_call():
    assert Price(input=2, output=8).cost(MILLION) == pytest.approx(10)
    assert Price(input=2).cost(Spent(calls=1, input_tokens=500, output_tokens=500)) == pytest.approx(0.001)
    assert Price(per_call=0.5).cost(Spent(calls=3)) == pytest.approx(1.5)
    assert Price(input=2, output=8, per_call=0.5).cost(MILLION + MILLION) == pytest.approx(21)


def test_tokens_without_a_price_may_be_unknown():
    spent = Spent(calls=2, input_tokens=None, output_tokens=None, cost=None)
    assert Price(per_call=0.25).cost(spent) == 0.5
    assert Price(input=1).cost(Spent(calls=1, input_tokens=10**6, output_tokens=None)) == 1.0
    assert Price(output=1).cost(Spent(calls=1, input_tokens=10**6, output_tokens=None)) is None


@pytest.mark.parametrize("name", ["input", "output", "per_call"])
@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
def test_an_impossible_price_is_refused(name, value):
    with pytest.raises(OptionError, match=name):
        Price(**{name: value})


@pytest.mark.parametrize(
    ("cost", "text"),
    [(None, "unknown"), (0, "$0.00"), (0.00123, "$0.0012"), (0.25, "$0.25"), (1, "$1.00"), (12.345, "$12.35")],
)
def test_costs_are_formatted_for_people(cost, text):
    assert dollars(cost) == text


def test_an_unknown_cost_stays_unknown_in_a_sum():
    assert (Spent(calls=1, cost=None) + Spent(calls=1, cost=2.0)).cost is None
    assert (Spent(calls=1, cost=1.0) + Spent(calls=1, cost=2.0)).cost == 3.0


def test_costs_are_the_decimals_that_people_expect():
    once = Spent(calls=1, cost=0.1)
    assert (once + once + once).cost == 0.3
    assert Price(per_call=0.1).cost(Spent(calls=3)) == 0.3
