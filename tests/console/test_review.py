"""Reviewing in the console: by forms, by three keys in a real browser, and blind to why a question is asked."""

import json
import re

import pytest
from click.testing import CliRunner

from conformal_arbitrage.cli import cli
from conformal_arbitrage.store import reviews
from tests.console.filled import EVIL, Visit
from tests.console.test_browser import carry_cookies, violations
from tests.console.test_pages import words
from tests.gateway.durability import run_sql
from tests.gateway.house import until, votes
from tests.gateway.people import LONG, Later

CHOICES = ("Billing", EVIL[0], EVIL[4])
BODY = {
    "model": "support",
    "input": f"{EVIL[1]} I was charged twice.",
    "questions": [{"type": "choice", "instructions": "Which team?", "choices": [{"value": one} for one in CHOICES]}],
}


def asked(gate, body=BODY):
    call = Later(lambda: gate.decide(body))
    until(lambda: gate.with_store(lambda store: store.run(reviews.open_places)), LONG)
    return call


def begin(gate, name):
    """Somebody with their first question."""
    visit = Visit(gate, gate.secrets[name])
    page = visit.open("/console/review")
    assert "one question at a time" in page.text
    return visit, visit.send_form("/console/review", page, act="next")


def next_question(visit):
    """Wait until someone is given a question; return its page."""
    start = visit.open("/console/review")

    def given():
        page = visit.send_form("/console/review", start, act="next")
        return [page] if "data-token" in page.text else []

    [page] = until(given, LONG)
    return page


def token(page):
    return re.search(r'data-token="([^"]+)"', page.text).group(1)


def test_a_question_is_decided_by_forms_alone(crew):
    gate = crew()
    call = asked(gate)
    visit, page = begin(gate, "ann")
    assert "Which team?" in words(page)
    assert "<img" not in page.text
    after = visit.send_form("/console/review", page, act="vote", token=token(page), choice="0")
    assert "Recorded." in after.text
    assert "Nothing to review" in after.text
    assert call.result().json()["answers"][0]["choice"] == CHOICES[0]
    assert "1 done today" in words(after)
    again = visit.send_form("/console/review", page, act="vote", token=token(page), choice="1")
    assert again.status_code == 200  # the same token twice is one vote
    [record] = gate.records()
    assert record.decision.action == 0


