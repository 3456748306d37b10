"""Wide columns: one column per action instead of one list per row.

Every row then has the same menu; menus of different sizes need list columns. A null or NaN cell means the same as one
inside a list.

Knows nothing of the rules that scores must keep.
"""

import re
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from conformal_arbitrage.core.arrays import Floats, Integers
from conformal_arbitrage.errors import ScoreLogError
from conformal_arbitrage.scorelog.tables import ColumnReader, Strings, strings

ScoreColumns = str | Sequence[str]
"""A model's scores: the name of one list column, or of one number column per action."""


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
