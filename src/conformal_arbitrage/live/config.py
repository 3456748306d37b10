"""arbitrage.toml: its sections as typed settings, the checks with line and nearest key, and what `init` writes."""

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from ipaddress import ip_network
from math import ceil
from pathlib import Path
from typing import Any, Literal, Union, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs

from conformal_arbitrage.core.risk import GuardianSees
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.models.chat import ChatConfig
from conformal_arbitrage.models.completions import RequestSettings
from conformal_arbitrage.models.kinds import ROLES, Form, ModelConfig, Pinned, Section
from conformal_arbitrage.models.others import BUILT_IN, HumanConfig, kind_named, kind_names
from conformal_arbitrage.models.webhook import WebhookEndpoint, signing_keys, url_mistake
from conformal_arbitrage.monitoring.lines import AlarmLine
from conformal_arbitrage.monitoring.votes import PANELS
from conformal_arbitrage.scorelog.tables import write_text
from conformal_arbitrage.store.outbox import WebhookEvent
from conformal_arbitrage.types import Role, as_object

# --- The sections of arbitrage.toml about people who answer as a Guardian, or grade answers ---


class TeamConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """People who answer through the review queue: as a Guardian of the same name, or by grading answers.

    Attributes:
        members: labels of their API keys.
        leads: labels of those who decide what a panel cannot; without any, such a question has no verdict.
    """

    members: tuple[str, ...]
    leads: tuple[str, ...] = ()


class ReviewConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How callers of a policy, and people who answer as its Guardian, wait for each other.

    Times are in seconds.

    Attributes:
        wait: how long a request is held.
        late: what a caller gets then: that people are still deciding ("pending"), or the safe action ("fallback").
        deadline: when a question is given up; audits are not.
        lease: how long a reviewer holds a question without a sign of life.
        undo: how long a vote can be taken back, before it counts.
        audit_spread: over which time audits are mixed among the questions of callers.
    """

    wait: float = 50.0
    late: Literal["pending", "fallback"] = "pending"
    deadline: float = 86400.0
    lease: float = 90.0
    undo: float = 5.0
    audit_spread: float = 3600.0


class GradersConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who grades both answers of a policy in free text, and how.

    Attributes:
        team: a section [teams.NAME]; unless set, the only one.
        panel: how many people grade each pair of answers: 1, 3 or 5; the median of their grades counts.
        instructions: shown above every pair.
        overlap: the share of pairs that one more person is shown, to measure how far people agree.
    """

    team: str | None = None
    panel: int = 1
    instructions: str = ""
    overlap: float = 0.0


# --- What a configuration of the right types may still get wrong ---


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
    _check_gateway(config, refusal)
    for name, policy in config.policies.items():
        if (problem := _policy_problem(policy)) is not None:
            raise refusal(("policies", name), *problem)
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
            named = f", or {role} = NAME in [policies.{policy}]" if config.models else ""
            raise refusal((), None, f"the file lacks a section [{role}] with at least kind ={named}")
        pair += [config.sections[section]] if section in config.sections else []
    if len(pair) == 2 and _share_a_name(*pair):
        place = tuple((config.section_of(policy, "guardian") if policy else "guardian").split("."))
        problem = f"both {pair[1].kind}s are called {pair[1].label!r}; rename one, since replies and certificates are "
        raise refusal(place, "name", f"{problem}bound to the name")


_LONGEST_DRAIN = 3600
_LIMITS = (
    "max_body", "max_questions", "max_actions", "max_action_length", "max_depth", "max_in_flight", "max_waiting_per_key",
    "requests_per_minute", "guardian_calls_per_minute", "guardian_cost_per_hour", "audit_deadline", "max_header",
    "header_timeout", "body_timeout", "body_rate", "retain_days", "idle_timeout", "write_timeout", "max_connections",
    "connections_per_address", "database_connections", "primary_timeout",
)  # fmt: skip


