"""`primary_choice = "shown"`: people see what the Primary would choose, on every question alike, as their identity says."""

import json
import re

import pytest

from conformal_arbitrage.errors import ConfigError
from conformal_arbitrage.live.config import read_config
from conformal_arbitrage.live.reviewers import review_terms
from conformal_arbitrage.store import pages, reviews
from conformal_arbitrage.types import Query
from tests.console.filled import Visit
from tests.console.test_pages import words
from tests.gateway.house import DECISION, error_of, until, votes
from tests.gateway.people import LONG, Later, PeopleHouse

SHOWN = {"primary_choice": "shown"}


def sure_if_asked(path, body, number):
    return votes(*((0.1, 0.9) if "sure" in json.dumps(body) else (0.4, 0.5, 0.1)))(path, body, number)


@pytest.fixture
def shown(house):
    def start(**options):
        gate = house(
            PeopleHouse, primary=sure_if_asked, review={"audit_spread": 0.0}, policy={"audit_rate": 1.0},
            **{"human": {**SHOWN, "overlap": 1.0}, **options},
        )  # fmt: skip
        gate.headers = gate.keyed("call")
        return gate, [gate.reviewer(name) for name in gate.members]

    return start


def test_an_audit_a_deferral_and_a_second_opinion_show_the_same_choice(shown):
    gate, (ann, bob, _) = shown()
    assert gate.decide({**DECISION, "input": "Are you sure?"}).json()["answers"][0]["choice"] == "b"
    audit = ann.wait()
    assert audit["primary_choice"] == 1
    ann.vote(audit, 1)
    second = bob.wait()
    call = Later(lambda: gate.decide({**DECISION, "input": "Are you really?"}))
    deferral = ann.wait()
    ann.vote(deferral, 0)
    assert call.result().json()["answers"][0]["choice"] == "a"
    alike = [
        json.dumps({**one, "token": "", "context": one["context"].replace("really", "sure")})
        for one in (audit, second, deferral)
    ]
    assert alike[0] == alike[1] == alike[2]
    assert bob.vote(second, 2).status_code == 200
    records = {record.decided_by: record.id for record in gate.records()}
    audited = until(lambda: gate.with_store(lambda store: store.run(pages.record, records["primary"])).audit, LONG)
    assert audited.scores == (0.0, 1.0, 0.0)


def test_hidden_is_the_default_and_says_nothing(house):
    gate = house(PeopleHouse, primary=sure_if_asked, policy={"audit_rate": 1.0}, review={"audit_spread": 0.0})
    ann = gate.reviewer("ann")
    gate.headers = gate.keyed("call")
    gate.decide({**DECISION, "input": "Are you sure?"})
    held = ann.wait()
    assert held["primary_choice"] is None
    page = Visit(gate, gate.key("review", "bob")[0])
    assert "Primary's choice" not in page.open("/console/review").text


def test_a_certificate_of_people_who_did_not_see_it_is_refused(shown):
    """Whoever has seen the Primary's choice is another Guardian."""
    gate, _ = shown()
    admin = gate.keyed("admin")
    theirs = gate.certificate(identities=hidden_identities(gate)).to_dict()
    refused = gate.put("/v1/arbitrage/policies/support", {"certificate": theirs}, headers=admin)
    assert "primary_choice" in error_of(refused, 422)["message"]


def hidden_identities(gate):
    from conformal_arbitrage.gateway.gateway import identities_of

    identities = identities_of(gate.config, "support")
    assert identities["guardian"]["primary_choice"] == "shown"
    return {**identities, "guardian": {**identities["guardian"], "primary_choice": "hidden"}}


def test_the_page_marks_the_choice_and_the_policy_says_what_that_means(shown):
    gate, _ = shown()
    call = Later(lambda: gate.decide(DECISION))
    until(lambda: gate.with_store(lambda store: store.run(reviews.open_places)), LONG)
    visit = Visit(gate, gate.key("review", "cid")[0])
    page = visit.send_form("/console/review", visit.open("/console/review"), act="next")
    options = re.findall(r'<label class="option">(.*?)</label>', page.text, flags=re.S)
    assert ["the Primary's choice" in option for option in options] == [False, True, False]
    token = re.search(r'data-token="([^"]+)"', page.text).group(1)
    visit.send_form("/console/review", page, act="vote", token=token, choice="2")
    assert call.result().status_code == 200
    promise = words(Visit(gate, gate.key("admin")[0]).open("/console/policies/support"))
    assert "People see the Primary's choice before they vote , on callers' questions and on audits alike." in promise


def test_a_menu_in_another_order_or_in_part_marks_the_same_option(shown):
    gate, _ = shown(task={"shuffle_options": True})
    terms = review_terms(gate.config, "support")
    query = Query("?", ("a", "b", "c", "d"), id="x")
    for scores, best in (((0.1, 0.9, 0.0, 0.0), "b"), ((0.5, 0.1, 0.5, 0.5), "a"), ((0.0, 0.0, 0.0, 1.0), "d")):
        question = terms.question(query, 4, scores)
        assert question.options[question.primary] == best
        part = Query("?", (best, "z"), id="x", places=("abcd".index(best), 9))
        question = terms.question(part, 10, scores)
        assert question.options[question.primary] == best
    assert terms.question(query, 4, None).primary is None
    assert terms.question(query, 4, (None, None, None, None)).primary is None


def test_the_terminal_shows_nothing_so_that_it_is_refused_there(tmp_path):
    path = tmp_path / "arbitrage.toml"
    people = '[{}]\nkind = "human"\nname = "{}"\n'
    path.write_text(people.format("primary", "a") + people.format("guardian", "b") + 'primary_choice = "shown"\n')
    with pytest.raises(ConfigError, match=r"\[guardian\] primary_choice = \"shown\" is for a team"):
        read_config(path)
