"""Kind `sampling`: ask several times; an option's score is the share of samples that name it.

Knows nothing of confidences: any model that can name an option will do.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Literal

from conformal_arbitrage.errors import ReplyError, ScorerError
from conformal_arbitrage.scorers.base import Identity, Scores
from conformal_arbitrage.scorers.completions import PATH, Settings, choice_of, message_of, served_by
from conformal_arbitrage.scorers.kinds import BuildContext, ChatEndpointConfig
from conformal_arbitrage.scorers.logprob import LETTERS_SHA256, lettered
from conformal_arbitrage.scorers.rendering import RENDERING, pictures_identity, with_pictures
from conformal_arbitrage.scorers.user_code import source_identity
from conformal_arbitrage.types import Query, Spent
from conformal_arbitrage.upstream.base import Call, Port, spent_of, together

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingScorer:
    """Scores options by their shares of k samples.

    A sample that names no option counts for none, so the shares may sum to less than 1; if no sample names an option,
    there are no scores.

    Attributes:
        port: the endpoint.
        settings: model, temperature (1 makes sense here), limits.
        samples: k.
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
        own = {} if self.normaliser is named_option else source_identity(self.normaliser)
        object.__setattr__(self, "_source", own)

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
