"""Records as score logs: decisions, sessions, cascades and stored calibration rows become rows to calibrate on."""

import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.options import NET
from conformal_arbitrage.calibration.secret import draw
from conformal_arbitrage.collecting.collect import call_costs, cascade_log, menu_columns
from conformal_arbitrage.errors import OutputError, StoreError
from conformal_arbitrage.live.graders import SEVERAL
from conformal_arbitrage.models.chat import answer_text
from conformal_arbitrage.models.completions import RequestFields
from conformal_arbitrage.models.port import fingerprint
from conformal_arbitrage.scorelog.cascade import CascadeLog, ModelColumns
from conformal_arbitrage.scorelog.fitness import SESSION_TURNS, UNFIT, column_texts
from conformal_arbitrage.scorelog.log import ROUTER_ACTIONS, ScoreLog, join_logs
from conformal_arbitrage.scorelog.tables import strings
from conformal_arbitrage.store import pages
from conformal_arbitrage.store.events import (
    CalibrationRow,
    calibration_row,
    calibration_rows,
    first_graded,
    first_index,
    gather_rows,
    is_fit,
)
from conformal_arbitrage.store.record import DecisionRecord, FeedbackBody, Grades, JSONObject
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import Leg, as_object

# --- Rows of sessions ---


_NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """One turn of a session.

    Attributes:
        session: the session's id.
        at: when it was recorded, in seconds.
        confidence: of the Primary in its answer; NaN if it gave none. Only that of the first turn decides.
        primary_grade: of the Primary's answer; NaN if unknown.
        guardian_grade: of the Guardian's.
        primary_failed: the Primary gave no answer, so the Guardian's was given and nothing was lost.
    """

    session: str
    at: float
    confidence: float
    primary_grade: float
    guardian_grade: float
    primary_failed: bool = False

    @property
    def loss(self) -> float:
        """How much is lost where the Primary's answer is given; NaN if a grade is unknown."""
        if self.primary_failed:
            return 0.0
        return float(np.maximum(0.0, self.guardian_grade - self.primary_grade))  # Python's max would take NaN for 0


def session_log(
    turns: Sequence[SessionTurn], *, idle: float, now: float, identities: Mapping[str, Any] | None = None
) -> ScoreLog:
    """Return one row per session, in the order in which they began.

    A session may go on until it has been idle for long enough. Sessions that began no earlier than the first one that may
    still go on are left out, all of them: a choice among them would prefer short ones.

    Args:
        turns: of all sessions, oldest first.
        idle: seconds without a turn after which a session is over.
        now: the current time, on the clock of the turns.
        identities: of the models that made every turn.

    Raises:
        StoreError: no session is over.
    """
    sessions: dict[str, list[SessionTurn]] = {}
    for turn in turns:
        sessions.setdefault(turn.session, []).append(turn)
    open_since = min((turns[0].at for turns in sessions.values() if turns[-1].at + idle > now), default=float("inf"))
    over = {name: turns for name, turns in sessions.items() if turns[0].at < open_since}
    if not over:
        raise StoreError(f"no session is over yet; one ends {idle:g} seconds after its last turn")
    losses = np.array([np.mean([turn.loss for turn in turns]) for turns in over.values()])
    best = np.where(np.isnan(losses), _NAN, 1.0)
    grades = [
        [np.mean([t.guardian_grade for t in turns]), np.mean([t.primary_grade for t in turns])]
        for turns in over.values()
    ]
    log = ScoreLog.from_arrays(
        np.array([[0.0, turns[0].confidence] for turns in over.values()]),
        np.column_stack([best, 1.0 - losses]),
        id=list(over),
        actions=[ROUTER_ACTIONS] * len(over),
        outcomes={"correct": np.array(grades)},
        identities=None if identities is None else {**identities, "session": {"idle": idle}},
    )
    return replace(log, extra={**log.extra, SESSION_TURNS: strings([str(len(turns)) for turns in over.values()])})


# --- One row of each session that requests name ---
#
# Turns of a session resemble each other, and calibration takes its rows for independent. Which turn stays is drawn by a
# keyed hash of its id, so that neither scores nor outcomes choose it.


