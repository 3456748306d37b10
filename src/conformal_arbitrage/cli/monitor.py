"""Commands that show how policies fare: monitor and report."""

import asyncio
import time
from datetime import UTC, datetime

import click
import numpy as np
from rich import box
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.output import console, print_facts, print_json, warn, wrapped
from conformal_arbitrage.evaluation.show import DrawnLedger, DrawnMoment, save_history
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.live.service import (
    PolicyHistory,
    PolicyStanding,
    as_evidence,
    read_history,
    read_standings,
)
from conformal_arbitrage.monitoring.lines import AMBER_EVIDENCE, RED_EVIDENCE
from conformal_arbitrage.monitoring.monitor import ledger_history
from conformal_arbitrage.scorelog.tables import write_text
from conformal_arbitrage.store.record import AlarmBody, ExclusionBody
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import DAY

# --- monitor ---


_STYLES = {"red": "bold red", "amber": "yellow", "kept": "green", "within calibration luck": "green"}


@click.command("monitor")
@click.argument("policy", required=False)
@click.option("--watch", is_flag=True, help="Stay, and show it anew every few seconds.")
@click.option(
    "--every", type=click.FloatRange(0.1), default=2.0, show_default=True, metavar="S", help="Seconds; with --watch."
)
@click.option(
    "--plot", "figure", metavar="FILE", help="Save a figure of the limits over time (.png, .svg, .pdf); with POLICY."
)
@click.option("--group", metavar="NAME", help="Only this group, of a certificate by groups.")
@options.config_file
@options.as_json
def monitor_command(
    policy: str | None,
    *,
    watch: bool,
    every: float,
    figure: str | None,
    group: str | None,
    config: str,
    as_json: bool,
) -> None:
    """Show where policies stand: the loss of audited decisions against alpha, with limits valid at every moment.

    It reads the ledger in the configured database, whether or not a gateway is running, and never the records.

    \b
    arbitrage monitor
    arbitrage monitor support --watch
    arbitrage monitor support --plot support.png
    """
    if figure is not None and policy is None:
        raise click.UsageError("--plot draws one policy; name it: arbitrage monitor POLICY --plot FILE")
    if watch and (as_json or figure is not None):
        raise click.UsageError("--watch goes with neither --json nor --plot; call the command again instead")
    if watch:
        _watch(config, policy, every, group)
        return
    standings = _of_group(_read(config, policy), group)
    if figure is not None and policy is not None:
        _save(config, policy, figure, _drawn_group(standings))
    if as_json:
        print_json([entry.to_dict() for entry in standings])
        return
    if policy is None:
        console().print(_table(standings))
        if not standings:
            click.echo("No certificate is installed yet.")
        for line in _reasons(standings):
            click.echo(line)
    else:
        for entry in standings:
            print_facts(_facts(entry))
    if figure is not None:
        click.echo(f"Written: {figure}")


def _read(config: str, policy: str | None) -> list[PolicyStanding]:
    configuration = read_config(config)
    return options.with_store(
        config, lambda store: read_standings(store, configuration, policy=policy, now=time.time()), only_existing=True
    )


def _of_group(standings: list[PolicyStanding], group: str | None) -> list[PolicyStanding]:
    """Return the ledgers of a group; all of them if none is named.

    Raises:
        UsageError: there is no ledger of that name.
    """
    shown = [entry for entry in standings if group is None or entry.ledger.key.group == group]
    if standings and not shown:
        names = (
            ", ".join(dict.fromkeys(entry.ledger.key.group for entry in standings if entry.ledger.key.group)) or "none"
        )
        raise click.UsageError(f"there is no ledger of a group {group!r:.80}; there are {names}")
    return shown


def _drawn_group(standings: list[PolicyStanding]) -> str:
    """Return the group to draw, empty without groups; a figure has room for one."""
    names = list(dict.fromkeys(entry.ledger.key.group for entry in standings))
    if len(names) > 1:
        raise click.UsageError(f"--plot draws one group; add --group with one of {', '.join(names)}")
    return names[0] if names else ""


