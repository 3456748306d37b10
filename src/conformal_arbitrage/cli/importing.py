"""The command import: score logs from the files of other tools, one subcommand per format."""

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options

if TYPE_CHECKING:
    from conformal_arbitrage.importing import Imported

_output = options.chained(
    click.option("-o", "--output", required=True, metavar="FILE", help="The score log to write."),
    options.as_json,
)
_unpaired = click.option(
    "--unpaired",
    type=click.Choice(["refuse", "drop"]),
    default="refuse",
    show_default=True,
    help="Questions that only one model was asked; drop states that this has nothing to do with the answers.",
)
_confidences = click.option(
    "--confidences", metavar="FILE", help="Table with id and confidence, for answers without a confidence."
)
_expected = click.option("--expected", metavar="FILE", help="Table with id and expected, the right answers.")
_judge = options.chained(
    options.config_file,
    click.option("--max-cost", type=float, metavar="$", help="Stop before a judge costs more."),
)
_GRADERS = "exact, regex, json-equal, python:MODULE:FUNCTION, judge or human"
_by_model = options.chained(
    click.option("--primary", required=True, metavar="MODEL", help="The Primary's model, as the files name it."),
    click.option("--guardian", required=True, metavar="MODEL", help="The Guardian's model."),
    click.option(
        "--join",
        metavar="FIELD",
        help="Field that both calls about a question share, such as metadata.question.  [default: the messages]",
    ),
    click.option("--group", metavar="FIELD", help="Field that names the group of a question."),
    _expected,
    _confidences,
    _unpaired,
    _judge,
)


@click.group("import", cls=options.WrappingGroup)
def import_command() -> None:
    """Turn the files of other tools into a score log, and say what in them could not be used.

    \b
    arbitrage import lm-eval runs/small runs/large -o log.parquet
    arbitrage import inspect small.eval large.eval -o log.parquet
    arbitrage import table s.csv --primary p0,p1 --guardian g0,g1 -o log.parquet
    """


@import_command.command("lm-eval")
@click.argument("primary")
@click.argument("guardian")
@click.option("--task", "tasks", multiple=True, metavar="NAME", help="Use this task only; may be repeated.")
@click.option("--metric", metavar="NAME", help="Metric that grades generated answers, from 0 to 1.")
@click.option("--filter", metavar="NAME", help="Filter of generated answers, if there are several.")
@click.option("--length-normalized", is_flag=True, help="Score options as acc_norm does.")
@click.option("--grade", metavar="HOW", help=f"Grade generated answers in place of a metric: {_GRADERS}.")
@_confidences
@_unpaired
@_output
def import_lm_eval_command(*, primary: str, guardian: str, output: str, as_json: bool, **settings: Any) -> None:
    """Read the per-sample files of two runs of lm-evaluation-harness (--log_samples), joined by document.

    PRIMARY and GUARDIAN are a samples file each, or a folder with several.
    """
    from conformal_arbitrage.importing import read_lm_eval

    _write(read_lm_eval(primary, guardian, **settings), output, as_json=as_json)


@import_command.command("inspect")
@click.argument("primary")
@click.argument("guardian")
@click.option("--scorer", metavar="NAME", help="Score that grades an answer, if there are several.")
@click.option(
    "--confidence",
    default="logprob",
    show_default=True,
    metavar="WHERE",
    help="logprob, agreement (of epochs), or a score of the Primary.",
)
@click.option("--group", metavar="FIELD", help="Field that names the group of a sample, such as metadata.subject.")
@click.option("--grade", metavar="HOW", help=f"Grade the answers in place of a score: {_GRADERS}.")
@_confidences
@_unpaired
@_output
def import_inspect_command(*, primary: str, guardian: str, output: str, as_json: bool, **settings: Any) -> None:
    """Read the logs of two models on one task of inspect_ai (.eval or .json), joined by sample."""
    from conformal_arbitrage.importing import read_inspect

    _write(read_inspect(primary, guardian, **settings), output, as_json=as_json)


