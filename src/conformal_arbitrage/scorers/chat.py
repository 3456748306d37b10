"""ChatScorer: scores elicited from any OpenAI-compatible chat endpoint; and what all users of that endpoint share.

The elicitation mode is a setting that `arbitrage check` finds out once. It is never switched at run time: that would
change the scores' distribution after calibration.

Knows nothing of transport or roles.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from conformal_arbitrage.errors import CutOffError, RefusalError, ReplyError, ScorerError
from conformal_arbitrage.scorers.base import Identity, Scores, check_values
from conformal_arbitrage.scorers.prompts import Confidences, Message, Prompt
from conformal_arbitrage.types import Query, Spent
from conformal_arbitrage.upstream.base import Call, Port, Reply, spent_of

PATH = "/chat/completions"
Mode = Literal["json_schema", "json_object", "plain"]
TokenField = Literal["max_tokens", "max_completion_tokens"]

_AGAIN = "That reply cannot be read. Answer the same question once more, strictly in the format asked for."


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that go with every request; None is left to the endpoint.

    Attributes:
        model: the name to ask for.
        served: the name the endpoint must answer with, if pinned.
        max_tokens: the longest reply.
        token_field: under which name the endpoint wants that.
    """

    model: str
    served: str | None = None
    temperature: float | None = 0.1
    max_tokens: int | None = None
    token_field: TokenField = "max_tokens"
    reasoning_effort: str | None = None
    seed: int | None = None

    def body(self, *, default_limit: int | None = None) -> dict[str, Any]:
        """The settings as fields of a request."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatScorer:
    """Ask a chat model for a number per option.

    Attributes:
        port: the endpoint.
        settings: model, temperature, limits.
        prompt: how options are put and the reply is read.
        mode: structured output by schema, by JSON mode, or plain text.
        reask: whether a reply that cannot be read is answered with one request to try again.
    """

    port: Port
    settings: Settings
    prompt: Prompt = field(default_factory=Confidences)
    mode: Mode = "plain"
    reask: bool = False

    @property
    def identity(self) -> Identity:
        """Endpoint, settings, prompt, mode and the rule for asking again."""
        limits = {"max_tokens": self.settings.max_tokens or "50, or 12 an option"}
        asking = {"mode": self.mode, "reask": self.reask, "option_order": "as given"}
        who = {"kind": "chat", "endpoint": self.port.origin}
        return {**who, **self.settings.identity, **limits, **self.prompt.identity, **asking}

    async def score(self, query: Query) -> Scores:
        """One confidence per option."""
        messages = self.prompt.messages(query)
        try:
            return await self._once(query, messages, Spent())
        except ReplyError as error:
            if not self.reask or error.raw is None:  # cut off, declined or another model: nothing to correct
                raise
            again: list[Message] = [
                {"role": "assistant", "content": error.raw},
                {"role": "user", "content": _AGAIN},
            ]
            return await self._once(query, [*messages, *again], spent_of(error))

    async def _once(self, query: Query, messages: list[Message], before: Spent) -> Scores:
        limit = self.settings.max_tokens or max(50, 12 * len(query.actions) + 2)
        body = {**self.settings.body(default_limit=limit), "messages": messages, **self._format(len(query.actions))}
        try:
            reply = await self.port.call(Call(path=PATH, body=body, id=query.id, output_limit=limit))
        except ScorerError as error:
            error.spent = before + spent_of(error)
            raise
        spent = before + reply.spent
        message = message_of(reply, self.settings, spent)
        text = str(message["content"])
        try:
            found = self.prompt.read(text, query)
        except ValueError as error:
            raise ReplyError(f"{error}; the reply was {text!r:.200}", spent=spent, raw=text) from error
        values = check_values(found, len(query.actions), spent=spent, raw=text)
        return Scores(values=values, spent=spent, raw=text, served=served_by(reply))

    def _format(self, actions: int) -> dict[str, Any]:
        schema = self.prompt.schema(actions)
        return {} if schema is None else response_format(self.mode, "scores", schema)


def response_format(mode: Mode, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The field that asks for structured output, in the given mode."""
    if mode == "plain":
        return {}
    if mode == "json_object":
        return {"response_format": {"type": "json_object"}}
    named = {"name": name, "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def served_by(reply: Reply) -> str | None:
    """The model that answered, as the endpoint names it."""
    name = reply.document.get("model")
    return name if isinstance(name, str) else None


def other_model(served: str | None, pinned: str, spent: Spent) -> ReplyError:
    """Another model answered than the one that was checked."""
    return ReplyError(
        f"the endpoint answered as {served!r:.80}, not as {pinned!r}, with which it was checked; run `arbitrage check` and "
        "collect and calibrate again",
        spent=spent,
    )


def choice_of(reply: Reply, settings: Settings, spent: Spent) -> dict[str, Any]:
    """The one choice of a completion.

    Raises:
        ReplyError: there is none, or another model served it than the pinned one.
    """
    served = served_by(reply)
    if settings.served is not None and served != settings.served:
        raise other_model(served, settings.served, spent)
    choices: object = reply.document.get("choices")
    first = cast("list[object]", choices)[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict):
        raise ReplyError(f"the reply has no choices: {reply.document!r:.200}", spent=spent)
    return cast("dict[str, Any]", first)


def message_of(reply: Reply, settings: Settings, spent: Spent, *, tools: bool = False) -> Mapping[str, Any]:
    """The assistant's message, with text in it, or tool calls where they are welcome.

    Raises:
        CutOffError: it ended at the token limit before any content.
        RefusalError: the model declined.
        ReplyError: there is nothing in it.
    """
    choice = choice_of(reply, settings, spent)
    found: object = choice.get("message")
    message = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    content, calls = message.get("content"), message.get("tool_calls")
    if (isinstance(content, str) and content.strip()) or (tools and isinstance(calls, list) and calls):
        return message
    if message.get("refusal"):
        raise RefusalError(f"the model declined: {message['refusal']!r:.200}", spent=spent)
    if choice.get("finish_reason") == "length":
        thought = f", {spent.reasoning_tokens} of them for reasoning" if spent.reasoning_tokens else ""
        raise CutOffError(
            f"the reply ended at its limit ({spent.output_tokens} tokens{thought}) before any content; raise max_tokens",
            spent=spent,
        )
    raise ReplyError(f"the reply is empty (finish_reason {choice.get('finish_reason')!r:.40})", spent=spent)
