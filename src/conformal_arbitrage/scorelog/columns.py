"""Raw columns in, checked arrays out: the rules of the score log format, each with its message.

Knows nothing of files beyond the table it is handed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from conformal_arbitrage.core.gaps import LARGEST_SCORE, Bools, Floats, Integers, digits_of, numbers_or_none
from conformal_arbitrage.core.rows import flat_positions
from conformal_arbitrage.errors import OptionError, ScoreLogError
from conformal_arbitrage.scorelog.files import Strings, Table, strings

USAGE = ("cost", "input_tokens", "output_tokens")
Lists = tuple[Floats, Integers]
"""Flat values, and the length of each row's list (-1 for null)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one model's call about all actions took, per row; None where the log does not say."""

    cost: Floats | None = None
    input_tokens: Floats | None = None
    output_tokens: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawColumns:
    """A score log as it came, before any rule was applied."""

    source: str
    columns: tuple[str, str]
    primary: Lists
    guardian: Lists
    single: frozenset[str] = frozenset()
    lists: Mapping[str, Lists] = field(default_factory=dict[str, Lists])
    outcomes: tuple[str, ...] = ()
    id: Strings | None = None
    label: Floats | None = None
    group: Strings | None = None
    context: Strings | None = None
    actions: tuple[Strings, Integers] | None = None
    primary_usage: Usage = Usage()
    guardian_usage: Usage = Usage()
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    identities: Mapping[str, Any] | None = None


def read_columns(table: Table, primary: str, guardian: str | None, outcomes: Sequence[str]) -> RawColumns:
    """All columns of a table, by their roles; without a Guardian its scores are missing throughout."""
    for name in (primary, *([] if guardian is None else [guardian]), *outcomes):
        if name not in table.types:
            raise ScoreLogError(
                f"{table.path}: there is no column '{name}'; it has {', '.join(sorted(table.types))}; "
                "name the columns with primary=, guardian=, outcomes= (--primary-column, --guardian-column, --outcome)"
            )
    p, p_sizes = table.numbers(primary)
    g, g_sizes = no_scores(table.rows) if guardian is None else table.numbers(guardian)
    guardian = guardian or "guardian"
    named = dict.fromkeys(("correct", *outcomes)) if "correct" in table.types else dict.fromkeys(outcomes)
    lists = {name: table.numbers(name) for name in named}
    has = {name for name in ("id", "label", "group", "context", "actions") if name in table.types}
    usage = {role: _read_usage(table, role) for role in (primary, guardian)}
    used = {primary, guardian, *lists, *has, *(f"{role}_{name}" for role in usage for name in USAGE)}
    kept_lists, extra = _read_rest(table, [name for name in table.types if name not in used], p_sizes)
    return RawColumns(
        source=str(table.path),
        columns=(primary, guardian),
        primary=(p, p_sizes),
        guardian=(g, g_sizes),
        single=table.single | _noted_single(table),
        lists=lists | kept_lists,
        outcomes=tuple(named),
        id=table.texts("id") if "id" in has else None,
        label=table.scalars("label") if "label" in has else None,
        group=table.texts("group") if "group" in has else None,
        context=table.texts("context") if "context" in has else None,
        actions=table.text_lists("actions") if "actions" in has else None,
        primary_usage=usage[primary],
        guardian_usage=usage[guardian],
        extra=extra,
        identities=_noted(table, "identities"),
    )


def _noted(table: Table, name: str) -> dict[str, Any] | None:
    """An entry of the table's metadata; each has one value per column."""
    noted = table.metadata.get(name)
    if noted is not None and not isinstance(noted, dict):
        raise ScoreLogError(f"{table.path}: '{name}' in its metadata is not a JSON object; write the log again")
    return cast("dict[str, Any] | None", noted)


def _noted_single(table: Table) -> frozenset[str]:
    digits = _noted(table, "score_digits") or {}
    for name, value in digits.items():
        if value not in (6, 12):
            raise ScoreLogError(
                f"{table.path}: 'score_digits' of '{name}' is {value!r} in its metadata; it must be 6 or 12"
            )
    return frozenset(name for name, value in digits.items() if value == 6)


def _read_usage(table: Table, role: str) -> Usage:
    names = {name: f"{role}_{name}" for name in USAGE}
    return Usage(**{name: table.scalars(column) for name, column in names.items() if column in table.types})


