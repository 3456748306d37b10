"""The fields of a chat request: the question itself, the settings it may carry, and fields that cannot change an answer.

Settings are treated alike wherever a request comes from: collect, ask, the gateway, shadow mode and audits. Where requests
keep their own ("as requested"), a setting is a part of the question; where settings are pinned, a request that differs is
other traffic than what was calibrated.

Knows nothing of endpoints or HTTP.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

from conformal_arbitrage.scorers.base import Identity
from conformal_arbitrage.types import is_list, is_object
from conformal_arbitrage.upstream.base import is_number

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
    """Return what an identity says about settings: nothing if they are pinned, as in certificates of earlier releases."""
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
        body: the request.
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


def logged_settings(bodies: Iterable[Mapping[str, Any]], identities: Mapping[str, Identity]) -> dict[str, Any]:
    """Return the names of the settings in the requests of a log, as `requests` of its identities.

    Empty where settings are pinned: a request that differs is then other traffic, whatever its name.
    """
    if any(identity.get("settings") != AS_REQUESTED for identity in identities.values()):
        return {}
    return {"requests": {"settings": sorted({name for body in bodies for name in given_settings(body)})}}


def unlogged_settings(body: Mapping[str, Any], identities: Mapping[str, Any]) -> list[str]:
    """Return the settings of a request that no request of the calibration log had, if the certificate records those.

    Args:
        body: the request.
        identities: those of the certificate.
    """
    logged = identities.get("requests", {}).get("settings")
    if logged is None:
        return []
    known = {*logged, *(_LIMITS if _LIMITS & {*logged} else ())}
    return [name for name in given_settings(body) if name not in known]


def settings_reason(
    body: Mapping[str, Any], differing: Collection[str], certified: Mapping[str, Any] | Literal["unbound"]
) -> str | None:
    """Return why the settings of a request leave it without a guarantee; None if they do not.

    Args:
        body: the request.
        differing: the settings that differ from pinned ones.
        certified: the identities of the certificate.
    """
    if differing:
        return f"the request overrides {', '.join(differing)}"
    unlogged = [] if certified == "unbound" else unlogged_settings(body, certified)
    return f"no request of the calibration log set {', '.join(unlogged)}" if unlogged else None


def given_settings(body: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that a request gives, sorted; null means not given."""
    return sorted(name for name in body.keys() & SETTINGS.keys() if body[name] is not None)


def _remedies(name: str, value: object, pinned: Mapping[str, object]) -> str:
    shown = {role: "not set" if one is None else repr(one) for role, one in pinned.items()}
    both = len(set(shown.values())) == 1
    values = next(iter(shown.values())) if both else ", ".join(f"{role}: {one}" for role, one in shown.items())
    leave = f"leave it out or send {values}" if both and values != "not set" else "leave it out"
    return (
        f"{name} is {value!r:.60}, and the pinned value is {values:.80}; {leave}, or let requests keep their own settings: "
        f'settings = "{AS_REQUESTED}" in [task], then collect and calibrate again'
    )
