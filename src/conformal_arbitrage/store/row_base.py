"""Calibration rows: what a later calibration needs of a decision that is fit for it, and no content; it survives pruning.

A decision is fit if it was chosen independently of all scores. What is not known of a row stays unknown; a row is never
dropped because of what is known of it.

Knows nothing of SQL, or of how a calibration uses the rows.
"""

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from conformal_arbitrage.store.record import DecisionBody, DecisionRecord, FeedbackBody, Grades, JSONObject
from conformal_arbitrage.types import Role


class CalibrationRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row.

    Attributes:
        id: the decision's; of a row that was imported from a log, its id there.
        form: menu or free text.
        size: the number of actions.
        primary: the Primary's scores; in free text its confidence alone. None if it had none.
        guardian: the Guardian's scores over the whole menu; None while, or if, they are unknown.
        grades: of both answers in free text, the first that were given.
        grader: who gave them, if a grader of this package did.
        label: index of the right action, the first that was given.
        session: id of the session's first decision, under a policy that decides by session.
        group: as the request named it, or as the log has it; None if it has none.
    """

    id: str
    form: Literal["menu", "text"] = "menu"
    size: int
    primary: tuple[float | None, ...] | None = None
    guardian: tuple[float | None, ...] | None = None
    grades: Grades | None = None
    grader: JSONObject | None = None
    label: int | None = None
    session: str | None = None
    group: str | None = None


class RowStore(Protocol):
    """The part of a store that keeps calibration rows."""

    async def gather_rows(self) -> int:
        """Bring the calibration rows up to what has been recorded; return how many events were new."""
        ...

    async def count_rows(self, policy: str, *, identities_sha256: str, since: float, until: float | None = None) -> int:
        """Return how many rows a policy has that these models made, by the time their query arrived.

        Args:
            policy: the policy's name.
            identities_sha256: fingerprint of the identities of the models.
            since: queries that arrived after this time count.
            until: and not after this one; None for all.
        """
        ...

    async def calibration_rows(
        self, policy: str, *, identities_sha256: str, since: float, limit: int | None = None
    ) -> list[CalibrationRow]:
        """Return the rows of a policy that these models made, in the order in which their queries arrived.

        Raises:
            StoreError: a row is not what was written.
        """
        ...

    async def import_rows(self, policy: str, log_sha256: str, collected: Sequence[CalibrationRow]) -> None:
        """Keep the rows of a log; does nothing if they are there."""
        ...

    async def count_imported(self, policy: str, log_sha256: str) -> int:
        """Return how many rows were imported from a log."""
        ...

    async def imported_rows(self, policy: str, log_sha256: str) -> list[CalibrationRow]:
        """Return the rows that were imported from a log, in its order; none if it was not.

        Raises:
            StoreError: a row is not what was written.
        """
        ...


def fit(record: DecisionRecord) -> bool:
    """Return whether a row was chosen independently of its scores, and made with the pinned settings."""
    return is_fit(record.decision)


def is_fit(decision: DecisionBody) -> bool:
    """Return whether a decision was chosen independently of its scores, and made with the pinned settings."""
    return not decision.overridden and (decision.mode in ("shadow", "safe") or decision.audited)


def calibration_row(record: DecisionRecord, callers: Collection[str] = ()) -> CalibrationRow:
    """Return what a calibration needs of a decision.

    Args:
        record: the decision.
        callers: keys whose labels do not count: a caller could hide losses with labels of its own.
    """
    decision, graded = record.decision, first_graded(record)
    trusted = [feedback.label for feedback in record.feedback if feedback.by not in callers]
    labels = (label for label in trusted if isinstance(label, int))
    return CalibrationRow(
        id=record.id,
        form="text" if decision.form == "text" else "menu",
        size=decision.size,
        primary=scores_of(record, "primary"),
        guardian=all_guardian_scores(record),
        grades=None if graded is None else graded.grades,
        grader=None if graded is None else graded.grader,
        label=next(labels, None),
        session=decision.session,
        group=decision.group,
    )


def scores_of(record: DecisionRecord, role: Role) -> tuple[float, ...] | None:
    """Return the scores of the first leg in a role."""
    return next((leg.scores for leg in record.decision.legs if leg.role == role), None)


def all_guardian_scores(record: DecisionRecord) -> tuple[float, ...] | None:
    """Return the Guardian's scores over the whole menu: from its audit, or from its own leg if that saw everything.

    An audit by other models than the decision's says nothing of this row.
    """
    audit, models = record.audit, record.decision.identities_sha256
    if audit is not None and audit.scores is not None and audit.identities_sha256 in (None, models):
        return audit.scores
    scores = scores_of(record, "guardian")
    return scores if scores is not None and len(scores) == record.decision.size else None


def first_graded(record: DecisionRecord) -> FeedbackBody | None:
    """Return the first grades of both answers, since later ones could be chosen by their effect."""
    return next((feedback for feedback in record.feedback if feedback.grades is not None), None)
