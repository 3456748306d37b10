"""Batches that a team labels through the review queue of a gateway: blind, resumable, with the same labels as by hand."""

import csv
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformal_arbitrage.cli import cli
from conformal_arbitrage.store import integrity
from conformal_arbitrage.store.reviews import labelling
from tests.gateway.durability import SECRET, run_sql
from tests.gateway.house import until
from tests.gateway.people import LONG, TEAM, PeopleHouse

LABELS = ("no", "perhaps", "yes")


@pytest.fixture
def gate(house, monkeypatch, tmp_path):
    """A gateway with a team of two, whose folder is the one to work in.

    The secret, and with it every draw, is the same in each run: one draw in forty leaves nothing to experts.
    """
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("ARBITRAGE_SECRET", SECRET)
    gate = house(PeopleHouse, members=("ann", "bob"), certificate=False, policy={"mode": "shadow"})
    monkeypatch.chdir(gate.folder)
    return gate


def truth_of(k):
    return LABELS[k % 3]


def write_table(n=40, shift=0, name="answers.csv"):
    """Write items whose machine is wrong in every fifth, or, shifted, in all; it is unsure where it is wrong."""
    with Path(name).open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "text", "answer", "confidence"])
        for k in range(n):
            wrong = k % 5 == 0
            answer = LABELS[(k + wrong + shift) % 3]
            writer.writerow([f"item-{k}", f"text {k}", answer, 0.5 if wrong else 0.9 + k / 1000])
    return name


def run(*arguments, status=0):
    shown = CliRunner().invoke(cli, list(arguments))
    assert shown.exit_code == status, shown.output
    return shown


def draw(*more, folder="batch", sample=20, table="answers.csv"):
    asked = ["--error", "0.1", "--sample", str(sample), "-o", folder, "--review", TEAM, "--json", *more]
    return json.loads(run("batch", "draw", table, *asked).stdout)


def certify(*more, folder="batch"):
    return json.loads(run("batch", "certify", folder, "--json", *more).stdout)


def read_rows(path):
    with Path(path).open(newline="") as stream:
        return list(csv.DictReader(stream))


def number(held):
    return int(re.search(r"text (\d+)", held["context"])[1])


def label(reviewer, count):
    """Let somebody label so many items rightly, and their votes count at once."""
    for _ in range(count):
        held = reviewer.wait()
        assert reviewer.vote(held, held["options"].index(truth_of(number(held)))).status_code == 200
    for change in ("update votes set counts = 0", "update reviews set ready = 0 where votes > 0"):
        stored(reviewer.house, change)


def stored(gate, statement):
    return run_sql(str(gate.folder / "arbitrage.sqlite"), statement)


def questions(gate):
    """What people are shown of each item, by its text."""
    return {json.loads(payload)["context"]: payload for (payload,) in stored(gate, "select payload from reviews")}


def labelled(folder="batch"):
    return lambda: not certify(folder=folder)["without_verdict"]


def test_a_team_labels_the_sample_and_what_is_left(gate):
    write_table()
    assert draw()["in_review"] == 20
    ann, bob = gate.reviewer("ann"), gate.reviewer("bob")
    held = ann.claim()
    assert (held["kind"], held["policy"], held["options"]) == ("choose", "batch", list(LABELS))
    assert held["instructions"] == "Which label is right?"
    assert re.fullmatch(r"id: item-\d+\ntext: text \d+", held["context"])
    label(ann, 12)
    label(bob, 8)
    until(labelled(), LONG)
    assert all(row["expert"] == truth_of(int(row["id"].removeprefix("item-"))) for row in read_rows("batch/sample.csv"))
    left = certify("--review", TEAM)["in_review"]
    assert left == len(read_rows("batch/todo.csv")) > 0
    refused = run("batch", "finish", "batch", status=2)
    assert f"{left} of {left} items have no label yet" in refused.stderr
    label(bob, left)
    until(lambda: run_finish(), LONG)
    rows = read_rows("batch/labels.csv")
    assert len(rows) == 40
    assert all(row["label"] == truth_of(int(row["id"].removeprefix("item-"))) for row in rows if row["by"] == "expert")
    run("verify", "batch/certificate.json", "answers.csv")
    assert gate.with_store(lambda store: integrity.verify(store)) == []


def run_finish():
    return CliRunner().invoke(cli, ["batch", "finish", "batch"]).exit_code == 0


