"""CascadeLog: several cheap models and a Guardian on the same questions, one row per question.

For every cheap model NAME a table has NAME_confidence, NAME_grade, NAME_cost and NAME_answer, and for the Guardian
NAME_grade and NAME_cost, besides `id`. A model without a confidence in a row failed there; without a cost either, nobody
asked it.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from conformal_arbitrage.core.chains import answer_numbers
from conformal_arbitrage.core.exact import Bools, Floats, Indices, n_rows
from conformal_arbitrage.errors import ScoreLogError
from conformal_arbitrage.scorelog.fitness import UNFIT
from conformal_arbitrage.scorelog.log import grades
from conformal_arbitrage.scorelog.tables import Strings, Table, TableColumns, strings, write_table
from conformal_arbitrage.types import as_object

GUARDIAN_NAME = "guardian"
"""What the Guardian of a cascade is called unless it is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelColumns:
    """What one cheap model of a cascade did, one value per row.

    Attributes:
        confidence: in [0, 1]; None or NaN where the model gave no answer.
        grade: of its answer, in [0, 1].
        cost: dollars for asking it; None or NaN where nobody did.
        answer: its answer as text; None where it gave none. Equal answers of two models count in a chain.
    """

    confidence: ArrayLike
    grade: ArrayLike
    cost: ArrayLike
    answer: Iterable[str | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CascadeLog:
    """A checked log of several cheap models and a Guardian.

    Attributes:
        source: where it comes from, for messages.
        id: of each row.
        models: the cheap models, from the least to the greatest mean cost: the order in which a chain asks them.
        guardian: the Guardian's name.
        confidence, grade, cost: rows x models. Without a confidence there is no answer, without a cost no question.
        guardian_grade, guardian_cost: one per row.
        identities: of the models, by name; None if the log does not say.
        texts: rows x models, the answers as they were written.
    """

    source: str
    id: Strings
    models: tuple[str, ...]
    guardian: str
    confidence: Floats
    grade: Floats
    cost: Floats
    guardian_grade: Floats
    guardian_cost: Floats
    identities: Mapping[str, Any] | None
    texts: Strings

    @classmethod
    def read(
        cls,
        path: str | Path,
        *,
        guardian: str = GUARDIAN_NAME,
        models: Sequence[str] | None = None,
        guardian_cost: float | None = None,
    ) -> "CascadeLog":
        """Read a cascade from a file.

        Args:
            path: Parquet, JSON Lines or CSV.
            guardian: the Guardian's name: its columns are NAME_grade and NAME_cost.
            models: the cheap models to use; by default every other one with a column NAME_confidence.
            guardian_cost: of rows that are only to be decided: what the Guardian costs where there is no column of it.
                Columns of grades may be absent, too.

        Raises:
            ScoreLogError: with the file, the row, the column and what to do.
        """
        with Table(path) as table:
            if UNFIT in table.types:
                raise ScoreLogError(
                    f"{path}: contains rows selected by their scores, which breaks exchangeability; export shadow rows only"
                )
            names = _model_names(table, guardian, models, graded=guardian_cost is None)
            rows = {name: _read_model(table, name) for name in names}
            ids, cost = table.texts("id").tolist(), f"{guardian}_cost"
            usual = np.full(len(ids), np.nan if guardian_cost is None else guardian_cost)
            return cls.from_columns(
                id=ids,
                models=rows,
                guardian_grade=_read_grades(table, guardian),
                guardian_cost=table.scalars(cost) if cost in table.types else usual,
                guardian=guardian,
                identities=as_object(table.metadata.get("identities")) or None,
                source=str(path),
            )

    @classmethod
    def from_columns(
        cls,
        *,
        id: Iterable[object],
        models: Mapping[str, ModelColumns],
        guardian_grade: ArrayLike,
        guardian_cost: ArrayLike,
        guardian: str = GUARDIAN_NAME,
        identities: Mapping[str, Any] | None = None,
        source: str = "cascade log",
    ) -> "CascadeLog":
        """Build a cascade from columns.

        Args:
            id: one per row, unique, fixed before any answer is known.
            models: the cheap models' columns, by name.
            guardian_grade: of the Guardian's answers, in [0, 1]; None or NaN where unknown.
            guardian_cost: dollars for asking it.
            guardian: its name.
            identities: of the models, by name.
            source: where it comes from, for messages.

        Raises:
            ScoreLogError: with the row, the column and what to do.
        """
        if not models or guardian in models:
            raise ScoreLogError(
                f"{source}: a cascade has a Guardian and at least one cheaper model beside it; got "
                f"{', '.join(models) or 'none'} and the Guardian {guardian}"
            )
        ids = _unique_ids(id, source)
        n = len(ids)
        columns = {name: _checked_model(name, model, n, source) for name, model in models.items()}
        order = sorted(columns, key=lambda name: (float(_mean_known(columns[name].cost)), name))
        texts = np.column_stack([columns[name].texts for name in order])
        confidence = np.column_stack([columns[name].confidence for name in order])
        return cls(
            source=source,
            id=ids,
            models=tuple(order),
            guardian=guardian,
            confidence=confidence,
            grade=np.column_stack([columns[name].grade for name in order]),
            cost=np.column_stack([columns[name].cost for name in order]),
            guardian_grade=_column(guardian_grade, f"{guardian}_grade", n, source, high=1),
            guardian_cost=_costs(guardian_cost, f"{guardian}_cost", n, source, needed=np.ones(n, dtype=np.bool_)),
            identities=identities,
            texts=texts,
        )

    def __len__(self) -> int:
        return len(self.id)

    @property
    def unasked(self) -> Bools:
        """Rows x models: whether nobody asked the model."""
        return np.isnan(self.cost)

    @property
    def mean_costs(self) -> Floats:
        """What asking each model costs, in the mean over the rows that asked it."""
        return _mean_known(self.cost)

    def select(self, rows: Indices) -> "CascadeLog":
        """Return some of the rows."""
        per_row = ("id", "confidence", "grade", "cost", "guardian_grade", "guardian_cost", "texts")
        return replace(self, **{name: getattr(self, name)[rows] for name in per_row})

    def columns_of(self, models: Sequence[str]) -> list[int]:
        """Return the places of models in `models`.

        Raises:
            ScoreLogError: the log has no such model.
        """
        for name in models:
            if name not in self.models:
                raise ScoreLogError(f"{self.source}: there is no model '{name}'; there are {', '.join(self.models)}")
        return [self.models.index(name) for name in models]

    def sha256(self) -> str:
        """Return a digest of all that a calibration depends on, not of file bytes or of the order of rows."""
        digest = hashlib.sha256(f"cascade log 1;{self.guardian};{';'.join(self.models)};rows {len(self)}".encode())
        order = np.argsort(self.id)
        for values in (self.confidence, self.grade, self.cost, self.guardian_grade, self.guardian_cost):
            digest.update(np.ascontiguousarray(values[order] + 0.0).astype("<f8").tobytes())  # -0.0 becomes 0.0
        given = np.where(np.isnan(self.confidence), "", self.texts)[order]
        digest.update(answer_numbers(given.ravel().tolist()).astype("<i8").tobytes())
        for name in self.id[order].tolist():
            text = name.encode()
            digest.update(len(text).to_bytes(4, "little") + text)
        return digest.hexdigest()

    def lineage(self) -> tuple[str, ...]:
        """Return digests of every model's grades, in whichever order of rows, and the log's own at last.

        Logs of other models, or of the same rows in another order, share one of the former.
        """
        order = np.argsort(self.id)
        ids = "\0".join(self.id[order].tolist()).encode()
        grades = (self.guardian_grade, *self.grade.T)
        origins = [
            hashlib.sha256(ids + np.nan_to_num(grade[order], nan=-1.0).tobytes()).hexdigest() for grade in grades
        ]
        return (*origins, self.sha256())

    def write(self, path: str | Path) -> None:
        """Write the log; the ending of the name says the format."""
        scalars: list[tuple[str, Any]] = [("id", self.id)]
        for j, name in enumerate(self.models):
            scalars += [
                (f"{name}_confidence", self.confidence[:, j]),
                (f"{name}_grade", self.grade[:, j]),
                (f"{name}_cost", self.cost[:, j]),
                (f"{name}_answer", self.texts[:, j]),
            ]
        scalars += [(f"{self.guardian}_grade", self.guardian_grade), (f"{self.guardian}_cost", self.guardian_cost)]
        metadata = {} if self.identities is None else {"identities": dict(self.identities)}
        offsets = np.zeros(len(self) + 1, dtype=np.int64)
        write_table(path, TableColumns(scalars=scalars, lists=(), offsets=offsets, metadata=metadata))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    confidence: Floats
    grade: Floats
    cost: Floats
    texts: Strings


def _model_names(table: Table, guardian: str, models: Sequence[str] | None, *, graded: bool) -> list[str]:
    """Return the cheap models of a table, after checking that it has all the columns that it needs."""
    with_confidence = [name.removesuffix("_confidence") for name in table.types if name.endswith("_confidence")]
    with_grade = [name.removesuffix("_grade") for name in table.types if name.endswith("_grade")]
    for column in ("id", f"{guardian}_grade", f"{guardian}_cost") if graded else ("id",):
        if column not in table.types:
            others = ", ".join(name for name in with_grade if name not in with_confidence)
            remedy = f"; name the Guardian, one of {others}, with --guardian-column" if others else ""
            raise ScoreLogError(f"{table.source}: there is no column '{column}', which a cascade needs{remedy}")
    whats = ("confidence", "grade", "cost", "answer") if graded else ("confidence", "cost", "answer")
    alike = [name for name in with_grade if {f"{name}_cost", f"{name}_answer"} <= table.types.keys()]
    names = [name for name in dict.fromkeys((*with_confidence, *alike)) if name != guardian]
    for name in (names := names if models is None else list(models)):
        for column in (f"{name}_{what}" for what in whats):
            if column not in table.types:
                known = f"it has {', '.join(sorted(table.types))}; add it, or leave the model out with --models"
                raise ScoreLogError(
                    f"{table.source}: there is no column '{column}', which model '{name}' needs; {known}"
                )
    return names


def _read_model(table: Table, name: str) -> ModelColumns:
    return ModelColumns(
        confidence=table.scalars(f"{name}_confidence"),
        grade=_read_grades(table, name),
        cost=table.scalars(f"{name}_cost"),
        answer=table.texts(f"{name}_answer").tolist(),
    )


def _read_grades(table: Table, name: str) -> Floats:
    column = f"{name}_grade"
    return table.scalars(column, truths=True) if column in table.types else np.full(len(table.texts("id")), np.nan)


def _checked_model(name: str, given: ModelColumns, n: int, source: str) -> _Checked:
    texts = strings(list(given.answer))
    if len(texts) != n:
        raise ScoreLogError(f"{source}: column '{name}_answer' has {n_rows(len(texts))}, the ids {n}; give one per row")
    confidence = _column(given.confidence, f"{name}_confidence", n, source, high=1)
    return _Checked(
        confidence=confidence,
        grade=_column(given.grade, f"{name}_grade", n, source, high=1),
        cost=_costs(given.cost, f"{name}_cost", n, source, needed=~np.isnan(confidence)),
        texts=texts,
    )


def _column(values: ArrayLike, name: str, n: int, source: str, *, high: float) -> Floats:
    column = grades(values, name, high=high, source=source)
    if len(column) != n:
        raise ScoreLogError(f"{source}: column '{name}' has {n_rows(len(column))}, the ids {n}; give one per row")
    return column


def _costs(values: ArrayLike, name: str, n: int, source: str, *, needed: Bools) -> Floats:
    column = _column(values, name, n, source, high=np.inf)
    unknown: Bools = np.isinf(column) | (np.isnan(column) & needed)
    if unknown.any():
        row = int(unknown.argmax())
        raise ScoreLogError(
            f"{source}: row {row + 1}, column '{name}': no cost; give dollars, 0 or more. If it is unknown, the model's "
            "mean will do: costs choose the chain, and the promise does not depend on them"
        )
    return column


def _mean_known(costs: Floats) -> Floats:
    return np.nansum(costs, axis=0) / np.maximum((~np.isnan(costs)).sum(axis=0), 1)


def _unique_ids(values: Iterable[object], source: str) -> Strings:
    ids = strings(list(values))
    seen: dict[str, int] = {}
    for row, name in enumerate(ids.tolist()):
        if name == "":
            raise ScoreLogError(f"{source}: row {row + 1}, column 'id': the id is empty; give every row one")
        first = seen.setdefault(name, row)
        if first != row:
            raise ScoreLogError(
                f"{source}: row {row + 1}, column 'id': {name!r} is also the id of row {first + 1}; make ids unique"
            )
    return ids
