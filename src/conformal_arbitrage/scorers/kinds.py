"""What every kind of scorer shares: a section of arbitrage.toml that can build, price and test its model.

A kind is one module with a configuration struct, derived from `ModelConfig`, and the scorer it builds; `registry` lists
them. A kind states how it differs through the class attributes and methods below, so no caller tests for a kind.

Knows nothing of the other sections of the file, or of what wraps a port.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from msgspec import Struct
from msgspec.structs import replace

from conformal_arbitrage.errors import ConfigError, ScorerError, UpstreamError
from conformal_arbitrage.scorers.base import Answerer, Scorer
from conformal_arbitrage.scorers.completions import Mode, Settings, TokenField
from conformal_arbitrage.scorers.request_fields import RequestSettings
from conformal_arbitrage.scorers.terminal import Terminal
from conformal_arbitrage.scorers.user_code import load_object
from conformal_arbitrage.types import Role, Spent
from conformal_arbitrage.upstream.base import Port
from conformal_arbitrage.upstream.breaker import Breaker
from conformal_arbitrage.upstream.endpoint import Endpoint, key_from
from conformal_arbitrage.upstream.pool import FAILURES, Pool
from conformal_arbitrage.upstream.pricing import Price, Pricing, list_price

Form = Literal["menu", "text"]
Section = Literal["primary", "guardian", "judge", "stronger"]
ROLES: tuple[Role, Role] = ("primary", "guardian")


class Pinned(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How an endpoint wants to be called, as `arbitrage check` determined; part of the identity."""

    mode: Mode = "plain"
    token_field: TokenField = "max_tokens"
    served: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What a kind gets to build its model with.

    Attributes:
        role: the role that the model is built for.
        folder: the folder of the configuration, where relative paths start.
        terminal: where a person's keys come from.
        wrap: adds price, retries, limits and caches to a port; call it once on every port that is built.
        on_close: registers a coroutine function to call when the models are closed.
        keyless: no call will be sent, so no API key is needed: only identities or estimates are asked for.
        section: the section of the configuration, for messages; the role's own unless given.
        watch: takes the breaker of every endpoint that has one of its own, for metrics.
        request_settings: whether chat requests keep their own settings; part of an answerer's identity.
    """

    role: Section
    folder: Path
    terminal: Terminal
    wrap: Callable[[Port], Port]
    on_close: Callable[[Callable[[], Awaitable[None]]], object]
    keyless: bool = False
    section: str = ""
    watch: Callable[[Breaker], object] = lambda _: None
    request_settings: RequestSettings = "pinned"

    def __post_init__(self) -> None:
        """Name the section after the role unless it has a name of its own."""
        object.__setattr__(self, "section", self.section or self.role)

    def load(self, name: str) -> Any:
        """Return the Python object that MODULE:NAME refers to."""
        return load_object(name, self.folder)


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A section of the configuration that describes one model; every kind derives from it and sets its own `tag`.

    Attributes:
        price: dollars per million input and output tokens; the provider's list price unless set.
        price_per_call: dollars per call, for people and services that charge so.
        concurrency: calls in flight at once.
        deadline: seconds for a call and its retries.
        cache: a SQLite file with replies to reuse.
        answers_text: whether the kind can answer in free text, by `build_answerer`.
        has_endpoint: whether calls go over HTTP.
        is_person: whether a person answers, whose calls are neither retried nor counted against a cost limit.
        shufflable: whether options may be shown in another order than the query's.
        lists_logprobs: whether a successful test proves that token probabilities are available; None if it does not.
        shows_questions: whether scores depend on how a question is rendered, which is then part of the identity.
        untested: why `arbitrage check` only builds the model and sends it nothing; None if it asks a question.
    """

    price: tuple[float, float] | None = None
    price_per_call: float | None = None
    concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    attempts: int = 5
    deadline: float = 120.0
    cache: str | None = None

    answers_text: ClassVar[bool] = False
    has_endpoint: ClassVar[bool] = False
    is_person: ClassVar[bool] = False
    shufflable: ClassVar[bool] = True
    lists_logprobs: ClassVar[bool | None] = None
    shows_questions: ClassVar[bool] = True
    untested: ClassVar[str | None] = None

    @property
    def kind(self) -> str:
        """The kind's name in the configuration."""
        return str(self.__struct_config__.tag)

    @property
    def label(self) -> str:
        """A name for tables and titles."""
        return self.kind

    @property
    def alias(self) -> tuple[str, str] | None:
        """A name chosen by the user and what it stands for, if the identity is only that name."""
        return None

    def build(self, context: BuildContext) -> Scorer:
        """Build the scorer. Every kind defines this."""
        raise NotImplementedError

    def build_answerer(self, context: BuildContext) -> Answerer:
        """Build the answerer for text form, if `answers_text`.

        Raises:
            ConfigError: this kind only scores options.
        """
        raise ConfigError(
            f"[{context.section}] kind '{self.kind}' cannot answer in free text; use 'chat' or 'function'"
        )

    def sampled_answers(self) -> tuple[int, str] | None:
        """Return how many answers a Primary samples in free text, and which of them mean the same; None if it does not."""
        return None

    def candidate_models(self) -> tuple[str, ...]:
        """Return the names of further models that those answers are sampled from, in turn with this one."""
        return ()

    def mistake(self) -> tuple[str | None, str] | None:
        """Return the key at fault, if there is one, and the reason, if this section cannot be used in any role."""
        return None

    def members(self) -> Mapping[str, "ModelConfig"]:
        """Return the model at each endpoint of a pool, by address; nothing if it is not behind a pool."""
        return {}

    def problem(self, role: Section, forms: Collection[Form]) -> tuple[str | None, str] | None:
        """Return the key at fault, if there is one, and the reason, if this section cannot play a role in these forms."""
        if "text" in forms and role != "stronger" and not self.answers_text:
            return "kind", f"text form needs kind 'chat' or 'function' as {role}"
        return None

    def pricing(self) -> Pricing | None:
        """Return what calls cost, as configured or by the provider's list; None if unknown."""
        if self.price is None and self.price_per_call is None:
            return self.list_pricing()
        into, out = self.price or (0.0, 0.0)
        return Price(input=into, output=out, per_call=self.price_per_call or 0.0)

    def list_pricing(self) -> Pricing | None:
        """Return the provider's list price, if there is one."""
        return None

    def limits_replies(self, form: Form) -> bool:
        """Tell whether replies have a limit on their length, without which the largest cost of a call is unknown."""
        return True

    def variants(self, role: Section, form: Form) -> Sequence["ModelConfig"]:
        """Return the ways to call the model that `arbitrage check` tries in order."""
        return [self]

    def try_next(self, error: ScorerError) -> bool:
        """Tell whether the next variant may work after this one failed."""
        return False

    def learned(self, served: str | None) -> Pinned | None:
        """Return what to pin after this variant worked."""
        return None

    def with_pinned(self, pinned: Pinned | None) -> Self:
        """Return the section with pinned values, where the kind has them."""
        return self

    def with_prompt(self, name: str) -> Self:
        """Return the section with another prompt, where the kind has prompts."""
        return self

    def recorded_menus(self, folder: Path) -> Mapping[str, int] | None:
        """Return the questions it can answer, by id, with the size of their menus; None if it can answer any."""
        return None

    def for_estimate(self) -> Self:
        """Return the section as a dry run uses it, where no reply can be read as scores."""
        return self

    def logprob_probe(self, role: Section, form: Form, pinned: Pinned | None) -> "ModelConfig | None":
        """Return a section that finds out whether the endpoint lists token probabilities, if that is worth knowing."""
        return None


