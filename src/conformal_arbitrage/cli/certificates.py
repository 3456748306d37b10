"""Commands on certificates: calibrate, verify, apply, plan, recommend, certificate show and choose."""

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.options import check_signed
from conformal_arbitrage.errors import ConfigError, ScoreLogError

if TYPE_CHECKING:
    from conformal_arbitrage.calibration.calibrate import RowCounts
    from conformal_arbitrage.calibration.cascade import PathCertificate
    from conformal_arbitrage.calibration.certificate import Certificate, Decisions
    from conformal_arbitrage.calibration.secret import ProjectSecret
    from conformal_arbitrage.calibration.verify import DecisionCounts, Verification
    from conformal_arbitrage.scorelog.cascade import CascadeLog
    from conformal_arbitrage.scorelog.log import ScoreLog
    from conformal_arbitrage.scorelog.parts import Engine, ScoreParts
    from conformal_arbitrage.scorelog.spark import SparkTable

    Scores = ScoreLog | ScoreParts | SparkTable
    from conformal_arbitrage.calibration.planning import Plan
    from conformal_arbitrage.evaluation.recommendation import Recommendation, RoutePlan
    from conformal_arbitrage.monitoring.lines import AuditPlan


# --- What commands do with cascades ---


_WITH_PATH = frozenset(
    {
        "log",
        "alpha",
        "config",
        "loss",
        "missing_guardian",
        "fixed_before",
        "guardian_column",
        "output",
        "as_json",
    }
    | {"path", "chain", "models", "tuning_share", "seed"}
    | {"alphas", "calibration_size", "test_size", "trials", "form"}
)
_UNPROVED: Mapping[str, Any] = {
    "confidence": "confidence", "zero_one": "confidence", "dial": "dial", "by": "groups", "margins": "guard",
}  # fmt: skip


path_options = options.chained(
    click.option(
        "--path",
        is_flag=True,
        help="Calibrate a cascade of several models; LOG has NAME_confidence, NAME_grade, NAME_cost, NAME_answer of each.",
    ),
    click.option("--chain", metavar="A,B", help="With --path: ask these models, in this order.  [default: chosen]"),
    click.option("--models", metavar="A,B,...", help="With --path: choose the chain among these.  [default: all]"),
    click.option(
        "--tuning-share",
        type=float,
        default=0.4,
        show_default=True,
        metavar="S",
        help="With --path: share of the rows to choose and fit the chain on.",
    ),
)


def take_options(further: dict[str, Any], *also: str) -> bool:
    """Take the options of a cascade out of a command's; return whether it is about one.

    Args:
        further: the command's options.
        also: those that only a cascade has, besides `path_options`.

    Raises:
        OptionError: an option has no proof for a cascade.
        UsageError: an option has no meaning for a cascade, or is one of a cascade without --path.
    """
    names = ("chain", "models", "tuning_share", *also)
    for name in names:
        del further[name]
    if further.pop("path"):
        _refuse_others()
        return True
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} describes a cascade; add --path")
    return False


def _refuse_others() -> None:
    """Refuse options that have no meaning, or no proof, for a cascade."""
    from conformal_arbitrage.calibration.options import refuse_combination

    context = click.get_current_context()
    for name in context.params:
        if context.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE or name in _WITH_PATH:
            continue
        if name in _UNPROVED:
            refuse_combination(_UNPROVED[name], "path")
        raise click.UsageError(
            f"--{name.replace('_', '-')} has no meaning for a cascade; leave it out, or leave out --path"
        )


def read_cascade(path: str, guardian: str | None, models: str | None) -> "CascadeLog":
    """Read the log of a cascade with the models that the options name."""
    from conformal_arbitrage.scorelog.cascade import GUARDIAN_NAME, CascadeLog

    return CascadeLog.read(path, guardian=guardian or GUARDIAN_NAME, models=named(models))


