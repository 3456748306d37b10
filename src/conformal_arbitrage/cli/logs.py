"""Commands on score logs: make one, look into it, and run experiments on it."""

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from conformal_arbitrage import experiments
from conformal_arbitrage.calibration.learned import Features
from conformal_arbitrage.calibration.learning import learn
from conformal_arbitrage.calibration.planning import split
from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.models import progress_line, show_estimate
from conformal_arbitrage.cli.output import (
    name_left_out,
    print_facts,
    print_fitted,
    print_json,
    print_progress,
    print_table,
    screen_width,
    warn,
    wrapped,
)
from conformal_arbitrage.collecting.records import pair_log_of
from conformal_arbitrage.core.exact import Floats, n_rows
from conformal_arbitrage.evaluation import show
from conformal_arbitrage.evaluation import simulation as simulation_report
from conformal_arbitrage.evaluation.assessment import Assessment, SwapLoss, assess, model_grades, swap, without_verdict
from conformal_arbitrage.evaluation.compare import compare
from conformal_arbitrage.evaluation.frontier import Frontier, evaluate, evaluate_cascade
from conformal_arbitrage.evaluation.inspection import Inspection, inspect, rows_to_choose_on
from conformal_arbitrage.evaluation.show import save_simulation
from conformal_arbitrage.evaluation.simulation import Scenario, Simulation, simulate
from conformal_arbitrage.experiments import parts_of
from conformal_arbitrage.experiments.data import Live
from conformal_arbitrage.experiments.protocol import Source
from conformal_arbitrage.importing import (
    Imported,
    read_inspect,
    read_langfuse,
    read_litellm,
    read_lm_eval,
    read_openai_batch,
    read_routellm,
    read_vllm_sr,
    read_wide,
)
from conformal_arbitrage.importing.pairing import Tally, Unpaired, paired
from conformal_arbitrage.importing.quickstart import QuickStart, quick_start, read_run, read_two_grades
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.models.kinds import load_object
from conformal_arbitrage.scorelog.log import LEVELS, CostOptions, ScoreLog, read_confidence
from conformal_arbitrage.scorelog.tables import Table, file_format, write_text

_WIDTH_WITH_SPREAD = 160
"""Columns of a terminal from which each mean has its standard error beside it."""


# --- quickstart ---


_ASK = """What do you have?
  csv        a table with scores of both models, recorded earlier (CSV, Parquet, JSON Lines)
  endpoints  two models to ask, and questions
  eval       two runs of an evaluation tool (lm-eval, inspect, a batch of the OpenAI API)"""
_ALPHA = "How much worse than the Guardian may answers be, on average? (0.05: 5 points)"
_FILES = {
    "csv": "Which table?",
    "endpoints": "Which file has the questions? (- if there is none yet)",
    "eval": "Which two runs? (the Primary's, then the Guardian's)",
}


@click.command("quickstart")
@click.argument("files", nargs=-1)
@click.option("--have", type=click.Choice(["csv", "endpoints", "eval"]), help="What you have; asked if not given.")
@click.option(
    "--alpha", type=options.SHARE, help="The risk budget, such as 0.05 or 5%; asked if not given.  [default: 0.05]"
)
@click.option("--yes", is_flag=True, help="Ask nothing: FILES and --have say it all.  [default of --have: csv]")
@click.option("-o", "--output", default="arbitrage.toml", show_default=True, metavar="FILE", help="The configuration.")
@click.option("--force", is_flag=True, help="Overwrite an existing configuration.")
@options.as_json
def quickstart_command(
    *, files: tuple[str, ...], have: str | None, alpha: str | None, yes: bool, output: str, force: bool, as_json: bool
) -> None:
    """Ask what you have and say what to run next; write a configuration for endpoints.

    \b
    arbitrage quickstart
    arbitrage quickstart --yes scores.csv
    arbitrage quickstart --yes --have eval runs/small runs/large
    """
    kind: Any = have or ("csv" if yes else _ask_kind())
    named = files or (() if yes else _ask_files(kind))
    budget = alpha or ("0.05" if yes else click.prompt(_ALPHA, type=options.SHARE, default="0.05"))
    start = quick_start(kind, named, alpha=budget, config=output)
    if start.configuration is not None:
        options.refuse_existing(output, force=force)
        write_text(output, start.configuration)
    _show_start(start, output, as_json=as_json)


def _ask_kind() -> str:
    click.echo(_ASK)
    return click.prompt("", type=click.Choice(["csv", "endpoints", "eval"]), default="csv", prompt_suffix="> ")