def test_an_item_of_a_batch_is_labelled_by_forms_without_the_machines_label(crew, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    gate = crew()
    monkeypatch.chdir(gate.folder)
    lines = [f"item-{k},{EVIL[1]} {k},{'spam' if k % 2 else 'ham'},0.9" for k in range(20)]
    (gate.folder / "mails.csv").write_text("\n".join(["id,text,answer,confidence", *lines]) + "\n")
    draw = ["batch", "draw", "mails.csv", "--error", "0.1", "--sample", "1", "-o", "mails", "--review", "support team"]
    assert CliRunner().invoke(cli, draw).exit_code == 0
    visit, page = begin(gate, "ann")
    assert "Which label is right?" in words(page)
    assert re.findall(r'<span dir="auto">(\w+)</span>', page.text) == ["ham", "spam"]
    assert "<img" not in page.text
    assert "badge" not in page.text
    assert "0.9" not in page.text
    visit.send_form("/console/review", page, act="vote", token=token(page), choice="1")
    for change in ("update votes set counts = 0", "update reviews set ready = 0"):
        run_sql(str(gate.folder / "arbitrage.sqlite"), change)
    certify = ["batch", "certify", "mails", "--json"]
    until(lambda: not json.loads(CliRunner().invoke(cli, certify).stdout)["without_verdict"], LONG)
    assert (gate.folder / "mails" / "sample.csv").read_text().splitlines()[1].endswith(",spam")


def test_a_vote_is_taken_back_until_it_counts(crew):
    gate = crew(review={"undo": 60.0})
    asked_for = asked(gate)
    visit, page = begin(gate, "ann")
    after = visit.send_form("/console/review", page, act="vote", token=token(page), choice="0")
    assert 'value="undo"' in after.text
    back = visit.send_form("/console/review", after, act="undo", token=token(page))
    assert "Taken back." in back.text
    assert "Which team?" in words(back)
    paused = visit.send_form("/console/review", back, act="pause", token=token(back))
    assert "Paused" in paused.text
    other, theirs = begin(gate, "bob")
    skipped = other.send_form("/console/review", theirs, act="skip", token=token(theirs))
    assert "Left to someone else." in skipped.text
    assert not asked_for.done
    again = next_question(visit)
    visit.send_form("/console/review", again, act="vote", token=token(again), choice="1")
    for change in ("update votes set counts = 0 where withdrawn is null", "update reviews set ready = 0"):
        run_sql(str(gate.folder / "arbitrage.sqlite"), change)
    assert asked_for.result().json()["answers"][0]["choice"] == CHOICES[1]


def test_two_people_do_not_hold_one_question(crew):
    gate = crew()
    call = asked(gate)
    ann, page = begin(gate, "ann")
    _, theirs = begin(gate, "bob")
    assert "Nothing to review" in theirs.text
    renewed = ann.post(
        f"{gate.url}/console/review/renew", data={"token": token(page)}, timeout=60,
        headers={"X-CSRF-Token": re.search(r'name="csrf" value="(\w+)"', page.text).group(1)},
    )  # fmt: skip
    assert renewed.status_code == 204
    ann.send_form("/console/review/return", page, token=token(page))
    bob, theirs = begin(gate, "bob")
    assert ann.send_form("/console/review/renew", page, token=token(page)).status_code == 409
    bob.send_form("/console/review", theirs, act="vote", token=token(theirs), choice="2")
    assert call.result().status_code == 200


def test_a_vote_for_nothing_is_refused(crew):
    gate = crew()
    call = asked(gate)
    visit, page = begin(gate, "ann")
    for choice in ("", "x", "9", "-1", "0.5", "9" * 5000):
        reply = visit.send_form("/console/review", page, act="vote", token=token(page), choice=choice)
        assert reply.status_code == 422, choice
    visit.send_form("/console/review", page, act="vote", token=token(page), choice="0")
    assert call.result().status_code == 200


def test_who_is_on_no_team_is_told_so(crew):
    gate = crew()
    visit = Visit(gate, gate.secrets["cid"])
    assert "on no team" in words(visit.open("/console/review"))
    assert visit.send_form("/console/review", visit.open("/console/review"), act="next").status_code == 403


def test_a_record_is_hidden_while_people_decide_and_an_administrator_who_looks_cannot_vote(crew):
    gate = crew()
    call = asked(gate)
    [record] = gate.records()
    reviewer = Visit(gate, gate.secrets["ann"])
    assert reviewer.open(f"/console/decisions/{record.id}").status_code == 404
    assert record.id not in reviewer.open("/console/decisions").text
    lead = Visit(gate, gate.secrets["lea"])
    assert "to stand alone" in words(lead.open(f"/console/decisions/{record.id}"))
    theirs = lead.send_form("/console/review", lead.open("/console/review"), act="next")
    assert "Nothing to review" in theirs.text
    visit, page = begin(gate, "ann")
    visit.send_form("/console/review", page, act="vote", token=token(page), choice="0")
    call.result()


def test_the_team_page_says_what_waits_and_how_people_do(crew):
    gate = crew()
    call = asked(gate)
    visit, page = begin(gate, "ann")
    text = words(Visit(gate, gate.secrets["lea"]).open("/console/team"))
    assert "1 question waits for 1 more vote" in text
    assert "1 present" in text
    operator = Visit(gate, gate.key("operate")[0])
    assert "Waiting for a person 1" in words(operator.open("/console"))
    visit.send_form("/console/review", page, act="vote", token=token(page), choice="0")
    call.result()
    text = words(visit.open("/console/team"))
    assert "Nothing waits." in text
    assert re.search(r"ann 1 [\d.]+ s", text)
    assert not re.search(r"ann 1 [\d.]+ s", words(Visit(gate, gate.secrets["bob"]).open("/console/team")))
    assert re.search(r"ann 1 [\d.]+ s", words(Visit(gate, gate.secrets["lea"]).open("/console/team")))
    assert "You are on no team" in words(Visit(gate, gate.secrets["cid"]).open("/console/team"))
    assert "Who is on the team may change" in words(operator.open("/console/policies/support"))


def sign_in(page, gate, name):
    carry_cookies(Visit(gate, gate.secrets[name]), page)
    page.goto(gate.url + "/console/review")
    return page


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["desk, light", "phone, dark"])
def test_three_keys_decide_and_the_next_question_comes_by_itself(crew, open_page, width, dark):
    gate = crew(review={"undo": 0.5})
    page = sign_in(open_page(width=width, dark=dark), gate, "ann")
    assert violations(page) == []
    page.keyboard.press("Enter")
    page.wait_for_selector("#begin[data-waiting]")
    assert violations(page) == []
    call = Later(lambda: gate.decide(BODY))
    page.wait_for_selector("#item")  # by itself
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelectorAll('#item img').length") == 0
    page.keyboard.press("2")
    assert page.locator("input[name=choice]:checked").get_attribute("value") == "1"
    page.keyboard.press("Enter")
    page.wait_for_selector("#begin[data-waiting]")
    assert "owned" not in page.title()
    assert call.result().json()["answers"][0]["choice"] == CHOICES[1]
    page.keyboard.press("?")
    assert page.locator("#keys[open]").count() == 1
    assert violations(page, "#keys") == []


def test_leaving_the_page_returns_the_question(crew, open_page):
    gate = crew()
    call = asked(gate)
    page = sign_in(open_page(), gate, "ann")
    page.keyboard.press("Enter")
    page.wait_for_selector("#item")
    page.goto(gate.url + "/console")
    visit = Visit(gate, gate.secrets["bob"])
    theirs = next_question(visit)
    visit.send_form("/console/review", theirs, act="vote", token=token(theirs), choice="0")
    assert call.result().status_code == 200


def test_many_options_are_filtered(crew, open_page):
    gate = crew()
    body = {**BODY, "questions": [{**BODY["questions"][0], "choices": [{"value": f"team {k}"} for k in range(40)]}]}
    gate.primary.reply = votes(0.5, 0.4, 0.1)
    call = asked(gate, body)
    page = sign_in(open_page(), gate, "ann")
    page.keyboard.press("Enter")
    page.wait_for_selector("#item")
    page.keyboard.press("/")
    page.keyboard.type("team 37")
    assert page.locator(".option:visible").count() == 1
    page.keyboard.press("Enter")
    page.keyboard.press("Space")
    page.keyboard.press("Enter")
    page.wait_for_selector("#begin")
    assert call.result().json()["answers"][0]["choice"] == "team 37"
