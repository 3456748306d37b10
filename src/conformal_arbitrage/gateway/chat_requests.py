"""Read requests: bytes in, checked requests out; every mistake is a RequestError that names the field.

Knows nothing of policies or models.
"""

import json
from collections.abc import Mapping, Set
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.input_items import item_content, item_message
from conformal_arbitrage.live.config import KEY_LABEL, GatewayConfig
from conformal_arbitrage.scorers.request_fields import PASSED_ON, SETTINGS, checked_settings
from conformal_arbitrage.store.record import JSONObject
from conformal_arbitrage.types import JSON, Messages, Query, as_list, as_object, content_text

_OWN = frozenset({"model", "n", "stream", "stream_options", "arbitrage", "logprobs", "top_logprobs"})
_KNOWN = PASSED_ON | _OWN
_REFUSED = {
    "audio": "answers are text or tool calls",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "modalities": 'answers are text; leave it out, or send ["text"]',
    "moderation": "it can withhold an answer, so no certificate covers it",
    "prediction": "no certificate covers it",
    "web_search_options": "what a search finds changes from day to day, so no certificate covers it",
}
_DEFAULTS = {"modalities": ["text"]}
_PLAIN_MENU = frozenset({"messages"})
_OF_MENUS = frozenset({"messages", "parallel_tool_calls", "response_format", "tool_choice", "tools"})
_TYPES: Mapping[str, tuple[type, str]] = {
    "stream": (bool, "true or false"),
    "stream_options": (dict, "an object"),
    "arbitrage": (dict, "an object"),
    "response_format": (dict, "an object"),
    "tools": (list, "a list"),
}
FEWEST_CHOICES = 2
_LONGEST_NAME = 255
LONGEST_GROUP = 512
"""The longest name of a group; a request with a longer one names none, and is deferred."""
_Shape = TypeVar("_Shape")


class _Described(Struct, forbid_unknown_fields=True):
    value: str | bool
    description: str | None = None


class _Level(Struct, forbid_unknown_fields=True):
    label: str
    description: str | None = None


class _Question(Struct, forbid_unknown_fields=True, tag_field="type"):
    instructions: str | list[JSONObject] = ""
    name: str | None = None


class Predicate(_Question, tag="predicate"):
    """A yes-or-no question."""


class Choice(_Question, tag="choice", kw_only=True):
    """A choice among values."""

    choices: list[_Described]


class Score(_Question, tag="score", kw_only=True):
    """A rating on ordered levels."""

    levels: list[_Level]


Question = Predicate | Choice | Score


class DecisionsRequest(Struct, forbid_unknown_fields=True):
    """A request to /v1/decisions, as in OpenAI's Decisions API."""

    model: str
    input: str | list[JSONObject]
    questions: list[Question]
    prompt_cache_key: str | None = None
    prompt_cache_options: JSONObject | None = None
    safety_identifier: str | None = None
    metadata: JSONObject | None = None

    def group_at(self, source: str, label: str) -> str | None:
        """Return the group of the request, whose API key has this label; see `CompletionRequest.group_at`."""
        return _group_at(self.metadata, source, label)


class Menu(Struct, frozen=True, kw_only=True):
    """A choice from a menu inside a chat request.

    Attributes:
        actions: the texts a model chooses from.
        field: the property that holds the choice in a JSON answer; None for plain text.
        values: the property's possible values, in the order of the actions.
        rest: the other properties of the answer, which stay empty, in the schema's order around the choice.
        tool: the function that is called with the answer; None if the answer is a message.
        ignored: the request's fields that have no effect, such as temperature.
    """

    actions: tuple[str, ...]
    field: str | None = None
    values: tuple[JSON, ...] = ()
    rest: tuple[tuple[str, JSON], ...] = ()
    tool: str | None = None
    ignored: tuple[str, ...] = ()

    def document(self, action: int) -> dict[str, JSON]:
        """Return the JSON answer for a choice."""
        answer: dict[str, JSON] = dict(self.rest)
        answer[str(self.field)] = self.values[action]
        return answer