def _ask_files(kind: str) -> tuple[str, ...]:
    text: str = click.prompt(_FILES[kind], prompt_suffix="\n> ")
    return () if text.strip() == "-" else tuple(text.split()) if kind == "eval" else (text.strip(),)


def _show_start(start: QuickStart, output: str, *, as_json: bool) -> None:
    if as_json:
        written = None if start.configuration is None else output
        print_json({"found": start.summary, "configuration": written, "commands": list(start.commands)})
        return
    click.echo(wrapped(f"Found: {start.summary}."))
    if start.configuration is not None:
        click.echo(f"Written: {output}. Name your models there (url, model), and export each key_env (OPENAI_API_KEY).")
    click.echo("Next:\n  " + "\n  ".join(start.commands))


# --- import and router-log ---


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
    click.option("--guardian", metavar="MODEL", help="The Guardian's model; leave it out for the items of a batch."),
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
@click.argument("guardian", required=False)
@click.option("--task", "tasks", multiple=True, metavar="NAME", help="Use this task only; may be repeated.")
@click.option("--metric", metavar="NAME", help="Metric that grades generated answers, from 0 to 1.")
@click.option("--filter", metavar="NAME", help="Filter of generated answers, if there are several.")
@click.option("--length-normalized", is_flag=True, help="Score options as acc_norm does.")
@click.option("--grade", metavar="HOW", help=f"Grade generated answers in place of a metric: {_GRADERS}.")
@_confidences
@_unpaired
@_output
def import_lm_eval_command(*, primary: str, guardian: str | None, output: str, as_json: bool, **settings: Any) -> None:
    """Read the per-sample files of two runs of lm-evaluation-harness (--log_samples), joined by document.

    PRIMARY and GUARDIAN are a samples file each, or a folder with several.
    """
    _write(read_lm_eval(primary, guardian, **settings), output, as_json=as_json)


@import_command.command("inspect")
@click.argument("primary")
@click.argument("guardian", required=False)
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
def import_inspect_command(*, primary: str, guardian: str | None, output: str, as_json: bool, **settings: Any) -> None:
    """Read the logs of two models on one task of inspect_ai (.eval or .json), joined by sample."""
    _write(read_inspect(primary, guardian, **settings), output, as_json=as_json)


@import_command.command("openai-batch")
@click.argument("primary")
@click.argument("guardian", required=False)
@click.option("--requests", metavar="FILE", help="The input file of the batch, for the questions.")
@click.option("--grade", metavar="HOW", help=f"Grader of both models' answers: {_GRADERS}.")
@_expected
@_confidences
@_unpaired
@_judge
@_output
def import_openai_batch_command(
    *, primary: str, guardian: str | None, output: str, as_json: bool, **settings: Any
) -> None:
    """Read the output files of two batches of the OpenAI API over the same requests, joined by custom_id."""
    _write(read_openai_batch(primary, guardian, **settings), output, as_json=as_json)


@import_command.command("litellm")
@click.argument("files", nargs=-1, required=True)
@click.option("--grade", metavar="HOW", help=f"Grader of both models' answers: {_GRADERS}.")
@click.option(
    "--confidence",
    default="logprob",
    show_default=True,
    metavar="WHERE",
    help="logprob, forecast (of classifier type llm_v2), or the field of a call that holds a confidence.",
)
@_by_model
@_output
def import_litellm_command(*, files: tuple[str, ...], output: str, as_json: bool, **settings: Any) -> None:
    """Read logging payloads or spend logs of LiteLLM with calls of both models, joined by question."""
    _write(read_litellm(files, **settings), output, as_json=as_json)


@import_command.command("vllm-sr")
@click.argument("files", nargs=-1, required=True)
@click.option("--signal", required=True, metavar="NAME", help="The complexity signal that routes.")
@click.option("--grade", required=True, metavar="HOW", help=f"Grader: {_GRADERS}.")
@click.option("--primary", required=True, metavar="MODEL", help="The model for easy questions.")
@click.option("--guardian", required=True, metavar="MODEL", help="The model for hard ones.")
@click.option("--join", metavar="FIELD", help="Field that both records of a question share.  [default: the messages]")
@click.option("--group", metavar="FIELD", help="Field that names the group of a question.")
@_expected
@_unpaired
@_judge
@_output
def import_vllm_sr_command(*, files: tuple[str, ...], output: str, as_json: bool, **settings: Any) -> None:
    """Read replay records of the vLLM Semantic Router with answers of both models, joined by question."""
    _write(read_vllm_sr(files, **settings), output, as_json=as_json)


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
    _write(read_langfuse(files, **settings), output, as_json=as_json)


