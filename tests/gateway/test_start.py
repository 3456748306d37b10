"""What `serve` says at start, and what it refuses to start with; the printed call is pasted into a shell."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import chdir, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformal_arbitrage import ScoreLog
from conformal_arbitrage.cli import cli
from conformal_arbitrage.cli.demo import write_gateway
from conformal_arbitrage.gateway.server import reachable_url
from conformal_arbitrage.live.config import read_config, template
from tests.gateway.house import UNSURE, hanging, says, until, votes
from tests.gateway.people import PeopleHouse

ARBITRAGE = [sys.executable, "-m", "conformal_arbitrage"]
BUNDLED = Path(__file__).parents[2] / "src" / "conformal_arbitrage" / "data" / "science.parquet"


@pytest.fixture
def demo(tmp_path):
    """The folder that `make demo-serve` serves."""
    (tmp_path / "science.parquet").write_bytes(BUNDLED.read_bytes())
    write_gateway(tmp_path, ScoreLog.read(BUNDLED, primary="qwen15b", guardian="expert"))
    return tmp_path


@contextmanager
def serving(folder, *, ended=True, **variables):
    """`arbitrage serve` as a process; yields the lines it printed before it waits for calls.

    If it is not to be ended here, the process is yielded too.
    """
    command = [*ARBITRAGE, "serve", "--config", "arbitrage.toml", "--port", "0"]
    environment = os.environ | variables | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        try:
            lines = []
            while not any(line.startswith("curl") for line in lines):
                line = process.stdout.readline()
                assert line, process.stderr.read()
                lines.append(line.rstrip("\n"))
            yield lines if ended else (lines, process)
        finally:
            if process.poll() is None:
                process.terminate()


def paste(lines, **variables):
    """Run the printed command as a user would, and return what it shows."""
    command = next(line for line in lines if line.startswith("curl"))
    done = subprocess.run(
        ["sh", "-c", command.replace("curl", "curl --silent --show-error --fail-with-body --max-time 30", 1)],
        capture_output=True, text=True, check=False, env=os.environ | variables,
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return json.loads(done.stdout)


def run(folder, *arguments):
    """Run a command in this process, in a folder."""
    with chdir(folder):
        return CliRunner().invoke(cli, arguments)


@pytest.mark.proof
def test_the_printed_call_of_the_demo_works_with_and_without_keys(demo):
    with serving(demo) as lines:
        [answer] = paste(lines)["answers"]
    assert answer["arbitrage"]["guarantee"] == "crc"
    created = json.loads(run(demo, "keys", "create", "--json").stdout)
    assert created["first"]
    with serving(demo) as lines:
        assert any("ARBITRAGE_KEY" in line for line in lines)
        [again] = paste(lines, ARBITRAGE_KEY=created["key"])["answers"]
    assert again["choice"] == answer["choice"]


def test_a_question_that_was_not_recorded_is_not_worth_a_retry(demo):
    with serving(demo) as lines:
        call = next(line for line in lines if line.startswith("curl"))
        url = re.search(r"http://[^/]+/v1/decisions", call)[0]
        choices = [{"value": "a"}, {"value": "b"}]
        body = {"model": "science", "input": "Why?", "questions": [{"type": "choice", "choices": choices}]}
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        message = json.load(caught.value)["error"]["message"]
    assert (caught.value.code, caught.value.headers["x-should-retry"]) == (502, "false")
    assert "replays recorded rows and has none with this id" in message
    assert message.endswith("a retry will not help")


def test_an_unknown_policy_cannot_be_exported(demo):
    for how in ("--all", "--score-log"):
        done = run(demo, "records", "export", "--policy", "nope", how, "-o", "x.parquet")
        assert done.exit_code == 2
        assert "there is no policy 'nope' in arbitrage.toml; there are science" in done.stderr
    assert "policy 'science' has no decisions on record\n" in run(
        demo, "records", "export", "--policy", "science", "--all", "-o", "x.parquet"
    ).stderr  # fmt: skip


@pytest.mark.parametrize("in_flight", [False, True], ids=["idle", "a request in flight"])
def test_two_interrupts_end_a_gateway_quietly(demo, house, in_flight):
    gateway = house(primary=hanging) if in_flight else None
    with serving(demo if gateway is None else gateway.folder, ended=False) as (lines, process):
        command = next(line for line in lines if line.startswith("curl"))
        caller = subprocess.Popen(["sh", "-c", f"exec {command} --silent"]) if gateway is not None else None
        if gateway is not None:
            until(lambda: gateway.primary.bodies)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
        if caller is not None:
            caller.wait(60)
    said = said.partition("Exception ignored in atexit callback: <bound method Coverage")[0]  # not of the gateway
    assert "Traceback" not in said
    assert "leaked" not in said


INTERRUPTED = """
import os, signal, sys
from conformal_arbitrage.cli import cli, demo

