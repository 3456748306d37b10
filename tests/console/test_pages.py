"""What the pages say, read without a browser."""

import html
import re

import pytest

from conformal_arbitrage.gateway.console import decisions
from conformal_arbitrage.gateway.console.charts import (
    Bar,
    LossCourse,
    LossPoint,
    confidence_chart,
    loss_chart,
    score_chart,
)
from conformal_arbitrage.gateway.console.policy import saved
from conformal_arbitrage.gateway.console.render import age, count_text, money, percent, seconds, sentence
from conformal_arbitrage.store import events, keys, pages
from conformal_arbitrage.store.events import PolicyTally
from tests.console.filled import EVIL, Filled, Visit, as_json, token_of
from tests.gateway.house import UNSURE, House, failing, until, votes
from tests.gateway.test_monitor import exclude


def words(reply):
    """The text of a page."""
    assert reply.status_code == 200, reply.text[:500]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", reply.text)).split())


@pytest.fixture(scope="module")
def admin(filled):
    return Visit(filled, filled.keys["admin"])


def test_the_overview_says_how_each_policy_does(admin):
    text = words(admin.open("/console"))
    assert "broken: over its red line" in text
    assert "over budget: safe mode" in text
    assert re.search(r"On \d+ audited decisions the loss is 0\.\d{3}\. It lies between", text)
    assert re.search(r"Guardian asked 50\s% of 60 decisions", text)
    assert re.search(
        r"Saved .?\$[\d.]+ against always asking the Guardian at the mean cost of \d+ recorded calls", text
    )


def test_hostile_text_stays_text(filled, admin):
    for path in ("/console", "/console/decisions", f"/console/decisions/{filled.record}", "/console/keys",
                 "/console/policies/support"):  # fmt: skip
        page = admin.open(path).text
        assert "<script>document" not in page
        assert "<img src=x" not in page
        assert "{{" not in page.replace("{{ 7 * 7 }}", "")
    page = admin.open(f"/console/decisions/{filled.record}").text
    assert "&lt;script&gt;document" in page
    assert html.escape(EVIL[1], quote=False) in page or "&lt;img src=x" in page


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", 50), ("?policy=broken", 50), ("?policy=broken&who=primary", None), ("?who=fallback", 0), ("?mark=audited", 50),
        ("?mark=audited&policy=support&who=guardian", 30), ("?mark=no+guarantee", 0), ("?first=2999-01-01", 0),
        ("?last=2999-01-01", 50), ("?first=2020-01-01&mark=audited", 50),
    ],
)  # fmt: skip
def test_filters(admin, query, expected):
    reply = admin.open(f"/console/decisions{query}")
    assert reply.status_code == 200
    rows = len(re.findall(r'href="/console/decisions/\w{26}"', reply.text))
    assert expected is None or rows == expected
    assert rows or "No decision matches" in reply.text


def test_pages_follow_each_other_and_hold_every_decision_once(admin):
    path, ids = "/console/decisions?policy=support", []
    while path:
        page = admin.open(path).text
        ids += re.findall(r'href="/console/decisions/(\w{26})"', page)
        older = re.search(r'rel="next" href="([^"]+)"', page)
        path = html.unescape(older.group(1)) if older else None
    assert len(ids) == len(set(ids)) == 60


def listed(text):
    return re.findall(r'href="/console/decisions/(\w{26})"', text)


def next_page(text):
    older = re.search(r'rel="next" href="([^"]+)"', text)
    return html.unescape(older[1]) if older else None


@pytest.mark.parametrize("query", ["?who=fallback", "?who=fallback&mark=no+guarantee", "?who=fallback&policy=support"])
def test_what_the_safe_action_answered_is_listed_though_the_record_first_said_guardian(house, query):
    gate = house(
        House, primary=votes(*UNSURE), guardian=votes(1, 0), task={"safe_action": "c"}, policy={"mode": "enforce"}
    )
    assert gate.decide().json()["answers"][0]["arbitrage"]["decided_by"] == "guardian"
    gate.guardian.reply = failing()
    reply = gate.decide()
    assert (reply.status_code, reply.json()["answers"][0]["choice"]) == (200, "c")
    gate.with_store(lambda store: events.fold_tallies(store))
    page = Visit(gate).open(f"/console/decisions{query}").text
    assert listed(page) == [record.id for record in gate.records() if record.decided_by == "fallback"]
    assert "Fallback" in page