def _check_gateway(config: "Config", refusal: Callable[..., ConfigError]) -> None:
    """Refuse limits that would admit nothing, or anything."""
    gateway = config.gateway

    def refused(name: str, rule: str) -> ConfigError:
        return refusal(("gateway",), name, f"{name} must be {rule}; got {getattr(gateway, name)!r}")

    for name in _LIMITS:
        value = getattr(gateway, name)
        if value is not None and not 0 < value < float("inf"):
            raise refused(name, "above 0 and finite (leave it out for the default)")
    rules = (
        ("drain", gateway.drain is None or 0 <= gateway.drain <= _LONGEST_DRAIN, f"from 0 to {_LONGEST_DRAIN} seconds"),
        ("grace", 0 < gateway.grace <= _LONGEST_DRAIN, f"from 1 to {_LONGEST_DRAIN} seconds"),
        ("port", 0 <= gateway.port <= 65535, "from 0 to 65535 (0 picks a free one)"),
        ("public_url", gateway.public_url is None or re.fullmatch(r"https?://[\w.\-\[\]:]+", gateway.public_url),
         "where people reach the console, such as https://gate.example, without a path"),
        ("live_share", 0 <= gateway.live_share < 1, "at least 0 and below 1"),
        ("trusted_proxies", all(map(_is_network, gateway.trusted_proxies)), "addresses, or networks such as 10.0.0.0/8"),
    )  # fmt: skip
    for name, holds, rule in rules:
        if not holds:
            raise refused(name, rule)
    calls, left = gateway.guardian_calls_per_minute, 1 - gateway.live_share
    if calls is not None and calls * left < 1 and any(policy.audit_rate > 0 for policy in config.policies.values()):
        rule = f"at least {ceil(1 / left)}, or live_share lower, since audits could never be made"
        raise refused("guardian_calls_per_minute", rule)


def _policy_problem(policy: "PolicyConfig") -> tuple[str, str] | None:
    """Return the key that a policy gets wrong by itself, and why; None if nothing."""
    if policy.group is not None and not re.fullmatch(r"metadata\.\S+|key", policy.group):
        rule = '"metadata.NAME", a field of the metadata of a request, or "key", the label of its API key'
        return "group", f"group must be {rule}; got {policy.group!r}"
    if not 0 <= policy.audit_rate <= 1:
        return "audit_rate", f"audit_rate must be a share, from 0 to 1 (0.05 for 5 %); got {policy.audit_rate!r}"
    return _renewal_problem(policy) or _service_problem(policy)


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
    if policy.session is not None and policy.sticky is not None:
        return "session", "session is for single decisions; with sticky whole sessions are decided, so leave it out"
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


def _share_a_name(first: ModelConfig, other: ModelConfig) -> bool:
    """Tell whether two different things would have the same identity."""
    if first.kind != other.kind or first.alias is None or other.alias is None:
        return False
    return first.alias[0] == other.alias[0] and first.alias[1] != other.alias[1]


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


# --- arbitrage.toml ---


