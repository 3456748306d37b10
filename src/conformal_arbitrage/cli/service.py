"""serve, keys, records: the gateway and its record."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.live import config_file
from conformal_arbitrage.errors import StoreError

if TYPE_CHECKING:
    from conformal_arbitrage.store import Store

Result = TypeVar("Result")


@click.command()
@config_file
@click.option("--host", metavar="ADDRESS", help="Listen here.  [default: as configured]")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="On this port; 0 takes a free one.  [default: as configured]"
)
def serve(*, config: str, host: str | None, port: int | None) -> None:
    """Serve the policies of a configuration over an OpenAI-compatible API.

    \b
    arbitrage serve
    """
    import logging

    from msgspec import structs

    from conformal_arbitrage.live.config import read_config

    try:
        from conformal_arbitrage import gateway
    except ImportError as error:
        raise click.ClickException("the gateway needs its extra: pip install 'conformal-arbitrage[gateway]'") from error
    read = read_config(config)
    listening = structs.replace(
        read.gateway, host=host or read.gateway.host, port=read.gateway.port if port is None else port
    )
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    policy = next(iter(read.policies), "POLICY")
    gateway.run(structs.replace(read, gateway=listening), started=lambda url: _announce(url, policy))


def _announce(url: str, policy: str) -> None:
    question = '{"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]}'
    body = f'{{"model": "{policy}", "input": "...", "questions": [{question}]}}'
    click.echo(f"Listening on {url}. Try:\n\ncurl {url}/v1/decisions -H 'Content-Type: application/json' -d '{body}'\n")


@click.group()
def keys() -> None:
    """API keys of the gateway.

    \b
    arbitrage keys create --scope call
    arbitrage keys list
    arbitrage keys revoke ID
    """


@keys.command()
@click.option("--scope", type=click.Choice(["call", "review", "admin"]), default="call", show_default=True)
@click.option("--label", default="", help="Whose key it is.")
@config_file
@options.as_json
def create(*, scope: Any, label: str, config: str, as_json: bool) -> None:
    """Make a key; it is shown once, and only its digest is kept.

    \b
    arbitrage keys create --scope call --label "web shop"
    """
    from conformal_arbitrage.gateway.guards import new_key
    from conformal_arbitrage.store import new_id

    key, sha256 = new_key()
    name = new_id()
    _with_store(config, lambda store: store.create_key(id=name, sha256=sha256, scope=scope, label=label))
    if as_json:
        options.print_json({"id": name, "key": key, "scope": scope})
    else:
        click.echo(f"{key}\nid {name}, scope {scope}; it is not shown again")


@keys.command(name="list")
@config_file
@options.as_json
def list_keys(*, config: str, as_json: bool) -> None:
    """All keys, without their secrets."""
    found = _with_store(config, lambda store: store.keys())
    if as_json:
        options.print_json([asdict(key) for key in found])
        return
    rows = [[k.id, k.scope, k.label, _when(k.created), "" if k.revoked is None else _when(k.revoked)] for k in found]
    options.print_table(["id", "scope", "label", "made", "revoked"], rows)


@keys.command()
@click.argument("id")
@config_file
def revoke(id: str, *, config: str) -> None:
    """Revoke a key, at once."""
    if not _with_store(config, lambda store: store.revoke_key(id)):
        raise StoreError(f"there is no key {id!r}; `arbitrage keys list` shows them")
    click.echo(f"Revoked: {id}")


@click.group()
def records() -> None:
    """The decision record: export, prune, verify.

    \b
    arbitrage records export --policy support --score-log -o log.parquet
    arbitrage records verify
    arbitrage records prune --older-than 90
    """


@records.command()
@click.option("-o", "--output", required=True, metavar="FILE", help="The file to write.")
@click.option("--policy", required=True, metavar="NAME", help="Whose decisions.")
@click.option("--score-log", is_flag=True, help="Only shadow and audited rows, as a score log fit for calibration.")
@click.option("--all", "everything", is_flag=True, help="Every row, marked; calibrate refuses such a file.")
@config_file
@options.as_json
def export(*, output: str, policy: str, score_log: bool, everything: bool, config: str, as_json: bool) -> None:
    """Write decisions as a score log.

    \b
    arbitrage records export --policy support --score-log -o log.parquet
    """
    from conformal_arbitrage.collecting.from_records import score_log_of
    from conformal_arbitrage.gateway.server import identities_of
    from conformal_arbitrage.live.config import read_config

    if score_log == everything:
        raise click.UsageError("give --score-log (rows fit for calibration) or --all (every row, marked)")
    read = read_config(config)
    who = identities_of(read, policy) if policy in read.policies else None
    log = _with_store(config, lambda store: score_log_of(store, policy, identities=who, everything=everything))
    log.write(output)
    found = {"rows": len(log), "missing_guardian_rows": int(log.missing.sum()), "output": output}
    if as_json:
        options.print_json(found)
    else:
        click.echo(f"Written: {output}, {len(log)} rows, {found['missing_guardian_rows']} without a Guardian score")


@records.command()
@click.option("--older-than", type=click.FloatRange(0), required=True, metavar="DAYS", help="Remove what is older.")
@config_file
@options.as_json
def prune(*, older_than: float, config: str, as_json: bool) -> None:
    """Remove old decisions; a checkpoint keeps the hash chains checkable."""
    removed = _with_store(config, lambda store: store.prune(before=time.time() - older_than * 86400))
    if as_json:
        options.print_json({"removed": removed})
    else:
        click.echo(f"Removed: {removed} decisions")


@records.command()
@config_file
@options.as_json
def verify(*, config: str, as_json: bool) -> None:
    """Check the hash chains; exit 1 if they do not hold."""
    problems = _with_store(config, lambda store: store.verify())
    if as_json:
        options.print_json({"ok": not problems, "problems": problems})
    else:
        click.echo("\n".join(problems) or "The record's hash chains hold.")
    if problems:
        raise SystemExit(1)


def _with_store(config: str, use: "Callable[[Store], Awaitable[Result]]") -> Result:
    """Open the configured record, use it, close it."""
    from conformal_arbitrage.gateway.server import database_of
    from conformal_arbitrage.live.config import read_config
    from conformal_arbitrage.store import open_store

    async def run() -> Result:
        store = await open_store(database_of(read_config(config)))
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
