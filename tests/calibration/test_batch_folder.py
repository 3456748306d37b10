"""Batches of a table: draw, label, certify and finish in a folder; hostile tables and files; repeated draws."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import polars
import pytest

from conformal_arbitrage import (
    ArbitrageError,
    BatchColumns,
    Certificate,
    CertificateError,
    OptionError,
    ProjectSecret,
    ScoreLogError,
    draw_batch,
    open_batch,
    plan_batch,
    verify,
)
from conformal_arbitrage.calibration.batch import read_labels
from conformal_arbitrage.cli import cli

SECRET = ProjectSecret((b"a secret of these tests",))


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """Draws are noted in a folder of this test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("ARBITRAGE_SECRET", "a secret of these tests".replace(" ", "-"))
    monkeypatch.chdir(tmp_path)


def table_of(n=400, seed=1, labels=("yes", "no", "perhaps")):
    """Return rows of a table whose machine is right as often as it says."""
    rng, rows = np.random.default_rng(seed), []
    for k in range(n):
        confidence = round(float(rng.uniform(0.4, 1)), 2)
        truth = str(rng.choice(labels))
        others = [label for label in labels if label != truth]
        answer = truth if rng.random() < confidence else str(rng.choice(others))
        rows.append(
            {"id": f"item-{k}", "text": f"text {seed} {k}", "answer": answer, "confidence": confidence, "truth": truth}
        )
    return rows


def write_rows(path, rows):
    with Path(path).open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def read_rows(path):
    with Path(path).open(newline="") as stream:
        return list(csv.DictReader(stream))


COLUMNS = BatchColumns(id="id")


def drawn(rows, sample=100, error=0.1, folder="batch", table="answers.csv", **how):
    batch = draw_batch(write_rows(table, rows), error=error, sample=sample, columns=COLUMNS, **how)
    batch.write(folder)
    return batch


def label(path, rows, change=lambda rows: rows):
    """Let experts fill in a file."""
    truth = {row["id"]: row["truth"] for row in rows}
    filled = [{**row, "expert": truth[row["id"]]} for row in read_rows(path)]
    write_rows(path, change(filled))


def without_truth(rows):
    return [{name: cell for name, cell in row.items() if name != "truth"} for row in rows]


def certify(folder="batch"):
    batch = open_batch(folder)
    certificate = batch.certify(batch.read_sample(folder)[1]).sign(ProjectSecret.find())
    batch.write_certified(folder, certificate)
    return certificate


def test_a_batch_from_its_table_to_all_labels():
    rows = table_of()
    drawn(without_truth(rows))
    shown = read_rows("batch/sample.csv")
    assert len(shown) == 100
    assert set(shown[0]) == {"row", "id", "text", "expert"}  # the machine's label sways nobody
    assert all(rows[int(row["row"]) - 1]["id"] == row["id"] for row in shown)
    label("batch/sample.csv", rows)
    certificate = certify()
    kept, todo = read_rows("batch/kept.csv"), read_rows("batch/todo.csv")
    assert len(kept) == certificate.rule.kept > 0
    ids = [row["id"] for part in (shown, kept, todo) for row in part]
    assert sorted(ids) == sorted(row["id"] for row in rows)
    assert Path("batch/figure.svg").read_text().startswith("<svg xmlns")
    with pytest.raises(ScoreLogError, match=r"todo\.csv: \d+ of \d+ items have no label yet"):
        open_batch("batch").finish("batch", certificate)
    label("batch/todo.csv", rows, lambda filled: [{**filled[0], "expert": "?"}, *filled[1:]])
    counts = open_batch("batch").finish("batch", certificate)
    labels = read_rows("batch/labels.csv")
    assert counts == {"machine": len(kept), "expert": len(shown) + len(todo) - 1, "undecided": 1}
    assert [row["id"] for row in labels] == [row["id"] for row in rows]
    truth = {row["id"]: row["truth"] for row in rows}
    assert all(row["label"] == truth[row["id"]] for row in labels if row["by"] == "expert")
    assert verify(Certificate.load("batch/certificate.json"), read_labels("batch")).ok


def test_truth_that_the_table_has_is_filled_in():
    rows = table_of()
    columns = BatchColumns(id="id", truth="truth")
    draw_batch(write_rows("answers.csv", rows), error=0.1, sample=100, columns=columns).write("batch")
    certificate = certify()
    assert certificate.evidence.missing_guardian_rows == 0
    assert open_batch("batch").finish("batch", certificate)["undecided"] == 0


def test_labelling_goes_on_where_it_stopped():
    rows = table_of()
    batch = drawn(without_truth(rows))
    label("batch/sample.csv", rows, lambda filled: [*filled[:60], *({**row, "expert": ""} for row in filled[60:])])
    batch.write("batch")  # the same draw again
    assert sum(bool(row["expert"]) for row in read_rows("batch/sample.csv")) == 60
    half = certify()
    assert half.evidence.missing_guardian_rows == 40
    label("batch/todo.csv", rows, lambda filled: filled[:1] + [{**row, "expert": ""} for row in filled[1:]])
    first = read_rows("batch/todo.csv")[0]
    label("batch/sample.csv", rows)
    whole = certify()
    assert whole.rule.kept >= half.rule.kept
    again = {row["id"]: row["expert"] for row in read_rows("batch/todo.csv")}
    assert again.get(first["id"], first["expert"]) == first["expert"]


