"""Frontiers as figures: an outcome against cost, loss or another outcome.

Shapes and shades carry the meaning as well as colours, so that the figure survives print and colour blindness.
"""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations are incomplete.

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from conformal_arbitrage.core.gaps import Floats
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.evaluation.frontier import Frontier, FrontierPoint
from conformal_arbitrage.scorelog.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREY, _BLACK = "#0072B2", "#E69F00", "#767676", "#000000"
FORMATS = (".png", ".svg", ".pdf")
_LABELS = {"cost": "cost, dollars per 1000 queries", "loss": "loss on held-out rows"}


def plot(frontier: Frontier, path: str | Path, *, x: str = "cost", y: str = "correct") -> None:
    """Draw a frontier and save it; the ending of the name says the format (.png, .svg, .pdf).

    Args:
        frontier: the sweep.
        path: where to.
        x: "cost", "loss" or the name of an outcome.
        y: the name of an outcome, or "loss".
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("figures need matplotlib: pip install matplotlib") from error
    target = Path(path)
    if target.suffix not in FORMATS:
        raise OptionError(f"{target}: a figure's name ends in {', '.join(FORMATS)}")
    name = "cost_per_1000" if x == "cost" else x
    for axis in (name, y):
        if frontier.points[0].values(axis) is None:
            known = ", ".join(("cost", "loss", *frontier.points[0].outcomes))
            need = (
                "give --primary-cost and --guardian-cost, or --x loss"
                if axis == "cost_per_1000"
                else f"there is {known}"
            )
            raise OptionError(f"there is no '{x if axis == name else y}' to draw; {need}")
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, frontier, name, y)
    axes.set_xlabel(_LABELS.get(x, x))
    axes.set_ylabel(f"{y}, mean over held-out rows")
    axes.legend(frameon=False, loc="best", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(target) as draft:
        figure.savefig(draft, dpi=160, format=target.suffix.lstrip("."))


def _draw(axes: "Axes", frontier: Frontier, x: str, y: str) -> None:
    conformal = frontier.of("conformal")
    (primary,), (guardian,) = frontier.of("primary"), frontier.of("guardian")
    ends = [_place(primary, x, y), _place(guardian, x, y)]
    axes.plot(*np.transpose(ends), "--", color=_GREY, lw=1.2, zorder=1, label="a coin between the two")
    for point in conformal:
        axes.scatter(_runs(point, x), _runs(point, y), s=7, color=_BLUE, alpha=0.22, lw=0, zorder=2)
    means = np.array([_place(point, x, y) for point in conformal])
    spread = np.array([[point.summary(k).get("std") or 0.0 for k in (x, y)] for point in conformal])
    axes.errorbar(
        means[:, 0], means[:, 1], spread[:, 1], spread[:, 0],
        fmt="o-", color=_BLUE, ecolor=_BLUE, ms=6, lw=1.2, elinewidth=1, capsize=2, zorder=3,
        label=f"conformal, mean ± sd of {frontier.trials} trials",
    )  # fmt: skip
    rising = (ends[1][0] - ends[0][0]) * (ends[1][1] - ends[0][1]) > 0
    aside = (7, -11) if rising else (7, 6)
    for point, place in zip(conformal, means, strict=True):
        axes.annotate(f"α = {point.alpha:g}", place, xytext=aside, textcoords="offset points", fontsize=8, color=_BLACK)
        if x == "loss":
            label = "the budgets" if point is conformal[0] else None
            axes.axvline(point.alpha or 0.0, color=_GREY, lw=0.9, ls=":", zorder=0, label=label)
    coins = frontier.of("random")
    if coins:
        places = np.array([_place(point, x, y) for point in coins])
        axes.scatter(
            places[:, 0], places[:, 1], marker="D", s=34, facecolor="none", color=_GREY, label="coin", zorder=3
        )
    for end, name, colour in zip(ends, ("Primary alone", "Guardian alone"), (_ORANGE, _BLACK), strict=True):
        axes.scatter(*end, marker="*", s=190, color=colour, edgecolor=_BLACK, lw=0.7, label=name, zorder=4)


def _runs(point: FrontierPoint, name: str) -> Floats:
    values = point.values(name)
    return np.zeros(0) if values is None else values


def _place(point: FrontierPoint, x: str, y: str) -> tuple[float, float]:
    return point.mean(x) or 0.0, point.mean(y) or 0.0