class EndpointConfig(ModelConfig, frozen=True, kw_only=True):
    """A model behind an HTTP endpoint, or behind several.

    Attributes:
        url: the endpoint.
        urls: in its place, the endpoints of a pool.
        pool: a name that stands for all of them in the identity.
        weights: how often each is called, relative to the others; equally often unless set.
        key_env: the environment variable with the API key; for a pool perhaps one for each endpoint.
        pictures: whether the model takes pictures in questions about menus.
    """

    model: str
    url: str = ""
    urls: tuple[str, ...] = ()
    pool: str | None = None
    weights: tuple[float, ...] = ()
    key_env: str | tuple[str, ...] | None = None
    key_header: str = "Authorization"
    timeout: float = 60.0
    pictures: bool = False
    pinned: Pinned | None = None

    has_endpoint: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """The model's name."""
        return self.model

    def connect(self, context: BuildContext) -> Port:
        """Return the endpoint, wrapped, to be closed with the models."""
        endpoints: list[Endpoint] = []
        for url, variable in self._addresses():
            key = None if context.keyless else key_from(variable)
            endpoints.append(Endpoint(url, key=key, key_header=self.key_header, timeout=self.timeout))
            context.on_close(endpoints[-1].close)
        return context.wrap(endpoints[0] if self.pool is None else self._pooled(self.pool, endpoints, context))

    def _addresses(self) -> list[tuple[str, str | None]]:
        """Return every endpoint with the variable that holds its key."""
        urls = self.urls or (self.url,)
        names = self.key_env if isinstance(self.key_env, tuple) else (self.key_env,) * len(urls)
        return list(zip(urls, names, strict=True))

    def _pooled(self, name: str, endpoints: Sequence[Endpoint], context: BuildContext) -> Pool:
        members = [Breaker(endpoint, failures=FAILURES) for endpoint in endpoints]
        for member in members:
            context.watch(member)
        served = None if self.pinned is None else self.pinned.served
        return Pool(name, members, weights=self.weights or None, served=served)

    def mistake(self) -> tuple[str | None, str] | None:
        """Refuse a section without an endpoint, or with a pool that is not one."""
        count, keys = len(self.urls), self.key_env
        if not self.urls:
            for key, value in (("pool", self.pool), ("weights", self.weights)):
                if value:
                    return key, f"has {key}, for several endpoints only; give urls = [...]"
            if isinstance(keys, tuple):
                return "key_env", "takes one name as key_env, unless there are urls"
            return None if self.url else (None, "lacks the key 'url', or urls = [...] and pool")
        if self.url:
            return "urls", "has both url and urls; give one"
        if not self.pool:
            return "urls", 'needs pool = "NAME", which stands for the urls in the identity'
        if len(set(self.urls)) < count:
            return "urls", "has an endpoint twice in its urls"
        if self.weights and (len(self.weights) != count or not all(0 < one < float("inf") for one in self.weights)):
            return "weights", f"needs {count} weights above 0, one for each of the urls"
        if isinstance(keys, tuple) and len(keys) != count:
            return "key_env", f"takes one name as key_env, or {count}, one for each of the urls"
        return None

    def members(self) -> Mapping[str, ModelConfig]:
        """Return the model at each endpoint of its pool."""
        addresses = self._addresses() if self.urls else []
        alone = replace(self, urls=(), pool=None, weights=())
        return {url: replace(alone, url=url, key_env=variable) for url, variable in addresses}

    def require_pinned(self, section: str) -> Pinned:
        """Return the pinned values.

        Raises:
            ConfigError: the endpoint has not been checked.
        """
        if self.pinned is None:
            raise ConfigError(
                f"[{section}] how to call {self.model} is not known yet; run `arbitrage check`, which finds out and writes "
                "it into the configuration"
            )
        return self.pinned

    def list_pricing(self) -> Pricing | None:
        """Return the provider's list price, if there is one, and the same at all endpoints."""
        prices = [list_price(self.model, url) for url in self.urls or (self.url,)]
        tokens = Spent(calls=1, input_tokens=1_000_000, output_tokens=1_000_000)
        costs = {None if price is None else price.cost(tokens) for price in prices}
        return prices[0] if len(costs) == 1 else None

    def variants(self, role: Section, form: Form) -> Sequence[ModelConfig]:
        """Return the one way to call it, as if checked."""
        return [self.with_pinned(Pinned())]

    def learned(self, served: str | None) -> Pinned | None:
        """Return what this variant is called with, and the model that replied."""
        return None if self.pinned is None else replace(self.pinned, served=served)

    def with_pinned(self, pinned: Pinned | None) -> Self:
        """Return the section with these pinned values."""
        return replace(self, pinned=pinned)

    def for_estimate(self) -> Self:
        """Return the section without the served model, which no placeholder reply names."""
        return self if self.pinned is None else self.with_pinned(replace(self.pinned, served=None))