@pytest.mark.parametrize("numbers", ["as written", "wrong", "words", "none"])
def test_labels_of_what_is_left_stay_whatever_the_numbers_of_its_rows_say(numbers):
    rows = table_of()
    drawn(without_truth(rows))
    label("batch/sample.csv", rows)
    certify()
    label("batch/todo.csv", rows, lambda filled: [*filled[:5], *({**row, "expert": ""} for row in filled[5:])])
    before = read_rows("batch/todo.csv")
    change = {
        "as written": lambda row: row,
        "wrong": lambda row: {**row, "row": str(1 + int(row["row"]) % 400)},
        "words": lambda row: {**row, "row": f"no. {row['row']}"},
        "none": lambda row: {name: cell for name, cell in row.items() if name != "row"},
    }[numbers]
    write_rows("batch/todo.csv", [change(row) for row in reversed(before)])
    certify()
    assert read_rows("batch/todo.csv") == before


def test_a_batch_of_which_nothing_is_left_is_certified_again():
    rows = table_of()
    for row in rows:
        row["truth"] = row["answer"]
    drawn(without_truth(rows))
    label("batch/sample.csv", rows)
    assert certify().rule == certify().rule
    assert Path("batch/todo.csv").read_text() == "row,id,text,expert\n"
    assert open_batch("batch").finish("batch", certify())["expert"] == 100


def test_labels_are_not_delivered_under_the_certificate_of_other_verdicts():
    rows = table_of()
    drawn(without_truth(rows))
    assert "there is no certificate yet; run `arbitrage batch certify batch` first" in " ".join(
        run("batch", "finish", "batch", status=2).stderr.split()
    )
    label("batch/sample.csv", rows)
    early = certify()
    label("batch/todo.csv", rows)
    answers = {row["id"]: row["answer"] for row in rows}
    fine = Path("batch/sample.csv").read_bytes()
    slips = [{**row, "expert": "none of these"} for row in read_rows("batch/sample.csv")]
    write_rows("batch/sample.csv", slips)
    refused = " ".join(run("batch", "finish", "batch", status=2).stderr.split())
    assert "are others than those of the certificate; run `arbitrage batch certify batch` again" in refused
    assert not Path("batch/labels.csv").exists()
    write_rows("batch/sample.csv", [{**row, "expert": answers[row["id"]]} for row in slips])
    with pytest.raises(CertificateError, match="are others than those"):
        open_batch("batch").finish("batch", early)
    Path("batch/sample.csv").write_bytes(fine)
    run("batch", "finish", "batch")


@pytest.mark.parametrize(("kept", "said"), [("all", "all outside the sample"), ("none", "(none)")])
def test_a_certificate_that_keeps_all_or_nothing_is_shown(kept, said):
    rows = table_of()
    for row in rows:
        row["truth"] = row["answer"] if kept == "all" else "other"
    drawn(without_truth(rows), error=0.1 if kept == "all" else 0)
    label("batch/sample.csv", rows)
    assert said in run("batch", "certify", "batch").stdout
    assert said in run("certificate", "show", "batch/certificate.json").stdout
    certificate = certify()
    assert certificate.rule.keeps == kept
    assert said in certificate._repr_html_()
    if kept == "all":
        run("batch", "finish", "batch")


def test_verdicts_may_say_right_or_wrong():
    rows = table_of()
    drawn(without_truth(rows))
    answers = {row["id"]: row["answer"] == row["truth"] for row in rows}
    said = [{**row, "right": "yes" if answers[row["id"]] else "no"} for row in read_rows("batch/sample.csv")]
    write_rows("batch/sample.csv", said)
    by_mark = certify()
    for row in said:
        del row["right"]
    write_rows("batch/sample.csv", said)
    label("batch/sample.csv", rows)
    assert certify().rule == by_mark.rule


def test_machine_labels_may_be_graded_if_the_draw_says_so():
    rows = table_of()
    drawn(without_truth(rows), graded=True)
    truth = {row["id"]: row for row in rows}
    answered = [(row, truth[row["id"]]) for row in read_rows("batch/sample.csv")]
    graded = [
        {**row, "expert": of["truth"], "right": "1" if of["answer"] == of["truth"] else "0.4"} for row, of in answered
    ]
    write_rows("batch/sample.csv", graded)
    certificate = certify()
    assert "add up to at most 0.1 times 400" in certificate.guarantee
    assert certificate.evidence.empirical_risk == pytest.approx(
        0.6 * sum(row["right"] == "0.4" for row in graded) / 100
    )
    assert verify(Certificate.load("batch/certificate.json"), read_labels("batch")).ok
    write_rows("batch/sample.csv", [{**graded[0], "right": "4 of 5"}, *graded[1:]])
    with pytest.raises(ScoreLogError, match="'4 of 5' is not yes, no or a grade from 0 to 1"):
        certify()


# --- What is refused ---


