"""The slider of the policy page, which only shows, and how many people a budget takes."""

import re
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner

from conformal_arbitrage import ScoreLog
from conformal_arbitrage.calibration.stops import STOPS
from conformal_arbitrage.cli import cli
from conformal_arbitrage.collecting.looking import BUDGETS, LOOKING_SHARE, LookingPart
from conformal_arbitrage.gateway.server import secret_of
from conformal_arbitrage.gateway.staffing import busiest_hour, mean_held
from conformal_arbitrage.monitoring.reviewing import plan_staffing
from conformal_arbitrage.store import DecisionBody, new_id
from conformal_arbitrage.store.review_base import CastVote
from tests.console.filled import Visit
from tests.console.test_browser import violations
from tests.console.test_pages import words
from tests.gateway.house import House, votes
from tests.gateway.people import PeopleHouse
from tests.store.facts import LEG, decision

ROWS = 330


def wavering(path, body, number):
    """A Primary whose confidence differs from question to question."""
    return votes(0.5 + 0.02 * (number % 21), 0.3)(path, body, number)


def disagreeing(path, body, number):
    """A Guardian that takes another option now and then."""
    return votes(*((0.0, 1.0) if number % 9 == 0 else (1.0, 0.0)))(path, body, number)


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory):
    """A gateway in shadow mode with rows enough to draw a frontier."""
    folder = tmp_path_factory.mktemp("looked-at")
    with House(folder, primary=wavering, guardian=disagreeing, policy={"mode": "shadow"}) as gate:
        for _ in range(ROWS):
            assert gate.decide().status_code == 200
        gate.with_store(lambda store: store.fold_tallies())
        yield gate


def shown(page):
    """What the slider says: alpha, share in per cent, loss."""
    match = re.search(
        r"Alpha ([\d.]+): the Guardian is asked about ([\d.]+)\s% .*? estimated loss ([\d.]+)", words(page)
    )
    return tuple(float(part) for part in match.groups())


def test_the_slider_shows_what_budgets_would_ask_and_promises_nothing(looked_at):
    visit = Visit(looked_at)
    page = visit.open("/console/policies/support")
    assert "An estimate, not a promise, and nothing changes here." in words(page)
    assert "records export --policy support --score-log --unseen" in words(page)
    small, now, large = (
        shown(visit.open(f"/console/policies/support{query}")) for query in ("?alpha=0.02", "", "?alpha=0.1")
    )
    assert (small[0], now[0], large[0]) == (0.02, 0.05, 0.1)
    assert small[1] > now[1] > large[1]
    assert small[2] < now[2] < large[2]
    assert now[2] < 0.08  # ids are drawn, so which rows are shown differs from run to run
    [rows] = re.findall(r"It comes from (\d+) rows", words(page))
    assert 100 <= int(rows) < 0.55 * ROWS


@pytest.mark.parametrize("query", ["?alpha=x", "?alpha=-1", "?alpha=nan", "?alpha=1e400", "?calls=1e9&seconds=&alpha="])
def test_odd_addresses_show_something(looked_at, query):
    assert shown(Visit(looked_at).open(f"/console/policies/support{query}"))[0] in {0.05, 0.3}


def test_looking_changes_nothing(looked_at):
    def facts(store):
        return store.policy_history("support")

    before = looked_at.with_store(facts)
    for alpha in BUDGETS[::6]:
        Visit(looked_at).open(f"/console/policies/support?alpha={alpha}")
    assert looked_at.with_store(facts) == before
    reply = Visit(looked_at)
    page = reply.open("/console/policies/support")
    assert reply.send_form("/console/policies/support", page, alpha="0.1").status_code == 405


def test_what_certifies_a_choice_is_what_was_not_shown(looked_at, tmp_path):
    """The export leaves out exactly the rows that the slider is drawn from, whatever their scores."""
    whole, unseen = tmp_path / "whole.parquet", tmp_path / "unseen.parquet"
    export = ["records", "export", "--policy", "support", "--score-log", "--config", str(looked_at.path)]
    for path, more in ((whole, []), (unseen, ["--unseen"])):
        outcome = CliRunner().invoke(cli, [*export, *more, "-o", str(path)])
        assert outcome.exit_code == 0, outcome.output
    part = LookingPart(secret_of(looked_at.config).keys)
    ids, kept = set(ScoreLog.read(whole).id), set(ScoreLog.read(unseen).id)
    assert len(ids) == ROWS
    assert {id for id in ids if part.shows(id)} == ids - kept
    looked_at.with_store(lambda store: store.gather_rows())
    models = looked_at.records()[0].decision.identities_sha256
    rows = looked_at.with_store(
        lambda store: store.latest_rows("support", identities_sha256=models, limit=10_000, wanted=part.shows)
    )
    assert {row.id for row in rows} == ids - kept
    folder = CliRunner().invoke(cli, [*export, "--unseen", "-o", f"{tmp_path}/parts/"])
    assert folder.exit_code == 0, folder.output
    assert f"{len(kept)} rows" in folder.output


