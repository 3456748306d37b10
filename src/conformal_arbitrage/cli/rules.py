"""calibrate, verify, apply, plan."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options

if TYPE_CHECKING:
    from conformal_arbitrage.certificate import Calibration


@click.command()
@click.argument("log")
@click.option("--alpha", required=True, metavar="A", help="The risk budget: the expected loss stays within it.")
@options.rule
@options.columns
@click.option("-o", "--output", metavar="FILE", help="Write the certificate; without it nothing is written.")
@options.as_json
def calibrate(
    log: str,
    *,
    alpha: str,
    guardian_sees: Any,
    boundary: Any,
    loss_bound: str | None,
    binarize: bool,
    missing_guardian: Any,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    output: str | None,
    as_json: bool,
) -> None:
    r"""Find the threshold that keeps a risk budget, and certify it.

    \b
    arbitrage calibrate log.parquet --alpha 0.05 --guardian-sees all -o certificate.json
    """
    from conformal_arbitrage import certificate

    scores = options.read_log(log, primary_column, guardian_column, outcomes, binarized=binarize)
    made = certificate.calibrate(
        scores,
        alpha,
        guardian_sees=guardian_sees,
        boundary=boundary,
        loss_bound=loss_bound,
        missing_guardian=missing_guardian,
    )
    if output is not None:
        made.save(output)
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


def _show(made: "Calibration") -> None:
    relaxation = "none: every query is deferred" if made.relaxation is None else f"{made.relaxation:.12g}"
    facts = [
        ("relaxation", relaxation + (f"  (at it, draws up to {made.boundary_u:.6f})" if made.boundary_u else "")),
        ("rule", f"the Guardian sees {made.guardian_sees}; boundary {made.boundary}"),
        ("risk budget", f"alpha {made.alpha:g}, losses in [0, {made.loss_bound:g}], {made.n} rows"),
        ("on this log", f"loss {made.empirical_risk:.4f}, budget left unspent {made.slack:.4f}"),
    ]
    if made.no_opinion_rows or made.missing_guardian_rows:
        absent = f"Primary in {made.no_opinion_rows} rows (deferred), Guardian in {made.missing_guardian_rows}"
        facts.append(("without scores", absent))
    options.print_facts(facts)
    click.echo(f"\n{made.guarantee}\n")


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
    r"""Recompute a certificate from its log, to the bit; exit 1 if anything differs.

    \b
    arbitrage verify certificate.json log.parquet
    """
    from conformal_arbitrage.certificate import verify as recompute

    made = _load(certificate, key_file)
    scores = options.read_log(
        log, primary_column or made.columns["primary"], guardian_column or made.columns["guardian"], outcomes
    )
    differing = recompute(made, scores)
    if as_json:
        documents = {name: {"certificate": a, "recomputed": b} for name, (a, b) in differing.items()}
        options.print_json({"ok": not differing, "differences": documents})
    elif not differing:
        click.echo(f"{certificate} holds: recomputed from {log}, nothing differs.")
    for name, (stored, again) in differing.items():
        click.echo(f"arbitrage: {name} differs: {stored!r} in {certificate}, {again!r} recomputed", err=True)
    if differing:
        raise SystemExit(1)


def _load(path: str, key_file: str | None) -> "Calibration":
    from conformal_arbitrage.certificate import Calibration, read_key

    return Calibration.load(path, key=None if key_file is None else read_key(key_file))


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
    r"""Run the certified rule on every row of a log.

    \b
    arbitrage apply certificate.json log.parquet -o decisions.jsonl
    """
    from conformal_arbitrage.files import write_text

    made = _load(certificate, key_file)
    scores = options.read_log(
        log, primary_column or made.columns["primary"], guardian_column or made.columns["guardian"], outcomes
    )
    decisions = made.apply(scores)
    if output is not None:
        write_text(output, "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in decisions.to_dicts()))
    undecided = int((decisions.action < 0).sum())
    summary = {
        "rows": len(decisions),
        "deferred": int(decisions.deferred.sum()),
        "candidates": float(decisions.candidate.sum() / len(decisions)),
        "undecided": undecided,
    }
    if undecided:
        options.warn(f"{undecided} deferred rows have no Guardian score, so no action is chosen there")
    if as_json:
        options.print_json(summary)
        return
    share = 100 * summary["deferred"] / summary["rows"]
    click.echo(f"{summary['rows']} rows: {summary['deferred']} go to the Guardian ({share:.1f} %).")
    if output is not None:
        click.echo(f"Written: {output}")


@click.command()
@click.option("--alpha", required=True, metavar="A", help="The risk budget.")
@click.option("--loss-bound", default="1", show_default=True, metavar="B", help="Largest possible loss.")
@options.as_json
def plan(*, alpha: str, loss_bound: str, as_json: bool) -> None:
    r"""How many rows a budget needs, and what more of them buy.

    \b
    arbitrage plan --alpha 0.02 --loss-bound 3
    """
    from conformal_arbitrage.planning import plan as make_plan

    made = make_plan(alpha, loss_bound=loss_bound)
    if as_json:
        options.print_json(asdict(made))
        return
    click.echo(f"At least {made.fewest_rows} rows: with fewer, every query is deferred.")
    click.echo(f"About {made.suggested_rows} rows: then being finite costs a tenth of the budget.")
    rows = [[f"{r.n}", f"{r.spendable:.5f}", f"± {r.spread:.5f}"] for r in made.rows]
    options.print_table(["rows", "loss the log may show", "long-run loss around alpha"], rows)
