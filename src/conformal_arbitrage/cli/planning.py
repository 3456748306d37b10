"""The command plan: rows before a calibration, audits after it."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from conformal_arbitrage.cli import options

if TYPE_CHECKING:
    from conformal_arbitrage.calibration.planning import Plan
    from conformal_arbitrage.monitoring.delays import AuditPlan


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
    from conformal_arbitrage.monitoring.delays import plan_audits

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
