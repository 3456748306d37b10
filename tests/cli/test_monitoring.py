"""arbitrage monitor and report, on a real database: what people see, and what a hostile text cannot do."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.gateway.console.report import Month
from conformal_arbitrage.store import integrity, policies
from conformal_arbitrage.store.ledger import LedgerKey
from conformal_arbitrage.store.location import open_store
from tests.cli import test_cli
from tests.live.ledgers import MODELS, certificate, draw_rows, fill, losses, settle_served

run = test_cli.run
CONFIGURATION = """\
alpha = 0.05
[primary]
kind = "function"
function = "builtins:len"
name = "first"
[guardian]
kind = "function"
function = "builtins:len"
name = "second"
[gateway]
database = "decisions.sqlite"
[policies.support]
audit_rate = 0.05
"""
MONTH = datetime.now(UTC).strftime("%Y-%m")


def written(story, name="decisions.sqlite"):
    """Let a coroutine write to the store of the configuration here."""

    async def work():
        secret = ProjectSecret.find()
        async with await open_store(name, keys=secret.record_keys) as store:
            await story(store)
            await integrity.seal(store, everything=True)

    asyncio.run(work())


@pytest.fixture
def database(run):
    Path("arbitrage.toml").write_text(CONFIGURATION)
    ProjectSecret.create(Path())

    async def story(store):
        await fill(store)
        await settle_served(store)

    written(story)
    return "decisions.sqlite"


async def alarming(store):
    """Install a certificate whose ledger is red, with audits that have no outcome, and one that cannot be watched."""
    version = await store.run(policies.install, "support", certificate().to_dict(), by="configuration")
    key = LedgerKey(policy="support", version=version.version, identities_sha256=MODELS)
    now = time.time()
    await draw_rows(store, [*losses(300, 0.3, 1), *[None] * 60], key=key, start=now - 9e5, stop=now - 5e5)
    await store.run(policies.install, "careful", certificate(n=10).to_dict(), by="configuration")


def test_monitor_shows_every_policy_and_says_why(run, database):
    shown = run("monitor").output
    assert re.search(r"support v2 +kept +0\.0214 +0\.0\d+ to 0\.0\d+ +0\.05, 0\.05", shown)
    assert "700 + 2 pending" in shown
    written(alarming)
    shown = " ".join(run("monitor").output.split())
    assert "support v3 red" in shown
    assert "60 missing" in shown
    assert "support: the loss is above the red line" in shown
    assert "careful: every query is deferred" in shown


def test_monitor_tells_everything_about_one_policy(run, database):
    shown = " ".join(run("monitor", "support", "--plot", "support.png").output.split())
    for words in (
        "support, version 2, mode enforce",
        "state kept",
        "limits 0.0",
        "alpha, red line 0.05, 0.05",
        "as served loss 0.0243 over 702 delivered answers",
        "blind decisions 10,800",
        "Written: support.png",
    ):
        assert words in shown
    assert Path("support.png").stat().st_size > 20_000


def test_monitor_says_what_is_tolerated_without_a_guarantee(run, database):
    assert json.loads(run("monitor", "support", "--json").stdout)[0]["allowed"] == []
    Path("arbitrage.toml").write_text(CONFIGURATION + 'allow = ["unsigned", "guardian.model"]\n')
    said = "unsigned, guardian.model: tolerated; decisions that need it have no guarantee"
    assert said in run("monitor").stdout
    assert said in run("monitor", "support").stdout
    assert json.loads(run("monitor", "support", "--json").stdout)[0]["allowed"] == ["unsigned", "guardian.model"]


def test_monitor_prints_one_document(run, database):
    written(alarming)
    careful, support = json.loads(run("monitor", "--json").stdout)
    assert (careful["state"], careful["watched"]) == ("not watched", False)
    assert "nothing to watch" in careful["unwatched"]
    assert (support["state"], support["cause"]) == ("red", "losses")
    assert support["audits"] == {"known": 300, "pending": 0, "missing": 60, "collapsed": 0}
    assert support["lines"]["red"] > support["lines"]["alpha"] == 0.05
    assert [one["policy"] for one in json.loads(run("monitor", "careful", "--json").stdout)] == ["careful"]


def test_monitor_refuses_what_it_cannot_do(run, database):
    assert "there is no policy 'nobody'" in run("monitor", "nobody", code=2).stderr
    assert "name it" in run("monitor", "--plot", "x.png", code=2).stderr
    assert "--watch goes with neither" in run("monitor", "--watch", "--json", code=2).stderr
    assert "there is no policy 'nobody'" in run("report", "nobody", "--month", MONTH, "-o", "x.html", code=2).stderr
    for month in ("2026-13", "next", "2026"):
        assert "a month is written as 2026-11" in run("report", "support", "--month", month, "-o", "x", code=2).stderr
    assert "has not begun" in run("report", "support", "--month", "9998-12", "-o", "x", code=2).stderr


def test_watching_shows_the_table_until_it_is_interrupted(run, database):
    command = [sys.executable, "-m", "conformal_arbitrage", "monitor", "--watch", "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        limit = threading.Timer(120, watching.kill)
        limit.start()
        lines = iter(watching.stdout.readline, "")
        assert any("support v2" in line for line in lines)
        assert any("support v2" in line for line in lines), "it is shown again"
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=60)
        limit.cancel()
    assert watching.returncode == 0
    assert "Traceback" not in errors


class Page(HTMLParser):
    """Collects the tags, attributes and text of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(Path(path).read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += f" {data}"


def test_a_report_has_promise_evidence_money_alarms_certificates_and_head(run, database):
    run("report", "support", "--month", MONTH, "-o", "report.html")
    text = " ".join(Page("report.html").text.split())
    head = json.loads(run("records", "head").stdout)
    for words in (
        "with probability at least 0.95 over calibration logs of this size",
        "State kept",
        "700 known, 2 pending, 0 missing",
        "this promise is void",
        "Loss of delivered answers, fallbacks included 0.0243",
        "Decided by the Primary",
        "at $0.50 each, the mean of",
        "losses: 1,100 audits",
        "2 0.05 0.95 1,200 admin <key> as installed",
        "The hash chains are intact, and every signature fits.",
        *(digest for _, digest in head["writers"].values()),
    ):
        assert words in text, words
    page = Page("report.html")
    assert "svg" in page.tags
    document = json.loads(run("report", "support", "--month", MONTH, "-o", "report.html", "--json").stdout)
    assert document == {"output": "report.html", "state": "kept", "ok": True, "problems": []}


def test_a_certificate_that_an_alarm_speaks_against_is_shown_without_its_promise(run, database):
    async def back(store):
        await store.run(policies.rollback, "support", by="a hasty hand")

    [kept] = json.loads(run("monitor", "--json").stdout)
    assert kept["void"] is None
    written(back)
    [standing] = json.loads(run("monitor", "--json").stdout)
    older = "the certificate's rows are older than the alarm of version 1"
    assert older in standing["void"]
    assert f"there is no guarantee: {older}" in " ".join(run("monitor").output.split())
    assert f"none: {older}" in " ".join(run("monitor", "support").output.split())
    run("report", "support", "--month", MONTH, "-o", "report.html")
    text = " ".join(Page("report.html").text.split())
    assert re.search(r"by a hasty hand.* This promise is void.*" + older.capitalize(), text)


def test_the_money_of_a_report_adds_up(run, database):
    run("report", "support", "--month", MONTH, "-o", "report.html")
    text = " ".join(Page("report.html").text.split())
    decisions, guardian = (
        int(re.search(rf"{words} ([\d,]+)", text)[1].replace(",", ""))
        for words in ("Recorded decisions", "Decided by the Guardian")
    )
    assert decisions == 1862
    spent = float(re.search(r"Spent on decisions \$([\d,.]+)", text)[1].replace(",", ""))
    assert spent == pytest.approx(0.5 * guardian + 0.0002 * decisions, abs=0.006)
    saved, always = re.search(r"Saved \$([\d,.]+) of \$([\d,.]+)", text).groups()
    assert float(always.replace(",", "")) == pytest.approx(0.5 * decisions)
    assert float(saved.replace(",", "")) == pytest.approx(0.5 * decisions - spent, abs=0.02)


def test_nothing_that_someone_wrote_becomes_markup_and_nothing_is_loaded(run, database):
    run("report", "support", "--month", MONTH, "-o", "report.html")
    page = Page("report.html")
    assert 'the prompt was <b>"taken back"</b> & tested' in " ".join(page.text.split())
    assert not {"b", "script", "img", "link", "iframe", "a", "key"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith(("on", "src", "href"))]
    content = Path("report.html").read_text()
    assert "default-src 'none'" in content
    assert "url(" not in content.replace("url(#inside)", "")
    assert "http" not in content.replace("http-equiv", "")


def test_a_report_without_prices_says_so(run):
    Path("arbitrage.toml").write_text(CONFIGURATION)
    ProjectSecret.create(Path())
    written(lambda store: fill(store, cost=False))
    run("report", "support", "--month", MONTH, "-o", "report.html")
    text = " ".join(Page("report.html").text.split())
    assert "Spent on decisions unknown" in text
    assert "unknown: no call of the Guardian has a known price" in text


def test_a_report_of_a_month_without_anything_is_a_page_too(run, database):
    run("report", "support", "--month", "2020-01", "-o", "report.html")
    text = " ".join(Page("report.html").text.split())
    for words in (
        "No certificate was in force",
        "No decision was drawn for an audit",
        "There was none.",
        "There is none.",
    ):
        assert words in text


def test_red_missing_and_unwatched_policies_have_their_report(run, database):
    written(alarming)
    run("report", "support", "--month", MONTH, "-o", "report.html")
    text = " ".join(Page("report.html").text.split())
    assert "State red" in text
    assert "Reason the loss is above the red line" in text
    assert "until this is settled. The loss is above the red line." in text
    assert "60 missing" in text
    run("report", "careful", "--month", MONTH, "-o", "careful.html")
    assert "No decision was drawn for an audit" in Page("careful.html").text


def test_a_record_that_was_changed_is_reported_and_fails(run, database):
    import sqlite3

    with sqlite3.connect(database) as connection:
        connection.execute("update events set body = replace(body, '0.5', '0.4') where seq = 5")
    connection.close()
    shown = run("report", "support", "--month", MONTH, "-o", "report.html", code=1)
    assert "warning" in shown.stderr
    assert "The record does not verify" in Page("report.html").text


def test_months_are_calendar_months():
    december = Month.of("2026-12")
    assert december.title == "December 2026"
    assert (december.end - december.start) / 86400 == 31
    assert december.has(december.start)
    assert not december.has(december.end)
    assert not december.has(None)


def test_reading_creates_no_database(run):
    Path("arbitrage.toml").write_text(CONFIGURATION)
    for command in (("monitor",), ("report", "support", "--month", MONTH, "-o", "x.html")):
        assert "there is no database at" in run(*command, code=2).stderr
    assert not Path("decisions.sqlite").exists()
    run("keys", "list")
    assert "No certificate is installed yet." in run("monitor").output
