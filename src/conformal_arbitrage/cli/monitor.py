"""Commands on what runs: monitor, renew, report, simulate."""

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.gateway import gateway_installed, with_store
from conformal_arbitrage.errors import ConfigError, OutputError, StoreError

if TYPE_CHECKING:
    from rich.table import Table

    from conformal_arbitrage.collecting.renewal import Outlook, RenewablePolicy, Successor
    from conformal_arbitrage.evaluation.simulation import Simulation
    from conformal_arbitrage.live.monitor import PolicyHistory, PolicyStanding
    from conformal_arbitrage.store import PolicyVersion, Store


# --- The command monitor ---


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
        options.print_json([one.to_dict() for one in standings])
        return
    if policy is None:
        options.console().print(_table(standings))
        if not standings:
            click.echo("No certificate is installed yet.")
        for line in _reasons(standings):
            click.echo(line)
    else:
        for one in standings:
            options.print_facts(_facts(one))
    if figure is not None:
        click.echo(f"Written: {figure}")


def _read(config: str, policy: str | None) -> "list[PolicyStanding]":
    from conformal_arbitrage.live.config import read_config
    from conformal_arbitrage.live.monitor import read_standings

    configuration = read_config(config)
    return with_store(
        config, lambda store: read_standings(store, configuration, policy=policy, now=time.time()), only_existing=True
    )


def _of_group(standings: "list[PolicyStanding]", group: str | None) -> "list[PolicyStanding]":
    """Return the ledgers of a group; all of them if none is named.

    Raises:
        UsageError: there is no ledger of that name.
    """
    own = [one for one in standings if group is None or one.ledger.key.group == group]
    if standings and not own:
        names = ", ".join(dict.fromkeys(one.ledger.key.group for one in standings if one.ledger.key.group)) or "none"
        raise click.UsageError(f"there is no ledger of a group {group!r:.80}; there are {names}")
    return own


def _drawn_group(standings: "list[PolicyStanding]") -> str:
    """Return the group to draw, empty without groups; a figure has room for one."""
    names = list(dict.fromkeys(one.ledger.key.group for one in standings))
    if len(names) > 1:
        raise click.UsageError(f"--plot draws one group; add --group with one of {', '.join(names)}")
    return names[0] if names else ""


def _watch(config: str, policy: str | None, seconds: float, group: str | None) -> None:
    """Show the table until interrupted, on one connection."""
    import asyncio

    from rich.live import Live

    from conformal_arbitrage.live.config import read_config
    from conformal_arbitrage.live.monitor import read_standings

    configuration = read_config(config)

    async def show(store: "Store") -> None:
        console = options.console()
        with Live(console=console, auto_refresh=False) as live:
            while True:
                standings = _of_group(await read_standings(store, configuration, policy=policy, now=time.time()), group)
                table = _table(standings, at=time.time())
                if console.is_terminal:
                    live.update(table, refresh=True)
                else:  # a file or a pipe gets one table after the other
                    console.print(table)
                await asyncio.sleep(seconds)

    try:
        with_store(config, show, only_existing=True)
    except KeyboardInterrupt:
        click.echo("", err=True)


def _save(config: str, policy: str, figure: str, group: str) -> None:
    from conformal_arbitrage.evaluation.show import save_history
    from conformal_arbitrage.live.config import read_config
    from conformal_arbitrage.live.monitor import drawn_ledgers, drawn_moments, read_history

    configuration = read_config(config)
    history: PolicyHistory = with_store(config, lambda store: read_history(store, configuration, policy))
    now = time.time()
    title = f"{policy}{f', {group}' if group else ''}: loss of audited decisions"
    save_history(drawn_ledgers(history, now, group=group), drawn_moments(history), figure, title=title)


def _table(standings: "list[PolicyStanding]", *, at: float | None = None) -> "Table":
    from rich import box
    from rich.table import Table

    title = None if at is None else f"{_time(at)} UTC"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="dim", pad_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("state")
    for name in ("loss", "limits", "alpha, red", "evidence", "audits", "last audit"):
        table.add_column(name, justify="right")
    for one in standings:
        table.add_row(_name(one), f"[{_STYLES.get(one.state, 'none')}]{one.state}[/]", *_standing_figures(one))
    return table