FILE = "arbitrage.toml"
SECTIONS: tuple[Section, ...] = ("primary", "guardian", "judge", "stronger")


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the models are asked for, and what to do if the Guardian fails.

    Attributes:
        form: choices from menus, or free text.
        settings: in text form, whether requests keep their own temperature, limits, seed, stop and the like ("as
            requested"), or must leave them as configured ("pinned"). Part of the identity.
        shuffle_options: whether each question's options are shown in an order of its own.
        safe_action: the action to take if the Guardian fails.
        safe_answer: the answer to give if the Guardian fails, in text form.
    """

    form: Form = "menu"
    settings: RequestSettings = "pinned"
    shuffle_options: bool = False
    safe_action: str | None = None
    safe_answer: str | None = None


class CascadeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several models under one promise.

    Attributes:
        models: names of sections [models.NAME], the cheap ones first and the Guardian last.
    """

    models: tuple[str, ...]


KEY_LABEL = "key"
"""The source of groups that callers do not choose: the label of their API key."""


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy that the gateway serves.

    Attributes:
        primary, guardian: the names of its models, sections [models.NAME]; [primary] and [guardian] unless set.
        cascade: whether it is served by the models of [cascade] in place of a pair.
        certificate: the file to start with; later ones may be installed over HTTP. Shadow mode needs none.
        form: choices from menus, or free text; as in [task] unless set.
        mode: "enforce" the rule, or "shadow": ask both, answer with the Guardian's choice, record the Primary's.
        audit_rate: in enforce mode, the share of decisions that are audited, by the Guardian in the background if need be.
        alarm_line: the loss whose crossing puts the policy into safe mode: the one that luck in calibration cannot
            explain, or "alpha" itself.
        max_age: days after its installation when a certificate expires; unless set, it does not.
        max_decisions: decisions under it after which it expires; unless set, it does not.
        fresh_days: the last days in which enough audits have to be known for the evidence not to be stale.
        at_expiry: what happens then: decisions have no guarantee any more ("none"), or the policy goes into shadow mode.
        guard: whether audited losses raise the threshold above the certificate's, and never lower it below.
        content: what the record keeps of questions and answers.
        expose: what callers see of a decision; relaxation and margin only with "full".
        strict: in text form, refuse a request whose settings, tools or schemas are not those that were calibrated on,
            instead of answering it without a guarantee.
        callers_grade: whether keys of scope call may send `grades`, which recalibration uses, for their own decisions.
        session: where a request names its session, whose audited decisions count once an hour since neighbours are alike:
            "arbitrage.session", or "user". Unless set, every one counts; so callers cannot merge their own.
        sticky: "session" lets the first turn of a session choose the model for all its turns; free text only.
        session_idle: seconds after its last turn when a session is over.
        log: the log that the certificate was made from; its rows are kept for the first renewal.
        renew: "scheduled" lets the gateway renew the certificate by itself, at doubled numbers of rows.
        group: where a request names its group, "metadata.NAME", or "key" for the label of the caller's API key; for a
            certificate by groups, or a learned score.
        tighten: whether the gateway may raise the relaxation by itself while the policy is amber because of its losses.
        aliases: further model names for this policy.
        allow: tolerated differences between certificate and models, which forfeit the guarantee.
        review: how long callers and people wait, if people answer as the Guardian, or grade.
        grading: "review" lets people grade both answers, in free text; "by hand" leaves that to `records grade`.
        graders: who does so, and how.
    """

    primary: str | None = None
    guardian: str | None = None
    cascade: bool = False
    certificate: str | None = None
    form: Form | None = None
    mode: Literal["enforce", "shadow"] = "enforce"
    audit_rate: float = 0.0
    alarm_line: AlarmLine = "luck"
    max_age: float | None = None
    max_decisions: int | None = None
    fresh_days: float = 30.0
    at_expiry: Literal["none", "shadow"] = "none"
    guard: bool = False
    content: Literal["full", "hashed", "off"] = "hashed"
    expose: Literal["id", "full"] = "id"
    strict: bool = False
    callers_grade: bool = False
    session: Literal["arbitrage.session", "user"] | None = None
    sticky: Literal["session"] | None = None
    session_idle: float = 3600.0
    log: str | None = None
    renew: Literal["by hand", "scheduled"] = "by hand"
    group: str | None = None
    tighten: bool = False
    aliases: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    review: ReviewConfig = ReviewConfig()
    grading: Literal["by hand", "review"] = "by hand"
    graders: GradersConfig = GradersConfig()

    def ungradable(self, form: Form) -> str | None:
        """Return why nobody can grade the audits of this policy; None if someone can, or there are none."""
        if form == "menu" or self.audit_rate == 0 or self.content == "full" or self.callers_grade:
            return None
        return (
            f'audits cannot be graded: content = "{self.content}" keeps no answers; set content = "full", or '
            "callers_grade = true if callers send grades, or audit_rate = 0"
        )


class WebhookConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receiver of signed messages about what happens to policies.

    Attributes:
        url: where they are posted.
        secret_env: the environment variable with the secret that signs them; several, separated by commas, in a rotation.
        secret_file: a file with it instead, beside the configuration.
        events: what it is told of; unless set, everything.
    """

    url: str
    secret_env: str | None = None
    secret_file: str | None = None
    events: tuple[WebhookEvent, ...] = get_args(WebhookEvent)


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the gateway listens, where it stores decisions, and its limits.

    Attributes:
        database: a file, or a postgresql:// URL; {NAME} in it is taken from the environment.
        database_connections: to PostgreSQL, for decisions; two more serve long reads.
        drain: seconds between SIGTERM and the end of service, in which /health/ready says 503; unless set, 5 where the
            gateway listens beyond loopback, since something there sends requests to it, and 0 on loopback.
        grace: seconds after that for requests in flight; those that take longer are cut off.
        primary_timeout: seconds for a Primary's call, after which the Guardian is asked; nothing is repeated before that.
        max_waiting_per_key: requests of one API key that are held until people have decided, or until another with the same
            Idempotency-Key has ended; beyond, callers are told to come back. Unless set, a quarter of `max_in_flight`.
        max_header: bytes of a request's first line and headers.
        header_timeout: seconds for them.
        body_timeout: seconds for the body, and one more for each `body_rate` bytes of it.
        idle_timeout: seconds that a connection may stay open without a request.
        write_timeout: seconds in which a caller must read something of what it is sent.
        max_connections: over all callers; beyond, those idle longest are closed.
        connections_per_address: and requests at once, for an address that a trusted proxy names.
        trusted_proxies: addresses or networks whose X-Forwarded-For header is believed.
        otel: whether to export traces and metrics with OpenTelemetry, as its standard variables say.
        requests_per_minute: per API key.
        guardian_calls_per_minute: over all callers and all gateways of the database; when the Primary is down, everything
            goes to the Guardian.
        guardian_cost_per_hour: dollars, over all callers and all gateways of the database.
        live_share: the share of the Guardian's limits that audits leave to live traffic.
        audit_deadline: seconds after which an audit whose Guardian cannot be asked is recorded as missing.
        retain_days: after how many days decisions are removed; unless set, they are kept.
        public_url: where people reach the console, such as https://gate.example; unless set, on this machine only.
        webhooks: who is told of installed certificates and the like, sections [gateway.webhooks.NAME].
    """

    host: str = "127.0.0.1"
    port: int = 8080
    database: str = "arbitrage.sqlite"
    database_connections: int = 4
    drain: float | None = None
    grace: int = 30
    primary_timeout: float = 20.0
    max_body: int = 1_000_000
    max_questions: int = 32
    max_actions: int = 255
    max_action_length: int = 10_000
    max_depth: int = 64
    max_in_flight: int = 512
    max_waiting_per_key: int | None = None
    max_header: int = 32_768
    header_timeout: float = 10.0
    body_timeout: float = 20.0
    body_rate: int = 1000
    idle_timeout: float = 75.0
    write_timeout: float = 60.0
    max_connections: int = 10_000
    connections_per_address: int = 1000
    trusted_proxies: tuple[str, ...] = ()
    otel: bool = False
    requests_per_minute: int | None = None
    guardian_calls_per_minute: int | None = None
    guardian_cost_per_hour: float | None = None
    live_share: float = 0.5
    audit_deadline: float = 86400.0
    retain_days: float | None = None
    public_url: str | None = None
    webhooks: dict[str, WebhookConfig] = {}

    @property
    def waiting_places(self) -> int:
        """How many requests of one key may be held."""
        return max(1, self.max_in_flight // 4) if self.max_waiting_per_key is None else self.max_waiting_per_key


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checked configuration.

    Attributes:
        primary, guardian: the pair of the short form.
        models: further models, for policies that name theirs.
        cascade: models under one promise, by name.
        teams: people who answer as a Guardian of the same name, or grade answers.
    """

    alpha: float = 0.05
    guardian_sees: GuardianSees = "all"
    task: Task = Task()
    primary: ModelConfig | None = None
    guardian: ModelConfig | None = None
    judge: ChatConfig | None = None
    stronger: ModelConfig | None = None
    models: dict[str, ModelConfig] = {}
    cascade: CascadeConfig | None = None
    gateway: GatewayConfig = GatewayConfig()
    teams: dict[str, TeamConfig] = {}
    policies: dict[str, PolicyConfig] = {}
    folder: str = ""

    def section(self, name: str) -> ModelConfig:
        """Return the model of a section: primary, guardian, judge, stronger or models.NAME.

        Raises:
            ConfigError: the configuration has no such section.
        """
        models = self.sections
        if name not in models:
            remedy = "add one, or choose a policy with --policy" if self.models else "add one"
            raise ConfigError(f"the configuration has no section [{name}]; {remedy}")
        return models[name]

    @property
    def sections(self) -> dict[str, ModelConfig]:
        """The models of the file, by section."""
        roles = {role: getattr(self, role) for role in SECTIONS}
        named = {f"models.{name}": model for name, model in self.models.items()}
        return {name: model for name, model in {**roles, **named}.items() if model is not None}

    def section_of(self, policy: str, role: Role) -> str:
        """Return the section of a policy's Primary or Guardian."""
        settings = self.policies[policy]
        if settings.cascade and self.cascade is not None:
            return f"models.{self.cascade.models[0 if role == 'primary' else -1]}"
        name = settings.primary if role == "primary" else settings.guardian
        return role if name is None else f"models.{name}"

    @property
    def cascade_sections(self) -> dict[str, str]:
        """The sections of the cascade's models by name, the Guardian's last; empty without a cascade.

        Raises:
            ConfigError: the file has no [cascade].
        """
        if self.cascade is None:
            raise ConfigError(
                'the configuration has no section [cascade]; add one with models = ["CHEAP", ..., "GUARDIAN"]'
            )
        return {name: f"models.{name}" for name in self.cascade.models}

    def uses(self, section: str) -> dict[Section, set[Form]]:
        """Return the roles that a section's model plays, and the forms it plays each in."""
        uses: dict[Section, set[Form]] = {}
        for role in SECTIONS:
            if role == section:
                uses[role] = {self.task.form} if role in ROLES else set(self.forms)
        for policy in self.policies:
            for role in ROLES:
                if self.section_of(policy, role) == section:
                    uses.setdefault(role, set()).add(self.form_of(policy))
        if self.cascade is not None and section.removeprefix("models.") in self.cascade.models:
            last = section == f"models.{self.cascade.models[-1]}"
            forms = uses.setdefault("guardian" if last else "primary", set())
            forms.update(self.form_of(name) for name, policy in self.policies.items() if policy.cascade)
            forms.add(self.task.form)
        return uses

    def for_policy(self, policy: str) -> "Config":
        """Return this configuration in the short form, with one policy and its pair alone.

        Raises:
            ConfigError: there is no such policy.
        """
        if policy not in self.policies:
            raise ConfigError(f"there is no policy {policy!r}; there are {', '.join(self.policies) or 'none'}")
        if self.policies[policy].cascade:
            return structs.replace(self, task=structs.replace(self.task, form=self.form_of(policy)))
        primary = self.section(self.section_of(policy, "primary"))
        return structs.replace(
            self,
            primary=primary,
            guardian=self.section(self.section_of(policy, "guardian")),
            task=structs.replace(self.task, form=self.form_of(policy)),
            policies={policy: structs.replace(self.policies[policy], primary=None, guardian=None)},
            models={name: self.models[name] for name in primary.candidate_models()},
        )

    def form_of(self, policy: str) -> Form:
        """Return what a policy answers with: choices from menus, or free text."""
        return self.policies[policy].form or self.task.form

    @property
    def forms(self) -> frozenset[Form]:
        """The forms of the task and of all policies."""
        return frozenset({self.task.form, *map(self.form_of, self.policies)})


@cache
def _config_type(kinds: tuple[type[ModelConfig], ...]) -> type[Config]:
    """Return `Config` with its models decoded as one of these kinds."""
    model: Any = Union[kinds]  # noqa: UP007 - of a tuple
    struct: Any = msgspec.defstruct(
        "Config",
        [
            *((role, model | None, None) for role in ("primary", "guardian", "stronger")),
            ("models", dict[str, model], {}),
        ],
        bases=(Config,),
        module=__name__,
        frozen=True,
        kw_only=True,
    )
    return struct


def read_config(path: str | Path = FILE) -> Config:
    """Read and check a configuration.

    Raises:
        ConfigError: with the file, the line and the remedy.
    """
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror}); `arbitrage init` writes one") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not UTF-8 text ({error.reason}); save it again as UTF-8") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
    if "folder" in document:
        raise ConfigError(f"{source}: line {line_of(text, (), 'folder')}: there is no key 'folder'")
    kinds = _kinds_in(document, source, text)
    place: tuple[str, ...] = ()
    try:
        model: Any = Union[kinds]  # noqa: UP007 - of a tuple
        types = {("models",): model, ("policies",): PolicyConfig, ("gateway", "webhooks"): WebhookConfig}
        types["teams",] = TeamConfig
        for parent, type_of_table in types.items():  # or errors would not name the table
            for place in _tables(document, *parent):
                msgspec.convert(_at(document, place), type_of_table)
        place = ()
        config = msgspec.convert({**document, "folder": str(source.resolve().parent)}, _config_type(kinds))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explained(str(error), text, document, place)}") from error
    check_config(config, source, text)
    return config


