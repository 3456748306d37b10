"""From a configuration to scorers, answerers, graders, policies and the record of decisions, with all that wraps a model."""

import os
import re
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from conformal_arbitrage.calibration.certificate import Certificate, group_source_of
from conformal_arbitrage.calibration.secret import VARIABLE, ProjectSecret
from conformal_arbitrage.errors import ArbitrageError, ConfigError, StoreError
from conformal_arbitrage.live.candidates import (
    NORMALISERS,
    Grouping,
    JudgedGrouping,
    NormalisedGrouping,
    SampledAnswerer,
    Sampler,
    can_sample,
)
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.live.graders import COMPARISONS, Comparison, FunctionGrader, Grader, HumanGrader, JudgeGrader
from conformal_arbitrage.live.rule import CascadeChooser, CascadeRouter, ConformalArbitrage, ConformalRouter
from conformal_arbitrage.models.kinds import BuildContext, ModelConfig, Section, Terminal, load_object
from conformal_arbitrage.models.others import HumanConfig
from conformal_arbitrage.models.port import Answerer, Port, Scorer, WrappedModel
from conformal_arbitrage.models.rendering import RENDERING, VERBATIM, Shuffled
from conformal_arbitrage.models.resilience import (
    Breaker,
    Cache,
    Capped,
    Limit,
    Priced,
    Pricing,
    RateLimit,
    Retry,
    Spending,
    SpendingLimit,
)
from conformal_arbitrage.store import integrity
from conformal_arbitrage.store.location import open_store
from conformal_arbitrage.store.session import Store

