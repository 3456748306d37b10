"""Links to questions: what they show, what they are good for, and everything they are not."""

import base64
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from conformal_arbitrage.gateway import grading, reviewing
from conformal_arbitrage.gateway.review_links import ReviewLinks
from conformal_arbitrage.gateway.server import secret_of
from conformal_arbitrage.store import new_id, review_links
from conformal_arbitrage.store.review_base import NewReview, ReviewQuestion
from tests.console.filled import EVIL, Visit, token_of
from tests.console.test_browser import violations
from tests.console.test_review import sign_in
from tests.gateway.approving import FEWER, ApprovingHouse, arguments_of, message_of
from tests.gateway.house import CHAT, UNSURE, error_of, says, until, votes
from tests.gateway.people import LONG, TEAM, GradingHouse, Later, PeopleHouse

ROOT = Path(__file__).parents[2]
SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
NOWHERE = "http://127.0.0.1:9/"


@pytest.fixture
def gate(house, monkeypatch):
    """Start a gateway that sends links, with keys; questions are due at once."""
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    monkeypatch.setattr(reviewing, "_CALL_EVERY", 0.2)

    def start(kind=PeopleHouse, url=NOWHERE, **options):
        hook = {"url": url, "secret_env": "HOOK_SECRET", "events": ["review.link"]}
        given = {"members": ("ann", "bob"), "review": {"wait": 1.0, "undo": 0.0}}
        given |= {"primary": votes(*UNSURE)} if kind is PeopleHouse else {}
        public = {"public_url": "http://127.0.0.1:9"}
        one = house(kind, **{**given, **options}, gateway=public, **{"gateway.webhooks.pager": hook})
        one.secrets = {name: one.key("review", name) for name in one.members}
        one.headers = one.keyed("call")
        one.signer = ReviewLinks(secret_of(one.config).keys[0], None)
        return one

    return start