def test_a_page_that_ends_early_leads_on(house, monkeypatch):
    """Because its records are large, or because few of those that are marked fit."""
    gate = house(House, policy={"content": "full", "audit_rate": 1.0})
    for _ in range(6):
        assert gate.decide().status_code == 200
    monkeypatch.setattr(pages, "PAGE_BYTES", 1)
    path, ids, visit = "/console/decisions", [], Visit(gate)
    while path:
        page = visit.open(path).text
        assert len(listed(page)) == 1
        ids += listed(page)
        path = next_page(page)
    assert len(set(ids)) == len(ids) == 6
    monkeypatch.setattr(decisions, "PAGE", 2)
    monkeypatch.setattr(pages, "_LOOKS", (3,))
    path, number = "/console/decisions?mark=audited&who=guardian", 0
    while path:
        page = visit.open(path).text
        path, number = next_page(page), number + 1
        assert ("look further back" in page) == (path is not None)
    assert (number, "No decision matches" in page) == (3, True)


@pytest.mark.parametrize("query", ["?who=nobody", "?mark=x", "?first=yesterday", "?last=2026-13-45"])
def test_filters_without_a_meaning_are_refused(admin, query):
    assert admin.open(f"/console/decisions{query}").status_code == 400


def test_a_slash_at_the_end_leads_to_the_overview(filled, admin):
    assert admin.open("/console/").url == filled.url + "/console"
    assert admin.open("/console/nothing").status_code == 404


def test_one_decision_is_told_in_a_sentence_and_a_picture(filled, admin):
    page = admin.open(f"/console/decisions/{filled.record}")
    text = words(page)
    assert "to stand alone" in text
    assert page.text.count('<svg class="wide"') == 1
    assert '<path class="star"' in page.text
    assert admin.open("/console/decisions/unknown").status_code == 404
    assert admin.open(f"/console/decisions?id={filled.record}").url.endswith(filled.record)


def test_a_key_for_one_policy_sees_only_that(filled):
    secret, _ = filled.fresh_key("review", policies=["broken"])
    visit = Visit(filled, secret)
    assert "support" not in re.findall(r'href="/console/policies/(\w+)"', visit.open("/console").text)
    assert visit.open("/console/policies/support").status_code == 403
    assert visit.open("/console/decisions?policy=support").status_code == 403
    assert visit.open(f"/console/decisions/{filled.record}").status_code == 404


def test_operators_see_how_many_decisions_have_no_guarantee_and_no_link_to_them(house):
    gate = house(House)
    secret, id = gate.key("call")
    exclude(gate, id)
    assert gate.decide(headers={"Authorization": f"Bearer {secret}"}).status_code == 200
    for scope, linked in (("operate", False), ("admin", True)):
        visit = Visit(gate, gate.key(scope)[0])
        until(lambda visit=visit: "No guarantee 100" in words(visit.open("/console")))
        assert ("/console/decisions" in visit.open("/console").text) == linked


@pytest.fixture
def own(house):
    """A gateway of its own, and an administrator in it."""
    gate = house(Filled)
    return gate, Visit(gate, gate.keys["admin"])


def test_install_shows_what_changes_then_installs_and_rolls_back(own):
    gate, visit = own
    page = visit.open("/console/policies/support")
    bad = visit.send_form("/console/policies/support/check", page, certificate="{}")
    assert "The certificate was refused" in words(bad)
    text = as_json(gate.certificate(alpha=0.1))
    checked = visit.send_form("/console/policies/support/check", page, certificate=text)
    assert "alpha 0.1" in words(checked)
    assert "Picking the cheaper of several keeps the lucky one, whose loss lies above the budget" in words(checked)
    assert "version 1" in words(visit.open("/console/policies/support"))
    done = visit.send_form("/console/policies/support/install", checked, certificate=text)
    assert "version 2" in words(done)
    back = visit.send_form("/console/policies/support/rollback", done)
    assert "version 3" in words(back)
    assert "as version 1" in words(back)


