"""Commands beside a gateway: keys, records, policies, webhooks, renew."""

import asyncio
import base64
import secrets
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec.structs import asdict

from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.models import ProgressBar, show_estimate
from conformal_arbitrage.cli.output import (
    print_facts,
    print_json,
    print_table,
    warn,
    wrapped,
)
from conformal_arbitrage.collecting import renewal
from conformal_arbitrage.collecting.grading import Backlog, GradingResult, estimate_grading, grade_records, read_backlog
from conformal_arbitrage.collecting.records import TimeWindow, cascade_log_of, score_log_of, write_record_parts
from conformal_arbitrage.collecting.renewal import LookingPart, Outlook, RenewablePolicy, Successor, renewable
from conformal_arbitrage.core.exact import n_rows
from conformal_arbitrage.errors import DamagedError, OutputError, StoreError
from conformal_arbitrage.live.build import database_exists, database_of
from conformal_arbitrage.live.check import grader_change
from conformal_arbitrage.live.config import read_config, webhooks_of
from conformal_arbitrage.live.service import verify_record
from conformal_arbitrage.models.kinds import has_terminal
from conformal_arbitrage.models.resilience import dollars
from conformal_arbitrage.models.webhook import WebhookEndpoint
from conformal_arbitrage.store import integrity, outbox, pages
from conformal_arbitrage.store import keys as stored_keys
from conformal_arbitrage.store import policies as stored_policies
from conformal_arbitrage.store.integrity import Head
from conformal_arbitrage.store.policies import PolicyVersion
from conformal_arbitrage.store.record import ExclusionBody, new_id
from conformal_arbitrage.store.session import Store
from conformal_arbitrage.types import as_object

# Commands that read or prune the record alone work without the extra of the gateway: the others import it when they run.
if TYPE_CHECKING:
    from conformal_arbitrage.gateway.gateway import Preparation

# --- keys and records ---


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


@click.group("records", cls=options.WrappingGroup)
def records_command() -> None:
    """List, export, grade, verify, prune and erase decision records.

    \b
    arbitrage records list
    arbitrage records export --policy support --score-log -o log.parquet
    arbitrage records export --policy support --score-log -o log/
    arbitrage records migrate
    arbitrage records verify
    arbitrage records head > head.json
    arbitrage records prune --older-than 90
    arbitrage records erase ID
    """


@records_command.command("list")
@click.option("--policy", metavar="NAME", help="Only decisions of this policy.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, metavar="N", help="How many.")
@options.config_file
@options.as_json
def records_list_command(*, policy: str | None, limit: int, config: str, as_json: bool) -> None:
    """List the last decisions: when, who decided, and why without a guarantee, if so.

    \b
    arbitrage records list --policy support --limit 50
    """
    wanted = pages.RecordFilter(policy=policy)
    latest = options.with_store(config, lambda store: store.run(pages.records, wanted, limit=limit), only_existing=True)
    if as_json:
        print_json(
            [
                {"id": each.id, "at": each.created, "policy": each.policy, "decided_by": each.decided_by,
                 "cost": each.decision.cost, "no_guarantee": each.decision.no_guarantee}
                for each in latest
            ]
        )  # fmt: skip
        return
    rows = [
        [each.id, when(each.created), each.policy, each.decided_by, dollars(each.decision.cost),
         each.decision.no_guarantee or ""]
        for each in latest
    ]  # fmt: skip
    print_table(["id", "at", "policy", "decided by", "cost", "no guarantee, since"], rows)


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
    if not yes and not as_json and has_terminal():
        question = f"Remove all decisions older than {older_than:g} days, with all that is recorded about them?"
        click.confirm(question, abort=True, err=True)
    removed = options.with_store(config, lambda store: integrity.prune(store, before=time.time() - older_than * 86400))
    if as_json:
        print_json({"removed": removed})
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
    problems = _verified(config, head)
    events = None if head is None else sum(number for number, _ in head.writers.values())
    if as_json:
        document = {"ok": not problems, "problems": problems, "head_events": events}
        print_json(document)
    else:
        click.echo("\n".join(problems) or "The hash chains are intact.")
    if head is not None and not as_json:
        outcome = "the record does not agree with it" if problems else "the record still accounts for all of them"
        click.echo(f"Compared with {copy} of {when(head.at)}, which covers {events} events: {outcome}.")
    if problems:
        raise SystemExit(1)


def _verified(config: str, copy: Head | None) -> list[str]:
    """Return what is wrong with the configured store; a damaged file is a fault."""
    database = database_of(read_config(config))
    if "://" not in database and not (Path(database).is_file() and Path(database).stat().st_size):
        return [f"{database}: there is no database, or it is empty; restore a backup"]
    try:
        return options.with_store(config, lambda store: verify_record(store, copy))
    except DamagedError as error:
        return [str(error)]


def _read_head(path: str) -> Head:
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
    head = options.with_store(config, lambda store: store.run(integrity.head))
    click.echo(msgspec.json.format(msgspec.json.encode(head)).decode())


@records_command.command("erase")
@click.argument("id")
@options.config_file
@options.as_json
def records_erase_command(id: str, *, config: str, as_json: bool) -> None:
    """Erase what was asked, answered and said of one decision, and by whom; scores, costs and the hash chain stay.

    \b
    arbitrage records erase 01kabcdefghjkmnpqrstvwxyz0
    """
    if not options.with_store(config, lambda store: integrity.erase(store, id)):
        raise StoreError(f"there is no decision {id!r}; find its id with `arbitrage records export`, or in the reply")
    if as_json:
        print_json({"erased": id})
    else:
        click.echo(f"Erased: {id}")


def when(seconds: float | None) -> str:
    """Return a time in words of ISO 8601; nothing for None."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


# --- records export ---


_ROWS_PER_FILE = 1_000_000


class _Moment(click.ParamType[float]):
    """A date or a time of ISO 8601, in UTC unless it says otherwise, as seconds since the epoch."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time; give one such as 2026-01-31 or 2026-01-31T12:00:00+01:00", param, ctx)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


