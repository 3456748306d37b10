"""The Responses API: the shape of its requests and replies."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.chat import (
    CompletionRequest,
    Menu,
    arbitrage_object,
    checked_completion,
    decoded,
    input_output_usage,
    item_message,
    json_reply,
    merged_calls,
    message_of_decision,
    reply_headers,
)
from conformal_arbitrage.gateway.decider import Outcome
from conformal_arbitrage.gateway.policies import LivePolicy
from conformal_arbitrage.live.config import GatewayConfig
from conformal_arbitrage.store.claims import SavedResponse
from conformal_arbitrage.store.record import JSONObject
from conformal_arbitrage.types import JSON, as_list, as_object, is_list, is_object

# --- Read requests to the Responses API ---


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


# --- Decisions in the shape of the Responses API ---


_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponseShape(Struct, frozen=True):
    """Replies to a request to /v1/responses; `echo` is what they repeat of it."""

    echo: JSONObject

    def whole(self, policy: LivePolicy, outcome: Outcome, menu: Menu | None) -> SavedResponse:
        """Return the reply to a request that does not stream."""
        message, finish = message_of_decision(outcome.decision, menu)
        items = [_item(outcome, *part) for part in _parts(message)]
        return json_reply(self.document(policy, outcome, menu, items, finish), reply_headers(policy, outcome))

    def live(self, policy: LivePolicy, outcome: Outcome, menu: Menu | None = None) -> "ResponseEvents":
        """Return what renders an answer while it is being written, or a choice from a menu as if it were."""
        return ResponseEvents(self, policy, outcome, menu)

    def document(
        self,
        policy: LivePolicy,
        outcome: Outcome,
        menu: Menu | None,
        items: Sequence[Mapping[str, Any]],
        finish: str | None,
    ) -> dict[str, Any]:
        """Return a decision as a response; without a finish reason it is still in progress."""
        incomplete = _INCOMPLETE.get(finish or "")
        status = "in_progress" if finish is None else "completed" if incomplete is None else "incomplete"
        return {
            "id": f"resp_{outcome.decision.id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "model": policy.name,
            "output": items,
            **self.echo,
            "usage": None if finish is None else input_output_usage(outcome.decision.legs),
            "arbitrage": arbitrage_object(policy, outcome, menu),
        }


_Part = tuple[str, int, Mapping[str, Any]]


def _parts(message: Mapping[str, Any]) -> list[_Part]:
    """Return the items of an answer: its text or refusal, then its tool calls; each with its kind and place."""
    texts = [(name, 0, {"text": message[name]}) for name in ("content", "refusal") if message.get(name)]
    calls = [("call", place, as_object(call)) for place, call in enumerate(as_list(message.get("tool_calls")))]
    return [*texts, *calls]


def _item(
    outcome: Outcome, kind: str, place: int, part: Mapping[str, Any], status: str = "completed"
) -> dict[str, Any]:
    """Return one item of a response's output."""
    id = outcome.decision.id
    if kind != "call":
        content = [_text_part(kind, part["text"])]
        return {"id": f"msg_{id}_{kind}", "type": "message", "role": "assistant", "status": status, "content": content}
    shared = {"id": f"fc_{id}_{place}", "call_id": part.get("id") or f"call_{id}_{place}", "status": status}
    if "custom" in part:
        custom = as_object(part["custom"])
        return {**shared, "type": "custom_tool_call", "name": custom.get("name"), "input": custom.get("input") or ""}
    function = as_object(part.get("function"))
    named = {"name": function.get("name"), "arguments": function.get("arguments") or ""}
    return {**shared, "type": "function_call", **named}


