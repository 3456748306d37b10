"""Kinds that read a choice: token probabilities, repeated samples, OpenAI's Decisions API."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any, ClassVar, Literal

from conformal_arbitrage.errors import RefusalError, ReplyError, ScorerError
from conformal_arbitrage.models.completions import PATH, Settings, choice_of, message_of, other_model, served_by
from conformal_arbitrage.models.kinds import BuildContext, ChatEndpointConfig, EndpointConfig, source_identity
from conformal_arbitrage.models.port import (
    Call,
    Identity,
    Port,
    Scores,
    check_values,
    fingerprint,
    is_number,
    spent_of,
    together,
)
from conformal_arbitrage.models.rendering import (
    RENDERING,
    messages_or_text,
    pictures_identity,
    require_seen,
    with_pictures,
)
from conformal_arbitrage.types import JSON, Query, Spent, as_list, as_object, is_list

# --- Kind `logprob` ---


TOP = 20
LOWEST = -1e6  # smaller logprobs are raised to this one: no probability either way, and sums stay finite
_ASK = "{question}\n\n{options}\n\nAnswer with the letter of the best option and nothing else."


class LogprobConfig(ChatEndpointConfig, frozen=True, kw_only=True, tag="logprob"):
    """Probabilities of the answer letters."""

    lists_logprobs: ClassVar[bool | None] = True

    def build(self, context: BuildContext) -> "LogprobScorer":
        """Build the scorer."""
        settings = self.settings(context.section)
        return LogprobScorer(port=self.connect(context), settings=settings, pictures=self.pictures)


def lettered(query: Query) -> str:
    """Return the question with its options behind letters."""
    if len(query.actions) > len(ascii_uppercase):
        raise ReplyError(f"{len(query.actions)} options; letters go up to {len(ascii_uppercase)}")
    options = "\n".join(f"{letter}. {text}" for letter, text in zip(ascii_uppercase, query.actions, strict=False))
    return _ASK.format(question=query.text, options=options)


LETTERS_SHA256 = fingerprint(_ASK)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobScorer:
    """Scores options by the probabilities of their letters, which sum to 1.

    The endpoint lists only its likeliest tokens. A letter that is not among them gets the most its token can have: no
    more than the last one listed, and no more than the listed ones leave. So the top option never appears to lead by more
    than it does, if each letter is one token.

    Attributes:
        settings: model and temperature; the limit is one token unless max_tokens is set.
        pictures: whether the model takes pictures, which are shown behind the text.
    """

    port: Port
    settings: Settings
    pictures: bool = False

    @property
    def identity(self) -> Identity:
        """Endpoint, settings, rendering and prompt."""
        limits = {"max_tokens": self.settings.max_tokens or 1}
        asking = {"prompt": "letters", "prompt_sha256": LETTERS_SHA256, "parser": f"top {TOP} of the first token; 1"}
        who = {"kind": "logprob", "endpoint": self.port.origin, "rendering": RENDERING}
        seeing = pictures_identity(pictures=self.pictures)
        return {**who, **self.settings.identity, **limits, **asking, "option_order": "as given", **seeing}

    async def score(self, query: Query) -> Scores:
        """Return the probability of each option's letter."""
        body = self.settings.body(default_limit=1)
        messages = with_pictures([{"role": "user", "content": lettered(query)}], query, pictures=self.pictures)
        body |= {"messages": messages, "logprobs": True, "top_logprobs": TOP}
        limit = self.settings.max_tokens or 1
        reply = await self.port.call(Call(path=PATH, body=body, id=query.id, output_limit=limit))
        listed = _listed(choice_of(reply, self.settings, reply.spent), reply.spent)
        values = letter_shares(listed, len(query.actions))
        raw = repr(listed)[:2000]
        if values is None:
            raise ReplyError(
                f"no letter of an option is among the likeliest tokens {raw:.200}", spent=reply.spent, raw=raw
            )
        return Scores(values=values, spent=reply.spent, raw=raw, served=served_by(reply))


def _listed(choice: Mapping[str, Any], spent: Spent) -> list[tuple[str, float]]:
    """Return the likeliest first tokens with their probabilities."""
    content = as_list(as_object(choice.get("logprobs")).get("content"))
    top: object = as_object(content[0] if content else None).get("top_logprobs")
    if not is_list(top):
        raise ReplyError("the endpoint lists no logprobs; use another kind of scorer", spent=spent)
    entries = [as_object(entry) for entry in top]
    pairs = [(entry.get("token"), entry.get("logprob")) for entry in entries]
    return [(t, math.exp(max(v, LOWEST))) for t, v in pairs if isinstance(t, str) and is_number(v) and v <= 1e-6]


