"""router-log and demo."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from conformal_arbitrage.cli import options

if TYPE_CHECKING:
    from conformal_arbitrage.cli.tour import Served


@click.command(name="router-log")
@click.argument("outcomes")
@click.option(
    "--confidence", required=True, metavar="COL", help="The router's score, 0 or more; higher trusts the Primary."
)
@click.option("--primary-grade", required=True, metavar="COL", help="Grade of the Primary's answer, in [0, 1].")
@click.option("--guardian-grade", required=True, metavar="COL", help="Grade of the Guardian's answer, in [0, 1].")
@click.option("-o", "--output", required=True, metavar="FILE", help="The score log to write.")
@options.as_json
def router_log(
    outcomes: str, *, confidence: str, primary_grade: str, guardian_grade: str, output: str, as_json: bool
) -> None:
    """Turn any table of router scores and outcomes into a score log.

    Columns id, group, context, primary_cost and guardian_cost are taken along.

    \b
    arbitrage router-log runs.csv --confidence score --primary-grade small_ok --guardian-grade big_ok -o log.parquet
    """
    from conformal_arbitrage.scorelog.router import read_router_table

    log = read_router_table(outcomes, confidence=confidence, primary_grade=primary_grade, guardian_grade=guardian_grade)
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
        click.echo(f"Written: {output}, {len(log)} rows ({summary['ungraded_rows']} not graded on both answers)")


@click.command()
@click.argument("log")
@click.argument("explore")
@click.argument("certify")
@click.option("--share", type=float, default=0.3, show_default=True, help="Share of the rows that goes to EXPLORE.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@options.columns
@options.as_json
def split(
    log: str,
    explore: str,
    certify: str,
    *,
    share: float,
    seed: int,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Set rows aside at random: choose alpha and options on EXPLORE, calibrate on CERTIFY.

    \b
    arbitrage split log.parquet explore.parquet certify.parquet --share 0.3
    """
    import numpy as np

    from conformal_arbitrage.scorelog.files import file_format

    for one, other in ((log, explore), (log, certify), (explore, certify)):
        options.refuse_same(one, other)
        file_format(Path(other))
    scores = options.read_log(log, primary_column, guardian_column, outcomes)
    order = np.random.default_rng(seed).permutation(len(scores))
    cut = round(share * len(scores)) if 0 < share < 1 else 0
    if not 0 < cut < len(scores):
        raise click.UsageError(f"a share of {share:g} of {len(scores)} rows leaves a part empty; give another --share")
    scores.select(order[:cut]).write(explore)
    scores.select(order[cut:]).write(certify)
    if as_json:
        options.print_json({"explore": cut, "certify": len(scores) - cut})
    else:
        click.echo(f"Written: {explore} ({cut} rows) and {certify} ({len(scores) - cut} rows)")


@click.command()
@click.option("--out", default="demo", show_default=True, metavar="DIR", help="Where the files go.")
@options.as_json
def demo(*, out: str, as_json: bool) -> None:
    """A tour on bundled real data: inspect, calibrate, evaluate, and a pair that is not worth routing.

    \b
    arbitrage demo --out demo
    """
    from conformal_arbitrage.cli import tour
    from conformal_arbitrage.cli.evaluation import show_frontier, show_inspection

    shown = tour.run_demo(out)
    if as_json:
        options.print_json(shown.to_dict())
        return
    click.echo(tour.STORY)
    click.echo("\n1. Is the pair worth routing?   arbitrage inspect\n")
    show_inspection(shown.good)
    click.echo("  note: a real alpha is chosen on other rows than those it is certified on; see docs/choosing.md")
    click.echo(f"\n2. A certificate at alpha {tour.ALPHA:g}   arbitrage calibrate\n")
    click.echo(options.wrapped(shown.certificate.guarantee))
    click.echo(f"\nOn this log the expert is asked about {100 * shown.deferred:.0f} % of the questions.")
    click.echo("\n3. What each budget buys, on held-out questions   arbitrage evaluate\n")
    show_frontier(shown.frontier)
    click.echo("4. A pair that is not worth it: SmolLM2-135M answers, Qwen2.5-Coder-1.5B is the Guardian\n")
    click.echo(shown.poor.verdict)
    if shown.served is not None:
        _show_served(shown.served)
    click.echo("\nWritten: " + ", ".join(shown.files))


def _show_served(served: "Served") -> None:
    from conformal_arbitrage.cli.tour import ALPHA

    click.echo("\n5. The same in production: an OpenAI-compatible gateway on this machine   arbitrage serve\n")
    saved = served.questions - served.deferred
    click.echo(
        f"{served.questions} questions that were not used for calibration were sent to POST /v1/decisions. The expert was "
        f"asked {served.deferred} times,\n{saved} calls were saved: ${served.cost:.2f} instead of ${served.always:.2f}. The "
        f"loss was {served.loss:.3f}; the quota is {ALPHA:g}.\n`make demo-serve` keeps it running."
    )