@dataclass(slots=True)
class Thinning:
    """The turn of each session that stays: the one whose id draws the smallest number; without a session every row does."""

    turns: dict[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])

    def add(self, named: str | None, id: str) -> bool:
        """Take a turn into account; return whether it adds to the rows that stay."""
        if named is None:
            return True
        turn, before = (draw(named.encode(), id), id), self.turns.get(named)
        self.turns[named] = turn if before is None else min(before, turn)
        return before is None

    def keeps(self, named: str | None, id: str) -> bool:
        """Return whether a turn stays."""
        return named is None or self.turns.get(named, (0.0, id))[1] == id


def one_of_each_session(rows: Sequence[CalibrationRow]) -> list[CalibrationRow]:
    """Return rows without further ones of the same session."""
    thinning = Thinning()
    for row in rows:
        thinning.add(row.named, row.id)
    return [row for row in rows if thinning.keeps(row.named, row.id)]


# --- Calibration rows of the store as a score log, and the rows of a log for the store ---


_NO_GRADES = Grades(primary=_NAN, guardian=_NAN)
BY_FEEDBACK: JSONObject = {"kind": "feedback"}
"""Who made grades that were sent over HTTP."""


def rows_log(
    rows: Sequence[CalibrationRow],
    certificate: Certificate,
    identities: Mapping[str, Any] | None,
    *,
    source: str,
    groups: Collection[str] | None = None,
) -> ScoreLog:
    """Return rows, one of each session, as a log of the kind that a certificate was made from.

    Args:
        rows: in order.
        certificate: the one to be renewed.
        identities: of the models that made the rows; None if that is not known of all of them.
        source: what to call the log in messages.
        groups: only rows of these count; None without groups. Requests name groups, and could make up any number of them.

    Raises:
        StoreError: no row is of such a group.
    """
    rows = one_of_each_session(rows if groups is None else [row for row in rows if row.group in groups])
    if not rows:
        raise StoreError(f"{source}: none of the rows is of a group that a certificate has; calibrate by hand")
    log, grader = _stored_router_log(rows, certificate) if certificate.evidence.router else (_stored_menu_log(rows), {})
    if identities is not None:
        identities = {**identities, **grader, **_settings_of(certificate)}
    log = _with_groups(log, rows, certificate)
    log = replace(log, identities=identities, source=source, score_digits=certificate.evidence.score_digits)
    return log.binarized() if certificate.loss.binarized else log


def uncertified_log(rows: Sequence[CalibrationRow]) -> ScoreLog:
    """Return rows as a log where there is no certificate yet, of the form of the first row, graded as it was."""
    rows = one_of_each_session(rows)
    source = "the stored rows"
    if rows[0].form == "text":
        return replace(_stored_router_log([row for row in rows if row.form == "text"], None)[0], source=source)
    return replace(_stored_menu_log([row for row in rows if row.form == "menu"]), source=source)


async def pair_log_of(store: Store, policy: str) -> ScoreLog:
    """Return what is known of a policy's traffic about both of its models, as a log in the order of the queries.

    The rows are those of shadow mode, and those that the audit coin drew: whether a query is among them does not depend on
    its scores, so each counts alike. Only rows of the models that served last count, and of a session that requests name the
    first: a row, once counted, stays, so that limits may be looked at again and again.

    Raises:
        StoreError: there are no such rows, or the policy is a cascade or decides by session.
    """
    await gather_rows(store)
    latest = await store.run(pages.records, pages.RecordFilter(policy=policy), limit=1)
    if latest and sum(leg.role == "primary" for leg in latest[0].decision.legs) > 1:
        raise StoreError(
            f"policy {policy!r} is a cascade; export it, and import the grades of the two models to compare"
        )
    models = (latest[0].decision.identities_sha256 or "") if latest else ""
    rows = await store.run(calibration_rows, policy, identities_sha256=models, since=0.0)
    if not rows:
        raise StoreError(f"policy {policy!r} has no rows of both models; serve it in shadow mode, or set audit_rate")
    if any(row.session is not None for row in rows):
        raise StoreError(
            f"policy {policy!r} decides by session, whose turns are alike; export it, and judge its sessions"
        )
    begun = {row.named: row.id for row in reversed(rows)}
    first = [row for row in rows if row.named is None or begun[row.named] == row.id]
    return replace(uncertified_log(first), source=f"policy {policy}")


