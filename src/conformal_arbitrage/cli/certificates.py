"""Commands on certificates: calibrate, verify, apply, plan, recommend, certificate show and choose."""

import json
import os
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from conformal_arbitrage.calibration.batch import read_labels
from conformal_arbitrage.calibration.calibrate import calibrate
from conformal_arbitrage.calibration.cascade import apply_cascade, calibrate_cascade
from conformal_arbitrage.calibration.certificate import ON_THIS_LOG, Certificate, Decisions
from conformal_arbitrage.calibration.learned import sidecar_path
from conformal_arbitrage.calibration.planning import Plan, certified_rows, plan, rows_needed, sure_rows_needed
from conformal_arbitrage.calibration.promises import Cluster
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.calibration.verify import (
    DecisionCounts,
    Verification,
    count_decisions,
    decide_parts,
    decisions_table,
    verify,
)
from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.output import print_facts, print_json, print_table, readable_width, warn, wrapped
from conformal_arbitrage.core.exact import n_rows
from conformal_arbitrage.core.risk import as_fraction
from conformal_arbitrage.errors import ConfigError, ScoreLogError
from conformal_arbitrage.evaluation.looks import calibration_terms
from conformal_arbitrage.evaluation.recommendation import Recommendation, RoutePlan, read_route_plan
from conformal_arbitrage.importing import router_setting
from conformal_arbitrage.live.check import grader_change
from conformal_arbitrage.live.config import FILE, read_config
from conformal_arbitrage.monitoring.lines import AuditPlan, plan_audits
from conformal_arbitrage.scorelog.cascade import CascadeLog
from conformal_arbitrage.scorelog.fitness import repeats
from conformal_arbitrage.scorelog.log import ScoreLog, costs_of
from conformal_arbitrage.scorelog.parts import Engine, ScoreParts, as_engine, scheme_of
from conformal_arbitrage.scorelog.spark import SparkTable
from conformal_arbitrage.scorelog.tables import write_table, write_text

CERTIFICATE = "certificate.json"
FULL = "(--full prints the whole guarantee)"
_LONGEST = 200


