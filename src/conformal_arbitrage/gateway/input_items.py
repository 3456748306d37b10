"""Input items of the Responses and Decisions APIs as chat messages, so that a question has one form on every route.

What cannot be said as a chat message is refused by name; nothing is dropped.

Knows nothing of menus or policies.
"""

import json
from collections.abc import Mapping
from typing import Any

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.types import JSON, as_list, as_object, is_list, is_object

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
