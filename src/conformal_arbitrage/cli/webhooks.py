"""The commands for webhooks: secret, test, list."""

from typing import TYPE_CHECKING, Any

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.service import when, with_store

if TYPE_CHECKING:
    from conformal_arbitrage.upstream.webhook import WebhookEndpoint


@click.group("webhooks", cls=options.WrappingGroup)
def webhooks_command() -> None:
    """Test the webhooks of the gateway, and list what was sent to them.

    \b
    arbitrage webhooks secret
    arbitrage webhooks test
    arbitrage webhooks list
    """


@webhooks_command.command("secret")
def webhooks_secret_command() -> None:
    """Print a new secret, for the gateway and for the receiver.

    \b
    arbitrage webhooks secret > alerts.secret
    """
    import base64
    import secrets

    click.echo(f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}")


@webhooks_command.command("test")
@click.argument("names", nargs=-1)
@options.config_file
@options.as_json
def webhooks_test_command(names: tuple[str, ...], *, config: str, as_json: bool) -> None:
    """Send a message of type webhook.test to each webhook, or to those named; exit 1 if one does not accept it.

    \b
    arbitrage webhooks test
    arbitrage webhooks test alerts
    """
    from conformal_arbitrage.live.config import read_config
    from conformal_arbitrage.live.webhooks import webhooks_of

    webhooks = webhooks_of(read_config(config))
    known = [webhook.name for webhook in webhooks]
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        remedy = f"there are {', '.join(known)}" if known else "add a section [gateway.webhooks.NAME]"
        raise click.UsageError(
            f"there is no webhook {unknown[0]!r} in {config}; {remedy}" if unknown else f"{config}: {remedy}"
        )
    chosen = [webhook for webhook in webhooks if not names or webhook.name in names]
    attempts = options.run_coroutine(_send_tests(chosen))
    if as_json:
        options.print_json({"ok": all(one["problem"] is None for one in attempts), "webhooks": attempts})
    else:
        rows = [
            [one["webhook"], str(one["status"] or ""), f"{one['seconds']:.2f}", one["problem"] or "accepted"]
            for one in attempts
        ]
        options.print_table(["webhook", "status", "seconds", "result"], rows)
    if any(one["problem"] is not None for one in attempts):
        raise SystemExit(1)


async def _send_tests(webhooks: "list[WebhookEndpoint]") -> list[dict[str, Any]]:
    import asyncio

    from conformal_arbitrage.live.webhooks import send_test

    try:
        attempts = await asyncio.gather(*map(send_test, webhooks))
    finally:
        for webhook in webhooks:
            await webhook.close()
    return [
        {"webhook": webhook.name, "status": attempt.status, "seconds": attempt.seconds, "problem": attempt.problem}
        for webhook, attempt in zip(webhooks, attempts, strict=True)
    ]


@webhooks_command.command("list")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="The most to list.")
@options.config_file
@options.as_json
def webhooks_list_command(*, limit: int, config: str, as_json: bool) -> None:
    """List the newest messages to webhooks, of the last thirty days."""
    from msgspec.structs import asdict

    deliveries = with_store(config, lambda store: store.deliveries(limit=limit))
    if as_json:
        options.print_json([asdict(delivery) for delivery in deliveries])
        return
    rows = [
        [d.id, d.endpoint, d.event, when(d.created), str(d.attempts), when(d.done), d.error or ""] for d in deliveries
    ]
    options.print_table(["id", "webhook", "event", "created", "attempts", "done", "last problem"], rows)