class ChatEndpointConfig(EndpointConfig, frozen=True, kw_only=True):
    """A model behind a chat endpoint; temperature "default" sends none."""

    temperature: float | Literal["default"] = 0.1
    max_tokens: int | None = None
    reasoning_effort: str | None = None
    seed: int | None = None

    def settings(self, section: str) -> Settings:
        """Return the settings of its requests.

        Raises:
            ConfigError: the endpoint has not been checked.
        """
        pinned = self.require_pinned(section)
        return Settings(
            model=self.model,
            served=pinned.served,
            temperature=None if self.temperature == "default" else self.temperature,
            max_tokens=self.max_tokens,
            token_field=pinned.token_field,
            reasoning_effort=self.reasoning_effort,
            seed=self.seed,
        )

    def variants(self, role: Section, form: Form) -> Sequence[ModelConfig]:
        """Return both names of the token limit."""
        return [self.with_pinned(Pinned(token_field=name)) for name in get_args(TokenField)]

    def try_next(self, error: ScorerError) -> bool:
        """Tell whether the endpoint asked for the other name of the token limit."""
        if not isinstance(error, UpstreamError) or self.pinned is None:
            return False
        other = self.pinned.token_field == "max_tokens" and "max_completion_tokens" in str(error)
        return other and error.status in (400, 422)
