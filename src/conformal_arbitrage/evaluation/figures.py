"""Frontiers and comparisons as figures: an outcome against cost, loss or another outcome.

Markers and line styles carry the meaning as well as colors, so that a figure survives print and color blindness.
Knows nothing of how a frontier was computed; imports matplotlib only when something is drawn.
"""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations are incomplete.

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from conformal_arbitrage.core.arrays import Floats
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.evaluation.comparison import RuleComparison
from conformal_arbitrage.evaluation.frontier import Frontier, FrontierPoint
from conformal_arbitrage.scorelog.files import replacing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREY, _BLACK = "#0072B2", "#E69F00", "#767676", "#000000"
_SIZE = (7, 4.6)
_LABELS = {"cost": "cost, dollars per 1000 queries", "loss": "loss on held-out rows"}
_NO_MATPLOTLIB = "figures need matplotlib: pip install matplotlib"
FIGURE_FORMATS = (".png", ".svg", ".pdf")
_MOST_DOTS = 100
"""Trials drawn for each budget: more of them hide the means."""


def save_figure(frontier: Frontier, path: str | Path, *, x: str = "cost", y: str = "correct") -> None:
    """Draw a frontier and save it; the file extension selects the format (.png, .svg, .pdf).

    Args:
        frontier: the sweep.
        path: the file to write.
        x: "cost", "loss" or the name of an outcome.
        y: the name of an outcome, or "loss".
    """
    save_drawing(path, lambda axes: draw_frontier(axes[0], frontier, x=x, y=y))


def save_comparison(comparison: RuleComparison, path: str | Path, *, alpha: float) -> None:
    """Draw a comparison at one budget and save it, as `save_figure` does."""
    save_drawing(path, lambda axes: draw_comparison(axes[0], comparison, alpha))


def save_drawing(
    path: str | Path, draw: "Callable[[Sequence[Axes]], object]", *, size: tuple[float, float] = _SIZE, rows: int = 1
) -> None:
    """Draw on the axes of a new figure and save it.

    Args:
        path: the file to write; its extension selects the format.
        draw: what to draw.
        size: width and height in inches.
        rows: axes one above the other, the first twice as high, on one x-axis.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(_NO_MATPLOTLIB) from error
    target = Path(path)
    if target.suffix not in FIGURE_FORMATS:
        raise OptionError(f"{target}: the name of a figure must end in {', '.join(FIGURE_FORMATS)}")
    figure = Figure(figsize=size, layout="constrained")
    ratios = [2, *[1] * (rows - 1)]
    draw(figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0].tolist())
    with replacing(target) as draft:
        figure.savefig(draft, dpi=160, format=target.suffix.lstrip("."))


def new_axes() -> "Axes":
    """Return the axes of a new pyplot figure, which notebooks show by themselves."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise OptionError(_NO_MATPLOTLIB) from error
    return pyplot.subplots(figsize=_SIZE, layout="constrained")[1]


