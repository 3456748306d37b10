"""Records as a score log: how calibration data comes from live traffic.

Fit for calibration are rows chosen without regard to any score: all of shadow mode, and those the audit coin drew. A row
whose Guardian score is still missing stays in as missing, never dropped.

Knows nothing of HTTP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from conformal_arbitrage.calibration.certificate import UNFIT
from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.scorelog.files import strings
from conformal_arbitrage.scorelog.log import ScoreLog
from conformal_arbitrage.store.base import DecisionRecord, Store
from conformal_arbitrage.upstream.base import fingerprint

_PAGE = 1000


async def score_log_of(
    store: Store, policy: str, *, identities: Mapping[str, Any] | None = None, everything: bool = False
) -> ScoreLog:
    """The decisions of a policy as a score log, oldest first.

    Args:
        store: the record.
        policy: whose decisions.
        identities: of the models at hand; the log carries them if every row was made by these.
        everything: also rows that were chosen by their scores; the log is then marked as unfit for calibration.
    """
    found = [r for r in await _all(store, policy) if "legs" in r.decision and (everything or fit(r))]
    if not found:
        raise StoreError(
            f"policy {policy!r} has no rows fit for calibration; serve it in shadow mode, or set audit_rate"
        )
    forms = {str(r.decision["form"]) for r in found}
    if len(forms) > 1:
        raise StoreError(f"policy {policy!r} was served in menu form and in text form; prune one of the two first")
    own = fingerprint(identities)
    made_by = identities if all(r.decision["identities_sha256"] == own for r in found) else None
    log = replace(_router(found) if forms == {"text"} else _menus(found), identities=made_by)
    marks = {"mode": strings([r.decision["mode"] for r in found])}
    if everything:
        marks[UNFIT] = strings(["no" if fit(r) else "chosen by its scores" for r in found])
    return replace(log, extra={**log.extra, **marks})


def fit(record: DecisionRecord) -> bool:
    """Whether a row was chosen without regard to its scores, and made with the pinned settings."""
    if record.decision.get("overridden"):
        return False
    return record.decision.get("mode") == "shadow" or bool(record.decision.get("audited"))


async def _all(store: Store, policy: str) -> list[DecisionRecord]:
    found: list[DecisionRecord] = []
    before: str | None = None
    while page := await store.records(policy=policy, before=before, limit=_PAGE):
        found += page
        before = page[-1].id
    return found[::-1]


def _menus(records: Sequence[DecisionRecord]) -> ScoreLog:
    sizes = [_size(record) for record in records]
    return ScoreLog.from_arrays(
        [_filled(_scores(r, "primary"), n) for r, n in zip(records, sizes, strict=True)],
        [_filled(_whole_guardian(r, n), n) for r, n in zip(records, sizes, strict=True)],
        id=[record.id for record in records],
    )


def _router(records: Sequence[DecisionRecord]) -> ScoreLog:
    graded = [_grades(record) for record in records]
    return ScoreLog.from_router(
        confidence=[(_scores(record, "primary") or [float("nan")])[0] for record in records],
        primary_grade=[grades[0] for grades in graded],
        guardian_grade=[grades[1] for grades in graded],
        id=[record.id for record in records],
    )


def _size(record: DecisionRecord) -> int:
    return int(record.decision["size"])


def _scores(record: DecisionRecord, role: str) -> list[float] | None:
    for leg in record.decision["legs"]:
        if leg["role"] == role:
            return leg["scores"]
    return None


def _whole_guardian(record: DecisionRecord, size: int) -> list[float] | None:
    """The Guardian's scores over the whole menu: from its audit, or its own leg if it saw everything."""
    if record.audit is not None and record.audit["scores"] is not None:
        return record.audit["scores"]
    own = _scores(record, "guardian")
    return own if own is not None and len(own) == size else None


def _filled(scores: list[float] | None, size: int) -> list[float]:
    return [float("nan")] * size if scores is None else scores


def _grades(record: DecisionRecord) -> tuple[float, float]:
    """The last grades of both answers; NaN where they were not graded."""
    for told in reversed(record.feedback):
        if told.get("grades"):
            return float(told["grades"]["primary"]), float(told["grades"]["guardian"])
    return float("nan"), float("nan")
