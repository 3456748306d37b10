"""What callers may send: bytes to checked requests, every mistake a RequestError with the field at fault.

Knows nothing of policies or models.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import Struct

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.types import Query, content_text, transcript

FORWARDED = frozenset({
    "messages", "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "max_completion_tokens",
    "max_tokens", "metadata", "modalities", "parallel_tool_calls", "prediction", "presence_penalty",
    "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "response_format", "safety_identifier", "seed",
    "service_tier", "stop", "store", "temperature", "tool_choice", "tools", "top_p", "user", "verbosity",
    "web_search_options",
})  # fmt: skip
_OWN = frozenset({"model", "n", "stream", "stream_options", "arbitrage", "logprobs", "top_logprobs"})
_KNOWN = FORWARDED | _OWN
FEWEST_CHOICES = 2


class _Described(Struct, forbid_unknown_fields=True):
    value: str | bool
    description: str | None = None


class _Level(Struct, forbid_unknown_fields=True):
    label: str
    description: str | None = None


class _Question(Struct, forbid_unknown_fields=True, tag_field="type"):
    instructions: str | list[dict[str, Any]]
    name: str | None = None


class Predicate(_Question, tag="predicate"):
    """Is it true?"""


class Choice(_Question, tag="choice", kw_only=True):
    """Which of these?"""

    choices: list[_Described]


class Score(_Question, tag="score", kw_only=True):
    """How much, on ordered levels?"""

    levels: list[_Level]


Question = Predicate | Choice | Score


class DecisionsRequest(Struct, forbid_unknown_fields=True):
    """A request to /v1/decisions, in the shape of OpenAI's Decisions API."""

    model: str
    input: str | list[dict[str, Any]]
    questions: list[Question]
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


class Menu(Struct, frozen=True, kw_only=True):
    """A choice from a menu inside a chat request.

    Attributes:
        actions: the texts a model chooses from.
        field: the property of a JSON answer, None for plain text.
        values: what the property may be, in the actions' order.
    """

    actions: tuple[str, ...]
    field: str | None = None
    values: tuple[Any, ...] = ()


class CompletionRequest(Struct, frozen=True, kw_only=True):
    """A checked chat request.

    Attributes:
        model: the policy's name or an alias.
        body: what goes to the models as it is.
        menu: the options, if it is a choice from a menu.
    """

    model: str
    body: Mapping[str, Any]
    menu: Menu | None
    stream: bool
    include_usage: bool


def decoded(data: bytes, limits: GatewayConfig) -> Any:
    """A JSON document within its depth."""
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON ({error})", code="invalid_json") from error
    if data.count(b"[") + data.count(b"{") > limits.max_depth and _depth_passes(document, limits.max_depth):
        raise RequestError(f"the body is nested deeper than {limits.max_depth}", status=422, code="too_deep")
    return document