def is_known(row: CalibrationRow) -> bool:
    """Tell whether the outcome of a row is known."""
    return (row.grades if row.form == "text" else row.guardian) is not None


def _with_groups(log: ScoreLog, rows: Sequence[CalibrationRow], certificate: Certificate) -> ScoreLog:
    """Return a log with the groups of its rows, in the column that the certificate takes them from."""
    if certificate.by is None:
        return log
    groups = strings([str(row.group) for row in rows])
    if certificate.by == "group":
        return replace(log, group=groups)
    return replace(log, extra={**log.extra, certificate.by: groups})


def _settings_of(certificate: Certificate) -> dict[str, Any]:
    """Return which settings requests have, as the certificate says: those of other settings go without a guarantee."""
    known = certificate.identities if isinstance(certificate.identities, dict) else {}
    return {"requests": known["requests"]} if "requests" in known else {}


def _menu_log(rows: Sequence[CalibrationRow], *, labelled: bool) -> ScoreLog:
    return ScoreLog.from_arrays(
        [row.primary or (_NAN,) * row.size for row in rows],
        [row.guardian or (_NAN,) * row.size for row in rows],
        id=[row.id for row in rows],
        outcomes={"correct": [_correct(row) for row in rows]} if labelled else None,
    )


def _stored_menu_log(rows: Sequence[CalibrationRow]) -> ScoreLog:
    return _menu_log(rows, labelled=any(row.label is not None for row in rows))


def _correct(row: CalibrationRow) -> list[float]:
    if row.label is None or not 0 <= row.label < row.size:
        return [_NAN] * row.size
    return [float(action == row.label) for action in range(row.size)]


def _stored_router_log(
    rows: Sequence[CalibrationRow], certificate: Certificate | None
) -> tuple[ScoreLog, dict[str, Any]]:
    grader = _grader_of(rows, certificate)
    log = _router_log(rows, [_grades(row, grader) for row in rows])
    return log, {} if grader is None else {"grader": dict(grader)}


def _router_log(rows: Sequence[CalibrationRow], grades: Sequence[Grades]) -> ScoreLog:
    return ScoreLog.from_router(
        confidence=[_confidence(row) for row in rows],
        primary_grade=[both.primary for both in grades],
        guardian_grade=[both.guardian for both in grades],
        id=[row.id for row in rows],
    )


def _confidence(row: CalibrationRow) -> float:
    first = None if row.primary is None else row.primary[0]
    return _NAN if first is None else first


def _grader_of(rows: Sequence[CalibrationRow], certificate: Certificate | None) -> JSONObject | None:
    """Return whose grades count: the certificate's grader, or that of the first row that has grades."""
    if certificate is not None and isinstance(certificate.identities, dict) and "grader" in certificate.identities:
        return certificate.identities["grader"]
    return next((row.grader or BY_FEEDBACK for row in rows if row.grades is not None), None)


def _grades(row: CalibrationRow, grader: JSONObject | None) -> Grades:
    if row.grades is None or fingerprint(row.grader or BY_FEEDBACK) != fingerprint(grader):
        return _NO_GRADES
    return row.grades


def log_rows(log: ScoreLog, certificate: Certificate) -> list[CalibrationRow]:
    """Return the rows of the log that a certificate was made from, for the store; their texts are left out."""
    ids = [str(k + 1) for k in range(len(log))] if log.id is None else [str(name) for name in log.id.tolist()]
    ends = log.offsets.tolist()
    primary, guardian = log.primary.tolist(), log.guardian.tolist()
    correct = log.outcome("correct").tolist() if "correct" in log.outcome_names else None
    groups = None if certificate.by is None else column_texts(log, certificate.by)
    rows: list[CalibrationRow] = []
    for k, id in enumerate(ids):
        part = slice(ends[k], ends[k + 1])
        right = None if correct is None else correct[part]
        make = _router_row if certificate.evidence.router else _menu_row
        row = make(id, primary[part], guardian[part], right, certificate)
        rows.append(row if groups is None else msgspec.structs.replace(row, group=groups[k]))
    return rows


