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


_WIDTH, _LABEL, _ROOM, _ROW = 460, 110, 150, 20
_BLUE, _GREY = "#0072B2", "#8a8a8a"


def html_bars(title: str, bars: Sequence[tuple[str, float, str]]) -> str:
    """Return a small figure of horizontal bars, as SVG without scripts; nothing for no bars.

    Args:
        title: what the bars show.
        bars: the label of each, its length from 0 to 1, and the text at its end.
    """
    if not bars:
        return ""
    parts = [_text(0, 12, title)]
    for place, (label, share, text) in enumerate(bars):
        y, length = 18 + place * _ROW, round(min(max(share, 0.0), 1.0) * (_WIDTH - _LABEL - _ROOM), 1)
        parts += [
            _text(0, y + 12, label),
            _rectangle(_LABEL, y + 2, length, _BLUE),
            _text(_LABEL + length + 6, y + 12, text),
        ]
    return _figure(title, 22 + len(bars) * _ROW, parts)


def html_rule(relaxation: float | None, *, of: str = "lead") -> str:
    """Return a scale from 0 to 1 with what defers and what stands; nothing for a threshold off the scale.

    Args:
        relaxation: the threshold.
        of: what is compared with it: the Primary's lead, or its confidence.
    """
    if relaxation is None or not 0 <= relaxation <= 1:
        return ""
    split = round(relaxation * _WIDTH, 1)
    parts = [
        _text(0, 12, f"{of} up to {relaxation:g}: ask the Guardian; above: the Primary's choice stands"),
        _rectangle(0, 18, split, _GREY),
        _rectangle(split, 18, _WIDTH - split, _BLUE),
    ]
    return _figure("the decision rule", 36, parts)


def html_interval(
    title: str, limits: tuple[float, float], mean: float | None, marks: Sequence[tuple[str, float]]
) -> str:
    """Return a scale with an interval, the mean in it, and marked values.

    Args:
        title: what is shown.
        limits: the ends of the interval.
        mean: a value in it, if it is known.
        marks: names of further values, such as a budget.
    """
    values = [*limits, *(value for _, value in marks)]
    low, high = min(0.0, *values), max(values)
    scale = _WIDTH / ((high - low) * 1.2 or 1.0)
    parts = [_text(0, 12, title), _rectangle((limits[0] - low) * scale, 24, (limits[1] - limits[0]) * scale, _GREY)]
    parts += [] if mean is None else [_rectangle((mean - low) * scale - 2, 20, 4, _BLUE, height=18)]
    for name, value in marks:
        x = (value - low) * scale
        parts += [_rectangle(x, 18, 1.5, "currentColor", height=22), _text(x, 54, f"{name} {value:g}")]
    return _figure(title, 60, parts)


def _figure(title: str, height: int, parts: Sequence[str]) -> str:
    label = escape(title, quote=True)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" aria-label="{label}" '
        f'font-size="12" font-family="sans-serif">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="currentColor">{escape(text)}</text>'


def _rectangle(x: float, y: float, width: float, color: str, *, height: float = 12) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{max(width, 0):g}" height="{height:g}" fill="{color}"/>'