@import_command.command("routellm")
@click.argument("table")
@click.option("--weak", required=True, metavar="COL", help="Column of the weak model's grade (the Primary).")
@click.option("--strong", required=True, metavar="COL", help="Column of the strong model's grade (the Guardian).")
@click.option("--win-rate", metavar="COL", help="Column of the win rate.  [default: strong_win_rates, mf, bert, ...]")
@_output
def import_routellm_command(*, table: str, output: str, as_json: bool, **columns: Any) -> None:
    """Read a table with RouteLLM's win rates and the grades of both models' answers."""
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
    columns = {"primary": options.listed(primary), "guardian": options.listed(guardian)}
    _report(read_wide(table, **columns, outcomes=outcomes), output, as_json=as_json)


def _write(reading: Coroutine[Any, Any, Imported], output: str, *, as_json: bool) -> None:
    _report(asyncio.run(reading), output, as_json=as_json)


def _report(imported: Imported, output: str, *, as_json: bool) -> None:
    """Write the log, and tell what became of the files."""
    imported.log.write(output)
    if as_json:
        print_json({**imported.to_dict(), "output": output})
        return
    click.echo(f"Written: {output}, {n_rows(len(imported.log))} of {' and '.join(imported.models)}")
    for kind in imported.unused.to_list():
        click.echo(f"  not used: {kind['count']} {kind['reason']}, such as {', '.join(kind['examples'])}")
    for note in imported.notes:
        click.echo(f"  note: {note}")
    batch = len(imported.models) == 1
    click.echo(f"Next: arbitrage batch plan {output} --error 5%" if batch else f"Next: arbitrage inspect {output}")


_CONVERTED = {
    "words": ", ".join(f"{value:g} for {word}" for word, value in LEVELS.items()),
    "percentages": "shares from 0 to 1",
    "log-probabilities": "probabilities (e to that power)",
}


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
@click.option("--id", "id_column", default="id", show_default=True, metavar="COL", help="Column that names each row.")
@_output
def router_log_command(
    outcomes: str,
    *,
    confidence: str,
    primary_grade: str,
    guardian_grade: str,
    id_column: str,
    output: str,
    as_json: bool,
) -> None:
    """Turn any table of router scores and outcomes into a score log.

    The columns group, context, primary_cost and guardian_cost are kept, and what --id names.

    \b
    arbitrage router-log runs.csv --confidence score --primary-grade small_ok \\
        --guardian-grade big_ok -o log.parquet
    """
    log = ScoreLog.read_router(
        outcomes, confidence=confidence, primary_grade=primary_grade, guardian_grade=guardian_grade, id=id_column
    )
    log.write(output)
    with Table(outcomes) as table:
        _, held = read_confidence(table, confidence)
    summary = {
        "rows": len(log),
        "confidence_from": held,
        "no_confidence_rows": int(log.no_opinion.sum()),
        "ungraded_rows": int(log.missing.sum()),
        "output": output,
    }
    if as_json:
        print_json(summary)
    else:
        click.echo(f"Written: {output}, {n_rows(len(log))} ({summary['ungraded_rows']} without a grade)")
        if summary["ungraded_rows"]:
            click.echo(
                "Rows without a grade: grade them, or count them as the largest loss: --missing-guardian worst_case."
            )
        if held:
            click.echo(
                wrapped(f"{confidence} holds {held}; the log has {_CONVERTED[held]}: convert later ones likewise.")
            )


# --- inspect, split, learn and assess ---


@click.command("inspect")
@click.argument("log")
@options.loss_bound
@options.binarize
@options.columns
@options.sample
@options.costs
@options.as_json
def inspect_command(
    log: str,
    *,
    loss_bound: str | None,
    binarize: bool,
    columns: options.Columns,
    sample: int | None,
    as_json: bool,
    costs: CostOptions,
) -> None:
    """Show what a log contains, and whether its pair of models is worth routing.

    \b
    arbitrage inspect log.parquet --primary-column qwen15b --guardian-column expert
    """
    scores = options.read_log(log, columns, binarized=binarize, sample=sample)
    inspection = inspect(scores, loss_bound=loss_bound, costs=costs)
    if options.in_parts(log):
        counts = options.counts_of_parts(log, columns, binarized=binarize)
        inspection = inspection.with_counts(counts, log)
    options.remember_look(rows_to_choose_on(scores).lineage(), "inspect")
    if as_json:
        print_json(inspection.to_dict())
    else:
        show_inspection(inspection)


