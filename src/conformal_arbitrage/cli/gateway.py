"""Commands beside a gateway: keys, policies, webhooks, renew."""

import asyncio
import base64
import secrets
import time
from datetime import UTC, datetime
from typing import Any

import click
from msgspec.structs import asdict

from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.output import print_facts, print_json, print_table, warn, when, wrapped
from conformal_arbitrage.collecting import renewal
from conformal_arbitrage.collecting.renewal import Outlook, RenewablePolicy, Successor, renewable
from conformal_arbitrage.core.exact import n_rows
from conformal_arbitrage.errors import OutputError, StoreError
from conformal_arbitrage.live.build import database_exists
from conformal_arbitrage.live.config import read_config, webhooks_of
from conformal_arbitrage.models.webhook import WebhookEndpoint
from conformal_arbitrage.store import keys as stored_keys
from conformal_arbitrage.store import outbox
from conformal_arbitrage.store import policies as stored_policies
from conformal_arbitrage.store.policies import PolicyVersion
from conformal_arbitrage.store.record import ExclusionBody, new_id
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import as_object

# --- keys ---


@click.group("keys", cls=options.WrappingGroup)
def keys_command() -> None:
    """Manage the API keys of the gateway.

    \b
    arbitrage keys create --scope call
    arbitrage keys list
    arbitrage keys exclude ID --policy support --reason "refused"
    arbitrage keys revoke ID
    """


