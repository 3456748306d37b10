"""What a recorded reply of an OpenAI-style endpoint says: its text, its tokens, and how sure the model was.

Knows nothing of the tool that recorded it.
"""

from collections.abc import Mapping
from typing import Any

from conformal_arbitrage.errors import ReplyError
from conformal_arbitrage.importing.documents import number_of, unfolded
from conformal_arbitrage.scorers.answers import answer_text, mean_probability
from conformal_arbitrage.types import Messages, as_list, as_object, is_object


def reply_text(body: object) -> str | None:
    """Return the answer of a chat completion, a response, an assistant's message or a plain text; None if it has none."""
    value = unfolded(body)
    if isinstance(value, str):
        return value
    document = as_object(value)
    choice = as_object(next(iter(as_list(document.get("choices"))), None))
    message = as_object(choice.get("message")) or (document if "content" in document else {})
    try:
        text = answer_text(message) if message else _output_text(document)
    except ReplyError:
        return None
    return text or None


def _output_text(document: Mapping[str, Any]) -> str:
    """Return the text of a reply of the Responses API, or its function calls as tool calls."""
    items = [item for item in as_list(document.get("output")) if is_object(item)]
    calls = [{"function": item} for item in items if item.get("type") == "function_call"]
    if calls:
        return answer_text({"tool_calls": calls})
    return "".join(str(part.get("text", "")) for part in _parts(items))


def _parts(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for item in items for part in as_list(item.get("content")) if is_object(part)]


def reply_confidence(body: object) -> float | None:
    """Return the mean token probability of a reply, as `confidence = "logprob"` has it live; None without logprobs."""
    document = as_object(unfolded(body))
    if "output" in document:
        items = [item for item in as_list(document["output"]) if is_object(item)]
        tokens = [token for part in _parts(items) for token in as_list(part.get("logprobs"))]
        return mean_probability({"logprobs": {"content": tokens}})
    choice = as_object(next(iter(as_list(document.get("choices"))), None))
    return mean_probability(choice)


def tokens_of(body: object) -> tuple[float | None, float | None]:
    """Return the input and output tokens that a reply reports."""
    document = as_object(unfolded(body))
    names = (("usage.prompt_tokens", "usage.input_tokens"), ("usage.completion_tokens", "usage.output_tokens"))
    return number_of(document, *names[0]), number_of(document, *names[1])


def conversation(value: object) -> Messages:
    """Return a question as messages: a list of them, a request that holds one, a single message, or a plain text."""
    content = unfolded(value)
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    document = as_object(content)
    if "role" in document:
        return [document]
    inner = document.get("messages") or document.get("input") or document.get("prompt")
    if inner is not None and inner is not content:
        return conversation(inner)
    return [message for message in as_list(content) if is_object(message) and "role" in message]
