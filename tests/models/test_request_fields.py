import inspect
import json

import pytest
from openai.resources.chat.completions import Completions

from conformal_arbitrage.gateway import chat
from conformal_arbitrage.models.completions import (
    ANY,
    AS_REQUESTED,
    PASSED_ON,
    SETTINGS,
    RequestFields,
    checked_settings,
    overridden,
    unlogged_fields,
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


REQUESTED = {role: {"settings": AS_REQUESTED} for role in ("primary", "guardian")}


def logged(*bodies, identities=REQUESTED):
    fields = RequestFields()
    for body in bodies:
        fields.add(body)
    return fields.document(identities)


def test_a_log_lists_the_values_of_its_requests_and_says_nothing_of_pinned_ones():
    bodies = [{"messages": [], "seed": 1, "tools": [{}]}, {"messages": [], "temperature": 0, "stop": None}]
    fields = {"seed": [None, 1], "temperature": [None, 0.0], "tools": [None, True]}
    assert logged(*bodies) == {"requests": {"settings": AS_REQUESTED, "fields": fields}}
    pinned = logged(*bodies, identities={**REQUESTED, "guardian": PINNED})
    assert pinned == {"requests": {"settings": "pinned", "fields": {"tools": [None, True]}}}
    assert unlogged_fields({"seed": 2, "tools": [{}]}, pinned) == []
    assert unlogged_fields({"response_format": {"type": "json_object"}}, pinned) == ["response_format 'json_object'"]


def test_a_value_counts_as_logged_only_if_a_request_had_it():
    known = logged({"temperature": 0, "stop": "x"}, {"temperature": 1, "stop": ["x"], "max_tokens": 5})
    assert unlogged_fields({"temperature": 0.0, "stop": ["x"]}, known) == []
    assert unlogged_fields({"temperature": 1, "stop": "x", "max_completion_tokens": 5}, known) == []
    assert unlogged_fields({"temperature": 0.5, "stop": "y"}, known) == ["stop ['y']", "temperature 0.5"]
    assert unlogged_fields({"stop": "x", "max_tokens": 6}, known) == ["max_tokens 6", "no temperature"]
    assert unlogged_fields({"temperature": 9}, {}) == []  # made from a log without requests
    assert unlogged_fields({"temperature": 9}, "unbound") == []


def test_more_values_than_can_be_listed_stand_for_any():
    known = logged(*({"seed": seed} for seed in range(40)))
    assert known["requests"]["fields"] == {"seed": ANY}
    assert unlogged_fields({"seed": 99}, known) == []


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