def test_an_alarm_is_lifted_with_a_reason_and_the_promise_is_void(own):
    _, visit = own
    page = visit.open("/console/policies/broken")
    assert "the promise of this certificate is void" in words(page)
    assert visit.send_form("/console/policies/broken/lift", page, reason=" ").status_code == 422
    after = visit.send_form("/console/policies/broken/lift", page, reason=EVIL[0])
    assert "Decisions have no guarantee" in words(after)
    assert visit.send_form("/console/policies/broken/lift", page, reason="again").status_code == 409


def test_a_dial_is_set_to_one_of_its_stops(house):
    gate = house(House, calibration={"dial": True, "zero_one": True, "confidence": 0.9})
    visit = Visit(gate)
    page = visit.open("/console/policies/support")
    assert "The dial" in words(page)
    assert "The promise becomes that of this stop" in words(page)
    opened = set(re.findall(r'commandfor="(stop-\d+)"', page.text))
    assert opened == set(re.findall(r'<dialog id="(stop-\d+)"', page.text))
    alpha = re.findall(r'name="alpha" value="([\d.]+)"', page.text)[-1]
    chosen = visit.send_form("/console/policies/support/choose", page, alpha=alpha)
    assert "version 2" in words(chosen)
    assert f"set to {alpha}" in words(chosen)
    assert visit.send_form("/console/policies/support/choose", page, alpha="0.00001").status_code == 422
    assert visit.send_form("/console/policies/support/choose", page, alpha="x").status_code == 422


def test_a_renewal_that_is_not_due_installs_nothing(admin):
    page = admin.open("/console/policies/support")
    reply = admin.send_form("/console/policies/support/renew", page)
    assert reply.status_code == 409, reply.text


def test_a_policy_without_a_certificate_has_nothing_to_renew_and_says_so(house):
    gate = house(House, certificate=False, policy={"mode": "shadow"})
    visit = Visit(gate)
    page = visit.open("/console/policies/support")
    reply = visit.send_form("/console/policies/support/renew", page)
    assert reply.status_code == 409
    assert "no certificate of a single pair of models to renew" in reply.text


def test_a_key_is_excluded_from_a_promise_and_back_on_the_page_of_keys(own):
    gate, visit = own
    secret, id = gate.key("call")
    ask = {"headers": {"Authorization": f"Bearer {secret}"}}
    for fields, told, shown in (
        ({}, "is excluded from the promise", "excluded from support"),
        ({"end": "yes"}, "", "valid"),
    ):
        form = {"id": id, "policy": "support", "reason": "hostile", **fields}
        page = visit.send_form("/console/keys/exclude", visit.open("/console/keys"), **form)
        assert shown in words(page)
        assert ("is excluded from the promise" in gate.decide(**ask).text) == bool(told)
    assert "excluded from support" not in words(page)


def test_keys_are_made_shown_once_and_revoked(own):
    gate, visit = own
    page = visit.open("/console/keys")
    page_after = visit.send_form("/console/keys", page, label="reviewer-1", scope="review", policy="support", days="30")
    key = re.search(r"arb-[\w-]{43}", page_after.text).group()
    assert key not in visit.open("/console/keys").text
    listed = {one.label: one for one in gate.with_store(lambda store: store.run(keys.list_all))}
    assert (listed["reviewer-1"].scope, listed["reviewer-1"].policies) == ("review", ("support",))
    assert visit.send_form("/console/keys", page, label="", scope="review").status_code == 422
    assert visit.send_form("/console/keys", page, label="x", scope="root").status_code == 422
    assert visit.send_form("/console/keys", page, label="x", scope="call", days="-1").status_code == 422
    visit.send_form("/console/keys/revoke", page, id=listed["reviewer-1"].id)
    assert Visit(gate).send_form("/console/sign-in", Visit(gate).open("/console/sign-in"), key=key).status_code == 401


def test_health_answers_while_the_store_is_away_and_other_pages_say_so(house):
    gate = house(House)
    visit = Visit(gate)
    assert "Everything is working" in words(visit.open("/console/health"))
    database = gate.folder / "arbitrage.sqlite"
    database.rename(gate.folder / "away.sqlite")
    try:
        [reply] = until(lambda: [page for page in [visit.open("/console/health")] if page.status_code == 503])
        assert "The database is unreachable" in reply.text
        decisions = visit.open("/console/decisions")
        assert decisions.status_code == 503
        assert "database" in decisions.text
    finally:
        (gate.folder / "away.sqlite").rename(database)