def _menu_row(
    id: str, primary: list[float], guardian: list[float], correct: list[float] | None, certificate: Certificate
) -> CalibrationRow:
    label = correct.index(1.0) if certificate.loss.binarized and correct is not None and 1.0 in correct else None
    return CalibrationRow(id=id, size=len(primary), primary=_numbers(primary), guardian=_numbers(guardian), label=label)


def _router_row(
    id: str, primary: list[float], guardian: list[float], correct: list[float] | None, certificate: Certificate
) -> CalibrationRow:
    """Return a row with grades that give the same regret; with gains counted, those that were given."""
    counted = correct if certificate.loss.name == NET else None
    guardian_grade, primary_grade = (1.0, guardian[1]) if counted is None else counted
    known = not isnan(primary_grade) and not isnan(guardian_grade) and not isnan(guardian[0])
    grader = certificate.identities.get("grader") if isinstance(certificate.identities, dict) else None
    grades = Grades(primary=primary_grade, guardian=guardian_grade) if known else None
    return CalibrationRow(
        id=id, form="text", size=2, primary=_numbers(primary[1:]), grades=grades,
        grader=None if grader == BY_FEEDBACK else grader,
    )  # fmt: skip


def _numbers(scores: Sequence[float]) -> tuple[float, ...] | None:
    """Return scores, or None if one of them is missing: a row without opinion, or without the Guardian's."""
    return None if any(isnan(score) for score in scores) else tuple(scores)


# --- Turn recorded decisions into a score log, so that live traffic becomes calibration data ---


_PAGE = 1000


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
class RecordFacts:
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
        thinning: which turns stay of sessions that requests named; None to keep all.
    """

    rows: int = 0
    thinning: Thinning | None = field(default_factory=Thinning)
    forms: set[str | None] = field(default_factory=set[str | None])
    models: set[str | None] = field(default_factory=set[str | None])
    graders: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    requests: RequestFields = field(default_factory=RequestFields)
    settings_known: bool = True
    grouped: bool = False
    sessions: bool = False

    def add(self, records: Sequence[DecisionRecord]) -> None:
        """Take further rows into account."""
        for record in records:
            decision = record.decision
            self.rows += self.thinning is None or self.thinning.add(decision.named, record.id)
            self.forms.add(decision.form)
            self.models.add(decision.identities_sha256)
            self.grouped |= bool(decision.group)
            self.sessions |= decision.session is not None
            self._add_grader(record)
            request = None if decision.content is None else decision.content.request
            self.settings_known &= isinstance(request, Mapping)
            if isinstance(request, Mapping):
                self.requests.add(request)

    def thinned(self, records: Sequence[DecisionRecord]) -> list[DecisionRecord]:
        """Return those of the rows that stay."""
        kept = self.thinning
        return [record for record in records if kept is None or kept.keeps(record.decision.named, record.id)]

    def _add_grader(self, record: DecisionRecord) -> None:
        feedback = first_graded(record)
        if feedback is not None:
            grader = feedback.grader or BY_FEEDBACK
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
        return self.requests.document(models) if self.settings_known else {}


async def score_log_of(
    store: Store,
    policy: str,
    *,
    identities: Mapping[str, Any] | None = None,
    everything: bool = False,
    session_idle: float = 3600.0,
    window: TimeWindow = ALWAYS,
) -> ScoreLog:
    """Return the decisions of a policy as a score log, oldest first; one row per session.

    Args:
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
    facts = RecordFacts(thinning=None if everything else Thinning())
    facts.add(records)
    records = facts.thinned(records)
    refuse_unlike_rows(facts, policy, everything=everything)
    if by_session:
        return _by_session(records, facts.identities(identities), session_idle, everything=everything)
    return replace(record_rows(records, facts, everything=everything), identities=facts.identities(identities))