def test_the_looking_part_is_a_share_apart_from_other_draws():
    ids = [new_id() for _ in range(4000)]
    one, other = LookingPart([b"a" * 32]), LookingPart([b"b" * 32, b"a" * 32])
    share = sum(map(one.shows, ids)) / len(ids)
    assert abs(share - LOOKING_SHARE) < 0.04
    assert not any(one.shows(id) and one.is_unseen(id) for id in ids)
    assert all(one.shows(id) or one.is_unseen(id) for id in ids)
    assert not any(one.shows(id) and other.is_unseen(id) for id in ids)  # shown before the secret was changed
    assert any(one.is_unseen(id) and not other.is_unseen(id) for id in ids)


def test_the_stops_of_a_dial_are_among_the_budgets():
    assert set(STOPS) <= set(BUDGETS)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["desk, light", "phone, dark"])
def test_the_slider_moves_by_keys_and_sends_nothing(looked_at, open_page, width, dark):
    page = open_page(f"{looked_at.url}/console/policies/support", width=width, dark=dark)
    assert violations(page, "#budget") == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sent = []
    page.on("request", lambda request: sent.append(request.method) if request.method != "GET" else None)
    slider, output = page.locator("#budget input[type=range]"), page.locator("#budget output")
    slider.focus()
    page.keyboard.press("Home")
    assert output.text_content().startswith("Alpha 0.005:")
    page.keyboard.press("End")
    assert output.text_content().startswith("Alpha 0.3:")
    assert slider.get_attribute("aria-valuetext") == output.text_content()
    assert sent == []


def test_without_scripts_a_form_shows_another_budget(looked_at, open_page):
    page = open_page(f"{looked_at.url}/console/policies/support", java_script_enabled=False)
    page.locator("#alpha").select_option("0.1")
    page.locator("#budget").get_by_role("button", name="Show").click()
    assert page.locator("#budget output").text_content().startswith("Alpha 0.1:")
    assert page.locator("#budget input[type=range]").is_hidden()


def test_too_few_rows_are_said_to_be_too_few(house):
    gate = house(House, certificate=False, policy={"mode": "shadow"})
    gate.decide()
    assert "100 with an outcome are needed" in words(Visit(gate).open("/console/policies/support"))


def test_people_are_planned_for_the_busiest_hour_of_the_week():
    monday = int(datetime(2026, 11, 16, 9, tzinfo=UTC).timestamp() // 3600)
    calls, when = busiest_hour({monday: 600, monday - 168: 400, monday + 1: 499, monday - 167: 499})
    assert (calls, when) == (500.0, "Monday, 9:00 UTC")
    assert busiest_hour({}) == (0.0, None)


def test_how_long_votes_take_leaves_skips_and_absences_out():
    vote = {"reviewer": "ann", "team": "t", "at": 0.0}
    cast = [CastVote(held=30.0, **vote), CastVote(held=9e9, **vote), CastVote(held=1.0, skipped=True, **vote)]
    assert mean_held(cast, "t") == 615.0
    assert mean_held(cast, "other") is None


def test_five_people_at_600_questions_an_hour(house):
    """The figures of `arbitrage plan --reviews`, on the page of the policy and of the team."""
    gate = house(PeopleHouse, primary=votes(0.5, 0.4, 0.1), review={"wait": 50.0})
    who = ["guardian"] * 294 + ["primary"] * 306
    body = DecisionBody(
        action=1, candidates=(1,), margin=0.8, legs=(LEG,), mode="enforce", form="menu", size=2, version=1
    )
    events = [decision(body=body, decided_by=one) for one in who]
    gate.with_store(lambda store: store.commit(events))
    gate.with_store(lambda store: store.fold_tallies())
    text = words(Visit(gate).open("/console/policies/support?calls=600&seconds=38"))
    plan = plan_staffing(calls_per_hour=600, guardian_share=0.49, seconds=38, wait=50)
    four, five = (f"{100 * row.waiting:.1f} %" for row in plan.rows[:2])
    assert "600 questions an hour: 294 votes an hour." in text
    assert f"4 people leave {four} of the questions waiting for more than 50 s, 5 people {five}." in text
    assert "An estimate, not a promise" in text
    team = words(Visit(gate).open("/console/team"))
    assert "Staffing. In the busiest hour of the week: 294 votes." in team
    crowded = words(Visit(gate).open("/console/policies/support?calls=100000&seconds=1200"))
    assert "100,000 questions an hour are too many for a plan, which is made for up to 10,000 people." in crowded


def test_a_team_that_would_be_too_large_has_no_plan(monkeypatch, house):
    monkeypatch.setattr("conformal_arbitrage.gateway.staffing.MOST_PEOPLE", 0.001)
    gate = house(PeopleHouse, primary=votes(0.5, 0.4, 0.1))
    gate.with_store(lambda store: store.commit([decision(decided_by="guardian") for _ in range(9)]))
    gate.with_store(lambda store: store.fold_tallies())
    assert "are too many for a plan" in words(Visit(gate).open("/console/policies/support"))
    assert "Staffing." not in words(Visit(gate).open("/console/team"))