@click.command(
    "calibrate",
    cls=options.SectionedCommand,
    sections=options.PROMISE
    | options.LOSS
    | options.SCORE
    | {title: (*names, "seed") for title, names in options.CASCADE.items()}
    | {"Further": ("config", "fixed_before", "margins", "engine", "jobs")},
)
@click.argument("log")
@options.alpha
@options.rule
@click.option(
    "--config", metavar="FILE", help="Source of alpha and guardian_sees if not given.  [default: arbitrage.toml]"
)
@options.cluster
@options.confident
@options.path_options
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
@options.fixed_before
@options.columns
@options.engine_options
@click.option("-o", "--output", metavar="FILE", help="Write the certificate to this file.  [default: do not write it]")
@options.force
@options.full
@options.as_json
def calibrate_command(
    log: str,
    *,
    alpha: str | None,
    config: str | None,
    guardian_sees: Any,
    loss: Any,
    binarize: bool,
    columns: options.Columns,
    place: options.Place,
    output: str | None,
    full: bool,
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
    options.refuse_same(log, output)
    secret = ProjectSecret.find()
    alpha, guardian_sees = _as_configured(alpha, guardian_sees, config)
    del further["fixed_before"], further["force"]  # `_finish` reads them
    learned = options.learned_options(further)
    chain = options.chain_options(further, "seed")
    if chain is not None:
        scores: options.AnyLog = options.read_cascade(log, columns.guardian_column, chain.pop("models"))
        chain["missing_guardian"], engine = further["missing_guardian"], None
        certificate = calibrate_cascade(scores, alpha, key=secret.boundary_key, loss=loss, **chain)
    else:
        scores, engine = options.open_log(log, columns, place, binarized=binarize)
        certificate = calibrate(
            scores,
            alpha,
            guardian_sees=guardian_sees,
            loss=loss,
            engine=engine,
            progress=tell_pass,
            **learned,
            **further,
        )
        _warn_of_rows(scores, config, clustered=further["cluster"] is not None)
    certificate = _finish(certificate, scores, secret)
    _show_certificate(certificate, _use(certificate, scores, engine), alpha, output, full=full, as_json=as_json)


def _finish(certificate: Certificate, scores: options.AnyLog, secret: ProjectSecret) -> Certificate:
    """Say in a certificate that its rows were looked at before, sign it and save it, as far as there is reason to.

    What comes out is shown, so it is noted as a look: another alpha for the same rows would be chosen by it.
    """
    given = click.get_current_context().params
    output = given["output"]
    terms = calibration_terms(certificate)
    lineage = options.lineage_of(scores, certificate)
    looks = options.describe_looks(lineage, fixed_before=given["fixed_before"], terms=terms)
    certificate = certificate if looks is None else certificate.with_looks(looks)
    certificate = certificate.sign(secret)
    if output is not None:
        options.refuse_overwriting(output, certificate.differences, force=given["force"])
        certificate.save(output)
    options.remember_look(lineage, "calibrate", terms=terms)
    return certificate


def _warn_of_rows(scores: options.PairLog, config: str | None, *, clustered: bool) -> None:
    """Say if rows repeat each other, or their grades were made by a grader that has changed since, or by several."""
    if isinstance(scores, SparkTable):
        return
    repeated = None if clustered or not isinstance(scores, ScoreLog) else repeats(scores)
    if repeated is not None and (repeated.contexts or repeated.rows):
        for problem in repeated.problems():
            warn(problem)
    _warn_of_other_grader(scores, config)


def _warn_of_other_grader(scores: ScoreLog | ScoreParts, config: str | None) -> None:
    if "grader" not in (scores.identities or {}):
        return
    with suppress(ConfigError):  # without a configuration there is nothing to compare with
        changed = grader_change(read_config(config or FILE), scores.identities)
        if changed is not None:
            warn(f"{changed}: the guarantee is about the grades in this log")


def _as_configured(alpha: str | None, guardian_sees: Any, config: str | None) -> tuple[str, Any]:
    """Return alpha and guardian_sees as given on the command line, otherwise as configured in arbitrage.toml."""
    source = click.get_current_context().get_parameter_source("guardian_sees")
    explicit = source is not click.core.ParameterSource.DEFAULT
    absent = config is None and not Path(FILE).exists()
    if alpha is not None and (absent or (explicit and config is None)):
        return alpha, guardian_sees
    configuration = options.read_configured(config)
    return alpha or repr(configuration.alpha), guardian_sees if explicit else configuration.guardian_sees


def _show_certificate(
    certificate: Certificate, use: dict[str, Any] | None, alpha: str, output: str | None, *, full: bool, as_json: bool
) -> None:
    if certificate.rule.status == "always_defer":
        warn(
            f"{n_rows(certificate.n)} cannot certify alpha {alpha}, so every query is deferred; at least "
            f"{_rows_needed(certificate)}"
        )
    if as_json:
        print_json(certificate.to_dict() | ({} if use is None else {ON_THIS_LOG: use}))
        return
    print_facts([*_facts_of(certificate, full=full), *([] if use is None else [_describe_use(**use)])])
    _show_guarantee(certificate, full=full)
    if output is not None:
        beside = f" (its arrays: {sidecar_path(output)})" if certificate.fit is not None else ""
        click.echo(f"\nWritten: {output}, with the whole guarantee and its conditions{beside}.")


def _facts_of(certificate: Certificate, *, full: bool) -> list[tuple[str, str]]:
    facts = certificate.facts()
    if not full or certificate.is_cascade or certificate.is_batch:
        return facts
    return [*facts, *certificate.further_facts(), ("many decisions", certificate.luck)]


def _show_guarantee(certificate: Certificate, *, full: bool) -> None:
    """Print the rule and the guarantee, line by line or as the whole paragraph."""
    click.echo(f"\n{wrapped(certificate.summary)}")
    click.echo(f"\n{wrapped(certificate.guarantee)}" if full else FULL)


def _rows_needed(certificate: Certificate) -> str:
    alpha = certificate.alpha
    if certificate.is_cascade:
        return f"{n_rows(rows_needed(alpha, 1), 'is', 'are')} needed besides those that the chain is tuned on"
    if certificate.confidence is None:
        size = certificate.promise.max_cluster_size if isinstance(certificate.promise, Cluster) else 1
        rows = rows_needed(alpha, certificate.loss_bound) * size
    else:
        dial = certificate.dial is not None
        rows = sure_rows_needed(alpha, certificate.loss_bound, confidence=certificate.confidence, dial=dial)
    return f"{n_rows(rows, 'is', 'are')} needed"


def _use(certificate: Certificate, scores: options.AnyLog, engine: Engine | None) -> dict[str, Any] | None:
    """Return how often the Guardian is asked on a log and, where costs are known, what a thousand queries cost.

    The facts of a cascade say so already.
    """
    if isinstance(scores, CascadeLog):
        return None
    cost = guardian = None
    if (
        certificate.fit is not None and certificate.learned is not None
    ):  # each row decided by the others, not also by its own loss
        deferred = certificate.learned.deferred
    elif isinstance(scores, ScoreLog):
        decisions, costs = certificate.apply(scores), costs_of(scores)
        deferred = float(decisions.deferred.mean())
        if costs is not None:
            cost = decisions.cost_per_1000(costs, certificate.guardian_sees)
            guardian = costs.per_1000["guardian"]
    else:  # costs are not added up over parts
        counts = _decide_parts(certificate, scores, as_engine(engine), None)
        deferred = counts.deferred / counts.rows
    return {"deferred": deferred, "cost_per_1000": cost, "guardian_cost_per_1000": guardian}


def _describe_use(
    *, deferred: float, cost_per_1000: float | None, guardian_cost_per_1000: float | None
) -> tuple[str, str]:
    use = f"in {100 * deferred:.1f} % of the queries on this log"
    if cost_per_1000 is not None:
        use += f", ${cost_per_1000:.4g} per 1000 queries (the Guardian alone: ${guardian_cost_per_1000:.4g})"
    return "Guardian is asked", use


# --- verify and apply ---


@click.command("verify")
@click.argument("certificate")
@click.argument("log")
@options.columns
@options.engine_options
@options.as_json
def verify_command(
    certificate: str,
    log: str,
    *,
    columns: options.Columns,
    place: options.Place,
    as_json: bool,
) -> None:
    """Recompute a certificate from its log, to the bit; exit 1 if anything differs.

    \b
    arbitrage verify certificate.json log.parquet
    arbitrage verify batch/certificate.json answers.csv       with what experts wrote beside it
    """
    loaded = options.load_certificate(certificate)
    try:
        if loaded.is_batch:
            verification = verify(loaded, read_labels(Path(certificate).parent, log))
        else:
            scores = options.log_of(loaded, log, columns, place.engine)
            verification = verify(loaded, scores, engine=place.of(scores), progress=tell_pass)
    except ScoreLogError as error:
        click.echo(f"arbitrage: {certificate} cannot have been made from {log}: {error}", err=True)
        raise SystemExit(1) from error
    _show_verification(verification, certificate, log, as_json=as_json)
    if not verification.ok:
        raise SystemExit(1)


def _show_verification(verification: Verification, certificate: str, log: str, *, as_json: bool) -> None:
    differences = verification.differences
    if as_json:
        documents = {name: {"certificate": a, "recomputed": b} for name, (a, b) in differences.items()}
        print_json({"ok": verification.ok, "differences": documents})
    elif verification.ok:
        click.echo(f"{certificate} holds: recomputed from {log}, nothing differs.")
    for name, (stored, recomputed) in differences.items():
        text = f"{_brief(stored)} in {certificate}, {_brief(recomputed)} recomputed"
        click.echo(f"arbitrage: {name} differs: {text if name != 'guarantee' else 'the wording'}", err=True)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters; all with --json)"


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
@options.engine_options
@options.as_json
def apply_command(
    certificate: str,
    log: str,
    *,
    columns: options.Columns,
    place: options.Place,
    output: str | None,
    as_json: bool,
) -> None:
    """Decide every row of a log with a certificate; the log may lack the Guardian's column.

    \b
    arbitrage apply certificate.json log.parquet -o decisions.jsonl
    """
    options.refuse_same(log, output)
    options.refuse_same(certificate, output)
    loaded = options.load_certificate(certificate)
    if loaded.is_cascade:
        summary, sentences = _apply_cascade(loaded, log, output)
    else:
        into_file = output is not None and Path(output).suffix in (".jsonl", ".parquet")
        optional = columns.guardian_column is None
        scores = options.read_scores(log, columns.of(loaded), guardian_optional=optional, whole=into_file)
        summary, sentences = _apply_pair(loaded, scores, place.of(scores), output)
    if as_json:
        print_json(summary)
        return
    for sentence in [*sentences, *([] if output is None else [f"Written: {output}"])]:
        click.echo(sentence)


