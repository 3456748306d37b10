"""Arguments of tool calls against the schemas of their tools, and how they are shown."""

import json
import time

import pytest

from conformal_arbitrage.gateway import argument_schemas
from conformal_arbitrage.gateway.argument_schemas import ArgumentSchema
from conformal_arbitrage.gateway.tool_calls import editable, shown_arguments, unchecked_text, visible
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


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        (PERSON, []), ({}, []), ({"pattern": "^a"}, ["pattern"]), ({"properties": {"pattern": {"type": "string"}}}, []),
        ({"properties": {"a": {"format": "email"}, "b": {"anyOf": [{"pattern": "x"}]}}}, ["format", "pattern"]),
        ({"items": {"uniqueItems": True}}, ["uniqueItems"]), ({"items": [{"type": "string"}]}, ["items"]),
        ({"patternProperties": {}, "additionalProperties": False}, ["additionalProperties", "patternProperties"]),
        ({"$ref": "https://elsewhere.example/schema"}, ["$ref"]), ({"$ref": "#/$defs/none"}, ["$ref"]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"contains": {}}, "b": {"if": {}}}}, ["contains"]),
        ({"exclusiveMinimum": True, "minimum": 1}, ["exclusiveMinimum"]), ({"minLength": "3"}, ["minLength"]),
        ({"title": "t", "description": "d", "default": {"pattern": 1}, "$schema": "s"}, []),
        ({"dependentRequired": {}, "if": {}, "then": {}, "x-mine": 1}, ["dependentRequired", "if", "then", "x-mine"]),
    ],
)  # fmt: skip
def test_what_is_not_checked_is_named(schema, names):
    assert ArgumentSchema(schema).unchecked() == names


def test_a_value_of_every_keyword_that_is_not_named_is_checked():
    """Whatever is left out of `unchecked` refuses some value."""
    refused = {
        "type": ("string", 1), "const": (1, 2), "enum": ([1], 2), "required": (["a"], {}),
        "properties": ({"a": False}, {"a": 1}), "additionalProperties": (False, {"a": 1}), "items": (False, [1]),
        "prefixItems": ([False], [1]), "allOf": ([False], 1), "anyOf": ([False], 1), "oneOf": ([True, True], 1),
        "not": (True, 1), "multipleOf": (2, 3), "minimum": (1, 0), "maximum": (1, 2), "exclusiveMinimum": (1, 1),
        "exclusiveMaximum": (1, 1), "minLength": (1, ""), "maxLength": (1, "ab"), "minItems": (1, []),
        "maxItems": (1, [1, 2]), "minProperties": (1, {}), "maxProperties": (0, {"a": 1}),
    }  # fmt: skip
    assert set(refused) == argument_schemas._CHECKED | argument_schemas._NUMBERS
    for keyword, (asked, value) in refused.items():
        schema = ArgumentSchema({keyword: asked})
        assert schema.unchecked() == []
        assert schema.problem(value), keyword


def nested(depth):
    schema = {"pattern": "(a+)+$"}
    for _ in range(depth):
        schema = {"anyOf": [schema, schema], "properties": {"a": schema}, "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(500), {"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"properties": {f"p{k}": {"pattern": "(a|a)*$"} for k in range(30_000)}}, {f"k{k}": 1 for k in range(30_000)},
        {"$ref": "#" + "/a" * 30_000}, {"\u202e\0<script>" * 9: 1},
    ],
    ids=["nested", "itself", "circle", "wide", "keywords", "long reference", "names"],
)  # fmt: skip
def test_naming_what_is_not_checked_takes_few_steps_and_few_words(schema, monkeypatch):
    visits = []
    resolved = ArgumentSchema._resolved
    monkeypatch.setattr(ArgumentSchema, "_resolved", lambda *given: visits.append(1) or resolved(*given))
    text = unchecked_text(ProposedCall(name="t", arguments="{}", held=True, place=0, schema=schema))
    assert len(visits) <= 2 * argument_schemas._MOST_STEPS + 2
    assert len(text) < 1000
    assert "\u202e" not in text


def test_a_tool_without_a_schema_says_so():
    call = {"name": "t", "arguments": "{}", "held": True, "place": 0}
    assert "no schema" in unchecked_text(ProposedCall(**call))
    assert "free text" in unchecked_text(ProposedCall(**call, free=True))
    assert unchecked_text(ProposedCall(**call, schema={"type": "object"})) == ""
    assert (
        unchecked_text(ProposedCall(**call, schema={"properties": {"mail": {"format": "email", "pattern": "@"}}}))
        == "Not checked of the tool's schema: format, pattern."
    )


LARGE = {"a": list(range(17_000))}
MANY = {"a": [99_999] * 15_000}


def each(schema):
    return {"properties": {"a": {"items": schema}}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"anyOf": [{"type": "string"}] * 15_000}, LARGE), (each({"$ref": "#" + "/x" * 300_000}), MANY),
        (each({"enum": list(range(100_000))}), MANY), (each({"required": [1] * 300_000}), {"a": [{}] * 15_000}),
        (each({"type": ["x"] * 100_000 + ["integer"]}), MANY), (each({"type": ["x" * 900_000]}), MANY),
        ({"allOf": [{"$ref": "#/$defs/c"}] * 19_000, "$defs": {"c": {"const": LARGE}}}, {"a": list(range(17_000))}),
        ({"anyOf": [{"required": ["x" * 900_000]}] + [{"$ref": "#/anyOf"}] * 19_000}, LARGE),
        ({"anyOf": [{"$ref": "#/$defs/c"}] * 19_000, "$defs": {"c": {"required": ["x" * 800_000]}}}, LARGE),
        ({"anyOf": [{"$ref": "#/$defs/c"}] * 19_000, "$defs": {"c": {"enum": ["x" * 800_000]}}}, {"a": "y" * 90_000}),
    ],
    ids=["values in messages", "long reference", "enum", "required", "types", "long type", "const", "names", "name", "text"],
)  # fmt: skip
def test_a_hostile_schema_costs_little_more_than_to_read_it(schema, value):
    """By the processor's time, against walking through the same documents letter by letter; 50 s were 3,000 times that."""
    documents = [json.loads(json.dumps(one)) for one in (schema, value) for _ in range(3)]
    letters = json.dumps([schema, value])
    began = time.process_time()
    for letter in letters:
        assert letter
    reading = time.process_time() - began
    began = time.process_time()
    problem = ArgumentSchema(documents[0]).problem(documents[-1])
    assert time.process_time() - began < 300 * reading
    assert len(problem or "") < 1000
