"""Blind by construction: pages and confirmations are the same bytes, whatever a question is for and whoever still waits."""

import re

from tests.console.filled import Visit
from tests.console.test_review import BODY, asked, next_question, token
from tests.gateway.durability import run_sql
from tests.gateway.house import UNSURE, votes
from tests.gateway.people import Later, Reviewer


def bare(page, name):
    """A page without what belongs to a person or a form: name, tokens, and the counts above the question."""
    assert page.status_code == 200
    text = re.sub(r'(name="csrf" value=|data-csrf=)"\w+"', "CSRF", page.text)
    text = re.sub(r'<p class="counts">.*?</p>', "", re.sub(r'data-since="[^"]*"', "", text), flags=re.S)
    return re.sub(rf"\b{name}\b", "NAME", re.sub(r"\b[0-9a-f]{32}\b", "TOKEN", text))


def test_a_deferral_an_audit_and_second_opinions_of_both_are_one_page(crew):
    gate = crew(human={"overlap": 1.0}, review={"audit_spread": 0.0}, policy={"audit_rate": 1.0})
    people = {name: Visit(gate, gate.secrets[name]) for name in ("ann", "bob")}
    pages, purposes = [], []
    for primary in (votes(*UNSURE), votes(0.9, 0.1)):
        gate.primary.reply = primary
        call = asked(gate)
        for name, visit in people.items():  # the first opinion, and the second
            page = next_question(visit)
            sql = f"select purpose from reviews join review_claims on item = id where token = '{token(page)}'"
            purposes += run_sql(str(gate.folder / "arbitrage.sqlite"), sql)
            pages.append(bare(page, name))
            visit.send_form("/console/review", page, act="vote", token=token(page), choice="0")
        assert call.result().status_code == 200
    assert purposes == [("decide",), ("overlap",), ("audit",), ("overlap",)]
    assert [page == pages[0] for page in pages] == [True] * 4


def test_a_vote_after_the_end_is_confirmed_as_any_other(crew):
    gate = crew()
    visit = Visit(gate, gate.secrets["ann"])
    ann = Reviewer(gate, {"Authorization": f"Bearer {gate.secrets['ann']}"})
    confirmed, statuses = {"page": [], "api": []}, []
    for way in confirmed:
        for late in (False, True):
            call = Later(lambda: gate.decide(BODY))
            page = next_question(visit)
            if late:
                run_sql(str(gate.folder / "arbitrage.sqlite"), "update reviews set deadline = 0")
                statuses.append(call.result().status_code)
            if way == "page":
                reply = visit.send_form("/console/review", page, act="vote", token=token(page), choice="1")
                confirmed[way].append(bare(reply, "ann"))
            else:
                confirmed[way].append(ann.vote({"token": token(page)}, 1).content)
            if not late:
                statuses.append(call.result().status_code)
    assert statuses == [200, 504, 200, 504]
    assert all(first == second for first, second in confirmed.values())
    assert "Recorded." in confirmed["page"][0]
    assert run_sql(str(gate.folder / "arbitrage.sqlite"), "select late from votes order by at") == [(0,), (1,)] * 2
