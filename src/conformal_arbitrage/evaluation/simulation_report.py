"""What a simulation shows to people: facts, a table, and both as HTML for notebooks.

Knows nothing of terminals, nor of how the figures were computed.
"""

from typing import TYPE_CHECKING

from conformal_arbitrage.calibration.notebook import html_bars, html_paragraph, html_table

if TYPE_CHECKING:
    from conformal_arbitrage.evaluation.simulation import Moment, Simulation, SpanFigures

HEADER = ["", "decisions", "loss", "excess losses", "Guardian share", "audit calls", "cost"]
CAVEAT = (
    "One run with one seed. The traffic is drawn from rows that were not used for calibration: their own mean "
    "differs from alpha by luck, as a certificate's does."
)
_PARTS = {"before": "before the change", "after": "after it", "all": "in all"}


def simulation_facts(simulation: "Simulation") -> list[tuple[str, str]]:
    """Return the certificate and what happened, as name and value pairs."""
    certificate, lines = simulation.certificate, simulation.lines
    red = "cannot fire" if lines.red is None else f"stands at {lines.red * certificate.loss_bound:.4g}"
    promise = (
        "on average over calibrations"
        if certificate.confidence is None
        else f"with confidence {certificate.confidence:g}"
    )
    first = ("certificate", f"alpha {certificate.alpha:g} from {certificate.n} rows, {promise}; red {red}")
    happened = [(f"at decision {moment.at:,}", _words(moment, simulation)) for moment in simulation.moments]
    quiet = happened and not any(moment.kind == "red" for moment in simulation.moments)
    return [first, *happened, *([(happened[-1][0], "no alarm until the end")] if quiet else [])]


def simulation_rows(simulation: "Simulation") -> list[list[str]]:
    """Return the rows of the table under `HEADER`."""
    return [
        [f"{way} monitor, {_PARTS[part]}", *_figures(one)]
        for way, parts in simulation.outcomes.items()
        for part, one in parts.items()
    ]


def simulation_html(simulation: "Simulation") -> str:
    """Return facts, table and a figure for notebooks."""
    alpha = simulation.certificate.alpha
    losses = [(f"{way} monitor", parts["after"].loss) for way, parts in simulation.outcomes.items()]
    longest = max((alpha, *(loss for _, loss in losses))) or 1.0
    bars = [(name, loss / longest, f"{loss:.4f}") for name, loss in (*losses, ("alpha", alpha))]
    return (
        html_table(simulation_facts(simulation))
        + html_table(simulation_rows(simulation), header=HEADER)
        + html_bars("loss after the change", bars)
        + html_paragraph(CAVEAT)
    )


def _words(moment: "Moment", simulation: "Simulation") -> str:
    start = simulation.scenario.changes_at
    if moment.kind == "change":
        return f"the Primary's loss grows {simulation.scenario.shift:g}-fold, at the same margins"
    if moment.kind == "red":
        late = "a false alarm" if moment.at <= start else f"{moment.at - start:,} decisions after the change"
        return f"red after {moment.audits:,} audits, {late}: every query is deferred from now on"
    return f"a new certificate from {moment.text}"


def _figures(one: "SpanFigures") -> list[str]:
    return [
        f"{one.decisions:,}",
        f"{one.loss:.4f}",
        f"{one.excess:,.0f}",
        f"{100 * one.guardian_share:.1f} %",
        f"{one.audit_calls:,}",
        "unknown" if one.cost is None else f"${one.cost:,.2f}",
    ]
