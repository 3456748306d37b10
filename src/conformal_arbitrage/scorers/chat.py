"""Kind `chat`: scores elicited from any OpenAI-compatible chat endpoint; in text form, its answers.

The elicitation mode is a setting that `arbitrage check` determines once. It is never switched at run time: that would
change the distribution of the scores after calibration.

Knows nothing of transport.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, get_args

from msgspec.structs import asdict, fields, replace

from conformal_arbitrage.errors import ConfigError, CutOffError, ReplyError, ScorerError, UpstreamError
from conformal_arbitrage.scorers.answers import ChatAnswerer, Confidence
from conformal_arbitrage.scorers.base import Identity, Scores, check_values
from conformal_arbitrage.scorers.completions import (
    PATH,
    Mode,
    Settings,
    TokenField,
    message_of,
    response_format,
    served_by,
)
from conformal_arbitrage.scorers.kinds import BuildContext, ChatEndpointConfig, Form, ModelConfig, Pinned, Section
from conformal_arbitrage.scorers.logprob import LogprobConfig
from conformal_arbitrage.scorers.prompts import PROMPTS, Confidences, Message, Prompt
from conformal_arbitrage.scorers.rendering import RENDERING, pictures_identity, with_pictures
from conformal_arbitrage.types import Query, Spent
from conformal_arbitrage.upstream.base import Call, Port, spent_of

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

    def logprob_probe(self, role: Section, form: Form, pinned: Pinned | None) -> ModelConfig | None:
        """Return the same endpoint as kind `logprob`."""
        if form == "text" or role == "judge" or pinned is None:
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
        port: the endpoint.
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
