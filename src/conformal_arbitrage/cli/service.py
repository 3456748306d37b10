"""The commands of the gateway: serve, keys, records."""

import os
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.errors import DamagedError, StoreError

if TYPE_CHECKING:
    from conformal_arbitrage.store import Store
    from conformal_arbitrage.store.heads import Head

_Result = TypeVar("_Result")


@click.command("serve")
@options.config_file
@click.option("--host", metavar="ADDRESS", help="Address to listen on.  [default: as configured]")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 picks a free one.  [default: as configured]"
)
@click.option(
    "--no-migrate", is_flag=True, help="Change neither tables nor versions at start; `records migrate` has done it."
)
def serve_command(*, config: str, host: str | None, port: int | None, no_migrate: bool) -> None:
    """Serve the policies of a configuration over an OpenAI-compatible API.

    \b
    arbitrage serve
    arbitrage serve --no-migrate                  one of several, after `arbitrage records migrate`
    """
    from msgspec import structs

    from conformal_arbitrage.live.config import read_config

    with gateway_installed():
        from conformal_arbitrage import gateway
        from conformal_arbitrage.gateway.advice import KEY_VARIABLE, example_call, example_note
    configuration = read_config(config)
    configured = configuration.gateway
    listening = structs.replace(
        configured, host=host or configured.host, port=configured.port if port is None else port
    )
    keyed = bool(with_store(config, _has_keys, migrating=not no_migrate))

    def announce(url: str) -> None:
        attempt = f"With an API key in ${KEY_VARIABLE}, try" if keyed else "Try"
        click.echo(f"Listening on {url}. {attempt}:\n\n{example_call(configuration, url, keyed=keyed)}\n")
        if (note := example_note(configuration, url)) is not None:
            click.echo(f"{options.wrapped(note)}\n")
        click.echo(f"The console is at {url}/console.\n")

    gateway.run(structs.replace(configuration, gateway=listening), started=announce, migrating=not no_migrate)


async def _has_keys(store: "Store") -> bool:
    """Tell whether calls will need a key, that of the environment included."""
    from conformal_arbitrage.gateway.auth import FIRST_KEY

    return bool(os.environ.get(FIRST_KEY) or await store.keys())


