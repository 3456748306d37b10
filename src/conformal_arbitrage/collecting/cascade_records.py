"""Turn the shadow rows of a cascade's policy into a log that `calibrate --path` reads.

In shadow mode every model is asked, so a row has what all of them did. Rows of enforce mode end where the cascade stopped:
which models they have depends on scores, so none of them is exported, audited or not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from conformal_arbitrage.collecting.grading import chain_texts
from conformal_arbitrage.collecting.records import decisions_of
from conformal_arbitrage.errors import StoreError
from conformal_arbitrage.live.rule import top_choice, top_of
from conformal_arbitrage.models.port import fingerprint
from conformal_arbitrage.scorelog.cascade import CascadeLog, ModelColumns
from conformal_arbitrage.store.record import DecisionRecord, FeedbackBody
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import Leg

_NAN = float("nan")


async def cascade_log_of(
    store: Store, policy: str, *, models: Sequence[str], guardian: str, identities: Mapping[str, Any] | None = None
) -> CascadeLog:
    """Return the shadow decisions of a cascade's policy as its log, oldest first.

    Args:
        store: the decision record.
        policy: the policy's name.
        models: the cheap models in the order of [cascade].
        guardian: the Guardian's name.
        identities: of the models at hand; the log carries them if these models made every row.

    Raises:
        StoreError: there are no such rows, or they are in free text, or other models made them.
    """
    records = [one for one in await decisions_of(store, policy) if _is_complete(one)]
    if not records:
        raise StoreError(
            f"policy {policy!r} has no rows of shadow mode on record, and only in shadow mode are all models of a cascade "
            'asked; serve it with mode = "shadow", or use `arbitrage collect --path`'
        )
    for record in records:
        if len(_legs(record, "primary")) != len(models):
            raise StoreError(
                f"policy {policy!r}: decision {record.id} asked {len(_legs(record, 'primary'))} models before the Guardian, "
                f"and [cascade] has {len(models)}; prune those of the earlier cascade first"
            )
    sha256 = fingerprint(identities)
    made_by = identities if all(record.decision.identities_sha256 == sha256 for record in records) else None
    if any(record.decision.form == "menu" for record in records):
        return _menu_log(records, models, guardian, made_by)
    return _text_log(records, models, guardian, policy, made_by)


def _is_complete(record: DecisionRecord) -> bool:
    return record.decision.mode == "shadow" and not record.decision.overridden


def _legs(record: DecisionRecord, role: str) -> list[Leg]:
    return [leg for leg in record.decision.legs if leg.role == role]


def _menu_log(
    records: Sequence[DecisionRecord], models: Sequence[str], guardian: str, identities: Mapping[str, Any] | None
) -> CascadeLog:
    last = [next(iter(_legs(record, "guardian")), None) for record in records]
    labels = [_label(record) for record in records]
    by_label = all(label is not None for label in labels)
    columns: dict[str, ModelColumns] = {}
    for place, name in enumerate(models):
        legs = [_legs(record, "primary")[place] for record in records]
        chosen = [top_choice(leg.scores) for leg in legs]
        columns[name] = ModelColumns(
            confidence=[_NAN if margin is None else margin for margin, _ in chosen],
            grade=[
                _NAN if top is None else _grade(top, label if by_label else None, leg)
                for (_, top), label, leg in zip(chosen, labels, last, strict=True)
            ],
            cost=_costs(legs),
            answer=[None if top is None else str(top) for _, top in chosen],
        )
    tops = [None if leg is None or leg.scores is None else top_of(leg.scores) for leg in last]
    return CascadeLog.from_columns(
        id=[record.id for record in records],
        models=columns,
        guardian_grade=[
            _NAN if top is None else _grade(top, label if by_label else None, leg)
            for top, label, leg in zip(tops, labels, last, strict=True)
        ],
        guardian_cost=_costs(last),
        guardian=guardian,
        identities=identities,
        source="the decision record",
    )


def _text_log(
    records: Sequence[DecisionRecord],
    models: Sequence[str],
    guardian: str,
    policy: str,
    identities: Mapping[str, Any] | None,
) -> CascadeLog:
    """Return rows in free text; those without grades of every model count as ungraded."""
    graded = [_chain_grades(record, len(models)) for record in records]
    if not any(graded):
        raise StoreError(
            f"policy {policy!r} answers in free text, and no row has grades of every model's answer; run `arbitrage records "
            f'grade --policy {policy} --grade HOW` first, with content = "full" in the policy'
        )
    grader = next(one.grader or {"kind": "feedback"} for one in graded if one is not None)
    grades = [None if one is None or (one.grader or {"kind": "feedback"}) != grader else one.grades for one in graded]
    columns: dict[str, ModelColumns] = {}
    for place, name in enumerate(models):
        legs = [_legs(record, "primary")[place] for record in records]
        columns[name] = ModelColumns(
            confidence=[_NAN if leg.scores is None else leg.scores[0] for leg in legs],
            grade=[_NAN if one is None else one.chain[place] for one in grades],
            cost=_costs(legs),
            answer=[chain_texts(record)[place] for record in records],
        )
    return CascadeLog.from_columns(
        id=[record.id for record in records],
        models=columns,
        guardian_grade=[_NAN if one is None else one.guardian for one in grades],
        guardian_cost=_costs([next(iter(_legs(record, "guardian")), None) for record in records]),
        guardian=guardian,
        identities=None if identities is None else {**identities, "grader": dict(grader)},
        source="the decision record",
    )


def _chain_grades(record: DecisionRecord, models: int) -> FeedbackBody | None:
    """Return the first grades of every model's answer, if there are any and the answers were kept."""
    if len(chain_texts(record)) != models:
        return None
    graded = (one for one in record.feedback if one.grades is not None and len(one.grades.chain) == models)
    return next(graded, None)


def _label(record: DecisionRecord) -> int | None:
    return next((feedback.label for feedback in record.feedback if isinstance(feedback.label, int)), None)


def _grade(chosen: int, label: int | None, guardian: Leg | None) -> float:
    """Return how good a choice is: by the label if all rows have one, else by the Guardian's scores."""
    if label is not None:
        return float(label == chosen)
    return _NAN if guardian is None or guardian.scores is None else guardian.scores[chosen]


def _costs(legs: Sequence[Leg | None]) -> list[float]:
    """Return what each call cost; one whose cost is unknown counts as the mean of the others, or 0."""
    costs = np.array([_NAN if leg is None or leg.spent.cost is None else leg.spent.cost for leg in legs])
    known = costs[~np.isnan(costs)]
    return np.where(np.isnan(costs), known.mean() if known.size else 0.0, costs).tolist()
