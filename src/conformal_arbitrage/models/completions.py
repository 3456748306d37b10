"""Chat completions on the wire: the fields and settings of a request, and reading the reply."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from conformal_arbitrage.errors import CutOffError, OtherModelError, RefusalError, ReplyError
from conformal_arbitrage.models.port import Identity, Reply, is_number
from conformal_arbitrage.types import JSON, Spent, is_list, is_object

# --- The fields of a chat request ---


RequestSettings = Literal["as requested", "pinned"]
AS_REQUESTED: RequestSettings = "as requested"
QUESTION = ("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format")
"""What is asked. Passed on to both models, and recorded."""
INERT = (
    "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "store", "user",
)  # fmt: skip
"""What a provider files, caches or bills by. Passed on, since no answer depends on it."""
_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
"""Two names of one limit."""
_OF_QUESTION = ("parallel_tool_calls", "response_format", "tool_choice", "tools")
_MOST_VALUES = 32
ANY = "any"
"""What a log says of a field with more than 32 values: a further one is like these."""
_MOST_STOPS = 16
_LARGEST_SEED = 2**63


def _decimal(lowest: float, highest: float) -> Callable[[object], Any]:
    def check(value: object) -> float:
        if is_number(value) and lowest <= value <= highest:
            return float(value)
        raise ValueError(f"must be a number from {lowest:g} to {highest:g}")

    return check


def _whole(lowest: int, highest: int, range_text: str) -> Callable[[object], Any]:
    def check(value: object) -> int:
        if is_number(value) and lowest <= value < highest and value == int(value):
            return int(value)
        raise ValueError(f"must be a whole number{range_text}")

    return check


def _word(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError("must be a text")


def _stops(value: object) -> str | list[object]:
    if isinstance(value, str) and value:
        return value
    if is_list(value) and len(value) <= _MOST_STOPS and all(isinstance(text, str) for text in value):
        return value
    raise ValueError(f"must be a text or a list of at most {_MOST_STOPS} texts")


def _biases(value: object) -> dict[str, float]:
    if not is_object(value) or not all(is_number(bias) and -100 <= bias <= 100 for bias in value.values()):
        raise ValueError("must be an object of numbers from -100 to 100")
    return {token: int(bias) if bias == int(bias) else bias for token, bias in sorted(value.items())}


SETTINGS: Mapping[str, Callable[[object], Any]] = {
    "frequency_penalty": _decimal(-2, 2),
    "logit_bias": _biases,
    "max_completion_tokens": _whole(1, 10**9, " from 1"),
    "max_tokens": _whole(1, 10**9, " from 1"),
    "presence_penalty": _decimal(-2, 2),
    "reasoning_effort": _word,
    "seed": _whole(-_LARGEST_SEED, _LARGEST_SEED, " of 64 bits"),
    "service_tier": _word,
    "stop": _stops,
    "temperature": _decimal(0, 2),
    "top_p": _decimal(0, 1),
    "verbosity": _word,
}
"""What changes an answer without being asked about, each with the check that brings a value into its one form."""

PASSED_ON = frozenset({*QUESTION, *INERT, *SETTINGS})
"""Every field of a chat request that a model may get to see."""
_PINNED_AS = {
    "max_completion_tokens": "max_tokens", "max_tokens": "max_tokens", "reasoning_effort": "reasoning_effort",
    "seed": "seed", "temperature": "temperature",
}  # fmt: skip


def requested_identity(rule: RequestSettings) -> Identity:
    """Return what an identity says about settings: nothing if they are pinned."""
    return {"settings": rule} if rule == AS_REQUESTED else {}


def checked_settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a request in their one form, so that equal ones are equal bytes; null means not given.

    Raises:
        ValueError: a value cannot be used; the message begins with the field's name.
    """
    settings: dict[str, Any] = {}
    for name in sorted(body.keys() & SETTINGS.keys()):
        if body[name] is not None:
            try:
                settings[name] = SETTINGS[name](body[name])
            except ValueError as error:
                raise ValueError(f"{name} {error}; got {body[name]!r:.60}") from error
    limits = {settings.get("max_tokens"), settings.get("max_completion_tokens")} - {None}
    if len(limits) > 1:
        raise ValueError("max_tokens and max_completion_tokens are one limit under two names; give one of them")
    return settings


def overridden(body: Mapping[str, Any], identities: Mapping[str, Identity]) -> dict[str, str]:
    """Return the settings of a request that differ from what a model was calibrated with, by name, each with the remedies.

    Args:
        identities: of both models, by role; where they say that requests keep their own settings, nothing differs.
    """
    names = sorted(body.keys() & SETTINGS.keys())
    if not names or all(identity.get("settings") == AS_REQUESTED for identity in identities.values()):
        return {}
    differing: dict[str, str] = {}
    for name in names:
        pinned = {role: identity.get(_PINNED_AS.get(name, "")) for role, identity in identities.items()}
        if body[name] is not None and any(value != body[name] for value in pinned.values()):
            differing[name] = _remedies(name, body[name], pinned)
    return differing


