"""HTML tables for notebooks: the shared part of every `_repr_html_`."""

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
    if not titled:
        return "".join(f"<td>{escape(cell)}</td>" for cell in row)
    tags = ["th", *("td" for _ in row[1:])]  # of words, which notebooks would set to the right, as figures
    return "".join(f"<{tag} {_LEFT}>{escape(cell)}</{tag}>" for tag, cell in zip(tags, row, strict=True))


_LEFT = 'style="text-align:left"'


def _row(cells: str) -> str:
    return f"<tr>{cells}</tr>"


_WIDTH, _LABEL, _ROOM, _ROW = 460, 110, 150, 20
_BLUE, _GREY = "#0072B2", "#8a8a8a"


def html_bars(title: str, bars: Sequence[tuple[str, float, str]]) -> str:
    """Return a small figure of horizontal bars, as SVG without scripts; nothing for no bars.

    Args:
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
        of: what is compared with it: the Primary's lead, or its confidence.
    """
    if relaxation is None or not 0 <= relaxation <= 1:
        return ""
    split = round(relaxation * _WIDTH, 1)
    parts = [
        _text(0, 12, f"{of} up to {relaxation:g}: the Guardian decides; above: the Primary"),
        _rectangle(0, 18, split, _GREY),
        _rectangle(split, 18, _WIDTH - split, _BLUE),
    ]
    return _figure("the decision rule", 36, parts)


def html_interval(
    title: str, limits: tuple[float, float], mean: float | None, marks: Sequence[tuple[str, float]]
) -> str:
    """Return a scale with an interval, the mean in it, and marked values; those that are equal share a mark.

    Args:
        marks: names of further values, such as a budget.
    """
    named: dict[float, list[str]] = {}
    for name, value in marks:
        named.setdefault(value, []).append(name)
    low, high = min(0.0, *limits, *named), max(*limits, *named)
    scale = _WIDTH / ((high - low) * 1.2 or 1.0)
    within = f"{title}: {limits[0]:.3g} to {limits[1]:.3g}"
    parts = [_text(0, 12, within), _rectangle((limits[0] - low) * scale, 24, (limits[1] - limits[0]) * scale, _GREY)]
    parts += [] if mean is None else [_rectangle((mean - low) * scale - 2, 20, 4, _BLUE, height=18)]
    for place, (value, names) in enumerate(sorted(named.items())):  # each label has a line of its own
        x = (value - low) * scale
        parts += [
            _rectangle(x, 18, 1.5, "currentColor", height=22),
            _text(x, 54 + 14 * place, f"{', '.join(names)} {value:g}"),
        ]
    return _figure(title, 46 + 14 * max(1, len(named)), parts)


def html_steps(title: str, points: Sequence[tuple[float, float]], *, cut: float, line: float) -> str:
    """Return a curve of steps over [0, 1], the part before a cut in blue, with a horizontal line.

    Args:
        points: where each step ends, and its height there; both rise.
        cut: where the blue part ends.
    """
    top = max([line, 1e-9, *(height for _, height in points)]) * 1.1

    def x(share: float) -> float:
        return round(share * _WIDTH, 1)

    def y(height: float) -> float:
        return round(20 + (1 - height / top) * _ROOM, 1)

    path = f"M0 {y(0)}" + "".join(f"H{x(place)}V{y(height)}" for place, height in points) + f"H{_WIDTH}"
    bottom = 20 + _ROOM
    parts = [
        _text(0, 12, title),
        f'<rect x="0" y="20" width="{x(cut)}" height="{_ROOM}" fill="{_BLUE}" fill-opacity="0.15"/>',
        f'<path d="{path}" fill="none" stroke="{_BLUE}" stroke-width="1.5"/>',
        _rectangle(0, y(line), _WIDTH, "currentColor", height=1),
        _text(_WIDTH - 110, y(line) - 4, f"allowed {line:g}"),
        _rectangle(x(cut), 20, 1.5, _GREY, height=_ROOM),
        _text(0, bottom + 14, "kept"),
        _text(x(cut) + 6, bottom + 14, "left to experts"),
    ]
    return _figure(title, bottom + 20, parts)


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
