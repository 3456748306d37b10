"""Frontiers as text: CSV, Markdown and LaTeX. Tables in terminals and notebooks use the same cells."""

import csv
import io
from collections.abc import Sequence

from conformal_arbitrage.evaluation.frontier import Frontier, FrontierPoint

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
        frontier: the sweep.
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


def fitted(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int, expendable: Sequence[str]
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return a table whose figures fit a width in characters, and the titles of the columns left out for it.

    Titles may break between words, figures may not.

    Args:
        header: the titles.
        rows: the cells.
        width: of the terminal.
        expendable: titles of the columns that may be left out, the first to go first.
    """
    kept, left_out = list(range(len(header))), list[str]()
    for title in expendable:
        if title in header and _width(header, rows, kept) > width:
            kept.remove(header.index(title))
            left_out.append(title)
    return [header[k] for k in kept], [[row[k] for k in kept] for row in rows], left_out


def _width(header: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    """Return the characters a table takes: its columns, three between two of them, and one at either edge."""
    columns = [max(len(part) for part in (*header[k].split(), *(row[k] for row in rows))) for k in kept]
    return sum(columns) + 3 * (len(kept) - 1) + 2


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