def show_inspection(inspection: Inspection) -> None:
    """Print an inspection for people."""
    print_facts(inspection.facts())
    if inspection.budgets:
        header, rows = inspection.budget_table()
        which = f"{n_rows(inspection.budget_rows)}, those that `recommend` sets aside for choosing"
        print_table(header, rows, title=f"How often each budget asks the Guardian, estimated on {which}")
    click.echo(wrapped(inspection.verdict))
    for problem in inspection.problems:
        click.echo(f"  note: {problem}")
    for step in inspection.next_steps:
        click.echo(wrapped(step))


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
    columns: options.Columns,
    sample: int | None,
    as_json: bool,
) -> None:
    """Split a log at random: choose alpha and options on EXPLORE, calibrate on CERTIFY.

    \b
    arbitrage split log.parquet explore.parquet certify.parquet --share 0.3
    """
    for left, other in ((log, explore), (log, certify), (explore, certify)):
        options.refuse_same(left, other)
        file_format(Path(other))
    scores = options.read_log(log, columns, sample=sample)
    parts = split(scores, share=share, seed=seed)
    for part, path in zip(parts, (explore, certify), strict=True):
        part.write(path)
    if as_json:
        print_json({"explore": len(parts[0]), "certify": len(parts[1])})
    else:
        click.echo(f"Written: {explore} ({n_rows(len(parts[0]))}) and {certify} ({n_rows(len(parts[1]))})")


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
@click.option("--answers", is_flag=True, help="Learn from what the Primary answered as well.")
@click.option(
    "--loss", type=click.Choice(["regret", "net"]), default="regret", show_default=True, help="What is learned."
)
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
    answers: bool,
    loss: str,
    binarize: bool,
    columns: options.Columns,
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
    options.refuse_same(log, output)
    scores = options.read_log(log, columns, binarized=binarize)
    chosen: Any = load_object(learner)() if ":" in learner else learner
    features = Features(menu_size=menu_size, text=text, answers=answers)
    learned = learn(
        scores, share=share, seed=seed, learner=chosen, features=features, loss="net" if loss == "net" else None
    )
    learned.scored.write(output)
    if as_json:
        print_json({"learned": learned.learned_rows, "scored": len(learned.scored)})
        return
    click.echo(
        f"Written: {output}, {n_rows(len(learned.scored))} in router form; {learned.learned_rows} were learned from."
    )


@click.command("assess")
@click.argument("certificate")
@click.argument("log")
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Confidence of the interval.")
@options.columns
@options.sample
@options.costs
@options.as_json
def assess_command(
    certificate: str,
    log: str,
    *,
    confidence: float,
    columns: options.Columns,
    sample: int | None,
    as_json: bool,
    costs: CostOptions,
) -> None:
    """Measure the realised loss of a certificate on new rows, with an exact confidence interval.

    \b
    arbitrage assess certificate.json new-rows.parquet
    """
    loaded = options.load_pair_certificate(certificate)
    scores = options.read_log(log, columns.of(loaded), sample=sample)
    assessment = assess(loaded, scores, confidence=confidence, costs=costs)
    if options.made_from(loaded, log, columns):
        assessment = without_verdict(assessment)
    options.remember_look(scores.lineage(), "assess")
    if as_json:
        print_json(assessment.to_dict())
    else:
        show_assessment(assessment)


def show_assessment(assessment: Assessment) -> None:
    """Print an assessment for people; its problems are warnings."""
    print_facts(assessment.facts())
    click.echo(wrapped(assessment.verdict))
    for problem in assessment.problems:
        warn(problem)


# --- swap ---


_SWAP_STATUS = {"switch": 0, "keep": 1, "not yet": 3}
"""Exit codes; 2 is an error."""


