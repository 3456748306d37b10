"""The command line: each command parses its arguments, makes one call and prints the result.

A user error is one line on stderr and exit code 2, and nothing is written. Output that nobody reads any more, as after
`| head -1`, ends a command silently with exit code 141, which shells know as SIGPIPE's.
"""

import io
import os
import sys
from contextlib import suppress
from typing import Any, NoReturn, TextIO

import click

from conformal_arbitrage.cli import options
from conformal_arbitrage.cli.certificates import (
    apply_command,
    calibrate_command,
    certificate_command,
    plan_command,
    recommend_command,
    verify_command,
)
from conformal_arbitrage.cli.gateway import (
    keys_command,
    policies_command,
    records_command,
    records_export_command,
    records_grade_command,
    records_migrate_command,
    serve_command,
    webhooks_command,
)
from conformal_arbitrage.cli.logs import (
    assess_command,
    compare_command,
    demo_command,
    evaluate_command,
    import_command,
    inspect_command,
    learn_command,
    quickstart_command,
    router_log_command,
    split_command,
)
from conformal_arbitrage.cli.models import ask_command, check_command, collect_command, init_command
from conformal_arbitrage.cli.monitor import monitor_command, renew_command, report_command, simulate_command
from conformal_arbitrage.cli.reproduction import reproduce_command
from conformal_arbitrage.errors import ArbitrageError

_NOBODY_READS = 141


class _Group(options.WrappingGroup):
    """A group that prints every expected error on one line."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; exit with code 2 after a user error."""
        if not kwargs.pop("standalone_mode", True):
            return super().main(*args, standalone_mode=False, **kwargs)
        if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] - which it is under `>&-`
            _fail("standard output is closed; redirect it to a file or to /dev/null")
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal without "±" shows "?" instead of failing
        output = sys.stdout
        try:
            raise SystemExit(self._run(*args, **kwargs))
        except (ArbitrageError, click.ClickException) as error:
            _fail(error.format_message() if isinstance(error, click.ClickException) else str(error))
        except click.Abort:
            _fail("interrupted", 130)
        except OSError as error:  # a full disk, most often under the output itself
            _drop(output)
            if isinstance(error, BrokenPipeError):
                raise SystemExit(_NOBODY_READS) from error
            _fail(f"the operating system reports: {error}")
        except SystemExit as error:  # Click and Rich end so, with code 1, after a broken pipe
            if sys.stdout is output and not isinstance(error.__context__, BrokenPipeError):
                raise
            _drop(output)
            raise SystemExit(_NOBODY_READS) from error

    def _run(self, *args: Any, **kwargs: Any) -> int:
        try:
            status = super().main(*args, standalone_mode=False, **kwargs) or 0
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.ctx.get_help() if error.ctx else "")
            status = 0
        sys.stdout.flush()
        return status


def _fail(message: str, status: int = 2) -> NoReturn:
    with suppress(OSError):  # an error stream that is full takes nothing
        click.echo(f"arbitrage: {' '.join(message.split())}", err=True)
    raise SystemExit(status)


def _drop(output: TextIO) -> None:
    """Let what is left in the buffer of standard output go nowhere, or the interpreter would try again at its end."""
    if output is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="conformal-arbitrage", prog_name="arbitrage")
def cli() -> None:
    """Route between a cheap Primary and a careful Guardian, with a guarantee on the loss.

    \b
    arbitrage demo                            take a tour on bundled real data
    arbitrage quickstart                      start from what you have
    arbitrage init, check, collect            record scores of your own models
    arbitrage import FORMAT FILES             read what other tools recorded
    arbitrage inspect LOG                     see if a pair is worth routing
    arbitrage recommend LOG --alpha 0.05      choose pair and options, and certify
    arbitrage calibrate LOG --alpha 0.05      find the threshold and certify it
    arbitrage ask CERTIFICATE QUESTION        make one live decision
    arbitrage serve                           run an OpenAI-compatible gateway
    """


_COMMANDS = (
    quickstart_command,
    init_command, check_command, collect_command, inspect_command, calibrate_command, verify_command, apply_command,
    ask_command, assess_command, evaluate_command, compare_command, plan_command, simulate_command, split_command,
    import_command, router_log_command, learn_command,
    reproduce_command, serve_command, keys_command, records_command, demo_command, certificate_command,
    webhooks_command, recommend_command, policies_command, renew_command, monitor_command, report_command,
)  # fmt: skip
for _command in _COMMANDS:
    cli.add_command(_command)

records_command.add_command(records_export_command)
records_command.add_command(records_grade_command)
records_command.add_command(records_migrate_command)
main = cli