def named(text: str | None) -> list[str] | None:
    """Return the names in a comma-separated text; None if there is none."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def calibrate_path_command(alpha: str, loss: Any, secret: "ProjectSecret | None") -> None:
    """Calibrate a cascade as the command line says, sign and write its certificate, and show it."""
    from conformal_arbitrage.calibration.cascade import calibrate_cascade

    parameters = click.get_current_context().params
    scores = read_cascade(parameters["log"], parameters["guardian_column"], parameters["models"])
    certificate = calibrate_cascade(
        scores,
        alpha,
        key=path_key(secret),
        loss=loss,
        chain=named(parameters["chain"]),
        tuning_share=parameters["tuning_share"],
        seed=parameters["seed"],
        missing_guardian=parameters["missing_guardian"],
    )
    looks = options.describe_looks(
        scores, parameters["log"], parameters["config"], fixed_before=parameters["fixed_before"]
    )
    certificate = certificate if looks is None else certificate.with_looks(looks)
    certificate = certificate if secret is None else certificate.sign(secret)
    if parameters["output"] is not None:
        certificate.save(parameters["output"])
    _show_path_certificate(certificate, parameters["output"], as_json=parameters["as_json"])


def evaluate_path_command(loss: Any) -> None:
    """Run held-out trials of a cascade as the command line says, and show what they cost and lose."""
    from conformal_arbitrage.evaluation.frontier import evaluate_cascade

    parameters = click.get_current_context().params
    if parameters["form"] not in (None, "json"):
        raise click.UsageError(
            f"trials of a cascade are printed as a table or with --json, not with --{parameters['form']}"
        )
    scores = read_cascade(parameters["log"], parameters["guardian_column"], parameters["models"])
    evaluation = evaluate_cascade(
        scores,
        parameters["alphas"],
        calibration_size=parameters["calibration_size"],
        test_size=parameters["test_size"],
        trials=parameters["trials"],
        seed=parameters["seed"],
        loss=loss,
        chain=named(parameters["chain"]),
        tuning_share=parameters["tuning_share"],
        missing_guardian=parameters["missing_guardian"],
    )
    options.remember_look(scores, parameters["log"], "evaluate")
    if parameters["form"] == "json":
        options.print_json(evaluation.to_dict())
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
    options.print_table(header, rows, title=f"{evaluation.trials} trials, mean ± standard error")
    click.echo("The promise is an average, so single trials may lie above alpha, about half of them.")


def path_key(secret: "ProjectSecret | None") -> bytes:
    """Return the key behind the draws.

    Raises:
        ConfigError: there is no secret.
    """
    if secret is None:
        raise ConfigError(
            "--path draws with the project's secret, and there is none here: run `arbitrage init`, which writes one, or set "
            "ARBITRAGE_SECRET to a long random text"
        )
    return secret.boundary_key


def _show_path_certificate(certificate: "PathCertificate", output: str | None, *, as_json: bool) -> None:
    """Print a certificate of a cascade."""
    from conformal_arbitrage.calibration.planning import rows_needed

    if certificate.status == "always_defer":
        options.warn(
            f"{certificate.n} rows cannot certify alpha {certificate.alpha:g}, so every query is deferred; at least "
            f"{rows_needed(certificate.alpha, 1)} rows are needed besides those that the chain is tuned on"
        )
    if as_json:
        options.print_json(certificate.to_dict())
        return
    options.print_facts(certificate.facts())
    click.echo(f"\n{options.wrapped(certificate.summary)}\n")
    if output is None:
        click.echo(options.wrapped(certificate.guarantee))
        return
    click.echo(f"Written: {output}, with the whole guarantee and its conditions.")
    if not certificate.signed:
        click.echo("It is unsigned, so `serve` refuses it: there is no project secret; `arbitrage init` writes one.")


def load_path_certificate(path: str, *folders: Path) -> "PathCertificate | None":
    """Load a certificate of a cascade with its key; None if the file holds another kind."""
    from conformal_arbitrage.calibration.cascade import PathCertificate, is_path_document
    from conformal_arbitrage.calibration.certificate import read_document

    document = read_document(Path(path))
    if not is_path_document(document):
        return None
    certificate = PathCertificate.from_dict(document, source=path)
    secret = options.project_secret(None, *folders, Path(path).parent, Path())
    check_signed(certificate, secret, path)
    return certificate if secret is None else certificate.with_key_of(secret)


def verify_path_certificate(certificate: "PathCertificate", source: str, log: str) -> "Verification":
    """Recompute a certificate of a cascade from its log; exit 1 if it cannot have been made from it."""
    from conformal_arbitrage.calibration.cascade import verify_cascade
    from conformal_arbitrage.scorelog.cascade import CascadeLog

    try:
        return verify_cascade(
            certificate, CascadeLog.read(log, guardian=certificate.guardian, models=certificate.models)
        )
    except ScoreLogError as error:
        click.echo(f"arbitrage: {source} cannot have been made from {log}: {error}", err=True)
        raise SystemExit(1) from error


def apply_path_certificate(certificate: "PathCertificate", log: str, output: str | None, *, as_json: bool) -> None:
    """Decide every row of a log with a cascade, and show who answers how often."""
    from conformal_arbitrage.scorelog.cascade import CascadeLog
    from conformal_arbitrage.scorelog.tables import write_text

    scores = CascadeLog.read(log, guardian=certificate.guardian, models=certificate.chain.models)
    decisions = certificate.apply(scores)
    names = [*certificate.chain.models, certificate.guardian]
    answered: list[str] = [names[place] for place in decisions.answered_by.tolist()]
    if output is not None:
        rows = zip(scores.id.tolist(), answered, decisions.cost.tolist(), strict=True)
        lines = [json.dumps({"id": id, "answered_by": who, "cost": cost}, ensure_ascii=False) for id, who, cost in rows]
        write_text(output, "".join(f"{line}\n" for line in lines))
    counts = {name: answered.count(name) for name in names}
    if as_json:
        options.print_json({"rows": len(scores), "answered_by": counts, "cost": float(decisions.cost.mean())})
        return
    shares = ", ".join(f"{name} {count} ({100 * count / len(scores):.1f} %)" for name, count in counts.items())
    click.echo(f"{len(scores)} rows, answered by {shares}.")
    if output is not None:
        click.echo(f"Written: {output}")


def progress_line(done: int, total: int) -> None:
    """Say how far a collection has come, ten times on its way."""
    if done == total or done % max(1, total // 10) == 0:
        options.progress(f"{done} of {total} rows")


def show_collected_cascade(log: "CascadeLog", output: str, *, as_json: bool) -> None:
    """Print what a collection over all models of a cascade has come to."""
    import numpy as np

    costs = {name: float(log.cost[:, place].sum()) for place, name in enumerate(log.models)}
    costs[log.guardian] = float(log.guardian_cost.sum())
    failures = {name: int(np.isnan(log.confidence[:, place]).sum()) for place, name in enumerate(log.models)}
    figures = {
        "rows": len(log),
        "cost": costs,
        "without_answer": failures,
        "missing_guardian_rows": int(np.isnan(log.guardian_grade).sum()),
    }
    if as_json:
        options.print_json(figures)
        return
    header = ["model", "rows without an answer", "cost"]
    rows = [
        [name, str(failures.get(name, figures["missing_guardian_rows"])), f"${cost:.4g}"]
        for name, cost in costs.items()
    ]
    options.print_table(header, rows, title=f"{len(log)} rows")
    click.echo(
        f"Written: {output}. Next: arbitrage calibrate {output} --path --guardian-column {log.guardian} --alpha A"
    )


def ask_path(
    certificate: "PathCertificate",
    question: str,
    actions: tuple[str, ...],
    settings: dict[str, Any],
    name: str | None,
    config: str,
    policy: str | None,
    allow: tuple[str, ...],
    *,
    as_json: bool,
) -> None:
    """Make one live decision with a cascade, from a menu if actions are given, and show it."""
    import asyncio

    from conformal_arbitrage.cli.models import decision_json
    from conformal_arbitrage.live.build import Models
    from conformal_arbitrage.live.config import with_task
    from conformal_arbitrage.types import ChatRequest, Query

    form = "menu" if actions else "text"
    configuration = with_task(options.read_pair(config, policy), config, form=form)

    async def decide() -> Any:
        async with Models(configuration) as models:
            if actions:
                return await models.cascade_chooser(certificate, allow).decide(Query(question, actions, id=name))
            body = {"messages": [{"role": "user", "content": question}], **settings}
            return await models.cascade_router(certificate, allow).decide(ChatRequest(body, id=name))

    decision = asyncio.run(decide())
    if as_json:
        options.print_json(decision_json(decision))
        return
    chain = [*certificate.chain.models, certificate.guardian][: len(decision.legs)]
    promise = f"expected loss at most {certificate.alpha:g}" if decision.no_guarantee is None else "none: "
    answer = decision.answer if isinstance(decision.answer, str) else str(decision.answer.get("content"))
    options.print_facts(
        [
            ("answer", answer),
            ("answered by", chain[-1] if decision.decided_by != "fallback" else "the safe answer"),
            ("asked", ", ".join(chain)),
            ("guarantee", promise + (decision.no_guarantee or "")),
            ("id", str(decision.id)),
        ]
    )


# --- Commands on a log in parts ---


_TABLE = "table:"
_NO_TABLE = "table:NAME is for calibrate and verify, with the Spark that holds it: --engine sc://... or spark"

engine_options = options.chained(
    click.option(
        "--engine",
        metavar="NAME",
        help="What reads a log in parts (a pattern, a folder, a URL, or one Parquet file of more than 10 million rows): "
        "threads, processes, a Dask scheduler (tcp://...) or Spark (sc://..., spark://..., local[N], or spark for what its "
        "own settings say). For table:NAME, the Spark that holds the table.  [default: threads]",
    ),
    click.option(
        "--jobs", type=click.IntRange(1, 10_000), metavar="N", help="Threads or processes.  [default: all cores]"
    ),
)


def place_of(scores: "Scores", engine: str | None, jobs: int | None) -> "Engine | None":
    """Return where the work on a log in parts is done; None for one in memory."""
    from conformal_arbitrage.scorelog.parts import ScoreParts, as_engine
    from conformal_arbitrage.scorelog.spark import SparkTable

    if isinstance(scores, ScoreParts):
        return as_engine(engine, jobs)
    if isinstance(scores, SparkTable) and jobs is None:
        return scores
    if jobs is not None or engine is not None:
        raise click.UsageError(
            "--engine and --jobs are for a log in parts: give a pattern, a folder, a URL, or one Parquet file of more than "
            "10 million rows"
        )
    return None


def tell_pass(line: str) -> None:
    """Print what was done to stderr."""
    click.echo(f"arbitrage: {line}", err=True)


def read_scores(
    log: str,
    primary: str | None,
    guardian: str | None,
    outcomes: tuple[str, ...] = (),
    *,
    binarized: bool = False,
    guardian_optional: bool = False,
    digest: str = "",
    whole: bool = False,
) -> "ScoreLog | ScoreParts":
    """Read a log into memory, or find the files of one in parts.

    Args:
        log: the argument that names it.
        primary: the Primary's column, if it was named.
        guardian: the Guardian's column, if it was named.
        outcomes: list columns to report besides `correct`.
        binarized: measure the loss on the paper's 0/1 Guardian.
        guardian_optional: whether the Guardian's column may be absent.
        digest: of the certificate to compare with, which says whether it was made in memory or in parts.
        whole: read one file into memory however many rows it has.
    """
    from conformal_arbitrage.scorelog.digest import FILES
    from conformal_arbitrage.scorelog.parts import FileList, ScoreParts, find_files, is_large, is_many

    if log.startswith(_TABLE):
        raise click.UsageError(_NO_TABLE)
    whole = whole or bool(digest)
    if not (is_many(log) or digest.startswith(FILES) or (is_large(log) and not whole)):
        return options.read_log(
            log, primary, guardian, outcomes, binarized=binarized, guardian_optional=guardian_optional, whole=True
        )
    column: str | None = guardian or "guardian"
    if guardian_optional:
        path = find_files(log)[0]
        with FileList([path]) as listed:
            column = column if column in listed.types_of(path) else None
    parts = ScoreParts.read(log, primary=primary or "primary", guardian=column, outcomes=outcomes)
    return parts.binarized() if binarized else parts


def find_scores(
    log: str, primary: str | None, guardian: str | None, outcomes: tuple[str, ...], engine: str | None, **how: Any
) -> "Scores":
    """Return the table that table:NAME means in the Spark of --engine; any other log as `read_scores` does."""
    if not (log.startswith(_TABLE) and engine):
        return read_scores(log, primary, guardian, outcomes, **how)
    from conformal_arbitrage.scorelog.spark import SparkTable, is_spark

    table, columns = log.removeprefix(_TABLE), {"primary": primary or "primary", "guardian": guardian or "guardian"}
    if not is_spark(engine):
        raise click.UsageError(_NO_TABLE)
    if outcomes:
        raise click.UsageError("--outcome is not for a table; export it as Parquet files")
    opened = SparkTable.open(engine, table, **columns)
    return opened.binarized() if how.get("binarized") else opened


def made_from(certificate: "Certificate", log: str, primary: str | None, guardian: str | None) -> bool:
    """Return whether a certificate was made from the files of a log in parts, of which a command sees a sample only."""
    from conformal_arbitrage.calibration.calibrate import digest_parts
    from conformal_arbitrage.scorelog.digest import FILES
    from conformal_arbitrage.scorelog.parts import ScoreParts, as_engine

    if not (options.in_parts(log) and certificate.log_sha256.startswith(FILES)):
        return False
    names = certificate.columns
    parts = ScoreParts.read(log, primary=primary or names["primary"], guardian=guardian or names["guardian"])
    parts = parts.binarized() if certificate.binarized else parts
    return digest_parts(parts, as_engine(None)) == certificate.log_sha256


def counts_of_parts(log: str, primary: str | None, guardian: str | None, *, binarized: bool) -> "RowCounts":
    """Return what is counted in all rows of a log in parts, of which a command sees a sample only."""
    from conformal_arbitrage.calibration.calibrate import count_rows
    from conformal_arbitrage.scorelog.parts import ScoreParts, as_engine

    found = ScoreParts.read(log, primary=primary or "primary", guardian=guardian or "guardian")
    return count_rows(found.binarized() if binarized else found, as_engine(None))


def lacks_guardian(scores: "ScoreLog | ScoreParts") -> bool:
    """Return whether a log has no Guardian scores at all; of one in parts, whether it lacks their column."""
    from conformal_arbitrage.scorelog.parts import ScoreParts

    return scores.guardian is None if isinstance(scores, ScoreParts) else bool(scores.missing.all())


def use_of_parts(certificate: "Certificate", log: "ScoreParts | SparkTable", engine: "Engine | None") -> dict[str, Any]:
    """Return how often the Guardian is asked on a log in parts; costs are not added up."""
    from conformal_arbitrage.scorelog.parts import as_engine

    if certificate.learned is not None:
        deferred = certificate.learned.deferred
    else:
        counts = _decided(certificate, log, as_engine(engine), None)
        deferred = counts.deferred / counts.rows
    return {"deferred": deferred, "cost_per_1000": None, "guardian_cost_per_1000": None}


def decide_scores(
    certificate: "Certificate", scores: "ScoreLog | ScoreParts", engine: "Engine | None", output: str | None
) -> "DecisionCounts":
    """Decide every row of a log: one in parts into a folder, one in memory into a file, if one is named."""
    from conformal_arbitrage.calibration.verify import count_decisions
    from conformal_arbitrage.scorelog.parts import ScoreParts, as_engine

    if not isinstance(scores, ScoreParts):
        decisions = certificate.apply(scores)
        _write_decisions(decisions, output)
        return count_decisions(certificate, decisions)
    if output is not None and Path(output).is_file():
        raise click.UsageError(f"{output} is a file; a log in parts is decided into a folder, one file per part")
    return _decided(certificate, scores, as_engine(engine), output)


def _write_decisions(decisions: "Decisions", output: str | None) -> None:
    """Write decisions as JSON Lines, or as Parquet if the name says so."""
    from conformal_arbitrage.calibration.verify import decisions_table
    from conformal_arbitrage.scorelog.tables import write_table, write_text

    if output is not None and output.endswith(".parquet"):
        write_table(output, decisions_table(decisions))
    elif output is not None:
        write_text(output, "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in decisions.to_dicts()))


def _decided(
    certificate: "Certificate", log: "ScoreParts | SparkTable", engine: "Engine", folder: str | None
) -> "DecisionCounts":
    from conformal_arbitrage.calibration.verify import decide_parts

    counts = decide_parts(certificate, log, engine, folder)
    tell_pass(f"decided: {counts.rows:,} rows")
    return counts


# --- The command plan ---


@click.command("plan")
@click.option("--alpha", metavar="A", help="The risk budget.  [default: as configured]")
@click.option("--config", metavar="FILE", help="Source of alpha if not given.  [default: arbitrage.toml]")
@click.option("--loss-bound", default="1", show_default=True, metavar="B", help="Largest possible loss.")
@click.option("--rows", multiple=True, type=int, metavar="N", help="Report on this number of rows; may be repeated.")
@click.option("--audit-rate", type=float, metavar="Q", help="Report on audits: the share of decisions to audit.")
@click.option("--decisions-per-day", type=float, metavar="N", help="The traffic; with --audit-rate.")
@click.option(
    "--primary-share", type=float, default=1.0, show_default=True, metavar="P",
    help="Share of decisions that the Primary makes; audits of the others call nobody.",
)  # fmt: skip
@click.option("--guardian-cost", type=float, metavar="$", help="Dollars per query of the Guardian.")
@options.as_json
def plan_command(
    *,
    alpha: str | None,
    config: str | None,
    loss_bound: str,
    rows: tuple[int, ...],
    audit_rate: float | None,
    decisions_per_day: float | None,
    primary_share: float,
    guardian_cost: float | None,
    as_json: bool,
) -> None:
    """Show how many rows a budget needs, and how soon audits would see it broken.

    \b
    arbitrage plan --alpha 0.02 --loss-bound 3
    arbitrage plan --alpha 0.05 --audit-rate 0.05 --decisions-per-day 10000
    """
    from conformal_arbitrage.calibration.planning import plan
    from conformal_arbitrage.monitoring.lines import plan_audits

    alpha = alpha or repr(options.read_configured(config).alpha)
    sizes, audits = plan(alpha, loss_bound=loss_bound, rows=rows), None
    if (audit_rate is None) != (decisions_per_day is None):
        raise click.UsageError("--audit-rate and --decisions-per-day belong together; give both or neither")
    if audit_rate is not None and decisions_per_day is not None:
        audits = plan_audits(
            alpha,
            loss_bound=loss_bound,
            audit_rate=audit_rate,
            decisions_per_day=decisions_per_day,
            primary_share=primary_share,
            guardian_cost=guardian_cost,
        )
    if as_json:
        options.print_json(asdict(sizes) | ({} if audits is None else {"audits": asdict(audits)}))
        return
    _show_rows(sizes)
    if audits is not None:
        _show_audits(audits)


def _show_rows(sizes: "Plan") -> None:
    click.echo(f"At least {sizes.fewest_rows} rows: with fewer, every query is deferred.")
    click.echo(f"About {sizes.suggested_rows} rows: then the finite sample costs a tenth of the budget.")
    spendable = ["all deferred" if r.spendable is None else f"{r.spendable:.5f}" for r in sizes.rows]
    lines = [[f"{r.n}", text, f"± {r.spread:.5f}"] for r, text in zip(sizes.rows, spendable, strict=True)]
    options.print_table(
        ["rows", "mean loss on the log, at most", "long-run loss: alpha ± one standard deviation"], lines
    )


def _show_audits(audits: "AuditPlan") -> None:
    money = "" if audits.cost_per_day is None else f", ${audits.cost_per_day:.4g}"
    calls = f"{audits.guardian_calls_per_day:,.0f} calls of the Guardian{money}"
    doubled = f"after {audits.fresh_after_days:.2g} days they would show a doubled loss in 9 of 10 cases"
    click.echo(options.wrapped(f"{audits.audits_per_day:,.0f} audits a day take up to {calls}; {doubled}."))
    lines = [
        [
            f"{row.ratio:g} x",
            f"{row.audits:,}",
            f"{row.decisions:,}",
            f"{row.days:.2g} to {2 * row.days:.2g}",
            f"{row.excess:,.0f}",
        ]
        for row in audits.delays
    ]
    header = ["true loss / line", "audits, median", "decisions", "days, median to 9 of 10", "excess losses"]
    options.print_table(header, lines, title="How soon a loss above the line turns the monitor red")
    line = "The line is alpha with --confidence; without it, it lies above alpha by what bad luck may explain."
    click.echo(options.wrapped(f"Red is the monitor's alarm: audits show that the loss is above the line. {line}"))


# --- The command recommend ---


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
    from conformal_arbitrage.evaluation.recommendation import RoutePlan, read_route_plan

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
    from conformal_arbitrage.scorelog.parts import scheme_of

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
    from conformal_arbitrage.calibration.learned import sidecar_path

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


# --- The commands about certificates ---


@click.command("calibrate")
@click.argument("log")
@click.option("--alpha", metavar="A", help="The risk budget, a limit on the expected loss.  [default: as configured]")
@options.rule
@click.option(
    "--config", metavar="FILE", help="Source of alpha and guardian_sees if not given.  [default: arbitrage.toml]"
)
@options.cluster
@options.sure
@path_options
@click.option("--margins", is_flag=True, help="Keep the quantiles of the margins, which a policy with a guard needs.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="K",
    help="With --path: seed for drawing the tuning rows.",
)
@options.learned
@click.option(
    "--fixed-before", is_flag=True, help="State that alpha and options were fixed before these rows were looked at."
)
@options.columns
@engine_options
@click.option("-o", "--output", metavar="FILE", help="Write the certificate to this file.  [default: do not write it]")
@options.as_json
def calibrate_command(
    log: str,
    *,
    alpha: str | None,
    config: str | None,
    guardian_sees: Any,
    boundary: Any,
    loss: Any,
    binarize: bool,
    confidence: str | None,
    zero_one: bool,
    fixed_before: bool,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    output: str | None,
    as_json: bool,
    **further: Any,
) -> None:
    """Find the threshold that keeps a risk budget, and certify it.

    \b
    arbitrage calibrate log.parquet --alpha 0.05 -o certificate.json
    arbitrage calibrate log.parquet -o certificate.json          alpha from arbitrage.toml
    arbitrage calibrate log.parquet --alpha 0.05 --confidence 0.95    of this one certificate
    arbitrage calibrate cascade.parquet --path --alpha 0.05           of a cascade of several models
    arbitrage calibrate log.parquet --alpha 0.05 --score auto         a score learned from these rows
    arbitrage calibrate 's3://lake/scores/*.parquet' --alpha 0.05     a log in parts, of any size
    """
    from conformal_arbitrage.calibration.calibrate import calibrate

    options.refuse_same(log, output)
    secret = options.project_secret(config, Path(), Path(output or log).parent)
    alpha, guardian_sees = _as_configured(alpha, guardian_sees, config)
    learned = options.learned_options(further)
    loss, boundary = options.loss_and_boundary(loss, boundary, learned["score"])
    if take_options(further, "seed"):
        return calibrate_path_command(alpha, loss, secret)
    scores = find_scores(log, primary_column, guardian_column, outcomes, further["engine"], binarized=binarize)
    place = place_of(scores, further.pop("engine"), further.pop("jobs"))
    drawing = _drawing(loss, boundary, learned["score"], None if zero_one or binarize else confidence)
    certificate = calibrate(
        scores,
        alpha,
        guardian_sees=guardian_sees,
        boundary=boundary,
        loss=loss,
        confidence=confidence,
        zero_one=zero_one,
        key=_key(secret, drawing) if drawing else None,
        engine=place,
        progress=tell_pass,
        **learned,
        **further,
    )
    _warn_of_rows(scores, config, clustered=further["cluster"] is not None)
    certificate = _finished(certificate, scores, log, config, secret, output, fixed_before=fixed_before)
    _show_certificate(certificate, _use(certificate, scores, place), alpha, output, as_json=as_json)


def _finished(
    certificate: "Certificate",
    scores: "Scores",
    log: str,
    config: str | None,
    secret: "ProjectSecret | None",
    output: str | None,
    *,
    fixed_before: bool,
) -> "Certificate":
    """Say in a certificate that its rows were looked at before, sign it and save it, as far as there is reason to.

    What comes out is shown, so it is noted as a look: another alpha for the same rows would be chosen by it.
    """
    from conformal_arbitrage.evaluation.looks import calibration_terms
    from conformal_arbitrage.scorelog.log import ScoreLog

    terms = calibration_terms(certificate)
    looks = options.describe_looks(scores, log, config, fixed_before=fixed_before, terms=terms)
    certificate = certificate if looks is None else certificate.with_looks(looks)
    certificate = certificate if secret is None else certificate.sign(secret)
    if output is not None:
        certificate.save(output)
    if isinstance(scores, ScoreLog):
        options.remember_look(scores, log, "calibrate", config=config, terms=terms)
    return certificate


def _drawing(loss: str | None, boundary: str, score: str, confidence: str | None) -> str | None:
    """Return the option that takes draws, as a user knows it; None if none does."""
    if score != "margin":
        return f"--score {score}"
    if boundary == "random":
        return "--boundary random" if loss is None else "--loss net"
    return None if confidence is None else "--confidence"


def _key(secret: "ProjectSecret | None", drawing: str) -> bytes:
    """Return the key behind the draws."""
    if secret is None:
        cheaper = "; if every loss is 0 or the bound, --zero-one needs none" if drawing == "--confidence" else ""
        raise ConfigError(
            f"{drawing} draws with the project's secret, and there is none here: run `arbitrage init`, which writes one, or "
            f"set ARBITRAGE_SECRET to a long random text{cheaper}"
        )
    return secret.boundary_key


def _warn_of_rows(scores: "Scores", config: str | None, *, clustered: bool) -> None:
    """Say if rows repeat each other, or their grades were made by a grader that has changed since, or by several."""
    from conformal_arbitrage.scorelog.fitness import repeats
    from conformal_arbitrage.scorelog.log import ScoreLog
    from conformal_arbitrage.scorelog.spark import SparkTable

    if isinstance(scores, SparkTable):
        return
    for problem in () if clustered or not isinstance(scores, ScoreLog) else repeats(scores).problems():
        options.warn(problem)
    _warn_of_grader(scores, config)


def _warn_of_grader(scores: "ScoreLog | ScoreParts", config: str | None) -> None:
    from conformal_arbitrage.live.check import grader_change
    from conformal_arbitrage.live.config import FILE, read_config

    if "grader" not in (scores.identities or {}):
        return
    with suppress(ConfigError):  # without a configuration there is nothing to compare with
        changed = grader_change(read_config(config or FILE), scores.identities)
        if changed is not None:
            options.warn(f"{changed}: the guarantee is about the grades in this log")


def _as_configured(alpha: str | None, guardian_sees: Any, config: str | None) -> tuple[str, Any]:
    """Return alpha and guardian_sees as given on the command line, otherwise as configured in arbitrage.toml."""
    from conformal_arbitrage.live.config import FILE

    source = click.get_current_context().get_parameter_source("guardian_sees")
    explicit = source is not click.core.ParameterSource.DEFAULT
    absent = config is None and not Path(FILE).exists()
    if alpha is not None and (absent or (explicit and config is None)):
        return alpha, guardian_sees
    configuration = options.read_configured(config)
    return alpha or repr(configuration.alpha), guardian_sees if explicit else configuration.guardian_sees


def _show_certificate(
    certificate: "Certificate", use: dict[str, Any], alpha: str, output: str | None, *, as_json: bool
) -> None:
    from conformal_arbitrage.calibration.certificate import ON_THIS_LOG
    from conformal_arbitrage.calibration.learned import sidecar_path
    from conformal_arbitrage.live.monitor import luck_words

    if certificate.status == "always_defer":
        needed = _rows_needed(certificate)
        options.warn(
            f"{certificate.n} rows cannot certify alpha {alpha}, so every query is deferred; at least {needed} rows are "
            "needed"
        )
    if as_json:
        options.print_json({**certificate.to_dict(), ON_THIS_LOG: use})
        return
    luck = ("many decisions", luck_words(certificate))
    options.print_facts([*certificate.facts(), luck, _describe_use(**use)])
    click.echo(f"\n{options.wrapped(certificate.summary)}\n")
    if output is not None:
        beside = "" if certificate.fit is None else f" (its arrays: {sidecar_path(output)})"
        click.echo(f"Written: {output}, with the whole guarantee and its conditions{beside}.")
        if not certificate.signed:
            click.echo(
                "It is unsigned, so `serve` refuses it: there is no project secret; `arbitrage init` writes one."
            )
    else:
        click.echo(options.wrapped(certificate.guarantee))


def _rows_needed(certificate: "Certificate") -> int:
    from conformal_arbitrage.calibration.planning import rows_needed, sure_rows_needed

    alpha, bound = certificate.alpha, certificate.loss_bound
    if certificate.confidence is None:
        return rows_needed(alpha, bound) * (certificate.max_cluster_size or 1)
    return sure_rows_needed(alpha, bound, confidence=certificate.confidence, dial=certificate.dial is not None)


def _use(certificate: "Certificate", scores: "Scores", engine: "Engine | None") -> dict[str, Any]:
    """Return how often the Guardian is asked on a log and, where costs are known, what a thousand queries cost."""
    from conformal_arbitrage.evaluation.costs import costs_of, routed_cost_per_1000
    from conformal_arbitrage.scorelog.log import ScoreLog

    if not isinstance(scores, ScoreLog):
        return use_of_parts(certificate, scores, engine)
    if certificate.learned is not None:  # each row decided by the others, not also by its own loss
        return {"deferred": certificate.learned.deferred, "cost_per_1000": None, "guardian_cost_per_1000": None}
    decisions, costs = certificate.apply(scores), costs_of(scores)
    cost = None if costs is None else routed_cost_per_1000(costs, decisions, certificate.guardian_sees)
    guardian = None if costs is None else costs.per_1000["guardian"]
    deferred = float(decisions.deferred.mean())
    return {"deferred": deferred, "cost_per_1000": cost, "guardian_cost_per_1000": guardian}


def _describe_use(
    *, deferred: float, cost_per_1000: float | None, guardian_cost_per_1000: float | None
) -> tuple[str, str]:
    use = f"in {100 * deferred:.1f} % of the queries on this log"
    if cost_per_1000 is not None:
        use += f", ${cost_per_1000:.4g} per 1000 queries (the Guardian alone: ${guardian_cost_per_1000:.4g})"
    return "Guardian is asked", use


@click.command("verify")
@click.argument("certificate")
@click.argument("log")
@options.columns
@engine_options
@options.as_json
def verify_command(
    certificate: str,
    log: str,
    *,
    engine: str | None,
    jobs: int | None,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Recompute a certificate from its log, to the bit; exit 1 if anything differs.

    \b
    arbitrage verify certificate.json log.parquet
    """
    from conformal_arbitrage.calibration.verify import verify

    cascade = load_path_certificate(certificate)
    if cascade is not None:
        verification = verify_path_certificate(cascade, certificate, log)
        _show_verification(verification, certificate, log, as_json=as_json)
        raise SystemExit(0 if verification.ok else 1)
    loaded = load_certificate(certificate)
    columns = columns_of(loaded, primary_column, guardian_column)
    scores = find_scores(log, *columns, outcomes, engine, digest=loaded.log_sha256)
    try:
        verification = verify(loaded, scores, engine=place_of(scores, engine, jobs), progress=tell_pass)
    except ScoreLogError as error:
        click.echo(f"arbitrage: {certificate} cannot have been made from {log}: {error}", err=True)
        raise SystemExit(1) from error
    _show_verification(verification, certificate, log, as_json=as_json)
    if set(verification.differences) == {"log_sha256"} and not as_json:
        click.echo("arbitrage: other files, same figures: were they rewritten, as by a compaction?", err=True)
    if not verification.ok:
        raise SystemExit(1)


