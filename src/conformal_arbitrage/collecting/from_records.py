"""Turn recorded decisions into a score log, so that live traffic becomes calibration data.

A row is fit for calibration if it was chosen independently of all scores: every row of shadow and safe mode, and those
drawn for an audit. A row whose Guardian score is still missing stays in the log as missing; it is never dropped.

Knows nothing of HTTP.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from conformal_arbitrage.collecting.session_rows import SessionTurn, session_log
from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.live.grading import SEVERAL
from conformal_arbitrage.scorelog.fitness import UNFIT
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.tables import strings
from conformal_arbitrage.scorers.request_fields import logged_settings
from conformal_arbitrage.store.base import Store
from conformal_arbitrage.store.record import DecisionRecord, Grades
from conformal_arbitrage.store.row_base import all_guardian_scores, first_graded, fit, scores_of
from conformal_arbitrage.upstream.base import fingerprint

_PAGE = 1000
_NAN = float("nan")


async def score_log_of(
    store: Store,
    policy: str,
    *,
    identities: Mapping[str, Any] | None = None,
    everything: bool = False,
    session_idle: float = 3600.0,
) -> ScoreLog:
    """Return the decisions of a policy as a score log, oldest first; one row per session if it decides by session.

    Args:
        store: the decision record.
        policy: the policy's name.
        identities: of the models at hand; the log carries them if these models made every row.
        everything: include rows that were chosen by their scores; the log is then marked as unfit for calibration.
        session_idle: seconds after its last turn when a session is over.

    Raises:
        StoreError: there are no such rows, or the policy was served in both forms, or by session and by query.
    """
    decisions = await _decisions(store, policy)
    by_session = any(record.decision.session is not None for record in decisions)
    records = decisions if everything else _audited_sessions(decisions) if by_session else fit_only(decisions, policy)
    if not records:
        fitness = "" if everything else " that are fit for calibration"
        raise StoreError(f"policy {policy!r} has no decisions on record{fitness}")
    forms = {record.decision.form for record in records}
    if len(forms) > 1:
        raise StoreError(f"policy {policy!r} was served in menu form and in text form; prune one of the two first")
    sha256 = fingerprint(identities)
    same_models = all(record.decision.identities_sha256 == sha256 for record in records)
    if by_session:
        return _by_session(records, identities if same_models else None, session_idle, everything=everything)
    log = _router_log(records) if forms == {"text"} else _menu_log(records)
    marks = {"mode": strings([str(record.decision.mode) for record in records])}
    if everything:
        marks[UNFIT] = strings(["no" if fit(record) else "chosen by its scores" for record in records])
    if identities is not None and forms == {"text"}:
        identities = {**identities, **_grader_of(records), **_settings_of(records, identities)}
    return replace(log, identities=identities if same_models else None, extra={**log.extra, **marks})


def _by_session(
    records: Sequence[DecisionRecord], identities: Mapping[str, Any] | None, idle: float, *, everything: bool
) -> ScoreLog:
    """Return one row per session; every one is marked if turns were chosen by their scores."""
    if any(record.decision.session is None for record in records):
        raise StoreError("this policy was served by session and by query; prune one of the two first")
    if identities is not None:
        identities = {**identities, **_grader_of(records), **_settings_of(records, identities)}
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
    return fit_only(await _decisions(store, policy), policy)


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


async def _decisions(store: Store, policy: str) -> list[DecisionRecord]:
    return [record for record in await _all_records(store, policy) if not record.decision.cancelled]


def _grader_of(records: Sequence[DecisionRecord]) -> dict[str, Any]:
    """Return who made the grades that count, as `grader` of the log's identities; grades sent over HTTP name no one."""
    graders: dict[str, Any] = {}
    for feedback in filter(None, map(first_graded, records)):
        grader = feedback.grader or {"kind": "feedback"}
        graders[fingerprint(grader)] = dict(grader)
    if not graders:
        return {}
    first, *others = (graders[name] for name in sorted(graders))
    return {"grader": {"kind": SEVERAL, "graders": [first, *others]} if others else first}


def _settings_of(records: Sequence[DecisionRecord], identities: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of all requests, as `requests` of the log's identities; unknown if one was not kept in full."""
    requests = [None if record.decision.content is None else record.decision.content.request for record in records]
    bodies = [request for request in requests if isinstance(request, Mapping)]
    return logged_settings(bodies, identities) if len(bodies) == len(records) else {}


async def _all_records(store: Store, policy: str) -> list[DecisionRecord]:
    """Return the records of a policy, oldest first."""
    records: list[DecisionRecord] = []
    before: str | None = None
    while page := await store.records(policy=policy, before=before, limit=_PAGE):
        records += page
        before = page[-1].id
    return records[::-1]


def _menu_log(records: Sequence[DecisionRecord]) -> ScoreLog:
    return ScoreLog.from_arrays(
        [scores_of(record, "primary") or (_NAN,) * record.decision.size for record in records],
        [all_guardian_scores(record) or (_NAN,) * record.decision.size for record in records],
        id=[record.id for record in records],
        group=_groups(records),
    )


def _router_log(records: Sequence[DecisionRecord]) -> ScoreLog:
    grades = [_first_grades(record) for record in records]
    return ScoreLog.from_router(
        confidence=[(scores_of(record, "primary") or (_NAN,))[0] for record in records],
        primary_grade=[both.primary for both in grades],
        guardian_grade=[both.guardian for both in grades],
        id=[record.id for record in records],
        group=_groups(records),
    )


def _groups(records: Sequence[DecisionRecord]) -> list[str] | None:
    """Return the groups that requests named, empty where one named none; None if none of them did."""
    groups = [record.decision.group or "" for record in records]
    return groups if any(groups) else None


def _first_grades(record: DecisionRecord) -> Grades:
    """Return the first grades of both answers; NaN without any."""
    first = first_graded(record)
    return Grades(primary=_NAN, guardian=_NAN) if first is None or first.grades is None else first.grades
