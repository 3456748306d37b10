"""Graders: how good an answer in free text or tool calls is, in [0, 1]; None if it cannot be told.

Knows nothing of whose answer it is.
"""

import inspect
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from conformal_arbitrage.errors import OptionError, ReplyError
from conformal_arbitrage.scorers.answers import rating
from conformal_arbitrage.scorers.base import Identity
from conformal_arbitrage.scorers.chat import PATH, Settings, message_of
from conformal_arbitrage.scorers.human import SKIP, Terminal
from conformal_arbitrage.types import ChatRequest, Spent, transcript
from conformal_arbitrage.upstream.base import Call, Port, Reply, fingerprint, is_number

GRADES = {"y": 1.0, "h": 0.5, "n": 0.0}


class Grader(Protocol):
    """Anything that grades an answer."""

    @property
    def identity(self) -> Identity:
        """All that grades depend on."""
        ...

    async def grade(self, request: ChatRequest, answer: str, expected: str | None) -> float | None:
        """A number in [0, 1], or None."""
        ...


def exact(answer: str, expected: str) -> bool:
    """The same text, outer spaces aside."""
    return answer.strip() == expected.strip()


def regex(answer: str, expected: str) -> bool:
    """The expected pattern occurs in the answer."""
    try:
        return re.search(expected, answer) is not None
    except re.error as error:
        raise OptionError(f"{expected!r:.80} is not a regular expression ({error}); correct that row") from error


def json_equal(answer: str, expected: str) -> bool:
    """The same JSON document, spaces and order of keys aside; a tool call is [{"name": ..., "arguments": {...}}]."""
    try:
        return bool(json.loads(answer) == json.loads(expected))
    except (ValueError, RecursionError):
        return False


COMPARISONS: dict[str, Callable[[str, str], bool]] = {"exact": exact, "regex": regex, "json-equal": json_equal}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Grade 1 or 0 by comparing with what is expected."""

    name: str

    @property
    def identity(self) -> Identity:
        """The comparison's name."""
        return {"kind": self.name}

    async def grade(self, request: ChatRequest, answer: str, expected: str | None) -> float | None:
        """1 if it fits."""
        if expected is None:
            raise OptionError(
                f"--grade {self.name} needs what is expected of each answer; name it with --answer-column"
            )
        return float(COMPARISONS[self.name](answer, expected))


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionGrader:
    """Grade by a function of (request, answer, expected), sync or async."""

    function: Callable[[ChatRequest, str, str | None], float | Awaitable[float | None] | None]
    name: str
    failures: tuple[type[Exception], ...] = (Exception,)

    @property
    def identity(self) -> Identity:
        """The function's name."""
        return {"kind": "python", "name": self.name}

    async def grade(self, request: ChatRequest, answer: str, expected: str | None) -> float | None:
        """What the function says."""
        try:
            found = self.function(request, answer, expected)
            grade = await found if inspect.isawaitable(found) else found
        except self.failures as error:
            raise OptionError(
                f"{self.name} failed on {answer!r:.60} ({type(error).__name__}: {error}); correct the function"
            ) from error
        if grade is not None and not (isinstance(grade, bool) or (is_number(grade) and 0 <= grade <= 1)):
            raise OptionError(f"{self.name} graded {grade!r:.60}; a grade is a number from 0 to 1, or None")
        return None if grade is None else float(grade)


_JUDGE = """Grade an assistant's answer to the conversation below.

# Conversation
{conversation}
{reference}
# Answer
{answer}

Reply with ONE JSON object and nothing else: {{"grade": g}}, g from 0 (useless or wrong) to 1 (right and complete)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeGrader:
    """Grade by a chat model."""

    port: Port
    settings: Settings

    @property
    def identity(self) -> Identity:
        """Endpoint, settings and prompt."""
        asking = {"prompt_sha256": fingerprint(_JUDGE), "parser": "json grade; 1"}
        return {"kind": "judge", "endpoint": self.port.origin, **self.settings.identity, **asking}

    async def grade(self, request: ChatRequest, answer: str, expected: str | None) -> float | None:
        """What the model says.

        Raises:
            ScorerError: it says nothing that can be read.
        """
        return (await self.judged(request, answer, expected))[0]

    async def judged(self, request: ChatRequest, answer: str, expected: str | None) -> tuple[float, Reply]:
        """The grade, and the reply that held it."""
        reference = "" if expected is None else f"\n# Reference answer\n{expected}\n"
        asked = _JUDGE.format(conversation=transcript(request.messages), reference=reference, answer=answer)
        limit = self.settings.max_tokens or 50
        body = self.settings.body(default_limit=limit) | {"messages": [{"role": "user", "content": asked}]}
        reply = await self.port.call(Call(path=PATH, body=body, id=request.id, output_limit=limit))
        text = str(message_of(reply, self.settings, reply.spent)["content"])
        grade = rating(text, "grade")
        if grade is None:
            raise ReplyError(f"there is no grade from 0 to 1 in {text!r:.200}", spent=reply.spent, raw=text)
        return grade, reply


class _GradingPerson:
    """A person who grades, as a port."""

    origin = "human grader"

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    async def call(self, call: Call) -> Reply:
        """Show an answer and take a key."""
        expected = f"\n\nexpected: {call.body['expected']}" if call.body["expected"] else ""
        text = f"\n{call.body['conversation']}\n\nanswer: {call.body['answer']}{expected}\n\n"
        keys = f"y right, n wrong, h half, {SKIP} cannot tell: "
        key = await self._terminal.key(text + keys, "".join(GRADES) + SKIP)
        return Reply(document={"grade": GRADES.get(key)}, spent=Spent(calls=1, cost=None))


class HumanGrader:
    """Grade by a person at the terminal, who does not see whose answer it is."""

    def __init__(self, terminal: Terminal, *, through: Callable[[Port], Port] = lambda port: port) -> None:
        self._port = through(_GradingPerson(terminal))

    @property
    def identity(self) -> Identity:
        """A person."""
        return {"kind": "human"}

    async def grade(self, request: ChatRequest, answer: str, expected: str | None) -> float | None:
        """What the person says."""
        body = {"conversation": transcript(request.messages), "answer": answer, "expected": expected}
        reply = await self._port.call(Call(path="/grade", body=body, id=request.id, output_limit=0))
        return reply.document["grade"]
