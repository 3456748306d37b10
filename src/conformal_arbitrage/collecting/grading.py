"""Grade the answers that a gateway stored, so that its rows in free text can be calibrated on; have batches labelled.

Only rows that are fit for calibration are graded, and all of them: a choice among them could depend on their scores. Each
pair of grades is committed as it is made, with the identity of the grader, so an interrupted run is resumed by the next.

The items of a batch are labelled through the review queue. What people see of one follows from its row alone, without the
machine's label, so that a verdict can depend neither on that nor on why the item is asked about.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from conformal_arbitrage.calibration.batch import DrawnBatch
from conformal_arbitrage.collecting.collect import (
    FAILURES_IN_A_ROW,
    EndpointEstimate,
    Progress,
    ProgressCallback,
    estimated,
)
from conformal_arbitrage.collecting.records import chain_texts, fit_records, primary_text
from conformal_arbitrage.errors import ConfigError, OptionError, ScorerError, StoreError
from conformal_arbitrage.live.build import Extras, Models
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.live.graders import COMPARISONS, Grader, JudgeGrader
from conformal_arbitrage.live.reviewers import REVIEW_PAGE
from conformal_arbitrage.models.chat import answer_text
from conformal_arbitrage.models.port import fingerprint, spent_of, work_through
from conformal_arbitrage.models.resilience import RateLimit, SpendingLimit
from conformal_arbitrage.scorelog.tables import write_text
from conformal_arbitrage.store import events, reviews
from conformal_arbitrage.store.record import DecisionRecord, Event, FeedbackBody, Grades
from conformal_arbitrage.store.reviews import NewReview, ReviewOutcome, ReviewQuestion
from conformal_arbitrage.store.session import CHUNK, Store
from conformal_arbitrage.types import DAY, ChatRequest, Role, Spent

BY = "records grade"
Obstacle = Literal["graded", "no_content", "no_guardian", "no_label"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradable:
    """A decision whose answers can be graded.

    Attributes:
        request: what was asked.
        expected: the right answer, if someone who may grade sent it as a label.
        answers: the texts of both models; None for a Primary that failed, whose row defers whatever its grade.
        chain: the texts of all models that a cascade asked before the Guardian, None for one that failed; empty for two
            models.
    """

    id: str
    request: ChatRequest
    expected: str | None
    answers: Mapping[Role, str | None]
    chain: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The rows of a policy that are fit for calibration, by what keeps them from having grades.

    Attributes:
        no_content: their questions or answers were not kept.
        no_guardian: have no answer of the Guardian, or not yet.
        no_label: have no expected answer, and the grader compares with one.
    """

    gradable: tuple[Gradable, ...]
    graded: int
    no_content: int
    no_guardian: int
    no_label: int

    @property
    def counts(self) -> dict[str, int]:
        """How many rows there are of each kind."""
        others = {"graded": self.graded, "no_content": self.no_content, "no_guardian": self.no_guardian}
        return {"gradable": len(self.gradable), **others, "no_label": self.no_label}


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingResult:
    """What a run of grading did; `failed` rows stay without grades and are tried again by the next run."""

    graded: int
    failed: int
    spent: Spent
    first_problem: str | None


async def read_backlog(store: Store, config: Config, policy: str, *, grade: str, limit: int | None = None) -> Backlog:
    """Return what there is to grade, oldest first.

    Args:
        config: says whether callers may grade, and so label, their own decisions.
        limit: grade at most so many rows.

    Raises:
        StoreError: the policy has no rows that are fit for calibration, or chooses from menus.
    """
    settings = config.policies.get(policy)
    callers = settings is not None and settings.callers_grade
    records = await fit_records(store, policy)
    if any(record.decision.form == "menu" for record in records):
        raise StoreError(f"policy {policy!r} chooses from menus, whose rows need no grades; export them as they are")
    chained = settings is not None and settings.cascade
    if chained:  # in enforce mode, which models were asked depends on scores
        records = [record for record in records if record.decision.mode == "shadow"]
    rows = [
        to_grade(record, callers_label=callers, compares=grade in COMPARISONS, chained=chained) for record in records
    ]
    return Backlog(
        gradable=tuple([row for row in rows if isinstance(row, Gradable)][:limit]),
        graded=rows.count("graded"),
        no_content=rows.count("no_content"),
        no_guardian=rows.count("no_guardian"),
        no_label=rows.count("no_label"),
    )


