"""Chat completions and decisions: the shape of requests and replies, and streams of events."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.types import Send

from conformal_arbitrage.errors import ArbitrageError, RequestError
from conformal_arbitrage.gateway.decider import Outcome
from conformal_arbitrage.gateway.http import error_reply
from conformal_arbitrage.gateway.policies import LivePolicy
from conformal_arbitrage.live.config import KEY_LABEL, GatewayConfig
from conformal_arbitrage.models.completions import PASSED_ON, SETTINGS, checked_settings
from conformal_arbitrage.models.endpoint import usage_of
from conformal_arbitrage.store.claims import SavedResponse
from conformal_arbitrage.store.record import JSONObject
from conformal_arbitrage.types import (
    JSON,
    Chunk,
    Decision,
    Leg,
    Messages,
    Query,
    Spent,
    as_list,
    as_object,
    content_text,
    is_list,
    is_object,
)

# --- Input items of the Responses and Decisions APIs as chat messages ---


_TEXTS = ("text", "input_text", "output_text", "summary_text")


def item_message(item: Mapping[str, Any], param: str = "input") -> dict[str, Any]:
    """Return an input item as a message: a tool call is one of the assistant's, and its output one of the tool's.

    Raises:
        RequestError: the item is of a type that no chat model takes.
    """
    kind = str(item.get("type", "message"))
    if kind in ("function_call", "custom_tool_call"):
        return {"role": "assistant", "content": None, "tool_calls": [_call(item)]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item_content(item.get("output"), param)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind != "message":
        raise _unsupported(kind, param)
    return {"role": item.get("role", "user"), "content": item_content(item.get("content"), param)}


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    id = item.get("call_id") or item.get("id")
    if item.get("type") == "custom_tool_call":
        return {"id": id, "type": "custom", "custom": {"name": item.get("name"), "input": item.get("input")}}
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": id, "type": "function", "function": function}


def item_content(content: JSON, param: str = "input") -> JSON:
    """Return the content of an item as a message has it: text, or a list of parts of text and pictures."""
    if not is_list(content):
        return content
    return [_part(part, param) for part in content]


def _part(part: object, param: str) -> dict[str, Any]:
    fields = as_object(part)
    kind, text = str(fields.get("type", "text")), fields.get("text")
    if isinstance(text, str) and kind in _TEXTS:
        return {"type": "text", "text": text}
    if kind == "refusal" and isinstance(fields.get("refusal"), str):
        return {"type": "text", "text": fields["refusal"]}
    if kind == "image_url" and is_object(fields.get("image_url")):
        return fields
    if kind == "input_image" and isinstance(fields.get("image_url"), str):
        detail = {"detail": fields["detail"]} if fields.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": fields["image_url"], **detail}}
    if kind == "input_json" and "data" in fields:
        return {"type": "text", "text": json.dumps(fields["data"], ensure_ascii=False)}
    raise _unsupported(kind if is_object(part) else type(part).__name__, param)


def merged_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which the calls of one turn are one message, as chat models take them."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        if message.get("tool_calls") and merged and merged[-1]["role"] == "assistant":
            calls = [*as_list(merged[-1].get("tool_calls")), *message["tool_calls"]]
            merged[-1] = {**merged[-1], "tool_calls": calls}
        else:
            merged.append(message)
    return merged


def _unsupported(kind: str, param: str) -> RequestError:
    return RequestError(
        f"{param} contains an item or part of type {kind!r:.60}, which cannot be passed on; leave it out",
        status=422,
        param=param,
        code="unsupported_content",
    )


# --- Read requests ---


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


_SEVERAL = Meta(
    extra_json_schema={"minItems": FEWEST_CHOICES, "maxItems": 255}
)  # only says so: `check_actions` refuses


class OfferedValue(Struct, forbid_unknown_fields=True):
    """What a choice may be."""

    value: Annotated[str, Meta(extra_json_schema={"minLength": 1})] | bool
    description: str | None = None


class Level(Struct, forbid_unknown_fields=True):
    """A level of a rating."""

    label: Annotated[str, Meta(extra_json_schema={"minLength": 1})]
    description: str | None = None


class _Question(Struct, forbid_unknown_fields=True, tag_field="type"):
    instructions: str | list[JSONObject] = ""
    name: str | None = None


class Predicate(_Question, tag="predicate"):
    """A yes-or-no question."""


class Choice(_Question, tag="choice", kw_only=True):
    """A choice among values."""

    choices: Annotated[list[OfferedValue], _SEVERAL]


class Score(_Question, tag="score", kw_only=True):
    """A rating on ordered levels."""

    levels: Annotated[list[Level], _SEVERAL]


Question = Predicate | Choice | Score


class DecisionsRequest(Struct, forbid_unknown_fields=True):
    """A request to /v1/decisions, as in OpenAI's Decisions API."""

    model: str
    input: str | list[JSONObject]
    questions: Annotated[list[Question], Meta(extra_json_schema={"minItems": 1})]
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
            status=422, param="questions", code="too_many_questions" if request.questions else "no_questions",
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


