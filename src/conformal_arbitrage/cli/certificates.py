"""The commands about certificates: calibrate, verify, apply, plan."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import cascades, options, parts
from conformal_arbitrage.cli.signatures import check_signed
from conformal_arbitrage.errors import ConfigError, ScoreLogError

if TYPE_CHECKING:
    from conformal_arbitrage.calibration.certificate import Certificate
    from conformal_arbitrage.calibration.project_secret import ProjectSecret
    from conformal_arbitrage.calibration.verify import Verification
    from conformal_arbitrage.scorelog.engines import Engine
    from conformal_arbitrage.scorelog.log import ScoreLog
    from conformal_arbitrage.scorelog.parts import ScoreParts


@click.command("calibrate")
@click.argument("log")
@click.option("--alpha", metavar="A", help="The risk budget, a limit on the expected loss.  [default: as configured]")
@options.rule
@click.option(
    "--config", metavar="FILE", help="Source of alpha and guardian_sees if not given.  [default: arbitrage.toml]"
)
@options.cluster
@options.sure
@cascades.path_options
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
@parts.engine_options
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
    if cascades.take_options(further, "seed"):
        return cascades.calibrate_path_command(alpha, loss, secret)
    scores = parts.find_scores(log, primary_column, guardian_column, outcomes, further["engine"], binarized=binarize)
    place = parts.place_of(scores, further.pop("engine"), further.pop("jobs"))
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
        progress=parts.tell_pass,
        **learned,
        **further,
    )
    _warn_of_rows(scores, config, clustered=further["cluster"] is not None)
    certificate = _finished(certificate, scores, log, config, secret, output, fixed_before=fixed_before)
    _show_certificate(certificate, _use(certificate, scores, place), alpha, output, as_json=as_json)


def _finished(
    certificate: "Certificate",
    scores: "parts.Scores",
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


def _warn_of_rows(scores: "parts.Scores", config: str | None, *, clustered: bool) -> None:
    """Say if rows repeat each other, or their grades were made by a grader that has changed since, or by several."""
    from conformal_arbitrage.scorelog.fitness import repeats
    from conformal_arbitrage.scorelog.log import ScoreLog
    from conformal_arbitrage.scorelog.spark_table import SparkTable

    if isinstance(scores, SparkTable):
        return
    for problem in () if clustered or not isinstance(scores, ScoreLog) else repeats(scores).problems():
        options.warn(problem)
    _warn_of_grader(scores, config)


def _warn_of_grader(scores: "ScoreLog | ScoreParts", config: str | None) -> None:
    from conformal_arbitrage.live.config import FILE, read_config
    from conformal_arbitrage.live.staleness import grader_change

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
    from conformal_arbitrage.calibration.documents import ON_THIS_LOG
    from conformal_arbitrage.calibration.learned_score import sidecar_path
    from conformal_arbitrage.live.aging import luck_words

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


def _use(certificate: "Certificate", scores: "parts.Scores", engine: "Engine | None") -> dict[str, Any]:
    """Return how often the Guardian is asked on a log and, where costs are known, what a thousand queries cost."""
    from conformal_arbitrage.evaluation.costs import costs_of, routed_cost_per_1000
    from conformal_arbitrage.scorelog.log import ScoreLog

    if not isinstance(scores, ScoreLog):
        return parts.use_of_parts(certificate, scores, engine)
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
@parts.engine_options
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

    cascade = cascades.load_path_certificate(certificate)
    if cascade is not None:
        verification = cascades.verify_path_certificate(cascade, certificate, log)
        _show_verification(verification, certificate, log, as_json=as_json)
        raise SystemExit(0 if verification.ok else 1)
    loaded = load_certificate(certificate)
    columns = columns_of(loaded, primary_column, guardian_column)
    scores = parts.find_scores(log, *columns, outcomes, engine, digest=loaded.log_sha256)
    try:
        verification = verify(loaded, scores, engine=parts.place_of(scores, engine, jobs), progress=parts.tell_pass)
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
@parts.engine_options
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
    cascade = cascades.load_path_certificate(certificate)
    if cascade is not None:
        cascades.apply_path_certificate(cascade, log, output, as_json=as_json)
        return
    loaded = load_certificate(certificate)
    columns = columns_of(loaded, primary_column, guardian_column)
    into_file = output is not None and Path(output).suffix in (".jsonl", ".parquet")
    scores = parts.read_scores(log, *columns, outcomes, guardian_optional=guardian_column is None, whole=into_file)
    if _identities_differ(loaded, scores):
        options.warn(
            "the log was not made by the models this certificate was made with, so the guarantee may not hold for it"
        )
    counts = parts.decide_scores(loaded, scores, parts.place_of(scores, engine, jobs), output)
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
    roles = ("primary",) if parts.lacks_guardian(scores) else ("primary", "guardian")
    known = scores.identities or {}
    pairs = zip(roles, scores.columns, strict=False)
    return any(known.get(column) != certificate.identities.get(role) for role, column in pairs)