@click.command("swap")
@click.argument("files", nargs=-1, metavar="[OLD NEW | TABLE]")
@click.option(
    "--alpha", type=options.SHARE, required=True, metavar="A",
    help="The most that the replacement may lose per question, on average, such as 0.02 or 2%.",
)  # fmt: skip
@click.option("--confidence", default="0.95", show_default=True, metavar="P", help="Confidence of either verdict.")
@click.option(
    "--loss", type=click.Choice(["net", "regret"]),
    help="net counts gains; regret does not.  [default: net, or regret on a log of menus without labels]",
)  # fmt: skip
@options.loss_bound
@click.option("--old", metavar="COL", help="Column of the old model's grades, in one TABLE.")
@click.option("--new", metavar="COL", help="Column of the new model's grades, in one TABLE.")
@click.option(
    "--grade", metavar="NAME", help="Column of grades in OLD and NEW; a metric of lm-eval, a score of inspect."
)
@_unpaired
@options.roles
@click.option(
    "--policy", metavar="NAME", help="Judge the recorded traffic of this policy of a gateway instead of files."
)
@options.config_file
@options.as_json
def swap_command(
    *,
    files: Sequence[str],
    alpha: str,
    confidence: str,
    loss: SwapLoss | None,
    loss_bound: str | None,
    old: str | None,
    new: str | None,
    grade: str | None,
    unpaired: Unpaired,
    columns: options.Columns,
    policy: str | None,
    config: str,
    as_json: bool,
) -> None:
    """Say whether a new model may replace an old one: "switch", "keep" or "not yet".

    Look as often as you like: the answer is valid at every number of questions. Exit codes: 0 switch, 1 keep, 3 not yet.

    OLD and NEW hold one model's graded answers each: a table with id and grade, a run of lm-eval, or a log of inspect. One
    TABLE has both grades in columns (--old, --new), or is a score log, whose Guardian is the old model and whose Primary is
    the new one; so it is with --policy.

    \b
    arbitrage swap large.csv small.csv --alpha 2%
    arbitrage swap runs/large runs/small --alpha 2% --grade exact_match
    arbitrage swap grades.csv --old large_ok --new small_ok --alpha 2%
    arbitrage swap --policy support --alpha 2%
    """
    if len(files) == 2 and not (old or new or policy):
        grades, source = _paired_grades(files, grade, unpaired), " and ".join(files)
    elif len(files) == 1 and old is not None and new is not None and not policy:
        grades, source = read_two_grades(files[0], old, new), files[0]
    elif (len(files), bool(policy)) in ((1, False), (0, True)) and not (old or new):
        log = _swapped_log(files, columns, policy, config)
        loss = loss or ("net" if "correct" in log.outcome_names else "regret")
        grades, source = model_grades(log, loss), log.source
        options.remember_look(log.lineage(), "swap")
    else:
        raise click.UsageError(
            "give two files, OLD NEW; or one TABLE, with --old and --new or as a score log; or --policy NAME"
        )
    result = swap(*grades, alpha=alpha, confidence=confidence, loss=loss or "net", loss_bound=loss_bound, source=source)
    if as_json:
        print_json(result.to_dict())
    else:
        print_facts(result.facts())
        click.echo(wrapped(result.answer))
        click.echo(wrapped(result.promise))
    raise SystemExit(_SWAP_STATUS[result.verdict])


def _swapped_log(files: Sequence[str], columns: options.Columns, policy: str | None, config: str) -> ScoreLog:
    """Return the log whose Guardian is the old model and whose Primary is the new one: a file's, or a policy's records."""
    if policy is None:
        if columns == options.Columns() and Path(files[0]).is_file():
            with Table(files[0]) as table:
                if "primary" not in table.types:
                    raise click.UsageError(
                        f"{files[0]} is no score log (columns {', '.join(table.types)}): give a second file, OLD NEW, or "
                        "name the two columns of grades with --old and --new"
                    )
        return options.read_log(files[0], columns)
    return options.with_store(config, lambda store: pair_log_of(store, policy), only_existing=True)


def _paired_grades(files: Sequence[str], grade: str | None, unpaired: Unpaired) -> tuple[Floats, Floats]:
    """Return the grades of the old and of the new model on the questions of both."""
    old, new = (read_run(file, grade=grade) for file in files)
    pairs = paired(new, old, unpaired=unpaired, unused=Tally(), roles=("new model", "old model"))
    new_grades, old_grades = np.array([[a.grade, b.grade] for a, b in pairs], dtype=np.float64).T
    return old_grades, new_grades


# --- evaluate and compare ---