def _session(ours: Mapping[str, Any]) -> str | None:
    """Return the name of the conversation that a request belongs to."""
    name: JSON = ours.get("session")
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
    ours = body.get("arbitrage")
    if ours is not None and ("actions" in ours or "session" not in ours):
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
    properties = {
        name: _resolved(as_object(field), schema) for name, field in as_object(schema.get("properties")).items()
    }
    options = {name: values for name, field in properties.items() if (values := _values(field))}
    others = {name: field for name, field in properties.items() if name not in options}
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


# --- Decisions in the shapes callers expect ---


_PIECE = 400
_STREAMED_APART = ("role", "content", "tool_calls")
EVENT_STREAM = {"content-type": "text/event-stream"}


def decisions_reply(policy: LivePolicy, questions: Sequence[Question], outcomes: Sequence[Outcome]) -> SavedResponse:
    """Return the reply to a request to /v1/decisions."""
    answers = [
        _answer(question, outcome.decision, arbitrage_object(policy, outcome))
        for question, outcome in zip(questions, outcomes, strict=True)
    ]
    legs = [leg for outcome in outcomes for leg in outcome.decision.legs]
    body = {"model": policy.name, "answers": answers, "usage": input_output_usage(legs)}
    headers = reply_headers(policy, outcomes[0]) if len(outcomes) == 1 else {}
    return json_reply(body, headers)


