"""The command skip: routing before asking."""

from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options

if TYPE_CHECKING:
    from conformal_arbitrage.evaluation.skipping import SkipChoice


@click.command("skip")
@click.argument("log")
@click.option("--alpha", required=True, metavar="A", help="The risk budget that the rest will be calibrated for.")
@click.option("--share", type=float, default=0.4, show_default=True, help="Share of the rows to learn and choose on.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random part.")
@click.option("--text", is_flag=True, help="Tell queries apart by their texts as well; needs the extra `text`.")
@click.option("--without-groups", is_flag=True, help="Do not read the log's groups.")
@click.option(
    "--group-source",
    metavar="NAME",
    help="What names the group of a live query, such as metadata.subject; a policy must name the same.",
)
@options.binarize
@options.columns
@options.costs
@click.option("-o", "--output", required=True, metavar="FILE", help="Write the rule to this JSON file.")
@click.option("--rest", required=True, metavar="FILE", help="Write the other rows, to be calibrated, to this file.")
@options.as_json
def skip_command(
    log: str,
    *,
    alpha: str,
    share: float,
    seed: int,
    text: bool,
    without_groups: bool,
    group_source: str | None,
    binarize: bool,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    output: str,
    rest: str,
    as_json: bool,
    **costs: Any,
) -> None:
    """Learn which queries go straight to the Guardian, by group and text, where that is cheaper.

    For a Primary that costs a fifth of the Guardian or more; the command says where it would not pay.

    \b
    arbitrage skip log.parquet --alpha 0.05 -o skip.json --rest rest.parquet
    arbitrage calibrate rest.parquet --alpha 0.05 -o certificate.json
    """
    from dataclasses import replace

    from conformal_arbitrage.evaluation.costs import CostOptions
    from conformal_arbitrage.evaluation.skipping import learn_skips

    options.refuse_same(log, output)
    options.refuse_same(log, rest)
    scores = options.read_log(log, primary_column, guardian_column, outcomes, binarized=binarize)
    choice = learn_skips(
        scores, alpha, share=share, seed=seed, groups=not without_groups, text=text, group_source=group_source,
        costs=CostOptions(**costs),
    )  # fmt: skip
    options.remember_look(choice.tuning, log, "skip")
    choice.rule.write(output)
    replace(choice.rest, binary=None).write(rest)
    _show_skips(choice, output, rest, as_json=as_json)


def _show_skips(choice: "SkipChoice", output: str, rest: str, *, as_json: bool) -> None:
    if as_json:
        figures = {name: getattr(choice, name) for name in ("skipped", "cost_ratio", "cost", "cost_without")}
        rows = {"learned": len(choice.tuning), "rest": len(choice.rest)}
        options.print_json({**rows, **figures, "sha256": choice.rule.sha256})
        return
    lines = (
        f"{100 * choice.skipped:.1f} % of the other rows go straight to the Guardian. On the rows to choose on, a query "
        f"costs {choice.cost:.3f} Guardian calls, and {choice.cost_without:.3f} if the Primary is always asked first.",
        f"Written: {output} and {rest}, {len(choice.rest)} rows; {len(choice.tuning)} were learned from. Calibrate {rest}, "
        f'and set skip = "{output}" in [primary].',
    )
    for line in lines:
        click.echo(options.wrapped(line))