def _show_verification(verification: "Verification", certificate: str, log: str, *, as_json: bool) -> None:
    differences = verification.differences
    if as_json:
        documents = {name: {"certificate": a, "recomputed": b} for name, (a, b) in differences.items()}
        options.print_json({"ok": verification.ok, "differences": documents})
    elif verification.ok:
        click.echo(f"{certificate} holds: recomputed from {log}, nothing differs.")
    for name, (stored, recomputed) in differences.items():
        text = f"{stored!r} in {certificate}, {recomputed!r} recomputed" if name != "guarantee" else "the wording"
        click.echo(f"arbitrage: {name} differs: {text}", err=True)


def columns_of(certificate: "Certificate", primary: str | None, guardian: str | None) -> tuple[str, str]:
    """Return the columns named by options, otherwise those the certificate was made with."""
    return primary or certificate.columns["primary"], guardian or certificate.columns["guardian"]


def load_certificate(path: str, *folders: Path) -> "Certificate":
    """Load a certificate with its key; a signature is verified if the project's secret is at hand."""
    from conformal_arbitrage.calibration.certificate import Certificate

    certificate = Certificate.load(path)
    secret = options.project_secret(None, *folders, Path(path).parent, Path())
    check_signed(certificate, secret, path)
    return certificate if secret is None else certificate.with_key_of(secret)


