"""The command reproduce."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.models import show_estimate

if TYPE_CHECKING:
    from conformal_arbitrage.collecting.collect import Progress
    from conformal_arbitrage.experiments.protocol import Source


@click.command("reproduce")
@click.argument("name")
@click.option("--out", default="reproduction", show_default=True, metavar="DIR", help="Folder for the reports.")
@click.option("--log", metavar="FILE", help="A recorded score log.  [default: the bundled one]")
@click.option("--primary-column", metavar="NAME", help="Column of the Primary's scores.  [default: primary]")
@click.option("--guardian-column", metavar="NAME", help="Column of the Guardian's scores.  [default: guardian]")
@click.option("--stronger-column", metavar="NAME", help="Column of a second, stronger Primary, for truthfulqa-mini.")
@click.option("--live", is_flag=True, help="Score the paper's own datasets with the models of arbitrage.toml.")
@click.option("--config", default="arbitrage.toml", show_default=True, metavar="FILE", help="With --live: the models.")
@click.option("--data", metavar="PATH", help="With --live: a local copy of the datasets.  [default: from their hub]")
@click.option("--rows", type=click.IntRange(2), metavar="N", help="With --live: a balanced sample of each dataset.")
@click.option(
    "--concurrency", type=click.IntRange(1), default=16, show_default=True, help="With --live: concurrent calls."
)
@click.option(
    "--max-cost", type=click.FloatRange(0, min_open=True), metavar="$", help="With --live: limit on the total cost."
)
@click.option("--dry-run", is_flag=True, help="With --live: send nothing; estimate the cost.")
@click.option("--yes", is_flag=True, help="With --live: do not ask for confirmation.")
@click.option("--primary-cost", type=float, metavar="$", help="Dollars per query of the Primary.")
@click.option("--guardian-cost", type=float, metavar="$", help="Dollars per query of the Guardian.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of splits and simulations.")
@options.as_json
def reproduce_command(
    name: str,
    *,
    out: str,
    log: str | None,
    primary_column: str | None,
    guardian_column: str | None,
    stronger_column: str | None,
    primary_cost: float | None,
    guardian_cost: float | None,
    seed: int,
    as_json: bool,
    **live: Any,
) -> None:
    """Run one experiment of the paper, or all of them, and write the reports.

    NAME is all, truthfulqa, truthfulqa-300, truthfulqa-500, truthfulqa-raw, truthfulqa-unrestricted,
    truthfulqa-mini, mmlu, pku or theory.

    \b
    arbitrage reproduce all --out reproduction
    arbitrage reproduce mmlu --log mmlu.parquet --primary-cost 1 --guardian-cost 20
    arbitrage reproduce truthfulqa --live --dry-run
    """
    from conformal_arbitrage import experiments

    if (primary_cost is None) != (guardian_cost is None):
        raise click.UsageError("give both --primary-cost and --guardian-cost, or neither")
    if log is None and (primary_column or guardian_column or stronger_column):
        raise click.UsageError("column options need --log; the bundled log has its own columns")
    costs = None if primary_cost is None or guardian_cost is None else (primary_cost, guardian_cost)
    if live["live"]:
        if log is not None or costs is not None:
            raise click.UsageError("--live has its own scores and prices; drop --log and the costs")
        live_source = _live_source(name, out, seed, live, as_json=as_json)
        if live_source is None:
            return
        source = live_source
    elif log is None:
        source = experiments.bundled_source(costs)
    else:
        roles = {"primary": primary_column or "primary", "guardian": guardian_column or "guardian"}
        source = experiments.log_source(log, **roles, stronger=stronger_column, costs=costs)
    reports, skipped = experiments.reproduce(name, source, out=out, seed=seed, on_progress=options.progress)
    if as_json:
        documents = {key: report.to_dict() for key, report in reports.items()}
        options.print_json({"source": source.title, "reports": documents, "not_run": skipped})
        return
    for key, reason in skipped.items():
        click.echo(f"{key}: not run. {reason}")
    written = "summary.md and the reports it lists" if name == "all" else f"{name}.md and its other formats"
    click.echo(f"Written: {out}/{written}")


def _live_source(name: str, out: str, seed: int, live: dict[str, Any], *, as_json: bool) -> "Source | None":
    """Return the live scores once the estimate was confirmed; None after a dry run."""
    from conformal_arbitrage.experiments import parts_of
    from conformal_arbitrage.experiments.data import Live
    from conformal_arbitrage.live.config import read_config

    scores = Live(
        config=read_config(live["config"]),
        folder=Path(out) / "live",
        data=None if live["data"] is None else Path(live["data"]),
        rows=live["rows"],
        seed=seed,
        concurrency=live["concurrency"],
        max_cost=live["max_cost"],
        on_progress=_show_progress,
    )
    estimates = [one for part in parts_of(name, scores.config) for one in scores.estimate(part)]
    if live["dry_run"]:
        show_estimate(estimates, as_json=as_json)
        return None
    if not live["yes"]:
        show_estimate(estimates, as_json=False)
        click.confirm("Send these calls?", abort=True, err=True)
    return scores.source()


def _show_progress(progress: "Progress") -> None:
    """Print a line after every twentieth of the rows."""
    from conformal_arbitrage.models.wrappers import dollars

    if progress.done * 20 // progress.total > (progress.done - 1) * 20 // progress.total:
        failed = progress.primary_failures + progress.guardian_failures
        options.progress(
            f"{progress.done} of {progress.total} rows, {failed} failed, cost {dollars(progress.spent.cost)}"
        )