def bad_table(change):
    rows = without_truth(table_of(60))
    change(rows)
    return rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[3].update(confidence="NaN"), "row 4 has a label in 'answer' and no number"),
        (lambda rows: rows[3].update(confidence=""), "row 4 has a label in 'answer' and no number"),
        (lambda rows: rows[3].update(confidence=-0.5), "row 4.*must be 0 or more"),
        (lambda rows: rows[3].update(confidence="quite"), "row 4.*is not a number"),
        (lambda rows: rows[3].update(confidence="87 %"), "row 4.*is not a number"),
        (lambda rows: rows[3].update(id="item-0"), "rows 1 and 4 have the id 'item-0'"),
        (lambda rows: rows[3].update(id=""), "row 4 has no id"),
        (lambda rows: [row.pop("answer") for row in rows], "no column 'answer'.*--answer-column"),
    ],
)
def test_a_bad_table_is_refused(change, message):
    with pytest.raises(ScoreLogError, match=message):
        drawn(bad_table(change))
    assert not Path("batch").exists()
    assert not Path("config/conformal-arbitrage/arbitrage-batches.json").exists()


def test_percentages_are_converted_and_items_without_a_label_go_to_experts():
    rows = without_truth(table_of(60))
    for row in rows:
        row["confidence"] = f"{100 * row['confidence']:.0f} %"
    rows[5].update(answer="", confidence="")
    batch = drawn(rows, sample=20)
    assert batch.items.converted == "percentages"
    assert batch.items.labelled.sum() == 59
    assert batch.items.risk[batch.items.labelled].min() >= 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [{**rows[0], "id": "item-x"}, *rows[1:]], "1 row not given to experts.*such as item-x"),
        (lambda rows: [{**rows[0], "id": rows[1]["id"]}, *rows[1:]], "1 row twice"),
        (lambda rows: [*rows, {**rows[0], "id": "item-1000"}], "1 row not given.*such as item-1000"),
        (lambda rows: rows[1:], r"1 row missing, such as item-\d+ \(column 'id'\)"),
        (lambda rows: [*rows, rows[0]], "1 row twice"),
        (lambda rows: [{k: v for k, v in row.items() if k != "id"} for row in rows], "no column 'id'"),
        (lambda rows: [{k: v for k, v in row.items() if k != "expert"} for row in rows], "no column 'expert'"),
        (lambda rows: [{**row, "right": "maybe"} for row in rows], "is not yes or no"),
    ],
)
def test_a_sample_that_was_spoiled_is_refused_and_nothing_is_lost(change, message):
    rows = table_of()
    drawn(without_truth(rows))
    label("batch/sample.csv", rows, change)
    before = Path("batch/sample.csv").read_bytes()
    with pytest.raises(ScoreLogError, match=message):
        certify()
    assert Path("batch/sample.csv").read_bytes() == before
    assert not Path("batch/certificate.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [*rows, {**rows[0], "row": "9999"}], "1 row not given to experts"),
        (lambda rows: [{**rows[0], "row": "first"}, *rows[1:]], "is not a number"),
        (lambda rows: [{**rows[0], "row": "-3"}, *rows[1:]], "must number every row"),
        (lambda rows: [{**rows[0], "row": ""}, *rows[1:]], "must number every row"),
        (lambda rows: [{k: v for k, v in row.items() if k != "row"} for row in rows], "no column 'row'"),
        (lambda rows: rows[1:], "1 row missing"),
        (lambda rows: [*rows, rows[0]], "1 row twice"),
    ],
)
def test_a_sample_of_items_without_ids_that_was_spoiled_is_refused(change, message):
    rows = table_of()
    for row in rows:
        row["name"] = row.pop("id")
    draw_batch(write_rows("answers.csv", without_truth(rows)), error=0.1, sample=100).write("batch")
    write_rows("batch/sample.csv", change([{**row, "expert": "yes"} for row in read_rows("batch/sample.csv")]))
    with pytest.raises(ScoreLogError, match=message):
        certify()
    assert not Path("batch/certificate.json").exists()


def test_the_sample_of_another_table_is_refused():
    drawn(without_truth(table_of()))
    drawn(without_truth(table_of(seed=2)), folder="other", table="other.csv")
    shutil.copy("other/sample.csv", "batch/sample.csv")
    with pytest.raises(ScoreLogError, match="another draw's or table's"):
        certify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[6].update(answer="changed"), r"1 row was changed .*, the first is row 7 \(columns answer\)"),
        (lambda rows: rows[6].update(confidence=0.123), r"the first is row 7 \(columns confidence\)"),
        (lambda rows: rows.pop(), "there are 399 rows, and there were 400"),
        (lambda rows: rows[0].update(id="other"), "columns id"),
    ],
)  # fmt: skip
def test_a_changed_table_is_refused_with_what_changed(change, message):
    rows = without_truth(table_of())
    drawn(rows)
    change(rows)
    write_rows("answers.csv", rows)
    with pytest.raises(ScoreLogError, match=message):
        open_batch("batch")


@pytest.mark.parametrize("field", ["error", "confidence", "sample", "draw", "promised"])
def test_terms_that_were_changed_after_the_draw_are_refused(field):
    drawn(without_truth(table_of()))
    terms = json.loads(Path("batch/batch.json").read_text())
    terms[field] *= 2
    Path("batch/batch.json").write_text(json.dumps(terms))
    with pytest.raises(CertificateError, match=r"batch\.json: was changed after the draw; restore it"):
        open_batch("batch")
    with pytest.raises(CertificateError, match="drawn with another secret"):
        open_batch("batch", secret=SECRET)


