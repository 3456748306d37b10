"""Check the arguments of a tool call against the JSON Schema of its tool.

The schema is the caller's and the arguments are a reviewer's, so neither may cost much time: the number of steps is limited,
and patterns, which can take forever, are not checked. `unchecked` names every keyword of a schema that is not.

Knows nothing of tools or reviews.
"""

from collections.abc import Callable, Mapping, Sequence
from math import isclose
from reprlib import Repr
from typing import Any

from conformal_arbitrage.types import as_list, as_object, is_list, is_object

_MOST_STEPS = 20_000
_COMPARED = 50
"""How many entries of a list are compared for the price of a step."""
_LONG = ("enum", "required", "type")
_DEEPEST = 64
_LONGEST_SHOWN = 60
_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong = 3, 2 * _LONGEST_SHOWN, 2 * _LONGEST_SHOWN
_SHORT.maxlist = _SHORT.maxdict = 10
_TOO_LARGE = "the schema, or a number, is too large to check; approve the arguments as they were, or reject the call"
_NUMBERS = frozenset(
    {"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems",
     "maxItems", "minProperties", "maxProperties"}
)  # fmt: skip
_MAPS, _LISTS = frozenset({"properties"}), frozenset({"prefixItems", "allOf", "anyOf", "oneOf"})
_PARTS = frozenset({"additionalProperties", "items", "not"})
_CHECKED = frozenset({"type", "const", "enum", "required"}) | _MAPS | _LISTS | _PARTS
_NO_RULES = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
     "$id", "id", "$anchor", "$defs", "definitions", "contentMediaType", "contentEncoding", "contentSchema"}
)  # fmt: skip
"""Keywords that ask nothing of a value."""
Found = str | None
"""What is wrong, with where; None if nothing is."""


class ArgumentSchema:
    """A JSON Schema.

    Args:
        schema: the document; references lead to parts of it.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = dict(schema)
        self._steps = 0
        self._endless = False
        self._targets: dict[str, object] = {}
        self._known: dict[tuple[int, int], Found] = {}

    def problem(self, value: object) -> Found:
        """Return what is wrong with a value; None if nothing is, as far as is checked."""
        self._steps, self._endless = 0, False
        self._known.clear()
        try:
            problem = self._check(value, self._root, "the arguments", 0)
        except OverflowError:  # a number beyond those that floats hold
            return _TOO_LARGE
        return _TOO_LARGE if self._endless else problem

    def unchecked(self) -> list[str]:
        """Return the keywords that `problem` leaves out, of all parts of the schema that a value can meet, sorted."""
        names: set[str] = set()
        waiting: list[object] = [self._root]
        seen: set[int] = set()
        while waiting:
            schema = waiting.pop()
            if not is_object(schema) or id(schema) in seen:
                continue
            if len(seen) > _MOST_STEPS:
                return [*sorted(names), "parts of it, which are too many to look at"]
            seen.add(id(schema))
            names.update(name for name, value in schema.items() if not self._is_checked(name, value, schema))
            waiting += [part for key in _MAPS for part in as_object(schema.get(key)).values()]
            waiting += [part for key in _LISTS for part in as_list(schema.get(key))]
            waiting += [schema.get(key) for key in _PARTS]
            waiting.append(self._resolved(schema.get("$ref")))
        return sorted(names)

    def _is_checked(self, keyword: str, value: object, schema: Mapping[str, Any]) -> bool:
        """Tell whether a keyword is checked with this value and beside these others, or asks nothing."""
        if keyword == "$ref":
            return self._resolved(value) is not None
        if keyword in _NUMBERS:
            return _number(value) is not None
        if keyword == "additionalProperties":
            return "patternProperties" not in schema
        if keyword in ("enum", "items"):
            return is_list(value) == (keyword == "enum")  # items in a list are those of an old draft
        return keyword in _CHECKED or keyword in _NO_RULES

    def _check(self, value: object, schema: object, where: str, depth: int) -> Found:
        self._steps += 1
        if schema is False:
            return f"{where} may not be given"
        if not is_object(schema):
            return None
        self._steps += sum(len(as_list(schema.get(key))) for key in _LONG) // _COMPARED
        if self._steps > _MOST_STEPS or depth > _DEEPEST:
            self._endless = True
            return _TOO_LARGE
        if not is_object(value) and not is_list(value):
            return self._wrong(value, schema, where, depth)
        pair = id(value), id(schema)  # many references to one part of a schema are not followed one by one
        if pair not in self._known:
            self._known[pair] = self._wrong(value, schema, where, depth)
        return self._known[pair]

    def _wrong(self, value: object, schema: Mapping[str, Any], where: str, depth: int) -> Found:
        if "$ref" in schema:
            target = self._resolved(schema["$ref"])
            if target is not None and (wrong := self._check(value, target, where, depth + 1)):
                return wrong
        return _wrong_value(value, schema, where) or self._wrong_parts(value, schema, where, depth + 1)

    def _resolved(self, reference: object) -> object:
        """Return the part of the document that a reference names; None if it leads elsewhere."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        if reference not in self._targets:
            part: object = self._root
            for name in reference[1:].split("/")[1:]:
                part = as_object(part).get(name.replace("~1", "/").replace("~0", "~"))
            self._targets[reference] = part
        return self._targets[reference]

    def _wrong_parts(self, value: object, schema: Mapping[str, Any], where: str, depth: int) -> Found:
        if is_object(value) and (wrong := self._wrong_object(value, schema, where, depth)):
            return wrong
        if is_list(value) and (wrong := self._wrong_list(value, schema, where, depth)):
            return wrong
        return self._wrong_choice(value, schema, where, depth)

    def _wrong_object(self, value: dict[str, Any], schema: Mapping[str, Any], where: str, depth: int) -> Found:
        known = as_object(schema.get("properties"))
        for name in as_list(schema.get("required")):
            if isinstance(name, str) and name not in value:
                return f"{where} must have {_shown(name)}"
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        for name, inner in value.items():
            wrong = self._check(inner, known.get(name, others), f"{where}: {name:.60}", depth)
            if wrong is not None:
                return wrong
        return None

    def _wrong_list(self, value: list[object], schema: Mapping[str, Any], where: str, depth: int) -> Found:
        first, rest = as_list(schema.get("prefixItems")), schema.get("items", True)
        for place, inner in enumerate(value):
            one = first[place] if place < len(first) else rest
            wrong = self._check(inner, one, f"{where}: item {place + 1}", depth)
            if wrong is not None:
                return wrong
        return None

    def _wrong_choice(self, value: object, schema: Mapping[str, Any], where: str, depth: int) -> Found:
        for one in as_list(schema.get("allOf")):
            if wrong := self._check(value, one, where, depth):
                return wrong
        for keyword in ("anyOf", "oneOf"):
            options = as_list(schema.get(keyword))
            fits = [self._check(value, one, where, depth) is None for one in options]
            if options and not any(fits):
                return f"{where} must fit one of the schemas that the tool allows there; got {_shown(value)}"
            if keyword == "oneOf" and sum(fits) > 1:
                return f"{where} must fit exactly one of the schemas that the tool allows there; got {_shown(value)}"
        if "not" in schema and self._check(value, schema["not"], where, depth) is None:
            return f"{where} must be something else; got {_shown(value)}"
        return None