def _tables(document: Mapping[str, Any], *place: str) -> list[tuple[str, ...]]:
    """Return the places of the tables under a place, such as [models.NAME]."""
    return [(*place, key) for key in as_object(_at(document, place))]


def _at(document: Mapping[str, Any], place: tuple[str, ...]) -> Any:
    """Return the part of a document at a place; None if there is none."""
    part: Any = document
    for key in place:
        part = as_object(part).get(key)
    return part


def _kinds_in(document: Mapping[str, Any], source: Path, text: str) -> tuple[type[ModelConfig], ...]:
    """Return the built-in kinds, and those of other packages that the document names."""
    kinds = list(BUILT_IN.values())
    for place in [*((role,) for role in SECTIONS), *_tables(document, "models")]:
        name: object = as_object(_at(document, place)).get("kind")
        try:
            kind = kind_named(name) if isinstance(name, str) else None
        except ConfigError as error:
            raise ConfigError(f"{source}: line {line_of(text, place, 'kind')}: {error}") from error
        if kind is not None and kind not in kinds:
            kinds.append(kind)
    return tuple(kinds)


def _explained(message: str, text: str, document: Mapping[str, Any], place: tuple[str, ...]) -> str:
    """Return a validation message with the line and, for an unknown key, the nearest valid one."""
    what, _, path = message.partition(" - at `$")
    parts = (*place, *(part for part in path.rstrip("`").split(".") if part))
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if unknown is not None:
        valid = _keys_of(parts, document)
        near = get_close_matches(unknown[1], valid, n=1, cutoff=0.5)
        remedy = f"did you mean '{near[0]}'?" if near else f"valid keys are {', '.join(valid)}"
        return f"line {line_of(text, parts, unknown[1])}: there is no key '{unknown[1]}'; {remedy}"
    if missing is not None:
        return f"line {line_of(text, parts, None)}: {_lacks(parts, missing[1])}"
    *section, key = parts or ("",)
    if key == "kind":
        names = kind_names()
        near = get_close_matches(str(_at(document, parts)), names, n=1, cutoff=0.4)
        what += f"; did you mean '{near[0]}'?" if near else f"; valid kinds are {', '.join(names)}"
    key = re.sub(r"\[.*\]", "", key)
    return f"line {line_of(text, tuple(section), key)}: {key}: {what}"


