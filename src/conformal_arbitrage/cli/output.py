"""What commands print: JSON, facts and tables to stdout, warnings and progress to stderr."""

import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Self

import click
import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from conformal_arbitrage.collecting.collect import EndpointEstimate
from conformal_arbitrage.collecting.collect import Progress as CollectProgress
from conformal_arbitrage.evaluation.show import fitted
from conformal_arbitrage.models.wrappers import dollars
from conformal_arbitrage.types import Spent


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
    """Print a table without the columns that this terminal is too narrow for; return their titles."""
    header, rows, left_out = fitted(header, rows, screen_width(), expendable)
    print_table(header, rows, title=title)
    return left_out


def name_left_out(titles: Sequence[str]) -> None:
    """Name the columns that `print_fitted` left out."""
    if titles:
        click.echo(wrapped(f"Columns that do not fit this terminal: {', '.join(titles)}; --json has them."))


def show_estimate(estimates: list[EndpointEstimate], *, as_json: bool, **counts: int) -> None:
    """Print the estimated calls, tokens and cost, per endpoint and in total; counts are part of the JSON document only."""
    total = sum((estimate.spent for estimate in estimates), start=Spent()).cost
    if as_json:
        print_json({"models": msgspec.to_builtins(estimates), "cost": total, **counts})
        return
    header = ["role", "endpoint", "calls", "input tokens", "output tokens", "cost"]
    rows = [
        [
            role_name(estimate.role),
            estimate.origin,
            f"{estimate.spent.calls}",
            f"{estimate.spent.input_tokens}",
            f"{estimate.spent.output_tokens}",
            dollars(estimate.spent.cost),
        ]
        for estimate in estimates
    ]
    print_table(header, rows, title="Estimate, at four characters per token and every reply at its limit")
    unpriced = ", ".join(dict.fromkeys(f"[{estimate.role}]" for estimate in estimates if estimate.spent.cost is None))
    cost = f"unknown; set price = [IN, OUT] in {unpriced}" if unpriced else f"about {dollars(total)}"
    click.echo(f"Cost: {cost}. Nothing was sent; replies that are already stored are not counted.")


def warn(message: str) -> None:
    """Print a warning to stderr, on one line."""
    click.echo(f"arbitrage: warning: {message}", err=True)


def print_progress(line: str) -> None:
    """Print a line of progress to stderr."""
    click.echo(line, err=True)


class ProgressBar:
    """A progress bar on stderr: rows, rate, time left, cost so far, failures."""

    def __init__(self) -> None:
        self._bar = Progress(
            BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
            TextColumn("{task.fields[money]}"), TextColumn("{task.fields[failures]}"),
            console=Console(stderr=True), refresh_per_second=4,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, rate="", money="", failures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def show(self, progress: CollectProgress) -> None:
        """Update the bar after a row."""
        failures = ", ".join(f"{role_name(name)} {count}" for name, count in progress.failures.items())
        speed = self._bar.tasks[0].speed
        self._bar.update(
            self._task,
            total=progress.total,
            completed=progress.done,
            rate="" if speed is None else f"{speed:.1f} rows/s",
            money=f"cost {dollars(progress.spent.cost)}",
            failures=f"failed: {failures}" if failures else "",
        )


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


def role_name(role: str) -> str:
    """Return a role as people read it; a model's own name as it is."""
    return role.capitalize() if role in ("primary", "guardian") else role


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