@dataclass(slots=True)
class RequestFields:
    """What requests of a log had in the fields that an answer depends on; see `compared_fields`."""

    _requests: int = 0
    _given: Counter[str] = field(default_factory=Counter[str])
    _values: defaultdict[str, list[JSON]] = field(default_factory=lambda: defaultdict[str, list[JSON]](list))

    def add(self, body: Mapping[str, Any]) -> None:
        """Take a further request into account."""
        self._requests += 1
        for name, value in compared_fields(body).items():
            self._given[name] += 1
            if value not in self._values[name] and len(self._values[name]) <= _MOST_VALUES:
                self._values[name].append(value)

    def document(self, identities: Mapping[str, Identity]) -> dict[str, Any]:
        """Return them as `requests` of a log's identities: by field, the values, null for requests without it.

        Where settings are pinned they are not listed: a request that differs is then other traffic, whatever was logged.
        """
        pinned = any(identity.get("settings") != AS_REQUESTED for identity in identities.values())
        names = sorted(name for name in self._values if not (pinned and name in SETTINGS))
        rule: RequestSettings = "pinned" if pinned else AS_REQUESTED
        return {"requests": {"settings": rule, "fields": {name: self._listed(name) for name in names}}}

    def _listed(self, name: str) -> JSON:
        values = sorted(self._values[name], key=repr)
        if len(values) > _MOST_VALUES:
            return ANY
        return [None, *values] if self._given[name] < self._requests else values


def compared_fields(body: Mapping[str, Any]) -> dict[str, JSON]:
    """Return the fields of a request that are compared with those of the log, by name; null means not given.

    A setting is compared by its value. Tools and schemas differ from question to question, as messages do: of these it
    counts whether there are any, and of which type.
    """
    fields: dict[str, JSON] = {}
    for name, value in checked_settings(body).items():
        fields["max_tokens" if name in _LIMITS else name] = (
            [value] if name == "stop" and isinstance(value, str) else value
        )
    for name in _OF_QUESTION:
        value = body.get(name)
        if value is not None and value != []:
            typed = value.get("type", True) if is_object(value) else True
            fields[name] = value if isinstance(value, str | bool) else typed
    return fields


def unlogged_fields(body: Mapping[str, Any], certified: Mapping[str, Any] | Literal["unbound"]) -> list[str]:
    """Return the fields whose value no request of the calibration log had, in words, if the certificate records those.

    Args:
        certified: the identities of the certificate.
    """
    requests = None if certified == "unbound" else certified.get("requests")
    if requests is None:
        return []
    given, logged = compared_fields(body), requests["fields"]
    pinned = requests["settings"] != AS_REQUESTED
    names = sorted(name for name in {*given, *logged} if not (pinned and name in SETTINGS))
    return [
        _shown(name, given.get(name))
        for name in names
        if (known := logged.get(name, [None])) != ANY and given.get(name) not in known
    ]


def _shown(name: str, value: JSON) -> str:
    return f"no {name}" if value is None else name if value is True else f"{name} {value!r:.60}"


def settings_reason(
    body: Mapping[str, Any],
    identities: Mapping[str, Identity],
    certified: Mapping[str, Any] | Literal["unbound"],
) -> str | None:
    """Return why a request has no guarantee because of its settings, tools or schemas; None if these are the log's.

    Args:
        identities: of the models, by role.
        certified: the identities of the certificate.
    """
    if differing := overridden(body, identities):
        return f"the request overrides {', '.join(differing)}"
    unlogged = unlogged_fields(body, certified)
    return f"no request of the calibration log had {', '.join(unlogged)}" if unlogged else None


def _remedies(name: str, value: object, pinned: Mapping[str, object]) -> str:
    shown = {role: "not set" if setting is None else repr(setting) for role, setting in pinned.items()}
    both = len(set(shown.values())) == 1
    values = next(iter(shown.values())) if both else ", ".join(f"{role}: {setting}" for role, setting in shown.items())
    leave = f"leave it out or send {values}" if both and values != "not set" else "leave it out"
    return (
        f"{name} is {value!r:.60}, and the pinned value is {values:.80}; {leave}, or let requests keep their own settings: "
        f'settings = "{AS_REQUESTED}" in [task], then collect and calibrate again'
    )


# --- Chat completions ---


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


def message_of(reply: Reply, settings: Settings, spent: Spent) -> dict[str, Any]:
    """Return the assistant's message, with text in it; raises as `completion_of` does."""
    return completion_of(reply, settings, spent).message


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