def _apply_pair(
    certificate: Certificate, scores: ScoreLog | ScoreParts, engine: Engine | None, output: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Decide every row of a log of a pair; return what was counted, as a document and in words."""
    if _identities_differ(certificate, scores):
        warn("the log was not made by the models this certificate was made with, so the guarantee may not hold for it")
    counts = _decide(certificate, scores, engine, output)
    if counts.outside:
        warn(f"rows without a guarantee: {counts.outside}; in the first, {counts.reason}")
    share = 100 * counts.deferred / counts.rows
    sentences = [f"{n_rows(counts.rows)}: {counts.deferred} go to the Guardian ({share:.1f} %)."]
    if counts.undecided:
        sentences.append(f"{counts.undecided} of them have no Guardian score yet: ask it about the candidates listed.")
    means = {"candidates": counts.candidates / counts.rows, "undecided": counts.undecided}
    return {"rows": counts.rows, "deferred": counts.deferred, **means}, sentences


def _apply_cascade(certificate: Certificate, log: str, output: str | None) -> tuple[dict[str, Any], list[str]]:
    """Decide every row of a log with a cascade; return who answers how often, as a document and in words."""
    rule = certificate.path
    scores = CascadeLog.read(log, guardian=rule.guardian, models=rule.chain.models, guardian_cost=rule.guardian_cost)
    decisions = apply_cascade(certificate, scores)
    unasked = scores.unasked[:, scores.columns_of(rule.chain.models)]
    unknown = int((decisions.asked & unasked).any(axis=1).sum())
    if unknown:
        warn(
            f"{n_rows(unknown)} would ask a model that nobody asked there; who answers them is not known, and it is named"
        )
    names = [*rule.chain.models, rule.guardian]
    answered: list[str] = [names[place] for place in decisions.answered_by.tolist()]
    if output is not None:
        rows = zip(scores.id.tolist(), answered, decisions.cost.tolist(), strict=True)
        _write_lines(output, ({"id": id, "answered_by": name, "cost": cost} for id, name, cost in rows))
    counts = {name: answered.count(name) for name in names}
    shares = ", ".join(f"{name} {count} ({100 * count / len(scores):.1f} %)" for name, count in counts.items())
    summary = {"rows": len(scores), "answered_by": counts, "cost": float(decisions.cost.mean())}
    return summary, [f"{n_rows(len(scores))}, answered by {shares}."]


def _decide(
    certificate: Certificate, scores: ScoreLog | ScoreParts, engine: Engine | None, output: str | None
) -> DecisionCounts:
    """Decide every row of a log: one in parts into a folder, one in memory into a file, if one is named."""
    if not isinstance(scores, ScoreParts):
        decisions = certificate.apply(scores)
        _write_decisions(decisions, output)
        return count_decisions(certificate, decisions)
    if output is not None and Path(output).is_file():
        raise click.UsageError(f"{output} is a file; a log in parts is decided into a folder, one file per part")
    return _decide_parts(certificate, scores, as_engine(engine), output)


def _write_decisions(decisions: Decisions, output: str | None) -> None:
    """Write decisions as JSON Lines, or as Parquet if the name says so."""
    if output is not None and output.endswith(".parquet"):
        write_table(output, decisions_table(decisions))
    elif output is not None:
        _write_lines(output, decisions.to_dicts())


def _write_lines(output: str, rows: Iterable[dict[str, Any]]) -> None:
    write_text(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _decide_parts(
    certificate: Certificate, log: ScoreParts | SparkTable, engine: Engine, folder: str | None
) -> DecisionCounts:
    counts = decide_parts(certificate, log, engine, folder)
    tell_pass(f"decided: {n_rows(f'{counts.rows:,}')}")
    return counts


def _identities_differ(certificate: Certificate, scores: ScoreLog | ScoreParts) -> bool:
    """Tell whether a log names other models than a bound certificate; an absent Guardian is not compared."""
    if not isinstance(certificate.identities, dict):
        return False
    roles = ("primary",) if options.lacks_guardian(scores) else ("primary", "guardian")
    known = scores.identities or {}
    pairs = zip(roles, scores.columns, strict=False)
    return any(known.get(column) != certificate.identities.get(role) for role, column in pairs)


def tell_pass(line: str) -> None:
    """Print what was done to stderr."""
    click.echo(f"arbitrage: {line}", err=True)


# --- certificate show and choose ---


@click.group("certificate", cls=options.WrappingGroup)
def certificate_command() -> None:
    """Show an existing certificate, or change it within what it promises.

    \b
    arbitrage certificate show certificate.json
    arbitrage certificate choose certificate.json --alpha 0.03
    arbitrage certificate setting certificate.json
    """


@certificate_command.command("setting")
@click.argument("certificate")
def setting_command(certificate: str) -> None:
    """Print a certificate as the setting of the router whose forecasts it was made from, in JSON, which is YAML too.

    That is LiteLLM's max_quality_gap, or the threshold of a complexity signal of the vLLM Semantic Router. The router then
    decides exactly as the certificate says.

    \b
    arbitrage import litellm calls/ --confidence forecast --primary small --guardian large --grade exact -o log.parquet
    arbitrage calibrate log.parquet --alpha 2% --boundary include -o certificate.json
    arbitrage certificate setting certificate.json
    """
    print_json(router_setting(options.load_pair_certificate(certificate)).document)


@certificate_command.command("show")
@click.argument("certificate")
@click.option(
    "--with-arrays", is_flag=True, help="With --json: put the arrays of a learned score in, as a gateway takes them."
)
@options.full
@options.as_json
def show_command(certificate: str, *, with_arrays: bool, full: bool, as_json: bool) -> None:
    """Show what a certificate holds and promises; the arrays of a learned score are checked by their digest.

    \b
    arbitrage certificate show certificate.json
    arbitrage certificate show certificate.json --full
    """
    loaded = options.load_certificate(certificate)
    if as_json:
        print_json(loaded.to_dict(with_arrays=with_arrays))
        return
    print_facts(_facts_of(loaded, full=full))
    _show_guarantee(loaded, full=full)


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
    loaded = options.load_pair_certificate(certificate)
    chosen = loaded.choose(alpha)
    chosen = chosen.sign(ProjectSecret.find()) if loaded.signed else chosen
    chosen.save(output or certificate)
    if chosen.alpha != alpha:
        stops = ", ".join(f"{stop.alpha:g}" for stop in loaded.dial or ())
        click.echo(f"arbitrage: {alpha:g} is not a stop of this dial ({stops}); set to {chosen.alpha:g}", err=True)
    if as_json:
        print_json(chosen.to_dict())
        return
    print_facts(chosen.facts())
    click.echo(f"\n{wrapped(chosen.summary)}\n\nWritten: {output or certificate}")


# --- recommend ---


@click.command("recommend")
@click.argument("log", required=False)
@options.alpha
@click.option(
    "--loss", type=click.Choice(["regret", "net"]), default="regret", show_default=True,
    help="What is promised: regret gives no credit for answers that beat the Guardian's, net does.",
)  # fmt: skip
@click.option(
    "--score", type=click.Choice(["auto", "margin"]), default="auto", show_default=True,
    help="Learn a score where columns of the log can tell more than the confidence (auto), or take the margin.",
)  # fmt: skip
@click.option(
    "--share", type=float, metavar="S",
    help="Share of the rows to choose on, which the certificate does not use.  [default: 0.3 for several pairs of models, "
    "or a score under the net loss; else 0: all rows are certified]",
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
@options.loss_bound
@options.missing_guardian
@click.option("--text", is_flag=True, help="Also learn from the texts of the queries; needs the extra `text`.")
@options.cost_options
@click.option("--from", "plan_file", metavar="FILE", help="Repeat the recommendation of this route plan, and compare.")
@click.option("--config", metavar="FILE", help="Source of alpha if not given.  [default: arbitrage.toml]")
@options.fixed_before
@click.option(
    "-o", "--output", metavar="FILE",
    help=f"Write the route plan to this file, and {CERTIFICATE} beside it.  [default: write nothing]",
)  # fmt: skip
@click.option("--certified", metavar="FILE", help="Write the rows that are certified to this score log.")
@options.force
@options.full
@options.as_json
def recommend_command(
    log: str | None,
    *,
    plan_file: str | None,
    config: str | None,
    fixed_before: bool,
    output: str | None,
    certified: str | None,
    force: bool,
    full: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Choose how to route, and certify the choice on rows that it was not made on.

    The score of each query is chosen by the proof, on all rows. A pair of models, or alpha itself, has to be chosen on
    others: name their share if you chose alpha on what `inspect` shows of budgets.

    \b
    arbitrage recommend log.parquet --alpha 0.05 -o route.toml
    arbitrage recommend log.parquet --alpha 0.05 --share 0.3      alpha was chosen after `inspect`
    arbitrage recommend --from route.toml                         the same again
    """
    plan, folder = _plan(log, plan_file, config, output, settings)
    source = plan.source(folder)
    options.refuse_same(source, output)
    options.refuse_same(source, certified)
    secret = ProjectSecret.find()
    logs = plan.logs(folder)
    if plan.sample is not None:
        warn(f"from {n_rows(f'{len(logs[0]):,}')}: {logs[0].source}")
    if output is not None:  # before the work, as far as it can be told
        _refuse_overwriting(output, lambda there: not _may_be_of(there, plan, logs), force=force)
    recommendation = plan.recommend(logs, secret.boundary_key)
    rows, terms = recommendation.certified, calibration_terms(recommendation.certificate)
    looks = options.describe_looks(rows.lineage(), fixed_before=fixed_before, terms=terms)
    certificate = recommendation.certificate if looks is None else recommendation.certificate.with_looks(looks)
    recommendation = replace(recommendation, certificate=certificate.sign(secret))
    done = plan.with_result(recommendation)
    if output is not None:
        _refuse_overwriting(output, certificate.differences, force=force)
        recommendation.certificate.save(Path(output).with_name(CERTIFICATE))
        done.write(output)
    if certified is not None:
        rows.write(certified)
    tuning = () if recommendation.tuning is None else recommendation.tuning.lineage()[-1:]
    options.remember_look(rows.lineage(), "recommend", beside=tuning, terms=terms)
    for problem in repeats(rows).problems():
        warn(problem)
    _show(recommendation, done, folder, output, certified, full=full, as_json=as_json)
    _compare(plan, done)


def _refuse_overwriting(output: str, differs: Callable[[Certificate], object], *, force: bool) -> None:
    options.refuse_overwriting(Path(output).with_name(CERTIFICATE), differs, force=force, another="folder")


def _may_be_of(there: Certificate, plan: RoutePlan, logs: Iterable[ScoreLog]) -> bool:
    """Tell whether a certificate is of the budget of a plan, and of rows of these logs."""
    rows = (certified_rows(log, there.provenance.part).sha256() for log in logs)
    return there.alpha == float(as_fraction(plan.alpha, name="alpha")) and there.evidence.log_sha256 in rows


def _plan(
    log: str | None, plan_file: str | None, config: str | None, output: str | None, settings: dict[str, Any]
) -> tuple[RoutePlan, Path]:
    """Return the plan to follow, and the folder that its log is relative to."""
    if plan_file is not None:
        context = click.get_current_context()
        given = [
            name for name in settings if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        ]
        if log is not None or given:
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
    return os.path.relpath(log, folder) if scheme_of(log) is None else log


def _compare(plan: RoutePlan, done: RoutePlan) -> None:
    """Exit with code 1 if a plan was repeated and came to something else."""
    differences = plan.differences(done)
    for line in differences:
        click.echo(f"arbitrage: this is not what the plan recorded: {line}", err=True)
    if differences:
        raise SystemExit(1)


def _show(
    recommendation: Recommendation,
    plan: RoutePlan,
    folder: Path,
    output: str | None,
    certified: str | None,
    *,
    full: bool,
    as_json: bool,
) -> None:
    certificate = CERTIFICATE if output is None else str(Path(output).with_name(CERTIFICATE))
    commands = plan.commands(folder, certificate)
    if as_json:
        print_json(recommendation.to_dict() | {"commands": commands})
        return
    print_facts(recommendation.facts())
    click.echo(wrapped(recommendation.comparison.verdict))
    if len(recommendation.options) > 1:
        print_table(*recommendation.table(), title="\nThe options, on the rows to choose on")
    lines = [recommendation.why_this_loss(), recommendation.more_rows(), *_left_out(recommendation)]
    for line in lines:
        click.echo(wrapped(line))
    _show_guarantee(recommendation.certificate, full=full)
    if output is not None:
        files = _written(recommendation, output, certificate)
        click.echo(wrapped(f"\nWritten: {files}, with the whole guarantee and its conditions."))
        verify_it = shlex.join(["arbitrage", "verify", certificate, plan.source(folder)])
        found = "recomputes it" if recommendation.tuning is None else "finds the certified rows by the recorded split"
        click.echo(wrapped(f"`{verify_it}` {found}."))
    if certified is not None:
        click.echo(
            f"Written: {certified}, the {n_rows(len(recommendation.certified), 'that is', 'that are')} certified."
        )
    click.echo("\n".join(["\nBy hand:", *map(_wrapped_command, commands)]))
    if output is not None:
        click.echo(f"\nFor a gateway, in arbitrage.toml:\n\n{recommendation.policy_section(certificate)}")


def _written(recommendation: Recommendation, output: str, certificate: str) -> str:
    """Return the files that were written; the arrays of a learned score lie beside the certificate."""
    if recommendation.certificate.fit is None:
        return f"{output} and {certificate}"
    return f"{output}, {sidecar_path(certificate)} and {certificate}"


def _wrapped_command(command: str) -> str:
    """Return a shell command on lines of a readable width, which can be pasted as they are."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if lines[-1] and len(lines[-1]) + len(word) + len(" " + " \\") > readable_width():
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _left_out(recommendation: Recommendation) -> list[str]:
    return [f"Left out: {name}, since {reason}." for name, reason in recommendation.left_out.items()]


# --- plan ---


@click.command("plan")
@options.alpha
@click.option("--config", metavar="FILE", help="Source of alpha if not given.  [default: arbitrage.toml]")
@click.option("--loss-bound", default="1", show_default=True, metavar="B", help="Largest possible loss.")
@click.option("--rows", multiple=True, type=int, metavar="N", help="Report on this number of rows; may be repeated.")
@click.option("--audit-rate", type=float, metavar="Q", help="Report on audits: the share of decisions to audit.")
@click.option("--decisions-per-day", type=float, metavar="N", help="The traffic; with --audit-rate.")
@click.option(
    "--primary-share", type=float, default=1.0, show_default=True, metavar="P",
    help="Share of decisions that the Primary makes; audits of the others call nobody.",
)  # fmt: skip
@options.guardian_cost
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
        print_json(asdict(sizes) | ({} if audits is None else {"audits": asdict(audits)}))
        return
    _show_rows(sizes)
    if audits is not None:
        _show_audits(audits)


def _show_rows(sizes: Plan) -> None:
    click.echo(f"At least {n_rows(sizes.fewest_rows)}: with fewer, every query is deferred.")
    click.echo(f"About {n_rows(sizes.suggested_rows)}: then the finite sample costs a tenth of the budget.")
    spendable = ["all deferred" if r.spendable is None else f"{r.spendable:.5f}" for r in sizes.rows]
    lines = [[f"{r.n}", text, f"± {r.spread:.5f}"] for r, text in zip(sizes.rows, spendable, strict=True)]
    print_table(["rows", "mean loss on the log, at most", "long-run loss: alpha ± one standard deviation"], lines)


def _show_audits(audits: AuditPlan) -> None:
    money = "" if audits.cost_per_day is None else f", ${audits.cost_per_day:.4g}"
    calls = f"{audits.guardian_calls_per_day:,.0f} calls of the Guardian{money}"
    doubled = f"after {audits.fresh_after_days:.2g} days they would show a doubled loss in 9 of 10 cases"
    click.echo(wrapped(f"{audits.audits_per_day:,.0f} audits a day take up to {calls}; {doubled}."))
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
    print_table(header, lines, title="How soon a loss above the line turns the monitor red")
    line = "The line is alpha with --confidence; without it, it lies above alpha by what bad luck may explain."
    click.echo(wrapped(f"Red is the monitor's alarm: audits show that the loss is above the line. {line}"))
