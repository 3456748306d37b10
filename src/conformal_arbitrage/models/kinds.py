"""What every kind of scorer shares: a section of arbitrage.toml that can build, price and test its model."""

import asyncio
import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from textwrap import dedent
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Literal, Self, get_args

from msgspec import Struct
from msgspec.structs import replace

from conformal_arbitrage.errors import ArbitrageError, ConfigError, ScorerError, UpstreamError
from conformal_arbitrage.models.completions import Mode, RequestSettings, Settings, TokenField
from conformal_arbitrage.models.endpoint import FAILURES, Endpoint, Pool, key_from
from conformal_arbitrage.models.port import Answerer, Port, Scorer
from conformal_arbitrage.models.resilience import Breaker, Price, Pricing, list_price
from conformal_arbitrage.types import Role, Spent

# --- Code that the user wrote ---


@dataclass(frozen=True, slots=True)
class UserCode:
    """Translate the exceptions of a block that runs the user's code: `with UserCode(translate): function(query)`.

    A function, a grader or a plugin that we did not write may raise anything, so this takes every `Exception`, as only the
    boundary of the store's writer thread does too. Nothing is swallowed: `translate` returns the error to raise in its
    stead, with the original as its cause. A `ScorerError` passes unchanged, since it already says what went wrong, and so
    do KeyboardInterrupt, SystemExit and CancelledError, which are not `Exception`s.
    """

    translate: Callable[[Exception], ArbitrageError]

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, ScorerError):
            raise self.translate(error) from error


def describe(error: Exception) -> str:
    """Return an exception's type and message on one line, cut to a readable length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.200}"


def source_identity(code: Any) -> dict[str, str]:
    """Return `source_sha256`, the digest of the source text of a function, or of the class of an object.

    Empty if it is not available: C functions, partials, lambdas of a shell. What the function calls is not part of
    its source, so a change there needs a new name.
    """
    whole: Any = inspect.unwrap(code) if callable(code) else code
    if isinstance(whole, partial):
        return {}
    try:
        source = inspect.getsource(whole if _has_definition(whole) else whole.__class__)
    except (OSError, TypeError):
        return {}
    return {"source_sha256": hashlib.sha256(dedent(source).encode()).hexdigest()}


def _has_definition(code: object) -> bool:
    return inspect.isroutine(code) or inspect.isclass(code)


def load_object(name: str, folder: str | Path = "") -> Any:
    """Return the Python object that MODULE:NAME refers to; modules may lie in `folder` or in the current folder.

    Raises:
        ConfigError: there is no such object, or its module fails on import.
    """
    module, _, attribute = name.removeprefix("python:").partition(":")

    def translate(error: Exception) -> ConfigError:
        return ConfigError(f"{name!r} cannot be loaded ({describe(error)}); write MODULE:NAME of a Python object")

    with UserCode(translate):
        return getattr(_import(module, [str(Path(folder).resolve()), str(Path.cwd())]), attribute)


def _import(module: str, folders: list[str]) -> ModuleType:
    """Import a module, looking into the folders first.

    The command line must find a `rules.py` beside arbitrage.toml, but a library must not change where the rest of the
    program finds its modules. So the folders are searched through sys.path only if the module's top-level package lies in
    one of them, and only while it is imported: its own imports of neighbouring files work, and afterwards sys.path is as
    before. Loading the file by its location alone would not do, since neighbours would not be found.
    """
    importlib.invalidate_caches()  # the file may be younger than the last look into its folder
    top = module.partition(".")[0]
    if top in sys.modules or PathFinder.find_spec(top, folders) is None:
        return importlib.import_module(module)
    with _searched_first(folders):
        return importlib.import_module(module)


@contextmanager
def _searched_first(folders: list[str]) -> Generator[None]:
    before = sys.path[:]
    sys.path[:0] = folders
    try:
        yield
    finally:
        sys.path[:] = before


# --- Terminal ---


SKIP = "-"


def has_terminal() -> bool:
    """Tell whether a person can be asked: standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


class Terminal:
    """Prompts for keys, one prompt at a time: a key press at a terminal, the first letter of a line elsewhere."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()

    async def key(self, text: str, allowed: str) -> str:
        """Show a text and wait for one of the allowed keys; end of input counts as skipping."""
        async with self._one_at_a_time:
            sys.stderr.write(text)
            sys.stderr.flush()
            while True:
                key = (await self._read()).strip().lower()[:1]
                if key and key in allowed:
                    sys.stderr.write(f"{key}\n")
                    return key

    async def _read(self) -> str:
        """Return the next key or line without blocking the event loop."""
        loop = asyncio.get_running_loop()
        stream = sys.stdin.fileno()
        ready: asyncio.Future[None] = loop.create_future()
        with _key_mode(stream):
            try:
                loop.add_reader(stream, lambda: ready.done() or ready.set_result(None))
            except PermissionError:  # a file or /dev/null, which is always ready
                ready.set_result(None)
            try:
                await ready
            finally:
                loop.remove_reader(stream)
            return _read_next(stream).decode(errors="replace") or SKIP


def _read_next(stream: int) -> bytes:
    """Return one key at a terminal, else one line; empty at the end of input."""
    data = os.read(stream, 1)
    while data and not data.endswith(b"\n") and not os.isatty(stream) and (more := os.read(stream, 1)):
        data += more
    return data


@contextmanager
def _key_mode(stream: int) -> Generator[None]:
    """Deliver keys as they are pressed, if the stream is a terminal; restore its mode afterwards."""
    if not os.isatty(stream):
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(stream)
    tty.setcbreak(stream)
    try:
        yield
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)


# --- What every kind of scorer shares ---


Form = Literal["menu", "text"]
Section = Literal["primary", "guardian", "judge", "stronger"]
ROLES: tuple[Role, Role] = ("primary", "guardian")


class Pinned(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How an endpoint wants to be called, as `arbitrage check` determined; part of the identity."""

    mode: Mode = "plain"
    token_field: TokenField = "max_tokens"
    served: str | None = None


@dataclass(slots=True, kw_only=True)
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
        self.section = self.section or self.role

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

    def logprob_probe(self, role: Section, pinned: Pinned | None) -> "ModelConfig | None":
        """Return a section over menus that shows whether the endpoint lists token probabilities, if it can be asked."""
        return None


class EndpointConfig(ModelConfig, frozen=True, kw_only=True):
    """A model behind an HTTP endpoint, or behind several.

    Attributes:
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
        if self.weights and (
            len(self.weights) != count or not all(0 < weight < float("inf") for weight in self.weights)
        ):
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
        """Return the settings of its requests."""
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
