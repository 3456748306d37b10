"""The one rendering of a question, wherever it comes from: collect, ask, chat completions, decisions, audits.

A question is a list of chat messages; plain text is one user message, and the instructions of a Decisions request are a
system message before its input. `Query` brings it into one form, `Query.text` shows it in a prompt, and each kind puts the
menu behind it. What is calibrated is then what is served, byte for byte.

Knows nothing of menus or endpoints.
"""

from collections.abc import Mapping
from typing import Any

from conformal_arbitrage.errors import ReplyError
from conformal_arbitrage.types import JSON, Messages, Query, as_list, as_object, message_text
from conformal_arbitrage.upstream.base import fingerprint

VERSION = "messages 1"
VERBATIM = "messages as given; 1"
"""The rendering of chat requests in text form, which are passed on unchanged."""
_SHOWN_TEXT = ("chat", "decisions", "human", "local", "logprob", "sampling")
_ROLES = ("user", "system", "developer", "assistant")
_CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
_SPECIMENS: tuple[str | Messages, ...] = (
    "A question.\nIts second line.",
    [{"role": "user", "content": "A question."}],
    [{"role": "user", "content": [{"type": "text", "text": "A question."}, {"type": "text", "text": "And more."}]}],
    [{"role": "user", "content": [{"type": "text", "text": "A question."}, {"type": "image_url", "image_url": {}}]}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A question."}],
    [
        {"role": "user", "content": "A question."},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "a reply"},
        {"role": "assistant", "content": "An answer.", "tool_calls": [_CALL, _CALL]},
    ],
)


def messages_or_text(query: Query) -> str | list[dict[str, Any]]:
    """Return a question for an API that takes text or plain messages; other conversations become one text."""
    if isinstance(query.context, str):
        return query.context
    messages: list[dict[str, Any]] = [
        {"role": m.get("role", "user"), "content": _input_parts(m) or message_text(m)} for m in query.context
    ]
    if all(message["role"] in _ROLES for message in messages):
        return messages
    lost = _unseen_by_decisions(query)
    if lost is not None:
        raise ReplyError(f"the Decisions API cannot be shown {lost}")
    return query.text


def _input_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a message with pictures as the Decisions API takes them; none for a message of text."""
    parts = [as_object(part) for part in as_list(message.get("content"))]
    if not any(map(_is_picture, parts)):
        return []
    return [
        _input_picture(part) if _is_picture(part) else {"type": "input_text", "text": part["text"]} for part in parts
    ]


def _input_picture(part: Mapping[str, Any]) -> dict[str, Any]:
    picture = as_object(part["image_url"])
    detail = {"detail": picture["detail"]} if picture.get("detail") else {}
    return {"type": "input_image", "image_url": picture["url"], **detail}


def unseen(query: Query, *, pictures: bool) -> str | None:
    """Return what of a conversation would be lost in a prompt of text, and of pictures if the model takes them.

    Tool calls are not lost: a prompt has a line for each.
    """
    if isinstance(query.context, str):
        return None
    for message in query.context:
        lost = next((name for name in ("audio", "function_call", "refusal") if message.get(name)), None)
        content: JSON = message.get("content")
        if lost is not None or not (content is None or isinstance(content, str | list)):
            return lost or "content"
        for part in as_list(content):
            fields = as_object(part)
            if not isinstance(fields.get("text"), str) and not (pictures and _is_picture(fields)):
                return str(fields.get("type") or type(part).__name__)
    return None


def _is_picture(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image_url" and isinstance(as_object(part.get("image_url")).get("url"), str)


def require_seen(query: Query, *, pictures: bool = False) -> None:
    """Refuse a question of which the model would not be shown everything.

    Raises:
        ReplyError: a part would be lost.
    """
    lost = unseen(query, pictures=pictures)
    if lost is not None:
        raise ReplyError(f"this model is not shown {lost!r:.60}; if it takes pictures, set pictures = true")


def with_pictures(messages: list[dict[str, Any]], query: Query, *, pictures: bool) -> list[dict[str, Any]]:
    """Return a prompt with the pictures of its question behind its text, in order.

    Raises:
        ReplyError: a part of the question can be shown in neither way.
    """
    if isinstance(query.context, str):
        return messages
    require_seen(query, pictures=pictures)
    shown = [
        part for message in query.context for part in as_list(message.get("content")) if _is_picture(as_object(part))
    ]
    if not shown:
        return messages
    *before, last = messages
    return [*before, {**last, "content": [{"type": "text", "text": last["content"]}, *shown]}]


def unseen_by(identity: Mapping[str, Any], query: Query) -> str | None:
    """Return what of a conversation a model would not be shown; a function, which gets the question itself, sees all."""
    pictures, kind = identity.get("pictures") is True, identity.get("kind")
    if kind not in _SHOWN_TEXT:
        return None
    return unseen(query, pictures=pictures) or (_unseen_by_decisions(query) if kind == "decisions" else None)


def _unseen_by_decisions(query: Query) -> str | None:
    """Return what the Decisions API would not be shown: it has no messages of tools, so these make one text of all."""
    if isinstance(query.context, str) or all(message.get("role", "user") in _ROLES for message in query.context):
        return None
    return "a picture beside a tool's message" if any(map(_input_parts, query.context)) else None


def pictures_identity(*, pictures: bool) -> dict[str, bool]:
    """Return what an identity says about pictures: nothing if the model gets none, as before there were any."""
    return {"pictures": True} if pictures else {}


def rendering() -> str:
    """Return the version of the rendering and a digest of what it makes of a few questions of every sort.

    The digest is of the results, so a change of the code is a change of the identity, whether or not the author thought of
    the version.
    """
    queries = [Query(context, ("a", "b")) for context in _SPECIMENS]
    return f"{VERSION}; {fingerprint([[query.text, messages_or_text(query)] for query in queries])[:16]}"


RENDERING = rendering()
"""The part of every identity that says how questions are shown; a certificate from another rendering is refused."""
