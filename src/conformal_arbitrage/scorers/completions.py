"""Chat completions: the settings sent with every request, and reading the reply.

Every scorer, answerer and grader behind a chat endpoint shares this.

Knows nothing of transport, prompts or roles.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from conformal_arbitrage.errors import CutOffError, OtherModelError, RefusalError, ReplyError
from conformal_arbitrage.types import JSON, Spent
from conformal_arbitrage.upstream.base import Reply

PATH = "/chat/completions"
Mode = Literal["json_schema", "json_object", "plain"]
TokenField = Literal["max_tokens", "max_completion_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings sent with every request; those that are None are left to the endpoint.

    Attributes:
        model: the model name to request.
        served: the model name that replies must carry, if pinned.
        max_tokens: the limit on the length of a reply.
        token_field: the name under which the endpoint takes that limit.
    """

    model: str
    served: str | None = None
    temperature: float | None = 0.1
    max_tokens: int | None = None
    token_field: TokenField = "max_tokens"
    reasoning_effort: str | None = None
    seed: int | None = None

    def body(self, *, default_limit: int | None = None) -> dict[str, Any]:
        """Return the settings as fields of a request."""
        limit = self.max_tokens or default_limit
        named = {
            "model": self.model,
            "temperature": self.temperature,
            self.token_field: limit,
            "reasoning_effort": self.reasoning_effort,
            "seed": self.seed,
        }
        return {name: value for name, value in named.items() if value is not None}

    @property
    def identity(self) -> dict[str, Any]:
        """All settings."""
        names = ("model", "served", "temperature", "max_tokens", "token_field", "reasoning_effort", "seed")
        return {name: getattr(self, name) for name in names}


def response_format(mode: Mode, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request field that asks for structured output in the given mode; empty in plain mode."""
    if mode == "plain":
        return {}
    if mode == "json_object":
        return {"response_format": {"type": "json_object"}}
    named = {"name": name, "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def served_by(reply: Reply) -> str | None:
    """Return the name of the model that replied, as the endpoint reports it."""
    name = reply.document.get("model")
    return name if isinstance(name, str) else None


def other_model(served: str | None, pinned: str, spent: Spent) -> OtherModelError:
    """Return the error for a reply from a model other than the pinned one."""
    return OtherModelError(
        f"the endpoint served {served!r:.80} instead of {pinned!r}, the model pinned by `arbitrage check`; check, collect "
        "and calibrate again",
        spent=spent,
    )


def choice_of(reply: Reply, settings: Settings, spent: Spent) -> dict[str, Any]:
    """Return the first choice of a completion.

    Raises:
        ReplyError: the completion has no choices, reports an error, or another model than the pinned one served it.
    """
    served = served_by(reply)
    if settings.served is not None and served != settings.served:
        raise other_model(served, settings.served, spent)
    choices: JSON = reply.document.get("choices")
    first: JSON = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict):
        raise ReplyError(f"the reply has no choices: {reply.document!r:.200}", spent=spent)
    if first.get("error") or first.get("finish_reason") == "error":
        raise ReplyError(f"the reply broke off with an error: {first.get('error')!r:.200}", spent=spent)
    return first


class Completion(NamedTuple):
    """A chat completion with an answer in it: its choice, the assistant's message, and the model that served it."""

    choice: dict[str, Any]
    message: dict[str, Any]
    served: str | None


def message_of(reply: Reply, settings: Settings, spent: Spent, *, tools: bool = False) -> dict[str, Any]:
    """Return the assistant's message; raises as `completion_of` does."""
    return completion_of(reply, settings, spent, tools=tools).message


def completion_of(reply: Reply, settings: Settings, spent: Spent, *, tools: bool = False) -> Completion:
    """Return a completion whose message has text in it, or tool calls where `tools` allows them.

    Raises:
        CutOffError: the reply hit its token limit before any content.
        RefusalError: the model declined.
        ReplyError: the message is empty, or its content is not a text.
    """
    choice = choice_of(reply, settings, spent)
    part: JSON = choice.get("message")
    message = part if isinstance(part, dict) else {}
    content, calls, finish = message.get("content"), message.get("tool_calls"), choice.get("finish_reason")
    if content is not None and not isinstance(content, str):
        raise ReplyError(f"the content is not a text but {content!r:.160} (finish_reason {finish!r:.40})", spent=spent)
    if (content and content.strip()) or (tools and isinstance(calls, list) and calls):
        return Completion(choice, message, served_by(reply))
    if message.get("refusal"):
        raise RefusalError(f"the model declined: {message['refusal']!r:.200}", spent=spent)
    if finish == "length":
        reasoning = f", {spent.reasoning_tokens} of them for reasoning" if spent.reasoning_tokens else ""
        raise CutOffError(
            f"the reply hit its limit ({spent.output_tokens} tokens{reasoning}) before any content; raise max_tokens",
            spent=spent,
        )
    raise ReplyError(f"the reply is empty (finish_reason {finish!r:.40})", spent=spent)