def draw_frontier(axes: "Axes", frontier: Frontier, *, x: str | None = None, y: str | None = None) -> "Axes":
    """Draw a frontier on axes and return them.

    Args:
        axes: where to draw.
        frontier: the sweep.
        x: "cost", "loss" or the name of an outcome; by default the cost if it is known, otherwise the loss.
        y: the name of an outcome, or "loss"; by default the first outcome.
    """
    first = frontier.points[0]
    across = x or ("loss" if first.values("cost_per_1000") is None else "cost")
    up = y or next(iter(first.outcomes), "loss")
    for name in (across, up):
        _check_axis(first, name)
    _draw(axes, frontier, _figure_name(across), _figure_name(up))
    axes.set_xlabel(_LABELS.get(across, across))
    axes.set_ylabel(f"{up}, mean over held-out rows")
    axes.legend(frameon=False, loc="best", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def draw_comparison(axes: "Axes", comparison: RuleComparison, alpha: float) -> "Axes":
    """Draw how often each rule asks the Guardian at one budget, with its loss beside it, and return the axes.

    Blue bars are ours; hatched ones break the budget by more than three standard errors.
    """
    rules = [rule for rule in comparison.rules if rule.alpha == alpha]
    if not rules:
        known = ", ".join(f"{a:g}" for a in sorted({rule.alpha for rule in comparison.rules}))
        raise OptionError(f"there is no budget {alpha:g} in this comparison; it has {known}")
    rules.sort(key=lambda rule: -rule.deferred)
    bars = axes.barh(
        [rule.rule for rule in rules],
        [rule.deferred for rule in rules],
        color=[_BLUE if rule.rule.startswith("ours") else _GREY for rule in rules],
        height=0.62,
    )
    for place, rule in enumerate(rules):
        net = rule.net_loss is not None and "net" in rule.rule
        shown = f"net loss {rule.net_loss:.3f}" if net else f"loss {rule.loss:.3f}"
        bars.patches[place].set_hatch("////" if rule.breaks else "")
        text = f"{100 * rule.deferred:.0f} %, {shown}{', breaks the budget' if rule.breaks else ''}"
        axes.annotate(
            text, (rule.deferred, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8
        )  # fmt: skip
    axes.set_xlim(0, 1.32)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlabel(f"queries sent to the Guardian at α = {alpha:g}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=9)
    return axes


def _figure_name(name: str) -> str:
    return "cost_per_1000" if name == "cost" else name


def _check_axis(point: FrontierPoint, name: str) -> None:
    if point.values(_figure_name(name)) is None:
        known = ", ".join(("cost", "loss", *point.outcomes))
        remedy = "give --primary-cost and --guardian-cost, or --x loss" if name == "cost" else f"there is {known}"
        raise OptionError(f"there is no '{name}' to draw; {remedy}")


def _draw(axes: "Axes", frontier: Frontier, x: str, y: str) -> None:
    (primary,), (guardian,) = frontier.of("primary"), frontier.of("guardian")
    ends = [_place(primary, x, y), _place(guardian, x, y)]
    axes.plot(*np.transpose(ends), "--", color=_GREY, lw=1.2, zorder=1, label="random routing between the two")
    rising = (ends[1][0] - ends[0][0]) * (ends[1][1] - ends[0][1]) > 0
    _draw_conformal(axes, frontier, x, y, label_offset=(7, -11) if rising else (7, 6))
    random = frontier.of("random")
    if random:
        places = np.array([_place(point, x, y) for point in random])
        axes.scatter(
            places[:, 0],
            places[:, 1],
            marker="D",
            s=34,
            facecolor="none",
            color=_GREY,
            label="random routing",
            zorder=3,
        )
    for end, name, color in zip(ends, ("Primary alone", "Guardian alone"), (_ORANGE, _BLACK), strict=True):
        axes.scatter(*end, marker="*", s=190, color=color, edgecolor=_BLACK, lw=0.7, label=name, zorder=4)


def _draw_conformal(axes: "Axes", frontier: Frontier, x: str, y: str, *, label_offset: tuple[int, int]) -> None:
    conformal = frontier.of("conformal")
    for point in conformal:
        dots = _trials(point, x)[:_MOST_DOTS], _trials(point, y)[:_MOST_DOTS]
        axes.scatter(*dots, s=7, color=_BLUE, alpha=0.22, lw=0, zorder=2)
    means = np.array([_place(point, x, y) for point in conformal])
    spread = np.array([[point.summary(k).get("std") or 0.0 for k in (x, y)] for point in conformal])
    axes.errorbar(
        means[:, 0], means[:, 1], spread[:, 1], spread[:, 0],
        fmt="o-", color=_BLUE, ecolor=_BLUE, ms=6, lw=1.2, elinewidth=1, capsize=2, zorder=3,
        label=f"conformal, mean ± sd of {frontier.trials} trials",
    )  # fmt: skip
    for point, place in zip(conformal, means, strict=True):
        axes.annotate(
            f"α = {point.alpha:g}", place, xytext=label_offset, textcoords="offset points", fontsize=8, color=_BLACK
        )
        if x == "loss":
            label = "budgets" if point is conformal[0] else None
            axes.axvline(point.alpha or 0.0, color=_GREY, lw=0.9, ls=":", zorder=0, label=label)


def _trials(point: FrontierPoint, name: str) -> Floats:
    values = point.values(name)
    return np.zeros(0) if values is None else values


def _place(point: FrontierPoint, x: str, y: str) -> tuple[float, float]:
    return point.mean(x) or 0.0, point.mean(y) or 0.0
