"""The command recommend: split, choose and certify in one go."""

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options

if TYPE_CHECKING:
    from conformal_arbitrage.evaluation.route_options import Recommendation
    from conformal_arbitrage.evaluation.route_plans import RoutePlan

CERTIFICATE = "certificate.json"


@click.command("recommend")
@click.argument("log", required=False)
@click.option("--alpha", metavar="A", help="The risk budget, a limit on the expected loss.  [default: as configured]")
@click.option(
    "--loss", type=click.Choice(["regret", "net"]), default="regret", show_default=True,
    help="What is promised: regret gives no credit for answers that beat the Guardian's, net does.",
)  # fmt: skip
@click.option(
    "--share", type=float, default=0.3, show_default=True,
    help="Share of the rows to choose on; the certificate does not use them.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the split.")
@click.option(
    "--trials", type=click.IntRange(2), default=20, show_default=True, help="Random halves to try options on."
)
@click.option(
    "--primary-column", "primary_columns", multiple=True, metavar="NAME",
    help="A Primary to choose from; may be repeated.  [default: primary, or every column of scores]",
)  # fmt: skip
@click.option(
    "--guardian-column", "guardian_columns", multiple=True, metavar="NAME",
    help="The Guardian; among several, the one that is right most often.  [default: guardian, or every column of scores]",
)  # fmt: skip
@click.option("--outcome", "outcomes", multiple=True, metavar="NAME", help="List column that is not a model's scores.")
@options.sample
@options.binarize
@click.option("--loss-bound", metavar="B", help="Largest possible loss; needed if Guardian scores leave [0, 1].")
@click.option(
    "--missing-guardian", type=click.Choice(["worst_case"]),
    help="Count rows without a Guardian score as the largest loss.",
)  # fmt: skip
@click.option(
    "--text", is_flag=True, help="Also try a score learned from the texts of the queries; needs the extra `text`."
)
@options.costs
@click.option("--from", "plan_file", metavar="FILE", help="Repeat the recommendation of this route plan, and compare.")
@click.option("--config", metavar="FILE", help="Source of alpha if not given.  [default: arbitrage.toml]")
@click.option(
    "--fixed-before", is_flag=True, help="State that alpha and loss were fixed before these rows were looked at."
)
@click.option(
    "-o", "--output", metavar="FILE",
    help=f"Write the route plan to this file, and {CERTIFICATE} beside it.  [default: write nothing]",
)  # fmt: skip
@options.as_json
def recommend_command(
    log: str | None,
    *,
    plan_file: str | None,
    config: str | None,
    fixed_before: bool,
    output: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Choose how to route on a part of a log, and certify the choice on the rest.

    \b
    arbitrage recommend log.parquet --alpha 0.05 -o route.toml
    arbitrage recommend --from route.toml                         the same again
    """
    from conformal_arbitrage.evaluation.looks import calibration_terms
    from conformal_arbitrage.scorelog.fitness import repeats

    plan, folder = _plan(log, plan_file, config, output, settings)
    source = plan.source(folder)
    options.refuse_same(source, output)
    secret = options.project_secret(config, Path(), folder, Path(source).parent)
    logs = plan.logs(folder)
    if plan.sample is not None:
        options.warn(f"from {len(logs[0]):,} rows: {logs[0].source}")
    recommendation = plan.recommend(logs, None if secret is None else secret.boundary_key)
    certificate, terms = recommendation.certificate, calibration_terms(recommendation.certificate)
    looks = options.describe_looks(recommendation.certified, source, config, fixed_before=fixed_before, terms=terms)
    certificate = certificate if looks is None else certificate.with_looks(looks)
    certificate = certificate if secret is None else certificate.sign(secret)
    options.remember_look(recommendation.tuning, source, "recommend", config=config)
    options.remember_look(recommendation.certified, source, "recommend", config=config, terms=terms)
    for problem in repeats(recommendation.certified).problems():
        options.warn(problem)
    done = plan.with_result(recommendation)
    if output is not None:
        certificate.save(Path(output).with_name(CERTIFICATE))
        done.write(output)
    _show(replace(recommendation, certificate=certificate), done, folder, output, as_json=as_json)
    _compare(plan, done)


def _plan(
    log: str | None, plan_file: str | None, config: str | None, output: str | None, settings: dict[str, Any]
) -> tuple["RoutePlan", Path]:
    """Return the plan to follow, and the folder that its log is relative to."""
    from conformal_arbitrage.evaluation.route_plans import RoutePlan, read_route_plan

    if plan_file is not None:
        context = click.get_current_context()
        own = [
            name for name in settings if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        ]
        if log is not None or own:
            raise click.UsageError("--from takes the log and every setting from the plan; drop the other options")
        return read_route_plan(plan_file), Path(plan_file).parent
    if log is None:
        raise click.UsageError("give the score log, or --from with a route plan that names it")
    folder = Path(output).parent if output is not None else Path()
    settings["alpha"] = settings["alpha"] or repr(options.read_configured(config).alpha)
    settings["sample"] = options.sample_of(log, settings["sample"])
    return RoutePlan(log=_relative(log, folder), **settings), folder


def _relative(log: str, folder: Path) -> str:
    """Return a log as a plan in a folder names it; a URL as it is."""
    from conformal_arbitrage.scorelog.locations import scheme_of

    return os.path.relpath(log, folder) if scheme_of(log) is None else log


def _compare(plan: "RoutePlan", done: "RoutePlan") -> None:
    """Exit with code 1 if a plan was repeated and came to something else."""
    differences = plan.differences(done)
    for line in differences:
        click.echo(f"arbitrage: this is not what the plan recorded: {line}", err=True)
    if differences:
        raise SystemExit(1)


def _show(
    recommendation: "Recommendation", plan: "RoutePlan", folder: Path, output: str | None, *, as_json: bool
) -> None:
    certificate = CERTIFICATE if output is None else str(Path(output).with_name(CERTIFICATE))
    commands = plan.commands(folder, certificate)
    if as_json:
        options.print_json(recommendation.to_dict() | {"commands": commands})
        return
    options.print_facts(recommendation.facts())
    options.print_table(*recommendation.table(), title="\nWhat each option would cost, on the rows to choose on")
    lines = [recommendation.why_this_loss(), recommendation.more_rows(), *_left_out(recommendation)]
    for line in lines:
        click.echo(options.wrapped(line))
    click.echo(f"\n{options.wrapped(recommendation.certificate.summary)}\n")
    if output is not None:
        files = _written(recommendation, output, certificate)
        click.echo(options.wrapped(f"Written: {files}, with the whole guarantee and its conditions."))
        if not recommendation.certificate.signed:
            unsigned = "It is unsigned, so `serve` refuses it: there is no project secret; `arbitrage init` writes one."
            click.echo(options.wrapped(unsigned))
    click.echo("\n".join(["By hand:", *map(_wrapped_command, commands)]))


def _written(recommendation: "Recommendation", output: str, certificate: str) -> str:
    """Return the files that were written; the arrays of a learned score lie beside the certificate."""
    from conformal_arbitrage.calibration.learned_score import sidecar_path

    if recommendation.certificate.fit is None:
        return f"{output} and {certificate}"
    return f"{output}, {sidecar_path(certificate)} and {certificate}"


def _wrapped_command(command: str) -> str:
    """Return a shell command on lines of a readable width, which can be pasted as they are."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if lines[-1] and len(lines[-1]) + len(word) + len(" " + " \\") > options.readable_width():
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _left_out(recommendation: "Recommendation") -> list[str]:
    return [f"Left out: {name}, since {reason}." for name, reason in recommendation.left_out.items()]
