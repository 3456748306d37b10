"""The list of decisions, and the page of one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace
from starlette.responses import Response

from conformal_arbitrage.errors import RequestError
from conformal_arbitrage.gateway.audience import Caller, Views
from conformal_arbitrage.gateway.console.charts import Bar, confidence_chart, score_chart
from conformal_arbitrage.gateway.console.render import Pages, Visit, redirect
from conformal_arbitrage.store import pages, reviews
from conformal_arbitrage.store.pages import Mark, RecordFilter
from conformal_arbitrage.store.record import DecisionRecord, ReviewFacts, document, time_of
from conformal_arbitrage.store.session import StoreView
from conformal_arbitrage.types import Leg

# --- Lists of decisions with filters; every filter is answered by an index, so a page costs what it holds ---


PAGE = 50
_WHO = ("primary", "guardian", "fallback")
_MARKS: Mapping[str, Mark] = {"audited": "audited", "no guarantee": "no guarantee"}
_ID_LENGTH = 26


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFilter:
    """Which decisions are wanted; empty where it does not matter. Days are in UTC, both included."""

    policy: str = ""
    who: str = ""
    mark: str = ""
    first: str = ""
    last: str = ""
    before: str = ""

    @property
    def since(self) -> float | None:
        """The first moment."""
        return None if not self.first else _midnight(self.first)

    @property
    def until(self) -> float | None:
        """The first moment after the last day."""
        return None if not self.last else _midnight(self.last, days=1)

    @property
    def query(self) -> RecordFilter:
        """The filters as the store takes them."""
        policy, who, before = self.policy or None, self.who or None, self.before or None
        return RecordFilter(policy=policy, decided_by=who, since=self.since, until=self.until, before=before)

    def words(self) -> list[tuple[str, str]]:
        """Return the filters in words, each with where to go without it."""
        texts = {
            "policy": f"policy {self.policy}",
            "who": f"decided by {self.who}",
            "mark": self.mark,
            "first": f"from {self.first}",
            "last": f"to {self.last}",
        }
        active = {name: text for name, text in texts.items() if getattr(self, name)}
        return [(text, self.link(**{name: "", "before": ""})) for name, text in active.items()]

    def link(self, **changed: str) -> str:
        """Return the address of these filters with some of them changed."""
        names = ("policy", "who", "mark", "first", "last", "before")
        values = {name: changed.get(name, getattr(self, name)) for name in names}
        query = urlencode({name: value for name, value in values.items() if value})
        return "/console/decisions" + (f"?{query}" if query else "")


def _midnight(text: str, days: int = 0) -> float:
    try:
        return (datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC) + timedelta(days=days)).timestamp()
    except (ValueError, OverflowError) as error:
        raise RequestError(f"A day is written as 2026-11-16; got {text:.40}.", status=400) from error


def read_filter(query: Mapping[str, str], caller: Caller) -> DecisionFilter:
    """Return the filters of an address; reviewers have none by marks, which would tell what is withheld from them.

    Raises:
        RequestError: one of them has no meaning.
    """
    who, mark = query.get("who", ""), query.get("mark", "")
    if who not in ("", *_WHO) or mark not in ("", *marks_of(caller)):
        raise RequestError(f"There is no filter {(who or mark)!r:.60}.", status=400)
    policy = query.get("policy", "")
    if policy:
        caller.check_policy(policy)
    days = {name: query.get(name, "") for name in ("first", "last")}
    before = query.get("before", "")[:_ID_LENGTH]
    return DecisionFilter(policy=policy, who=who, mark=mark, before=before, **days)


def marks_of(caller: Caller) -> Mapping[str, Mark]:
    """Return the marks that a caller may search for."""
    return _MARKS if caller.opens("admin") else {}


class DecisionsPage:
    """GET /console/decisions."""

    def __init__(self, pages: Pages, views: Views, policies: Collection[str]) -> None:
        self._pages = pages
        self._views = views
        self._policies = policies

    async def decisions(self, visit: Visit) -> Response:
        """Show a page of decisions, the newest first."""
        if id := visit.query.get("id", "").strip():
            return redirect(
                f"/console/decisions/{id}" if id.isascii() and id.isalnum() else "/console/decisions/unknown"
            )
        caller = visit.who.caller
        wanted, store = read_filter(visit.query, caller), self._views.of(caller)
        mark: Mark | None = _MARKS.get(wanted.mark)
        if wanted.who == "fallback" and mark != "audited" and marks_of(caller):
            mark = "fallback"  # which are all without a guarantee
        shown, before = await (_in_order(store, wanted) if mark is None else _marked(store, wanted, mark))
        older = wanted.link(before=before) if before else None
        hidden = await store.run(pages.yet_to_judge, shown)
        names = [name for name in self._policies if caller.sees(name)]
        return self._pages.page(
            "decisions.html", visit, records=[(asked_at(record), record) for record in shown], wanted=wanted, older=older,
            names=names, who=_WHO, marks=marks_of(caller), hidden=hidden,
        )  # fmt: skip


async def _in_order(store: StoreView, wanted: DecisionFilter) -> tuple[list[DecisionRecord], str | None]:
    """Return a page of decisions, and the id before which there are more."""
    page = await store.run(pages.records, wanted.query, limit=PAGE + 1)
    if len(page) > PAGE or not page:
        return page[:PAGE], page[PAGE - 1].id if page else None
    further = replace(wanted.query, before=page[-1].id)
    return page, page[-1].id if await store.run(pages.records, further, limit=1) else None  # large records end a page


async def _marked(store: StoreView, wanted: DecisionFilter, mark: Mark) -> tuple[list[DecisionRecord], str | None]:
    """Return those of marked decisions that someone in particular decided, as far as it is looked for them at once."""
    page = await store.run(pages.marked_decisions, mark, wanted.query, limit=PAGE + 1)
    records = list(page.records)
    return (records[:PAGE], records[PAGE - 1].id) if len(records) > PAGE else (records, page.end)


def asked_at(record: DecisionRecord) -> float:
    """Return when a decision was asked for; its record was written when it was made."""
    try:
        return time_of(record.id)
    except ValueError:
        return record.created


# --- One decision as a picture ---


_LONGEST_NAME = 60
_TITLES = {
    "primary": "The Primary decided",
    "guardian": "The Guardian decided",
    "fallback": "The safe action was taken",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownVote:
    """One person's vote as a page shows it: who, for which option, after how many seconds, and what is special about it."""

    reviewer: str
    choice: str
    held: float
    notes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDecision:
    """A decision as a page shows it.

    Attributes:
        title: who decided.
        sentence: what happened.
        chart: the picture; None where there are no scores.
        question: what was asked, if the record keeps it.
        answer: what was answered, if the record keeps it.
        seconds: from the question to the answer, if people decided; else the time that all models took.
        held: the time that people had the question before them, together.
        votes: of the people who decided.
        audit_votes: of the people who were asked for the audit.
    """

    title: str
    sentence: str
    chart: object
    question: str | None
    answer: str | None
    seconds: float
    held: float
    votes: Sequence[ShownVote]
    audit_votes: Sequence[ShownVote]


