"""Commands on batches: plan, draw, certify and finish a pile of items with machine labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from conformal_arbitrage.calibration.batch import (
    CERTIFICATE,
    FIGURE,
    KEPT,
    LABELS,
    SAMPLE,
    TERMS,
    TODO,
    BatchColumns,
    BatchPlan,
    DrawnBatch,
    Filled,
    draw_batch,
    open_batch,
    open_items,
    plan_batch,
)
from conformal_arbitrage.calibration.certificate import Certificate
from conformal_arbitrage.calibration.promises import Cutoff
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.output import print_facts, print_json, print_progress, print_table, warn, wrapped
from conformal_arbitrage.collecting.grading import BatchReview, ask_team, begin_review, read_review, read_verdicts
from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.importing.quickstart import label_columns
from conformal_arbitrage.live.config import Config, read_config
from conformal_arbitrage.scorelog.tables import Table

_promise = options.chained(
    click.option(
        "--error", type=options.SHARE, required=True, metavar="E",
        help="The largest share of all items that may be kept with a wrong label, such as 0.05 or 5%.",
    ),
    click.option(
        "--confidence", type=options.SHARE, default="0.95", show_default=True, metavar="C",
        help="The probability of the promise.",
    ),
)  # fmt: skip
_columns = options.chained(
    click.option("--answer-column", metavar="NAME", help="Column of the machine's labels.  [default: as it is called]"),
    click.option(
        "--confidence-column", metavar="NAME", help="Column of its confidence in them.  [default: as it is called]"
    ),
    click.option("--truth-column", metavar="NAME", help="Column of labels that experts have given already."),
    click.option("--id-column", metavar="NAME", help="Column of ids.  [default: id, if there is one]"),
)
_pilot = click.option(
    "--pilot", type=click.IntRange(0), default=0, metavar="P",
    help="So many of the sample train a score, by which the other items are ordered; they do not certify.",
)  # fmt: skip
_graded = click.option(
    "--graded", is_flag=True,
    help="Machine labels lose from 0 to 1 (the sample's column `right` takes grades), and losses are added up.",
)  # fmt: skip
_engine = click.option(
    "--engine", metavar="NAME", help="For a table of Spark, table:NAME: the Spark that holds it (sc://..., or spark)."
)
_table = options.chained(
    click.option("--table", metavar="FILE", help="The table, if it was moved since the draw, or is one of Spark."),
    _engine,
)
_review = options.chained(
    click.option("--review", "team", metavar="TEAM", help="Put the items into the review queue of this team's gateway."),
    click.option(
        "--label", "labels", multiple=True, metavar="L",
        help="With --review: a label to choose from, beside those that the machine gave; may be repeated.",
    ),
    click.option("--instructions", default="", metavar="TEXT", help="With --review: shown above every item."),
    options.config_file,
)  # fmt: skip


@click.group("batch", cls=options.WrappingGroup)
def batch_command() -> None:
    """Keep the machine's labels of a pile of items where that is safe; experts label the rest.

    \b
    arbitrage batch plan answers.csv --error 5%
    arbitrage batch draw answers.csv --error 5% --sample 500 -o batch
    arbitrage batch certify batch
    arbitrage batch finish batch
    """


@batch_command.command("plan")
@click.argument("table")
@_promise
@click.option(
    "--sample", "samples", type=click.IntRange(1), multiple=True, metavar="K", help="A size to show; may be repeated."
)
@_pilot
@_columns
@_engine
@options.as_json
def batch_plan_command(
    table: str, *, error: str, confidence: str, samples: tuple[int, ...], pilot: int, engine: str | None, as_json: bool,
    **named: str | None,
) -> None:  # fmt: skip
    """Show how many labels samples of several sizes may save, by what the machine says of itself.

    What a pilot's score gains cannot be foreseen: with --pilot the table shows what it costs.

    \b
    arbitrage batch plan answers.csv --error 0.05 --confidence 0.95
    """
    source = options.open_table(table, engine)
    columns = _columns_named(source, named)
    plan = plan_batch(source, error=error, confidence=confidence, samples=samples, pilot=pilot, columns=columns)
    if as_json:
        print_json(plan)
    else:
        _show_plan(plan)


def _show_plan(plan: BatchPlan) -> None:
    print_table(
        ["experts label", "wrong among them", "labels saved", "if twice as many are wrong"],
        [
            [
                f"{row.sample}",
                "says nothing" if row.limit < 0 else f"up to {row.limit}",
                f"{100 * row.saved:.1f} %",
                f"{100 * row.saved_if_twice:.1f} %",
            ]
            for row in plan.rows
        ],
        title=f"{plan.items} items, at most {plan.error:g} of them wrong, with probability {plan.confidence:g}",
    )
    most = f"Of these sizes {plan.best} saves most." if plan.best else "None of these sizes saves any label."
    click.echo(
        wrapped(
            f"{most} Savings are expected from the confidences as they are stated; the promise does not rest on them."
        )
    )


@batch_command.command("draw")
@click.argument("table")
@_promise
@click.option("--sample", type=click.IntRange(1), metavar="K", help="Items that experts label.  [required]")
@_pilot
@_graded
@click.option("--group-column", metavar="NAME", help="Column of groups, such as languages, for the pilot's score.")
@click.option("--text-column", metavar="NAME", help="Column of texts for it, as vectors; needs the extra text.")
@click.option("-o", "--output", required=True, metavar="FOLDER", help="A new folder for the batch.")
@click.option(
    "--show-answers", is_flag=True, help="Show experts the machine's labels in the file, which may sway them."
)
@_columns
@_engine
@_review
@options.as_json
def batch_draw_command(
    table: str,
    *,
    error: str,
    confidence: str,
    sample: int | None,
    pilot: int,
    graded: bool,
    output: str,
    show_answers: bool,
    engine: str | None,
    team: str | None,
    labels: tuple[str, ...],
    instructions: str,
    config: str,
    as_json: bool,
    **named: str | None,
) -> None:
    """Draw the items that experts label, and fix everything else.

    The sample follows from the rows and the project's secret; a second draw from the same items says so. With --review a
    team labels it in the console of a gateway, without seeing the machine's labels.

    \b
    arbitrage batch draw answers.csv --error 0.05 --sample 500 -o batch
    arbitrage batch draw answers.csv --error 0.05 --sample 500 -o batch --review "support team"
    """
    if sample is None:
        raise click.UsageError(
            f"give --sample K; `arbitrage batch plan {table} --error {error}` shows which sizes save most"
        )
    source = options.open_table(table, engine)
    columns = _columns_named(source, named)

    def check(batch: DrawnBatch) -> None:
        batch.check_folder(output)
        _begin_review(batch, output, config, team, labels, instructions, keep=False)

    batch = draw_batch(
        source, error=error, confidence=confidence, sample=sample, pilot=pilot, graded=graded, columns=columns,
        check=check,
    )  # fmt: skip
    begun = (Path(output) / TERMS).exists()
    batch.write(output, show_answers=show_answers)
    waiting = _ask(batch, output, config, team, labels, instructions, rest=False)
    if as_json:
        print_json({**_terms(batch), "folder": output, "begun": begun, "in_review": waiting})
        return
    _say_draw(batch, begun=begun)
    what = f"{'As it was' if begun else 'Written'}: {Path(output) / SAMPLE}. "
    if team is None:
        where = f"for all {sample} items" if columns.truth is None else "where it is empty"
        what += f"Fill in its column `expert` {where}, with ? where nobody can say"
    else:
        what += f"{waiting} of its items wait in the review queue of {team}; once they are labelled"
    click.echo(wrapped(f"{what}; then run `arbitrage batch certify {output}`."))


def _ask(
    batch: DrawnBatch,
    folder: str,
    config: str,
    team: str | None,
    labels: tuple[str, ...],
    instructions: str,
    *,
    rest: bool,
) -> int | None:
    """Put what experts have not labelled into the review queue of a team; return how many items wait, None without one."""
    begun = _begin_review(batch, folder, config, team, labels, instructions)
    if begun is None:
        return None
    models, review = begun
    return options.with_store(config, lambda store: ask_team(store, models, batch, Path(folder), review, rest=rest))


def _begin_review(
    batch: DrawnBatch,
    folder: str,
    config: str,
    team: str | None,
    labels: tuple[str, ...],
    instructions: str,
    *,
    keep: bool = True,
) -> tuple[Config, BatchReview] | None:
    """Return how a team is to be asked, by which configuration; None without a team."""
    if team is None:
        if labels or instructions:
            raise click.UsageError(
                "--label and --instructions are for people in a review queue; name them with --review"
            )
        return None
    models = read_config(config)
    how = begin_review(models, batch, Path(folder), team=team, labels=labels, instructions=instructions, keep=keep)
    return models, how


def _read_verdicts(batch: DrawnBatch, folder: str, config: str) -> int | None:
    """Write what people labelled in the review queue into the files; return how many items wait, None without a queue."""
    place = Path(folder)
    review = read_review(place)
    if review is None:
        return None
    return options.with_store(config, lambda store: read_verdicts(store, batch, place, review), only_existing=True)


def _say_draw(batch: DrawnBatch, *, begun: bool) -> None:
    terms, items = batch.terms, batch.items
    columns = terms.columns
    unlabelled = terms.items - int(items.labelled.sum())
    wrong = "lost by labels that are kept" if terms.graded else "kept with a wrong label"
    promised = f"at most {terms.error:g} of all items {wrong}, probability {terms.promised:g}"
    facts = [
        ("items", f"{terms.items}" + (f", {unlabelled} without a machine label go to experts" if unlabelled else "")),
        (
            "columns",
            f"label {columns.answer}, confidence {columns.confidence}, id {columns.id or 'the number of the row'}",
        ),
        ("promise", promised),
    ]
    if terms.pilot:
        facts.append(("pilot", f"the first {terms.pilot} items of the sample train a score, the others certify"))
    if columns.truth is not None:
        facts.append(("experts", f"what {columns.truth} says already is filled in"))
    if items.converted:
        facts.append(("confidences", f"{items.converted}, which are converted"))
    print_facts(facts)
    if terms.draw > 1 and not begun:
        warn(
            f"this is draw {terms.draw} from these items, so the promise over all of them is {terms.promised:g}; the same "
            "ids or contents were drawn from before"
        )


@batch_command.command("certify")
@click.argument("folder")
@_table
@_review
@options.as_json
def batch_certify_command(
    folder: str, *, table: str | None, engine: str | None, team: str | None, labels: tuple[str, ...], instructions: str,
    config: str, as_json: bool,
) -> None:  # fmt: skip
    """Say which machine labels are kept, from experts' labels of the sample; what is left goes to them.

    Labels are those in the file, and those that people gave in the review queue if the sample is there. With --review what
    is left goes there, too.

    \b
    arbitrage batch certify batch
    arbitrage batch certify batch --review "support team"
    """
    secret = ProjectSecret.find()
    batch = open_batch(folder, None if table is None else options.open_table(table, engine), secret=secret)
    _read_verdicts(batch, folder, config)
    filled, wrong = batch.read_sample(folder)
    certificate = batch.certify(wrong).sign(secret)
    batch.write_certified(folder, certificate, secret=secret, tell=print_progress)
    in_review = _ask(batch, folder, config, team, labels, instructions, rest=True)
    kept = certificate.rule.kept if isinstance(certificate.rule, Cutoff) else 0
    pilot = batch.draw.pilot  # it does not count, and is fixed by now
    unsaid = [
        int(row)
        for row, said in zip(batch.rows[pilot:], wrong[pilot:], strict=True)
        if said != said and batch.items.labelled[row]
    ]
    if as_json:
        without = [row + 1 for row in unsaid]
        print_json(certificate.to_dict() | {"without_verdict": without, "in_review": in_review})
        return
    _warn_of_verdicts(batch, folder, certificate, filled, unsaid)
    print_facts(certificate.facts())
    click.echo(f"\n{wrapped(certificate.summary)}\n")
    if filled.empty.all():
        click.echo(
            wrapped(f"Fill in column `expert` of {Path(folder) / SAMPLE}; then run `arbitrage batch certify {folder}`.")
        )
        return
    left = batch.terms.items - kept - len(batch.rows)
    when = (
        f"{TODO} is filled in" if team is None else f"the {in_review} items are labelled that wait in the review queue"
    )
    click.echo(
        wrapped(
            f"Written to {folder}: {CERTIFICATE}, {KEPT} ({kept}), {TODO} ({left} for experts), {FIGURE}. When {when}, run "
            f"`arbitrage batch finish {folder}`."
        )
    )


def _warn_of_verdicts(
    batch: DrawnBatch, folder: str, certificate: Certificate, filled: Filled, unsaid: Sequence[int]
) -> None:
    """Warn of what makes a certificate keep less than it might: verdicts that are missing, alike, or in other words."""
    waiting, pilot = int(filled.empty.sum()), batch.draw.pilot
    if unsaid:
        warn(
            f"{len(unsaid)} items of the sample have no verdict ({waiting} not labelled yet) and count as wrong, such as "
            f"{batch.named(unsaid)}; label them and certify again"
        )
    if pilot and isinstance(certificate.rule, Cutoff) and not certificate.rule.learned:
        warn(
            "hardly any label of the pilot is wrong, or right, so that no score was learned: items stand by confidence"
        )
    given = filled.expert[pilot:]
    if not _warn_of_labels(batch, folder, given, SAMPLE, "and count as wrong") and (
        apart := batch.never_machine(given)
    ):
        warn(
            f"no verdict is a label that the machine ever gives, so that all count as wrong: {apart[0]!r:.40} is not "
            f"{apart[1]!r:.40}; if they mean the same, write them alike in the table, and draw from that"
        )


@batch_command.command("finish")
@click.argument("folder")
@_table
@options.config_file
@options.as_json
def batch_finish_command(folder: str, *, table: str | None, engine: str | None, config: str, as_json: bool) -> None:
    """Write the label of every item with who gave it, once experts have labelled what was left to them.

    \b
    arbitrage batch finish batch
    """
    secret = ProjectSecret.find()
    batch = open_batch(folder, None if table is None else options.open_table(table, engine), secret=secret)
    if not (Path(folder) / CERTIFICATE).exists():
        raise ConfigError(
            f"{Path(folder) / CERTIFICATE}: there is no certificate yet; run `arbitrage batch certify {folder}` first"
        )
    certificate = Certificate.load(Path(folder) / CERTIFICATE, secret=secret)
    _read_verdicts(batch, folder, config)
    counts = batch.finish(folder, certificate)
    if as_json:
        print_json({"file": str(Path(folder) / LABELS), **counts})
        return
    with Table(Path(folder) / LABELS) as written:
        given = written.texts("label").tolist()
        _warn_of_labels(batch, folder, given, f"{SAMPLE} and {TODO}", "and are written as they are")
    click.echo(
        wrapped(
            f"Written: {Path(folder) / LABELS}, {batch.terms.items} items: {counts['machine']} labels of the machine, "
            f"{counts['expert']} of experts, {counts['undecided']} undecided.\n{certificate.summary}"
        )
    )


def _warn_of_labels(batch: DrawnBatch, folder: str, given: list[str], files: str, what: str) -> bool:
    """Say which labels of experts are none of the table's, such as n/a; return whether there are any."""
    review = read_review(Path(folder))
    unknown = batch.unknown_labels(given, () if review is None else review.labels)
    if unknown:
        some = ", ".join(f"{label!r:.40} ({count})" for label, count in unknown.most_common(5))
        warn(
            f"{unknown.total()} verdicts are labels that the table never has, {what}: {some}; if they are slips, correct "
            f"them in {files}, with ? where nobody can say"
        )
    return bool(unknown)


def _columns_named(table: object, named: dict[str, str | None]) -> BatchColumns:
    """Return the columns as they were named, the others as they are called in the table."""
    with open_items(table) as reader:
        called = label_columns(reader)
    return BatchColumns(
        answer=named["answer_column"] or called["answer"] or "answer",
        confidence=named["confidence_column"] or called["confidence"] or "confidence",
        id=named["id_column"] or called["id"],
        truth=named["truth_column"] or called["truth"],
        group=named.get("group_column"),
        text=named.get("text_column"),
    )


def _terms(batch: DrawnBatch) -> dict[str, Any]:
    terms = batch.terms
    return {
        "items": terms.items,
        "sample": terms.sample,
        "pilot": terms.pilot,
        "graded": terms.graded,
        "error": terms.error,
        "confidence": terms.promised,
        "draw": terms.draw,
        "columns": {name: getattr(terms.columns, name) for name in terms.columns.__struct_fields__},
        "converted": batch.items.converted,
        "without_label": terms.items - int(batch.items.labelled.sum()),
    }
