"""The command that writes decision records as a score log: records export."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.service import gateway_installed, with_store
from conformal_arbitrage.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from conformal_arbitrage.collecting.from_records import TimeWindow
    from conformal_arbitrage.live.config import Config
    from conformal_arbitrage.store import Store

_Result = TypeVar("_Result")
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


@click.command("export")
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
    from conformal_arbitrage.collecting.from_records import TimeWindow
    from conformal_arbitrage.collecting.looking import LookingPart
    from conformal_arbitrage.live.config import read_config

    with gateway_installed():
        from conformal_arbitrage.gateway.server import identities_of, secret_of
    if score_log == everything:
        raise click.UsageError("give --score-log (rows fit for calibration) or --all (every row, marked)")
    in_files = output.endswith("/") or Path(output).is_dir()
    if rows_per_file is not None and not in_files:
        raise click.UsageError(f"--rows-per-file is for a folder of files: give -o {output}/")
    configuration = read_config(config)
    known = policy in configuration.policies
    identities = identities_of(configuration, policy) if known else None
    wanted = LookingPart(secret_of(configuration).keys).is_unseen if unseen else None
    window = TimeWindow(since=since, until=until, wanted=wanted)
    if identities is not None and configuration.policies[policy].cascade:
        if in_files or window != TimeWindow():
            raise click.UsageError(
                "a folder, --since, --until and --unseen are for two models; a cascade is exported as one file"
            )
        return _export_cascade(config, policy, output, identities, everything=everything, as_json=as_json)
    export = _Export(config, configuration, policy, identities, window, everything=everything)
    summary = export.files(output, rows_per_file or _ROWS_PER_FILE) if in_files else export.file(output)
    if as_json:
        options.print_json(summary)
    else:
        files = f" in {len(summary['files'])} files" if in_files else ""
        missing = f"{summary['missing_guardian_rows']} without a Guardian score"
        click.echo(f"Written: {output}, {summary['rows']} rows{files}, {missing}")


class _Export:
    """The rows of a policy, on their way into one file or many."""

    def __init__(
        self,
        config: str,
        configuration: "Config",
        policy: str,
        identities: "Mapping[str, Any] | None",
        window: "TimeWindow",
        *,
        everything: bool,
    ) -> None:
        self._config, self._configuration, self._policy = config, configuration, policy
        self._identities, self._window, self._everything = identities, window, everything

    def file(self, output: str) -> dict[str, Any]:
        """Write one file, with all rows in memory."""
        from conformal_arbitrage.collecting.from_records import score_log_of

        known = self._configuration.policies.get(self._policy)
        log = self._read(
            lambda store: score_log_of(
                store,
                self._policy,
                identities=self._identities,
                everything=self._everything,
                session_idle=3600.0 if known is None else known.session_idle,
                window=self._window,
            )
        )
        log.write(output)
        self._warn_of_grader(log.identities)
        return {"rows": len(log), "missing_guardian_rows": int(log.missing.sum()), "output": output}

    def files(self, output: str, rows_per_file: int) -> dict[str, Any]:
        """Write a folder of files, each forgotten when it is written."""
        from conformal_arbitrage.collecting.record_parts import write_record_parts

        written = self._read(
            lambda store: write_record_parts(
                store,
                self._policy,
                output,
                rows_per_file=rows_per_file,
                window=self._window,
                identities=self._identities,
                everything=self._everything,
            )
        )
        self._warn_of_grader(written.identities)
        names = [path.name for path in written.files]
        return {"rows": written.rows, "missing_guardian_rows": written.missing, "output": output, "files": names}

    def _read(self, use: "Callable[[Store], Awaitable[_Result]]") -> _Result:
        """Use the store; an error about a policy that is not configured says so."""
        try:
            return with_store(self._config, use)
        except StoreError as error:
            if self._policy in self._configuration.policies:
                raise
            known = ", ".join(self._configuration.policies) or "none"
            raise StoreError(
                f"there is no policy {self._policy!r} in {self._config}; there are {known} ({error})"
            ) from error

    def _warn_of_grader(self, identities: "Mapping[str, Any] | None") -> None:
        from conformal_arbitrage.live.staleness import grader_change

        changed = grader_change(self._configuration, identities)
        if changed is not None:
            options.warn(changed)


def _export_cascade(
    config: str, policy: str, output: str, identities: dict[str, Any], *, everything: bool, as_json: bool
) -> None:
    """Write the shadow rows of a cascade as its log."""
    from conformal_arbitrage.collecting.cascade_records import cascade_log_of

    if everything:
        raise click.UsageError("--all is for two models: rows of a cascade end where it stopped; give --score-log")
    *models, guardian = identities
    log = with_store(
        config,
        lambda store: cascade_log_of(store, policy, models=models, guardian=guardian, identities=identities),
    )
    log.write(output)
    if as_json:
        options.print_json({"rows": len(log), "models": models, "guardian": guardian, "output": output})
    else:
        click.echo(
            f"Written: {output}, {len(log)} rows. Next: arbitrage calibrate {output} --path --guardian-column {guardian}"
        )
