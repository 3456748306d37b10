"""What commands print: JSON, facts and tables to stdout, warnings and progress to stderr."""

import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

import click
from rich import box
from rich.console import Console
from rich.table import Table


def when(seconds: float | None) -> str:
    """Return a time in words of ISO 8601; nothing for None."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def print_json(document: object) -> None:
    """Print one JSON document to stdout; a data class becomes an object."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False, default=asdict))


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print name and value pairs, aligned."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in facts:
        table.add_row(name, value)
    console().print(table)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Print a table whose first column is text and whose others are figures.

    A narrow terminal gets headers, and if need be the first column, on several lines; figures are not cut.
    """
    lines, screen = [list(row) for row in rows], console()
    widths = _widths(list(zip(header, *lines, strict=True)), screen.width)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold", pad_edge=False)
    for k, (name, width) in enumerate(zip(header, widths, strict=True)):
        table.add_column(name, justify="left" if k == 0 else "right", no_wrap=k == 0 and width is None, width=width)
    for line in lines:
        table.add_row(*line)
    screen.print(table)


def print_fitted(
    header: Sequence[str], rows: Sequence[Sequence[str]], expendable: Sequence[str], *, title: str
) -> list[str]:
    """Print a table whose figures fit this terminal, and return the titles of the columns left out for that.

    Titles may break between words, figures may not.

    Args:
        expendable: titles of the columns that may be left out, the first to go first.
    """
    kept, left_out = list(range(len(header))), list[str]()
    for name in expendable:
        if name in header and _table_width(header, rows, kept) > screen_width():
            kept.remove(header.index(name))
            left_out.append(name)
    print_table([header[k] for k in kept], [[row[k] for k in kept] for row in rows], title=title)
    return left_out


def _table_width(header: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    """Return the characters a table takes: its columns, three between two of them, and one at either edge."""
    columns = [max(len(part) for part in (*header[k].split(), *(row[k] for row in rows))) for k in kept]
    return sum(columns) + 3 * (len(kept) - 1) + 2


def name_left_out(titles: Sequence[str]) -> None:
    """Name the columns that `print_fitted` left out."""
    if titles:
        click.echo(wrapped(f"Columns that do not fit this terminal: {', '.join(titles)}; --json has them."))


def warn(message: str) -> None:
    """Print a warning to stderr, on one line."""
    click.echo(f"arbitrage: warning: {message}", err=True)


def print_progress(line: str) -> None:
    """Print a line of progress to stderr."""
    click.echo(line, err=True)


def console() -> Console:
    """Return the terminal, or a wide console if stdout is redirected, so that tables do not wrap."""
    return Console(width=None if sys.stdout.isatty() else 170, highlight=False, soft_wrap=False)


def screen_width() -> int:
    """Return how many columns the terminal has."""
    return console().width


def wrapped(text: str) -> str:
    """Return paragraphs wrapped to a readable width, or to that of a narrower terminal; no word is broken."""
    wrap = textwrap.TextWrapper(width=readable_width(), break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.fill(line) for line in text.split("\n"))


def readable_width() -> int:
    """Return how many columns a paragraph may have."""
    return min(100, screen_width())


def _widths(columns: Sequence[Sequence[str]], screen: int) -> list[int | None]:
    """Return the widths of a table's columns: figures and words whole, and the first column before the headers."""
    least = [max(_unbroken(cell) for cell in column) for column in columns]
    spare = screen - sum(least) - 3 * (len(columns) - 1) - 2  # between columns, and at the two edges
    if spare < 0:
        return [None] * len(columns)
    widths: list[int | None] = []
    for column, width in zip(columns, least, strict=True):
        more = min(spare, max(map(len, column)) - width)
        widths.append(width + more)
        spare -= more
    return widths


def _unbroken(cell: str) -> int:
    """Return the width of a short figure with its sign, or of the longest word."""
    figure = len(cell) <= 12 and any(sign.isdigit() for sign in cell)
    return len(cell) if figure else max(map(len, cell.split()), default=0)
