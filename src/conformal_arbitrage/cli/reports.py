"""The command report: a month of a policy as one page to file."""

import time

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.service import with_store


@click.command("report")
@click.argument("policy")
@click.option("--month", required=True, metavar="YYYY-MM", help="The calendar month, in UTC.")
@click.option("-o", "--output", required=True, metavar="FILE", help="The HTML page to write.")
@options.config_file
@options.as_json
def report_command(policy: str, *, month: str, output: str, config: str, as_json: bool) -> None:
    """Write a month of a policy as one HTML page: promise, evidence, use, money, alarms, certificates, record.

    The page needs nothing else, has no scripts, and prints well.

    \b
    arbitrage report support --month 2026-11 -o support-2026-11.html
    """
    from conformal_arbitrage.live.config import read_config
    from conformal_arbitrage.live.database import existing_secret
    from conformal_arbitrage.live.report_page import report_page
    from conformal_arbitrage.live.reporting import Month, read_month
    from conformal_arbitrage.scorelog.files import write_text

    configuration, which = read_config(config), Month.of(month)
    signed = existing_secret(configuration) is not None
    report = with_store(
        config,
        lambda store: read_month(store, configuration, policy, which, now=time.time(), signed=signed),
        only_existing=True,
    )
    write_text(output, report_page(report))
    if as_json:
        state = None if report.standing is None else report.standing.state
        options.print_json({"output": output, "state": state, "ok": not report.problems, "problems": report.problems})
    else:
        click.echo(f"Written: {output}")
    for problem in report.problems:
        options.warn(problem)
    if report.problems:
        raise SystemExit(1)
