"""What people see at a terminal of 80 columns, and what they are asked."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from conformal_arbitrage import ScoreLog, calibrate
from conformal_arbitrage.cli import cli, output, records
from conformal_arbitrage.cli.main import COMMANDS
from conformal_arbitrage.cli.models import _show_decision
from conformal_arbitrage.types import Decision
from tests.cli import test_cli
from tests.cli.test_cli import PAIR

run = test_cli.run
LOG = ScoreLog.from_arrays([[0.9, 0.1], [0.6, 0.4]] * 50, [[1.0, 0.0]] * 100, id=range(100), label=[0] * 100)

CONFIGURATION = """\
[primary]
kind = "function"
function = "operator:add"
name = "rule"

[guardian]
kind = "human"
name = "team"
"""


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(output, "console", lambda: Console(width=80, highlight=False))


def assert_whole(text):
    assert "…" not in text
    assert [line for line in text.splitlines() if len(line) > 80] == []


HERE = click.Context(cli)
GROUPS = [name for name in cli.list_commands(HERE) if isinstance(cli.get_command(HERE, name), click.Group)]


@pytest.mark.parametrize("group", [[], *([name] for name in GROUPS)])
def test_the_help_of_groups_cuts_no_sentence_off(group):
    shown = CliRunner().invoke(cli, [*group, "--help"], terminal_width=80).stdout
    first = "Commands:" if group else "Start:"
    assert first in shown
    assert "..." not in shown.partition(first)[2]
    assert_whole(shown)


def test_the_help_gives_every_command_one_line_in_its_section():
    lines = CliRunner().invoke(cli, ["--help"], terminal_width=80).stdout.splitlines()
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")][1:] == [
        f"{title}:" for title in COMMANDS
    ]
    shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[lines.index("Start:") :] if line[:1] == " "}
    assert shown == {name: line for section in COMMANDS.values() for name, (_, line) in section.items()}


def test_a_comparison_keeps_whole_figures_and_names_what_it_leaves_out(run, narrow):
    arguments = ["compare", "log.parquet", *PAIR, "--alpha", "0.05", "--splits", "2"]
    shown = run(*arguments, "--primary-cost", "1", "--guardian-cost", "20").stdout
    assert_whole(shown)
    assert "Columns that do not fit this terminal: net loss; --json has them." in shown
    assert "Splits over alpha: the share of splits" in shown


def test_a_plan_says_what_red_is(run, narrow):
    shown = run("plan", "--alpha", "0.05", "--audit-rate", "0.05", "--decisions-per-day", "10000").stdout
    assert_whole(shown)
    assert "Red is the monitor's alarm" in shown


def test_a_recommendation_is_wrapped_and_its_commands_can_be_pasted(run, narrow):
    shown = run("recommend", "log.parquet", *PAIR, "--alpha", "0.05", "--trials", "2").stdout
    assert_whole(shown)
    by_hand = shown.partition("By hand:\n")[2].replace(" \\\n   ", "")
    for command in by_hand.splitlines():
        run(*shlex.split(command)[1:])


@pytest.mark.parametrize(("reply", "code"), [("y\n", 0), ("n\n", 130)])
def test_pruning_asks_at_a_terminal(run, monkeypatch, reply, code):
    Path("arbitrage.toml").write_text(CONFIGURATION)
    prune = ["records", "prune", "--older-than", "90"]
    assert "Removed: 0 decisions" in run(*prune).stdout
    monkeypatch.setattr(records, "has_terminal", lambda: True)
    done = CliRunner().invoke(cli, prune, input=reply)
    assert done.exit_code == code, done.output
    assert "Remove all decisions older than 90 days" in done.stderr
    assert ("Removed: 0 decisions" in done.stdout) == (code == 0)
    assert "Removed: 0 decisions" in run(*prune, "--yes").stdout
    assert json.loads(run(*prune, "--json").stdout) == {"removed": 0}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"role": "assistant", "content": "A rose."}, "A rose."),
        ("billing", "billing"),
        (
            {"tool_calls": [{"type": "function", "function": {"name": "look", "arguments": '{"in": "Oslo"}'}}]},
            '"name": "look"',
        ),
    ],
)
def test_an_answer_is_shown_as_text(capsys, answer, text):
    decision = Decision(
        id="d", action=0, answer=answer, candidates=(0,), decided_by="primary", margin=1.0, relaxation=0.5
    )
    _show_decision(decision, calibrate(LOG, 0.05))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("answer")]
    assert text in line
    assert '"content"' not in line


@pytest.mark.parametrize(
    ("options", "promise"),
    [
        ({}, "expected loss at most 0.05"),
        ({"loss": "net", "boundary": "random", "key": b"k"}, "expected net loss (gains counted) at most 0.05"),
        (
            {"confidence": 0.9, "zero_one": True},
            "long-run loss of this certificate at most 0.05, with probability 0.9 over calibrations",
        ),
    ],
)
def test_an_answer_comes_with_the_promise_of_its_certificate(capsys, options, promise):
    decision = Decision(id="d", action=0, answer="A", candidates=(0,), decided_by="primary", margin=1.0, relaxation=0.5)
    _show_decision(decision, calibrate(LOG, 0.05, **options))
    assert promise in " ".join(capsys.readouterr().out.split())


OUTPUTS = {
    "> /dev/full": (2, "arbitrage: the operating system reports: [Errno 28] No space left on device\n"),
    ">&-": (2, "arbitrage: standard output is closed; redirect it to a file or to /dev/null\n"),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_output_that_cannot_be_written_is_one_line_and_an_exit_code(output):
    line = f"{shlex.quote(sys.executable)} -m conformal_arbitrage keys generate {output}; exit $?"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == OUTPUTS[output]


@pytest.mark.parametrize("arguments", [["plan", "--alpha", "0.05"], [], ["--help"]])
def test_the_first_line_of_an_output_is_enough_for_whoever_reads_it(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "conformal_arbitrage", *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