@import_command.command("openai-batch")
@click.argument("primary")
@click.argument("guardian")
@click.option("--requests", metavar="FILE", help="The input file of the batch, for the questions.")
@click.option("--grade", required=True, metavar="HOW", help=f"Grader: {_GRADERS}.")
@_expected
@_confidences
@_unpaired
@_judge
@_output
def import_openai_batch_command(*, primary: str, guardian: str, output: str, as_json: bool, **settings: Any) -> None:
    """Read the output files of two batches of the OpenAI API over the same requests, joined by custom_id."""
    from conformal_arbitrage.importing import read_openai_batch

    _write(read_openai_batch(primary, guardian, **settings), output, as_json=as_json)


@import_command.command("litellm")
@click.argument("files", nargs=-1, required=True)
@click.option("--grade", required=True, metavar="HOW", help=f"Grader: {_GRADERS}.")
@click.option(
    "--confidence",
    default="logprob",
    show_default=True,
    metavar="WHERE",
    help="logprob, or the field of a call that holds a confidence.",
)
@_by_model
@_output
def import_litellm_command(*, files: tuple[str, ...], output: str, as_json: bool, **settings: Any) -> None:
    """Read logging payloads or spend logs of LiteLLM with calls of both models, joined by question."""
    from conformal_arbitrage.importing import read_litellm

    _write(read_litellm(files, **settings), output, as_json=as_json)


@import_command.command("langfuse")
@click.argument("files", nargs=-1, required=True)
@click.option("--score", metavar="NAME", help="Score of Langfuse that grades an answer, from 0 to 1; or give --grade.")
@click.option("--grade", metavar="HOW", help=f"Grader: {_GRADERS}.")
@click.option(
    "--confidence",
    default="logprob",
    show_default=True,
    metavar="WHERE",
    help="A score of the Primary's observation, a field such as metadata.confidence, or logprob.",
)
@_by_model
@_output
def import_langfuse_command(*, files: tuple[str, ...], output: str, as_json: bool, **settings: Any) -> None:
    """Read observations and scores that Langfuse exported, with generations of both models, joined by question."""
    from conformal_arbitrage.importing import read_langfuse

    _write(read_langfuse(files, **settings), output, as_json=as_json)


@import_command.command("routellm")
@click.argument("table")
@click.option("--weak", required=True, metavar="COL", help="Column of the weak model's grade (the Primary).")
@click.option("--strong", required=True, metavar="COL", help="Column of the strong model's grade (the Guardian).")
@click.option("--win-rate", metavar="COL", help="Column of the win rate.  [default: strong_win_rates, mf, bert, ...]")
@_output
def import_routellm_command(*, table: str, output: str, as_json: bool, **columns: Any) -> None:
    """Read a table with RouteLLM's win rates and the grades of both models' answers."""
    from conformal_arbitrage.importing import read_routellm

    _report(read_routellm(table, **columns), output, as_json=as_json)


@import_command.command("table")
@click.argument("table")
@click.option("--primary", required=True, metavar="A,B,...", help="The Primary's columns, one per option.")
@click.option("--guardian", required=True, metavar="A,B,...", help="The Guardian's columns, in the same order.")
@click.option("--outcome", "outcomes", multiple=True, metavar="NAME", help="List column to report as an outcome.")
@_output
def import_table_command(
    *, table: str, primary: str, guardian: str, outcomes: tuple[str, ...], output: str, as_json: bool
) -> None:
    """Read a plain table with one column per option and model."""
    from conformal_arbitrage.importing import read_wide

    columns = [[name.strip() for name in names.split(",")] for names in (primary, guardian)]
    imported = read_wide(table, primary=columns[0], guardian=columns[1], outcomes=outcomes)
    _report(imported, output, as_json=as_json)


def _write(reading: "Coroutine[Any, Any, Imported]", output: str, *, as_json: bool) -> None:
    _report(options.run_coroutine(reading), output, as_json=as_json)


def _report(imported: "Imported", output: str, *, as_json: bool) -> None:
    """Write the log, and tell what became of the files."""
    imported.log.write(output)
    if as_json:
        options.print_json({**imported.to_dict(), "output": output})
        return
    click.echo(f"Written: {output}, {len(imported.log)} rows of {imported.models[0]} and {imported.models[1]}")
    for one in imported.unused.to_list():
        click.echo(f"  not used: {one['count']} {one['reason']}, such as {', '.join(one['examples'])}")
    for note in imported.notes:
        click.echo(f"  note: {note}")
    click.echo(f"Next: arbitrage inspect {output}")
