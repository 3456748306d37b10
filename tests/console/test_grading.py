"""Grading in the console: by forms, by keys in a real browser, blind, and with hostile text in every answer."""

import re

import pytest

from conformal_arbitrage.store import pages
from tests.console.filled import EVIL, Visit
from tests.console.test_browser import violations
from tests.console.test_pages import words
from tests.console.test_review import sign_in, token
from tests.gateway.house import CHAT, says, until
from tests.gateway.people import LONG, GradingHouse

MINE, THEIRS = f"{EVIL[0]} mine", f"{EVIL[1]} theirs {EVIL[4]}"


@pytest.fixture
def graders(house):
    """A gateway in free text, with people who grade; keys by name."""

    def start(**options):
        fields = {"primary": says(MINE, 0.9), "guardian": says(THEIRS), "members": ("ann", "bob"), **options}
        gate = house(GradingHouse, certificate=False, policy={"mode": "shadow", "audit_rate": 0.0}, **fields)
        gate.secrets = {name: gate.key("review", name)[0] for name in ("ann", "bob")}
        gate.secrets["root"] = gate.key("admin", "root")[0]
        gate.headers = gate.keyed("call")
        return gate

    return start


def answered(gate, text="Which <b>one</b>?"):
    reply = gate.chat({**CHAT, "messages": [{"role": "user", "content": text}]})
    assert reply.status_code == 200, reply.text
    id = reply.headers["x-arbitrage-decision-id"]
    until(lambda: gate.with_store(lambda store: store.run(pages.under_review, [id])), LONG)
    return id


def begin(gate, name):
    visit = Visit(gate, gate.secrets[name])
    return visit, visit.send_form("/console/review", visit.open("/console/review"), act="next")


def grades_of(gate):
    given = [one.grades for record in gate.records() for one in record.feedback]
    return [(one.primary, one.guardian) for one in given]


def shown_first(page):
    """Whose answer is Answer A."""
    return "mine" if page.text.index("mine") < page.text.index("theirs") else "theirs"


def test_two_answers_are_graded_by_forms_alone(graders):
    gate = graders(graders={"instructions": "Be strict."})
    answered(gate)
    visit, page = begin(gate, "ann")
    assert "Be strict. user: Which <b>one</b>?" in words(page)
    assert "<img" not in page.text
    first = {"mine": "0", "theirs": "1"}[shown_first(page)]
    second = {"0": "1", "1": "0"}[first]
    after = visit.send_form(
        "/console/review", page, act="vote", token=token(page), **{"grade-1": first, "grade-2": second}
    )
    assert "Recorded." in after.text
    assert until(lambda: grades_of(gate), LONG) == [(0.0, 1.0)]
    assert "1 done today" in words(after)


@pytest.mark.parametrize(
    "form",
    [{}, {"grade-1": "1"}, {"grade-1": "1", "grade-2": "x"}, {"grade-1": "1", "grade-2": "nan"}, {"choice": "0"}],
)
def test_grades_for_nothing_are_refused(graders, form):
    gate = graders()
    answered(gate)
    visit, page = begin(gate, "ann")
    assert visit.send_form("/console/review", page, act="vote", token=token(page), **form).status_code == 422
    assert grades_of(gate) == []


def test_grades_are_taken_back_until_they_count_and_left_to_someone_else(graders):
    gate = graders(review={"undo": 60.0})
    answered(gate)
    visit, page = begin(gate, "ann")
    both = {"grade-1": "1", "grade-2": "0.5"}
    after = visit.send_form("/console/review", page, act="vote", token=token(page), **both)
    back = visit.send_form("/console/review", after, act="undo", token=token(page))
    assert "Taken back." in back.text
    assert "Answer A" in words(back)
    skipped = visit.send_form("/console/review", back, act="skip", token=token(back))
    assert "Left to someone else." in skipped.text
    _, theirs = begin(gate, "bob")
    assert "Answer A" in words(theirs)
    assert shown_first(theirs) == shown_first(page)


def test_text_that_is_no_text_is_graded_too(graders):
    """NUL and the brackets of a template in the question and in both answers; models cannot send lone surrogates."""
    odd = "a\0b {{ 7 * 7 }}"
    gate = graders(primary=says(f"{odd} mine", 0.9), guardian=says(f"{odd} theirs"))
    answered(gate, odd)
    visit, page = begin(gate, "ann")
    assert page.status_code == 200
    assert "{{ 7 * 7 }}" in page.text
    after = visit.send_form("/console/review", page, act="vote", token=token(page), **{"grade-1": "1", "grade-2": "1"})
    assert "Recorded." in after.text
    assert until(lambda: grades_of(gate), LONG) == [(1.0, 1.0)]


