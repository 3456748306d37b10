"""What a configuration of the right types may still get wrong: each mistake is refused with its line.

Knows nothing of how a file is read.
"""

import re
from collections.abc import Callable
from ipaddress import ip_network
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.monitoring.panels import PANELS
from conformal_arbitrage.scorers.human import HumanConfig
from conformal_arbitrage.scorers.kinds import ROLES, ModelConfig
from conformal_arbitrage.upstream.webhook import url_mistake

if TYPE_CHECKING:
    from conformal_arbitrage.live.config import Config, PolicyConfig

_POSITIVE = (
    "concurrency", "requests_per_minute", "tokens_per_minute", "attempts", "deadline", "timeout", "samples", "max_tokens",
)  # fmt: skip


def check_config(config: "Config", source: Path, text: str) -> None:
    """Refuse values that have the right type and yet cannot be used."""

    def refusal(place: tuple[str, ...], key: str | None, problem: str) -> ConfigError:
        return ConfigError(f"{source}: line {line_of(text, place, key)}: {problem}")

    for name in config.models:
        if not re.fullmatch(r"[\w-]+", name):
            raise refusal(("models", name), None, f"a model's name has letters, digits, _ and -; got {name!r}")
    for section, model in config.sections.items():
        place = tuple(section.split("."))
        for name in _POSITIVE:
            value = getattr(model, name, None)
            if value is not None and not value > 0:
                raise refusal(place, name, f"{name} must be above 0; got {value!r}")
        if (mistake := model.mistake()) is not None:
            raise refusal(place, mistake[0], f"[{section}] {mistake[1]}")
        for name in model.candidate_models():
            if name not in config.models or not config.models[name].answers_text or f"models.{name}" == section:
                known = ", ".join(config.models) or "none"
                problem = f"candidates_of names other sections [models.NAME] of kind 'chat', of {known}; got {name!r}"
                raise refusal(place, "candidates_of", f"[{section}] {problem}")
        for role, forms in config.uses(section).items():
            if (problem := model.problem(role, forms)) is not None:
                raise refusal(place, *problem)
    _check_cascade(config, refusal)
    for policy in ("", *config.policies):
        _check_pair(config, policy, refusal)
    _check_gateway(config, source, text)
    _check_webhooks(config, refusal)
    _check_reviews(config, refusal)
    if not config.alpha > 0:
        raise refusal((), "alpha", f"alpha must be above 0; got {config.alpha!r}")


def _check_cascade(config: "Config", refusal: Callable[..., ConfigError]) -> None:
    """Refuse a cascade of too few or unknown models, and policies that would use one that is not there."""
    if config.cascade is not None:
        names = config.cascade.models
        if len(names) < 2 or len(set(names)) < len(names):
            problem = f"models names at least two models, each once, the Guardian last; got {list(names)}"
            raise refusal(("cascade",), "models", f"[cascade] {problem}")
        for name in names:
            if name not in config.models:
                known = ", ".join(config.models) or "none"
                raise refusal(
                    ("cascade",), "models", f"[cascade] there is no section [models.{name}]; there are {known}"
                )
    for policy, settings in config.policies.items():
        if settings.cascade and config.cascade is None:
            problem = 'cascade = true needs a section [cascade] with models = ["CHEAP", ..., "GUARDIAN"]'
            raise refusal(("policies", policy), "cascade", f"[policies.{policy}] {problem}")
        if settings.cascade and (settings.primary or settings.guardian or settings.sticky):
            problem = (
                "cascade = true takes its models from [cascade] and has no sessions; drop primary, guardian and sticky"
            )
            raise refusal(("policies", policy), "cascade", f"[policies.{policy}] {problem}")


def _check_pair(config: "Config", policy: str, refusal: Callable[..., ConfigError]) -> None:
    """Refuse a policy that names no pair, or two models of one name; without a policy, the pair of the short form."""
    pair: list[ModelConfig] = []
    for role in ROLES:
        section = config.section_of(policy, role) if policy else role
        if section not in config.sections and (policy or not config.models):
            if section != role:
                known = ", ".join(config.models) or "none"
                raise refusal(("policies", policy), role, f"there is no section [{section}]; there are {known}")
            own = f", or {role} = NAME in [policies.{policy}]" if config.models else ""
            raise refusal((), None, f"the file lacks a section [{role}] with at least kind ={own}")
        pair += [config.sections[section]] if section in config.sections else []
    if len(pair) == 2 and _share_a_name(*pair):
        place = tuple((config.section_of(policy, "guardian") if policy else "guardian").split("."))
        problem = f"both {pair[1].kind}s are called {pair[1].label!r}; rename one, since replies and certificates are "
        raise refusal(place, "name", f"{problem}bound to the name")