_TYPES: Mapping[str, Callable[[object], bool]] = {
    "object": is_object,
    "array": is_list,
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
}


def _wrong_value(value: object, schema: Mapping[str, Any], where: str) -> Found:
    """Return what is wrong with a value itself, whatever is in it."""
    named: object = schema.get("type")
    kinds = [kind for kind in (as_list(named) or [named]) if isinstance(kind, str)]
    if kinds and not any(_TYPES[kind](value) for kind in kinds if kind in _TYPES):
        return f"{where} must be of type {_shortened(' or '.join(kinds[:10]))}; got {_shown(value)}"
    if "const" in schema and not _equal(value, schema["const"]):
        return f"{where} must be {_shown(schema['const'])}; got {_shown(value)}"
    options = as_list(schema.get("enum"))
    if options and not any(_equal(value, option) for option in options):
        return f"{where} must be one of {', '.join(map(_shown, options[:10]))}; got {_shown(value)}"
    if isinstance(value, str):
        return _wrong_size(len(value), schema, where, "Length", "characters")
    if is_list(value):
        return _wrong_size(len(value), schema, where, "Items", "items")
    if is_object(value):
        return _wrong_size(len(value), schema, where, "Properties", "properties")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _wrong_number(value, schema, where)
    return None


def _wrong_size(size: int, schema: Mapping[str, Any], where: str, what: str, unit: str) -> Found:
    least, most = _number(schema.get(f"min{what}")), _number(schema.get(f"max{what}"))
    if least is not None and size < least:
        return f"{where} must have at least {least:g} {unit}; got {size}"
    if most is not None and size > most:
        return f"{where} must have at most {most:g} {unit}; got {size}"
    return None


def _wrong_number(value: float, schema: Mapping[str, Any], where: str) -> Found:
    limits: Sequence[tuple[str, str, Callable[[float, float], bool]]] = (
        ("minimum", "at least", lambda one, limit: one >= limit),
        ("maximum", "at most", lambda one, limit: one <= limit),
        ("exclusiveMinimum", "above", lambda one, limit: one > limit),
        ("exclusiveMaximum", "below", lambda one, limit: one < limit),
    )
    for keyword, words, fits in limits:
        limit = _number(schema.get(keyword))
        if limit is not None and not fits(value, limit):
            return f"{where} must be {words} {limit:g}; got {_shown(value)}"
    step = _number(schema.get("multipleOf"))
    if step is not None and step > 0:
        times = value / step
        if not isclose(times, round(times), rel_tol=1e-9, abs_tol=1e-9):
            return f"{where} must be a multiple of {step:g}; got {_shown(value)}"
    return None


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _equal(one: object, other: object) -> bool:
    """Compare JSON values: true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _shown(value: object) -> str:
    """Return the beginning of a value, in a time that does not depend on its size."""
    return _shortened(_SHORT.repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
