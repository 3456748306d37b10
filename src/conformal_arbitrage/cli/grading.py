"""The command that grades stored answers: records grade."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.live import show_estimate
from conformal_arbitrage.cli.progress import ProgressBar
from conformal_arbitrage.cli.service import with_store

if TYPE_CHECKING:
    from conformal_arbitrage.collecting.grade_records import Backlog, GradingResult
    from conformal_arbitrage.store import Store


@click.command("grade")
@click.option("--policy", required=True, metavar="NAME", help="The policy whose answers to grade.")
@click.option(
    "--grade",
    required=True,
    metavar="HOW",
    help="Grader: exact, regex or json-equal (with recorded labels), judge, human, python:MODULE:FUNCTION.",
)
@options.paid_run(
    limit="Grade the oldest N rows only.",
    dry_run="Send and record nothing; count the rows and estimate the cost.",
    max_cost="Stop before this run costs more.",
)
@options.config_file
@options.as_json
def records_grade_command(
    *, policy: str, grade: str, limit: int | None, dry_run: bool, config: str, as_json: bool, **settings: Any
) -> None:
    """Grade both answers of every stored row in free text that is fit for calibration; run again to resume.

    \b
    arbitrage records grade --policy support --grade judge --dry-run
    arbitrage records grade --policy support --grade judge --max-cost 5.00
    """
    from conformal_arbitrage.collecting.grade_records import estimate_grading, grade_records, read_backlog
    from conformal_arbitrage.live.config import read_config

    models = read_config(config)

    async def work(store: "Store") -> "tuple[Backlog, GradingResult | None]":
        backlog = await read_backlog(store, models, policy, grade=grade, limit=limit)
        if dry_run or not backlog.gradable:
            return backlog, None
        with nullcontext(None) if as_json or grade == "human" else ProgressBar() as bar:
            progress = None if bar is None else bar.show
            rows = backlog.gradable
            return backlog, await grade_records(store, models, rows, grade=grade, progress=progress, **settings)

    try:
        backlog, result = with_store(config, work)
    except KeyboardInterrupt as error:
        raise click.ClickException("interrupted; the grades so far are recorded, run again to resume") from error
    counts = backlog.counts
    if dry_run:
        if not as_json:
            _show_backlog(counts)
        show_estimate(
            options.run_coroutine(estimate_grading(models, backlog.gradable, grade=grade)), as_json=as_json, **counts
        )
        return
    _show_result(counts, result, as_json=as_json)


def _show_backlog(counts: dict[str, int]) -> None:
    click.echo(f"{counts['gradable']} rows to grade, {counts['graded']} have grades.")
    for name, reason in (
        ("no_content", 'their answers were not kept; set content = "full" in the policy, for rows to come'),
        ("no_guardian", "the Guardian has not answered them, or not yet"),
        ("no_label", "no label to compare them with was recorded with a key of scope review"),
    ):
        if counts[name]:
            options.warn(f"{counts[name]} rows cannot be graded: {reason}")


def _show_result(counts: dict[str, int], result: "GradingResult | None", *, as_json: bool) -> None:
    from conformal_arbitrage.upstream.pricing import dollars

    failed, problem = (0, None) if result is None else (result.failed, result.first_problem)
    new, cost = (0, 0.0) if result is None else (result.graded, result.spent.cost)
    if as_json:
        options.print_json({**counts, "newly_graded": new, "failed": failed, "cost": cost, "first_problem": problem})
        return
    _show_backlog(counts)
    click.echo(f"Graded: {new} rows, cost {dollars(cost)}.")
    if failed:
        options.warn(f"{failed} rows have no grades yet ({problem}); run the same command again to retry them")
