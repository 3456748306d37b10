"""Pair two models' answers to the same questions, and turn the pairs into a score log in router form.

A row is never left out because of what a model said: a Primary that failed has no confidence, so its row defers, and a
Guardian that failed is a missing Guardian score, which calibration asks about. Questions that only one model was asked are
refused unless the caller states that they may go.

Knows nothing of any tool's files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.errors import ScoreLogError
from conformal_arbitrage.scorelog.columns import Usage
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.tables import strings
from conformal_arbitrage.types import Messages, transcript

Unpaired = Literal["refuse", "drop"]
NEITHER = "questions with scores of neither model (they would be deferred, and have no loss)"
_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAnswer:
    """One model's answer to one question, as far as a file tells it.

    Attributes:
        id: the question, the same for both models.
        messages: the question as a conversation.
        text: the answer; None if the model failed.
        confidence: that the answer is right, 0 or more; None if the file has none.
        grade: of the answer, in [0, 1]; None if it has none yet.
        expected: the right answer, for a grader.
        group: subject, tenant, language.
        cost: dollars.
        input_tokens: of the question.
        output_tokens: of the answer.
    """

    id: str
    messages: Messages = ()
    text: str | None = None
    confidence: float | None = None
    grade: float | None = None
    expected: str | None = None
    group: str | None = None
    cost: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Tally:
    """What could not be used, counted by reason, with the first few of each."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    examples: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def add(self, reason: str, example: str) -> None:
        """Count one thing that could not be used."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        first = self.examples.setdefault(reason, [])
        if len(first) < _EXAMPLES:
            first.append(example)

    def to_list(self) -> list[dict[str, Any]]:
        """Return the reasons with their counts and examples."""
        return [{"reason": r, "count": n, "examples": self.examples[r]} for r, n in self.counts.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A score log made from another tool's files, and what of them was not used.

    Attributes:
        log: the score log.
        source: the format.
        models: the names of the Primary and the Guardian in the files.
        unused: what could not be used, by reason.
        notes: what the reader should know before calibrating.
    """

    log: ScoreLog
    source: str
    models: tuple[str, str]
    unused: Tally = field(default_factory=Tally)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {
            "format": self.source,
            "primary": self.models[0],
            "guardian": self.models[1],
            "rows": len(self.log),
            "no_opinion_rows": int(self.log.no_opinion.sum()),
            "missing_guardian_rows": int(self.log.missing.sum()),
            "unused": self.unused.to_list(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRun:
    """One model's answers by question."""

    model: str
    answers: Mapping[str, LoggedAnswer]


Pair = tuple[LoggedAnswer, LoggedAnswer]


def paired(primary: ModelRun, guardian: ModelRun, *, unpaired: Unpaired, unused: Tally) -> list[Pair]:
    """Return the answers to every question that both models were asked, in the Primary's order.

    Raises:
        ScoreLogError: no question has both, or some have only one and `unpaired` is "refuse".
    """
    pairs = [(answer, guardian.answers[id]) for id, answer in primary.answers.items() if id in guardian.answers]
    if not pairs:
        raise ScoreLogError(
            f"no question was answered by both models: {len(primary.answers)} by {primary.model!r}, "
            f"{len(guardian.answers)} by {guardian.model!r}; give two runs over the same questions, or name what they share"
        )
    single = refuse_unpaired(primary.answers, guardian.answers, unpaired=unpaired)
    for id, name in single:
        unused.add(f"questions that only the {name} was asked", id)
    return pairs


def refuse_unpaired(primary: Iterable[str], guardian: Iterable[str], *, unpaired: Unpaired) -> list[tuple[str, str]]:
    """Return the questions that only one model was asked, with that model's role.

    Raises:
        ScoreLogError: there are some, and nobody said that they may go.
    """
    ours, theirs = dict.fromkeys(primary), dict.fromkeys(guardian)
    single = [(id, "Primary") for id in ours if id not in theirs] + [
        (id, "Guardian") for id in theirs if id not in ours
    ]
    if single and unpaired == "refuse":
        counts = [sum(name == role for _, name in single) for role in ("Primary", "Guardian")]
        raise ScoreLogError(
            f"{counts[0]} questions were only answered by the Primary and {counts[1]} only by the Guardian, such as "
            f"{single[0][0]!r:.60}; run both on the same questions. If which ones are missing has nothing to do with the "
            "answers (a smaller limit, another sample), state that with --unpaired drop"
        )
    return single


def router_log(graded: Sequence[Pair], unused: Tally) -> ScoreLog:
    """Return graded pairs as a log in router form.

    Rows in which both models failed are left out: they are deferred at every threshold, so they have no loss, and without
    them the threshold can only be higher.

    Raises:
        ScoreLogError: no answer has a grade, or no answer of the Primary has a confidence.
    """
    pairs = [pair for pair in graded if not _of_neither(*pair)]
    for p, g in graded:
        if _of_neither(p, g):
            unused.add(NEITHER, p.id)
    ours, theirs = [p for p, _ in pairs], [g for _, g in pairs]
    if all(p.grade is None for p in ours) or all(g.grade is None for g in theirs):
        raise ScoreLogError(
            "no answer of one of the models has a grade; grade them with --grade, or name the score that the files hold"
        )
    if all(p.confidence is None for p in ours):
        raise ScoreLogError(
            "no answer of the Primary has a confidence, so every row would be deferred; ask it with logprobs, name the "
            "field that holds a confidence with --confidence, or bring a table of them with --confidences FILE"
        )
    log = ScoreLog.from_router(
        confidence=_numbers(p.confidence if p.text is not None else None for p in ours),
        # a Primary that failed has no confidence, so its row defers whatever its grade
        primary_grade=_numbers(0.0 if p.text is None else p.grade for p in ours),
        guardian_grade=_numbers(None if g.text is None else g.grade for g in theirs),
        id=[p.id for p in ours],
        group=None if all(p.group is None for p in ours) else [p.group or "" for p in ours],
        context=[question_text(p.messages or g.messages) for p, g in pairs],
        primary_usage=_usage(ours),
        guardian_usage=_usage(theirs),
    )
    texts = {"primary_answer": strings([p.text for p in ours]), "guardian_answer": strings([g.text for g in theirs])}
    return replace(log, extra=texts)


def _of_neither(primary: LoggedAnswer, guardian: LoggedAnswer) -> bool:
    """Tell whether a row has neither a confidence nor a regret."""
    graded = guardian.text is not None and guardian.grade is not None
    judged = primary.text is None or primary.grade is not None
    return (primary.text is None or primary.confidence is None) and not (graded and judged)


def question_text(messages: Messages) -> str:
    """Return a conversation as text: that of a single message as it is."""
    if len(messages) == 1 and isinstance(messages[0].get("content"), str):
        return str(messages[0]["content"])
    return transcript(messages)


def counted(log: ScoreLog) -> tuple[str, ...]:
    """Return what rows without scores mean for calibration."""
    notes: list[str] = []
    if silent := int(log.no_opinion.sum()):
        notes.append(
            f"{silent} rows have no confidence of the Primary (it failed, or the file has none): they are deferred"
        )
    if missing := int(log.missing.sum()):
        notes.append(
            f"{missing} rows have no grade of an answer: ask or grade again, or calibrate with --missing-guardian worst_case"
        )
    return tuple(notes)


def _usage(answers: Sequence[LoggedAnswer]) -> Usage:
    """Return cost and tokens, where the files have them."""
    columns = {
        "cost": [one.cost for one in answers],
        "input_tokens": [one.input_tokens for one in answers],
        "output_tokens": [one.output_tokens for one in answers],
    }
    return Usage(**{name: None if all(v is None for v in vs) else _numbers(vs) for name, vs in columns.items()})


def _numbers(values: Iterable[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