def refuse_unlike_rows(facts: RecordFacts, policy: str, *, everything: bool) -> None:
    """Refuse rows that do not make a log."""
    if not facts.rows:
        fitness = "" if everything else " that are fit for calibration"
        raise StoreError(f"policy {policy!r} has no decisions on record{fitness}")
    if len(facts.forms) > 1:
        raise StoreError(f"policy {policy!r} was served in menu form and in text form; prune one of the two first")


def record_rows(records: Sequence[DecisionRecord], facts: RecordFacts, *, everything: bool) -> ScoreLog:
    """Return records as rows of a log without identities.

    Args:
        records: oldest first.
        facts: of all rows of the log, which may be more.
        everything: mark the rows that were chosen by their scores.
    """
    rows = [calibration_row(record) for record in records]
    text = facts.forms == {"text"}
    log = _router_log(rows, [row.grades or _NO_GRADES for row in rows]) if text else _menu_log(rows, labelled=False)
    marks = {"mode": strings([str(record.decision.mode) for record in records])}
    if everything:
        marks[UNFIT] = strings(["no" if is_fit(record.decision) else "chosen by its scores" for record in records])
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
    chosen = {turn.session for turn, record in zip(turns, records, strict=True) if not is_fit(record.decision)}
    names = [] if log.id is None else [str(name) for name in log.id.tolist()]
    marks = ["chosen by its scores" if name in chosen else "no" for name in names]
    return replace(log, extra={**log.extra, UNFIT: strings(marks)})


