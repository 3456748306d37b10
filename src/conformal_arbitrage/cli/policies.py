"""The commands of policies in service: policies lift."""

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.service import with_store
from conformal_arbitrage.errors import StoreError


@click.group("policies", cls=options.WrappingGroup)
def policies_command() -> None:
    """Manage the policies that a gateway serves.

    \b
    arbitrage policies lift support --reason "the new prompt was taken back"
    """


@policies_command.command("lift")
@click.argument("policy")
@click.option("--reason", required=True, help="Why; the record keeps it.")
@click.option(
    "--version", type=int, help="The version whose alarm to lift, if others serve beside it.  [default: newest]"
)
@options.config_file
@options.as_json
def policies_lift_command(policy: str, *, reason: str, version: int | None, config: str, as_json: bool) -> None:
    """Lift the alarm that stands, and end safe mode, without a new certificate.

    The certificate's promise is void from then on: answers say guarantee "none". To have one again, calibrate on rows
    recorded since the alarm and install the new certificate, which ends safe mode too.

    \b
    arbitrage policies lift support --reason "the new prompt was taken back"
    """
    from msgspec.structs import asdict

    from conformal_arbitrage.live.config import read_config

    known = read_config(config).policies
    if policy not in known:
        raise click.UsageError(f"there is no policy {policy!r} in {config}; there are {', '.join(known) or 'none'}")
    if not reason.strip():
        raise click.UsageError("--reason must say why; the record keeps it")
    lifted = with_store(config, lambda store: store.lift(policy, reason=reason, by="command line", version=version))
    if lifted is None:
        named = "its newest version" if version is None else f"version {version}"
        raise StoreError(f"policy {policy} has no alarm that stands on {named}; there is nothing to lift")
    if as_json:
        options.print_json({"policy": policy, **asdict(lifted)})
    else:
        click.echo(
            f"Lifted: the alarm of {policy}, version {lifted.version}; its answers say guarantee none until a certificate "
            "is installed"
        )
