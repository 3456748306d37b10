"""Calibration rows of the store as a score log, and the rows of a log for the store.

A row whose Guardian score, grade or label is not known stays in the log as missing, and so does one that another grader
graded than the certificate's: what is promised is about the grades of one grader.

Knows nothing of schedules.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import isnan
from typing import Any

import msgspec

from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.options import NET
from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.scorelog.fitness import column_texts
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.scorelog.tables import strings
from conformal_arbitrage.store.record import Grades, JSONObject
from conformal_arbitrage.store.row_base import CalibrationRow
from conformal_arbitrage.upstream.base import fingerprint

_NAN = float("nan")
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
    """Return rows as a log of the kind that a certificate was made from.

    Args:
        rows: in order.
        certificate: the one to be renewed.
        identities: of the models that made the rows; None if that is not known of all of them.
        source: what to call the log in messages.
        groups: only rows of these count; None without groups. Requests name groups, and could make up any number of them.

    Raises:
        StoreError: no row is of such a group.
    """
    rows = rows if groups is None else [row for row in rows if row.group in groups]
    if not rows:
        raise StoreError(f"{source}: none of the rows is of a group that a certificate has; calibrate by hand")
    log, grader = _router_log(rows, certificate) if certificate.router else (_menu_log(rows), {})
    if identities is not None:
        identities = {**identities, **grader, **_settings_of(certificate)}
    log = _with_groups(log, rows, certificate)
    log = replace(log, identities=identities, source=source, score_digits=certificate.score_digits)
    return log.binarized() if certificate.binarized else log


def uncertified_log(rows: Sequence[CalibrationRow]) -> ScoreLog:
    """Return rows as a log where there is no certificate yet, of the form of the first row, graded as it was."""
    source = "the stored rows"
    if rows[0].form == "text":
        return replace(_router_log([row for row in rows if row.form == "text"], None)[0], source=source)
    return replace(_menu_log([row for row in rows if row.form == "menu"]), source=source)


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


def _menu_log(rows: Sequence[CalibrationRow]) -> ScoreLog:
    labelled = any(row.label is not None for row in rows)
    return ScoreLog.from_arrays(
        [row.primary or (_NAN,) * row.size for row in rows],
        [row.guardian or (_NAN,) * row.size for row in rows],
        id=[row.id for row in rows],
        outcomes={"correct": [_correct(row) for row in rows]} if labelled else None,
    )


def _correct(row: CalibrationRow) -> list[float]:
    if row.label is None or not 0 <= row.label < row.size:
        return [_NAN] * row.size
    return [float(action == row.label) for action in range(row.size)]


def _router_log(rows: Sequence[CalibrationRow], certificate: Certificate | None) -> tuple[ScoreLog, dict[str, Any]]:
    grader = _grader_of(rows, certificate)
    grades = [_grades(row, grader) for row in rows]
    log = ScoreLog.from_router(
        confidence=[_confidence(row) for row in rows],
        primary_grade=[both.primary for both in grades],
        guardian_grade=[both.guardian for both in grades],
        id=[row.id for row in rows],
    )
    return log, {} if grader is None else {"grader": dict(grader)}


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
        make = _router_row if certificate.router else _menu_row
        row = make(id, primary[part], guardian[part], right, certificate)
        rows.append(row if groups is None else msgspec.structs.replace(row, group=groups[k]))
    return rows


def _menu_row(
    id: str, primary: list[float], guardian: list[float], correct: list[float] | None, certificate: Certificate
) -> CalibrationRow:
    label = correct.index(1.0) if certificate.binarized and correct is not None and 1.0 in correct else None
    return CalibrationRow(id=id, size=len(primary), primary=_numbers(primary), guardian=_numbers(guardian), label=label)


def _router_row(
    id: str, primary: list[float], guardian: list[float], correct: list[float] | None, certificate: Certificate
) -> CalibrationRow:
    """Return a row with grades that give the same regret; with gains counted, those that were given."""
    best, own = correct if certificate.loss == NET and correct is not None else (1.0, guardian[1])
    known = not isnan(own) and not isnan(best) and not isnan(guardian[0])
    grader = certificate.identities.get("grader") if isinstance(certificate.identities, dict) else None
    grades = Grades(primary=own, guardian=best) if known else None
    return CalibrationRow(
        id=id, form="text", size=2, primary=_numbers(primary[1:]), grades=grades,
        grader=None if grader == BY_FEEDBACK else grader,
    )  # fmt: skip


def _numbers(scores: Sequence[float]) -> tuple[float, ...] | None:
    """Return scores, or None if one of them is missing: a row without opinion, or without the Guardian's."""
    return None if any(isnan(score) for score in scores) else tuple(scores)
