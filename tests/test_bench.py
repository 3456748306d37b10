"""The public bench: it takes any table of its two forms, judges promises alike, and its page is that of its results."""

import csv
import re
from math import sqrt

import duckdb
import msgspec
import numpy as np
import pytest
from benchmarks import promises
from benchmarks.promises import DATA, DOCS, PAGE, Result, Row


def write_table(path, columns):
    """Write columns as CSV, or by way of it as Parquet."""
    text = path.with_suffix(".csv")
    with text.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    if text != path:
        duckdb.sql(f"copy (from '{text}') to '{path}' (format parquet)")
        text.unlink()


def write_items(path, n=400, seed=0):
    """Write items with a machine's labels, of which the less confident are more often wrong."""
    rng = np.random.default_rng(seed)
    sure = rng.integers(10, 101, n) / 100
    truth = rng.choice(["cat", "dog"], n)
    right = rng.random(n) < sure
    answer = np.where(right, truth, np.where(truth == "cat", "dog", "cat"))
    columns = {
        "id": [f"i{k}" for k in range(n)],
        "answer": answer.tolist(),
        "confidence": sure,
        "truth": truth.tolist(),
    }
    write_table(path, columns)


def write_services(path, n=800, seed=0):
    """Write what a cheap, a middle and a good service said; the cheap one is seldom right when it says 2."""
    rng = np.random.default_rng(seed)
    truth, columns = rng.integers(0, 3, n), {"id": [f"s{k}" for k in range(n)]}
    for name, skill, cost in (("cheap", 0.6, 0.1), ("middle", 0.7, 4.0), ("good", 0.9, 10.0)):
        sure = np.round(rng.random(n), 2)
        right = rng.random(n) < skill + 0.2 * (sure - 0.5)
        answer = np.where(right, truth, (truth + 1) % 3)
        columns |= {f"{name}_answer": answer, f"{name}_confidence": sure, f"{name}_cost": np.full(n, cost)}
        columns[f"{name}_right"] = (answer == truth).astype(int)
    write_table(path, columns | {"truth": truth})


def write_curves(path, best):
    """Write two published runs, in which 2 dollars more buy a point of accuracy, up to one above the best service's."""
    rows = [
        (seed, cost, best - 0.04 + cost / 200 + shift) for seed, shift in ((1, 0.0), (2, 0.01)) for cost in range(9)
    ]
    seeds, costs, accuracies = (list(column) for column in zip(*rows, strict=True))
    write_table(path, {"method": ["FrugalML"] * len(rows), "seed": seeds, "cost": costs, "accuracy": accuracies})


def test_items_with_machine_labels_give_a_row_for_each_rule(tmp_path):
    write_items(tmp_path / "pets.csv")
    ((kind, path, curves),) = promises.found(tmp_path)
    assert (kind, curves) == ("batch", None)
    result = promises.batch_result("pets", path, draws=4)
    assert (result.items, result.sample) == (400, 200)
    assert [(row.rule, row.promise) for row in result.rows] == [
        (promises.NAIVE, None),
        *((rule, "confident") for rule in (promises.PAC, promises.CONFIDENT, promises.BATCH, promises.PILOT)),
    ]
    assert all(row.trials == 4 and 0.4 < row.asked <= 1 and row.loss < 0.1 for row in result.rows)
    assert "### pets: 400 items, 200 drawn" in promises.page([result])


def test_published_costs_are_read_where_the_accuracy_is_the_best_service_s_minus_alpha(tmp_path):
    write_curves(tmp_path / "faces-published-curves.parquet", best=0.9)
    rows = list(promises.published(tmp_path / "faces-published-curves.parquet", 0.9))
    assert {row.rule for row in rows} == {"FrugalML, as published"}
    assert [row.cost for row in rows] == pytest.approx(
        [8 - 200 * float(alpha) - 1 for alpha in promises.ALPHAS[:4]] + [0.0]
    )
    assert all(row.promise is None and row.kept is None and row.trials == 0 for row in rows)


def test_a_promise_is_kept_within_three_standard_errors():
    def average(loss):
        return Row(rule="", promise="average", alpha=0.05, trials=200, loss=loss, loss_error=0.001).kept

    def confident(over):
        return Row(rule="", promise="confident", alpha=0.05, trials=300, loss=0.04, over=over).kept

    assert [average(loss) for loss in (0.053, 0.0531)] == [True, False]
    assert [confident(over) for over in (0.0877, 0.0878)] == [True, False]
    assert Row(rule="", promise=None, alpha=0.05, trials=9, loss=0.9).kept is None


def test_other_tables_are_left_alone(tmp_path):
    write_table(tmp_path / "log.parquet", {"id": ["a", "b"], "confidence": [0.5, 0.6], "grade": [1, 0]})
    (tmp_path / "README.md").write_text("nothing to measure\n")
    assert list(promises.found(tmp_path)) == []


def recorded():
    return msgspec.json.decode((DOCS / "bench.json").read_bytes(), type=list[Result])