def _watch(config: str, policy: str | None, seconds: float, group: str | None) -> None:
    """Show the table until interrupted, on one connection."""
    configuration = read_config(config)

    async def show(store: Store) -> None:
        terminal = console()
        with Live(console=terminal, auto_refresh=False) as live:
            while True:
                standings = _of_group(await read_standings(store, configuration, policy=policy, now=time.time()), group)
                table = _table(standings, at=time.time())
                if terminal.is_terminal:
                    live.update(table, refresh=True)
                else:  # a file or a pipe gets one table after the other
                    terminal.print(table)
                await asyncio.sleep(seconds)

    try:
        options.with_store(config, show, only_existing=True)
    except KeyboardInterrupt:
        click.echo("", err=True)


def _save(config: str, policy: str, figure: str, group: str) -> None:
    configuration = read_config(config)
    history: PolicyHistory = options.with_store(config, lambda store: read_history(store, configuration, policy))
    now = time.time()
    title = f"{policy}{f', {group}' if group else ''}: loss of audited decisions"
    save_history(drawn_ledgers(history, now, group=group), drawn_moments(history), figure, title=title)


def drawn_ledgers(history: PolicyHistory, now: float, *, group: str = "") -> list[DrawnLedger]:
    """Return the ledgers of a policy, or of one of its groups, to draw, by days since 1970; empty ones are left out."""
    drawn: list[DrawnLedger] = []
    starts = sorted(moment.x for moment in drawn_moments(history) if moment.kind != "red")
    for ledger in history.ledgers:
        if ledger.lines is None or not len(ledger.rows) or ledger.key.group != group:
            continue
        past = ledger.rows.due <= now
        unknown = np.isnan(ledger.rows.loss)
        points = ledger_history(ledger.lines, ledger.rows.loss, (unknown & past).astype(np.float64))
        days = ledger.rows.drawn / DAY
        ended = min([start for start in starts if start > days[-1]], default=now / DAY)
        bound = 1.0 if ledger.certificate is None else ledger.certificate.loss_bound
        drawn.append(
            DrawnLedger(x=days[points.audits - 1], start=float(days[0]), stop=ended, history=points, bound=bound)
        )
    return drawn


def drawn_moments(history: PolicyHistory) -> list[DrawnMoment]:
    """Return installations, alarms and lifts of a policy to mark, in order."""
    moments = [
        DrawnMoment(kind="installed", x=version.installed / DAY, text=f"version {version.version}")
        for version in history.versions
    ]
    for notice in history.notices:
        if not isinstance(notice.body, ExclusionBody):
            kind = "red" if isinstance(notice.body, AlarmBody) else "lifted"
            text = f"red: {notice.body.cause}" if isinstance(notice.body, AlarmBody) else "lifted"
            moments.append(DrawnMoment(kind=kind, x=(notice.body.at or 0.0) / DAY, text=text))
    return sorted(moments, key=lambda moment: moment.x)


def _table(standings: list[PolicyStanding], *, at: float | None = None) -> Table:
    title = None if at is None else f"{_time(at)} UTC"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="dim", pad_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("state")
    for name in ("loss", "limits", "alpha, red", "evidence", "audits", "last audit"):
        table.add_column(name, justify="right")
    for entry in standings:
        table.add_row(_name(entry), f"[{_STYLES.get(entry.state, 'none')}]{entry.state}[/]", *_standing_figures(entry))
    return table


def _name(entry: PolicyStanding) -> str:
    group = f" {entry.ledger.key.group}" if entry.ledger.key.group else ""
    return escape(f"{entry.ledger.key.policy}{group} v{entry.ledger.key.version}")


def _standing_figures(entry: PolicyStanding) -> list[str]:
    standing, certificate = entry.standing, entry.ledger.certificate
    if standing is None or certificate is None:
        return [""] * 6
    bound, figures = certificate.loss_bound, standing.figures
    red = "none" if figures.lines.red is None else f"{bound * figures.lines.red:.4g}"
    audits = f"{figures.known:,}"
    audits += f" + {figures.pending:,} pending" if figures.pending else ""
    audits += f" + {figures.missing:,} missing" if figures.missing else ""
    return [
        "" if standing.mean is None else f"{bound * standing.mean:.4f}",
        f"{bound * standing.limits[0]:.4f} to {bound * standing.limits[1]:.4f}",
        f"{certificate.alpha:g}, {red}",
        _evidence(entry),
        audits,
        "" if entry.ledger.last_audit is None else _time(entry.ledger.last_audit),
    ]


def _evidence(entry: PolicyStanding) -> str:
    if entry.standing is None:
        return ""
    logs = entry.standing.figures.log_evidence
    return f"{as_evidence(logs[0] if logs[1] is None else logs[1]):.3g}"


