"""Ways around the console's rules that are closed, and hostile text where numbers and names are expected."""

import re

import pytest

from conformal_arbitrage.store import reviews
from conformal_arbitrage.store.record import new_id
from tests.console.filled import Visit
from tests.console.test_changes import since_of
from tests.console.test_pages import words
from tests.console.test_review import next_question, token
from tests.gateway.house import DECISION, UNSURE, until, votes
from tests.gateway.people import LONG, Later, PeopleHouse


@pytest.fixture
def gate(house):
    """A gateway with an audit that waits for people, and keys by name."""
    one = house(PeopleHouse, primary=votes(0.9, 0.1), policy={"audit_rate": 1.0}, members=("ann",))
    one.secrets = {"ann": one.key("review", "ann")[0], "root": one.key("admin", "root")[0]}
    one.headers = one.keyed("call")
    return one


def test_the_list_of_decisions_tells_a_reviewer_nothing_of_what_people_have_yet_to_judge(gate):
    assert gate.decide(DECISION).status_code == 200
    [record] = gate.records()
    visit = Visit(gate, gate.secrets["ann"])
    for query in ("", "?who=primary", "?who=guardian", f"?before={new_id()}"):
        assert record.id not in visit.open(f"/console/decisions{query}").text
    assert visit.open("/console/decisions?mark=audited").status_code == 400
    assert visit.open(f"/console/decisions/{record.id}").status_code == 404


def test_whether_a_caller_waits_is_told_to_operators_alone(gate):
    gate.primary.reply = votes(*UNSURE)
    call = Later(lambda: gate.decide(DECISION))
    until(lambda: gate.with_store(lambda store: store.run(reviews.open_places)), LONG)
    ann, root = (Visit(gate, gate.secrets[name]) for name in ("ann", "root"))
    for path in ("/console", "/console/team"):
        assert not [word for word in ("oldest", "Oldest", "caller waits") if word in words(ann.open(path))], path
    assert "Waiting for a person 1 oldest" in words(root.open("/console"))
    assert "Team Reviews Oldest caller support team 1" in words(root.open("/console/health"))
    [record] = gate.records()
    page = words(root.open(f"/console/decisions/{record.id}"))
    assert "The Guardian has not answered" in page
    assert "so you are not asked about it any more" in page
    question = next_question(ann)
    ann.send_form("/console/review", question, act="vote", token=token(question), choice="0")
    assert call.result().status_code == 200
    decided = words(root.open(f"/console/decisions/{record.id}"))
    assert re.search(r"The Guardian decided .* by people .* ann : [\w ]+, after [<\d]", decided)
    assert "any more" not in decided


def test_pages_and_polls_of_reviewers_do_not_count_audits(gate):
    ann, root = (Visit(gate, gate.secrets[name]) for name in ("ann", "root"))
    before = {visit: since_of(visit.open("/console/review")) for visit in (ann, root)}
    assert gate.decide(DECISION).status_code == 200
    for visit, told in ((ann, False), (root, True)):  # the row of the ledger is written with the decision
        polled = visit.open("/console/changes").text.split("-")
        assert [old != new for old, new in zip(before[visit].split("-"), polled, strict=True)] == [False, told, True]
    for path in ("/console", "/console/policies/support"):
        until(lambda path=path: "1 pending" in words(root.open(path)), LONG)


def test_hostile_text_is_refused_in_words(gate):
    visit = Visit(gate, gate.secrets["root"])
    for query in ("?id=%E6%97%A5", "?id=%C2%B2"):
        assert visit.open(f"/console/decisions{query}").status_code == 404
    page = visit.open("/console/policies/support")
    for act in ("check", "install"):
        reply = visit.send_form(f"/console/policies/support/{act}", page, certificate="[" * 20_000)
        assert reply.status_code in (200, 422)
        assert "not JSON" in reply.text
