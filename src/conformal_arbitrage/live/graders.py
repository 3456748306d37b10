"""Graders: rate an answer in free text or tool calls from 0 to 1, or None if it cannot be rated."""

import inspect
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from conformal_arbitrage.errors import OptionError, ReplyError
from conformal_arbitrage.models.chat import rating
from conformal_arbitrage.models.completions import PATH, Settings, message_of
from conformal_arbitrage.models.kinds import SKIP, Terminal, UserCode, describe, source_identity
from conformal_arbitrage.models.port import Call, Identity, Port, Reply, WholePort, fingerprint, is_number
from conformal_arbitrage.types import ChatRequest, Spent, transcript

SEVERAL = "several"
"""The kind of a log's grader if more than one graded its rows."""

GRADES = {"y": 1.0, "h": 0.5, "n": 0.0}


class Grader(Protocol):
    """Anything that grades an answer."""

    @property
    def identity(self) -> Identity:
        """All that grades depend on."""
        ...

    async def grade(self, request: ChatRequest, answer: str, expected: str | None) -> float | None:
        """Return a number in [0, 1], or None."""
        ...


def exact(answer: str, expected: str) -> bool:
    """Tell whether the texts are the same, ignoring surrounding spaces."""
    return answer.strip() == expected.strip()


def regex(answer: str, expected: str) -> bool:
    """Tell whether the expected pattern occurs in the answer."""
    try:
        return re.search(expected, answer) is not None
    except re.error as error:
        raise OptionError(f"{expected!r:.80} is not a regular expression ({error}); correct that row") from error


def json_equal(answer: str, expected: str) -> bool:
    """Tell whether both are the same JSON document; a tool call is [{"name": ..., "arguments": {...}}]."""
    try:
        return bool(json.loads(answer) == json.loads(expected))
    except (ValueError, RecursionError):
        return False


COMPARISONS: dict[str, Callable[[str, str], bool]] = {"exact": exact, "regex": regex, "json-equal": json_equal}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Grades 1 or 0 by comparison with the expected answer."""

    name: str

    @property
    def identity(self) -> Identity:
        """The comparison's name."""
        return {"kind": self.name}

    async def grade(self, request: ChatRequest, answer: str, expected: str | None) -> float | None:
        """Return 1 if the answer matches, else 0."""
        if expected is None:
            raise OptionError(f"--grade {self.name} needs the expected answers; name their column with --answer-column")
        return float(COMPARISONS[self.name](answer, expected))


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionGrader:
    """Grades by a function of (request, answer, expected), sync or async."""

    function: Callable[[ChatRequest, str, str | None], float | Awaitable[float | None] | None]
    name: str

    @property
    def identity(self) -> Identity:
        """The function's name, and the digest of its source if it is available."""
        return {"kind": "python", "name": self.name, **source_identity(self.function)}

    async def grade(self, request: ChatRequest, answer: str, expected: str | None) -> float | None:
        """Return the function's grade.

        Raises:
            OptionError: the function fails, or returns something else than a grade.
        """

        def failure(error: Exception) -> OptionError:
            return OptionError(f"{self.name} failed on {answer!r:.60} ({describe(error)}); correct the function")

        with UserCode(failure):
            result = self.function(request, answer, expected)
            grade = await result if inspect.isawaitable(result) else result
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
    """Grades by a chat model."""

    port: Port
    settings: Settings

    @property
    def identity(self) -> Identity:
        """Endpoint, settings and prompt."""
        asking = {"prompt_sha256": fingerprint(_JUDGE), "parser": "json grade; 1"}
        return {"kind": "judge", "endpoint": self.port.origin, **self.settings.identity, **asking}

    async def grade(self, request: ChatRequest, answer: str, expected: str | None) -> float | None:
        """Return the model's grade.

        Raises:
            ScorerError: the model fails, or its reply holds no grade.
        """
        return (await self.judged(request, answer, expected))[0]

    async def judged(self, request: ChatRequest, answer: str, expected: str | None) -> tuple[float, Reply]:
        """Return the grade and the reply that holds it."""
        reference = "" if expected is None else f"\n# Reference answer\n{expected}\n"
        content = _JUDGE.format(conversation=transcript(request.messages), reference=reference, answer=answer)
        limit = self.settings.max_tokens or 50
        body = self.settings.body(default_limit=limit) | {"messages": [{"role": "user", "content": content}]}
        reply = await self.port.call(Call(path=PATH, body=body, id=request.id, output_limit=limit))
        text = str(message_of(reply, self.settings, reply.spent)["content"])
        grade = rating(text, "grade")
        if grade is None:
            raise ReplyError(f"there is no grade from 0 to 1 in {text!r:.200}", spent=reply.spent, raw=text)
        return grade, reply


class _GradingPerson(WholePort):
    """A grading person as a port."""

    origin = "human grader"

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    async def call(self, call: Call) -> Reply:
        """Show an answer and read a key."""
        expected = f"\n\nexpected: {call.body['expected']}" if call.body["expected"] else ""
        text = f"\n{call.body['conversation']}\n\nanswer: {call.body['answer']}{expected}\n\n"
        keys = f"y right, n wrong, h half, {SKIP} cannot tell: "
        key = await self._terminal.key(text + keys, "".join(GRADES) + SKIP)
        return Reply(document={"grade": GRADES.get(key)}, spent=Spent(calls=1, cost=None))


class HumanGrader:
    """Grades by a person at the terminal, who does not see which model answered."""

    def __init__(self, terminal: Terminal, *, through: Callable[[Port], Port] = lambda port: port) -> None:
        self._port = through(_GradingPerson(terminal))

    @property
    def identity(self) -> Identity:
        """A person."""
        return {"kind": "human"}

    async def grade(self, request: ChatRequest, answer: str, expected: str | None) -> float | None:
        """Return the person's grade."""
        body = {"conversation": transcript(request.messages), "answer": answer, "expected": expected}
        reply = await self._port.call(Call(path="/grade", body=body, id=request.id, output_limit=0))
        return reply.document["grade"]