class CompletionRequest(Struct, frozen=True, kw_only=True):
    """A checked chat request.

    Attributes:
        model: the policy's name or an alias.
        body: what is forwarded to the models unchanged.
        messages: the conversation, also part of the body.
        menu: the options, if it is a choice from a menu.
        session: the caller's name for the conversation, if it has one.
        label: of the caller's API key, where groups are taken from it.
    """

    model: str
    body: JSONObject
    messages: Messages
    menu: Menu | None
    stream: bool
    include_usage: bool
    session: str | None = None
    label: str = ""

    def group_at(self, source: str) -> str | None:
        """Return the group of the request: what it names at "metadata.NAME", or the label of its key.

        None if there is none, or if it has more than `LONGEST_GROUP` characters.
        """
        return _group_at(self.body.get("metadata"), source, self.label)


def _group_at(metadata: object, source: str, label: str) -> str | None:
    name: object = label if source == KEY_LABEL else as_object(metadata).get(source.removeprefix("metadata."))
    return name if isinstance(name, str) and 0 < len(name) <= LONGEST_GROUP else None


def decoded(data: bytes, limits: GatewayConfig) -> JSON:
    """Decode a JSON document of limited depth."""
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON ({error})", code="invalid_json") from error
    if data.count(b"[") + data.count(b"{") > limits.max_depth and _depth_passes(document, limits.max_depth):
        raise RequestError(f"the body is nested deeper than {limits.max_depth}", status=422, code="too_deep")
    return document


def _depth_passes(document: JSON, limit: int) -> bool:
    level: list[JSON] = [document]
    for _ in range(limit + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: JSON) -> list[JSON]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def read_decisions(data: bytes, limits: GatewayConfig) -> DecisionsRequest:
    """Read a request to /v1/decisions."""
    request = converted(decoded(data, limits), DecisionsRequest)
    if not 1 <= len(request.questions) <= limits.max_questions:
        raise RequestError(
            f"{len(request.questions)} questions; a request may have 1 to {limits.max_questions}",
            status=422, param="questions", code="too_many_questions",
        )  # fmt: skip
    if not isinstance(request.input, str) and not all(
        isinstance(m.get("role", m.get("type")), str) for m in request.input
    ):
        raise RequestError("input must be a text or a list of messages", param="input")
    for question in request.questions:
        check_actions(actions_of(question), limits)
    return request


def actions_of(question: Question) -> tuple[str, ...]:
    """Return the texts a model chooses from."""
    if isinstance(question, Predicate):
        return ("true", "false")
    if isinstance(question, Score):
        return tuple(_described(level.label, level.description) for level in question.levels)
    return tuple(_described(_word(choice.value), choice.description) for choice in question.choices)


def _described(value: str, description: str | None) -> str:
    return value if not description else f"{value}: {description}"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def query_of(request: DecisionsRequest, question: Question, id: str, group: str | None = None) -> Query:
    """Return one question of a request as a query: its instructions, if any, are a system message before the input."""
    instructions: JSON = question.instructions if isinstance(question.instructions, str) else _parts(question)
    criterion: Messages = [{"role": "system", "content": instructions}] if instructions else []
    conversation: Messages = (
        [{"role": "user", "content": request.input}]
        if isinstance(request.input, str)
        else [item_message(item) for item in request.input]
    )
    ordered = isinstance(question, Score)
    return Query([*criterion, *conversation], actions_of(question), id=id, group=group, ordered=ordered)


def _parts(question: Question) -> JSON:
    """Return instructions in parts as one text, unless there are pictures among them."""
    parts = as_list(item_content(list(question.instructions), "instructions"))
    pictured = any("text" not in as_object(part) for part in parts)
    return list(parts) if pictured else content_text(list(parts))


def read_completion(data: bytes, limits: GatewayConfig) -> CompletionRequest:
    """Read a request to /v1/chat/completions."""
    body = decoded(data, limits)
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return checked_completion(body, limits)


