"""Read requests to the Responses API: each becomes the chat request that asks the same, or is refused by name.

Knows nothing of policies or models.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.chat_requests import CompletionRequest, checked_completion, decoded
from conformal_arbitrage.gateway.input_items import item_message, merged_calls
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.store.record import JSONObject
from conformal_arbitrage.types import JSON, as_object, is_list, is_object

_SAME = (
    "arbitrage", "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "stream", "temperature", "top_p", "user",
)  # fmt: skip
_CHANGED = ("input", "instructions", "max_output_tokens", "reasoning", "text", "tool_choice", "tools")
_WITHOUT_EFFECT = ("include", "stream_options", "truncation")
_STATE = "responses are not kept for later turns: send the whole conversation as input"
_REFUSED = {
    "access_programs": "no certificate covers it",
    "background": "an answer is sent when it is there",
    "context_management": "it changes what a model is shown",
    "conversation": f"{_STATE}; arbitrage.session names a conversation",
    "image": "answers are text or tool calls",
    "max_tool_calls": "it is for tools that the provider runs",
    "moderation": "it can withhold an answer, so no certificate covers it",
    "previous_response_id": _STATE,
    "prompt": "templates live at the provider: send the text itself",
    "top_logprobs": "logprobs are not returned",
}
_KNOWN = frozenset({*_SAME, *_CHANGED, *_WITHOUT_EFFECT, *_REFUSED})
_DEFAULTS: Mapping[str, JSON] = {"background": False, "top_logprobs": 0}
_OWN_NAMES = {
    "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity",
}  # fmt: skip
_CHOICES = ("auto", "none", "required")


class ResponseRequest(Struct, frozen=True, kw_only=True):
    """A checked request to the Responses API.

    Attributes:
        chat: the chat request that asks the same.
        echo: the fields that a response repeats from its request.
    """

    chat: CompletionRequest
    echo: JSONObject


def read_response(data: bytes, limits: GatewayConfig) -> ResponseRequest:
    """Read a request to /v1/responses."""
    document = decoded(data, limits)
    if not isinstance(document, dict):
        raise RequestError("the body must be a JSON object")
    body = {name: value for name, value in document.items() if value is not None}
    _refuse_unsupported(body)
    same = {name: body[name] for name in _SAME if name in body}
    chat: dict[str, Any] = {**same, "messages": _messages(body), **_limits(body), **_text(body), **_tools(body)}
    checked = checked_completion(chat, limits)
    if checked.menu is not None and checked.menu.ignored:
        ignored = tuple(sorted(map(_own_name, checked.menu.ignored)))
        checked = replace(checked, menu=replace(checked.menu, ignored=ignored))
    return ResponseRequest(chat=checked, echo=_echo(body))


def _own_name(name: str) -> str:
    """Return what a field of a chat request is called here."""
    return _OWN_NAMES.get(name, name).replace("response_format.", "text.format.")


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    unknown = body.keys() - _KNOWN
    if unknown:
        name = min(unknown)
        raise RequestError(
            f"{name!r:.80} is not a field of a response's request", param=name[:80], code="unknown_field"
        )
    for name, reason in _REFUSED.items():
        if name in body and body[name] != _DEFAULTS.get(name, body):
            raise RequestError(f"{name} is not supported: {reason}", status=422, param=name, code="unsupported_field")
    if body.get("truncation", "disabled") != "disabled":
        raise RequestError(
            "truncation must be disabled: it changes what a model is shown", status=422, param="truncation",
            code="unsupported_field",
        )  # fmt: skip
    for name, kind in (("text", dict), ("reasoning", dict), ("tools", list), ("instructions", str)):
        if name in body and not isinstance(body[name], kind):
            raise RequestError(f"{name} must be {_KINDS[kind]}", param=name)


_KINDS = {dict: "an object", list: "a list", str: "a text"}


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation: the instructions, if any, are a system message before the input."""
    instructions = body.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    content: JSON = body.get("input")
    if isinstance(content, str):
        return [*system, {"role": "user", "content": content}]
    items = content if is_list(content) else []
    if not items or not all(map(is_object, items)):
        raise RequestError("input must be a text or a list of items", param="input")
    return [*system, *merged_calls([item_message(as_object(item)) for item in items])]


def _limits(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that have another name in a chat request."""
    limit = {"max_completion_tokens": body["max_output_tokens"]} if "max_output_tokens" in body else {}
    effort = as_object(body.get("reasoning")).get("effort")
    return limit if effort is None else {**limit, "reasoning_effort": effort}


def _text(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of the answer."""
    text = as_object(body.get("text"))
    verbosity = {} if text.get("verbosity") is None else {"verbosity": text["verbosity"]}
    shape = as_object(text.get("format"))
    kind = shape.get("type", "text")
    if kind == "json_schema":
        schema = {name: value for name, value in shape.items() if name != "type"}
        return {**verbosity, "response_format": {"type": "json_schema", "json_schema": schema}}
    if kind == "json_object":
        return {**verbosity, "response_format": {"type": "json_object"}}
    if kind != "text":
        raise _unsupported("text.format", kind)
    return verbosity


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    tools = [_tool(as_object(tool)) for tool in body.get("tools", ())]
    choice = body.get("tool_choice")
    if not tools:
        return {}
    return {"tools": tools} if choice is None else {"tools": tools, "tool_choice": _choice(choice)}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise _unsupported("tools", kind)
    return {"type": kind, kind: {name: value for name, value in tool.items() if name != "type" and value is not None}}


def _choice(choice: JSON) -> JSON:
    if isinstance(choice, str) and choice in _CHOICES:
        return choice
    named = as_object(choice)
    kind = named.get("type")
    if kind not in ("function", "custom"):
        raise _unsupported("tool_choice", kind or choice)
    return {"type": kind, kind: {"name": named.get("name")}}


def _unsupported(param: str, kind: object) -> RequestError:
    return RequestError(
        f"{param} of type {kind!r:.60} is not supported: answers are text, JSON, and calls of the caller's own tools",
        status=422, param=param, code="unsupported_field",
    )  # fmt: skip


def _echo(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a response repeats of its request."""
    reasoning = as_object(body.get("reasoning"))
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata", {}),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": body.get("temperature"),
        "text": body.get("text", {"format": {"type": "text"}}),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "user": body.get("user"),
    }