def test_a_batch_that_was_drawn_before_a_rotation_of_the_secret_goes_on(monkeypatch):
    rows = table_of()
    before = drawn(rows).rows.tolist()
    monkeypatch.setenv("ARBITRAGE_SECRET", "a-later-secret-of-these-tests,a-secret-of-these-tests")
    assert open_batch("batch").rows.tolist() == before
    certificate = certify()
    assert certificate.rule.kept > 0
    assert verify(certificate, read_labels("batch"))


def test_a_folder_keeps_its_draw():
    rows = without_truth(table_of())
    drawn(rows)
    before = {path.name: path.read_bytes() for path in Path("batch").iterdir()}
    with pytest.raises(ArbitrageError, match="holds another draw"):
        drawn(rows, sample=120)
    assert {path.name: path.read_bytes() for path in Path("batch").iterdir()} == before


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["--truth-column", "answer"], "'answer' is named for answer and truth"),
        (["--truth-column", "confidence"], "'confidence' is named for confidence and truth"),
        (["--id-column", "truth", "--truth-column", "truth"], "'truth' is named for truth and id"),
    ],
)
def test_a_column_with_two_roles_is_refused(named, message):
    write_rows("answers.csv", table_of())
    draw = ("batch", "draw", "answers.csv", "--error", "10%", "--sample", "50", "-o", "batch")
    assert message in " ".join(run(*draw, *named, status=2).stderr.split())
    assert not Path("batch").exists()


@pytest.mark.parametrize("name", ["row", "Row", "expert", "right", "by"])
def test_ids_that_are_called_as_a_column_that_is_written_are_refused(name):
    rows = [{name: row["id"], **{k: cell for k, cell in row.items() if k != "id"}} for row in table_of()]
    with pytest.raises(OptionError, match="a column of that name is written"):
        draw_batch(write_rows("answers.csv", rows), error=0.1, sample=50, columns=BatchColumns(id=name))


def test_columns_of_the_table_that_are_called_as_those_of_experts_are_not_shown():
    rows = [{**row, "Expert": "me", "RIGHT": "no"} for row in without_truth(table_of())]
    drawn(rows)
    assert set(read_rows("batch/sample.csv")[0]) == {"row", "id", "text", "expert"}
    label("batch/sample.csv", table_of())
    assert certify().evidence.missing_guardian_rows == 0


def test_a_draw_that_fails_is_none_and_leaves_nothing():
    rows = without_truth(table_of())
    others = [{**row, "id": f"other-{k}"} for k, row in enumerate(without_truth(table_of(seed=3)))]
    drawn(others, folder="taken", table="taken.csv")
    write_rows("answers.csv", rows)
    draw = ["batch", "draw", "answers.csv", "--error", "10%"]
    for size, more in enumerate(
        (
            ["-o", "taken"],
            ["-o", "answers.csv/inside"],
            ["-o", "new", "--review", "people"],
            ["-o", "n", "--label", "x"],
        )
    ):
        run(*draw, "--sample", str(50 + size), *more, status=2)
    assert {path.name for path in Path().iterdir()} == {"taken", "taken.csv", "answers.csv", "config"}
    assert json.loads(run(*draw, "--sample", "100", "-o", "batch", "--json").stdout)["draw"] == 1


@pytest.mark.parametrize(("right", "expert"), [("yes", "other"), ("no", "the same")])
def test_a_verdict_that_contradicts_itself_is_refused(right, expert):
    rows = table_of()
    answers = {row["id"]: row["answer"] for row in rows}
    drawn(without_truth(rows))
    label("batch/sample.csv", rows)
    said = [{**row, "right": ""} for row in read_rows("batch/sample.csv")]
    said[7] |= {"right": right, "expert": answers[said[7]["id"]].upper() if expert == "the same" else expert}
    write_rows("batch/sample.csv", said)
    with pytest.raises(ScoreLogError, match=rf"sample\.csv: {said[7]['id']} has [01] in column 'right'.*'expert'.*'s;"):
        certify()


@pytest.mark.parametrize("truth", [True, False], ids=["truth in the table", "experts"])
def test_labels_that_differ_in_case_alone_are_different_labels(truth):
    rows = table_of(labels=("us", "US", "them"))
    drawn(rows if truth else without_truth(rows))
    label("batch/sample.csv", rows)
    wrong = open_batch("batch").read_sample("batch")[1]
    by_id = {row["id"]: row for row in rows}
    sampled = [by_id[row["id"]] for row in read_rows("batch/sample.csv")]
    assert wrong.tolist() == [float(row["answer"] != row["truth"]) for row in sampled]
    assert any(row["answer"].lower() == row["truth"].lower() != row["answer"] for row in sampled)
    certificate = certify()
    label("batch/todo.csv", rows)
    open_batch("batch").finish("batch", certificate)
    delivered = [row for row in read_rows("batch/labels.csv") if row["by"] == "expert"]
    assert all(row["label"] == by_id[row["id"]]["truth"] for row in delivered)