def checked_completion(body: dict[str, Any], limits: GatewayConfig) -> CompletionRequest:
    """Check a chat request, wherever it was read from."""
    unknown = body.keys() - _KNOWN
    if unknown:
        body = _without_defaults(body, unknown)
    messages = _checked_messages(body)
    passed_on = {name: value for name, value in body.items() if name in PASSED_ON and value is not None}
    if not SETTINGS.keys().isdisjoint(passed_on):
        passed_on |= _settings(passed_on)
    menu = _menu(body, limits)
    if menu is not None and not passed_on.keys() <= _PLAIN_MENU:
        menu = replace(menu, ignored=_ignored(menu, passed_on))
    options: JSON = body.get("stream_options")
    return CompletionRequest(
        model=body["model"],
        body=passed_on,
        messages=messages,
        menu=menu,
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        session=None if body.get("arbitrage") is None else _session(body["arbitrage"]),
    )


def _session(own: Mapping[str, Any]) -> str | None:
    """Return the name of the conversation that a request belongs to."""
    name: JSON = own.get("session")
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and name.isprintable()):
        raise RequestError(
            f"arbitrage.session must have 1 to {_LONGEST_NAME} printable characters", param="arbitrage.session"
        )
    return name


def _without_defaults(body: dict[str, Any], unknown: Set[str]) -> dict[str, Any]:
    """Return a request without fields that are not passed on and only state the default; refuse any other."""
    stated = {name for name in unknown & _REFUSED.keys() if body[name] is None or body[name] == _DEFAULTS.get(name)}
    refused = sorted(unknown - stated)
    if not refused:
        return {name: value for name, value in body.items() if name not in stated}
    name = refused[0]
    if name in _REFUSED:
        raise RequestError(
            f"{name} is not passed on: {_REFUSED[name]}", status=422, param=name, code="unsupported_field"
        )
    raise RequestError(f"{name!r:.80} is not a field of a chat request", param=name[:80], code="unknown_field")


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a request, checked."""
    try:
        return checked_settings(body)
    except ValueError as error:
        raise RequestError(str(error), param=str(error).partition(" ")[0], code="invalid_setting") from error


def _ignored(menu: Menu, body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that have no effect on a choice from a menu, and the properties of its answer that stay empty."""
    empty = [
        f"{'response_format' if menu.tool is None else 'tools'}.{name}" for name, _ in menu.rest if name != menu.field
    ]
    return tuple(sorted([*(body.keys() - _OF_MENUS), *empty]))


def _has_role(message: JSON) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _checked_messages(body: Mapping[str, Any]) -> Messages:
    """Check the fields of a chat request; return its messages."""
    listed: JSON = body.get("messages")
    messages = listed if isinstance(listed, list) else []
    if not messages or not all(map(_has_role, messages)):
        raise RequestError("messages must be a list of objects with a role", param="messages")
    if not isinstance(body.get("model"), str):
        raise RequestError("model must name a policy; GET /v1/models lists them", param="model")
    if body.get("n") not in (None, 1):
        raise RequestError("n must be 1: a decision has one answer", param="n")
    if body.get("logprobs") or body.get("top_logprobs"):
        raise RequestError("logprobs are not returned; they serve as the confidence", param="logprobs")
    for name, (kind, description) in _TYPES.items():
        if body.get(name) is not None and not isinstance(body[name], kind):
            raise RequestError(f"{name} must be {description}", param=name)
    return messages


def _menu(body: Mapping[str, Any], limits: GatewayConfig) -> Menu | None:
    tools = bool(body.get("tools"))
    own = body.get("arbitrage")
    if own is not None and ("actions" in own or "session" not in own):
        if tools:
            raise RequestError("tools and arbitrage.actions do not go together", status=422, param="tools")
        actions = _texts(body["arbitrage"].get("actions"), "arbitrage.actions")
        return Menu(actions=check_actions(actions, limits))
    if tools:
        return _tool_menu(body, limits)
    if body.get("response_format") is None:
        return None
    return _schema_menu(as_object(as_object(body["response_format"].get("json_schema")).get("schema")), limits)