class DecisionPage:
    """GET /console/decisions/{id}."""

    def __init__(self, pages: Pages, views: Views) -> None:
        self._pages = pages
        self._views = views

    async def decision(self, visit: Visit) -> Response:
        """Show one decision; an admin who reads one that people have yet to judge cannot vote on it from then on."""
        store = self._views.of(visit.who.caller)
        record = await store.run(pages.record, visit.named("id")[:64])
        if record is None:
            raise RequestError(
                "There is no such decision: it was never recorded, it was pruned, or your key does not show it.",
                status=404,
            )
        open = bool(await store.run(pages.yet_to_judge, [record]))
        if open:
            await store.run(reviews.note_reader, record.id, visit.who.name)
        text = msgspec.json.format(msgspec.json.encode(document(record)), indent=2).decode()
        return self._pages.page(
            "decision.html", visit, record=record, body=record.decision, shown=shown_decision(record),
            asked=asked_at(record), json=text, open=open,
        )  # fmt: skip


def shown_decision(record: DecisionRecord) -> ShownDecision:
    """Return a decision with its sentence and its picture."""
    body = record.decision
    names = option_names(record)
    leg = next((leg for leg in body.legs if leg.role == "primary" and leg.scores), None)
    chart: object = None
    if leg is not None and leg.scores is not None and body.form == "text" and body.relaxation is not None:
        chart = confidence_chart(leg.scores[-1], body.relaxation)
    elif leg is not None and leg.scores is not None and len(leg.scores) > 1 and body.form != "text":
        chart = score_chart(_bars(record, leg.scores, names), body.relaxation)
    votes = shown_votes(None if record.completion is None else record.completion.review, names)
    return ShownDecision(
        title=_title(record),
        sentence=_sentence(record, leg, names),
        chart=chart,
        question=_question(record),
        answer=_answer(record),
        seconds=_seconds(record),
        held=sum(vote.held for vote in votes),
        votes=votes,
        audit_votes=shown_votes(None if record.audit is None else record.audit.review, names),
    )


