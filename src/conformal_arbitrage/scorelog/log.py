"""ScoreLog: recorded scores of a Primary and a Guardian, one row per query: columns, router form, wide form, joins."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, Final, TypedDict, TypeGuard, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from conformal_arbitrage.core.exact import (
    LARGEST_SCORE,
    Bools,
    Floats,
    Integers,
    Scalar,
    digits_of,
    flat_positions,
    margins,
    n_rows,
    numbers_or_none,
    row_argmax,
    sorted_blocks,
)
from conformal_arbitrage.core.trials import LegCost
from conformal_arbitrage.errors import OptionError, OutputError, ScoreLogError
from conformal_arbitrage.scorelog.tables import (
    Column,
    ColumnReader,
    FrameTable,
    Strings,
    Table,
    TableColumns,
    TextBytes,
    arrow_stream,
    arrow_table,
    pandas_frame,
    refuse_absent_column,
    strings,
    write_table,
)
from conformal_arbitrage.types import Row

USAGE = ("cost", "input_tokens", "output_tokens")
LEVELS = {"very low": 0.1, "low": 0.3, "medium": 0.5, "moderate": 0.5, "high": 0.7, "very high": 0.9}
_PERCENTAGE = re.compile(r"[0-9]+(\.[0-9]*)?\s*%")
ROUTER_ACTIONS = ("guardian answer", "primary answer")
Lists = tuple[Floats, Integers]
"""Flat values, and the length of each row's list (-1 for null)."""
ScoreColumns = str | Sequence[str]
"""A model's scores: the name of one list column, or of one number column per action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Cost and tokens of one model's call about all actions, per row; None where the log does not say."""

    cost: Floats | None = None
    input_tokens: Floats | None = None
    output_tokens: Floats | None = None

    def columns(self, role: str) -> dict[str, Floats]:
        """Return the known columns under the names they have in a table."""
        named = {f"{role}_{name}": getattr(self, name) for name in USAGE}
        return {name: values for name, values in named.items() if values is not None}

    def select(self, rows: Integers) -> "Usage":
        """Return the usage of some rows."""
        return Usage(**{f.name: None if (v := getattr(self, f.name)) is None else v[rows] for f in fields(self)})