@click.command(
    "evaluate",
    cls=options.SectionedCommand,
    sections={"The trials": ("test_size", "trials", "seed", "balance_by", "sample_size", "probabilities", "sample")}
    | {"What is shown": ("figure", "x", "delta_x", "delta_of", "form", "per_trial")}
    | options.PROMISE
    | options.LOSS
    | options.SCORE
    | options.CASCADE,
)
@click.argument("log")
@options.alphas
@click.option("--calibration-size", type=int, required=True, metavar="N", help="Rows to calibrate on in each trial.")
@click.option("--test-size", type=int, metavar="N", help="Rows to test on in each trial.  [default: the rest]")
@click.option("--trials", type=int, default=30, show_default=True, help="Random splits; `compare` calls them --splits.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the splits.")
@click.option("--balance-by", metavar="COLUMN", help="Draw the rows of each trial balanced over this column.")
@click.option("--sample-size", type=int, metavar="N", help="Number of rows that --balance-by draws.")
@click.option(
    "--probability", "probabilities", multiple=True, type=float, metavar="Q",
    help="Add random routing with this probability of using the Guardian; may be repeated.",
)  # fmt: skip
@options.rule
@options.confident
@options.path_options
@options.learned
@options.columns
@options.sample
@options.costs
@click.option(
    "--delta-x", type=click.Choice(["cost", "loss"]), default="cost", show_default=True,
    help="Compare with the single models at the same cost, or at the same loss.",
)  # fmt: skip
@click.option(
    "--delta-of", default="correct", show_default=True, metavar="OUTCOME", help="Outcome that delta is measured in."
)
@click.option("--plot", "figure", metavar="FILE", help="Save a figure of the frontier (.png, .svg, .pdf).")
@click.option("--x", default="cost", show_default=True, metavar="cost|loss|OUTCOME", help="The figure's x-axis.")
@click.option("--json", "form", flag_value="json", help="Print one JSON document.")
@click.option("--csv", "form", flag_value="csv", help="Print CSV.")
@click.option("--markdown", "form", flag_value="markdown", help="Print a Markdown table.")
@click.option("--latex", "form", flag_value="latex", help="Print a LaTeX table.")
@click.option("--per-trial", is_flag=True, help="With --json: include the values of every trial.")
def evaluate_command(
    log: str,
    *,
    alphas: tuple[str, ...],
    binarize: bool,
    columns: options.Columns,
    sample: int | None,
    figure: str | None,
    x: str,
    form: str | None,
    per_trial: bool,
    delta_of: str,
    loss: Any,
    **sweep: Any,
) -> None:
    """Run held-out trials: what each budget buys, compared with the single models and random routing.

    \b
    arbitrage evaluate log.parquet --alpha 0.05 --alpha 0.1 --calibration-size 400 \\
        --primary-cost 1 --guardian-cost 20 --plot frontier.png
    arbitrage evaluate cascade.parquet --path --alpha 0.05 --calibration-size 400
    """
    learned = options.learned_options(sweep)
    chain = options.chain_options(sweep)
    if chain is not None:
        return _evaluate_cascade(
            log, alphas, form, loss=loss, guardian=columns.guardian_column, chain=chain, sweep=sweep
        )
    scores = options.read_log(log, columns, binarized=binarize, sample=sample)
    frontier = evaluate(scores, alphas, delta_of=delta_of, loss=loss, **learned, **sweep)
    if figure is not None:
        frontier.plot(figure, x=x, y=delta_of)
    options.remember_look(scores.lineage(), "evaluate")
    if form == "json":
        print_json(frontier.to_dict(per_trial=per_trial))
    else:
        show_frontier(frontier, form)
    if figure is not None and form is None:
        click.echo(f"Written: {figure}")


def _evaluate_cascade(
    log: str,
    alphas: tuple[str, ...],
    form: str | None,
    *,
    loss: Any,
    guardian: str | None,
    chain: dict[str, Any],
    sweep: dict[str, Any],
) -> None:
    """Run held-out trials of a cascade, and show what they cost and lose."""
    if form not in (None, "json"):
        raise click.UsageError(f"trials of a cascade are printed as a table or with --json, not with --{form}")
    scores = options.read_cascade(log, guardian, chain.pop("models"))
    names = ("calibration_size", "test_size", "trials", "seed", "missing_guardian")
    evaluation = evaluate_cascade(scores, alphas, loss=loss, **chain, **{name: sweep[name] for name in names})
    options.remember_look(scores.lineage(), "evaluate")
    if form == "json":
        print_json(evaluation.to_dict())
        return
    header = ["alpha", "loss", "trials over alpha", "cost / Guardian alone", "Guardian answers", "chains chosen"]
    rows = [
        [
            f"{point.alpha:g}",
            f"{point.loss:.4f} ± {point.loss_error:.4f}",
            f"{point.over:.2f}",
            f"{point.cost:.3f} ± {point.cost_error:.3f}",
            f"{100 * point.guardian_share:.1f} %",
            ", ".join(f"{chain} ({count})" for chain, count in list(point.chains.items())[:3]),
        ]
        for point in evaluation.points
    ]
    print_table(header, rows, title=f"{evaluation.trials} trials, mean ± standard error")
    click.echo("The promise is an average, so single trials may lie above alpha, about half of them.")