def test_case_and_white_space_do_not_matter_where_they_tell_no_labels_apart():
    rows = table_of(labels=("yes", "not  sure"))
    for row in rows:
        row["truth"] = f" {row['truth'].upper()}".replace("  ", " ")
    columns = BatchColumns(id="id", truth="truth")
    draw_batch(write_rows("answers.csv", rows), error=0.1, sample=100, columns=columns).write("batch")
    certificate = certify()
    assert certificate.evidence.empirical_risk < 0.5
    counts = open_batch("batch").finish("batch", certificate)
    assert counts["undecided"] == 0
    assert {row["label"] for row in read_rows("batch/labels.csv")} == {"yes", "not  sure"}


def test_verdicts_that_are_written_otherwise_than_all_labels_are_named():
    rows = [{**row, "truth": f"{row['truth']}.0"} for row in table_of(labels=("0", "1"))]
    write_rows("answers.csv", rows)
    run("batch", "draw", "answers.csv", "--error", "10%", "--sample", "100", "-o", "batch")
    told = " ".join(run("batch", "certify", "batch").stderr.split())
    assert "no verdict is a label that the machine ever gives" in told
    assert re.search(r"'[01]\.0' is not '[01]'; if they mean the same", told)


# --- Draws from the same items ---


def test_a_second_draw_is_recognised_though_cells_were_edited():
    rows = without_truth(table_of())
    first = drawn(rows)
    assert (first.terms.draw, first.terms.promised) == (1, 0.95)
    rows[0]["text"] = "edited"
    rows[1]["confidence"] = 0.5
    second = drawn(rows, folder="second", table="second.csv")
    assert (second.terms.draw, second.terms.promised) == (2, 0.9)
    assert not np.array_equal(first.rows, second.rows)
    renamed = [{**row, "id": f"other-{k}"} for k, row in enumerate(rows)]
    third = drawn(renamed[::-1], folder="third", table="third.csv", confidence=0.9)
    assert (third.terms.draw, third.terms.promised) == (3, 0.8)
    assert "the 2 earlier" in third.certify(np.zeros(100)).guarantee


@pytest.mark.parametrize("numbers", [False, True], ids=["texts", "numbers"])
@pytest.mark.parametrize("edited", [False, True], ids=["as it was", "edited"])
@pytest.mark.parametrize(
    "named",
    [{"id": "key"}, {"id": None}, {"confidence": "sure"}, {"id": "key", "confidence": "sure", "truth": "truth"}],
    ids=lambda named: ",".join(named),
)
def test_a_second_draw_is_recognised_whichever_columns_are_named(named, edited, numbers):
    rows = [
        {
            "id": k if numbers else f"item-{k}",
            "key": 7000 + k if numbers else f"key-{k}",
            **{name: cell for name, cell in row.items() if name not in ("id", "text")},
            "sure": round(row["confidence"] / 2, 3),
        }
        for k, row in enumerate(table_of())
    ]
    drawn(rows)
    if edited:
        for k, row in enumerate(rows):
            row |= {"confidence": round(row["confidence"] * 0.9, 4), "key": row["key"] if k % 3 else f"other-{k}"}
    columns = BatchColumns(**{"id": "id", **named})
    second = draw_batch(write_rows("second.csv", rows), error=0.1, sample=90, columns=columns)
    assert (second.terms.draw, second.terms.promised) == (2, 0.9)


def test_a_second_draw_of_labels_and_confidences_alone_is_recognised():
    rows = [{**row, "sure": round(row["confidence"] / 2 + k / 9973, 4)} for k, row in enumerate(table_of())]
    rows = [{name: row[name] for name in ("answer", "confidence", "sure")} for row in rows]
    write_rows("answers.csv", rows)
    for number, name in enumerate(("confidence", "sure"), 1):
        columns = BatchColumns(confidence=name)
        assert draw_batch("answers.csv", error=0.1, sample=90, columns=columns).terms.draw == number


def test_other_items_with_like_columns_begin_anew():
    rng = np.random.default_rng(6)
    places = [f"place {k}" for k in range(150)]
    for pile in range(3):
        rows = [
            {"index": k, **row, "id": f"{pile}-{k}", "place": str(rng.choice(places)), "share": "87 %"}
            for k, row in enumerate(table_of(100, seed=20 + pile))
        ]
        assert drawn(rows, sample=50, folder=f"batch-{pile}", table=f"{pile}.csv").terms.draw == 1


def test_the_same_draw_again_has_the_same_sample_and_other_items_begin_anew():
    rows = without_truth(table_of())
    first, again = drawn(rows), drawn(rows)
    assert np.array_equal(first.rows, again.rows)
    assert again.terms.draw == 1
    other = [{**row, "id": f"b-{k}"} for k, row in enumerate(without_truth(table_of(seed=9)))]
    assert drawn(other, folder="other", table="other.csv").terms.draw == 1


def test_the_same_rows_in_another_order_are_the_same_draw_if_they_have_ids():
    rows = without_truth(table_of())
    first = drawn(rows)
    label("batch/sample.csv", table_of())
    certificate = certify()
    turned = drawn(rows[::-1], folder="turned", table="turned.csv")
    assert turned.terms.draw == 1
    assert [rows[row]["id"] for row in first.rows] == [rows[::-1][row]["id"] for row in turned.rows]
    write_rows("answers.csv", rows[::-1])
    again = certify()
    assert (again.rule, again.evidence) == (certificate.rule, certificate.evidence)
    label("batch/todo.csv", table_of())
    assert certify().rule == certificate.rule
    assert {row["expert"] for row in read_rows("batch/todo.csv")} <= {"yes", "no", "perhaps"}


