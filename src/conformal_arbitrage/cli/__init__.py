"""The command line: each command parses, makes one call and prints.

A mistake of the user is one line on stderr and exit code 2; nothing is written then.
"""

import io
import sys
from typing import Any

import click

from conformal_arbitrage.cli.data import demo, router_log, split
from conformal_arbitrage.cli.evaluation import evaluate, inspect
from conformal_arbitrage.cli.live import ask, check, collect, init
from conformal_arbitrage.cli.reproduction import reproduce
from conformal_arbitrage.cli.rules import apply, calibrate, plan, verify
from conformal_arbitrage.cli.service import keys, records, serve
from conformal_arbitrage.errors import ArbitrageError


class _Group(click.Group):
    """A group that shows every expected error as one line."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; exit 2 on a mistake of the user."""
        if not kwargs.pop("standalone_mode", True):
            return super().main(*args, standalone_mode=False, **kwargs)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal without "±" shows "?" instead of failing
        try:
            raise SystemExit(super().main(*args, standalone_mode=False, **kwargs) or 0)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.ctx.get_help() if error.ctx else "")
            raise SystemExit(0) from error
        except (ArbitrageError, click.ClickException) as error:
            text = error.format_message() if isinstance(error, click.ClickException) else str(error)
            click.echo(f"arbitrage: {' '.join(text.split())}", err=True)
            raise SystemExit(2) from error
        except click.Abort as error:
            click.echo("arbitrage: interrupted", err=True)
            raise SystemExit(130) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="conformal-arbitrage", prog_name="arbitrage")
def cli() -> None:
    """Route between a cheap Primary and a careful Guardian, with a guarantee on the loss.

    \b
    arbitrage demo                            a tour on bundled real data
    arbitrage init, check, collect            scores of your own models
    arbitrage inspect LOG                     is this pair of models worth routing?
    arbitrage calibrate LOG --alpha 0.05      the threshold that keeps the budget
    arbitrage ask CERTIFICATE QUESTION        one live decision
    arbitrage serve                           the gateway: an OpenAI-compatible endpoint that keeps the quota
    """


_COMMANDS = (
    init, check, collect, inspect, calibrate, verify, apply, ask, evaluate, plan, split, router_log, reproduce,
    serve, keys, records, demo,
)  # fmt: skip
for _command in _COMMANDS:
    cli.add_command(_command)

main = cli