def _lacks(parts: tuple[str, ...], key: str) -> str:
    if parts:
        return f"[{'.'.join(parts)}] lacks the key '{key}'"
    return f"the file lacks a section [{key}] with at least kind ="


def _keys_of(parts: tuple[str, ...], document: Mapping[str, Any]) -> list[str]:
    """Return the valid keys of a section."""
    if not parts:
        return [f.name for f in structs.fields(Config) if f.name != "folder"]
    if parts[-1] == "pinned":
        return [f.name for f in structs.fields(Pinned)]
    if parts[:2] == ("gateway", "webhooks"):
        return [f.name for f in structs.fields(WebhookConfig)]
    if parts[0] == "policies" and parts[-1] == "review":
        return [f.name for f in structs.fields(ReviewConfig)]
    plain: dict[str, type[Struct]] = {
        "task": Task,
        "gateway": GatewayConfig,
        "policies": PolicyConfig,
        "cascade": CascadeConfig,
        "teams": TeamConfig,
    }
    if parts[0] in plain:
        return [f.name for f in structs.fields(plain[parts[0]])]
    kind = kind_named(str(as_object(_at(document, parts)).get("kind"))) or ChatConfig
    return ["kind", *(f.name for f in structs.fields(kind))]


def with_task(config: Config, path: str | Path, **changed: Any) -> Config:
    """Return the configuration with changes to its task, such as a form from the command line, checked like the file.

    Raises:
        ConfigError: the models cannot do that task.
    """
    changed_config = structs.replace(config, task=structs.replace(config.task, **changed))
    check_config(changed_config, Path(path), Path(path).read_text(encoding="utf-8"))
    return changed_config


