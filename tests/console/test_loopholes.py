"""Ways around the console's rules that are closed, and hostile text where numbers and names are expected."""

import pytest

from tests.console.filled import Visit
from tests.gateway.house import DECISION, until, votes
from tests.gateway.people import LONG, PeopleHouse


@pytest.fixture
def gate(house):
    """A gateway with an audit that waits for people, and keys by name."""
    one = house(PeopleHouse, primary=votes(0.9, 0.1), policy={"audit_rate": 1.0}, members=("ann",))
    one.secrets = {"ann": one.key("review", "ann")[0], "root": one.key("admin", "root")[0]}
    one.headers = one.keyed("call")
    return one


def test_the_list_of_decisions_tells_a_reviewer_nothing_of_what_is_withheld(gate):
    assert gate.decide(DECISION).status_code == 200
    until(lambda: gate.with_store(lambda store: store.open_places()), LONG)
    [record] = gate.records()
    visit = Visit(gate, gate.secrets["ann"])
    row = visit.open("/console/decisions").text.partition("<tbody>")[2].partition("</tbody>")[0]
    assert record.id in row
    assert "under review" in row
    assert not [word for word in ("primary", "guardian", "audited", "$") if word in row]
    for query in ("who=primary", "who=guardian", "mark=audited"):
        assert record.id not in visit.open(f"/console/decisions?{query}").text
    assert "The Primary" not in visit.open(f"/console/decisions/{record.id}").text


def test_hostile_text_is_refused_in_words(gate):
    visit = Visit(gate, gate.secrets["root"])
    for query in ("?id=%E6%97%A5", "?id=%C2%B2"):
        assert visit.open(f"/console/decisions{query}").status_code == 404
    for counts in (b"\xb2-1-1", b"9" * 5000 + b"-1-1"):
        with visit.get(
            gate.url + "/console/events", headers={"Last-Event-ID": counts}, stream=True, timeout=60
        ) as news:
            assert news.status_code == 200
    page = visit.open("/console/policies/support")
    for act in ("check", "install"):
        reply = visit.send_form(f"/console/policies/support/{act}", page, certificate="[" * 20_000)
        assert reply.status_code in (200, 422)
        assert "not JSON" in reply.text