def _read_rest(table: Table, names: Sequence[str], sizes: Integers) -> tuple[dict[str, Lists], dict[str, NDArray[Any]]]:
    """Columns nobody asked for: number lists that line up with the actions, and all others one value per row."""
    lists: dict[str, Lists] = {}
    extra: dict[str, NDArray[Any]] = {}
    for name in names:
        numbers = table.numbers_if_any(name)
        if numbers is not None and ((numbers[1] == sizes) | (numbers[1] < 0)).all() and (numbers[1] > 0).any():
            lists[name] = numbers
        else:
            extra[name] = table.anything(name)
    return lists, extra


def no_scores(n: int) -> Lists:
    """What a Guardian that was never asked has to say about n rows."""
    return np.zeros(0), np.full(n, -1, dtype=np.int64)


def flatten(rows: ArrayLike | Sequence[Any], name: str) -> tuple[Floats, Integers, bool]:
    """A 2-D array or a sequence of rows, flat: values, lengths (-1 for None), single precision or not."""
    if not isinstance(rows, np.ndarray | Sequence) or isinstance(rows, str):
        raise ScoreLogError(f"column '{name}' must be a 2-D array or a list of lists of numbers; got {rows!r:.80}")
    table = np.ma.filled(cast("NDArray[Any]", rows), np.nan) if isinstance(rows, np.ndarray) else None
    if table is not None and table.ndim == 2 and table.dtype.kind in "iuf":
        sizes = np.full(table.shape[0], table.shape[1], dtype=np.int64)
        return _as_floats(np.ascontiguousarray(table).reshape(-1)), sizes, digits_of(table.dtype) == 6
    listed = [None if row is None else _numbers(row, name, i) for i, row in enumerate(cast("Sequence[Any]", rows))]
    sizes = np.array([-1 if row is None else len(row) for row in listed], dtype=np.int64)
    present = [row for row in listed if row is not None]
    values = np.concatenate(present) if present else np.zeros(0)
    return _as_floats(values), sizes, digits_of(values.dtype) == 6


def _numbers(row: object, name: str, index: int) -> NDArray[Any]:
    """One row's numbers; None becomes NaN, anything else that is not a number is refused."""
    values = numbers_or_none(row)
    if values is None or values.ndim != 1:
        raise ScoreLogError(
            f"arrays: row {index + 1}, column '{name}': {row!r:.80} is not a list of numbers; correct that row"
        )
    return values


def _as_floats(values: NDArray[Any]) -> Floats:
    """As float64, without a copy where they are that already."""
    return np.asarray(values, dtype=np.float64)


def flatten_texts(rows: Sequence[Sequence[str]]) -> tuple[Strings, Integers]:
    """Lists of texts, flat, with their lengths."""
    return strings(list(chain.from_iterable(rows))), np.array([len(row) for row in rows], dtype=np.int64)


def grades(values: ArrayLike, name: str, *, high: float) -> Floats:
    """A column of numbers from 0 to `high`; NaN or None is allowed and means there is none."""
    raw = np.asarray(values)
    column = raw if raw.dtype.kind == "b" else numbers_or_none(values)
    if column is None or column.ndim != 1:
        raise ScoreLogError(f"column '{name}' must be a flat list of numbers; got {values!r:.80}")
    column = column.astype(np.float64)
    bad = (column < 0) | (column > high)
    if bad.any():
        row = int(bad.argmax())
        top = "0 or more and finite" if high > 1 else "in [0, 1]"
        raise ScoreLogError(f"row {row + 1}, column '{name}': {column[row]:g} must be {top}; rescale the column")
    return column


def checked(raw: RawColumns) -> dict[str, Any]:
    """Apply every rule of the format; the fields of a ScoreLog."""
    sizes = _common_sizes(raw)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    primary, no_opinion = _scores(raw, raw.columns[0], raw.primary, sizes, offsets, blank=0.0)
    guardian, missing = _scores(raw, raw.columns[1], raw.guardian, sizes, offsets, blank=np.nan)
    _check_rows(raw, len(sizes))
    return {
        "primary": primary,
        "guardian": guardian,
        "offsets": offsets,
        "score_digits": 6 if raw.columns[0] in raw.single else 12,
        "single": raw.single,
        "no_opinion": no_opinion,
        "missing": missing,
        "id": _unique(raw),
        "label": _label(raw, sizes),
        "group": raw.group,
        "context": raw.context,
        "actions": _actions(raw, sizes),
        "lists": {name: _outcome(raw, name, v, sizes, offsets) for name, v in raw.lists.items()},
        "outcomes": raw.outcomes,
        "primary_usage": _usage(raw, raw.primary_usage, raw.columns[0]),
        "guardian_usage": _usage(raw, raw.guardian_usage, raw.columns[1]),
        "extra": raw.extra,
        "columns": raw.columns,
        "identities": raw.identities,
        "source": raw.source,
    }