def letter_shares(listed: list[tuple[str, float]], count: int) -> tuple[float, ...] | None:
    """Return each letter's share of the letters' probability; None if no letter is listed."""
    letters = ascii_uppercase[:count]
    totals = dict.fromkeys(letters, 0.0)
    for token, probability in listed:
        letter = token.strip().removeprefix("(").removesuffix(".").removesuffix(")").upper()
        if letter in totals:
            totals[letter] += probability
    if not any(totals.values()):
        return None
    most = max(0.0, min(min(p for _, p in listed), 1.0 - sum(p for _, p in listed)))
    full = [totals[letter] or most for letter in letters]
    return tuple(p / sum(full) for p in full)


# --- Kind `sampling` ---


Normaliser = Callable[[str, Sequence[str]], int | None]
"""Takes a reply and the options, returns the index of the option it names; None if it names none."""


class SamplingConfig(ChatEndpointConfig, frozen=True, kw_only=True, tag="sampling"):
    """Shares of k samples; `normaliser = "MODULE:NAME"` reads replies in one's own way."""

    temperature: float | Literal["default"] = 1.0
    samples: int = 5
    normaliser: str | None = None

    def build(self, context: BuildContext) -> "SamplingScorer":
        """Build the scorer."""
        settings = self.settings(context.section)
        normaliser: Normaliser = context.load(self.normaliser) if self.normaliser else named_option
        port = self.connect(context)
        return SamplingScorer(
            port=port, settings=settings, samples=self.samples, normaliser=normaliser, pictures=self.pictures
        )


def named_option(text: str, actions: Sequence[str]) -> int | None:
    """Return the option a reply names: by its text, or by its letter alone or before a punctuation mark."""
    plain = text.strip().casefold()
    same = [k for k, action in enumerate(actions) if action.strip().casefold() == plain]
    if same:
        return same[0]
    letter = re.match(r"\W*(?:(?:answer|option)\W*)?([A-Z])(?=\s*$|[^\w\s'])", text.strip(), re.IGNORECASE)
    place = -1 if letter is None else ascii_uppercase.find(letter[1].upper())
    return place if 0 <= place < len(actions) else None


@dataclass(slots=True, kw_only=True)
class SamplingScorer:
    """Scores options by their shares of k samples.

    A sample that names no option counts for none, so the shares may sum to less than 1; if no sample names an option,
    there are no scores.

    Attributes:
        settings: model, temperature (1 makes sense here), limits.
        normaliser: reads a reply; its qualified name is part of the identity, and so is its source if it is available.
        pictures: whether the model takes pictures, which are shown behind the text.
    """

    port: Port
    settings: Settings
    samples: int = 5
    normaliser: Normaliser = named_option
    pictures: bool = False
    _source: Identity = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Pin the normaliser's source; the built-in one has a version instead."""
        self._source = {} if self.normaliser is named_option else source_identity(self.normaliser)

    @property
    def identity(self) -> Identity:
        """Endpoint, settings, prompt, k, the normaliser's name and source."""
        limits = {"max_tokens": self.settings.max_tokens or 8}
        asking = {"prompt": "letters", "prompt_sha256": LETTERS_SHA256, "samples": self.samples}
        named = getattr(self.normaliser, "__qualname__", type(self.normaliser).__qualname__)
        parser = f"{getattr(self.normaliser, '__module__', '')}:{named}; 2"
        who = {"kind": "sampling", "endpoint": self.port.origin, "rendering": RENDERING}
        reading = {"parser": parser, **self._source, "option_order": "as given"}
        seeing = pictures_identity(pictures=self.pictures)
        return {**who, **self.settings.identity, **limits, **asking, **reading, **seeing}

    async def score(self, query: Query) -> Scores:
        """Return the share of samples for each option."""
        done: list[Spent] = []
        try:
            replies = await together([self._sample(query, k, done) for k in range(self.samples)])
        except ScorerError as error:
            error.spent = sum(done, start=spent_of(error))
            raise
        spent = sum((s for _, s, _ in replies), start=Spent())
        chosen = [self.normaliser(text, query.actions) for text, _, _ in replies]
        raw = repr([text for text, _, _ in replies])[:2000]
        if all(choice is None for choice in chosen):
            raise ReplyError(f"none of {self.samples} samples names an option: {raw:.200}", spent=spent, raw=raw)
        values = tuple(chosen.count(k) / self.samples for k in range(len(query.actions)))
        return Scores(values=values, spent=spent, raw=raw, served=replies[0][2])

    async def _sample(self, query: Query, sample: int, done: list[Spent]) -> tuple[str, Spent, str | None]:
        messages = with_pictures([{"role": "user", "content": lettered(query)}], query, pictures=self.pictures)
        body = self.settings.body(default_limit=8) | {"messages": messages}
        if self.settings.seed is not None:
            body["seed"] = self.settings.seed + sample
        limit = self.settings.max_tokens or 8
        reply = await self.port.call(Call(path=PATH, body=body, id=query.id, sample=sample, output_limit=limit))
        choice_of(reply, self.settings, reply.spent)  # raises if another model replied, or if there is no completion
        try:
            text = str(message_of(reply, self.settings, reply.spent)["content"])
        except ReplyError:
            text = ""  # an empty sample names no option
        done.append(reply.spent)
        return text, reply.spent, served_by(reply)