ask, counts = demo.ask_gateway, {"sent": 0, "answered": 0}

def count(step):
    counts[step] += 1
    if step == sys.argv[1] and counts[step] == 20:
        os.kill(os.getpid(), signal.SIGINT)

async def interrupting(*arguments):
    count("sent")
    answer = await ask(*arguments)
    count("answered")
    return answer

demo.ask_gateway, demo.TRIALS = interrupting, 20
cli(["demo", "--out", "tour"])
"""


@pytest.mark.proof
@pytest.mark.parametrize("when", ["sent", "answered"])
def test_interrupting_the_demo_while_it_serves_leaves_no_traceback(tmp_path, when):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, when], cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr.strip()) == (130, "arbitrage: interrupted")
    assert not list(tmp_path.glob("arbitrage-demo-*"))


@pytest.mark.parametrize("form", ["menu", "text"])
def test_the_printed_call_of_models_behind_endpoints_works(house, form):
    gateway = house(form=form)
    with serving(gateway.folder) as lines:
        reply = paste(lines)
    answer = reply["answers"][0] if form == "menu" else reply
    assert answer["arbitrage"]["guarantee"] == "crc"


def test_where_people_answer_the_printed_call_says_where_and_can_be_sent_again(house):
    from conformal_arbitrage.cli.serve import example_call, example_note

    config = house(PeopleHouse, primary=votes(*UNSURE), review={"wait": 20.0}).config
    assert "-H 'Idempotency-Key: first'" in example_call(config, "http://here", keyed=False)
    note = example_note(config, "http://here")
    assert "'support team'" in note
    assert "http://here/console/review" in note
    assert "held for 20 s" in note


def test_models_that_replay_a_record_are_said_to(demo):
    from conformal_arbitrage.cli.serve import example_note

    assert "replay a record" in example_note(read_config(demo / "arbitrage.toml"), "http://here")


def test_a_policy_with_two_models_is_tried_before_one_with_people(house):
    from conformal_arbitrage.cli.serve import example_call, example_note

    gate = house(PeopleHouse, primary=votes(*UNSURE))
    text = (
        gate.path.read_text()
        + f"""