def words(reply):
    """The text of a page, whatever its status."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", reply.text)).split())


def asked(one, key="k"):
    call = Later(lambda: one.decide(headers={**one.headers, "Idempotency-Key": key}))
    until(lambda: one.with_store(lambda store: store.open_places()), LONG)
    return call


def sent(one):
    """The messages with links so far, as their receiver gets them."""
    found = one.with_store(lambda store: store.deliveries(limit=100))
    return [json.loads(one.signer.message(each))["data"] for each in reversed(found)]


def link(one, reviewer="ann"):
    """The path of the newest link for somebody, once there is one."""
    mine = until(lambda: [data for data in sent(one) if data["reviewer"] == reviewer], LONG)
    return mine[-1]["url"]  # without an address of its own here


def test_a_link_shows_the_question_and_its_form_votes_once(gate):
    one = gate()
    asked(one).result()
    path, visit = link(one), Visit(one)
    before = one.with_store(lambda store: store.present_reviewers(["ann"]))
    for _ in range(3):  # whatever looks at links in messages
        page = visit.open(path)
        assert visit.head(one.url + path, timeout=60).status_code == 200
    assert one.with_store(lambda store: store.present_reviewers(["ann"])) == before == frozenset()
    assert ("A letter." in words(page), "Sign out" in words(page)) == (True, False)
    assert page.headers["referrer-policy"] == "same-origin"
    assert page.headers["cache-control"] == "no-store"
    assert path.rpartition("/")[2] not in page.text
    unsure = visit.send_form(path, page)
    assert (unsure.status_code, "Choose one of the options first" in words(unsure)) == (422, True)
    assert visit.send_form(path, page, choice="7").status_code == 422
    done = visit.send_form(path, page, choice="1")
    assert (done.status_code, "Recorded" in words(done)) == (200, True)
    reply = until(lambda: given(one), LONG)
    assert reply.json()["answers"][0]["choice"] == "b"
    again = visit.send_form(path, page, choice="2")
    assert (again.status_code, "has been used" in words(again)) == (410, True)
    assert visit.open(path).status_code == 410
    [record] = one.records()
    assert [(vote.reviewer, vote.choice) for vote in record.completion.review.votes] == [("ann", 1)]
    other = visit.open(link(one, "bob"))
    assert (other.status_code, "no longer open" in words(other)) == (410, True)
    assert one.with_store(lambda store: store.verify()) == []


def given(one, key="k"):
    reply = one.decide(headers={**one.headers, "Idempotency-Key": key})
    return reply if reply.status_code == 200 else None


def test_nothing_that_is_stored_or_logged_can_vote(gate):
    one = gate()
    asked(one).result()
    token = link(one).rpartition("/")[2]
    Visit(one).open(link(one))
    one.stop()
    files = [path.read_bytes() for path in one.folder.iterdir()]
    assert not any(token.encode() in content for content in files)
    assert not any(token[:40].encode() in bytes(line) for line in one.lines)
    assert not any(b"/console/links/" in content for content in files)


def test_hostile_links_are_refused_in_plain_words(gate):
    one = gate()
    asked(one).result()
    path, visit = link(one), Visit(one)
    token = path.rpartition("/")[2]
    page = visit.open(path)
    [found] = [data for data in stored(one) if data["reviewer"] == "ann"]
    right = (found["link"], found["item"], "ann", found["expires_at"])
    assert one.signer.token(*right) == token
    forged = [
        one.signer.token(right[0], new_id(), *right[2:]), one.signer.token(*right[:2], "bob", right[3]),
        one.signer.token(*right[:3], right[3] + 9999), one.signer.token("0" * 32, *right[1:]),
        ReviewLinks(b"x" * 32, None).token(*right), token[:-4] + ("AAAA" if token[-4:] != "AAAA" else "BBBB"),
        token[:-1], token + "AAAA", "x", "%00", "\u00e9", token.swapcase(), "A" * 3000,
    ]  # fmt: skip
    for wrong in forged:
        for reply in (visit.open(f"/console/links/{wrong}"), post(visit, one, wrong, page)):
            assert reply.status_code == 404, wrong
            assert "This link is not valid" in words(reply)
    assert not one.with_store(lambda store: store.cast_votes())
    assert visit.open(path).status_code == 200


def turn_of(page):
    return re.search(r'name="turn" value="(\d+)"', page.text)[1]


def acted(visit, path, page, act, **fields):
    """Send the form of a page, as a browser does."""
    return visit.send_form(path, page, turn=turn_of(page), act=act, **fields)


@pytest.mark.parametrize("purpose", ["grade", "choose"])
def test_every_page_of_a_link_is_the_same_whatever_the_question_is_for(gate, monkeypatch, purpose):
    """Byte for byte, from opening it to leaving the question to someone else."""
    monkeypatch.setattr(review_links, "present_reviewers", lambda *_: frozenset())
    one = gate(members=("ann",))
    visit, seen = Visit(one), []
    graded = {"grader": {"kind": "human"}, "places": tuple(range(9)), "size": 9} if purpose == "grade" else {}
    question = ReviewQuestion(
        context="Which?", options=("a", "b"), **{"places": (0, 1), "size": 2, **graded}, instructions="Be strict."
    )
    answer = {"grade-1": "1", "grade-2": "0.5"} if graded else {"choice": "1"}
    for number, kind in enumerate(("grade", "overlap") if graded else ("decide", "audit", "overlap"), 1):
        terms = {"policy": "support", "team": TEAM, "protocol": "p", "identities_sha256": "i", "undo": 60.0}
        item = NewReview(decision=new_id(), purpose=kind, question=question, due=-1.0, **terms)
        one.with_store(lambda store, item=item: store.put_reviews([item]))
        path = until(lambda number=number: len(sent(one)) == number and link(one), LONG)
        pages = [visit.open(path)]
        pages.append(acted(visit, path, pages[-1], "vote"))
        pages.append(acted(visit, path, pages[-1], "vote", **answer))
        pages.append(visit.open(path))
        pages.append(acted(visit, path, pages[-1], "undo"))
        pages.append(acted(visit, path, pages[0], "vote", **answer))
        pages.append(acted(visit, path, pages[-1], "skip"))
        pages.append(visit.open(path))
        seen.append([(page.status_code, page.text) for page in pages])
    assert [status for status, _ in seen[0]] == [200, 422, 200, 200, 200, 409, 200, 410]
    assert all(pages == seen[0] for pages in seen)


def test_a_vote_by_link_is_taken_back_before_it_counts_and_never_cast_twice(gate):
    one = gate(review={"wait": 1.0, "undo": 60.0})
    asked(one).result()
    path, visit = link(one), Visit(one)
    first = visit.open(path)
    for _ in range(2):  # the second is the browser's reload
        done = acted(visit, path, first, "vote", choice="1")
        assert (done.status_code, "Recorded" in words(done)) == (200, True)
    back = acted(visit, path, done, "undo")
    assert ("Taken back." in words(back), "A letter." in words(back), turn_of(back)) == (True, True, "1")
    old = acted(visit, path, first, "vote", choice="1")
    assert (old.status_code, "older than your last step" in words(old)) == (409, True)
    assert acted(visit, path, first, "skip").status_code == 409
    assert "A letter." in words(acted(visit, path, done, "undo"))
    assert [vote for vote in one.with_store(lambda store: store.cast_votes()) if not vote.skipped] == []
    done = acted(visit, path, back, "vote", choice="2")
    assert "Recorded" in words(acted(visit, path, first, "undo"))
    for odd in ("-1", "x", "9" * 40, "\u0661"):
        assert visit.send_form(path, done, act="undo", turn=odd).status_code == 200
    cast = one.with_store(lambda store: store.cast_votes())
    assert [(vote.reviewer, vote.skipped) for vote in cast] == [("ann", False)]
    one.with_store(lambda store: store.revoke_key(one.secrets["ann"][1]))
    gone = acted(visit, path, done, "undo")
    assert (gone.status_code, "has been used" in words(gone)) == (410, True)
    assert one.with_store(lambda store: store.verify()) == []


def test_who_cannot_tell_leaves_the_question_to_someone_else(gate):
    one = gate()
    asked(one).result()
    path, visit = link(one), Visit(one)
    left = acted(visit, path, visit.open(path), "skip")
    assert (left.status_code, "Left to someone else" in words(left)) == (200, True)
    again = visit.open(path)
    assert (again.status_code, "You left the question" in words(again)) == (410, True)
    bobs = link(one, "bob")
    assert acted(visit, bobs, visit.open(bobs), "vote", choice="2").status_code == 200
    assert until(lambda: given(one), LONG).json()["answers"][0]["choice"] == "c"


def test_answers_are_graded_by_link_and_whose_they_are_is_not_told(gate, monkeypatch):
    monkeypatch.setattr(grading, "_DUE", -1.0)
    monkeypatch.setattr(review_links, "present_reviewers", lambda *_: frozenset())

    def pages(primary, guardian):
        one = gate(
            GradingHouse, primary=says(primary, 0.9), guardian=says(guardian), members=("ann",), certificate=False,
            policy={"mode": "shadow", "audit_rate": 0.0}, review={"undo": 0.0},
        )  # fmt: skip
        visit, found, number = Visit(one), set(), 0
        while len(found) < 2:  # the order is drawn by the id, which is new every time
            number += 1
            assert one.chat(CHAT).status_code == 200
            path = until(lambda number=number: len(sent(one)) == number and link(one), LONG)
            page = visit.open(path)
            found.add(page.text.replace(token_of(page.text), "CSRF"))  # which every gateway has its own of
            short = acted(visit, path, page, "vote", **{"grade-1": "1"})
            assert (short.status_code, 'value="1" required checked' in short.text) == (422, True)
            mine = "1" if page.text.index("mine") < page.text.index("theirs") else "2"
            grades = {"grade-1": "0", "grade-2": "0", f"grade-{mine}": "0.5"}
            assert "Recorded" in words(acted(visit, path, page, "vote", **grades))
        given = until(lambda: (records := one.records()) and all(r.feedback for r in records) and records, LONG)
        assert {(r.feedback[0].grades.primary, r.feedback[0].grades.guardian) for r in given} == {
            (0.5, 0.0) if primary == "mine" else (0.0, 0.5)
        }
        return found

    assert pages("mine", "theirs") == pages("theirs", "mine")


def test_an_administrator_sees_what_is_out_and_revokes_it(gate):
    one = gate()
    asked(one).result()
    ann, bob = link(one), link(one, "bob")
    team, admin = "/console/team", Visit(one, one.key("admin", "root")[0])
    page = admin.open(team)
    assert "Outstanding links" in words(page)
    assert page.text.count('name="id"') == 2
    assert not [path for path in (ann, bob) if path.rpartition("/")[2] in page.text]
    assert "Outstanding links" not in words(Visit(one, one.secrets["ann"][0]).open(team))
    reviewer = Visit(one, one.secrets["ann"][0])
    assert reviewer.send_form(f"{team}/links", reviewer.open(team), team=TEAM).status_code == 403
    elsewhere = admin.post(f"{one.url}{team}/links", data={"csrf": "0" * 64, "team": TEAM}, timeout=60)
    assert elsewhere.status_code == 403
    for nothing in ({}, {"id": "x"}, {"team": "other"}, {"id": "", "team": ""}):
        assert admin.send_form(f"{team}/links", page, **nothing).status_code == 200
    assert (admin.open(ann).status_code, admin.open(bob).status_code) == (200, 200)
    [row] = re.findall(
        r'value="(\w{32})">[^/]*?<div', page.text.partition("the link of ann?")[2].partition("</form>")[0]
    )
    after = admin.send_form(f"{team}/links", page, id=row)
    assert ("the link of ann" in words(after), "the link of bob" in words(after)) == (False, True)
    assert (admin.open(ann).status_code, admin.open(bob).status_code) == (410, 200)
    after = admin.send_form(f"{team}/links", page, team=TEAM)
    assert "Outstanding links" not in words(after)
    assert admin.open(bob).status_code == 410


def test_revoking_all_links_closes_one_whose_vote_could_still_be_taken_back(gate):
    one = gate(review={"wait": 1.0, "undo": 60.0})
    asked(one).result()
    path, visit = link(one), Visit(one)
    done = visit.send_form(path, visit.open(path), choice="1")
    assert "Recorded" in words(done)
    admin = Visit(one, one.key("admin", "root")[0])
    assert admin.send_form("/console/team/links", admin.open("/console/team"), team=TEAM).status_code == 200
    back = acted(visit, path, done, "undo")
    assert (back.status_code, "A letter." in words(back)) == (410, False)  # and the vote counts in time


def post(visit, one, token, page):
    form = {"csrf": token_of(page.text), "choice": "1"}
    return visit.post(f"{one.url}/console/links/{token}", data=form, timeout=60, allow_redirects=False)


def stored(one):
    found = one.with_store(lambda store: store.deliveries(limit=100))
    return [json.loads(each.body)["data"] for each in found]


def test_another_page_cannot_vote(gate):
    one = gate()
    asked(one).result()
    path = link(one)
    form = {"csrf": token_of(Visit(one).open(path).text), "choice": "1"}
    for headers, fields in (
        ({"Sec-Fetch-Site": "cross-site"}, form), ({"Sec-Fetch-Site": "same-site"}, form),
        ({"Origin": "http://evil.example"}, form), ({}, form),
        ({"Sec-Fetch-Site": "same-origin"}, {**form, "csrf": "0" * 64}),
        ({"Sec-Fetch-Site": "same-origin"}, {"choice": "1"}),
    ):  # fmt: skip
        assert requests.post(one.url + path, data=fields, headers=headers, timeout=60).status_code == 403
    as_json = {"Content-Type": "application/json", "Sec-Fetch-Site": "same-origin"}
    assert requests.post(one.url + path, data="{}", headers=as_json, timeout=60).status_code == 415
    assert requests.get(one.url + path, headers={"Host": "evil.example"}, timeout=60).status_code == 403
    assert not one.with_store(lambda store: store.cast_votes())


def test_a_link_waits_while_someone_else_has_the_question(gate):
    one = gate()
    asked(one).result()
    path, visit = link(one), Visit(one)
    page = visit.open(path)
    bob = one.reviewer("bob")
    held = bob.wait()
    for reply in (visit.open(path), visit.send_form(path, page, choice="1")):
        assert (reply.status_code, "Someone else has this question" in words(reply)) == (409, True)
    bob.post(f"{held['token']}/return")
    assert visit.send_form(path, page, choice="1").status_code == 200
    assert until(lambda: given(one), LONG).json()["answers"][0]["choice"] == "b"


def test_links_end_with_the_key_the_team_and_by_command(gate):
    one = gate()
    asked(one).result()
    path, visit, admin = link(one), Visit(one), one.keyed("admin")
    page = visit.open(path)
    revoke = "/v1/arbitrage/reviews/links/revoke"
    error_of(one.post(revoke, {}, headers=one.keyed("review")), 403)
    assert one.post(revoke, {"reviewer": "cid"}, headers=admin).json() == {"revoked": 0}
    assert one.post(revoke, {"reviewer": "ann"}, headers=admin).json() == {"revoked": 1}
    gone = visit.send_form(path, page, choice="1")
    assert (gone.status_code, "was revoked" in words(gone)) == (410, True)
    bobs = link(one, "bob")
    assert visit.open(bobs).status_code == 200
    one.with_store(lambda store: store.revoke_key(one.secrets["bob"][1]))
    for reply in (visit.open(bobs), visit.send_form(bobs, page, choice="1")):
        assert reply.status_code == 410
        assert "A letter." not in reply.text
    assert not one.with_store(lambda store: store.cast_votes())


def test_a_link_can_edit_a_tool_call(gate):
    one = gate(ApprovingHouse)
    one.ask_for(key="k").result()
    path, visit = link(one), Visit(one)
    page = visit.open(path)
    assert "May this call be made?" in words(page)
    wrong = visit.send_form(path, page, choice="1", **{"arguments-0": '{"order": 1}'})
    assert (wrong.status_code, "must have" in words(wrong)) == (422, True)
    assert visit.send_form(path, wrong, choice="1", **{"arguments-0": FEWER}).status_code == 200
    reply = until(lambda: done(one.ask_for(key="k").result()), LONG)
    assert arguments_of(message_of(reply)[0]) == {"order": "A-17", "amount": 90}


def done(reply):
    return reply if reply.status_code == 200 else None


def test_the_example_receiver_passes_a_link_on_and_it_works(gate):
    command = [sys.executable, ROOT / "examples" / "webhook_receiver.py", "0"]
    with subprocess.Popen(
        command, env={**os.environ, "WEBHOOK_SECRET": SECRET}, stdout=subprocess.PIPE, text=True
    ) as receiver:
        try:
            port = receiver.stdout.readline().split()[-1]
            one = gate(url=f"http://127.0.0.1:{port}/", members=("ann",))
            asked(one).result()
            line = receiver.stdout.readline()
            path = re.fullmatch(
                r"to ann: a question of support waits for you, http://127.0.0.1:9(/console/links/\S+)\n", line
            )[1]
            visit = Visit(one)
            assert visit.send_form(path, visit.open(path), choice="2").status_code == 200
            assert until(lambda: given(one), LONG).json()["answers"][0]["choice"] == "c"
        finally:
            receiver.kill()


def test_the_page_is_readable_and_its_form_works_in_a_browser(gate, open_page):
    one = gate(policy={"content": "full"}, review={"wait": 1.0, "undo": 60.0})
    body = {"model": "support", "input": f"{EVIL[1]} A letter.", "questions": [QUESTION]}
    Later(lambda: one.decide(body, headers={**one.headers, "Idempotency-Key": "k"})).result()
    page = open_page(one.url + link(one), width=390, height=844, dark=True)
    assert violations(page) == []
    page.keyboard.press("Tab")
    page.check(f"text={EVIL[0]}")
    page.click("text=Confirm")
    page.wait_for_selector("text=Recorded")
    assert violations(page) == []
    page.click("text=Undo")
    page.wait_for_selector("text=Taken back.")
    assert violations(page) == []
    page.click("text=Cannot tell")
    page.wait_for_selector("text=Left to someone else")
    assert violations(page) == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_links_are_revoked_in_a_browser_without_scripts(gate, open_page, width, dark):
    one = gate()
    one.secrets = {"root": one.key("admin", "root")[0]}
    asked(one).result()
    link(one)
    page = open_page(width=width, height=844, dark=dark, java_script_enabled=False)
    sign_in(page, one, "root")
    page.goto(one.url + "/console/team")
    page.click("text=Revoke the link of ann")
    page.wait_for_selector("dialog[open]")
    page.click("dialog[open] button.bad")
    page.wait_for_selector("text=Outstanding links")
    assert page.locator("text=Revoke the link of ann").count() == 0
    page = open_page(width=width, height=844, dark=dark)
    sign_in(page, one, "root")
    page.goto(one.url + "/console/team")
    assert violations(page) == []
    page.click("text=Revoke the link of bob")
    assert violations(page, context="dialog[open]") == []


QUESTION = {"type": "choice", "instructions": "Which?", "choices": [{"value": one} for one in (EVIL[0], "b", "c")]}