class LiveEvents(Protocol):
    """Renders an answer while it is being written."""

    def first(self, outcome: Outcome, deltas: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the events that open the answer, and those for what has been said already."""
        ...

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """Return the events that continue the answer."""
        ...

    def last(self, outcome: Outcome) -> tuple[str, bytes]:
        """Return the finish reason, and the events that end the answer."""
        ...


class ReplyShape(Protocol):
    """How one API shows a decision."""

    def whole(self, policy: LivePolicy, outcome: Outcome, menu: Menu | None) -> SavedResponse:
        """Return the reply to a request that does not stream."""
        ...

    def live(self, policy: LivePolicy, outcome: Outcome, menu: Menu | None = None) -> LiveEvents:
        """Return what renders an answer while it is being written, or a choice from a menu as if it were."""
        ...


def streamed_reply(shape: ReplyShape, policy: LivePolicy, outcome: Outcome, menu: Menu | None) -> SavedResponse:
    """Return the whole reply to a request that streams, for a decision that is made already."""
    message, _ = message_of_decision(outcome.decision, menu)
    events = shape.live(policy, outcome, menu)
    body = events.first(outcome, deltas_of(message)) + events.last(outcome)[1]
    return SavedResponse(status=200, headers={**reply_headers(policy, outcome), **EVENT_STREAM}, body=body)


class ChatShape(Struct, frozen=True):
    """Replies to a chat request."""

    include_usage: bool

    def whole(self, policy: LivePolicy, outcome: Outcome, menu: Menu | None) -> SavedResponse:
        """See `ReplyShape`."""
        return json_reply(completion(policy, outcome, menu), reply_headers(policy, outcome))

    def live(self, policy: LivePolicy, outcome: Outcome, menu: Menu | None = None) -> LiveEvents:
        """See `ReplyShape`."""
        return Chunks(policy, outcome, include_usage=self.include_usage, menu=menu)


def json_reply(document: Mapping[str, Any], headers: Mapping[str, str]) -> SavedResponse:
    """Return a reply that is one JSON document."""
    body = msgspec.json.encode(document)
    return SavedResponse(status=200, headers={**headers, "content-type": "application/json"}, body=body)


def arbitrage_object(policy: LivePolicy, outcome: Outcome, menu: Menu | None = None) -> dict[str, Any]:
    """Return what callers see of a decision; under expose = "full" also what an attacker could use."""
    decision, full = outcome.decision, policy.settings.expose == "full"
    shown: dict[str, Any] = {
        "id": decision.id,
        "decided_by": decision.decided_by,
        "alpha": policy.alpha,
        "guarantee": policy.guarantee if decision.no_guarantee is None else "none",
        "candidates": list(decision.candidates),
        "legs": [_leg(leg, full=full) for leg in decision.legs],
    }
    if decision.no_guarantee is not None:
        shown["reason"] = decision.no_guarantee
    if outcome.session is not None:
        shown |= {"session": outcome.session, "held": outcome.held is not None}
    if menu is not None and menu.ignored:
        shown["ignored"] = menu.ignored
    if full:
        margin = None if decision.margin == float("inf") else decision.margin
        shown |= {"margin": margin, "relaxation": decision.relaxation}
    return shown


def _leg(leg: Leg, *, full: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "role": leg.role,
        "model": leg.served,
        "usage": _usage([leg]),
        "cost": leg.spent.cost,
        "latency": round(leg.seconds, 4),
        "failed": leg.error is not None,
    }
    return {**shown, "scores": leg.scores} if full else shown


class _Tokens(NamedTuple):
    """The tokens of all legs, as far as they are known."""

    into: int
    out: int
    cached: int
    reasoning: int


def _tokens(legs: Sequence[Leg]) -> _Tokens:
    """Add up the tokens of all legs: a call that broke off hides nothing of the others."""
    into = out = cached = reasoning = 0  # plain sums, since every reply has them
    for leg in legs:
        spent = leg.spent
        if spent.input_tokens is None or spent.output_tokens is None:  # one of its attempts reported none
            spent = Spent() if leg.reply is None else usage_of(leg.reply)
        into += spent.input_tokens or 0
        out += spent.output_tokens or 0
        cached += spent.cached_tokens
        reasoning += spent.reasoning_tokens
    return _Tokens(into, out, cached, reasoning)


def _usage(legs: Sequence[Leg]) -> dict[str, int]:
    """Return tokens under chat completions' names; unknown counts are 0, since the shape has no other way."""
    tokens = _tokens(legs)
    total = tokens.into + tokens.out
    return {"prompt_tokens": tokens.into, "completion_tokens": tokens.out, "total_tokens": total}


def input_output_usage(legs: Sequence[Leg]) -> dict[str, Any]:
    """Return tokens under the names of the Decisions and Responses APIs."""
    tokens = _tokens(legs)
    return {
        "input_tokens": tokens.into,
        "input_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": 0},
        "output_tokens": tokens.out,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
        "total_tokens": tokens.into + tokens.out,
    }


def reply_headers(policy: LivePolicy, outcome: Outcome) -> dict[str, str]:
    """Return the reply's own headers."""
    cost = outcome.decision.spent.cost
    return {
        "x-arbitrage-decision-id": str(outcome.decision.id),
        "x-arbitrage-decided-by": outcome.decision.decided_by,
        "x-arbitrage-alpha": "none" if policy.alpha is None else f"{policy.alpha:g}",
        "x-arbitrage-cost": "unknown" if cost is None else f"{cost:.9g}",
    }


