"""ScoreLog: recorded scores of a Primary and a Guardian, one row per query.

Inside there are flat arrays with offsets, so ten million rows fit in memory. Whatever breaks a rule of the format is
refused with the file, the row, the column and what to do.

Knows nothing of budgets, thresholds or live models.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from conformal_arbitrage.core.gaps import LARGEST_SCORE, Bools, Floats, Integers, numbers_or_none
from conformal_arbitrage.core.rows import flat_positions, row_argmax
from conformal_arbitrage.errors import OptionError, OutputError, ScoreLogError
from conformal_arbitrage.scorelog.columns import (
    USAGE,
    RawColumns,
    Usage,
    checked,
    flatten,
    flatten_texts,
    grades,
    no_scores,
    read_columns,
)
from conformal_arbitrage.scorelog.files import Column, Strings, Table, strings, write_table
from conformal_arbitrage.types import Row

ROUTER_ACTIONS = ("guardian answer", "primary answer")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreLog:
    """Scores of both models for every action of every query.

    Build one with `read`, `from_arrays` or `from_router`. Actions of row i are at offsets[i] to offsets[i+1] of the
    flat arrays (`primary`, `guardian`, `actions` and those in `lists`).

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
        identities: who made the scores, by column; None if the log does not say.
        source: the file's name, for messages.
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
        primary: str = "primary",
        guardian: str | None = "guardian",
        outcomes: Sequence[str] = (),
    ) -> "ScoreLog":
        """Read a score log from .parquet, .jsonl, .jsonl.gz or .csv.

        Args:
            path: the file.
            primary: the column that plays the Primary; its token and cost columns follow its name.
            guardian: the column that plays the Guardian; None if it was not asked, as for a rule that is only applied.
            outcomes: list columns to report besides `correct`.
        """
        with Table(path) as table:
            return cls(**checked(read_columns(table, primary, guardian, outcomes)))

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
            guardian: scores of the same shape; a missing answer is None or NaN, and None for all if it was not asked.
            id: unique names of the rows.
            label: index of each row's right action.
            group: subject, tenant, language.
            context: the query's text.
            actions: the actions' texts.
            outcomes: further numbers per action, each an outcome by its name.
            primary_usage: cost or tokens of asking the Primary, per row.
            guardian_usage: cost or tokens of asking the Guardian, per row.
            identities: who made the scores, by role.
        """
        p, p_sizes, single = flatten(primary, "primary")
        g, g_sizes = no_scores(len(p_sizes)) if guardian is None else flatten(guardian, "guardian")[:2]
        raw = RawColumns(
            source="arrays",
            columns=("primary", "guardian"),
            primary=(p, p_sizes),
            guardian=(g, g_sizes),
            single=frozenset(["primary"] if single else []),
            lists={name: flatten(values, name)[:2] for name, values in (outcomes or {}).items()},
            outcomes=tuple(outcomes or ()),
            id=None if id is None else strings(list(id)),
            label=None if label is None else _labels(label),
            group=None if group is None else strings(list(group)),
            context=None if context is None else strings(list(context)),
            actions=None if actions is None else flatten_texts(actions),
            primary_usage=primary_usage or Usage(),
            guardian_usage=guardian_usage or Usage(),
            identities=identities,
        )
        return cls(**checked(raw))

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
            identities: who made the scores, by role.
        """
        s = grades(confidence, "confidence", high=LARGEST_SCORE)
        p = grades(primary_grade, "primary_grade", high=1)
        g = grades(guardian_grade, "guardian_grade", high=1)
        if not len(s) == len(p) == len(g):
            raise ScoreLogError(
                f"confidence and grades have {len(s)}, {len(p)} and {len(g)} rows; give one of each per row"
            )
        regret = np.maximum(0.0, g - p)
        best = np.where(np.isnan(regret), np.nan, 1.0)
        return cls.from_arrays(
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
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Integers:
        """Number of actions of each row."""
        return np.diff(self.offsets)

    @property
    def loss_scores(self) -> Floats:
        """What the Guardian regret is measured in."""
        return self.guardian if self.binary is None else self.binary

    @property
    def is_router(self) -> bool:
        """Whether every row has the router form: two actions, Primary [0, s], Guardian [1, ...]."""
        if not (self.sizes == 2).all():
            return False
        first = self.guardian[::2]
        return bool((self.primary[::2] == 0).all() and (self.primary >= 0).all() and (first[~self.missing] == 1).all())

    def outcome(self, name: str) -> Floats:
        """An outcome's value for every action, flat; `correct` also follows from the label."""
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
        """The paper's 0/1 Guardian: the loss column is 1 on its top action if that is right, else 0 throughout.

        Choices still use the raw scores; only the loss changes. The certificate then bounds the probability that the
        Guardian is right and its answer is not a candidate.
        """
        if self.is_router:
            raise OptionError(f"{self.source}: router form needs no binarising; its scores already are regret")
        if "correct" not in self.outcome_names:
            raise OptionError(f"{self.source}: binarising needs the right answers; add a `label` or `correct` column")
        top = self.offsets[:-1] + row_argmax(self.guardian, self.offsets)
        binary = np.zeros(len(self.guardian))
        binary[top] = self.outcome("correct")[top] == 1
        binary[np.repeat(self.missing, self.sizes)] = np.nan
        return replace(self, binary=binary)

    def select(self, rows: ArrayLike) -> "ScoreLog":
        """A log of some rows, in the given order."""
        index = np.arange(len(self))[np.asarray(rows)]
        flat = flat_positions(self.offsets[index], self.sizes[index])

        def per_row(values: NDArray[Any] | None) -> Any:
            return None if values is None else values[index]

        def usage(of: Usage) -> Usage:
            return Usage(**{name: per_row(getattr(of, name)) for name in USAGE})

        return replace(
            self,
            primary=self.primary[flat],
            guardian=self.guardian[flat],
            offsets=np.concatenate([[0], np.cumsum(self.sizes[index])]),
            no_opinion=self.no_opinion[index],
            missing=self.missing[index],
            id=per_row(self.id),
            label=per_row(self.label),
            group=per_row(self.group),
            context=per_row(self.context),
            actions=None if self.actions is None else self.actions[flat],
            lists={name: values[flat] for name, values in self.lists.items()},
            binary=None if self.binary is None else self.binary[flat],
            primary_usage=usage(self.primary_usage),
            guardian_usage=usage(self.guardian_usage),
            extra={name: values[index] for name, values in self.extra.items()},
        )

    def row(self, index: int, /) -> Row:
        """One row as an object."""
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
        """Digest of what a calibration depends on: ids, sizes, scores and the binarised column; not of file bytes."""
        digest = hashlib.sha256(f"score log 1;digits {self.score_digits};rows {len(self)}".encode())
        for values in (self.offsets, self.primary, self.guardian, self.binary):
            if values is not None:
                digest.update(b";")
                canonical = (values + 0).astype("<f8" if values.dtype.kind == "f" else "<i8")  # -0.0 becomes 0.0
                digest.update(canonical.data)
        for name in () if self.id is None else cast("list[str]", self.id.tolist()):
            text = name.encode()
            digest.update(len(text).to_bytes(4, "little") + text)
        return digest.hexdigest()

    def write(self, path: str | Path) -> None:
        """Write the log; the ending of the name says the format. Column names stay as they were read."""
        if self.binary is not None:
            raise OutputError("a binarised log is not written; write the log itself and binarise it after reading")
        primary, guardian = self.columns
        lists: list[Column] = [(primary, self.primary_as_recorded()), (guardian, self.guardian), *self.lists.items()]
        lists += [] if self.actions is None else [("actions", self.actions)]
        named = {"id": self.id, "context": self.context, "label": self.label, "group": self.group}
        for role, usage in ((primary, self.primary_usage), (guardian, self.guardian_usage)):
            named |= {f"{role}_{name}": getattr(usage, name) for name in USAGE}
        scalars = [(name, values) for name, values in named.items() if values is not None] + [*self.extra.items()]
        metadata = {} if self.identities is None else {"identities": dict(self.identities)}
        if self.single:
            metadata["score_digits"] = dict.fromkeys(sorted(self.single), 6)
        write_table(path, scalars=scalars, lists=lists, offsets=self.offsets, metadata=metadata)

    def primary_as_recorded(self) -> Floats:
        """The Primary scores with NaN where it had no opinion."""
        return np.where(np.repeat(self.no_opinion, self.sizes), np.nan, self.primary)


def _labels(label: ArrayLike) -> Floats:
    numbers = numbers_or_none(label)
    if numbers is None or numbers.ndim != 1:
        raise ScoreLogError(f"column 'label' must hold the index of each row's right action; got {label!r:.80}")
    return numbers.astype(np.float64)
