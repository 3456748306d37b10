"""calibrate, verify, apply, plan."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.errors import ScoreLogError

if TYPE_CHECKING:
    from conformal_arbitrage.calibration.certificate import Certificate
    from conformal_arbitrage.scorelog.log import ScoreLog


@click.command()
@click.argument("log")
@click.option(
    "--alpha", metavar="A", help="The risk budget: the expected loss stays within it.  [default: as configured]"
)
@options.rule
@click.option(
    "--config", metavar="FILE", help="Where alpha and guardian_sees stand otherwise.  [default: arbitrage.toml]"
)
@options.columns
@options.key_file
@click.option("-o", "--output", metavar="FILE", help="Write the certificate; without it nothing is written.")
@options.as_json
def calibrate(
    log: str,
    *,
    alpha: str | None,
    config: str | None,
    guardian_sees: Any,
    boundary: Any,
    loss_bound: str | None,
    binarize: bool,
    missing_guardian: Any,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    key_file: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Find the threshold that keeps a risk budget, and certify it.

    \b
    arbitrage calibrate log.parquet --alpha 0.05 --guardian-sees all -o certificate.json
    arbitrage calibrate log.parquet -o certificate.json          alpha from arbitrage.toml
    """
    from conformal_arbitrage.calibration import certificate

    options.refuse_same(log, output)
    alpha, guardian_sees = _as_configured(alpha, guardian_sees, config)
    scores = options.read_log(log, primary_column, guardian_column, outcomes, binarized=binarize)
    made = certificate.calibrate(
        scores,
        alpha,
        guardian_sees=guardian_sees,
        boundary=boundary,
        loss_bound=loss_bound,
        missing_guardian=missing_guardian,
        key=None if key_file is None else certificate.read_key(key_file),
    )
    if output is not None:
        made.save(output)
    elif made.key is not None and key_file is None:
        options.warn("without -o the key behind the draws is lost, and this certificate cannot be used or verified")
    if made.status == "always_defer":
        needed = certificate.rows_needed(alpha, made.loss_bound)
        options.warn(
            f"{made.n} rows cannot certify alpha {alpha}, so every query is deferred; it takes at least {needed} rows"
        )
    if as_json:
        options.print_json(made.to_dict())
        return
    _show(made)
    if output is not None:
        click.echo(f"Written: {output}" + (f" and {certificate.key_path(output)}" if made.key else ""))


def _as_configured(alpha: str | None, guardian_sees: Any, config: str | None) -> tuple[str, Any]:
    """The budget and what the Guardian sees: as given, else as arbitrage.toml says."""
    from conformal_arbitrage.live.config import FILE, read_config

    source = click.get_current_context().get_parameter_source("guardian_sees")
    given = source is not click.core.ParameterSource.DEFAULT
    absent = config is None and not Path(FILE).exists()
    if alpha is not None and (absent or (given and config is None)):
        return alpha, guardian_sees
    if absent:
        raise click.UsageError(f"give --alpha, the risk budget; there is no {FILE} here to take it from")
    read = read_config(config or FILE)
    return alpha or repr(read.alpha), guardian_sees if given else read.guardian_sees


def _show(made: "Certificate") -> None:
    relaxation = "none: every query is deferred" if made.relaxation is None else f"{made.relaxation:.12g}"
    relaxation += "  (the Primary alone keeps this budget; only ties are deferred)" if made.relaxation == 0 else ""
    facts = [
        ("relaxation", relaxation + (f"  (at it, draws up to {made.boundary_u:.6f})" if made.boundary_u else "")),
        ("rule", f"the Guardian sees {made.guardian_sees}; boundary {made.boundary}"),
        ("risk budget", f"alpha {made.alpha:g}, losses in [0, {made.loss_bound:g}], {made.n} rows"),
    ]
    if made.status == "ok":
        facts.append(("on this log", f"loss {made.empirical_risk:.4f}, budget left unspent {made.slack:.4f}"))
    if made.no_opinion_rows or made.missing_guardian_rows:
        absent = f"Primary in {made.no_opinion_rows} rows (deferred), Guardian in {made.missing_guardian_rows}"
        facts.append(("without scores", absent))
    options.print_facts(facts)
    click.echo(f"\n{options.wrapped(made.guarantee)}\n")


