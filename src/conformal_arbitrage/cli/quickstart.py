"""The command quickstart: two questions, a configuration, and the next three commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.errors import OutputError

if TYPE_CHECKING:
    from conformal_arbitrage.importing.quickstart import QuickStart

_ASK = """What do you have?
  csv        a table with scores of both models, recorded earlier (CSV, Parquet, JSON Lines)
  endpoints  two models to ask, and questions
  eval       two runs of an evaluation tool (lm-eval, inspect, a batch of the OpenAI API)"""
_FILES = {
    "csv": "Which table?",
    "endpoints": "Which file has the questions? (- if there is none yet)",
    "eval": "Which two runs? (the Primary's, then the Guardian's)",
}


@click.command("quickstart")
@click.argument("files", nargs=-1)
@click.option("--have", type=click.Choice(["csv", "endpoints", "eval"]), help="What you have; asked if not given.")
@click.option("--alpha", type=float, default=0.05, show_default=True, help="The risk budget.")
@click.option("--yes", is_flag=True, help="Ask nothing: FILES and --have say it all.  [default of --have: csv]")
@click.option("-o", "--output", default="arbitrage.toml", show_default=True, metavar="FILE", help="The configuration.")
@click.option("--force", is_flag=True, help="Overwrite an existing configuration.")
@options.as_json
def quickstart_command(
    *, files: tuple[str, ...], have: str | None, alpha: float, yes: bool, output: str, force: bool, as_json: bool
) -> None:
    """Ask what you have, write a configuration, and say what to run next.

    \b
    arbitrage quickstart
    arbitrage quickstart --yes scores.csv
    arbitrage quickstart --yes --have eval runs/small runs/large
    """
    from conformal_arbitrage.calibration.project_secret import ProjectSecret
    from conformal_arbitrage.importing.quickstart import quick_start
    from conformal_arbitrage.scorelog.files import write_text

    if Path(output).exists() and not force:
        raise OutputError(f"{output}: already exists; choose another name with -o, or overwrite it with --force")
    kind: Any = have or ("csv" if yes else _ask_kind())
    named = files or (() if yes else _ask_files(kind))
    start = quick_start(kind, named, alpha=alpha, config=output)
    write_text(output, start.configuration)
    ProjectSecret.create(Path(output).parent)
    _show_start(start, output, as_json=as_json)


def _ask_kind() -> str:
    click.echo(_ASK)
    return click.prompt("", type=click.Choice(["csv", "endpoints", "eval"]), default="csv", prompt_suffix="> ")


def _ask_files(kind: str) -> tuple[str, ...]:
    text: str = click.prompt(_FILES[kind], prompt_suffix="\n> ")
    return () if text.strip() == "-" else tuple(text.split()) if kind == "eval" else (text.strip(),)


def _show_start(start: "QuickStart", output: str, *, as_json: bool) -> None:
    if as_json:
        options.print_json({"found": start.found, "configuration": output, "commands": list(start.commands)})
        return
    click.echo(options.wrapped(f"Found: {start.found}."))
    click.echo(
        options.wrapped(
            f"Written: {output}, and the project's secret beside it: keep that out of version control, and back it up."
        )
    )
    click.echo("Next:\n  " + "\n  ".join(start.commands))
