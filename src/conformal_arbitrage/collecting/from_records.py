"""Turn recorded decisions into a score log, so that live traffic becomes calibration data.

A row is fit for calibration if it was chosen independently of all scores: every row of shadow and safe mode, and those
drawn for an audit. A row whose Guardian score is still missing stays in the log as missing; it is never dropped.

Knows nothing of HTTP.
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conformal_arbitrage.collecting.session_rows import SessionTurn, session_log
from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.live.grading import SEVERAL
from conformal_arbitrage.scorelog.fitness import UNFIT
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.tables import strings
from conformal_arbitrage.scorers.request_fields import given_settings, logged_settings
from conformal_arbitrage.store.base import Store
from conformal_arbitrage.store.record import DecisionRecord, Grades
from conformal_arbitrage.store.row_base import all_guardian_scores, first_graded, fit, scores_of
from conformal_arbitrage.upstream.base import fingerprint

_PAGE = 1000
_NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeWindow:
    """Which decisions count.

    Attributes:
        since, until: when they were recorded, in seconds; `since` is included, `until` is not.
        wanted: which ids count; None for all.
    """

    since: float | None = None
    until: float | None = None
    wanted: Callable[[str], bool] | None = None


ALWAYS = TimeWindow()


@dataclass(slots=True, kw_only=True)
class RowFacts:
    """What a log says about all of its rows at once; every file of a log in parts says the same.

    Attributes:
        rows: how many there are.
        forms: menu, text or both.
        models: the fingerprints of the identities that made them.
        graders: who made the grades that count, by fingerprint.
        settings: the names of the settings in all requests.
        settings_known: whether every request was kept in full.
        grouped: whether a request named a group.
        sessions: whether a decision belongs to a session.
    """

    rows: int = 0
    forms: set[str | None] = field(default_factory=set[str | None])
    models: set[str | None] = field(default_factory=set[str | None])
    graders: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    settings: set[str] = field(default_factory=set[str])
    settings_known: bool = True
    grouped: bool = False
    sessions: bool = False

    def add(self, records: Sequence[DecisionRecord]) -> None:
        """Take further rows into account."""
        for record in records:
            decision = record.decision
            self.rows += 1
            self.forms.add(decision.form)
            self.models.add(decision.identities_sha256)
            self.grouped |= bool(decision.group)
            self.sessions |= decision.session is not None
            self._add_grader(record)
            request = None if decision.content is None else decision.content.request
            self.settings_known &= isinstance(request, Mapping)
            self.settings |= set(given_settings(request)) if isinstance(request, Mapping) else set()

    def _add_grader(self, record: DecisionRecord) -> None:
        feedback = first_graded(record)
        if feedback is not None:
            grader = feedback.grader or {"kind": "feedback"}
            self.graders[fingerprint(grader)] = dict(grader)

    def identities(self, models: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the identities of the log, given those of the models at hand; None if others made a row."""
        if models is None or self.models != {fingerprint(models)}:
            return None
        return (
            models
            if self.forms == {"menu"} and not self.sessions
            else {**models, **self._grader(), **self._settings(models)}
        )

    def _grader(self) -> dict[str, Any]:
        """Return who made the grades that count, as `grader`; grades sent over HTTP name no one."""
        if not self.graders:
            return {}
        first, *others = (self.graders[name] for name in sorted(self.graders))
        return {"grader": {"kind": SEVERAL, "graders": [first, *others]} if others else first}

    def _settings(self, models: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of all requests, as `requests`; unknown if one was not kept in full."""
        return logged_settings([dict.fromkeys(self.settings, True)], models) if self.settings_known else {}


async def score_log_of(
    store: Store,
    policy: str,
    *,
    identities: Mapping[str, Any] | None = None,
    everything: bool = False,
    session_idle: float = 3600.0,
    window: TimeWindow = ALWAYS,
) -> ScoreLog:
    """Return the decisions of a policy as a score log, oldest first; one row per session if it decides by session.

    Args:
        store: the decision record.
        policy: the policy's name.
        identities: of the models at hand; the log carries them if these models made every row.
        everything: include rows that were chosen by their scores; the log is then marked as unfit for calibration.
        session_idle: seconds after its last turn when a session is over.
        window: which decisions count; all of them if the policy decides by session.

    Raises:
        StoreError: there are no such rows, or the policy was served in both forms, or by session and by query.
    """
    decisions = await decisions_of(store, policy, window)
    by_session = any(record.decision.session is not None for record in decisions)
    if by_session and window != ALWAYS:
        raise StoreError(
            f"policy {policy!r} decides by session, and a window of time or a part of the rows would cut sessions in "
            "two; export all of them"
        )
    records = decisions if everything else _audited_sessions(decisions) if by_session else fit_only(decisions, policy)
    facts = RowFacts()
    facts.add(records)
    refuse_unlike_rows(facts, policy, everything=everything)
    if by_session:
        return _by_session(records, facts.identities(identities), session_idle, everything=everything)
    return replace(record_rows(records, facts, everything=everything), identities=facts.identities(identities))


def refuse_unlike_rows(facts: RowFacts, policy: str, *, everything: bool) -> None:
    """Refuse rows that do not make a log.

    Raises:
        StoreError: there are none, or the policy was served in both forms.
    """
    if not facts.rows:
        fitness = "" if everything else " that are fit for calibration"
        raise StoreError(f"policy {policy!r} has no decisions on record{fitness}")
    if len(facts.forms) > 1:
        raise StoreError(f"policy {policy!r} was served in menu form and in text form; prune one of the two first")


def record_rows(records: Sequence[DecisionRecord], facts: RowFacts, *, everything: bool) -> ScoreLog:
    """Return records as rows of a log without identities.

    Args:
        records: oldest first.
        facts: of all rows of the log, which may be more.
        everything: mark the rows that were chosen by their scores.
    """
    log = _router_log(records) if facts.forms == {"text"} else _menu_log(records)
    marks = {"mode": strings([str(record.decision.mode) for record in records])}
    if everything:
        marks[UNFIT] = strings(["no" if fit(record) else "chosen by its scores" for record in records])
    groups = strings([record.decision.group or "" for record in records]) if facts.grouped else None
    return replace(log, group=groups, extra={**log.extra, **marks})


def _by_session(
    records: Sequence[DecisionRecord], identities: Mapping[str, Any] | None, idle: float, *, everything: bool
) -> ScoreLog:
    """Return one row per session; every one is marked if turns were chosen by their scores."""
    if any(record.decision.session is None for record in records):
        raise StoreError("this policy was served by session and by query; prune one of the two first")
    turns = [_turn(record) for record in records]
    log = session_log(turns, idle=idle, now=time.time(), identities=identities)
    if not everything:
        return log
    chosen = {turn.session for turn, record in zip(turns, records, strict=True) if not fit(record)}
    names = [] if log.id is None else [str(name) for name in log.id.tolist()]
    marks = ["chosen by its scores" if name in chosen else "no" for name in names]
    return replace(log, extra={**log.extra, UNFIT: strings(marks)})


def _turn(record: DecisionRecord) -> SessionTurn:
    grades = _first_grades(record)
    return SessionTurn(
        session=str(record.decision.session),
        at=record.created,
        confidence=(scores_of(record, "primary") or (_NAN,))[0],
        primary_grade=grades.primary,
        guardian_grade=grades.guardian,
        primary_failed=any(leg.role == "primary" and leg.error is not None for leg in record.decision.legs),
    )


async def fit_records(store: Store, policy: str) -> list[DecisionRecord]:
    """Return the decisions of a policy that are fit for calibration, oldest first.

    Raises:
        StoreError: there are none.
    """
    return fit_only(await decisions_of(store, policy), policy)


def fit_only(decisions: Sequence[DecisionRecord], policy: str) -> list[DecisionRecord]:
    """Return those of the decisions of a policy that are fit for calibration.

    Raises:
        StoreError: there are none.
    """
    records = [record for record in decisions if fit(record)]
    if not records:
        raise StoreError(
            f"policy {policy!r} has no rows fit for calibration; serve it in shadow mode, or set audit_rate"
        )
    return records


def _audited_sessions(decisions: Sequence[DecisionRecord]) -> list[DecisionRecord]:
    """Return all turns of the sessions whose first turn is fit: the coin is tossed once, and decides about the whole."""
    first = {record.decision.session: record for record in reversed(decisions)}
    return [record for record in decisions if fit(first[record.decision.session])]


async def decisions_of(store: Store, policy: str, window: TimeWindow = ALWAYS) -> list[DecisionRecord]:
    """Return the decisions of a policy, oldest first, without those whose caller left."""
    decisions: list[DecisionRecord] = []
    async for page in decision_pages(store, policy, window):
        decisions += page
    return decisions[::-1]


async def decision_pages(store: Store, policy: str, window: TimeWindow) -> AsyncIterator[list[DecisionRecord]]:
    """Yield the decisions of a policy, newest first, a page at a time; those whose caller left are not among them."""
    before: str | None = None
    while page := await store.records(
        policy=policy, since=window.since, until=window.until, before=before, limit=_PAGE
    ):
        before = page[-1].id
        wanted = window.wanted
        yield [record for record in page if not record.decision.cancelled and (wanted is None or wanted(record.id))]


def _menu_log(records: Sequence[DecisionRecord]) -> ScoreLog:
    return ScoreLog.from_arrays(
        [scores_of(record, "primary") or (_NAN,) * record.decision.size for record in records],
        [all_guardian_scores(record) or (_NAN,) * record.decision.size for record in records],
        id=[record.id for record in records],
    )


def _router_log(records: Sequence[DecisionRecord]) -> ScoreLog:
    grades = [_first_grades(record) for record in records]
    return ScoreLog.from_router(
        confidence=[(scores_of(record, "primary") or (_NAN,))[0] for record in records],
        primary_grade=[both.primary for both in grades],
        guardian_grade=[both.guardian for both in grades],
        id=[record.id for record in records],
    )


def _first_grades(record: DecisionRecord) -> Grades:
    """Return the first grades of both answers; NaN without any."""
    first = first_graded(record)
    return Grades(primary=_NAN, guardian=_NAN) if first is None or first.grades is None else first.grades
