"""The command `arbitrage`: a table of commands, each loaded from its module when it runs.

A user error is one line on stderr and exit code 2, and nothing is written. Output that nobody reads any more, as after
`| head -1`, ends a command silently with exit code 141, which shells know as SIGPIPE's.
"""

import gc
import io
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn, TextIO

import click

from conformal_arbitrage.errors import ArbitrageError

COMMANDS = {
    "Start": {
        "demo": ("demo:demo_command", "Take a tour of the tool on bundled real data."),
        "quickstart": ("logs:quickstart_command", "Ask what you have, and say what to run next."),
        "init": ("models:init_command", "Write a short, commented configuration to start from."),
        "check": ("models:check_command", "Test each model, and pin the API features it supports."),
        "collect": ("models:collect_command", "Ask both models about every row and write a score log."),
        "import": ("logs:import_command", "Turn the files of other tools into a score log."),
        "router-log": ("logs:router_log_command", "Turn any table of router scores and outcomes into a score log."),
        "inspect": ("logs:inspect_command", "Show a log, and whether its pair is worth routing."),
    },
    "Certify": {
        "recommend": ("certificates:recommend_command", "Choose how to route, and certify it."),
        "calibrate": ("certificates:calibrate_command", "Find the threshold that keeps a risk budget, and certify it."),
        "verify": ("certificates:verify_command", "Recompute a certificate from its log, to the bit."),
        "apply": ("certificates:apply_command", "Decide every row of a log with a certificate."),
        "assess": ("logs:assess_command", "Measure the loss of a certificate on new rows."),
        "swap": ("logs:swap_command", "Say whether a new model may replace an old one."),
        "batch": ("batch:batch_command", "Keep machine labels of a pile of items where that is safe."),
        "certificate": ("certificates:certificate_command", "Show a certificate, or change it within what it promises."),
        "plan": ("certificates:plan_command", "Show how many rows and audits a budget needs."),
        "split": ("logs:split_command", "Split a log at random: one part to choose on, one to certify."),
        "learn": ("logs:learn_command", "Learn a score on a part of a log, and score the rest."),
    },
    "Run": {
        "ask": ("models:ask_command", "Make one live decision: who decided, why, and at what cost."),
        "serve": ("serve:serve_command", "Serve policies over an OpenAI-compatible API."),
        "monitor": ("monitor:monitor_command", "Show the loss of audited decisions against alpha."),
        "report": ("monitor:report_command", "Write a month of a policy as one HTML page."),
        "renew": ("gateway:renew_command", "Calibrate a policy again on its schedule, and install it."),
        "policies": ("gateway:policies_command", "List the policies of a gateway, and lift alarms."),
        "keys": ("gateway:keys_command", "Manage the API keys of the gateway."),
        "records": ("records:records_command", "List, export, grade, verify, prune and erase records."),
        "webhooks": ("gateway:webhooks_command", "Test webhooks, and list what was sent to them."),
    },
    "Research": {
        "evaluate": ("logs:evaluate_command", "Run held-out trials: what each budget buys."),
        "compare": ("logs:compare_command", "Compare decision rules on a log."),
        "simulate": ("logs:simulate_command", "Replay a log as traffic with a Primary that becomes worse."),
        "reproduce": ("logs:reproduce_command", "Run one experiment of the paper, or all of them."),
    },
}  # fmt: skip
"""What the help shows, by section: each command's place in this package, and a line about it."""

_NOBODY_READS = 141
_OF_GATEWAY = {"starlette", "uvicorn", "uvloop", "httptools", "prometheus_client", "jinja2"}


class _Commands(click.Group):
    """The group of all commands, which loads one when it is called and prints every expected error on one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the help."""
        return [name for section in COMMANDS.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command."""
        places = {name: place for section in COMMANDS.values() for name, (place, _) in section.items()}
        if cmd_name not in places:
            return None
        module, _, function = places[cmd_name].partition(":")
        gc.disable()  # modules leave nothing to collect, and looking for it takes a tenth of their time
        try:
            return getattr(import_module(f"conformal_arbitrage.cli.{module}"), function)
        finally:
            gc.enable()

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command.

        Raises:
            ClickException: it needs the extra of the gateway, which is not installed.
        """
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in _OF_GATEWAY:
                raise
            raise click.ClickException(
                f"the gateway needs its extra, which has {error.name}: run `pip install '.[gateway]'` in a clone"
            ) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in sections, without loading any of them."""
        width = max(len(name) for name in self.list_commands(ctx))
        for title, section in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in section.items()])

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
        except click.Abort as error:
            if isinstance(error.__context__, EOFError):
                _fail("the input ended before the answer; where nobody can answer, say it with options (--yes)")
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


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="conformal-arbitrage", prog_name="arbitrage")
def cli() -> None:
    """Route between a cheap Primary and a careful Guardian, with a guarantee on the loss.

    \b
    arbitrage demo                            take a tour on bundled real data
    arbitrage quickstart scores.csv           start from what you have
    arbitrage inspect LOG                     see whether a pair is worth routing
    arbitrage recommend LOG --alpha 5%        choose how to route, and certify it
    arbitrage verify certificate.json LOG     recompute a certificate, to the bit
    arbitrage init                            write a configuration
    arbitrage collect questions.csv -o LOG    ask both models, and write a log
    arbitrage serve                           run an OpenAI-compatible gateway
    arbitrage monitor                         see whether the promise is kept
    """