@records_command.command("export")
@click.option(
    "-o", "--output", required=True, metavar="FILE", help="The file to write; with a / at the end, a folder of files."
)
@click.option("--policy", required=True, metavar="NAME", help="The policy whose decisions to export.")
@click.option("--score-log", is_flag=True, help="Export shadow and audited rows only, which are fit for calibration.")
@click.option("--all", "everything", is_flag=True, help="Export every row, marked; calibrate rejects such a file.")
@click.option(
    "--rows-per-file", type=click.IntRange(1), metavar="N",
    help=f"Rows of each file in a folder, of which one is in memory.  [default: {_ROWS_PER_FILE}]",
)  # fmt: skip
@click.option(
    "--unseen", is_flag=True,
    help="Leave out rows that the console may show, to certify a budget that was chosen there.",
)  # fmt: skip
@click.option("--since", type=_Moment(), metavar="TIME", help="Only decisions recorded then or later (ISO 8601, UTC).")
@click.option("--until", type=_Moment(), metavar="TIME", help="Only decisions recorded before.")
@options.config_file
@options.as_json
def records_export_command(
    *,
    output: str,
    policy: str,
    score_log: bool,
    everything: bool,
    rows_per_file: int | None,
    unseen: bool,
    since: float | None,
    until: float | None,
    config: str,
    as_json: bool,
) -> None:
    """Write decisions as a score log.

    \b
    arbitrage records export --policy support --score-log -o log.parquet
    arbitrage records export --policy support --score-log -o log/ --rows-per-file 1000000
    arbitrage records export --policy support --score-log -o may.parquet \\
        --since 2026-05-01 --until 2026-06-01
    """
    if score_log == everything:
        raise click.UsageError("give --score-log (rows fit for calibration) or --all (every row, marked)")
    in_files = output.endswith("/") or Path(output).is_dir()
    if rows_per_file is not None and not in_files:
        raise click.UsageError(f"--rows-per-file is for a folder of files: give -o {output}/")
    configuration = read_config(config)
    known = policy in configuration.policies
    from conformal_arbitrage.gateway.gateway import identities_of

    identities = identities_of(configuration, policy) if known else None
    wanted = LookingPart(ProjectSecret.find().keys).is_unseen if unseen else None
    window = TimeWindow(since=since, until=until, wanted=wanted)
    if identities is not None and configuration.policies[policy].cascade:
        if in_files or window != TimeWindow():
            raise click.UsageError(
                "a folder, --since, --until and --unseen are for two models; a cascade is exported as one file"
            )
        return _export_cascade(config, policy, output, identities, everything=everything, as_json=as_json)
    rows = {"identities": identities, "everything": everything, "window": window}
    try:
        if in_files:
            summary = _export_files(config, policy, output, rows_per_file or _ROWS_PER_FILE, rows)
        else:
            summary = _export_file(config, policy, output, rows)
    except StoreError as error:
        if known:
            raise
        named = ", ".join(configuration.policies) or "none"
        raise StoreError(f"there is no policy {policy!r} in {config}; there are {named} ({error})") from error
    if as_json:
        print_json(summary)
    else:
        files = f" in {len(summary['files'])} files" if in_files else ""
        missing = f"{summary['missing_guardian_rows']} without a Guardian score"
        click.echo(f"Written: {output}, {n_rows(summary['rows'])}{files}, {missing}")


def _export_file(config: str, policy: str, output: str, rows: dict[str, Any]) -> dict[str, Any]:
    """Write the rows of a policy into one file, with all of them in memory."""
    configured = read_config(config).policies.get(policy)
    idle = 3600.0 if configured is None else configured.session_idle
    log = options.with_store(config, lambda store: score_log_of(store, policy, session_idle=idle, **rows))
    log.write(output)
    _warn_of_grader(config, log.identities)
    return {"rows": len(log), "missing_guardian_rows": int(log.missing.sum()), "output": output}


