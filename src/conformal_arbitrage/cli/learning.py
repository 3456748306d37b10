"""The command learn."""

from typing import Any

import click

from conformal_arbitrage.cli import options


@click.command("learn")
@click.argument("log")
@click.option("--share", type=float, default=0.4, show_default=True, help="Share of the rows to learn from.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random part.")
@click.option(
    "--learner",
    default="ridge",
    show_default=True,
    metavar="ridge|hist-gradient-boosting|MODULE:NAME",
    help="What learns; MODULE:NAME is a function or class of yours that returns an object with fit and predict.",
)
@click.option("--menu-size", type=int, metavar="N", help="Every query has this many actions: learn from each's score.")
@click.option("--text", is_flag=True, help="Learn from the texts of the queries as well; needs the extra `text`.")
@options.binarize
@options.columns
@click.option("-o", "--output", required=True, metavar="FILE", help="Write the other rows, scored, to this file.")
@options.as_json
def learn_command(
    log: str,
    *,
    share: float,
    seed: int,
    learner: str,
    menu_size: int | None,
    text: bool,
    binarize: bool,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    output: str,
    as_json: bool,
) -> None:
    """Learn a score on a part of a log, and write the rest in router form, scored by it.

    Any learner will do, since no row that it saw is calibrated: calibrate the scored log as usual.

    \b
    arbitrage learn log.parquet --share 0.4 -o scored.parquet
    arbitrage learn log.parquet --learner hist-gradient-boosting --binarize -o scored.parquet
    arbitrage calibrate scored.parquet --alpha 0.05 --loss net -o certificate.json
    """
    from conformal_arbitrage.calibration.learned_score import Features
    from conformal_arbitrage.calibration.learning import learn
    from conformal_arbitrage.scorers.user_code import load_object

    options.refuse_same(log, output)
    scores = options.read_log(log, primary_column, guardian_column, outcomes, binarized=binarize)
    chosen: Any = load_object(learner)() if ":" in learner else learner
    features = Features(menu_size=menu_size, text=text)
    learned = learn(scores, share=share, seed=seed, learner=chosen, features=features)
    learned.scored.write(output)
    if as_json:
        options.print_json({"learned": learned.learned_rows, "scored": len(learned.scored)})
        return
    click.echo(
        f"Written: {output}, {len(learned.scored)} rows in router form; {learned.learned_rows} were learned from."
    )
