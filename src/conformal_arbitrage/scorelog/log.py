"""ScoreLog: recorded scores of a Primary and a Guardian, one row per query.

Inside there are flat arrays with offsets, so ten million rows fit in memory. Data that break a rule of the format are
refused with the file, the row, the column and the remedy.

Knows nothing of budgets, thresholds or live models.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from conformal_arbitrage.core.arrays import Bools, Floats, Integers, Scalar, flat_positions
from conformal_arbitrage.core.choices import row_argmax
from conformal_arbitrage.errors import OptionError, OutputError, ScoreLogError
from conformal_arbitrage.scorelog.columns import (
    CheckedColumns,
    RawColumns,
    Usage,
    array_columns,
    check_columns,
    read_columns,
)
from conformal_arbitrage.scorelog.digests import rows_digest
from conformal_arbitrage.scorelog.files import Table, write_table
from conformal_arbitrage.scorelog.frames import FrameTable, arrow_stream, arrow_table, pandas_frame
from conformal_arbitrage.scorelog.router import is_router_form, read_router_columns, router_columns
from conformal_arbitrage.scorelog.tables import Column, ColumnReader, Strings, TableColumns
from conformal_arbitrage.scorelog.wide import ScoreColumns
from conformal_arbitrage.types import Row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ScoreLog:
    """Scores of both models for every action of every query.

    Build one with `read`, `from_frame`, `from_arrays` or `from_router`. Actions of row i are at offsets[i] to
    offsets[i+1] of the flat arrays (`primary`, `guardian`, `actions` and those in `lists`). A log has the Arrow
    PyCapsule interface, so `polars.DataFrame(log)` or `pyarrow.table(log)` read it as a table.

    Attributes:
        primary: Primary scores; a row with a null or NaN has no opinion and holds zeros.
        guardian: Guardian scores; a row with a null or NaN is missing and holds NaN.
        offsets: where each row's actions begin.
        score_digits: significant decimals of a Primary score, 12 or 6 (single precision).
        single: which columns came in single precision.
        no_opinion: rows in which the Primary had no opinion.
        missing: rows in which the Guardian did not answer.
        lists: further numbers per action, among them the outcomes.
        outcomes: which of the lists are outcomes; `correct` always, others by name.
        binary: the binarised loss column set by `binarized`, else None.
        extra: further columns, one value per row, kept as they are.
        columns: the names under which Primary and Guardian stood.
        identities: the scorers that made the scores, by column; None if the log does not say.
        source: where the log came from, for messages.
    """

    primary: Floats
    guardian: Floats
    offsets: Integers
    score_digits: int
    no_opinion: Bools
    missing: Bools
    single: frozenset[str] = frozenset()
    id: Strings | None = None
    label: Integers | None = None
    group: Strings | None = None
    context: Strings | None = None
    actions: Strings | None = None
    lists: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    outcomes: tuple[str, ...] = ()
    binary: Floats | None = None
    primary_usage: Usage = field(default_factory=Usage)
    guardian_usage: Usage = field(default_factory=Usage)
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    columns: tuple[str, str] = ("primary", "guardian")
    identities: Mapping[str, Any] | None = None
    source: str = "arrays"

    @classmethod
    def read(
        cls,
        path: str | Path,
        *,
        primary: ScoreColumns = "primary",
        guardian: ScoreColumns | None = "guardian",
        outcomes: Sequence[str] = (),
    ) -> "ScoreLog":
        """Read a score log from .parquet, .jsonl, .jsonl.gz or .csv.

        Args:
            path: the file.
            primary: the column that plays the Primary, or one column per action as in `from_frame`; its token and cost
                columns follow its name.
            guardian: the column that plays the Guardian; None if there is none, as for a rule that is only applied.
            outcomes: list columns to report besides `correct`.
        """
        with Table(path) as table:
            return cls.from_table(table, primary, guardian, outcomes)

    @classmethod
    def from_frame(
        cls,
        frame: object,
        *,
        primary: ScoreColumns = "primary",
        guardian: ScoreColumns | None = "guardian",
        outcomes: Sequence[str] = (),
    ) -> "ScoreLog":
        """Read a score log from a pandas or polars frame, or any Arrow table (the Arrow PyCapsule interface).

        The columns are those of a file, under the same rules. A named index of pandas is a column too. Scores may also
        stand in wide columns, one per action: `primary=["p_yes", "p_no"], guardian=["g_yes", "g_no"]`; every row then
        has the same menu, and the actions are named by what follows each model's prefix ("yes", "no") if the frame has
        no `actions` and both models agree.

        Args:
            frame: the table.
            primary: the list column, or the wide columns, with the Primary's scores.
            guardian: the same for the Guardian; None if there is none, as for a rule that is only applied.
            outcomes: list columns to report besides `correct`.
        """
        with FrameTable(frame) as table:
            return cls.from_table(table, primary, guardian, outcomes)

    @classmethod
    def from_table(
        cls, table: ColumnReader, primary: ScoreColumns, guardian: ScoreColumns | None, outcomes: Sequence[str]
    ) -> "ScoreLog":
        """Read a score log from an open table; see `read` and `from_frame`."""
        return cls.from_columns(read_columns(table, primary, guardian, outcomes))

    @classmethod
    def from_columns(cls, raw: RawColumns) -> "ScoreLog":
        """Apply the rules of the format to raw columns."""
        return _score_log(check_columns(raw))

    @classmethod
    def from_arrays(
        cls,
        primary: ArrayLike | Sequence[Any],
        guardian: ArrayLike | Sequence[Any] | None = None,
        *,
        id: Iterable[object] | None = None,
        label: ArrayLike | None = None,
        group: Iterable[object] | None = None,
        context: Iterable[object] | None = None,
        actions: Sequence[Sequence[str]] | None = None,
        outcomes: Mapping[str, ArrayLike | Sequence[Any]] | None = None,
        primary_usage: Usage | None = None,
        guardian_usage: Usage | None = None,
        identities: Mapping[str, Any] | None = None,
    ) -> "ScoreLog":
        """Build a score log from 2-D arrays or from lists of different lengths.

        Args:
            primary: scores, rows x actions; a row may be None, or hold None or NaN (no opinion).
            guardian: scores of the same shape; a missing answer is None or NaN; None if there is no Guardian.
            id: unique names of the rows.
            label: index of each row's right action.
            group: subject, tenant, language.
            context: the query's text.
            actions: the actions' texts.
            outcomes: further numbers per action, each an outcome by its name.
            primary_usage: cost or tokens of asking the Primary, per row.
            guardian_usage: cost or tokens of asking the Guardian, per row.
            identities: the scorers that made the scores, by role.
        """
        return cls.from_columns(
            array_columns(
                primary,
                guardian,
                id=id,
                label=label,
                group=group,
                context=context,
                actions=actions,
                outcomes=outcomes,
                primary_usage=primary_usage,
                guardian_usage=guardian_usage,
                identities=identities,
            )
        )

    @classmethod
    def from_router(
        cls,
        *,
        confidence: ArrayLike,
        primary_grade: ArrayLike,
        guardian_grade: ArrayLike,
        id: Iterable[object] | None = None,
        group: Iterable[object] | None = None,
        context: Iterable[object] | None = None,
        primary_usage: Usage | None = None,
        guardian_usage: Usage | None = None,
        identities: Mapping[str, Any] | None = None,
    ) -> "ScoreLog":
        """Build a log in router form: two answers and a confidence that the Primary's may stand alone.

        The actions are (guardian answer, primary answer), the Primary scores [0, s], the Guardian scores
        [1, 1 - regret] with regret = max(0, Guardian's grade - Primary's grade). The Primary's answer stands exactly
        when s > relaxation.

        Args:
            confidence: s >= 0 per row; NaN (none given) defers.
            primary_grade: grade of the Primary's answer, in [0, 1].
            guardian_grade: grade of the Guardian's; NaN in either grade is a missing Guardian score.
            id: unique names of the rows.
            group: subject, tenant, language.
            context: the request.
            primary_usage: cost or tokens of the Primary, per row.
            guardian_usage: cost or tokens of the Guardian, per row.
            identities: the scorers that made the scores, by role.
        """
        return cls.from_columns(
            router_columns(
                confidence=confidence,
                primary_grade=primary_grade,
                guardian_grade=guardian_grade,
                id=id,
                group=group,
                context=context,
                primary_usage=primary_usage,
                guardian_usage=guardian_usage,
                identities=identities,
            )
        )

    @classmethod
    def read_router(cls, path: str | Path, *, confidence: str, primary_grade: str, guardian_grade: str) -> "ScoreLog":
        """Read any table of router scores and grades as a log in router form; see `from_router`.

        Columns `id`, `group`, `context`, `primary_cost` and `guardian_cost` are kept.

        Args:
            path: .parquet, .jsonl, .jsonl.gz or .csv.
            confidence: the column with the router's score.
            primary_grade: the column with the grade of the Primary's answer.
            guardian_grade: the column with the grade of the Guardian's answer.
        """
        columns = read_router_columns(
            path, confidence=confidence, primary_grade=primary_grade, guardian_grade=guardian_grade
        )
        return cls.from_columns(columns)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        fewest, most = int(self.sizes.min()), int(self.sizes.max())
        parts = [
            f"{len(self):,} rows",
            f"{fewest} actions" if fewest == most else f"{fewest} to {most} actions",
            f"primary={self.columns[0]!r}",
            f"guardian={self.columns[1]!r}",
        ]
        counts = {"without opinion": int(self.no_opinion.sum()), "without Guardian": int(self.missing.sum())}
        parts += [f"{count:,} {what}" for what, count in counts.items() if count]
        return f"<ScoreLog {self.source}: {', '.join(parts)}>"

    @property
    def sizes(self) -> Integers:
        """Number of actions of each row."""
        return np.diff(self.offsets)

    @property
    def loss_scores(self) -> Floats:
        """The scores that the Guardian regret is measured in."""
        return self.guardian if self.binary is None else self.binary

    @property
    def unknown_loss(self) -> Bools:
        """Rows whose loss is unknown: no Guardian score or, once binarised, an unknown `correct` of its top action."""
        return self.missing if self.binary is None else np.isnan(self.binary[self.offsets[:-1]])

    @property
    def is_router(self) -> bool:
        """Whether every row has the router form: two actions, Primary [0, s], Guardian [1, ...]."""
        return is_router_form(self)

    def outcome(self, name: str) -> Floats:
        """Return an outcome's value for every action, flat; `correct` also follows from the label."""
        if name in self.lists:
            return self.lists[name]
        if name != "correct" or self.label is None:
            known = ", ".join(self.outcome_names) or "none"
            raise OptionError(f"{self.source}: there is no outcome '{name}'; it has: {known}")
        right = np.zeros(len(self.primary))
        right[self.offsets[:-1] + self.label] = 1.0
        return right

    @property
    def outcome_names(self) -> tuple[str, ...]:
        """Names of all outcomes, `correct` first."""
        has_correct = "correct" in self.lists or self.label is not None
        rest = tuple(name for name in self.outcomes if name != "correct")
        return ("correct", *rest) if has_correct else rest

    def binarized(self) -> "ScoreLog":
        """Return the log with the paper's 0/1 Guardian as its loss column.

        It is 1 on the Guardian's top action if that is right, else 0 throughout.
        Choices still use the raw scores; only the loss changes. The certificate then bounds the probability that the
        Guardian is right and its answer is not a candidate. A row in which `correct` of that action is unknown counts
        like one without a Guardian score; see `unknown_loss`.
        """
        if self.is_router:
            raise OptionError(f"{self.source}: router form needs no binarising; its scores already are regret")
        if "correct" not in self.outcome_names:
            raise OptionError(f"{self.source}: binarising needs the right answers; add a `label` or `correct` column")
        correct = self._zero_or_one()
        top = self.offsets[:-1] + row_argmax(self.guardian, self.offsets)
        binary = np.zeros(len(self.guardian))
        binary[top] = correct[top]
        binary[np.repeat(self.missing | np.isnan(correct[top]), self.sizes)] = np.nan
        return replace(self, binary=binary)

    def _zero_or_one(self) -> Floats:
        """Return `correct` for every action; refuse a grade in between, NaN (unknown) may stay."""
        correct = self.outcome("correct")
        partial = ~((correct == 0) | (correct == 1) | np.isnan(correct))
        if partial.any():
            place = int(partial.argmax())
            row = int(np.searchsorted(self.offsets, place, side="right"))
            raise ScoreLogError(
                f"{self.source}: row {row}, column 'correct': {correct[place]:g} is neither 0 nor 1, so right and wrong "
                "cannot be told apart; round the grades yourself, or use them as Guardian scores and do not binarise"
            )
        return correct

    def select(self, rows: ArrayLike) -> "ScoreLog":
        """Return a log of some rows, in the given order."""
        index = np.arange(len(self))[np.asarray(rows)]
        flat = flat_positions(self.offsets[index], self.sizes[index])
        return replace(
            self,
            primary=self.primary[flat],
            guardian=self.guardian[flat],
            offsets=np.concatenate([[0], np.cumsum(self.sizes[index])]),
            no_opinion=self.no_opinion[index],
            missing=self.missing[index],
            id=_entries(self.id, index),
            label=_entries(self.label, index),
            group=_entries(self.group, index),
            context=_entries(self.context, index),
            actions=_entries(self.actions, flat),
            lists={name: values[flat] for name, values in self.lists.items()},
            binary=_entries(self.binary, flat),
            primary_usage=self.primary_usage.select(index),
            guardian_usage=self.guardian_usage.select(index),
            extra={name: values[index] for name, values in self.extra.items()},
        )

    def row(self, index: int, /) -> Row:
        """Return one row as an object."""
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Row(
            index=index,
            primary=self.primary[span],
            guardian=self.guardian[span],
            id=None if self.id is None else str(self.id[index]),
            label=None if self.label is None else int(self.label[index]),
            group=None if self.group is None else str(self.group[index]),
            context=None if self.context is None else str(self.context[index]),
            actions=None if self.actions is None else [str(a) for a in self.actions[span]],
            lists={name: values[span] for name, values in self.lists.items()},
            extra={name: values[index] for name, values in self.extra.items()},
        )

    def sha256(self) -> str:
        """Return a digest of all that a calibration depends on, not of file bytes.

        It covers ids, sizes, scores and the binarised column.
        """
        return rows_digest(self.score_digits, (self.offsets, self.primary, self.guardian, self.binary), self.id)

    def write(self, path: str | Path) -> None:
        """Write the log; the ending of the name says the format. Column names stay as they were read."""
        write_table(path, self._table())

    def to_arrow(self) -> Any:
        """Return the log as a `pyarrow.Table` that `from_frame` reads back to the bit; the schema keeps the identities.

        Without pyarrow, hand the log itself to a library that reads Arrow, such as `polars.DataFrame(log)`.
        """
        return arrow_table(self._table(narrow=True))

    def to_pandas(self) -> Any:
        """Return the log as a `pandas.DataFrame` that `from_frame` reads back to the bit; `attrs` keeps the identities."""
        return pandas_frame(self._table(narrow=True))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the log through the Arrow PyCapsule interface, without identities."""
        return arrow_stream(self._table(narrow=True), requested_schema)

    def _table(self, *, narrow: bool = False) -> TableColumns:
        """Return the columns as a table.

        Args:
            narrow: hand over single precision columns as such, so that their type alone tells.
        """
        if self.binary is not None:
            raise OutputError("a binarised log is not written; write the log itself and binarise it after reading")
        primary, guardian = self.columns
        numbers: list[Column] = [(primary, self.primary_as_recorded()), (guardian, self.guardian), *self.lists.items()]
        if narrow:
            numbers = [(name, _narrowed(values) if name in self.single else values) for name, values in numbers]
        texts: list[Column] = [] if self.actions is None else [("actions", self.actions)]
        named = {"id": self.id, "context": self.context, "label": self.label, "group": self.group}
        usage = self.primary_usage.columns(primary) | self.guardian_usage.columns(guardian)
        known = {name: values for name, values in named.items() if values is not None} | usage
        metadata = {} if self.identities is None else {"identities": dict(self.identities)}
        if self.single:
            metadata["score_digits"] = dict.fromkeys(sorted(self.single), 6)
        scalars = [*known.items(), *self.extra.items()]
        return TableColumns(scalars=scalars, lists=numbers + texts, offsets=self.offsets, metadata=metadata)

    def primary_as_recorded(self) -> Floats:
        """Return the Primary scores with NaN where it had no opinion."""
        return np.where(np.repeat(self.no_opinion, self.sizes), np.nan, self.primary)


class FrameColumns(TypedDict, total=False):
    """Which columns of a frame play which role; see `ScoreLog.from_frame`."""

    primary: ScoreColumns
    guardian: ScoreColumns | None
    outcomes: Sequence[str]


def as_score_log(data: object, **columns: Unpack[FrameColumns]) -> ScoreLog:
    """Return a score log as it is, or read one from a frame.

    Args:
        data: a score log, a pandas or polars frame, or any Arrow table.
        columns: `primary`, `guardian` and `outcomes`, as in `ScoreLog.from_frame`.
    """
    if not isinstance(data, ScoreLog):
        return ScoreLog.from_frame(data, **columns)
    if columns:
        raise OptionError(f"{', '.join(columns)}: columns are named for a frame only; a score log has its own")
    return data


def _score_log(checked: CheckedColumns) -> ScoreLog:
    """Return the log of checked columns: the only place that builds one."""
    return ScoreLog(
        primary=checked.primary,
        guardian=checked.guardian,
        offsets=checked.offsets,
        score_digits=checked.score_digits,
        no_opinion=checked.no_opinion,
        missing=checked.missing,
        single=checked.single,
        id=checked.id,
        label=checked.label,
        group=checked.group,
        context=checked.context,
        actions=checked.actions,
        lists=checked.lists,
        outcomes=checked.outcomes,
        primary_usage=checked.primary_usage,
        guardian_usage=checked.guardian_usage,
        extra=checked.extra,
        columns=checked.columns,
        identities=checked.identities,
        source=checked.source,
    )


def _entries(values: NDArray[Scalar] | None, index: Integers) -> NDArray[Scalar] | None:
    return None if values is None else values[index]


def _narrowed(values: Floats) -> NDArray[Any]:
    """Return values in single precision where that loses nothing."""
    single = values.astype(np.float32)
    return single if np.array_equal(single, values, equal_nan=True) else values
