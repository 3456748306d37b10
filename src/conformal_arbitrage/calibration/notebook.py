"""HTML tables for notebooks: the shared part of every `_repr_html_`.

Knows nothing of what the tables show.
"""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(rows: Iterable[Sequence[str]], *, header: Sequence[str] = ()) -> str:
    """Return a plain table; every cell is escaped. Without a header the first column is one."""
    lines = [_row("".join(f"<th>{escape(cell)}</th>" for cell in header))] if header else []
    lines += [_row(_cells(row, titled=not header)) for row in rows]
    return f"<table>{''.join(lines)}</table>"


def html_paragraph(text: str) -> str:
    """Return a paragraph of escaped text."""
    return f"<p>{escape(text)}</p>"


def _cells(row: Sequence[str], *, titled: bool) -> str:
    tags = ["th" if titled and place == 0 else "td" for place in range(len(row))]
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for tag, cell in zip(tags, row, strict=True))


def _row(cells: str) -> str:
    return f"<tr>{cells}</tr>"
