"""Kind `logprob`: the probabilities of the answer letters in a chat model's first token.

Knows nothing of elicited confidences: the model only names a letter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, ClassVar

from conformal_arbitrage.errors import ReplyError
from conformal_arbitrage.scorers.base import Identity, Scores
from conformal_arbitrage.scorers.completions import PATH, Settings, choice_of, served_by
from conformal_arbitrage.scorers.kinds import BuildContext, ChatEndpointConfig
from conformal_arbitrage.scorers.rendering import RENDERING, pictures_identity, with_pictures
from conformal_arbitrage.types import Query, Spent, as_list, as_object, is_list
from conformal_arbitrage.upstream.base import Call, Port, fingerprint, is_number

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
        port: the endpoint.
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
