"""The command renew: replace a policy's certificate by the next one of its schedule."""

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.service import gateway_installed, with_store
from conformal_arbitrage.errors import ConfigError, OutputError, StoreError

if TYPE_CHECKING:
    from conformal_arbitrage.collecting.renewal import Outlook, RenewablePolicy, Successor
    from conformal_arbitrage.store import PolicyVersion, Store


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