@contextmanager
def gateway_installed() -> Generator[None]:
    """Translate the import error of a missing extra.

    Raises:
        ClickException: a package of the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the gateway needs its extra, which has {error.name}: run `pip install '.[gateway]'` in a clone"
        ) from error


@click.group("keys", cls=options.WrappingGroup)
def keys_command() -> None:
    """Manage the API keys of the gateway.

    \b
    arbitrage keys create --scope call
    arbitrage keys list
    arbitrage keys revoke ID
    """


@keys_command.command("create")
@click.option(
    "--scope", type=click.Choice(["call", "review", "admin", "metrics"]), default="call", show_default=True,
    help="What the key permits.",
)  # fmt: skip
@click.option("--label", default="", help="Whose key it is; for a reviewer, the name listed under [teams].")
@click.option(
    "--expires", type=click.FloatRange(0, min_open=True), metavar="DAYS", help="Days until it stops being valid."
)
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="The only policy it is good for; repeatable.")
@options.config_file
@options.as_json
def keys_create_command(
    *, scope: Any, label: str, expires: float | None, policies: tuple[str, ...], config: str, as_json: bool
) -> None:
    """Create a key; it is shown once, and only its digest is stored.

    \b
    arbitrage keys create --scope call --label "web shop" --policy support --expires 90
    arbitrage keys create --scope review --label ann
    arbitrage keys create --scope metrics --label prometheus
    """
    from conformal_arbitrage.live.config import read_config

    unknown = sorted(set(policies) - set(read_config(config).policies))
    if unknown:
        raise click.UsageError(f"there is no policy {unknown[0]!r} in {config}; add [policies.{unknown[0]}]")
    ends = None if expires is None else time.time() + expires * 86400
    with gateway_installed():
        from conformal_arbitrage.gateway.auth import new_key
    from conformal_arbitrage.store import new_id

    key, sha256 = new_key()
    id = new_id()

    async def create(store: "Store") -> bool:
        first = not await store.keys()
        await store.create_key(id=id, sha256=sha256, scope=scope, label=label, expires=ends, policies=policies or None)
        return first

    first = with_store(config, create)
    if as_json:
        options.print_json(
            {"id": id, "key": key, "scope": scope, "first": first, "expires": ends, "policies": policies or None}
        )
        return
    limits = [f"until {when(ends)}"] if ends is not None else []
    limits += [f"for {', '.join(policies)}"] if policies else []
    click.echo(f"{key}\n{', '.join([f'id {id}, scope {scope}', *limits])}; the key is not shown again")
    if first:
        options.warn(
            "this is the gateway's first key: from now on every call needs one, in the header Authorization: Bearer KEY"
        )


@keys_command.command("generate")
@options.as_json
def keys_generate_command(*, as_json: bool) -> None:
    """Print a new key and its SHA-256, and store nothing: for a gateway that is to start with a key.

    \b
    arbitrage keys generate
    ARBITRAGE_ADMIN_KEY_SHA256=... arbitrage serve --host 0.0.0.0
    """
    with gateway_installed():
        from conformal_arbitrage.gateway.auth import FIRST_KEY, new_key

    key, sha256 = new_key()
    if as_json:
        options.print_json({"key": key, "sha256": sha256})
    else:
        click.echo(
            f"{key}\n{FIRST_KEY}={sha256}\nThe key is not stored: keep it, and give the gateway the second line."
        )


@keys_command.command("list")
@options.config_file
@options.as_json
def keys_list_command(*, config: str, as_json: bool) -> None:
    """List all keys, without their secrets."""
    from msgspec.structs import asdict

    keys = with_store(config, lambda store: store.keys())
    if as_json:
        options.print_json([asdict(key) for key in keys])
        return
    rows = [
        [k.id, k.scope, k.label, ", ".join(k.policies or ()), *map(when, (k.created, k.expires, k.revoked))]
        for k in keys
    ]
    options.print_table(["id", "scope", "label", "policies", "created", "expires", "revoked"], rows)


@keys_command.command("revoke")
@click.argument("id")
@options.config_file
def keys_revoke_command(id: str, *, config: str) -> None:
    """Revoke a key immediately."""
    if not with_store(config, lambda store: store.revoke_key(id)):
        raise StoreError(f"there is no key {id!r}; list all with `arbitrage keys list`")
    click.echo(f"Revoked: {id}")


@click.group("records", cls=options.WrappingGroup)
def records_command() -> None:
    """Migrate, export, verify, prune and erase decision records.

    \b
    arbitrage records export --policy support --score-log -o log.parquet
    arbitrage records export --policy support --score-log -o log/
    arbitrage records migrate
    arbitrage records verify
    arbitrage records head > head.json
    arbitrage records prune --older-than 90
    arbitrage records erase ID
    """


@records_command.command("prune")
@click.option(
    "--older-than",
    type=click.FloatRange(0),
    required=True,
    metavar="DAYS",
    help="Age from which decisions are removed.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation at a terminal.")
@options.config_file
@options.as_json
def records_prune_command(*, older_than: float, yes: bool, config: str, as_json: bool) -> None:
    """Remove old decisions; a checkpoint keeps the hash chains verifiable.

    At a terminal it asks before it removes anything; elsewhere, and with --json, it does not.

    \b
    arbitrage records prune --older-than 90
    """
    from conformal_arbitrage.scorers.terminal import has_terminal

    if not yes and not as_json and has_terminal():
        question = f"Remove all decisions older than {older_than:g} days, with all that is recorded about them?"
        click.confirm(question, abort=True, err=True)
    removed = with_store(config, lambda store: store.prune(before=time.time() - older_than * 86400))
    if as_json:
        options.print_json({"removed": removed})
    else:
        click.echo(f"Removed: {removed} decisions")


@records_command.command("verify")
@click.option("--head", "copy", metavar="FILE", help="A copy that `arbitrage records head` printed, to compare with.")
@options.config_file
@options.as_json
def records_verify_command(*, copy: str | None, config: str, as_json: bool) -> None:
    """Verify that nothing in the store was changed or removed; exit 1 if something was.

    \b
    arbitrage records verify
    arbitrage records verify --head head-2026-01-31.json
    """
    head = None if copy is None else _read_head(copy)
    signed, problems = _verified(config, head)
    events = None if head is None else sum(number for number, _ in head.writers.values())
    if as_json:
        document = {"ok": not problems, "problems": problems, "signatures_checked": signed, "head_events": events}
        options.print_json(document)
    else:
        click.echo("\n".join(problems) or "The hash chains are intact.")
    if head is not None and not as_json:
        outcome = "the record does not agree with it" if problems else "the record still accounts for all of them"
        click.echo(f"Compared with {copy} of {when(head.at)}, which covers {events} events: {outcome}.")
    if not signed:
        options.warn("there is no project secret here, so signatures were not checked; set ARBITRAGE_SECRET")
    if problems:
        raise SystemExit(1)


def _verified(config: str, copy: "Head | None") -> tuple[bool, list[str]]:
    """Return whether signatures could be checked, and what is wrong with the configured store; a damaged file is a fault."""
    from pathlib import Path

    from conformal_arbitrage.live.config import read_config

    with gateway_installed():
        from conformal_arbitrage.live.database import database_of, existing_secret

    configuration = read_config(config)
    signed, database = existing_secret(configuration) is not None, database_of(configuration)
    if "://" not in database and not (Path(database).is_file() and Path(database).stat().st_size):
        return signed, [f"{database}: there is no database, or it is empty; restore a backup"]
    try:
        return signed, with_store(config, lambda store: store.verify(copy))
    except DamagedError as error:
        return signed, [str(error)]


def _read_head(path: str) -> "Head":
    from pathlib import Path

    import msgspec

    from conformal_arbitrage.store.heads import Head

    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Head)
    except (OSError, msgspec.DecodeError, UnicodeError) as error:
        raise StoreError(
            f"{path}: it is not a head ({error}); name a file that `arbitrage records head` wrote"
        ) from error


@records_command.command("head")
@options.config_file
def records_head_command(*, config: str) -> None:
    """Print how far the record has come, signed, for safe keeping elsewhere.

    \b
    arbitrage records head > head-$(date +%F).json
    """
    import msgspec

    head = with_store(config, lambda store: store.head())
    click.echo(msgspec.json.format(msgspec.json.encode(head)).decode())


@records_command.command("erase")
@click.argument("id")
@options.config_file
@options.as_json
def records_erase_command(id: str, *, config: str, as_json: bool) -> None:
    """Erase question, answers, comments and error texts of one decision; scores, costs and the hash chain stay.

    \b
    arbitrage records erase 01kabcdefghjkmnpqrstvwxyz0
    """
    if not with_store(config, lambda store: store.erase(id)):
        raise StoreError(f"there is no decision {id!r}; find its id with `arbitrage records export`, or in the reply")
    if as_json:
        options.print_json({"erased": id})
    else:
        click.echo(f"Erased: {id}")


def with_store(
    config: str,
    use: "Callable[[Store], Awaitable[_Result]]",
    *,
    only_existing: bool = False,
    migrating: bool = True,
) -> _Result:
    """Open the configured store, use it, and close it.

    Args:
        config: the configuration file.
        use: what to do with the store.
        only_existing: refuse to create a database, for commands that only read.
        migrating: whether to bring its tables to this release.

    Raises:
        StoreError: there is none, and none may be created.
    """
    from conformal_arbitrage.live.config import read_config

    with gateway_installed():
        from conformal_arbitrage.live.database import database_exists, database_of, open_record

    if only_existing and not database_exists(read_config(config)):
        raise StoreError(
            f"there is no database at {database_of(read_config(config))} yet; `arbitrage serve` creates it, or name another "
            "configuration with --config"
        )

    async def run() -> _Result:
        store = await open_record(read_config(config), migrating=migrating)
        try:
            return await use(store)
        finally:
            await store.close()

    return options.run_coroutine(run())


def when(seconds: float | None) -> str:
    """Return a time in words of ISO 8601; nothing for None."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