_LONGEST_DRAIN = 3600
_LIMITS = (
    "max_body", "max_questions", "max_actions", "max_action_length", "max_depth", "max_in_flight", "requests_per_minute",
    "guardian_calls_per_minute", "guardian_cost_per_hour", "audit_deadline", "max_header", "header_timeout", "body_timeout",
    "body_rate", "retain_days", "idle_timeout", "write_timeout", "max_connections", "connections_per_address",
    "database_connections",
)  # fmt: skip


def _check_gateway(config: "Config", source: Path, text: str) -> None:
    """Refuse limits that would admit nothing, or anything."""
    gateway = config.gateway

    def refusal(name: str, rule: str) -> ConfigError:
        line = line_of(text, ("gateway",), name)
        return ConfigError(f"{source}: line {line}: {name} must be {rule}; got {getattr(gateway, name)!r}")

    for name in _LIMITS:
        value = getattr(gateway, name)
        if value is not None and not 0 < value < float("inf"):
            raise refusal(name, "above 0 and finite (leave it out for the default)")
    if gateway.drain is not None and not 0 <= gateway.drain <= _LONGEST_DRAIN:
        raise refusal("drain", f"from 0 to {_LONGEST_DRAIN} seconds")
    if not 0 < gateway.grace <= _LONGEST_DRAIN:
        raise refusal("grace", f"from 1 to {_LONGEST_DRAIN} seconds")
    if not 0 <= gateway.port <= 65535:
        raise refusal("port", "from 0 to 65535 (0 picks a free one)")
    for name, policy in config.policies.items():
        if policy.group is not None and not re.fullmatch(r"metadata\.\S+|key", policy.group):
            line = line_of(text, ("policies", name), "group")
            rule = 'group must be "metadata.NAME", a field of the metadata of a request, or "key", the label of its API key'
            raise ConfigError(f"{source}: line {line}: {rule}; got {policy.group!r}")
        if not 0 <= policy.audit_rate <= 1:
            line = line_of(text, ("policies", name), "audit_rate")
            rule = "audit_rate must be a share, from 0 to 1 (0.05 for 5 %)"
            raise ConfigError(f"{source}: line {line}: {rule}; got {policy.audit_rate!r}")
        if (problem := _renewal_problem(policy) or _service_problem(policy)) is not None:
            line = line_of(text, ("policies", name), problem[0])
            raise ConfigError(f"{source}: line {line}: {problem[1]}")
    if gateway.public_url is not None and not re.fullmatch(r"https?://[\w.\-\[\]:]+", gateway.public_url):
        raise refusal("public_url", "where people reach the console, such as https://gate.example, without a path")
    if not 0 <= gateway.live_share < 1:
        raise refusal("live_share", "at least 0 and below 1")
    if not all(map(_is_network, gateway.trusted_proxies)):
        raise refusal("trusted_proxies", "addresses, or networks such as 10.0.0.0/8")
    calls, audited = gateway.guardian_calls_per_minute, any(one.audit_rate > 0 for one in config.policies.values())
    if calls is not None and audited and calls * (1 - gateway.live_share) < 1:
        remedy = f"at least {ceil(1 / (1 - gateway.live_share))}, or live_share lower, since audits could never be made"
        raise refusal("guardian_calls_per_minute", remedy)


def _renewal_problem(policy: "PolicyConfig") -> tuple[str, str] | None:
    """Return the key of a policy that cannot be renewed as it says, and why."""
    automatic = {"renew": policy.renew == "scheduled", "tighten": policy.tighten}
    if policy.log is not None and policy.certificate is None:
        return "log", "log is the log of the certificate that the policy starts with; name that one too"
    for key in (key for key, wanted in automatic.items() if wanted):
        if policy.mode == "enforce" and not policy.audit_rate:
            return key, f"{key} needs rows that were not selected by their scores; set audit_rate above 0"
        if policy.sticky is not None or policy.cascade:
            return key, f"{key} is for one pair of models and single queries; calibrate by hand, from an export"
    return None


def _service_problem(policy: "PolicyConfig") -> tuple[str, str] | None:
    """Return what a policy's age or guard gets wrong: the key, and why; None if nothing."""
    if policy.max_age is not None and not 0 < policy.max_age < float("inf"):
        return "max_age", f"max_age must be above 0 days and finite; got {policy.max_age!r}"
    if policy.max_decisions is not None and policy.max_decisions < 1:
        return "max_decisions", f"max_decisions must be 1 or more; got {policy.max_decisions!r}"
    if not 0 < policy.fresh_days < float("inf"):
        return "fresh_days", f"fresh_days must be above 0 days and finite; got {policy.fresh_days!r}"
    if policy.guard and not (policy.audit_rate > 0 and policy.mode == "enforce"):
        return "guard", 'guard = true learns from audits: set audit_rate above 0 with mode = "enforce", or leave it out'
    return None


