"""Polls: a page learns of every change after it was made, and asking is no sign that someone is there."""

import json
import re
import sqlite3
from contextlib import closing

from tests.console.filled import Visit
from tests.gateway.house import House, until

POLL = {"X-Poll": "1"}


def since_of(page):
    return re.search(r'data-since="([^"]+)"', page.text).group(1)


def test_what_happened_after_a_page_was_made_changes_the_reply_to_its_polls(house):
    gate = house(House, policy={"audit_rate": 1.0})
    visit = Visit(gate)
    since = since_of(visit.open("/console"))
    assert visit.open("/console/changes").text == since
    gate.decide()
    until(lambda: visit.open("/console/changes").text != since)
    policies, figures, queue = visit.open("/console/changes").text.split("-")
    assert (policies, queue) == (since.split("-")[0], since.split("-")[2])
    assert figures != since.split("-")[1]


def move_back(gate, seconds):
    """Let everybody's last page be so many seconds older; return when it was."""
    with closing(sqlite3.connect(gate.folder / "arbitrage.sqlite", isolation_level=None)) as database:
        database.execute("update sign_ins set seen = seen - ?", (seconds,))
        return database.execute("select seen from sign_ins").fetchone()[0]


def test_polls_do_not_keep_anyone_signed_in(house):
    gate = house(House)
    visit = Visit(gate, gate.key("review")[0])
    seen = move_back(gate, 3000)
    for path in ("/console/changes", "/console"):  # whether something changed, and then the page again
        assert visit.open(path, headers=POLL).status_code == 200
    assert move_back(gate, 0) == seen
    move_back(gate, 700)
    reply = visit.open("/console/changes", headers=POLL, allow_redirects=False)
    assert reply.headers["location"] == "/console/sign-in?why=over"


def test_a_page_that_someone_opens_keeps_them_signed_in(house):
    gate = house(House)
    visit = Visit(gate, gate.key("review")[0])
    seen = move_back(gate, 3000)
    assert visit.open("/console").status_code == 200
    assert move_back(gate, 0) > seen


def test_a_page_whose_visitor_was_signed_out_leads_to_the_sign_in(house, open_page):
    gate = house(House)
    page = open_page(gate.url + "/console/sign-in")
    page.fill("#key", gate.key("operate")[0])
    page.press("#key", "Enter")
    page.wait_for_url(gate.url + "/console")
    move_back(gate, 3700)
    page.wait_for_url(gate.url + "/console/sign-in?why=over")


def test_polls_write_no_lines_into_the_log_unless_they_fail(house):
    gate = house(House)
    visit = Visit(gate, gate.key("review")[0])
    visit.open("/console")
    for _ in range(3):
        assert visit.open("/console/changes").status_code == 200
    assert visit.open("/console/changes", headers={"Host": "elsewhere.example"}).status_code >= 400
    until(lambda: "GET /console/changes" in routes(gate))
    assert "GET /console" in routes(gate)
    assert routes(gate).count("GET /console/changes") == 1


def routes(gate):
    return [json.loads(line)["route"] for line in gate.lines]
