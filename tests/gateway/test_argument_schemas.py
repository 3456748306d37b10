"""Arguments of tool calls against the schemas of their tools, and how they are shown."""

import json

import pytest

from conformal_arbitrage.gateway.argument_schemas import ArgumentSchema
from conformal_arbitrage.gateway.tool_calls import editable, shown_arguments, visible
from conformal_arbitrage.store.review_base import ProposedCall

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "age": {"type": ["integer", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 1]}, "minItems": 1, "maxItems": 2},
        "pair": {"prefixItems": [{"type": "string"}, {"type": "number", "multipleOf": 0.1}], "items": False},
        "friend": {"$ref": "#"},
        "home": {"$ref": "#/$defs/place"},
        "kind": {"const": True},
        "way": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]},
        "end": {"anyOf": [{"type": "string"}, {"type": "object", "required": ["at"], "minProperties": 2}]},
        "both": {"allOf": [{"minimum": 1}, {"maximum": 3}], "not": {"const": 2}},
    },
    "required": ["name"],
    "additionalProperties": {"type": "boolean"},
    "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}},
}


@pytest.mark.parametrize(
    "value",
    [
        {"name": "ann"}, {"name": "ann", "age": None}, {"name": "ann", "age": 149.0, "tags": ["a", 1]},
        {"name": "ann", "pair": ["x", 0.3]}, {"name": "ann", "friend": {"name": "bob", "home": {"city": "Oslo"}}},
        {"name": "ann", "kind": True, "way": 4, "end": {"at": 1, "x": 2}, "both": 3, "more": False},
    ],
)  # fmt: skip
def test_what_fits_has_no_problem(value):
    assert ArgumentSchema(PERSON).problem(value) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "the arguments must be of type object"), ({}, "must have 'name'"), ({"name": ""}, "at least 1 characters"),
        ({"name": "anneli"}, "at most 5 characters"), ({"name": "ann", "age": 1.5}, "integer or null"),
        ({"name": "ann", "age": True}, "integer or null"), ({"name": "ann", "age": 0}, "above 0"),
        ({"name": "ann", "age": 150}, "below 150"), ({"name": "ann", "tags": []}, "at least 1 items"),
        ({"name": "ann", "tags": ["a", "b", "a"]}, "at most 2 items"),
        ({"name": "ann", "tags": [True]}, "one of 'a', 'b', 1"),
        ({"name": "ann", "pair": ["x", 0.35]}, "multiple of 0.1"), ({"name": "ann", "pair": ["x", 1, 2]}, "item 3 may not"),
        ({"name": "ann", "friend": {"age": 3}}, "friend must have 'name'"),
        ({"name": "ann", "home": {"zip": 1}}, "zip may not"),
        ({"name": "ann", "kind": 1}, "must be True"), ({"name": "ann", "way": 6}, "exactly one"),
        ({"name": "ann", "way": "x"}, "one of the schemas"), ({"name": "ann", "end": {"at": 1}}, "one of the schemas"),
        ({"name": "ann", "both": 4}, "at most 3"), ({"name": "ann", "both": 2}, "something else"),
        ({"name": "ann", "more": 1}, "of type boolean"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_its_place(value, words):
    problem = ArgumentSchema(PERSON).problem(value)
    assert problem is not None
    assert words in problem


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"anyOf": [{"anyOf": [{"$ref": "#"}] * 50}] * 50},
    ],
)  # fmt: skip
def test_a_schema_without_end_is_refused_in_few_steps(schema):
    assert "too large to check" in str(ArgumentSchema(schema).problem({}))


@pytest.mark.parametrize(
    ("value", "schema"),
    [(10**400, {"multipleOf": 0.5}), (1, {"minimum": 10**400}), (1e308, {"multipleOf": 1e-308})],
)
def test_numbers_that_floats_do_not_hold_are_refused(value, schema):
    assert "too large to check" in str(ArgumentSchema(schema).problem(value))


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "(a+)+$"},
        {"$ref": "https://example.com/x"},
        {"type": 7},
        {"properties": 3},
        {"enum": {}},
        {"required": [[]]},
    ],
)
def test_what_a_schema_says_otherwise_is_not_checked(schema):
    assert ArgumentSchema(schema).problem("a" * 40 + "!") is None
    assert ArgumentSchema(schema).problem({"a": "!"}) is None


def proposed(arguments, **rest):
    return ProposedCall(name="refund", arguments=arguments, held=True, place=0, **rest)


def test_arguments_are_shown_with_every_token_as_it_is():
    text = '{"a":1.10,"a" : [1,{}],"b":"x, {y}","c":1e400,"d":"\u00e4"}'
    shown = shown_arguments(proposed(text))
    assert shown.splitlines() == [
        "{", '  "a": 1.10,', '  "a": [', "    1,", "    {}", "  ],",
        '  "b": "x, {y}",', '  "c": 1e400,', '  "d": "\u00e4"', "}",
    ]  # fmt: skip


def test_no_character_is_hidden():
    shown = shown_arguments(proposed('{"to":"ann\u202emoc.live","n":"\u200b"}'))
    assert "\u202e" not in shown
    assert json.loads(shown) == {"to": "ann\u202emoc.live", "n": "\u200b"}
    assert shown_arguments(proposed("not {JSON \u202e", free=True)) == "not {JSON \u27e8U+202E\u27e9"
    assert visible("a\u2066b") == "a\u27e8U+2066\u27e9b"


def test_what_a_form_cannot_carry_is_not_edited_there():
    assert len(editable([proposed("{}")])) == 1
    assert editable([proposed(json.dumps({"x": "y" * 100_000}))]) == ()
    assert editable([proposed("\u202e", free=True)]) == ()
