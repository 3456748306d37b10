"""From a configuration to scorers and answerers that can be asked: endpoints, retries, limits, prices, caches.

Knows nothing of roles' failures or of logs.
"""

import sys
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.live.config import (
    AnyModel,
    Chat,
    Chatting,
    Config,
    Decisions,
    Function,
    Human,
    Local,
    Logprob,
    Model,
    Network,
    Pinned,
    Replay,
    Samples,
)
from conformal_arbitrage.live.grading import COMPARISONS, Comparison, FunctionGrader, Grader, HumanGrader, JudgeGrader
from conformal_arbitrage.live.policy import ConformalArbitrage, ConformalRouter
from conformal_arbitrage.scorers.answers import ChatAnswerer
from conformal_arbitrage.scorers.base import Answerer, Scorer
from conformal_arbitrage.scorers.chat import ChatScorer, Settings
from conformal_arbitrage.scorers.decisions import DecisionsScorer
from conformal_arbitrage.scorers.function import FunctionScorer
from conformal_arbitrage.scorers.human import HumanScorer, Terminal
from conformal_arbitrage.scorers.local import LocalModel, LocalScorer
from conformal_arbitrage.scorers.logprob import LogprobScorer
from conformal_arbitrage.scorers.order import Shuffled
from conformal_arbitrage.scorers.prompts import PROMPTS, Prompt
from conformal_arbitrage.scorers.replay import ReplayScorer
from conformal_arbitrage.scorers.sampling import SamplingScorer, named_option
from conformal_arbitrage.upstream.base import Port
from conformal_arbitrage.upstream.endpoint import Endpoint, key_from
from conformal_arbitrage.upstream.pricing import Price, Pricing, list_price
from conformal_arbitrage.upstream.wrappers import Breaker, Cache, Capped, Gate, Limit, Priced, Purse, Retry