def _text_part(kind: str, text: str) -> dict[str, Any]:
    if kind == "refusal":
        return {"type": "refusal", "refusal": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseEvents:
    """The events of one response; the first and the last carry `arbitrage`. Items are closed at the end, all together."""

    def __init__(self, shape: ResponseShape, policy: LivePolicy, outcome: Outcome, menu: Menu | None) -> None:
        self._shape = shape
        self._policy = policy
        self._outcome = outcome
        self._menu = menu
        self._open: dict[tuple[str, int], int] = {}  # places in the output, by kind and place in the message
        self._sent = 0

    def _event(self, kind: str, **fields: Any) -> bytes:
        document = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(document) + b"\n\n"

    def first(self, outcome: Outcome, deltas: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the events that open the response, and those for what has been said already."""
        response = self._shape.document(self._policy, outcome, self._menu, [], None)
        opening = [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]
        return b"".join([*opening, *map(self.delta, deltas)])

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """Return the events that continue the answer; what the Responses API has no word for is left out."""
        texts = [(kind, delta.get(kind)) for kind in ("content", "refusal")]
        pieces = [self._text(kind, text) for kind, text in texts if isinstance(text, str) and text]
        for call in as_list(delta.get("tool_calls")):
            fields = as_object(call)
            place = fields.get("index")
            calls = sum(kind == "call" for kind, _ in self._open)
            pieces.append(self._call(place if isinstance(place, int) else calls, fields))
        return b"".join(pieces)

    def _text(self, kind: str, text: str) -> bytes:
        opening, at = self._opened(kind, 0, {"text": ""})
        name = "response.output_text.delta" if kind == "content" else "response.refusal.delta"
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
        return opening + self._event(name, **at, content_index=0, delta=text, **logprobs)

    def _call(self, place: int, call: Mapping[str, Any]) -> bytes:
        kind, field = ("custom", "input") if "custom" in call else ("function", "arguments")
        named = as_object(call.get(kind))
        opening, at = self._opened("call", place, {**call, kind: {**named, field: ""}})
        name = "response.custom_tool_call_input.delta" if kind == "custom" else "response.function_call_arguments.delta"
        return opening + self._event(name, **at, delta=named[field]) if named.get(field) else opening

    def _opened(self, kind: str, place: int, part: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
        """Return the events that open an item, if it is new, and how later events name it."""
        item = _item(self._outcome, kind, place, part, "in_progress")
        known = self._open.get((kind, place))
        at = {"item_id": item["id"], "output_index": len(self._open) if known is None else known}
        if known is not None:
            return b"", at
        self._open[kind, place] = at["output_index"]
        if kind == "call":
            return self._event("response.output_item.added", output_index=at["output_index"], item=item), at
        bare: dict[str, Any] = {**item, "content": []}
        added = self._event("response.output_item.added", output_index=at["output_index"], item=bare)
        return added + self._event("response.content_part.added", **at, content_index=0, part=item["content"][0]), at

    def last(self, outcome: Outcome) -> tuple[str, bytes]:
        """Return the finish reason, and the events that close all items and the response."""
        message, finish = message_of_decision(outcome.decision, self._menu)
        parts = {(kind, place): part for kind, place, part in _parts(message)}
        pieces: list[bytes] = []
        for (kind, place), part in parts.items():  # what a stream did not say, the whole answer does
            if (kind, place) not in self._open:
                pieces.append(self._call(place, part) if kind == "call" else self._text(kind, part["text"]))
        items: list[dict[str, Any]] = []
        for kind, place in sorted(parts, key=lambda key: self._open[key]):
            items.append(_item(outcome, kind, place, parts[kind, place]))
            pieces.append(self._closed(kind, self._open[kind, place], items[-1]))
        response = self._shape.document(self._policy, outcome, self._menu, items, finish)
        return finish, b"".join([*pieces, self._event(f"response.{response['status']}", response=response)])

    def _closed(self, kind: str, index: int, item: Mapping[str, Any]) -> bytes:
        """Return the events that close an item."""
        at = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            whole = {"name": item["name"], "arguments": item["arguments"]}
            pieces = [self._event("response.function_call_arguments.done", **at, **whole)]
        elif item["type"] == "custom_tool_call":
            pieces = [self._event("response.custom_tool_call_input.done", **at, input=item["input"])]
        else:
            [part] = item["content"]
            if kind == "content":
                text = self._event("response.output_text.done", **at, content_index=0, text=part["text"], logprobs=[])
            else:
                text = self._event("response.refusal.done", **at, content_index=0, refusal=part["refusal"])
            pieces = [text, self._event("response.content_part.done", **at, content_index=0, part=part)]
        return b"".join([*pieces, self._event("response.output_item.done", output_index=index, item=item)])