def _answer(question: Question, decision: Decision, arbitrage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decision in the shape of the Decisions API."""
    chosen = decision.action or 0
    shares = probabilities(decision, _size(question))
    common: dict[str, Any] = {"name": question.name, "arbitrage": arbitrage}
    if isinstance(question, Predicate):
        return {"type": "predicate", "probability": shares[0], **common}
    if isinstance(question, Score):
        levels = [
            {"label": level.label, "probability": share, "value": value}
            for value, (level, share) in enumerate(zip(question.levels, shares, strict=True))
        ]
        score = sum(value * share for value, share in enumerate(shares))
        return {"type": "score", "score": score, "confidence": shares[chosen], "probabilities": levels, **common}
    values = [{"value": c.value, "probability": p} for c, p in zip(question.choices, shares, strict=True)]
    choice = question.choices[chosen].value
    return {"type": "choice", "choice": choice, "confidence": shares[chosen], "probabilities": values, **common}


def _size(question: Question) -> int:
    if isinstance(question, Predicate):
        return 2
    return len(question.choices) if isinstance(question, Choice) else len(question.levels)


def probabilities(decision: Decision, size: int) -> list[float]:
    """Return the normalised scores of whoever decided.

    All weight is on the chosen action if there are no usable scores, or if another action leads in them.
    """
    chosen = decision.action or 0
    leg = next((leg for leg in reversed(decision.legs) if leg.role == decision.decided_by), None)
    scores = None if leg is None else leg.scores
    shown = list(decision.candidates) if scores is not None and len(scores) < size else list(range(size))
    usable = scores is not None and len(shown) == len(scores) and min(scores) >= 0 and sum(scores) > 0
    if scores is None or not usable:
        return [float(k == chosen) for k in range(size)]
    shares = [0.0] * size
    for place, score in zip(shown, scores, strict=True):
        shares[place] = score / sum(scores)
    return shares if max(shares) == shares[chosen] else [float(k == chosen) for k in range(size)]


def completion(policy: LivePolicy, outcome: Outcome, menu: Menu | None) -> dict[str, Any]:
    """Return a decision as an ordinary chat completion."""
    decision = outcome.decision
    message, finish = message_of_decision(decision, menu)
    return {
        "id": f"chatcmpl-{decision.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": policy.name,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": _usage(decision.legs),
        "arbitrage": arbitrage_object(policy, outcome, menu),
    }


def message_of_decision(decision: Decision, menu: Menu | None) -> tuple[dict[str, Any], str]:
    """Return the assistant's message and its finish reason."""
    if menu is not None:
        content = str(decision.answer)
        if menu.field is not None:
            content = json.dumps(menu.document(decision.action or 0), ensure_ascii=False)
        if menu.tool is not None:
            function = {"name": menu.tool, "arguments": content}
            calls = [{"id": f"call_{decision.id}", "type": "function", "function": function}]
            return {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}, "tool_calls"
        return {"role": "assistant", "content": content, "refusal": None}, "stop"
    answer = decision.answer if isinstance(decision.answer, Mapping) else {"content": str(decision.answer)}
    message = {"role": "assistant", "content": None, "refusal": None, **answer}
    reply: Any = next((leg.reply for leg in reversed(decision.legs) if leg.role == decision.decided_by), None)
    finish = None if reply is None else reply["choices"][0].get("finish_reason")
    return message, finish if isinstance(finish, str) else "tool_calls" if message.get("tool_calls") else "stop"


class Chunks:
    """The server-sent events of one completion; the first and the last chunk carry `arbitrage`, [DONE] comes last.

    Args:
        include_usage: whether a chunk with the token counts comes before the end.
    """

    def __init__(self, policy: LivePolicy, outcome: Outcome, *, include_usage: bool, menu: Menu | None) -> None:
        self._policy = policy
        self._menu = menu
        self._include_usage = include_usage
        self._base = {
            "id": f"chatcmpl-{outcome.decision.id}",
            "created": int(time.time()),
            "model": policy.name,
            "object": "chat.completion.chunk",
        }

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        no_usage = {"usage": None} if self._include_usage else {}
        return event_bytes({**self._base, "choices": [choice], **no_usage, **more})

    def first(self, outcome: Outcome, deltas: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the chunk that opens the answer, and those for what has been said already."""
        arbitrage = arbitrage_object(self._policy, outcome, self._menu)
        opening = self._chunk({"role": "assistant", "content": ""}, arbitrage=arbitrage)
        return b"".join([opening, *[self._chunk(delta) for delta in deltas if delta]])

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """Return a chunk that continues the answer."""
        return self._chunk(delta)

    def last(self, outcome: Outcome) -> tuple[str, bytes]:
        """Return the finish reason, and the chunks that end the answer."""
        finish = message_of_decision(outcome.decision, self._menu)[1]
        arbitrage = arbitrage_object(self._policy, outcome, self._menu)
        pieces = [self._chunk({}, finish, arbitrage=arbitrage)]
        if self._include_usage:
            usage = _usage(outcome.decision.legs)
            pieces.append(event_bytes({**self._base, "choices": [], "usage": usage, "arbitrage": arbitrage}))
        return finish, b"".join([*pieces, b"data: [DONE]\n\n"])


def deltas_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a finished message as what its chunks would have added."""
    rest = {name: value for name, value in message.items() if name not in _STREAMED_APART and value is not None}
    content = message.get("content") or ""
    texts = [{"content": content[start : start + _PIECE]} for start in range(0, len(content), _PIECE)]
    calls: Sequence[Chunk] = message.get("tool_calls") or ()
    return [rest, *texts, *[{"tool_calls": [{"index": place, **call}]} for place, call in enumerate(calls)]]


def event_bytes(document: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


# --- EventStream ---


SILENCE = 10.0
"""Seconds without a word after which a comment keeps a connection open."""
_IN_A_ROW = 16
_WAITING = b": waiting for the decision\n\n"


@asynccontextmanager
async def event_stream(send: Send, policy: str, *, hold_headers: bool = False) -> AsyncGenerator["EventStream"]:
    """Send a response as a stream of events.

    The headers wait for the first piece for `SILENCE` seconds; then, and in every later silence of that length, a comment
    is sent. An error that ends the block after the response has started becomes an error event without [DONE]; before
    that it is raised.

    Args:
        send: where to.
        hold_headers: send no comment before the first piece, so that an error can still have a status of its own.
    """
    events = EventStream(send)
    comments = asyncio.create_task(events.comment(after_start=hold_headers))
    try:
        yield events
    except ArbitrageError as error:
        if not events.started:
            raise
        await events.put(event_bytes(error_reply(error, policy).document))
    finally:
        comments.cancel()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream:
    """One response, sent piece by piece. Sending waits for a slow caller, so nothing piles up.

    Attributes:
        status_code: 200, since an error before the first piece is raised.
        started: whether the headers have been sent.
        headers: those that were sent, or will be.
    """

    status_code = 200

    def __init__(self, send: Send) -> None:
        self.started = False
        self.headers: Mapping[str, str] = EVENT_STREAM
        self._send = send
        self._pieces = 0
        self._turn = asyncio.Lock()
        self._last = asyncio.get_running_loop().time()

    async def put(self, piece: bytes) -> None:
        """Send a piece, and the headers before the first."""
        async with self._turn:
            await self._start()
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            self._last = asyncio.get_running_loop().time()
        self._pieces += 1
        if not self._pieces % _IN_A_ROW:
            await asyncio.sleep(0)  # a model that is faster than its caller must not starve the others

    async def _start(self) -> None:
        if not self.started:
            self.started = True
            headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def replay(self, saved: SavedResponse) -> None:
        """Send a response that was given before."""
        self.headers = {**saved.headers, "x-arbitrage-replayed": "true"}
        for piece in pieces_of(saved):
            await self.put(piece)

    async def comment(self, *, after_start: bool) -> None:
        """Send comments in silences, perhaps only once something was sent, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._last + SILENCE - clock()) or (SILENCE if after_start else 0.0))
            if clock() >= self._last + SILENCE and (self.started or not after_start):
                await self.put(_WAITING)


def pieces_of(saved: SavedResponse) -> list[bytes]:
    """Split a finished stream into its events."""
    return [event + b"\n\n" for event in saved.body.split(b"\n\n") if event]
