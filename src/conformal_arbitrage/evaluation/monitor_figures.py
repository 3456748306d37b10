"""What a monitor saw, as figures: the limits of the running loss with alpha and the red line, and the evidence below them.

Knows nothing of stores or how losses are computed; imports matplotlib only when something is drawn.
"""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations are incomplete.

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.evaluation.figures import save_drawing
from conformal_arbitrage.evaluation.simulation import Simulation
from conformal_arbitrage.monitoring.history import LedgerHistory
from conformal_arbitrage.monitoring.lines import LOG_AMBER, Lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREY, _RED, _GREEN, _SAFE = "#0072B2", "#E69F00", "#767676", "#B3261E", "#00735C", "#F3E3C3"
_SIZE = (8.6, 5.6)
_SHORTEST_WINDOW = 200
_FEWEST_DRAWN = 20
"""Limits of fewer audits than this fill the whole figure and say nothing."""
_MOST_NAMED = 8
"""Of more moments than this, only the last are named."""
_LEAST_EVIDENCE, _MOST_EVIDENCE = 1e-3, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnLedger:
    """A ledger to draw.

    Attributes:
        x: where its points stand: decisions, or days since 1970.
        start: where it begins.
        stop: where it ends.
        history: the points themselves.
        bound: the loss bound, by which shares are multiplied.
    """

    x: Floats
    start: float
    stop: float
    history: LedgerHistory
    bound: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnMoment:
    """Something to mark: a change of the Primary, an alarm, a new certificate, or a lift, with a few words."""

    kind: Literal["change", "red", "installed", "lifted"]
    x: float
    text: str


_MARKS = {"change": (_ORANGE, "--"), "red": (_RED, "-"), "installed": (_GREEN, "-."), "lifted": (_GREY, ":")}


def save_simulation(simulation: Simulation, path: str | Path) -> None:
    """Draw a simulation and save it; the file extension selects the format (.png, .svg, .pdf)."""
    watched, bound = simulation.courses["with"].watched, simulation.certificate.loss_bound
    reds = [moment.at for moment in simulation.moments if moment.kind == "red"]
    total = simulation.scenario.decisions
    ledgers = [
        DrawnLedger(
            x=(one.drawn[one.history.audits - 1] + 1).astype(np.float64),
            start=float(one.drawn[0]) if len(one.drawn) else 0.0,
            stop=float(reds[k]) if k < len(reds) else float(total),
            history=one.history,
            bound=bound,
        )
        for k, one in enumerate(watched)
    ]
    names = {"change": "the Primary becomes worse", "red": "red: safe mode", "renewal": "new certificate"}
    moments = [
        DrawnMoment(kind="installed" if one.kind == "renewal" else one.kind, x=one.at, text=names[one.kind])
        for one in simulation.moments
    ]

    def losses(axes: "Axes") -> float:
        return _draw_courses(axes, simulation)

    save_drawing(path, lambda axes: _draw(axes, ledgers, moments, losses=losses, label="decisions"), size=_SIZE, rows=2)


def save_history(
    ledgers: Sequence[DrawnLedger], moments: Sequence[DrawnMoment], path: str | Path, *, title: str
) -> None:
    """Draw the ledgers of a policy over time and save them, as `save_simulation` does; x is in days since 1970."""

    def draw(axes: "Sequence[Axes]") -> None:
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

        _draw(axes, ledgers, moments, losses=None, label="")
        axes[0].set_title(title, loc="left", fontsize=10)
        dates = AutoDateLocator(maxticks=8)
        axes[1].xaxis.set_major_locator(dates)
        axes[1].xaxis.set_major_formatter(ConciseDateFormatter(dates))

    save_drawing(path, draw, size=_SIZE, rows=2)


def _draw(
    axes: "Sequence[Axes]",
    ledgers: Sequence[DrawnLedger],
    moments: Sequence[DrawnMoment],
    *,
    losses: "Callable[[Axes], float] | None",
    label: str,
) -> None:
    top, bottom = axes
    highest = 0.0 if losses is None else losses(top)
    for k, ledger in enumerate(ledgers):
        highest = max(highest, _draw_limits(top, ledger, first=k == 0))
        _draw_evidence(bottom, ledger)
    _shade(axes, ledgers, moments)
    for moment in moments:
        color, style = _MARKS[moment.kind]
        for one in axes:
            one.axvline(moment.x, color=color, ls=style, lw=1.1, zorder=1)
    _name_moments(top, moments[-_MOST_NAMED:])
    top.set_ylim(min((_lowest(ledger) for ledger in ledgers), default=0.0), 1.25 * highest)
    top.set_ylabel("loss per decision")
    bottom.set_ylabel("evidence of a\nhigher loss")
    bottom.set_xlabel(label)
    if label:
        bottom.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    starts, stops = [ledger.start for ledger in ledgers], [ledger.stop for ledger in ledgers]
    if ledgers:
        top.set_xlim(min(starts), max(stops))
        _name_evidence(bottom, ledgers[-1].history.lines)
    figure = top.get_figure(root=True)
    if figure is not None:
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)