def test_what_people_see_depends_neither_on_the_machines_label_nor_on_being_sampled(gate):
    """The same items with every label changed, and asked as a sample or because they are left: the same bytes."""
    write_table(15)
    draw(sample=15)
    all_sampled = questions(gate)
    stored(gate, "delete from reviews")
    write_table(15, shift=1, name="other.csv")
    draw("--show-answers", table="other.csv", folder="other", sample=15)
    assert questions(gate) == all_sampled
    stored(gate, "delete from reviews")
    draw(folder="part", sample=5)
    assert len(questions(gate)) == 5
    certify("--review", TEAM, folder="part")
    kept = {f"id: {row['id']}\ntext: text {row['id'].removeprefix('item-')}" for row in read_rows("part/kept.csv")}
    assert questions(gate) == {context: payload for context, payload in all_sampled.items() if context not in kept}


def test_interrupted_labelling_goes_on_and_certify_says_what_is_missing(gate):
    write_table()
    draw()
    ann = gate.reviewer("ann")
    label(ann, 5)
    until(lambda: len(certify()["without_verdict"]) == 15, LONG)
    assert "15 items of the sample have no verdict (15 not labelled yet)" in run("batch", "certify", "batch").stderr
    gate.restart()
    assert draw()["in_review"] == 15  # the same draw again asks nobody twice
    rows = read_rows("batch/sample.csv")
    by_hand = next(row for row in rows if not row["expert"])
    by_hand["expert"] = "by hand"
    with Path("batch/sample.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert draw()["in_review"] == 14  # what somebody labelled in the file leaves the queue
    label(ann, 14)
    assert ann.claim() is None
    until(labelled(), LONG)
    assert sum(row["expert"] == "by hand" for row in read_rows("batch/sample.csv")) == 1


def test_what_a_later_certificate_keeps_leaves_the_queue(gate):
    write_table()
    draw()
    ann = gate.reviewer("ann")
    before = certify("--review", TEAM)["in_review"]
    assert before == 20 + len(read_rows("batch/todo.csv"))
    label(ann, 20)  # the sample is asked about first
    until(labelled(), LONG)
    after = certify("--review", TEAM)["in_review"]
    assert after == len(read_rows("batch/todo.csv")) < before - 20
    states = gate.with_store(lambda store: states_of(store, gate))
    assert sorted(set(states)) == ["closed", "open", "withdrawn"]


async def states_of(store, gate):
    [(batch,)] = stored(gate, "select distinct identities from reviews")
    return [outcome.state for outcome in (await store.run(labelling, batch)).values()]


def test_what_nobody_can_tell_is_undecided(gate):
    write_table()
    draw()
    ann, bob = gate.reviewer("ann"), gate.reviewer("bob")
    for reviewer in (ann, bob):
        held = reviewer.wait()
        assert reviewer.post(f"{held['token']}/skip").status_code == 204
    until(lambda: certify() and [row["expert"] for row in read_rows("batch/sample.csv")].count("?") == 1, LONG)
    label(ann, 19)
    until(lambda: len(certify()["without_verdict"]) == 1, LONG)
    assert certify()["evidence"]["missing_guardian_rows"] == 1


def test_labels_that_the_machine_never_gave_may_be_chosen(gate):
    write_table()
    draw("--label", "neither", "--label", "YES", "--instructions", "What does it say?")
    held = gate.reviewer("ann").claim()
    assert held["options"] == ["neither", "YES", "no", "perhaps"]  # "yes" is the same
    assert held["instructions"] == "What does it say?"
    for other in (["--label", "both"], ["--instructions", "Else?"]):
        assert "stay as they are" in run("batch", "certify", "batch", "--review", TEAM, *other, status=2).stderr


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (["--review", "strangers"], f"of {TEAM}; got 'strangers'"),
        (["--label", "x"], "name them with --review"),
        (["--review", TEAM, "--config", "other.toml"], "other.toml"),
    ],
)
def test_a_queue_that_cannot_be_is_refused(gate, how, message):
    write_table()
    shown = run("batch", "draw", "answers.csv", "--error", "0.1", "--sample", "20", "-o", "batch", *how, status=2)
    assert message in " ".join(shown.stderr.split())
    assert not Path("batch/review.json").exists()


def test_free_text_is_no_menu(gate):
    with Path("texts.csv").open("w") as stream:
        stream.write("id,answer,confidence\n" + "".join(f"i{k},answer {k},0.9\n" for k in range(200)))
    shown = run(
        "batch", "draw", "texts.csv", "--error", "0.1", "--sample", "9", "-o", "batch", "--review", TEAM, status=2
    )
    assert "people choose from 2 to 100 labels" in shown.stderr
    assert not Path("batch").exists()
    again = run("batch", "draw", "texts.csv", "--error", "0.1", "--sample", "10", "-o", "batch", "--json")
    assert json.loads(again.stdout)["draw"] == 1  # what failed was none
    assert len(read_rows("batch/sample.csv")) == 10  # which can be filled in
