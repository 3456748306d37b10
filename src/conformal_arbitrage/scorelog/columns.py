"""Raw columns in, checked arrays out: the rules of the score log format, each with its message.

Knows nothing of files and frames beyond the table it is handed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from conformal_arbitrage.core.arrays import Bools, Floats, Integers, flat_positions, numbers_or_none
from conformal_arbitrage.core.gaps import LARGEST_SCORE, digits_of
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.tables import ColumnReader, Strings, strings
from conformal_arbitrage.scorelog.wide import ScoreColumns, wide_actions, wide_scores

USAGE = ("cost", "input_tokens", "output_tokens")
Lists = tuple[Floats, Integers]
"""Flat values, and the length of each row's list (-1 for null)."""


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
    first_row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedColumns:
    """A score log that keeps every rule of the format; the fields are those of `ScoreLog`."""

    primary: Floats
    guardian: Floats
    offsets: Integers
    score_digits: int
    single: frozenset[str]
    no_opinion: Bools
    missing: Bools
    id: Strings | None
    label: Integers | None
    group: Strings | None
    context: Strings | None
    actions: Strings | None
    lists: Mapping[str, Floats]
    outcomes: tuple[str, ...]
    primary_usage: Usage
    guardian_usage: Usage
    extra: Mapping[str, NDArray[Any]]
    columns: tuple[str, str]
    identities: Mapping[str, Any] | None
    source: str


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
    kept_lists, extra = _read_rest(table, [name for name in table.types if name not in used], p[1])
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
        first_row=table.first_row,
    )


def _names(columns: ScoreColumns) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns)


def _require(table: ColumnReader, names: Iterable[str]) -> None:
    for name in names:
        if name not in table.types:
            chained = any(one.endswith("_confidence") for one in table.types)
            cascade = (
                "; if this is the log of a cascade, read it with calibrate --path, evaluate --path" if chained else ""
            )
            raise ScoreLogError(
                f"{table.source}: there is no column '{name}'; it has {', '.join(sorted(table.types))}; "
                "name the columns with primary=, guardian=, outcomes= (--primary-column, --guardian-column, --outcome)"
                f"{cascade}"
            )


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


def _read_rest(
    table: ColumnReader, names: Sequence[str], sizes: Integers
) -> tuple[dict[str, Lists], dict[str, NDArray[Any]]]:
    """Return the other columns: number lists that line up with the actions, and all else one value per row."""
    lists: dict[str, Lists] = {}
    extra: dict[str, NDArray[Any]] = {}
    for name in names:
        numbers = table.numbers_if_any(name)
        if numbers is not None and ((numbers[1] == sizes) | (numbers[1] < 0)).all() and (numbers[1] > 0).any():
            lists[name] = numbers
        else:
            extra[name] = table.anything(name)
    return lists, extra


def array_columns(
    primary: ArrayLike | Sequence[Any],
    guardian: ArrayLike | Sequence[Any] | None,
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
) -> RawColumns:
    """Return arrays, or lists of different lengths, as raw columns; see `ScoreLog.from_arrays`."""
    p, p_sizes, single = flatten(primary, "primary")
    g, g_sizes = no_scores(len(p_sizes)) if guardian is None else flatten(guardian, "guardian")[:2]
    return RawColumns(
        source="arrays",
        columns=("primary", "guardian"),
        primary=(p, p_sizes),
        guardian=(g, g_sizes),
        single=frozenset(["primary"] if single else []),
        lists={name: flatten(values, name)[:2] for name, values in (outcomes or {}).items()},
        outcomes=tuple(outcomes or ()),
        id=None if id is None else strings(list(id)),
        label=None if label is None else _label_numbers(label),
        group=None if group is None else strings(list(group)),
        context=None if context is None else strings(list(context)),
        actions=None if actions is None else flatten_texts(actions),
        primary_usage=primary_usage or Usage(),
        guardian_usage=guardian_usage or Usage(),
        identities=identities,
    )


def no_scores(n: int) -> Lists:
    """Return the scores of a model that scored none of n rows."""
    return np.zeros(0), np.full(n, -1, dtype=np.int64)


def flatten(rows: ArrayLike | Sequence[Any], name: str) -> tuple[Floats, Integers, bool]:
    """Return a 2-D array or a sequence of rows as flat values, lengths (-1 for None), and whether it is single precision."""
    if _is_array(rows):
        rows = np.ma.filled(rows, np.nan)
        if rows.ndim == 2 and rows.dtype.kind in "iuf":
            sizes = np.full(rows.shape[0], rows.shape[1], dtype=np.int64)
            return _as_floats(np.ascontiguousarray(rows).reshape(-1)), sizes, digits_of(rows.dtype) == 6
    if not _is_rows(rows):
        raise ScoreLogError(f"column '{name}' must be a 2-D array or a list of lists of numbers; got {rows!r:.80}")
    listed = [None if row is None else _numbers(row, name, i) for i, row in enumerate(rows)]
    sizes = np.array([-1 if row is None else len(row) for row in listed], dtype=np.int64)
    present = [row for row in listed if row is not None]
    values = np.concatenate(present) if present else np.zeros(0)
    return _as_floats(values), sizes, digits_of(values.dtype) == 6


