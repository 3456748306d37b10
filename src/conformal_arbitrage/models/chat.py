"""Kind `chat`: scores, free text and tool calls from any OpenAI-compatible chat endpoint."""

import json
import math
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, get_args

from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict, fields, replace

from conformal_arbitrage.errors import ConfigError, CutOffError, ReplyError, ScorerError, UpstreamError
from conformal_arbitrage.models.choices import LOWEST, LogprobConfig
from conformal_arbitrage.models.completions import (
    PATH,
    Mode,
    RequestSettings,
    Settings,
    TokenField,
    completion_of,
    message_of,
    other_model,
    requested_identity,
    response_format,
    served_by,
)
from conformal_arbitrage.models.endpoint import delta_of
from conformal_arbitrage.models.kinds import BuildContext, ChatEndpointConfig, Form, ModelConfig, Pinned, Section
from conformal_arbitrage.models.port import (
    Answer,
    Call,
    Identity,
    Port,
    Reply,
    Scores,
    check_values,
    fingerprint,
    is_number,
    spent_of,
)
from conformal_arbitrage.models.rendering import (
    PROMPTS,
    RENDERING,
    VERBATIM,
    Confidences,
    Message,
    Prompt,
    json_object,
    pictures_identity,
    with_pictures,
)
from conformal_arbitrage.types import JSON, ChatRequest, Chunk, Query, Spent, as_object, content_text, transcript

# --- ChatAnswerer ---


Confidence = Literal["logprob", "ask"]
_RATING_LIMIT = 50
_TOKEN_FIELDS: tuple[str, ...] = get_args(TokenField)
_RATE = """Below are a conversation and an assistant's answer to it. How sure are you that the answer is right and does \
what was asked?

# Conversation
{conversation}

# Answer
{answer}

Reply with ONE JSON object and nothing else: {{"confidence": c}}, c from 0 (surely wrong) to 1 (surely right)."""
_RATING = {
    "type": "object",
    "properties": {"confidence": {"type": "number"}},
    "required": ["confidence"],
    "additionalProperties": False,
}