def test_rows_without_ids_in_another_order_are_another_draw_and_another_table():
    rows = [{name: cell for name, cell in row.items() if name != "id"} for row in without_truth(table_of())]
    draw_batch(write_rows("answers.csv", rows), error=0.1, sample=100).write("batch")
    turned = draw_batch(write_rows("turned.csv", rows[::-1]), error=0.1, sample=100)
    assert (turned.terms.draw, turned.terms.promised) == (2, 0.9)
    write_rows("answers.csv", rows[::-1])
    with pytest.raises(ScoreLogError, match="in another order"):
        open_batch("batch")


def test_too_many_draws_promise_nothing():
    rows = without_truth(table_of())
    for k in range(3):
        drawn(rows, sample=100 + k, folder=f"batch-{k}", confidence=0.7)
    with pytest.raises(OptionError, match=r"draw 4 from these items.*nothing is promised"):
        drawn(rows, sample=110, folder="last", confidence=0.7)


# --- Frames, folders, plans ---


def test_a_frame_is_drawn_from_and_certified():
    rows = table_of()
    batch = draw_batch(polars.DataFrame(without_truth(rows)), error=0.1, sample=100)
    wrong = [rows[row]["answer"] != rows[row]["truth"] for row in batch.rows.tolist()]
    certificate = batch.certify(wrong)
    assert verify(certificate, batch.labels(wrong)).ok


def test_a_folder_of_parquet_files_is_one_table():
    rows = without_truth(table_of())
    Path("parts").mkdir()
    for k in range(4):
        polars.DataFrame(rows[100 * k : 100 * (k + 1)]).write_parquet(f"parts/part-{k}.parquet")
    batch = draw_batch("parts", error=0.1, sample=100, columns=COLUMNS)
    batch.write("batch")
    assert all(rows[int(row["row"]) - 1]["id"] == row["id"] for row in read_rows("batch/sample.csv"))
    certificate = certify()
    assert len(read_rows("batch/kept.csv")) == certificate.rule.kept


def test_a_plan_shows_what_samples_may_save():
    plan = plan_batch(polars.DataFrame(table_of(2000)), error=0.05, samples=[20, 100, 200, 2000])
    shares = {row.sample: row.saved for row in plan.rows}
    assert plan.best in shares
    assert shares[2000] == 0
    assert plan.rows[0].limit == -1
    assert plan_batch(polars.DataFrame(table_of(2000)), error=0).best is None
    assert all(row.saved_if_twice <= row.saved for row in plan.rows)
    with pytest.raises(OptionError, match=r"write 87 as 87% or 0\.87"):
        plan_batch(polars.DataFrame([{**row, "confidence": 87.0} for row in table_of(50)]), error=0.05)


# --- The command line ---


def run(*arguments, status=0):
    from click.testing import CliRunner

    shown = CliRunner().invoke(cli, list(arguments))
    assert shown.exit_code == status, shown.output
    return shown


def test_the_commands_go_from_a_table_to_all_labels():
    rows = table_of()
    write_rows("answers.csv", rows)
    assert "saves most" in run("batch", "plan", "answers.csv", "--error", "10%").stdout
    draw = ("batch", "draw", "answers.csv", "--error", "10%", "-o", "batch")
    assert "`arbitrage batch plan answers.csv --error 0.1` shows which" in run(*draw, status=2).stderr
    assert "sample.csv. Fill in its column `expert` where it is empty" in run(*draw, "--sample", "100").stdout.replace(
        "\n", " "
    )
    certified = run("batch", "certify", "batch")
    assert "Promise: with probability 0.95 at most 40" in certified.stdout
    assert "labels of the machine" in run("batch", "finish", "batch").stdout
    assert "holds" in run("verify", "batch/certificate.json", "answers.csv").stdout
    assert "Nothing is assumed" in run("certificate", "show", "batch/certificate.json", "--full").stdout
    for command in (["assess"], ["apply"]):
        assert run(*command, "batch/certificate.json", "answers.csv", status=2)


def test_labels_that_the_table_never_has_are_named_and_count_as_wrong():
    rows = table_of()
    write_rows("answers.csv", without_truth(rows))
    run("batch", "draw", "answers.csv", "--error", "10%", "--sample", "100", "-o", "batch")
    slips = ["dunno", "dunno", "n/a", "?", "YES"]
    label(
        "batch/sample.csv",
        rows,
        lambda filled: [{**r, "expert": s} for r, s in zip(filled, slips, strict=False)] + filled[5:],
    )
    told = run("batch", "certify", "batch").stderr
    assert "3 verdicts are labels that the table never has, and count as wrong: 'dunno' (2), 'n/a' (1); if" in told
    batch = open_batch("batch")
    assert batch.read_sample("batch")[1][:3].tolist() == [1, 1, 1]
    assert not batch.unknown_labels(["later"], known=["Later"])
    label("batch/todo.csv", rows, lambda filled: [{**row, "expert": "hmm"} for row in filled])
    told = run("batch", "finish", "batch").stderr
    assert "the table never has, and are written as they are: 'hmm' (" in told
    assert "correct them in sample.csv and todo.csv" in told
    by_expert = {row["label"] for row in read_rows("batch/labels.csv") if row["by"] == "expert"}
    assert by_expert == {"yes", "no", "perhaps", "hmm", "dunno", "n/a"}, "YES is spelled as the machine spells it"


