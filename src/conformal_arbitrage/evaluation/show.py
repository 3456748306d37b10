"""Figures and tables of frontiers, comparisons and monitors."""

# pyright: reportUnknownMemberType=false
# matplotlib's annotations are incomplete.
import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from conformal_arbitrage.core.exact import Floats
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.evaluation.compare import RuleComparison
from conformal_arbitrage.evaluation.frontier import Frontier, FrontierPoint
from conformal_arbitrage.evaluation.simulation import Simulation
from conformal_arbitrage.monitoring.lines import LOG_AMBER, Lines
from conformal_arbitrage.monitoring.monitor import LedgerHistory
from conformal_arbitrage.scorelog.tables import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- Frontiers as text ---


_NAMES = {
    "primary": "Primary alone",
    "guardian": "Guardian alone",
    "random": "random routing",
    "cost_matched": "random routing, same cost",
    "conformal": "conformal",
}
_TITLES = {
    "loss": "loss",
    "cost_per_1000": "$ / 1000",
    "deferred": "sent to the Guardian",
    "candidates": "candidates",
    "relaxation": "relaxation",
    "delta": "delta",
}
_LEAST = ("relaxation", "candidates", "delta")
"""Columns that a narrow table does without, the first to go first; delta follows from the other rows."""


def policy_name(point: FrontierPoint) -> str:
    """Return the name of a policy for people."""
    name = _NAMES[point.policy]
    if point.policy == "random":
        return f"{name} {point.probability:g}"
    return name if point.alpha is None else f"{name}, alpha {point.alpha:g}"