@click.command()
@click.argument("certificate")
@click.argument("log")
@options.key_file
@options.columns
@options.as_json
def verify(
    certificate: str,
    log: str,
    *,
    key_file: str | None,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Recompute a certificate from its log, to the bit; exit 1 if anything differs.

    \b
    arbitrage verify certificate.json log.parquet
    """
    from conformal_arbitrage.calibration.certificate import verify as recompute

    made = _load(certificate, key_file)
    columns = _columns(made, primary_column, guardian_column)
    scores = options.read_log(log, *columns, outcomes)
    try:
        differing = recompute(made, scores)
    except ScoreLogError as error:
        click.echo(f"arbitrage: {certificate} cannot have been made from {log}: {error}", err=True)
        raise SystemExit(1) from error
    if as_json:
        documents = {name: {"certificate": a, "recomputed": b} for name, (a, b) in differing.items()}
        options.print_json({"ok": not differing, "differences": documents})
    elif not differing:
        click.echo(f"{certificate} holds: recomputed from {log}, nothing differs.")
    for name, (stored, again) in differing.items():
        text = f"{stored!r} in {certificate}, {again!r} recomputed" if name != "guarantee" else "the wording"
        click.echo(f"arbitrage: {name} differs: {text}", err=True)
    if differing:
        raise SystemExit(1)


def _columns(made: "Certificate", primary: str | None, guardian: str | None) -> tuple[str, str]:
    """The columns named by options, else those the certificate was made with."""
    return primary or made.columns["primary"], guardian or made.columns["guardian"]


def _load(path: str, key_file: str | None) -> "Certificate":
    from conformal_arbitrage.calibration.certificate import Certificate, read_key

    return Certificate.load(path, key=None if key_file is None else read_key(key_file))


@click.command()
@click.argument("certificate")
@click.argument("log")
@click.option("-o", "--output", metavar="FILE", help="Write every decision, as JSON Lines.")
@options.key_file
@options.columns
@options.as_json
def apply(
    certificate: str,
    log: str,
    *,
    output: str | None,
    key_file: str | None,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run the certified rule on every row of a log; the Guardian's column may be absent.

    \b
    arbitrage apply certificate.json log.parquet -o decisions.jsonl
    """
    from conformal_arbitrage.scorelog.files import write_text

    options.refuse_same(log, output)
    options.refuse_same(certificate, output)
    made = _load(certificate, key_file)
    columns = _columns(made, primary_column, guardian_column)
    scores = options.read_log(log, *columns, outcomes, guardian_optional=guardian_column is None)
    if made.identities != "unbound" and _differ(made, scores, guardian_asked=not scores.missing.all()):
        options.warn(
            "the log does not name the models this certificate was made with, so the promise may not hold for it"
        )
    decisions = made.apply(scores)
    if output is not None:
        write_text(output, "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in decisions.to_dicts()))
    summary = {
        "rows": len(decisions),
        "deferred": int(decisions.deferred.sum()),
        "candidates": float(decisions.candidate.sum() / len(decisions)),
        "undecided": int((decisions.action < 0).sum()),
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


def _differ(made: "Certificate", scores: "ScoreLog", *, guardian_asked: bool) -> bool:
    """Whether a log names other models than a certificate; a Guardian that was not asked is not compared."""
    named = made.identities if isinstance(made.identities, dict) else {}
    roles = dict(zip(("primary", "guardian") if guardian_asked else ("primary",), scores.columns, strict=False))
    return any((scores.identities or {}).get(column) != named.get(role) for role, column in roles.items())


@click.command()
@click.option("--alpha", required=True, metavar="A", help="The risk budget.")
@click.option("--loss-bound", default="1", show_default=True, metavar="B", help="Largest possible loss.")
@click.option("--rows", multiple=True, type=int, metavar="N", help="What so many rows would give; may be repeated.")
@options.as_json
def plan(*, alpha: str, loss_bound: str, rows: tuple[int, ...], as_json: bool) -> None:
    """How many rows a budget needs, and what more of them buy.

    \b
    arbitrage plan --alpha 0.02 --loss-bound 3
    """
    from conformal_arbitrage.calibration.planning import plan as make_plan

    made = make_plan(alpha, loss_bound=loss_bound, rows=rows)
    if as_json:
        options.print_json(asdict(made))
        return
    click.echo(f"At least {made.fewest_rows} rows: with fewer, every query is deferred.")
    click.echo(f"About {made.suggested_rows} rows: then being finite costs a tenth of the budget.")
    spendable = ["all deferred" if r.spendable is None else f"{r.spendable:.5f}" for r in made.rows]
    lines = [[f"{r.n}", text, f"± {r.spread:.5f}"] for r, text in zip(made.rows, spendable, strict=True)]
    options.print_table(
        ["rows", "mean loss on the log, at most", "long-run loss: alpha ± one standard deviation"], lines
    )
