"""Streamed chat completions: server-sent events in, one whole completion out.

Knows nothing of transport.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

_TEXTS = ("content", "refusal", "reasoning_content", "reasoning")


class Events:
    """The data of server-sent events, from bytes in any portions."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, portion: bytes) -> Iterator[bytes]:
        """The data of every event that these bytes end."""
        self._rest.append(portion)
        if b"\n" not in portion:
            return
        *lines, rest = b"".join(self._rest).split(b"\n")
        self._rest = [rest]
        for line in lines:
            bare = line.rstrip(b"\r")
            if bare.startswith(b"data:"):
                self._data.append(bare[5:].removeprefix(b" "))
            elif not bare and self._data:
                yield b"\n".join(self._data)
                self._data.clear()


class Assembly:
    """A completion put together from its chunks, whatever their shape."""

    def __init__(self) -> None:
        self._told: dict[str, Any] = {}
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._calls: dict[int, dict[str, Any]] = {}
        self.finish: str | None = None

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take in a chunk: text is appended, a tool call grows in its place, of all else the last counts."""
        self._told |= {name: value for name, value in chunk.items() if name != "choices" and value not in (None, "")}
        reason: object = choice_of_chunk(chunk).get("finish_reason")
        if isinstance(reason, str) and reason:
            self.finish = reason
        for name, value in delta_of(chunk).items():
            if name == "tool_calls":
                self._grow(value)
            elif name in _TEXTS and isinstance(value, str):
                self._message[name] = _joined(self._message.get(name), value)
            elif value is not None:
                self._message[name] = value

    def _grow(self, parts: object) -> None:
        for part in cast("list[object]", parts) if isinstance(parts, list) else []:
            told = _object(part)
            place = told.get("index")
            call = self._calls.setdefault(place if isinstance(place, int) else len(self._calls), {})
            for name, value in told.items():
                if isinstance(value, dict):
                    inner = call[name] = _object(call.get(name))
                    for key, text in cast("dict[str, Any]", value).items():
                        if text is not None:  # as some servers write for what they have said already
                            inner[key] = _joined(inner.get(key), text)
                elif name != "index" and value is not None:
                    call[name] = value

    def document(self) -> dict[str, Any]:
        """The whole completion, as if it had not been streamed."""
        message = dict(self._message)
        if self._calls:
            message["tool_calls"] = [self._calls[place] for place in sorted(self._calls)]
        choice = {"index": 0, "message": message, "finish_reason": self.finish, "logprobs": None}
        return {**self._told, "object": "chat.completion", "choices": [choice]}


def choice_of_chunk(chunk: Mapping[str, Any]) -> dict[str, Any]:
    """The one choice of a chunk; a chunk with usage only has none."""
    choices: object = chunk.get("choices")
    return _object(cast("list[object]", choices)[0]) if isinstance(choices, list) and choices else {}


def delta_of(chunk: Mapping[str, Any]) -> dict[str, Any]:
    """What a chunk adds to the message."""
    return _object(choice_of_chunk(chunk).get("delta"))


def _joined(before: object, more: object) -> object:
    """A text and what comes after it; of all else the last counts."""
    return before + more if isinstance(before, str) and isinstance(more, str) else more


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
