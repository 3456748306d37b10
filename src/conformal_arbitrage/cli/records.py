"""The commands of `arbitrage records`: list, export, grade, verify, prune, erase, migrate."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.models import ProgressBar, show_estimate
from conformal_arbitrage.cli.output import print_json, print_table, warn, when
from conformal_arbitrage.collecting.grading import Backlog, GradingResult, estimate_grading, grade_records, read_backlog
from conformal_arbitrage.collecting.records import TimeWindow, cascade_log_of, score_log_of, write_record_parts
from conformal_arbitrage.collecting.renewal import LookingPart
from conformal_arbitrage.core.exact import n_rows
from conformal_arbitrage.errors import DamagedError, StoreError
from conformal_arbitrage.live.build import database_of
from conformal_arbitrage.live.check import grader_change
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.live.service import verify_record
from conformal_arbitrage.models.kinds import has_terminal
from conformal_arbitrage.models.resilience import dollars
from conformal_arbitrage.store import integrity, pages
from conformal_arbitrage.store.integrity import Head
from conformal_arbitrage.store.session import Store

# Commands that read or prune the record alone work without the extra of the gateway: the others import it when they run.
if TYPE_CHECKING:
    from conformal_arbitrage.gateway.gateway import Preparation


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