def _name(one: "PolicyStanding") -> str:
    from rich.markup import escape

    group = f" {one.ledger.key.group}" if one.ledger.key.group else ""
    return escape(f"{one.ledger.key.policy}{group} v{one.ledger.key.version}")


def _standing_figures(one: "PolicyStanding") -> list[str]:
    standing, certificate = one.standing, one.ledger.certificate
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
        _evidence(one),
        audits,
        "" if one.ledger.last_audit is None else _time(one.ledger.last_audit),
    ]


def _evidence(one: "PolicyStanding") -> str:
    from conformal_arbitrage.live.monitor import as_evidence

    if one.standing is None:
        return ""
    logs = one.standing.figures.log_evidence
    return f"{as_evidence(logs[0] if logs[1] is None else logs[1]):.3g}"


def _reasons(standings: "list[PolicyStanding]") -> list[str]:
    lines: list[str] = []
    for one in standings:
        reasons = one.standing.reasons if one.standing is not None else (one.ledger.unwatched or "",)
        reasons = reasons if one.void is None else (*reasons, f"there is no guarantee: {one.void}")
        reasons = (*reasons, _allowed(one))
        group = f", {one.ledger.key.group}" if one.ledger.key.group else ""
        lines += [options.wrapped(f"{one.ledger.key.policy}{group}: {reason}") for reason in reasons if reason]
    return lines


def _allowed(one: "PolicyStanding") -> str:
    """Return what the configuration tolerates; whether models differ is known to a gateway only."""
    allowed = ", ".join(one.allowed)
    return allowed and f"{allowed}: tolerated; decisions that need it have no guarantee"


def _facts(one: "PolicyStanding") -> list[tuple[str, str]]:
    """Return everything about one ledger, for people."""
    ledger, standing = one.ledger, one.standing
    facts = [
        ("policy", f"{ledger.key.policy}, version {ledger.key.version}, mode {one.mode}"),
        ("installed", f"{_time(ledger.version.installed)} UTC by {ledger.version.installed_by}"),
        ("state", one.state),
    ]
    facts += [] if one.void is None else [("guarantee", f"none: {one.void}")]
    facts += [("allowed", _allowed(one))] if one.allowed else []
    facts += [("models", ledger.key.identities_sha256[:16])] if ledger.key.identities_sha256 else []
    facts += [("group", ledger.key.group)] if ledger.key.group else []
    if standing is None or ledger.certificate is None:
        return [*facts, ("why", ledger.unwatched or "")]
    facts += [("why", reason) for reason in standing.reasons]
    mean, limits, lines, evidence, audits, last = _standing_figures(one)
    note = standing.figures.lines.note
    facts += [
        ("mean loss", f"{mean or 'unknown'}, limits {limits}, each side failing ever with probability 0.025"),
        ("alpha, red line", lines if note is None else f"{lines} ({note})"),
        ("evidence", f"{evidence} now; amber from 20 against alpha, red from 40 against the red line"),
        ("audits", f"{audits}; last {last or 'none'}"),
    ]
    if one.served is not None:
        bound, served = ledger.certificate.loss_bound, one.served
        loss = "unknown" if served.mean is None else f"{bound * served.mean:.4f}"
        facts.append(("as served", f"loss {loss} over {served.answers:,} delivered answers, fallbacks included"))
    facts.append(("blind decisions", _blind(one, signed=standing.figures.lines.signed)))
    return facts


def _blind(one: "PolicyStanding", *, signed: bool) -> str:
    if one.audit_rate <= 0:
        return "no decision is audited: a doubled loss never shows"
    if signed or one.blind_decisions is None:
        return "not known: until a doubled loss shows depends on how many gains hide it"
    return f"{one.blind_decisions:,}: so many until a doubled loss shows in 9 of 10 cases"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


# --- The command renew ---