FROM_ARRAYS: Final = "arrays given to from_arrays"
FROM_ROUTER: Final = "arrays given to from_router"
"""The sources, in messages, of logs that were built in Python and given no other name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawColumns:
    """A score log before any rule was applied; `distinct` if it is known already that all ids are, and none is empty."""

    source: str
    columns: tuple[str, str]
    primary: Lists
    guardian: Lists
    single: frozenset[str] = frozenset()
    lists: Mapping[str, Lists] = field(default_factory=dict[str, Lists])
    outcomes: tuple[str, ...] = ()
    id: Strings | None = None
    distinct: bool = False
    label: Floats | None = None
    group: Strings | None = None
    context: Strings | None = None
    actions: tuple[Strings, Integers] | None = None
    primary_usage: Usage = Usage()
    guardian_usage: Usage = Usage()
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    identities: Mapping[str, Any] | None = None
    parents: tuple[str, ...] = ()
    floor: float | None = None
    first_row: int = 0


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
        parents: digests of the logs that its rows were taken from, as far as it says; see `lineage`.
        floor: the margin below which the Guardian was not asked, fixed before these rows were; None if it was always asked.
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
    parents: tuple[str, ...] = ()
    floor: float | None = None
    source: str = FROM_ARRAYS

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
        return check_columns(read_columns(table, primary, guardian, outcomes))

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
        floor: float | None = None,
        source: str = FROM_ARRAYS,
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
            floor: the margin below which the Guardian was not asked, fixed before these rows were looked at.
            source: where the scores came from, for messages.
        """
        p, p_sizes, single = flatten(primary, "primary", source)
        g, g_sizes = no_scores(len(p_sizes)) if guardian is None else flatten(guardian, "guardian", source)[:2]
        columns = RawColumns(
            source=source,
            columns=("primary", "guardian"),
            primary=(p, p_sizes),
            guardian=(g, g_sizes),
            single=frozenset(["primary"] if single else []),
            lists={name: flatten(values, name, source)[:2] for name, values in (outcomes or {}).items()},
            outcomes=tuple(outcomes or ()),
            id=None if id is None else strings(list(id)),
            label=None if label is None else _label_numbers(label, source),
            group=None if group is None else strings(list(group)),
            context=None if context is None else strings(list(context)),
            actions=None if actions is None else flatten_texts(actions),
            primary_usage=primary_usage or Usage(),
            guardian_usage=guardian_usage or Usage(),
            identities=identities,
            floor=floor,
        )
        return check_columns(columns)

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
        answer: Iterable[object] | None = None,
        primary_usage: Usage | None = None,
        guardian_usage: Usage | None = None,
        identities: Mapping[str, Any] | None = None,
        floor: float | None = None,
        source: str = FROM_ROUTER,
    ) -> "ScoreLog":
        """Build a log in router form: two answers and a confidence that the Primary's may stand alone.

        The actions are (guardian answer, primary answer), the Primary scores [0, s], the Guardian scores
        [1, 1 - regret] with regret = max(0, Guardian's grade - Primary's grade). The Primary's answer stands exactly
        when s > relaxation.

        Args:
            confidence: s >= 0 per row; NaN (none given) defers.
            primary_grade: grade of the Primary's answer, in [0, 1].
            guardian_grade: grade of the Guardian's; NaN in either grade is a missing Guardian score.
            answer: what the Primary answered, a feature of learned scores.
            id, group, context, primary_usage, guardian_usage, identities, floor, source: as in `from_arrays`.
        """
        s = grades(confidence, "confidence", high=LARGEST_SCORE, source=source)
        p = grades(primary_grade, "primary_grade", high=1, source=source)
        g = grades(guardian_grade, "guardian_grade", high=1, source=source)
        if not len(s) == len(p) == len(g):
            raise ScoreLogError(
                f"{source}: confidence and grades have {len(s)}, {len(p)} and {n_rows(len(g))}; give one of each per row"
            )
        regret = np.maximum(0.0, g - p)
        best = np.where(np.isnan(regret), np.nan, 1.0)
        log = cls.from_arrays(
            np.column_stack([np.zeros(len(s)), s]),
            np.column_stack([best, 1.0 - regret]),
            id=id,
            group=group,
            context=context,
            actions=[ROUTER_ACTIONS] * len(s),
            outcomes={"correct": np.column_stack([g, p])},
            primary_usage=primary_usage,
            guardian_usage=guardian_usage,
            identities=identities,
            floor=floor,
            source=source,
        )
        return log if answer is None else replace(log, extra={"answer": strings(list(answer))})

    @classmethod
    def read_router(
        cls, path: str | Path, *, confidence: str, primary_grade: str, guardian_grade: str, id: str = "id"
    ) -> "ScoreLog":
        """Read any table of router scores and grades as a log in router form; see `from_router`.

        Columns `group`, `context`, `answer`, `primary_cost` and `guardian_cost` are kept, too.

        Args:
            path: .parquet, .jsonl, .jsonl.gz or .csv.
            confidence: the column with the router's score; see `read_confidence` for what is converted.
            primary_grade: the column with the grade of the Primary's answer.
            guardian_grade: the column with the grade of the Guardian's answer.
            id: the column that names each row; the default may be absent.
        """
        with Table(path) as table:
            for name in (confidence, primary_grade, guardian_grade, *([] if id == "id" else [id])):
                refuse_absent_column(name, table.types, path, remedy="")
            graded = {
                name: grades(table.scalars(name, truths=True), name, high=1, source=table.source)
                for name in (primary_grade, guardian_grade)
            }
            named = {"id": id, "group": "group", "context": "context", "answer": "answer"}
            texts = {key: table.texts(name).tolist() for key, name in named.items() if name in table.types}
            return cls.from_router(
                confidence=read_confidence(table, confidence)[0],
                primary_grade=graded[primary_grade],
                guardian_grade=graded[guardian_grade],
                primary_usage=_read_cost(table, "primary"),
                guardian_usage=_read_cost(table, "guardian"),
                source=str(path),
                **texts,
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        fewest, most = int(self.sizes.min()), int(self.sizes.max())
        parts = [
            n_rows(f"{len(self):,}"),
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
    def below_floor(self) -> Bools:
        """Rows whose margin lies below the floor, whether or not the Guardian was asked about them."""
        below = np.zeros(len(self), dtype=np.bool_)
        if self.floor is not None:
            for block, gap, _ in sorted_blocks(self):
                below[block.rows] = margins(gap) < self.floor
        return below

    def above_floor(self) -> "ScoreLog":
        """Return the log as a calibration counts it: below the floor no action leads, so that every relaxation defers.

        Such rows count and lose nothing. What the Guardian said about one that it was asked about is not looked at: the
        rule is a function of the margin alone.
        """
        below = self.below_floor
        flat = np.repeat(below, self.sizes)
        known = self.guardian[~flat & ~np.isnan(self.guardian)]
        return replace(
            self,
            primary=np.where(flat, 0.0, self.primary),
            guardian=np.where(flat, known.max() if known.size else 1.0, self.guardian),
            missing=self.missing & ~below,
            lists={name: np.where(flat, 0.0, values) for name, values in self.lists.items()},
            binary=None if self.binary is None else np.where(flat, 0.0, self.binary),
        )

    @property
    def has_ids(self) -> bool:
        """Whether rows have ids."""
        return self.id is not None

    @property
    def is_router(self) -> bool:
        """Whether every row has the router form: two actions, Primary [0, s], Guardian [1, ...]."""
        if len(self.primary) != 2 * len(self) or not (self.sizes == 2).all():
            return False
        first = self.guardian[::2]
        return bool((self.primary[::2] == 0).all() and (self.primary >= 0).all() and (first[~self.missing] == 1).all())

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
            offsets=np.concatenate([[0], np.cumsum(self.sizes[index])]),
            **_present(self, _PER_ROW, lambda values: values[index]),
            **_present(self, _PER_ACTION, lambda values: values[flat]),
            lists={name: values[flat] for name, values in self.lists.items()},
            extra={name: values[index] for name, values in self.extra.items()},
            primary_usage=self.primary_usage.select(index),
            guardian_usage=self.guardian_usage.select(index),
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

        It covers ids, sizes, scores and the binarised column of every row, and not their order: whoever computes it, in
        memory, in parts or on other machines, has the same one.
        """
        arrays = (self.primary, self.guardian, self.binary)
        return log_digest(len(self), sum_of_hashes(self.score_digits, self.offsets, arrays, self.id))

    def lineage(self) -> tuple[str, ...]:
        """Return the digests of the logs that this one was taken from, and its own at last, binarised or not."""
        return (*self.origins(), replace(self, binary=None).sha256())

    def origins(self) -> tuple[str, ...]:
        """Return the digests of the logs that this one was taken from, and those of each model's scores.

        Logs of other pairs, or of another confidence in the same answers, share one of the latter. Rows without ids may
        have the same scores by chance.
        """
        if self.id is None:
            return self.parents
        ids = TextBytes.of(self.id)
        sums = [
            sum_of_hashes(self.score_digits, self.offsets, [column], ids) for column in (self.primary, self.guardian)
        ]
        return (*self.parents, *(log_digest(len(self), total) for total in sums))

    def taken_from(self, *lineage: str) -> "ScoreLog":
        """Return the log as one whose rows were taken from a log of this lineage; a file of it says so."""
        return replace(self, parents=tuple(sorted(lineage)))

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
        if self.floor is not None:
            metadata["floor"] = {primary: self.floor}
        if self.parents:
            metadata["parents"] = dict.fromkeys(self.parents, 1)
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
        columns: `primary`, `guardian` and `outcomes`, as in `ScoreLog.from_frame`.
    """
    if not isinstance(data, ScoreLog):
        return ScoreLog.from_frame(data, **columns)
    if columns:
        raise OptionError(f"{', '.join(columns)}: columns are named for a frame only; a score log has its own")
    return data


def join_logs(logs: Sequence[ScoreLog], source: str) -> ScoreLog:
    """Return one log with the rows of several, which must have the same columns.

    Args:
        logs: the logs, in order; ids are not compared across them.
    """
    sizes = np.concatenate([log.sizes for log in logs])
    return replace(
        logs[0],
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        **{name: _joined([getattr(log, name) for log in logs]) for name in (*_PER_ROW, *_PER_ACTION)},
        lists=_joined_by_name([log.lists for log in logs], source),
        primary_usage=_joined_usage([log.primary_usage for log in logs]),
        guardian_usage=_joined_usage([log.guardian_usage for log in logs]),
        extra=_joined_by_name([log.extra for log in logs], source),
        source=source,
    )


def _joined(columns: Sequence[NDArray[Scalar] | None]) -> NDArray[Scalar] | None:
    present = [values for values in columns if values is not None]
    return np.concatenate(present) if present else None


def _joined_usage(usages: Sequence[Usage]) -> Usage:
    return Usage(**{f.name: _joined([getattr(usage, f.name) for usage in usages]) for f in fields(Usage)})


def _joined_by_name(columns: Sequence[Mapping[str, NDArray[Any]]], source: str) -> dict[str, NDArray[Any]]:
    names = set(columns[0])
    for others in columns:
        if set(others) != names:
            name = sorted(names ^ set(others))[0]
            raise ScoreLogError(
                f"{source}: column '{name}' is a list of numbers per action in some rows only; make it one everywhere, or "
                "leave it out"
            )
    return {name: np.concatenate([others[name] for others in columns]) for name in columns[0]}


_PER_ROW = ("no_opinion", "missing", "id", "label", "group", "context")
_PER_ACTION = ("primary", "guardian", "actions", "binary")
"""The fields of a log that are arrays, or None where it does not have them."""


def _present(log: ScoreLog, names: Iterable[str], work: Callable[[NDArray[Any]], object]) -> dict[str, Any]:
    """Return what a function makes of fields; None for those that the log does not have."""
    return {name: None if (values := getattr(log, name)) is None else work(values) for name in names}


def _narrowed(values: Floats) -> NDArray[Any]:
    """Return values in single precision where that loses nothing."""
    single = values.astype(np.float32)
    return single if np.array_equal(single, values, equal_nan=True) else values


# --- Columns of a table, by their roles ---


def read_columns(
    table: ColumnReader, primary: ScoreColumns, guardian: ScoreColumns | None, outcomes: Sequence[str]
) -> RawColumns:
    """Return all columns of a table by their roles; without a Guardian its scores are missing throughout."""
    p_names, g_names = _names(primary), [] if guardian is None else _names(guardian)
    _require(table, (*p_names, *g_names, *outcomes))
    roles = _role_name(table, primary, "primary"), _role_name(table, guardian, "guardian")
    p, p_single = _read_scores(table, primary)
    g, g_single = (no_scores(table.rows), False) if guardian is None else _read_scores(table, guardian)
    named = dict.fromkeys(("correct", *outcomes)) if "correct" in table.types else dict.fromkeys(outcomes)
    lists = {name: table.numbers(name) for name in named}
    has = {name for name in ("id", "label", "group", "context", "actions") if name in table.types}
    used = {*p_names, *g_names, *roles, *lists, *has, *(f"{role}_{name}" for role in roles for name in USAGE)}
    ids, distinct = table.ids("id") if "id" in has else (None, False)
    kept_lists, extra = table.others([name for name in table.types if name not in used], p[1])
    wide_single = {role for role, single in zip(roles, (p_single, g_single), strict=True) if single}
    return RawColumns(
        source=table.source,
        columns=roles,
        primary=p,
        guardian=g,
        single=table.single | _noted_single(table) | wide_single,
        lists=lists | kept_lists,
        outcomes=tuple(named),
        id=ids,
        distinct=distinct,
        label=table.scalars("label") if "label" in has else None,
        group=table.texts("group") if "group" in has else None,
        context=table.texts("context") if "context" in has else None,
        actions=table.text_lists("actions") if "actions" in has else wide_actions(table, primary, guardian),
        primary_usage=_read_usage(table, roles[0]),
        guardian_usage=_read_usage(table, roles[1]),
        extra=extra,
        identities=_noted(table, "identities"),
        parents=tuple(_noted(table, "parents") or ()),
        floor=(_noted(table, "floor") or {}).get(roles[0]),
        first_row=table.first_row,
    )


def _names(columns: ScoreColumns) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns)


def _require(table: ColumnReader, names: Iterable[str]) -> None:
    remedy = "; name the columns with primary=, guardian=, outcomes= (--primary-column, --guardian-column, --outcome)"
    if any(column.endswith("_confidence") for column in table.types):
        remedy += "; if this is the log of a cascade, read it with calibrate --path, evaluate --path"
    for name in names:
        refuse_absent_column(name, table.types, table.source, remedy=remedy)


def _role_name(table: ColumnReader, columns: ScoreColumns | None, role: str) -> str:
    """Return the name under which a model's scores stand; those of wide columns stand under their role."""
    if isinstance(columns, str):
        return columns
    if columns is not None and role in table.types:
        raise ScoreLogError(
            f"{table.source}: column '{role}' stands in the way of the wide columns, which take that name; rename it"
        )
    return role


def _read_scores(table: ColumnReader, columns: ScoreColumns) -> tuple[Lists, bool]:
    """Return a model's scores, and whether they stood in wide columns of single precision."""
    return (table.numbers(columns), False) if isinstance(columns, str) else wide_scores(table, columns)


def _noted(table: ColumnReader, name: str) -> Mapping[str, Any] | None:
    """Return an entry of the table's metadata; each has one value per column."""
    entry: object = table.metadata.get(name)
    if entry is None or _is_object(entry):
        return entry
    raise ScoreLogError(f"{table.source}: '{name}' in its metadata is not a JSON object; write the log again")


def _is_object(entry: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(entry, dict)


def _noted_single(table: ColumnReader) -> frozenset[str]:
    digits = _noted(table, "score_digits") or {}
    for name, value in digits.items():
        if value not in (6, 12):
            raise ScoreLogError(
                f"{table.source}: 'score_digits' of '{name}' is {value!r} in its metadata; it must be 6 or 12"
            )
    return frozenset(name for name, value in digits.items() if value == 6)


def _read_usage(table: ColumnReader, role: str) -> Usage:
    names = {name: f"{role}_{name}" for name in USAGE}
    return Usage(**{name: table.scalars(column) for name, column in names.items() if column in table.types})


def wide_scores(table: ColumnReader, columns: Sequence[str]) -> tuple[tuple[Floats, Integers], bool]:
    """Return the cells as flat values and row lengths, and whether all of them are single precision."""
    if not columns:
        raise ScoreLogError(f"{table.source}: no wide column is named; name one per action")
    cells = np.column_stack([table.scalars(name) for name in columns])
    sizes = np.full(table.rows, len(columns), dtype=np.int64)
    return (cells.reshape(-1), sizes), all(table.types[name] == "FLOAT" for name in columns)


def wide_actions(
    table: ColumnReader, primary: ScoreColumns, guardian: ScoreColumns | None
) -> tuple[Strings, Integers] | None:
    """Return the names of the actions that wide columns imply: what follows each model's common prefix.

    None if both models have list columns, or if the names after the prefixes differ: actions are then known by their
    position only.
    """
    menus = [_menu(columns) for columns in (primary, guardian) if columns is not None and not isinstance(columns, str)]
    if not menus:
        return None
    menu = menus[0]
    if sorted(menu) == sorted(menus[-1]) and menu != menus[-1]:
        raise ScoreLogError(
            f"{table.source}: the wide columns name the same actions in different orders ({', '.join(menu)} and "
            f"{', '.join(menus[-1])}); name both models' columns in one order"
        )
    if menu != menus[-1] or not all(menu):
        return None
    return strings(menu * table.rows), np.full(table.rows, len(menu), dtype=np.int64)


def _menu(columns: Sequence[str]) -> list[str]:
    """Names without their common prefix, which ends at a separator if it has one, and never within a number."""
    shared = "".join(letters[0] for letters in takewhile(lambda some: len(set(some)) == 1, zip(*columns, strict=False)))
    separated = re.match(r".*[^0-9A-Za-z]", shared, flags=re.DOTALL)
    prefix = separated.group() if separated else shared.rstrip("0123456789")
    return [name.removeprefix(prefix) for name in columns]


# --- Arrays and lists as flat columns ---


def no_scores(n: int) -> Lists:
    """Return the scores of a model that scored none of n rows."""
    return np.zeros(0), np.full(n, -1, dtype=np.int64)


def flatten(rows: ArrayLike | Sequence[Any], name: str, source: str) -> tuple[Floats, Integers, bool]:
    """Return a 2-D array or a sequence of rows as flat values, lengths (-1 for None), and whether it is single precision."""
    if _is_array(rows):
        rows = np.ma.filled(rows, np.nan)
        if rows.ndim == 2 and rows.dtype.kind in "iuf":
            sizes = np.full(rows.shape[0], rows.shape[1], dtype=np.int64)
            return (
                np.asarray(np.ascontiguousarray(rows).reshape(-1), dtype=np.float64),
                sizes,
                digits_of(rows.dtype) == 6,
            )
    if not _is_rows(rows):
        problem = f"must be a 2-D array or a list of lists of numbers; got {rows!r:.80}"
        raise ScoreLogError(f"{source}: column '{name}' {problem}")
    listed = [None if row is None else _numbers(row, name, i, source) for i, row in enumerate(rows)]
    sizes = np.array([-1 if row is None else len(row) for row in listed], dtype=np.int64)
    present = [row for row in listed if row is not None]
    values = np.concatenate(present) if present else np.zeros(0)
    return np.asarray(values, dtype=np.float64), sizes, digits_of(values.dtype) == 6


def _is_array(rows: object) -> TypeGuard[NDArray[Any]]:
    return isinstance(rows, np.ndarray)


def _is_rows(rows: object) -> TypeGuard[Sequence[object]]:
    return isinstance(rows, np.ndarray | Sequence) and not isinstance(rows, str)


def _numbers(row: object, name: str, index: int, source: str) -> NDArray[Any]:
    """Return one row's numbers, None as NaN; refuse anything else."""
    values = numbers_or_none(row)
    if values is None or values.ndim != 1:
        raise ScoreLogError(
            f"{source}: row {index + 1}, column '{name}': {row!r:.80} is not a list of numbers; correct that row"
        )
    return values


def _label_numbers(label: ArrayLike, source: str) -> Floats:
    numbers = numbers_or_none(label)
    if numbers is None or numbers.ndim != 1:
        problem = f"must hold the index of each row's right action; got {label!r:.80}"
        raise ScoreLogError(f"{source}: column 'label' {problem}")
    return numbers.astype(np.float64)


def flatten_texts(rows: Sequence[Sequence[str]]) -> tuple[Strings, Integers]:
    """Return lists of texts as flat texts and lengths."""
    return strings(list(chain.from_iterable(rows))), np.array([len(row) for row in rows], dtype=np.int64)


def grades(values: ArrayLike, name: str, *, high: float, source: str) -> Floats:
    """Return a column of numbers from 0 to `high`; NaN or None is allowed and means that there is none."""
    raw = np.asarray(values)
    column = raw if raw.dtype.kind == "b" else numbers_or_none(values)
    if column is None or column.ndim != 1:
        raise ScoreLogError(f"{source}: column '{name}' must be a flat list of numbers; got {values!r:.80}")
    column = column.astype(np.float64)
    _refuse_beyond(column, name, high, source)
    return column


def _refuse_beyond(column: Floats, name: str, high: float, source: str) -> None:
    bad = (column < 0) | (column > high)
    if bad.any():
        row = int(bad.argmax())
        top = "0 or more and finite" if high > 1 else "in [0, 1]"
        problem = f"{column[row]:g} must be {top}; rescale the column"
        raise ScoreLogError(f"{source}: row {row + 1}, column '{name}': {problem}")


def _read_cost(table: Table, role: str) -> Usage:
    name = f"{role}_cost"
    return Usage(cost=table.scalars(name) if name in table.types else None)


def read_confidence(table: ColumnReader, name: str) -> tuple[Floats, str | None]:
    """Read a column of confidences, and say what it held if numbers of 0 or more had to be made of it.

    Percentages ("87 %") become shares, words ("high") a number that only their order matters of, and a column without a
    positive number is taken for log-probabilities.
    """
    if table.types[name] == "VARCHAR":
        texts = [text.strip().lower() for text in table.texts(name).tolist()]
        given = {text for text in texts if text}
        if given and given <= LEVELS.keys():
            return np.array([LEVELS.get(text, np.nan) for text in texts]), "words"
        if given and all(_PERCENTAGE.fullmatch(text) for text in given):
            # 87.3e-2 is the number that 87.3 % says; 87.3 / 100 may be its neighbour
            return np.array([float(f"{text[:-1].strip()}e-2") if text else np.nan for text in texts]), "percentages"
    values = table.scalars(name, truths=True)
    if (values < 0).any() and not (values > 0).any():
        return np.exp(values), "log-probabilities"
    _refuse_beyond(values, name, LARGEST_SCORE, table.source)
    return values, None


# --- The rules of the format ---


def check_columns(raw: RawColumns) -> ScoreLog:
    """Apply every rule of the format, and return the log.

    Raises:
        ScoreLogError: a rule is broken; the message names source, row, column and remedy.
    """
    sizes = _common_sizes(raw)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    primary, no_opinion = _scores(raw, raw.columns[0], raw.primary, sizes, offsets, blank=0.0)
    guardian, missing = _scores(raw, raw.columns[1], raw.guardian, sizes, offsets, blank=np.nan)
    _check_lengths(raw, len(sizes))
    return ScoreLog(
        primary=primary,
        guardian=guardian,
        offsets=offsets,
        score_digits=6 if raw.columns[0] in raw.single else 12,
        single=raw.single,
        no_opinion=no_opinion,
        missing=missing,
        id=_unique(raw),
        label=_label(raw, sizes),
        group=raw.group,
        context=raw.context,
        actions=_actions(raw, sizes),
        lists={name: _outcome(raw, name, v, sizes, offsets) for name, v in raw.lists.items()},
        outcomes=raw.outcomes,
        primary_usage=_usage(raw, raw.primary_usage, raw.columns[0]),
        guardian_usage=_usage(raw, raw.guardian_usage, raw.columns[1]),
        extra=raw.extra,
        columns=raw.columns,
        identities=raw.identities,
        parents=raw.parents,
        floor=None if raw.floor is None else check_floor(raw.floor, raw.source),
        source=raw.source,
    )


def check_floor(floor: object, source: str) -> float:
    """Return a floor as a number; refuse one that is not above 0 and finite."""
    if not isinstance(floor, int | float) or not 0 < floor < np.inf:
        raise OptionError(f"{source}: a floor is a margin above 0; got {floor!r}, leave it out to ask about every row")
    return float(floor)


def _fault(raw: RawColumns, row: int, column: str, problem: str) -> ScoreLogError:
    return ScoreLogError(f"{raw.source}: row {raw.first_row + row + 1}, column '{column}': {problem}")


def _common_sizes(raw: RawColumns) -> Integers:
    """Return the number of actions of each row; a null list has the length of the other model's."""
    (_, p), (_, g) = raw.primary, raw.guardian
    if len(p) != len(g):
        raise ScoreLogError(
            f"{raw.source}: {n_rows(len(p))} of Primary scores, {len(g)} of Guardian; give both for each row"
        )
    if len(p) == 0:
        raise ScoreLogError(f"{raw.source}: the log has no rows; give it at least one")
    if p.min() > 0 and np.array_equal(p, g):
        return p
    for sizes, name in ((p, raw.columns[0]), (g, raw.columns[1])):
        if (sizes == 0).any():
            raise _fault(raw, int((sizes == 0).argmax()), name, "an empty list; a query needs at least one action")
    both_null = (p < 0) & (g < 0)
    if both_null.any():
        row = int(both_null.argmax())
        raise _fault(raw, row, raw.columns[0], "neither model has scores; fix the cause and score the row again")
    differ = (p >= 0) & (g >= 0) & (p != g)
    if differ.any():
        row = int(differ.argmax())
        raise _fault(raw, row, raw.columns[1], f"{g[row]} scores for {p[row]} actions; give one per action")
    return np.maximum(p, g)


def _with_nulls(lists: Lists, sizes: Integers, offsets: Integers) -> Floats:
    """Return flat values with NaN for null lists."""
    values, lengths = lists
    if (lengths >= 0).all():
        return values
    full = np.full(offsets[-1], np.nan)
    there = lengths >= 0
    full[flat_positions(offsets[:-1][there], sizes[there])] = values
    return full


def _finite(raw: RawColumns, name: str, values: Floats, offsets: Integers) -> Floats:
    """Refuse infinities; NaN may stay."""
    limit = LARGEST_SCORE
    if values.size and (np.fmax.reduce(values) > limit or np.fmin.reduce(values) < -limit):
        where = int((np.abs(values) > limit).argmax())
        row = int(np.searchsorted(offsets, where, side="right")) - 1
        raise _fault(raw, row, name, f"{values[where]:g} is infinite or beyond {limit:g}; correct or remove the score")
    return values


def _scores(
    raw: RawColumns, name: str, lists: Lists, sizes: Integers, offsets: Integers, blank: float
) -> tuple[Floats, Bools]:
    """Return a model's scores, with each row that has a NaN blanked throughout, and these rows."""
    values = _finite(raw, name, _with_nulls(lists, sizes, offsets), offsets)
    if not np.isnan(values.max()):
        return values, np.zeros(len(sizes), dtype=np.bool_)
    unknown = np.isnan(values)
    silent = np.logical_or.reduceat(unknown, offsets[:-1])
    return np.where(np.repeat(silent, sizes), blank, values), silent


def _aligned(raw: RawColumns, name: str, lists: tuple[NDArray[Any], Integers], sizes: Integers) -> NDArray[Any]:
    values, lengths = lists
    if len(lengths) != len(sizes):
        raise ScoreLogError(
            f"{raw.source}: column '{name}' has {n_rows(len(lengths))}, the scores {len(sizes)}; give one per row"
        )
    wrong = (lengths >= 0) & (lengths != sizes)
    if wrong.any():
        row = int(wrong.argmax())
        raise _fault(raw, row, name, f"{lengths[row]} entries for {sizes[row]} actions; give one per action")
    return values


def _outcome(raw: RawColumns, name: str, lists: Lists, sizes: Integers, offsets: Integers) -> Floats:
    """Return numbers per action; a null list is unknown throughout."""
    _aligned(raw, name, lists, sizes)
    return _finite(raw, name, _with_nulls(lists, sizes, offsets), offsets)


def _actions(raw: RawColumns, sizes: Integers) -> Strings | None:
    if raw.actions is None:
        return None
    null = raw.actions[1] < 0
    if null.any():
        raise _fault(raw, int(null.argmax()), "actions", "no list; give one text per action, or leave the column out")
    return _aligned(raw, "actions", raw.actions, sizes)


def _check_lengths(raw: RawColumns, n: int) -> None:
    named = {"id": raw.id, "label": raw.label, "group": raw.group, "context": raw.context}
    for name, values in named.items():
        if values is not None and len(values) != n:
            raise ScoreLogError(
                f"{raw.source}: column '{name}' has {n_rows(len(values))}, the scores {n}; give one per row"
            )


def _unique(raw: RawColumns) -> Strings | None:
    if raw.id is None or raw.distinct:
        return raw.id
    ids: list[str] = raw.id.tolist()
    names = set(ids)
    if len(names) == len(ids) and "" not in names:
        return raw.id
    seen: dict[str, int] = {}
    for row, name in enumerate(ids):
        if name == "":
            raise _fault(raw, row, "id", "the id is empty; give every row one")
        first = seen.setdefault(name, row)
        if first != row:
            raise _fault(raw, row, "id", f"{name!r} is also the id of row {raw.first_row + first + 1}; make ids unique")
    raise AssertionError


def _label(raw: RawColumns, sizes: Integers) -> Integers | None:
    if raw.label is None:
        return None
    bad = ~((raw.label >= 0) & (raw.label < sizes) & (raw.label == np.floor(raw.label)))
    if bad.any():
        row = int(bad.argmax())
        problem = f"{raw.label[row]:g} is not the index of one of {sizes[row]} actions, counted from 0"
        raise _fault(raw, row, "label", f"{problem}; correct the row or leave the column out")
    return raw.label.astype(np.int64)


def _usage(raw: RawColumns, usage: Usage, role: str) -> Usage:
    return Usage(**{name: _usage_column(raw, getattr(usage, name), f"{role}_{name}") for name in USAGE})


def _usage_column(raw: RawColumns, column: Floats | None, name: str) -> Floats | None:
    if column is None:
        return None
    values = np.asarray(column, dtype=np.float64)
    if len(values) != len(raw.primary[1]):
        counts = f"{n_rows(len(values))}, the scores {len(raw.primary[1])}"
        raise OptionError(f"{raw.source}: {name} has {counts}; give one per row")
    bad = (values < 0) | np.isinf(values)  # NaN: unknown, as that of a call that timed out
    if bad.any():
        row = int(bad.argmax())
        problem = f"{values[row]:g} must be a number, 0 or more; fill it in, or leave the column out"
        raise _fault(raw, row, name, problem)
    return values


# --- Digests ---

# --- Hashes of rows, many at a time ---


Words = NDArray[np.uint64]
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def row_hashes(digits: int, offsets: Integers, arrays: Iterable[NDArray[Any]], ids: TextBytes | None) -> Words:
    """Return the hash of each row."""
    sizes = np.diff(offsets)
    places = _places(offsets)
    rows = ((digits << 32) + sizes).astype(np.uint64) * _ODD
    for number, values in enumerate(arrays):
        bits = (values + 0.0).view(np.uint64)  # -0.0 becomes 0.0
        rows += _sums(mixed(bits + (places + np.uint64(number << 32)) * _ODD), offsets)
    if ids is not None:
        rows += mixed(_text_hashes(ids))
    return mixed(rows)


def cell_hashes(cells: Floats | TextBytes) -> Words:
    """Return the hash of each cell of a column, numbers or texts."""
    hashes = np.empty(len(cells), np.uint64)
    for start in range(0, len(cells), AT_ONCE):
        block = slice(start, min(start + AT_ONCE, len(cells)))
        some = cells[block]
        hashes[block] = mixed(_text_hashes(some) if isinstance(some, TextBytes) else (some + 0.0).view(np.uint64))
    return hashes


def _text_hashes(texts: TextBytes) -> Words:
    """Return a number for each text, whatever the texts beside it: of its words, or else of its bytes."""
    words = texts.words()
    if words is not None:
        return _word_sums(words)
    hashes, usual = _byte_sums(texts), texts.has_words()
    words = texts.some(usual).words() if usual.any() else None
    if words is not None:
        hashes[usual] = _word_sums(words)
    return hashes


def _word_sums(words: Words) -> Words:
    """Return a weighted sum over the words of each text; zeros at its end do not matter."""
    weights = mixed(np.arange(1, words.shape[1] + 1, dtype=np.uint64) * _ODD) | np.uint64(1)
    sums = np.zeros(len(words), np.uint64)
    for weight, column in zip(weights, words.T, strict=True):
        sums += (column ^ (column >> np.uint64(32))) * weight  # a product carries no high bits down
    return sums


def _byte_sums(texts: TextBytes) -> Words:
    """Return a weighted sum over the bytes of each text."""
    bounds = texts.bounds - texts.bounds[0]
    places = _places(bounds)
    weights = mixed(np.arange(1, int(places.max(initial=0)) + 2, dtype=np.uint64) * _ODD)
    data = texts.data[texts.bounds[0] : texts.bounds[-1]]
    return _sums((data + np.uint64(1)) * weights[places.astype(np.int64)], bounds)


def _places(bounds: Integers) -> Words:
    """Return the place of each entry in its row."""
    return (np.arange(int(bounds[-1])) - np.repeat(bounds[:-1], np.diff(bounds))).astype(np.uint64)


def _sums(words: Words, bounds: Integers) -> Words:
    """Return the sum of each row's words; rows may be empty."""
    if len(words) == len(bounds) - 1 and (bounds[1:] > bounds[:-1]).all():
        return words
    total = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(words, out=total[1:])
    return total[bounds[1:]] - total[bounds[:-1]]


def mixed(words: Words) -> Words:
    """Mix the bits of each word, in place, so that each of them matters to all."""
    for bits, factor in _STEPS:
        words ^= words >> np.uint64(bits)
        words *= np.uint64(factor)
    return words


# --- Digests of what a calibration depends on ---


AT_ONCE: Final = 1 << 16
"""The checksum of so many actions is made at once."""
_ROWS_AT_ONCE: Final = 1 << 13


def sum_of_hashes(
    digits: int, offsets: Integers, arrays: Sequence[NDArray[Any] | None], ids: Strings | TextBytes | None
) -> int:
    """Return the sum of the hashes of some rows, modulo 2^64."""
    starts = range(0, len(offsets) - 1, _ROWS_AT_ONCE)
    return sum(_hash_sum(digits, offsets, arrays, ids, start) for start in starts) % (1 << 64)


def _hash_sum(
    digits: int, offsets: Integers, arrays: Sequence[NDArray[Any] | None], ids: Strings | TextBytes | None, start: int
) -> int:
    """Return the sum over some rows, few enough for the processor's cache."""
    bounds = offsets[start : start + _ROWS_AT_ONCE + 1]
    flat = slice(int(bounds[0]), int(bounds[-1]))
    numbers = [values[flat] for values in arrays if values is not None]
    texts = None if ids is None else ids[start : start + _ROWS_AT_ONCE]
    packed = texts if texts is None or isinstance(texts, TextBytes) else TextBytes.of(texts)
    return int(row_hashes(digits, bounds - bounds[0], numbers, packed).sum())


def checksum(arrays: Sequence[NDArray[Any]]) -> int:
    """Return a sum over all actions, modulo 2^64, that depends on every bit of their numbers, but not on their order."""
    starts = range(0, len(arrays[0]), AT_ONCE)
    return sum(_sum_of_bits([values[start : start + AT_ONCE] for values in arrays]) for start in starts) % (1 << 64)


def _sum_of_bits(arrays: Sequence[NDArray[Any]]) -> int:
    """Return the sum over some actions, few enough for the processor's cache."""
    total = np.zeros(len(arrays[0]), np.int64)
    for values in arrays:
        bits = (values + 0.0).view(np.int64)
        total *= bits | 1
        total += bits
    return int(total.sum())


def log_digest(rows: int, total: int) -> str:
    """Return the digest of a log, given the number of its rows and the sum of their hashes."""
    return hashlib.sha256(f"{rows};{total % (1 << 64):x}".encode()).hexdigest()


# --- What asking the models costs ---

TokenPrice = tuple[float, float]
"""Dollars per million input tokens and per million output tokens."""


class CostKeywords(TypedDict, total=False):
    """The fields of `CostOptions` as single keywords; None counts as not given."""

    primary_cost: float | None
    guardian_cost: float | None
    primary_price: TokenPrice | None
    guardian_price: TokenPrice | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """What each model costs; a model without a cost or price takes the log's cost column, if it has one.

    Attributes:
        primary_cost: dollars per query of the Primary.
        guardian_cost: dollars per query of the Guardian.
        primary_price: dollars per million input and output tokens of the Primary, for recorded token counts.
        guardian_price: the same for the Guardian.
    """

    primary_cost: float | None = None
    guardian_cost: float | None = None
    primary_price: TokenPrice | None = None
    guardian_price: TokenPrice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Dollars per row: of the Primary, and of the Guardian by the number of actions it is shown."""

    primary: Floats
    guardian: LegCost

    @property
    def per_1000(self) -> dict[str, float]:
        """Dollars per 1000 queries of each model alone."""
        return {"primary": 1000 * float(self.primary.mean()), "guardian": 1000 * float(self.guardian.full().mean())}


def costs_of(log: ScoreLog, options: CostOptions | None = None) -> Costs | None:
    """Return the costs of a log's queries, or None unless they are known for both models.

    Args:
        options: constants or token prices; without them the log's cost columns are used.
    """
    prices = options or CostOptions()
    primary = _leg(log, log.primary_usage, log.columns[0], prices.primary_cost, prices.primary_price)
    guardian = _leg(log, log.guardian_usage, log.columns[1], prices.guardian_cost, prices.guardian_price)
    if primary is None or guardian is None:
        if prices != CostOptions():
            raise OptionError("the cost of one model is missing; give both, by constant, price or column")
        return None
    return Costs(primary=primary.full(), guardian=guardian)


def _leg(log: ScoreLog, usage: Usage, name: str, cost: float | None, price: TokenPrice | None) -> LegCost | None:
    if cost is not None and price is not None:
        raise OptionError(f"{name}: give a cost or a price per token, not both")
    if cost is not None:
        return LegCost(base=np.full(len(log), _dollars(cost, name)))
    if price is None:
        known = usage.cost is not None and not np.isnan(usage.cost).any()  # one unknown cost makes the mean unknown
        return LegCost(base=usage.cost) if known and usage.cost is not None else None
    if usage.input_tokens is None or usage.output_tokens is None:
        raise OptionError(f"{log.source}: a price needs the columns {name}_input_tokens and {name}_output_tokens")
    unknown = int(np.isnan(usage.input_tokens + usage.output_tokens).sum())
    if unknown:
        raise OptionError(
            f"{log.source}: {n_rows(unknown, 'lacks', 'lack')} the token counts of {name}; give a cost instead"
        )
    per_input, per_output = (_dollars(value, name) / 1e6 for value in price)
    tokens = usage.input_tokens.astype(np.int64)
    return LegCost(base=per_output * usage.output_tokens, rate=per_input, tokens=tokens)


def _dollars(value: float, name: str) -> float:
    if not 0 <= value < float("inf"):
        raise OptionError(f"{name}: a cost must be 0 or more; got {value!r}")
    return value
