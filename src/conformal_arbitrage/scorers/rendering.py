"""The one rendering of a question, wherever it comes from: collect, ask, chat completions, decisions, audits.

A question is a list of chat messages; plain text is one user message, and the instructions of a Decisions request are a
system message before its input. `Query` brings it into one form, `Query.text` shows it in a prompt, and each kind puts the
menu behind it. What is calibrated is then what is served, byte for byte.

Knows nothing of menus or endpoints.
"""

from typing import Any

from conformal_arbitrage.types import Messages, Query, message_text
from conformal_arbitrage.upstream.base import fingerprint

VERSION = "messages 1"
VERBATIM = "messages as given; 1"
"""The rendering of chat requests in text form, which are passed on unchanged."""
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
    messages = [{"role": m.get("role", "user"), "content": message_text(m)} for m in query.context]
    return messages if all(message["role"] in _ROLES for message in messages) else query.text


def rendering() -> str:
    """Return the version of the rendering and a digest of what it makes of a few questions of every sort.

    The digest is of the results, so a change of the code is a change of the identity, whether or not the author thought of
    the version.
    """
    queries = [Query(context, ("a", "b")) for context in _SPECIMENS]
    return f"{VERSION}; {fingerprint([[query.text, messages_or_text(query)] for query in queries])[:16]}"


RENDERING = rendering()
"""The part of every identity that says how questions are shown; a certificate from another rendering is refused."""
