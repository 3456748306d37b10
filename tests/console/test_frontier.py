"""The slider of the policy page, which only shows."""

import re

import pytest
from click.testing import CliRunner

from conformal_arbitrage import ScoreLog
from conformal_arbitrage.calibration.options import STOPS
from conformal_arbitrage.calibration.secret import ProjectSecret
from conformal_arbitrage.cli import cli
from conformal_arbitrage.collecting.renewal import BUDGETS, LOOKING_SHARE, LookingPart
from conformal_arbitrage.store import events, policies
from conformal_arbitrage.store.record import new_id
from tests.console.filled import Visit
from tests.console.test_browser import violations
from tests.console.test_pages import words
from tests.gateway.house import House, votes

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
        gate.with_store(lambda store: events.fold_tallies(store))
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


@pytest.mark.parametrize("query", ["?alpha=x", "?alpha=-1", "?alpha=nan", "?alpha=1e400", "?calls=1e9&alpha="])
def test_odd_addresses_show_something(looked_at, query):
    assert shown(Visit(looked_at).open(f"/console/policies/support{query}"))[0] in {0.05, 0.3}


def test_looking_changes_nothing(looked_at):
    def facts(store):
        return store.run(policies.history, "support")

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
    part = LookingPart(ProjectSecret.find().keys)
    ids, kept = set(ScoreLog.read(whole).id), set(ScoreLog.read(unseen).id)
    assert len(ids) == ROWS
    assert {id for id in ids if part.shows(id)} == ids - kept
    looked_at.with_store(lambda store: events.gather_rows(store))
    models = looked_at.records()[0].decision.identities_sha256
    rows = looked_at.with_store(
        lambda store: store.run(
            events.latest_rows, "support", identities_sha256=models, limit=10_000, wanted=part.shows
        )
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
