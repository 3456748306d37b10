"""The commands about score logs, router-log and split, and the demo."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from conformal_arbitrage.cli import options

if TYPE_CHECKING:
    from conformal_arbitrage.cli.tour import Served


@click.command("router-log")
@click.argument("outcomes")
@click.option(
    "--confidence",
    required=True,
    metavar="COL",
    help="Column of the router's score, 0 or more; higher trusts the Primary.",
)
@click.option("--primary-grade", required=True, metavar="COL", help="Column of the Primary's grade, in [0, 1].")
@click.option("--guardian-grade", required=True, metavar="COL", help="Column of the Guardian's grade, in [0, 1].")
@click.option("-o", "--output", required=True, metavar="FILE", help="The score log to write.")
@options.as_json
def router_log_command(
    outcomes: str, *, confidence: str, primary_grade: str, guardian_grade: str, output: str, as_json: bool
) -> None:
    """Turn any table of router scores and outcomes into a score log.

    The columns id, group, context, primary_cost and guardian_cost are kept.

    \b
    arbitrage router-log runs.csv --confidence score --primary-grade small_ok \\
        --guardian-grade big_ok -o log.parquet
    """
    from conformal_arbitrage.scorelog.log import ScoreLog

    log = ScoreLog.read_router(
        outcomes, confidence=confidence, primary_grade=primary_grade, guardian_grade=guardian_grade
    )
    log.write(output)
    summary = {
        "rows": len(log),
        "no_confidence_rows": int(log.no_opinion.sum()),
        "ungraded_rows": int(log.missing.sum()),
        "output": output,
    }
    if as_json:
        options.print_json(summary)
    else:
        click.echo(f"Written: {output}, {len(log)} rows ({summary['ungraded_rows']} lack a grade)")


@click.command("split")
@click.argument("log")
@click.argument("explore")
@click.argument("certify")
@click.option("--share", type=float, default=0.3, show_default=True, help="Share of the rows that goes to EXPLORE.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random split.")
@options.columns
@options.sample
@options.as_json
def split_command(
    log: str,
    explore: str,
    certify: str,
    *,
    share: float,
    seed: int,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    sample: int | None,
    as_json: bool,
) -> None:
    """Split a log at random: choose alpha and options on EXPLORE, calibrate on CERTIFY.

    \b
    arbitrage split log.parquet explore.parquet certify.parquet --share 0.3
    """
    from conformal_arbitrage.calibration.planning import split
    from conformal_arbitrage.scorelog.files import file_format

    for one, other in ((log, explore), (log, certify), (explore, certify)):
        options.refuse_same(one, other)
        file_format(Path(other))
    scores = options.read_log(log, primary_column, guardian_column, outcomes, sample=sample)
    parts = split(scores, share=share, seed=seed)
    for part, path in zip(parts, (explore, certify), strict=True):
        part.write(path)
    if as_json:
        options.print_json({"explore": len(parts[0]), "certify": len(parts[1])})
    else:
        click.echo(f"Written: {explore} ({len(parts[0])} rows) and {certify} ({len(parts[1])} rows)")


@click.command("demo")
@click.option("--out", default="demo", show_default=True, metavar="DIR", help="Folder for the files.")
@click.option("--console", is_flag=True, help="Also fill a gateway for the web console, with audits and an alarm.")
@options.as_json
def demo_command(*, out: str, console: bool, as_json: bool) -> None:
    """Tour the tool on bundled real data: inspect, calibrate, evaluate, serve, simulate, and a pair not worth routing.

    \b
    arbitrage demo --out demo
    arbitrage demo --console && arbitrage serve --config demo/console.toml
    """
    from dataclasses import replace

    from conformal_arbitrage.cli import tour
    from conformal_arbitrage.cli.console_demo import fill_console
    from conformal_arbitrage.cli.evaluation import show_frontier, show_inspection
    from conformal_arbitrage.cli.simulation import show_simulation

    demo = tour.run_demo(out)
    if console:
        demo = replace(demo, files=(*demo.files, str(fill_console(Path(out)))))
    if as_json:
        options.print_json(demo.to_dict())
        return
    click.echo(options.wrapped(tour.STORY))
    click.echo("\n1. Is the pair worth routing?   arbitrage inspect\n")
    show_inspection(demo.good)
    click.echo("  note: choose a real alpha on other rows than those you certify; see docs/choosing.md")
    click.echo(f"\n2. A certificate at alpha {tour.ALPHA:g}   arbitrage calibrate\n")
    click.echo(options.wrapped(demo.certificate.guarantee))
    click.echo(f"\nOn this log {100 * demo.deferred:.0f} % of the questions go to the expert.")
    click.echo("\n3. What each budget buys, on held-out questions   arbitrage evaluate\n")
    show_frontier(demo.frontier)
    click.echo("\n4. A pair not worth routing   arbitrage inspect\n")
    click.echo(options.wrapped(f"SmolLM2-135M is the Primary, Qwen2.5-Coder-1.5B the Guardian. {demo.poor.verdict}"))
    click.echo("\n5. The same in production: an OpenAI-compatible gateway   arbitrage serve\n")
    click.echo(options.wrapped(_describe_served(demo.served)))
    click.echo("\n6. The model becomes worse, and nobody is told   arbitrage simulate\n")
    show_simulation(demo.simulation)
    click.echo("\n" + options.wrapped("Written: " + ", ".join(demo.files)))


def _describe_served(served: "Served | None") -> str:
    from conformal_arbitrage.cli.tour import ALPHA

    if served is None:
        return (
            "Skipped: the gateway needs its extra, which is not installed; run `pip install '.[gateway]'` in a clone of the "
            "repository, then the demo again."
        )
    return (
        f"{served.questions} questions that were not used for calibration were sent to POST /v1/decisions on this machine. "
        f"{served.deferred} went to the expert, {served.questions - served.deferred} calls were saved: ${served.cost:.2f} "
        f"instead of ${served.always:.2f}. The loss was {served.loss:.3f}; the risk budget is {ALPHA:g}. `make demo-serve` "
        "keeps the gateway running."
    )