def write_pinned(path: str | Path, pinned: Mapping[str, Pinned]) -> None:
    """Write pinned values into the configuration, under [ROLE.pinned]; the rest stays as it is, comments included.

    Raises:
        ConfigError: the file does not write its models as sections; it is left unchanged.
    """
    source = Path(path)
    lines: list[str] = []
    dropping = False
    for line in source.read_text(encoding="utf-8").splitlines():
        header = re.match(r"\s*\[\s*(.+?)\s*\]\s*(#.*)?$", line)
        if header is not None:
            dropping = header[1] in {f"{role}.pinned" for role in pinned}
        if not dropping:
            lines.append(line)
    while lines and not lines[-1].strip():
        lines.pop()
    for role, values in pinned.items():
        lines += ["", f"[{role}.pinned]  # written by `arbitrage check`; part of the identity"]
        lines += [f"{name} = {_toml(value)}" for name, value in structs.asdict(values).items() if value is not None]
    text = "\n".join(lines) + "\n"
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{source}: pinned values cannot be added to it ({error}); write each model as a section of its own, such as "
            "[primary], without `pinned = ...`"
        ) from error
    write_text(source, text)


def _toml(text: object) -> str:
    """Return a TOML basic string."""
    plain = str(text).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda c: f"\\u{ord(c[0]):04x}", plain) + '"'