_GRADING_PERSON = HumanConfig(name="grader")  # unpriced, and without a deadline
CONCURRENCY = 16
_Model = TypeVar("_Model", Scorer, Answerer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Wrappers around every port besides those that the configuration asks for.

    Attributes:
        gate: slots that all ports share.
        spending_limit: a limit on money that all ports share.
        guardian_spending: a limit on money for the ports of Guardians.
        live_share: the share of a model's own limits that calls in the background leave to the others.
        replies: a file that keeps each query's replies.
        breaker: whether an endpoint that is down is left alone for a while.
        primary_timeout: seconds that a Primary may take, without repeated calls, where the Guardian answers in its
            place; None waits and repeats as its section says.
        instead: makes a port that takes the place of all wrappers, from the bare port, its price and its role.
        traced: makes a port that records every call, from the bare port and its role.
        keyless: no call will be sent, so the environment need not hold any API key.
    """

    gate: RateLimit | None = None
    spending_limit: SpendingLimit | None = None
    guardian_spending: Spending[Any] | None = None
    live_share: float = 0.0
    replies: Path | None = None
    breaker: bool = False
    primary_timeout: float | None = None
    instead: Callable[[Port, Pricing | None, str], Port] | None = None
    traced: Callable[[Port, str], Port] | None = None
    keyless: bool = False


class Models:
    """The models of a configuration; use as `async with Models(config) as models`."""

    def __init__(self, config: Config, extras: Extras | None = None) -> None:
        self.config = config
        self._extras = extras or Extras()
        self._open = AsyncExitStack()
        self._terminal = Terminal()
        self.breakers: list[Breaker] = []
        self.guardian_breakers: dict[str, list[Breaker]] = {}
        self.capped: set[str] = set()
        self._gates: dict[str, RateLimit] = {}

    async def __aenter__(self) -> "Models":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._open.aclose()

    def scorer(self, role: Section, section: str | None = None) -> Scorer:
        """Return the model that plays a role over menus; its own section's unless another is named."""
        model = self.config.section(section or role)
        scorer = model.build(self._context(model, role, section))
        if model.shows_questions and "rendering" not in scorer.identity:
            scorer = WrappedModel(scorer, {"rendering": RENDERING})
        return Shuffled(scorer) if self.config.task.shuffle_options and model.shufflable else scorer

    def answerer(self, role: Section, section: str | None = None) -> Answerer:
        """Return the model that plays a role in free text; its own section's unless another is named."""
        model = self.config.section(section or role)
        answerer = model.build_answerer(self._context(model, role, section))
        sampling = model.sampled_answers() if role == "primary" else None
        if sampling is not None and can_sample(answerer):
            count, same_meaning = sampling
            others = tuple(self._sampler(name) for name in model.candidate_models())
            answerer = SampledAnswerer(
                sampler=answerer, others=others, candidates=count, grouping=self._grouping(same_meaning)
            )
        if "rendering" not in answerer.identity:
            answerer = WrappedModel(answerer, {"rendering": VERBATIM})
        return answerer

    def _sampler(self, name: str) -> Sampler:
        """Return a further model that candidates are sampled from."""
        section = f"models.{name}"
        model = self.config.section(section)
        answerer = model.build_answerer(self._context(model, "primary", section))
        if not can_sample(answerer):
            raise ConfigError(f"[{section}] kind '{model.kind}' cannot be sampled for candidates; use 'chat'")
        return answerer

    def policy(self, certificate: Certificate, allow: Collection[str] = ()) -> ConformalArbitrage | CascadeChooser:
        """Return the calibrated policy over menus, of a pair or of a cascade as the certificate has it."""
        safe = self.config.task.safe_action
        if certificate.is_cascade:
            models, name, guardian = self.cascade(self.scorer)
            return CascadeChooser(
                models=models,
                guardian=guardian,
                guardian_name=name,
                certificate=certificate,
                fallback=safe,
                allow=allow,
            )
        return ConformalArbitrage(
            primary=self.scorer("primary"), guardian=self.scorer("guardian"), certificate=certificate,
            safe_action=safe, allow=allow, group_source=_own_source(certificate),
        )  # fmt: skip

    def router(self, certificate: Certificate, allow: Collection[str] = ()) -> ConformalRouter | CascadeRouter:
        """Return the calibrated policy over free text, likewise."""
        safe = self.config.task.safe_answer
        if certificate.is_cascade:
            models, name, guardian = self.cascade(self.answerer)
            return CascadeRouter(
                models=models,
                guardian=guardian,
                guardian_name=name,
                certificate=certificate,
                fallback=safe,
                allow=allow,
            )
        return ConformalRouter(
            primary=self.answerer("primary"), guardian=self.answerer("guardian"), certificate=certificate,
            safe_answer=safe, allow=allow, group_source=_own_source(certificate),
        )  # fmt: skip

    def cascade(self, model: Callable[[Section, str], _Model]) -> tuple[dict[str, _Model], str, _Model]:
        """Return the cheap models of the cascade by name, and the Guardian with its name; each is `scorer` or `answerer`."""
        *cheap, (name, last) = self.config.cascade_sections.items()
        return {label: model("primary", section) for label, section in cheap}, name, model("guardian", last)

    def _grouping(self, how: str) -> Grouping:
        """Return what says which answers mean the same: words, number, json, judge, or python:MODULE:FUNCTION."""
        if how in NORMALISERS:
            return NormalisedGrouping(name=how, normaliser=NORMALISERS[how])
        if how == "judge":
            return JudgedGrouping(judge=self.judge())
        if not how.startswith("python:"):
            known = ", ".join([*NORMALISERS, "judge", "python:MODULE:FUNCTION"])
            raise ConfigError(f"same_meaning cannot be {how!r}; use one of {known}")
        return NormalisedGrouping(name=how.removeprefix("python:"), normaliser=load_object(how, self.config.folder))

    def grader(self, how: str) -> Grader:
        """Return a grader of answers: exact, regex, json-equal, judge, human, or python:MODULE:FUNCTION."""
        if how in COMPARISONS:
            return Comparison(how)
        if how == "human":
            return HumanGrader(self._terminal, through=self._context(_GRADING_PERSON, "judge").wrap)
        if how == "judge":
            return self.judge()
        if not how.startswith("python:"):
            known = ", ".join([*COMPARISONS, "judge", "human", "python:MODULE:FUNCTION"])
            raise ConfigError(f"there is no grader {how!r}; use one of {known}")
        return FunctionGrader(function=load_object(how, self.config.folder), name=how.removeprefix("python:"))

    def judge(self) -> JudgeGrader:
        """Return the model that grades answers."""
        model = self.config.judge
        if model is None:
            raise ConfigError("the configuration has no section [judge]; add one")
        settings = model.settings("judge")
        return JudgeGrader(port=model.connect(self._context(model, "judge")), settings=settings)

    def _context(self, model: ModelConfig, role: Section, section: str | None = None) -> BuildContext:
        return BuildContext(
            role=role,
            section=section or role,
            folder=Path(self.config.folder),
            terminal=self._terminal,
            wrap=lambda port: self._around(port, model, role, section or role),
            on_close=self._open.push_async_callback,
            keyless=self._extras.keyless,
            watch=self.breakers.append,
            request_settings=self.config.task.settings,
        )

    def _retried(self, port: Port, model: ModelConfig, role: Section) -> Port:
        timeout = self._extras.primary_timeout
        if role != "primary" or timeout is None:
            return Retry(port, attempts=model.attempts, deadline=model.deadline)
        return Retry(port, attempts=model.attempts, deadline=min(model.deadline, timeout), pause=None)

    def _around(self, port: Port, model: ModelConfig, role: Section, section: str) -> Port:
        pricing = model.pricing()
        if self._extras.instead is not None:
            return self._extras.instead(port, pricing, role)
        if self._extras.traced is not None:
            port = self._extras.traced(port, role)
        port = Priced(port, pricing)
        port = self._capped(port, pricing, model, role, section)
        if not model.is_person:
            port = self._retried(port, model, role)
        if self._extras.breaker:
            port = Breaker(port)
            self.breakers.append(port)
            if role == "guardian":
                self.guardian_breakers.setdefault(section, []).append(port)
        if self._extras.gate is not None:
            port = Limit(port, self._extras.gate)
        limits: dict[str, int | None] = {
            "concurrency": model.concurrency or (CONCURRENCY if self._extras == Extras() else None),
            "requests_per_minute": model.requests_per_minute,
            "tokens_per_minute": model.tokens_per_minute,
        }
        if any(limits.values()):
            gate = RateLimit(**limits, live_share=self._extras.live_share)
            gate = self._gates.setdefault(section, gate)  # one for all ports of a model
            port = Limit(port, gate)  # outside the shared gate, so that no shared slot is held while waiting for rates
        if self._extras.replies is not None:
            return self._cache(Cache(port, self._extras.replies, per_query=True, role=role))
        return port if model.cache is None else self._cache(Cache(port, Path(self.config.folder) / model.cache))

    def _capped(self, port: Port, pricing: Pricing | None, model: ModelConfig, role: Section, section: str) -> Port:
        """Put a port under the limits on money that apply to it."""
        limits: list[Spending[Any]] = []
        if self._extras.spending_limit is not None and not model.is_person:
            limits.append(self._extras.spending_limit)
        if self._extras.guardian_spending is not None and role == "guardian":
            limits.append(self._extras.guardian_spending)
            self.capped.add(section)
        for limit in limits:
            if pricing is None:
                raise ConfigError(
                    f"{limit.setting} needs the price of {port.origin}, which is unknown; set price = [IN, OUT], dollars "
                    f"per million tokens, or price_per_call in [{section}]"
                )
            port = Capped(port, pricing, limit)
        return port

    def _cache(self, cache: Cache) -> Port:
        self._open.callback(cache.close)
        return cache


def _own_source(certificate: Certificate) -> str | None:
    """Return the source of groups that a certificate names: whoever asks from here names the group by hand."""
    if certificate.learned is not None and "group" in certificate.learned.features:
        return certificate.learned.group_source
    return group_source_of(certificate)


# --- The record of decisions ---


_QUOTED = r"[\w.~%!$&'()*+,;=-]*"
"""What needs no quoting in a URL, or is quoted."""


def database_of(config: Config) -> str:
    """Return the database: a URL, or a file beside the configuration; {NAME} comes from the environment."""
    location = filled_address(config.gateway.database, "[gateway] database")
    return location if "://" in location else str(Path(config.folder) / location)


def filled_address(address: str, setting: str) -> str:
    """Return an address with values from the environment in the place of each {NAME}.

    In the password of a URL, a value with special characters is quoted.

    Args:
        address: a URL, or a file.
        setting: where it was given, for the message.

    Raises:
        ConfigError: a variable is not set.
    """

    def value(name: re.Match[str]) -> str:
        if name[1] not in os.environ:
            raise ConfigError(f"{setting}: the environment variable {name[1]} is not set")
        text = os.environ[name[1]]
        is_password = name.string[: name.start()].endswith(":") and name.string[name.end() :].startswith("@")
        return quote(text, safe="") if is_password and not re.fullmatch(_QUOTED, text) else text

    return re.sub(r"\{(\w+)\}", value, address)


def database_exists(config: Config) -> bool:
    """Return whether there may be a record already: a file, or whatever a URL leads to."""
    location = database_of(config)
    return "://" in location or Path(location).exists()


async def open_record(config: Config, *, migrating: bool = True) -> Store:
    """Open the store of a configuration, with the keys that sign it, and whom it tells of events.

    A secret is made only for a database that is not there yet; afterwards `ProjectSecret.find` gives the right one.

    Args:
        migrating: whether to bring its tables to this release; if not, they must be there.

    Raises:
        ConfigError: the database was made with a secret that is not among those given.
    """
    location, secret = database_of(config), ProjectSecret.search()
    shared = "://" in location
    if secret is None and not shared and not Path(location).exists():
        secret = ProjectSecret.find()
    try:
        store = await open_store(
            location,
            keys=() if secret is None else secret.record_keys,
            webhooks={name: webhook.events for name, webhook in config.gateway.webhooks.items()},
            connections=config.gateway.database_connections,
            migrating=migrating and secret is not None,
        )
    except StoreError as error:
        if secret is None and shared:  # perhaps without tables
            raise ConfigError(
                f"gateways that share a database share a secret, and there is none here; set {VARIABLE} for each"
            ) from error
        raise
    try:
        await _check_secret(store, secret, "the database" if shared else location)
    except ArbitrageError:
        await store.close()
        raise
    return store


async def _check_secret(store: Store, secret: ProjectSecret | None, location: str) -> None:
    """Refuse a secret that the database was not made with; a new database remembers the one that is given."""
    needed = await store.run(integrity.secret_fingerprint)
    if needed is None and secret is not None:
        needed = await store.run(integrity.note_secret, secret.id)
    given = () if secret is None else secret.fingerprints
    if needed not in given:
        have = f"the one given has {given[0]}" if given else "there is none here"
        raise ConfigError(
            f"{location} was made with the secret of fingerprint {needed}, and {have}; set {VARIABLE} to that secret, or "
            "after a rotation to the new one, a comma and that one"
        )