@click.command("apply")
@click.argument("certificate")
@click.argument("log")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write every decision to this file: Parquet if its name ends in .parquet, else JSON Lines. For a log in parts, "
    "write to this folder.",
)
@options.columns
@engine_options
@options.as_json
def apply_command(
    certificate: str,
    log: str,
    *,
    engine: str | None,
    jobs: int | None,
    output: str | None,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Decide every row of a log with a certificate; the log may lack the Guardian's column.

    \b
    arbitrage apply certificate.json log.parquet -o decisions.jsonl
    """
    options.refuse_same(log, output)
    options.refuse_same(certificate, output)
    cascade = load_path_certificate(certificate)
    if cascade is not None:
        apply_path_certificate(cascade, log, output, as_json=as_json)
        return
    loaded = load_certificate(certificate)
    columns = columns_of(loaded, primary_column, guardian_column)
    into_file = output is not None and Path(output).suffix in (".jsonl", ".parquet")
    scores = read_scores(log, *columns, outcomes, guardian_optional=guardian_column is None, whole=into_file)
    if _identities_differ(loaded, scores):
        options.warn(
            "the log was not made by the models this certificate was made with, so the guarantee may not hold for it"
        )
    counts = decide_scores(loaded, scores, place_of(scores, engine, jobs), output)
    if counts.outside:
        options.warn(f"rows without a guarantee: {counts.outside}; in the first, {counts.reason}")
    summary = {
        "rows": counts.rows,
        "deferred": counts.deferred,
        "candidates": counts.candidates / counts.rows,
        "undecided": counts.undecided,
    }
    if as_json:
        options.print_json(summary)
        return
    share = 100 * summary["deferred"] / summary["rows"]
    click.echo(f"{summary['rows']} rows: {summary['deferred']} go to the Guardian ({share:.1f} %).")
    if summary["undecided"]:
        click.echo(f"{summary['undecided']} of them have no Guardian score yet: ask it about the candidates listed.")
    if output is not None:
        click.echo(f"Written: {output}")


def _identities_differ(certificate: "Certificate", scores: "ScoreLog | ScoreParts") -> bool:
    """Tell whether a log names other models than a bound certificate; an absent Guardian is not compared."""
    if not isinstance(certificate.identities, dict):
        return False
    roles = ("primary",) if lacks_guardian(scores) else ("primary", "guardian")
    known = scores.identities or {}
    pairs = zip(roles, scores.columns, strict=False)
    return any(known.get(column) != certificate.identities.get(role) for role, column in pairs)


# --- The commands about an existing certificate ---


@click.group("certificate", cls=options.WrappingGroup)
def certificate_command() -> None:
    """Show an existing certificate, or change it within what it promises.

    \b
    arbitrage certificate show certificate.json
    arbitrage certificate choose certificate.json --alpha 0.03
    """


@certificate_command.command("show")
@click.argument("certificate")
@click.option(
    "--with-arrays", is_flag=True, help="With --json: put the arrays of a learned score in, as a gateway takes them."
)
@options.as_json
def show_command(certificate: str, *, with_arrays: bool, as_json: bool) -> None:
    """Show what a certificate holds and promises; the arrays of a learned score are checked by their digest.

    \b
    arbitrage certificate show certificate.json
    """
    from conformal_arbitrage.live.monitor import luck_words

    path = load_path_certificate(certificate)
    loaded = path or load_certificate(certificate)
    if as_json:
        one = path.to_dict() if path is not None else load_certificate(certificate).to_dict(with_arrays=with_arrays)
        options.print_json(one)
        return
    luck = [] if path is not None else [("many decisions", luck_words(load_certificate(certificate)))]
    options.print_facts([*loaded.facts(), *luck])
    click.echo(f"\n{options.wrapped(loaded.summary)}\n\n{options.wrapped(loaded.guarantee)}")


@certificate_command.command("choose")
@click.argument("certificate")
@click.option(
    "--alpha", required=True, type=float, metavar="A", help="The risk budget; between stops the lower one is taken."
)
@click.option("-o", "--output", metavar="FILE", help="Write the certificate to this file.  [default: in place]")
@options.as_json
def choose_command(certificate: str, *, alpha: float, output: str | None, as_json: bool) -> None:
    """Set a dial to another budget, after looking at whatever you like.

    \b
    arbitrage calibrate log.parquet --alpha 0.05 --confidence 0.95 --dial -o certificate.json
    arbitrage certificate choose certificate.json --alpha 0.03
    """
    loaded = load_certificate(certificate)
    secret = options.project_secret(None, Path(certificate).parent, Path())
    if loaded.signed and secret is None:
        raise ConfigError(
            f"{certificate} is signed, and the project's secret that would sign the choice is not here; run this where "
            "ARBITRAGE_SECRET or arbitrage.secret is"
        )
    chosen = loaded.choose(alpha)
    chosen = chosen.sign(secret) if loaded.signed and secret is not None else chosen
    chosen.save(output or certificate)
    if chosen.alpha != alpha:
        stops = ", ".join(f"{stop.alpha:g}" for stop in loaded.dial or ())
        click.echo(f"arbitrage: {alpha:g} is not a stop of this dial ({stops}); set to {chosen.alpha:g}", err=True)
    if as_json:
        options.print_json(chosen.to_dict())
        return
    options.print_facts(chosen.facts())
    click.echo(f"\n{options.wrapped(chosen.summary)}\n\nWritten: {output or certificate}")
