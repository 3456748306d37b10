"""The figure of a report: limits, mean and lines of a policy's ledgers over time, as SVG that stands in a page.

Knows nothing of stores or pages.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from math import ceil, floor, log10

import numpy as np

from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.evaluation.monitor_figures import DrawnLedger, DrawnMoment

_WIDTH, _HEIGHT = 760, 310
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 46, 26
_FEWEST = 20
_FEW_DAYS = 5
"""Below this many, dates have hours."""
_AN_HOUR = 1 / 24
"""Up to this many days, only the time is shown, with seconds."""
_ROWS = {"change": 11, "installed": 11, "red": 23, "lifted": 35}
"""How far down the words of a mark stand, so that marks of different kinds do not meet."""
_COLORS = {"change": "#b26a00", "red": "#b3261e", "installed": "#00735c", "lifted": "#555"}


def figure_svg(ledgers: Sequence[DrawnLedger], moments: Sequence[DrawnMoment], *, start: float, stop: float) -> str:
    """Return the figure between two times; x is in days since 1970.

    Args:
        ledgers: what to draw.
        moments: what to mark.
        start: the first day in sight.
        stop: the last one.
    """
    shown = [ledger for ledger in ledgers if (ledger.history.audits >= _FEWEST).any()]
    if not shown:
        return ""
    frame = _Frame(shown, start, stop)
    parts = [*frame.axes(), *(part for ledger in shown for part in frame.ledger(ledger))]
    parts += [part for moment in moments if start <= moment.x <= stop for part in frame.moment(moment)]
    title = "Loss of audited decisions over time with its limits, alpha and the red line"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
        f'<clipPath id="inside"><rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" '
        f'height="{_HEIGHT - _TOP - _BOTTOM}"/></clipPath>{"".join(parts)}</svg>'
    )


class _Frame:
    """Turns days and losses into places in the picture."""

    def __init__(self, ledgers: Sequence[DrawnLedger], start: float, stop: float) -> None:
        self._start, self._stop = start, max(stop, start + 1e-6)
        highest = lowest = 0.0
        for ledger in ledgers:
            enough = ledger.history.audits >= 5 * _FEWEST
            upper = float(ledger.history.upper[enough][:1].max(initial=0.0))
            red = ledger.history.lines.red or 0.0
            mean = float(np.nan_to_num(ledger.history.mean[ledger.history.audits >= _FEWEST]).max(initial=0.0))
            highest = max(highest, ledger.bound * max(upper, 1.3 * red, 1.6 * ledger.history.lines.alpha, 1.2 * mean))
            lower = float(ledger.history.lower[enough][:1].min(initial=0.0))
            lowest = min(lowest, ledger.bound * lower)  # below 0 where gains count
        self._step = _round_step((highest - lowest) / 4)
        self._top = self._step * ceil(highest / self._step)
        self._low = self._step * floor(lowest / self._step)

    def x(self, day: float) -> float:
        inside = min(max(day, self._start), self._stop)
        return round(_LEFT + (inside - self._start) / (self._stop - self._start) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, loss: float) -> float:
        share = min(max((loss - self._low) / (self._top - self._low), -0.05), 1.2)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def axes(self) -> list[str]:
        """Draw the grid with its numbers and dates."""
        parts: list[str] = []
        for k in range(round(self._low / self._step), round(self._top / self._step) + 1):
            y = self.y(k * self._step)
            parts.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
            parts.append(
                f'<text class="tick" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{k * self._step:.4g}</text>'
            )
        days, form = np.linspace(self._start, self._stop, 6), "%d %b"
        if self._stop - self._start < _FEW_DAYS:
            form = "%d %b %H:%M" if self._stop - self._start > _AN_HOUR else "%H:%M:%S"
        for k, day in enumerate(days.tolist()):
            anchor = "start" if k == 0 else "end" if k == len(days) - 1 else "middle"
            text = datetime.fromtimestamp(86400 * day, UTC).strftime(form).lstrip("0")
            parts.append(f'<text class="tick" x="{self.x(day)}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{text}</text>')
        return parts

    def ledger(self, ledger: DrawnLedger) -> list[str]:
        """Draw limits, mean and lines of one ledger."""
        history = ledger.history
        shown = (history.audits >= _FEWEST) & (ledger.x >= self._start) & (ledger.x <= self._stop)
        if ledger.stop < self._start or ledger.start > self._stop:
            return []
        x, bound, lines = ledger.x[shown], ledger.bound, history.lines
        from_, to = self.x(ledger.start), self.x(ledger.stop)
        parts = [f'<path class="alpha" d="M{from_} {self.y(bound * lines.alpha)}H{to}"/>']
        if lines.red is not None and lines.red > lines.alpha:
            parts.append(f'<path class="red" d="M{from_} {self.y(bound * lines.red)}H{to}"/>')
        if not x.size:
            return parts
        up, down = self._points(x, bound * history.upper[shown]), self._points(x, bound * history.lower[shown])
        band = f'<path class="band" clip-path="url(#inside)" d="M{"L".join([*up, *reversed(down)])}Z"/>'
        mean = self._points(x, bound * history.mean[shown])
        return [band, *parts, f'<path class="mean" clip-path="url(#inside)" d="M{"L".join(mean)}"/>']

    def moment(self, moment: DrawnMoment) -> list[str]:
        """Mark one moment, with its words above."""
        x, color = self.x(moment.x), _COLORS[moment.kind]
        anchor = "end" if x > _WIDTH - 120 else "start"
        row = _ROWS[moment.kind]
        words = (
            f'<text class="mark" fill="{color}" x="{x}" y="{row}" text-anchor="{anchor}">{escape(moment.text)}</text>'
        )
        return [f'<path stroke="{color}" stroke-dasharray="4 3" d="M{x} {row + 4}V{_HEIGHT - _BOTTOM}"/>', words]

    def _points(self, x: Floats, losses: Floats) -> list[str]:
        known = np.nan_to_num(losses)
        return [f"{self.x(day)} {self.y(loss)}" for day, loss in zip(x.tolist(), known.tolist(), strict=True)]


def _round_step(rough: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... times a power of ten that is not below a number."""
    power = 10.0 ** floor(log10(rough)) if rough > 0 else 1.0
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