def test_the_page_is_that_of_the_recorded_results():
    assert (DOCS / PAGE).read_text() == promises.page(recorded())


def test_every_promise_of_ours_was_kept_and_batches_save_more_than_the_published_rule():
    results = {result.table: {(row.rule, row.alpha): row for row in result.rows} for result in recorded()}
    least = {"pac-stance": 0.302, "pac-imagenet": 0.609}
    for table, rows in results.items():
        assert all(row.kept is not False for row in rows.values()), table
        if table in least:
            ours, theirs = (1 - rows[rule, 0.05].asked for rule in (promises.BATCH, promises.PAC))
            assert ours >= max(least[table], theirs)
    assert set(least) <= set(results)


def test_every_table_that_is_shipped_has_a_source_and_a_licence():
    text = (DATA / "README.md").read_text()
    lines = {match[1]: match[0] for match in re.finditer(r"^\| (\S+\.parquet) \|.*$", text, re.MULTILINE)}
    assert set(lines) == {path.name for path in DATA.glob("*.parquet")}
    assert all("MIT" in line or "Apache-2.0" in line or "the same" in line for line in lines.values())


# --- Longer ---


@pytest.mark.proof
def test_services_with_prices_are_measured_at_every_budget_and_written_to_the_page(tmp_path, capsys):
    data, docs = tmp_path / "data", tmp_path / "docs"
    data.mkdir()
    docs.mkdir()
    write_items(data / "pets.parquet")
    write_services(data / "faces.parquet")
    write_curves(data / "faces-published-curves.parquet", best=0.9)
    assert promises.main([str(data), "--draws", "3", "--splits", "3", "--docs", str(docs), "--json"]) == 0
    results = msgspec.json.decode(capsys.readouterr().out, type=list[Result])
    assert results == msgspec.json.decode((docs / "bench.json").read_bytes(), type=list[Result])
    (faces,) = (result for result in results if result.kind == "services")
    assert re.search("^cheap .* before good ", faces.about)
    rules = [promises.SAME_ROWS, promises.MARGIN, promises.LEARNED, promises.BOOSTED, promises.CASCADE]
    assert list(dict.fromkeys(row.rule for row in faces.rows)) == ["FrugalML, as published", *rules]
    for row in faces.rows[5:]:
        assert row.promise == (None if row.rule == promises.SAME_ROWS else "average")
        if row.rule != promises.CASCADE:
            assert row.cost == pytest.approx(0.1 + 10 * row.asked)
    assert {path.name for path in docs.iterdir()} == {
        "bench.md", "bench.json", "bench-batches.png", "bench-cascades.png", "bench-pairs.png",
    }  # fmt: skip
    (docs / "bench.md").unlink()
    assert promises.main([str(data), "--draws", "2", "--table", "pets", "--docs", str(docs)]) == 0
    assert "### faces: 800 items" in (docs / "bench.md").read_text(), "the page keeps what it has of other tables"


@pytest.mark.proof
def test_a_table_without_anything_to_save_is_named_and_the_others_are_measured(tmp_path, capsys):
    write_items(tmp_path / "pets.parquet")
    (tmp_path / "docs").mkdir()
    columns = {f"{name}_{what}": [value] * 40 for name in "ab" for what, value in (("answer", 1), ("confidence", 0.5))}
    costs = {"a_cost": [1.0] * 40, "b_cost": [2.0] * 40}
    write_table(tmp_path / "same.parquet", columns | costs | {"id": [f"{k}" for k in range(40)], "truth": [1] * 40})
    assert promises.main([str(tmp_path), "--draws", "2", "--splits", "2", "--docs", str(tmp_path / "docs")]) == 1
    assert "the cheapest service, a, is the most accurate" in capsys.readouterr().err
    assert "### pets" in (tmp_path / "docs" / "bench.md").read_text()


@pytest.mark.proof
def test_the_recorded_figures_of_a_shipped_table_are_repeated():
    (stance,) = (result for result in recorded() if result.table == "pac-stance")
    assert promises.batch_result("pac-stance", DATA / "pac-stance.parquet", promises.DRAWS) == stance


@pytest.mark.proof
def test_the_rule_of_pac_labels_keeps_its_level_and_one_without_a_margin_does_not():
    """A peer has to be given its due: 20 items in 400 may be wrong, and the 40 most confident of them are."""
    draws, items, sample, failed = 2000, 4000, 400, np.zeros(2)
    rng, risk = np.random.default_rng(5), np.arange(items) / items
    wrong = (risk < 0.1).astype(float)
    for _ in range(draws):
        rows = rng.integers(items, size=sample)
        cutoffs = promises.pac_cutoff(risk[rows], wrong[rows]), promises.naive_cutoff(risk[rows], wrong[rows])
        failed += [wrong[risk < cutoff].sum() > promises.ERROR * items for cutoff in cutoffs]
    limit = promises.LEVEL + 3 * sqrt(promises.LEVEL * (1 - promises.LEVEL) / draws)
    assert failed[0] / draws <= limit < failed[1] / draws