def cells(
    frontier: Frontier, *, spread: bool = True, standard_error: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: the mean of each figure that is defined for at least one policy, and its spread.

    Args:
        spread: whether to show a spread beside each mean.
        standard_error: show the standard error of the mean instead of the standard deviation over trials.
    """
    shown_error = frontier.trials**0.5 if standard_error else 1.0
    divisor = shown_error if spread else None
    outcomes = list(frontier.points[0].outcomes)
    wanted = {**{name: name for name in outcomes}, **_TITLES}
    shown = {name: title for name, title in wanted.items() if any(p.mean(name) is not None for p in frontier.points)}
    rows = [[policy_name(p), *(_cell(p, name, divisor=divisor) for name in shown)] for p in frontier.points]
    return ["policy", *shown.values()], rows


def expendable(header: Sequence[str]) -> list[str]:
    """Return the titles of a frontier's columns but loss, cost and the share of deferrals, the first to go first."""
    outcomes = [title for title in reversed(header[1:]) if title not in _TITLES.values()]
    return [*_LEAST, *outcomes]


def _cell(point: FrontierPoint, name: str, *, divisor: float | None) -> str:
    summary = point.summary(name)
    mean, std = summary.get("mean"), summary.get("std")
    if mean is None:
        return "-"
    finer = 0 if divisor in (None, 1.0) else 1  # a standard error is smaller than a deviation
    places = finer + (1 if name == "deferred" else (2 if name in ("cost_per_1000", "candidates") else 3))
    factor, unit = (100, " %") if name == "deferred" else (1, "")
    sign = "+" if name == "delta" else ""
    text = f"{factor * mean:{sign}.{places}f}"
    if divisor is None or std is None:
        return text + unit
    return f"{text} ± {factor * std / divisor:.{places}f}{unit}"


def to_markdown(frontier: Frontier) -> str:
    """Return a Markdown table."""
    header, rows = cells(frontier)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def to_latex(frontier: Frontier) -> str:
    """Return a LaTeX table for the booktabs package."""
    header, rows = cells(frontier)
    body = [" & ".join(map(_tex, row)) + r" \\" for row in rows]
    top = " & ".join(map(_tex, header)) + r" \\"
    columns = "l" + "r" * (len(header) - 1)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", top, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _tex(text: str) -> str:
    for plain, tex in (("$", r"\$"), ("%", r"\%"), ("_", r"\_"), (" ± ", r" $\pm$ ")):
        text = text.replace(plain, tex)
    return text


def to_csv(frontier: Frontier) -> str:
    """Return a CSV table with the mean and standard deviation of every figure, unrounded."""
    outcomes = list(frontier.points[0].outcomes)
    names = ["loss", "relaxation", "deferred", "candidates", "cost_per_1000", "delta", *outcomes]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    keys = ["policy", "alpha", "probability", "guardian_sees", "boundary", "always_defer"]
    writer.writerow([*keys, *(f"{name}_{part}" for name in names for part in ("mean", "std"))])
    for point in frontier.points:
        writer.writerow([*(getattr(point, key) for key in keys), *_numbers(point, names)])
    return stream.getvalue()


def _numbers(point: FrontierPoint, names: Sequence[str]) -> list[float | None]:
    return [point.summary(name).get(part) for name in names for part in ("mean", "std")]


# --- Frontiers and comparisons as figures ---


_BLUE, _ORANGE, _GREY, _BLACK = "#0072B2", "#E69F00", "#767676", "#000000"
_SIZE = (7, 4.6)
_LABELS = {"cost": "cost, dollars per 1000 queries", "loss": "loss on held-out rows"}
_NO_MATPLOTLIB = "figures need matplotlib: pip install matplotlib"
FIGURE_FORMATS = (".png", ".svg", ".pdf")
_MOST_DOTS = 100
"""Trials drawn for each budget: more of them hide the means."""


def save_drawing(
    path: str | Path, draw: "Callable[[Sequence[Axes]], object]", *, size: tuple[float, float] = _SIZE, rows: int = 1
) -> "Axes":
    """Draw on the axes of a new figure, save it, and return the first axes.

    Args:
        path: the file to write; its extension selects the format.
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
    axes: list[Axes] = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0].tolist()
    draw(axes)
    with replacing(target) as draft:
        figure.savefig(draft, dpi=160, format=target.suffix.lstrip("."))
    return axes[0]


def plotted(ax: "Axes | str | Path | None", draw: "Callable[[Axes], Axes]") -> "Axes":
    """Draw on axes, on a new figure that notebooks show by themselves, or into a file, and return the axes."""
    if isinstance(ax, str | Path):
        return save_drawing(ax, lambda axes: draw(axes[0]))
    if ax is not None:
        return draw(ax)
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise OptionError(_NO_MATPLOTLIB) from error
    return draw(pyplot.subplots(figsize=_SIZE, layout="constrained")[1])


def draw_frontier(axes: "Axes", frontier: Frontier, *, x: str | None = None, y: str | None = None) -> "Axes":
    """Draw a frontier on axes and return them; see `Frontier.plot`."""
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


# --- What a monitor saw, as figures ---


_RED, _GREEN, _SAFE = "#B3261E", "#00735C", "#F3E3C3"
_MONITOR_SIZE = (8.6, 5.6)
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


_MARKS = {
    "change": (_ORANGE, "--"),
    "red": (_RED, "-"),
    "installed": (_GREEN, "-."),
    "lifted": (_GREY, ":"),
}


def save_simulation(simulation: Simulation, path: str | Path) -> None:
    """Draw a simulation and save it; the file extension selects the format (.png, .svg, .pdf)."""
    watched, bound = simulation.courses["with"].watched, simulation.certificate.loss_bound
    reds = [moment.at for moment in simulation.moments if moment.kind == "red"]
    total = simulation.scenario.decisions
    ledgers = [
        DrawnLedger(
            x=(ledger.drawn[ledger.history.audits - 1] + 1).astype(np.float64),
            start=float(ledger.drawn[0]) if len(ledger.drawn) else 0.0,
            stop=float(reds[k]) if k < len(reds) else float(total),
            history=ledger.history,
            bound=bound,
        )
        for k, ledger in enumerate(watched)
    ]
    names = {"change": "the Primary becomes worse", "red": "red: safe mode", "renewal": "new certificate"}
    moments = [
        DrawnMoment(kind="installed" if moment.kind == "renewal" else moment.kind, x=moment.at, text=names[moment.kind])
        for moment in simulation.moments
    ]

    def losses(axes: "Axes") -> float:
        return _draw_courses(axes, simulation)

    save_drawing(
        path,
        lambda axes: _draw_monitor(axes, ledgers, moments, losses=losses, label="decisions"),
        size=_MONITOR_SIZE,
        rows=2,
    )


def save_history(
    ledgers: Sequence[DrawnLedger], moments: Sequence[DrawnMoment], path: str | Path, *, title: str
) -> None:
    """Draw the ledgers of a policy over time and save them, as `save_simulation` does; x is in days since 1970."""

    def draw(axes: "Sequence[Axes]") -> None:
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

        _draw_monitor(axes, ledgers, moments, losses=None, label="")
        axes[0].set_title(title, loc="left", fontsize=10)
        dates = AutoDateLocator(maxticks=8)
        axes[1].xaxis.set_major_locator(dates)
        axes[1].xaxis.set_major_formatter(ConciseDateFormatter(dates))

    save_drawing(path, draw, size=_MONITOR_SIZE, rows=2)


def _draw_monitor(
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
        for axis in axes:
            axis.axvline(moment.x, color=color, ls=style, lw=1.1, zorder=1)
    _name_moments(top, moments[-_MOST_NAMED:])
    top.set_ylim(min((_lowest(ledger) for ledger in ledgers), default=0.0), 1.25 * highest)
    top.set_ylabel("loss per decision")
    bottom.set_ylabel("evidence of a\nhigher loss")
    bottom.set_xlabel(label)
    if label:
        bottom.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
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
        x,
        bound * history.mean[shown],
        color=_BLUE,
        lw=1.6,
        label="running loss of audits" if first else None,
        zorder=4,
    )
    alpha, red = bound * history.lines.alpha, history.lines.red
    name = f"α = {alpha:.3g}{', also the red line' if red == history.lines.alpha else ''}"
    axes.plot(span, [alpha] * 2, color="black", lw=1.1, label=name if first else None, zorder=3)
    if red is not None and red > history.lines.alpha:
        name = f"red line, {bound * red:.3g}"
        axes.plot(span, [bound * red] * 2, color=_RED, lw=1.1, ls="--", label=name if first else None, zorder=3)
    late = history.audits >= 5 * _FEWEST_DRAWN
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
        for axis in axes:
            axis.axvspan(red.x, min(later, default=end), color=_SAFE, lw=0, zorder=0)


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
