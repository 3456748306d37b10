"""inspect and evaluate."""

from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options

if TYPE_CHECKING:
    from conformal_arbitrage.evaluation.frontier import Frontier, Price
    from conformal_arbitrage.evaluation.inspection import Inspection


@click.command()
@click.argument("log")
@click.option("--loss-bound", metavar="B", help="Largest possible loss; needed if Guardian scores leave [0, 1].")
@options.binarize
@options.columns
@options.costs
@options.as_json
def inspect(
    log: str,
    *,
    loss_bound: str | None,
    binarize: bool,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    primary_cost: float | None,
    guardian_cost: float | None,
    primary_price: "Price | None",
    guardian_price: "Price | None",
    as_json: bool,
) -> None:
    """What a log holds, and whether its pair of models is worth routing.

    \b
    arbitrage inspect log.parquet --primary-column qwen15b --guardian-column expert
    """
    from conformal_arbitrage.evaluation.frontier import costs_of
    from conformal_arbitrage.evaluation.inspection import inspect as look

    scores = options.read_log(log, primary_column, guardian_column, outcomes, binarized=binarize)
    costs = costs_of(
        scores,
        primary_cost=primary_cost,
        guardian_cost=guardian_cost,
        primary_price=primary_price,
        guardian_price=guardian_price,
    )
    found = look(scores, loss_bound=loss_bound, costs=costs)
    if as_json:
        options.print_json(found.to_dict())
    else:
        show_inspection(found)


def show_inspection(found: "Inspection") -> None:
    """Print an inspection for people."""
    sizes = f"{found.fewest_actions}" + (
        "" if found.fewest_actions == found.most_actions else f" to {found.most_actions}"
    )
    facts = [("rows", f"{found.rows}, {sizes} actions each" + (", router form" if found.router_form else ""))]
    facts += [
        (name, f"Primary {_figure(means['primary'])}, Guardian {_figure(means['guardian'])}")
        for name, means in found.outcomes.items()
    ]
    if found.cost_per_1000 is not None:
        cost = found.cost_per_1000
        facts.append(("dollars per 1000", f"Primary {cost['primary']:.4g}, Guardian {cost['guardian']:.4g}"))
    facts += [
        ("without scores", f"Primary in {found.no_opinion_rows} rows, Guardian in {found.missing_guardian_rows}"),
        ("Primary's lead", f"{found.distinct_margins} distinct values, tied at the top in {found.tied_rows} rows"),
        ("Primary alone", f"loses {found.primary_loss:.4f} a query"),
    ]
    if found.auc is not None and found.auc_interval is not None:
        low, high = found.auc_interval
        facts.append(("lead predicts regret", f"AUC {found.auc:.3f} (95 % about {low:.3f} to {high:.3f})"))
    options.print_facts(facts)
    if found.budgets:
        rows = [
            [f"{b.alpha:g}", _share(b.deferred), _share(b.deferred_random), _share(b.wasted)] for b in found.budgets
        ]
        header = ["alpha", "Guardian asked", "with boundary random", "budget wasted without"]
        options.print_table(header, rows, title="What a budget buys on this log (the Guardian sees all)")
    click.echo(options.wrapped(found.verdict))
    for problem in found.problems:
        click.echo(f"  note: {problem}")


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "all" if value is None else f"{100 * value:.1f} %"


@click.command()
@click.argument("log")
@click.option("--alpha", "alphas", multiple=True, required=True, metavar="A", help="A risk budget; may be repeated.")
@click.option("--calibration-size", type=int, required=True, metavar="N", help="Rows to calibrate on in each trial.")
@click.option("--test-size", type=int, metavar="N", help="Rows to test on.  [default: the rest]")
@click.option("--trials", type=int, default=30, show_default=True, help="Fresh random splits.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--balance-by", metavar="COLUMN", help="Draw each trial's rows balanced over this column.")
@click.option("--sample-size", type=int, metavar="N", help="How many rows --balance-by draws.")
@click.option("--probability", "probabilities", multiple=True, type=float, metavar="Q", help="Add a coin as a router.")
@options.rule
@options.columns
@options.costs
@click.option(
    "--delta-x", type=click.Choice(["cost", "loss"]), default="cost", show_default=True, help="Delta's chord."
)
@click.option("--delta-of", default="correct", show_default=True, metavar="OUTCOME", help="Delta's outcome.")
@click.option("--plot", "figure", metavar="FILE", help="Draw the frontier (.png, .svg, .pdf).")
@click.option("--x", default="cost", show_default=True, metavar="cost|loss|OUTCOME", help="The figure's x-axis.")
@click.option("--json", "form", flag_value="json", help="Print one JSON document.")
@click.option("--csv", "form", flag_value="csv", help="Print CSV.")
@click.option("--markdown", "form", flag_value="markdown", help="Print a Markdown table.")
@click.option("--latex", "form", flag_value="latex", help="Print a LaTeX table.")
@click.option("--per-trial", is_flag=True, help="With --json: every trial's values too.")
def evaluate(
    log: str,
    *,
    alphas: tuple[str, ...],
    binarize: bool,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    figure: str | None,
    x: str,
    form: str | None,
    per_trial: bool,
    delta_of: str,
    **sweep: Any,
) -> None:
    """Held-out trials: what each budget buys, beside the single models and coins.

    \b
    arbitrage evaluate log.parquet --alpha 0.05 --alpha 0.1 --calibration-size 400 \\
        --primary-cost 1 --guardian-cost 20 --plot frontier.png
    """
    from conformal_arbitrage.evaluation.figures import plot
    from conformal_arbitrage.evaluation.frontier import evaluate as run

    scores = options.read_log(log, primary_column, guardian_column, outcomes, binarized=binarize)
    made = run(scores, alphas, delta_of=delta_of, **sweep)
    if figure is not None:
        plot(made, figure, x=x, y=delta_of)
    if form == "json":
        options.print_json(made.to_dict(per_trial=per_trial))
    else:
        show_frontier(made, form)
    if figure is not None and form is None:
        click.echo(f"Written: {figure}")


def show_frontier(made: "Frontier", form: str | None = None) -> None:
    """Print a frontier as a table for people, or as text in a format."""
    from conformal_arbitrage.evaluation import tables

    if form is not None:
        written = {"csv": tables.to_csv, "markdown": tables.to_markdown, "latex": tables.to_latex}[form]
        click.echo(written(made), nl=False)
        return
    header, rows = tables.cells(made, spread=options.console().width >= 140)
    title = f"{made.trials} trials: {made.calibration_size} rows to calibrate, {made.test_size} to test"
    options.print_table(header, rows, title=title)
    click.echo(
        f"±: standard deviation over trials; the mean of {made.trials} is uncertain by that / {made.trials**0.5:.1f}."
    )
    if made.points[0].values("cost_per_1000") is None:
        click.echo("No costs, so no coin of the same cost and no delta: give --primary-cost and --guardian-cost.")