# --- The configuration that `arbitrage init` writes ---


_TEMPLATE = """\
# Conformal Arbitrage. Next: `arbitrage check`, `arbitrage collect`, `arbitrage recommend`, `arbitrage serve`.
# For production: `arbitrage calibrate log.parquet --confidence 0.95`. The certificate then promises its own long-run
# loss, so that the monitor's alarm stands at alpha itself; it takes some more calls of the Guardian.
alpha = 0.05             # on average at most 5 points worse than always asking the Guardian
guardian_sees = "all"    # a deferral shows the Guardian every option; calibrated on that loss

[task]
form = "{form}"            # "text": free text and tool calls; "menu": choose from options
{settings}# {safe} = "..."    # fallback if the Guardian fails; without it that is an error

[primary]                # cheap or helpful: does most of the work
kind = "chat"            # or decisions, logprob, sampling, function, replay, human, local
{primary}{confidence}# temperature = "default"            # for models that take none; the paper's is 0.1
# max_tokens = 2000                  # for models that reason before they answer

[guardian]               # careful or safe: steps in when it matters
kind = "chat"
{guardian}
[policies.assistant]     # what applications name as their model
certificate = "certificate.json"     # `arbitrage recommend log.parquet -o route.toml` writes it
{content}# audit_rate = 0.05                  # the share of decisions that the Guardian checks afterwards
# aliases = ["gpt-4o"]               # model names that applications already use
"""
_OPENAI = "https://api.openai.com/v1"
_KEY = """\
key_env = "OPENAI_API_KEY"           # the environment variable with the key; leave out if none is needed
"""
_SETTINGS = """\
settings = "as requested"  # requests keep their temperature, limits, stop; "pinned": those below, others have no guarantee
"""
_CONFIDENCE = """\
confidence = "ask"                   # a second short call rates the answer; or "logprob", from the same call
"""
_CONTENT = """\
content = "full"                     # keep questions and answers: audits of free text need them to be graded
"""