def _fault(raw: RawColumns, row: int, column: str, problem: str) -> ScoreLogError:
    return ScoreLogError(f"{raw.source}: row {row + 1}, column '{column}': {problem}")


def _common_sizes(raw: RawColumns) -> Integers:
    """Actions per row; a null list has the length of the other model's."""
    (_, p), (_, g) = raw.primary, raw.guardian
    if len(p) != len(g):
        raise ScoreLogError(
            f"{raw.source}: {len(p)} rows of Primary scores, {len(g)} of Guardian; give both for each row"
        )
    if len(p) == 0:
        raise ScoreLogError(f"{raw.source}: the log has no rows; give it at least one")
    for sizes, name in ((p, raw.columns[0]), (g, raw.columns[1])):
        if (sizes == 0).any():
            raise _fault(raw, int((sizes == 0).argmax()), name, "an empty list; a query needs at least one action")
    both_null = (p < 0) & (g < 0)
    if both_null.any():
        raise _fault(
            raw,
            int(both_null.argmax()),
            raw.columns[0],
            "neither model has scores; remove the row's cause or ask again",
        )
    differ = (p >= 0) & (g >= 0) & (p != g)
    if differ.any():
        row = int(differ.argmax())
        raise _fault(raw, row, raw.columns[1], f"{g[row]} scores for {p[row]} actions; give one per action")
    return np.maximum(p, g)


def _filled_up(lists: Lists, sizes: Integers, offsets: Integers) -> Floats:
    """Flat values with NaN for null lists."""
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
    """A model's scores, with each row that has a NaN blanked throughout, and these rows."""
    values = _finite(raw, name, _filled_up(lists, sizes, offsets), offsets)
    unknown = np.isnan(values)
    if not unknown.any():
        return values, np.zeros(len(sizes), dtype=np.bool_)
    silent = np.logical_or.reduceat(unknown, offsets[:-1])
    return np.where(np.repeat(silent, sizes), blank, values), silent


def _lined_up(raw: RawColumns, name: str, lists: tuple[NDArray[Any], Integers], sizes: Integers) -> NDArray[Any]:
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
    """Numbers per action; a null list is unknown throughout."""
    _lined_up(raw, name, lists, sizes)
    return _finite(raw, name, _filled_up(lists, sizes, offsets), offsets)


def _actions(raw: RawColumns, sizes: Integers) -> Strings | None:
    if raw.actions is None:
        return None
    null = raw.actions[1] < 0
    if null.any():
        raise _fault(raw, int(null.argmax()), "actions", "no list; give one text per action, or leave the column out")
    return _lined_up(raw, "actions", raw.actions, sizes)


def _check_rows(raw: RawColumns, n: int) -> None:
    named = {"id": raw.id, "label": raw.label, "group": raw.group, "context": raw.context}
    for name, values in named.items():
        if values is not None and len(values) != n:
            raise ScoreLogError(
                f"{raw.source}: column '{name}' has {len(values)} rows, the scores {n}; give one per row"
            )


def _unique(raw: RawColumns) -> Strings | None:
    if raw.id is None:
        return None
    seen: dict[str, int] = {}
    for row, name in enumerate(cast("list[str]", raw.id.tolist())):
        if name == "":
            raise _fault(raw, row, "id", "the id is empty; give every row one")
        first = seen.setdefault(name, row)
        if first != row:
            raise _fault(raw, row, "id", f"{name!r} is also the id of row {first + 1}; make ids unique")
    return raw.id


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
    fields: dict[str, Floats | None] = {}
    for name in USAGE:
        values = getattr(usage, name)
        fields[name] = values = None if values is None else np.asarray(values, dtype=np.float64)
        if values is None:
            continue
        if len(values) != len(raw.primary[1]):
            raise OptionError(
                f"{role}_{name} has {len(values)} rows, the scores {len(raw.primary[1])}; give one per row"
            )
        bad = ~((values >= 0) & (values < np.inf))
        if bad.any():
            row = int(bad.argmax())
            raise _fault(
                raw,
                row,
                f"{role}_{name}",
                f"{values[row]:g} must be a number, 0 or more; fill it in, or leave the column out",
            )
    return Usage(**fields)
