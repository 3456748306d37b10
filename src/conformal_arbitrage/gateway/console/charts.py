"""The console's pictures, as SVG: geometry in attributes, colours by class, every text escaped.

Each is drawn twice, for wide and for narrow screens, since text in a picture that shrinks cannot be read. This is the only
module that makes markup in code.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil, floor, isnan, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup


WIDE, NARROW = 760, 340
_STEPS = (
    1,
    2,
    5,
    10,
    30,
    60,
    300,
    900,
    1800,
    3600,
    10800,
    21600,
    43200,
    86400,
    172800,
    432000,
    864000,
    2592000,
    7776000,
)
_LINE = 15
_MOST_OPTIONS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """What a ledger showed at one moment: the time, how many audits there were, the mean loss and its limits."""

    time: float
    audits: int
    mean: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCourse:
    """A ledger's course.

    Attributes:
        points: in order.
        red: the red line, if there is one.
        marks: times of alarms and other events, with a word each.
    """

    points: Sequence[LossPoint]
    alpha: float
    red: float | None = None
    marks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """An option in the picture of a decision: its text, score and gap, and whether it is a candidate and was chosen."""

    text: str
    score: float
    gap: float
    candidate: bool
    chosen: bool


def loss_chart(course: LossCourse) -> "Markup":
    """Draw the mean loss of audits over time with its limits, alpha and the red line."""
    return _twice(lambda width: _loss_svg(course, width), "Audited loss over time, with its limits and the lines")


def score_chart(bars: Sequence[Bar], relaxation: float | None) -> "Markup":
    """Draw the Primary's scores: filled bars are candidates, the shaded zone is the relaxation, a star is the choice."""
    shown = bars[:_MOST_OPTIONS]
    title = "The Primary's score for each option, the zone of candidates, and the choice"
    return _twice(lambda width: _score_svg(shown, relaxation, width), title)


def confidence_chart(confidence: float, relaxation: float) -> "Markup":
    """Draw a confidence against what it had to exceed."""
    return _twice(
        lambda width: _confidence_svg(confidence, relaxation, width), "The confidence, and what it had to exceed"
    )


def frontier_chart(
    points: Sequence[tuple[float, float]], here: tuple[float, float], shown: tuple[float, float], alpha: float
) -> "Markup":
    """Draw the loss against the Guardian's share: a dot where alpha is now, a ring around the budget that is shown."""
    title = "Estimated loss against the share of questions that go to the Guardian"
    return _twice(lambda width: _frontier_svg(points, here, shown, alpha, width), title)


def _twice(draw: Callable[[int], tuple[str, int, str]], title: str) -> "Markup":
    from markupsafe import Markup, escape

    parts = [
        f'<svg class="{name}" role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}"{extra}>{body}</svg>'
        for name, width in (("wide", WIDE), ("narrow", NARROW))
        for body, height, extra in (draw(width),)
    ]
    return Markup("".join(parts))


def _text(x: float, y: float, text: str, kind: str = "tick", anchor: str = "start") -> str:
    from markupsafe import escape

    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _path(places: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _round_step(span: float) -> float:
    """Return a step of 1, 2 or 5 times a power of ten that is at least as large."""
    power = 10.0 ** floor(log10(span))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= span * (1 - 1e-9))


def _decimals(step: float) -> int:
    return max(0, -floor(log10(step) + 1e-9))


class _Frame:
    """Turns values into places between the edges of a picture."""

    def __init__(self, width: int, height: int, right: int) -> None:
        self.left, self.top, self.right, self.bottom = 46, 12, width - right, height - 26
        self.x0 = self.y0 = 0.0
        self.x1 = self.y1 = 1.0

    def x(self, value: float) -> float:
        share = (value - self.x0) / (self.x1 - self.x0)
        return self.left + min(max(share, 0.0), 1.0) * (self.right - self.left)

    def y(self, value: float) -> float:
        share = (value - self.y0) / (self.y1 - self.y0)
        return self.bottom - min(max(share, 0.0), 1.0) * (self.bottom - self.top)

    def grid(self) -> list[str]:
        """Draw levels with their numbers."""
        step = _round_step((self.y1 - self.y0) / 4)
        self.y0, self.y1 = step * floor(self.y0 / step + 1e-9), step * ceil(self.y1 / step - 1e-9)
        parts: list[str] = []
        for k in range(round(self.y0 / step), round(self.y1 / step) + 1):
            y = self.y(k * step)
            parts.append(f'<path class="grid" d="M{self.left} {y:.1f}H{self.right}"/>')
            parts.append(_text(self.left - 8, y + 4, f"{k * step:.{_decimals(step)}f}".replace("-", "−"), anchor="end"))
        return parts