@dataclass(slots=True, kw_only=True)
class ChatAnswerer:
    """Answers from a chat model.

    Attributes:
        settings: defaults for fields that the application's request omits; the model's name always applies.
        confidence: "logprob" (the geometric mean of its token probabilities, from the same call), "ask" (a second, short
            call that rates the finished answer), or None for a Guardian, which needs none.
        mode: the output mode of the second call.
        request_settings: whether requests keep their own temperature, limits and the like, which is then part of the
            identity; if they are pinned, whoever sends a request refuses one that differs.
    """

    port: Port
    settings: Settings
    confidence: Confidence | None = None
    mode: Mode = "plain"
    request_settings: RequestSettings = "pinned"
    _defaults: Mapping[str, Any] = field(init=False, repr=False, compare=False)
    _identity: Identity = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepare the fields that go into every request, and the identity, which requests with settings look at."""
        self._defaults = self.settings.body()
        self._identity = self._identified()

    @property
    def identity(self) -> Identity:
        """Endpoint, settings and the source of the confidence."""
        return self._identity

    def _identified(self) -> Identity:
        rating: dict[str, Any] = {"rendering": VERBATIM, "confidence": self.confidence}
        if self.confidence == "ask":
            rating |= {
                "rendering": RENDERING,
                "prompt_sha256": fingerprint(_RATE),
                "mode": self.mode,
                "parser": "json confidence; 1",
            }
            rating["rating_limit"] = max(_RATING_LIMIT, self.settings.max_tokens or 0)
        requested = requested_identity(self.request_settings)
        return {"kind": "answer", "endpoint": self.port.origin, **self.settings.identity, **rating, **requested}

    async def answer(self, request: ChatRequest) -> Answer:
        """Return the model's answer and its confidence.

        Raises:
            ScorerError: there is no answer. A confidence that cannot be obtained is None instead.
        """
        return await self._finished(request, await self.port.call(self._call(request)))

    async def sample(self, request: ChatRequest, number: int) -> Answer:
        """Return one of several answers to the same request, each drawn on its own."""
        return await self._finished(request, await self.port.call(self._call(request, number)))

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Chunk | Answer]:
        """Yield the chunks of the model's answer, then the answer with its confidence.

        Raises:
            ScorerError: there is no answer, or it broke off.
        """
        async with aclosing(self.port.stream(self._call(request))) as items:
            async for item in items:
                if isinstance(item, Reply):
                    break
                self._check_served(item)
                yield item
            else:
                raise AssertionError("unreachable: a stream ends with its reply")
        yield await self._finished(request, item)  # by now its slot is free for the call that rates the answer

    def _call(self, request: ChatRequest, sample: int = 0) -> Call:
        incoming = request.body
        limits = [incoming[name] for name in _TOKEN_FIELDS if incoming.get(name) is not None]
        limit = limits[0] if limits else self.settings.max_tokens
        fields = {
            name: incoming[name] for name in sorted(incoming) if name not in _TOKEN_FIELDS
        }  # equal requests, equal bytes
        body = {**self._defaults, **fields, "model": self.settings.model}
        if limits:
            body[self.settings.token_field] = limit  # under the name that the endpoint takes
        if self.confidence == "logprob":
            body["logprobs"] = True
        seed: object = body.get("seed")
        if sample and is_number(seed):
            body["seed"] = seed + sample  # with one seed, all samples would be the same
        output_limit = limit if isinstance(limit, int) else None
        return Call(path=PATH, body=body, id=request.id, sample=sample, output_limit=output_limit)

    async def _finished(self, request: ChatRequest, reply: Reply) -> Answer:
        choice, message, served = completion_of(reply, self.settings, reply.spent, tools=True)
        if message.get("tool_calls"):
            _check_gradable(message, reply.spent)
        spent = reply.spent
        sure = mean_probability(choice) if self.confidence == "logprob" else None
        if self.confidence == "ask":
            sure, rated = await self._rating(request, message)
            spent += rated
        return Answer(message=message, confidence=sure, spent=spent, document=reply.document, served=served)

    def _check_served(self, chunk: Chunk) -> None:
        """Refuse a chunk of another model than the pinned one: once passed on, it cannot be taken back."""
        pinned, served = self.settings.served, chunk.get("model")
        if pinned is None or served == pinned:
            return
        if served or delta_of(chunk):  # content filters add chunks with neither a model nor a delta
            raise other_model(str(served), pinned, Spent(calls=1, input_tokens=None, output_tokens=None, cost=None))

    async def _rating(self, request: ChatRequest, message: Mapping[str, Any]) -> tuple[float | None, Spent]:
        """Ask the model to rate its answer; without a usable reply the rating is None."""
        prompt = _RATE.format(conversation=transcript(request.messages), answer=answer_text(message))
        limit = max(_RATING_LIMIT, self.settings.max_tokens or 0)
        body = self.settings.body() | {self.settings.token_field: limit}
        body |= {"messages": [{"role": "user", "content": prompt}], **response_format(self.mode, "rating", _RATING)}
        try:
            reply = await self.port.call(Call(path=PATH, body=body, id=request.id, sample=1, output_limit=limit))
            text = content_text(message_of(reply, self.settings, reply.spent)["content"])
        except ScorerError as error:
            return None, spent_of(error)
        return rating(text, "confidence"), reply.spent


def rating(text: str, name: str) -> float | None:
    """Return the number in [0, 1] under this name of the JSON object in a text; None if there is none."""
    try:
        value: object = json_object(text).get(name)
    except ValueError:
        return None
    return float(value) if is_number(value) and 0 <= value <= 1 else None


class _Token(Struct):
    logprob: float


class _Logprobs(Struct):
    content: list[_Token]


def mean_probability(choice: Mapping[str, Any]) -> float | None:
    """Return exp of the mean log-probability of the answer's tokens; None if any is missing or impossible."""
    try:
        tokens = convert(choice.get("logprobs"), _Logprobs).content
    except ValidationError:
        return None
    if not tokens or any(token.logprob > 1e-6 for token in tokens):
        return None
    return min(1.0, math.exp(sum(max(token.logprob, LOWEST) for token in tokens) / len(tokens)))


def answer_text(message: Mapping[str, Any]) -> str:
    """Return an answer as plain text: its content, or all its tool calls with names and canonical arguments.

    Raises:
        ReplyError: a tool call is malformed.
    """
    calls: JSON = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        content: JSON = message.get("content")
        return content if isinstance(content, str) else content_text(content)
    return json.dumps([_canonical(call) for call in calls], sort_keys=True, ensure_ascii=False)


def _check_gradable(message: Mapping[str, Any], spent: Spent) -> None:
    """Refuse tool calls that could not be graded in a log: they must not stand in a live decision either."""
    try:
        answer_text(message)
    except ReplyError as error:
        error.spent = spent
        raise