def test_labels_of_free_text_are_not_compared_with_the_tables():
    write_rows("answers.csv", [{**row, "answer": f"Because of {row['id']}."} for row in without_truth(table_of())])
    batch = draw_batch("answers.csv", error=0.1, sample=100, columns=COLUMNS)
    assert not batch.unknown_labels(["no reason at all"])


def test_a_plan_in_which_nothing_is_saved_says_so():
    write_rows("answers.csv", table_of())
    assert "None of these sizes saves any label." in run("batch", "plan", "answers.csv", "--error", "0%").stdout


def test_the_command_draws_for_graded_losses():
    write_rows("answers.csv", without_truth(table_of()))
    shown = run("batch", "draw", "answers.csv", "--error", "10%", "--sample", "100", "--graded", "-o", "batch")
    assert "0.1 of all items lost by labels that are kept" in shown.stdout
    assert json.loads(Path("batch/batch.json").read_text())["graded"]


def test_the_commands_print_json_and_name_a_second_draw():
    write_rows("answers.csv", without_truth(table_of()))
    first = ["batch", "draw", "answers.csv", "--error", "0.1", "--json"]
    assert json.loads(run(*first, "--sample", "100", "-o", "batch").stdout)["draw"] == 1
    assert "this is draw 2" in run(*first[:-1], "--sample", "90", "-o", "second").stderr
    assert json.loads(run("batch", "plan", "answers.csv", "--error", "0.1", "--json").stdout)["items"] == 400
    told = run("batch", "certify", "batch").stdout
    assert "Fill in column `expert` of batch/sample.csv; then run" in told
    assert "todo.csv" not in told
    document = json.loads(run("batch", "certify", "batch", "--json").stdout)
    assert len(document["without_verdict"]) == 100
    assert document["promise"]["type"] == "batch"
    run("batch", "finish", "batch", status=2)
    run("batch", "certify", "nowhere", status=2)


# --- A pilot ---


def machine_table(n=3000, seed=4):
    """Return rows of a machine that is overconfident in one of its answers, which a pilot shows."""
    rng, rows = np.random.default_rng(seed), []
    for k in range(n):
        truth, confidence = str(rng.choice(["a", "b", "c"])), round(float(rng.uniform(0.5, 1)), 3)
        right = rng.random() < (0.6 if (said := str(rng.choice(["a", "b", "c"]))) == "c" else 0.6 + 0.4 * confidence)
        truth = said if right else next(label for label in "abc" if label != said)
        group = "left" if k % 3 else "right"
        rows.append({"id": f"i{k}", "group": group, "answer": said, "confidence": confidence, "truth": truth})
    return rows


PILOTED = BatchColumns(id="id", truth="truth")


def piloted(rows, folder="batch", pilot=200, sample=700, columns=PILOTED, error=0.06):
    batch = draw_batch(write_rows("answers.csv", rows), error=error, sample=sample, pilot=pilot, columns=columns)
    batch.write(folder)
    return batch


def test_a_pilot_trains_a_score_and_does_not_certify():
    rows = machine_table()
    batch = piloted(rows)
    assert (batch.terms.pilot, batch.draw.pilot) == (200, 200)
    certificate = certify()
    promise = certificate.promise
    assert promise.limit == batch_limit(3000 - 200, 180, 500, 0.05) != batch_limit(3000, 180, 700, 0.05)
    assert certificate.rule.learned == ("confidence", "answer")
    assert "The first 200 of the drawn items" in certificate.guarantee
    plain = draw_batch("answers.csv", error=0.06, sample=700, columns=PILOTED)
    plain.write("plain")
    assert certificate.rule.kept > certify("plain").rule.kept  # the answer tells what the confidence does not
    counts = open_batch("batch").finish("batch", certificate)
    assert counts["expert"] == 3000 - certificate.rule.kept
    assert verify(Certificate.load("batch/certificate.json"), read_labels("batch")).ok
    kept = {row["id"] for row in read_rows("batch/kept.csv")}
    assert not kept & {rows[row]["id"] for row in batch.rows.tolist()}


def batch_limit(items, allowed, sample, level):
    from fractions import Fraction

    from conformal_arbitrage.core.bounds import hypergeometric_limit

    return hypergeometric_limit(items, allowed, sample, Fraction(str(level)))


def test_the_score_depends_on_the_labels_of_the_pilot_alone():
    batch = piloted(machine_table())
    wrong = batch.read_sample("batch")[1]
    others = wrong.copy()
    others[200:] = 1 - others[200:]
    assert np.array_equal(batch.labels(wrong).risk, batch.labels(others).risk)
    own = wrong.copy()
    own[:200] = 1 - own[:200]
    assert not np.array_equal(batch.labels(wrong).risk, batch.labels(own).risk)


