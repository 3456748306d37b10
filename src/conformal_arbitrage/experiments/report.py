"""Reports: one experiment's tables and figure as Markdown, HTML, CSV, JSON, PNG and SVG.

CSV and JSON contain results only, so that the same seed gives the same bytes; time and money appear in the other two.
Knows nothing of how results are computed.
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

from conformal_arbitrage.calibration.notebook import html_paragraph, html_table
from conformal_arbitrage.evaluation.frontier import Frontier
from conformal_arbitrage.scorelog.tables import write_text

Cell = str | float | None | tuple[float, float | None]
"""Text, a number, an empty cell, or mean and standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A titled table; `decimals` are the places each column is rounded to for people."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    decimals: tuple[int, ...]
    note: str = ""

    def texts(self) -> list[list[str]]:
        """Return the rows as rounded text."""
        return [[_text(c, d) for c, d in zip(row, self.decimals, strict=True)] for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return the table as a JSON document, unrounded."""
        rows = [dict(zip(self.columns, map(_plain, row), strict=True)) for row in self.rows]
        return {"name": self.name, "title": self.title, "rows": rows}


@dataclass(frozen=True, slots=True)
class Figure:
    """A frontier to draw, and its axes."""

    frontier: Frontier
    x: str
    y: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of one experiment."""

    name: str
    title: str
    source: str
    configuration: dict[str, Any]
    data_sha256: str | None
    seed: int
    tables: tuple[ReportTable, ...]
    notes: tuple[str, ...] = ()
    figure: Figure | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document, without time and money."""
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
        """Return all tables in one, with one figure per line."""
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
        """Return the report as Markdown."""
        lines = [f"Source: {self.source}", "", f"# {self.title}", ""]
        lines += [f"{note}\n" for note in self.notes]
        for table in self.tables:
            lines += [f"## {table.title}", "", *_markdown(table), ""] + ([table.note, ""] if table.note else [])
        if self.figure is not None:
            lines += [f"![{self.title}]({self.name}.png)", ""]
        return "\n".join([*lines, *self._colophon(seconds, spent)]) + "\n"

    def to_html(self, png: bytes | None, *, seconds: float | None = None, spent: str | None = None) -> str:
        """Return the report as one self-contained HTML page."""
        body = [f"<p class=source>Source: {html.escape(self.source)}</p>", f"<h1>{html.escape(self.title)}</h1>"]
        body += [html_paragraph(note) for note in self.notes]
        for table in self.tables:
            body += [f"<h2>{html.escape(table.title)}</h2>", html_table(table.texts(), header=table.columns)]
            body.append(html_paragraph(table.note))
        if png is not None:
            data = base64.b64encode(png).decode()
            body.append(f'<img alt="{html.escape(self.title)}" src="data:image/png;base64,{data}">')
        body += [html_paragraph(line) for line in self._colophon(seconds, spent) if line]
        return _PAGE.format(title=html.escape(self.title), body="\n".join(body))

    def _colophon(self, seconds: float | None, spent: str | None) -> list[str]:
        settings = "; ".join(f"{name} {value}" for name, value in self.configuration.items())
        lines = [f"Configuration: {settings}.", ""] if settings else []
        lines += [f"Seed {self.seed}." + (f" Data: sha256 {self.data_sha256}." if self.data_sha256 else ""), ""]
        money = "Money spent: none, recorded scores only." if spent is None else f"Money spent on all scores: {spent}."
        return [*lines, money if seconds is None else f"Time: {seconds:.1f} s. {money}"]


def write_report(report: Report, folder: Path, *, seconds: float, spent: str | None = None) -> list[str]:
    """Write a report in all formats; return the names of the files."""
    base = folder / report.name
    png = None
    if report.figure is not None:
        for ending in ("png", "svg"):
            report.figure.frontier.plot(f"{base}.{ending}", x=report.figure.x, y=report.figure.y)
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


def _markdown(table: ReportTable) -> list[str]:
    lines: Sequence[Sequence[str]] = [table.columns, ["---"] * len(table.columns), *table.texts()]
    return ["| " + " | ".join(line) + " |" for line in lines]


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
