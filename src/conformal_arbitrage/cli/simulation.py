"""The command simulate: a score log replayed as production traffic."""

from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options

if TYPE_CHECKING:
    from conformal_arbitrage.evaluation.simulation import Simulation


@click.command("simulate")
@click.argument("log")
@click.option("--alpha", required=True, metavar="A", help="The risk budget.")
@click.option("--decisions", type=int, default=100_000, show_default=True, metavar="N", help="Decisions to simulate.")
@click.option(
    "--shift", type=float, default=3.0, show_default=True, metavar="F",
    help="Factor by which the Primary's loss grows; 1 for no change. Its scores stay as sure as they were.",
)  # fmt: skip
@click.option(
    "--shift-at", type=float, default=0.5, show_default=True, metavar="T", help="When, as a share of the decisions."
)
@click.option(
    "--audit-rate", type=float, default=0.05, show_default=True, metavar="Q", help="Share of audited decisions."
)
@click.option("--calibration-rows", type=int, metavar="N", help="Rows to calibrate on.  [default: half of the log]")
@click.option(
    "--renewal-rows", type=click.IntRange(0), metavar="N",
    help="Rows after an alarm that make a new certificate; 0 for none.  [default: ten times what alpha needs]",
)  # fmt: skip
@click.option(
    "--alarm-line", type=click.Choice(["luck", "alpha"]), default="luck", show_default=True,
    help="Where red stands: above alpha by what bad luck in calibration explains, or at alpha.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the split and of the traffic."
)
@options.threshold
@options.columns
@options.costs
@click.option("--plot", "figure", metavar="FILE", help="Save a figure of the course (.png, .svg, .pdf).")
@options.as_json
def simulate_command(
    log: str,
    *,
    alpha: str,
    guardian_sees: Any,
    boundary: Any,
    loss_bound: str | None,
    binarize: bool,
    confidence: str | None,
    zero_one: bool,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    primary_cost: float | None,
    guardian_cost: float | None,
    primary_price: tuple[float, float] | None,
    guardian_price: tuple[float, float] | None,
    figure: str | None,
    as_json: bool,
    **scenario: Any,
) -> None:
    """Replay a log as production traffic with a Primary that becomes worse: with the monitor, and without it.

    A part of the rows calibrates, the others are drawn as traffic, through the same rule, ledger and monitor as in
    production. On red every query is deferred, until enough new rows make a new certificate.

    \b
    arbitrage simulate log.parquet --alpha 0.05 --confidence 0.95 --shift 3 --plot simulation.png
    """
    from conformal_arbitrage.evaluation.costs import CostOptions
    from conformal_arbitrage.evaluation.simulation import Scenario, simulate

    scores = options.read_log(log, primary_column, guardian_column, outcomes, binarized=binarize)
    costs = CostOptions(
        primary_cost=primary_cost,
        guardian_cost=guardian_cost,
        primary_price=primary_price,
        guardian_price=guardian_price,
    )
    simulation = simulate(
        scores,
        alpha,
        scenario=Scenario(**scenario),
        costs=costs,
        guardian_sees=guardian_sees,
        boundary=boundary,
        loss_bound=loss_bound,
        confidence=confidence,
        zero_one=zero_one,
    )
    if figure is not None:
        from conformal_arbitrage.evaluation.monitor_figures import save_simulation

        save_simulation(simulation, figure)
    options.remember_look(scores, log, "simulate")
    if as_json:
        options.print_json(simulation.to_dict())
        return
    show_simulation(simulation)
    if figure is not None:
        click.echo(f"Written: {figure}")


def show_simulation(simulation: "Simulation") -> None:
    """Print a simulation for people."""
    from conformal_arbitrage.evaluation import simulation_report

    options.print_facts(simulation_report.simulation_facts(simulation))
    options.print_table(simulation_report.HEADER, simulation_report.simulation_rows(simulation))
    if simulation.always is not None:
        click.echo(f"Always asking the Guardian would have cost ${simulation.always:,.2f}.")
    click.echo(options.wrapped(simulation_report.CAVEAT))
