"""The commands inspect, evaluate and assess."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import cascades, options, parts
from conformal_arbitrage.cli.certificates import columns_of, load_certificate

if TYPE_CHECKING:
    from conformal_arbitrage.evaluation.assessment import Assessment
    from conformal_arbitrage.evaluation.frontier import Frontier
    from conformal_arbitrage.evaluation.inspection import Inspection

_WIDTH_WITH_SPREAD = 160
"""Columns of a terminal from which each mean has its standard error beside it."""


@click.command("inspect")
@click.argument("log")
@click.option("--loss-bound", metavar="B", help="Largest possible loss; needed if Guardian scores leave [0, 1].")
@options.binarize
@options.columns
@options.sample
@options.costs
@options.as_json
def inspect_command(
    log: str,
    *,
    loss_bound: str | None,
    binarize: bool,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    sample: int | None,
    as_json: bool,
    **costs: Any,
) -> None:
    """Show what a log contains, and whether its pair of models is worth routing.

    \b
    arbitrage inspect log.parquet --primary-column qwen15b --guardian-column expert
    """
    from conformal_arbitrage.evaluation.inspection import inspect

    scores = options.read_log(log, primary_column, guardian_column, outcomes, binarized=binarize, sample=sample)
    inspection = inspect(scores, loss_bound=loss_bound, **costs)
    if options.in_parts(log):
        inspection = inspection.with_counts(
            parts.counts_of_parts(log, primary_column, guardian_column, binarized=binarize)
        )
    options.remember_look(scores, log, "inspect")
    if as_json:
        options.print_json(inspection.to_dict())
    else:
        show_inspection(inspection)


def show_inspection(inspection: "Inspection") -> None:
    """Print an inspection for people."""
    options.print_facts(inspection.facts())
    if inspection.budgets:
        header, rows = inspection.budget_table()
        options.print_table(header, rows, title="What a budget buys on this log (the Guardian sees all)")
    click.echo(options.wrapped(inspection.verdict))
    for problem in inspection.problems:
        click.echo(f"  note: {problem}")
    for step in inspection.next_steps:
        click.echo(options.wrapped(step))


@click.command("evaluate")
@click.argument("log")
@click.option("--alpha", "alphas", multiple=True, required=True, metavar="A", help="A risk budget; may be repeated.")
@click.option("--calibration-size", type=int, required=True, metavar="N", help="Rows to calibrate on in each trial.")
@click.option("--test-size", type=int, metavar="N", help="Rows to test on in each trial.  [default: the rest]")
@click.option("--trials", type=int, default=30, show_default=True, help="Random splits; `compare` calls them --splits.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the splits.")
@click.option("--balance-by", metavar="COLUMN", help="Draw the rows of each trial balanced over this column.")
@click.option("--sample-size", type=int, metavar="N", help="Number of rows that --balance-by draws.")
@click.option(
    "--probability", "probabilities", multiple=True, type=float, metavar="Q",
    help="Add random routing with this probability of using the Guardian; may be repeated.",
)  # fmt: skip
@options.rule
@options.sure
@cascades.path_options
@options.learned
@options.columns
@options.sample
@options.costs
@click.option(
    "--delta-x", type=click.Choice(["cost", "loss"]), default="cost", show_default=True,
    help="Compare with the single models at the same cost, or at the same loss.",
)  # fmt: skip
@click.option(
    "--delta-of", default="correct", show_default=True, metavar="OUTCOME", help="Outcome that delta is measured in."
)
@click.option("--plot", "figure", metavar="FILE", help="Save a figure of the frontier (.png, .svg, .pdf).")
@click.option("--x", default="cost", show_default=True, metavar="cost|loss|OUTCOME", help="The figure's x-axis.")
@click.option("--json", "form", flag_value="json", help="Print one JSON document.")
@click.option("--csv", "form", flag_value="csv", help="Print CSV.")
@click.option("--markdown", "form", flag_value="markdown", help="Print a Markdown table.")
@click.option("--latex", "form", flag_value="latex", help="Print a LaTeX table.")
@click.option("--per-trial", is_flag=True, help="With --json: include the values of every trial.")
def evaluate_command(
    log: str,
    *,
    alphas: tuple[str, ...],
    binarize: bool,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    sample: int | None,
    figure: str | None,
    x: str,
    form: str | None,
    per_trial: bool,
    delta_of: str,
    loss: str,
    boundary: str,
    **sweep: Any,
) -> None:
    """Run held-out trials: what each budget buys, compared with the single models and random routing.

    \b
    arbitrage evaluate log.parquet --alpha 0.05 --alpha 0.1 --calibration-size 400 \\
        --primary-cost 1 --guardian-cost 20 --plot frontier.png
    arbitrage evaluate cascade.parquet --path --alpha 0.05 --calibration-size 400
    """
    from conformal_arbitrage.evaluation.figures import save_figure
    from conformal_arbitrage.evaluation.frontier import evaluate

    learned = options.learned_options(sweep)
    kind, at_boundary = options.loss_and_boundary(loss, boundary, learned["score"])
    if cascades.take_options(sweep):
        return cascades.evaluate_path_command(kind)
    scores = options.read_log(log, primary_column, guardian_column, outcomes, binarized=binarize, sample=sample)
    frontier = evaluate(scores, alphas, delta_of=delta_of, loss=kind, boundary=at_boundary, **learned, **sweep)
    if figure is not None:
        save_figure(frontier, figure, x=x, y=delta_of)
    options.remember_look(scores, log, "evaluate")
    if form == "json":
        options.print_json(frontier.to_dict(per_trial=per_trial))
    else:
        show_frontier(frontier, form)
    if figure is not None and form is None:
        click.echo(f"Written: {figure}")


@click.command("compare")
@click.argument("log")
@click.option("--alpha", "alphas", multiple=True, required=True, metavar="A", help="A risk budget; may be repeated.")
@click.option("--calibration-size", type=int, default=400, show_default=True, metavar="N", help="Rows to calibrate on.")
@click.option(
    "--test-size", type=int, metavar="N", help="Rows to test on in each split.  [default: the rest, 2000 at most]"
)
@click.option(
    "--splits", type=int, default=200, show_default=True, help="Random splits; `evaluate` calls them --trials."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the splits.")
@click.option("--menu-size", type=int, metavar="K", help="Number of actions, if it is the same for every query.")
@options.binarize
@options.columns
@options.sample
@options.costs
@click.option("--plot", "figure", metavar="FILE", help="Save a figure of the first budget (.png, .svg, .pdf).")
@options.as_json
def compare_command(
    log: str,
    *,
    alphas: tuple[str, ...],
    binarize: bool,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    sample: int | None,
    figure: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Compare decision rules on a log: how often each asks the Guardian, and whether it keeps the budget.

    Peers' rules are their decision rules on this log's scores, not their code.

    \b
    arbitrage compare log.parquet --alpha 0.05 --splits 200 --plot compare.png
    """
    from conformal_arbitrage.evaluation.comparison import compare
    from conformal_arbitrage.evaluation.figures import save_comparison

    scores = options.read_log(log, primary_column, guardian_column, outcomes, binarized=binarize, sample=sample)
    comparison = compare(scores, alphas, progress=None if as_json else options.progress, **settings)
    options.remember_look(scores, log, "compare")
    if figure is not None:
        save_comparison(comparison, figure, alpha=comparison.rules[0].alpha)
    if as_json:
        options.print_json(comparison.to_dict())
        return
    title = (
        f"{comparison.splits} splits: {comparison.calibration_size} rows to calibrate, {comparison.test_size} to test"
    )
    left_out = _print_fitted(*comparison.table(), ("net loss", "$ per 1000"), title=title)
    _name_left_out(left_out)
    for line in comparison.notes():
        click.echo(options.wrapped(line))
    if figure is not None:
        click.echo(f"Written: {figure}")