def bytes_of(page):
    """A page without what is new in every one: tokens, where the news stood, and the counts above the question."""
    text = re.sub(r'(name="csrf" value=|data-csrf=|name="token" value=|data-token=)"\w+"', "TOKEN", page.text)
    return re.sub(r'<p class="counts">.*?</p>|data-since="[^"]*"', "", text, flags=re.S)


def test_the_page_is_the_same_whoever_said_which(graders):
    """With the models exchanged, a grader gets one of the same two pages."""

    def pages(primary, guardian):
        gate = graders(primary=says(primary, 0.9), guardian=says(guardian))
        found = set()
        while len(found) < 2:  # the order is drawn by the id, which is new every time
            answered(gate)
            visit, page = begin(gate, "ann")
            found.add(bytes_of(page))
            visit.send_form("/console/review", page, act="vote", token=token(page), **{"grade-1": "1", "grade-2": "1"})
        return found

    assert pages("mine", "theirs") == pages("theirs", "mine")


def test_a_decision_is_hidden_until_its_answers_have_grades(graders):
    gate = graders()
    id = answered(gate)
    reviewer = Visit(gate, gate.secrets["ann"])
    assert reviewer.open(f"/console/decisions/{id}").status_code == 404
    assert id not in reviewer.open("/console/decisions").text
    root = Visit(gate, gate.secrets["root"])
    row = root.open("/console/decisions").text.partition("<tbody>")[2].partition("</tbody>")[0]
    assert "under review" in row
    assert "guardian" not in row
    assert "theirs" in root.open(f"/console/decisions/{id}").text
    visit, page = begin(gate, "ann")
    visit.send_form("/console/review", page, act="vote", token=token(page), **{"grade-1": "1", "grade-2": "1"})
    until(lambda: grades_of(gate), LONG)
    assert "theirs" in reviewer.open(f"/console/decisions/{id}").text


def flaws(page, width):
    """What is wrong with a page, in light and in dark."""
    found = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found += violations(page)
    return found + ["it scrolls sideways"] * (page.evaluate("document.documentElement.scrollWidth") > width)


@pytest.mark.parametrize("width", [1280, 390], ids=["desk", "phone"])
def test_three_keys_grade_on_every_screen(graders, open_page, width):
    gate = graders(review={"undo": 0.5})
    answered(gate)
    page = sign_in(open_page(width=width), gate, "ann")
    page.keyboard.press("Enter")
    page.wait_for_selector("#item .graded")
    assert page.evaluate("document.querySelectorAll('#item img, #item b, #item script').length") == 0
    page.keyboard.press("3")
    page.keyboard.press("Enter")  # B has no grade yet: nothing is sent
    assert page.locator("#item input:invalid").count() == 3
    assert flaws(page, width) == []
    page.keyboard.press("8")
    assert page.locator("#item input:checked").evaluate_all("all => all.map(one => [one.name, one.value])") == [
        ["grade-1", "0"], ["grade-2", "0.5"],
    ]  # fmt: skip
    assert flaws(page, width) == []
    marks = "all => all.map(one => getComputedStyle(one, '::after').content)"
    shown = page.locator(".scale .option span").evaluate_all(marks)
    assert ["✓" in mark for mark in shown] == [False, False, True, False, True, False]  # not by colour alone
    order = page.locator(".graded .said").first.inner_text()
    page.keyboard.press("Enter")
    page.wait_for_selector("#begin[data-waiting]")
    assert "owned" not in page.title()
    [given] = until(lambda: grades_of(gate), LONG)
    assert given == ((0.0, 0.5) if "mine" in order else (0.5, 0.0))


def test_the_actions_never_cover_what_has_the_focus_on_a_phone(graders, open_page):
    gate = graders(primary=says("mine " * 400, 0.9), guardian=says("theirs " * 400))
    answered(gate)
    page = sign_in(open_page(width=390, height=700), gate, "ann")
    page.keyboard.press("Enter")
    page.wait_for_selector("#item .graded")
    for digit in "138":
        page.keyboard.press(digit)
        hidden = page.evaluate(
            """() => {
              const focused = document.activeElement.closest("label").getBoundingClientRect();
              const bar = document.querySelector(".confirm").getBoundingClientRect();
              return focused.bottom > bar.top && focused.top < bar.bottom || focused.top < 0;
            }"""
        )
        assert not hidden, digit


def test_one_answer_alone_is_graded(graders, open_page):
    gate = graders(primary=lambda *_: (500, {"error": {"message": "away"}}))
    answered(gate)
    page = sign_in(open_page(), gate, "ann")
    page.keyboard.press("Enter")
    page.wait_for_selector("#item .graded")
    assert page.locator(".graded").count() == 1
    assert page.locator("h1").inner_text() == "How good is this answer?"
    assert violations(page) == []
    page.keyboard.press("1")
    page.keyboard.press("Enter")
    page.wait_for_selector("#begin")
    assert until(lambda: grades_of(gate), LONG) == [(0.0, 1.0)]