def _export_files(config: str, policy: str, output: str, rows_per_file: int, rows: dict[str, Any]) -> dict[str, Any]:
    """Write them into a folder of files, each forgotten when it is written."""
    written = options.with_store(
        config, lambda store: write_record_parts(store, policy, output, rows_per_file=rows_per_file, **rows)
    )
    _warn_of_grader(config, written.identities)
    names = [path.name for path in written.files]
    return {"rows": written.rows, "missing_guardian_rows": written.missing, "output": output, "files": names}


def _warn_of_grader(config: str, identities: Mapping[str, Any] | None) -> None:
    changed = grader_change(read_config(config), identities)
    if changed is not None:
        warn(changed)


def _export_cascade(
    config: str, policy: str, output: str, identities: dict[str, Any], *, everything: bool, as_json: bool
) -> None:
    """Write the shadow rows of a cascade as its log."""
    if everything:
        raise click.UsageError("--all is for two models: rows of a cascade end where it stopped; give --score-log")
    *models, guardian = identities
    log = options.with_store(
        config,
        lambda store: cascade_log_of(store, policy, models=models, guardian=guardian, identities=identities),
    )
    log.write(output)
    if as_json:
        print_json({"rows": len(log), "models": models, "guardian": guardian, "output": output})
    else:
        click.echo(
            f"Written: {output}, {n_rows(len(log))}. Next: arbitrage calibrate {output} --path --guardian-column {guardian}"
        )


# --- records grade ---


@records_command.command("grade")
@click.option("--policy", required=True, metavar="NAME", help="The policy whose answers to grade.")
@click.option(
    "--grade",
    required=True,
    metavar="HOW",
    help="Grader: exact, regex or json-equal (with recorded labels), judge, human, python:MODULE:FUNCTION.",
)
@options.paid_run(
    limit="Grade the oldest N rows only.",
    dry_run="Send and record nothing; count the rows and estimate the cost.",
    max_cost="Stop before this run costs more.",
)
@options.config_file
@options.as_json
def records_grade_command(
    *, policy: str, grade: str, limit: int | None, dry_run: bool, config: str, as_json: bool, **settings: Any
) -> None:
    """Grade both answers of every stored row in free text that is fit for calibration; run again to resume.

    \b
    arbitrage records grade --policy support --grade judge --dry-run
    arbitrage records grade --policy support --grade judge --max-cost 5.00
    """
    models = read_config(config)

    async def work(store: Store) -> tuple[Backlog, GradingResult | None]:
        backlog = await read_backlog(store, models, policy, grade=grade, limit=limit)
        if dry_run or not backlog.gradable:
            return backlog, None
        with nullcontext(None) if as_json or grade == "human" else ProgressBar() as bar:
            progress = None if bar is None else bar.show
            rows = backlog.gradable
            return backlog, await grade_records(store, models, rows, grade=grade, progress=progress, **settings)

    try:
        backlog, result = options.with_store(config, work)
    except KeyboardInterrupt as error:
        raise click.ClickException("interrupted; the grades so far are recorded, run again to resume") from error
    counts = backlog.counts
    if dry_run:
        if not as_json:
            _show_backlog(counts)
        show_estimate(asyncio.run(estimate_grading(models, backlog.gradable, grade=grade)), as_json=as_json, **counts)
        return
    _show_result(counts, result, as_json=as_json)


def _show_backlog(counts: dict[str, int]) -> None:
    click.echo(f"{n_rows(counts['gradable'])} to grade, {counts['graded']} graded already.")
    for name, reason in (
        ("no_content", 'their answers were not kept; set content = "full" in the policy, for rows to come'),
        ("no_guardian", "the Guardian has not answered them, or not yet"),
        ("no_label", "no label to compare them with was recorded with a key of scope review"),
    ):
        if counts[name]:
            warn(f"{n_rows(counts[name])} cannot be graded: {reason}")


def _show_result(counts: dict[str, int], result: GradingResult | None, *, as_json: bool) -> None:
    failed, problem = (0, None) if result is None else (result.failed, result.first_problem)
    new, cost = (0, 0.0) if result is None else (result.graded, result.spent.cost)
    if as_json:
        print_json({**counts, "newly_graded": new, "failed": failed, "cost": cost, "first_problem": problem})
        return
    _show_backlog(counts)
    click.echo(f"Graded: {n_rows(new)}, cost {dollars(cost)}.")
    if failed:
        warn(f"{n_rows(failed, 'has', 'have')} no grades yet ({problem}); run the same command again to retry them")


# --- records migrate ---


@records_command.command("migrate")
@options.config_file
@options.as_json
def records_migrate_command(*, config: str, as_json: bool) -> None:
    """Bring the database to this release and this configuration, before gateways start with `serve --no-migrate`.

    It migrates the tables, creates the key whose SHA-256 is in ARBITRAGE_ADMIN_KEY_SHA256, and installs the certificate
    files that changed since the last time. It calls no model, and running it again changes nothing.

    \b
    arbitrage records migrate
    """
    from conformal_arbitrage.gateway.gateway import prepare

    done = asyncio.run(prepare(read_config(config)))
    if as_json:
        print_json(_document(done))
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
    return {
        "schema": schema,
        "key": done.key,
        "installed": {version.name: version.version for version in done.installed},
    }


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