def _reasons(standings: list[PolicyStanding]) -> list[str]:
    lines: list[str] = []
    for entry in standings:
        reasons = entry.standing.reasons if entry.standing is not None else (entry.ledger.unwatched or "",)
        reasons = reasons if entry.void is None else (*reasons, f"there is no guarantee: {entry.void}")
        reasons = (*reasons, _allowed(entry))
        group = f", {entry.ledger.key.group}" if entry.ledger.key.group else ""
        lines += [wrapped(f"{entry.ledger.key.policy}{group}: {reason}") for reason in reasons if reason]
    return lines


def _allowed(entry: PolicyStanding) -> str:
    """Return what the configuration tolerates; whether models differ is known to a gateway only."""
    allowed = ", ".join(entry.allowed)
    return allowed and f"{allowed}: tolerated; decisions that need it have no guarantee"


def _facts(entry: PolicyStanding) -> list[tuple[str, str]]:
    """Return everything about one ledger, for people."""
    ledger, standing = entry.ledger, entry.standing
    facts = [
        ("policy", f"{ledger.key.policy}, version {ledger.key.version}, mode {entry.mode}"),
        ("installed", f"{_time(ledger.version.installed)} UTC by {ledger.version.installed_by}"),
        ("state", entry.state),
    ]
    facts += [] if entry.void is None else [("guarantee", f"none: {entry.void}")]
    facts += [("allowed", _allowed(entry))] if entry.allowed else []
    facts += [("models", ledger.key.identities_sha256[:16])] if ledger.key.identities_sha256 else []
    facts += [("group", ledger.key.group)] if ledger.key.group else []
    if standing is None or ledger.certificate is None:
        return [*facts, ("why", ledger.unwatched or "")]
    facts += [("why", reason) for reason in standing.reasons]
    mean, limits, lines, evidence, audits, last = _standing_figures(entry)
    note = standing.figures.lines.note
    red = RED_EVIDENCE * standing.figures.lines.policies
    facts += [
        ("mean loss", f"{mean or 'unknown'}, limits {limits}, each side failing ever with probability 0.025"),
        ("alpha, red line", lines if note is None else f"{lines} ({note})"),
        (
            "evidence",
            f"{evidence} now; amber from {AMBER_EVIDENCE:g} against alpha, red from {red:g} against the red line",
        ),
        ("audits", f"{audits}; last {last or 'none'}"),
    ]
    if entry.served is not None:
        bound, served = ledger.certificate.loss_bound, entry.served
        loss = "unknown" if served.mean is None else f"{bound * served.mean:.4f}"
        facts.append(("as served", f"loss {loss} over {served.answers:,} delivered answers, fallbacks included"))
    facts.append(("blind decisions", _blind(entry, signed=standing.figures.lines.signed)))
    return facts


def _blind(entry: PolicyStanding, *, signed: bool) -> str:
    if entry.audit_rate <= 0:
        return "no decision is audited: a doubled loss never shows"
    if signed or entry.blind_decisions is None:
        return "not known: until a doubled loss shows depends on how many gains hide it"
    return f"{entry.blind_decisions:,}: so many until a doubled loss shows in 9 of 10 cases"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


# --- report ---


@click.command("report")
@click.argument("policy")
@click.option("--month", required=True, metavar="YYYY-MM", help="The calendar month, in UTC.")
@click.option("-o", "--output", required=True, metavar="FILE", help="The HTML page to write.")
@options.config_file
@options.as_json
def report_command(policy: str, *, month: str, output: str, config: str, as_json: bool) -> None:
    """Write a month of a policy as one HTML page: promise, evidence, use, money, alarms, certificates, record.

    The page needs nothing else, has no scripts, and prints well.

    \b
    arbitrage report support --month 2026-11 -o support-2026-11.html
    """
    from conformal_arbitrage.gateway.console.report import Month, read_month, report_page  # needs the gateway's extra

    configuration, which = read_config(config), Month.of(month)
    report = options.with_store(
        config,
        lambda store: read_month(store, configuration, policy, which, now=time.time()),
        only_existing=True,
    )
    write_text(output, report_page(report))
    if as_json:
        state = None if report.standing is None else report.standing.state
        print_json({"output": output, "state": state, "ok": not report.problems, "problems": report.problems})
    else:
        click.echo(f"Written: {output}")
    for problem in report.problems:
        warn(problem)
    if report.problems:
        raise SystemExit(1)