[models.large]
kind = "decisions"
url = "{gate.primary.url}"
model = "m"
[policies.models]
mode = "shadow"
guardian = "large"
"""
    )
    gate.path.write_text(text)
    config = read_config(gate.path)
    assert '"model": "models"' in example_call(config, "http://here", keyed=False)
    assert "Idempotency-Key" not in example_call(config, "http://here", keyed=False)
    assert example_note(config, "http://here") is None


def test_the_first_key_says_that_every_call_now_needs_one_and_later_ones_do_not(house):
    gateway = house()
    first = run(gateway.folder, "keys", "create")
    second = run(gateway.folder, "keys", "create")
    assert "every call needs one" in first.stderr
    assert not second.stderr
    assert gateway.decide().status_code == 401


def test_policies_and_their_last_decisions_are_listed(house, tmp_path):
    gateway = house()
    (tmp_path / "arbitrage.toml").write_text(f"{template('text')}\n[policies.later]\n")
    [before] = json.loads(run(tmp_path, "policies", "list", "--json").stdout)[-1:]
    assert (before["policy"], before["version"]) == ("later", None), "no gateway was started yet"
    assert "there is no database" in run(tmp_path, "records", "list").stderr
    for _ in range(3):
        gateway.decide()
    listed = json.loads(run(gateway.folder, "policies", "list", "--json").stdout)
    assert [(policy["policy"], policy["mode"], policy["version"], policy["alarm"]) for policy in listed] == [
        ("support", "enforce", 1, None)
    ]
    assert "support" in run(gateway.folder, "policies", "list").stdout
    latest = json.loads(run(gateway.folder, "records", "list", "--limit", "2", "--json").stdout)
    assert [(decision["policy"], decision["no_guarantee"]) for decision in latest] == [("support", None)] * 2
    assert latest[0]["at"] >= latest[1]["at"]
    assert latest[0]["id"] in run(gateway.folder, "records", "list").stdout
    assert json.loads(run(gateway.folder, "records", "list", "--policy", "other", "--json").stdout) == []


@pytest.mark.parametrize(
    ("policy", "warned"),
    [
        ({"mode": "shadow"}, True),
        ({"mode": "shadow", "content": "off"}, True),
        ({"mode": "shadow", "content": "full"}, False),
        ({}, False),
    ],
)
def test_serve_says_that_rows_without_answers_can_never_be_graded(house, policy, warned):
    from conformal_arbitrage.gateway.server import start_notes

    notes = start_notes(house(form="text", guardian=says("theirs"), policy=policy).config)
    assert [("can never be graded" in note, 'content = "full"' in note) for note in notes] == [(True, True)] * warned


def test_menus_need_no_answers_to_be_graded(house):
    from conformal_arbitrage.gateway.server import start_notes

    assert start_notes(house(policy={"mode": "shadow"}).config) == []


def test_a_person_without_a_terminal_is_refused_at_start(house):
    gateway = house()
    text = gateway.path.read_text()
    person = re.sub(r"\[guardian\].*?(?=\[gateway\])", '[guardian]\nkind = "human"\nname = "ada"\n', text, flags=re.S)
    gateway.path.write_text(person)
    done = run(gateway.folder, "serve", "--port", "0")
    assert done.exit_code == 2
    assert "[guardian] is a person, and there is no terminal" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_home_page_says_what_this_is_and_names_policies_only_to_an_open_gateway(house):
    gateway = house()
    about = gateway.get("/").json()
    assert (about["name"], about["policies"]) == ("conformal-arbitrage", ["support"])
    assert {gateway.get(path).status_code for path in about["links"].values()} == {200}
    assert about["links"]["console"] == "/console"
    gateway.key()
    assert "policies" not in gateway.get("/").json()


WITHOUT_EXTRA = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("starlette", "uvicorn", "uvloop", "httptools", "prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from conformal_arbitrage.cli import main
main(sys.argv[1:])
"""


def without_extra(gateway, *command):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRA, *command], cwd=gateway.folder, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        ["serve"],
        ["keys", "create"],
        ["records", "export", "--policy", "support", "--all", "-o", "log.parquet"],
    ],
    ids=" ".join,
)
def test_without_the_extra_the_command_says_what_to_install(house, command):
    done = without_extra(house(), *command)
    assert done.returncode == 2
    assert "pip install '.[gateway]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command", [["keys", "list"], ["records", "verify"], ["records", "prune", "--older-than", "1"]], ids=" ".join
)
def test_commands_on_the_store_alone_need_no_extra(house, command):
    done = without_extra(house(), *command)
    assert done.returncode == 0, done.stderr


def test_records_and_keys_need_no_key_of_a_provider(house, monkeypatch):
    monkeypatch.setenv("SOME_PROVIDERS_KEY", "sk-1")
    gateway = house(
        certificate=False, policy={"mode": "shadow"}, models={"guardian": {"key_env": "SOME_PROVIDERS_KEY"}}
    )
    gateway.decide()
    monkeypatch.delenv("SOME_PROVIDERS_KEY")
    done = run(gateway.folder, "records", "export", "--policy", "support", "--score-log", "-o", "log.parquet")
    assert done.exit_code == 0, done.stderr
    assert set(ScoreLog.read(gateway.folder / "log.parquet").identities) == {"primary", "guardian"}
    for command in (
        ["records", "verify"],
        ["records", "prune", "--older-than", "1"],
        ["keys", "list"],
        ["keys", "create"],
    ):
        assert run(gateway.folder, *command).exit_code == 0, command
    refused = run(gateway.folder, "serve", "--port", "0")
    assert "SOME_PROVIDERS_KEY is not set" in refused.stderr


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8080"), ("::", "http://[::1]:8080"), ("10.0.0.7", "http://10.0.0.7:8080")],
)
def test_the_printed_address_is_one_that_can_be_opened(host, url):
    assert reachable_url(host, 8080) == url