def _seconds(record: DecisionRecord) -> float:
    """Return the time until the answer."""
    completion = record.completion
    if completion is not None and completion.review is not None and completion.at is not None:
        return max(0.0, completion.at - asked_at(record))
    return sum(leg.seconds for leg in record.decision.legs)


def _title(record: DecisionRecord) -> str:
    if record.decision.cancelled:
        return "The caller left"
    if record.decision.pending:
        return "The Guardian has not answered"
    return _TITLES.get(record.decided_by, f"{record.decided_by} decided")


def shown_votes(facts: ReviewFacts | None, names: Sequence[str]) -> list[ShownVote]:
    """Return the votes behind a verdict, with the options by name, and grades as they were given."""
    shown: list[ShownVote] = []
    for vote in () if facts is None else facts.votes:
        grades = vote.choice
        choice = _name(names, grades) if isinstance(grades, int) else f"grades {grades[0]:g} and {grades[1]:g}"
        notes = "as lead" if vote.level else ""
        shown.append(ShownVote(reviewer=vote.reviewer, choice=choice, held=vote.held, notes=notes))
    return shown


def option_names(record: DecisionRecord) -> list[str]:
    """Return the options of a menu: their texts if the record keeps them, else their numbers."""
    content, size = record.decision.content, record.decision.size
    if content is not None and isinstance(content.actions, tuple):
        return [name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…" for name in content.actions]
    return [f"Option {k + 1}" for k in range(size)]


def _bars(record: DecisionRecord, scores: Sequence[float], names: Sequence[str]) -> list[Bar]:
    body, top = record.decision, max(scores)
    return [
        Bar(
            text=_name(names, k),
            score=score,
            gap=top - score,
            candidate=k in body.candidates,
            chosen=k == body.action,
        )
        for k, score in enumerate(scores)
    ]


def _sentence(record: DecisionRecord, leg: Leg | None, names: Sequence[str]) -> str:
    """Return what happened in one or two sentences."""
    body = record.decision
    if body.cancelled:
        return "The caller left before there was a decision; nothing was chosen."
    if body.held:
        return f"The first turn of this session chose who answers all of it: {record.decided_by}."
    outcome = _outcome(record, names)
    if leg is None or leg.scores is None:
        return f"The Primary gave no scores. {outcome}"
    if body.form == "text":
        needed = "" if body.relaxation is None else f", and its answer is given above {body.relaxation:.3g}"
        return f"The Primary's confidence was {leg.scores[-1]:.3g}{needed}. {outcome}"
    order = sorted(range(len(leg.scores)), key=lambda k: -(leg.scores or ())[k])
    first = _name(names, order[0])
    if body.margin is None or len(order) < 2:
        return f"The Primary put {first} first. {outcome}"
    ahead = f"The Primary put {first} first, {body.margin:.3g} ahead of {_name(names, order[1])}."
    if body.relaxation is None:
        return f"{ahead} {outcome}"
    return f"{ahead} It has to lead by more than {body.relaxation:.3g} to stand alone. {outcome}"


def _outcome(record: DecisionRecord, names: Sequence[str]) -> str:
    body = record.decision
    chosen = "" if body.action is None or body.form == "text" else f": {_name(names, body.action)}"
    if record.decided_by == "primary":
        return f"It did, so its choice stands{chosen}." if body.form != "text" else "So its answer was given."
    if record.decided_by == "fallback":
        return f"The Guardian gave no answer in time, so the safe action was taken{chosen}."
    if body.pending:
        return "The Guardian was asked, and has not answered."
    return f"The Guardian decided{chosen}."


def _name(names: Sequence[str], place: int) -> str:
    return names[place] if place < len(names) else f"Option {place + 1}"


def _question(record: DecisionRecord) -> str | None:
    """Return what was asked, if the record keeps it in full."""
    content = record.decision.content
    if content is None:
        return None
    if isinstance(content.actions, tuple):
        return content.context if isinstance(content.context, str) else _messages(content.context)
    return _messages(content.request.get("messages")) if isinstance(content.request, Mapping) else None


def _messages(messages: object) -> str | None:
    """Return chat messages as text; nothing but a list of messages is shown."""
    try:
        return "\n\n".join(_message(message) for message in msgspec.convert(messages, list[dict[str, Any]]))
    except msgspec.ValidationError:
        return None


def _message(fields: Mapping[str, Any]) -> str:
    content = fields.get("content")
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return f"{fields.get('role', 'message')}: {text}"


def _answer(record: DecisionRecord) -> str | None:
    content = record.decision.content
    if content is None or content.answer is None or record.decision.form != "text":
        return None
    if isinstance(content.answer, str):
        return None  # a digest
    text = content.answer.get("content")
    return text if isinstance(text, str) else msgspec.json.encode(content.answer).decode()