def template(form: Form, models: Mapping[str, tuple[str | None, str | None]] | None = None) -> str:
    """Return a short commented configuration to start from.

    Args:
        form: free text, or menus.
        models: the endpoint and the name of each model; OpenAI's unless given.
    """
    menu, given = form == "menu", models or {}
    return _TEMPLATE.format(
        form=form,
        settings="" if menu else _SETTINGS,
        safe="safe_action" if menu else "safe_answer",
        confidence="" if menu else _CONFIDENCE,
        content="" if menu else _CONTENT,
        primary=_endpoint(*given.get("primary", (None, None)), usual="gpt-5.4-nano"),
        guardian=_endpoint(*given.get("guardian", (None, None)), usual="gpt-5.4"),
    )


def _endpoint(url: str | None, model: str | None, *, usual: str) -> str:
    """Return the lines about an endpoint; one on this machine needs no key."""
    local = url is not None and urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    lines = f"url = {json.dumps(url or _OPENAI)}    # any OpenAI-compatible endpoint\nmodel = {json.dumps(model or usual)}\n"
    return lines if local else lines + _KEY


def webhooks_of(config: Config) -> list[WebhookEndpoint]:
    """Return the webhooks of a configuration.

    Raises:
        ConfigError: a secret is missing or malformed.
    """
    return [
        WebhookEndpoint(name, webhook.url, _webhook_keys(config, name, webhook))
        for name, webhook in config.gateway.webhooks.items()
    ]


def _webhook_keys(config: Config, name: str, webhook: WebhookConfig) -> tuple[bytes, ...]:
    section = f"[gateway.webhooks.{name}]"
    if webhook.secret_env is not None:
        text = os.environ.get(webhook.secret_env, "")
        if not text.strip():
            raise ConfigError(
                f"{section} the environment variable {webhook.secret_env} is not set; `arbitrage webhooks secret` prints a "
                "value for it"
            )
        return signing_keys(text, source=f"{section} {webhook.secret_env}")
    path = Path(config.folder) / str(webhook.secret_file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"{section} {path}: the secret cannot be read ({reason}); `arbitrage webhooks secret > {path.name}` writes one"
        ) from error
    return signing_keys(text, source=f"{section} {path}")
