"""SplitSecret: keeps a secret out of a stream whose chunks may each hold only a part of it.

Knows nothing of transport.
"""

from typing import Any

from conformal_arbitrage.types import JSON, as_object

_TEXTS = ("content", "refusal", "reasoning_content", "reasoning")
_HIDDEN = "***"


class SplitSecret:
    """Replaces a secret in the texts of chunks, holding back what could be its beginning until the next chunk.

    Args:
        secret: what must not pass.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._held: dict[str | int, str] = {}  # by the name of a text, or the index of a tool call

    def scrub(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Return a chunk without the secret, in place; nothing is held back from the chunk with the finish reason."""
        choices: JSON = chunk.get("choices")
        choice: JSON = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return chunk
        delta: JSON = choice.setdefault("delta", {})
        if isinstance(delta, dict):
            self._scrub_delta(delta, last=bool(choice.get("finish_reason")))
        return chunk

    def rest(self) -> dict[str, Any] | None:
        """Return a chunk with what is still held back at the end of a stream; None if nothing is."""
        if not self._held:
            return None
        delta: dict[str, Any] = {}
        self._release(delta)
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}

    def _scrub_delta(self, delta: dict[str, Any], *, last: bool) -> None:
        for name in _TEXTS:
            if isinstance(text := delta.get(name), str):
                delta[name] = self._passed(name, text)
        for call in _objects(delta.get("tool_calls")):
            function = as_object(call.get("function"))
            if isinstance(text := function.get("arguments"), str):
                call["function"] = {**function, "arguments": self._passed(_index_of(call), text)}
        if last:
            self._release(delta)

    def _release(self, delta: dict[str, Any]) -> None:
        """Let everything pass that is held back: it turned out not to be the secret."""
        for place, text in self._held.items():
            if isinstance(place, str):
                delta[place] = (delta.get(place) or "") + text
                continue
            calls = _objects(delta.get("tool_calls"))
            same = [call for call in calls if _index_of(call) == place]
            if same:
                function = as_object(same[0].get("function"))
                same[0]["function"] = {**function, "arguments": f"{function.get('arguments') or ''}{text}"}
            else:
                delta["tool_calls"] = [*calls, {"index": place, "function": {"arguments": text}}]
        self._held.clear()

    def _passed(self, place: str | int, text: str) -> str:
        """Return what may pass of a text, and hold back the rest."""
        whole = (self._held.pop(place, "") + text).replace(self._secret, _HIDDEN)
        longest = min(len(whole), len(self._secret) - 1)
        size = next((n for n in range(longest, 0, -1) if self._secret.startswith(whole[-n:])), 0)
        if size:
            self._held[place] = whole[-size:]
        return whole[: len(whole) - size]


def _objects(value: JSON) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _index_of(call: dict[str, Any]) -> int:
    index: JSON = call.get("index")
    return index if isinstance(index, int) else 0