def to_grade(
    record: DecisionRecord,
    *,
    callers_label: bool = True,
    compares: bool = False,
    chained: bool = False,
) -> Gradable | Obstacle:
    """Return a row to grade, or the name of what keeps it from being graded.

    Args:
        record: a decision in free text that is fit for calibration.
        callers_label: whether callers' labels are expected answers too: they steer the calibration of their own policy.
        compares: whether the grader needs an expected answer.
        chained: whether the answers of a whole cascade are graded.
    """
    graded = [feedback.grades for feedback in record.feedback if feedback.grades is not None]
    if graded and (not chained or any(grades.chain for grades in graded)):
        return "graded"
    content = record.decision.content
    request = None if content is None else content.request
    if request is None or isinstance(request, str):
        return "no_content"
    guardian = _guardian_text(record)
    if guardian is None:
        return "no_guardian"
    labels = [str(label) for label in record.labels(callers=callers_label)]
    if compares and not labels:
        return "no_label"
    return Gradable(
        id=record.id,
        request=ChatRequest(request, id=record.id),
        expected=labels[0] if labels else None,
        answers={"primary": primary_text(record), "guardian": guardian},
        chain=chain_texts(record) if chained else (),
    )


def _guardian_text(record: DecisionRecord) -> str | None:
    """Return what the Guardian answered: to the caller, or else in an audit."""
    content = record.decision.content
    answer = None if content is None else content.answer
    if record.decided_by == "guardian" and isinstance(answer, Mapping):
        return answer_text(answer)
    return None if record.audit is None else record.audit.answer


async def grade_records(
    store: Store,
    config: Config,
    rows: Sequence[Gradable],
    *,
    grade: str,
    concurrency: int = 16,
    max_cost: float | None = None,
    progress: ProgressCallback | None = None,
) -> GradingResult:
    """Grade both answers of every row and commit the grades, each pair as it is made.

    Args:
        config: holds the judge, and the folder of a function's module.
        rows: from `read_backlog`.
        grade: exact, regex, json-equal, judge, human, or python:MODULE:FUNCTION.
        concurrency: rows in flight at once; a person is asked one by one.
        max_cost: dollars that this run may cost.

    Raises:
        CostLimitError: the next call could exceed max_cost; the grades so far are stored.
        ScorerError: the grader failed on all of the first rows.
    """
    so_far = Progress(total=len(rows))
    problems: list[str] = []
    limit = None if max_cost is None else SpendingLimit(max_cost)
    async with Models(config, Extras(gate=RateLimit(concurrency=concurrency), spending_limit=limit)) as models:
        grader = models.grader(grade)

        async def work(row: Gradable) -> None:
            grades, spent, problem = await _graded(grader, row)
            if grades is not None:
                body = FeedbackBody(grades=grades, by=BY, grader=dict(grader.identity))
                await store.run(events.commit, [Event(id=row.id, body=body)])
            so_far.done += 1
            so_far.spent += spent
            if problem is not None:
                problems.append(problem)
                if len(problems) == so_far.done == FAILURES_IN_A_ROW:
                    raise ScorerError(
                        f"the grader failed on all of the first {FAILURES_IN_A_ROW} rows ({problem}); fix that first"
                    )
            if progress is not None:
                progress(so_far)

        await work_through(rows, work, at_once=1 if grade == "human" else concurrency)
    return GradingResult(
        graded=so_far.done - len(problems),
        failed=len(problems),
        spent=so_far.spent,
        first_problem=problems[0] if problems else None,
    )