def _loss_svg(course: LossCourse, width: int) -> tuple[str, int, str]:
    height, narrow = (240, False) if width == WIDE else (210, True)
    frame = _Frame(width, height, right=16 if narrow else 124)
    points = course.points
    late = [point for point in points if point.audits >= 100] or list(points)
    lines = [course.alpha, *([] if course.red is None else [course.red])]
    means = [point.mean for point in late if not isnan(point.mean)]
    frame.x0, frame.x1 = points[0].time, max(points[-1].time, points[0].time + 1)
    frame.y0 = min([0.0, *(point.lower for point in late[:1])])
    frame.y1 = max([1.25 * max(lines), *(point.upper for point in late[:1]), *(1.15 * mean for mean in means)])
    parts = frame.grid()
    above = [(frame.x(point.time), frame.y(point.upper)) for point in points]
    below = [(frame.x(point.time), frame.y(point.lower)) for point in reversed(points)]
    parts.append(f'<path class="band" d="{_path([*above, *below])}Z"/>')
    parts += _time_ticks(frame, narrow=narrow)
    known = [(frame.x(point.time), frame.y(point.mean)) for point in points if not isnan(point.mean)]
    labels: list[tuple[float, str, str]] = []
    for value, kind, name in ((course.alpha, "alpha", "alpha"), (course.red, "red", "red line")):
        if value is not None:
            y = frame.y(value)
            parts.append(f'<path class="{kind}" d="M{frame.left} {y:.1f}H{frame.right}"/>')
            labels.append((y, f"{name} {value:.3g}", f"{kind}-name"))
    marks = [(frame.x(time), name) for time, name in course.marks if frame.x0 <= time <= frame.x1]
    for place, (x, name) in enumerate(marks):
        tone = " alarm" if name == "alarm" else ""
        parts.append(f'<path class="mark{tone}" d="M{x:.1f} {frame.top}V{frame.bottom}"/>')
        left, anchor = (x - 4, "end") if x > width / 3 else (x + 4, "start")
        parts.append(_text(left, frame.top + 10 + _LINE * (place % 3), name, f"mark-name{tone}", anchor))
    if known:
        parts.append(f'<path class="mean" d="{_path(known)}"/>')
        parts.append(f'<circle class="dot" cx="{known[-1][0]:.1f}" cy="{known[-1][1]:.1f}" r="3.5"/>')
        labels.append((known[-1][1], f"{points[-1].mean:.3f}".replace("-", "−"), "value"))
    parts += _labels(frame, labels, narrow=narrow)
    parts.append(f'<path class="cursor" d="M0 {frame.top}V{frame.bottom}"/>')
    return "".join(parts), height, f' data-left="{frame.left}" data-span="{frame.right - frame.left}"'


def _labels(frame: _Frame, labels: list[tuple[float, str, str]], *, narrow: bool) -> list[str]:
    """Write what lines and the last point are, apart from each other; in a narrow picture inside it."""
    parts: list[str] = []
    last = -100.0
    for y, text, kind in sorted(labels):
        last = max(y, last + _LINE)
        if narrow:
            parts.append(_text(frame.right - 6, last - 5, text, kind, "end"))
        else:
            parts.append(_text(frame.right + 8, last + 4, text, kind))
    return parts


def _time_ticks(frame: _Frame, *, narrow: bool) -> list[str]:
    most = 3 if narrow else 6
    span = frame.x1 - frame.x0
    step = next((step for step in _STEPS if span / step <= most), _STEPS[-1])
    parts: list[str] = []
    for k in range(ceil(frame.x0 / step), floor(frame.x1 / step) + 1):
        then = datetime.fromtimestamp(k * step, UTC)
        text = f"{then.day} {then:%b}" if step >= 86400 else f"{then:%H:%M}" if step >= 60 else f"{then:%H:%M:%S}"
        x = frame.x(k * step)
        anchor = "start" if x < frame.left + 12 else "end" if x > frame.right - 12 else "middle"
        parts.append(_text(x, frame.bottom + 18, text, anchor=anchor))
    return parts


def _score_svg(bars: Sequence[Bar], relaxation: float | None, width: int) -> tuple[str, int, str]:
    narrow = width == NARROW
    row, top = (52, 8) if narrow else (39, 34)
    left, right = (0, width - 96) if narrow else (190, width - 190)
    scores = [bar.score for bar in bars]
    highest, lowest = max(scores), min(0.0, *scores)
    span = (highest - lowest) or 1.0
    bottom = top + row * len(bars)

    def x(score: float) -> float:
        return left + (score - lowest) / span * (right - left)

    parts: list[str] = []
    edge = highest if relaxation is None else max(highest - relaxation, lowest)
    begins = relaxation is not None and highest - relaxation > lowest  # else everything is a candidate
    if relaxation is not None:
        parts.append(f'<rect class="zone" x="{x(edge):.1f}" y="{top}" width="{x(highest) - x(edge):.1f}" '
                     f'height="{bottom - top}"/>')  # fmt: skip
    if begins:
        parts.append(f'<path class="edge" d="M{x(edge):.1f} {top}V{bottom}"/>')
    if not narrow:
        for place, name in ((width - 150, "score"), (width - 92, "gap")):
            parts.append(_text(place, 22, name, anchor="end"))
        parts.append(_text(width - 34, 22, "chosen", anchor="middle"))
    for k, bar in enumerate(bars):
        parts += _bar(bar, top + row * k, x, lowest, width, row)
    if relaxation is not None:
        close = begins and x(highest) - x(edge) < 60
        if begins:
            parts.append(_text(x(edge) - (4 if close else 0), bottom + 18, f"{edge:.2f}".replace("-", "−"),
                               anchor="end" if close else "middle"))  # fmt: skip
        parts.append(_text(x(highest), bottom + 18, f"{highest:.2f}", anchor="start" if close else "middle"))
    return "".join(parts), bottom + 28, ""