def _print_fitted(
    header: Sequence[str], rows: Sequence[Sequence[str]], expendable: Sequence[str], *, title: str
) -> list[str]:
    """Print a table without the columns that this terminal is too narrow for; return their titles."""
    from conformal_arbitrage.evaluation.tables import fitted

    header, rows, left_out = fitted(header, rows, options.console().width, expendable)
    options.print_table(header, rows, title=title)
    return left_out


def _name_left_out(titles: Sequence[str]) -> None:
    if titles:
        click.echo(options.wrapped(f"Columns that do not fit this terminal: {', '.join(titles)}; --json has them."))


def show_frontier(frontier: "Frontier", form: str | None = None) -> None:
    """Print a frontier as a table for people, or as text in a format."""
    from conformal_arbitrage.evaluation import tables

    if form is not None:
        to_text = {"csv": tables.to_csv, "markdown": tables.to_markdown, "latex": tables.to_latex}[form]
        click.echo(to_text(frontier), nl=False)
        return
    spread = options.console().width >= _WIDTH_WITH_SPREAD
    header, rows = tables.cells(frontier, spread=spread, standard_error=True)
    title = f"{frontier.trials} trials: {frontier.calibration_size} rows to calibrate, {frontier.test_size} to test"
    left_out = _print_fitted(header, rows, tables.expendable(header), title=title)
    footnote = "±: standard error over trials of this log. " if spread and frontier.trials > 1 else ""
    click.echo(options.wrapped(f"{footnote}{_standard_error(frontier)}"))
    _name_left_out(left_out)
    if frontier.points[0].values("cost_per_1000") is None:
        remedy = "give --primary-cost and --guardian-cost"
        click.echo(options.wrapped(f"No costs, so no random routing at the same cost and no delta: {remedy}."))


def _standard_error(frontier: "Frontier") -> str:
    """Describe how exactly the trials determine the mean loss."""
    spreads = [point.summary("loss").get("std") for point in frontier.of("conformal")]
    errors = [spread / frontier.trials**0.5 for spread in spreads if spread is not None]
    if not errors:
        return "One trial has no standard error."
    return f"Standard error of the mean loss: {max(errors):.4f} or less."


@click.command("assess")
@click.argument("certificate")
@click.argument("log")
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Confidence of the interval.")
@options.columns
@options.sample
@options.costs
@options.as_json
def assess_command(
    certificate: str,
    log: str,
    *,
    confidence: float,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    sample: int | None,
    as_json: bool,
    **costs: Any,
) -> None:
    """Measure the realised loss of a certificate on new rows, with an exact confidence interval.

    \b
    arbitrage assess certificate.json new-rows.parquet
    """
    from conformal_arbitrage.evaluation.assessment import assess, without_verdict

    loaded = load_certificate(certificate)
    scores = options.read_log(log, *columns_of(loaded, primary_column, guardian_column), outcomes, sample=sample)
    assessment = assess(loaded, scores, confidence=confidence, **costs)
    if parts.made_from(loaded, log, primary_column, guardian_column):
        assessment = without_verdict(assessment)
    options.remember_look(scores, log, "assess")
    if as_json:
        options.print_json(assessment.to_dict())
    else:
        show_assessment(assessment)


def show_assessment(assessment: "Assessment") -> None:
    """Print an assessment for people; its problems are warnings."""
    options.print_facts(assessment.facts())
    click.echo(options.wrapped(assessment.verdict))
    for problem in assessment.problems:
        options.warn(problem)
