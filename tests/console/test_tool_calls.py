"""Approving tool calls in the console: by forms, by keys in a real browser, with hostile arguments."""

import html
import json
import re

import pytest

from tests.console.filled import EVIL, Visit
from tests.console.test_browser import violations
from tests.console.test_pages import words
from tests.console.test_review import sign_in
from tests.gateway.approving import FEWER, REQUEST, ApprovingHouse, arguments_of, call, calling, message_of
from tests.gateway.house import until
from tests.gateway.people import LONG

ORDER = {"type": "string", "pattern": "^(a+)+$", EVIL[1]: 1}
TOOL = {"name": "refund_order", "parameters": {"type": "object", "properties": {"order": ORDER}}}
UNCHECKED = {**REQUEST, "tools": [{"type": "function", "function": TOOL}]}


@pytest.fixture
def crew(house):
    """A gateway with a team of two; keys by name."""

    def start(**options):
        gate = house(ApprovingHouse, **options)
        gate.secrets = {name: gate.key("review", name)[0] for name in gate.members}
        gate.secrets["lea"] = gate.key("admin", "lea")[0]
        gate.headers = gate.keyed("call")
        return gate

    return start


def asked(gate, body=REQUEST):
    waiting = gate.ask_for(body)
    until(lambda: gate.with_store(lambda store: store.open_places()), LONG)
    return waiting


def begin(gate, name="ann"):
    visit = Visit(gate, gate.secrets[name])
    return visit, visit.send_form("/console/review", visit.open("/console/review"), act="next")


def token(page):
    return re.search(r'data-token="([^"]+)"', page.text).group(1)


def textarea(page):
    return html.unescape(re.search(r"<textarea[^>]*>\n(.*?)</textarea>", page.text, re.DOTALL).group(1))


def test_what_is_not_checked_of_a_schema_stands_beside_the_arguments(crew):
    gate = crew()
    waiting = asked(gate, UNCHECKED)
    visit, page = begin(gate)
    assert f"Not checked of the tool's schema: {EVIL[1][:40]}, pattern." in words(page)
    assert "<img" not in page.text
    slow = {"arguments-0": json.dumps({"order": "a" * 90 + "b"})}  # the pattern would take longer than the universe has
    visit.send_form("/console/review", page, act="vote", token=token(page), choice="1", **slow)
    assert arguments_of(message_of(waiting.result())[0]) == {"order": "a" * 90 + "b"}


def test_a_call_is_edited_by_forms_alone(crew):
    gate = crew(policy={"content": "full"})
    waiting = asked(gate)
    visit, page = begin(gate)
    assert "May this call be made?" in words(page)
    assert textarea(page) == '{\n  "order": "A-17",\n  "amount": 900\n}'
    send = {"act": "vote", "token": token(page)}
    crlf = textarea(page).replace("\n", "\r\n")  # as browsers send it
    wrong = visit.send_form("/console/review", page, **send, choice="1", **{"arguments-0": crlf.replace("900", "5000")})
    assert "amount must be at most 500; got 5000" in words(wrong)
    assert "5000" in textarea(wrong)  # what was typed is not lost
    assert re.search(r'value="1"[^>]*checked', wrong.text)
    slip = visit.send_form("/console/review", wrong, **send, choice="0", **{"arguments-0": FEWER})
    assert "choose Edit" in words(slip)
    assert not waiting.done
    after = visit.send_form("/console/review", slip, **send, choice="1", **{"arguments-0": FEWER})
    assert "Recorded." in words(after)
    message, _, arbitrage = message_of(waiting.result())
    assert arguments_of(message) == {"order": "A-17", "amount": 90}
    lea = Visit(gate, gate.secrets["lea"])
    shown = words(lea.open(f"/console/decisions/{arbitrage['id']}"))
    assert "Tool calls edited by ann: refund_order." in shown
    assert "no guarantee: a person edited the call of refund_order." in shown


def test_a_call_is_approved_as_it_is_shown(crew):
    gate = crew()
    waiting = asked(gate)
    visit, page = begin(gate)
    fields = {"arguments-0": textarea(page).replace("\n", "\r\n")}
    visit.send_form("/console/review", page, act="vote", token=token(page), choice="0", **fields)
    assert message_of(waiting.result())[0]["tool_calls"] == [call()]


def test_hostile_arguments_and_names_stay_text(crew):
    gate = crew()
    visit = Visit(gate, gate.secrets["ann"])
    for evil in EVIL:
        gate.primary.reply = calling(call(f"refund_{evil}", json.dumps({"note": evil})), content=evil)
        waiting = asked(gate, {**REQUEST, "messages": [{"role": "user", "content": evil}]})
        page = visit.send_form("/console/review", visit.open("/console/review"), act="next")
        assert "May this call be made?" in words(page)
        assert "<img" not in page.text
        assert "<script>" not in page.text
        visit.send_form("/console/review", page, act="vote", token=token(page), choice="2")
        assert "tool_calls" not in message_of(waiting.result())[0]


def test_arguments_too_large_for_a_form_can_be_approved(crew):
    made = call(arguments='{"order": "' + "x" * 90_000 + '", "amount": 1}')
    gate = crew(primary=calling(made))
    waiting = asked(gate)
    visit, page = begin(gate)
    assert "<textarea" not in page.text
    visit.send_form("/console/review", page, act="vote", token=token(page), choice="0")
    assert message_of(waiting.result())[0]["tool_calls"] == [made]


def test_a_call_is_edited_and_approved_with_the_keyboard(crew, open_page):
    gate = crew()
    waiting = asked(gate, UNCHECKED)
    page = sign_in(open_page(), gate, "ann")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Not checked of the tool's schema")
    assert violations(page) == []
    page.focus("textarea")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type('{"order": "1 s p z",')
    page.keyboard.press("Enter")  # a line, not a vote; and the keys typed above did nothing
    page.keyboard.type('"amount": 3}')
    assert page.is_checked("input[value='1']")
    page.focus("input[value='1']")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Recorded.")
    assert arguments_of(message_of(waiting.result())[0]) == {"order": "1 s p z", "amount": 3}
    waiting = asked(gate, {**REQUEST, "messages": [{"role": "user", "content": "Again."}]})
    page.wait_for_selector("textarea")
    page.keyboard.press("1")
    page.keyboard.press("Enter")
    assert message_of(waiting.result())[0]["tool_calls"] == [call()]
    page.wait_for_selector("text=Nothing to review")  # a browser that is closed while a form is sent may hang
