"""Reports: one experiment's tables and figure as Markdown, HTML, CSV, JSON, PNG and SVG.

CSV and JSON hold results only, so that the same seed gives the same bytes; time and money stand in the other two.
"""

import base64
import csv
import html
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformal_arbitrage.evaluation.figures import plot
from conformal_arbitrage.evaluation.frontier import Frontier
from conformal_arbitrage.scorelog.files import write_text

Cell = str | float | None | tuple[float, float | None]
"""Text, a number, nothing, or mean and standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A titled table; `decimals` says how each column is rounded for people."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    decimals: tuple[int, ...]
    note: str = ""

    def texts(self) -> list[list[str]]:
        """The rows as people read them."""
        return [[_text(c, d) for c, d in zip(row, self.decimals, strict=True)] for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """The table as a JSON document, unrounded."""
        rows = [dict(zip(self.columns, map(_plain, row), strict=True)) for row in self.rows]
        return {"name": self.name, "title": self.title, "rows": rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Which frontier to draw, and its axes."""

    frontier: Frontier
    x: str
    y: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one experiment found."""

    name: str
    title: str
    source: str
    configuration: dict[str, Any]
    data_sha256: str | None
    seed: int
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    figure: Figure | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_dict(self) -> dict[str, Any]:
        """The report as a JSON document: no time, no money."""
        return {
            "name": self.name,
            "title": self.title,
            "source": self.source,
            "seed": self.seed,
            "data_sha256": self.data_sha256,
            "configuration": self.configuration,
            "tables": [table.to_dict() for table in self.tables],
        }

    def to_csv(self) -> str:
        """All tables in one, a figure a line."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["table", "row", "column", "value", "std"])
        for table in self.tables:
            for number, row in enumerate(table.rows, 1):
                for column, cell in zip(table.columns, row, strict=True):
                    value, std = cell if isinstance(cell, tuple) else (cell, None)
                    writer.writerow([table.name, number, column, value, std])
        return stream.getvalue()

    def to_markdown(self, *, seconds: float | None = None, spent: str | None = None) -> str:
        """The report for people."""
        lines = [f"Source: {self.source}", "", f"# {self.title}", ""]
        lines += [f"{note}\n" for note in self.notes]
        for table in self.tables:
            lines += [f"## {table.title}", "", *_markdown(table), ""] + ([table.note, ""] if table.note else [])
        if self.figure is not None:
            lines += [f"![{self.title}]({self.name}.png)", ""]
        return "\n".join([*lines, *self._colophon(seconds, spent)]) + "\n"

    def to_html(self, png: bytes | None, *, seconds: float | None = None, spent: str | None = None) -> str:
        """The report as one self-contained page."""
        body = [f"<p class=source>Source: {html.escape(self.source)}</p>", f"<h1>{html.escape(self.title)}</h1>"]
        body += [f"<p>{html.escape(note)}</p>" for note in self.notes]
        for table in self.tables:
            body += [f"<h2>{html.escape(table.title)}</h2>", _html(table), f"<p>{html.escape(table.note)}</p>"]
        if png is not None:
            data = base64.b64encode(png).decode()
            body.append(f'<img alt="{html.escape(self.title)}" src="data:image/png;base64,{data}">')
        body += [f"<p>{html.escape(line)}</p>" for line in self._colophon(seconds, spent) if line]
        return _PAGE.format(title=html.escape(self.title), body="\n".join(body))

    def _colophon(self, seconds: float | None, spent: str | None) -> list[str]:
        settings = "; ".join(f"{name} {value}" for name, value in self.configuration.items())
        lines = [f"Configuration: {settings}.", ""] if settings else []
        lines += [f"Seed {self.seed}." + (f" Data: sha256 {self.data_sha256}." if self.data_sha256 else ""), ""]
        money = "Money spent: none, recorded scores only." if spent is None else f"Money spent on all scores: {spent}."
        return [*lines, money if seconds is None else f"Time: {seconds:.1f} s. {money}"]


def write_report(report: Report, folder: Path, *, seconds: float, spent: str | None = None) -> list[str]:
    """Write all forms of a report; the names of the files."""
    base = folder / report.name
    png = None
    if report.figure is not None:
        for ending in ("png", "svg"):
            plot(report.figure.frontier, f"{base}.{ending}", x=report.figure.x, y=report.figure.y)
        png = Path(f"{base}.png").read_bytes()
    write_text(f"{base}.md", report.to_markdown(seconds=seconds, spent=spent))
    write_text(f"{base}.html", report.to_html(png, seconds=seconds, spent=spent))
    write_text(f"{base}.csv", report.to_csv())
    write_text(f"{base}.json", json.dumps(report.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    endings = ["md", "html", "csv", "json", *(["png", "svg"] if png else [])]
    return [f"{report.name}.{ending}" for ending in endings]


def _text(cell: Cell, decimals: int) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, tuple):
        mean, std = cell
        return f"{mean:.{decimals}f}" + ("" if std is None else f" ± {std:.{decimals}f}")
    return f"{cell:.{decimals}f}"


def _plain(cell: Cell) -> Any:
    return {"mean": cell[0], "std": cell[1]} if isinstance(cell, tuple) else cell


def _markdown(table: Table) -> list[str]:
    lines: Sequence[Sequence[str]] = [table.columns, ["---"] * len(table.columns), *table.texts()]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _html(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(table.columns, "th") + "".join(row(cells, "td") for cells in table.texts()) + "</table>"


_PAGE = """<!doctype html>
<html lang=en><meta charset=utf-8><title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #111 }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem }}
th, td {{ padding: 0.25rem 0.8rem; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }}
img {{ max-width: 100% }}
.source {{ background: #f3f3f3; padding: 0.5rem 1rem }}
</style>
{body}
</html>
"""