def show_frontier(frontier: Frontier, form: str | None = None) -> None:
    """Print a frontier as a table for people, or as text in a format."""
    if form is not None:
        to_text = {"csv": show.to_csv, "markdown": show.to_markdown, "latex": show.to_latex}[form]
        click.echo(to_text(frontier), nl=False)
        return
    spread = screen_width() >= _WIDTH_WITH_SPREAD
    header, rows = show.cells(frontier, spread=spread, standard_error=True)
    title = f"{frontier.trials} trials: {n_rows(frontier.calibration_size)} to calibrate, {frontier.test_size} to test"
    left_out = print_fitted(header, rows, show.expendable(header), title=title)
    footnote = "±: standard error over trials of this log. " if spread and frontier.trials > 1 else ""
    click.echo(wrapped(f"{footnote}{_standard_error(frontier)}"))
    name_left_out(left_out)
    if frontier.points[0].values("cost_per_1000") is None:
        remedy = "give --primary-cost and --guardian-cost"
        click.echo(wrapped(f"No costs, so no random routing at the same cost and no delta: {remedy}."))


def _standard_error(frontier: Frontier) -> str:
    """Describe how exactly the trials determine the mean loss."""
    spreads = [point.summary("loss").get("std") for point in frontier.of("conformal")]
    errors = [spread / frontier.trials**0.5 for spread in spreads if spread is not None]
    if not errors:
        return "One trial has no standard error."
    return f"Standard error of the mean loss: {max(errors):.4f} or less."