def _is_array(rows: object) -> TypeGuard[NDArray[Any]]:
    return isinstance(rows, np.ndarray)


def _is_rows(rows: object) -> TypeGuard[Sequence[object]]:
    return isinstance(rows, np.ndarray | Sequence) and not isinstance(rows, str)


def _numbers(row: object, name: str, index: int) -> NDArray[Any]:
    """Return one row's numbers, None as NaN; refuse anything else."""
    values = numbers_or_none(row)
    if values is None or values.ndim != 1:
        raise ScoreLogError(
            f"arrays: row {index + 1}, column '{name}': {row!r:.80} is not a list of numbers; correct that row"
        )
    return values


def _as_floats(values: NDArray[Any]) -> Floats:
    """Return float64 values, without a copy where they are that already."""
    return np.asarray(values, dtype=np.float64)


def _label_numbers(label: ArrayLike) -> Floats:
    numbers = numbers_or_none(label)
    if numbers is None or numbers.ndim != 1:
        raise ScoreLogError(f"column 'label' must hold the index of each row's right action; got {label!r:.80}")
    return numbers.astype(np.float64)


def flatten_texts(rows: Sequence[Sequence[str]]) -> tuple[Strings, Integers]:
    """Return lists of texts as flat texts and lengths."""
    return strings(list(chain.from_iterable(rows))), np.array([len(row) for row in rows], dtype=np.int64)


def check_columns(raw: RawColumns) -> CheckedColumns:
    """Apply every rule of the format.

    Raises:
        ScoreLogError: a rule is broken; the message names source, row, column and remedy.
    """
    sizes = _common_sizes(raw)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    primary, no_opinion = _scores(raw, raw.columns[0], raw.primary, sizes, offsets, blank=0.0)
    guardian, missing = _scores(raw, raw.columns[1], raw.guardian, sizes, offsets, blank=np.nan)
    _check_lengths(raw, len(sizes))
    return CheckedColumns(
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
        source=raw.source,
    )


def _fault(raw: RawColumns, row: int, column: str, problem: str) -> ScoreLogError:
    return ScoreLogError(f"{raw.source}: row {raw.first_row + row + 1}, column '{column}': {problem}")


def _common_sizes(raw: RawColumns) -> Integers:
    """Return the number of actions of each row; a null list has the length of the other model's."""
    (_, p), (_, g) = raw.primary, raw.guardian
    if len(p) != len(g):
        raise ScoreLogError(
            f"{raw.source}: {len(p)} rows of Primary scores, {len(g)} of Guardian; give both for each row"
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
    values, own = lists
    if (own >= 0).all():
        return values
    full = np.full(offsets[-1], np.nan)
    there = own >= 0
    full[flat_positions(offsets[:-1][there], sizes[there])] = values
    return full


def _finite(raw: RawColumns, name: str, values: Floats, offsets: Integers, *, limit: float = LARGEST_SCORE) -> Floats:
    """Refuse infinities; NaN may stay."""
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
    values, own = lists
    if len(own) != len(sizes):
        raise ScoreLogError(
            f"{raw.source}: column '{name}' has {len(own)} rows, the scores {len(sizes)}; give one per row"
        )
    wrong = (own >= 0) & (own != sizes)
    if wrong.any():
        row = int(wrong.argmax())
        raise _fault(raw, row, name, f"{own[row]} entries for {sizes[row]} actions; give one per action")
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
                f"{raw.source}: column '{name}' has {len(values)} rows, the scores {n}; give one per row"
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
    return Usage(
        cost=_usage_column(raw, usage.cost, f"{role}_cost"),
        input_tokens=_usage_column(raw, usage.input_tokens, f"{role}_input_tokens"),
        output_tokens=_usage_column(raw, usage.output_tokens, f"{role}_output_tokens"),
    )


def _usage_column(raw: RawColumns, column: Floats | None, name: str) -> Floats | None:
    if column is None:
        return None
    values = np.asarray(column, dtype=np.float64)
    if len(values) != len(raw.primary[1]):
        raise OptionError(f"{name} has {len(values)} rows, the scores {len(raw.primary[1])}; give one per row")
    bad = (values < 0) | np.isinf(values)  # NaN: unknown, as that of a call that timed out
    if bad.any():
        row = int(bad.argmax())
        problem = f"{values[row]:g} must be a number, 0 or more; fill it in, or leave the column out"
        raise _fault(raw, row, name, problem)
    return values