# --- Kind `decisions` ---


_PATH = "/decisions"
FEWEST, MOST = 2, 255
INSTRUCTIONS = "Choose the best answer to the question in the input."


class DecisionsConfig(EndpointConfig, frozen=True, kw_only=True, tag="decisions"):
    """OpenAI's Decisions API."""

    instructions: str = INSTRUCTIONS

    def build(self, context: BuildContext) -> "DecisionsScorer":
        """Build the scorer."""
        served = self.require_pinned(context.section).served
        port = self.connect(context)
        return DecisionsScorer(
            port=port, model=self.model, served=served, instructions=self.instructions, pictures=self.pictures
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionsScorer:
    """Scores options by the probabilities of the choices of one question.

    Attributes:
        model: the model name to request.
        served: the model name that replies must carry, if pinned.
        instructions: the criterion to choose by.
        pictures: whether the model takes pictures.
    """

    port: Port
    model: str
    served: str | None = None
    instructions: str = INSTRUCTIONS
    pictures: bool = False

    @property
    def identity(self) -> Identity:
        """Endpoint, model, rendering and instructions."""
        return {
            "kind": "decisions",
            "endpoint": self.port.origin,
            "model": self.model,
            "served": self.served,
            "rendering": RENDERING,
            "prompt_sha256": fingerprint(self.instructions),
            "parser": "choice probabilities; 1",
            "option_order": "as given",
            **pictures_identity(pictures=self.pictures),
        }

    async def score(self, query: Query) -> Scores:
        """Return the probability of each option."""
        count = len(query.actions)
        if not FEWEST <= count <= MOST or len(set(query.actions)) < count:
            raise ReplyError(f"the Decisions API takes {FEWEST} to {MOST} different choices; got {count}")
        question = {
            "type": "choice",
            "instructions": self.instructions,
            "choices": [{"value": action} for action in query.actions],
        }
        context = query.context
        if not isinstance(context, str):
            require_seen(query, pictures=self.pictures)
            context = messages_or_text(query)
        body = {"model": self.model, "input": context, "questions": [question]}
        reply = await self.port.call(Call(path=_PATH, body=body, id=query.id, output_limit=count + 16))
        served = served_by(reply)
        if self.served is not None and served != self.served:
            raise other_model(served, self.served, reply.spent)
        raw = repr(reply.document.get("answers"))[:2000]
        probabilities = _probabilities(reply.document.get("answers"))
        if probabilities is None:
            raise RefusalError("the model declined this question", spent=reply.spent, raw=raw)
        values = check_values([probabilities.get(a) for a in query.actions], count, spent=reply.spent, raw=raw)
        return Scores(values=values, spent=reply.spent, raw=raw, served=served)


def _probabilities(answers: JSON) -> dict[str, JSON] | None:
    """Return the probabilities by choice, empty if there are none; None if the model refused."""
    answer: JSON = answers[0] if isinstance(answers, list) and answers else None
    if not isinstance(answer, dict):
        return {}
    if answer.get("type") == "refusal":
        return None
    entries: JSON = answer.get("probabilities")
    probabilities: dict[str, JSON] = {}
    entry: JSON
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(value := entry.get("value"), str):
            probabilities[value] = entry.get("probability")
    return probabilities