@keys_command.command("create")
@click.option(
    "--scope", type=click.Choice(["call", "review", "operate", "admin"]), default="call", show_default=True,
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
    arbitrage keys create --scope operate --label prometheus
    """
    unknown = sorted(set(policies) - set(read_config(config).policies))
    if unknown:
        raise click.UsageError(f"there is no policy {unknown[0]!r} in {config}; add [policies.{unknown[0]}]")
    ends = None if expires is None else time.time() + expires * 86400

    from conformal_arbitrage.gateway.auth import new_key

    key, sha256 = new_key()
    id = new_id()

    async def create(store: Store) -> bool:
        first = not await store.run(stored_keys.list_all)
        await store.run(
            stored_keys.create, id=id, sha256=sha256, scope=scope, label=label, expires=ends, policies=policies or None
        )
        return first

    first = options.with_store(config, create)
    if as_json:
        print_json(
            {"id": id, "key": key, "scope": scope, "first": first, "expires": ends, "policies": policies or None}
        )
        return
    limits = [f"until {when(ends)}"] if ends is not None else []
    limits += [f"for {', '.join(policies)}"] if policies else []
    click.echo(f"{key}\n{', '.join([f'id {id}, scope {scope}', *limits])}; the key is not shown again")
    if first:
        warn(
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
    from conformal_arbitrage.gateway.auth import FIRST_KEY, new_key

    key, sha256 = new_key()
    if as_json:
        print_json({"key": key, "sha256": sha256})
    else:
        click.echo(
            f"{key}\n{FIRST_KEY}={sha256}\nThe key is not stored: keep it, and give the gateway the second line."
        )


@keys_command.command("list")
@options.config_file
@options.as_json
def keys_list_command(*, config: str, as_json: bool) -> None:
    """List all keys, without their secrets."""
    keys = options.with_store(config, lambda store: store.run(stored_keys.list_all))
    if as_json:
        print_json([asdict(key) for key in keys])
        return
    rows = [
        [k.id, k.scope, k.label, ", ".join(k.policies or ()), *map(when, (k.created, k.expires, k.revoked))]
        for k in keys
    ]
    print_table(["id", "scope", "label", "policies", "created", "expires", "revoked"], rows)


@keys_command.command("revoke")
@click.argument("id")
@options.config_file
def keys_revoke_command(id: str, *, config: str) -> None:
    """Revoke a key immediately."""
    if not options.with_store(config, lambda store: store.run(stored_keys.revoke, id)):
        raise StoreError(f"there is no key {id!r}; list all with `arbitrage keys list`")
    click.echo(f"Revoked: {id}")


@keys_command.command("exclude")
@click.argument("id")
@click.option("--policy", required=True, metavar="NAME", help="Whose promise is to leave the key out.")
@click.option("--reason", required=True, help="Why; the record keeps it.")
@click.option("--end", "ends", is_flag=True, help="End an exclusion instead: the promise covers the key again.")
@options.config_file
def keys_exclude_command(id: str, *, policy: str, reason: str, ends: bool, config: str) -> None:
    """Exclude a key from the promise of a policy, on every gateway from the next request on.

    Its decisions say guarantee "none", and are neither audited nor calibrated on. Those of other keys keep their guarantee,
    unless gains count: then no decision of the policy has one.

    \b
    arbitrage keys exclude 01KB0FZ3QZ7B9D4W8N2M5R6T1V --policy support --reason "asks what the Guardian refuses"
    arbitrage keys exclude 01KB0FZ3QZ7B9D4W8N2M5R6T1V --policy support --reason "mended" --end
    """
    _check_reason(config, policy, reason)

    async def exclude(store: Store) -> ExclusionBody | None:
        return await store.run(stored_policies.exclude, policy, id, reason=reason, by="command line", ends=ends)

    state = "no longer excluded" if ends else "excluded"
    changed = options.with_store(config, exclude) is not None
    click.echo(f"The key is {state if changed else f'{state}, as before'}: {id}, policy {policy}")


def _check_reason(config: str, policy: str, reason: str) -> None:
    """Refuse a change of a policy that is not configured, or without a reason."""
    known = read_config(config).policies
    if policy not in known:
        raise click.UsageError(f"there is no policy {policy!r} in {config}; there are {', '.join(known) or 'none'}")
    if not reason.strip():
        raise click.UsageError("--reason must say why; the record keeps it")


# --- policies ---


@click.group("policies", cls=options.WrappingGroup)
def policies_command() -> None:
    """Manage the policies that a gateway serves.

    \b
    arbitrage policies list
    arbitrage policies lift support --reason "the new prompt was taken back"
    """


@policies_command.command("list")
@options.config_file
@options.as_json
def policies_list_command(*, config: str, as_json: bool) -> None:
    """List the policies of the configuration, each with the certificate in force and its alarm.

    \b
    arbitrage policies list
    """
    configuration = read_config(config)
    versions: list[PolicyVersion] = []
    if database_exists(configuration):  # not before the first `arbitrage serve`
        versions = options.with_store(config, lambda store: store.run(stored_policies.active))
    in_force = {version.name: version for version in versions}
    listed = [
        _policy_document(name, policy.mode, in_force.get(name)) for name, policy in configuration.policies.items()
    ]
    if as_json:
        print_json(listed)
        return
    rows = [
        [each["policy"], each["mode"], *("" if each[name] is None else f"{each[name]:g}" for name in ("version", "alpha")),
         when(each["installed"]), when(each["alarm"])]
        for each in listed
    ]  # fmt: skip
    print_table(["policy", "mode", "version", "alpha", "installed", "alarm since"], rows)


def _policy_document(name: str, mode: str, version: PolicyVersion | None) -> dict[str, Any]:
    """Return a policy and the certificate in force as plain values; None for what needs a certificate without one."""
    known = {} if version is None else {
        "version": version.version,
        "alpha": as_object(version.certificate.get("promise")).get("alpha"),
        "installed": version.installed,
        "alarm": None if version.alarm is None else version.alarm.at,
    }  # fmt: skip
    return {"policy": name, "mode": mode} | dict.fromkeys(("version", "alpha", "installed", "alarm")) | known


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
    _check_reason(config, policy, reason)
    lifted = options.with_store(
        config, lambda store: store.run(stored_policies.lift, policy, reason=reason, by="command line", version=version)
    )
    if lifted is None:
        named = "its newest version" if version is None else f"version {version}"
        raise StoreError(f"policy {policy} has no alarm that stands on {named}; there is nothing to lift")
    if as_json:
        print_json({"policy": policy, **asdict(lifted)})
    else:
        click.echo(
            f"Lifted: the alarm of {policy}, version {lifted.version}; its answers say guarantee none until a certificate "
            "is installed"
        )


# --- webhooks ---


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
    webhooks = webhooks_of(read_config(config))
    known = [webhook.name for webhook in webhooks]
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        remedy = f"there are {', '.join(known)}" if known else "add a section [gateway.webhooks.NAME]"
        raise click.UsageError(
            f"there is no webhook {unknown[0]!r} in {config}; {remedy}" if unknown else f"{config}: {remedy}"
        )
    chosen = [webhook for webhook in webhooks if not names or webhook.name in names]
    attempts = asyncio.run(_send_tests(chosen))
    if as_json:
        print_json({"ok": all(attempt["problem"] is None for attempt in attempts), "webhooks": attempts})
    else:
        rows = [
            [
                attempt["webhook"],
                str(attempt["status"] or ""),
                f"{attempt['seconds']:.2f}",
                attempt["problem"] or "accepted",
            ]
            for attempt in attempts
        ]
        print_table(["webhook", "status", "seconds", "result"], rows)
    if any(attempt["problem"] is not None for attempt in attempts):
        raise SystemExit(1)


async def _send_tests(webhooks: list[WebhookEndpoint]) -> list[dict[str, Any]]:
    try:
        attempts = await asyncio.gather(*[webhook.send_test() for webhook in webhooks])
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
    deliveries = options.with_store(config, lambda store: store.run(outbox.deliveries, limit=limit))
    if as_json:
        print_json([asdict(delivery) for delivery in deliveries])
        return
    rows = [
        [d.id, d.endpoint, d.event, when(d.created), str(d.attempts), when(d.done), d.error or ""] for d in deliveries
    ]
    print_table(["id", "webhook", "event", "created", "attempts", "done", "last problem"], rows)


# --- renew ---


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
        ahead = options.with_store(config, lambda store: renewal.outlook(store, target, now=time.time()))
        _show_none(ahead, f"{_described(ahead)}: {'it is due' if ahead.due else 'it is not due yet'}.", as_json=as_json)
        return

    async def renew(store: Store) -> tuple[Outlook, Successor | None, PolicyVersion | None]:
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

    ahead, next, version = options.with_store(config, renew)
    if next is None:
        _show_none(ahead, _no_successor(ahead, tighten=tighten), as_json=as_json)
        return
    if version is None:
        raise StoreError(
            f"policy {policy}: a version was installed or an alarm raised meanwhile, so this was not; try again"
        )
    _save_rows(next, output)
    _show_installed(ahead, next, version, output, as_json=as_json)


def _target(config: str, policy: str) -> RenewablePolicy:
    """Return the policy with the identities of its models, and the project's secret."""
    from conformal_arbitrage.gateway.gateway import identities_of

    configuration = read_config(config)
    identities = identities_of(configuration, policy)
    return renewable(configuration, policy, identities, ProjectSecret.find())


def _described(ahead: Outlook) -> str:
    since = datetime.fromtimestamp(ahead.chain.since, UTC).isoformat(timespec="seconds")
    union = f" and the {n_rows(ahead.collected)} of its log" if ahead.collected else ""
    what = "the certificate after the alarm" if ahead.step == "after red" else f"renewal {ahead.renewal}"
    return (
        f"policy {ahead.policy}, version {ahead.version}: {what} takes the first {n_rows(ahead.rows)} since {since}{union}; "
        f"{ahead.arrived} have arrived, and the outcomes of {ahead.settled} are due"
    )


def _no_successor(ahead: Outlook, *, tighten: bool) -> str:
    if tighten:
        return f"The rows since version {ahead.version} ask for no larger relaxation; nothing was installed."
    return (
        f"{_described(ahead)}: it is not due yet, and nothing was installed. A certificate outside the schedule has no "
        "guarantee (--after-looking)."
    )


def _show_none(ahead: Outlook, text: str, *, as_json: bool) -> None:
    if as_json:
        print_json({**ahead.document(), "installed": None})
    else:
        click.echo(text)


def _show_installed(
    ahead: Outlook, next: Successor, version: PolicyVersion, output: str | None, *, as_json: bool
) -> None:
    certificate = next.certificate
    document: dict[str, Any] = {**ahead.document(), "installed": version.version, "certificate": certificate.to_dict()}
    if certificate.ancestry is not None:
        document["step"] = certificate.ancestry.step
    if as_json:
        print_json(document)
        return
    print_facts(certificate.facts())
    click.echo(f"\n{wrapped(certificate.summary)}\n\nInstalled: version {version.version} of policy {ahead.policy}.")
    if output is not None:
        click.echo(f"Written: {output}, the rows it was calibrated on.")


def _save_rows(next: Successor, output: str | None) -> None:
    if output is None:
        return
    try:
        next.log.write(output)
    except OutputError as error:
        warn(f"the certificate was installed, and its rows were not written: {error}")