@click.command("renew")
@click.argument("policy")
@click.option("--dry-run", is_flag=True, help="Say when the next renewal is due and on which rows; install nothing.")
@click.option("--tighten", is_flag=True, help="Raise the relaxation if the rows since the installation ask for it.")
@click.option(
    "--after-looking", is_flag=True, help="Install outside the schedule; the certificate then has no guarantee."
)
@click.option(
    "--rows", "output", metavar="FILE", help="Write the rows it was calibrated on, for `verify`.  [default: do not]"
)
@options.config_file
@options.as_json
def renew_command(
    policy: str,
    *,
    dry_run: bool,
    tighten: bool,
    after_looking: bool,
    output: str | None,
    config: str,
    as_json: bool,
) -> None:
    """Calibrate a policy again if its schedule says so, and install whatever comes out.

    Renewals are due at doubled numbers of rows. A dry run does not show what would come out: whoever installs a
    certificate only if it is cheaper keeps the lucky ones, and breaks the guarantee.

    \b
    arbitrage renew support --dry-run
    arbitrage renew support
    arbitrage renew support --tighten             a larger relaxation, at any time
    """
    if tighten and after_looking:
        raise click.UsageError("give --tighten, which keeps the guarantee, or --after-looking, which gives it up")
    target = _target(config, policy)
    if dry_run:
        _show_outlook(with_store(config, lambda store: _outlook(store, target)), as_json=as_json)
        return

    async def renew(store: "Store") -> "tuple[Outlook, Successor | None, PolicyVersion | None]":
        from conformal_arbitrage.collecting import renewal

        ahead = await renewal.outlook(store, target, now=time.time())
        if tighten:
            next = await renewal.tighter(store, target, ahead, now=time.time())
        elif after_looking:
            next = await renewal.looked_at_successor(store, target, ahead)
        else:
            next = await renewal.successor(store, target, ahead) if ahead.due else None
        if next is None:
            return ahead, None, None
        return ahead, next, await renewal.install_successor(store, ahead, next, by="command line")

    ahead, next, version = with_store(config, renew)
    if next is None:
        _show_none(ahead, tighten=tighten, as_json=as_json)
        return
    if version is None:
        raise StoreError(
            f"policy {policy}: a version was installed or an alarm raised meanwhile, so this was not; try again"
        )
    _save_rows(next, output)
    _show_installed(ahead, next, version, output, as_json=as_json)


def _target(config: str, policy: str) -> "RenewablePolicy":
    """Return the policy with the identities of its models, and the project's secret."""
    from conformal_arbitrage.live.config import read_config

    with gateway_installed():
        from conformal_arbitrage.collecting.renewal import renewable
        from conformal_arbitrage.gateway.server import identities_of
        from conformal_arbitrage.live.database import existing_secret
    configuration = read_config(config)
    identities = identities_of(configuration, policy)
    secret = existing_secret(configuration)
    if secret is None:
        raise ConfigError(
            "a renewed certificate is signed with the project's secret, and there is none here; run this where "
            "ARBITRAGE_SECRET or arbitrage.secret is"
        )
    return renewable(configuration, policy, identities, secret)


async def _outlook(store: "Store", target: "RenewablePolicy") -> "Outlook":
    from conformal_arbitrage.collecting.renewal import outlook

    return await outlook(store, target, now=time.time())


def _described(ahead: "Outlook") -> str:
    since = datetime.fromtimestamp(ahead.chain.since, UTC).isoformat(timespec="seconds")
    union = f" and the {ahead.collected} rows of its log" if ahead.collected else ""
    what = "the certificate after the alarm" if ahead.step == "after red" else f"renewal {ahead.renewal}"
    return (
        f"policy {ahead.policy}, version {ahead.version}: {what} takes the first {ahead.rows} rows since {since}{union}; "
        f"{ahead.arrived} have arrived, and the outcomes of {ahead.settled} are due"
    )


def _show_outlook(ahead: "Outlook", *, as_json: bool) -> None:
    if as_json:
        options.print_json({**ahead.document(), "installed": None})
    else:
        click.echo(f"{_described(ahead)}: {'it is due' if ahead.due else 'it is not due yet'}.")


def _show_none(ahead: "Outlook", *, tighten: bool, as_json: bool) -> None:
    if as_json:
        options.print_json({**ahead.document(), "installed": None})
    elif tighten:
        click.echo(f"The rows since version {ahead.version} ask for no larger relaxation; nothing was installed.")
    else:
        click.echo(
            f"{_described(ahead)}: it is not due yet, and nothing was installed. A certificate outside the schedule has no "
            "guarantee (--after-looking)."
        )