def _draw_limits(axes: "Axes", ledger: DrawnLedger, *, first: bool) -> float:
    """Draw limits and lines of a ledger; return the highest value that should be in sight."""
    history, bound = ledger.history, ledger.bound
    shown = history.audits >= _FEWEST_DRAWN
    x, span = ledger.x[shown], (ledger.start, ledger.stop)
    name = "limits of the running loss, valid at every moment"
    axes.fill_between(
        x, bound * history.lower[shown], bound * history.upper[shown],
        color=_BLUE, alpha=0.16, lw=0, label=name if first else None, zorder=2,
    )  # fmt: skip
    axes.plot(
        x, bound * history.mean[shown], color=_BLUE, lw=1.6, label="running loss of audits" if first else None, zorder=4
    )
    alpha, red = bound * history.lines.alpha, history.lines.red
    name = f"α = {alpha:.3g}{', also the red line' if red == history.lines.alpha else ''}"
    axes.plot(span, [alpha] * 2, color="black", lw=1.1, label=name if first else None, zorder=3)
    if red is not None and red > history.lines.alpha:
        name = f"red line, {bound * red:.3g}"
        axes.plot(span, [bound * red] * 2, color=_RED, lw=1.1, ls="--", label=name if first else None, zorder=3)
    late = history.audits >= max(5 * _FEWEST_DRAWN, 0)
    return max([bound * (red or 0.0), 1.6 * alpha, *(bound * history.upper[late]).tolist()[:1]])


def _lowest(ledger: DrawnLedger) -> float:
    """Return the lowest value that should be in sight: 0, or below it if gains count."""
    late = ledger.history.audits >= 5 * _FEWEST_DRAWN
    return ledger.bound * min([0.0, *ledger.history.lower[late].tolist()[:1]])


def _draw_evidence(axes: "Axes", ledger: DrawnLedger) -> None:
    evidence = np.clip(ledger.history.evidence, log(_LEAST_EVIDENCE), log(_MOST_EVIDENCE))
    axes.semilogy([ledger.start, *ledger.x], np.exp([0.0, *evidence]), color=_BLUE, lw=1.3)


def _name_evidence(axes: "Axes", lines: Lines) -> None:
    """Draw how much evidence is enough, and say for what."""
    red = lines.red is not None
    enough, what = exp(lines.log_red if red else LOG_AMBER), "red" if red else "amber"
    axes.axhline(enough, color=_RED, lw=1.0, ls="--")
    axes.annotate(
        f"{what} from {enough:.0f}", (0, enough), xycoords=("axes fraction", "data"), xytext=(4, 3),
        textcoords="offset points", fontsize=8, color=_RED,
    )  # fmt: skip
    axes.set_ylim(top=max(axes.get_ylim()[1], 5 * enough))


def _shade(axes: "Sequence[Axes]", ledgers: Sequence[DrawnLedger], moments: Sequence[DrawnMoment]) -> None:
    """Mark safe mode: from an alarm to the next certificate, lift, or the end."""
    end = max((ledger.stop for ledger in ledgers), default=0.0)
    for red in (moment for moment in moments if moment.kind == "red"):
        later = [moment.x for moment in moments if moment.kind in ("installed", "lifted") and moment.x > red.x]
        for one in axes:
            one.axvspan(red.x, min(later, default=end), color=_SAFE, lw=0, zorder=0)


def _name_moments(axes: "Axes", moments: Sequence[DrawnMoment]) -> None:
    """Write what each mark means above the figure, one line up for each that stands close to the one before."""
    for k, moment in enumerate(moments):
        axes.annotate(
            moment.text, (moment.x, 1.0), xycoords=("data", "axes fraction"), xytext=(3, 2 + 10 * (len(moments) - 1 - k)),
            textcoords="offset points", fontsize=8, color=_MARKS[moment.kind][0], annotation_clip=False,
        )  # fmt: skip


def _draw_courses(axes: "Axes", simulation: Simulation) -> float:
    """Draw the true loss over a moving window, with the monitor and without; return the highest value."""
    total, bound = simulation.scenario.decisions, simulation.certificate.loss_bound
    window = max(total // 50, _SHORTEST_WINDOW)
    highest = 0.0
    for way, color, style in (("without", _GREY, ":"), ("with", _ORANGE, "-")):
        sums = np.concatenate([[0.0], np.cumsum(simulation.courses[way].losses)])
        ends = np.unique(np.linspace(window, total, 400).astype(np.int64))
        means = bound * (sums[ends] - sums[ends - window]) / window
        name = f"true loss of the last {window:,} decisions, {way} monitor"
        axes.plot(ends, means, color=color, ls=style, lw=1.2, label=name, zorder=2)
        highest = max(highest, float(means.max()))
    return highest
