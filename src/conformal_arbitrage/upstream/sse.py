"""events, assembled: server-sent events in, one whole chat completion out.

Knows nothing of transport.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from conformal_arbitrage.types import JSON, Chunk

_TEXTS = ("content", "refusal", "reasoning_content", "reasoning")


async def events(portions: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the data of server-sent events, from bytes in arbitrary portions."""
    parts: list[bytes] = []
    data: list[bytes] = []
    async with aclosing(portions):
        async for portion in portions:
            parts.append(portion)
            if b"\n" not in portion:
                continue
            portion = b"".join(parts)  # one copy: it stays in memory while a caller does not read
            parts.clear()
            start = 0
            while (end := portion.find(b"\n", start)) >= 0:
                bare = portion[start:end].rstrip(b"\r")
                start = end + 1
                if bare.startswith(b"data:"):
                    data.append(bare[5:].removeprefix(b" "))
                elif not bare and data:
                    event = b"\n".join(data)
                    data.clear()
                    yield event
            parts.append(portion[start:])


async def assembled(chunks: AsyncGenerator[Chunk]) -> AsyncGenerator["Chunk | Assembly"]:
    """Yield chunks unchanged, then the completion assembled from them."""
    completion = Assembly()
    async with aclosing(chunks):
        async for chunk in chunks:
            completion.add(chunk)
            yield chunk
    yield completion


class Assembly:
    """A completion assembled from its chunks; malformed parts add nothing.

    Attributes:
        finish: why the completion ended; None until the endpoint has said so.
    """

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._message = _Parts({"role": "assistant", "content": None})
        self._calls: dict[int, dict[str, Any]] = {}
        self.finish: str | None = None

    def add(self, chunk: Chunk) -> None:
        """Add a chunk: texts are appended, tool calls grow in place, and any other field is overwritten."""
        self._fields |= {name: value for name, value in chunk.items() if name != "choices" and value not in (None, "")}
        reason: JSON = _choice_of(chunk).get("finish_reason")
        if isinstance(reason, str) and reason:
            self.finish = reason
        for name, value in delta_of(chunk).items():
            if name == "tool_calls":
                self._add_calls(value)
            elif name in _TEXTS:
                self._message.append(name, value)
            else:
                self._message.put(name, value)

    def _add_calls(self, parts: JSON) -> None:
        for part in parts if isinstance(parts, list) else []:
            self._add_call(part)

    def _add_call(self, part: JSON) -> None:
        fields = part if isinstance(part, dict) else {}
        place: JSON = fields.get("index")
        call = self._calls.setdefault(place if isinstance(place, int) else len(self._calls), {})
        value: JSON
        for name, value in fields.items():
            if isinstance(value, dict):
                call[name] = _merged(call.get(name), value)
            elif name != "index" and value is not None:
                call[name] = value

    def document(self) -> dict[str, Any]:
        """Return the whole completion, as if it had not been streamed."""
        message = self._message.joined()
        if self._calls:
            message["tool_calls"] = [_joined(self._calls[place]) for place in sorted(self._calls)]
        choice = {"index": 0, "message": message, "finish_reason": self.finish, "logprobs": None}
        return {**self._fields, "object": "chat.completion", "choices": [choice]}


def delta_of(chunk: Chunk) -> dict[str, Any]:
    """Return what a chunk adds to the message."""
    delta: JSON = _choice_of(chunk).get("delta")
    return delta if isinstance(delta, dict) else {}


def _choice_of(chunk: Chunk) -> dict[str, Any]:
    """Return the one choice of a chunk; a chunk with usage only has none."""
    choices: JSON = chunk.get("choices")
    choice: JSON = choices[0] if isinstance(choices, list) and choices else None
    return choice if isinstance(choice, dict) else {}


class _Parts:
    """An object whose texts arrive in parts, which are joined once, at the end: joining at every part is quadratic."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._texts: dict[str, list[str]] = {}

    def append(self, name: str, value: JSON) -> None:
        """Append a part to a text; any other value replaces the field, and null adds nothing, as some servers send it."""
        if isinstance(value, str):
            self._texts.setdefault(name, []).append(value)
        else:
            self.put(name, value)

    def put(self, name: str, value: JSON) -> None:
        """Set a field, unless to null."""
        if value is not None:
            self._values[name] = value
            self._texts.pop(name, None)

    def joined(self) -> dict[str, Any]:
        """Return the whole object."""
        return {**self._values, **{name: "".join(parts) for name, parts in self._texts.items()}}


def _merged(before: object, more: Mapping[str, Any]) -> _Parts:
    """Return an object with the texts of another appended to its own."""
    merged = before if isinstance(before, _Parts) else _Parts({})
    for name, value in more.items():
        merged.append(name, value)
    return merged


def _joined(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with the texts of its objects joined."""
    return {name: value.joined() if isinstance(value, _Parts) else value for name, value in call.items()}