def _turn(record: DecisionRecord) -> SessionTurn:
    row = calibration_row(record)
    grades = row.grades or _NO_GRADES
    return SessionTurn(
        session=str(record.decision.session),
        at=record.created,
        confidence=_confidence(row),
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
    """Return those of the decisions of a policy that are fit for calibration."""
    records = [record for record in decisions if is_fit(record.decision)]
    if not records:
        raise StoreError(
            f"policy {policy!r} has no rows fit for calibration; serve it in shadow mode, or set audit_rate"
        )
    return records


def _audited_sessions(decisions: Sequence[DecisionRecord]) -> list[DecisionRecord]:
    """Return all turns of the sessions whose first turn is fit: the coin is tossed once, and decides about the whole."""
    first = {record.decision.session: record for record in reversed(decisions)}
    return [record for record in decisions if is_fit(first[record.decision.session].decision)]


async def decisions_of(store: Store, policy: str, window: TimeWindow = ALWAYS) -> list[DecisionRecord]:
    """Return the decisions of a policy, oldest first, without those whose caller left."""
    decisions: list[DecisionRecord] = []
    async for page in decision_pages(store, policy, window):
        decisions += page
    return decisions[::-1]


async def decision_pages(store: Store, policy: str, window: TimeWindow) -> AsyncIterator[list[DecisionRecord]]:
    """Yield the decisions of a policy, newest first, a page at a time; those whose caller left are not among them."""
    wanted, of = pages.RecordFilter(policy=policy, since=window.since, until=window.until), window.wanted
    while page := await store.run(pages.records, wanted, limit=_PAGE):
        wanted = msgspec.structs.replace(wanted, before=page[-1].id)
        yield [record for record in page if not record.decision.cancelled and (of is None or of(record.id))]


# --- The shadow rows of a cascade's policy as the log of the cascade ---


async def cascade_log_of(
    store: Store, policy: str, *, models: Sequence[str], guardian: str, identities: Mapping[str, Any] | None = None
) -> CascadeLog:
    """Return the shadow decisions of a cascade's policy as its log, oldest first.

    In shadow mode every model is asked. Rows of enforce mode end where the cascade stopped, which depends on scores, so
    none of them counts, audited or not.

    Args:
        models: the cheap models in the order of [cascade].
        guardian: the Guardian's name.
        identities: of the models at hand; the log carries them if these models made every row.

    Raises:
        StoreError: there are no such rows, or they are in free text, or other models made them.
    """
    records = [
        record
        for record in await decisions_of(store, policy)
        if record.decision.mode == "shadow" and not record.decision.overridden
    ]
    facts = RecordFacts()
    facts.add(records)
    records = facts.thinned(records)
    if not records:
        raise StoreError(
            f"policy {policy!r} has no rows of shadow mode on record, and only in shadow mode are all models of a cascade "
            'asked; serve it with mode = "shadow", or use `arbitrage collect --path`'
        )
    chains = [[leg for leg in record.decision.legs if leg.role == "primary"] for record in records]
    for record, chain in zip(records, chains, strict=True):
        if len(chain) != len(models):
            raise StoreError(
                f"policy {policy!r}: decision {record.id} asked {len(chain)} models before the Guardian, and [cascade] has "
                f"{len(models)}; prune those of the earlier cascade first"
            )
    legs: dict[str, list[Leg | None]] = {name: [chain[k] for chain in chains] for k, name in enumerate(models)}
    legs[guardian] = [next((leg for leg in rec.decision.legs if leg.role == "guardian"), None) for rec in records]
    sha256 = fingerprint(identities)
    made_by = identities if all(record.decision.identities_sha256 == sha256 for record in records) else None
    if any(record.decision.form == "menu" for record in records):
        columns = menu_columns(legs, _labels(records))
    else:
        grader, graded = _chain_grades(records, len(models), policy)
        columns = _text_columns(records, legs, graded)
        made_by = None if made_by is None else {**made_by, "grader": dict(grader)}
    return cascade_log([record.id for record in records], columns, identities=made_by, source="the decision record")


def _labels(records: Sequence[DecisionRecord]) -> list[int] | None:
    """Return the first label of every record; None unless all have one."""
    labels = [label for record in records if (label := first_index(record)) is not None]
    return labels if len(labels) == len(records) else None


def _chain_grades(
    records: Sequence[DecisionRecord], models: int, policy: str
) -> tuple[JSONObject, list[Grades | None]]:
    """Return the grader that counts, and its grades of every model's answer; None for rows that it has not graded."""
    graded = [_first_chain_grades(record, models) for record in records]
    first = next((feedback for feedback in graded if feedback is not None), None)
    if first is None:
        raise StoreError(
            f"policy {policy!r} answers in free text, and no row has grades of every model's answer; run `arbitrage records "
            f'grade --policy {policy} --grade HOW` first, with content = "full" in the policy'
        )
    grader = first.grader or BY_FEEDBACK
    return grader, [
        None if feedback is None or (feedback.grader or BY_FEEDBACK) != grader else feedback.grades
        for feedback in graded
    ]


def _first_chain_grades(record: DecisionRecord, models: int) -> FeedbackBody | None:
    """Return the first grades of every model's answer, if there are any and the answers were kept."""
    if len(chain_texts(record)) != models:
        return None
    return next(
        (feedback for feedback in record.feedback if feedback.grades and len(feedback.grades.chain) == models), None
    )


def _text_columns(
    records: Sequence[DecisionRecord], legs: Mapping[str, Sequence[Leg | None]], graded: Sequence[Grades | None]
) -> dict[str, ModelColumns]:
    columns: dict[str, ModelColumns] = {}
    for place, (name, rows) in enumerate(legs.items()):
        last = place == len(legs) - 1
        columns[name] = ModelColumns(
            confidence=[_NAN if leg is None or leg.scores is None else leg.scores[0] for leg in rows],
            grade=[_NAN if row is None else row.guardian if last else row.chain[place] for row in graded],
            cost=call_costs(rows),
            answer=[None if last else chain_texts(record)[place] for record in records],
        )
    return columns


def chain_texts(record: DecisionRecord) -> tuple[str | None, ...]:
    """Return what every model said that a cascade asked before the Guardian; None for one that failed."""
    content = record.decision.content
    every = None if content is None else content.chain_answers
    answers = every if isinstance(every, tuple) else (primary_text(record),)
    return tuple(text or None for text in answers)


def primary_text(record: DecisionRecord) -> str | None:
    """Return what the Primary answered, if it was kept."""
    content = record.decision.content
    if content is None or record.decided_by != "primary":
        return None if content is None else content.primary_answer
    return answer_text(as_object(content.answer))


# --- Write recorded decisions as a score log in many files, of which only one is in memory at a time ---


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenParts:
    """What was written: the files in order, their rows, those without a Guardian score, and the models behind them."""

    files: tuple[Path, ...]
    rows: int
    missing: int
    identities: Mapping[str, Any] | None


async def write_record_parts(
    store: Store,
    policy: str,
    folder: str | Path,
    *,
    rows_per_file: int,
    window: TimeWindow,
    identities: Mapping[str, Any] | None = None,
    everything: bool = False,
) -> WrittenParts:
    """Write the decisions of a policy into a folder, as part-00000.parquet and so on, oldest first.

    Args:
        folder: where to write; it must be empty, or not there yet.
        rows_per_file: how many rows a file has; the last may have fewer.
        window: which decisions count; without an end, those recorded before now.
        identities: of the models at hand; the log carries them if these models made every row.
        everything: include rows that were chosen by their scores; the log is then marked as unfit for calibration.

    Raises:
        StoreError: there are no such rows, or they do not make a log, or what is said of all of them changed meanwhile.
        OutputError: the folder is not empty, or cannot be written.
    """
    window = replace(window, until=time.time() if window.until is None else window.until)
    facts = RecordFacts(thinning=None if everything else Thinning())
    async for page in decision_pages(store, policy, window):
        facts.add(_chosen(page, everything=everything))
    refuse_unlike_rows(facts, policy, everything=everything)
    writer = _PartWriter(Path(folder), facts, rows_per_file, facts.identities(identities), everything=everything)
    again, complete = RecordFacts(thinning=None if everything else Thinning()), False
    try:
        async for page in decision_pages(store, policy, window):
            records = _chosen(page, everything=everything)
            again.add(records)
            writer.take(facts.thinned(records))
        complete = again == facts
    finally:
        if not complete:
            writer.remove()
    if not complete:
        raise StoreError(
            f"policy {policy!r}: decisions or grades were recorded while they were exported; export again, or only "
            "decisions that are settled (--until)"
        )
    return writer.written()


def _chosen(page: Sequence[DecisionRecord], *, everything: bool) -> list[DecisionRecord]:
    if any(record.decision.session is not None for record in page):
        raise StoreError("this policy decides by session, whose turns may be far apart; export it into one file")
    return [record for record in page if everything or is_fit(record.decision)]


class _PartWriter:
    """Rows on their way into files: they come newest first, so the last file is filled first."""

    def __init__(
        self,
        folder: Path,
        facts: RecordFacts,
        rows_per_file: int,
        identities: Mapping[str, Any] | None,
        *,
        everything: bool,
    ) -> None:
        self._folder, self._facts, self._identities, self._everything = folder, facts, identities, everything
        self._rows_per_file, self._left = rows_per_file, facts.rows
        self._held: list[ScoreLog] = []
        self._files: list[Path] = []
        self._missing = 0
        self._create_folder()

    def _create_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            occupied = next(self._folder.iterdir(), None)
        except OSError as error:
            raise OutputError(
                f"{self._folder}: cannot be a folder of files ({error.strerror}); name another"
            ) from error
        if occupied is not None:
            raise OutputError(f"{self._folder}: has {occupied.name} in it already; name a folder that is empty or new")

    def take(self, records: Sequence[DecisionRecord]) -> None:
        """Keep the rows of records, newest first, and write each file that is full; rows beyond those counted are left."""
        while records and self._left:
            number = (self._left - 1) // self._rows_per_file
            room = self._left - number * self._rows_per_file
            now, records = records[:room], records[room:]
            self._held.append(record_rows(now[::-1], self._facts, everything=self._everything))
            self._left -= len(now)
            if len(now) == room:
                self._write(self._folder / f"part-{number:05d}.parquet")

    def _write(self, path: Path) -> None:
        log = replace(join_logs(self._held[::-1], str(path)), identities=self._identities)
        self._held = []
        self._missing += int(log.missing.sum())
        self._files.append(path)
        log.write(path)

    def remove(self) -> None:
        """Remove the files that were written."""
        for path in self._files:
            path.unlink(missing_ok=True)

    def written(self) -> WrittenParts:
        """Return what was written."""
        return WrittenParts(
            files=tuple(self._files[::-1]), rows=self._facts.rows, missing=self._missing, identities=self._identities
        )