def test_groups_and_texts_teach_and_are_fixed_by_the_draw():
    rows = machine_table(1500)
    for row in rows:
        wrong = row["answer"] != row["truth"]
        row["group"], row["text"] = ("left", "about ships") if wrong else ("right", "about cats")
    columns = BatchColumns(id="id", truth="truth", group="group", text="text")
    piloted(rows, columns=columns, sample=400)
    certificate = certify()
    assert {"group", "text"} <= set(certificate.rule.learned)
    assert verify(Certificate.load("batch/certificate.json"), read_labels("batch")).ok
    rows[3]["text"] = "about dogs"
    write_rows("answers.csv", rows)
    with pytest.raises(ScoreLogError, match=r"1 row was changed .*, the first is row 4 \(columns text\)"):
        open_batch("batch")


def test_a_pilot_is_labelled_as_a_whole_before_anything_is_certified():
    rows = machine_table(1000)
    piloted(rows, columns=BatchColumns(id="id"))
    label("batch/sample.csv", rows, lambda filled: [*filled[:199], {**filled[199], "expert": ""}, *filled[200:]])
    with pytest.raises(ScoreLogError, match="1 of the first 200 items, the pilot, have no label yet"):
        certify()
    label("batch/sample.csv", rows, lambda filled: [*filled[:200], *({**row, "expert": ""} for row in filled[200:])])
    assert certify().evidence.missing_guardian_rows == 500


def test_verdicts_on_a_pilot_are_fixed_by_the_first_certificate():
    rows = machine_table(1000)
    piloted(rows, columns=BatchColumns(id="id"))
    label("batch/sample.csv", rows, lambda filled: [{**filled[0], "expert": "?"}, *filled[1:]])
    first = certify()
    fine = Path("batch/sample.csv").read_bytes()
    for change in ("a", "?"):
        pilot = [{**row, "expert": change} for row in read_rows("batch/sample.csv")[:200]]
        write_rows("batch/sample.csv", [*pilot, *read_rows("batch/sample.csv")[200:]])
        for again in (certify, lambda: open_batch("batch").finish("batch", first)):
            with pytest.raises(
                ScoreLogError, match="the first 200 items, the pilot, were changed after the first cert"
            ):
                again()
        Path("batch/sample.csv").write_bytes(fine)
    terms = json.loads(Path("batch/batch.json").read_text())
    Path("batch/batch.json").write_text(json.dumps(terms | {"pilot_verdicts": None}))
    with pytest.raises(CertificateError, match="changed after the draw"):
        open_batch("batch")
    Path("batch/batch.json").write_text(json.dumps(terms))
    piloted(rows, columns=BatchColumns(id="id"))  # the same draw again
    assert json.loads(Path("batch/batch.json").read_text()) == terms
    piloted(rows, columns=BatchColumns(id="id"), folder="again")  # and in another folder
    label("again/sample.csv", rows)
    with pytest.raises(ScoreLogError, match="the pilot, were changed after the first cert"):
        certify("again")
    Path("again/sample.csv").write_bytes(fine)
    assert certify("again").rule == first.rule
    shown = run("batch", "certify", "batch")
    assert "no verdict" not in shown.stderr, "a pilot's ? counts for nothing, and is there to stay"
    assert certify().rule == first.rule


def test_a_pilot_without_wrong_labels_leaves_the_stated_order():
    rows = machine_table(1000)
    for row in rows:
        row["truth"] = row["answer"]
    batch = piloted(rows)
    certificate = certify()
    assert certificate.rule.learned == ()
    assert np.array_equal(batch.labels(batch.read_sample("batch")[1]).risk, batch.items.risk)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pilot": 700}, "the pilot must be 0 to 699 of the 700 items"),
        ({"pilot": -1}, "the pilot must be"),
        ({"pilot": 0, "columns": BatchColumns(id="id", group="group")}, "for the score that a pilot trains"),
    ],
)
def test_a_pilot_of_no_use_is_refused(change, message):
    with pytest.raises(OptionError, match=message):
        piloted(machine_table(1000), **change)
    assert not Path("batch").exists()


def test_a_pilot_fixed_after_the_draw_is_another_draw():
    rows = machine_table(1000)
    piloted(rows)
    terms = json.loads(Path("batch/batch.json").read_text())
    Path("batch/batch.json").write_text(json.dumps(terms | {"pilot": 100}))
    with pytest.raises(CertificateError, match="changed after the draw"):
        open_batch("batch")
    assert piloted(rows, folder="other", pilot=100).terms.draw == 2


def test_the_commands_take_a_pilot():
    write_rows("answers.csv", machine_table(1500))
    plan = json.loads(
        run("batch", "plan", "answers.csv", "--error", "6%", "--sample", "400", "--pilot", "150", "--json").stdout
    )
    plain = json.loads(run("batch", "plan", "answers.csv", "--error", "6%", "--sample", "400", "--json").stdout)
    assert plan["rows"][0]["limit"] < plain["rows"][0]["limit"]
    draw = ["batch", "draw", "answers.csv", "--error", "6%", "--sample", "400", "-o", "batch"]
    assert "the first 150 items" in run(*draw, "--pilot", "150", "--group-column", "group").stdout
    assert "learned from confidence" in run("batch", "certify", "batch").stdout
    run("batch", "finish", "batch")
    run("verify", "batch/certificate.json", "answers.csv")
    assert "--pilot" not in run(*draw[:-1], "other", "--pilot", "400", status=2).stdout