def _tool_menu(body: Mapping[str, Any], limits: GatewayConfig) -> Menu | None:
    """Return the menu of a single tool that must be called, if its parameters are one."""
    tools, choice = as_list(body.get("tools")), body.get("tool_choice")
    function = as_object(as_object(tools[0]).get("function"))
    name = function.get("name")
    forced = choice == "required" or as_object(as_object(choice).get("function")).get("name") == name
    if len(tools) != 1 or not forced or not isinstance(name, str) or body.get("response_format") is not None:
        return None
    menu = _schema_menu(as_object(function.get("parameters")), limits)
    return None if menu is None else replace(menu, tool=name)


def _schema_menu(schema: Mapping[str, Any], limits: GatewayConfig) -> Menu | None:
    """Return the menu of a schema: one property is an enum or a boolean, and any others are free text.

    The others, such as `reasoning`, stay empty: a decision is a choice. None for any other schema.
    """
    if schema.get("type") != "object":
        return None
    properties = {name: _resolved(as_object(one), schema) for name, one in as_object(schema.get("properties")).items()}
    options = {name: values for name, one in properties.items() if (values := _values(one))}
    others = {name: one for name, one in properties.items() if name not in options}
    if len(options) != 1 or not all(map(_may_be_empty, others.values())):
        return None
    [(field, values)] = options.items()
    required = as_list(schema.get("required"))
    rest = tuple((name, "" if name in others else None) for name in properties if name == field or name in required)
    return Menu(actions=check_actions(tuple(map(_word, values)), limits), field=field, values=values, rest=rest)


def _values(schema: Mapping[str, Any]) -> tuple[JSON, ...]:
    """Return the values of an enum of plain values, or of a boolean; none for any other schema."""
    options: JSON = [True, False] if schema.get("type") == "boolean" else schema.get("enum")
    listed: tuple[JSON, ...] = tuple(options) if isinstance(options, list) else ()
    return () if any(isinstance(option, list | dict) for option in listed) else listed


def _may_be_empty(schema: Mapping[str, Any]) -> bool:
    """Return whether a property is a text without further conditions."""
    return schema.get("type") == "string" and schema.keys().isdisjoint(("const", "format", "minLength", "pattern"))


def _resolved(inner: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a property's schema, following a reference to the definitions beside it."""
    whole = as_list(inner.get("allOf"))
    inner = as_object(whole[0]) if len(whole) == 1 else inner
    name = str(inner.get("$ref", "")).removeprefix("#/$defs/")
    return as_object(as_object(schema.get("$defs")).get(name)) if "$ref" in inner else inner


def _texts(value: JSON, param: str) -> tuple[str, ...]:
    texts = tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()
    if not isinstance(value, list) or not value or len(texts) < len(value):
        raise RequestError(f"{param} must be a list of texts", param=param)
    return texts


def check_actions(actions: tuple[str, ...], limits: GatewayConfig) -> tuple[str, ...]:
    """Check that actions are distinct, not empty, and neither too many nor too long."""
    if not FEWEST_CHOICES <= len(actions) <= limits.max_actions:
        raise RequestError(
            f"{len(actions)} actions; a menu has {FEWEST_CHOICES} to {limits.max_actions}",
            status=422, code="number_of_actions",
        )  # fmt: skip
    if len(set(actions)) < len(actions) or not all(actions):
        raise RequestError("actions must be distinct and not empty", status=422, code="duplicate_actions")
    if max(map(len, actions)) > limits.max_action_length:
        raise RequestError(
            f"an action is longer than {limits.max_action_length} characters", status=422, code="long_action"
        )
    return actions


def converted(document: JSON, kind: type[_Shape]) -> _Shape:
    """Convert a document to a known shape."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        raise RequestError(f"{what} at {param or 'the body'}", param=param) from error
