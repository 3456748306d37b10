"""Every state of the pages in a real browser: accessible in both colours and widths; lost connections, long and odd text."""

import os
from itertools import cycle

import pytest

from conformal_arbitrage.store import reviews
from tests.console.filled import EVIL, Visit, as_json
from tests.console.test_browser import OPEN_DETAILS, violations
from tests.console.test_review import BODY, asked, next_question, sign_in, token
from tests.gateway.durability import run_sql
from tests.gateway.house import House, until, votes
from tests.gateway.people import LONG, Later
from tests.receiver import Receiver

LOOKS = ((1280, "light"), (390, "dark"), (1280, "dark"), (390, "light"))
EVERY_LOOK = "EVERY_LOOK" in os.environ


@pytest.fixture
def accessible():
    """Look at the states of pages, each at one width and in one colour, in turn; with EVERY_LOOK set, at all four."""
    looks = cycle(LOOKS)

    def look(page, what):
        page.evaluate(OPEN_DETAILS)
        for width, colours in LOOKS if EVERY_LOOK else [next(looks)]:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=colours)
            assert violations(page) == [], (what, width, colours)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (what, width)

    return look


def test_every_state_of_reviewing_is_accessible(crew, open_page, accessible):
    gate = crew(review={"wait": 1.0, "undo": 60.0}, human={"primary_choice": "shown", "instructions": EVIL[0]})
    page = sign_in(open_page(), gate, "ann")
    accessible(page, "ready")
    call = asked(gate)
    page.get_by_role("button", name="Begin").click()
    page.wait_for_selector("#item")
    accessible(page, "a question, with the Primary's choice")
    page.evaluate("document.getElementById('lost').hidden = false")
    accessible(page, "lost")
    page.keyboard.press("1")
    page.keyboard.press("Enter")
    page.wait_for_selector("button[value=undo]")
    accessible(page, "recorded, can be undone")
    page.keyboard.press("z")
    page.wait_for_selector("#item")
    page.keyboard.press("p")
    page.wait_for_selector("h1:has-text('Paused')")
    accessible(page, "paused")
    page.goto(f"{gate.url}/console/team")
    accessible(page, "the team, seen by a member")
    page = sign_in(open_page(), gate, "cid")
    accessible(page, "on no team")
    page.goto(f"{gate.url}/console/keys")
    accessible(page, "not allowed")
    page.trouble.clear()  # the browser reports the refusal
    lead = open_page()
    sign_in(lead, gate, "lea").goto(f"{gate.url}/console/team")
    accessible(lead, "the team, seen by an administrator")
    lead.goto(f"{gate.url}/console/policies/support")
    accessible(lead, "a policy with people")
    assert call.result().status_code == 409


def test_every_state_of_operating_is_accessible(house, open_page, accessible, monkeypatch):
    from tests.receiver import SECRET

    monkeypatch.setenv("HOOK_SECRET", SECRET)
    with Receiver() as receiver:
        hook = {"url": receiver.url, "secret_env": "HOOK_SECRET", "events": ["alarm.raised"]}
        gate = house(House, policy={"audit_rate": 0.5}, **{"gateway.webhooks.pager": hook})
        page = open_page(f"{gate.url}/console")
        accessible(page, "no key yet, nothing drawn")
        page.goto(f"{gate.url}/console/decisions")
        accessible(page, "no decision yet")
        page.goto(f"{gate.url}/console/health")
        page.get_by_role("button", name="Send a test").click()
        page.wait_for_selector(".notice.good")
        accessible(page, "a webhook was tested")
        page.goto(f"{gate.url}/console/policies/support")
        page.fill("#certificate", "{}")
        page.get_by_role("button", name="Check it").click()
        page.wait_for_selector(".notice.bad")
        accessible(page, "a certificate was refused")
        page.fill("#certificate", as_json(gate.certificate(alpha=0.1)))
        page.get_by_role("button", name="Check it").click()
        page.wait_for_selector("#install-title")
        accessible(page, "a certificate to install")
        page.goto(f"{gate.url}/console/decisions/unknown")
        accessible(page, "no such decision")
        page.trouble.clear()  # the browser reports the 404
        page.goto(f"{gate.url}/console/keys")
        page.fill("#label", "Ada")
        page.get_by_role("button", name="Create key").click()
        page.wait_for_selector(".secret")
        assert "No API key exists yet" not in page.content()
        accessible(page, "the first key")
        page.goto(f"{gate.url}/console/sign-in?why=over")
        accessible(page, "signed out")


RIGHT_TO_LEFT = "שלום, ההזמנה שלי 4711 לא הגיעה. مرحبا"