async def estimate_grading(config: Config, rows: Sequence[Gradable], *, grade: str) -> list[EndpointEstimate]:
    """Return what `grade_records` would send and spend, per endpoint; sends and records nothing."""

    async def ask(models: Models) -> None:
        grader = models.grader(grade)
        if isinstance(grader, JudgeGrader):
            judge = JudgeGrader(port=grader.port, settings=replace(grader.settings, served=None))
            for row in rows:
                for text in sorted({text for text in (*row.answers.values(), *row.chain) if text is not None}):
                    with suppress(ScorerError):  # counted; a dry run has no reply to read a grade from
                        await _one_grade(judge, row, text)

    return await estimated(config, ask)


async def _graded(grader: Grader, row: Gradable) -> tuple[Grades | None, Spent, str | None]:
    """Return the grades of a row, None if one is missing; what that took; and what went wrong.

    Equal answers are graded once, and the order does not tell a person which model answered.
    """
    spent = Spent()
    known: dict[str, float] = {}
    texts = [row.answers["primary"], *row.chain, row.answers["guardian"]]
    for text in texts if blake2b(row.id.encode(), digest_size=1).digest()[0] % 2 else reversed(texts):
        if text is None or text in known:
            continue
        try:
            grade, cost = await _one_grade(grader, row, text)
        except ScorerError as error:
            return None, spent + spent_of(error), f"{type(error).__name__}: {error}"
        spent += cost
        if grade is None:
            return None, spent, "the grader could not tell"
        known[text] = grade
    primary, *chain, guardian = (0.0 if text is None else known[text] for text in texts)
    return Grades(primary=primary, guardian=guardian, chain=tuple(chain)), spent, None


async def _one_grade(grader: Grader, row: Gradable, text: str) -> tuple[float | None, Spent]:
    if isinstance(grader, JudgeGrader):
        grade, reply = await grader.judged(row.request, text, row.expected)
        return grade, reply.spent
    return await grader.grade(row.request, text, row.expected), Spent()


# --- Batches, whose items a team labels through the review queue ---


REVIEW: Final = "review.json"
_MOST_LABELS: Final = 100
_UNDECIDED: Final = "?"
_APART: Final = 1e-3
"""Seconds between two items in the order of the queue."""


class BatchReview(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a team is asked about the items of a batch: review.json in its folder, fixed with the first item.

    Attributes:
        team: a section [teams.NAME].
        labels: what they choose from.
        instructions: shown above every item.
    """

    team: str
    labels: tuple[str, ...]
    instructions: str = ""

    @property
    def protocol(self) -> str:
        """The digest of how people are asked."""
        return fingerprint({"kind": "human", "page": REVIEW_PAGE, **msgspec.to_builtins(self)})

    def question(self, context: str) -> ReviewQuestion:
        """Return what people are shown of an item."""
        return ReviewQuestion(
            context=context,
            options=self.labels,
            places=tuple(range(len(self.labels))),
            size=len(self.labels),
            instructions=self.instructions or "Which label is right?",
        )


def begin_review(
    config: Config,
    batch: DrawnBatch,
    folder: Path,
    *,
    team: str,
    labels: Sequence[str],
    instructions: str,
    keep: bool = True,
) -> BatchReview:
    """Return how a team is to be asked about a batch, and keep it in the folder, where it stays as it was.

    Args:
        team: a section [teams.NAME].
        labels: to choose from, besides those that the machine gave.
        instructions: shown above every item.
        keep: write it; else it is only checked.

    Raises:
        OptionError: there is no such team, the labels are not a menu, or people were asked otherwise before.
    """
    if team not in config.teams:
        raise OptionError(
            f"--review names a section [teams.NAME], of {', '.join(config.teams) or 'none'}; got {team!r}"
        )
    before = read_review(folder)
    if before is not None:
        new = set(labels) - set(before.labels)
        if team != before.team or new or (instructions and instructions != before.instructions):
            raise OptionError(
                f"{folder / REVIEW}: the team {before.team!r} is asked already, with {len(before.labels)} labels; team, "
                "labels and instructions stay as they are for all items of a batch"
            )
        return before
    menu, same = list[str](), batch.comparison()
    for label in (*labels, *batch.labels_of_machine(_MOST_LABELS)):
        if label != _UNDECIDED and not any(same(label, other) for other in menu):
            menu.append(label)
    if not 2 <= len(menu) <= _MOST_LABELS:
        raise OptionError(
            f"people choose from 2 to {_MOST_LABELS} labels, and the machine gave {'more' if len(menu) > 2 else len(menu)}; "
            "name others with --label, or, where labels are free text, leave out --review and fill in the file"
        )
    review = BatchReview(team=team, labels=tuple(menu), instructions=instructions)
    if keep:
        write_text(folder / REVIEW, msgspec.json.format(msgspec.json.encode(review)).decode() + "\n")
    return review


def read_review(folder: Path) -> BatchReview | None:
    """Return how a team is asked about a batch; None if none is.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        return msgspec.json.decode((folder / REVIEW).read_bytes(), type=BatchReview)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{folder / REVIEW}: cannot be read ({error}); restore it, or delete it and ask as you did before"
        ) from error