def _canonical(call: JSON) -> dict[str, Any]:
    """Return a tool call without the differences between equal ones: ids, whitespace and the order of keys."""
    if not isinstance(call, dict):
        raise ReplyError(f"{call!r:.80} is not a tool call")
    function = as_object(call.get("function") or call.get("custom"))
    arguments = function.get("arguments", function.get("input"))
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # free-form input stays as it is
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}


# --- Kind `chat` ---


LARGEST_SAMPLE = 64
_AGAIN = "That reply cannot be read. Answer the same question once more, strictly in the format asked for."


class ChatConfig(ChatEndpointConfig, frozen=True, kw_only=True, tag="chat"):
    """Confidences elicited from a chat model; in text form, its answers.

    Attributes:
        prompt: the name of a prompt, or MODULE:NAME of one's own.
        reask: whether an unreadable reply is followed by one request to correct it.
        confidence: how the Primary's confidence is obtained in text form.
        candidates: in text form, how many answers the Primary samples; how many agree is then its confidence.
        same_meaning: which of them agree: by "words", "number", "json", "judge", or python:MODULE:NAME.
        candidates_of: names of further models that the samples are drawn from, in turn with this one.
    """

    prompt: str = "confidences"
    reask: bool = False
    confidence: Confidence | None = None
    candidates: int | None = None
    same_meaning: str = "words"
    candidates_of: tuple[str, ...] = ()

    answers_text: ClassVar[bool] = True

    def build(self, context: BuildContext) -> "ChatScorer":
        """Build the scorer."""
        mode, settings = self.require_pinned(context.section).mode, self.settings(context.section)
        prompt = self._prompt(context)
        return ChatScorer(
            port=self.connect(context),
            settings=settings,
            prompt=prompt,
            mode=mode,
            reask=self.reask,
            pictures=self.pictures,
        )

    def build_answerer(self, context: BuildContext) -> ChatAnswerer:
        """Build the answerer; only a Primary needs a confidence."""
        mode, settings = self.require_pinned(context.section).mode, self.settings(context.section)
        confidence = self.confidence if context.role == "primary" else None
        return ChatAnswerer(
            port=self.connect(context),
            settings=settings,
            confidence=confidence,
            mode=mode,
            request_settings=context.request_settings,
        )

    def _prompt(self, context: BuildContext) -> Prompt:
        if self.prompt in PROMPTS:
            return PROMPTS[self.prompt]
        if ":" not in self.prompt:
            known = ", ".join(PROMPTS)
            raise ConfigError(f"there is no prompt {self.prompt!r}; use {known}, or MODULE:NAME of your own")
        return context.load(self.prompt)

    def problem(self, role: Section, forms: Collection[Form]) -> tuple[str | None, str] | None:
        """Refuse a Primary that could only defer in text form."""
        if role == "primary" and "text" in forms and self.confidence is None and self.candidates is None:
            return None, (
                'in text form the Primary needs confidence = "logprob" or "ask", or candidates = 4; without one it can only '
                "defer"
            )
        if self.candidates is not None and (role != "primary" or "text" not in forms):
            return "candidates", 'candidates are for a Primary in free text; over menus, use kind = "sampling"'
        return super().problem(role, forms)

    def sampled_answers(self) -> tuple[int, str] | None:
        """Return the number of candidates and what groups them, if there are any."""
        return None if self.candidates is None else (self.candidates, self.same_meaning)

    def candidate_models(self) -> tuple[str, ...]:
        """Return the further models that samples are drawn from."""
        return self.candidates_of

    def mistake(self) -> tuple[str | None, str] | None:
        """Refuse candidates that would all be the same, or that have a second source of confidence."""
        models = 1 + len(self.candidates_of)
        if self.candidates is None and models == 1:
            return super().mistake()
        if self.candidates is None or models > self.candidates or len(set(self.candidates_of)) < models - 1:
            return "candidates_of", (
                f"needs candidates = N, at least one for each of its {models} models, each named once; got {self.candidates}"
            )
        if not 2 <= self.candidates <= LARGEST_SAMPLE:
            return "candidates", f"needs candidates from 2 to {LARGEST_SAMPLE}; got {self.candidates}"
        if self.confidence is not None:
            return "candidates", "has both confidence and candidates, whose agreement is the confidence; give one"
        if self.temperature == 0 and self.candidates > models:
            return "temperature", "has temperature 0, at which all candidates are the same; give one above 0"
        return super().mistake()

    def limits_replies(self, form: Form) -> bool:
        """Tell whether replies have a limit: over menus always, in free text if max_tokens is set."""
        return form == "menu" or self.max_tokens is not None

    def variants(self, role: Section, form: Form) -> Sequence[ModelConfig]:
        """Return structured output by schema, then JSON mode, then plain text; each with both names of the token limit."""
        modes: Sequence[Mode] = get_args(Mode) if self._structured(role, form) else ("plain",)
        ways = [Pinned(mode=mode, token_field=name) for mode in modes for name in get_args(TokenField)]
        return [replace(self, pinned=pinned, reask=False) for pinned in ways]

    def _structured(self, role: Section, form: Form) -> bool:
        """Tell whether any reply is to be JSON: scores, or the rating of an answer."""
        if role == "judge":
            return False
        if form == "text":
            return role == "primary" and self.confidence == "ask"
        prompt = PROMPTS.get(self.prompt)
        return prompt is None or prompt.schema(2) is not None

    def try_next(self, error: ScorerError) -> bool:
        """Tell whether another way of asking may help: not after a wrong key, a wrong temperature or a cut-off reply."""
        if isinstance(error, UpstreamError):
            return error.status in (400, 404, 415, 422, 500, 501) and "temperature" not in str(error)
        return not isinstance(error, CutOffError)

    def logprob_probe(self, role: Section, pinned: Pinned | None) -> ModelConfig | None:
        """Return the same endpoint as kind `logprob`."""
        if role == "judge" or pinned is None:
            return None
        shared = {f.name for f in fields(ChatEndpointConfig)}
        values: dict[str, Any] = {name: value for name, value in asdict(self).items() if name in shared}
        return LogprobConfig(**values).with_pinned(replace(pinned, served=None))

    def with_prompt(self, name: str) -> Self:
        """Return the section with another prompt."""
        return replace(self, prompt=name)

    def for_estimate(self) -> Self:
        """Return the section without a second request after an unreadable reply."""
        return replace(super().for_estimate(), reask=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatScorer:
    """Asks a chat model for a number per option.

    Attributes:
        settings: model, temperature, limits.
        prompt: how options are presented and the reply is read.
        mode: structured output by schema, by JSON mode, or plain text.
        reask: whether an unreadable reply is followed by one request to correct it.
        pictures: whether the model takes pictures, which are shown behind the text.
    """

    port: Port
    settings: Settings
    prompt: Prompt = field(default_factory=Confidences)
    mode: Mode = "plain"
    reask: bool = False
    pictures: bool = False

    @property
    def identity(self) -> Identity:
        """Endpoint, settings, rendering, prompt, mode and whether it asks again."""
        limits = {"max_tokens": self.settings.max_tokens or "50, or 12 an option"}
        asking = {"mode": self.mode, "reask": self.reask, "option_order": "as given"}
        who = {"kind": "chat", "endpoint": self.port.origin, "rendering": RENDERING}
        seeing = pictures_identity(pictures=self.pictures)
        return {**who, **self.settings.identity, **limits, **self.prompt.identity, **asking, **seeing}

    async def score(self, query: Query) -> Scores:
        """Return one confidence per option."""
        messages = self.prompt.messages(query)
        if not isinstance(query.context, str):
            messages = with_pictures(messages, query, pictures=self.pictures)
        try:
            return await self._once(query, messages)
        except ReplyError as error:
            if not self.reask or error.raw is None:  # cut off, declined or another model: nothing to correct
                raise
            again: list[Message] = [
                {"role": "assistant", "content": error.raw},
                {"role": "user", "content": _AGAIN},
            ]
            return await self._once(query, [*messages, *again], spent_of(error))

    async def _once(self, query: Query, messages: list[Message], before: Spent | None = None) -> Scores:
        limit = self.settings.max_tokens or max(50, 12 * len(query.actions) + 2)
        body = {**self.settings.body(default_limit=limit), "messages": messages, **self._format(len(query.actions))}
        try:
            reply = await self.port.call(Call(path=PATH, body=body, id=query.id, output_limit=limit))
        except ScorerError as error:
            error.spent = spent_of(error) if before is None else before + spent_of(error)
            raise
        spent = reply.spent if before is None else before + reply.spent
        message = message_of(reply, self.settings, spent)
        text = str(message["content"])
        try:
            scores = self.prompt.read(text, query)
        except ValueError as error:
            raise ReplyError(f"{error}; the reply was {text!r:.200}", spent=spent, raw=text) from error
        values = check_values(scores, len(query.actions), spent=spent, raw=text)
        return Scores(values=values, spent=spent, raw=text, served=served_by(reply))

    def _format(self, actions: int) -> dict[str, Any]:
        schema = self.prompt.schema(actions)
        return {} if schema is None else response_format(self.mode, "scores", schema)