def test_text_from_right_to_left_is_shown_so(crew, open_page):
    gate = crew()
    choices = [{"value": "החזר כספי"}, {"value": "Ask again"}, {"value": "استرداد"}]
    call = asked(gate, {**BODY, "input": RIGHT_TO_LEFT, "questions": [{**BODY["questions"][0], "choices": choices}]})
    page = sign_in(open_page(width=390), gate, "ann")
    page.keyboard.press("Enter")
    page.wait_for_selector("#item")
    directions = page.evaluate(
        "[...document.querySelectorAll('.option span')].map(one => getComputedStyle(one).direction)"
    )
    assert directions == ["rtl", "ltr", "rtl"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert violations(page) == []
    page.keyboard.press("3")
    page.keyboard.press("Enter")
    page.wait_for_selector("#begin")
    assert call.result().json()["answers"][0]["choice"] == "استرداد"


def test_a_megabyte_with_255_options_is_decided(crew, open_page):
    gate = crew(gateway={"max_body": 4_000_000})
    choices = [{"value": f"option {k} " + "x" * 40} for k in range(255)]
    long = "A very long letter with words in it. " * 27_000
    gate.primary.reply = votes(*[1 / 255] * 255)
    call = asked(gate, {**BODY, "input": long, "questions": [{**BODY["questions"][0], "choices": choices}]})
    page = sign_in(open_page(), gate, "ann")
    page.keyboard.press("Enter")
    page.wait_for_selector("#item")
    page.wait_for_load_state()  # a megabyte is shown as it arrives
    assert len(page.locator(".said").text_content()) > 990_000
    assert page.locator(".option").count() == 255
    page.keyboard.press("/")
    page.keyboard.type("option 254")
    assert page.locator(".option:visible").count() == 1
    page.keyboard.press("Enter")
    page.keyboard.press("Space")
    page.keyboard.press("Enter")
    page.wait_for_selector("#begin")
    assert call.result().json()["answers"][0]["choice"] == choices[254]["value"]


def test_a_browser_that_went_away_loses_its_question_and_nothing_else(crew, open_page):
    """Offline, the question goes back when its lease ends; back again, the answer is refused in words."""
    gate = crew(review={"lease": 1.0})
    call = asked(gate)
    page = sign_in(open_page(), gate, "ann")
    page.keyboard.press("Enter")
    page.wait_for_selector("#item")
    page.context.set_offline(True)
    other = Visit(gate, gate.secrets["bob"])
    theirs = next_question(other)
    page.context.set_offline(False)
    page.keyboard.press("1")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=given to someone else")
    other.send_form("/console/review", theirs, act="vote", token=token(theirs), choice="2")
    assert call.result().json()["answers"][0]["choice"] == BODY["questions"][0]["choices"][2]["value"]
    page.trouble.clear()  # the browser reports that it was offline


def test_two_browsers_never_show_one_question(crew, open_page):
    gate = crew()
    first, second = (sign_in(open_page(), gate, name) for name in ("ann", "bob"))
    calls = [asked(gate)]
    first.keyboard.press("Enter")
    first.wait_for_selector("#item")
    second.keyboard.press("Enter")
    second.wait_for_selector("#begin[data-waiting]")
    calls.append(Later(lambda: gate.decide({**BODY, "input": "Another."})))
    second.wait_for_selector("#item")  # by itself
    tokens = {page.locator("#item").get_attribute("data-token") for page in (first, second)}
    texts = {page.locator(".said").text_content() for page in (first, second)}
    assert (len(tokens), len(texts)) == (2, 2)
    for page in (first, second):
        page.keyboard.press("1")
        page.evaluate("for (const _ of [1, 2]) document.getElementById('item').requestSubmit("
                      "document.querySelector('button[value=vote]'))")  # fmt: skip
        page.wait_for_selector("#begin")
    assert {call.result().status_code for call in calls} == {200}
    votes_cast = gate.with_store(lambda store: store.run(reviews.cast_votes))
    assert sorted(vote.reviewer for vote in votes_cast) == ["ann", "bob"]


def test_a_second_enter_answers_nothing(crew, open_page):
    gate = crew()
    calls = [asked(gate), Later(lambda: gate.decide({**BODY, "input": "Another."}))]
    until(lambda: gate.with_store(lambda store: store.run(reviews.open_places)) == 2, LONG)
    page = sign_in(open_page(), gate, "ann")
    page.keyboard.press("Enter")
    page.wait_for_selector("#item")
    first = page.locator("#item").get_attribute("data-token")
    page.keyboard.press("1")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#item:not([data-token='{first}'])")
    page.keyboard.press("Enter")
    assert page.locator("input[name=choice]:checked").count() == 0
    until(lambda: any(call.done for call in calls), LONG)
    assert len(gate.with_store(lambda store: store.run(reviews.cast_votes))) == 1
    page.keyboard.press("2")
    page.keyboard.press("Enter")
    page.wait_for_selector("#begin")
    assert {call.result().json()["answers"][0]["choice"] for call in calls} == {
        choice["value"] for choice in BODY["questions"][0]["choices"][:2]
    }


def test_a_question_that_comes_between_the_page_and_its_first_poll_is_shown(crew, open_page):
    gate = crew()
    page, calls = sign_in(open_page(), gate, "ann"), []

    def late(route):
        if not calls:  # the page has been made, and has not asked yet
            calls.append(asked(gate))
        route.continue_()

    page.route("**/console/changes", late)
    page.keyboard.press("Enter")
    page.wait_for_selector("#item")  # by itself
    page.keyboard.press("1")
    page.keyboard.press("Enter")
    page.wait_for_selector("#begin")
    assert calls[0].result().status_code == 200


def test_a_question_is_decided_without_scripts(crew, open_page):
    gate = crew(review={"undo": 60.0})
    call = asked(gate)
    page = sign_in(open_page(java_script_enabled=False), gate, "ann")
    page.get_by_role("button", name="Begin").click()
    page.locator("input[name=choice]").nth(0).check()
    page.get_by_role("button", name="Confirm").click()
    page.get_by_role("button", name="Undo").click()
    page.locator("input[name=choice]").nth(2).check()
    page.get_by_role("button", name="Confirm").click()
    run_sql(str(gate.folder / "arbitrage.sqlite"), "update votes set counts = 0")
    run_sql(str(gate.folder / "arbitrage.sqlite"), "update reviews set ready = 0")
    assert call.result().json()["answers"][0]["choice"] == BODY["questions"][0]["choices"][2]["value"]


def test_closing_the_tab_returns_the_question(crew, open_page):
    gate = crew()
    call = asked(gate)
    page = sign_in(open_page(), gate, "ann")
    page.keyboard.press("Enter")
    page.wait_for_selector("#item")
    page.close(run_before_unload=True)
    other = Visit(gate, gate.secrets["bob"])
    theirs = next_question(other)
    other.send_form("/console/review", theirs, act="vote", token=token(theirs), choice="0")
    assert call.result().status_code == 200


def test_a_lease_is_kept_while_someone_works_and_not_while_nobody_does(crew, open_page):
    """The page's clock is turned, not waited for: half a minute later it renews, and after two idle minutes it does not."""
    gate = crew()
    call = asked(gate)
    page = open_page()
    page.clock.install()
    sign_in(page, gate, "ann")
    page.keyboard.press("Enter")
    page.wait_for_selector("#item")
    sent = []
    page.on("request", lambda request: sent.append(request.url) if request.url.endswith("/renew") else None)
    with page.expect_response("**/console/review/renew") as renewed:
        page.clock.run_for(31_000)
    assert renewed.value.status == 204
    page.route("**/console/review/renew", lambda route: route.abort())
    page.clock.run_for(31_000)
    page.wait_for_selector("#away:visible")
    page.unroute("**/console/review/renew")
    page.clock.run_for(31_000)
    page.wait_for_selector("#away", state="hidden")
    page.trouble.clear()  # the browser reports what was aborted
    page.clock.run_for(100_000)
    idle = len(sent)
    page.clock.run_for(120_000)
    assert len(sent) == idle
    page.keyboard.press("1")
    with page.expect_response("**/console/review/renew"):
        page.clock.run_for(31_000)
    page.keyboard.press("Enter")
    page.wait_for_selector("#begin")
    assert call.result().status_code == 200


def test_odd_characters_do_no_harm(crew):
    gate = crew()
    visit = Visit(gate, gate.secrets["ann"])
    for text in ("a\x00b", "a\ud800b", "\u202eabc", "\ufeff"):
        call = Later(lambda text=text: gate.decide({**BODY, "input": f"{text} I was charged twice."}))
        until(lambda call=call: call.done or gate.with_store(lambda store: store.run(reviews.open_places)), LONG)
        if call.done:
            assert call.result().status_code in (400, 422), text
            continue
        page = next_question(visit)
        assert "I was charged twice." in page.text
        visit.send_form("/console/review", page, act="vote", token=token(page), choice="0")
        assert call.result().status_code == 200