@click.command("compare")
@click.argument("log")
@options.alphas
@click.option("--calibration-size", type=int, default=400, show_default=True, metavar="N", help="Rows to calibrate on.")
@click.option(
    "--test-size", type=int, metavar="N", help="Rows to test on in each split.  [default: the rest, 2000 at most]"
)
@click.option(
    "--splits", type=int, default=200, show_default=True, help="Random splits; `evaluate` calls them --trials."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the splits.")
@click.option("--menu-size", type=int, metavar="K", help="Number of actions, if it is the same for every query.")
@options.binarize
@options.columns
@options.sample
@options.costs
@click.option("--plot", "figure", metavar="FILE", help="Save a figure of the first budget (.png, .svg, .pdf).")
@options.as_json
def compare_command(
    log: str,
    *,
    alphas: tuple[str, ...],
    binarize: bool,
    columns: options.Columns,
    sample: int | None,
    figure: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Compare decision rules on a log: how often each asks the Guardian, and whether it keeps the budget.

    Peers' rules are their decision rules on this log's scores, not their code.

    \b
    arbitrage compare log.parquet --alpha 0.05 --splits 200 --plot compare.png
    """
    scores = options.read_log(log, columns, binarized=binarize, sample=sample)
    comparison = compare(scores, alphas, progress=None if as_json else print_progress, **settings)
    options.remember_look(scores.lineage(), "compare")
    if figure is not None:
        comparison.plot(figure)
    if as_json:
        print_json(comparison.to_dict())
        return
    title = f"{comparison.splits} splits: {n_rows(comparison.calibration_size)} to calibrate, {comparison.test_size} to test"
    left_out = print_fitted(*comparison.table(), ("net loss", "$ per 1000"), title=title)
    name_left_out(left_out)
    for line in comparison.notes():
        click.echo(wrapped(line))
    if figure is not None:
        click.echo(f"Written: {figure}")


# --- simulate and reproduce ---


@click.command("simulate")
@click.argument("log")
@click.option("--alpha", type=options.SHARE, required=True, metavar="A", help="The risk budget, such as 0.05 or 5%.")
@click.option("--decisions", type=int, default=100_000, show_default=True, metavar="N", help="Decisions to simulate.")
@click.option(
    "--shift", type=float, default=3.0, show_default=True, metavar="F",
    help="Factor by which the Primary's loss grows; 1 for no change. Its scores stay as sure as they were.",
)  # fmt: skip
@click.option(
    "--shift-at", type=float, default=0.5, show_default=True, metavar="T", help="When, as a share of the decisions."
)
@click.option(
    "--audit-rate", type=float, default=0.05, show_default=True, metavar="Q", help="Share of audited decisions."
)
@click.option("--calibration-rows", type=int, metavar="N", help="Rows to calibrate on.  [default: half of the log]")
@click.option(
    "--renewal-rows", type=click.IntRange(0), metavar="N",
    help="Rows after an alarm that make a new certificate; 0 for none.  [default: ten times what alpha needs]",
)  # fmt: skip
@click.option(
    "--alarm-line", type=click.Choice(["luck", "alpha"]), default="luck", show_default=True,
    help="Where red stands: above alpha by what bad luck in calibration explains, or at alpha.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the split and of the traffic."
)
@options.threshold
@options.binarize
@options.columns
@options.costs
@click.option("--plot", "figure", metavar="FILE", help="Save a figure of the course (.png, .svg, .pdf).")
@options.as_json
def simulate_command(
    log: str,
    *,
    alpha: str,
    threshold: options.OneThreshold,
    binarize: bool,
    columns: options.Columns,
    costs: CostOptions,
    figure: str | None,
    as_json: bool,
    **scenario: Any,
) -> None:
    """Replay a log as production traffic with a Primary that becomes worse: with the monitor, and without it.

    A part of the rows calibrates, the others are drawn as traffic, through the same rule, ledger and monitor as in
    production. On red every query is deferred, until enough new rows make a new certificate.

    \b
    arbitrage simulate log.parquet --alpha 0.05 --confidence 0.95 --shift 3 --plot simulation.png
    """
    scores = options.read_log(log, columns, binarized=binarize)
    simulation = simulate(scores, alpha, scenario=Scenario(**scenario), costs=costs, **threshold)
    if figure is not None:
        save_simulation(simulation, figure)
    options.remember_look(scores.lineage(), "simulate")
    if as_json:
        print_json(simulation.to_dict())
        return
    show_simulation(simulation)
    if figure is not None:
        click.echo(f"Written: {figure}")


def show_simulation(simulation: Simulation) -> None:
    """Print a simulation for people."""
    print_facts(simulation_report.simulation_facts(simulation))
    print_table(simulation_report.HEADER, simulation_report.simulation_rows(simulation))
    if simulation.always is not None:
        click.echo(f"Always asking the Guardian would have cost ${simulation.always:,.2f}.")
    click.echo(wrapped(simulation_report.CAVEAT))


@click.command("reproduce")
@click.argument("name")
@click.option("--out", default="reproduction", show_default=True, metavar="DIR", help="Folder for the reports.")
@click.option("--log", metavar="FILE", help="A recorded score log.  [default: the bundled one]")
@options.roles
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
@options.primary_cost
@options.guardian_cost
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of splits and simulations.")
@options.as_json
def reproduce_command(
    name: str,
    *,
    out: str,
    log: str | None,
    columns: options.Columns,
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
    if (primary_cost is None) != (guardian_cost is None):
        raise click.UsageError("give both --primary-cost and --guardian-cost, or neither")
    if log is None and (columns != options.Columns() or stronger_column):
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
        source = experiments.log_source(log, **columns.roles, stronger=stronger_column, costs=costs)
    reports, skipped = experiments.reproduce(name, source, out=out, seed=seed, on_progress=print_progress)
    if as_json:
        documents = {key: report.to_dict() for key, report in reports.items()}
        print_json({"source": source.title, "reports": documents, "not_run": skipped})
        return
    for key, reason in skipped.items():
        click.echo(f"{key}: not run. {reason}")
    written = "summary.md and the reports it lists" if name == "all" else f"{name}.md and its other formats"
    click.echo(f"Written: {out}/{written}")


def _live_source(name: str, out: str, seed: int, live: dict[str, Any], *, as_json: bool) -> Source | None:
    """Return the live scores once the estimate was confirmed; None after a dry run."""
    scores = Live(
        config=read_config(live["config"]),
        folder=Path(out) / "live",
        data=None if live["data"] is None else Path(live["data"]),
        rows=live["rows"],
        seed=seed,
        concurrency=live["concurrency"],
        max_cost=live["max_cost"],
        on_progress=progress_line,
    )
    estimates = [estimate for part in parts_of(name, scores.config) for estimate in scores.estimate(part)]
    if live["dry_run"]:
        show_estimate(estimates, as_json=as_json)
        return None
    if not live["yes"]:
        show_estimate(estimates, as_json=False)
        click.confirm("Send these calls?", abort=True, err=True)
    return scores.source()
