"""Candidates: several sampled answers in free text, grouped by meaning; how many agree is the Primary's confidence.

The answer is the first of the largest group, its confidence the share of samples in that group. To everything else this
is one answerer in router form: `collect`, `ask` and the gateway ask it in the same way, and the certificate is bound to the
number of samples, to how they are grouped, and to the settings they are drawn with.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from conformal_arbitrage.errors import OtherModelError, ReplyError, ScorerError
from conformal_arbitrage.live.graders import JudgeGrader
from conformal_arbitrage.models.chat import answer_text
from conformal_arbitrage.models.kinds import UserCode, describe, source_identity
from conformal_arbitrage.models.port import Answer, Answerer, Identity, fingerprint, spent_of, together
from conformal_arbitrage.types import ChatRequest, Spent

TextNormaliser = Callable[[str], object]
"""Takes an answer and returns a text that is the same for answers that mean the same."""
_VERSION = 1
_SAME = 0.5
"""A judge's grade of an answer, measured against another, from which the two count as the same."""
_ARTICLES = re.compile(r"^(?:(?:the|a|an)\s+)+")
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


def same_words(text: str) -> str:
    """Return an answer without case, punctuation, repeated spaces and a leading article."""
    plain = " ".join(re.sub(r"[^\w\s]", " ", text.casefold()).split())
    return _ARTICLES.sub("", plain)


def same_number(text: str) -> str:
    """Return the last number of an answer, or its words if it has none."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return same_words(text)
    plain = numbers[-1].replace(",", "")
    with suppress(ValueError):
        return f"{float(plain):.12g}"
    return plain


def same_json(text: str) -> str:
    """Return an answer that is JSON in canonical form, or its words if it is not."""
    try:
        return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
    except (ValueError, RecursionError):
        return same_words(text)


NORMALISERS: dict[str, TextNormaliser] = {"words": same_words, "number": same_number, "json": same_json}


class Sampler(Protocol):
    """A model that can answer the same request several times."""

    @property
    def identity(self) -> Identity:
        """All that answers depend on."""
        ...

    async def sample(self, request: ChatRequest, number: int) -> Answer:
        """Return one of several independent answers."""
        ...


def can_sample(answerer: Answerer) -> TypeGuard[Sampler]:
    """Tell whether an answerer can answer the same request several times."""
    return hasattr(answerer, "sample")


class Grouping(Protocol):
    """Says which answers mean the same."""

    @property
    def identity(self) -> Identity:
        """All that groups depend on."""
        ...

    async def groups(self, request: ChatRequest, answers: Sequence[str]) -> tuple[list[int], Spent]:
        """Return the number of each answer's group, and what it took to tell."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalisedGrouping:
    """Answers mean the same if a function turns them into the same text."""

    name: str
    normaliser: TextNormaliser

    @property
    def identity(self) -> Identity:
        """The function's name, and the digest of its source if it is the user's."""
        built_in = self.name in NORMALISERS
        source = {} if built_in else source_identity(self.normaliser)
        return {"same_meaning": f"{self.name}; {_VERSION}" if built_in else self.name, **source}

    async def groups(self, request: ChatRequest, answers: Sequence[str]) -> tuple[list[int], Spent]:
        """Return the groups of equal normalised texts."""
        texts = [self._normalised(answer) for answer in answers]
        first = list(dict.fromkeys(texts))
        return [first.index(text) for text in texts], Spent()

    def _normalised(self, answer: str) -> str:
        def failure(error: Exception) -> ReplyError:
            return ReplyError(f"{self.name} failed on {answer!r:.60} ({describe(error)}); correct the function")

        with UserCode(failure):
            text: object = self.normaliser(answer)
        if not isinstance(text, str):
            raise ReplyError(f"{self.name} returned {text!r:.60} for {answer!r:.60}; it must return a text")
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGrouping:
    """Answers mean the same if the judge grades one as right where the other is the reference.

    Each answer is compared with the first of every group so far; equal words need no judge. Where the judge fails, the two
    count as different, which can only lower the agreement.
    """

    judge: JudgeGrader

    @property
    def identity(self) -> Identity:
        """The judge, as one digest."""
        return {"same_meaning": "judge", "judge_sha256": fingerprint(dict(self.judge.identity))}

    async def groups(self, request: ChatRequest, answers: Sequence[str]) -> tuple[list[int], Spent]:
        """Return the groups, answer by answer."""
        firsts: list[str] = []
        numbers: list[int] = []
        spent = Spent()
        for answer in answers:
            number = next((k for k, first in enumerate(firsts) if same_words(first) == same_words(answer)), None)
            if number is None:
                number, took = await self._judged(request, answer, firsts)
                spent += took
            if number == len(firsts):
                firsts.append(answer)
            numbers.append(number)
        return numbers, spent

    async def _judged(self, request: ChatRequest, answer: str, firsts: Sequence[str]) -> tuple[int, Spent]:
        spent = Spent()
        for number, first in enumerate(firsts):
            try:
                grade, reply = await self.judge.judged(request, answer, first)
            except ScorerError as error:
                spent += spent_of(error)
                continue
            spent += reply.spent
            if grade >= _SAME:
                return number, spent
        return len(firsts), spent


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswerer:
    """A model, or several that take turns, whose confidence is how many of the samples agree.

    A sample without a usable answer (empty, cut off, declined) agrees with none; if no sample has one, there is no answer.

    Attributes:
        sampler: the model.
        candidates: how many samples are drawn for each request.
        grouping: says which of them mean the same.
        others: further models that samples are drawn from, in turn with the first.
    """

    sampler: Sampler
    candidates: int
    grouping: Grouping
    others: tuple[Sampler, ...] = ()

    @property
    def identity(self) -> Identity:
        """The model and its settings, the number of samples and how they are grouped."""
        sampling: dict[str, object] = {"confidence": "agreement", "candidates": self.candidates}
        if self.others:
            sampling["candidates_of"] = fingerprint([dict(other.identity) for other in self.others])
        return {**self.sampler.identity, **sampling, **self.grouping.identity}

    async def answer(self, request: ChatRequest) -> Answer:
        """Return the first answer of the largest group; its confidence is the share of samples in that group.

        Raises:
            ScorerError: a sample could not be drawn, or none has an answer.
        """
        done: list[Spent] = []
        try:
            drawn = await together([self._drawn(request, number, done) for number in range(self.candidates)])
            answers = [answer for answer in drawn if isinstance(answer, Answer)]
            if not answers:
                raise next(outcome for outcome in drawn if isinstance(outcome, ReplyError))
            groups, took = await self.grouping.groups(request, [answer_text(answer.message) for answer in answers])
        except ScorerError as error:
            error.spent = sum(done, start=Spent())
            raise
        largest = max(groups, key=groups.count)  # the first among equals
        chosen = answers[groups.index(largest)]
        share = groups.count(largest) / self.candidates
        spent = sum(done, start=took)
        return Answer(
            message=chosen.message, confidence=share, spent=spent, document=chosen.document, served=chosen.served
        )

    async def _drawn(self, request: ChatRequest, number: int, done: list[Spent]) -> Answer | ReplyError:
        """Return one sample, or why it has no answer; a failed call, or another model, is an error."""
        try:
            models = (self.sampler, *self.others)
            answer = await models[number % len(models)].sample(request, number // len(models))
        except ReplyError as error:
            done.append(spent_of(error))
            if isinstance(error, OtherModelError):
                raise
            return error
        except ScorerError as error:
            done.append(spent_of(error))
            raise
        done.append(answer.spent)
        return answer
