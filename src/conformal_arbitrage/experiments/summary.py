"""The paper's claims one by one: what its own tables show, and what the reports here show."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conformal_arbitrage.evaluation.frontier import Frontier, FrontierPoint
from conformal_arbitrage.experiments.protocol import ALPHAS, TABLES, row_at
from conformal_arbitrage.experiments.report import Report

Reports = Mapping[str, Report]
MAIN, CA_STAR, MMLU, PKU = "tab:truqa_main", "tab:truqa_appendix_d", "tab:mmlu_restricted", "tab:pku_main"
SMALL, LARGE = "tab:truqa_appendix_300", "tab:truqa_appendix_500"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperClaim:
    """One claim of the paper.

    Attributes:
        in_paper: what the paper's own table shows.
        supported: whether that supports the claim.
        needs: the experiments that it is about.
        here: returns what their reports show, given the frontier of each or, of the simulation, its report;
            or where to look for it.
    """

    text: str
    in_paper: str
    supported: bool
    needs: tuple[str, ...]
    here: Callable[..., str] | str

    def checked(self, reports: Reports) -> str:
        """Return what the reports show."""
        if not all(name in reports for name in self.needs):
            return "not run"
        if isinstance(self.here, str):
            return self.here
        known = (reports[name] for name in self.needs)
        return self.here(*(report if report.figure is None else report.figure.frontier for report in known))


def _by_alpha(frontier: Frontier) -> dict[float, FrontierPoint]:
    return {point.alpha: point for point in frontier.of("conformal") if point.alpha is not None}


def _quota(frontier: Frontier) -> str:
    over: list[str] = []
    for alpha, point in _by_alpha(frontier).items():
        summary = point.summary("loss")
        mean, error = summary.get("mean") or 0.0, (summary.get("std") or 0.0) / frontier.trials**0.5
        if mean > alpha + 3 * error:
            over.append(f"{alpha:g} ({mean:.3f})")
    if over:
        return f"failed at alpha {', '.join(over)}"
    return "held: mean loss within alpha, up to Monte Carlo error, everywhere"


def _beats_random_routing(frontier: Frontier) -> str:
    deltas = {alpha: point.mean("delta") for alpha, point in _by_alpha(frontier).items()}
    if any(delta is None for delta in deltas.values()):
        return "undefined: the Guardian does not cost more here"
    losing = [f"{alpha:g} ({delta:+.3f})" for alpha, delta in deltas.items() if (delta or 0) <= 0]
    return "held at every alpha" if not losing else f"failed at alpha {', '.join(losing)}; held elsewhere"


def _tightening(frontier: Frontier) -> str:
    loose, tight = (_mean(frontier, alpha, "correct") for alpha in (0.25, 0.05))
    ratio = _mean(frontier, 0.05, "cost_per_1000") / _mean(frontier, 0.25, "cost_per_1000")
    return f"{loose:.3f} to {tight:.3f} at {ratio:.2f} times the cost"


def _largest_move(small: Frontier, large: Frontier) -> str:
    moves = [abs(_mean(large, a, "correct") - _mean(small, a, "correct")) for a in ALPHAS]
    return f"{'held' if max(moves) <= 0.02 else 'failed'}: at most {100 * max(moves):.1f} points"


def _mean(frontier: Frontier, alpha: float, name: str) -> float:
    return _by_alpha(frontier)[alpha].mean(name) or 0.0


def _unrestricted(restricted: Frontier, free: Frontier) -> str:
    gains = [100 * (_mean(free, a, "correct") - _mean(restricted, a, "correct")) for a in ALPHAS]
    costs = [100 * (_mean(free, a, "cost_per_1000") / _mean(restricted, a, "cost_per_1000") - 1) for a in ALPHAS]
    return f"gains of {min(gains):.1f} to {max(gains):.1f} points for {min(costs):.1f} to {max(costs):.1f} % more cost"


def _theorem(theory: Report) -> str:
    smooth, kinked = theory.facts["slopes"]
    return f"slope {smooth:.2f} with a smooth utility (held), {kinked:.2f} with a kinked one (failed: n^(-1/2))"


def _loss_bounds(theory: Report) -> str:
    rows = theory.facts["rows"]
    inside = all(low - 3 * loss[1] <= loss[0] <= alpha + 3 * loss[1] for _, loss, low, alpha, *_ in rows)
    return "held at every n" if inside else "failed"


def _mini(frontier: Frontier) -> str:
    (guardian,) = frontier.of("guardian")
    share = _mean(frontier, 0.025, "cost_per_1000") / (guardian.mean("cost_per_1000") or 1.0)
    lacking = 100 * ((guardian.mean("correct") or 0.0) - _mean(frontier, 0.025, "correct"))
    return f"{lacking:.1f} points below the Guardian for {100 * share:.0f} % of its cost"


def _mmlu(frontier: Frontier) -> str:
    (guardian,) = frontier.of("guardian")
    accuracy, cost = (
        _mean(frontier, 0.1, name) / (guardian.mean(name) or 1.0) for name in ("correct", "cost_per_1000")
    )
    return f"{_percent(accuracy)} for {_percent(cost)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ratio(label: str, alpha: float, other: float | str, field: str) -> float:
    above = getattr(row_at(label, alpha), field)
    if isinstance(other, float):
        return above / getattr(row_at(label, other), field)
    return above / next(getattr(row, field) for row in TABLES[label] if row.policy == other)


_GAINS = [100 * (row_at(CA_STAR, a).accuracy - row_at(MAIN, a).accuracy) for a in ALPHAS]
_COSTS = [100 * (row_at(CA_STAR, a).cost / row_at(MAIN, a).cost - 1) for a in ALPHAS]
_MOVES = [abs(row_at(LARGE, a).accuracy - row_at(SMALL, a).accuracy) for a in ALPHAS]

CLAIMS = (
    PaperClaim(
        text="The risk quota is kept at every alpha (TruthfulQA)",
        in_paper="accuracy falls by at most alpha in every row",
        supported=True,
        needs=("truthfulqa",),
        here=_quota,
    ),
    PaperClaim(
        text="Beats the cost-matched random router at every alpha except .25 (TruthfulQA)",
        in_paper="delta -0.011 at .25, above 0 elsewhere",
        supported=True,
        needs=("truthfulqa",),
        here=_beats_random_routing,
    ),
    PaperClaim(
        text="Tightening alpha from .25 to .05 raises accuracy from .62 to .81 at 2.6 times the cost",
        in_paper=f"{_ratio(MAIN, 0.05, 0.25, 'cost'):.2f} times the cost",
        supported=False,
        needs=("truthfulqa",),
        here=_tightening,
    ),
    PaperClaim(
        text="Going from 300 to 500 calibration rows moves accuracy by at most two points",
        in_paper=f"at most {100 * max(_MOVES):.1f} points",
        supported=True,
        needs=("truthfulqa-300", "truthfulqa-500"),
        here=_largest_move,
    ),
    PaperClaim(
        text="Showing all actions gains 3 to 6 points for 7 to 10 % more cost",
        in_paper=f"{min(_GAINS):.1f} to {max(_GAINS):.1f} points for {min(_COSTS):.1f} to {max(_COSTS):.1f} %",
        supported=False,
        needs=("truthfulqa", "truthfulqa-unrestricted"),
        here=_unrestricted,
    ),
    PaperClaim(
        text="A stronger Primary at alpha .025 matches the Guardian's accuracy for 40 % of the cost",
        in_paper=f"{_percent(_ratio('tab:truqa_model_ablation', 0.025, 'guardian', 'cost'))} of the cost",
        supported=False,
        needs=("truthfulqa-mini",),
        here=_mini,
    ),
    PaperClaim(
        text="MMLU: beats the cost-matched random router apart from the extremes of alpha",
        in_paper="delta -0.005 at .25 and .05, above 0 between",
        supported=True,
        needs=("mmlu",),
        here=_beats_random_routing,
    ),
    PaperClaim(
        text="MMLU at alpha .10: 91 % of the Guardian's accuracy for 61 % of its cost",
        in_paper=" for ".join(_percent(_ratio(MMLU, 0.1, "guardian", field)) for field in ("accuracy", "cost")),
        supported=True,
        needs=("mmlu",),
        here=_mmlu,
    ),
    PaperClaim(
        text="PKU: even at alpha .10 the Guardian's helpfulness is more than doubled",
        in_paper=f"{_ratio(PKU, 0.1, 'guardian', 'accuracy'):.2f} times it",
        supported=False,
        needs=("pku",),
        here="see pku.md",
    ),
    PaperClaim(
        text="PKU: the budget bounds the average severity",
        in_paper="the text's Guardian is 0/1, so its budget bounds a frequency; severity ranges up to 3 and needs B = 3",
        supported=False,
        needs=("pku",),
        here="see the readings in pku.md",
    ),
    PaperClaim(
        text="Expected loss lies between alpha - 2B/(n+1) and alpha",
        in_paper="a theorem of conformal risk control, for continuous scores",
        supported=True,
        needs=("theory",),
        here=_loss_bounds,
    ),
    PaperClaim(
        text="Theorem 1: the utility gap is of order 1/n",
        in_paper="the proof takes a bound on an expectation for one on every sample",
        supported=False,
        needs=("theory",),
        here=_theorem,
    ),
)


def summary_markdown(reports: Reports, skipped: Mapping[str, str], source: str) -> str:
    """Return the summary page."""
    lines = [f"Source: {source}", "", "# The paper's claims, one by one", ""]
    lines += ["| the paper says | its own table | supported by it | here |", "|---|---|---|---|"]
    for claim in CLAIMS:
        supported = "yes" if claim.supported else "no"
        lines.append(f"| {claim.text} | {claim.in_paper} | {supported} | {claim.checked(reports)} |")
    lines += ["", "## Reports", ""]
    lines += [f"- [{report.title}]({name}.md)" for name, report in reports.items()]
    lines += [f"- {name}: not run. {reason}" for name, reason in skipped.items()]
    return "\n".join(lines) + "\n"
