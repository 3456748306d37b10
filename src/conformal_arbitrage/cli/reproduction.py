"""reproduce."""

import click

from conformal_arbitrage.cli import options


@click.command()
@click.argument("name")
@click.option("--out", default="reproduction", show_default=True, metavar="DIR", help="Where the reports go.")
@click.option("--log", metavar="FILE", help="A recorded score log; without it the bundled one.")
@click.option("--primary-column", metavar="NAME", help="Column that plays the Primary.  [default: primary]")
@click.option("--guardian-column", metavar="NAME", help="Column that plays the Guardian.  [default: guardian]")
@click.option("--primary-cost", type=float, metavar="$", help="Dollars for asking the Primary once.")
@click.option("--guardian-cost", type=float, metavar="$", help="Dollars for asking the Guardian once.")
@click.option("--seed", type=int, default=0, show_default=True)
@options.as_json
def reproduce(
    name: str,
    *,
    out: str,
    log: str | None,
    primary_column: str | None,
    guardian_column: str | None,
    primary_cost: float | None,
    guardian_cost: float | None,
    seed: int,
    as_json: bool,
) -> None:
    """Run an experiment of the paper by its protocol, or all of them, and write the reports.

    NAME is all, truthfulqa, truthfulqa-300, truthfulqa-500, truthfulqa-raw, truthfulqa-unrestricted,
    truthfulqa-mini, mmlu, pku or theory.

    \b
    arbitrage reproduce all --out reproduction
    arbitrage reproduce mmlu --log mmlu.parquet --primary-cost 1 --guardian-cost 20
    """
    from conformal_arbitrage import experiments

    if (primary_cost is None) != (guardian_cost is None):
        raise click.UsageError("give both --primary-cost and --guardian-cost, or neither")
    if log is None and (primary_column or guardian_column):
        raise click.UsageError(
            "--primary-column and --guardian-column go with --log; the bundled log has its own roles"
        )
    costs = None if primary_cost is None or guardian_cost is None else (primary_cost, guardian_cost)
    if log is None:
        source = experiments.bundled_source(costs)
    else:
        roles = {"primary": primary_column or "primary", "guardian": guardian_column or "guardian"}
        source = experiments.log_source(log, **roles, costs=costs)
    reports, skipped = experiments.reproduce(name, source, out=out, seed=seed, told=options.progress)
    if as_json:
        documents = {key: report.to_dict() for key, report in reports.items()}
        options.print_json({"source": source.title, "reports": documents, "not_run": skipped})
        return
    for key, reason in skipped.items():
        click.echo(f"{key}: not run. {reason}")
    written = "summary.md and the reports it lists" if name == "all" else f"{name}.md and its other forms"
    click.echo(f"Written: {out}/{written}")
