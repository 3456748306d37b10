"""The command line: each command parses its arguments, makes one call and prints the result.

A command's module is loaded when the command runs, so that `arbitrage --help` needs nothing but click.
"""

from conformal_arbitrage.cli.main import cli

main = cli

__all__ = ["cli", "main"]