_GRADING_PERSON = Human(name="grader")  # unpriced, and never hurried by a deadline
Section = Literal["primary", "guardian", "judge", "stronger"]
CONCURRENCY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What goes around every port besides: shared slots, a purse, a file of replies, a breaker; or in place of it."""

    gate: Gate | None = None
    purse: Purse | None = None
    replies: Path | None = None
    breaker: bool = False
    instead: Callable[[Port, Pricing | None, str], Port] | None = None


class Models:
    """The models of a configuration; use as `async with Models(config) as models`.

    Args:
        config: the configuration.
        extras: what goes around every port besides what the configuration says.
    """

    def __init__(self, config: Config, extras: Extras | None = None) -> None:
        self.config = config
        self._extras = extras or Extras()
        self._open = AsyncExitStack()
        self.terminal = Terminal()
        self.breakers: list[Breaker] = []
        self._gates: dict[Section, Gate] = {}

    async def __aenter__(self) -> "Models":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._open.aclose()

    def section(self, role: Section) -> AnyModel:
        """A role's part of the configuration."""
        found: AnyModel | None = getattr(self.config, role)
        if found is None:
            raise ConfigError(f"the configuration has no section [{role}]; add one")
        return found

    def scorer(self, role: Section) -> Scorer:
        """Whoever plays a role over menus."""
        model = self.section(role)
        made = self._scorer(model, role)
        return Shuffled(made) if self.config.task.shuffle_options and not isinstance(model, Replay) else made

    def answerer(self, role: Section) -> Answerer:
        """Whoever plays a role in free text."""
        model = self.section(role)
        if isinstance(model, Function):
            answerer: Any = load_object(model.function)
            if not hasattr(answerer, "answer") or not hasattr(answerer, "identity"):
                raise ConfigError(
                    f"[{role}] {model.function}: in text form it must be an object with `answer` and `identity`"
                )
            return answerer
        if not isinstance(model, Chat):
            raise ConfigError(f"[{role}] kind must be chat or function to answer in free text")
        pinned = _pinned(model, role)
        confidence = model.confidence if role == "primary" else None
        return ChatAnswerer(
            port=self.port(model, role), settings=_settings(model), confidence=confidence, mode=pinned.mode
        )

    def policy(self, certificate: Certificate, allow: Collection[str] = ()) -> ConformalArbitrage:
        """The calibrated policy over menus."""
        return ConformalArbitrage(
            primary=self.scorer("primary"),
            guardian=self.scorer("guardian"),
            certificate=certificate,
            safe_action=self.config.task.safe_action,
            allow=allow,
        )

    def router(self, certificate: Certificate, allow: Collection[str] = ()) -> ConformalRouter:
        """The calibrated policy over free text."""
        return ConformalRouter(
            primary=self.answerer("primary"),
            guardian=self.answerer("guardian"),
            certificate=certificate,
            safe_answer=self.config.task.safe_answer,
            allow=allow,
        )

    def grader(self, how: str) -> Grader:
        """Whoever grades answers: exact, regex, json-equal, judge, human, or python:MODULE:FUNCTION."""
        if how in COMPARISONS:
            return Comparison(how)
        if how == "human":
            return HumanGrader(self.terminal, through=lambda port: self._around(port, _GRADING_PERSON, "judge"))
        if how == "judge":
            return self.judge()
        if not how.startswith("python:"):
            known = ", ".join([*COMPARISONS, "judge", "human", "python:MODULE:FUNCTION"])
            raise ConfigError(f"there is no grader {how!r}; there are {known}")
        function: Any = load_object(how)
        return FunctionGrader(function=function, name=how.removeprefix("python:"))

    def judge(self) -> JudgeGrader:
        """The model that grades answers."""
        model = self.section("judge")
        if not isinstance(model, Chat):
            raise ConfigError("[judge] must be of kind chat")
        _pinned(model, "judge")
        return JudgeGrader(port=self.port(model, "judge"), settings=_settings(model))

    def port(self, model: Model, role: Section) -> Port:
        """An endpoint with all that goes around it."""
        if not isinstance(model, Network):
            raise ConfigError("this kind has no endpoint")
        endpoint = Endpoint(model.url, key=key_from(model.key_env), key_header=model.key_header, timeout=model.timeout)
        self._open.push_async_callback(endpoint.close)
        return self._around(endpoint, model, role)

    def _scorer(self, model: AnyModel, role: Section) -> Scorer:
        if isinstance(model, Replay):
            return ReplayScorer.read(Path(self.config.folder) / model.log, model.column, cost=model.price_per_call)
        if isinstance(model, Human):
            return HumanScorer(name=model.name, terminal=self.terminal, through=lambda p: self._around(p, model, role))
        if isinstance(model, Local):
            weights = None if model.weights is None else Path(self.config.folder) / model.weights
            return LocalScorer(LocalModel(weights), through=lambda p: self._around(p, model, role))
        if isinstance(model, Function):
            function: Any = load_object(model.function)
            return FunctionScorer(function, name=model.name, through=lambda p: self._around(p, model, role))
        return self._network_scorer(model, role)

    def _network_scorer(self, model: Chat | Logprob | Samples | Decisions, role: Section) -> Scorer:
        if isinstance(model, Decisions):
            served = _pinned(model, role).served
            return DecisionsScorer(
                port=self.port(model, role), model=model.model, served=served, instructions=model.instructions
            )
        _pinned(model, role)
        settings, port = _settings(model), self.port(model, role)
        if isinstance(model, Logprob):
            return LogprobScorer(port=port, settings=settings)
        if isinstance(model, Samples):
            normaliser: Any = load_object(model.normaliser) if model.normaliser else named_option
            return SamplingScorer(port=port, settings=settings, samples=model.samples, normaliser=normaliser)
        mode = _pinned(model, role).mode
        return ChatScorer(port=port, settings=settings, prompt=_prompt(model.prompt), mode=mode, reask=model.reask)

    def _around(self, port: Port, model: Model, role: Section) -> Port:
        pricing = pricing_of(model)
        if self._extras.instead is not None:
            return self._extras.instead(port, pricing, role)
        port = Priced(port, pricing)
        if self._extras.purse is not None and not isinstance(model, Human):
            if pricing is None:
                raise ConfigError(
                    f"--max-cost needs the price of {port.origin}, which is not known; set price = [IN, OUT], dollars per "
                    "million tokens, or price_per_call"
                )
            port = Capped(port, pricing, self._extras.purse)
        if not isinstance(model, Human):
            port = Retry(port, attempts=model.attempts, deadline=model.deadline)
        if self._extras.breaker:
            port = Breaker(port)
            self.breakers.append(port)
        if self._extras.gate is not None:
            port = Limit(port, self._extras.gate)
        own: dict[str, int | None] = {
            "concurrency": model.concurrency or (CONCURRENCY if self._extras == Extras() else None),
            "requests_per_minute": model.requests_per_minute,
            "tokens_per_minute": model.tokens_per_minute,
        }
        if any(own.values()):
            gate = self._gates.setdefault(role, Gate(**own))  # one for all ports of a role
            port = Limit(port, gate)  # outside the other: no shared slot is held while rates wait
        if self._extras.replies is not None:
            return self._cache(Cache(port, self._extras.replies, per_query=True, role=role))
        return port if model.cache is None else self._cache(Cache(port, Path(self.config.folder) / model.cache))

    def _cache(self, cache: Cache) -> Port:
        self._open.callback(cache.close)
        return cache


def pricing_of(model: Model) -> Pricing | None:
    """What a model costs: as configured, else by the provider's list; None if unknown."""
    if model.price is not None or model.price_per_call is not None:
        into, out = model.price or (0.0, 0.0)
        return Price(input=into, output=out, per_call=model.price_per_call or 0.0)
    return list_price(model.model, model.url) if isinstance(model, Network) else None


def _pinned(model: Network, role: str) -> Pinned:
    if model.pinned is None:
        raise ConfigError(
            f"it is not known yet how {model.model} wants to be asked ([{role}]); run `arbitrage check`, which finds out "
            "and writes it into the configuration"
        )
    return model.pinned


def _settings(model: Chatting) -> Settings:
    pinned = model.pinned or Pinned()
    return Settings(
        model=model.model,
        served=pinned.served,
        temperature=None if model.temperature == "default" else model.temperature,
        max_tokens=model.max_tokens,
        token_field=pinned.token_field,
        reasoning_effort=model.reasoning_effort,
        seed=model.seed,
    )


def _prompt(name: str) -> Prompt:
    if name in PROMPTS:
        return PROMPTS[name]
    if ":" not in name:
        raise ConfigError(f"there is no prompt {name!r}; there are {', '.join(PROMPTS)}, or MODULE:NAME of your own")
    return cast("Prompt", load_object(name))


def load_object(name: str) -> object:
    """What MODULE:NAME names; the current folder is searched too."""
    module, _, attribute = name.removeprefix("python:").partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name!r} cannot be loaded ({error}); write MODULE:NAME of a Python object") from error
