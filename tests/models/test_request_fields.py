import inspect
import json

import pytest
from openai.resources.chat.completions import Completions

from conformal_arbitrage.gateway import chat
from conformal_arbitrage.models.completions import (
    AS_REQUESTED,
    PASSED_ON,
    SETTINGS,
    checked_settings,
    logged_settings,
    overridden,
    unlogged_settings,
)

PINNED = {"temperature": 0.1, "max_tokens": None, "seed": None, "reasoning_effort": None}


def test_every_field_of_the_official_client_is_passed_on_answered_or_refused():
    client = {name for name in inspect.signature(Completions.create).parameters if not name.startswith("extra_")}
    known = PASSED_ON | chat._OWN | chat._REFUSED.keys()
    assert client - {"self", "timeout"} <= known
    assert not PASSED_ON & chat._REFUSED.keys()


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("temperature", 0, "0.0"), ("temperature", 2, "2.0"), ("top_p", 1, "1.0"), ("presence_penalty", -2, "-2.0"),
        ("max_tokens", 3.0, "3"), ("max_completion_tokens", 1, "1"), ("seed", -5, "-5"), ("stop", "x", '"x"'),
        ("stop", ["a", "b"], '["a", "b"]'), ("logit_bias", {"7": 1.0, "5": -100}, '{"5": -100, "7": 1}'),
        ("logit_bias", {"7": 0.5}, '{"7": 0.5}'), ("verbosity", "low", '"low"'),
    ],
)  # fmt: skip
def test_settings_have_one_form(name, value, kept):
    assert json.dumps(checked_settings({name: value})[name]) == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0"), ("temperature", True), ("temperature", 2.1), ("temperature", float("nan")), ("top_p", -0.1),
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", "5"), ("seed", 2**63), ("seed", float("inf")), ("stop", 5),
        ("stop", ""), ("stop", [1]), ("stop", ["x"] * 17), ("logit_bias", []), ("logit_bias", {"1": "x"}),
        ("logit_bias", {"1": 101}), ("verbosity", ""), ("service_tier", 5), ("reasoning_effort", ["high"]),
    ],
)  # fmt: skip
def test_a_setting_that_no_endpoint_takes_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be "):
        checked_settings({name: value})


def test_null_means_not_given():
    assert checked_settings(dict.fromkeys(SETTINGS)) == {}


def test_one_limit_has_one_value():
    assert checked_settings({"max_tokens": 5, "max_completion_tokens": 5})["max_tokens"] == 5
    with pytest.raises(ValueError, match="one limit under two names"):
        checked_settings({"max_tokens": 5, "max_completion_tokens": 6})


@pytest.mark.parametrize("name", SETTINGS)
def test_any_setting_differs_from_pinned_ones_that_do_not_have_it(name):
    value = {"logit_bias": {"1": 1}}.get(name, 1)
    both = {"primary": PINNED, "guardian": PINNED}
    assert list(overridden({"messages": [], name: value}, both)) == [name]
    requested = {role: {**PINNED, "settings": AS_REQUESTED} for role in both}
    assert overridden({name: value}, requested) == {}


def test_a_log_names_the_settings_of_its_requests_where_they_are_as_requested():
    bodies = [{"messages": [], "seed": 1}, {"messages": [], "temperature": 0, "stop": None}, {"messages": []}]
    requested = {role: {"settings": AS_REQUESTED} for role in ("primary", "guardian")}
    logged = logged_settings(bodies, requested)
    assert logged == {"requests": {"settings": ["seed", "temperature"]}}
    assert logged_settings(bodies, {**requested, "guardian": PINNED}) == {}
    assert unlogged_settings({"seed": 2, "temperature": 1, "top_p": None}, logged) == []
    assert unlogged_settings({"seed": 2, "top_p": 1, "stop": "x"}, logged) == ["stop", "top_p"]
    assert unlogged_settings({"top_p": 1}, {}) == []  # a certificate of an earlier release


def test_a_limit_under_its_other_name_was_logged():
    logged = {"requests": {"settings": ["max_tokens"]}}
    assert unlogged_settings({"max_completion_tokens": 5}, logged) == []
    assert unlogged_settings({"max_completion_tokens": 5}, {"requests": {"settings": []}}) == ["max_completion_tokens"]


def test_an_equal_value_does_not_differ():
    both = {"primary": PINNED, "guardian": PINNED}
    assert overridden({"temperature": 0.1, "seed": None}, both) == {}


@pytest.mark.parametrize(
    ("guardian", "said"),
    [
        ({}, "temperature is 0.7, and the pinned value is 0.1; leave it out or send 0.1, or let"),
        ({"temperature": 0.5}, "the pinned value is primary: 0.1, guardian: 0.5; leave it out, or let"),
        ({"temperature": None}, "the pinned value is primary: 0.1, guardian: not set; leave it out, or let"),
    ],
)
def test_the_refusal_names_the_pinned_value_and_both_remedies(guardian, said):
    both = {"primary": PINNED, "guardian": {**PINNED, **guardian}}
    text = overridden({"temperature": 0.7}, both)["temperature"]
    assert said in text
    assert text.endswith('settings = "as requested" in [task], then collect and calibrate again')