async def ask_team(
    store: Store, config: Config, batch: DrawnBatch, folder: Path, review: BatchReview, *, rest: bool
) -> int:
    """Put items of a batch that have no label into the review queue, in the order of its files; return how many wait.

    Those that are there stay as they are, and those that nobody needs a label of any more are withdrawn.

    Args:
        review: how the team is asked.
        rest: ask also about what is left to experts, not only about the sample.
    """
    name, protocol = _fingerprint(batch, review), review.protocol
    sample, left = ({_item(name, key): shown for key, shown in some.items()} for some in batch.unlabelled(folder))
    wanted = sample | left
    known = await store.run(reviews.labelling, name)
    items = [
        NewReview(
            decision=id,
            purpose="label",
            policy=folder.resolve().name,
            team=review.team,
            question=review.question(shown),
            protocol=protocol,
            identities_sha256=name,
            escalates=bool(config.teams[review.team].leads),
            due=DAY + place * _APART,
            menu=fingerprint(review.labels),
        )
        for place, (id, shown) in enumerate((wanted if rest else sample).items())
        if id not in known or known[id].state == "withdrawn"
    ]
    for start in range(0, len(items), CHUNK):
        await store.run(reviews.put_labelling, items[start : start + CHUNK])
    unwanted = [id for id, outcome in known.items() if outcome.state == "open" and id not in wanted]
    for start in range(0, len(unwanted), CHUNK):
        await store.run(reviews.put_labelling, [], withdrawn=unwanted[start : start + CHUNK])
    return len(items) + sum(known[id].state == "open" for id in wanted if id in known)


async def read_verdicts(store: Store, batch: DrawnBatch, folder: Path, review: BatchReview) -> int:
    """Write the labels that people gave into the files of a batch, "?" where nobody could tell; return how many wait."""
    name = _fingerprint(batch, review)
    known = await store.run(reviews.labelling, name)
    labels = {
        int(id.rpartition("-")[2], 16): label
        for id, outcome in known.items()
        if (label := _label(outcome, review)) is not None
    }
    batch.fill_in(folder, labels)
    return sum(outcome.state == "open" for outcome in known.values())


def _label(outcome: ReviewOutcome, review: BatchReview) -> str | None:
    if outcome.action is not None:
        return review.labels[outcome.action]
    return _UNDECIDED if outcome.state == "failed" else None


def _fingerprint(batch: DrawnBatch, review: BatchReview) -> str:
    """Return the fingerprint of a draw and of how people are asked about it."""
    return fingerprint([batch.terms.digest, batch.terms.draw, review.protocol])


def _item(name: str, key: int) -> str:
    """Return the id of an item of a batch in the queue."""
    return f"{name[:32]}-{key:016x}"