def _show_installed(
    ahead: "Outlook", next: "Successor", version: "PolicyVersion", output: str | None, *, as_json: bool
) -> None:
    certificate = next.certificate
    document: dict[str, Any] = {**ahead.document(), "installed": version.version, "certificate": certificate.to_dict()}
    if certificate.ancestry is not None:
        document["step"] = certificate.ancestry.step
    if as_json:
        options.print_json(document)
        return
    options.print_facts(certificate.facts())
    click.echo(
        f"\n{options.wrapped(certificate.summary)}\n\nInstalled: version {version.version} of policy {ahead.policy}."
    )
    if output is not None:
        click.echo(f"Written: {output}, the rows it was calibrated on.")


def _save_rows(next: "Successor", output: str | None) -> None:
    if output is None:
        return
    try:
        next.log.write(output)
    except OutputError as error:
        options.warn(f"the certificate was installed, and its rows were not written: {error}")


# --- The command report ---


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
    from conformal_arbitrage.live.config import read_config
    from conformal_arbitrage.live.database import existing_secret
    from conformal_arbitrage.live.report import Month, read_month, report_page
    from conformal_arbitrage.scorelog.tables import write_text

    configuration, which = read_config(config), Month.of(month)
    signed = existing_secret(configuration) is not None
    report = with_store(
        config,
        lambda store: read_month(store, configuration, policy, which, now=time.time(), signed=signed),
        only_existing=True,
    )
    write_text(output, report_page(report))
    if as_json:
        state = None if report.standing is None else report.standing.state
        options.print_json({"output": output, "state": state, "ok": not report.problems, "problems": report.problems})
    else:
        click.echo(f"Written: {output}")
    for problem in report.problems:
        options.warn(problem)
    if report.problems:
        raise SystemExit(1)


# --- The command simulate ---


@click.command("simulate")
@click.argument("log")
@click.option("--alpha", required=True, metavar="A", help="The risk budget.")
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
@options.columns
@options.costs
@click.option("--plot", "figure", metavar="FILE", help="Save a figure of the course (.png, .svg, .pdf).")
@options.as_json
def simulate_command(
    log: str,
    *,
    alpha: str,
    guardian_sees: Any,
    boundary: Any,
    loss_bound: str | None,
    binarize: bool,
    confidence: str | None,
    zero_one: bool,
    primary_column: str | None,
    guardian_column: str | None,
    outcomes: tuple[str, ...],
    primary_cost: float | None,
    guardian_cost: float | None,
    primary_price: tuple[float, float] | None,
    guardian_price: tuple[float, float] | None,
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
    from conformal_arbitrage.evaluation.costs import CostOptions
    from conformal_arbitrage.evaluation.simulation import Scenario, simulate

    scores = options.read_log(log, primary_column, guardian_column, outcomes, binarized=binarize)
    costs = CostOptions(
        primary_cost=primary_cost,
        guardian_cost=guardian_cost,
        primary_price=primary_price,
        guardian_price=guardian_price,
    )
    simulation = simulate(
        scores,
        alpha,
        scenario=Scenario(**scenario),
        costs=costs,
        guardian_sees=guardian_sees,
        boundary=boundary,
        loss_bound=loss_bound,
        confidence=confidence,
        zero_one=zero_one,
    )
    if figure is not None:
        from conformal_arbitrage.evaluation.show import save_simulation

        save_simulation(simulation, figure)
    options.remember_look(scores, log, "simulate")
    if as_json:
        options.print_json(simulation.to_dict())
        return
    show_simulation(simulation)
    if figure is not None:
        click.echo(f"Written: {figure}")


def show_simulation(simulation: "Simulation") -> None:
    """Print a simulation for people."""
    from conformal_arbitrage.evaluation import simulation as simulation_report

    options.print_facts(simulation_report.simulation_facts(simulation))
    options.print_table(simulation_report.HEADER, simulation_report.simulation_rows(simulation))
    if simulation.always is not None:
        click.echo(f"Always asking the Guardian would have cost ${simulation.always:,.2f}.")
    click.echo(options.wrapped(simulation_report.CAVEAT))
