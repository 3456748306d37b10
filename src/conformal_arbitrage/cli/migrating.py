"""The command that brings a database to a release and a configuration: records migrate."""

from typing import TYPE_CHECKING

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.service import gateway_installed

if TYPE_CHECKING:
    from conformal_arbitrage.gateway.preparation import Preparation


@click.command("migrate")
@options.config_file
@options.as_json
def records_migrate_command(*, config: str, as_json: bool) -> None:
    """Bring the database to this release and this configuration, before gateways start with `serve --no-migrate`.

    It migrates the tables, creates the key whose SHA-256 is in ARBITRAGE_ADMIN_KEY_SHA256, and installs the certificate
    files that changed since the last time. It calls no model, and running it again changes nothing.

    \b
    arbitrage records migrate
    """
    from conformal_arbitrage.live.config import read_config

    with gateway_installed():
        from conformal_arbitrage.gateway.preparation import prepare
    done = options.run_coroutine(prepare(read_config(config)))
    if as_json:
        options.print_json(_document(done))
        return
    schema = done.schema
    change = "as before" if schema.before == schema.version else f"from {schema.before}"
    click.echo(
        f"Schema version {schema.version}, {change}; releases that know version {schema.readable_by} can work with it"
    )
    if done.key is not None:
        click.echo(f"Created: key {done.key}, scope admin")
    for version in done.installed:
        click.echo(f"Installed: version {version.version} of policy {version.name}")


def _document(done: "Preparation") -> dict[str, object]:
    schema = {"before": done.schema.before, "version": done.schema.version, "readable_by": done.schema.readable_by}
    return {"schema": schema, "key": done.key, "installed": {one.name: one.version for one in done.installed}}