def test_a_policy_without_audits_says_how_to_get_some(house):
    gate = house(House)
    text = words(Visit(gate).open("/console"))
    assert "audit_rate = 0.1" in text
    assert "–" in text


def test_shadow_mode_says_how_many_rows_there_are(house):
    gate = house(House, certificate=False, policy={"mode": "shadow"})
    gate.decide()
    text = words(Visit(gate).open("/console"))
    assert "rows recorded for a calibration" in text
    assert words(Visit(gate).open("/console/policies/support"))


def test_unknown_costs_are_never_zero():
    tally = PolicyTally(policy="p", version=1, decisions=10, unknown_cost=10)
    assert saved(tally).dollars is None
    assert money(saved(tally).dollars) == "unknown"
    known = PolicyTally(policy="p", version=1, decisions=10, cost=2.0, guardian_calls=4, guardian_cost=4.0)
    assert (saved(known).dollars, "4 recorded calls" in saved(known).basis) == (8.0, True)
    audited = PolicyTally(
        policy="p",
        version=1,
        decisions=10,
        cost=2.0,
        guardian_calls=4,
        guardian_cost=4.0,
        audit_calls=4,
        audit_cost=4.0,
    )
    assert saved(audited).dollars == 4.0  # audits are paid for too


@pytest.mark.parametrize(
    ("value", "text"), [(None, "unknown"), (0, "$0.00"), (0.00002, "$0.00002"), (12.345, "$12.35"), (-3, "−$3.00"),
                        (123456, "$123,456")],
)  # fmt: skip
def test_money(value, text):
    assert money(value) == text


def test_times_have_the_unit_that_fits():
    assert [age(5), age(200), age(8000), age(400000), age(None)] == ["5 s", "3 min", "2 h", "5 d", "unknown"]
    times = [seconds(value) for value in (0.0, 0.0004, 0.5, 41.3, 600, None)]
    assert times == ["0.00 s", "<0.01 s", "0.50 s", "41.3 s", "10 min", "unknown"]


def test_shares_and_counts_are_never_rounded_into_something_else():
    texts = [percent(share) for share in (0.0, 0.0002, 0.4, 0.4567, 0.99996, 1.0, None)]
    assert texts == ["0\u00a0%", "<0.1\u00a0%", "40\u00a0%", "45.7\u00a0%", ">99.9\u00a0%", "100\u00a0%", "unknown"]
    assert [count_text(n, "row") for n in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]
    assert [sentence(text) for text in ("a limit", "Why?", "")] == ["A limit.", "Why?", "."]


def test_pictures_hold_for_odd_values():
    for scores in ((0.0, 0.0), (-5.0, -5.0), (-1.0, 2.0), (1e-9, 1.0)):
        bars = [Bar(text=EVIL[0] * 5, score=score, gap=0.0, candidate=True, chosen=True) for score in scores]
        for relaxation in (None, 0.0, 0.5, 100.0):
            assert "<script" not in score_chart(bars, relaxation)
    assert "nan" not in confidence_chart(0.0, 0.0)
    points = [
        LossPoint(time=1e9 + k, audits=k + 1, mean=float("nan") if k < 2 else 0.0, lower=-1.0, upper=1.0)
        for k in range(9)
    ]
    assert "nan" not in loss_chart(LossCourse(points=points, alpha=0.05, red=0.08, marks=[(1e9, EVIL[0])]))


def test_forms_of_a_page_carry_the_token_of_the_sign_in(admin):
    tokens = set(re.findall(r'name="csrf" value="(\w+)"', admin.open("/console/policies/broken").text))
    assert tokens == {token_of(admin.open("/console").text)}


def test_a_fallback_and_the_questions_of_chats_are_shown(house):
    gate = house(House, form="text", policy={"audit_rate": 1.0, "content": "full"})
    reply = gate.chat()
    assert reply.status_code == 200
    id = reply.headers["x-arbitrage-decision-id"]
    text = words(Visit(gate).open(f"/console/decisions/{id}"))
    assert "The Primary's confidence was 0.9, and" in text
    assert "user: Say it." in text