def _bar(bar: Bar, y: float, x: Callable[[float], float], lowest: float, width: int, row: int) -> list[str]:
    narrow, kind = width == NARROW, "candidate" if bar.candidate else "other"
    place = y + (30 if narrow else 12)
    start, stop = x(min(0.0, bar.score) if lowest < 0 else lowest), x(bar.score)
    length = max(stop - start, 6.0)
    text = bar.text if len(bar.text) <= (40 if narrow else 21) else f"{bar.text[: 38 if narrow else 19]}…"
    parts = [
        f'<path class="grid" d="M0 {y + row:.1f}H{width}"/>',
        _text(0, y + (20 if narrow else 24), text, f"option {kind}"),
        f'<rect class="bar {kind}" x="{start + 0.75:.1f}" y="{place:.1f}" width="{length:.1f}" height="15" rx="4"/>',
    ]
    numbers = f"{bar.score:.2f}".replace("-", "−"), f"{bar.gap:.2f}"
    if narrow:
        parts.append(_text(width - 26, y + 42, numbers[0], f"figure {kind}", "end"))
    else:
        parts.append(_text(width - 150, y + 24, numbers[0], f"figure {kind}", "end"))
        parts.append(_text(width - 92, y + 24, numbers[1], f"figure {kind}", "end"))
    if bar.chosen:
        parts.append(_star(width - (10 if narrow else 34), y + (37 if narrow else 19.5)))
    return parts


def _star(x: float, y: float) -> str:
    shape = ((0, -10), (2.4, -3.2), (9.5, -3.1), (3.8, 1.2), (5.9, 8.1), (0, 4), (-5.9, 8.1), (-3.8, 1.2),
             (-9.5, -3.1), (-2.4, -3.2))  # fmt: skip
    return f'<path class="star" d="{_path((x + dx, y + dy) for dx, dy in shape)}Z"/>'


def _confidence_svg(confidence: float, relaxation: float, width: int) -> tuple[str, int, str]:
    highest = max(1.0, confidence, relaxation)
    bar, line = confidence / highest * (width - 2), relaxation / highest * (width - 2)
    kind = "other" if confidence > relaxation else "candidate"
    anchor = "end" if line > width / 2 else "start"
    parts = [
        f'<rect class="zone" x="0" y="8" width="{line:.1f}" height="44"/>',
        f'<rect class="bar {kind}" x="1" y="20" width="{max(bar, 4.0):.1f}" height="20" rx="4"/>',
        f'<path class="edge" d="M{line:.1f} 8V52"/>',
        _text(line + (-6 if anchor == "end" else 6), 70, f"has to exceed {relaxation:.3f}", anchor=anchor),
    ]
    return "".join(parts), 78, ""


def _frontier_svg(
    points: Sequence[tuple[float, float]],
    here: tuple[float, float],
    shown: tuple[float, float],
    alpha: float,
    width: int,
) -> tuple[str, int, str]:
    narrow = width == NARROW
    frame = _Frame(width, 210, right=16 if narrow else 96)
    frame.y1 = max([1.3 * alpha, *(loss for _, loss in points)])
    parts = frame.grid()
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        anchor = "end" if narrow and share == 1 else "middle"
        parts.append(_text(frame.x(share), frame.bottom + 18, f"{100 * share:.0f} %", anchor=anchor))
    y = frame.y(alpha)
    parts.append(f'<path class="alpha" d="M{frame.left} {y:.1f}H{frame.right}"/>')
    parts += _labels(frame, [(y, f"alpha {alpha:.3g}", "alpha-name")], narrow=narrow)
    parts.append(f'<path class="mean" d="{_path((frame.x(share), frame.y(loss)) for share, loss in points)}"/>')
    for (share, loss), kind, radius in ((here, "dot", 5), (shown, "ring", 9)):
        parts.append(f'<circle class="{kind}" cx="{frame.x(share):.1f}" cy="{frame.y(loss):.1f}" r="{radius}"/>')
    parts.append(f'<path class="cursor" d="M0 {frame.top}V{frame.bottom}"/>')
    return "".join(parts), 210, f' data-left="{frame.left}" data-span="{frame.right - frame.left}"'