def _check_webhooks(config: "Config", refusal: Callable[..., ConfigError]) -> None:
    """Refuse a webhook without a name for metrics, a URL, a secret, or anything to be told of."""
    for name, webhook in config.gateway.webhooks.items():
        place = ("gateway", "webhooks", name)
        if not re.fullmatch(r"[\w-]+", name):
            raise refusal(place, None, f"a webhook's name has letters, digits, _ and -; got {name!r}")
        if (mistake := url_mistake(webhook.url)) is not None:
            raise refusal(place, "url", f"[gateway.webhooks.{name}] url {mistake}")
        if (webhook.secret_env is None) == (webhook.secret_file is None):
            problem = "needs secret_env, the environment variable with its secret, or secret_file, a file with it"
            raise refusal(place, "secret_file", f"[gateway.webhooks.{name}] {problem}, and not both")
        if not webhook.events:
            raise refusal(place, "events", f"[gateway.webhooks.{name}] events is empty; leave it out for all events")


_LONGEST_WAIT = 55.0
"""Seconds that a request can be held: proxies give up after 60."""


def _check_reviews(config: "Config", refusal: Callable[..., ConfigError]) -> None:
    """Refuse a team without people, showing what nobody sees, and times that callers or reviewers cannot wait."""
    for name, model in config.sections.items():
        if isinstance(model, HumanConfig) and model.primary_choice == "shown" and model.name not in config.teams:
            problem = 'primary_choice = "shown" is for a team; the terminal shows nothing of the Primary'
            raise refusal(tuple(name.split(".", 1)), "primary_choice", f"[{name}] {problem}")
    for name, team in config.teams.items():
        if not team.members:
            raise refusal(("teams", name), "members", f"[teams.{name}] members is empty; name the labels of API keys")
    for name, policy in config.policies.items():
        place, review = ("policies", name, "review"), policy.review
        limits = {
            "wait": _LONGEST_WAIT,
            "undo": 60.0,
            "lease": 1200.0,
            "deadline": 30 * 86400.0,
            "audit_spread": 86400.0,
        }
        for key, most in limits.items():
            value, least = getattr(review, key), 0.0 if key in ("undo", "audit_spread") else 1.0
            if not least <= value <= most:
                problem = f"{key} must be from {least:g} to {most:g} seconds; got {value!r}"
                raise refusal(place, key, f"[policies.{name}.review] {problem}")
        if review.late == "fallback" and config.task.safe_action is None:
            problem = 'late = "fallback" gives the safe action; set safe_action in [task], or use "pending"'
            raise refusal(place, "late", f"[policies.{name}.review] {problem}")
        if (mistake := _grading_mistake(config, name)) is not None:
            section, key, problem = mistake
            raise refusal(("policies", name, *section), key, f"[{'.'.join(('policies', name, *section))}] {problem}")


def _grading_mistake(config: "Config", name: str) -> tuple[tuple[str, ...], str, str] | None:
    """Return what a policy gets wrong about people who grade: the subsection, the key, and why; None if nothing."""
    policy, graders = config.policies[name], ("graders",)
    if policy.grading == "by hand":
        unused = policy.graders != type(policy.graders)()
        return (graders, "team", 'is used with grading = "review"; set that, or drop the section') if unused else None
    if config.form_of(name) != "text" or policy.cascade:
        return (), "grading", 'grading = "review" is for two answers in free text: set form = "text", without cascade'
    if policy.content != "full":
        return (), "grading", 'grading = "review" shows people both answers, which takes content = "full"'
    if policy.graders.team not in config.teams and (policy.graders.team is not None or len(config.teams) != 1):
        known = ", ".join(config.teams) or "none"
        return graders, "team", f"team names a section [teams.NAME], of {known}; got {policy.graders.team!r}"
    if policy.graders.panel not in PANELS:
        return graders, "panel", f"panel must be 1, 3 or 5; got {policy.graders.panel!r}"
    if not 0 <= policy.graders.overlap <= 1:
        return graders, "overlap", f"overlap must be a share, from 0 to 1; got {policy.graders.overlap!r}"
    return None


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True


def _share_a_name(one: ModelConfig, other: ModelConfig) -> bool:
    """Tell whether two different things would have the same identity."""
    if one.kind != other.kind or one.alias is None or other.alias is None:
        return False
    return one.alias[0] == other.alias[0] and one.alias[1] != other.alias[1]


def line_of(text: str, section: tuple[str, ...], key: str | None) -> int:
    """Return the line of a key, or of its section's header if the key is absent; 1 if both are."""
    here: tuple[str, ...] = ()
    header = 1
    for number, line in enumerate(text.splitlines(), start=1):
        heading = re.match(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$", line)
        if heading is not None:
            here = tuple(part.strip().strip("\"'") for part in heading[1].split("."))
            header = number if here == section else header
            if key is not None and here == (*section, key):
                return number
        elif here == section and key is not None and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return header