def _depth_passes(document: Any, limit: int) -> bool:
    level: list[Any] = [document]
    for _ in range(limit + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []


def read_decisions(data: bytes, limits: GatewayConfig) -> DecisionsRequest:
    """A decisions request and its limits."""
    request = converted(decoded(data, limits), DecisionsRequest)
    if not 1 <= len(request.questions) <= limits.max_questions:
        raise RequestError(
            f"{len(request.questions)} questions; 1 to {limits.max_questions} are answered at once",
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
    """The texts a model chooses from."""
    if isinstance(question, Predicate):
        return ("true", "false")
    if isinstance(question, Score):
        return tuple(_described(level.label, level.description) for level in question.levels)
    return tuple(_described(_word(choice.value), choice.description) for choice in question.choices)


def _described(value: str, description: str | None) -> str:
    return value if not description else f"{value}: {description}"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def query_of(request: DecisionsRequest, question: Question, id: str) -> Query:
    """One question as a query."""
    asked = question.instructions if isinstance(question.instructions, str) else content_text(question.instructions)
    context = request.input if isinstance(request.input, str) else transcript([_spoken(m) for m in request.input])
    return Query(f"{asked}\n\n{context}", actions_of(question), id=id)


def _spoken(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as it is; a call of a tool and its output as messages."""
    kind = str(item.get("type"))
    if kind.endswith("_call_output"):
        return {"role": "tool", "content": item.get("output")}
    if kind.endswith("_call"):
        return {"role": "assistant", "content": f"{item.get('name')}({item.get('arguments', item.get('input'))})"}
    return item


def read_completion(data: bytes, limits: GatewayConfig) -> CompletionRequest:
    """A chat request and its limits."""
    document = decoded(data, limits)
    if not isinstance(document, dict):
        raise RequestError("the body must be a JSON object")
    body = cast("dict[str, Any]", document)
    unknown = body.keys() - _KNOWN
    if unknown:
        name = min(unknown)
        raise RequestError(f"{name!r:.80} is not a field of a chat request", param=name[:80], code="unknown_field")
    _check_completion(body)
    menu = _menu(body, limits)
    return CompletionRequest(
        model=body["model"],
        body={name: value for name, value in body.items() if name in FORWARDED and value is not None},
        menu=menu,
        stream=bool(body.get("stream")),
        include_usage=bool(_object(body.get("stream_options")).get("include_usage")),
    )


def _check_completion(body: Mapping[str, Any]) -> None:
    messages: object = body.get("messages")
    listed = cast("list[Any]", messages) if isinstance(messages, list) else []
    if not listed or not all(isinstance(_object(m).get("role"), str) for m in listed):
        raise RequestError("messages must be a list of objects with a role", param="messages")
    if not isinstance(body.get("model"), str):
        raise RequestError("model must name a policy; GET /v1/models lists them", param="model")
    if body.get("n") not in (None, 1):
        raise RequestError("n must be 1: a decision has one answer", param="n")
    if body.get("logprobs") or body.get("top_logprobs"):
        raise RequestError("logprobs are used for the confidence and not returned", param="logprobs")
    for name, kind in (("stream", bool), ("stream_options", dict), ("arbitrage", dict), ("response_format", dict)):
        if body.get(name) is not None and not isinstance(body[name], kind):
            raise RequestError(f"{name} must be {'true or false' if kind is bool else 'an object'}", param=name)


def _menu(body: Mapping[str, Any], limits: GatewayConfig) -> Menu | None:
    tools = next((name for name in ("tools", "functions") if body.get(name)), None)
    if body.get("arbitrage") is not None:
        if tools is not None:
            raise RequestError(f"{tools} and arbitrage.actions do not go together", status=422, param=tools)
        actions = _texts(_object(body["arbitrage"]).get("actions"), "arbitrage.actions")
        return Menu(actions=check_actions(actions, limits))
    if tools is not None:
        return None
    schema = _object(_object(_object(body.get("response_format")).get("json_schema")).get("schema"))
    properties = _object(schema.get("properties"))
    if schema.get("type") != "object" or len(properties) != 1:
        return None
    field, inner = next(iter(properties.items()))
    options: object = _resolved(_object(inner), schema).get("enum")
    listed = tuple(cast("list[Any]", options)) if isinstance(options, list) else ()
    if not listed or any(isinstance(option, list | dict) for option in listed):
        return None
    return Menu(actions=check_actions(tuple(map(_word, listed)), limits), field=field, values=listed)


def _resolved(inner: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """A property's own schema, where it refers to one of the definitions beside it."""
    name = str(inner.get("$ref", "")).removeprefix("#/$defs/")
    return _object(_object(schema.get("$defs")).get(name)) if "$ref" in inner else inner


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _texts(value: object, param: str) -> tuple[str, ...]:
    listed = cast("list[object]", value) if isinstance(value, list) else []
    if not listed or not all(isinstance(v, str) for v in listed):
        raise RequestError(f"{param} must be a list of texts", param=param)
    return tuple(cast("list[str]", listed))


def check_actions(actions: tuple[str, ...], limits: GatewayConfig) -> tuple[str, ...]:
    """Different, not empty, neither too many nor too long."""
    if not FEWEST_CHOICES <= len(actions) <= limits.max_actions:
        raise RequestError(
            f"{len(actions)} actions; {FEWEST_CHOICES} to {limits.max_actions} can be chosen from",
            status=422, code="number_of_actions",
        )  # fmt: skip
    if len(set(actions)) < len(actions) or not all(actions):
        raise RequestError("actions must be different and not empty", status=422, code="duplicate_actions")
    if max(map(len, actions)) > limits.max_action_length:
        raise RequestError(
            f"an action is longer than {limits.max_action_length} characters", status=422, code="long_action"
        )
    return actions


def converted(document: Any, kind: Any) -> Any:
    """A document of a known shape."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        raise RequestError(f"{what} at {param or 'the body'}", param=param) from error
